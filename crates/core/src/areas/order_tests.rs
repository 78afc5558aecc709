//! Tests the order of areas against a naive model: one sorted `Vec` for each node, and the kernel's rules for
//! numbering, followed literally.

use super::*;
use proptest::prelude::*;

const NODES: usize = 4;

/// One area of the model. Its numbers are stored and changed, not derived.
#[derive(Clone, Debug)]
struct Plain {
    area: u8,
    priority: i32,
    is_automatic: bool,
    node: Option<u8>,
    has_free_space: bool,
}

/// The rules, as the kernel's documentation states them.
struct Model {
    policy: AreaOrder,
    /// The lowest priority that was given automatically.
    least: i32,
    on: Vec<Plain>,
    leaving: Option<Plain>,
    /// For each node: key and area, sorted by key. Equals are in the order in which they came.
    lists: Vec<Vec<(i32, u8)>>,
}

impl Model {
    fn new(policy: AreaOrder) -> Model {
        let least = if policy == AreaOrder::Global { 0 } else { -1 };
        Model { policy, least, on: Vec::new(), leaving: None, lists: vec![Vec::new(); NODES] }
    }

    fn counts_down(&self) -> bool {
        matches!(self.policy, AreaOrder::Global | AreaOrder::Numa)
    }

    fn key(&self, plain: &Plain, node: u8) -> i32 {
        let promoted = self.policy == AreaOrder::Numa && plain.is_automatic && plain.node == Some(node);
        if promoted { 1 } else { -plain.priority }
    }

    fn enlist(&mut self, plain: &Plain) {
        for node in 0..NODES as u8 {
            let key = self.key(plain, node);
            let list = &mut self.lists[node as usize];
            let at = list.iter().position(|(other, _)| *other > key).unwrap_or(list.len());
            list.insert(at, (key, plain.area));
        }
    }

    fn delist(&mut self, area: u8) {
        self.lists.iter_mut().for_each(|list| list.retain(|(_, other)| *other != area));
    }

    /// Changes the priority of every automatic area with a priority of `from` or less by `by`. The area's key
    /// changes in every list where the area isn't promoted.
    fn shift(&mut self, from: i32, by: i32) {
        if !self.counts_down() {
            return;
        }
        let mut shifted = Vec::new();
        for plain in self.on.iter_mut().filter(|plain| plain.is_automatic && plain.priority <= from) {
            plain.priority += by;
            shifted.push(plain.clone());
        }
        for plain in shifted {
            for node in 0..NODES as u8 {
                let key = self.key(&plain, node);
                let entry = self.lists[node as usize].iter_mut().find(|(_, area)| *area == plain.area);
                entry.into_iter().for_each(|entry| entry.0 = key);
            }
        }
        self.least += by;
    }

    fn on(&mut self, area: u8, priority: Option<i32>, node: Option<u8>) {
        let automatic = if self.counts_down() {
            // Pre-decremented.
            self.least - 1
        } else {
            -1
        };
        if priority.is_none() && self.counts_down() {
            self.least -= 1;
        }
        let is_automatic = priority.is_none();
        let priority = priority.unwrap_or(automatic);
        let plain = Plain { area, priority, is_automatic, node, has_free_space: true };
        self.enlist(&plain);
        self.on.push(plain);
    }

    fn begin_off(&mut self, area: u8) {
        let at = self.on.iter().position(|plain| plain.area == area).unwrap();
        let plain = self.on.remove(at);
        self.delist(area);
        if plain.is_automatic {
            // The later areas move up.
            self.shift(plain.priority - 1, 1);
        }
        self.leaving = Some(plain);
    }

    fn restore(&mut self) {
        let plain = self.leaving.take().unwrap();
        if plain.is_automatic {
            // The later areas move down again.
            self.shift(plain.priority, -1);
        }
        if plain.has_free_space {
            self.enlist(&plain);
        }
        self.on.push(plain);
    }

    fn set_free_space(&mut self, area: u8, has_free_space: bool) {
        let leaving = self.leaving.as_mut().filter(|plain| plain.area == area);
        if let Some(plain) = leaving {
            plain.has_free_space = has_free_space;
            return;
        }
        let Some(plain) = self.on.iter_mut().find(|plain| plain.area == area) else { return };
        let had_free_space = std::mem::replace(&mut plain.has_free_space, has_free_space);
        let plain = plain.clone();
        match (had_free_space, has_free_space) {
            (true, false) => self.delist(area),
            (false, true) => self.enlist(&plain),
            _ => {}
        }
    }

    /// Returns the first area and moves it behind its equals.
    fn choose(&mut self, node: u8) -> Option<u8> {
        let list = &mut self.lists[node as usize];
        let (key, area) = *list.first()?;
        list.remove(0);
        let at = list.iter().position(|(other, _)| *other > key).unwrap_or(list.len());
        list.insert(at, (key, area));
        Some(area)
    }
}

#[derive(Clone, Debug)]
enum Op {
    On(Option<i32>, Option<u8>),
    BeginOff(usize),
    Restore,
    Finish,
    Full(u8),
    Back(u8),
    Choose(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let area = 0..AREAS_MAX as u8;
    prop_oneof![
        4 => (prop::option::of(0_i32..3), prop::option::of(0..NODES as u8)).prop_map(|(p, n)| Op::On(p, n)),
        2 => any::<usize>().prop_map(Op::BeginOff),
        1 => Just(Op::Restore),
        1 => Just(Op::Finish),
        2 => area.clone().prop_map(Op::Full),
        2 => area.prop_map(Op::Back),
        6 => (0..NODES as u8).prop_map(Op::Choose),
    ]
}

fn place(priority: Option<i32>, node: Option<u8>) -> Placement {
    let place =
        priority.map_or(Placement::default(), |priority| Placement::default().with_priority(priority));
    node.map_or(place, |node| place.at(NodeId(node), |_| None))
}

fn step(order: &mut Order, model: &mut Model, op: &Op) {
    match *op {
        Op::On(priority, node) => {
            let is_taken = |area: &u8| model.on.iter().chain(&model.leaving).any(|plain| plain.area == *area);
            if let Some(area) = (0..AREAS_MAX as u8).find(|area| !is_taken(area)) {
                order.on(AreaId(area), place(priority, node));
                model.on(area, priority, node);
            }
        }
        // The model can have only one area that is being taken off.
        Op::BeginOff(which) if model.leaving.is_none() && !model.on.is_empty() => {
            let area = model.on[which % model.on.len()].area;
            order.begin_off(AreaId(area));
            model.begin_off(area);
        }
        Op::Restore if model.leaving.is_some() => {
            order.restore(AreaId(model.leaving.as_ref().unwrap().area));
            model.restore();
        }
        Op::Finish if model.leaving.is_some() => {
            order.finish_off(AreaId(model.leaving.take().unwrap().area));
        }
        Op::BeginOff(_) | Op::Restore | Op::Finish => {}
        Op::Full(area) | Op::Back(area) => {
            let known = model.on.iter().chain(&model.leaving).any(|plain| plain.area == area);
            let has_free_space = matches!(op, Op::Back(_));
            if known {
                model.set_free_space(area, has_free_space);
                if has_free_space { order.back(AreaId(area)) } else { order.full(AreaId(area)) }
            }
        }
        Op::Choose(node) => {
            let chosen = order.choose(NodeId(node), AreaSet::default());
            assert_eq!(chosen.map(|area| area.0), model.choose(node));
            chosen.into_iter().for_each(|area| order.finished(area));
        }
    }
}

fn compare(order: &Order, model: &Model) {
    order.check();
    for plain in &model.on {
        assert_eq!(order.priority(AreaId(plain.area)), Some(plain.priority), "priority of {}", plain.area);
    }
    for node in 0..NODES as u8 {
        let list: Vec<_> = order.of_node(NodeId(node)).map(|(area, key)| (key, area.0)).collect();
        assert_eq!(list, model.lists[node as usize], "the list of node {node}");
    }
}

proptest! {
    #[test]
    fn every_order_by_rule_is_the_naive_one(
        policy in prop::sample::select(vec![AreaOrder::Global, AreaOrder::Numa, AreaOrder::RoundRobin]),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut order = Order::new(policy, NODES);
        let mut model = Model::new(policy);
        for op in &ops {
            step(&mut order, &mut model, op);
            compare(&order, &model);
        }
    }

    /// The order by cost has no simple model. But it chooses among the first equals of the naive list, and it
    /// leaves no usable area out for ever.
    #[test]
    fn order_by_cost_chooses_among_the_first_equals(
        ops in prop::collection::vec(op(), 1..120),
        latencies in prop::collection::vec(1_u64..1 << 40, 1..40),
    ) {
        let mut order = Order::new(AreaOrder::Weighted, NODES);
        let mut model = Model::new(AreaOrder::Weighted);
        let mut latencies = latencies.into_iter().cycle();
        for op in &ops {
            if let Op::Choose(node) = op {
                let list = &model.lists[*node as usize];
                let first: Vec<u8> = list.iter().take_while(|(key, _)| *key == list[0].0).map(|(_, a)| *a).collect();
                let chosen = order.choose(NodeId(*node), AreaSet::default());
                prop_assert_eq!(chosen.is_some(), !first.is_empty());
                let Some(area) = chosen else { continue };
                prop_assert!(first.contains(&area.0));
                order.note_latency(area, RequestTime::Exactly(latencies.next().unwrap()));
                order.note_used(area, latencies.next().unwrap() % 100, 99);
                // As in the order itself, the chosen area moves behind its equals.
                let list = &mut model.lists[*node as usize];
                let entry = list.remove(list.iter().position(|(_, other)| *other == area.0).unwrap());
                let at = list.iter().position(|(other, _)| *other > entry.0).unwrap_or(list.len());
                list.insert(at, entry);
            } else {
                step(&mut order, &mut model, op);
            }
            compare(&order, &model);
        }
        let listed = model.lists[0].iter().filter(|(key, _)| *key == 1).count();
        let users = model.lists[0].len() - listed;
        let mut seen = AreaSet::default();
        if users == 0 {
            for _ in 0..CHOICES_PER_TRIAL as usize * (listed + 1) * 2 {
                let area = order.choose(NodeId(0), AreaSet::default());
                area.into_iter().for_each(|area| { seen.insert(area); order.finished(area); });
            }
            prop_assert!(model.lists[0].iter().all(|(_, area)| seen.contains(AreaId(*area))));
        }
    }
}

fn keys(order: &Order, node: u8) -> Vec<(char, i32)> {
    order.of_node(NodeId(node)).map(|(area, key)| ((b'A' + area.0) as char, key)).collect()
}

fn four_on_four_nodes(policy: AreaOrder) -> Order {
    let mut order = Order::new(policy, 4);
    (0..4).for_each(|area| order.on(AreaId(area), place(None, Some(area))));
    order
}

fn priorities(order: &Order) -> Vec<Option<i32>> {
    (0..5).map(|area| order.priority(AreaId(area))).collect()
}

#[test]
fn invariant_10_automatic_priorities_go_from_minus_2_down_and_an_area_is_1_on_its_own_node() {
    let order = four_on_four_nodes(AreaOrder::Numa);
    assert_eq!(priorities(&order), [Some(-2), Some(-3), Some(-4), Some(-5), None]);
    assert_eq!(keys(&order, 0), [('A', 1), ('B', 3), ('C', 4), ('D', 5)]);
    assert_eq!(keys(&order, 1), [('B', 1), ('A', 2), ('C', 4), ('D', 5)]);
    assert_eq!(keys(&order, 2), [('C', 1), ('A', 2), ('B', 3), ('D', 5)]);
    assert_eq!(keys(&order, 3), [('D', 1), ('A', 2), ('B', 3), ('C', 4)]);
}

#[test]
fn invariant_10_automatic_priorities_are_all_minus_1_in_turn() {
    for policy in [AreaOrder::RoundRobin, AreaOrder::Weighted] {
        let order = four_on_four_nodes(policy);
        assert_eq!(priorities(&order)[..4], [Some(-1); 4]);
        assert_eq!(keys(&order, 2), [('A', 1), ('B', 1), ('C', 1), ('D', 1)]);
    }
    let order = four_on_four_nodes(AreaOrder::Global);
    assert_eq!(priorities(&order), [Some(-1), Some(-2), Some(-3), Some(-4), None]);
}

#[test]
fn invariant_12_area_that_is_emptied_is_gone_and_its_number_is_used_again() {
    let mut order = four_on_four_nodes(AreaOrder::Numa);
    order.begin_off(AreaId(1));
    order.finish_off(AreaId(1));
    assert_eq!(priorities(&order), [Some(-2), None, Some(-3), Some(-4), None]);
    assert_eq!(keys(&order, 3), [('D', 1), ('A', 2), ('C', 3)]);
    order.on(AreaId(4), Placement::default());
    assert_eq!(order.priority(AreaId(4)), Some(-5));
}

#[test]
fn invariant_12_area_that_can_not_be_emptied_is_back_with_its_priority() {
    for policy in AreaOrder::ALL {
        let mut order = four_on_four_nodes(policy);
        let before = priorities(&order);
        order.begin_off(AreaId(1));
        assert!((0..4).all(|node| keys(&order, node).iter().all(|(area, _)| *area != 'B')));
        order.restore(AreaId(1));
        assert_eq!(priorities(&order), before);
        order.check();
    }
}

#[test]
fn users_priorities_come_first_on_every_node_and_equals_take_turns() {
    for policy in AreaOrder::ALL {
        let mut order = Order::new(policy, 2);
        order.on(AreaId(0), place(None, Some(0)));
        order.on(AreaId(1), place(Some(5), Some(1)));
        order.on(AreaId(2), place(Some(5), Some(1)));
        order.on(AreaId(3), place(Some(0), Some(1)));
        for node in [0, 1] {
            let mut chosen = || order.choose(NodeId(node), AreaSet::default()).unwrap().0;
            assert_eq!([chosen(), chosen(), chosen()], [1, 2, 1], "{policy:?}");
            order.choose(NodeId(node), AreaSet::default());
            assert_eq!(keys(&order, node)[2..], [('D', 0), ('A', keys(&order, node)[3].1)]);
        }
    }
}

#[test]
fn area_that_was_tried_is_passed_over() {
    let mut order = four_on_four_nodes(AreaOrder::Numa);
    let mut tried = AreaSet::default();
    let mut seen = Vec::new();
    while let Some(area) = order.choose(NodeId(2), tried) {
        tried.insert(area);
        seen.push(area.0);
    }
    assert_eq!(seen, [2, 0, 1, 3]);
}

#[test]
fn cpu_of_a_node_without_a_list_uses_the_first() {
    let mut order = four_on_four_nodes(AreaOrder::Numa);
    assert_eq!(order.choose(NodeId(63), AreaSet::default()), Some(AreaId(0)));
}

fn chosen(order: &mut Order, node: u8, times: usize) -> [usize; 2] {
    let mut counts = [0; 2];
    for _ in 0..times {
        let area = order.choose(NodeId(node), AreaSet::default()).unwrap();
        counts[area.0 as usize] += 1;
        order.finished(area);
    }
    counts
}

#[test]
fn weighted_prefers_what_is_near_quick_idle_and_empty() {
    let two = || {
        let mut order = Order::new(AreaOrder::Weighted, 2);
        (0..2).for_each(|area| order.on(AreaId(area), place(None, Some(area))));
        (0..2).for_each(|area| order.note_latency(AreaId(area), RequestTime::Exactly(1_000_000)));
        order
    };
    assert_eq!(chosen(&mut two(), 1, 100), [0, 100], "the nearer");
    let mut order = two();
    (0..64).for_each(|_| order.note_latency(AreaId(1), RequestTime::Exactly(3_000_000)));
    assert_eq!(chosen(&mut order, 1, 100), [100, 0], "three times as slow is worse than far");
    let mut order = two();
    let first: Vec<u8> = (0..3).map(|_| order.choose(NodeId(1), AreaSet::default()).unwrap().0).collect();
    assert!(first.contains(&0), "two wait at the nearer: {first:?}");
    let mut order = Order::new(AreaOrder::Weighted, 1);
    (0..2).for_each(|area| order.on(AreaId(area), Placement::default()));
    order.note_used(AreaId(0), 1, 4);
    assert_eq!(chosen(&mut order, 0, 100), [0, 100], "the emptier");
}

#[test]
fn weighted_takes_equals_in_turn_and_tries_a_slow_area_again() {
    let mut order = Order::new(AreaOrder::Weighted, 1);
    (0..2).for_each(|area| order.on(AreaId(area), Placement::default()));
    assert_eq!(chosen(&mut order, 0, 100), [50, 50]);
    order.note_latency(AreaId(0), RequestTime::Exactly(1_000_000_000));
    order.note_latency(AreaId(1), RequestTime::Exactly(1_000_000));
    let found = chosen(&mut order, 0, CHOICES_PER_TRIAL as usize * 8);
    assert!((4..=8).contains(&found[0]), "{found:?}");
}

#[test]
fn time_that_is_only_bounded_never_makes_an_area_look_slower() {
    let mut order = Order::new(AreaOrder::Weighted, 1);
    order.on(AreaId(0), Placement::default());
    order.note_latency(AreaId(0), RequestTime::AtMost(5_000));
    assert_eq!(order.members[0].load.latency_ns, 0, "still unknown");
    order.note_latency(AreaId(0), RequestTime::Exactly(1_000));
    order.note_latency(AreaId(0), RequestTime::AtMost(5_000));
    assert_eq!(order.members[0].load.latency_ns, 1_000);
    order.note_latency(AreaId(0), RequestTime::AtMost(200));
    assert_eq!(order.members[0].load.latency_ns, 900);
}

/// Chooses an area `times` times on behalf of a thread that looks for completions before each choice. Area 0
/// never answers. Area 1 answers each request after `quick_ns`. Returns how often area 0 was chosen.
fn chosen_beside_a_silent_area(order: &mut Order, times: usize, quick_ns: u64) -> usize {
    let (mut now, mut began_at) = (0, Vec::new());
    for _ in 0..times {
        if let Some(began) = began_at.first() {
            order.note_latency(AreaId(0), RequestTime::MoreThan(now - began));
        }
        if order.choose(NodeId(0), AreaSet::default()) == Some(AreaId(0)) {
            began_at.push(now);
        } else {
            order.note_latency(AreaId(1), RequestTime::Exactly(quick_ns));
            order.finished(AreaId(1));
        }
        now += quick_ns;
    }
    began_at.len()
}

/// The order went on choosing an area that no longer answered: a latency was learned only from requests that
/// were done, and the backlog counted less with each request that joined it. An area that had never answered
/// counted as the quickest. So all writes went there, while the other area had nothing to do.
#[test]
fn weighted_leaves_an_area_that_does_not_answer() {
    let choices = CHOICES_PER_TRIAL as usize * 4;
    for quick_ns in [60_000, 200_000, 5_000_000] {
        for latency_ns in [None, Some(60_000)] {
            let mut order = Order::new(AreaOrder::Weighted, 1);
            (0..2).for_each(|area| order.on(AreaId(area), Placement::default()));
            if let Some(ns) = latency_ns {
                (0..64).for_each(|_| order.note_latency(AreaId(0), RequestTime::Exactly(ns)));
            }
            let silent = chosen_beside_a_silent_area(&mut order, choices, quick_ns);
            assert!(silent <= 3, "{silent} of {choices} beside {quick_ns} ns, {latency_ns:?} before");
        }
    }
}

#[test]
fn area_that_answers_again_is_used_again() {
    let mut order = Order::new(AreaOrder::Weighted, 1);
    (0..2).for_each(|area| order.on(AreaId(area), Placement::default()));
    (0..2).for_each(|area| order.note_latency(AreaId(area), RequestTime::Exactly(60_000)));
    assert_eq!(order.choose(NodeId(0), AreaSet::default()), Some(AreaId(0)));
    order.note_latency(AreaId(0), RequestTime::MoreThan(10_000_000_000));
    assert_eq!(chosen(&mut order, 0, CHOICES_PER_TRIAL as usize), [0, CHOICES_PER_TRIAL as usize]);
    order.note_latency(AreaId(0), RequestTime::AtMost(10_000_000_000));
    order.finished(AreaId(0));
    assert_eq!(chosen(&mut order, 0, 100), [50, 50]);
    // A request that failed before it was sent is finished without a latency.
    order.choose(NodeId(0), AreaSet::default());
    order.note_latency(AreaId(0), RequestTime::MoreThan(10_000_000_000));
    order.finished(AreaId(0));
    assert_eq!(chosen(&mut order, 0, 100), [50, 50]);
}

/// A trial took the area whose turn it was, though its requests were still in flight. Behind such an area no
/// other slow area had a trial.
#[test]
fn trial_is_for_an_area_that_no_request_tries() {
    let mut order = Order::new(AreaOrder::Weighted, 1);
    (0..3).for_each(|area| order.on(AreaId(area), Placement::default()));
    assert_eq!(order.choose(NodeId(0), AreaSet::default()), Some(AreaId(0)));
    order.note_latency(AreaId(0), RequestTime::MoreThan(10_000_000_000));
    order.note_latency(AreaId(1), RequestTime::Exactly(1_000_000_000));
    order.note_latency(AreaId(2), RequestTime::Exactly(60_000));
    let mut counts = [0; 3];
    for _ in 0..CHOICES_PER_TRIAL * 4 {
        let area = order.choose(NodeId(0), AreaSet::default()).unwrap();
        counts[area.0 as usize] += 1;
        order.finished(area);
    }
    assert_eq!(counts, [0, 4, CHOICES_PER_TRIAL * 4 - 4]);
}

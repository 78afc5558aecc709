//! The order of areas. Priorities are checked by plain counting, and each choice by the list before and after
//! it.

use crate::Input;
use farpage_core::areas::RequestTime;
use farpage_core::areas::order::{AreaSet, Order, Placement};
use farpage_core::config::AreaOrder;
use farpage_core::units::{AREAS_MAX, AreaId, NodeId};

const NODES: usize = 3;

/// An area in the model.
struct Plain {
    area: AreaId,
    /// `None` for an automatic priority.
    priority: Option<i32>,
    node: Option<NodeId>,
    has_free_space: bool,
    is_leaving: bool,
}

struct Model {
    policy: AreaOrder,
    /// The areas in the order in which they were added.
    areas: Vec<Plain>,
}

impl Model {
    fn get(&mut self, area: AreaId) -> Option<&mut Plain> {
        self.areas.iter_mut().find(|plain| plain.area == area)
    }

    fn priority(&self, area: AreaId) -> Option<i32> {
        let at = self.areas.iter().position(|plain| plain.area == area && !plain.is_leaving)?;
        let before =
            self.areas[..at].iter().filter(|plain| plain.priority.is_none() && !plain.is_leaving).count()
                as i32;
        Some(self.areas[at].priority.unwrap_or(match self.policy {
            AreaOrder::Global => -1 - before,
            AreaOrder::Numa => -2 - before,
            AreaOrder::RoundRobin | AreaOrder::Weighted => -1,
        }))
    }

    fn key(&self, plain: &Plain, node: NodeId) -> i32 {
        let is_promoted =
            self.policy == AreaOrder::Numa && plain.priority.is_none() && plain.node == Some(node);
        if is_promoted { 1 } else { -self.priority(plain.area).expect("it is on") }
    }
}

/// Adds, removes, fills, empties and chooses areas.
pub fn run(input: &mut Input) {
    let off = input.byte();
    let policy = AreaOrder::ALL[input.below(AreaOrder::ALL.len())];
    let mut order = Order::new(policy, NODES);
    let mut model = Model { policy, areas: Vec::new() };
    let mut in_flight: Vec<AreaId> = Vec::new();
    while !input.is_over() {
        // Adding areas is never switched off.
        let kind = input.kind(8, off & !1);
        let area = AreaId(input.below(AREAS_MAX) as u8);
        match (kind, model.get(area)) {
            (Some(0), None) => put_on(input, &mut order, &mut model, area),
            (Some(1), Some(plain)) if !plain.is_leaving => {
                plain.is_leaving = true;
                order.begin_off(area);
            }
            (Some(1 | 2), Some(plain)) if plain.is_leaving => {
                if input.byte() < 128 {
                    plain.is_leaving = false;
                    order.restore(area);
                } else {
                    // An area that is empty has no request in flight.
                    in_flight.extract_if(.., |of| *of == area).for_each(|of| order.finished(of));
                    order.finish_off(area);
                    model.areas.retain(|plain| plain.area != area);
                }
            }
            (Some(3), Some(plain)) => {
                plain.has_free_space = false;
                order.full(area);
            }
            (Some(4), Some(plain)) => {
                plain.has_free_space = true;
                order.back(area);
            }
            (Some(5), _) => match in_flight.pop() {
                Some(area) => {
                    order.finished(area);
                    let ns = u64::from(input.word());
                    let took = match ns % 4 {
                        0 | 2 => RequestTime::Exactly(ns),
                        1 => RequestTime::AtMost(ns),
                        _ => RequestTime::MoreThan(ns),
                    };
                    order.note_latency(area, took);
                }
                None => order.note_used(area, u64::from(input.byte()), 255),
            },
            (Some(6 | 7), _) => in_flight.extend(choose(input, &mut order, policy)),
            _ => {}
        }
        agree(&order, &model);
    }
}

fn put_on(input: &mut Input, order: &mut Order, model: &mut Model, area: AreaId) {
    let priority = (input.byte() < 80).then(|| input.below(4) as i32);
    let node = (input.byte() < 160).then(|| NodeId(input.below(NODES) as u8));
    let mut place = Placement::default();
    if let Some(node) = node {
        place = place.at(node, |_| None);
    }
    if let Some(priority) = priority {
        place = place.with_priority(priority);
    }
    order.on(area, place);
    model.areas.push(Plain { area, priority, node, has_free_space: true, is_leaving: false });
}

/// Checks a choice. The chosen area is the first that wasn't tried; by cost it may be another automatic area.
/// The chosen area moves behind its equals, and no other area moves.
fn choose(input: &mut Input, order: &mut Order, policy: AreaOrder) -> Option<AreaId> {
    let node = NodeId(input.below(NODES + 1) as u8);
    let mut tried = AreaSet::default();
    (0..input.below(3)).for_each(|_| tried.insert(AreaId(input.below(AREAS_MAX) as u8)));
    let before: Vec<(AreaId, i32)> = order.of_node(node).collect();
    let first = before.iter().find(|(area, _)| !tried.contains(*area));
    let chosen = order.choose(node, tried);
    assert_eq!(chosen.is_some(), first.is_some());
    let (chosen, (first, first_key)) = (chosen?, *first?);
    let key = before.iter().find(|(area, _)| *area == chosen).expect("it has free space").1;
    assert!(!tried.contains(chosen));
    assert!(chosen == first || policy == AreaOrder::Weighted && key == first_key && key == 1);
    let mut expected = before;
    expected.retain(|(area, _)| *area != chosen);
    let behind = expected.partition_point(|(_, other)| *other <= key);
    expected.insert(behind, (chosen, key));
    assert!(order.of_node(node).eq(expected), "the list after the choice");
    Some(chosen)
}

fn agree(order: &Order, model: &Model) {
    order.check();
    for area in (0..AREAS_MAX).map(|area| AreaId(area as u8)) {
        assert_eq!(order.priority(area), model.priority(area));
    }
    for node in (0..NODES).map(|node| NodeId(node as u8)) {
        let found: Vec<(AreaId, i32)> = order.of_node(node).collect();
        let expected = model.areas.iter().filter(|plain| plain.has_free_space && !plain.is_leaving);
        assert_eq!(found.len(), expected.clone().count());
        for plain in expected {
            assert!(found.contains(&(plain.area, model.key(plain, node))), "area {}", plain.area.0);
        }
    }
}

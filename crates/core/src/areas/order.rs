//! The order of areas: which one the next pages go to.
//!
//! For every node there is a list of the areas that have room, and the first of it is used; before that it goes
//! behind its equals, so equals take turns. What counts is the node of the CPU that evicts, not of the page. An area
//! without room leaves every list and comes back behind its equals.
//!
//! What stands in front is decided by a *key*, smaller first: minus the priority. Areas without a priority of the
//! user's get one by [`AreaOrder`]; it follows from how many of them are on and were put on before, so when one goes
//! the later ones move up, and the next one to come gets the number that became free. An area whose removal failed
//! comes back with the priority that it had. (Linux gives it that too, but leaves the later ones moved up, so that two
//! share a number.) In the NUMA order the key 1, for -1, is kept for areas on the list's own node.
//!
//! [`AreaOrder::Weighted`] looks among the first equals for the smallest expected cost instead. Everything here is
//! under the lock of whoever owns it; nothing allocates.

use crate::config::AreaOrder;
use crate::units::{AREAS_MAX, AreaId, NODES_MAX, NodeId};

/// Distances between nodes are counted as firmware does: 10 is the node itself, 20 takes twice as long.
pub const DISTANCE_LOCAL: u8 = 10;
/// What is assumed of a device whose place isn't known.
pub const DISTANCE_UNKNOWN: u8 = 20;
/// Every so many choices by cost one is made in turn, so that an area that was slow once is tried again.
const CHOICES_PER_TRIAL: u32 = 256;
/// An area that was never measured counts as quick, so that it is.
const UNKNOWN_NS: u64 = 1_000;
/// Longer than a second is for ever.
const LATENCY_NS_MAX: u64 = 1 << 30;
/// What a request takes anywhere, in the unit of distances. Distances are ratios of the latency of memory, and of a
/// write only a part is waiting for memory: with a quarter at most, twice as far (20 for 10) is a quarter more.
const DISTANCE_ANYWHERE: u64 = 30;
/// More requests under way make no difference. A cost has 30 + 12 + 9 + 9 bits then: latency, requests, distance,
/// how full.
const IN_FLIGHT_MAX: u64 = 1 << 12;
/// A new measurement counts an eighth.
const SMOOTHING: u64 = 8;
/// How full an area is, and how long its queue was, are counted in units of 1/256.
const UNITS: u64 = 256;

/// What places an area in the order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Place {
    /// 0 to 32767 if the user gave one, -1 if not: it is found by the order then.
    pub priority: i32,
    /// The node of its device plus one; 0: unknown.
    node: u32,
    /// How far the device is from each node.
    distances: [u8; NODES_MAX],
}

impl Default for Place {
    fn default() -> Place {
        Place { priority: -1, node: 0, distances: [DISTANCE_UNKNOWN; NODES_MAX] }
    }
}

impl Place {
    /// The node of the device, and how far each node is from it (none: like any other).
    #[must_use]
    pub fn at(self, node: NodeId, distance: impl Fn(NodeId) -> Option<u8>) -> Place {
        let mut distances = [DISTANCE_UNKNOWN; NODES_MAX];
        for (from, entry) in distances.iter_mut().enumerate() {
            let is_own = from == node.0 as usize;
            let otherwise = if is_own { DISTANCE_LOCAL } else { DISTANCE_UNKNOWN };
            *entry = distance(NodeId(from as u8)).unwrap_or(otherwise).max(DISTANCE_LOCAL);
        }
        Place { node: u32::from(node.0) + 1, distances, ..self }
    }

    /// With a priority of the user's.
    #[must_use]
    pub const fn with_priority(self, priority: i32) -> Place {
        assert!(priority >= 0);
        Place { priority, ..self }
    }

    /// The node of its device, if it is known.
    pub fn node(&self) -> Option<NodeId> {
        self.node.checked_sub(1).map(|node| NodeId(node as u8))
    }

    const fn is_automatic(&self) -> bool {
        self.priority < 0
    }
}

/// Whether an area is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// It isn't there.
    Off,
    /// It is being emptied: nothing new goes there, and it may come back.
    Leaving,
    /// It is used while it has room.
    On,
}

/// What is known about an area.
#[derive(Clone, Copy)]
struct Member {
    place: Place,
    presence: Presence,
    /// When it was put on, among all areas.
    since: u32,
    has_room: bool,
    load: Load,
}

/// What is measured about an area.
#[derive(Clone, Copy)]
struct Load {
    /// Requests chosen for it that are not finished.
    in_flight: u32,
    /// How long a request takes, queue included, lately; 0: not known yet.
    latency_ns: u64,
    /// How many requests there were when one was chosen, itself included, lately, in 1/256: at least one.
    queue: u64,
    /// How full it is, in 1/256.
    used: u64,
}

/// The areas that have room, in the order of one node.
#[derive(Clone, Copy)]
struct List {
    areas: [u8; AREAS_MAX],
    count: usize,
}

impl List {
    fn areas(&self) -> impl Iterator<Item = AreaId> + '_ {
        self.areas[..self.count].iter().map(|area| AreaId(*area))
    }

    fn insert(&mut self, at: usize, area: AreaId) {
        self.areas.copy_within(at..self.count, at + 1);
        self.areas[at] = area.0;
        self.count += 1;
    }

    fn remove(&mut self, area: AreaId) {
        let at = self.areas().position(|other| other == area);
        if let Some(at) = at {
            self.areas.copy_within(at + 1..self.count, at);
            self.count -= 1;
        }
    }
}

/// How long a request took, in ns, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Took {
    /// So long.
    Exactly(u64),
    /// Nobody looked earlier whether it was done.
    AtMost(u64),
}

/// A set of areas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AreaSet(u16);

const _: () = assert!(AREAS_MAX == u16::BITS as usize);

impl AreaSet {
    /// Adds one.
    pub const fn insert(&mut self, area: AreaId) {
        self.0 |= 1 << area.0;
    }
    /// Whether it is in it.
    pub const fn contains(self, area: AreaId) -> bool {
        self.0 & 1 << area.0 != 0
    }
}

/// Which area comes next, for every node.
pub struct Order {
    policy: AreaOrder,
    /// Nodes that have a list; a CPU of any other uses the first.
    nodes: usize,
    lists: [List; NODES_MAX],
    members: [Member; AREAS_MAX],
    /// Areas put on so far.
    arrivals: u32,
    choices: u32,
}

impl Order {
    /// No area, and lists for `nodes` nodes.
    pub fn new(policy: AreaOrder, nodes: usize) -> Order {
        let load = Load { in_flight: 0, latency_ns: 0, queue: UNITS, used: 0 };
        let nobody =
            Member { place: Place::default(), presence: Presence::Off, since: 0, has_room: false, load };
        Order {
            policy,
            nodes: nodes.clamp(1, NODES_MAX),
            lists: [List { areas: [0; AREAS_MAX], count: 0 }; NODES_MAX],
            members: [nobody; AREAS_MAX],
            arrivals: 0,
            choices: 0,
        }
    }

    fn member(&self, area: AreaId) -> &Member {
        &self.members[area.0 as usize]
    }

    // ---- on and off -----------------------------------------------------------------------------------

    /// Puts an area on, with room.
    pub fn on(&mut self, area: AreaId, place: Place) {
        assert_eq!(self.member(area).presence, Presence::Off, "area {} is on already", area.0);
        let load = Load { in_flight: 0, latency_ns: 0, queue: UNITS, used: 0 };
        self.arrivals += 1;
        self.members[area.0 as usize] =
            Member { place, presence: Presence::On, since: self.arrivals, has_room: true, load };
        self.list(area);
    }

    /// Begins to take an area off: nothing goes there any more, and later automatic ones move up.
    pub fn begin_off(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::On, "area {} is not on", area.0);
        self.unlist(area);
        self.members[area.0 as usize].presence = Presence::Leaving;
    }

    /// It could not be emptied: it is on again, with the priority that it had.
    pub fn restore(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::Leaving, "area {} is not being taken off", area.0);
        self.members[area.0 as usize].presence = Presence::On;
        if self.member(area).has_room {
            self.list(area);
        }
    }

    /// It is empty, and gone.
    pub fn finish_off(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::Leaving, "area {} is not being taken off", area.0);
        self.members[area.0 as usize].presence = Presence::Off;
    }

    /// An area's priority: the user's, or what the order gives it. None if it isn't on.
    pub fn priority(&self, area: AreaId) -> Option<i32> {
        let member = self.member(area);
        if member.presence != Presence::On {
            return None;
        }
        if !member.place.is_automatic() {
            return Some(member.place.priority);
        }
        Some(match self.policy {
            AreaOrder::Global => -1 - self.rank(member),
            // -1 is kept for areas on the list's own node.
            AreaOrder::Numa => -2 - self.rank(member),
            AreaOrder::RoundRobin | AreaOrder::Weighted => -1,
        })
    }

    /// How many automatic areas that are on were put on before.
    fn rank(&self, member: &Member) -> i32 {
        let before = |other: &&Member| {
            other.presence == Presence::On && other.place.is_automatic() && other.since < member.since
        };
        self.members.iter().filter(before).count() as i32
    }

    // ---- room -----------------------------------------------------------------------------------------

    /// It has no room, or may not be written: leaves every list.
    pub fn full(&mut self, area: AreaId) {
        if core::mem::replace(&mut self.members[area.0 as usize].has_room, false) {
            self.unlist(area);
        }
    }

    /// It has room again.
    pub fn back(&mut self, area: AreaId) {
        let member = &mut self.members[area.0 as usize];
        let had_room = core::mem::replace(&mut member.has_room, true);
        if !had_room && member.presence == Presence::On {
            self.list(area);
        }
    }

    fn list(&mut self, area: AreaId) {
        for node in 0..self.nodes {
            self.insert(NodeId(node as u8), area);
        }
    }

    fn unlist(&mut self, area: AreaId) {
        self.lists[..self.nodes].iter_mut().for_each(|list| list.remove(area));
    }

    /// Behind everything that doesn't come after it.
    fn insert(&mut self, node: NodeId, area: AreaId) {
        let key = self.key(node, area);
        let list = &self.lists[node.0 as usize];
        let at = list.areas().take_while(|other| self.key(node, *other) <= key).count();
        self.lists[node.0 as usize].insert(at, area);
    }

    /// What an area of a node's list is sorted by. Meaningful for areas that are on.
    fn key(&self, node: NodeId, area: AreaId) -> i32 {
        let place = &self.member(area).place;
        let is_own = place.node() == Some(node);
        if self.policy == AreaOrder::Numa && place.is_automatic() && is_own {
            return 1;
        }
        -self.priority(area).unwrap_or(i32::MIN + 1)
    }

    // ---- choosing -------------------------------------------------------------------------------------

    fn list_of(&self, node: NodeId) -> NodeId {
        if (node.0 as usize) < self.nodes { node } else { NodeId(0) }
    }

    /// The area to use next on a CPU of `node`, none of which was `tried`. It goes behind its equals, and a request
    /// counts as under way there until [`Order::finished`].
    pub fn choose(&mut self, node: NodeId, tried: AreaSet) -> Option<AreaId> {
        let node = self.list_of(node);
        let first = self.lists[node.0 as usize].areas().find(|area| !tried.contains(*area))?;
        let by_cost = self.policy == AreaOrder::Weighted && self.member(first).place.is_automatic();
        let chosen = if by_cost { self.cheapest(node, first, tried) } else { first };
        self.lists[node.0 as usize].remove(chosen);
        self.insert(node, chosen);
        let load = &mut self.members[chosen.0 as usize].load;
        load.in_flight += 1;
        load.queue = smooth(load.queue, u64::from(load.in_flight) * UNITS);
        Some(chosen)
    }

    /// Of all automatic areas of a node the one with the smallest cost, the first of equals; now and then the first.
    fn cheapest(&mut self, node: NodeId, first: AreaId, tried: AreaSet) -> AreaId {
        self.choices = self.choices.wrapping_add(1);
        if self.choices.is_multiple_of(CHOICES_PER_TRIAL) {
            return first;
        }
        let candidates = self.lists[node.0 as usize]
            .areas()
            .filter(|area| !tried.contains(*area) && self.member(*area).place.is_automatic());
        candidates.min_by_key(|area| self.cost(node, *area)).unwrap_or(first)
    }

    /// How long one more request is expected to take, made larger by distance and by how full the area is.
    fn cost(&self, node: NodeId, area: AreaId) -> u64 {
        let Member { place, load, .. } = self.member(area);
        // The latency was measured with `queue` requests under way; now there would be one more than there are.
        let waiting = (u64::from(load.in_flight) + 1).min(IN_FLIGHT_MAX) * UNITS;
        let latency_ns = if load.latency_ns == 0 { UNKNOWN_NS } else { load.latency_ns.min(LATENCY_NS_MAX) };
        let latency_ns = latency_ns * waiting / load.queue;
        let distance = DISTANCE_ANYWHERE + u64::from(place.distances[node.0 as usize]);
        latency_ns * distance * (UNITS + load.used)
    }

    /// More requests of the same choice.
    pub fn chosen_again(&mut self, area: AreaId, requests: u32) {
        self.members[area.0 as usize].load.in_flight += requests;
    }

    /// A chosen request is over, or was not made.
    pub fn finished(&mut self, area: AreaId) {
        let load = &mut self.members[area.0 as usize].load;
        debug_assert!(load.in_flight > 0, "a request to area {} ended twice", area.0);
        load.in_flight = load.in_flight.saturating_sub(1);
    }

    /// How long a request to an area took, from when it was chosen.
    pub fn note_latency(&mut self, area: AreaId, took: Took) {
        let load = &mut self.members[area.0 as usize].load;
        match took {
            Took::Exactly(ns) if load.latency_ns == 0 => load.latency_ns = ns,
            Took::AtMost(ns) if ns >= load.latency_ns => {}
            Took::Exactly(ns) | Took::AtMost(ns) => load.latency_ns = smooth(load.latency_ns, ns),
        }
    }

    /// How full an area is: `used` of `total` of whatever it is counted in.
    pub fn note_used(&mut self, area: AreaId, used: u64, total: u64) {
        self.members[area.0 as usize].load.used = (used * UNITS / total.max(1)).min(UNITS);
    }

    // ---- looking on -----------------------------------------------------------------------------------

    /// A node's list: areas that have room with their keys, in order.
    pub fn of_node(&self, node: NodeId) -> impl Iterator<Item = (AreaId, i32)> + '_ {
        let node = self.list_of(node);
        self.lists[node.0 as usize].areas().map(move |area| (area, self.key(node, area)))
    }

    /// Asserts what must hold of every list.
    pub fn check(&self) {
        for node in (0..self.nodes).map(|node| NodeId(node as u8)) {
            assert!(
                self.of_node(node).is_sorted_by_key(|(_, key)| key),
                "the list of node {} has an order",
                node.0
            );
            for area in (0..AREAS_MAX).map(|area| AreaId(area as u8)) {
                let member = self.member(area);
                let wanted = usize::from(member.presence == Presence::On && member.has_room);
                let found = self.of_node(node).filter(|(other, _)| *other == area).count();
                assert_eq!(found, wanted, "area {} in the list of node {}", area.0, node.0);
            }
        }
    }
}

/// `old` moved an eighth of the way to `new`, at least by one.
const fn smooth(old: u64, new: u64) -> u64 {
    if new >= old { old + (new - old).div_ceil(SMOOTHING) } else { old - (old - new).div_ceil(SMOOTHING) }
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;

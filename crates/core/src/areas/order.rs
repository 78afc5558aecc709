//! The order of areas: which area the next pages go to.
//!
//! Each NUMA node has a list of the areas that have free space. The first area of the list is used and moves
//! behind its equals, so equals take turns. The node is that of the CPU that evicts, not that of the page. An
//! area without free space leaves every list, and later comes back behind its equals.
//!
//! A *key* sorts each list, smallest first. The key is minus the priority. An area without a priority of the
//! user's gets an automatic one by [`AreaOrder`]. An automatic priority follows from the number of automatic
//! areas that are on and were put on earlier. So when an automatic area goes, the later ones move up, and the
//! next new area gets the number that became free. An area whose removal failed comes back with its old
//! priority. Linux gives it the old priority, too, but leaves the later areas moved up. There two areas then
//! share a number. The NUMA order reserves the key 1, which stands for priority -1, for areas on the list's
//! node.
//!
//! [`AreaOrder::Weighted`] instead chooses the area with the smallest expected cost among the first equals.
//! The owner's lock protects everything here, and nothing allocates.

use crate::config::AreaOrder;
use crate::units::{AREAS_MAX, AreaId, NODES_MAX, NodeId};

/// Distance of a node from itself. Distances use the firmware's scale: 20 means twice the latency of 10.
pub const DISTANCE_LOCAL: u8 = 10;
/// Distance that is assumed for a device whose node isn't known.
pub const DISTANCE_UNKNOWN: u8 = 20;
/// Choices from one trial to the next. A trial takes the area whose turn it is, whatever its cost, so that an
/// area that was slow once is tried again. An area with a request that nobody has seen finished gets no
/// trial: that request tries the area.
const CHOICES_PER_TRIAL: u32 = 256;
/// Latency in ns that is assumed of an area never measured. The value is small, so that the area is chosen
/// and measured.
const UNKNOWN_NS: u64 = 1_000;
/// Largest latency in ns that a cost uses, about a second. A longer latency makes no difference.
const LATENCY_NS_MAX: u64 = 1 << 30;
/// Share of a request's cost that is the same on every node, in units of distance. Distances are ratios of
/// memory latencies, but at most a quarter of a write is spent waiting for memory. So twice the distance (20
/// instead of 10) makes a write a quarter more expensive.
const DISTANCE_ANYWHERE: u64 = 30;
/// Largest number of requests in flight that a cost uses. More requests make no difference. A cost then has
/// 30 + 12 + 9 + 9 bits, for latency, requests, distance, and how full the area is.
const IN_FLIGHT_MAX: u64 = 1 << 12;
/// Divisor of the smoothing: a new measurement counts an eighth.
const SMOOTHING: u64 = 8;
/// Units of one whole, for how full an area is and how long its queue was: both are counted in 1/256.
const UNITS: u64 = 256;

/// What decides an area's place in the order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Placement {
    /// 0 to 32767 if the user gave a priority. -1 if the order finds one.
    pub priority: i32,
    /// The node of the area's device plus one. 0 means unknown.
    node: u32,
    /// Distance of the device from each node.
    distances: [u8; NODES_MAX],
}

impl Default for Placement {
    fn default() -> Placement {
        Placement { priority: -1, node: 0, distances: [DISTANCE_UNKNOWN; NODES_MAX] }
    }
}

impl Placement {
    /// Sets the node of the device, and its distance from each node. Where `distance` returns none, the
    /// device counts as local to its own node and as [`DISTANCE_UNKNOWN`] away from others.
    #[must_use]
    pub fn at(self, node: NodeId, distance: impl Fn(NodeId) -> Option<u8>) -> Placement {
        let mut distances = [DISTANCE_UNKNOWN; NODES_MAX];
        for (from, entry) in distances.iter_mut().enumerate() {
            let is_own = from == node.0 as usize;
            let otherwise = if is_own { DISTANCE_LOCAL } else { DISTANCE_UNKNOWN };
            *entry = distance(NodeId(from as u8)).unwrap_or(otherwise).max(DISTANCE_LOCAL);
        }
        Placement { node: u32::from(node.0) + 1, distances, ..self }
    }

    /// Sets a priority that the user gave.
    #[must_use]
    pub const fn with_priority(self, priority: i32) -> Placement {
        assert!(priority >= 0);
        Placement { priority, ..self }
    }

    /// Returns the node of the area's device, if it is known.
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
    /// The area isn't there.
    Off,
    /// The area is being emptied. Nothing new is written there, and the area may come back.
    Leaving,
    /// The area is used while it has free space.
    On,
}

/// What is known about an area.
#[derive(Clone, Copy)]
struct Member {
    place: Placement,
    presence: Presence,
    /// Number of the area in the sequence in which all areas were put on.
    since: u32,
    has_free_space: bool,
    load: Load,
}

/// What is measured about an area.
#[derive(Clone, Copy)]
struct Load {
    /// Requests in flight: chosen for the area and not finished.
    in_flight: u32,
    /// Recent time in ns that a request takes, waiting in the queue included. 0 means unknown.
    latency_ns: u64,
    /// Recent number of requests in flight when a request was chosen, that request included, in 1/256. At
    /// least one.
    queue: u64,
    /// Largest age in ns at which a request in flight was seen unfinished, since a request was last finished
    /// here. 0 means that no request was seen unfinished.
    unfinished_ns: u64,
    /// How full the area is, in 1/256.
    used: u64,
}

impl Load {
    /// The load of an area that was never used.
    const NONE: Load = Load { in_flight: 0, latency_ns: 0, queue: UNITS, unfinished_ns: 0, used: 0 };
}

/// The areas that have free space, in the order of one node.
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

/// Time in ns that a request takes, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestTime {
    /// The request took exactly this time.
    Exactly(u64),
    /// The request took at most this time. Nobody checked earlier whether it was done.
    AtMost(u64),
    /// The request takes longer than this time: a thread has looked, and the request wasn't done.
    MoreThan(u64),
}

/// A set of areas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AreaSet(u16);

const _: () = assert!(AREAS_MAX == u16::BITS as usize);

impl AreaSet {
    /// Adds an area.
    pub const fn insert(&mut self, area: AreaId) {
        self.0 |= 1 << area.0;
    }
    /// Returns the set as one bit for each area.
    pub const fn bits(self) -> u16 {
        self.0
    }
    /// Whether an area is in the set.
    pub const fn contains(self, area: AreaId) -> bool {
        self.0 & 1 << area.0 != 0
    }
}

/// Which area is used next, for every node.
pub struct Order {
    policy: AreaOrder,
    /// Nodes that have a list. A CPU of any other node uses the first list.
    nodes: usize,
    lists: [List; NODES_MAX],
    members: [Member; AREAS_MAX],
    /// Areas put on so far, those that are off again included.
    arrivals: u32,
    choices: u32,
}

impl Order {
    /// Creates an order without areas, and with lists for `nodes` nodes.
    pub fn new(policy: AreaOrder, nodes: usize) -> Order {
        let nobody = Member {
            place: Placement::default(),
            presence: Presence::Off,
            since: 0,
            has_free_space: false,
            load: Load::NONE,
        };
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

    /// Puts an area on. The new area has free space.
    pub fn on(&mut self, area: AreaId, place: Placement) {
        assert_eq!(self.member(area).presence, Presence::Off, "area {} is on already", area.0);
        self.arrivals += 1;
        let (since, load) = (self.arrivals, Load::NONE);
        self.members[area.0 as usize] =
            Member { place, presence: Presence::On, since, has_free_space: true, load };
        self.list(area);
    }

    /// Begins to take an area off. Nothing new goes there, and later automatic areas move up.
    pub fn begin_off(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::On, "area {} is not on", area.0);
        self.unlist(area);
        self.members[area.0 as usize].presence = Presence::Leaving;
    }

    /// Puts an area on again that could not be emptied, with the priority that it had before.
    pub fn restore(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::Leaving, "area {} is not being taken off", area.0);
        self.members[area.0 as usize].presence = Presence::On;
        if self.member(area).has_free_space {
            self.list(area);
        }
    }

    /// Ends the removal of an area that is empty now.
    pub fn finish_off(&mut self, area: AreaId) {
        assert_eq!(self.member(area).presence, Presence::Leaving, "area {} is not being taken off", area.0);
        self.members[area.0 as usize].presence = Presence::Off;
    }

    /// Returns an area's priority: the user's, or the one that the order gives it. None if the area isn't on.
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
            // -1 is reserved for areas on the list's own node.
            AreaOrder::Numa => -2 - self.rank(member),
            AreaOrder::RoundRobin | AreaOrder::Weighted => -1,
        })
    }

    /// How many automatic areas that are on were put on before this one.
    fn rank(&self, member: &Member) -> i32 {
        let before = |other: &&Member| {
            other.presence == Presence::On && other.place.is_automatic() && other.since < member.since
        };
        self.members.iter().filter(before).count() as i32
    }

    // ---- free space -----------------------------------------------------------------------------------

    /// Takes an area out of every list, because it has no free space or may not be written.
    pub fn full(&mut self, area: AreaId) {
        if core::mem::replace(&mut self.members[area.0 as usize].has_free_space, false) {
            self.unlist(area);
        }
    }

    /// Puts an area that has free space again into every list.
    pub fn back(&mut self, area: AreaId) {
        let member = &mut self.members[area.0 as usize];
        let had_free_space = core::mem::replace(&mut member.has_free_space, true);
        if !had_free_space && member.presence == Presence::On {
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

    /// Inserts an area into a node's list, behind every area whose key isn't larger.
    fn insert(&mut self, node: NodeId, area: AreaId) {
        let key = self.key(node, area);
        let list = &self.lists[node.0 as usize];
        let at = list.areas().take_while(|other| self.key(node, *other) <= key).count();
        self.lists[node.0 as usize].insert(at, area);
    }

    /// Returns the key by which a node's list is sorted. The key has a meaning only for areas that are on.
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

    /// Returns the area to use next on a CPU of `node`, but none of those in `tried`. The area moves behind
    /// its equals. A request counts as in flight there until [`Order::finished`] is called.
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

    /// Returns the automatic area with the smallest cost in a node's list, the first of equals. Now and then
    /// returns an area that is due for a trial.
    fn cheapest(&mut self, node: NodeId, first: AreaId, tried: AreaSet) -> AreaId {
        self.choices = self.choices.wrapping_add(1);
        let is_trial = self.choices.is_multiple_of(CHOICES_PER_TRIAL);
        let candidates = || {
            let areas = self.lists[node.0 as usize].areas();
            areas.filter(|area| !tried.contains(*area) && self.member(*area).place.is_automatic())
        };
        let is_due = |area: &AreaId| self.member(*area).load.unfinished_ns == 0;
        let trial = if is_trial { candidates().find(is_due) } else { None };
        trial.or_else(|| candidates().min_by_key(|area| self.cost(node, *area))).unwrap_or(first)
    }

    /// Expected time of one more request, made larger by the distance and by how full the area is.
    fn cost(&self, node: NodeId, area: AreaId) -> u64 {
        let Member { place, load, .. } = self.member(area);
        // The latency was measured with `queue` requests in flight. One more request makes `in_flight` plus
        // one.
        let waiting = (u64::from(load.in_flight) + 1).min(IN_FLIGHT_MAX) * UNITS;
        let latency_ns = if load.latency_ns == 0 { UNKNOWN_NS } else { load.latency_ns.min(LATENCY_NS_MAX) };
        // One more request takes longer than a request that is still in flight has taken so far.
        let unfinished_ns = load.unfinished_ns.min(LATENCY_NS_MAX);
        let latency_ns = (latency_ns * waiting / load.queue).max(unfinished_ns);
        let distance = DISTANCE_ANYWHERE + u64::from(place.distances[node.0 as usize]);
        latency_ns * distance * (UNITS + load.used)
    }

    /// Counts `requests` more requests in flight that belong to the last choice.
    pub fn chosen_again(&mut self, area: AreaId, requests: u32) {
        self.members[area.0 as usize].load.in_flight += requests;
    }

    /// Ends one chosen request: the request is over, or was never made.
    pub fn finished(&mut self, area: AreaId) {
        let load = &mut self.members[area.0 as usize].load;
        debug_assert!(load.in_flight > 0, "a request to area {} ended twice", area.0);
        load.in_flight = load.in_flight.saturating_sub(1);
        if load.in_flight == 0 {
            load.unfinished_ns = 0;
        }
    }

    /// Records how long a request to an area takes, from the moment when it was chosen. A request that is
    /// done teaches the latency of the area. A request that isn't done counts until a request is done. So an
    /// area that never answers becomes expensive.
    pub fn note_latency(&mut self, area: AreaId, took: RequestTime) {
        let load = &mut self.members[area.0 as usize].load;
        let before_ns = load.latency_ns;
        load.latency_ns = match took {
            RequestTime::MoreThan(ns) => return load.unfinished_ns = load.unfinished_ns.max(ns),
            RequestTime::Exactly(ns) if before_ns == 0 => ns,
            RequestTime::AtMost(ns) if ns >= before_ns => before_ns,
            RequestTime::Exactly(ns) | RequestTime::AtMost(ns) => smooth(before_ns, ns),
        };
        load.unfinished_ns = 0;
    }

    /// Records how full an area is: `used` of `total`, in any unit.
    pub fn note_used(&mut self, area: AreaId, used: u64, total: u64) {
        self.members[area.0 as usize].load.used = (used * UNITS / total.max(1)).min(UNITS);
    }

    // ---- looking on -----------------------------------------------------------------------------------

    /// Returns a node's list: the areas that have free space with their keys, in order.
    pub fn of_node(&self, node: NodeId) -> impl Iterator<Item = (AreaId, i32)> + '_ {
        let node = self.list_of(node);
        self.lists[node.0 as usize].areas().map(move |area| (area, self.key(node, area)))
    }

    /// Asserts the invariants of every list.
    pub fn check(&self) {
        for node in (0..self.nodes).map(|node| NodeId(node as u8)) {
            assert!(
                self.of_node(node).is_sorted_by_key(|(_, key)| key),
                "the list of node {} has an order",
                node.0
            );
            for area in (0..AREAS_MAX).map(|area| AreaId(area as u8)) {
                let member = self.member(area);
                let wanted = usize::from(member.presence == Presence::On && member.has_free_space);
                let found = self.of_node(node).filter(|(other, _)| *other == area).count();
                assert_eq!(found, wanted, "area {} in the list of node {}", area.0, node.0);
            }
        }
    }
}

/// Returns `old` moved an eighth of the way to `new`, and by at least one if they differ.
const fn smooth(old: u64, new: u64) -> u64 {
    if new >= old { old + (new - old).div_ceil(SMOOTHING) } else { old - (old - new).div_ceil(SMOOTHING) }
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;

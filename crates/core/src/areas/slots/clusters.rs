//! Farpage's policy for free slots. A CPU takes all free slots of one cluster into its *hand* at once. The
//! CPU hands slots out from there, front to back, without contention. Slots that are freed meanwhile go back
//! to their cluster, under that cluster's own lock. A CPU takes the lock of the lists only when its hand is
//! empty. Under that lock it puts the cluster back and chooses the next one. So the lock is taken once for
//! the 512 slots of an empty cluster, or the 100 holes of a full one.
//!
//! Pages that are evicted together should lie together, so that one request writes them and one request later
//! reads them. Clusters are therefore chosen in this order:
//!
//! 1. an empty cluster, then a new lease, while the process holds at most [`SPREAD`] times what it uses and
//!    half of the area is unleased;
//! 2. a *thin* cluster, at least half of which is free;
//! 3. a cluster with holes, first the one whose holes had the longest time to grow;
//! 4. the slots that other CPUs have in their hands.
//!
//! While the area has much free space, thin clusters don't come first. A walk that rewrites some of its pages
//! leaves clusters that are free in ones and twos. A write there covers only 3 pages. Where the device is
//! told of empty clusters (discard), empty clusters always come first.
//!
//! An area may have more slots than its disk has space for. After a write that found no free space the area
//! is *tight*. Then clusters in use come first, even those in other CPUs' hands, because they have blocks on
//! the disk. When all of their slots are in use, the next empty cluster is tried. The area is no longer tight
//! unless that write fails as well.
//!
//! A thin cluster becomes empty because walks leave it. A page that is evicted behind a walk doesn't keep a
//! slot in a thin cluster ([`Clusters::is_thin`]). The page is written anew next to the pages that are
//! evicted with it.
//!
//! Linux 6.12 has the same lists, but it allocates slot by slot in the cluster and moves the cluster between
//! lists as it goes. Linux has the lists once for each order of huge pages. Farpage has no huge pages.
//!
//! Locks, outermost first: a CPU's hand, the lists, a cluster. No thread holds two hands.

use super::bits::Bits;
use super::lists::{Link, List, Lists};
use super::probe::{Held, Locked, Probe};
use super::{Ground, Run};
use crate::areas::leases::Leases;
use crate::memory::Zeroed;
use crate::sync::{Lock, rank};
use crate::units::CLUSTER_SLOTS;
use core::sync::atomic::{AtomicU32, Ordering};

/// Empty clusters that stay leased for the next run. Other empty clusters go back to the other processes.
pub(super) const EMPTY_KEPT: u32 = 2;

/// Clusters that a process may hold for each cluster that its slots would fill, before it uses half-free
/// clusters again.
const SPREAD: u32 = 3;
/// Clusters that a process may hold in addition to that, so that an area that is hardly used is spread over
/// as well.
const SPREAD_MIN: u32 = 8;

/// One cluster.
#[repr(C)]
pub struct Cluster {
    /// Slots that nobody may take: in use, in a CPU's hand, bad, or beyond the area's end.
    taken: Bits,
    /// Number of slots that are not in `taken`.
    free: u16,
    /// Number of slots that are neither bad nor beyond the area's end.
    usable: u16,
    /// Index of the [`List`] that the cluster is in.
    list: u8,
}

// SAFETY: integers, which have no drop. Zero is a cluster that isn't leased.
unsafe impl Zeroed for Cluster {}

impl Cluster {
    const fn list(&self) -> List {
        match self.list {
            0 => List::Unleased,
            1 => List::InHand,
            2 => List::Discarding,
            3 => List::Free,
            4 => List::Nonfull,
            5 => List::Fragmented,
            6 => List::Full,
            _ => List::Discard,
        }
    }

    /// Returns the list where the cluster belongs by its number of free slots.
    const fn wanted(&self, discards: bool) -> List {
        match self.free {
            0 => List::Full,
            free if free == self.usable && discards => List::Discard,
            free if free == self.usable => List::Free,
            free if free as u32 >= CLUSTER_SLOTS / 2 => List::Nonfull,
            _ => List::Fragmented,
        }
    }
}

/// The hand of a CPU: free slots taken from one cluster. Has cache lines of its own.
#[repr(C, align(128))]
pub struct Hand {
    free: Bits,
    /// The cluster's number plus one. 0 means none.
    cluster: u32,
}

// SAFETY: integers, which have no drop. Zero is an empty hand.
unsafe impl Zeroed for Hand {}

/// A counter on a cache line of its own.
#[repr(align(64))]
struct Shard(AtomicU32);

/// Shards of the count of slots in use. One CPU may add to one shard and another CPU subtract from another,
/// so only the sum has a meaning.
const SHARDS: usize = 16;

/// Which clusters a hand is filled from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    All,
    /// Clusters that have blocks on the disk.
    WithBlocks,
}

/// Lists whose clusters are partly in use, and so have their blocks. A file system that can't promise blocks
/// is the exception: there a write may fail as well.
const WITH_BLOCKS: [List; 2] = [List::Nonfull, List::Fragmented];

/// An area's slots.
pub struct Clusters<'m, P: Probe> {
    pub(super) ground: Ground<'m>,
    clusters: &'m [Lock<Cluster, { rank::CLUSTER }>],
    lists: Lock<Lists<'m>, { rank::AREA }>,
    hands: &'m [Lock<Hand, { rank::CPU_SLOTS }>],
    in_use: [Shard; SHARDS],
    /// 1 if the last write to a cluster without blocks found no free space on the disk.
    is_tight: AtomicU32,
    pub(super) probe: P,
}

impl<'m, P: Probe> Clusters<'m, P> {
    /// Creates the slots of an area of which nothing is leased yet. All tables must be zeroed.
    pub(super) fn new(
        ground: Ground<'m>,
        clusters: &'m [Lock<Cluster, { rank::CLUSTER }>],
        links: &'m mut [Link],
        hands: &'m [Lock<Hand, { rank::CPU_SLOTS }>],
        probe: P,
    ) -> Self {
        assert!(clusters.len() >= ground.clusters() as usize && links.len() >= clusters.len());
        assert!(!hands.is_empty());
        let in_use = [const { Shard(AtomicU32::new(0)) }; SHARDS];
        Clusters {
            ground,
            clusters,
            lists: Lock::new(Lists::new(links)),
            hands,
            in_use,
            is_tight: AtomicU32::new(0),
            probe,
        }
    }

    fn hand(&self, cpu: usize) -> Held<'_, Hand, P, { rank::CPU_SLOTS }> {
        Held::new(&self.probe, Locked::Cpu(cpu as u32), &self.hands[cpu])
    }
    fn lists(&self) -> Held<'_, Lists<'m>, P, { rank::AREA }> {
        Held::new(&self.probe, Locked::Area, &self.lists)
    }
    fn cluster(&self, cluster: u32) -> Held<'_, Cluster, P, { rank::CLUSTER }> {
        Held::new(&self.probe, Locked::Cluster(cluster), &self.clusters[cluster as usize])
    }

    /// Slots in use. Exact while no thread takes or frees slots, and otherwise close.
    pub fn in_use(&self) -> u32 {
        let shards = self.in_use.iter();
        let sum = shards.map(|shard| shard.0.load(Ordering::Relaxed)).fold(0, u32::wrapping_add);
        // A slot may be seen as freed in one shard before it is seen as taken in another.
        (sum as i32).max(0) as u32
    }

    /// Takes up to `max` slots, each run from one cluster. Returns how many.
    pub fn take(&self, cpu: usize, max: u32, mut each: impl FnMut(Run)) -> u32 {
        let home = cpu % self.hands.len();
        // Ordering: Relaxed, because the value is a hint.
        let is_tight = self.is_tight.load(Ordering::Relaxed) != 0;
        let from = if is_tight { Source::WithBlocks } else { Source::All };
        let mut taken = self.take_from_hand(home, max, from, &mut each);
        if taken == 0 {
            taken = self.take_from_others(home, max, from, &mut each);
        }
        if taken == 0 && is_tight {
            // The disk may have free space by now. If it has none, the caller's write fails and the caller
            // tightens again.
            self.is_tight.store(0, Ordering::Relaxed);
            taken = self.take_from_hand(home, max, Source::All, &mut each);
        }
        self.shard(cpu).fetch_add(taken, Ordering::Relaxed);
        taken
    }

    fn shard(&self, cpu: usize) -> &AtomicU32 {
        &self.in_use[cpu % SHARDS].0
    }

    fn take_from_hand(&self, cpu: usize, max: u32, from: Source, each: &mut impl FnMut(Run)) -> u32 {
        let (mut hand, mut taken) = (self.hand(cpu), 0);
        while taken < max {
            match hand.take(max - taken) {
                Some(run) => {
                    taken += run.1;
                    each(run);
                }
                None => {
                    self.refill(&mut hand, from);
                    if hand.is_empty() {
                        break;
                    }
                }
            }
        }
        taken
    }

    /// Takes slots from the other CPUs' hands, or slots that were freed in the clusters of those hands.
    /// Called when no cluster is left.
    #[cold]
    fn take_from_others(&self, cpu: usize, max: u32, from: Source, each: &mut impl FnMut(Run)) -> u32 {
        let others = (1..self.hands.len()).map(|step| (cpu + step) % self.hands.len());
        others.map(|other| self.take_from_hand(other, max, from, each)).find(|taken| *taken > 0).unwrap_or(0)
    }

    /// Puts the cluster of an empty hand back and takes the next one, if there is any.
    fn refill(&self, hand: &mut Hand, from: Source) {
        let mut lists = self.lists();
        if let Some(done) = hand.cluster.checked_sub(1) {
            hand.cluster = 0;
            self.place(&mut lists, done, &mut self.cluster(done));
        }
        let chosen = match from {
            Source::All => self.choose(&mut lists),
            Source::WithBlocks => WITH_BLOCKS.into_iter().find_map(|list| lists.first(list)),
        };
        let Some(next) = chosen else { return };
        let mut cluster = self.cluster(next);
        lists.move_to(next, cluster.list(), List::InHand);
        drop(lists);
        cluster.list = List::InHand as u8;
        *hand = Hand { free: cluster.taken.complement(), cluster: next + 1 };
        self.probe.refilled(cluster.free.into());
        (cluster.taken, cluster.free) = (Bits::ALL, 0);
    }

    fn choose(&self, lists: &mut Lists<'m>) -> Option<u32> {
        let spreads = self.ground.discards || self.may_spread(lists);
        let [first, second] = if spreads { [List::Free, List::Nonfull] } else { [List::Nonfull, List::Free] };
        lists
            .first(first)
            .or_else(|| if spreads { None } else { lists.first(second) })
            .or_else(|| self.lease(lists, Leases::take_unless_futile))
            .or_else(|| lists.first(second))
            // A cluster that is about to be written needn't be discarded first.
            .or_else(|| lists.first(List::Discard))
            .or_else(|| lists.first(List::Fragmented))
            .or_else(|| self.lease(lists, Leases::take))
    }

    /// Prefers clusters that have blocks, because a write found no free space. Clusters that were never
    /// written may have no blocks.
    pub fn tighten(&self) {
        self.is_tight.store(1, Ordering::Relaxed);
    }

    /// Whether an empty cluster comes before a half-free one.
    fn may_spread(&self, lists: &Lists<'m>) -> bool {
        let leases = &self.ground.leases;
        u64::from(lists.leased) * u64::from(CLUSTER_SLOTS)
            < u64::from(SPREAD) * u64::from(self.in_use()) + u64::from(SPREAD_MIN * CLUSTER_SLOTS)
            && leases.leased() < self.ground.clusters() / 2
    }

    /// Whether at least half of a slot's cluster is free.
    pub fn is_thin(&self, slot: u32) -> bool {
        matches!(self.cluster(slot / CLUSTER_SLOTS).list(), List::Nonfull)
    }

    /// Leases a cluster and puts it into the list of empty ones. A cluster without a usable slot is kept as
    /// full, and the next one is leased.
    fn lease(&self, lists: &mut Lists<'m>, take: fn(&Leases<'m>, u32) -> Option<u32>) -> Option<u32> {
        loop {
            let number = take(&self.ground.leases, self.ground.clusters())?;
            lists.leased += 1;
            let mut cluster = self.cluster(number);
            let mut taken = Bits::NONE;
            self.ground.each_unusable(number, |at| taken.set(at));
            let free = (CLUSTER_SLOTS - taken.count()) as u16;
            let list = if free == 0 { List::Full } else { List::Free };
            *cluster = Cluster { taken, free, usable: free, list: list as u8 };
            lists.move_to(number, List::Unleased, list);
            if free > 0 {
                return Some(number);
            }
        }
    }

    /// Frees a slot.
    pub fn free(&self, cpu: usize, slot: u32) {
        let (number, at) = (slot / CLUSTER_SLOTS, slot % CLUSTER_SLOTS);
        let moves = {
            let mut cluster = self.cluster(number);
            assert!(cluster.taken.has(at), "slot {slot} was freed twice");
            cluster.taken.clear(at);
            cluster.free += 1;
            cluster.list().is_list() && cluster.list() != cluster.wanted(self.ground.discards)
        };
        self.shard(cpu).fetch_sub(1, Ordering::Relaxed);
        if moves {
            let mut lists = self.lists();
            let mut cluster = self.cluster(number);
            // Meanwhile a CPU may have taken the cluster into its hand, or another thread that freed a slot
            // may have moved it.
            if cluster.list().is_list() {
                self.place(&mut lists, number, &mut cluster);
            }
        }
    }

    /// Empties all hands and gives up the leases of empty clusters, so that other processes can take them.
    pub fn let_go(&self) {
        for cpu in 0..self.hands.len() {
            let mut hand = self.hand(cpu);
            let Some(number) = hand.cluster.checked_sub(1) else { continue };
            let mut lists = self.lists();
            let mut cluster = self.cluster(number);
            cluster.taken = cluster.taken.without(&hand.free);
            cluster.free += hand.free.count() as u16;
            *hand = Hand { free: Bits::NONE, cluster: 0 };
            self.place(&mut lists, number, &mut cluster);
        }
        let mut lists = self.lists();
        while let Some(number) = lists.first(List::Free) {
            self.move_to(&mut lists, number, &mut self.cluster(number), List::Unleased);
        }
    }

    /// Moves a cluster that is in no CPU's hand to the list where it belongs.
    fn place(&self, lists: &mut Lists<'m>, number: u32, cluster: &mut Cluster) {
        let (from, mut to) = (cluster.list(), cluster.wanted(self.ground.discards));
        if from == to || (from == List::Free && to == List::Discard) {
            return;
        }
        if from == List::Discarding {
            to = List::Free;
        }
        if to == List::Free && lists.length(List::Free) >= EMPTY_KEPT {
            to = List::Unleased;
        }
        self.move_to(lists, number, cluster, to);
    }

    fn move_to(&self, lists: &mut Lists<'m>, number: u32, cluster: &mut Cluster, to: List) {
        lists.move_to(number, cluster.list(), to);
        cluster.list = to as u8;
        if to == List::Unleased {
            lists.leased -= 1;
            self.ground.leases.give_back(number);
        }
    }

    /// Returns an empty cluster whose slots the driver may discard now. No thread takes any of them until the
    /// driver calls [`Clusters::discarded`].
    pub fn take_discard(&self) -> Option<Run> {
        let mut lists = self.lists();
        let number = lists.first(List::Discard)?;
        lists.move_to(number, List::Discard, List::Discarding);
        self.cluster(number).list = List::Discarding as u8;
        let slots = self.ground.slots(number);
        // The header's slot must not be discarded.
        let first = slots.start.max(1);
        Some((first, slots.end - first))
    }

    /// Frees the slots that [`Clusters::take_discard`] gave, whether or not the driver could discard them.
    pub fn discarded(&self, first: u32) {
        let number = first / CLUSTER_SLOTS;
        let mut lists = self.lists();
        let mut cluster = self.cluster(number);
        assert!(cluster.list() == List::Discarding, "cluster {number} was not to be discarded");
        self.place(&mut lists, number, &mut cluster);
    }

    /// Asserts lists and counts, and calls `used` for each slot in use. Must be called while no thread takes
    /// or frees slots.
    pub fn check(&self, mut used: impl FnMut(u32)) {
        let mut in_hands = [const { (0, Bits::NONE) }; 128];
        assert!(self.hands.len() <= in_hands.len());
        for (hand, copy) in self.hands.iter().map(Lock::lock).zip(&mut in_hands) {
            *copy = (hand.cluster, hand.free);
        }
        let lists = self.lists.lock();
        let (mut in_use, mut leased, mut listed) = (0, 0, [0; 8]);
        for number in 0..self.ground.clusters() {
            let cluster = self.clusters[number as usize].lock();
            listed[cluster.list as usize] += 1;
            if cluster.list() == List::Unleased {
                continue;
            }
            leased += 1;
            assert!(self.ground.leases.holds(number), "cluster {number} is used but not leased");
            assert_eq!(
                CLUSTER_SLOTS - cluster.taken.count(),
                cluster.free.into(),
                "free in cluster {number}"
            );
            let mut inside = cluster.taken;
            self.ground.each_unusable(number, |at| {
                assert!(inside.has(at), "slot {at} of cluster {number} can't be used, but is free");
                inside.clear(at);
            });
            let mut owners = 0;
            for (_, free) in in_hands.iter().filter(|(of, _)| *of == number + 1) {
                assert_eq!(inside.without(free).count() + free.count(), inside.count());
                inside = inside.without(free);
                owners += 1;
            }
            assert_eq!(owners, u32::from(cluster.list() == List::InHand), "hands with cluster {number}");
            assert!(
                !cluster.list().is_list()
                    || cluster.wanted(self.ground.discards) == cluster.list()
                    || (cluster.list() == List::Free && cluster.free == cluster.usable),
                "cluster {number} is in the wrong list"
            );
            in_use += inside.count();
            (0..CLUSTER_SLOTS).filter(|at| inside.has(*at)).for_each(|at| used(number * CLUSTER_SLOTS + at));
        }
        for list in [List::Free, List::Nonfull, List::Fragmented, List::Full, List::Discard] {
            lists.check(list, |number| {
                assert!(self.clusters[number as usize].lock().list() == list, "cluster {number} in {list:?}");
            });
            assert_eq!(lists.length(list), listed[list as usize], "clusters in {list:?}");
        }
        assert_eq!((in_use, leased), (self.in_use(), lists.leased), "slots in use, clusters leased");
    }
}

impl Hand {
    fn is_empty(&self) -> bool {
        self.free == Bits::NONE
    }

    fn take(&mut self, max: u32) -> Option<Run> {
        let (at, length) = self.free.take_run(max)?;
        Some(((self.cluster - 1) * CLUSTER_SLOTS + at, length))
    }
}

//! The baselines that Farpage's policy is measured against: how Linux found free slots before it had similar
//! lists. `classic` is Linux 4.11 to 5.7 and `scan-more` is Linux 5.8, in their form for solid-state devices.
//! The scan itself is in [`super::scan`].
//!
//! Each CPU has a cache of 64 free slots, and refills it when it is empty. Each CPU has another cache for 64
//! freed slots, which go back together, sorted. The area's one lock protects a byte for each slot, a list of
//! free clusters, and the bounds between which free slots may lie. When slots are short, the caches are
//! emptied and switched off. Then each slot is looked for separately.
//!
//! Three things differ from Linux. In an area that several processes share, clusters that other processes
//! have leased count as bad, and unleased clusters count as free. A slot whose page is back in memory isn't
//! freed in the midst of a scan. The pager frees it when no slot is free (`Pager::release_kept`). Bytes are
//! exclusive-or'ed with the byte of a bad slot, so that zeroed memory means unleased.
//!
//! Locks, outermost first: a CPU's cache or its freed slots, the area.

use super::probe::{Held, Locked, Probe};
use super::scan::{Fragmented, Position};
use super::{Ground, Run};
use crate::areas::leases::Leases;
use crate::memory::Zeroed;
use crate::sync::{Lock, rank};
use crate::units::CLUSTER_SLOTS;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// Slots in a full cache: one refill, or one batch of freed slots that go back together.
pub(super) const BATCH: usize = 64;
/// Free clusters that stay leased. Other free clusters go back to the other processes.
const EMPTY_KEPT: u32 = 2;

/// Byte of a free slot.
pub(super) const FREE: u8 = 0;
/// Byte of a slot in use.
const USED: u8 = 1;
/// Byte of a slot that is bad or belongs to another process.
const BAD: u8 = 0x3f;
/// Byte of a slot that waits in a cache.
pub(super) const CACHED: u8 = 0x40;

/// Limits of scans and caches, which tests make small.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Slots that a scan looks at before it lets other threads have a turn.
    pub ration: i32,
    /// Slots in a cache.
    pub batch: usize,
    /// Free slots, in caches per CPU, above which caches are switched on.
    pub on: u32,
    /// Free slots, in caches per CPU, below which caches are switched off.
    pub off: u32,
}

impl Limits {
    const LINUX: Limits = Limits { ration: 256, batch: BATCH, on: 5, off: 2 };
}

/// Slots that wait to be handed out or to be freed.
#[repr(C)]
pub(super) struct Waiting {
    slots: [u32; BATCH],
    next: u32,
    count: u32,
}

/// A CPU's cache, and the position of its scan.
#[repr(C, align(128))]
pub struct Cache {
    waiting: Waiting,
    position: Position,
}

/// Slots freed by a CPU.
#[repr(C, align(128))]
pub struct Returned(Waiting);

// SAFETY: integers, which have no drop. Zero is an empty cache whose scan has no position yet.
unsafe impl Zeroed for Cache {}
// SAFETY: as above.
unsafe impl Zeroed for Returned {}

/// One cluster.
#[repr(C)]
pub struct Info {
    /// Slots that are not free.
    pub(super) count: u16,
    pub(super) state: u8,
    /// The next free cluster plus one.
    next: u32,
}

// SAFETY: integers, which have no drop. Zero is a cluster that isn't leased.
unsafe impl Zeroed for Info {}

/// [`Info::state`]: another process holds the cluster, or no process does.
const UNLEASED: u8 = 0;
/// [`Info::state`]: the cluster is in the list of free clusters.
pub(super) const LISTED: u8 = 1;
/// [`Info::state`]: some slots are in use, or can't be used.
const PARTLY: u8 = 2;

/// What the area's lock protects.
pub(super) struct Area<'m> {
    pub infos: &'m mut [Info],
    head: u32,
    tail: u32,
    listed: u32,
    leased: u32,
    /// Usable slots of leased clusters. `free` counts those of them that are free.
    usable: u32,
    free: u32,
    /// No cluster was left to lease.
    exhausted: bool,
    /// Lower bound: no slot below it is free.
    pub lowest: u32,
    /// Upper bound: no slot above it is free. 0 if no slot is free at all.
    pub highest: u32,
}

/// An area's slots.
pub struct Classic<'m, P: Probe> {
    pub(super) ground: Ground<'m>,
    map: &'m [AtomicU8],
    area: Lock<Area<'m>, { rank::AREA }>,
    caches: &'m [Lock<Cache, { rank::CPU_SLOTS }>],
    returned: &'m [Lock<Returned, { rank::RETURNED_SLOTS }>],
    /// Free slots, or `u32::MAX` while clusters may be leased. CPUs read it without the area's lock to switch
    /// the caches.
    free: AtomicU32,
    caching: AtomicBool,
    pub(super) fragmented: Fragmented,
    pub(super) limits: Limits,
    pub(super) probe: P,
}

/// Tables of an area, all zeroed.
pub(super) struct Tables<'m> {
    pub map: &'m [AtomicU8],
    pub infos: &'m mut [Info],
    pub caches: &'m [Lock<Cache, { rank::CPU_SLOTS }>],
    pub returned: &'m [Lock<Returned, { rank::RETURNED_SLOTS }>],
}

impl<'m, P: Probe> Classic<'m, P> {
    /// Creates the slots of an area of which nothing is leased yet.
    pub(super) fn new(ground: Ground<'m>, tables: Tables<'m>, fragmented: Fragmented, probe: P) -> Self {
        assert!(
            tables.map.len() >= ground.total as usize && tables.infos.len() >= ground.clusters() as usize
        );
        assert!(!tables.caches.is_empty() && tables.caches.len() == tables.returned.len());
        let area = Area {
            infos: tables.infos,
            head: 0,
            tail: 0,
            listed: 0,
            leased: 0,
            usable: 0,
            free: 0,
            exhausted: false,
            lowest: ground.total,
            highest: 0,
        };
        Classic {
            ground,
            map: tables.map,
            area: Lock::new(area),
            caches: tables.caches,
            returned: tables.returned,
            free: AtomicU32::new(u32::MAX),
            caching: AtomicBool::new(false),
            fragmented,
            limits: Limits::LINUX,
            probe,
        }
    }

    pub(super) fn area(&self) -> Held<'_, Area<'m>, P, { rank::AREA }> {
        Held::new(&self.probe, Locked::Area, &self.area)
    }
    fn cache(&self, cpu: usize) -> Held<'_, Cache, P, { rank::CPU_SLOTS }> {
        Held::new(&self.probe, Locked::Cpu(cpu as u32), &self.caches[cpu])
    }
    fn returned(&self, cpu: usize) -> Held<'_, Returned, P, { rank::RETURNED_SLOTS }> {
        Held::new(&self.probe, Locked::Returned(cpu as u32), &self.returned[cpu])
    }

    /// Returns a slot's byte.
    pub(super) fn byte(&self, slot: u32) -> u8 {
        self.map[slot as usize].load(Ordering::Relaxed) ^ BAD
    }
    fn set_byte(&self, slot: u32, byte: u8) -> u8 {
        // Ordering: Relaxed. A scan without the lock looks again under the lock, and the byte of a slot in
        // use has one owner.
        self.map[slot as usize].swap(byte ^ BAD, Ordering::Relaxed) ^ BAD
    }

    /// Slots in use. Exact while no thread takes or frees slots, and otherwise close.
    pub fn in_use(&self) -> u32 {
        let used: u32 = {
            let area = self.area.lock();
            area.usable - area.free
        };
        let caches = self.caches.iter().map(|cache| cache.lock().waiting.left());
        let returned = self.returned.iter().map(|returned| returned.lock().0.left());
        used.saturating_sub(caches.sum()).saturating_sub(returned.sum())
    }

    /// Takes up to `max` slots and returns how many. Slots that come one after the other and are neighbours
    /// form a run.
    pub fn take(&self, cpu: usize, max: u32, mut each: impl FnMut(Run)) -> u32 {
        let mut taken = 0;
        while taken < max
            && let Some(run) = self.take_run(cpu, max - taken)
        {
            taken += run.1;
            each(run);
        }
        taken
    }

    /// Takes the next run out of a CPU's cache. Only this function refills the cache, with the slots that one
    /// scan finds.
    fn take_run(&self, cpu: usize, max: u32) -> Option<Run> {
        let cpu = cpu % self.caches.len();
        self.switch_caches();
        let mut cache = self.cache(cpu);
        let Cache { waiting, position } = &mut *cache;
        let caching = self.caching.load(Ordering::Relaxed);
        if waiting.left() == 0 {
            let goal = if caching { self.limits.batch } else { 1 };
            (waiting.next, waiting.count) = (0, 0);
            let found = self.scan(cpu, position, &mut waiting.slots[..goal]);
            waiting.count = found as u32;
            self.probe.refilled(found as u32);
        }
        let run = waiting.take_run(max)?;
        (run.0..run.0 + run.1).for_each(|slot| {
            let old = self.set_byte(slot, USED);
            assert!(old == CACHED, "slot {slot} came from a cache, but was {old:#x}");
        });
        Some(run)
    }

    /// Frees a slot.
    pub fn free(&self, cpu: usize, slot: u32) {
        let old = self.set_byte(slot, CACHED);
        assert!(old == USED, "slot {slot} was freed twice (its byte is {old:#x})");
        let cpu = cpu % self.returned.len();
        let mut returned = self.returned(cpu);
        if !self.caching.load(Ordering::Relaxed) {
            drop(returned);
            return self.give_back(&mut [slot]);
        }
        let Waiting { slots, count, .. } = &mut returned.0;
        slots[*count as usize] = slot;
        *count += 1;
        if *count as usize == self.limits.batch {
            let full = &mut slots[..*count as usize];
            *count = 0;
            self.give_back(full);
        }
    }

    /// Makes slots free for every CPU. No page owns them any more, or no page ever did.
    fn give_back(&self, slots: &mut [u32]) {
        slots.sort_unstable();
        let mut area = self.area();
        for slot in slots.iter().copied() {
            let old = self.set_byte(slot, FREE);
            assert!(old == CACHED);
            area.lowest = area.lowest.min(slot);
            area.highest = area.highest.max(slot);
            area.free += 1;
            let cluster = slot / CLUSTER_SLOTS;
            area.infos[cluster as usize].count -= 1;
            if area.infos[cluster as usize].count == 0 {
                self.emptied(&mut area, cluster);
            }
        }
        self.probe.scanned(slots.len() as u32);
        self.publish(&area);
    }

    fn emptied(&self, area: &mut Area<'m>, cluster: u32) {
        if area.listed < EMPTY_KEPT {
            return area.append(cluster);
        }
        self.ground.slots(cluster).for_each(|slot| {
            self.set_byte(slot, BAD);
        });
        area.free -= CLUSTER_SLOTS;
        area.usable -= CLUSTER_SLOTS;
        area.close_if_full(self.ground.total);
        area.leased -= 1;
        area.exhausted = false;
        area.infos[cluster as usize].state = UNLEASED;
        self.ground.leases.give_back(cluster);
    }

    /// Leases a cluster. A cluster with unusable slots is never in the list of free ones, so only scans find
    /// its slots.
    pub(super) fn lease(
        &self,
        area: &mut Area<'m>,
        take: fn(&Leases<'m>, u32) -> Option<u32>,
    ) -> Option<u32> {
        let Some(cluster) = take(&self.ground.leases, self.ground.clusters()) else {
            area.exhausted = true;
            self.publish(area);
            return None;
        };
        area.exhausted = false;
        area.leased += 1;
        let usable = self.ground.usable(cluster);
        self.ground.slots(cluster).for_each(|slot| {
            self.set_byte(slot, FREE);
        });
        self.ground.each_unusable(cluster, |at| {
            let slot = cluster * CLUSTER_SLOTS + at;
            if slot < self.ground.total {
                self.set_byte(slot, BAD);
            }
        });
        area.free += usable;
        area.usable += usable;
        let count = (CLUSTER_SLOTS - usable) as u16;
        area.infos[cluster as usize] = Info { count, state: PARTLY, next: 0 };
        if usable > 0 {
            area.lowest = area.lowest.min(cluster * CLUSTER_SLOTS);
            area.highest = area.highest.max(self.ground.slots(cluster).end - 1);
        }
        if count == 0 {
            area.append(cluster);
        }
        self.publish(area);
        Some(cluster)
    }

    /// Takes a free slot for a cache. Must be called under the area's lock.
    pub(super) fn claim(&self, area: &mut Area<'m>, slot: u32) {
        self.set_byte(slot, CACHED);
        let cluster = slot / CLUSTER_SLOTS;
        if area.infos[cluster as usize].state == LISTED {
            area.remove_first(cluster);
        }
        area.infos[cluster as usize].count += 1;
        area.free -= 1;
        area.lowest += u32::from(slot == area.lowest);
        area.highest -= u32::from(slot == area.highest);
        area.close_if_full(self.ground.total);
    }

    /// Publishes how many slots are free, for readers without the lock. While clusters may be leased, the
    /// number is unlimited.
    pub(super) fn publish(&self, area: &Area<'m>) {
        self.free.store(if area.exhausted { area.free } else { u32::MAX }, Ordering::Relaxed);
    }

    /// Switches the caches: on while slots are plentiful, off when they are short.
    fn switch_caches(&self) {
        let free = self.free.load(Ordering::Relaxed);
        let caches = (self.caches.len() * self.limits.batch) as u32;
        if self.caching.load(Ordering::Relaxed) {
            if free < caches * self.limits.off {
                self.caching.store(false, Ordering::Relaxed);
                self.drain();
            }
        } else if free > caches * self.limits.on
            && self.ground.clusters() * CLUSTER_SLOTS > caches * self.limits.on
        {
            self.caching.store(true, Ordering::Relaxed);
        }
    }

    #[cold]
    fn drain(&self) {
        for cpu in 0..self.caches.len() {
            // The caches' locks order the switch: a CPU that takes one of them later finds caches off.
            let mut cache = self.cache(cpu);
            self.give_back(cache.waiting.take_all());
            drop(cache);
            let mut returned = self.returned(cpu);
            self.give_back(returned.0.take_all());
        }
    }

    /// Asserts lists and counts, and calls `used` for each slot in use. Must be called while no thread takes
    /// or frees slots.
    pub fn check(&self, mut used: impl FnMut(u32)) {
        let area = self.area.lock();
        let (mut free, mut leased, mut in_use, mut cached) = (0, 0, 0, 0);
        for cluster in 0..self.ground.clusters() {
            let info = &area.infos[cluster as usize];
            if info.state == UNLEASED {
                assert!(self.ground.slots(cluster).all(|slot| self.byte(slot) == BAD), "cluster {cluster}");
                continue;
            }
            assert!(self.ground.leases.holds(cluster), "cluster {cluster} is used but not leased");
            leased += 1;
            let mut here = 0;
            for slot in self.ground.slots(cluster) {
                match self.byte(slot) {
                    FREE => {
                        assert!(area.lowest <= slot && slot <= area.highest, "slot {slot} is out of bounds");
                        here += 1;
                    }
                    USED => {
                        in_use += 1;
                        used(slot);
                    }
                    CACHED => cached += 1,
                    _ => {}
                }
            }
            assert_eq!(
                CLUSTER_SLOTS - here,
                info.count.into(),
                "slots of cluster {cluster} that are not free"
            );
            assert_eq!(info.state == LISTED, info.count == 0, "cluster {cluster}");
            free += here;
        }
        assert_eq!((free, leased), (area.free, area.leased), "free slots, leased clusters");
        assert_eq!(free + in_use + cached, area.usable, "usable slots");
        drop(area);
        let waiting: u32 = self.caches.iter().map(|cache| cache.lock().waiting.left()).sum();
        let returned: u32 = self.returned.iter().map(|returned| returned.lock().0.left()).sum();
        assert_eq!((cached, in_use), (waiting + returned, self.in_use()), "slots in caches, in use");
    }
}

impl Area<'_> {
    /// Returns the first free cluster.
    pub(super) fn first_free(&self) -> Option<u32> {
        self.head.checked_sub(1)
    }

    fn close_if_full(&mut self, total: u32) {
        if self.free == 0 {
            (self.lowest, self.highest) = (total, 0);
        }
    }

    fn append(&mut self, cluster: u32) {
        match self.tail {
            0 => self.head = cluster + 1,
            tail => self.infos[tail as usize - 1].next = cluster + 1,
        }
        self.tail = cluster + 1;
        self.listed += 1;
        (self.infos[cluster as usize].state, self.infos[cluster as usize].next) = (LISTED, 0);
    }

    fn remove_first(&mut self, cluster: u32) {
        assert!(self.head == cluster + 1, "only the first free cluster is taken from");
        let info = &mut self.infos[cluster as usize];
        info.state = PARTLY;
        self.head = info.next;
        if self.head == 0 {
            self.tail = 0;
        }
        self.listed -= 1;
    }
}

impl Waiting {
    fn left(&self) -> u32 {
        self.count - self.next
    }

    /// Takes the next slot, and those behind it while they are neighbours in the same cluster.
    fn take_run(&mut self, max: u32) -> Option<Run> {
        let left = &self.slots[self.next as usize..self.count as usize];
        let first = *left.first()?;
        let follows = |(at, slot): &(usize, &u32)| {
            **slot == first + *at as u32 && **slot / CLUSTER_SLOTS == first / CLUSTER_SLOTS
        };
        let count = left.iter().enumerate().take(max as usize).take_while(follows).count() as u32;
        self.next += count;
        Some((first, count))
    }

    fn take_all(&mut self) -> &mut [u32] {
        let all = self.next as usize..self.count as usize;
        (self.next, self.count) = (0, 0);
        &mut self.slots[all]
    }
}

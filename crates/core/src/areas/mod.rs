//! Swap areas: where pages go when the pool can't have them.
//!
//! An area has slots, a priority, and a state: once a write has failed it is latched read-only, because what
//! it still holds can perhaps be read, but nothing new is entrusted to it. For each slot in use we keep which
//! page it belongs to and a checksum of what was written, so that whatever comes back is either that or an
//! error.

pub mod extents;
mod leases;
pub mod order;
pub mod slots;

pub use extents::Extents;
pub use leases::Leases;
pub use slots::{SlotMemory, Slots};

use crate::units::{AREAS_MAX, AreaId, CLUSTER_SLOTS, PAGE_BYTES, PageIndex, SlotIndex};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use slots::Ground;
use slots::probe::Unwatched;

/// Whether pages may be written to an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AreaState {
    /// Yes.
    Writable = 0,
    /// No slot is free, or the disk had no room for another cluster. Once enough slots are free again it is
    /// writable again: one would make us write single pages for ever.
    Full = 1,
    /// A write failed: only reads from now on.
    ReadOnly = 2,
}

/// Free slots that make a full area writable again: one decent write.
const FREED_ENOUGH: u32 = 64;

/// What an area is made from.
pub struct AreaMemory<'m> {
    /// Slots, slot 0 included.
    pub slots: u32,
    /// Higher is used first.
    pub priority: i32,
    /// Who has which cluster, shared by the processes of a run.
    pub leases: Leases<'m>,
    /// Tables of its slots.
    pub memory: SlotMemory<'m>,
    /// Whether clusters that became empty are to be discarded: see [`Areas::take_discard`].
    pub discards: bool,
    /// One for each slot: 1 + page, 0 where free.
    pub owners: &'m [AtomicU64],
    /// One for each slot.
    pub checksums: &'m [AtomicU64],
    /// Slots that can't be used, sorted.
    pub bad: &'m [u32],
}

struct Area<'m> {
    priority: i32,
    state: AtomicU32,
    /// Slots freed since it was full.
    freed: AtomicU32,
    total: u32,
    slots: Slots<'m>,
    owners: &'m [AtomicU64],
    checksums: &'m [AtomicU64],
    /// Where its slots lie on the device, if that is known.
    extents: Option<Extents<'m>>,
}

/// The areas of one process, in the order in which they are used.
pub struct Areas<'m> {
    areas: [Option<Area<'m>>; AREAS_MAX],
    /// Areas by falling priority.
    order: [u8; AREAS_MAX],
    count: usize,
    /// Advances by one at each allocation, so that areas of equal priority take turns.
    turn: AtomicU32,
}

/// Neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// The first.
    pub first: SlotIndex,
    /// How many.
    pub count: u32,
}

impl Default for Areas<'_> {
    fn default() -> Self {
        Areas { areas: [const { None }; AREAS_MAX], order: [0; AREAS_MAX], count: 0, turn: AtomicU32::new(0) }
    }
}

impl<'m> Areas<'m> {
    /// Puts an area on. Only while nobody uses the areas yet.
    pub fn add(&mut self, memory: AreaMemory<'m>) -> AreaId {
        let id = self.count;
        assert!(id < AREAS_MAX && memory.owners.len() >= memory.slots as usize);
        assert!(memory.checksums.len() >= memory.slots as usize);
        let before =
            |other: &u8| self.areas[*other as usize].as_ref().is_some_and(|a| a.priority >= memory.priority);
        let at = self.order[..self.count].iter().take_while(|other| before(other)).count();
        self.order.copy_within(at..self.count, at + 1);
        self.order[at] = id as u8;
        let AreaMemory { slots: total, bad, leases, discards, .. } = memory;
        self.areas[id] = Some(Area {
            priority: memory.priority,
            state: AtomicU32::new(AreaState::Writable as u32),
            freed: AtomicU32::new(0),
            total,
            slots: Slots::new(Ground { total, bad, leases, discards }, memory.memory, Unwatched),
            owners: memory.owners,
            checksums: memory.checksums,
            extents: None,
        });
        self.count += 1;
        AreaId(id as u8)
    }

    /// Says where an area's slots lie. Only while nobody uses the areas yet.
    pub fn set_extents(&mut self, id: AreaId, extents: Extents<'m>) {
        let area = self.areas[id.0 as usize].as_mut().expect("an area that is on");
        assert!(extents.tally().slots() >= area.total, "every slot has a block");
        area.extents = Some(extents);
    }

    /// Where an area's slots lie; a file that takes room as it needs it has no places yet.
    pub fn extents(&self, id: AreaId) -> Option<&Extents<'m>> {
        self.area(id).extents.as_ref()
    }

    /// The area that begins at this block of this device.
    pub fn at_block(&self, device: u64, block: u64) -> Option<AreaId> {
        let begins = |id: &AreaId| self.extents(*id).is_some_and(|extents| extents.begins_at(device, block));
        (0..self.count).map(|id| AreaId(id as u8)).find(begins)
    }

    /// Areas that are on.
    pub const fn count(&self) -> usize {
        self.count
    }

    fn area(&self, id: AreaId) -> &Area<'m> {
        self.areas[id.0 as usize].as_ref().expect("an area that is on")
    }

    /// An area's state.
    pub fn state(&self, id: AreaId) -> AreaState {
        match self.area(id).state.load(Ordering::Relaxed) {
            0 => AreaState::Writable,
            1 => AreaState::Full,
            _ => AreaState::ReadOnly,
        }
    }

    /// Changes an area's state; read-only is for good.
    pub fn set_state(&self, id: AreaId, state: AreaState) {
        self.area(id).freed.store(0, Ordering::Relaxed);
        let current = &self.area(id).state;
        let _ = current.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            (old != AreaState::ReadOnly as u32).then_some(state as u32)
        });
    }

    /// Whether any area takes pages.
    pub fn any_writable(&self) -> bool {
        (0..self.count).any(|id| self.state(AreaId(id as u8)) == AreaState::Writable)
    }

    /// Takes up to `max` neighbouring slots for `owner`s that [`Areas::own`] will name: from the writable
    /// area of the highest priority that has any, equals in turn. `cpu` is the caller's CPU, or its number among
    /// the threads that take slots.
    pub fn take(&self, cpu: usize, max: u32) -> Option<SlotRun> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) as usize;
        let mut at = 0;
        while at < self.count {
            let priority = self.area(AreaId(self.order[at])).priority;
            let same = |id: &&u8| self.area(AreaId(**id)).priority == priority;
            let equals = self.order[at..self.count].iter().take_while(same).count();
            for step in 0..equals {
                let id = AreaId(self.order[at + (turn + step) % equals]);
                let taken = self.take_in(id, cpu, max);
                if taken.is_some() {
                    return taken;
                }
            }
            at += equals;
        }
        None
    }

    /// From this area, if it is writable; it is full if it has none.
    fn take_in(&self, id: AreaId, cpu: usize, max: u32) -> Option<SlotRun> {
        if self.state(id) != AreaState::Writable {
            return None;
        }
        let Some((first, count)) = self.area(id).slots.take(cpu, max) else {
            self.set_state(id, AreaState::Full);
            return None;
        };
        Some(SlotRun { first: SlotIndex::new(id, first), count })
    }

    /// Frees a slot. Whoever owned it must no longer name it.
    pub fn free(&self, slot: SlotIndex) {
        let area = self.area(slot.area());
        area.owners[slot.offset() as usize].store(0, Ordering::Relaxed);
        // Who frees doesn't know its CPU; neighbours are often freed together.
        let cpu = (slot.offset() / CLUSTER_SLOTS) as usize;
        area.slots.free(cpu, slot.offset());
        #[cfg(feature = "planted")]
        if crate::planted::strikes(crate::planted::Bug::FreeSlotTwice) {
            area.slots.free(cpu, slot.offset());
        }
        if self.state(slot.area()) == AreaState::Full {
            self.freed_while_full(slot.area());
        }
    }

    #[cold]
    fn freed_while_full(&self, id: AreaId) {
        let area = self.area(id);
        let enough = (area.total / 16).clamp(1, FREED_ENOUGH);
        let is_empty = area.slots.in_use() == 0;
        if area.freed.fetch_add(1, Ordering::Relaxed) + 1 >= enough || is_empty {
            self.set_state(id, AreaState::Writable);
        }
    }

    /// Makes full areas writable again, to try: other processes or the disk may have room again.
    pub fn reopen(&self) {
        for id in (0..self.count).map(|id| AreaId(id as u8)) {
            if self.state(id) == AreaState::Full {
                self.set_state(id, AreaState::Writable);
            }
        }
    }

    /// Says whose bytes a slot holds, and their checksum.
    pub fn own(&self, slot: SlotIndex, page: PageIndex, checksum: u64) {
        let area = self.area(slot.area());
        area.checksums[slot.offset() as usize].store(checksum, Ordering::Relaxed);
        self.rename(slot, page);
    }

    /// The page of a slot moved.
    pub fn rename(&self, slot: SlotIndex, page: PageIndex) {
        self.area(slot.area()).owners[slot.offset() as usize].store(page.0 + 1, Ordering::Relaxed);
    }

    /// Whose bytes a slot holds.
    pub fn owner(&self, slot: SlotIndex) -> Option<PageIndex> {
        let owner = self.area(slot.area()).owners[slot.offset() as usize].load(Ordering::Relaxed);
        owner.checked_sub(1).map(PageIndex)
    }

    /// Whether `bytes` are what was last written to the slot.
    pub fn verify(&self, slot: SlotIndex, bytes: &[u8; PAGE_BYTES]) -> bool {
        self.area(slot.area()).checksums[slot.offset() as usize].load(Ordering::Relaxed) == checksum(bytes)
    }

    /// Whether a page that was read may keep its slot, so that it can be dropped without a write while it
    /// stays unchanged: only while at most half of the area is used (Linux's `vm_swap_full`).
    pub fn may_keep(&self, slot: SlotIndex) -> bool {
        let area = self.area(slot.area());
        u64::from(area.slots.in_use()) * 2 <= u64::from(area.total)
    }

    /// Slots in use, over all areas.
    pub fn in_use(&self) -> u64 {
        (0..self.count).map(|id| u64::from(self.area(AreaId(id as u8)).slots.in_use())).sum()
    }

    /// The next slot at or after `from` (wrapping at the area's end) that `wanted` is true of its owner.
    pub fn find_owned(
        &self,
        id: AreaId,
        from: u32,
        limit: u32,
        wanted: impl Fn(SlotIndex, PageIndex) -> bool,
    ) -> Option<SlotIndex> {
        let total = self.area(id).total;
        (0..limit.min(total))
            .map(|step| SlotIndex::new(id, (from % total + step) % total))
            .find(|&slot| self.owner(slot).is_some_and(|page| wanted(slot, page)))
    }

    /// Takes clusters of dead processes back. Returns how many.
    pub fn reap(&self, mut if_dead: impl FnMut(u32, &dyn Fn() -> bool) -> bool) -> u32 {
        let freed = (0..self.count).map(|id| self.area(AreaId(id as u8)).slots.reap(&mut if_dead)).sum();
        if freed > 0 {
            self.reopen();
        }
        freed
    }

    /// Slots of an area that the driver may discard on its device; nobody takes any of them until it says
    /// [`Areas::discarded`].
    pub fn take_discard(&self, id: AreaId) -> Option<SlotRun> {
        let (first, count) = self.area(id).slots.take_discard()?;
        Some(SlotRun { first: SlotIndex::new(id, first), count })
    }

    /// What [`Areas::take_discard`] gave is discarded, or could not be: it is free again.
    pub fn discarded(&self, run: SlotRun) {
        self.area(run.first.area()).slots.discarded((run.first.offset(), run.count));
    }

    /// Asserts the invariants of every area; calls `used` for each slot in use.
    pub fn check(&self, mut used: impl FnMut(SlotIndex)) {
        for id in 0..self.count {
            let area = self.area(AreaId(id as u8));
            let visit = |offset: u32| used(SlotIndex::new(AreaId(id as u8), offset));
            area.slots.check(visit);
        }
    }
}

/// Checksum of a page as it is written to an area.
pub fn checksum(bytes: &[u8; PAGE_BYTES]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

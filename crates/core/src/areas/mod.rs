//! Swap areas: where evicted pages go when the pool has no place for them.
//!
//! An area has slots, a priority and a state. When its device fails a write, the area becomes read-only for
//! good. The area's pages can perhaps still be read, but no new page is written there. An area is full when
//! no slot is free or its disk has no free space. A full area stays full until enough slots are free or the
//! driver tries it again. For each slot in use, a table keeps the page that the slot belongs to and a
//! checksum of what was written. So a read either returns the bytes that were written or is an error.

pub mod extents;
pub mod heirs;
mod leases;
pub mod order;
pub mod pages;
pub mod slots;

pub use extents::Extents;
pub use leases::Leases;
pub use order::{AreaSet, Order, Placement, RequestTime};
pub use slots::{SlotMemory, Slots};

use crate::config::AreaOrder;
use crate::sync::{Lock, rank};
use crate::units::{AREAS_MAX, AreaId, CLUSTER_SLOTS, NodeId, PAGE_BYTES, PageIndex, SlotIndex, SlotPart};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pages::Pages;
use slots::Ground;
use slots::counts::NoContinuation;
use slots::probe::Unwatched;

/// Whether pages may be written to an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AreaState {
    /// Pages may be written.
    Writable = 0,
    /// No slot is free, or the disk had no free space for another cluster. The area becomes writable again
    /// when enough slots are free. If one free slot were enough, the area would take single pages for ever.
    Full = 1,
    /// A write failed, so the area only serves reads from now on.
    ReadOnly = 2,
}

/// Why a slot can't be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotShared {
    /// There is no such slot, or it is the header's slot (Linux: EINVAL).
    Invalid,
    /// Nothing was written to the slot, or the slot is bad (ENOENT).
    Unused,
    /// The slot's count would need a continuation, and there is no free place for one (ENOMEM).
    NoContinuation,
}

/// Slots that must be freed before a full area is writable again. 64 slots make one write of decent size.
const FREED_ENOUGH: u32 = 64;

/// What an area is made from.
pub struct AreaMemory<'m> {
    /// Slots in the area, slot 0 included.
    pub slots: u32,
    /// The area's place in the order: the user's priority, and the node of its device.
    pub place: Placement,
    /// Which process holds which cluster, shared by the processes of a run.
    pub leases: Leases<'m>,
    /// Tables of the area's slots.
    pub memory: SlotMemory<'m>,
    /// Whether the driver discards clusters that became empty: see [`Areas::take_discard`].
    pub discards: bool,
    /// Words that say which page each slot belongs to. [`pages::words`] says how many are needed.
    pub owners: &'m [AtomicU32],
    /// The pages' checksums, as many words as `owners`.
    pub checksums: &'m [AtomicU64],
    /// Slots that can't be used, sorted.
    pub bad: &'m [u32],
    /// Bits that say which slots are kept for a fork's children. [`heirs::words`] says how many words are
    /// needed.
    pub heirs: &'m [AtomicU64],
}

struct Area<'m> {
    /// Changes only under the order's lock, so that it always agrees with the order's lists.
    state: AtomicU32,
    /// Slots freed since the area became full.
    freed: AtomicU32,
    total: u32,
    slots: Slots<'m>,
    pages: Pages<'m>,
    heirs: &'m [AtomicU64],
    /// Where the area's slots lie on its device, if that is known.
    extents: Option<Extents<'m>>,
}

/// The areas of one process.
pub struct Areas<'m> {
    areas: [Option<Area<'m>>; AREAS_MAX],
    count: usize,
    /// Which area is used next. Held while a short list is read, and never together with a lock of an area's
    /// slots.
    order: Lock<Order, { rank::AREA_ORDER }>,
    /// Seed of every checksum.
    key: u64,
}

/// An area that is being taken off, to be passed to [`Areas::end_off`].
#[must_use]
pub struct Leaving {
    id: AreaId,
    before: AreaState,
}

/// Neighbouring slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// The first slot.
    pub first: SlotIndex,
    /// Number of slots.
    pub count: u32,
}

impl Default for Areas<'_> {
    fn default() -> Self {
        Areas::new(AreaOrder::Weighted, 1)
    }
}

impl<'m> Areas<'m> {
    /// Creates a set without areas. Areas added later are used in this order by CPUs of `nodes` NUMA nodes.
    pub fn new(order: AreaOrder, nodes: usize) -> Areas<'m> {
        let order = Lock::new(Order::new(order, nodes));
        Areas { areas: [const { None }; AREAS_MAX], count: 0, order, key: 0 }
    }

    /// Makes checksums depend on a number that nobody can guess. Must be called before any thread uses the
    /// areas.
    pub const fn set_key(&mut self, key: u64) {
        self.key = key;
    }

    /// Puts an area on and returns its number. Must be called before any thread uses the areas.
    pub fn add(&mut self, memory: AreaMemory<'m>) -> AreaId {
        let id = self.count;
        assert!(id < AREAS_MAX);
        assert!(memory.heirs.len() >= heirs::words(memory.slots));
        let AreaMemory { slots: total, bad, leases, discards, .. } = memory;
        self.order.lock().on(AreaId(id as u8), memory.place);
        self.areas[id] = Some(Area {
            state: AtomicU32::new(AreaState::Writable as u32),
            freed: AtomicU32::new(0),
            total,
            slots: Slots::new(Ground { total, bad, leases, discards }, memory.memory, Unwatched),
            pages: Pages::new(total, memory.owners, memory.checksums),
            heirs: memory.heirs,
            extents: None,
        });
        self.count += 1;
        AreaId(id as u8)
    }

    /// Sets where an area's slots lie on its device. Must be called before any thread uses the areas.
    pub fn set_extents(&mut self, id: AreaId, extents: Extents<'m>) {
        let area = self.areas[id.0 as usize].as_mut().expect("an area that is on");
        assert!(extents.tally().slots() >= area.total, "every slot has a block");
        area.extents = Some(extents);
    }

    /// Returns where an area's slots lie on its device. A file that allocates its blocks as it grows has no
    /// extents.
    pub fn extents(&self, id: AreaId) -> Option<&Extents<'m>> {
        self.area(id).extents.as_ref()
    }

    /// Returns how many of the `count` slots from `slot` on lie side by side on the device as well. One
    /// request should move no more than these.
    pub fn beside(&self, slot: SlotIndex, count: u32) -> u32 {
        let extents = self.extents(slot.area());
        extents.map_or(count, |extents| extents.run_from(slot.offset()).count.min(count))
    }

    /// Returns the area that begins at block `block` of device `device`.
    pub fn at_block(&self, device: u64, block: u64) -> Option<AreaId> {
        let begins = |id: &AreaId| self.extents(*id).is_some_and(|extents| extents.begins_at(device, block));
        (0..self.count).map(|id| AreaId(id as u8)).find(begins)
    }

    /// Number of areas that were put on.
    pub const fn count(&self) -> usize {
        self.count
    }

    fn area(&self, id: AreaId) -> &Area<'m> {
        self.areas[id.0 as usize].as_ref().expect("an area that is on")
    }

    /// Returns an area's state.
    pub fn state(&self, id: AreaId) -> AreaState {
        match self.area(id).state.load(Ordering::Relaxed) {
            0 => AreaState::Writable,
            1 => AreaState::Full,
            _ => AreaState::ReadOnly,
        }
    }

    /// Changes an area's state. A read-only area stays read-only.
    pub fn set_state(&self, id: AreaId, state: AreaState) {
        self.area(id).freed.store(0, Ordering::Relaxed);
        let mut order = self.order.lock();
        if self.state(id) == AreaState::ReadOnly {
            return;
        }
        self.area(id).state.store(state as u32, Ordering::Relaxed);
        match state {
            AreaState::Writable => order.back(id),
            AreaState::Full | AreaState::ReadOnly => order.full(id),
        }
    }

    /// Begins to take an area off. Nothing is written there any more, and lower automatic priorities move up.
    /// The caller brings in or moves every page that is there, and then calls [`Areas::end_off`].
    pub fn begin_off(&self, id: AreaId) -> Leaving {
        let mut order = self.order.lock();
        let before = self.state(id);
        order.begin_off(id);
        self.area(id).state.store(AreaState::ReadOnly as u32, Ordering::Relaxed);
        Leaving { id, before }
    }

    /// Finishes what [`Areas::begin_off`] began. Returns true if the area is off. If pages of this process
    /// are still there, the area is on again with its old state and priority, and the result is false.
    pub fn end_off(&self, leaving: Leaving) -> bool {
        let Leaving { id, before } = leaving;
        let is_empty = self.area(id).slots.in_use() == 0;
        let mut order = self.order.lock();
        if is_empty {
            order.finish_off(id);
        } else {
            order.restore(id);
            self.area(id).state.store(before as u32, Ordering::Relaxed);
        }
        is_empty
    }

    /// Returns an area's priority, or none if the area is off.
    pub fn priority(&self, id: AreaId) -> Option<i32> {
        self.order.lock().priority(id)
    }

    /// Whether any area accepts pages.
    pub fn any_writable(&self) -> bool {
        (0..self.count).any(|id| self.state(AreaId(id as u8)) == AreaState::Writable)
    }

    /// Returns the areas that are full, if no area accepts pages. An area whose write failed isn't full.
    pub fn full(&self) -> AreaSet {
        let mut full = AreaSet::default();
        for id in (0..self.count).map(|id| AreaId(id as u8)) {
            match self.state(id) {
                AreaState::Writable => return AreaSet::default(),
                AreaState::Full => full.insert(id),
                AreaState::ReadOnly => {}
            }
        }
        full
    }

    /// Takes up to `max` slots and calls `each` with every run of neighbouring slots. Returns how many slots
    /// were taken. Under the shared map lock, because no slot may be taken during [`Areas::bequeath`].
    ///
    /// The slots come from the first area that has free ones, in the order of `node`, the node of the
    /// caller's CPU. Where the extents are known, a run is also contiguous on the device. `cpu` is the
    /// caller's CPU, or its number among the threads that take slots. The caller names each slot's page with
    /// [`Areas::own`], and calls [`Areas::finished`] once for each run when its request is over.
    pub fn take(&self, cpu: usize, node: NodeId, max: u32, mut each: impl FnMut(SlotRun)) -> u32 {
        let mut tried = AreaSet::default();
        loop {
            let Some(id) = self.order.lock().choose(node, tried) else { return 0 };
            let mut runs = 0;
            let taken = self.area(id).slots.take(cpu, max, |(first, count)| {
                let mut done = 0;
                while done < count {
                    let first = SlotIndex::new(id, first + done);
                    let run = SlotRun { first, count: self.beside(first, count - done) };
                    done += run.count;
                    runs += 1;
                    each(run);
                }
            });
            if taken > 0 {
                if runs > 1 {
                    self.order.lock().chosen_again(id, runs - 1);
                }
                return taken;
            }
            tried.insert(id);
            self.finished(id);
            self.set_state(id, AreaState::Full);
        }
    }

    /// Ends one request to an area: the work on one run that [`Areas::take`] gave is over.
    pub fn finished(&self, id: AreaId) {
        self.order.lock().finished(id);
    }

    /// Records how long a write took, from taking its slots to its completion.
    pub fn note_latency(&self, id: AreaId, latency: RequestTime) {
        self.order.lock().note_latency(id, latency);
    }

    /// Updates the order's knowledge of how full each area is, over all processes of the run. The driver
    /// calls it now and then.
    pub fn note_used(&self) {
        for id in (0..self.count).map(|id| AreaId(id as u8)) {
            let leases = self.area(id).slots.leases();
            let (leased, clusters) = (leases.leased(), leases.clusters());
            self.order.lock().note_used(id, u64::from(leased), u64::from(clusters));
        }
    }

    /// Gives up the leases in every area where this process uses no slot, so that other processes can take
    /// the clusters. The driver calls it now and then.
    pub fn let_go_of_unused(&self) {
        let areas = (0..self.count).map(|id| &self.area(AreaId(id as u8)).slots);
        areas.filter(|slots| slots.in_use() == 0).for_each(Slots::let_go);
    }

    /// Adds a reference to a slot in use. Returns how many references there are now.
    pub fn share(&self, slot: SlotIndex) -> Result<u32, NotShared> {
        let (area, offset) = (self.area(slot.area()), slot.offset());
        if offset == 0 || offset >= area.total {
            return Err(NotShared::Invalid);
        }
        if !self.is_owned(slot) {
            return Err(NotShared::Unused);
        }
        area.slots.counts.add(offset).map_err(|NoContinuation| NotShared::NoContinuation)
    }

    /// Frees a slot, or a part of one, that its page no longer names. The slot stays in use while it has
    /// other parts or other references.
    pub fn free(&self, at: SlotPart) {
        self.area(at.slot.area()).pages.disown(at.slot.offset(), at.part);
        self.give_back(at.slot);
    }

    /// Frees a slot that was taken but to which no page was written.
    pub fn free_unused(&self, slot: SlotIndex) {
        self.free(SlotPart::whole(slot));
    }

    /// Gives back one reference to a slot. The slot becomes free with the last one.
    pub fn give_back(&self, slot: SlotIndex) {
        let area = self.area(slot.area());
        if area.slots.counts.remove(slot.offset()) > 0 {
            return;
        }
        // The freeing thread doesn't know its CPU. The cluster's number serves, because neighbours are often
        // freed together.
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

    /// Makes clusters that were written before come first, because they have blocks. Called after a write
    /// that found no free space on the disk. The caller has already freed the slots of the failed write. The
    /// CPUs' hands are emptied too. A cluster without blocks that stayed in a hand would fail the next write
    /// each time the area is tried again.
    pub fn found_no_space(&self, id: AreaId) {
        let slots = &self.area(id).slots;
        slots.tighten();
        slots.let_go();
    }

    /// Makes full areas writable again for a new attempt: by now other processes may have freed slots, or the
    /// disk may have free space.
    pub fn reopen(&self) {
        for id in (0..self.count).map(|id| AreaId(id as u8)) {
            if self.state(id) == AreaState::Full {
                self.set_state(id, AreaState::Writable);
            }
        }
    }

    /// Records which page a slot, or a part of it, belongs to, and the checksum of its bytes.
    pub fn own(&self, at: SlotPart, page: PageIndex, checksum: u64) {
        self.area(at.slot.area()).pages.own(at.slot.offset(), at.part, page, checksum);
    }

    /// Records that a slot that was just taken will hold `pages` pages. The slot is free when all of them
    /// have left it.
    pub fn will_have(&self, slot: SlotIndex, pages: u32) {
        #[cfg(feature = "planted")]
        if crate::planted::strikes(crate::planted::Bug::FreePackEarly) {
            return;
        }
        let counts = &self.area(slot.area()).slots.counts;
        if pages > 1 {
            counts.add_many(slot.offset(), pages - 1).expect("a count of a few more needs no continuation");
        }
    }

    /// Records that the page whose bytes are there has moved to another address.
    pub fn rename(&self, at: SlotPart, page: PageIndex) {
        self.area(at.slot.area()).pages.rename(at.slot.offset(), at.part, page);
    }

    /// Returns the page whose bytes are there.
    pub fn owner(&self, at: SlotPart) -> Option<PageIndex> {
        self.area(at.slot.area()).pages.owner(at.slot.offset(), at.part)
    }

    /// Returns the pages whose bytes a slot holds.
    pub fn owners(&self, slot: SlotIndex) -> impl Iterator<Item = PageIndex> + '_ {
        self.area(slot.area()).pages.owners(slot.offset())
    }

    /// Whether a slot holds the bytes of any page.
    pub fn is_owned(&self, slot: SlotIndex) -> bool {
        self.owners(slot).next().is_some()
    }

    /// Returns the checksum of a page as it is written to an area. The checksum reveals a wrong read, and a
    /// page that was written since it was read. A secret key seeds the checksum. Without the key, someone who
    /// chooses a page's bytes could choose different bytes with the same checksum.
    pub fn checksum(&self, bytes: &[u8; PAGE_BYTES]) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.key)
    }

    /// Whether `bytes` are the page that was last written there.
    pub fn verify(&self, at: SlotPart, bytes: &[u8; PAGE_BYTES]) -> bool {
        self.area(at.slot.area()).pages.has_checksum(at.slot.offset(), at.part, self.checksum(bytes))
    }

    /// Whether a page that was read may keep its slot. A page that keeps its slot and is unchanged when it is
    /// evicted needs no write. Slots are kept only while at most half of the area is used (Linux's
    /// `vm_swap_full`).
    pub fn may_keep(&self, slot: SlotIndex) -> bool {
        let area = self.area(slot.area());
        u64::from(area.slots.in_use()) * 2 <= u64::from(area.total)
    }

    /// Whether a page that owns this slot should be written to a new slot, next to other pages, when it is
    /// evicted. True if much of the slot's cluster is free.
    pub fn is_thin(&self, slot: SlotIndex) -> bool {
        self.state(slot.area()) == AreaState::Writable && self.area(slot.area()).slots.is_thin(slot.offset())
    }

    /// Number of slots in an area, slot 0 included.
    pub fn slots(&self, id: AreaId) -> u32 {
        self.area(id).total
    }

    /// Slots in use in all areas.
    pub fn in_use(&self) -> u64 {
        (0..self.count).map(|id| u64::from(self.in_use_of(AreaId(id as u8)))).sum()
    }

    /// Slots in use in one area.
    pub fn in_use_of(&self, id: AreaId) -> u32 {
        self.area(id).slots.in_use()
    }

    /// Returns the next slot at or after `from` that holds a page and satisfies `wanted`. The search wraps at
    /// the area's end and looks at `limit` slots at most.
    pub fn find_owned(
        &self,
        id: AreaId,
        from: u32,
        limit: u32,
        wanted: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        let total = self.area(id).total;
        (0..limit.min(total))
            .map(|step| SlotIndex::new(id, (from % total + step) % total))
            .find(|slot| self.is_owned(*slot) && wanted(*slot))
    }

    /// Gives up every lease of this process. The only slots in use are those of lost pages. No thread takes,
    /// frees or discards slots any more.
    pub fn give_up_all(&self) {
        let areas = (0..self.count).map(|id| &self.area(AreaId(id as u8)).slots);
        areas.for_each(|slots| slots.leases().give_up_all());
    }

    /// Takes back the clusters of dead processes. Returns how many. `if_dead` is called once for each holder,
    /// with a function that frees the holder's clusters. `if_dead` may call that function only if the holder
    /// is dead and its number isn't used again meanwhile.
    pub fn reap(&self, mut if_dead: impl FnMut(u32, &dyn Fn() -> bool) -> bool) -> u32 {
        let leases = || (0..self.count).map(|id| self.area(AreaId(id as u8)).slots.leases());
        let freed = core::cell::Cell::new(0);
        let mut last = 0;
        while let Some(holder) = leases().filter_map(|leases| leases.next_holder(last)).min() {
            last = holder;
            if_dead(holder, &|| {
                freed.set(freed.get() + leases().map(|leases| leases.reap(holder)).sum::<u32>());
                true
            });
        }
        if freed.get() > 0 {
            self.reopen();
        }
        freed.get()
    }

    /// Returns slots of an area that the driver may discard on its device. Nobody takes any of them until the
    /// driver calls [`Areas::discarded`].
    pub fn take_discard(&self, id: AreaId) -> Option<SlotRun> {
        let (first, count) = self.area(id).slots.take_discard()?;
        Some(SlotRun { first: SlotIndex::new(id, first), count })
    }

    /// Frees the slots that [`Areas::take_discard`] gave, whether or not the driver could discard them.
    pub fn discarded(&self, run: SlotRun) {
        self.area(run.first.area()).slots.discarded((run.first.offset(), run.count));
        // A thread that looked for slots meanwhile found none and marked the area as full.
        if self.state(run.first.area()) == AreaState::Full {
            self.set_state(run.first.area(), AreaState::Writable);
        }
    }

    /// References to a slot in use: pages in it, writes, and generations of a fork's children.
    pub fn references(&self, slot: SlotIndex) -> u32 {
        self.area(slot.area()).slots.counts.get(slot.offset())
    }

    /// Asserts the invariants of every area and calls `used` for each slot in use.
    pub fn check(&self, mut used: impl FnMut(SlotIndex)) {
        for id in 0..self.count {
            let area = self.area(AreaId(id as u8));
            let visit = |offset: u32| used(SlotIndex::new(AreaId(id as u8), offset));
            area.slots.check(visit);
        }
        self.order.lock().check();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::config::SlotPolicy;

    pub(super) fn table<W: Default>(count: usize) -> &'static [W] {
        (0..count).map(|_| W::default()).collect::<Vec<_>>().leak()
    }

    /// Areas of one cluster each; the first has the highest of the automatic priorities.
    pub(super) fn areas(count: usize, order: AreaOrder) -> Areas<'static> {
        let mut areas = Areas::new(order, 1);
        for _ in 0..count {
            let holders: &'static [AtomicU32] = vec![AtomicU32::new(0)].leak();
            let bytes = SlotMemory::bytes(SlotPolicy::Clusters, CLUSTER_SLOTS, 1);
            let bytes = vec![0_u64; bytes.div_ceil(8)].leak();
            // SAFETY: the memory is writable and zeroed. It is leaked, so it is nobody else's for good. It
            // has the size for one cluster.
            let mut region =
                unsafe { crate::memory::Region::new(bytes.as_mut_ptr().cast(), size_of_val(bytes)) };
            areas.add(AreaMemory {
                slots: CLUSTER_SLOTS,
                place: Placement::default(),
                leases: Leases::new(holders, 1),
                memory: SlotMemory::carve(&mut region, SlotPolicy::Clusters, CLUSTER_SLOTS, 1),
                discards: false,
                owners: table(pages::words(CLUSTER_SLOTS)),
                checksums: table(pages::words(CLUSTER_SLOTS)),
                bad: &[],
                heirs: table(heirs::words(CLUSTER_SLOTS)),
            });
        }
        areas
    }

    pub(super) fn take(areas: &Areas, max: u32) -> Option<SlotRun> {
        let mut runs = Vec::new();
        areas.take(0, NodeId(0), max, |run| runs.push(run));
        runs.iter().for_each(|run| areas.finished(run.first.area()));
        // Only the first run is wanted.
        let others = runs.iter().skip(1).flat_map(|run| (0..run.count).map(|at| run.first.plus(at)));
        others.for_each(|slot| areas.free_unused(slot));
        runs.first().copied()
    }

    #[test]
    fn checksum_depends_on_the_bytes_and_the_key() {
        let mut areas = areas(1, AreaOrder::Weighted);
        let (slot, page) = (SlotPart::whole(SlotIndex::new(AreaId(0), 1)), [7; PAGE_BYTES]);
        areas.set_key(1);
        areas.own(slot, PageIndex(3), areas.checksum(&page));
        assert!(areas.verify(slot, &page));
        for at in [0, 8, 2047, PAGE_BYTES - 1] {
            let mut other = page;
            other[at] ^= 1;
            assert!(!areas.verify(slot, &other), "byte {at}");
        }
        areas.set_key(2);
        assert!(!areas.verify(slot, &page));
    }

    #[test]
    fn full_area_is_passed_over_until_slots_are_free_again() {
        let areas = areas(2, AreaOrder::Global);
        let mut first = Vec::new();
        while let Some(run) = take(&areas, 64).filter(|run| run.first.area() == AreaId(0)) {
            first.extend((0..run.count).map(|n| run.first.plus(n)));
        }
        assert_eq!(first.len() as u32, CLUSTER_SLOTS - 1);
        assert_eq!(areas.state(AreaId(0)), AreaState::Full);
        for slot in &first[..CLUSTER_SLOTS as usize / 16] {
            assert_eq!(take(&areas, 1).unwrap().first.area(), AreaId(1));
            areas.free_unused(*slot);
        }
        assert_eq!(take(&areas, 1).unwrap().first.area(), AreaId(0));
    }

    #[test]
    fn clusters_that_were_given_up_are_anothers_to_take() {
        let areas = areas(2, AreaOrder::Global);
        areas.free_unused(take(&areas, 1).unwrap().first);
        let leased = || [0, 1].map(|id| areas.area(AreaId(id)).slots.leases().leased());
        assert_eq!(leased(), [1, 0]);
        areas.give_up_all();
        assert_eq!(leased(), [0, 0]);
    }

    /// Invariant 1: a slot's count is never negative, and the slot is used again only when nobody refers to
    /// it.
    #[test]
    fn invariant_1_slot_is_used_again_when_its_last_reference_is_gone() {
        let areas = areas(1, AreaOrder::Global);
        let mut all = Vec::new();
        areas.take(0, NodeId(0), 10_000, |run| all.extend((0..run.count).map(|at| run.first.plus(at))));
        let slot = all[3];
        assert_eq!(areas.share(slot), Err(NotShared::Unused), "nobody's bytes are there yet");
        assert_eq!(areas.share(SlotIndex::new(AreaId(0), 0)), Err(NotShared::Invalid));
        let whole = SlotPart::whole(slot);
        areas.own(whole, PageIndex(9), 1);
        assert_eq!((areas.share(slot), areas.share(slot)), (Ok(2), Ok(3)));
        areas.give_back(slot);
        assert_eq!((areas.owner(whole), take(&areas, 1)), (Some(PageIndex(9)), None));
        areas.reopen();
        areas.free(whole);
        assert_eq!((areas.owner(whole), take(&areas, 1)), (None, None), "its owner has left it");
        areas.reopen();
        areas.give_back(slot);
        areas.reopen();
        assert_eq!((areas.owner(whole), areas.in_use()), (None, all.len() as u64 - 1));
        assert_eq!(take(&areas, 1), Some(SlotRun { first: slot, count: 1 }));
        areas.free(whole);
        let below = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| areas.free(whole)));
        assert!(below.is_err(), "a count below zero is a bug");
    }

    #[test]
    fn runs_end_where_extents_do() {
        let mut areas = areas(2, AreaOrder::Global);
        let memory = vec![0_u64; Extents::bytes(3).div_ceil(8)].leak();
        // SAFETY: the memory is writable and zeroed. It is leaked, so it is nobody else's for good.
        let mut region =
            unsafe { crate::memory::Region::new(memory.as_mut_ptr().cast(), size_of_val(memory)) };
        let mut builder = extents::Builder::new(&mut region, 3);
        for (slot, count, block) in [(0, 11, 1000), (11, 2, 500), (13, CLUSTER_SLOTS - 13, 2000)] {
            builder.add(extents::Extent { slot, count, block });
        }
        areas.set_extents(AreaId(0), builder.finish(1));
        let mut runs = Vec::new();
        assert_eq!(areas.take(0, NodeId(0), 40, |run| runs.push((run.first.offset(), run.count))), 40);
        assert_eq!(runs, [(1, 10), (11, 2), (13, 28)]);
        // The order counts each run as a request of its own.
        runs.iter().for_each(|_| areas.finished(AreaId(0)));
        let slot = |offset| SlotIndex::new(AreaId(0), offset);
        assert_eq!(
            (areas.beside(slot(5), 4), areas.beside(slot(5), 40), areas.beside(slot(12), 9)),
            (4, 6, 1)
        );
        assert_eq!(areas.beside(SlotIndex::new(AreaId(1), 5), 40), 40, "nothing is known of the other one");
    }

    #[test]
    fn area_whose_write_failed_is_left_for_good() {
        let areas = areas(2, AreaOrder::Global);
        areas.set_state(AreaId(0), AreaState::ReadOnly);
        areas.set_state(AreaId(0), AreaState::Writable);
        assert_eq!(take(&areas, 1).unwrap().first.area(), AreaId(1));
        areas.reopen();
        areas.check(|_| ());
        assert_eq!((areas.state(AreaId(0)), areas.any_writable()), (AreaState::ReadOnly, true));
    }

    #[test]
    fn full_areas_are_those_that_have_not_failed_while_none_is_writable() {
        let areas = areas(3, AreaOrder::Global);
        let states = |states: [AreaState; 3]| {
            (0..).zip(states).for_each(|(id, state)| areas.set_state(AreaId(id), state));
            areas.full().bits()
        };
        use AreaState::{Full, ReadOnly, Writable};
        assert_eq!(states([Writable, Writable, Writable]), 0);
        assert_eq!(states([Full, Full, Writable]), 0, "pages go to the last one");
        assert_eq!(states([Full, Full, Full]), 0b111);
        assert_eq!(states([Full, ReadOnly, Full]), 0b101);
        assert_eq!(states([ReadOnly, ReadOnly, ReadOnly]), 0, "each has failed");
    }

    #[test]
    fn invariant_12_off_empties_the_area_or_restores_it_with_unchanged_priority() {
        let areas = areas(2, AreaOrder::Numa);
        let slot = take(&areas, 1).unwrap().first;
        assert_eq!(
            (slot.area(), areas.priority(AreaId(0)), areas.priority(AreaId(1))),
            (AreaId(0), Some(-2), Some(-3))
        );

        let leaving = areas.begin_off(AreaId(0));
        assert_eq!(take(&areas, 1).unwrap().first.area(), AreaId(1), "nothing new goes there");
        assert!(!areas.end_off(leaving), "a page is still there");
        assert_eq!((areas.priority(AreaId(0)), areas.priority(AreaId(1))), (Some(-2), Some(-3)));
        assert_eq!(
            take(&areas, 1).map(|run| {
                areas.free_unused(run.first);
                run.first.area()
            }),
            Some(AreaId(0))
        );

        let leaving = areas.begin_off(AreaId(0));
        areas.free_unused(slot);
        assert!(areas.end_off(leaving));
        assert_eq!((areas.priority(AreaId(0)), areas.priority(AreaId(1))), (None, Some(-2)));
        assert_eq!(take(&areas, 1).unwrap().first.area(), AreaId(1));
    }
}

//! Pages that share a slot. They are written together and read apart, and the slot is free when the last page
//! has left it.

use crate::child_of;
use crate::driver::*;
use farpage_core::areas::AreaState;
use farpage_core::check::{self, InFlight};
use farpage_core::pager::{
    Access, Batch, Fate, Opening, Placed, Shrunk, Step, Taken, Ticket, WriteBatch, WriteProgress,
    WriteRequest,
};
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{
    AreaId, FrameIndex, NodeId, PAGE_BYTES, PageIndex, PageRange, Part, SlotIndex, SlotPart,
};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;

const PAGES: [PageIndex; 3] = [PageIndex(3), PageIndex(4), PageIndex(6)];

/// Evicts three pages, which then wait in one batch.
fn queue(driver: &mut Driver) -> WriteBatch {
    let mut writes = WriteBatch::new();
    for (page, kind) in PAGES.into_iter().zip(1..) {
        driver.first_touch(page);
        driver.evict(page, kind);
        assert_eq!(driver.place(&mut writes), Placed::Queued);
    }
    writes
}

fn assign(driver: &Driver, writes: &mut WriteBatch) -> WriteRequest {
    driver.pager.assign(0, NodeId(0), writes).expect("a slot")
}

fn check_with(driver: &Driver, request: &WriteRequest) {
    let writing: Vec<FrameIndex> = request.frames().collect();
    let slots: Vec<SlotIndex> = request.open().map(|(at, _)| at.slot).collect();
    check::all(&driver.pager, &InFlight { writing: &writing, slots: &slots, ..InFlight::default() });
}

/// Evicts and writes three pages. Returns their slot, and the slot's content on the disk.
fn write(driver: &mut Driver) -> (SlotIndex, [u8; PAGE_BYTES]) {
    let mut writes = queue(driver);
    let mut request = assign(driver, &mut writes);
    check_with(driver, &request);
    let frame = request.written().next().unwrap();
    let on_disk = *driver.frame(frame);
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    (request.run().first, on_disk)
}

/// Moves `pooled` pages from the pool into a batch, and one page past the pool.
fn queue_from_pool(driver: &mut Driver, pooled: usize) -> WriteBatch {
    let mut writes = WriteBatch::new();
    for (page, kind) in PAGES.into_iter().zip(1..).take(pooled) {
        driver.first_touch(page);
        assert!(matches!(driver.evict_and_place(page, kind), State::Pooled(_)));
    }
    for _ in 0..pooled {
        assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Queued);
    }
    driver.pager.pool().set_limit(0);
    driver.first_touch(PAGES[2]);
    driver.evict(PAGES[2], 3);
    assert_eq!(driver.place(&mut writes), Placed::Queued);
    writes
}

/// Counts of pages written, of these from the pool, of slots and of requests.
fn written(driver: &Driver) -> [u64; 4] {
    let counters = [Counter::Pswpout, Counter::Zswpwb, Counter::AreaSlots, Counter::AreaWrites];
    counters.map(|counter| driver.pager.stats().get(counter))
}

/// Requests, slots and pages from the pool counted as written before they were sent. On a full disk up to 64
/// slots a second counted that never were.
#[test]
fn only_what_the_area_has_taken_counts_as_written() {
    let mut driver = driver(64 << 10, true);
    let mut writes = queue_from_pool(&mut driver, 2);
    let mut request = assign(&driver, &mut writes);
    assert_eq!(driver.pager.write_done(&mut request, Err(AreaState::Full)), WriteProgress::Finished);
    assert_eq!(written(&driver), [0; 4], "the disk was full");
    driver.pager.areas().reopen();
    for _ in PAGES {
        assert_eq!(driver.place(&mut writes), Placed::Queued);
    }
    let mut request = assign(&driver, &mut writes);
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    assert_eq!(written(&driver), [3, 0, 1, 1], "the pages were parked meanwhile");

    let mut driver = self::driver(64 << 10, true);
    let mut writes = queue_from_pool(&mut driver, 2);
    let mut request = assign(&driver, &mut writes);
    assert_eq!(written(&driver), [0; 4], "the area has taken nothing yet");
    // A page of the pool is faulted on, and keeps the request open.
    let ticket = driver.begin_load(PAGES[0]);
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Again);
    driver.pager.give_back(ticket);
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    assert_eq!(written(&driver), [3, 2, 1, 1]);
    driver.check();
}

#[test]
fn page_of_the_pool_that_is_alone_in_its_pack_counts_as_one_of_the_pool() {
    let mut driver = driver(64 << 10, true);
    driver.first_touch(PAGES[0]);
    assert!(matches!(driver.evict_and_place(PAGES[0], 1), State::Pooled(_)));
    let mut writes = WriteBatch::new();
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Queued);
    let mut request = assign(&driver, &mut writes);
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    assert_eq!(written(&driver), [1; 4]);
}

fn begin_read(driver: &mut Driver, page: PageIndex, on_disk: &[u8; PAGE_BYTES]) -> Ticket {
    let Step::Read(ticket) = driver.pager.fault(page, Access::Read) else { panic!("it is on the area") };
    *driver.frame(ticket.frame().unwrap()) = *on_disk;
    ticket
}

fn read(driver: &mut Driver, page: PageIndex, on_disk: &[u8; PAGE_BYTES]) -> [u8; PAGE_BYTES] {
    let ticket = begin_read(driver, page, on_disk);
    driver.pager.read_done(&ticket, &mut driver.scratch).unwrap();
    let bytes = *driver.frame(ticket.frame().unwrap());
    driver.pager.settle_fault(ticket, LEFT);
    bytes
}

#[test]
fn pages_that_compress_share_a_slot_until_the_last_one_has_left_it() {
    let mut driver = driver(0, true);
    let (slot, on_disk) = write(&mut driver);
    for (at, page) in PAGES.into_iter().enumerate() {
        assert_eq!(driver.pager.state(page), State::OnArea(SlotPart { slot, part: Part::nth(at) }));
    }
    assert_eq!((driver.pager.areas().in_use(), driver.pager.areas().references(slot)), (1, 3));
    driver.check();

    for (page, kind) in PAGES.into_iter().zip(1_u8..) {
        assert_eq!(read(&mut driver, page, &on_disk), bytes_of(kind));
        // The page was only read. So it keeps its part, and goes back there without a write.
        driver.evict(page, kind);
        assert_eq!(driver.place(&mut WriteBatch::new()), Placed::Done);
        driver.check();
    }

    // One page was written since, and one is discarded.
    assert_eq!(read(&mut driver, PAGES[0], &on_disk), bytes_of(1));
    assert_ne!(driver.evict_to_area(PAGES[0], 9), slot);
    driver.pager.discard(PageRange::of(PAGES[1], 1));
    assert_eq!(driver.pager.areas().references(slot), 1);
    driver.check();
    assert_eq!(read(&mut driver, PAGES[2], &on_disk), bytes_of(3));
    driver.pager.discard(PageRange::of(PAGES[2], 1));
    assert_eq!(driver.pager.areas().owners(slot).next(), None);
    assert_eq!(driver.pager.areas().in_use(), 1, "the changed page's");
    driver.check();
}

#[test]
fn a_page_that_nothing_goes_with_is_written_as_it_is() {
    let mut driver = driver(0, true);
    driver.first_touch(PageIndex(8));
    let slot = driver.evict_to_area(PageIndex(8), 1);
    assert_eq!(driver.pager.state(PageIndex(8)), State::OnArea(SlotPart::whole(slot)));
    assert_eq!(read(&mut driver, PageIndex(8), &bytes_of(1)), bytes_of(1));
    driver.evict(PageIndex(8), 1);
    assert_eq!(driver.place(&mut WriteBatch::new()), Placed::Done);

    // A page that doesn't compress shares no slot either, whatever it goes with.
    let mut writes = queue(&mut driver);
    driver.first_touch(PageIndex(9));
    driver.evict_bytes(PageIndex(9), &noise());
    assert_eq!(driver.place(&mut writes), Placed::Queued);
    let mut request = assign(&driver, &mut writes);
    assert_eq!((request.run().count, request.open().count()), (2, 4));
    driver.pager.write_done(&mut request, Ok(()));
    let whole = SlotPart::whole(request.run().first.plus(1));
    assert_eq!(driver.pager.state(PageIndex(9)), State::OnArea(whole));
    driver.check();
}

#[test]
fn a_pack_that_could_not_be_written_leaves_all_of_its_pages_where_they_were() {
    for state in [AreaState::ReadOnly, AreaState::Full] {
        let mut driver = driver(0, true);
        let mut writes = queue(&mut driver);
        let mut request = assign(&driver, &mut writes);
        assert_eq!(driver.pager.write_done(&mut request, Err(state)), WriteProgress::Finished);
        assert_eq!((driver.pager.areas().state(AreaId(0)), driver.pager.areas().in_use()), (state, 0));
        driver.check();
        for (page, kind) in PAGES.into_iter().zip(1_u8..) {
            let Step::Install(ticket) = driver.pager.fault(page, Access::Read) else {
                panic!("it is parked")
            };
            assert_eq!(*driver.frame(ticket.frame().unwrap()), bytes_of(kind));
            driver.pager.settle_fault(ticket, LEFT);
        }
        driver.check();
    }
}

#[test]
fn a_page_that_is_faulted_on_while_its_pack_is_written_leaves_the_others_in_it() {
    let mut driver = driver(0, true);
    let mut writes = queue(&mut driver);
    let mut request = assign(&driver, &mut writes);
    let on_disk = *driver.frame(request.written().next().unwrap());
    // One page is being brought in when the write is done, and one was discarded.
    let Step::Load(ticket) = driver.pager.fault(PAGES[1], Access::Write) else {
        panic!("it is being written")
    };
    driver.pager.discard(PageRange::of(PAGES[2], 1));
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Again);
    assert_eq!(request.frames().count(), 2, "its own, and the pack's");
    assert_eq!(driver.finish_load(ticket), bytes_of(2));
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    let slot = request.run().first;
    assert_eq!(driver.pager.areas().references(slot), 1);
    driver.check();
    assert_eq!(read(&mut driver, PAGES[0], &on_disk), bytes_of(1));
    driver.check();
}

#[test]
fn a_pack_without_a_slot_is_parked_page_by_page() {
    let mut driver = driver(0, true);
    let mut writes = queue(&mut driver);
    let Step::Load(ticket) = driver.pager.fault(PAGES[0], Access::Write) else { panic!("it waits") };
    driver.pager.park_again(&mut writes);
    // The page that is on its way in stays.
    assert_eq!((writes.len(), writes.frames().count()), (1, 2));
    assert_eq!(driver.finish_load(ticket), bytes_of(1));
    driver.pager.park_again(&mut writes);
    assert!(writes.is_empty());
    driver.check();
}

#[test]
fn what_a_damaged_pack_has_is_the_page_or_an_error() {
    let mut refused = 0;
    for byte in (0..400).chain([PAGE_BYTES - 1]) {
        let mut driver = driver(0, true);
        let (slot, mut on_disk) = write(&mut driver);
        on_disk[byte] ^= 0x41;
        for (page, kind) in PAGES.into_iter().zip(1_u8..) {
            let ticket = begin_read(&mut driver, page, &on_disk);
            match driver.pager.read_done(&ticket, &mut driver.scratch) {
                Ok(()) => {
                    assert_eq!(*driver.frame(ticket.frame().unwrap()), bytes_of(kind), "byte {byte}");
                    driver.pager.settle_fault(ticket, LEFT);
                }
                Err(found) => {
                    assert_eq!(found, slot);
                    driver.pager.fail(ticket, slot);
                    refused += 1;
                }
            }
        }
        driver.check();
        // A part that could not be read stays out of use.
        driver.pager.discard(PageRange::of(PageIndex(0), 100));
        driver.check();
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn a_child_reads_its_own_part_of_a_slot_that_its_parent_has_left() {
    let holders: &'static [AtomicU32] = table(1);
    let mut parent = driver_of(0, Some(area(holders, 1)), None);
    let (slot, on_disk) = write(&mut parent);
    parent.pager.bequeath(0);
    assert_eq!(parent.pager.areas().references(slot), 4, "one for all children of a generation");
    parent.check();
    parent.pager.discard(PageRange::of(PageIndex(0), 100));
    assert_eq!((parent.pager.areas().references(slot), parent.pager.areas().in_use()), (1, 1));
    parent.check();
    parent.pager.areas().disinherit(0);
    assert_eq!(parent.pager.areas().in_use(), 0);
    parent.check();

    let mut parent = driver_of(0, Some(area(holders, 1)), None);
    let (_, on_disk_again) = write(&mut parent);
    assert_eq!(on_disk_again[..8], on_disk[..8]);
    let mut child = child_of(parent, holders, 2);
    // A page keeps its bytes when it moves.
    child.pager.remap(PageRange::of(PAGES[1], 1), PageIndex(50));
    for (page, kind) in [(PageIndex(50), 2), (PAGES[0], 1), (PAGES[2], 3)] {
        assert_eq!(read(&mut child, page, &on_disk_again), bytes_of(kind));
        child.check();
    }
}

/// Slots that become free are counted: parts alone free no space.
#[test]
fn kept_parts_are_released_where_that_frees_their_slot() {
    let mut driver = driver(0, true);
    let (_, on_disk) = write(&mut driver);
    read(&mut driver, PAGES[0], &on_disk);
    read(&mut driver, PAGES[2], &on_disk);
    assert_eq!(driver.pager.release_kept(8, |_| {}), 0, "one page has nothing else");
    let kept = driver.pager.state(PAGES[0]).slot().expect("it keeps its part");
    assert_eq!(driver.pager.areas().references(kept.slot), 3);
    read(&mut driver, PAGES[1], &on_disk);
    assert_eq!((driver.pager.release_kept(8, |_| {}), driver.pager.areas().in_use()), (1, 0));
    driver.check();
}

/// The memory of a walk. All pages are alike, and `on_disk` has what was written to the area.
struct Walk {
    driver: Driver,
    pages: PageRange,
    on_disk: BTreeMap<SlotIndex, [u8; PAGE_BYTES]>,
    writes: WriteBatch,
    contents: BTreeMap<PageIndex, u8>,
}

impl Walk {
    fn new(count: u64) -> Walk {
        let pages = PageRange::of(PageIndex(1_000), count);
        let driver = driver(0, true);
        driver.pager.ranges.lock().insert(pages, Flags::REGISTERED).unwrap();
        let contents = pages.iter().map(|page| (page, 1)).collect();
        let mut walk = Walk { driver, pages, on_disk: BTreeMap::new(), writes: WriteBatch::new(), contents };
        for page in pages.iter() {
            walk.driver.first_touch(page);
            walk.driver.evict(page, 1);
            walk.place();
        }
        walk.write();
        walk
    }

    fn place(&mut self) {
        while self.driver.pager.cache().usage().parked > 0 {
            let placed = self.driver.place(&mut self.writes);
            assert!(matches!(placed, Placed::Done | Placed::Queued | Placed::Busy), "{placed:?}");
            if self.writes.frames_at_most() > 4 {
                self.write();
            }
        }
    }

    fn write(&mut self) {
        while !self.writes.is_empty() {
            let mut request = assign(&self.driver, &mut self.writes);
            let written: Vec<FrameIndex> = request.written().collect();
            for (at, frame) in written.into_iter().enumerate() {
                self.on_disk.insert(request.run().first.plus(at as u32), *self.driver.frame(frame));
            }
            assert_eq!(self.driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
        }
    }

    /// Reads a page, and brings in the window that the fault leads to.
    fn touch(&mut self, page: PageIndex) {
        let driver = &mut self.driver;
        let mut ticket = match driver.pager.fault(page, Access::Read) {
            Step::Present => return,
            Step::Read(ticket) => {
                *driver.frame(ticket.frame().unwrap()) = self.on_disk[&ticket.slot().unwrap()];
                driver.pager.read_done(&ticket, &mut driver.scratch).unwrap();
                ticket
            }
            Step::Install(ticket) => ticket,
            step => panic!("{step:?}"),
        };
        assert_eq!(*driver.frame(ticket.frame().unwrap()), bytes_of(self.contents[&page]));
        let plan = driver.pager.plan_ahead(&mut ticket).plan;
        driver.pager.settle_fault(ticket, LEFT);
        let Some(mut opening) = plan.map(Opening::new) else { return };
        while let Some(ticket) = driver.pager.lock_ahead(&mut opening) {
            let mut bytes = self.on_disk[&ticket.slot().unwrap()];
            driver.pager.unpack_into(&ticket, &mut bytes, &mut driver.scratch).unwrap();
            driver.pager.check_ahead(&ticket, &bytes).unwrap();
            match ticket.fate() {
                Fate::Map => driver.pager.settle_ahead(&mut opening, ticket, LEFT),
                Fate::Park => {
                    *driver.frame(ticket.frame().unwrap()) = bytes;
                    driver.pager.settle_parked(&mut opening, ticket);
                }
            }
        }
        driver.pager.close_ahead(opening);
    }

    /// Takes a few pages out with the bytes of `kind`. Returns how many went from behind the walk, and how
    /// many of those keep their parts.
    fn evict(&mut self, kind: u8) -> (u64, u64) {
        let count = |driver: &Driver| driver.pager.stats().get(Counter::EvictBehind);
        let (mut batch, before) = (Batch::new(), count(&self.driver));
        self.driver.pager.begin_evict(&mut batch, 4);
        let pages: Vec<PageIndex> = batch.victims().iter().map(|victim| victim.page).collect();
        for victim in batch.victims() {
            *self.driver.frame(victim.frame) = bytes_of(kind);
            victim.taken = Taken::Yes;
            self.contents.insert(victim.page, kind);
        }
        self.driver.pager.park(&mut batch);
        let keeps = |page: &&PageIndex| self.driver.pager.state(**page).slot().is_some();
        let kept = pages.iter().filter(keeps).count() as u64;
        let behind = count(&self.driver) - before;
        self.place();
        (behind, if behind > 0 { kept } else { 0 })
    }

    /// Goes through all pages in a third of the memory that they need. Each page has the bytes of `kind` when
    /// it goes. Returns how many went from behind the walk, and how many of those kept their parts.
    fn lap(&mut self, kind: u8) -> (u64, u64) {
        let mut went = (0, 0);
        for page in self.pages.iter().map(Some).chain([None]) {
            page.into_iter().for_each(|page| self.touch(page));
            let resident_max = if page.is_some() { self.pages.count() / 3 } else { 0 };
            while self.driver.pager.resident() > resident_max {
                let (behind, kept) = self.evict(kind);
                went = (went.0 + behind, went.1 + kept);
            }
        }
        self.write();
        self.driver.check();
        went
    }
}

/// If a walk changes many pages, its memory lies in more and more places while the unchanged pages stay where
/// they are.
#[test]
fn behind_a_walk_that_changes_many_pages_all_are_written_anew() {
    let mut walk = Walk::new(96);
    let (behind, kept) = walk.lap(1);
    assert!(behind > 20 && kept == behind, "{kept} of {behind}: nothing was changed");
    walk.lap(2);
    let (behind, kept) = walk.lap(2);
    assert!(behind > 20 && kept == 0, "{kept} of {behind}: much was changed the time before");
    // Now the walk only reads. The change takes some laps to be seen.
    (0..12).for_each(|_| _ = walk.lap(2));
    let (behind, kept) = walk.lap(2);
    assert!(behind > 20 && kept == behind, "{kept} of {behind}");
    // Where nothing can be written, each page keeps its place.
    walk.lap(3);
    walk.driver.pager.areas().set_state(AreaId(0), AreaState::ReadOnly);
    let (behind, kept) = walk.lap(3);
    assert!(behind > 20 && kept == behind, "{kept} of {behind}");
}

//! Bugs that were found, most of them by the simulator. Each test repeats one in the fewest steps.

use crate::device::Device;
use crate::profile::{AreaProfile, Profile};
use crate::random::Random;
use crate::space::Space;
use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Access, Batch, Placed, Step, Taken, WriteBatch, WriteProgress};
use farpage_core::stats::Counter;
use farpage_core::table::entry::{State, Stored};
use farpage_core::units::{AreaId, PAGE_BYTES, PageIndex, PageRange};
use farpage_io::{CrashPlan, FaultPlan, SlowPlan};

/// Runs a story in a process with an area of 30 slots and no pool.
fn with_space(story: impl FnOnce(&Space)) {
    let random = Random::new(1);
    let mut profile = Profile::draw(&random);
    profile.config.pool_bytes_max = 0;
    profile.config.install = Install::Copy;
    let area = AreaProfile {
        slots: 30,
        device_pages: 30,
        priority: 0,
        bad: Vec::new(),
        discards: false,
        slow: SlowPlan { seed: 1, latency_ticks_min: 0, latency_ticks_max: 0 },
        faults: FaultPlan::none(1),
        crash: CrashPlan { seed: 1, at_request: u64::MAX },
    };
    let devices = [Device::new(&area)];
    let space = Space::new(1, &profile, &devices, &random);
    story(&space);
    // The space is dropped before the devices, because it borrows from them.
    drop(space);
}

/// Touches the first page, evicts it to the area, and reads it back so that it keeps its slot.
fn page_that_keeps_its_slot(space: &Space) -> PageIndex {
    let (pager, page) = (&space.pager, space.program.borrow().all().start);
    let Step::Zero(ticket) = pager.fault(page, Access::Write) else { panic!("a first touch") };
    pager.settle_fault(ticket, Backing::Memory);
    let mut batch = Batch::new();
    pager.begin_evict(&mut batch, 1);
    let frame = batch.victims()[0].frame;
    // A word that has none of the shapes that fit an entry.
    let word = 0x0123_4567_89ab_cdef_u64.to_ne_bytes();
    space.frames.borrow_mut().copy_in(frame, &std::array::from_fn(|at| word[at % 8]));
    batch.victims()[0].taken = Taken::Yes;
    pager.park(&mut batch);
    let mut writes = WriteBatch::new();
    let placed = space.with_scratch(|scratch| pager.place_oldest(scratch, &mut writes));
    assert_eq!(placed, Placed::Queued);
    let mut request = pager.assign(0, space.node(), &mut writes).expect("an empty area has slots");
    assert_eq!(pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
    let Step::Read(ticket) = pager.fault(page, Access::Read) else { panic!("it is on the area") };
    pager.settle_fault(ticket, Backing::Memory);
    assert!(matches!(pager.state(page), State::Resident { copy: Some(Stored::Slot(_)), .. }));
    page
}

/// The search for kept slots found the slot of a page that was being evicted, and could not free the slot.
/// The search went on behind the slot, came round, and found it again. A thread that needed a slot spun until
/// another thread settled the page. If the spinning thread itself had to settle the page, it spun forever.
#[test]
fn release_kept_passes_over_a_page_that_is_being_moved() {
    with_space(|space| {
        let page = page_that_keeps_its_slot(space);
        let mut batch = Batch::new();
        space.pager.begin_evict(&mut batch, 1);
        assert_eq!((batch.len(), batch.victims()[0].page), (1, page));
        assert_eq!(space.pager.release_kept(8, |_| {}), 0);
        batch.victims()[0].taken = Taken::Busy;
        space.pager.park(&mut batch);
        assert_eq!(space.pager.release_kept(8, |_| {}), 1);
    });
}

/// The position from which the search continues grows with each search that finds nothing. After 262,144
/// searches, position plus step overflowed 32 bits.
#[test]
fn search_for_kept_slots_may_go_on_anywhere() {
    with_space(|space| {
        page_that_keeps_its_slot(space);
        let found = space.pager.areas().find_owned(AreaId(0), u32::MAX, 100, |_| true);
        assert!(found.is_some());
    });
}

/// Pages shared since a fork were copied so that they could be evicted. The hand came back to them only a lap
/// later, and by then all of memory had been copied.
#[test]
fn pages_that_were_refused_and_no_longer_are_go_next() {
    with_space(|space| {
        let (pager, first) = (&space.pager, space.program.borrow().all().start);
        for page in (0..4).map(|at| first.plus(at)) {
            let Step::Zero(ticket) = pager.fault(page, Access::Write) else { panic!("a first touch") };
            pager.settle_fault(ticket, Backing::Memory);
        }
        let mut batch = Batch::new();
        let mut refused = |wanted: [u64; 2]| {
            pager.begin_evict(&mut batch, 2);
            let pages: Vec<_> = batch.victims().iter().map(|victim| victim.page).collect();
            assert_eq!(pages, wanted.map(|at| first.plus(at)));
            batch.victims().iter_mut().for_each(|victim| victim.taken = Taken::Busy);
            pager.park(&mut batch);
            pages
        };
        let shared = refused([0, 1]);
        pager.choose_next(shared.into_iter());
        refused([0, 1]);
        refused([2, 3]);
    });
}

/// The hand went through the pages that a call held batch by batch. After 16 batches a thread found nothing
/// to evict for 20 ms.
#[test]
fn hand_passes_over_what_a_call_holds() {
    with_space(|space| {
        let (pager, first) = (&space.pager, space.program.borrow().all().start);
        for page in (0..6).map(|at| first.plus(at)) {
            let Step::Zero(ticket) = pager.fault(page, Access::Write) else { panic!("a first touch") };
            pager.settle_fault(ticket, Backing::Memory);
        }
        let chosen = || {
            let mut batch = Batch::new();
            pager.begin_evict(&mut batch, 1);
            let page = batch.victims()[0].page;
            assert_eq!(pager.release_held(&mut batch, 1), 1);
            page
        };
        assert_eq!(chosen(), first);
        pager.pass_over(PageRange::of(first, 4));
        assert_eq!(chosen(), first.plus(4));
        pager.pass_over(PageRange::of(first, 4));
        assert_eq!(chosen(), first.plus(5), "the hand isn't there: it stays where it is");
    });
}

/// Faults were counted by the page's source, not by whether a thread had touched the page. Neighbours mapped
/// along with a first touch counted as faults, and pages of zeros that came back did not.
#[test]
fn pages_count_as_faults_only_if_they_were_touched() {
    with_space(|space| {
        let (pager, page) = (&space.pager, space.program.borrow().all().start);
        let left = Backing::Memory;
        let counts = || {
            [Counter::FaultFirst, Counter::ZeroAhead, Counter::SwpinZero, Counter::FaultPool]
                .map(|counter| pager.stats().get(counter))
        };
        let Step::Zero(touched) = pager.fault(page, Access::Write) else { panic!("a first touch") };
        let neighbour = pager.lock_absent(page.plus(1)).expect("nobody has touched it");
        pager.settle_fault(touched, left);
        pager.settle_fault(neighbour, left);
        assert_eq!(counts(), [1, 1, 0, 0]);

        let mut batch = Batch::new();
        pager.begin_evict(&mut batch, 1);
        let victim = &mut batch.victims()[0];
        space.frames.borrow_mut().copy_in(victim.frame, &[0; PAGE_BYTES]);
        victim.taken = Taken::Yes;
        let evicted = victim.page;
        pager.park(&mut batch);
        let mut writes = WriteBatch::new();
        let placed = space.with_scratch(|scratch| pager.place_oldest(scratch, &mut writes));
        assert_eq!((placed, pager.state(evicted)), (Placed::Done, State::Zero));
        let Step::Zero(ticket) = pager.fault(evicted, Access::Read) else { panic!("a page of zeros") };
        pager.settle_fault(ticket, left);
        assert_eq!(counts(), [1, 1, 1, 1]);
    });
}

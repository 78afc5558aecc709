//! The invariants that hold across components, by number, and the tests that show them. Invariants that
//! belong to no single structure are shown here, through the pager and a driver (`driver`).
//!
//! | | invariant | shown by |
//! |---|---|---|
//! | 1 | a slot is free again only when nothing counts on it | `check::all` after each step of the simulator; `areas::tests::invariant_1_*`; `areas::slots::tests::no_slot_is_handed_out_twice_and_all_are_found` |
//! | 2 | after a failed store no older copy is in the pool | here; `zswap::index::tests::invariant_2_*`, `defect_4_*` |
//! | 3 | whether a page is zeros is found anew at each eviction | here |
//! | 4 | a page on its way is locked, and who locks it looks again | here; `table::entry::loomed` |
//! | 5 | the pool's write-back holds the page and compares identities | here; `zswap::index::tests::invariant_5_*`; `sim/tests/planted.rs`, `SkipIdentityCheck`, `DensifyWhatIsThere` |
//! | 6 | a failed write keeps the page; a failed read is an error, never zeros | here; `sim`'s oracle under faults of devices |
//! | 7 | slots in use are what clusters count, less what can't be used | `areas::slots::tests::invariant_7_*` |
//! | 8 | extents cover every slot once, however they were merged | `areas::extents::tests::invariant_8_*` |
//! | 9 | no run crosses a cluster | `areas::slots::tests::invariant_9_*` |
//! | 10 | automatic priorities | `areas::order::tests::invariant_10_*` |
//! | 11 | readahead isn't waited for; it stays in region, 2 MiB and area | property tests of `readahead::by_address`, `by_slot`, `streams` |
//! | 12 | off empties an area or restores it unchanged | `areas::tests::invariant_12_*`, `areas::order::tests::invariant_12_*` |
//! | 13 | never more readahead hits than pages read ahead | `readahead::streams::tests::windows_stay_in_their_range_and_hits_below_pages_issued` |
//! | 14 | a fork's child has every byte as of the fork, and its parent's slots stay as long as it is there | here; `areas::heirs::tests`; `tests/programs/processes.c` |

mod driver;
mod packs;
mod wholes;

use driver::*;
use farpage_core::areas::AreaState;
use farpage_core::check::{self, InFlight};
use farpage_core::pager::{
    Access, Batch, Densified, Opening, Placed, Shrunk, Step, Taken, WriteBatch, WriteProgress,
};
use farpage_core::readahead::Plan;
use farpage_core::reclaim::recency::{AGE_NEAR, Lone};
use farpage_core::stats::Counter;
use farpage_core::table::entry::{State, Stored};
use farpage_core::table::ranges::Flags;
use farpage_core::units::{AreaId, NodeId, PAGE_BYTES, PageIndex, PageRange, SlotPart};
use std::sync::atomic::AtomicU32;

#[test]
fn invariant_2_after_a_failed_store_the_pool_has_no_older_copy() {
    let mut driver = driver(64 << 10, false);
    driver.first_touch(PAGE);
    assert!(matches!(driver.evict_and_place(PAGE, 1), State::Pooled(_)));
    let ticket = driver.begin_load(PAGE);
    assert_eq!(driver.finish_load(ticket), bytes_of(1));
    // The page changes, and this time the pool has no free space.
    driver.pager.pool().set_limit(0);
    assert!(matches!(driver.evict_and_place(PAGE, 2), State::Parked { .. }));
    assert_eq!(driver.pager.pool().usage().objects, 0, "the old bytes are still there");
    let Step::Install(ticket) = driver.pager.fault(PAGE, Access::Read) else { panic!("it is parked") };
    assert_eq!(*driver.frame(ticket.frame().unwrap()), bytes_of(2));
    driver.pager.settle_fault(ticket, LEFT);
    driver.check();
}

#[test]
fn invariant_3_whether_a_page_is_zeros_is_found_anew_at_each_eviction() {
    let mut driver = driver(64 << 10, false);
    driver.first_touch(PAGE);
    for _ in 0..3 {
        assert_eq!(driver.evict_and_place(PAGE, 0), State::Zero);
        driver.first_touch(PAGE);
        assert!(matches!(driver.evict_and_place(PAGE, 1), State::Pooled(_)));
        let ticket = driver.begin_load(PAGE);
        assert_eq!(driver.finish_load(ticket), bytes_of(1));
    }
    assert_eq!(driver.evict_and_place(PAGE, 0), State::Zero);
    assert_eq!(driver.pager.pool().usage().objects, 0);
    driver.check();
}

/// The page still owns a slot with other bytes, and loses the slot when it goes.
#[test]
fn invariant_3_a_page_that_becomes_zeros_leaves_its_slot() {
    let mut driver = driver(0, true);
    driver.first_touch(PAGE);
    let slot = driver.evict_to_area(PAGE, 1);
    let Step::Read(ticket) = driver.pager.fault(PAGE, Access::Read) else { panic!("it is on the area") };
    *driver.frame(ticket.frame().unwrap()) = bytes_of(1);
    assert_eq!(driver.pager.read_done(&ticket, &mut driver.scratch), Ok(()));
    driver.pager.settle_fault(ticket, LEFT);
    assert!(
        matches!(driver.pager.state(PAGE), State::Resident { copy: Some(Stored::Slot(kept)), .. } if kept == SlotPart::whole(slot))
    );
    assert_eq!(driver.evict_and_place(PAGE, 0), State::Zero);
    assert_eq!(driver.pager.areas().in_use(), 0);
    driver.check();
}

#[test]
fn invariant_4_a_page_on_its_way_is_locked_and_who_locks_it_looks_again() {
    let mut driver = driver(64 << 10, true);
    driver.first_touch(PAGE);
    assert!(matches!(driver.evict_and_place(PAGE, 1), State::Pooled(_)));
    let seen_before = driver.pager.table().get(PAGE).unwrap().entry().load();
    let ticket = driver.begin_load(PAGE);
    // The page is being filled. No other thread gets it, by whatever call.
    assert!(matches!(driver.pager.fault(PAGE, Access::Read), Step::Joined));
    let mut writes = WriteBatch::new();
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Busy);
    assert!(driver.pager.quiet(PageRange::of(PAGE, 1)).is_err());
    assert!(driver.pager.table().get(PAGE).unwrap().entry().try_lock(seen_before).is_err());
    assert_eq!(driver.finish_load(ticket), bytes_of(1));
    // A thread that looked before the page was locked finds out that its view is outdated.
    let now = driver.pager.table().get(PAGE).unwrap().entry().try_lock(seen_before).unwrap_err();
    assert!(now.state().is_resident() && !now.is_locked());
    driver.check();
}

#[test]
fn what_is_old_becomes_denser_where_nobody_is_on_its_way_to_it() {
    let mut driver = driver(64 << 10, false);
    driver.first_touch(PAGE);
    assert!(matches!(driver.evict_and_place_words(PAGE, 1), State::Pooled(_)));
    let before = driver.pager.pool().usage().payload_bytes;
    assert_eq!(driver.densify(true), Densified::Nothing, "it isn't old");
    driver.pager.pool().turn();
    driver.pager.pool().turn();
    // Without an area, densifying is the way to free space in the pool.
    let mut writes = WriteBatch::new();
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::NoArea);
    assert_eq!(driver.densify(true), Densified::Shorter);
    let State::Pooled(denser) = driver.pager.state(PAGE) else { panic!("it stays in the pool") };
    assert_eq!(driver.pager.pool().owner(denser), Some(PAGE));
    assert!(driver.pager.pool().usage().payload_bytes * 8 <= before * 7);
    assert_eq!(driver.densify(false), Densified::Nothing, "it was looked at");
    driver.check();
    let ticket = driver.begin_load(PAGE);
    assert_eq!(driver.finish_load(ticket), words_of(1));

    // The object is as it was stored at first, and the page is being brought in.
    assert!(matches!(driver.evict_and_place_words(PAGE, 1), State::Pooled(_)));
    let ticket = driver.begin_load(PAGE);
    assert_eq!(driver.densify(false), Densified::Busy);
    assert_eq!(driver.finish_load(ticket), words_of(1));
    // A page that can't become shorter is looked at once. Numbers can't.
    driver.evict_bytes(PAGE, &numbers());
    let stored = driver.place_evicted(PAGE);
    assert_eq!(driver.densify(false), Densified::AsItWas);
    assert_eq!((driver.densify(false), driver.pager.state(PAGE)), (Densified::Nothing, stored));
    driver.check();
}

#[test]
fn invariant_5_write_back_leaves_a_page_alone_that_is_on_its_way_or_gone() {
    let mut driver = driver(64 << 10, true);
    driver.first_touch(PAGE);
    let State::Pooled(first) = driver.evict_and_place(PAGE, 1) else { panic!("it compresses") };
    let mut writes = WriteBatch::new();
    let ticket = driver.begin_load(PAGE);
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Busy);
    assert_eq!((writes.len(), driver.pager.pool().owner(first)), (0, Some(PAGE)));
    driver.finish_load(ticket);
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Enough);
    // The page is stored anew under the same handle. The write takes the bytes that are there now.
    assert_eq!(driver.evict_and_place(PAGE, 2), State::Pooled(first));
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Queued);
    let frames: Vec<_> = writes.frames().collect();
    let State::Writing { frame } = driver.pager.state(PAGE) else { panic!("it waits") };
    assert_eq!(*driver.frame(frame), bytes_of(2));
    assert_eq!(driver.pager.pool().usage().objects, 0);
    check::all(&driver.pager, &InFlight { writing: &frames, ..InFlight::default() });
}

#[test]
fn invariant_6_a_failed_write_keeps_the_page() {
    for state in [AreaState::ReadOnly, AreaState::Full] {
        let mut driver = driver(0, true);
        driver.first_touch(PAGE);
        driver.evict(PAGE, 1);
        let mut writes = WriteBatch::new();
        assert_eq!(driver.place(&mut writes), Placed::Queued);
        let mut request = driver.pager.assign(0, NodeId(0), &mut writes).expect("a slot");
        assert_eq!(driver.pager.write_done(&mut request, Err(state)), WriteProgress::Finished);
        assert_eq!((driver.pager.areas().state(AreaId(0)), driver.pager.areas().in_use()), (state, 0));
        let counters = [Counter::Pswpout, Counter::AreaWrites, Counter::AreaSlots];
        assert_eq!(counters.map(|counter| driver.pager.stats().get(counter)), [0; 3], "nothing was written");
        driver.check();
        let Step::Install(ticket) = driver.pager.fault(PAGE, Access::Read) else { panic!("it is parked") };
        assert_eq!(*driver.frame(ticket.frame().unwrap()), bytes_of(1));
        driver.pager.settle_fault(ticket, LEFT);
        driver.check();
    }
}

/// A page that came back while it was being written freed its slot, and made a full area writable again.
#[test]
fn full_area_stays_full_when_a_page_has_come_back_during_the_failed_write() {
    let mut driver = driver(0, true);
    driver.first_touch(PAGE);
    driver.evict(PAGE, 1);
    let mut writes = WriteBatch::new();
    assert_eq!(driver.place(&mut writes), Placed::Queued);
    let mut request = driver.pager.assign(0, NodeId(0), &mut writes).expect("a slot");
    let ticket = driver.begin_load(PAGE);
    assert_eq!(driver.finish_load(ticket), bytes_of(1));
    assert_eq!(driver.pager.write_done(&mut request, Err(AreaState::Full)), WriteProgress::Finished);
    assert_eq!(driver.pager.areas().state(AreaId(0)), AreaState::Full);
    driver.check();
}

/// An area that can't be written may soon not be readable either. A page in memory once went back to its old
/// slot on a failed area, and was lost with the slot.
#[test]
fn invariant_6_a_page_in_memory_is_left_to_an_area_that_failed_only_if_nothing_else_takes_it() {
    for has_free_space in [true, false] {
        let mut driver = driver(64 << 10, true);
        driver.pager.pool().set_limit(0);
        driver.first_touch(PAGE);
        let slot = driver.evict_to_area(PAGE, 1);
        assert_eq!(bring(&mut driver, PAGE, 1), bytes_of(1));
        driver.pager.areas().set_state(AreaId(0), AreaState::ReadOnly);
        driver.pager.pool().set_limit(if has_free_space { 64 << 10 } else { 0 });
        let state = driver.evict_and_place(PAGE, 1);
        if has_free_space {
            assert!(matches!(state, State::Pooled(_)), "{state:?}");
            assert_eq!(driver.pager.areas().in_use(), 0);
        } else {
            assert_eq!(state, State::OnArea(SlotPart::whole(slot)));
        }
        driver.check();
    }
}

#[test]
fn invariant_6_a_failed_read_is_an_error_for_good_and_never_zeros() {
    let mut driver = driver(0, true);
    driver.first_touch(PAGE);
    let slot = driver.evict_to_area(PAGE, 1);
    let Step::Read(ticket) = driver.pager.fault(PAGE, Access::Read) else { panic!("it is on the area") };
    // The device says that it has read, but zeros came.
    *driver.frame(ticket.frame().unwrap()) = bytes_of(0);
    assert_eq!(driver.pager.read_done(&ticket, &mut driver.scratch), Err(slot));
    driver.pager.fail(ticket, slot);
    for access in [Access::Read, Access::Write] {
        assert!(matches!(driver.pager.fault(PAGE, access), Step::Lost(lost) if lost == slot));
    }
    driver.check();
    // Another page never gets the slot that could not be read.
    driver.first_touch(OTHER);
    assert_ne!(driver.evict_to_area(OTHER, 2), slot);
    driver.check();
}

/// Returns a child of `parent`, with the same area. The parent's books never change again.
fn child_of(parent: Driver, holders: &'static [AtomicU32], me: u32) -> Driver {
    child_and_elder(parent, holders, me).0
}

/// Returns a child of `parent`, and the parent's books.
fn child_and_elder(parent: Driver, holders: &'static [AtomicU32], me: u32) -> (Driver, &'static Driver) {
    let elder: &'static Driver = Box::leak(Box::new(parent));
    elder.pager.forget_holders();
    let child = driver_of(64 << 10, Some(area(holders, me)), Some(&elder.pager));
    child.pager.inherit(PageRange::of(PageIndex(0), 100), |page| panic!("{page:?} isn't there"));
    (child, elder)
}

/// Serves a fault on a page that is out. `on_disk` is the content of its slot. Returns the page's bytes.
fn bring(driver: &mut Driver, page: PageIndex, on_disk: u8) -> [u8; PAGE_BYTES] {
    match driver.pager.fault(page, Access::Read) {
        Step::Zero(ticket) => {
            driver.pager.settle_fault(ticket, LEFT);
            [0; PAGE_BYTES]
        }
        Step::Read(ticket) => {
            *driver.frame(ticket.frame().unwrap()) = bytes_of(on_disk);
            driver.pager.read_done(&ticket, &mut driver.scratch).unwrap();
            driver.pager.settle_fault(ticket, LEFT);
            bytes_of(on_disk)
        }
        Step::Load(ticket) => driver.finish_load(ticket),
        step => panic!("{step:?}"),
    }
}

#[test]
fn invariant_14_a_child_finds_each_page_where_its_parent_had_put_it() {
    let holders: &'static [AtomicU32] = table(1);
    let mut parent = driver_of(64 << 10, Some(area(holders, 1)), None);
    let [parked, pooled, same, zero, disk, writing, lost, resident] = [0, 1, 2, 3, 4, 5, 6, 7].map(PageIndex);
    for (page, kind) in [(pooled, 11), (same, 12), (zero, 0)] {
        parent.first_touch(page);
        parent.evict_and_place(page, kind);
    }
    // Pages that are stored from here on go to the area.
    parent.pager.pool().set_limit(0);
    parent.first_touch(disk);
    let slot = parent.evict_to_area(disk, 14);
    parent.first_touch(lost);
    let gone = parent.evict_to_area(lost, 16);
    let Step::Read(ticket) = parent.pager.fault(lost, Access::Read) else { panic!("it is on the area") };
    assert!(!parent.pager.has_lost());
    parent.pager.fail(ticket, gone);
    parent.first_touch(writing);
    parent.evict(writing, 15);
    let mut writes = WriteBatch::new();
    assert_eq!(parent.place(&mut writes), Placed::Queued);
    parent.first_touch(parked);
    parent.evict(parked, 10);
    parent.first_touch(resident);

    parent.pager.bequeath(0);
    let mut child = child_of(parent, holders, 2);
    assert_eq!(child.pager.state(resident), State::Absent, "the kernel has copied it");
    assert_eq!(child.pager.state(zero), State::Zero);
    assert_eq!((child.pager.evicted(), child.pager.inherited()), (6, 5));
    // The child's own children must not take lost pages for zeros.
    assert!(child.pager.has_lost());
    child.check();

    // A child of the child inherits before the child has looked at all pages: some were brought in, the rest
    // was not.
    assert_eq!(bring(&mut child, writing, 0), bytes_of(15));
    let mut grandchild = child_of(child, holders, 3);
    assert_eq!(grandchild.pager.inherited(), 4);
    grandchild.pager.remap(PageRange::of(disk, 1), PageIndex(50));
    for (page, kind) in [(parked, 10), (pooled, 11), (same, 12), (PageIndex(50), 14), (zero, 0)] {
        assert_eq!(bring(&mut grandchild, page, kind), bytes_of(kind), "{page:?}");
        grandchild.check();
    }
    assert!(matches!(grandchild.pager.fault(lost, Access::Read), Step::Lost(_)));
    assert_eq!((grandchild.pager.inherited(), grandchild.pager.areas().in_use()), (0, 0));
    assert_eq!(slot.area(), AreaId(0));
}

#[test]
fn invariant_14_what_a_child_throws_away_it_inherits_no_more() {
    let holders: &'static [AtomicU32] = table(1);
    let mut parent = driver_of(64 << 10, Some(area(holders, 1)), None);
    parent.first_touch(PAGE);
    assert!(matches!(parent.evict_and_place(PAGE, 1), State::Pooled(_)));
    let mut child = child_of(parent, holders, 2);
    child.pager.discard(PageRange::of(PAGE, 1));
    assert_eq!((child.pager.state(PAGE), child.pager.inherited()), (State::Absent, 0));
    assert_eq!(bring(&mut child, PAGE, 0), [0; PAGE_BYTES]);
    child.check();
}

/// An engine that had ended kept slots. A hook that forgot the page later freed a slot that another process
/// had by then.
#[test]
fn what_is_let_go_holds_no_slot_and_is_not_freed_again() {
    let mut driver = driver_of(0, Some(area(table(1), 1)), None);
    let [used, lost, unmapped] = [0, 1, 2].map(PageIndex);
    let slots = [(used, 1), (lost, 2), (unmapped, 3)].map(|(page, kind)| {
        driver.first_touch(page);
        driver.evict_to_area(page, kind)
    });
    assert_eq!(bring(&mut driver, used, 1), bytes_of(1));
    let Step::Read(ticket) = driver.pager.fault(lost, Access::Read) else { panic!("it is on the area") };
    *driver.frame(ticket.frame().unwrap()) = bytes_of(0);
    assert_eq!(driver.pager.read_done(&ticket, &mut driver.scratch), Err(slots[1]));
    driver.pager.fail(ticket, slots[1]);
    assert_eq!(driver.pager.areas().in_use(), 3, "the page in memory has kept its slot");
    let all = PageRange::new(used, PageIndex(3));
    driver.pager.let_go(all);
    assert_eq!(driver.pager.areas().in_use(), 1, "the slot that could not be read stays taken");
    assert!(matches!(driver.pager.state(used), State::Resident { copy: None, .. }));
    assert!(matches!(driver.pager.state(lost), State::Lost(_)), "it would read as zeros");
    assert_eq!(driver.pager.state(unmapped), State::Absent);
    driver.check();
    driver.pager.discard(all);
    assert_eq!(driver.pager.areas().in_use(), 1);
    driver.check();
}

/// A child once kept all of its parent's pool until it had looked at the last page in it.
#[test]
fn what_a_child_needs_no_more_leaves_the_pool_that_it_has_inherited() {
    let holders: &'static [AtomicU32] = table(1);
    let mut parent = driver_of(64 << 10, Some(area(holders, 1)), None);
    let pages = [0, 1, 2].map(PageIndex);
    for (page, kind) in pages.into_iter().zip(1..) {
        parent.first_touch(page);
        assert!(matches!(parent.evict_and_place(page, kind), State::Pooled(_)));
    }
    let (mut child, elder) = child_and_elder(parent, holders, 2);
    let objects = || elder.pager.pool().usage().objects;
    assert_eq!(objects(), 3);
    assert_eq!(bring(&mut child, pages[0], 1), bytes_of(1));
    assert_eq!(objects(), 2, "the child has it in memory");
    child.pager.discard(PageRange::of(pages[1], 1));
    assert_eq!(objects(), 1, "the child has thrown it away");
    child.pager.remap(PageRange::of(pages[2], 1), PageIndex(50));
    assert_eq!(objects(), 1, "what was moved is still inherited");
    assert_eq!(bring(&mut child, PageIndex(50), 3), bytes_of(3));
    assert_eq!(objects(), 0);
    child.check();
}

/// The bytes of a slot that has changed are never the child's. The child's page is lost, and stays so.
#[test]
fn invariant_14_an_inherited_page_that_can_not_be_read_is_lost() {
    let holders: &'static [AtomicU32] = table(1);
    let mut parent = driver_of(0, Some(area(holders, 1)), None);
    parent.first_touch(PAGE);
    parent.evict_to_area(PAGE, 1);
    let mut child = child_of(parent, holders, 2);
    let Step::Read(ticket) = child.pager.fault(PAGE, Access::Read) else { panic!("it is on the area") };
    *child.frame(ticket.frame().unwrap()) = bytes_of(2);
    let slot = child.pager.read_done(&ticket, &mut child.scratch).unwrap_err();
    child.pager.fail(ticket, slot);
    assert!(matches!(child.pager.fault(PAGE, Access::Read), Step::Lost(_)));
    child.pager.discard(PageRange::of(PAGE, 1));
    child.check();
}

/// Half of the touches go through new memory, page by page. Half are anywhere in a third of the pages that
/// fit. Without a look at how long pages are out, a quarter of the touches in that third find their page
/// gone.
#[test]
fn what_is_used_stays_while_a_walk_goes_through_memory() {
    const USED: u64 = 20;
    const WALKED: u64 = 80;
    const RESIDENT_MAX: u64 = 60;
    let mut driver = driver(64 << 10, false);
    let (mut random, mut missed) = (7_u64, 0);
    for n in 0..40_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let page = PageIndex(if n % 2 == 0 { (random >> 33) % USED } else { USED + n / 2 % WALKED });
        if n % 2 == 1 {
            driver.pager.discard(PageRange::of(page, 1));
            let ticket = driver.pager.lock_absent(page).expect("nobody else moves it");
            driver.pager.settle_fault(ticket, LEFT);
        } else if !driver.pager.state(page).is_resident() {
            missed += u32::from(n >= 20_000);
            driver.first_touch(page);
        }
        while driver.pager.resident() > RESIDENT_MAX {
            assert!(driver.evict_zeros() > 0);
        }
    }
    driver.check();
    assert!((100..1_000).contains(&missed), "{missed} of 10,000");
}

/// Touches at random in 120 pages, half of them in the first 20, with memory for 60. Remembering which pages
/// come back soon saves two thirds of the faults on the first 20.
#[test]
fn what_is_touched_often_stays_where_lone_victims_are_cheap() {
    const HOT: u64 = 20;
    const ALL: u64 = 120;
    const RESIDENT_MAX: u64 = 60;
    let missed_with = |lone| {
        let mut driver = driver(64 << 10, false);
        driver.pager.lone_victims_are(lone);
        let (mut random, mut missed) = (7_u64, [0; 2]);
        for n in 0..80_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = PageIndex((random >> 34) % if random >> 33 & 1 == 0 { HOT } else { ALL });
            if !driver.pager.state(page).is_resident() {
                missed[usize::from(page.0 >= HOT)] += u32::from(n >= 40_000);
                driver.first_touch(page);
            }
            while driver.pager.resident() > RESIDENT_MAX {
                assert!(driver.evict_zeros() > 0);
            }
        }
        driver.check();
        missed
    };
    let ([hot, others], [hot_before, others_before]) = (missed_with(Lone::Cheap), missed_with(Lone::Dear));
    let all = (hot + others, hot_before + others_before);
    assert!(hot * 2 < hot_before && all.0 < all.1, "{hot} of {hot_before} hot ones, of all {all:?}");
}

/// A page that is to be spared for many laps goes when no other page can.
#[test]
fn when_all_pages_are_to_be_spared_some_go_all_the_same() {
    let mut driver = driver(64 << 10, false);
    for page in (0..80).map(PageIndex) {
        let ticket = driver.pager.lock_absent(page).expect("nobody else moves it");
        driver.pager.settle_fault(ticket, LEFT);
    }
    (0..5).for_each(|_| assert_eq!(driver.evict_zeros(), 4));
    driver.pager.discard(PageRange::new(PageIndex(20), PageIndex(80)));
    (0..20).for_each(|page| driver.first_touch(PageIndex(page)));
    for page in (0..20).map(PageIndex) {
        let State::Resident { age, .. } = driver.pager.state(page) else { panic!("it was touched") };
        assert_eq!(age, AGE_NEAR);
    }
    assert_eq!(driver.evict_zeros(), 4);
    driver.check();
}

const FIRST: PageIndex = PageIndex(1_000);

/// Touches pages from `FIRST` on while there is memory for `pages_max` pages. Returns how many came back in.
fn go(driver: &mut Driver, pages_max: u64, pages: impl Iterator<Item = u64>) -> u64 {
    let count = |driver: &Driver| driver.pager.stats().get(Counter::SwpinZero);
    let before = count(driver);
    for page in pages {
        driver.touch(FIRST.plus(page), Access::Read);
        while driver.pager.resident() > pages_max {
            assert!(driver.evict_zeros() > 0);
        }
    }
    count(driver) - before
}

fn driver_to_walk(pages: u64) -> Driver {
    let driver = driver(64 << 10, false);
    driver.pager.ranges.lock().insert(PageRange::of(FIRST, pages), Flags::REGISTERED).unwrap();
    driver
}

/// By the hand alone, a walk that goes round finds little or nothing in memory: each page goes before the
/// walk comes to it again.
#[test]
fn a_walk_round_more_than_there_is_room_for_finds_there_what_there_is_room_for() {
    for (pages, most) in [(6_000, 3_600), (3_300, 600)] {
        let mut driver = driver_to_walk(pages);
        let laps: Vec<u64> = (0..8).map(|_| go(&mut driver, 3_000, 0..pages)).collect();
        assert!(laps[2..].iter().all(|came| *came <= most), "{laps:?} of {pages} pages");
        driver.check();
    }
}

/// Each block fits and is gone through twice. Pages behind the first walk through a block are needed for the
/// second.
#[test]
fn a_walk_that_soon_comes_round_again_is_left_to_the_hand() {
    let mut driver = driver_to_walk(18_000);
    let block = |n: u64| n % 12 * 1_500..(n % 12 + 1) * 1_500;
    let mut twice =
        |blocks: core::ops::Range<u64>| go(&mut driver, 3_000, blocks.flat_map(|n| block(n).chain(block(n))));
    twice(0..24);
    let came = twice(24..48);
    assert!((36_000..54_000).contains(&came), "{came}: 36,000 come for the first walk through each block");
    let (taken, behind) =
        (driver.pager.stats().get(Counter::EvictTaken), driver.pager.stats().get(Counter::EvictBehind));
    assert!(behind < taken / 2, "{behind} of {taken} behind walks");
    driver.check();
}

/// Pages that were shared since a fork, and are the program's own now, go next, wherever they were found.
/// Otherwise all pages that a walk has gone through would be copied before any of them goes.
#[test]
fn what_was_refused_behind_a_walk_goes_next() {
    let mut driver = driver_to_walk(100);
    go(&mut driver, 400, 0..100);
    while driver.evict_zeros() > 0 {}
    go(&mut driver, 400, 0..100);
    let refuse = || {
        let mut batch = Batch::new();
        driver.pager.begin_evict(&mut batch, 4);
        let pages: Vec<_> = batch.victims().iter().map(|victim| victim.page).collect();
        driver.pager.park(&mut batch);
        pages
    };
    let refused = refuse();
    assert_eq!(driver.pager.stats().get(Counter::EvictBehind), 4);
    driver.pager.choose_next(refused.iter().copied());
    assert_eq!(refuse(), refused);
    assert_ne!(refuse(), refused);
    driver.check();
}

/// Returns a stream's window, which is asked for when the third of its pages is touched.
fn window_behind(driver: &mut Driver, pages: u64) -> Plan {
    go(driver, 4 * pages, 0..pages);
    while driver.evict_zeros() > 0 {}
    let plans = (0..3).filter_map(|page| driver.touch_alone(FIRST.plus(page), Access::Read));
    plans.last().expect("three pages in a row are a stream")
}

/// Two windows of one stream can be on their way at once, and the younger may meet the older one's marker.
/// The marker was once mapped. The stream then went past it unseen, and was taken for one that jumps.
#[test]
fn a_marker_stays_parked_when_another_window_meets_it() {
    let mut driver = driver_to_walk(64);
    let plan = window_behind(&mut driver, 64);
    // Another thread is quicker with the window's first page, which goes again later.
    driver.first_touch(FIRST.plus(3));
    driver.bring(plan);
    let marker = FIRST.plus(4);
    assert!(matches!(driver.pager.state(marker), State::Parked { .. }));
    while driver.evict_zeros() > 0 {}
    driver.bring(plan);
    assert!(matches!(driver.pager.state(marker), State::Parked { .. }), "{:?}", driver.pager.state(marker));
    driver.check();
}

/// A window waited while the walk went on by itself. The pages that the walk has gone through aren't brought
/// in again if they have been evicted meanwhile.
#[test]
fn a_window_that_the_walk_has_gone_through_brings_nothing() {
    let mut driver = driver_to_walk(64);
    let plan = window_behind(&mut driver, 64);
    for page in 3..3 + u64::from(plan.count()) {
        driver.touch_alone(FIRST.plus(page), Access::Read);
    }
    while driver.evict_zeros() > 0 {}
    let mut opening = Opening::new(plan);
    assert!(driver.pager.lock_ahead(&mut opening).is_none());
    driver.pager.close_ahead(opening);
    driver.check();
}

/// Returns a driver whose pages from `FIRST` on are all in a pool that keeps objects.
fn driver_that_keeps(pages: u64) -> Driver {
    let mut driver = driver_that_accepts(90, 256 << 10, None, None);
    driver.pager.ranges.lock().insert(PageRange::of(FIRST, pages), Flags::REGISTERED).unwrap();
    for page in (0..pages).map(|at| FIRST.plus(at)) {
        driver.first_touch(page);
        assert!(matches!(driver.evict_and_place(page, 1), State::Pooled(_)));
    }
    driver
}

/// Touches pages of the pool in order, and brings in the windows that the touches lead to. Returns how many
/// of the pages keep their objects.
fn walk(driver: &mut Driver, pages: core::ops::Range<u64>) -> usize {
    for page in pages.clone().map(|at| FIRST.plus(at)) {
        let mut ticket = match driver.pager.fault(page, Access::Write) {
            Step::Present => continue,
            Step::Load(ticket) | Step::Install(ticket) => ticket,
            step => panic!("{step:?}"),
        };
        let plan = driver.pager.plan_ahead(&mut ticket).plan;
        driver.pager.settle_fault(ticket, LEFT);
        plan.into_iter().for_each(|plan| driver.bring(plan));
    }
    let keeps = |page: &u64| {
        matches!(driver.pager.state(FIRST.plus(*page)), State::Resident { copy: Some(Stored::Object(_)), .. })
    };
    pages.filter(keeps).count()
}

/// Takes every page out with the bytes of `kind`, and finds it a place.
fn evict_all(driver: &mut Driver, kind: u8) {
    let mut batch = Batch::new();
    while driver.pager.resident() > 0 {
        driver.pager.begin_evict(&mut batch, 4);
        for at in 0..batch.len() {
            *driver.frame(batch.victims()[at].frame) = bytes_of(kind);
            batch.victims()[at].taken = Taken::Yes;
        }
        driver.pager.park(&mut batch);
        while driver.pager.cache().usage().parked > 0 {
            let placed = driver.place(&mut WriteBatch::new());
            assert!(matches!(placed, Placed::Done | Placed::Busy), "{placed:?}");
        }
    }
}

/// Half of a walk's time was once spent compressing again the pages that it had only read.
#[test]
fn what_a_walk_brought_and_nobody_wrote_is_not_compressed_again() {
    let mut driver = driver_that_keeps(40);
    let kept = walk(&mut driver, 0..40);
    assert!(kept > 20, "{kept} of 40");
    driver.check();
    let count = |driver: &Driver, counter| driver.pager.stats().get(counter);
    let before = count(&driver, Counter::Zswpout);
    evict_all(&mut driver, 1);
    assert_eq!(count(&driver, Counter::EvictClean), kept as u64);
    assert_eq!(count(&driver, Counter::Zswpout), before + 40 - kept as u64);
    driver.check();
}

/// Only the bytes say that a page was written.
#[test]
fn what_was_written_is_compressed_anew() {
    let mut driver = driver_that_keeps(40);
    assert!(walk(&mut driver, 0..40) > 20);
    evict_all(&mut driver, 2);
    assert_eq!(driver.pager.stats().get(Counter::EvictClean), 0);
    driver.check();
    for page in (0..40).map(|at| FIRST.plus(at)) {
        let ticket = driver.begin_load(page);
        assert_eq!(driver.finish_load(ticket), bytes_of(2), "{page:?}");
    }
}

/// Where each page is written before it goes, its comparison with the old copy is wasted. Most windows keep
/// no objects then.
#[test]
fn where_everything_is_written_hardly_anything_is_kept() {
    let mut driver = driver_that_keeps(40);
    let mut lap = |kind| {
        let kept = walk(&mut driver, 0..40);
        evict_all(&mut driver, kind);
        kept
    };
    let kept: Vec<usize> = (0..40).map(|n| lap(1 + n % 2)).collect();
    assert!(kept[0] > 20 && kept[30..].iter().sum::<usize>() < kept[0] * 3, "{kept:?}");
    // Now the pages are only read. The change takes some time to be seen.
    let kept: Vec<usize> = (0..400).map(|_| lap(2)).collect();
    assert!(kept[390..].iter().all(|kept| *kept > 20), "{kept:?}");
    driver.check();
}

/// A window waits for a thread, and the walk goes on without the window. Then each page costs a fault, where
/// one fault will do for eight.
#[test]
fn a_walk_that_outruns_its_window_is_given_what_comes_next() {
    let mut driver = driver_that_keeps(40);
    let mut late = Vec::new();
    for page in (0..40).map(|at| FIRST.plus(at)) {
        let Step::Load(mut ticket) = driver.pager.fault(page, Access::Read) else { continue };
        let advice = driver.pager.plan_ahead(&mut ticket);
        driver.pager.settle_fault(ticket, LEFT);
        // No window is ever brought in.
        if let Some(window) = advice.late {
            late.push((page.0 - FIRST.0, window.first.0 - FIRST.0, window.count));
            driver.bring(Plan::CatchUp(window));
        }
    }
    // The pages don't go beyond the window: 8 pages from the fourth one on, and so on.
    assert!(late.len() >= 4 && late[0] == (3, 4, 7), "{late:?}");
    assert!(late.iter().all(|(page, first, count)| *first == page + 1 && *count <= 7), "{late:?}");
    let ahead = driver.pager.stats().get(Counter::SwapRa);
    assert!(ahead > 20, "{ahead} of 40 came along with others");
    driver.check();
}

/// Objects that are only kept are freed before anything is written, also without any area.
#[test]
fn kept_objects_make_room_in_the_pool_first() {
    let mut driver = driver_that_keeps(40);
    let kept = walk(&mut driver, 0..40);
    driver.pager.pool().set_limit(0);
    let mut writes = WriteBatch::new();
    let mut shrink = || driver.pager.shrink(&mut writes, &mut driver.scratch);
    for n in 0..kept {
        assert_eq!(shrink(), Shrunk::Released, "{n} of {kept}");
    }
    assert_eq!(shrink(), Shrunk::Enough);
    assert!((0..40).all(|page| !matches!(
        driver.pager.state(FIRST.plus(page)),
        State::Resident { copy: Some(Stored::Object(_)), .. }
    )));
    driver.check();
}

/// A page that stays for long doesn't keep its object, because other pages need the memory more.
#[test]
fn the_oldest_kept_objects_make_room_for_others() {
    let mut driver = driver_that_keeps(200);
    let kept = walk(&mut driver, 0..200);
    assert!((32..=64).contains(&kept), "{kept}");
    assert!(matches!(
        driver.pager.state(FIRST.plus(190)),
        State::Resident { copy: Some(Stored::Object(_)), .. }
    ));
    driver.check();
}

/// A walk round a small array comes to each page again soon. The walk needn't find the same pages there each
/// time for that. Pages spared for laps would lie between those that go, and each would end a run.
#[test]
fn a_page_that_a_walk_comes_to_is_not_spared() {
    let mut driver = driver_to_walk(40);
    for _ in 0..4 {
        go(&mut driver, 400, 0..40);
        for page in 3..40 {
            let state = driver.pager.state(FIRST.plus(page));
            assert!(matches!(state, State::Resident { age: 0, .. }), "{page}: {state:?}");
        }
        while driver.evict_zeros() > 0 {}
    }
}

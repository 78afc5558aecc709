//! Pages that don't compress. In the pool they take as much memory as in the program. So only few of them
//! wait there where an area is needed anyway. Otherwise half of the budget can become a pool full of them.

use crate::driver::*;
use farpage_core::check::{self, InFlight};
use farpage_core::config::Codec;
use farpage_core::pager::{Placed, Shrunk, WriteBatch, WriteProgress};
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::units::{NodeId, PAGE_BYTES, PageIndex};

/// The pool's limit. A sixteenth of it is two pages.
const POOL_BYTES: usize = 32 * PAGE_BYTES;
const PAGES: [PageIndex; 6] =
    [PageIndex(3), PageIndex(4), PageIndex(6), PageIndex(7), PageIndex(8), PageIndex(20)];

fn driver_for_wholes(with_area: bool) -> Driver {
    driver_that_accepts(90, POOL_BYTES, with_area.then(|| area(table(1), 1)), None)
}

/// Evicts a page of noise. Returns the state that it ends in.
fn evict_noise(driver: &mut Driver, page: PageIndex, writes: &mut WriteBatch) -> State {
    driver.first_touch(page);
    driver.evict_bytes(page, &noise());
    assert_ne!(driver.place(writes), Placed::Nothing);
    driver.pager.state(page)
}

fn check_with(driver: &Driver, writes: &WriteBatch) {
    let writing: Vec<_> = writes.frames().collect();
    check::all(&driver.pager, &InFlight { writing: &writing, ..InFlight::default() });
}

/// Writes the object that the shrinker takes next.
fn shrink_to_area(driver: &mut Driver) {
    let mut writes = WriteBatch::new();
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Queued);
    let mut request = driver.pager.assign(0, NodeId(0), &mut writes).expect("a slot");
    assert_eq!(driver.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
}

/// All pages that don't compress, but for a few, once went to the area although the pool had free space for
/// everything that was out. Each touch of one was then a read.
#[test]
fn where_the_pool_holds_all_that_is_out_they_stay() {
    let mut driver = driver_for_wholes(true);
    let states = PAGES.map(|page| evict_noise(&mut driver, page, &mut WriteBatch::new()));
    assert!(states.iter().all(|state| matches!(state, State::Pooled(_))), "{states:?}");
    assert!(!driver.pager.should_shrink());
    driver.check();
}

#[test]
fn where_an_area_is_needed_few_wait_in_the_pool_and_the_oldest_go_first() {
    let mut driver = driver_for_wholes(true);
    // The pool gets more than it takes, and the oldest pages go to the area. With the second one, at least
    // one in 16 of the pages that are out is on the area.
    let mut pages = (3..).map(PageIndex);
    for written in 0..2 {
        while !driver.pager.pool().over_accept_threshold() {
            assert_eq!(driver.pager.areas().in_use(), written);
            evict_noise(&mut driver, pages.next().unwrap(), &mut WriteBatch::new());
        }
        assert!(driver.pager.should_shrink());
        shrink_to_area(&mut driver);
    }
    assert!(driver.pager.should_shrink() && !driver.pager.pool().over_accept_threshold());
    let is_on_area = |driver: &Driver, page| matches!(driver.pager.state(page), State::OnArea(_));
    assert!(is_on_area(&driver, PageIndex(3)) && is_on_area(&driver, PageIndex(4)));

    // Far from full, the pool is shrunk until the next pages that don't compress fit.
    while driver.pager.should_shrink() {
        shrink_to_area(&mut driver);
    }
    assert!(driver.pager.pool().usage().objects == 1 && !driver.pager.pool().over_accept_threshold());
    let mut writes = WriteBatch::new();
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Enough);
    driver.check();

    let next = [(); 4].map(|()| evict_noise(&mut driver, pages.next().unwrap(), &mut writes));
    let are_pooled = next.map(|state| matches!(state, State::Pooled(_)));
    assert_eq!(are_pooled, [true, true, false, false], "more than two are too many");
    assert!(next[2..].iter().all(|state| matches!(state, State::Writing { .. })), "{next:?}");
    assert_eq!((writes.len(), driver.pager.stats().get(Counter::PoolLimitHit)), (2, 0));
    check_with(&driver, &writes);

    // A page that compresses goes to the pool all the same.
    let page = pages.next().unwrap();
    driver.first_touch(page);
    assert!(matches!(driver.evict_and_place(page, 1), State::Pooled(_)));
}

#[test]
fn without_an_area_they_have_nowhere_else_to_be() {
    let mut driver = driver_for_wholes(false);
    let states = PAGES.map(|page| evict_noise(&mut driver, page, &mut WriteBatch::new()));
    assert!(states.iter().all(|state| matches!(state, State::Pooled(_))), "{states:?}");
    assert!(!driver.pager.should_shrink());
    driver.check();
}

#[test]
fn without_a_codec_the_pool_is_for_them() {
    let mut driver = driver_for_wholes(true);
    driver.pager.config.codec = Codec::None;
    let states = PAGES.map(|page| evict_noise(&mut driver, page, &mut WriteBatch::new()));
    assert!(states.iter().all(|state| matches!(state, State::Pooled(_))), "{states:?}");
    assert!(!driver.pager.should_shrink());
    driver.check();
}

//! Pages that don't compress: in the pool they take as much memory as in the program, so only few wait there where there is an
//! area. (A program with 9 MiB of random numbers in 8 MiB took 185 s: half of the budget was a pool full of them. It takes 1.5.)

use crate::driver::*;
use farpage_core::check::{self, InFlight};
use farpage_core::config::Codec;
use farpage_core::pager::{Placed, Shrunk, WriteBatch};
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::units::{PAGE_BYTES, PageIndex};

/// Of these, a sixteenth is two pages.
const POOL_BYTES: usize = 32 * PAGE_BYTES;
const PAGES: [PageIndex; 6] =
    [PageIndex(3), PageIndex(4), PageIndex(6), PageIndex(7), PageIndex(8), PageIndex(20)];

fn driver_for_wholes(with_area: bool) -> Driver {
    driver_that_accepts(90, POOL_BYTES, with_area.then(|| area(table(1), 1)), None)
}

/// Evicts a page of noise: where it is then.
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

#[test]
fn with_an_area_few_wait_in_the_pool_and_the_oldest_go_first() {
    let mut driver = driver_for_wholes(true);
    let mut writes = WriteBatch::new();
    let states = PAGES.map(|page| evict_noise(&mut driver, page, &mut writes));
    let are_pooled = states.map(|state| matches!(state, State::Pooled(_)));
    assert_eq!(are_pooled, [true, true, true, false, false, false], "more than two are too many");
    assert!(states[3..].iter().all(|state| matches!(state, State::Writing { .. })), "{states:?}");
    assert_eq!((writes.len(), driver.pager.stats().get(Counter::PoolLimitHit)), (3, 0));
    check_with(&driver, &writes);

    // What compresses isn't meant.
    driver.first_touch(PageIndex(30));
    assert!(matches!(driver.evict_and_place(PageIndex(30), 1), State::Pooled(_)));

    // Far from full, the pool is shrunk until there is room for the next ones.
    for page in &PAGES[..2] {
        assert!(driver.pager.should_shrink() && !driver.pager.pool().over_accept_threshold());
        assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Queued);
        assert!(matches!(driver.pager.state(*page), State::Writing { .. }), "{page:?} is the oldest");
    }
    assert!(!driver.pager.should_shrink());
    assert_eq!(driver.pager.shrink(&mut writes, &mut driver.scratch), Shrunk::Enough);
    assert!(matches!(driver.pager.state(PAGES[2]), State::Pooled(_)));
    assert_eq!(driver.pager.pool().usage().objects, 2);
    check_with(&driver, &writes);
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

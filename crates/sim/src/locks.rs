//! The witness of the simulator: a thread takes the core's locks in rising rank, and holds none while the
//! kernel or a device works for it. A breach is a violation, like a wrong byte.

use farpage_core::sync::{Witness, rank, set_witness};
use std::cell::Cell;

static WITNESS: Witness = Witness { takes, took, gives_back };

thread_local! {
    /// The locks that this thread holds: bit `n` for rank `n`.
    static HELD: Cell<u128> = const { Cell::new(0) };
}

/// Begins to watch the locks of all threads.
pub(crate) fn watch() {
    set_witness(&WITNESS);
}

/// Ends the run if this thread holds a lock of the core.
pub(crate) fn assert_none_held(during: &str) {
    let held = HELD.get();
    assert!(held == 0, "a lock of rank {} is held during {during}", innermost(held));
}

fn takes(rank: u8) {
    let held = HELD.get();
    let against = (0..128_u8).rev().find(|outer| held >> outer & 1 != 0 && !rank::may_follow(*outer, rank));
    if let Some(outer) = against {
        panic!("a lock of rank {rank} is taken while one of rank {outer} is held");
    }
    took(rank);
}

fn took(rank: u8) {
    let held = HELD.get();
    assert!(held >> rank & 1 == 0, "two locks of rank {rank} are held");
    HELD.set(held | 1 << rank);
}

fn gives_back(rank: u8) {
    HELD.set(HELD.get() & !(1 << rank));
}

/// Returns the highest rank among these locks.
const fn innermost(held: u128) -> u32 {
    held.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::sync::Lock;
    use std::panic::catch_unwind;

    #[test]
    fn locks_in_rising_rank_are_no_violation() {
        watch();
        let (pool, leaf) = (Lock::<_, { rank::POOL }>::new(()), Lock::<_, { rank::LEAF }>::new(()));
        let outer = pool.lock();
        let inner = leaf.lock();
        drop(outer);
        drop(inner);
        drop(pool.lock());
        assert_none_held("the end of the test");
    }

    #[test]
    fn lock_taken_against_the_order_is_a_violation() {
        watch();
        let broken = catch_unwind(|| {
            let (pool, cache) = (Lock::<_, { rank::POOL }>::new(()), Lock::<_, { rank::CACHE }>::new(()));
            let _pool = pool.lock();
            let _cache = cache.lock();
        });
        let message = *broken.unwrap_err().downcast::<String>().unwrap();
        assert_eq!(message, "a lock of rank 50 is taken while one of rank 60 is held");
        assert_none_held("the end of the test");
    }

    #[test]
    fn two_locks_of_one_rank_are_a_violation() {
        watch();
        let broken = catch_unwind(|| {
            let locks = [(); 2].map(Lock::<_, { rank::CLUSTER }>::new);
            let _guards = locks.each_ref().map(Lock::lock);
        });
        assert!(broken.is_err());
    }

    /// The order of the areas is taken before or after an area's slots, and never with them.
    #[test]
    fn order_of_the_areas_is_not_taken_with_slots_held() {
        watch();
        let broken = catch_unwind(|| {
            let cluster = Lock::<_, { rank::CLUSTER }>::new(());
            let order = Lock::<_, { rank::AREA_ORDER }>::new(());
            let _cluster = cluster.lock();
            let _order = order.lock();
        });
        assert!(broken.is_err());
    }

    #[test]
    fn lock_that_was_only_tried_counts_as_held() {
        watch();
        let broken = catch_unwind(|| {
            let lock = Lock::<_, { rank::CLOCK }>::new(());
            let _guard = lock.try_lock();
            assert_none_held("a call of the kernel");
        });
        assert!(broken.is_err());
    }
}

//! Objects whose bytes are read or written with the pool's lock free.
//!
//! A load finds an object under the lock and decodes it after, for a microsecond or more. A store gets a
//! place under the lock and fills it after. Meanwhile no thread may move the object or free it. So the object
//! has a *pin*: its number stands in a short table, entered under the lock and taken out without. A thread
//! that moves objects holds the lock, and looks into the table first.

use super::HANDLE_BITS;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Objects that can have a pin at once. A thread that finds no free place keeps the lock instead. Loom has a
/// single pin.
pub(super) const PINS: usize = if cfg!(all(test, loom)) { 1 } else { 32 };

/// Bit set beside the number of an object that is being written: nobody reads the object yet.
const WRITTEN: u32 = 1 << 31;
const _: () = assert!(HANDLE_BITS < 31);

/// Numbers of the objects that have a pin; 0 where there is none.
#[repr(align(64))]
pub(super) struct Pins([AtomicU32; PINS]);

impl Pins {
    pub fn new() -> Pins {
        Pins(core::array::from_fn(|_| AtomicU32::new(0)))
    }

    /// Gives the object of this number a pin. Returns `None` if no place is free. The caller holds the pool's
    /// lock.
    pub fn pin(&self, number: u32) -> Option<Pin<'_>> {
        // Ordering: Acquire pairs with the Release below: the place may have become free only a moment ago.
        let place = self.0.iter().find(|place| place.load(Ordering::Acquire) == 0)?;
        // Ordering: Relaxed: threads that look at the pins have the lock after us.
        place.store(number, Ordering::Relaxed);
        Some(Pin(place))
    }

    /// Gives a pin to an object that is to be written, as [`Pins::pin`] does.
    pub fn pin_to_write(&self, number: u32) -> Option<Pin<'_>> {
        self.pin(number | WRITTEN)
    }

    /// Returns whether the object has a pin. If not, everything done while it had a pin is over. The caller
    /// holds the pool's lock.
    pub fn has(&self, number: u32) -> bool {
        // Ordering: Acquire pairs with the Release below.
        self.0.iter().any(|place| place.load(Ordering::Acquire) & !WRITTEN == number)
    }

    /// Returns whether the object has a pin to be written; otherwise as [`Pins::has`].
    pub fn is_written(&self, number: u32) -> bool {
        // Ordering: as above.
        self.0.iter().any(|place| place.load(Ordering::Acquire) == number | WRITTEN)
    }

    /// Forgets all pins: in a fork's child the threads that had pins don't exist.
    pub fn forget(&self) {
        // Ordering: Relaxed: the child has one thread.
        self.0.iter().for_each(|place| place.store(0, Ordering::Relaxed));
    }
}

/// Keeps an object where it is. Dropping the pin needs no lock.
pub(super) struct Pin<'p>(&'p AtomicU32);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquires above: all reads and writes of the object come before.
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn object_has_its_pin_until_it_is_dropped_and_one_more_finds_no_place() {
        let pins = Pins::new();
        let all: Vec<Pin<'_>> = (1..=PINS as u32).map(|number| pins.pin(number).unwrap()).collect();
        assert!(pins.pin(77).is_none() && pins.has(1) && pins.has(PINS as u32) && !pins.has(77));
        drop(all);
        assert!(!pins.has(1));
        let twice = [pins.pin(5).unwrap(), pins.pin(5).unwrap()];
        let [first, second] = twice;
        drop(first);
        assert!(pins.has(5), "the other one still reads");
        drop(second);
        assert!(!pins.has(5));
        let written = pins.pin_to_write(5);
        assert!(pins.has(5) && pins.is_written(5) && !pins.is_written(6));
        drop(written);
        let read = pins.pin(5);
        assert!(pins.has(5) && !pins.is_written(5));
        drop(read);
    }
}

#[cfg(all(test, loom))]
mod loomed {
    //! Pins in every order in which threads can meet: `make loom`.

    use super::*;
    use crate::sync::{Lock, rank};
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    /// The bytes of one object, and its place: one of two cells. Loom lets no two threads race for a cell.
    struct Pool {
        place: Lock<usize, { rank::POOL }>,
        bytes: [Cell<u32>; 2],
        pins: Pins,
    }
    // SAFETY: only one thread at a time uses a cell. If what is tested here doesn't ensure that, loom panics.
    unsafe impl Sync for Pool {}

    impl Pool {
        fn new() -> Arc<Pool> {
            let bytes = [Cell::new(7), Cell::new(0)];
            Arc::new(Pool { place: Lock::new(0), bytes, pins: Pins::new() })
        }

        /// Moves object 1 if it has no pin.
        fn compact(&self) {
            let mut place = self.place.lock();
            if !self.pins.has(1) {
                let bytes = self.bytes[*place].replace(0);
                *place = 1 - *place;
                self.bytes[*place].set(bytes);
            }
        }
    }

    #[test]
    fn loom_what_is_read_without_the_lock_is_not_moved_meanwhile() {
        loom::model(|| {
            let pool = Pool::new();
            let mover = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || pool.compact())
            };
            let place = pool.place.lock();
            let at = *place;
            let pin = pool.pins.pin(1).expect("nobody else pins");
            drop(place);
            assert_eq!(pool.bytes[at].get(), 7);
            drop(pin);
            mover.join().unwrap();
        });
    }

    #[test]
    fn loom_what_is_written_without_the_lock_is_not_moved_meanwhile() {
        loom::model(|| {
            let pool = Pool::new();
            let place = pool.place.lock();
            let at = *place;
            let pin = pool.pins.pin_to_write(1).expect("nobody else pins");
            drop(place);
            let mover = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || pool.compact())
            };
            pool.bytes[at].set(8);
            drop(pin);
            mover.join().unwrap();
            assert_eq!(pool.bytes[*pool.place.lock()].get(), 8);
        });
    }

    /// The only place for a pin is used again as soon as it is free. The mover then finds another object's
    /// number there, and must see that the earlier read is over.
    #[test]
    fn loom_the_next_pin_hands_on_that_the_last_one_is_over() {
        loom::model(|| {
            let pool = Pool::new();
            let place = pool.place.lock();
            let pin = pool.pins.pin(1).expect("nobody else pins");
            drop(place);
            let others = [0, 1].map(|which| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || match which {
                    0 => pool.compact(),
                    _ => {
                        let _lock = pool.place.lock();
                        core::mem::forget(pool.pins.pin(2));
                    }
                })
            });
            assert_eq!(pool.bytes[0].get(), 7);
            drop(pin);
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }
}

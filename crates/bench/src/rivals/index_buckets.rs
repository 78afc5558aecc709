//! An alternative to Farpage's index: a hash table whose buckets are as large as a cache line.
//!
//! A bucket has a lock word and seven words of key and handle, so an entry is found and read without a lock.
//! A key whose bucket is full goes to one of the next buckets and leaves a mark. Any key can be in any place
//! of the table, so sparse keys need no more memory. But neighbours are scattered, each store takes a lock,
//! and a key can find its buckets full while other buckets have free places.

use crate::index::Contestant;
use std::sync::atomic::{AtomicU64, Ordering};

const PLACES: usize = 7;
/// Buckets that are searched for one key.
const REACH: usize = 8;
const LOCKED: u64 = 1;
const OVERFLOWED: u64 = 2;

#[repr(align(64))]
struct Bucket {
    control: AtomicU64,
    places: [AtomicU64; PLACES],
}

/// The table.
pub struct Buckets {
    buckets: Box<[Bucket]>,
}

impl Buckets {
    /// Makes a table that is 60 % full with `entries` entries.
    pub fn new(entries: usize) -> Buckets {
        let bucket = || Bucket { control: AtomicU64::new(0), places: [const { AtomicU64::new(0) }; PLACES] };
        Buckets { buckets: (0..entries * 10 / 6 / PLACES + REACH).map(|_| bucket()).collect() }
    }

    /// Returns the bucket that a key belongs to. A multiplicative hash keeps neighbours from filling one
    /// bucket.
    fn home(&self, key: u32) -> usize {
        let hash = u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((hash * (self.buckets.len() - REACH + 1) as u64) >> 32) as usize
    }

    /// Returns the key's place and word. Under the home bucket's lock the answer stays right; without the
    /// lock it was right at some moment.
    fn find(&self, home: usize, key: u32) -> Option<(&AtomicU64, u64)> {
        for (step, bucket) in self.buckets[home..home + REACH].iter().enumerate() {
            for place in &bucket.places {
                // Ordering: Acquire pairs with the Release in `store`.
                let word = place.load(Ordering::Acquire);
                // No handle is 0, so an empty place has no key.
                if (word >> 32) as u32 == key && word as u32 != 0 {
                    return Some((place, word));
                }
            }
            if step == 0 && bucket.control.load(Ordering::Relaxed) & OVERFLOWED == 0 {
                return None;
            }
        }
        None
    }

    fn locked<T>(&self, home: usize, change: impl FnOnce() -> T) -> T {
        let control = &self.buckets[home].control;
        let mut tries = 0;
        // Ordering: Acquire pairs with the Release below.
        while control.fetch_or(LOCKED, Ordering::Acquire) & LOCKED != 0 {
            tries += 1;
            if tries % 64 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let result = change();
        // Ordering: Release publishes the changes made under the lock.
        control.fetch_and(!LOCKED, Ordering::Release);
        result
    }

    fn add(&self, home: usize, word: u64) {
        for (step, bucket) in self.buckets[home..home + REACH].iter().enumerate() {
            if step == 1 {
                self.buckets[home].control.fetch_or(OVERFLOWED, Ordering::Relaxed);
            }
            for place in &bucket.places {
                // A compare-and-exchange, because keys of other home buckets may want the place too.
                if place.load(Ordering::Relaxed) == 0
                    // Ordering: Release as in `store`.
                    && place.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed).is_ok()
                {
                    return;
                }
            }
        }
        panic!("a key found {REACH} full buckets at 60 % load");
    }
}

impl Contestant for Buckets {
    fn store(&self, key: u32, handle: u32) -> Option<u32> {
        let word = u64::from(key) << 32 | u64::from(handle);
        let home = self.home(key);
        self.locked(home, || match self.find(home, key) {
            // Ordering: Release publishes the object of the handle.
            Some((place, _)) => Some(place.swap(word, Ordering::Release) as u32),
            None => {
                self.add(home, word);
                None
            }
        })
    }

    fn load(&self, key: u32) -> Option<u32> {
        self.find(self.home(key), key).map(|(_, word)| word as u32)
    }

    fn remove(&self, key: u32) -> Option<u32> {
        let home = self.home(key);
        self.locked(home, || {
            let (place, word) = self.find(home, key)?;
            // Ordering: Release orders this change before the next owner's use of the place.
            place.store(0, Ordering::Release);
            Some(word as u32)
        })
    }
}

//! The map lock, rank 1: keeps the program's mappings and the engine's table of them in agreement.
//!
//! Engine threads, and threads of the program that serve their own faults, hold the lock shared. They hold it
//! from locking a page's entry until the entry is settled, but not while they wait for a device. A hook that
//! changes mappings holds the lock exclusively across its system call and the change of the table. Therefore
//! no page is installed into, or taken out of, a mapping that is being changed.
//!
//! Each engine thread, and each server (`SERVERS`), has a word of its own in its own cache line. Taking the
//! lock shared therefore costs no traffic between CPUs. The exclusive side pays: it looks at every word.

use crate::guard::direct::SERVERS;
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_os::futex;

/// Engine threads that can take the lock shared.
pub const ENGINE_THREADS_MAX: usize = 72;
/// Reader index of the first server, in which a thread of the program serves its own faults.
pub const DIRECT: ReaderIndex = ReaderIndex(ENGINE_THREADS_MAX);
const READERS_MAX: usize = ENGINE_THREADS_MAX + SERVERS;

const OPEN: u32 = 0;
const CLOSED: u32 = 1;
/// Closed, and threads may sleep until the gate is open.
const CONTENDED: u32 = 2;

#[repr(align(64))]
struct Reader(AtomicU32);

/// The lock: a gate for the exclusive side, and one word for each reader.
pub struct MapLock {
    gate: AtomicU32,
    /// Exclusive holds that are over: changes of mappings.
    changes: AtomicU32,
    readers: [Reader; READERS_MAX],
}

/// Index of an engine thread, or of a server (`guard/direct.rs`).
#[derive(Clone, Copy, Debug)]
pub struct ReaderIndex(pub usize);

impl Default for MapLock {
    fn default() -> Self {
        MapLock::new()
    }
}

impl MapLock {
    /// Returns an open lock.
    pub const fn new() -> MapLock {
        MapLock {
            gate: AtomicU32::new(OPEN),
            changes: AtomicU32::new(0),
            readers: [const { Reader(AtomicU32::new(0)) }; READERS_MAX],
        }
    }

    /// Takes the lock shared. A thread must not take it twice.
    pub fn shared(&self, index: ReaderIndex) -> Shared<'_> {
        let reader = &self.readers[index.0].0;
        loop {
            // Ordering: SeqCst. This side stores the reader's word and then loads the gate. The exclusive
            // side stores the gate and then loads the readers. At least one of the two sees the other.
            reader.store(1, Ordering::SeqCst);
            let gate = self.gate.load(Ordering::SeqCst);
            if gate == OPEN {
                return Shared { lock: self, reader };
            }
            self.leave(reader);
            // Mark the gate, so that the thread that opens it wakes this thread.
            if self.gate.compare_exchange(gate, CONTENDED, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                futex::wait(&self.gate, CONTENDED);
            }
        }
    }

    fn leave(&self, reader: &AtomicU32) {
        // Ordering: SeqCst as in `shared`. The store also publishes what was done under the lock.
        reader.store(0, Ordering::SeqCst);
        if self.gate.load(Ordering::SeqCst) != OPEN {
            futex::wake(reader, 1);
        }
    }

    /// Waits while mappings are being changed. Returns the number of changes that are over.
    pub fn wait_for_changes(&self) -> u32 {
        loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if gate == OPEN {
                return self.changes.load(Ordering::SeqCst);
            }
            // Marks the gate, as in `shared`.
            if gate == CONTENDED
                || self.gate.compare_exchange(gate, CONTENDED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            {
                futex::wait(&self.gate, CONTENDED);
            }
        }
    }

    /// Takes the lock exclusively.
    pub fn exclusive(&self) -> Exclusive<'_> {
        // Ordering: SeqCst as in `shared`.
        if self.gate.compare_exchange(OPEN, CLOSED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            while self.gate.swap(CONTENDED, Ordering::SeqCst) != OPEN {
                futex::wait(&self.gate, CONTENDED);
            }
        }
        for reader in &self.readers {
            while reader.0.load(Ordering::SeqCst) != 0 {
                futex::wait(&reader.0, 1);
            }
        }
        Exclusive { lock: self }
    }
}

/// Holds the lock shared until dropped.
pub struct Shared<'l> {
    lock: &'l MapLock,
    reader: &'l AtomicU32,
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        self.lock.leave(self.reader);
    }
}

/// Holds the lock exclusively until dropped.
pub struct Exclusive<'l> {
    lock: &'l MapLock,
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.lock.changes.fetch_add(1, Ordering::SeqCst);
        // Ordering: SeqCst as in `shared`. The swap also publishes the change of the table.
        if self.lock.gate.swap(OPEN, Ordering::SeqCst) == CONTENDED {
            futex::wake(&self.lock.gate, i32::MAX as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::UnsafeCell;
    use std::sync::Arc;

    struct Both {
        lock: MapLock,
        pair: UnsafeCell<(u64, u64)>,
    }
    // SAFETY: `pair` is read only under the shared lock and written only under the exclusive lock. The test
    // checks just that.
    unsafe impl Sync for Both {}
    // SAFETY: as for `Sync`.
    unsafe impl Send for Both {}

    #[test]
    fn readers_never_see_half_a_change() {
        let both = Arc::new(Both { lock: MapLock::new(), pair: UnsafeCell::new((0, 0)) });
        let mut threads = Vec::new();
        for index in 0..2 {
            let both = Arc::clone(&both);
            threads.push(std::thread::spawn(move || {
                for _ in 0..20_000 {
                    let _shared = both.lock.shared(ReaderIndex(index));
                    // SAFETY: this thread holds the lock shared, so no thread writes.
                    let (a, b) = unsafe { *both.pair.get() };
                    assert_eq!(a, b);
                }
            }));
        }
        for _ in 0..2 {
            let both = Arc::clone(&both);
            threads.push(std::thread::spawn(move || {
                for _ in 0..5_000 {
                    let _exclusive = both.lock.exclusive();
                    // SAFETY: this thread holds the lock exclusively, so no other thread reads or writes.
                    let pair = unsafe { &mut *both.pair.get() };
                    pair.0 += 1;
                    std::hint::black_box(&pair);
                    pair.1 += 1;
                }
            }));
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // SAFETY: all threads have ended.
        assert_eq!(unsafe { *both.pair.get() }, (10_000, 10_000));
    }
}

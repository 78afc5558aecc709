//! Counts of the references to slots that have more than one. References are the pages in a slot, and the
//! generations of a fork's children that may read the slot. A slot in use counts as one without a stored
//! count. A higher count is stored as in Linux, as a digit up to 62 in a byte of the slot. Beyond that the
//! slot needs a continuation, for which there may be no free place.
//!
//! The bytes lie in handed memory, which costs nothing until it is touched. While no slot is shared, no
//! thread touches the bytes or takes the lock.

use crate::memory::Zeroed;
use crate::sync::{Lock, rank};
use core::sync::atomic::{AtomicU32, Ordering};

/// The largest digit (Linux's `SWAP_MAP_MAX`).
const DIGIT_MAX: u8 = 62;
/// References that one unit of a continuation stands for.
const RADIX: u32 = DIGIT_MAX as u32 + 1;
/// Flag in a slot's byte: the slot has a continuation.
const CONTINUED: u8 = 0x80;

/// The continuation of one slot. Slot 0, which is never shared, marks an empty place.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Continuation {
    slot: u32,
    digits: u32,
}

// SAFETY: integers, for which zero is valid and which have no drop.
unsafe impl Zeroed for Continuation {}

/// There is no free place for another continuation. The count is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoContinuation;

/// Counts of more than one.
pub struct Counts<'m> {
    /// Number of slots that are shared now.
    shared: AtomicU32,
    tables: Lock<Tables<'m>, { rank::LAST }>,
}

struct Tables<'m> {
    /// A slot's digit less one. With `CONTINUED` set, the digit itself.
    bytes: &'m mut [u8],
    /// Open addressing: a slot's continuation is at the place of its hash, or behind it before the next empty
    /// place.
    continued: &'m mut [Continuation],
    /// Places in use.
    used: usize,
}

impl<'m> Counts<'m> {
    /// Creates counts where nothing is shared. `continued` has a power of two of places, one more than can be
    /// used.
    pub(super) fn new(bytes: &'m mut [u8], continued: &'m mut [Continuation]) -> Counts<'m> {
        assert!(continued.len().is_power_of_two() && continued.len() > 1);
        Counts { shared: AtomicU32::new(0), tables: Lock::new(Tables { bytes, continued, used: 0 }) }
    }

    /// Adds a reference to a slot in use. Returns how many references there are now.
    pub fn add(&self, slot: u32) -> Result<u32, NoContinuation> {
        self.add_many(slot, 1)
    }

    /// Adds `more` references to a slot in use. Returns how many there are now. A failure leaves the count as
    /// it was.
    pub fn add_many(&self, slot: u32, more: u32) -> Result<u32, NoContinuation> {
        let mut tables = self.tables.lock();
        let before = tables.get(slot);
        tables.put(slot, before + more)?;
        self.shared.fetch_add(u32::from(before == 1), Ordering::Relaxed);
        Ok(before + more)
    }

    /// Removes a reference, unless it is the last one. Returns how many are left. Zero means that the
    /// reference was the last, and the caller must free the slot.
    pub fn remove(&self, slot: u32) -> u32 {
        // Ordering: Acquire pairs with the Release below. So everything that threads did before they gave
        // references back comes before whatever becomes of the slot. A shared slot is never missed: the
        // thread that gave the caller its reference also gave it everything seen until then, and so the
        // count.
        if self.shared.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut tables = self.tables.lock();
        let left = tables.get(slot) - 1;
        if left > 0 {
            tables.put(slot, left).expect("a smaller count needs no new continuation");
            self.shared.fetch_sub(u32::from(left == 1), Ordering::Release);
        }
        left
    }

    /// Returns the number of references to a slot in use.
    pub fn get(&self, slot: u32) -> u32 {
        if self.shared.load(Ordering::Relaxed) == 0 { 1 } else { self.tables.lock().get(slot) }
    }

    /// Asserts that a search finds each continuation, and that the byte of each continued slot has the flag.
    pub(super) fn check(&self) {
        let tables = self.tables.lock();
        let used = tables.continued.iter().enumerate().filter(|(_, entry)| entry.slot != 0);
        assert_eq!(used.clone().count(), tables.used, "continuations");
        for (at, entry) in used {
            assert!(entry.digits > 0 && tables.bytes[entry.slot as usize] & CONTINUED != 0);
            assert_eq!(tables.find(entry.slot), at, "slot {}", entry.slot);
        }
    }
}

impl Tables<'_> {
    fn get(&self, slot: u32) -> u32 {
        let byte = self.bytes[slot as usize];
        match byte & CONTINUED {
            0 => u32::from(byte) + 1,
            _ => u32::from(byte & !CONTINUED) + RADIX * self.continued[self.find(slot)].digits,
        }
    }

    fn put(&mut self, slot: u32, count: u32) -> Result<(), NoContinuation> {
        let (digits, digit) = (count / RADIX, (count % RADIX) as u8);
        self.continue_with(slot, digits)?;
        self.bytes[slot as usize] = if digits == 0 { digit - 1 } else { CONTINUED | digit };
        Ok(())
    }

    fn continue_with(&mut self, slot: u32, digits: u32) -> Result<(), NoContinuation> {
        if digits == 0 && self.bytes[slot as usize] & CONTINUED == 0 {
            return Ok(());
        }
        let at = self.find(slot);
        if digits == 0 {
            self.take_out(at);
            return Ok(());
        }
        if self.continued[at].slot == 0 {
            // One place stays empty, so that every search ends.
            if self.used + 1 == self.continued.len() {
                return Err(NoContinuation);
            }
            self.used += 1;
        }
        self.continued[at] = Continuation { slot, digits };
        Ok(())
    }

    fn home(&self, slot: u32) -> usize {
        slot.wrapping_mul(0x9e37_79b9) as usize & (self.continued.len() - 1)
    }

    /// Returns the place where a slot's continuation is, or would be.
    fn find(&self, slot: u32) -> usize {
        let mut at = self.home(slot);
        while self.continued[at].slot != slot && self.continued[at].slot != 0 {
            at = (at + 1) & (self.continued.len() - 1);
        }
        at
    }

    /// Removes a continuation. The continuations behind it move up, so that no search ends too early.
    fn take_out(&mut self, at: usize) {
        let mask = self.continued.len() - 1;
        let (mut hole, mut next) = (at, (at + 1) & mask);
        while self.continued[next].slot != 0 {
            let home = self.home(self.continued[next].slot);
            // A continuation may move if its home, counted around the end, isn't behind the hole.
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.continued[hole] = self.continued[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.continued[hole].slot = 0;
        self.used -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counts(slots: usize, places: usize) -> Counts<'static> {
        Counts::new(vec![0; slots].leak(), vec![Continuation { slot: 0, digits: 0 }; places].leak())
    }

    proptest! {
        /// The model is a number for each slot, and the number of slots that may be continued.
        #[test]
        fn counts_are_those_of_plain_numbers(
            ops in prop::collection::vec((1_u32..12, any::<bool>(), 1_u32..200), 1..80),
        ) {
            let (counts, places) = (counts(12, 4), 3);
            let mut model = [1_u32; 12];
            for (slot, more, times) in ops {
                for _ in 0..times {
                    let count = model[slot as usize];
                    if more {
                        let continued = model.iter().filter(|count| **count > 62).count();
                        let is_refused = count == 62 && continued == places;
                        let wanted = if is_refused { Err(NoContinuation) } else { Ok(count + 1) };
                        prop_assert_eq!(counts.add(slot), wanted);
                        model[slot as usize] = wanted.unwrap_or(count);
                    } else {
                        prop_assert_eq!(counts.remove(slot), count - 1);
                        model[slot as usize] = (count - 1).max(1);
                    }
                }
                counts.check();
                for slot in 1..12 {
                    prop_assert_eq!(counts.get(slot), model[slot as usize]);
                }
                prop_assert_eq!(
                    counts.shared.load(Ordering::Relaxed) as usize,
                    model.iter().filter(|count| **count > 1).count()
                );
            }
        }
    }

    #[test]
    fn sixty_two_need_no_continuation_and_one_more_may_find_no_room() {
        let counts = counts(4, 2);
        (2..=62).for_each(|count| assert_eq!((counts.add(1), counts.add(2)), (Ok(count), Ok(count))));
        assert_eq!((counts.add(1), counts.add(2), counts.get(2)), (Ok(63), Err(NoContinuation), 62));
        assert_eq!((counts.remove(1), counts.add(2)), (62, Ok(63)));
    }
}

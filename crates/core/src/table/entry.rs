//! Everything known about one page in one word: state, payload, the page's lock, and whether a thread waits.
//!
//! Invariants:
//! 1. Only the holder of the lock bit changes state or payload. Other threads may at most set `WAITED`
//!    meanwhile. Of an unlocked word only the age changes, by an exchange of the whole word. But under the
//!    exclusive map lock anything in an unlocked word may change.
//! 2. `WAITED` is set only while the lock bit is. Settling clears both at once and reports `WAITED`. So a
//!    thread that set `WAITED` is certain to be woken.
//! 3. While locked, the word still shows the state before the move. So giving up means restoring that state.
//!
//! ```text
//! bits  0..4   state        bit 4  locked     bit 5  waited      bits 6..8  heat (except Absent, Lost)
//! bits  9..22  frame (Parked, Writing), kind of repeated word (Same), or in the lowest five age (Resident)
//! bits 22..25  part of the slot (wherever there is a slot; 0 = the whole slot)
//! bits 25..32  epoch in which the hand took it (while evicted, except Inherited; 0 = not known)
//! bits 32..64  slot or pool handle (Resident and Parked: 0 = none), or 32 bits of the repeated word
//! bits 9..64   page of another process (Inherited)
//! ```

use crate::reclaim::recency::{Epoch, Heat};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::{FrameIndex, PARTS_MAX, PageIndex, Part, SlotIndex, SlotPart};
use crate::zswap::pool::ObjectHandle;

/// The states of a page. `docs/internals/states.md` has a table of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Never touched since the page became managed, or discarded: reads as zeros.
    Absent,
    /// Evicted, all zeros: no bytes are stored anywhere.
    Zero,
    /// Evicted, one 64-bit word repeated.
    Same(SameWord),
    /// In the program's memory. A slot or an object has the page's bytes too, unless the page was written.
    Resident {
        /// The slot or object that also holds the page's bytes, or did before a write.
        copy: Option<Stored>,
        /// Laps for which the clock hand will spare the page, at most [`AGE_MAX`].
        age: u8,
    },
    /// Evicted, uncompressed in a frame, for a second chance.
    Parked {
        /// The frame that holds the page's bytes.
        frame: FrameIndex,
        /// The slot or object that also holds the page's bytes, as for [`State::Resident`].
        copy: Option<Stored>,
    },
    /// Evicted. The page's frame, or a pack that holds the page, is being written to an area.
    Writing {
        /// The frame that holds the page's bytes until the write is done.
        frame: FrameIndex,
    },
    /// Evicted, in the compressed pool.
    Pooled(ObjectHandle),
    /// Evicted, in a slot of an area, or in a part of one.
    OnArea(SlotPart),
    /// Gone: the page's slot could not be read, or its object in the pool was damaged.
    Lost(SlotIndex),
    /// Evicted before the fork that made this process, so the bytes are where the parent had put them. The
    /// payload is the page's index at the fork.
    Inherited(PageIndex),
}

impl State {
    /// Whether the page is out of the program's memory, with bytes that must come back.
    pub const fn is_evicted(self) -> bool {
        !matches!(self, State::Absent | State::Resident { .. } | State::Lost(_))
    }
    /// Whether the page is in the program's memory.
    pub const fn is_resident(self) -> bool {
        matches!(self, State::Resident { .. })
    }
    /// Returns what holds the page's bytes besides the program's memory or a frame.
    pub const fn stored(self) -> Option<Stored> {
        match self {
            State::Resident { copy, .. } | State::Parked { copy, .. } => copy,
            State::OnArea(at) => Some(Stored::Slot(at)),
            State::Pooled(handle) => Some(Stored::Object(handle)),
            _ => None,
        }
    }
    /// Returns the slot, or the part of one, that the page owns, if any.
    pub const fn slot(self) -> Option<SlotPart> {
        match self.stored() {
            Some(Stored::Slot(at)) => Some(at),
            _ => None,
        }
    }
}

/// Where a page's bytes are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// In a slot of an area.
    Slot(SlotPart),
    /// In the compressed pool.
    Object(ObjectHandle),
}

impl Stored {
    /// Returns the state of a page whose bytes are in no other place.
    pub const fn alone(self) -> State {
        match self {
            Stored::Slot(at) => State::OnArea(at),
            Stored::Object(handle) => State::Pooled(handle),
        }
    }
}

/// A 64-bit word that fits 34 bits: both halves are equal, or one half is trivial. Pages of another repeated
/// word go to the pool, where a codec makes 20-odd bytes of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SameWord {
    kind: u8,
    half: u32,
}

impl SameWord {
    /// Packs `word` if it has one of the four shapes: repeated half, small, small negative, or high half only
    /// (round floats). Never called for 0, which is [`State::Zero`].
    pub const fn pack(word: u64) -> Option<SameWord> {
        let (low, high) = (word as u32, (word >> 32) as u32);
        if low == high {
            Some(SameWord { kind: 0, half: low })
        } else if high == 0 {
            Some(SameWord { kind: 1, half: low })
        } else if high == u32::MAX {
            Some(SameWord { kind: 2, half: low })
        } else if low == 0 {
            Some(SameWord { kind: 3, half: high })
        } else {
            None
        }
    }
    /// Returns the word that was packed.
    pub const fn word(self) -> u64 {
        let half = self.half as u64;
        match self.kind {
            0 => half << 32 | half,
            1 => half,
            2 => (u32::MAX as u64) << 32 | half,
            _ => half << 32,
        }
    }
}

const LOCKED: u64 = 1 << 4;
const WAITED: u64 = 1 << 5;
const HEAT_SHIFT: u32 = 6;
const HEAT_MASK: u64 = ((1 << Heat::BITS) - 1) << HEAT_SHIFT;
/// The highest age that fits the entry.
pub const AGE_MAX: u8 = (1 << AGE_BITS) - 1;
const AGE_BITS: u32 = 5;
const AGE_SHIFT: u32 = 9;
const _: () = assert!(AGE_SHIFT + AGE_BITS <= PART_SHIFT && AGE_SHIFT >= HEAT_SHIFT + Heat::BITS);
const FRAME_SHIFT: u32 = 9;
const FRAME_BITS: u32 = 13;
const FRAME_MASK: u64 = (1 << FRAME_BITS) - 1;
const PART_SHIFT: u32 = FRAME_SHIFT + FRAME_BITS;
const PART_MASK: u64 = 7;
const _: () = assert!(PARTS_MAX as u64 <= PART_MASK);
const _: () = assert!(PART_MASK << PART_SHIFT & EPOCH_MASK == 0);
const EPOCH_SHIFT: u32 = 32 - Epoch::BITS;
const EPOCH_MASK: u64 = ((1 << Epoch::BITS) - 1) << EPOCH_SHIFT;
const _: () = assert!(FRAME_MASK << FRAME_SHIFT & (EPOCH_MASK | HEAT_MASK) == 0);
/// The lowest bit of the page's index in another process.
const INHERITED_SHIFT: u32 = 9;
/// Number of frames that an entry can name.
pub const FRAMES_MAX: u32 = 1 << FRAME_BITS;

/// What an entry remembers of a page's history. The history isn't part of the state, and stays from one state
/// to the next where the word has bits for it. [`Entry::set`] clears it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// The epoch in which the page was evicted. Known only for pages that are out.
    pub went: Epoch,
    /// How often the page came back soon, less how often it didn't.
    pub heat: Heat,
}

/// A copy of an entry's word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl core::fmt::Debug for Word {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let locked = if self.is_locked() { " locked" } else { "" };
        write!(f, "{:?}{locked}", self.state())
    }
}

impl Word {
    const fn of(state: State) -> Word {
        /// Returns the state's number, which differs for each kind of copy, and the copy.
        const fn with(copy: Option<Stored>, state: u64, state_of_object: u64) -> u64 {
            match copy {
                None => state,
                Some(Stored::Slot(at)) => state | in_slot(at),
                Some(Stored::Object(handle)) => state_of_object | (handle.raw() as u64) << 32,
            }
        }
        const fn in_slot(at: SlotPart) -> u64 {
            (at.slot.raw() as u64) << 32 | (at.part.raw() as u64) << PART_SHIFT
        }
        Word(match state {
            State::Absent => 0,
            State::Zero => 1,
            State::Same(word) => 2 | (word.kind as u64) << FRAME_SHIFT | (word.half as u64) << 32,
            State::Resident { copy, age } => with(copy, 3, 10) | (age as u64) << AGE_SHIFT,
            State::Parked { frame, copy } => with(copy, 4, 11) | (frame.0 as u64) << FRAME_SHIFT,
            State::Writing { frame } => 5 | (frame.0 as u64) << FRAME_SHIFT,
            State::Pooled(handle) => 6 | (handle.raw() as u64) << 32,
            State::OnArea(at) => 7 | in_slot(at),
            State::Lost(slot) => 8 | (slot.raw() as u64) << 32,
            State::Inherited(page) => 9 | page.0 << INHERITED_SHIFT,
        })
    }

    /// Returns the state that the word shows. While locked, that is the state before the move.
    pub const fn state(self) -> State {
        const fn object(raw: u32) -> ObjectHandle {
            match ObjectHandle::from_raw(raw) {
                Some(handle) => handle,
                None => panic!("a page's word names no object"),
            }
        }
        let high = (self.0 >> 32) as u32;
        let age = (self.0 >> AGE_SHIFT) as u8 & AGE_MAX;
        let frame = FrameIndex(((self.0 >> FRAME_SHIFT) & FRAME_MASK) as u32);
        match self.0 & 0xf {
            0 => State::Absent,
            1 => State::Zero,
            2 => State::Same(SameWord { kind: frame.0 as u8, half: high }),
            3 => State::Resident { copy: self.slot_copy(), age },
            4 => State::Parked { frame, copy: self.slot_copy() },
            5 => State::Writing { frame },
            6 => State::Pooled(object(high)),
            7 => State::OnArea(self.slot_part()),
            8 => State::Lost(SlotIndex::from_raw(high)),
            9 => State::Inherited(PageIndex(self.0 >> INHERITED_SHIFT)),
            10 => State::Resident { copy: Some(Stored::Object(object(high))), age },
            11 => State::Parked { frame, copy: Some(Stored::Object(object(high))) },
            _ => panic!("a page's word has no such state"),
        }
    }

    /// Returns where on an area the page's bytes are, if the state names a slot.
    const fn slot_part(self) -> SlotPart {
        SlotPart {
            slot: SlotIndex::from_raw((self.0 >> 32) as u32),
            part: Part::from_raw((self.0 >> PART_SHIFT & PART_MASK) as u8),
        }
    }

    const fn slot_copy(self) -> Option<Stored> {
        if self.0 >> 32 == 0 { None } else { Some(Stored::Slot(self.slot_part())) }
    }

    /// Whether a thread is moving this page.
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Whether the word has bits for the epoch in which the page was evicted.
    const fn has_epoch(self) -> bool {
        let state = self.state();
        state.is_evicted() && !matches!(state, State::Inherited(_))
    }

    const fn has_heat(self) -> bool {
        !matches!(self.state(), State::Absent | State::Lost(_))
    }

    /// Returns what is remembered of the page.
    pub const fn past(self) -> Past {
        let went = if self.has_epoch() { (self.0 & EPOCH_MASK) >> EPOCH_SHIFT } else { 0 };
        let heat = if self.has_heat() { (self.0 & HEAT_MASK) >> HEAT_SHIFT } else { 0 };
        Past { went: Epoch(went as u8), heat: Heat(heat as u8) }
    }

    /// Returns the word with as much of `past` as the word has bits for.
    const fn remembering(self, past: Past) -> Word {
        let went = if self.has_epoch() { (past.went.0 as u64) << EPOCH_SHIFT & EPOCH_MASK } else { 0 };
        let heat = if self.has_heat() { (past.heat.0 as u64) << HEAT_SHIFT & HEAT_MASK } else { 0 };
        Word(self.0 | went | heat)
    }
}

/// The word of one page.
#[repr(transparent)]
pub struct Entry(AtomicU64);

// SAFETY: an atomic integer, which has no drop. Zero is `Absent`, unlocked.
unsafe impl crate::memory::Zeroed for Entry {}

impl Entry {
    /// Returns the word as it is now. The word is only a hint unless the caller holds the lock.
    pub fn load(&self) -> Word {
        // Ordering: Acquire pairs with `settle`. A thread that sees a state also sees the bytes that were
        // stored for it.
        Word(self.0.load(Ordering::Acquire))
    }

    /// Locks the page if its word is still `seen`. Otherwise fails with the word as it is now.
    pub fn try_lock(&self, seen: Word) -> Result<(), Word> {
        debug_assert!(!seen.is_locked());
        // Ordering: Acquire pairs with the Release in `settle` of the last holder of the lock.
        self.0
            .compare_exchange(seen.0, seen.0 | LOCKED, Ordering::Acquire, Ordering::Acquire)
            .map(|_| ())
            .map_err(Word)
    }

    /// Asks the holder of the lock to wake this thread. Returns false if the page isn't locked any more.
    #[must_use]
    pub fn ask_to_be_woken(&self) -> bool {
        // Ordering: `settle` swaps this very word. So either `settle` sees the bit, or this thread sees that
        // the page isn't locked any more. Release publishes to `settle` everything that the waiter did before
        // it set the bit, so that the holder can wake it.
        let asked = self.0.fetch_update(Ordering::Release, Ordering::Relaxed, |word| {
            (word & LOCKED != 0).then_some(word | WAITED)
        });
        asked.is_ok()
    }

    /// Ends a move: sets the new state and unlocks. Returns whether a thread waits and must be woken. What is
    /// remembered of the page stays. A page that was out and stays out keeps the epoch in which it was
    /// evicted.
    #[must_use]
    pub fn settle(&self, state: State) -> bool {
        // Ordering: Relaxed. While a thread has the lock, no other thread changes anything but `WAITED`.
        self.settle_with(state, Word(self.0.load(Ordering::Relaxed)).past())
    }

    /// Ends a move like `settle`, and remembers `past`.
    #[must_use]
    pub fn settle_with(&self, state: State, past: Past) -> bool {
        // Ordering: Release publishes everything done for this page to the next `load` or `try_lock`. Acquire
        // pairs with the Release in `ask_to_be_woken`.
        let before = self.0.swap(Word::of(state).remembering(past).0, Ordering::AcqRel);
        assert!(before & LOCKED != 0, "a page was settled that nobody had locked: {:?}", Word(before));
        before & WAITED != 0
    }

    /// Takes one lap off the age of a resident page that no thread is moving, if its word is still `seen`.
    pub fn grow_younger(&self, seen: Word) {
        let State::Resident { age, .. } = seen.state() else { return };
        debug_assert!(!seen.is_locked() && age > 0);
        let younger = seen.0 - (1 << AGE_SHIFT);
        // Ordering: Relaxed. An age publishes nothing, and an exchange keeps what `settle` has published by
        // the word. If the exchange fails, the page is moving, and its age no longer matters.
        let _ = self.0.compare_exchange(seen.0, younger, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Sets a state outright. Must be called under the exclusive map lock, on an unlocked page.
    pub fn set(&self, state: State) {
        // Ordering: Release, as in `settle`.
        let before = self.0.swap(Word::of(state).0, Ordering::Release);
        assert!(before & LOCKED == 0, "a page was set while somebody was moving it: {:?}", Word(before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::AreaId;
    use proptest::prelude::*;

    fn any_state() -> impl Strategy<Value = State> {
        let slot = (0_u8..16, 1_u32..(1 << 28)).prop_map(|(a, o)| SlotIndex::new(AreaId(a), o));
        let part = (slot.clone(), 0..=PARTS_MAX as u8)
            .prop_map(|(slot, part)| SlotPart { slot, part: Part::from_raw(part) });
        let object = (1..u32::MAX).prop_map(|h| ObjectHandle::from_raw(h).unwrap());
        let stored =
            prop_oneof![part.clone().prop_map(Stored::Slot), object.clone().prop_map(Stored::Object)];
        let copy = prop::option::of(stored);
        let frame = (0..FRAMES_MAX).prop_map(FrameIndex);
        prop_oneof![
            Just(State::Absent),
            Just(State::Zero),
            any::<u32>().prop_map(|w| State::Same(SameWord::pack(u64::from(w)).unwrap())),
            (copy.clone(), 0..=AGE_MAX).prop_map(|(copy, age)| State::Resident { copy, age }),
            (frame.clone(), copy).prop_map(|(frame, copy)| State::Parked { frame, copy }),
            frame.prop_map(|frame| State::Writing { frame }),
            object.prop_map(State::Pooled),
            part.prop_map(State::OnArea),
            slot.prop_map(State::Lost),
            (0_u64..1 << (64 - 12)).prop_map(|page| State::Inherited(PageIndex(page))),
        ]
    }

    proptest! {
        #[test]
        fn word_keeps_every_state(state in any_state()) {
            prop_assert_eq!(Word::of(state).state(), state);
        }

        /// The history stays with a page in every state that has bits for it, and doesn't change the state.
        #[test]
        fn past_stays_with_a_page(
            states in prop::collection::vec(any_state(), 1..8),
            went in 1_u8..128,
            heat in 0_u8..=Heat::MAX.0,
        ) {
            let entry = Entry(AtomicU64::new(0));
            let mut wanted = Past { went: Epoch(went), heat: Heat(heat) };
            for (at, state) in states.into_iter().enumerate() {
                entry.try_lock(entry.load()).unwrap();
                let _ = if at == 0 { entry.settle_with(state, wanted) } else { entry.settle(state) };
                if !state.is_evicted() || matches!(state, State::Inherited(_)) {
                    wanted.went = Epoch(0);
                }
                if matches!(state, State::Absent | State::Lost(_)) {
                    wanted.heat = Heat(0);
                }
                prop_assert_eq!((entry.load().state(), entry.load().past()), (state, wanted));
            }
        }

        #[test]
        fn growing_younger_changes_nothing_else(state in any_state(), heat in 0_u8..=Heat::MAX.0) {
            let State::Resident { copy, age: age @ 1.. } = state else { return Ok(()) };
            let past = Past { went: Epoch(0), heat: Heat(heat) };
            let entry = Entry(AtomicU64::new(0));
            entry.try_lock(entry.load()).unwrap();
            let _ = entry.settle_with(state, past);
            entry.grow_younger(entry.load());
            prop_assert_eq!(entry.load().state(), State::Resident { copy, age: age - 1 });
            prop_assert_eq!(entry.load().past(), past);
        }

        #[test]
        fn same_word_comes_back_whole(word in any::<u64>(), half in any::<u32>()) {
            if let Some(packed) = SameWord::pack(word) { prop_assert_eq!(packed.word(), word); }
            let half = u64::from(half);
            for shaped in [half << 32 | half, half, u64::MAX << 32 | half, half << 32] {
                prop_assert_eq!(SameWord::pack(shaped).unwrap().word(), shaped);
            }
        }
    }

    #[test]
    fn waiter_is_reported_exactly_once_and_only_while_locked() {
        let entry = Entry(AtomicU64::new(0));
        assert!(!entry.ask_to_be_woken());
        entry.try_lock(entry.load()).unwrap();
        assert!(entry.ask_to_be_woken());
        assert!(entry.settle(State::Zero));
        entry.try_lock(entry.load()).unwrap();
        assert!(!entry.settle(State::Absent));
    }

    #[test]
    fn lock_of_changed_word_shows_the_change() {
        let entry = Entry(AtomicU64::new(0));
        let seen = entry.load();
        entry.set(State::Zero);
        assert_eq!(entry.try_lock(seen).unwrap_err().state(), State::Zero);
    }
}

#[cfg(all(test, loom))]
mod loomed {
    //! Tests the page's lock in every order in which its threads can meet: `make loom`.

    use super::*;
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_who_asks_to_be_woken_is_reported_by_the_settle() {
        loom::model(|| {
            let entry = Arc::new(Entry(AtomicU64::new(0)));
            entry.try_lock(entry.load()).unwrap();
            let waiter = {
                let entry = Arc::clone(&entry);
                thread::spawn(move || entry.ask_to_be_woken())
            };
            let reported = entry.settle(State::Zero);
            assert_eq!(waiter.join().unwrap(), reported);
            assert!(entry.load().state() == State::Zero && !entry.load().is_locked());
        });
    }

    /// A page's lock may protect anything. Here it protects a cell, in which loom allows no race.
    #[test]
    fn loom_one_of_two_movers_gets_the_page_and_hands_over_what_it_did() {
        struct Page(Entry, Cell<u32>);
        // SAFETY: the cell is used only under the entry's lock. If that isn't enough, loom panics.
        unsafe impl Sync for Page {}
        loom::model(|| {
            let page = Arc::new(Page(Entry(AtomicU64::new(0)), Cell::new(0)));
            let move_it = |page: &Page| {
                let seen = page.0.load();
                if seen.is_locked() || page.0.try_lock(seen).is_err() {
                    return 0;
                }
                page.1.set(page.1.get() + 1);
                let _ = page.0.settle(State::Zero);
                1
            };
            let other = {
                let page = Arc::clone(&page);
                thread::spawn(move || move_it(&page))
            };
            let moves = move_it(&page) + other.join().unwrap();
            assert!(moves > 0);
            assert_eq!(page.1.get(), moves);
        });
    }

    /// A system call uses a page that an evictor wants (`holds.rs`). Never do both go on in the belief that
    /// they have the page.
    #[test]
    fn loom_a_held_page_is_not_taken_while_its_holder_believes_it_to_be_there() {
        use crate::holds::{Holder, is_held};
        use crate::units::{PageIndex, PageRange};
        const PAGE: PageIndex = PageIndex(5);
        loom::model(|| {
            let shared = Arc::new((Holder::new(), Entry(AtomicU64::new(0))));
            let evictor = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (holder, entry) = &*shared;
                    if entry.try_lock(entry.load()).is_err() {
                        return false;
                    }
                    let is_free = !is_held([holder], PAGE);
                    if !is_free {
                        let _ = entry.settle(State::Absent);
                    }
                    is_free
                })
            };
            shared.0.hold(PageRange::of(PAGE, 1));
            let is_there = !shared.1.load().is_locked();
            assert!(!(evictor.join().unwrap() && is_there));
        });
    }
}

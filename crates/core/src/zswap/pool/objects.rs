//! Objects: who owns them, where they lie, and which goes first.
//!
//! An object is reached through its handle, which stays the same while compaction moves the object's bytes.
//! Handles are numbers into one table. The handle freed last is used first, so that the table grows no
//! further than the number of objects alive at once.
#![forbid(unsafe_code)]

use core::num::NonZeroU32;

use super::list::{Linked, Links, List};
use crate::units::{PAGE_BYTES, PageIndex};

/// The name of a stored object: a number from 1 that fits [`HANDLE_BITS`](super::HANDLE_BITS) bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectHandle(NonZeroU32);

impl ObjectHandle {
    /// Returns the number, as kept in a page-table entry; never 0.
    #[must_use]
    pub const fn raw(self) -> u32 {
        self.0.get()
    }
    /// Returns the handle with this number; `None` for 0.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Option<ObjectHandle> {
        match NonZeroU32::new(raw) {
            Some(raw) => Some(ObjectHandle(raw)),
            None => None,
        }
    }
}

/// Links from an object to those stored before and after it.
pub(super) enum ByAge {}
/// Links among the objects of one block.
pub(super) enum InBlock {}

/// Metadata of one object. All-zero bytes are an object that was never stored.
#[repr(C)]
pub struct ObjectMeta {
    /// The owner in the lowest [`OWNER_BITS`], and above them how many objects had been stored before this
    /// one.
    owner_and_born: u64,
    /// While the object isn't live, `next` leads through the free handles.
    age: Links,
    siblings: Links,
    pub(super) block: u32,
    pub(super) slot: u16,
    /// Bytes: 1 to 4096; 0 while the object isn't live. [`KEPT`] and [`DENSE`] are bits of this field, too.
    length: u16,
}

const OWNER_BITS: u32 = 36;
const OWNER_MASK: u64 = (1 << OWNER_BITS) - 1;
/// Quarters of the oldest object's age beyond which an object is old.
const OLD_QUARTERS: u64 = 3;

/// Bit of an object's length: the object's page is in memory, and the object is a copy of the page.
const KEPT: u16 = 1 << 15;
/// Bit of an object's length: the object won't become any shorter.
const DENSE: u16 = 1 << 14;
const _: () = assert!(PAGE_BYTES < DENSE as usize);

impl ObjectMeta {
    /// An object that was never stored.
    pub const UNUSED: ObjectMeta = ObjectMeta {
        owner_and_born: 0,
        age: Links::NONE,
        siblings: Links::NONE,
        block: 0,
        slot: 0,
        length: 0,
    };

    pub(super) const fn owner(&self) -> PageIndex {
        PageIndex(self.owner_and_born & OWNER_MASK)
    }

    pub(super) const fn set_owner(&mut self, owner: PageIndex) {
        assert!(owner.0 <= OWNER_MASK);
        self.owner_and_born = self.owner_and_born & !OWNER_MASK | owner.0;
    }

    /// Returns how many objects had been stored before this one, as far as that fits.
    pub(super) const fn born(&self) -> u64 {
        self.owner_and_born >> OWNER_BITS
    }

    pub(super) const fn set_born(&mut self, born: u64) {
        self.owner_and_born = self.owner_and_born & OWNER_MASK | born << OWNER_BITS;
    }

    /// Returns the bytes: 1 to 4096; 0 while the object isn't live.
    pub(super) const fn length(&self) -> usize {
        (self.length & !(KEPT | DENSE)) as usize
    }
}

// Two objects fit into a cache line. At a mean of 1200 bytes per object the table adds 2.7 % to the pool.
const _: () = assert!(size_of::<ObjectMeta>() == 32);

impl Linked<ByAge> for ObjectMeta {
    fn links(&self) -> Links {
        self.age
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.age
    }
}

impl Linked<InBlock> for ObjectMeta {
    fn links(&self) -> Links {
        self.siblings
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.siblings
    }
}

/// The kinds of objects: earlier kinds go first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Whole pages, which don't compress. Several pages that do compress fit in the memory of a whole page.
    Whole,
    /// Objects that won't become any shorter, which was found out when they were old.
    Dense,
    /// Objects that may become shorter if more time is spent on them.
    Compressed,
    /// Copies of pages in memory. Nothing is lost with them.
    Kept,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Whole, Kind::Dense, Kind::Compressed, Kind::Kept];

    /// Returns the kind of a live object with this length.
    const fn of(length: u16) -> Kind {
        match length {
            _ if length & KEPT != 0 => Kind::Kept,
            _ if length & !DENSE == PAGE_BYTES as u16 => Kind::Whole,
            _ if length & DENSE != 0 => Kind::Dense,
            _ => Kind::Compressed,
        }
    }
}

/// All objects. Live objects are in the order in which they are to be written back.
pub(super) struct Objects<'m> {
    pub metas: &'m mut [ObjectMeta],
    /// Live objects of each [`Kind`], the oldest first.
    lists: [List<ByAge>; 4],
    /// The youngest compressed object at the last call of [`Objects::turn`], and at the call before. 0 if all
    /// objects of that time are gone.
    turns: [u32; 2],
    /// The handle freed last; 0 if no handle below `touched` is free.
    free: u32,
    /// Handles that were ever used. Beyond them the table is untouched.
    pub touched: u32,
    /// Objects that were ever stored.
    stored: u64,
    /// Sum of the live objects' lengths.
    pub payload_bytes: usize,
}

impl<'m> Objects<'m> {
    pub fn new(metas: &'m mut [ObjectMeta]) -> Self {
        let lists = [List::EMPTY; 4];
        Objects { metas, lists, turns: [0; 2], free: 0, touched: 0, stored: 0, payload_bytes: 0 }
    }

    /// Returns how many objects can be live at once.
    pub fn capacity(&self) -> usize {
        self.metas.len() - 1
    }

    pub fn count(&self) -> usize {
        self.live_count() as usize
    }

    fn live_count(&self) -> u32 {
        self.lists.iter().map(|list| list.count).sum()
    }

    fn first_of(&self, kind: Kind) -> Option<ObjectHandle> {
        ObjectHandle::from_raw(self.lists[kind as usize].first)
    }

    /// Returns the number of copies of pages in memory.
    pub fn kept_count(&self) -> u32 {
        self.lists[Kind::Kept as usize].count
    }

    /// Returns the number of objects that don't compress and take a page each.
    pub fn whole_count(&self) -> u32 {
        self.lists[Kind::Whole as usize].count
    }

    /// Returns the object to write back next.
    pub fn first(&self) -> Option<ObjectHandle> {
        [Kind::Whole, Kind::Dense, Kind::Compressed].into_iter().find_map(|kind| self.first_of(kind))
    }

    /// Returns how many objects were stored since this one.
    fn age(&self, number: u32) -> u64 {
        self.stored.wrapping_sub(self.metas[number as usize].born()) & (u64::MAX >> OWNER_BITS)
    }

    /// Returns whether an object is one of the oldest. Compressible objects are the measure, because objects
    /// that don't compress only pass through.
    pub fn is_old(&self, number: u32) -> bool {
        let firsts = [Kind::Dense, Kind::Compressed].map(|kind| self.lists[kind as usize].first);
        let oldest = firsts.into_iter().filter(|first| *first != 0).map(|first| self.age(first)).max();
        oldest.is_some_and(|oldest| self.age(number) * 4 > oldest * OLD_QUARTERS)
    }

    /// Returns the copy that was kept longest.
    pub fn first_kept(&self) -> Option<ObjectHandle> {
        self.first_of(Kind::Kept)
    }

    /// Returns the oldest object that may become shorter; with `is_old`, only if two turns have begun since
    /// it was stored.
    pub fn first_to_densify(&self, is_old: bool) -> Option<ObjectHandle> {
        self.first_of(Kind::Compressed).filter(|_| !is_old || self.turns[1] != 0)
    }

    /// Begins a new turn: some time has passed.
    pub fn turn(&mut self) {
        self.turns = [self.lists[Kind::Compressed as usize].last, self.turns[0]];
    }

    /// Takes a live object out of its order.
    fn leave(&mut self, number: u32) {
        let meta = &self.metas[number as usize];
        let (kind, before) = (Kind::of(meta.length), meta.age.prev);
        // Only a compressed object can be the mark of a turn.
        self.turns.iter_mut().filter(|turn| **turn == number).for_each(|turn| *turn = before);
        self.lists[kind as usize].remove(self.metas, number);
    }

    /// Puts an object at the end of the order to which it belongs now.
    fn join(&mut self, number: u32) {
        let kind = Kind::of(self.metas[number as usize].length);
        self.lists[kind as usize].push_last(self.metas, number);
    }

    /// Says whether a live object is a copy of a page in memory. The object becomes the youngest of its new
    /// kind. An object that was old no longer is, because its page was asked for just now.
    pub fn set_kept(&mut self, number: u32, is_kept: bool) {
        self.leave(number);
        let meta = &mut self.metas[number as usize];
        meta.length = meta.length & !(KEPT | DENSE) | if is_kept { KEPT } else { 0 };
        meta.set_born(self.stored);
        self.join(number);
    }

    /// Says that a live object won't become any shorter. The object becomes the youngest of its new kind.
    pub fn set_dense(&mut self, number: u32) {
        self.leave(number);
        self.metas[number as usize].length |= DENSE;
        self.join(number);
    }

    pub fn has_free_handle(&self) -> bool {
        self.count() < self.capacity()
    }

    /// Returns the number of a live object. Panics if the object isn't live: acting on an object that is gone
    /// would be acting on another page's bytes.
    pub fn live(&self, handle: ObjectHandle) -> u32 {
        let number = handle.raw();
        let live = self.metas.get(number as usize).is_some_and(|meta| meta.length != 0);
        assert!(live, "pool object {number} is not live");
        number
    }

    pub fn owner_of(&self, handle: ObjectHandle) -> Option<PageIndex> {
        let meta = self.metas.get(handle.raw() as usize)?;
        (meta.length != 0).then(|| meta.owner())
    }

    /// Makes a live object of `length` bytes that lies nowhere yet. The object is the youngest of its kind.
    pub fn begin(&mut self, owner: PageIndex, length: usize) -> u32 {
        debug_assert!(self.has_free_handle());
        let number = match self.free {
            0 => {
                self.touched += 1;
                self.touched
            }
            free => {
                self.free = self.metas[free as usize].age.next;
                free
            }
        };
        let meta = &mut self.metas[number as usize];
        assert!(meta.length == 0, "pool object {number} was handed out while live");
        meta.length = length as u16;
        meta.set_owner(owner);
        meta.set_born(self.stored);
        self.stored += 1;
        self.join(number);
        self.payload_bytes += length;
        number
    }

    /// Ends an object that lies nowhere any more. Its handle may be used again.
    pub fn end(&mut self, number: u32) {
        self.leave(number);
        let meta = &mut self.metas[number as usize];
        self.payload_bytes -= meta.length();
        meta.length = 0;
        meta.age = Links { prev: 0, next: self.free };
        self.free = number;
    }

    pub fn make_youngest(&mut self, number: u32) {
        self.leave(number);
        self.metas[number as usize].set_born(self.stored);
        self.join(number);
    }

    /// Asserts what holds among objects alone. Each handle ever used is either free, or live and once in the
    /// list of its kind.
    pub fn check(&self, mut visit: impl FnMut(u32)) {
        let (mut payload_bytes, mut turns) = (0, self.turns);
        for (kind, list) in Kind::ALL.iter().zip(&self.lists) {
            list.check(self.metas, |number| {
                let meta = &self.metas[number as usize];
                let length = meta.length();
                assert!(
                    (1..=PAGE_BYTES).contains(&length) && number <= self.touched,
                    "object {number} has {length} bytes"
                );
                assert!(Kind::of(meta.length) == *kind, "object {number} is in the list of {kind:?}");
                if *kind == Kind::Compressed {
                    turns.iter_mut().filter(|turn| **turn == number).for_each(|turn| *turn = 0);
                }
                payload_bytes += length;
                visit(number);
            });
        }
        assert!(payload_bytes == self.payload_bytes, "{payload_bytes} bytes, counted {}", self.payload_bytes);
        assert!(turns == [0; 2], "a turn is of an object that isn't there: {turns:?}");
        let (mut free, mut at) = (0, self.free);
        while at != 0 {
            free += 1;
            assert!(self.metas[at as usize].length == 0, "object {at} is free and live");
            assert!(free <= self.touched, "free handles run in a circle");
            at = self.metas[at as usize].age.next;
        }
        assert!(free + self.live_count() == self.touched, "handles were lost");
    }
}

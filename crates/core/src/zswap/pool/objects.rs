//! Objects: who owns them, where they lie, and which goes first.
//!
//! An object is reached through its handle, which stays the same while compaction moves its bytes. Handles
//! are numbers into one table, used again last in, first out, so that the table grows with the number of
//! objects alive at once and no further.
#![forbid(unsafe_code)]

use core::num::NonZeroU32;

use super::list::{Linked, Links, List};
use crate::units::{PAGE_BYTES, PageIndex};

/// Names a stored object: a number from 1 that fits [`HANDLE_BITS`](super::HANDLE_BITS) bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectHandle(NonZeroU32);

impl ObjectHandle {
    /// The number, as kept in a page-table entry; never 0.
    #[must_use]
    pub const fn raw(self) -> u32 {
        self.0.get()
    }
    /// The handle with this number; `None` for 0.
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

/// What the pool knows about one object. All-zero bytes are an object that was never stored.
#[repr(C)]
pub struct ObjectMeta {
    pub(super) owner: u64,
    /// While the object isn't live, `next` leads through the free handles.
    age: Links,
    siblings: Links,
    pub(super) block: u32,
    pub(super) slot: u16,
    /// 1 to 4096; 0 while the object isn't live. With [`KEPT`] if it is one.
    length: u16,
}

/// A bit of an object's length: its page is in memory, and the object a copy of it.
const KEPT: u16 = 1 << 15;
const _: () = assert!(PAGE_BYTES < KEPT as usize);

impl ObjectMeta {
    /// An object that was never stored.
    pub const UNUSED: ObjectMeta =
        ObjectMeta { owner: 0, age: Links::NONE, siblings: Links::NONE, block: 0, slot: 0, length: 0 };

    /// Bytes: 1 to 4096; 0 while the object isn't live.
    pub(super) const fn length(&self) -> usize {
        (self.length & !KEPT) as usize
    }
}

// Two to a cache line. At a mean of 1200 bytes per object this is 2.7 % on top of the pool.
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

/// All objects, live ones in the order in which they are to be written back.
pub(super) struct Objects<'m> {
    pub metas: &'m mut [ObjectMeta],
    /// Live objects of a whole page each, the oldest first: what doesn't compress. They go before all others, because in the
    /// memory of one of them there is room for several pages that do.
    whole: List<ByAge>,
    /// All others but those of `kept`, the oldest first.
    compressed: List<ByAge>,
    /// Copies of what is in memory, the oldest first: nothing is lost with them.
    kept: List<ByAge>,
    /// The handle freed last; 0 if none is free below `touched`.
    free: u32,
    /// Handles that were ever used: beyond them the table is untouched.
    pub touched: u32,
    /// Sum of the live objects' lengths.
    pub payload_bytes: usize,
}

impl<'m> Objects<'m> {
    pub fn new(metas: &'m mut [ObjectMeta]) -> Self {
        let (whole, compressed, kept) = (List::EMPTY, List::EMPTY, List::EMPTY);
        Objects { metas, whole, compressed, kept, free: 0, touched: 0, payload_bytes: 0 }
    }

    /// Objects that can be live at once.
    pub fn capacity(&self) -> usize {
        self.metas.len() - 1
    }

    pub fn count(&self) -> usize {
        self.live_count() as usize
    }

    fn live_count(&self) -> u32 {
        self.whole.count + self.compressed.count + self.kept.count
    }

    /// Copies of what is in memory.
    pub fn kept_count(&self) -> u32 {
        self.kept.count
    }

    /// The one to be written back next.
    pub fn first(&self) -> Option<ObjectHandle> {
        ObjectHandle::from_raw(self.whole.first).or(ObjectHandle::from_raw(self.compressed.first))
    }

    /// The copy that was kept longest.
    pub fn first_kept(&self) -> Option<ObjectHandle> {
        ObjectHandle::from_raw(self.kept.first)
    }

    /// Where an object of this length is, and what the list runs through.
    fn order(&mut self, length: u16) -> (&mut List<ByAge>, &mut [ObjectMeta]) {
        let list = match length {
            _ if length & KEPT != 0 => &mut self.kept,
            _ if usize::from(length) == PAGE_BYTES => &mut self.whole,
            _ => &mut self.compressed,
        };
        (list, self.metas)
    }

    /// Says whether a live object is a copy of what is in memory; it becomes the youngest of its new kind.
    pub fn set_kept(&mut self, number: u32, is_kept: bool) {
        let (order, metas) = self.order(self.metas[number as usize].length);
        order.remove(metas, number);
        let meta = &mut self.metas[number as usize];
        meta.length = meta.length & !KEPT | if is_kept { KEPT } else { 0 };
        let (order, metas) = self.order(self.metas[number as usize].length);
        order.push_last(metas, number);
    }

    pub fn has_room(&self) -> bool {
        self.count() < self.capacity()
    }

    /// The number of a live object; panics if it isn't live. To act on an object that is gone would be to
    /// act on another page's bytes, so this is never let pass.
    pub fn live(&self, handle: ObjectHandle) -> u32 {
        let number = handle.raw();
        let live = self.metas.get(number as usize).is_some_and(|meta| meta.length != 0);
        assert!(live, "pool object {number} is not live");
        number
    }

    pub fn owner_of(&self, handle: ObjectHandle) -> Option<PageIndex> {
        let meta = self.metas.get(handle.raw() as usize)?;
        (meta.length != 0).then_some(PageIndex(meta.owner))
    }

    /// Makes a live object of `length` bytes that lies nowhere yet, the youngest.
    pub fn begin(&mut self, owner: PageIndex, length: usize) -> u32 {
        debug_assert!(self.has_room());
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
        (meta.owner, meta.length) = (owner.0, length as u16);
        let (order, metas) = self.order(length as u16);
        order.push_last(metas, number);
        self.payload_bytes += length;
        number
    }

    /// Ends an object that lies nowhere any more; its handle may be used again.
    pub fn end(&mut self, number: u32) {
        let (order, metas) = self.order(self.metas[number as usize].length);
        order.remove(metas, number);
        let meta = &mut self.metas[number as usize];
        self.payload_bytes -= meta.length();
        meta.length = 0;
        meta.age = Links { prev: 0, next: self.free };
        self.free = number;
    }

    pub fn make_youngest(&mut self, number: u32) {
        let (order, metas) = self.order(self.metas[number as usize].length);
        order.remove(metas, number);
        order.push_last(metas, number);
    }

    /// Asserts what holds among objects alone: each handle ever used is either live and once in the list for its length,
    /// or free.
    pub fn check(&self, mut visit: impl FnMut(u32)) {
        let mut payload_bytes = 0;
        let whole = PAGE_BYTES..PAGE_BYTES + 1;
        for (list, lengths, is_kept) in [
            (&self.whole, whole, false),
            (&self.compressed, 1..PAGE_BYTES, false),
            (&self.kept, 1..PAGE_BYTES + 1, true),
        ] {
            list.check(self.metas, |number| {
                let meta = &self.metas[number as usize];
                let length = meta.length();
                assert!(
                    lengths.contains(&length) && number <= self.touched,
                    "object {number} of {length} bytes is not one of {lengths:?}"
                );
                assert!((meta.length & KEPT != 0) == is_kept, "object {number} is in another's list");
                payload_bytes += length;
                visit(number);
            });
        }
        assert!(payload_bytes == self.payload_bytes, "{payload_bytes} bytes, counted {}", self.payload_bytes);
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

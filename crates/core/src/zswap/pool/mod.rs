//! The compressed pool: objects of 1 to 4096 bytes, packed densely, in age order, under a limit.
//!
//! An eviction stores a page's compressed bytes and keeps the handle in the page's entry; a fault loads them
//! and frees the object, or keeps it for as long as the page may be unchanged. What doesn't come back grows
//! old, is compressed once more, and at the limit the driver's shrinker writes the oldest to areas: first of what doesn't
//! compress and takes a page each, then of what won't become any shorter, then of all else.
//!
//! One lock covers everything but objects' bytes, because everything under it is short: a store or a load is some list work.
//! Bytes, which are seldom in a CPU's cache, are copied in and decoded with the lock free, while their object is pinned. (Under the
//! lock a thread that faulted waited for the keeper's copies, and the keeper for the thread's.) From the outside in:
//!
//! - [`Pool`]: the operations, each one critical section, and a copy or a decoder after it.
//! - `pins`: which objects are read or written with the lock free.
//! - `objects`: handles, owners, which goes first.
//! - `classes`: which slot size an object gets, and from which block.
//! - `blocks`: pieces of memory on their way from cold to used and back.
//! - `compact`: emptying sparse blocks, so that memory can be given back.
//! - `layout`: how much memory to hand over. `data`, `list`, `check`: what the others stand on.
// UNSAFETY: objects lie in raw memory (`data`), and are read and written with the lock free.

mod blocks;
mod check;
mod classes;
mod compact;
mod data;
mod layout;
mod list;
mod objects;
mod pins;
#[cfg(test)]
mod tests;

use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

pub use blocks::BlockMeta;
pub use layout::{HANDLE_BITS, PoolLayout, PoolMemory};
pub use objects::{ObjectHandle, ObjectMeta};

use crate::sync::{Guard, Lock};
use crate::units::{PAGE_BYTES, PageIndex};
use blocks::Blocks;
use classes::Classes;
use data::Data;
use objects::Objects;
use pins::Pins;

/// A [reserve](Pool::keep_reserve) is one of so many blocks.
const RESERVE_PART: u32 = 32;

/// Why an object could not be stored. If it was to be a new one, the pool stops accepting until it was shrunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The pool is at its limit.
    Full,
    /// Every handle is in use: the objects are smaller than the pool was laid out for.
    NoHandle,
}

/// How large a pool is at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Memory of blocks, including empty ones that are kept or wait to be released. Never over the limit,
    /// unless the limit was lowered.
    pub bytes: usize,
    /// Of these, memory of blocks that hold objects: what the accept threshold is compared with.
    pub bytes_occupied: usize,
    /// Sum of the objects' lengths.
    pub payload_bytes: usize,
    /// Objects stored.
    pub objects: usize,
}

/// The compressed pool. Shared by all engine threads.
pub struct Pool<'m> {
    // Rank 6. Protects all of the pool but the bytes of pinned objects. Held for list work; for a few copies
    // by `compact`, and for one copy or decoder by who finds no room among the pins.
    state: Lock<State<'m>>,
    pins: Pins,
    data: Data<'m>,
    /// Stores are accepted, as was known when somebody last looked; if not, whoever asks looks again.
    accepts: AtomicBool,
}

/// What the lock protects.
struct State<'m> {
    objects: Objects<'m>,
    blocks: Blocks<'m>,
    classes: Classes,
    accept_percent: u32,
    /// Whether what becomes denser finds room when nothing else does.
    reserves: bool,
    /// Set when a store met the limit, until the pool is below the accept threshold again.
    was_full: bool,
}

impl<'m> Pool<'m> {
    /// A pool in `memory`, which was mapped according to `layout` and is all zero. Once full, it accepts
    /// again when no more than `accept_percent` of the limit is occupied (above 100 counts as 100).
    pub fn new(layout: &PoolLayout, memory: PoolMemory<'m>, accept_percent: u32) -> Pool<'m> {
        let PoolMemory { data, objects, blocks } = memory;
        assert!(data.as_ptr().addr().is_multiple_of(PAGE_BYTES) || layout.data_bytes == 0);
        let data = Data::new(&mut data[..layout.data_bytes]);
        let blocks = Blocks::new(&mut blocks[..layout.blocks], data, layout.block_bytes);
        Pool {
            accepts: AtomicBool::new(blocks.limit != 0),
            pins: Pins::new(),
            data,
            state: Lock::new(State {
                objects: Objects::new(&mut objects[..layout.objects]),
                blocks,
                classes: Classes::new(layout.block_bytes),
                accept_percent: accept_percent.min(100),
                reserves: false,
                was_full: false,
            }),
        }
    }

    /// Nobody is looking: in a fork's child, where whoever was doesn't exist.
    pub fn forget_holder(&self) {
        self.state.forget_holder();
        self.pins.forget();
    }

    /// Whether a page should be stored: no from the moment a store met the limit until the pool has shrunk
    /// to the accept threshold. [`Pool::store`] doesn't ask this itself.
    pub fn accepts(&self) -> bool {
        // Ordering: Relaxed, here and where it is set: a hint. It is set under the lock.
        if self.accepts.load(Ordering::Relaxed) {
            return true;
        }
        let mut state = self.state.lock();
        if state.was_full && !state.is_over_accept_threshold() {
            state.was_full = false;
        }
        let accepts = !state.was_full && state.blocks.limit != 0;
        self.accepts.store(accepts, Ordering::Relaxed);
        accepts
    }

    /// Whether there is more in the pool than the accept threshold: once the pool was full, the shrinker
    /// goes on while there is. It should call [`Pool::compact`] between batches: objects that are old
    /// together seldom lie together, so freeing them alone leaves holes rather than empty blocks.
    pub fn over_accept_threshold(&self) -> bool {
        self.state.lock().is_over_accept_threshold()
    }

    /// Whether what doesn't compress takes more than one of `part` bytes of the limit.
    pub fn has_many_whole(&self, part: u32) -> bool {
        self.state.lock().has_many_whole(part)
    }

    /// Either of both; the second only if a part is given. In one look: who faults waits for the lock.
    pub fn is_too_full(&self, whole_part: Option<u32>) -> bool {
        let state = self.state.lock();
        state.is_over_accept_threshold() || whole_part.is_some_and(|part| state.has_many_whole(part))
    }

    /// Stores `bytes` (1 to 4096 of them) for `owner`, who keeps the handle.
    pub fn store(&self, owner: PageIndex, bytes: &[u8]) -> Result<ObjectHandle, StoreError> {
        assert!(!bytes.is_empty() && bytes.len() <= PAGE_BYTES, "an object of {} bytes", bytes.len());
        let mut state = self.state.lock();
        let (class, reserve) = (state.classes.of_length(bytes.len()), state.reserve());
        match state.begin(owner, bytes.len(), class, reserve) {
            Ok(handle) => {
                self.fill(state, handle, bytes);
                Ok(handle)
            }
            Err(error) => {
                state.was_full = true;
                self.accepts.store(false, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// Writes the bytes of an object that was just made.
    fn fill(&self, state: Guard<'_, State<'m>>, handle: ObjectHandle, bytes: &[u8]) {
        let place = state.place_of(handle.raw());
        let pin = self.pins.pin_to_write(handle.raw());
        let _held = pin.is_none().then_some(state);
        // SAFETY: the object was just made. While it is pinned to be written, or while the lock is held, it is not read, moved or
        // freed.
        unsafe { self.data.bytes_mut(place) }.copy_from_slice(bytes);
    }

    /// Stores `bytes`, which are fewer and won't become any shorter, instead of an object of the same owner, and frees that. If
    /// there is no room, which doesn't make the pool a full one, it stays. Panics if it isn't live.
    pub fn replace(&self, handle: ObjectHandle, bytes: &[u8]) -> Result<ObjectHandle, StoreError> {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        let meta = &state.objects.metas[number as usize];
        let (owner, born) = (meta.owner(), meta.born());
        let was_in = state.blocks.metas[meta.block as usize].class;
        let class = state.classes.of_length(bytes.len());
        let denser = state.begin(owner, bytes.len(), class, 0).or_else(|error| {
            // A larger slot will do: what it leaves is larger still. Larger ones come first.
            let has_room = |class: &usize| state.classes.get(*class).fullest().is_some();
            let larger = (usize::from(was_in) + 1..class).rev().find(has_room).ok_or(error)?;
            state.begin(owner, bytes.len(), larger, 0)
        })?;
        state.objects.set_dense(denser.raw());
        state.objects.metas[denser.raw() as usize].set_born(born);
        self.fill(state, denser, bytes);
        self.free(handle);
        Ok(denser)
    }

    /// From now on a small part of the limit is for [`Pool::replace`] alone: without areas a full pool can then still be made
    /// denser.
    ///
    /// Panics if the pool would have to be fuller than that to be over its accept threshold.
    pub fn keep_reserve(&self) {
        let mut state = self.state.lock();
        assert!(
            state.accept_percent < 100 - 100_u32.div_ceil(RESERVE_PART),
            "it would be full and never too full"
        );
        state.reserves = true;
    }

    /// The object won't become any shorter. Panics if it isn't live.
    pub fn leave_as_it_is(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_dense(number);
    }

    /// The object to make denser next: the oldest that may become shorter. With `is_old`, only if it has been here for two
    /// [turns](Pool::turn). It may be gone, as with [`Pool::first_to_go`].
    pub fn first_to_densify(&self, is_old: bool) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first_to_densify(is_old))
    }

    /// Some time has passed: what is here now is a turn older.
    pub fn turn(&self) {
        self.state.lock().objects.turn();
    }

    /// Calls `with` for the object's bytes. The object stays. Panics if it isn't live. For its owner: nobody else may free it
    /// meanwhile, which panics. As a rule the pool's lock is free then, but not if as many objects are pinned as can be: so `with`
    /// takes no lock, and doesn't call the pool.
    pub fn read<T>(&self, handle: ObjectHandle, with: impl FnOnce(&[u8]) -> T) -> T {
        let state = self.state.lock();
        let number = state.objects.live(handle);
        assert!(!self.pins.is_written(number), "pool object {number} was read while it was stored");
        let place = state.place_of(number);
        let pin = self.pins.pin(number);
        let _held = pin.is_none().then_some(state);
        self.data.prefetch(&place);
        // SAFETY: a live object's bytes were written when it was stored. While it is pinned, or while the lock is held, it is
        // neither moved nor freed.
        with(unsafe { self.data.bytes(place) })
    }

    /// Frees the object; how many bytes it had. Panics if it isn't live.
    pub fn free(&self, handle: ObjectHandle) -> usize {
        self.free_and_tell(handle).0
    }

    /// The same, and whether it was [old](Pool::is_old).
    pub fn free_and_tell(&self, handle: ObjectHandle) -> (usize, bool) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        assert!(!self.pins.has(number), "pool object {number} was freed while somebody read it");
        let told = (state.objects.metas[number as usize].length(), state.objects.is_old(number));
        state.detach(number);
        state.objects.end(number);
        told
    }

    /// The page of this object is in memory again, and keeps it as a copy.
    pub fn keep(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_kept(number, true);
    }

    /// The page of an object that was kept has gone: the object has its bytes alone, as if it had just been stored.
    pub fn stow(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_kept(number, false);
    }

    /// Objects that are kept.
    pub fn kept(&self) -> u32 {
        self.state.lock().objects.kept_count()
    }

    /// The object that has been kept longest, and its page; see [`Pool::first_to_go`].
    pub fn first_kept(&self) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first_kept())
    }

    /// The object to write back next: the oldest of those that take a whole page; if there are none, of those that won't
    /// become any shorter ([`Pool::replace`], [`Pool::leave_as_it_is`]), then of all others but those that are kept. It may be
    /// gone, or its handle have another owner, as soon as this returns: lock the owner's entry and compare the handle in it before
    /// acting.
    pub fn first_to_go(&self) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first())
    }

    /// Makes the object the youngest of its kind, because its page is busy now. Does nothing if the handle isn't
    /// `owner`'s any more.
    pub fn rotate(&self, handle: ObjectHandle, owner: PageIndex) {
        let mut state = self.state.lock();
        if state.objects.owner_of(handle) == Some(owner) {
            state.objects.make_youngest(handle.raw());
        }
    }

    /// Whether more has been stored since this object was than three quarters of what has been since the oldest was that compresses.
    /// Panics if it isn't live.
    pub fn is_old(&self, handle: ObjectHandle) -> bool {
        let state = self.state.lock();
        state.objects.is_old(state.objects.live(handle))
    }

    /// Who owns the object; `None` if it isn't live.
    pub fn owner(&self, handle: ObjectHandle) -> Option<PageIndex> {
        self.state.lock().objects.owner_of(handle)
    }

    /// Gives the object to the page that its owner became. Panics if it isn't live.
    pub fn rename(&self, handle: ObjectHandle, owner: PageIndex) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.metas[number as usize].set_owner(owner);
    }

    /// Bytes of the data whose memory should be given back: tell the kernel so, holding no lock, then call
    /// [`Pool::released`]. Until then the pool doesn't use them. Call again until it returns `None`.
    pub fn take_released(&self) -> Option<Range<usize>> {
        self.state.lock().blocks.begin_release()
    }

    /// The memory of a range from [`Pool::take_released`] was given back (its content is arbitrary now).
    /// Panics on any other range.
    pub fn released(&self, range: Range<usize>) {
        self.state.lock().blocks.released(range);
    }

    /// Changes the limit, up to the one the pool was laid out for. Lowering it frees nothing by itself: the
    /// pool refuses new blocks, [`Pool::over_accept_threshold`] tells the shrinker to work, and empty
    /// blocks are released.
    pub fn set_limit(&self, bytes_max: usize) {
        let mut state = self.state.lock();
        let blocks = bytes_max / state.blocks.block_bytes();
        state.blocks.limit = blocks.min(state.blocks.capacity() as usize) as u32;
        // Whoever stores next looks.
        self.accepts.store(false, Ordering::Relaxed);
    }

    /// The lowest limit that leaves what there is where it is, and the reserve what it is for, in bytes.
    pub fn limit_of_what_is_there(&self) -> usize {
        let state = self.state.lock();
        let used = state.blocks.with_memory() as usize;
        let reserve = if state.reserves { used / (RESERVE_PART as usize - 1) } else { 0 };
        (used + reserve) * state.blocks.block_bytes()
    }

    /// How large its blocks are.
    pub fn block_bytes(&self) -> usize {
        self.state.lock().blocks.block_bytes()
    }

    /// The pool's size now.
    pub fn usage(&self) -> PoolUsage {
        let state = self.state.lock();
        let block_bytes = state.blocks.block_bytes();
        PoolUsage {
            bytes: state.blocks.with_memory() as usize * block_bytes,
            bytes_occupied: state.blocks.in_use as usize * block_bytes,
            payload_bytes: state.objects.payload_bytes,
            objects: state.objects.count(),
        }
    }
}

impl State<'_> {
    /// Measured by blocks that hold objects: empty ones that are kept for reuse are room, not load. (With
    /// them counted, a low threshold could never be reached in a small pool.) Handles count as memory does.
    fn is_over_accept_threshold(&self) -> bool {
        let over = |used: usize, max: usize| used as u64 * 100 > max as u64 * u64::from(self.accept_percent);
        over(self.blocks.in_use as usize, self.blocks.limit as usize)
            || over(self.objects.count(), self.objects.capacity())
    }

    fn has_many_whole(&self, part: u32) -> bool {
        let bytes = self.objects.whole_count() as usize * PAGE_BYTES;
        bytes * part as usize > self.blocks.limit as usize * self.blocks.block_bytes()
    }

    /// A live object, and its page.
    fn named(&self, handle: Option<ObjectHandle>) -> Option<(ObjectHandle, PageIndex)> {
        handle.map(|handle| (handle, self.objects.metas[handle.raw() as usize].owner()))
    }

    /// Blocks that only what becomes denser may take: few, and none of a pool that has few.
    fn reserve(&self) -> u32 {
        if self.reserves { self.blocks.limit / RESERVE_PART } else { 0 }
    }

    /// Makes an object of `length` bytes, which are yet to be written, in a slot of `class`.
    fn begin(
        &mut self,
        owner: PageIndex,
        length: usize,
        class: usize,
        reserve: u32,
    ) -> Result<ObjectHandle, StoreError> {
        let block = self.block_with_room(class, reserve)?;
        let slot_bytes = self.classes.get(class).slot_bytes;
        let slot = self.blocks.take_slot(block, slot_bytes);
        let number = self.objects.begin(owner, length);
        self.attach(number, block, slot);
        Ok(ObjectHandle::from_raw(number).expect("object numbers begin at 1"))
    }

    /// A block of `class` with a free slot: the fullest that it has, else a new one, if so many are left.
    fn block_with_room(&mut self, class: usize, reserve: u32) -> Result<u32, StoreError> {
        if !self.objects.has_room() {
            return Err(StoreError::NoHandle);
        }
        if let Some(block) = self.classes.get(class).fullest() {
            return Ok(block);
        }
        let block = self.blocks.acquire(class, reserve).ok_or(StoreError::Full)?;
        let class = self.classes.get_mut(class);
        class.blocks += 1;
        class.slots_free += class.capacity;
        Ok(block)
    }

    /// Where a live object's bytes are.
    fn place_of(&self, number: u32) -> Range<usize> {
        let meta = &self.objects.metas[number as usize];
        let class = usize::from(self.blocks.metas[meta.block as usize].class);
        let slot_bytes = self.classes.get(class).slot_bytes;
        self.blocks.place(meta.block, meta.slot, slot_bytes, meta.length())
    }

    /// Puts an object that lies nowhere into a slot that was taken for it.
    fn attach(&mut self, number: u32, block: u32, slot: u16) {
        let meta = &mut self.objects.metas[number as usize];
        (meta.block, meta.slot) = (block, slot);
        let siblings = &mut self.blocks.metas[block as usize].objects;
        siblings.push_first(self.objects.metas, number);
        let used = siblings.count;
        let class = self.classes.get_mut(usize::from(self.blocks.metas[block as usize].class));
        class.regroup(self.blocks.metas, block, used - 1, used);
    }

    /// Takes an object out of its slot and frees the slot. A block that gets empty leaves its class.
    fn detach(&mut self, number: u32) {
        let ObjectMeta { block, slot, .. } = self.objects.metas[number as usize];
        let class = self.classes.get_mut(usize::from(self.blocks.metas[block as usize].class));
        self.blocks.free_slot(block, slot, class.slot_bytes);
        let siblings = &mut self.blocks.metas[block as usize].objects;
        siblings.remove(self.objects.metas, number);
        let used = siblings.count;
        class.regroup(self.blocks.metas, block, used + 1, used);
        if used == 0 {
            class.blocks -= 1;
            class.slots_free -= class.capacity;
            self.blocks.give_back(block);
        }
    }
}

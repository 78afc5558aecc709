//! The compressed pool: objects of 1 to 4096 bytes, packed densely, in age order, under a limit.
//!
//! An eviction stores a page's compressed bytes and keeps the handle in the page's entry. A fault loads the
//! bytes and frees the object, or keeps the object for as long as the page may be unchanged. An object whose
//! page doesn't come back grows old and is compressed once more. At the limit the driver's shrinker writes
//! the oldest objects to areas. Objects that don't compress and take a page each go first, then objects that
//! won't become any shorter, then the rest.
//!
//! A single lock covers everything but objects' bytes. Everything under the lock is short: a store or a load
//! is some list work. Objects' bytes are seldom in a CPU's cache, so they are copied in and decoded with the
//! lock free, while their object has a pin. Under the lock, faulting threads and the keeper would wait for
//! each other's copies. The modules, from the outside in:
//!
//! - [`Pool`]: the operations. Each is one critical section, with a copy or a decoder after it.
//! - `pins`: which objects are read or written with the lock free.
//! - `objects`: handles, owners, and which object goes first.
//! - `classes`: which slot size an object gets, and from which block.
//! - `blocks`: pieces of memory on their way from cold to used and back.
//! - `compact`: emptying sparse blocks, so that memory can be given back.
//! - `layout`: how much memory to hand over.
//! - `data`, `list`, `check`: the base of the other modules.
// UNSAFETY: objects lie in raw memory (`data`). Their bytes are read and written with the lock free.

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

use crate::sync::{Guard, Lock, rank};
use crate::units::{PAGE_BYTES, PageIndex};
use blocks::Blocks;
use classes::Classes;
use data::Data;
use objects::Objects;
use pins::Pins;

/// Blocks of the limit for each block of the [reserve](Pool::keep_reserve).
const RESERVE_PART: u32 = 32;

/// Why an object could not be stored. A failed [`Pool::store`] also makes the pool stop accepting until it
/// has shrunk.
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
    /// Memory of blocks, including empty blocks that are kept or wait to be released. At most the limit,
    /// unless the limit was lowered.
    pub bytes: usize,
    /// The part of `bytes` in blocks that hold objects, which the accept threshold is compared with.
    pub bytes_occupied: usize,
    /// Sum of the objects' lengths.
    pub payload_bytes: usize,
    /// Objects stored.
    pub objects: usize,
}

/// The compressed pool. Shared by all engine threads.
pub struct Pool<'m> {
    // Rank 6. Protects all of the pool but the bytes of objects that have a pin. Held for list work.
    // `compact` also holds it for a few copies. A thread that finds no free pin holds it for one copy or
    // decoder.
    state: Lock<State<'m>, { rank::POOL }>,
    pins: Pins,
    data: Data<'m>,
    /// Whether stores were accepted when a thread last looked. If not, the next thread that asks looks again.
    accepts: AtomicBool,
}

/// The part of the pool that the lock protects.
struct State<'m> {
    objects: Objects<'m>,
    blocks: Blocks<'m>,
    classes: Classes,
    accept_percent: u32,
    /// Whether [`Pool::replace`] finds free space when [`Pool::store`] doesn't.
    reserves: bool,
    /// Set when a store meets the limit, until the pool is below the accept threshold again.
    was_full: bool,
}

impl<'m> Pool<'m> {
    /// Makes a pool in `memory`, which was mapped according to `layout` and is all zero. Once full, the pool
    /// accepts again when at most `accept_percent` of the limit is occupied (above 100 counts as 100).
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

    /// Forgets the lock's holder and all pins: in a fork's child the threads that held them don't exist.
    pub fn forget_holder(&self) {
        self.state.forget_holder();
        self.pins.forget();
    }

    /// Returns whether a page should be stored. The answer is no from the moment a store meets the limit
    /// until the pool has shrunk to the accept threshold. [`Pool::store`] doesn't ask this itself.
    pub fn accepts(&self) -> bool {
        // Ordering: Relaxed, here and where the flag is set: the flag is a hint, and is set under the lock.
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

    /// Returns whether the pool holds more than the accept threshold. Once the pool was full, the shrinker
    /// goes on while it does. The shrinker should call [`Pool::compact`] between batches. Objects that are
    /// old together seldom lie together, so freeing them alone leaves holes rather than empty blocks.
    pub fn over_accept_threshold(&self) -> bool {
        self.state.lock().is_over_accept_threshold()
    }

    /// Returns whether objects that don't compress take more than one of `part` bytes of the limit.
    pub fn has_many_whole(&self, part: u32) -> bool {
        self.state.lock().has_many_whole(part)
    }

    /// Returns whether the pool is [over its accept threshold](Pool::over_accept_threshold) or, if a part is
    /// given, [has many whole pages](Pool::has_many_whole). Takes the lock only once, because faulting
    /// threads wait for it.
    pub fn is_too_full(&self, whole_part: Option<u32>) -> bool {
        let state = self.state.lock();
        state.is_over_accept_threshold() || whole_part.is_some_and(|part| state.has_many_whole(part))
    }

    /// Stores `bytes` (1 to 4096 of them) for `owner`, which keeps the handle.
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
    fn fill(&self, state: Guard<'_, State<'m>, { rank::POOL }>, handle: ObjectHandle, bytes: &[u8]) {
        let place = state.place_of(handle.raw());
        let pin = self.pins.pin_to_write(handle.raw());
        let _held = pin.is_none().then_some(state);
        // SAFETY: the object was just made. No thread reads, moves or frees it while it has a pin to be
        // written, or while the lock is held.
        unsafe { self.data.bytes_mut(place) }.copy_from_slice(bytes);
    }

    /// Replaces an object's bytes by `bytes`, which are fewer and won't become any shorter. The owner stays
    /// the same; the object gets a new handle, and the old handle is freed. If the pool has no free space,
    /// the old object stays, and the pool doesn't count as full. Panics if the old object isn't live.
    pub fn replace(&self, handle: ObjectHandle, bytes: &[u8]) -> Result<ObjectHandle, StoreError> {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        let meta = &state.objects.metas[number as usize];
        let (owner, born) = (meta.owner(), meta.born());
        let was_in = state.blocks.metas[meta.block as usize].class;
        let class = state.classes.of_length(bytes.len());
        let denser = state.begin(owner, bytes.len(), class, 0).or_else(|error| {
            // A larger slot will do, because the slot that the object leaves is larger still. Classes are
            // ordered from the largest slots down.
            let has_free_slot = |class: &usize| state.classes.get(*class).fullest().is_some();
            let larger = (usize::from(was_in) + 1..class).rev().find(has_free_slot).ok_or(error)?;
            state.begin(owner, bytes.len(), larger, 0)
        })?;
        state.objects.set_dense(denser.raw());
        state.objects.metas[denser.raw() as usize].set_born(born);
        self.fill(state, denser, bytes);
        self.free(handle);
        Ok(denser)
    }

    /// Keeps a small part of the limit for [`Pool::replace`] alone from now on. Without areas a full pool can
    /// then still be made denser.
    ///
    /// Panics if the pool would be full before it is over its accept threshold.
    pub fn keep_reserve(&self) {
        let mut state = self.state.lock();
        assert!(
            state.accept_percent < 100 - 100_u32.div_ceil(RESERVE_PART),
            "it would be full and never too full"
        );
        state.reserves = true;
    }

    /// Marks an object as one that won't become any shorter. Panics if the object isn't live.
    pub fn leave_as_it_is(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_dense(number);
    }

    /// Returns the object to make denser next: the oldest that may become shorter. With `is_old`, returns the
    /// object only if two [turns](Pool::turn) have begun since it was stored. The object may be gone, as with
    /// [`Pool::first_to_go`].
    pub fn first_to_densify(&self, is_old: bool) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first_to_densify(is_old))
    }

    /// Makes all objects one turn older: some time has passed.
    pub fn turn(&self) {
        self.state.lock().objects.turn();
    }

    /// Calls `with` for the object's bytes. The object stays. Panics if it isn't live. Only the owner may
    /// call this: another thread that frees the object meanwhile panics. As a rule the pool's lock is free
    /// while `with` runs. If all pins are taken, the lock is held. So `with` takes no lock, and doesn't call
    /// the pool.
    pub fn read<T>(&self, handle: ObjectHandle, with: impl FnOnce(&[u8]) -> T) -> T {
        let state = self.state.lock();
        let number = state.objects.live(handle);
        assert!(!self.pins.is_written(number), "pool object {number} was read while it was stored");
        let place = state.place_of(number);
        let pin = self.pins.pin(number);
        let _held = pin.is_none().then_some(state);
        self.data.prefetch(&place);
        // SAFETY: a live object's bytes were written when it was stored, and are not being written, as
        // asserted above. No thread moves or frees the object while it has a pin, or while the lock is held.
        with(unsafe { self.data.bytes(place) })
    }

    /// Frees the object and returns how many bytes it had. Panics if it isn't live.
    pub fn free(&self, handle: ObjectHandle) -> usize {
        self.free_and_tell(handle).0
    }

    /// Frees the object as [`Pool::free`] does. Also returns whether the object was [old](Pool::is_old).
    pub fn free_and_tell(&self, handle: ObjectHandle) -> (usize, bool) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        assert!(!self.pins.has(number), "pool object {number} was freed while somebody read it");
        let told = (state.objects.metas[number as usize].length(), state.objects.is_old(number));
        state.detach(number);
        state.objects.end(number);
        told
    }

    /// Marks the object as kept: its page is in memory again, and the object stays as a copy of it.
    pub fn keep(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_kept(number, true);
    }

    /// Ends the keeping of an object: its page was evicted again, and the object alone has the bytes, as if
    /// it had just been stored.
    pub fn stow(&self, handle: ObjectHandle) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.set_kept(number, false);
    }

    /// Returns the number of objects that are kept.
    pub fn kept(&self) -> u32 {
        self.state.lock().objects.kept_count()
    }

    /// Returns the object that has been kept longest, and its page; see [`Pool::first_to_go`].
    pub fn first_kept(&self) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first_kept())
    }

    /// Returns the object to write back next, and its page. The oldest object that takes a whole page comes
    /// first. If there is none, the oldest that won't become any shorter follows ([`Pool::replace`],
    /// [`Pool::leave_as_it_is`]), then the oldest of the rest. Kept objects are left out. The object may be
    /// gone, or its handle have another owner, as soon as this method returns. So callers lock the owner's
    /// entry and compare the handle in it before they act.
    pub fn first_to_go(&self) -> Option<(ObjectHandle, PageIndex)> {
        let state = self.state.lock();
        state.named(state.objects.first())
    }

    /// Makes the object the youngest of its kind, because its page is busy now. Does nothing if `owner` no
    /// longer owns the handle.
    pub fn rotate(&self, handle: ObjectHandle, owner: PageIndex) {
        let mut state = self.state.lock();
        if state.objects.owner_of(handle) == Some(owner) {
            state.objects.make_youngest(handle.raw());
        }
    }

    /// Returns whether the object is old: its age is more than three quarters of that of the oldest
    /// compressible object. An object's age is the number of objects stored since it came or was last asked
    /// for. Panics if the object isn't live.
    pub fn is_old(&self, handle: ObjectHandle) -> bool {
        let state = self.state.lock();
        state.objects.is_old(state.objects.live(handle))
    }

    /// Returns who owns the object; `None` if it isn't live.
    pub fn owner(&self, handle: ObjectHandle) -> Option<PageIndex> {
        self.state.lock().objects.owner_of(handle)
    }

    /// Gives the object to the page that its owner became. Panics if it isn't live.
    pub fn rename(&self, handle: ObjectHandle, owner: PageIndex) {
        let mut state = self.state.lock();
        let number = state.objects.live(handle);
        state.objects.metas[number as usize].set_owner(owner);
    }

    /// Returns a range of the data whose memory should be given back. The caller tells the kernel so, holding
    /// no lock, and then calls [`Pool::released`]. Until then the pool doesn't use the range. Callers repeat
    /// this until it returns `None`.
    pub fn take_released(&self) -> Option<Range<usize>> {
        self.state.lock().blocks.begin_release()
    }

    /// Ends the release of a range from [`Pool::take_released`], whose memory was given back and whose
    /// content is arbitrary now. Panics on any other range.
    pub fn released(&self, range: Range<usize>) {
        self.state.lock().blocks.released(range);
    }

    /// Changes the limit, up to the one the pool was laid out for. Lowering the limit frees nothing by
    /// itself. The pool then refuses new blocks, [`Pool::over_accept_threshold`] tells the shrinker to work,
    /// and empty blocks are released.
    pub fn set_limit(&self, bytes_max: usize) {
        let mut state = self.state.lock();
        let blocks = bytes_max / state.blocks.block_bytes();
        state.blocks.limit = blocks.min(state.blocks.capacity() as usize) as u32;
        // The next thread that stores looks again.
        self.accepts.store(false, Ordering::Relaxed);
    }

    /// Returns the lowest limit, in bytes, under which all objects stay where they are and the reserve stays
    /// available.
    pub fn limit_of_what_is_there(&self) -> usize {
        let state = self.state.lock();
        let used = state.blocks.with_memory() as usize;
        let reserve = if state.reserves { used / (RESERVE_PART as usize - 1) } else { 0 };
        (used + reserve) * state.blocks.block_bytes()
    }

    /// Returns how large the pool's blocks are.
    pub fn block_bytes(&self) -> usize {
        self.state.lock().blocks.block_bytes()
    }

    /// Returns the pool's size now.
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
    /// Returns whether the pool is over its accept threshold. Only blocks that hold objects count. Empty
    /// blocks that are kept for reuse are spare, not load. (With them counted, a low threshold could never be
    /// reached in a small pool.) Handles count as memory does.
    fn is_over_accept_threshold(&self) -> bool {
        let over = |used: usize, max: usize| used as u64 * 100 > max as u64 * u64::from(self.accept_percent);
        over(self.blocks.in_use as usize, self.blocks.limit as usize)
            || over(self.objects.count(), self.objects.capacity())
    }

    fn has_many_whole(&self, part: u32) -> bool {
        let bytes = self.objects.whole_count() as usize * PAGE_BYTES;
        bytes * part as usize > self.blocks.limit as usize * self.blocks.block_bytes()
    }

    /// Pairs a live object with its page.
    fn named(&self, handle: Option<ObjectHandle>) -> Option<(ObjectHandle, PageIndex)> {
        handle.map(|handle| (handle, self.objects.metas[handle.raw() as usize].owner()))
    }

    /// Returns the number of blocks that only [`Pool::replace`] may take: few, and none of a pool that has
    /// few.
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
        let block = self.block_with_free_slot(class, reserve)?;
        let slot_bytes = self.classes.get(class).slot_bytes;
        let slot = self.blocks.take_slot(block, slot_bytes);
        let number = self.objects.begin(owner, length);
        self.attach(number, block, slot);
        Ok(ObjectHandle::from_raw(number).expect("object numbers begin at 1"))
    }

    /// Returns a block of `class` with a free slot: the fullest of the class, or a new block if more than
    /// `reserve` are left.
    fn block_with_free_slot(&mut self, class: usize, reserve: u32) -> Result<u32, StoreError> {
        if !self.objects.has_free_handle() {
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

    /// Returns where a live object's bytes are.
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

    /// Takes an object out of its slot and frees the slot. A block that becomes empty leaves its class.
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

//! Rooms: what each armed thread has of Farpage's. A room is an alternate stack, with data for the thread's
//! handlers on top.
//!
//! Handlers have no thread-local storage. But they run on a room's stack, and rooms are aligned to their
//! size. Thus a handler finds its thread's [`Room`] by its own stack pointer. A room is given to a thread
//! before the thread exists, or before the thread is told to arm itself. The room is taken back when its
//! thread has ended.
// UNSAFETY: stacks are memory, and each room's fields are its thread's alone.

use super::errands::Errand;
use super::sent::AtWork;
use super::signals::open;
use crate::engine::Engine;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use farpage_core::holds::{self, Holder};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_os::clock::now_ns;
use farpage_os::dispatch::SCRATCH_WORDS;
use farpage_os::memory;
use farpage_os::signal::{AlternateStack, alternate_stack};
use farpage_os::sys::{self, number};

/// Bytes of a room, which are also its alignment. Only pages that are touched take memory. Signal frames take
/// 1 to 11 KiB each (AVX-512, AMX).
const ROOM_BYTES: usize = 512 * 1024;
/// Rooms that are made at a time.
const CHUNK: usize = 32;
/// Chunks of rooms, at most: enough for 32,768 threads at once, as many as the kernel gives a process by
/// default.
const CHUNKS_MAX: usize = 1024;
/// Calls of one thread that can be under way at once. Each but the last was interrupted by a handler that
/// made another call.
pub const LEVELS: usize = 8;
/// Bytes between two stack pointers of one stack, at most. Stack pointers further apart count as those of
/// different stacks.
const STACK_BYTES_MAX: usize = 64 << 20;

/// A system call that is under way.
pub struct Level {
    /// Memory that the call holds.
    pub holder: Holder,
    /// The thread's stack pointer when the call was made.
    stack_pointer: AtomicUsize,
    /// The call returns to what a handler interrupted, and nobody says when it is done.
    pub returns: AtomicBool,
    /// Arguments that aren't the program's own, for as long as the kernel reads them.
    pub scratch: UnsafeCell<[usize; SCRATCH_WORDS]>,
    /// A mask of signals that isn't the program's own, for as long as the kernel reads it.
    pub mask: UnsafeCell<u64>,
    /// Address and size of `mask`, for calls that take both by one argument.
    pub sized_mask: UnsafeCell<[usize; 2]>,
    /// Signals that the program wants blocked while the call waits, if the call says so.
    pub waits_with: UnsafeCell<Option<u64>>,
}

/// Fields that only the room's own thread uses, or the keeper before that thread is armed.
pub struct Own {
    /// The alternate stack that the program believes to have.
    pub alternate: AlternateStack,
    /// The last alternate stack that was put away when a handler began on it.
    pub put_away: AlternateStack,
    /// Signals that the program believes to block, and that stay open.
    pub claimed: u64,
    /// `claimed` may include signals that only a hook of Farpage's has blocked, because the thread was armed
    /// in that hook.
    pub is_in_hook: bool,
    /// State of the loan, while the thread waits for a child that uses its room, or after it has waited.
    pub lent: Option<Lent>,
    /// Page of the last fault outside of managed memory, or of the last access that should have been possible
    /// (see `try_again`). The number says how many changes of mappings were over then.
    pub strange: (PageIndex, u32),
    /// Time of the last fault that `try_again` noted.
    pub strange_ns: u64,
    /// Retries in a row of the access that `try_again` noted last.
    pub tries: u32,
    /// Pages that a child found to be unmanaged, and how many changes of mappings were over then.
    pub not_ours: (PageRange, u32),
    /// The call that the thread was in before it was told to arm itself.
    pub expected: Option<farpage_os::proc::CallUnderWay>,
}

/// Children of vfork that can be nested in one room. A child of vfork rarely makes another.
const LENDERS: usize = LEVELS;

/// State of a room that a child of vfork uses.
#[derive(Clone, Copy)]
pub struct Lent {
    /// Levels that were busy before the loan, one bit each.
    busy: u32,
    /// Farpage's signals for which the child had a handler once, and has none any more. The maker still has
    /// that handler.
    spent: u64,
    /// State of the maker, then of its child if that child makes another one, and so on.
    each: [Lender; LENDERS],
    lenders: usize,
}

/// State with which a maker continues after it has waited for a child. The child may change that state for
/// itself.
#[derive(Clone, Copy)]
struct Lender {
    /// See [`Own`].
    alternate: AlternateStack,
    claimed: u64,
    /// The maker's mask. More is blocked meanwhile: no handler runs until the maker is back, nor in its child
    /// until the child is armed.
    blocked: u64,
}

impl Own {
    /// Gives the program a mask and an alternate stack. Both come from a frame from which the thread
    /// continues with the stack pointer `back`.
    pub fn go_back(&mut self, blocked: u64, stack: AlternateStack, back: usize) {
        self.claimed = blocked & open();
        if !self.put_away.contains(back) {
            self.put_away = AlternateStack::NONE;
        }
        // Like the kernel, this changes no alternate stack that is in use.
        if let Some(stack) = stack.accepted().ok().filter(|_| !self.alternate.is_in_use(back)) {
            self.alternate = stack;
        }
    }
}

/// Nanoseconds within which a failed access counts as a retry of the previous one.
const TRIES_NS: u64 = 10_000_000;

impl Own {
    /// Notes a failure of an access that should be possible. Returns how often the access was retried in a
    /// row, each time soon after the last.
    pub fn try_again(&mut self, seen: (PageIndex, u32)) -> u32 {
        let (now, before) = (now_ns(), core::mem::replace(&mut self.strange, seen));
        let is_again = before == seen && now - self.strange_ns < TRIES_NS;
        self.tries = if is_again { self.tries + 1 } else { 0 };
        self.strange_ns = now;
        self.tries
    }
}

/// The room is nobody's.
pub const FREE: u32 = 0;
/// The room's thread isn't armed yet.
pub const GIVEN: u32 = 1;
/// The room's thread is armed.
pub const ARMED: u32 = 2;
/// The room's thread could not be armed just now, because it was on another alternate stack.
pub const LATER: u32 = 3;
/// The room's thread can't be armed.
pub const FAILED: u32 = 4;
/// The room's thread is ending.
const LEAVING: u32 = 5;
/// The room is being given to a thread, which isn't noted yet.
const TAKEN: u32 = 6;

/// Data on top of a room's stack.
#[repr(C, align(4096))]
pub struct Room {
    /// State of the room, one of the constants above. The first field, because a trampoline sets it to
    /// [`FREE`] when no thread was made.
    pub state: AtomicU32,
    /// Number of the thread that has the room.
    pub thread: AtomicU32,
    /// Calls that are under way.
    pub levels: [Level; LEVELS],
    /// Request of a child that uses the room.
    pub errand: Errand,
    /// Says whether a handler of Farpage's is at work in the thread.
    pub at_work: AtWork,
    /// Fields of the room's own thread.
    pub own: UnsafeCell<Own>,
}

// SAFETY: fields that aren't atomic are used by one thread at a time (see `Own`). Levels and kept signals are
// their thread's.
unsafe impl Sync for Room {}

const _: () = assert!(core::mem::offset_of!(Room, state) == 0 && FREE == 0);
const _: () = assert!(size_of::<Room>() + 4 * PAGE_BYTES < ROOM_BYTES);

static CHUNKS: [AtomicPtr<u8>; CHUNKS_MAX] = [const { AtomicPtr::new(core::ptr::null_mut()) }; CHUNKS_MAX];
/// Numbers of rooms that were ever given out are below this.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Number of rooms that children use.
static LENT: AtomicU32 = AtomicU32::new(0);

/// Returns how many rooms children use, or a few more.
pub fn lent() -> u32 {
    // Ordering: SeqCst: a room is counted before the child exists that rings a bell.
    LENT.load(Ordering::SeqCst)
}

impl Room {
    /// Returns the room whose stack the caller is on.
    ///
    /// # Safety
    /// The caller must be a handler that runs on a room's stack.
    pub unsafe fn here() -> &'static Room {
        let place = 0_u8;
        let base = &raw const place as usize & !(ROOM_BYTES - 1);
        // SAFETY: the caller's promise says that this is on a room's stack, and rooms stay for good.
        unsafe { &*((base + ROOM_BYTES - size_of::<Room>()) as *const Room) }
    }

    /// Returns the room whose stack the caller is on, if it is on one.
    pub fn current() -> Option<&'static Room> {
        let place = 0_u8;
        let here = &raw const place as usize;
        // Ordering: Acquire pairs with the Release in `room_made`. Chunks are made in order.
        let mut chunks =
            CHUNKS.iter().map(|chunk| chunk.load(Ordering::Acquire)).take_while(|chunk| !chunk.is_null());
        chunks.find(|chunk| here.wrapping_sub(*chunk as usize) < CHUNK * ROOM_BYTES)?;
        // SAFETY: the caller is on the stack of one of the chunk's rooms.
        Some(unsafe { Room::here() })
    }

    /// Returns the room that `word` names.
    ///
    /// # Safety
    /// The word must come from [`Room::word`].
    pub unsafe fn of_word(word: usize) -> &'static Room {
        // SAFETY: the caller's promise.
        unsafe { &*(word as *const Room) }
    }

    /// Returns a word that names the room, and is neither 0 nor odd.
    pub fn word(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// Returns the stack, without its guard page.
    pub fn stack(&self) -> AlternateStack {
        let base = self.word() & !(ROOM_BYTES - 1);
        let start = base + PAGE_BYTES;
        AlternateStack { start, flags: 0, bytes: self.word() - start }
    }

    /// Returns whether an address is on the room's stack.
    pub fn is_on_stack(&self, address: usize) -> bool {
        address & !(ROOM_BYTES - 1) == self.word() & !(ROOM_BYTES - 1)
    }

    /// Returns whether a stack pointer is on a stack for handlers: the program's alternate stack, or the
    /// room's stack. A handler that runs on top of a handler of Farpage's is on the room's stack.
    fn is_handlers(&self, stack_pointer: usize) -> bool {
        // SAFETY: the fields are the thread's own.
        let own = unsafe { &*self.own.get() };
        self.is_on_stack(stack_pointer)
            || own.alternate.contains(stack_pointer)
            || own.put_away.contains(stack_pointer)
    }

    /// Returns a room for one more thread, or `None` if there is no memory for it.
    pub fn give(thread: u32) -> Option<&'static Room> {
        let used = USED.load(Ordering::Relaxed);
        let again = (0..used).filter_map(room).find(|room| room.claim());
        let room = again.or_else(|| {
            loop {
                let at = USED.load(Ordering::Relaxed);
                let room = room_made(at)?;
                // Ordering: Release: a thread that finds the room below `USED` finds it made.
                let _ = USED.compare_exchange(at, at + 1, Ordering::Release, Ordering::Relaxed);
                if room.claim() {
                    return Some(room);
                }
            }
        })?;
        room.levels.iter().for_each(|level| level.holder.release());
        // SAFETY: the room was claimed, and its thread doesn't run in it yet.
        unsafe {
            if (*room.own.get()).lent.is_some() {
                LENT.fetch_sub(1, Ordering::SeqCst);
            }
            *room.own.get() = Own {
                alternate: AlternateStack::NONE,
                put_away: AlternateStack::NONE,
                claimed: 0,
                is_in_hook: false,
                lent: None,
                strange: (PageIndex(0), 0),
                not_ours: (PageRange::of(PageIndex(0), 0), 0),
                strange_ns: 0,
                tries: 0,
                expected: None,
            }
        };
        room.at_work.reset();
        room.thread.store(thread, Ordering::Relaxed);
        // Ordering: Release: a thread that sees the room given sees to whom.
        room.state.store(GIVEN, Ordering::Release);
        Some(room)
    }

    /// Lends the room to a child for which the thread is about to wait. The child makes its calls with this
    /// room, and its last call doesn't return. The thread's mask `blocked` is kept. The memory that the call
    /// holds at `level` stays held until the thread is back, because the kernel may write the child's ids
    /// there. Returns false if the room can't be lent.
    pub fn lend(&self, level: &Level, blocked: u64) -> bool {
        let is_other = |other: &Level| !core::ptr::eq(other, level);
        let busy =
            self.levels.iter().enumerate().filter(|(_, level)| level.holder.is_busy() && is_other(level));
        // SAFETY: the fields are the thread's own.
        let own = unsafe { &mut *self.own.get() };
        let busy = busy.fold(0, |bits, (at, _)| bits | 1 << at);
        let lender = Lender { alternate: own.alternate, claimed: own.claimed, blocked };
        // An earlier loan by the room's own thread is left over: a handler has jumped out of that call before
        // the call was made.
        let is_child = current_thread() != self.thread.load(Ordering::Relaxed);
        let mut lent = own.lent.filter(|_| is_child).unwrap_or(Lent {
            busy,
            spent: 0,
            each: [lender; LENDERS],
            lenders: 0,
        });
        let Some(place) = lent.each.get_mut(lent.lenders) else { return false };
        *place = lender;
        lent.lenders += 1;
        if own.lent.replace(lent).is_none() {
            LENT.fetch_add(1, Ordering::SeqCst);
        }
        true
    }

    /// Returns the signals that a child of vfork is to block, as its maker did.
    pub fn inherited(&self) -> u64 {
        // SAFETY: the fields are the child's while the thread waits.
        let lent = unsafe { (*self.own.get()).lent.as_ref() };
        lent.and_then(|lent| Some(lent.each[lent.lenders.checked_sub(1)?].blocked)).unwrap_or(0)
    }

    /// Ends a loan. The thread, or a child that uses its room, is back from waiting for a child, or has made
    /// none. Releases what the child held. Returns the lender's mask.
    pub fn take_back(&self) -> u64 {
        // SAFETY: the fields are the thread's own, or its child's while the thread waits.
        let own = unsafe { &mut *self.own.get() };
        let Some(lent) = own.lent.as_mut() else { return 0 };
        if current_thread() != self.thread.load(Ordering::Relaxed) {
            lent.lenders = lent.lenders.saturating_sub(1);
            let Lender { alternate, claimed, blocked } = lent.each[lent.lenders];
            (own.alternate, own.claimed) = (alternate, claimed);
            return blocked;
        }
        let Lent { busy, each: [Lender { alternate, claimed, blocked }, ..], .. } = *lent;
        // A child that was killed may have left a handler's work behind.
        self.at_work.forget();
        *own = Own { lent: None, alternate, claimed, ..*own };
        self.errand.give_up();
        LENT.fetch_sub(1, Ordering::SeqCst);
        for (at, level) in self.levels.iter().enumerate() {
            if busy & 1 << at == 0 {
                level.holder.release();
            }
        }
        blocked
    }

    fn claim(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        let is_free = state == FREE || state == LEAVING && !is_alive(self.thread.load(Ordering::Relaxed));
        // Ordering: Acquire pairs with the Release in `leave`.
        is_free && self.state.compare_exchange(state, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives the room up before its thread ends. The thread uses the stack until it has ended.
    pub fn leave(&self) {
        self.levels.iter().for_each(|level| level.holder.release());
        // Ordering: Release: the thread's use of the room comes before the next thread's.
        self.state.store(LEAVING, Ordering::Release);
    }

    /// Frees the room, whose stack no thread uses. (After `leave` the thread still uses the stack.)
    pub fn give_back(&self) {
        // Ordering: Release, as in `leave`.
        self.state.store(FREE, Ordering::Release);
    }

    /// Keeps the room in use for good, because its user never gives it back.
    pub fn keep_for_good(&self) {
        self.thread.store(0, Ordering::Relaxed);
        self.state.store(GIVEN, Ordering::Relaxed);
    }

    /// Returns a level for a call that is made with this stack pointer. Releases the levels of calls that
    /// were interrupted for good. The thread has left a call if it is now at the same place, or further up
    /// the same stack.
    pub fn level(&self, stack_pointer: usize) -> &Level {
        for level in &self.levels {
            let before = level.stack_pointer.load(Ordering::Relaxed);
            // A handler on an alternate stack says nothing about calls on the thread's own stack. A thread
            // that is back on its own stack has left the alternate one.
            let is_left = match (self.is_handlers(before), self.is_handlers(stack_pointer)) {
                (false, true) => false,
                (true, false) => true,
                _ => before <= stack_pointer && stack_pointer - before < STACK_BYTES_MAX,
            };
            if level.holder.is_busy() && is_left {
                level.holder.release();
            }
        }
        let free = self.levels.iter().find(|level| !level.holder.is_busy()).or_else(|| {
            // The return that was made furthest up the stack is done, if any is.
            let returns = self.levels.iter().filter(|level| level.returns.load(Ordering::Relaxed));
            let done = returns.max_by_key(|level| level.stack_pointer.load(Ordering::Relaxed));
            done.inspect(|level| level.holder.release())
        });
        // If all levels are under way, the last one holds what both calls need, until the inner call is done.
        let level = free.unwrap_or(&self.levels[LEVELS - 1]);
        level.stack_pointer.store(stack_pointer, Ordering::Relaxed);
        level.returns.store(false, Ordering::Relaxed);
        // SAFETY: the field is the thread's own.
        unsafe { *level.waits_with.get() = None };
        level
    }

    /// Returns the signals that were blocked while the call waited that was made with this stack pointer. The
    /// first handler that interrupts the call asks, and no later one gets an answer.
    pub fn waited_with(&self, stack_pointer: usize) -> Option<u64> {
        let is_it = |level: &&Level| {
            level.holder.is_busy() && level.stack_pointer.load(Ordering::Relaxed) == stack_pointer
        };
        let level = self.levels.iter().find(is_it)?;
        // SAFETY: the field is the thread's own.
        unsafe { (*level.waits_with.get()).take() }
    }
}

/// Returns the room that the caller uses as a child of vfork, while the room's own thread waits. Only for
/// handlers.
pub fn borrowed(engine: &Engine) -> Option<&'static Room> {
    if lent() == 0 {
        return None;
    }
    // SAFETY: the call takes no arguments.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as u32;
    if process == engine.process {
        return None;
    }
    // SAFETY: the caller runs in this room.
    Room::current().filter(|room| unsafe { (*room.own.get()).lent.is_some() })
}

/// Returns the signals for which the caller has no handler any more, if it is a child of vfork. Only for
/// handlers.
pub fn spent_by_child(engine: &Engine) -> Option<&'static mut u64> {
    let room = borrowed(engine)?;
    // SAFETY: the fields are the child's while its maker waits, and no other thread looks at them.
    unsafe { (*room.own.get()).lent.as_mut() }.map(|lent| &mut lent.spent)
}

/// Returns whether the caller, a handler, runs on a room's stack. The caller's thread is armed then.
pub fn is_current() -> bool {
    Room::current().is_some()
}

fn current_thread() -> u32 {
    // SAFETY: the call takes no arguments.
    unsafe { sys::call(number::GETTID, [0; 6]) as u32 }
}

/// Returns whether a thread of this process has not ended yet.
fn is_alive(thread: u32) -> bool {
    // SAFETY: the call takes no arguments.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as usize;
    // SAFETY: the call takes no address, and signal 0 sends nothing.
    sys::check(unsafe { sys::call(number::TGKILL, [process, thread as usize, 0, 0, 0, 0]) }).is_ok()
}

/// Returns the room with this number, if it was made.
fn room(at: usize) -> Option<&'static Room> {
    // Ordering: Acquire pairs with the Release in `room_made`.
    let chunk = CHUNKS.get(at / CHUNK)?.load(Ordering::Acquire);
    if chunk.is_null() {
        return None;
    }
    let end = chunk as usize + (at % CHUNK + 1) * ROOM_BYTES;
    // SAFETY: the chunk is zeroed memory that stays for good, and a zeroed room is a free one.
    Some(unsafe { &*((end - size_of::<Room>()) as *const Room) })
}

/// Returns the room with this number, and makes it if need be.
fn room_made(at: usize) -> Option<&'static Room> {
    let place = CHUNKS.get(at / CHUNK)?;
    if place.load(Ordering::Acquire).is_null() {
        let base = memory::reserve((CHUNK + 1) * ROOM_BYTES).ok()?;
        let chunk = (base as usize).next_multiple_of(ROOM_BYTES);
        for room in 0..CHUNK {
            // SAFETY: this is the lowest page of a room in the mapping just made, and nothing refers to it
            // yet. Without a guard page a handler that needs too much stack would overwrite the neighbouring
            // room.
            let guard =
                unsafe { sys::call(number::MPROTECT, [chunk + room * ROOM_BYTES, PAGE_BYTES, 0, 0, 0, 0]) };
            sys::check(guard).ok()?;
        }
        // If two threads make a chunk at once, one of the chunks is never used.
        //
        // Ordering: Release: a thread that sees the chunk sees its guard pages.
        let _ = place.compare_exchange(
            core::ptr::null_mut(),
            chunk as *mut u8,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }
    room(at)
}

/// Returns all rooms that were ever given out.
pub fn all() -> impl Iterator<Item = &'static Room> {
    // Ordering: Acquire pairs with the Release in `give`.
    (0..USED.load(Ordering::Acquire)).filter_map(room)
}

/// Returns the room of a thread, if it has one.
pub fn of_thread(thread: u32) -> Option<&'static Room> {
    all().find(|room| {
        !matches!(room.state.load(Ordering::Acquire), FREE | LEAVING | TAKEN)
            && room.thread.load(Ordering::Relaxed) == thread
    })
}

/// Calls `visit` with each range that system calls hold just now. For an evictor that has locked its victims.
pub fn for_each_held(visit: impl FnMut(PageRange)) {
    // Free rooms are skipped: memory that was held for a thread that couldn't be made is nobody's. A room
    // that is given out from here on is that of a thread that holds nothing yet. When that thread holds
    // something, it finds the victims locked. Giving a room is a locked exchange, which is a full barrier
    // here.
    let rooms = all().filter(|room| room.state.load(Ordering::Relaxed) != FREE);
    holds::for_each(rooms.flat_map(|room| &room.levels).map(|level| &level.holder), visit);
}

/// Resets all rooms in a child with a copy of its parent's memory. None of the parent's threads is there.
pub fn reset_in_child() {
    LENT.store(0, Ordering::Relaxed);
    for room in all() {
        room.levels.iter().for_each(|level| level.holder.release());
        room.errand.reset();
        room.at_work.reset();
        // SAFETY: the thread that had the room isn't in this process.
        let own = unsafe { &mut *room.own.get() };
        (own.lent, own.is_in_hook) = (None, false);
        room.state.store(FREE, Ordering::Relaxed);
    }
}

/// Returns the room whose stack this is, if it is one.
pub fn of_stack(stack: &AlternateStack) -> Option<&'static Room> {
    all().find(|room| room.stack().start == stack.start)
}

/// Returns the room whose stack is the caller's alternate stack: its own room, or that of its maker.
pub fn of_caller() -> Option<&'static Room> {
    of_stack(&alternate_stack().ok()?)
}

/// Returns the room that a word names, if it names one.
pub fn by_word(word: usize) -> Option<&'static Room> {
    all().find(|room| room.word() == word)
}

//! What each armed thread has of ours: an alternate stack, and on top of it what its handlers must know.
//!
//! Handlers have no thread-local storage. But they run on a stack of ours, so a handler finds its thread's [`Room`] by its
//! own stack pointer: rooms are aligned to their size. A room is given to a thread before that exists, or before it is told
//! to arm itself, and taken back when its thread has ended.
// UNSAFETY: stacks are memory; each room's fields are its thread's alone.

use super::errands::Errand;
use super::sent::AtWork;
use super::signals::open;
use crate::engine::Engine;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use farpage_core::holds::{self, Holder};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use farpage_os::clock::now_ns;
use farpage_os::dispatch::ROOM_WORDS;
use farpage_os::memory;
use farpage_os::signal::{AlternateStack, alternate_stack};
use farpage_os::sys::{self, number};

/// A room's size, and what it is aligned to; only what is touched takes memory. Signal frames take 1 to 11 KiB each
/// (AVX-512, AMX).
const ROOM_BYTES: usize = 512 * 1024;
/// Rooms are made so many at a time.
const CHUNK: usize = 32;
/// Threads at once: 32,768, as many as the kernel gives a process by default.
const CHUNKS_MAX: usize = 1024;
/// Calls of one thread that are under way at once: each but the last was interrupted by a handler that called again.
pub const LEVELS: usize = 8;
/// Stack pointers further apart than this are taken for ones of different stacks.
const STACK_BYTES_MAX: usize = 64 << 20;

/// One call that is under way.
pub struct Level {
    /// What it holds.
    pub holder: Holder,
    /// The thread's stack pointer when it was made.
    stack_pointer: AtomicUsize,
    /// It goes back to what a handler interrupted, and nobody says when it is done.
    pub returns: AtomicBool,
    /// Arguments that aren't the program's own, while the kernel reads them.
    pub room: UnsafeCell<[usize; ROOM_WORDS]>,
    /// A mask of signals that isn't the program's own, likewise.
    pub mask: UnsafeCell<u64>,
    /// Address and size of that, for calls that take both in one word.
    pub sized_mask: UnsafeCell<[usize; 2]>,
    /// What the program wants to be blocked while the call waits, if it has said so.
    pub waits_with: UnsafeCell<Option<u64>>,
}

/// What only the room's own thread uses, or the keeper before it is armed.
pub struct Own {
    /// The alternate stack that the program believes to have.
    pub alternate: AlternateStack,
    /// The last one that was put away when a handler began on it.
    pub put_away: AlternateStack,
    /// Signals that the program believes to block, and that stay open.
    pub claimed: u64,
    /// Among those may be some that only a hook of ours has blocked: the thread was armed in it.
    pub is_in_hook: bool,
    /// The thread waits for a child that uses its room, or has.
    pub lent: Option<Lent>,
    /// The last fault that wasn't in memory of ours, and how many changes of mappings were over then.
    pub strange: (PageIndex, u32),
    /// When that was, and how often in a row its page should have been there.
    pub strange_ns: u64,
    /// See `strange_ns`.
    pub tries: u32,
    /// Pages that a child found to be none of ours, and how many changes of mappings were over then.
    pub not_ours: (PageRange, u32),
    /// The call that the thread was in before it was told to arm itself.
    pub expected: Option<farpage_os::proc::CallUnderWay>,
}

/// How deep children of vfork can make others: it is rare that one does.
const LENDERS: usize = LEVELS;

/// A room that a child of vfork uses.
#[derive(Clone, Copy)]
pub struct Lent {
    /// Levels that were busy before, one bit each.
    busy: u32,
    /// Our signals for which the child had a handler once, and has no more: the maker still has it.
    spent: u64,
    /// The maker, its child if that makes one itself, and so on.
    each: [Lender; LENDERS],
    lenders: usize,
}

/// What somebody goes on with who waits for a child: that may change it for itself.
#[derive(Clone, Copy)]
struct Lender {
    /// See [`Own`].
    alternate: AlternateStack,
    claimed: u64,
    /// No handler runs until it is back, nor in its child until that is armed.
    blocked: u64,
}

impl Own {
    /// The program is to have this mask and this alternate stack from now on, as a frame says from which it goes on with the
    /// stack pointer `back`.
    pub fn go_back(&mut self, blocked: u64, stack: AlternateStack, back: usize) {
        self.claimed = blocked & open();
        if !self.put_away.contains(back) {
            self.put_away = AlternateStack::NONE;
        }
        // As the kernel: not while it is in use.
        if let Some(stack) = stack.accepted().ok().filter(|_| !self.alternate.is_in_use(back)) {
            self.alternate = stack;
        }
    }
}

/// A try that is longer after the last one has nothing to do with it.
const TRIES_NS: u64 = 10_000_000;

impl Own {
    /// An access that should be possible failed: how often it has in a row, each time soon after the last.
    pub fn try_again(&mut self, seen: (PageIndex, u32)) -> u32 {
        let (now, before) = (now_ns(), core::mem::replace(&mut self.strange, seen));
        let is_again = before == seen && now - self.strange_ns < TRIES_NS;
        self.tries = if is_again { self.tries + 1 } else { 0 };
        self.strange_ns = now;
        self.tries
    }
}

/// Nobody's.
pub const FREE: u32 = 0;
/// Its thread isn't armed yet.
pub const GIVEN: u32 = 1;
/// Its thread is armed.
pub const ARMED: u32 = 2;
/// Its thread could not be armed just now: it was on another alternate stack.
pub const LATER: u32 = 3;
/// Its thread can't be armed.
pub const FAILED: u32 = 4;
/// Its thread is ending.
const LEAVING: u32 = 5;
/// It is being made somebody's: whose it is isn't said yet.
const TAKEN: u32 = 6;

/// What lies on top of the stack.
#[repr(C, align(4096))]
pub struct Room {
    /// What is the matter with it. First: a trampoline sets it to [`FREE`] when no thread was made.
    pub state: AtomicU32,
    /// Whose it is.
    pub thread: AtomicU32,
    /// Calls that are under way.
    pub levels: [Level; LEVELS],
    /// What a child that uses the room has asked for.
    pub errand: Errand,
    /// Whether a handler of ours is at work in the thread.
    pub at_work: AtWork,
    /// The thread's own.
    pub own: UnsafeCell<Own>,
}

// SAFETY: what isn't atomic is used by one thread at a time: see `Own`; levels and what is kept are their thread's.
unsafe impl Sync for Room {}

const _: () = assert!(core::mem::offset_of!(Room, state) == 0 && FREE == 0);
const _: () = assert!(size_of::<Room>() + 4 * PAGE_BYTES < ROOM_BYTES);

static CHUNKS: [AtomicPtr<u8>; CHUNKS_MAX] = [const { AtomicPtr::new(core::ptr::null_mut()) }; CHUNKS_MAX];
/// Rooms that were ever given out lie below this.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Rooms that children use.
static LENT: AtomicU32 = AtomicU32::new(0);

/// How many there are of these, or a few more.
pub fn lent() -> u32 {
    // Ordering: SeqCst: it was counted before the child existed that rings a bell.
    LENT.load(Ordering::SeqCst)
}

impl Room {
    /// The room whose stack the caller is on.
    ///
    /// # Safety
    /// Only in a handler that runs on a room's stack.
    pub unsafe fn here() -> &'static Room {
        let place = 0_u8;
        let base = &raw const place as usize & !(ROOM_BYTES - 1);
        // SAFETY: the caller's promise; rooms stay for good.
        unsafe { &*((base + ROOM_BYTES - size_of::<Room>()) as *const Room) }
    }

    /// The room whose stack the caller is on, if it is on one.
    pub fn if_here() -> Option<&'static Room> {
        let place = 0_u8;
        let here = &raw const place as usize;
        // Ordering: Acquire pairs with the Release in `room_made`. Chunks are made in order.
        let mut chunks =
            CHUNKS.iter().map(|chunk| chunk.load(Ordering::Acquire)).take_while(|chunk| !chunk.is_null());
        chunks.find(|chunk| here.wrapping_sub(*chunk as usize) < CHUNK * ROOM_BYTES)?;
        // SAFETY: on the stack of one of its rooms.
        Some(unsafe { Room::here() })
    }

    /// The room that `word` names, as [`Room::word`] gave it.
    ///
    /// # Safety
    /// It must be such a word.
    pub unsafe fn of_word(word: usize) -> &'static Room {
        // SAFETY: the caller's promise.
        unsafe { &*(word as *const Room) }
    }

    /// Names the room in one word, which is neither 0 nor odd.
    pub fn word(&self) -> usize {
        core::ptr::from_ref(self) as usize
    }

    /// The stack, without its guard page.
    pub fn stack(&self) -> AlternateStack {
        let base = self.word() & !(ROOM_BYTES - 1);
        let start = base + PAGE_BYTES;
        AlternateStack { start, flags: 0, bytes: self.word() - start }
    }

    /// Whether an address is on the stack.
    pub fn is_on_stack(&self, address: usize) -> bool {
        address & !(ROOM_BYTES - 1) == self.word() & !(ROOM_BYTES - 1)
    }

    /// Whether a stack pointer is on a stack for handlers: the program's, or, if the handler runs on top of one of ours, this one.
    fn is_handlers(&self, stack_pointer: usize) -> bool {
        // SAFETY: the thread's own.
        let own = unsafe { &*self.own.get() };
        self.is_on_stack(stack_pointer)
            || own.alternate.contains(stack_pointer)
            || own.put_away.contains(stack_pointer)
    }

    /// A room for one more thread; none if there is no memory for it.
    pub fn give(thread: u32) -> Option<&'static Room> {
        let used = USED.load(Ordering::Relaxed);
        let again = (0..used).filter_map(room).find(|room| room.claim());
        let room = again.or_else(|| {
            loop {
                let at = USED.load(Ordering::Relaxed);
                let room = room_made(at)?;
                // Ordering: Release: who finds the room below `USED` finds it made.
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
        // Ordering: Release: who sees it given sees to whom.
        room.state.store(GIVEN, Ordering::Release);
        Some(room)
    }

    /// The thread is about to wait for a child that makes its calls with this room, and whose last one doesn't return. What it
    /// blocks is kept. What the call itself holds, at `level`, is held until the thread is back: the kernel may write there where
    /// the child is. False if it can't be.
    pub fn lend(&self, level: &Level, blocked: u64) -> bool {
        let is_other = |other: &Level| !core::ptr::eq(other, level);
        let busy =
            self.levels.iter().enumerate().filter(|(_, level)| level.holder.is_busy() && is_other(level));
        // SAFETY: the thread's own.
        let own = unsafe { &mut *self.own.get() };
        let busy = busy.fold(0, |bits, (at, _)| bits | 1 << at);
        let lender = Lender { alternate: own.alternate, claimed: own.claimed, blocked };
        // What its own thread has lent is left over: a handler has jumped out of that call before it was made.
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

    /// What a child of vfork is to block, as its maker did.
    pub fn inherited(&self) -> u64 {
        // SAFETY: the child's, while the thread waits.
        let lent = unsafe { (*self.own.get()).lent.as_ref() };
        lent.and_then(|lent| Some(lent.each[lent.lenders.checked_sub(1)?].blocked)).unwrap_or(0)
    }

    /// The thread, or a child that uses its room, is back from waiting for a child, or has made none: what that held is given up.
    /// What the lender blocked.
    pub fn take_back(&self) -> u64 {
        // SAFETY: the thread's own, or its child's while it waits.
        let own = unsafe { &mut *self.own.get() };
        let Some(lent) = own.lent.as_mut() else { return 0 };
        if current_thread() != self.thread.load(Ordering::Relaxed) {
            lent.lenders = lent.lenders.saturating_sub(1);
            let Lender { alternate, claimed, blocked } = lent.each[lent.lenders];
            (own.alternate, own.claimed) = (alternate, claimed);
            return blocked;
        }
        let Lent { busy, each: [Lender { alternate, claimed, blocked }, ..], .. } = *lent;
        // What a child was at that was killed.
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

    /// Its thread is about to end, and uses the stack no more once it has.
    pub fn leave(&self) {
        self.levels.iter().for_each(|level| level.holder.release());
        // Ordering: Release: the thread's use of the room comes before the next one's.
        self.state.store(LEAVING, Ordering::Release);
    }

    /// It is nobody's, and never was anybody's.
    pub fn give_back(&self) {
        // Ordering: Release, as in `leave`.
        self.state.store(FREE, Ordering::Release);
    }

    /// It is in use by nobody who would ever give it back.
    pub fn keep_for_good(&self) {
        self.thread.store(0, Ordering::Relaxed);
        self.state.store(GIVEN, Ordering::Relaxed);
    }

    /// A level for a call that is made with this stack pointer. What was interrupted for good is given up: a thread that is
    /// at the same place, or further up the same stack, has left it.
    pub fn level(&self, stack_pointer: usize) -> &Level {
        for level in &self.levels {
            let before = level.stack_pointer.load(Ordering::Relaxed);
            // A handler on an alternate stack says nothing about the thread's own; who is back there has left that one.
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
            // The return that was made furthest up is done, if any is.
            let returns = self.levels.iter().filter(|level| level.returns.load(Ordering::Relaxed));
            let done = returns.max_by_key(|level| level.stack_pointer.load(Ordering::Relaxed));
            done.inspect(|level| level.holder.release())
        });
        // With all of them under way the last one holds what both need, until the inner one is done.
        let level = free.unwrap_or(&self.levels[LEVELS - 1]);
        level.stack_pointer.store(stack_pointer, Ordering::Relaxed);
        level.returns.store(false, Ordering::Relaxed);
        // SAFETY: the thread's own.
        unsafe { *level.waits_with.get() = None };
        level
    }

    /// What was blocked while the call waited that was made with this stack pointer. Asked for once: in its first handler.
    pub fn waited_with(&self, stack_pointer: usize) -> Option<u64> {
        let is_it = |level: &&Level| {
            level.holder.is_busy() && level.stack_pointer.load(Ordering::Relaxed) == stack_pointer
        };
        let level = self.levels.iter().find(is_it)?;
        // SAFETY: the thread's own.
        unsafe { (*level.waits_with.get()).take() }
    }
}

/// The room that the caller uses as a child of vfork, while its own thread waits. In a handler.
pub fn borrowed(engine: &Engine) -> Option<&'static Room> {
    if lent() == 0 {
        return None;
    }
    // SAFETY: takes nothing.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as u32;
    if process == engine.process {
        return None;
    }
    // SAFETY: the room that this runs in.
    Room::if_here().filter(|room| unsafe { (*room.own.get()).lent.is_some() })
}

/// If the caller is a child of vfork: the signals that it has no handler for any more. In a handler.
pub fn spent_by_child(engine: &Engine) -> Option<&'static mut u64> {
    let room = borrowed(engine)?;
    // SAFETY: the child's while its maker waits; nobody else looks at it.
    unsafe { (*room.own.get()).lent.as_mut() }.map(|lent| &mut lent.spent)
}

/// Whether the caller, a handler, runs on a room's stack: its thread is armed.
pub fn is_here() -> bool {
    Room::if_here().is_some()
}

fn current_thread() -> u32 {
    // SAFETY: takes nothing.
    unsafe { sys::call(number::GETTID, [0; 6]) as u32 }
}

/// Whether a thread of this process has not ended yet.
fn is_alive(thread: u32) -> bool {
    // SAFETY: takes nothing.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as usize;
    // SAFETY: takes no address; signal 0 is only asked about.
    sys::check(unsafe { sys::call(number::TGKILL, [process, thread as usize, 0, 0, 0, 0]) }).is_ok()
}

/// The room with this number, if it was made.
fn room(at: usize) -> Option<&'static Room> {
    // Ordering: Acquire pairs with the Release in `room_made`.
    let chunk = CHUNKS.get(at / CHUNK)?.load(Ordering::Acquire);
    if chunk.is_null() {
        return None;
    }
    let end = chunk as usize + (at % CHUNK + 1) * ROOM_BYTES;
    // SAFETY: zeroed memory of a chunk, for good: a free room.
    Some(unsafe { &*((end - size_of::<Room>()) as *const Room) })
}

/// The same; it is made if need be.
fn room_made(at: usize) -> Option<&'static Room> {
    let place = CHUNKS.get(at / CHUNK)?;
    if place.load(Ordering::Acquire).is_null() {
        let base = memory::reserve((CHUNK + 1) * ROOM_BYTES).ok()?;
        let chunk = (base as usize).next_multiple_of(ROOM_BYTES);
        for room in 0..CHUNK {
            // SAFETY: the lowest page of a room in the mapping just made: nothing refers to it yet. Without a guard a
            // handler that needs too much would overwrite its neighbour.
            let guard =
                unsafe { sys::call(number::MPROTECT, [chunk + room * ROOM_BYTES, PAGE_BYTES, 0, 0, 0, 0]) };
            sys::check(guard).ok()?;
        }
        // Two at once: one chunk is never used.
        // Ordering: Release: who sees the chunk sees its guards.
        let _ = place.compare_exchange(
            core::ptr::null_mut(),
            chunk as *mut u8,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }
    room(at)
}

/// Rooms that were ever given out.
pub fn all() -> impl Iterator<Item = &'static Room> {
    // Ordering: Acquire pairs with the Release in `give`.
    (0..USED.load(Ordering::Acquire)).filter_map(room)
}

/// The room of a thread, if it has one.
pub fn of_thread(thread: u32) -> Option<&'static Room> {
    all().find(|room| {
        !matches!(room.state.load(Ordering::Acquire), FREE | LEAVING | TAKEN)
            && room.thread.load(Ordering::Relaxed) == thread
    })
}

/// Calls `visit` with what system calls hold just now. For an evictor that has locked its victims.
pub fn for_each_held(visit: impl FnMut(PageRange)) {
    // What was held for a thread that couldn't be made is nobody's. A room that is given away from here on is of a thread
    // that holds nothing yet, and finds the victims locked when it does: giving one is a locked exchange, a full barrier here.
    let rooms = all().filter(|room| room.state.load(Ordering::Relaxed) != FREE);
    holds::for_each(rooms.flat_map(|room| &room.levels).map(|level| &level.holder), visit);
}

/// In a child with a copy of its parent's memory: none of the parent's threads is here.
pub fn reset_in_child() {
    LENT.store(0, Ordering::Relaxed);
    for room in all() {
        room.levels.iter().for_each(|level| level.holder.release());
        room.errand.reset();
        room.at_work.reset();
        // SAFETY: the thread whose it was isn't here.
        let own = unsafe { &mut *room.own.get() };
        (own.lent, own.is_in_hook) = (None, false);
        room.state.store(FREE, Ordering::Relaxed);
    }
}

/// The room whose stack this is, if it is one.
pub fn of_stack(stack: &AlternateStack) -> Option<&'static Room> {
    all().find(|room| room.stack().start == stack.start)
}

/// The room whose stack is the caller's alternate one: its own, or its maker's.
pub fn of_caller() -> Option<&'static Room> {
    of_stack(&alternate_stack().ok()?)
}

/// The room that a word names, if it names one.
pub fn by_word(word: usize) -> Option<&'static Room> {
    all().find(|room| room.word() == word)
}

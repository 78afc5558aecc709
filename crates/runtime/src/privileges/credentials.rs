//! Engine threads follow when the program changes its privileges or places: users, groups, capabilities, root
//! directory, namespaces.
//!
//! Linux keeps all of these for each thread, and libc changes them together only in its own threads. An
//! engine thread that stayed root would be root for anybody who takes the program over. So each call that
//! changes them ends only when every engine thread has taken on what the program's first thread has. A change
//! of another thread alone isn't followed: the process can do what its first thread can. The first thread may
//! end before the others. Then the oldest thread of the program that lives takes its place.
//!
//! Calls are seen by libc's functions and by `syscall` (the preload library). In armed threads every call is
//! seen. The keeper sees soon after what both ways miss ([`Watch`]).
// UNSAFETY: the order that all threads take on lies in one place, which they read when they are told to.

use crate::engine::Engine;
use crate::guard::arm;
use crate::mappings::changes::Arguments;
use crate::privileges::filters;
use crate::session::StopReason;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};
use farpage_core::roll_call::Member;
use farpage_core::sync::{Lock, rank};
use farpage_os::credentials::{
    self as kernel, Credentials, GROUPS_MAX, dumpable, make_dumpable, read_groups,
};
use farpage_os::places::PlaceChanges;
use farpage_os::signal::{SIGSETXID, send_to_thread};
use farpage_os::sys::{self, number};
use farpage_os::thread;
use farpage_os::{clock::now_ns, futex, proc};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl;

/// The order that every engine thread is to take on, and what the threads have answered.
struct Wanted {
    /// Raised for each new order. An engine thread answers with it.
    generation: AtomicU32,
    /// Counts answers. A bell for the thread that waits for them.
    answers: AtomicU32,
    /// Set by an engine thread that couldn't take the order on.
    failed: AtomicU32,
    /// Written with `FOLLOWING` held, while no thread is asked.
    order: UnsafeCell<Order>,
    /// Supplementary groups: the wanted list, and the list that was just read.
    groups: UnsafeCell<[[u32; GROUPS_MAX]; 2]>,
}

/// One order to all engine threads.
#[derive(Clone, Copy)]
struct Order {
    process: u32,
    /// The thread that has changed its place.
    changed: u32,
    credentials: Credentials,
    with_groups: bool,
    places: PlaceChanges,
    /// The order is only to install the filter of seccomp that was looked at last.
    is_filter: bool,
}

// SAFETY: the holder of `FOLLOWING` writes `order` and `groups` before it raises `generation`. Engine threads
// read them until they have answered to that generation. The holder waits for all answers before it releases
// the lock.
unsafe impl Sync for Wanted {}

static WANTED: Wanted = Wanted {
    generation: AtomicU32::new(0),
    answers: AtomicU32::new(0),
    failed: AtomicU32::new(0),
    order: UnsafeCell::new(Order {
        process: 0,
        changed: 0,
        credentials: Credentials::NONE,
        with_groups: false,
        places: PlaceChanges::NONE,
        is_filter: false,
    }),
    groups: UnsafeCell::new([[0; GROUPS_MAX]; 2]),
};

/// Held while one change is followed.
static FOLLOWING: Lock<(), { rank::CREDENTIALS }> = Lock::new(());

/// Nanoseconds until a thread that hasn't answered is asked again. libc may have put its own handler in the
/// place of Farpage's.
const ASK_AGAIN_NS: u64 = 5_000_000;

/// Prepares for the first engine thread, which will have what the calling thread has. Called before that
/// thread is made. In a fork's child this forgets the parent's threads.
pub fn begin() {
    FOLLOWING.forget_holder();
    thread::forget_all();
    // SAFETY: no other thread uses the cells yet, because this thread is about to make the first engine
    // thread.
    let (order, lists) = unsafe { (&mut *WANTED.order.get(), &mut *WANTED.groups.get()) };
    order.credentials = Credentials::read();
    let _ = read_groups(&mut lists[0]);
    WANTED.generation.store(0, Ordering::Relaxed);
    filters::begin();
}

/// Whether a call may change credentials or places.
pub fn is_about(call: usize, arguments: &Arguments) -> bool {
    match call as u32 {
        raw::__NR_setuid
        | raw::__NR_setgid
        | raw::__NR_setreuid
        | raw::__NR_setregid
        | raw::__NR_setresuid
        | raw::__NR_setresgid
        | raw::__NR_setfsuid
        | raw::__NR_setfsgid
        | raw::__NR_setgroups
        | raw::__NR_capset
        | raw::__NR_chroot
        | raw::__NR_setns
        | raw::__NR_landlock_restrict_self => true,
        raw::__NR_unshare => !PlaceChanges::changed_by(call, arguments).is_none(),
        raw::__NR_prctl => matches!(
            arguments[0] as u32,
            prctl::PR_SET_KEEPCAPS
                | prctl::PR_SET_SECUREBITS
                | prctl::PR_CAPBSET_DROP
                | prctl::PR_CAP_AMBIENT
                | prctl::PR_SET_NO_NEW_PRIVS
        ),
        _ => false,
    }
}

/// Which threads a call has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Only the calling thread.
    Own,
    /// All threads that libc knows. The calling thread has what they all have.
    All,
}

/// Has every engine thread follow a call that the calling thread has made with success. Returns when all have
/// followed. On a stack of Farpage's, with signals blocked.
pub fn follow(engine: &Engine, call: usize, arguments: &Arguments, whose: Whose) {
    // SAFETY: neither call takes an argument.
    let [process, own] =
        [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) } as u32);
    // A child of vfork has credentials of its own.
    if process != engine.process {
        return;
    }
    let first = if own == process { own } else { engine.first_thread().unwrap_or(own) };
    // Threads that libc has made share their root directory.
    let is_chroot = call == raw::__NR_chroot as usize;
    let changed = match (own == first, whose) {
        (true, _) => Changed::First,
        (false, Whose::All) => Changed::All,
        (false, Whose::Own) if is_chroot => Changed::Root,
        (false, Whose::Own) => return,
    };
    let was_dumpable = dumpable();
    if is_chroot && !proc::is_reachable() {
        // Activation looks things up in /proc. Engine threads find them only while they are outside of the
        // new root.
        engine.activate_now();
    }
    let guard = FOLLOWING.lock();
    // SAFETY: the lock is held, and no thread is being asked.
    let (known, lists) = unsafe { ((*WANTED.order.get()).credentials, &mut *WANTED.groups.get()) };
    let credentials = credentials_after(changed, first, known, lists);
    // An armed thread's own call was followed when it was made.
    let is_seen = arm::is_caller_armed() && whose == Whose::All;
    let places = if (own == process || is_chroot) && !is_seen {
        PlaceChanges::changed_by(call, arguments)
    } else {
        PlaceChanges::NONE
    };
    let places = places.lend();
    order(engine, Order { process, changed: own, credentials, with_groups: false, places, is_filter: false });
    places.take_back();
    drop(guard);
    if was_dumpable == 1 && dumpable() != 1 {
        make_dumpable();
    }
}

/// What a call of the calling thread has changed.
#[derive(Clone, Copy)]
enum Changed {
    /// The first thread, which is the calling thread.
    First,
    /// All threads. The calling thread isn't the first.
    All,
    /// The root directory alone. The calling thread isn't the first.
    Root,
}

/// Returns the credentials that engine threads need after a call of the calling thread. Fills the second list
/// with the groups. `known` has the credentials before the call, and the first list the groups.
fn credentials_after(
    changed: Changed,
    first: u32,
    known: Credentials,
    lists: &mut [[u32; GROUPS_MAX]; 2],
) -> Credentials {
    let [before, read] = lists;
    if let Changed::Root = changed {
        let count = known.groups.min(GROUPS_MAX);
        read[..count].copy_from_slice(&before[..count]);
        return known;
    }
    let credentials = Credentials::read();
    let _ = read_groups(read);
    if let Changed::First = changed {
        return credentials;
    }
    // The calling thread may have changed the rest for itself alone.
    let capabilities = kernel::Capabilities::of(first).unwrap_or(credentials.capabilities);
    let ambient = known.ambient & capabilities.permitted & capabilities.inheritable;
    let (user, group, groups) = (credentials.user, credentials.group, credentials.groups);
    Credentials { user, group, groups, capabilities, ambient, ..known }
}

/// Gives an order to every engine thread, unless they have it already. With the lock held. The second list
/// has the groups that were just read. Ends the program if a thread can't take the order on.
fn order(engine: &Engine, mut order: Order) {
    // SAFETY: the lock is held, and every thread that was asked has answered.
    let (wanted, lists) = unsafe { (&mut *WANTED.order.get(), &mut *WANTED.groups.get()) };
    let [known, read] = lists;
    let count = order.credentials.groups.min(GROUPS_MAX);
    order.with_groups = wanted.credentials.groups != count || known[..count] != read[..count];
    if order.places.is_none() && !order.with_groups && wanted.credentials == order.credentials {
        return;
    }
    known[..count].copy_from_slice(&read[..count]);
    if !give(engine, order) {
        engine.stop_program(StopReason::Credentials);
    }
}

/// Gives an order to every engine thread, with the lock held. Returns whether all threads could take it on.
fn give(engine: &Engine, order: Order) -> bool {
    // SAFETY: the lock is held, and every thread that was asked has answered.
    unsafe { *WANTED.order.get() = order };
    // Ordering: Release publishes the order to threads that see its generation.
    let generation = WANTED.generation.fetch_add(1, Ordering::Release) + 1;
    wait_for_answers(engine, generation);
    WANTED.failed.swap(0, Ordering::Relaxed) == 0
}

/// Runs `what` while no change is being followed.
pub(crate) fn alone<T>(what: impl FnOnce() -> T) -> T {
    let _guard = FOLLOWING.lock();
    what()
}

/// Has every engine thread install the filter of seccomp that was looked at last. Within [`alone`]. Returns
/// whether all threads have installed it.
pub(crate) fn install_in_all(engine: &Engine) -> bool {
    // SAFETY: the lock is held, and every thread that was asked has answered.
    let before = unsafe { *WANTED.order.get() };
    give(engine, Order { is_filter: true, ..before })
}

/// Asks every engine thread until all have answered or ended.
fn wait_for_answers(engine: &Engine, generation: u32) {
    // SAFETY: the call takes no argument.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    let mut ask_again_ns = 0;
    loop {
        let heard = WANTED.answers.load(Ordering::Acquire);
        let now = now_ns();
        let is_to_ask = now >= ask_again_ns;
        if is_to_ask {
            arm::let_threads_be_asked(engine);
            ask_again_ns = now + ASK_AGAIN_NS;
        }
        let ask = |thread: &Member| match thread.number() {
            Some(number) if number == own => {
                take(thread);
                ask_again_ns = 0;
            }
            Some(number) if is_to_ask => {
                let _ = send_to_thread(engine.process, number, SIGSETXID, word());
            }
            // The thread is just being made. Its maker may have been asked already, or not. So the thread is
            // asked soon.
            None => ask_again_ns = 0,
            Some(_) => {}
        };
        if thread::roll_call().have_all_answered(generation, ask) {
            return;
        }
        futex::wait_for(&WANTED.answers, heard, if ask_again_ns == 0 { 50_000 } else { ASK_AGAIN_NS });
    }
}

/// The value that the signal carries when it asks an engine thread.
fn word() -> usize {
    (&raw const WANTED) as usize
}

/// In the signal's handler: takes the current order on if the signal asks for that. Returns whether it does.
pub fn is_taken(sent: usize) -> bool {
    if sent != word() {
        return false;
    }
    thread::current().into_iter().for_each(take);
    true
}

/// Has the calling engine thread take on the last order.
fn take(thread: &Member) {
    // Ordering: Acquire pairs with the Release of the thread that gave the order.
    let generation = WANTED.generation.load(Ordering::Acquire);
    if generation == 0 || thread.has_answered(generation) {
        return;
    }
    // SAFETY: both were written before the generation was raised. Neither is written again before this thread
    // answers.
    let (order, groups) = unsafe { (*WANTED.order.get(), &(*WANTED.groups.get())[0]) };
    if order.is_filter {
        return answer(thread, generation, filters::take());
    }
    let is_there = order.places.join(order.process, order.changed);
    let list = order.with_groups.then_some(&groups[..order.credentials.groups.min(GROUPS_MAX)]);
    answer(thread, generation, is_there && order.credentials.take(list));
}

fn answer(thread: &Member, generation: u32, is_done: bool) {
    if !is_done {
        WANTED.failed.store(1, Ordering::Relaxed);
    }
    // A thread that sees the answer also sees the failure.
    thread.answers(generation);
    WANTED.answers.fetch_add(1, Ordering::Release);
    futex::wake(&WANTED.answers, u32::MAX);
}

/// Finds calls that nobody saw, made by the program's own code in threads that aren't armed. Used by the
/// keeper.
#[derive(Default)]
pub struct Watch {
    /// When the next look is due. The first one is due at once.
    look_ns: u64,
}

/// Nanoseconds between two looks of the keeper.
const WATCH_NS: u64 = 100_000_000;
/// Bytes for the text of a thread's `status`: some 1.5 KB, and ten bytes for each supplementary group.
const STATUS_BYTES: usize = 16 * 1024;

impl Watch {
    /// If a look is due, compares the program's first thread with the engine's threads, and has all engine
    /// threads follow.
    pub fn look(&mut self, engine: &Engine) {
        let now = now_ns();
        if now < self.look_ns {
            return;
        }
        self.look_ns = now + WATCH_NS;
        // A thread of the program that changes something just now does all that is to be done.
        let Some(guard) = FOLLOWING.try_lock() else { return };
        // SAFETY: the lock is held, and no thread is being asked.
        let (known, lists) = unsafe { ((*WANTED.order.get()).credentials, &mut *WANTED.groups.get()) };
        let thread = engine.first_thread().unwrap_or(engine.process);
        let mut first = || {
            let mut text = [0; STATUS_BYTES];
            let status = proc::status_of(thread, &mut text)?;
            filters::look(engine, status);
            kernel::parse_status(status, &mut lists[1])
        };
        // A thread that makes two changes might be seen between them. So the status is read twice, and only
        // two equal readings are believed.
        let Some(found) = first().filter(|found| first().as_ref() == Some(found)) else { return };
        let credentials = Credentials { securebits: known.securebits, ..found };
        if credentials != known {
            let process = engine.process;
            order(
                engine,
                Order {
                    process,
                    changed: process,
                    credentials,
                    with_groups: false,
                    places: PlaceChanges::NONE,
                    is_filter: false,
                },
            );
        }
        drop(guard);
    }
}

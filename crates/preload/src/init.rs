//! Loading of the library: it finds the session, joins it or starts an engine, and hooks libc.

use crate::{dormant, getauxval, patch, stack};
use core::ffi::{CStr, c_char, c_int, c_ulong};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use farpage_os::memory;
use farpage_os::proc::{self, Pagemap};
use farpage_os::sys::Errno;
use farpage_os::{report, sys};
use farpage_runtime::engine::Engine;
use farpage_runtime::engine::dormant::Dormant;
use farpage_runtime::engine::start::{LeftAlone, Start, StartError, can_do_without, start};
use farpage_runtime::session::first::First;
use farpage_runtime::session::{Notice, PATH_BYTES, SESSION_ENV, StartFailure};

/// Exit status of "Farpage itself failed".
pub const FAILED: i32 = 125;

/// Prefix of the names of the libraries that valgrind puts into a program.
const VALGRIND: &[u8] = b"vgpreload_";

static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(core::ptr::null_mut());
/// A word that the kernel zeroes in every child. A process that reads zero has no engine threads.
static ALIVE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
/// The session's path, kept for children.
static mut SESSION_PATH: [u8; PATH_BYTES] = [0; PATH_BYTES];

/// Returns this process's engine. None if the process has no engine, if the engine has ended, or in a child
/// that was made without our knowledge.
pub fn engine() -> Option<&'static Engine> {
    // Ordering: Acquire pairs with the Release in `try_to_begin`.
    let alive = ALIVE.load(Ordering::Acquire);
    // SAFETY: null, or a page that `try_to_begin` reserved for good.
    let is_alive = unsafe { alive.as_ref() }.is_some_and(|word| word.load(Ordering::Relaxed) != 0);
    // Ordering: Acquire pairs with the Release in `try_to_begin`, as above.
    // SAFETY: null, or an engine that was placed for good.
    let engine = is_alive.then(|| unsafe { ENGINE.load(Ordering::Acquire).as_ref() }).flatten();
    engine.filter(|engine| !engine.has_ended())
}

/// Returns the engine of this process, even if the engine has ended. In a fresh child,
/// returns the parent's engine.
pub fn parents_engine() -> Option<&'static Engine> {
    // Ordering: Acquire as in `engine`.
    // SAFETY: as in `engine`; the parent's engine structure is inherited.
    unsafe { ENGINE.load(Ordering::Acquire).as_ref() }
}

#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = loaded;

/// glibc calls this with the program's arguments and environment, before the program's own constructors.
extern "C" fn loaded(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    // SAFETY: glibc passes a null-terminated array of NUL-terminated strings.
    let Some(path) = (unsafe { find(environment, SESSION_ENV.as_bytes()) }) else {
        return report::say(
            "this library does nothing by itself: start the program with `farpage run`, not with LD_PRELOAD",
        );
    };
    // SAFETY: as above.
    let preloaded = unsafe { find(environment, b"LD_PRELOAD") }.map_or(&b""[..], CStr::to_bytes);
    if preloaded.windows(VALGRIND.len()).any(|part| part == VALGRIND) {
        return report::say(
            "valgrind can't run the threads that Farpage makes: its program runs without Farpage, and its memory isn't limited",
        );
    }
    let bytes = path.to_bytes();
    if bytes.len() >= PATH_BYTES {
        return;
    }
    // SAFETY: the process has one thread, which runs this code, and nobody has read the path yet.
    unsafe { (&raw mut SESSION_PATH).cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
    let signals = sys::block_all_signals();
    let is_dormant = dormant::join(signals.bits());
    sys::restore_signals(signals);
    if is_dormant || begin(None) {
        if patch::all().and_then(|()| crate::fork::patch()).is_err() {
            tell_of_hooks();
            sys::exit_group(FAILED);
        }
        crate::threads::prepare();
        crate::credentials::prepare();
        crate::exec::prepare(path);
        let session = engine().map(|engine| engine.membership.session).or_else(dormant::session);
        session.inspect(|session| First::begins(session));
    }
}

/// Tells the supervisor that libc's functions can't be replaced.
fn tell_of_hooks() {
    match engine() {
        Some(engine) => engine.record.notice(Notice::NotStarted, StartFailure::Hooks as u64),
        None => dormant::tell(Notice::NotStarted, StartFailure::Hooks),
    }
}

/// Returns the session's path.
pub fn session_path() -> &'static CStr {
    let path = &raw const SESSION_PATH;
    // SAFETY: written once, before any other thread could be here.
    CStr::from_bytes_until_nul(unsafe { &*path }).unwrap_or(c"")
}

/// Whether a child of this process could have an engine. After a chroot, or as another user, the child
/// can't reach the session. A child that lets nobody look at its memory (its pagemap answers EACCES) can't
/// have an engine either, nor can a child in another pid namespace.
pub fn can_join() -> bool {
    farpage_runtime::session::is_reachable(session_path())
        && !matches!(Pagemap::open(), Err(Errno::EACCES))
        && proc::has_children_here()
}

/// Starts an engine. Returns false if no engine can start and the program runs by itself: the session is
/// gone, or [`can_do_without`] allows that. Ends the process if the program can't go on.
pub fn begin(parent: Option<&'static Engine>) -> bool {
    let Err(error) = try_to_begin(parent, false, false) else { return true };
    let goes_on = can_do_without(parent, false, error);
    if matches!(error, StartError::Failed(StartFailure::Thread, _)) {
        // No thread existed yet that could have told the supervisor.
        report::say(if goes_on {
            "there can't be another thread here (see ulimit -u, and the container's limit of processes): this process runs without Farpage"
        } else {
            "there can't be another thread here (see ulimit -u, and the container's limit of processes)"
        });
    }
    // The supervisor prints the reason, unless not even the request to it could be made.
    if !goes_on {
        sys::exit_group(FAILED);
    }
    false
}

/// Starts an engine in a process that was dormant, or whose parent was. Returns false if no engine can start,
/// and the process goes on by itself.
pub fn begin_late(own: Option<&Dormant>) -> bool {
    let Err(error) = try_to_begin(None, true, own.is_some()) else { return true };
    let (failure, errno) = match error {
        StartError::Failed(failure, errno) if !dormant::is_out_of_reach() => (failure, errno),
        StartError::Failed(..) | StartError::Alone | StartError::BudgetTooSmall(_) => {
            (StartFailure::Session, Errno(0))
        }
    };
    own.inspect(|dormant| dormant.tell(Notice::Alone, failure, errno));
    false
}

fn try_to_begin(
    parent: Option<&'static Engine>,
    is_late: bool,
    is_told_elsewhere: bool,
) -> Result<(), StartError> {
    // SAFETY: written once, before any other thread could be here.
    let path = unsafe { (&raw const SESSION_PATH).read() };
    stack::prepare().map_err(|errno| StartError::Failed(StartFailure::Memory, errno))?;
    let left_alone = LeftAlone { block: dormant::block_pages(), stack: dormant::new_stack_pages() };
    let (block, executable) = (thread_block(), program_headers());
    let engine = start(Start::new(path, block, executable, parent, is_late, is_told_elsewhere, left_alone))?;
    let Ok(alive) = memory::place(AtomicU32::new(1)) else { sys::exit_group(FAILED) };
    // SAFETY: the word is the page's only content, and `engine` expects zero there in a child.
    if unsafe { memory::wipe_in_children(alive.as_ptr().cast(), farpage_core::units::PAGE_BYTES) }.is_err() {
        sys::exit_group(FAILED);
    }
    // Ordering: Release publishes the engine to the Acquire loads in `engine` and `parents_engine`.
    ENGINE.store(core::ptr::from_ref(engine).cast_mut(), Ordering::Release);
    // Ordering: Release, so that a thread that sees the process alive sees the engine, too.
    ALIVE.store(alive, Ordering::Release);
    Ok(())
}

/// Returns the address of the executable's program headers; 0 if the kernel didn't tell.
fn program_headers() -> usize {
    const AT_PHDR: c_ulong = 3;
    // SAFETY: the function looks a number up in the kernel's list, which stays as it is.
    unsafe { getauxval(AT_PHDR) as usize }
}

/// Returns the address of the calling thread's control block.
pub fn thread_block() -> usize {
    let block: usize;
    // SAFETY: on x86-64 the first word of the block holds its own address.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags)) };
    block
}

/// Returns the value of an environment variable, or none if the variable isn't set.
///
/// # Safety
/// `environment` must be a null-terminated array of NUL-terminated strings that live as long as the process.
unsafe fn find(environment: *const *const c_char, name: &[u8]) -> Option<&'static CStr> {
    let mut at = environment;
    loop {
        // SAFETY: `at` has not passed the null that ends the array.
        let entry = unsafe { at.as_ref() }.copied().filter(|entry| !entry.is_null())?;
        // SAFETY: the caller's promise.
        let entry = unsafe { CStr::from_ptr(entry) };
        if let Some(rest) = entry.to_bytes().strip_prefix(name)
            && rest.first() == Some(&b'=')
        {
            return CStr::from_bytes_with_nul(&entry.to_bytes_with_nul()[name.len() + 1..]).ok();
        }
        at = at.wrapping_add(1);
    }
}

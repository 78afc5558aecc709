//! Filters of seccomp that the program installs. A filter binds one thread, or all threads of the program.
//! Engine threads must not be a way around it.
//!
//! Before the call that installs a filter is made, the engine checks whether the filter allows all calls that
//! the engine makes ([`ALWAYS`], [`FOLLOWED`]). If so, engine threads get the same filter. If not, the engine
//! ends ([`retire`](crate::engine::retire)), and the program goes on alone. The filter is copied once, so
//! that the kernel gets the filter that was checked. The keeper soon notices filters that nobody saw.
// UNSAFETY: a program of seccomp is copied into memory that one thread at a time uses.

use crate::engine::Engine;
use crate::mappings::changes::Arguments;
use crate::privileges::credentials;
use crate::session::Retired;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use farpage_core::filter::{Call, Evaluator, INSTRUCTIONS_MAX, Instruction, is_valid};
use farpage_os::seccomp::{self, Asked, Program};
use farpage_os::sys::{self, number};
use farpage_os::{peek, proc};
use linux_raw_sys::general as raw;

/// Calls that engine threads, handlers and hooks make, whatever the program does. A fork's child makes those
/// of a new engine.
const ALWAYS: &[u32] = &[
    // Waiting, time, threads.
    raw::__NR_futex,
    raw::__NR_nanosleep,
    raw::__NR_clock_nanosleep,
    raw::__NR_restart_syscall,
    raw::__NR_clock_gettime,
    raw::__NR_sched_yield,
    raw::__NR_sched_getattr,
    raw::__NR_sched_setattr,
    raw::__NR_sched_getaffinity,
    raw::__NR_sched_setaffinity,
    raw::__NR_poll,
    raw::__NR_ppoll,
    raw::__NR_pselect6,
    raw::__NR_exit,
    raw::__NR_exit_group,
    raw::__NR_gettid,
    raw::__NR_getpid,
    raw::__NR_getcpu,
    raw::__NR_getrandom,
    raw::__NR_getrusage,
    raw::__NR_prlimit64,
    raw::__NR_getrlimit,
    raw::__NR_prctl,
    raw::__NR_get_mempolicy,
    // Signals.
    raw::__NR_rt_sigaction,
    raw::__NR_rt_sigprocmask,
    raw::__NR_rt_sigreturn,
    raw::__NR_rt_sigpending,
    raw::__NR_rt_tgsigqueueinfo,
    raw::__NR_tgkill,
    raw::__NR_kill,
    raw::__NR_sigaltstack,
    // Memory. The engine does in the program's place what the program may do, and not always when the program
    // asks.
    raw::__NR_mmap,
    raw::__NR_munmap,
    raw::__NR_mremap,
    raw::__NR_mprotect,
    raw::__NR_madvise,
    raw::__NR_msync,
    raw::__NR_mincore,
    raw::__NR_process_madvise,
    raw::__NR_vmsplice,
    raw::__NR_mlock,
    raw::__NR_mlock2,
    raw::__NR_munlock,
    raw::__NR_process_vm_readv,
    raw::__NR_process_vm_writev,
    raw::__NR_userfaultfd,
    // Files.
    raw::__NR_read,
    raw::__NR_pread64,
    raw::__NR_preadv,
    raw::__NR_write,
    raw::__NR_pwrite64,
    raw::__NR_pwritev,
    raw::__NR_openat,
    raw::__NR_open,
    raw::__NR_close,
    raw::__NR_close_range,
    raw::__NR_pipe,
    raw::__NR_pipe2,
    raw::__NR_flock,
    raw::__NR_fstat,
    raw::__NR_newfstatat,
    raw::__NR_fstatfs,
    raw::__NR_fcntl,
    raw::__NR_ftruncate,
    raw::__NR_fallocate,
    raw::__NR_getdents64,
    raw::__NR_chdir,
    raw::__NR_readlinkat,
    raw::__NR_io_uring_setup,
    raw::__NR_io_uring_enter,
    raw::__NR_io_uring_register,
    raw::__NR_io_setup,
    raw::__NR_io_submit,
    raw::__NR_io_getevents,
    raw::__NR_io_destroy,
    // Reading what the calling thread may do.
    raw::__NR_capget,
    raw::__NR_getresuid,
    raw::__NR_getresgid,
    raw::__NR_setfsuid,
    raw::__NR_setfsgid,
    raw::__NR_getgroups,
];

/// Requests of ioctl: of userfaultfd, of pages and files, of block devices, and of namespaces.
const REQUESTS: &[u64] = &[
    0xc018_aa3f,
    0xc020_aa00,
    0x8010_aa01,
    0x8010_aa02,
    0xc028_aa03,
    0xc020_aa04,
    0xc028_aa05,
    0xc018_aa06,
    0xc020_aa08,
    0xaa00,
    0xc060_6610,
    0xc020_660b,
    0x8008_6601,
    0x1277,
    0xb703,
];

/// Calls that the program asks for and that a hook makes, with a lock held and signals blocked.
const IN_HOOKS: &[u32] = &[
    raw::__NR_clone,
    raw::__NR_brk,
    raw::__NR_mlockall,
    raw::__NR_munlockall,
    raw::__NR_mseal,
    raw::__NR_pkey_mprotect,
];

/// Pairs: calls by which the program changes what it may do, and the calls by which engine threads follow.
const FOLLOWED: &[(&[u32], &[u32])] = &[
    (
        &[
            raw::__NR_setuid,
            raw::__NR_setgid,
            raw::__NR_setreuid,
            raw::__NR_setregid,
            raw::__NR_setresuid,
            raw::__NR_setresgid,
            raw::__NR_setgroups,
            raw::__NR_capset,
        ],
        &[raw::__NR_setresuid, raw::__NR_setresgid, raw::__NR_setgroups, raw::__NR_capset],
    ),
    (
        &[raw::__NR_chroot, raw::__NR_setns, raw::__NR_unshare],
        &[
            raw::__NR_chroot,
            raw::__NR_setns,
            raw::__NR_unshare,
            raw::__NR_fchdir,
            raw::__NR_pidfd_open,
            raw::__NR_pidfd_getfd,
        ],
    ),
    (
        &[raw::__NR_landlock_restrict_self],
        &[raw::__NR_landlock_restrict_self, raw::__NR_pidfd_open, raw::__NR_pidfd_getfd],
    ),
];

/// Memory of the thread that follows credentials. One thread at a time uses it.
struct Scratch {
    /// The filter that is checked, and then installed.
    program: [Instruction; INSTRUCTIONS_MAX],
    length: usize,
    evaluator: Evaluator,
    marks: [u16; INSTRUCTIONS_MAX],
}

struct Shared(UnsafeCell<Scratch>);

// SAFETY: only the holder of `credentials::FOLLOWING` uses it. Engine threads read `program` while the holder
// waits for their answers.
unsafe impl Sync for Shared {}

static SCRATCH: Shared = Shared(UnsafeCell::new(Scratch {
    program: [Instruction { code: 0, if_true: 0, if_false: 0, k: 0 }; INSTRUCTIONS_MAX],
    length: 0,
    evaluator: Evaluator::new(),
    marks: [0; INSTRUCTIONS_MAX],
}));

/// Number of filters that the program's first thread is known to have.
static KNOWN: AtomicU32 = AtomicU32::new(0);
/// Whether engine threads have a filter that they have installed themselves. Then they can no longer get one
/// together with all other threads.
static ARE_APART: AtomicBool = AtomicBool::new(false);

/// Notes the filters that the calling thread has. Called before there is an engine thread, because new
/// threads have the filters of their maker.
pub fn begin() {
    let found = number_of(own_thread());
    KNOWN.store(found.unwrap_or(0), Ordering::Relaxed);
    ARE_APART.store(false, Ordering::Relaxed);
}

fn own_thread() -> u32 {
    // SAFETY: the call takes no argument.
    unsafe { sys::call(number::GETTID, [0; 6]) as u32 }
}

/// Returns how many filters a thread of this process has, if /proc says so.
fn number_of(thread: u32) -> Option<u32> {
    let mut text = [0; 4096];
    proc::status_of(thread, &mut text).and_then(seccomp::filters_of)
}

/// Whether no thread is known to have a filter. Then a call that no filter was checked for may be made.
pub fn are_none() -> bool {
    KNOWN.load(Ordering::Relaxed) == 0 && !ARE_APART.load(Ordering::Relaxed)
}

/// Whether a call asks for a filter.
pub fn is_about(call: usize, arguments: &Arguments) -> bool {
    seccomp::asked(call, arguments).is_some()
}

/// Called when the calling thread is about to make a call that asks for a filter. Returns the kernel's
/// answer, or none if the thread is to make the call itself. Runs on an engine's stack, with signals blocked
/// and no lock held.
pub fn install(engine: &Engine, call: usize, arguments: &Arguments) -> Option<isize> {
    let asked = seccomp::asked(call, arguments)?;
    // SAFETY: the call takes no argument.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as u32;
    // A child of vfork has filters of its own.
    if process != engine.process {
        return None;
    }
    credentials::alone(|| {
        let Asked::Filter { program, argument, for_all } = asked else {
            engine.retire(Retired::Strict);
            return None;
        };
        // SAFETY: the lock that `alone` takes keeps other threads out. Every engine thread that was asked has
        // answered.
        let scratch = unsafe { &mut *SCRATCH.0.get() };
        if engine.has_ended() || !seccomp::may_install() {
            // The kernel refuses the filter, or no engine thread is left to follow.
            return None;
        }
        if !scratch.copy(program) {
            // The kernel refuses a filter that can't be read, or isn't valid. If it accepts the filter all
            // the same, nobody knows which filter it got.
            // SAFETY: the program's own call, unchanged.
            let answer = unsafe { sys::call(call, *arguments) };
            if answer >= 0 {
                engine.retire(Retired::Unseen);
            }
            return Some(answer);
        }
        let first = first_denied(scratch);
        let why = match first {
            Some(denied) => Some(Retired::Denied(denied)),
            None if for_all => ARE_APART.load(Ordering::Relaxed).then_some(Retired::AllThreads),
            None => {
                ARE_APART.store(true, Ordering::Relaxed);
                (!credentials::install_in_all(engine)).then_some(Retired::NotTaken)
            }
        };
        if let Some(why) = why {
            engine.retire(why);
            return None;
        }
        let copied = Program::of(&scratch.program[..scratch.length]);
        let mut with_copy = *arguments;
        with_copy[argument] = &raw const copied as usize;
        // SAFETY: the call is the program's own, with a copy of the filter that it has given. The copy stays
        // until the call is over.
        let answer = unsafe { sys::call(call, with_copy) };
        let found = engine.first_thread().and_then(number_of);
        found.into_iter().for_each(|found| KNOWN.store(found, Ordering::Relaxed));
        Some(answer)
    })
}

impl Scratch {
    /// Copies the program's filter. Returns whether the kernel would take it.
    fn copy(&mut self, place: usize) -> bool {
        let Some(head) = peek::read::<16>(place) else { return false };
        let word = |at: usize| u64::from_ne_bytes(head[at..at + 8].try_into().unwrap_or_default());
        self.length = usize::from(word(0) as u16);
        let Some(program) = self.program.get_mut(..self.length) else { return false };
        // SAFETY: instructions are whole numbers without gaps. Any bytes are valid for them.
        let bytes = unsafe {
            core::slice::from_raw_parts_mut(program.as_mut_ptr().cast::<u8>(), size_of_val(program))
        };
        peek::read_into(word(8) as usize, bytes) && is_valid(program, &mut self.marks)
    }
}

/// Returns the engine's first call that the filter in `scratch` doesn't allow in every case.
fn first_denied(scratch: &mut Scratch) -> Option<u32> {
    let program = &scratch.program[..scratch.length];
    let evaluator = &mut scratch.evaluator;
    let with = |number, at: usize, value| {
        let mut call = Call::any(number);
        call.arguments[at] = Some(value);
        call
    };
    let requests = REQUESTS.iter().map(|request| with(raw::__NR_ioctl, 1, *request));
    let thread = with(raw::__NR_clone, 0, farpage_os::thread::CLONE_FLAGS as u64);
    let alone =
        with(raw::__NR_clone, 0, (farpage_os::thread::CLONE_FLAGS & !farpage_os::thread::CLONE_FILES) as u64);
    let mut always = ALWAYS.iter().copied().map(Call::any).chain(requests).chain([thread, alone]);
    if let Some(denied) = always.find(|call| !evaluator.allows(program, call)) {
        return Some(denied.number);
    }
    let mut in_hooks = IN_HOOKS.iter().copied();
    if let Some(denied) = in_hooks.find(|call| !evaluator.is_bearable(program, &Call::any(*call))) {
        return Some(denied);
    }
    for (changes, followers) in FOLLOWED {
        if changes.iter().any(|change| evaluator.may_allow(program, &Call::any(*change)))
            && let Some(denied) = followers.iter().find(|call| !evaluator.allows(program, &Call::any(**call)))
        {
            return Some(*denied);
        }
    }
    None
}

/// Gives the calling engine thread the filter that was looked at last. Returns whether the thread has the
/// filter. Called when the thread is asked.
pub fn take() -> bool {
    // SAFETY: the thread that wrote the filter waits for this thread's answer.
    let scratch = unsafe { &*SCRATCH.0.get() };
    seccomp::install(&scratch.program[..scratch.length]).is_ok()
}

/// Asks for the end of the engine if the program's first thread has a filter that nobody saw. `status` is
/// that thread's. Called by the keeper, with the lock of `credentials` held.
pub fn look(engine: &Engine, status: &[u8]) {
    let found = seccomp::filters_of(status).unwrap_or(0);
    if found > KNOWN.load(Ordering::Relaxed) && !engine.is_to_retire() {
        engine.ask_to_retire(Retired::Unseen);
    }
}

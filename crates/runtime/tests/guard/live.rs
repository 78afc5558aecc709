//! Runs the tests of `main.rs` once more under `farpage run`, with memory that is really out. Each call is
//! made in every way that a program can make it. The file says what is evicted, how, and which thread makes
//! the calls.

use super::{Arena, LIVE, MAPPED_BYTES, PAGE, PAGES};
use libc::{c_int, c_long, c_void};
use std::io::{Read, Seek, SeekFrom};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, AtomicU32, AtomicUsize, Ordering};

/// State of the arguments' memory when the call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Every page is evicted.
    Out,
    /// Every second page is evicted. The other pages have only been read since they were evicted.
    Half,
    /// Pages of zeros were never touched, and the rest is evicted.
    Fresh,
}

/// Way in which the call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// By an instruction of the program's.
    Inline,
    /// By libc's `syscall`.
    Libc,
    /// By a thread that libc doesn't know.
    Stranger,
}

/// Ways in which each call is tried.
pub const WAYS: [(State, By); 5] = [
    (State::Out, By::Inline),
    (State::Out, By::Libc),
    (State::Out, By::Stranger),
    (State::Half, By::Inline),
    (State::Fresh, By::Inline),
];

/// Bytes to touch so that the arena is evicted: more than the budget.
const BALLAST_BYTES: usize = 20 << 20;

pub fn make(arena: &Arena, state: State, by: By, call: c_long, arguments: [usize; 6]) -> isize {
    if state == State::Fresh {
        discard_zeros(arena);
    }
    push_out(arena);
    if state == State::Half {
        for page in (0..PAGES).step_by(2) {
            // SAFETY: the page is inside the arena.
            unsafe { arena.base.add(page * PAGE).read_volatile() };
        }
    }
    let result = match by {
        By::Inline => super::make(call, arguments),
        By::Libc => {
            let [a, b, c, d, e, f] = arguments;
            // SAFETY: as in `super::make`.
            let result = unsafe { libc::syscall(call, a, b, c, d, e, f) };
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
            if result == -1 { -(errno as isize) } else { result as isize }
        }
        By::Stranger => stranger::make(call, arguments),
    };
    // If pages are evicted by a copy, a page that a pipe refers to stays in memory. If pages are moved, the
    // page goes.
    let stays = call == libc::SYS_vmsplice && std::env::var(LIVE).as_deref() == Ok("segv");
    if by == By::Libc && !stays {
        // The bytes that the call wrote survive another eviction.
        push_out(arena);
    }
    result
}

fn discard_zeros(arena: &Arena) {
    for page in 0..MAPPED_BYTES / PAGE {
        // SAFETY: the page is inside the arena's mapping, which only this test uses.
        unsafe {
            let start = arena.base.add(page * PAGE);
            let bytes = core::slice::from_raw_parts(start, PAGE);
            if bytes.iter().all(|byte| *byte == 0) {
                assert_eq!(libc::madvise(start.cast(), PAGE, libc::MADV_DONTNEED), 0);
            }
        }
    }
}

/// Has the arena evicted by touching more memory than fits. Continues where the last call ended. The touches
/// are scattered, because pages behind a sequential walk would be evicted first.
fn push_out(arena: &Arena) {
    const BALLAST_PAGES: usize = BALLAST_BYTES / PAGE;
    /// Pages touched before the arena is looked at.
    const STEP_PAGES: usize = 256;
    static BALLAST: Mutex<(Vec<u8>, usize)> = Mutex::new((Vec::new(), 0));
    let mut ballast = BALLAST.lock().unwrap();
    let (ballast, turn) = &mut *ballast;
    if ballast.is_empty() {
        *ballast = vec![1; BALLAST_BYTES];
    }
    for _ in 0..50 * BALLAST_PAGES / STEP_PAGES {
        for _ in 0..STEP_PAGES {
            let at = *turn * 2111 % BALLAST_PAGES * PAGE;
            ballast[at] = ballast[at].wrapping_add(1);
            *turn += 1;
        }
        if pages_there(arena) == 0 {
            return;
        }
    }
    panic!("the arena isn't evicted: this tests nothing");
}

fn pages_there(arena: &Arena) -> usize {
    const PRESENT: u64 = 1 << 63;
    let mut pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.seek(SeekFrom::Start((arena.base as usize / PAGE * 8) as u64)).unwrap();
    let mut words = [0; PAGES * 8];
    pagemap.read_exact(&mut words).unwrap();
    let words = words.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    words.filter(|word| word & PRESENT != 0).count()
}

/// A thread made by a bare clone before Farpage became active. The thread has no thread-local storage of its
/// own, so it does nothing but make calls.
mod stranger {
    use super::*;

    static CALL: AtomicUsize = AtomicUsize::new(0);
    static ARGUMENTS: [AtomicUsize; 6] = [const { AtomicUsize::new(0) }; 6];
    static RESULT: AtomicIsize = AtomicIsize::new(0);
    /// 0: the thread isn't there yet. 1: the thread waits. 2: the thread has a call to make.
    static STATE: AtomicU32 = AtomicU32::new(0);
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    extern "C" fn main(_: *mut c_void) -> c_int {
        loop {
            STATE.store(1, Ordering::Release);
            while STATE.load(Ordering::Acquire) != 2 {
                futex(libc::FUTEX_WAIT, 1);
            }
            let arguments = core::array::from_fn(|at| ARGUMENTS[at].load(Ordering::Relaxed));
            let result = super::super::make(CALL.load(Ordering::Relaxed) as c_long, arguments);
            RESULT.store(result, Ordering::Relaxed);
        }
    }

    /// Waits while the state is `value`, or wakes up to `value` threads that wait.
    fn futex(operation: c_int, value: usize) {
        let operation = operation | libc::FUTEX_PRIVATE_FLAG;
        super::super::make(libc::SYS_futex, [STATE.as_ptr() as usize, operation as usize, value, 0, 0, 0]);
    }

    pub fn start() {
        const STACK_BYTES: usize = 256 << 10;
        let flags = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        let stack = Box::leak(vec![0_u8; STACK_BYTES].into_boxed_slice());
        let top = stack.as_mut_ptr_range().end as usize & !15;
        // SAFETY: the stack is the thread's for good, and the thread uses only atomics.
        let thread = unsafe { libc::clone(main, top as *mut c_void, flags, core::ptr::null_mut()) };
        assert!(thread > 0);
        wait();
    }

    fn wait() {
        while STATE.load(Ordering::Acquire) != 1 {
            std::thread::yield_now();
        }
    }

    pub fn make(call: c_long, arguments: [usize; 6]) -> isize {
        let _alone = ONE_AT_A_TIME.lock().unwrap();
        CALL.store(call as usize, Ordering::Relaxed);
        for (place, argument) in ARGUMENTS.iter().zip(arguments) {
            place.store(argument, Ordering::Relaxed);
        }
        STATE.store(2, Ordering::Release);
        futex(libc::FUTEX_WAKE, 1);
        wait();
        RESULT.load(Ordering::Relaxed)
    }
}

#[test]
fn live_calls_answer_as_ever_when_their_memory_is_out() {
    if std::env::var_os(LIVE).is_some() {
        return stranger::start();
    }
    run_all_under("signal");
}

#[test]
fn live_without_a_userfaultfd_too() {
    if std::env::var_os(LIVE).is_none() {
        stay_on_one_cpu();
        run_all_under("segv");
    }
}

/// Keeps this thread, and what it starts, on one CPU. Without a userfaultfd another thread serves most
/// faults, and waking a sleeping CPU for that thread takes most of the time.
fn stay_on_one_cpu() {
    // SAFETY: a set of CPUs consists of integers. The kernel reads and writes this set, whose size it is
    // told.
    unsafe {
        let mut cpus: libc::cpu_set_t = core::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&cpus), &raw mut cpus), 0);
        let last = (0..libc::CPU_SETSIZE as usize).rfind(|cpu| libc::CPU_ISSET(*cpu, &cpus));
        libc::CPU_ZERO(&mut cpus);
        libc::CPU_SET(last.expect("we run on one"), &mut cpus);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&cpus), &raw const cpus), 0);
    }
}

fn run_all_under(faults: &str) {
    let here = std::env::current_exe().unwrap();
    // The program that `make build` has built.
    let built = here.ancestors().nth(3).unwrap().join("release");
    let (farpage, library) = (built.join("farpage"), built.join("libfarpage_preload.so"));
    if !farpage.exists() || !library.exists() {
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "CI builds farpage first");
        return eprintln!("skipped: `make build` first");
    }
    // A place where an ordinary user can reach the files.
    let place = std::env::temp_dir().join(format!("farpage-live-{faults}-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let copy = |from: &std::path::Path, to: &str| {
        let done = Command::new("install").args(["-m", "755"]).arg(from).arg(place.join(to)).status();
        assert!(done.unwrap().success());
        place.join(to)
    };
    let (farpage, library, tests) =
        (copy(&farpage, "farpage"), copy(&library, "preload.so"), copy(&here, "tests"));
    let mut command = Command::new(farpage);
    command.env(LIVE, faults).env("FARPAGE_PRELOAD", library).current_dir(&place);
    command.args(["run", "--faults", faults, "--ram", "8M", "--pool", "1M", "--swap", "/var/tmp"]);
    // A sequential walk through the ballast would continue into an arena behind it, and bring the arena in
    // again.
    command.args(["--readahead", "off", "--"]);
    // The tests run one after the other, in the order of their names. The test that makes the stranger comes
    // first.
    command.arg(tests).args(["--test-threads=1", "--include-ignored"]);
    // SAFETY: the call takes no pointers.
    if unsafe { libc::geteuid() } == 0 {
        use std::os::unix::process::CommandExt;
        command.uid(65_534).gid(65_534);
    }
    let ended = command.output().unwrap();
    std::fs::remove_dir_all(&place).unwrap();
    let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{out}\n{err}");
    assert!(err.contains("evicted"), "nothing was evicted, so this tests nothing: {err}");
}

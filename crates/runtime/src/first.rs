//! The end of a run's first process whose supervisor isn't its parent, but stands beside it.
//!
//! Nobody but the parent can wait for a process. So the process says its status before it ends. Then it waits until the supervisor has
//! printed the summary: when the parent hears of the end, the summary is there. A process with several threads executes what waits
//! ([`last`]). A process that is killed says nothing.

use crate::last;
use crate::session::Session;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_os::clock::now_ns;
use farpage_os::sys::{self, number};
use farpage_os::{futex, proc, thread};
use linux_raw_sys::general as raw;

/// The status of a program that Farpage ends.
pub const STATUS_FAILED: i32 = 125;

/// The longest wait for the supervisor, which may be stopped, or have no CPU.
pub const PATIENCE_NS: u64 = 2_000_000_000;

/// What the process and its supervisor say to each other.
#[repr(C)]
pub struct First {
    /// The process's number; 0 if its supervisor is its parent.
    pub pid: AtomicU32,
    /// Not 0 once the process has said how it ends. The supervisor waits for this word.
    pub has_told: AtomicU32,
    /// Not 0 once a thread has begun to say that.
    is_said: AtomicU32,
    /// With which status, as far as the process knows.
    pub status: AtomicU32,
    /// Not 0: the process waits for `is_seen`.
    pub waits: AtomicU32,
    /// Not 0 once the summary is printed. The process waits for this word.
    pub is_seen: AtomicU32,
    /// Not 0 once the supervisor wants the process to end with status 125.
    pub is_to_end: AtomicU32,
    /// How many filters of seccomp the process has when it begins.
    pub filters: AtomicU32,
    /// What getrusage said of this process and of its children before it became the program, in bytes: the launcher's memory counts there.
    pub peaks_before: [AtomicU64; 2],
    /// The most memory in RAM that the process is known to have had since, or one of the processes that it waited for, in bytes.
    pub resident_peak: AtomicU64,
    /// What the process itself may have had at most, and those that it waited for: getrusage doesn't tell of peaks below what was there
    /// before.
    pub resident_most: [AtomicU64; 2],
    /// How many programs the process has executed.
    pub programs: AtomicU64,
}

impl First {
    /// Whether the calling process is the first of the run, and the supervisor isn't its parent. Other pid namespaces have a process of
    /// the same number.
    pub fn is_here(session: &Session) -> bool {
        session.first.pid.load(Ordering::Relaxed) == own_process()
            && proc::pid_namespace().is_ok_and(|own| own == session.head.pid_namespace())
    }

    /// The process has executed a program.
    pub fn begins(session: &Session) {
        if First::is_here(session) {
            session.first.programs.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The calling process ends next, with the status that is returned: `status`, or another one that its supervisor wants. Waits until
    /// the supervisor has seen that, or doesn't. Signals stay blocked: no handler of the program's runs any more.
    pub fn tell(session: &Session, status: i32) -> i32 {
        if !First::is_here(session) {
            return status;
        }
        let first = &session.first;
        if !first.begins_to_say(status) {
            return status;
        }
        let _ = sys::block_signals();
        if is_alone() {
            first.say(true);
            first.wait_until_seen();
        } else {
            last::execute(first, status);
            first.say(false);
        }
        if first.is_to_end.load(Ordering::Relaxed) == 0 { status } else { STATUS_FAILED }
    }

    /// The same where nothing may be waited for.
    pub fn tell_at_once(session: &Session, status: i32) {
        if First::is_here(session) && session.first.begins_to_say(status) {
            session.first.say(false);
        }
    }

    /// Notes what is to be said. The first word counts: of several threads that end the process at once the kernel takes one.
    fn begins_to_say(&self, status: i32) -> bool {
        let begins = self.is_said.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if begins {
            self.status.store(status as u32, Ordering::Relaxed);
            self.note_peaks(peaks());
        }
        begins
    }

    /// Says what was noted.
    fn say(&self, waits: bool) {
        self.waits.store(u32::from(waits), Ordering::Relaxed);
        // Ordering: Release publishes what was said.
        self.has_told.store(1, Ordering::Release);
        futex::wake_shared(&self.has_told, 1);
    }

    fn note_peaks(&self, peaks: [u64; 2]) {
        let [own_before, children_before] =
            self.peaks_before.each_ref().map(|peak| peak.load(Ordering::Relaxed));
        let [own, children] = peaks;
        let of_this_program = if own > own_before { Some(own) } else { proc::resident_peak() };
        let waited_for = if children > children_before { children } else { 0 };
        // Of one program the kernel tells the peak, whatever was before.
        let is_one = self.programs.load(Ordering::Relaxed) == 1;
        let own_most = of_this_program.filter(|_| is_one).unwrap_or(own);
        self.resident_peak.store(of_this_program.unwrap_or(0).max(waited_for), Ordering::Relaxed);
        self.resident_most[0].store(own_most, Ordering::Relaxed);
        self.resident_most[1].store(children, Ordering::Relaxed);
    }

    fn wait_until_seen(&self) {
        let until_ns = now_ns() + PATIENCE_NS;
        while self.is_seen.load(Ordering::Relaxed) == 0 {
            let left_ns = until_ns.saturating_sub(now_ns());
            if left_ns == 0 {
                return;
            }
            futex::wait_for_shared(&self.is_seen, 0, left_ns);
        }
    }
}

/// Whether the calling thread is the program's only one.
fn is_alone() -> bool {
    // SAFETY: takes nothing.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    let is_ours = |thread| thread::all().any(|ours| ours.number() == Some(thread));
    let mut others = 0;
    let seen = proc::for_each_thread(|thread| {
        // One is enough: each is a look at /proc, and the program's other threads go on meanwhile.
        others +=
            u32::from(others == 0 && thread != own && !is_ours(thread) && !proc::runs_no_program(thread));
    });
    seen.is_ok() && others == 0
}

fn own_process() -> u32 {
    // SAFETY: takes nothing.
    unsafe { sys::call(number::GETPID, [0; 6]) as u32 }
}

/// Of this process and of those that it waited for, in bytes, as getrusage has it.
fn peaks() -> [u64; 2] {
    const WHO: [usize; 2] = [raw::RUSAGE_SELF as usize, raw::RUSAGE_CHILDREN as usize];
    /// Where the peak lies in a `rusage`, in words. The kernel counts KiB.
    const PEAK: usize = 4;
    WHO.map(|who| {
        let mut usage = [0_u64; 18];
        // SAFETY: the kernel writes a `rusage`, which has 18 words.
        let _ =
            unsafe { sys::call(raw::__NR_getrusage as usize, [who, (&raw mut usage).addr(), 0, 0, 0, 0]) };
        usage[PEAK] * 1024
    })
}

//! How a run's first process ends when its supervisor isn't its parent, but stands beside it.
//!
//! Nobody but the parent can wait for a process. So the process says its status before it ends. Then the
//! process waits until the supervisor has printed the summary, so that the summary is there when the parent
//! hears of the end. A process with several threads executes the program that waits ([`last`]). A process
//! that is killed says nothing.

use crate::session::Session;
use crate::session::last;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_os::clock::now_ns;
use farpage_os::sys::{self, number};
use farpage_os::{futex, proc, thread};
use linux_raw_sys::general as raw;

/// The status of a program that Farpage ends.
pub const STATUS_FAILED: i32 = 125;

/// Nanoseconds that the process waits at most for the supervisor, which may be stopped or have no CPU.
pub const PATIENCE_NS: u64 = 2_000_000_000;

/// The words by which the process and its supervisor talk to each other.
#[repr(C)]
pub struct First {
    /// The process's number; 0 if its supervisor is its parent.
    pub pid: AtomicU32,
    /// Not 0 once the process has said how it ends. The supervisor waits for this word.
    pub has_told: AtomicU32,
    /// Not 0 once a thread has begun to say how the process ends.
    is_said: AtomicU32,
    /// The status with which the process ends, as far as the process knows.
    pub status: AtomicU32,
    /// Not 0 if the process waits for `is_seen`.
    pub waits: AtomicU32,
    /// Not 0 once the summary is printed. The process waits for this word.
    pub is_seen: AtomicU32,
    /// Not 0 once the supervisor wants the process to end with status 125.
    pub is_to_end: AtomicU32,
    /// Number of seccomp filters that the process has when it begins.
    pub filters: AtomicU32,
    /// Peaks in bytes, by getrusage, of this process and of its children, before it became the program. The
    /// launcher's memory counts there.
    pub peaks_before: [AtomicU64; 2],
    /// The most bytes that this process, or one process that it waited for, is known to have had in RAM since
    /// then.
    pub resident_peak: AtomicU64,
    /// Upper bounds in bytes of what the process itself may have had, and the processes that it waited for.
    /// getrusage doesn't report peaks below `peaks_before`.
    pub resident_most: [AtomicU64; 2],
    /// Number of programs that the process has executed.
    pub programs: AtomicU64,
}

impl First {
    /// Whether the calling process is the first of the run, and the supervisor isn't its parent. Another pid
    /// namespace may have a process of the same number.
    pub fn is_this_process(session: &Session) -> bool {
        session.first.pid.load(Ordering::Relaxed) == own_process()
            && proc::pid_namespace().is_ok_and(|own| own == session.head.pid_namespace())
    }

    /// Counts a program that the process has executed.
    pub fn begins(session: &Session) {
        if First::is_this_process(session) {
            session.first.programs.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Says how the calling process is about to end. Returns the status to end with: `status`, or another one
    /// that the supervisor wants. Waits a limited time until the supervisor has seen the status. Signals stay
    /// blocked, so no handler of the program's runs any more.
    pub fn tell(session: &Session, status: i32) -> i32 {
        if !First::is_this_process(session) {
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

    /// Says how the process is about to end, where nothing may be waited for.
    pub fn tell_at_once(session: &Session, status: i32) {
        if First::is_this_process(session) && session.first.begins_to_say(status) {
            session.first.say(false);
        }
    }

    /// Notes what is to be said. Returns whether this is the first call. Only the first one counts: of
    /// several threads that end the process at once the kernel takes one.
    fn begins_to_say(&self, status: i32) -> bool {
        let begins = self.is_said.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if begins {
            self.status.store(status as u32, Ordering::Relaxed);
            self.note_peaks(peaks());
        }
        begins
    }

    /// Publishes what was noted.
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
        // The kernel reports the peak of a single program, whatever was before.
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
    // SAFETY: the call takes no argument.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    let is_ours = |thread| thread::all().any(|ours| ours.number() == Some(thread));
    let mut others = 0;
    let seen = proc::for_each_thread(|thread| {
        // One other thread is enough. Each check reads /proc, and the program's other threads go on
        // meanwhile.
        others +=
            u32::from(others == 0 && thread != own && !is_ours(thread) && !proc::runs_no_program(thread));
    });
    seen.is_ok() && others == 0
}

fn own_process() -> u32 {
    // SAFETY: the call takes no argument.
    unsafe { sys::call(number::GETPID, [0; 6]) as u32 }
}

/// Returns the peaks of this process and of those that it waited for, in bytes, by getrusage.
fn peaks() -> [u64; 2] {
    const WHO: [usize; 2] = [raw::RUSAGE_SELF as usize, raw::RUSAGE_CHILDREN as usize];
    /// Index of the peak's word in a `rusage`. The kernel counts KiB.
    const PEAK: usize = 4;
    WHO.map(|who| {
        let mut usage = [0_u64; 18];
        // SAFETY: the kernel writes a `rusage`, which has 18 words.
        let _ =
            unsafe { sys::call(raw::__NR_getrusage as usize, [who, (&raw mut usage).addr(), 0, 0, 0, 0]) };
        usage[PEAK] * 1024
    })
}

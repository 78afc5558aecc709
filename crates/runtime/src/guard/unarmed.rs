//! Threads that can't be armed, and when the user is told of them. The program may go over its budget.
//!
//! `arm` asks each thread by a signal. A thread may block the signal, or the kernel may refuse to send it.

use crate::engine::Engine;
use crate::session::{NOT_SENT, Notice};
use core::sync::atomic::Ordering;
use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::proc::WaitingThread;
use farpage_os::signal::{SIGSETXID, bit};

/// Nanoseconds for which a thread can't be armed before the user is told. The thread may still arm itself
/// later.
pub const TELL_AFTER_NS: u64 = 2_000_000_000;

/// Nanoseconds between two looks at whether a thread blocks the signal.
const LOOK_EVERY_NS: u64 = 20_000_000;

/// Nanoseconds of the first wait and of the longest wait after a refusal.
const PAUSE_NS: core::ops::Range<u64> = 1_000_000..50_000_000;

/// Tells the user that the program goes on over its budget while a thread can't be armed. `value` is the
/// notice's.
pub fn tell(engine: &Engine, value: u64) {
    engine.activation_is_doubtful.store(true, Ordering::Relaxed);
    engine.record.notice(Notice::NotArmed, value);
}

/// For how long the kernel has refused to send the signal to some thread. Mostly as many signals are pending
/// for the program's user as may be (RLIMIT_SIGPENDING).
#[derive(Default)]
pub struct Refusal {
    since_ns: Option<u64>,
    pause_ns: u64,
}

impl Refusal {
    /// Notes that the kernel has refused once more. Tells the user if that lasts, and waits a while.
    pub fn goes_on(&mut self, engine: &Engine, thread: u32) {
        let now = now_ns();
        if now - *self.since_ns.get_or_insert(now) > TELL_AFTER_NS {
            tell(engine, u64::from(thread) | NOT_SENT);
        }
        self.pause_ns = (self.pause_ns * 2).clamp(PAUSE_NS.start, PAUSE_NS.end);
        sleep_ns(self.pause_ns);
    }
}

/// How long a thread was seen to block the signal that arms it.
///
/// A thread that doesn't answer mostly waits for a CPU, or for a child of vfork or a disk, which no signal
/// interrupts. Nothing is wrong with its mask then. Most threads block signals only for a moment, but the
/// moment is long if there is no CPU for the thread. Time therefore counts only while the thread runs, or
/// sleeps with the signal blocked. Each look that finds the signal open begins the count anew.
#[derive(Default)]
pub struct Blocking {
    looked_ns: u64,
    before: Option<WaitingThread>,
    lasted_ns: u64,
}

impl Blocking {
    /// Returns whether the thread has blocked the signal for long enough to tell the user. Now and then calls
    /// `look` to look at the thread.
    pub fn is_lasting(&mut self, now_ns: u64, look: impl FnOnce() -> Option<WaitingThread>) -> bool {
        let since_ns = now_ns - self.looked_ns;
        if since_ns < LOOK_EVERY_NS {
            return false;
        }
        self.looked_ns = now_ns;
        let Some(seen) = look().filter(|seen| seen.blocked & bit(SIGSETXID) != 0) else {
            *self = Blocking { looked_ns: now_ns, ..Blocking::default() };
            return false;
        };
        if let Some(before) = self.before.replace(seen) {
            let ran_ns = seen.ran_ns.saturating_sub(before.ran_ns);
            let sleeps = seen.sleeps && before.sleeps;
            self.lasted_ns += if sleeps { since_ns } else { ran_ns.min(since_ns) };
        }
        self.lasted_ns > TELL_AFTER_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first look at which the user is told, or `None`. There is a look every 100 ms. `look` says
    /// whether the thread blocks signals, whether it sleeps, and its time on a CPU in milliseconds.
    fn told_after(seconds: u64, mut look: impl FnMut(u64) -> (bool, bool, u64)) -> Option<u64> {
        const STEP_NS: u64 = 100_000_000;
        let mut blocking = Blocking::default();
        (1..=seconds * 10).find(|turn| {
            let (blocks, sleeps, ran_ms) = look(*turn);
            let blocked = if blocks { u64::MAX } else { 0 };
            let seen = WaitingThread { blocked, sleeps, ran_ns: ran_ms * 1_000_000 };
            blocking.is_lasting(turn * STEP_NS, || Some(seen))
        })
    }

    /// The bug: the user was told of threads that only waited for a CPU, in six programs beside two busy
    /// loops.
    #[test]
    fn only_a_thread_that_goes_on_blocking_is_told_of() {
        assert_eq!(told_after(60, |_| (false, false, 0)), None, "it waits for a CPU, or for a disk");
        assert_eq!(told_after(60, |_| (true, false, 0)), None, "it had no time yet to open its mask");
        assert_eq!(told_after(60, |_| (true, false, 5)), None, "nor does it have any from now on");
        assert_eq!(
            told_after(60, |turn| (turn % 15 != 0, true, 0)),
            None,
            "it lets the signal through at times"
        );
        assert_eq!(told_after(60, |_| (true, true, 0)), Some(22), "it sleeps, and blocks it");
        assert_eq!(told_after(60, |turn| (true, false, turn * 50)), Some(42), "it runs half of the time");
        assert_eq!(
            told_after(60, |turn| (true, turn % 2 == 0, turn * 100)),
            Some(22),
            "it runs, and sleeps between"
        );
    }
}

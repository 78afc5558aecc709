//! Time.

/// Returns the nanoseconds of a clock that never goes back.
pub fn now_ns() -> u64 {
    read_ns(rustix::time::ClockId::Monotonic)
}

/// Returns the nanoseconds that the calling thread has spent on a CPU.
pub fn thread_cpu_ns() -> u64 {
    read_ns(rustix::time::ClockId::ThreadCPUTime)
}

fn read_ns(clock: rustix::time::ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps for at least `ns` nanoseconds unless a signal interrupts.
pub fn sleep_ns(ns: u64) {
    let time =
        rustix::time::Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
    let _ = rustix::thread::nanosleep(&time);
}

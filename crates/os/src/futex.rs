//! Waiting for a word in memory to change.

use core::sync::atomic::AtomicU32;
use farpage_core::sync::Parker;
use rustix::thread::futex::{self, Flags};
use rustix::time::Timespec;

/// How threads of a live process wait; install with `farpage_core::sync::set_parker`.
pub static PARKER: Parker = Parker { wait, wake };

/// Sleeps while `word` is `expected`; may return early.
pub fn wait(word: &AtomicU32, expected: u32) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// Sleeps while `word` is `expected`, at most `ns`.
pub fn wait_for(word: &AtomicU32, expected: u32, ns: u64) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, Some(&timespec(ns)));
}

/// So many nanoseconds, as the kernel takes them.
pub const fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

/// Wakes up to `count` sleepers.
pub fn wake(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, Flags::PRIVATE, count);
}

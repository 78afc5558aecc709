//! Waiting for a word in memory to change.

use core::sync::atomic::AtomicU32;
use farpage_core::sync::Parker;
use rustix::thread::futex::{self, Flags};
use rustix::time::Timespec;

/// How threads of a live process wait. Installed with `farpage_core::sync::set_parker`.
pub static PARKER: Parker = Parker { wait, wake };

/// Sleeps while `word` is `expected`. May return early.
pub fn wait(word: &AtomicU32, expected: u32) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, None);
}

/// Sleeps while `word` is `expected`, for at most `ns` nanoseconds. May return early.
pub fn wait_for(word: &AtomicU32, expected: u32, ns: u64) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, Some(&timespec(ns)));
}

/// Does the same as [`wait_for`] for a word at which the kernel or another process wakes, as at a thread's
/// end.
pub fn wait_for_shared(word: &AtomicU32, expected: u32, ns: u64) {
    let _ = futex::wait(word, Flags::empty(), expected, Some(&timespec(ns)));
}

/// Converts nanoseconds to the kernel's structure.
pub const fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

/// Writes the word at `address` with the value it has, in one atomic step. No byte changes, but the kernel
/// marks the page as written. Returns false if no page is there. The call never waits for a fault that user
/// space would have to serve.
///
/// # Safety
/// `address` is aligned, and the word is part of memory that the program may write.
pub unsafe fn rewrite(address: usize) -> bool {
    // `FUTEX_OP_ADD` of 0, compared with 0. The call wakes nobody, whatever the comparison yields.
    const ADD_ZERO: usize = 1 << 28;
    const WAKE_OP_PRIVATE: usize = 5 | 128;
    let own = AtomicU32::new(0);
    let arguments = [own.as_ptr() as usize, WAKE_OP_PRIVATE, 0, 0, address, ADD_ZERO];
    // SAFETY: the word is aligned and writable by the caller's promise, and the kernel adds 0 to it.
    let answer = unsafe { crate::sys::call(linux_raw_sys::general::__NR_futex as usize, arguments) };
    crate::sys::check(answer).is_ok()
}

/// Wakes up to `count` sleepers of [`wait_for_shared`], in any process.
pub fn wake_shared(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, Flags::empty(), count);
}

/// Wakes up to `count` sleepers.
pub fn wake(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, Flags::PRIVATE, count);
}

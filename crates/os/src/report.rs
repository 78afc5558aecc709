//! Last words: a bug of ours inside somebody else's process.

use crate::sys;
use core::fmt::Write;

/// Writes to the standard error of whatever thread this is. Engine threads have none: then to the kernel's
/// list of what is open, nowhere.
struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        // SAFETY: descriptor 2 is never closed by us; writing to what isn't open is an error, no more.
        let stderr = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
        rustix::io::write(stderr, text.as_bytes()).map(|_| ()).map_err(|_| core::fmt::Error)
    }
}

/// Tells the user of something, if anybody can hear it.
pub fn say(what: &str) {
    let _ = writeln!(Stderr, "farpage: {what}");
}

/// Says what happened, if anybody can hear it, and ends the process with SIGABRT's status.
pub fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let _ = writeln!(Stderr, "farpage: internal error, the program is stopped: {info}");
    sys::exit_group(134)
}

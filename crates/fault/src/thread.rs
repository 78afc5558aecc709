//! `thread` mode: faults as messages, read by engine threads.
//!
//! Every handler thread waits on the same descriptor and is bound to a CPU of its own. The kernel wakes all
//! of them. The one on the faulting thread's CPU runs first, because the faulting thread has just gone to
//! sleep there. Waiting until another CPU wakes up would take many times as long.

use crate::Fault;
use farpage_core::pager::Access;
use farpage_os::clock::sleep_ns;
use farpage_os::futex::timespec;
use farpage_os::uffd::{Message, Uffd};
use rustix::event::{FdSetElement, PollFd, PollFlags, fd_set_insert, poll, select};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use rustix::time::Timespec;

/// Most faults that a handler thread has at once.
pub const FAULTS_MAX: usize = 16;

/// Faults that a handler thread reads at once. No other thread serves the faults that a handler thread has
/// read, and the handler thread may have to wait for a disk. With 16 the p99 latency of a touch was 1.3 times
/// as long.
const FAULTS_READ: usize = 2;

/// Bound of the descriptor numbers that select(2) is asked about. The number of a userfaultfd is low, because
/// engine threads have a table of their own.
const NUMBER_END: usize = 1024;

/// The queue of faults of one userfaultfd.
pub struct Faults<'u> {
    uffd: &'u Uffd,
}

impl<'u> Faults<'u> {
    /// Returns the queue of `uffd`.
    pub const fn of(uffd: &'u Uffd) -> Faults<'u> {
        Faults { uffd }
    }

    /// Waits for faults, for at most `ns` nanoseconds if given, and returns how many were put into `faults`.
    /// Returns 0 if none came, or if another thread was quicker.
    pub fn wait(&self, faults: &mut [Fault; FAULTS_MAX], ns: Option<u64>) -> usize {
        if !self.is_ready(ns) {
            return 0;
        }
        let mut messages = [Message::EMPTY; FAULTS_MAX];
        let read = self.uffd.read(&mut messages[..FAULTS_READ]).unwrap_or(0);
        let mut count = 0;
        for message in &messages[..read] {
            let Some(page) = message.page() else { continue };
            let access = match (message.is_write_protect(), message.is_write()) {
                (true, _) => Access::WriteProtected,
                (false, true) => Access::Write,
                (false, false) => Access::Read,
            };
            faults[count] = Fault { page, access };
            count += 1;
        }
        count
    }

    /// Waits until there is a message, for at most `ns` nanoseconds if given. Returns whether there is one.
    fn is_ready(&self, ns: Option<u64>) -> bool {
        let mut ready = [PollFd::new(self.uffd.fd(), PollFlags::IN)];
        let timeout = ns.map(timespec);
        match poll(&mut ready, timeout.as_ref()) {
            Err(Errno::INVAL) => self.is_ready_by_select(timeout.as_ref()),
            answer => answer.is_ok_and(|count| count > 0),
        }
    }

    /// Does the same as [`Faults::is_ready`] under an RLIMIT_NOFILE of 0, which sandboxes set. The kernel
    /// refuses poll(2) there, but not select(2).
    fn is_ready_by_select(&self, timeout: Option<&Timespec>) -> bool {
        let fd = self.uffd.fd().as_raw_fd();
        if fd as usize >= NUMBER_END {
            // The read that follows finds out.
            sleep_ns(1_000_000);
            return true;
        }
        let mut set = [FdSetElement::default(); NUMBER_END / (8 * size_of::<FdSetElement>())];
        fd_set_insert(&mut set, fd);
        // SAFETY: the descriptor is open as long as `uffd` exists.
        let ready = unsafe { select(fd + 1, Some(&mut set), None, None, timeout) };
        ready.is_ok_and(|count| count > 0)
    }
}

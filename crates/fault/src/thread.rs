//! `thread` mode: faults as messages, read by engine threads.
//!
//! Every handler thread waits on the same descriptor and is pinned to a CPU of its own. The kernel wakes them
//! all; the one on the faulting thread's CPU runs first, because that thread has just gone to sleep there, and
//! none has to wait until another CPU wakes up, which takes many times as long.

use crate::Fault;
use farpage_core::pager::Access;
use farpage_os::clock::sleep_ns;
use farpage_os::futex::timespec;
use farpage_os::uffd::{Message, Uffd};
use rustix::event::{FdSetElement, PollFd, PollFlags, fd_set_insert, poll, select};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use rustix::time::Timespec;

/// Faults that a handler has at once, at most.
pub const FAULTS_MAX: usize = 16;

/// Faults that a handler reads at once. What it has read nobody else serves, and it may have to wait for a disk. (With 16 the
/// p99 of a touch was 1.3 times as long: 16 threads from a disk, and 4 from the pool; `farpage run --faults thread -- farpage load
/// touch --threads 16|4`, 256 MiB under 128M and `--pool 1M`, or under 200M and `--no-disk`. With one it is the same as with two.)
const FAULTS_READ: usize = 2;

/// Most numbers of descriptors that select(2) is asked about. That of a userfaultfd is low: engine threads have a table of their own.
const NUMBER_END: usize = 1024;

/// The queue of faults of one userfaultfd.
pub struct Faults<'u> {
    uffd: &'u Uffd,
}

impl<'u> Faults<'u> {
    /// The queue of `uffd`.
    pub const fn of(uffd: &'u Uffd) -> Faults<'u> {
        Faults { uffd }
    }

    /// Waits for faults, at most `ns` if that is given, and returns how many were put into `faults`; 0 if none came or another
    /// thread was quicker.
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

    /// Waits until there is a message, at most `ns` if that is given.
    fn is_ready(&self, ns: Option<u64>) -> bool {
        let mut ready = [PollFd::new(self.uffd.fd(), PollFlags::IN)];
        let timeout = ns.map(timespec);
        match poll(&mut ready, timeout.as_ref()) {
            Err(Errno::INVAL) => self.is_ready_by_select(timeout.as_ref()),
            answer => answer.is_ok_and(|count| count > 0),
        }
    }

    /// The same under RLIMIT_NOFILE of 0, which sandboxes set: poll(2) is refused there, and select(2) isn't.
    fn is_ready_by_select(&self, timeout: Option<&Timespec>) -> bool {
        let fd = self.uffd.fd().as_raw_fd();
        if fd as usize >= NUMBER_END {
            // Reading finds out.
            sleep_ns(1_000_000);
            return true;
        }
        let mut set = [FdSetElement::default(); NUMBER_END / (8 * size_of::<FdSetElement>())];
        fd_set_insert(&mut set, fd);
        // SAFETY: the descriptor is open as long as `uffd` is there.
        let ready = unsafe { select(fd + 1, Some(&mut set), None, None, timeout) };
        ready.is_ok_and(|count| count > 0)
    }
}

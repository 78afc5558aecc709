//! Dormant processes: members of the run in which nothing of Farpage's runs, because they are small.
//!
//! A dormant process says in the session the most memory that it can have. That is the memory that it may
//! write, and the stack that it is allowed. These bytes count against the budget as if they were there. To
//! have more memory the process must map more, by calls that come to our hooks. A dormant process has a small
//! part of the budget, and all of them together a part of what the others leave. A process that would exceed
//! either starts an engine first.
//!
//! A dormant process has no thread and no descriptor of Farpage's. It has a handler of Farpage's for one
//! signal only, by which the supervisor asks for an engine. The process holds its record by a mapping of the
//! file that has the lock. A fork's child doesn't get that mapping.
// UNSAFETY: a mapping is released when an engine has taken over.

use crate::pressure::kin::Stated;
use crate::session::head::{Glance, glance_at};
use crate::session::record::{claim, give_up, lock_if_ended, map, name_record, open};
use crate::session::{ENDED, Notice, ProcessRecord, Session, StartFailure, ram_now_within};
use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_os::memory::{self, ProtFlags};
use farpage_os::proc::{self, Statm};
use farpage_os::sys::{self, Errno, number};
use rustix::fd::{AsFd, OwnedFd};

/// `SIGURG`, by which the supervisor asks a dormant process for an engine. Most programs have no handler for
/// that, and a program that was just executed ignores the signal.
pub const WAKES: u32 = 23;
/// A dormant process may have the budget divided by this. All of them together may always have as much.
const PARTS: u64 = 16;
/// Divisor of the budget: so much all dormant processes together may have while memory is free.
const PARTS_LENT: u64 = 4;
/// Least number of bytes that a process says beyond what it needs, so that its next calls need no look at
/// /proc.
const MORE_BYTES_MIN: u64 = 1 << 20;
/// More bytes than any process has. Sums of what processes say must not overflow.
const BYTES_MAX: u64 = 1 << 50;

/// Addresses at which this process has mapped the session, and the page that holds the lock. A fork's child
/// has neither mapping, and forgets the addresses.
static MAPPED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// This process while it is dormant.
pub struct Dormant {
    session: &'static Session,
    /// Returns the bytes that the process may write.
    writable: fn() -> Option<u64>,
    /// The page whose mapping keeps the lock of the record.
    lock_page: *mut u8,
    index: usize,
    budget_bytes: u64,
    supervisor_pid: u32,
    /// The most bytes that the process can have, as it has said in the session.
    said: AtomicU64,
    /// The most bytes that the process can have by the calls that it has made.
    can_have: AtomicU64,
    /// Bytes within `can_have` that the kernel no longer counts as writable: memory that was written, and may
    /// not be written any more.
    sealed: AtomicU64,
}

/// What a call may add, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// Bytes that can be written after the call.
    Writable(u64),
    /// Bytes that can't be written any more, and that may have been written before.
    Sealed(u64),
}

impl Dormant {
    /// Joins the session at `path`. None if there is no session, or if this process could have too much
    /// memory.
    pub fn join(path: &CStr) -> Option<Dormant> {
        Dormant::join_with(path, writable_bytes)
    }

    fn join_with(path: &CStr, writable: fn() -> Option<u64>) -> Option<Dormant> {
        forget_the_parents();
        let lock = open(path).ok()?;
        let Glance { budget_bytes, pid_namespace, supervisor_pid } = glance_at(&lock)?;
        // In another pid namespace the supervisor couldn't find the process, nor the process the supervisor.
        if pid_namespace == 0 || proc::pid_namespace() != Ok(pid_namespace) {
            return None;
        }
        // A budget that is too small for this process alone is found before the process takes a record.
        if !fits(0, can_have(writable, 0)?, budget_bytes / PARTS) {
            return None;
        }
        // The session is mapped by another open file than the lock's. With the same open file, the lock would
        // be held as long as the session is mapped.
        let (session, session_bytes) = map(&open(path).ok()?).ok()?;
        let base = core::ptr::from_ref(session).cast_mut().cast::<u8>();
        let joined = || {
            let index = claim(&lock, session)?;
            // An engine does this when it opens the areas, and a dormant process opens none. While the record
            // has a holder, no other process takes back what the record's last process had.
            //
            // SAFETY: the session was mapped above with this size.
            unsafe { session.free_clusters(index, session_bytes) };
            let lock_page = memory::map_shared(lock.as_fd(), PAGE_BYTES, ProtFlags::READ).ok()?;
            let [said, can_have, sealed] = [const { AtomicU64::new(0) }; 3];
            Some(Dormant {
                session,
                writable,
                lock_page,
                index,
                budget_bytes,
                supervisor_pid,
                said,
                can_have,
                sealed,
            })
        };
        let Some(dormant) = joined() else {
            // SAFETY: the session was mapped above, and nobody else uses the mapping.
            unsafe { memory::release(base, session_bytes) };
            return None;
        };
        MAPPED[0].store(base as usize, Ordering::Relaxed);
        MAPPED[1].store(dormant.lock_page as usize, Ordering::Relaxed);
        name_record(dormant.record());
        let is_kept =
            [(base, session_bytes), (dormant.lock_page, PAGE_BYTES)].into_iter().all(|(base, bytes)| {
                // SAFETY: a child forgets `MAPPED`, and also the `Dormant`, whose page is wiped there.
                unsafe { memory::keep_from_children(base, bytes) }.is_ok()
            });
        if is_kept && dormant.says_with(0, |bytes| dormant.reap(&lock, bytes)) {
            session.started.joins(dormant.record().pid.load(Ordering::Relaxed));
            return Some(dormant);
        }
        dormant.leave();
        None
    }

    fn record(&self) -> &'static ProcessRecord {
        &self.session.processes[self.index]
    }

    /// The session, for what matters before there is an engine.
    pub fn session(&self) -> &'static Session {
        self.session
    }

    /// Notes what a call is about to add. Returns whether the sum is within what the process has said.
    pub fn adds_little(&self, added: Added) -> bool {
        let bytes = match added {
            Added::Writable(bytes) => bytes,
            Added::Sealed(bytes) => {
                self.sealed.fetch_add(bytes.min(BYTES_MAX), Ordering::Relaxed);
                bytes
            }
        };
        let before = self.can_have.fetch_add(bytes.min(BYTES_MAX), Ordering::Relaxed);
        before.saturating_add(bytes) <= self.said.load(Ordering::Relaxed)
    }

    /// Returns whether the process stays small with what a call adds. [`Dormant::adds_little`] has noted the
    /// addition. Looks at /proc. `path` is the session's.
    pub fn may_add(&self, added: Added, path: &CStr) -> bool {
        let new = match added {
            Added::Writable(bytes) => bytes,
            // The kernel still counts this memory as writable, because the call comes later.
            Added::Sealed(_) => 0,
        };
        self.says_with(new, |wanted| open(path).is_ok_and(|lock| self.reap(&lock, wanted)))
    }

    /// Says what the process can have with `added` bytes more. False if all dormant processes together could
    /// have too much, even after `reap` has forgotten the dead ones. What was said before stands then.
    fn says_with(&self, added: u64, reap: impl Fn(u64) -> bool) -> bool {
        let more = added.saturating_add(self.sealed.load(Ordering::Relaxed));
        let Some(least) = can_have(self.writable, more) else {
            return false;
        };
        if self.session.is_ending.load(Ordering::Relaxed) != 0 {
            return false;
        }
        let before = self.said.load(Ordering::Relaxed);
        // First with headroom, then as little as possible.
        let is_said = [least + (least / 4).max(MORE_BYTES_MIN), least].into_iter().any(|bytes| {
            // The bytes are said before they are compared. So if two processes say their bytes at once, one
            // of them sees the other.
            self.say(bytes);
            self.fits_beside(bytes) || reap(bytes) && self.fits_beside(bytes)
        });
        if is_said {
            self.can_have.store(least, Ordering::Relaxed);
            self.note_size();
        } else {
            self.say(before);
        }
        is_said
    }

    /// Notes the memory that the process has, for the summary.
    fn note_size(&self) {
        let bytes = Statm::open().and_then(|statm| statm.anonymous_bytes()).unwrap_or(0);
        let stats = &self.record().stats;
        stats.set(Gauge::Anonymous, bytes);
        stats.raise(Gauge::AnonymousPeak, bytes);
        stats.raise(Gauge::ProgramPeak, bytes);
    }

    fn say(&self, bytes: u64) {
        self.said.store(bytes, Ordering::Relaxed);
        self.record().dormant_bytes.store(bytes, Ordering::Relaxed);
        self.session.claims[self.index].store(Stated { anonymous: bytes, floor: bytes, ..Stated::default() });
    }

    /// Returns the budget as far as limits leave it.
    fn budget_now(&self) -> u64 {
        ram_now_within(self.session.ram_now.load(Ordering::Relaxed), self.budget_bytes)
    }

    /// Whether this process may have `bytes` bytes beside the other processes.
    fn fits_beside(&self, bytes: u64) -> bool {
        let budget_bytes = self.budget_now();
        fits(0, bytes, budget_bytes / PARTS)
            && fits(self.others(), bytes, bytes_max(budget_bytes, managed_bytes(self.session)))
    }

    /// Returns the bytes that the other dormant processes can have, including those that died dormant.
    fn others(&self) -> u64 {
        let others = self.session.processes.iter().enumerate().filter(|(index, _)| *index != self.index);
        others.map(|(_, record)| record.dormant_bytes.load(Ordering::Relaxed).min(BYTES_MAX)).sum()
    }

    /// Forgets what dead processes have said, with an engine or without, if that can matter. Returns whether
    /// a dead process was found.
    fn reap(&self, lock: &OwnedFd, wanted: u64) -> bool {
        if !fits(0, wanted, self.budget_now() / PARTS) {
            return false;
        }
        let mut has_found = false;
        for (index, claim) in self.session.claims.iter().enumerate().filter(|(index, _)| *index != self.index)
        {
            if claim.load() != Stated::default() && lock_if_ended(lock, index) {
                self.session.forget_claim(index);
                give_up(lock, index);
                has_found = true;
            }
        }
        has_found
    }

    /// Whether the supervisor is gone and hasn't ended by itself.
    pub fn was_supervisor_killed(&self) -> bool {
        // SAFETY: takes no pointers, and sends nothing.
        let found =
            sys::check(unsafe { sys::call(number::KILL, [self.supervisor_pid as usize, 0, 0, 0, 0, 0]) });
        // Ordering: Acquire pairs with the Release in the supervisor, which says so before it ends.
        found == Err(Errno::ESRCH) && self.session.ended.load(Ordering::Acquire) != ENDED
    }

    /// Notes that this process has made another one which can't join.
    pub fn has_forked_outside(&self, process: u32) {
        let name = self.record().command.each_ref().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        let name = name.as_flattened();
        let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        self.session.started.executes(process, &name[..length]);
    }

    /// Tells the supervisor of a failure to start an engine.
    pub fn tell(&self, notice: Notice, failure: StartFailure, errno: Errno) {
        self.record().notice(notice, failure as u64 | (errno.0 as u64) << 16);
    }

    /// Ends the dormant state, because there is an engine now or the process isn't a member. What was said no
    /// longer counts. The session stays mapped: an interrupted call of the program's may look there.
    pub fn leave(self) {
        self.say(0);
        self.session.claims[self.index].store(Stated::default());
        self.record().stats.set(Gauge::Anonymous, 0);
        MAPPED[1].store(0, Ordering::Relaxed);
        // SAFETY: `join` mapped the page, and nobody looks there.
        unsafe { memory::release(self.lock_page, PAGE_BYTES) };
    }
}

fn writable_bytes() -> Option<u64> {
    Some(Statm::open().and_then(|statm| statm.sizes()).ok()?.writable_bytes)
}

/// Returns the most bytes that this process can have: what it may write, its stack, and `more`.
fn can_have(writable: fn() -> Option<u64>, more: u64) -> Option<u64> {
    let parts = [writable()?, memory::stack_bytes_max(), more];
    Some(parts.iter().fold(0_u64, |sum, part| sum.saturating_add(*part)).min(BYTES_MAX))
}

/// Returns the most bytes that all dormant processes together may have, while processes with an engine have
/// `managed_bytes`. That is most of what is free, up to a part of the budget: memory of dormant processes
/// can't be evicted. A smaller part is always allowed.
const fn bytes_max(budget_bytes: u64, managed_bytes: u64) -> u64 {
    let most_of_free = budget_bytes.saturating_sub(managed_bytes) / 4 * 3;
    let lent =
        if most_of_free < budget_bytes / PARTS_LENT { most_of_free } else { budget_bytes / PARTS_LENT };
    let always = budget_bytes / PARTS;
    if lent > always { lent } else { always }
}

/// Returns the bytes that the processes with an engine have. Memory that they share counts for each of them.
/// A process that has ended counts until its claim is forgotten.
fn managed_bytes(session: &Session) -> u64 {
    let claims = session.processes.iter().zip(&session.claims);
    let managed = claims.filter(|(record, _)| record.dormant_bytes.load(Ordering::Relaxed) == 0);
    managed.map(|(_, claim)| claim.load().anonymous.min(BYTES_MAX)).sum()
}

/// Whether `bytes`, added to what the `others` can have, is at most `most`.
const fn fits(others: u64, bytes: u64, most: u64) -> bool {
    others.saturating_add(bytes) <= most
}

/// Forgets the mappings of a fork's parent, which its child doesn't have.
fn forget_the_parents() {
    for mapped in &MAPPED {
        memory::forget(mapped.swap(0, Ordering::Relaxed) as *const u8);
    }
}

/// Returns by how many bytes the claims of living dormant processes exceed what these processes were seen to
/// have. `is_alive` gets a record's number.
pub fn said_beyond_seen(session: &Session, is_alive: impl Fn(usize) -> bool) -> u64 {
    let beyond = |(index, record): (usize, &ProcessRecord)| {
        let said = record.dormant_bytes.load(Ordering::Relaxed).min(BYTES_MAX);
        // Once the claim of a dead process is forgotten, its bytes are in no sum.
        let counts = said > 0 && session.claims[index].load().anonymous == said && is_alive(index);
        if counts { said.saturating_sub(record.stats.gauge(Gauge::Anonymous)) } else { 0 }
    };
    session.processes.iter().enumerate().map(beyond).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::PROCESSES_MAX;
    use crate::session::head::tests::{TABLES_BYTES, sound};
    use crate::session::head::{HeadCopy, SessionHead};
    use rustix::fd::AsRawFd;
    use rustix::fs::MemfdFlags;
    use std::ffi::CString;

    /// A session with this budget, all of which a process with an engine has, and the path where the session
    /// can be opened.
    fn session(budget_bytes: u64) -> (OwnedFd, CString) {
        let (fd, path) = empty_session(budget_bytes);
        has_engine(&fd, budget_bytes);
        (fd, path)
    }

    /// Acts as a process with an engine that has this much memory. It lives as long as `fd` has the lock.
    fn has_engine(fd: &OwnedFd, bytes: u64) {
        assert!(lock_if_ended(fd, PROCESSES_MAX - 1));
        let claim = Stated { anonymous: bytes, ..Stated::default() };
        map(fd).unwrap().0.claims[PROCESSES_MAX - 1].store(claim);
    }

    /// A session with this budget, and the path where the session can be opened.
    fn empty_session(budget_bytes: u64) -> (OwnedFd, CString) {
        let fd = rustix::fs::memfd_create("test-session", MemfdFlags::CLOEXEC).unwrap();
        let bytes = (size_of::<Session>() + TABLES_BYTES).next_multiple_of(4);
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        let head: &HeadCopy = &sound(bytes);
        let words: Vec<u8> = head.words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        rustix::io::pwrite(&fd, &words, 0).unwrap();
        let pid_namespace = proc::pid_namespace().unwrap();
        // The budget comes first in the settings.
        for (at, word) in [
            (core::mem::offset_of!(SessionHead, settings), budget_bytes),
            (core::mem::offset_of!(SessionHead, pid_namespace), pid_namespace),
        ] {
            rustix::io::pwrite(&fd, &word.to_ne_bytes(), at as u64).unwrap();
        }
        let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        assert_eq!(glance_at(&fd), Some(Glance { budget_bytes, pid_namespace, supervisor_pid: 0 }));
        (fd, path)
    }

    /// A process that may always write the same amount. Other tests of this process map and unmap memory
    /// meanwhile.
    fn join(path: &CStr) -> Option<Dormant> {
        Dormant::join_with(path, || Some(100 << 20))
    }

    /// The bytes that the process says when it joins.
    fn said() -> u64 {
        can_have(|| Some(100 << 20), 0).unwrap() / 4 * 5
    }

    /// Acts as if the process had died: the lock is gone, but what the process has said remains.
    fn dies(dormant: Dormant) {
        // SAFETY: `join` mapped the page, and nobody looks there.
        unsafe { memory::release(dormant.lock_page, PAGE_BYTES) };
    }

    /// 256 processes that had ended were believed to still have memory.
    #[test]
    fn dormant_processes_together_have_a_part_of_the_budget_and_dead_ones_none() {
        let (_fd, path) = session(said() * PARTS * 5 / 2);
        let (first, second) = (join(&path).unwrap(), join(&path).unwrap());
        assert!(join(&path).is_none(), "a third one is too much");
        let claims = |dormant: &Dormant| dormant.session.claims[dormant.index].load().anonymous;
        assert!(claims(&first) > 0 && claims(&first) == first.said.load(Ordering::Relaxed));
        dies(first);
        let third = join(&path).unwrap();
        assert!(join(&path).is_none(), "two are alive");
        second.leave();
        third.leave();
        let fourth = join(&path).unwrap();
        assert_eq!(fourth.others(), 0, "who has an engine says nothing");
        fourth.leave();
    }

    /// The clusters of a process that had died stayed its own, as long as a dormant process had its record.
    #[test]
    fn clusters_of_the_record_s_last_process_are_free() {
        let (fd, path) = session(said() * PARTS * 2);
        let at = size_of::<Session>().next_multiple_of(4) as u64;
        for (cluster, holder) in [1_u32, 2].into_iter().enumerate() {
            rustix::io::pwrite(&fd, &holder.to_ne_bytes(), at + 4 * cluster as u64).unwrap();
        }
        let dormant = join(&path).unwrap();
        assert_eq!(dormant.index, 0);
        let mut words = [0_u8; 8];
        rustix::io::pread(&fd, &mut words, at).unwrap();
        assert_eq!(words, [0, 0, 0, 0, 2, 0, 0, 0], "the other record's process may be alive");
        dormant.leave();
    }

    /// Chromium's zygotes had engines in a budget of 500 MiB of which 400 were free, and ended themselves.
    #[test]
    fn dormant_processes_have_what_nobody_else_needs() {
        let (fd, path) = empty_session(said() * PARTS);
        let all: Vec<_> = (0..PARTS / PARTS_LENT).map(|_| join(&path).unwrap()).collect();
        assert!(join(&path).is_none(), "a quarter of the budget is theirs");
        all.into_iter().for_each(Dormant::leave);
        has_engine(&fd, said() * (PARTS - 1));
        let first = join(&path).unwrap();
        assert!(join(&path).is_none(), "another process has the rest");
        give_up(&fd, PROCESSES_MAX - 1);
        let second = join(&path).expect("that process has ended");
        [first, second].into_iter().for_each(Dormant::leave);
        assert_eq!([bytes_max(1600, 0), bytes_max(1600, 1400), bytes_max(1600, 1500)], [400, 150, 100]);
    }

    #[test]
    fn no_dormant_process_is_large() {
        let (_fd, path) = empty_session(said() * PARTS * 2);
        let dormant = join(&path).unwrap();
        assert!(dormant.may_add(Added::Writable(said() / 2), &path));
        assert!(!dormant.may_add(Added::Writable(said() * 2), &path), "all could have it, one may not");
        dormant.leave();
    }

    #[test]
    fn budget_that_is_too_small_for_one_process_is_not_joined() {
        let (fd, path) = empty_session(said() * PARTS / 3);
        assert!(join(&path).is_none());
        let (session, _) = map(&fd).unwrap();
        assert!(session.processes.iter().all(|record| record.pid.load(Ordering::Relaxed) == 0), "no record");
        assert!(join(c"/proc/self/fd/nothing").is_none());
    }

    #[test]
    fn process_may_add_up_to_its_part() {
        let (_fd, path) = session(said() * PARTS * 3);
        let dormant = join(&path).unwrap();
        let said_first = dormant.said.load(Ordering::Relaxed);
        let may = |added| dormant.adds_little(added) || dormant.may_add(added, &path);
        assert!(dormant.adds_little(Added::Writable(4096)), "there is headroom");
        assert_eq!(dormant.said.load(Ordering::Relaxed), said_first);
        assert!(may(Added::Writable(said())), "it says more");
        let said_then = dormant.said.load(Ordering::Relaxed);
        assert!(said_then > said_first);
        assert!(!may(Added::Writable(said() * 3)), "that is more than all may have");
        assert_eq!(dormant.said.load(Ordering::Relaxed), said_then, "what was said stands");
        assert!(!may(Added::Writable(u64::MAX)) && !may(Added::Writable(u64::MAX)), "sums don't overflow");
        dormant.leave();
    }

    /// A compiler writes code and makes it executable. The memory is there, though the kernel no longer
    /// counts it as data.
    #[test]
    fn sealed_memory_counts_for_good() {
        let (_fd, path) = session(said() * PARTS * 2);
        let dormant = join(&path).unwrap();
        let added = Added::Sealed(said() / 2);
        let may = || dormant.adds_little(added) || dormant.may_add(added, &path);
        assert!(may());
        assert!(!(may() && may() && may()), "each time it is more");
        dormant.leave();
    }

    #[test]
    fn what_was_said_is_more_than_what_was_seen() {
        let (_fd, path) = session(said() * PARTS * 2);
        let dormant = join(&path).unwrap();
        let seen = dormant.record().stats.gauge(Gauge::Anonymous);
        assert!(seen > 0);
        let said = dormant.said.load(Ordering::Relaxed);
        assert_eq!(said_beyond_seen(dormant.session, |_| true), said - seen);
        assert_eq!(said_beyond_seen(dormant.session, |_| false), 0, "its claim is in no sum");
        dormant.leave();
    }
}

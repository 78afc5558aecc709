//! This process's record in the session, and the question whether other processes still live.
//!
//! A process claims a record by an open-file-description lock on the byte of the record's number. A process
//! that can take another record's lock knows that the record's process is dead, whatever its pid means in the
//! pid namespace where it ran.

use crate::session::head::HeadCopy;
use crate::session::{ENDED, PROCESSES_MAX, ProcessRecord, Session, Settings};
use core::sync::atomic::Ordering;
use farpage_core::areas::heirs::GENERATIONS;
use farpage_core::units::PAGE_BYTES;
use farpage_os::memory::{self, ProtFlags};
use farpage_os::sys::{self, Errno, number};
use farpage_os::{proc, report};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

const F_OFD_GETLK: usize = 36;
const F_OFD_SETLK: usize = 37;
const F_RDLCK: i16 = 0;
const F_WRLCK: i16 = 1;
const F_UNLCK: i16 = 2;

#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    start: i64,
    length: i64,
    pid: i32,
}

/// The byte of the session that the supervisor keeps locked while it lives. It lies behind the bytes of
/// records and heirs.
pub const SUPERVISOR_BYTE: u64 = (PROCESSES_MAX + PROCESSES_MAX * GENERATIONS) as u64;

/// Returns the bytes of the session that children of forks keep locked while they have pages of this record's
/// process.
pub const fn heirs_bytes(index: usize) -> core::ops::Range<u64> {
    let start = (PROCESSES_MAX + index * GENERATIONS) as u64;
    start..start + GENERATIONS as u64
}

/// The session as one process holds it: mapped, and opened once more for the lock.
///
/// A lock belongs to an open file. A forked child also holds the mapped file, as long as it has the mapping.
/// The file of the lock is held only by the engine's threads, whose descriptors no child gets, and by the
/// engine's rings. That file is therefore closed when the process is dead and its last write is over.
pub struct Membership {
    lock: OwnedFd,
    /// The shared memory.
    pub session: &'static Session,
    /// The engine's copy of the session's head, checked. What other processes write to the head later doesn't
    /// matter.
    pub head: &'static HeadCopy,
    /// What the command line asked for.
    pub settings: Settings,
    /// Index of this process's record.
    pub index: usize,
}

impl Membership {
    /// Opens, maps and checks the session, and claims a record. EINVAL: the head is not sound. EAGAIN: no
    /// record is free.
    pub fn join(path: &core::ffi::CStr) -> Result<Membership, Errno> {
        let lock = open(path)?;
        let (session, bytes) = map(&open(path)?)?;
        // SAFETY: the memory is new, of that size, page-aligned and this process's alone for good. Its bytes
        // are zero, which is a valid `HeadCopy`.
        let head = unsafe { &mut *memory::reserve(size_of::<HeadCopy>())?.cast::<HeadCopy>() };
        session.head.copy_to(head);
        let settings = head.check(bytes).ok_or(Errno::EINVAL)?;
        let index = claim(&lock, session).ok_or(Errno::EAGAIN)?;
        report::last_words_go_to(&session.last_words);
        session.started.joins(session.processes[index].pid.load(Ordering::Relaxed));
        Ok(Membership { lock, session, head, settings, index })
    }

    /// Returns the file whose lock says that this process lives. A ring whose writes may outlast the process
    /// keeps the file open until they are over.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Returns this process's record.
    pub fn record(&self) -> &'static ProcessRecord {
        &self.session.processes[self.index]
    }

    /// Returns whether the supervisor is gone and hasn't ended by itself.
    pub fn was_supervisor_killed(&self) -> bool {
        // Ordering: Acquire pairs with the Release in the supervisor, which gives up its lock after that
        // store. If the lock is free and the word isn't there, the supervisor never wrote the word.
        let has_ended = || self.session.ended.load(Ordering::Acquire) == ENDED;
        let mut lock = lock_of(SUPERVISOR_BYTE as usize, F_WRLCK);
        let mut is_gone = || fcntl(&self.lock, F_OFD_GETLK, &mut lock).is_ok() && lock.kind == F_UNLCK;
        !has_ended() && is_gone() && !has_ended()
    }

    /// Calls `then` if the process of another record is dead, and holds the record's lock meanwhile, so that
    /// no new process can claim the record. Returns what `then` returns; false if the process lives.
    pub fn if_dead(&self, index: usize, then: &dyn Fn() -> bool) -> bool {
        if index == self.index || !take(&self.lock, index) {
            return false;
        }
        let result = then();
        give_up(&self.lock, index);
        result
    }

    /// Calls `then` under the record's lock if the process of another record has ended. Unlike
    /// [`Membership::if_dead`], heirs of the process may live on.
    pub fn if_ended(&self, index: usize, then: impl FnOnce()) {
        if index != self.index && lock_if_ended(&self.lock, index) {
            then();
            give_up(&self.lock, index);
        }
    }

    /// Maps a page of the session by an open file of its own, which has a lock. The lock stays for as long as
    /// any process has the page mapped. That process is a child to which this process's slots are left.
    /// Returns the page's address. EAGAIN: there is no record for a child, which would be without an engine.
    pub fn token(&self, generation: usize) -> Result<usize, Errno> {
        if !self.has_free_record() {
            return Err(Errno::EAGAIN);
        }
        let fd = proc::reopen(self.lock.as_fd())?;
        fcntl(&fd, F_OFD_SETLK, &mut heirs_of(self.index, generation, 1, F_RDLCK))?;
        // The page lies where the program has nothing mapped and won't map. If the program mapped something
        // over the page, the lock would be gone.
        Ok(memory::map_shared(fd.as_fd(), PAGE_BYTES, ProtFlags::READ)? as usize)
    }

    /// Returns whether a record is free now for one more process.
    fn has_free_record(&self) -> bool {
        let never_used = |record: &ProcessRecord| record.pid.load(Ordering::Relaxed) == 0;
        self.session.processes.iter().any(never_used)
            || (0..PROCESSES_MAX).any(|index| self.if_dead(index, &|| true))
    }

    /// Returns whether no process has a token of this generation any more.
    pub fn is_heirless(&self, generation: usize) -> bool {
        let lock = |kind| fcntl(&self.lock, F_OFD_SETLK, &mut heirs_of(self.index, generation, 1, kind));
        lock(F_WRLCK).is_ok() && lock(F_UNLCK).is_ok()
    }
}

/// Opens a session.
pub(crate) fn open(path: &core::ffi::CStr) -> Result<OwnedFd, Errno> {
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(|error| Errno(error.raw_os_error()))
}

/// Maps a session for good. Returns the session and its size in bytes. EINVAL: the file is too small.
pub(crate) fn map(fd: &OwnedFd) -> Result<(&'static Session, usize), Errno> {
    let stat = rustix::fs::fstat(fd).map_err(|error| Errno(error.raw_os_error()))?;
    let bytes = stat.st_size as usize;
    if bytes < size_of::<Session>() {
        return Err(Errno::EINVAL);
    }
    // The mapping is as large as the file, which never shrinks.
    let base = memory::map_shared(fd.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
    // SAFETY: the mapping is at least as large as a `Session` (checked above) and page-aligned. No code
    // unmaps it while it is in use. Any bytes are valid for a `Session`, whose fields are atomics or a head.
    Ok((unsafe { &*base.cast::<Session>() }, bytes))
}

/// Takes a record's lock if its process is dead, and all heirs of the process are dead too.
pub(crate) fn take(fd: &OwnedFd, index: usize) -> bool {
    if !lock_if_ended(fd, index) {
        return false;
    }
    let heirs = |kind| fcntl(fd, F_OFD_SETLK, &mut heirs_of(index, 0, GENERATIONS, kind));
    if heirs(F_WRLCK).is_ok() {
        let _ = heirs(F_UNLCK);
        return true;
    }
    give_up(fd, index);
    false
}

/// Takes a record's lock if its process has ended. Heirs of the process may live on.
pub(crate) fn lock_if_ended(fd: &OwnedFd, index: usize) -> bool {
    fcntl(fd, F_OFD_SETLK, &mut lock_of(index, F_WRLCK)).is_ok()
}

/// Gives a record's lock up.
pub(crate) fn give_up(fd: &OwnedFd, index: usize) {
    let _ = fcntl(fd, F_OFD_SETLK, &mut lock_of(index, F_UNLCK));
}

const fn lock_of(index: usize, kind: i16) -> Flock {
    Flock { kind, whence: 0, start: index as i64, length: 1, pid: 0 }
}

/// Returns the lock on `count` generations of a record's heirs. A process that has a token holds this lock
/// for reading.
const fn heirs_of(index: usize, generation: usize, count: usize, kind: i16) -> Flock {
    let start = PROCESSES_MAX + index * GENERATIONS + generation;
    Flock { kind, whence: 0, start: start as i64, length: count as i64, pid: 0 }
}

fn fcntl(fd: &OwnedFd, command: usize, lock: &mut Flock) -> Result<usize, Errno> {
    let arguments = [fd.as_raw_fd() as usize, command, &raw mut *lock as usize, 0, 0, 0];
    // SAFETY: both commands read and write one `struct flock`. `Flock` has its layout on x86-64.
    sys::check(unsafe { sys::call(number::FCNTL, arguments) })
}

/// Claims a fresh record, otherwise one whose process is dead. Among dead records, those without notices come
/// first, because the summary names the process of a notice only while its record is there.
pub(crate) fn claim(fd: &OwnedFd, session: &Session) -> Option<usize> {
    let own = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let pid = proc::number_shown().unwrap_or(own);
    let is_fresh = |record: &ProcessRecord| record.pid.load(Ordering::Relaxed) == 0;
    let is_silent = |record: &ProcessRecord| record.notices.load(Ordering::Relaxed) == 0;
    let best_first: [fn(&ProcessRecord) -> bool; 3] = [is_fresh, is_silent, |_| true];
    for wanted in best_first {
        for index in 0..PROCESSES_MAX {
            let record = &session.processes[index];
            if wanted(record) && take(fd, index) {
                if record.pid.load(Ordering::Relaxed) != 0 {
                    record.move_to(&session.earlier);
                    session.earlier_programs.fetch_add(1, Ordering::Relaxed);
                }
                session.forget_claim(index);
                record.slots_used.iter().for_each(|slots| slots.store(0, Ordering::Relaxed));
                // The lock decides who holds the record. The pid is for human readers.
                record.pid.store(pid, Ordering::Relaxed);
                return Some(index);
            }
        }
    }
    None
}

/// Notes the program's name in its record, for the summary.
pub(crate) fn name_record(record: &ProcessRecord) {
    let mut name = [0_u8; 16];
    if let Ok(comm) = rustix::fs::open(c"/proc/self/comm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        let read = rustix::io::read(&comm, &mut name).unwrap_or(0);
        name[read.saturating_sub(1)..].fill(0);
    }
    for (word, bytes) in record.command.iter().zip(name.chunks_exact(8)) {
        word.store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Notice;
    use crate::session::head::tests::{TABLES_BYTES, sound};
    use farpage_core::stats::{Counter, Gauge, Stats};
    use rustix::fs::MemfdFlags;
    use std::ffi::CString;

    /// Makes an empty session of this layout. Returns the session and the path at which it can be opened.
    fn session() -> (OwnedFd, CString) {
        let fd = rustix::fs::memfd_create("test-session", MemfdFlags::CLOEXEC).unwrap();
        let bytes = (size_of::<Session>() + TABLES_BYTES).next_multiple_of(4);
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        let head: Vec<u8> = sound(bytes).words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        rustix::io::write(&fd, &head).unwrap();
        let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        (fd, path)
    }

    /// Without this check, programs of a run would go on after the supervisor was killed, and start programs
    /// that nothing limits.
    #[test]
    fn supervisor_that_is_gone_without_a_word_was_killed() {
        let (_fd, path) = session();
        let supervisor = rustix::fs::open(path.as_c_str(), OFlags::RDWR, Mode::empty()).unwrap();
        let lock = |kind| fcntl(&supervisor, F_OFD_SETLK, &mut lock_of(SUPERVISOR_BYTE as usize, kind));
        lock(F_WRLCK).unwrap();
        let member = Membership::join(&path).unwrap();
        assert!(!member.was_supervisor_killed(), "it lives");
        lock(F_UNLCK).unwrap();
        assert!(member.was_supervisor_killed());
        member.session.ended.store(ENDED, Ordering::Relaxed);
        assert!(!member.was_supervisor_killed(), "it has ended");
    }

    /// The mapping of a session stays for good, for example in a child that lives on, and the lock must not
    /// depend on it. Otherwise a parent's slots would not be found free until its last child is gone.
    #[test]
    fn record_is_free_when_its_lock_is_closed_though_its_mapping_stays() {
        let (_fd, path) = session();
        let [parent, other] = [(); 2].map(|()| Membership::join(&path).unwrap());
        assert_eq!([parent.index, other.index], [0, 1]);
        assert!(!other.if_dead(parent.index, &|| true), "it lives");
        assert!(!other.if_dead(other.index, &|| true), "nobody finds himself dead");
        let kept_by_a_ring = parent.lock().try_clone_to_owned().unwrap();
        drop(parent);
        assert!(!other.if_dead(0, &|| true), "its last write isn't over");
        drop(kept_by_a_ring);
        assert!(other.if_dead(0, &|| true));
        assert!(!other.if_dead(0, &|| false), "what was done is passed on");
        assert_eq!(Membership::join(&path).unwrap().index, 2, "fresh records first");
    }

    /// The 257th program was told with the counters and peaks of the program that had its record before, and
    /// what that one had lost was told no more.
    #[test]
    fn what_a_program_told_stays_when_its_record_is_taken_over() {
        let (_fd, path) = session();
        let mut members: Vec<_> = (0..PROCESSES_MAX).map(|_| Membership::join(&path).unwrap()).collect();
        let session = members[0].session;
        for record in &session.processes {
            record.stats.add(Counter::ReadErrors, 3);
            record.stats.raise(Gauge::AnonymousPeak, 5 << 20);
            record.stats.set(Gauge::Active, 1);
            record.notice(Notice::ReadError, 77);
        }
        drop(members.swap_remove(9));
        let later = Membership::join(&path).unwrap();
        assert_eq!(later.index, 9);
        let (stats, earlier) = (&later.record().stats, &session.earlier);
        let numbers = |stats: &Stats| {
            let gauges = [Gauge::AnonymousPeak, Gauge::Active].map(|gauge| stats.gauge(gauge));
            (stats.get(Counter::ReadErrors), gauges)
        };
        assert_eq!((numbers(stats), later.record().noticed(Notice::ReadError)), ((0, [0, 0]), None));
        assert_eq!(numbers(&earlier.stats), (3, [5 << 20, 1]));
        assert_eq!(earlier.noticed(Notice::ReadError), Some(77));
        assert_eq!(session.earlier_programs.load(Ordering::Relaxed), 1);
    }
}

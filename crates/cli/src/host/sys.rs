//! System calls that std has no safe function for, each wrapped once. errno becomes `io::Error` here.
//!
//! The command line is an ordinary program with an allocator, so it uses libc. Code that runs inside another
//! program uses `farpage-os`.
// UNSAFETY: libc's functions are foreign. Each wrapper below is safe for every argument its type allows.

mod shared_memory;

pub use shared_memory::{Access, SharedMemory};
use std::ffi::{CStr, CString, c_int, c_short, c_uint, c_ulong};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Turns libc's -1 into errno.
fn answer(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

// ---- file systems and files --------------------------------------------------------------------------

/// Data of the file system that an open file is on.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    magic: u64,
    /// Size of the file system in bytes.
    pub bytes: u64,
    /// Bytes that this user may still write.
    pub available: u64,
}

impl FileSystem {
    /// Returns the file system's name, for messages.
    pub fn name(self) -> &'static str {
        match self.magic {
            0x0102_1994 => "tmpfs",
            0x8584_58f6 => "ramfs",
            0x9584_58f6 => "hugetlbfs",
            0xef53 => "ext4",
            0x5846_5342 => "xfs",
            0x9123_683e => "btrfs",
            0xf2f5_2010 => "f2fs",
            0x2fc1_2fc1 => "zfs",
            0x794c_7630 => "overlay",
            0x6969 => "nfs",
            0x6573_5546 => "fuse",
            0x0102_1997 => "9p",
            0x4d44 => "vfat",
            _ => "other",
        }
    }

    /// Whether the file system's files are memory themselves.
    pub fn is_memory(self) -> bool {
        matches!(self.name(), "tmpfs" | "ramfs" | "hugetlbfs")
    }
}

/// Returns the file system that an open file is on.
pub fn file_system(file: &File) -> io::Result<FileSystem> {
    let mut buffer = MaybeUninit::<libc::statfs64>::zeroed();
    // SAFETY: `buffer` has space for one `statfs64`, which is all that the call writes.
    answer(unsafe { libc::fstatfs64(file.as_raw_fd(), buffer.as_mut_ptr()) })?;
    // SAFETY: the call succeeded and filled the structure. The structure was zeroed before, which
    // is valid, too.
    let stat = unsafe { buffer.assume_init() };
    let unit = stat.f_frsize.max(1) as u64;
    Ok(FileSystem {
        // Magic numbers are 32 bits wide; the field is signed and wider on some machines.
        magic: stat.f_type as u64 & 0xffff_ffff,
        bytes: stat.f_blocks.saturating_mul(unit),
        available: stat.f_bavail.saturating_mul(unit),
    })
}

/// Kinds of locks, by what they allow other holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Allows no other lock.
    Exclusive,
    /// Allows other shared locks, for instance of the programs that use the area.
    Shared,
}

/// Locks a whole file for as long as it is open. Returns `Ok(false)` if another holder's lock is in the way.
pub fn lock(file: &File, lock: Lock) -> io::Result<bool> {
    let operation = match lock {
        Lock::Exclusive => libc::LOCK_EX,
        Lock::Shared => libc::LOCK_SH,
    };
    // SAFETY: takes no pointers.
    match answer(unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) }) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether an open-file-description lock is held on a byte of a file. By this lock a process of a session
/// says that it lives.
pub fn is_locked(file: &File, byte: u64) -> bool {
    // SAFETY: a `flock` is integers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_start = byte as _;
    lock.l_len = 1;
    // SAFETY: the command reads and writes one `flock`.
    let asked = answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) });
    asked.is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

/// Takes a lock on a byte of a file, or gives the lock up.
pub fn lock_byte(file: &File, byte: u64, is_held: bool) -> io::Result<()> {
    // SAFETY: a `flock` is integers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = if is_held { libc::F_WRLCK } else { libc::F_UNLCK } as _;
    lock.l_start = byte as _;
    lock.l_len = 1;
    // SAFETY: the command reads one `flock`.
    answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }).map(|_| ())
}

/// `_IO(0x12, 119)`. The request takes start and length in bytes.
const BLKDISCARD: c_ulong = 0x1277;

/// Tells a block device that a range of it isn't needed any more. The content of the range is gone.
pub fn discard(device: &File, start: u64, bytes: u64) -> io::Result<()> {
    let range = [start, bytes];
    // SAFETY: the request reads two u64.
    answer(unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD, range.as_ptr()) }).map(|_| ())
}

/// Returns the bytes of a block device (or of any file whose end can be sought).
pub fn length(file: &File) -> io::Result<u64> {
    // SAFETY: takes no pointers.
    let end = unsafe { libc::lseek64(file.as_raw_fd(), 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// Whether this process may execute the file at `path` (its effective user, as execve sees it).
pub fn may_execute(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: `path` is NUL-terminated and lives until the call returns.
    answer(unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) })?;
    Ok(())
}

/// Whether this process may make files in the directory at `path`.
pub fn may_write(path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let access = libc::W_OK | libc::X_OK;
    // SAFETY: `path` is NUL-terminated and lives until the call returns.
    answer(unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), access, libc::AT_EACCESS) })?;
    Ok(())
}

/// Whether a file has an extended attribute.
pub fn has_attribute(path: &Path, name: &CStr) -> bool {
    let Ok(path) = c_path(path) else { return false };
    // SAFETY: both names are NUL-terminated; a null buffer of size 0 asks for the length only.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) >= 0 }
}

// ---- what the kernel offers --------------------------------------------------------------------------

/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: c_ulong = 0xc018_aa3f;
/// `_IO(0xAA, 0x00)`.
const USERFAULTFD_IOC_NEW: c_ulong = 0xaa00;
/// UFFD_USER_MODE_ONLY: faults of the kernel on the program's behalf aren't reported. The mode
/// needs no privilege.
const USER_MODE_ONLY: c_int = 1;

/// Faults that a userfaultfd reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// Faults of the program and of the system calls that it makes.
    All,
    /// Faults of the program only.
    UserOnly,
}

/// Gets a userfaultfd from the system call. Returns its features.
pub fn userfaultfd_by_syscall(faults: Faults) -> io::Result<u64> {
    let mode = if faults == Faults::UserOnly { USER_MODE_ONLY } else { 0 };
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | mode) };
    userfaultfd_features(answer(fd as c_int)?)
}

/// Gets a userfaultfd from /dev/userfaultfd. Returns its features.
pub fn userfaultfd_by_device() -> io::Result<u64> {
    let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: this request takes flags, not a pointer.
    let fd =
        unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    userfaultfd_features(answer(fd)?)
}

/// Checks that a thread's system calls can be intercepted.
pub fn syscall_user_dispatch() -> io::Result<()> {
    const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
    const OFF: usize = 0;
    // SAFETY: takes no pointers, and switches off a mode that is off.
    answer(unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, OFF, 0_usize, 0_usize, 0_usize) }).map(|_| ())
}

/// Checks that private memory that no instruction may touch can be written through /proc/self/mem.
pub fn writes_what_may_not_be_touched() -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    const BYTES: usize = 4096;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which nothing refers to.
    let page = unsafe { libc::mmap(core::ptr::null_mut(), BYTES, libc::PROT_NONE, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let memory = File::options().read(true).write(true).open("/proc/self/mem");
    let result = memory.and_then(|memory| memory.write_all_at(b"bytes", page as u64));
    // SAFETY: the mapping made above.
    unsafe { libc::munmap(page, BYTES) };
    result
}

/// Asks a new userfaultfd for its features, and closes it.
fn userfaultfd_features(fd: c_int) -> io::Result<u64> {
    // struct uffdio_api: api, features, ioctls.
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: the caller just got this descriptor from the kernel and hands it over.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the request reads and writes 24 bytes, the size of `api`.
    answer(unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) })?;
    Ok(api[1])
}

/// Checks that the kernel lets this process have an io_uring.
pub fn io_uring() -> io::Result<()> {
    // struct io_uring_params is 120 bytes; all zero asks for the defaults.
    let mut parameters = [0_u64; 15];
    let entries: c_uint = 2;
    // SAFETY: the call reads and writes 120 bytes, the size of `parameters`.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, parameters.as_mut_ptr()) };
    let fd = answer(fd as c_int)?;
    // SAFETY: the call returned a new descriptor that nobody else owns; it is closed at once.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Checks that the kernel lets this process have a context for AIO.
pub fn aio() -> io::Result<()> {
    let mut context: c_ulong = 0;
    // No context is made. The call asks for no event, which is refused with EINVAL, unless the call is
    // refused before that.
    // SAFETY: the call reads one word.
    match answer(unsafe { libc::syscall(libc::SYS_io_setup, 0, &raw mut context) } as c_int) {
        Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Returns the kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "?".into(), |text| text.trim().into())
}

/// Whether this process got privileges by its own executable (set-uid, set-gid or file capabilities).
pub fn is_privileged_executable() -> bool {
    // SAFETY: takes no pointers.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns the effective user.
pub fn effective_user() -> u32 {
    // SAFETY: takes no pointers and always succeeds.
    unsafe { libc::geteuid() }
}

/// A resource limit that Farpage reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Address space.
    AddressSpace,
    /// Locked memory.
    LockedMemory,
    /// Size of a file that may be written.
    FileSize,
}

/// Returns the soft limit; none if unlimited.
pub fn resource_limit(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let which = match resource {
        Resource::AddressSpace => libc::RLIMIT_AS,
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::FileSize => libc::RLIMIT_FSIZE,
    };
    // SAFETY: the call writes one `rlimit`.
    let result = unsafe { libc::getrlimit(which, &mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Lets other processes of this user open our descriptors below /proc, even if we were started in a way
/// that forbids it.
pub fn be_inspectable() {
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1 as c_ulong, 0, 0, 0) };
}

// ---- processes and signals ---------------------------------------------------------------------------

/// A set of signals.
#[derive(Clone, Copy)]
pub struct SignalSet(libc::sigset_t);

impl SignalSet {
    /// Returns every signal. Signals that can't be blocked don't matter.
    pub fn all() -> SignalSet {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: writes one set.
        unsafe { libc::sigfillset(set.as_mut_ptr()) };
        // SAFETY: the call above filled it.
        SignalSet(unsafe { set.assume_init() })
    }

    /// Makes this the set of blocked signals of the calling thread. Returns the set before.
    /// Async-signal-safe.
    pub fn block(&self) -> SignalSet {
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: reads one set and writes one; SIG_SETMASK and valid pointers can't fail.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &self.0, before.as_mut_ptr()) };
        // SAFETY: zeroed before and filled by the call.
        SignalSet(unsafe { before.assume_init() })
    }
}

/// A signal that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The signal's number.
    pub signal: c_int,
    from: Sender,
}

/// Senders of signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sender {
    /// Another process, by its id.
    Process(libc::pid_t),
    /// The present process, by an act that the kernel answers with the signal: a write that nobody reads.
    Ourselves,
    /// The kernel, for a terminal, a child, or a timer.
    Kernel,
}

impl Arrival {
    /// Whether the signal is to be passed on: the program is to have it, too, and hasn't got it by itself.
    ///
    /// - From another process: yes, unless the program sent it. A signal that the program sends to its
    ///   parent, or to everybody, isn't for the program itself.
    /// - An alarm: yes. The alarm was set before this process was executed.
    /// - The terminal's end: yes if this process leads the session, because the kernel tells only the leader.
    /// - Any signal of the terminal: yes if the program has left our process group.
    pub fn is_for(&self, program: u32) -> bool {
        // SAFETY: take and change nothing.
        let is_leader = || unsafe { libc::getsid(0) == libc::getpid() };
        // SAFETY: as above.
        let has_left = || unsafe { libc::getpgid(program as libc::pid_t) != libc::getpgrp() };
        match (self.from, self.signal) {
            (Sender::Process(sender), _) => sender != program as libc::pid_t,
            (Sender::Kernel, libc::SIGALRM) => true,
            (Sender::Kernel, libc::SIGHUP) => is_leader() || has_left(),
            (Sender::Kernel, libc::SIGINT | libc::SIGQUIT | libc::SIGTSTP | libc::SIGWINCH) => has_left(),
            _ => false,
        }
    }
}

/// Takes one pending signal of the set, waiting up to `timeout` for it.
pub fn next_signal(set: &SignalSet, timeout: Duration) -> Option<Arrival> {
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos().into() };
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: reads a set and a timespec, writes one siginfo; all live until it returns.
    let signal = unsafe { libc::sigtimedwait(&set.0, info.as_mut_ptr(), &timeout) };
    // SAFETY: zeroed before, which is valid for a structure of integers.
    let info = unsafe { info.assume_init() };
    // Codes of 0 and below are those of kill, sigqueue, tgkill and the like. A write that nobody reads is
    // answered as if by kill.
    // SAFETY: a signal with a code of 0 or below has a sender. For other signals the field is
    // only read as an integer.
    let sender = unsafe { info.si_pid() };
    let from = match info.si_code {
        ..=0 if sender == std::process::id() as libc::pid_t => Sender::Ourselves,
        ..=0 => Sender::Process(sender),
        _ => Sender::Kernel,
    };
    (signal > 0).then_some(Arrival { signal, from })
}

/// Dispositions of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Disposition {
    /// The system's default.
    Default = 0,
    /// The signal is ignored.
    Ignore = 1,
}

/// Changes what a signal does. Async-signal-safe.
pub fn set_disposition(signal: c_int, disposition: Disposition) {
    let handler = match disposition {
        Disposition::Default => libc::SIG_DFL,
        Disposition::Ignore => libc::SIG_IGN,
    };
    // SAFETY: neither handler is a function that could run.
    unsafe { libc::signal(signal, handler) };
}

/// Returns what a signal does now. A handler counts as the default, because exec resets it to that.
pub fn disposition(signal: c_int) -> Disposition {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null new action changes nothing; writes one sigaction.
    unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeroed before, which is valid: integers and an optional function pointer.
    let action = unsafe { action.assume_init() };
    if action.sa_sigaction == libc::SIG_IGN { Disposition::Ignore } else { Disposition::Default }
}

/// Sends a signal to a process. Does nothing if the process is gone already.
pub fn send_signal(pid: u32, signal: c_int) {
    // SAFETY: takes no pointers. `pid` came from a child, so it is positive and means one process.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Opens a descriptor of the process that has this id now. The descriptor never means another process. Linux
/// has the call from 5.3 on.
pub fn open_process(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let fd = answer(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) } as c_int)?;
    // SAFETY: the call returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the process of a descriptor. Does nothing if the process is gone already.
pub fn send_signal_to(process: &OwnedFd, signal: c_int) {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a null siginfo is as if sent by kill.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, none, 0) };
}

/// Whether each of two processes has memory of its own. False if the kernel doesn't say.
pub fn have_other_memory(one: u32, other: u32) -> bool {
    const KCMP_VM: c_int = 1;
    // SAFETY: takes no pointers.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0 as c_ulong, 0 as c_ulong) > 0 }
}

/// Duplicates an open file to another number: the first that is free from `least` on.
pub fn duplicate_from(file: &OwnedFd, least: c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let fd = answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) })?;
    // SAFETY: the call returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has the kernel send a process this signal at each event of a file. At a pipe's reading end, the closing of
/// the last writing end is an event.
pub fn signal_at_events(file: &File, pid: u32, signal: c_int) -> io::Result<()> {
    #[repr(C)]
    struct Owner {
        kind: c_int,
        pid: libc::pid_t,
    }
    // libc's bindings don't have these constants.
    const F_SETSIG: c_int = 10;
    const F_SETOWN_EX: c_int = 15;
    const F_OWNER_PID: c_int = 1;
    let (fd, owner) = (file.as_raw_fd(), Owner { kind: F_OWNER_PID, pid: pid as libc::pid_t });
    // SAFETY: the first call reads an `Owner`, which is a `struct f_owner_ex`. The other calls
    // take no pointers.
    unsafe {
        answer(libc::fcntl(fd, F_SETOWN_EX, &raw const owner))?;
        answer(libc::fcntl(fd, F_SETSIG, signal))?;
        answer(libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK)).map(|_| ())
    }
}

/// Whether a process is stopped, by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| matches!(state, 'T' | 't'))
}

/// Whether a process is gone, or is a zombie. A process whose first thread has ended goes on with the others.
pub fn is_gone(pid: u32) -> bool {
    const THREADS: usize = 17;
    let Some(fields) = stat_of(pid) else { return true };
    let threads = fields.split(' ').nth(THREADS).and_then(|count| count.parse::<u64>().ok());
    fields.starts_with(['Z', 'X']) && threads.unwrap_or(0) <= 1
}

/// Returns the letter for the state of a process's first thread; none if there is no such process.
fn state_of(pid: u32) -> Option<char> {
    stat_of(pid)?.chars().next()
}

/// Returns the fields of /proc/PID/stat behind the process's name.
pub fn stat_of(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses, and may contain any character.
    stat.rsplit(") ").next().map(str::to_owned)
}

/// Makes this process, a child, die with its parent. Returns false if that parent is gone already.
/// Async-signal-safe.
pub fn die_with_parent(parent: u32) -> bool {
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as c_ulong, 0, 0, 0) };
    // SAFETY: takes no pointers and always succeeds.
    unsafe { libc::getppid() as u32 == parent }
}

/// State of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildState {
    /// The child runs.
    Running,
    /// The child was stopped by this signal.
    Stopped(c_int),
    /// The child ended with this status.
    Exited(u8),
    /// The child was killed by this signal.
    Killed(c_int),
    /// The child ended, and nobody can say how.
    Ended,
}

/// A child as one look found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    /// State of the child.
    pub state: ChildState,
    /// Time of the look.
    pub seen: Instant,
    /// Once the child has ended: the most memory in RAM that the child had, or one of the processes that it
    /// waited for. In bytes, files included, as far as that is known.
    pub resident_peak: u64,
    /// Most memory that the child itself may have had; none if the child was only seen from time to time.
    pub resident_most: Option<u64>,
    /// Most memory that the processes that the child waited for may have had.
    pub waited_for_most: u64,
}

/// Returns the most memory in RAM, in bytes, that this process had, and that the largest of its children had.
/// Only children that it waited for count.
pub fn resident_peaks() -> [u64; 2] {
    [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN].map(|who| {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: writes one `rusage`; zeroed before, which is valid for a structure of integers.
        let usage = unsafe {
            libc::getrusage(who, usage.as_mut_ptr());
            usage.assume_init()
        };
        (usage.ru_maxrss as u64).saturating_mul(1024)
    })
}

/// Looks at a child without waiting.
pub fn child(pid: u32) -> io::Result<Child> {
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    let options = libc::WNOHANG | libc::WUNTRACED;
    // SAFETY: writes one integer and one `rusage`.
    let result = unsafe { libc::wait4(pid as libc::pid_t, &mut status, options, usage.as_mut_ptr()) };
    // SAFETY: zeroed before, which is valid for a structure of integers.
    let usage = unsafe { usage.assume_init() };
    let state = match answer(result) {
        Ok(0) => ChildState::Running,
        Ok(_) if libc::WIFSTOPPED(status) => ChildState::Stopped(libc::WSTOPSIG(status)),
        Ok(_) if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) => state_of_status(status),
        Ok(_) => ChildState::Running,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => ChildState::Running,
        Err(error) => return Err(error),
    };
    // The kernel counts KiB.
    let peak = (usage.ru_maxrss as u64).saturating_mul(1024);
    Ok(Child {
        state,
        seen: Instant::now(),
        resident_peak: peak,
        resident_most: Some(peak),
        waited_for_most: peak,
    })
}

/// Result of a fork whose child goes on in the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forked {
    /// This process is the parent, and the child has this id.
    Parent(u32),
    /// This process is the child.
    Child,
}

/// Makes a child. The caller must have one thread: other threads would hold locks that the child
/// can never get.
pub fn fork() -> io::Result<Forked> {
    // SAFETY: this process has one thread, so the child finds no lock held.
    match answer(unsafe { libc::fork() })? {
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent(pid as u32)),
    }
}

/// Waits until a child has ended. Returns whether its status was 0.
pub fn wait_for_end(child: u32) -> bool {
    let mut status: c_int = 0;
    // SAFETY: writes one integer.
    while unsafe { libc::waitpid(child as libc::pid_t, &raw mut status, 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    status == 0
}

/// Ends this process at once, without anything that its parent would do at the end.
pub fn end_at_once(status: c_int) -> ! {
    // SAFETY: never returns.
    unsafe { libc::_exit(status) }
}

/// Puts this process, which leads no group, into a session of its own.
pub fn begin_session() {
    // SAFETY: takes nothing.
    unsafe { libc::setsid() };
}

/// Whether orphans below this process become its children.
pub fn is_subreaper() -> bool {
    let mut is_one: c_int = 0;
    // SAFETY: writes one integer.
    unsafe {
        libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut is_one, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong)
    };
    is_one != 0
}

/// Replaces standard input or output by /dev/null: a process that waits for the file's end doesn't
/// wait for this process.
pub fn let_go_of(descriptor: c_int) {
    if let Ok(nothing) = File::options().read(true).write(true).open("/dev/null") {
        // SAFETY: takes no pointers. Whatever refers to the number finds another file there.
        unsafe { libc::dup2(nothing.as_raw_fd(), descriptor) };
    }
}

/// Closes the files that this process was started with, except for standard input, output and error. Files
/// that Farpage opens itself stay open: they are closed on exec, so no executed program gets them.
pub fn close_inherited() {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<c_int>().ok());
    for number in numbers.filter(|number| *number > libc::STDERR_FILENO).collect::<Vec<_>>() {
        // SAFETY: takes no pointers; a number that isn't open any more is answered with an error.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: nothing of this process refers to the number: every file of its own is closed on exec,
            // and this one isn't.
            unsafe { libc::close(number) };
        }
    }
}

/// Waits, at most for `timeout`, until one of `files` can be read or its other end is closed. Returns
/// whether one of them can.
pub fn wait_for_any<const COUNT: usize>(files: [BorrowedFd<'_>; COUNT], timeout: Duration) -> bool {
    wait_for_events(files, libc::POLLIN, timeout)
}

/// Waits, at most for `timeout`, until there is room to write to `file`, or nobody reads there any more.
/// Returns whether that is so.
pub fn wait_for_room(file: BorrowedFd<'_>, timeout: Duration) -> bool {
    wait_for_events([file], libc::POLLOUT, timeout)
}

fn wait_for_events<const COUNT: usize>(
    files: [BorrowedFd<'_>; COUNT],
    events: c_short,
    timeout: Duration,
) -> bool {
    let mut asked = files.map(|file| libc::pollfd { fd: file.as_raw_fd(), events, revents: 0 });
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: the call reads and writes `COUNT` entries of `asked`, and reads `timeout`. A null
    // mask changes no mask.
    let ready = unsafe { libc::ppoll(asked.as_mut_ptr(), COUNT as libc::nfds_t, &timeout, std::ptr::null()) };
    ready > 0
}

/// Returns how the process of a descriptor has ended. The kernel says so from Linux 6.15 on, once the
/// process's parent has waited for it.
pub fn status_of_ended(process: &OwnedFd) -> Option<ChildState> {
    /// `_IOWR(0xFF, 11, struct pidfd_info)`, of the first size: 64 bytes.
    const PIDFD_GET_INFO: c_ulong = 0xc040_ff0b;
    /// Asks for the status, and says that it was given.
    const PIDFD_INFO_EXIT: u64 = 1 << 3;
    /// Index of the status, in words of 4 bytes.
    const STATUS: usize = 15;
    let mut info = [0_u32; 16];
    info[0] = PIDFD_INFO_EXIT as u32;
    // SAFETY: the kernel reads and writes 64 bytes.
    answer(unsafe { libc::ioctl(process.as_raw_fd(), PIDFD_GET_INFO, info.as_mut_ptr()) }).ok()?;
    let status = info[STATUS] as c_int;
    let is_given = u64::from(info[0]) & PIDFD_INFO_EXIT != 0;
    is_given.then(|| state_of_status(status))
}

/// Returns how a process has ended that nobody has waited for yet, if the kernel tells this process.
pub fn status_of_zombie(pid: u32) -> Option<ChildState> {
    /// Index of the status behind the name.
    const STATUS: usize = 49;
    let place = format!("/proc/{pid}");
    // The kernel writes 0 for a reader that may not know: root without CAP_SYS_PTRACE, say. The kernel makes
    // the same check before it follows this link, which a zombie no longer has. The link is read before the
    // status. A zombie that is there for the status was there for the link, so NotFound doesn't mean that
    // the process was gone.
    let may_know = std::fs::read_link(format!("{place}/exe"))
        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let stat = std::fs::read_to_string(format!("{place}/stat")).ok()?;
    let words: Vec<_> = stat.rsplit(") ").next()?.split_whitespace().collect();
    let status: c_int = words.get(STATUS).filter(|_| words[0] == "Z")?.parse().ok()?;
    (status != 0 || may_know).then(|| state_of_status(status))
}

/// Returns what a status of wait(2) says of a child that has ended.
fn state_of_status(status: c_int) -> ChildState {
    if libc::WIFSIGNALED(status) {
        ChildState::Killed(libc::WTERMSIG(status))
    } else {
        ChildState::Exited(libc::WEXITSTATUS(status) as u8)
    }
}

/// Reaps orphans if this process is process 1 of a container. Process 1 gets the processes that lose their
/// parents. No other process asks how they ended, so they would stay zombies.
pub fn reap_orphans(program: u32) {
    if std::process::id() != 1 {
        return;
    }
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: writes one siginfo.
        let found = unsafe {
            libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), libc::WEXITED | libc::WNOHANG | libc::WNOWAIT)
        };
        // SAFETY: zeroed before. The call fills in the id of a child that has ended, and nothing
        // if there is none.
        let ended = unsafe { info.assume_init().si_pid() };
        if found != 0 || ended == 0 || ended == program as libc::pid_t {
            return;
        }
        // SAFETY: writes nothing.
        unsafe { libc::waitpid(ended, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// Takes a blocked signal that is pending.
pub fn forget_pending(signal: c_int) {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the first two calls write the set, which the last call reads beside a timespec. A null
    // siginfo isn't written.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &now);
    }
}

/// Whether a blocked signal is pending.
pub fn is_pending(signal: c_int) -> bool {
    let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the first call writes one set, which lives here; the second reads it.
    unsafe { libc::sigpending(pending.as_mut_ptr()) == 0 && libc::sigismember(pending.as_ptr(), signal) == 1 }
}

/// Stops this process until another process continues it.
pub fn stop_self() {
    // SAFETY: takes no pointers; SIGSTOP runs no handler.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Dies of `signal` as a child did, without a second core file. Returns if the signal can't kill us
/// (process 1 of a container is immune).
pub fn die_of(signal: c_int) {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads one `rlimit`.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &none) };
    // A core pattern that is a pipe ignores the limit.
    // SAFETY: takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0 as c_ulong, 0, 0, 0) };
    set_disposition(signal, Disposition::Default);
    // SAFETY: takes no pointers; the default disposition runs no code of Farpage's.
    unsafe { libc::raise(signal) };
    let mut only = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the first two calls write one set, which lives here; the last call reads it.
    unsafe {
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, only.as_ptr(), std::ptr::null_mut());
    }
}

/// Returns what SIGPIPE did when this process was started: the Rust runtime changes it before `main`.
pub fn sigpipe_at_start() -> Disposition {
    if AT_START.load(std::sync::atomic::Ordering::Relaxed) == Disposition::Ignore as u8 {
        Disposition::Ignore
    } else {
        Disposition::Default
    }
}

static AT_START: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Runs before the Rust runtime starts.
#[used]
// SAFETY: the loader calls the function that this section points to once, with arguments that C functions may
// ignore. The function uses nothing that the Rust runtime would have to set up.
#[unsafe(link_section = ".init_array")]
static REMEMBER: extern "C" fn() = {
    extern "C" fn remember() {
        AT_START.store(disposition(libc::SIGPIPE) as u8, std::sync::atomic::Ordering::Relaxed);
    }
    remember
};

/// Returns the name of a signal, as `kill -l` has it.
pub fn signal_name(signal: c_int) -> String {
    const NAMES: [&str; 32] = [
        "0", "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
        "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU",
        "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    match usize::try_from(signal).ok().and_then(|at| NAMES.get(at)) {
        Some(name) => format!("SIG{name}"),
        None => format!("signal {signal}"),
    }
}

/// Looks up an environment variable that isn't empty.
pub fn environment(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

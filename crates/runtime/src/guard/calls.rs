//! The table of the x86-64 Linux system calls that are given addresses, and of what lies at these addresses.
//!
//! Calls that only name memory (munmap, madvise, mlock ...) don't look at it. For this table they have no
//! addresses, and [`crate::mappings::changes`] deals with what they do to memory. A call that [`pointers`]
//! doesn't know is newer than this table, or does different things by its arguments. [`super::buffers`] knows
//! some calls of the second kind.

use linux_raw_sys::general as raw;

/// Use that the kernel makes of the memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The kernel reads the memory.
    In,
    /// The kernel writes at least some of the memory.
    Out,
    /// The kernel reads the memory, writes it, or both.
    Both,
    /// The kernel reads or writes the memory at any time from now on, when nobody could bring a page in. The
    /// memory has to stay.
    Stays,
}

/// Kind of what lies at an address. Most variants name an argument by its number, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// As many bytes as given here.
    Bytes(u16),
    /// As many bytes as this argument says.
    Sized(u8),
    /// As many bytes as this argument says, which is a signed 32-bit number. No byte if it is negative.
    Sized32(u8),
    /// As many bytes as this argument says, behind a word of 8 bytes.
    Behind8(u8),
    /// As many elements as this argument says. The second number is the bytes of an element.
    Array(u8, u16),
    /// As many bits for NUMA nodes as this argument says, in whole words of 8 bytes.
    Bits(u8),
    /// As many bits for descriptors as this argument says, in whole words of 8 bytes.
    DescriptorBits(u8),
    /// A byte for each page of a range, whose length in bytes is this argument.
    PerPage(u8),
    /// As many bytes as a 32-bit word says, whose address is this argument.
    SizedBy(u8),
    /// The address of a socket, as long as in `SizedBy`, but at most as long as the longest address.
    SocketAddress(u8),
    /// Text that ends with a byte of 0.
    Text,
    /// Addresses of texts, up to a null.
    Texts,
    /// As many `iovec`s as this argument says. The kernel reads them, and does the given thing with the
    /// memory that they name.
    Vectors(u8),
    /// A `msghdr`, and what it names.
    Message,
    /// As many `mmsghdr`s as this argument says, and what they name.
    Messages(u8),
    /// An address and a length in bytes, of 8 bytes each, and the memory that they name.
    SizedAddress,
    /// A `struct xattr_args`: like `SizedAddress`, with a length of 4 bytes.
    Attribute,
    /// A `struct clone_args` of as many bytes as this argument says, and what it names.
    CloneArguments(u8),
    /// As many `futex_waitv`s as this argument says, and the words that they name.
    WaitWords(u8),
    /// Two `futex_waitv`s, and the words that they name.
    WaitWordPair,
    /// As many addresses of `iocb`s as this argument says, and what the `iocb`s name.
    ControlBlocks(u8),
}

/// An argument that is an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// Number of the argument, from 0.
    pub argument: u8,
    /// Use that the kernel makes of the memory.
    pub how: How,
    /// Kind of what lies at the address.
    pub what: What,
}

const fn reads(argument: u8, what: What) -> Pointer {
    Pointer { argument, how: How::In, what }
}

const fn writes(argument: u8, what: What) -> Pointer {
    Pointer { argument, how: How::Out, what }
}

const fn both(argument: u8, what: What) -> Pointer {
    Pointer { argument, how: How::Both, what }
}

const fn stays(argument: u8, what: What) -> Pointer {
    Pointer { argument, how: How::Stays, what }
}

const fn text(argument: u8) -> Pointer {
    reads(argument, What::Text)
}

use What::{
    Array, Attribute, Behind8, Bits, Bytes, CloneArguments, ControlBlocks, DescriptorBits, Message, Messages,
    PerPage, Sized, Sized32, SizedAddress, SizedBy, SocketAddress, Texts, Vectors, WaitWordPair, WaitWords,
};

// Sizes of the kernel's structures.
const STAT: What = Bytes(144);
const STATFS: What = Bytes(120);
const TIME: What = Bytes(16);
/// A set of descriptors, as large as the first argument says.
const SET: What = DescriptorBits(0);
const INTERVAL: What = Bytes(32);
const USAGE: What = Bytes(144);
const LIMIT: What = Bytes(16);
const SIGINFO: What = Bytes(128);
const TIMEX: What = Bytes(208);
const INT: What = Bytes(4);
const WORD: What = Bytes(8);
const TWO_INTS: What = Bytes(8);
/// Bytes of a `sigevent`, `mq_attr` or `iocb`.
const SIXTY_FOUR: What = Bytes(64);
/// Bytes of the longest `file_handle`.
const HANDLE: What = Bytes(136);

/// Calls that always do the same with their arguments.
const TABLE: &[(u32, &[Pointer])] = &[
    (raw::__NR_read, &[writes(1, Sized(2))]),
    (raw::__NR_write, &[reads(1, Sized(2))]),
    (raw::__NR_open, &[text(0)]),
    (raw::__NR_stat, &[text(0), writes(1, STAT)]),
    (raw::__NR_fstat, &[writes(1, STAT)]),
    (raw::__NR_lstat, &[text(0), writes(1, STAT)]),
    (raw::__NR_poll, &[both(0, Array(1, 8))]),
    (raw::__NR_rt_sigaction, &[reads(1, Bytes(32)), writes(2, Bytes(32))]),
    (raw::__NR_rt_sigprocmask, &[reads(1, Sized(3)), writes(2, Sized(3))]),
    (raw::__NR_pread64, &[writes(1, Sized(2))]),
    (raw::__NR_pwrite64, &[reads(1, Sized(2))]),
    (raw::__NR_readv, &[writes(1, Vectors(2))]),
    (raw::__NR_writev, &[reads(1, Vectors(2))]),
    (raw::__NR_access, &[text(0)]),
    (raw::__NR_pipe, &[writes(0, TWO_INTS)]),
    (raw::__NR_select, &[both(1, SET), both(2, SET), both(3, SET), both(4, TIME)]),
    (raw::__NR_mincore, &[writes(2, PerPage(1))]),
    (raw::__NR_shmctl, &[both(2, Bytes(112))]),
    (raw::__NR_nanosleep, &[reads(0, TIME), writes(1, TIME)]),
    (raw::__NR_getitimer, &[writes(1, INTERVAL)]),
    (raw::__NR_setitimer, &[reads(1, INTERVAL), writes(2, INTERVAL)]),
    (raw::__NR_sendfile, &[both(2, WORD)]),
    (raw::__NR_connect, &[reads(1, Sized32(2))]),
    (raw::__NR_accept, &[both(2, INT), writes(1, SocketAddress(2))]),
    (raw::__NR_sendto, &[reads(1, Sized(2)), reads(4, Sized32(5))]),
    (raw::__NR_recvfrom, &[writes(1, Sized(2)), both(5, INT), writes(4, SocketAddress(5))]),
    (raw::__NR_sendmsg, &[reads(1, Message)]),
    (raw::__NR_recvmsg, &[writes(1, Message)]),
    (raw::__NR_bind, &[reads(1, Sized32(2))]),
    (raw::__NR_getsockname, &[both(2, INT), writes(1, SocketAddress(2))]),
    (raw::__NR_getpeername, &[both(2, INT), writes(1, SocketAddress(2))]),
    (raw::__NR_socketpair, &[writes(3, TWO_INTS)]),
    (raw::__NR_execve, &[text(0), reads(1, Texts), reads(2, Texts)]),
    (raw::__NR_wait4, &[writes(1, INT), writes(3, USAGE)]),
    (raw::__NR_uname, &[writes(0, Bytes(390))]),
    (raw::__NR_semop, &[reads(1, Array(2, 6))]),
    (raw::__NR_msgsnd, &[reads(1, Behind8(2))]),
    (raw::__NR_msgrcv, &[writes(1, Behind8(2))]),
    (raw::__NR_msgctl, &[both(2, Bytes(120))]),
    (raw::__NR_truncate, &[text(0)]),
    (raw::__NR_getdents, &[writes(1, Sized32(2))]),
    (raw::__NR_getcwd, &[writes(0, Sized(1))]),
    (raw::__NR_chdir, &[text(0)]),
    (raw::__NR_rename, &[text(0), text(1)]),
    (raw::__NR_mkdir, &[text(0)]),
    (raw::__NR_rmdir, &[text(0)]),
    (raw::__NR_creat, &[text(0)]),
    (raw::__NR_link, &[text(0), text(1)]),
    (raw::__NR_unlink, &[text(0)]),
    (raw::__NR_symlink, &[text(0), text(1)]),
    (raw::__NR_readlink, &[text(0), writes(1, Sized32(2))]),
    (raw::__NR_chmod, &[text(0)]),
    (raw::__NR_chown, &[text(0)]),
    (raw::__NR_lchown, &[text(0)]),
    (raw::__NR_gettimeofday, &[writes(0, TIME), writes(1, TWO_INTS)]),
    (raw::__NR_getrlimit, &[writes(1, LIMIT)]),
    (raw::__NR_getrusage, &[writes(1, USAGE)]),
    (raw::__NR_sysinfo, &[writes(0, Bytes(112))]),
    (raw::__NR_times, &[writes(0, Bytes(32))]),
    (raw::__NR_syslog, &[writes(1, Sized32(2))]),
    (raw::__NR_getgroups, &[writes(1, Array(0, 4))]),
    (raw::__NR_setgroups, &[reads(1, Array(0, 4))]),
    (raw::__NR_getresuid, &[writes(0, INT), writes(1, INT), writes(2, INT)]),
    (raw::__NR_getresgid, &[writes(0, INT), writes(1, INT), writes(2, INT)]),
    (raw::__NR_capget, &[both(0, TWO_INTS), writes(1, Bytes(24))]),
    (raw::__NR_capset, &[both(0, TWO_INTS), reads(1, Bytes(24))]),
    (raw::__NR_rt_sigpending, &[writes(0, Sized(1))]),
    (raw::__NR_rt_sigtimedwait, &[reads(0, Sized(3)), writes(1, SIGINFO), reads(2, TIME)]),
    (raw::__NR_rt_sigqueueinfo, &[reads(2, SIGINFO)]),
    (raw::__NR_rt_sigsuspend, &[reads(0, Sized(1))]),
    (raw::__NR_sigaltstack, &[reads(0, Bytes(24)), writes(1, Bytes(24))]),
    (raw::__NR_utime, &[text(0), reads(1, TIME)]),
    (raw::__NR_mknod, &[text(0)]),
    (raw::__NR_ustat, &[writes(1, Bytes(32))]),
    (raw::__NR_statfs, &[text(0), writes(1, STATFS)]),
    (raw::__NR_fstatfs, &[writes(1, STATFS)]),
    (raw::__NR_sched_setparam, &[reads(1, INT)]),
    (raw::__NR_sched_getparam, &[writes(1, INT)]),
    (raw::__NR_sched_setscheduler, &[reads(2, INT)]),
    (raw::__NR_sched_rr_get_interval, &[writes(1, TIME)]),
    (raw::__NR_modify_ldt, &[both(1, Sized(2))]),
    (raw::__NR_pivot_root, &[text(0), text(1)]),
    (raw::__NR_adjtimex, &[both(0, TIMEX)]),
    (raw::__NR_setrlimit, &[reads(1, LIMIT)]),
    (raw::__NR_chroot, &[text(0)]),
    (raw::__NR_acct, &[text(0)]),
    (raw::__NR_settimeofday, &[reads(0, TIME), reads(1, TWO_INTS)]),
    // The kernel takes up to a page of options, as far as the page can be read.
    (raw::__NR_mount, &[text(0), text(1), text(2), reads(4, Bytes(4096))]),
    (raw::__NR_umount2, &[text(0)]),
    (raw::__NR_swapon, &[text(0)]),
    (raw::__NR_swapoff, &[text(0)]),
    (raw::__NR_sethostname, &[reads(0, Sized32(1))]),
    (raw::__NR_setdomainname, &[reads(0, Sized32(1))]),
    (raw::__NR_init_module, &[reads(0, Sized(1)), text(2)]),
    (raw::__NR_delete_module, &[text(0)]),
    (raw::__NR_setxattr, &[text(0), text(1), reads(2, Sized(3))]),
    (raw::__NR_lsetxattr, &[text(0), text(1), reads(2, Sized(3))]),
    (raw::__NR_fsetxattr, &[text(1), reads(2, Sized(3))]),
    (raw::__NR_getxattr, &[text(0), text(1), writes(2, Sized(3))]),
    (raw::__NR_lgetxattr, &[text(0), text(1), writes(2, Sized(3))]),
    (raw::__NR_fgetxattr, &[text(1), writes(2, Sized(3))]),
    (raw::__NR_listxattr, &[text(0), writes(1, Sized(2))]),
    (raw::__NR_llistxattr, &[text(0), writes(1, Sized(2))]),
    (raw::__NR_flistxattr, &[writes(1, Sized(2))]),
    (raw::__NR_removexattr, &[text(0), text(1)]),
    (raw::__NR_lremovexattr, &[text(0), text(1)]),
    (raw::__NR_fremovexattr, &[text(1)]),
    (raw::__NR_time, &[writes(0, WORD)]),
    (raw::__NR_sched_setaffinity, &[reads(2, Sized32(1))]),
    (raw::__NR_sched_getaffinity, &[writes(2, Sized32(1))]),
    (raw::__NR_io_setup, &[both(1, WORD)]),
    (raw::__NR_io_getevents, &[writes(3, Array(2, 32)), reads(4, TIME)]),
    (raw::__NR_io_submit, &[reads(2, ControlBlocks(1))]),
    (raw::__NR_io_cancel, &[reads(1, SIXTY_FOUR), writes(2, Bytes(32))]),
    (raw::__NR_getdents64, &[writes(1, Sized32(2))]),
    (raw::__NR_set_tid_address, &[stays(0, INT)]),
    (raw::__NR_semtimedop, &[reads(1, Array(2, 6)), reads(3, TIME)]),
    (raw::__NR_timer_create, &[reads(1, SIXTY_FOUR), writes(2, INT)]),
    (raw::__NR_timer_settime, &[reads(2, INTERVAL), writes(3, INTERVAL)]),
    (raw::__NR_timer_gettime, &[writes(1, INTERVAL)]),
    (raw::__NR_clock_settime, &[reads(1, TIME)]),
    (raw::__NR_clock_gettime, &[writes(1, TIME)]),
    (raw::__NR_clock_getres, &[writes(1, TIME)]),
    (raw::__NR_clock_nanosleep, &[reads(2, TIME), writes(3, TIME)]),
    (raw::__NR_epoll_wait, &[writes(1, Array(2, 12))]),
    (raw::__NR_epoll_ctl, &[reads(3, Bytes(12))]),
    (raw::__NR_utimes, &[text(0), reads(1, Bytes(32))]),
    (raw::__NR_mbind, &[reads(3, Bits(4))]),
    (raw::__NR_set_mempolicy, &[reads(1, Bits(2))]),
    (raw::__NR_mq_open, &[text(0), reads(3, SIXTY_FOUR)]),
    (raw::__NR_mq_unlink, &[text(0)]),
    (raw::__NR_mq_timedsend, &[reads(1, Sized(2)), reads(4, TIME)]),
    (raw::__NR_mq_timedreceive, &[writes(1, Sized(2)), writes(3, INT), reads(4, TIME)]),
    (raw::__NR_mq_getsetattr, &[reads(1, SIXTY_FOUR), writes(2, SIXTY_FOUR)]),
    (raw::__NR_waitid, &[writes(2, SIGINFO), writes(4, USAGE)]),
    (raw::__NR_add_key, &[text(0), text(1), reads(2, Sized(3))]),
    (raw::__NR_request_key, &[text(0), text(1), text(2)]),
    (raw::__NR_inotify_add_watch, &[text(1)]),
    (raw::__NR_migrate_pages, &[reads(2, Bits(1)), reads(3, Bits(1))]),
    (raw::__NR_openat, &[text(1)]),
    (raw::__NR_mkdirat, &[text(1)]),
    (raw::__NR_mknodat, &[text(1)]),
    (raw::__NR_fchownat, &[text(1)]),
    (raw::__NR_futimesat, &[text(1), reads(2, Bytes(32))]),
    (raw::__NR_newfstatat, &[text(1), writes(2, STAT)]),
    (raw::__NR_unlinkat, &[text(1)]),
    (raw::__NR_renameat, &[text(1), text(3)]),
    (raw::__NR_linkat, &[text(1), text(3)]),
    (raw::__NR_symlinkat, &[text(0), text(2)]),
    (raw::__NR_readlinkat, &[text(1), writes(2, Sized32(3))]),
    (raw::__NR_fchmodat, &[text(1)]),
    (raw::__NR_faccessat, &[text(1)]),
    (raw::__NR_pselect6, &[both(1, SET), both(2, SET), both(3, SET), both(4, TIME), reads(5, SizedAddress)]),
    (raw::__NR_ppoll, &[both(0, Array(1, 8)), both(2, TIME), reads(3, Sized(4))]),
    (raw::__NR_set_robust_list, &[stays(0, Bytes(24))]),
    (raw::__NR_get_robust_list, &[writes(1, WORD), writes(2, WORD)]),
    (raw::__NR_splice, &[both(1, WORD), both(3, WORD)]),
    (raw::__NR_vmsplice, &[both(1, Vectors(2))]),
    (raw::__NR_move_pages, &[reads(2, Array(1, 8)), reads(3, Array(1, 4)), writes(4, Array(1, 4))]),
    (raw::__NR_utimensat, &[text(1), reads(2, Bytes(32))]),
    (raw::__NR_epoll_pwait, &[writes(1, Array(2, 12)), reads(4, Sized(5))]),
    (raw::__NR_signalfd, &[reads(1, Sized(2))]),
    (raw::__NR_timerfd_settime, &[reads(2, INTERVAL), writes(3, INTERVAL)]),
    (raw::__NR_timerfd_gettime, &[writes(1, INTERVAL)]),
    (raw::__NR_accept4, &[both(2, INT), writes(1, SocketAddress(2))]),
    (raw::__NR_signalfd4, &[reads(1, Sized(2))]),
    (raw::__NR_pipe2, &[writes(0, TWO_INTS)]),
    (raw::__NR_preadv, &[writes(1, Vectors(2))]),
    (raw::__NR_pwritev, &[reads(1, Vectors(2))]),
    (raw::__NR_rt_tgsigqueueinfo, &[reads(3, SIGINFO)]),
    (raw::__NR_perf_event_open, &[both(0, Bytes(136))]),
    (raw::__NR_recvmmsg, &[both(4, TIME), writes(1, Messages(2))]),
    (raw::__NR_fanotify_mark, &[text(4)]),
    (raw::__NR_prlimit64, &[reads(2, LIMIT), writes(3, LIMIT)]),
    (raw::__NR_name_to_handle_at, &[text(1), both(2, HANDLE), writes(3, WORD)]),
    (raw::__NR_open_by_handle_at, &[reads(1, HANDLE)]),
    (raw::__NR_clock_adjtime, &[both(1, TIMEX)]),
    (raw::__NR_sendmmsg, &[reads(1, Messages(2))]),
    (raw::__NR_getcpu, &[writes(0, INT), writes(1, INT)]),
    (raw::__NR_finit_module, &[text(1)]),
    (raw::__NR_sched_setattr, &[both(1, Bytes(56))]),
    (raw::__NR_sched_getattr, &[writes(1, Sized32(2))]),
    (raw::__NR_renameat2, &[text(1), text(3)]),
    (raw::__NR_getrandom, &[writes(0, Sized(1))]),
    (raw::__NR_memfd_create, &[text(0)]),
    (raw::__NR_execveat, &[text(1), reads(2, Texts), reads(3, Texts)]),
    (raw::__NR_copy_file_range, &[both(1, WORD), both(3, WORD)]),
    (raw::__NR_preadv2, &[writes(1, Vectors(2))]),
    (raw::__NR_pwritev2, &[reads(1, Vectors(2))]),
    (raw::__NR_statx, &[text(1), writes(4, Bytes(256))]),
    (raw::__NR_io_pgetevents, &[writes(3, Array(2, 32)), reads(4, TIME), reads(5, SizedAddress)]),
    (raw::__NR_rseq, &[stays(0, Sized32(1))]),
    (raw::__NR_pidfd_send_signal, &[reads(2, SIGINFO)]),
    (raw::__NR_io_uring_setup, &[both(1, Bytes(120))]),
    (raw::__NR_open_tree, &[text(1)]),
    (raw::__NR_move_mount, &[text(1), text(3)]),
    (raw::__NR_fsopen, &[text(0)]),
    (raw::__NR_fspick, &[text(1)]),
    (raw::__NR_clone3, &[both(0, CloneArguments(1))]),
    (raw::__NR_openat2, &[text(1), reads(2, Sized(3))]),
    (raw::__NR_faccessat2, &[text(1)]),
    (raw::__NR_process_madvise, &[reads(1, Array(2, 16))]),
    (raw::__NR_epoll_pwait2, &[writes(1, Array(2, 12)), reads(3, TIME), reads(4, Sized(5))]),
    (raw::__NR_mount_setattr, &[text(1), reads(3, Sized(4))]),
    (raw::__NR_landlock_create_ruleset, &[reads(0, Sized(1))]),
    (raw::__NR_landlock_add_rule, &[reads(2, Bytes(16))]),
    (raw::__NR_futex_waitv, &[reads(0, WaitWords(1)), reads(3, TIME)]),
    (raw::__NR_cachestat, &[reads(1, Bytes(16)), writes(2, Bytes(40))]),
    (raw::__NR_fchmodat2, &[text(1)]),
    (raw::__NR_futex_wake, &[both(0, INT)]),
    (raw::__NR_futex_wait, &[both(0, INT), reads(4, TIME)]),
    (raw::__NR_futex_requeue, &[reads(0, WaitWordPair)]),
    (raw::__NR_statmount, &[reads(0, Bytes(32)), writes(1, Sized(2))]),
    (raw::__NR_listmount, &[reads(0, Bytes(32)), writes(1, Array(2, 8))]),
    (raw::__NR_lsm_get_self_attr, &[both(2, INT), writes(1, SizedBy(2))]),
    (raw::__NR_lsm_set_self_attr, &[reads(1, Sized(2))]),
    (raw::__NR_lsm_list_modules, &[both(1, INT), writes(0, SizedBy(1))]),
    (raw::__NR_setxattrat, &[text(1), text(3), reads(4, Attribute)]),
    (raw::__NR_getxattrat, &[text(1), text(3), writes(4, Attribute)]),
    (raw::__NR_listxattrat, &[text(1), writes(3, Sized(4))]),
    (raw::__NR_removexattrat, &[text(1), text(3)]),
];

/// Calls that have no address among their arguments, or none that the kernel looks at.
const WITHOUT: &[u32] = &[
    raw::__NR_close,
    raw::__NR_lseek,
    raw::__NR_mmap,
    raw::__NR_mprotect,
    raw::__NR_munmap,
    raw::__NR_brk,
    raw::__NR_rt_sigreturn,
    raw::__NR_sched_yield,
    raw::__NR_mremap,
    raw::__NR_msync,
    raw::__NR_madvise,
    raw::__NR_shmget,
    raw::__NR_shmat,
    raw::__NR_dup,
    raw::__NR_dup2,
    raw::__NR_pause,
    raw::__NR_alarm,
    raw::__NR_getpid,
    raw::__NR_socket,
    raw::__NR_shutdown,
    raw::__NR_listen,
    raw::__NR_fork,
    raw::__NR_vfork,
    raw::__NR_exit,
    raw::__NR_kill,
    raw::__NR_semget,
    raw::__NR_shmdt,
    raw::__NR_msgget,
    raw::__NR_flock,
    raw::__NR_fsync,
    raw::__NR_fdatasync,
    raw::__NR_ftruncate,
    raw::__NR_fchdir,
    raw::__NR_fchmod,
    raw::__NR_fchown,
    raw::__NR_umask,
    raw::__NR_getuid,
    raw::__NR_getgid,
    raw::__NR_setuid,
    raw::__NR_setgid,
    raw::__NR_geteuid,
    raw::__NR_getegid,
    raw::__NR_setpgid,
    raw::__NR_getppid,
    raw::__NR_getpgrp,
    raw::__NR_setsid,
    raw::__NR_setreuid,
    raw::__NR_setregid,
    raw::__NR_setresuid,
    raw::__NR_setresgid,
    raw::__NR_getpgid,
    raw::__NR_setfsuid,
    raw::__NR_setfsgid,
    raw::__NR_getsid,
    raw::__NR_personality,
    raw::__NR_getpriority,
    raw::__NR_setpriority,
    raw::__NR_sched_getscheduler,
    raw::__NR_sched_get_priority_max,
    raw::__NR_sched_get_priority_min,
    raw::__NR_mlock,
    raw::__NR_munlock,
    raw::__NR_mlockall,
    raw::__NR_munlockall,
    raw::__NR_vhangup,
    raw::__NR_sync,
    raw::__NR_iopl,
    raw::__NR_ioperm,
    raw::__NR_gettid,
    raw::__NR_readahead,
    raw::__NR_tkill,
    raw::__NR_io_destroy,
    raw::__NR_epoll_create,
    raw::__NR_remap_file_pages,
    raw::__NR_restart_syscall,
    raw::__NR_fadvise64,
    raw::__NR_timer_getoverrun,
    raw::__NR_timer_delete,
    raw::__NR_exit_group,
    raw::__NR_tgkill,
    raw::__NR_ioprio_set,
    raw::__NR_ioprio_get,
    raw::__NR_inotify_init,
    raw::__NR_inotify_rm_watch,
    raw::__NR_unshare,
    raw::__NR_tee,
    raw::__NR_sync_file_range,
    raw::__NR_timerfd_create,
    raw::__NR_eventfd,
    raw::__NR_fallocate,
    raw::__NR_eventfd2,
    raw::__NR_epoll_create1,
    raw::__NR_dup3,
    raw::__NR_inotify_init1,
    raw::__NR_fanotify_init,
    raw::__NR_syncfs,
    raw::__NR_setns,
    raw::__NR_userfaultfd,
    raw::__NR_membarrier,
    raw::__NR_mlock2,
    raw::__NR_pkey_mprotect,
    raw::__NR_pkey_alloc,
    raw::__NR_pkey_free,
    raw::__NR_fsmount,
    raw::__NR_pidfd_open,
    raw::__NR_close_range,
    raw::__NR_pidfd_getfd,
    raw::__NR_landlock_restrict_self,
    raw::__NR_memfd_secret,
    raw::__NR_process_mrelease,
    raw::__NR_set_mempolicy_home_node,
    raw::__NR_map_shadow_stack,
    raw::__NR_mseal,
];

/// Returns the addresses that a call is given, or `None` if this table doesn't know the call.
pub fn pointers(call: usize) -> Option<&'static [Pointer]> {
    let number = u32::try_from(call).ok()?;
    match TABLE.binary_search_by_key(&number, |(number, _)| *number) {
        Ok(at) => Some(TABLE[at].1),
        Err(_) => WITHOUT.binary_search(&number).ok().map(|_| [].as_slice()),
    }
}

// The tables are searched by halving.
const _: () = {
    let mut at = 1;
    while at < TABLE.len() {
        assert!(TABLE[at - 1].0 < TABLE[at].0, "calls are in the order of their numbers");
        at += 1;
    }
    at = 1;
    while at < WITHOUT.len() {
        assert!(WITHOUT[at - 1] < WITHOUT[at], "calls are in the order of their numbers");
        at += 1;
    }
};

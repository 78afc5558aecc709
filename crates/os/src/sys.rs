//! System calls as the kernel sees them: six words in, one word out.
//!
//! Used for calls whose arguments come from the program (the hooks pass the arguments on unchanged), for
//! ioctls, and for calls that no library wraps. All other calls go through `rustix`.
// UNSAFETY: a system call is an instruction.

use crate::errno::returned;
use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

pub use crate::errno::Errno;

/// Numbers of the calls that are passed on.
pub mod number {
    #![allow(missing_docs, reason = "they are the kernel's names")]
    use linux_raw_sys::general as raw;
    pub const MMAP: usize = raw::__NR_mmap as usize;
    pub const MUNMAP: usize = raw::__NR_munmap as usize;
    pub const MREMAP: usize = raw::__NR_mremap as usize;
    pub const MPROTECT: usize = raw::__NR_mprotect as usize;
    pub const PKEY_MPROTECT: usize = raw::__NR_pkey_mprotect as usize;
    pub const MADVISE: usize = raw::__NR_madvise as usize;
    pub const MSEAL: usize = raw::__NR_mseal as usize;
    pub const SHMAT: usize = raw::__NR_shmat as usize;
    pub const SHMDT: usize = raw::__NR_shmdt as usize;
    pub const MSYNC: usize = raw::__NR_msync as usize;
    pub const MINCORE: usize = raw::__NR_mincore as usize;
    pub const BRK: usize = raw::__NR_brk as usize;
    pub const MLOCK: usize = raw::__NR_mlock as usize;
    pub const MLOCK2: usize = raw::__NR_mlock2 as usize;
    pub const MUNLOCK: usize = raw::__NR_munlock as usize;
    pub const MLOCKALL: usize = raw::__NR_mlockall as usize;
    pub const MUNLOCKALL: usize = raw::__NR_munlockall as usize;
    pub const IOCTL: usize = raw::__NR_ioctl as usize;
    pub const USERFAULTFD: usize = raw::__NR_userfaultfd as usize;
    pub const CLOSE_RANGE: usize = raw::__NR_close_range as usize;
    pub const RT_SIGPROCMASK: usize = raw::__NR_rt_sigprocmask as usize;
    pub const RT_SIGACTION: usize = raw::__NR_rt_sigaction as usize;
    pub const RT_SIGRETURN: usize = raw::__NR_rt_sigreturn as usize;
    pub const RT_TGSIGQUEUEINFO: usize = raw::__NR_rt_tgsigqueueinfo as usize;
    pub const RT_SIGPENDING: usize = raw::__NR_rt_sigpending as usize;
    pub const SIGALTSTACK: usize = raw::__NR_sigaltstack as usize;
    pub const FORK: usize = raw::__NR_fork as usize;
    pub const VFORK: usize = raw::__NR_vfork as usize;
    pub const CLONE: usize = raw::__NR_clone as usize;
    pub const CLONE3: usize = raw::__NR_clone3 as usize;
    pub const EXECVE: usize = raw::__NR_execve as usize;
    pub const EXECVEAT: usize = raw::__NR_execveat as usize;
    pub const PROCESS_MADVISE: usize = raw::__NR_process_madvise as usize;
    pub const PROCESS_VM_READV: usize = raw::__NR_process_vm_readv as usize;
    pub const PROCESS_VM_WRITEV: usize = raw::__NR_process_vm_writev as usize;
    pub const READ: usize = raw::__NR_read as usize;
    pub const PREAD64: usize = raw::__NR_pread64 as usize;
    pub const PWRITE64: usize = raw::__NR_pwrite64 as usize;
    pub const GETTID: usize = raw::__NR_gettid as usize;
    pub const SCHED_GETATTR: usize = raw::__NR_sched_getattr as usize;
    pub const SCHED_SETATTR: usize = raw::__NR_sched_setattr as usize;
    pub const GETPID: usize = raw::__NR_getpid as usize;
    pub const KILL: usize = raw::__NR_kill as usize;
    pub const TGKILL: usize = raw::__NR_tgkill as usize;
    pub const PRCTL: usize = raw::__NR_prctl as usize;
    pub const EXIT: usize = raw::__NR_exit as usize;
    pub const EXIT_GROUP: usize = raw::__NR_exit_group as usize;
    pub const GETCPU: usize = raw::__NR_getcpu as usize;
    pub const GETRANDOM: usize = raw::__NR_getrandom as usize;
    pub const GETRUSAGE: usize = raw::__NR_getrusage as usize;
    pub const FCNTL: usize = raw::__NR_fcntl as usize;
    pub const IO_SETUP: usize = raw::__NR_io_setup as usize;
    pub const IO_DESTROY: usize = raw::__NR_io_destroy as usize;
    pub const IO_SUBMIT: usize = raw::__NR_io_submit as usize;
    pub const IO_GETEVENTS: usize = raw::__NR_io_getevents as usize;
}

/// Makes a system call and returns the kernel's word, negative errors included.
///
/// # Safety
/// As the call itself demands.
#[inline]
pub unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the instruction clobbers rcx and r11 only. What the call does to memory is the caller's
    // promise.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Turns the kernel's word into a result.
pub const fn check(word: isize) -> Result<usize, Errno> {
    if word < 0 && word >= -4095 { Err(Errno(-word as i32)) } else { Ok(word as usize) }
}

/// Makes an ioctl.
///
/// # Safety
/// As the request demands of `argument`.
pub unsafe fn ioctl(fd: i32, request: u32, argument: usize) -> Result<usize, Errno> {
    // SAFETY: the callee's condition is the caller's promise.
    check(unsafe { call(number::IOCTL, [fd as usize, request as usize, argument, 0, 0, 0]) })
}

/// Returns a number that nobody can guess. Fails where the kernel has no random bytes yet, or where the call
/// isn't allowed.
pub fn random_word() -> Result<u64, Errno> {
    const NONBLOCK: usize = 1;
    let mut word = [0_u8; 8];
    let arguments = [word.as_mut_ptr() as usize, word.len(), NONBLOCK, 0, 0, 0];
    // SAFETY: the kernel writes `word.len()` bytes to `word`.
    match check(unsafe { call(number::GETRANDOM, arguments) })? {
        8 => Ok(u64::from_ne_bytes(word)),
        // The kernel gives eight bytes whole or not at all.
        _ => Err(Errno::EAGAIN),
    }
}

/// Ends the whole process.
pub fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: the call takes no pointer and doesn't return.
        unsafe { call(number::EXIT_GROUP, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// The signals that the thread blocked before a change of its mask.
#[derive(Clone, Copy)]
pub struct SignalMask(u64);

impl SignalMask {
    /// Returns the mask with one bit for each signal.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the mask with the signals of `bits` blocked as well.
    #[must_use]
    pub const fn with(self, bits: u64) -> SignalMask {
        SignalMask(self.0 | bits)
    }
}

/// The signals that [`block_signals`] blocks: all but those that must get through. In `signal` mode a fault
/// or a stopped call of a thread that blocks its signal ends the process. Until the program's threads are
/// armed, the signal that arms them must get through, too.
static BLOCKED: AtomicU64 = AtomicU64::new(u64::MAX);

/// Makes [`block_signals`] leave open exactly the signals in `mask` from now on.
pub fn keep_open(mask: u64) {
    BLOCKED.store(!mask, Ordering::Relaxed);
}

/// Returns whether [`block_signals`] leaves all signals of `mask` open.
pub fn is_kept_open(mask: u64) -> bool {
    BLOCKED.load(Ordering::Relaxed) & mask == 0
}

/// Unblocks the signals of [`keep_open`] in the calling thread, even if the thread has blocked them before.
pub fn open_what_is_kept_open() {
    open_signals(!BLOCKED.load(Ordering::Relaxed));
}

/// Unblocks the signals in `mask` in the calling thread.
pub fn open_signals(mask: u64) {
    change_mask(1 /* SIG_UNBLOCK */, &raw const mask as usize, 0);
}

/// Blocks signals in the calling thread, so that no handler of the program runs on top of the engine while a
/// lock is held. Blocking doesn't delay the thread's own faults.
pub fn block_signals() -> SignalMask {
    block(BLOCKED.as_ptr() as usize)
}

/// Blocks all signals. A new engine thread begins with this mask, because it must never get a signal that was
/// sent to the process.
pub fn block_all_signals() -> SignalMask {
    static ALL: u64 = u64::MAX;
    block(&raw const ALL as usize)
}

fn block(set: usize) -> SignalMask {
    let mut old = 0_u64;
    // The thread's stack may be evicted memory of the program, where the kernel can't write. So the first
    // call reads the old mask and the second changes it. An error after a change would lose the old mask.
    change_mask(0 /* SIG_BLOCK */, 0, &raw mut old as usize);
    change_mask(0, set, 0);
    SignalMask(old)
}

/// Undoes [`block_signals`] or [`block_all_signals`] by unblocking every signal that wasn't blocked before.
/// Signals that were blocked before stay as they are, because they may have been unblocked for good
/// meanwhile.
pub fn restore_signals(mask: SignalMask) {
    let open = !mask.0;
    change_mask(1 /* SIG_UNBLOCK */, &raw const open as usize, 0);
}

/// Calls `rt_sigprocmask` until it succeeds or fails with an error other than EFAULT.
fn change_mask(how: usize, set: usize, old: usize) {
    let arguments = [how, set, old, size_of::<u64>(), 0, 0];
    // SAFETY: each pointer is null or points to an 8-byte set of the callers, and the call is told that size.
    while unsafe { call(number::RT_SIGPROCMASK, arguments) } == returned::EFAULT {
        // SAFETY: as above, and a value written here is overwritten by the next call. Touching the set brings
        // its page back.
        unsafe {
            if set != 0 {
                (set as *const u64).read_volatile();
            }
            if old != 0 {
                (old as *mut u64).write_volatile(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_words_become_errno_and_addresses_do_not() {
        assert_eq!(check(-14), Err(Errno::EFAULT));
        assert_eq!(check(-4096), Ok((-4096_isize) as usize));
        // SAFETY: an ioctl on a descriptor that doesn't exist touches no memory.
        assert_eq!(unsafe { ioctl(-1, 0, 0) }, Err(Errno::EBADF));
    }
}

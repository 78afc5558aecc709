//! System calls as the kernel sees them: six words in, one word out.
//!
//! For calls whose arguments come from the program (the hooks pass them on unchanged), for ioctls, and for
//! what no library wraps. Everything else goes through `rustix`.
// UNSAFETY: a system call is an instruction.

use core::arch::asm;

/// A failed call's error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

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
    pub const FORK: usize = raw::__NR_fork as usize;
    pub const CLONE: usize = raw::__NR_clone as usize;
    pub const EXIT: usize = raw::__NR_exit as usize;
    pub const EXIT_GROUP: usize = raw::__NR_exit_group as usize;
    pub const GETCPU: usize = raw::__NR_getcpu as usize;
    pub const FCNTL: usize = raw::__NR_fcntl as usize;
}

/// Makes a system call and returns the kernel's word: negative errors included.
///
/// # Safety
/// As the call itself demands.
#[inline]
pub unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the instruction clobbers rcx and r11 only; what it does to memory is the caller's promise.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
            in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// The kernel's word as a result.
pub const fn check(word: isize) -> Result<usize, Errno> {
    if word < 0 && word >= -4095 { Err(Errno(-word as i32)) } else { Ok(word as usize) }
}

/// An ioctl.
///
/// # Safety
/// As the request demands of `argument`.
pub unsafe fn ioctl(fd: i32, request: u32, argument: usize) -> Result<usize, Errno> {
    // SAFETY: passed on to the caller.
    check(unsafe { call(number::IOCTL, [fd as usize, request as usize, argument, 0, 0, 0]) })
}

/// Ends the whole process.
pub fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: takes no pointer; doesn't return.
        unsafe { call(number::EXIT_GROUP, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// The signals of this thread that were blocked before [`block_signals`].
#[derive(Clone, Copy)]
pub struct SignalMask(u64);

/// Blocks every signal that can be blocked in the calling thread, so that no handler of the program runs on
/// top of ours while a lock is held. Faults of the thread itself are not delayed by this.
pub fn block_signals() -> SignalMask {
    let (all, mut old) = (u64::MAX, 0_u64);
    let arguments = [0 /* SIG_BLOCK */, &raw const all as usize, &raw mut old as usize, 8, 0, 0];
    // SAFETY: both pointers are to 8-byte sets on our stack, the size that the call is told.
    unsafe { call(number::RT_SIGPROCMASK, arguments) };
    SignalMask(old)
}

/// Undoes [`block_signals`].
pub fn restore_signals(mask: SignalMask) {
    let arguments = [2 /* SIG_SETMASK */, &raw const mask.0 as usize, 0, 8, 0, 0];
    // SAFETY: the set is on our stack; no old set is asked for.
    unsafe { call(number::RT_SIGPROCMASK, arguments) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_words_become_errno_and_addresses_do_not() {
        assert_eq!(check(-14), Err(Errno(14)));
        assert_eq!(check(-4096), Ok((-4096_isize) as usize));
        // SAFETY: an ioctl on a descriptor that doesn't exist touches nothing.
        assert_eq!(unsafe { ioctl(-1, 0, 0) }, Err(Errno(9)));
    }
}

//! Signals as the kernel delivers them: handlers of ours that libc doesn't know, and what a handler is told.
//!
//! A handler of the engine's may run anywhere in the program, also where libc is in the middle of something. So it
//! is installed by the bare system call, and it returns through a restorer of ours.
// UNSAFETY: a handler runs on top of whatever its thread was doing; what it is given are raw structures.

use crate::sys::{self, Errno, number};
use core::arch::naked_asm;

/// A memory access that can't go on; `signal` mode's faults arrive as this.
pub const SIGBUS: u32 = 7;
/// What a handler looks like. The context is the thread's, as it goes on when the handler returns.
pub type Handler = unsafe extern "C" fn(signal: i32, info: *mut Info, context: *mut Context);

/// What happened: the head of the kernel's `siginfo_t`, for signals that are about an address.
#[repr(C)]
pub struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    address: usize,
}

impl Info {
    /// `BUS_ADRERR`: nothing could be had for this address. userfaultfd says so of a page that we are to bring.
    const BUS_ADDRESS: i32 = 2;

    /// The address that the signal is about, if it is about one.
    pub const fn address(&self) -> usize {
        self.address
    }

    /// The address of an access that found nothing; none if the signal is about something else, or was sent.
    pub const fn missing_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGBUS && self.code == Info::BUS_ADDRESS { Some(self.address) } else { None }
    }
}

/// A thread as it was interrupted: the head of the kernel's `ucontext_t` on x86-64.
#[repr(C)]
pub struct Context {
    flags: u64,
    link: usize,
    stack: [usize; 3],
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags, segments.
    registers: [u64; 19],
    /// Of the exception: bit 0 the page was there, bit 1 it was a write.
    error: u64,
}

// As in the kernel's headers: the registers begin after 40 bytes, the error word is the 20th.
const _: () = assert!(core::mem::offset_of!(Context, error) == 40 + 19 * 8);

impl Context {
    /// Whether the access that raised the signal was a write.
    pub const fn was_write(&self) -> bool {
        self.error & 2 != 0
    }

    /// Whether a page was there, which didn't allow the access.
    pub const fn was_protection(&self) -> bool {
        self.error & 1 != 0
    }
}

/// A signal's disposition, as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

const SA_SIGINFO: u64 = 4;
const SA_ONSTACK: u64 = 0x0800_0000;
const SA_RESTORER: u64 = 0x0400_0000;

impl Action {
    /// A handler of ours: on the thread's alternate stack if it has one, with every other signal blocked meanwhile.
    pub fn of(handler: Handler) -> Action {
        Action {
            handler: handler as *const () as usize,
            flags: SA_SIGINFO | SA_ONSTACK | SA_RESTORER,
            restorer: return_from_signal as *const () as usize,
            mask: u64::MAX,
        }
    }
}

/// Where a handler returns to.
#[unsafe(naked)]
unsafe extern "C" fn return_from_signal() {
    naked_asm!("mov eax, {number}", "syscall", "ud2", number = const number::RT_SIGRETURN)
}

/// Installs a disposition and returns the one before.
///
/// # Safety
/// A handler must be able to run on top of anything its thread may be doing.
pub unsafe fn set_action(signal: u32, action: &Action) -> Result<Action, Errno> {
    let mut before = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let arguments = [signal as usize, &raw const *action as usize, &raw mut before as usize, 8, 0, 0];
    // SAFETY: both are the kernel's structure, with a mask of 8 bytes; the handler is the caller's promise.
    sys::check(unsafe { sys::call(number::RT_SIGACTION, arguments) }).map(|_| before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::os::fd::AsRawFd;

    /// Address, then 1 for a write plus 2 for a page that was there.
    static SEEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    static FILE: AtomicU64 = AtomicU64::new(0);

    /// Notes what it is told, and makes the file long enough.
    unsafe extern "C" fn note_and_grow(_: i32, info: *mut Info, context: *mut Context) {
        // SAFETY: the kernel's own structures, for this call.
        let (info, context) = unsafe { (&*info, &*context) };
        SEEN[0].store(info.missing_at().unwrap_or(0) as u64, Ordering::SeqCst);
        let how = u64::from(context.was_write()) + 2 * u64::from(context.was_protection());
        SEEN[1].store(how, Ordering::SeqCst);
        const FTRUNCATE: usize = 77;
        // SAFETY: makes the test's file longer.
        unsafe { sys::call(FTRUNCATE, [FILE.load(Ordering::SeqCst) as usize, 8192, 0, 0, 0, 0]) };
    }

    #[test]
    fn handler_learns_address_and_kind_of_access_and_the_thread_goes_on() {
        let file = tempfile();
        file.set_len(1).unwrap();
        FILE.store(file.as_raw_fd() as u64, Ordering::SeqCst);
        let (protection, flags) =
            (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::SHARED);
        // SAFETY: the file is open as long as the test runs.
        let descriptor = unsafe { rustix::fd::BorrowedFd::borrow_raw(file.as_raw_fd()) };
        // SAFETY: a new mapping of the test's file.
        let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), 8192, protection, flags, descriptor, 0) };
        let second = base.unwrap().cast::<u8>().wrapping_add(4096 + 24);
        // SAFETY: the handler touches only statics and the file.
        let before = unsafe { set_action(SIGBUS, &Action::of(note_and_grow)) }.unwrap();
        // SAFETY: inside the mapping; beyond the file's end until the handler has run.
        unsafe { second.write_volatile(7) };
        assert_eq!(SEEN[0].load(Ordering::SeqCst), second as u64);
        assert_eq!(SEEN[1].load(Ordering::SeqCst), 1, "a write to a page that isn't there");
        // SAFETY: as above, and it is inside the file now.
        assert_eq!(unsafe { second.read_volatile() }, 7);
        file.set_len(1).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { second.read_volatile() }, 0);
        assert_eq!(SEEN[1].load(Ordering::SeqCst), 0, "a read of a page that isn't there");
        // SAFETY: what was there before.
        unsafe { set_action(SIGBUS, &before) }.unwrap();
    }

    fn tempfile() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("farpage-signal-{}", std::process::id()));
        let file = std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path);
        std::fs::remove_file(path).unwrap();
        file.unwrap()
    }
}

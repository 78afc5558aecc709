//! Signals as the kernel delivers them: handlers that libc doesn't know, and the structures that a handler is
//! given.
//!
//! A handler of the engine may run anywhere in the program, even in the middle of a libc function. Therefore
//! the handler is installed by the bare system call, and returns through a restorer of this file.
// UNSAFETY: a handler runs on top of whatever its thread was doing, and the kernel gives it raw structures.

use crate::sys::{self, Errno, number};
use core::arch::naked_asm;

/// A memory access that can't go on. Faults arrive as this signal in `signal` mode.
pub const SIGBUS: u32 = 7;
/// An access that isn't allowed, or that found no mapping.
pub const SIGSEGV: u32 = 11;
/// A system call that must not be made as it is (see [`crate::dispatch`]).
pub const SIGSYS: u32 = 31;
/// libc's own signal for its set-user-id calls. No program can block it through libc, so the signal reaches
/// every thread.
pub const SIGSETXID: u32 = 33;
/// libc's own signal for ending threads. No program can block it through libc either.
pub const SIGCANCEL: u32 = 32;

/// Returns a signal's bit in a mask.
pub const fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// The type of a handler. `context` holds the state with which the thread goes on when the handler returns.
pub type Handler = unsafe extern "C" fn(signal: i32, info: *mut Info, context: *mut Context);

/// Information about a signal: the head of the kernel's `siginfo_t`. The fields serve signals that are about
/// an address, about a system call, or that carry a word.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    /// The address that the signal is about; process and user of the sender, if the signal was sent.
    address: usize,
    /// The word that was sent along. For a stopped call: the call's number, and in the upper half the machine
    /// type that the call is for.
    value: usize,
    rest: [u64; 12],
}

const _: () = assert!(size_of::<Info>() == 128);

impl Info {
    /// `BUS_ADRERR`: the kernel has no memory for this address. userfaultfd uses this code for a page that
    /// Farpage must bring in.
    const BUS_ADDRESS: i32 = 2;
    /// `SEGV_MAPERR`: there is no mapping.
    const NOT_MAPPED: i32 = 1;
    /// `SEGV_ACCERR`: there is a mapping, but it doesn't allow the access.
    const NOT_ALLOWED: i32 = 2;
    /// `SYS_USER_DISPATCH`: a system call that was stopped because its thread is armed.
    const USER_DISPATCH: i32 = 2;
    /// `SI_QUEUE`: sent with a word.
    const QUEUED: i32 = -1;
    /// `AUDIT_ARCH_X86_64`: not a call of 32-bit code.
    const MACHINE: usize = 0xc000_003e;

    /// Returns the information of a signal that the kernel itself raises as a last resort (`SI_KERNEL`).
    pub const fn by_kernel(signal: u32) -> Info {
        Info { signal: signal as i32, errno: 0, code: 0x80, padding: 0, address: 0, value: 0, rest: [0; 12] }
    }

    /// Returns the number of a stopped system call. The inner option is none if the call is one of 32-bit
    /// code. The outer option is none if the signal isn't about a stopped call, or was sent.
    pub const fn stopped_call(&self) -> Option<Option<usize>> {
        if self.signal as u32 != SIGSYS || self.code != Info::USER_DISPATCH {
            return None;
        }
        Some(if self.value >> 32 == Info::MACHINE { Some(self.value as u32 as usize) } else { None })
    }

    /// Returns the address that the signal is about, if it is about one.
    pub const fn address(&self) -> usize {
        self.address
    }

    /// Returns the address of an access that found no memory; none for any other signal, or if the signal was
    /// sent.
    pub const fn missing_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGBUS && self.code == Info::BUS_ADDRESS { Some(self.address) } else { None }
    }

    /// Returns the address of an access that its mapping doesn't allow; none for any other signal.
    pub const fn forbidden_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGSEGV && self.code == Info::NOT_ALLOWED {
            Some(self.address)
        } else {
            None
        }
    }

    /// Returns the address of an access where there is no mapping; none for any other signal.
    pub const fn unmapped_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGSEGV && self.code == Info::NOT_MAPPED { Some(self.address) } else { None }
    }

    /// Returns the signal's number.
    pub const fn signal(&self) -> u32 {
        self.signal as u32
    }

    /// Returns whether a process sent the signal. If so, no access or call of the thread would raise the
    /// signal again.
    pub const fn was_sent(&self) -> bool {
        self.code <= 0
    }

    /// Returns the word that was sent along, if one was.
    pub const fn word(&self) -> Option<usize> {
        if self.code == Info::QUEUED { Some(self.value) } else { None }
    }
}

/// Sends a signal with a word to one thread of this process.
pub fn send_to_thread(process: u32, thread: u32, signal: u32, word: usize) -> Result<(), Errno> {
    let sender = process as usize;
    let info = Info {
        signal: signal as i32,
        errno: 0,
        code: Info::QUEUED,
        padding: 0,
        address: sender,
        value: word,
        rest: [0; 12],
    };
    let arguments = [process as usize, thread as usize, signal as usize, (&raw const info) as usize, 0, 0];
    // SAFETY: the kernel reads a siginfo_t, and `info` has its size.
    sys::check(unsafe { sys::call(number::RT_TGSIGQUEUEINFO, arguments) }).map(|_| ())
}

/// Sends the calling thread a signal once more, with its first information. The kernel lets a thread send
/// itself any information.
pub fn send_again(info: &Info) {
    // SAFETY: both calls take no argument.
    let [process, thread] = [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
    let (signal, info) = (info.signal(), core::ptr::from_ref(info) as usize);
    // SAFETY: the kernel reads a siginfo_t, and `info` has its size.
    unsafe {
        sys::call(number::RT_TGSIGQUEUEINFO, [process as usize, thread as usize, signal as usize, info, 0, 0])
    };
}

/// A thread's state when it was interrupted: the head of the kernel's `ucontext_t` on x86-64. The thread goes
/// on with what is changed here.
#[repr(C)]
pub struct Context {
    flags: u64,
    link: usize,
    /// The alternate stack that the thread has once the handler has returned.
    pub stack: AlternateStack,
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags, segments.
    registers: [usize; 19],
    /// The page fault's error code. Bit 0: the page was there. Bit 1: the access was a write.
    error: u64,
    trap: u64,
    old_mask: u64,
    address: u64,
    /// Where the vector registers' state lies. With 0 the kernel clears the registers.
    pub float_state: usize,
    reserved: [u64; 8],
    /// The signals that are blocked once the handler has returned.
    pub blocked: u64,
}

// As in the kernel's headers: the registers begin at byte 40, and the error word is the 20th word from there.
// The mask begins 256 bytes after byte 40.
const _: () = assert!(core::mem::offset_of!(Context, error) == 40 + 19 * 8);
const _: () = assert!(core::mem::offset_of!(Context, blocked) == 40 + 256 && size_of::<Context>() == 304);

/// Registers by their index in [`Context`].
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
#[expect(missing_docs, reason = "they are the processor's names")]
pub enum Register {
    R8 = 0,
    R9 = 1,
    R10 = 2,
    Rdi = 8,
    Rsi = 9,
    Rdx = 12,
    Rax = 13,
    Rcx = 14,
    Rsp = 15,
    Rip = 16,
    Flags = 17,
    Segments = 18,
}

impl Context {
    /// Returns the byte offset of a register in the context.
    pub const fn offset_of(register: Register) -> usize {
        core::mem::offset_of!(Context, registers) + size_of::<usize>() * register as usize
    }

    /// Returns a register's content.
    pub const fn register(&self, register: Register) -> usize {
        self.registers[register as usize]
    }

    /// Changes a register.
    pub const fn set_register(&mut self, register: Register, value: usize) {
        self.registers[register as usize] = value;
    }

    /// Returns the alternate stack that the thread had when the signal was delivered. The kernel may have
    /// disarmed the stack at that moment.
    pub const fn alternate(&self) -> AlternateStack {
        let AlternateStack { start, flags, bytes } = self.stack;
        // A thread may never have had an alternate stack since its program began. The kernel then leaves out
        // the flag `SS_DISABLE`, and `sigaltstack` refuses the structure.
        if bytes == 0 {
            return AlternateStack::NONE;
        }
        AlternateStack::from_words([start as u64, flags as u64, bytes as u64])
    }

    /// Size of the instruction `syscall` in bytes.
    pub const CALL_BYTES: usize = 2;

    /// Makes the thread repeat the system call that it has just made, with this number.
    pub const fn call_again(&mut self, number: usize) {
        self.set_register(Register::Rax, number);
        let after = self.register(Register::Rip);
        self.set_register(Register::Rip, after - Context::CALL_BYTES);
    }

    /// Returns whether the access that raised the signal was a write.
    pub const fn was_write(&self) -> bool {
        self.error & 2 != 0
    }

    /// Returns whether the page was there and didn't allow the access.
    pub const fn was_protection(&self) -> bool {
        self.error & 1 != 0
    }
}

/// A signal's disposition, as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Action {
    /// The handler's address, 0 for the kernel's default, or 1 to ignore the signal.
    pub handler: usize,
    /// `SA_*`.
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: usize,
    /// The signals that are blocked while the handler runs.
    pub mask: u64,
}

const SA_SIGINFO: u64 = 4;
const SA_ONSTACK: u64 = 0x0800_0000;
const SA_RESTART: u64 = 0x1000_0000;
const SA_NODEFER: u64 = 0x4000_0000;
const SA_RESETHAND: u64 = 0x8000_0000;
const SA_RESTORER: u64 = 0x0400_0000;
/// Flags about children that stop or end (`SA_NOCLDSTOP`, `SA_NOCLDWAIT`) and about tagged addresses
/// (`SA_EXPOSE_TAGBITS`).
const SA_OTHERS: u64 = 1 | 2 | 0x800;
const LEFT_TO_THE_KERNEL: u64 = SA_OTHERS | SA_RESTART | SA_RESETHAND;
const KNOWN: u64 = LEFT_TO_THE_KERNEL | SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER;

impl Action {
    /// The kernel's default disposition.
    pub const DEFAULT: Action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };

    /// Returns the disposition for a handler of the engine. The handler runs on the thread's alternate stack
    /// if there is one, with all signals but `open` blocked. System calls that the handler interrupts go on.
    pub fn of(handler: Handler, open: u64) -> Action {
        Action {
            handler: handler as *const () as usize,
            flags: SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER | SA_RESTORER,
            restorer: return_address(),
            mask: !open,
        }
    }

    /// Returns the disposition for a handler of the engine that stands in for this one. The kernel still does
    /// the rest that the program asked for: restarts, resets, and the flags about children and tagged
    /// addresses stay.
    #[must_use]
    pub fn through(&self, handler: Handler, open: u64) -> Action {
        let ours = Action::of(handler, open);
        Action { flags: ours.flags & !SA_RESTART | self.flags & LEFT_TO_THE_KERNEL, ..ours }
    }

    /// Returns whether the handler is one of the engine, or was until the kernel reset the disposition.
    pub fn is_of_ours(&self) -> bool {
        self.restorer == return_address()
    }

    /// Returns the disposition as the kernel stores it: without flags that the kernel doesn't know, and
    /// without the signals that can't be blocked.
    #[must_use]
    pub const fn kept(&self) -> Action {
        Action { flags: self.flags & KNOWN, mask: self.mask & !(bit(9) | bit(19)), ..*self }
    }

    /// Returns the same disposition without the alternate stack: for threads that have no alternate stack of
    /// the engine yet.
    #[must_use]
    pub const fn on_any_stack(self) -> Action {
        Action { flags: self.flags & !SA_ONSTACK, ..self }
    }

    /// Reads a disposition from the kernel's words.
    pub const fn from_words(words: [u64; 4]) -> Action {
        Action { handler: words[0] as usize, flags: words[1], restorer: words[2] as usize, mask: words[3] }
    }

    /// Returns the words that [`Action::from_words`] reads.
    pub const fn to_words(&self) -> [u64; 4] {
        [self.handler as u64, self.flags, self.restorer as u64, self.mask]
    }

    /// Returns the bytes as the kernel writes them.
    pub fn to_bytes(&self) -> [u8; 32] {
        words_to_bytes(self.to_words())
    }

    /// Returns whether the disposition is a handler function.
    pub const fn is_handler(&self) -> bool {
        self.handler > 1
    }

    /// Returns whether the disposition becomes the default again after one signal.
    pub const fn is_once(&self) -> bool {
        self.flags & SA_RESETHAND != 0
    }

    /// Returns whether system calls that the handler interrupts are restarted.
    pub const fn restarts(&self) -> bool {
        self.flags & SA_RESTART != 0
    }

    /// Returns whether the handler wants to run on the thread's alternate stack, if there is one.
    pub const fn wants_alternate_stack(&self) -> bool {
        self.flags & SA_ONSTACK != 0
    }

    /// Returns whether the signal is ignored.
    pub const fn is_ignored(&self) -> bool {
        self.handler == 1
    }

    /// Returns the signals that are blocked while the handler runs for `signal`, in a thread that blocks
    /// `blocked`.
    pub const fn blocks(&self, signal: u32, blocked: u64) -> u64 {
        let own = if self.flags & SA_NODEFER == 0 { bit(signal) } else { 0 };
        blocked | self.mask | own
    }
}

/// The restorer, to whose second byte a handler returns. Unwinders recognise a signal's frame by exactly
/// these bytes, and look up the byte before them. Therefore that byte must belong to no other function.
#[unsafe(naked)]
unsafe extern "C" fn return_from_signal() {
    naked_asm!("nop", "mov rax, {number}", "syscall", "ud2", number = const number::RT_SIGRETURN)
}

fn return_address() -> usize {
    return_from_signal as *const () as usize + 1
}

/// Installs a disposition and returns the one before.
///
/// # Safety
/// A handler must be able to run on top of anything its thread may be doing.
pub unsafe fn set_action(signal: u32, action: &Action) -> Result<Action, Errno> {
    let mut before = Action::DEFAULT;
    let arguments = [signal as usize, &raw const *action as usize, &raw mut before as usize, 8, 0, 0];
    // SAFETY: both pointers are to the kernel's structure, with a mask of 8 bytes. The handler is the
    // caller's promise.
    sys::check(unsafe { sys::call(number::RT_SIGACTION, arguments) }).map(|_| before)
}

/// Returns the disposition of a signal.
pub fn action_of(signal: u32) -> Result<Action, Errno> {
    let mut action = Action::DEFAULT;
    // SAFETY: the pointer is to the kernel's structure, with a mask of 8 bytes. The call changes no
    // disposition.
    let asked =
        unsafe { sys::call(number::RT_SIGACTION, [signal as usize, 0, &raw mut action as usize, 8, 0, 0]) };
    sys::check(asked).map(|_| action)
}

/// The stack that a thread's handlers run on: the kernel's `stack_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlternateStack {
    /// The lowest address.
    pub start: usize,
    /// `SS_*`.
    pub flags: usize,
    /// The size in bytes.
    pub bytes: usize,
}

/// Returns the words' bytes as they lie in memory.
fn words_to_bytes<const N: usize, const BYTES: usize>(words: [u64; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

impl AlternateStack {
    /// Returns whether a stack pointer lies on this stack.
    pub const fn contains(&self, stack_pointer: usize) -> bool {
        stack_pointer > self.start && stack_pointer - self.start <= self.bytes
    }

    /// Returns whether the kernel would report the stack as in use. A stack that is disarmed when a handler
    /// begins is never reported so.
    pub const fn is_in_use(&self, stack_pointer: usize) -> bool {
        !self.is_put_away() && self.contains(stack_pointer)
    }

    /// Returns whether the thread has no alternate stack from a handler's beginning to its end.
    pub const fn is_put_away(&self) -> bool {
        self.flags & AlternateStack::AUTODISARM != 0
    }

    /// Returns the stack that the kernel would set for a program's request. EINVAL or ENOMEM means that the
    /// kernel would refuse.
    pub fn accepted(self) -> Result<AlternateStack, Errno> {
        const BYTES_MIN: usize = 2048;
        match self.flags & !AlternateStack::AUTODISARM {
            2 => Ok(AlternateStack { flags: self.flags, ..AlternateStack::NONE }),
            0 | 1 if self.bytes < BYTES_MIN => Err(Errno::ENOMEM),
            0 | 1 => Ok(AlternateStack { flags: self.flags & !AlternateStack::IN_USE, ..self }),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Reads a stack from the kernel's words. The upper half of the second word is padding.
    pub const fn from_words(words: [u64; 3]) -> AlternateStack {
        AlternateStack { start: words[0] as usize, flags: words[1] as u32 as usize, bytes: words[2] as usize }
    }

    /// Returns the bytes as the kernel writes them.
    pub fn to_bytes(&self) -> [u8; 24] {
        words_to_bytes([self.start as u64, self.flags as u64, self.bytes as u64])
    }

    /// `SS_AUTODISARM`.
    const AUTODISARM: usize = 1 << 31;
    /// `SS_ONSTACK`: the thread runs on the stack.
    pub const IN_USE: usize = 1;
    /// `SS_DISABLE`: the thread has no alternate stack.
    pub const NONE: AlternateStack = AlternateStack { start: 0, flags: 2, bytes: 0 };
}

/// Gives the calling thread another alternate stack and returns the one before. Fails with EPERM if the
/// thread runs on the old one.
///
/// # Safety
/// The memory must belong to this thread alone, as long as the thread lives or until the thread gets another
/// stack.
pub unsafe fn set_alternate_stack(stack: &AlternateStack) -> Result<AlternateStack, Errno> {
    let mut before = AlternateStack::NONE;
    let arguments = [&raw const *stack as usize, &raw mut before as usize, 0, 0, 0, 0];
    // SAFETY: both pointers are to the kernel's structure. The stack's memory is the caller's promise.
    sys::check(unsafe { sys::call(number::SIGALTSTACK, arguments) }).map(|_| before)
}

/// Does the same as [`set_alternate_stack`] for a handler that may itself run on the old alternate stack. The
/// kernel looks only at the stack pointer, so the function moves the stack pointer to the new stack for the
/// time of the call.
///
/// # Safety
/// As above. Nothing on the new stack may be in use. The code that the handler has interrupted may not run on
/// the old stack: that code would go on below frames of later handlers.
pub unsafe fn set_alternate_stack_on_top(stack: &AlternateStack) -> Result<(), Errno> {
    let top = (stack.start + stack.bytes) & !15;
    let result: isize;
    // SAFETY: the memory is the caller's promise. Both stack pointers are valid, and the old one is restored
    // right after the call.
    unsafe {
        core::arch::asm!("xchg rsp, {top}", "syscall", "xchg rsp, {top}", top = inout(reg) top => _,
            inlateout("rax") number::SIGALTSTACK as isize => result, in("rdi") &raw const *stack, in("rsi") 0,
            lateout("rcx") _, lateout("r11") _);
    }
    sys::check(result).map(|_| ())
}

/// Returns the calling thread's alternate stack.
pub fn alternate_stack() -> Result<AlternateStack, Errno> {
    let mut stack = AlternateStack::NONE;
    // SAFETY: the pointer is to the kernel's structure. The call changes no stack.
    let asked = unsafe { sys::call(number::SIGALTSTACK, [0, &raw mut stack as usize, 0, 0, 0, 0]) };
    sys::check(asked).map(|_| stack)
}

/// Returns the blocked signals after an `rt_sigprocmask`; none if `how` is no valid operation.
pub const fn change_blocked(blocked: u64, how: usize, set: u64) -> Option<u64> {
    // SIGKILL and SIGSTOP can't be blocked.
    let set = set & !(bit(9) | bit(19));
    match how as i32 {
        0 => Some(blocked | set),
        1 => Some(blocked & !set),
        2 => Some(set),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU64, Ordering};
    use std::os::fd::AsRawFd;

    /// The address of the last fault, then 1 for a write plus 2 for a page that was there.
    static SEEN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    static FILE: AtomicU64 = AtomicU64::new(0);

    /// Notes what the kernel reports, and makes the file long enough for the access.
    unsafe extern "C" fn note_and_grow(_: i32, info: *mut Info, context: *mut Context) {
        // SAFETY: the kernel's own structures, valid during this call.
        let (info, context) = unsafe { (&*info, &*context) };
        SEEN[0].store(info.missing_at().unwrap_or(0) as u64, Ordering::SeqCst);
        let how = u64::from(context.was_write()) + 2 * u64::from(context.was_protection());
        SEEN[1].store(how, Ordering::SeqCst);
        const FTRUNCATE: usize = 77;
        // SAFETY: the call makes the test's file longer and touches no memory.
        unsafe { sys::call(FTRUNCATE, [FILE.load(Ordering::SeqCst) as usize, 8192, 0, 0, 0, 0]) };
    }

    #[test]
    fn handler_learns_address_and_kind_of_access_and_the_thread_goes_on() {
        let file = tempfile();
        file.set_len(1).unwrap();
        FILE.store(file.as_raw_fd() as u64, Ordering::SeqCst);
        let (protection, flags) =
            (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::SHARED);
        // SAFETY: the file stays open as long as the test runs.
        let descriptor = unsafe { rustix::fd::BorrowedFd::borrow_raw(file.as_raw_fd()) };
        // SAFETY: the call makes a new mapping of the test's file and replaces none.
        let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), 8192, protection, flags, descriptor, 0) };
        let second = base.unwrap().cast::<u8>().wrapping_add(4096 + 24);
        // SAFETY: the handler touches only statics and the file.
        let before = unsafe { set_action(SIGBUS, &Action::of(note_and_grow, 0)) }.unwrap();
        // SAFETY: the address is inside the mapping. The address lies beyond the file's end until the handler
        // has run.
        unsafe { second.write_volatile(7) };
        assert_eq!(SEEN[0].load(Ordering::SeqCst), second as u64);
        assert_eq!(SEEN[1].load(Ordering::SeqCst), 1, "a write to a page that isn't there");
        // SAFETY: as above, and the address is inside the file now.
        assert_eq!(unsafe { second.read_volatile() }, 7);
        file.set_len(1).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { second.read_volatile() }, 0);
        assert_eq!(SEEN[1].load(Ordering::SeqCst), 0, "a read of a page that isn't there");
        // SAFETY: the disposition is the one that was there before.
        unsafe { set_action(SIGBUS, &before) }.unwrap();
    }

    fn tempfile() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("farpage-signal-{}", std::process::id()));
        let file = std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path);
        std::fs::remove_file(path).unwrap();
        file.unwrap()
    }
}

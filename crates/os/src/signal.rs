//! Signals as the kernel delivers them: handlers of ours that libc doesn't know, and what a handler is told.
//!
//! A handler of the engine's may run anywhere in the program, also where libc is in the middle of something. So it
//! is installed by the bare system call, and it returns through a restorer of ours.
// UNSAFETY: a handler runs on top of whatever its thread was doing; what it is given are raw structures.

use crate::sys::{self, Errno, number};
use core::arch::naked_asm;

/// A memory access that can't go on; `signal` mode's faults arrive as this.
pub const SIGBUS: u32 = 7;
/// An access that isn't allowed, or to nothing.
pub const SIGSEGV: u32 = 11;
/// A system call that is not to be made as it is (see [`crate::dispatch`]).
pub const SIGSYS: u32 = 31;
/// libc's own signal for its set-user-id calls. No program can block it through libc, so it reaches every thread.
pub const SIGSETXID: u32 = 33;
/// libc's own signal for ending threads, which no program can block through libc either.
pub const SIGCANCEL: u32 = 32;

/// A signal's bit in a mask.
pub const fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// What a handler looks like. The context is the thread's, as it goes on when the handler returns.
pub type Handler = unsafe extern "C" fn(signal: i32, info: *mut Info, context: *mut Context);

/// What happened: the head of the kernel's `siginfo_t`, for signals that are about an address, a call, or that carry a
/// word.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    /// Of a signal that was sent: process and user.
    address: usize,
    /// The word that was sent along; of a stopped call its number, and the kind of machine that it is for.
    value: usize,
    rest: [u64; 12],
}

const _: () = assert!(size_of::<Info>() == 128);

impl Info {
    /// `BUS_ADRERR`: nothing could be had for this address. userfaultfd says so of a page that we are to bring.
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

    /// What the kernel says of a signal that it raises because it can do nothing else (`SI_KERNEL`).
    pub const fn by_kernel(signal: u32) -> Info {
        Info { signal: signal as i32, errno: 0, code: 0x80, padding: 0, address: 0, value: 0, rest: [0; 12] }
    }

    /// The number of a stopped system call, none if it is one of 32-bit code; none at all if the signal is about
    /// something else, or was sent.
    pub const fn stopped_call(&self) -> Option<Option<usize>> {
        if self.signal as u32 != SIGSYS || self.code != Info::USER_DISPATCH {
            return None;
        }
        Some(if self.value >> 32 == Info::MACHINE { Some(self.value as u32 as usize) } else { None })
    }

    /// The address that the signal is about, if it is about one.
    pub const fn address(&self) -> usize {
        self.address
    }

    /// The address of an access that found nothing; none if the signal is about something else, or was sent.
    pub const fn missing_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGBUS && self.code == Info::BUS_ADDRESS { Some(self.address) } else { None }
    }

    /// The address of an access that was not allowed, where there is a mapping; none if the signal is about something else.
    pub const fn forbidden_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGSEGV && self.code == Info::NOT_ALLOWED {
            Some(self.address)
        } else {
            None
        }
    }

    /// The address of an access where there is no mapping; none if the signal is about something else.
    pub const fn unmapped_at(&self) -> Option<usize> {
        if self.signal as u32 == SIGSEGV && self.code == Info::NOT_MAPPED { Some(self.address) } else { None }
    }

    /// The signal.
    pub const fn signal(&self) -> u32 {
        self.signal as u32
    }

    /// Whether a process has sent it: then there is nothing that its thread would run into again.
    pub const fn was_sent(&self) -> bool {
        self.code <= 0
    }

    /// The word that was sent along, if one was.
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
    // SAFETY: the kernel reads a siginfo_t, which `info` is as long as.
    sys::check(unsafe { sys::call(number::RT_TGSIGQUEUEINFO, arguments) }).map(|_| ())
}

/// Sends the calling thread a signal once more, with what it said the first time: to oneself anything may be said.
pub fn send_again(info: &Info) {
    // SAFETY: both take nothing.
    let [process, thread] = [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
    let (signal, info) = (info.signal(), core::ptr::from_ref(info) as usize);
    // SAFETY: the kernel reads a siginfo_t, which `info` is as long as.
    unsafe {
        sys::call(number::RT_TGSIGQUEUEINFO, [process as usize, thread as usize, signal as usize, info, 0, 0])
    };
}

/// A thread as it was interrupted: the head of the kernel's `ucontext_t` on x86-64. What is changed here is what the
/// thread goes on with.
#[repr(C)]
pub struct Context {
    flags: u64,
    link: usize,
    /// The alternate stack that the thread has when the handler has returned.
    pub stack: AlternateStack,
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags, segments.
    registers: [usize; 19],
    /// Of the exception: bit 0 the page was there, bit 1 it was a write.
    error: u64,
    trap: u64,
    old_mask: u64,
    address: u64,
    /// Where the vector registers' state is; 0: they are cleared.
    pub float_state: usize,
    reserved: [u64; 8],
    /// Signals that are blocked when the handler has returned.
    pub blocked: u64,
}

// As in the kernel's headers: the registers begin after 40 bytes, the error word is the 20th, the mask comes after 256.
const _: () = assert!(core::mem::offset_of!(Context, error) == 40 + 19 * 8);
const _: () = assert!(core::mem::offset_of!(Context, blocked) == 40 + 256 && size_of::<Context>() == 304);

/// Registers by their place in [`Context`].
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
    Rsp = 15,
    Rip = 16,
    Flags = 17,
    Segments = 18,
}

impl Context {
    /// Where a register's content lies.
    pub const fn offset_of(register: Register) -> usize {
        core::mem::offset_of!(Context, registers) + size_of::<usize>() * register as usize
    }

    /// A register's content.
    pub const fn register(&self, register: Register) -> usize {
        self.registers[register as usize]
    }

    /// Changes a register.
    pub const fn set_register(&mut self, register: Register, value: usize) {
        self.registers[register as usize] = value;
    }

    /// The alternate stack that the thread had when the signal was delivered. It may have been put away then.
    pub const fn alternate(&self) -> AlternateStack {
        let AlternateStack { start, flags, bytes } = self.stack;
        // Since its program began a thread may never have had one, and the kernel forgets to say so: `sigaltstack` refuses that.
        if bytes == 0 {
            return AlternateStack::NONE;
        }
        AlternateStack::from_words([start as u64, flags as u64, bytes as u64])
    }

    /// Of the instruction `syscall`.
    pub const CALL_BYTES: usize = 2;

    /// The thread, which has just made a system call, makes it again, with this number.
    pub const fn call_again(&mut self, number: usize) {
        self.set_register(Register::Rax, number);
        let after = self.register(Register::Rip);
        self.set_register(Register::Rip, after - Context::CALL_BYTES);
    }

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
    /// A function, or 0 for what the kernel does by default, or 1 for nothing.
    pub handler: usize,
    /// `SA_*`.
    pub flags: u64,
    /// Where it returns to.
    pub restorer: usize,
    /// Signals that are blocked meanwhile.
    pub mask: u64,
}

const SA_SIGINFO: u64 = 4;
const SA_ONSTACK: u64 = 0x0800_0000;
const SA_RESTART: u64 = 0x1000_0000;
const SA_NODEFER: u64 = 0x4000_0000;
const SA_RESETHAND: u64 = 0x8000_0000;
const SA_RESTORER: u64 = 0x0400_0000;
/// Of children that stop or end (`SA_NOCLDSTOP`, `SA_NOCLDWAIT`), and the tags of addresses (`SA_EXPOSE_TAGBITS`).
const SA_OTHERS: u64 = 1 | 2 | 0x800;
const LEFT_TO_THE_KERNEL: u64 = SA_OTHERS | SA_RESTART | SA_RESETHAND;
const KNOWN: u64 = LEFT_TO_THE_KERNEL | SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER;

impl Action {
    /// What the kernel does by itself.
    pub const DEFAULT: Action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };

    /// A handler of ours: on the thread's alternate stack if it has one, with every signal blocked meanwhile but
    /// `open`. Calls that it interrupts go on.
    pub fn of(handler: Handler, open: u64) -> Action {
        Action {
            handler: handler as *const () as usize,
            flags: SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER | SA_RESTORER,
            restorer: return_address(),
            mask: !open,
        }
    }

    /// A handler of ours that stands for this one: the kernel does all else that the program asked for.
    #[must_use]
    pub fn through(&self, handler: Handler, open: u64) -> Action {
        let ours = Action::of(handler, open);
        Action { flags: ours.flags & !SA_RESTART | self.flags & LEFT_TO_THE_KERNEL, ..ours }
    }

    /// Whether it is one of ours, or was until the kernel reset it.
    pub fn is_of_ours(&self) -> bool {
        self.restorer == return_address()
    }

    /// As the kernel keeps it: without flags that it doesn't know, and signals that can't be blocked.
    #[must_use]
    pub const fn kept(&self) -> Action {
        Action { flags: self.flags & KNOWN, mask: self.mask & !(bit(9) | bit(19)), ..*self }
    }

    /// The same on whatever stack the thread is on: for one that has no alternate stack of ours yet.
    #[must_use]
    pub const fn on_any_stack(self) -> Action {
        Action { flags: self.flags & !SA_ONSTACK, ..self }
    }

    /// As the kernel reads it.
    pub const fn from_words(words: [u64; 4]) -> Action {
        Action { handler: words[0] as usize, flags: words[1], restorer: words[2] as usize, mask: words[3] }
    }

    /// The words of [`Action::from_words`].
    pub const fn to_words(&self) -> [u64; 4] {
        [self.handler as u64, self.flags, self.restorer as u64, self.mask]
    }

    /// As the kernel writes it.
    pub fn to_bytes(&self) -> [u8; 32] {
        words_to_bytes(self.to_words())
    }

    /// Whether it is a function.
    pub const fn is_handler(&self) -> bool {
        self.handler > 1
    }

    /// Whether it is the default again after one signal.
    pub const fn is_once(&self) -> bool {
        self.flags & SA_RESETHAND != 0
    }

    /// Whether calls that it interrupts go on.
    pub const fn restarts(&self) -> bool {
        self.flags & SA_RESTART != 0
    }

    /// Whether it wants to run on the thread's alternate stack, if there is one.
    pub const fn wants_alternate_stack(&self) -> bool {
        self.flags & SA_ONSTACK != 0
    }

    /// Whether nothing is to happen.
    pub const fn is_ignored(&self) -> bool {
        self.handler == 1
    }

    /// The signals that are blocked while it handles `signal`, in a thread that blocks `blocked`.
    pub const fn blocks(&self, signal: u32, blocked: u64) -> u64 {
        let own = if self.flags & SA_NODEFER == 0 { bit(signal) } else { 0 };
        blocked | self.mask | own
    }
}

/// Where a handler returns to, behind its first byte. Unwinders know a signal's frame by these very bytes, and look up the one
/// before them: it must be nobody else's.
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
    // SAFETY: both are the kernel's structure, with a mask of 8 bytes; the handler is the caller's promise.
    sys::check(unsafe { sys::call(number::RT_SIGACTION, arguments) }).map(|_| before)
}

/// The disposition of a signal.
pub fn action_of(signal: u32) -> Result<Action, Errno> {
    let mut action = Action::DEFAULT;
    // SAFETY: the kernel's structure, with a mask of 8 bytes; nothing is changed.
    let asked =
        unsafe { sys::call(number::RT_SIGACTION, [signal as usize, 0, &raw mut action as usize, 8, 0, 0]) };
    sys::check(asked).map(|_| action)
}

/// The stack that a thread's handlers run on: the kernel's `stack_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlternateStack {
    /// Where it begins.
    pub start: usize,
    /// `SS_*`.
    pub flags: usize,
    /// Its size.
    pub bytes: usize,
}

/// Words as they lie in memory.
fn words_to_bytes<const N: usize, const BYTES: usize>(words: [u64; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

impl AlternateStack {
    /// Whether a stack pointer is on it.
    pub const fn contains(&self, stack_pointer: usize) -> bool {
        stack_pointer > self.start && stack_pointer - self.start <= self.bytes
    }

    /// Whether the kernel would say so: not of one that is put away when a handler begins.
    pub const fn is_in_use(&self, stack_pointer: usize) -> bool {
        !self.is_put_away() && self.contains(stack_pointer)
    }

    /// Whether the thread has none from a handler's beginning to its end.
    pub const fn is_put_away(&self) -> bool {
        self.flags & AlternateStack::AUTODISARM != 0
    }

    /// What the kernel would make of a program's wish; EINVAL, ENOMEM: it refuses.
    pub fn accepted(self) -> Result<AlternateStack, Errno> {
        const BYTES_MIN: usize = 2048;
        match self.flags & !AlternateStack::AUTODISARM {
            2 => Ok(AlternateStack { flags: self.flags, ..AlternateStack::NONE }),
            0 | 1 if self.bytes < BYTES_MIN => Err(Errno(12)),
            0 | 1 => Ok(AlternateStack { flags: self.flags & !AlternateStack::IN_USE, ..self }),
            _ => Err(Errno(22)),
        }
    }

    /// As the kernel reads it: half of the second word is nothing.
    pub const fn from_words(words: [u64; 3]) -> AlternateStack {
        AlternateStack { start: words[0] as usize, flags: words[1] as u32 as usize, bytes: words[2] as usize }
    }

    /// As the kernel writes it.
    pub fn to_bytes(&self) -> [u8; 24] {
        words_to_bytes([self.start as u64, self.flags as u64, self.bytes as u64])
    }

    /// `SS_AUTODISARM`.
    const AUTODISARM: usize = 1 << 31;
    /// `SS_ONSTACK`: the thread is on it.
    pub const IN_USE: usize = 1;
    /// `SS_DISABLE`: there is none.
    pub const NONE: AlternateStack = AlternateStack { start: 0, flags: 2, bytes: 0 };
}

/// Gives the calling thread another alternate stack and returns the one before. EPERM: it is on it.
///
/// # Safety
/// The memory must be nobody else's as long as the thread lives or until it gets another one.
pub unsafe fn set_alternate_stack(stack: &AlternateStack) -> Result<AlternateStack, Errno> {
    let mut before = AlternateStack::NONE;
    let arguments = [&raw const *stack as usize, &raw mut before as usize, 0, 0, 0, 0];
    // SAFETY: both are the kernel's structure; the memory is the caller's promise.
    sys::check(unsafe { sys::call(number::SIGALTSTACK, arguments) }).map(|_| before)
}

/// The same for a handler that may run on the thread's alternate stack itself. The kernel only looks where the stack pointer is,
/// so it is moved to the new one for the time of the call.
///
/// # Safety
/// As above; nothing on the new stack may be in use. What the handler has interrupted may not be on the old one: it would go on
/// below frames that come later.
pub unsafe fn set_alternate_stack_on_top(stack: &AlternateStack) -> Result<(), Errno> {
    let top = (stack.start + stack.bytes) & !15;
    let result: isize;
    // SAFETY: the caller's promise; both stack pointers are good, and the one that was there is back behind the call.
    unsafe {
        core::arch::asm!("xchg rsp, {top}", "syscall", "xchg rsp, {top}", top = inout(reg) top => _,
            inlateout("rax") number::SIGALTSTACK as isize => result, in("rdi") &raw const *stack, in("rsi") 0,
            lateout("rcx") _, lateout("r11") _);
    }
    sys::check(result).map(|_| ())
}

/// The calling thread's alternate stack.
pub fn alternate_stack() -> Result<AlternateStack, Errno> {
    let mut stack = AlternateStack::NONE;
    // SAFETY: the kernel's structure; nothing is changed.
    let asked = unsafe { sys::call(number::SIGALTSTACK, [0, &raw mut stack as usize, 0, 0, 0, 0]) };
    sys::check(asked).map(|_| stack)
}

/// What `rt_sigprocmask` makes of a thread's blocked signals; none for a `how` that there isn't.
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
        let before = unsafe { set_action(SIGBUS, &Action::of(note_and_grow, 0)) }.unwrap();
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

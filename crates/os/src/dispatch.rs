//! Stops a thread's system calls before they are made (Syscall User Dispatch, Linux 5.11).
//!
//! An *armed* thread gets SIGSYS instead of each call that is made outside of the engine's code. The handler
//! looks at the call, and either answers it or has it made. The handler doesn't make the call: it sends the
//! thread to a trampoline. The trampoline makes the call in the thread's own context and goes on behind the
//! program's instruction. Blocking, signals and restarts therefore work as without Farpage.
//!
//! The trampoline's data is *planted* on the thread's own stack, below the program's red zone. The kernel
//! leaves the trampoline's red zone alone, too, when it delivers a signal in the trampoline. The planted data
//! lies in that red zone. A call may be made with other arguments than the program gave. The registers that
//! the program sees afterwards are its own.
//!
//! The kernel compares addresses, so the engine's code must be one contiguous range: the text of the library
//! that contains this file. The caller of [`arm`] names the range. Threads and children begin unarmed. Each
//! runs the function of [`set_born`] first.
// UNSAFETY: a system call of the program is taken apart and put together again.

use crate::errno::returned;
use crate::signal::{Context, Register};
use crate::sys::{self, Errno, number};
use core::arch::naked_asm;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// Bytes below the stack pointer that a function may use without moving the stack pointer, by the x86-64 ABI.
const RED_ZONE: usize = 128;
/// Bytes from the program's stack pointer down to its planted return address.
const PLANTED: usize = RED_ZONE + size_of::<usize>();
/// Least size in bytes of a stack on which a thread begins.
const STACK_BYTES_MIN: usize = PLANTED + size_of::<Frame>() + RED_ZONE;

/// Whether an armed thread's calls are stopped at present. The kernel reads the selector at each call.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Selector(AtomicU8);

impl Selector {
    const PASS: u8 = 0;
    const STOP: u8 = 1;

    /// Returns a selector that lets calls pass.
    pub const fn new() -> Selector {
        Selector(AtomicU8::new(Selector::PASS))
    }

    /// Makes calls be stopped, or pass, from now on.
    pub fn set(&self, stop: bool) {
        let value = if stop { Selector::STOP } else { Selector::PASS };
        // Ordering: Relaxed, because the kernel reads the selector in the thread that it belongs to, or sees
        // the change soon enough.
        self.0.store(value, Ordering::Relaxed);
    }
}

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Arms the calling thread. Calls that are made in `code` always pass. Fails with EINVAL if the kernel
/// doesn't have the feature.
///
/// # Safety
/// A handler of SIGSYS that deals with stopped calls must be installed, and SIGSYS must not be blocked in
/// this thread.
pub unsafe fn arm(code: core::ops::Range<usize>, selector: &'static Selector) -> Result<(), Errno> {
    const ON: usize = 1;
    let place = core::ptr::from_ref(selector) as usize;
    let arguments = [PR_SET_SYSCALL_USER_DISPATCH, ON, code.start, code.len(), place, 0];
    // SAFETY: the selector lives for good. The handler and the mask are the caller's promise.
    sys::check(unsafe { sys::call(number::PRCTL, arguments) }).map(|_| ())
}

/// Returns whether a call would change how calls are stopped.
pub const fn is_about_arming(call: &Call) -> bool {
    call.number == number::PRCTL && call.arguments[0] == PR_SET_SYSCALL_USER_DISPATCH
}

/// A call that was stopped. A change of a field changes the call that is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The call's number.
    pub number: usize,
    /// The call's arguments.
    pub arguments: [usize; 6],
}

/// The registers of the arguments.
const ARGUMENTS: [Register; 6] =
    [Register::Rdi, Register::Rsi, Register::Rdx, Register::R10, Register::R8, Register::R9];

/// Returns the program's stack pointer at a call that a signal has just ended (EINTR); none if the thread is
/// anywhere else.
pub fn ended_call(context: &Context) -> Option<usize> {
    const EINTR: usize = returned::EINTR as usize;
    let behind_call = make_and_return as *const () as usize + Context::CALL_BYTES;
    let is_there = context.register(Register::Rip) == behind_call && context.register(Register::Rax) == EINTR;
    is_there.then(|| context.register(Register::Rsp) + PLANTED)
}

/// Returns whether the thread is about to make a call that doesn't return. The call may be a handler's
/// `rt_sigreturn`, which needs the handler's frame.
pub fn is_about_to_leave(context: &Context) -> bool {
    context.register(Register::Rip) == make_and_stay as *const () as usize
}

/// How a call is made.
pub struct Making<'a> {
    /// Set to 0 when the call has returned.
    pub done: &'a AtomicU32,
    /// Names the thread that makes the call. Not 0, and even.
    pub maker: usize,
    /// Names the thread that the call makes on a stack of its own, with an even number that isn't 0; or 0 if
    /// the call makes none. If the new thread can't be made, the first half-word at this address is set to 0.
    pub newborn: usize,
    /// Memory that stays as it is until the call has returned.
    pub scratch: &'a mut [usize; SCRATCH_WORDS],
}

/// Words of scratch memory that one call may need.
pub const SCRATCH_WORDS: usize = 16;

/// Bit in the word that a child is given if it has a copy of its maker's memory. The other bits name its
/// maker.
pub const COPY: usize = 1;
/// Given to a child that uses its maker's memory and alternate stack while the maker waits.
pub const BORROWER: usize = 0;
/// Given to a maker that has waited for a borrowing child, or couldn't make one.
pub const BACK_AGAIN: usize = 2;

/// How a new thread or child begins: on whose stack, and in whose memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Birth {
    /// A copy of the maker's memory, including the stack.
    Copy,
    /// A copy of the maker's memory, on a stack that ends here.
    CopyElsewhere {
        /// The stack's end.
        end: usize,
    },
    /// The maker's own stack. The maker waits meanwhile, and finds the words below its stack pointer
    /// overwritten.
    Borrowed,
    /// A stack that ends here, in the maker's memory.
    Elsewhere {
        /// The stack's end.
        end: usize,
        /// Whether the maker waits until this child ends or runs another program.
        waits: bool,
    },
}

/// The head of the kernel's `clone_args`.
#[repr(C)]
struct CloneArguments {
    flags: usize,
    pidfd: usize,
    child_id: usize,
    parent_id: usize,
    exit_signal: usize,
    stack: usize,
    stack_bytes: usize,
    segment: usize,
}

impl Call {
    /// Returns the call that was stopped in `context`.
    pub fn stopped(number: usize, context: &Context) -> Call {
        Call { number, arguments: ARGUMENTS.map(|register| context.register(register)) }
    }

    /// Returns what kind of thread or child the call makes, if it makes one.
    ///
    /// # Safety
    /// The arguments of `clone3` must be readable.
    pub unsafe fn birth(&self) -> Option<Birth> {
        const CLONE_VM: usize = 0x100;
        const CLONE_VFORK: usize = 0x4000;
        let [first, second, ..] = self.arguments;
        let (flags, end) = match self.number {
            number::FORK => (0, 0),
            number::VFORK => (CLONE_VM | CLONE_VFORK, 0),
            number::CLONE => (first, second),
            number::CLONE3 if second >= size_of::<CloneArguments>() => {
                // SAFETY: the arguments are readable, by the caller's promise.
                let arguments = unsafe { (first as *const CloneArguments).read_unaligned() };
                if arguments.stack != 0 && arguments.stack_bytes < STACK_BYTES_MIN {
                    return None; // The kernel refuses the size, or the thread could not run.
                }
                let end = arguments.stack.wrapping_add(arguments.stack_bytes);
                (arguments.flags, if arguments.stack == 0 { 0 } else { end })
            }
            _ => return None,
        };
        let waits = flags & CLONE_VFORK != 0;
        Some(match (flags & CLONE_VM != 0, end) {
            (false, 0) => Birth::Copy,
            (_, 0) => Birth::Borrowed,
            (true, end) => Birth::Elsewhere { end, waits },
            (false, end) => Birth::CopyElsewhere { end },
        })
    }

    /// Makes the thread make the call when the handler returns. Returns false if the call would lend the
    /// thread's stack and all trampolines for that are taken.
    ///
    /// # Safety
    /// `context` must be the one that the call was stopped in. The arguments of `clone3` must be readable.
    /// The function writes below the thread's stack pointer, and below the end of the stack that the call
    /// names for a new thread. Faults there must be served.
    pub unsafe fn make(&self, context: &mut Context, making: Making<'_>) -> bool {
        if matches!(self.number, number::RT_SIGRETURN | number::EXIT) {
            // The call doesn't return, so `done` isn't set for it. Whatever the thread does next shows that
            // the call is over.
            self.load_registers(context);
            context.set_register(Register::Rip, make_and_stay as *const () as usize);
            return true;
        }
        // SAFETY: the arguments of `clone3` are readable, by the caller's promise.
        let trampoline = match unsafe { self.birth() } {
            Some(Birth::Borrowed) => {
                let Some(trampoline) = lend(context.register(Register::Rip)) else { return false };
                context.set_register(Register::Rip, trampoline);
                return true;
            }
            None => make_and_return as *const () as usize,
            Some(_) => make_and_return_twice as *const () as usize,
        };
        let mut frame = Frame::of(context, &making);
        let mut made = *self;
        // SAFETY: as above.
        match unsafe { self.birth() } {
            Some(Birth::Copy) => frame.newborn = making.maker | COPY,
            Some(Birth::CopyElsewhere { end }) => {
                frame.newborn = making.maker | COPY;
                // SAFETY: no code uses the child's stack yet, by the caller's promise, and faults there are
                // served. The call's arguments are readable, as above, and name that stack.
                unsafe {
                    frame.plant(end - PLANTED);
                    made.begin_below(end - PLANTED, making.scratch);
                }
            }
            Some(Birth::Elsewhere { end, waits }) => {
                let newborn = if waits { BORROWER } else { making.newborn };
                frame.newborn = if waits { BACK_AGAIN } else { making.newborn };
                // SAFETY: no code uses the new thread's stack yet, by the caller's promise, and faults there
                // are served. The call's arguments are readable, as above, and name that stack.
                unsafe {
                    Frame { newborn, done: NOBODY.as_ptr() as usize, ..frame }.plant(end - PLANTED);
                    made.begin_below(end - PLANTED, making.scratch);
                }
            }
            _ => {}
        }
        made.load_registers(context);
        let place = context.register(Register::Rsp) - PLANTED;
        // SAFETY: the place is below the red zone of the stopped thread, where nothing is in use. Faults
        // there are served, by the caller's promise.
        unsafe { frame.plant(place) };
        context.set_register(Register::Rsp, place);
        context.set_register(Register::Rip, trampoline);
        true
    }

    fn load_registers(&self, context: &mut Context) {
        context.set_register(Register::Rax, self.number);
        for (register, value) in ARGUMENTS.into_iter().zip(self.arguments) {
            context.set_register(register, value);
        }
    }

    /// Makes the new thread begin with its stack pointer at `start`.
    ///
    /// # Safety
    /// As for [`Call::make`], with a stack named in the arguments.
    unsafe fn begin_below(&mut self, start: usize, scratch: &mut [usize; SCRATCH_WORDS]) {
        if self.number == number::CLONE {
            self.arguments[1] = start;
            return;
        }
        // The program's own arguments stay as they are. Arguments that this code doesn't know are passed on
        // as far as the scratch memory holds them.
        let [arguments, bytes, ..] = self.arguments;
        let bytes = bytes.min(size_of_val(scratch));
        let copy = scratch.as_mut_ptr().cast::<CloneArguments>();
        // SAFETY: the arguments are readable, by the caller's promise. `birth` has seen that they hold at
        // least the known fields, and `scratch` holds `bytes` bytes.
        unsafe {
            core::ptr::copy_nonoverlapping(arguments as *const u8, copy.cast(), bytes);
            (*copy).stack_bytes = start - (*copy).stack;
        }
        self.arguments[0] = copy as usize;
        self.arguments[1] = bytes;
    }
}

/// The data that is planted, at the trampoline's stack pointer and below.
#[repr(C)]
#[derive(Clone, Copy)]
struct Frame {
    newborn: usize,
    /// rdi, rsi, rdx, r10, r8, r9, with the program's values.
    arguments: [usize; 6],
    /// Address of the word that is set to 0 when the call has returned.
    done: usize,
    /// Where the program goes on.
    back: usize,
}

const BACK_OFFSET: usize = core::mem::offset_of!(Frame, back);
const _: () = assert!(BACK_OFFSET == 64 && BACK_OFFSET <= RED_ZONE);

impl Frame {
    fn of(context: &Context, making: &Making<'_>) -> Frame {
        Frame {
            newborn: making.newborn,
            arguments: ARGUMENTS.map(|register| context.register(register)),
            done: making.done.as_ptr() as usize,
            back: context.register(Register::Rip),
        }
    }

    /// # Safety
    /// No code may use the bytes just below the word at `place`, and faults there must be served.
    unsafe fn plant(&self, place: usize) {
        // SAFETY: the bytes are free and faults there are served, by the caller's promise.
        unsafe { ((place - BACK_OFFSET) as *mut Frame).write_unaligned(*self) };
    }
}

/// The word that a new thread sets to 0. The maker's own word must stay as it is for the maker.
static NOBODY: AtomicU32 = AtomicU32::new(0);

// ---- trampolines -----------------------------------------------------------------------------------------
//
// A system call keeps all registers but rax, rcx and r11. The trampolines keep the same registers, and the
// flags, too. Unwinders (thread cancellation) are told where the program goes on.

/// Makes the call and goes on behind the program's instruction. Other trampolines join behind the two bytes
/// of `syscall`, with the call's result in rax.
#[unsafe(naked)]
unsafe extern "C" fn make_and_return() {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_signal_frame",
        ".cfi_def_cfa rsp, {cfa}",
        ".cfi_offset rip, -{cfa}",
        "syscall",
        "mov rdi, [rsp - 56]",
        "mov rsi, [rsp - 48]",
        "mov rdx, [rsp - 40]",
        "mov r10, [rsp - 32]",
        "mov r8, [rsp - 24]",
        "mov r9, [rsp - 16]",
        "mov rcx, [rsp - 8]",
        "mov dword ptr [rcx], 0",
        "ret {red_zone}",
        ".cfi_endproc",
        cfa = const RED_ZONE + 8,
        red_zone = const RED_ZONE,
    )
}

/// Makes a call that doesn't return.
#[unsafe(naked)]
unsafe extern "C" fn make_and_stay() {
    naked_asm!("syscall", "ud2")
}

/// As [`make_and_return`], but the thread or child that the call has made runs `born` first. The maker also
/// runs `born` if it has waited.
#[unsafe(naked)]
unsafe extern "C" fn make_and_return_twice() {
    naked_asm!(
        "syscall",
        "xchg rax, rcx", // Neither this instruction nor the next one changes flags.
        "jrcxz 2f",
        "xchg rax, rcx",
        "lea rsp, [rsp - {red_zone}]",
        "pushfq",
        "mov rcx, [rsp + {red_zone} + 8 - {newborn}]",
        "cmp rcx, {back_again}",
        "je 4f",
        "test rax, rax",
        "jns 3f",
        // The call failed. The place that was named for the new thread, if any, is free again.
        "test rcx, rcx",
        "jz 3f",
        "test cl, {copy}",
        "jnz 3f",
        "mov dword ptr [rcx], 0",
        "jmp 3f",
        "4:",
        "mov r11, rcx",
        "call {keeping}",
        "3:",
        "popfq",
        "lea rsp, [rsp + {red_zone}]",
        "jmp {finish} + 2",
        "2:",
        "mov r11, [rsp - {newborn}]",
        "lea rsp, [rsp - {red_zone}]",
        "call {keeping}",
        "lea rsp, [rsp + {red_zone}]",
        "mov rax, rcx",
        "jmp {finish} + 2",
        copy = const COPY,
        back_again = const BACK_AGAIN,
        newborn = const BACK_OFFSET,
        finish = sym make_and_return,
        keeping = sym born_keeping_registers,
        red_zone = const RED_ZONE,
    )
}

/// Calls `born(r11)`. Changes no register but r11 and rcx, which is 0 afterwards. Uses little stack, because
/// Go makes children with less than 800 bytes left of a stack. `fxsave` would take twice as much, and no code
/// changes the rest of what it saves.
#[unsafe(naked)]
unsafe extern "C" fn born_keeping_registers() {
    naked_asm!(
        "pushfq",
        "push rbp",
        "mov rbp, rsp",
        "push rax",
        "push rdi",
        "push rsi",
        "push rdx",
        "push r8",
        "push r9",
        "push r10",
        "push rbx",
        "sub rsp, 256",
        "and rsp, -16",
        "movups [rsp + 0], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "movups [rsp + 128], xmm8",
        "movups [rsp + 144], xmm9",
        "movups [rsp + 160], xmm10",
        "movups [rsp + 176], xmm11",
        "movups [rsp + 192], xmm12",
        "movups [rsp + 208], xmm13",
        "movups [rsp + 224], xmm14",
        "movups [rsp + 240], xmm15",
        "cld",
        "mov rdi, r11",
        "call qword ptr [rip + {born}]",
        "movups xmm0, [rsp + 0]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "movups xmm8, [rsp + 128]",
        "movups xmm9, [rsp + 144]",
        "movups xmm10, [rsp + 160]",
        "movups xmm11, [rsp + 176]",
        "movups xmm12, [rsp + 192]",
        "movups xmm13, [rsp + 208]",
        "movups xmm14, [rsp + 224]",
        "movups xmm15, [rsp + 240]",
        "lea rsp, [rbp - 64]",
        "pop rbx",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rax",
        "pop rbp",
        "xor ecx, ecx",
        "popfq",
        "ret",
        born = sym BORN,
    )
}

extern "C" fn nothing(_: usize) {}

/// The function that the trampolines call.
static BORN: AtomicPtr<()> = AtomicPtr::new(nothing as *mut ());

/// Sets the function that each new thread and each child of an armed thread runs before the program's code.
/// The function runs unarmed, on the stack that the program gave. A new thread is given its own name
/// ([`Making::newborn`]). A child with a copy of the memory is given its maker's name with [`COPY`]. A child
/// that uses its maker's memory while the maker waits is given [`BORROWER`]. A maker that has waited for such
/// a child is given [`BACK_AGAIN`].
pub fn set_born(born: extern "C" fn(newborn: usize)) {
    BORN.store(born as *mut (), Ordering::Relaxed);
}

// ---- vfork ----------------------------------------------------------------------------------------------

/// Places in programs from which a stack was ever lent. Most programs have none, because libc makes a stack
/// for the child.
const LENT_MAX: usize = 16;

/// Where a thread that has lent its stack goes on. The address can't be kept on that stack, because the child
/// overwrites it. An entry is never freed, because a thread may still be on its way there.
static BACK: [AtomicUsize; LENT_MAX] = [const { AtomicUsize::new(0) }; LENT_MAX];

/// Returns the trampoline that goes on at `back`, or none if all are taken.
fn lend(back: usize) -> Option<usize> {
    let at = BACK.iter().position(|place| {
        // Ordering: Relaxed, because the thread that uses the entry has read or written it here.
        let before = place.compare_exchange(0, back, Ordering::Relaxed, Ordering::Relaxed);
        before == Ok(0) || before == Err(back)
    })?;
    Some(LENDING[at] as *const () as usize)
}

type Trampoline = unsafe extern "C" fn();

static LENDING: [Trampoline; LENT_MAX] = [
    make_and_lend::<0>,
    make_and_lend::<1>,
    make_and_lend::<2>,
    make_and_lend::<3>,
    make_and_lend::<4>,
    make_and_lend::<5>,
    make_and_lend::<6>,
    make_and_lend::<7>,
    make_and_lend::<8>,
    make_and_lend::<9>,
    make_and_lend::<10>,
    make_and_lend::<11>,
    make_and_lend::<12>,
    make_and_lend::<13>,
    make_and_lend::<14>,
    make_and_lend::<15>,
];

/// Makes a call whose child runs on this stack. Both go on at the address in `BACK`. The child goes first.
/// The maker follows when the child has ended or runs another program.
#[unsafe(naked)]
unsafe extern "C" fn make_and_lend<const AT: usize>() {
    naked_asm!(
        "syscall",
        "xchg rax, rcx",
        "mov r11d, {borrower}",
        "jrcxz 2f",
        "mov r11d, {back_again}",
        "2:",
        "xchg rax, rcx",
        "lea rsp, [rsp - {red_zone}]",
        "call {keeping}",
        "lea rsp, [rsp + {red_zone}]",
        "jmp qword ptr [rip + {back} + {word} * {at}]",
        borrower = const BORROWER,
        back_again = const BACK_AGAIN,
        red_zone = const RED_ZONE,
        keeping = sym born_keeping_registers,
        back = sym BACK,
        word = const size_of::<usize>(),
        at = const AT,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::{Action, Info, SIGSYS, bit, change_blocked, set_action};

    unsafe extern "C" {
        #[link_name = "__executable_start"]
        static FIRST: u8;
        #[link_name = "etext"]
        static END: u8;
    }

    static SELECTOR: Selector = Selector::new();
    static STOPPED: [AtomicU32; 512] = [const { AtomicU32::new(0) }; 512];
    const ANSWER: usize = 123_456;
    const GETPPID: usize = 110;
    static DONE: AtomicU32 = AtomicU32::new(0);
    static NEWBORN: AtomicU32 = AtomicU32::new(0);

    /// Names this executable's text as the code whose calls pass. The tests' calls through libc are made
    /// outside of it.
    extern "C" fn arm_here(_: usize) {
        let code = (&raw const FIRST as usize)..(&raw const END as usize);
        // SAFETY: the handler below is installed, and SIGSYS isn't blocked.
        unsafe { arm(code, &SELECTOR) }.unwrap();
    }

    unsafe extern "C" fn on_sigsys(_: i32, info: *mut Info, context: *mut Context) {
        // SAFETY: the kernel's own structures, valid during this call.
        let (info, context) = unsafe { (&*info, &mut *context) };
        let call = Call::stopped(info.stopped_call().flatten().expect("a stopped call"), context);
        STOPPED[call.number].fetch_add(1, Ordering::SeqCst);
        match call.number {
            GETPPID => return context.set_register(Register::Rax, ANSWER),
            number::RT_SIGPROCMASK => {
                let [how, set, before, ..] = call.arguments;
                let was = context.blocked;
                if set != 0 {
                    // SAFETY: the pointer is libc's own argument.
                    let set = unsafe { *(set as *const u64) };
                    context.blocked = change_blocked(was, how, set).unwrap() & !bit(SIGSYS);
                }
                if before != 0 {
                    // SAFETY: as above.
                    unsafe { *(before as *mut u64) = was };
                }
                return context.set_register(Register::Rax, 0);
            }
            _ => {}
        }
        // The memory can't come from malloc, which the thread may have been in. The memory stays for good,
        // because the kernel reads it after this handler.
        let scratch = crate::memory::place([0; SCRATCH_WORDS]).unwrap();
        let making = Making { done: &DONE, maker: 2, newborn: NEWBORN.as_ptr() as usize, scratch };
        // SAFETY: the context is the one of this very call, and no memory here is paged.
        assert!(unsafe { call.make(context, making) });
    }

    fn stopped(number: usize) -> u32 {
        STOPPED[number].load(Ordering::SeqCst)
    }

    /// Calls `vfork()` from outside of this executable's text. The child ends with status 42 without
    /// returning. Returns the child's id.
    fn vfork_by_inline_calls() -> i32 {
        const CODE: [u8; 33] = [
            0xb8, 58, 0, 0, 0, // mov eax, vfork
            0x0f, 0x05, // syscall
            0x85, 0xc0, // test eax, eax
            0x75, 21, // jnz to the last instruction
            0x48, 0x8d, 0x64, 0x24, 0x88, // lea rsp, [rsp - 120]
            0x50, 0x50, 0x50, 0x50, // push rax, over what lies below the maker's red zone
            0xb8, 60, 0, 0, 0, // mov eax, exit
            0xbf, 42, 0, 0, 0, // mov edi, 42
            0x0f, 0x05, // syscall
            0xc3, // ret
        ];
        let (protection, flags) = (libc_prot(), rustix::mm::MapFlags::PRIVATE);
        // SAFETY: the call makes a new mapping and replaces none.
        let code =
            unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), 4096, protection, flags) }.unwrap();
        // SAFETY: the code fits into the mapping.
        unsafe { code.cast::<u8>().copy_from(CODE.as_ptr(), CODE.len()) };
        // SAFETY: the function is the code just written, which changes only rax, rcx, r11, and rdi of the
        // child.
        let function =
            unsafe { core::mem::transmute::<*mut core::ffi::c_void, extern "C" fn() -> i32>(code) };
        function()
    }

    const fn libc_prot() -> rustix::mm::ProtFlags {
        rustix::mm::ProtFlags::READ.union(rustix::mm::ProtFlags::WRITE).union(rustix::mm::ProtFlags::EXEC)
    }

    #[test]
    fn armed_thread_makes_threads_children_and_files_as_ever() {
        // SAFETY: the handler deals with every call.
        unsafe { set_action(SIGSYS, &Action::of(on_sigsys, 0)) }.unwrap();
        set_born(arm_here);
        std::thread::spawn(|| {
            arm_here(0);
            SELECTOR.set(true);
            let parent = std::os::unix::process::parent_id();
            let name = std::fs::read_to_string("/proc/self/comm").unwrap();
            let inner = std::thread::spawn(|| {
                let parent = std::os::unix::process::parent_id();
                std::thread::sleep(std::time::Duration::from_millis(1));
                (parent, std::fs::read_to_string("/proc/self/comm").unwrap())
            });
            let inner = inner.join().unwrap();
            let told = std::process::Command::new("/bin/echo").arg("told").output().unwrap();
            let child = vfork_by_inline_calls();
            let status = rustix::process::waitpid(
                rustix::process::Pid::from_raw(child),
                rustix::process::WaitOptions::empty(),
            );
            SELECTOR.set(false);
            assert_eq!((parent, inner.0), (ANSWER as u32, ANSWER as u32));
            assert_eq!(inner.1, name);
            assert_eq!(told.stdout, b"told\n");
            assert_eq!(status.unwrap().unwrap().1.exit_status(), Some(42));
        })
        .join()
        .unwrap();
        assert!(stopped(number::VFORK) == 1 && stopped(GETPPID) == 2);
        assert!(stopped(number::CLONE3) + stopped(number::CLONE) >= 2, "a thread and a program");
        assert!(stopped(number::RT_SIGPROCMASK) > 0, "libc blocks signals around both");
        assert_eq!(stopped(number::EXIT), 2, "of the inner thread and of the child that borrowed a stack");
    }
}

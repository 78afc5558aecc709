//! Stopping a thread's system calls before they are made (Syscall User Dispatch, Linux 5.11).
//!
//! An *armed* thread gets SIGSYS instead of each call that isn't made by code of ours. The handler looks at it, and either
//! answers it or has it made. A call isn't made in the handler: the thread is sent to a trampoline of ours, which makes it
//! in the thread's own context and goes on behind the program's instruction. So blocking, signals and restarts are as ever.
//!
//! What the trampoline needs is *planted* on the thread's own stack, below the red zone: the kernel leaves the red zone of
//! the trampoline alone, too, when it delivers a signal there. A call may be made with other arguments than the program
//! gave; the registers that the program sees afterwards are its own.
//!
//! The kernel compares addresses, so "code of ours" is one contiguous range: the text of the library that this is in. Who
//! arms a thread names it. Threads and children begin unarmed: whoever is just born runs [`set_born`]'s function first.
// UNSAFETY: a system call of the program is taken apart and put together again.

use crate::signal::{Context, Register};
use crate::sys::{self, Errno, number};
use core::arch::naked_asm;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// Below the stack pointer a function may use so much without moving it.
const RED_ZONE: usize = 128;
/// From the program's stack pointer down to where its return address is planted.
const PLANTED: usize = RED_ZONE + size_of::<usize>();
/// A stack that a thread begins on has at least this.
const STACK_BYTES_MIN: usize = PLANTED + size_of::<Frame>() + RED_ZONE;

/// Whether an armed thread's calls are stopped just now; the kernel reads it at each call.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Selector(AtomicU8);

impl Selector {
    const PASS: u8 = 0;
    const STOP: u8 = 1;

    /// Calls pass.
    pub const fn new() -> Selector {
        Selector(AtomicU8::new(Selector::PASS))
    }

    /// From now on calls are stopped, or pass.
    pub fn set(&self, stop: bool) {
        let value = if stop { Selector::STOP } else { Selector::PASS };
        // Ordering: Relaxed: the kernel reads it in the thread that it is about, or sees it soon enough.
        self.0.store(value, Ordering::Relaxed);
    }
}

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

/// Arms the calling thread. Calls that are made in `code` always pass. EINVAL: this kernel can't.
///
/// # Safety
/// A handler of SIGSYS that deals with stopped calls must be installed, and SIGSYS must not be blocked in this thread.
pub unsafe fn arm(code: core::ops::Range<usize>, selector: &'static Selector) -> Result<(), Errno> {
    const ON: usize = 1;
    let place = core::ptr::from_ref(selector) as usize;
    let arguments = [PR_SET_SYSCALL_USER_DISPATCH, ON, code.start, code.len(), place, 0];
    // SAFETY: the selector lives for good; the rest is the caller's promise.
    sys::check(unsafe { sys::call(number::PRCTL, arguments) }).map(|_| ())
}

/// Whether a call would change how calls are stopped.
pub const fn is_about_arming(call: &Call) -> bool {
    call.number == number::PRCTL && call.arguments[0] == PR_SET_SYSCALL_USER_DISPATCH
}

/// A call that was stopped. What is changed here is what is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: usize,
    /// Its arguments.
    pub arguments: [usize; 6],
}

/// Registers of the arguments.
const ARGUMENTS: [Register; 6] =
    [Register::Rdi, Register::Rsi, Register::Rdx, Register::R10, Register::R8, Register::R9];

/// Where the program's stack pointer was when it made a call that a signal has just ended; none if the thread is anywhere else.
pub fn ended_call(context: &Context) -> Option<usize> {
    const EINTR: usize = -(linux_raw_sys::errno::EINTR as isize) as usize;
    let behind_call = make_and_return as *const () as usize + Context::CALL_BYTES;
    let is_there = context.register(Register::Rip) == behind_call && context.register(Register::Rax) == EINTR;
    is_there.then(|| context.register(Register::Rsp) + PLANTED)
}

/// Whether the thread is just about to make a call that doesn't return: of a handler, perhaps, which needs its frame for it.
pub fn is_about_to_leave(context: &Context) -> bool {
    context.register(Register::Rip) == make_and_stay as *const () as usize
}

/// How a call is made.
pub struct Making<'a> {
    /// Set to 0 when the call has returned.
    pub done: &'a AtomicU32,
    /// Names the thread that makes it: not 0, and even.
    pub maker: usize,
    /// Likewise the thread that it makes, should it make one on a stack of its own; or 0. If that can't be made, the first
    /// half-word there is set to 0.
    pub newborn: usize,
    /// Memory that stays as it is until then.
    pub room: &'a mut [usize; ROOM_WORDS],
}

/// Words that one call may need.
pub const ROOM_WORDS: usize = 16;

/// Set in what a child is told that has a copy of its maker's memory; the rest names its maker.
pub const COPY: usize = 1;
/// What a child is told that uses its maker's memory and alternate stack, while that waits for it.
pub const BORROWER: usize = 0;
/// And what a maker is told that has waited for such a child, or couldn't make it.
pub const BACK_AGAIN: usize = 2;

/// Threads and children differ in whose stack they begin on, and in whose memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Birth {
    /// A copy of the maker's memory, stack and all.
    Copy,
    /// Likewise, on a stack that ends here.
    CopyElsewhere {
        /// Where it ends.
        end: usize,
    },
    /// The maker's own stack: it waits meanwhile, and finds what lies below its stack pointer overwritten.
    Borrowed,
    /// A stack that ends here. `waits`: the maker waits until this child ends or runs another program.
    Elsewhere {
        /// Where it ends.
        end: usize,
        /// As said above.
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
    /// The call that was stopped in `context`.
    pub fn stopped(number: usize, context: &Context) -> Call {
        Call { number, arguments: ARGUMENTS.map(|register| context.register(register)) }
    }

    /// What kind of thread or child the call makes, if it makes one.
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
                // SAFETY: the caller's promise.
                let arguments = unsafe { (first as *const CloneArguments).read_unaligned() };
                if arguments.stack != 0 && arguments.stack_bytes < STACK_BYTES_MIN {
                    return None; // The kernel finds it wrong, or the thread couldn't run.
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

    /// Has the thread make the call when the handler returns. False if there is no room for one more call that lends its
    /// stack.
    ///
    /// # Safety
    /// `context` must be the one that the call was stopped in. What `clone3` is given must be readable. The words below
    /// the thread's stack pointer, and below the end of the stack that the call names for a new thread, are written to:
    /// faults there must be served.
    pub unsafe fn make(&self, context: &mut Context, making: Making<'_>) -> bool {
        if matches!(self.number, number::RT_SIGRETURN | number::EXIT) {
            // Nobody says when it is done: whatever the thread does next.
            self.load_registers(context);
            context.set_register(Register::Rip, make_and_stay as *const () as usize);
            return true;
        }
        // SAFETY: the caller's promise.
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
                // SAFETY: the caller's promise: the child's stack is nobody's yet.
                unsafe {
                    frame.plant(end - PLANTED);
                    made.begin_below(end - PLANTED, making.room);
                }
            }
            Some(Birth::Elsewhere { end, waits }) => {
                let newborn = if waits { BORROWER } else { making.newborn };
                frame.newborn = if waits { BACK_AGAIN } else { making.newborn };
                // SAFETY: the caller's promise: the new thread's stack is nobody's yet.
                unsafe {
                    Frame { newborn, done: NOBODY.as_ptr() as usize, ..frame }.plant(end - PLANTED);
                    made.begin_below(end - PLANTED, making.room);
                }
            }
            _ => {}
        }
        made.load_registers(context);
        let place = context.register(Register::Rsp) - PLANTED;
        // SAFETY: below the red zone of the thread that is stopped, where nothing is in use.
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

    /// The new thread begins with its stack pointer at `start`.
    ///
    /// # Safety
    /// As for [`Call::make`], with a stack named in the arguments.
    unsafe fn begin_below(&mut self, start: usize, room: &mut [usize; ROOM_WORDS]) {
        if self.number == number::CLONE {
            self.arguments[1] = start;
            return;
        }
        // The program's own arguments stay as they are. What we don't know of them is passed on as far as there is room.
        let [arguments, bytes, ..] = self.arguments;
        let bytes = bytes.min(size_of_val(room));
        let copy = room.as_mut_ptr().cast::<CloneArguments>();
        // SAFETY: the caller's promise; `birth` has seen that these are at least so many bytes.
        unsafe {
            core::ptr::copy_nonoverlapping(arguments as *const u8, copy.cast(), bytes);
            (*copy).stack_bytes = start - (*copy).stack;
        }
        self.arguments[0] = copy as usize;
        self.arguments[1] = bytes;
    }
}

/// What is planted, at the trampoline's stack pointer and below.
#[repr(C)]
#[derive(Clone, Copy)]
struct Frame {
    newborn: usize,
    /// rdi, rsi, rdx, r10, r8, r9, as the program had them.
    arguments: [usize; 6],
    /// Address of the word to be set to 0.
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
    /// Nothing may be in use just below the word at `place`, and faults there must be served.
    unsafe fn plant(&self, place: usize) {
        // SAFETY: the caller's promise.
        unsafe { ((place - BACK_OFFSET) as *mut Frame).write_unaligned(*self) };
    }
}

/// What a new thread sets to 0: its maker's word is its maker's.
static NOBODY: AtomicU32 = AtomicU32::new(0);

// ---- trampolines -----------------------------------------------------------------------------------------
//
// A system call keeps all registers but rax, rcx and r11, and so do these; flags, too. Unwinders (thread cancellation)
// are told where the program goes on.

/// Makes the call and goes on behind the program's instruction. Other trampolines join behind the two bytes of `syscall`,
/// with its result in rax.
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

/// As [`make_and_return`]; whom the call has made runs `born` first, and so does its maker if it has waited.
#[unsafe(naked)]
unsafe extern "C" fn make_and_return_twice() {
    naked_asm!(
        "syscall",
        "xchg rax, rcx", // Neither this nor the next changes flags.
        "jrcxz 2f",
        "xchg rax, rcx",
        "lea rsp, [rsp - {red_zone}]",
        "pushfq",
        "mov rcx, [rsp + {red_zone} + 8 - {newborn}]",
        "cmp rcx, {back_again}",
        "je 4f",
        "test rax, rax",
        "jns 3f",
        // Nothing was made: the room that is named, if one is, is free again.
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

/// Calls `born(r11)`. Changes no register but r11 and rcx, which is 0 afterwards. Little stack is used: Go makes children with
/// less than 800 bytes left of one. (fxsave would take twice as much, and the rest of what it saves nobody changes.)
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

/// Called by trampolines.
static BORN: AtomicPtr<()> = AtomicPtr::new(nothing as *mut ());

/// What each new thread and each child of an armed one runs before the program's code: on the stack that the program gave
/// it, unarmed. It is told who it is ([`Making::newborn`]), or
/// who its maker is, with [`COPY`], or [`BORROWER`]; a maker that has waited for one of those, [`BACK_AGAIN`].
pub fn set_born(born: extern "C" fn(newborn: usize)) {
    BORN.store(born as *mut (), Ordering::Relaxed);
}

// ---- vfork ----------------------------------------------------------------------------------------------

/// Places in programs from which a stack was ever lent. Most have none: libc makes a stack for the child.
const LENT_MAX: usize = 16;

/// Where a thread goes on that has lent its stack: not on that stack, which the child overwrites. Never given back, since
/// nobody knows whether a thread is still on the way.
static BACK: [AtomicUsize; LENT_MAX] = [const { AtomicUsize::new(0) }; LENT_MAX];

/// The trampoline that goes on at `back`.
fn lend(back: usize) -> Option<usize> {
    let at = BACK.iter().position(|place| {
        // Ordering: Relaxed: the thread that uses it has read or written it here.
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

/// Makes a call whose child runs on this stack. Both go on where the place says: first the child, then, when that has
/// ended or runs another program, its maker.
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

    /// This executable's text: the system calls of the tests that go through libc are made elsewhere.
    extern "C" fn arm_here(_: usize) {
        let code = (&raw const FIRST as usize)..(&raw const END as usize);
        // SAFETY: the handler below is installed, and SIGSYS isn't blocked.
        unsafe { arm(code, &SELECTOR) }.unwrap();
    }

    unsafe extern "C" fn on_sigsys(_: i32, info: *mut Info, context: *mut Context) {
        // SAFETY: the kernel's own structures, for this call.
        let (info, context) = unsafe { (&*info, &mut *context) };
        let call = Call::stopped(info.stopped_call().flatten().expect("a stopped call"), context);
        STOPPED[call.number].fetch_add(1, Ordering::SeqCst);
        match call.number {
            GETPPID => return context.set_register(Register::Rax, ANSWER),
            number::RT_SIGPROCMASK => {
                let [how, set, before, ..] = call.arguments;
                let was = context.blocked;
                if set != 0 {
                    // SAFETY: libc's own arguments.
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
        // Not from malloc, in which the thread may just be; for good, since the kernel reads it after this handler.
        let room = crate::memory::place([0; ROOM_WORDS]).unwrap();
        let making = Making { done: &DONE, maker: 2, newborn: NEWBORN.as_ptr() as usize, room };
        // SAFETY: the context of this very call; nothing here is paged.
        assert!(unsafe { call.make(context, making) });
    }

    fn stopped(number: usize) -> u32 {
        STOPPED[number].load(Ordering::SeqCst)
    }

    /// `vfork()`, whose child ends with 42 without coming back; made outside of this executable's text. Gives the
    /// child's id.
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
        // SAFETY: a new mapping.
        let code =
            unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), 4096, protection, flags) }.unwrap();
        // SAFETY: inside it.
        unsafe { code.cast::<u8>().copy_from(CODE.as_ptr(), CODE.len()) };
        // SAFETY: the code just written, which keeps all registers but rax, rcx, r11 and rdi of the child.
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

//! fork(2) and its relatives: the child has an engine of its own before it runs any code but ours.
//!
//! libc's `fork` touches the heap as soon as it runs in the child. So only the system call itself is early
//! enough. There, in libc's code, a call to ours replaces the system call's instruction.
// UNSAFETY: libc's registers are kept as a system call keeps them.

use crate::dormant;
use crate::init::{begin, can_join, engine, parents_engine};
use crate::libc_symbol;
use crate::patch::{Refused, replace_bytes, size_of_function};
use crate::stack::{self, Task, perform};
use core::arch::naked_asm;
use core::ffi::c_void;
use farpage_os::report;
use farpage_os::sys::{self, number};
use farpage_runtime::engine::Engine;
use farpage_runtime::guard;

/// Code that libc's functions are searched for. A call replaces the bytes that match. The second pattern
/// serves where the compiler has put other instructions between the number and the system call: libc
/// checks for errors at once.
const PATTERNS: [&[u8]; 2] = [
    // mov eax, 56; syscall
    &[0xb8, number::CLONE as u8, 0, 0, 0, 0x0f, 0x05],
    // syscall; cmp rax, -4096
    &[0x0f, 0x05, 0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff],
];

/// Makes libc's forks come here. Both functions are searched, because libc decides which
/// of them has the system call.
pub fn patch() -> Result<(), Refused> {
    let mut found = false;
    for name in [c"_Fork", c"fork"] {
        let function = libc_symbol(name);
        if !function.is_null() {
            found |= patch_in(function.cast())?;
        }
    }
    if found { Ok(()) } else { Err(Refused) }
}

fn patch_in(function: *mut u8) -> Result<bool, Refused> {
    let size = size_of_function(function.cast::<c_void>());
    // SAFETY: libc's code of that size, which is readable.
    let code = unsafe { core::slice::from_raw_parts(function, size) };
    let find = |pattern: &&[u8]| code.windows(pattern.len()).position(|bytes| bytes == *pattern);
    let Some((at, which)) = (0..PATTERNS.len()).find_map(|which| Some((find(&PATTERNS[which])?, which)))
    else {
        return Ok(false);
    };
    let place = function.wrapping_add(at);
    let target = [entrance_for_clone as *const (), entrance as *const ()][which];
    let distance = (target as isize).wrapping_sub(place as isize + CALL_BYTES as isize);
    // `call rel32`, then no-ops.
    let mut call = [0x90; 8];
    call[0] = 0xe8;
    call[1..CALL_BYTES].copy_from_slice(&i32::try_from(distance).map_err(|_| Refused)?.to_le_bytes());
    replace_bytes(place, &call[..PATTERNS[which].len()])?;
    Ok(true)
}

const CALL_BYTES: usize = 5;

/// Sets the number of clone(2), then goes on as [`entrance`].
#[unsafe(naked)]
unsafe extern "C" fn entrance_for_clone() {
    naked_asm!("mov eax, {clone}", "jmp {entrance}", clone = const number::CLONE, entrance = sym entrance)
}

/// Called in the place of the system call, which keeps all registers but rax, rcx and r11. This
/// function must do the same. Where the patch also replaced libc's comparison with -4096, libc wants
/// the flags of that comparison.
#[unsafe(naked)]
unsafe extern "C" fn entrance() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push r9",
        "push r8",
        "push r10",
        "push rdx",
        "push rsi",
        "push rdi",
        "mov rdi, rsp",
        "mov rsi, rax",
        "sub rsp, 256",
        "and rsp, -16",
        "movaps [rsp], xmm0",
        "movaps [rsp + 16], xmm1",
        "movaps [rsp + 32], xmm2",
        "movaps [rsp + 48], xmm3",
        "movaps [rsp + 64], xmm4",
        "movaps [rsp + 80], xmm5",
        "movaps [rsp + 96], xmm6",
        "movaps [rsp + 112], xmm7",
        "movaps [rsp + 128], xmm8",
        "movaps [rsp + 144], xmm9",
        "movaps [rsp + 160], xmm10",
        "movaps [rsp + 176], xmm11",
        "movaps [rsp + 192], xmm12",
        "movaps [rsp + 208], xmm13",
        "movaps [rsp + 224], xmm14",
        "movaps [rsp + 240], xmm15",
        "call {by_libc}",
        "movaps xmm0, [rsp]",
        "movaps xmm1, [rsp + 16]",
        "movaps xmm2, [rsp + 32]",
        "movaps xmm3, [rsp + 48]",
        "movaps xmm4, [rsp + 64]",
        "movaps xmm5, [rsp + 80]",
        "movaps xmm6, [rsp + 96]",
        "movaps xmm7, [rsp + 112]",
        "movaps xmm8, [rsp + 128]",
        "movaps xmm9, [rsp + 144]",
        "movaps xmm10, [rsp + 160]",
        "movaps xmm11, [rsp + 176]",
        "movaps xmm12, [rsp + 192]",
        "movaps xmm13, [rsp + 208]",
        "movaps xmm14, [rsp + 224]",
        "movaps xmm15, [rsp + 240]",
        "lea rsp, [rbp - 48]",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop r10",
        "pop r8",
        "pop r9",
        "pop rbp",
        "cmp rax, -4096",
        "ret",
        by_libc = sym by_libc,
    )
}

extern "C" fn by_libc(arguments: *const [usize; 6], call: usize) -> isize {
    // SAFETY: `entrance` has put the six arguments there.
    let arguments = unsafe { *arguments };
    match call {
        number::CLONE => forked(arguments),
        // SAFETY: libc's own call, unchanged.
        _ => unsafe { sys::call(call, arguments) },
    }
}

/// Makes a fork, with the arguments of clone(2). Returns the kernel's word, once in the
/// parent and once in the child.
pub fn forked(arguments: [usize; 6]) -> isize {
    if let Some(word) = dormant::forked(arguments) {
        return word;
    }
    match engine() {
        Some(engine) => perform(engine, Task::Fork(arguments, &raw const arguments as usize)),
        // SAFETY: the program's own call, unchanged.
        None => unsafe { sys::call(number::CLONE, arguments) },
    }
}

/// Makes the fork itself, on a stack of Farpage's, with signals blocked.
pub fn make(engine: &'static Engine, arguments: [usize; 6], stack_pointer: usize) -> isize {
    // SAFETY: takes nothing.
    let maker = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    // SAFETY: the program's own call. Parent and child have a copy of this stack each.
    let result = farpage_runtime::engine::fork::fork(engine, can_join, || unsafe {
        sys::call(number::CLONE, arguments)
    });
    if result == 0 {
        stack::only_this_one();
        farpage_runtime::engine::fork::child(engine, maker, stack_pointer);
        // Nobody asks this thread to arm itself before the child's engine begins.
        let stack = guard::stack_of_child();
        let begins = guard::without_stack(stack, || begin(parents_engine()));
        if !begins && engine.heirs.are_left_pages() {
            report::say(
                "the supervisor is gone, or 256 processes run under it: a fork's child can't get at what is evicted",
            );
            sys::exit_group(crate::init::FAILED);
        }
    }
    result
}

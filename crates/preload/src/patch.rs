//! Makes libc's functions lead to ours, even when libc itself calls them.
//!
//! malloc, realloc, thread creation and the rest of libc call mmap, mremap, brk and so on directly. These
//! calls bypass whatever a preloaded library exports under these names. A mapping that is moved without our
//! knowledge loses its registration, and would read as zeros. So the first bytes of the functions themselves
//! become a jump. Each function is a small wrapper around one system call, and our function makes that call,
//! too, so nothing of the wrapper is needed.

use crate::actions;
use crate::hooks;
use crate::libc_symbol;
use core::ffi::{CStr, c_int, c_void};
use farpage_os::proc::OwnMemory;
use farpage_os::sys::{self, number};

/// `movabs r11, address; jmp r11`. r11 is free at a function's entry, and a system call destroys it anyway.
pub const JUMP_BYTES: usize = 13;

/// Returns libc's functions, and the functions that replace them.
fn table() -> [(&'static CStr, *const c_void); 20] {
    [
        (c"mmap", hooks::mmap as *const c_void),
        (c"mmap64", hooks::mmap as *const c_void),
        (c"munmap", hooks::munmap as *const c_void),
        (c"mremap", hooks::mremap as *const c_void),
        (c"madvise", hooks::madvise as *const c_void),
        (c"mprotect", hooks::mprotect as *const c_void),
        (c"pkey_mprotect", hooks::pkey_mprotect as *const c_void),
        (c"mlock", hooks::mlock as *const c_void),
        (c"mlock2", hooks::mlock2 as *const c_void),
        (c"munlock", hooks::munlock as *const c_void),
        (c"mlockall", hooks::mlockall as *const c_void),
        (c"munlockall", hooks::munlockall as *const c_void),
        (c"brk", hooks::brk as *const c_void),
        (c"mseal", hooks::mseal as *const c_void),
        (c"process_madvise", hooks::process_madvise as *const c_void),
        (c"shmat", hooks::shmat as *const c_void),
        (c"execve", hooks::execve as *const c_void),
        (c"execveat", hooks::execveat as *const c_void),
        (c"fexecve", hooks::fexecve as *const c_void),
        (c"syscall", hooks::syscall as *const c_void),
    ]
}

/// A function could not be replaced.
#[derive(Debug)]
pub struct Refused;

/// Replaces every function of the table. Must run before the program has a second thread.
pub fn all() -> Result<(), Refused> {
    hooks::find_break();
    for (name, replacement) in table() {
        let function = libc_symbol(name);
        // Not every libc has all of these functions. A missing function can't be called.
        if !function.is_null() {
            replace(function, replacement)?;
        }
    }
    // `actions::sigaction` makes its call through libc's `syscall`, which is found by now. A libc whose
    // `sigaction` or `_exit` can't be replaced keeps its own.
    if actions::prepare() {
        let _ = replace(libc_symbol(c"sigaction"), actions::sigaction as *const c_void);
    }
    let _ = replace(libc_symbol(c"_exit"), hooks::exit_now as *const c_void);
    Ok(())
}

fn replace(function: *mut c_void, replacement: *const c_void) -> Result<(), Refused> {
    let size = size_of_function(function);
    if size < JUMP_BYTES {
        return Err(Refused);
    }
    if replacement == hooks::syscall as *const c_void {
        // The jump ends before the system call instruction.
        hooks::find_system_call(function.cast_const().cast(), size);
    }
    replace_bytes(function.cast(), &jump_to(replacement))
}

fn jump_to(replacement: *const c_void) -> [u8; JUMP_BYTES] {
    let mut jump = [0_u8; JUMP_BYTES];
    jump[..2].copy_from_slice(&[0x49, 0xbb]);
    jump[2..10].copy_from_slice(&(replacement as usize).to_le_bytes());
    jump[10..].copy_from_slice(&[0x41, 0xff, 0xe3]);
    jump
}

/// Writes `code` over libc's. Must run before the program has a second thread.
pub fn replace_bytes(place: *mut u8, code: &[u8]) -> Result<(), Refused> {
    let start = place as usize & !0xfff;
    let bytes = (place as usize + code.len()).next_multiple_of(4096) - start;
    const READ_WRITE_EXECUTE: usize = 7;
    const READ_EXECUTE: usize = 5;
    if protect(start, bytes, READ_WRITE_EXECUTE).is_err() {
        // Executable memory must never be writable in this process: PR_SET_MDWE is set, which a process
        // inherits from the program that starts it. So the code is written as a debugger writes it.
        let memory = OwnMemory::open().map_err(|_| Refused)?;
        // SAFETY: as below; none of our own code is there.
        return unsafe { memory.write_code(place as usize, code) }.map_err(|_| Refused);
    }
    // SAFETY: the function has at least `code.len()` bytes, which are writable now. No thread executes them:
    // the library is being loaded, and this code makes its system calls itself.
    unsafe { place.copy_from_nonoverlapping(code.as_ptr(), code.len()) };
    protect(start, bytes, READ_EXECUTE)
}

fn protect(start: usize, bytes: usize, protection: usize) -> Result<(), Refused> {
    // SAFETY: the pages hold libc's code, which stays readable and executable throughout.
    sys::check(unsafe { sys::call(number::MPROTECT, [start, bytes, protection, 0, 0, 0]) })
        .map(|_| ())
        .map_err(|_| Refused)
}

#[repr(C)]
struct DlInfo {
    file: *const u8,
    base: *const u8,
    name: *const u8,
    address: *const u8,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

unsafe extern "C" {
    fn dladdr1(address: *const c_void, info: *mut DlInfo, extra: *mut *const Symbol, flags: c_int) -> c_int;
}

/// Returns the file that this code was loaded from, as the loader was told.
pub fn file_of(code: *const c_void) -> Option<&'static CStr> {
    let null = core::ptr::null();
    let mut info = DlInfo { file: null, base: null, name: null, address: null };
    let mut symbol = core::ptr::null();
    // SAFETY: both results are ours to write. Flag 0 asks for no more than the first.
    let found = unsafe { dladdr1(code, &raw mut info, &raw mut symbol, 0) };
    // SAFETY: the text is the loader's, and stays as long as the library.
    (found != 0 && !info.file.is_null()).then(|| unsafe { CStr::from_ptr(info.file.cast()) })
}

/// Returns the size in bytes that libc's symbol table gives for the function; 0 if the table doesn't have it.
pub fn size_of_function(function: *const c_void) -> usize {
    const RTLD_DL_SYMENT: c_int = 1;
    let null = core::ptr::null();
    let mut info = DlInfo { file: null, base: null, name: null, address: null };
    let mut symbol = core::ptr::null();
    // SAFETY: both results are ours to write; the symbol lies in libc's table, which stays.
    let found = unsafe { dladdr1(function, &raw mut info, &raw mut symbol, RTLD_DL_SYMENT) };
    // SAFETY: null, or a symbol of libc's table.
    let symbol = unsafe { symbol.as_ref() }.filter(|_| found != 0 && info.address == function.cast());
    symbol.map_or(0, |symbol| symbol.size as usize)
}

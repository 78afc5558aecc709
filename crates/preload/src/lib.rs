//! The shared library that `farpage run` puts into a program.
//!
//! It is loaded before the program's own code runs, starts an engine, and puts itself in the place of libc's
//! calls that change memory. From then on everything happens in the runtime; here is only the door.
//!
//! [`init`] when the library is loaded · [`dormant`] what it may do without an engine · [`patch`] libc's functions lead to ours · [`hooks`] what they do ·
//! [`actions`] what signals do · [`stack`] on which stack · [`fork`] copies of the process · [`exec`] what it starts ·
//! [`threads`] stacks of the program's choice · [`credentials`] what it may do
#![no_std]

mod actions;
mod credentials;
mod dormant;
mod exec;
mod fork;
mod hooks;
mod init;
mod patch;
mod peers;
mod stack;
mod threads;

use core::ffi::{c_char, c_int, c_void};

#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
}

/// `dlsym(RTLD_NEXT, name)`: the function that ours hides, or null.
fn next_symbol(name: &core::ffi::CStr) -> *mut c_void {
    const RTLD_NEXT: *mut c_void = -1_isize as *mut c_void;
    // SAFETY: the name is NUL-terminated; called while the library is initialised, when libc is ready.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// A function or variable of libc itself, or null. Not the next one of that name: another library may export
/// a wrapper, and libc's own callers (realloc, say) don't go through that.
fn libc_symbol(name: &core::ffi::CStr) -> *mut c_void {
    const RTLD_LAZY: c_int = 1;
    const RTLD_NOLOAD: c_int = 4;
    // SAFETY: libc.so.6 is loaded, we are linked to it; the names are NUL-terminated.
    unsafe {
        let libc = dlopen(c"libc.so.6".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
        if libc.is_null() { libc } else { dlsym(libc, name.as_ptr()) }
    }
}

/// Sets the calling thread's errno. Only in threads of the program.
fn set_errno(errno: i32) {
    // SAFETY: libc's threads have an errno at that place.
    unsafe { *__errno_location() = errno };
}

/// The calling thread's errno. Likewise.
fn errno() -> i32 {
    // SAFETY: as above.
    unsafe { *__errno_location() }
}

/// A bug of ours. There is nobody to unwind to: end the process, where the program stands.
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    farpage_os::report::panic(info)
}

/// Demanded by precompiled `core` where a build isn't optimised; never called, since panics abort.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

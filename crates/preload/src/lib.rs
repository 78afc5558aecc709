//! The shared library that `farpage run` puts into a program.
//!
//! The loader loads the library before the program's own code runs. The library starts an engine
//! and replaces libc's calls that change memory. Everything after that happens in the runtime;
//! this crate is only the door.
//!
//! - [`init`] runs when the library is loaded.
//! - [`dormant`] decides which calls of a dormant process need an engine first.
//! - [`patch`] makes libc's functions lead to ours; [`hooks`] are those functions.
//! - [`actions`] keeps what signals do; [`stack`] gives hooks stacks of their own.
//! - [`fork`] gives each copy of the process its engine; [`exec`] keeps started programs in the run.
//! - [`threads`] keeps stacks of the program's choice in memory.
//! - [`credentials`] has our threads follow a change of what the program may do.
//! - [`peers`] tells of failed transfers between processes.
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

use core::ffi::{c_char, c_int, c_ulong, c_void};

#[link(name = "c")]
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn __errno_location() -> *mut c_int;
    fn getauxval(kind: c_ulong) -> c_ulong;
}

/// `dlsym(RTLD_NEXT, name)`: returns the function that ours hides, or null.
fn next_symbol(name: &core::ffi::CStr) -> *mut c_void {
    const RTLD_NEXT: *mut c_void = -1_isize as *mut c_void;
    // SAFETY: the name is NUL-terminated; called while the library is initialised, when libc is ready.
    unsafe { dlsym(RTLD_NEXT, name.as_ptr()) }
}

/// Returns a function or variable of libc itself, or null. The next symbol of that name would not do: another
/// library may export a wrapper, and libc's own callers (realloc, say) bypass the wrapper.
fn libc_symbol(name: &core::ffi::CStr) -> *mut c_void {
    const RTLD_LAZY: c_int = 1;
    const RTLD_NOLOAD: c_int = 4;
    // SAFETY: libc.so.6 is loaded, because this library is linked to it. The names are NUL-terminated.
    unsafe {
        let libc = dlopen(c"libc.so.6".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
        if libc.is_null() { libc } else { dlsym(libc, name.as_ptr()) }
    }
}

/// Sets the calling thread's errno. Only threads of the program may call this.
fn set_errno(errno: i32) {
    // SAFETY: libc's threads have an errno at that place.
    unsafe { *__errno_location() = errno };
}

/// Returns the calling thread's errno. Only threads of the program may call this.
fn errno() -> i32 {
    // SAFETY: as above.
    unsafe { *__errno_location() }
}

/// Reports a bug of Farpage's. There is nobody to unwind to, so the process ends where the program stands.
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    farpage_os::report::panic(info)
}

/// Exists because precompiled `core` demands the symbol in a build that isn't optimised. Never
/// called, since panics abort.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

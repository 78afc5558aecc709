//! fork(2) and its relatives: refused while pages are out, otherwise the child gets an engine of its own.

use crate::init::{begin, engine, parents_engine};
use crate::stack::{self, Task, perform};
use crate::{next_symbol, set_errno};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use farpage_os::thread::SignalsBlocked;
use linux_raw_sys::errno::ENOMEM;

static FORK: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static FORK_BARE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Finds the functions that ours hide.
pub fn prepare() {
    FORK.store(next_symbol(c"fork"), Ordering::Relaxed);
    FORK_BARE.store(next_symbol(c"_Fork"), Ordering::Relaxed);
}

type ForkFunction = unsafe extern "C" fn() -> c_int;

fn call(function: &AtomicPtr<c_void>, name: &core::ffi::CStr) -> c_int {
    let mut address = function.load(Ordering::Relaxed);
    if address.is_null() {
        address = next_symbol(name);
    }
    // SAFETY: libc's function of this name, which takes nothing and returns an int.
    let function = unsafe { core::mem::transmute::<*mut c_void, ForkFunction>(address) };
    // SAFETY: the program asked for a fork.
    unsafe { function() }
}

fn guarded(function: &AtomicPtr<c_void>, name: &core::ffi::CStr) -> c_int {
    let Some(engine) = engine() else { return call(function, name) };
    // A handler that ran in between might fork too, or never return.
    let _signals = SignalsBlocked::new();
    if perform(engine, Task::BeforeFork) == 0 {
        set_errno(ENOMEM as i32);
        return -1;
    }
    let child = call(function, name);
    if child != 0 {
        perform(engine, Task::AfterFork);
        return child;
    }
    stack::reset_in_child();
    farpage::fork::child();
    begin(parents_engine());
    0
}

/// fork(2)
#[unsafe(no_mangle)]
pub extern "C" fn fork() -> c_int {
    guarded(&FORK, c"fork")
}

/// _Fork(3)
#[unsafe(no_mangle)]
pub extern "C" fn _Fork() -> c_int {
    guarded(&FORK_BARE, c"_Fork")
}

//! Keeps thread stacks of the program's choice in memory.
//!
//! libc puts a thread's control block at the end of its stack. When the thread ends, the kernel clears a word
//! there, and no longer waits for a fault. If that page were out, a thread that joins the ended one would
//! wait for ever. Stacks that libc makes itself (MAP_STACK) are never managed.

use crate::dormant;
use crate::init::engine;
use crate::next_symbol;
use crate::stack::{Task, perform};
use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use farpage_core::units::PageRange;

/// libc's functions that those below hide.
static SET_STACK: Hidden =
    Hidden { name: c"pthread_attr_setstack", found: AtomicPtr::new(core::ptr::null_mut()) };
static SET_GUARD: Hidden =
    Hidden { name: c"pthread_attr_setguardsize", found: AtomicPtr::new(core::ptr::null_mut()) };

/// A function of libc that ours hides.
struct Hidden {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Hidden {
    fn find(&self) {
        self.found.store(next_symbol(self.name), Ordering::Relaxed);
    }

    fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() { next_symbol(self.name) } else { found }
    }
}

/// Finds the functions that ours hide.
pub fn prepare() {
    SET_STACK.find();
    SET_GUARD.find();
}

/// pthread_attr_setguardsize(3). libc maps a stack without a guard like the small stack of posix_spawn, which
/// doesn't end dormancy.
#[unsafe(no_mangle)]
pub extern "C" fn pthread_attr_setguardsize(attributes: *mut c_void, bytes: usize) -> c_int {
    if bytes == 0 {
        dormant::start_engine();
    }
    type SetGuard = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    // SAFETY: libc's function of this name and type.
    let function = unsafe { core::mem::transmute::<*mut c_void, SetGuard>(SET_GUARD.get()) };
    // SAFETY: the program's own call, unchanged.
    unsafe { function(attributes, bytes) }
}

/// pthread_attr_setstack(3)
#[unsafe(no_mangle)]
pub extern "C" fn pthread_attr_setstack(attributes: *mut c_void, stack: usize, bytes: usize) -> c_int {
    dormant::start_engine();
    if let Some(engine) = engine().filter(|_| stack.checked_add(bytes).is_some()) {
        perform(engine, Task::Hold(PageRange::covering(stack, bytes)));
    }
    type SetStack = unsafe extern "C" fn(*mut c_void, usize, usize) -> c_int;
    // SAFETY: libc's function of this name and type.
    let function = unsafe { core::mem::transmute::<*mut c_void, SetStack>(SET_STACK.get()) };
    // SAFETY: the program's own call, unchanged.
    unsafe { function(attributes, stack, bytes) }
}

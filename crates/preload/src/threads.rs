//! Keeps thread stacks of the program's choice in memory.
//!
//! libc puts a thread's control block at the end of its stack. When the thread ends, the kernel clears a word
//! there, and no longer waits for a fault. If that page were out, a thread that joins the ended one would
//! wait for ever. Stacks that libc makes itself (MAP_STACK) are never managed.

use crate::dormant;
use crate::init::engine;
use crate::next_symbol;
use crate::stack::{Task, perform};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use farpage_core::units::PageRange;

static SET_STACK: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Finds the function that ours hides.
pub fn prepare() {
    SET_STACK.store(next_symbol(c"pthread_attr_setstack"), Ordering::Relaxed);
}

/// pthread_attr_setstack(3)
#[unsafe(no_mangle)]
pub extern "C" fn pthread_attr_setstack(attributes: *mut c_void, stack: usize, bytes: usize) -> c_int {
    dormant::start_engine();
    if let Some(engine) = engine().filter(|_| stack.checked_add(bytes).is_some()) {
        perform(engine, Task::Hold(PageRange::covering(stack, bytes)));
    }
    let mut function = SET_STACK.load(Ordering::Relaxed);
    if function.is_null() {
        function = next_symbol(c"pthread_attr_setstack");
    }
    type SetStack = unsafe extern "C" fn(*mut c_void, usize, usize) -> c_int;
    // SAFETY: libc's function of this name and type.
    let function = unsafe { core::mem::transmute::<*mut c_void, SetStack>(function) };
    // SAFETY: the program's own call, unchanged.
    unsafe { function(attributes, stack, bytes) }
}

//! Makes libc's sigaction(3) lead to ours: `signal` and its relatives in libc call it, too.
//!
//! While threads are being armed, a thread that isn't armed yet may change what a signal does in armed
//! threads. So a change by libc is kept like an armed thread's change
//! (`farpage_runtime::guard::change_by_libc`).
// UNSAFETY: libc's structures and its restorer are used.

use crate::init::engine;
use crate::{dormant, hooks, libc_symbol, set_errno};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};
use farpage_os::signal::Action;
use farpage_os::sys::{Errno, number};
use farpage_runtime::guard;

/// libc's `struct sigaction` on x86-64.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LibcAction {
    handler: usize,
    /// Signal mask of 1,024 bits, of which the kernel knows the first 64.
    mask: [u64; 16],
    flags: c_int,
    restorer: usize,
}

const SA_RESTORER: u64 = 0x0400_0000;
/// The last signal, which nothing uses.
const LAST: c_int = 64;
/// libc's own two signals: for thread cancellation, and for set-user-id calls.
const INTERNAL: core::ops::RangeInclusive<c_int> = 32..=33;

/// Address that libc's handlers return to; 0 if unknown.
static RESTORER: AtomicUsize = AtomicUsize::new(0);

/// Finds libc's restorer. Returns whether libc's function can be replaced.
pub fn prepare() -> bool {
    type Function = unsafe extern "C" fn(c_int, *const LibcAction, *mut LibcAction) -> c_int;
    let function = libc_symbol(c"sigaction");
    if function.is_null() {
        return false;
    }
    // SAFETY: libc's function of this name and type.
    let function = unsafe { core::mem::transmute::<*mut c_void, Function>(function) };
    let mut action = LibcAction { handler: 0, mask: [0; 16], flags: 0, restorer: 0 };
    let place = &raw mut action;
    // libc gives its restorer to the kernel with any disposition, so this sets the disposition
    // that is there already.
    // SAFETY: both are libc's structure; nothing changes.
    let is_set = unsafe {
        function(LAST, core::ptr::null(), place) == 0 && function(LAST, place, core::ptr::null_mut()) == 0
    };
    let restorer = farpage_os::signal::action_of(LAST as u32).map_or(0, |action| action.restorer);
    RESTORER.store(restorer, Ordering::Relaxed);
    is_set && restorer != 0
}

/// sigaction(2)
///
/// # Safety
/// As libc's.
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const LibcAction, old: *mut LibcAction) -> c_int {
    if !(1..=LAST).contains(&signal) || INTERNAL.contains(&signal) {
        set_errno(Errno::EINVAL.0);
        return -1;
    }
    // Copies, because the originals may lie in memory of the program's that is evicted.
    // SAFETY: null, or libc's structure: the caller's promise.
    let new = unsafe { new.as_ref() }.map(|new| Action {
        handler: new.handler,
        flags: new.flags as u32 as u64 | SA_RESTORER,
        restorer: RESTORER.load(Ordering::Relaxed),
        mask: new.mask[0],
    });
    dormant::before_action(signal as u32, new.is_some());
    let call = || by_kernel(signal, new);
    let found = match engine() {
        Some(engine) => guard::change_by_libc(engine, signal as u32, new, call),
        None => call().map(dormant::seen),
    };
    match found {
        Ok(found) => {
            // SAFETY: as above.
            if let Some(old) = unsafe { old.as_mut() } {
                (old.handler, old.flags, old.restorer) =
                    (found.handler, found.flags as c_int, found.restorer);
                old.mask[0] = found.mask;
            }
            0
        }
        Err(Errno(errno)) => {
            set_errno(errno);
            -1
        }
    }
}

/// Makes the kernel's call where an armed thread's calls are intercepted.
fn by_kernel(signal: c_int, new: Option<Action>) -> Result<Action, Errno> {
    let (words, mut found) = (new.map(|new| new.to_words()), [0_u64; 4]);
    let place = words.as_ref().map_or(0, |words| words.as_ptr() as usize);
    let arguments = [signal as usize, place, found.as_mut_ptr() as usize, size_of::<u64>(), 0, 0];
    // SAFETY: the program's own call, with the kernel's structures.
    unsafe { hooks::by_libc(number::RT_SIGACTION, arguments) }?;
    Ok(Action::from_words(found))
}

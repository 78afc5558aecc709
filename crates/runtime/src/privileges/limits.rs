//! Resource limits that the program gives itself (setrlimit, prlimit).
//!
//! The kernel counts an engine's threads, descriptors, signals and tables as the program's. An engine takes
//! most of them when memory reaches the budget. A limit could refuse them by then. So the engine becomes
//! active, and takes them, before the limit holds.
// UNSAFETY: the kernel writes the current limit to a raw address.

use crate::engine::{Engine, FaultMode};
use crate::mappings::changes::Arguments;
use crate::session::Retired;
use farpage_os::peek;
use farpage_os::proc::Statm;
use farpage_os::sys::{self, number};
use linux_raw_sys::general as raw;

/// Descriptors below which an engine may lack one. An engine has some ten of its own, and one for each swap
/// area.
const DESCRIPTORS: u64 = 64;

/// Returns which limit a call sets, and the address of its new value. None if the call only asks, or is about
/// another process.
fn asked(call: usize, arguments: &Arguments) -> Option<(u32, usize)> {
    let [first, second, third, ..] = *arguments;
    match call as u32 {
        raw::__NR_setrlimit => Some((first as u32, second)),
        raw::__NR_prlimit64 if third != 0 && (first == 0 || first as u32 == own_process()) => {
            Some((second as u32, third))
        }
        _ => None,
    }
}

fn own_process() -> u32 {
    // SAFETY: the call takes no argument.
    unsafe { sys::call(number::GETPID, [0; 6]) as u32 }
}

/// Returns which limit of this process a call sets.
pub fn set_by(call: usize, arguments: &Arguments) -> Option<u32> {
    asked(call, arguments).map(|(resource, _)| resource)
}

/// Whether a call sets a limit on something that an engine takes.
pub fn is_about(call: usize, arguments: &Arguments) -> bool {
    matches!(
        set_by(call, arguments),
        Some(
            raw::RLIMIT_NPROC
                | raw::RLIMIT_NOFILE
                | raw::RLIMIT_AS
                | raw::RLIMIT_DATA
                | raw::RLIMIT_SIGPENDING
        )
    )
}

/// Returns the value of a limit that holds now: the lower of its two values.
fn current(resource: u32) -> u64 {
    let mut limit = [u64::MAX; 2];
    let arguments = [0, resource as usize, 0, (&raw mut limit).addr(), 0, 0];
    // SAFETY: the kernel writes two words, which `limit` has.
    let _ = unsafe { sys::call(raw::__NR_prlimit64 as usize, arguments) };
    limit[0]
}

/// Prepares the engine for a call that sets a limit. The calling thread is about to make the call. The thread
/// is on one of Farpage's stacks, has signals blocked, and holds no lock.
pub fn prepare(engine: &Engine, call: usize, arguments: &Arguments) {
    let Some((resource, place)) = asked(call, arguments).filter(|_| is_about(call, arguments)) else {
        return;
    };
    // A child of vfork has limits of its own. The kernel refuses a value that can't be read.
    let Some(new) = peek::read::<8>(place).filter(|_| own_process() == engine.process) else { return };
    let new = u64::from_ne_bytes(new);
    let may_lack = match resource {
        raw::RLIMIT_NOFILE => new < DESCRIPTORS,
        _ => new < current(resource),
    };
    if !may_lack {
        return;
    }
    // In `segv` mode the kernel no longer counts an evicted page, and could refuse the page when it comes
    // back.
    if resource == raw::RLIMIT_DATA && engine.mode() == FaultMode::Segv {
        return engine.retire(Retired::DataLimit);
    }
    engine.activate_now();
}

/// Whether RLIMIT_DATA keeps the program from getting another page with a protection of its own.
pub(crate) fn is_data_full(statm: &Statm) -> bool {
    let most = current(raw::RLIMIT_DATA);
    most != u64::MAX && statm.sizes().is_ok_and(|sizes| sizes.writable_bytes >= most)
}

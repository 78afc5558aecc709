//! Calls that read or write another process's memory. Where faults aren't messages, the kernel can't bring
//! a page back for another process, and the call fails. The user is told, because the program's own
//! message names no cause.

use crate::hooks::{by_libc, result};
use crate::init::engine;
use core::ffi::c_int;
use farpage_os::errno::Errno;
use farpage_os::sys::number;
use farpage_runtime::mappings::changes::Arguments;

/// Notes that a call has failed, if the call is about another process's memory.
pub fn note_failure(call: usize, arguments: Arguments, errno: i32) {
    let is_meant = matches!(call, number::PROCESS_VM_READV | number::PROCESS_VM_WRITEV);
    if let Some(engine) = engine().filter(|_| is_meant && errno == Errno::EFAULT.0) {
        engine.note_unreached_peer(arguments[0] as u32);
    }
}

/// Makes the call as the program makes it, and notes a failure.
fn transfer(call: usize, arguments: Arguments) -> isize {
    // SAFETY: the program's own call, unchanged.
    let done = unsafe { by_libc(call, arguments) };
    if let Err(errno) = done {
        note_failure(call, arguments, errno.0);
    }
    result(done.map_or_else(|errno| -(errno.0 as isize), |bytes| bytes as isize))
}

/// process_vm_readv(2)
#[unsafe(no_mangle)]
pub extern "C" fn process_vm_readv(
    process: c_int,
    own: usize,
    own_count: usize,
    others: usize,
    others_count: usize,
    flags: usize,
) -> isize {
    transfer(number::PROCESS_VM_READV, [process as usize, own, own_count, others, others_count, flags])
}

/// process_vm_writev(2)
#[unsafe(no_mangle)]
pub extern "C" fn process_vm_writev(
    process: c_int,
    own: usize,
    own_count: usize,
    others: usize,
    others_count: usize,
    flags: usize,
) -> isize {
    transfer(number::PROCESS_VM_WRITEV, [process as usize, own, own_count, others, others_count, flags])
}

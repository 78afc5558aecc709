//! Access to memory of the program that may not be mapped. The kernel tries the access and reports whether it
//! worked.
//!
//! Used on the arguments of the program's system calls before the calls are made. A wrong address must be
//! answered by the kernel, as without Farpage, and must not end the program here.
// UNSAFETY: addresses come from the program.

use crate::errno::returned;
use crate::sys::{self, Errno, number};

/// Returns whether the 8 bytes at `address` can be read, at the cost of one short system call.
pub fn is_readable(address: usize) -> bool {
    // The kernel reads the set first and looks at the operation afterwards. No operation has this number, so
    // nothing changes.
    const NO_SUCH_CHANGE: usize = 99;
    // At address 0 the kernel takes the set as not given and reads nothing.
    // SAFETY: the kernel reads 8 bytes if it can, and changes nothing.
    address != 0
        && unsafe {
            sys::call(number::RT_SIGPROCMASK, [NO_SUCH_CHANGE, address, 0, 8, 0, 0]) != returned::EFAULT
        }
}

/// Returns whether the 8 bytes at `address` can be written. The call may change the bytes. A stack grows as
/// for any write.
///
/// # Safety
/// No code may need the bytes that are there.
pub unsafe fn can_overwrite(address: usize) -> bool {
    // The call asks for the blocked signals and doesn't change them.
    // SAFETY: the kernel writes 8 bytes if it can, and no code needs the old ones, by the caller's promise.
    sys::check(unsafe { sys::call(number::RT_SIGPROCMASK, [0, 0, address, 8, 0, 0]) }).is_ok()
}

/// Returns a copy of the bytes at `address`, or none if they can't be read.
pub fn read<const N: usize>(address: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let done = transfer(number::PROCESS_VM_READV, bytes.as_mut_ptr() as usize, address, N);
    done.then_some(bytes)
}

/// Fills `bytes` with the bytes at `address`. Returns false if not all of them can be read.
pub fn read_into(address: usize, bytes: &mut [u8]) -> bool {
    transfer(number::PROCESS_VM_READV, bytes.as_mut_ptr() as usize, address, bytes.len())
}

/// Writes `bytes` to `address`. Returns false if not all of them can be written.
///
/// # Safety
/// The program must expect the bytes at `address`.
pub unsafe fn write(address: usize, bytes: &[u8]) -> bool {
    transfer(number::PROCESS_VM_WRITEV, bytes.as_ptr() as usize, address, bytes.len())
}

/// Returns whether a thread of this process has ended. The kernel lists an ended first thread as long as
/// other threads live.
pub fn has_ended(thread: u32) -> bool {
    let (from, mut to) = (0_u8, 0_u8);
    let [own, theirs] = [[(&raw mut to).addr(), 1], [(&raw const from).addr(), 1]];
    let arguments = [thread as usize, own.as_ptr() as usize, 1, theirs.as_ptr() as usize, 1, 0];
    // SAFETY: the kernel copies a byte from one variable of this function to the other.
    unsafe { sys::call(number::PROCESS_VM_READV, arguments) == -(Errno::ESRCH.0 as isize) }
}

fn transfer(call: usize, own: usize, theirs: usize, bytes: usize) -> bool {
    let (own, theirs) = ([own, bytes], [theirs, bytes]);
    // The process's first thread may have ended. The kernel finds no memory by its number then.
    // SAFETY: the call takes no argument.
    let thread = unsafe { sys::call(number::GETTID, [0; 6]) } as usize;
    let arguments = [thread, own.as_ptr() as usize, 1, theirs.as_ptr() as usize, 1, 0];
    // SAFETY: one side is memory of the callers. The kernel checks the other side, and copies as far as it is
    // there.
    sys::check(unsafe { sys::call(call, arguments) }) == Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_read_and_written_and_what_is_not_is_said_to_be_missing() {
        let mut words = [7_u64, 8];
        let address = &raw mut words as usize;
        assert!(is_readable(address));
        assert_eq!(read::<8>(address + 8), Some(8_u64.to_ne_bytes()));
        // SAFETY: the test's own words.
        assert!(unsafe { write(address, &9_u64.to_ne_bytes()) });
        assert_eq!(words, [9, 8]);
        let nowhere = 4096;
        // SAFETY: one address is the test's own word, and nothing is mapped at the other.
        assert!(unsafe { can_overwrite(address) && !can_overwrite(nowhere) });
        assert!(!is_readable(nowhere) && read::<8>(nowhere).is_none());
        // `select()` without a mask gives `pselect6(2)` address 0. A program under Farpage ended when that
        // address was read.
        assert!(!is_readable(0) && read::<8>(0).is_none());
        // SAFETY: nothing is there.
        assert!(!unsafe { write(nowhere, &[1]) });
    }
}

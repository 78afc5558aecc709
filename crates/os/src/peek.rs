//! The program's memory where it may not be there: the kernel looks, and says so.
//!
//! For what a system call of the program's is given, before it is made: a wrong address must be answered by the kernel,
//! as ever, and not end the program here.
// UNSAFETY: addresses come from the program.

use crate::sys::{self, number};

/// Whether the 8 bytes at `address` can be read. It costs one short system call.
pub fn is_readable(address: usize) -> bool {
    // What the kernel does with the set comes after reading it, and there is no such thing to do.
    const NO_SUCH_CHANGE: usize = 99;
    const EFAULT: isize = -14;
    // At 0 it doesn't look.
    // SAFETY: the kernel reads 8 bytes, if it can, and changes nothing.
    address != 0
        && unsafe { sys::call(number::RT_SIGPROCMASK, [NO_SUCH_CHANGE, address, 0, 8, 0, 0]) != EFAULT }
}

/// Whether the 8 bytes at `address` can be written, which may be changed by this. A stack grows as for any write.
///
/// # Safety
/// Nobody may need what they are.
pub unsafe fn can_overwrite(address: usize) -> bool {
    // What is blocked is asked for, and not changed.
    // SAFETY: the kernel writes 8 bytes, if it can; the caller's promise.
    sys::check(unsafe { sys::call(number::RT_SIGPROCMASK, [0, 0, address, 8, 0, 0]) }).is_ok()
}

/// A copy of the bytes at `address`; none if they can't be read.
pub fn read<const N: usize>(address: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let done = transfer(number::PROCESS_VM_READV, bytes.as_mut_ptr() as usize, address, N);
    done.then_some(bytes)
}

/// Fills `bytes` with those at `address`. False if not all can be read.
pub fn read_into(address: usize, bytes: &mut [u8]) -> bool {
    transfer(number::PROCESS_VM_READV, bytes.as_mut_ptr() as usize, address, bytes.len())
}

/// Writes `bytes` to `address`. False if they can't be written there.
///
/// # Safety
/// The program must expect them.
pub unsafe fn write(address: usize, bytes: &[u8]) -> bool {
    transfer(number::PROCESS_VM_WRITEV, bytes.as_ptr() as usize, address, bytes.len())
}

fn transfer(call: usize, own: usize, theirs: usize, bytes: usize) -> bool {
    let (own, theirs) = ([own, bytes], [theirs, bytes]);
    // SAFETY: takes nothing.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as usize;
    let arguments = [process, own.as_ptr() as usize, 1, theirs.as_ptr() as usize, 1, 0];
    // SAFETY: the kernel copies between memory of the callers' and what may not be there, as far as that goes.
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
        // SAFETY: the test's own word, and nothing.
        assert!(unsafe { can_overwrite(address) && !can_overwrite(nowhere) });
        assert!(!is_readable(nowhere) && read::<8>(nowhere).is_none());
        // select() without a mask gives pselect6(2) this address: a program that was taken over ended there.
        assert!(!is_readable(0) && read::<8>(0).is_none());
        // SAFETY: nothing is there.
        assert!(!unsafe { write(nowhere, &[1]) });
    }
}

//! Files that are a process's memory. In `segv` mode the program can't open its own.
//!
//! The kernel lets /proc/PID/mem ignore the protection of a mapping, and Farpage fills pages that way. A
//! program that read its own memory through this file would see zeros for evicted pages, and would lose what
//! it wrote there. [`refuse`] therefore answers the open itself. (With a userfaultfd the kernel answers EIO
//! for evicted pages, and nothing is refused.)

use super::buffers::Memory;
use crate::engine::{Engine, FaultMode};
use farpage_os::dispatch::Call;
use farpage_os::errno::returned;
use farpage_os::{peek, sys};
use linux_raw_sys::general as raw;

const PATH_BYTES_MAX: usize = 4096;

/// Returns the answer to a call that would open a file of memory under a path that ends in `mem`. Returns
/// `None` for every other call. The memory that the call's arguments point to must be there.
pub fn refuse(engine: &Engine, call: &Call, memory: &mut impl Memory) -> Option<isize> {
    if engine.mode() != FaultMode::Segv {
        return None;
    }
    let (directory, path) = match call.number as u32 {
        raw::__NR_open | raw::__NR_creat => (raw::AT_FDCWD as usize, call.arguments[0]),
        raw::__NR_openat | raw::__NR_openat2 => (call.arguments[0], call.arguments[1]),
        _ => return None,
    };
    if !is_named_mem(memory, path) {
        return None;
    }
    // `O_PATH` only looks the file up. Opening a file in this way waits for nothing, whatever kind of file it
    // is.
    let flags = (raw::O_PATH | raw::O_CLOEXEC) as usize;
    // SAFETY: the path is the program's own, and the kernel only reads it.
    let looked = unsafe { sys::call(raw::__NR_openat as usize, [directory, path, flags, 0, 0, 0]) };
    if looked < 0 {
        return None;
    }
    let is_memory = is_memory(looked as usize);
    // SAFETY: the descriptor was just made, and only this function knows it.
    unsafe { sys::call(raw::__NR_close as usize, [looked as usize, 0, 0, 0, 0, 0]) };
    is_memory.then_some(returned::EACCES)
}

/// Returns whether a path ends in "mem".
fn is_named_mem(memory: &mut impl Memory, path: usize) -> bool {
    let mut last = [0_u8; 3];
    let mut at = path;
    while at < path.saturating_add(PATH_BYTES_MAX) {
        // A word that reaches into unreadable memory fails as a whole. Then the bytes before that memory are
        // read one by one.
        let word = memory.word(at).map(u64::to_ne_bytes);
        let byte = if word.is_none() { peek::read::<1>(at) } else { None };
        let bytes = match (&word, &byte) {
            (Some(word), _) => &word[..],
            (None, Some(byte)) => &byte[..],
            (None, None) => return false,
        };
        for byte in bytes {
            if *byte == 0 {
                return last == *b"mem";
            }
            last = [last[1], last[2], *byte];
        }
        at += bytes.len();
    }
    false
}

/// Returns whether a descriptor is some process's memory.
fn is_memory(descriptor: usize) -> bool {
    const PREFIX: &[u8] = b"/proc/thread-self/fd/";
    let mut name = [0_u8; PREFIX.len() + 21];
    name[..PREFIX.len()].copy_from_slice(PREFIX);
    let mut end = PREFIX.len() + 1;
    let mut rest = descriptor;
    while rest >= 10 {
        (rest, end) = (rest / 10, end + 1);
    }
    rest = descriptor;
    for place in name[PREFIX.len()..end].iter_mut().rev() {
        (*place, rest) = (b'0' + (rest % 10) as u8, rest / 10);
    }
    let mut target = [0_u8; 64];
    let arguments = [name.as_ptr() as usize, target.as_mut_ptr() as usize, target.len(), 0, 0, 0];
    // SAFETY: both buffers are on this stack: a text that ends with 0, and 64 bytes for the answer.
    let length = unsafe { sys::call(raw::__NR_readlink as usize, arguments) };
    let target = &target[..length.clamp(0, 64) as usize];
    target.starts_with(b"/proc/") && target.ends_with(b"/mem")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn files_of_memory_are_told_from_others() {
        let memory = File::open("/proc/self/mem").unwrap();
        assert!(is_memory(memory.as_raw_fd() as usize));
        let other = File::open("/proc/self/maps").unwrap();
        assert!(!is_memory(other.as_raw_fd() as usize));
        assert!(!is_memory(123_456_789));
    }
}

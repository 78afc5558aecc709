//! Last words: reports of a bug in Farpage inside another program's process.
//!
//! An engine thread has no standard error. The last words go into memory that the run shares, and the
//! supervisor prints them.

use crate::sys;
use core::fmt::Write;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Words of eight bytes that a text may have.
const WORDS: usize = 64;

/// Space for one text, that of the first process that leaves one. Any bytes are valid.
#[repr(C)]
pub struct LastWords {
    /// The process whose text it is, or 0 if there is no text.
    process: AtomicU32,
    /// The text's length in bytes, set once the text is written.
    length: AtomicU32,
    text: [AtomicU64; WORDS],
}

impl LastWords {
    /// Returns the process, and its text in `buffer` as far as it fits. None if no process has left a text
    /// yet.
    pub fn read<'a>(&self, buffer: &'a mut [u8; WORDS * 8]) -> Option<(u32, &'a [u8])> {
        // Ordering: Acquire pairs with the Release in `write`, so the text is complete.
        let length = (self.length.load(Ordering::Acquire) as usize).min(buffer.len());
        let words = self.text.iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        buffer.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word));
        (length > 0).then(|| (self.process.load(Ordering::Relaxed), &buffer[..length]))
    }

    /// Leaves a text of this process. Returns false if there is a text already.
    pub fn write(&self, process: u32, what: core::fmt::Arguments<'_>) -> bool {
        if self.process.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        let mut text = Text { bytes: [0; WORDS * 8], length: 0 };
        let _ = text.write_fmt(what);
        for (to, from) in self.text.iter().zip(text.bytes.chunks_exact(8)) {
            to.store(from.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)), Ordering::Relaxed);
        }
        // Ordering: Release publishes the text.
        self.length.store(text.length as u32, Ordering::Release);
        true
    }
}

/// A text of bounded length.
struct Text {
    bytes: [u8; WORDS * 8],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let rest = &mut self.bytes[self.length..];
        let count = text.len().min(rest.len());
        rest[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        Ok(())
    }
}

static LAST_WORDS: AtomicPtr<LastWords> = AtomicPtr::new(core::ptr::null_mut());

/// Makes the last words of this process go to `words` from now on.
pub fn last_words_go_to(words: &'static LastWords) {
    // Ordering: Release pairs with the Acquire in `die`.
    LAST_WORDS.store(core::ptr::from_ref(words).cast_mut(), Ordering::Release);
}

/// Writes to the standard error of the calling thread. An engine thread doesn't have that descriptor, and its
/// text is lost.
struct Stderr;

impl Write for Stderr {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        // SAFETY: the engine never closes descriptor 2. A write to a descriptor that isn't open only fails.
        let stderr = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
        rustix::io::write(stderr, text.as_bytes()).map(|_| ()).map_err(|_| core::fmt::Error)
    }
}

/// Tells the user something, if the calling thread has a standard error.
pub fn say(what: &str) {
    let _ = writeln!(Stderr, "farpage: {what}");
}

/// Says what happened and ends the process with SIGABRT's status.
pub fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    die(format_args!("{info}"))
}

fn die(what: core::fmt::Arguments<'_>) -> ! {
    // Ordering: Acquire pairs with the Release in `last_words_go_to`.
    // SAFETY: the pointer is null, or points to words that live for good.
    let words = unsafe { LAST_WORDS.load(Ordering::Acquire).as_ref() };
    let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
    if !words.is_some_and(|words| words.write(process, what)) {
        let _ = writeln!(Stderr, "farpage: internal error, the program is stopped: {what}");
    }
    sys::exit_group(134)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> LastWords {
        LastWords {
            process: AtomicU32::new(0),
            length: AtomicU32::new(0),
            text: [const { AtomicU64::new(0) }; WORDS],
        }
    }

    #[test]
    fn first_words_stay_and_long_ones_are_cut() {
        let (words, mut buffer) = (nothing(), [0; WORDS * 8]);
        assert_eq!(words.read(&mut buffer), None);
        assert!(words.write(7, format_args!("{} is out of {}", 12, "bounds")));
        assert!(!words.write(8, format_args!("another")));
        assert_eq!(words.read(&mut buffer), Some((7, &b"12 is out of bounds"[..])));
        let words = nothing();
        assert!(words.write(9, format_args!("{:0>600}", 5)));
        assert_eq!(words.read(&mut buffer), Some((9, &[b'0'; WORDS * 8][..])));
        // Any program of the run can write anything to this memory.
        words.length.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(words.read(&mut buffer).unwrap().1.len(), WORDS * 8);
    }

    /// A bug: the words of an engine thread went to its own /dev/null, so the user saw status 134 and nothing
    /// more.
    #[test]
    fn words_of_a_process_that_dies_are_in_what_it_shares() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the call makes a new mapping, which the child shares.
        let memory = unsafe {
            mmap_anonymous(core::ptr::null_mut(), size_of::<LastWords>(), access, MapFlags::SHARED)
        };
        // SAFETY: the mapping has that size, is page-aligned and never unmapped. Any bytes are valid.
        let words = unsafe { &*memory.unwrap().cast::<LastWords>() };
        // SAFETY: the call takes no pointer. The child makes only calls that an engine thread may make.
        let child = unsafe { sys::call(sys::number::FORK, [0; 6]) };
        if child == 0 {
            last_words_go_to(words);
            die(format_args!("a bug in line {}", 4711));
        }
        let pid = rustix::process::Pid::from_raw(child as i32);
        let (_, status) =
            rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(134));
        let mut buffer = [0; WORDS * 8];
        assert_eq!(words.read(&mut buffer), Some((child as u32, &b"a bug in line 4711"[..])));
    }
}

//! What the pages hold that are evicted: pages of real programs, collected by a program of its own (`contents.py`) so that
//! its objects are none of ours. [`Bank`] is how the load gets at them.
// UNSAFETY: a file of pages is mapped, so that it isn't anonymous memory of the load's, which a budget is about.

use crate::load::region::PAGE_BYTES;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};

const SCRIPT: &str = include_str!("contents.py");
const WORDS: usize = PAGE_BYTES / 8;

/// Kinds of pages, and how many of each 20 there are: most of what programs have in memory is a heap.
pub const KINDS: [(&str, usize); 6] =
    [("heap", 7), ("integers", 4), ("floats", 3), ("text", 3), ("packed", 2), ("sparse", 1)];

/// Pages of one kind.
pub fn collect(kind: &str, count: usize) -> Result<Vec<u8>, String> {
    let output = Command::new("python3")
        .args(["-c", SCRIPT, kind, &count.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| {
            format!("python3, whose memory is part of the contents, can't be started: {error}")
        })?;
    if !output.status.success() || output.stdout.len() != count * PAGE_BYTES {
        return Err(format!("python3 gave no {count} pages of {kind}: {}", output.status));
    }
    Ok(output.stdout)
}

/// Writes a file, which isn't there yet, with so many pages of all kinds.
pub fn write_bank(path: &Path, pages: usize) -> Result<(), String> {
    let share = |parts: usize| pages * parts / 20;
    let all: Result<Vec<Vec<u8>>, String> =
        KINDS.iter().map(|(kind, parts)| collect(kind, share(*parts))).collect();
    let all = all?.concat();
    File::create_new(path)
        .and_then(|mut file| file.write_all(&all))
        .map_err(|error| format!("{} can't be written: {error}", path.display()))
}

/// Pages of a file, for as long as the process lives.
#[derive(Clone, Copy)]
pub struct Bank {
    words: &'static [u64],
}

impl Bank {
    /// Of pages that are collected now.
    pub fn collected(pages: usize) -> Result<Bank, String> {
        let path = std::env::temp_dir().join(format!("farpage-pages-{}", std::process::id()));
        write_bank(&path, pages)?;
        let bank = Bank::open(&path);
        let _ = std::fs::remove_file(&path);
        bank
    }

    /// Maps it.
    pub fn open(path: &Path) -> Result<Bank, String> {
        let cant = |why: String| format!("{} has no pages: {why}", path.display());
        let file = File::open(path).map_err(|error| cant(error.to_string()))?;
        let pages = file.metadata().map_err(|error| cant(error.to_string()))?.len() as usize / PAGE_BYTES;
        if pages == 0 {
            return Err(cant("it is shorter than a page".to_owned()));
        }
        // SAFETY: a new mapping where the kernel likes it.
        let base = unsafe {
            let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), pages * PAGE_BYTES, protection, flags, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(cant(std::io::Error::last_os_error().to_string()));
        }
        // SAFETY: mapped for good, readable, aligned to pages; any bytes are integers. Whoever made the file writes it once,
        // before the load starts.
        Ok(Bank { words: unsafe { std::slice::from_raw_parts(base.cast(), pages * WORDS) } })
    }

    /// One of its pages: the same one for a number each time.
    pub fn page(&self, number: u64) -> &'static [u64] {
        let page = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % (self.words.len() / WORDS);
        &self.words[page * WORDS..][..WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_bank_come_back_and_all_of_them_are_used() {
        let path = std::env::temp_dir().join(format!("farpage-bank-{}", std::process::id()));
        let bytes: Vec<u8> = (0..16 * WORDS as u64).flat_map(|word| (word / 512).to_ne_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        let bank = Bank::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut seen = [false; 16];
        for number in 0..400 {
            let page = bank.page(number);
            assert!(page.len() == WORDS && page.iter().all(|word| *word == page[0]));
            seen[page[0] as usize] = true;
        }
        assert_eq!(seen, [true; 16]);
        assert!(Bank::open(&path).is_err(), "it is gone");
    }
}

//! The contents of evicted pages: pages of real programs. A separate program (`contents.py`) collects them,
//! so that its objects aren't objects of this process. The load reads the pages through [`Bank`].
// UNSAFETY: the file of pages is mapped, so that it isn't anonymous memory of the load, which counts against
// the budget.

use crate::load::region::PAGE_BYTES;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};

const SCRIPT: &str = include_str!("contents.py");
const WORDS: usize = PAGE_BYTES / 8;

/// Kinds of pages, with their numbers in 20 pages. Most memory of programs is a heap.
pub const KINDS: [(&str, usize); 6] =
    [("heap", 7), ("integers", 4), ("floats", 3), ("text", 3), ("packed", 2), ("sparse", 1)];

/// Collects pages of one kind.
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

/// Writes a new file with about `pages` pages of all kinds.
pub fn write_bank(path: &Path, pages: usize) -> Result<(), String> {
    let share = |parts: usize| pages * parts / 20;
    let all: Result<Vec<Vec<u8>>, String> =
        KINDS.iter().map(|(kind, parts)| collect(kind, share(*parts))).collect();
    let all = all?.concat();
    File::create_new(path)
        .and_then(|mut file| file.write_all(&all))
        .map_err(|error| format!("{} can't be written: {error}", path.display()))
}

/// The pages of a file, mapped until the process ends.
#[derive(Clone, Copy)]
pub struct Bank {
    words: &'static [u64],
}

impl Bank {
    /// Collects pages and makes a bank of them.
    pub fn collected(pages: usize) -> Result<Bank, String> {
        let path = std::env::temp_dir().join(format!("farpage-pages-{}", std::process::id()));
        write_bank(&path, pages)?;
        let bank = Bank::open(&path);
        let _ = std::fs::remove_file(&path);
        bank
    }

    /// Maps a file of pages.
    pub fn open(path: &Path) -> Result<Bank, String> {
        let cant = |why: String| format!("{} has no pages: {why}", path.display());
        let file = File::open(path).map_err(|error| cant(error.to_string()))?;
        let pages = file.metadata().map_err(|error| cant(error.to_string()))?.len() as usize / PAGE_BYTES;
        if pages == 0 {
            return Err(cant("it is shorter than a page".to_owned()));
        }
        // SAFETY: the kernel chooses the place of the new mapping.
        let base = unsafe {
            let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), pages * PAGE_BYTES, protection, flags, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(cant(std::io::Error::last_os_error().to_string()));
        }
        // SAFETY: the mapping is permanent, readable, and aligned to pages. Any bytes are integers. The file
        // is written once, before the load starts.
        Ok(Bank { words: unsafe { std::slice::from_raw_parts(base.cast(), pages * WORDS) } })
    }

    /// Returns the page of a number. A number always gives the same page.
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

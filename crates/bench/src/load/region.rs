//! Memory of a load: one anonymous mapping whose pages hold what can be computed from their number, so that
//! every byte can be checked, and which compress as pages of real programs do (to about 0.35 of their size
//! by LZ4): pointers into one heap, small integers, some noise.
// UNSAFETY: a region larger than RAM is a raw mapping that several threads write at places of their own.

use crate::measure::Random;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / 8;

/// An anonymous private mapping.
pub struct Region {
    base: *mut u64,
    pages: usize,
}

// SAFETY: the mapping belongs to the region; its words are only reached by volatile accesses of whole pages,
// and a caller gives each page to one thread at a time.
unsafe impl Sync for Region {}
// SAFETY: as for Sync; nothing in it belongs to a thread.
unsafe impl Send for Region {}

impl Region {
    /// Maps `bytes`, untouched.
    pub fn new(bytes: u64) -> Result<Region, String> {
        let pages = bytes as usize / PAGE_BYTES;
        // SAFETY: a new mapping where the kernel likes it; nobody else knows it.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(format!(
                "a region of {bytes} bytes can't be mapped: {}",
                std::io::Error::last_os_error()
            ));
        }
        Ok(Region { base: base.cast(), pages })
    }

    /// Pages in it.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    fn page(&self, page: usize) -> *mut u64 {
        assert!(page < self.pages);
        self.base.wrapping_add(page * WORDS)
    }

    /// One word of a page: a touch.
    pub fn read(&self, page: usize, word: usize) -> u64 {
        assert!(word < WORDS);
        // SAFETY: inside the mapping by both assertions, aligned, readable; any bytes are an integer.
        unsafe { self.page(page).add(word).read_volatile() }
    }

    /// Writes one word of a page.
    pub fn write(&self, page: usize, word: usize, value: u64) {
        assert!(word < WORDS);
        // SAFETY: as in `read`; nobody else has the page now.
        unsafe { self.page(page).add(word).write_volatile(value) }
    }

    /// Writes a whole page as [`Region::check`] expects it.
    pub fn put(&self, page: usize, seed: u64) {
        let mut random = Random::new(seed ^ (page as u64) << 20);
        (0..WORDS).for_each(|word| self.write(page, word, content(&mut random, page, word)));
    }

    /// Compares a whole page.
    pub fn check(&self, page: usize, seed: u64) -> Result<(), String> {
        let mut random = Random::new(seed ^ (page as u64) << 20);
        for word in 0..WORDS {
            let (found, wanted) = (self.read(page, word), content(&mut random, page, word));
            if found != wanted {
                return Err(format!("page {page}, word {word}: {found:#x} instead of {wanted:#x}"));
            }
        }
        Ok(())
    }

    /// Writes every page.
    pub fn fill(&self, seed: u64) {
        (0..self.pages).for_each(|page| self.put(page, seed));
    }

    /// Compares every page.
    pub fn verify(&self, seed: u64) -> Result<(), String> {
        (0..self.pages).try_for_each(|page| self.check(page, seed))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whole; nobody can use it after the region.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE_BYTES) };
    }
}

/// An object of four words, over and over: type, count, pointer, payload. Like an interpreter's heap.
fn content(random: &mut Random, page: usize, word: usize) -> u64 {
    match word % 4 {
        0 => 0x7f3a_9c40_12e0,
        1 => 1 + (word as u64 / 64),
        2 => 0x7f3a_8000_0000 + page as u64 * PAGE_BYTES as u64 + random.below(256) * 16,
        _ => random.below(1 << 12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::config::Codec;
    use farpage_core::zswap::codec::{Scratch, compress};

    #[test]
    fn filled_region_verifies_and_a_wrong_word_is_found() {
        let region = Region::new(16 * PAGE_BYTES as u64).unwrap();
        region.fill(7);
        region.verify(7).unwrap();
        assert!(region.verify(8).is_err());
        region.write(5, 9, region.read(5, 9) ^ 1);
        assert!(region.verify(7).unwrap_err().starts_with("page 5, word 9:"));
    }

    #[test]
    fn pages_compress_like_a_heap() {
        let region = Region::new(8 * PAGE_BYTES as u64).unwrap();
        region.fill(1);
        let mut scratch = Scratch::new();
        for page in 0..8 {
            let mut bytes = [0; PAGE_BYTES];
            for (word, chunk) in bytes.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&region.read(page, word).to_le_bytes());
            }
            let length = compress(Codec::Lz4, &bytes, &mut scratch, PAGE_BYTES).map(<[u8]>::len);
            assert!(length.is_some_and(|length| (800..2000).contains(&length)), "{length:?}");
        }
    }
}

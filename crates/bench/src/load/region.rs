//! Memory of a load: one anonymous mapping whose pages hold what can be computed from their number, so that
//! every byte can be checked. [`Content::Heap`] compresses as pages of real programs do (to about 0.35 of their
//! size by LZ4): pointers into one heap, small integers, some noise. [`Content::Noise`] doesn't compress.
// UNSAFETY: a region larger than RAM is a raw mapping that several threads write at places of their own.

use crate::measure::Random;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / 8;

/// What pages hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// As an interpreter's heap: goes to the pool.
    Heap,
    /// Nothing that compresses: goes to an area.
    Noise,
}

/// An anonymous private mapping.
pub struct Region {
    base: *mut u64,
    pages: usize,
    content: Content,
}

// SAFETY: the mapping belongs to the region; its words are only reached by volatile accesses of whole pages,
// and a caller gives each page to one thread at a time.
unsafe impl Sync for Region {}
// SAFETY: as for Sync; nothing in it belongs to a thread.
unsafe impl Send for Region {}

impl Region {
    /// Maps `bytes`, untouched, for pages like a heap's.
    pub fn new(bytes: u64) -> Result<Region, String> {
        Region::of(bytes, Content::Heap)
    }

    /// Maps `bytes`, untouched, for pages of this kind. Between two regions lies a page that can't be touched, so that
    /// the kernel never joins them: each is a mapping of its own.
    pub fn of(bytes: u64, content: Content) -> Result<Region, String> {
        let pages = bytes as usize / PAGE_BYTES;
        // SAFETY: a new mapping where the kernel likes it; nobody else knows it.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                (pages + 1) * PAGE_BYTES,
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
        // SAFETY: the last page of the mapping just made.
        if unsafe { libc::mprotect(base.byte_add(pages * PAGE_BYTES), PAGE_BYTES, libc::PROT_NONE) } != 0 {
            return Err(format!("a guard page can't be made: {}", std::io::Error::last_os_error()));
        }
        Ok(Region { base: base.cast(), pages, content })
    }

    /// Each page is the kernel's smallest, also where it likes larger ones: one that is touched takes no more.
    pub fn of_small_pages(self) -> Region {
        // SAFETY: the mapping of `of`; advice changes no byte. A kernel without large pages refuses it.
        unsafe { libc::madvise(self.base.cast(), self.pages * PAGE_BYTES, libc::MADV_NOHUGEPAGE) };
        self
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

    /// Address of a page, as the kernel counts them: for /proc/self/pagemap.
    pub fn page_number(&self, page: usize) -> u64 {
        self.base.addr() as u64 / PAGE_BYTES as u64 + page as u64
    }

    /// Writes a whole page as [`Region::check`] expects it.
    pub fn put(&self, page: usize, seed: u64) {
        let mut words = Words::of(self.content, page, seed);
        (0..WORDS).for_each(|word| self.write(page, word, words.next(word)));
    }

    /// Compares a whole page.
    pub fn check(&self, page: usize, seed: u64) -> Result<(), String> {
        self.check_from(0, page, seed)
    }

    /// Compares a page from this word on.
    pub fn check_from(&self, first: usize, page: usize, seed: u64) -> Result<(), String> {
        let mut words = Words::of(self.content, page, seed);
        for word in 0..WORDS {
            let wanted = words.next(word);
            if word < first {
                continue;
            }
            let found = self.read(page, word);
            if found != wanted {
                return Err(format!("page {page}, word {word}: {found:#x} instead of {wanted:#x}"));
            }
        }
        Ok(())
    }

    /// The first word of a page.
    pub fn first_word(&self, page: usize, seed: u64) -> u64 {
        Words::of(self.content, page, seed).next(0)
    }

    /// Writes every page.
    pub fn fill(&self, seed: u64) {
        self.fill_pages(0..self.pages, seed);
    }

    /// Writes these pages.
    pub fn fill_pages(&self, pages: std::ops::Range<usize>, seed: u64) {
        pages.for_each(|page| self.put(page, seed));
    }

    /// Compares every page.
    pub fn verify(&self, seed: u64) -> Result<(), String> {
        (0..self.pages).try_for_each(|page| self.check(page, seed))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whole; nobody can use it after the region.
        unsafe { libc::munmap(self.base.cast(), (self.pages + 1) * PAGE_BYTES) };
    }
}

/// The words of one page, in order.
struct Words {
    content: Content,
    page: usize,
    random: Random,
    /// Where noise starts.
    start: u64,
}

impl Words {
    fn of(content: Content, page: usize, seed: u64) -> Words {
        let key = seed ^ (page as u64) << 20;
        Words { content, page, random: Random::new(key), start: key.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    fn next(&mut self, word: usize) -> u64 {
        match self.content {
            Content::Heap => heap(&mut self.random, self.page, word),
            Content::Noise => noise(self.start, word),
        }
    }
}

/// An object of four words, over and over: type, count, pointer, payload. Like an interpreter's heap.
fn heap(random: &mut Random, page: usize, word: usize) -> u64 {
    match word % 4 {
        0 => 0x7f3a_9c40_12e0,
        1 => 1 + (word as u64 / 64),
        2 => 0x7f3a_8000_0000 + page as u64 * PAGE_BYTES as u64 + random.below(256) * 16,
        _ => random.below(1 << 12),
    }
}

/// Each word from its number alone, so that a page is checked about as fast as it is read: one multiplication a
/// word, none of which waits for another.
const fn noise(start: u64, word: usize) -> u64 {
    let mixed = start.wrapping_add((word as u64).wrapping_mul(0xd134_2543_de82_ef95));
    let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xdaba_0b6e_b093_22e3);
    mixed ^ mixed >> 29
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
    fn two_regions_are_two_mappings() {
        let regions = [0; 2].map(|_| Region::new(4 * PAGE_BYTES as u64).unwrap());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        for region in &regions {
            let (start, end) = (region.base.addr(), region.base.addr() + 4 * PAGE_BYTES);
            assert!(maps.contains(&format!("{start:x}-{end:x} rw-p")), "{start:x}-{end:x} in\n{maps}");
        }
    }

    /// Compressed sizes of a few pages; none if they don't compress to less than a page.
    fn compressed(content: Content) -> Vec<Option<usize>> {
        let region = Region::of(8 * PAGE_BYTES as u64, content).unwrap();
        region.fill(1);
        region.verify(1).unwrap();
        let mut scratch = Scratch::new();
        let one = |page| {
            let mut bytes = [0; PAGE_BYTES];
            for (word, chunk) in bytes.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&region.read(page, word).to_le_bytes());
            }
            compress(Codec::Lz4, &bytes, &mut scratch, PAGE_BYTES - 1).map(<[u8]>::len)
        };
        (0..8).map(one).collect()
    }

    #[test]
    fn pages_compress_like_a_heap_or_not_at_all() {
        let lengths = compressed(Content::Heap);
        let is_usual = |length: &Option<usize>| length.is_some_and(|length| (800..2000).contains(&length));
        assert!(lengths.iter().all(is_usual), "{lengths:?}");
        assert_eq!(compressed(Content::Noise), [None; 8]);
    }
}

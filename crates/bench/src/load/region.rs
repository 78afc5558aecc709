//! The memory of a load: one anonymous mapping. The contents of a page are computed from its number, so every
//! byte can be checked. [`Content::Heap`] compresses like pages of real programs, to about 0.35 of their size
//! by LZ4. The pages have pointers into one heap, small integers and some noise. [`Content::Noise`] doesn't
//! compress.
// UNSAFETY: a region larger than RAM is a raw mapping. Several threads write it, each at places of its own.

use crate::measure::Random;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
const WORDS: usize = PAGE_BYTES / 8;

/// The kind of contents of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Like an interpreter's heap. Evicted pages go to the pool.
    Heap,
    /// Nothing that compresses. Evicted pages go to an area.
    Noise,
}

/// An anonymous private mapping.
pub struct Region {
    base: *mut u64,
    pages: usize,
    content: Content,
}

// SAFETY: the mapping belongs to the region. The words are reached only by volatile accesses, and a caller
// gives each page to one thread at a time.
unsafe impl Sync for Region {}
// SAFETY: as for `Sync`. Nothing in a region belongs to one thread.
unsafe impl Send for Region {}

impl Region {
    /// Maps `bytes` untouched bytes, for pages like a heap's.
    pub fn new(bytes: u64) -> Result<Region, String> {
        Region::of(bytes, Content::Heap)
    }

    /// Maps `bytes` untouched bytes, for pages of this kind. A page that can't be touched lies between two
    /// regions, so the kernel never joins them. Each region is a mapping of its own.
    pub fn of(bytes: u64, content: Content) -> Result<Region, String> {
        let pages = bytes as usize / PAGE_BYTES;
        // SAFETY: the kernel chooses the place of the new mapping, and no other code knows it.
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
        // SAFETY: the page is the last page of the mapping that was just made.
        if unsafe { libc::mprotect(base.byte_add(pages * PAGE_BYTES), PAGE_BYTES, libc::PROT_NONE) } != 0 {
            return Err(format!("a guard page can't be made: {}", std::io::Error::last_os_error()));
        }
        Ok(Region { base: base.cast(), pages, content })
    }

    /// Asks for small pages even where the kernel prefers huge pages. A touched page then takes no more
    /// memory than itself.
    pub fn of_small_pages(self) -> Region {
        // SAFETY: the range is the mapping of `of`, and the advice changes no byte. A kernel without huge
        // pages refuses it.
        unsafe { libc::madvise(self.base.cast(), self.pages * PAGE_BYTES, libc::MADV_NOHUGEPAGE) };
        self
    }

    /// Returns the number of pages.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    fn page(&self, page: usize) -> *mut u64 {
        assert!(page < self.pages);
        self.base.wrapping_add(page * WORDS)
    }

    /// Reads one word of a page: a touch.
    pub fn read(&self, page: usize, word: usize) -> u64 {
        assert!(word < WORDS);
        // SAFETY: both assertions keep the word inside the mapping, which is aligned and readable. Any bytes
        // are an integer.
        unsafe { self.page(page).add(word).read_volatile() }
    }

    /// Writes one word of a page.
    pub fn write(&self, page: usize, word: usize, value: u64) {
        assert!(word < WORDS);
        // SAFETY: as in `read`. No other thread has the page now.
        unsafe { self.page(page).add(word).write_volatile(value) }
    }

    /// Returns a page's address as the kernel's page number, for /proc/self/pagemap.
    pub fn page_number(&self, page: usize) -> u64 {
        self.base.addr() as u64 / PAGE_BYTES as u64 + page as u64
    }

    /// Writes a whole page as [`Region::check`] expects it.
    pub fn put(&self, page: usize, seed: u64) {
        let mut words = Words::of(self.content, page, seed);
        (0..WORDS).for_each(|word| self.write(page, word, words.next(word)));
    }

    /// Compares a whole page with its expected contents.
    pub fn check(&self, page: usize, seed: u64) -> Result<(), String> {
        self.check_from(0, page, seed)
    }

    /// Compares a page from word `first` on.
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

    /// Returns the expected first word of a page.
    pub fn first_word(&self, page: usize, seed: u64) -> u64 {
        Words::of(self.content, page, seed).next(0)
    }

    /// Writes every page.
    pub fn fill(&self, seed: u64) {
        self.fill_pages(0..self.pages, seed);
    }

    /// Writes the pages of a range.
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
        // SAFETY: the range is the whole mapping of `of`. The mapping can't be used after the region.
        unsafe { libc::munmap(self.base.cast(), (self.pages + 1) * PAGE_BYTES) };
    }
}

/// The words of one page, in order.
struct Words {
    content: Content,
    page: usize,
    random: Random,
    /// The start value of noise.
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

/// Returns a word of an object of four words that repeats through the page: type, count, pointer, payload.
/// The object is like one of an interpreter's heap.
fn heap(random: &mut Random, page: usize, word: usize) -> u64 {
    match word % 4 {
        0 => 0x7f3a_9c40_12e0,
        1 => 1 + (word as u64 / 64),
        2 => 0x7f3a_8000_0000 + page as u64 * PAGE_BYTES as u64 + random.below(256) * 16,
        _ => random.below(1 << 12),
    }
}

/// Returns a word that depends only on the page's start value and the word's number. Checking a page then
/// takes about as long as reading it: the few multiplications of a word don't wait for those of another word.
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

    /// Returns the compressed sizes of a few pages. A size is `None` if a page doesn't compress to less than
    /// a page.
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

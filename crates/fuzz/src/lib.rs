//! Fuzz targets: each drives one structure with whatever bytes it is given, beside the simplest model of it, and
//! compares all that can be seen after each step. A target panics when they differ, and ends when the bytes do.
//!
//! The bytes come from three places: a test with fixed seeds (`make test`), libFuzzer, which looks for bytes that
//! reach new code (`make fuzz`, in `fuzz/` at the top), and files that one of them has left
//! (`cargo run -p farpage-fuzz -- NAME FILE`).
//!
//! The first byte of an input switches kinds of operations off, so that rare states aren't always undone at once;
//! the limits are tiny, so that they are met.
// UNSAFETY: handing memory to structures that never allocate.

mod codec;
mod extents;
mod filter;
#[path = "../../cli/src/header.rs"]
// By path: the command line is a program, so it can't be a dependency.
mod header;
mod index;
mod order;
mod pool;
mod readahead;
mod slots;
mod table;

use farpage_core::memory::Region;

/// A structure under test.
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Panics if something is wrong.
    pub run: fn(&mut Input),
}

/// The one table of targets.
pub const TARGETS: &[Target] = &[
    Target { name: "codec", run: codec::run },
    Target { name: "extents", run: extents::run },
    Target { name: "filter", run: filter::run },
    Target { name: "header", run: parse_header },
    Target { name: "index", run: index::run },
    Target { name: "order", run: order::run },
    Target { name: "pool", run: pool::run },
    Target { name: "ranges", run: table::run_ranges },
    Target { name: "readahead", run: readahead::run },
    Target { name: "slots", run: slots::run },
    Target { name: "table", run: table::run },
];

/// The target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Bytes to be used up. Past their end all are 0.
pub struct Input<'b> {
    bytes: &'b [u8],
}

impl<'b> Input<'b> {
    /// All of `bytes`.
    pub const fn new(bytes: &'b [u8]) -> Input<'b> {
        Input { bytes }
    }

    /// Whether all are used up.
    pub const fn is_over(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The next one.
    pub const fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        *first
    }

    /// The next four.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(core::array::from_fn(|_| self.byte()))
    }

    /// A number below `end`, from one byte, or two where one isn't enough.
    pub fn below(&mut self, end: usize) -> usize {
        let number = if end <= 256 {
            usize::from(self.byte())
        } else {
            usize::from(self.byte()) | usize::from(self.byte()) << 8
        };
        number % end.max(1)
    }

    /// The next kind of operation, of `kinds` (8 at most), none of which `off` has the bit of.
    pub fn kind(&mut self, kinds: usize, off: u8) -> Option<usize> {
        let kind = self.below(kinds);
        (off & 1 << kind == 0).then_some(kind)
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'b [u8] {
        core::mem::take(&mut self.bytes)
    }
}

/// Zeroed memory to hand to a structure, once.
struct Memory {
    words: Vec<u64>,
    is_fresh: bool,
}

impl Memory {
    fn new(bytes: usize) -> Memory {
        Memory { words: vec![0; bytes.div_ceil(8)], is_fresh: true }
    }

    fn region(&mut self) -> Region<'_> {
        assert!(core::mem::take(&mut self.is_fresh), "handed out before");
        // SAFETY: zeroed by `new` and handed out for the first time; of that size; borrowed by the region.
        unsafe { Region::new(self.words.as_mut_ptr().cast(), self.words.len() * 8) }
    }
}

/// Whatever is accepted keeps the rules of `mkswap`; nothing makes the parser panic.
fn parse_header(input: &mut Input) {
    let mut page = [0; farpage_core::units::PAGE_BYTES];
    // The interesting places are few: mostly a valid header with some bytes changed.
    let is_plausible = input.byte() & 7 != 0;
    if is_plausible {
        page[1024] = 1;
        page[1028..1032].copy_from_slice(&input.word().to_le_bytes());
        page[4086..].copy_from_slice(b"SWAPSPACE2");
        page[1032..1034].copy_from_slice(&[input.byte(), input.byte() & 3]);
        // One list, and single bytes anywhere.
        let count = input.below(24);
        (1536..1536 + 4 * count).for_each(|at| page[at] = if at % 4 < 2 { input.byte() } else { 0 });
        while !input.is_over() {
            page[input.below(4096)] = input.byte();
        }
    } else {
        let rest = input.rest();
        let length = rest.len().min(page.len());
        page[..length].copy_from_slice(&rest[..length]);
    }
    match header::parse(&page) {
        Ok(header) => {
            assert!(header.last_page >= header::SLOTS_MIN - 1);
            assert!(header.bad_pages.is_sorted() && header.bad_pages.len() <= 637);
            assert!(header.bad_pages.iter().all(|&bad| bad != 0 && bad <= header.last_page));
            assert!((header.bad_pages.len() as u64) < u64::from(header.last_page));
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(error.is_damage(), page[4086..] == *b"SWAPSPACE2", "{error}");
        }
    }
}

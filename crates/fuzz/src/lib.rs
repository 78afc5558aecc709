//! Fuzz targets. Each target drives one structure with the bytes of an input, beside the simplest model of
//! the structure. After each step the target compares all visible state, and panics if the two differ. The
//! target ends when the bytes are used up.
//!
//! The bytes come from three sources. `make test` runs fixed seeds. `make fuzz` runs libFuzzer, in the
//! top-level directory `fuzz/`, which looks for bytes that reach new code. `cargo run -p farpage-fuzz -- NAME
//! FILE` runs files that a fuzzer left.
//!
//! The first byte of an input switches kinds of operations off, so that a rare state isn't always undone at
//! once. The limits are tiny, so that inputs reach them.
// UNSAFETY: the targets hand memory to structures that never allocate.

mod codec;
mod extents;
mod filter;
#[path = "../../cli/src/header.rs"]
// The file is included by path, because the command line is a program and can't be a dependency.
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
    /// The target's name on the command line.
    pub name: &'static str,
    /// Runs the target on an input. Panics if something is wrong.
    pub run: fn(&mut Input),
}

/// The only table of targets.
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

/// Returns the target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// The bytes of an input, used up from the front. Past their end every byte is 0.
pub struct Input<'b> {
    bytes: &'b [u8],
}

impl<'b> Input<'b> {
    /// Makes an input of all bytes in `bytes`.
    pub const fn new(bytes: &'b [u8]) -> Input<'b> {
        Input { bytes }
    }

    /// Whether all bytes are used up.
    pub const fn is_over(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the next byte.
    pub const fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        *first
    }

    /// Takes the next four bytes, as a little-endian number.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(core::array::from_fn(|_| self.byte()))
    }

    /// Takes a number below `end`, from one byte, or from two if `end` is above 256.
    pub fn below(&mut self, end: usize) -> usize {
        let number = if end <= 256 {
            usize::from(self.byte())
        } else {
            usize::from(self.byte()) | usize::from(self.byte()) << 8
        };
        number % end.max(1)
    }

    /// Takes the next kind of operation, of `kinds` kinds (8 at most). Returns `None` if `off` has the kind's
    /// bit.
    pub fn kind(&mut self, kinds: usize, off: u8) -> Option<usize> {
        let kind = self.below(kinds);
        (off & 1 << kind == 0).then_some(kind)
    }

    /// Takes all bytes that are left.
    pub fn rest(&mut self) -> &'b [u8] {
        core::mem::take(&mut self.bytes)
    }
}

/// Zeroed memory that is handed to a structure once.
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
        // SAFETY: `new` zeroed the memory, which has this size. The assertion shows that it is handed out for
        // the first time. The region borrows it.
        unsafe { Region::new(self.words.as_mut_ptr().cast(), self.words.len() * 8) }
    }
}

/// Checks that an accepted header obeys the rules of `mkswap`, and that no bytes make the parser panic.
fn parse_header(input: &mut Input) {
    let mut page = [0; farpage_core::units::PAGE_BYTES];
    // Few bytes of the page matter, so most inputs are a valid header with some bytes changed.
    let is_plausible = input.byte() & 7 != 0;
    if is_plausible {
        page[1024] = 1;
        page[1028..1032].copy_from_slice(&input.word().to_le_bytes());
        page[4086..].copy_from_slice(b"SWAPSPACE2");
        page[1032..1034].copy_from_slice(&[input.byte(), input.byte() & 3]);
        // The list of bad pages, then single bytes anywhere.
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

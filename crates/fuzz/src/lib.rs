//! Fuzz targets. Each target drives one structure with the bytes of an input, and panics if the structure
//! breaks a rule or differs from a simple model. The target ends when the bytes are used up.
//!
//! `make test` runs fixed seeds. `make fuzz` runs libFuzzer (`fuzz/`), which looks for bytes that reach new
//! code. `cargo run -p farpage-fuzz -- NAME FILE` runs files that a fuzzer left.
//!
//! Most targets take the input's first byte as a set of operations that are switched off. Otherwise a rare
//! state would always be undone at once. The limits are tiny, so that inputs reach them.
// UNSAFETY: the targets hand memory to structures that never allocate.

mod codec;
mod extents;
mod filter;
// The file is included by path, because the command line is a program and can't be a dependency.
#[path = "../../cli/src/areas/header.rs"]
mod header;
mod header_target;
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
    Target { name: "header", run: header_target::run },
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

//! The page table: from a page to its entry in three or four loads, for a whole 47-bit address space.
//!
//! A directory holds leaves. A leaf covers 1 GiB of address space in chunks of 512 pages. A chunk corresponds
//! to one cluster of slots and to one page-table page of the kernel. A chunk has 64 lines of eight entries,
//! each line in a cache line.
//!
//! A line gets the next free place in the leaf's memory when one of its pages is first looked for. Pages that
//! lie far apart therefore have their entries side by side. Each of these pages takes 72 bytes of table, and
//! each 2 MiB between them takes 8 bytes. Otherwise each of them would take a page of entries, which would be
//! missing from the budget. Where memory is used throughout, the table takes 8 bytes for a page and a
//! thirtieth more.
//!
//! A chunk itself stores the place and the number of its first line. With its second line a chunk gets a
//! node, which stores the places of all its lines. Where pages lie far apart, each load is a cache miss and a
//! TLB miss, and the node would be one of three loads.
//!
//! ```text
//! directory -> Leaf { chunks[512] -> lines[n][8] = Entry }                    a chunk with one line
//! directory -> Leaf { chunks[512] -> nodes[n][64] -> lines[n][8] = Entry }    with several
//! ```
//!
//! Chunks also count how many entries are resident, and how many are used at all. So walks over sparse memory
//! skip empty chunks. The driver attaches a leaf before the pages under it are managed, so a fault never
//! needs a new leaf.

pub mod entry;
pub mod ranges;

use crate::memory::Zeroed;
use crate::sync::{Lock, rank};
use crate::units::{PageIndex, PageRange};
use core::sync::atomic::{AtomicPtr, AtomicU16, AtomicU32, Ordering};
use entry::{Entry, Past, State};

/// Pages under one leaf: 1 GiB.
pub const LEAF_PAGES: usize = 1 << 18;
/// Pages in a chunk.
pub const CHUNK_PAGES: usize = 512;
/// Pages in a line.
pub const LINE_PAGES: usize = 8;
/// Leaves of a 47-bit address space.
pub const DIRECTORY_LEAVES: usize = 1 << (47 - 12 - 18);
const CHUNKS: usize = LEAF_PAGES / CHUNK_PAGES;
const CHUNK_LINES: usize = CHUNK_PAGES / LINE_PAGES;
const LINES: usize = LEAF_PAGES / LINE_PAGES;
// Places are counted from 1 in 16 bits.
const _: () = assert!(LINES < u16::MAX as usize);

/// Where an object lies in its array, plus 1. 0 means that the object has no place yet.
#[repr(transparent)]
struct Pointer(AtomicU16);

impl Pointer {
    fn get(&self) -> Option<usize> {
        // Ordering: Relaxed is enough. The line behind the pointer has only ever held zeros and atomics, so
        // nothing needs to be published along with it.
        usize::from(self.0.load(Ordering::Relaxed)).checked_sub(1)
    }

    fn set(&self, at: u16) {
        self.0.store(at + 1, Ordering::Relaxed);
    }
}

/// Takes the next free place.
fn take(taken: &mut u16) -> u16 {
    *taken += 1;
    *taken - 1
}

/// Which lines a chunk has.
#[derive(Clone, Copy)]
enum Lines {
    None,
    /// One line: the chunk's line `which` is in the place `at`.
    One {
        which: usize,
        at: u16,
    },
    /// Several lines: the node in this place stores them.
    Node(u16),
}

/// `Lines` as a word: a place plus 1, and above it the number of the line, or the mark of a node's place.
#[repr(transparent)]
struct LinesWord(AtomicU32);

const PLACE_BITS: u32 = u16::BITS;
const NODE: u32 = 1 << 31;
const _: () = assert!(CHUNK_LINES as u32 <= NODE >> PLACE_BITS);

impl LinesWord {
    fn get(&self) -> Lines {
        // Ordering: Acquire pairs with the Release in `set`. A thread that finds a node also finds in it the
        // line that the chunk had before.
        let word = self.0.load(Ordering::Acquire);
        let Some(at) = (word as u16).checked_sub(1) else { return Lines::None };
        if word & NODE != 0 {
            Lines::Node(at)
        } else {
            Lines::One { which: (word >> PLACE_BITS) as usize, at }
        }
    }

    fn set(&self, lines: Lines) {
        let word = match lines {
            Lines::None => 0,
            Lines::One { which, at } => (which as u32) << PLACE_BITS | (u32::from(at) + 1),
            Lines::Node(at) => NODE | (u32::from(at) + 1),
        };
        // Ordering: Release publishes the pointers that the node has got so far.
        self.0.store(word, Ordering::Release);
    }
}

/// All data of a chunk, in one cache line. Where pages lie far apart each cache line is a miss.
#[repr(C, align(8))]
struct Chunk {
    lines: LinesWord,
    resident: AtomicU16,
    used: AtomicU16,
}

/// The places of a chunk's lines.
#[repr(C, align(64))]
struct Node([Pointer; CHUNK_LINES]);

/// Entries of neighbouring pages.
#[repr(C, align(64))]
struct Line([Entry; LINE_PAGES]);

/// Numbers of places handed out. A lock protects them, which is cheap because they change once for each new
/// line.
struct HandedOut {
    nodes: u16,
    lines: u16,
}

/// Entries of 1 GiB of address space. The memory is zeroed, and parts that were never needed are never
/// touched.
#[repr(C, align(64))]
pub struct Leaf {
    chunks: [Chunk; CHUNKS],
    used_total: AtomicU32,
    taken: Lock<HandedOut, { rank::LEAF }>,
    nodes: [Node; CHUNKS],
    lines: [Line; LINES],
}

// SAFETY: two integers, for which zero is valid and which have no drop.
unsafe impl Zeroed for HandedOut {}
// SAFETY: atomics, entries, and a lock around two integers. Zero is valid for all of them, and none has a
// drop.
unsafe impl Zeroed for Leaf {}

impl Leaf {
    /// Returns the chunk's line `which`, if the chunk has it.
    fn line_of(&self, lines: Lines, which: usize) -> Option<&Line> {
        match lines {
            Lines::One { which: only, at } if only == which => Some(&self.lines[usize::from(at)]),
            Lines::Node(node) => Some(&self.lines[self.nodes[usize::from(node)].0[which].get()?]),
            Lines::One { .. } | Lines::None => None,
        }
    }

    /// Returns the line that holds entry `at`, if the line was ever needed.
    fn line(&self, at: usize) -> Option<&Line> {
        self.line_of(self.chunks[at / CHUNK_PAGES].lines.get(), at / LINE_PAGES % CHUNK_LINES)
    }

    #[cold]
    fn new_line(&self, at: usize) -> &Line {
        let mut taken = self.taken.lock();
        let (chunk, which) = (&self.chunks[at / CHUNK_PAGES], at / LINE_PAGES % CHUNK_LINES);
        let lines = chunk.lines.get();
        if let Some(line) = self.line_of(lines, which) {
            return line;
        }
        let line = take(&mut taken.lines);
        match lines {
            Lines::None => chunk.lines.set(Lines::One { which, at: line }),
            Lines::One { which: first, at: first_line } => {
                let node = take(&mut taken.nodes);
                let pointers = &self.nodes[usize::from(node)].0;
                pointers[first].set(first_line);
                pointers[which].set(line);
                chunk.lines.set(Lines::Node(node));
            }
            Lines::Node(node) => self.nodes[usize::from(node)].0[which].set(line),
        }
        &self.lines[usize::from(line)]
    }

    fn known(&self, at: usize) -> Option<EntryRef<'_>> {
        Some(self.place_in(self.line(at)?, at))
    }

    fn place(&self, at: usize) -> EntryRef<'_> {
        self.place_in(self.line(at).unwrap_or_else(|| self.new_line(at)), at)
    }

    fn place_in<'t>(&'t self, line: &'t Line, at: usize) -> EntryRef<'t> {
        EntryRef { leaf: self, entry: &line.0[at % LINE_PAGES], chunk: at / CHUNK_PAGES }
    }

    /// Returns the first place from `at` to before `end`, in one chunk, that `walk` wants.
    fn next_in_chunk(&self, at: usize, end: usize, walk: Walk) -> Option<(usize, EntryRef<'_>)> {
        let chunk = at / CHUNK_PAGES;
        let lines = self.chunks[chunk].lines.get();
        let (mut at, mut end) = (at, end);
        if let Lines::One { which, .. } = lines {
            let first = chunk * CHUNK_PAGES + which * LINE_PAGES;
            (at, end) = (at.max(first), end.min(first + LINE_PAGES));
        }
        while at < end {
            let line_end = end.min((at / LINE_PAGES + 1) * LINE_PAGES);
            let line = self.line_of(lines, at / LINE_PAGES % CHUNK_LINES);
            for entry in line.map_or(&[][..], |line| &line.0[at % LINE_PAGES..]).iter().take(line_end - at) {
                if walk.wants(entry.load().state()) {
                    return Some((at, EntryRef { leaf: self, entry, chunk }));
                }
                at += 1;
            }
            at = line_end;
        }
        None
    }
}

/// A page's entry, together with the counts that the page is part of.
#[derive(Clone, Copy)]
pub struct EntryRef<'t> {
    leaf: &'t Leaf,
    entry: &'t Entry,
    chunk: usize,
}

impl<'t> EntryRef<'t> {
    /// Returns the entry itself.
    pub const fn entry(self) -> &'t Entry {
        self.entry
    }

    /// Settles a locked page and updates the counts. The entry remembers `past`, or keeps what it remembered
    /// if `past` is none. Returns whether a thread waits for the page and must be woken.
    #[must_use]
    pub fn settle(self, before: State, after: State, past: Option<Past>) -> bool {
        self.recount(before, after);
        match past {
            Some(past) => self.entry.settle_with(after, past),
            None => self.entry.settle(after),
        }
    }

    /// Sets an unlocked page and updates the counts. Must be called under the exclusive map lock.
    pub fn set(self, before: State, after: State) {
        self.recount(before, after);
        self.entry.set(after);
    }

    fn recount(self, before: State, after: State) {
        let leaf = self.leaf;
        bump(&leaf.chunks[self.chunk].resident, before.is_resident(), after.is_resident());
        let (was_used, is_used) = (before != State::Absent, after != State::Absent);
        bump(&leaf.chunks[self.chunk].used, was_used, is_used);
        match (was_used, is_used) {
            (false, true) => _ = leaf.used_total.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = leaf.used_total.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }
}

fn bump(count: &AtomicU16, before: bool, after: bool) {
    match (before, after) {
        (false, true) => {
            count.fetch_add(1, Ordering::Relaxed);
        }
        (true, false) => {
            let old = count.fetch_sub(1, Ordering::Relaxed);
            debug_assert!(old > 0, "a chunk's count fell below zero");
        }
        _ => {}
    }
}

/// The page table of one space.
pub struct Table<'m> {
    directory: &'m [AtomicPtr<Leaf>],
    /// The page that the first leaf begins with. So a small space can have a small directory.
    first: PageIndex,
}

/// Which entries a walk looks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// Entries of pages in the program's memory.
    Resident,
    /// Entries in any state but `Absent`.
    Used,
}

impl Walk {
    const fn count_of(self, chunk: &Chunk) -> &AtomicU16 {
        match self {
            Walk::Resident => &chunk.resident,
            Walk::Used => &chunk.used,
        }
    }

    fn wants(self, state: State) -> bool {
        match self {
            Walk::Resident => state.is_resident(),
            Walk::Used => state != State::Absent,
        }
    }
}

impl<'m> Table<'m> {
    /// Creates an empty table whose directory begins at page `first`, a multiple of [`LEAF_PAGES`].
    pub fn new(directory: &'m [AtomicPtr<Leaf>], first: PageIndex) -> Table<'m> {
        assert!(first.0.is_multiple_of(LEAF_PAGES as u64));
        Table { directory, first }
    }

    fn split(&self, page: PageIndex) -> Option<(usize, usize)> {
        let index = page.0.checked_sub(self.first.0)? as usize;
        let leaf = index / LEAF_PAGES;
        (leaf < self.directory.len()).then_some((leaf, index % LEAF_PAGES))
    }

    /// Whether the leaf of this page is attached.
    pub fn has_leaf(&self, page: PageIndex) -> bool {
        self.split(page).is_some_and(|(leaf, _)| self.leaf(leaf).is_some())
    }

    /// Attaches the leaf that holds `page`. Must be called under the exclusive map lock.
    pub fn attach(&self, page: PageIndex, leaf: &'m Leaf) {
        let (at, _) = self.split(page).expect("page outside the directory");
        // Ordering: Release publishes the leaf to the Acquire in `leaf`.
        let old = self.directory[at].swap(core::ptr::from_ref(leaf).cast_mut(), Ordering::Release);
        assert!(old.is_null(), "a leaf was attached twice");
    }

    fn leaf(&self, at: usize) -> Option<&Leaf> {
        // Ordering: Acquire pairs with the Release in `attach`.
        let pointer = self.directory[at].load(Ordering::Acquire);
        // SAFETY: the pointer is null, or comes from the `&'m Leaf` given to `attach`, which outlives `self`.
        // All access to a leaf is through atomics, so shared references are allowed.
        unsafe { pointer.as_ref() }
    }

    /// Returns the page's place. None where no leaf is attached, because nothing was ever managed there.
    pub fn get(&self, page: PageIndex) -> Option<EntryRef<'_>> {
        let (leaf, at) = self.split(page)?;
        Some(self.leaf(leaf)?.place(at))
    }

    /// Returns the page's place, or none if the leaf isn't attached or the page's line has no place yet. The
    /// page is absent then. For callers that do nothing with absent pages. Takes no memory for a line.
    pub fn known(&self, page: PageIndex) -> Option<EntryRef<'_>> {
        let (leaf, at) = self.split(page)?;
        self.leaf(leaf)?.known(at)
    }

    /// Returns the first page in `range` that `walk` looks for. Skips empty leaves and chunks. The result is
    /// only a hint unless the map lock is held.
    pub fn next(&self, range: PageRange, walk: Walk) -> Option<(PageIndex, EntryRef<'_>)> {
        let mut page = range.start;
        while page.0 < range.end.0 {
            let (leaf_at, at) = self.split(page)?;
            let leaf_end = PageIndex(page.0 - at as u64 + LEAF_PAGES as u64);
            let Some(leaf) = self.leaf(leaf_at) else {
                page = leaf_end;
                continue;
            };
            if leaf.used_total.load(Ordering::Relaxed) == 0 {
                page = leaf_end;
                continue;
            }
            let chunk = at / CHUNK_PAGES;
            // Where pages lie far apart most chunks are empty.
            let is_empty = |chunk: &Chunk| walk.count_of(chunk).load(Ordering::Relaxed) == 0;
            let last = (at + (range.end.0 - page.0) as usize - 1).min(LEAF_PAGES - 1) / CHUNK_PAGES;
            let empty = leaf.chunks[chunk..=last].iter().take_while(|chunk| is_empty(chunk)).count();
            if empty > 0 {
                page = PageIndex(page.0 - at as u64 + ((chunk + empty) * CHUNK_PAGES) as u64);
                continue;
            }
            let chunk_end = PageIndex(page.0 - (at % CHUNK_PAGES) as u64 + CHUNK_PAGES as u64);
            let stop = at + (chunk_end.0.min(range.end.0) - page.0) as usize;
            if let Some((found, place)) = leaf.next_in_chunk(at, stop, walk) {
                return Some((page.plus((found - at) as u64), place));
            }
            page = chunk_end;
        }
        None
    }

    /// Calls `visit` for each used page in `range`, in address order. Must be called under the exclusive map
    /// lock.
    pub fn for_each_used(&self, range: PageRange, mut visit: impl FnMut(PageIndex, EntryRef<'_>)) {
        let mut rest = range;
        while let Some((page, place)) = self.next(rest, Walk::Used) {
            visit(page, place);
            rest = PageRange::new(page.plus(1), range.end);
        }
    }

    /// Calls `visit` for each attached leaf until `visit` fails.
    pub fn for_each_leaf<E>(&self, visit: impl FnMut(*mut Leaf) -> Result<(), E>) -> Result<(), E> {
        // Ordering: Acquire, as in `leaf`.
        let leaves = self.directory.iter().map(|leaf| leaf.load(Ordering::Acquire));
        leaves.filter(|leaf| !leaf.is_null()).try_for_each(visit)
    }

    /// Every page that the directory can hold.
    pub fn all(&self) -> PageRange {
        PageRange::of(self.first, (self.directory.len() * LEAF_PAGES) as u64)
    }

    /// Asserts that the counts are those of the entries, and that no two chunks or lines share a place.
    pub fn check(&self) {
        for leaf in (0..self.directory.len()).filter_map(|at| self.leaf(at)) {
            leaf.check();
        }
    }
}

impl Leaf {
    fn check(&self) {
        let (mut total, mut nodes, mut lines) = (0, 0, 0);
        for chunk in 0..CHUNKS {
            let used = self.chunks[chunk].used.load(Ordering::Relaxed);
            let resident = self.chunks[chunk].resident.load(Ordering::Relaxed);
            let (mut used_there, mut resident_there) = (0, 0);
            let known = self.chunks[chunk].lines.get();
            if let Lines::Node(at) = known {
                nodes += usize::from(at) + 1;
            }
            for line in (0..CHUNK_LINES).filter_map(|which| self.line_of(known, which)) {
                let offset = core::ptr::from_ref(line).addr() - self.lines.as_ptr().addr();
                lines += offset / size_of::<Line>() + 1;
                for state in line.0.iter().map(|entry| entry.load().state()) {
                    used_there += u16::from(state != State::Absent);
                    resident_there += u16::from(state.is_resident());
                }
            }
            assert_eq!((used, resident), (used_there, resident_there), "used and resident, chunk {chunk}");
            total += u32::from(used);
        }
        assert_eq!(total, self.used_total.load(Ordering::Relaxed), "used pages of a leaf");
        // If each place was handed out once, the places are 1, 2, ... up to the number taken. So the sums
        // must be equal.
        let taken = self.taken.lock();
        let sum = |count: u16| (1..=usize::from(count)).sum::<usize>();
        assert_eq!((nodes, lines), (sum(taken.nodes), sum(taken.lines)), "places of a leaf");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf() -> &'static Leaf {
        let layout = std::alloc::Layout::new::<Leaf>();
        // SAFETY: `Leaf` is `Zeroed`, so zeros are a valid value. Its layout isn't empty, and the memory is
        // never freed.
        unsafe { &*std::alloc::alloc_zeroed(layout).cast::<Leaf>() }
    }

    #[test]
    fn walk_skips_empty_leaves_and_chunks_and_finds_every_page() {
        let directory: &[AtomicPtr<Leaf>] =
            Box::leak(Box::new([const { AtomicPtr::new(core::ptr::null_mut()) }; 4]));
        let table = Table::new(directory, PageIndex(0));
        let pages = [0, 511, 512, LEAF_PAGES as u64 - 1, 3 * LEAF_PAGES as u64 + 700].map(PageIndex);
        for page in pages {
            if !table.has_leaf(page) {
                table.attach(page, leaf());
            }
            table.get(page).unwrap().set(State::Absent, State::Zero);
        }
        let mut found = Vec::new();
        table.for_each_used(table.all(), |page, _| found.push(page));
        assert_eq!(found, pages);
        assert!(table.next(table.all(), Walk::Resident).is_none());
        table.get(pages[2]).unwrap().set(State::Zero, State::Resident { copy: None, age: 0 });
        assert_eq!(table.next(table.all(), Walk::Resident).unwrap().0, pages[2]);
        table.check();
        assert!(!table.has_leaf(PageIndex(2 * LEAF_PAGES as u64)));
        assert!(!table.has_leaf(PageIndex(9 * LEAF_PAGES as u64)));
    }

    /// Regression: one page in 4 MiB had a page of entries to itself. With many of these pages the entries
    /// took the whole budget, and nothing was left for the program.
    #[test]
    fn pages_far_apart_have_their_entries_side_by_side() {
        let leaf = leaf();
        let directory: &[AtomicPtr<Leaf>] =
            Box::leak(Box::new([const { AtomicPtr::new(core::ptr::null_mut()) }; 1]));
        let table = Table::new(directory, PageIndex(0));
        table.attach(PageIndex(0), leaf);
        let pages = || (0..LEAF_PAGES as u64).step_by(1024).map(PageIndex);
        assert!(pages().all(|page| table.known(page).is_none()), "looking takes nothing");
        for page in pages() {
            table.get(page).unwrap().set(State::Absent, State::Zero);
        }
        let taken = leaf.taken.lock();
        assert_eq!((taken.nodes, taken.lines), (0, 256), "one line needs no node");
        drop(taken);
        // Neighbours share a line, so a lookup of one finds the other's entry.
        assert!(table.known(PageIndex(7)).is_some() && table.known(PageIndex(8)).is_none());
        assert_eq!(table.next(table.all(), Walk::Used).unwrap().0, PageIndex(0));
        assert_eq!(
            pages().filter(|page| table.known(*page).unwrap().entry().load().state() == State::Zero).count(),
            256
        );
        table.check();
    }

    #[test]
    fn second_line_of_a_chunk_brings_a_node_and_moves_nothing() {
        let leaf = leaf();
        let address =
            |place: Option<EntryRef<'_>>| place.map(|place| core::ptr::from_ref(place.entry()).addr());
        let taken = || {
            let taken = leaf.taken.lock();
            (taken.nodes, taken.lines)
        };
        let first = address(Some(leaf.place(CHUNK_PAGES - 1)));
        assert_eq!((leaf.known(0).is_none(), taken()), (true, (0, 1)));
        assert_eq!(
            address(leaf.known(CHUNK_PAGES - LINE_PAGES)),
            first.map(|at| at - 7 * size_of::<Entry>())
        );
        let second = address(Some(leaf.place(0)));
        assert_eq!(taken(), (1, 2));
        leaf.place(LINE_PAGES);
        assert_eq!(taken(), (1, 3), "another has its place in the node");
        assert_eq!((address(leaf.known(CHUNK_PAGES - 1)), address(leaf.known(0))), (first, second));
        leaf.check();
    }

    #[test]
    fn line_is_found_while_its_chunk_gets_a_node() {
        let (leaf, is_done) = (leaf(), std::sync::atomic::AtomicBool::new(false));
        let first = |chunk: usize| chunk * CHUNK_PAGES + 77;
        (0..CHUNKS).for_each(|chunk| _ = leaf.place(first(chunk)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    assert!((0..CHUNKS).all(|chunk| leaf.known(first(chunk)).is_some()));
                }
            });
            (0..CHUNKS).for_each(|chunk| _ = leaf.place(first(chunk) + 5 * LINE_PAGES));
            is_done.store(true, Ordering::Relaxed);
        });
        leaf.check();
    }

    #[test]
    fn threads_that_look_for_the_same_pages_first_get_the_same_entries() {
        let leaf = leaf();
        let addresses = || -> Vec<usize> {
            (0..LEAF_PAGES)
                .step_by(100)
                .map(|at| core::ptr::from_ref(leaf.place(at).entry()).addr())
                .collect()
        };
        let found: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(addresses)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|addresses| *addresses == found[0]));
        let mut each = found[0].clone();
        each.sort_unstable();
        each.dedup();
        assert_eq!(each.len(), found[0].len(), "no two pages share an entry");
    }
}

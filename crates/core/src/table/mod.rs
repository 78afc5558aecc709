//! The page table: from a page to its entry in two loads, for a whole 47-bit address space.
//!
//! A directory of leaves; a leaf holds the entries of 1 GiB of address space, and for each chunk of 512
//! pages (one page of entries, one cluster of slots, one page-table page of the kernel) how many entries
//! are resident and how many are used at all, so that walks over sparse memory skip what is empty.
//! Leaves are handed in by the driver before the pages under them are managed; faults never need one.

pub mod entry;
pub mod ranges;

use crate::memory::Zeroed;
use crate::reclaim::recency::Epoch;
use crate::units::{PageIndex, PageRange};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use entry::{Entry, State};

/// Pages under one leaf: 1 GiB.
pub const LEAF_PAGES: usize = 1 << 18;
/// Pages in a chunk.
pub const CHUNK_PAGES: usize = 512;
/// Leaves of a 47-bit address space.
pub const DIRECTORY_LEAVES: usize = 1 << (47 - 12 - 18);
const CHUNKS: usize = LEAF_PAGES / CHUNK_PAGES;

/// Entries of 1 GiB of address space.
#[repr(C)]
pub struct Leaf {
    entries: [Entry; LEAF_PAGES],
    resident: [AtomicU32; CHUNKS],
    used: [AtomicU32; CHUNKS],
    used_total: AtomicU32,
}

// SAFETY: atomics and entries only, all of which are valid as zeros.
unsafe impl Zeroed for Leaf {}

/// A page's entry together with the counts it is part of.
#[derive(Clone, Copy)]
pub struct Place<'t> {
    leaf: &'t Leaf,
    at: usize,
}

impl<'t> Place<'t> {
    /// The word itself.
    pub fn entry(self) -> &'t Entry {
        &self.leaf.entries[self.at]
    }

    /// Settles a locked page and keeps the counts right; `epoch` if it has just gone. Says whether somebody waits.
    #[must_use]
    pub fn settle(self, before: State, after: State, epoch: Option<Epoch>) -> bool {
        self.recount(before, after);
        match epoch {
            Some(epoch) => self.entry().settle_out(after, epoch),
            None => self.entry().settle(after),
        }
    }

    /// Sets an unlocked page under the exclusive map lock and keeps the counts right.
    pub fn set(self, before: State, after: State) {
        self.recount(before, after);
        self.entry().set(after);
    }

    fn recount(self, before: State, after: State) {
        let chunk = self.at / CHUNK_PAGES;
        bump(&self.leaf.resident[chunk], before.is_resident(), after.is_resident());
        let (was_used, is_used) = (before != State::Absent, after != State::Absent);
        bump(&self.leaf.used[chunk], was_used, is_used);
        bump(&self.leaf.used_total, was_used, is_used);
    }
}

fn bump(count: &AtomicU32, before: bool, after: bool) {
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
    /// The page that the first leaf begins with; lets a small space have a small directory.
    first: PageIndex,
}

/// Which entries a walk is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// Those in the program's memory.
    Resident,
    /// All but `Absent`.
    Used,
}

impl<'m> Table<'m> {
    /// An empty table whose directory begins at page `first`, a multiple of [`LEAF_PAGES`].
    pub fn new(directory: &'m [AtomicPtr<Leaf>], first: PageIndex) -> Table<'m> {
        assert!(first.0.is_multiple_of(LEAF_PAGES as u64));
        Table { directory, first }
    }

    fn split(&self, page: PageIndex) -> Option<(usize, usize)> {
        let index = page.0.checked_sub(self.first.0)? as usize;
        let leaf = index / LEAF_PAGES;
        (leaf < self.directory.len()).then_some((leaf, index % LEAF_PAGES))
    }

    /// Whether a leaf is there for this page.
    pub fn has_leaf(&self, page: PageIndex) -> bool {
        self.get(page).is_some()
    }

    /// Gives the table memory for the leaf that holds `page`. Under the exclusive map lock.
    pub fn attach(&self, page: PageIndex, leaf: &'m Leaf) {
        let (at, _) = self.split(page).expect("page outside the directory");
        // Ordering: Release publishes the leaf to `leaf`.
        let old = self.directory[at].swap(core::ptr::from_ref(leaf).cast_mut(), Ordering::Release);
        assert!(old.is_null(), "a leaf was attached twice");
    }

    fn leaf(&self, at: usize) -> Option<&Leaf> {
        // Ordering: Acquire pairs with the Release in `attach`.
        let pointer = self.directory[at].load(Ordering::Acquire);
        // SAFETY: null, or from the `&'m Leaf` given to `attach`, which outlives `self`; all access to a
        // leaf is through atomics.
        unsafe { pointer.as_ref() }
    }

    /// The page's place; none where no leaf is attached: nothing was ever managed there.
    pub fn get(&self, page: PageIndex) -> Option<Place<'_>> {
        let (leaf, at) = self.split(page)?;
        Some(Place { leaf: self.leaf(leaf)?, at })
    }

    /// The first page in `range` that `walk` is about, skipping empty leaves and chunks. Only a hint unless
    /// the map lock is held.
    pub fn next(&self, range: PageRange, walk: Walk) -> Option<(PageIndex, Place<'_>)> {
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
            let counts = if walk == Walk::Resident { &leaf.resident } else { &leaf.used };
            let chunk_end = PageIndex(page.0 - (at % CHUNK_PAGES) as u64 + CHUNK_PAGES as u64);
            if counts[chunk].load(Ordering::Relaxed) == 0 {
                page = chunk_end;
                continue;
            }
            let stop = (chunk_end.0.min(range.end.0) - page.0) as usize;
            for step in 0..stop {
                let place = Place { leaf, at: at + step };
                let state = place.entry().load().state();
                let is_wanted =
                    if walk == Walk::Resident { state.is_resident() } else { state != State::Absent };
                if is_wanted {
                    return Some((page.plus(step as u64), place));
                }
            }
            page = chunk_end;
        }
        None
    }

    /// Calls `visit` for each used page in `range`, in address order. Under the exclusive map lock.
    pub fn for_each_used(&self, range: PageRange, mut visit: impl FnMut(PageIndex, Place<'_>)) {
        let mut rest = range;
        while let Some((page, place)) = self.next(rest, Walk::Used) {
            visit(page, place);
            rest = PageRange::new(page.plus(1), range.end);
        }
    }

    /// Calls `visit` for each leaf that was attached, until it fails.
    pub fn for_each_leaf<E>(&self, visit: impl FnMut(*mut Leaf) -> Result<(), E>) -> Result<(), E> {
        // Ordering: Acquire as in `leaf`.
        let leaves = self.directory.iter().map(|leaf| leaf.load(Ordering::Acquire));
        leaves.filter(|leaf| !leaf.is_null()).try_for_each(visit)
    }

    /// Every page the directory can hold.
    pub fn all(&self) -> PageRange {
        PageRange::of(self.first, (self.directory.len() * LEAF_PAGES) as u64)
    }

    /// Asserts that the counts are those of the entries, in every chunk that claims to have any.
    pub fn check(&self) {
        for leaf in (0..self.directory.len()).filter_map(|at| self.leaf(at)) {
            let mut total = 0;
            for (chunk, used) in leaf.used.iter().enumerate() {
                let used = used.load(Ordering::Relaxed);
                let resident = leaf.resident[chunk].load(Ordering::Relaxed);
                if used > 0 {
                    let states = || {
                        leaf.entries[chunk * CHUNK_PAGES..][..CHUNK_PAGES].iter().map(|e| e.load().state())
                    };
                    assert_eq!(
                        used as usize,
                        states().filter(|s| *s != State::Absent).count(),
                        "used, chunk {chunk}"
                    );
                    assert_eq!(
                        resident as usize,
                        states().filter(|s| s.is_resident()).count(),
                        "resident, chunk {chunk}"
                    );
                }
                assert!(resident <= used);
                total += used;
            }
            assert_eq!(total, leaf.used_total.load(Ordering::Relaxed), "used pages of a leaf");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf() -> &'static Leaf {
        let layout = std::alloc::Layout::new::<Leaf>();
        // SAFETY: `Leaf` is `Zeroed`, its layout isn't empty, and the memory is never freed.
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
}

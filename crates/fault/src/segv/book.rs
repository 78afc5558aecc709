//! The state of each page in `segv` mode: whether the page is open, and which protection the program has set.
//! Each page has a byte in a leaf. A leaf covers 1 GiB of addresses and is never freed. The book also counts
//! the borders between open and closed pages, because each costs a mapping.
// UNSAFETY: leaves are reached by pointers.

use core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::memory;
use farpage_os::sys::Errno;

/// Bits of a page's byte. Bit 0 is set if the page is open. Bits 1 to 3 are the program's `PROT_*`. Bit 4
/// ([`KNOWN`]) is set if the page is registered. A closed page that the program has made PROT_NONE has only
/// bit 4.
pub(super) const OPEN: u64 = 1;
pub(super) const READ_WRITE: u64 = 3;
pub(super) const ALLOWED: u64 = 7;
const KNOWN: u64 = 16;
const BITS: u64 = 8;
/// Pages whose bytes share one word.
const PAGES: u64 = 64 / BITS;
/// The same bit of every page in a word.
const EACH: u64 = 0x0101_0101_0101_0101;

/// Pages that one leaf covers: 1 GiB.
const LEAF_PAGES: u64 = 1 << 18;
/// Leaves that cover the whole address space.
const LEAVES: usize = 1 << 17;

type Leaf = [AtomicU64; (LEAF_PAGES / PAGES) as usize];

/// The bytes of all pages.
pub(super) struct Book {
    leaves: &'static [AtomicPtr<Leaf>],
    /// Borders between open and closed pages. Each has split one of the program's mappings.
    pub(super) borders: AtomicI64,
}

impl Book {
    pub(super) fn new() -> Result<Book, Errno> {
        let base = memory::reserve(LEAVES * size_of::<AtomicPtr<Leaf>>())?;
        // SAFETY: the memory has that size and is never freed. The memory is zeroed, so the pointers are
        // null.
        let leaves = unsafe { core::slice::from_raw_parts(base.cast(), LEAVES) };
        Ok(Book { leaves, borders: AtomicI64::new(0) })
    }

    /// Makes the leaves for `pages`. Only one thread at a time may call this.
    fn make_leaves(&self, pages: PageRange) -> Result<(), Errno> {
        for leaf in pages.start.0 / LEAF_PAGES..pages.end.0.div_ceil(LEAF_PAGES) {
            let place = &self.leaves[leaf as usize];
            if place.load(Ordering::Relaxed).is_null() {
                // Ordering: Release pairs with the Acquire in `leaf`, so a thread that finds the leaf finds
                // it zeroed.
                place.store(memory::reserve(size_of::<Leaf>())?.cast(), Ordering::Release);
            }
        }
        Ok(())
    }

    fn leaf(&self, page: PageIndex) -> Option<&Leaf> {
        // Ordering: Acquire pairs with the Release in `make_leaves`.
        let leaf = self.leaves.get((page.0 / LEAF_PAGES) as usize)?.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or names a leaf that is never freed.
        unsafe { leaf.as_ref() }
    }

    fn word(&self, page: PageIndex) -> Option<&AtomicU64> {
        Some(&self.leaf(page)?[(page.0 % LEAF_PAGES / PAGES) as usize])
    }

    /// Returns a page's bits; 0 for a page that isn't registered.
    pub(super) fn get(&self, page: PageIndex) -> u64 {
        let word = self.word(page).map_or(0, |word| word.load(Ordering::Acquire));
        word >> (page.0 % PAGES * BITS) & 0xff
    }

    pub(super) fn is_open(&self, page: PageIndex) -> bool {
        self.get(page) & OPEN != 0
    }

    /// Calls `change` with each word that has bits of `pages`, and a mask of those bits.
    fn for_each_word(&self, pages: PageRange, mut change: impl FnMut(&AtomicU64, u64)) {
        let mut page = pages.start;
        while page < pages.end {
            let Some(word) = self.word(page) else {
                page = next_leaf(page);
                continue;
            };
            let (first, count) = (page.0 % PAGES, (PAGES - page.0 % PAGES).min(pages.end.0 - page.0));
            change(word, (u64::MAX >> (64 - count * BITS)) << (first * BITS));
            page = page.plus(count);
        }
    }

    /// Sets all bits of `pages`.
    pub(super) fn set(&self, pages: PageRange, bits: u64) {
        self.for_each_word(pages, |word, mask| {
            let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, |was| {
                Some((was & !mask) | ((EACH * bits) & mask))
            });
        });
    }

    /// Sets the program's protection of `pages`.
    pub(super) fn set_allowed(&self, pages: PageRange, protection: u64) {
        self.for_each_word(pages, |word, mask| {
            let mask = mask & (EACH * (ALLOWED << 1));
            let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, |was| {
                Some((was & !mask) | ((EACH * (protection << 1)) & mask))
            });
        });
    }

    /// Clears all bits of `pages`, which are no longer registered.
    pub(super) fn forget(&self, pages: PageRange) {
        self.for_each_run(pages, is_open, |run, _| self.set_open(run, false));
        self.set(pages, 0);
    }

    /// Registers `pages` as closed, and as readable and writable for the program.
    pub(super) fn register(&self, pages: PageRange) -> Result<(), Errno> {
        self.make_leaves(pages)?;
        self.forget(pages);
        self.set(pages, KNOWN | READ_WRITE << 1);
        Ok(())
    }

    /// Opens or closes `pages`, which were all open or all closed, and counts the borders.
    pub(super) fn set_open(&self, pages: PageRange, open: bool) {
        let is_open = |page: u64| i64::from(self.is_open(PageIndex(page)));
        let (now, around) = (i64::from(open), is_open(pages.start.0.wrapping_sub(1)) + is_open(pages.end.0));
        let was = is_open(pages.start.0);
        self.for_each_word(pages, |word, mask| {
            // Ordering: Release pairs with the Acquire in `get`. A thread that finds a page open finds
            // everything that was done before.
            if open {
                word.fetch_or(mask & EACH, Ordering::Release);
            } else {
                word.fetch_and(!(mask & EACH), Ordering::Release);
            }
        });
        // A side is a border if the neighbour differs.
        let borders = |own: i64| if own == 1 { 2 - around } else { around };
        self.borders.fetch_add(borders(now) - borders(was), Ordering::Relaxed);
    }

    /// Returns the first run of pages in `from..end` that all have the same wanted bits, and those bits.
    pub(super) fn next_run(
        &self,
        from: PageIndex,
        end: PageIndex,
        is_wanted: impl Fn(u64) -> bool,
    ) -> Option<(PageRange, u64)> {
        let mut page = from;
        while page < end {
            let Some(word) = self.word(page) else {
                page = next_leaf(page);
                continue;
            };
            if is_wanted(self.get(page)) {
                break;
            }
            let skips = page.0.is_multiple_of(PAGES) && word.load(Ordering::Acquire) == 0;
            page = page.plus(if skips { PAGES } else { 1 });
        }
        if page >= end {
            return None;
        }
        let (start, bits) = (page, self.get(page));
        while page < end && self.get(page) == bits {
            page = page.plus(1);
        }
        Some((PageRange::new(start, page), bits))
    }

    pub(super) fn for_each_run(
        &self,
        pages: PageRange,
        is_wanted: impl Fn(u64) -> bool,
        mut visit: impl FnMut(PageRange, u64),
    ) {
        let mut from = pages.start;
        while let Some((run, bits)) = self.next_run(from, pages.end, &is_wanted) {
            visit(run, bits);
            from = run.end;
        }
    }
}

/// Returns the first page of the next leaf.
const fn next_leaf(page: PageIndex) -> PageIndex {
    PageIndex((page.0 / LEAF_PAGES + 1) * LEAF_PAGES)
}

pub(super) const fn is_open(bits: u64) -> bool {
    bits & OPEN != 0
}

pub(super) const fn is_known(bits: u64) -> bool {
    bits & KNOWN != 0
}

pub(super) const fn allowed(bits: u64) -> usize {
    (bits >> 1 & ALLOWED) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pages on both sides of a border between leaves.
    const SOME: u64 = 96;
    const FIRST: u64 = LEAF_PAGES - SOME / 2;

    #[derive(Clone, Copy, Debug)]
    enum Change {
        Allow(u64, u64, u64),
        Open(u64, u64, bool),
        Forget(u64, u64),
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let stretch = (0..SOME, 1..20_u64).prop_map(|(from, count)| (from, count.min(SOME - from)));
        let change = prop_oneof![
            (stretch.clone(), 0..8_u64).prop_map(|((from, count), bits)| Change::Allow(from, count, bits)),
            (stretch.clone(), any::<bool>())
                .prop_map(|((from, count), open)| Change::Open(from, count, open)),
            stretch.prop_map(|(from, count)| Change::Forget(from, count)),
        ];
        prop::collection::vec(change, 1..60)
    }

    const fn pages(from: u64, count: u64) -> PageRange {
        PageRange::of(PageIndex(FIRST + from), count)
    }

    proptest! {
        /// The model is an array of the pages' bits.
        #[test]
        fn book_knows_each_page_and_every_border(changes in changes()) {
            let book = Book::new().unwrap();
            book.make_leaves(pages(0, SOME)).unwrap();
            let mut model = [0_u64; SOME as usize];
            for change in changes {
                match change {
                    Change::Allow(from, count, bits) => {
                        book.set_allowed(pages(from, count), bits);
                        model[from as usize..][..count as usize].iter_mut().for_each(|page| *page = *page & (OPEN | KNOWN) | bits << 1);
                    }
                    Change::Open(from, count, open) => {
                        // One call either opens closed pages only, or closes open pages only.
                        let alike = model[from as usize..][..count as usize].iter().take_while(|page| is_open(**page) != open).count();
                        if alike > 0 {
                            book.set_open(pages(from, alike as u64), open);
                        }
                        model[from as usize..][..alike].iter_mut().for_each(|page| *page = *page & !OPEN | u64::from(open));
                    }
                    Change::Forget(from, count) => {
                        book.forget(pages(from, count));
                        model[from as usize..][..count as usize].fill(0);
                    }
                }
                for (at, bits) in model.iter().enumerate() {
                    prop_assert_eq!(book.get(PageIndex(FIRST + at as u64)), *bits, "page {}", at);
                }
                let borders = (0..=SOME as usize).filter(|at| {
                    let open = |at: Option<usize>| at.and_then(|at| model.get(at)).is_some_and(|bits| is_open(*bits));
                    open(at.checked_sub(1)) != open(Some(*at))
                });
                prop_assert_eq!(book.borders.load(Ordering::Relaxed), borders.count() as i64);
                // The search begins far below, where there are no leaves.
                let mut found = Vec::new();
                book.for_each_run(PageRange::new(PageIndex(0), PageIndex(1 << 30)), is_open, |run, bits| {
                    found.extend((run.start.0..run.end.0).map(|page| (page - FIRST, bits)));
                });
                let expected: Vec<_> = (0..SOME).map(|at| (at, model[at as usize])).filter(|(_, bits)| is_open(*bits)).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}

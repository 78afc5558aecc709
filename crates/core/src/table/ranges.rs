//! The ranges of a space: which of the program's mappings Farpage knows, and what may be done with each.
//!
//! The ranges are a sorted list that may have gaps. The list mirrors the kernel's list of anonymous private
//! mappings, as the hooks see mappings made and changed. The list is read when victims are chosen and when
//! mappings change. Faults read the list for a moment. The list tells them whether memory is managed at all
//! (`signal` mode), and how far a run or a window may go. A page's state is in its entry, not here.

use crate::memory::Zeroed;
use crate::readahead::by_address::RegionWord;
use crate::units::{PageIndex, PageRange};

/// Known properties of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(u32);

impl Flags {
    /// Nothing is known: readable and writable, not registered.
    pub const NONE: Flags = Flags(0);
    /// Registered with userfaultfd: the range's faults come to Farpage.
    pub const REGISTERED: Flags = Flags(1);
    /// Not readable and writable now, so no page is taken out.
    pub const PROTECTED: Flags = Flags(1 << 1);
    /// Locked with mlock.
    pub const LOCKED: Flags = Flags(1 << 2);
    /// Must stay in memory, because the range holds a thread's stack or control block.
    pub const HELD: Flags = Flags(1 << 3);
    /// The program itself asked that a fork's child doesn't get the range.
    pub const DONT_FORK: Flags = Flags(1 << 4);
    /// The range has a protection that Farpage doesn't manage (executable), and is left alone.
    pub const FOREIGN: Flags = Flags(1 << 5);
    /// A fork's child finds zeros in the range, and has nothing of it to inherit.
    pub const WIPE_ON_FORK: Flags = Flags(1 << 6);
    /// Locked as it is touched (MLOCK_ONFAULT). Pages that aren't there yet needn't be brought in.
    pub const ON_TOUCH: Flags = Flags(1 << 7);
    /// The range has a protection key, which gives Farpage's threads no access, and is left alone.
    pub const KEYED: Flags = Flags(1 << 8);
    const NO_EVICTION: u32 =
        Self::PROTECTED.0 | Self::LOCKED.0 | Self::HELD.0 | Self::FOREIGN.0 | Self::KEYED.0;

    /// Whether all of `other` is set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
    /// Returns these flags with `other` set as well.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
    /// Returns these flags with `other` cleared.
    #[must_use]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }
    /// Whether pages may be taken out of a range with these flags.
    pub const fn may_evict(self) -> bool {
        self.has(Flags::REGISTERED) && self.0 & Self::NO_EVICTION == 0
    }
    /// Whether a range with these flags may be registered at all.
    pub const fn may_register(self) -> bool {
        self.0 & (Self::HELD.0 | Self::FOREIGN.0 | Self::KEYED.0 | Self::LOCKED.0) == 0
    }
}

/// One known mapping, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The pages of the range.
    pub pages: PageRange,
    /// Known properties of the range.
    pub flags: Flags,
    /// What readahead by address knows about the range.
    pub ahead: RegionWord,
}

// SAFETY: integers, each valid as zero, and none with a drop.
unsafe impl Zeroed for Range {}

/// The list is full. The program has more mappings than Farpage can follow.
#[derive(Debug, PartialEq, Eq)]
pub struct TooMany;

/// Sorted, disjoint ranges. Neighbours with equal flags are one range.
pub struct Ranges<'m> {
    list: &'m mut [Range],
    count: usize,
}

impl<'m> Ranges<'m> {
    /// Creates an empty list in handed memory.
    pub fn new(list: &'m mut [Range]) -> Ranges<'m> {
        Ranges { list, count: 0 }
    }

    /// Returns all ranges, in address order.
    pub fn as_slice(&self) -> &[Range] {
        &self.list[..self.count]
    }

    /// Returns the index of the first range that ends after `page`.
    fn first_ending_after(&self, page: PageIndex) -> usize {
        self.as_slice().partition_point(|range| range.pages.end <= page)
    }

    /// Returns the range that contains `page`.
    pub fn find(&self, page: PageIndex) -> Option<Range> {
        self.at_or_after(page).filter(|range| range.pages.contains(page))
    }

    /// Returns the range that contains `page`, and a mutable reference to what readahead by address knows
    /// about it.
    pub fn ahead_mut(&mut self, page: PageIndex) -> Option<(Range, &mut RegionWord)> {
        let at = self.first_ending_after(page);
        let range = self.list[..self.count].get_mut(at).filter(|range| range.pages.contains(page))?;
        Some((*range, &mut range.ahead))
    }

    /// Returns the first range that has a page at or after `page`.
    pub fn at_or_after(&self, page: PageIndex) -> Option<Range> {
        self.as_slice().get(self.first_ending_after(page)).copied()
    }

    /// Whether any range has a page in `pages`.
    pub fn touches(&self, pages: PageRange) -> bool {
        !pages.is_empty() && self.at_or_after(pages.start).is_some_and(|range| range.pages.start < pages.end)
    }

    /// Makes `pages` a range with `flags`, whatever was there before.
    pub fn insert(&mut self, pages: PageRange, flags: Flags) -> Result<(), TooMany> {
        self.replace(pages, Some(flags))
    }

    /// Forgets `pages`.
    pub fn remove(&mut self, pages: PageRange) -> Result<(), TooMany> {
        self.replace(pages, None)
    }

    /// Changes the flags of every range in `pages`, and splits the ranges that stick out. Pages that no range
    /// covers stay uncovered.
    pub fn update(&mut self, pages: PageRange, change: impl Fn(Flags) -> Flags) -> Result<(), TooMany> {
        let mut from = pages.start;
        while from < pages.end
            && let Some(range) = self.at_or_after(from).filter(|range| range.pages.start < pages.end)
        {
            let part = range.pages.intersection(pages);
            let flags = change(range.flags);
            if flags != range.flags {
                self.insert(part, flags)?;
            }
            from = part.end;
        }
        Ok(())
    }

    /// Replaces whatever lies in `pages` by a range with the flags `with`, or by nothing. At most the two
    /// ends of the old ranges stay.
    fn replace(&mut self, pages: PageRange, with: Option<Flags>) -> Result<(), TooMany> {
        if pages.is_empty() {
            return Ok(());
        }
        let first = self.first_ending_after(pages.start);
        let last = self.as_slice().partition_point(|range| range.pages.start < pages.end);
        let new = |flags| Range { pages, flags, ahead: RegionWord::NEW };
        let mut pieces = [new(Flags::NONE); 3];
        let mut piece_count = 0;
        let mut keep = |range: Range| {
            pieces[piece_count] = range;
            piece_count += 1;
        };
        if first < last && self.list[first].pages.start < pages.start {
            let head = self.list[first];
            keep(Range { pages: PageRange::new(head.pages.start, pages.start), ..head });
        }
        if let Some(flags) = with {
            keep(new(flags));
        }
        if first < last && self.list[last - 1].pages.end > pages.end {
            let tail = self.list[last - 1];
            keep(Range { pages: PageRange::new(pages.end, tail.pages.end), ..tail });
        }
        self.splice(first, last, &pieces[..piece_count])?;
        self.merge_around(first, first + piece_count);
        Ok(())
    }

    fn splice(&mut self, first: usize, last: usize, with: &[Range]) -> Result<(), TooMany> {
        let count = self.count - (last - first) + with.len();
        if count > self.list.len() {
            return Err(TooMany);
        }
        self.list.copy_within(last..self.count, first + with.len());
        self.list[first..first + with.len()].copy_from_slice(with);
        self.count = count;
        Ok(())
    }

    /// Joins neighbours with equal flags among the ranges `first - 1 ..= last`.
    fn merge_around(&mut self, first: usize, last: usize) {
        let mut at = first.saturating_sub(1);
        let mut end = (last + 1).min(self.count);
        while at + 1 < end {
            let (a, b) = (self.list[at], self.list[at + 1]);
            if a.pages.end == b.pages.start && a.flags == b.flags {
                self.list[at].pages.end = b.pages.end;
                self.list.copy_within(at + 2..self.count, at + 1);
                self.count -= 1;
                end -= 1;
            } else {
                at += 1;
            }
        }
    }

    /// Returns the whole unbroken stretch of ranges around `page`, whatever their flags. Users would call the
    /// stretch "the mapping". The caller asks whether the stretch is big enough to manage.
    pub fn stretch(&self, page: PageIndex) -> Option<PageRange> {
        let at = self.first_ending_after(page);
        let mut whole = self.as_slice().get(at).filter(|range| range.pages.contains(page))?.pages;
        for range in self.as_slice()[..at].iter().rev() {
            if range.pages.end != whole.start {
                break;
            }
            whole.start = range.pages.start;
        }
        for range in &self.as_slice()[at + 1..] {
            if range.pages.start != whole.end {
                break;
            }
            whole.end = range.pages.end;
        }
        Some(whole)
    }

    /// Asserts that the list is sorted, disjoint and merged.
    pub fn check(&self) {
        for range in self.as_slice() {
            assert!(!range.pages.is_empty(), "an empty range");
        }
        for pair in self.as_slice().windows(2) {
            assert!(pair[0].pages.end <= pair[1].pages.start, "ranges overlap or are out of order");
            let touch = pair[0].pages.end == pair[1].pages.start;
            assert!(!touch || pair[0].flags != pair[1].flags, "equal neighbours were not merged");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: usize = 64;
    const NOTHING: Range =
        Range { pages: PageRange::of(PageIndex(0), 0), flags: Flags::NONE, ahead: RegionWord::NEW };

    #[derive(Clone, Debug)]
    enum Op {
        Insert(u64, u64, u32),
        Remove(u64, u64),
        Register(u64, u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let span = (0..PAGES as u64, 0_u64..12);
        prop_oneof![
            (span.clone(), 0_u32..3).prop_map(|((a, n), f)| Op::Insert(a, n, f)),
            span.clone().prop_map(|(a, n)| Op::Remove(a, n)),
            span.prop_map(|(a, n)| Op::Register(a, n)),
        ]
    }

    proptest! {
        /// The naive model is an array of flags, one for each page.
        #[test]
        fn list_says_what_an_array_of_pages_says(ops in prop::collection::vec(op(), 1..60)) {
            let mut memory = vec![NOTHING; PAGES + 16];
            let mut ranges = Ranges::new(&mut memory);
            let mut model = [None; PAGES + 16];
            for op in ops {
                match op {
                    Op::Insert(a, n, f) => {
                        ranges.insert(PageRange::of(PageIndex(a), n), Flags(f)).unwrap();
                        model[a as usize..(a + n) as usize].fill(Some(f));
                    }
                    Op::Remove(a, n) => {
                        ranges.remove(PageRange::of(PageIndex(a), n)).unwrap();
                        model[a as usize..(a + n) as usize].fill(None);
                    }
                    Op::Register(a, n) => {
                        ranges.update(PageRange::of(PageIndex(a), n), |f| f.with(Flags::REGISTERED)).unwrap();
                        model[a as usize..(a + n) as usize].iter_mut().flatten().for_each(|f| *f |= 1);
                    }
                }
                ranges.check();
                for (page, flags) in model.iter().enumerate() {
                    let found = ranges.find(PageIndex(page as u64)).map(|range| range.flags.0);
                    prop_assert_eq!(found, *flags, "page {}", page);
                    let stretch = ranges.stretch(PageIndex(page as u64)).map(PageRange::count);
                    let expected = flags.map(|_| {
                        let before = model[..page].iter().rev().take_while(|f| f.is_some()).count();
                        let after = model[page..].iter().take_while(|f| f.is_some()).count();
                        (before + after) as u64
                    });
                    prop_assert_eq!(stretch, expected);
                }
            }
        }
    }

    /// Regression: an update of no pages, inside a range, never ended.
    #[test]
    fn update_of_nothing_ends_and_changes_nothing() {
        let mut memory = vec![NOTHING; 4];
        let mut ranges = Ranges::new(&mut memory);
        ranges.insert(PageRange::of(PageIndex(0), 10), Flags::NONE).unwrap();
        ranges.update(PageRange::of(PageIndex(5), 0), |f| f.with(Flags::LOCKED)).unwrap();
        assert_eq!(ranges.find(PageIndex(5)).unwrap().flags, Flags::NONE);
    }

    /// Regression: an empty set of pages, in the middle of a range, was said to touch it.
    #[test]
    fn nothing_touches_no_range() {
        let mut memory = vec![NOTHING; 4];
        let mut ranges = Ranges::new(&mut memory);
        ranges.insert(PageRange::of(PageIndex(0), 10), Flags::NONE).unwrap();
        assert!(!ranges.touches(PageRange::of(PageIndex(5), 0)));
        assert!(ranges.touches(PageRange::of(PageIndex(9), 1)));
        assert!(!ranges.touches(PageRange::of(PageIndex(10), 1)));
    }

    #[test]
    fn full_list_refuses_and_stays_as_it_was() {
        let mut memory = vec![NOTHING; 2];
        let mut ranges = Ranges::new(&mut memory);
        ranges.insert(PageRange::of(PageIndex(0), 10), Flags::NONE).unwrap();
        ranges.insert(PageRange::of(PageIndex(20), 10), Flags::NONE).unwrap();
        assert_eq!(ranges.remove(PageRange::of(PageIndex(4), 1)), Err(TooMany));
        assert_eq!(ranges.as_slice().len(), 2);
        ranges.check();
    }
}

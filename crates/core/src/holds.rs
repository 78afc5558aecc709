//! Pages that must stay in memory while a system call uses them. Evictors learn of them without a lock.
//!
//! Where the kernel can't wait for a page, a thread of the program *holds* a call's memory. The thread
//! publishes the ranges, then makes sure that each of their pages is in memory, then makes the call. An
//! evictor locks a page's entry, then looks whether the page is held, and leaves a held page alone. So the
//! second of the two sees the first. Either the evictor sees the range, or the holder sees the locked entry
//! and waits until it is settled.
//!
//! A holder has a fixed number of words. A range that doesn't fit is merged with another one, and the pages
//! between them are held, too. A loom model beside the entry (`table/entry.rs`) shows that the two sides
//! never miss each other.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::units::{PageIndex, PageRange};

/// Ranges that one holder tells apart. Under loom there are two, because each is a word whose order with
/// other accesses loom explores: with 16 the model takes 38 s.
pub const RANGES: usize = if cfg!(loom) { 2 } else { 16 };

/// Bits of a range's length. A range of pages is one word, so that no thread sees half of it: 36 bits for its
/// start, 28 for its length. A word of 0 is no range.
const COUNT_BITS: u32 = 28;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;
/// The end of a program's pages.
const END: PageIndex = PageIndex(1 << 35);

/// Packs a range into a word. The greatest length stands for everything from the start on. A merged range may
/// be longer than the bits say, and must not come out shorter than what it covers.
const fn pack(pages: PageRange) -> u64 {
    let count = if pages.count() > COUNT_MAX { COUNT_MAX } else { pages.count() };
    if count == 0 { 0 } else { pages.start.0 << COUNT_BITS | count }
}

const fn unpack(word: u64) -> PageRange {
    let (start, count) = (PageIndex(word >> COUNT_BITS), word & COUNT_MAX);
    if count == COUNT_MAX { PageRange::new(start, END) } else { PageRange::of(start, count) }
}

/// The ranges that one call of one thread holds.
#[repr(align(64))]
pub struct Holder {
    /// 0 if nothing is held, whatever the ranges say.
    busy: AtomicU32,
    ranges: [AtomicU64; RANGES],
}

impl Default for Holder {
    fn default() -> Self {
        Holder::new()
    }
}

impl Holder {
    /// Returns a holder that holds nothing.
    pub fn new() -> Holder {
        Holder { busy: AtomicU32::new(0), ranges: core::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Holds `pages` too. Only the holder's own thread may call this. Pages that are out stay out. The caller
    /// brings them in afterwards, and waits for pages that are being moved.
    pub fn hold(&self, pages: PageRange) {
        if pages.is_empty() {
            return;
        }
        self.occupy();
        // Adjoining ranges become one. Lists of buffers often lie side by side, and the same page is named
        // again and again.
        let touching = self.ranges.iter().find(|range| {
            let known = unpack(range.load(Ordering::Relaxed));
            !known.is_empty() && known.start <= pages.end && pages.start <= known.end
        });
        if let Some(range) = touching {
            let all = hull(unpack(range.load(Ordering::Relaxed)), pages);
            range.store(pack(all), Ordering::Relaxed);
            return fence(Ordering::SeqCst);
        }
        let known = || self.ranges.iter().map(|range| unpack(range.load(Ordering::Relaxed)));
        let set = |at: usize, pages: PageRange| self.ranges[at].store(pack(pages), Ordering::Relaxed);
        match known().position(|range| range.is_empty()) {
            Some(at) => set(at, pages),
            None => {
                // All words are taken: extends the range that grows least.
                let growth = |(_, range): &(usize, PageRange)| hull(*range, pages).count() - range.count();
                if let Some((at, range)) = known().enumerate().min_by_key(growth) {
                    set(at, hull(range, pages));
                }
            }
        }
        // Ordering: SeqCst pairs with the fence in `for_each`. One of the two fences comes first. If this
        // fence does, the evictor sees the range. If the evictor's fence does, this thread sees the entry
        // that the evictor locked before that fence.
        fence(Ordering::SeqCst);
    }

    /// Makes the holder busy until it is released, though it may hold nothing.
    pub fn occupy(&self) {
        // Ordering: Relaxed here and in `hold`. The fence in `hold` publishes the stores.
        if self.busy.load(Ordering::Relaxed) == 0 {
            self.ranges.iter().for_each(|range| range.store(0, Ordering::Relaxed));
            self.busy.store(1, Ordering::Relaxed);
        }
    }

    /// Releases everything that is held.
    pub fn release(&self) {
        // Ordering: Release. The call's use of the memory comes before this store.
        self.busy.store(0, Ordering::Release);
    }

    /// Whether the holder holds anything.
    pub fn is_busy(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `release`. Released memory was used before an evictor
        // takes it.
        self.busy.load(Ordering::Acquire) != 0
    }

    /// The word that [`Holder::release`] sets to 0, for code that can't call that function.
    pub const fn busy_word(&self) -> &AtomicU32 {
        &self.busy
    }
}

/// Returns the smallest range that covers both.
fn hull(one: PageRange, other: PageRange) -> PageRange {
    PageRange::new(one.start.min(other.start), one.end.max(other.end))
}

/// Calls `visit` with each range that `holders` hold. An evictor calls this after it has locked the entries
/// of its victims. A thread that holds a page only later sees the page locked.
pub fn for_each<'a>(holders: impl IntoIterator<Item = &'a Holder>, mut visit: impl FnMut(PageRange)) {
    // Ordering: SeqCst pairs with the fence in `hold`.
    fence(Ordering::SeqCst);
    for holder in holders.into_iter().filter(|holder| holder.is_busy()) {
        let ranges = holder.ranges.iter().map(|range| unpack(range.load(Ordering::Relaxed)));
        ranges.filter(|range| !range.is_empty()).for_each(&mut visit);
    }
}

/// Whether one of `holders` holds `page`.
#[cfg(test)]
pub fn is_held<'a>(holders: impl IntoIterator<Item = &'a Holder>, page: PageIndex) -> bool {
    let mut held = false;
    for_each(holders, |range| held |= range.contains(page));
    held
}

#[cfg(all(test, loom))]
mod loomed {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Under loom a holder has two ranges, so the third is merged into one of them. At no moment is less
    /// held.
    #[test]
    fn loom_what_is_held_stays_held_while_a_range_grows() {
        loom::model(|| {
            let held = |holder: &Holder, page| is_held([holder], PageIndex(page));
            let holder = Arc::new(Holder::new());
            [1, 9].into_iter().for_each(|page| holder.hold(PageRange::of(PageIndex(page), 1)));
            let evictor = {
                let holder = Arc::clone(&holder);
                thread::spawn(move || [1, 9].map(|page| held(&holder, page)))
            };
            holder.hold(PageRange::of(PageIndex(5), 1));
            assert_eq!(evictor.join().unwrap(), [true; 2]);
            assert_eq!([1, 5, 9].map(|page| held(&holder, page)), [true; 3]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, count: u64) -> PageRange {
        PageRange::of(PageIndex(start), count)
    }

    proptest! {
        /// Compares with a list of what was asked for. All of it is held, and nothing more as long as there
        /// are few ranges.
        #[test]
        fn all_that_was_asked_for_is_held_until_it_is_released(
            ranges in prop::collection::vec((0_u64..200, 0_u64..20, 0_u64..3), 0..20),
        ) {
            let holders = [Holder::new(), Holder::new()];
            // Some ranges lie as far apart as a program's heap and its mappings.
            let ranges: Vec<PageRange> =
                ranges.iter().map(|(start, count, far)| range(start + (far << 33), *count)).collect();
            ranges.iter().for_each(|range| holders[1].hold(*range));
            let is_exact = ranges.iter().filter(|range| !range.is_empty()).count() <= RANGES;
            for page in (0..3).flat_map(|far| (0..250).map(move |page| PageIndex(page + (far << 33)))) {
                let (held, asked) = (is_held(&holders, page), ranges.iter().any(|range| range.contains(page)));
                prop_assert!(held || !asked, "{:?}", page);
                prop_assert!(!held || asked || !is_exact, "{:?} of nobody", page);
            }
            holders[1].release();
            prop_assert!((0..250).all(|page| !is_held(&holders, PageIndex(page))));
        }
    }

    #[test]
    fn longest_range_and_highest_page_fit_in_a_word() {
        let holder = Holder::new();
        let top = END.0 - 1;
        holder.hold(range(top, 1));
        assert!(is_held([&holder], PageIndex(top)) && !is_held([&holder], PageIndex(top - 1)));
        holder.hold(range(7, 1 << 30));
        assert!(is_held([&holder], PageIndex(7 + (1 << 30) - 1)) && !is_held([&holder], PageIndex(6)));
    }
}

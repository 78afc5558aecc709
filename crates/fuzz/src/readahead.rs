//! The three readahead policies. `by_address` bounds each window by Linux's formula, applied to a model that
//! keeps the fields of the packed word apart. `by_slot` has no model, and checks the window's borders only.
//! `streams` runs a model program, whose pages are two sets.

use crate::Input;
use farpage_core::readahead::by_address::RegionWord;
use farpage_core::readahead::by_slot::{SlotWindow, SlotWords};
use farpage_core::readahead::streams::{Landed, Streams, Window};
use farpage_core::readahead::window;
use farpage_core::units::{PageIndex, PageRange};
use std::collections::BTreeSet;

/// Pages of the largest window of Linux's two policies.
const WINDOW_PAGES_MAX: u32 = 32;
/// Pages that one page-table page maps: 2 MiB.
const PAGES_PER_TABLE: u64 = 512;

/// Runs one of the three policies.
pub fn run(input: &mut Input) {
    match input.byte() % 4 {
        0 => by_address(input),
        1 => by_slot(input),
        _ => streams(input),
    }
}

/// Draws a page of the region.
fn any_page(input: &mut Input, region: PageRange) -> PageIndex {
    region.start.plus(input.below(region.count() as usize) as u64)
}

/// Checks that a window has the fault's page, and at most as many pages as the model says. The window must
/// stay within its region and within one page-table page.
fn by_address(input: &mut Input) {
    let cluster = input.below(8) as u32;
    let pages_max = (1_u32 << cluster).min(WINDOW_PAGES_MAX);
    let region = PageRange::of(PageIndex(input.below(900) as u64), 1 + input.below(1600) as u64);
    let mut word = RegionWord::NEW;
    let mut fields = Fields::NEW;
    while !input.is_over() {
        let kind = input.byte();
        let page = any_page(input, region);
        let is_in_cache = kind & 3 != 0;
        if is_in_cache {
            let is_marked = kind & 4 != 0;
            word = word.found(page, is_marked);
            fields.found(page, u32::from(is_marked));
            continue;
        }
        let (next, window) = word.missed(page, region, cluster);
        let pages = fields.missed(page, pages_max);
        assert!(window.contains(page) && window.count() <= u64::from(pages) && pages <= WINDOW_PAGES_MAX);
        assert!(window.start >= region.start && window.end <= region.end, "beyond the region");
        let table = |page: u64| page / PAGES_PER_TABLE;
        assert_eq!(table(window.start.0), table(window.end.0 - 1), "beyond the page-table page");
        word = next;
    }
}

/// The model of a [`RegionWord`]: its three fields, unpacked.
struct Fields {
    hits: u32,
    /// Pages of the last window.
    window: u32,
    /// The page of the last fault.
    page: PageIndex,
}

impl Fields {
    /// A new word counts as one with four hits, so that the first fault opens a window.
    const NEW: Fields = Fields { hits: 4, window: 0, page: PageIndex(0) };
    /// Hits that the word's six bits can count.
    const HITS_MAX: u32 = 63;

    fn found(&mut self, page: PageIndex, hits: u32) {
        self.hits = (self.hits + hits).min(Fields::HITS_MAX);
        self.page = page;
    }

    /// Returns how many pages the next window has at most.
    fn missed(&mut self, page: PageIndex, pages_max: u32) -> u32 {
        let distance = page.0.abs_diff(self.page.0);
        let pages =
            if pages_max == 1 { 1 } else { window::pages(self.hits, distance, pages_max, self.window) };
        *self = Fields { hits: 0, window: pages, page };
        pages
    }
}

/// Checks that a window never has slot 0 or a slot beyond the area, and always has the fault's own slot.
fn by_slot(input: &mut Input) {
    let cluster = input.below(8) as u32;
    let slots = 2 + input.below(400) as u32;
    let words = SlotWords::new();
    while !input.is_over() {
        (0..input.below(40)).for_each(|_| words.hit());
        let offset = 1 + input.below(slots as usize - 1) as u32;
        let SlotWindow { first, count } = words.missed(offset, slots, cluster);
        assert!((1..=offset).contains(&first) && offset < first + count);
        assert!(first + count <= slots && count <= WINDOW_PAGES_MAX);
    }
}

/// Runs a model program. Windows must lie in the program's region. No more pages may count as used than were
/// brought in.
fn streams(input: &mut Input) {
    let off = input.byte();
    let mut world = World::new(input);
    while !input.is_over() {
        let Some(kind) = input.kind(Operation::KINDS.len(), off & !Operation::WALKS) else { continue };
        match Operation::KINDS[kind] {
            Operation::Walk => world.walk(input),
            Operation::Touch => world.touch_any(input),
            Operation::Arrive => world.arrive(input),
            Operation::Fail => world.fail_one(input),
            Operation::Discard => world.discard(input),
        }
    }
}

/// What happens next in a [`World`]. Each operation is a method of the world.
#[derive(Clone, Copy)]
enum Operation {
    Walk,
    Touch,
    Arrive,
    Fail,
    Discard,
}

impl Operation {
    /// The operation of each kind that the input can name. Two kinds are walks, because walks make streams.
    const KINDS: [Operation; 6] = [
        Operation::Walk,
        Operation::Walk,
        Operation::Touch,
        Operation::Arrive,
        Operation::Fail,
        Operation::Discard,
    ];
    /// Bits of the kinds that are walks. Walking is never switched off.
    const WALKS: u8 = 0b11;
}

/// The program's memory, its walkers, and the windows in flight.
struct World {
    streams: Streams,
    region: PageRange,
    /// Pages of the largest window.
    pages_max: u32,
    walkers: [Walker; 4],
    /// Pages that the program touches without a fault.
    resident: BTreeSet<PageIndex>,
    /// Pages parked with a mark. A touch of such a page tells the stream. No page is in both sets.
    parked: BTreeSet<PageIndex>,
    /// Windows that the streams asked for and that haven't arrived, the oldest first.
    in_flight: Vec<Window>,
    /// Pages brought in by windows.
    issued: u64,
    /// Pages of windows that count as used.
    hits: u64,
}

/// A thread of the program, which walks in a circle through the region.
#[derive(Clone, Copy)]
struct Walker {
    /// The next page to touch.
    page: PageIndex,
    /// Pages from one touch to the next. May be negative, or 0.
    stride: i64,
}

impl Walker {
    fn any(input: &mut Input, region: PageRange) -> Walker {
        let page = any_page(input, region);
        let stride = i64::from(input.byte() % 9) - 4;
        Walker { page, stride }
    }
}

impl World {
    fn new(input: &mut Input) -> World {
        let region = PageRange::of(PageIndex(input.below(300) as u64), 8 + input.below(400) as u64);
        let pages_max = 1 + input.below(40) as u32;
        let walkers = std::array::from_fn(|_| Walker::any(input, region));
        World {
            streams: Streams::new(),
            region,
            pages_max,
            walkers,
            resident: BTreeSet::new(),
            parked: BTreeSet::new(),
            in_flight: Vec::new(),
            issued: 0,
            hits: 0,
        }
    }

    /// One walker goes up to 16 steps.
    fn walk(&mut self, input: &mut Input) {
        let at = input.below(self.walkers.len());
        let steps = 1 + input.below(16);
        for _ in 0..steps {
            let Walker { page, stride } = self.walkers[at];
            self.touch(page);
            let offset = (page.0 - self.region.start.0).wrapping_add_signed(stride) % self.region.count();
            self.walkers[at].page = self.region.start.plus(offset);
        }
    }

    fn touch_any(&mut self, input: &mut Input) {
        let page = any_page(input, self.region);
        self.touch(page);
    }

    fn touch(&mut self, page: PageIndex) {
        if !self.resident.insert(page) {
            return;
        }
        let seen = if self.parked.remove(&page) {
            // The mark counts the page itself.
            self.hits += 1;
            self.streams.touched(page, self.region, self.pages_max)
        } else {
            self.streams.fault(page, self.region, self.pages_max)
        };
        self.count_hits(seen.hits);
        if let Some(window) = seen.window {
            self.ask_for(window);
        }
    }

    fn count_hits(&mut self, hits: u32) {
        self.hits += u64::from(hits);
        assert!(self.hits <= self.issued, "{} hits of {} pages", self.hits, self.issued);
    }

    fn ask_for(&mut self, window: Window) {
        assert!((1..=self.pages_max).contains(&window.count) && window.count <= window.reach, "{window:?}");
        let is_inside = |step| self.region.contains(window.page(step));
        assert!(is_inside(0) && is_inside(window.reach - 1), "{window:?} leaves the range");
        self.in_flight.push(window);
    }

    /// The oldest windows arrive, three at most.
    fn arrive(&mut self, input: &mut Input) {
        let count = input.below(4).min(self.in_flight.len());
        let windows: Vec<Window> = self.in_flight.drain(..count).collect();
        windows.iter().for_each(|window| self.land(window));
    }

    /// Brings in the missing pages of a window, `count` at most. The first page is parked as the marker. If
    /// the window closes its range, its last page is parked, too. All others are mapped.
    fn land(&mut self, window: &Window) {
        let missing = self.missing_steps(window);
        let brought = &missing[..missing.len().min(window.count as usize)];
        let closes = window.closes && brought.len() == missing.len();
        let marker = brought.first().copied();
        let closing = brought.last().copied().filter(|_| closes);
        let mut mapped = 0;
        for step in brought.iter().copied() {
            let page = window.page(step);
            let (is_marker, is_closing) = (marker == Some(step), closing == Some(step));
            if is_marker {
                self.streams.mark(window, page);
            }
            if is_closing {
                self.streams.close(window, page);
            }
            if is_marker || is_closing {
                self.parked.insert(page);
            } else {
                self.resident.insert(page);
                mapped += 1;
            }
        }
        self.issued += brought.len() as u64;
        // A full window ends behind its last page. Any other window has gone through its whole reach.
        let steps = match brought.last() {
            Some(last) if brought.len() == window.count as usize => last + 1,
            _ => window.reach,
        };
        let marker = marker.map(|step| window.page(step));
        let landed = Landed { marker, mapped, steps: steps.max(window.count), was_late: false };
        let hits = self.streams.landed(window, landed);
        self.count_hits(hits);
    }

    /// Returns the steps of a window at which a page is neither resident nor parked.
    fn missing_steps(&self, window: &Window) -> Vec<u32> {
        let is_missing = |step: &u32| {
            let page = window.page(*step);
            !self.resident.contains(&page) && !self.parked.contains(&page)
        };
        (0..window.reach).filter(is_missing).collect()
    }

    /// One window fails, or there is no frame for its pages.
    fn fail_one(&mut self, input: &mut Input) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = input.below(self.in_flight.len());
        self.in_flight.remove(at);
    }

    /// Up to 63 adjacent pages go out of memory.
    fn discard(&mut self, input: &mut Input) {
        let first = any_page(input, self.region);
        let gone = PageRange::of(first, input.below(64) as u64);
        let stays = |page: &PageIndex| !gone.contains(*page);
        self.resident.retain(stays);
        self.parked.retain(stays);
    }
}

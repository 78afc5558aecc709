//! The three readahead policies. Linux's packed words are compared with separate fields, and streams with a
//! simple model program.

use crate::Input;
use farpage_core::readahead::by_address::RegionWord;
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::readahead::streams::{Landed, Streams, Window};
use farpage_core::readahead::window;
use farpage_core::units::{PageIndex, PageRange};
use std::collections::BTreeSet;

/// Runs one of the three policies.
pub fn run(input: &mut Input) {
    match input.byte() % 4 {
        0 => by_address(input),
        1 => by_slot(input),
        _ => streams(input),
    }
}

/// Checks that a window stays within its region and the 2 MiB of a page-table page, and that the packed word
/// equals its fields.
fn by_address(input: &mut Input) {
    let cluster = input.below(8) as u32;
    let most = 1 << cluster.min(5);
    let region = PageRange::of(PageIndex(input.below(900) as u64), 1 + input.below(1600) as u64);
    let mut word = RegionWord::NEW;
    let (mut hits, mut window_before, mut before) = (4_u32, 0, 0_u64);
    while !input.is_over() {
        let kind = input.byte();
        let page = region.start.plus(input.below(region.count() as usize) as u64);
        if kind & 3 != 0 {
            let is_marked = kind & 4 != 0;
            word = word.found(page, is_marked);
            (hits, before) = ((hits + u32::from(is_marked)).min(63), page.0);
            continue;
        }
        let (next, found) = word.missed(page, region, cluster);
        let distance = page.0.abs_diff(before);
        let pages = if cluster == 0 { 1 } else { window::pages(hits, distance, most, window_before) };
        assert!(found.contains(page) && found.count() <= u64::from(pages) && pages <= 32);
        assert!(found.start >= region.start && found.end <= region.end, "beyond the region");
        assert_eq!(found.start.0 / 512, (found.end.0 - 1) / 512, "beyond the page-table page");
        (word, hits, window_before, before) = (next, 0, pages, page.0);
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
        let found = words.missed(offset, slots, cluster);
        assert!(found.first >= 1 && found.first <= offset && offset < found.first + found.count);
        assert!(found.first + found.count <= slots && found.count <= 32);
    }
}

/// A program with its walkers, and windows in flight.
struct World {
    streams: Streams,
    region: PageRange,
    pages_max: u32,
    /// Pages in the program's memory. `parked` has the pages that are parked with a mark.
    there: BTreeSet<PageIndex>,
    parked: BTreeSet<PageIndex>,
    asked: Vec<Window>,
    issued: u64,
    hits: u64,
}

fn streams(input: &mut Input) {
    let off = input.byte();
    let region = PageRange::of(PageIndex(input.below(300) as u64), 8 + input.below(400) as u64);
    let mut world = World {
        streams: Streams::new(),
        region,
        pages_max: 1 + input.below(40) as u32,
        there: BTreeSet::new(),
        parked: BTreeSet::new(),
        asked: Vec::new(),
        issued: 0,
        hits: 0,
    };
    let any_page = |input: &mut Input| region.start.plus(input.below(region.count() as usize) as u64);
    let mut walkers: [(PageIndex, i64); 4] =
        std::array::from_fn(|_| (any_page(input), i64::from(input.byte() % 9) - 4));
    while !input.is_over() {
        // Walking is never switched off.
        match input.kind(6, off & !3) {
            Some(0 | 1) => {
                let (page, stride) = &mut walkers[input.below(4)];
                for _ in 0..1 + input.below(16) {
                    world.touch(*page);
                    let step = (page.0 - region.start.0).wrapping_add_signed(*stride) % region.count();
                    *page = region.start.plus(step);
                }
            }
            Some(2) => world.touch(any_page(input)),
            Some(3) => (0..input.below(4)).for_each(|_| world.bring()),
            // The window fails, or there is no frame for it.
            Some(4) if !world.asked.is_empty() => {
                world.asked.remove(input.below(world.asked.len()));
            }
            Some(5) => {
                let (page, count) = (any_page(input), input.below(64) as u64);
                let is_kept = |other: &PageIndex| *other < page || other.0 >= page.0 + count;
                world.there.retain(is_kept);
                world.parked.retain(is_kept);
            }
            _ => {}
        }
    }
}

impl World {
    fn touch(&mut self, page: PageIndex) {
        if !self.there.insert(page) {
            return;
        }
        let seen = if self.parked.remove(&page) {
            self.hits += 1;
            self.streams.touched(page, self.region, self.pages_max)
        } else {
            self.streams.fault(page, self.region, self.pages_max)
        };
        self.hits += u64::from(seen.hits);
        assert!(self.hits <= self.issued, "{} hits of {} pages", self.hits, self.issued);
        if let Some(window) = seen.window {
            assert!(
                (1..=self.pages_max).contains(&window.count) && window.count <= window.reach,
                "{window:?}"
            );
            let is_inside = |step| self.region.contains(window.page(step));
            assert!(is_inside(0) && is_inside(window.reach - 1), "{window:?} leaves the range");
            self.asked.push(window);
        }
    }

    /// Brings the pages of the oldest window in that are out. The first one is parked as the marker. If the
    /// window closes its range, the last one is parked, too. The others are mapped.
    fn bring(&mut self) {
        if self.asked.is_empty() {
            return;
        }
        let window = self.asked.remove(0);
        let is_out = |world: &World, step| {
            let page = window.page(step);
            !world.there.contains(&page) && !world.parked.contains(&page)
        };
        let left: Vec<_> = (0..window.reach).filter(|step| is_out(self, *step)).collect();
        let ends = window.closes && left.len() <= window.count as usize;
        let last = left.last().copied().filter(|_| ends);
        let (mut landed, mut step, mut brought) = (Landed::default(), 0, 0);
        while step < window.reach && brought < window.count {
            let page = window.page(step);
            let (is_last, was_out) = (last == Some(step), is_out(self, step));
            step += 1;
            if !was_out {
                continue;
            }
            (brought, self.issued) = (brought + 1, self.issued + 1);
            if landed.marker.is_none() || is_last {
                self.parked.insert(page);
                if landed.marker.is_none() {
                    landed.marker = Some(page);
                    self.streams.mark(&window, page);
                }
                if is_last {
                    self.streams.close(&window, page);
                }
            } else {
                self.there.insert(page);
                landed.mapped += 1;
            }
        }
        landed.steps = step.max(window.count);
        self.hits += u64::from(self.streams.landed(&window, landed));
        assert!(self.hits <= self.issued, "{} hits of {} pages", self.hits, self.issued);
    }
}

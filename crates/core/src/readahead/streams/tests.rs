//! Streams against a naive program. The program is a set of pages in memory and walkers that touch one page
//! after the other. Windows are brought in at once, late, or not at all.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A program's memory: which pages are in memory, and which are parked with a mark.
struct World {
    streams: Streams,
    region: PageRange,
    pages_max: u32,
    there: BTreeSet<u64>,
    parked: BTreeSet<u64>,
    /// Windows that were asked for and aren't brought in yet.
    asked: Vec<Window>,
    /// The rest of windows, asked for and not brought in yet.
    rests: Vec<Window>,
    /// Whether a thread that touches a page waits for its window.
    is_slow: bool,
    issued: u64,
    hits: u64,
    faults: u64,
    /// Pages mapped ahead that no walker has touched yet.
    untouched: BTreeSet<u64>,
}

impl World {
    fn new(start: u64, pages: u64, pages_max: u32) -> World {
        World {
            streams: Streams::new(),
            region: PageRange::of(PageIndex(start), pages),
            pages_max,
            there: BTreeSet::new(),
            parked: BTreeSet::new(),
            asked: Vec::new(),
            rests: Vec::new(),
            is_slow: false,
            issued: 0,
            hits: 0,
            faults: 0,
            untouched: BTreeSet::new(),
        }
    }

    fn touch(&mut self, page: u64) {
        self.untouched.remove(&page);
        if self.there.contains(&page) {
            return;
        }
        let seen = if self.parked.remove(&page) {
            self.hits += 1;
            self.streams.touched(PageIndex(page), self.region, self.pages_max)
        } else {
            self.faults += 1;
            self.streams.fault(PageIndex(page), self.region, self.pages_max)
        };
        self.there.insert(page);
        self.heed(seen);
        if let Some(rest) = seen.rest {
            assert!(rest.count > 0 && rest.page(0) != PageIndex(page));
            self.rests.push(rest);
        }
    }

    /// A thread comes to a page that is being read, and waits for the page.
    fn join(&mut self, page: u64) {
        let seen = self.streams.joined(PageIndex(page), self.region, self.pages_max);
        assert!(seen.rest.is_none() && seen.late.is_none());
        self.heed(seen);
    }

    fn heed(&mut self, seen: Seen) {
        self.hits += u64::from(seen.hits);
        if let Some(window) = seen.window {
            assert!((1..=self.pages_max).contains(&window.count), "{window:?}");
            for step in [0, window.count - 1, window.reach - 1] {
                assert!(self.region.contains(window.page(step)), "{window:?} leaves the range");
            }
            self.asked.push(window);
        }
        assert!(self.hits <= self.issued, "{} hits of {} pages", self.hits, self.issued);
    }

    fn is_out(&self, page: PageIndex) -> bool {
        !self.there.contains(&page.0) && !self.parked.contains(&page.0)
    }

    /// Brings in the pages that windows have left out.
    fn bring_rests(&mut self) {
        for rest in std::mem::take(&mut self.rests) {
            let out: Vec<_> =
                (0..rest.count).map(|step| rest.page(step)).filter(|page| self.is_out(*page)).collect();
            for page in &out {
                assert!(self.region.contains(*page), "{rest:?} leaves the range");
                self.there.insert(page.0);
                self.untouched.insert(page.0);
            }
            self.issued += out.len() as u64;
            self.streams.caught_up(&rest, out.len() as u32);
        }
    }

    /// Brings the oldest window in.
    fn bring(&mut self) {
        self.bring_rests();
        if self.asked.is_empty() {
            return;
        }
        let window = self.asked.remove(0);
        let left: Vec<_> = (0..window.reach).filter(|step| self.is_out(window.page(*step))).collect();
        let ends = window.closes && left.len() <= window.count as usize;
        let closing = left.last().copied().filter(|_| ends);
        let mut landed = Landed { was_late: self.is_slow, ..Landed::default() };
        let (mut step, mut brought) = (0, 0);
        while step < window.reach && brought < window.count {
            let page = window.page(step).0;
            let closes = closing == Some(step);
            step += 1;
            if !self.is_out(PageIndex(page)) {
                continue;
            }
            brought += 1;
            self.issued += 1;
            if landed.marker.is_none() || closes {
                self.parked.insert(page);
                if landed.marker.is_none() {
                    landed.marker = Some(PageIndex(page));
                    self.streams.mark(&window, PageIndex(page));
                }
                if closes {
                    self.streams.close(&window, PageIndex(page));
                }
            } else {
                self.there.insert(page);
                self.untouched.insert(page);
                landed.mapped += 1;
            }
        }
        landed.steps = step.max(window.count);
        self.hits += u64::from(self.streams.landed(&window, landed));
        assert!(self.hits <= self.issued);
    }

    fn walk(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            self.touch(page);
            while !(self.asked.is_empty() && self.rests.is_empty()) {
                self.bring();
            }
        }
    }

    fn hit_percent(&self) -> f64 {
        100.0 * self.hits as f64 / self.issued as f64
    }
}

#[test]
fn walk_upward_downward_and_in_strides_is_found_and_faults_no_more() {
    for stride in [1_i64, -1, 3, -7, 64] {
        let mut world = World::new(1000, 80_000, 256);
        let start = if stride > 0 { 1000 } else { 80_999 };
        world.walk((0..1200).map(|step| (start + step * stride) as u64));
        assert!(world.faults <= 4, "stride {stride}: {} faults", world.faults);
        assert!(world.issued >= 1150, "stride {stride}: {} pages", world.issued);
    }
}

#[test]
fn whole_range_is_read_with_every_page_hit() {
    for stride in [1, -1] {
        let mut world = World::new(512, 25_000, 64);
        let pages = 512..25_512_u64;
        if stride > 0 {
            world.walk(pages)
        } else {
            world.walk(pages.rev())
        }
        assert_eq!(world.hits, world.issued);
        assert_eq!(world.issued, 25_000 - 3);
    }
}

#[test]
fn sixteen_interleaved_streams_in_one_region_are_all_kept() {
    let (streams, pages) = (16_u64, 4096_u64);
    let mut world = World::new(0, streams * pages, 256);
    world.walk((0..pages).flat_map(|page| (0..streams).map(move |stream| stream * pages + page)));
    assert!(world.faults <= streams * 3, "{} faults", world.faults);
    // Where each stream ends, the next one had begun, and was known in time.
    assert_eq!(world.hits, world.issued);
}

#[test]
fn random_faults_read_nothing_and_push_no_stream_out() {
    let mut world = World::new(0, 200_000, 256);
    let mut random = 88_172_645_463_325_252_u64;
    let mut far = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        100_000 + random % 100_000
    };
    (0..20_000).for_each(|_| world.walk([far()]));
    assert!(world.issued <= 16, "{} pages read for random faults", world.issued);
    let before = world.issued;
    world.walk((0..20_000_u64).flat_map(|page| [page, far(), far(), far()]));
    let walked = world.issued - before;
    assert!(walked >= 19_900 && world.hits * 1000 >= walked * 990, "{} of {walked}", world.hits);
}

#[test]
fn pages_that_are_there_are_passed_over() {
    let mut world = World::new(0, 10_000, 64);
    (0..10_000).filter(|page| page % 3 == 1 && *page > 10).for_each(|page| {
        world.there.insert(page);
    });
    world.walk(0..10_000);
    assert!(world.faults <= 4, "{} faults", world.faults);
    assert_eq!(world.hits, world.issued);
}

/// A walk that finds half of a region in memory used to begin anew behind it, with three faults and a window
/// of 8 pages.
#[test]
fn walk_goes_on_behind_what_is_there() {
    let mut world = World::new(0, 60_000, 256);
    world.there.extend(10_000..20_000);
    world.walk(0..60_000);
    assert!(world.faults <= 4, "{} faults", world.faults);
    assert_eq!(world.hits, world.issued);
}

/// A window once found no headroom for all of its pages. Each missing page was a fault of its own, because
/// the next window had been asked for already.
#[test]
fn what_is_missing_of_a_window_comes_at_one_fault() {
    let mut world = World::new(0, 60_000, 64);
    world.walk(0..20_000);
    let faults = world.faults;
    let unread: Vec<u64> = world.untouched.range(20_000..).copied().take(20).collect();
    assert_eq!(unread.len(), 20);
    for page in &unread {
        world.there.remove(page);
        world.untouched.remove(page);
    }
    world.walk(20_000..40_000);
    assert_eq!(world.faults - faults, 1);
}

#[test]
fn windows_of_a_walk_that_waits_for_a_device_grow_with_it() {
    let window_after = |is_slow, steps| {
        let mut world = World { is_slow, ..World::new(0, 60_000, 256) };
        world.walk(0..steps);
        world.streams.live[0].window
    };
    assert_eq!([100, 600, 2000, 10_000].map(|steps| window_after(true, steps)), [8, 32, 64, 256]);
    assert_eq!([100, 600, 2000, 10_000].map(|steps| window_after(false, steps)), [8, 8, 8, 16]);
}

/// A walk always finds its pages under way. The device once had nothing to do between the end of one window
/// and the touch of the next window's marker.
#[test]
fn a_walk_that_waits_for_a_device_has_the_next_windows_asked_for() {
    let walked = |steps: u64| {
        let mut world = World { is_slow: true, ..World::new(0, 60_000, 64) };
        let mut most = 0;
        for page in 0..steps {
            if !world.there.contains(&page) && world.asked.iter().any(|window| window.first.0 <= page) {
                world.join(page);
                most = most.max(world.asked.len());
                world.bring();
            }
            world.touch(page);
        }
        (world, most)
    };
    // A young stream asks for one window at a time, because it may end.
    assert_eq!(walked(200).1, 1);
    let (world, most) = walked(20_000);
    assert_eq!(most as i64, WINDOWS_ASKED_MAX, "with the one that it waits for");
    assert_eq!(world.faults, 3);
    // All pages that the walk went through are seen: with three markers under way, none is passed over.
    let unread = world.issued - world.hits - passed_unseen(&world);
    assert!(
        unread <= world.untouched.len() as u64 + 3,
        "{unread} pages of which {} weren't touched",
        world.untouched.len()
    );
    // At the end of the range every page is a hit.
    let (world, _) = walked(60_000);
    assert_eq!((world.hits, world.faults), (world.issued, 3));
}

/// Windows are begun by several threads. A later window may begin and land first.
#[test]
fn markers_are_kept_in_the_order_in_which_the_walk_comes_to_them() {
    let mut world = World { is_slow: true, ..World::new(0, 60_000, 64) };
    world.walk(0..10_000);
    let next = (10_000..).find(|page| world.parked.contains(page)).unwrap();
    (10_000..=next).for_each(|page| world.touch(page));
    let first = world.asked[0].first.0;
    world.join(first + 1);
    assert_eq!(world.asked.len(), 2);
    world.asked.reverse();
    world.bring();
    world.bring();
    let markers = world.streams.live[0].markers.map(|marker| marker.page);
    assert_eq!(markers, [first as i64, first as i64 + 64, NOWHERE]);
    world.walk(next..60_000);
    assert_eq!((world.hits, world.faults), (world.issued, 3));
}

#[test]
fn stream_that_ends_counts_only_what_it_passed() {
    let mut world = World::new(0, 100_000, 64);
    world.walk(0..30_000);
    assert_eq!(
        world.issued - world.hits,
        world.asked.len() as u64 + world.untouched.len() as u64 + 1 + passed_unseen(&world)
    );
    assert!(world.hit_percent() > 99.0);
}

/// redis reads keys whose values lie 40 apart: three neighbours now and then, and jumps of some ten pages in
/// one direction. When the jumps count as one stream that goes on, most pages of its windows are read in
/// vain.
#[test]
fn walks_that_jump_end_and_where_most_do_it_takes_more_to_begin_one() {
    let mut world = World::new(0, 4_000_000, 256);
    let burst = |at: u64| [0, 1, 2, 14, 27, 40, 51, 63, 77].map(|step| at * 10_000 + step);
    (0..300).for_each(|at| world.walk(burst(at)));
    assert!(world.issued <= 800, "{} pages", world.issued);
    let (faults, issued) = (world.faults, world.issued);
    world.walk(3_100_000..3_102_000);
    assert!(world.faults - faults <= 6, "a long walk begins all the same");
    // Long walks restore the credit, and the next one begins as soon as the first did.
    (0..40).for_each(|at| world.walk((0..100).map(|page| 3_200_000 + at * 10_000 + page)));
    assert!(world.issued - issued > 3_600);
    let faults = world.faults;
    world.walk(3_900_000..3_900_100);
    assert_eq!(world.faults - faults, 3);
}

/// 16 interleaved walks have four remembered faults each, too few to begin without credit.
#[test]
fn many_walks_in_turns_begin_after_others_have_used_the_credit_up() {
    let mut world = World::new(0, 4_000_000, 256);
    (0..300).for_each(|at| world.walk([0, 1, 2, 14, 27, 40, 51, 63, 77].map(|step| at * 10_000 + step)));
    let (faults, pages) = (world.faults, 4096_u64);
    world.walk((0..pages).flat_map(|page| (0..16).map(move |walk| 3_100_000 + walk * pages + page)));
    let faults = world.faults - faults;
    assert!(faults < 6_000, "{faults} faults for {} pages", 16 * pages);
}

/// Returns the number of pages that were touched behind the last marker, which no stream has been seen
/// behind.
fn passed_unseen(world: &World) -> u64 {
    world.streams.live.iter().map(|stream| u64::from(stream.mapped())).sum::<u64>()
        - world.untouched.len() as u64
}

#[test]
fn what_a_walk_has_gone_through_is_shown_once_and_not_what_is_close_behind_it() {
    for stride in [1_i64, -1, 3] {
        let mut world = World::new(0, 4_000, 32);
        let page = |step: i64| (2_000 + step * stride) as u64;
        let steps = |passed: Passed| {
            let steps: Vec<i64> = passed.pages().map(|page| (page.0 as i64 - 2_000) / stride).collect();
            assert_eq!(steps.len(), passed.count as usize);
            steps
        };
        world.walk((0..100).map(page));
        let at = (world.streams.live[0].at - 2_000) / stride;
        assert!(at > 60, "the last marker lies there");
        let mut shown = steps(world.streams.take_passed(20, 16).unwrap());
        shown.sort_unstable();
        // The latest pages that `take_passed` may return: 16 are kept, and 20 are wanted.
        assert_eq!(shown, (at - 36..at - 16).collect::<Vec<_>>(), "in steps of {stride}");
        assert!(world.streams.take_passed(20, 16).is_none(), "the rest is close behind");
        world.walk((100..400).map(page));
        let mut all = shown;
        while let Some(passed) = world.streams.take_passed(64, 16) {
            all.extend(steps(passed));
        }
        let at = (world.streams.live[0].at - 2_000) / stride;
        assert!(all.iter().all(|step| *step < at - 16));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "one of them was shown twice");
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Step(usize),
    Random(u64),
    Join(u64),
    Bring,
    Forget(u64),
    Evict(u64),
    Take(u32, u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0_usize..5).prop_map(Event::Step),
        2 => (0_u64..400).prop_map(Event::Random),
        2 => any::<u64>().prop_map(Event::Join),
        4 => Just(Event::Bring),
        1 => any::<u64>().prop_map(Event::Forget),
        2 => (0_u64..400).prop_map(Event::Evict),
        1 => (1_u32..65, 0_u64..40).prop_map(|(wanted, kept)| Event::Take(wanted, kept)),
    ]
}

proptest! {
    /// Invariants 11 and 13: windows stay in their range and below the maximum, and hits never exceed pages
    /// issued. Windows come late, or never, and pages are evicted under the walkers.
    #[test]
    fn windows_stay_in_their_range_and_hits_below_pages_issued(
        events in prop::collection::vec(event(), 1..600),
        start in 0_u64..300, pages in 8_u64..400, pages_max in 1_u32..40,
        walkers in prop::collection::vec((0_u64..400, -3_i64..4), 5),
    ) {
        let mut world = World::new(start, pages, pages_max);
        let mut walkers = walkers;
        for event in events {
            match event {
                Event::Step(at) => {
                    let (page, stride) = &mut walkers[at];
                    world.touch(start + *page % pages);
                    *page = page.wrapping_add_signed(*stride) % pages;
                }
                Event::Random(page) => world.touch(start + page % pages),
                Event::Join(at) if !world.asked.is_empty() => {
                    let window = world.asked[at as usize % world.asked.len()];
                    world.join(window.page((at >> 32) as u32 % window.count).0);
                }
                Event::Join(_) => {}
                Event::Bring => world.bring(),
                Event::Forget(at) if !world.asked.is_empty() => {
                    let at = at as usize % world.asked.len();
                    world.asked.remove(at);
                }
                Event::Forget(_) => {}
                Event::Evict(page) => {
                    let page = start + page % pages;
                    world.there.remove(&page);
                    world.parked.remove(&page);
                }
                Event::Take(wanted, kept) => {
                    let Some(passed) = world.streams.take_passed(wanted, kept) else { continue };
                    prop_assert!((wanted.min(PASSED_MIN)..=wanted).contains(&passed.count));
                    for page in passed.pages() {
                        prop_assert!(world.region.contains(page), "{page:?} was passed by nobody");
                    }
                }
            }
        }
    }
}

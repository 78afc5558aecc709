//! Threads that touch pages. Each thread has an order of its own, and compares every byte of every page that
//! it touches.
//!
//! A *touch* is the first access to a page, and is timed. Then the page is compared, as a program works with
//! what it has read. The comparison isn't timed, but the throughput's time includes it.

use super::latency::{DEVICE_NS, Latencies};
use super::region::Region;
use super::touch::Zipf;
use crate::measure::Random;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pages `first..first + pages` of a region, which belong to one thread, and their contents.
pub struct Stretch<'r> {
    region: &'r Region,
    first: usize,
    /// Number of times that each page was written.
    versions: Vec<u8>,
    seed: u64,
}

impl<'r> Stretch<'r> {
    /// Makes a stretch of these pages. The region is filled with this seed.
    pub fn new(region: &'r Region, pages: std::ops::Range<usize>, seed: u64) -> Stretch<'r> {
        Stretch { region, first: pages.start, versions: vec![0; pages.len()], seed }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.versions.len()
    }

    /// Writes one of `parts` equal parts of the stretch.
    pub fn fill(&self, part: usize, parts: usize) {
        let end = |part: usize| self.first + self.pages() * part / parts;
        self.region.fill_pages(end(part)..end(part + 1), self.seed);
    }

    fn seed_of(&self, version: u8) -> u64 {
        self.seed ^ u64::from(version) << 56
    }

    /// Reads a page. Returns the time of the first access.
    fn read(&self, page: usize) -> Result<Duration, String> {
        let (at, seed) = (self.first + page, self.seed_of(self.versions[page]));
        let began = Instant::now();
        std::hint::black_box(self.region.read(at, 0));
        let took = began.elapsed();
        self.region.check(at, seed).map(|()| took)
    }

    /// Writes a page. Returns the time of the first access. The old contents are compared first, except the
    /// word that is written.
    fn write(&mut self, page: usize) -> Result<Duration, String> {
        let (at, old) = (self.first + page, self.seed_of(self.versions[page]));
        self.versions[page] = self.versions[page].wrapping_add(1);
        let new = self.seed_of(self.versions[page]);
        let word = self.region.first_word(at, new);
        let began = Instant::now();
        self.region.write(at, 0, word);
        let took = began.elapsed();
        self.region.check_from(1, at, old)?;
        self.region.put(at, new);
        Ok(took)
    }
}

/// An endless order in which pages are touched.
pub enum Order {
    /// Every `stride`th page, from the first page on, or backward from the last one. Each pass begins a page
    /// further, so `stride` passes touch every page once.
    Strided {
        /// Pages from one touch to the next. 1 touches every page.
        stride: usize,
        /// Walks from the end.
        backward: bool,
    },
    /// Several streams, each walking a part of its own in order, a page at a time in turns.
    Interleaved {
        /// Number of streams.
        streams: usize,
    },
    /// Any page.
    Random(Random),
    /// A few pages most of the time.
    Zipf(Zipf),
}

impl Order {
    /// Returns the page of the `n`th touch among `pages`.
    pub fn page(&mut self, n: usize, pages: usize) -> usize {
        match self {
            Order::Strided { stride, backward } => {
                let page = strided(n, *stride, pages);
                if *backward { pages - 1 - page } else { page }
            }
            Order::Interleaved { streams } => {
                let part = pages / *streams;
                n % *streams * part + n / *streams % part
            }
            Order::Random(random) => random.below(pages as u64) as usize,
            Order::Zipf(zipf) => zipf.draw(),
        }
    }
}

/// Returns the page of touch `n`. Passes 0, 1, ... begin at page 0, 1, ... All passes together are one round
/// over every page.
fn strided(n: usize, stride: usize, pages: usize) -> usize {
    let n = n % pages;
    // The first `longer` passes have one page more than the later ones.
    let (short, longer) = (pages / stride, pages % stride);
    let in_longer = longer * (short + 1);
    if n < in_longer {
        n / (short + 1) + n % (short + 1) * stride
    } else {
        let n = n - in_longer;
        longer + n / short + n % short * stride
    }
}

/// The work of one thread.
pub struct Walker<'r> {
    /// Name of the part of the result in which the walker is counted.
    pub part: &'static str,
    /// The walker's pages.
    pub stretch: Stretch<'r>,
    /// The order in which the walker touches its pages.
    pub order: Order,
    /// Percent of touches that write.
    pub write_percent: u64,
}

/// The work done by one thread, or by several threads of a part.
#[derive(Clone, Default)]
pub struct Walked {
    latencies: Latencies,
    /// Pages that were not in memory a while before their touch. Counted only for forward walks over every
    /// page.
    out: u64,
    /// Pages of `out` whose touch met no fault, or a fault too short for a device.
    out_short: u64,
    threads: u64,
    seconds: f64,
}

impl Walked {
    fn add(&mut self, other: &Walked) {
        self.latencies.add(&other.latencies);
        self.out += other.out;
        self.out_short += other.out_short;
        self.threads += other.threads;
        self.seconds = self.seconds.max(other.seconds);
    }

    /// Returns the results as JSON.
    pub fn json(&self) -> Value {
        let mut json = self.latencies.json();
        json["threads"] = json!(self.threads);
        json["seconds"] = json!(self.seconds);
        json["pages_per_second"] = json!(json["touches"].as_f64().unwrap_or(0.0) / self.seconds);
        json["out"] = json!(self.out);
        json["out_short"] = json!(self.out_short);
        json
    }
}

/// Length of the warm-up, as a part of the counted time. After the warm-up the pages in memory are those that
/// the walkers' touches left there, not those that were filled last.
const WARM_UP: f64 = 0.25;

/// Starts all walkers together, lets them warm up, and then lets them walk for `seconds`. Walkers of one part
/// are counted together.
pub fn walk(walkers: Vec<Walker<'_>>, seconds: f64) -> Result<Vec<(&'static str, Walked)>, String> {
    let start = Barrier::new(walkers.len());
    let failed = AtomicBool::new(false);
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = walkers
            .into_iter()
            .map(|walker| {
                let (start, failed) = (&start, &failed);
                scope.spawn(move || (walker.part, one(walker, seconds, start, failed)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a walking thread panicked")).collect()
    });
    let mut parts: Vec<(&'static str, Walked)> = Vec::new();
    for (name, walked) in results {
        let walked = walked?;
        match parts.iter_mut().find(|(part, _)| *part == name) {
            Some((_, sum)) => sum.add(&walked),
            None => parts.push((name, walked)),
        }
    }
    Ok(parts)
}

fn one(mut walker: Walker<'_>, seconds: f64, start: &Barrier, failed: &AtomicBool) -> Result<Walked, String> {
    let pages = walker.stretch.pages();
    let mut walked = Walked { threads: 1, ..Walked::default() };
    let mut presence = Presence::new(&walker);
    let mut random = Random::new(walker.stretch.seed + walker.stretch.first as u64);
    let length = Duration::from_secs_f64(seconds);
    start.wait();
    let mut began = Instant::now();
    let mut is_warm = false;
    for n in 0.. {
        let was_out = presence.as_mut().is_some_and(|presence| presence.was_out(n));
        let page = walker.order.page(n, pages);
        let touched = if random.below(100) < walker.write_percent {
            walker.stretch.write(page)
        } else {
            walker.stretch.read(page)
        };
        // Ordering: Relaxed; the flag only ends the other threads soon. The error travels by `join`.
        let took = touched.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        walked.latencies.record(took.as_nanos() as u64);
        walked.out += u64::from(was_out);
        walked.out_short += u64::from(was_out && took.as_nanos() < u128::from(DEVICE_NS));
        let elapsed = began.elapsed();
        if !is_warm && elapsed >= length.mul_f64(WARM_UP) {
            (is_warm, began) = (true, Instant::now());
            walked = Walked { threads: 1, ..Walked::default() };
        } else if elapsed >= length || failed.load(Ordering::Relaxed) {
            break;
        }
    }
    walked.seconds = began.elapsed().as_secs_f64();
    Ok(walked)
}

/// Knows from /proc/self/pagemap which pages were in memory a while before a walk comes to them. No policy
/// reads that far ahead. Works for walks over every page in order.
struct Presence {
    pagemap: File,
    first_page_number: u64,
    pages: usize,
    /// Whether the page of touch `n` was present, at `n % LOOK_AHEAD`.
    was_present: Vec<bool>,
}

/// Pages between a look at pagemap and the touch.
const LOOK_AHEAD: usize = 2048;
/// Pages of one look.
const LOOK: usize = 256;
/// The bit of a present page in its pagemap word.
const PRESENT: u64 = 1 << 63;

impl Presence {
    fn new(walker: &Walker<'_>) -> Option<Presence> {
        let stretch = &walker.stretch;
        let in_order = matches!(walker.order, Order::Strided { stride: 1, backward: false });
        if !in_order || stretch.pages() < 2 * LOOK_AHEAD {
            return None;
        }
        Some(Presence {
            pagemap: File::open("/proc/self/pagemap").ok()?,
            first_page_number: stretch.region.page_number(stretch.first),
            pages: stretch.pages(),
            was_present: vec![true; LOOK_AHEAD],
        })
    }

    /// Returns whether the page of the `n`th touch was out. Must be called once for each touch, in order.
    fn was_out(&mut self, n: usize) -> bool {
        let was_out = !self.was_present[n % LOOK_AHEAD];
        if n.is_multiple_of(LOOK) {
            self.look(n + LOOK_AHEAD - LOOK);
        }
        was_out
    }

    fn look(&mut self, n: usize) {
        let mut words = [0; LOOK * 8];
        let from = n % self.pages;
        let count = LOOK.min(self.pages - from);
        let bytes = &mut words[..count * 8];
        let read = self.pagemap.read_exact_at(bytes, (self.first_page_number + from as u64) * 8);
        for at in 0..LOOK {
            let word = words[at * 8..][..8].try_into().map(u64::from_le_bytes).unwrap_or(0);
            // A page beyond the end of a pass counts as present, and so does a page that can't be read. Both
            // kinds are left out of `out`.
            let is_present = at >= count || read.is_err() || word & PRESENT != 0;
            self.was_present[(n + at) % LOOK_AHEAD] = is_present;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::region::{Content, PAGE_BYTES};

    fn pages_of(mut order: Order, touches: usize, pages: usize) -> Vec<usize> {
        (0..touches).map(|n| order.page(n, pages)).collect()
    }

    #[test]
    fn strided_passes_together_touch_every_page_once() {
        let strided = |stride, backward| Order::Strided { stride, backward };
        assert_eq!(pages_of(strided(3, false), 10, 8), [0, 3, 6, 1, 4, 7, 2, 5, 0, 3]);
        assert_eq!(pages_of(strided(1, true), 5, 4), [3, 2, 1, 0, 3]);
        for (stride, pages) in [(1, 10), (3, 9), (3, 10), (7, 40), (7, 48)] {
            let mut all = pages_of(strided(stride, false), pages, pages);
            assert!(all.windows(2).filter(|pair| pair[1] != pair[0] + stride).count() < stride);
            all.sort_unstable();
            assert_eq!(all, (0..pages).collect::<Vec<_>>(), "{stride} {pages}");
        }
    }

    #[test]
    fn interleaved_streams_take_turns_each_in_its_own_part() {
        let order = Order::Interleaved { streams: 3 };
        assert_eq!(pages_of(order, 8, 6), [0, 2, 4, 1, 3, 5, 0, 2]);
    }

    #[test]
    fn walked_pages_are_compared_and_a_wrong_byte_ends_it() {
        let region = Region::of(64 * PAGE_BYTES as u64, Content::Noise).unwrap();
        region.fill(3);
        let walker = |order, write_percent| Walker {
            part: "all",
            stretch: Stretch::new(&region, 0..64, 3),
            order,
            write_percent,
        };
        let walked = walk(vec![walker(Order::Random(Random::new(1)), 50)], 0.01).unwrap();
        let json = walked[0].1.json();
        assert!(
            json["touches"].as_u64() > Some(0) && json["pages_per_second"].as_f64() > Some(0.0),
            "{json}"
        );
        region.fill(3);
        region.write(9, 511, 0);
        let wrong = walk(vec![walker(Order::Interleaved { streams: 16 }, 0)], 1.0).map(|_| ());
        assert!(wrong.unwrap_err().starts_with("page 9, word 511:"));
    }

    #[test]
    fn pages_that_were_taken_away_are_known_to_have_been_out() {
        let pages = 3 * LOOK_AHEAD;
        let region = Region::of((pages * PAGE_BYTES) as u64, Content::Heap).unwrap();
        // Only the second half is present.
        (pages / 2..pages).for_each(|page| region.put(page, 0));
        let walker = Walker {
            part: "all",
            stretch: Stretch::new(&region, 0..pages, 0),
            order: Order::Strided { stride: 1, backward: false },
            write_percent: 0,
        };
        let mut presence = Presence::new(&walker).unwrap();
        let out: Vec<bool> = (0..2 * pages).map(|n| presence.was_out(n)).collect();
        // Nothing is known of the first touches.
        assert!(out[..LOOK_AHEAD - LOOK].iter().all(|out| !out));
        let second = &out[pages + LOOK..];
        assert!(second[..pages / 2 - LOOK].iter().all(|out| *out));
        assert!(second[pages / 2..].iter().all(|out| !out));
    }
}

//! The load by which swaps are compared: pages of real programs (`--contents`, or collected), touched in one
//! of several orders.
//!
//! A *touch* reads one word of a page and compares it; some touches write the word, too. The page determines
//! the word. Each touch is timed. At the end every byte of every page is compared.
//!
//! Touches per second are those of the slowest thread, times the number of threads, because a program is done
//! when all of its threads are. A plain sum would mislead: half of the threads may keep all of their pages in
//! memory, while the other half waits. The sum then is that of a program with half of the pages.

use super::Settings;
use super::latency::Latencies;
use super::region::{PAGE_BYTES, Region};
use super::walk::Order;
use crate::kernel::contents::Bank;
use crate::measure::{Random, on_threads};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WORDS: usize = PAGE_BYTES / 8;
/// Streams of `streams`.
const STREAMS: usize = 16;
/// Pages of real programs that the load works with.
pub const BANK_PAGES: usize = 2560;
/// Pages from one touch to the next of `strided`.
const STRIDE: usize = 7;
/// Length of the warm-up, as a part of the counted time. After the warm-up the pages in memory are those that
/// the touches left there.
const WARM_UP: f64 = 0.25;
/// Touches between two looks at the clock.
const STRETCH: u32 = 32;

/// The orders, as `--pattern` names them.
pub const PATTERNS: [&str; 6] = ["random", "zipf", "sequential", "streams", "strided", "mixed"];

/// The pages of one thread, from `first` on.
struct Part<'r> {
    region: &'r Region,
    bank: Bank,
    seed: u64,
    first: usize,
    /// Number of times that each page was written.
    versions: Vec<u8>,
}

impl Part<'_> {
    fn page_bytes(&self, page: usize) -> &'static [u64] {
        self.bank.page((self.first + page) as u64)
    }

    /// Returns the index of the touched word of a page, and the word's value.
    fn word(&self, page: usize, version: u8) -> (usize, u64) {
        let mixed = Random::new(self.seed ^ (self.first + page) as u64).next();
        let at = mixed as usize % WORDS;
        match version {
            0 => (at, self.page_bytes(page)[at]),
            // A small change, as programs make them.
            _ => (at, self.page_bytes(page)[at] ^ u64::from(version)),
        }
    }

    fn fill(&self) {
        for page in 0..self.versions.len() {
            let words = self.page_bytes(page).iter().enumerate();
            words.for_each(|(at, word)| self.region.write(self.first + page, at, *word));
        }
    }

    /// Touches a page, and returns the time that the touch took.
    fn touch(&mut self, page: usize, writes: bool) -> Result<Duration, String> {
        let (at, wanted) = self.word(page, self.versions[page]);
        let next = self.versions[page].wrapping_add(1);
        let (_, written) = self.word(page, next);
        let began = Instant::now();
        let found = self.region.read(self.first + page, at);
        if writes {
            self.region.write(self.first + page, at, written);
            self.versions[page] = next;
        }
        let took = began.elapsed();
        if found == wanted { Ok(took) } else { Err(self.wrong(page, at, found, wanted)) }
    }

    fn verify(&self) -> Result<(), String> {
        for page in 0..self.versions.len() {
            let (own, value) = self.word(page, self.versions[page]);
            for (at, word) in self.page_bytes(page).iter().enumerate() {
                let (found, wanted) =
                    (self.region.read(self.first + page, at), if at == own { value } else { *word });
                if found != wanted {
                    return Err(self.wrong(page, at, found, wanted));
                }
            }
        }
        Ok(())
    }

    fn wrong(&self, page: usize, at: usize, found: u64, wanted: u64) -> String {
        format!("page {}, word {at}: {found:#x} instead of {wanted:#x}", self.first + page)
    }
}

/// Returns the name of a thread's part in the result, and the order in which the thread touches its pages.
fn order_of(pattern: &str, thread: usize, pages: usize, seed: u64) -> (&'static str, Order) {
    let random = || Random::new(seed ^ (thread as u64 + 1) << 32);
    let forward = |stride| Order::Strided { stride, backward: false };
    match pattern {
        "zipf" => ("zipf", Order::Zipf(Zipf::new(pages, random()))),
        "sequential" => ("sequential", forward(1)),
        "streams" => ("streams", Order::Interleaved { streams: STREAMS }),
        "strided" => ("strided", forward(STRIDE)),
        // Half of the threads walk in order, half touch random pages.
        "mixed" if thread.is_multiple_of(2) => ("sequential", forward(1)),
        _ => ("random", Order::Random(random())),
    }
}

/// Runs the load.
pub fn touch(settings: &Settings) -> Result<Value, String> {
    let pattern = settings.pattern.as_deref().unwrap_or(PATTERNS[0]);
    let bank = match settings.contents.as_deref() {
        Some(path) => Bank::open(Path::new(path))?,
        None => Bank::collected(BANK_PAGES)?,
    };
    let region = Region::new(settings.bytes)?;
    let threads = settings.threads.max(1);
    let each = region.pages() / threads;
    if each < STREAMS {
        return Err(format!("{} bytes are too few for {threads} threads", settings.bytes));
    }
    let part = |thread| {
        let versions = vec![0; each];
        Mutex::new(Part { region: &region, bank, seed: settings.seed, first: thread * each, versions })
    };
    let parts: Vec<Mutex<Part<'_>>> = (0..threads).map(part).collect();
    let of = |thread: usize| parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
    let filled = on_threads(threads, |thread| of(thread).fill());
    let walked: Vec<Mutex<Option<Walked>>> = (0..threads).map(|_| Mutex::new(None)).collect();
    on_threads(threads, |thread| {
        let (name, order) = order_of(pattern, thread, each, settings.seed);
        let found =
            walk(&mut of(thread), order, settings).map(|(latencies, seconds)| (name, latencies, seconds));
        *walked[thread].lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
    });
    let mut sums: Vec<(&str, Latencies, Vec<f64>)> = Vec::new();
    for found in walked {
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (name, latencies, seconds) = found.expect("each thread has walked")?;
        let rate = latencies.count() as f64 / seconds;
        match sums.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, sum, rates)) => {
                sum.add(&latencies);
                rates.push(rate);
            }
            None => sums.push((name, latencies, vec![rate])),
        }
    }
    (0..threads).try_for_each(|thread| of(thread).verify())?;
    let parts: Map<String, Value> = sums
        .iter()
        .map(|(name, latencies, rates)| {
            let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
            let mut json = latencies.json();
            json["touches_per_second"] = json!(slowest * rates.len() as f64);
            json["together_per_second"] = json!(rates.iter().sum::<f64>());
            ((*name).to_owned(), json)
        })
        .collect();
    let pages = each * threads;
    let fill_rate = pages as f64 / filled.as_secs_f64();
    Ok(json!({ "pid": std::process::id(), "pages": pages, "filled_per_second": fill_rate, "parts": parts }))
}

type Walked = Result<(&'static str, Latencies, f64), String>;

fn walk(part: &mut Part<'_>, mut order: Order, settings: &Settings) -> Result<(Latencies, f64), String> {
    let pages = part.versions.len();
    let mut random = Random::new(settings.seed + part.first as u64);
    let length = Duration::from_secs_f64(settings.seconds);
    let (mut latencies, mut is_warm, mut began) = (Latencies::default(), false, Instant::now());
    let mut n = 0;
    loop {
        for _ in 0..STRETCH {
            let page = order.page(n, pages);
            let took = part.touch(page, random.below(100) < settings.write_percent)?;
            latencies.record(took.as_nanos() as u64);
            n += 1;
        }
        let elapsed = began.elapsed();
        if !is_warm && elapsed >= length.mul_f64(WARM_UP) {
            (latencies, is_warm, began) = (Latencies::default(), true, Instant::now());
        } else if is_warm && elapsed >= length {
            return Ok((latencies, elapsed.as_secs_f64()));
        }
    }
}

/// A sequence of numbers below `count`. The nth most frequent number is drawn 1/n^0.99 as often as the first,
/// and the frequent numbers are spread over the range. (Gray et al., "Quickly generating billion-record
/// synthetic databases", 1994.)
pub struct Zipf {
    random: Random,
    count: f64,
    zeta: f64,
    eta: f64,
    spread: usize,
}

const THETA: f64 = 0.99;

impl Zipf {
    fn new(count: usize, random: Random) -> Zipf {
        let zeta = |n: usize| (1..=n).map(|n| (n as f64).powf(-THETA)).sum::<f64>();
        let (all, two) = (zeta(count), zeta(2));
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - two / all);
        Zipf { random, count: count as f64, zeta: all, eta, spread: spread(count) }
    }

    /// Draws the next number.
    pub fn draw(&mut self) -> usize {
        let share = self.random.below(1 << 32) as f64 / (1_u64 << 32) as f64;
        let scaled = share * self.zeta;
        let rank = if scaled < 1.0 {
            0
        } else if scaled < 1.0 + 0.5_f64.powf(THETA) {
            1
        } else {
            (self.count * (self.eta * share - self.eta + 1.0).powf(1.0 / (1.0 - THETA))) as usize
        };
        let count = self.count as usize;
        rank.min(count - 1) * self.spread % count
    }
}

/// Returns the factor that maps a rank to its place among `count`, so that neighbours in rank aren't
/// neighbours in memory. Factor and `count` have no common divisor, so each place belongs to one rank.
pub fn spread(count: usize) -> usize {
    (count * 5 / 8..).find(|step| divisor(*step, count) == 1).unwrap_or(1)
}

fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pattern: &str) -> (Settings, std::path::PathBuf) {
        let path = std::env::temp_dir().join(format!("farpage-touch-{}-{pattern}", std::process::id()));
        let words = (0..8 * WORDS as u64).flat_map(|word| Random::new(word).next().to_ne_bytes());
        std::fs::write(&path, words.collect::<Vec<u8>>()).unwrap();
        let settings = Settings {
            bytes: 256 * PAGE_BYTES as u64,
            threads: 2,
            seconds: 0.02,
            write_percent: 50,
            pattern: Some(pattern.to_owned()),
            contents: Some(path.to_str().unwrap().to_owned()),
            ..Settings::default()
        };
        (settings, path)
    }

    #[test]
    fn every_pattern_touches_and_verifies() {
        for pattern in PATTERNS {
            let (settings, path) = settings(pattern);
            let found = touch(&settings).unwrap();
            std::fs::remove_file(path).unwrap();
            let parts = found["parts"].as_object().unwrap();
            assert_eq!(parts.len(), if pattern == "mixed" { 2 } else { 1 }, "{pattern}");
            assert!(parts.values().all(|part| part["touches"].as_u64() >= Some(32)), "{found}");
            assert_eq!(found["pages"], 256);
        }
    }

    #[test]
    fn a_wrong_byte_is_found_by_a_touch_and_at_the_end() {
        let (settings, path) = settings("wrong");
        let bank = Bank::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let region = Region::new(settings.bytes).unwrap();
        let mut part = Part { region: &region, bank, seed: 3, first: 128, versions: vec![0; 128] };
        part.fill();
        for _ in 0..300 {
            part.touch(5, true).unwrap();
        }
        part.verify().unwrap();
        let (at, value) = part.word(5, part.versions[5]);
        region.write(128 + 5, at, !value);
        assert!(part.touch(5, false).unwrap_err().starts_with("page 133, word"));
        region.write(128 + 5, at, value);
        region.write(128 + 6, (part.word(6, 0).0 + 1) % WORDS, 1);
        assert!(part.touch(6, false).is_ok());
        assert!(part.verify().unwrap_err().starts_with("page 134, word"));
    }

    #[test]
    fn zipf_asks_for_few_places_most_of_the_time_and_for_all_some_time() {
        let mut zipf = Zipf::new(1000, Random::new(3));
        let mut counts = vec![0_u32; 1000];
        (0..200_000).for_each(|_| counts[zipf.draw()] += 1);
        assert!(counts.iter().filter(|count| **count > 0).count() > 990);
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        // H(1000, 0.99) is 7.73.
        assert!((0.12..0.14).contains(&(f64::from(counts[0]) / 200_000.0)), "{}", counts[0]);
        let hundred: u32 = counts[..100].iter().sum();
        assert!((0.65..0.72).contains(&(f64::from(hundred) / 200_000.0)), "{hundred}");
    }
}

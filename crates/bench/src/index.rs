//! zswap's index: the object that holds the bytes of a slot. Linux first had a red-black tree under one lock.
//! A B-tree was proposed, and radix trees followed. The other contestants are a hash table and ours.
//!
//! Keys are drawn at random from twice as many keys as have an entry. Half of the loads and invalidations
//! hit, and half of the stores replace, so the number of entries stays the same. A handle contains the key
//! that it was made for, so each returned handle is checked.

// UNSAFETY: the index never allocates, so the benchmark hands it raw memory.

use crate::Effort;
use crate::measure::{Random, Sample, interleaved, on_threads, ratio, weighed};
use crate::report::{Cell, Chart, Report, Table, Target};
use crate::rivals::index_buckets::Buckets;
use crate::rivals::index_radix::Radix;
use crate::rivals::index_trees::{BTree, RedBlack};
use farpage_core::memory::Region;
use farpage_core::units::{AreaId, CLUSTER_SLOTS, SlotIndex};
use farpage_core::zswap::index::{Index, IndexLayout, IndexMemory};
use farpage_core::zswap::pool::ObjectHandle;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A contestant for the index. Keys are slots of one area. Handles aren't 0.
pub trait Contestant: Sync {
    /// Enters a handle, and returns the handle that it replaces.
    fn store(&self, key: u32, handle: u32) -> Option<u32>;
    /// Returns the key's handle.
    fn load(&self, key: u32) -> Option<u32>;
    /// Removes the key, and returns its handle.
    fn remove(&self, key: u32) -> Option<u32>;
}

/// Farpage's index for one area.
struct Ours {
    index: Index<'static>,
    // The memory is the last field, because the index lies in it.
    _memory: Vec<u64>,
}

impl Ours {
    fn new(keys: u32) -> Ours {
        let layout = IndexLayout::new(&[keys], keys.div_ceil(CLUSTER_SLOTS) as usize);
        let mut memory = vec![0_u64; layout.bytes().div_ceil(8)];
        // SAFETY: the memory is zeroed and has at least this size. The vector's heap block doesn't move,
        // lives as long as the index, and is used by no other code.
        let mut region = unsafe { Region::new(memory.as_mut_ptr().cast(), layout.bytes()) };
        Ours { index: Index::new(&layout, IndexMemory::carve(&mut region, &layout)), _memory: memory }
    }
}

impl Contestant for Ours {
    fn store(&self, key: u32, handle: u32) -> Option<u32> {
        let handle = ObjectHandle::from_raw(handle).expect("no handle is 0");
        let old = self.index.store(SlotIndex::new(AreaId(0), key), handle).expect("a leaf for each cluster");
        old.map(ObjectHandle::raw)
    }

    fn load(&self, key: u32) -> Option<u32> {
        self.index.load(SlotIndex::new(AreaId(0), key)).map(|entry| entry.handle().raw())
    }

    fn remove(&self, key: u32) -> Option<u32> {
        self.index.remove(SlotIndex::new(AreaId(0), key)).map(ObjectHandle::raw)
    }
}

/// The contestants, in the order of the tables. The first is the baseline; the last is ours.
const NAMES: [&str; 5] =
    ["red-black tree, one lock", "B-tree, one lock", "radix trees of 64 MiB", "hash buckets", "ours"];
const RED_BLACK: usize = 0;
const B_TREE: usize = 1;
const OURS: usize = 4;

fn make(who: usize, entries: u32) -> Box<dyn Contestant> {
    let keys = entries * 2;
    match who {
        RED_BLACK => Box::<RedBlack>::default(),
        B_TREE => Box::<BTree>::default(),
        2 => Box::new(Radix::new(keys)),
        3 => Box::new(Buckets::new(entries as usize)),
        _ => Box::new(Ours::new(keys)),
    }
}

const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Entries of the size that the targets are about.
const TARGET_ENTRIES: u32 = 1_000_000;
/// Bits of a handle that contain the key that the handle was made for.
const KEY_BITS: u32 = 25;
/// Operations for each one that is timed by itself.
const SAMPLED: usize = 64;

fn handle_for(key: u32, random: u64) -> u32 {
    (random as u32) << KEY_BITS | (key + 1)
}

fn verify(key: u32, handle: u32) {
    assert_eq!(handle & ((1 << KEY_BITS) - 1), key + 1, "a handle came out for another key");
}

/// The result of one run of all threads.
struct Done {
    ops_per_second: f64,
    /// Latencies of the operations that were timed.
    latencies_ns: Vec<u32>,
}

/// Does one operation. Half are loads, a quarter stores, a quarter invalidations.
#[inline]
fn operate(index: &dyn Contestant, keys: u32, random: &mut Random) {
    let key = random.below(u64::from(keys)) as u32;
    let draw = random.next() >> 32;
    let out = match draw & 3 {
        0 | 1 => index.load(key),
        2 => index.store(key, handle_for(key, draw >> 2)),
        _ => index.remove(key),
    };
    if let Some(handle) = out {
        verify(key, handle);
    }
}

fn run_once(index: &dyn Contestant, entries: u32, threads: usize, seed: u64, time: Duration) -> Done {
    let ops = AtomicU64::new(0);
    let all_latencies = Mutex::new(Vec::new());
    let took = on_threads(threads, |thread| {
        let mut random = Random::new(seed * 64 + thread as u64);
        let mut latencies = Vec::with_capacity(1 << 16);
        let (mut count, end) = (0, Instant::now() + time);
        while Instant::now() < end {
            for _ in 0..4 {
                let began = Instant::now();
                operate(index, entries * 2, &mut random);
                latencies.push(began.elapsed().as_nanos() as u32);
                (1..SAMPLED).for_each(|_| operate(index, entries * 2, &mut random));
            }
            count += 4 * SAMPLED as u64;
        }
        ops.fetch_add(count, Ordering::Relaxed);
        all_latencies.lock().expect("no thread panics").append(&mut latencies);
    });
    Done {
        ops_per_second: ops.into_inner() as f64 / took.as_secs_f64(),
        latencies_ns: all_latencies.into_inner().expect("no thread panics"),
    }
}

/// Returns a contestant with half of the keys entered, in random order, as slots are freed and taken again.
fn filled(who: usize, entries: u32, order: &[u32]) -> Box<dyn Contestant> {
    let index = make(who, entries);
    for &key in &order[..entries as usize] {
        assert_eq!(index.store(key, handle_for(key, 0)), None);
    }
    index
}

fn shuffled(keys: u32) -> Vec<u32> {
    let mut random = Random::new(u64::from(keys));
    let mut order: Vec<u32> = (0..keys).collect();
    (1..order.len()).rev().for_each(|at| order.swap(at, random.below(at as u64 + 1) as usize));
    order
}

fn percentile(sorted: &[u32], share: f64) -> f64 {
    f64::from(sorted[((sorted.len() - 1) as f64 * share).round() as usize])
}

/// The measurements of one size.
struct Size {
    entries: u32,
    bytes_per_entry: Vec<f64>,
    /// By number of threads, then by contestant.
    runs: Vec<Vec<Measured>>,
}

struct Measured {
    ops_per_second: Vec<f64>,
    /// Sorted in ascending order.
    latencies_ns: Vec<u32>,
}

fn measure(entries: u32, effort: Effort) -> Size {
    let (rounds, time) = effort.pick((7, Duration::from_millis(200)), (3, Duration::from_millis(30)));
    let order = shuffled(entries * 2);
    let (indexes, bytes_per_entry): (Vec<_>, Vec<_>) = (0..NAMES.len())
        .map(|who| weighed(|| filled(who, entries, &order)))
        .map(|(index, bytes)| (index, bytes as f64 / f64::from(entries)))
        .unzip();
    drop(order);
    let run_threads = |threads: usize| {
        let mut seed = threads as u64 * 1000;
        let results = interleaved(rounds, NAMES.len(), |who| {
            seed += 1;
            run_once(&*indexes[who], entries, threads, seed, time)
        });
        results.into_iter().map(Measured::of).collect()
    };
    Size { entries, bytes_per_entry, runs: THREADS.into_iter().map(run_threads).collect() }
}

impl Measured {
    fn of(rounds: Vec<Done>) -> Measured {
        let ops_per_second = rounds.iter().map(|round| round.ops_per_second).collect();
        let mut latencies_ns: Vec<u32> = rounds.into_iter().flat_map(|round| round.latencies_ns).collect();
        latencies_ns.sort_unstable();
        Measured { ops_per_second, latencies_ns }
    }
}

/// Runs the experiment.
pub fn run(effort: Effort) -> Result<Report, String> {
    let sizes: &[u32] = effort.pick(&[100_000, TARGET_ENTRIES, 10_000_000], &[100_000, TARGET_ENTRIES]);
    let sizes: Vec<Size> = sizes.iter().map(|&entries| measure(entries, effort)).collect();
    let mut report = Report::new("index");
    report.published = vec![
        "B-tree instead of the red-black tree, one lock each (2019, not merged): 73,778.8 to 393,999 bogo I/O \
         operations with stress-ng, zswap and 1 GiB of swap: 5.34 times"
            .to_owned(),
        "a red-black tree for each 64 MiB (Linux 6.9): kernel build 69.2 to 63.8 s".to_owned(),
        "an xarray for each 64 MiB (Linux 6.10): kernel build 202.8 to 200.9 s".to_owned(),
    ];
    report.tables = vec![throughput(&sizes), latency(&sizes), memory(&sizes)];
    let target = sizes.iter().find(|size| size.entries == TARGET_ENTRIES).expect("always measured");
    report.targets = targets(target);
    report.charts = charts(target);
    report.notes = vec![
        "50 % load, 25 % store (half replace), 25 % invalidate, of random keys; half of all keys have an entry. \
         Each handle that comes out is checked."
            .to_owned(),
        format!(
            "one operation of {SAMPLED} is timed by itself, which adds some 25 ns; with more threads than \
             processors ({} here) the longest ones are time slices",
            std::thread::available_parallelism().map_or(0, usize::from)
        ),
    ];
    Ok(report)
}

fn throughput(sizes: &[Size]) -> Table {
    let columns = ["entries", "threads", "index", "million ops/s", "ratio to red-black", "ratio to B-tree"];
    let mut table = Table::new("operations per second (median [lowest..highest] of the rounds)", &columns);
    for (size, threads, runs) in each_run(sizes) {
        for (who, measured) in runs.iter().enumerate() {
            let millions: Vec<f64> = measured.ops_per_second.iter().map(|ops| ops / 1e6).collect();
            let ratio_to = |rival: usize| match who == rival {
                true => Cell::Nothing,
                false => ratio(&measured.ops_per_second, &runs[rival].ops_per_second).into(),
            };
            table.row(vec![
                (size.entries as usize).into(),
                threads.into(),
                NAMES[who].into(),
                Sample::of(&millions).into(),
                ratio_to(RED_BLACK),
                ratio_to(B_TREE),
            ]);
        }
    }
    table
}

fn latency(sizes: &[Size]) -> Table {
    let columns = ["entries", "threads", "index", "p50 ns", "p99 ns", "p99.9 ns", "max ns"];
    let mut table = Table::new("latency of one operation", &columns);
    for (size, threads, runs) in each_run(sizes) {
        for (who, measured) in runs.iter().enumerate() {
            let at = |share| percentile(&measured.latencies_ns, share).into();
            let name = NAMES[who].into();
            let entries = (size.entries as usize).into();
            table.row(vec![entries, threads.into(), name, at(0.5), at(0.99), at(0.999), at(1.0)]);
        }
    }
    table
}

fn memory(sizes: &[Size]) -> Table {
    let mut table =
        Table::new("memory, every second slot having an entry", &["entries", "index", "bytes per entry"]);
    for size in sizes {
        for (who, bytes) in size.bytes_per_entry.iter().enumerate() {
            table.row(vec![(size.entries as usize).into(), NAMES[who].into(), (*bytes).into()]);
        }
    }
    table
}

fn each_run(sizes: &[Size]) -> impl Iterator<Item = (&Size, usize, &Vec<Measured>)> {
    sizes
        .iter()
        .flat_map(|size| THREADS.iter().zip(&size.runs).map(move |(threads, runs)| (size, *threads, runs)))
}

fn targets(size: &Size) -> Vec<Target> {
    let mut targets = Vec::new();
    for (threads, runs) in THREADS.iter().zip(&size.runs).filter(|(threads, _)| **threads >= 2) {
        for (rival, name, wanted) in [(RED_BLACK, "red-black tree", 5.34), (B_TREE, "B-tree", 2.0)] {
            let found = ratio(&runs[OURS].ops_per_second, &runs[rival].ops_per_second).median;
            let what =
                format!("{} entries, {threads} threads, ratio to the {name} with one lock", size.entries);
            targets.push(Target::at_least(what, wanted, found));
        }
    }
    targets
}

fn charts(size: &Size) -> Vec<Chart> {
    let chart = |title: String, unit: &str, value: &dyn Fn(&Measured) -> f64| Chart {
        title,
        unit: unit.to_owned(),
        groups: THREADS.iter().map(|threads| format!("{threads} threads")).collect(),
        series: (0..NAMES.len())
            .map(|who| (NAMES[who].to_owned(), size.runs.iter().map(|runs| value(&runs[who])).collect()))
            .collect(),
    };
    let entries = size.entries;
    vec![
        chart(format!("index of {entries} entries"), "million ops/s", &|measured| {
            Sample::of(&measured.ops_per_second).median / 1e6
        }),
        chart(format!("index of {entries} entries, 99th percentile of an operation"), "ns", &|measured| {
            percentile(&measured.latencies_ns, 0.99)
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Timing wrong answers would be worthless.
    #[test]
    fn all_contestants_answer_alike() {
        const ENTRIES: u32 = 20_000;
        let order = shuffled(ENTRIES * 2);
        for (who, name) in NAMES.iter().enumerate() {
            let index = filled(who, ENTRIES, &order);
            let mut model: BTreeMap<u32, u32> =
                order[..ENTRIES as usize].iter().map(|&key| (key, handle_for(key, 0))).collect();
            let mut random = Random::new(7);
            for step in 0..200_000 {
                let key = random.below(u64::from(ENTRIES) * 2) as u32;
                let (found, expected) = match random.below(3) {
                    0 => (index.load(key), model.get(&key).copied()),
                    1 => (index.store(key, handle_for(key, step)), model.insert(key, handle_for(key, step))),
                    _ => (index.remove(key), model.remove(&key)),
                };
                assert_eq!(found, expected, "{name}, key {key}");
            }
        }
    }

    #[test]
    fn all_contestants_keep_handles_with_their_keys_under_threads() {
        let order = shuffled(2_000);
        for (who, name) in NAMES.iter().enumerate() {
            let index = filled(who, 1_000, &order);
            let done = run_once(&*index, 1_000, 4, 1, Duration::from_millis(40));
            assert!(done.ops_per_second > 0.0 && !done.latencies_ns.is_empty());
            let left = (0..2_000).filter(|&key| index.load(key).is_some()).count();
            assert!((700..1_300).contains(&left), "{name}: {left} entries");
        }
    }
}

//! Lookups by themselves. A file of 80 GB has a given number of extents, and every structure is built from
//! the same list. Several threads look slots up and compare each block with the right one.
// UNSAFETY: a thread's CPU time is asked from C, and Farpage's structure is handed raw memory.

use crate::measure::{self, Random, weighed};
use crate::rivals::{extent_list, extent_rbtree};
use farpage_core::areas::extents::{Builder, Extent, Extents};
use farpage_core::memory::Region;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Slots in an area of 80 GB.
pub const SLOTS: u32 = (80_000_000_000_u64 / 4096) as u32;
/// Random slots that are prepared: 256 KiB, more than a branch predictor can learn.
const PREPARED: usize = 1 << 15;

/// The structures, in the order of the table's columns.
pub const STRUCTURES: [&str; 5] =
    ["list with a cursor", "red-black tree", "B-tree (BTreeMap)", "sorted array, binary search", "ours"];
/// Index of the list in [`STRUCTURES`].
pub const LIST: usize = 0;
/// Index of the red-black tree in [`STRUCTURES`].
pub const RBTREE: usize = 1;
/// Index of Farpage's structure in [`STRUCTURES`].
pub const OURS: usize = 4;

/// The pattern of the slots that are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Random slots.
    Random,
    /// Random slots, each looked up only after the previous answer. The pattern measures the latency of a
    /// lookup, while the other patterns let lookups overlap.
    Chained,
    /// One slot after another, each thread from a start of its own.
    Sequential,
}

impl Pattern {
    /// Returns the pattern's name.
    pub const fn name(self) -> &'static str {
        match self {
            Pattern::Random => "random",
            Pattern::Chained => "random, one by one",
            Pattern::Sequential => "sequential",
        }
    }
}

/// Makes a file of `extents` pieces of random lengths, scattered over the device. No two pieces are
/// neighbours there.
pub fn fragmented(extents: usize, slots: u32, seed: u64) -> Vec<Extent> {
    let mut random = Random::new(seed);
    let mut cuts = std::collections::BTreeSet::from([0]);
    while cuts.len() < extents {
        cuts.insert(random.below(slots.into()) as u32);
    }
    let ends = cuts.iter().copied().skip(1).chain([slots]);
    let mut pieces: Vec<Extent> = cuts
        .iter()
        .zip(ends)
        .map(|(slot, end)| Extent { slot: *slot, count: end - slot, block: 0 })
        .collect();
    // The pieces are placed in another order, with a page between them.
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    random.shuffle(&mut order);
    let mut block = 2048;
    for at in order {
        pieces[at].block = block;
        block += u64::from(pieces[at].count) + 1;
    }
    pieces
}

/// Memory that is handed to Farpage's structure, on the heap like the memory of the other structures.
struct Memory(Vec<u64>);

impl Memory {
    fn new(extents: usize) -> Memory {
        Memory(vec![0; Extents::bytes(extents as u32).div_ceil(8)])
    }

    fn region(&mut self) -> Region<'_> {
        let bytes = self.0.len() * 8;
        // SAFETY: the memory is the vector's own and zeroed. The vector is borrowed exclusively for as long
        // as the region lives.
        unsafe { Region::new(self.0.as_mut_ptr().cast(), bytes) }
    }
}

/// A sorted array.
struct Array {
    starts: Vec<u32>,
    blocks: Vec<u64>,
}

impl Array {
    fn block(&self, slot: u32) -> u64 {
        let at = self.starts.partition_point(|start| *start <= slot) - 1;
        self.blocks[at] + u64::from(slot - self.starts[at])
    }
}

/// Returns the time that this thread has had on a CPU.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which lives in this function.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Lookup {
    /// CPU time of one lookup in ns, with the loop and the comparison around it. Time in which another
    /// program has the CPU doesn't count.
    pub ns: f64,
    /// Lookups per second, all threads together.
    pub per_second: f64,
}

/// The measurements of one file.
pub struct Found {
    /// Bytes of memory for each extent, by structure.
    pub bytes_each: Vec<f64>,
    /// Lookups by pattern, then number of threads, then structure, then round.
    pub lookups: Vec<Vec<Vec<Vec<Lookup>>>>,
}

/// The plan of the measurements of one file.
pub struct Plan<'a> {
    /// Pieces of the file.
    pub extents: usize,
    /// Patterns.
    pub patterns: &'a [Pattern],
    /// Numbers of threads.
    pub threads: &'a [usize],
    /// Rounds.
    pub rounds: usize,
    /// Duration of each measurement.
    pub each: Duration,
}

/// Builds every structure and measures it.
pub fn run(plan: &Plan) -> Found {
    let pieces = fragmented(plan.extents, SLOTS, 80);
    let (list, list_bytes) = weighed(|| extent_list::List::new(&pieces));
    let (nodes, tree_bytes) = weighed(|| extent_rbtree::nodes(&pieces));
    let tree = extent_rbtree::Tree::new(&nodes);
    let (map, map_bytes) =
        weighed(|| pieces.iter().map(|extent| (extent.slot, extent.block)).collect::<BTreeMap<u32, u64>>());
    let (array, array_bytes) = weighed(|| Array {
        starts: pieces.iter().map(|extent| extent.slot).collect(),
        blocks: pieces.iter().map(|extent| extent.block).collect(),
    });
    let (mut memory, our_bytes) = weighed(|| Memory::new(pieces.len()));
    let mut builder = Builder::new(&mut memory.region(), pieces.len() as u32);
    pieces.iter().for_each(|extent| _ = builder.add(*extent));
    let ours = builder.finish(0);

    let course = Course::new(&pieces);
    let look = |pattern, threads, who| match who {
        0 => course.run(plan, pattern, threads, |slot| list.block(slot)),
        1 => course.run(plan, pattern, threads, |slot| tree.block(slot)),
        2 => course.run(plan, pattern, threads, |slot| {
            let (start, block) = map.range(..=slot).next_back().expect("the first extent has slot 0");
            block + u64::from(slot - start)
        }),
        3 => course.run(plan, pattern, threads, |slot| array.block(slot)),
        _ => course.run(plan, pattern, threads, |slot| ours.block(slot)),
    };
    let bytes = [list_bytes, tree_bytes, map_bytes, array_bytes, our_bytes];
    let of_pattern = |pattern: &Pattern| {
        let count = plan.threads.len() * STRUCTURES.len();
        let all = measure::interleaved(plan.rounds, count, |at| {
            look(*pattern, plan.threads[at / STRUCTURES.len()], at % STRUCTURES.len())
        });
        all.chunks(STRUCTURES.len()).map(<[_]>::to_vec).collect()
    };
    Found {
        bytes_each: bytes.iter().map(|bytes| *bytes as f64 / pieces.len() as f64).collect(),
        lookups: plan.patterns.iter().map(of_pattern).collect(),
    }
}

/// Slots to look up, with their blocks.
struct Course<'a> {
    pieces: &'a [Extent],
    random: Vec<(u32, u32)>,
}

impl Course<'_> {
    fn new(pieces: &[Extent]) -> Course<'_> {
        let mut random = Random::new(7);
        let sample = |_| {
            let slot = random.below(SLOTS.into()) as u32;
            let extent = &pieces[pieces.partition_point(|extent| extent.slot <= slot) - 1];
            (slot, (extent.block + u64::from(slot - extent.slot)) as u32)
        };
        let random = (0..PREPARED).map(sample).collect();
        Course { pieces, random }
    }

    /// Runs lookups by `threads` threads together.
    fn run(
        &self,
        plan: &Plan,
        pattern: Pattern,
        threads: usize,
        block: impl Fn(u32) -> u64 + Sync,
    ) -> Lookup {
        let (stop, spans) = (AtomicBool::new(false), Mutex::new(Vec::new()));
        // One more thread ends the run.
        measure::on_threads(threads + 1, |thread| {
            if thread == threads {
                std::thread::sleep(plan.each);
                return stop.store(true, Ordering::Relaxed);
            }
            let part = |of: usize| of * thread / threads;
            let (began, cpu_began) = (Instant::now(), cpu_time());
            let count = match pattern {
                Pattern::Random => look_up(&block, self.random.iter().cycle().skip(part(PREPARED)), &stop),
                Pattern::Chained => self.look_up_chained(&block, part(PREPARED), &stop),
                Pattern::Sequential => {
                    let (before, after) = self.pieces.split_at(part(self.pieces.len()));
                    let turn = after.iter().chain(before).cycle();
                    let slots = turn.flat_map(|extent| {
                        (0..extent.count).map(|n| (extent.slot + n, (extent.block as u32 + n)))
                    });
                    look_up(&block, slots, &stop)
                }
            };
            let (ended, cpu) = (Instant::now(), cpu_time() - cpu_began);
            spans.lock().expect("no thread panicked").push((began, ended, cpu, count));
        });
        // The time runs from the first thread's start. All threads may have been at work before this thread
        // ran again.
        let spans = spans.into_inner().expect("no thread panicked");
        let began = spans.iter().map(|span| span.0).min().expect("a thread at least");
        let ended = spans.iter().map(|span| span.1).max().expect("a thread at least");
        let cpu: Duration = spans.iter().map(|span| span.2).sum();
        let count: u64 = spans.iter().map(|span| span.3).sum();
        Lookup {
            ns: cpu.as_nanos() as f64 / count as f64,
            per_second: count as f64 / (ended - began).as_secs_f64(),
        }
    }

    /// Looks slots up like [`look_up`], but the next slot isn't known before the last answer.
    fn look_up_chained(&self, block: impl Fn(u32) -> u64, from: usize, stop: &AtomicBool) -> u64 {
        let (mut count, mut at) = (0, from);
        loop {
            let (slot, wanted) = self.random[at % PREPARED];
            let difference = block(slot) ^ u64::from(wanted);
            // The difference is always 0, but neither the compiler nor the processor knows.
            at += 1 + std::hint::black_box(difference) as usize;
            assert!(difference == 0, "slot {slot} isn't at block {wanted}");
            count += 1;
            if stop.load(Ordering::Relaxed) {
                return count;
            }
        }
    }
}

/// Looks slots up until `stop` is set, and compares each answer. Returns the number of lookups.
fn look_up<S: Borrow<(u32, u32)>>(
    block: impl Fn(u32) -> u64,
    slots: impl Iterator<Item = S>,
    stop: &AtomicBool,
) -> u64 {
    let mut count = 0;
    for pair in slots {
        let (slot, wanted) = *pair.borrow();
        let found = block(slot);
        assert!(found == u64::from(wanted), "slot {slot}: block {found} instead of {wanted}");
        count += 1;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_structure_finds_every_block() {
        let plan = Plan {
            extents: 700,
            patterns: &[Pattern::Random, Pattern::Chained, Pattern::Sequential],
            threads: &[1, 3],
            rounds: 1,
            each: Duration::from_millis(2),
        };
        let found = run(&plan);
        assert_eq!((found.lookups.len(), found.lookups[1].len(), found.lookups[1][1].len()), (3, 2, 5));
        let mut all = found.lookups.iter().flatten().flatten().flatten();
        assert!(all.all(|lookup| lookup.ns > 0.0 && lookup.per_second > 0.0));
    }

    #[test]
    fn fragments_cover_the_file_and_are_no_neighbours_on_the_device() {
        let pieces = fragmented(100, 10_000, 1);
        assert_eq!(pieces.iter().map(|extent| extent.count).sum::<u32>(), 10_000);
        assert!(pieces.windows(2).all(|pair| pair[0].slot + pair[0].count == pair[1].slot));
        let mut blocks: Vec<_> = pieces.iter().map(|extent| (extent.block, extent.count)).collect();
        blocks.sort_unstable();
        assert!(blocks.windows(2).all(|pair| pair[0].0 + u64::from(pair[0].1) < pair[1].0));
    }
}

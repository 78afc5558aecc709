//! The way in which benchmarks measure. Contestants run in turns for several rounds, and medians are reported
//! with their spread. The machine is shared and its clock speed can't be set, so only ratios within one run
//! are meaningful.

use std::sync::Barrier;
use std::time::{Duration, Instant};

/// A median with its extremes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// The median.
    pub median: f64,
    /// The smallest measurement.
    pub low: f64,
    /// The largest measurement.
    pub high: f64,
}

impl Sample {
    /// Makes the sample of some measurements. Without measurements no figure is a number.
    pub fn of(values: &[f64]) -> Sample {
        if values.is_empty() {
            return Sample { median: f64::NAN, low: f64::NAN, high: f64::NAN };
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Sample { median, low: sorted[0], high: sorted[sorted.len() - 1] }
    }

    /// Returns the distance between the extremes, as a share of the median.
    pub fn spread(&self) -> f64 {
        (self.high - self.low) / self.median
    }
}

/// Calls each contestant once a round, and returns their results by contestant, then by round. The order
/// rotates from round to round, so that no contestant always follows the same rival.
pub fn interleaved<T>(rounds: usize, contestants: usize, mut run: impl FnMut(usize) -> T) -> Vec<Vec<T>> {
    let mut results: Vec<Vec<T>> = (0..contestants).map(|_| Vec::with_capacity(rounds)).collect();
    for round in 0..rounds {
        for at in 0..contestants {
            let who = (at + round) % contestants;
            results[who].push(run(who));
        }
    }
    results
}

/// Does the same with runs that may fail. The first failure ends the rounds. Returns the results of the
/// complete rounds, and the failure.
///
/// # Errors
/// Returns the failure if no round is complete.
pub fn interleaved_until_failure<T>(
    rounds: usize,
    contestants: usize,
    mut run: impl FnMut(usize) -> Result<T, String>,
) -> Result<(Vec<Vec<T>>, Option<String>), String> {
    let mut results: Vec<Vec<T>> = (0..contestants).map(|_| Vec::with_capacity(rounds)).collect();
    for round in 0..rounds {
        for at in 0..contestants {
            let who = (at + round) % contestants;
            match run(who) {
                Ok(result) => results[who].push(result),
                Err(why) if round == 0 => return Err(why),
                Err(why) => {
                    results.iter_mut().for_each(|results| results.truncate(round));
                    return Ok((results, Some(format!("round {} of {rounds}: {why}", round + 1))));
                }
            }
        }
    }
    Ok((results, None))
}

/// Returns the ratio of two contestants, `ours` over `theirs`, taken in each round.
pub fn ratio(ours: &[f64], theirs: &[f64]) -> Sample {
    let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    Sample::of(&ratios)
}

/// Returns what `make` makes, and the bytes that malloc gave for it. The counts are those of the whole
/// process and include what other threads allocate and free meanwhile. A test can't use the figure, because
/// the tests of an executable share a process.
pub fn weighed<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = heap_bytes();
    let made = make();
    (made, heap_bytes().saturating_sub(before))
}

/// Returns the bytes that malloc has given out, in small pieces and in mappings.
fn heap_bytes() -> usize {
    // SAFETY: the function takes no arguments, and only reads malloc's own counts.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Runs `work` in `threads` threads that start together. Each thread gets its number. Returns the time from
/// the first thread's start to the last thread's end. The threads take the time themselves. With more threads
/// than CPUs, the waiting thread may run only when the first threads are done.
pub fn on_threads(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let start = Barrier::new(threads);
    let times: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (start, work) = (&start, &work);
                scope.spawn(move || {
                    start.wait();
                    let began = Instant::now();
                    work(thread);
                    (began, Instant::now())
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("a measuring thread panicked")).collect()
    });
    let began = times.iter().map(|(began, _)| *began).min().expect("at least one thread");
    let ended = times.iter().map(|(_, ended)| *ended).max().expect("at least one thread");
    ended - began
}

/// A sequence of numbers from a seed: xorshift64*, which takes about a nanosecond for each number.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes the sequence of this seed.
    pub const fn new(seed: u64) -> Random {
        // A state of zero would stay zero.
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `end`, by multiplication instead of division. The numbers are even enough for
    /// an `end` below 2^32.
    pub const fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }

    /// Puts a list into random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn sample_has_median_and_extremes() {
        let sample = Sample::of(&[4.0, 1.0, 2.0]);
        assert_eq!(sample, Sample { median: 2.0, low: 1.0, high: 4.0 });
        assert_eq!(Sample::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(sample.spread(), 1.5);
        assert_eq!(Sample::of(&[5.0]), Sample { median: 5.0, low: 5.0, high: 5.0 });
        assert!(
            Sample::of(&[]).median.is_nan(),
            "an empty sample ended the command, and its report was lost"
        );
    }

    #[test]
    fn contestants_take_turns_and_keep_their_results() {
        let mut order = Vec::new();
        let results = interleaved(2, 3, |who| {
            order.push(who);
            who
        });
        assert_eq!(order, [0, 1, 2, 1, 2, 0]);
        assert_eq!(results, [[0, 0], [1, 1], [2, 2]]);
    }

    /// All further rounds ran after a failure, and then every result was thrown away.
    #[test]
    fn failure_ends_the_rounds_and_the_complete_ones_stay() {
        let mut runs = 0;
        let mut until = |last: usize| {
            runs = 0;
            interleaved_until_failure(3, 2, |who| {
                runs += 1;
                if runs == last { Err("full".to_owned()) } else { Ok((who, runs)) }
            })
        };
        let complete = vec![vec![(0, 1), (0, 4)], vec![(1, 2), (1, 3)]];
        assert_eq!(until(6), Ok((complete, Some("round 3 of 3: full".to_owned()))));
        assert_eq!(until(4), Ok((vec![vec![(0, 1)], vec![(1, 2)]], Some("round 2 of 3: full".to_owned()))));
        assert_eq!(until(2), Err("full".to_owned()));
        assert!(until(9).is_ok_and(|(all, failed)| all[1].len() == 3 && failed.is_none()));
        assert_eq!(runs, 6);
    }

    #[test]
    fn all_threads_have_worked_when_the_clock_stops() {
        let count = AtomicUsize::new(0);
        let took = on_threads(3, |thread| {
            count.fetch_add(thread + 1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 6);
        assert!(took > Duration::ZERO);
    }

    #[test]
    fn random_numbers_stay_below_their_end_and_differ() {
        let mut random = Random::new(0);
        let numbers: Vec<u64> = (0..1000).map(|_| random.below(10)).collect();
        assert!((0..10).all(|digit| numbers.contains(&digit)) && numbers.iter().all(|number| *number < 10));
    }
}

//! The program that the live experiments run: an ordinary program, which knows nothing of Farpage. `farpage
//! load NAME` runs a load, and [`crate::live`] runs it with and without a budget.
//!
//! A load prints one line of JSON on standard output. The process ends with status 1 if a byte was wrong.

pub mod ahead;
pub mod latency;
pub mod lu;
pub mod pagerank;
pub mod random;
pub mod region;
pub mod touch;
pub mod walk;

use crate::measure::on_threads;
use serde_json::Value;
use std::sync::Mutex;
use std::time::Instant;

/// The settings of a load. Each load uses the settings that it needs.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Bytes of the region.
    pub bytes: u64,
    /// Number of threads.
    pub threads: usize,
    /// Bytes of the memory of the random threads.
    pub random_bytes: u64,
    /// Number of random threads beside the other threads.
    pub random_threads: usize,
    /// Pages from one touch to the next.
    pub stride: usize,
    /// Seconds to run.
    pub seconds: f64,
    /// Percent of touches that write.
    pub write_percent: u64,
    /// Seed of the load's random numbers.
    pub seed: u64,
    /// Whether pages don't compress.
    pub noise: bool,
    /// Whether all threads of a kind share one mapping.
    pub shared: bool,
    /// Whether each kind of thread has a process of its own.
    pub processes: bool,
    /// Whether the load reports when its memory is filled, and waits.
    pub gate: bool,
    /// The order of `touch`, which is one of [`touch::PATTERNS`].
    pub pattern: Option<String>,
    /// A file with the pages of `touch`. Without it, the pages are collected.
    pub contents: Option<String>,
}

/// Bytes that a thread has at least: a page for each of 16 streams.
const BYTES_MIN: u64 = 16 * region::PAGE_BYTES as u64;

impl Settings {
    /// Checks that a load can work with the settings.
    ///
    /// # Errors
    /// Returns a sentence about the wrong setting.
    pub fn check(&self) -> Result<(), String> {
        let parts = [(self.bytes, self.threads, ""), (self.random_bytes, self.random_threads, "random-")];
        for (bytes, threads, which) in parts {
            if threads > 0 && bytes / (threads as u64) < BYTES_MIN {
                return Err(format!(
                    "--{which}bytes {bytes} is less than 64K for each of --{which}threads {threads}"
                ));
            }
        }
        if self.threads + self.random_threads == 0 {
            return Err("--threads 0 leaves nobody to do it".to_owned());
        }
        if !(0.0..=1e6).contains(&self.seconds) {
            return Err(format!("--seconds {} is no time from 0 to a million", self.seconds));
        }
        if self.write_percent > 100 {
            return Err(format!("--write-percent {} is more than 100", self.write_percent));
        }
        Ok(())
    }
}

/// One load.
pub struct Load {
    /// The name on the command line.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Runs the load. Returns its results, or the first wrong byte.
    pub run: fn(&Settings) -> Result<Value, String>,
}

/// The only table of loads.
pub const LOADS: &[Load] = &[
    Load {
        name: "fill",
        about: "writes every page of the region once, then reads every page in order; each thread has its part",
        run: fill,
    },
    Load { name: "mixed", about: "sequential walkers, and random ones beside them", run: ahead::mixed },
    Load {
        name: "interleaved",
        about: "16 sequential streams through one region, a page at a time in turns",
        run: ahead::interleaved,
    },
    Load {
        name: "strided",
        about: "every nth page, again and again, each pass a page further",
        run: ahead::strided,
    },
    Load { name: "backward", about: "from the last page to the first", run: ahead::backward },
    Load { name: "lu", about: "factors a matrix as Linpack does", run: lu::lu },
    Load {
        name: "pagerank",
        about: "ranks the vertices of a graph in which few have most of the edges",
        run: pagerank::pagerank,
    },
    Load {
        name: "random",
        about: "touches pages at random, evenly; some of them it writes",
        run: random::threads,
    },
    Load {
        name: "random-pool",
        about: "the same with pages that compress: what is evicted fits the pool",
        run: random::threads_from_pool,
    },
    Load {
        name: "random-processes",
        about: "`random` in as many processes as threads were asked for, each with a region of its own",
        run: random::processes,
    },
    Load {
        name: "touch",
        about: "touches pages of real programs (--contents) in an order (--pattern); compares all of them in the end",
        run: touch::touch,
    },
];

fn fill(settings: &Settings) -> Result<Value, String> {
    let region = region::Region::new(settings.bytes)?;
    let (pages, threads) = (region.pages(), settings.threads.max(1));
    let part = |thread: usize| pages * thread / threads..pages * (thread + 1) / threads;
    let began = Instant::now();
    on_threads(threads, |thread| part(thread).for_each(|page| region.put(page, settings.seed)));
    let filled = began.elapsed();
    let wrong = Mutex::new(None);
    on_threads(threads, |thread| {
        if let Err(why) = part(thread).try_for_each(|page| region.check(page, settings.seed)) {
            *wrong.lock().expect("no thread panicked") = Some(why);
        }
    });
    let read = began.elapsed() - filled;
    match wrong.into_inner().expect("no thread panicked") {
        Some(why) => Err(why),
        None => Ok(serde_json::json!({
            "pages": pages,
            "fill_seconds": filled.as_secs_f64(),
            "read_seconds": read.as_secs_f64(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let bytes = 2 * BYTES_MIN;
        Settings { bytes, threads: 2, random_bytes: bytes, ..Settings::default() }
    }

    /// Some of the settings caused panics: a remainder by zero, or a duration that was not a number.
    #[test]
    fn settings_that_no_load_can_work_with_are_refused() {
        assert_eq!(settings().check(), Ok(()));
        assert_eq!(Settings { bytes: 0, threads: 0, random_threads: 1, ..settings() }.check(), Ok(()));
        for (wrong, words) in [
            (Settings { bytes: 2 * BYTES_MIN - 1, ..settings() }, "--bytes 131071"),
            (Settings { random_bytes: 0, random_threads: 1, ..settings() }, "--random-bytes 0"),
            (Settings { threads: 0, ..settings() }, "--threads 0"),
            (Settings { seconds: f64::NAN, ..settings() }, "--seconds NaN"),
            (Settings { seconds: -1.0, ..settings() }, "--seconds -1"),
            (Settings { seconds: f64::INFINITY, ..settings() }, "--seconds inf"),
            (Settings { write_percent: 101, ..settings() }, "--write-percent 101"),
        ] {
            let why = wrong.check().unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }
}

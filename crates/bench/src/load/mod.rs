//! The program that the live experiments run: an ordinary one, which knows nothing of Farpage. `farpage load NAME`
//! runs it; [`crate::live`] does so with and without a budget.
//!
//! A load prints one line of JSON on standard output, and ends with status 1 if a byte was wrong.

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

/// What a load is given. Each uses what it needs.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Size of the region.
    pub bytes: u64,
    /// Threads.
    pub threads: usize,
    /// Size of the memory of random threads beside them.
    pub random_bytes: u64,
    /// Random threads beside them.
    pub random_threads: usize,
    /// Pages from one touch to the next.
    pub stride: usize,
    /// How long to run.
    pub seconds: f64,
    /// Percent of touches that write.
    pub write_percent: u64,
    /// Where its numbers come from.
    pub seed: u64,
    /// Pages that don't compress.
    pub noise: bool,
    /// One mapping for all threads of a kind.
    pub shared: bool,
    /// A process for each kind of thread.
    pub processes: bool,
    /// To say when memory is filled, and wait.
    pub gate: bool,
    /// The order of `touch`: one of [`touch::PATTERNS`].
    pub pattern: Option<String>,
    /// A file with the pages of `touch`.
    pub contents: Option<String>,
}

/// One load.
pub struct Load {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Runs it; what it found, or the first wrong byte.
    pub run: fn(&Settings) -> Result<Value, String>,
}

/// The one table of loads.
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
        name: "touch",
        about: "touches pages of real programs (--contents) in an order (--pattern); compares all of them in the end",
        run: touch::touch,
    },
    Load {
        name: "random-processes",
        about: "the same in as many processes as threads were asked for, each with a region of its own",
        run: random::processes,
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

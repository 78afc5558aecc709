//! The cost of interrupting another CPU, a part of `farpage bench faults`. The interrupt is most of the cost
//! of a move when several CPUs run the program.
//!
//! A thread that takes a page from a program waits for a TLB shootdown on each CPU that runs a thread of the
//! program. Here a thread writes to a page and gives it back in a loop: alone, and beside a thread that only
//! counts. The difference is the waiting time. The counts that the other thread loses, divided by the pages,
//! are what each shootdown takes from that thread. The threads run on two CPUs only if the scheduler finds
//! two free, so the figures of a busy machine say nothing.

use crate::measure::{Sample, interleaved};
use crate::report::{Cell, Table};
use farpage_core::units::PAGE_BYTES;
use farpage_os::memory;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The threads that run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Giver,
    Counter,
    Both,
}

const CONTESTANTS: [Who; 3] = [Who::Giver, Who::Counter, Who::Both];

/// The work done. A thread that didn't run has 0.
struct Done {
    pages_a_second: f64,
    counted_a_second: f64,
}

/// Measures, and returns the table. Returns `None` on a machine with one CPU.
pub fn table(rounds: usize, seconds: f64) -> Result<Option<Table>, String> {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return Ok(None);
    }
    let page =
        memory::reserve(PAGE_BYTES).map_err(|errno| format!("no page of memory ({errno:?})"))? as usize;
    let done = interleaved(rounds, CONTESTANTS.len(), |at| run(CONTESTANTS[at], page, seconds));
    let by_round = |figure: fn(&Done, &Done, &Done) -> f64| {
        let figures = (0..rounds).map(|round| figure(&done[0][round], &done[1][round], &done[2][round]));
        Sample::of(&figures.collect::<Vec<f64>>())
    };
    let mut table = Table::new(
        "a page written and given back, without another thread and beside one that counts",
        &["beside", "us for a page", "more than alone, us", "us that each takes from the other"],
    );
    let alone = by_round(|giver, _, _| 1e6 / giver.pages_a_second);
    table.row(vec!["nobody".into(), alone.into(), Cell::Nothing, Cell::Nothing]);
    let waiting = by_round(|giver, _, both| 1e6 / both.pages_a_second - 1e6 / giver.pages_a_second);
    let taken = by_round(|_, counter, both| {
        (1.0 - both.counted_a_second / counter.counted_a_second) * 1e6 / both.pages_a_second
    });
    let beside = by_round(|_, _, both| 1e6 / both.pages_a_second);
    table.row(vec!["a thread that counts".into(), beside.into(), waiting.into(), taken.into()]);
    Ok(Some(table))
}

fn run(who: Who, page: usize, seconds: f64) -> Done {
    let (stop, counted) = (AtomicBool::new(false), AtomicU64::new(0));
    let length = Duration::from_secs_f64(seconds);
    std::thread::scope(|scope| {
        if who != Who::Giver {
            scope.spawn(|| count(&stop, &counted));
            // The counting thread has begun, and the scheduler has found a CPU for it.
            while counted.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
        }
        let (before, began) = (counted.load(Ordering::Relaxed), Instant::now());
        let mut pages = 0;
        if who == Who::Counter {
            std::thread::sleep(length);
        } else {
            while began.elapsed() < length {
                (0..64).for_each(|_| give(page));
                pages += 64;
            }
        }
        let (took, after) = (began.elapsed().as_secs_f64(), counted.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        Done { pages_a_second: f64::from(pages) / took, counted_a_second: (after - before) as f64 / took }
    })
}

fn count(stop: &AtomicBool, counted: &AtomicU64) {
    let mut count = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        (0..1_000).for_each(|_| count = black_box(count + 1));
        counted.store(count, Ordering::Relaxed);
    }
}

fn give(page: usize) {
    let page = page as *mut u8;
    // SAFETY: the page is the benchmark's own. Only this thread uses it, and its bytes aren't needed.
    unsafe {
        page.write_volatile(1);
        memory::drop_pages(page, PAGE_BYTES).expect("memory of our own can be given back");
    }
}

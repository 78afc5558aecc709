//! pmbench's pattern: random, evenly distributed touches of pages, some of them writes. Pages have random
//! words, which don't compress, so evicted pages go to an area. With a stride, touched pages lie `stride`
//! pages apart, and the pages between are never touched.

use super::Settings;
use super::region::{PAGE_BYTES, Region};
use crate::measure::Random;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const WORDS: usize = PAGE_BYTES / 8;
/// Words at the start of a page that are compared and never change. Only words behind them are written.
const KEPT_WORDS: usize = 8;

/// Runs threads on one region. Thread n of m has every m-th page.
pub fn threads(settings: &Settings) -> Result<Value, String> {
    on_content(settings, expected)
}

/// Does the same with pages that compress, so that evicted pages fit the pool.
pub fn threads_from_pool(settings: &Settings) -> Result<Value, String> {
    let content = |page, word, seed| if word < KEPT_WORDS { expected(page, word, seed) } else { page as u64 };
    on_content(settings, content)
}

fn on_content(settings: &Settings, content: impl Fn(usize, usize, u64) -> u64) -> Result<Value, String> {
    let stride = settings.stride.max(1);
    let region = Region::new(settings.bytes * stride as u64)?;
    let region = if stride > 1 { region.of_small_pages() } else { region };
    for page in (0..region.pages()).step_by(stride) {
        (0..WORDS).for_each(|word| region.write(page, word, content(page, word, settings.seed)));
    }
    let touches = AtomicU64::new(0);
    let began = Instant::now();
    let work = |thread| touch(&region, settings, thread, &touches, began);
    let work = &work;
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..settings.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a loading thread panicked")).collect()
    });
    results.into_iter().collect::<Result<(), String>>()?;
    let seconds = began.elapsed().as_secs_f64();
    let touches = touches.into_inner();
    let (anonymous, resident) = in_memory(&region, stride).map_err(|error| format!("/proc/self: {error}"))?;
    // Evicted pages stay out until the process ends. Farpage's figures at the end then describe the same
    // state.
    std::mem::forget(region);
    Ok(json!({
        "touches": touches,
        "seconds": seconds,
        "touches_per_second": touches as f64 / seconds,
        "anonymous_bytes": anonymous,
        "resident_bytes": resident,
    }))
}

/// Returns this process's anonymous memory in bytes, and the bytes of the touched pages that are in memory.
fn in_memory(region: &Region, stride: usize) -> std::io::Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut resident = 0;
    for page in (0..region.pages()).step_by(stride) {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, region.page_number(page) * 8)?;
        resident += u64::from_ne_bytes(entry) >> 63;
    }
    Ok((kib * 1024, resident * PAGE_BYTES as u64))
}

fn expected(page: usize, word: usize, seed: u64) -> u64 {
    Random::new(seed ^ (page * WORDS + word) as u64).next()
}

fn touch(
    region: &Region,
    settings: &Settings,
    thread: usize,
    touches: &AtomicU64,
    began: Instant,
) -> Result<(), String> {
    let mut random = Random::new(settings.seed ^ (thread as u64 + 1) << 32);
    let end = Duration::from_secs_f64(settings.seconds);
    let stride = settings.stride.max(1);
    let pages = (region.pages() / stride / settings.threads) as u64;
    // Each thread makes at least one pass, even if it starts late.
    loop {
        for _ in 0..64 {
            let page = (random.below(pages) as usize * settings.threads + thread) * stride;
            let word = random.below(KEPT_WORDS as u64) as usize;
            let (found, wanted) = (region.read(page, word), expected(page, word, settings.seed));
            if found != wanted {
                return Err(format!("page {page}, word {word}: {found:#x} instead of {wanted:#x}"));
            }
            if random.below(100) < settings.write_percent {
                let word = KEPT_WORDS + random.below((WORDS - KEPT_WORDS) as u64) as usize;
                region.write(page, word, random.next());
            }
        }
        touches.fetch_add(64, Ordering::Relaxed);
        if began.elapsed() >= end {
            return Ok(());
        }
    }
}

/// Runs `random` in one process for each thread asked for. Each process has one thread and a region of its
/// own.
pub fn processes(settings: &Settings) -> Result<Value, String> {
    let farpage = std::env::current_exe().map_err(|error| format!("no file of ours: {error}"))?;
    let spawn = |number: usize| {
        Command::new(&farpage)
            .args(["load", "random", "--threads", "1"])
            .args(["--bytes", &settings.bytes.to_string()])
            .args(["--seconds", &settings.seconds.to_string()])
            .args(["--write-percent", &settings.write_percent.to_string()])
            .args(["--seed", &(settings.seed + number as u64).to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("process {number} can't be started: {error}"))
    };
    let children: Vec<_> = (0..settings.threads).map(spawn).collect::<Result<_, _>>()?;
    let (mut touches, mut rate) = (0, 0.0);
    for child in children {
        let output = child.wait_with_output().map_err(|error| format!("a process is gone: {error}"))?;
        if !output.status.success() {
            return Err(format!("a process ended with {}", output.status));
        }
        let found: Value =
            serde_json::from_slice(&output.stdout).map_err(|error| format!("no JSON: {error}"))?;
        touches += found["touches"].as_u64().unwrap_or(0);
        rate += found["touches_per_second"].as_f64().unwrap_or(0.0);
    }
    Ok(json!({ "touches": touches, "touches_per_second": rate }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_touched_and_keep_their_first_words() {
        let settings = Settings {
            bytes: 64 * PAGE_BYTES as u64,
            threads: 2,
            seconds: 0.01,
            write_percent: 50,
            seed: 7,
            ..Settings::default()
        };
        assert!(threads(&settings).unwrap()["touches"].as_u64() >= Some(128));
        assert!(threads(&Settings { stride: 1000, ..settings }).unwrap()["touches"].as_u64() >= Some(128));
    }
}

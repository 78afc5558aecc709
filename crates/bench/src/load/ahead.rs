//! Loads for readahead: sequential walkers beside random ones, many streams in one region, strides, and a
//! backward walk. The result has one object for each part, below `parts`.
//!
//! Each touch compares the whole page. There is no comparison at the end, because it would be one more
//! sequential walk in Farpage's counters.

use super::Settings;
use super::region::{Content, Region};
use super::walk::{Order, Stretch, Walked, Walker, walk};
use crate::measure::Random;
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

/// Streams of `interleaved`.
const STREAMS: usize = 16;

/// Runs `threads` sequential walkers on `bytes`, and `random_threads` random walkers on `random_bytes`.
pub fn mixed(settings: &Settings) -> Result<Value, String> {
    if settings.processes { in_processes(settings) } else { in_threads(settings) }
}

/// Gives each walker a mapping of its own, or its part of a shared one.
fn in_threads(settings: &Settings) -> Result<Value, String> {
    let sequential = regions(settings, settings.bytes, settings.threads)?;
    let random = regions(settings, settings.random_bytes, settings.random_threads)?;
    let forward = |_| Order::Strided { stride: 1, backward: false };
    let any = |n| Order::Random(Random::new(settings.seed + n as u64));
    let mut walkers = walkers("sequential", &sequential, settings.threads, settings, forward);
    walkers.extend(self::walkers("random", &random, settings.random_threads, settings, any));
    run(walkers, settings)
}

/// Runs several streams in turns, a page at a time.
pub fn interleaved(settings: &Settings) -> Result<Value, String> {
    alone(settings, Order::Interleaved { streams: STREAMS })
}

/// Touches every `stride`th page, again and again.
pub fn strided(settings: &Settings) -> Result<Value, String> {
    alone(settings, Order::Strided { stride: settings.stride.max(1), backward: false })
}

/// Touches every page from the last to the first.
pub fn backward(settings: &Settings) -> Result<Value, String> {
    alone(settings, Order::Strided { stride: settings.stride.max(1), backward: true })
}

fn alone(settings: &Settings, order: Order) -> Result<Value, String> {
    let regions = regions(settings, settings.bytes, 1)?;
    let mut order = Some(order);
    let walkers =
        walkers("sequential", &regions, 1, settings, |_| order.take().expect("there is one walker"));
    run(walkers, settings)
}

fn regions(settings: &Settings, bytes: u64, threads: usize) -> Result<Vec<Region>, String> {
    let count = if settings.shared { threads.min(1) } else { threads };
    let content = if settings.noise { Content::Noise } else { Content::Heap };
    (0..count).map(|_| Region::of(bytes / count as u64, content)).collect()
}

fn walkers<'r>(
    part: &'static str,
    regions: &'r [Region],
    threads: usize,
    settings: &Settings,
    mut order: impl FnMut(usize) -> Order,
) -> Vec<Walker<'r>> {
    let each = threads / regions.len().max(1);
    let place = |thread: usize| {
        let region = &regions[thread / each];
        let pages = region.pages() / each;
        let first = thread % each * pages;
        Stretch::new(region, first..first + pages, settings.seed)
    };
    let walker = |thread| Walker {
        part,
        stretch: place(thread),
        order: order(thread),
        write_percent: settings.write_percent,
    };
    (0..threads).map(walker).collect()
}

/// Parts in which memory is filled. The walkers' parts are filled in turns; otherwise all pages of the last
/// walker would be in memory.
const FILL_PARTS: usize = 64;

fn run(walkers: Vec<Walker<'_>>, settings: &Settings) -> Result<Value, String> {
    for part in 0..FILL_PARTS {
        walkers.iter().for_each(|walker| walker.stretch.fill(part, FILL_PARTS));
    }
    if settings.gate {
        pass_gate()?;
    }
    let parts = walk(walkers, settings.seconds)?;
    let parts: Map<String, Value> =
        parts.iter().map(|(name, walked): &(_, Walked)| ((*name).to_owned(), walked.json())).collect();
    Ok(json!({ "pid": std::process::id(), "parts": parts }))
}

/// Tells the parent process that this process's memory is filled, and waits until the memory of the other
/// processes is filled too.
fn pass_gate() -> Result<(), String> {
    let told = std::io::stdout().write_all(b"filled\n").and_then(|()| std::io::stdout().flush());
    told.map_err(|error| format!("nobody listens: {error}"))?;
    let mut go = [0];
    std::io::stdin().read_exact(&mut go).map_err(|error| format!("nobody said go: {error}"))
}

/// Runs the sequential walkers in one process and the random walkers in another. Counters by process then
/// keep the two apart.
fn in_processes(settings: &Settings) -> Result<Value, String> {
    let alone =
        [Settings { random_threads: 0, ..settings.clone() }, Settings { threads: 0, ..settings.clone() }];
    let started: Result<Vec<Gated>, String> = alone.iter().map(Gated::start).collect();
    let mut started = started?;
    started.iter_mut().try_for_each(Gated::wait_until_filled)?;
    started.iter_mut().try_for_each(Gated::go)?;
    let ended: Result<Vec<Value>, String> = started.into_iter().map(Gated::end).collect();
    let mut parts = Map::new();
    for mut one in ended? {
        let pid = one["pid"].clone();
        for (name, part) in one["parts"].as_object_mut().into_iter().flatten() {
            part["pid"] = pid.clone();
            parts.insert(name.clone(), part.take());
        }
    }
    Ok(json!({ "pid": std::process::id(), "parts": parts }))
}

/// A load in a process of its own that waits at the gate.
struct Gated {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Gated {
    fn start(settings: &Settings) -> Result<Gated, String> {
        let file = std::env::current_exe().map_err(|error| format!("no file to start again: {error}"))?;
        let mut command = Command::new(file);
        command.args(["load", "mixed", "--gate"]).args(arguments(settings));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{command:?} can't be started: {error}"))?;
        let output = BufReader::new(child.stdout.take().expect("standard output is a pipe"));
        Ok(Gated { child, output })
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(1..) => Ok(line),
            Ok(_) => Err("a part of the load ended early".to_owned()),
            Err(error) => Err(format!("a part of the load can't be heard: {error}")),
        }
    }

    fn wait_until_filled(&mut self) -> Result<(), String> {
        self.line().map(|_| ())
    }

    fn go(&mut self) -> Result<(), String> {
        let input = self.child.stdin.as_mut().expect("standard input is a pipe");
        input.write_all(b"!").map_err(|error| format!("a part of the load is gone: {error}"))
    }

    fn end(mut self) -> Result<Value, String> {
        let line = self.line()?;
        let status =
            self.child.wait().map_err(|error| format!("a part of the load can't be waited for: {error}"))?;
        if !status.success() {
            return Err(format!("a part of the load ended with {status}"));
        }
        serde_json::from_str(&line).map_err(|error| format!("a part of the load printed no JSON: {error}"))
    }
}

/// Returns the settings as words of a command line.
fn arguments(settings: &Settings) -> Vec<String> {
    let numbers = [
        ("--bytes", settings.bytes.to_string()),
        ("--threads", settings.threads.to_string()),
        ("--random-bytes", settings.random_bytes.to_string()),
        ("--random-threads", settings.random_threads.to_string()),
        ("--seconds", settings.seconds.to_string()),
        ("--write-percent", settings.write_percent.to_string()),
        ("--seed", settings.seed.to_string()),
    ];
    let flags = [("--noise", settings.noise), ("--shared", settings.shared)];
    let numbers = numbers.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
    numbers.chain(flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| (*name).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::region::PAGE_BYTES;

    fn settings() -> Settings {
        let bytes = 64 * PAGE_BYTES as u64;
        Settings {
            bytes,
            random_bytes: bytes,
            threads: 2,
            random_threads: 2,
            seconds: 0.02,
            ..Settings::default()
        }
    }

    fn touches(result: &Value, part: &str) -> Option<u64> {
        result["parts"][part]["touches"].as_u64()
    }

    #[test]
    fn mixed_load_has_both_parts_in_mappings_of_their_own_or_in_one() {
        for (shared, noise) in [(false, true), (true, false)] {
            let result = mixed(&Settings { shared, noise, ..settings() }).unwrap();
            for part in ["sequential", "random"] {
                assert!(touches(&result, part) > Some(0), "{result}");
                assert_eq!(result["parts"][part]["threads"], 2);
            }
        }
    }

    #[test]
    fn part_without_threads_is_left_out() {
        let result = mixed(&Settings { random_threads: 0, ..settings() }).unwrap();
        assert_eq!(result["parts"].as_object().map(Map::len), Some(1));
    }

    #[test]
    fn other_walks_have_one_part() {
        for load in [interleaved, strided, backward] {
            let result = load(&Settings { stride: 3, ..settings() }).unwrap();
            assert!(touches(&result, "sequential") > Some(0), "{result}");
        }
    }
}

//! Real threads. Each takes batches of slots and frees as many at random, so the area stays equally full.

use super::stage::{Player, Setting, with_stage};
use crate::measure::on_threads;
use farpage_core::areas::slots::probe::{Locked, Probe, Unwatched};
use farpage_core::sync::{Guard, Lock, Parker, set_parker};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Returns slots per second, all threads together.
pub fn speed(setting: Setting, duration: Duration) -> f64 {
    let played = play(setting, duration, Unwatched, |_, _| ());
    played.slots as f64 / played.seconds
}

/// Figures that only a probe sees. The probe makes the run slower.
pub struct Seen {
    /// Share of the threads' time spent waiting for locks.
    pub waiting: f64,
    /// Slots found by one refill.
    pub refill: f64,
    /// Slots of a run that one write can merge.
    pub run: f64,
}

/// Runs the same threads with a probe.
pub fn watch(setting: Setting, duration: Duration) -> Seen {
    let mut looks = [[0; 3]; 2];
    let played = play(setting, duration, Watch::default(), |watch, at| {
        let counters = [&watch.waited_ns, &watch.refills, &watch.refilled];
        looks[at as usize] = counters.map(|counter| counter.load(Ordering::Relaxed));
    });
    // The counts of filling the area are subtracted.
    let [waited_ns, refills, refilled] = std::array::from_fn(|at| (looks[1][at] - looks[0][at]) as f64);
    Seen {
        waiting: waited_ns / 1e9 / (played.seconds * setting.cpus as f64),
        refill: refilled / refills,
        run: played.slots as f64 / played.runs as f64,
    }
}

/// The moment at which the probe is read.
#[derive(Clone, Copy)]
enum Look {
    Before = 0,
    After = 1,
}

struct Played {
    slots: u64,
    runs: u64,
    seconds: f64,
}

fn play<P: Probe + Sync>(
    setting: Setting,
    duration: Duration,
    probe: P,
    mut look: impl FnMut(&P, Look),
) -> Played {
    wait_by_futex();
    with_stage(setting, probe, |stage, players| {
        let players: Vec<_> = players.into_iter().map(Mutex::new).collect();
        look(stage.slots.probe(), Look::Before);
        let times: Vec<_> = (0..setting.cpus).map(|_| Mutex::new(None)).collect();
        on_threads(setting.cpus, |thread| {
            let mut player = players[thread].lock().expect("its own thread's");
            let began = Instant::now();
            while began.elapsed() < duration {
                player.take(stage);
                player.count_runs();
                while !player.free(stage) {}
            }
            *times[thread].lock().expect("its own thread's") = Some((began, Instant::now()));
        });
        look(stage.slots.probe(), Look::After);
        // With more threads than CPUs, threads begin one after another. The time runs from the first thread's
        // start to the last thread's end.
        let times: Vec<_> = times.into_iter().filter_map(|time| time.into_inner().expect("done")).collect();
        let began = times.iter().map(|time| time.0).min().expect("a thread");
        let ended = times.iter().map(|time| time.1).max().expect("a thread");
        let sum =
            |of: fn(&Player) -> u64| players.iter().map(|player| of(&player.lock().expect("done"))).sum();
        Played {
            slots: sum(|player| player.slots),
            runs: sum(|player| player.runs),
            seconds: (ended - began).as_secs_f64(),
        }
    })
}

/// Times waits, and counts refills.
#[derive(Default)]
struct Watch {
    waited_ns: AtomicU64,
    refills: AtomicU64,
    refilled: AtomicU64,
}

impl Probe for Watch {
    fn lock<'a, T, const RANK: u8>(&self, _name: Locked, lock: &'a Lock<T, RANK>) -> Guard<'a, T, RANK> {
        lock.try_lock().unwrap_or_else(|| {
            let began = Instant::now();
            let guard = lock.lock();
            self.waited_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            guard
        })
    }

    fn refilled(&self, slots: u32) {
        self.refills.fetch_add(1, Ordering::Relaxed);
        self.refilled.fetch_add(slots.into(), Ordering::Relaxed);
    }
}

/// Makes threads wait as in a live engine, asleep in the kernel.
fn wait_by_futex() {
    static PARKER: Parker = Parker { wait, wake };
    set_parker(&PARKER);
}

fn wait(word: &AtomicU32, expected: u32) {
    futex(word, libc::FUTEX_WAIT, expected);
}

fn wake(word: &AtomicU32, count: u32) {
    futex(word, libc::FUTEX_WAKE, count);
}

fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let no_timeout = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is alive. Without a timeout the kernel reads nothing but the word. Every result is
    // fine, because a waiting thread looks at the word again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation | libc::FUTEX_PRIVATE_FLAG,
            value,
            no_timeout,
        );
    }
}

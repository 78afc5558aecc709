//! Dormant processes, seen by the supervisor. A dormant process has no engine that would report
//! its size, or end it.
//!
//! The supervisor measures dormant processes ten times a second. If the supervisor is killed, the kernel
//! kills them. For each dormant process the supervisor holds reading ends of two pipes. Through a reading end
//! the kernel sends SIGKILL when the last writing end is closed (F_SETSIG). A reading end that was closed
//! before sends nothing. The kernel closes the files of a dead process in the order of their numbers, up or
//! down. So the writing end of one pipe has a lower number than the reading ends. The writing end of the
//! other pipe has a higher number.

use crate::host::neighbours::Holding;
use crate::host::sys;
use crate::supervise::outside;
use crate::supervise::session::Shared;
use crate::supervise::totals;
use crate::text::say;
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_runtime::engine::dormant::WAKES;
use farpage_runtime::session::{Notice, PROCESSES_MAX, ProcessRecord};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most processes that are measured in one look. Each takes some 20 µs.
const LOOK_AT_MAX: usize = 32;
/// Bytes that a process may have beyond what it has announced: the loader maps libraries past our hooks.
const UNSAID_BYTES_MAX: u64 = 4 << 20;
/// Lowest descriptor numbers for the writing end of the second pipe. The second number serves where the limit
/// of open files is below the first.
const HIGH: [i32; 2] = [900, 200];
/// Pause between two searches for what dead processes have left.
const REAP: Duration = Duration::from_secs(1);
/// How long processes that the program has left behind have for starting an engine.
const PATIENCE: Duration = Duration::from_millis(500);

/// The dormant processes of a run.
#[derive(Default)]
pub struct Dormants {
    /// The record that is measured next.
    next: usize,
    /// Time of the last search for what dead processes have left.
    reaped: Option<Instant>,
    /// Reading ends, by the process that each pair kills.
    ends: BTreeMap<u32, [File; 2]>,
    pipes: Option<[Pipe; 2]>,
}

impl Dormants {
    /// Looks once more.
    pub fn look(&mut self, shared: &Shared) {
        let records = &shared.session().processes;
        let all = numbers(shared);
        let pids: Vec<u32> = all.iter().map(|at| pid(&records[*at])).collect();
        self.ends.retain(|known, _| pids.contains(known));
        pids.into_iter().for_each(|pid| self.ends_with_us(pid));
        let (before, after) = all.split_at(all.partition_point(|at| *at < self.next));
        for at in after.iter().chain(before).take(LOOK_AT_MAX) {
            self.next = at + 1;
            measure(&records[*at]);
        }
        if !all.is_empty() {
            let has = Holding::of(shared.session(), shared.file()).claimed.has;
            let beyond = all.iter().fold(0_u64, |sum, at| sum.saturating_add(said(&records[*at])));
            let seen = all.iter().fold(0_u64, |sum, at| sum.saturating_add(seen(&records[*at])));
            let together = has.saturating_sub(beyond).saturating_add(seen);
            shared.session().claims_peak.fetch_max(together, Ordering::Relaxed);
        }
        self.reap(shared, &all);
    }

    /// Has an engine give back what dead processes have on disk. Asks a dormant process for an
    /// engine if none is left.
    fn reap(&mut self, shared: &Shared, dormant: &[usize]) {
        let is_time = self.reaped.is_none_or(|at| at.elapsed() >= REAP);
        let has_engine = |at: usize| !dormant.contains(&at) && shared.is_alive(at);
        if dormant.is_empty() || !is_time || (0..PROCESSES_MAX).any(has_engine) {
            return;
        }
        self.reaped = Some(Instant::now());
        if shared.has_leases() {
            ask(&shared.session().processes[dormant[0]]);
        }
    }

    /// Has the kernel end a process if we are killed.
    fn ends_with_us(&mut self, pid: u32) {
        // Any process of the run can write any number into a record.
        if self.ends.contains_key(&pid) || !outside::is_of_run(pid) {
            return;
        }
        if self.pipes.is_none() {
            self.pipes = pipes().ok();
        }
        let Some([low, high]) = &self.pipes else { return };
        if let (Ok(low), Ok(high)) = (low.end_for(pid), high.end_for(pid))
            // The id still means the same process.
            && outside::is_of_run(pid)
        {
            self.ends.insert(pid, [low, high]);
        }
    }

    /// Gives an engine to each process that the program has left behind. Engines can't be started once the
    /// supervisor is gone. Returns the names of processes that have none. Called when the program has ended.
    pub fn left_behind(&mut self, shared: &Shared) -> Vec<String> {
        self.ends.clear();
        let records = &shared.session().processes;
        // From now on no process joins without an engine.
        shared.session().is_ending.store(1, Ordering::Relaxed);
        let (mut asked, mut left, until) = (BTreeSet::new(), numbers(shared), Instant::now() + PATIENCE);
        while !left.is_empty() && Instant::now() < until {
            left.iter().filter(|at| asked.insert(**at)).for_each(|at| ask(&records[*at]));
            std::thread::sleep(Duration::from_millis(1));
            left = numbers(shared);
        }
        let name = |at: &usize| {
            let record = &records[*at];
            format!("{} (pid {})", say::harmless(&totals::command(record)), pid(record))
        };
        left.iter().map(name).collect()
    }

    /// Ends all dormant processes, as if we had been killed.
    pub fn end_all(&mut self) {
        // This closes the last writing ends of both pipes.
        self.pipes = None;
    }
}

fn is_dormant(shared: &Shared, at: usize) -> bool {
    shared.session().processes[at].dormant_bytes.load(Ordering::Relaxed) > 0 && shared.is_alive(at)
}

/// Returns the records of all dormant processes.
fn numbers(shared: &Shared) -> Vec<usize> {
    (0..PROCESSES_MAX).filter(|at| is_dormant(shared, *at)).collect()
}

fn pid(record: &ProcessRecord) -> u32 {
    record.pid.load(Ordering::Relaxed)
}

/// Returns what a process has announced that it can have, in bytes.
fn said(record: &ProcessRecord) -> u64 {
    record.dormant_bytes.load(Ordering::Relaxed)
}

/// Returns what a process was seen to have, in bytes.
fn seen(record: &ProcessRecord) -> u64 {
    record.stats.gauge(Gauge::Anonymous)
}

fn measure(record: &ProcessRecord) {
    // In another pid namespace the id belongs to another process.
    let pid = Some(pid(record)).filter(|pid| outside::is_of_run(*pid));
    let look = || {
        let before = said(record);
        Some((pid.and_then(anonymous_bytes)?, [before, said(record)]))
    };
    let Some((bytes, said)) = look() else { return };
    if said.contains(&0) {
        return;
    }
    record.stats.set(Gauge::Anonymous, bytes);
    record.stats.raise(Gauge::AnonymousPeak, bytes);
    record.stats.raise(Gauge::ProgramPeak, bytes);
    // The process may have mapped much and unmapped it between the reads of the two words.
    let is_again = || look().is_some_and(|(bytes, said)| is_unsaid(bytes, said));
    if is_unsaid(bytes, said) && is_again() && record.noticed(Notice::Alone).is_none() {
        record.notice(Notice::Grew, bytes);
        ask(record);
    }
}

/// Whether a process has more than it has announced. `said` is what it announced before it was measured and
/// after. A process announces 0 when it starts an engine.
fn is_unsaid(bytes: u64, said: [u64; 2]) -> bool {
    !said.contains(&0) && bytes.saturating_sub(said[0].max(said[1])) > UNSAID_BYTES_MAX
}

/// Asks a process to start an engine.
fn ask(record: &ProcessRecord) {
    let pid = pid(record);
    // The descriptor means this process even if another process gets its id meanwhile.
    if let Ok(process) = sys::open_process(pid)
        && outside::is_of_run(pid)
        && expects_the_signal(pid)
    {
        sys::send_signal_to(&process, WAKES as i32);
    }
}

/// Whether a process handles the signal, and doesn't wait for it in another way.
fn expects_the_signal(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let has = |name: &str| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask & 1 << (WAKES - 1) != 0)
    };
    has("SigCgt:") && !has("SigBlk:") && !is_waiting_for_signals(pid)
}

/// Whether a process waits for signals by rt_sigtimedwait. The kernel opens them meanwhile, and the wait
/// would return ours. Only for a process that we may look at.
fn is_waiting_for_signals(pid: u32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    call.split(' ').next() == Some(&libc::SYS_rt_sigtimedwait.to_string())
}

fn anonymous_bytes(pid: u32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = statm.split(' ').map(str::parse::<u64>);
    let (resident, shared) = (pages.nth(1)?.ok()?, pages.next()?.ok()?);
    Some(resident.saturating_sub(shared).saturating_mul(PAGE_BYTES as u64))
}

/// A pipe that nobody writes to.
struct Pipe {
    reads: OwnedFd,
    /// The last writing end, which is closed when this process ends or the value is dropped.
    _writes: OwnedFd,
}

/// Makes the two pipes that the head of this file describes.
fn pipes() -> io::Result<[Pipe; 2]> {
    let (reads, writes) = io::pipe()?;
    let low = Pipe { reads: reads.into(), _writes: writes.into() };
    let (reads, writes) = io::pipe()?;
    let writes = OwnedFd::from(writes);
    let _writes = sys::duplicate_from(&writes, HIGH[0]).or_else(|_| sys::duplicate_from(&writes, HIGH[1]))?;
    Ok([low, Pipe { reads: reads.into(), _writes }])
}

impl Pipe {
    /// Returns a reading end that ends a process when the reading end outlives the writing end.
    fn end_for(&self, pid: u32) -> io::Result<File> {
        let end = File::open(format!("/proc/self/fd/{}", self.reads.as_raw_fd()))?;
        sys::signal_at_events(&end, pid, libc::SIGKILL)?;
        Ok(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that just starts an engine must not be told of as one that has more memory than it
    /// had asked libc for.
    #[test]
    fn process_that_starts_an_engine_meanwhile_has_not_grown_unsaid() {
        const MIB: u64 = 1 << 20;
        assert!(is_unsaid(9 * MIB, [4 * MIB, 4 * MIB]));
        assert!(!is_unsaid(8 * MIB, [4 * MIB, 4 * MIB]), "the loader maps libraries");
        assert!(!is_unsaid(9 * MIB, [4 * MIB, 0]), "it has an engine now");
        assert!(!is_unsaid(9 * MIB, [0, 4 * MIB]), "its record is another process's now");
        assert!(!is_unsaid(9 * MIB, [4 * MIB, 6 * MIB]) && !is_unsaid(9 * MIB, [6 * MIB, 4 * MIB]));
    }
}

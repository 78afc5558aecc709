//! `farpage bench device`: the share of a disk's bandwidth that reaches a program that walks through evicted
//! memory.
//!
//! The rival is fio, which only reads. fio reads a file in Farpage's swap directory, past the page cache. The
//! first of fio's ways has Farpage's mean block size and mean number of requests in flight, taken from the
//! kernel's counters of the disk. The other ways have other sizes, and the best of all ways counts as the
//! disk's bandwidth. The program reads each page of memory that doesn't compress and is mostly out. The
//! number of pages that were in memory at their touch isn't known. The largest possible number is subtracted,
//! so the reported rate is a lower bound.

use crate::Effort;
use crate::live;
use crate::load::region::PAGE_BYTES;
use crate::measure::{Random, Sample, interleaved_until_failure, ratio};
use crate::report::{Cell, Chart, Report, Table, Target};
use crate::stop;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Share of fio's rate that is to reach the program.
const WANTED: f64 = 0.8;
/// The other ways of fio: bytes of a block, and requests in flight.
const FIO: [(&str, &str); 6] =
    [("32k", "1"), ("32k", "8"), ("128k", "1"), ("128k", "8"), ("1m", "1"), ("1m", "4")];
/// Pages that don't compress. The program's pages are copies of them.
const NOISE_PAGES: usize = 256;

/// Files that are removed at the end of the benchmark.
struct Files {
    read: PathBuf,
    noise: PathBuf,
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.read);
        let _ = std::fs::remove_file(&self.noise);
    }
}

/// Runs fio's ways and Farpage in turns.
pub fn run(effort: Effort) -> Result<Report, String> {
    let (ram, bytes) = (effort.pick(128, 32) * MIB, effort.pick(1024, 96) * MIB);
    let (seconds, rounds) = (effort.pick(4.0, 0.3), effort.pick(5, 1));
    let (directory, temporary) = (live::swap_directory()?, live::temporary()?);
    let name = format!("farpage-bench-device-{}", std::process::id());
    let files = Files { read: directory.join(&name), noise: temporary.join(name) };
    // Ctrl-C becomes an error, so that the files are removed then, too.
    let _hearing = stop::hear();
    write_noise(&files.noise)?;
    // One run before the counted ones shows how Farpage reads.
    let before = Reads::of(&directory);
    farpage(&files.noise, &directory, ram, bytes, seconds)?;
    let alike = before.and_then(|before| Reads::of(&directory)?.since(&before));
    let own = alike.as_ref().ok().map(|(block, depth)| (block.as_str(), depth.as_str()));
    let ways: Vec<(&str, &str)> = own.into_iter().chain(FIO).collect();
    let (mut fio, failed) = interleaved_until_failure(rounds, ways.len() + 1, |who| {
        stop::go_on()?;
        match ways.get(who) {
            Some((block, depth)) => fio(&files.read, bytes, seconds, block, depth),
            None => farpage(&files.noise, &directory, ram, bytes, seconds),
        }
    })?;
    let ours = fio.pop().ok_or("no run of ours")?;
    let rounds = ours.len();
    // The best of each round, because the disk is shared and the speed of rounds varies.
    let best: Vec<f64> =
        (0..rounds).map(|round| fio.iter().map(|rates| rates[round]).fold(0.0, f64::max)).collect();
    let report = report(
        &ways,
        &alike,
        &fio,
        &ours,
        &best,
        &format!("{} MiB of {} MiB, {rounds} rounds of {seconds} s", ram / MIB, bytes / MIB),
    );
    Ok(Report { failed, ..report })
}

fn report(
    ways: &[(&str, &str)],
    alike: &Result<(String, String), String>,
    fio: &[Vec<f64>],
    ours: &[f64],
    best: &[f64],
    what: &str,
) -> Report {
    let mut table = Table::new("reading in order from the disk", &["who", "MiB/s", "ratio to fio's best"]);
    let mut chart = Chart {
        title: "Reading in order from the disk".to_owned(),
        unit: "MiB/s".to_owned(),
        groups: Vec::new(),
        series: vec![("read".to_owned(), Vec::new())],
    };
    let mut row = |who: String, rates: &[f64]| {
        chart.groups.push(who.clone());
        chart.series[0].1.push(Sample::of(rates).median);
        table.row(vec![Cell::from(who), Sample::of(rates).into(), ratio(rates, best).into()]);
    };
    for ((block, depth), rates) in ways.iter().zip(fio) {
        row(format!("fio {block} x{depth}"), rates);
    }
    row("a program's memory".to_owned(), ours);
    let mut report = Report::new("device");
    report.tables.push(table);
    report.charts.push(chart);
    report.published.push(
        "a machine like this: its disk 1,500 MiB/s; the kernel's swap 37,500 pages/s of memory read in order, which is 146 MiB/s"
            .to_owned(),
    );
    let (rival, than) = match alike {
        Ok(_) => ("fio with blocks as large and as many under way", &fio[0][..]),
        Err(_) => ("fio's best", best),
    };
    report.targets.push(Target::at_least(
        format!("memory read in order from the disk, to {rival} in the same round"),
        WANTED,
        ratio(ours, than).median,
    ));
    report.notes = vec![
        format!(
            "farpage run --faults signal --pool 1M -- farpage load touch --pattern sequential, pages that don't compress, none \
             written: {what}"
        ),
        "the program's rate is of the pages that can't have been in memory: as many as there are but for the budget".to_owned(),
        match alike {
            Ok((block, depth)) => format!("the first of fio's ways is as ours reads on average: {block}, {depth} under way"),
            Err(why) => format!("how ours reads on average isn't known: {why}"),
        },
        "fio --rw=read --direct=1 --ioengine=io_uring on a file in the same directory; nothing compares what it reads, while each \
         page of ours has its checksum looked at"
            .to_owned(),
    ];
    report
}

/// The kernel's counters of a disk.
struct Reads {
    requests: u64,
    sectors: u64,
    waited_ms: u64,
    busy_ms: u64,
}

impl Reads {
    /// Returns the counters of the disk that a directory is on.
    fn of(directory: &Path) -> Result<Reads, String> {
        let failed = |error| format!("what {} is on can't be found: {error}", directory.display());
        let device = std::fs::metadata(directory).map_err(failed)?.dev();
        let path = format!("/sys/dev/block/{}:{}/stat", libc::major(device), libc::minor(device));
        let text = std::fs::read_to_string(&path).map_err(|error| {
            format!("{path}: {error}; it takes a directory on a disk: FARPAGE_SWAP_DIR=DIRECTORY")
        })?;
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [requests, _, sectors, waited_ms, _, _, _, _, _, busy_ms, ..] => {
                Ok(Reads { requests, sectors, waited_ms, busy_ms })
            }
            _ => Err(format!("{path} has another form")),
        }
    }

    /// Returns the mean size of the reads since `before`, in fio's notation, and the mean number of reads in
    /// flight.
    fn since(&self, before: &Reads) -> Result<(String, String), String> {
        let requests = self.requests - before.requests;
        if requests == 0 {
            return Err("nothing was read from the disk".to_owned());
        }
        let kib = ((self.sectors - before.sectors) / 2 / requests).next_multiple_of(4).max(4);
        let busy_ms = (self.busy_ms - before.busy_ms).max(1);
        let depth = (self.waited_ms - before.waited_ms).div_ceil(busy_ms).max(1);
        Ok((format!("{kib}k"), depth.to_string()))
    }
}

/// Returns fio's rate in MiB per second.
fn fio(file: &Path, bytes: u64, seconds: f64, block: &str, depth: &str) -> Result<f64, String> {
    let mut command = Command::new("fio");
    command.args(["--name=read", "--rw=read", "--direct=1", "--ioengine=io_uring", "--time_based"]);
    command.args(["--output-format=json", &format!("--bs={block}"), &format!("--iodepth={depth}")]);
    command.args([&format!("--size={bytes}"), &format!("--runtime={seconds}")]);
    let output = command.arg(format!("--filename={}", file.display())).output().map_err(|error| {
        format!("fio can't be run ({error}); Debian's package is called fio: apt-get install fio")
    })?;
    if !output.status.success() {
        return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    // fio may print notes before the JSON.
    let start = output.stdout.iter().position(|byte| *byte == b'{').unwrap_or(0);
    let found: Value = serde_json::from_slice(&output.stdout[start..])
        .map_err(|error| format!("fio printed no JSON: {error}"))?;
    let rate = found["jobs"][0]["read"]["bw_bytes"].as_f64().ok_or("fio doesn't say how much it read")?;
    Ok(rate / MIB as f64)
}

/// Returns the program's rate in MiB per second, of the pages that can't have been in memory.
fn farpage(noise: &Path, directory: &Path, ram: u64, bytes: u64, seconds: f64) -> Result<f64, String> {
    let (ram_text, bytes_text) = (ram.to_string(), bytes.to_string());
    let (swap, noise, seconds) =
        (directory.display().to_string(), noise.display().to_string(), seconds.to_string());
    let options = ["--ram", &ram_text, "--swap", &swap, "--faults", "signal", "--pool", "1M"];
    let load = ["touch", "--pattern", "sequential", "--write-percent", "0", "--contents", &noise];
    let load = [&load[..], &["--bytes", &bytes_text, "--seconds", &seconds]].concat();
    let outcome = live::under(&options, &load)?;
    let out = (bytes - ram) as f64 / bytes as f64;
    Ok(outcome.part("sequential", "touches_per_second") * out * PAGE_BYTES as f64 / MIB as f64)
}

fn write_noise(file: &Path) -> Result<(), String> {
    let mut random = Random::new(7);
    let bytes: Vec<u8> =
        (0..NOISE_PAGES * PAGE_BYTES / 8).flat_map(|_| random.next().to_ne_bytes()).collect();
    std::fs::write(file, bytes).map_err(|error| format!("{} can't be written: {error}", file.display()))
}

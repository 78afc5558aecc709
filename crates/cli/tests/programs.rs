//! Real programs within at most 40 % of the memory that they need. The result is the same as without Farpage,
//! and the budget holds when it is measured from outside.
//!
//! Each program runs once without Farpage, which tells its result and its need. Then it runs with pages moved
//! (the default), copied, and without a disk. In a last variant the program runs as an ordinary user, without
//! userfaultfd and io_uring, as under a container's filter. `FARPAGE_TEST_SIZE=full` takes the large sizes
//! (`make test-full`). The usual sizes are about an eighth of these, so that `make test` stays short.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Outcome, Under, able, alone, alone_with, find, is_full_size};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The data that a program works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Data {
    /// Data that compresses well, as most programs' memory does.
    Plain,
    /// Data with noise in it: the pool is not enough.
    Noisy,
}

/// Where evicted pages went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Went {
    /// Some pages reached the area.
    ToTheArea,
    /// All pages stayed in the pool, although there was an area.
    ToThePool,
    /// The test doesn't ask.
    Anywhere,
}

/// Options of Farpage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Default,
    Copy,
    NoDisk,
    /// No options: an ordinary user without userfaultfd and io_uring.
    Container,
}

impl Variant {
    fn under(self, ram: u64) -> Under {
        match self {
            Variant::Default => Under::budget(ram, &[]),
            Variant::Copy => Under::budget(ram, &["--install", "copy"]),
            Variant::NoDisk => Under::budget(ram, &["--no-disk"]),
            Variant::Container => Under::Container { ram },
        }
    }
}

/// Returns the large size, or the usual one.
fn size(full: u64, usual: u64) -> u64 {
    if is_full_size() { full } else { usual }
}

/// Runs a program to its end. The result must be the same in all variants.
type Run = fn(&Under, Data) -> (String, Outcome);

/// Runs a program without and with a budget, and compares the results.
fn compare(name: &'static str, run: Run, data: Data, variant: Variant, went: Went) {
    // A program that waits for the disk leaves the processors to another program. At full size there is
    // memory for one only.
    let _alone = is_full_size().then(alone);
    let (expected, need) = unlimited(name, run, data);
    // The budget is at most 40 % of the need, in whole MiB.
    let ram = need * 2 / 5 / MIB * MIB;
    let (result, outcome) = run(&variant.under(ram), data);
    eprintln!(
        "{name}, {data:?}, {variant:?}: needs {} MiB, has {} MiB, sampled at most {} MiB; {:.1} s\n{}",
        need / MIB,
        ram / MIB,
        outcome.samples.peak_together() / MIB,
        outcome.seconds,
        outcome.stderr
    );
    outcome.succeeded();
    assert_eq!(result, expected, "the result differs:\n{}", outcome.stderr);
    outcome.held_its_budget();
    let written = outcome.counter("pswpout");
    match went {
        Went::ToTheArea => assert!(written > 0, "nothing reached the area:\n{}", outcome.stderr),
        Went::ToThePool => assert_eq!(written, 0, "{}", outcome.stderr),
        Went::Anywhere => {}
    }
    assert!(variant != Variant::NoDisk || written == 0);
    if variant == Variant::Container {
        let chosen = &outcome.stats["settings"];
        assert_eq!((&chosen["faults"], &chosen["io"]), (&"segv".into(), &"psync".into()), "{chosen}");
    }
}

/// Returns result and need of a run without Farpage, with which all variants are compared.
fn unlimited(name: &'static str, run: Run, data: Data) -> (String, u64) {
    type Known = HashMap<(&'static str, Data), (String, u64)>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    known
        .entry((name, data))
        .or_insert_with(|| {
            let (result, outcome) = run(&Under::Nothing, data);
            outcome.succeeded();
            (result, outcome.samples.peak_together())
        })
        .clone()
}

// ---- python3 -------------------------------------------------------------------------------------------

/// `python3` may be a script that looks for the real one.
fn python() -> String {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().into()
}

fn run_python(under: &Under, data: Data) -> (String, Outcome) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/objects.py");
    let kind = if data == Data::Plain { "plain" } else { "mixed" };
    let megabytes = size(1024, 120).to_string();
    // An interpreter that a script finds may be closed to an ordinary user.
    let executable = match under {
        Under::Container { .. } => "/usr/bin/python3".into(),
        _ => python(),
    };
    let outcome = Job::new(under, &[&executable, script, &megabytes, kind]).within(900).run();
    (outcome.text(), outcome)
}

fn python_with(variant: Variant, data: Data, went: Went) {
    if able("python3") {
        compare("python3", run_python, data, variant, went);
    }
}

#[test]
fn python_objects_stay_in_the_pool() {
    python_with(Variant::Default, Data::Plain, Went::ToThePool);
}

#[test]
fn python_objects_with_noise() {
    python_with(Variant::Default, Data::Noisy, Went::ToTheArea);
}

#[test]
fn python_objects_copied() {
    python_with(Variant::Copy, Data::Plain, Went::Anywhere);
}

#[test]
fn python_objects_in_a_container() {
    python_with(Variant::Container, Data::Noisy, Went::ToTheArea);
}

#[test]
fn python_objects_without_disk() {
    python_with(Variant::NoDisk, Data::Plain, Went::Anywhere);
}

/// There is no disk, and there are more records than the pool holds as they are compressed at first. The
/// pool must compress them once more. A thread that needs memory waits for that, or the program would go
/// far over its budget.
#[test]
fn python_records_that_only_fit_once_they_are_denser() {
    if !able("python3") {
        return;
    }
    let _alone = alone();
    let expected = records(&Under::Nothing, &["440000"]);
    for faults in ["signal", "thread", "segv"] {
        let outcome = records(&Under::budget(64 * MIB, &["--no-disk", "--faults", faults]), &["440000"]);
        eprintln!("{faults}: at most {} MiB\n{}", outcome.samples.peak_together() / MIB, outcome.stderr);
        assert_eq!(outcome.succeeded().text(), expected.succeeded().text(), "{}", outcome.stderr);
        outcome.held_its_budget();
        assert!(!outcome.stderr.contains("over the budget"), "{}", outcome.stderr);
        assert!(outcome.counter("pool_densified") > 10_000, "{}", outcome.stderr);
    }
}

/// The oldest pages can't become denser, and there are more of them than one search looks at. The search must
/// not conclude that nothing can become denser, or the program would go over its budget.
#[test]
fn python_records_behind_columns_are_made_denser() {
    if !able("python3") {
        return;
    }
    let _alone = alone();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/records.py");
    let columns = format!(
        "import array, sys; columns = [array.array('q', range(i, i + 512000, 1000)) for i in range(14000)]; \
         sys.argv = ['', '330000']; exec(open('{script}').read()); print(sum(map(sum, columns)))"
    );
    let run = |under: &Under| Job::new(under, &[&python(), "-c", &columns]).within(300).run();
    let expected = run(&Under::Nothing);
    let outcome = run(&Under::budget(64 * MIB, &["--no-disk"]));
    eprintln!("at most {} MiB\n{}", outcome.samples.peak_together() / MIB, outcome.stderr);
    assert_eq!(outcome.succeeded().text(), expected.succeeded().text(), "{}", outcome.stderr);
    outcome.held_its_budget();
    assert!(!outcome.stderr.contains("over the budget"), "{}", outcome.stderr);
    assert!(outcome.counter("pool_densified") > 10_000, "{}", outcome.stderr);
}

fn records(under: &Under, words: &[&str]) -> Outcome {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/records.py");
    Job::new(under, &[&[python().as_str(), script], words].concat()).within(300).run()
}

/// Pages that aren't asked for become denser without any need, and are asked for in the end.
#[test]
fn python_records_that_wait_become_denser() {
    if !able("python3") {
        return;
    }
    let _alone = is_full_size().then(alone);
    // The records become old in the first half of the time.
    let words = ["200000", "20000", "8"];
    let expected = records(&Under::Nothing, &["200000"]);
    let run = |codec| records(&Under::budget(64 * MIB, &["--no-disk", "--codec", codec]), &words);
    let (outcome, fast) = (run("auto"), run("fast"));
    for outcome in [&outcome, &fast] {
        assert_eq!(outcome.succeeded().text(), expected.succeeded().text(), "{}", outcome.stderr);
        outcome.held_its_budget();
    }
    // Only few pages become denser if other programs leave no time for more.
    assert!(outcome.counter("pool_densified") > 500, "{}", outcome.stderr);
    assert_eq!(fast.counter("pool_densified"), 0, "{}", fast.stderr);
}

/// Pages that compress share slots, and come back from the slots one by one and in order.
#[test]
fn python_records_share_slots() {
    if !able("python3") {
        return;
    }
    let _alone = is_full_size().then(alone);
    // All records are read in order at the end. The accesses before that are anywhere in the first third.
    let words = ["200000", "60000", "4"];
    let expected = records(&Under::Nothing, &["200000"]);
    for pack in ["on", "off"] {
        let outcome = records(&Under::budget(48 * MIB, &["--pool", "1M", "--pack", pack]), &words);
        assert_eq!(outcome.succeeded().text(), expected.succeeded().text(), "{}", outcome.stderr);
        outcome.held_its_budget();
        let (pages, slots) = (outcome.counter("pswpout"), outcome.counter("area_slots"));
        assert!(pages > 5000 && outcome.counter("pswpin") > 5000, "{}", outcome.stderr);
        match pack {
            "on" => assert!(slots * 3 < pages * 2, "{slots} slots for {pages} pages: {}", outcome.stderr),
            _ => assert!(slots >= pages, "{slots} slots for {pages} pages: {}", outcome.stderr),
        }
    }
}

/// Runs forked workers. Each reads the memory of its parent that was evicted, and changes it, while the
/// parent changes it, too.
fn run_workers(under: &Under, _: Data) -> (String, Outcome) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/programs/workers.py");
    let outcome = Job::new(under, &[&python(), script, &size(512, 100).to_string()]).within(900).run();
    (outcome.text(), outcome)
}

#[test]
fn python_workers_have_what_was_out_at_the_fork() {
    if able("python3") {
        compare("workers", run_workers, Data::Plain, Variant::Default, Went::Anywhere);
    }
}

// ---- sort ----------------------------------------------------------------------------------------------

/// A generator of the same numbers everywhere (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

/// Returns `bytes` of text: all noise, or mostly not.
fn text(random: &mut Random, bytes: usize, data: Data) -> String {
    let mut line = String::with_capacity(bytes + 16);
    while line.len() < bytes {
        match data {
            Data::Noisy => write!(line, "{:016x}", random.next()).unwrap(),
            Data::Plain if line.is_empty() => write!(line, "{:08x} ", random.next() as u32).unwrap(),
            Data::Plain => line.push_str("a line like all others "),
        }
    }
    line.truncate(bytes);
    line
}

fn lines(path: &Path, bytes: u64, data: Data) {
    let mut random = Random(7);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).unwrap());
    // Merging touches lines in random order, and each line costs a read from the area. Longer
    // lines mean fewer reads.
    let line_bytes = size(1000, 500);
    for _ in 0..bytes / line_bytes {
        let mut line = text(&mut random, line_bytes as usize - 1, data);
        line.push('\n');
        file.write_all(line.as_bytes()).unwrap();
    }
}

fn run_sort(under: &Under, data: Data) -> (String, Outcome) {
    let buffer = size(1024, 110).to_string() + "M";
    let job = Job::new(under, &["sort", "--parallel=2", "-S", &buffer, "-T", ".", "-o", "sorted", "lines"]);
    lines(&job.place.path().join("lines"), size(600_000_000, 60_000_000), data);
    let outcome = job.within(900).run();
    let mut hasher = DefaultHasher::new();
    let mut file = BufReader::new(File::open(outcome.place.path().join("sorted")).unwrap());
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let got = file.read(&mut buffer).unwrap();
        if got == 0 {
            return (format!("{bytes} bytes, {:x}", hasher.finish()), outcome);
        }
        // `write` and not `hash`, because the sizes of the reads must not matter.
        hasher.write(&buffer[..got]);
        bytes += got;
    }
}

fn sort_with(variant: Variant, data: Data, went: Went) {
    if able("sort") {
        compare("sort", run_sort, data, variant, went);
    }
}

#[test]
fn sort_spills_to_the_area() {
    sort_with(Variant::Default, Data::Noisy, Went::ToTheArea);
}

#[test]
fn sort_copied() {
    sort_with(Variant::Copy, Data::Noisy, Went::ToTheArea);
}

#[test]
fn sort_in_a_container() {
    sort_with(Variant::Container, Data::Plain, Went::Anywhere);
}

#[test]
fn sort_without_disk() {
    sort_with(Variant::NoDisk, Data::Plain, Went::Anywhere);
}

// ---- redis-server --------------------------------------------------------------------------------------

const VALUE_BYTES: usize = 1000;
/// Commands sent before answers are read.
const AT_ONCE: u64 = 256;

fn value(key: u64, data: Data) -> String {
    text(&mut Random(key), VALUE_BYTES, data)
}

struct Redis {
    to: BufWriter<UnixStream>,
    from: BufReader<UnixStream>,
}

impl Redis {
    fn connect(socket: &Path) -> Redis {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "redis-server: {error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        // A server that hangs fails the test instead of holding it.
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Redis { to: BufWriter::new(stream.try_clone().unwrap()), from: BufReader::new(stream) }
    }

    fn send(&mut self, words: &[&str]) {
        write!(self.to, "*{}\r\n", words.len()).unwrap();
        for word in words {
            write!(self.to, "${}\r\n{word}\r\n", word.len()).unwrap();
        }
    }

    fn say(&mut self, words: &[&str]) {
        self.send(words);
        self.to.flush().unwrap();
    }

    /// Returns the server's answer, if the answer is one line.
    fn ask(&mut self, words: &[&str]) -> String {
        self.say(words);
        self.line()
    }

    /// Returns a value of INFO persistence.
    fn persistence(&mut self, name: &str) -> String {
        self.say(&["INFO", "persistence"]);
        let info = String::from_utf8(self.bulk()).unwrap();
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("{name} isn't in {info}")).trim().into()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    fn bulk(&mut self) -> Vec<u8> {
        let line = self.line();
        let bytes: usize =
            line.strip_prefix('$').and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{line}"));
        let mut value = vec![0; bytes + 2];
        self.from.read_exact(&mut value).unwrap();
        value.truncate(bytes);
        value
    }

    fn fill(&mut self, keys: u64, data: Data) {
        for first in (0..keys).step_by(AT_ONCE as usize) {
            let batch = first..(first + AT_ONCE).min(keys);
            for key in batch.clone() {
                self.send(&["SET", &format!("key:{key}"), &value(key, data)]);
            }
            self.to.flush().unwrap();
            for _ in batch {
                assert_eq!(self.line(), "+OK");
            }
        }
    }

    /// Reads every value in an order that has nothing to do with the order of writing. Returns a
    /// digest of all values.
    fn digest(&mut self, keys: u64, data: Data) -> u64 {
        let mut sum = 0_u64;
        // The stride is odd and has no common factor with the number of keys, so each key comes once.
        let stride = (1..).map(|i| 7919 + 2 * i).find(|stride| gcd(*stride, keys) == 1).unwrap();
        for first in (0..keys).step_by(AT_ONCE as usize) {
            let batch: Vec<_> = (first..(first + AT_ONCE).min(keys)).map(|i| i * stride % keys).collect();
            for key in &batch {
                self.send(&["GET", &format!("key:{key}")]);
            }
            self.to.flush().unwrap();
            for key in batch {
                let found = self.bulk();
                assert!(found == value(key, data).as_bytes(), "key {key} has another value");
                let mut hasher = DefaultHasher::new();
                (key, found).hash(&mut hasher);
                sum = sum.wrapping_add(hasher.finish());
            }
        }
        sum
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn run_redis(under: &Under, data: Data) -> (String, Outcome) {
    let keys = size(500_000_000, 80_000_000) / VALUE_BYTES as u64;
    let words = ["redis-server", "--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no"];
    let running = Job::new(under, &words).within(900).start();
    let mut redis = Redis::connect(&running.place().join("socket"));
    redis.fill(keys, data);
    let digests = [redis.digest(keys, data), redis.digest(keys, data)];
    let count = redis.ask(&["DBSIZE"]);
    redis.say(&["SHUTDOWN", "NOSAVE"]);
    (format!("{count} {digests:x?}"), running.end())
}

/// Saves in the background while half of the values change. Then a server without Farpage reads the file,
/// which has everything as of the fork.
fn run_redis_that_saves(under: &Under, data: Data) -> (String, Outcome) {
    let keys = size(400_000_000, 60_000_000) / VALUE_BYTES as u64;
    let words = ["redis-server", "--port", "0", "--unixsocket", "socket", "--save", "", "--appendonly", "no"];
    let running = Job::new(under, &words).within(900).start();
    let mut redis = Redis::connect(&running.place().join("socket"));
    redis.fill(keys, data);
    assert_eq!(redis.ask(&["BGSAVE"]), "+Background saving started");
    for key in 0..keys / 2 {
        assert_eq!(redis.ask(&["SET", &format!("key:{key}"), "another value"]), "+OK");
    }
    let start = Instant::now();
    while redis.persistence("rdb_bgsave_in_progress") != "0" {
        assert!(start.elapsed() < Duration::from_secs(600), "it doesn't end");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(redis.persistence("rdb_last_bgsave_status"), "ok");
    redis.say(&["SHUTDOWN", "NOSAVE"]);
    let outcome = running.end();

    let loads = Job::new(&Under::Nothing, &words);
    fs::copy(outcome.place.path().join("dump.rdb"), loads.place.path().join("dump.rdb")).unwrap();
    let running = loads.within(300).start();
    let mut redis = Redis::connect(&running.place().join("socket"));
    while redis.ask(&["DBSIZE"]).starts_with("-LOADING") {
        std::thread::sleep(Duration::from_millis(50));
    }
    let digest = redis.digest(keys, data);
    redis.say(&["SHUTDOWN", "NOSAVE"]);
    running.end().succeeded();
    (format!("{keys} {digest:x}"), outcome)
}

#[test]
fn redis_saves_in_the_background() {
    if able("redis-server") {
        compare("redis-server BGSAVE", run_redis_that_saves, Data::Noisy, Variant::Default, Went::ToTheArea);
    }
}

fn redis_with(variant: Variant, data: Data, went: Went) {
    if able("redis-server") {
        compare("redis-server", run_redis, data, variant, went);
    }
}

#[test]
fn redis_spills_to_the_area() {
    redis_with(Variant::Default, Data::Noisy, Went::ToTheArea);
}

#[test]
fn redis_copied() {
    redis_with(Variant::Copy, Data::Noisy, Went::ToTheArea);
}

#[test]
fn redis_in_a_container() {
    redis_with(Variant::Container, Data::Plain, Went::Anywhere);
}

#[test]
fn redis_without_disk() {
    redis_with(Variant::NoDisk, Data::Plain, Went::Anywhere);
}

// ---- sqlite3 -------------------------------------------------------------------------------------------

fn run_sqlite(under: &Under, data: Data) -> (String, Outcome) {
    let rows = size(1_000_000, 200_000);
    // Deterministic noise: hex digits of a multiplied number, or the same text in every row.
    let text = match data {
        Data::Noisy => (1..=20)
            .map(|i| format!("printf('%016x', i * {} + (i << 40))", (6_364_136_223_846_793_005_u64 / i) | 1))
            .collect::<Vec<_>>()
            .join(" || "),
        Data::Plain => "printf('row %d: ', i) || printf('%.*c', 300, 'x') || ' and so on'".into(),
    };
    let script = format!(
        "PRAGMA cache_size = -1000000;
         CREATE TABLE data(id INTEGER PRIMARY KEY, class INTEGER, content TEXT);
         INSERT INTO data WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
           SELECT i, i * 7919 % 1009, {text} FROM n;
         CREATE INDEX by_class ON data(class);
         UPDATE data SET content = upper(content) WHERE class % 10 = 3;
         DELETE FROM data WHERE class % 20 = 7;
         SELECT class % 50, count(*), sum(length(content)), min(content) < max(content) FROM data GROUP BY 1 ORDER BY 1;
         PRAGMA integrity_check;
         .sha3sum\n"
    );
    let job = Job::new(
        under,
        &["sqlite3", "-batch", "-init", "script.sql", ":memory:", "SELECT count(*) FROM data"],
    );
    fs::write(job.place.path().join("script.sql"), script).unwrap();
    let outcome = job.within(900).run();
    (outcome.text(), outcome)
}

fn sqlite_with(variant: Variant, data: Data, went: Went) {
    if able("sqlite3") {
        compare("sqlite3", run_sqlite, data, variant, went);
    }
}

#[test]
fn sqlite_in_memory() {
    sqlite_with(Variant::Default, Data::Noisy, Went::Anywhere);
}

#[test]
fn sqlite_copied() {
    sqlite_with(Variant::Copy, Data::Noisy, Went::Anywhere);
}

#[test]
fn sqlite_in_a_container() {
    sqlite_with(Variant::Container, Data::Noisy, Went::Anywhere);
}

#[test]
fn sqlite_without_disk() {
    sqlite_with(Variant::NoDisk, Data::Plain, Went::Anywhere);
}

// ---- stress-ng -----------------------------------------------------------------------------------------

/// Runs stress-ng. The result is the program's verdict that every pattern was found again. The budget holds
/// for each of its two workers, which have half of the memory each.
fn run_stress(under: &Under, data: Data) -> (String, Outcome) {
    let bytes = size(512, 160).to_string() + "M";
    let seconds = size(60, 6).to_string();
    // Without a disk the pattern must compress.
    let method = if data == Data::Plain { "zero-one" } else { "all" };
    let words = [
        "stress-ng",
        "--vm",
        "2",
        "--vm-bytes",
        &bytes,
        "--vm-method",
        method,
        "--verify",
        "--timeout",
        &seconds,
    ];
    let outcome = Job::new(under, &words).within(300).run();
    let said = format!("{}{}", outcome.text(), outcome.stderr);
    let failed = ["fail:", "error:", "died"].iter().filter(|word| said.contains(**word)).count();
    let completed = said.contains("successful run completed") || said.contains("passed: 2");
    assert!(failed == 0 && completed, "{said}");
    ("verified".into(), outcome)
}

fn stress_with(variant: Variant, data: Data) {
    if able("stress-ng") {
        compare("stress-ng", run_stress, data, variant, Went::Anywhere);
    }
}

#[test]
fn stress_verifies_all_patterns() {
    stress_with(Variant::Default, Data::Noisy);
}

#[test]
fn stress_copied() {
    stress_with(Variant::Copy, Data::Noisy);
}

#[test]
fn stress_in_a_container() {
    stress_with(Variant::Container, Data::Noisy);
}

#[test]
fn stress_without_disk() {
    stress_with(Variant::NoDisk, Data::Plain);
}

// ---- within the budget ---------------------------------------------------------------------------------

#[test]
fn program_within_its_budget_registers_nothing() {
    let Some(_alone) = alone_with("python3") else { return };
    let script = "x = [bytes([i % 256]) * 1000 for i in range(50000)]; print(sum(map(len, x)))";
    let outcome = Job::new(&Under::budget(512 * MIB, &[]), &[&python(), "-c", script]).run();
    assert_eq!(outcome.succeeded().text(), "50000000\n");
    for name in ["registered", "evict_taken", "fault_first", "fault_pool", "pswpout", "zswpout"] {
        assert_eq!(outcome.counter(name), 0, "{name}: {}", outcome.stderr);
    }
}

#[test]
fn every_program_of_these_tests_is_there() {
    let missing: Vec<_> = ["python3", "sort", "redis-server", "sqlite3", "stress-ng"]
        .into_iter()
        .filter(|program| find(program).is_none())
        .collect();
    if !missing.is_empty() {
        farpage::skip(&format!("not installed: {}; `make programs` installs them", missing.join(", ")));
    }
}

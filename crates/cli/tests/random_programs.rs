//! Programs that do anything to their memory, in each way of serving faults: `tests/programs/random.c`,
//! which knows every byte.
//!
//! `make test` runs a few seeds, always the same. `make fuzz-programs DURATION=2h` runs new seeds from the
//! clock for that time (FARPAGE_TEST_DURATION). Each seed is printed. A failure prints the command that
//! does the same again.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{able, compiled, library, threads_below};
use farpage::group::Group;
use farpage::{directory, install, is_root, skip};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Seeds of each way in `make test`, and seconds of each run.
const SEEDS: u64 = 2;
const SECONDS: u64 = 4;
/// Seconds after which a run counts as hanging. The program gives up by itself a little later, should nobody
/// be there to end it. On a busy machine a run that is right may take more than a minute.
const PATIENCE: u64 = 240;
/// Seeds of a long search for each seed that may evict nothing. A keeper without a CPU comes too
/// late for a short run.
const SEEDS_FOR_ONE_IDLE: usize = 10;
const NOBODY: u32 = 65_534;

/// A way of serving faults.
#[derive(Clone, Copy)]
struct Way {
    faults: &'static str,
    install: &'static str,
    /// Whether the run is an ordinary user's, where the tests run as root.
    ordinary: bool,
    /// Whether the kernel reclaims memory from the run all the time: pages that it may drop are
    /// then gone at once.
    is_reclaimed: bool,
}

impl Way {
    const fn of(faults: &'static str, install: &'static str) -> Way {
        Way { faults, install, ordinary: false, is_reclaimed: false }
    }

    const fn ordinary(self) -> Way {
        Way { ordinary: true, ..self }
    }

    const fn reclaimed(self) -> Way {
        Way { is_reclaimed: true, ..self }
    }

    /// Returns the words of one run, with the files in `place`.
    fn words(self, place: &Path, seed: u64) -> Vec<String> {
        let name = |name: &str| place.join(name).to_str().unwrap().to_owned();
        let mut words = vec![name("farpage"), "run".into(), "--faults".into(), self.faults.into()];
        if !self.install.is_empty() {
            words.extend(["--install".into(), self.install.into()]);
        }
        let options = ["--ram", "10M", "--pool", "1M", "--readahead", "off", "--stats", "stats.json", "--"];
        words.extend(options.map(String::from));
        words.extend([name("random"), seed.to_string(), SECONDS.to_string(), "4".into(), "1500".into()]);
        if self.faults == "segv" {
            // A debugger's write to a page that is out would be lost: docs/user/limits.md.
            words.push("poke".into());
        }
        words
    }
}

/// Copies the files of a run to where an ordinary user reaches them.
fn prepare() -> tempfile::TempDir {
    let place = directory();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
    install(Path::new(env!("CARGO_BIN_EXE_farpage")), &place.path().join("farpage"), 0o755);
    install(&library(), &place.path().join("libfarpage_preload.so"), 0o755);
    install(&compiled("random"), &place.path().join("random"), 0o755);
    place
}

/// Waits for the child's end. If the end doesn't come, returns what each thread does.
fn end_of(child: &mut Child, seconds: u64) -> Result<ExitStatus, String> {
    let start = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            None if start.elapsed() > Duration::from_secs(seconds) => return Err(threads_below(child.id())),
            None => std::thread::sleep(Duration::from_millis(20)),
            Some(status) => return Ok(status),
        }
    }
}

/// Runs one seed. Returns how many pages were evicted, or what went wrong.
fn run(way: Way, place: &Path, group: Option<&Group>, seed: u64) -> Result<u64, String> {
    let words = way.words(place, seed);
    let mut command = Command::new(&words[0]);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FARPAGE_") {
            command.env_remove(name);
        }
    }
    let out = |name: &str| (place.join(name), Stdio::from(File::create(place.join(name)).unwrap()));
    let ((stdout_path, stdout), (stderr_path, stderr)) = (out("stdout"), out("stderr"));
    let _ = fs::remove_file(place.join("stats.json"));
    command.env("FARPAGE_PRELOAD", place.join("libfarpage_preload.so")).env_remove("TMPDIR");
    command.args(&words[1..]).current_dir(place).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    // The processes have a group, so that whatever is left of them is killed together.
    command.process_group(0);
    if way.ordinary {
        command.uid(NOBODY).gid(NOBODY);
    }
    if let Some(group) = group {
        group.enter(&mut command);
    }
    let mut child = command.spawn().unwrap();
    let status = end_of(&mut child, SECONDS + PATIENCE);
    // SAFETY: takes no pointers. The group is that of the process that was started here.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
    let _ = child.wait();
    let read = |path: &PathBuf| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    let (stdout, stderr) = (read(&stdout_path), read(&stderr_path));
    let stats: serde_json::Value =
        serde_json::from_slice(&fs::read(place.join("stats.json")).unwrap_or_default()).unwrap_or_default();
    let evicted = stats["counters"]["evict_taken"].as_u64().unwrap_or(0);
    let is_right = stdout.starts_with(&format!("OK seed {seed} pages-verified "));
    if status.as_ref().is_ok_and(ExitStatus::success) && is_right {
        eprint!("{} {} {evicted} pages evicted, {stdout}", way.faults, way.install);
        return Ok(evicted);
    }
    let status = status
        .map_or_else(|threads| format!("it did not end in time:\n{threads}"), |status| status.to_string());
    Err(format!(
        "seed {seed}: {status}, {evicted} pages evicted\n{stdout}{stderr}again: {}\n",
        again(way, group, seed)
    ))
}

/// Returns the command that does the same again, from the top of the repository.
fn again(way: Way, group: Option<&Group>, seed: u64) -> String {
    let place = Path::new("$D");
    let reclaim = group.map(Group::again).unwrap_or_default();
    let user = if way.ordinary { "setpriv --reuid 65534 --regid 65534 --clear-groups " } else { "" };
    format!(
        "make build && D=$(mktemp -d /var/tmp/random.XXXX) && chmod 777 $D && cc -O2 -o $D/random tests/programs/random.c \
         -lpthread && cp target/release/farpage target/release/libfarpage_preload.so $D && cd $D && {reclaim}{user}{}",
        way.words(place, seed).join(" ")
    )
}

/// Returns how long new seeds are to be tried, if they are: seconds, or a number with `s`, `m` or `h`.
fn duration() -> Option<Duration> {
    let text = std::env::var("FARPAGE_TEST_DURATION").ok()?;
    let (number, unit) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) => (number, &text[number.len()..]),
        None => (&text[..], "s"),
    };
    let seconds = match unit {
        "h" => 3600,
        "m" => 60,
        _ => 1,
    };
    let number: u64 =
        number.parse().unwrap_or_else(|_| panic!("FARPAGE_TEST_DURATION={text}: say 30m or 2h"));
    Some(Duration::from_secs(number * seconds))
}

fn check(way: Way, first_seed: u64) {
    if !able("cc") {
        return;
    }
    if way.ordinary && !is_root() {
        return skip("only root can become another user; the other cases run as this one");
    }
    let group = if way.is_reclaimed { Group::new() } else { None };
    let reclaim = group.as_ref().and_then(Group::reclaim);
    if way.is_reclaimed && reclaim.is_none() {
        return;
    }
    let place = prepare();
    let mut failures = Vec::new();
    let mut idle = Vec::new();
    let mut tried = 0;
    let mut try_seed = |seed| {
        tried += 1;
        match run(way, place.path(), group.as_ref(), seed) {
            Ok(0) => idle.push(seed),
            Ok(_) => {}
            Err(failure) => {
                eprintln!("{failure}");
                failures.push(failure);
            }
        }
    };
    let duration = duration();
    match duration {
        None => (0..SEEDS).for_each(|number| try_seed(first_seed + number)),
        Some(duration) => {
            let start = Instant::now();
            while start.elapsed() < duration {
                let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                try_seed(clock.as_millis() as u64);
            }
        }
    }
    if let Some(reclaim) = reclaim {
        assert!(reclaim.rounds() > 0, "the kernel reclaimed nothing");
    }
    assert!(failures.is_empty(), "{} seeds failed:\n{}", failures.len(), failures.join("\n"));
    let idle_max = if duration.is_some() { tried / SEEDS_FOR_ONE_IDLE } else { 0 };
    assert!(idle.len() <= idle_max, "of {tried} seeds these evicted nothing, and test nothing: {idle:?}");
}

#[test]
fn thread() {
    check(Way::of("thread", ""), 100);
}

#[test]
fn thread_copying() {
    check(Way::of("thread", "copy"), 200);
}

#[test]
fn signal() {
    check(Way::of("signal", ""), 300);
}

#[test]
fn signal_copying() {
    check(Way::of("signal", "copy"), 400);
}

#[test]
fn signal_as_ordinary_user() {
    check(Way::of("signal", "").ordinary(), 500);
}

#[test]
fn segv() {
    check(Way::of("segv", ""), 600);
}

#[test]
fn segv_as_ordinary_user() {
    check(Way::of("segv", "").ordinary(), 700);
}

/// Lazily freed pages are lost when the kernel is short of memory, and only then. On a machine with free
/// memory random programs don't find errors of this kind.
#[test]
fn thread_copying_beside_reclaim() {
    check(Way::of("thread", "copy").reclaimed(), 800);
}

#[test]
fn signal_copying_beside_reclaim() {
    check(Way::of("signal", "copy").reclaimed(), 900);
}

#[test]
fn segv_beside_reclaim() {
    check(Way::of("segv", "").reclaimed(), 1000);
}

#[test]
fn moving_beside_reclaim() {
    check(Way::of("thread", "").reclaimed(), 1100);
    check(Way::of("signal", "").reclaimed(), 1200);
}

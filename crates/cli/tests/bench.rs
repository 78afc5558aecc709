//! `farpage bench NAME --quick`: every experiment can be run, and its JSON has what it promises. The results
//! are not tested, because figures depend on the machine.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::{Ended, directory, farpage};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Runs an experiment, and checks its tables, targets and plot. Returns its JSON.
#[track_caller]
fn shows_what_it_found(experiment: &str, tables: usize) -> Value {
    let directory = directory();
    let [json, svg] = ["found.json", "found.svg"].map(|name| directory.path().join(name));
    let mut command = farpage();
    // Live experiments run real programs.
    command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
    command.args(["bench", experiment, "--quick"]).arg("--json").arg(&json).arg("--svg").arg(&svg);
    let ended = Ended::of(command.output().unwrap());
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let found: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(found["experiment"], experiment);
    let list = |value: &Value| value.as_array().expect("a list").clone();
    assert_eq!(list(&found["tables"]).len(), tables);
    for table in list(&found["tables"]) {
        let title = table["title"].as_str().unwrap();
        assert!(ended.stdout.contains(title), "`{title}` isn't in:\n{}", ended.stdout);
        assert!(!list(&table["rows"]).is_empty(), "`{title}` has no rows");
    }
    assert!(!list(&found["published"]).is_empty() && !list(&found["targets"]).is_empty());
    assert!(fs::read_to_string(&svg).unwrap().contains("<rect"), "a plot without bars");
    found
}

#[test]
fn codec_shows_what_it_found() {
    if farpage::budgeted::has("python3") {
        let found = shows_what_it_found("codec", 1);
        let rows = found["tables"][0]["rows"].as_array().unwrap();
        let size = |pages: &str, codec: &str| {
            let row = rows.iter().find(|row| row["pages"] == pages && row["codec"] == codec);
            row.unwrap()["size"].as_f64().unwrap()
        };
        // Sizes depend only on the interpreter, not on the machine.
        assert!(
            size("integers", "auto") < 0.35 && size("heap", "auto") < 1.2 * size("heap", "lz4"),
            "{rows:?}"
        );
        assert_eq!(size("packed", "auto"), 1.0);
        assert!(size("heap", "dense") < 0.85 * size("heap", "auto"), "{rows:?}");
    }
}

#[test]
fn device_shows_what_it_found() {
    if !farpage::budgeted::able("fio") {
        return;
    }
    let found = shows_what_it_found("device", 1);
    for row in found["tables"][0]["rows"].as_array().unwrap() {
        assert!(row["MiB/s"]["median"].as_f64().unwrap() > 1.0, "{row}");
    }
}

#[test]
fn extents_shows_what_it_found() {
    if !farpage::can_run() {
        return;
    }
    shows_what_it_found("extents", 5);
}

#[test]
fn index_shows_what_it_found() {
    let found = shows_what_it_found("index", 3);
    let memory = found["tables"][2]["rows"].as_array().unwrap();
    for row in memory {
        let bytes = row["bytes per entry"].as_f64().unwrap();
        assert!((4.0..200.0).contains(&bytes), "{row}");
    }
}

#[test]
fn order_shows_what_it_found() {
    shows_what_it_found("order", 3);
}

#[test]
fn readahead_shows_what_it_found() {
    shows_what_it_found("readahead", 18);
}

#[test]
fn slots_shows_what_it_found() {
    shows_what_it_found("slots", 3);
}

#[test]
fn faults_shows_what_it_found() {
    if !farpage::can_run() {
        return;
    }
    let is_alone = std::thread::available_parallelism().unwrap().get() < 2;
    let found = shows_what_it_found("faults", if is_alone { 1 } else { 2 });
    for row in
        found["tables"].as_array().unwrap().iter().skip(1).flat_map(|table| table["rows"].as_array().unwrap())
    {
        let page_us = row["us for a page"]["median"].as_f64().unwrap();
        assert!((0.05..1_000.0).contains(&page_us), "{row}");
    }
}

#[test]
fn scale_shows_what_it_found() {
    if !farpage::can_run() {
        return;
    }
    let found = shows_what_it_found("scale", 2);
    // In 1 and in 16 GiB, 16,384 pages are touched. Each takes a line of eight words for it and its
    // neighbours, 1 MiB in all. The rest is needed once. A word for each page of the space would be 8 bytes.
    for (row, (least, most)) in
        found["tables"][1]["rows"].as_array().unwrap().iter().zip([(4.0, 100.0), (0.25, 4.0)])
    {
        let metadata = row["metadata, bytes"].as_f64().unwrap();
        assert!((least..most).contains(&metadata), "{row}");
    }
}

/// Returns the settings that `bench kernel` changes.
fn settings_of_the_kernel() -> Vec<String> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut all: Vec<String> =
        ["enabled", "compressor"].map(|name| text(&format!("/sys/module/zswap/parameters/{name}"))).to_vec();
    all.push(text("/proc/swaps").lines().map(|line| line.split_whitespace().next().unwrap_or("")).collect());
    all.push(text("/proc/sys/vm/page-cluster"));
    let temporary = std::env::temp_dir();
    for place in ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/var/tmp", "/run", temporary.to_str().unwrap()]
    {
        let names = fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let ours = |name: &String| {
            ["farpage-bench", "farpage-bank", "farpage-programs"].iter().any(|ours| name.starts_with(ours))
        };
        all.extend(names.filter_map(|name| name.into_string().ok()).filter(ours));
    }
    all
}

/// File that lists what has yet to be undone.
const JOURNAL: &str = "/run/farpage-bench-kernel";

/// Returns a lock if the kernel can swap here, and this process may say how. Tests with the lock run one at a
/// time. The remains of a killed run are undone before.
fn alone_with_the_kernel() -> Option<MutexGuard<'static, ()>> {
    if !farpage::is_root() {
        farpage::skip("`bench kernel` takes root");
    } else if !Path::new("/sys/module/zswap/parameters").exists() {
        farpage::skip("this kernel has no zswap");
    } else {
        let alone = farpage::budgeted::alone_with("python3");
        if alone.is_some() && Path::new(JOURNAL).exists() {
            undo_what_was_left();
        }
        return alone;
    }
    None
}

/// Undoes what a killed run has left. The next run does so, whatever it runs.
fn undo_what_was_left() {
    let mut command = farpage();
    command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
    command.args(["bench", "kernel", "--quick", "--only", "pool, random"]);
    let ended = Ended::of(command.output().unwrap());
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
}

/// Starts `farpage bench kernel`. Returns in the middle of its work, when everything is done that
/// the benchmark undoes.
fn begun(before: &[String]) -> Child {
    let mut command = farpage();
    command.env("FARPAGE_PRELOAD", farpage::budgeted::library()).args(["bench", "kernel"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    // The cgroup is made last.
    while settings_of_the_kernel().len() < before.len() + 4 {
        assert!(began.elapsed() < Duration::from_secs(60), "it has not begun");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(3));
    child
}

#[test]
fn kernel_shows_what_it_found_and_leaves_everything_as_it_was() {
    let Some(_alone) = alone_with_the_kernel() else { return };
    let before = settings_of_the_kernel();
    let found = shows_what_it_found("kernel", 2);
    assert_eq!(settings_of_the_kernel(), before);
    for table in found["tables"].as_array().unwrap() {
        let rows = table["rows"].as_array().unwrap();
        let rate = |at: usize| rows[at]["touches/s"]["median"].as_f64().unwrap();
        assert!((0..3).all(|at| rate(at) > 0.0), "{table}");
        // The kernel was made to swap.
        assert!(rows[0]["major faults"].as_f64() > Some(0.0), "{table}");
    }
}

#[test]
fn programs_shows_what_it_found_and_leaves_everything_as_it_was() {
    let Some(_alone) = alone_with_the_kernel() else { return };
    let before = settings_of_the_kernel();
    let found = shows_what_it_found("programs", 1);
    assert_eq!(settings_of_the_kernel(), before);
    let rows = found["tables"][0]["rows"].as_array().unwrap();
    let number = |at: usize, column: &str| rows[at][column].as_f64().unwrap();
    // The kernel and Farpage were both made to swap.
    assert!(number(0, "major faults") > 0.0 && number(1, "pool MiB") > 1.0, "{rows:?}");
}

/// A program of the user's, in two modes. A program that prints something else each time can't be compared.
#[test]
fn command_shows_what_it_found_and_leaves_everything_as_it_was() {
    let Some(_alone) = alone_with_the_kernel() else { return };
    let before = settings_of_the_kernel();
    let directory = directory();
    let json = directory.path().join("found.json");
    let measure = |text: &str| {
        let mut command = farpage();
        command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
        command.args(["bench", "command", "--quick", "--ram", "50%", "--json"]).arg(&json);
        command.args([
            "--with",
            "--faults signal",
            "--with",
            "--faults segv --pool 1M",
            "--",
            "python3",
            "-c",
        ]);
        Ended::of(command.arg(text).output().unwrap())
    };
    let fill = "import random; random.seed(1); b = bytearray(80 << 20)
for i in range(0, len(b), 4096): b[i:i + 2048] = random.randbytes(2048)
print(sum(b[::4096]))
import time; time.sleep(0.1)";
    let ended = measure(fill);
    assert_eq!((ended.status, settings_of_the_kernel()), (Some(0), before.clone()), "{}", ended.stderr);
    let found: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let rows = found["tables"][0]["rows"].as_array().unwrap();
    let who: Vec<_> = rows.iter().map(|row| row["who"].as_str().unwrap()).collect();
    assert!(who[0].starts_with("kernel, "), "{who:?}");
    assert_eq!(who[1..], ["farpage --faults signal", "farpage --faults segv --pool 1M", "unlimited"]);
    let number = |at: usize, column: &str| rows[at][column].as_f64().unwrap();
    // The kernel and Farpage were both made to swap. A pool of 1 MiB holds no more.
    assert!(number(0, "major faults") > 0.0 && number(2, "to disk MiB") > 1.0, "{rows:?}");
    assert!((40.0..70.0).contains(&number(1, "MiB")) && number(2, "pool MiB") <= 1.0, "{rows:?}");
    assert_eq!(found["targets"].as_array().unwrap().len(), 2);
    let ended = measure("import os, time; print(os.getpid()); b = bytearray(80 << 20); time.sleep(0.1)");
    ended.refused(125, &["its result is", "without a budget"]);
    assert_eq!(settings_of_the_kernel(), before);
}

#[test]
fn only_some_experiments_have_cases_and_a_case_must_be_there() {
    let refused = |arguments: &[&str], words: &[&str]| {
        Ended::of(farpage().arg("bench").args(arguments).output().unwrap()).refused(125, words);
    };
    refused(&["codec", "--only", "heap"], &["is run as a whole"]);
    refused(&["kernel", "--only", "nonsense"], &["no such case", "pool, random"]);
    refused(&["programs", "--only", "nonsense"], &["no such program", "pagerank"]);
    refused(&["command", "--with", "--ram 1G", "--", "true"], &["`--ram`, which the benchmark sets itself"]);
    refused(
        &["command", "--ram", "1G"],
        &["none is given", "farpage bench command --ram 50% -- python3 job.py"],
    );
    for words in [&["codec", "--", "true"][..], &["kernel", "--ram", "1G"], &["order", "--with", "--pool 1M"]]
    {
        refused(words, &["measures no program of yours", "farpage bench command"]);
    }
}

/// Wrong words end the command before anything is measured, and leave the files as they are.
#[test]
fn bad_input_is_refused_before_anything_is_measured() {
    let directory = directory();
    let file = directory.path().join("found.json");
    fs::write(&file, "figures").unwrap();
    let refused = |arguments: &[&str], words: &[&str]| {
        let mut command = farpage();
        command.args(["bench", "order", "--quick"]).args(arguments).current_dir(directory.path());
        Ended::of(command.output().unwrap()).refused(125, words);
    };
    refused(&["--json", "found.json", "--svg", "found.json"], &["same file"]);
    refused(&["--json", "found.json", "--svg", "no/such.svg"], &["no/such.svg can't be written"]);
    refused(&["--json", "found.json", "--only", "x"], &["is run as a whole"]);
    let mut nested = farpage();
    nested.args(["bench", "order", "--quick", "--json"]).arg(&file).env("FARPAGE_SESSION", "/proc/1/fd/3");
    Ended::of(nested.output().unwrap()).refused(125, &["under `farpage run`"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "figures");
}

/// Standard output without room took the JSON with it.
#[test]
fn json_is_written_although_the_text_has_no_room() {
    let directory = directory();
    let file = directory.path().join("found.json");
    let mut command = farpage();
    command.args(["bench", "order", "--quick", "--json"]).arg(&file);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let status = command.stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(125));
    let found: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(found["experiment"], "order");
    assert_eq!(found["failed"], Value::Null);
    let notes = found["notes"].as_array().unwrap();
    assert!(notes.iter().any(|note| note.as_str().unwrap().starts_with("--quick")), "{notes:?}");
}

#[test]
fn kernel_that_is_interrupted_leaves_everything_as_it_was() {
    let Some(_alone) = alone_with_the_kernel() else { return };
    let before = settings_of_the_kernel();
    let child = begun(&before);
    // SAFETY: takes no pointers; the child isn't waited for yet.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    Ended::of(child.wait_with_output().unwrap()).refused(125, &["interrupted"]);
    assert_eq!(settings_of_the_kernel(), before);
}

/// A benchmark may be killed with the session that it runs in. A test must not take what it has left
/// for the state before.
#[test]
fn kernel_that_is_killed_is_undone_by_the_next_run() {
    let Some(_alone) = alone_with_the_kernel() else { return };
    let before = settings_of_the_kernel();
    let mut child = begun(&before);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_ne!(settings_of_the_kernel(), before);
    undo_what_was_left();
    assert_eq!(settings_of_the_kernel(), before);
}

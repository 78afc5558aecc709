//! Bad input to `farpage run`: each case gets one clear message, the right exit status, and no program runs.
//!
//! The program in these tests would write to standard output if it were started.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::{compile, directory, is_root, put, run, run_as_ordinary_user, skip};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

/// A program that must not run.
const PROGRAM: [&str; 2] = ["echo", "it ran"];

fn refused_with(own: &[&str], status: i32, words: &[&str]) {
    run(&[own, &PROGRAM].concat()).refused(status, words);
}

// ---- options -------------------------------------------------------------------------------------------

#[test]
fn unknown_option_is_named_with_the_one_that_was_meant() {
    refused_with(&["--quite"], 125, &["--quite", "--quiet"]);
    refused_with(&["--zzz"], 125, &["--zzz"]);
}

#[test]
fn missing_program_and_missing_value_are_refused() {
    run(&[]).refused(125, &["PROGRAM"]);
    run(&["--ram"]).refused(125, &["--ram"]);
}

#[test]
fn size_that_is_none_is_quoted() {
    for size in ["lots", "12Q", "-1", "", "101%", "99999999E"] {
        refused_with(&[&format!("--ram={size}")], 125, &[size, "is not a size"]);
        refused_with(&[&format!("--pool={size}")], 125, &[size, "is not a size"]);
    }
    refused_with(&["--ram", "100"], 125, &["less than one page"]);
}

#[test]
fn unknown_choice_lists_the_choices() {
    refused_with(&["--codec", "zip"], 125, &["zip", "lz4"]);
    refused_with(&["--pack", "some"], 125, &["some", "on", "off"]);
    refused_with(&["--install", "teleport"], 125, &["teleport", "move", "copy"]);
    refused_with(&["--io", "mmap"], 125, &["mmap", "uring", "psync"]);
    refused_with(&["--wait", "long"], 125, &["long", "poll", "sleep"]);
}

#[test]
fn contradictions_are_refused() {
    refused_with(&["--no-disk", "--swap", "/var/tmp"], 125, &["--no-disk", "--swap", "contradict"]);
    refused_with(&["--ram", "100M", "--pool", "95%"], 125, &["--pool 95%", "90 %"]);
    refused_with(&["--ram", "100M", "--pool", "1G"], 125, &["--pool 1G", "100 MiB"]);
}

#[test]
fn variables_are_checked_like_options() {
    let with = |name: &str, value: &str| {
        farpage::Ended::of(farpage::farpage().env(name, value).arg("run").args(PROGRAM).output().unwrap())
    };
    with("FARPAGE_RAM", "lots").refused(125, &["lots", "is not a size", "it comes from FARPAGE_RAM"]);
    with("FARPAGE_RAM", "100").refused(125, &["less than one page", "FARPAGE_RAM=256M"]);
    with("FARPAGE_POOL", "0").refused(125, &["--pool 0", "FARPAGE_POOL"]);
    with("FARPAGE_POOL", "95%").refused(125, &["--pool 95%", "or FARPAGE_POOL"]);
    with("FARPAGE_IO", "mmap").refused(125, &["mmap", "it comes from FARPAGE_IO"]);
    with("FARPAGE_SWAP", "/var/tmp:lots").refused(125, &["swap area `/var/tmp:lots`: `lots` is not a size"]);
    with("FARPAGE_SWAP", "/no/such/place").refused(125, &["/no/such/place", "does not exist"]);
    with("FARPAGE_SWAP_DIR", "/dev/shm").refused(125, &["/dev/shm", "tmpfs", "FARPAGE_SWAP_DIR"]);
    with("FARPAGE_PRELOAD", "/no/such.so").refused(125, &["/no/such.so"]);
}

#[test]
fn typing_error_is_not_blamed_on_a_variable() {
    let with = |own: &[&str], program: &[&str]| {
        let words = [&["run"], own, program].concat();
        let output = farpage::farpage().env("FARPAGE_RAM", "much").args(words).output().unwrap();
        farpage::Ended::of(output)
    };
    let typed = with(&["--ram", "lots"], &PROGRAM);
    typed.refused(125, &["lots", "is not a size"]);
    assert!(!typed.stderr.contains("FARPAGE_RAM"), "{}", typed.stderr);
    // In this line the option is the program's.
    with(&[], &["echo", "--ram", "lots"]).refused(125, &["much", "it comes from FARPAGE_RAM"]);
    // There is no option of this name, so there is no variable either. The error must not be
    // blamed on FARPAGE_DSK.
    let misspelt = run(&[&["--dsk", "/var/tmp"][..], &PROGRAM].concat());
    misspelt.refused(125, &["--dsk"]);
    assert!(!misspelt.stderr.contains("FARPAGE_"), "{}", misspelt.stderr);
}

/// clap's own tip would be to give `--rma` to the program, or there would be none at all.
#[test]
fn words_in_the_wrong_place_are_answered_with_the_right_line() {
    for (words, status, fix) in [
        (
            &["run", "--rma", "2G", "--", "echo", "it ran"][..],
            125,
            "fix, one of:\nfarpage:     - farpage run --ram 2G -- echo 'it ran'",
        ),
        (&["run", "-m", "2G", "echo", "it ran"], 125, "farpage run --ram 2G echo 'it ran'"),
        (&["run", "--memory", "2G", "echo"], 125, "farpage run --ram 2G echo"),
        (&["--ram", "2G", "--", "echo"], 125, "fix: farpage run --ram 2G -- echo"),
        (&["run", "2G", "--", "echo", "it ran"], 127, "fix: farpage run --ram 2G -- echo 'it ran'"),
        (&["run", "echo it | cat"], 127, "fix: farpage run -- sh -c 'echo it | cat'"),
    ] {
        let ended = farpage::Ended::of(farpage::farpage().args(words).output().unwrap());
        ended.refused(status, &[fix]);
    }
}

#[test]
fn empty_variable_is_an_unset_one_and_an_unknown_one_is_named() {
    if !farpage::can_run() {
        return;
    }
    let with = |name: &str, value: &str| {
        let mut command = farpage::farpage();
        command.env("FARPAGE_PRELOAD", farpage::harmless_library()).env(name, value);
        farpage::Ended::of(command.args(["run", "--ram", "64M"]).args(PROGRAM).output().unwrap())
    };
    for name in ["FARPAGE_CODEC", "FARPAGE_STATS", "FARPAGE_QUIET", "FARPAGE_POOL", "FARPAGE_SWAP"] {
        let ended = with(name, "");
        assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), "it ran\n"), "{name}: {}", ended.stderr);
        assert!(!ended.stderr.contains("note: "), "{}", ended.stderr);
    }
    let ended = with("FARPAGE_RMA", "2G");
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let note =
        "note: the variable FARPAGE_RMA is set, which Farpage doesn't know; FARPAGE_RAM is probably meant";
    assert!(ended.stderr.contains(note), "{}", ended.stderr);
}

/// Without the check each command would end with status 0, and the text would be nowhere.
#[test]
fn output_that_finds_no_room_is_an_error() {
    for words in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["--help"],
        &["run", "--help"],
        &["--version"],
        &["load", "random", "--seconds", "0.01"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let child =
            farpage::farpage().args(words).stdout(full).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {stderr}");
        assert!(
            stderr.contains("No space left on device") && stderr.contains("fix: "),
            "{words:?}: {stderr}"
        );
    }
}

/// doctor must judge the run with its options: with `FARPAGE_FAULTS=foo` not all is well.
#[test]
fn doctor_judges_the_run_that_it_is_asked_about() {
    if !farpage::can_run() {
        return;
    }
    let doctor = |words: &[&str]| {
        let mut command = farpage::farpage();
        command.env("FARPAGE_PRELOAD", farpage::budgeted::library()).arg("doctor").args(words);
        farpage::Ended::of(command.output().unwrap())
    };
    for (words, wanted) in [
        (&["--ram", "100M", "--", "echo"][..], "budget 100 MiB"),
        (&["--faults", "segv"], "faults by segv, userfaultfd by nothing, install copy"),
        (&["--no-disk", "--io", "psync"], "io psync, swap none"),
        (&["--wait", "sleep", "--supervisor", "above"], "wait sleep, supervisor above"),
    ] {
        let ended = doctor(words);
        assert_eq!(ended.status, Some(0), "{words:?}: {}", ended.stdout);
        assert!(ended.stdout.contains(wanted), "{words:?}: {}", ended.stdout);
    }
    for (words, wanted) in [
        (&["--", "no-such-program"][..], "no-such-program is not there"),
        (&["--swap", "/no/such/place"], "/no/such/place does not exist"),
        (&["--faults", "segv", "--install", "move"], "moving pages takes a userfaultfd"),
        (&["--no-disk", "--swap", "/var/tmp"], "contradict each other"),
        (&["--stats", "/no/such/directory/stats.json"], "/no/such/directory/stats.json can't be written"),
    ] {
        let (ended, json) = (doctor(words), doctor(&[&["--json"], words].concat()));
        assert_eq!((ended.status, json.status), (Some(1), Some(1)), "{words:?}: {}", ended.stdout);
        assert!(
            ended.stdout.contains(wanted) && ended.stdout.contains("would be refused here"),
            "{}",
            ended.stdout
        );
        let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let why = checks.iter().find(|check| check["name"] == "farpage run").unwrap();
        assert!(why["value"].as_str().unwrap().contains(wanted) && why["fixes"][0].is_string(), "{why}");
    }
    let mut command = farpage::farpage();
    let bad = farpage::Ended::of(command.env("FARPAGE_FAULTS", "foo").arg("doctor").output().unwrap());
    bad.refused(125, &["foo", "it comes from FARPAGE_FAULTS"]);
}

/// doctor said that a run works without having started any.
#[test]
fn doctor_starts_a_program_under_the_options() {
    if !farpage::can_run() {
        return;
    }
    let place = directory();
    let stats = place.path().join("stats.json");
    let real = farpage::budgeted::library();
    let trial = |library: &Path, words: &[&str]| {
        let mut command = farpage::farpage();
        command.env("FARPAGE_PRELOAD", library).env("FARPAGE_STATS", &stats).args(["doctor", "--json"]);
        let ended = farpage::Ended::of(command.args(words).output().unwrap());
        let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(report["works"], ended.status == Some(0), "{}", ended.stdout);
        assert!(!stats.exists(), "the file is the program's");
        let found =
            report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "trial").cloned();
        (ended.status, found.unwrap_or_default())
    };
    for words in [&[][..], &["--ram", "64M", "--", "echo", "--json"], &["--quiet", "--", "echo"]] {
        let (status, check) = trial(&real, words);
        assert_eq!((status, check["verdict"].as_str()), (Some(0), Some("ok")), "{check}");
        assert!(check["value"].as_str().unwrap().contains("`true` ran under these options"), "{check}");
    }
    for (library, words, wanted, fix) in [
        // The budget holds less than the program needs to start.
        (&*real, &["--ram", "64K"][..], "is below the", "farpage run --ram 64K -- true"),
        // The loader takes the library, and nothing of it limits the program.
        (&farpage::harmless_library(), &[], "`true` ran without a budget", "copy farpage"),
    ] {
        let (status, check) = trial(library, words);
        assert_eq!((status, check["verdict"].as_str()), (Some(1), Some("no")), "{check}");
        assert!(check["value"].as_str().unwrap().contains(wanted), "{check}");
        assert!(check["fixes"][0].as_str().unwrap().contains(fix), "{check}");
    }
    // Only a run shows that this is too little address space for Farpage's tables.
    let mut command = Command::new("prlimit");
    command.arg("--as=300000000").arg(farpage::farpage().get_program()).args(["doctor", "--ram", "100M"]);
    command.env("FARPAGE_PRELOAD", &real).env_remove("TMPDIR");
    let ended = farpage::Ended::of(command.output().unwrap());
    assert!(ended.status == Some(1) && ended.stdout.contains("ulimit -v"), "{}", ended.stdout);
    assert!(
        ended.stdout.contains("trial  ") && ended.stdout.contains("would be refused"),
        "{}",
        ended.stdout
    );
    let (status, check) = trial(&real, &["--", "no-such-program"]);
    assert_eq!((status, check), (Some(1), serde_json::Value::Null), "what is refused isn't tried");
}

/// Paths and values printed escape sequences, and a line break in a path looked like the end of the message.
#[test]
fn names_from_outside_are_printed_without_what_a_terminal_obeys() {
    let name = "/no/such\x1b[31m\nplace\u{9b}1m";
    for words in [
        &["run", "--swap", name, "echo"][..],
        &["run", "--swap", &format!("/var/tmp:{name}"), "echo"],
        &["run", "--swap", &format!("/var/tmp,prio={name}"), "echo"],
        &["run", "--stats", name, "echo"],
        &["run", name],
        &["run", &format!("--{name}"), "echo"],
        &["run", "--ram", &format!("\u{9b}{name}"), "echo"],
        &[name],
        &["doctor", "--swap", name],
        &["doctor", "--json", "--swap", name],
    ] {
        let mut command = farpage::farpage();
        command.env("TMPDIR", name);
        let ended = farpage::Ended::of(command.args(words).output().unwrap());
        let text = ended.stdout + &ended.stderr;
        assert!(!text.is_empty());
        let bad = text.chars().find(|c| *c != '\n' && c.is_control());
        assert_eq!(bad, None, "{words:?}: {text:?}");
        // clap's own texts have several lines.
        let is_whole = |line: &str| !line.starts_with("place") || text.contains("--help'");
        assert!(text.lines().all(is_whole), "{words:?}: {text}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for words in [&["--help"][..], &["--version"], &["run", "--help"], &["doctor", "--help"]] {
        let ended = farpage::Ended::of(farpage::farpage().args(words).output().unwrap());
        assert_eq!((ended.status, ended.stderr.as_str()), (Some(0), ""), "{words:?}");
        assert!(ended.stdout.contains("farpage"));
    }
}

/// An area fits in a file of that size, but the memory shared with the program doesn't. doctor must say so.
#[test]
fn doctor_says_no_where_no_run_can_begin() {
    if !farpage::can_run() {
        return;
    }
    let limited = |words: &[&str]| {
        let mut command = Command::new("prlimit");
        let farpage = farpage::farpage();
        command.arg("--fsize=1048576").arg(farpage.get_program()).args(words);
        command.envs(farpage.get_envs().filter_map(|(name, value)| Some((name, value?))));
        farpage::Ended::of(command.output().unwrap())
    };
    let (run, doctor) = (limited(&["run", "true"]), limited(&["doctor"]));
    assert_eq!(run.status, Some(125), "{}", run.stderr);
    assert!(doctor.status == Some(1) && doctor.stdout.contains("ulimit -f unlimited"), "{}", doctor.stdout);
}

/// The advice was another directory, or `--supervisor above`, which needs descriptors, too.
#[test]
fn lack_of_descriptors_is_told_as_that() {
    if !farpage::can_run() {
        return;
    }
    for limit in 4..=8 {
        let farpage = farpage::farpage();
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limit}")).arg(farpage.get_program());
        command.envs(farpage.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
        command.args(["run", "--ram", "100M", "--supervisor", "beside", "true"]);
        let ended = farpage::Ended::of(command.output().unwrap());
        ended.refused(125, &["no file descriptor is free", "ulimit -n"]);
        assert!(
            !ended.stderr.contains("--swap") && !ended.stderr.contains("use --supervisor"),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn statistics_file_that_can_not_be_written_is_refused_before_the_program_runs() {
    refused_with(&["--stats", "/no/such/directory/stats.json"], 125, &["/no/such/directory/stats.json"]);
    refused_with(&["--stats", "/var/tmp"], 125, &["/var/tmp"]);
    // A run that is refused for another reason leaves no empty file.
    let place = directory();
    let file = place.path().join("stats.json");
    let stats = ["--stats", file.to_str().unwrap()];
    refused_with(&[&stats[..], &["--faults", "segv", "--install", "move"]].concat(), 125, &["moving pages"]);
    assert!(!file.exists());
}

// ---- swap paths ----------------------------------------------------------------------------------------

/// Writes what mkswap writes for `pages` pages, into a file of `in_file` pages.
fn swap_file(directory: &Path, name: &str, pages: u32, in_file: u64) -> String {
    let path = put(directory, name, &vec![0; in_file as usize * 4096], 0o600);
    let file = File::options().write(true).open(&path).unwrap();
    for (at, word) in [(1024, 1), (1028, pages - 1)] {
        file.write_all_at(&u32::to_ne_bytes(word), at).unwrap();
    }
    file.write_all_at(b"SWAPSPACE2", 4086).unwrap();
    path
}

fn patch(path: &str, at: u64, word: u32) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&word.to_ne_bytes(), at).unwrap();
}

#[test]
fn swap_path_that_does_not_exist() {
    refused_with(&["--swap", "/no/such/place"], 125, &["/no/such/place does not exist", "mkswap"]);
    // The advice must not be `mkdir -p /var/tmp;/tmp`.
    for several in ["/var/tmp;/tmp", "/var/tmp,/tmp"] {
        let words = [several, "does not exist", "several areas", "--swap A --swap B"];
        refused_with(&["--swap", several], 125, &words);
    }
    if is_root() {
        refused_with(&["--swap", "/proc"], 125, &["/proc is not writable", "takes no files", "fix: "]);
    }
}

#[test]
fn swap_path_with_bad_size_or_option() {
    refused_with(&["--swap", "/var/tmp:lots"], 125, &["/var/tmp:lots", "`lots` is not a size"]);
    refused_with(&["--swap", "/var/tmp:50%"], 125, &["percentage"]);
    refused_with(&["--swap", "/var/tmp:4K"], 125, &["too small", "10 pages"]);
    refused_with(&["--swap", "/var/tmp,prio=40000"], 125, &["40000", "priority"]);
    refused_with(&["--swap", "/var/tmp,node=63"], 125, &["there is no node 63", "leave node= out"]);
    refused_with(&["--swap", "/var/tmp,discard=often"], 125, &["often", "discard"]);
    let seventeen: Vec<_> = std::iter::repeat_n(["--swap", "/var/tmp:1M"], 17).flatten().collect();
    refused_with(&seventeen, 125, &["17", "at most 16"]);
}

#[test]
fn swap_path_that_is_not_writable() {
    let place = directory();
    let closed = place.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    let file = put(place.path(), "file", b"", 0o444);
    for path in [closed.to_str().unwrap(), &file] {
        let ended = run_as_ordinary_user(place.path(), &["--swap", path, "echo"]);
        ended.refused(125, &[path, "not writable", "Permission denied"]);
    }
}

#[test]
fn swap_path_in_memory() {
    if fs::metadata("/dev/shm").is_err() {
        return skip("there is no /dev/shm");
    }
    refused_with(&["--swap", "/dev/shm"], 125, &["/dev/shm is on tmpfs", "--no-disk"]);
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    refused_with(&["--swap", file.path().to_str().unwrap()], 125, &["is on tmpfs"]);
}

#[test]
fn swap_path_that_is_neither_file_nor_directory() {
    refused_with(&["--swap", "/dev/null"], 125, &["/dev/null", "neither a directory"]);
}

#[test]
fn swap_file_in_use_by_somebody_else() {
    let place = directory();
    let path = swap_file(place.path(), "swap", 100, 100);
    let other = File::open(&path).unwrap();
    other.lock_shared().unwrap();
    refused_with(&["--swap", &path], 125, &[&path, "already in use", "another farpage"]);
    // The test uses another file, because a child that another test forks just now would keep the first
    // file's lock for a moment.
    let path = swap_file(place.path(), "twice", 100, 100);
    refused_with(&["--swap", &path, "--swap", &path], 125, &["given twice"]);
}

#[test]
fn swap_file_in_use_by_the_kernel() {
    if !is_root() {
        return skip("swapon needs root");
    }
    let place = directory();
    let path = put(place.path(), "swap", &vec![0; 1 << 20], 0o600);
    let made = Command::new("mkswap").arg(&path).output().is_ok_and(|output| output.status.success());
    if !made || !Command::new("swapon").arg(&path).status().is_ok_and(|status| status.success()) {
        return skip("mkswap or swapon doesn't work here");
    }
    let ended = run(&[&["--swap", &path], &PROGRAM[..]].concat());
    assert!(Command::new("swapoff").arg(&path).status().unwrap().success());
    ended.refused(125, &[&path, "already in use", "the kernel", "swapoff"]);
}

#[test]
fn swap_file_with_a_damaged_header() {
    let place = directory();
    let refused = |path: &str, words: &[&str]| {
        let before = fs::read(path).unwrap();
        refused_with(&["--swap", path], 125, &[&[path], words].concat());
        assert_eq!(fs::read(path).unwrap(), before, "the file was changed");
    };
    refused(&swap_file(place.path(), "short", 100, 50), &["damaged header", "100 pages", "only 50"]);
    refused(&swap_file(place.path(), "small", 9, 9), &["too small", "9 pages"]);
    let empty = swap_file(place.path(), "empty", 100, 100);
    patch(&empty, 1028, 0);
    refused(&empty, &["damaged header", "empty swap-file"]);
    let version = swap_file(place.path(), "version", 100, 100);
    patch(&version, 1024, 7);
    refused(&version, &["damaged header", "version 7"]);
    let order = swap_file(place.path(), "order", 100, 100);
    patch(&order, 1024, 1u32.swap_bytes());
    refused(&order, &["other byte order"]);
    let bad = swap_file(place.path(), "bad", 100, 100);
    patch(&bad, 1032, 1);
    patch(&bad, 1536, 100);
    refused(&bad, &["damaged header", "page 100"]);
    patch(&bad, 1536, 5);
    refused(&bad, &["bad pages, which only devices can have"]);
    patch(&bad, 1032, 638);
    refused(&bad, &["638 bad pages"]);
}

/// A file with holes must be refused: it would grow while the program runs.
#[test]
fn swap_file_with_holes() {
    let place = directory();
    let path = swap_file(place.path(), "swap", 100, 1);
    File::options().write(true).open(&path).unwrap().set_len(400 << 10).unwrap();
    let fix = format!("`fallocate -l 409600 {path}`");
    refused_with(&["--swap", &path], 125, &[&path, "has holes", "at byte 4096", "swapon refuses it", &fix]);
    // The first fix works, and keeps the header.
    if Command::new("fallocate").args(["-l", "409600", &path]).status().is_ok_and(|status| status.success()) {
        let ended = run(&["--ram", "256M", "--swap", &path, "/bin/true"]);
        assert!(!ended.stderr.contains("has holes"), "{}", ended.stderr);
    }
}

#[test]
fn file_with_other_content_is_never_written() {
    let place = directory();
    for (name, content) in [("text", &b"precious"[..]), ("page", &[7; 8192]), ("zeros", &[0; 1 << 20])] {
        let path = put(place.path(), name, content, 0o600);
        let emptied = format!("`truncate -s 0 {path}`");
        refused_with(&["--swap", &path], 125, &[&path, "holds something else", &emptied]);
        refused_with(&["--swap", &format!("{path}:1G")], 125, &[&path, "holds something else"]);
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn swap_file_smaller_than_the_size_asked_for() {
    let place = directory();
    let path = swap_file(place.path(), "swap", 100, 100);
    refused_with(&["--swap", &format!("{path}:1G")], 125, &[&path, "no room for 1 GiB", "400 KiB"]);
}

#[test]
fn disk_without_room() {
    if !is_root() {
        return skip("mounting a small disk needs root");
    }
    let place = directory();
    let image = put(place.path(), "image", b"", 0o600);
    File::options().write(true).open(&image).unwrap().set_len(32 << 20).unwrap();
    let disk = place.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let ran = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    if !ran(Command::new("mkfs.ext4").args(["-q", &image]))
        || !ran(Command::new("mount").arg(&image).arg(&disk))
    {
        return skip("mkfs.ext4 or a loop mount doesn't work here");
    }
    let ended = run(&[&["--swap", disk.to_str().unwrap()], &PROGRAM[..]].concat());
    assert!(ran(Command::new("umount").arg(&disk)));
    ended.refused(125, &["disk full", "64 MiB", "10 %"]);
}

/// A load that can't be carried must not end in a panic, with the status of a bug.
#[test]
fn loads_that_nobody_can_carry_are_refused() {
    for (words, wanted) in [
        (&["random", "--bytes", "0"][..], "--bytes 0 is less than 64K"),
        (&["random", "--bytes", "50%"], "`50%` is a share of nothing"),
        (&["random", "--seconds", "nan"], "--seconds NaN"),
        (&["interleaved", "--bytes", "4K"], "--bytes 4096 is less than 64K"),
        (&["mixed", "--threads", "0"], "--threads 0"),
        // The seeds of further threads had an overflow.
        (
            &["random-processes", "--threads", "2", "--bytes", "1M", "--seed", "18446744073709551615"],
            "--seed 18446744073709551615 is too large for 2 threads",
        ),
    ] {
        let output = farpage::farpage().arg("load").args(words).output().unwrap();
        farpage::Ended::of(output).refused(125, &[wanted, "fix: "]);
    }
}

#[test]
fn limit_on_file_sizes_is_an_error_and_not_a_death() {
    if !farpage::can_run() {
        return;
    }
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -f 1000; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_farpage"),
        "run",
        "--ram",
        "256M",
    ]);
    command.args(PROGRAM).env("FARPAGE_PRELOAD", farpage::harmless_library()).env_remove("TMPDIR");
    farpage::Ended::of(command.output().unwrap()).refused(125, &["ulimit -f"]);
}

#[test]
fn library_of_another_version() {
    let place = directory();
    let executable = place.path().join("farpage");
    fs::copy(env!("CARGO_BIN_EXE_farpage"), &executable).unwrap();
    fs::copy(farpage::libc_library(), place.path().join("libfarpage_preload.so")).unwrap();
    let mut command = Command::new(executable);
    let output = command.arg("run").args(PROGRAM).env_remove("FARPAGE_PRELOAD").output().unwrap();
    let wrong = "is not the library of this farpage's version";
    farpage::Ended::of(output).refused(125, &["libfarpage_preload.so", wrong, "cargo build"]);
    // A library that is named must be checked, too: the program would run without a budget, and
    // `--quiet` would say nothing.
    let mut command = farpage::farpage();
    command.env("FARPAGE_PRELOAD", farpage::libc_library()).args(["run", "--quiet"]).args(PROGRAM);
    let named = farpage::Ended::of(command.output().unwrap());
    named.refused(125, &["libc", wrong, "correct or unset FARPAGE_PRELOAD"]);
}

// ---- programs ------------------------------------------------------------------------------------------

#[test]
fn program_that_is_not_there() {
    run(&["no-such-program"]).refused(127, &["no-such-program is not there", "PATH"]);
    run(&["/no/such/program"]).refused(127, &["/no/such/program is not there"]);
    run(&["--", "--odd"]).refused(127, &["--odd is not there"]);
    run(&[""]).refused(127, &["name is empty", "fix: "]);
}

#[test]
fn program_that_is_not_executable() {
    let place = directory();
    let text = put(place.path(), "text", b"#!/bin/sh\necho it ran\n", 0o644);
    run(&[&text]).refused(126, &[&text, "is not executable", "chmod +x"]);
    run(&["/var/tmp"]).refused(126, &["/var/tmp is a directory", "fix: "]);
    let blob = put(place.path(), "blob", b"MZ\0\0", 0o755);
    run(&[&blob]).refused(126, &[&blob, "not a program for Linux", "INTERPRETER FILE"]);
}

#[test]
fn program_that_is_static() {
    let place = directory();
    let Some(program) = compile(place.path(), "static", &["-static"]) else { return };
    run(&[&program]).refused(126, &[&program, "static"]);
    let script = put(place.path(), "script", format!("#!{program}\n").as_bytes(), 0o755);
    run(&[&script]).refused(126, &[&program, "static"]);
}

#[test]
fn program_that_is_static_runs_without_a_budget_if_that_is_asked_for() {
    let place = directory();
    let Some(program) = compile(place.path(), "static", &["-static"]) else { return };
    let plain = Command::new(&program).output().unwrap();
    let ended = run(&["--unsupported", "run", &program]);
    assert_eq!((ended.status, ended.stdout.as_bytes()), (plain.status.code(), &plain.stdout[..]));
    assert!(
        ended.stderr.contains("is started without a budget") && ended.stderr.contains("static"),
        "{}",
        ended.stderr
    );
    assert_eq!(run(&["--unsupported", "run", "--quiet", &program]).stderr, "");
    // A program that can't run at all is refused as without the option.
    run(&["--unsupported", "run", "/var/tmp"]).refused(126, &["/var/tmp is a directory"]);
}

/// A program with a sanitizer would end by itself, or fill its books of all memory and not get far.
#[test]
fn program_with_a_sanitizer() {
    let place = directory();
    let ways: [(&str, &[&str]); 4] = [
        ("AddressSanitizer", &["-fsanitize=address"]),
        ("AddressSanitizer", &["-fsanitize=address", "-static-libasan"]),
        ("ThreadSanitizer", &["-fsanitize=thread"]),
        ("ThreadSanitizer", &["-fsanitize=thread", "-static-libtsan"]),
    ];
    for (name, flags) in ways {
        let Some(program) = compile(place.path(), "sanitized", flags) else { continue };
        run(&[&program]).refused(126, &[&program, name, "-fsanitize"]);
    }
    let Some(program) = compile(place.path(), "undefined", &["-fsanitize=undefined"]) else { return };
    assert_eq!(run(&[&program]).status, Some(0), "this one keeps no books");
}

#[test]
fn program_for_another_machine() {
    let place = directory();
    let mut program = fs::read("/bin/true").unwrap();
    program[18] = 0xf3;
    let other = put(place.path(), "other", &program, 0o755);
    run(&[&other]).refused(126, &[&other, "another machine"]);
    program[4] = 1;
    let narrow = put(place.path(), "narrow", &program, 0o755);
    run(&[&narrow]).refused(126, &[&narrow, "32-bit"]);
    let cut = put(place.path(), "cut", &fs::read("/bin/true").unwrap()[..100], 0o755);
    run(&[&cut]).refused(126, &[&cut, "not a whole ELF file"]);
}

#[test]
fn program_for_musl() {
    let place = directory();
    let Some(program) = compile(place.path(), "musl", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"])
    else {
        return;
    };
    run(&[&program]).refused(126, &[&program, "musl"]);
    let Some(program) = compile(place.path(), "odd", &["-Wl,--dynamic-linker=/no/such/ld.so"]) else {
        return;
    };
    run(&[&program]).refused(126, &[&program, "/no/such/ld.so is not there"]);
}

#[test]
fn program_that_is_set_uid_or_set_gid() {
    let place = directory();
    let program = fs::read("/bin/true").unwrap();
    let set_uid = put(place.path(), "uid", &program, 0o4755);
    run(&[&set_uid]).refused(126, &[&set_uid, "set-uid"]);
    let set_gid = put(place.path(), "gid", &program, 0o2755);
    run(&[&set_gid]).refused(126, &[&set_gid, "set-gid"]);
}

#[test]
fn program_with_file_capabilities() {
    if !is_root() {
        return skip("setcap needs root");
    }
    let place = directory();
    let program = put(place.path(), "capable", &fs::read("/bin/true").unwrap(), 0o755);
    if !Command::new("setcap")
        .args(["cap_net_raw+ep", &program])
        .status()
        .is_ok_and(|status| status.success())
    {
        return skip("setcap doesn't work here");
    }
    run(&[&program]).refused(126, &[&program, "file capabilities"]);
}

#[test]
fn script_of_a_missing_interpreter() {
    let place = directory();
    for interpreter in ["/no/such/python", "/usr/bin/env no-such-python"] {
        let script = put(place.path(), "script", format!("#!{interpreter}\n").as_bytes(), 0o755);
        run(&[&script]).refused(126, &[&script, "first line", "python"]);
    }
}

// ---- what the machine must allow -----------------------------------------------------------------------

#[test]
fn ordinary_user_who_wants_faults_as_messages_is_told_the_three_ways() {
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if setting.trim() != "0" {
        return skip("every user may have a userfaultfd here");
    }
    if File::options().write(true).open("/dev/userfaultfd").is_ok() && !is_root() {
        return skip("this user may open /dev/userfaultfd");
    }
    let place = directory();
    let words = ["--faults", "thread", "--swap", "/var/tmp", "echo", "it ran"];
    let ended = run_as_ordinary_user(place.path(), &words);
    ended.refused(125, &["CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "/dev/userfaultfd"]);
}

#[test]
fn farpage_with_file_capabilities_refuses_to_hand_them_on() {
    if !is_root() {
        return skip("setcap needs root");
    }
    let place = directory();
    let executable = put(place.path(), "farpage", &fs::read(env!("CARGO_BIN_EXE_farpage")).unwrap(), 0o755);
    if !Command::new("setcap")
        .args(["cap_sys_ptrace+ep", &executable])
        .status()
        .is_ok_and(|status| status.success())
    {
        return skip("setcap doesn't work here");
    }
    let words = ["--reuid=65534", "--regid=65534", "--clear-groups", &executable, "run", "echo", "it ran"];
    let Ok(output) = Command::new("setpriv").args(words).output() else { return skip("there is no setpriv") };
    farpage::Ended::of(output).refused(125, &["file capabilities", "setcap -r"]);
}

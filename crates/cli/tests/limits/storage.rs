//! Storage at its limits: a pool, an area or a disk that is full, that fails, or that another process wrote
//! to. The order in which areas are filled is here, too.

use super::{RAM, go, modes, ran, start_waiting, swap_file, wait_until};
use crate::farpage::budgeted::{Job, MIB, Under, alone_with, compiled, find, is_full_size, library};
use crate::farpage::{self, directory, is_root, put, skip};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

// ---- no free space -------------------------------------------------------------------------------------

#[test]
fn full_area_goes_over_the_budget_and_loses_nothing() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let area = format!("{}:16M", place.path().display());
    let running = start_waiting("read_after", &["--swap", &area]);
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    assert!(outcome.samples.peak() > RAM, "it can't have kept its budget");
    assert!(outcome.stderr.contains("is full"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("over the budget"), "{}", outcome.stderr);
    assert!(outcome.counter("pswpout") > 0 && outcome.counter("area_full") > 0, "{}", outcome.stderr);
}

#[test]
fn full_pool_without_a_disk_goes_over_the_budget_and_loses_nothing() {
    let Some(_alone) = alone_with("cc") else { return };
    let running = start_waiting("read_after", &["--no-disk"]);
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    assert!(outcome.samples.peak() > RAM, "it can't have kept its budget");
    assert!(outcome.stderr.contains("the compressed pool is full"), "{}", outcome.stderr);
}

/// Half of the pages, as they are compressed at first, are more than the pool holds. The pool therefore
/// compresses pages once more, and compacts itself all the time. (Full size: one of some hundred forks would
/// find an object half moved, if the fork didn't wait for it.)
#[test]
fn forks_under_a_full_pool_find_it_whole() {
    let Some(_alone) = alone_with("cc") else { return };
    let (forks, seconds) = if is_full_size() { ("3000", 3600) } else { ("12", 120) };
    for faults in modes() {
        let program = compiled("snapshots");
        let words = [program.to_str().unwrap(), "of_a_full_pool"];
        let options = ["--faults", faults, "--no-disk", "--pool", "8M"];
        let mut job = Job::new(&Under::budget(RAM, &options), &words).within(seconds);
        job.environment("FORKS", forks);
        let outcome = job.run();
        outcome.succeeded();
        assert!(outcome.counter("pool_densified") > 1_000, "{}", outcome.stderr);
        assert!(outcome.counter("pool_moved") > 1_000, "{}", outcome.stderr);
    }
}

/// The kernel answers a message that nobody reads with SIGPIPE, which must not go on to the program.
#[test]
fn messages_that_nobody_reads_are_nothing_to_the_program() {
    let Some(_alone) = alone_with("python3") else { return };
    let script = "import os, signal, time
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
noise = os.urandom(100 << 20)
time.sleep(1)
print(len(noise))";
    let run = |messages: Stdio| {
        let mut command = farpage::farpage();
        command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
        command.args(["run", "--ram", "64M", "--no-disk", "python3", "-c", script]);
        command.stdout(Stdio::piped()).stderr(messages).spawn().unwrap().wait_with_output().unwrap()
    };
    let heard = run(Stdio::piped());
    assert!(String::from_utf8_lossy(&heard.stderr).contains("the compressed pool is full"), "{heard:?}");
    let (nobody, messages) = std::io::pipe().unwrap();
    drop(nobody);
    let unheard = run(messages.into());
    assert_eq!((unheard.status.code(), unheard.stdout), (Some(0), b"104857600\n".to_vec()));
}

/// A small ext4 on a loop device, unmounted at the end.
struct SmallDisk {
    mounted: PathBuf,
    _place: tempfile::TempDir,
}

impl SmallDisk {
    #[track_caller]
    fn new(bytes: u64) -> Option<SmallDisk> {
        if !is_root() {
            skip("mounting a small disk needs root");
            return None;
        }
        let place = directory();
        let image = put(place.path(), "image", b"", 0o600);
        File::options().write(true).open(&image).unwrap().set_len(bytes).unwrap();
        let mounted = place.path().join("disk");
        fs::create_dir(&mounted).unwrap();
        if !ran("mkfs.ext4", &["-q", "-m", "0", &image])
            || !ran("mount", &[&image, mounted.to_str().unwrap()])
        {
            skip("mkfs.ext4 or a loop mount doesn't work here");
            return None;
        }
        Some(SmallDisk { mounted, _place: place })
    }

    fn path(&self) -> &str {
        self.mounted.to_str().unwrap()
    }

    /// Writes to the disk until it is full.
    fn fill(&self) {
        let file = File::create(self.mounted.join("filler")).unwrap();
        let mut at = 0;
        for piece in [MIB as usize, 4096] {
            while file.write_all_at(&vec![1; piece], at).is_ok() {
                at += piece as u64;
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = ran("umount", &["-l", self.path()]);
    }
}

#[test]
fn disk_that_fills_up_goes_over_the_budget_and_loses_nothing() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(disk) = SmallDisk::new(256 << 20) else { return };
    let running = start_waiting("write_after", &["--swap", disk.path()]);
    disk.fill();
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    assert!(outcome.samples.peak() > RAM, "it can't have kept its budget");
    assert!(outcome.stderr.contains("is full"), "{}", outcome.stderr);
    let names: Vec<_> = fs::read_dir(disk.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(names.iter().all(|name| name == "filler" || name == "lost+found"), "{names:?}");
}

#[test]
fn last_tenth_of_the_disk_is_left_alone() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(disk) = SmallDisk::new(128 << 20) else { return };
    let running = start_waiting("read_after", &["--swap", disk.path()]);
    let output = Command::new("df").args(["-k", "--output=size,avail", disk.path()]).output().unwrap();
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [size, available] = numbers[..] else { panic!("{text}") };
    assert!(available >= size / 11, "{available} KiB of {size} are left\n{}", outcome.stderr);
}

// ---- a disk that fails ---------------------------------------------------------------------------------

/// Runs a program whose pages on disk are damaged. The program gets SIGBUS; the summary names the
/// area and the offset.
fn loses_data(area: &str, damage: impl FnOnce(), words: &[&str]) {
    // The pool is kept small, so that nearly all pages are on the disk.
    let running = start_waiting("read_after", &["--swap", area, "--pool", "8M"]);
    damage();
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.signal, Some(libc::SIGBUS), "{}\n{}", outcome.text(), outcome.stderr);
    assert_eq!(outcome.text(), "", "it went on with wrong bytes");
    for word in [&["LOST DATA", area, "at offset", "SIGBUS"], words].concat() {
        assert!(outcome.stderr.contains(word), "`{word}` is not in:\n{}", outcome.stderr);
    }
    assert!(outcome.counter("fault_lost") > 0, "{}", outcome.stderr);
}

/// Touches memory on disk at random, and compares every byte, while the kernel refuses some of these calls
/// with that error. Returns the program's output and the number of refused calls.
fn refused_now_and_then(call: &str, error: &str) -> (std::process::Output, usize) {
    let place = directory();
    let log = place.path().join("log");
    let numbers = (0_u64..1 << 19).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes());
    let contents = put(place.path(), "contents", &numbers.collect::<Vec<u8>>(), 0o600);
    let farpage = env!("CARGO_BIN_EXE_farpage");
    let mut command = Command::new("strace");
    command.env("FARPAGE_PRELOAD", library()).args(["-f", "-qq", "-e", "signal=none", "-o"]).arg(&log);
    command.args(["-e", &format!("trace={call}"), "-e", &format!("inject={call}:error={error}:when=100+41")]);
    command.args([
        farpage, "run", "--quiet", "--ram", "32M", "--pool", "1M", "--io", "psync", "--wait", "sleep",
    ]);
    command.args(["--readahead", "off", "--swap", place.path().to_str().unwrap(), "--"]);
    let load = ["--pattern", "random", "--bytes", "48M", "--seconds", "1", "--write-percent", "20"];
    command.args([farpage, "load", "touch", "--contents", &contents]).args(load);
    let output = command.output().unwrap();
    let refused = fs::read_to_string(&log).unwrap().matches("INJECTED").count();
    (output, refused)
}

/// An error that the kernel gives only for the moment must not lose a page, or close an area for good.
#[test]
fn what_is_refused_for_the_moment_is_tried_again() {
    let Some(_alone) = alone_with("strace") else { return };
    if !ran("strace", &["-o", "/dev/null", "true"]) {
        return skip("processes can't be traced here");
    }
    for (call, error) in [("pread64", "ENOMEM"), ("pread64", "EBUSY"), ("pwritev", "ENOMEM")] {
        let (output, refused) = refused_now_and_then(call, error);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("failed"), "{call} {error}: {said}");
        assert!(refused > 2, "{call} {error}: {refused} times: this tests nothing");
    }
    // A lasting error is not tried again.
    let (output, _) = refused_now_and_then("pread64", "EIO");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("LOST DATA"), "{said}");
}

#[test]
fn area_that_was_cut_off_gives_sigbus_and_names_the_offset() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(path) = swap_file(place.path(), "swap", 160 * MIB) else { return };
    let cut = || File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    // Beyond the end, reading fails. A write that was in flight makes the file long again, with a hole that
    // reads as zeros: the checksum tells that.
    loses_data(&path, cut, &[]);
}

#[test]
fn area_that_somebody_wrote_to_gives_sigbus_and_names_the_offset() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(path) = swap_file(place.path(), "swap", 160 * MIB) else { return };
    let overwrite = || {
        let file = File::options().write(true).open(&path).unwrap();
        for at in (1..160).map(|mib| mib * MIB) {
            file.write_all_at(&[0x5a; 1 << 19], at).unwrap();
        }
        // If one of the engine's direct writes met these pages in the cache, the kernel reports that
        // once, to the first sync.
        file.sync_all().or_else(|_| file.sync_all()).unwrap();
    };
    loses_data(&path, overwrite, &["what was read is not what was written"]);
}

/// A loop device, given back at the end.
struct Loop(String);

impl Loop {
    #[track_caller]
    fn new(file: &str) -> Option<Loop> {
        if !is_root() {
            skip("a loop device needs root");
            return None;
        }
        let output =
            find("losetup").map(|losetup| Command::new(losetup).args(["-f", "--show", file]).output());
        let Some(Ok(output)) = output.filter(|output| output.as_ref().is_ok_and(|o| o.status.success()))
        else {
            skip("loop devices don't work here");
            return None;
        };
        Some(Loop(String::from_utf8(output.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A device that stays read-only would trouble its next user.
        let _ = ran("blockdev", &["--setrw", &self.0]);
        let _ = ran("losetup", &["-d", &self.0]);
    }
}

#[test]
fn device_that_fails_to_read_gives_sigbus_and_names_the_offset() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(backing) = swap_file(place.path(), "backing", 160 * MIB) else { return };
    let Some(device) = Loop::new(&backing) else { return };
    // A loop device answers a read behind the end of its file with an I/O error, or with zeros up to a page.
    let cut = || File::options().write(true).open(&backing).unwrap().set_len(4096).unwrap();
    loses_data(&device.0, cut, &[]);
}

#[test]
fn device_that_fails_to_write_keeps_the_pages() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(backing) = swap_file(place.path(), "backing", 160 * MIB) else { return };
    let Some(device) = Loop::new(&backing) else { return };
    let running = start_waiting("write_after", &["--swap", &device.0]);
    // From now on the device refuses every write. The content can still be read.
    if !ran("blockdev", &["--setro", &device.0]) {
        return skip("blockdev doesn't work here");
    }
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    for word in ["writing failed", &device.0, "at offset", "the pages were kept"] {
        assert!(outcome.stderr.contains(word), "`{word}` is not in:\n{}", outcome.stderr);
    }
    assert!(!outcome.stderr.contains("is full"), "no area is full:\n{}", outcome.stderr);
    assert!(outcome.counter("write_errors") > 0, "{}", outcome.stderr);
}

/// A disk that answers no write until the end. Reads go on.
struct Frozen<'a>(&'a SmallDisk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = ran("fsfreeze", &["--unfreeze", self.0.path()]);
    }
}

/// A thread with writes in the silent area alone waited for that area for ever, and so did the faults that
/// the thread would have served. The order of areas went on choosing the silent area.
#[test]
fn area_that_answers_no_write_leaves_the_other_one_to_work() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(disk) = SmallDisk::new(256 << 20) else { return };
    let place = directory();
    let Some(silent) = swap_file(&disk.mounted, "silent", 160 * MIB) else { return };
    let Some(other) = swap_file(place.path(), "other", 160 * MIB) else { return };
    let running = start_waiting("write_after", &["--swap", &silent, "--swap", &other]);
    if !ran("fsfreeze", &["--freeze", disk.path()]) {
        return skip("fsfreeze doesn't work here");
    }
    let frozen = Frozen(&disk);
    go(&running);
    let compared = running.place().join("compared");
    wait_until("the program's end, beside a disk that answers no write", || compared.exists());
    // The kernel lets no process end whose writes are in flight.
    drop(frozen);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    // Pages on their way to the silent area stay in memory.
    let peak = outcome.samples.peak();
    assert!(peak < RAM + RAM / 4, "it had {peak} bytes");
    assert!(is_used(&silent) && is_used(&other), "{}", outcome.stderr);
}

#[test]
fn device_that_promised_more_than_it_has_keeps_the_pages() {
    let Some(_alone) = alone_with("cc") else { return };
    let Some(disk) = SmallDisk::new(128 << 20) else { return };
    // The device is thinly provisioned: once the disk behind it is full, it answers "no space".
    let backing = put(&disk.mounted, "backing", b"", 0o600);
    File::options().write(true).open(&backing).unwrap().set_len(160 * MIB).unwrap();
    if !ran("mkswap", &[&backing]) {
        return skip("there is no mkswap");
    }
    let Some(device) = Loop::new(&backing) else { return };
    disk.fill();
    let running = start_waiting("write_after", &["--swap", &device.0]);
    go(&running);
    let outcome = running.end();
    drop(device);
    assert_eq!(outcome.succeeded().text(), "all right\n");
    assert!(outcome.stderr.contains("is full"), "{}", outcome.stderr);
    assert!(outcome.samples.peak() > RAM, "it can't have kept its budget");
}

// ---- areas ---------------------------------------------------------------------------------------------

/// Whether a swap file has anything but the header.
fn is_used(path: &str) -> bool {
    fs::read(path).unwrap()[4096..].iter().any(|byte| *byte != 0)
}

#[test]
fn file_made_by_mkswap_takes_pages_and_keeps_its_header() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(path) = swap_file(place.path(), "swap", 160 * MIB) else { return };
    let header = fs::read(&path).unwrap()[..4096].to_vec();
    for options in [&[][..], &["--io", "psync"], &["--install", "copy"]] {
        let running = start_waiting("read_after", &[&["--swap", &path], options].concat());
        go(&running);
        let outcome = running.end();
        assert_eq!(outcome.succeeded().held_its_budget().text(), "all right\n");
        assert!(outcome.counter("pswpout") > 0 && outcome.counter("pswpin") > 0, "{}", outcome.stderr);
        assert!(fs::read(&path).unwrap()[..4096] == header, "the header was changed");
        assert_eq!(fs::metadata(&path).unwrap().len(), 160 * MIB);
    }
}

#[test]
fn area_of_higher_priority_is_filled_first() {
    let Some(_alone) = alone_with("cc") else { return };
    let place = directory();
    let Some(first) = swap_file(place.path(), "first", 160 * MIB) else { return };
    let Some(second) = swap_file(place.path(), "second", 160 * MIB) else { return };
    let areas = [format!("{second},prio=3"), format!("{first},prio=7")];
    let running = start_waiting("read_after", &["--swap", &areas[0], "--swap", &areas[1]]);
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().text(), "all right\n");
    assert!(is_used(&first) && !is_used(&second), "{}", outcome.stderr);
    // The first area is small, so the second takes the rest.
    let areas = [format!("{second},prio=3"), format!("{}:16M,prio=7", place.path().display())];
    let running = start_waiting("read_after", &["--swap", &areas[0], "--swap", &areas[1]]);
    go(&running);
    let outcome = running.end();
    assert_eq!(outcome.succeeded().held_its_budget().text(), "all right\n");
    assert!(is_used(&second) && outcome.counter("pswpout") > 16 * MIB / 4096, "{}", outcome.stderr);
}

//! The supervisor above a program, its parent. Input and output of the program are untouched, its end becomes
//! Farpage's end, signals reach it, and nothing is left behind. A harmless library stands in for the engine.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::{Ended, can_run, directory, farpage, harmless_library, run, skip};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `farpage run` with small settings, up to the program.
fn farpage_run() -> Command {
    let mut command = farpage();
    command.args(["run", "--supervisor", "above", "--ram", "256M", "--swap", "/var/tmp:64M"]);
    command
}

fn ended(mut command: Command) -> Ended {
    Ended::of(command.output().unwrap())
}

/// Waits for something that other processes do. A test that waits in vain fails after ten seconds.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a shell script under farpage and reads its first line, which is its process id.
fn start(script: &str) -> (Child, u32, BufReader<std::process::ChildStdout>) {
    let script = format!("echo $$\n{script}");
    let mut command = farpage_run();
    command.args(["--quiet", "sh", "-c", &script]).stdout(Stdio::piped());
    // The child gets a process group of its own. The tests' group may be orphaned, if a shell that is gone
    // started it in the background. The kernel drops a terminal's stop in an orphaned group.
    command.process_group(0);
    // SAFETY: between fork and exec only async-signal-safe calls that take no memory of Farpage's.
    unsafe { command.pre_exec(hear_signals) };
    let mut child = command.spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    (child, line.trim().parse().unwrap(), output)
}

/// Resets signals that a shell ignores when it starts the tests in the background, as nohup does. The
/// programs that the tests start would ignore them, too.
fn hear_signals() -> std::io::Result<()> {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default is no code of Farpage's.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    Ok(())
}

fn send(pid: u32, signal: i32) {
    // SAFETY: takes no pointers; the process is one that this test started.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

/// Returns the letter in /proc/PID/stat: R, S, T, Z ...
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Parts of the library in C could refer to what a fault must not reach: a program's hooks, a canary in
/// thread-local storage.
#[test]
fn library_refers_to_nothing_that_a_fault_may_not_reach() {
    let bytes = fs::read(farpage::budgeted::library()).unwrap();
    let refers_to = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    assert!(refers_to("memcpy"), "it isn't a library");
    for name in ["ZSTD_trace_", "__stack_chk_fail", "__memcpy_chk", "__tls_get_addr"] {
        assert!(!refers_to(name), "it refers to {name}: is the compiler told what .cargo/config.toml says?");
    }
}

#[test]
fn input_and_output_pass_untouched_and_the_status_is_the_programs() {
    if !can_run() {
        return;
    }
    let mut command = farpage_run();
    command.args(["sh", "-c", "cat; echo to stderr >&2; exit 42"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"line\0\xff\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(42), &b"line\0\xff\n"[..]));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("to stderr\n"), "{stderr}");
    assert!(stderr.contains("farpage: sh ended with status 42"), "{stderr}");
}

#[test]
fn quiet_says_nothing() {
    if !can_run() {
        return;
    }
    let mut command = farpage_run();
    command.args(["--quiet", "true"]);
    let ended = ended(command);
    assert_eq!((ended.status, ended.stderr.as_str()), (Some(0), ""));
    let mut command = farpage_run();
    command.env("FARPAGE_QUIET", "1").arg("false");
    let ended = self::ended(command);
    assert_eq!((ended.status, ended.stderr.as_str()), (Some(1), ""));
}

#[test]
fn program_killed_by_a_signal_kills_us_by_it() {
    if !can_run() {
        return;
    }
    for signal in [9, 15, 6, 11] {
        let mut command = farpage_run();
        command.args(["sh", "-c", &format!("kill -{signal} $$")]);
        let ended = ended(command);
        assert_eq!((ended.signal, ended.status), (Some(signal), None), "{}", ended.stderr);
        assert!(ended.stderr.contains("was killed by SIG"), "{}", ended.stderr);
    }
}

#[test]
fn signals_sent_to_us_reach_the_program() {
    if !can_run() {
        return;
    }
    for signal in [1, 2, 3, 10, 12, 15] {
        let (mut child, _, mut output) = start(
            "for s in 1 2 3 10 12 15; do trap \"echo got $s; exit 7\" $s; done; echo ready; while :; do sleep 0.01; done",
        );
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        send(child.id(), signal);
        line.clear();
        output.read_line(&mut line).unwrap();
        assert_eq!((line.trim(), child.wait().unwrap().code()), (format!("got {signal}").as_str(), Some(7)));
    }
}

/// Sends a signal from the kernel. `listen` prepares the process that becomes farpage; `cause` then has the
/// kernel send the signal to that process alone.
fn kernels_signal_reaches_the_program(
    signal: &str,
    wrapper: &[&str],
    listen: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static,
    cause: impl FnOnce(),
) {
    let mut command = farpage_run();
    let script =
        format!("trap 'echo got {signal}; exit 7' {signal}; echo ready; while :; do sleep 0.01; done");
    command
        .arg("--quiet")
        .args(wrapper)
        .args(["sh", "-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: between fork and exec only async-signal-safe calls that take no memory of Farpage's.
    unsafe { command.pre_exec(hear_signals).pre_exec(listen) };
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    cause();
    assert_eq!(lines.next().unwrap().unwrap(), format!("got {signal}"));
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

#[test]
fn alarm_set_before_us_reaches_the_program() {
    if !can_run() {
        return;
    }
    let listen = || {
        // SAFETY: takes no pointers.
        unsafe { libc::alarm(2) };
        Ok(())
    };
    kernels_signal_reaches_the_program("ALRM", &[], listen, || ());
}

/// A terminal, in whose session farpage is the leader: its two ends, and what a process does to
/// become the leader.
fn terminal() -> (i32, i32, impl FnMut() -> std::io::Result<()> + Send + Sync + 'static) {
    // Other processes that the tests start at this moment must not keep the terminal open.
    let mut name = [0; 64];
    // SAFETY: the name is written to 64 bytes, and read from them.
    let (terminal, ours) = unsafe {
        let terminal = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC);
        assert!(libc::grantpt(terminal) == 0 && libc::unlockpt(terminal) == 0);
        assert_eq!(libc::ptsname_r(terminal, name.as_mut_ptr(), name.len()), 0);
        (terminal, libc::open(name.as_ptr(), libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC))
    };
    assert!(ours >= 0);
    let lead = move || {
        // SAFETY: the calls take no pointers. The signal is reset because a shell that starts the tests in
        // the background ignores it.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::setsid();
            libc::ioctl(ours, libc::TIOCSCTTY, 0);
        }
        Ok(())
    };
    (terminal, ours, lead)
}

/// The kernel tells the leader of a session that its terminal is closed. Farpage is the leader in
/// `xterm -e farpage run ...`.
#[test]
fn end_of_the_terminal_reaches_the_program() {
    if !can_run() {
        return;
    }
    let (terminal, ours, lead) = terminal();
    kernels_signal_reaches_the_program("HUP", &[], lead, || {
        // SAFETY: the test's own descriptor.
        unsafe { libc::close(terminal) };
    });
    // SAFETY: as above.
    unsafe { libc::close(ours) };
}

/// Control-C under `farpage run timeout 600 ...`: timeout makes a process group of its own, which
/// isn't the terminal's.
#[test]
fn terminal_reaches_a_program_that_has_left_its_group() {
    if !can_run() {
        return;
    }
    let (terminal, ours, lead) = terminal();
    kernels_signal_reaches_the_program("INT", &["setsid"], lead, || {
        // SAFETY: the test's own descriptor, and a byte.
        assert_eq!(unsafe { libc::write(terminal, c"\x03".as_ptr().cast(), 1) }, 1);
    });
    // SAFETY: as above.
    unsafe {
        libc::close(terminal);
        libc::close(ours);
    }
}

#[test]
fn stopped_program_stops_us_and_both_go_on() {
    if !can_run() {
        return;
    }
    let (mut child, program, _output) = start("while :; do sleep 0.01; done");
    send(program, libc::SIGTSTP);
    wait_until("stopping", || state(child.id()) == Some('T'));
    send(child.id(), libc::SIGCONT);
    wait_until("going on", || state(program).is_some_and(|state| state != 'T'));
    // A terminal's stop, sent to Farpage alone.
    send(child.id(), libc::SIGTSTP);
    wait_until("stopping again", || state(child.id()) == Some('T') && state(program) == Some('T'));
    send(child.id(), libc::SIGCONT);
    wait_until("going on again", || state(program).is_some_and(|state| state != 'T'));
    send(child.id(), libc::SIGTERM);
    assert_eq!(child.wait().unwrap().signal(), Some(15));
}

/// A process that stops a program by its id continues it alone (`cpulimit`). Farpage must not stay stopped,
/// and must tell the program's end.
#[test]
fn program_that_is_stopped_and_continued_alone_has_its_end_told() {
    if !can_run() {
        return;
    }
    let (mut child, program, _output) = start("sleep 0.5; exit 7");
    send(program, libc::SIGSTOP);
    wait_until("stopping", || state(program) == Some('T'));
    // The pause is longer than twice the time that news may wait.
    std::thread::sleep(Duration::from_millis(300));
    send(program, libc::SIGCONT);
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

/// The program's parent is Farpage, which must not send the signal back.
#[test]
fn what_the_program_sends_to_its_parent_does_not_come_back() {
    if !can_run() {
        return;
    }
    let mut command = farpage_run();
    command.args(["--quiet", "sh", "-c", "kill -USR1 $PPID; sleep 0.5; echo it lives"]);
    assert_eq!(ended(command).stdout, "it lives\n");
}

/// If the output goes to a file, statistics that go there, too, must not replace it.
#[test]
fn statistics_on_standard_output_come_behind_what_the_program_wrote() {
    if !can_run() {
        return;
    }
    let place = directory();
    let path = place.path().join("output");
    let mut command = farpage_run();
    command.args(["--quiet", "--stats", "/dev/stdout", "sh", "-c", "echo what it wrote"]);
    assert!(command.stdout(fs::File::create(&path).unwrap()).status().unwrap().success());
    let output = fs::read_to_string(path).unwrap();
    let stats = output.strip_prefix("what it wrote\n").unwrap_or_else(|| panic!("{output}"));
    assert!(serde_json::from_str::<serde_json::Value>(stats).is_ok(), "{stats}");
}

/// As process 1 of a container Farpage is the parent of all orphans.
#[test]
fn orphans_of_process_1_do_not_stay() {
    let inside = ["-rpf", "--mount-proc"];
    let works = Command::new("unshare").args(inside).arg("true").stderr(Stdio::null()).status();
    if !can_run() || !works.is_ok_and(|status| status.success()) {
        return skip("there is no unshare, or no namespace of processes");
    }
    let mut command = Command::new("unshare");
    let run = farpage_run();
    command
        .args(inside)
        .arg(run.get_program())
        .args(run.get_args())
        .envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let script = "for child in 1 2 3; do (sleep 0.1 &); done; sleep 0.6; grep -c '^State:.Z' /proc/[0-9]*/status | grep -vc ':0$'";
    command.args(["--quiet", "sh", "-c", script]);
    assert_eq!(ended(command).stdout, "0\n");
}

#[test]
fn program_dies_with_us() {
    if !can_run() {
        return;
    }
    let (mut child, program, _output) = start("while :; do sleep 0.01; done");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the program's death", || state(program).is_none_or(|state| state == 'Z'));
}

#[test]
fn program_gets_signals_and_descriptors_as_without_us() {
    if !can_run() {
        return;
    }
    let script = "grep -E '^(Sig(Blk|Ign)|ShdPnd)' /proc/self/status; ls /proc/self/fd | wc -l; ps -o pgid= -p $$ | tr -d ' '";
    let of = |mut command: Command| {
        command.process_group(0).args(["sh", "-c", script]).stdin(Stdio::null());
        // SAFETY: an async-signal-safe call between fork and exec. nohup and Python start programs like this.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            })
        };
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let group = child.id().to_string();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap().replace(&group, "own group")
    };
    assert_eq!(of(farpage_run()), of(Command::new("env")));
}

#[test]
fn library_is_loaded_first_and_others_are_kept() {
    if !can_run() {
        return;
    }
    let ours = harmless_library();
    let mut command = farpage_run();
    let other = fs::canonicalize("/lib/x86_64-linux-gnu/libm.so.6").unwrap_or_else(|_| ours.clone());
    command.env("LD_PRELOAD", &other).args([
        "sh",
        "-c",
        "echo $LD_PRELOAD; ls -L $FARPAGE_SESSION >/dev/null && echo there",
    ]);
    let ended = ended(command);
    let mut expected = vec![ours.canonicalize().unwrap().display().to_string()];
    expected.extend((other != ours).then(|| other.display().to_string()));
    assert_eq!(ended.stdout, format!("{}\nthere\n", expected.join(":")), "{}", ended.stderr);
}

#[test]
fn statistics_are_written_and_replace_what_was_there() {
    if !can_run() {
        return;
    }
    let place = directory();
    let file = farpage::put(place.path(), "stats.json", &[b'x'; 100_000], 0o600);
    let mut command = farpage_run();
    command.args([
        "--stats",
        &file,
        "--codec",
        "none",
        "--pack",
        "off",
        "--io",
        "psync",
        "--wait",
        "sleep",
        "--install",
        "copy",
        "sh",
        "-c",
        "exit 3",
    ]);
    assert_eq!(ended(command).status, Some(3));
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!((&stats["schema"], &stats["exit"]["status"]), (&1.into(), &3.into()));
    let settings = &stats["settings"];
    assert_eq!(settings["ram_bytes"], 256 << 20);
    assert_eq!(settings["pool_bytes_max"], 128 << 20);
    assert_eq!((&settings["codec"], &settings["io"]), (&"none".into(), &"psync".into()));
    assert_eq!((&settings["pack"], &settings["wait"]), (&"off".into(), &"sleep".into()));
    assert_eq!((&settings["install"], &settings["areas"][0]["slots"]), (&"copy".into(), &(64 << 8).into()));
    assert!(stats["counters"]["pswpout"].is_u64() && stats["wall_seconds"].is_f64());
}

#[test]
fn nothing_is_left_in_the_swap_directory_or_file() {
    if !can_run() {
        return;
    }
    let place = directory();
    let own = place.path().to_str().unwrap();
    let empty = farpage::put(place.path(), "empty", b"", 0o600);
    let words = ["--ram", "64M", "--swap", own, "--swap", &format!("{empty}:1M,prio=3"), "ls", "-A", own];
    let ended = run(&words);
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), "empty\n"), "{}", ended.stderr);
    assert_eq!(fs::metadata(&empty).unwrap().len(), 0);
}

#[test]
fn file_made_by_mkswap_is_accepted() {
    if !can_run() {
        return;
    }
    let place = directory();
    let path = farpage::put(place.path(), "swap", &vec![0; 1 << 20], 0o600);
    let mkswap =
        ["mkswap", "/usr/sbin/mkswap", "/sbin/mkswap"].map(|name| Command::new(name).arg(&path).output());
    if !mkswap.iter().any(|made| made.as_ref().is_ok_and(|made| made.status.success())) {
        return farpage::skip("there is no mkswap");
    }
    let ended = run(&["--ram", "64M", "--swap", &path, "echo", "ran"]);
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(0), "ran\n"), "{}", ended.stderr);
}

#[test]
fn script_and_relative_program_run() {
    if !can_run() {
        return;
    }
    let place = directory();
    farpage::put(place.path(), "plain", b"echo $0 $1\n", 0o755);
    farpage::put(place.path(), "script", b"#!/usr/bin/env sh\necho $1 from script\n", 0o755);
    for (program, expected) in [("./plain", "./plain one\n"), ("./script", "one from script\n")] {
        let mut command = farpage_run();
        command.args([program, "one"]).current_dir(place.path());
        let ended = ended(command);
        assert_eq!(ended.stdout, expected, "{}", ended.stderr);
    }
}

/// Without a run the library does nothing, and must say so.
#[test]
fn library_without_a_run_says_what_to_do() {
    let library = farpage::budgeted::library();
    let with = |session: Option<&str>| {
        let mut command = Command::new("true");
        command.env("LD_PRELOAD", &library).env_remove("FARPAGE_SESSION");
        session.into_iter().for_each(|session| _ = command.env("FARPAGE_SESSION", session));
        ended(command)
    };
    let told = with(None);
    assert_eq!(told.status, Some(0));
    assert!(told.stderr.starts_with("farpage: ") && told.stderr.contains("`farpage run`"), "{}", told.stderr);
    // The program is outside of the run on purpose, or was left behind by one.
    assert_eq!((with(Some("")).stderr, with(Some("/proc/1/fd/999")).stderr), (String::new(), String::new()));
}

/// A file of the name `-` must not be written.
#[test]
fn statistics_go_to_standard_output_if_that_is_asked_for() {
    if !can_run() {
        return;
    }
    let place = directory();
    let mut command = farpage();
    command
        .env("FARPAGE_PRELOAD", harmless_library())
        .args(["run", "--ram", "256M", "--stats", "-", "echo", "own"]);
    let ended = ended({
        command.current_dir(place.path());
        command
    });
    let stats = ended.stdout.strip_prefix("own\n").unwrap();
    let stats: serde_json::Value = serde_json::from_str(stats).unwrap();
    assert_eq!((ended.status, &stats["exit"]["status"]), (Some(0), &0.into()));
    assert!(!place.path().join("-").exists());
}

#[test]
fn doctor_tells_the_same_in_both_forms() {
    let json = ended({
        let mut command = farpage();
        command.args(["doctor", "--json"]);
        command
    });
    let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let table = ended({
        let mut command = farpage();
        command.arg("doctor");
        command
    });
    assert_eq!(table.status, json.status);
    assert_eq!(report["works"], json.status == Some(0));
    for check in report["checks"].as_array().unwrap() {
        let name = check["name"].as_str().unwrap();
        assert!(table.stdout.contains(name), "{name} is not in\n{}", table.stdout);
        assert!(check["verdict"] != "no" || check["fixes"].is_array(), "{check}");
    }
}

#[test]
fn doctor_without_the_library_says_no() {
    let mut command = farpage();
    command.arg("doctor").env("FARPAGE_PRELOAD", "/no/such.so");
    let ended = ended(command);
    assert_eq!(ended.status, Some(1));
    assert!(ended.stdout.contains("/no/such.so"));
}

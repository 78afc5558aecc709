//! `--supervisor beside`: the program keeps the process that `farpage run` was started as. Everything
//! that launchers, shells and programs rely on is as without Farpage. The summary is there when the
//! program has ended.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Outcome, Running, Under, able, compiled, library};
use farpage::{can_run, directory, skip};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const RAM: u64 = 64 * MIB;
/// A budget that the programs of `tests/programs` exceed.
const SMALL: u64 = 32 * MIB;

fn beside(ram: u64, options: &[&str], words: &[&str]) -> Job {
    Job::new(&Under::budget(ram, &[&["--supervisor", "beside"], options].concat()), words).within(120)
}

fn script(text: &str) -> Outcome {
    beside(RAM, &[], &["sh", "-c", text]).run()
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn said(running: &Running, name: &str) -> String {
    fs::read_to_string(running.place().join(name)).unwrap_or_default()
}

/// Starts a shell script, and waits until it has said that it is ready.
fn started(text: &str) -> Running {
    let running = beside(RAM, &[], &["sh", "-c", text]).start();
    wait_until("its first word", || said(&running, "stdout").contains("ready"));
    running
}

fn send(pid: i32, signal: i32) {
    // SAFETY: takes no pointers; the process is one that this test started, or that one's group.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Returns the letter in /proc/PID/stat, the parent, and the session.
fn state(pid: u32) -> Option<(char, u32, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let words: Vec<_> = stat.rsplit(") ").next()?.split(' ').map(str::to_owned).collect();
    Some((words[0].chars().next()?, words[1].parse().ok()?, words[3].parse().ok()?))
}

/// Returns the supervisor of a program, by the path of the program's session.
fn supervisor_of(program: u32) -> u32 {
    let variables = fs::read(format!("/proc/{program}/environ")).unwrap();
    let session =
        variables.split(|byte| *byte == 0).find_map(|line| line.strip_prefix(b"FARPAGE_SESSION=/proc/"));
    let session = String::from_utf8_lossy(session.unwrap()).into_owned();
    session.split('/').next().unwrap().parse().unwrap()
}

#[test]
fn show_finds_the_run_by_its_program() {
    if !can_run() || !able("cc") {
        return;
    }
    let program = compiled("waits");
    let running = beside(SMALL, &[], &[program.to_str().unwrap(), "read_after"]).start();
    wait_until("the program's readiness", || running.place().join("ready").exists());
    let supervisor = supervisor_of(running.pid());
    for pid in [running.pid(), supervisor] {
        let shown = farpage::farpage().args(["show", "--json", &pid.to_string()]).output().unwrap();
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(
            (&shown["supervisor"], &shown["processes"][0]["pid"]),
            (&supervisor.into(), &running.pid().into())
        );
    }
    fs::write(running.place().join("go"), "").unwrap();
    assert_eq!(running.end().succeeded().text(), "all right\n");
}

/// A run must not be refused because the file of the run before is not empty yet, or because its
/// supervisor was killed.
#[test]
fn runs_after_each_other_have_the_same_swap_file() {
    if !can_run() || !able("cc") {
        return;
    }
    let (place, program) = (directory(), compiled("waits"));
    let path = farpage::put(place.path(), "area", b"", 0o600);
    let area = format!("{path}:200M");
    let start = || beside(SMALL, &["--swap", &area], &[program.to_str().unwrap(), "read_after"]).start();
    let killed = start();
    wait_until("pages in the file", || fs::metadata(&path).unwrap().len() > MIB);
    send(supervisor_of(killed.pid()) as i32, libc::SIGKILL);
    assert_eq!(killed.end().signal, Some(libc::SIGKILL));
    assert!(fs::metadata(&path).unwrap().len() > MIB);
    for _ in 0..12 {
        let running = start();
        fs::write(running.place().join("go"), "").unwrap();
        let outcome = running.end();
        assert!(outcome.counter("pswpout") > 0);
        assert_eq!(outcome.succeeded().text(), "all right\n");
    }
    wait_until("the file's being empty", || fs::metadata(&path).unwrap().len() == 0);
}

#[test]
fn program_has_our_process_and_its_supervisor_stands_aside() {
    if !can_run() {
        return;
    }
    let running = started("echo ready $$ $PPID; while ! test -e go; do sleep 0.01; done; exit 7");
    let words = said(&running, "stdout");
    assert_eq!(words.trim(), format!("ready {} {}", running.pid(), std::process::id()));
    let supervisor = supervisor_of(running.pid());
    let (_, parent, session) = state(supervisor).unwrap();
    let (_, _, programs) = state(running.pid()).unwrap();
    assert!(parent != running.pid() && parent != std::process::id(), "it is the child of {parent}");
    assert_ne!(session, programs, "what the terminal sends would reach it");
    for (descriptor, is_open) in [(0, false), (1, false), (2, true)] {
        let file = |pid: u32| fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).unwrap();
        let is_nothing = file(supervisor) == Path::new("/dev/null");
        assert_eq!(is_nothing, !is_open, "descriptor {descriptor}: {:?}", file(supervisor));
    }
    fs::write(running.place().join("go"), "").unwrap();
    let outcome = running.end();
    assert_eq!((outcome.status, outcome.stats["exit"]["status"].as_u64()), (Some(7), Some(7)));
    wait_until("the supervisor's end", || state(supervisor).is_none());
}

/// Each way to end that a program can choose. The summary and the statistics are complete when the
/// program's parent goes on.
#[test]
fn summary_is_there_when_the_program_has_ended() {
    if !able("python3") {
        return;
    }
    let all = [
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("import ctypes; ctypes.CDLL(None).syscall(231, 5)", 5),
        // The kernel tells the first program's peak only if it is above that of Farpage.
        ("import os; b = bytearray(24 << 20); os.execv('/bin/sh', ['sh', '-c', 'exit 6'])", 6),
    ];
    for (text, status) in all {
        let outcome = beside(RAM, &[], &["python3", "-c", text]).run();
        assert!(!outcome.is_late, "{text}: {}", outcome.stderr);
        ended_with(&outcome, status);
        let peak = outcome.stats["resident_peak"].as_u64().unwrap();
        assert!((4 * MIB..RAM).contains(&peak), "{text}: {peak}");
    }
}

#[track_caller]
fn ended_with(outcome: &Outcome, status: i32) {
    let stderr = &outcome.stderr;
    assert_eq!(outcome.status, Some(status), "{stderr}");
    assert_eq!(outcome.stats["exit"]["status"].as_i64(), Some(status.into()), "{stderr}");
    assert!(stderr.contains(&format!("ended with status {status}")), "{stderr}");
}

/// A program with threads must not end before its summary is complete:
/// `farpage run --stats FILE -- node ...; jq . FILE` would read half a file. The process therefore executes a
/// program that waits, which ends its other threads.
#[test]
fn summary_is_there_when_a_program_with_threads_has_ended() {
    if !able("python3") {
        return;
    }
    let begin =
        "import ctypes, os, threading; threading.Thread(target=threading.Event().wait, daemon=True).start()";
    let grow = "b = os.urandom(90 << 20)";
    let from_a_thread = "threading.Thread(target=lambda: os._exit(6)).start(); threading.Event().wait()";
    for faults in ["thread", "signal", "segv"] {
        for (grow, end, status) in [
            ("", "os._exit(3)", 3),
            (grow, "os._exit(255)", 255),
            (grow, "os._exit(0)", 0),
            ("", "ctypes.CDLL(None).syscall(231, 5)", 5),
            ("", from_a_thread, 6),
        ] {
            let text = format!("{begin}; {grow}; {end}").replace("; ;", ";");
            let outcome = beside(RAM, &["--faults", faults], &["python3", "-c", &text]).run();
            if outcome.stderr.contains("can't be used here") {
                continue;
            }
            ended_with(&outcome, status);
            assert!(!outcome.is_late, "{faults} {text}: {}", outcome.stderr);
            assert!(
                !outcome.stderr.contains("ran outside of this budget"),
                "{faults} {text}: {}",
                outcome.stderr
            );
        }
    }
}

/// The kernel tells only those who may trace a process how a zombie ended, and writes 0 for all readers that
/// may not. Root may not trace in containers. The summary must not say "ended with status 0" then.
#[test]
fn death_that_the_supervisor_may_not_see_is_not_told_as_status_0() {
    if !able("setpriv") || !farpage::is_root() {
        return;
    }
    let dies = "sh -c 'kill -9 \\$\\$'";
    let run = format!(
        "\"{}\" run --ram 64M --faults segv --supervisor beside -- setpriv --reuid 65534 --regid 65534 --clear-groups {dies}",
        env!("CARGO_BIN_EXE_farpage")
    );
    let script = format!("sh -c \"{}\" & sleep 1; wait", run.replace('"', "\\\""));
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", "sh", "-c", &script]);
    let done = command.env("FARPAGE_PRELOAD", library()).output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
    let is_told =
        stderr.contains("setpriv was killed by SIGKILL") || stderr.contains("only its parent knows");
    assert!(is_told && !stderr.contains("ended with status 0"), "{stderr}");
}

/// getrusage includes what a process had before exec, and what the process had that made it with vfork.
/// Neither is the program's peak.
#[test]
fn peak_is_the_programs_and_not_its_launchers() {
    if !able("python3") {
        return;
    }
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    let python = String::from_utf8(python.stdout).unwrap().trim().to_owned();
    for (program, most) in
        [("true", 4 * MIB), ("sh -c '/bin/true; /bin/true'", 4 * MIB), ("burst", 160 * MIB)]
    {
        for begins in ["subprocess.run(words)", "os.execvp(words[0], words)"] {
            let place = directory();
            let stats = place.path().join("stats.json");
            let text = format!(
                "import os, shlex, subprocess, sys
large = bytearray(b'x' * (300 << 20))
program = shlex.split({program:?}) if {program:?} != 'burst' else [sys.executable, '-c', 'bytearray(100 << 20)']
words = [sys.argv[1], 'run', '--ram', '1G', '--supervisor', 'beside', '--stats', sys.argv[2], '--'] + program
{begins}"
            );
            let mut command = Command::new(&python);
            command.args(["-c", &text, env!("CARGO_BIN_EXE_farpage")]).arg(&stats);
            let done = command.env("FARPAGE_PRELOAD", library()).output().unwrap();
            let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
            let stats = fs::read_to_string(&stats).unwrap();
            let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
            let peak = stats["resident_peak"].as_u64().unwrap();
            assert!((MIB..most).contains(&peak), "{program} {begins}: {peak}: {stderr}");
            assert!(program != "burst" || peak > 100 * MIB, "{begins}: {peak}: {stderr}");
            // The peak of the largest of several processes may be hidden by what was there before.
            let is_known = stats["resident_peak_is_known"].as_bool().unwrap();
            assert!(is_known || program.starts_with("sh "), "{program} {begins}: {stderr}");
        }
    }
}

/// If the process can't execute anything, or another process would see the exec, the process ends as it is.
#[test]
fn program_with_threads_that_may_execute_nothing_ends_with_its_status() {
    if !able("python3") {
        return;
    }
    let begin = "import ctypes, os, resource, struct, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
libc = ctypes.CDLL(None)
def forbid(call):
    code = b''.join(struct.pack('HBBI', *step) for step in [(0x20, 0, 0, 0), (0x15, 0, 1, call), (6, 0, 0, 0), (6, 0, 0, 0x7fff0000)])
    code = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4, ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
";
    for forbids in [
        // execve would be killed: the filter's answer is SECCOMP_RET_KILL_THREAD.
        "forbid(59)",
        // The new program would need this call.
        "forbid(257)",
        "resource.setrlimit(resource.RLIMIT_DATA, (0, 0))",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
        "resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
        "os.chroot('/var/empty' if os.path.isdir('/var/empty') else '/var/tmp')",
    ] {
        if forbids.contains("chroot") && !farpage::is_root() {
            continue;
        }
        let text = format!("{begin}{forbids}\nos._exit(9)");
        let outcome = beside(RAM, &[], &["python3", "-c", &text]).run();
        assert_eq!((outcome.status, outcome.signal), (Some(9), None), "{forbids}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("farpage: python3 "), "{forbids}: {}", outcome.stderr);
    }
}

/// The kernel walks the list of robust locks when nobody serves faults any more, and one lock's
/// page is evicted.
#[test]
fn program_with_threads_that_holds_a_robust_lock_ends() {
    if !able("cc") {
        return;
    }
    let program = compiled("waits");
    for faults in ["thread", "signal", "segv"] {
        let words = [program.to_str().unwrap(), "ends_with_a_robust_lock"];
        let outcome = beside(SMALL, &["--faults", faults], &words).within(60).run();
        if outcome.stderr.contains("can't be used here") {
            continue;
        }
        ended_with(&outcome, 7);
        assert!(outcome.counter("evict_taken") > 0, "{faults}: {}", outcome.stderr);
    }
}

/// The file in the library's place may be any file by then.
#[test]
fn program_with_threads_executes_no_other_file() {
    if !able("python3") {
        return;
    }
    let place = directory();
    let [kept, other] = ["kept.so", "other"].map(|name| place.path().join(name));
    fs::copy(library(), &kept).unwrap();
    fs::copy("/bin/false", &other).unwrap();
    let text = "import os, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.rename(sys.argv[1], sys.argv[2])
os._exit(9)";
    let mut command = farpage::farpage();
    command.args(["run", "--ram", "64M", "--supervisor", "beside", "python3", "-c", text]);
    let done = command.arg(&other).arg(&kept).env("FARPAGE_PRELOAD", &kept).output().unwrap();
    assert_eq!(done.status.code(), Some(9), "{}", String::from_utf8_lossy(&done.stderr));
}

/// strace and gdb would show an exec that the program has not made.
#[test]
fn program_with_threads_that_is_traced_executes_nothing() {
    if !able("python3") || !able("strace") {
        return;
    }
    let text = "import os, threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); os._exit(8)";
    let place = directory();
    let log = place.path().join("calls");
    let mut command = Command::new("strace");
    command.args(["-f", "-e", "trace=execve", "-o"]).arg(&log).arg(env!("CARGO_BIN_EXE_farpage"));
    command.args(["run", "--ram", "64M", "--supervisor", "beside", "python3", "-c", text]);
    let done = command.env("FARPAGE_PRELOAD", library()).output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(8), "{stderr}");
    let calls = fs::read_to_string(&log).unwrap();
    assert!(calls.contains("python3") && !calls.contains("execve(\"/proc"), "{calls}");
    assert!(!calls.contains(".so\""), "{calls}");
}

/// While a program waits for the summary, its threads must not get the time to use what is freed at its end.
/// A thread that does ends the program by SIGSEGV.
#[test]
fn program_whose_threads_use_what_is_freed_ends_and_is_told_of() {
    if !able("cc") {
        return;
    }
    let program = compiled("waits");
    let mut killed = 0;
    for _ in 0..10 {
        let running = beside(RAM, &[], &[program.to_str().unwrap(), "ends_beside_a_thread"]).start();
        let place = directory();
        let kept = place.path().join("stderr");
        fs::hard_link(running.place().join("stderr"), &kept).unwrap();
        let outcome = running.end();
        killed += u32::from(outcome.signal == Some(libc::SIGSEGV));
        assert!(outcome.status == Some(0) || outcome.signal == Some(libc::SIGSEGV), "{}", outcome.stderr);
        wait_until("the summary", || fs::read_to_string(&kept).unwrap().contains("farpage: waits "));
    }
    // On a busy machine the thread may be quicker by itself.
    assert!(killed <= 2, "{killed} of 10");
}

/// Of several threads that end a program at once the kernel takes one status. The summary must give the same.
#[test]
fn status_is_the_one_that_the_program_ended_with() {
    if !able("python3") {
        return;
    }
    let text = "
import os, threading
barrier = threading.Barrier(8)
def end(status):
    barrier.wait()
    os._exit(status)
for status in range(1, 9):
    threading.Thread(target=end, args=(status,)).start()
threading.Event().wait()
";
    let place = directory();
    for turn in 0..5 {
        let path = place.path().join(format!("stderr.{turn}"));
        let mut command = farpage::farpage();
        command.args(["run", "--ram", "64M", "--supervisor", "beside", "--", "python3", "-c", text]);
        command.env("FARPAGE_PRELOAD", library()).stderr(fs::File::create(&path).unwrap());
        let status = command.status().unwrap().code().unwrap();
        let told = || fs::read_to_string(&path).unwrap();
        wait_until("the summary", || told().contains("farpage: python3 "));
        let is_right = told().contains(&format!("ended with status {status} after"));
        assert!(is_right || told().contains("only its parent knows"), "{status}: {}", told());
    }
}

/// A handler of the program's must not run while the program waits for its summary: the handler could
/// go on with the program.
#[test]
fn no_handler_runs_once_the_program_ends() {
    if !able("python3") {
        return;
    }
    let text = "
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: os.write(1, b'late'))
signal.setitimer(signal.ITIMER_REAL, 0.2)
os.kill(int(open('/proc/self/environ').read().split('FARPAGE_SESSION=/proc/')[1].split('/')[0]), signal.SIGSTOP)
os.write(1, b'ends ')
import ctypes
ctypes.CDLL(None)._exit(3)
";
    let running = beside(RAM, &[], &["python3", "-c", text]).start();
    let supervisor = {
        wait_until("its first word", || said(&running, "stdout").contains("ends"));
        supervisor_of(running.pid())
    };
    wait_until("the program's end", || state(running.pid()).is_none_or(|state| state.0 == 'Z'));
    send(supervisor as i32, libc::SIGCONT);
    let outcome = running.end();
    assert_eq!((outcome.status, outcome.text().as_str()), (Some(3), "ends "), "{}", outcome.stderr);
}

/// The supervisor must not keep a file open that the program has closed: a lock on a file of the
/// launcher's must become free.
#[test]
fn supervisor_keeps_no_descriptor_of_the_launchers() {
    if !can_run() {
        return;
    }
    let place = directory();
    let script = "exec 9> lock; flock 9; exec $F sh -c 'exec 9>&-; echo ready; while ! test -e go; do sleep 0.01; done'";
    let mut command = Command::new("sh");
    let farpage = format!("{} run --ram 64M --supervisor beside --", env!("CARGO_BIN_EXE_farpage"));
    command
        .args(["-c", script])
        .current_dir(place.path())
        .env("FARPAGE_PRELOAD", library())
        .env("F", farpage);
    let out = place.path().join("stdout");
    let mut child = command.stdout(fs::File::create(&out).unwrap()).spawn().unwrap();
    wait_until("its first word", || fs::read_to_string(&out).unwrap().contains("ready"));
    let lock = fs::File::open(place.path().join("lock")).unwrap();
    let is_free = lock.try_lock().is_ok();
    fs::write(place.path().join("go"), "").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(is_free, "somebody holds the lock");
}

/// A program over its budget ends right, and its summary is there, in each mode.
#[test]
fn program_over_its_budget_is_right_and_told_of() {
    if !able("cc") {
        return;
    }
    let program = compiled("heap");
    for faults in ["thread", "signal", "segv"] {
        let outcome =
            beside(SMALL, &["--faults", faults], &[program.to_str().unwrap(), "small_blocks"]).run();
        if outcome.stderr.contains("can't be used here") {
            continue;
        }
        outcome.succeeded();
        assert!(outcome.counter("evict_taken") > 0, "{faults}: {}", outcome.stderr);
    }
}

/// A killed program says nothing. The supervisor finds out a moment later.
#[test]
fn death_by_a_signal_is_the_programs_own_and_told() {
    if !can_run() {
        return;
    }
    for (signal, name) in [(9, "SIGKILL"), (15, "SIGTERM"), (6, "SIGABRT"), (11, "SIGSEGV")] {
        let place = directory();
        let path = place.path().join("stderr");
        let mut command = farpage::farpage();
        command.args([
            "run",
            "--ram",
            "64M",
            "--supervisor",
            "beside",
            "--",
            "sh",
            "-c",
            &format!("kill -{signal} $$"),
        ]);
        command.env("FARPAGE_PRELOAD", library()).stderr(fs::File::create(&path).unwrap());
        let status = command.status().unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(signal));
        let told = || fs::read_to_string(&path).unwrap_or_default();
        wait_until("the summary", || told().contains("farpage: sh "));
        let is_told = told().contains(&format!("sh was killed by {name}"));
        // Before Linux 6.15, a parent that waits sooner leaves nothing for the supervisor to find.
        assert!(is_told || told().contains("only its parent knows"), "{}", told());
    }
}

#[test]
fn supervisor_is_nobodys_child_that_the_program_waits_for() {
    if !able("python3") {
        return;
    }
    let text = "
import os
try:
    print(os.wait())
except ChildProcessError:
    print('no child')
print(os.waitstatus_to_exitcode(os.waitpid(os.spawnlp(os.P_NOWAIT, 'true', 'true'), 0)[1]))
";
    let outcome = beside(RAM, &[], &["python3", "-c", text]).run();
    assert_eq!((outcome.status, outcome.text().as_str()), (Some(0), "no child\n0\n"), "{}", outcome.stderr);
}

/// `kill $!`, `timeout` and a terminal's group: the program gets each signal once, and no other
/// process gets them.
#[test]
fn signals_arrive_once_wherever_they_are_sent_to() {
    if !can_run() {
        return;
    }
    let text = "trap 'echo INT' INT; trap 'echo USR1' USR1; trap 'echo TERM; exit 9' TERM; echo ready
        while :; do sleep 0.01; done";
    let place = directory();
    let out = place.path().join("stdout");
    let mut command = farpage::farpage();
    command.args(["run", "--ram", "64M", "--supervisor", "beside", "--quiet", "--", "sh", "-c", text]);
    command.env("FARPAGE_PRELOAD", library()).stdout(fs::File::create(&out).unwrap());
    // The tests may have been started in the background, where shells ignore the signal.
    // SAFETY: the signal's default runs no code of this process.
    unsafe {
        command.process_group(0).pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        })
    };
    let mut child = command.spawn().unwrap();
    let told = || fs::read_to_string(&out).unwrap();
    wait_until("its first word", || told().contains("ready"));
    let group = -(child.id() as i32);
    for count in 1..=3 {
        send(group, libc::SIGINT);
        wait_until("the signal", || told().matches("INT").count() == count);
    }
    send(child.id() as i32, libc::SIGUSR1);
    wait_until("the signal", || told().contains("USR1"));
    send(group, libc::SIGTERM);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(9));
    assert_eq!(told(), "ready\nINT\nINT\nINT\nUSR1\nTERM\n");
}

/// A process between the two ends before the program begins. A program that was started with SIGCHLD blocked
/// must not find that signal pending.
#[test]
fn program_has_no_signal_of_ours() {
    if !can_run() {
        return;
    }
    let mut command = farpage::farpage();
    command.args(["run", "--ram", "64M", "--supervisor", "beside", "--quiet", "--"]);
    command.args(["grep", "-E", "^(SigPnd|ShdPnd|SigBlk)", "/proc/self/status"]);
    command.env("FARPAGE_PRELOAD", library());
    // SAFETY: a set of signals on this stack, in a child before exec.
    unsafe {
        command.pre_exec(|| {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGCHLD);
            libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
            Ok(())
        })
    };
    let output = command.output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let values: Vec<_> = words.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(values, ["0000000000000000", "0000000000000000", "0000000000010000"], "{words}");
}

/// Ctrl-Z and `fg`: a process that waits for the job sees it stop, and nothing of the job goes on meanwhile.
#[test]
fn job_stops_and_goes_on_as_one_process() {
    if !can_run() {
        return;
    }
    let running = started("echo ready; while ! test -e go; do sleep 0.01; done; exit 5");
    let pid = running.pid();
    let (mut status, stopped) = (0, libc::WUNTRACED);
    send(pid as i32, libc::SIGSTOP);
    // SAFETY: writes one integer.
    assert_eq!(unsafe { libc::waitpid(pid as i32, &mut status, stopped) }, pid as i32);
    assert!(libc::WIFSTOPPED(status));
    fs::write(running.place().join("go"), "").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(state(pid).unwrap().0, 'T');
    send(pid as i32, libc::SIGCONT);
    assert_eq!(running.end().status, Some(5));
}

/// A run whose supervisor is killed ends.
#[test]
fn program_dies_with_its_supervisor() {
    if !can_run() {
        return;
    }
    let running = started("echo ready; while :; do sleep 0.01; done");
    send(supervisor_of(running.pid()) as i32, libc::SIGKILL);
    assert_eq!(running.end().signal, Some(libc::SIGKILL));
}

/// A subreaper would be given the supervisor, and the program could wait for it. There the supervisor isn't
/// beside the program.
#[test]
fn supervisor_of_a_subreaper_is_its_parent_and_says_so() {
    if !can_run() {
        return;
    }
    for asks in [true, false] {
        let mut command = farpage::farpage();
        command.args(["run", "--ram", "64M"]).args(asks.then_some("--supervisor=beside"));
        command.args(["--", "sh", "-c", "echo $$; exit 3"]).env("FARPAGE_PRELOAD", library());
        command.env_remove("FARPAGE_SUPERVISOR").stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: takes no pointers.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
                Ok(())
            })
        };
        let child = command.spawn().unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(3), "{err}");
        assert_ne!(out.trim(), pid.to_string(), "{err}");
        assert_eq!(err.contains("note: the supervisor is the program's parent"), asks, "{err}");
    }
}

/// Returns the output of a Python program that is process 1 of a namespace. The program's first argument is
/// the farpage executable.
#[track_caller]
fn said_by_process_1(text: &str) -> Option<(String, String)> {
    let inside = ["-rpf", "--mount-proc"];
    let works = Command::new("unshare").args(inside).arg("true").stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        skip("there is no unshare, or no namespace of processes");
        return None;
    }
    let run = farpage::farpage();
    let mut command = Command::new("unshare");
    command
        .args(inside)
        .args(["python3", "-c", text])
        .arg(run.get_program())
        .env("FARPAGE_PRELOAD", library());
    let output = command.env_remove("FARPAGE_SUPERVISOR").output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{out}{err}");
    Some((out, err))
}

/// The supervisor is beside the program by default, and where the user asks for it. A container whose process
/// 1 is `sleep infinity` would keep a zombie of each run. With many zombies the default is therefore above.
#[test]
fn process_1_that_waits_for_no_orphans_keeps_no_more_than_some_zombies() {
    if !able("python3") {
        return;
    }
    let text = r#"if True:
        import os, subprocess, sys
        libc = __import__("ctypes").CDLL(None)
        def zombies(count):
            for _ in range(count):
                child = os.fork()
                if child == 0:
                    libc.prctl(15, b"farpage", 0, 0, 0)
                    os._exit(0)
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        def run(*options):
            os.environ["ALL"] = " ".join([sys.argv[1], "run --ram 64M --quiet", *options, "-- sh -c 'echo $PPID'"])
            said = subprocess.run(["sh", "-c", "echo $$; eval \"$ALL\""], capture_output=True, text=True)
            print("beside" if len(set(said.stdout.split())) == 1 else "above", said.stderr)
        zombies(40); run(); run("--supervisor", "above"); zombies(40); run(); run("--supervisor", "beside")"#;
    let Some((out, err)) = said_by_process_1(text) else { return };
    let lines: Vec<_> = out.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines, ["beside", "above", "above", "beside"], "{err}");
}

/// `tini -- farpage run`: the container ends with the program, and so would the supervisor of a killed
/// program, without a summary.
#[test]
fn run_that_a_container_ends_with_has_its_supervisor_above() {
    if !able("python3") {
        return;
    }
    let text = r#"if True:
        import os, subprocess, sys
        subprocess.run([sys.argv[1], "run", "--ram", "64M", "--", "sh", "-c", "echo $PPID; kill -9 $$"])
        os._exit(0)"#;
    let Some((out, err)) = said_by_process_1(text) else { return };
    assert_ne!(out, "1\n", "{err}");
    assert!(err.contains("was killed by SIGKILL"), "{err}");
}

/// `pkill farpage` reaches the supervisor, and ends nothing. A note tells the sender so ten seconds later.
#[test]
fn signal_to_the_supervisor_ends_nothing_and_is_told_of_once() {
    if !can_run() {
        return;
    }
    let waits = |options: &[&str]| {
        let text = "echo ready; while :; do sleep 0.01; done";
        let running = beside(RAM, options, &["sh", "-c", text]).start();
        wait_until("its first word", || said(&running, "stdout").contains("ready"));
        running
    };
    let [told, quiet, reloaded] = [waits(&[]), waits(&["--quiet"]), waits(&[])];
    let all = [&told, &quiet, &reloaded].map(|running| (running.pid(), supervisor_of(running.pid())));
    let signals = [libc::SIGTERM, libc::SIGTERM, libc::SIGHUP];
    all.iter().zip(signals).for_each(|((_, supervisor), signal)| send(*supervisor as i32, signal));
    wait_until("the note", || said(&told, "stderr").contains("was sent to Farpage's supervisor"));
    send(all[0].1 as i32, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(500));
    let outcomes = [told, quiet, reloaded].map(|running| {
        send(running.pid() as i32, libc::SIGTERM);
        running.end()
    });
    for (outcome, notes) in outcomes.iter().zip([1, 0, 0]) {
        let found = outcome.stderr.matches("was sent to Farpage's supervisor").count();
        assert_eq!((outcome.signal, found), (Some(libc::SIGTERM), notes), "{}", outcome.stderr);
    }
    let (program, supervisor) = all[0];
    let whom = format!("(process {supervisor}), which stays as long as the program (process {program})");
    assert!(outcomes[0].stderr.contains(&whom), "{}", outcomes[0].stderr);
}

/// Where the user may have only one process more, the supervisor is the program's parent. The run
/// must not be refused.
#[test]
fn supervisor_is_above_where_it_takes_one_process_too_many() {
    // SAFETY: takes no pointers.
    if !can_run() || unsafe { libc::geteuid() } != 0 {
        return;
    }
    let place = directory();
    farpage::install(&library(), &place.path().join("libfarpage_preload.so"), 0o755);
    farpage::install(Path::new(env!("CARGO_BIN_EXE_farpage")), &place.path().join("farpage"), 0o755);
    fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(place.path().join("farpage"));
    // The budget is large enough for the shell to need no thread of Farpage's.
    command
        .args(["run", "--ram", "640M", "--no-disk", "--supervisor", "beside", "--", "sh", "-c", "echo ran"])
        .current_dir("/");
    // No other process has this user's number, so the limit counts these processes alone.
    let user = 100_000 + std::process::id();
    command.uid(user).gid(user);
    let limit = libc::rlimit { rlim_cur: 2, rlim_max: 2 };
    // SAFETY: reads one structure.
    unsafe {
        command.pre_exec(move || {
            libc::setrlimit(libc::RLIMIT_NPROC, &limit);
            Ok(())
        })
    };
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"ran\n"[..]), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("not beside it: there may be one process more"), "{told}");
}

/// A run that can't begin has the same status and message as otherwise, once.
#[test]
fn run_that_is_refused_says_so_once() {
    if !can_run() {
        return;
    }
    let refused = |options: &[&str], words: &[&str]| {
        let outcome = beside(RAM, options, words).run();
        (outcome.status, outcome.stderr.matches("fix:").count(), outcome.stderr)
    };
    let (status, fixes, text) = refused(&[], &["no-such-program"]);
    assert!((status, fixes > 0) == (Some(127), true), "{text}");
    // The supervisor finds this out, when it makes the session.
    let outcome = beside(
        RAM,
        &[],
        &[
            "sh",
            "-c",
            "ulimit -f 1; exec \"$0\" run --ram 64M --no-disk --supervisor beside -- true",
            env!("CARGO_BIN_EXE_farpage"),
        ],
    );
    let outcome = outcome.run();
    assert_eq!(outcome.status, Some(125), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches("files may not be larger than").count(), 1, "{}", outcome.stderr);
}

/// A run that is ended for its memory has Farpage's status.
#[test]
fn run_over_its_budget_ends_with_our_status() {
    if !able("python3") {
        return;
    }
    let text = "import ctypes, time; ctypes.CDLL(None).mlockall(3); b = bytearray(200 << 20); time.sleep(60)";
    let outcome = beside(RAM, &["--over-budget", "kill"], &["python3", "-c", text]).run();
    assert_eq!(outcome.status, Some(125), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("above its budget"), "{}", outcome.stderr);
}

/// Launchers see one process: the process that they start, wait for and end is the program.
#[test]
fn launchers_have_the_program_itself() {
    if !can_run() {
        return;
    }
    let place = directory();
    let farpage = format!("{} run --ram 64M --supervisor beside --", env!("CARGO_BIN_EXE_farpage"));
    let sh = |text: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-c", text])
            .current_dir(place.path())
            .env("FARPAGE_PRELOAD", library())
            .env("F", &farpage);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let [out, err] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        (output.status.code(), out, err)
    };
    for (launcher, status, words) in [
        ("timeout 1 $F sh -c 'trap \"echo TERM; exit 5\" TERM; while :; do sleep 0.01; done'", 124, "TERM\n"),
        ("$F sh -c 'echo $$' & echo $! > pid; wait $!; cat pid", 0, ""),
        ("$F sh -c 'exit 4' & wait $!", 4, ""),
        ("nohup $F sh -c 'echo all right'", 0, "all right\n"),
        ("setsid -w $F sh -c 'echo all right; exit 6'", 6, "all right\n"),
        ("echo a b c | xargs -n 1 $F echo", 0, "a\nb\nc\n"),
        ("nice -n 3 env X=y $F sh -c 'echo $X'", 0, "y\n"),
        ("echo in | $F cat | cat", 0, "in\n"),
        ("x=$($F echo out 2>/dev/null); echo $x", 0, "out\n"),
        ("$F sh -c 'kill -9 $$'; echo $?", 0, "137\n"),
        ("printf 'all:\\n\\t@$$F sh -c \"exit 0\"\\n\\t@$$F echo made\\n' > Makefile; make -s", 0, "made\n"),
    ] {
        let (found, out, err) = sh(launcher);
        assert_eq!(found, Some(status), "{launcher}: {out}{err}");
        if !words.is_empty() {
            assert_eq!(out, words, "{launcher}: {err}");
        } else if launcher.contains("cat pid") {
            let [own, seen] = [0, 1].map(|at| out.lines().nth(at).unwrap_or_default().to_owned());
            assert_eq!(own, seen, "{launcher}: {err}");
        }
    }
}

/// A run leaves nothing behind.
#[test]
fn nothing_is_left_behind() {
    if !can_run() {
        return;
    }
    let swap = directory();
    let path = swap.path().to_str().unwrap();
    let outcome = beside(RAM, &["--swap", path], &["true"]).run();
    assert_eq!(outcome.status, Some(0), "{}", outcome.stderr);
    wait_until("the area's end", || fs::read_dir(swap.path()).unwrap().next().is_none());
    assert!(script("exit 0").stderr.contains("stayed within its budget"));
}

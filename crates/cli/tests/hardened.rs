//! Programs that have been shut off from the looks of other processes, from changing code, or from more
//! descriptors. The programs run on, and Farpage manages what it can.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Under, alone_with, compiled, find, has};
use farpage::{install, is_root, skip};

const RAM: u64 = 32 * MIB;

/// A process that nobody may look at can't look at itself, and has no engine of its own. Farpage must not end
/// its children, nor a program that can't be read. Without evicted pages a fork's child goes on. With evicted
/// pages the fork is refused, and the parent goes on.
#[test]
fn processes_that_nobody_may_look_at_go_on() {
    const SCRIPT: &str = "
import ctypes, os

def child():
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
print(child())
data = [bytes([at % 256]) * 4000 for at in range(30000)]
try:
    print(child())
except OSError as error:
    print(error.errno)
print(all(page == bytes([at % 256]) * 4000 for at, page in enumerate(data)))
";
    let Some(_alone) = alone_with("python3") else { return };
    if !is_root() {
        return skip("only root can have a file that its user can't read");
    }
    let under = Under::Container { ram: 64 * MIB };
    let outcome = Job::new(&under, &["/usr/bin/python3", "-c", SCRIPT]).within(60).run();
    outcome.succeeded();
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "7\n12\nTrue\n", "{}", outcome.stderr);
    assert_eq!(outcome.counter("fork_refused"), 1, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("it runs without Farpage"), "{}", outcome.stderr);

    let job = Job::new(&under, &["sh", "-c", "./closed"]);
    install(&find("true").unwrap(), &job.place.path().join("closed"), 0o111);
    let outcome = job.within(60).run();
    outcome.succeeded();
    assert!(outcome.stderr.contains("keeps others from looking at its memory"), "{}", outcome.stderr);
}

/// If nothing is evicted, a child has all that its parent has. Without a free descriptor for an engine
/// the child must go on.
#[test]
fn child_that_can_have_no_engine_goes_on() {
    const SCRIPT: &str = "
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))
pid = os.fork()
if pid == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";
    let Some(_alone) = alone_with("python3") else { return };
    let outcome = Job::new(&Under::budget(64 * MIB, &[]), &["python3", "-c", SCRIPT]).within(60).run();
    outcome.succeeded();
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "7\n", "{}", outcome.stderr);
    assert!(outcome.stderr.contains("no file descriptor is free"), "{}", outcome.stderr);
}

/// Where code may never have been writable (PR_SET_MDWE, systemd's MemoryDenyWriteExecute), libc's functions
/// can't be replaced as usual. Programs that are started there must run.
#[test]
fn programs_that_may_not_change_code_are_managed() {
    const SCRIPT: &str = "
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0:
    print('there is no PR_SET_MDWE')
    sys.exit(0)
os.execv(sys.argv[1], sys.argv[1:])
";
    let Some(_alone) = alone_with("python3").filter(|_| has("cc")) else { return };
    let program = compiled("remap");
    let words = ["python3", "-c", SCRIPT, program.to_str().unwrap(), "moved_growth"];
    let outcome = Job::new(&Under::budget(RAM, &[]), &words).within(60).run();
    outcome.succeeded();
    if !outcome.stdout.is_empty() {
        return skip("PR_SET_MDWE is new in Linux 6.3");
    }
    assert!(outcome.counter("evict_taken") > 0, "nothing was evicted: {}", outcome.stderr);
}

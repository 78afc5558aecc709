//! Programs that install filters of seccomp, in each mode: no thread of Farpage's is without the filter, or
//! no thread of Farpage's is left (`tests/programs/filters.c`).

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Under, able, compiled};

const RAM: u64 = 32 * MIB;

/// State of the engine after the program's filter.
#[derive(Clone, Copy, PartialEq)]
enum Engine {
    Stays,
    Ends,
}

fn check(faults: &str, case: &str, engine: Engine) {
    if !able("cc") {
        return;
    }
    let executable = compiled("filters");
    let words = [executable.to_str().unwrap(), case];
    let outcome = Job::new(&Under::budget(RAM, &["--faults", faults]), &words).within(120).run();
    outcome.succeeded();
    let has_left = outcome.stderr.contains("Farpage has left it");
    assert_eq!(has_left, engine == Engine::Ends, "{}", outcome.stderr);
    if !case.ends_with("_before") || engine == Engine::Stays {
        assert!(outcome.counter("evict_taken") > 0, "nothing was evicted: {}", outcome.stderr);
    }
}

/// The pool of an engine that had ended stayed: 30 MiB beside all of the program's pages.
#[test]
fn engine_that_ends_gives_its_pool_back() {
    if !able("cc") {
        return;
    }
    let executable = compiled("filters");
    for faults in ["thread", "signal", "segv"] {
        let options = ["--faults", faults, "--no-disk", "--pool", "30M"];
        let words = [executable.to_str().unwrap(), "is_strict"];
        Job::new(&Under::budget(64 * MIB, &options), &words).within(120).run().succeeded();
    }
}

/// Python code with a function that installs a filter. The filter answers ioctl with EPERM, without which
/// pages can't be installed.
const INSTALL: &str = "import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None)
class Program(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 16), (6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in steps))
def install():
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(4, ctypes.addressof(code))), 0, 0) == 0
";

/// The child's engine has ended, and the child lives on. Its parent kept each evicted page for the child once
/// more. The area was full, and nothing more was evicted.
#[test]
fn child_without_its_engine_needs_nothing_of_its_parent() {
    if !able("python3") {
        return;
    }
    let directory = farpage::directory();
    let swap = format!("{}:80M", directory.path().display());
    let text = "
memory = bytearray(64 << 20)
def fill():
    for at in range(0, len(memory), 1 << 20):
        memory[at:at + (1 << 20)] = os.urandom(1 << 20)
fill()
(told, tell), (lasts, last) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    install()
    time.sleep(1)
    os.write(tell, b'.')
    os.close(last)
    os.read(lasts, 1)
    os._exit(0)
os.read(told, 1)
for turn in range(3):
    fill()
    time.sleep(0.3)
os.close(last)
assert os.waitpid(child, 0)[1] == 0";
    for faults in ["thread", "signal", "segv"] {
        let options = ["--faults", faults, "--pool", "1M", "--swap", &swap];
        let words = ["python3", "-c", &[INSTALL, text].concat()];
        let outcome = Job::new(&Under::budget(RAM, &options), &words).within(120).run();
        outcome.succeeded();
        assert!(outcome.stderr.contains("Farpage has left it"), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("is full"), "{}", outcome.stderr);
    }
}

/// The program grew to six times its budget after its engine had ended. The summary had the size from before,
/// and `--over-budget kill` ended nothing.
#[test]
fn program_that_grows_without_its_engine_is_told_of_with_its_size() {
    if !able("python3") {
        return;
    }
    let text = "def fill(mib):
    return bytearray(b'x' * 4096 * 256) * mib
first = fill(48)
time.sleep(0.5)
install()
second = fill(150)
time.sleep(int(sys.argv[1]))
print(sum(first[::4096]) + sum(second[::4096]))";
    let start = |options: &[&str], seconds| {
        let options = [&["--faults", "signal"], options].concat();
        let text = [INSTALL, text].concat();
        Job::new(&Under::budget(RAM, &options), &["python3", "-c", &text, seconds]).within(120).start()
    };
    let [told, killed] = [start(&[], "9"), start(&["--over-budget", "kill"], "90")];
    let outcome = told.end();
    outcome.succeeded();
    let outside = outcome.stats["outside"]["processes"].as_array().unwrap();
    assert_eq!(outside.len(), 1, "{}", outcome.stderr);
    assert_eq!(outside[0]["why"], "Farpage doesn't limit it any more");
    assert!(outside[0]["resident_peak"].as_u64() > Some(190 << 20), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("not all processes were limited all the time: the largest had at least "),
        "{}",
        outcome.stderr
    );
    let outcome = killed.end();
    assert!(outcome.status != Some(0) && outcome.stderr.contains("over"), "{}", outcome.stderr);
}

macro_rules! cases {
    ($($mode:ident)+: $cases:tt) => {
        $(mod $mode {
            cases!(@each $mode $cases);
        })+
    };
    (@each $mode:ident { $($engine:ident: $($case:ident)+;)+ }) => {
        $($(#[test] fn $case() {
            crate::check(stringify!($mode), stringify!($case), crate::Engine::$engine);
        })+)+
    };
}

cases! {
    thread signal segv: {
        Stays: denies_what_nobody_needs denies_what_nobody_needs_before denies_in_all_threads another_thread_denies
            denies_without_first_thread child_lives_under_it only_asks second_after_seccomp_is_denied;
        Ends: denies_in_all_threads_after_one denies_by_own_code_before allows_little allows_little_before
            allows_little_in_all_threads allows_little_among_threads answers_errors answers_by_signals
            has_a_tracer_answer has_a_program_answer is_strict is_strict_before
            ends_who_makes_calls_of_the_engine locking_is_answered_by_signals;
    }
}

mod own_code {
    /// Filters of armed threads are seen.
    mod armed {
        #[test]
        fn signal() {
            crate::check("signal", "denies_by_own_code", crate::Engine::Stays);
        }
        #[test]
        fn segv() {
            crate::check("segv", "denies_by_own_code", crate::Engine::Stays);
        }
    }

    /// Filters of threads that aren't armed are noticed later.
    #[test]
    fn unarmed() {
        crate::check("thread", "denies_by_own_code", crate::Engine::Ends);
    }
}

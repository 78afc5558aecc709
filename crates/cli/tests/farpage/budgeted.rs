//! Runs real programs under a budget with the real library, and watches their memory from outside.
//!
//! The watcher, a thread of the test, reads `Anonymous` of every process of the program 20 times a second.
//! The numbers come from the kernel and not from Farpage: the budget's promise is one that anybody can check.

use super::group::Group;
use super::{can_run, directory, skip};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One MiB.
pub const MIB: u64 = 1 << 20;
/// Pause between two samples.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);

/// Returns the library as `make build` leaves it, beside the profile that these tests are built in.
pub fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("FARPAGE_PRELOAD") {
        return path.into();
    }
    let executable = Path::new(env!("CARGO_BIN_EXE_farpage"));
    let target = executable.ancestors().nth(2).expect("target/PROFILE/farpage");
    let library = target.join("release/libfarpage_preload.so");
    assert!(library.exists(), "{} is missing: run `make build`", library.display());
    library
}

/// Whether tests run at the sizes of the promise, or at the usual ones.
pub fn is_full_size() -> bool {
    std::env::var_os("FARPAGE_TEST_SIZE").is_some_and(|size| size == "full")
}

/// Locks memory and processors, which the tests share: tests that ask for the lock run one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A test that failed says nothing about the next one.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the lock of [`alone`], if these tests can run here at all and with this program.
#[track_caller]
pub fn alone_with(program: &str) -> Option<MutexGuard<'static, ()>> {
    able(program).then(alone)
}

/// Whether these tests can run here at all, and with this program.
#[track_caller]
pub fn able(program: &str) -> bool {
    can_run() && has(program)
}

/// Whether a program is installed. Reports a skip if it isn't.
#[track_caller]
pub fn has(program: &str) -> bool {
    if find(program).is_none() {
        skip(&format!("{program} is not installed; `make programs` installs it"));
        return false;
    }
    true
}

/// Returns a program of `tests/programs`, compiled once in this process.
pub fn compiled(name: &str) -> PathBuf {
    compiled_in_units(name, MIB)
}

/// Returns a compiled program with another size for what it takes for a MiB.
pub fn compiled_in_units(name: &str, unit_bytes: u64) -> PathBuf {
    static DONE: Mutex<BTreeMap<(String, u64), PathBuf>> = Mutex::new(BTreeMap::new());
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (name.to_owned(), unit_bytes);
    if let Some(executable) = done.get(&key) {
        return executable.clone();
    }
    let directory = if unit_bytes == MIB { "programs".into() } else { format!("programs-{unit_bytes}") };
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(directory);
    fs::create_dir_all(&place).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs").join(name);
    let executable = place.join(name);
    let compiled = Command::new("cc")
        .args(["-O2", "-Wall", &format!("-DMIB=((size_t){unit_bytes})"), "-o"])
        .args([&executable, &source.with_extension("c")])
        .arg("-lpthread")
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    done.insert(key, executable.clone());
    executable
}

/// Compiles a library, and puts it beside a compiled program that loads it.
pub fn compiled_library(name: &str, program: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs").join(name);
    let library = compiled(program).with_file_name(format!("{program}-{name}.so"));
    let mut command = Command::new("cc");
    command.args(["-O2", "-Wall", "-shared", "-fPIC", "-o"]).arg(library).arg(source.with_extension("c"));
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Returns where a program is, also in directories where only root looks.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places.map(|place| place.join(program)).find(|file| file.is_file())
}

/// The way in which a program runs.
#[derive(Clone, Debug)]
pub enum Under {
    /// Without Farpage.
    Nothing,
    /// Under `farpage run --ram`, with these options.
    Budget {
        /// The budget in bytes.
        ram: u64,
        /// Further options.
        options: Vec<String>,
    },
    /// Under `farpage run` as an ordinary user, with the calls refused that containers forbid:
    /// userfaultfd and io_uring.
    Container {
        /// The budget in bytes.
        ram: u64,
    },
}

impl Under {
    /// A budget with options.
    pub fn budget(ram: u64, options: &[&str]) -> Under {
        Under::Budget { ram, options: options.iter().map(ToString::to_string).collect() }
    }
}

/// A program to be run in a directory of its own.
pub struct Job {
    /// Its scratch directory, which is its current directory.
    pub place: tempfile::TempDir,
    under: Under,
    command: Command,
    timeout: Duration,
}

/// A program that runs.
pub struct Running {
    place: tempfile::TempDir,
    under: Under,
    child: Child,
    watcher: std::thread::JoinHandle<Samples>,
    over: Arc<AtomicBool>,
    start: Instant,
    /// Farpage's supervisor is beside the program.
    is_beside: bool,
}

/// The result of a run.
pub struct Outcome {
    pub status: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub seconds: f64,
    /// Statistics of `--stats`; null without Farpage, or if there were none.
    pub stats: serde_json::Value,
    pub samples: Samples,
    /// Whether the statistics were incomplete when the program's parent heard of its end.
    pub is_late: bool,
    under: Under,
    /// The directory in which the program ran, with the files that it has left there.
    pub place: tempfile::TempDir,
}

/// Samples of anonymous memory in bytes, in the order of time.
#[derive(Default)]
pub struct Samples {
    /// `Anonymous` of each process.
    of: BTreeMap<u32, Vec<u64>>,
    /// `Pss_Anon` of all processes together, where memory that is shared since a fork counts once.
    together: Vec<u64>,
    /// State of the threads when the time was over.
    timed_out: Option<String>,
}

impl Samples {
    /// Returns the most that one process had.
    pub fn peak(&self) -> u64 {
        self.peaks().into_iter().max().unwrap_or(0)
    }

    /// Returns the most that each process had.
    pub fn peaks(&self) -> Vec<u64> {
        self.of.values().filter_map(|list| list.iter().copied().max()).collect()
    }

    /// Returns the most that all processes had together.
    pub fn peak_together(&self) -> u64 {
        self.together.iter().copied().max().unwrap_or(0)
    }
}

impl Job {
    /// A job that runs `words` under `under`.
    pub fn new(under: &Under, words: &[&str]) -> Job {
        let place = directory();
        let mut command = match under {
            Under::Nothing => Command::new(words[0]),
            Under::Container { ram } => {
                let mut command = confined(place.path());
                command.args(["run", "--ram", &ram.to_string(), "--swap", "/var/tmp", "--stats"]);
                command.arg(place.path().join("stats.json")).arg("--").arg(words[0]);
                command
            }
            Under::Budget { ram, options } => {
                let mut command = super::farpage();
                command.env("FARPAGE_PRELOAD", library()).arg("run").args(["--ram", &ram.to_string()]);
                command.arg("--stats").arg(place.path().join("stats.json")).args(options);
                // `make test-e2e` runs every test once more in another mode.
                if let Some(faults) = std::env::var_os("FARPAGE_TEST_FAULTS") {
                    command.arg("--faults").arg(faults);
                }
                command.arg("--");
                command.arg(words[0]);
                command
            }
        };
        command.args(&words[1..]).current_dir(place.path()).stdin(Stdio::null());
        command.env("LC_ALL", "C").env_remove("TMPDIR");
        Job { place, under: under.clone(), command, timeout: Duration::from_secs(300) }
    }

    /// Sets one more variable for the program.
    pub fn environment(&mut self, name: &str, value: &str) {
        self.command.env(name, value);
    }

    /// Sets another time limit.
    pub fn within(mut self, seconds: u64) -> Job {
        self.timeout = Duration::from_secs(seconds);
        self
    }

    /// Makes the program begin in this cgroup.
    pub fn in_group(mut self, group: &Group) -> Job {
        group.enter(&mut self.command);
        self
    }

    /// Starts the job. The output goes to files, so nobody has to read pipes.
    pub fn start(mut self) -> Running {
        let out = |name| Stdio::from(File::create(self.place.path().join(name)).unwrap());
        let (stdout, stderr) = (out("stdout"), out("stderr"));
        let asked = self.command.get_args().find(|word| *word == "beside" || *word == "above");
        let place = asked.map(ToOwned::to_owned).or_else(|| std::env::var_os("FARPAGE_SUPERVISOR"));
        let is_ours = !matches!(self.under, Under::Nothing);
        let is_beside = is_ours && place.is_none_or(|place| place == "beside");
        // The default place is set explicitly: other tests may have left zombies to a slow process 1.
        self.command.env("FARPAGE_SUPERVISOR", if is_beside { "beside" } else { "above" });
        let child = self.command.stdout(stdout).stderr(stderr).spawn().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (pid, seen, timeout) = (child.id(), over.clone(), self.timeout);
        let own = (is_beside || !is_ours).then_some(pid);
        let watcher = std::thread::spawn(move || watch(pid, own, timeout, &seen));
        let start = Instant::now();
        Running { place: self.place, under: self.under, child, watcher, over, start, is_beside }
    }

    /// Runs the job to its end.
    pub fn run(self) -> Outcome {
        self.start().end()
    }
}

/// Returns Farpage's command as it is started in a container, in a directory that belongs to its user.
fn confined(place: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65_534;
    let copy = |from: &Path, to: &str| {
        fs::copy(from, place.join(to)).unwrap();
        place.join(to)
    };
    let library = copy(&library(), "preload.so");
    let mut command = Command::new(copy(Path::new(env!("CARGO_BIN_EXE_farpage")), "farpage"));
    command.env("FARPAGE_PRELOAD", library);
    // SAFETY: takes no pointers.
    if unsafe { libc::geteuid() } == 0 {
        std::os::unix::fs::chown(place, Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    // SAFETY: two system calls between fork and exec, with nothing but constants.
    unsafe { command.pre_exec(forbid_what_containers_forbid) };
    command
}

/// Makes userfaultfd and io_uring answer EPERM from now on, as under Docker's profile.
fn forbid_what_containers_forbid() -> std::io::Result<()> {
    const fn step(code: u32, jump: u8, value: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt: jump, jf: 0, k: value }
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const IS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const ANSWER: u32 = libc::BPF_RET | libc::BPF_K;
    static FILTER: [libc::sock_filter; 7] = [
        // The call's number is the first word.
        step(LOAD, 0, 0),
        step(IS, 4, libc::SYS_userfaultfd as u32),
        step(IS, 3, libc::SYS_io_uring_setup as u32),
        step(IS, 2, libc::SYS_io_uring_enter as u32),
        step(IS, 1, libc::SYS_io_uring_register as u32),
        step(ANSWER, 0, libc::SECCOMP_RET_ALLOW),
        step(ANSWER, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: FILTER.len() as u16, filter: FILTER.as_ptr().cast_mut() };
    // SAFETY: takes no pointers.
    let is_allowed = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: `program` has a filter of the length that it says, which lives for good.
    let filters = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if (is_allowed, filters) == (0, 0) { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

impl Running {
    /// Returns the directory in which the program runs.
    pub fn place(&self) -> &Path {
        self.place.path()
    }

    /// Returns the process that was started: Farpage, or the program itself.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns Farpage's supervisor, once the program is started.
    pub fn supervisor(&self) -> u32 {
        if !self.is_beside {
            return self.pid();
        }
        self.supervisor_beside().expect("the program isn't started, or has ended")
    }

    /// Returns the supervisor that the program was told of.
    fn supervisor_beside(&self) -> Option<u32> {
        let environment = fs::read_to_string(format!("/proc/{}/environ", self.pid())).ok()?;
        let session = environment.split('\0').find_map(|line| line.strip_prefix("FARPAGE_SESSION=/proc/"));
        session?.split('/').next()?.parse().ok()
    }

    /// Returns all processes of the run except the supervisor, the program first; none before the
    /// program is started.
    pub fn processes(&self) -> Vec<u32> {
        let own = self.is_beside.then_some(self.pid());
        if self.is_beside && self.supervisor_beside().is_none() {
            return Vec::new();
        }
        own.into_iter().chain(descendants(self.pid())).collect()
    }

    /// Waits for the program's end.
    pub fn end(mut self) -> Outcome {
        let supervisor = self.supervisor_beside();
        let status = self.child.wait().unwrap();
        let read = |name| {
            let mut content = Vec::new();
            let _ = File::open(self.place.path().join(name)).map(|mut file| file.read_to_end(&mut content));
            content
        };
        let has_told = || serde_json::from_slice::<serde_json::Value>(&read("stats.json")).is_ok();
        let is_late = !has_told();
        self.over.store(true, Ordering::Release);
        let samples = self.watcher.join().unwrap();
        // If a program didn't say that it ends, the supervisor beside it tells how it ended some
        // milliseconds later.
        let is_to_tell = self.is_beside && !matches!(status.code(), Some(125..=127));
        let was_ended = || String::from_utf8_lossy(&read("stderr")).contains("the run was ended");
        let is_there = || supervisor.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists());
        let start = Instant::now();
        while is_to_tell
            && !has_told()
            && !was_ended()
            && is_there()
            && start.elapsed() < Duration::from_secs(10)
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        let outcome = Outcome {
            is_late,
            status: status.code(),
            signal: status.signal(),
            stdout: read("stdout"),
            stderr: String::from_utf8_lossy(&read("stderr")).into_owned(),
            seconds: self.start.elapsed().as_secs_f64(),
            stats: serde_json::from_slice(&read("stats.json")).unwrap_or_default(),
            samples,
            under: self.under,
            place: self.place,
        };
        if let Some(threads) = &outcome.samples.timed_out {
            panic!("it did not end in time:\n{}\n{threads}", outcome.stderr);
        }
        outcome
    }
}

/// Takes samples until the run is over. A program that doesn't end in time is killed, and the test fails.
fn watch(root: u32, own: Option<u32>, timeout: Duration, over: &AtomicBool) -> Samples {
    let start = Instant::now();
    let mut samples = Samples::default();
    while !over.load(Ordering::Acquire) {
        let mut together = 0;
        for pid in descendants(root).into_iter().chain(own) {
            if let Some((bytes, part)) = anonymous(pid) {
                samples.of.entry(pid).or_default().push(bytes);
                together += part;
            }
        }
        samples.together.push(together);
        if start.elapsed() > timeout && samples.timed_out.is_none() {
            samples.timed_out = Some(threads_below(root));
            // SAFETY: takes no pointers; the process was started by this test and isn't waited for yet.
            unsafe { libc::kill(root as i32, libc::SIGKILL) };
        }
        std::thread::sleep(SAMPLE_EVERY);
    }
    samples
}

/// Returns what each thread below `root` does, twice, a second apart. The text shows which threads wait for
/// which, and which get on.
pub fn threads_below(root: u32) -> String {
    let mut text = String::new();
    for _ in 0..2 {
        for task in descendants(root).into_iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/task"))) {
            for task in task.flatten() {
                let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
                let words =
                    ["stat", "wchan", "syscall", "stack"].map(read).map(|text| text.trim().to_owned());
                text += &format!("{}\n", words.join(" | ").replace('\n', ", "));
            }
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    text
}

/// Returns all processes below `root`.
pub fn descendants(root: u32) -> Vec<u32> {
    let mut list = Vec::new();
    let mut next = vec![root];
    while let Some(pid) = next.pop() {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            next.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        if pid != root {
            list.push(pid);
        }
    }
    list
}

/// Returns `Anonymous` of a process, and its part of that where it is shared, in bytes.
///
/// smaps_rollup walks through the memory while the program runs on. Memory that moves from behind the walk to
/// ahead of it is counted twice. A walk that is held up on a busy machine may find far more than the process
/// ever had. The kernel's own counter (RssAnon) is exact at one moment. So its values before and after the
/// walk bound the result.
fn anonymous(pid: u32) -> Option<(u64, u64)> {
    let counted = || kib(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "RssAnon:");
    let before = counted()?;
    let walk = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let most = before.max(counted()?);
    let bytes = |name| Some(kib(&walk, name)?.min(most) << 10);
    Some((bytes("Anonymous:")?, bytes("Pss_Anon:")?))
}

/// Returns a line of a file in /proc, in KiB.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

impl Outcome {
    /// Returns the standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns a counter of `--stats`.
    #[track_caller]
    pub fn counter(&self, name: &str) -> u64 {
        self.stats["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}: {}", self.stderr))
    }

    /// Checks that the program ended with 0 and lost nothing.
    #[track_caller]
    pub fn succeeded(&self) -> &Outcome {
        assert_eq!((self.status, self.signal), (Some(0), None), "{}\n{}", self.text(), self.stderr);
        if self.stats.is_object() {
            assert_eq!((self.counter("fault_lost"), self.counter("read_errors")), (0, 0), "{}", self.stderr);
        }
        self
    }

    /// Checks that the budget was reached, and that every sample after that was within the budget + 5 %.
    ///
    /// The 5 % hold to the letter at the sizes of the promise (FARPAGE_TEST_SIZE=full). The budgets of the
    /// small sizes are tens of MiB. A program fills 5 % of that in half a millisecond, less than a busy
    /// machine may take to let the keeper run. So at small sizes the slack is 4 MiB at least.
    #[track_caller]
    pub fn held_its_budget(&self) -> &Outcome {
        let (Under::Budget { ram, .. } | Under::Container { ram }) = self.under else {
            panic!("there was no budget");
        };
        let slack = |least: u64| if is_full_size() { ram / 20 } else { (ram / 20).max(least) };
        let together = &self.samples.together;
        let first = first_at(together, ram);
        assert!(first < together.len(), "the budget was never reached: {:?}", together.iter().max());
        let is_tree = self.samples.of.len() > 1;
        // A fork's child has an engine before its parent has made headroom for the engine.
        let most = ram + slack(if is_tree { 8 * MIB } else { 4 * MIB });
        let is_over = |at: usize| together.get(at).is_some_and(|bytes| *bytes > most);
        // Processes are looked at one after the other. If a child is made meanwhile, the memory
        // that it shares counts fully for its parent, and in part once more for the child. The
        // next look counts right.
        let over = (first..together.len())
            .filter(|at| is_over(*at) && (!is_tree || is_over(at.wrapping_sub(1)) || is_over(at + 1)));
        self.assert_none("all together", together, first, most, over.collect());
        for (pid, list) in &self.samples.of {
            let first = first_at(list, ram);
            let most = ram + slack(4 * MIB);
            let over = (first..list.len()).filter(|at| list[*at] > most);
            self.assert_none(&format!("process {pid}"), list, first, most, over.collect());
        }
        self
    }

    /// Fails if there are samples `over` the `most` that is allowed. The sample `first` was the first
    /// to reach the budget.
    #[track_caller]
    fn assert_none(&self, who: &str, list: &[u64], first: usize, most: u64, over: Vec<usize>) {
        // The neighbours of a sample show whether the excess was that of the activation, short, or for good.
        let around = |at: &usize| {
            let near = &list[at.saturating_sub(2)..list.len().min(at + 3)];
            (*at, near.iter().map(|bytes| bytes / MIB).collect::<Vec<_>>())
        };
        let peaks: Vec<_> = self.samples.peaks().iter().map(|bytes| bytes / MIB).collect();
        assert!(
            over.is_empty(),
            "{who} had {} of {} samples over {} MiB, the budget and some slack; sample {first} was the first to reach the \
             budget, over and with two neighbours were, in MiB, {:?}; each process had at most {peaks:?}:\n{}",
            over.len(),
            list.len(),
            most / MIB,
            over.iter().map(around).collect::<Vec<_>>(),
            self.stderr
        );
    }
}

/// Returns the index of the first sample that reached a budget; the number of samples if none did.
fn first_at(list: &[u64], ram: u64) -> usize {
    list.iter().position(|bytes| *bytes >= ram / 100 * 85).unwrap_or(list.len())
}

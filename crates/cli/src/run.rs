//! `farpage run`: everything from the options to the program's end.
//!
//! First everything that the user said is checked, then what the machine offers. Only then the session is
//! made and the program started, so an error comes before anything has happened.

use crate::areas::{self, Area};
use crate::host::budget::{self, Behind, Budget, Limit, Roots};
use crate::host::kernel;
use crate::host::machine::Machine;
use crate::host::neighbours::{Holding, Neighbours};
use crate::host::oom::{self, Witness};
use crate::host::sys::{self, Child, ChildState};
use crate::options::{self, Disk, RunOptions, RunSettings, Standing};
use crate::program;
use crate::program::preload;
use crate::supervise::beside::{self, Side};
use crate::supervise::dormant::Dormants;
use crate::supervise::headroom::Headroom;
use crate::supervise::notices::{self, About, Watcher, Weight};
use crate::supervise::outside::{self, Outside};
use crate::supervise::over_budget::OverBudget;
use crate::supervise::session::Shared;
use crate::supervise::signals::{self, Unheeded};
use crate::supervise::summary::{self, Run};
use crate::supervise::totals::{self, Totals};
use crate::text::failure::{FIX_DESCRIPTORS, Failure, STATUS_CANT_RUN, STATUS_NOT_FOUND, quoted};
use crate::text::numbers::iec;
use crate::text::say;
use crate::text::tips;
use farpage_os::seccomp;
use farpage_runtime::session::first::First;
use farpage_runtime::session::{SESSION_ENV, Settings};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The demands of the options and variables, found to make sense together.
pub struct Asked {
    /// Budget of memory in RAM.
    pub budget: Budget,
    disk: Disk,
    limits: Vec<Limit>,
    neighbours: Neighbours,
}

/// The decisions before the program starts.
pub struct Plan {
    /// Budget of memory in RAM.
    pub budget: Budget,
    /// Settings that the programs are told.
    pub settings: Settings,
    /// Areas for evicted pages.
    pub areas: Vec<Area>,
    /// Notes for the user before the program starts.
    pub notes: Vec<String>,
    preload: PathBuf,
    neighbours: Neighbours,
}

/// Runs the program. The exit status is the program's.
pub fn run(options: &RunOptions) -> Result<ExitCode, Failure> {
    refuse_privileged_executable()?;
    let asked = Asked::of(&options.settings)?;
    let prepared =
        find_program(&options.program).and_then(|program| Ok((program, Plan::of(&options.settings, asked)?)));
    let (program, plan) = match prepared {
        Err(why) if why.status == STATUS_CANT_RUN && options.settings.runs_unsupported() => {
            return Err(run_without(options, why));
        }
        prepared => prepared?,
    };
    // The file is opened last: a run that is refused leaves no empty file.
    let stats = options.settings.stats.as_deref().map(open_stats).transpose()?;
    let notes = plan.notes.iter().filter(|_| !options.settings.quiet);
    notes.for_each(|note| say::line(&format!("note: {note}")));
    let (standing, peaks) = (options.settings.standing(), sys::resident_peaks());
    let why = match standing {
        Standing::AboveAsAsked => "",
        Standing::Above(why) => why,
        Standing::Beside => match beside::part()? {
            Some(side) => return run_beside(side, peaks, options, &program, plan, stats),
            None => "there may be one process more, and it takes two",
        },
    };
    if options.settings.asks_for_beside() && !options.settings.quiet {
        say::line(&format!("note: the supervisor is the program's parent, not beside it: {why}"));
    }
    run_above(options, &program, plan, stats)
}

/// Runs the program with this process as its parent.
fn run_above(
    options: &RunOptions,
    program: &Path,
    plan: Plan,
    stats: Option<File>,
) -> Result<ExitCode, Failure> {
    let mut run = Supervised::new(options, plan)?;
    let inherited = signals::block_all();
    let mut command = command(program, options, &run.plan, &run.shared.path());
    signals::hand_down(&mut command, &inherited);
    let started = command.spawn().map_err(|error| not_started(program, &error));
    let ended = started.and_then(|child| {
        let child = child.id();
        run.watch(child, |poll| signals::supervise(child, poll))
    });
    if ended.is_ok() {
        run.let_go();
    }
    let finished = run.finish(ended, stats);
    run.close();
    finished.map(|child| pass_on(child.state))
}

/// Bytes that this process may still touch until it executes the program.
const BEFORE_EXEC_BYTES: u64 = 2 << 20;

/// Runs the program in this process, with the supervisor beside it. `before` is what this process and its
/// children had in RAM before it parted.
fn run_beside(
    side: Side,
    before: [u64; 2],
    options: &RunOptions,
    program: &Path,
    plan: Plan,
    stats: Option<File>,
) -> Result<ExitCode, Failure> {
    let mut starting = match side {
        Side::Supervisor(starting) => starting,
        Side::Program(mut started) => {
            let session = match started.session() {
                Ok(session) => session,
                Err(refused) => return refused.map(ExitCode::from),
            };
            let mut command = command(program, options, &plan, &session);
            signals::hand_down_pipe(&mut command);
            started.goes_on();
            let error = command.exec();
            started.give_up();
            return Err(not_started(program, &error));
        }
    };
    signals::block_all();
    let prints = stats.as_ref().is_some_and(|file| standard_output(file).is_some());
    starting.let_go(prints);
    let mut run = match Supervised::new(options, plan) {
        Ok(run) => run,
        Err(failure) => {
            say::plainly(&failure.to_string());
            starting.refuse(failure.status);
            return Ok(ExitCode::SUCCESS);
        }
    };
    let pid = starting.program;
    outside::is_beside(pid);
    note_first(&run.shared.session().first, pid, before);
    // Without this, numbers of a former run would be taken for this run's.
    stats.iter().filter(|file| standard_output(file).is_none()).for_each(|file| _ = file.set_len(0));
    if !starting.ready(&run.shared.path()) {
        run.close();
        return Ok(ExitCode::SUCCESS);
    }
    run.started = Instant::now();
    let shared = Rc::clone(&run.shared);
    let first = &shared.session().first;
    let (mut unheeded, quiet) = (Unheeded::default(), options.settings.quiet);
    let ended = run.watch(pid, |poll| {
        starting.follow(first, || {
            unheeded.look(pid).filter(|_| !quiet).iter().for_each(|note| say::line(note));
            poll()
        })
    });
    if let Err(failure) = &ended {
        starting.end(first, failure);
    }
    if run.finish(ended, stats).is_ok() {
        beside::has_seen(first);
        starting.wait_until_gone();
        run.let_go();
    }
    run.close();
    Ok(ExitCode::SUCCESS)
}

/// Notes the program's process, beside which this process is the supervisor. `before` is as for
/// [`run_beside`].
fn note_first(first: &First, pid: u32, before: [u64; 2]) {
    first.pid.store(pid, Ordering::Relaxed);
    // The process between the two was as large as this process.
    for (peak, before) in first.peaks_before.iter().zip([before[0], before[0].max(before[1])]) {
        peak.store(before + BEFORE_EXEC_BYTES, Ordering::Relaxed);
    }
    let status = fs::read("/proc/thread-self/status").unwrap_or_default();
    first.filters.store(seccomp::filters_of(&status).unwrap_or(u32::MAX), Ordering::Relaxed);
}

/// A run, as its supervisor holds it.
struct Supervised<'o> {
    options: &'o RunOptions,
    plan: Plan,
    shared: Rc<Shared>,
    others: Watch,
    started: Instant,
}

impl<'o> Supervised<'o> {
    /// Makes the session, before the program starts.
    fn new(options: &'o RunOptions, mut plan: Plan) -> Result<Supervised<'o>, Failure> {
        let shared = Shared::new(plan.settings, &plan.areas)?;
        outside::session_is(&shared);
        let notes = plan.areas.iter_mut().filter_map(|area| area.prepare().err());
        notes.filter(|_| !options.settings.quiet).for_each(|note| say::line(&note));
        sys::be_inspectable();
        plan.neighbours.tell(&Roots::of_this_machine());
        let (neighbours, ram_bytes) = (std::mem::take(&mut plan.neighbours), plan.budget.ram_bytes);
        let mut others = Watch {
            oom: Witness::new(Roots::of_this_machine()),
            outside: Outside::default(),
            dormants: Dormants::default(),
            headroom: Headroom::new(Roots::of_this_machine(), ram_bytes, neighbours),
            over_budget: options.settings.kills_over_budget().then(|| OverBudget::new(ram_bytes)),
        };
        others.headroom.look(&shared);
        Ok(Supervised { options, plan, shared: Rc::new(shared), others, started: Instant::now() })
    }

    /// Tells how the run has ended. If the run has failed, ends what is left of it.
    fn finish(&mut self, ended: Result<Child, Failure>, stats: Option<File>) -> Result<Child, Failure> {
        if let Ok(child) = ended {
            let end = End {
                child,
                wall: child.seen.saturating_duration_since(self.started),
                least_bytes: self.others.headroom.least_bytes(),
                oom: self.others.oom.report(),
                outside: self.others.outside.report(&self.shared),
            };
            report(self.options, &self.plan, &self.shared, end, stats);
        } else {
            self.shared.give_up();
            self.others.dormants.end_all();
            // Without this, numbers of a former run would be taken for this run's.
            stats.filter(|file| standard_output(file).is_none()).map(|file| file.set_len(0));
        }
        ended
    }

    /// Lets processes go on that the program has left behind. Called when the program is gone.
    fn let_go(&mut self) {
        let left_behind = self.others.dormants.left_behind(&self.shared);
        for left in left_behind.iter().filter(|_| !self.options.settings.quiet) {
            say::line(&format!("note: {left} goes on without a budget: nothing could be started in it"));
        }
        self.shared.end();
    }

    fn close(self) {
        self.plan.areas.into_iter().filter_map(Area::close).for_each(|note| say::line(&note));
    }
}

/// Returns the file of the program that the command line names.
pub fn find_program(program: &[OsString]) -> Result<PathBuf, Failure> {
    program::resolve(&program[0], std::env::var_os("PATH").as_deref()).map_err(|failure| {
        match failure.status {
            STATUS_NOT_FOUND => tips::no_program(failure, program, &std::env::args_os().collect::<Vec<_>>()),
            _ => failure,
        }
    })
}

/// Watchers beside the notices of the programs.
struct Watch {
    oom: Witness,
    outside: Outside,
    dormants: Dormants,
    headroom: Headroom,
    over_budget: Option<OverBudget>,
}

/// Pause between two looks for news from the programs.
const NEWS: Duration = Duration::from_millis(100);

/// A task that is done repeatedly. Each call returns the longest time until the next call.
type Poll<'p> = &'p mut dyn FnMut() -> Result<Duration, Failure>;

impl Supervised<'_> {
    /// Stays with the program, by `follow`, until it ends, and tells the notices of its processes. If
    /// processes have damaged the memory that they share, the run is ended. Nothing keeps the processes
    /// within the budget then, and nothing keeps the evicted pages of two processes apart.
    fn watch(
        &mut self,
        pid: u32,
        follow: impl FnOnce(Poll) -> Result<Child, Failure>,
    ) -> Result<Child, Failure> {
        watch(self.options.settings.quiet, &self.plan, &self.shared, pid, &mut self.others, follow)
    }
}

fn watch(
    quiet: bool,
    plan: &Plan,
    shared: &Shared,
    pid: u32,
    others: &mut Watch,
    follow: impl FnOnce(Poll) -> Result<Child, Failure>,
) -> Result<Child, Failure> {
    let least = if quiet { Weight::Serious } else { Weight::Information };
    let mut watcher = Watcher::new(shared.session(), least);
    let names = names(&plan.areas);
    let about = About { areas: &names, files: &plan.areas, budget: &plan.budget };
    let mut tell_news = |is_last: bool| {
        let news = watcher.news(shared.session(), &about, Instant::now());
        // The damage check comes after the notices were read: what was read while the session was
        // overwritten isn't told.
        shared.damage().map_or(Ok(()), |what| Err(damaged(what)))?;
        news.iter().chain(&watcher.last_words(shared.session())).for_each(|text| say::line(text));
        let members = totals::members(shared);
        others.outside.look(shared, &members);
        others.outside.look_below(pid, &members, Instant::now());
        others.dormants.look(shared);
        others.oom.look(&members, pid);
        // A program that has ended isn't killed for its memory. Nor is a stopped one, because it can't evict.
        match &mut others.over_budget {
            Some(over) if !is_last && !sys::is_stopped(pid) => {
                end_if_over(over, shared, &others.outside, &about)
            }
            _ => Ok(()),
        }
    };
    let (mut news_at, headroom) = (Instant::now(), &mut others.headroom);
    let ended = follow(&mut || {
        let pause = headroom.look(shared);
        headroom.news().filter(|_| !quiet).iter().for_each(|note| say::line(note));
        let now = Instant::now();
        if now >= news_at {
            news_at = now + NEWS;
            tell_news(false)?;
        }
        Ok(pause.min(news_at.saturating_duration_since(Instant::now())))
    });
    let ended = ended.and_then(|child| tell_news(true).map(|()| child));
    watcher.rest().into_iter().for_each(|text| say::line(&text));
    ended
}

/// Fails if the run has stayed above its budget. Then it also kills processes without a budget,
/// because no keeper does.
fn end_if_over(
    over: &mut OverBudget,
    shared: &Shared,
    outside: &Outside,
    about: &About,
) -> Result<(), Failure> {
    let has = Holding::of(shared.session(), shared.file()).seen();
    let without = outside.anonymous_bytes();
    let reasons = || {
        let without = (without > 0).then(|| format!("these processes have no budget: {}", outside.names()));
        notices::over_budget(shared, about).into_iter().chain(without).collect()
    };
    over.look(has.saturating_add(without), reasons).inspect_err(|_| outside.kill())
}

fn damaged(what: &str) -> Failure {
    Failure::new("the memory that the run's processes share was overwritten; the run was ended")
        .because(format!("{what}; a program of the run most likely wrote there by a stray pointer, or on purpose"))
        .fix("look for wild writes in the programs of the run: build them with -fsanitize=address, or use valgrind, without Farpage")
        .fix("run programs that may harm each other by a `farpage run` of their own")
}

/// Returns the areas' names, as they may be printed.
fn names(areas: &[Area]) -> Vec<String> {
    areas.iter().map(|area| say::harmless(&area.path.display().to_string())).collect()
}

/// Becomes the program, without Farpage. If that fails, too, returns why Farpage can't run it.
fn run_without(options: &RunOptions, why: Failure) -> Failure {
    if !options.settings.quiet {
        let name = options.program[0].display();
        say::line(&format!(
            "note: {name} is started without a budget (--unsupported run): {}",
            why.in_one_line()
        ));
    }
    let mut command = Command::new(&options.program[0]);
    signals::hand_down_pipe(&mut command);
    let _ = command.args(&options.program[1..]).exec();
    why
}

/// Refuses an executable with privileges of its own. Capabilities of the farpage file itself would not
/// reach the program. If they did, every user who may run farpage would get a program of their choice with
/// these capabilities.
fn refuse_privileged_executable() -> Result<(), Failure> {
    if !sys::is_privileged_executable() {
        return Ok(());
    }
    let name = quoted(&std::env::current_exe().unwrap_or_else(|_| "farpage".into()));
    Err(Failure::new("farpage must not be set-uid or have file capabilities")
        .because("the program would have to inherit them, and so would any program anybody runs with it")
        .fix(format!("take them away: sudo setcap -r {name}; sudo chmod u-s,g-s {name}"))
        .fix(format!("then, for ordinary users: {}", kernel::WAYS[1])))
}

impl Asked {
    /// Checks the options together, and reads the limits of this machine, because the budget is
    /// made from them.
    pub fn of(settings: &RunSettings) -> Result<Asked, Failure> {
        let disk = options::disk(settings, sys::environment)?;
        let machine = Roots::of_this_machine();
        let mut limits = budget::limits(&machine);
        let mut neighbours = Neighbours::default();
        neighbours.find(&machine, 0);
        neighbours.note_in(&mut limits);
        let behind = if disk == Disk::None { Behind::Nothing } else { Behind::Areas };
        let (ram, pool) = (settings.ram.as_ref(), settings.pool.as_ref());
        let budget = budget::resolve(ram, pool, behind, &limits, budget::machine_bytes(&machine))?;
        Ok(Asked { budget, disk, limits, neighbours })
    }
}

impl Plan {
    /// Opens the areas, and tries what the kernel offers.
    pub fn of(options: &RunSettings, asked: Asked) -> Result<Plan, Failure> {
        let Asked { budget, disk, limits, neighbours } = asked;
        let machine = Machine::this();
        let mut areas = match &disk {
            Disk::None => Vec::new(),
            Disk::Default => vec![areas::open_default(sys::environment, &machine)?],
            Disk::Areas(arguments) => areas::open_all(arguments, &machine)?,
        };
        areas::number(&mut areas, options.order());
        let preload = preload::find()?;
        let userfaultfd = kernel::faults(options.faults())?;
        let (install, note) = kernel::choose_install(options.install(), userfaultfd)?;
        let io = kernel::choose_io(options.io(), &sys::io_uring())?;
        let polls = kernel::choose_wait(options.polls(), cpus(), &sys::aio())?;
        let mut notes = tips::unknown_variables(std::env::vars_os().map(|(name, _)| name));
        notes.extend(areas.iter().filter_map(|area| area.warning.clone()).chain(note));
        notes.extend(notes_on_limits(&budget, &limits));
        let settings = Settings {
            ram_bytes: budget.ram_bytes,
            pool_bytes_max: budget.pool_bytes_max,
            codec: options.codec(),
            packs: u32::from(options.packs()),
            install,
            io,
            slots: options.slots(),
            order: options.order(),
            nodes: machine.nodes().last().map_or(1, |node| u32::from(node.0) + 1),
            uffd_source: userfaultfd.source,
            readahead: options.readahead(),
            page_cluster: options.page_cluster,
            refuses_mlockall: u32::from(options.refuses_mlockall()),
            polls: u32::from(polls),
        };
        Ok(Plan { budget, settings, areas, notes, preload, neighbours })
    }
}

/// Returns the CPUs that the program may use: by its affinity, and by the quota of its cgroups.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns notes on limits. The program starts anyway, but a limit that stops it later has been named.
fn notes_on_limits(budget: &Budget, limits: &[Limit]) -> Vec<String> {
    let clamped = budget.asked_bytes.map(|asked| {
        format!(
            "this machine has less than the {} of {}: the budget is {}",
            iec(asked),
            budget.origin,
            iec(budget.ram_bytes)
        )
    });
    let tightest = limits.iter().min_by_key(|limit| limit.to_share_bytes());
    let above = tightest.filter(|limit| limit.to_share_bytes() < budget.ram_bytes).map(|limit| {
        let held = limit.in_use_words(", of which ", " are in use");
        format!(
            "the budget of {} is above what there is: {} in {} ({}){held}; it becomes smaller as that fills",
            iec(budget.ram_bytes),
            iec(limit.bytes),
            limit.file.display(),
            limit.source
        )
    });
    let address_space = sys::resource_limit(sys::Resource::AddressSpace).map(|limit| {
        format!("the address space is limited to {} (ulimit -v); evicted memory counts there too", iec(limit))
    });
    clamped.into_iter().chain(above).chain(address_space).collect()
}

/// Checks that the statistics file can be written, for `farpage doctor`. No file is made.
pub fn check_stats(path: &Path) -> Result<(), Failure> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => sys::may_write(directory),
        opened => opened.map(drop),
    };
    if path == Path::new("-") { Ok(()) } else { checked.map_err(|error| no_stats(path, &error)) }
}

fn no_stats(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("the statistics file {} can't be written: {error}", path.display()))
        .fix("name a file in a directory that exists and is yours: --stats FILE")
}

/// Opens the statistics file before the program starts, so that the program's work isn't lost to a typing
/// error. The file is emptied when it is written.
fn open_stats(path: &Path) -> Result<File, Failure> {
    if path == Path::new("-") {
        return io::stdout().as_fd().try_clone_to_owned().map(File::from).map_err(|error| {
            Failure::new(format!("standard output can't be used for `--stats -`: {error}"))
                .fix("name a file: --stats FILE")
        });
    }
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let opened = opened.map_err(|error| no_stats(path, &error))?;
    Ok(standard_output(&opened).unwrap_or(opened))
}

/// Returns standard output or standard error if `file` is the same file (`--stats /dev/stdout`). A file that
/// is opened anew would be written from its beginning on, over the program's own output.
fn standard_output(file: &File) -> Option<File> {
    let identity = |file: &File| file.metadata().ok().map(|file| (file.dev(), file.ino()));
    let (out, err) = (io::stdout(), io::stderr());
    let open = [out.as_fd(), err.as_fd()].into_iter().filter_map(|fd| fd.try_clone_to_owned().ok());
    open.map(File::from).find(|open| identity(open) == identity(file))
}

/// Returns the program with its arguments and variables as a command.
fn command(program: &Path, options: &RunOptions, plan: &Plan, session: &str) -> Command {
    let mut command = Command::new(program);
    command.arg0(&options.program[0]).args(&options.program[1..]);
    let existing = sys::environment("LD_PRELOAD");
    command.env("LD_PRELOAD", preload::with_existing(&plan.preload, existing.as_deref()));
    command.env(SESSION_ENV, session);
    command
}

/// Explains why the program can't be started. The program was checked before, so the reason is a limit of the
/// machine, or the program has changed since.
fn not_started(program: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("{} can't be started: {error}", program.display()));
    match error.raw_os_error() {
        Some(libc::EAGAIN) => failure
            .because("there are as many processes as this user or cgroup may have")
            .fix("raise the limit of processes: ulimit -u, or the cgroup's pids.max"),
        Some(libc::EMFILE | libc::ENFILE) => {
            failure.because("no file descriptor is free").fix(FIX_DESCRIPTORS)
        }
        Some(libc::ENOMEM) => failure.fix("free some memory, or look at the cgroup's limit"),
        Some(libc::E2BIG) => failure
            .because("arguments and environment are too long")
            .fix("shorten them, or raise the limit of the stack, which bounds them: ulimit -s")
            .status(STATUS_CANT_RUN),
        error => failure
            .because("it has changed since Farpage checked it")
            .fix("try again when nobody writes to it any more")
            .status(if error == Some(libc::ENOENT) { STATUS_NOT_FOUND } else { STATUS_CANT_RUN }),
    }
}

/// The end of the program.
struct End {
    child: Child,
    wall: Duration,
    least_bytes: u64,
    oom: oom::Report,
    outside: outside::Report,
}

fn report(options: &RunOptions, plan: &Plan, shared: &Shared, end: End, stats: Option<File>) {
    let program: Vec<String> =
        options.program.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let totals = Totals::of(shared.session());
    let run = Run {
        program: &program,
        exit: end.child.state,
        resident_peak: end.child.resident_peak,
        // A process that is alone has waited for no other.
        resident_most: end
            .child
            .resident_most
            .map(|most| if totals.count > 1 { most.max(end.child.waited_for_most) } else { most }),
        wall: end.wall,
        budget: &plan.budget,
        least_bytes: end.least_bytes,
        settings: &plan.settings,
        kills_over_budget: options.settings.kills_over_budget(),
        areas: &plan.areas,
        totals: &totals,
        names: &names(&plan.areas),
        oom: &end.oom,
        outside: &end.outside,
    };
    if !options.settings.quiet {
        say::lines(&summary::text(&run));
    }
    if let Some(mut file) = stats {
        if standard_output(&file).is_none() {
            // A pipe can't be cut. Text for a pipe begins at its end anyway.
            let _ = file.set_len(0);
        }
        if let Err(error) = say::write_all(&mut file, &say::json(&summary::json(&run))) {
            let name = options.settings.stats.as_deref().unwrap_or(Path::new("?")).display();
            say::line(&format!(
                "the statistics could not be written to {name}: {error}; free some room, or name another file: --stats FILE"
            ));
        }
    }
}

/// Makes this process end as the program did.
fn pass_on(exit: ChildState) -> ExitCode {
    match exit {
        ChildState::Exited(status) => ExitCode::from(status),
        ChildState::Killed(signal) => {
            sys::die_of(signal);
            // This process still runs, so it is process 1 of a container. The status is the one that
            // a shell would give.
            ExitCode::from(128 + signal as u8)
        }
        ChildState::Running | ChildState::Stopped(_) | ChildState::Ended => {
            unreachable!("supervise returns when the program has ended")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::failure::STATUS_FAILED;

    #[test]
    fn program_that_does_not_start_has_status_cause_and_fix() {
        for (errno, status, words) in [
            (libc::EAGAIN, STATUS_FAILED, "ulimit -u"),
            (libc::ENOMEM, STATUS_FAILED, "free some memory"),
            (libc::EMFILE, STATUS_FAILED, "ulimit -n"),
            (libc::E2BIG, STATUS_CANT_RUN, "too long"),
            (libc::ETXTBSY, STATUS_CANT_RUN, "has changed"),
            (libc::ENOENT, STATUS_NOT_FOUND, "has changed"),
        ] {
            let failure = not_started(Path::new("/x"), &io::Error::from_raw_os_error(errno));
            assert_eq!(failure.status, status, "{failure}");
            assert!(failure.to_string().contains(words) && !failure.fixes().is_empty(), "{failure}");
        }
    }
}

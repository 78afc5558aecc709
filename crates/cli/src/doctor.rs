//! `farpage doctor`: what this kernel, user and disk offer, what `farpage run` would choose and why, and the
//! fix for everything that is missing. `doctor/trial.rs` starts a tiny program under the options.

mod trial;

use crate::areas;
use crate::areas::swap_argument::SwapArgument;
use crate::host::budget::{self, Behind, Roots};
use crate::host::kernel::{self, FaultsAsked, Refused, Release, Userfaultfd};
use crate::host::sys::{self, Faults, Resource};
use crate::options::{self, Disk, DoctorOptions, RunSettings, Standing};
use crate::program::preload;
use crate::run::{self, Asked, Plan};
use crate::supervise::session::FILE_BYTES_MIN;
use crate::supervise::summary::{faults_name, install_name, io_name, uffd_name, wait_name};
use crate::text::failure::{Failure, STATUS_CANT_RUN};
use crate::text::numbers::iec;
use crate::text::say;
use farpage_core::config::{Install, IoEngine};
use farpage_os::sys::Errno;
use farpage_runtime::session::UffdSource;
use serde::Serialize;
use serde_json::json;
use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// The thing is as it should be.
    Ok,
    /// The thing is missing.
    No,
    /// The result is neither good nor bad: another thing does the job, or it matters only sometimes.
    Note,
}

/// A row of the table.
#[derive(Debug, Serialize)]
struct Check {
    name: String,
    verdict: Verdict,
    value: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fixes: Vec<String>,
}

impl Check {
    fn new(name: impl Into<String>, verdict: Verdict, value: impl Into<String>) -> Check {
        let [name, value] = [name.into(), value.into()].map(|text| say::visible(&text));
        Check { name, verdict, value, fixes: Vec::new() }
    }
    fn fix(mut self, fix: impl Into<String>) -> Check {
        self.fixes.push(say::visible(&fix.into()));
        self
    }
}

/// The choices that `farpage run` would make.
#[derive(Debug, Default, Serialize)]
struct Choice {
    faults: Option<&'static str>,
    userfaultfd: Option<&'static str>,
    install: Option<&'static str>,
    io: Option<&'static str>,
    wait: Option<&'static str>,
    supervisor: Option<&'static str>,
    swap: Option<String>,
    budget_bytes: Option<u64>,
    why: Vec<String>,
    /// Whether the run would discard a device before its use.
    #[serde(skip)]
    discards_first: bool,
}

const KERNEL: &str = "kernel";
const FILE_SIZE: &str = "RLIMIT_FSIZE";
/// Checks whose failure nothing makes up for.
const NEEDED: [&str; 2] = [KERNEL, FILE_SIZE];

/// Looks at everything. Returns status 0 if this `farpage run` would work, and 1 otherwise.
pub fn doctor(options: &DoctorOptions) -> Result<ExitCode, Failure> {
    let mut checks = vec![kernel_check(&Release::this()), user_check()];
    checks.extend(mode_checks(options.settings.faults()));
    checks.push(seccomp_check());
    checks.push(pins_check(
        farpage_runtime::keeps_pinned_pages(),
        farpage_runtime::keeps_pinned_pages_in_segv(),
    ));
    checks.push(io_check());
    checks.push(aio_check());
    let is_default =
        options::disk(&options.settings, sys::environment).is_ok_and(|disk| disk == Disk::Default);
    checks.extend(swap_checks(if is_default { Verdict::No } else { Verdict::Note }));
    checks.extend(memory_checks());
    checks.extend(limit_checks());
    checks.push(preload_check());
    let (choice, refused) = choose(options);
    checks.extend(
        refused.iter().filter(|failure| is_news(failure, &checks)).map(run_check).collect::<Vec<_>>(),
    );
    let could_work = refused.is_none()
        && !checks.iter().any(|check| NEEDED.contains(&check.name.as_str()) && check.verdict == Verdict::No)
        && !sys::is_privileged_executable();
    let trial = could_work.then(|| try_it(options, &choice));
    let works = trial.as_ref().is_some_and(|check| check.verdict != Verdict::No);
    checks.extend(trial);
    if options.json {
        let report = json!({ "schema": 1, "works": works, "checks": checks, "choice": choice });
        say::to_stdout(&say::json(&report))?;
    } else {
        say::to_stdout(&table(&checks, &choice, works))?;
    }
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Starts a tiny program under the options, unless that takes more than the program.
fn try_it(options: &DoctorOptions, choice: &Choice) -> Check {
    if choice.discards_first {
        let why = "`true` was not started: a device would be discarded first (discard)";
        return Check::new(trial::NAME, Verdict::Note, why);
    }
    let words: Vec<_> = std::env::args_os().collect();
    trial::check(&words, options.program.len(), options.settings.standing())
}

/// Whether no check has said yet why the run would be refused.
fn is_news(refused: &Failure, checks: &[Check]) -> bool {
    let why = refused.in_one_line();
    !checks.iter().any(|check| check.verdict == Verdict::No && check.value == why)
}

fn run_check(refused: &Failure) -> Check {
    let check = Check::new("farpage run", Verdict::No, refused.in_one_line());
    refused.fixes().iter().fold(check, |check, fix| check.fix(fix))
}

// ---- the checks ----------------------------------------------------------------------------------------

fn kernel_check(release: &Release) -> Check {
    let text = release.to_string();
    match release.version() {
        Some(version) if version >= (6, 8) => Check::new(KERNEL, Verdict::Ok, text),
        Some(version) if version >= kernel::VERSION_MIN => Check::new(
            KERNEL,
            Verdict::Note,
            format!("{text}: works; from 6.8 on pages can be moved, which is faster"),
        ),
        Some(_) => Check::new(KERNEL, Verdict::No, text).fix(format!("{}, best 6.8 or later", use_kernel())),
        None => Check::new(KERNEL, Verdict::Note, text),
    }
}

fn use_kernel() -> String {
    let (major, minor) = kernel::VERSION_MIN;
    format!("use a kernel of {major}.{minor} or later")
}

fn user_check() -> Check {
    let capabilities = status_field("CapEff").and_then(|hex| u64::from_str_radix(&hex, 16).ok()).unwrap_or(0);
    // Bit 19 is CAP_SYS_PTRACE.
    let ptrace = if capabilities & 1 << 19 == 0 { "without" } else { "with" };
    let value = format!("uid {}, {ptrace} CAP_SYS_PTRACE", sys::effective_user());
    if sys::is_privileged_executable() {
        return Check::new("user", Verdict::No, format!("{value}, by farpage's own file"))
            .fix("sudo setcap -r on the farpage executable: its capabilities can't be handed on safely");
    }
    Check::new("user", Verdict::Note, value)
}

/// Returns a line of /proc/self/status.
fn status_field(name: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

fn setting(path: &str) -> Option<String> {
    Some(fs::read_to_string(Path::new("/proc/sys").join(path)).ok()?.trim().to_owned())
}

/// Checks the modes, the ways to a userfaultfd for `thread`, and the features of the userfaultfd that the run
/// would use.
fn mode_checks(asked: FaultsAsked) -> Vec<Check> {
    let (signal, segv, thread) = (kernel::user_mode(), kernel::without(), kernel::userfaultfd());
    let is_lost = |asked_for| match asked {
        FaultsAsked::Best => signal.is_err() && segv.is_err(),
        other => other == asked_for,
    };
    let missing = |mode| if is_lost(mode) { Verdict::No } else { Verdict::Note };
    let mut checks = vec![
        mode_check("faults by signal", &signal, missing(FaultsAsked::Signal)),
        mode_check("faults by segv", &segv, missing(FaultsAsked::Segv)),
    ];
    let help = match (&thread, asked) {
        (Ok(_), _) => Help::AnotherWayWorks,
        (Err(_), FaultsAsked::Thread) => Help::Needed,
        (Err(_), FaultsAsked::Best) if !is_lost(FaultsAsked::Signal) => Help::NotAsked,
        (Err(_), FaultsAsked::Signal) if signal.is_ok() => Help::NotAsked,
        (Err(_), FaultsAsked::Segv) if segv.is_ok() => Help::NotAsked,
        (Err(_), _) => Help::WouldDo,
    };
    checks.extend(userfaultfd_checks(&thread, help));
    let used = match asked {
        FaultsAsked::Thread => thread.ok(),
        FaultsAsked::Signal | FaultsAsked::Best => signal.ok(),
        FaultsAsked::Segv => None,
    };
    checks.extend(used.map(|userfaultfd| feature_checks(userfaultfd.features)).into_iter().flatten());
    checks
}

/// Checks a mode that needs no privilege. `missing` is the verdict if the mode isn't there.
fn mode_check(name: &str, mode: &Result<Userfaultfd, Failure>, missing: Verdict) -> Check {
    match mode {
        Ok(_) => Check::new(name, Verdict::Ok, "works, without privileges"),
        Err(failure) => {
            let check = Check::new(name, missing, failure.in_one_line());
            failure.fixes().iter().fold(check, |check, fix| check.fix(fix))
        }
    }
}

/// Whether a userfaultfd for the kernel's faults, too, would help this run. Only `thread` uses one, and only
/// `--faults thread` takes that mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Help {
    /// There is one, by another way.
    AnotherWayWorks,
    /// The run needs one.
    Needed,
    /// The run works without, in another mode.
    NotAsked,
    /// The mode that was asked for doesn't work, and `--faults thread` would with one.
    WouldDo,
}

impl Help {
    /// Returns the check for a way that doesn't work, or a setting that closes it.
    fn check(self, name: &str, value: &str, fix: Option<&str>) -> Check {
        match (self, fix) {
            (Help::AnotherWayWorks, _) => {
                Check::new(name, Verdict::Note, format!("{value} (another way works)"))
            }
            (Help::NotAsked, _) => {
                Check::new(name, Verdict::Note, format!("{value} (not needed: only --faults thread uses it)"))
            }
            (_, None) => Check::new(name, Verdict::Note, value),
            (Help::Needed, Some(fix)) => Check::new(name, Verdict::No, value).fix(fix),
            (Help::WouldDo, Some(fix)) => {
                Check::new(name, Verdict::Note, value).fix(format!("{fix}; then use --faults thread"))
            }
        }
    }
}

/// Checks the three ways to a userfaultfd for the kernel's faults, too. One way is enough.
fn userfaultfd_checks(userfaultfd: &Result<Userfaultfd, Refused>, help: Help) -> Vec<Check> {
    let way = |name: &str, result: Result<u64, std::io::Error>, fix: Option<&str>| match (result, fix) {
        (Ok(_), _) => Check::new(name, Verdict::Ok, "works"),
        (Err(error), Some(fix)) => help.check(name, &error.to_string(), Some(fix)),
        (Err(_), None) => Check::new(name, Verdict::Note, "unknown to this kernel: it came with Linux 6.1"),
    };
    // Not every kernel has the last way.
    let fixes = kernel::ways(&Release::this());
    let mut checks = vec![
        way("userfaultfd system call", sys::userfaultfd_by_syscall(Faults::All), fixes.first().copied()),
        way("/dev/userfaultfd", sys::userfaultfd_by_device(), fixes.get(2).copied()),
        setting_check(setting("vm/unprivileged_userfaultfd"), help),
    ];
    if let (Err(refused), Help::Needed) = (userfaultfd, help) {
        let failure = refused.failure();
        let check = Check::new("userfaultfd", Verdict::No, failure.in_one_line());
        checks.push(failure.fixes().iter().fold(check, |check, fix| check.fix(fix)));
    }
    checks
}

fn setting_check(setting: Option<String>, help: Help) -> Check {
    let name = "vm.unprivileged_userfaultfd";
    match setting {
        Some(value) if value == "1" => Check::new(name, Verdict::Ok, value),
        Some(value) => help.check(name, &value, Some("sudo sysctl vm.unprivileged_userfaultfd=1")),
        None => Check::new(name, Verdict::Note, "unknown to this kernel"),
    }
}

fn feature_checks(features: u64) -> Vec<Check> {
    let has = |bit: u64| features & bit != 0;
    let feature = |name: &str, bit: u64, missing: Verdict, fix: &str| {
        if has(bit) { Check::new(name, Verdict::Ok, "yes") } else { Check::new(name, missing, "no").fix(fix) }
    };
    vec![
        feature(
            "feature MOVE",
            kernel::FEATURE_MOVE,
            Verdict::Note,
            "pages are copied; kernel 6.8 or later moves them",
        ),
        feature("feature WP", kernel::FEATURE_WRITE_PROTECT, Verdict::No, &use_kernel()),
        feature(
            "feature POISON",
            kernel::FEATURE_POISON,
            Verdict::Note,
            "a page that can't be read back ends the program; kernel 6.6 or later marks it",
        ),
        feature(
            "feature EXACT_ADDRESS",
            kernel::FEATURE_EXACT_ADDRESS,
            Verdict::Note,
            "nothing to do; kernel 5.18 or later has it",
        ),
    ]
}

fn seccomp_check() -> Check {
    match status_field("Seccomp").as_deref() {
        Some("0") => Check::new("seccomp", Verdict::Ok, "no filter"),
        Some("2") => Check::new(
            "seccomp",
            Verdict::Note,
            "a filter is active (container?); what it forbids is a `no` elsewhere in this table",
        ),
        Some("1") => Check::new("seccomp", Verdict::No, "strict mode").fix("run without strict seccomp"),
        _ => Check::new("seccomp", Verdict::Note, "unknown"),
    }
}

/// Checks whether a page keeps what a device or another process writes to it while the page is copied out.
fn pins_check(keeps_them: Result<bool, Errno>, in_segv: Result<bool, Errno>) -> Check {
    const NAME: &str = "pinned pages";
    match keeps_them.and_then(|keeps| Ok((keeps, in_segv?))) {
        Ok((true, true)) => Check::new(NAME, Verdict::Ok, "stay in memory while something refers to them"),
        Ok((true, false)) => Check::new(
            NAME,
            Verdict::Note,
            "stay in memory while something refers to them; but with faults by segv a write of a device or of another process can be lost",
        )
        .fix("use a kernel of 5.19 or later; or faults by thread or signal"),
        Ok((false, _)) => Check::new(
            NAME,
            Verdict::Note,
            "this kernel drops them while something refers to them; where pages are copied (install copy), a write of a device or of another process can be lost meanwhile",
        )
        .fix("use a kernel of 5.18 or later; from 6.8 on pages are moved instead (faults by thread or signal)"),
        Err(Errno(errno)) => Check::new(
            NAME,
            Verdict::Note,
            format!("unknown: {}", std::io::Error::from_raw_os_error(errno)),
        ),
    }
}

fn io_check() -> Check {
    match sys::io_uring() {
        Ok(()) => Check::new("io_uring", Verdict::Ok, "works"),
        Err(error) => Check::new("io_uring", Verdict::Note, format!("{error}; psync is used instead"))
            .fix("sudo sysctl kernel.io_uring_disabled=0; docker run --security-opt seccomp=unconfined"),
    }
}

fn aio_check() -> Check {
    match sys::aio() {
        Ok(()) => Check::new("aio", Verdict::Ok, "works"),
        Err(error) => {
            Check::new("aio", Verdict::Note, format!("{error}; threads sleep until a page is read (--wait)"))
        }
    }
}

/// Checks the default directories. `missing` is the verdict on one that can't be used.
fn swap_checks(missing: Verdict) -> Vec<Check> {
    areas::default_directories(sys::environment)
        .into_iter()
        .map(|(origin, path)| {
            let name = if origin == "/var/tmp" {
                "swap /var/tmp".into()
            } else {
                format!("swap {origin} ({})", path.display())
            };
            let argument = SwapArgument { path, ..SwapArgument::default() };
            swap_check(name, origin, &argument, missing)
        })
        .collect()
}

fn swap_check(name: String, origin: &str, argument: &SwapArgument, missing: Verdict) -> Check {
    let directory = &argument.path;
    let file_system = File::open(directory).and_then(|file| sys::file_system(&file));
    match (areas::open_directory_of(argument), file_system) {
        (Ok(area), Ok(file_system)) => {
            let yes_no = |yes: bool| if yes { "yes" } else { "no" };
            Check::new(
                name,
                Verdict::Ok,
                format!(
                    "{}, O_TMPFILE {}, O_DIRECT {}, {} free of {}, room for {}",
                    file_system.name(),
                    yes_no(areas::has_unnamed_files(directory)),
                    yes_no(areas::has_direct_io(directory)),
                    iec(file_system.available),
                    iec(file_system.bytes),
                    iec(area.bytes())
                ),
            )
        }
        (Err(failure), _) => {
            // A TMPDIR in memory is common, and is passed over.
            let verdict = if origin == "$TMPDIR" { Verdict::Note } else { missing };
            let check = Check::new(name, verdict, failure.in_one_line());
            let check = failure.fixes().iter().fold(check, |check, fix| check.fix(fix));
            if origin == "$FARPAGE_SWAP_DIR" { check.fix(areas::FIX_SWAP_DIR) } else { check }
        }
        (_, Err(error)) => {
            Check::new(name, missing, error.to_string()).fix("name another directory with --swap")
        }
    }
}

fn memory_checks() -> Vec<Check> {
    let limits = budget::limits(&Roots::of_this_machine());
    let mut checks: Vec<_> = limits
        .iter()
        .map(|limit| {
            Check::new(
                format!("limit {}", limit.source),
                Verdict::Note,
                format!("{} in {}, {} left", iec(limit.bytes), limit.file.display(), iec(limit.left_bytes())),
            )
        })
        .collect();
    checks.push(match budget::resolve(None, None, Behind::Areas, &limits, None) {
        Ok(budget) => Check::new(
            "default budget",
            Verdict::Ok,
            format!("{} ({})", iec(budget.ram_bytes), budget.origin),
        ),
        Err(failure) => {
            Check::new("default budget", Verdict::No, failure.in_one_line()).fix("give it: --ram SIZE")
        }
    });
    checks
}

fn limit_checks() -> Vec<Check> {
    let locked = sys::resource_limit(Resource::LockedMemory).map_or_else(|| "unlimited".into(), iec);
    vec![
        match sys::resource_limit(Resource::AddressSpace) {
            None => Check::new("RLIMIT_AS", Verdict::Ok, "unlimited"),
            Some(limit) => {
                Check::new("RLIMIT_AS", Verdict::No, format!("{}: evicted memory counts too", iec(limit)))
                    .fix("ulimit -v unlimited")
            }
        },
        Check::new("RLIMIT_MEMLOCK", Verdict::Note, locked),
        match sys::resource_limit(Resource::FileSize) {
            None => Check::new(FILE_SIZE, Verdict::Ok, "unlimited"),
            Some(limit) if limit < FILE_BYTES_MIN => Check::new(
                FILE_SIZE,
                Verdict::No,
                format!(
                    "{}: memory that is shared with the program, {}, counts too",
                    iec(limit),
                    iec(FILE_BYTES_MIN)
                ),
            )
            .fix("ulimit -f unlimited"),
            Some(limit) => {
                Check::new(FILE_SIZE, Verdict::Note, format!("{}: a swap file can't be larger", iec(limit)))
                    .fix("ulimit -f unlimited")
            }
        },
        match setting("vm/overcommit_memory") {
            Some(value) if value == "2" => Check::new(
                "vm.overcommit_memory",
                Verdict::No,
                "2: memory can't be allocated beyond RAM and the kernel's swap",
            )
            .fix("sudo sysctl vm.overcommit_memory=0"),
            Some(value) => Check::new("vm.overcommit_memory", Verdict::Ok, value),
            None => Check::new("vm.overcommit_memory", Verdict::Note, "unknown"),
        },
        match setting("vm/max_map_count").and_then(|value| value.parse::<u64>().ok()) {
            Some(count) if count < 65_530 => Check::new("vm.max_map_count", Verdict::No, count.to_string())
                .fix("sudo sysctl vm.max_map_count=65530"),
            Some(count) => Check::new("vm.max_map_count", Verdict::Ok, count.to_string()),
            None => Check::new("vm.max_map_count", Verdict::Note, "unknown"),
        },
    ]
}

fn preload_check() -> Check {
    match preload::find() {
        Ok(path) => Check::new("preload library", Verdict::Ok, path.display().to_string()),
        Err(failure) => {
            let check = Check::new("preload library", Verdict::No, failure.in_one_line());
            failure.fixes().iter().fold(check, |check, fix| check.fix(fix))
        }
    }
}

// ---- the choice ----------------------------------------------------------------------------------------

/// Returns what this `farpage run` would use, and why it would be refused.
fn choose(options: &DoctorOptions) -> (Choice, Option<Failure>) {
    let asked = Asked::of(&options.settings);
    let budget_bytes = asked.as_ref().ok().map(|asked| asked.budget.ram_bytes);
    let userfaultfd = kernel::faults(options.settings.faults());
    let plan = asked.and_then(|asked| {
        let note = find_program(options)?;
        options.settings.stats.as_deref().map_or(Ok(()), run::check_stats)?;
        let mut plan = Plan::of(&options.settings, asked)?;
        plan.notes.extend(note);
        Ok(plan)
    });
    let mut choice = Choice { budget_bytes, ..Choice::default() };
    if let Ok(userfaultfd) = userfaultfd {
        choice.faults = Some(faults_name(userfaultfd.source));
        choice.userfaultfd = Some(uffd_name(userfaultfd.source));
    }
    let plan = match plan {
        Ok(plan) => plan,
        Err(failure) => {
            choice.why.push(failure.in_one_line());
            return (choice, Some(failure));
        }
    };
    choice.install = Some(install_name(plan.settings.install));
    choice.io = Some(io_name(plan.settings.io));
    choice.wait = Some(wait_name(plan.settings.polls));
    choice.supervisor = Some(options.settings.standing().name());
    let areas = plan.areas.iter().map(|area| say::harmless(&area.path.display().to_string()));
    choice.swap = Some(areas.collect::<Vec<_>>().join(", ")).filter(|areas| !areas.is_empty());
    choice.discards_first = plan.areas.iter().any(|area| area.discards_first);
    choice.why = reasons(&options.settings, &plan);
    (choice, None)
}

/// Looks for the program, if one is named. Returns a note if the program would run without Farpage.
fn find_program(options: &DoctorOptions) -> Result<Option<String>, Failure> {
    if options.program.is_empty() {
        return Ok(None);
    }
    match run::find_program(&options.program) {
        Err(why) if why.status == STATUS_CANT_RUN && options.settings.runs_unsupported() => Ok(Some(
            format!("the program would run without a budget (--unsupported run): {}", why.in_one_line()),
        )),
        found => found.map(|_| None),
    }
}

/// Returns why the best choice was not taken, and what `run` would say before it starts.
fn reasons(options: &RunSettings, plan: &Plan) -> Vec<String> {
    let mut why = Vec::new();
    if plan.settings.install == Install::Mixed {
        why.push("mixed: the kernel has UFFDIO_MOVE".into());
    }
    let is_free = options.faults() == FaultsAsked::Best;
    match plan.settings.uffd_source {
        UffdSource::UserMode if is_free => {
            why.push("signal: the faster one of the two modes that auto takes".into());
        }
        UffdSource::Nothing if is_free => {
            why.push("segv: the faster mode, signal, isn't allowed here (see `faults by signal`)".into());
        }
        _ => {}
    }
    match (plan.settings.io, sys::io_uring()) {
        (IoEngine::Uring, _) => why.push("uring: io_uring works".into()),
        (IoEngine::Psync, Err(error)) => why.push(format!("psync: io_uring is refused ({error})")),
        (IoEngine::Psync, Ok(())) => {}
    }
    if let Standing::Above(reason) = options.standing() {
        why.push(format!("above: the supervisor is the program's parent, not beside it: {reason}"));
    }
    why.extend(plan.notes.iter().map(|note| format!("note: {note}")));
    why
}

// ---- the table -----------------------------------------------------------------------------------------

fn table(checks: &[Check], choice: &Choice, works: bool) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for check in checks {
        let verdict = match check.verdict {
            Verdict::Ok => "ok",
            Verdict::No => "no",
            Verdict::Note => "-",
        };
        text += &format!("{:<width$}  {verdict:<2}  {}\n", check.name, check.value);
        for fix in &check.fixes {
            text += &format!("{:<width$}      fix: {fix}\n", "");
        }
    }
    text.push('\n');
    if let (Some(faults), Some(install), Some(io)) = (choice.faults, choice.install, choice.io) {
        text += &format!(
            "farpage run would use: faults by {faults}, userfaultfd by {}, install {install}, io {io}, swap {}, budget {}, wait {}, supervisor {}\n",
            choice.userfaultfd.unwrap_or("nothing"),
            choice.swap.as_deref().unwrap_or("none"),
            choice.budget_bytes.map_or_else(|| "none".into(), iec),
            choice.wait.unwrap_or("?"),
            choice.supervisor.unwrap_or("?"),
        );
    }
    choice.why.iter().for_each(|why| text += &format!("  {}\n", say::visible(why)));
    text += if works {
        "farpage run works here.\n"
    } else {
        "farpage run would be refused here; see each `no` above.\n"
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_before_5_9_is_too_old() {
        for (release, verdict) in [
            ("5.8.18", Verdict::No),
            ("5.9.0", Verdict::Note),
            ("6.8.1", Verdict::Ok),
            ("odd", Verdict::Note),
        ] {
            assert_eq!(kernel_check(&Release::of(release)).verdict, verdict, "{release}");
        }
        assert_eq!(
            kernel_check(&Release::of("5.8")).fixes,
            ["use a kernel of 5.9 or later, best 6.8 or later"]
        );
    }

    /// Kernels before 5.18 must not pass for as good as any other.
    #[test]
    fn kernel_that_drops_pinned_pages_is_told_of_with_what_it_means_and_the_fix() {
        let told = |check| table(&[check], &Choice::default(), true);
        let drops = told(pins_check(Ok(false), Ok(false)));
        for words in ["pinned pages  -", "can be lost", "fix: use a kernel of 5.18 or later"] {
            assert!(drops.contains(words), "{words}: {drops}");
        }
        let replaces = told(pins_check(Ok(true), Ok(false)));
        for words in ["pinned pages  -", "with faults by segv", "fix: use a kernel of 5.19 or later"] {
            assert!(replaces.contains(words), "{words}: {replaces}");
        }
        assert_eq!(pins_check(Ok(true), Ok(true)).verdict, Verdict::Ok);
        let refused = Errno(libc::EACCES);
        assert!(pins_check(Ok(true), Err(refused)).value.contains("Permission denied"));
        assert!(pins_check(Err(refused), Ok(true)).value.contains("Permission denied"));
    }

    /// With `--faults thread` the ways to it were "not needed". Where nothing worked, they were needed,
    /// though `auto` never takes `thread`.
    #[test]
    fn ways_to_thread_are_needed_only_if_that_mode_is_asked_for() {
        let told = |help| setting_check(Some("0".into()), help);
        for (help, verdict, value, fixes) in [
            (Help::AnotherWayWorks, Verdict::Note, "0 (another way works)", 0),
            (Help::NotAsked, Verdict::Note, "0 (not needed: only --faults thread uses it)", 0),
            (Help::WouldDo, Verdict::Note, "0", 1),
            (Help::Needed, Verdict::No, "0", 1),
        ] {
            let check = told(help);
            assert_eq!(
                (check.verdict, &*check.value, check.fixes.len()),
                (verdict, value, fixes),
                "{help:?}"
            );
        }
        assert!(told(Help::WouldDo).fixes[0].ends_with("; then use --faults thread"));
        assert_eq!(setting_check(Some("1".into()), Help::Needed).verdict, Verdict::Ok);
    }

    #[test]
    fn every_no_has_a_fix() {
        let mut checks =
            vec![kernel_check(&Release::of("5.4.0")), user_check(), seccomp_check(), preload_check()];
        for origin in ["$FARPAGE_SWAP_DIR", "/var/tmp"] {
            let file = SwapArgument { path: "/etc/passwd".into(), ..SwapArgument::default() };
            checks.push(swap_check(origin.into(), origin, &file, Verdict::No));
        }
        checks.push(io_check());
        checks.extend(feature_checks(0));
        checks.extend(swap_checks(Verdict::No));
        checks.extend(memory_checks());
        checks.extend(limit_checks());
        let refused = || std::io::Error::from_raw_os_error(libc::EPERM);
        let refused = Refused { syscall: refused(), device: refused(), user_only: None };
        checks.extend(userfaultfd_checks(&Err(refused), Help::Needed));
        for check in checks.iter().filter(|check| check.verdict == Verdict::No) {
            assert!(!check.fixes.is_empty(), "{check:?}");
        }
        assert!(checks.iter().any(|check| check.verdict == Verdict::No));
        let swap_dir = checks.iter().find(|check| check.name == "$FARPAGE_SWAP_DIR").unwrap();
        assert!(swap_dir.fixes.iter().any(|fix| fix == areas::FIX_SWAP_DIR), "{swap_dir:?}");
    }
}

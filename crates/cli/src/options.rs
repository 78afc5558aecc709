//! The command line and its environment variables: what is accepted, and what contradicts what.
//!
//! Own options come first; everything from PROGRAM on belongs to the program. An option on the command
//! line wins over its variable.

use crate::areas::swap_argument::{SwapArgument, swap_argument};
use crate::host::kernel::FaultsAsked;
use crate::supervise::orphans;
use crate::text::failure::{Failure, STATUS_FAILED};
use crate::text::size::{self, Size};
use crate::text::tips;
use clap::builder::{FalseyValueParser, PossibleValue, PossibleValuesParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use farpage_bench::EXPERIMENTS;
use farpage_bench::load::LOADS;
use farpage_bench::load::touch::PATTERNS;
use farpage_core::config::{
    AreaOrder, Codec, Install, IoEngine, PAGE_CLUSTER, PAGE_CLUSTER_MAX, Readahead, SlotPolicy,
};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Run programs that need more memory than they may have.
#[derive(Parser, Debug)]
#[command(name = "farpage", version)]
pub struct CommandLine {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a program within a RAM budget: pages beyond it go to a compressed pool, then to disk.
    Run(RunOptions),
    /// Show the swap areas of a run while it runs, and how full they are.
    Show(ShowOptions),
    /// Say what this machine offers, what `run` would choose, and how to get what is missing. Options,
    /// variables and a program are judged as `run` would judge them, and `true` is started under the options.
    /// The exit status is 0 if that `run` would work, else 1; it is 125 if an option has no meaning.
    Doctor(DoctorOptions),
    /// Measure one of Farpage's core designs against the design that it replaced, on this machine.
    Bench(BenchOptions),
    /// A program that uses memory, for `bench`.
    #[command(hide = true)]
    Load(LoadOptions),
}

/// Options of `farpage show`.
#[derive(clap::Args, Debug)]
pub struct ShowOptions {
    /// A `farpage run`, or a process under it.
    pub pid: u32,

    /// Columns to print, separated by commas [default: all].
    #[arg(
        short = 'o',
        long = "output",
        value_name = "COLUMNS",
        value_enum,
        value_delimiter = ',',
        ignore_case = true
    )]
    pub columns: Vec<Column>,

    /// Print no headings.
    #[arg(long)]
    pub noheadings: bool,

    /// Print sizes in bytes.
    #[arg(long)]
    pub bytes: bool,

    /// Print everything as JSON, sizes in bytes.
    #[arg(long, conflicts_with_all = ["columns", "noheadings", "bytes"])]
    pub json: bool,
}

/// Columns of `farpage show`: those of `swapon --show`, and the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Column {
    /// The directory, file or device.
    Name,
    /// `file` or `partition`.
    Type,
    /// The bytes that fit into it.
    Size,
    /// The bytes that living processes have in it.
    Used,
    /// Its priority.
    Prio,
    /// The node of its disk, if it is known.
    Node,
}

impl Column {
    /// Returns the column's heading.
    pub const fn heading(self) -> &'static str {
        match self {
            Column::Name => "NAME",
            Column::Type => "TYPE",
            Column::Size => "SIZE",
            Column::Used => "USED",
            Column::Prio => "PRIO",
            Column::Node => "NODE",
        }
    }
}

/// Returns a parser of the names of experiments.
fn experiments() -> PossibleValuesParser {
    PossibleValuesParser::new(EXPERIMENTS.iter().map(|e| PossibleValue::new(e.name).help(e.about)))
}

/// Returns a parser of the names of loads.
fn loads() -> PossibleValuesParser {
    PossibleValuesParser::new(LOADS.iter().map(|l| PossibleValue::new(l.name).help(l.about)))
}

/// Options of `farpage bench`.
#[derive(clap::Args, Debug)]
pub struct BenchOptions {
    /// What to measure.
    #[arg(value_parser = experiments())]
    pub experiment: String,

    /// Use smaller sizes and fewer rounds, to see that the experiment works. With `command` only the rounds
    /// are fewer.
    #[arg(long)]
    pub quick: bool,

    /// Run only the cases whose titles contain this text: `--only "pool, random"`, `--only redis`. For
    /// `kernel` and `programs`.
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,

    /// Memory that the program gets: a size, or a share of what its largest process has without a limit. 50 %
    /// if it isn't given. For `command`.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub ram: Option<Size>,

    /// Measure Farpage with these options of `farpage run`: `--with "--faults segv --pool 10M"`. May be given
    /// several times. For `command`.
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub with: Vec<String>,

    /// Write the result to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write the result to this file as a plot.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// The program and its arguments. It runs as root, with an empty standard input, and must print the same
    /// each time. For `command`.
    #[arg(last = true, value_name = "PROGRAM")]
    pub program: Vec<String>,
}

/// Options of `farpage load`.
#[derive(clap::Args, Debug)]
pub struct LoadOptions {
    /// The load.
    #[arg(value_parser = loads())]
    pub name: String,

    /// Size of its memory.
    #[arg(long, value_parser = size::parse, default_value = "64M")]
    pub bytes: Size,

    /// Threads.
    #[arg(long, default_value_t = 1)]
    pub threads: usize,

    /// Size of the memory of random threads beside them.
    #[arg(long, value_parser = size::parse, default_value = "64M")]
    pub random_bytes: Size,

    /// Random threads beside them.
    #[arg(long, default_value_t = 0)]
    pub random_threads: usize,

    /// Pages from one touch to the next. With a random load, pages from one page that may be touched to the
    /// next one.
    #[arg(long, default_value_t = 1)]
    pub stride: usize,

    /// How long to run.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,

    /// Percent of touches that write.
    #[arg(long, default_value_t = 20)]
    pub write_percent: u64,

    /// Seed of the random numbers.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Pages that don't compress.
    #[arg(long)]
    pub noise: bool,

    /// One mapping for all threads of a kind.
    #[arg(long)]
    pub shared: bool,

    /// A process for each kind of thread.
    #[arg(long)]
    pub processes: bool,

    /// Say on standard output when memory is filled, and go on after a byte on standard input.
    #[arg(long)]
    pub gate: bool,

    /// The order of `touch`.
    #[arg(long, value_parser = PossibleValuesParser::new(PATTERNS))]
    pub pattern: Option<String>,

    /// A file of whole pages with which `touch` fills its memory. Without it python3 collects some pages
    /// first.
    #[arg(long, value_name = "FILE")]
    pub contents: Option<String>,
}

/// Options of `farpage doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorOptions {
    /// Print the checks as JSON.
    #[arg(long)]
    pub json: bool,

    /// The options of `run` that are judged.
    #[command(flatten)]
    pub settings: RunSettings,

    /// The program that `run` would start.
    #[arg(value_name = "PROGRAM [ARGS]", trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

/// `farpage run`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct RunOptions {
    /// How the program runs.
    #[command(flatten)]
    pub settings: RunSettings,

    /// The program and its arguments.
    #[arg(
        value_name = "PROGRAM [ARGS]",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub program: Vec<OsString>,
}

/// Options of `farpage run`.
#[derive(clap::Args, Debug)]
pub struct RunSettings {
    /// Budget for the memory in RAM, for the program and all processes that it starts, together. A percentage
    /// is of the tightest limit: a cgroup's limit, or the available memory (MemAvailable) [default: 90% of
    /// what that limit leaves, and less where that is little].
    #[arg(long, value_name = "SIZE", env = "FARPAGE_RAM", value_parser = size::parse)]
    pub ram: Option<Size>,

    /// Where pages go that don't fit the pool: a directory for a temporary file, an empty file, or a file or
    /// device prepared with mkswap. SIZE is the most that is used of it. With discard, space that isn't
    /// needed any more is given back while the program runs: as holes in files that grow, by BLKDISCARD on
    /// devices. discard=once discards before the run only, discard=pages not before the run. The option may
    /// be given up to 16 times. The variable FARPAGE_SWAP holds several areas, separated by `;` [default:
    /// $FARPAGE_SWAP_DIR, or the first usable of $TMPDIR, /var/tmp].
    #[arg(long, value_name = "PATH[:SIZE][,prio=N][,node=N][,discard[=once|pages]]")]
    swap: Vec<OsString>,

    /// Which of several areas without prio= a write goes to.
    #[arg(long, value_enum, env = "FARPAGE_ORDER", default_value = "weighted")]
    order: OrderOption,

    /// Use no disk: evicted pages must fit the compressed pool. Also FARPAGE_NO_DISK=1.
    #[arg(long)]
    no_disk: bool,

    /// Limit of the compressed pool, at most 90 % of the budget. The pool is part of the budget, and a
    /// percentage is of the budget. With a disk the pool has less while the program needs the memory more
    /// [default: 50%, with --no-disk 80%].
    #[arg(long, value_name = "SIZE|N%", env = "FARPAGE_POOL", value_parser = size::parse)]
    pub pool: Option<Size>,

    /// Codec of the pool.
    #[arg(long, value_enum, env = "FARPAGE_CODEC", default_value = "auto")]
    codec: CodecOption,

    /// Whether up to four compressed pages share a slot of an area. Fewer bytes go to the disk, and packing
    /// takes some CPU time. Without a codec no pages share a slot.
    #[arg(long, value_enum, env = "FARPAGE_PACK", default_value = "on")]
    pack: PackOption,

    /// How faults reach Farpage. `thread` needs a privilege, `signal` and `segv` need none. With `signal` and
    /// `segv` Farpage guards the program's system calls [auto: signal, or segv where signal isn't allowed].
    #[arg(long, value_enum, env = "FARPAGE_FAULTS", default_value = "auto")]
    faults: FaultsOption,

    /// How pages get into the program and out of it [default: mixed where the kernel can move pages, from
    /// Linux 6.8 on].
    #[arg(long, value_enum, env = "FARPAGE_INSTALL")]
    install: Option<InstallOption>,

    /// How pages are written to areas [default: uring where the kernel allows it].
    #[arg(long, value_enum, env = "FARPAGE_IO")]
    io: Option<IoOption>,

    /// How a thread waits for a page of an area. One thread of the run polls at a time, if reads are quick
    /// [default: poll; sleep with less than two CPUs, or where the kernel refuses AIO].
    #[arg(long, value_enum, env = "FARPAGE_WAIT")]
    wait: Option<WaitOption>,

    /// How free slots of an area are found (for comparison).
    #[arg(long, value_enum, env = "FARPAGE_SLOTS", default_value = "clusters")]
    slots: SlotsOption,
    /// Which pages are brought in before the program touches them.
    #[arg(long, value_enum, env = "FARPAGE_READAHEAD", default_value = "streams")]
    readahead: ReadaheadOption,

    /// Windows of by-address and by-slot have at most 2^N pages. N is at most 5, and 0 is no readahead.
    #[arg(long, value_name = "N", env = "FARPAGE_PAGE_CLUSTER", default_value_t = PAGE_CLUSTER,
        value_parser = clap::value_parser!(u32).range(..=i64::from(PAGE_CLUSTER_MAX)))]
    pub page_cluster: u32,

    /// Whether the program may lock all of its memory (mlockall), after which nothing can be evicted.
    #[arg(long, value_enum, env = "FARPAGE_MLOCKALL", default_value = "allow")]
    mlockall: MlockallOption,

    /// What Farpage does with a program that it can't get into.
    #[arg(long, value_enum, env = "FARPAGE_UNSUPPORTED", default_value = "refuse")]
    unsupported: UnsupportedOption,

    /// What Farpage does with a run that stays 5 % above its budget for a second.
    #[arg(long, value_enum, env = "FARPAGE_OVER_BUDGET", default_value = "warn")]
    over_budget: OverBudgetOption,

    /// Where Farpage's own process stands [default: beside, except in some places in containers].
    #[arg(long, value_enum, env = "FARPAGE_SUPERVISOR")]
    supervisor: Option<SupervisorOption>,

    /// Write counters, latencies and settings to this file as JSON when the program has ended. `legend` in
    /// the file explains each of them. `-` is standard output.
    #[arg(long, value_name = "FILE", env = "FARPAGE_STATS")]
    pub stats: Option<PathBuf>,

    /// Print no summary and no notices, unless data was lost, a disk fails, Farpage ends the program, or a
    /// swap file can't be emptied.
    #[arg(long, env = "FARPAGE_QUIET", value_parser = FalseyValueParser::new())]
    pub quiet: bool,
}

const AFTER_HELP: &str = "\
Sizes: 2G and 2GiB are 2^31 bytes, 2GB is 2*10^9, a plain number is bytes; 1.5G and 50% work too.
Exit status: the program's own; 125 Farpage failed, 126 the program can't run under it,
127 not found; 134 a bug in Farpage, 135 a page could not be read back.
FARPAGE_PRELOAD names Farpage's library, if it is neither beside the executable nor in ../lib/farpage.
Example: farpage run --ram 2G -- python3 train.py";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CodecOption {
    /// For each page the codec that suits it; zstd for pages that stay
    Auto,
    /// The same without zstd.
    Fast,
    /// LZ4 for every page.
    Lz4,
    /// No codec: pages stay as they are (for comparison).
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PackOption {
    /// Compressed pages share slots.
    On,
    /// Each page has a slot to itself, uncompressed.
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum InstallOption {
    /// Pages are moved both ways.
    Move,
    /// Pages are copied both ways.
    Copy,
    /// Pages are moved out and copied in.
    Mixed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum IoOption {
    /// io_uring.
    Uring,
    /// pwrite.
    Psync,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WaitOption {
    /// The thread polls: it saves the time to fall asleep and be woken, and uses CPU time.
    Poll,
    /// The thread sleeps.
    Sleep,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SlotsOption {
    /// A cluster for each CPU, emptiest clusters first.
    Clusters,
    /// As Linux did until 5.7.
    Classic,
    /// As Linux did from 5.8 on.
    ScanMore,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderOption {
    /// To the area expected to be done soonest: by write latency, waiting writes, distance, and free space.
    Weighted,
    /// To areas of the CPU's own node first, in turn; then one after the other (Linux 4.14 to 6.18).
    Numa,
    /// To all areas in turn (Linux after 6.18).
    RoundRobin,
    /// To one area after the other (Linux before 4.14).
    Global,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReadaheadOption {
    /// The next pages of each walk that Farpage sees, several walks at once.
    Streams,
    /// A window around the fault, one for each mapping, as Linux does.
    ByAddress,
    /// A block of slots around the fault's slot, as Linux did.
    BySlot,
    /// None.
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FaultsOption {
    /// `signal`, or `segv` where `signal` isn't allowed; never `thread`.
    Auto,
    /// As SIGBUS in the thread that touched; for any user.
    Signal,
    /// As messages to Farpage's threads.
    Thread,
    /// As SIGSEGV, by closed pages; for any user, also where containers refuse userfaultfd.
    Segv,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MlockallOption {
    /// The program may, goes over its budget, and the user is told.
    Allow,
    /// The call fails with EPERM.
    Refuse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum UnsupportedOption {
    /// Farpage refuses the program, with status 126.
    Refuse,
    /// The program runs without Farpage, and without a budget.
    Run,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OverBudgetOption {
    /// The run goes on.
    Warn,
    /// Farpage ends the run, with status 125.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SupervisorOption {
    /// As the program's parent.
    Above,
    /// As an orphan: the program has the process that `farpage run` was started as.
    Beside,
}

/// Where the supervisor stands, seen from the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Beside,
    AboveAsAsked,
    /// With the reason why it isn't beside the program.
    Above(&'static str),
}

impl Standing {
    /// Returns the place's name in `--supervisor`.
    pub const fn name(self) -> &'static str {
        match self {
            Standing::Beside => "beside",
            Standing::AboveAsAsked | Standing::Above(_) => "above",
        }
    }
}

impl RunSettings {
    /// Whether a supervisor beside the program was asked for.
    pub fn asks_for_beside(&self) -> bool {
        self.supervisor == Some(SupervisorOption::Beside)
    }
    /// Where the supervisor is to stand.
    pub fn standing(&self) -> Standing {
        if self.supervisor == Some(SupervisorOption::Above) {
            return Standing::AboveAsAsked;
        }
        orphans::why_above(self.asks_for_beside()).map_or(Standing::Beside, Standing::Above)
    }
    /// Whether a run that stays above its budget is killed.
    pub fn kills_over_budget(&self) -> bool {
        self.over_budget == OverBudgetOption::Kill
    }
    /// Whether mlockall is refused.
    pub fn refuses_mlockall(&self) -> bool {
        self.mlockall == MlockallOption::Refuse
    }
    /// Returns whether a program that Farpage can't get into runs without Farpage.
    pub fn runs_unsupported(&self) -> bool {
        self.unsupported == UnsupportedOption::Run
    }
    /// Returns how faults are to reach Farpage.
    pub fn faults(&self) -> FaultsAsked {
        match self.faults {
            FaultsOption::Auto => FaultsAsked::Best,
            FaultsOption::Signal => FaultsAsked::Signal,
            FaultsOption::Thread => FaultsAsked::Thread,
            FaultsOption::Segv => FaultsAsked::Segv,
        }
    }
    /// Returns how slots are found.
    pub fn slots(&self) -> SlotPolicy {
        match self.slots {
            SlotsOption::Clusters => SlotPolicy::Clusters,
            SlotsOption::Classic => SlotPolicy::Classic,
            SlotsOption::ScanMore => SlotPolicy::ScanMore,
        }
    }
    /// Returns the order in which areas are used.
    pub fn order(&self) -> AreaOrder {
        match self.order {
            OrderOption::Weighted => AreaOrder::Weighted,
            OrderOption::Numa => AreaOrder::Numa,
            OrderOption::RoundRobin => AreaOrder::RoundRobin,
            OrderOption::Global => AreaOrder::Global,
        }
    }
    /// The pool's codec.
    pub fn codec(&self) -> Codec {
        match self.codec {
            CodecOption::Auto => Codec::Auto,
            CodecOption::Fast => Codec::Fast,
            CodecOption::Lz4 => Codec::Lz4,
            CodecOption::None => Codec::None,
        }
    }
    /// Whether pages share slots of areas.
    pub fn packs(&self) -> bool {
        self.pack == PackOption::On
    }
    /// Returns how pages move, if the user said so.
    pub fn install(&self) -> Option<Install> {
        self.install.map(|install| match install {
            InstallOption::Move => Install::Move,
            InstallOption::Copy => Install::Copy,
            InstallOption::Mixed => Install::Mixed,
        })
    }
    /// Returns the readahead policy.
    pub fn readahead(&self) -> Readahead {
        match self.readahead {
            ReadaheadOption::Streams => Readahead::Streams,
            ReadaheadOption::ByAddress => Readahead::ByAddress,
            ReadaheadOption::BySlot => Readahead::BySlot,
            ReadaheadOption::Off => Readahead::Off,
        }
    }
    /// Returns whether a thread polls for a page of an area instead of sleeping, if the user said so.
    pub fn polls(&self) -> Option<bool> {
        self.wait.map(|wait| wait == WaitOption::Poll)
    }
    /// Returns how areas are written, if the user said so.
    pub fn io(&self) -> Option<IoEngine> {
        self.io.map(|io| match io {
            IoOption::Uring => IoEngine::Uring,
            IoOption::Psync => IoEngine::Psync,
        })
    }
}

/// Reads the command line. `Err` is a help text, a version, or an error, for [`report`].
pub fn read(arguments: &[OsString]) -> Result<CommandLine, clap::Error> {
    let matches = definition().try_get_matches_from(arguments);
    matches
        .and_then(|matches| CommandLine::from_arg_matches(&matches))
        .and_then(|line| refuse_unknown_option(line, arguments))
}

/// Returns the command line for clap. An empty variable is an unset one.
fn definition() -> clap::Command {
    with_variables(|variable| std::env::var_os(variable).is_some_and(|value| !value.is_empty()))
}

/// Returns the command line for clap, which heeds only the variables that `is_heeded` names.
fn with_variables(is_heeded: impl Fn(&OsStr) -> bool) -> clap::Command {
    CommandLine::command().mut_subcommands(|command| {
        command.mut_args(|argument| match argument.get_env() {
            Some(variable) if !is_heeded(variable) => argument.env(None::<&'static str>),
            _ => argument,
        })
    })
}

/// Refuses an unknown option. A program's arguments may look like options, so clap takes an unknown option of
/// Farpage's for the program. A second parse without that freedom gives clap's own error, with the option's
/// name.
fn refuse_unknown_option(line: CommandLine, arguments: &[OsString]) -> Result<CommandLine, clap::Error> {
    let program = match &line.command {
        Command::Run(options) => &options.program,
        Command::Doctor(options) => &options.program,
        _ => return Ok(line),
    };
    if !program.first().is_some_and(|name| name.as_bytes().starts_with(b"-")) {
        return Ok(line);
    }
    let strict = |command: clap::Command| {
        if command.get_arguments().all(|argument| argument.get_id() != "program") {
            return command;
        }
        command.mut_arg("program", |program| program.allow_hyphen_values(false).trailing_var_arg(false))
    };
    definition().mut_subcommands(strict).try_get_matches_from(arguments)?;
    // After `--` even this is a program.
    Ok(line)
}

/// Prints what [`read`] returned instead of a command line. Returns the exit status.
pub fn report(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            crate::text::say::to_stdout(&text).map_or_else(crate::give_up, |()| ExitCode::SUCCESS)
        }
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            crate::give_up(tips::unknown_word(refused_word(error).unwrap_or_default(), arguments))
        }
        _ => {
            let mut text = match text.strip_prefix("error: ") {
                Some(text) => format!("farpage: {}", text.trim_end()),
                None => text.trim_end().to_owned(),
            };
            if let Some(variable) = variable_of(error).filter(|_| !was_typed(error, arguments)) {
                text += &format!("\nfarpage:   it comes from {variable}: correct or unset it");
            }
            crate::text::say::plainly(&text);
            ExitCode::from(STATUS_FAILED)
        }
    }
}

/// The variable that stands for the option an error is about. clap blames the option either way.
fn variable_of(error: &clap::Error) -> Option<String> {
    // As in the usage: `--ram <SIZE>`.
    let name = refused_word(error)?.split(' ').next()?.strip_prefix("--")?;
    Some(format!("FARPAGE_{}", name.replace('-', "_").to_ascii_uppercase()))
}

/// The word that an error is about.
pub fn refused_word(error: &clap::Error) -> Option<&str> {
    let context = [ContextKind::InvalidArg, ContextKind::InvalidSubcommand];
    match context.into_iter().find_map(|kind| error.get(kind))? {
        ContextValue::String(word) => Some(word),
        _ => None,
    }
}

/// Whether clap finds the same fault without any variable. Looking for the option among the words would not
/// do: it may be one of the program's.
fn was_typed(error: &clap::Error, arguments: &[OsString]) -> bool {
    let again = with_variables(|_| false).try_get_matches_from(arguments);
    again.is_err_and(|again| refused_word(&again) == refused_word(error))
}

/// Where evicted pages may go beyond the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// Nowhere.
    None,
    /// A temporary file in a default directory.
    Default,
    /// The areas that were named.
    Areas(Vec<SwapArgument>),
}

/// `--swap` and `--no-disk`, or else their variables.
pub fn disk(options: &RunSettings, variable: impl Fn(&str) -> Option<OsString>) -> Result<Disk, Failure> {
    if options.no_disk && !options.swap.is_empty() {
        return Err(contradiction("`--no-disk` and `--swap`", "leave one of them out"));
    }
    if options.no_disk {
        return Ok(Disk::None);
    }
    if !options.swap.is_empty() {
        return areas(options.swap.iter().map(OsString::as_os_str));
    }
    let no_disk = variable("FARPAGE_NO_DISK").is_some_and(|value| is_yes(&value));
    match variable("FARPAGE_SWAP") {
        Some(_) if no_disk => Err(contradiction("FARPAGE_NO_DISK and FARPAGE_SWAP", "unset one of them")),
        Some(list) => areas(
            list.as_bytes().split(|byte| *byte == b';').filter(|one| !one.is_empty()).map(OsStr::from_bytes),
        ),
        None if no_disk => Ok(Disk::None),
        None => Ok(Disk::Default),
    }
}

fn contradiction(what: &str, fix: &str) -> Failure {
    Failure::new(format!("{what} contradict each other"))
        .because("one says that nothing goes to a disk, the other where it goes")
        .fix(fix)
}

/// As clap reads the variable of a flag.
fn is_yes(value: &OsStr) -> bool {
    let no = ["", "0", "n", "no", "f", "false", "off"];
    !no.iter().any(|no| value.eq_ignore_ascii_case(no))
}

fn areas<'a>(arguments: impl Iterator<Item = &'a OsStr>) -> Result<Disk, Failure> {
    let areas: Vec<_> = arguments
        .map(|argument| swap_argument(argument, |path| path.symlink_metadata().is_ok()))
        .collect::<Result<_, _>>()?;
    let most = farpage_core::units::AREAS_MAX;
    if areas.len() > most {
        return Err(Failure::new(format!("{} swap areas were given; at most {most} work", areas.len()))
            .fix("join some of them into larger ones"));
    }
    Ok(if areas.is_empty() { Disk::Default } else { Disk::Areas(areas) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<RunOptions, clap::Error> {
        let arguments = ["farpage", "run"].into_iter().chain(line.split_whitespace());
        let arguments: Vec<_> = arguments.map(OsString::from).collect();
        read(&arguments).map(|line| match line.command {
            Command::Run(options) => options,
            _ => unreachable!("the line says run"),
        })
    }

    #[test]
    fn command_definition_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn everything_from_the_program_on_is_the_programs() {
        let options = run("--ram 1G sort --ram 2G -- --quiet").unwrap();
        assert_eq!(options.program, ["sort", "--ram", "2G", "--", "--quiet"]);
        let settings = options.settings;
        assert_eq!((settings.ram.unwrap().of(0), settings.quiet), (1 << 30, false));
        assert_eq!(run("-- --odd -x").unwrap().program, ["--odd", "-x"]);
    }

    #[test]
    fn unknown_option_before_the_program_is_refused() {
        for line in [
            "--rma 1G true",
            "-q true",
            "--ram",
            "--ram x true",
            "--codec zstd true",
            "--slots x true",
            "",
            "--quiet",
        ] {
            assert!(run(line).is_err(), "{line}");
        }
    }

    #[test]
    fn refused_option_is_known_with_its_variable_and_as_typed() {
        for (line, variable) in [
            ("--ram x true", Some("FARPAGE_RAM")),
            ("--codec zip true", Some("FARPAGE_CODEC")),
            ("--pack some true", Some("FARPAGE_PACK")),
            ("--io= true", Some("FARPAGE_IO")),
            ("--wait long true", Some("FARPAGE_WAIT")),
            ("--slots best true", Some("FARPAGE_SLOTS")),
            ("--faults best true", Some("FARPAGE_FAULTS")),
            ("--mlockall no true", Some("FARPAGE_MLOCKALL")),
            ("--unsupported maybe true", Some("FARPAGE_UNSUPPORTED")),
            ("--over-budget stop true", Some("FARPAGE_OVER_BUDGET")),
            ("--readahead some true", Some("FARPAGE_READAHEAD")),
            ("--page-cluster 6 true", Some("FARPAGE_PAGE_CLUSTER")),
            ("", None),
        ] {
            let error = run(line).unwrap_err();
            assert_eq!(variable_of(&error).as_deref(), variable, "{line}");
            let words = format!("farpage run {line}");
            let arguments: Vec<_> = words.split_whitespace().map(OsString::from).collect();
            assert!(was_typed(&error, &arguments), "{line}");
        }
        // As if a variable had held the `x`.
        let other = ["farpage", "run", "prog", "--ram", "x"].map(OsString::from);
        assert!(!was_typed(&run("--ram x true").unwrap_err(), &other));
    }

    #[test]
    fn order_is_weighted_unless_another_is_asked_for() {
        assert_eq!(run("true").unwrap().settings.order(), AreaOrder::Weighted);
        for order in AreaOrder::ALL {
            assert_eq!(run(&format!("--order {} true", order.name())).unwrap().settings.order(), order);
        }
        assert!(run("--order any true").is_err());
    }

    fn disk_of(line: &str, variables: &[(&str, &str)]) -> Result<Disk, Failure> {
        let find =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value));
        disk(&run(line).unwrap().settings, find)
    }

    #[test]
    fn command_line_wins_over_variables_and_contradictions_are_refused() {
        let (swap, no_disk) = (("FARPAGE_SWAP", "/a;/b:1G"), ("FARPAGE_NO_DISK", "1"));
        assert!(matches!(disk_of("true", &[swap]).unwrap(), Disk::Areas(areas) if areas.len() == 2));
        assert_eq!(disk_of("--no-disk true", &[swap]).unwrap(), Disk::None);
        assert!(
            matches!(disk_of("--swap /c true", &[swap, no_disk]).unwrap(), Disk::Areas(areas) if areas.len() == 1)
        );
        assert_eq!(disk_of("true", &[no_disk]).unwrap(), Disk::None);
        assert_eq!(disk_of("true", &[("FARPAGE_NO_DISK", "off")]).unwrap(), Disk::Default);
        assert!(disk_of("true", &[swap, no_disk]).is_err());
        assert!(disk_of("--no-disk --swap /a true", &[]).is_err());
        assert!(disk_of(&format!("{}true", "--swap /a ".repeat(17)), &[]).is_err());
    }
}

//! The memory that there is to use: the limits that apply to this process, and the budget made from them.
//!
//! Limits are read below two roots (`/proc` and `/sys/fs/cgroup`), so tests can bring their own. The
//! default budget is 90 % of what the tightest limit leaves, or less where that is little. The rest is for
//! page tables, file mappings, and the kernel's memory on the program's behalf: limits count these, and
//! the budget doesn't.

use crate::text::failure::Failure;
use crate::text::numbers::iec;
use crate::text::size::Size;
use farpage_core::units::PAGE_BYTES;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The default budget in percent of what the tightest limit leaves.
const DEFAULT_PERCENT: u64 = 90;
/// Largest pool in percent of the budget: the rest is for the program's own pages.
const POOL_PERCENT_MAX: u64 = 90;
/// Default pool in percent of the budget, with areas behind it.
const POOL_PERCENT_WITH_AREAS: u64 = 50;
/// Default pool in percent of the budget, without areas: whatever is evicted must fit.
const POOL_PERCENT_ALONE: u64 = 80;

/// Divisor of a limit for the reserve that is kept free, and the reserve's bounds in bytes.
const RESERVE_PARTS: u64 = 16;
const RESERVE_BYTES_MIN: u64 = 2 << 20;
const RESERVE_BYTES_MAX: u64 = 64 << 20;
/// Bytes kept free for the page tables and the kernel memory of each process.
pub const PROCESS_BYTES: u64 = 256 << 10;
/// Bytes kept free for the engine's start, while a run evicts nothing.
pub const START_BYTES: u64 = 5 << 19;
/// The limit of all processes of the machine.
const AVAILABLE: &str = "MemAvailable";

/// Directories in which the kernel tells about limits.
pub struct Roots {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
}

impl Roots {
    /// The directories of this machine.
    pub fn of_this_machine() -> Roots {
        Roots { proc: "/proc".into(), cgroup: "/sys/fs/cgroup".into() }
    }
}

/// A limit on this process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Name of the limit: `cgroup v2 memory.max`, `MemAvailable`, ...
    pub source: &'static str,
    /// The file that the limit was read from.
    pub file: PathBuf,
    /// The limit in bytes.
    pub bytes: u64,
    /// Bytes that count towards the limit already and that the kernel can't give up: other processes, files
    /// in memory, tables.
    pub held_bytes: u64,
    /// The part of `held_bytes` that other runs of this user hold. The runs share it.
    pub runs_bytes: u64,
    /// Most bytes that runs can hold below the limit: a bound for claims, which are what processes
    /// say of themselves.
    pub runs_bytes_max: u64,
}

impl Limit {
    /// Returns the bytes left below the limit.
    pub const fn left_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.held_bytes)
    }

    /// Returns the bytes for all runs of this user together.
    pub const fn to_share_bytes(&self) -> u64 {
        self.left_bytes().saturating_add(self.runs_bytes)
    }

    /// Returns the bytes of processes that are no run of this user.
    pub const fn in_use_bytes(&self) -> u64 {
        self.held_bytes.saturating_sub(self.runs_bytes)
    }

    /// Returns the bytes that are kept free: limits count page tables, kernel memory and mapped files,
    /// and budgets don't.
    pub fn reserve_bytes(&self) -> u64 {
        (self.bytes / RESERVE_PARTS).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX)
    }

    /// Whether this limit applies to a process in `groups`.
    pub fn is_above(&self, groups: &[Group]) -> bool {
        let is_inside =
            |group: &Group| self.file.parent().is_some_and(|above| group.path().starts_with(above));
        self.source == AVAILABLE || groups.iter().any(is_inside)
    }

    /// Whether this is the machine's available memory: what is left, not what there is.
    pub fn is_what_is_left(&self) -> bool {
        self.source == AVAILABLE
    }

    /// Returns the memory that other processes hold, between two parts of a message; an empty text
    /// if they hold none.
    pub fn in_use_words(&self, before: &str, after: &str) -> String {
        match self.in_use_bytes() {
            0 => String::new(),
            held => format!("{before}{}{after}", iec(held)),
        }
    }
}

/// Returns every limit that applies, tightest first.
pub fn limits(roots: &Roots) -> Vec<Limit> {
    let mut found = Vec::new();
    for group in groups(roots) {
        let Group { version, mount, inside } = &group;
        for (name, source) in version.limits() {
            for directory in inside.ancestors().map(|inside| mount.join(inside)) {
                found.extend(limit(*version, &directory, name, source));
            }
        }
        let unseen = limit_unseen(&group);
        found.extend(unseen.filter(|unseen| found.iter().all(|seen| unseen.bytes < seen.bytes)));
    }
    found.extend(available(roots));
    found.sort_by_key(|limit| limit.bytes);
    found
}

/// A version of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version 1, with one hierarchy for each controller.
    One,
    /// Version 2, with a single hierarchy.
    Two,
}

impl Version {
    /// Returns the files that hold limits, and their names in messages. Above memory.high the kernel
    /// throttles a process until it stands still.
    const fn limits(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Version::One => &[("memory.limit_in_bytes", "cgroup v1 memory.limit_in_bytes")],
            Version::Two => {
                &[("memory.max", "cgroup v2 memory.max"), ("memory.high", "cgroup v2 memory.high")]
            }
        }
    }

    /// Returns the file that holds what the group has now.
    const fn usage(self) -> &'static str {
        match self {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        }
    }

    /// Returns the rows of memory.stat for memory that the kernel gives up before it kills: the group's and
    /// that of all groups below.
    const fn reclaimable(self) -> &'static [&'static str] {
        match self {
            Version::One => &["total_active_file", "total_inactive_file"],
            Version::Two => &["active_file", "inactive_file", "slab_reclaimable"],
        }
    }

    /// Returns the file that counts kills by the out-of-memory killer, as `oom_kill`.
    pub const fn kills(self) -> &'static str {
        match self {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        }
    }
}

/// The control group of this process, in one hierarchy.
#[derive(Debug)]
pub struct Group {
    /// Version whose names the files have.
    pub version: Version,
    mount: PathBuf,
    inside: PathBuf,
}

impl Group {
    /// Returns the group's directory, or that of the nearest group around it that exists. In a
    /// container without its own cgroup namespace the path is the host's, and the group that counts is
    /// at the mount's root.
    pub fn directory(&self) -> Option<PathBuf> {
        self.inside.ancestors().map(|inside| self.mount.join(inside)).find(|directory| directory.is_dir())
    }

    /// Returns the group's directory as the kernel names it, which a container may not see.
    fn path(&self) -> PathBuf {
        self.mount.join(&self.inside)
    }
}

/// Returns the groups that control this process's memory.
pub fn groups(roots: &Roots) -> Vec<Group> {
    groups_of(roots, "self")
}

/// Returns the groups that control the memory of another process. Not all of these groups may be visible to
/// this process. `own` are this process's groups.
pub fn groups_of_other(roots: &Roots, pid: u32, own: &[Group]) -> Vec<Group> {
    let mut groups = groups_of(roots, &pid.to_string());
    // A path that can't be seen is another container's, or this container's own.
    groups.retain(|group| group.path().is_dir() || own.iter().any(|own| own.path() == group.path()));
    groups
}

/// Returns the groups that control the memory of a process, by its name in /proc.
fn groups_of(roots: &Roots, process: &str) -> Vec<Group> {
    let mut found = Vec::new();
    let text = fs::read_to_string(roots.proc.join(process).join("cgroup")).unwrap_or_default();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let is_name = |part: &Component| matches!(part, Component::Normal(_));
        if process != "self" && path.split('/').any(|part| part == "..") {
            // The group is outside of what can be seen.
            continue;
        }
        let inside: PathBuf = Path::new(path).components().filter(is_name).collect();
        if controllers.is_empty() {
            // Beside version 1, version 2 is mounted one level further down.
            let mounts = [roots.cgroup.clone(), roots.cgroup.join("unified")];
            let mounts = mounts.into_iter().filter(|mount| mount.join("cgroup.controllers").exists());
            found.extend(mounts.map(|mount| Group { version: Version::Two, mount, inside: inside.clone() }));
        } else if controllers.split(',').any(|controller| controller == "memory") {
            found.push(Group { version: Version::One, mount: roots.cgroup.join("memory"), inside });
        }
    }
    found
}

/// Reads a limit of the group at `directory`, if the group has it.
fn limit(version: Version, directory: &Path, name: &str, source: &'static str) -> Option<Limit> {
    let file = directory.join(name);
    let bytes = number(&file).filter(|bytes| *bytes < NO_LIMIT_BYTES)?;
    let held_bytes = held(version, directory);
    Some(Limit { source, file, bytes, held_bytes, runs_bytes: 0, runs_bytes_max: held_bytes })
}

/// Limits from here on are none: version 1 says "no limit" with the largest multiple of a page.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// Returns the tightest limit of a group and of all groups around it. A container doesn't see the groups
/// around its own, and version 1 tells their limit. What other groups hold below that limit isn't known.
fn limit_unseen(group: &Group) -> Option<Limit> {
    if group.version != Version::One {
        return None;
    }
    let directory = group.directory()?;
    let file = directory.join("memory.stat");
    let bytes = row_of(&fs::read_to_string(&file).ok()?, "hierarchical_memory_limit")?;
    let held_bytes = held(group.version, &directory);
    let source = "cgroup v1 hierarchical_memory_limit";
    let limit = Limit { source, file, bytes, held_bytes, runs_bytes: 0, runs_bytes_max: held_bytes };
    (bytes < NO_LIMIT_BYTES).then_some(limit)
}

/// Returns the bytes that a group has and that the kernel doesn't give up before it kills.
fn held(version: Version, directory: &Path) -> u64 {
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let reclaimable = version.reclaimable().iter().filter_map(|row| row_of(&stat, row)).sum();
    number(&directory.join(version.usage())).unwrap_or(0).saturating_sub(reclaimable)
}

/// Returns the number in a file; none if there is another word, such as "max".
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the number behind a name in one of the kernel's lists.
pub fn row_of(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

fn available(roots: &Roots) -> Option<Limit> {
    let bytes = meminfo(roots, "MemAvailable:")?;
    let file = roots.proc.join("meminfo");
    let runs_bytes_max = meminfo(roots, "MemTotal:")?.saturating_sub(bytes);
    Some(Limit { source: AVAILABLE, file, bytes, held_bytes: 0, runs_bytes: 0, runs_bytes_max })
}

/// Returns the memory of the whole machine, in bytes. No budget can be larger.
pub fn machine_bytes(roots: &Roots) -> Option<u64> {
    meminfo(roots, "MemTotal:")
}

/// Returns one row of /proc/meminfo in bytes.
fn meminfo(roots: &Roots, row: &str) -> Option<u64> {
    let text = fs::read_to_string(roots.proc.join("meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(row))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The budget and how it came about.
#[derive(Clone, Debug)]
pub struct Budget {
    /// The budget in bytes, a multiple of the page size.
    pub ram_bytes: u64,
    /// Name of the budget in messages: `--ram 2G`, or what the default was made from.
    pub origin: String,
    /// Limit of the pool in bytes, a multiple of the page size.
    pub pool_bytes_max: u64,
    /// The budget that was asked for, if the machine has less memory.
    pub asked_bytes: Option<u64>,
    /// The tightest limit, and what the budget would be by default.
    pub limit: Option<(Limit, u64)>,
}

/// Whether evicted pages may go to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// There are areas behind the pool.
    Areas,
    /// There is only the pool.
    Nothing,
}

/// Returns budget and pool from the options. `limits` are sorted as [`limits`] does; the machine
/// has `machine_bytes`.
pub fn resolve(
    ram: Option<&Size>,
    pool: Option<&Size>,
    behind: Behind,
    limits: &[Limit],
    machine_bytes: Option<u64>,
) -> Result<Budget, Failure> {
    let (ram_bytes, origin) = match (ram, limits.first()) {
        (Some(size), Some(limit)) => (size.of(limit.bytes), format!("--ram {}", size.text)),
        (Some(size), None) if matches!(size.amount, crate::text::size::Amount::Bytes(_)) => {
            (size.of(0), format!("--ram {}", size.text))
        }
        (None, Some(_)) => by_default(limits),
        (_, None) => {
            return Err(Failure::new("there is nothing to derive a budget from")
                .because("neither cgroup limits nor /proc/meminfo can be read")
                .fix("give the budget as a size: farpage run --ram 2G ..."));
        }
    };
    let most = machine_bytes.unwrap_or(u64::MAX);
    let asked_bytes = Some(ram_bytes).filter(|asked| *asked > most);
    let ram_bytes = whole_pages(ram_bytes.min(most));
    if ram_bytes == 0 {
        return Err(Failure::new(format!("`{origin}` is less than one page of {PAGE_BYTES} bytes"))
            .fix("give a budget the program can start in, for example --ram 256M (or FARPAGE_RAM=256M)"));
    }
    let pool_bytes_max = pool_limit(pool, behind, ram_bytes)?;
    let tightest = limits.iter().min_by_key(|limit| limit.to_share_bytes());
    let limit = tightest.map(|limit| (limit.clone(), whole_pages(by_default(limits).0)));
    Ok(Budget { ram_bytes, origin, pool_bytes_max, asked_bytes, limit })
}

/// Returns the default budget, and how it came about.
fn by_default(limits: &[Limit]) -> (u64, String) {
    let tightest = limits.iter().min_by_key(|limit| limit.to_share_bytes());
    let Some(limit) = tightest else { return (0, "no limit".into()) };
    let less = limit.in_use_words(" less the ", " in use");
    let (share, kept) = (limit.to_share_bytes(), limit.reserve_bytes() + PROCESS_BYTES + START_BYTES);
    let (part, rest) = (share / 100 * DEFAULT_PERCENT, share.saturating_sub(kept));
    if part <= rest || rest == 0 {
        return (part, format!("{DEFAULT_PERCENT} % of {}{less}", limit.source));
    }
    let less = limit.in_use_words(" less the ", " in use and");
    let less = if less.is_empty() { " less" } else { &less };
    (rest, format!("{}{less} a reserve of {}", limit.source, iec(kept)))
}

fn pool_limit(pool: Option<&Size>, behind: Behind, ram_bytes: u64) -> Result<u64, Failure> {
    let percent = match behind {
        Behind::Areas => POOL_PERCENT_WITH_AREAS,
        Behind::Nothing => POOL_PERCENT_ALONE,
    };
    let share = |percent: u64| whole_pages((u128::from(ram_bytes) * u128::from(percent) / 100) as u64);
    let Some(size) = pool else { return Ok(share(percent)) };
    let bytes = size.of(ram_bytes);
    if bytes == 0 {
        return Err(Failure::new("`--pool 0` leaves no pool")
            .because("evicted pages pass through the pool on their way to an area")
            .fix(format!("leave --pool (or FARPAGE_POOL) out ({percent} % of the budget) or give it more")));
    }
    if bytes > (u128::from(ram_bytes) * u128::from(POOL_PERCENT_MAX) / 100) as u64 {
        return Err(Failure::new(format!(
            "`--pool {}` is more than {POOL_PERCENT_MAX} % of the budget of {}",
            size.text,
            iec(ram_bytes)
        ))
        .because("the pool is part of the budget, and the program's own pages need the rest")
        .fix(format!(
            "--pool {POOL_PERCENT_MAX}% (or FARPAGE_POOL) or less, or a larger --ram (or FARPAGE_RAM)"
        )));
    }
    Ok(whole_pages(bytes).max(PAGE_BYTES as u64))
}

const fn whole_pages(bytes: u64) -> u64 {
    bytes - bytes % PAGE_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::size;

    /// A machine made of files.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(files: &[(&str, &str)]) -> Machine {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in files {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Machine(root)
        }
        fn roots(&self) -> Roots {
            Roots { proc: self.0.path().join("proc"), cgroup: self.0.path().join("cgroup") }
        }
        fn tightest(&self) -> Option<(&'static str, u64)> {
            limits(&self.roots()).first().map(|limit| (limit.source, limit.bytes))
        }
    }

    const PLENTY: (&str, &str) = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n");

    #[test]
    fn cgroup_v2_limit_of_an_outer_group_counts() {
        let machine = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("cgroup/cgroup.controllers", "memory\n"),
            ("cgroup/outer/memory.max", "1073741824\n"),
            ("cgroup/outer/inner/memory.max", "max\n"),
        ]);
        assert_eq!(machine.tightest(), Some(("cgroup v2 memory.max", 1 << 30)));
    }

    /// A container doesn't see the group around its own: that of its task (ECS), or of `--cgroup-parent`.
    #[test]
    fn cgroup_v1_limit_of_a_group_out_of_sight_counts() {
        let machine = |own| {
            Machine::new(&[
                PLENTY,
                ("proc/self/cgroup", "4:memory:/docker/0123\n"),
                ("cgroup/memory/memory.limit_in_bytes", own),
                ("cgroup/memory/memory.stat", "cache 0\nhierarchical_memory_limit 536870912\n"),
            ])
        };
        let none = "9223372036854771712\n";
        assert_eq!(machine(none).tightest(), Some(("cgroup v1 hierarchical_memory_limit", 1 << 29)));
        let own = machine("536870912\n");
        assert_eq!(own.tightest(), Some(("cgroup v1 memory.limit_in_bytes", 1 << 29)), "it is in sight");
    }

    #[test]
    fn cgroup_v2_high_counts_when_it_is_tighter() {
        let machine = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "0::/a\n"),
            ("cgroup/cgroup.controllers", "memory\n"),
            ("cgroup/a/memory.max", "2147483648\n"),
            ("cgroup/a/memory.high", "1073741824\n"),
        ]);
        assert_eq!(machine.tightest(), Some(("cgroup v2 memory.high", 1 << 30)));
    }

    /// Memory of a cgroup's files and of its other processes must not count as free: the kernel
    /// would kill the program.
    #[test]
    fn default_leaves_alone_what_the_cgroup_holds_already() {
        const MIB: u64 = 1 << 20;
        let stat = format!("total_active_file {}\nactive_file 1\ntotal_inactive_file {}\n", 3 * MIB, 2 * MIB);
        let one = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("cgroup/memory/a/memory.limit_in_bytes", "104857600\n"),
            ("cgroup/memory/a/memory.usage_in_bytes", "47185920\n"),
            ("cgroup/memory/a/memory.stat", &stat),
        ]);
        let stat = format!("file 9\nactive_file {}\ninactive_file 0\nslab_reclaimable {}\n", 4 * MIB, MIB);
        let two = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "0::/outer/a\n"),
            ("cgroup/cgroup.controllers", "memory\n"),
            // The outer group is larger, and fuller.
            ("cgroup/outer/memory.max", "209715200\n"),
            ("cgroup/outer/memory.current", "152043520\n"),
            ("cgroup/outer/memory.stat", &stat),
            ("cgroup/outer/a/memory.max", "104857600\n"),
            ("cgroup/outer/a/memory.current", "1048576\n"),
            ("cgroup/outer/a/memory.stat", "active_file 0\n"),
        ]);
        for (machine, source, held) in
            [(one, "cgroup v1 memory.limit_in_bytes", 40), (two, "cgroup v2 memory.max", 140)]
        {
            let budget = resolve(None, None, Behind::Areas, &limits(&machine.roots()), None).unwrap();
            let reserve = if held == 40 { "9 MiB" } else { "15.3 MiB" };
            assert_eq!(budget.ram_bytes >> 20, if held == 40 { 51 } else { 44 }, "{}", budget.origin);
            let origin = format!("{source} less the {held} MiB in use and a reserve of {reserve}");
            assert_eq!(budget.origin, origin);
        }
    }

    #[test]
    fn default_counts_what_other_runs_will_share() {
        const MIB: u64 = 1 << 20;
        let limit = |held, runs| Limit {
            bytes: 200 * MIB,
            held_bytes: held * MIB,
            runs_bytes: runs * MIB,
            ..limit()[0].clone()
        };
        let budget = |held, runs| {
            let budget = resolve(None, None, Behind::Areas, &[limit(held, runs)], None).unwrap();
            (budget.ram_bytes.div_ceil(MIB), budget.origin)
        };
        assert_eq!(budget(190, 180), (171, "90 % of MemAvailable less the 10 MiB in use".into()));
        assert_eq!(budget(180, 180), (180, "90 % of MemAvailable".into()));
    }

    #[test]
    fn limit_holds_processes_of_its_group_and_below() {
        let machine = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/7/cgroup", "0::/a/c\n"),
            ("cgroup/cgroup.controllers", "memory\n"),
            ("cgroup/a/memory.max", "4096000\n"),
            ("cgroup/a/b/memory.max", "8192000\n"),
        ]);
        let roots = machine.roots();
        let is_above = |process| {
            let groups = groups_of(&roots, process);
            limits(&roots).iter().map(|limit| limit.is_above(&groups)).collect::<Vec<_>>()
        };
        // The outer group, the inner one, and the machine.
        assert_eq!((is_above("self"), is_above("7")), (vec![true; 3], vec![true, false, true]));
    }

    #[test]
    fn cgroup_v1_limit_is_found_at_the_root_when_the_path_is_the_hosts() {
        let machine = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "4:cpu,memory:/docker/0123\n0::/\n"),
            ("cgroup/memory/memory.limit_in_bytes", "536870912\n"),
        ]);
        assert_eq!(machine.tightest(), Some(("cgroup v1 memory.limit_in_bytes", 512 << 20)));
    }

    #[test]
    fn no_limit_in_v1_falls_back_to_available_memory() {
        let machine = Machine::new(&[
            PLENTY,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(machine.tightest(), Some(("MemAvailable", 8 << 30)));
    }

    #[test]
    fn group_path_can_not_leave_the_mount() {
        let machine = Machine::new(&[
            ("proc/self/cgroup", "0::/../../x\n"),
            ("cgroup/cgroup.controllers", ""),
            ("cgroup/x/memory.max", "4096000\n"),
        ]);
        assert_eq!(machine.tightest(), Some(("cgroup v2 memory.max", 4_096_000)));
    }

    #[test]
    fn nothing_readable_gives_no_limit_and_needs_a_size() {
        let machine = Machine::new(&[]);
        assert_eq!(machine.tightest(), None);
        assert!(resolve(None, None, Behind::Areas, &[], None).is_err());
        let (half, plain) = (size::parse("50%").unwrap(), size::parse("1G").unwrap());
        assert!(resolve(Some(&half), None, Behind::Areas, &[], None).is_err());
        assert_eq!(resolve(Some(&plain), None, Behind::Areas, &[], None).unwrap().ram_bytes, 1 << 30);
    }

    fn limit() -> [Limit; 1] {
        let file = PathBuf::new();
        [Limit {
            source: AVAILABLE,
            file,
            bytes: 1000 << 20,
            held_bytes: 0,
            runs_bytes: 0,
            runs_bytes_max: 0,
        }]
    }

    #[test]
    fn default_budget_and_pool() {
        let budget = resolve(None, None, Behind::Areas, &limit(), None).unwrap();
        assert_eq!((budget.ram_bytes, budget.pool_bytes_max), (900 << 20, 450 << 20));
        let alone = resolve(None, None, Behind::Nothing, &limit(), None).unwrap();
        assert_eq!(alone.pool_bytes_max, 720 << 20);
    }

    #[test]
    fn pool_is_a_share_of_the_budget_and_leaves_a_tenth() {
        let ram = size::parse("100M").unwrap();
        let with = |pool: &str| {
            resolve(Some(&ram), Some(&size::parse(pool).unwrap()), Behind::Areas, &limit(), None)
        };
        assert_eq!(with("25%").unwrap().pool_bytes_max, 25 << 20);
        assert_eq!(with("90%").unwrap().pool_bytes_max, 90 << 20);
        assert_eq!(with("1").unwrap().pool_bytes_max, PAGE_BYTES as u64);
        assert!(with("91%").is_err() && with("91M").is_err() && with("0").is_err());
    }

    /// The tables for a budget of 512 TiB would be larger than the address space.
    #[test]
    fn budget_is_at_most_what_the_machine_has() {
        let machine = Machine::new(&[("proc/meminfo", "MemTotal: 1025 kB\n")]);
        let roots = machine.roots();
        let with = |ram: &str| {
            let (ram, pool) = (size::parse(ram).unwrap(), size::parse("50%").unwrap());
            resolve(Some(&ram), Some(&pool), Behind::Areas, &limit(), machine_bytes(&roots)).unwrap()
        };
        let (fits, too_large) = (with("1M"), with("512T"));
        assert_eq!((fits.ram_bytes, fits.asked_bytes), (1 << 20, None));
        assert_eq!((too_large.ram_bytes, too_large.asked_bytes), (1 << 20, Some(512 << 40)));
        assert_eq!(too_large.pool_bytes_max, 512 << 10);
    }

    #[test]
    fn budget_below_a_page_is_refused() {
        let tiny = size::parse("4095").unwrap();
        assert!(resolve(Some(&tiny), None, Behind::Areas, &limit(), None).is_err());
    }
}

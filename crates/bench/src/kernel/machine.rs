//! The kernel's own swap: a swap file, zswap's settings and a memory cgroup, set up for a benchmark and
//! restored afterwards.
//!
//! Each step is written to a journal before it is done. At the end, on an error and on Ctrl-C, the benchmark
//! undoes the steps in reverse. After a sudden death the next run undoes them.
// UNSAFETY: swapon, swapoff and the calls of pidfds are C functions.

use crate::load::region::PAGE_BYTES;
use std::ffi::CString;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

const JOURNAL: &str = "/run/farpage-bench-kernel";
/// The journal is written here and then renamed, so that a journal is complete or absent.
const JOURNAL_NEW: &str = "/run/farpage-bench-kernel.new";
/// Locked by the process that has a journal.
const LOCK: &str = "/run/farpage-bench-kernel.lock";
const ZSWAP: &str = "/sys/module/zswap/parameters";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const CGROUPS: &str = "/sys/fs/cgroup";
/// Values of `vm.page-cluster`: the default, no readahead, and the most that readahead by address does.
pub const PAGE_CLUSTERS: [u32; 3] = [3, 0, 5];
/// Flag of `swapon` for an area with a priority. With `PRIORITY_MAX` the kernel uses the area first.
const PREFER: i32 = 0x8000;
const PRIORITY_MAX: i32 = 0x7fff;

fn cant(what: &str, path: &Path, error: impl std::fmt::Display) -> String {
    format!("{} can't be {what}: {error}", path.display())
}

fn read(path: impl AsRef<Path>) -> Result<String, String> {
    let path = path.as_ref();
    fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|error| cant("read", path, error))
}

/// A step that can be undone.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// A setting, with the value that it had.
    Value(PathBuf, String),
    /// A file that the kernel swaps to.
    Swap(PathBuf),
    /// A file that was made.
    File(PathBuf),
    /// A directory that was made, for the benchmark's files.
    Directory(PathBuf),
    /// A cgroup that was made.
    Group(PathBuf),
}

impl Step {
    fn line(&self) -> String {
        let (kind, path, value) = match self {
            Step::Value(path, value) => ("value", path, value.as_str()),
            Step::Swap(path) => ("swap", path, ""),
            Step::File(path) => ("file", path, ""),
            Step::Directory(path) => ("directory", path, ""),
            Step::Group(path) => ("group", path, ""),
        };
        format!("{kind}\t{}\t{value}\n", path.display())
    }

    fn of(line: &str) -> Option<Step> {
        let mut fields = line.split('\t');
        let (kind, path) = (fields.next()?, PathBuf::from(fields.next()?));
        Some(match kind {
            "value" => Step::Value(path, fields.next()?.to_owned()),
            "swap" => Step::Swap(path),
            "file" => Step::File(path),
            "directory" => Step::Directory(path),
            "group" => Step::Group(path),
            _ => return None,
        })
    }

    /// Checks that the step can be undone by its line, and takes away nothing that others have made.
    fn check(&self) -> Result<(), String> {
        let line = self.line();
        let read: Vec<_> = line.lines().map(Step::of).collect();
        match self {
            _ if read != [Some(self.clone())] => {
                Err(format!("the journal can't hold this line, by which it would be undone: {line:?}"))
            }
            Step::File(path) | Step::Directory(path) | Step::Group(path)
                if path.symlink_metadata().is_ok() =>
            {
                Err(cant("made", path, "it is there already; remove it"))
            }
            _ => Ok(()),
        }
    }

    fn undo(&self) -> Result<(), String> {
        match self {
            Step::Value(path, value) => fs::write(path, value).map_err(|error| cant("restored", path, error)),
            Step::Swap(path) => swap_off(path),
            Step::File(path) if !path.exists() => Ok(()),
            Step::File(path) => fs::remove_file(path).map_err(|error| cant("removed", path, error)),
            Step::Directory(path) if !path.exists() => Ok(()),
            Step::Directory(path) => fs::remove_dir_all(path).map_err(|error| cant("removed", path, error)),
            Step::Group(path) if !path.exists() => Ok(()),
            Step::Group(path) => remove_group(path),
        }
    }
}

/// Ends swapping to a file. A file that isn't swapped to, any more or yet, is no error.
fn swap_off(path: &Path) -> Result<(), String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    loop {
        // SAFETY: the pointer is a string that ends with a zero byte.
        if unsafe { libc::swapoff(name.as_ptr()) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EINVAL | libc::ENOENT) => return Ok(()),
            _ => return Err(cant("given back by swapoff", path, error)),
        }
    }
}

/// Ends the members of a cgroup of the benchmark's own, and removes the cgroup. The kernel takes a moment to
/// see that the last process has gone, so removal is retried.
fn remove_group(path: &Path) -> Result<(), String> {
    let mut last = Ok(());
    for _ in 0..200 {
        end_members(&path.join("cgroup.procs"));
        last = fs::remove_dir(path).map_err(|error| cant("removed", path, error));
        if last.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    last
}

/// Ends the processes of a list of members by SIGKILL. All of them are programs that a benchmark started, or
/// children of such programs. A worker that outlives its program would keep the cgroup and its limit.
fn end_members(list: &Path) {
    let members = || -> Vec<libc::pid_t> {
        let text = read(list).unwrap_or_default();
        text.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid > 1).collect()
    };
    for pid in members() {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
        if fd < 0 {
            continue;
        }
        // SAFETY: the descriptor is new, and no other code has it.
        let process = unsafe { OwnedFd::from_raw_fd(fd) };
        // The number may have become another process's before the descriptor was there.
        if members().contains(&pid) {
            let no_info = std::ptr::null::<libc::siginfo_t>();
            // SAFETY: the call takes no memory.
            unsafe {
                libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), libc::SIGKILL, no_info, 0)
            };
        }
    }
}

/// Takes the lock that only one run has.
fn locked(lock: &Path) -> Result<File, String> {
    loop {
        let file = File::create(lock).map_err(|error| cant("made", lock, error))?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => cant("locked", lock, "another run has it"),
            TryLockError::Error(error) => cant("locked", lock, error),
        })?;
        // The run before may have removed the name after this run had opened the file. A third run would then
        // lock a new file of that name.
        let identity = |data: std::io::Result<fs::Metadata>| data.ok().map(|data| (data.dev(), data.ino()));
        if identity(file.metadata()) == identity(fs::metadata(lock)) {
            return Ok(file);
        }
    }
}

/// The steps that were done.
#[derive(Debug)]
struct Journal {
    steps: Vec<Step>,
    /// While this file is open, no other run changes anything.
    _lock: File,
}

impl Journal {
    /// Takes the lock, and undoes the steps that an earlier run left when it died.
    fn new() -> Result<Journal, String> {
        let file = locked(Path::new(LOCK))?;
        let left = fs::read_to_string(JOURNAL).unwrap_or_default();
        let mut journal = Journal { steps: left.lines().filter_map(Step::of).collect(), _lock: file };
        journal
            .undo()
            .map_err(|why| format!("what an earlier run has left can't be undone ({JOURNAL}): {why}"))?;
        Ok(journal)
    }

    fn write(&self) -> Result<(), String> {
        let lines: String = self.steps.iter().map(Step::line).collect();
        fs::write(JOURNAL_NEW, lines)
            .and_then(|()| fs::rename(JOURNAL_NEW, JOURNAL))
            .map_err(|error| cant("written", Path::new(JOURNAL), error))
    }

    /// Adds a step to the journal. Must be called before the step is done.
    fn note(&mut self, step: Step) -> Result<(), String> {
        step.check()?;
        self.steps.push(step);
        self.write()
    }

    /// Sets a value for the rest of the benchmark.
    fn set(&mut self, path: impl AsRef<Path>, value: &str) -> Result<(), String> {
        let path = path.as_ref();
        let is_known = self.steps.iter().any(|step| matches!(step, Step::Value(known, _) if known == path));
        if !is_known {
            self.note(Step::Value(path.to_owned(), read(path)?))?;
        }
        fs::write(path, value).map_err(|error| cant(&format!("set to {value}"), path, error))
    }

    /// Undoes all steps. Steps that can't be undone stay in the journal, so that they can be retried.
    fn undo(&mut self) -> Result<(), String> {
        let undone = undo_all(&mut self.steps);
        if undone.is_ok() {
            let _ = fs::remove_file(JOURNAL);
        } else {
            let _ = self.write();
        }
        undone
    }
}

/// Undoes the steps, the last step first. Steps that can't be undone are left.
fn undo_all(steps: &mut Vec<Step>) -> Result<(), String> {
    undo_each(steps, Step::undo)
}

fn undo_each(steps: &mut Vec<Step>, undo: impl Fn(&Step) -> Result<(), String>) -> Result<(), String> {
    let mut undone = Ok(());
    let mut left = Vec::new();
    while let Some(step) = steps.pop() {
        // The kernel goes on swapping to a file without a name, and swapoff takes a name.
        let is_in_use = matches!(&step, Step::File(path) if left.contains(&Step::Swap(path.clone())));
        let done = if is_in_use { Err("a file is still swapped to".to_owned()) } else { undo(&step) };
        if let Err(why) = done {
            undone = undone.and(Err(why));
            left.insert(0, step);
        }
    }
    *steps = left;
    undone
}

/// A setting of the kernel's swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The codec of zswap. `None` switches zswap off.
    pub codec: Option<String>,
    /// `vm.page-cluster`: readahead windows have 2^n pages.
    pub page_cluster: u32,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.codec {
            Some(codec) => write!(f, "zswap {codec}")?,
            None => write!(f, "no zswap")?,
        }
        write!(f, ", page-cluster {}", self.page_cluster)
    }
}

/// Returns an error if this process may not change the kernel's settings.
pub fn takes_root() -> Result<(), String> {
    // SAFETY: the function takes no arguments.
    if unsafe { libc::geteuid() } == 0 {
        Ok(())
    } else {
        Err("it changes the kernel's settings, which takes root: sudo farpage bench ...".to_owned())
    }
}

/// The kernel's swap, set up for as long as this value lives.
pub struct Machine {
    journal: Journal,
    group: PathBuf,
    is_v2: bool,
}

impl Machine {
    /// Makes a swap file of `swap_bytes` in `directory`, and a cgroup whose memory is at most `ram_bytes`.
    pub fn new(directory: &Path, swap_bytes: u64, ram_bytes: u64) -> Result<Machine, String> {
        takes_root()?;
        // The journal needs absolute paths, because the run that undoes it may have another current
        // directory.
        let directory = directory.canonicalize().map_err(|error| cant("used", directory, error))?;
        let mut machine = Machine { journal: Journal::new()?, group: PathBuf::new(), is_v2: false };
        undo_before_a_panic_ends_this();
        (machine.group, machine.is_v2) =
            Machine::make(&mut machine.journal, &directory, swap_bytes, ram_bytes)?;
        Ok(machine)
    }

    fn make(
        journal: &mut Journal,
        directory: &Path,
        swap_bytes: u64,
        ram_bytes: u64,
    ) -> Result<(PathBuf, bool), String> {
        let name = format!("farpage-bench-{}", std::process::id());
        let file = directory.join(&name);
        journal.note(Step::File(file.clone()))?;
        make_swap_file(&file, swap_bytes).map_err(|error| cant("made", &file, error))?;
        journal.note(Step::Swap(file.clone()))?;
        let path = CString::new(file.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the pointer is a string that ends with a zero byte.
        if unsafe { libc::swapon(path.as_ptr(), PREFER | PRIORITY_MAX) } != 0 {
            return Err(cant("swapped to", &file, std::io::Error::last_os_error()));
        }
        let controllers = read(Path::new(CGROUPS).join("cgroup.controllers")).unwrap_or_default();
        let is_v2 = controllers.split_whitespace().any(|name| name == "memory");
        let root = if is_v2 { PathBuf::from(CGROUPS) } else { Path::new(CGROUPS).join("memory") };
        let given = root.join("cgroup.subtree_control");
        if is_v2 && !read(&given)?.split_whitespace().any(|name| name == "memory") {
            journal.note(Step::Value(given.clone(), "-memory".to_owned()))?;
            fs::write(&given, "+memory").map_err(|error| cant("set", &given, error))?;
        }
        let group = root.join(name);
        journal.note(Step::Group(group.clone()))?;
        fs::create_dir(&group).map_err(|error| cant("made", &group, error))?;
        limit(&group, is_v2, ram_bytes)?;
        Ok((group, is_v2))
    }

    /// Sets the memory limit of the cgroup's members. No member may use more at this moment.
    pub fn limits_to(&self, ram_bytes: u64) -> Result<(), String> {
        limit(&self.group, self.is_v2, ram_bytes)
    }

    /// Adds a file that is removed at the end.
    pub fn has_file(&mut self, path: &Path) -> Result<(), String> {
        self.journal.note(Step::File(path.to_owned()))
    }

    /// Adds a directory that is removed at the end, with its contents.
    pub fn has_directory(&mut self, path: &Path) -> Result<(), String> {
        self.journal.note(Step::Directory(path.to_owned()))
    }

    /// Whether the cgroup's limit includes zswap's pool, as with version 2 of cgroups since Linux 5.19.
    pub fn pool_is_within(&self) -> bool {
        self.is_v2 && self.group.join("memory.zswap.current").exists()
    }

    /// Returns Farpage's budget beside the cgroup's limit, in words.
    pub fn budget_of_farpage(&self) -> &'static str {
        if self.pool_is_within() { "as much" } else { "as much and zswap's peak" }
    }

    /// Returns the number of the cgroup's processes that the kernel has killed so far for lack of memory.
    pub fn killed(&self) -> u64 {
        killed_in(&self.group).unwrap_or_else(killed)
    }

    /// Returns the file in which a process enters its number to join the cgroup.
    pub fn members(&self) -> PathBuf {
        self.group.join("cgroup.procs")
    }

    /// Makes the kernel swap with this setting.
    pub fn swaps_as(&mut self, setting: &Setting) -> Result<(), String> {
        let zswap = Path::new(ZSWAP);
        self.journal.set(PAGE_CLUSTER, &setting.page_cluster.to_string())?;
        // zswap may be missing if it isn't used.
        if setting.codec.is_some() || zswap.exists() {
            self.journal.set(zswap.join("enabled"), if setting.codec.is_some() { "Y" } else { "N" })?;
        }
        match &setting.codec {
            Some(codec) => self.journal.set(zswap.join("compressor"), codec),
            None => Ok(()),
        }
    }

    /// Returns the codecs that zswap supports on this machine, by trying each.
    pub fn codecs(&mut self) -> Vec<String> {
        let mut has = |codec: &&str| {
            let setting = Setting { codec: Some((*codec).to_owned()), page_cluster: 3 };
            self.swaps_as(&setting).is_ok()
                && read(Path::new(ZSWAP).join("compressor")).as_deref() == Ok(codec)
        };
        ["lzo", "lzo-rle", "lz4", "zstd", "842", "deflate"]
            .iter()
            .filter(|codec| has(codec))
            .map(|codec| (*codec).to_owned())
            .collect()
    }

    /// Undoes everything.
    pub fn restore(mut self) -> Result<(), String> {
        self.journal.undo()
    }
}

fn limit(group: &Path, is_v2: bool, ram_bytes: u64) -> Result<(), String> {
    let limit = group.join(if is_v2 { "memory.max" } else { "memory.limit_in_bytes" });
    fs::write(&limit, ram_bytes.to_string()).map_err(|error| cant("set", &limit, error))
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Err(why) = self.journal.undo() {
            super::tell(&format!(
                "{why}; the next `farpage bench kernel`, `programs` or `command` tries again"
            ));
        }
        let _ = fs::remove_file(LOCK);
    }
}

/// Installs a panic hook that undoes all steps. A panic ends this program at once, and nothing is dropped.
fn undo_before_a_panic_ends_this() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        let left = fs::read_to_string(JOURNAL).unwrap_or_default();
        if undo_all(&mut left.lines().filter_map(Step::of).collect()).is_ok() {
            let _ = fs::remove_file(JOURNAL);
        }
        let _ = fs::remove_file(LOCK);
    }));
}

/// The most that one run has in zswap's pool. What other programs had there before the run isn't the run's.
pub struct PoolPeak {
    before: u64,
    bytes: u64,
}

impl PoolPeak {
    /// Begins to watch the pool.
    pub fn begin() -> PoolPeak {
        PoolPeak { before: pool_bytes(), bytes: 0 }
    }

    /// Looks at the pool.
    pub fn look(&mut self) {
        self.see(pool_bytes());
    }

    fn see(&mut self, bytes: u64) {
        self.bytes = self.bytes.max(bytes.saturating_sub(self.before));
    }

    /// Returns the peak in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Returns the bytes in zswap's pool.
fn pool_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Zswap:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Returns the number of pages that the kernel has written to swap so far.
pub fn pages_written() -> u64 {
    counted("pswpout")
}

/// Returns a cgroup's count of killed processes. Version 2 of cgroups has another file than version 1.
fn killed_in(group: &Path) -> Option<u64> {
    let files = ["memory.events", "memory.oom_control"].map(|name| fs::read_to_string(group.join(name)));
    files.into_iter().flatten().find_map(|text| count_in(&text, "oom_kill"))
}

/// Returns the number of processes that the kernel has killed so far for lack of memory, in a cgroup or
/// globally.
pub fn killed() -> u64 {
    counted("oom_kill")
}

fn counted(event: &str) -> u64 {
    count_in(&fs::read_to_string("/proc/vmstat").unwrap_or_default(), event).unwrap_or(0)
}

fn count_in(text: &str, event: &str) -> Option<u64> {
    let mut words = text.lines().filter_map(|line| line.split_once(' '));
    words.find_map(|(name, count)| (name == event).then(|| count.parse().ok())?)
}

/// Makes a file as mkswap would, with a header of version 1.
fn make_swap_file(path: &Path, bytes: u64) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: the function takes no pointers. Afterwards the file has no holes, as swapon requires.
    match unsafe { libc::posix_fallocate(fd, 0, bytes as libc::off_t) } {
        0 => {}
        error => return Err(std::io::Error::from_raw_os_error(error)),
    }
    let mut header = vec![0_u8; PAGE_BYTES];
    header[1024..1028].copy_from_slice(&1_u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&((bytes / PAGE_BYTES as u64 - 1) as u32).to_ne_bytes());
    header[PAGE_BYTES - 10..].copy_from_slice(b"SWAPSPACE2");
    file.write_all_at(&header, 0)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_back_from_their_lines() {
        let path = || PathBuf::from("/some/file");
        let steps = [
            Step::Value(path(), "60 1".to_owned()),
            Step::Swap(path()),
            Step::File(path()),
            Step::Directory(path()),
            Step::Group(path()),
        ];
        for step in steps {
            assert_eq!(Step::of(step.line().trim_end_matches('\n')), Some(step));
        }
        assert_eq!(Step::of("nonsense"), None);
    }

    #[test]
    fn what_is_gone_already_is_undone() {
        let gone = || PathBuf::from("/nonexistent/farpage");
        for step in [Step::Swap(gone()), Step::File(gone()), Step::Directory(gone()), Step::Group(gone())] {
            assert_eq!(step.undo(), Ok(()));
        }
        assert!(Step::Value(gone(), String::new()).undo().is_err());
    }

    /// Steps that couldn't be undone were forgotten, so the next run didn't retry them.
    #[test]
    fn what_cannot_be_undone_is_left() {
        let gone = || PathBuf::from("/nonexistent/farpage");
        let value = |text: &str| Step::Value(gone(), text.to_owned());
        let mut steps = vec![value("first"), Step::File(gone()), value("second"), Step::Swap(gone())];
        assert!(undo_all(&mut steps).is_err());
        assert_eq!(steps, [value("first"), value("second")]);
    }

    /// Pages that other programs had in the pool gave Farpage as much memory more.
    #[test]
    fn pool_of_a_run_begins_at_what_was_there_before() {
        let mut peak = PoolPeak { before: 100, bytes: 0 };
        [90, 130, 110].into_iter().for_each(|bytes| peak.see(bytes));
        assert_eq!(peak.bytes(), 30);
    }

    /// A kill anywhere on the machine counted as one of the benchmark's program.
    #[test]
    fn kills_are_those_of_the_cgroup_in_both_versions() {
        let group = std::env::temp_dir().join(format!("farpage-kills-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        assert_eq!(killed_in(&group), None);
        fs::write(group.join("memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n").unwrap();
        assert_eq!(killed_in(&group), Some(3));
        fs::write(group.join("memory.events"), "oom 9\noom_kill 2\noom_group_kill 0\n").unwrap();
        assert_eq!(killed_in(&group), Some(2));
        fs::remove_dir_all(&group).unwrap();
    }

    /// The name was removed before swapoff was tried again, which then had no file to name.
    #[test]
    fn file_that_is_still_swapped_to_keeps_its_name() {
        let path = || PathBuf::from("/var/tmp/swap");
        let mut steps = vec![Step::File(path()), Step::Swap(path()), Step::Directory(path())];
        let no_memory = |step: &Step| match step {
            Step::Swap(_) => Err("no memory".to_owned()),
            _ => Ok(()),
        };
        assert_eq!(undo_each(&mut steps, no_memory), Err("no memory".to_owned()));
        assert_eq!(steps, [Step::File(path()), Step::Swap(path())]);
        assert_eq!(undo_each(&mut steps, |_| Ok(())), Ok(()));
        assert_eq!(steps, []);
    }

    /// Undoing removed a directory that another program had made.
    #[test]
    fn what_is_there_already_or_has_a_name_that_no_line_holds_is_not_noted() {
        let there = std::env::temp_dir();
        for step in [Step::File(there.clone()), Step::Directory(there.clone()), Step::Group(there)] {
            assert!(step.check().unwrap_err().contains("already"), "{step:?}");
        }
        for name in ["/var/tmp/a\tb", "/var/tmp/a\nfile\t/etc/passwd"] {
            assert!(Step::Swap(name.into()).check().is_err(), "{name:?}");
        }
        let odd: &std::ffi::OsStr = OsStrExt::from_bytes(b"/var/tmp/\xff");
        assert!(Step::Swap(odd.into()).check().is_err());
        assert_eq!(Step::Swap("/var/tmp/swap file".into()).check(), Ok(()));
    }

    /// Workers of a program that was killed kept the cgroup.
    #[test]
    fn members_are_ended_and_nobody_else() {
        let sleep = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (mut member, mut other) = (sleep(), sleep());
        let list = std::env::temp_dir().join(format!("farpage-members-{}", std::process::id()));
        fs::write(&list, format!("0\n1\n{}\n", member.id())).unwrap();
        end_members(&list);
        fs::remove_file(&list).unwrap();
        let ended = member.wait().unwrap();
        let others = other.try_wait().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&ended);
        assert_eq!((signal, others), (Some(libc::SIGKILL), None));
    }

    #[test]
    fn only_one_run_has_the_lock_and_a_removed_lock_is_none() {
        let path = std::env::temp_dir().join(format!("farpage-lock-{}", std::process::id()));
        let first = locked(&path).unwrap();
        assert!(locked(&path).unwrap_err().contains("another run has it"));
        fs::remove_file(&path).unwrap();
        let second = locked(&path).unwrap();
        drop(first);
        assert!(locked(&path).is_err());
        fs::remove_file(&path).unwrap();
        drop(second);
    }
}

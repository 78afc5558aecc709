//! `farpage show PID`: the swap areas of a run while it runs, as `swapon --show` has them.
//!
//! The supervisor has the session open; programs have its path in their environment. The session is mapped
//! for reading only, so looking on changes nothing. The used bytes are summed over living processes, which
//! hold their records' locks, and over processes whose children have inherited pages.
// UNSAFETY: tables of areas are read where the session says that they lie. The offsets were checked before.

use crate::host::sys::{self, Access, SharedMemory};
use crate::options::{Column, ShowOptions};
use crate::supervise::session::{mapped_session, own_session, session_in, text};
use crate::supervise::totals;
use crate::text::failure::Failure;
use crate::text::numbers::iec;
use crate::text::say;
use farpage_core::config::AreaOrder;
use farpage_core::units::{CLUSTER_SLOTS, PAGE_BYTES};
use farpage_runtime::session::head::HeadCopy;
use farpage_runtime::session::record::heirs_bytes;
use farpage_runtime::session::{AreaDescription, MAGIC, SESSION_ENV, Session};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};

/// Version of the JSON's layout.
const SCHEMA: u32 = 1;
const PAGE: u64 = PAGE_BYTES as u64;

/// Prints the areas of the run that a process belongs to.
pub fn show(options: &ShowOptions) -> Result<ExitCode, Failure> {
    let path = find(Path::new("/proc"), options.pid)?;
    let memory = open(&path, options.pid)?;
    say::to_stdout(&look(&memory, options).ok_or_else(|| damaged(options.pid))?)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the text to print for a session; none if its head makes no sense.
pub fn look(memory: &SharedMemory, options: &ShowOptions) -> Option<String> {
    let session = session_in(memory)?;
    let mut head = Box::new(HeadCopy::EMPTY);
    session.head.copy_to(&mut head);
    let settings = head.check(memory.bytes())?;
    Some(output(options, &View { session, memory, head: &head, order: settings.order }))
}

/// A session, and its head as it was when it was checked.
struct View<'a> {
    session: &'a Session,
    memory: &'a SharedMemory,
    head: &'a HeadCopy,
    order: AreaOrder,
}

fn output(options: &ShowOptions, view: &View) -> String {
    let live = live(view.session, view.memory.file());
    let rows: Vec<Row> = view
        .head
        .areas()
        .iter()
        .enumerate()
        .map(|(at, area)| {
            Row::of(area, used(view.session, view.memory.file(), &live, at), leased(view.memory, area))
        })
        .collect();
    if options.json { say::json(&as_json(view, &live, &rows)) } else { as_text(&rows, options) }
}

fn damaged(pid: u32) -> Failure {
    unreadable(pid)
        .because("what its processes share was overwritten, or it begins or ends just now")
        .fix("look again; if it stays so, a program of the run writes where it must not")
}

// ---- finding the session -------------------------------------------------------------------------------

/// Returns the path by which the session of a process can be opened. A supervisor has the session among its
/// own files. Other processes have the session mapped, and its name tells the supervisor. A process that has
/// not joined yet has only a variable for it, or descends from a supervisor.
fn find(proc: &Path, pid: u32) -> Result<PathBuf, Failure> {
    if !proc.join(pid.to_string()).exists() {
        return Err(Failure::new(format!("there is no process {pid}"))
            .fix("`pgrep -a farpage` shows the runs of Farpage on this machine"));
    }
    let not_allowed = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => closed(pid, sys::effective_user()),
        _ => Failure::new(format!("process {pid} can't be looked at: {error}"))
            .because("it has just ended, or it is a thread of the kernel")
            .fix("name a `farpage run`, or a process under one: `pgrep -a farpage`"),
    };
    if let Some(path) = own_session(proc, pid).map_err(not_allowed)? {
        return Ok(path);
    }
    let environment = fs::read(proc.join(format!("{pid}/environ"))).map_err(not_allowed)?;
    let named = variable(&environment).map(PathBuf::from);
    if let Some((maker, inode)) = mapped_session(proc, pid).map_err(not_allowed)? {
        let is_it = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.ino() == inode);
        let by_maker = own_session(proc, maker).ok().flatten();
        // In a container the path is the container's.
        let inside = named.as_deref().and_then(|path| path.strip_prefix("/").ok());
        let inside = inside.map(|path| proc.join(format!("{pid}/root")).join(path));
        let found = [by_maker, inside, named].into_iter().flatten().find(is_it);
        return found.ok_or_else(|| elsewhere(pid));
    }
    if let Some(path) = named {
        return Ok(path);
    }
    // The program's environment was emptied.
    let mut next = parent(proc, pid);
    while let Some(above) = next.filter(|pid| *pid > 1) {
        if let Ok(Some(path)) = own_session(proc, above) {
            return Ok(path);
        }
        next = parent(proc, above);
    }
    Err(Failure::new(format!("process {pid} doesn't run under Farpage"))
        .because("neither it nor a process above it was started by `farpage run`")
        .fix("start it with: farpage run PROGRAM"))
}

fn elsewhere(pid: u32) -> Failure {
    Failure::new(format!("the run that process {pid} belongs to can't be opened from here"))
        .because("its `farpage run` has ended, or is in another container")
        .fix("look in that container, while it runs")
}

/// Returns the failure for a process into which this user may not look. To root, sudo is no help.
fn closed(pid: u32, user: u32) -> Failure {
    if user == 0 {
        return Failure::new(format!(
            "process {pid} can't be looked at: the kernel refuses that to root, too"
        ))
        .because("a container, a sandbox or a security module keeps this process out")
        .fix("look from outside of it, as root of the machine, or from inside of the run's container");
    }
    Failure::new(format!("process {pid} can't be looked at: it belongs to somebody else"))
        .because(
            "only its own user and root may look into a process, and only root if its program can't be read",
        )
        .fix(format!("sudo farpage show {pid}"))
}

fn variable(environment: &[u8]) -> Option<&OsStr> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables
        .find_map(|line| line.strip_prefix(SESSION_ENV.as_bytes())?.strip_prefix(b"="))
        .map(OsStr::from_bytes)
}

fn parent(proc: &Path, pid: u32) -> Option<u32> {
    let status = fs::read_to_string(proc.join(format!("{pid}/status"))).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Opens and maps a session, and checks that this version can read it.
fn open(path: &Path, pid: u32) -> Result<SharedMemory, Failure> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => closed(pid, sys::effective_user()),
        io::ErrorKind::NotFound => Failure::new(format!("the run that process {pid} belongs to has ended"))
            .because("its `farpage run` is gone, and what it knew with it")
            .fix("look while it runs"),
        io::ErrorKind::InvalidInput => no_session(pid),
        _ => Failure::new(format!("the session at {} can't be opened: {error}", path.display()))
            .fix("try again: it may have just ended"),
    };
    let file = open_file(path).map_err(failed)?;
    let memory = SharedMemory::open(file, Access::Read).map_err(failed)?;
    check(&memory, pid)?;
    Ok(memory)
}

/// Opens an ordinary file. The variable may name anything, and opening a device can already do something:
/// wind a tape, set a watchdog. So only a file that was looked at is opened.
fn open_file(path: &Path) -> io::Result<File> {
    let found = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    if !found.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn check(memory: &SharedMemory, pid: u32) -> Result<(), Failure> {
    let mut head = [0; 8];
    if memory.bytes() >= head.len() {
        // SAFETY: the memory has at least that many bytes, and any bytes are a valid array.
        head = unsafe { memory.start().cast::<[u8; 8]>().read() };
    }
    if u64::from_le_bytes(head) == MAGIC && memory.bytes() >= size_of::<Session>() {
        return Ok(());
    }
    Err(if head.starts_with(&MAGIC.to_le_bytes()[..7]) {
        unreadable(pid)
            .because(format!("it is of another version (layout {}, not {})", head[7], MAGIC >> 56))
            .fix("use the farpage that started it: `readlink /proc/PID/exe` of its `farpage run`")
    } else {
        no_session(pid)
    })
}

fn unreadable(pid: u32) -> Failure {
    Failure::new(format!("the run of process {pid} can't be read by this farpage"))
}

fn no_session(pid: u32) -> Failure {
    unreadable(pid)
        .because("what its environment points to is no session, or was overwritten")
        .fix("name the PID of its `farpage run`; if that says the same, a program of the run writes where it must not")
}

// ---- what is in it -------------------------------------------------------------------------------------

/// Returns the records of living processes.
fn live(session: &Session, file: &File) -> Vec<usize> {
    let is_live = |at: &usize| {
        session.processes[*at].pid.load(Ordering::Acquire) != 0 && sys::is_locked(file, *at as u64)
    };
    (0..session.processes.len()).filter(is_live).collect()
}

/// Returns the bytes in use in an area. Slots of a process that has ended count while a child has pages
/// there.
fn used(session: &Session, file: &File, live: &[usize], area: usize) -> u64 {
    let has_heirs = |at| heirs_bytes(at).any(|byte| sys::is_locked(file, byte));
    let slots = session.processes.iter().enumerate().map(|(at, record)| {
        let slots = u64::from(record.slots_used[area].load(Ordering::Relaxed));
        if slots == 0 || live.contains(&at) || has_heirs(at) { slots } else { 0 }
    });
    slots.sum::<u64>() * PAGE
}

/// Returns the bytes that processes have leased of an area: whole clusters. Clusters of dead processes count
/// until another process needs them.
pub fn leased(memory: &SharedMemory, area: &AreaDescription) -> u64 {
    let clusters = area.slots.div_ceil(CLUSTER_SLOTS) as usize;
    let end = (area.owners_offset as usize).saturating_add(clusters * size_of::<u32>());
    if end > memory.bytes() || !area.owners_offset.is_multiple_of(size_of::<u32>() as u64) {
        return 0;
    }
    let first = memory.start().wrapping_add(area.owners_offset as usize).cast::<AtomicU32>();
    // SAFETY: the table lies inside the memory, which stays mapped, and is aligned. Atomics may
    // have any value.
    let holders = unsafe { core::slice::from_raw_parts(first, clusters) };
    let leased = holders.iter().filter(|holder| holder.load(Ordering::Relaxed) != 0).count();
    leased as u64 * u64::from(CLUSTER_SLOTS) * PAGE
}

/// An area's row of the table.
struct Row {
    name: String,
    kind: &'static str,
    size: u64,
    used: u64,
    leased: u64,
    priority: i32,
    node: Option<u8>,
}

impl Row {
    fn of(area: &AreaDescription, used: u64, leased: u64) -> Row {
        Row {
            name: text(&area.name),
            // The kernel's words, whatever kind of device it is.
            kind: if area.is_device != 0 { "partition" } else { "file" },
            size: u64::from(area.slots.saturating_sub(area.bad_count).saturating_sub(1)) * PAGE,
            used,
            leased,
            priority: area.priority,
            node: area.place.node().map(|node| node.0),
        }
    }

    fn cell(&self, column: Column, options: &ShowOptions) -> String {
        let size = |bytes: u64| if options.bytes { bytes.to_string() } else { short(bytes) };
        match column {
            // A name can hold anything; a cell of the table must not.
            Column::Name => self.name.escape_debug().to_string().replace(' ', "\\x20"),
            Column::Type => self.kind.into(),
            Column::Size => size(self.size),
            Column::Used => size(self.used),
            Column::Prio => self.priority.to_string(),
            Column::Node => self.node.map_or("-".into(), |node| node.to_string()),
        }
    }
}

/// `8G`, `1.5M`, `0B`: as `swapon --show` writes sizes, in powers of 1024.
fn short(bytes: u64) -> String {
    iec(bytes).replace(' ', "").replace("iB", "")
}

fn as_text(rows: &[Row], options: &ShowOptions) -> String {
    let all = [Column::Name, Column::Type, Column::Size, Column::Used, Column::Prio, Column::Node];
    let columns = if options.columns.is_empty() { &all[..] } else { &options.columns };
    let mut table: Vec<Vec<String>> = Vec::new();
    if !options.noheadings {
        table.push(columns.iter().map(|column| column.heading().to_owned()).collect());
    }
    table.extend(rows.iter().map(|row| columns.iter().map(|column| row.cell(*column, options)).collect()));
    let width = |at: usize| table.iter().map(|cells| cells[at].chars().count()).max().unwrap_or(0);
    let mut output = String::new();
    for cells in &table {
        let line: Vec<String> = columns
            .iter()
            .zip(cells)
            .enumerate()
            .map(|(at, (column, cell))| {
                let width = width(at);
                if matches!(column, Column::Name | Column::Type) {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            })
            .collect();
        output += line.join(" ").trim_end();
        output.push('\n');
    }
    output
}

fn as_json(view: &View, live: &[usize], rows: &[Row]) -> Value {
    let session = view.session;
    let areas = rows.iter().map(|row| {
        json!({
            "name": row.name,
            "type": row.kind,
            "size": row.size,
            "used": row.used,
            "leased": row.leased,
            "prio": row.priority,
            "node": row.node,
        })
    });
    let processes = live.iter().map(|at| {
        let record = &session.processes[*at];
        let used = record
            .slots_used
            .iter()
            .take(rows.len())
            .map(|slots| u64::from(slots.load(Ordering::Relaxed)) * PAGE);
        json!({
            "pid": record.pid.load(Ordering::Relaxed),
            "command": totals::command(record),
            "used": used.collect::<Vec<_>>(),
        })
    });
    json!({
        "schema": SCHEMA,
        "supervisor": view.head.head().supervisor_pid,
        "order": view.order.name(),
        "areas": areas.collect::<Vec<_>>(),
        "processes": processes.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervise::session::{Shared, tests as sessions};

    fn options(columns: &[Column]) -> ShowOptions {
        ShowOptions { pid: 1, columns: columns.into(), noheadings: false, bytes: false, json: false }
    }

    fn row(name: &str, used: u64) -> Row {
        Row {
            name: name.into(),
            kind: "file",
            size: 8 << 30,
            used,
            leased: 2 * used,
            priority: -1,
            node: None,
        }
    }

    #[test]
    fn table_has_the_columns_of_swapon_and_the_node() {
        let rows =
            [row("/var/tmp/a long name", 3 << 19), Row { node: Some(1), priority: 32_767, ..row("/b", 0) }];
        assert_eq!(
            as_text(&rows, &options(&[])),
            "NAME                       TYPE SIZE USED  PRIO NODE\n\
             /var/tmp/a\\x20long\\x20name file   8G 1.5M    -1    -\n\
             /b                         file   8G   0B 32767    1\n"
        );
        let chosen = ShowOptions { noheadings: true, bytes: true, ..options(&[Column::Used, Column::Name]) };
        assert_eq!(as_text(&rows[1..], &chosen), "0 /b\n");
    }

    /// After `daemon()` the child's pages lie in slots of the parent, which has ended. `USED` was 0B.
    #[test]
    fn slots_of_a_process_that_has_ended_count_while_it_has_heirs() {
        let shared = Shared::new(sessions::settings(), &[]).unwrap();
        shared.session().processes[3].slots_used[0].store(5, Ordering::Relaxed);
        let used = || used(shared.session(), shared.file(), &live(shared.session(), shared.file()), 0);
        assert_eq!(used(), 0, "nobody has a page there");
        let heir = File::options().read(true).write(true).open(shared.path()).unwrap();
        sys::lock_byte(&heir, heirs_bytes(3).end - 1, true).unwrap();
        assert_eq!(used(), 5 * PAGE);
        sys::lock_byte(&heir, heirs_bytes(3).end - 1, false).unwrap();
        sys::lock_byte(&heir, heirs_bytes(2).start, true).unwrap();
        assert_eq!(used(), 0, "they are another's heirs");
    }

    #[test]
    fn session_of_another_version_is_refused_as_such() {
        let shared = Shared::new(sessions::settings(), &[]).unwrap();
        let path = PathBuf::from(shared.path());
        assert!(open(&path, 7).is_ok());
        std::os::unix::fs::FileExt::write_all_at(
            &File::options().write(true).open(&path).unwrap(),
            &[255],
            7,
        )
        .unwrap();
        let message = open(&path, 7).err().unwrap().to_string();
        assert!(message.contains("another version (layout 255"), "{message}");
        let other = tempfile::NamedTempFile::new().unwrap();
        fs::write(other.path(), "something else, of any length").unwrap();
        let message = open(other.path(), 7).err().unwrap().to_string();
        assert!(message.contains("no session"), "{message}");
    }

    /// A pipe must not be opened to look at it: its other end would learn of a reader.
    #[test]
    fn what_the_variable_names_is_not_opened_unless_it_is_a_file() {
        let place = tempfile::tempdir().unwrap();
        let pipe = place.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [pipe.as_path(), Path::new("/dev/null"), place.path()] {
            assert_eq!(
                open_file(path).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{}",
                path.display()
            );
            let message = open(path, 7).err().unwrap().to_string();
            assert!(message.contains("no session"), "{message}");
        }
    }

    /// Root was told that only root may look, and to use sudo.
    #[test]
    fn root_is_not_told_to_become_root() {
        let (root, other) = (closed(7, 0).to_string(), closed(7, 1000).to_string());
        assert!(!root.contains("sudo") && root.contains("security module"), "{root}");
        assert!(other.contains("fix: sudo farpage show 7"), "{other}");
    }

    #[test]
    fn variable_is_found_by_its_whole_name() {
        let environment = b"A=1\0FARPAGE_SESSION_OLD=/x\0FARPAGE_SESSION=/proc/1/fd/3\0";
        assert_eq!(variable(environment), Some(OsStr::new("/proc/1/fd/3")));
        assert_eq!(variable(b"PATH=/bin\0"), None);
    }
}

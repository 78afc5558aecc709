//! Opens the area that a swap argument names. The argument may be a directory, an empty file, or a file or
//! device that mkswap has prepared. In a directory an unlinked temporary file is made.
//!
//! Nothing that holds other data is ever written, and memory is never taken for a disk. An area has one
//! owner at a time: the kernel's swap is recognized by its table, another Farpage by its lock. The files
//! stay open in the supervisor, and programs open them again below /proc. `areas/prepared.rs` checks
//! what a header says.

pub mod header;
pub mod kernel_swap;
mod mark;
pub mod places;
mod prepared;
pub mod swap_argument;

use self::mark::Mark;
use crate::areas::header::SLOTS_MIN;

use crate::areas::places::Places;
use crate::areas::swap_argument::{Discard, SwapArgument};
use crate::host::machine::Machine;
use crate::host::sys::{self, FileSystem, Lock};
use crate::text::failure::{FIX_DESCRIPTORS, Failure, quoted};
use crate::text::numbers::iec;
use farpage_core::areas::{Order, Placement};
use farpage_core::config::AreaOrder;
use farpage_core::units::{AreaId, PAGE_BYTES, SLOTS_PER_AREA_MAX};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Percent of a file system that growing areas leave free.
const DISK_RESERVE_PERCENT: u64 = 10;
/// Least bytes for an area to grow into. A disk with less counts as full.
const GROWTH_BYTES_MIN: u64 = 64 << 20;
/// Fix for a `$FARPAGE_SWAP_DIR` that can't be used.
pub const FIX_SWAP_DIR: &str = "point FARPAGE_SWAP_DIR to a directory on a disk, or unset it";
/// Fix for a place that can't be used for a reason of its own.
const FIX_ANOTHER_PLACE: &str = "name another place: --swap DIRECTORY, or none: --no-disk";
/// How long to wait for a lock whose holder may have ended already.
const LOCK_WAIT_MAX: Duration = Duration::from_millis(500);

/// An opened area.
#[derive(Debug)]
pub struct Area {
    /// The file, kept open for as long as the session lasts.
    pub file: File,
    /// The area's name, as the user gave it.
    pub path: PathBuf,
    /// Kind of the area.
    pub kind: Kind,
    /// Slots, the header's slot 0 included.
    pub slots: u32,
    /// The place that orders the area among the other areas.
    pub place: Placement,
    /// Priority of the area, given by the user or by the order.
    pub priority: i32,
    /// Whether the area takes space on the disk only when it needs the space.
    pub grows: bool,
    /// Whether the disk is told of clusters that became empty.
    pub discards: bool,
    /// Whether the whole area is discarded before its use, once nothing is left that could be refused.
    pub discards_first: bool,
    /// Slots that must not be used.
    pub bad_slots: Vec<u32>,
    /// Free bytes that growing must leave on the disk.
    pub disk_reserve_bytes: u64,
    /// Where the slots lie, if that is known already.
    pub places: Option<Places>,
    /// A warning for the user about the area.
    pub warning: Option<String>,
    /// The mark that says that the file is this run's, once it is written.
    pub mark: Option<Mark>,
}

/// Kinds of areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file without a name.
    Temporary,
    /// The user's file, empty before and after.
    EmptyFile,
    /// A file with a swap header.
    SwapFile,
    /// A block device with a swap header.
    Device,
}

impl Kind {
    /// Returns the kind's name, for the statistics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Temporary => "temporary file",
            Kind::EmptyFile => "empty file",
            Kind::SwapFile => "swap file",
            Kind::Device => "device",
        }
    }
}

impl Area {
    /// Returns the bytes that fit into the area.
    pub fn bytes(&self) -> u64 {
        (u64::from(self.slots) - 1 - self.bad_slots.len() as u64) * PAGE_BYTES as u64
    }

    /// Returns where the file ends, if it has become shorter than it must be with a page at `offset`. None
    /// for a device, whose length doesn't say that.
    pub fn shortened(&self, offset: u64) -> Option<u64> {
        let page = PAGE_BYTES as u64;
        let least = if self.grows { offset.saturating_add(page) } else { u64::from(self.slots) * page };
        let end = self.file.metadata().ok().filter(|_| self.kind != Kind::Device)?.len();
        (end < least).then_some(end)
    }

    /// Prepares the area for the run. Called when nothing is left that could be refused, because a device's
    /// content is lost here. As with swapon, a failed discard is told and changes nothing more.
    pub fn prepare(&mut self) -> Result<(), String> {
        if self.kind == Kind::EmptyFile {
            // Without a mark (a full disk) the next run is refused if this one is killed.
            self.mark = Mark::renew(&self.file).ok();
        }
        if !self.discards_first {
            return Ok(());
        }
        // The discard leaves out the header.
        let bytes = (u64::from(self.slots) - 1) * PAGE_BYTES as u64;
        sys::discard(&self.file, PAGE_BYTES as u64, bytes).map_err(|error| {
            format!("note: {} could not be discarded before its use: {error}", self.path.display())
        })
    }

    /// Empties the user's empty file after the run, so that it holds nothing of the program's
    /// memory. Returns a message if the file can't be emptied: processes that the program has left
    /// behind may have pages there.
    pub fn close(self) -> Option<String> {
        if self.kind != Kind::EmptyFile {
            return None;
        }
        let emptied = lock_soon(&self.file, Lock::Exclusive)
            .and_then(|is_ours| if is_ours { self.file.set_len(0).map(|()| true) } else { Ok(false) });
        let why = match emptied {
            Ok(true) => return None,
            // The next run has emptied the file, and uses it.
            Ok(false) if self.mark.is_some_and(|mark| !mark.is_in(&self.file)) => return None,
            Ok(false) => "processes that the program has started use it; when they have ended".to_owned(),
            Err(error) => format!("it can't be emptied: {error}; to do so"),
        };
        let (path, name) = (self.path.display(), quoted(&self.path));
        Some(format!("note: {path} is left as it is: {why}: truncate -s 0 {name}"))
    }
}

/// Opens the areas that were named, in their order.
pub fn open_all(arguments: &[SwapArgument], machine: &Machine) -> Result<Vec<Area>, Failure> {
    let mut areas: Vec<Area> = Vec::new();
    for argument in arguments {
        let area = open(argument, &areas)?;
        areas.push(placed(area, argument, machine)?);
    }
    Ok(areas)
}

/// Gives the area its place: on the node that the user named, or on that of its disk.
fn placed(mut area: Area, argument: &SwapArgument, machine: &Machine) -> Result<Area, Failure> {
    let nodes = machine.nodes();
    if let Some(node) = argument.node.filter(|node| !nodes.contains(node)) {
        let there: Vec<_> = nodes.iter().map(|node| node.0.to_string()).collect();
        return Err(Failure::new(format!("swap path {}: there is no node {}", area.path.display(), node.0))
            .because(format!("this machine has node {}", there.join(", ")))
            .fix("leave node= out: Farpage finds the node of a disk by itself where it is known"));
    }
    let metadata = area.file.metadata().ok();
    let node = argument.node.or_else(|| machine.node_of(&metadata?));
    area.place = machine.place(node, argument.priority);
    match argument.discard {
        Some(discard) => discarding(area, discard, machine),
        None => Ok(area),
    }
}

/// Sets up discards: a device is told, a file that grows gets holes. The user's file that mkswap has prepared
/// must keep its blocks: the kernel refuses to swap to a file with holes, and so do we.
fn discarding(mut area: Area, discard: Discard, machine: &Machine) -> Result<Area, Failure> {
    let name = area.path.display().to_string();
    match area.kind {
        Kind::SwapFile => {
            return Err(Failure::new(format!("swap path {name}: discard would make holes in a swap file"))
                .because("a file that mkswap has prepared can't be used for swap any more once it has holes")
                .fix("leave discard out, or name a directory or an empty file: their room is given back"));
        }
        Kind::Device if !area.file.metadata().is_ok_and(|metadata| machine.can_discard(&metadata)) => {
            area.warning =
                together([area.warning, Some(format!("{name} can't discard: it is used without"))]);
            return Ok(area);
        }
        Kind::Device => area.discards_first = discard != Discard::Pages,
        // A file that grows is empty when the run begins to use it, so nothing is discarded first.
        Kind::Temporary | Kind::EmptyFile => {}
    }
    area.discards = discard != Discard::Once;
    Ok(area)
}

/// Gives every area its priority, as the programs' own order will find it.
pub fn number(areas: &mut [Area], order: AreaOrder) {
    let mut numbers = Order::new(order, 1);
    let id = |at| AreaId(at as u8);
    areas.iter().enumerate().for_each(|(at, area)| numbers.on(id(at), area.place));
    for (at, area) in areas.iter_mut().enumerate() {
        area.priority = numbers.priority(id(at)).expect("an area that is on has a priority");
    }
}

/// Opens a temporary file in the first default directory that is on a disk with free space.
/// `$FARPAGE_SWAP_DIR` was chosen for this purpose, so if it can't be used that is an error.
pub fn open_default(variable: impl Fn(&str) -> Option<OsString>, machine: &Machine) -> Result<Area, Failure> {
    let mut reasons = Vec::new();
    for (name, path) in default_directories(variable) {
        let argument = SwapArgument { path, ..SwapArgument::default() };
        match open_directory_of(&argument) {
            Ok(area) => return placed(area, &argument, machine),
            Err(failure) if name == "$FARPAGE_SWAP_DIR" => {
                return Err(failure.fix(FIX_SWAP_DIR));
            }
            // Another place wouldn't help.
            Err(failure) if failure.fixes().iter().any(|fix| fix == FIX_DESCRIPTORS) => return Err(failure),
            Err(failure) => reasons.push(failure.in_one_line()),
        }
    }
    let none = Failure::new("there is no place for swap");
    let none = reasons.into_iter().fold(none, Failure::because);
    Err(none
        .fix("name a directory on a disk with room: farpage run --swap DIRECTORY ...")
        .fix("use compressed memory only: farpage run --no-disk ..."))
}

/// Returns the default directories and where they come from, in the order in which they are tried.
pub fn default_directories(variable: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, PathBuf)> {
    let mut directories: Vec<(&'static str, PathBuf)> = Vec::new();
    directories.extend(variable("FARPAGE_SWAP_DIR").map(|path| ("$FARPAGE_SWAP_DIR", path.into())));
    directories.extend(variable("TMPDIR").map(|path| ("$TMPDIR", path.into())));
    directories.push(("/var/tmp", "/var/tmp".into()));
    directories
}

/// Opens a default directory as an area, for `open_default` or to try the directory out.
pub fn open_directory_of(argument: &SwapArgument) -> Result<Area, Failure> {
    match metadata(&argument.path)? {
        metadata if metadata.is_dir() => open_directory(argument),
        _ => Err(Failure::new(format!("{} is not a directory", argument.path.display()))
            .fix("name a directory on a disk: --swap DIRECTORY")),
    }
}

fn metadata(path: &Path) -> Result<fs::Metadata, Failure> {
    fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => missing(path),
        _ => not_seen(path, &error),
    })
}

fn missing(path: &Path) -> Failure {
    let name = quoted(path);
    let failure = Failure::new(format!("swap path {} does not exist", path.display()));
    let bytes = path.as_os_str().as_bytes();
    let end = bytes.iter().position(|byte| b",;".contains(byte));
    if end.is_some_and(|end| Path::new(OsStr::from_bytes(&bytes[..end])).exists()) {
        return failure
            .because("it looks like several areas")
            .fix("give each its own: --swap A --swap B, or FARPAGE_SWAP='A;B'");
    }
    failure.fix(format!(
        "make a directory (`mkdir -p {name}`) or a swap file (`fallocate -l 8G {name} && chmod 600 {name} && mkswap {name}`)"
    ))
}

fn not_seen(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("swap path {} can't be looked at: {error}", path.display()));
    match error.kind() {
        io::ErrorKind::PermissionDenied => failure
            .because("a directory on its path is closed to this user")
            .fix("name a place of your own: --swap DIRECTORY"),
        _ => failure.fix(FIX_ANOTHER_PLACE),
    }
}

fn open(argument: &SwapArgument, opened: &[Area]) -> Result<Area, Failure> {
    let path = &argument.path;
    let metadata = metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return open_directory(argument);
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Failure::new(format!("swap path {} is no place for swap", path.display()))
            .because("it is neither a directory, nor a file, nor a block device")
            .fix("name a directory on a disk, for example --swap /var/tmp"));
    }
    if opened.iter().any(|area| area.kind != Kind::Temporary && is_same(&area.file, &metadata)) {
        return Err(Failure::new(format!("swap path {} is given twice", path.display())).fix("name it once"));
    }
    if kernel_swap::is_on(&metadata) {
        let name = quoted(path);
        return Err(in_use(path, "the kernel").fix(format!("take it away from the kernel: swapoff {name}")));
    }
    // The lock is taken before the content is read. Otherwise content that another Farpage is writing could
    // pass for a header, or for damage.
    let locked = || {
        let file = open_for_swap(path, kind.is_block_device())?;
        take(&file, path).map(|()| file)
    };
    if kind.is_block_device() {
        return prepared::open_device(argument, locked()?);
    }
    prepared::open_file(argument, locked()?)
}

fn is_same(file: &File, other: &fs::Metadata) -> bool {
    file.metadata().is_ok_and(|one| (one.dev(), one.ino()) == (other.dev(), other.ino()))
}

fn open_for_swap(path: &Path, exclusive: bool) -> Result<File, Failure> {
    // O_EXCL without O_CREAT makes a block device that is mounted or otherwise in use answer EBUSY.
    let flags = if exclusive { libc::O_EXCL } else { 0 };
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map_err(|error| {
        if error.raw_os_error() == Some(libc::EBUSY) {
            in_use(path, "the system")
                .fix(format!("`lsblk {}` shows what holds it; free it, or name another", quoted(path)))
        } else {
            not_writable(path, &error)
        }
    })
}

fn not_writable(path: &Path, error: &io::Error) -> Failure {
    let name = path.display();
    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
        return Failure::new(format!("swap path {name} can't be opened: {error}"))
            .because("no file descriptor is free")
            .fix(FIX_DESCRIPTORS);
    }
    let failure = Failure::new(format!("swap path {name} is not writable: {error}"));
    match error.raw_os_error() {
        Some(libc::EROFS) => failure
            .because("its file system is mounted read-only")
            .fix("name a directory on another disk: --swap DIRECTORY"),
        Some(libc::EACCES | libc::EPERM) => failure.because("its permissions exclude this user").fix(
            format!("`ls -ld {}` shows who may; name a place of your own: --swap DIRECTORY", quoted(path)),
        ),
        Some(libc::ENOENT | libc::EOPNOTSUPP) => {
            failure.because("its file system takes no files").fix(FIX_ANOTHER_PLACE)
        }
        _ => failure.fix(FIX_ANOTHER_PLACE),
    }
}

fn in_use(path: &Path, owner: &str) -> Failure {
    Failure::new(format!("swap path {} is already in use", path.display()))
        .because(format!("{owner} is using it"))
}

fn take(file: &File, path: &Path) -> Result<(), Failure> {
    // The lock is exclusive first, to find out whether the area is free. Then it is shared: programs can hold
    // it as well, and keep other runs out should this process be killed.
    for lock in [Lock::Exclusive, Lock::Shared] {
        // Not every file system turns an exclusive lock into a shared one in one step. A run that loses the
        // lock meanwhile gives up.
        let locked = if lock == Lock::Exclusive { lock_soon(file, lock) } else { sys::lock(file, lock) };
        match locked {
            Ok(true) => {}
            Ok(false) => {
                return Err(in_use(path, "another farpage, or a program under one,").fix(format!(
                    "`fuser -v {}` shows who; give each run an area of its own",
                    quoted(path)
                )));
            }
            Err(error) => {
                return Err(Failure::new(format!("swap path {} can't be locked: {error}", path.display()))
                    .because("most likely its file system has no locks")
                    .fix("name a directory on a local disk: --swap DIRECTORY"));
            }
        }
    }
    Ok(())
}

/// Locks the file, and retries for a while if the lock is held. The kernel gives back a program's io_uring,
/// and with it the files, only some time after the program has ended: 10 to 32 ms later.
fn lock_soon(file: &File, lock: Lock) -> io::Result<bool> {
    let give_up = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match sys::lock(file, lock) {
            Ok(false) if Instant::now() < give_up => std::thread::sleep(LOCK_WAIT_MAX / 50),
            result => return result,
        }
    }
}

// ---- directories ---------------------------------------------------------------------------------------

fn open_directory(argument: &SwapArgument) -> Result<Area, Failure> {
    let path = &argument.path;
    let directory = File::open(path).map_err(|error| not_writable(path, &error))?;
    let file_system = disk_of(&directory, path)?;
    let file = temporary_file(path).map_err(|error| not_writable(path, &error))?;
    growing(argument, file, file_system, Kind::Temporary)
}

fn disk_of(file: &File, path: &Path) -> Result<FileSystem, Failure> {
    let file_system = sys::file_system(file).map_err(|error| {
        Failure::new(format!("the file system of {} is unknown: {error}", path.display()))
            .fix(FIX_ANOTHER_PLACE)
    })?;
    if file_system.is_memory() {
        return Err(Failure::new(format!("swap path {} is on {}", path.display(), file_system.name()))
            .because("that is memory itself: pages moved there would free nothing")
            .fix("name a directory on a disk, for example --swap /var/tmp")
            .fix("use compressed memory only: --no-disk"));
    }
    Ok(file_system)
}

/// Makes a file without a name, or a named file whose name is removed at once where the file system
/// has no unnamed files.
fn temporary_file(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    // Without O_EXCL, which would forbid opening the file again below /proc.
    match options.clone().custom_flags(libc::O_TMPFILE).open(directory) {
        Err(error) if is_unsupported(&error) => {}
        result => return result,
    }
    options.create_new(true);
    for attempt in 0.. {
        let path = directory.join(format!(".farpage-{}-{attempt}", std::process::id()));
        match options.open(&path) {
            Ok(file) => return fs::remove_file(&path).map(|()| file),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("the loop ends with an error after 100 attempts")
}

/// Whether an error means that a file system has no O_TMPFILE. Old kernels take the flag for O_DIRECTORY.
pub fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL | libc::ENOENT))
}

/// Makes an area that takes space on the disk as it needs the space.
fn growing(argument: &SwapArgument, file: File, disk: FileSystem, kind: Kind) -> Result<Area, Failure> {
    let disk_reserve_bytes = disk.bytes / 100 * DISK_RESERVE_PERCENT;
    let slots =
        slots_to_grow(argument, disk, disk_reserve_bytes, sys::resource_limit(sys::Resource::FileSize))?;
    let less =
        "a tenth of its disk stays free, a file may be as large as `ulimit -f` says, and an area 1 TiB";
    let warning = argument.bytes.and_then(|asked| cut(&argument.path, slots, asked, less));
    Ok(Area {
        file,
        path: argument.path.clone(),
        kind,
        slots,
        place: Placement::default(),
        priority: 0,
        grows: true,
        discards: false,
        discards_first: false,
        bad_slots: Vec::new(),
        disk_reserve_bytes,
        places: None,
        warning,
        mark: None,
    })
}

/// Returns a warning if less of an area is used than the user would expect.
fn cut(path: &Path, slots: u32, expected_bytes: u64, why: &str) -> Option<String> {
    let bytes = u64::from(slots) * PAGE_BYTES as u64;
    (bytes < expected_bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64).then(|| {
        format!("of swap path {} {} are used, not {}: {why}", path.display(), iec(bytes), iec(expected_bytes))
    })
}

/// Joins several warnings into one.
fn together(warnings: impl IntoIterator<Item = Option<String>>) -> Option<String> {
    warnings.into_iter().flatten().reduce(|one, other| format!("{one}; {other}"))
}

fn slots_to_grow(
    argument: &SwapArgument,
    disk: FileSystem,
    reserve: u64,
    file_size_max: Option<u64>,
) -> Result<u32, Failure> {
    let name = argument.path.display();
    let available = disk.available.saturating_sub(reserve);
    if available < GROWTH_BYTES_MIN {
        return Err(Failure::new(format!("disk full: there is no room for swap in {name}"))
            .because(format!(
                "{} of {} are free; Farpage leaves {} ({DISK_RESERVE_PERCENT} %) to others and needs {} more",
                iec(disk.available),
                iec(disk.bytes),
                iec(reserve),
                iec(GROWTH_BYTES_MIN)
            ))
            .fix("free some room, or name another disk: --swap DIRECTORY"));
    }
    let bytes = argument.bytes.unwrap_or(u64::MAX).min(available);
    // Writing beyond RLIMIT_FSIZE would kill the program by SIGXFSZ.
    let bytes = bytes.min(file_size_max.unwrap_or(u64::MAX));
    let slots = (bytes / PAGE_BYTES as u64).min(u64::from(SLOTS_PER_AREA_MAX)) as u32;
    if slots < SLOTS_MIN {
        let cause = match file_size_max {
            Some(limit) if limit / PAGE_BYTES as u64 == u64::from(slots) => {
                "the limit on file sizes (ulimit -f) is lower"
            }
            _ => "the size given is lower",
        };
        return Err(too_small(&argument.path, u64::from(slots)).because(cause));
    }
    Ok(slots)
}

fn too_small(path: &Path, pages: u64) -> Failure {
    Failure::new(format!("swap path {} is too small: {pages} pages", path.display())).fix(format!(
        "give it at least {SLOTS_MIN} pages ({}); 8G is a good start",
        iec(u64::from(SLOTS_MIN) * PAGE_BYTES as u64)
    ))
}

/// Whether the file system below `path` supports direct I/O, without the page cache.
pub fn has_direct_io(directory: &Path) -> bool {
    // A second descriptor of the same unnamed file. A file system without direct I/O refuses
    // O_DIRECT at open.
    temporary_file(directory).is_ok_and(|file| {
        use std::os::fd::AsRawFd;
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(again).is_ok()
    })
}

/// Whether the file system below `path` makes files without a name.
pub fn has_unnamed_files(directory: &Path) -> bool {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(directory).is_ok()
}

/// Returns the path cut to at most `bytes` - 1 bytes, so that a NUL fits behind it in the session.
pub fn name_bytes(path: &Path, bytes: usize) -> &[u8] {
    let name: &OsStr = path.as_os_str();
    &name.as_bytes()[..name.len().min(bytes - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::units::NodeId;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    fn argument(path: &Path, bytes: Option<u64>) -> SwapArgument {
        SwapArgument { path: path.into(), bytes, ..SwapArgument::default() }
    }

    /// A directory on a disk: /tmp may be memory.
    fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in("/var/tmp").unwrap()
    }

    /// Writes what mkswap writes for `pages` pages, into a file of `in_file` pages.
    fn swap_file(directory: &Path, name: &str, pages: u32, in_file: u64) -> PathBuf {
        let path = directory.join(name);
        let file = File::create(&path).unwrap();
        file.write_all_at(&vec![0; in_file as usize * PAGE_BYTES], 0).unwrap();
        for (at, word) in [(1024, 1), (1028, pages - 1)] {
            file.write_all_at(&u32::to_ne_bytes(word), at).unwrap();
        }
        file.write_all_at(b"SWAPSPACE2", 4086).unwrap();
        path
    }

    #[test]
    fn directory_gives_an_unnamed_private_file_that_can_be_opened_again() {
        use std::os::fd::AsRawFd;
        let place = directory();
        let area = open(&argument(place.path(), Some(1 << 20)), &[]).unwrap();
        let metadata = area.file.metadata().unwrap();
        assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        assert_eq!((area.slots, area.grows, area.kind), (256, true, Kind::Temporary));
        assert_eq!(area.places, None);
        assert!(area.disk_reserve_bytes > 0);
        let again = format!("/proc/self/fd/{}", area.file.as_raw_fd());
        OpenOptions::new().read(true).write(true).open(again).unwrap();
    }

    #[test]
    fn swap_file_is_taken_with_its_size_and_locked() {
        let place = directory();
        let path = swap_file(place.path(), "swap", 100, 100);
        let first = open(&argument(&path, None), &[]).unwrap();
        assert_eq!((first.slots, first.kind, first.bytes()), (100, Kind::SwapFile, 99 * 4096));
        let places = first.places.as_ref().expect("/var/tmp is on a file system that says where files lie");
        assert!(!first.grows && (1..=100).contains(&places.extents.len()) && places.span_bytes >= 99 * 4096);
        let second = open(&argument(&path, None), &[]).unwrap_err().to_string();
        assert!(second.contains("already in use"), "{second}");
        drop(first);
        assert_eq!(open(&argument(&path, Some(50 * 4096)), &[]).unwrap().slots, 50);
    }

    #[test]
    fn swap_file_with_a_hole_among_the_slots_used_is_refused() {
        let place = directory();
        let path = swap_file(place.path(), "swap", 100, 100);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(80 * 4096).and_then(|()| file.set_len(100 * 4096)).unwrap();
        let message = open(&argument(&path, None), &[]).unwrap_err().to_string();
        assert!(message.contains("has holes") && message.contains("fallocate -l 409600"), "{message}");
        // The size that is asked for ends before the hole.
        assert_eq!(open(&argument(&path, Some(80 * 4096)), &[]).unwrap().slots, 80);
        assert!(open(&argument(&path, Some(81 * 4096)), &[]).is_err());
    }

    #[test]
    fn same_file_twice_is_said_as_such() {
        let place = directory();
        let path = swap_file(place.path(), "swap", 100, 100);
        let message = open_all(&[argument(&path, None), argument(&path, None)], &Machine::this())
            .unwrap_err()
            .to_string();
        assert!(message.contains("given twice"), "{message}");
    }

    #[test]
    fn refused_files_are_left_as_they_are() {
        let place = directory();
        let text = place.path().join("text");
        fs::write(&text, "precious").unwrap();
        let zeros = place.path().join("zeros");
        File::create(&zeros).unwrap().set_len(1 << 20).unwrap();
        for (path, words) in [
            (text.clone(), "holds something else"),
            (zeros, "holds something else"),
            (swap_file(place.path(), "short", 100, 99), "cut off"),
            (swap_file(place.path(), "small", 9, 9), "too small"),
            (place.path().join("missing"), "does not exist"),
            ("/dev/null".into(), "no place for swap"),
            ("/dev/shm".into(), "is on tmpfs"),
        ] {
            let message = open(&argument(&path, None), &[]).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
        assert_eq!(fs::read(&text).unwrap(), b"precious");
    }

    #[test]
    fn place_that_can_not_be_looked_at_has_a_fix() {
        let text = |errno| not_seen(Path::new("/x"), &io::Error::from_raw_os_error(errno)).to_string();
        let closed = text(libc::EACCES);
        assert!(closed.contains("closed to this user") && closed.contains("fix: "), "{closed}");
        let broken = text(libc::EIO);
        assert!(!broken.contains("closed to this user") && broken.contains("--no-disk"), "{broken}");
    }

    #[test]
    fn file_larger_than_its_header_is_used_as_far_as_the_header_says() {
        let place = directory();
        let path = swap_file(place.path(), "swap", 100, 200);
        assert_eq!(open(&argument(&path, None), &[]).unwrap().slots, 100);
        assert!(open(&argument(&path, Some(101 * 4096)), &[]).is_err());
        assert!(open(&argument(&path, Some(9 * 4096)), &[]).is_err());
    }

    /// Others who could write to the file weren't mentioned, nor was an owner who could read it.
    #[test]
    fn file_that_others_can_use_is_told_with_the_command_that_closes_it() {
        let place = directory();
        let path = swap_file(place.path(), "swap", 100, 100);
        let name = path.display().to_string();
        let warning = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            open(&argument(&path, None), &[]).unwrap().warning.unwrap_or_default()
        };
        for (mode, words) in [
            (0o644, "can be read by others (mode 0644)"),
            (0o622, "can be written by others (mode 0622)"),
            (0o666, "can be read and written by others (mode 0666)"),
        ] {
            let told = warning(mode);
            assert!(told.contains(words) && told.ends_with(&format!("`chmod 600 {name}`")), "{told}");
        }
        assert_eq!((warning(0o600), warning(0o711)), (String::new(), String::new()));
        if sys::effective_user() == 0 {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            let told = warning(0o600);
            assert!(told.contains("(uid 65534)") && told.ends_with(&format!("`chown 0 {name}`")), "{told}");
        }
    }

    #[test]
    fn empty_file_grows_and_is_empty_afterwards() {
        let place = directory();
        let path = place.path().join("empty");
        File::create(&path).unwrap();
        let area = open(&argument(&path, Some(1 << 20)), &[]).unwrap();
        assert_eq!((area.kind, area.slots, area.grows), (Kind::EmptyFile, 256, true));
        assert!(area.warning.is_some(), "the file can be read by others");
        area.file.write_all_at(b"secret", 4096).unwrap();
        assert_eq!(area.close(), None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    /// An area with a page in it, in a file that was empty, and the file as an engine holds it.
    fn in_use_by_an_engine(path: &Path) -> (Area, File) {
        File::create(path).unwrap();
        let area = open(&argument(path, Some(1 << 20)), &[]).unwrap();
        area.file.write_all_at(b"secret", 4096).unwrap();
        let others = File::open(path).unwrap();
        assert!(sys::lock(&others, Lock::Shared).unwrap());
        (area, others)
    }

    /// The supervisor may have been killed, or end a moment later than the program. The next run
    /// must not be refused.
    #[test]
    fn next_run_empties_what_a_run_has_left() {
        let place = directory();
        let path = place.path().join("empty");
        let (mut killed, others) = in_use_by_an_engine(&path);
        assert_eq!(killed.prepare(), Ok(()));
        drop(killed);
        let in_use = open(&argument(&path, Some(1 << 20)), &[]).err().unwrap().to_string();
        assert!(in_use.contains("another farpage"), "{in_use}");
        drop(others);
        let mut late = open(&argument(&path, Some(1 << 20)), &[]).unwrap();
        assert!(fs::metadata(&path).unwrap().len() > 0, "this may be no run");
        assert_eq!((late.kind, late.prepare()), (Kind::EmptyFile, Ok(())));
        // The lock is gone before the file is emptied.
        late.file.unlock().unwrap();
        let mut next = open(&argument(&path, Some(1 << 20)), &[]).unwrap();
        assert_eq!((next.prepare(), late.close()), (Ok(()), None), "the next one has it");
        assert_eq!(fs::metadata(&path).unwrap().len(), PAGE_BYTES as u64);
        assert_eq!(next.close(), None);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn what_no_run_has_left_is_never_emptied() {
        let place = directory();
        let path = place.path().join("file");
        for content in [&b"something of the user's"[..], &[0; 2 * PAGE_BYTES]] {
            fs::write(&path, content).unwrap();
            let refused = open(&argument(&path, Some(1 << 20)), &[]).err().unwrap().to_string();
            assert!(refused.contains("holds something else"), "{refused}");
            assert_eq!(fs::read(&path).unwrap(), content);
        }
        let mut page = [0; PAGE_BYTES];
        page[PAGE_BYTES - 10..].copy_from_slice(b"FARPAGE-01");
        fs::write(&path, page).unwrap();
        let refused = open(&argument(&path, Some(1 << 20)), &[]).err().unwrap().to_string();
        assert!(
            refused.contains("before this machine was started") && refused.contains("truncate -s 0"),
            "{refused}"
        );
        assert_eq!(fs::read(&path).unwrap(), page);
    }

    /// An empty file must not be emptied under a process that the program has left in the background: the
    /// process would lose its pages.
    #[test]
    fn empty_file_that_is_still_used_is_left_as_it_is() {
        let place = directory();
        let path = place.path().join("empty");
        let (area, _others) = in_use_by_an_engine(&path);
        let told = area.close().unwrap();
        assert!(told.contains("truncate -s 0"), "{told}");
        assert_eq!(fs::metadata(&path).unwrap().len(), 4096 + 6);
    }

    #[test]
    fn priorities_are_given_or_count_down() {
        let place = directory();
        let mut arguments = vec![argument(place.path(), Some(1 << 20)); 3];
        arguments[1].priority = Some(5);
        let mut areas = open_all(&arguments, &Machine::this()).unwrap();
        for (order, expected) in [
            (AreaOrder::Global, [-1, 5, -2]),
            (AreaOrder::Numa, [-2, 5, -3]),
            (AreaOrder::RoundRobin, [-1, 5, -1]),
            (AreaOrder::Weighted, [-1, 5, -1]),
        ] {
            number(&mut areas, order);
            assert_eq!(areas.iter().map(|area| area.priority).collect::<Vec<_>>(), expected, "{order:?}");
        }
    }

    #[test]
    fn discard_is_for_files_that_grow_and_refused_for_prepared_ones() {
        let place = directory();
        let with =
            |path: &Path, discard| SwapArgument { discard: Some(discard), ..argument(path, Some(1 << 20)) };
        let open = |path: &Path, discard| open_all(&[with(path, discard)], &Machine::this());
        assert!(open(place.path(), Discard::Both).unwrap()[0].discards);
        assert!(open(place.path(), Discard::Pages).unwrap()[0].discards);
        assert!(!open(place.path(), Discard::Once).unwrap()[0].discards);
        let prepared = swap_file(place.path(), "swap", 300, 300);
        let message = open(&prepared, Discard::Both).unwrap_err().to_string();
        assert!(message.contains("holes") && message.contains("leave discard out"), "{message}");
    }

    #[test]
    fn node_is_the_users_or_the_disks_and_must_be_there() {
        let place = directory();
        let machine = Machine::below("/no/such");
        let with = |node| SwapArgument { node, ..argument(place.path(), Some(1 << 20)) };
        let open = |node: Option<u8>| open_all(&[with(node.map(NodeId))], &machine);
        assert_eq!(open(None).unwrap()[0].place.node(), None);
        assert_eq!(open(Some(0)).unwrap()[0].place.node(), Some(NodeId(0)));
        let message = open(Some(3)).unwrap_err().to_string();
        assert!(message.contains("no node 3") && message.contains("has node 0"), "{message}");
    }

    #[test]
    fn default_directory_is_the_first_one_on_a_disk() {
        let place = directory();
        let with = |swap_dir: Option<&str>, tmp: Option<&str>| {
            open_default(
                |name| match name {
                    "FARPAGE_SWAP_DIR" => swap_dir.map(OsString::from),
                    _ => tmp.map(OsString::from),
                },
                &Machine::this(),
            )
        };
        let own = place.path().to_str().unwrap();
        assert_eq!(with(Some(own), None).unwrap().path, place.path());
        assert_eq!(with(None, Some("/dev/shm")).unwrap().path, Path::new("/var/tmp"));
        assert_eq!(with(None, Some("/no/such")).unwrap().path, Path::new("/var/tmp"));
        assert!(with(Some("/dev/shm"), None).is_err() && with(Some("/no/such"), None).is_err());
    }

    fn disk(bytes: u64, available: u64) -> FileSystem {
        let mut disk = sys::file_system(&File::open("/").unwrap()).unwrap();
        (disk.bytes, disk.available) = (bytes, available);
        disk
    }

    #[test]
    fn growing_leaves_the_reserve_and_says_when_the_disk_is_full() {
        let with = |available, asked, limit| {
            slots_to_grow(&argument(Path::new("/x"), asked), disk(100 << 30, available), 10 << 30, limit)
        };
        assert_eq!(with(11 << 30, None, None).unwrap(), (1 << 30) / 4096);
        assert_eq!(with(11 << 30, Some(1 << 20), None).unwrap(), 256);
        assert_eq!(with(11 << 30, None, Some(1 << 20)).unwrap(), 256);
        assert_eq!(with(u64::MAX, None, None).unwrap(), SLOTS_PER_AREA_MAX);
        assert!(with(11 << 30, Some(36_864), None).is_err() && with(11 << 30, None, Some(4096)).is_err());
        let full = with((10 << 30) + GROWTH_BYTES_MIN - 1, None, None).unwrap_err().to_string();
        assert!(full.contains("disk full") && full.contains("10.1 GiB of 100 GiB"), "{full}");
    }

    /// The user must learn that an area is smaller than asked for.
    #[test]
    fn area_that_is_smaller_than_asked_for_says_so() {
        let place = directory();
        let warning = |bytes| open(&argument(place.path(), Some(bytes)), &[]).unwrap().warning;
        assert_eq!(warning(1 << 20), None);
        assert_eq!(warning((1 << 20) + 100), None);
        let text = warning(1 << 60).unwrap();
        assert!(text.contains("are used, not 1 EiB") && text.contains("stays free"), "{text}");
        let tib = |count: u64| cut(Path::new("/x"), SLOTS_PER_AREA_MAX, count << 40, "why");
        assert_eq!(tib(1), None);
        assert!(tib(2).unwrap().contains("1 TiB are used, not 2 TiB: why"));
    }
}

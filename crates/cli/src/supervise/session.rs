//! The memory that the supervisor and the programs share. The memory is made, laid out and filled in here,
//! before the first program starts. The layout is `farpage_runtime::session`'s. Behind the head follow the
//! tables of each area: its extents, the list of its bad slots and one word for each of its clusters.
// UNSAFETY: shared memory has no type. Here the memory gets a type, once, and is handed out as a reference.

use crate::areas::{self, Area, Kind};
use crate::host::sys::{self, SharedMemory};
use crate::show;
use crate::text::failure::Failure;
use crate::text::numbers::iec;
use farpage_core::areas::Extents;
use farpage_core::areas::extents::{Builder, Extent, Head};
use farpage_core::memory::Region;
use farpage_core::units::CLUSTER_SLOTS;
use farpage_runtime::session::head::HeadCopy;
use farpage_runtime::session::record::SUPERVISOR_BYTE;
use farpage_runtime::session::{
    AreaDescription, ENDED, MAGIC, Notice, PATH_BYTES, ProcessRecord, Session, Settings,
};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// The shared memory of one run.
pub struct Shared {
    memory: SharedMemory,
    /// The head as the supervisor has written it. A head that still equals this copy is undamaged.
    written: Box<HeadCopy>,
}

/// Offsets of an area's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tables {
    extents_offset: usize,
    bad_offset: usize,
    owners_offset: usize,
}

/// The numbers that decide how large an area's tables are.
#[derive(Clone, Copy)]
struct Sizes {
    slots: u32,
    bad: usize,
    extents: usize,
}

impl Sizes {
    fn of(area: &Area) -> Sizes {
        Sizes { slots: area.slots, bad: area.bad_slots.len(), extents: extents_of(area).len() }
    }
}

fn extents_of(area: &Area) -> &[Extent] {
    area.places.as_ref().map_or(&[], |places| &places.extents)
}

/// Least RLIMIT_FSIZE in bytes with which a session can be made: the head, and the tables of an area that can
/// exist under that limit.
pub const FILE_BYTES_MIN: u64 = size_of::<Session>() as u64 + (64 << 10);

/// Places the tables behind the head: extents in double words, the other tables in words. Returns the tables
/// and the size of the whole.
fn lay_out(areas: impl Iterator<Item = Sizes>) -> (Vec<Tables>, usize) {
    let mut end = size_of::<Session>();
    let tables = areas
        .map(|Sizes { slots, bad: bad_count, extents }| {
            let extents_offset = end.next_multiple_of(align_of::<u64>());
            let bad_offset =
                (extents_offset + Extents::bytes(extents as u32)).next_multiple_of(align_of::<u32>());
            let owners_offset = bad_offset + bad_count * size_of::<u32>();
            end = owners_offset + slots.div_ceil(CLUSTER_SLOTS) as usize * size_of::<u32>();
            Tables { extents_offset, bad_offset, owners_offset }
        })
        .collect();
    (tables, end)
}

impl Shared {
    /// Makes the session's memory and fills it.
    pub fn new(settings: Settings, areas: &[Area]) -> Result<Shared, Failure> {
        let (tables, bytes) = lay_out(areas.iter().map(Sizes::of));
        // Making the memory larger than RLIMIT_FSIZE would kill this process by SIGXFSZ.
        if let Some(limit) =
            sys::resource_limit(sys::Resource::FileSize).filter(|limit| *limit < bytes as u64)
        {
            return Err(Failure::new(format!("files may not be larger than {} here", iec(limit)))
                .because(format!(
                    "Farpage needs {} of shared memory, which counts as a file",
                    iec(bytes as u64)
                ))
                .fix("ulimit -f unlimited"));
        }
        let memory = SharedMemory::new(&session_name(std::process::id()), bytes);
        let held = memory.and_then(|memory| {
            sys::lock_byte(memory.file(), SUPERVISOR_BYTE, true)?;
            Ok(memory)
        });
        let memory = held.map_err(|error| {
            Failure::new(format!("shared memory can't be made: {error}"))
                .because("no memory, or no descriptor is free")
                .fix("look at `ulimit -n` and the cgroup's limit")
        })?;
        // SAFETY: `lay_out` made the memory at least as large as a `Session`; it is page-aligned and zeroed,
        // and all-zero bytes are a valid `Session`. No other process knows of it yet, and no other
        // reference into it exists, so this one is exclusive until it ends with this function.
        let session = unsafe { &mut *memory.start().cast::<Session>() };
        let head = session.head.get_mut();
        head.magic = MAGIC;
        head.bytes = bytes as u64;
        head.supervisor_pid = std::process::id();
        head.pid_namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
        head.areas_count = areas.len() as u32;
        head.settings = settings.into();
        for ((description, area), tables) in head.areas.iter_mut().zip(areas).zip(&tables) {
            describe(description, area, tables);
            // SAFETY: `lay_out` gave this area's extents memory there: aligned to 8 bytes, zeroed, and behind
            // the head that `session` refers to. No other reference points into it.
            description.extents = unsafe { build(extents_of(area), device_of(area), &memory, tables) };
        }
        for (area, tables) in areas.iter().zip(&tables) {
            for (n, bad) in area.bad_slots.iter().enumerate() {
                // SAFETY: `lay_out` gave this area space for all its bad slots at `bad_offset`, aligned for
                // words, behind the head that `session` refers to.
                unsafe { memory.start().add(tables.bad_offset).cast::<u32>().add(n).write(*bad) };
            }
        }
        let mut written = Box::new(HeadCopy::EMPTY);
        session.head.copy_to(&mut written);
        Ok(Shared { memory, written })
    }

    /// Returns the session as the programs see it.
    pub fn session(&self) -> &Session {
        // SAFETY: the memory is mapped as long as `self` lives, and can't be shrunk. Any bytes are valid for
        // a `Session`, no matter which process wrote them.
        unsafe { &*self.memory.start().cast::<Session>() }
    }

    /// Returns the memory, as any process may map it.
    #[cfg(test)]
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Notes that the program has ended. Processes that it has left behind go on after this supervisor's end.
    pub fn end(&self) {
        // Ordering: Release pairs with the Acquire in `Membership::was_supervisor_killed`.
        self.session().ended.store(ENDED, Ordering::Release);
    }

    /// Whether the process lives that holds the record of this index.
    pub fn is_alive(&self, record: usize) -> bool {
        sys::is_locked(self.memory.file(), record as u64)
    }

    /// Returns the memory's descriptor, in which processes hold the locks of their records.
    pub fn file(&self) -> &fs::File {
        self.memory.file()
    }

    /// Whether processes have leased clusters of any area. Dead processes count, too.
    pub fn has_leases(&self) -> bool {
        self.written.areas().iter().any(|area| show::leased(&self.memory, area) > 0)
    }

    /// Returns the present budget as it stands in the session, in bytes; 0 if it was never set.
    pub fn ram_now(&self) -> u64 {
        self.session().ram_now.load(Ordering::Relaxed)
    }

    /// Sets the present budget to `bytes`.
    pub fn set_ram_now(&self, bytes: u64) {
        self.session().ram_now.store(bytes, Ordering::Relaxed);
    }

    /// Has all processes of the run end, as if the supervisor had been killed.
    pub fn give_up(&self) {
        // An error doesn't matter: the lock is held, and the end of this process gives it up anyway.
        let _ = sys::lock_byte(self.memory.file(), SUPERVISOR_BYTE, false);
    }

    /// Returns what is wrong with the session, if a process has written what no process that keeps
    /// to the rules writes.
    pub fn damage(&self) -> Option<&'static str> {
        let session = self.session();
        if !session.head.is_as(&self.written) {
            return Some("its settings, which no program may change, are not what they were");
        }
        let is_damaged = session.processes.iter().any(is_damaged);
        is_damaged.then_some("it says of a process what no process can be")
    }

    /// Returns the path by which programs open the session.
    pub fn path(&self) -> String {
        descriptor_path(self.memory.file())
    }
}

/// Returns the session that a process has made, among its open files. A supervisor has the sessions of the
/// user's other runs open, too.
pub fn own_session(proc: &Path, pid: u32) -> io::Result<Option<PathBuf>> {
    let maker = number_in_its_namespace(proc, pid).unwrap_or(pid);
    let name = [b"/memfd:", session_name(maker).as_bytes(), b" (deleted)"].concat();
    for entry in fs::read_dir(proc.join(format!("{pid}/fd")))? {
        let path = entry?.path();
        if fs::read_link(&path).is_ok_and(|link| link.as_os_str().as_bytes() == name) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Returns the supervisor that made the session which a process has mapped for writing, by its id in its pid
/// namespace, and the session's inode. Each process of a run has the session mapped so, whatever its
/// variables are. `farpage show` only reads.
pub fn mapped_session(proc: &Path, pid: u32) -> io::Result<Option<(u32, u64)>> {
    let maps = fs::read(proc.join(format!("{pid}/maps")))?;
    let session = |line: &[u8]| {
        let mut fields = str::from_utf8(line).ok()?.split_ascii_whitespace().skip(1);
        fields.next().filter(|access| access.starts_with("rw"))?;
        let mut fields = fields.skip(2);
        let (inode, name) = (fields.next()?.parse().ok()?, fields.next()?);
        let maker = name.strip_prefix("/memfd:")?.strip_prefix(SESSION_NAME)?.parse().ok()?;
        Some((maker, inode))
    };
    Ok(maps.split(|byte| *byte == b'\n').find_map(session))
}

const SESSION_NAME: &str = "farpage-session-";

/// Returns the memory's name, which says who has made the session: the supervisor with that id in its pid
/// namespace. No program can write over a name.
fn session_name(maker: u32) -> CString {
    CString::new(format!("{SESSION_NAME}{maker}")).expect("a number has no NUL")
}

/// Returns the id of a process in its own pid namespace.
fn number_in_its_namespace(proc: &Path, pid: u32) -> Option<u32> {
    let status = fs::read_to_string(proc.join(format!("{pid}/status"))).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

/// Returns the session in another run's memory, if the memory is large enough for one. The content
/// need not make sense.
pub fn session_in(memory: &SharedMemory) -> Option<&Session> {
    let is_large_enough = memory.bytes() >= size_of::<Session>();
    // SAFETY: the memory is as large as a `Session`, mapped as long as `memory` lives, and can't be shrunk.
    // Any bytes are valid, and everything that changes is atomic.
    is_large_enough.then(|| unsafe { &*memory.start().cast::<Session>() })
}

/// Returns the path by which other processes of this user open one of our files.
fn descriptor_path(file: &impl AsRawFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn describe(description: &mut AreaDescription, area: &Area, tables: &Tables) {
    let path = descriptor_path(&area.file);
    description.open_path[..path.len()].copy_from_slice(path.as_bytes());
    let name = areas::name_bytes(&area.path, PATH_BYTES);
    description.name[..name.len()].copy_from_slice(name);
    description.slots = area.slots;
    description.priority = area.priority;
    description.place = area.place;
    description.discards = area.discards.into();
    description.is_device = (area.kind == Kind::Device).into();
    description.grows = area.grows.into();
    description.bad_count = area.bad_slots.len() as u32;
    description.bad_offset = tables.bad_offset as u64;
    description.owners_offset = tables.owners_offset as u64;
    description.extents_offset = tables.extents_offset as u64;
    description.disk_reserve_bytes = area.disk_reserve_bytes;
}

/// Puts an area's extents where programs find them. Returns their head.
///
/// # Safety
/// The extents' memory in `tables` must be zeroed, aligned to 8 bytes, and used by nobody else meanwhile.
unsafe fn build(extents: &[Extent], device: u64, memory: &SharedMemory, tables: &Tables) -> Head {
    if extents.is_empty() {
        return Head::default();
    }
    let count = extents.len() as u32;
    // SAFETY: the caller's promise, and `lay_out` has counted the bytes.
    let mut region = unsafe { Region::new(memory.start().add(tables.extents_offset), Extents::bytes(count)) };
    let mut builder = Builder::new(&mut region, count);
    extents.iter().for_each(|extent| _ = builder.add(*extent));
    let built = builder.finish(device);
    assert_eq!(built.tally().extents(), count, "neighbours that are one extent would be misread");
    built.head()
}

/// Returns the number of the device that an area lies on.
fn device_of(area: &Area) -> u64 {
    let metadata = area.file.metadata().ok();
    metadata.map_or(0, |metadata| if area.kind == Kind::Device { metadata.rdev() } else { metadata.dev() })
}

/// Whether a record has content that no program's library has written.
fn is_damaged(record: &ProcessRecord) -> bool {
    /// PID_MAX_LIMIT of Linux on 64-bit machines.
    const PID_MAX: u32 = 1 << 22;
    // Ordering: Acquire pairs with the Release in `ProcessRecord::notice`: a process that tells has
    // stored its id before.
    let notices = record.notices.load(Ordering::Acquire);
    let pid = record.pid.load(Ordering::Relaxed);
    pid > PID_MAX || notices >> Notice::ALL.len() != 0 || pid == 0 && notices != 0
}

/// Returns the text before the first NUL.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::areas::places::Places;
    use farpage_core::areas::Placement;
    use farpage_core::config::{AreaOrder, Codec, Install, IoEngine, Readahead, SlotPolicy};
    use farpage_runtime::session::UffdSource;
    use farpage_runtime::session::head::SessionHead;
    use std::os::unix::fs::FileExt;

    pub fn settings() -> Settings {
        Settings {
            ram_bytes: 256 << 20,
            pool_bytes_max: 128 << 20,
            codec: Codec::Auto,
            packs: 1,
            install: Install::Move,
            io: IoEngine::Uring,
            slots: SlotPolicy::Clusters,
            order: AreaOrder::Weighted,
            nodes: 1,
            uffd_source: UffdSource::Syscall,
            readahead: Readahead::Streams,
            page_cluster: 3,
            refuses_mlockall: 0,
            polls: 1,
        }
    }

    pub fn area(name: &str, slots: u32, bad_slots: &[u32]) -> Area {
        Area {
            file: tempfile::tempfile().unwrap(),
            path: name.into(),
            kind: Kind::Temporary,
            slots,
            place: Placement::default(),
            priority: -2,
            grows: true,
            discards: false,
            discards_first: false,
            bad_slots: bad_slots.into(),
            disk_reserve_bytes: 7,
            places: None,
            warning: None,
            mark: None,
        }
    }

    #[test]
    fn tables_follow_each_other_without_overlap() {
        let sizes = |slots, bad, extents| Sizes { slots, bad, extents };
        let (tables, end) = lay_out([sizes(512, 0, 0), sizes(513, 3, 20)].into_iter());
        let head = size_of::<Session>();
        let first = tables[0];
        assert!(first.extents_offset == head && first.bad_offset - head < 16);
        assert_eq!((first.bad_offset % 4, first.owners_offset), (0, first.bad_offset));
        let second = tables[1];
        assert!(second.extents_offset % 8 == 0 && second.extents_offset >= first.owners_offset + 4);
        assert!(second.bad_offset % 4 == 0 && second.bad_offset >= second.extents_offset + 20 * 12);
        assert_eq!((second.owners_offset, end), (second.bad_offset + 12, second.owners_offset + 8));
    }

    #[test]
    fn another_opening_sees_what_was_filled_in() {
        let areas = [area("/first", 100, &[]), area("/second", 1000, &[5, 6])];
        let shared = Shared::new(settings(), &areas).unwrap();
        let bytes = std::fs::read(shared.path()).unwrap();
        let session = shared.written.head();
        assert_eq!((session.magic, session.bytes, session.areas_count), (MAGIC, bytes.len() as u64, 2));
        let second = &session.areas[1];
        assert_eq!((text(&second.name).as_str(), second.slots, second.grows), ("/second", 1000, 1));
        let at = second.bad_offset as usize;
        assert_eq!(bytes[at..at + 8], [5, 0, 0, 0, 6, 0, 0, 0]);
        let owners = second.owners_offset as usize;
        assert_eq!((owners, bytes.len()), (at + 8, owners + 8));
        std::fs::File::options().read(true).write(true).open(text(&second.open_path)).unwrap();
    }

    /// A session of another run must not pass for the own one. Otherwise `farpage show` would print the other
    /// run's areas, and runs would count one run's memory twice.
    #[test]
    fn session_of_another_run_is_not_taken_for_its_own() {
        let own = || own_session(Path::new("/proc"), std::process::id()).unwrap();
        let number = std::process::id();
        let mut others = Vec::new();
        // Numbers that are easily taken for this process's: longer by a digit, and shorter.
        for other in [number * 10, number / 10] {
            others.push(SharedMemory::new(&session_name(other), size_of::<Session>()).unwrap());
        }
        for memory in &others {
            assert_ne!(own(), Some(descriptor_path(memory.file()).into()));
        }
        let ours = Shared::new(settings(), &[]).unwrap();
        assert!(own().is_some());
        ours.memory.file().write_all_at(&vec![0xff; size_of::<SessionHead>()], 0).unwrap();
        assert!(own().is_some(), "whatever a program has written into it");
    }

    #[test]
    fn programs_find_where_slots_lie() {
        let extents = [(0, 10, 700), (10, 30, 90), (40, 60, 300)];
        let extents = extents.map(|(slot, count, block)| Extent { slot, count, block }).to_vec();
        let places = Places { extents: extents.clone(), span_bytes: 0 };
        let areas = [area("/first", 7, &[3]), Area { places: Some(places), ..area("/second", 100, &[5]) }];
        let shared = Shared::new(settings(), &areas).unwrap();
        let session = shared.written.head();
        assert!(!session.areas[0].extents.is_known() && session.areas[1].extents.is_known());
        let offset = session.areas[1].extents_offset as usize;
        // SAFETY: built there by `Shared::new`, and not written any more.
        let found =
            unsafe { Extents::of_memory(session.areas[1].extents, shared.memory.start().add(offset)) };
        found.check();
        assert_eq!(found.iter().collect::<Vec<_>>(), extents);
        assert!(found.begins_at(areas[1].file.metadata().unwrap().dev(), 700));
    }

    #[test]
    fn name_that_is_too_long_is_cut() {
        let long = "/x".repeat(PATH_BYTES);
        let shared = Shared::new(settings(), &[area(&long, 100, &[])]).unwrap();
        assert_eq!(text(&shared.written.areas()[0].name).len(), PATH_BYTES - 1);
    }
}

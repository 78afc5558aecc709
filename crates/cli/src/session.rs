//! The memory that the supervisor and the programs share: made, laid out and filled in here, before the
//! first program starts. Its layout is `farpage::session`'s; behind the head come, for each area, the list
//! of its bad slots and one word for each of its clusters.
// UNSAFETY: shared memory has no type. It is given one here, once, and handed out as a reference.

use crate::areas::{self, Area, Kind};
use crate::failure::Failure;
use crate::numbers::iec;
use crate::sys::{self, SharedMemory};
use farpage::session::{AreaDescription, MAGIC, PATH_BYTES, Session, Settings};
use farpage_core::units::CLUSTER_SLOTS;
use std::os::fd::AsRawFd;

/// The shared memory of one run.
pub struct Shared {
    memory: SharedMemory,
}

/// Where an area's tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tables {
    bad_offset: usize,
    owners_offset: usize,
}

/// Places the tables behind the head, in whole words; and the size of it all.
fn lay_out(areas: impl Iterator<Item = (u32, usize)>) -> (Vec<Tables>, usize) {
    let mut end = size_of::<Session>();
    // The tables are words, and stay aligned because everything before them is made of words.
    const _: () = assert!(size_of::<Session>().is_multiple_of(align_of::<u32>()));
    let tables = areas
        .map(|(slots, bad_count)| {
            let bad_offset = end;
            let owners_offset = bad_offset + bad_count * size_of::<u32>();
            end = owners_offset + slots.div_ceil(CLUSTER_SLOTS) as usize * size_of::<u32>();
            Tables { bad_offset, owners_offset }
        })
        .collect();
    (tables, end)
}

impl Shared {
    /// Makes and fills it.
    pub fn new(settings: Settings, areas: &[Area]) -> Result<Shared, Failure> {
        let (tables, bytes) = lay_out(areas.iter().map(|area| (area.slots, area.bad_slots.len())));
        // Making it larger than RLIMIT_FSIZE would not fail but kill us (SIGXFSZ).
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
        let memory = SharedMemory::new(c"farpage-session", bytes).map_err(|error| {
            Failure::new(format!("shared memory can't be made: {error}"))
                .because("no memory, or no descriptor is free")
                .fix("look at `ulimit -n` and the cgroup's limit")
        })?;
        // SAFETY: `lay_out` made the memory at least as large as a `Session`; it is page-aligned and zeroed,
        // and all-zero bytes are a valid `Session`. No other process knows of it yet, and no other
        // reference into it exists, so this one is exclusive until it ends with this function.
        let session = unsafe { &mut *memory.start().cast::<Session>() };
        session.magic = MAGIC;
        session.bytes = bytes as u64;
        session.supervisor_pid = std::process::id();
        session.areas_count = areas.len() as u32;
        session.settings = settings;
        for ((description, area), tables) in session.areas.iter_mut().zip(areas).zip(&tables) {
            describe(description, area, tables);
        }
        for (area, tables) in areas.iter().zip(&tables) {
            for (n, bad) in area.bad_slots.iter().enumerate() {
                // SAFETY: `lay_out` gave this area room for all its bad slots at `bad_offset`, aligned for
                // words, behind the head that `session` refers to.
                unsafe { memory.start().add(tables.bad_offset).cast::<u32>().add(n).write(*bad) };
            }
        }
        Ok(Shared { memory })
    }

    /// What the programs see.
    pub fn session(&self) -> &Session {
        // SAFETY: initialized by `new`, mapped as long as `self` lives, and can't be shrunk. From the first
        // program's start on, only its atomics are written.
        unsafe { &*self.memory.start().cast::<Session>() }
    }

    /// Where programs open it.
    pub fn path(&self) -> String {
        descriptor_path(self.memory.file())
    }
}

/// Where other processes of this user open one of our files.
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
    description.disk_reserve_bytes = area.disk_reserve_bytes;
}

/// The text before the first NUL.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use farpage::session::UffdSource;
    use farpage_core::areas::Place;
    use farpage_core::config::{AreaOrder, Codec, Install, IoEngine, Readahead, SlotPolicy};

    pub fn settings() -> Settings {
        Settings {
            ram_bytes: 256 << 20,
            pool_bytes_max: 128 << 20,
            codec: Codec::Lz4,
            install: Install::Move,
            io: IoEngine::Uring,
            slots: SlotPolicy::Clusters,
            order: AreaOrder::Weighted,
            nodes: 1,
            uffd_source: UffdSource::Syscall,
            readahead: Readahead::Streams,
            page_cluster: 3,
        }
    }

    pub fn area(name: &str, slots: u32, bad_slots: &[u32]) -> Area {
        Area {
            file: tempfile::tempfile().unwrap(),
            path: name.into(),
            kind: Kind::Temporary,
            slots,
            place: Place::default(),
            priority: -2,
            grows: true,
            discards: false,
            bad_slots: bad_slots.into(),
            disk_reserve_bytes: 7,
            places: None,
            warning: None,
        }
    }

    #[test]
    fn tables_follow_each_other_without_overlap() {
        let (tables, end) = lay_out([(512, 0), (513, 3)].into_iter());
        let head = size_of::<Session>();
        assert_eq!(tables[0], Tables { bad_offset: head, owners_offset: head });
        assert_eq!(tables[1], Tables { bad_offset: head + 4, owners_offset: head + 4 + 12 });
        assert_eq!(end, head + 4 + 12 + 8);
    }

    #[test]
    fn another_opening_sees_what_was_filled_in() {
        let areas = [area("/first", 100, &[]), area("/second", 1000, &[5, 6])];
        let shared = Shared::new(settings(), &areas).unwrap();
        let bytes = std::fs::read(shared.path()).unwrap();
        let session = shared.session();
        assert_eq!((session.magic, session.bytes, session.areas_count), (MAGIC, bytes.len() as u64, 2));
        let second = &session.areas[1];
        assert_eq!((text(&second.name).as_str(), second.slots, second.grows), ("/second", 1000, 1));
        let at = second.bad_offset as usize;
        assert_eq!(bytes[at..at + 8], [5, 0, 0, 0, 6, 0, 0, 0]);
        let owners = second.owners_offset as usize;
        assert_eq!((owners, bytes.len()), (at + 8, owners + 8));
        std::fs::File::options().read(true).write(true).open(text(&second.open_path)).unwrap();
    }

    #[test]
    fn name_that_is_too_long_is_cut() {
        let long = "/x".repeat(PATH_BYTES);
        let shared = Shared::new(settings(), &[area(&long, 100, &[])]).unwrap();
        assert_eq!(text(&shared.session().areas[0].name).len(), PATH_BYTES - 1);
    }
}

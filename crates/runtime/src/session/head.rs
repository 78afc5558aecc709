//! The head of a session. The supervisor writes it before the first program starts, and nobody writes it
//! after that.
//!
//! Every process of a run can write to shared memory, by mistake too. So nobody works with the head where it
//! lies. Each process takes a copy when it joins, and checks the copy ([`HeadCopy::check`]). The supervisor
//! keeps the copy that it has written, and compares. A head consists of integers only, so any bytes are a
//! valid head. The check finds out whether the integers make sense.
// UNSAFETY: the head lies in memory that other processes may write. It is read as atomic words.

use crate::session::{AreaDescription, MAGIC, Session, Settings, UffdSource};
use core::cell::UnsafeCell;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering};
use farpage_core::config::{AreaOrder, Codec, Install, IoEngine, Readahead, SlotPolicy};
use farpage_core::units::{AREAS_MAX, CLUSTER_SLOTS, NODES_MAX, SLOTS_PER_AREA_MAX};
use rustix::fd::OwnedFd;

/// The part of a session that only the supervisor writes.
#[repr(C)]
pub struct SessionHead {
    /// [`MAGIC`].
    pub magic: u64,
    /// Size of the whole shared memory in bytes.
    pub bytes: u64,
    /// The pid namespace of the supervisor, as /proc numbers namespaces. 0 if that isn't known.
    pub pid_namespace: u64,
    /// The supervisor's process id.
    pub supervisor_pid: u32,
    /// Areas in `areas` that are on.
    pub areas_count: u32,
    /// The settings of the command line.
    pub settings: SettingsWords,
    /// The swap areas.
    pub areas: [AreaDescription; AREAS_MAX],
}

/// The numbers of the head that a process looks at before it joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glance {
    /// The run's budget in bytes.
    pub budget_bytes: u64,
    /// The supervisor's pid namespace.
    pub pid_namespace: u64,
    /// The supervisor's process id.
    pub supervisor_pid: u32,
}

/// Reads a [`Glance`] from the file of a session of this layout. None if the file's start isn't the head of
/// one. A program of the run may have written any numbers there.
pub fn glance_at(file: &OwnedFd) -> Option<Glance> {
    const RAM: usize = offset_of!(SessionHead, settings) + offset_of!(SettingsWords, ram_bytes);
    let mut head = [0_u8; RAM + size_of::<u64>()];
    let read = rustix::io::pread(file, &mut head, 0).ok()?;
    let word = |at: usize| Some(u64::from_ne_bytes(head.get(at..at + size_of::<u64>())?.try_into().ok()?));
    let is_whole = read == head.len() && word(offset_of!(SessionHead, magic)) == Some(MAGIC);
    let glance = || {
        Some(Glance {
            budget_bytes: word(RAM)?,
            pid_namespace: word(offset_of!(SessionHead, pid_namespace))?,
            supervisor_pid: word(offset_of!(SessionHead, supervisor_pid))? as u32,
        })
    };
    if is_whole { glance() } else { None }
}

const HEAD_WORDS: usize = size_of::<SessionHead>() / size_of::<u64>();
const _: () = assert!(
    size_of::<SessionHead>().is_multiple_of(size_of::<u64>())
        && align_of::<SessionHead>() == align_of::<u64>()
);

/// The head in shared memory.
#[repr(transparent)]
pub struct SharedHead(UnsafeCell<SessionHead>);

// SAFETY: behind a shared reference the head is read and written as atomic words only.
unsafe impl Sync for SharedHead {}

impl SharedHead {
    /// The head, to be filled in while nobody else knows of it.
    pub const fn get_mut(&mut self) -> &mut SessionHead {
        self.0.get_mut()
    }

    fn words(&self) -> &[AtomicU64; HEAD_WORDS] {
        // SAFETY: the array is as large as the head, and aligned like it (asserted above). All bytes of a
        // mapping are initialized. Atomics of integers may change under a shared reference.
        unsafe { &*self.0.get().cast() }
    }

    /// Copies the head. Words that are right already aren't written, so zeros cost no memory in a new copy.
    pub fn copy_to(&self, copy: &mut HeadCopy) {
        for (to, from) in copy.0.iter_mut().zip(self.words()) {
            let word = from.load(Ordering::Relaxed);
            if *to != word {
                *to = word;
            }
        }
    }

    /// Returns the pid namespace of the supervisor, as it stands in shared memory.
    pub fn pid_namespace(&self) -> u64 {
        self.word_at(offset_of!(SessionHead, pid_namespace))
    }

    /// Returns the budget in bytes, as it stands in shared memory.
    pub fn ram_bytes(&self) -> u64 {
        self.word_at(offset_of!(SessionHead, settings) + offset_of!(SettingsWords, ram_bytes))
    }

    /// Returns where each area's words are that say which process holds which cluster: the offset in the
    /// session, and the number of clusters. The numbers are those in shared memory. A table that doesn't lie
    /// inside of a session of `bytes` bytes is left out.
    pub fn holder_tables(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
        const WORD: usize = size_of::<u32>();
        let count = self.half_at(offset_of!(SessionHead, areas_count)) as usize;
        let table = move |area: usize| {
            let area = offset_of!(SessionHead, areas) + area * size_of::<AreaDescription>();
            let clusters = self.half_at(area + offset_of!(AreaDescription, slots)).div_ceil(CLUSTER_SLOTS);
            let offset = self.word_at(area + offset_of!(AreaDescription, owners_offset));
            let length = u64::from(clusters) * WORD as u64;
            lies_inside(offset, length, WORD, bytes).then_some((offset as usize, clusters as usize))
        };
        (0..count.min(AREAS_MAX)).filter_map(table)
    }

    /// Returns the word at this byte offset in the head.
    fn word_at(&self, at: usize) -> u64 {
        self.words()[at / size_of::<u64>()].load(Ordering::Relaxed)
    }

    /// Returns the half of a word at this byte offset in the head.
    fn half_at(&self, at: usize) -> u32 {
        (self.word_at(at) >> (at % size_of::<u64>() * 8)) as u32
    }

    /// Whether the head in shared memory still equals the copy.
    pub fn is_as(&self, copy: &HeadCopy) -> bool {
        copy.0.iter().zip(self.words()).all(|(was, is)| *was == is.load(Ordering::Relaxed))
    }
}

/// A process's own copy of the head. All zero is valid memory for one.
pub struct HeadCopy([u64; HEAD_WORDS]);

impl HeadCopy {
    /// An empty copy.
    pub const EMPTY: HeadCopy = HeadCopy([0; HEAD_WORDS]);

    /// The copy's words, as they stand in the session.
    #[cfg(test)]
    pub(crate) const fn words(&self) -> &[u64] {
        &self.0
    }

    /// The copied head. Its values need not make sense.
    pub const fn head(&self) -> &SessionHead {
        // SAFETY: the words are as large as a head, aligned like it, and initialized. A head consists of
        // integers only.
        unsafe { &*self.0.as_ptr().cast() }
    }

    /// Returns the settings, if the head makes sense for a session of `bytes` bytes. A process that follows a
    /// checked head stays inside of the session, and finds values that exist.
    pub fn check(&self, bytes: usize) -> Option<Settings> {
        let head = self.head();
        let is_sound = head.magic == MAGIC
            && head.bytes == bytes as u64
            && bytes >= size_of::<Session>()
            && head.areas_count as usize <= AREAS_MAX
            && self.areas().iter().all(|area| is_sound(area, bytes));
        head.settings.checked().filter(|_| is_sound)
    }

    /// The areas that are on.
    pub fn areas(&self) -> &[AreaDescription] {
        let head = self.head();
        &head.areas[..(head.areas_count as usize).min(AREAS_MAX)]
    }
}

/// Whether a table of `length` bytes at `offset` lies behind the head and inside of `bytes` bytes. The
/// table's elements have `size` bytes.
const fn lies_inside(offset: u64, length: u64, size: usize, bytes: usize) -> bool {
    let behind_head = offset >= size_of::<Session>() as u64;
    let end = offset.checked_add(length);
    behind_head && offset.is_multiple_of(size as u64) && matches!(end, Some(end) if end <= bytes as u64)
}

fn is_sound(area: &AreaDescription, bytes: usize) -> bool {
    const WORD: usize = size_of::<u32>();
    let words = |count: u32| u64::from(count) * WORD as u64;
    let extents = &area.extents;
    (1..=SLOTS_PER_AREA_MAX).contains(&area.slots)
        && area.bad_count < area.slots
        && area.name.contains(&0)
        && area.open_path.contains(&0)
        && lies_inside(area.owners_offset, words(area.slots.div_ceil(CLUSTER_SLOTS)), WORD, bytes)
        && lies_inside(area.bad_offset, words(area.bad_count), WORD, bytes)
        && (!extents.is_known() || lies_inside(area.extents_offset, extents.bytes(), size_of::<u64>(), bytes))
}

/// [`Settings`] as words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SettingsWords {
    ram_bytes: u64,
    pool_bytes_max: u64,
    others: [u32; 12],
}

impl From<Settings> for SettingsWords {
    fn from(settings: Settings) -> SettingsWords {
        // There is no `..`, so that a setting that is forgotten here doesn't compile.
        let Settings {
            ram_bytes,
            pool_bytes_max,
            codec,
            packs,
            install,
            io,
            slots,
            order,
            nodes,
            uffd_source,
            readahead,
            page_cluster,
            refuses_mlockall,
            polls,
        } = settings;
        let others = [
            codec as u32,
            packs,
            install as u32,
            io as u32,
            slots as u32,
            order as u32,
            nodes,
            uffd_source as u32,
            readahead as u32,
            page_cluster,
            refuses_mlockall,
            polls,
        ];
        SettingsWords { ram_bytes, pool_bytes_max, others }
    }
}

impl SettingsWords {
    /// Returns the settings that the words mean. None if one of the words has no meaning.
    pub fn checked(&self) -> Option<Settings> {
        let SettingsWords { ram_bytes, pool_bytes_max, others } = *self;
        let [
            codec,
            packs,
            install,
            io,
            slots,
            order,
            nodes,
            uffd_source,
            readahead,
            page_cluster,
            refuses_mlockall,
            polls,
        ] = others;
        use {Codec as C, Install as I, Readahead as R, UffdSource as U};
        let settings = Settings {
            ram_bytes,
            pool_bytes_max,
            codec: one_of([C::Lz4, C::None, C::Auto, C::Fast], |it| it as u32, codec)?,
            packs,
            install: one_of([I::Move, I::Copy, I::Mixed], |it| it as u32, install)?,
            io: one_of([IoEngine::Uring, IoEngine::Psync], |it| it as u32, io)?,
            slots: one_of(SlotPolicy::ALL, |it| it as u32, slots)?,
            order: one_of(AreaOrder::ALL, |it| it as u32, order)?,
            nodes,
            uffd_source: one_of(
                [U::Syscall, U::Device, U::UserMode, U::Nothing],
                |it| it as u32,
                uffd_source,
            )?,
            readahead: one_of([R::Streams, R::ByAddress, R::BySlot, R::Off], |it| it as u32, readahead)?,
            page_cluster,
            refuses_mlockall,
            polls,
        };
        let is_sound = (1..=NODES_MAX as u32).contains(&nodes)
            && page_cluster <= farpage_core::config::PAGE_CLUSTER_MAX
            && [packs, refuses_mlockall, polls].iter().all(|flag| *flag <= 1);
        is_sound.then_some(settings)
    }
}

fn one_of<T: Copy, const N: usize>(all: [T; N], number: fn(T) -> u32, word: u32) -> Option<T> {
    all.into_iter().find(|it| number(*it) == word)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A head that makes sense, of a session of `bytes` bytes, with one area.
    pub(crate) fn sound(bytes: usize) -> HeadCopy {
        let mut shared = SharedHead(UnsafeCell::new(
            // SAFETY: a head consists of integers only, and all zeros are valid for them.
            unsafe { core::mem::zeroed() },
        ));
        fill(shared.get_mut(), bytes);
        let mut copy = HeadCopy::EMPTY;
        shared.copy_to(&mut copy);
        copy
    }

    /// A head that makes sense, without an area. Faults arrive by `source`.
    pub(crate) fn without_areas(bytes: usize, source: UffdSource) -> HeadCopy {
        // SAFETY: as in `sound`.
        let mut shared = SharedHead(UnsafeCell::new(unsafe { core::mem::zeroed() }));
        let head = shared.get_mut();
        (head.magic, head.bytes) = (MAGIC, bytes as u64);
        head.settings = Settings { uffd_source: source, ..settings() }.into();
        let mut copy = HeadCopy::EMPTY;
        shared.copy_to(&mut copy);
        copy
    }

    fn fill(head: &mut SessionHead, bytes: usize) {
        let tables = (bytes - TABLES_BYTES) as u64;
        (head.magic, head.bytes, head.areas_count) = (MAGIC, bytes as u64, 1);
        head.settings = settings().into();
        let area = &mut head.areas[0];
        (area.slots, area.bad_count) = (100 * CLUSTER_SLOTS, 3);
        (area.owners_offset, area.bad_offset) = (tables, tables + 400);
    }

    /// Bytes of the tables for 100 clusters and 3 bad slots.
    pub(crate) const TABLES_BYTES: usize = 412;

    fn settings() -> Settings {
        Settings {
            ram_bytes: 1 << 30,
            pool_bytes_max: 1 << 29,
            codec: Codec::Fast,
            packs: 1,
            install: Install::Mixed,
            io: IoEngine::Psync,
            slots: SlotPolicy::ScanMore,
            order: AreaOrder::Weighted,
            nodes: NODES_MAX as u32,
            uffd_source: UffdSource::Nothing,
            readahead: Readahead::Off,
            page_cluster: farpage_core::config::PAGE_CLUSTER_MAX,
            refuses_mlockall: 1,
            polls: 1,
        }
    }

    #[test]
    fn settings_come_back_as_they_were() {
        let back = SettingsWords::from(settings()).checked().unwrap();
        assert_eq!(format!("{back:?}"), format!("{:?}", settings()));
    }

    #[test]
    fn word_that_is_no_value_of_its_setting_is_refused() {
        let sound = SettingsWords::from(settings());
        for at in 0..sound.others.len() {
            let mut broken = sound;
            broken.others[at] = 1000;
            assert!(broken.checked().is_none(), "setting {at}");
        }
        let mut no_node = sound;
        no_node.others[6] = 0;
        assert!(no_node.checked().is_none());
    }

    /// A process that followed a wrong head read and wrote outside of the session, or between its words.
    /// Any process of the run can write the head, and a dormant process has no copy that was checked.
    #[test]
    fn only_tables_inside_of_the_session_are_found() {
        let bytes = (size_of::<Session>() + TABLES_BYTES).next_multiple_of(4);
        let found = |change: fn(&mut SessionHead)| {
            // SAFETY: as in `sound`.
            let mut shared = SharedHead(UnsafeCell::new(unsafe { core::mem::zeroed() }));
            fill(shared.get_mut(), bytes);
            change(shared.get_mut());
            shared.holder_tables(bytes).collect::<Vec<_>>()
        };
        assert_eq!(found(|_| ()), [(bytes - TABLES_BYTES, 100)]);
        assert_eq!(found(|head| head.areas_count = 0), []);
        assert_eq!(found(|head| head.areas_count = u32::MAX).len(), 1, "the others are empty");
        assert_eq!(found(|head| head.areas[0].slots += 10 * CLUSTER_SLOTS), []);
        assert_eq!(found(|head| head.areas[0].owners_offset += 1), []);
        assert_eq!(found(|head| head.areas[0].owners_offset = 1 << 40), []);
        assert_eq!(found(|head| head.areas[0].owners_offset = u64::MAX), []);
    }

    #[test]
    fn head_that_leads_out_of_the_session_is_refused() {
        let bytes = (size_of::<Session>() + TABLES_BYTES).next_multiple_of(4);
        let is_sound = |change: fn(&mut SessionHead)| {
            // SAFETY: as in `sound`.
            let mut shared = SharedHead(UnsafeCell::new(unsafe { core::mem::zeroed() }));
            fill(shared.get_mut(), bytes);
            change(shared.get_mut());
            let mut copy = HeadCopy::EMPTY;
            shared.copy_to(&mut copy);
            copy.check(bytes).is_some()
        };
        assert!(is_sound(|_| ()));
        assert!(sound(bytes).check(bytes + 4).is_none() && sound(bytes).check(8).is_none());
        let breaks: [fn(&mut SessionHead); 14] = [
            |head| head.magic += 1,
            |head| head.bytes += 8,
            |head| head.areas_count = AREAS_MAX as u32 + 1,
            |head| head.areas[0].slots = 0,
            |head| head.areas[0].slots += 4 * CLUSTER_SLOTS,
            |head| head.areas[0].slots = u32::MAX,
            |head| head.areas[0].bad_count = 4,
            |head| head.areas[0].bad_count = u32::MAX,
            |head| head.areas[0].owners_offset += 16,
            |head| head.areas[0].owners_offset -= 2,
            |head| head.areas[0].owners_offset = u64::MAX - 3,
            |head| head.areas[0].bad_offset = 0,
            |head| head.areas[0].name.fill(b'x'),
            |head| head.areas[0].open_path.fill(b'x'),
        ];
        for (at, change) in breaks.into_iter().enumerate() {
            assert!(!is_sound(change), "{at}");
        }
    }
}

//! The memory that `farpage run` and the programs under it share: one memfd, mapped by all of them.
//!
//! The supervisor makes the memfd, fills in the settings and the areas, and puts `/proc/<pid>/fd/<n>` into
//! [`SESSION_ENV`]. Every program that starts with the preload library opens the session there, maps it, and
//! claims a [`ProcessRecord`] by locking the byte of the record's number in the memfd. The lock is gone when
//! the process is, however the process ended, in whatever pid namespace. The process updates its record's
//! counters in place, so the supervisor can read them however the program ended. The memory vanishes with its
//! last user, so nothing is left behind.
//!
//! Everything is atomics, or part of the head ([`SharedHead`]). The head is written before the first program
//! starts, and each reader copies it. Any bytes are therefore valid everywhere: a process of the run can
//! write whatever it likes.

pub mod devices;
pub mod first;
pub mod head;
pub mod last;
pub mod record;
pub mod started;

use crate::pressure::kin::{ALONE, Rounds, Stated};
use crate::pressure::share::Claim;
use crate::session::first::First;
use crate::session::head::SharedHead;
use crate::session::started::Started;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::areas::extents::Head;
use farpage_core::areas::{Leases, Placement};
use farpage_core::config::{AreaOrder, Codec, Install, IoEngine, Readahead, SlotPolicy};
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::stats::Stats;
use farpage_core::units::AREAS_MAX;
use farpage_os::report::LastWords;

/// Environment variable that holds the path at which a program opens the session.
pub const SESSION_ENV: &str = "FARPAGE_SESSION";
/// First word of a session: "farpage" and the version of this layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"farpage\x15");
/// Name that a library exports if it knows this layout. A library of another layout would leave its program
/// alone, so `farpage run` looks for this name first.
pub const LAYOUT_NAME: &str = "farpage_session_layout_21";
/// See [`LAYOUT_NAME`].
#[unsafe(export_name = "farpage_session_layout_21")]
pub static LAYOUT: u64 = MAGIC;
/// A changed layout needs a new version, and so does another notice: a supervisor that doesn't know a notice
/// takes the notice for damage. The assertions notice most changes.
const _: () = assert!(Notice::ALL.len() == 18);
const _: () =
    assert!(size_of::<Session>() == 1_590_784 && core::mem::offset_of!(Session, processes) == 56_832);
const _: () = {
    let name = LAYOUT_NAME.as_bytes();
    let [.., tens, ones] = name else { panic!() };
    assert!((*tens - b'0') * 10 + (*ones - b'0') == (MAGIC >> 56) as u8);
};

/// Returns whether the calling thread can open the session.
pub fn is_reachable(path: &core::ffi::CStr) -> bool {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
        // EMFILE says nothing about the session: engine threads have a descriptor table of their own.
        Ok(_) | Err(rustix::io::Errno::MFILE) => true,
        Err(_) => false,
    }
}

/// See [`Session::ended`].
pub const ENDED: u32 = u32::from_le_bytes(*b"over");

/// Programs that can be counted one by one. Later programs take over the records of dead ones, whose numbers
/// move to [`Session::earlier`].
pub const PROCESSES_MAX: usize = 256;
/// Bytes for a path, NUL-terminated.
pub const PATH_BYTES: usize = 512;

/// The fixed part of the shared memory. Each area's extents, bad slots and cluster owners follow it.
#[repr(C)]
pub struct Session {
    /// Settings and areas, written by the supervisor.
    pub head: SharedHead,
    /// State of readahead by slot, for all programs together.
    pub slot_words: SlotWords,
    /// The claim of each process on the budget, by its record's number.
    pub claims: [Claim; PROCESSES_MAX],
    /// The rounds in which processes ask what they share.
    pub rounds: Rounds,
    /// The most bytes that all processes together had when one of them looked.
    pub claims_peak: AtomicU64,
    /// Bytes of the budget that the limits outside of the run leave now; 0 until the supervisor has read
    /// them. See [`ram_now_within`].
    pub ram_now: AtomicU64,
    /// Number of runs of this user that began after this run. When the number changes, the supervisor
    /// searches again.
    pub neighbours: AtomicU32,
    /// Time at which a process last looked for claims of dead processes, in nanoseconds of the monotonic
    /// clock.
    pub claims_reaped_ns: AtomicU64,
    /// Time until which a thread polls; 0 if none does.
    pub polls_until_ns: AtomicU64,
    /// [`ENDED`] once the program has ended and the supervisor ends too. Processes that the program has left
    /// behind then go on. If the supervisor is gone without this word, it was killed, and the run ends.
    pub ended: AtomicU32,
    /// Not 0 once the program has ended. No process may be dormant any more.
    pub is_ending: AtomicU32,
    /// The run's first process, if the supervisor isn't its parent.
    pub first: First,
    /// Last words of the first process that ended by a bug in Farpage.
    pub last_words: LastWords,
    /// Programs that were started and have not joined.
    pub started: Started,
    /// Programs that have ended and whose records later programs have taken over.
    pub earlier_programs: AtomicU64,
    /// What these programs told, all together.
    pub earlier: ProcessRecord,
    /// One record for each program.
    pub processes: [ProcessRecord; PROCESSES_MAX],
}

impl Session {
    /// Forgets what an ended process has said of its memory. The caller holds the lock of the process's
    /// record.
    pub fn forget_claim(&self, index: usize) {
        // Another process may have taken the record and ended in the meantime.
        let stated = self.claims[index].load();
        if stated.round != ALONE {
            self.rounds.has_died(&stated);
        }
        self.claims[index].store(Stated::default());
        self.processes[index].dormant_bytes.store(0, Ordering::Relaxed);
    }

    /// Frees the clusters that a record's dead process held in any area. The caller holds the record's lock.
    ///
    /// # Safety
    /// The session is `bytes` bytes large, all of which are mapped.
    pub unsafe fn free_clusters(&self, index: usize, bytes: usize) {
        for (offset, clusters) in self.head.holder_tables(bytes) {
            // SAFETY: the table lies inside the session and is aligned, as `holder_tables` has checked.
            let holders = unsafe {
                let first = core::ptr::from_ref(self).cast::<u8>().add(offset).cast::<AtomicU32>();
                core::slice::from_raw_parts(first, clusters)
            };
            // A new view frees what its number holds.
            let _ = Leases::new(holders, index as u32 + 1);
        }
    }
}

/// Divisor of the budget that gives the lower bound of [`ram_now_within`].
const RAM_PARTS_MAX: u64 = 8;

/// Returns the budget in bytes while limits leave `now_bytes` of `ram_bytes`. If `now_bytes` is 0, returns
/// all of `ram_bytes`.
pub const fn ram_now_within(now_bytes: u64, ram_bytes: u64) -> u64 {
    let least = ram_bytes / RAM_PARTS_MAX;
    match now_bytes {
        0 => ram_bytes,
        now if now > ram_bytes => ram_bytes,
        now if now < least => least,
        now => now,
    }
}

/// The command line's options, resolved to numbers.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Budget in bytes for all programs together.
    pub ram_bytes: u64,
    /// Limit of the compressed pool in bytes.
    pub pool_bytes_max: u64,
    /// The pool's codec.
    pub codec: Codec,
    /// 1 if pages that compress share slots of areas.
    pub packs: u32,
    /// How pages move.
    pub install: Install,
    /// How areas are written.
    pub io: IoEngine,
    /// How free slots are found.
    pub slots: SlotPolicy,
    /// The order in which areas are used.
    pub order: AreaOrder,
    /// NUMA nodes that the machine has, counted up to the highest number.
    pub nodes: u32,
    /// The way to a userfaultfd that worked for the supervisor.
    pub uffd_source: UffdSource,
    /// The policy of readahead.
    pub readahead: Readahead,
    /// Logarithm to base 2 of the largest window, in pages, of Linux's readahead policies.
    pub page_cluster: u32,
    /// 1 if the program may not lock all of its memory.
    pub refuses_mlockall: u32,
    /// 1 if a thread that needs a page of an area may poll for it instead of sleeping.
    pub polls: u32,
}

/// Where a program gets its userfaultfd from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UffdSource {
    /// The system call, for root, with CAP_SYS_PTRACE, or with vm.unprivileged_userfaultfd=1.
    Syscall = 0,
    /// /dev/userfaultfd, whose file permissions decide.
    Device = 1,
    /// The system call, only for faults of the program's own instructions. Any user may make it. Faults
    /// arrive as signals, and the program's system calls are guarded.
    UserMode = 2,
    /// None. A page that is out is protected, and a touch of the page is a SIGSEGV. Any user can do this,
    /// also where containers refuse the system call.
    Nothing = 3,
}

/// One swap area.
#[repr(C)]
pub struct AreaDescription {
    /// Path at which a program opens the area: `/proc/<supervisor>/fd/<n>`, NUL-terminated.
    pub open_path: [u8; PATH_BYTES],
    /// The user's name of the area, NUL-terminated.
    pub name: [u8; PATH_BYTES],
    /// Slots, the header's slot 0 included.
    pub slots: u32,
    /// Priority as in `swapon -p`: the user's, or the one that the order gives. Only shown to users.
    pub priority: i32,
    /// The area's place in the order, as the programs use it.
    pub place: Placement,
    /// 1 for a block device.
    pub is_device: u32,
    /// 1 if clusters that became empty are discarded: by holes in a file that grows, by BLKDISCARD on a
    /// device.
    pub discards: u32,
    /// 1 if the file may have to be extended before a cluster is written (it grows on demand).
    pub grows: u32,
    /// Bad slots listed at `bad_offset`.
    pub bad_count: u32,
    /// Byte offset in the session of `bad_count` u32 slot numbers.
    pub bad_offset: u64,
    /// Byte offset in the session of one u32 for each cluster. The value is 0, or 1 + the index of the
    /// process record that has leased the cluster.
    pub owners_offset: u64,
    /// Location of the area's slots on its device, if that is known and stays the same.
    pub extents: Head,
    /// Byte offset in the session of the memory of `extents`.
    pub extents_offset: u64,
    /// Free bytes that growing must leave on the disk.
    pub disk_reserve_bytes: u64,
}

/// Conditions that the user must hear of while a program runs. The values are bit numbers in
/// `ProcessRecord::notices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Notice {
    /// No area takes pages, and at least one area is full, or the disk is. Eviction has stopped and memory
    /// goes over the budget. Value: see [`pack_full`].
    AreaFull = 0,
    /// The pool is full and there is no area. Value: pool bytes.
    PoolFull = 1,
    /// A write to an area failed. Its pages were kept, and the area is not written any more. Value: see
    /// [`pack_io_error`].
    WriteError = 2,
    /// A read from an area failed, and the program got SIGBUS. Value: see [`pack_io_error`].
    ReadError = 3,
    /// Memory that can't be evicted (locked, executable, stacks, small mappings) is more than half of the
    /// budget, and nothing else was left to evict. Value: bytes.
    Unmanaged = 4,
    /// The program locked all its memory (mlockall): nothing can be evicted.
    Locked = 5,
    /// A fork was refused, because its child could not have been given the evicted pages. Value: evicted
    /// pages.
    ForkRefused = 6,
    /// The engine could not start in this program, which was ended with status 125. Value: a
    /// [`StartFailure`].
    NotStarted = 7,
    /// The budget is below what the program already needs. The program was ended with status 125. Value:
    /// bytes needed.
    BudgetTooSmall = 8,
    /// An area returned other bytes than were written there, by their checksum. Treated as a failed read.
    Corrupt = 9,
    /// The program was ended with status 125, because its memory could not be kept right. Value: a
    /// [`StopReason`].
    Stopped = 10,
    /// A thread blocks every signal, or can't be sent one. Its system calls can't be guarded, so nothing is
    /// evicted. Value: the thread's number, and [`NOT_SENT`] if the signal couldn't be sent.
    NotArmed = 11,
    /// The engine could not start in this program, which goes on without it. Value: a [`StartFailure`].
    Alone = 12,
    /// The engine ended because of something that the program asked for, or that it has used up. All memory
    /// of the program is back, and the program goes on without an engine. Value: see [`Retired`].
    Retired = 13,
    /// The program has limited the size of the files that it writes, and areas are written in its name.
    /// Value: the limit in bytes.
    FileLimit = 14,
    /// A call that reads or writes another process's memory failed with EFAULT, because such a call can't
    /// reach pages that are out. Value: the number of that process.
    PeerOut = 15,
    /// The program had set up io_urings before its memory was managed. Their requests can fail with EFAULT.
    /// Value: number of rings.
    Ring = 16,
    /// A dormant process has more memory than the calls that were seen can explain. It is asked to start an
    /// engine. Value: bytes.
    Grew = 17,
}

impl Notice {
    /// Every notice, by bit number.
    pub const ALL: [Notice; 18] = [
        Notice::AreaFull,
        Notice::PoolFull,
        Notice::WriteError,
        Notice::ReadError,
        Notice::Unmanaged,
        Notice::Locked,
        Notice::ForkRefused,
        Notice::NotStarted,
        Notice::BudgetTooSmall,
        Notice::Corrupt,
        Notice::Stopped,
        Notice::NotArmed,
        Notice::Alone,
        Notice::Retired,
        Notice::FileLimit,
        Notice::PeerOut,
        Notice::Ring,
        Notice::Grew,
    ];
}

/// Bit of the value of [`Notice::NotArmed`]: too many signals are pending.
pub const NOT_SENT: u64 = 1 << 32;

/// Why the engine did not start in a program. The value of [`Notice::NotStarted`] and [`Notice::Alone`] holds
/// it in the low 16 bits, and the errno above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum StartFailure {
    /// A userfaultfd could not be had.
    Userfaultfd = 1,
    /// The engine's own tables got no memory.
    Memory = 2,
    /// A thread could not be started.
    Thread = 3,
    /// An area could not be opened.
    Area = 4,
    /// libc's functions could not be hooked.
    Hooks = 5,
    /// /proc is not usable.
    Proc = 6,
    /// The session is out of reach.
    Session = 7,
    /// /proc is of another pid namespace.
    Namespace = 8,
}

/// Why a program that ran had to be stopped (value of [`Notice::Stopped`]). A program that has ended is
/// better than one with wrong bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum StopReason {
    /// No memory was left for the tables of evicted memory, or for a thread that evicts.
    Tables = 1,
    /// No thread could be started to serve faults.
    Thread = 2,
    /// The program moved evicted memory by a call that the engine did not see.
    UnseenMove = 3,
    /// A thread's system calls could not be stopped.
    Arming = 4,
    /// An engine thread could not give up credentials that the program has given up.
    Credentials = 5,
    /// RLIMIT_DATA leaves no memory for a page that comes back (`segv` mode).
    DataLimit = 6,
}

/// Why an engine ended before its program (value of [`Notice::Retired`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retired {
    /// The program has entered seccomp's strict mode.
    Strict,
    /// A filter of the program doesn't allow this system call in every case.
    Denied(u32),
    /// The program has installed a filter by a call that the engine didn't see.
    Unseen,
    /// The program wants one filter for all threads, but the engine's threads have other filters.
    AllThreads,
    /// An engine thread couldn't take on a filter.
    NotTaken,
    /// The program has limited its own memory by RLIMIT_DATA (`segv` mode).
    DataLimit,
    /// The program has opened the file that is its own memory, before memory reached the budget (`segv`
    /// mode).
    MemoryOpen,
    /// No thread could be started to serve faults. Nothing was out yet.
    NoThread,
}

impl Retired {
    /// Returns the value of a notice: the kind, and above it the number of a call.
    pub const fn value(self) -> u64 {
        match self {
            Retired::Strict => 1,
            Retired::Denied(call) => 2 | (call as u64) << 16,
            Retired::Unseen => 3,
            Retired::AllThreads => 4,
            Retired::NotTaken => 5,
            Retired::DataLimit => 6,
            Retired::MemoryOpen => 7,
            Retired::NoThread => 8,
        }
    }

    /// Undoes [`Retired::value`].
    pub const fn of_value(value: u64) -> Option<Retired> {
        Some(match value as u16 {
            1 => Retired::Strict,
            2 => Retired::Denied((value >> 16) as u32),
            3 => Retired::Unseen,
            4 => Retired::AllThreads,
            5 => Retired::NotTaken,
            6 => Retired::DataLimit,
            7 => Retired::MemoryOpen,
            8 => Retired::NoThread,
            _ => return None,
        })
    }
}

/// Packs the area, errno and slot of a failed request. The errno is in bits 48.., the area in bits 32..48,
/// the slot below.
pub const fn pack_io_error(area: u8, slot: u32, errno: u16) -> u64 {
    (errno as u64) << 48 | (area as u64) << 32 | slot as u64
}

/// Undoes [`pack_io_error`]: returns area, slot and errno.
pub const fn unpack_io_error(packed: u64) -> (u8, u32, u16) {
    ((packed >> 32) as u8, packed as u32, (packed >> 48) as u16)
}

/// Packs the bytes that a process has in full areas, and the areas that take no pages for another reason. The
/// areas have one bit each in bits 48.., the bytes are below.
pub const fn pack_full(bytes: u64, not_full: u16) -> u64 {
    ((not_full as u64) << 48) | (bytes & ((1 << 48) - 1))
}

/// Undoes [`pack_full`].
pub const fn unpack_full(packed: u64) -> (u64, u16) {
    (packed & ((1 << 48) - 1), (packed >> 48) as u16)
}

/// Everything that one program tells about itself.
#[repr(C)]
pub struct ProcessRecord {
    /// Process id as the program's /proc shows it; 0: never used.
    pub pid: AtomicU32,
    /// Notices given, one bit each.
    pub notices: AtomicU32,
    /// The value of each notice's first occurrence.
    pub notice_values: [AtomicU64; 24],
    /// The program's name as in /proc/self/comm, NUL-padded.
    pub command: [AtomicU64; 2],
    /// Bytes of memory that a dormant process can have at most; 0 if the process has an engine. See
    /// [`dormant`](crate::engine::dormant).
    pub dormant_bytes: AtomicU64,
    /// Slots in use in each area, while the process lives.
    pub slots_used: [AtomicU32; AREAS_MAX],
    /// Counters and latencies.
    pub stats: Stats,
}

impl ProcessRecord {
    /// Gives a notice to the supervisor. The value of the first occurrence stays.
    pub fn notice(&self, notice: Notice, value: u64) {
        let bit = 1 << notice as u32;
        if self.notices.load(Ordering::Relaxed) & bit == 0 {
            self.notice_values[notice as usize].store(value, Ordering::Relaxed);
            // Ordering: Release, so that a thread that sees the bit (Acquire in `noticed`) sees the value.
            self.notices.fetch_or(bit, Ordering::Release);
        }
    }

    /// Returns the value of a notice, if the notice was given.
    pub fn noticed(&self, notice: Notice) -> Option<u64> {
        // Ordering: Acquire pairs with the Release in `notice`.
        let set = self.notices.load(Ordering::Acquire) & 1 << notice as u32 != 0;
        set.then(|| self.notice_values[notice as usize].load(Ordering::Relaxed))
    }

    /// Moves what an ended program has told into the record of earlier programs.
    fn move_to(&self, earlier: &ProcessRecord) {
        for notice in Notice::ALL {
            if let Some(value) = self.noticed(notice) {
                earlier.notice(notice, value);
            }
        }
        self.notices.store(0, Ordering::Relaxed);
        self.stats.move_to(&earlier.stats);
    }
}

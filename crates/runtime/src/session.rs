//! What `farpage run` and the programs under it share: one memfd, mapped by all of them.
//!
//! The supervisor makes it, fills in the settings and the areas, and puts `/proc/<pid>/fd/<n>` into
//! [`SESSION_ENV`]. Every program that starts with our preload library opens it there, maps it, and claims
//! a [`ProcessRecord`] by locking the byte of the record's number in the memfd: the lock is gone when the
//! process is, however it ended, in whatever pid namespace it was. It then updates the record's counters in
//! place, so the supervisor can read them however the program ended. The memory vanishes with its last user,
//! so nothing is left behind.
//!
//! Everything is atomics, or part of the head ([`SharedHead`]), which is written before the first program starts and copied
//! by whoever reads it. So any bytes are valid everywhere: each process of the run can write what it likes.

use crate::first::First;
use crate::head::SharedHead;
use crate::kin::Rounds;
use crate::share::Claim;
use crate::started::Started;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::areas::Place;
use farpage_core::areas::extents::Head;
use farpage_core::config::{AreaOrder, Codec, Install, IoEngine, Readahead, SlotPolicy};
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::stats::Stats;
use farpage_core::units::AREAS_MAX;
use farpage_os::report::LastWords;

/// Environment variable that holds the path at which a program opens the session.
pub const SESSION_ENV: &str = "FARPAGE_SESSION";
/// First word of a session: "farpage" and the version of this layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"farpage\x14");
/// What a library exports that knows this layout. A library of another one would leave its program alone, so `farpage run`
/// looks for this name first.
pub const LAYOUT_NAME: &str = "farpage_session_layout_20";
/// See [`LAYOUT_NAME`].
#[unsafe(export_name = "farpage_session_layout_20")]
pub static LAYOUT: u64 = MAGIC;
/// Another layout needs another version.
const _: () =
    assert!(size_of::<Session>() == 1_584_784 && core::mem::offset_of!(Session, processes) == 50_832);
const _: () = {
    let name = LAYOUT_NAME.as_bytes();
    let [.., tens, ones] = name else { panic!() };
    assert!((*tens - b'0') * 10 + (*ones - b'0') == (MAGIC >> 56) as u8);
};

/// Whether the calling thread can open the session.
pub fn is_reachable(path: &core::ffi::CStr) -> bool {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
        // Our own threads have a table of their own.
        Ok(_) | Err(rustix::io::Errno::MFILE) => true,
        Err(_) => false,
    }
}

/// See [`Session::ended`].
pub const ENDED: u32 = u32::from_le_bytes(*b"over");

/// Programs that can be counted one by one; later ones take over records of dead ones.
pub const PROCESSES_MAX: usize = 256;
/// Bytes for a path, NUL-terminated.
pub const PATH_BYTES: usize = 512;

/// The fixed part of the shared memory. Each area's extents, bad slots and cluster owners follow it.
#[repr(C)]
pub struct Session {
    /// What the supervisor has written.
    pub head: SharedHead,
    /// What readahead by slot knows, of all programs together.
    pub slot_words: SlotWords,
    /// What each process has of the budget, by its record's number.
    pub claims: [Claim; PROCESSES_MAX],
    /// In which round processes ask what they share.
    pub rounds: Rounds,
    /// The most that all of them together had when one of them looked, in bytes.
    pub claims_peak: AtomicU64,
    /// The budget in bytes that the limits outside of the run leave now; 0 until the supervisor has read them. See
    /// [`ram_now_within`].
    pub ram_now: AtomicU64,
    /// Number of runs of this user that began after this run. The supervisor searches again when the number changes.
    pub neighbours: AtomicU32,
    /// When somebody last looked whose claims are a dead process's, on the clock that never goes back.
    pub claims_reaped_ns: AtomicU64,
    /// Until then a thread polls; 0 if none does.
    pub polls_until_ns: AtomicU64,
    /// [`ENDED`] once the program has ended and the supervisor does, too: what the program has left behind goes on. A
    /// supervisor that is gone without a word here was killed, and the run ends.
    pub ended: AtomicU32,
    /// Not 0 once the program has ended: no process may be dormant any more.
    pub is_ending: AtomicU32,
    /// The run's first process, if the supervisor isn't its parent.
    pub first: First,
    /// Of the first process that ended by a bug in Farpage.
    pub last_words: LastWords,
    /// Programs that have not joined.
    pub started: Started,
    /// One for each program.
    pub processes: [ProcessRecord; PROCESSES_MAX],
}

/// Divisor of the budget that gives its lower bound.
const RAM_PARTS_MAX: u64 = 8;

/// The budget in bytes while limits leave `now_bytes` of `ram_bytes`; all of it if `now_bytes` is 0.
pub const fn ram_now_within(now_bytes: u64, ram_bytes: u64) -> u64 {
    let least = ram_bytes / RAM_PARTS_MAX;
    match now_bytes {
        0 => ram_bytes,
        now if now > ram_bytes => ram_bytes,
        now if now < least => least,
        now => now,
    }
}

/// The command line, resolved to numbers.
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
    /// In which order areas are used.
    pub order: AreaOrder,
    /// Nodes that the machine has, counted up to the highest number.
    pub nodes: u32,
    /// Which way to a userfaultfd worked for the supervisor.
    pub uffd_source: UffdSource,
    /// What is brought in before anybody asks for it.
    pub readahead: Readahead,
    /// Windows of Linux's policies have at most 2 to the power of this pages.
    pub page_cluster: u32,
    /// 1 if the program may not lock all of its memory.
    pub refuses_mlockall: u32,
    /// 1 if a thread that needs a page of an area may look for it instead of sleeping.
    pub polls: u32,
}

/// Where a program gets its userfaultfd from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum UffdSource {
    /// The system call: root, CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1.
    Syscall = 0,
    /// /dev/userfaultfd, whose file permissions decide.
    Device = 1,
    /// The system call, for faults of the program's own instructions: anybody. They arrive as signals, and its system
    /// calls are guarded.
    UserMode = 2,
    /// None: what is out may not be touched, and a touch is a SIGSEGV. Anybody, also where containers refuse the system
    /// call.
    Nothing = 3,
}

/// One swap area.
#[repr(C)]
pub struct AreaDescription {
    /// Where a program opens it: `/proc/<supervisor>/fd/<n>`, NUL-terminated.
    pub open_path: [u8; PATH_BYTES],
    /// What the user calls it, NUL-terminated.
    pub name: [u8; PATH_BYTES],
    /// Slots, the header's slot 0 included.
    pub slots: u32,
    /// Priority as in `swapon -p`: the user's, or what the order gives it. For whoever looks on.
    pub priority: i32,
    /// What places it in the order, for the programs.
    pub place: Place,
    /// 1 for a block device.
    pub is_device: u32,
    /// 1 if clusters that became empty are discarded: holes in a file that grows, BLKDISCARD on a device.
    pub discards: u32,
    /// 1 if the file may have to be extended before a cluster is written (it grows on demand).
    pub grows: u32,
    /// Bad slots listed at `bad_offset`.
    pub bad_count: u32,
    /// Byte offset in the session of `bad_count` u32 slot numbers.
    pub bad_offset: u64,
    /// Byte offset in the session of one u32 for each cluster: 0, or 1 + index of the process record that
    /// has leased it.
    pub owners_offset: u64,
    /// Where its slots lie on its device, if that is known and stays so.
    pub extents: Head,
    /// Byte offset in the session of the memory of `extents`.
    pub extents_offset: u64,
    /// Free bytes that growing must leave on the disk.
    pub disk_reserve_bytes: u64,
}

/// What can go wrong while a program runs and the user must hear of; bit numbers in `ProcessRecord::notices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Notice {
    /// Every area is full (or the disk is): eviction stopped, memory goes over the budget. Value: bytes used.
    AreaFull = 0,
    /// The pool is full and there is no area. Value: pool bytes.
    PoolFull = 1,
    /// A write to an area failed; its pages were kept and the area is not written any more. Value: see
    /// [`pack_io_error`].
    WriteError = 2,
    /// A read from an area failed; the program got SIGBUS. Value: see [`pack_io_error`].
    ReadError = 3,
    /// Memory that can't be evicted (locked, executable, stacks, small mappings) is more than half of the budget, and there
    /// was nothing left to evict. Value: bytes.
    Unmanaged = 4,
    /// The program locked all its memory (mlockall): nothing can be evicted.
    Locked = 5,
    /// A fork was refused because its child could not have been given what is evicted. Value: evicted pages.
    ForkRefused = 6,
    /// The engine could not start in this program, which was ended with status 125. Value: a [`StartFailure`].
    NotStarted = 7,
    /// The budget is below what the program already needs; it was ended with status 125. Value: bytes needed.
    BudgetTooSmall = 8,
    /// What an area returned was not what was written there (checksum): treated as a failed read.
    Corrupt = 9,
    /// The program was ended with status 125, because its memory could not be kept right. Value: a [`StopReason`].
    Stopped = 10,
    /// A thread blocks every signal, so its system calls can't be guarded, and nothing is evicted. Value: its number.
    NotArmed = 11,
    /// The engine could not start in this program, which goes on without it. Value: a [`StartFailure`].
    Alone = 12,
    /// The engine ended because of what the program asked for; all its memory is back, and it goes on without us. Value: see
    /// [`Retired`].
    Retired = 13,
    /// The program has limited the size of the files that it writes, and areas are written in its name. Value: the limit in bytes.
    FileLimit = 14,
    /// A call that reads or writes another process's memory failed with EFAULT: what is out can't be reached so. Value: the number
    /// of that process.
    PeerOut = 15,
    /// The program had begun an io_uring before its memory was managed: its requests can fail with EFAULT. Value: how many.
    Ring = 16,
    /// A dormant process has more memory than it could have by the calls that were seen, and is asked to start an engine. Value: bytes.
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

/// Why the engine did not start in a program (value of [`Notice::NotStarted`] and [`Notice::Alone`], low 16 bits; errno above).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum StartFailure {
    /// No userfaultfd.
    Userfaultfd = 1,
    /// Memory for the engine's own tables.
    Memory = 2,
    /// A thread.
    Thread = 3,
    /// An area could not be opened.
    Area = 4,
    /// libc's functions could not be hooked.
    Hooks = 5,
    /// /proc is not usable.
    Proc = 6,
    /// The session is out of reach.
    Session = 7,
}

/// Why a program that ran had to be stopped (value of [`Notice::Stopped`]): better no program than one with
/// wrong bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum StopReason {
    /// No memory for tables of memory that is evicted, or for a thread that evicts.
    Tables = 1,
    /// No thread could be started to serve faults.
    Thread = 2,
    /// It moved evicted memory by a call that we did not see.
    UnseenMove = 3,
    /// A thread's system calls could not be stopped.
    Arming = 4,
    /// An engine thread could not give up what the program has given up.
    Credentials = 5,
    /// RLIMIT_DATA leaves no room for a page that comes back (`segv` mode).
    DataLimit = 6,
}

/// Why an engine ended before its program (value of [`Notice::Retired`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retired {
    /// The program has entered seccomp's strict mode.
    Strict,
    /// A filter of its doesn't allow this system call in every case.
    Denied(u32),
    /// It has installed a filter by a call that we didn't see.
    Unseen,
    /// It wants one filter for all threads, and those of the engine have others.
    AllThreads,
    /// An engine thread couldn't take a filter on.
    NotTaken,
    /// It has limited its own memory by RLIMIT_DATA (`segv` mode).
    DataLimit,
}

impl Retired {
    /// As a notice's value: the kind, and the number of a call above it.
    pub const fn value(self) -> u64 {
        match self {
            Retired::Strict => 1,
            Retired::Denied(call) => 2 | (call as u64) << 16,
            Retired::Unseen => 3,
            Retired::AllThreads => 4,
            Retired::NotTaken => 5,
            Retired::DataLimit => 6,
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
            _ => return None,
        })
    }
}

/// Packs area, errno and slot of a failed request: errno in bits 48.., area in 32..48, slot below.
pub const fn pack_io_error(area: u8, slot: u32, errno: u16) -> u64 {
    (errno as u64) << 48 | (area as u64) << 32 | slot as u64
}

/// Undoes [`pack_io_error`]: area, slot, errno.
pub const fn unpack_io_error(packed: u64) -> (u8, u32, u16) {
    ((packed >> 32) as u8, packed as u32, (packed >> 48) as u16)
}

/// What one program tells about itself.
#[repr(C)]
pub struct ProcessRecord {
    /// Process id in the program's own pid namespace; 0: never used.
    pub pid: AtomicU32,
    /// Notices so far, one bit each.
    pub notices: AtomicU32,
    /// What each notice's first occurrence was about.
    pub notice_values: [AtomicU64; 24],
    /// The program's name as in /proc/self/comm, NUL-padded.
    pub command: [AtomicU64; 2],
    /// The most memory that a dormant process can have, in bytes; 0 if it has an engine. See [`dormant`](crate::dormant).
    pub dormant_bytes: AtomicU64,
    /// Slots in use in each area, while the process lives.
    pub slots_used: [AtomicU32; AREAS_MAX],
    /// Counters and latencies.
    pub stats: Stats,
}

impl ProcessRecord {
    /// Tells the supervisor; the first occurrence's value is kept.
    pub fn notice(&self, notice: Notice, value: u64) {
        let bit = 1 << notice as u32;
        if self.notices.load(Ordering::Relaxed) & bit == 0 {
            self.notice_values[notice as usize].store(value, Ordering::Relaxed);
            // Ordering: Release, so that who sees the bit (Acquire in `noticed`) sees the value.
            self.notices.fetch_or(bit, Ordering::Release);
        }
    }

    /// The value of a notice, if it was given.
    pub fn noticed(&self, notice: Notice) -> Option<u64> {
        // Ordering: Acquire pairs with the Release in `notice`.
        let set = self.notices.load(Ordering::Acquire) & 1 << notice as u32 != 0;
        set.then(|| self.notice_values[notice as usize].load(Ordering::Relaxed))
    }
}

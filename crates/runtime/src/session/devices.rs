//! The session's areas as this process sees them: opened by its own engine threads, with back ends.

// UNSAFETY: tables lie in memory that processes share, and a discard is an ioctl.

use crate::mappings::map_lock::ENGINE_THREADS_MAX;
use crate::session::record::Membership;
use crate::session::{AreaDescription, Session, Settings};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, AtomicU64};
use farpage_core::areas::slots::cpus_served;
use farpage_core::areas::{AreaMemory, Areas, Extents, Leases, SlotMemory, SlotRun, heirs, pages};
use farpage_core::config::IoEngine;
use farpage_core::memory::Region;
use farpage_core::units::{AREAS_MAX, AreaId, CLUSTER_SLOTS, PAGE_BYTES};
use farpage_io::file::AreaFile;
use farpage_io::psync::Psync;
use farpage_io::uring::Uring;
use farpage_io::{Backend, Busy, Completion, Request, Wait};
use farpage_os::memory;
use farpage_os::sys::Errno;
use farpage_os::uffd::out_of_the_way;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags};

/// `_IO(0x12, 119)`: discards a range of a device, given as start and length in bytes.
const BLKDISCARD: u32 = 0x1277;

/// An opened area. The descriptor stays open until the process ends.
struct Device {
    fd: BorrowedFd<'static>,
    /// The path where it was opened, NUL-terminated.
    path: &'static [u8],
    /// Present if clusters must get their blocks before they are written.
    grows: Option<AreaFile<'static>>,
}

/// Every area of the session.
pub struct Devices {
    list: [Option<Device>; AREAS_MAX],
    io: IoEngine,
}

/// An area could not be opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenError {
    /// Why.
    pub errno: Errno,
}

/// Returns the bytes of tables for all areas of a session.
pub fn table_bytes(membership: &Membership) -> usize {
    let areas = membership.head.areas().iter();
    areas
        .map(|area| {
            SlotMemory::bytes(membership.settings.slots, area.slots, cpus_of(area))
                + Region::bytes_for::<AtomicU32>(pages::words(area.slots))
                + Region::bytes_for::<AtomicU64>(pages::words(area.slots))
                + Region::bytes_for::<AtomicU64>(heirs::words(area.slots))
                + Region::bytes_for::<AtomicU64>(bitmap_words(area))
        })
        .sum()
}

const fn clusters_of(area: &AreaDescription) -> usize {
    area.slots.div_ceil(CLUSTER_SLOTS) as usize
}

fn cpus_of(area: &AreaDescription) -> usize {
    cpus_served(area.slots, ENGINE_THREADS_MAX)
}

const fn area_bytes(area: &AreaDescription) -> u64 {
    area.slots as u64 * PAGE_BYTES as u64
}

const fn bitmap_words(area: &AreaDescription) -> usize {
    AreaFile::bitmap_words(area_bytes(area))
}

fn open_to(flags: OFlags, path: &[u8]) -> Result<OwnedFd, Errno> {
    let path = core::ffi::CStr::from_bytes_until_nul(path).map_err(|_| Errno::EINVAL)?;
    let flags = flags | OFlags::CLOEXEC;
    let open = |more| rustix::fs::open(path, flags | more, Mode::empty());
    let direct = open(OFlags::DIRECT).ok().filter(|fd| !is_buffered(fd.as_fd()));
    // Where the page cache is in between, a write is over only once the disk has the bytes. Otherwise an
    // error of the disk would be known when the page's frame is used for another page.
    direct.map_or_else(|| open(OFlags::DSYNC), Ok).map_err(|error| Errno(error.raw_os_error()))
}

/// Whether the kernel says that this file's direct I/O goes through the page cache: with data=journal, for
/// example, or encryption. Linux before 6.1 doesn't say.
fn is_buffered(file: BorrowedFd) -> bool {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let told = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    told.is_ok_and(|told| told.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && told.stx_dio_offset_align == 0)
}

fn open(area: &AreaDescription) -> Result<BorrowedFd<'static>, Errno> {
    let fd = open_to(OFlags::RDWR, &area.open_path)?;
    // The supervisor holds the same lock shared. This lock keeps other runs out if the supervisor ends before
    // this process.
    let _ = rustix::fs::flock(&fd, FlockOperation::NonBlockingLockShared);
    // SAFETY: the descriptor is never closed. Nobody else knows it, because it is in a table that is the
    // engine's alone.
    Ok(unsafe { BorrowedFd::borrow_raw(fd.into_raw_fd()) })
}

/// Adds an area to which pages may go.
///
/// # Safety
/// `session` is mapped for good, and `description` was checked for it.
unsafe fn put_on(
    areas: &mut Areas<'static>,
    (session, settings): (&'static Session, &Settings),
    description: &AreaDescription,
    holder: u32,
    region: &mut Region<'static>,
) {
    let base = core::ptr::from_ref(session).cast::<u8>();
    // SAFETY: the tables lie at these offsets inside the session, and are aligned to 4 bytes, as was checked.
    // Holders are atomics. Nobody who keeps to the rules changes bad slots.
    let (holders, bad) = unsafe {
        let holders = base.add(description.owners_offset as usize).cast::<AtomicU32>();
        let bad = base.add(description.bad_offset as usize).cast::<u32>();
        (
            core::slice::from_raw_parts(holders, clusters_of(description)),
            core::slice::from_raw_parts(bad, description.bad_count as usize),
        )
    };
    let slots = description.slots;
    let id = areas.add(AreaMemory {
        slots,
        place: description.place,
        leases: Leases::new(holders, holder),
        memory: SlotMemory::carve(region, settings.slots, slots, cpus_of(description)),
        discards: description.discards != 0,
        owners: region.carve(pages::words(slots)),
        checksums: region.carve(pages::words(slots)),
        bad,
        heirs: region.carve(heirs::words(slots)),
    });
    if description.extents.is_known() {
        // SAFETY: the extents lie there inside the session, and are aligned to 8 bytes, as was checked. The
        // supervisor has built them. Nobody who keeps to the rules writes there any more.
        areas.set_extents(id, unsafe {
            Extents::of_memory(description.extents, base.add(description.extents_offset as usize))
        });
    }
}

/// Returns an area's file, if the file grows as it is written.
fn growing(
    fd: BorrowedFd<'static>,
    area: &AreaDescription,
    ensured: &'static [AtomicU64],
) -> Result<Option<AreaFile<'static>>, OpenError> {
    if area.grows == 0 {
        return Ok(None);
    }
    let (bytes, reserve) = (area_bytes(area), area.disk_reserve_bytes);
    if area.discards != 0 {
        return Ok(Some(AreaFile::punched(fd, bytes, reserve, ensured)));
    }
    let errno = |error: farpage_io::IoError| OpenError {
        errno: Errno(error.errno().map_or(Errno::EIO.0, i32::from)),
    };
    AreaFile::new(fd, bytes, reserve, ensured).map(Some).map_err(errno)
}

impl Devices {
    /// Opens every area and adds it to the areas of the pager.
    pub fn open(
        membership: &Membership,
        region: &mut Region<'static>,
    ) -> Result<(&'static Devices, Areas<'static>), OpenError> {
        let (session, settings) = (membership.session, &membership.settings);
        let holder = membership.index as u32 + 1;
        let devices = memory::place(Devices { list: [const { None }; AREAS_MAX], io: settings.io });
        let devices = devices.map_err(|errno| OpenError { errno })?;
        let mut areas = Areas::new(settings.order, settings.nodes as usize);
        // Without a random key, checksums still find what goes wrong by chance. A fork's child has a copy of
        // its parent's key, and checks the parent's pages with it.
        areas.set_key(farpage_os::sys::random_word().unwrap_or(0));
        for (at, description) in membership.head.areas().iter().enumerate() {
            let fd = open(description).map_err(|errno| OpenError { errno })?;
            // SAFETY: a process that joins a session maps all of it for good, and has checked its own copy of
            // the head.
            unsafe { put_on(&mut areas, (session, settings), description, holder, region) };
            let grows = growing(fd, description, region.carve(bitmap_words(description)))?;
            devices.list[at] = Some(Device { fd, path: &description.open_path, grows });
        }
        Ok((devices, areas))
    }

    fn device(&self, id: AreaId) -> &Device {
        self.list[id.0 as usize].as_ref().expect("an area that is on")
    }

    /// Returns the file of an area.
    pub fn fd(&self, id: AreaId) -> BorrowedFd<'static> {
        self.device(id).fd
    }

    /// Opens every area once more, to be read, in the calling thread's table. Calls `have` for each file for
    /// which there is a descriptor out of the program's way.
    pub fn open_again(&self, mut have: impl FnMut(AreaId, OwnedFd)) {
        for (id, device) in (0..).map(AreaId).zip(&self.list) {
            let file = device.as_ref().and_then(|device| open_to(OFlags::RDONLY, device.path).ok());
            if let Some(file) = file.and_then(|file| out_of_the_way(&file)) {
                have(id, file);
            }
        }
    }

    /// Makes sure that a cluster of an area has blocks on the disk.
    pub fn prepare(&self, id: AreaId, cluster: u32) -> Result<(), farpage_io::IoError> {
        self.device(id).grows.as_ref().map_or(Ok(()), |file| file.ensure_cluster(cluster))
    }

    /// Tells the disk that nothing in these slots of one cluster is needed. Returns whether the disk accepts.
    /// A refusal changes nothing.
    pub fn discard(&self, run: SlotRun) -> bool {
        let device = self.device(run.first.area());
        let start = run.first.byte_offset();
        if let Some(file) = &device.grows {
            return file.punch(start).is_ok();
        }
        let range = [start, u64::from(run.count) * PAGE_BYTES as u64];
        // SAFETY: the request reads two u64, and discards that range of the device. Nobody uses the slots in
        // the range. The allocator keeps them from everybody until it hears of the end.
        unsafe { farpage_os::sys::ioctl(device.fd.as_raw_fd(), BLKDISCARD, range.as_ptr() as usize) }.is_ok()
    }

    /// Makes a back end for one engine thread. The back end keeps `lock` open as long as it writes. Falls
    /// back to psync where the ring is refused. psync needn't keep `lock` open: a thread that writes with
    /// psync exists until the write is done.
    pub fn back_end(&'static self, id: AreaId, lock: BorrowedFd<'_>) -> BackEnd {
        if self.io == IoEngine::Uring
            && let Ok(ring) = Uring::new(self.fd(id), Some(lock), 32)
        {
            return BackEnd::Uring(ring);
        }
        BackEnd::Psync(Psync::new(self.fd(id)))
    }
}

/// One thread's back ends, each made when it is first needed. Their memory is reserved earlier, because there
/// may be no more mappings to be had by then. Without a mapping a back end falls back to psync. A reserved
/// mapping takes no memory until it is used.
pub struct BackEnds {
    places: &'static mut BackEndPlaces,
    made: [bool; AREAS_MAX],
}

/// Memory for a back end of each area.
pub type BackEndPlaces = [MaybeUninit<BackEnd>; AREAS_MAX];

impl BackEnds {
    /// No back ends yet. They will lie in `places`, whatever these hold now.
    pub const fn new(places: &'static mut BackEndPlaces) -> BackEnds {
        BackEnds { places, made: [false; AREAS_MAX] }
    }

    /// Returns an area's back end, if it was ever needed.
    pub fn get(&mut self, area: AreaId) -> Option<&mut BackEnd> {
        let at = area.0 as usize;
        // SAFETY: `made` says that `get_or_make` has written it. Nobody takes it out.
        self.made[at].then(|| unsafe { self.places[at].assume_init_mut() })
    }

    /// Returns an area's back end, and makes it first if it was never needed.
    pub fn get_or_make(&mut self, area: AreaId, make: impl FnOnce() -> BackEnd) -> &mut BackEnd {
        let at = area.0 as usize;
        if !self.made[at] {
            self.places[at].write(make());
            self.made[at] = true;
        }
        // SAFETY: it was written just now, or when it was first needed.
        unsafe { self.places[at].assume_init_mut() }
    }
}

/// A back end of either kind.
#[expect(clippy::large_enum_variant, reason = "there is no heap to put the larger one on")]
pub enum BackEnd {
    /// io_uring.
    Uring(Uring),
    /// pread and pwrite.
    Psync(Psync<'static>),
}

impl BackEnd {
    /// Whether a request is done when `submit` returns.
    pub const fn is_synchronous(&self) -> bool {
        matches!(self, BackEnd::Psync(_))
    }

    fn inner(&mut self) -> &mut dyn Backend {
        match self {
            BackEnd::Uring(ring) => ring,
            BackEnd::Psync(psync) => psync,
        }
    }
}

impl Backend for BackEnd {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        // SAFETY: the caller's promises for `submit` are passed on.
        unsafe { self.inner().submit(request) }
    }
    fn flush(&mut self) {
        self.inner().flush();
    }
    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        self.inner().complete(wait, out)
    }
    fn in_flight(&self) -> usize {
        match self {
            BackEnd::Uring(ring) => ring.in_flight(),
            BackEnd::Psync(psync) => psync.in_flight(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_area_has_its_back_end_made_once_and_kept() {
        // SAFETY: the places may hold anything. The memory is large enough, and only this test has it.
        let places =
            unsafe { &mut *memory::reserve(size_of::<BackEndPlaces>()).unwrap().cast::<BackEndPlaces>() };
        let mut back_ends = BackEnds::new(places);
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        // SAFETY: the descriptor is never closed.
        let fd = unsafe { BorrowedFd::borrow_raw(null.into_raw_fd()) };
        let (first, last) = (AreaId(0), AreaId(AREAS_MAX as u8 - 1));
        assert!(back_ends.get(last).is_none());
        let made = core::ptr::from_mut(back_ends.get_or_make(last, || BackEnd::Psync(Psync::new(fd))));
        assert!(
            back_ends.get(first).is_none() && back_ends.get(last).is_some_and(|it| core::ptr::eq(it, made))
        );
        let again = core::ptr::from_mut(back_ends.get_or_make(last, || panic!("it is there")));
        assert_eq!(again, made);
    }
}

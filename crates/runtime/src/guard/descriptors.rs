//! Descriptors of Farpage's in the program's table: the userfaultfd and the areas' files. The program's
//! threads serve faults with them.
//!
//! Once the program's calls are stopped, Farpage answers or notices each call that would close or replace one
//! of these descriptors (`handlers.rs` `keep_descriptors`). Farpage hasn't seen the calls that the program
//! made before. Until its calls are stopped, a number counts as Farpage's only while it still refers to the
//! same file, which is checked before each use.
// UNSAFETY: descriptors are borrowed from a table that isn't Farpage's.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use farpage_core::units::{AREAS_MAX, AreaId};
use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

/// A descriptor, while it is there.
struct KeptDescriptor {
    number: AtomicI32,
    /// Device and inode.
    file: [AtomicU64; 2],
}

/// Number that stands for no descriptor.
const NONE: RawFd = -1;

impl KeptDescriptor {
    const fn new() -> KeptDescriptor {
        KeptDescriptor { number: AtomicI32::new(NONE), file: [const { AtomicU64::new(0) }; 2] }
    }

    fn keep(&self, number: RawFd) {
        let Some(file) = file_of(number) else { return };
        self.file.iter().zip(file).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        // Ordering: Release publishes which file the number refers to.
        self.number.store(number, Ordering::Release);
    }

    fn number(&self) -> Option<RawFd> {
        // Ordering: Acquire (in SeqCst) pairs with the Release in `keep`; SeqCst pairs with `lose`.
        Some(self.number.load(Ordering::SeqCst)).filter(|number| *number != NONE)
    }

    /// Returns the number if the calling thread's table still has the same file there.
    fn number_if_same(&self) -> Option<RawFd> {
        let file = self.file.each_ref().map(|word| word.load(Ordering::Relaxed));
        self.number().filter(|number| file_of(*number) == Some(file))
    }

    fn lose(&self) {
        // Ordering: SeqCst, see `Direct::wait_for_users`.
        self.number.store(NONE, Ordering::SeqCst);
    }
}

fn file_of(number: RawFd) -> Option<[u64; 2]> {
    // SAFETY: the number isn't -1. The kernel is only asked which file it refers to, if any.
    let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) });
    status.ok().map(|status| [status.st_dev, status.st_ino])
}

/// The userfaultfd and the files of all areas.
pub struct Descriptors {
    userfaultfd: KeptDescriptor,
    areas: [KeptDescriptor; AREAS_MAX],
    /// Nothing can happen to the descriptors unseen any more.
    is_settled: AtomicBool,
}

impl Descriptors {
    /// Makes a table without any descriptor.
    pub const fn new() -> Descriptors {
        Descriptors {
            userfaultfd: KeptDescriptor::new(),
            areas: [const { KeptDescriptor::new() }; AREAS_MAX],
            is_settled: AtomicBool::new(false),
        }
    }

    /// Notes that the calling thread's table has the userfaultfd at `number`.
    pub fn keep_userfaultfd(&self, number: RawFd) {
        self.userfaultfd.keep(number);
    }

    /// Notes an area that the calling thread of the program has opened. If that succeeds, the file stays
    /// open.
    pub fn keep_area(&self, area: AreaId, file: OwnedFd) {
        self.areas[area.0 as usize].keep(file.as_raw_fd());
        if self.area(area).is_some() {
            let _ = file.into_raw_fd();
        }
    }

    fn all(&self) -> impl Iterator<Item = &KeptDescriptor> {
        core::iter::once(&self.userfaultfd).chain(&self.areas)
    }

    /// Returns whether the program still has the userfaultfd.
    pub fn has_userfaultfd(&self) -> bool {
        self.userfaultfd.number().is_some()
    }

    /// Returns the file of an area, for a thread of the program to read.
    pub fn area(&self, area: AreaId) -> Option<BorrowedFd<'_>> {
        // SAFETY: the number isn't -1. A thread that is about to give the number to another file waits for
        // all users of the number (`Direct::wait_for_users`). If the program has replaced the file unseen, by
        // a call that nobody stops, the wrong file is read into a frame of Farpage's. The checksum doesn't
        // match then.
        self.areas[area.0 as usize].number().map(|number| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Forgets an area's descriptor, which the program has closed or replaced.
    pub fn lose_area(&self, area: AreaId) {
        self.areas[area.0 as usize].lose();
    }

    /// Forgets whichever descriptor has this number.
    pub fn lose(&self, number: RawFd) {
        self.all().filter(|kept| kept.number() == Some(number)).for_each(KeptDescriptor::lose);
    }

    /// Returns the lowest number of a descriptor within `from..=to`.
    pub fn first_in(&self, from: u32, to: u32) -> Option<u32> {
        self.all()
            .filter_map(KeptDescriptor::number)
            .map(|number| number as u32)
            .filter(|fd| (from..=to).contains(fd))
            .min()
    }

    /// Returns all numbers at which the calling thread's table still has the same file.
    pub fn still_there(&self) -> impl Iterator<Item = RawFd> {
        self.all().filter_map(KeptDescriptor::number_if_same)
    }

    /// Forgets the descriptors for which the calling thread's table has another file. The table must be the
    /// program's. `are_seen` says that all calls of the program are stopped: then this check is the last one.
    pub fn settle(&self, are_seen: bool) {
        if self.is_settled.load(Ordering::Relaxed) {
            return;
        }
        self.all().filter(|kept| kept.number_if_same().is_none()).for_each(KeptDescriptor::lose);
        self.is_settled.store(are_seen, Ordering::Relaxed);
    }
}

//! Descriptors of ours in the program's table, with which its threads serve faults: the userfaultfd and the areas' files.
//!
//! Once the program's calls are stopped, those are answered or noticed that would close one or put something in its place
//! (`handlers.rs` `keep_descriptors`). What the program did before nobody has seen. So a number is ours as long as it is the
//! same file, which is looked at until then.
// UNSAFETY: descriptors are borrowed from a table that isn't ours.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use farpage_core::units::{AREAS_MAX, AreaId};
use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

/// One of them, as long as it is there.
struct Kept {
    number: AtomicI32,
    /// Device and inode.
    file: [AtomicU64; 2],
}

/// The number of none.
const NONE: RawFd = -1;

impl Kept {
    const fn new() -> Kept {
        Kept { number: AtomicI32::new(NONE), file: [const { AtomicU64::new(0) }; 2] }
    }

    fn keep(&self, number: RawFd) {
        let Some(file) = file_of(number) else { return };
        self.file.iter().zip(file).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        // Ordering: Release publishes which file it is.
        self.number.store(number, Ordering::Release);
    }

    fn number(&self) -> Option<RawFd> {
        // Ordering: Acquire (in SeqCst) pairs with the Release in `keep`; SeqCst with `lose`.
        Some(self.number.load(Ordering::SeqCst)).filter(|number| *number != NONE)
    }

    /// The number, if the calling thread's table still has the same file there.
    fn number_if_same(&self) -> Option<RawFd> {
        let file = self.file.each_ref().map(|word| word.load(Ordering::Relaxed));
        self.number().filter(|number| file_of(*number) == Some(file))
    }

    fn lose(&self) {
        // Ordering: SeqCst: see `Direct::wait_for_users`.
        self.number.store(NONE, Ordering::SeqCst);
    }
}

fn file_of(number: RawFd) -> Option<[u64; 2]> {
    // SAFETY: not -1; asked only which file it is, if it is any.
    let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(number) });
    status.ok().map(|status| [status.st_dev, status.st_ino])
}

/// All of them.
pub struct Descriptors {
    userfaultfd: Kept,
    areas: [Kept; AREAS_MAX],
    /// Nothing can happen to them unseen any more.
    is_settled: AtomicBool,
}

impl Descriptors {
    /// None.
    pub const fn new() -> Descriptors {
        Descriptors {
            userfaultfd: Kept::new(),
            areas: [const { Kept::new() }; AREAS_MAX],
            is_settled: AtomicBool::new(false),
        }
    }

    /// The calling thread's table has the userfaultfd there.
    pub fn keep_userfaultfd(&self, number: RawFd) {
        self.userfaultfd.keep(number);
    }

    /// The calling thread of the program has opened an area.
    pub fn keep_area(&self, area: AreaId, file: OwnedFd) {
        self.areas[area.0 as usize].keep(file.as_raw_fd());
        if self.area(area).is_some() {
            let _ = file.into_raw_fd();
        }
    }

    fn all(&self) -> impl Iterator<Item = &Kept> {
        core::iter::once(&self.userfaultfd).chain(&self.areas)
    }

    /// Whether the program still has the userfaultfd.
    pub fn has_userfaultfd(&self) -> bool {
        self.userfaultfd.number().is_some()
    }

    /// An area, to be read by a thread of the program.
    pub fn area(&self, area: AreaId) -> Option<BorrowedFd<'_>> {
        // SAFETY: not -1. What puts another file in its place waits for whoever uses the number (`Direct::wait_for_users`). Should
        // the program have done so unseen, by a call that nobody stops, that file is read into a frame of ours, and has another
        // checksum.
        self.areas[area.0 as usize].number().map(|number| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// The program has closed it, or has something else there.
    pub fn lose_area(&self, area: AreaId) {
        self.areas[area.0 as usize].lose();
    }

    /// The same for whichever has this number.
    pub fn lose(&self, number: RawFd) {
        self.all().filter(|kept| kept.number() == Some(number)).for_each(Kept::lose);
    }

    /// The lowest of their numbers in this range.
    pub fn first_in(&self, from: u32, to: u32) -> Option<u32> {
        self.all()
            .filter_map(Kept::number)
            .map(|number| number as u32)
            .filter(|fd| (from..=to).contains(fd))
            .min()
    }

    /// Their numbers, but for those where the calling thread's table has something else.
    pub fn still_there(&self) -> impl Iterator<Item = RawFd> {
        self.all().filter_map(Kept::number_if_same)
    }

    /// Loses those where the calling thread's table, which must be the program's, has something else. Once `are_seen` is true,
    /// which says that all calls of the program are stopped, that was the last look.
    pub fn settle(&self, are_seen: bool) {
        if self.is_settled.load(Ordering::Relaxed) {
            return;
        }
        self.all().filter(|kept| kept.number_if_same().is_none()).for_each(Kept::lose);
        self.is_settled.store(are_seen, Ordering::Relaxed);
    }
}

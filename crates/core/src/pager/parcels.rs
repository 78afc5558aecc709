//! Pages that go to areas together: parcels that wait for slots, and parcels that are being written. A
//! *parcel* is the content of one slot. It is one page as it is, out of its frame, or several pages,
//! [packed](super::pack) in a frame that no page owns.
//!
//! A packed page keeps its own frame until the pack is written, like any other page. A fault copies the page
//! from that frame. If the write fails, the page is parked there again.

use super::pack;
use crate::areas::SlotRun;
use crate::memory::Zeroed;
use crate::table::entry::FRAMES_MAX;
use crate::units::{FrameIndex, PARTS_MAX, Part, SlotIndex, SlotPart};

/// Slots of one write request, and parcels that wait, at most.
pub const WRITE_SLOTS_MAX: usize = 64;

/// Newest parcels of a batch whose packs still take pages. A page should lie beside its neighbours, because
/// they are read together.
const OPEN_PARCELS: usize = 6;
/// Names no frame: the part never had a page, or its page has left.
const NONE: u16 = u16::MAX;
const _: () = assert!(FRAMES_MAX < NONE as u32);

/// Where a page was before it joined a write batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The page was parked in its frame.
    Parked,
    /// The page was an object of the pool.
    Pool,
}

/// The content of one slot.
#[derive(Clone, Copy)]
pub(super) struct Parcel {
    is_pack: bool,
    /// Pages that were in the pool: one bit for each part.
    from_pool: u8,
    /// Objects that were put into the pack. `filled` is their size in bytes.
    objects: u8,
    filled: u16,
    /// The frame that is written: a page's frame, or for a pack a frame that no page owns.
    written: u16,
    /// The pages' own frames, by part.
    pages: [u16; PARTS_MAX],
}

impl Parcel {
    const NOTHING: Parcel = Parcel {
        is_pack: false,
        from_pool: 0,
        objects: 0,
        filled: 0,
        written: NONE,
        pages: [NONE; PARTS_MAX],
    };

    /// Returns a parcel of one page, as it is.
    pub(super) fn whole(frame: FrameIndex, origin: Origin) -> Parcel {
        let mut parcel = Parcel { written: frame.0 as u16, ..Parcel::NOTHING };
        parcel.put(0, (frame, origin));
        parcel
    }

    fn put(&mut self, at: usize, (frame, origin): (FrameIndex, Origin)) {
        self.pages[at] = frame.0 as u16;
        self.from_pool |= u8::from(origin == Origin::Pool) << at;
    }

    /// Returns where a page of the parcel was before.
    pub(super) fn origin(&self, part: Part) -> Origin {
        if self.from_pool & 1 << part.place() != 0 { Origin::Pool } else { Origin::Parked }
    }

    /// Returns an empty pack, in a frame that no page owns.
    pub(super) fn pack(frame: FrameIndex) -> Parcel {
        Parcel { is_pack: true, written: frame.0 as u16, ..Parcel::NOTHING }
    }

    /// The frame that is written.
    pub(super) fn written(&self) -> FrameIndex {
        FrameIndex(u32::from(self.written))
    }

    pub(super) const fn is_pack(&self) -> bool {
        self.is_pack
    }

    /// Returns the bytes left after adding an object of `bytes` bytes. `None` if the object doesn't fit, or
    /// if this isn't a pack.
    fn left_after(&self, bytes: usize) -> Option<usize> {
        let left = (pack::CAPACITY - usize::from(self.filled)).checked_sub(bytes);
        left.filter(|_| self.is_pack && usize::from(self.objects) < PARTS_MAX)
    }

    /// Adds a page whose object has `bytes` bytes. Returns the object's number, and the bytes of the objects
    /// before it.
    pub(super) fn add(&mut self, from: (FrameIndex, Origin), bytes: usize) -> (usize, usize) {
        let (at, before) = (usize::from(self.objects), usize::from(self.filled));
        self.put(at, from);
        self.objects += 1;
        self.filled += bytes as u16;
        (at, before)
    }

    /// Returns the parts and frames of the pages that are still in the parcel.
    pub(super) fn pages(self) -> impl Iterator<Item = (Part, FrameIndex)> {
        let part = move |at| if self.is_pack { Part::nth(at) } else { Part::WHOLE };
        let pages = self.pages.into_iter().enumerate().filter(|(_, frame)| *frame != NONE);
        pages.map(move |(at, frame)| (part(at), FrameIndex(u32::from(frame))))
    }

    /// Returns the number of pages that are still in the parcel.
    pub(super) fn count(self) -> usize {
        self.pages().count()
    }

    /// Removes a page that has left the parcel.
    pub(super) fn remove(&mut self, part: Part) {
        self.pages[part.place()] = NONE;
    }

    /// Returns the number of the parcel's frames, or more.
    const fn frames_at_most(&self) -> usize {
        if self.is_pack { 1 + self.objects as usize } else { 1 }
    }

    /// Returns every frame of the parcel; none if no page is in it.
    fn frames(self) -> impl Iterator<Item = FrameIndex> {
        let pack = (self.is_pack && self.count() > 0).then(|| self.written());
        pack.into_iter().chain(self.pages().map(|(_, frame)| frame))
    }
}

/// Parcels that wait for slots, oldest first, and slots that were taken for them: at most one slot for each
/// parcel.
pub struct WriteBatch {
    parcels: [Parcel; WRITE_SLOTS_MAX],
    count: usize,
    runs: [SlotRun; WRITE_SLOTS_MAX],
    runs_count: usize,
}

// SAFETY: integers and `false` may be all zero bytes, and no field has a drop.
unsafe impl Zeroed for WriteBatch {}

impl Default for WriteBatch {
    fn default() -> Self {
        WriteBatch::new()
    }
}

impl WriteBatch {
    /// Returns an empty batch.
    pub const fn new() -> WriteBatch {
        let no_run = SlotRun { first: SlotIndex::from_raw(0), count: 0 };
        WriteBatch {
            parcels: [Parcel::NOTHING; WRITE_SLOTS_MAX],
            count: 0,
            runs: [no_run; WRITE_SLOTS_MAX],
            runs_count: 0,
        }
    }
    /// Returns the number of slots that the waiting parcels need.
    pub const fn len(&self) -> usize {
        self.count
    }
    /// Whether no parcel waits.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// Whether the batch may have no free place for another page.
    pub const fn is_full(&self) -> bool {
        self.count == WRITE_SLOTS_MAX
    }
    /// Returns the number of frames that wait, or a few more.
    pub fn frames_at_most(&self) -> usize {
        self.parcels[..self.count].iter().map(Parcel::frames_at_most).sum()
    }
    pub(super) fn push(&mut self, parcel: Parcel) -> &mut Parcel {
        self.count += 1;
        self.parcels[self.count - 1] = parcel;
        &mut self.parcels[self.count - 1]
    }
    /// Returns the open pack that an object of `bytes` bytes fits best.
    pub(super) fn pack_for(&mut self, bytes: usize) -> Option<&mut Parcel> {
        let parcels = self.parcels[self.count.saturating_sub(OPEN_PARCELS)..self.count].iter_mut();
        let fitting = parcels.filter_map(|parcel| parcel.left_after(bytes).map(|left| (left, parcel)));
        fitting.min_by_key(|(left, _)| *left).map(|(_, parcel)| parcel)
    }
    pub(super) fn parcels(&mut self) -> &mut [Parcel] {
        &mut self.parcels[..self.count]
    }
    pub(super) fn drop_first(&mut self, count: usize) {
        self.parcels.copy_within(count..self.count, 0);
        self.count -= count;
    }
    /// Forgets the parcels that have no page.
    pub(super) fn drop_empty(&mut self) {
        let mut kept = 0;
        for at in 0..self.count {
            if self.parcels[at].count() > 0 {
                self.parcels[kept] = self.parcels[at];
                kept += 1;
            }
        }
        self.count = kept;
    }
    pub(super) fn push_run(&mut self, run: SlotRun) {
        self.runs[self.runs_count] = run;
        self.runs_count += 1;
    }
    /// Removes and returns the run that was pushed first. Pages that follow each other then also have slots
    /// that follow each other, across the borders of runs.
    pub(super) fn pop_run(&mut self) -> Option<SlotRun> {
        let first = self.runs[..self.runs_count].first().copied()?;
        self.runs.copy_within(1..self.runs_count, 0);
        self.runs_count -= 1;
        Some(first)
    }
    /// Returns the slots that were taken for waiting parcels.
    pub fn slots(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let runs = self.runs[..self.runs_count].iter();
        runs.flat_map(|run| (0..run.count).map(|at| run.first.plus(at)))
    }
    /// Returns the frames that wait: pages' frames, and frames that hold packs.
    pub fn frames(&self) -> impl Iterator<Item = FrameIndex> + '_ {
        self.parcels[..self.count].iter().flat_map(|parcel| parcel.frames())
    }
}

/// Parcels to be written to neighbouring slots in one request. The driver keeps the request until
/// `write_done` says that the request is finished.
#[derive(Clone, Copy)]
pub struct WriteRequest {
    run: SlotRun,
    parcels: [Parcel; WRITE_SLOTS_MAX],
    /// Whether the areas have been told that the write is over.
    pub(super) is_over: bool,
}

// SAFETY: integers and `false` may be all zero bytes, and no field has a drop.
unsafe impl Zeroed for WriteRequest {}

impl WriteRequest {
    /// Returns a request. `parcels` must be as many as `run` has slots.
    pub(super) fn new(run: SlotRun, parcels: &[Parcel]) -> WriteRequest {
        let mut request = WriteRequest { run, parcels: [Parcel::NOTHING; WRITE_SLOTS_MAX], is_over: false };
        request.parcels[..parcels.len()].copy_from_slice(parcels);
        request
    }
    /// The slots.
    pub const fn run(&self) -> SlotRun {
        self.run
    }
    /// Returns the frames to be written, in the order of the slots.
    pub fn written(&self) -> impl ExactSizeIterator<Item = FrameIndex> + '_ {
        self.parcels[..self.run.count as usize].iter().map(Parcel::written)
    }
    /// Returns the parcels and their slots.
    pub(super) fn parcels(&mut self) -> impl Iterator<Item = (SlotIndex, &mut Parcel)> {
        let SlotRun { first, count } = self.run;
        let parcels = self.parcels[..count as usize].iter_mut();
        parcels.enumerate().map(move |(at, parcel)| (first.plus(at as u32), parcel))
    }
    /// Returns where each page that isn't settled yet goes, and the page's frame.
    pub fn open(&self) -> impl Iterator<Item = (SlotPart, FrameIndex)> + '_ {
        self.parcels[..self.run.count as usize].iter().enumerate().flat_map(|(at, parcel)| {
            let slot = self.run.first.plus(at as u32);
            parcel.pages().map(move |(part, frame)| (SlotPart { slot, part }, frame))
        })
    }
    /// Returns the frames of pages that aren't settled yet, and the frames that hold their packs.
    pub fn frames(&self) -> impl Iterator<Item = FrameIndex> + '_ {
        self.parcels[..self.run.count as usize].iter().flat_map(|parcel| parcel.frames())
    }
}

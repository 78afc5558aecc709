//! What the pager wants done next, and what it must hear afterwards. The contract between core and drivers.

use super::ahead::Fate;
use crate::areas::SlotRun;
use crate::cache::Backing;
use crate::reclaim::rivals::Way;
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, PageIndex, SlotIndex};

/// What the program was doing when it faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading a page that isn't there.
    Read,
    /// Writing a page that isn't there.
    Write,
    /// Writing a page that is there but write-protected.
    WriteProtected,
}

/// What a fault needs. Each variant with a [`Ticket`] holds the page's lock until the ticket is settled,
/// failed or given back.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Map a page of zeros.
    Zero(Ticket),
    /// The ticket's frame holds the bytes: put them into the program's memory.
    Install(Ticket),
    /// Give the ticket's frame memory if it has none, then call [`super::Pager::load`], then install.
    Load(Ticket),
    /// Give the frame memory, read the ticket's slot into it, then [`super::Pager::read_done`].
    Read(Ticket),
    /// Lift the write protection.
    Unprotect(Ticket),
    /// Somebody else is moving the page and will wake the faulting thread: nothing to do.
    Joined,
    /// The page is there: wake the thread.
    Present,
    /// The page's only copy could not be read: the program must get SIGBUS.
    Lost(SlotIndex),
    /// Every frame is in use: make room (place, finish writes) and ask again.
    NoFrame,
    /// Nothing was ever managed at this address.
    Unknown,
}

/// One page on its way in.
#[derive(Debug)]
#[must_use]
pub struct Ticket {
    pub(super) page: PageIndex,
    pub(super) before: State,
    /// Where its bytes are: `before`, or what that was for the process that it is inherited from.
    pub(super) source: State,
    pub(super) frame: Option<(FrameIndex, Backing)>,
    /// The page is to keep what it is brought from.
    pub(super) keep_copy: bool,
    pub(super) put_back: bool,
    /// Nobody has touched the page: it comes along with a neighbour.
    pub(super) ahead: bool,
    /// A walk has brought it: that it came back soon says nothing.
    pub(super) in_walk: bool,
    /// Where readahead puts it.
    pub(super) fate: Fate,
}

impl Ticket {
    /// The page.
    pub const fn page(&self) -> PageIndex {
        self.page
    }
    /// The frame that holds its bytes, or will.
    pub const fn frame(&self) -> Option<FrameIndex> {
        match self.frame {
            Some((frame, _)) => Some(frame),
            None => None,
        }
    }
    /// Whether the frame must be given memory before anything is put into it.
    pub const fn needs_backing(&self) -> bool {
        matches!(self.frame, Some((_, Backing::Hole)))
    }
    /// The driver has given the frame memory.
    pub const fn set_backed(&mut self) {
        if let Some((_, backing)) = &mut self.frame {
            *backing = Backing::Memory;
        }
    }
    /// Where readahead puts the page.
    pub const fn fate(&self) -> Fate {
        self.fate
    }
    /// The slot to read.
    pub const fn slot(&self) -> Option<SlotIndex> {
        self.source.slot()
    }
    /// What the page was.
    pub const fn before(&self) -> State {
        self.before
    }
    /// Whether its bytes are in a slot and nowhere else.
    pub const fn is_on_area(&self) -> bool {
        matches!(self.source, State::OnArea(_))
    }
}

/// What became of a page that was to be taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is in its frame.
    Yes,
    /// The kernel or a device holds it, or its mapping doesn't allow it now: it stays.
    Busy,
    /// There was no page.
    Gone,
}

/// Pages that one eviction takes at most.
pub const BATCH_MAX: usize = 128;

/// One page on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// The page; locked.
    pub page: PageIndex,
    /// Where it goes.
    pub frame: FrameIndex,
    /// What is behind the frame, or was before the page came; a page can only be moved into a hole.
    pub backing: Backing,
    /// What became of it; the driver sets it.
    pub taken: Taken,
    pub(super) copy: Option<Stored>,
}

impl Victim {
    /// Whether it owns a slot: then it may stay write-protected, should it not be taken, because its first write frees that.
    pub const fn keeps_slot(&self) -> bool {
        matches!(self.copy, Some(Stored::Slot(_)))
    }
}

/// Pages on their way out: one or a few stretches of memory, each in address order.
#[derive(Debug)]
pub struct Batch {
    victims: [Victim; BATCH_MAX],
    count: usize,
    /// How they were found, all of them.
    pub(crate) way: Way,
}

impl Default for Batch {
    fn default() -> Self {
        Batch::new()
    }
}

impl Batch {
    /// Nothing in it.
    pub const fn new() -> Batch {
        let none = Victim {
            page: PageIndex(0),
            frame: FrameIndex(0),
            backing: Backing::Hole,
            taken: Taken::Busy,
            copy: None,
        };
        Batch { victims: [none; BATCH_MAX], count: 0, way: Way::Hand }
    }
    /// How many.
    pub const fn len(&self) -> usize {
        self.count
    }
    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// The victims.
    pub fn victims(&mut self) -> &mut [Victim] {
        &mut self.victims[..self.count]
    }
    pub(crate) const fn clear(&mut self) {
        self.count = 0;
    }
    pub(super) fn retain(&mut self, stays: impl Fn(usize, &Victim) -> bool) {
        let mut kept = 0;
        for at in 0..self.count {
            if stays(at, &self.victims[at]) {
                self.victims[kept] = self.victims[at];
                kept += 1;
            }
        }
        self.count = kept;
    }
    pub(crate) fn push(&mut self, page: PageIndex, copy: Option<Stored>) {
        let victim = &mut self.victims[self.count];
        victim.page = page;
        victim.copy = copy;
        victim.taken = Taken::Busy;
        self.count += 1;
    }
}

/// Pages of one write request at most.
pub const WRITE_PAGES_MAX: usize = 64;

/// Frames that wait for slots, oldest first, and slots that were taken for them: at most one for each.
pub struct WriteBatch {
    pub(super) frames: [FrameIndex; WRITE_PAGES_MAX],
    pub(super) count: usize,
    runs: [SlotRun; WRITE_PAGES_MAX],
    runs_count: usize,
}

impl Default for WriteBatch {
    fn default() -> Self {
        WriteBatch::new()
    }
}

impl WriteBatch {
    /// Nothing in it.
    pub const fn new() -> WriteBatch {
        let no_run = SlotRun { first: SlotIndex::from_raw(0), count: 0 };
        WriteBatch {
            frames: [FrameIndex(0); WRITE_PAGES_MAX],
            count: 0,
            runs: [no_run; WRITE_PAGES_MAX],
            runs_count: 0,
        }
    }
    /// How many wait.
    pub const fn len(&self) -> usize {
        self.count
    }
    /// Whether none waits.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// Whether another one fits.
    pub const fn is_full(&self) -> bool {
        self.count == WRITE_PAGES_MAX
    }
    pub(super) fn push(&mut self, frame: FrameIndex) {
        self.frames[self.count] = frame;
        self.count += 1;
    }
    pub(super) fn drop_first(&mut self, count: usize) {
        self.frames.copy_within(count..self.count, 0);
        self.count -= count;
    }
    pub(super) fn push_run(&mut self, run: SlotRun) {
        self.runs[self.runs_count] = run;
        self.runs_count += 1;
    }
    /// The run that was taken first: pages that follow each other then do so in their slots, border or not.
    pub(super) fn pop_run(&mut self) -> Option<SlotRun> {
        let first = self.runs[..self.runs_count].first().copied()?;
        self.runs.copy_within(1..self.runs_count, 0);
        self.runs_count -= 1;
        Some(first)
    }
    /// Slots that were taken for the frames that wait.
    pub fn slots(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        let runs = self.runs[..self.runs_count].iter();
        runs.flat_map(|run| (0..run.count).map(|at| run.first.plus(at)))
    }
    /// The frames that wait.
    pub fn frames(&self) -> &[FrameIndex] {
        &self.frames[..self.count]
    }
}

/// Frames to be written to neighbouring slots, in one request. Keep until `write_done` said it is finished.
#[derive(Clone, Copy)]
pub struct WriteRequest {
    pub(super) run: SlotRun,
    pub(super) frames: [FrameIndex; WRITE_PAGES_MAX],
    /// Bit n: page n is not settled yet.
    pub(super) open: u64,
    /// The areas have heard that it is over.
    pub(super) is_over: bool,
}

const _: () = assert!(WRITE_PAGES_MAX == u64::BITS as usize);

impl WriteRequest {
    /// The slots.
    pub const fn run(&self) -> SlotRun {
        self.run
    }
    /// The frames, in the order of the slots.
    pub fn frames(&self) -> &[FrameIndex] {
        &self.frames[..self.run.count as usize]
    }
    /// Frames and slots that are not settled yet.
    pub fn open(&self) -> impl Iterator<Item = (SlotIndex, FrameIndex)> + '_ {
        let open = self.open;
        self.frames()
            .iter()
            .enumerate()
            .filter(move |(at, _)| open & 1 << at != 0)
            .map(|(at, frame)| (self.run.first.plus(at as u32), *frame))
    }
}

//! What the pager wants done next, and what it must hear afterwards. The contract between core and drivers.

use super::ahead::Fate;
use crate::cache::Backing;
use crate::reclaim::rivals::Way;
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, PageIndex, Part, SlotIndex, SlotPart};

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
    /// Of a page that is locked and was in this state; its bytes are in `source`. As if a thread waits for it.
    pub(super) const fn new(page: PageIndex, before: State, source: State) -> Ticket {
        Ticket {
            page,
            before,
            source,
            frame: None,
            keep_copy: false,
            put_back: false,
            ahead: false,
            in_walk: false,
            fate: Fate::Map,
        }
    }
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
        match self.source.slot() {
            Some(at) => Some(at.slot),
            None => None,
        }
    }
    /// Where in an area its bytes are.
    pub(super) fn slot_part(&self) -> SlotPart {
        self.source.slot().expect("a ticket to read has a slot")
    }
    /// Whether the slot has other pages, too, and what is read from it must be unpacked.
    pub fn is_packed(&self) -> bool {
        self.source.slot().is_some_and(|at| at.part != Part::WHOLE)
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

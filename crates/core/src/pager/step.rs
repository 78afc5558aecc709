//! The contract between core and drivers: what the pager wants done next, and what it must hear afterwards.

use super::ahead::Fate;
use crate::cache::Backing;
use crate::reclaim::rivals::Way;
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, PageIndex, Part, SlotIndex, SlotPart};

/// The access by which the program faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading a page that isn't there.
    Read,
    /// Writing a page that isn't there.
    Write,
    /// Writing a page that is there but write-protected.
    WriteProtected,
}

/// The work that a fault needs. Each variant with a [`Ticket`] holds the page's lock until the ticket is
/// settled, failed or given back.
#[derive(Debug)]
#[must_use]
pub enum Step {
    /// Map a page of zeros.
    Zero(Ticket),
    /// The ticket's frame holds the bytes: put the bytes into the program's memory.
    Install(Ticket),
    /// Give the ticket's frame memory if it has none, then call [`super::Pager::load`], then install.
    Load(Ticket),
    /// Give the frame memory, read the ticket's slot into the frame, then call [`super::Pager::read_done`],
    /// then install.
    Read(Ticket),
    /// Lift the write protection.
    Unprotect(Ticket),
    /// Another thread is moving the page and will wake the faulting thread. Nothing is left to do.
    Joined,
    /// The page is there: wake the thread.
    Present,
    /// The page's only copy could not be read: the program must get SIGBUS.
    Lost(SlotIndex),
    /// Every frame is in use. Free a frame (place parked pages, finish writes) and ask again.
    NoFrame,
    /// Nothing was ever managed at this address.
    Unknown,
}

/// A page on its way in.
#[derive(Debug)]
#[must_use]
pub struct Ticket {
    pub(super) page: PageIndex,
    pub(super) before: State,
    /// The state that says where the bytes are: `before`, or for an inherited page its state in the elder's
    /// books.
    pub(super) source: State,
    pub(super) frame: Option<(FrameIndex, Backing)>,
    /// Whether the page keeps the slot or object that it is brought from.
    pub(super) keep_copy: bool,
    pub(super) put_back: bool,
    /// The page comes along with a neighbour; no thread has touched the page.
    pub(super) ahead: bool,
    /// A walk has brought the page, so coming back soon says nothing about the page's use.
    pub(super) in_walk: bool,
    /// Where readahead puts the page.
    pub(super) fate: Fate,
}

impl Ticket {
    /// Returns a ticket for a locked page that was in state `before` and whose bytes are in `source`. The
    /// other fields are those of a page that a thread waits for.
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
    /// The frame that holds the page's bytes, or will hold them.
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
    /// Records that the driver has given the frame memory.
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
    /// Returns where in an area the page's bytes are.
    pub(super) fn slot_part(&self) -> SlotPart {
        self.source.slot().expect("a ticket to read has a slot")
    }
    /// Whether the slot holds other pages, too. If so, the bytes read from the slot must be unpacked.
    pub fn is_packed(&self) -> bool {
        self.source.slot().is_some_and(|at| at.part != Part::WHOLE)
    }
    /// The page's state before the move.
    pub const fn before(&self) -> State {
        self.before
    }
    /// Whether a slot is the only place that has the page's bytes.
    pub const fn is_on_area(&self) -> bool {
        matches!(self.source, State::OnArea(_))
    }
}

/// The outcome for a page that the driver was to take out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The page is in its frame.
    Yes,
    /// The page stays: the kernel or a device holds it, or the mapping doesn't allow the move now.
    Busy,
    /// There was no page.
    Gone,
}

/// Pages that one eviction takes at most.
pub const BATCH_MAX: usize = 128;

/// A page on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// The locked page.
    pub page: PageIndex,
    /// The frame that the page goes to.
    pub frame: FrameIndex,
    /// The frame's backing now, or before the page came. A page can only be moved into a hole.
    pub backing: Backing,
    /// The outcome, which the driver sets.
    pub taken: Taken,
    pub(super) copy: Option<Stored>,
}

impl Victim {
    /// Whether the victim owns a slot. A victim that owns a slot may stay write-protected if it isn't taken,
    /// because its first write frees the slot.
    pub const fn keeps_slot(&self) -> bool {
        matches!(self.copy, Some(Stored::Slot(_)))
    }
}

/// Pages on their way out. The pages come from one or a few stretches of memory, each in address order.
#[derive(Debug)]
pub struct Batch {
    victims: [Victim; BATCH_MAX],
    count: usize,
    /// The way in which all victims were found.
    pub(crate) way: Way,
}

impl Default for Batch {
    fn default() -> Self {
        Batch::new()
    }
}

impl Batch {
    /// Returns an empty batch.
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
    /// The number of victims.
    pub const fn len(&self) -> usize {
        self.count
    }
    /// Whether the batch has no victim.
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

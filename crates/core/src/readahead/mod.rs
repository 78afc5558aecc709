//! Readahead: which pages are brought in before anybody asks for them.
//!
//! Three policies answer the same question (`--readahead`): [`streams`] is ours, [`by_address`] and [`by_slot`]
//! are Linux's, to compare with, and share the formula in [`window`]. What they decide is a [`Plan`]. Who carries
//! it out is `pager/ahead.rs` for the books and the driver for the rest; nobody waits for it.

pub mod by_address;
pub mod by_slot;
pub mod streams;
pub mod window;

pub use streams::{Streams, Window};

use crate::units::{PARTS_MAX, PageIndex, PageRange, Part, SlotIndex, SlotPart};

/// Pages to bring in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The evicted pages of a range, to be parked with a mark.
    Pages(PageRange),
    /// The pages that own these neighbouring slots, likewise.
    Slots {
        /// The first slot.
        first: SlotIndex,
        /// How many.
        count: u32,
    },
    /// A stream's next window: parked is its first page, the others are mapped at once.
    Stream(Window),
    /// What a stream comes to next that has outrun its window, all mapped at once; nothing that lies on an area.
    CatchUp(Window),
    /// What a stream's windows should have brought and didn't, or what has gone since: all mapped at once.
    Rest(Window),
}

/// What readahead wants because of one fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// Pages to bring in.
    pub plan: Option<Plan>,
    /// A stream has outrun its window: what it comes to next.
    pub late: Option<Window>,
    /// The page belongs to a walk that was expected here.
    pub is_walk: bool,
}

impl Plan {
    /// Places to look at.
    pub const fn looks(&self) -> u32 {
        match self {
            Plan::Pages(range) => range.count() as u32,
            Plan::Slots { count, .. } => *count * PARTS_MAX as u32,
            Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) => window.reach,
        }
    }

    /// Pages to bring in at most.
    pub const fn count(&self) -> u32 {
        match self {
            Plan::Pages(range) => range.count() as u32,
            Plan::Slots { count, .. } => *count * PARTS_MAX as u32,
            Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) => window.count,
        }
    }

    /// The page at one place; `owner` says whose a part of a slot is, or a slot that isn't shared.
    pub(crate) fn page(&self, step: u32, owner: impl Fn(SlotPart) -> Option<PageIndex>) -> Option<PageIndex> {
        match self {
            Plan::Pages(range) => Some(range.start.plus(u64::from(step))),
            Plan::Slots { first, .. } => {
                let (slot, part) = (step / PARTS_MAX as u32, step as usize % PARTS_MAX);
                owner(SlotPart { slot: first.plus(slot), part: Part::nth(part) })
            }
            Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) => Some(window.page(step)),
        }
    }
}

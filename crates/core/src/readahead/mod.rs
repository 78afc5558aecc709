//! Readahead: which pages are brought in before a thread touches them.
//!
//! Three policies answer the same question (`--readahead`). [`streams`] is Farpage's own. [`by_address`] and
//! [`by_slot`] are Linux's, for comparison, and share the formula in [`window`]. A policy's decision is a
//! [`Plan`]. `pager/ahead.rs` keeps the books of a plan, and the driver does the rest. No thread waits for a
//! plan.

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
    /// The pages that own these neighbouring slots, to be parked with a mark.
    Slots {
        /// The first slot.
        first: SlotIndex,
        /// The number of slots.
        count: u32,
    },
    /// A stream's next window. The first page is parked, the rest is mapped at once.
    Stream(Window),
    /// The pages that a stream which has outrun its window comes to next. All are mapped at once. Pages on an
    /// area are left out.
    CatchUp(Window),
    /// Pages that a stream's windows should have brought and didn't, or that were evicted since. All are
    /// mapped at once.
    Rest(Window),
}

/// Readahead's answer to one fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// Pages to bring in.
    pub plan: Option<Plan>,
    /// The pages that a stream which has outrun its window comes to next.
    pub late: Option<Window>,
    /// Whether the page belongs to a walk that was expected here.
    pub is_walk: bool,
}

impl Plan {
    /// Returns the number of places to look at.
    pub const fn looks(&self) -> u32 {
        match self {
            Plan::Pages(range) => range.count() as u32,
            Plan::Slots { count, .. } => *count * PARTS_MAX as u32,
            Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) => window.reach,
        }
    }

    /// Returns the number of pages to bring in at most.
    pub const fn count(&self) -> u32 {
        match self {
            Plan::Pages(range) => range.count() as u32,
            Plan::Slots { count, .. } => *count * PARTS_MAX as u32,
            Plan::Stream(window) | Plan::CatchUp(window) | Plan::Rest(window) => window.count,
        }
    }

    /// Returns the page at place `step`. `owner` says which page owns a part of a slot, or a whole slot.
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

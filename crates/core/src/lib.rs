//! The swap subsystem: structures and policy, and nothing that waits.
//!
//! No system call, no thread, no clock, no random number, and no allocation after start. `core` is handed
//! memory and answers with what to do next; whoever drives it does the waiting: the live runtime, the
//! simulator, a property test.
//!
//! # Life of a fault
//!
//! 1. [`pager::Pager::fault`] locks the page's [`table`] entry and looks where its bytes are: nowhere, in a word,
//!    in the swap [`cache`], in the [`zswap`] pool, in a slot of one of the [`areas`].
//! 2. It answers with a [`pager::Step`]. The driver gives a frame memory, reads a slot, waits.
//! 3. [`pager::Pager::load`] decompresses, or [`pager::Pager::read_done`] verifies what was read.
//! 4. The driver installs the page; [`pager::Pager::settle_fault`] ends the move.
//!
//! A fault that no frame could serve may also start [`readahead`]: [`pager::Pager::plan_ahead`] says which pages
//! are likely to be next.
//!
//! # Life of an eviction
//!
//! 1. [`pager::Pager::begin_evict`] lets [`reclaim`] choose victims, locks them, and gives them frames. (Where the kernel
//!    can't wait for a page, the driver spares what system calls hold: [`holds`].)
//! 2. The driver takes them out of the program; [`pager::Pager::park`] parks them.
//! 3. [`pager::Pager::place_oldest`]: a word, the pool, or a batch of writes.
//! 4. [`pager::Pager::assign`] gives the batch slots; the driver writes; [`pager::Pager::write_done`].
//! 5. [`pager::Pager::shrink`] moves objects of the pool to an area when it is full.
#![cfg_attr(not(test), no_std)]

pub mod areas;
pub mod cache;
pub mod check;
pub mod config;
pub mod filter;
pub mod holds;
pub mod memory;
pub mod pager;
#[cfg(feature = "planted")]
pub mod planted;
pub mod readahead;
pub mod reclaim;
pub mod roll_call;
pub mod stats;
pub mod sync;
pub mod table;
pub mod units;
pub mod zswap;

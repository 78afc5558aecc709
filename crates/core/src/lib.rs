//! The swap subsystem: structures and policy, and nothing that waits.
//!
//! `core` makes no system call, starts no thread, reads no clock, draws no random number, and allocates
//! nothing after start. `core` is handed memory, and answers with what to do next. A driver does the waiting.
//! The drivers are the live runtime, the simulator and the property tests.
//!
//! # Life of a fault
//!
//! 1. [`pager::Pager::fault`] locks the page's [`table`] entry and looks where the page's bytes are: nowhere,
//!    in a word, in the swap [`cache`], in the [`zswap`] pool, or in a slot of one of the [`areas`].
//! 2. `fault` answers with a [`pager::Step`]. The driver gives a frame memory, reads a slot, waits.
//! 3. [`pager::Pager::load`] decompresses the page, or [`pager::Pager::read_done`] verifies what was read.
//! 4. The driver installs the page. [`pager::Pager::settle_fault`] ends the move.
//!
//! A fault on a page that is out, or on a parked page that readahead has marked, may also start
//! [`readahead`]. [`pager::Pager::plan_ahead`] says which pages are likely to be next.
//!
//! # Life of an eviction
//!
//! 1. [`pager::Pager::begin_evict`] lets [`reclaim`] choose victims, locks the victims, and gives each a
//!    frame. Where the kernel can't wait for a page, the driver spares the pages that system calls hold
//!    ([`holds`]).
//! 2. The driver takes the victims out of the program. [`pager::Pager::park`] parks them.
//! 3. [`pager::Pager::place_oldest`] moves the oldest parked page into a word, into the pool, or into a batch
//!    of writes.
//! 4. [`pager::Pager::assign`] gives the batch slots. The driver writes the batch.
//!    [`pager::Pager::write_done`] ends the write.
//! 5. [`pager::Pager::shrink`] moves objects of the pool to an area when the pool is full.
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

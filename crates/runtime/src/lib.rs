//! The live engine: threads, budget, life cycle, and what the supervisor and its programs share.
//!
//! - [`session`]: a run, and what its processes share with the supervisor
//! - [`engine`]: a process of the run, from its dormant beginning to the end of its engine
//! - [`worker`]: serves faults, evicts, reads early
//! - [`pressure`]: the budget, and who evicts when
//! - [`mappings`]: the calls by which the program changes its memory
//! - [`guard`]: the calls and signals that use evicted memory
//! - [`privileges`]: engine threads follow the program's credentials, filters and limits
#![cfg_attr(not(test), no_std)]

/// Checks that `farpage doctor` makes of this kernel.
pub use farpage_fault::keeps_pinned_pages;
pub use farpage_fault::segv::keeps_pinned_pages as keeps_pinned_pages_in_segv;

pub mod engine;
pub mod guard;
pub mod mappings;
pub mod pressure;
pub mod privileges;
pub mod session;
pub mod worker;

//! The live engine: threads, budget, life cycle, and what the supervisor and its programs share.
//!
//! A run: [`session`], [`head`], [`record`], [`started`], [`devices`], [`first`], [`last`]. A process in it:
//! [`dormant`], [`start`], [`engine`]. A page: [`worker`] serves faults and evicts, and [`ahead`] reads
//! early. [`evictor`], [`lull`] and [`polling`] say who acts and who waits. The program's calls: [`guard`],
//! [`changes`], [`locked`], [`credentials`], [`limits`], [`fork`]. [`map_lock`] and [`registrar`] keep
//! mappings and table the same. The budget: [`budget`], [`share`], [`kin`], [`child_room`], [`pool_share`].
#![cfg_attr(not(test), no_std)]

/// Checks that `farpage doctor` makes of this kernel.
pub use farpage_fault::keeps_pinned_pages;
pub use farpage_fault::segv::keeps_pinned_pages as keeps_pinned_pages_in_segv;

pub mod ahead;
pub mod budget;
pub mod changes;
pub mod child_room;
pub mod credentials;
pub mod devices;
pub mod dormant;
pub mod engine;
pub mod evictor;
pub mod filters;
pub mod first;
pub mod fork;
pub mod guard;
pub mod head;
pub mod kin;
pub mod last;
pub mod limits;
pub mod locked;
pub mod lull;
pub mod map_lock;
pub mod polling;
pub mod pool_share;
pub mod record;
pub mod registrar;
pub mod retire;
pub mod session;
pub mod share;
pub mod stacks;
pub mod start;
pub mod started;
pub mod worker;

//! The live engine: threads, budget, life cycle, and what the supervisor and its programs share.
//!
//! [`session`] what all processes of a run share, [`head`] and what of it is written once · [`record`] our place in it · [`devices`] its areas ·
//! [`start`] how an engine comes to be, and its threads · [`engine`] what they share · [`worker`] what one thread
//! does: faults in, evictions out · [`ahead`] pages that nobody has asked for yet · [`map_lock`] mappings and table say
//! the same · [`changes`] the program changes its memory, [`locked`] or locks it · [`credentials`] or what it may do · [`registrar`] registers for hooks · [`fork`] the program
//! makes a copy of itself ·
//! [`takes`] who takes pages out · [`lull`] and who waits meanwhile ·
//! [`guard`] what system calls do to its memory · [`budget`] how much is too much · [`share`] how much is this process's, [`kin`] who pays for what is shared, [`child_room`] what a fork's child finds free,
//! [`pool_share`] and how much of that the pool's · [`polling`] who doesn't sleep until a page is read
#![cfg_attr(not(test), no_std)]

/// What `farpage doctor` asks about this kernel.
pub use farpage_fault::keeps_pinned_pages;
pub use farpage_fault::segv::keeps_pinned_pages as keeps_pinned_pages_in_segv;

pub mod ahead;
pub mod budget;
pub mod changes;
pub mod child_room;
pub mod credentials;
pub mod devices;
pub mod engine;
pub mod filters;
pub mod fork;
pub mod guard;
pub mod head;
pub mod kin;
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
pub mod start;
pub mod takes;
pub mod worker;

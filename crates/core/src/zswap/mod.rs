//! Between memory and areas: what an evicted page becomes when it needn't go to a device.
//!
//! The modules in the order in which an eviction meets them; a fault goes the same way back:
//!
//! 1. [`same_filled`]: a page of one repeated word needs no memory at all, only its entry.
//! 2. [`codec`]: everything else is compressed, or found to be incompressible.
//! 3. [`pool`]: compressed pages lie in blocks of equal-sized slots, under a limit. When it is full, whoever drives us
//!    writes objects to areas until the pool accepts again: pages that don't compress first, of each kind the oldest.
//!
//! A space needs no index: the page table's entry of a pooled page holds the object's handle, and the
//! object knows the page that owns it. Who may move a page is decided by the lock bit in its entry, so
//! nothing in these modules needs a reference count. [`index`] is for keys that have no such entry.

pub mod codec;
pub mod index;
pub mod pool;
pub mod same_filled;

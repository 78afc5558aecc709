//! The stages between memory and areas: what an evicted page becomes when it needn't go to a device.
//!
//! An eviction meets the modules in this order. A fault goes the same way back:
//!
//! 1. [`same_filled`]: a page of one repeated word needs no memory, only its entry.
//! 2. [`codec`]: every other page is compressed, or found to be incompressible.
//! 3. [`pool`]: compressed pages lie in blocks of equal-sized slots, under a limit. When the pool is full,
//!    the driver writes objects to areas until the pool accepts again. Pages that don't compress go first. Of
//!    each kind the oldest goes first.
//!
//! A space needs no index. The page table's entry of a pooled page holds the object's handle, and the object
//! knows the page that owns it. The lock bit in a page's entry decides which thread may move the page, so
//! nothing in these modules needs a reference count. [`index`] serves keys that have no entry in a page
//! table.

pub mod codec;
pub mod index;
pub mod pool;
pub mod same_filled;

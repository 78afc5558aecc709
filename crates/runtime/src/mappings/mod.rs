//! The program's mappings, and how the page table is kept in agreement with them.
//!
//! - [`advice`]: advice on memory
//! - [`changes`]: calls that change mappings, made in threads of the program
//! - [`locked`]: memory that the program has locked, or that must stay in memory for other reasons
//! - [`map_lock`]: keeps faults and evictions away from a change
//! - [`registrar`]: the engine thread that registers new mappings
//! - [`segments`]: segments of shared memory that the program attaches
//! - [`unseen`]: changes past libc, before the engine takes memory over

pub mod advice;
pub mod changes;
pub mod locked;
pub mod map_lock;
pub mod registrar;
pub mod segments;
pub mod unseen;

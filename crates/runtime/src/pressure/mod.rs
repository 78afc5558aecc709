//! How much memory the process may have, and who evicts when.
//!
//! - [`budget`]: the limit and its marks
//! - [`share`]: the process's part of the budget of the run
//! - [`kin`]: who pays for memory that processes share since a fork
//! - [`child_headroom`]: memory that is left free for a fork's child
//! - [`pool_share`]: the pool's part of the budget
//! - [`evictor`]: whether the keeper or the faulting thread evicts
//! - [`lull`]: when faulting threads wait for an eviction

pub mod budget;
pub mod child_headroom;
pub mod evictor;
pub mod kin;
pub mod lull;
pub mod pool_share;
pub mod share;

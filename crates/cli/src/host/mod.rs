//! What the machine has and offers, and what its limits leave.
//!
//! - [`budget`]: the limits that apply, and the budget made from them
//! - [`neighbours`]: other runs of this user
//! - [`oom`]: whether the kernel's out-of-memory killer was at work
//! - [`kernel`]: userfaultfd and io_uring, and the choices that follow
//! - [`machine`]: nodes, and the nodes of block devices
//! - [`sys`]: system calls that std has no function for

pub mod budget;
pub mod kernel;
pub mod machine;
pub mod neighbours;
pub mod oom;
pub mod sys;

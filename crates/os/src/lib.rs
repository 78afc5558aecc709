//! Every raw system call, and what the kernel tells about us. The lowest adapter: strict about safety.
//!
//! Code here runs inside somebody else's process, in threads that glibc doesn't know, while that process's
//! locks may be held. So: no libc call, no errno, no thread-local storage, no allocation. System calls go
//! through `rustix`, which makes them directly, or through [`sys`] where the program's own arguments must be
//! passed on exactly as they are.
//!
//! [`uffd`] userfaultfd · [`memory`] our own mappings · [`peek`] memory that may not be there · [`futex`] waiting ·
//! [`thread`] engine threads · [`credentials`] what they may do · [`places`] where they are · [`seccomp`] filters ·
//! [`proc`] what /proc says about this process · [`numa`] which node · [`clock`] time ·
//! [`aio`] reads whose end is seen in memory · [`fiemap`] where a file lies · [`image`] where our own code and variables
//! are · [`signal`] handlers that libc doesn't know · [`frame`] what is laid for them, moved ·
//! [`dispatch`] the program's calls are stopped · [`report`] last words ·
//! [`sys`] calls passed on
#![cfg_attr(not(test), no_std)]

pub mod aio;
pub mod clock;
pub mod credentials;
pub mod dispatch;
pub mod fiemap;
pub mod frame;
pub mod futex;
pub mod image;
pub mod memory;
pub mod numa;
pub mod peek;
pub mod places;
pub mod proc;
pub mod report;
pub mod seccomp;
pub mod signal;
pub mod sys;
pub mod thread;
pub mod uffd;

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "Farpage runs on x86-64 Linux only, so far: see ARCHITECTURE.md, \"What is machine-dependent\""
);

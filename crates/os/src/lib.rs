//! Every raw system call, and what the kernel tells about this process. `os` is the lowest adapter and the
//! strictest about safety.
//!
//! Code of this crate runs inside another program's process, in threads that glibc doesn't know, while locks
//! of that program may be held. Therefore no function here calls libc, uses errno or thread-local storage, or
//! allocates. System calls go through `rustix`, which makes them directly. Calls whose arguments come from
//! the program go through [`sys`], which passes the arguments on exactly as they are.
//!
//! [`uffd`] userfaultfd · [`memory`] mappings of Farpage · [`peek`] memory that may not be there · [`futex`]
//! waiting · [`thread`] engine threads · [`credentials`] what engine threads may do · [`places`] where engine
//! threads are · [`seccomp`] filters · [`proc`] what /proc says about this process · [`numa`] which node ·
//! [`clock`] time · [`aio`] reads whose completion shows in memory · [`fiemap`] where a file lies on its
//! device · [`image`] where Farpage's code and variables are · [`signal`] handlers that libc doesn't know ·
//! [`frame`] moving a signal's frame to another stack · [`dispatch`] stopping the program's system calls ·
//! [`report`] last words · [`sys`] system calls passed on
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

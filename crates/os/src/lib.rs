//! Every raw system call, and what the kernel tells about this process. `os` is the lowest adapter and the
//! strictest about safety.
//!
//! Code of this crate runs inside another program's process, in threads that glibc doesn't know, while locks
//! of that program may be held. Therefore no function here calls libc, uses errno or thread-local storage, or
//! allocates. System calls go through `rustix`, which makes them directly. Calls whose arguments come from
//! the program go through [`sys`], which passes the arguments on exactly as they are.
//!
//! - Memory: [`memory`] has Farpage's mappings. [`peek`] reads the program's, which may not be there.
//!   [`uffd`] is userfaultfd.
//! - Threads: [`thread`] makes engine threads, [`futex`] lets them wait, [`clock`] sleeps. [`credentials`]
//!   and [`places`] keep what they may do, and where they are. [`numa`] says on which node.
//! - Signals and calls: [`signal`] has handlers that libc doesn't know, [`frame`] moves a signal's frame to
//!   another stack. [`dispatch`] stops the program's system calls, [`seccomp`] knows its filters.
//! - The process: [`proc`] reads /proc, [`image`] knows where Farpage's code and variables are, [`report`]
//!   writes last words.
//! - Files: [`aio`] makes reads whose completion shows in memory, [`fiemap`] says where a file lies on its
//!   device.
//! - [`sys`] passes calls on; [`errno`] has the numbers of their errors.
#![cfg_attr(not(test), no_std)]

pub mod aio;
pub mod clock;
pub mod credentials;
pub mod dispatch;
pub mod errno;
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
compile_error!("Farpage runs on x86-64 Linux only, so far: see docs/internals/machine.md");

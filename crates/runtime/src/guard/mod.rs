//! What a system call does to the program's memory.
//!
//! In `signal` and `segv` mode the kernel can't wait for a page of ours: a call that meets one answers EFAULT, or less
//! than was asked for. So before a call is made, everything that it will read or write must be there. [`calls`] is the
//! table of calls and of what their arguments point to; [`buffers`] finds out what that means for one call.

pub mod buffers;
pub mod calls;

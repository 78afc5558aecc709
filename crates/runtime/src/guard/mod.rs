//! What a system call does to the program's memory, and what is done so that it can.
//!
//! In `signal` and `segv` mode the kernel can't wait for a page of ours: a call that meets one answers EFAULT, or less
//! than was asked for. So before a call is made, everything that it will read or write must be there.
//!
//! [`calls`] the table of calls and of what their arguments point to · [`buffers`] what that means for one call ·
//! [`resident`] its memory is brought in and held · [`large`] calls that are made in parts · [`memory_file`] files that
//! are memory · [`handlers`] where faults and stopped calls arrive · [`direct`] faults served there, with [`kept`] descriptors · [`signals`] what
//! the program does with our signals · [`deliver`] its handlers run · [`sent`] what arrives while we are at work · [`rooms`] what each thread has of
//! ours · [`errands`] what children of vfork have done for them · [`arm`] how threads come under it

use farpage_os::signal::{SIGSETXID, bit};

/// Signals that nothing of ours blocks as long as the program's threads aren't armed: what arms them.
pub(crate) const UNTIL_ARMED: u64 = bit(SIGSETXID);
/// What that signal carries if it is to do nothing but end what a thread waits for.
pub(crate) const WAKES_ONLY: usize = 0;

pub use arm::{StackInUse, end_hook, is_caller_armed, leave_by, stack_in_use, without_stack};
/// In a fork's child, before it has an engine: as if there had never been one.
pub(crate) use handlers::leave_copy as leave_in_child;
pub use sent::{HOOKS_MAX, during_hook, forget_in_hooks, hooks_run_on};
pub use signals::change_by_libc;
pub(crate) use signals::faults_arrive_as;

pub(crate) mod arm;
pub mod buffers;
pub mod calls;
mod deliver;
pub(crate) mod direct;
pub(crate) mod errands;
mod handlers;
mod kept;
mod large;
mod memory_file;
mod resident;
pub(crate) mod rooms;
mod sent;
mod signals;

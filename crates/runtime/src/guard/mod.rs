//! System calls and signals that use the program's memory, and what Farpage does so that evicted memory
//! doesn't break them.
//!
//! In `signal` and `segv` mode the kernel can't wait until Farpage brings a page in. A call that meets an
//! evicted page returns EFAULT, or transfers less than was asked for. Farpage therefore has every page in
//! memory that a call reads or writes, before the call is made.
//!
//! - [`calls`]: the table of system calls, and what their arguments point to
//! - [`buffers`]: the memory that one particular call uses
//! - [`resident`]: brings the memory of a call in and holds it
//! - [`large`]: makes large calls in parts
//! - [`memory_file`]: files that are memory
//! - [`handlers`]: where faults and stopped calls arrive
//! - [`direct`]: serves faults in the faulting thread, with descriptors from [`descriptors`]
//! - [`signals`]: what the program does with Farpage's signals
//! - [`deliver`]: runs the program's handlers
//! - [`sent`]: signals that arrive while a handler of Farpage's runs
//! - [`rooms`]: Farpage's data for each thread
//! - [`errands`]: work that an engine thread does for a child of vfork
//! - [`arm`]: how threads are armed, and `unarmed`: when the user is told of a thread that can't be armed

use farpage_os::signal::{SIGSETXID, bit};

/// Signals that Farpage's code leaves open until the program's threads are armed: the signal that arms a
/// thread.
pub(crate) const UNTIL_ARMED: u64 = bit(SIGSETXID);
/// Word sent along with that signal if the signal shall only end what a thread waits for.
pub(crate) const WAKES_ONLY: usize = 0;

pub use arm::{
    StackInUse, end_hook, handle_and_make_call_again, is_caller_armed, leave_by, stack_in_use,
    stack_of_child, without_stack,
};
/// Resets a fork's child, before it has an engine of its own, as if there had never been an engine.
pub(crate) use handlers::leave_copy as leave_in_child;
pub use sent::{HOOKS_MAX, during_hook, forget_in_hooks, hooks_run_on};
pub(crate) use signals::faults_arrive_as;
pub use signals::{alone, change_by_libc};

pub(crate) mod arm;
pub mod buffers;
pub mod calls;
mod deliver;
mod descriptors;
pub(crate) mod direct;
pub(crate) mod errands;
mod handlers;
mod large;
mod memory_file;
mod resident;
pub(crate) mod rooms;
mod sent;
mod signals;
mod unarmed;

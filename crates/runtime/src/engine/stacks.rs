//! The stacks of threads that exist before the engine. This memory stays resident.
// UNSAFETY: two system calls without arguments.

use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::proc;
use farpage_os::sys::{self, number};

/// Nanoseconds that all threads together have to report where their stacks are.
const STACKS_NS: u64 = 10_000_000;

/// The stacks of the threads that exist when the preload library is loaded. The constructors of libraries run
/// before ours, and some of them start threads (OpenBLAS does). The kernel writes on the stacks of these
/// threads, to addresses that each thread has registered, and can't wait for a page there.
pub struct Stacks {
    pointers: [usize; 256],
    count: usize,
    /// Whether the stack of each thread is known.
    pub all_known: bool,
}

impl Stacks {
    /// Asks /proc for the stack pointer of each thread.
    pub fn find() -> Stacks {
        let mut stacks = Stacks { pointers: [0; 256], count: 0, all_known: true };
        // SAFETY: the call takes no arguments.
        let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
        // The first thread's stack has a name in /proc.
        //
        // SAFETY: the call takes no arguments.
        let first = unsafe { sys::call(number::GETPID, [0; 6]) } as u32;
        let until_ns = now_ns() + STACKS_NS;
        let all = proc::for_each_thread(|thread| {
            if thread != own && thread != first {
                stacks.add(thread, until_ns);
            }
        });
        stacks.all_known &= all.is_ok();
        stacks
    }

    /// Adds the stack of a thread. /proc doesn't tell the stack pointer of a thread that runs, but most
    /// threads soon wait for work.
    fn add(&mut self, thread: u32, until_ns: u64) {
        loop {
            if let Some(pointer) = proc::stack_pointer(thread) {
                match self.pointers.get_mut(self.count) {
                    Some(place) => (*place, self.count) = (pointer, self.count + 1),
                    None => self.all_known = false,
                }
                return;
            }
            if proc::runs_no_program(thread) {
                return;
            }
            if now_ns() > until_ns {
                self.all_known = false;
                return;
            }
            sleep_ns(100_000);
        }
    }

    /// Returns an address on each stack that is known.
    pub fn known(&self) -> impl Iterator<Item = usize> {
        self.pointers[..self.count].iter().copied()
    }
}

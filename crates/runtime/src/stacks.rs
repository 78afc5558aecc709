//! Where the stacks of threads are that exist before the engine: memory that stays in.
// UNSAFETY: two system calls without arguments.

use farpage_os::clock::{now_ns, sleep_ns};
use farpage_os::proc;
use farpage_os::sys::{self, number};

/// Nanoseconds that all threads together have to say where their stacks are.
const STACKS_NS: u64 = 10_000_000;

/// The stacks of threads that there are when we are loaded: the constructors of libraries come before ours, and some of those make
/// threads (OpenBLAS). The kernel writes on their stacks, to what each thread has told it of, and can't wait for a page there.
pub struct Stacks {
    pointers: [usize; 256],
    count: usize,
    /// Whether each thread has said where its stack is.
    pub all_known: bool,
}

impl Stacks {
    /// Asks /proc for the stack pointer of each thread.
    pub fn find() -> Stacks {
        let mut stacks = Stacks { pointers: [0; 256], count: 0, all_known: true };
        // SAFETY: takes nothing.
        let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
        // Whose stack has a name.
        // SAFETY: as above.
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

    /// A thread that runs doesn't say where. Mostly it waits for work soon.
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

    /// A place on each stack that is known.
    pub fn known(&self) -> impl Iterator<Item = usize> {
        self.pointers[..self.count].iter().copied()
    }
}

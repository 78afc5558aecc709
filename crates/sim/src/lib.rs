//! The simulator: the same core that runs in live programs, under simulated time and from one seed.
//!
//! [`run`] runs one seed. The parts, from the outside in:
//!
//! - `profile`: sizes, devices and rates that a seed decides at the start. `random`: the numbers drawn from
//!   the seed.
//! - `world`: the scheduler. In each turn one space goes one call further; then everything is checked.
//! - `space`: a process, with a pager, a program, and operations under way between the two (`ops`):
//!   `fault`, `evict`, `write`, `ahead` (readahead) and `change` (munmap and similar calls).
//! - `program`: the program's memory as the kernel keeps it, and the oracle that knows every byte. `content`:
//!   the bytes that programs write.
//! - `home`: the memory that a process hands to its pager. A frame that is a hole is filled with poison.
//! - `locks`: whether the core takes its locks in the right order.
//! - `device`: an area in memory behind the decorators of `farpage-io`. The device is slow, fails, lies and
//!   crashes.
//! - `coverage`: the events and states that runs reached. `bugs`: bugs planted in the driver's part.
//!
//! A violation is a panic from an assertion here or in the core. The seed reproduces the violation.

mod ahead;
mod bugs;
mod change;
mod content;
mod coverage;
mod device;
mod evict;
mod fault;
mod home;
mod locks;
mod ops;
mod profile;
mod program;
mod random;
mod space;
#[cfg(test)]
mod stories;
mod world;
mod write;

#[cfg(feature = "planted")]
pub use bugs::{DriverBug, plant_in_driver};
pub use coverage::Coverage;

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::rc::Rc;
use world::{Log, World};

/// The result of a run without a violation.
pub struct Report {
    /// Turns in which something happened.
    pub steps: u64,
    /// The events and states that the run reached.
    pub coverage: Coverage,
}

/// A violation, with what is needed to reproduce it.
#[derive(Debug)]
pub struct Failure {
    /// The seed that reproduces the violation.
    pub seed: u64,
    /// The panic's message.
    pub message: String,
    /// The last events before the violation, oldest first.
    pub events: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))?;
        write!(f, "seed {}: {}", self.seed, self.message)
    }
}

/// Whether events are printed as they happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Say {
    /// Prints nothing. A failure still reports the last events.
    Nothing,
    /// Prints each event as it happens.
    Everything,
}

/// Runs one seed. If a panic ends the process instead of unwinding, no [`Failure`] is returned: see
/// [`print_on_panic`].
///
/// # Errors
/// Returns a [`Failure`] if an assertion failed.
pub fn run(seed: u64, say: Say) -> Result<Report, Failure> {
    locks::watch();
    let log = Rc::new(Log::new(say == Say::Everything));
    CURRENT.set(Some((seed, Rc::clone(&log))));
    let result = catch_unwind(AssertUnwindSafe(|| {
        let world = Rc::new(World::new(seed, Rc::clone(&log)));
        #[cfg(feature = "planted")]
        let _interrupts = interrupts::Guard::new(&world);
        world.run();
        Report { steps: world.steps(), coverage: world.coverage.take() }
    }));
    CURRENT.set(None);
    result.map_err(|panic| Failure { seed, message: message_of(&*panic), events: log.events() })
}

thread_local! {
    /// The run of this thread, for the panic hook.
    static CURRENT: RefCell<Option<(u64, Rc<Log>)>> = const { RefCell::new(None) };
}

/// Installs a panic hook that prints the seed and the last events of a violation first. The hook then ends
/// the process. The hook is needed where a panic doesn't unwind, because no [`Failure`] comes back from
/// there.
pub fn print_on_panic() {
    let standard = take_hook();
    set_hook(Box::new(move |panic| {
        CURRENT.with_borrow(|current| {
            if let Some((seed, log)) = current {
                log.events().iter().for_each(|event| eprintln!("{event}"));
                eprintln!("violation in seed {seed}; again with: --seed {seed} --verbose");
            }
        });
        standard(panic);
        // The same status as for a violation that [`run`] returns.
        std::process::exit(1);
    }));
}

#[cfg(feature = "planted")]
mod interrupts {
    //! Lets other threads run between two instructions of the core. At a pause inside a call of the core, the
    //! world of the calling thread gives a few turns to other operations.

    use crate::world::World;
    use farpage_core::planted::{Interrupt, set_interrupt};
    use std::cell::RefCell;
    use std::rc::Rc;

    thread_local! {
        static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
    }

    static INTERRUPT: Interrupt = Interrupt(|| {
        if let Some(world) = WORLD.with_borrow(Option::clone) {
            world.interrupt();
        }
    });

    /// While a guard lives, this thread's world is interrupted.
    pub(crate) struct Guard;

    impl Guard {
        pub(crate) fn new(world: &Rc<World>) -> Guard {
            WORLD.set(Some(Rc::clone(world)));
            set_interrupt(&INTERRUPT);
            Guard
        }
    }

    impl Drop for Guard {
        fn drop(&mut self) {
            WORLD.take();
        }
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

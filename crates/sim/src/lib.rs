//! The simulator: the same core that runs in live programs, under simulated time and from one seed.
//!
//! [`run`] is a run. Its parts, from the outside in:
//!
//! - `profile`: what a seed is about: sizes, devices, what happens how often. `random`: where it is drawn.
//! - `world`: the scheduler. One turn after the other, somebody goes one call further; then everything is
//!   checked.
//! - `space`: a process: a pager, its program, and what is under way between them (`ops`): `fault`, `evict`,
//!   `write`, `ahead` (readahead) and `change` (munmap and its kin).
//! - `program`: the program's memory as the kernel keeps it, and the oracle that knows every byte.
//!   `content`: what programs write.
//! - `home`: memory that a process hands to its pager; frames, with poison where a frame is a hole.
//! - `device`: an area in memory, slow, failing, lying, crashing, from `farpage-io`.
//! - `coverage`: what was seen. `bugs`: bugs on purpose in what a driver does.
//!
//! A violation is a panic, from an assertion here or in the core; the seed reproduces it.

mod ahead;
mod bugs;
mod change;
mod content;
mod coverage;
mod device;
mod evict;
mod fault;
mod home;
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

/// What a run without a violation leaves.
pub struct Report {
    /// Steps in which something happened.
    pub steps: u64,
    /// What was seen.
    pub coverage: Coverage,
}

/// A violation.
#[derive(Debug)]
pub struct Failure {
    /// Reproduces it.
    pub seed: u64,
    /// What was violated.
    pub message: String,
    /// What happened before, the last event last.
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
    /// Only a failure shows the last events.
    Nothing,
    /// Each event.
    Everything,
}

/// Runs one seed. Where a panic ends the process instead of unwinding, a violation prints what a
/// [`Failure`] would say, and ends it.
pub fn run(seed: u64, say: Say) -> Result<Report, Failure> {
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
    /// What this thread is running, for a panic that ends the process.
    static CURRENT: RefCell<Option<(u64, Rc<Log>)>> = const { RefCell::new(None) };
}

/// Makes a violation in this process print its seed and its last events before anything else happens: needed
/// where a panic doesn't unwind, so that no [`Failure`] comes back.
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
        // As for any other violation.
        std::process::exit(1);
    }));
}

#[cfg(feature = "planted")]
mod interrupts {
    //! Another thread comes in between: at a pause inside one of the core's calls, the world of the thread
    //! that made the call gives somebody else a few turns.

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

    /// While it lives, this thread's world is interrupted.
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

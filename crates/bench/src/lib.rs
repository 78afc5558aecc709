//! `farpage bench`: each central design of Farpage against what it replaced, in one run, on this machine.
//!
//! 1. [`report`] is the result of an experiment: tables, targets and charts, as text, JSON and SVG.
//! 2. [`measure`] is the way to the result: interleaved rounds, medians with their spread, several threads.
//! 3. [`rivals`] are the baselines, built as well as we can.
//! 4. [`live`] runs programs under `farpage run` and without; [`load`] is the program. [`stop`] hears
//!    signals.
//! 5. One module for each experiment.
//!
//! Every benchmark verifies what it measures. A lookup that returns the wrong block, or a page that comes
//! back with other bytes, ends the benchmark.

mod codec;
pub mod command;
mod contest;
mod device;
pub mod extents;
mod faults;
pub mod index;
mod interrupts;
pub mod kernel;
pub mod live;
pub mod load;
pub mod measure;
pub mod order;
mod order_sim;
mod programs;
pub mod readahead;
pub mod report;
pub mod rivals;
mod scale;
mod slots;
pub mod stop;

use report::Report;

/// The effort that an experiment may spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Everything; some minutes.
    Full,
    /// A check that the experiment works: smaller sizes and fewer rounds, well below a minute.
    Quick,
}

impl Effort {
    /// Returns `full` in a full run, and `quick` in a quick one.
    pub fn pick<T>(self, full: T, quick: T) -> T {
        match self {
            Effort::Full => full,
            Effort::Quick => quick,
        }
    }
}

/// An experiment.
pub struct Experiment {
    /// The name on the command line, such as `extents`.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Runs the experiment. `Err` says why the experiment can't be run here.
    pub run: Run,
}

/// The way in which an experiment is run.
pub enum Run {
    /// As a whole.
    Whole(fn(Effort) -> Result<Report, String>),
    /// As a whole, or only the cases whose titles contain this text.
    Cases(fn(Effort, Option<&str>) -> Result<Report, String>),
    /// With a program of the user's.
    Command(fn(Effort, &command::Asked<'_>) -> Result<Report, String>),
}

/// The only table of experiments.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "codec",
        about: "pages of real programs, made small and brought back: one codec for each kind against LZ4 for all",
        run: Run::Whole(codec::run),
    },
    Experiment {
        name: "command",
        about: "some 50 runs of a program of yours, under the kernel's own swap and under Farpage, with equal memory; takes root, as `kernel` does",
        run: Run::Command(command::run),
    },
    Experiment {
        name: "device",
        about: "memory read in order from the disk against fio, which only reads; takes fio",
        run: Run::Whole(device::run),
    },
    Experiment {
        name: "extents",
        about: "from a slot to its block on the device: lists, trees, and ours; a file in 20,000 pieces",
        run: Run::Whole(extents::run),
    },
    Experiment {
        name: "faults",
        about: "faults as messages to threads of ours against faults as signals, live",
        run: Run::Whole(faults::run),
    },
    Experiment {
        name: "order",
        about: "which area pages go to: by one list, by node, in turn, or by expected cost; machines are simulated",
        run: Run::Whole(order::run),
    },
    Experiment {
        name: "index",
        about: "zswap's index: trees under one lock, radix trees, a hash table, and ours",
        run: Run::Whole(index::run),
    },
    Experiment {
        name: "kernel",
        about: "the kernel's own swap and Farpage, with as much memory; takes root, three quarters of an hour, and restores everything",
        run: Run::Cases(kernel::run),
    },
    Experiment {
        name: "programs",
        about: "six real programs under the kernel's own swap and Farpage, with as much memory; takes root, as `kernel` does",
        run: Run::Cases(programs::run),
    },
    Experiment {
        name: "readahead",
        about: "readahead by slot, by address and by streams, live",
        run: Run::Whole(readahead::run),
    },
    Experiment {
        name: "scale",
        about: "faults by number of threads and by size of the space, live",
        run: Run::Whole(scale::run),
    },
    Experiment {
        name: "slots",
        about: "free slots of a nearly full area: a hand for each CPU against linear scans",
        run: Run::Whole(slots::run),
    },
];

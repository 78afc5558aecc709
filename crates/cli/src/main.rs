//! `farpage`: the command line.
//!
//! `farpage run` puts Farpage's library into a program and stays beside it as its supervisor.
//! `farpage doctor` says what this machine offers, `farpage show` looks at a run, and `farpage bench`
//! measures. No fault is served here: faults are served inside the program.
//!
//! A run, in the order of the modules:
//!
//! 1. [`options`] reads the command line.
//! 2. [`host`] finds what the machine offers and which limits apply, and chooses.
//! 3. [`program`] finds the program and the library, and checks that Farpage can get into the program.
//! 4. [`areas`] opens the swap areas.
//! 5. [`run`] starts the program; [`supervise`] stays with it, and sums up at the end.
//!
//! [`show`] looks at a run from outside. [`doctor`] asks the same modules without running anything; [`bench`]
//! hands on to `farpage-bench`. [`text`] is how Farpage talks.

mod areas;
mod bench;
mod doctor;
mod host;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod manual;
mod options;
mod program;
mod run;
mod show;
mod supervise;
mod text;

use options::Command;
use std::process::ExitCode;
use text::failure::Failure;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let line = match options::read(&arguments) {
        Ok(line) => line,
        Err(error) => return options::report(&error, &arguments),
    };
    match line.command {
        Command::Doctor(options) => doctor::doctor(&options).unwrap_or_else(give_up),
        Command::Run(options) => run::run(&options).unwrap_or_else(give_up),
        Command::Show(options) => show::show(&options).unwrap_or_else(give_up),
        Command::Bench(options) => bench::bench(&options).unwrap_or_else(give_up),
        Command::Load(options) => bench::load(&options).unwrap_or_else(give_up),
    }
}

fn give_up(failure: Failure) -> ExitCode {
    text::say::plainly(&failure.to_string());
    ExitCode::from(failure.status)
}

//! `farpage`: the command line.
//!
//! `farpage run` puts Farpage's library into a program and stays beside it as its supervisor; `farpage
//! doctor` says what this machine offers. Nothing here serves a fault: that happens inside the program.
//!
//! A run, in the order of the modules:
//!
//! 1. [`options`] reads the command line; [`size`] reads sizes.
//! 2. [`budget`] finds the limits that apply and makes the budget from them.
//! 3. [`program`] finds the program and checks with [`elf`] that Farpage can get into it.
//! 4. [`areas`] opens the swap areas; [`header`] reads what mkswap wrote.
//! 5. [`preload`] finds the library; [`kernel`] tries what the kernel offers, and chooses.
//! 6. [`session`] fills the memory shared with the programs; [`run`] starts the first of them.
//! 7. [`signals`] stays with it; [`notices`] tells what happens meanwhile.
//! 8. [`totals`] collects what was counted; [`summary`] prints it, and writes it as JSON.
//!
//! [`doctor`] asks the same modules without running anything. [`failure`] is every error's form, [`say`] and
//! [`numbers`] are how Farpage talks, [`sys`] wraps system calls.

mod areas;
mod budget;
mod doctor;
mod elf;
mod failure;
mod header;
mod kernel;
mod notices;
mod numbers;
mod options;
mod preload;
mod program;
mod run;
mod say;
mod session;
mod signals;
mod size;
mod summary;
mod sys;
mod totals;

use options::Command;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let line = match options::read(&arguments) {
        Ok(line) => line,
        Err(error) => return options::report(&error, &arguments),
    };
    match line.command {
        Command::Doctor(options) => doctor::doctor(&options),
        Command::Run(options) => run::run(&options).unwrap_or_else(|failure| {
            say::plainly(&failure.to_string());
            ExitCode::from(failure.status)
        }),
    }
}

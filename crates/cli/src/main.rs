//! `farpage`: the command line.
//!
//! `farpage run` puts Farpage's library into a program and stays beside it as its supervisor.
//! `farpage doctor` says what this machine offers, `farpage show` looks at a run, and `farpage bench`
//! measures. No fault is served here: faults are served inside the program.
//!
//! A run, in the order of the modules:
//!
//! 1. [`options`] reads the command line; [`size`] reads sizes; [`tips`] guesses what a wrong word
//!    was meant to be.
//! 2. [`budget`] finds the limits that apply and makes the budget from them; [`neighbours`] are this
//!    user's other runs.
//! 3. [`program`] finds the program and checks with [`elf`] that Farpage can get into it.
//! 4. [`areas`] opens the swap areas; [`header`] reads what mkswap wrote, [`places`] asks where a file lies,
//!    [`machine`] which node its device is on.
//! 5. [`preload`] finds the library; [`kernel`] tries what the kernel offers, and chooses.
//! 6. [`session`] fills the memory shared with the programs; [`run`] starts the first of them.
//! 7. [`signals`] supervises the program; [`headroom`] makes the budget smaller while limits leave less;
//!    [`notices`] tells what happens meanwhile, through a [`valve`]. [`dormant`] is about processes that are
//!    too small to have an engine.
//! 8. [`over_budget`] ends a run that stays above its budget, if the user asked for that.
//! 9. [`outside`] finds processes without a budget, [`oom`] whether the kernel killed one; [`totals`]
//!    collects what was counted; [`summary`] prints the totals, and writes them as JSON.
//!
//! [`show`] looks at a run from outside. [`doctor`] asks the same modules without running anything; [`bench`]
//! hands on to `farpage-bench`. [`failure`] is the form of every error, [`say`] and [`numbers`] are how
//! Farpage talks, [`sys`] wraps system calls.

mod areas;
mod bench;
mod beside;
mod budget;
mod descendants;
mod doctor;
mod dormant;
mod elf;
mod failure;
mod header;
mod headroom;
#[cfg(test)]
mod hostile;
mod kernel;
mod kernel_swap;
mod machine;
mod neighbours;
mod notices;
mod numbers;
mod oom;
mod options;
mod orphans;
mod outside;
mod over_budget;
mod places;
mod preload;
mod program;
mod run;
mod say;
mod session;
mod show;
mod signals;
mod size;
mod summary;
mod swap_argument;
mod sys;
mod tips;
mod totals;
mod valve;

use failure::Failure;
use options::Command;
use std::process::ExitCode;

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
    say::plainly(&failure.to_string());
    ExitCode::from(failure.status)
}

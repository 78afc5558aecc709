//! Running a load for real: under `farpage run` with its own statistics, or without a budget.

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What one run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the load printed.
    pub load: Value,
    /// Farpage's statistics (`--stats`); null without a budget.
    pub stats: Value,
    /// From start to end.
    pub wall: Duration,
}

impl Outcome {
    /// A number that the load printed.
    pub fn number(&self, name: &str) -> f64 {
        self.load[name].as_f64().unwrap_or(f64::NAN)
    }

    /// A number of one part of the load.
    pub fn part(&self, part: &str, name: &str) -> f64 {
        self.load["parts"][part][name].as_f64().unwrap_or(f64::NAN)
    }

    /// One of Farpage's counters, of all processes together.
    pub fn counter(&self, name: &str) -> f64 {
        self.stats["counters"][name].as_f64().unwrap_or(f64::NAN)
    }

    /// One of Farpage's counters, of the process in which this part of the load ran.
    pub fn counter_of(&self, part: &str, name: &str) -> f64 {
        let pid = &self.load["parts"][part]["pid"];
        let processes = self.stats["processes"].as_array();
        let process = processes.and_then(|all| all.iter().find(|process| process["pid"] == *pid));
        process.and_then(|process| process["counters"][name].as_f64()).unwrap_or(f64::NAN)
    }
}

/// Runs `farpage run OPTIONS -- farpage load ARGUMENTS`.
pub fn under(options: &[&str], load: &[&str]) -> Result<Outcome, String> {
    let farpage = farpage()?;
    let stats = std::env::temp_dir().join(format!("farpage-bench-{}.json", std::process::id()));
    let mut command = Command::new(&farpage);
    command.arg("run").args(["--quiet", "--stats"]).arg(&stats).args(options);
    command.arg("--").arg(&farpage).arg("load").args(load);
    let outcome = finish(command).and_then(|(load, wall)| {
        let text = std::fs::read_to_string(&stats).map_err(|error| format!("no statistics: {error}"))?;
        let stats = serde_json::from_str(&text).map_err(|error| format!("bad statistics: {error}"))?;
        Ok(Outcome { load, stats, wall })
    });
    let _ = std::fs::remove_file(&stats);
    outcome
}

/// Runs `farpage load ARGUMENTS`.
pub fn alone(load: &[&str]) -> Result<Outcome, String> {
    let mut command = Command::new(farpage()?);
    command.arg("load").args(load);
    finish(command).map(|(load, wall)| Outcome { load, stats: Value::Null, wall })
}

fn farpage() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("farpage's own file can't be found: {error}"))
}

fn finish(mut command: Command) -> Result<(Value, Duration), String> {
    let began = Instant::now();
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{command:?} can't be started: {error}"))?;
    let wall = began.elapsed();
    if !output.status.success() {
        return Err(format!("{command:?} ended with {}", output.status));
    }
    let load = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{command:?} printed no JSON: {error}"))?;
    Ok((load, wall))
}

//! `farpage bench NAME --quick`: every experiment can be run, and its JSON has what it promises. What it found is
//! no test: figures depend on the machine.

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::{Ended, directory, farpage};
use serde_json::Value;
use std::fs;

/// Runs an experiment, looks for its tables, targets and plot, and gives its JSON.
#[track_caller]
fn shows_what_it_found(experiment: &str, tables: usize) -> Value {
    let directory = directory();
    let [json, svg] = ["found.json", "found.svg"].map(|name| directory.path().join(name));
    let mut command = farpage();
    // Live experiments run programs for real.
    command.env("FARPAGE_PRELOAD", farpage::budgeted::library());
    command.args(["bench", experiment, "--quick"]).arg("--json").arg(&json).arg("--svg").arg(&svg);
    let ended = Ended::of(command.output().unwrap());
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let found: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(found["experiment"], experiment);
    let list = |value: &Value| value.as_array().expect("a list").clone();
    assert_eq!(list(&found["tables"]).len(), tables);
    for table in list(&found["tables"]) {
        let title = table["title"].as_str().unwrap();
        assert!(ended.stdout.contains(title), "`{title}` isn't in:\n{}", ended.stdout);
        assert!(!list(&table["rows"]).is_empty(), "`{title}` has no rows");
    }
    assert!(!list(&found["published"]).is_empty() && !list(&found["targets"]).is_empty());
    assert!(fs::read_to_string(&svg).unwrap().contains("<rect"), "a plot without bars");
    found
}

#[test]
fn extents_shows_what_it_found() {
    if !farpage::can_run() {
        return;
    }
    shows_what_it_found("extents", 5);
}

#[test]
fn index_shows_what_it_found() {
    let found = shows_what_it_found("index", 3);
    let memory = found["tables"][2]["rows"].as_array().unwrap();
    for row in memory {
        let bytes = row["bytes per entry"].as_f64().unwrap();
        assert!((4.0..200.0).contains(&bytes), "{row}");
    }
}

#[test]
fn order_shows_what_it_found() {
    shows_what_it_found("order", 3);
}

#[test]
fn readahead_shows_what_it_found() {
    shows_what_it_found("readahead", 18);
}

#[test]
fn slots_shows_what_it_found() {
    shows_what_it_found("slots", 3);
}

#[test]
fn faults_shows_what_it_found() {
    if !farpage::can_run() {
        return;
    }
    shows_what_it_found("faults", 1);
}

//! Farpage's own words: on standard error, each line prefixed `farpage: `; clap's own texts only in their
//! first line. The program's output is never touched. Nobody listening isn't an error.

use std::io::Write;

/// One message; further lines of it are prefixed too.
pub fn line(text: &str) {
    let lines: String = text.lines().map(|line| format!("farpage: {line}\n")).collect();
    write(&lines);
}

/// A message that has its prefix already.
pub fn plainly(text: &str) {
    write(&format!("{text}\n"));
}

/// What the user asked for: help, a table.
pub fn to_stdout(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// In one write, so that lines of the program don't get in between.
fn write(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

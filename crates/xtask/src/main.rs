//! House checks: `cargo xtask tidy`, run by `make lint`.
//!
//! The checks are those that a compiler doesn't make: the width of lines, the length of functions and
//! sentences, words that hide their subject, heads of files, and paths in documents. Each check has a test
//! with a planted violation.

mod documents;
mod prose;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Columns of a line of code, comment or document.
const WIDTH: usize = 110;

/// One violation of a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    file: String,
    /// Line number, from 1.
    line: usize,
    what: String,
}

/// A file of the checkout, with its path from the top.
struct File {
    path: String,
    text: String,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words != ["tidy"] {
        eprintln!("usage: cargo xtask tidy");
        return ExitCode::from(2);
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the package is in crates/");
    let files = match files(top) {
        Ok(files) => files,
        Err(error) => {
            eprintln!("tidy can't read the checkout: {error}");
            return ExitCode::from(2);
        }
    };
    let findings = check(&files);
    for Finding { file, line, what } in &findings {
        println!("{file}:{line}: {what}");
    }
    match findings.len() {
        0 => ExitCode::SUCCESS,
        count => {
            eprintln!("tidy: {count} findings; STYLE.md has the rules");
            ExitCode::FAILURE
        }
    }
}

/// All findings of all rules.
fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        if file.path.ends_with(".rs") {
            findings.extend(source::check(file));
        } else if file.path.ends_with(".md") {
            findings.extend(documents::check(file, files));
        }
    }
    findings
}

/// Reads every file that is text, without build directories and hidden ones.
fn files(top: &Path) -> std::io::Result<Vec<File>> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::from(top)];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if entry.file_type()?.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    left.push(entry.path());
                }
            } else if let Ok(text) = fs::read_to_string(entry.path()) {
                let path = entry.path().strip_prefix(top).expect("it is below the top").display().to_string();
                found.push(File { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

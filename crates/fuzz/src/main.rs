//! `farpage-fuzz list` prints the targets. `farpage-fuzz NAME FILE...` runs one target on inputs that a
//! fuzzer left.

use farpage_fuzz::{Input, TARGETS, target};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first() {
        Some((word, [])) if word == "list" => TARGETS.iter().for_each(|target| println!("{}", target.name)),
        Some((name, files)) if target(name).is_some() && !files.is_empty() => {
            for file in files {
                let bytes = match std::fs::read(file) {
                    Ok(bytes) => bytes,
                    Err(error) => {
                        eprintln!("{file} can't be read: {error}");
                        return ExitCode::FAILURE;
                    }
                };
                (target(name).expect("looked up above").run)(&mut Input::new(&bytes));
                println!("{file}: nothing wrong");
            }
        }
        _ => {
            eprintln!("farpage-fuzz list, or: farpage-fuzz TARGET FILE...");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

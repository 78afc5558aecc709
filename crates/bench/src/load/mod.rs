//! The program that the live experiments run: an ordinary one, which knows nothing of Farpage. `farpage load NAME`
//! runs it; [`crate::live`] does so with and without a budget.
//!
//! A load prints one line of JSON on standard output, and ends with status 1 if a byte was wrong.

pub mod region;

use serde_json::Value;

/// What a load is given. Each uses what it needs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Size of the region.
    pub bytes: u64,
    /// Threads.
    pub threads: usize,
    /// How long to run.
    pub seconds: f64,
    /// Percent of touches that write.
    pub write_percent: u64,
    /// Where its numbers come from.
    pub seed: u64,
}

/// One load.
pub struct Load {
    /// Its name.
    pub name: &'static str,
    /// One line for the help.
    pub about: &'static str,
    /// Runs it; what it found, or the first wrong byte.
    pub run: fn(&Settings) -> Result<Value, String>,
}

/// The one table of loads.
pub const LOADS: &[Load] = &[Load {
    name: "fill",
    about: "writes every page of the region once, then reads every page in order",
    run: fill,
}];

fn fill(settings: &Settings) -> Result<Value, String> {
    let region = region::Region::new(settings.bytes)?;
    let began = std::time::Instant::now();
    region.fill(settings.seed);
    let filled = began.elapsed();
    region.verify(settings.seed)?;
    let read = began.elapsed() - filled;
    Ok(serde_json::json!({
        "pages": region.pages(),
        "fill_seconds": filled.as_secs_f64(),
        "read_seconds": read.as_secs_f64(),
    }))
}

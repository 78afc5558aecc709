//! The trial: starts `true` by a `farpage run` with the options that `farpage doctor` judges.
//!
//! The other checks look at one requirement each. Only a run shows that all of them together suffice, and
//! that the loader puts Farpage's library into a program.

use super::{Check, Verdict};
use crate::options::Standing;
use crate::program;
use crate::text::failure::quoted;
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Name of the check.
pub const NAME: &str = "trial";
/// The program that is started: each Linux has it, and it does nothing.
const PROGRAM: &str = "true";
/// How long the trial may take. On a busy machine the trial takes some seconds, elsewhere 10 to 50 ms.
const PATIENCE: Duration = Duration::from_secs(60);

/// Output of the trial.
struct Output {
    /// The statistics as JSON. Nothing if the run was refused.
    statistics: String,
    /// Messages of Farpage's, and of the loader.
    messages: String,
}

/// Starts the program under the options among `arguments`, which are the words of `farpage doctor`. The last
/// `program_words` of them are a program that isn't started.
pub fn check(arguments: &[OsString], program_words: usize, standing: Standing) -> Check {
    if let Err(why) = program::resolve(OsStr::new(PROGRAM), std::env::var_os("PATH").as_deref()) {
        return Check::new(NAME, Verdict::Note, format!("`{PROGRAM}` was not tried: {}", why.in_one_line()));
    }
    let own = options_of_run(arguments, program_words);
    let start = Instant::now();
    let check = match start_it(&own, standing.name()) {
        Ok(Some(output)) => judge(&output, start.elapsed()),
        Ok(None) => {
            no(format!("`{PROGRAM}` did not end within {} s, and was killed", PATIENCE.as_secs()), &[])
        }
        Err(error) => no(format!("`{PROGRAM}` could not be started: {error}"), &[]),
    };
    let is_told = check.verdict != Verdict::No || !check.fixes.is_empty();
    if is_told { check } else { check.fix(format!("look at what this prints: {}", line(&own))) }
}

/// Returns the options of `farpage run` among the words of `farpage doctor`, without those that say where the
/// result goes.
fn options_of_run(arguments: &[OsString], program_words: usize) -> Vec<OsString> {
    let end = arguments.len().saturating_sub(program_words);
    let own = arguments.get(2..end).unwrap_or_default();
    let own = own.strip_suffix(&["--".into()]).unwrap_or(own);
    let mut words = own.iter();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match word.as_bytes() {
            b"--json" | b"--quiet" => {}
            b"--stats" | b"--supervisor" => _ = words.next(),
            bytes if bytes.starts_with(b"--stats=") || bytes.starts_with(b"--supervisor=") => {}
            _ => kept.push(word.clone()),
        }
    }
    kept
}

/// Returns the command line of the trial, as a shell takes it.
fn line(own: &[OsString]) -> String {
    let own = own.iter().map(|word| quoted(Path::new(word)) + " ");
    format!("farpage run {}-- {PROGRAM}", own.collect::<String>())
}

/// Runs the trial. Returns its output, or nothing if the trial doesn't end.
fn start_it(own: &[OsString], place: &str) -> std::io::Result<Option<Output>> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("run").args(own).args(["--supervisor", place, "--stats", "-", "--", PROGRAM]);
    command.env_remove("FARPAGE_QUIET").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (said, hear) = mpsc::channel();
    let pipes = (child.stdout.take(), child.stderr.take());
    std::thread::Builder::new().spawn(move || {
        // The supervisor has the pipes open until it has written everything.
        let messages = std::thread::Builder::new().spawn(move || read(pipes.1));
        let statistics = read(pipes.0);
        let messages = messages.map(|reader| reader.join().unwrap_or_default()).unwrap_or_default();
        said.send(Output { statistics, messages })
    })?;
    let output = hear.recv_timeout(PATIENCE).ok();
    if output.is_none() {
        child.kill()?;
    }
    child.wait()?;
    Ok(output)
}

fn read(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // What was read before an error is judged all the same.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn judge(output: &Output, took: Duration) -> Check {
    let Ok(run) = serde_json::from_str::<Value>(&output.statistics) else { return refused(&output.messages) };
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let processes = list(&run["processes"]);
    let told = processes.iter().flat_map(|process| list(&process["notices"]));
    let told: Vec<_> = told.filter_map(|notice| notice["text"].as_str().map(str::to_owned)).collect();
    let ended = match (run["exit"]["status"].as_u64(), run["exit"]["name"].as_str()) {
        (Some(0), _) if processes.is_empty() => return not_joined(&output.messages),
        (Some(0), _) if told.is_empty() => {
            let ms = took.as_millis();
            return Check::new(NAME, Verdict::Ok, format!("`{PROGRAM}` ran under these options, in {ms} ms"));
        }
        (Some(status), _) => format!("`{PROGRAM}` ended with status {status}"),
        (None, Some(signal)) => format!("`{PROGRAM}` was killed by {signal}"),
        (None, None) => format!("how `{PROGRAM}` ended isn't known"),
    };
    no([ended].into_iter().chain(told).collect::<Vec<_>>().join(": "), &[])
}

/// The run ended well, but the program didn't have Farpage's library, and so no budget.
fn not_joined(messages: &str) -> Check {
    let loader = messages.lines().find(|line| !line.starts_with("farpage: ") && !line.is_empty());
    let loader = loader.map_or_else(String::new, |line| format!(": {line}"));
    no(
        format!(
            "`{PROGRAM}` ran without a budget: Farpage's library was not loaded, or could not start{loader}"
        ),
        &["copy farpage and its library to a file system from which this user may execute files"],
    )
}

/// Returns the check for a run that was refused, from the message that the run printed.
fn refused(messages: &str) -> Check {
    let (mut why, mut fixes) = (Vec::new(), Vec::new());
    for line in messages.lines().map(|line| line.strip_prefix("farpage: ").unwrap_or(line)) {
        match line.trim_start() {
            text if text.starts_with("note: ") || text.is_empty() || text == "fix, one of:" => {}
            text => match text.strip_prefix("fix: ").or_else(|| text.strip_prefix("- ")) {
                Some(fix) => fixes.push(fix),
                None => why.push(text),
            },
        }
    }
    let why = if why.is_empty() { "it printed nothing".to_owned() } else { why.join(": ") };
    no(format!("`{PROGRAM}` did not run under these options: {why}"), &fixes)
}

fn no(value: String, fixes: &[&str]) -> Check {
    fixes.iter().fold(Check::new(NAME, Verdict::No, value), |check, fix| check.fix(*fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn judged(statistics: &str, messages: &str) -> Check {
        judge(&Output { statistics: statistics.into(), messages: messages.into() }, Duration::from_millis(30))
    }

    #[test]
    fn words_of_doctor_become_the_options_of_the_run() {
        let own = |line: &str, program: usize| {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            options_of_run(&words, program).join(OsStr::new(" ")).into_string().unwrap()
        };
        for (line, program, expected) in [
            ("farpage doctor", 0, ""),
            ("farpage doctor --json --ram 2G -- python3 --json", 2, "--ram 2G"),
            ("farpage doctor --stats x --no-disk --stats=y --quiet", 0, "--no-disk"),
            ("farpage doctor --supervisor above --swap=/a --supervisor=beside true", 1, "--swap=/a"),
            ("farpage doctor --ram 2G --", 0, "--ram 2G"),
        ] {
            assert_eq!(own(line, program), expected, "{line}");
        }
    }

    #[test]
    fn run_that_was_refused_is_told_with_its_causes_and_fixes() {
        let text = "farpage: note: not this\nfarpage: it is bad\nfarpage:   a cause\nfarpage:   fix, one of:\n\
                    farpage:     - this\nfarpage:     - that\n";
        let check = judged("", text);
        assert_eq!(check.verdict, Verdict::No);
        assert!(check.value.ends_with("did not run under these options: it is bad: a cause"), "{check:?}");
        assert_eq!(check.fixes, ["this", "that"]);
        let one = judged("", "farpage: it is bad\nfarpage:   fix: this\n");
        assert_eq!(one.fixes, ["this"]);
        assert!(judged("", "").value.ends_with("it printed nothing"));
    }

    #[test]
    fn only_a_program_that_joined_and_ended_well_has_run() {
        let joined = |exit: Value, notices: Value| {
            json!({ "exit": exit, "processes": [{ "pid": 7, "notices": notices }] }).to_string()
        };
        assert_eq!(judged(&joined(json!({ "status": 0 }), json!([])), "").verdict, Verdict::Ok);
        let notice = json!([{ "notice": "Alone", "value": 0, "text": "it is alone" }]);
        for (exit, words) in [
            (json!({ "status": 0 }), "ended with status 0: it is alone"),
            (json!({ "status": 125 }), "ended with status 125: it is alone"),
            (json!({ "signal": 9, "name": "SIGKILL" }), "was killed by SIGKILL: it is alone"),
            (Value::Null, "how `true` ended isn't known: it is alone"),
        ] {
            let check = judged(&joined(exit, notice.clone()), "");
            assert!(check.verdict == Verdict::No && check.value.ends_with(words), "{check:?}");
        }
        let statistics = json!({ "exit": { "status": 0 }, "processes": [] }).to_string();
        let check = judged(&statistics, "ERROR: ld.so: object ignored.\nfarpage: true ended\n");
        assert_eq!(check.verdict, Verdict::No);
        assert!(check.value.ends_with("could not start: ERROR: ld.so: object ignored."), "{check:?}");
        assert!(!check.fixes.is_empty(), "{check:?}");
    }
}

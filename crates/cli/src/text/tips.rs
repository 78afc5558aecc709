//! Guesses what a wrong word was meant to be. The word may be an option that is misspelt, misplaced or
//! another tool's, a program that isn't one, or a variable that does not exist.
//!
//! A fix is the user's own command line, corrected, as a shell takes it.

use crate::options::CommandLine;
use crate::text::failure::{Failure, quoted};
use crate::text::size::{self, Amount};
use clap::CommandFactory;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// Names that other tools have for options of Farpage.
const ELSEWHERE: [(&str, &str); 12] = [
    ("-m", "--ram"),
    ("-M", "--ram"),
    ("--mem", "--ram"),
    ("--memory", "--ram"),
    ("--memory-max", "--ram"),
    ("--budget", "--ram"),
    ("--limit", "--ram"),
    ("-q", "--quiet"),
    ("--disk", "--swap"),
    ("--swapfile", "--swap"),
    ("--no-swap", "--no-disk"),
    ("--json", "--stats"),
];

/// Likeness of two words, from 0 to 1, from which on one word is taken for the other: `rma` and
/// `ram` have 0.67.
const ALIKE: f64 = 0.6;

/// Variables of `farpage run` that clap doesn't know: Farpage reads them itself, or sets them for
/// the program.
const VARIABLES: [&str; 5] =
    ["FARPAGE_SWAP", "FARPAGE_NO_DISK", "FARPAGE_SWAP_DIR", "FARPAGE_PRELOAD", "FARPAGE_SESSION"];
/// Prefix of the variables of the project's own tests.
const TESTS: &str = "FARPAGE_TEST_";

/// Characters that a shell treats specially.
const SHELL: &[u8] = b"|&;<>()$`*?\n";

/// Makes the error for an option or a command that does not exist.
pub fn unknown_word(word: &str, arguments: &[OsString]) -> Failure {
    let root = CommandLine::command();
    let names =
        || root.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let Some(given) = arguments.get(1).and_then(|given| given.to_str()) else { return nameless(word) };
    match root.find_subcommand(given) {
        Some(command) => unknown_option(word, command, arguments),
        None if given.starts_with('-') => {
            let run = root.find_subcommand("run").expect("there is a command `run`");
            option_without_command(given, run, arguments)
        }
        None => match closest(given, names()) {
            Some(meant) => {
                Failure::new(format!("there is no command `{given}`")).fix(replaced(arguments, 1, &meant))
            }
            None => Failure::new(format!("there is no command `{given}`"))
                .fix(format!("name one: {}", names().collect::<Vec<_>>().join(", ")))
                .fix(format!("to run it as a program: {}", with_run(arguments))),
        },
    }
}

fn nameless(word: &str) -> Failure {
    Failure::new(format!("`{word}` is not understood")).fix("`farpage --help` lists the commands")
}

fn unknown_option(word: &str, command: &clap::Command, arguments: &[OsString]) -> Failure {
    let name = command.get_name();
    let failure = Failure::new(format!("`farpage {name}` has no option `{word}`"));
    let help = format!("`farpage {name} --help` lists the options");
    let takes_program = command.get_arguments().any(|argument| argument.get_id() == "program");
    let help =
        if takes_program { help + "; a program comes after `--` if its name begins with `-`" } else { help };
    let at = arguments.iter().position(|argument| is_option(argument, word));
    match (meant(word, command), at) {
        (Some(meant), Some(at)) => failure.fix(replaced(arguments, at, &meant)).fix(help),
        _ => failure.fix(help),
    }
}

/// Makes the error for an option in the place of the command, as in `farpage --ram 2G -- true`.
fn option_without_command(given: &str, run: &clap::Command, arguments: &[OsString]) -> Failure {
    let name = given.split('=').next().unwrap_or(given);
    let failure = Failure::new(format!("`{name}` stands where a command should"));
    match meant(name, run) {
        Some(meant) => {
            let mut words = arguments.to_vec();
            words[1] = with_name(&arguments[1], &meant);
            failure.because("options come after the command").fix(with_run(&words))
        }
        None => failure.fix("`farpage --help` lists the commands"),
    }
}

/// Whether a word of the command line is this option, alone or with a value.
fn is_option(argument: &OsStr, option: &str) -> bool {
    let Some(rest) = argument.as_bytes().strip_prefix(option.as_bytes()) else { return false };
    rest.is_empty() || rest.starts_with(b"=") || !option.starts_with("--")
}

/// Returns the option of a command that a word most likely means.
fn meant(word: &str, command: &clap::Command) -> Option<String> {
    let own =
        command.get_arguments().filter_map(|argument| argument.get_long()).map(|name| format!("--{name}"));
    let own: Vec<_> = own.collect();
    let foreign = ELSEWHERE.iter().filter(|(_, ours)| own.iter().any(|name| name == ours));
    if let Some((_, ours)) = foreign.clone().find(|(theirs, _)| *theirs == word) {
        return Some((*ours).to_owned());
    }
    let foreign = foreign.map(|(theirs, _)| *theirs).filter(|theirs| theirs.starts_with("--"));
    let found = closest(word, own.iter().map(String::as_str).chain(foreign))?;
    let ours = ELSEWHERE.iter().find(|(theirs, _)| *theirs == found).map(|(_, ours)| *ours);
    Some(ours.map_or(found, str::to_owned))
}

/// Returns the name that is most like `word`, if any name is like it at all.
fn closest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let bare = |name: &str| name.trim_start_matches('-').to_ascii_lowercase();
    let rated = names.map(|name| (strsim::normalized_damerau_levenshtein(&bare(word), &bare(name)), name));
    let (likeness, name) = rated.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (likeness >= ALIKE).then(|| name.to_owned())
}

/// Returns an argument with another name for its command or option, and with the option's value: `--rma=2G`
/// as `--ram=2G`, and `-m2G`.
fn with_name(argument: &OsStr, name: &str) -> OsString {
    let bytes = argument.as_bytes();
    let value = match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => &bytes[at + 1..],
        None if bytes.starts_with(b"--") || !bytes.starts_with(b"-") => &[],
        None => bytes.get(2..).unwrap_or_default(),
    };
    let parts = if value.is_empty() { vec![name.as_bytes()] } else { vec![name.as_bytes(), b"=", value] };
    OsString::from_vec(parts.concat())
}

/// Returns the command line with another name for the word at `at`.
fn replaced(arguments: &[OsString], at: usize, name: &str) -> String {
    let mut words = arguments.to_vec();
    words[at] = with_name(&arguments[at], name);
    line(&words[1..])
}

/// Returns the command line with the command `run` in it.
fn with_run(arguments: &[OsString]) -> String {
    let words = [&["run".into()], &arguments[1..]].concat();
    line(&words)
}

fn line(words: &[OsString]) -> String {
    let words = words.iter().map(|word| quoted(Path::new(word)));
    ["farpage".into()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// Makes a better error for a program that is not there, if it is a budget or a line for a shell. `arguments`
/// end with the program's words.
pub fn no_program(failure: Failure, program: &[OsString], arguments: &[OsString]) -> Failure {
    let own = &arguments[1..arguments.len() - program.len()];
    let own = own.strip_suffix(&["--".into()]).unwrap_or(own);
    let (name, rest) = (program[0].as_bytes(), &program[1..]);
    let is_size = std::str::from_utf8(name).ok().and_then(|name| size::parse(name).ok());
    if let Some(size) = is_size.filter(|_| name[0].is_ascii_digit()) {
        let what = if matches!(size.amount, Amount::Share(_)) { "a share" } else { "a size" };
        let rest = rest.strip_prefix(&["--".into()]).unwrap_or(rest);
        let rest = if rest.is_empty() { &["PROGRAM".into()] } else { rest };
        let words = [own, &["--ram".into(), program[0].clone(), "--".into()], rest].concat();
        return failure.instead(format!("{} is {what}, not a program", size.text)).fix(line(&words));
    }
    let is_shells = name.iter().any(|byte| SHELL.contains(byte));
    if !is_shells && !name.contains(&b' ') {
        return failure;
    }
    let what = format!("`{}` is a line of words, not a program", program[0].display());
    let words: Vec<OsString> = if is_shells || name.iter().any(|byte| b"'\"\\".contains(byte)) {
        ["sh".into(), "-c".into()].into_iter().chain([program[0].clone()]).collect()
    } else {
        name.split(|byte| *byte == b' ')
            .filter(|word| !word.is_empty())
            .map(|word| OsStr::from_bytes(word).into())
            .collect()
    };
    failure.instead(what).fix(line(&[own, &["--".into()], &words, rest].concat()))
}

/// Returns tips about variables that look like Farpage's but do nothing.
pub fn unknown_variables(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let root = CommandLine::command();
    let run = root.find_subcommand("run").expect("there is a command `run`");
    let options = run.get_arguments().filter_map(clap::Arg::get_env).filter_map(OsStr::to_str);
    let known: Vec<_> = options.chain(VARIABLES).collect();
    let ours = names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("FARPAGE_"));
    let mut unknown: Vec<_> =
        ours.filter(|name| !known.contains(&name.as_str()) && !name.starts_with(TESTS)).collect();
    unknown.sort();
    let tip = |name: String| {
        let meant = closest(&name["FARPAGE_".len()..], known.iter().map(|name| &name["FARPAGE_".len()..]));
        let meant = meant.map_or_else(String::new, |meant| format!("; FARPAGE_{meant} is probably meant"));
        format!(
            "the variable {} is set, which Farpage doesn't know{meant}",
            crate::text::say::harmless(&name)
        )
    };
    unknown.into_iter().map(tip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::failure::STATUS_NOT_FOUND;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn tip(line: &str) -> String {
        let arguments = words(line);
        let error = crate::options::read(&arguments).unwrap_err();
        unknown_word(crate::options::refused_word(&error).unwrap_or_default(), &arguments).to_string()
    }

    #[test]
    fn option_that_was_meant_is_put_into_the_users_own_line() {
        for (line, fix) in [
            ("farpage run --rma 2G -- true", "farpage run --ram 2G -- true"),
            ("farpage run --rma=2G true", "farpage run --ram=2G true"),
            ("farpage run -m 2G true", "farpage run --ram 2G true"),
            ("farpage run -m2G true", "farpage run --ram=2G true"),
            ("farpage run --memory 2G sort -m", "farpage run --ram 2G sort -m"),
            ("farpage run --memroy 2G true", "farpage run --ram 2G true"),
            ("farpage run --quite --swap a;b true", "farpage run --quiet --swap 'a;b' true"),
            ("farpage doctor --rma 2G", "farpage doctor --ram 2G"),
            ("farpage show --byte 1", "farpage show --bytes 1"),
            ("farpage rnu --ram 2G true", "farpage run --ram 2G true"),
            ("farpage --ram 2G -- true", "farpage run --ram 2G -- true"),
            ("farpage -m=2G -- true", "farpage run --ram=2G -- true"),
            ("farpage python3 x.py", "farpage run python3 x.py"),
        ] {
            assert!(tip(line).contains(fix), "{line}: {}", tip(line));
        }
    }

    #[test]
    fn option_like_no_other_is_told_as_that() {
        for (line, text) in [
            ("farpage run --zzz true", "`farpage run --help` lists the options"),
            ("farpage show --zzz", "`farpage show --help` lists the options"),
            ("farpage --zzz", "`farpage --help` lists the commands"),
        ] {
            assert!(tip(line).contains(text) && !tip(line).contains("--ram"), "{line}: {}", tip(line));
        }
    }

    #[test]
    fn program_that_is_a_budget_or_a_shells_line() {
        let of = |own: &str, program: &[&str]| {
            let program: Vec<_> = program.iter().map(OsString::from).collect();
            let arguments = [words(own), program.clone()].concat();
            let failure = Failure::new("it is not there").fix("check the spelling").status(STATUS_NOT_FOUND);
            no_program(failure, &program, &arguments)
        };
        for (own, program, fix) in [
            ("farpage run", &["2G", "--", "true"][..], "fix: farpage run --ram 2G -- true"),
            ("farpage run --quiet", &["50%", "true"], "fix: farpage run --quiet --ram 50% -- true"),
            ("farpage run", &["1GiB"], "fix: farpage run --ram 1GiB -- PROGRAM"),
            ("farpage run --", &["a | b"], "fix: farpage run -- sh -c 'a | b'"),
            ("farpage run --ram 1G", &["python3 x.py"], "fix: farpage run --ram 1G -- python3 x.py"),
            ("farpage run", &["echo 'a b'", "c"], r"fix: farpage run -- sh -c 'echo '\''a b'\''' c"),
            ("farpage run", &["no-such-program"], "fix: check the spelling"),
        ] {
            let failure = of(own, program);
            assert!(failure.to_string().ends_with(fix), "{failure}");
            assert_eq!(failure.status, STATUS_NOT_FOUND);
        }
    }

    #[test]
    fn variables_that_do_nothing_are_named_and_no_others() {
        let names =
            ["FARPAGE_RMA", "FARPAGE_RAM", "FARPAGE_SWAP", "FARPAGE_TEST_SIZE", "PATH", "FARPAGE_ZZZZZZ"];
        let told = unknown_variables(names.iter().map(OsString::from));
        assert_eq!(told.len(), 2);
        assert!(
            told[0].contains("FARPAGE_RMA") && told[0].contains("FARPAGE_RAM is probably meant"),
            "{told:?}"
        );
        assert!(told[1].contains("FARPAGE_ZZZZZZ") && !told[1].contains("probably"), "{told:?}");
    }
}

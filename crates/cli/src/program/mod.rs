//! Finds the file that a program's name means, and checks whether Farpage can work inside it.
//!
//! The search is execvp's. A program whose loader would ignore our library is refused before it starts.
//! Otherwise it would run without Farpage, and nobody would notice until its memory ran out.

pub mod elf;
pub mod preload;

use crate::host::sys;
use crate::program::elf::Elf;
use crate::text::failure::{Failure, STATUS_CANT_RUN, STATUS_NOT_FOUND, quoted};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Interpreters in a row, where a script's interpreter is a script: the kernel, too, gives up after four.
const INTERPRETERS_MAX: usize = 4;
/// Bytes of a script's first line that the kernel reads.
const FIRST_LINE_BYTES: usize = 256;
/// Directories that execvp searches if there is no PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Returns the file that `name` means, checked.
pub fn resolve(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf, Failure> {
    let path = find(name, search)?;
    check(&path, search, INTERPRETERS_MAX)?;
    Ok(path)
}

/// Returns why Farpage can't get into a running program, by its file. None if it can, or if the
/// reason isn't known.
pub fn kind(executable: &Path) -> Option<String> {
    let file = File::open(executable).ok()?;
    let kind = elf::inspect(|offset, buffer| file.read_at(buffer, offset)).ok()?;
    let is_musl = |loader: &[u8]| {
        loader.rsplit(|byte| *byte == b'/').next().is_some_and(|name| name.starts_with(b"ld-musl"))
    };
    match kind {
        Elf::Static => Some("a static program".into()),
        Elf::Bits32 => Some("a 32-bit program".into()),
        Elf::OtherMachine(_) => Some("a program for another machine".into()),
        Elf::Sanitized(sanitizer) => Some(format!("built with {sanitizer}")),
        Elf::Dynamic(loader) if is_musl(&loader) => Some("linked against musl".into()),
        Elf::Dynamic(_) if check_privileges(executable, &file).is_err() => {
            Some("set-uid, set-gid or privileged by its file".into())
        }
        Elf::Dynamic(_) | Elf::Damaged | Elf::Other => None,
    }
}

/// Searches like execvp. A name with a slash is a path. A file in PATH that may not be executed is passed
/// over, but remembered as the reason if no other file is found.
fn find(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf, Failure> {
    if name.is_empty() {
        return Err(
            not_found("the program's name is empty").fix("name a program: farpage run --ram 2G -- PROGRAM")
        );
    }
    if name.as_bytes().contains(&b'/') {
        executable(Path::new(name))?;
        return Ok(name.into());
    }
    let mut refused = None;
    for directory in search.unwrap_or(OsStr::new(DEFAULT_PATH)).as_bytes().split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(directory) };
        let path = Path::new(directory).join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(failure) if failure.status == STATUS_CANT_RUN && refused.is_none() => refused = Some(failure),
            Err(_) => {}
        }
    }
    Err(refused.unwrap_or_else(|| {
        not_found(format!("{} is not there", name.display()))
            .because("no directory of PATH holds a program of that name")
            .fix("check the spelling, or give the program's full path")
    }))
}

/// Checks that `path` is a file that may be executed.
fn executable(path: &Path) -> Result<(), Failure> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            not_found(format!("{} is not there", path.display()))
                .fix("check the spelling; a program in the current directory needs `./` before its name")
        }
        _ => not_seen(path, &error),
    })?;
    if metadata.is_dir() {
        return Err(cant_run(format!("{} is a directory, not a program", path.display()))
            .fix("name the program in it, with its path"));
    }
    if !metadata.is_file() {
        return Err(cant_run(format!("{} is not a regular file", path.display()))
            .because("only files can be executed")
            .fix("check the spelling"));
    }
    sys::may_execute(path).map_err(|_| not_executable(path, metadata.permissions().mode()))
}

fn not_seen(path: &Path, error: &io::Error) -> Failure {
    let failure = cant_run(format!("{} can't be looked at: {error}", path.display()));
    let failure = match error.kind() {
        io::ErrorKind::PermissionDenied => failure.because("a directory on its path is closed to this user"),
        // For a loop of links or a name that is too long, the error is the cause.
        _ => failure,
    };
    failure.fix(format!("`namei -l {}` shows which part of its path it is", quoted(path)))
}

fn not_executable(path: &Path, mode: u32) -> Failure {
    let failure = cant_run(format!("{} is not executable", path.display()));
    if mode & 0o111 == 0 {
        return failure.because("its file permissions allow nobody to execute it").fix(format!(
            "chmod +x {}, or name the interpreter: farpage run ... python3 FILE",
            quoted(path)
        ));
    }
    failure
        .because("its permissions exclude this user, or its file system is mounted noexec")
        .fix(format!("look at `ls -l {0}` and `findmnt -T {0}`", quoted(path)))
}

/// Follows a script to its interpreter, and checks the ELF file at the end.
fn check(path: &Path, search: Option<&OsStr>, levels: usize) -> Result<(), Failure> {
    let file = File::open(path).map_err(|error| {
        cant_run(format!("{} can't be read: {error}", path.display()))
            .because("Farpage reads a program's first bytes to see whether it can work inside it")
            .fix(format!("chmod +r {}", quoted(path)))
    })?;
    let unreadable =
        |error| cant_run(format!("{} can't be read: {error}", path.display())).fix("check the disk (dmesg)");
    match elf::inspect(|offset, buffer| file.read_at(buffer, offset)).map_err(unreadable)? {
        Elf::Other => check_script(path, &file, search, levels),
        kind => {
            check_elf(path, &kind)?;
            check_privileges(path, &file)
        }
    }
}

fn check_elf(path: &Path, kind: &Elf) -> Result<(), Failure> {
    let name = path.display();
    match kind {
        // The file is glibc's loader, which is given the program. The loader heeds LD_PRELOAD, though it
        // needs no loader itself.
        Elf::Static if path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-linux")) => Ok(()),
        Elf::Static => Err(cant_run(format!("{name} is a static program"))
            .because(
                "it loads no shared libraries, so Farpage can't get into it (Go programs often are static)",
            )
            .fix("use a dynamically linked build of it (Go: build with -linkmode=external or use cgo)")),
        Elf::Bits32 => Err(cant_run(format!("{name} is a 32-bit program"))
            .because("Farpage works inside 64-bit programs of this machine")
            .fix("use a 64-bit build of it")),
        Elf::OtherMachine(number) => Err(cant_run(format!("{name} is a program for another machine"))
            .because(format!("its ELF machine number is {number}"))
            .fix(format!("use a build for {}", std::env::consts::ARCH))),
        Elf::Damaged => Err(cant_run(format!("{name} is not a whole ELF file"))
            .because("it is cut off, or its headers contradict each other")
            .fix("install or build it again")),
        Elf::Dynamic(loader) => check_loader(path, loader),
        Elf::Sanitized(sanitizer) => Err(cant_run(format!("{name} is built with {sanitizer}"))
            .because("a sanitizer must be the first library in a program, and keeps books about all of its memory itself")
            .fix("use a build of it without -fsanitize")),
        Elf::Other => unreachable!("scripts were handled by the caller"),
    }
}

fn check_loader(path: &Path, loader: &[u8]) -> Result<(), Failure> {
    let loader = Path::new(OsStr::from_bytes(loader));
    let name = loader.file_name().unwrap_or_default().as_bytes();
    if name.starts_with(b"ld-musl") {
        return Err(cant_run(format!("{} is linked against musl", path.display()))
            .because("Farpage's library is made for glibc and can't be loaded by musl's loader")
            .fix("use a build for a glibc system (for example a Debian-based container image)"));
    }
    if !loader.exists() {
        return Err(cant_run(format!("{} can't be started", path.display()))
            .because(format!("its dynamic loader {} is not there", loader.display()))
            .fix("use a build for this distribution"));
    }
    Ok(())
}

/// Refuses a program that gets privileges from its file, because the loader ignores LD_PRELOAD in it.
fn check_privileges(path: &Path, file: &File) -> Result<(), Failure> {
    let mode = file.metadata().map_or(0, |metadata| metadata.permissions().mode());
    let what = if mode & 0o4000 != 0 {
        "set-uid"
    } else if mode & 0o2010 == 0o2010 {
        "set-gid"
    } else if sys::has_attribute(path, c"security.capability") {
        "privileged by file capabilities"
    } else {
        return Ok(());
    };
    Err(cant_run(format!("{} is {what}", path.display()))
        .because("the system loads no foreign libraries into such programs, so Farpage can't get into it")
        .fix("run the program it starts, not it: `sudo farpage run ...` instead of `farpage run sudo ...`"))
}

/// Checks a script. A script runs in its interpreter; a text without `#!` runs in /bin/sh, as execvp has it.
fn check_script(path: &Path, file: &File, search: Option<&OsStr>, levels: usize) -> Result<(), Failure> {
    let mut head = [0; FIRST_LINE_BYTES];
    let got = file.read_at(&mut head, 0).unwrap_or(0);
    let head = &head[..got];
    let interpreter = match first_line(head) {
        FirstLine::Interpreter(interpreter) => PathBuf::from(interpreter),
        FirstLine::Env(env, program) => {
            executable(Path::new(&env)).map_err(|failure| broken_script(path, &env, &failure))?;
            let found = find(&program, search).map_err(|failure| broken_script(path, &program, &failure))?;
            return check_next(path, &found, search, levels);
        }
        FirstLine::None if head.contains(&0) => {
            return Err(cant_run(format!("{} is not a program for Linux", path.display()))
                .because("it is neither ELF nor a script")
                .fix("name the program that runs such files: farpage run ... INTERPRETER FILE"));
        }
        FirstLine::None => PathBuf::from("/bin/sh"),
    };
    executable(&interpreter).map_err(|failure| broken_script(path, interpreter.as_os_str(), &failure))?;
    check_next(path, &interpreter, search, levels)
}

fn check_next(script: &Path, next: &Path, search: Option<&OsStr>, levels: usize) -> Result<(), Failure> {
    if levels == 0 {
        return Err(cant_run(format!("{} is a script of a script of a script", script.display()))
            .because(format!("more than {INTERPRETERS_MAX} interpreters would have to start each other"))
            .fix("name the last interpreter: farpage run ... INTERPRETER SCRIPT"));
    }
    check(next, search, levels - 1)
}

fn broken_script(script: &Path, interpreter: &OsStr, failure: &Failure) -> Failure {
    cant_run(format!("the script {} can't be started", script.display()))
        .because(format!("its first line asks for {}: {}", interpreter.display(), failure.in_one_line()))
        .fix("install that interpreter or correct the script's first line")
}

/// The interpreter that a script's first line asks for.
#[derive(Debug, PartialEq, Eq)]
enum FirstLine {
    None,
    Interpreter(OsString),
    /// `#!/usr/bin/env PROGRAM`: env need only be there, because it hands its environment on.
    Env(OsString, OsString),
}

fn first_line(head: &[u8]) -> FirstLine {
    let Some(line) = head.strip_prefix(b"#!") else { return FirstLine::None };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let Some(interpreter) = words.next().map(OsStr::from_bytes) else { return FirstLine::None };
    if Path::new(interpreter).file_name() == Some(OsStr::new("env"))
        && let Some(program) = program_of_env(words)
    {
        return FirstLine::Env(interpreter.into(), OsStr::from_bytes(program).into());
    }
    FirstLine::Interpreter(interpreter.into())
}

/// Returns the program among env's words. Options, some with a word of their own, and assignments come before
/// it. None if there is no program, or if a word isn't what it looks like (`-S` knows quotes and variables).
/// In that case only env itself is checked.
fn program_of_env<'a>(mut words: impl Iterator<Item = &'a [u8]>) -> Option<&'a [u8]> {
    loop {
        let word = words.next()?;
        if word.iter().any(|byte| b"'\"\\$".contains(byte)) {
            return None;
        }
        match word {
            b"-u" | b"-a" | b"--unset" | b"--argv0" => _ = words.next()?,
            // With `-S` alone the program follows as a word. With the next options it is in the same word,
            // or env looks for it in another directory or by another PATH.
            b"-S" => {}
            [b'-', b'S' | b'C', ..] => return None,
            word if [&b"--split"[..], b"--chdir", b"PATH="].iter().any(|start| word.starts_with(start)) => {
                return None;
            }
            [b'-', ..] => {}
            word if word.contains(&b'=') => {}
            word => return Some(word),
        }
    }
}

fn cant_run(what: impl Into<String>) -> Failure {
    Failure::new(what).status(STATUS_CANT_RUN)
}

fn not_found(what: impl Into<String>) -> Failure {
    Failure::new(what).status(STATUS_NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn put(directory: &Path, name: &str, text: &[u8], mode: u32) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn first_lines_are_read_as_the_kernel_reads_them() {
        let env = |name: &str| FirstLine::Env("/usr/bin/env".into(), name.into());
        let plain = |name: &str| FirstLine::Interpreter(name.into());
        for (text, expected) in [
            ("#!/bin/sh\n", plain("/bin/sh")),
            ("#! /bin/sh -e\n", plain("/bin/sh")),
            ("#!/usr/bin/env python3\n", env("python3")),
            ("#!/usr/bin/env -S A=1 python3 -u\n", env("python3")),
            ("#!/usr/bin/env -S -u PYTHONPATH python3\n", env("python3")),
            ("#!/usr/bin/env -S -C /opt/app ./prog\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env -S PATH=/opt/bin prog\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env --split-string=python3 x.py\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env -Spython3 x.py\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env -S \"python3\" -u\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env -S ${HOME}/bin/prog\n", plain("/usr/bin/env")),
            ("#!/usr/bin/env\n", plain("/usr/bin/env")),
            ("#!\n", FirstLine::None),
            ("echo\n", FirstLine::None),
            ("", FirstLine::None),
        ] {
            assert_eq!(first_line(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn file_that_is_not_executable_is_passed_over_in_the_search() {
        let (first, second) = (directory(), directory());
        put(first.path(), "tool", b"", 0o644);
        let right = put(second.path(), "tool", b"#!/bin/sh\n", 0o755);
        let search = format!("{}:{}", first.path().display(), second.path().display());
        assert_eq!(find(OsStr::new("tool"), Some(OsStr::new(&search))).unwrap(), right);
        let only = first.path().as_os_str();
        assert_eq!(find(OsStr::new("tool"), Some(only)).unwrap_err().status, STATUS_CANT_RUN);
        assert_eq!(find(OsStr::new("other"), Some(only)).unwrap_err().status, STATUS_NOT_FOUND);
    }

    #[test]
    fn scripts_are_followed_but_not_forever() {
        let place = directory();
        let mut path = put(place.path(), "0", b"#!/bin/sh\n", 0o755);
        for level in 1..6 {
            resolve(path.as_os_str(), None).unwrap_or_else(|failure| panic!("level {level}: {failure}"));
            if level == 4 {
                break;
            }
            let text = format!("#!{}\n", path.display());
            path = put(place.path(), &level.to_string(), text.as_bytes(), 0o755);
        }
        let text = format!("#!{}\n", path.display());
        let path = put(place.path(), "too deep", text.as_bytes(), 0o755);
        assert_eq!(resolve(path.as_os_str(), None).unwrap_err().status, STATUS_CANT_RUN);
    }

    #[test]
    fn script_of_a_missing_interpreter_cant_run() {
        let place = directory();
        for text in ["#!/no/such/thing\n", "#!/usr/bin/env no-such-thing\n", "#!/no/such/env sh\n"] {
            let path = put(place.path(), "script", text.as_bytes(), 0o755);
            assert_eq!(resolve(path.as_os_str(), None).unwrap_err().status, STATUS_CANT_RUN);
        }
    }

    #[test]
    fn file_of_neither_kind_cant_run() {
        let place = directory();
        let path = put(place.path(), "blob", b"MZ\0\0\0", 0o755);
        assert_eq!(resolve(path.as_os_str(), None).unwrap_err().status, STATUS_CANT_RUN);
    }

    #[test]
    fn every_refusal_has_a_fix() {
        let place = directory();
        let blob = put(place.path(), "blob", b"MZ\0\0\0", 0o755);
        let circle = place.path().join("circle");
        std::os::unix::fs::symlink(&circle, &circle).unwrap();
        for name in ["", "no-such-program", "/no/such", "/var/tmp", "/dev/null"].map(OsStr::new) {
            let failure = resolve(name, None).unwrap_err();
            assert!(!failure.fixes().is_empty(), "{failure}");
        }
        for path in [blob, circle] {
            let failure = resolve(path.as_os_str(), None).unwrap_err();
            assert!(failure.status == STATUS_CANT_RUN && !failure.fixes().is_empty(), "{failure}");
        }
        let deep = check_next(Path::new("/x"), Path::new("/y"), None, 0).unwrap_err();
        assert!(deep.fixes()[0].contains("last interpreter"), "{deep}");
        let closed = not_seen(Path::new("/x/y"), &io::Error::from_raw_os_error(libc::EACCES)).to_string();
        assert!(closed.contains("closed to this user") && closed.contains("`namei -l /x/y`"), "{closed}");
    }
}

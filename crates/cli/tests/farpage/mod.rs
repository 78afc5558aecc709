//! Runs the built `farpage` in tests, with a clean environment. A library that does nothing replaces the real
//! one, so that these tests need no engine.

pub mod budgeted;
pub mod group;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The result of a run.
pub struct Ended {
    pub status: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn of(output: Output) -> Ended {
        Ended {
            status: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Checks the status and the one clear message: every line is Farpage's, and each of `words` is in it.
    #[track_caller]
    pub fn refused(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, Some(status), "{}", self.stderr);
        assert!(self.stderr.starts_with("farpage: "), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is not in:\n{}", self.stderr);
        }
        assert_eq!(self.stdout, "", "nothing may go to standard output");
    }
}

/// Returns a library that every dynamic program can load. The library does nothing, but says that
/// it is of this version.
pub fn harmless_library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build_harmless_library).clone()
}

fn build_harmless_library() -> PathBuf {
    let name = farpage_runtime::session::LAYOUT_NAME;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("harmless-{name}.so"));
    let draft = path.with_extension(format!("{}", std::process::id()));
    let source = path.with_extension(format!("{}.c", std::process::id()));
    fs::write(&source, format!("char {name};\n")).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&draft).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    fs::remove_file(source).unwrap();
    // The rename makes the library appear in one step, because several test programs may build it at once.
    fs::rename(draft, &path).unwrap();
    path
}

/// Returns the C library, which is not a library of Farpage's.
pub fn libc_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("/libc.so") || line.contains("/libc-"));
    line.and_then(|line| line.split_whitespace().last()).expect("this test is linked against libc").into()
}

/// Returns a `farpage` command with a clean environment.
pub fn farpage() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farpage"));
    clean(&mut command);
    command
}

fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("FARPAGE_") && name != "FARPAGE_SUPERVISOR"
            || name == "LD_PRELOAD"
            || name == "TMPDIR"
        {
            command.env_remove(&*name);
        }
    }
    command.env("FARPAGE_PRELOAD", harmless_library()).stdin(Stdio::null());
}

/// Runs `farpage run` with these words.
pub fn run(words: &[&str]) -> Ended {
    Ended::of(farpage().arg("run").args(words).output().unwrap())
}

/// Makes a directory on a disk, not in memory.
pub fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

/// Makes a file with this content and mode. Returns its path.
pub fn put(directory: &Path, name: &str, content: &[u8], mode: u32) -> String {
    let path = directory.join(name);
    if mode & 0o111 != 0 {
        let draft = directory.join(format!("{name}.draft"));
        fs::write(&draft, content).unwrap();
        install(&draft, &path, mode);
        fs::remove_file(draft).unwrap();
    } else {
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    path.to_str().unwrap().into()
}

/// Copies an executable by another process. If this process wrote the file, a child that another
/// test forks meanwhile would hold it open for writing for a moment. Executing the file would then
/// answer "text file busy".
pub fn install(from: &Path, to: &Path, mode: u32) {
    let mode = format!("{mode:o}");
    let done = Command::new("install").args(["-m", &mode]).arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

pub fn is_root() -> bool {
    // SAFETY: takes no pointers and always succeeds.
    unsafe { libc::geteuid() == 0 }
}

/// Runs `farpage run` as an ordinary user: as user 65534 if the tests run as root. Executable and library are
/// copied to where that user can reach them.
pub fn run_as_ordinary_user(place: &Path, words: &[&str]) -> Ended {
    if !is_root() {
        return run(words);
    }
    let executable = place.join("farpage");
    install(Path::new(env!("CARGO_BIN_EXE_farpage")), &executable, 0o755);
    let mut command = Command::new(executable);
    clean(&mut command);
    let library = place.join("harmless.so");
    install(&harmless_library(), &library, 0o755);
    command.env("FARPAGE_PRELOAD", library);
    command.arg("run").args(words).uid(65_534).gid(65_534).current_dir("/");
    // SAFETY: between fork and exec only an async-signal-safe call that takes no memory of Farpage's.
    unsafe { command.pre_exec(drop_groups) };
    Ended::of(command.output().unwrap())
}

fn drop_groups() -> std::io::Result<()> {
    // SAFETY: no groups are read from a null list of length 0. The call fails harmlessly once the
    // user has changed.
    unsafe { libc::setgroups(0, std::ptr::null()) };
    Ok(())
}

/// Skips a test that can't run here, and says why. In CI a skip is a failure, so that nothing is
/// skipped unseen.
#[track_caller]
pub fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "CI must be able to test this: {why}");
    eprintln!("skipped: {why}");
}

/// Whether `farpage run` can start a program here, as `farpage doctor` says. Reports a skip if it can't.
#[track_caller]
pub fn can_run() -> bool {
    let doctor = farpage().args(["doctor", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let able = report["choice"]["install"].is_string();
    if !able {
        skip("no userfaultfd for kernel faults here (see `farpage doctor`)");
    }
    able
}

/// Compiles an empty program. None if the C compiler, which the tests need, doesn't work.
#[track_caller]
pub fn compile(directory: &Path, name: &str, flags: &[&str]) -> Option<String> {
    let source = put(directory, &format!("{name}.c"), b"int main(void) { return 0; }\n", 0o644);
    let program = directory.join(name);
    let compiled = Command::new("cc").args(flags).arg("-o").arg(&program).arg(source).output();
    if compiled.is_ok_and(|output| output.status.success()) {
        return Some(program.to_str().unwrap().into());
    }
    skip(&format!("cc {} doesn't work here", flags.join(" ")));
    None
}

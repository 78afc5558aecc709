//! Finds the library that gets into the program, and tells the program to load it.

use crate::host::sys;
use crate::program::elf;
use crate::text::failure::{Failure, quoted};
use farpage_runtime::session::LAYOUT_NAME;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const NAME: &str = "libfarpage_preload.so";
/// Fix for a library that was named and isn't one.
const FIX_NAME: &str = "correct or unset FARPAGE_PRELOAD";

/// Finds the library: `$FARPAGE_PRELOAD`, beside this executable, or in `../lib/farpage` from there.
pub fn find() -> Result<PathBuf, Failure> {
    let named = sys::environment("FARPAGE_PRELOAD");
    let is_named = named.is_some();
    let executable = std::env::current_exe().ok();
    let path = find_in(named, executable.as_deref().and_then(Path::parent))?;
    // The name may outlive the version that it was right for.
    of_our_version(path).map_err(|failure| if is_named { failure.fix(FIX_NAME) } else { failure })
}

/// Refuses a library of another version. A copy that was left behind when `farpage` was replaced doesn't know
/// this version's sessions.
fn of_our_version(path: PathBuf) -> Result<PathBuf, Failure> {
    let file = File::open(&path).map_err(|error| unreadable(&path, &error))?;
    match elf::has_name(|offset, buffer| file.read_at(buffer, offset), LAYOUT_NAME) {
        Ok(true) => Ok(path),
        Ok(false) => {
            let what = format!("{} is not the library of this farpage's version", path.display());
            Err(Failure::new(what)
                .because("it is older or newer, or damaged: programs would run without us")
                .fix(
                    "install both from the same build, or build it: cargo build --release -p farpage-preload",
                ))
        }
        Err(error) => Err(unreadable(&path, &error)),
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Failure {
    let name = path.display();
    let failure = Failure::new(format!("{name} can't be read: {error}"));
    match error.kind() {
        io::ErrorKind::PermissionDenied => failure
            .because("its permissions exclude this user")
            .fix(format!("chmod a+r {}, and a+x for the directories on its path", quoted(path))),
        _ => failure.fix(
            "look at the disk (dmesg), or copy the library to another place and set FARPAGE_PRELOAD to that",
        ),
    }
}

fn find_in(named: Option<OsString>, directory: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(named) = named {
        let path = absolute(Path::new(&named));
        if !path.is_file() {
            return Err(Failure::new(format!(
                "FARPAGE_PRELOAD names {}, which is not a file",
                path.display()
            ))
            .fix(FIX_NAME));
        }
        return loadable(path);
    }
    let candidates =
        directory.map(|directory| [directory.join(NAME), directory.join("../lib/farpage").join(NAME)]);
    let found = candidates.iter().flatten().find(|path| path.is_file());
    found.map_or_else(
        || {
            let place = directory.map_or_else(|| "?".into(), |directory| directory.display().to_string());
            Err(Failure::new(format!("{NAME} is missing"))
                .because(format!("it is neither in {place} nor in {place}/../lib/farpage"))
                .fix("build it: cargo build --release -p farpage-preload")
                .fix("or say where it is: FARPAGE_PRELOAD=/path/to/libfarpage_preload.so"))
        },
        |path| loadable(absolute(path)),
    )
}

/// Makes a path absolute, because the program may change its directory before it starts other programs.
fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.into())
}

/// Refuses a path that LD_PRELOAD can't hold. The loader splits LD_PRELOAD at colons and blanks, expands `$`,
/// and has no way to quote them.
fn loadable(path: PathBuf) -> Result<PathBuf, Failure> {
    if path
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| matches!(byte, b':' | b'$') || byte.is_ascii_whitespace())
    {
        return Err(Failure::new(format!("{} can't be loaded into programs", path.display()))
            .because("LD_PRELOAD can't hold a path with a blank, a colon or a `$` in it")
            .fix("copy it to another place and set FARPAGE_PRELOAD to that"));
    }
    Ok(path)
}

/// Returns LD_PRELOAD for the program: our library first, then the entries that were there. Another copy of
/// our library is left out. A run that is started under another run finds one, and two copies can't both
/// replace libc's functions.
pub fn with_existing(ours: &Path, existing: Option<&OsStr>) -> OsString {
    let mut value = ours.as_os_str().as_bytes().to_vec();
    let entries = existing.unwrap_or_default().as_bytes().split(|byte| matches!(byte, b':' | b' '));
    let is_ours = |entry: &[u8]| {
        let entry = Path::new(OsStr::from_bytes(entry));
        entry == ours || entry.file_name() == Some(OsStr::new(NAME))
    };
    for entry in entries.filter(|entry| !entry.is_empty() && !is_ours(entry)) {
        value.push(b':');
        value.extend_from_slice(entry);
    }
    OsString::from_vec(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_entries_are_kept_once() {
        let with = |existing: &str| with_existing(Path::new("/f.so"), Some(OsStr::new(existing)));
        assert_eq!(with_existing(Path::new("/f.so"), None), "/f.so");
        assert_eq!(with("/a.so /b.so"), "/f.so:/a.so:/b.so");
        assert_eq!(with("/a.so::/f.so"), "/f.so:/a.so");
        assert_eq!(with(&format!("/else/{NAME}:/a.so")), "/f.so:/a.so");
    }

    #[test]
    fn library_that_can_not_be_read_has_a_fix() {
        let text = |errno| unreadable(Path::new("/x.so"), &io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::EACCES).contains("fix: chmod a+r /x.so"), "{}", text(libc::EACCES));
        assert!(text(libc::EIO).contains("fix: look at the disk"), "{}", text(libc::EIO));
    }

    #[test]
    fn library_is_found_where_it_is_named_beside_us_or_below_lib() {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        std::fs::create_dir_all(place.path().join("lib/farpage")).unwrap();
        std::fs::create_dir(&bin).unwrap();
        assert!(find_in(None, Some(&bin)).is_err());
        std::fs::write(place.path().join("lib/farpage").join(NAME), "").unwrap();
        assert!(find_in(None, Some(&bin)).unwrap().ends_with(Path::new("lib/farpage").join(NAME)));
        std::fs::write(bin.join(NAME), "").unwrap();
        assert!(find_in(None, Some(&bin)).unwrap().ends_with(Path::new("bin").join(NAME)));
        assert!(find_in(Some("/no/such.so".into()), Some(&bin)).is_err());
        let odd = place.path().join("a b.so");
        std::fs::write(&odd, "").unwrap();
        assert!(find_in(Some(odd.into()), None).is_err());
    }
}

//! Failures: why Farpage stops before it runs a program, or instead of running it. A failure has what
//! happened, the likely cause, and the command that fixes it. The whole command uses one type, which only
//! `main` prints.

use crate::text::say;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Farpage itself failed, or was asked for something it can't do.
pub const STATUS_FAILED: u8 = 125;
/// The program is there but can't run under Farpage.
pub const STATUS_CANT_RUN: u8 = 126;
/// The program isn't there.
pub const STATUS_NOT_FOUND: u8 = 127;

/// Fix for a lack of file descriptors.
pub const FIX_DESCRIPTORS: &str = "raise the limit of open files: ulimit -n";

/// Returns a path as a shell takes it. Commands that are offered get pasted, and `truncate -s 0 /mnt/my swap`
/// empties two other files.
pub fn quoted(path: &Path) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+,:@%=".contains(byte);
    match path.to_str() {
        Some(text) if !text.is_empty() && text.as_bytes().iter().all(is_plain) => text.to_owned(),
        Some(text) if text.chars().all(say::is_visible) => format!("'{}'", text.replace('\'', "'\\''")),
        _ => quoted_bytes(path.as_os_str().as_bytes()),
    }
}

/// Returns bytes as bash, zsh and newer shells of POSIX take them, with an escape for each byte that a
/// terminal doesn't show.
fn quoted_bytes(bytes: &[u8]) -> String {
    let shown = bytes.iter().map(|byte| match byte {
        b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).to_string(),
        // Three digits, so that a digit of the name can't belong to the escape.
        byte => format!("\\{byte:03o}"),
    });
    format!("$'{}'", shown.collect::<String>())
}

/// An error for the user.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Farpage's exit status.
    pub status: u8,
    what: String,
    causes: Vec<String>,
    fixes: Vec<String>,
}

impl Failure {
    /// A failure with what happened, as one sentence without a full stop. The status is 125 unless changed.
    /// Names in the sentence, in causes and in fixes may hold any character.
    pub fn new(what: impl Into<String>) -> Failure {
        let what = say::visible(&what.into());
        Failure { status: STATUS_FAILED, what, causes: Vec::new(), fixes: Vec::new() }
    }

    /// Adds a likely cause.
    pub fn because(mut self, cause: impl Into<String>) -> Failure {
        self.causes.push(say::visible(&cause.into()));
        self
    }

    /// Adds a fix. Several fixes are alternatives.
    pub fn fix(mut self, fix: impl Into<String>) -> Failure {
        self.fixes.push(say::visible(&fix.into()));
        self
    }

    /// Returns a failure with the same status and a better reason. The caller adds causes and fixes anew.
    pub fn instead(self, what: impl Into<String>) -> Failure {
        Failure::new(what).status(self.status)
    }

    /// Sets another exit status.
    pub fn status(mut self, status: u8) -> Failure {
        self.status = status;
        self
    }

    /// Returns the first sentence and the causes in one line, for a list of reasons.
    pub fn in_one_line(&self) -> String {
        let mut parts = vec![self.what.as_str()];
        parts.extend(self.causes.iter().map(String::as_str));
        parts.join(": ")
    }

    /// Returns the fixes, for a table.
    pub fn fixes(&self) -> &[String] {
        &self.fixes
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "farpage: {}", self.what)?;
        for cause in &self.causes {
            write!(f, "\nfarpage:   {cause}")?;
        }
        match self.fixes.as_slice() {
            [] => Ok(()),
            [fix] => write!(f, "\nfarpage:   fix: {fix}"),
            fixes => {
                write!(f, "\nfarpage:   fix, one of:")?;
                fixes.iter().try_for_each(|fix| write!(f, "\nfarpage:     - {fix}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn path_that_a_shell_would_split_or_expand_is_quoted() {
        for (path, text) in [
            ("/var/tmp/swap-1.img", "/var/tmp/swap-1.img"),
            ("/mnt/my swap", "'/mnt/my swap'"),
            ("", "''"),
            ("/tmp/$(reboot);", "'/tmp/$(reboot);'"),
            ("/tmp/it's", "'/tmp/it'\\''s'"),
            ("/tmp/ä", "'/tmp/ä'"),
            ("/tmp/\x1b[1m\n7'\\", r"$'/tmp/\033[1m\0127\'\\'"),
            ("/tmp/\u{9b}", r"$'/tmp/\302\233'"),
        ] {
            assert_eq!(quoted(Path::new(path)), text);
        }
        assert_eq!(quoted(Path::new(OsStr::from_bytes(b"/\xff"))), r"$'/\377'");
    }

    /// The path's own line break looked like the end of the message.
    #[test]
    fn failure_has_one_line_for_each_part_whatever_a_name_holds() {
        let name = "\x1b[31m\nfarpage: all is well";
        let failure = Failure::new(format!("{name} is bad")).because(name).fix(name).fix(name);
        let text = failure.to_string();
        assert_eq!(text.lines().count(), 5, "{text}");
        let parts = [failure.in_one_line(), failure.fixes().concat(), text.replace('\n', "")];
        assert!(!parts.concat().contains(char::is_control), "{text:?}");
    }
}

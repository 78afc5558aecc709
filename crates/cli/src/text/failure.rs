//! Failures: why Farpage stops before it runs a program, or instead of running it. A failure has what
//! happened, the likely cause, and the command that fixes it. The whole command uses one type, which only
//! `main` prints.

use std::fmt;
use std::path::Path;

/// Farpage itself failed, or was asked for something it can't do.
pub const STATUS_FAILED: u8 = 125;
/// The program is there but can't run under Farpage.
pub const STATUS_CANT_RUN: u8 = 126;
/// The program isn't there.
pub const STATUS_NOT_FOUND: u8 = 127;

/// Returns a path as a shell takes it. Commands that are offered get pasted, and `truncate -s 0 /mnt/my swap`
/// empties two other files.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+,:@%=".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
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
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { status: STATUS_FAILED, what: what.into(), causes: Vec::new(), fixes: Vec::new() }
    }

    /// Adds a likely cause.
    pub fn because(mut self, cause: impl Into<String>) -> Failure {
        self.causes.push(cause.into());
        self
    }

    /// Adds a fix. Several fixes are alternatives.
    pub fn fix(mut self, fix: impl Into<String>) -> Failure {
        self.fixes.push(fix.into());
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

    #[test]
    fn path_that_a_shell_would_split_or_expand_is_quoted() {
        for (path, text) in [
            ("/var/tmp/swap-1.img", "/var/tmp/swap-1.img"),
            ("/mnt/my swap", "'/mnt/my swap'"),
            ("", "''"),
            ("/tmp/$(reboot);", "'/tmp/$(reboot);'"),
            ("/tmp/it's", "'/tmp/it'\\''s'"),
        ] {
            assert_eq!(quoted(Path::new(path)), text);
        }
    }
}

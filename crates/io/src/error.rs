//! Errors of a request, and the one place where errno of a device is translated.
//!
//! The layers above ask three questions. Is the area full, so that eviction to it stops? Is the device lost,
//! so that it becomes read-only and the frames are kept? May the same request succeed a little later?

use rustix::io::Errno;

/// The in-flight table is full and the request wasn't taken. The caller takes completions, then tries again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// No space is left: the file system is full, the quota is used up, or the file has reached its size
    /// limit.
    NoSpace,
    /// The device or the file refused, with this errno.
    Device(u16),
    /// The file ended before the request did, because it is shorter than the area.
    Short,
}

impl IoError {
    /// Input/output error, which a device reports when it has lost data or itself.
    pub const EIO: IoError = IoError::Device(Errno::IO.raw_os_error() as u16);

    /// Translates errno. No other function of this crate does.
    pub(crate) const fn from_errno(errno: Errno) -> IoError {
        match errno {
            // The file system is full.
            Errno::NOSPC => IoError::NoSpace,
            // The user's quota on the file system is used up.
            Errno::DQUOT => IoError::NoSpace,
            // RLIMIT_FSIZE, or the file system's largest file size, is reached. The area can't grow either.
            Errno::FBIG => IoError::NoSpace,
            // Every other error counts as one of the device. Errno is below 4096.
            other => IoError::Device(other.raw_os_error() as u16),
        }
    }

    /// Returns whether the area is full: the device works, but no more data fits.
    pub const fn is_no_space(self) -> bool {
        matches!(self, IoError::NoSpace)
    }

    /// Returns whether the kernel lacked a resource, so that the same request may succeed later.
    pub const fn is_retryable(self) -> bool {
        const AGAIN: u16 = Errno::AGAIN.raw_os_error() as u16;
        const INTR: u16 = Errno::INTR.raw_os_error() as u16;
        const NOMEM: u16 = Errno::NOMEM.raw_os_error() as u16;
        const NOBUFS: u16 = Errno::NOBUFS.raw_os_error() as u16;
        const BUSY: u16 = Errno::BUSY.raw_os_error() as u16;
        matches!(self, IoError::Device(AGAIN | INTR | NOMEM | NOBUFS | BUSY))
    }

    /// Returns whether the device or file can't be relied on from now on.
    pub const fn is_device_lost(self) -> bool {
        matches!(self, IoError::Device(_)) && !self.is_retryable()
    }

    /// Returns the kernel's number, for messages. [`IoError::Short`] has none.
    pub const fn errno(self) -> Option<u16> {
        match self {
            IoError::NoSpace => Some(Errno::NOSPC.raw_os_error() as u16),
            IoError::Device(errno) => Some(errno),
            IoError::Short => None,
        }
    }
}

impl core::fmt::Display for IoError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            IoError::NoSpace => f.write_str("no space is left"),
            IoError::Device(errno) => write!(f, "the device or the file refused, errno {errno}"),
            IoError::Short => f.write_str("the file ended before the request did"),
        }
    }
}

/// The step at which [`crate::Uring::new`] failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupStep {
    /// `io_uring_setup`: refused by seccomp, a sysctl, or missing in the kernel.
    Ring,
    /// The kernel is older than 5.5 and lacks a feature that the ring relies on.
    Features,
    /// Mapping the rings or the in-flight table.
    Memory,
    /// Registering the area's file.
    File,
}

/// Why io_uring can't be used. Use [`crate::Psync`] instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetupError {
    /// The step that failed.
    pub step: SetupStep,
    /// The errno of that step.
    pub errno: u16,
}

impl SetupError {
    pub(crate) const fn at(step: SetupStep) -> impl Fn(Errno) -> SetupError {
        move |errno| SetupError { step, errno: errno.raw_os_error() as u16 }
    }
}

impl core::fmt::Display for SetupError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let step = match self.step {
            SetupStep::Ring => "io_uring is not available",
            SetupStep::Features => "this kernel's io_uring is too old",
            SetupStep::Memory => "the rings couldn't be mapped",
            SetupStep::File => "the area's file couldn't be registered",
        };
        write!(f, "{step}, errno {}", self.errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_file_systems_quotas_and_limits_are_no_space() {
        for errno in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
            let error = IoError::from_errno(errno);
            assert!(error.is_no_space() && !error.is_device_lost() && !error.is_retryable());
        }
    }

    #[test]
    fn other_numbers_are_kept_and_answer_one_question_each() {
        let lost = IoError::from_errno(Errno::IO);
        assert_eq!((lost, lost.errno()), (IoError::EIO, Some(5)));
        assert!(lost.is_device_lost() && !lost.is_retryable());
        let shortage = IoError::from_errno(Errno::NOMEM);
        assert!(shortage.is_retryable() && !shortage.is_device_lost());
        assert!(!IoError::Short.is_device_lost() && IoError::Short.errno().is_none());
    }
}

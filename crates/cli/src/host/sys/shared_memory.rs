//! Shared memory of a run: a sealed memfd, mapped by the supervisor, by `farpage show` and by other runs.
// UNSAFETY: mappings are made and unmapped by libc's functions.

use super::answer;
use std::ffi::CStr;
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

/// Zeroed memory that other processes can map, too.
pub struct SharedMemory {
    file: File,
    start: *mut u8,
    bytes: usize,
}

/// The purpose for which another process's shared memory is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Looking only.
    Read,
    /// Looking and writing.
    Write,
}

impl SharedMemory {
    /// Makes shared memory of `bytes` bytes, which only this user (and root) may open. Nobody can shrink the
    /// memory, so no access through `start` can fail.
    pub fn new(name: &CStr, bytes: usize) -> io::Result<SharedMemory> {
        // SAFETY: `name` is NUL-terminated.
        let fd = answer(unsafe {
            libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
        })?;
        // SAFETY: the call returned a new descriptor that nobody else owns.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        // The kernel makes the file for everybody: 0777.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.set_len(bytes as u64)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: takes no pointers.
        answer(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(SharedMemory { file, start: start.cast(), bytes })
    }

    /// Maps all of another process's shared memory. With `Access::Read` nothing may be written through
    /// `start`. With `Access::Write` the file must be open for writing. Refused if the file could be shrunk,
    /// or isn't memory of this kind at all.
    pub fn open(file: File, access: Access) -> io::Result<SharedMemory> {
        let fd = file.as_raw_fd();
        // SAFETY: takes no pointers.
        let seals = answer(unsafe { libc::fcntl(fd, libc::F_GET_SEALS) })?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let bytes = file.metadata()?.len() as usize;
        let access = match access {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing. Length 0 is refused.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(SharedMemory { file, start: start.cast(), bytes })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first byte: page-aligned, valid for the whole size as long as `self` lives.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the descriptor.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new` or `open`; every reference into it borrows `self`.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

//! Where a thread is: its root directory, its namespaces, and what Landlock leaves it of the file system.
//!
//! Linux keeps these for each thread. An engine thread that stayed outside a chroot would be the way out for
//! an attacker who takes the program over. Therefore the thread that has changed its place lends a descriptor
//! of it, and each engine thread goes there ([`PlaceChanges::join`]). The call pivot_root(2) needs no care,
//! because the kernel moves every thread that was at the old root.
// UNSAFETY: system calls that rustix doesn't have, by number.

use crate::proc::path_of_thread;
use crate::sys::{self, Errno};
use linux_raw_sys::general as raw;
use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

/// Namespaces that another thread can join. CLONE_NEWUSER is missing because a process with engine threads
/// can't change it. CLONE_NEWPID and CLONE_NEWTIME are missing because they affect only children, and engine
/// threads have none.
const JOINED: u32 =
    raw::CLONE_NEWNS | raw::CLONE_NEWUTS | raw::CLONE_NEWIPC | raw::CLONE_NEWNET | raw::CLONE_NEWCGROUP;

/// `NS_GET_NSTYPE`: asks which kind of namespace a descriptor is of.
const KIND_OF_NAMESPACE: u32 = 0xb703;

/// The changes that a call has made to its thread's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceChanges {
    /// `CLONE_NEW*`.
    namespaces: u32,
    root: Root,
    /// Landlock's rules, as a descriptor of the program, and flags.
    rules: Option<(i32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Root {
    AsBefore,
    Changed,
    /// The root directory is open as this descriptor of the program.
    Lent(i32, Identity),
}

/// Device and inode of a directory.
type Identity = (u64, u64);

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

fn open_directory(path: &core::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(errno)
}

impl PlaceChanges {
    /// No change.
    pub const NONE: PlaceChanges = PlaceChanges { namespaces: 0, root: Root::AsBefore, rules: None };

    /// Returns whether nothing has changed.
    pub fn is_none(&self) -> bool {
        *self == PlaceChanges::NONE
    }

    /// Returns whether the root directory has changed.
    pub fn has_root(&self) -> bool {
        self.root != Root::AsBefore
    }

    /// Returns what a successful call of the calling thread has changed.
    pub fn changed_by(call: usize, arguments: &[usize; 6]) -> PlaceChanges {
        let [first, second, ..] = arguments.map(|argument| argument as u32);
        let root_of =
            |namespaces| if namespaces & raw::CLONE_NEWNS == 0 { Root::AsBefore } else { Root::Changed };
        let in_namespaces = |namespaces| PlaceChanges {
            namespaces: namespaces & JOINED,
            root: root_of(namespaces),
            rules: None,
        };
        match call as u32 {
            raw::__NR_chroot => PlaceChanges { root: Root::Changed, ..PlaceChanges::NONE },
            raw::__NR_unshare => in_namespaces(first),
            raw::__NR_setns if second != 0 => in_namespaces(second),
            raw::__NR_setns => in_namespaces(kind_of_namespace(first as i32)),
            raw::__NR_landlock_restrict_self => {
                PlaceChanges { rules: Some((first as i32, second)), ..PlaceChanges::NONE }
            }
            _ => PlaceChanges::NONE,
        }
    }

    /// Opens the calling thread's root directory for the engine threads. Until [`PlaceChanges::take_back`]
    /// the program has one descriptor more.
    #[must_use]
    pub fn lend(self) -> PlaceChanges {
        if self.root != Root::Changed {
            return self;
        }
        // Without a free descriptor the engine threads find the directory in /proc, if they can reach it.
        let lent = open_directory(c"/").and_then(|root| {
            let identity = identity(&root)?;
            Ok(Root::Lent(root.into_raw_fd(), identity))
        });
        PlaceChanges { root: lent.unwrap_or(Root::Changed), ..self }
    }

    /// Closes the descriptor that was lent.
    pub fn take_back(self) {
        if let Root::Lent(fd, _) = self.root {
            // SAFETY: `lend` opened the descriptor, and no other code knows of it.
            unsafe { rustix::io::close(fd) };
        }
    }

    /// Moves the calling thread to the place of the thread `changed` of `process`, its own process. Returns
    /// whether that worked. If `changed` isn't the first thread, only its root directory matters.
    pub fn join(&self, process: u32, changed: u32) -> bool {
        let joined = || match changed == process {
            true => self.try_to_join(process),
            false => self.try_to_join_root(process, changed),
        };
        self.is_none() || joined().is_ok()
    }

    /// Moves the calling thread to the root directory of `changed`, which isn't the first thread of
    /// `process`. Threads that libc has made share their root directory. A thread that shares it with nobody
    /// has changed only its own place, and the calling thread stays where it is.
    fn try_to_join_root(&self, process: u32, changed: u32) -> Result<(), Errno> {
        let root_of = |thread| {
            let mut path = [0; 64];
            open_directory(path_of_thread(&mut path, thread, b"root").ok_or(Errno::EINVAL)?)
        };
        match (root_of(changed), self.root) {
            // A first thread that has ended has no root directory.
            (Ok(root), _) if root_of(process).is_ok_and(|first| identity(&first) != identity(&root)) => {
                Ok(())
            }
            (Ok(root), _) => make_root(&root),
            // The calling thread can't reach /proc, perhaps because it has followed this change already.
            (Err(_), Root::Lent(_, root)) if identity(&open_directory(c"/")?) == Ok(root) => Ok(()),
            (Err(_), Root::Lent(fd, _)) => make_root(&borrow(&handle_of(process)?, fd)?),
            (Err(errno), _) => Err(errno),
        }
    }

    fn try_to_join(&self, process: u32) -> Result<(), Errno> {
        let handle = handle_of(process)?;
        if self.namespaces & raw::CLONE_NEWNS != 0 {
            // A thread can't change its mount namespace while other threads share its root directory. The
            // kernel's threads of an io_uring do, so this thread stops sharing first.
            call(raw::__NR_unshare, [raw::CLONE_FS as usize, 0])?;
        }
        if self.namespaces != 0 {
            call(raw::__NR_setns, [handle.as_raw_fd() as usize, self.namespaces as usize])?;
        }
        match self.root {
            Root::AsBefore => {}
            Root::Lent(fd, _) => make_root(&borrow(&handle, fd)?)?,
            Root::Changed => make_root(&open_directory(c"/proc/self/root")?)?,
        }
        if let Some((rules, flags)) = self.rules {
            let rules = borrow(&handle, rules)?;
            call(raw::__NR_landlock_restrict_self, [rules.as_raw_fd() as usize, flags as usize])?;
        }
        Ok(())
    }
}

fn handle_of(process: u32) -> Result<OwnedFd, Errno> {
    let process = Pid::from_raw(process as i32).ok_or(Errno::ESRCH)?;
    rustix::process::pidfd_open(process, PidfdFlags::empty()).map_err(errno)
}

/// Returns a copy of a descriptor of a process.
fn borrow(process: &OwnedFd, fd: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: the descriptor is only a number for the kernel, which looks it up in the table of the process's
    // first thread.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::process::pidfd_getfd(process, fd.as_raw_fd(), PidfdGetfdFlags::empty()).map_err(errno)
}

fn identity(directory: &OwnedFd) -> Result<Identity, Errno> {
    let stat = rustix::fs::fstat(directory).map_err(errno)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn make_root(directory: &OwnedFd) -> Result<(), Errno> {
    rustix::process::fchdir(directory).map_err(errno)?;
    rustix::process::chroot(c".").map_err(errno)
}

/// Returns which kind of namespace the program's descriptor is of; all kinds, if the kernel doesn't say.
fn kind_of_namespace(fd: i32) -> u32 {
    // SAFETY: the request takes no argument.
    unsafe { sys::ioctl(fd, KIND_OF_NAMESPACE, 0) }.map_or(JOINED, |kind| kind as u32)
}

fn call(number: u32, [first, second]: [usize; 2]) -> Result<usize, Errno> {
    // SAFETY: no call that is made through this function takes a pointer.
    sys::check(unsafe { sys::call(number as usize, [first, second, 0, 0, 0, 0]) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_say_what_they_change() {
        let changed = |call: u32, first: usize, second: usize| {
            PlaceChanges::changed_by(call as usize, &[first, second, 0, 0, 0, 0])
        };
        let uts = raw::CLONE_NEWUTS as usize;
        assert!(changed(raw::__NR_chroot, 0, 0).has_root());
        assert!(changed(raw::__NR_unshare, raw::CLONE_FILES as usize, 0).is_none());
        assert!(changed(raw::__NR_unshare, raw::CLONE_NEWPID as usize, 0).is_none(), "about children only");
        assert!(changed(raw::__NR_unshare, raw::CLONE_NEWNS as usize | uts, 0).has_root());
        assert_eq!(changed(raw::__NR_unshare, uts, 0), changed(raw::__NR_setns, 5, uts));
        let own = rustix::fs::open(c"/proc/self/ns/uts", OFlags::RDONLY, Mode::empty()).unwrap();
        assert_eq!(changed(raw::__NR_setns, own.as_raw_fd() as usize, 0), changed(raw::__NR_unshare, uts, 0));
        assert!(changed(raw::__NR_read, 0, 0).is_none());
    }

    #[test]
    fn rules_of_landlock_bind_the_thread_that_joins() {
        #[repr(C)]
        struct Rules {
            handled: u64,
        }
        const READ_FILE: u64 = 1 << 2;
        let rules = Rules { handled: READ_FILE };
        let arguments = [&raw const rules as usize, size_of::<Rules>(), 0, 0, 0, 0];
        // SAFETY: the kernel reads `rules`, and is told its size.
        let made = sys::check(unsafe { sys::call(raw::__NR_landlock_create_ruleset as usize, arguments) });
        let Ok(rules) = made else {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has Landlock");
            eprintln!("skipped: this kernel has no Landlock");
            return;
        };
        let arguments = [rules, 0, 0, 0, 0, 0];
        let places = PlaceChanges::changed_by(raw::__NR_landlock_restrict_self as usize, &arguments);
        let joined = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            let could = places.join(std::process::id(), std::process::id());
            (could, std::fs::read("/proc/self/comm").is_err())
        });
        assert_eq!(joined.join().unwrap(), (true, true));
        assert!(std::fs::read("/proc/self/comm").is_ok(), "this thread isn't bound");
    }
}

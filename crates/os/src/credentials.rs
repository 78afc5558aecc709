//! What the kernel lets a thread do: its users, groups and capabilities, and the flags that keep it from
//! gaining more.
//!
//! Linux keeps credentials for each thread. Engine threads must never have more credentials than the program,
//! because an attacker who takes the program over has its threads, too. Nor may engine threads have fewer
//! credentials, because another process that has as few could then look into this one.
//!
//! The thread of the program that has changed its credentials reads them ([`Credentials::read`]). Each engine
//! thread takes them on ([`Credentials::take`]). Both make bare system calls, which change the calling thread
//! alone.
// UNSAFETY: system calls that take lists and structures.

use crate::sys::{self, Errno, number};
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl;

/// Supplementary groups that one thread can have.
pub const GROUPS_MAX: usize = 65_536;

/// Bit of the securebits that a program sets to keep its capabilities when it changes its user
/// (`SECBIT_KEEP_CAPS`).
const KEEP_CAPABILITIES: u32 = 1 << 4;
/// Capabilities that a 64-bit set can name.
const CAPABILITIES_MAX: usize = 64;

/// Sets of capabilities, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Capabilities in force.
    pub effective: u64,
    /// Capabilities that may be put in force.
    pub permitted: u64,
    /// Capabilities that a program may hand on to the next program.
    pub inheritable: u64,
}

/// The real, effective and saved id, and the id that file systems check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// Real.
    pub real: u32,
    /// Effective.
    pub effective: u32,
    /// Saved.
    pub saved: u32,
    /// The file system id.
    pub files: u32,
}

/// A thread's credentials, without the list of supplementary groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub user: Ids,
    /// The group.
    pub group: Ids,
    /// Count of supplementary groups.
    pub groups: usize,
    /// The three sets of capset(2).
    pub capabilities: Capabilities,
    /// Capabilities that can ever be gained by running a program.
    pub bounding: u64,
    /// Capabilities that the next program gets without asking.
    pub ambient: u64,
    /// `SECBIT_*`.
    pub securebits: u32,
    /// Whether running a program can't give more privileges than the thread has.
    pub no_new_privileges: bool,
}

fn call(number: u32, arguments: [usize; 5]) -> Result<usize, Errno> {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the arguments point to memory of the callers, who pass what the call needs.
    sys::check(unsafe { sys::call(number as usize, [a, b, c, d, e, 0]) })
}

fn control(option: u32, arguments: [usize; 4]) -> Result<usize, Errno> {
    let [a, b, c, d] = arguments;
    // SAFETY: the options that this file uses take no pointer.
    sys::check(unsafe { sys::call(number::PRCTL, [option as usize, a, b, c, d, 0]) })
}

/// An id that no thread can have. The call with this id changes nothing, and returns the present id.
const NOBODY_ELSE: usize = u32::MAX as usize;

impl Ids {
    fn read(three: u32, of_files: u32) -> Ids {
        let mut ids = Ids::default();
        let places =
            [&raw mut ids.real, &raw mut ids.effective, &raw mut ids.saved].map(|place| place as usize);
        let _ = call(three, [places[0], places[1], places[2], 0, 0]);
        ids.files = call(of_files, [NOBODY_ELSE, 0, 0, 0, 0]).unwrap_or(NOBODY_ELSE) as u32;
        ids
    }

    fn three(&self) -> [u32; 3] {
        [self.real, self.effective, self.saved]
    }

    fn set_three(&self, number: u32) -> Result<(), Errno> {
        let [real, effective, saved] = self.three().map(|id| id as usize);
        call(number, [real, effective, saved, 0, 0]).map(|_| ())
    }
}

#[repr(C)]
struct Header {
    version: u32,
    thread: i32,
}

/// `_LINUX_CAPABILITY_VERSION_3`: two halves of 32 bits.
const VERSION: u32 = 0x2008_0522;

impl Capabilities {
    /// Returns the capabilities of a thread, or of the calling thread if `thread` is 0.
    pub fn of(thread: u32) -> Result<Capabilities, Errno> {
        let header = Header { version: VERSION, thread: thread as i32 };
        let mut halves = [[0_u32; 3]; 2];
        call(raw::__NR_capget, [&raw const header as usize, halves.as_mut_ptr() as usize, 0, 0, 0])?;
        let whole = |at: usize| u64::from(halves[1][at]) << 32 | u64::from(halves[0][at]);
        Ok(Capabilities { effective: whole(0), permitted: whole(1), inheritable: whole(2) })
    }

    fn set(&self) -> Result<(), Errno> {
        let header = Header { version: VERSION, thread: 0 };
        let words = [self.effective, self.permitted, self.inheritable];
        let halves = [words.map(|word| word as u32), words.map(|word| (word >> 32) as u32)];
        call(raw::__NR_capset, [&raw const header as usize, halves.as_ptr() as usize, 0, 0, 0]).map(|_| ())
    }

    /// Puts every permitted capability in force.
    fn raise() {
        if let Ok(own) = Capabilities::of(0) {
            let _ = Capabilities { effective: own.permitted, ..own }.set();
        }
    }
}

/// Returns the capabilities for which `option` answers 1.
fn each_capability(option: u32, what: Option<u32>) -> u64 {
    let is_set = |at: &usize| {
        let arguments = what.map_or([*at, 0, 0, 0], |what| [what as usize, *at, 0, 0]);
        control(option, arguments) == Ok(1)
    };
    (0..CAPABILITIES_MAX).take_while(|at| *at <= highest_capability()).filter(is_set).map(|at| 1 << at).sum()
}

/// Returns the highest capability that this kernel has.
fn highest_capability() -> usize {
    use core::sync::atomic::{AtomicUsize, Ordering};
    static HIGHEST: AtomicUsize = AtomicUsize::new(0);
    let known = HIGHEST.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let exists = |at: &usize| control(prctl::PR_CAPBSET_READ, [*at, 0, 0, 0]).is_ok();
    let highest = (0..CAPABILITIES_MAX).take_while(exists).last().unwrap_or(CAPABILITIES_MAX - 1);
    HIGHEST.store(highest, Ordering::Relaxed);
    highest
}

/// Fills `list` with the calling thread's supplementary groups, and returns their count.
pub fn read_groups(list: &mut [u32]) -> Result<usize, Errno> {
    call(raw::__NR_getgroups, [list.len(), list.as_mut_ptr() as usize, 0, 0, 0])
}

impl Credentials {
    /// Returns the calling thread's credentials.
    pub fn read() -> Credentials {
        Credentials {
            user: Ids::read(raw::__NR_getresuid, raw::__NR_setfsuid),
            group: Ids::read(raw::__NR_getresgid, raw::__NR_setfsgid),
            groups: call(raw::__NR_getgroups, [0; 5]).unwrap_or(0),
            capabilities: Capabilities::of(0).unwrap_or_default(),
            bounding: each_capability(prctl::PR_CAPBSET_READ, None),
            ambient: each_capability(prctl::PR_CAP_AMBIENT, Some(prctl::PR_CAP_AMBIENT_IS_SET)),
            securebits: control(prctl::PR_GET_SECUREBITS, [0; 4]).unwrap_or(0) as u32,
            no_new_privileges: control(prctl::PR_GET_NO_NEW_PRIVS, [0; 4]) == Ok(1),
        }
    }

    /// The credentials of root without any capability or supplementary group.
    pub const NONE: Credentials = {
        let ids = Ids { real: 0, effective: 0, saved: 0, files: 0 };
        Credentials {
            user: ids,
            group: ids,
            groups: 0,
            capabilities: Capabilities { effective: 0, permitted: 0, inheritable: 0 },
            bounding: 0,
            ambient: 0,
            securebits: 0,
            no_new_privileges: false,
        }
    };

    /// Gives the calling thread these credentials, and the supplementary groups in `list` if there is one.
    /// Returns whether the thread has them afterwards. The thread must be able to get them, as a thread can
    /// that had the same credentials as their owner before the owner's change.
    pub fn take(&self, list: Option<&[u32]>) -> bool {
        let before = Credentials::read();
        let has_groups = before == *self && list.is_none() || self.take_from(&before, list);
        has_groups && Credentials::read() == *self
    }

    /// Returns whether the supplementary groups could be set. Any other failure shows when the result is
    /// compared.
    fn take_from(&self, before: &Credentials, list: Option<&[u32]>) -> bool {
        Capabilities::raise();
        if self.no_new_privileges {
            let _ = control(prctl::PR_SET_NO_NEW_PRIVS, [1, 0, 0, 0]);
        }
        for at in bits(before.bounding & !self.bounding) {
            let _ = control(prctl::PR_CAPBSET_DROP, [at, 0, 0, 0]);
        }
        // A change of user takes the capabilities away, which the steps below still need.
        let _ = control(prctl::PR_SET_KEEPCAPS, [1, 0, 0, 0]);
        let has_groups = list.is_none_or(|list| {
            call(raw::__NR_setgroups, [list.len(), list.as_ptr() as usize, 0, 0, 0]).is_ok()
        });
        if before.group.three() != self.group.three() {
            let _ = self.group.set_three(raw::__NR_setresgid);
        }
        if before.user.three() != self.user.three() {
            let _ = self.user.set_three(raw::__NR_setresuid);
        }
        Capabilities::raise();
        let _ = call(raw::__NR_setfsgid, [self.group.files as usize, 0, 0, 0, 0]);
        let _ = call(raw::__NR_setfsuid, [self.user.files as usize, 0, 0, 0, 0]);
        Capabilities::raise();
        self.take_capabilities();
        has_groups
    }

    /// Sets capabilities and securebits. Before, users and groups must be as wanted, and everything permitted
    /// must be in force.
    fn take_capabilities(&self) {
        let own = Capabilities::of(0).unwrap_or_default();
        // An ambient capability must be inheritable, and no securebit may forbid it yet.
        let _ = Capabilities { inheritable: self.capabilities.inheritable, ..own }.set();
        let ambient = each_capability(prctl::PR_CAP_AMBIENT, Some(prctl::PR_CAP_AMBIENT_IS_SET));
        let change = |how: u32, which: u64| {
            for at in bits(which) {
                let _ = control(prctl::PR_CAP_AMBIENT, [how as usize, at, 0, 0]);
            }
        };
        change(prctl::PR_CAP_AMBIENT_RAISE, self.ambient & !ambient);
        change(prctl::PR_CAP_AMBIENT_LOWER, ambient & !self.ambient);
        let keeps = self.securebits & KEEP_CAPABILITIES != 0;
        let _ = control(prctl::PR_SET_KEEPCAPS, [usize::from(keeps), 0, 0, 0]);
        if control(prctl::PR_GET_SECUREBITS, [0; 4]) != Ok(self.securebits as usize) {
            let _ = control(prctl::PR_SET_SECUREBITS, [self.securebits as usize, 0, 0, 0]);
        }
        let _ = self.capabilities.set();
    }
}

fn bits(set: u64) -> impl Iterator<Item = usize> {
    (0..CAPABILITIES_MAX).filter(move |at| set & 1 << at != 0)
}

/// Returns whether processes of the same user may look into this process (`PR_GET_DUMPABLE`): 0, 1, or 2 for
/// root alone.
pub fn dumpable() -> usize {
    control(prctl::PR_GET_DUMPABLE, [0; 4]).unwrap_or(0)
}

/// Lets processes of the same user look into this process again. A change of credentials takes that
/// permission from the whole process.
pub fn make_dumpable() {
    let _ = control(prctl::PR_SET_DUMPABLE, [1, 0, 0, 0]);
}

/// Parses a thread's `/proc/PID/status`: its credentials without the securebits, and its groups into `list`.
/// None if the text is cut off, or the list is too short.
pub fn parse_status(text: &[u8], list: &mut [u32]) -> Option<Credentials> {
    let mut found = Credentials::default();
    let mut lines = 0;
    for line in text.split(|byte| *byte == b'\n') {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        let hexadecimal = || u64::from_str_radix(core::str::from_utf8(value).ok()?, 16).ok();
        lines += 1;
        match name {
            b"Uid" => found.user = parse_ids(value)?,
            b"Gid" => found.group = parse_ids(value)?,
            b"Groups" => found.groups = parse_list(value, list)?,
            b"CapInh" => found.capabilities.inheritable = hexadecimal()?,
            b"CapPrm" => found.capabilities.permitted = hexadecimal()?,
            b"CapEff" => found.capabilities.effective = hexadecimal()?,
            b"CapBnd" => found.bounding = hexadecimal()?,
            b"CapAmb" => found.ambient = hexadecimal()?,
            b"NoNewPrivs" => found.no_new_privileges = value == b"1",
            _ => lines -= 1,
        }
    }
    (lines == 9).then_some(found)
}

/// Parses four numbers: the real, effective, saved and file system id.
fn parse_ids(value: &[u8]) -> Option<Ids> {
    let mut four = [0; 4];
    let count = parse_list(value, &mut four)?;
    let [real, effective, saved, files] = four;
    (count == 4).then_some(Ids { real, effective, saved, files })
}

fn parse_list(value: &[u8], list: &mut [u32]) -> Option<usize> {
    let mut count = 0;
    for number in value.split(u8::is_ascii_whitespace).filter(|number| !number.is_empty()) {
        *list.get_mut(count)? = core::str::from_utf8(number).ok()?.parse().ok()?;
        count += 1;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_status_says_what_the_calls_say() {
        let status = std::fs::read("/proc/thread-self/status").unwrap();
        let mut list = [0; 1024];
        let parsed = parse_status(&status, &mut list).unwrap();
        let read = Credentials::read();
        assert_eq!(Credentials { securebits: read.securebits, ..parsed }, read);
        let mut own = [0; 1024];
        assert_eq!(read_groups(&mut own), Ok(parsed.groups));
        assert_eq!(own, list);
    }

    #[test]
    fn status_that_is_cut_off_says_nothing() {
        let status = std::fs::read("/proc/thread-self/status").unwrap();
        let end = status.windows(7).position(|bytes| bytes == b"CapAmb:").unwrap();
        assert_eq!(parse_status(&status[..end], &mut [0; 1024]), None);
        let with_groups = String::from_utf8(status).unwrap().replace("Groups:", "Groups:\t1 2 3 4 ");
        assert_eq!(parse_status(with_groups.as_bytes(), &mut [0; 3]), None, "a list that is too short");
    }

    /// Changes the calling thread as `change` does, and makes another thread take on the result.
    fn taken(change: impl FnOnce() + Send + 'static) -> (Credentials, Credentials, bool) {
        let before = Credentials::read();
        let wanted = std::thread::spawn(move || {
            change();
            let mut list = [0; 64];
            let count = read_groups(&mut list).unwrap();
            (Credentials::read(), list[..count].to_vec())
        });
        let (wanted, list) = wanted.join().unwrap();
        let taken = std::thread::spawn(move || {
            assert_eq!(Credentials::read(), before, "this thread hasn't changed");
            let could = wanted.take(Some(&list));
            let mut own = [0; 64];
            let count = read_groups(&mut own).unwrap();
            (Credentials::read(), could && own[..count] == list[..])
        });
        let (taken, could) = taken.join().unwrap();
        (wanted, taken, could)
    }

    fn capabilities(effective: u64, permitted: u64, inheritable: u64) {
        Capabilities { effective, permitted, inheritable }.set().unwrap();
    }

    /// Every way in which daemons drop what root has. Skipped by an ordinary user, who has nothing to drop.
    #[test]
    fn another_thread_takes_on_what_one_has_become() {
        if Credentials::read().user.effective != 0 || Capabilities::of(0).unwrap().permitted == 0 {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI runs these tests as root");
            eprintln!("skipped: changing credentials needs root");
            return;
        }
        const BIND: u64 = 1 << 10;
        const KILL: u64 = 1 << 5;
        let ways: [(&str, fn()); 8] = [
            ("to an ordinary user, with groups", || {
                call(raw::__NR_setgroups, [3, [7_u32, 8, 9].as_ptr() as usize, 0, 0, 0]).unwrap();
                call(raw::__NR_setresgid, [65534; 5]).unwrap();
                call(raw::__NR_setresuid, [65534; 5]).unwrap();
            }),
            ("for a while", || {
                call(raw::__NR_setresuid, [NOBODY_ELSE, 65534, NOBODY_ELSE, 0, 0]).unwrap();
            }),
            ("for files only", || {
                call(raw::__NR_setfsuid, [65534, 0, 0, 0, 0]).unwrap();
            }),
            ("keeping one capability", || {
                control(prctl::PR_SET_KEEPCAPS, [1, 0, 0, 0]).unwrap();
                call(raw::__NR_setresuid, [65534; 5]).unwrap();
                capabilities(BIND, BIND, 0);
            }),
            ("one capability that the next program has, too", || {
                control(prctl::PR_SET_KEEPCAPS, [1, 0, 0, 0]).unwrap();
                call(raw::__NR_setresuid, [65534; 5]).unwrap();
                capabilities(BIND, BIND, BIND);
                control(prctl::PR_CAP_AMBIENT, [prctl::PR_CAP_AMBIENT_RAISE as usize, 10, 0, 0]).unwrap();
            }),
            ("root without capabilities, and no way back", || {
                control(prctl::PR_SET_SECUREBITS, [0b1111, 0, 0, 0]).unwrap();
                control(prctl::PR_CAPBSET_DROP, [5, 0, 0, 0]).unwrap();
                capabilities(0, KILL | BIND, 0);
            }),
            ("nothing in force, all permitted", || {
                capabilities(0, Capabilities::of(0).unwrap().permitted, 0);
            }),
            ("nothing more by running a program", || {
                control(prctl::PR_SET_NO_NEW_PRIVS, [1, 0, 0, 0]).unwrap();
            }),
        ];
        for (way, change) in ways {
            let (wanted, taken, could) = taken(change);
            assert_eq!(taken, wanted, "{way}");
            assert!(could, "{way}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_told() {
        let (_, _, could) = taken(|| {});
        assert!(could);
        let impossible = Credentials { securebits: 1 << 30, ..Credentials::read() };
        assert!(!std::thread::spawn(move || impossible.take(None)).join().unwrap());
    }
}

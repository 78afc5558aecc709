//! The kernel's offers to this user, userfaultfd with its features and io_uring, and the choices that follow.
//!
//! Each offer is probed by using it, since seccomp, capabilities, settings and build options all have a say.

use crate::host::sys::{self, Faults};
use crate::text::failure::{FIX_DESCRIPTORS, Failure};
use farpage_core::config::{Install, IoEngine};
use farpage_os::sys::Errno;
use farpage_runtime::session::UffdSource;
use std::fmt;
use std::io;

/// The oldest kernel that has everything that Farpage needs: close_range came with 5.9, write-protection by
/// userfaultfd with 5.7.
pub const VERSION_MIN: (u32, u32) = (5, 9);
/// Write-protected pages are reported.
pub const FEATURE_WRITE_PROTECT: u64 = 1 << 0;
/// The exact address of a fault is reported.
pub const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
/// Pages can be marked as lost.
pub const FEATURE_POISON: u64 = 1 << 14;
/// Pages can be moved.
pub const FEATURE_MOVE: u64 = 1 << 16;

/// The way in which faults arrive, as the user asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultsAsked {
    /// The best way that works here, and in which memory is never wrong.
    Best,
    /// Faults as messages.
    Thread,
    /// Faults as signals.
    Signal,
    /// Faults as forbidden accesses.
    Segv,
}

/// Faults can be reported as SIGBUS.
const FEATURE_SIGBUS: u64 = 1 << 7;

/// A userfaultfd, and how it reports faults.
#[derive(Clone, Copy, Debug)]
pub struct Userfaultfd {
    /// Where the userfaultfd came from.
    pub source: UffdSource,
    /// Features of the userfaultfd.
    pub features: u64,
}

/// Why there is no userfaultfd.
#[derive(Debug)]
pub struct Refused {
    /// Error of the system call.
    pub syscall: io::Error,
    /// Error of the device.
    pub device: io::Error,
    /// Error of the system call when asked for the program's own faults only, which needs no privilege.
    pub user_only: Option<io::Error>,
}

/// Gets a userfaultfd by the system call, or by the device if the call fails.
pub fn userfaultfd() -> Result<Userfaultfd, Refused> {
    let syscall = match sys::userfaultfd_by_syscall(Faults::All) {
        Ok(features) => return Ok(Userfaultfd { source: UffdSource::Syscall, features }),
        Err(error) => error,
    };
    match sys::userfaultfd_by_device() {
        Ok(features) => Ok(Userfaultfd { source: UffdSource::Device, features }),
        Err(device) => {
            let user_only = sys::userfaultfd_by_syscall(Faults::UserOnly).err();
            Err(Refused { syscall, device, user_only })
        }
    }
}

/// Gets a userfaultfd for the program's own faults, and checks that the program's system calls can be
/// guarded. Needs no privilege.
pub fn user_mode() -> Result<Userfaultfd, Failure> {
    let refused = |error: io::Error| user_mode_refused(&error, &Release::this());
    let features = sys::userfaultfd_by_syscall(Faults::UserOnly).map_err(refused)?;
    if features & FEATURE_SIGBUS == 0 {
        return Err(refused(io::Error::from_raw_os_error(libc::EINVAL)));
    }
    can_guard()?;
    Ok(Userfaultfd { source: UffdSource::UserMode, features })
}

/// Checks what doing without a userfaultfd takes. Needs no privilege, and nothing that containers refuse.
pub fn without() -> Result<Userfaultfd, Failure> {
    sys::writes_what_may_not_be_touched().or_else(filled_aside)?;
    can_guard()?;
    Ok(Userfaultfd { source: UffdSource::Nothing, features: 0 })
}

/// Checks for the second way to fill memory that may not be touched, if writing there is refused: pages are
/// filled elsewhere and moved. The second way needs a kernel that keeps pinned pages.
fn filled_aside(refused: io::Error) -> Result<(), Failure> {
    match farpage_runtime::keeps_pinned_pages_in_segv() {
        Ok(true) if refused.raw_os_error() == Some(libc::EIO) => Ok(()),
        _ => Err(Failure::new(format!(
            "memory that may not be touched can't be filled here: /proc/self/mem: {refused}"
        ))
        .because("there is no /proc, or the kernel forbids it (proc_mem.force_override isn't `always`) and is older than 5.19")
        .fix("mount /proc, boot with proc_mem.force_override=always, or allow userfaultfd (`farpage doctor`)")),
    }
}

/// Checks that the program's system calls can be intercepted.
fn can_guard() -> Result<(), Failure> {
    sys::syscall_user_dispatch().map_err(|error| guard_refused(&error, &Release::this()))
}

/// The kernel's release, as `uname -r` prints it.
pub struct Release(String);

impl Release {
    /// The release of this machine.
    pub fn this() -> Release {
        Release(sys::kernel_release())
    }

    /// Another release than this machine's.
    #[cfg(test)]
    pub fn of(text: &str) -> Release {
        Release(text.into())
    }

    /// Returns the first two numbers, if the release begins with numbers.
    pub fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.0.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// Whether the release is surely older than `version`.
    fn is_before(&self, version: (u32, u32)) -> bool {
        self.version().is_some_and(|own| own < version)
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// First version with UFFD_USER_MODE_ONLY and Syscall User Dispatch.
const VERSION_OF_SIGNALS: (u32, u32) = (5, 11);
/// First version with /dev/userfaultfd.
const VERSION_OF_DEVICE: (u32, u32) = (6, 1);
const SECCOMP_FIX: &str =
    "docker run --security-opt seccomp=unconfined, or a profile that allows userfaultfd";

/// Explains why there is no userfaultfd for the program's own faults. An older kernel checks the privilege
/// before it looks at the flag that it doesn't know, so there EPERM is an answer, too.
fn user_mode_refused(error: &io::Error, release: &Release) -> Failure {
    let failure = Failure::new(format!("faults can't arrive as signals here: userfaultfd: {error}"));
    let errno = error.raw_os_error().unwrap_or(0);
    if let Some(failure) = lack(errno, &failure) {
        return failure;
    }
    if errno != libc::ENOSYS && release.is_before(VERSION_OF_SIGNALS) {
        return failure
            .because(format!("an unprivileged userfaultfd came with Linux 5.11 (this is {})", release.0))
            .fix("use a kernel of 5.11 or later")
            .fix("--faults thread, with one of the ways that `farpage doctor --faults thread` shows");
    }
    match errno {
        libc::ENOSYS => missing(failure),
        libc::EPERM | libc::EACCES => failure
            .because("even its unprivileged form is forbidden: by a container's seccomp profile, or another sandbox")
            .fix(SECCOMP_FIX),
        _ => failure
            .because(format!("this kernel ({}) doesn't know what it is asked for, or a sandbox answers", release.0))
            .fix("use a kernel of 5.11 or later, outside of sandboxes"),
    }
}

/// Explains errors that are about neither kernel nor sandbox.
fn lack(errno: i32, failure: &Failure) -> Option<Failure> {
    let (cause, fix) = match errno {
        libc::EMFILE | libc::ENFILE => ("no file descriptor is free", FIX_DESCRIPTORS),
        libc::ENOMEM => {
            ("the kernel has no memory for it", "free some memory, or look at the cgroup's limit")
        }
        _ => return None,
    };
    Some(failure.clone().because(cause).fix(fix))
}

fn missing(failure: Failure) -> Failure {
    failure
        .because("the kernel was built without CONFIG_USERFAULTFD, or a container's seccomp profile hides it")
        .fix(SECCOMP_FIX)
        .fix("else use a kernel with CONFIG_USERFAULTFD=y (those of all large distributions have it)")
}

/// Explains why system calls can't be intercepted.
fn guard_refused(error: &io::Error, release: &Release) -> Failure {
    let failure = Failure::new(format!("the program's system calls can't be guarded here: {error}"));
    let failure = if release.is_before(VERSION_OF_SIGNALS) {
        failure
            .because(format!("Syscall User Dispatch came with Linux 5.11 (this is {})", release.0))
            .fix("use a kernel of 5.11 or later")
    } else {
        failure.because("a sandbox hides Syscall User Dispatch (gVisor has none)").fix("run outside of it")
    };
    failure.fix("--faults thread, with one of the ways that `farpage doctor --faults thread` shows")
}

/// Gets the userfaultfd that `farpage run` uses.
pub fn faults(asked: FaultsAsked) -> Result<Userfaultfd, Failure> {
    match asked {
        FaultsAsked::Signal => user_mode(),
        FaultsAsked::Thread => userfaultfd().map_err(|refused| refused.failure()),
        FaultsAsked::Segv => without(),
        FaultsAsked::Best => best_of(user_mode(), without, keeps_pinned),
    }
}

/// Tries it with pages of this process.
fn keeps_pinned(source: UffdSource) -> Result<bool, Errno> {
    match source {
        UffdSource::Nothing => farpage_runtime::keeps_pinned_pages_in_segv(),
        _ => farpage_runtime::keeps_pinned_pages(),
    }
}

/// Takes `signal`, or else `segv`. With `thread` memory can be wrong: Farpage doesn't see there what a
/// program unmaps by system calls of its own. So `thread` must be asked for. `keeps_pinned` says whether a
/// mode keeps what a device or another process writes to a page that is being copied out.
fn best_of(
    signal: Result<Userfaultfd, Failure>,
    segv: impl FnOnce() -> Result<Userfaultfd, Failure>,
    keeps_pinned: impl FnOnce(UffdSource) -> Result<bool, Errno>,
) -> Result<Userfaultfd, Failure> {
    let (best, name, refused) = match signal {
        Ok(signal) if signal.features & FEATURE_MOVE != 0 => return Ok(signal),
        Ok(signal) => (signal, "signal", None),
        Err(refused) => match segv() {
            Ok(segv) => (segv, "segv", Some(refused)),
            Err(_) => return Err(refused),
        },
    };
    let why = match keeps_pinned(best.source) {
        Ok(true) => return Ok(best),
        Ok(false) => "this kernel can lose what a device or another process writes there".to_owned(),
        Err(Errno(errno)) => format!(
            "whether the kernel keeps what a device or another process writes there can't be tried: {}",
            io::Error::from_raw_os_error(errno)
        ),
    };
    let failure = Failure::new(format!("faults by {name} could make the program's memory wrong here"))
        .because(format!("{why} (kernel {})", sys::kernel_release()))
        .fix("use a kernel of 5.19 or later");
    let by_signal = refused.iter().flat_map(Failure::fixes);
    let failure = by_signal.fold(failure, |failure, fix| failure.fix(fix));
    Err(failure.fix(format!(
        "--faults {name}, if only the program itself writes to its memory: no debugger, no process_vm_writev, no buffers registered with io_uring or a device"
    )))
}

/// Ways to get a userfaultfd for the kernel's faults, too, most convenient first.
pub const WAYS: [&str; 3] = [
    "run as root, or with the capability CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE --security-opt seccomp=unconfined; systemd: AmbientCapabilities=)",
    "allow it to everyone: sudo sysctl vm.unprivileged_userfaultfd=1",
    "allow it to this user by /dev/userfaultfd (Linux 6.1): sudo chgrp GROUP /dev/userfaultfd && sudo chmod 660 /dev/userfaultfd (udev rule: KERNEL==\"userfaultfd\", GROUP=\"GROUP\", MODE=\"0660\"; docker run --device /dev/userfaultfd)",
];

impl Refused {
    /// Whether the kernel has no userfaultfd, instead of refusing it to us.
    fn is_missing(&self) -> bool {
        self.syscall.raw_os_error() == Some(libc::ENOSYS)
    }

    /// Returns the error for the user.
    pub fn failure(&self) -> Failure {
        self.failure_on(&Release::this())
    }

    fn failure_on(&self, release: &Release) -> Failure {
        if self.is_missing() {
            return missing(Failure::new("this kernel has no userfaultfd"));
        }
        let device = match release.is_before(VERSION_OF_DEVICE) {
            true => "it came with Linux 6.1".to_owned(),
            false => self.device.to_string(),
        };
        let failure = Failure::new("Farpage may not serve page faults here")
            .because(format!("userfaultfd: {}; /dev/userfaultfd: {device}", self.syscall));
        if let Some(failure) = lack(self.syscall.raw_os_error().unwrap_or(0), &failure) {
            return failure;
        }
        // An older kernel refuses the unprivileged form because it doesn't know it, so the refusal says
        // nothing of sandboxes.
        if self.user_only.is_some() && !release.is_before(VERSION_OF_SIGNALS) {
            let failure = failure
                .because(
                    "even its unprivileged form is refused: most likely by a container's seccomp profile",
                )
                .fix("docker run --security-opt seccomp=unconfined, as root or with --cap-add=SYS_PTRACE");
            return ways(release).iter().skip(2).fold(failure, |failure, way| failure.fix(*way));
        }
        ways(release).iter().fold(failure, |failure, way| failure.fix(*way))
    }
}

/// Returns the ways of [`WAYS`] that this kernel has.
pub fn ways(release: &Release) -> &'static [&'static str] {
    const ALL: &[&str] = &WAYS;
    if release.is_before(VERSION_OF_DEVICE) { &ALL[..2] } else { ALL }
}

/// Returns how pages will move, and what the user should know about it.
pub fn choose_install(
    asked: Option<Install>,
    Userfaultfd { source, features }: Userfaultfd,
) -> Result<(Install, Option<String>), Failure> {
    if source == UffdSource::Nothing {
        return match asked {
            Some(Install::Move | Install::Mixed) => Err(Failure::new("moving pages takes a userfaultfd")
                .because("it isn't used (--faults segv), or may not be had here")
                .fix("--install copy, or leave the option out")),
            Some(Install::Copy) => Ok((Install::Copy, None)),
            None => Ok((Install::Copy, Some("without a userfaultfd faults take longer".into()))),
        };
    }
    if features & FEATURE_WRITE_PROTECT == 0 {
        return Err(Failure::new("this kernel's userfaultfd can't write-protect pages")
            .because(format!(
                "the kernel is {}; Farpage needs {}.{} or later",
                sys::kernel_release(),
                VERSION_MIN.0,
                VERSION_MIN.1
            ))
            .fix("use a newer kernel"));
    }
    let can_move = features & FEATURE_MOVE != 0;
    match asked {
        Some(Install::Move | Install::Mixed) if !can_move => {
            Err(Failure::new("moving pages is not possible here")
                .because(format!("the kernel is {}; UFFDIO_MOVE came with 6.8", sys::kernel_release()))
                .fix("--install copy, or leave the option out"))
        }
        Some(install) => Ok((install, None)),
        None if can_move => Ok((Install::Mixed, None)),
        None => Ok((
            Install::Copy,
            Some(format!(
                "pages are copied, which is slower: kernel {} has no UFFDIO_MOVE (6.8)",
                sys::kernel_release()
            )),
        )),
    }
}

/// Returns how areas will be written, given the result of io_uring_setup.
pub fn choose_io(asked: Option<IoEngine>, io_uring: &io::Result<()>) -> Result<IoEngine, Failure> {
    match (asked, io_uring) {
        (Some(IoEngine::Psync), _) => Ok(IoEngine::Psync),
        (_, Ok(())) => Ok(IoEngine::Uring),
        (None, Err(_)) => Ok(IoEngine::Psync),
        (Some(IoEngine::Uring), Err(error)) => {
            let failure = Failure::new(format!("`--io uring` is not possible here: {error}"));
            let failure = if error.raw_os_error() == Some(libc::ENOSYS) {
                failure.because("the kernel has no io_uring, or a container's seccomp profile hides it")
            } else {
                failure.because(
                    "the setting kernel.io_uring_disabled or a container's seccomp profile forbids it",
                )
            };
            Err(failure
                .fix("--io psync, or leave the option out")
                .fix("sudo sysctl kernel.io_uring_disabled=0; docker run --security-opt seccomp=unconfined"))
        }
    }
}

/// Returns whether a thread may poll for a page of an area instead of sleeping, given the number of CPUs and
/// the result of io_setup.
pub fn choose_wait(asked: Option<bool>, cpus: usize, aio: &io::Result<()>) -> Result<bool, Failure> {
    match (asked, aio) {
        (Some(true), Err(error)) => {
            Err(Failure::new(format!("`--wait poll` is not possible here: there is no AIO: {error}"))
                .because("the kernel was built without it, or a container's seccomp profile hides it")
                .fix("--wait sleep, or leave the option out"))
        }
        (Some(asked), _) => Ok(asked),
        (None, aio) => Ok(aio.is_ok() && cpus >= 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = FEATURE_MOVE | FEATURE_WRITE_PROTECT;

    fn errno(number: i32) -> io::Error {
        io::Error::from_raw_os_error(number)
    }

    const fn with(features: u64) -> Userfaultfd {
        Userfaultfd { source: UffdSource::Syscall, features }
    }

    /// No mode in which memory can be wrong is taken unless it is asked for.
    #[test]
    fn best_mode_is_one_in_which_memory_is_never_wrong() {
        let [signal, segv] = [UffdSource::UserMode, UffdSource::Nothing]
            .map(|source| move |features| Ok::<_, Failure>(Userfaultfd { source, features }));
        let refused = |release: &str| Err(user_mode_refused(&errno(libc::EPERM), &Release::of(release)));
        let best = |by_signal, by_segv, keeps| best_of(by_signal, || by_segv, |_| keeps);
        let source = |best: Result<Userfaultfd, Failure>| best.ok().map(|best| best.source);
        let old = || signal(FEATURE_WRITE_PROTECT);
        assert_eq!(source(best(signal(ALL), segv(0), Ok(false))), Some(UffdSource::UserMode));
        assert_eq!(source(best(old(), segv(0), Ok(true))), Some(UffdSource::UserMode));
        assert_eq!(source(best(refused("5.15.0"), segv(0), Ok(true))), Some(UffdSource::Nothing));
        for (by_signal, by_segv, keeps, words) in [
            (old(), segv(0), Ok(false), ["kernel can lose", "--faults signal, if only"]),
            (old(), segv(0), Err(Errno(libc::EMFILE)), ["can't be tried", "--faults signal, if only"]),
            (refused("5.15.0"), segv(0), Ok(false), ["kernel can lose", "--faults segv, if only"]),
            (refused("5.15.0"), segv(0), Ok(false), ["5.19 or later", SECCOMP_FIX]),
            (refused("5.10.0"), refused("5.10.0"), Ok(true), ["came with Linux 5.11", "--faults thread"]),
        ] {
            let message = best(by_signal, by_segv, keeps).unwrap_err().to_string();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }

    #[test]
    fn without_a_userfaultfd_pages_are_copied() {
        let without = Userfaultfd { source: UffdSource::Nothing, features: 0 };
        assert_eq!(choose_install(None, without).unwrap().0, Install::Copy);
        assert!(choose_install(Some(Install::Mixed), without).is_err());
    }

    #[test]
    fn install_falls_back_unless_it_was_asked_for() {
        assert_eq!(choose_install(None, with(ALL)).unwrap(), (Install::Mixed, None));
        assert_eq!(choose_install(Some(Install::Copy), with(ALL)).unwrap(), (Install::Copy, None));
        let (install, note) = choose_install(None, with(FEATURE_WRITE_PROTECT)).unwrap();
        assert!(install == Install::Copy && note.is_some());
        assert!(choose_install(Some(Install::Move), with(FEATURE_WRITE_PROTECT)).is_err());
        let message = choose_install(Some(Install::Copy), with(FEATURE_MOVE)).unwrap_err().to_string();
        assert!(message.contains("Farpage needs 5.9 or later"), "{message}");
    }

    #[test]
    fn io_falls_back_unless_it_was_asked_for() {
        let refused = Err(errno(libc::EPERM));
        assert_eq!(choose_io(None, &Ok(())).unwrap(), IoEngine::Uring);
        assert_eq!(choose_io(None, &refused).unwrap(), IoEngine::Psync);
        assert_eq!(choose_io(Some(IoEngine::Psync), &refused).unwrap(), IoEngine::Psync);
        let message = choose_io(Some(IoEngine::Uring), &refused).unwrap_err().to_string();
        assert!(message.contains("io_uring_disabled") && message.contains("seccomp"), "{message}");
    }

    #[test]
    fn threads_look_for_pages_where_there_are_two_cpus_unless_it_was_asked_for() {
        let refused = Err(errno(libc::ENOSYS));
        let choices = [(None, 2, true), (None, 1, false), (Some(true), 1, true), (Some(false), 8, false)];
        for (asked, cpus, polls) in choices {
            assert_eq!(choose_wait(asked, cpus, &Ok(())).unwrap(), polls, "{asked:?} with {cpus}");
        }
        assert!(!choose_wait(None, 8, &refused).unwrap() && !choose_wait(Some(false), 8, &refused).unwrap());
        let message = choose_wait(Some(true), 8, &refused).unwrap_err().to_string();
        assert!(message.contains("AIO") && message.contains("--wait sleep"), "{message}");
    }

    #[test]
    fn refusal_names_the_three_ways_and_a_missing_feature_is_said_differently() {
        let release = Release::of("6.8.0");
        let refused = Refused { syscall: errno(libc::EPERM), device: errno(libc::EACCES), user_only: None };
        let message = refused.failure_on(&release).to_string();
        for word in ["CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "chmod 660 /dev/userfaultfd"] {
            assert!(message.contains(word), "{message}");
        }
        let missing = Refused { syscall: errno(libc::ENOSYS), device: errno(libc::ENOENT), user_only: None };
        assert!(missing.failure_on(&release).to_string().contains("CONFIG_USERFAULTFD"));
        let seccomp = Refused { user_only: Some(errno(libc::EPERM)), ..refused };
        let message = seccomp.failure_on(&release).to_string();
        assert!(
            message.contains("seccomp=unconfined") && message.contains("/dev/userfaultfd &&"),
            "{message}"
        );
    }

    /// Linux 5.10 must not be told that a container's seccomp profile hides what the kernel doesn't have.
    #[test]
    fn signals_are_refused_for_the_reason_that_errno_and_version_have() {
        for (number, release, words, not) in [
            (libc::EINVAL, "5.10.0-28-amd64", "came with Linux 5.11 (this is 5.10.0-28-amd64)", "seccomp"),
            (libc::EPERM, "5.9.1", "came with Linux 5.11 (this is 5.9.1)", "seccomp"),
            (libc::EPERM, "5.11.0", "forbidden: by a container's seccomp profile", "came with"),
            (libc::EPERM, "6.18.2", "forbidden: by a container's seccomp profile", "came with"),
            (libc::ENOSYS, "5.10.0", "CONFIG_USERFAULTFD", "came with"),
            (libc::ENOSYS, "6.8.0", "CONFIG_USERFAULTFD", "came with"),
            (libc::EINVAL, "6.8.0", "doesn't know what it is asked for", "seccomp"),
            (libc::EMFILE, "5.10.0", "ulimit -n", "came with"),
            (libc::ENOMEM, "6.8.0", "no memory", "seccomp"),
            (libc::EPERM, "odd", "seccomp", "came with"),
        ] {
            let failure = user_mode_refused(&errno(number), &Release::of(release));
            let message = failure.to_string();
            assert!(message.contains(words), "{number} on {release}: {message}");
            assert!(!message.contains(not), "{number} on {release}: {message}");
            assert!(!failure.fixes().is_empty(), "{message}");
        }
    }

    #[test]
    fn guarding_is_refused_for_the_reason_that_the_version_has() {
        for (release, words, not) in [
            ("5.10.0", "came with Linux 5.11 (this is 5.10.0)", "sandbox"),
            ("6.8.0", "a sandbox hides", "came with"),
            ("odd", "a sandbox hides", "came with"),
        ] {
            let message = guard_refused(&errno(libc::EINVAL), &Release::of(release)).to_string();
            assert!(message.contains(words) && !message.contains(not), "{release}: {message}");
        }
    }

    /// /dev/userfaultfd must not be recommended where the kernel has none.
    #[test]
    fn privileged_faults_are_refused_for_the_reason_that_errno_and_version_have() {
        for (syscall, user_only, release, words, not) in [
            (libc::EPERM, Some(libc::EPERM), "5.10.0", "vm.unprivileged_userfaultfd=1", "seccomp profile"),
            (libc::EPERM, Some(libc::EINVAL), "5.10.0", "it came with Linux 6.1", "chmod 660"),
            (libc::EPERM, None, "5.15.0", "CAP_SYS_PTRACE", "chmod 660"),
            (libc::EPERM, Some(libc::EPERM), "5.15.0", "a container's seccomp profile", "chmod 660"),
            (libc::EPERM, Some(libc::EPERM), "6.1.0", "chmod 660 /dev/userfaultfd", "it came with"),
            (libc::EPERM, None, "6.1.0", "chmod 660 /dev/userfaultfd", "it came with"),
            (libc::EPERM, None, "odd", "chmod 660 /dev/userfaultfd", "it came with"),
            (libc::ENOSYS, Some(libc::ENOSYS), "5.10.0", "CONFIG_USERFAULTFD", "chmod 660"),
            (libc::EMFILE, Some(libc::EMFILE), "6.8.0", "ulimit -n", "seccomp"),
        ] {
            let refused = Refused {
                syscall: errno(syscall),
                device: errno(libc::ENOENT),
                user_only: user_only.map(errno),
            };
            let failure = refused.failure_on(&Release::of(release));
            let message = failure.to_string();
            assert!(message.contains(words), "{syscall} on {release}: {message}");
            assert!(!message.contains(not), "{syscall} on {release}: {message}");
            assert!(!failure.fixes().is_empty(), "{message}");
        }
    }

    #[test]
    fn versions_are_read_from_releases() {
        for (release, version) in
            [("6.18.44-fc-v595", Some((6, 18))), ("5.4.0-150-generic", Some((5, 4))), ("odd", None)]
        {
            assert_eq!(Release::of(release).version(), version);
        }
    }
}

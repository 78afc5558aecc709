//! A memory cgroup of a test's own. The group measures what processes have together, limits it, or has the
//! kernel reclaim from them.
//!
//! The cgroup is of version 1 or 2. Where none can be made, the test is a reported skip.

use super::skip;
use std::fs::{self, File};
use std::io::ErrorKind::WouldBlock;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause between two calls for reclaim. Each call goes through all memory of the group.
const RECLAIM_PAUSE: Duration = Duration::from_millis(1);

/// A memory cgroup. The group counts each page once, also a page that processes share, and all
/// pages at one moment.
pub struct Group(PathBuf);

impl Group {
    /// Makes a group. None if no group can be made here.
    #[track_caller]
    pub fn new() -> Option<Group> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("farpage-test-{}-{number}", std::process::id());
        let made = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|root| Path::new(root).join(&name));
        let found = made.into_iter().find(|group| {
            let can_be = fs::create_dir(group).is_ok();
            let counts = can_be && group.join("memory.stat").exists();
            if can_be && !counts {
                let _ = fs::remove_dir(group);
            }
            counts
        });
        if found.is_none() {
            skip("no memory cgroup can be made here");
        }
        found.map(Group)
    }

    /// Limits the group to `bytes` from now on. Returns false if no limit can be set.
    #[track_caller]
    pub fn limit(&self, bytes: u64) -> bool {
        let files = ["memory.limit_in_bytes", "memory.max"].map(|name| self.0.join(name));
        let is_set = files.iter().any(|file| file.exists() && fs::write(file, bytes.to_string()).is_ok());
        if !is_set {
            skip("no limit can be set for a cgroup here");
        }
        is_set
    }

    /// Makes a command begin in the group.
    pub fn enter(&self, command: &mut Command) {
        let processes = File::options().write(true).open(self.0.join("cgroup.procs")).unwrap();
        let enter = move || {
            // SAFETY: writes one byte to an open file; "0" names the process that writes it.
            let written = unsafe { libc::write(processes.as_raw_fd(), b"0".as_ptr().cast(), 1) };
            if written == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: one system call between fork and exec.
        unsafe { command.pre_exec(enter) };
    }

    /// Returns the anonymous memory of all processes together, in bytes.
    pub fn anonymous(&self) -> u64 {
        let stat = fs::read_to_string(self.0.join("memory.stat")).unwrap_or_default();
        let bytes =
            |line: &str| line.strip_prefix("rss ").or_else(|| line.strip_prefix("anon "))?.parse().ok();
        stat.lines().find_map(bytes).unwrap_or(0)
    }

    /// Returns how many processes of the group the kernel has killed for memory.
    pub fn kills(&self) -> u64 {
        let texts = ["memory.oom_control", "memory.events"].map(|name| fs::read_to_string(self.0.join(name)));
        let mut lines = texts.iter().flatten().flat_map(|text| text.lines());
        let kills = lines.find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        kills.expect("the kernel counts kills since Linux 4.13")
    }

    /// Has the kernel reclaim from the group repeatedly, as on a machine that is short of memory. None if the
    /// kernel can't be asked (version 2 before Linux 5.19).
    #[track_caller]
    pub fn reclaim(&self) -> Option<Reclaim> {
        let Some((name, word)) = self.reclaim_file() else {
            skip("the kernel can't be asked to reclaim from a cgroup here");
            return None;
        };
        let (file, processes) = (self.0.join(name), self.0.join("cgroup.procs"));
        let (ends, rounds) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (is_over, count): (_, Arc<AtomicU64>) = (Arc::clone(&ends), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let has_processes = fs::read(&processes).is_ok_and(|pids| !pids.is_empty());
                // EAGAIN means that less could be reclaimed than was asked for, as always while
                // processes run.
                let asked = fs::write(&file, word).map_or_else(|error| error.kind() == WouldBlock, |()| true);
                let is_done = asked && has_processes;
                count.fetch_add(u64::from(is_done), Ordering::Relaxed);
                std::thread::sleep(RECLAIM_PAUSE);
            }
        });
        Some(Reclaim { ends, rounds, thread: Some(thread) })
    }

    /// Returns the file by which the kernel is asked to reclaim, and the text to write to it.
    fn reclaim_file(&self) -> Option<(&'static str, &'static str)> {
        let files = [("memory.force_empty", "0"), ("memory.reclaim", "1G")];
        files.into_iter().find(|(name, _)| self.0.join(name).exists())
    }

    /// Returns the shell commands that enter a group of the same kind, with [`Group::reclaim`] at work.
    pub fn again(&self) -> String {
        let (name, word) = self.reclaim_file().unwrap();
        let group = self.0.display();
        format!(
            "mkdir {group} && (while kill -0 $$; do echo {word} > {group}/{name}; sleep 0.001; done) & \
             sleep 1; echo $$ > {group}/cgroup.procs; "
        )
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last process may still be on its way out.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Reclaim that goes on until this value is dropped.
pub struct Reclaim {
    ends: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Reclaim {
    /// Returns how many times the kernel reclaimed what it could from processes in the group.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }
}

impl Drop for Reclaim {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

//! Faults served where they happen: by the thread of the program that ran into them, in its handler.
//!
//! What that takes beside tables and frames is the userfaultfd and the areas' files, and that is why the program's table of
//! descriptors has them, too. The program may close them, or put something else in their place: then the kernel refuses, or
//! what was read has another checksum, and faults are handed over to engine threads, as those are that need memory. Without a
//! userfaultfd it is first touches alone, which take no descriptor.
// UNSAFETY: a worker is used by whoever has claimed it, and descriptors are borrowed from a table that isn't ours.

use crate::devices::Devices;
use crate::engine::Engine;
use crate::map_lock::{DIRECT, ReaderIndex};
use crate::worker::Worker;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use farpage_core::config::Install;
use farpage_core::units::{AREAS_MAX, AreaId};
use farpage_fault::Fault;
use farpage_fault::signal::Here;
use farpage_os::uffd::out_of_the_way;
use rustix::fd::{BorrowedFd, IntoRawFd, RawFd};

/// Threads that serve at once; one more hands its fault over.
pub const SERVERS: usize = 16;

/// What one thread needs to serve a fault.
#[repr(align(64))]
struct Server {
    is_busy: AtomicBool,
    /// Made when it is first needed.
    worker: AtomicPtr<Worker>,
}

/// All of them.
pub struct Direct {
    servers: [Server; SERVERS],
    /// Areas in the program's table of descriptors.
    areas: [AtomicI32; AREAS_MAX],
    /// A descriptor isn't where it was.
    is_over: AtomicBool,
}

/// In `areas` where there is none.
const NONE: RawFd = -1;

impl Default for Direct {
    fn default() -> Self {
        Direct::new()
    }
}

impl Direct {
    /// Nobody serves.
    pub const fn new() -> Direct {
        let servers = [const {
            Server { is_busy: AtomicBool::new(false), worker: AtomicPtr::new(core::ptr::null_mut()) }
        }; SERVERS];
        let areas = [const { AtomicI32::new(NONE) }; AREAS_MAX];
        Direct { servers, areas, is_over: AtomicBool::new(false) }
    }

    /// Opens the areas where the program's threads have them. In one of these; without it they are read elsewhere.
    pub fn open_areas(&self, devices: &Devices) {
        for (number, area) in (0..).map(AreaId).zip(&self.areas) {
            if let Some(fd) = devices.open_again(number) {
                area.store(out_of_the_way(fd).into_raw_fd(), Ordering::Relaxed);
            }
        }
    }

    /// Where the program has the areas.
    pub fn area_descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.areas.iter().map(|area| area.load(Ordering::Relaxed)).filter(|fd| *fd != NONE)
    }

    /// An area, to be read by the calling thread of the program.
    pub fn area(&self, number: AreaId) -> Option<BorrowedFd<'_>> {
        let fd = self.areas[number.0 as usize].load(Ordering::Relaxed);
        // SAFETY: not -1. Whether it is what it was nobody knows; whoever reads looks at what he has read.
        (fd != NONE && !self.is_over()).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// From now on everything is handed over.
    pub fn give_up(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Whether it is.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Serves a fault if it can. In a handler, with all signals blocked but ours.
    pub fn serve(&self, engine: &'static Engine, fault: Fault) -> Here {
        // Whether a page that was moved has left its frame only a descriptor says that isn't in this thread's table.
        let can_install = engine.pager.config.install != Install::Move || engine.protections.is_some();
        if !can_install || self.is_over() {
            return Here::Elsewhere;
        }
        let Some(at) = self.claim() else { return Here::Elsewhere };
        let server = &self.servers[at];
        let mut worker = server.worker.load(Ordering::Relaxed);
        if worker.is_null() {
            let Ok(made) = Worker::placed(engine, ReaderIndex(DIRECT.0 + at), None) else {
                server.is_busy.store(false, Ordering::Release);
                return Here::Elsewhere;
            };
            worker = made;
            server.worker.store(worker, Ordering::Relaxed);
        }
        // SAFETY: placed for good, and this thread has claimed it.
        let here = unsafe { &mut *worker }.serve_here(fault);
        // Ordering: Release pairs with the Acquire in `claim`.
        server.is_busy.store(false, Ordering::Release);
        here
    }

    fn claim(&self) -> Option<usize> {
        self.servers.iter().position(|server| {
            // Ordering: Acquire pairs with the Release of whoever had it before.
            !server.is_busy.load(Ordering::Relaxed) && !server.is_busy.swap(true, Ordering::Acquire)
        })
    }
}

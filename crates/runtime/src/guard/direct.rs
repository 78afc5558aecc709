//! Faults served where they happen: by the thread of the program that ran into them, in its handler.
//!
//! What that takes beside tables and frames is the userfaultfd, and that is why the program's table of descriptors has it,
//! too. The program may close it, or put something else in its place: then the kernel refuses, and faults are handed over
//! to engine threads, as those are that need a device or memory. Without a userfaultfd it is first touches alone, which take no
//! descriptor.
// UNSAFETY: a worker is used by whoever has claimed it.

use crate::engine::Engine;
use crate::map_lock::{DIRECT, ReaderIndex};
use crate::worker::Worker;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use farpage_core::config::Install;
use farpage_fault::Fault;
use farpage_fault::signal::Here;

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
    /// The descriptor isn't where it was.
    is_over: AtomicBool,
}

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
        Direct { servers, is_over: AtomicBool::new(false) }
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

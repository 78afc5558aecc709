//! Faults served where they happen: by the thread of the program that ran into them, in its handler.
//!
//! What that takes beside tables and frames is descriptors of ours in the program's table ([`Descriptors`]). Where one isn't there
//! any more, faults are handed over to engine threads, as those are that need memory. Without a userfaultfd it is first
//! touches alone, which take no descriptor.
// UNSAFETY: a worker is used by whoever has claimed it.

use super::kept::Descriptors;
use crate::engine::Engine;
use crate::map_lock::{DIRECT, ReaderIndex};
use crate::worker::Worker;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use farpage_core::config::Install;
use farpage_fault::Fault;
use farpage_fault::signal::Here;
use farpage_os::clock::now_ns;

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
    /// What they serve with.
    pub descriptors: Descriptors,
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
        Direct { servers, descriptors: Descriptors::new() }
    }

    /// Whether more than first touches can be served here, as far as the engine goes. Whether a page that was moved has left its
    /// frame only a descriptor says that isn't in a program's table.
    pub fn is_possible(engine: &Engine) -> bool {
        engine.uffd.is_some() && engine.handover.is_some() && engine.pager.config.install != Install::Move
    }

    /// Serves a fault if it can. In a handler, with all signals blocked but ours.
    pub fn serve(&self, engine: &'static Engine, fault: Fault) -> Here {
        // First of all: what is known of descriptors mustn't be old.
        engine.lull.wait();
        if engine.is_over_limit() && engine.pager.takes_memory(fault.page, fault.access) {
            engine.wait_for_room();
        }
        self.descriptors.settle(engine.is_active());
        if engine.protections.is_none() && !self.descriptors.has_userfaultfd() {
            engine.takes.are_elsewhere(now_ns());
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

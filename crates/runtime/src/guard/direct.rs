//! Serves a fault where it happens: in the thread of the program that ran into it, in the thread's handler.
//!
//! Besides tables and frames, the thread needs descriptors of Farpage's in the program's table
//! ([`Descriptors`]). If a descriptor isn't there any more, the fault is handed over to an engine thread,
//! like a fault for which memory must be freed. Without a userfaultfd only pages of zeros are served here,
//! because they take no descriptor.
// UNSAFETY: a worker is used by the thread that has claimed it.

use super::descriptors::Descriptors;
use crate::engine::Engine;
use crate::mappings::map_lock::{DIRECT, ReaderIndex};
use crate::worker::Worker;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use farpage_core::config::Install;
use farpage_fault::Fault;
use farpage_fault::signal::Inline;
use farpage_os::clock::{now_ns, sleep_ns};

/// Threads that serve faults at once, at most. A further thread hands its fault over.
pub const SERVERS: usize = 16;

/// Data that a thread needs to serve a fault.
#[repr(align(64))]
struct Server {
    /// Counts each claim and each end of one: odd while a thread has claimed the server.
    claims: AtomicU32,
    /// Made when the server is first needed.
    worker: AtomicPtr<Worker>,
}

/// All servers, and their descriptors.
pub struct Direct {
    servers: [Server; SERVERS],
    /// Descriptors with which the servers serve.
    pub descriptors: Descriptors,
}

impl Default for Direct {
    fn default() -> Self {
        Direct::new()
    }
}

impl Direct {
    /// Makes the state in which no thread serves.
    pub const fn new() -> Direct {
        let servers =
            [const { Server { claims: AtomicU32::new(0), worker: AtomicPtr::new(core::ptr::null_mut()) } };
                SERVERS];
        Direct { servers, descriptors: Descriptors::new() }
    }

    /// Returns whether threads of the program get the userfaultfd and the areas' files, to serve faults with.
    /// With `--install move` they don't. Only the pagemap tells whether a page has left its frame, and
    /// threads of the program haven't got the pagemap's descriptor.
    pub fn is_possible(engine: &Engine) -> bool {
        engine.uffd.is_some()
            && !engine.mode().calls_can_wait()
            && engine.pager.config.install != Install::Move
    }

    /// Serves a fault if possible. Runs in a handler, with all signals blocked but Farpage's.
    pub fn serve(&self, engine: &'static Engine, fault: Fault) -> Inline {
        // The wait comes first, because what is known of descriptors mustn't be old.
        engine.lull.wait();
        if engine.is_over_limit() && engine.pager.takes_memory(fault.page, fault.access) {
            engine.wait_for_headroom();
        }
        self.descriptors.settle(engine.is_active());
        if !engine.mode().installs_by_file() && !self.descriptors.has_userfaultfd() {
            engine.evictor.engine_serves(now_ns());
            return Inline::Elsewhere;
        }
        let Some(at) = self.claim() else { return Inline::Elsewhere };
        let server = &self.servers[at];
        if !engine.mode().installs_by_file() && !self.descriptors.has_userfaultfd() {
            // The userfaultfd was lost meanwhile, by a thread that doesn't wait for this one.
            server.leave();
            return Inline::Elsewhere;
        }
        let mut worker = server.worker.load(Ordering::Relaxed);
        if worker.is_null() {
            let Ok(made) = Worker::placed(engine, ReaderIndex(DIRECT.0 + at), None) else {
                server.leave();
                return Inline::Elsewhere;
            };
            worker = made;
            server.worker.store(worker, Ordering::Relaxed);
        }
        // SAFETY: the worker is placed for good, and this thread has claimed it.
        let here = unsafe { &mut *worker }.serve_inline(fault);
        server.leave();
        here
    }

    fn claim(&self) -> Option<usize> {
        self.servers.iter().position(Server::claim)
    }

    /// Waits until no thread uses a number any more that was given to [`Descriptors::lose`]. The wait is no
    /// longer than it takes to serve one fault.
    pub fn wait_for_users(&self) {
        for server in &self.servers {
            // Ordering: SeqCst here and in `claim`, and on the number: a thread whose claim isn't seen here
            // sees that the number was lost.
            let seen = server.claims.load(Ordering::SeqCst);
            while is_claimed(seen) && server.claims.load(Ordering::Acquire) == seen {
                sleep_ns(20_000);
            }
        }
    }
}

const fn is_claimed(claims: u32) -> bool {
    claims % 2 == 1
}

impl Server {
    fn claim(&self) -> bool {
        let seen = self.claims.load(Ordering::Relaxed);
        let claimed = seen.wrapping_add(1);
        // Ordering: Acquire (in SeqCst) pairs with the Release of the thread that had the server before. For
        // the rest see `wait_for_users`.
        is_claimed(claimed)
            && self.claims.compare_exchange(seen, claimed, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    fn leave(&self) {
        // Ordering: Release pairs with the Acquire in `claim`, and in `wait_for_users`.
        self.claims.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// A number is the program's once all threads are done that had seen it as Farpage's. Other threads come
    /// and go meanwhile.
    #[test]
    fn users_of_a_number_are_waited_for_and_no_others() {
        let direct = Direct::new();
        direct.wait_for_users();
        let (first, second) = (direct.claim().unwrap(), direct.claim().unwrap());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                direct.wait_for_users();
                is_over.store(true, Ordering::Relaxed);
            });
            direct.servers[first].leave();
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!is_over.load(Ordering::Relaxed), "the second is at work");
            direct.servers[second].leave();
            // The servers are claimed again at once, by threads that no longer see the number.
            assert_eq!((direct.claim(), direct.claim()), (Some(first), Some(second)));
            waiter.join().unwrap();
        });
        direct.servers[first].leave();
        assert_eq!(direct.claim(), Some(first));
    }
}

//! Faults served where they happen: by the thread of the program that ran into them, in its handler.
//!
//! What that takes beside tables and frames is descriptors of ours in the program's table ([`Descriptors`]). Where one isn't there
//! any more, faults are handed over to engine threads, as those are that need memory. Without a userfaultfd it is
//! pages of zeros alone, which take no descriptor.
// UNSAFETY: a worker is used by whoever has claimed it.

use super::kept::Descriptors;
use crate::engine::Engine;
use crate::map_lock::{DIRECT, ReaderIndex};
use crate::worker::Worker;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use farpage_core::config::Install;
use farpage_fault::Fault;
use farpage_fault::signal::Here;
use farpage_os::clock::{now_ns, sleep_ns};

/// Threads that serve at once; one more hands its fault over.
pub const SERVERS: usize = 16;

/// What one thread needs to serve a fault.
#[repr(align(64))]
struct Server {
    /// Odd while a thread has claimed it; one more with each claim, and each end of one.
    claims: AtomicU32,
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
        let servers =
            [const { Server { claims: AtomicU32::new(0), worker: AtomicPtr::new(core::ptr::null_mut()) } };
                SERVERS];
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
        if engine.protections.is_none() && !self.descriptors.has_userfaultfd() {
            // Lost meanwhile, by somebody who doesn't wait for us.
            server.leave();
            return Here::Elsewhere;
        }
        let mut worker = server.worker.load(Ordering::Relaxed);
        if worker.is_null() {
            let Ok(made) = Worker::placed(engine, ReaderIndex(DIRECT.0 + at), None) else {
                server.leave();
                return Here::Elsewhere;
            };
            worker = made;
            server.worker.store(worker, Ordering::Relaxed);
        }
        // SAFETY: placed for good, and this thread has claimed it.
        let here = unsafe { &mut *worker }.serve_here(fault);
        server.leave();
        here
    }

    fn claim(&self) -> Option<usize> {
        self.servers.iter().position(Server::claim)
    }

    /// Waits until nobody uses a number any more that [`Descriptors::lose`] was told of: no longer than it takes to serve one fault.
    pub fn wait_for_users(&self) {
        for server in &self.servers {
            // Ordering: SeqCst here and in `claim`, and on the number: whoever has claimed it unseen sees that it was lost.
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
        // Ordering: Acquire (in SeqCst) pairs with the Release of whoever had it before; for the rest see `wait_for_users`.
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

    /// A number is the program's once those are done that had seen it as ours. Others come and go meanwhile.
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
            // It is claimed again at once, by threads that no longer see the number.
            assert_eq!((direct.claim(), direct.claim()), (Some(first), Some(second)));
            waiter.join().unwrap();
        });
        direct.servers[first].leave();
        assert_eq!(direct.claim(), Some(first));
    }
}

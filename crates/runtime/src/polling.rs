//! A thread that needs a page of an area looks for it again and again until it is there, instead of sleeping: *polling*.
//!
//! A device that takes 36 µs for a page takes 48 as seen by a thread that sleeps: its CPU goes to sleep, too, must be woken by an
//! interrupt, and the thread finds its way back through the scheduler. (A virtual machine, 2 CPUs, November 2026, `fio --rw=randread
//! --bs=4k --direct=1`: `--ioengine=psync` 48 to 50 µs, `--ioengine=libaio --userspace_reap --iodepth_batch_complete_min=0` 35 to 37.)
//! What that makes of faults: ARCHITECTURE.md, "Areas".
//!
//! It costs CPU time that would have been slept. So at most one thread of a whole run does it at a time; none where several wait, who
//! have work for each other's CPUs; and for a while none where more was lost by it than gained: where reads take longer than any
//! looking is worth, or where somebody else wanted the CPU. `--wait sleep` does without.

// UNSAFETY: a context is used by whoever has claimed it, and what it reads into is an address to the kernel.

use crate::engine::Engine;
use crate::map_lock::MapLock;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use farpage_core::stats::Counter;
use farpage_io::IoError;
use farpage_io::psync::read_now;
use farpage_os::aio::Aio;
use farpage_os::clock::now_ns;
use farpage_os::sys::Errno;
use rustix::fd::BorrowedFd;

/// So many reads were waited for before it is worth a context, for which the process will take 30 ms longer to end.
const READS_MIN: u64 = 4096;
/// Threads that wait for a page each, at most, for one of them to poll.
const WAITING_MAX: u32 = 2;
/// So long is looked for a page. Nine of ten are there by half of that from a disk that is worth it.
const LOOK_NS: u64 = 100_000;
/// Nobody looks for longer than this without having lost its CPU in between.
const LEASE_NS: u64 = 2 * LOOK_NS;
/// Between two looks: who hasn't had the CPU for so long has lost it to somebody.
const LOST_NS: u64 = 20_000;
/// What a page that was found is worth: so much sooner is it there.
const GAIN_NS: u64 = 10_000;
/// Lost so much more than gained, and nobody polls for so long.
const LOSS_MAX_NS: u64 = 2_000_000;
const PAUSE_NS: u64 = 200_000_000;

/// What a process has for it.
#[derive(Default)]
pub struct Polling {
    /// Whether it was tried to make a context, and whether there is one.
    was_tried: AtomicBool,
    is_ready: AtomicBool,
    /// Whoever has set it may use the context.
    is_taken: AtomicBool,
    context: UnsafeCell<Option<Aio>>,
    worth: Worth,
}

// SAFETY: the context is made before `is_ready` says so, and then used by whoever has set `is_taken`, one thread at a time.
unsafe impl Sync for Polling {}

impl Polling {
    /// Makes what it takes. In the keeper, with no lock held.
    fn prepare(&self, map: &MapLock) {
        // The kernel maps the context where it likes. That may be a hole that the program has made and counts on, for a moment.
        let _exclusive = map.exclusive();
        if self.was_tried.swap(true, Ordering::Relaxed) {
            return;
        }
        // Where the kernel refuses nobody polls.
        if let Ok(context) = Aio::new() {
            // SAFETY: nobody looks before `is_ready` says so.
            unsafe { *self.context.get() = Some(context) };
            // Ordering: Release pairs with the Acquire in `read`.
            self.is_ready.store(true, Ordering::Release);
        }
    }

    /// Reads whole pages, looking for the end; `waiting` threads wait for a page each, this one too. None if it isn't for this
    /// thread to poll, or if they didn't come: whoever reads them in another way finds out why.
    fn read(
        &self,
        lease: &AtomicU64,
        waiting: &AtomicU32,
        file: BorrowedFd<'_>,
        offset: u64,
        buffer: &mut [u8],
    ) -> Option<()> {
        // Ordering: Acquire pairs with the Release in `prepare`.
        if !self.is_ready.load(Ordering::Acquire) || waiting.load(Ordering::Relaxed) > WAITING_MAX {
            return None;
        }
        let now = now_ns();
        if self.worth.is_pause(now) {
            return None;
        }
        let _lease = Lease::take(lease, now)?;
        // Ordering: Acquire pairs with the Release of whoever had it before.
        if self.is_taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread has set `is_taken`.
        let context = unsafe { &mut *self.context.get() };
        let read = context.as_mut().and_then(|context| {
            // SAFETY: the buffer is borrowed until the read is over, here.
            unsafe { context.begin(file, offset, buffer.as_mut_ptr(), buffer.len()) }.ok()?;
            let (result, lost_ns) = look(context, waiting);
            self.worth.has(lost_ns, now);
            (result == Ok(buffer.len())).then_some(())
        });
        self.is_taken.store(false, Ordering::Release);
        read
    }
}

/// Looks for the end of a read as long as that is worth it, then sleeps. How it has ended, and how much time was lost by looking.
fn look(context: &mut Aio, waiting: &AtomicU32) -> (Result<usize, Errno>, Option<u64>) {
    let begun = now_ns();
    let mut last = begun;
    loop {
        if let Some(result) = context.look() {
            return (result, None);
        }
        let now = now_ns();
        if now - last > LOST_NS {
            // Who sleeps gets the CPU back at once.
            return (context.wait(), Some(now - last));
        }
        if now - begun > LOOK_NS {
            return (context.wait(), Some(LOOK_NS));
        }
        if waiting.load(Ordering::Relaxed) > WAITING_MAX {
            return (context.wait(), Some(0));
        }
        last = now;
        core::hint::spin_loop();
    }
}

/// The right to poll: of one thread of a run at a time, and not for longer than [`LEASE_NS`], should it die.
struct Lease<'s> {
    until_ns: &'s AtomicU64,
    own: u64,
}

impl Lease<'_> {
    fn take(until_ns: &AtomicU64, now_ns: u64) -> Option<Lease<'_>> {
        let before = until_ns.load(Ordering::Relaxed);
        // One that ends later is of another clock's (a time namespace).
        let is_free = before <= now_ns || before > now_ns + LEASE_NS;
        let own = now_ns + LEASE_NS;
        let is_taken =
            is_free && until_ns.compare_exchange(before, own, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        is_taken.then(|| Lease { until_ns, own })
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Unless it has run out, and is somebody else's.
        let _ = self.until_ns.compare_exchange(self.own, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether there is anything to be gained by polling. Written by one thread at a time.
#[derive(Default)]
struct Worth {
    /// How much more was lost than gained lately.
    loss_ns: AtomicU64,
    pause_until_ns: AtomicU64,
}

impl Worth {
    fn is_pause(&self, now_ns: u64) -> bool {
        now_ns < self.pause_until_ns.load(Ordering::Relaxed)
    }

    /// A page was found, or so much time was lost.
    fn has(&self, lost_ns: Option<u64>, now_ns: u64) {
        let before = self.loss_ns.load(Ordering::Relaxed);
        let after = lost_ns.map_or(before.saturating_sub(GAIN_NS), |lost| before + lost);
        if after > LOSS_MAX_NS {
            self.pause_until_ns.store(now_ns + PAUSE_NS, Ordering::Relaxed);
        }
        // The next pause comes sooner, if nothing has changed.
        self.loss_ns.store(if after > LOSS_MAX_NS { LOSS_MAX_NS / 2 } else { after }, Ordering::Relaxed);
    }
}

impl Engine {
    /// Once a program has waited for many pages of areas: from now on it may poll for them. In the keeper, with no lock held.
    pub(crate) fn prepare_to_poll(&self) {
        let is_worth_it = self.membership.session.settings.polls != 0
            && self.pager.stats().get(Counter::FaultArea) >= READS_MIN;
        if is_worth_it && !self.polling.was_tried.load(Ordering::Relaxed) {
            self.polling.prepare(&self.map);
        }
    }

    /// Reads a page that a thread waits for.
    pub(crate) fn read_for_fault(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        page: &mut [u8],
    ) -> Result<(), IoError> {
        let waiting = &self.faults_reading;
        waiting.fetch_add(1, Ordering::Relaxed);
        let polled = self.polling.read(&self.membership.session.polls_until_ns, waiting, file, offset, page);
        let result = match polled {
            Some(()) => {
                self.pager.stats().count(Counter::FaultPolled);
                Ok(())
            }
            None => read_now(file, offset, page),
        };
        waiting.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::units::PAGE_BYTES;
    use rustix::fd::{AsFd, OwnedFd};

    #[repr(align(4096))]
    struct Page([u8; PAGE_BYTES]);

    fn three_pages() -> OwnedFd {
        let file = rustix::fs::memfd_create(c"three pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        for n in 0..3 {
            assert_eq!(rustix::io::write(&file, &[n + 1; PAGE_BYTES]), Ok(PAGE_BYTES));
        }
        file
    }

    fn ready() -> Polling {
        let polling = Polling::default();
        polling.prepare(&MapLock::new());
        polling
    }

    /// What was read of a page by polling, if it was; beside `others` that wait.
    fn polled(polling: &Polling, lease: &AtomicU64, others: u32, file: &OwnedFd, page: u64) -> Option<u8> {
        let mut buffer = Page([0; PAGE_BYTES]);
        polling.read(lease, &AtomicU32::new(others + 1), file.as_fd(), page * 4096, &mut buffer.0)?;
        assert!(buffer.0.iter().all(|byte| *byte == buffer.0[0]));
        Some(buffer.0[0])
    }

    #[test]
    fn pages_are_read_by_one_thread_and_not_while_many_wait() {
        let (polling, lease, file) = (ready(), AtomicU64::new(0), three_pages());
        for page in [0, 2, 1, 1] {
            assert_eq!(polled(&polling, &lease, 0, &file, page), Some(page as u8 + 1));
            assert_eq!(lease.load(Ordering::Relaxed), 0, "given back");
        }
        assert_eq!(polled(&polling, &lease, WAITING_MAX - 1, &file, 0), Some(1));
        assert_eq!(polled(&polling, &lease, WAITING_MAX, &file, 0), None);
        assert_eq!(polled(&Polling::default(), &lease, 0, &file, 0), None, "it has no context");
        lease.store(now_ns() + LEASE_NS, Ordering::Relaxed);
        assert_eq!(polled(&polling, &lease, 0, &file, 0), None, "another process polls");
        lease.store(0, Ordering::Relaxed);
        polling.worth.has(Some(2 * LOSS_MAX_NS), now_ns());
        assert_eq!(polled(&polling, &lease, 0, &file, 0), None, "it isn't worth it");
    }

    /// Who polls only says that nothing was read: pread finds out why, and knows what to do about it.
    #[test]
    fn what_cant_be_read_is_left_to_others_and_the_next_page_comes() {
        let (polling, lease, file) = (ready(), AtomicU64::new(0), three_pages());
        assert_eq!(polled(&polling, &lease, 0, &file, 3), None, "nothing is there");
        let (null, flags) = (c"/dev/null", rustix::fs::OFlags::WRONLY);
        let only_written = rustix::fs::open(null, flags, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(polled(&polling, &lease, 0, &only_written, 0), None);
        assert_eq!(polled(&polling, &lease, 0, &file, 2), Some(3));
    }

    /// Four threads with a context, of which one polls at a time, and whoever doesn't reads otherwise: each gets its bytes.
    #[test]
    fn threads_never_get_each_others_pages() {
        let (polling, lease, file) = (&ready(), &AtomicU64::new(0), &three_pages());
        let polled: usize = std::thread::scope(|scope| {
            let thread = |n: u64| {
                move || {
                    (0..3000)
                        .filter_map(move |i| {
                            let page = (i + n) % 3;
                            polled(polling, lease, 0, file, page)
                                .map(|byte| assert_eq!(u64::from(byte), page + 1))
                        })
                        .count()
                }
            };
            let threads: Vec<_> = (0..4).map(|n| scope.spawn(thread(n))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(polled > 0);
    }

    #[test]
    fn lease_is_one_threads_until_it_is_given_back_or_has_run_out() {
        let word = AtomicU64::new(0);
        let first = Lease::take(&word, 1_000).unwrap();
        assert!(Lease::take(&word, 1_000).is_none() && Lease::take(&word, 999 + LEASE_NS).is_none());
        drop(first);
        let dead = Lease::take(&word, 1_000).unwrap();
        let second = Lease::take(&word, 1_000 + LEASE_NS).unwrap();
        drop(dead);
        assert!(Lease::take(&word, 1_000 + LEASE_NS).is_none(), "it is still the second's");
        drop(second);
        assert_eq!(word.load(Ordering::Relaxed), 0);
        // Of a process whose clock is a year ahead.
        word.store(1 << 55, Ordering::Relaxed);
        assert!(Lease::take(&word, 1_000).is_some());
    }

    /// A CPU that somebody else wants is lost for milliseconds at a time, of which each page makes up for 10 µs.
    #[test]
    fn polling_pauses_where_it_loses_more_than_it_gains() {
        let worth = Worth::default();
        let mut now = 0;
        for _ in 0..50 {
            worth.has(Some(500_000), now);
            (0..50).for_each(|_| worth.has(None, now));
            now += 1_000_000;
        }
        assert!(!worth.is_pause(now));
        // A slow disk: each look is in vain.
        let in_vain = std::iter::repeat(()).take_while(|()| {
            worth.has(Some(LOOK_NS), now);
            !worth.is_pause(now)
        });
        assert_eq!(in_vain.count() as u64, LOSS_MAX_NS / LOOK_NS);
        assert!(worth.is_pause(now + PAUSE_NS - 1) && !worth.is_pause(now + PAUSE_NS));
        now += PAUSE_NS;
        let again = std::iter::repeat(()).take_while(|()| {
            worth.has(Some(LOOK_NS), now);
            !worth.is_pause(now)
        });
        assert_eq!(again.count() as u64, LOSS_MAX_NS / LOOK_NS / 2);
    }
}

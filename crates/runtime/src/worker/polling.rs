//! Polling: a thread that needs a page of an area looks for the page again and again until it is there,
//! instead of sleeping.
//!
//! A read takes longer for a thread that sleeps. The thread's CPU goes to sleep too, an interrupt must wake
//! it, and the thread must be scheduled again. On a virtual machine this adds a third to the device's time.
//! `docs/internals/areas.md` has the details.
//!
//! Polling costs CPU time that would have been slept, so it is limited:
//!
//! - At most one thread of a whole run polls at a time.
//! - No thread polls while more than two threads wait for pages. These have work for each other's CPUs.
//! - No thread polls for a while after polling has lost more than it gained. Losses come from reads that take
//!   longer than polling is worth, and from other threads that want the CPU.
//!
//! `--wait sleep` turns polling off.

// UNSAFETY: a context is used only by the thread that has claimed it. The buffer of a read is a raw address
// to the kernel.

use crate::engine::Engine;
use crate::mappings::map_lock::MapLock;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::stats::Counter;
use farpage_io::IoError;
use farpage_io::psync::read_now;
use farpage_os::aio::Aio;
use farpage_os::clock::now_ns;
use rustix::fd::BorrowedFd;

/// Reads of areas that threads of the program have waited for, before a context is worth its price. A process
/// with a context takes 30 ms longer to end or to exec another program.
const READS_MIN: u64 = 4096;
/// Threads that wait for a page each, at most, for one of them to poll.
const WAITING_MAX: u32 = 2;
/// Nanoseconds that a thread polls for one page. A disk that is worth polling takes half of this time.
const LOOK_NS: u64 = 100_000;
/// Nanoseconds of a lease. A thread polls for longer only if it loses its CPU in between.
const LEASE_NS: u64 = 2 * LOOK_NS;
/// Nanoseconds from now to the end of a lease, beyond which the lease comes from another clock.
const ANOTHER_CLOCK_NS: u64 = 1_000_000_000;
/// Nanoseconds between two looks, up to which finding the page counts as gained. A longer time has one of two
/// causes. At the first look, the call that begins the read has done the read itself, as without O_DIRECT,
/// which is no better than sleeping. At a later look, another thread had the CPU in between, and nothing is
/// gained.
const SHORT_NS: u64 = 20_000;
/// Nanoseconds between two looks, beyond which the CPU counts as lost to a thread that takes a scheduler's
/// turn of some milliseconds. The keeper or an interrupt takes the CPU for less than 100 µs. Counting those
/// short times as lost would cost two threads half of their gain.
const LOST_NS: u64 = 500_000;
/// Nanoseconds by which a page is there sooner if polling sees it.
const GAIN_NS: u64 = 10_000;
/// Nanoseconds of losses beyond the gains, after which polling pauses.
const LOSS_MAX_NS: u64 = 2_000_000;
/// Nanoseconds that one pause lasts.
const PAUSE_NS: u64 = 200_000_000;

/// The polling state of one process.
#[derive(Default)]
pub struct Polling {
    state: AtomicU32,
    context: UnsafeCell<Option<Aio>>,
    worth: Worth,
}

/// States: no context has been tried; the kernel has refused one; no thread polls; a thread polls and owns
/// the context.
const UNTRIED: u32 = 0;
const REFUSED: u32 = 1;
const FREE: u32 = 2;
const TAKEN: u32 = 3;

// SAFETY: the keeper makes the context before the state is FREE. Afterwards only the thread that has made the
// state TAKEN uses the context. All other fields are atomics.
unsafe impl Sync for Polling {}

/// How a page came for which a thread polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// Polling saw the page.
    Seen,
    /// Polling stopped paying off, so the thread slept until the page came.
    Late,
}

impl Polling {
    /// Makes the context, once. Called in the keeper, with no lock held.
    fn prepare(&self, map: &MapLock) {
        // The kernel maps the context at an address of its own choice. For a moment, this may be a hole that
        // the program has made and counts on.
        let _exclusive = map.exclusive();
        let context = Aio::new().ok();
        let state = if context.is_some() { FREE } else { REFUSED };
        // SAFETY: no thread looks at the context before the state is FREE.
        unsafe { *self.context.get() = context };
        // Ordering: Release pairs with the Acquire in `claim`.
        self.state.store(state, Ordering::Release);
    }

    /// Returns the right to poll for one page, if polling is worth it beside the threads that are `waiting`
    /// for pages.
    fn claim<'p>(&'p self, lease: &'p AtomicU64, waiting: &AtomicU32) -> Option<Turn<'p>> {
        if self.state.load(Ordering::Relaxed) != FREE || waiting.load(Ordering::Relaxed) > WAITING_MAX {
            return None;
        }
        let now = now_ns();
        if self.worth.is_pause(now) {
            return None;
        }
        let lease = Lease::take(lease, now)?;
        // Ordering: Acquire pairs with the Release of the thread that made the context or used it last.
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Turn { polling: self, _lease: lease })
    }
}

/// The right to poll for one page, and the claim to the context.
struct Turn<'p> {
    polling: &'p Polling,
    _lease: Lease<'p>,
}

impl Turn<'_> {
    /// Reads whole pages. Returns None if they did not come. Another way of reading then finds out why.
    fn read(self, waiting: &AtomicU32, file: BorrowedFd<'_>, offset: u64, buffer: &mut [u8]) -> Option<Came> {
        let worth = &self.polling.worth;
        // SAFETY: this thread has made the state TAKEN.
        let context = unsafe { &mut *self.polling.context.get() }.as_mut()?;
        let begun = now_ns();
        // SAFETY: the buffer is borrowed until the read is over: `look` has found the end, or `wait` returns
        // it.
        if unsafe { context.begin(file, offset, buffer.as_mut_ptr(), buffer.len()) }.is_err() {
            worth.book(Some(LOOK_NS), now_ns());
            return None;
        }
        let is_alone = || waiting.load(Ordering::Relaxed) <= WAITING_MAX;
        let looked = look_for(begun, || context.look(), now_ns, is_alone);
        worth.book(looked.lost_ns, looked.now_ns);
        let came = if looked.found.is_some() { Came::Seen } else { Came::Late };
        let result = looked.found.unwrap_or_else(|| context.wait());
        (result == Ok(buffer.len())).then_some(came)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `claim`.
        self.polling.state.store(FREE, Ordering::Release);
    }
}

/// Result of looking for the end of a read.
struct Looked<T> {
    found: Option<T>,
    /// Nanoseconds lost by polling; None if polling gained time.
    lost_ns: Option<u64>,
    now_ns: u64,
}

/// Looks for the end of what began at `begun_ns`, as long as polling is worth it.
fn look_for<T>(
    begun_ns: u64,
    mut look: impl FnMut() -> Option<T>,
    mut clock: impl FnMut() -> u64,
    is_alone: impl Fn() -> bool,
) -> Looked<T> {
    let (mut last, mut is_first) = (begun_ns, true);
    loop {
        let found = look();
        let now_ns = clock();
        let since = now_ns - last;
        let lost_ns = match &found {
            // Another thread had the CPU. A thread that sleeps gets the CPU back at once.
            _ if since > LOST_NS => Some(since),
            Some(_) if since > SHORT_NS => Some(if is_first { since } else { 0 }),
            Some(_) => None,
            None if now_ns - begun_ns > LOOK_NS => Some(now_ns - begun_ns),
            None if !is_alone() => Some(0),
            None => {
                (last, is_first) = (now_ns, false);
                core::hint::spin_loop();
                continue;
            }
        };
        return Looked { found, lost_ns, now_ns };
    }
}

/// The right to poll, for one thread of a run at a time. The lease ends after [`LEASE_NS`] even if its thread
/// has died. A lease protects no data: the context belongs to the thread's process.
struct Lease<'s> {
    until_ns: &'s AtomicU64,
    own: u64,
}

impl Lease<'_> {
    fn take(until_ns: &AtomicU64, now_ns: u64) -> Option<Lease<'_>> {
        let before = until_ns.load(Ordering::Relaxed);
        // A lease that ends much later comes from another clock (a time namespace).
        let is_free = before <= now_ns || before > now_ns + ANOTHER_CLOCK_NS;
        let own = now_ns + LEASE_NS;
        let is_taken =
            is_free && until_ns.compare_exchange(before, own, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        is_taken.then(|| Lease { until_ns, own })
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Leave the word alone if this lease has run out and another thread has taken it.
        let _ = self.until_ns.compare_exchange(self.own, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether polling gains time. Written by one thread at a time.
#[derive(Default)]
struct Worth {
    /// Nanoseconds lost more than gained lately.
    loss_ns: AtomicU64,
    pause_until_ns: AtomicU64,
}

impl Worth {
    fn is_pause(&self, now_ns: u64) -> bool {
        now_ns < self.pause_until_ns.load(Ordering::Relaxed)
    }

    /// Books a read: a page that polling saw, or the time that was lost.
    fn book(&self, lost_ns: Option<u64>, now_ns: u64) {
        let before = self.loss_ns.load(Ordering::Relaxed);
        let after = lost_ns.map_or(before.saturating_sub(GAIN_NS), |lost| before + lost);
        if after > LOSS_MAX_NS {
            self.pause_until_ns.store(now_ns + PAUSE_NS, Ordering::Relaxed);
        }
        // The next pause comes sooner if nothing has changed.
        self.loss_ns.store(if after > LOSS_MAX_NS { LOSS_MAX_NS / 2 } else { after }, Ordering::Relaxed);
    }
}

impl Engine {
    /// Allows polling once the program has waited for [`READS_MIN`] pages of areas. Called in the keeper,
    /// with no lock held.
    pub(crate) fn prepare_to_poll(&self) {
        let polling = &self.polling;
        if polling.state.load(Ordering::Relaxed) == UNTRIED
            && self.membership.settings.polls != 0
            && self.pager.stats().get(Counter::FaultArea) >= READS_MIN
        {
            polling.prepare(&self.map);
        }
    }

    /// Reads a page that a thread waits for, by polling or by `pread`.
    pub(crate) fn read_for_fault(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        page: &mut [u8],
    ) -> Result<(), IoError> {
        let waiting = &self.faults_reading;
        waiting.fetch_add(1, Ordering::Relaxed);
        let turn = self.polling.claim(&self.membership.session.polls_until_ns, waiting);
        let result = match turn.and_then(|turn| turn.read(waiting, file, offset, page)) {
            Some(came) => {
                if came == Came::Seen {
                    self.pager.stats().count(Counter::FaultPolled);
                }
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
    use rustix::fs::{Mode, OFlags};

    #[repr(align(4096))]
    struct Page([u8; PAGE_BYTES]);

    /// Returns a file of three pages, opened for direct reads where its file system has them.
    fn three_pages() -> OwnedFd {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("farpage-polling-{}-{count}", std::process::id()));
        std::fs::write(&path, [[1; PAGE_BYTES], [2; PAGE_BYTES], [3; PAGE_BYTES]].concat()).unwrap();
        let open = |flags| rustix::fs::open(path.to_str().unwrap(), OFlags::RDONLY | flags, Mode::empty());
        let file = open(OFlags::DIRECT).or_else(|_| open(OFlags::empty())).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn ready() -> Polling {
        let polling = Polling::default();
        polling.prepare(&MapLock::new());
        assert_eq!(polling.state.load(Ordering::Relaxed), FREE, "the kernel refuses AIO");
        polling
    }

    /// Forgets losses from a CPU that another thread had meanwhile. No test here is about those.
    fn forget_losses(polling: &Polling) {
        polling.worth.loss_ns.store(0, Ordering::Relaxed);
        polling.worth.pause_until_ns.store(0, Ordering::Relaxed);
    }

    /// Returns the byte that fills the page, as read beside `others` waiting threads. None if the thread has
    /// to read the page in another way.
    fn polled(polling: &Polling, lease: &AtomicU64, others: u32, file: &OwnedFd, page: u64) -> Option<u8> {
        let (mut buffer, waiting) = (Page([0; PAGE_BYTES]), AtomicU32::new(others + 1));
        let turn = polling.claim(lease, &waiting)?;
        turn.read(&waiting, file.as_fd(), page * PAGE_BYTES as u64, &mut buffer.0)?;
        assert!(buffer.0.iter().all(|byte| *byte == buffer.0[0]));
        Some(buffer.0[0])
    }

    #[test]
    fn pages_are_read_by_one_thread_and_not_while_many_wait() {
        let (polling, lease, file) = (ready(), AtomicU64::new(0), three_pages());
        for page in [0, 2, 1, 1] {
            assert_eq!(polled(&polling, &lease, 0, &file, page), Some(page as u8 + 1));
            assert_eq!(lease.load(Ordering::Relaxed), 0, "given back");
            forget_losses(&polling);
        }
        assert_eq!(polled(&polling, &lease, WAITING_MAX - 1, &file, 0), Some(1));
        assert_eq!(polled(&polling, &lease, WAITING_MAX, &file, 0), None);
        assert_eq!(polled(&Polling::default(), &lease, 0, &file, 0), None, "it has no context");
        lease.store(now_ns() + LEASE_NS, Ordering::Relaxed);
        assert_eq!(polled(&polling, &lease, 0, &file, 0), None, "another process polls");
        lease.store(0, Ordering::Relaxed);
        polling.worth.book(Some(2 * LOSS_MAX_NS), now_ns());
        assert_eq!(polled(&polling, &lease, 0, &file, 0), None, "it isn't worth it");
    }

    /// Polling only says that nothing was read. `pread` finds out why, and its caller knows what to do about
    /// it.
    #[test]
    fn what_cant_be_read_is_left_to_others_and_the_next_page_comes() {
        let (polling, lease, file) = (ready(), AtomicU64::new(0), three_pages());
        assert_eq!(polled(&polling, &lease, 0, &file, 3), None, "nothing is there");
        let only_written = rustix::fs::open("/dev/null", OFlags::WRONLY, Mode::empty()).unwrap();
        assert_eq!(polled(&polling, &lease, 0, &only_written, 0), None);
        forget_losses(&polling);
        assert_eq!(polled(&polling, &lease, 0, &file, 2), Some(3));
        for _ in 0..=LOSS_MAX_NS / LOOK_NS {
            assert_eq!(polled(&polling, &lease, 0, &only_written, 0), None);
        }
        assert_eq!(polled(&polling, &lease, 0, &file, 2), None, "it would be tried in vain");
    }

    /// Each of the four threads has a lease of its own, but only one at a time has the context.
    #[test]
    fn threads_never_get_each_others_pages() {
        let (polling, file) = (&ready(), &three_pages());
        let read = |n: u64| {
            let lease = AtomicU64::new(0);
            let bytes = (0..2000).filter_map(|i| Some((i, polled(polling, &lease, 0, file, (i + n) % 3)?)));
            bytes.map(|(i, byte)| assert_eq!(u64::from(byte), (i + n) % 3 + 1)).count()
        };
        let all: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|n| scope.spawn(move || read(n))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(all > 0);
    }

    /// Returns what looking yields. Each look takes 100 ns, and look number `end_at` finds the end. Other
    /// threads wait from look `others_from` on. At look `lost_after`, the CPU is lost for `lost_ns`.
    fn looked(end_at: u64, (lost_after, lost_ns): (u64, u64), others_from: u64) -> (bool, Option<u64>) {
        let (looks, clock) = (core::cell::Cell::new(0), core::cell::Cell::new(1_000));
        let look = || {
            looks.set(looks.get() + 1);
            let lost = if looks.get() == lost_after { lost_ns } else { 0 };
            clock.set(clock.get() + 100 + lost);
            (looks.get() >= end_at).then_some(())
        };
        let found = look_for(1_000, look, || clock.get(), || looks.get() < others_from);
        assert_eq!(found.now_ns, clock.get());
        (found.found.is_some(), found.lost_ns)
    }

    #[test]
    fn who_looks_finds_it_or_stops_where_that_is_not_worth_it() {
        const NEVER: u64 = u64::MAX;
        const KEEPS: (u64, u64) = (NEVER, 0);
        assert_eq!(looked(1, KEEPS, NEVER), (true, None));
        assert_eq!(looked(LOOK_NS / 100, KEEPS, NEVER), (true, None));
        assert_eq!(looked(LOOK_NS / 100 + 2, KEEPS, NEVER), (false, Some(LOOK_NS + 100)), "too long");
        assert_eq!(looked(300, KEEPS, 200), (false, Some(0)), "others wait, too");
        assert_eq!(
            looked(1, (1, 100_000), NEVER),
            (true, Some(100_100)),
            "it was read in the call that begins it"
        );
        assert_eq!(looked(300, (1, 30_000), NEVER), (true, None), "that call took long");
        assert_eq!(looked(200, (200, 50_000), NEVER), (true, Some(0)), "the keeper had the CPU");
        assert_eq!(looked(200, (200, LOST_NS - 100), NEVER), (true, Some(0)));
        assert_eq!(looked(300, (200, LOST_NS), NEVER), (false, Some(LOST_NS + 100)));
        assert_eq!(
            looked(200, (200, 1_000_000), NEVER),
            (true, Some(1_000_100)),
            "it is there when the CPU is back"
        );
    }

    #[test]
    fn lease_is_one_threads_until_it_is_given_back_or_has_run_out() {
        let word = AtomicU64::new(0);
        let first = Lease::take(&word, 1_000).unwrap();
        // Another thread may have looked at its clock before the first did.
        let others = [999, 1_000, 999 + LEASE_NS];
        assert!(others.iter().all(|now| Lease::take(&word, *now).is_none()));
        drop(first);
        let dead = Lease::take(&word, 1_000).unwrap();
        let second = Lease::take(&word, 1_000 + LEASE_NS).unwrap();
        drop(dead);
        assert!(Lease::take(&word, 1_000 + LEASE_NS).is_none(), "it is still the second's");
        drop(second);
        assert_eq!(word.load(Ordering::Relaxed), 0);
        // The word of a process whose clock is a year ahead.
        word.store(1 << 55, Ordering::Relaxed);
        assert!(Lease::take(&word, 1_000).is_some());
    }

    /// A CPU that another thread wants is lost for milliseconds at a time. Each page seen makes up for 10 µs
    /// of this.
    #[test]
    fn polling_pauses_where_it_loses_more_than_it_gains() {
        let worth = Worth::default();
        let mut now = 0;
        for _ in 0..50 {
            worth.book(Some(500_000), now);
            (0..50).for_each(|_| worth.book(None, now));
            now += 1_000_000;
        }
        assert!(!worth.is_pause(now));
        // On a slow disk, each look is in vain.
        let in_vain = std::iter::repeat(()).take_while(|()| {
            worth.book(Some(LOOK_NS), now);
            !worth.is_pause(now)
        });
        assert_eq!(in_vain.count() as u64, LOSS_MAX_NS / LOOK_NS);
        assert!(worth.is_pause(now + PAUSE_NS - 1) && !worth.is_pause(now + PAUSE_NS));
        now += PAUSE_NS;
        let again = std::iter::repeat(()).take_while(|()| {
            worth.book(Some(LOOK_NS), now);
            !worth.is_pause(now)
        });
        assert_eq!(again.count() as u64, LOSS_MAX_NS / LOOK_NS / 2);
    }
}

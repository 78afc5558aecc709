//! A thread that needs a page of an area looks for it again and again until it is there, instead of sleeping: *polling*.
//!
//! A device that takes 36 µs for a page takes 48 as seen by a thread that sleeps: its CPU goes to sleep, too, must be woken by an
//! interrupt, and the thread finds its way back through the scheduler. (A virtual machine, 2 CPUs, November 2026, `fio --rw=randread
//! --bs=4k --direct=1`: `--ioengine=psync` 48 to 50 µs, `--ioengine=libaio --userspace_reap --iodepth_batch_complete_min=0` 35 to 37.)
//! What that makes of faults: ARCHITECTURE.md, "Areas".
//!
//! It costs CPU time that would have been slept. So at most one thread of a whole run does it at a time; none where more than two wait, who
//! have work for each other's CPUs; and for a while none where more was lost by it than gained: where reads take longer than any
//! looking is worth, or where somebody else wanted the CPU. `--wait sleep` does without.

// UNSAFETY: a context is used by whoever has claimed it, and what it reads into is an address to the kernel.

use crate::engine::Engine;
use crate::map_lock::MapLock;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::stats::Counter;
use farpage_io::IoError;
use farpage_io::psync::read_now;
use farpage_os::aio::Aio;
use farpage_os::clock::now_ns;
use rustix::fd::BorrowedFd;

/// Reads that were waited for before a context is worth its price: with one the process takes 30 ms longer to end, or to become
/// another program.
const READS_MIN: u64 = 4096;
/// Threads that wait for a page each, at most, for one of them to poll.
const WAITING_MAX: u32 = 2;
/// Nanoseconds that a thread polls for one page. A disk that is worth polling takes half of that.
const LOOK_NS: u64 = 100_000;
/// Nobody looks for longer than this without having lost its CPU in between.
const LEASE_NS: u64 = 2 * LOOK_NS;
/// No lease ends so late.
const ANOTHER_CLOCK_NS: u64 = 1_000_000_000;
/// A page that is there at the first look, and so late, was read in the call that begins to, as without O_DIRECT: that is no better
/// than sleeping. And nothing is gained where somebody else had the CPU for so long between two looks.
const SHORT_NS: u64 = 20_000;
/// Who hasn't had the CPU for so long has lost it to somebody who wants it for a scheduler's turn (some milliseconds). The keeper,
/// or an interrupt, takes it for less than 100 µs; counting that as lost took two threads half of what they gain.
const LOST_NS: u64 = 500_000;
/// What a page that was seen is worth: so much sooner is it there.
const GAIN_NS: u64 = 10_000;
/// Lost so much more than gained, and nobody polls for so long.
const LOSS_MAX_NS: u64 = 2_000_000;
const PAUSE_NS: u64 = 200_000_000;

/// What a process has for it.
#[derive(Default)]
pub struct Polling {
    state: AtomicU32,
    context: UnsafeCell<Option<Aio>>,
    worth: Worth,
}

/// The states: it wasn't tried to make a context; the kernel has refused one; nobody polls; a thread does, and the context is its.
const UNTRIED: u32 = 0;
const REFUSED: u32 = 1;
const FREE: u32 = 2;
const TAKEN: u32 = 3;

// SAFETY: the context is made by the keeper before the state is FREE, and then used by whoever has made that TAKEN.
unsafe impl Sync for Polling {}

/// How a page came that was polled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// It was seen.
    Seen,
    /// Looking wasn't worth it any more: it was slept for.
    Late,
}

impl Polling {
    /// Makes what it takes, once. In the keeper, with no lock held.
    fn prepare(&self, map: &MapLock) {
        // The kernel maps the context where it likes. That may be a hole that the program has made and counts on, for a moment.
        let _exclusive = map.exclusive();
        let context = Aio::new().ok();
        let state = if context.is_some() { FREE } else { REFUSED };
        // SAFETY: nobody looks before the state is FREE.
        unsafe { *self.context.get() = context };
        // Ordering: Release pairs with the Acquire in `claim`.
        self.state.store(state, Ordering::Release);
    }

    /// The right to poll for one page, beside so many threads that are `waiting` for one, if it is worth it.
    fn claim<'p>(&'p self, lease: &'p AtomicU64, waiting: &AtomicU32) -> Option<Turn<'p>> {
        if self.state.load(Ordering::Relaxed) != FREE || waiting.load(Ordering::Relaxed) > WAITING_MAX {
            return None;
        }
        let now = now_ns();
        if self.worth.is_pause(now) {
            return None;
        }
        let lease = Lease::take(lease, now)?;
        // Ordering: Acquire pairs with the Release of whoever had it before, or has made it.
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Turn { polling: self, _lease: lease })
    }
}

/// A thread that polls has it.
struct Turn<'p> {
    polling: &'p Polling,
    _lease: Lease<'p>,
}

impl Turn<'_> {
    /// Reads whole pages. None if they didn't come: whoever reads them in another way finds out why.
    fn read(self, waiting: &AtomicU32, file: BorrowedFd<'_>, offset: u64, buffer: &mut [u8]) -> Option<Came> {
        let worth = &self.polling.worth;
        // SAFETY: the state is TAKEN, by this thread.
        let context = unsafe { &mut *self.polling.context.get() }.as_mut()?;
        let begun = now_ns();
        // SAFETY: the buffer is borrowed until the read is over, below.
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

/// What came of looking.
struct Looked<T> {
    found: Option<T>,
    /// Time that was lost by it; none if it was gained.
    lost_ns: Option<u64>,
    now_ns: u64,
}

/// Looks for the end of what began at `begun_ns`, as long as that is worth it.
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
            // Somebody had the CPU. Who sleeps gets it back at once.
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

/// The right to poll: of one thread of a run at a time, and not for longer than [`LEASE_NS`], should it die. No more than that:
/// what the thread uses is its process's.
struct Lease<'s> {
    until_ns: &'s AtomicU64,
    own: u64,
}

impl Lease<'_> {
    fn take(until_ns: &AtomicU64, now_ns: u64) -> Option<Lease<'_>> {
        let before = until_ns.load(Ordering::Relaxed);
        // One that ends much later is of another clock's (a time namespace).
        let is_free = before <= now_ns || before > now_ns + ANOTHER_CLOCK_NS;
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

    /// A page was seen, or so much time was lost.
    fn book(&self, lost_ns: Option<u64>, now_ns: u64) {
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
        let polling = &self.polling;
        if polling.state.load(Ordering::Relaxed) == UNTRIED
            && self.membership.settings.polls != 0
            && self.pager.stats().get(Counter::FaultArea) >= READS_MIN
        {
            polling.prepare(&self.map);
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

    /// A file of three pages, for direct reads where its file system has them.
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

    /// A CPU that somebody else had meanwhile is nothing that a test is about.
    fn forget_losses(polling: &Polling) {
        polling.worth.loss_ns.store(0, Ordering::Relaxed);
        polling.worth.pause_until_ns.store(0, Ordering::Relaxed);
    }

    /// What was read of a page, beside `others` that wait; none if it was for this thread to read it otherwise.
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

    /// Who polls only says that nothing was read: pread finds out why, and knows what to do about it.
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

    /// Each of four threads has a lease, but one at a time has the context.
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

    /// What came of looking where each look takes 100 ns, the end is there at one of them, and other threads wait from another one
    /// on; after so many looks the CPU is lost for a while.
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
            worth.book(Some(500_000), now);
            (0..50).for_each(|_| worth.book(None, now));
            now += 1_000_000;
        }
        assert!(!worth.is_pause(now));
        // A slow disk: each look is in vain.
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

//! A decorator that loses the device at a chosen request: power fails, or the cable is pulled.
//!
//! From that request on everything fails with EIO. Requests in flight at that moment fail, too. Each page of
//! a write in flight then stays old, becomes new, or becomes a mixture: new up to some sector, old behind.
//! Pages are torn independently of each other, as on a device with a queue.
//!
//! To have requests in flight to tear, the decorator keeps requests until the caller collects completions.
//! Each collection then carries out some of them, in an order drawn from the seed.
//!
//! UNSAFETY: forwards `submit`, whose contract is about addresses, and reads pages to tear them.

use crate::random::Random;
use crate::table::PlaceSet;
use crate::{Backend, Busy, Completion, DEPTH, IoError, Op, Request, SEGMENTS_MAX, Segment, Wait};
use farpage_core::units::{PAGE_BYTES, PageBytes};

/// Bytes that a device writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// When the device is lost.
#[derive(Clone, Copy, Debug)]
pub struct CrashPlan {
    /// One seed gives one order of requests and one way of tearing.
    pub seed: u64,
    /// The request, counted from 0, that finds the device gone; `u64::MAX` for never.
    pub at_request: u64,
}

/// A request that was taken and hasn't been carried out.
#[derive(Clone, Copy)]
struct Pending {
    op: Op,
    offset: u64,
    token: u64,
    count: usize,
    segments: [Segment; SEGMENTS_MAX],
}

/// Loses `B` as planned.
pub struct Crash<B> {
    inner: B,
    plan: CrashPlan,
    random: Random,
    requests: u64,
    crashed: bool,
    taken: PlaceSet,
    /// Taken requests that fail, because the device was lost while they were in flight or before.
    failed: PlaceSet,
    table: [Pending; DEPTH],
    /// The old page, to be mixed with the new one.
    scratch: PageBytes,
}

impl<B: Backend> Crash<B> {
    /// Makes a device that still works.
    pub fn new(inner: B, plan: CrashPlan) -> Self {
        assert_eq!(inner.in_flight(), 0);
        let vacant =
            Pending { op: Op::Read, offset: 0, token: 0, count: 0, segments: [Segment::NONE; SEGMENTS_MAX] };
        Crash {
            inner,
            plan,
            random: Random::new(plan.seed),
            requests: 0,
            crashed: false,
            taken: PlaceSet::NONE,
            failed: PlaceSet::NONE,
            table: [vacant; DEPTH],
            scratch: PageBytes::ZERO,
        }
    }

    /// Returns whether the device is lost.
    pub const fn is_crashed(&self) -> bool {
        self.crashed
    }

    /// Returns the inner back end, which shows what survived the crash. Nothing may be in flight, because no
    /// caller would get the memory of those requests back.
    pub fn into_inner(self) -> B {
        assert_eq!(self.in_flight(), 0);
        self.inner
    }

    /// Loses the device now.
    pub fn crash(&mut self) {
        self.crashed = true;
        for place in self.taken.iter() {
            if self.failed.contains(place) {
                continue;
            }
            if self.table[place].op == Op::Write {
                self.tear(self.table[place]);
            }
            self.failed.insert(place);
        }
    }

    /// Leaves each page of a write old, new, or mixed.
    fn tear(&mut self, pending: Pending) {
        for (index, &segment) in pending.segments[..pending.count].iter().enumerate() {
            let offset = pending.offset + (index * PAGE_BYTES) as u64;
            match self.random.below(3) {
                0 => {}
                1 => {
                    // An error here is one more page that wasn't written.
                    let _ = self.carry_out(Op::Write, offset, &[segment]);
                }
                _ => self.tear_page(offset, segment),
            }
        }
    }

    /// Writes the new page up to a sector drawn from the seed, and the old page behind.
    fn tear_page(&mut self, offset: u64, new: Segment) {
        let sectors = 1 + self.random.below((PAGE_BYTES / SECTOR_BYTES - 1) as u64) as usize;
        let scratch = Segment { base: (&raw mut self.scratch.0).cast() };
        if self.carry_out(Op::Read, offset, &[scratch]).is_err() {
            self.scratch = PageBytes::ZERO;
        }
        // SAFETY: `new` is a valid page that doesn't change, by the contract of `submit`, since its
        // completion hasn't been returned. `scratch` is our own, so the two don't overlap. Both have 8
        // sectors, and `sectors` is at most 7.
        unsafe { self.scratch.0.as_mut_ptr().copy_from_nonoverlapping(new.base, sectors * SECTOR_BYTES) };
        let scratch = Segment { base: (&raw mut self.scratch.0).cast() };
        let _ = self.carry_out(Op::Write, offset, &[scratch]);
    }

    /// Does one request on the inner back end, from beginning to end.
    fn carry_out(&mut self, op: Op, offset: u64, segments: &[Segment]) -> Result<(), IoError> {
        let request = Request { op, offset, segments, token: 0 };
        // SAFETY: the segments are either our scratch page or those of a request in flight. The request's
        // caller vouches for them until we return its completion. The inner back end is done with them when
        // this function returns.
        unsafe { self.inner.submit(&request) }.expect("nothing else is in flight inside");
        let mut out = [Completion::EMPTY; 1];
        while self.inner.complete(Wait::One, &mut out) == 0 {}
        out[0].result
    }

    /// Carries one request out and returns its completion.
    fn take(&mut self, place: usize) -> Completion {
        let pending = self.table[place];
        let result = if self.failed.contains(place) {
            self.failed.remove(place);
            Err(IoError::EIO)
        } else {
            self.carry_out(pending.op, pending.offset, &pending.segments[..pending.count])
        };
        self.taken.remove(place);
        Completion { token: pending.token, result }
    }

    /// Chooses one of the requests taken, drawn from the seed.
    fn choose(&mut self) -> Option<usize> {
        let count = self.taken.count() as u64;
        let nth = self.random.below(count.max(1)) as usize;
        self.taken.iter().nth(nth)
    }
}

impl<B: Backend> Backend for Crash<B> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        request.check();
        let place = self.taken.vacant_below(DEPTH)?;
        if self.requests == self.plan.at_request && !self.crashed {
            self.crash();
        }
        self.requests += 1;
        let pending = &mut self.table[place];
        (pending.op, pending.offset, pending.token) = (request.op, request.offset, request.token);
        pending.count = request.segments.len();
        pending.segments[..pending.count].copy_from_slice(request.segments);
        self.taken.insert(place);
        if self.crashed {
            self.failed.insert(place);
        }
        Ok(())
    }

    fn flush(&mut self) {}

    /// Stops before a completion with a probability of one half, so that requests stay in flight. The first
    /// completion of [`Wait::One`] always comes. Once the device is lost, all completions come.
    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        let mut count = 0;
        while count < out.len() {
            let must = wait == Wait::One && count == 0;
            if !must && !self.crashed && self.random.chance(500_000) {
                break;
            }
            let Some(place) = self.choose() else { break };
            out[count] = self.take(place);
            count += 1;
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.taken.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mem;
    use crate::conformance::{page_of, read, write};

    #[test]
    fn everything_fails_from_the_chosen_request_on_and_what_was_before_survives() {
        let mut device = vec![0; 4 * PAGE_BYTES];
        let mut crash = Crash::new(Mem::new(&mut device), CrashPlan { seed: 1, at_request: 2 });
        write(&mut crash, 0, &[page_of(1)]).unwrap();
        write(&mut crash, 1, &[page_of(2)]).unwrap();
        assert_eq!(write(&mut crash, 0, &[page_of(3)]), Err(IoError::EIO));
        assert_eq!(read(&mut crash, 0, &mut [page_of(0)]), Err(IoError::EIO));
        assert!(crash.is_crashed());
        let survived = crash.into_inner();
        assert_eq!(survived.contents()[..PAGE_BYTES], page_of(1).0);
        assert_eq!(survived.contents()[PAGE_BYTES..2 * PAGE_BYTES], page_of(2).0);
    }

    #[test]
    fn pages_in_flight_at_the_crash_are_old_new_or_new_up_to_a_sector() {
        let (mut old, mut new, mut mixed) = (0, 0, 0);
        for seed in 0..40 {
            let mut device = vec![0; 4 * PAGE_BYTES];
            let mut crash = Crash::new(Mem::new(&mut device), CrashPlan { seed, at_request: u64::MAX });
            let mut page = page_of(1);
            page.0.fill(7);
            let segments = [Segment { base: page.0.as_mut_ptr() }; 4];
            let request = Request { op: Op::Write, offset: 0, segments: &segments, token: 5 };
            // SAFETY: `page` outlives the request, and no code writes it.
            unsafe { crash.submit(&request) }.unwrap();
            crash.crash();
            let mut out = [Completion::EMPTY; 2];
            assert_eq!(crash.complete(Wait::One, &mut out), 1);
            assert_eq!(out[0], Completion { token: 5, result: Err(IoError::EIO) });
            for page in crash.into_inner().contents().chunks(PAGE_BYTES) {
                let written = page.iter().take_while(|&&byte| byte == 7).count();
                assert!(page[written..].iter().all(|&byte| byte == 0));
                assert!(written.is_multiple_of(SECTOR_BYTES));
                match written {
                    0 => old += 1,
                    PAGE_BYTES => new += 1,
                    _ => mixed += 1,
                }
            }
        }
        assert!(old > 0 && new > 0 && mixed > 0);
    }
}

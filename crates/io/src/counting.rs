//! A decorator that counts what passes: requests, pages and bytes by direction, errors, refusals and depth.
//!
//! UNSAFETY: forwards `submit`, whose contract is about addresses.

use crate::{Backend, Busy, Completion, Op, Request, Wait};

/// Counts of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCounts {
    /// Requests taken.
    pub requests: u64,
    /// Pages in these requests.
    pub segments: u64,
    /// Bytes in these requests.
    pub bytes: u64,
}

/// Counts of what passed through a [`Counting`]. Counters only rise, so readers subtract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// From the device.
    pub reads: OpCounts,
    /// To the device.
    pub writes: OpCounts,
    /// Completions returned.
    pub completions: u64,
    /// Completions that carried an error.
    pub errors: u64,
    /// Requests refused with [`Busy`].
    pub refusals: u64,
    /// Most requests that were in flight at once.
    pub in_flight_max: u64,
}

/// Counts what passes to and from `B`.
pub struct Counting<B> {
    inner: B,
    counts: IoCounts,
}

impl<B: Backend> Counting<B> {
    /// Makes a decorator that counts from zero.
    pub fn new(inner: B) -> Self {
        Counting { inner, counts: IoCounts::default() }
    }
    /// Returns the counts so far.
    pub const fn counts(&self) -> &IoCounts {
        &self.counts
    }
    /// Returns the inner back end.
    pub const fn inner(&mut self) -> &mut B {
        &mut self.inner
    }
}

impl<B: Backend> Backend for Counting<B> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        // SAFETY: the inner `submit` has the same contract, and our caller keeps it.
        let taken = unsafe { self.inner.submit(request) };
        if taken.is_err() {
            self.counts.refusals += 1;
            return taken;
        }
        let counts = match request.op {
            Op::Read => &mut self.counts.reads,
            Op::Write => &mut self.counts.writes,
        };
        counts.requests += 1;
        counts.segments += request.segments.len() as u64;
        counts.bytes += request.bytes() as u64;
        self.counts.in_flight_max = self.counts.in_flight_max.max(self.inner.in_flight() as u64);
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        let count = self.inner.complete(wait, out);
        self.counts.completions += count as u64;
        self.counts.errors +=
            out[..count].iter().filter(|completion| completion.result.is_err()).count() as u64;
        count
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{page_of, read, write};
    use crate::{DEPTH, Mem, Segment};
    use farpage_core::units::PAGE_BYTES;

    #[test]
    fn counts_requests_pages_errors_refusals_and_depth() {
        let mut device = vec![0; 4 * PAGE_BYTES];
        let mut counting = Counting::new(Mem::new(&mut device));
        let mut three = [page_of(1), page_of(2), page_of(3)];
        write(&mut counting, 0, &three).unwrap();
        read(&mut counting, 0, &mut three[..2]).unwrap();
        read(&mut counting, 4, &mut three[..1]).unwrap_err();
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        assert_eq!(counting.counts().writes, OpCounts { requests: 1, segments: 3, bytes: bytes(3) });
        assert_eq!(counting.counts().reads, OpCounts { requests: 2, segments: 3, bytes: bytes(3) });
        assert_eq!((counting.counts().completions, counting.counts().errors), (3, 1));
        assert_eq!(counting.counts().in_flight_max, 1);

        let segments = [Segment { base: three[0].0.as_mut_ptr() }];
        for token in 0..=DEPTH as u64 {
            let request = Request { op: Op::Write, offset: 0, segments: &segments, token };
            // SAFETY: the page outlives the back end and no code writes it meanwhile.
            let taken = unsafe { counting.submit(&request) };
            assert_eq!(taken.is_err(), token == DEPTH as u64);
        }
        assert_eq!((counting.counts().refusals, counting.counts().in_flight_max), (1, DEPTH as u64));
    }
}

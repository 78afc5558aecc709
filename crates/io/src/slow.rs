//! A decorator for simulated time: a completion is held back until the clock has reached its due time.
//!
//! Each request draws its latency from the seed when it is submitted. Completions therefore come back in
//! another order than the requests, and in the same order in every run. Time moves through [`Slow::advance`].
//! Time moves also when the caller blocks in [`Wait::One`] and no completion is due. The clock then jumps to
//! the earliest due time, which is what waiting means in a simulation. The data moves at once. Only the
//! completion is late.
//!
//! UNSAFETY: forwards `submit`, whose contract is about addresses.

use crate::random::Random;
use crate::table::PlaceSet;
use crate::{Backend, Busy, Completion, DEPTH, IoError, Request, Wait};

/// How late completions are, in ticks of the user's clock.
#[derive(Clone, Copy, Debug)]
pub struct SlowPlan {
    /// One seed gives one sequence of latencies.
    pub seed: u64,
    /// Shortest latency.
    pub latency_ticks_min: u64,
    /// Longest latency. All latencies in between are equally likely.
    pub latency_ticks_max: u64,
}

/// A request on its way, or finished and not yet due.
#[derive(Clone, Copy)]
struct Held {
    token: u64,
    due: u64,
    /// Set once the inner back end has finished the request.
    result: Option<Result<(), IoError>>,
}

/// Holds completions of `B` back until they are due.
pub struct Slow<B> {
    inner: B,
    plan: SlowPlan,
    random: Random,
    now: u64,
    taken: PlaceSet,
    held: [Held; DEPTH],
}

impl<B: Backend> Slow<B> {
    /// Makes a back end whose clock starts at tick 0.
    pub fn new(inner: B, plan: SlowPlan) -> Self {
        assert!(plan.latency_ticks_min <= plan.latency_ticks_max);
        let held = [Held { token: 0, due: 0, result: None }; DEPTH];
        Slow { inner, plan, random: Random::new(plan.seed), now: 0, taken: PlaceSet::NONE, held }
    }

    /// Lets time pass.
    pub const fn advance(&mut self, ticks: u64) {
        self.now += ticks;
    }

    /// Returns the time on the clock.
    pub const fn now(&self) -> u64 {
        self.now
    }

    /// Returns when the next completion is due, if anything is in flight. A driver may advance the clock up
    /// to that time.
    pub fn next_due(&self) -> Option<u64> {
        self.earliest().map(|place| self.held[place].due)
    }

    /// Returns the inner back end.
    pub const fn inner(&mut self) -> &mut B {
        &mut self.inner
    }

    fn latency(&mut self) -> u64 {
        let spread = self.plan.latency_ticks_max - self.plan.latency_ticks_min;
        self.plan.latency_ticks_min + self.random.below(spread.saturating_add(1))
    }

    fn earliest(&self) -> Option<usize> {
        self.taken.iter().min_by_key(|&place| self.held[place].due)
    }

    /// Notes the requests that the inner back end has finished.
    fn collect(&mut self, wait: Wait) {
        let mut finished = [Completion::EMPTY; DEPTH];
        let count = self.inner.complete(wait, &mut finished);
        for completion in &finished[..count] {
            let held = &mut self.held[completion.token as usize];
            assert!(held.result.is_none(), "a token came back twice");
            held.result = Some(completion.result);
        }
    }

    /// Takes the earliest request that is both due and finished.
    fn take_due(&mut self) -> Option<Completion> {
        let ready = |&place: &usize| self.held[place].due <= self.now && self.held[place].result.is_some();
        let place = self.taken.iter().filter(ready).min_by_key(|&place| self.held[place].due)?;
        self.taken.remove(place);
        let result = self.held[place].result.take()?;
        Some(Completion { token: self.held[place].token, result })
    }

    /// Waits in simulated time until a request is due, and in real time until it is finished.
    fn wait_for_earliest(&mut self) {
        let Some(place) = self.earliest() else { return };
        while self.held[place].result.is_none() {
            self.collect(Wait::One);
        }
        self.now = self.now.max(self.held[place].due);
    }
}

impl<B: Backend> Backend for Slow<B> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        let place = self.taken.vacant_below(DEPTH)?;
        // SAFETY: our caller vouches for the memory until we return the completion. The inner completion,
        // which ends the inner use, comes before that.
        unsafe { self.inner.submit(&Request { token: place as u64, ..*request }) }?;
        let due = self.now + self.latency();
        self.taken.insert(place);
        self.held[place] = Held { token: request.token, due, result: None };
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        if out.is_empty() {
            return 0;
        }
        self.collect(Wait::No);
        if wait == Wait::One && self.next_due().is_some() {
            self.wait_for_earliest();
        }
        let mut count = 0;
        while count < out.len()
            && let Some(completion) = self.take_due()
        {
            out[count] = completion;
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
    use crate::conformance::page_of;
    use crate::{Mem, Op, Segment};
    use farpage_core::units::{PAGE_BYTES, PageBytes};

    const PLAN: SlowPlan = SlowPlan { seed: 7, latency_ticks_min: 10, latency_ticks_max: 100 };

    fn submit_all(slow: &mut Slow<Mem<'_>>, page: &mut PageBytes, count: u64) {
        let segments = [Segment { base: page.0.as_mut_ptr() }];
        for token in 0..count {
            let request = Request { op: Op::Write, offset: 0, segments: &segments, token };
            // SAFETY: `page` outlives every use of the back end in these tests, and no code writes it.
            unsafe { slow.submit(&request) }.unwrap();
        }
    }

    #[test]
    fn nothing_comes_back_before_it_is_due_and_everything_after() {
        let (mut device, mut page) = (vec![0; PAGE_BYTES], page_of(1));
        let mut slow = Slow::new(Mem::new(&mut device), PLAN);
        submit_all(&mut slow, &mut page, 20);
        let mut out = [Completion::EMPTY; DEPTH];
        slow.advance(9);
        assert_eq!(slow.complete(Wait::No, &mut out), 0);
        let due = slow.next_due().unwrap();
        slow.advance(due - slow.now());
        assert!(slow.complete(Wait::No, &mut out) >= 1);
        slow.advance(100);
        slow.complete(Wait::No, &mut out);
        assert_eq!(slow.in_flight(), 0);
    }

    #[test]
    fn completions_reorder_and_the_seed_repeats_the_order() {
        let order = || {
            let (mut device, mut page) = (vec![0; PAGE_BYTES], page_of(1));
            let mut slow = Slow::new(Mem::new(&mut device), PLAN);
            submit_all(&mut slow, &mut page, 20);
            let mut tokens = Vec::new();
            let mut out = [Completion::EMPTY; 1];
            while slow.complete(Wait::One, &mut out) == 1 {
                tokens.push(out[0].token);
            }
            tokens
        };
        let (first, second) = (order(), order());
        assert_eq!(first, second);
        assert!(!first.is_sorted());
        assert_eq!(first.len(), 20);
    }
}

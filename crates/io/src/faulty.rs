//! A decorator that fails as devices do.
//!
//! # The fault model
//!
//! | fault | what happens to the device | what is reported |
//! |---|---|---|
//! | read error | nothing; the segments hold rubbish | the chosen error |
//! | write error | nothing is written | the chosen error |
//! | torn write | a strict prefix of the pages is written | the chosen error |
//! | lost write | nothing is written | success |
//! | flip | nothing; one bit of one page read is wrong | success |
//! | misdirection | the page before (at the start: behind) is read or written | success |
//!
//! The first three are honest: the layers above must keep the page or report it as lost. The last three are
//! lies: the checksum of a page must find them. A fault hits with its probability, drawn from the seed, or it
//! hits the n-th request of its kind. A request suffers at most one fault, and an earlier row goes first.
//! [`crate::Crash`] tears inside a page.
//!
//! UNSAFETY: forwards `submit`, whose contract is about addresses, and damages the bytes that were read.

use crate::random::Random;
use crate::table::PlaceSet;
use crate::{Backend, Busy, Completion, DEPTH, IoError, Op, Request, Segment, Wait};
use farpage_core::units::PAGE_BYTES;

/// Which faults happen, and how often. Probabilities are parts per million of the requests of that direction.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    /// One seed gives one sequence of faults.
    pub seed: u64,
    /// The error that failing reads report.
    pub read_error: IoError,
    /// How often a read fails.
    pub read_error_ppm: u32,
    /// The read, counted from 0, that fails for certain.
    pub read_error_at: Option<u64>,
    /// The error that failing and torn writes report.
    pub write_error: IoError,
    /// How often a write fails.
    pub write_error_ppm: u32,
    /// The write, counted from 0, that fails for certain.
    pub write_error_at: Option<u64>,
    /// How often a write is torn.
    pub torn_write_ppm: u32,
    /// How often a write is lost.
    pub lost_write_ppm: u32,
    /// How often a bit of a read flips.
    pub flip_ppm: u32,
    /// How often a read or a write goes to the wrong place.
    pub misdirect_ppm: u32,
}

impl FaultPlan {
    /// Returns a plan without faults, from which other plans start.
    pub const fn none(seed: u64) -> FaultPlan {
        FaultPlan {
            seed,
            read_error: IoError::EIO,
            read_error_ppm: 0,
            read_error_at: None,
            write_error: IoError::EIO,
            write_error_ppm: 0,
            write_error_at: None,
            torn_write_ppm: 0,
            lost_write_ppm: 0,
            flip_ppm: 0,
            misdirect_ppm: 0,
        }
    }
}

/// Faults that were brought about, so that a test can check that each was noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed with nothing written.
    pub write_errors: u64,
    /// Writes that failed half-way.
    pub torn_writes: u64,
    /// Writes that never happened and succeeded.
    pub lost_writes: u64,
    /// Reads with a wrong bit (if the read succeeded otherwise).
    pub flips: u64,
    /// Reads and writes of the wrong place.
    pub misdirections: u64,
}

/// The fault that a request will suffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Sound,
    Error,
    /// The write stops after this many pages.
    Torn(usize),
    Lost,
    /// This bit flips, counted from the first bit of the first page.
    Flip(u64),
    Misdirected,
}

/// A request that was taken.
#[derive(Clone, Copy)]
struct Accepted {
    token: u64,
    /// Reported in place of the inner back end's result.
    error: Option<IoError>,
    /// The result to report, set if the inner back end doesn't have the request.
    over: Option<Result<(), IoError>>,
    /// The page, and the bit in it, to flip once the page has been read.
    flip: Option<(Segment, usize)>,
}

/// Makes requests to `B` fail as planned.
pub struct Faulty<B> {
    inner: B,
    plan: FaultPlan,
    random: Random,
    counts: FaultCounts,
    reads: u64,
    writes: u64,
    places: PlaceSet,
    /// Places whose request the inner back end doesn't have.
    over: PlaceSet,
    table: [Accepted; DEPTH],
}

impl<B: Backend> Faulty<B> {
    /// Makes a decorator that brings about faults from the first request on.
    pub fn new(inner: B, plan: FaultPlan) -> Self {
        let vacant = Accepted { token: 0, error: None, over: None, flip: None };
        Faulty {
            inner,
            plan,
            random: Random::new(plan.seed),
            counts: FaultCounts::default(),
            reads: 0,
            writes: 0,
            places: PlaceSet::NONE,
            over: PlaceSet::NONE,
            table: [vacant; DEPTH],
        }
    }

    /// Returns the faults brought about so far.
    pub const fn counts(&self) -> &FaultCounts {
        &self.counts
    }

    /// Changes the plan for requests to come. The seed is used at creation only.
    pub const fn set_plan(&mut self, plan: FaultPlan) {
        self.plan = plan;
    }

    /// Returns the inner back end.
    pub const fn inner(&mut self) -> &mut B {
        &mut self.inner
    }

    /// Draws a request's fate. Every call draws the same count of numbers, so that runs with different plans
    /// stay comparable.
    fn draw(&self, random: &mut Random, request: &Request<'_>) -> Fate {
        let plan = &self.plan;
        let (error_ppm, error_now) = match request.op {
            Op::Read => (plan.read_error_ppm, plan.read_error_at == Some(self.reads)),
            Op::Write => (plan.write_error_ppm, plan.write_error_at == Some(self.writes)),
        };
        let is_write = request.op == Op::Write;
        let error = random.chance(error_ppm) || error_now;
        let torn = random.chance(plan.torn_write_ppm) && is_write;
        let lost = random.chance(plan.lost_write_ppm) && is_write;
        let flipped = random.chance(plan.flip_ppm) && !is_write;
        let misdirected = random.chance(plan.misdirect_ppm);
        let detail = random.next();
        match () {
            () if error => Fate::Error,
            () if torn => Fate::Torn((detail % request.segments.len() as u64) as usize),
            () if lost => Fate::Lost,
            () if flipped => Fate::Flip(detail % (request.bytes() as u64 * 8)),
            () if misdirected => Fate::Misdirected,
            () => Fate::Sound,
        }
    }

    fn count(&mut self, op: Op, fate: Fate) {
        match op {
            Op::Read => self.reads += 1,
            Op::Write => self.writes += 1,
        }
        match fate {
            Fate::Sound => {}
            Fate::Error if op == Op::Read => self.counts.read_errors += 1,
            Fate::Error => self.counts.write_errors += 1,
            Fate::Torn(_) => self.counts.torn_writes += 1,
            Fate::Lost => self.counts.lost_writes += 1,
            Fate::Flip(_) => self.counts.flips += 1,
            Fate::Misdirected => self.counts.misdirections += 1,
        }
    }

    fn error_of(&self, op: Op) -> IoError {
        if op == Op::Read { self.plan.read_error } else { self.plan.write_error }
    }

    /// Hands out the completions of requests that the inner back end never got.
    fn take_over(&mut self, out: &mut [Completion]) -> usize {
        let mut count = 0;
        while count < out.len()
            && let Some(place) = self.over.first()
        {
            self.over.remove(place);
            self.places.remove(place);
            let Accepted { token, over, .. } = self.table[place];
            out[count] = Completion { token, result: over.unwrap_or(Ok(())) };
            count += 1;
        }
        count
    }

    /// Turns an inner completion into the one that the caller gets.
    fn translate(&mut self, completion: &mut Completion) {
        let place = completion.token as usize;
        self.places.remove(place);
        let Accepted { token, error, flip, .. } = self.table[place];
        completion.token = token;
        if let Some(error) = error {
            completion.result = Err(error);
        }
        if let (Ok(()), Some((segment, bit))) = (completion.result, flip) {
            // SAFETY: `bit / 8` lies inside the page. By the contract of `submit` the page is still ours,
            // because its completion is only now about to be returned.
            unsafe { *segment.base.add(bit / 8) ^= 1 << (bit % 8) };
        }
    }
}

/// Fills the segments of a read that failed. No code may rely on their content.
const RUBBISH: u8 = 0xa5;

/// Returns the wrong offset to which a request at `offset` goes.
const fn misdirected(offset: u64) -> u64 {
    if offset == 0 { PAGE_BYTES as u64 } else { offset - PAGE_BYTES as u64 }
}

impl<B: Backend> Backend for Faulty<B> {
    unsafe fn submit(&mut self, request: &Request<'_>) -> Result<(), Busy> {
        request.check();
        let place = self.places.vacant_below(DEPTH)?;
        // The new state is kept only if the request is taken. A refused request must not shift the faults of
        // later ones.
        let mut random = self.random.clone();
        let fate = self.draw(&mut random, request);
        let error = self.error_of(request.op);

        let mut taken = Accepted { token: request.token, error: None, over: None, flip: None };
        let mut inner = Request { token: place as u64, ..*request };
        match fate {
            Fate::Sound => {}
            Fate::Error | Fate::Torn(0) => taken.over = Some(Err(error)),
            Fate::Lost => taken.over = Some(Ok(())),
            Fate::Torn(pages) => {
                inner.segments = &request.segments[..pages];
                taken.error = Some(error);
            }
            Fate::Flip(bit) => {
                let bits_per_page = PAGE_BYTES as u64 * 8;
                let segment = request.segments[(bit / bits_per_page) as usize];
                taken.flip = Some((segment, (bit % bits_per_page) as usize));
            }
            Fate::Misdirected => inner.offset = misdirected(request.offset),
        }
        if taken.over.is_none() {
            // SAFETY: the segments are all or the first of those that our caller vouches for. We return the
            // completion only after the inner one.
            unsafe { self.inner.submit(&inner) }?;
        } else {
            self.over.insert(place);
            if request.op == Op::Read {
                for segment in request.segments {
                    // SAFETY: for a read our caller gives us each segment exclusively, and each is a valid
                    // page.
                    unsafe { segment.base.write_bytes(RUBBISH, PAGE_BYTES) };
                }
            }
        }
        self.places.insert(place);
        self.table[place] = taken;
        self.random = random;
        self.count(request.op, fate);
        Ok(())
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn complete(&mut self, wait: Wait, out: &mut [Completion]) -> usize {
        let own = self.take_over(out);
        let rest = &mut out[own..];
        let inner = self.inner.complete(if own > 0 { Wait::No } else { wait }, rest);
        for completion in &mut rest[..inner] {
            self.translate(completion);
        }
        own + inner
    }

    fn in_flight(&self) -> usize {
        self.places.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mem;
    use crate::conformance::{page_of, pages_of, read, write};
    use crate::random::PPM;

    fn with_plan(plan: FaultPlan, test: impl FnOnce(&mut Faulty<Mem<'_>>)) {
        let mut device = vec![0; 8 * PAGE_BYTES];
        test(&mut Faulty::new(Mem::new(&mut device), plan));
    }

    #[test]
    fn nth_read_and_nth_write_fail_with_the_chosen_error_and_only_they() {
        let mut plan = FaultPlan::none(1);
        (plan.write_error_at, plan.write_error) = (Some(1), IoError::NoSpace);
        plan.read_error_at = Some(2);
        with_plan(plan, |faulty| {
            let results = [0, 1, 2].map(|page| write(faulty, page, &[page_of(7)]));
            assert_eq!(results, [Ok(()), Err(IoError::NoSpace), Ok(())]);
            let mut back = [page_of(1)];
            let results = [0, 1, 2].map(|page| read(faulty, page, &mut back));
            assert_eq!(results, [Ok(()), Ok(()), Err(IoError::EIO)]);
            assert!(back[0].0.iter().all(|&byte| byte == RUBBISH));
            // The failed write left the page as it was.
            read(faulty, 1, &mut back).unwrap();
            assert!(back[0].0.iter().all(|&byte| byte == 0));
            assert_eq!((faulty.counts().read_errors, faulty.counts().write_errors), (1, 1));
        });
    }

    #[test]
    fn torn_write_leaves_a_strict_prefix_and_says_so() {
        for seed in 0..20 {
            with_plan(FaultPlan { torn_write_ppm: PPM, ..FaultPlan::none(seed) }, |faulty| {
                let written = pages_of(4, 1);
                assert_eq!(write(faulty, 0, &written), Err(IoError::EIO));
                let mut back = pages_of(4, 9);
                read(faulty, 0, &mut back).unwrap();
                let prefix = back.iter().zip(&written).take_while(|(a, b)| a.0 == b.0).count();
                assert!(prefix < 4);
                assert!(back[prefix..].iter().all(|page| page.0.iter().all(|&byte| byte == 0)));
            });
        }
    }

    #[test]
    fn lost_write_succeeds_and_leaves_nothing() {
        with_plan(FaultPlan { lost_write_ppm: PPM, ..FaultPlan::none(1) }, |faulty| {
            write(faulty, 0, &[page_of(1)]).unwrap();
            let mut back = [page_of(2)];
            read(faulty, 0, &mut back).unwrap();
            assert!(back[0].0.iter().all(|&byte| byte == 0));
        });
    }

    #[test]
    fn flip_changes_exactly_one_bit_of_the_read_and_none_of_the_device() {
        with_plan(FaultPlan { flip_ppm: PPM, ..FaultPlan::none(3) }, |faulty| {
            let written = pages_of(4, 1);
            write(faulty, 0, &written).unwrap();
            let mut back = pages_of(4, 9);
            read(faulty, 0, &mut back).unwrap();
            let bits = |(a, b): (&u8, &u8)| (a ^ b).count_ones();
            let wrong: u32 =
                back.iter().zip(&written).map(|(a, b)| a.0.iter().zip(&b.0).map(bits).sum::<u32>()).sum();
            assert_eq!(wrong, 1);
            faulty.set_plan(FaultPlan::none(0));
            read(faulty, 0, &mut back).unwrap();
            assert!(back.iter().zip(&written).all(|(a, b)| a.0 == b.0));
        });
    }

    #[test]
    fn misdirected_write_lands_on_the_page_before() {
        with_plan(FaultPlan { misdirect_ppm: PPM, ..FaultPlan::none(3) }, |faulty| {
            write(faulty, 3, &[page_of(1)]).unwrap();
            faulty.set_plan(FaultPlan::none(0));
            let mut back = pages_of(2, 9);
            read(faulty, 2, &mut back).unwrap();
            assert_eq!(back[0].0, page_of(1).0);
            assert!(back[1].0.iter().all(|&byte| byte == 0));
        });
    }

    #[test]
    fn same_seed_fails_the_same_requests() {
        let failures = |seed| {
            let mut failed = Vec::new();
            with_plan(FaultPlan { write_error_ppm: 300_000, ..FaultPlan::none(seed) }, |faulty| {
                failed = (0..200).map(|_| write(faulty, 0, &[page_of(1)]).is_err()).collect();
            });
            failed
        };
        assert_eq!(failures(5), failures(5));
        assert_ne!(failures(5), failures(6));
        let count = failures(5).iter().filter(|&&failed| failed).count();
        assert!((30..90).contains(&count), "{count} of 200 at 30 %");
    }
}

//! The suite that every back end passes, bare and inside every decorator, and the comparison of all of them
//! with one naive model. Here are also helpers for the tests of the other modules: pages, scratch files, and
//! reads and writes from beginning to end.
//!
//! UNSAFETY: `Backend::submit` takes addresses.

use crate::{
    Backend, Busy, Completion, Counting, Crash, CrashPlan, DEPTH, FaultPlan, Faulty, IoError, Mem, Op, Psync,
    Request, SEGMENTS_MAX, Segment, Slow, SlowPlan, Uring, Wait, read_now,
};
use farpage_core::units::{PAGE_BYTES, PageBytes};
use proptest::prelude::*;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns a page whose every byte depends on `tag` and on its position.
pub(crate) fn page_of(tag: u64) -> PageBytes {
    let mut page = PageBytes::ZERO;
    for (index, word) in page.0.chunks_exact_mut(8).enumerate() {
        let value =
            (tag.wrapping_mul(1000).wrapping_add(index as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    page
}

/// Returns pages with different contents.
pub(crate) fn pages_of(count: usize, tag: u64) -> Vec<PageBytes> {
    (0..count).map(|index| page_of(tag * 1_000_000 + index as u64)).collect()
}

fn is_zero(page: &PageBytes) -> bool {
    page.0.iter().all(|&byte| byte == 0)
}

/// A file of a given number of pages, opened with O_DIRECT where the file system has it.
pub(crate) struct Scratch {
    file: File,
    path: tempfile::TempPath,
}

impl Scratch {
    pub(crate) fn new(pages: usize) -> Scratch {
        let named = tempfile::NamedTempFile::new_in(std::env::temp_dir()).unwrap();
        named.as_file().set_len((pages * PAGE_BYTES) as u64).unwrap();
        let path = named.into_temp_path();
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(&path);
        Scratch { file: direct.or_else(|_| options.open(&path)).unwrap(), path }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns a ring, or says why the test is skipped. On CI a ring must be available.
pub(crate) fn uring_or_skip(fd: BorrowedFd<'_>, entries: u32) -> Option<Uring> {
    uring_or_skip_keeping(fd, None, entries)
}

pub(crate) fn uring_or_skip_keeping(
    fd: BorrowedFd<'_>,
    kept: Option<BorrowedFd<'_>>,
    entries: u32,
) -> Option<Uring> {
    match Uring::new(fd, kept, entries) {
        Ok(uring) => Some(uring),
        Err(error) => {
            let on_ci = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!on_ci, "{error}, and CI must not skip this");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// A back end that owns the pages of its requests until it returns their completions.
///
/// A failed assertion leaks the pages of requests in flight. The back end is dropped later than the test's
/// own memory. Until then the kernel may read and write these pages.
struct Owning<B> {
    backend: B,
    /// Requests in flight: token and pages.
    requests: Vec<(u64, ManuallyDrop<Vec<PageBytes>>)>,
}

impl<B: Backend> Owning<B> {
    fn new(backend: B) -> Self {
        assert_eq!(backend.in_flight(), 0);
        Owning { backend, requests: Vec::new() }
    }

    /// Submits a request for adjacent pages of the area, from `first` on.
    fn submit(&mut self, op: Op, first: u64, pages: Vec<PageBytes>, token: u64) -> Result<(), Busy> {
        let mut pages = ManuallyDrop::new(pages);
        let segments: Vec<Segment> =
            pages.iter_mut().map(|page| Segment { base: (&raw mut page.0).cast() }).collect();
        let request = Request { op, offset: first * PAGE_BYTES as u64, segments: &segments, token };
        // SAFETY: each segment is an initialised page of `pages`, and none appears twice. No code frees or
        // touches the pages before `take_back`, which follows the completion. A panic leaks them.
        let taken = unsafe { self.backend.submit(&request) };
        if taken.is_ok() {
            self.requests.push((token, pages));
        } else {
            drop(ManuallyDrop::into_inner(pages));
        }
        taken
    }

    fn flush(&mut self) {
        self.backend.flush();
    }

    fn in_flight(&self) -> usize {
        self.backend.in_flight()
    }

    /// Returns up to `out_max` completions.
    fn complete(&mut self, wait: Wait, out_max: usize) -> Vec<Completion> {
        self.complete_with_pages(wait, out_max).into_iter().map(|(completion, _)| completion).collect()
    }

    /// Returns up to `out_max` completions, each with the pages of its request.
    fn complete_with_pages(&mut self, wait: Wait, out_max: usize) -> Vec<(Completion, Vec<PageBytes>)> {
        let mut out = vec![Completion::EMPTY; out_max];
        let count = self.backend.complete(wait, &mut out);
        out[..count].iter().map(|completion| (*completion, self.take_back(completion.token))).collect()
    }

    /// Collects everything in flight, in the order of completion.
    fn collect_all(&mut self) -> Vec<(Completion, Vec<PageBytes>)> {
        let mut all = Vec::new();
        while self.in_flight() > 0 {
            let some = self.complete_with_pages(Wait::One, 5);
            assert!(!some.is_empty());
            all.extend(some);
        }
        assert!(self.complete(Wait::One, 5).is_empty());
        all
    }

    /// Returns the pages of a request that is over. Where several requests have one token, the token doesn't
    /// tell which is over. So only the last of them returns pages. The pages of the others are leaked.
    fn take_back(&mut self, token: u64) -> Vec<PageBytes> {
        let at = self.requests.iter().position(|(other, _)| *other == token);
        let (_, pages) = self.requests.swap_remove(at.expect("a token came back twice, or unasked"));
        let is_last = self.requests.iter().all(|(other, _)| *other != token);
        if is_last { ManuallyDrop::into_inner(pages) } else { Vec::new() }
    }
}

/// Runs one request from beginning to end, with no other request in flight. Returns the pages, too.
fn run(
    backend: &mut (impl Backend + ?Sized),
    op: Op,
    first: u64,
    pages: Vec<PageBytes>,
) -> (Result<(), IoError>, Vec<PageBytes>) {
    let mut backend = Owning::new(backend);
    backend.submit(op, first, pages, 42).unwrap();
    let mut all = backend.collect_all();
    assert_eq!(all.len(), 1, "not one completion");
    let (completion, pages) = all.remove(0);
    assert_eq!(completion.token, 42);
    (completion.result, pages)
}

pub(crate) fn write(
    backend: &mut (impl Backend + ?Sized),
    first: u64,
    pages: &[PageBytes],
) -> Result<(), IoError> {
    run(backend, Op::Write, first, pages.to_vec()).0
}

pub(crate) fn read(
    backend: &mut (impl Backend + ?Sized),
    first: u64,
    pages: &mut [PageBytes],
) -> Result<(), IoError> {
    let (result, read) = run(backend, Op::Read, first, pages.to_vec());
    pages.clone_from_slice(&read);
    result
}

const SLOW: SlowPlan = SlowPlan { seed: 11, latency_ticks_min: 1, latency_ticks_max: 50 };
const NO_CRASH: CrashPlan = CrashPlan { seed: 12, at_request: u64::MAX };

/// Runs `test` on a fresh area of `pages` pages. Decorators are set to do no harm.
fn with<R>(kind: Kind, pages: usize, test: impl FnOnce(&mut dyn Backend) -> R) -> Option<R> {
    let scratch = Scratch::new(pages);
    let mut device =
        vec![0xff; if kind == Kind::Mem || kind == Kind::SlowMem { pages * PAGE_BYTES } else { 0 }];
    let fd = scratch.fd();
    let uring = || uring_or_skip(fd, DEPTH as u32);
    Some(match kind {
        Kind::Uring => test(&mut uring()?),
        Kind::Psync => test(&mut Psync::new(fd)),
        Kind::Mem => test(&mut Mem::new(&mut device)),
        Kind::CountingUring => test(&mut Counting::new(uring()?)),
        Kind::FaultyUring => test(&mut Faulty::new(uring()?, FaultPlan::none(1))),
        Kind::SlowUring => test(&mut Slow::new(uring()?, SLOW)),
        Kind::SlowMem => test(&mut Slow::new(Mem::new(&mut device), SLOW)),
        Kind::CrashPsync => test(&mut Crash::new(Psync::new(fd), NO_CRASH)),
        Kind::All => {
            let crash = Crash::new(Counting::new(Psync::new(fd)), NO_CRASH);
            test(&mut Slow::new(Faulty::new(crash, FaultPlan::none(2)), SLOW))
        }
    })
}

/// Makes the kinds of back ends, and one `#[test]` per kind for each case of the suite.
macro_rules! suite {
    ($($module:ident: $kind:ident),* ; $($case:ident),*) => {
        /// The back ends and decorators that the suite runs for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Kind {
            $($kind),*
        }

        const KINDS: &[Kind] = &[$(Kind::$kind),*];

        suite!(@ [$($module: $kind),*] [$($case),*]);
    };
    (@ [] $cases:tt) => {};
    (@ [$module:ident: $kind:ident $(, $modules:ident: $kinds:ident)*] [$($case:ident),*]) => {
        mod $module {
            $(#[test]
            fn $case() { super::$case(super::Kind::$kind); })*
        }
        suite!(@ [$($modules: $kinds),*] [$($case),*]);
    };
}

suite! {
    uring: Uring, psync: Psync, mem: Mem, counting_uring: CountingUring, faulty_uring: FaultyUring,
    slow_uring: SlowUring, slow_mem: SlowMem, crash_psync: CrashPsync, all: All;
    never_written_reads_zeros,
    written_is_read_back,
    vectored_write_is_contiguous_and_vectored_read_takes_it_apart,
    nothing_in_flight_completes_nothing,
    full_table_is_busy_and_every_token_comes_back_once,
    unflushed_request_begins_with_waiting,
    flushed_requests_arrive_without_blocking_in_the_end,
    equal_tokens_are_allowed,
    read_at_the_end_and_across_it_is_short,
    no_place_for_a_completion_leaves_it_in_flight
}

fn never_written_reads_zeros(kind: Kind) {
    with(kind, 4, |backend| {
        let mut pages = pages_of(4, 1);
        read(backend, 0, &mut pages).unwrap();
        assert!(pages.iter().all(is_zero));
    });
}

fn written_is_read_back(kind: Kind) {
    with(kind, 8, |backend| {
        for page in [0, 7, 3] {
            write(backend, page, &[page_of(page)]).unwrap();
        }
        write(backend, 3, &[page_of(33)]).unwrap();
        for (page, tag) in [(0, 0), (7, 7), (3, 33)] {
            let mut back = [page_of(99)];
            read(backend, page, &mut back).unwrap();
            assert_eq!(back[0].0, page_of(tag).0);
        }
    });
}

fn vectored_write_is_contiguous_and_vectored_read_takes_it_apart(kind: Kind) {
    with(kind, SEGMENTS_MAX + 2, |backend| {
        let written = pages_of(SEGMENTS_MAX, 1);
        write(backend, 1, &written).unwrap();
        for (index, expected) in written.iter().enumerate() {
            let mut back = [page_of(0)];
            read(backend, 1 + index as u64, &mut back).unwrap();
            assert_eq!(back[0].0, expected.0);
        }
        let mut back = pages_of(SEGMENTS_MAX, 2);
        read(backend, 1, &mut back).unwrap();
        assert!(back.iter().zip(&written).all(|(a, b)| a.0 == b.0));
        let mut ends = [page_of(5)];
        for end in [0, SEGMENTS_MAX as u64 + 1] {
            read(backend, end, &mut ends).unwrap();
            assert!(is_zero(&ends[0]), "the neighbours were written");
        }
    });
}

fn nothing_in_flight_completes_nothing(kind: Kind) {
    with(kind, 1, |backend| {
        let mut out = [Completion::EMPTY; 4];
        backend.flush();
        assert_eq!(backend.complete(Wait::No, &mut out), 0);
        assert_eq!(backend.complete(Wait::One, &mut out), 0);
        assert_eq!(backend.in_flight(), 0);
    });
}

fn full_table_is_busy_and_every_token_comes_back_once(kind: Kind) {
    with(kind, DEPTH + 8, |backend| {
        let mut backend = Owning::new(backend);
        for round in 0..4 {
            for (index, page) in pages_of(DEPTH, 1).into_iter().enumerate() {
                assert_eq!(backend.in_flight(), index);
                let token = u64::MAX - index as u64;
                backend.submit(Op::Write, index as u64 + round, vec![page], token).unwrap();
            }
            assert_eq!(backend.submit(Op::Write, 0, vec![page_of(0)], 1), Err(Busy));
            assert_eq!(backend.in_flight(), DEPTH);
            backend.flush();
            let all = backend.collect_all();
            assert!(all.iter().all(|(completion, _)| completion.result.is_ok()));
            let mut tokens: Vec<u64> =
                all.iter().map(|(completion, _)| u64::MAX - completion.token).collect();
            tokens.sort_unstable();
            assert!(tokens.into_iter().eq(0..DEPTH as u64));
        }
    });
}

fn unflushed_request_begins_with_waiting(kind: Kind) {
    with(kind, 1, |backend| {
        let mut backend = Owning::new(backend);
        backend.submit(Op::Write, 0, vec![page_of(1)], 8).unwrap();
        assert_eq!(backend.complete(Wait::One, 2), [Completion { token: 8, result: Ok(()) }]);
    });
}

fn flushed_requests_arrive_without_blocking_in_the_end(kind: Kind) {
    // Simulated time stands still unless the caller waits.
    if matches!(kind, Kind::SlowUring | Kind::SlowMem | Kind::All) {
        return;
    }
    with(kind, 4, |backend| {
        let mut backend = Owning::new(backend);
        backend.submit(Op::Write, 0, pages_of(4, 1), 8).unwrap();
        backend.flush();
        let mut arrived = backend.complete(Wait::No, 2);
        while arrived.is_empty() {
            std::thread::yield_now();
            arrived = backend.complete(Wait::No, 2);
        }
        assert_eq!(arrived, [Completion { token: 8, result: Ok(()) }]);
    });
}

fn equal_tokens_are_allowed(kind: Kind) {
    with(kind, 4, |backend| {
        let mut backend = Owning::new(backend);
        for (index, page) in pages_of(4, 1).into_iter().enumerate() {
            backend.submit(Op::Write, index as u64, vec![page], 3).unwrap();
        }
        let all: Vec<Completion> =
            backend.collect_all().into_iter().map(|(completion, _)| completion).collect();
        assert_eq!(all, [Completion { token: 3, result: Ok(()) }; 4]);
    });
}

fn read_at_the_end_and_across_it_is_short(kind: Kind) {
    with(kind, 3, |backend| {
        write(backend, 0, &pages_of(3, 1)).unwrap();
        let mut pages = pages_of(2, 7);
        assert_eq!(read(backend, 3, &mut pages), Err(IoError::Short));
        assert_eq!(read(backend, 1000, &mut pages), Err(IoError::Short));
        assert_eq!(read(backend, 2, &mut pages), Err(IoError::Short));
        assert_eq!(read(backend, 1, &mut pages), Ok(()));
    });
}

fn no_place_for_a_completion_leaves_it_in_flight(kind: Kind) {
    with(kind, 1, |backend| {
        let mut backend = Owning::new(backend);
        backend.submit(Op::Write, 0, vec![page_of(1)], 8).unwrap();
        assert!(backend.complete(Wait::One, 0).is_empty());
        assert_eq!(backend.in_flight(), 1);
        assert_eq!(backend.collect_all().len(), 1);
    });
}

/// A bug: an assertion failed while requests were in flight, and their pages were freed. The kernel then
/// wrote into memory that belonged to other code.
#[test]
fn panic_leaves_pages_in_flight_to_the_back_end() {
    let mut device = vec![0; PAGE_BYTES];
    // `Crash` carries a request out when its completion is collected.
    let mut crash = Crash::new(Mem::new(&mut device), NO_CRASH);
    write(&mut crash, 0, &[page_of(1)]).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut backend = Owning::new(&mut crash);
        backend.submit(Op::Read, 0, vec![PageBytes::ZERO], 8).unwrap();
        assert_eq!(backend.in_flight(), 0, "this is meant to fail");
    }));
    assert!(panicked.is_err());
    // Memory that was freed would be given out again.
    let others: Vec<Vec<PageBytes>> = (0..16).map(|_| vec![PageBytes::ZERO]).collect();
    let mut out = [Completion::EMPTY; 2];
    assert_eq!(crash.complete(Wait::One, &mut out), 1);
    assert_eq!(out[0], Completion { token: 8, result: Ok(()) });
    assert!(others.iter().flatten().all(is_zero), "the read went into other memory");
}

#[test]
fn write_to_a_file_that_is_open_for_reading_is_a_device_error_and_the_token_comes_back() {
    let scratch = Scratch::new(4);
    let file = File::open(&scratch.path).unwrap();
    const EBADF: u16 = 9;
    let refused = Err(IoError::Device(EBADF));
    assert_eq!(write(&mut Psync::new(file.as_fd()), 0, &pages_of(2, 1)), refused);
    if let Some(mut uring) = uring_or_skip(file.as_fd(), 8) {
        assert_eq!(write(&mut uring, 0, &pages_of(2, 1)), refused);
        read(&mut uring, 0, &mut pages_of(2, 1)).unwrap();
    }
}

/// The file ends in the middle of a page, and is read with and without O_DIRECT, which refuses odd offsets.
#[test]
fn file_that_ends_inside_a_page_is_short_for_every_back_end() {
    let scratch = Scratch::new(2);
    rustix::fs::ftruncate(scratch.fd(), PAGE_BYTES as u64 + 700).unwrap();
    let buffered = File::open(&scratch.path).unwrap();
    for fd in [scratch.fd(), buffered.as_fd()] {
        let mut pages = pages_of(2, 1);
        assert_eq!(read(&mut Psync::new(fd), 0, &mut pages), Err(IoError::Short));
        assert_eq!(read_now(fd, PAGE_BYTES as u64, &mut pages[0].0), Err(IoError::Short));
        assert_eq!(read_now(fd, 0, &mut pages[0].0), Ok(()));
        if let Some(mut uring) = uring_or_skip(fd, 8) {
            assert_eq!(read(&mut uring, 0, &mut pages), Err(IoError::Short));
        }
    }
}

#[test]
fn read_now_reads_whole_runs() {
    let scratch = Scratch::new(4);
    let written = pages_of(2, 1);
    write(&mut Psync::new(scratch.fd()), 1, &written).unwrap();
    #[repr(align(4096))]
    struct Run([u8; 2 * PAGE_BYTES]);
    let mut run = Run([0; 2 * PAGE_BYTES]);
    read_now(scratch.fd(), PAGE_BYTES as u64, &mut run.0).unwrap();
    assert_eq!(run.0[..PAGE_BYTES], written[0].0);
    assert_eq!(run.0[PAGE_BYTES..], written[1].0);
}

/// A pipe has no offsets, so the kernel refuses everything.
#[test]
fn file_without_offsets_is_a_device_error() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let error = read(&mut Psync::new(reader.as_fd()), 0, &mut pages_of(1, 1)).unwrap_err();
    assert!(error.is_device_lost());
}

#[test]
fn full_device_is_no_space() {
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    assert_eq!(write(&mut Psync::new(full.as_fd()), 0, &pages_of(2, 1)), Err(IoError::NoSpace));
    if let Some(mut uring) = uring_or_skip(full.as_fd(), 8) {
        assert_eq!(write(&mut uring, 0, &pages_of(2, 1)), Err(IoError::NoSpace));
    }
}

/// A memfd that may not grow takes the pages that fit. The short write must be continued to learn why it was
/// short.
#[test]
fn write_that_fits_in_part_is_continued_and_says_what_stopped_it() {
    const EPERM: u16 = 1;
    type WriteWith = fn(BorrowedFd<'_>, &[PageBytes]) -> Option<Result<(), IoError>>;
    let both: [WriteWith; 2] = [
        |fd, pages| Some(write(&mut Psync::new(fd), 2, pages)),
        |fd, pages| Some(write(&mut uring_or_skip(fd, 8)?, 2, pages)),
    ];
    for write_with in both {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let sealed = rustix::fs::memfd_create("area", flags).unwrap();
        rustix::fs::ftruncate(&sealed, 4 * PAGE_BYTES as u64).unwrap();
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::GROW).unwrap();
        let pages = pages_of(4, 1);
        let Some(result) = write_with(sealed.as_fd(), &pages) else { return };
        assert_eq!(result, Err(IoError::Device(EPERM)));
        let mut back = pages_of(2, 9);
        read(&mut Psync::new(sealed.as_fd()), 2, &mut back).unwrap();
        assert!(back.iter().zip(&pages).all(|(a, b)| a.0 == b.0));
    }
}

const AREA_PAGES: u64 = 48;

/// A request of a random workload.
#[derive(Clone, Copy, Debug)]
struct Order {
    op: Op,
    first: u64,
    count: u64,
    /// Determines the content of the pages.
    tag: u64,
}

impl Order {
    /// Returns the numbers of the pages in the area.
    fn range(&self) -> Range<u64> {
        self.first..self.first + self.count
    }

    fn overlaps(&self, other: &Order) -> bool {
        self.range().start < other.range().end && other.range().start < self.range().end
    }
}

/// One step of a random workload.
#[derive(Clone, Debug)]
enum Step {
    Submit(Order),
    Flush,
    Complete { wait: Wait, out_max: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![Just(Op::Read), Just(Op::Write)];
    // Now and then a request crosses the end of the area. Only reads do, because a write would make a file
    // grow.
    let submit = (op, 0..AREA_PAGES + 2, 1..9_u64, any::<u16>()).prop_map(|(op, first, count, tag)| {
        let end = AREA_PAGES + if op == Op::Read { 4 } else { 0 };
        let first = first.min(end - 1);
        Step::Submit(Order { op, first, count: count.min(end - first), tag: tag as u64 })
    });
    let wait = prop_oneof![Just(Wait::No), Just(Wait::Briefly), Just(Wait::One)];
    prop_oneof![
        6 => submit,
        1 => Just(Step::Flush),
        2 => (wait, 1..8_usize).prop_map(|(wait, out_max)| Step::Complete { wait, out_max }),
    ]
}

/// What the model says about a request in flight.
struct Expected {
    order: Order,
    /// The pages that a read finds before the end of the area.
    pages: Vec<PageBytes>,
    result: Result<(), IoError>,
}

/// The observable outcome: the result of each token, and in the end the contents of the area.
type Observed = (BTreeMap<u64, Result<(), IoError>>, Vec<Vec<u8>>);

/// A back end beside its naive model, an array of pages.
struct Model<'b> {
    backend: Owning<&'b mut dyn Backend>,
    /// The pages of the area. Writes reach them when they are submitted, which is right because no
    /// overlapping requests are in flight at the same time.
    area: Vec<PageBytes>,
    /// Requests in flight, by token.
    in_flight: BTreeMap<u64, Expected>,
    /// Results of the requests that are over, by token.
    results: BTreeMap<u64, Result<(), IoError>>,
}

impl<'b> Model<'b> {
    fn new(backend: &'b mut dyn Backend) -> Self {
        Model {
            backend: Owning::new(backend),
            area: vec![PageBytes::ZERO; AREA_PAGES as usize],
            in_flight: BTreeMap::new(),
            results: BTreeMap::new(),
        }
    }

    /// Does one step. A request gets `token`.
    fn step(&mut self, token: u64, step: &Step) {
        match *step {
            Step::Flush => self.backend.flush(),
            Step::Complete { wait, out_max } => self.complete(wait, out_max),
            Step::Submit(order) => self.submit(token, order),
        }
        assert_eq!(self.backend.in_flight(), self.in_flight.len());
    }

    fn submit(&mut self, token: u64, order: Order) {
        self.drain_overlapping(&order);
        let expected = self.predict(order);
        let pages = pages_of(order.count as usize, order.tag);
        if self.backend.submit(order.op, order.first, pages.clone(), token).is_err() {
            assert!(self.in_flight.len() == DEPTH, "busy without being full");
            return;
        }
        if order.op == Op::Write {
            self.area[order.first as usize..order.range().end as usize].clone_from_slice(&pages);
        }
        self.in_flight.insert(token, expected);
    }

    /// Waits until no request in flight overlaps with `order`, so that every back end gets the same requests.
    fn drain_overlapping(&mut self, order: &Order) {
        while self.in_flight.values().any(|expected| expected.order.overlaps(order)) {
            let over = self.backend.complete_with_pages(Wait::One, 1);
            assert_eq!(over.len(), 1);
            self.check(over);
        }
    }

    /// Says what will come of a request.
    fn predict(&self, order: Order) -> Expected {
        let end = order.range().end.min(AREA_PAGES);
        let pages = self.area[order.first.min(end) as usize..end as usize].to_vec();
        let result = if order.range().end > AREA_PAGES { Err(IoError::Short) } else { Ok(()) };
        Expected { order, pages, result }
    }

    fn complete(&mut self, wait: Wait, out_max: usize) {
        let over = self.backend.complete_with_pages(wait, out_max);
        assert!(wait != Wait::One || !over.is_empty() || self.in_flight.is_empty());
        self.check(over);
    }

    /// Compares requests that are over with what the model expects of them.
    fn check(&mut self, over: Vec<(Completion, Vec<PageBytes>)>) {
        for (Completion { token, result }, pages) in over {
            let expected = self.in_flight.remove(&token).expect("a token came back twice, or unasked");
            assert_eq!(result, expected.result);
            if expected.order.op == Op::Read && result.is_ok() {
                assert_eq!(pages.len(), expected.pages.len());
                let same = pages.iter().zip(&expected.pages).all(|(a, b)| a.0 == b.0);
                assert!(same, "wrong bytes at page {}", expected.order.first);
            }
            self.results.insert(token, result);
        }
    }

    /// Collects what is in flight, and compares the whole area.
    fn finish(mut self) -> Observed {
        let rest = self.backend.collect_all();
        self.check(rest);
        assert!(self.in_flight.is_empty());

        let mut area = vec![PageBytes::ZERO; AREA_PAGES as usize];
        read(&mut self.backend.backend, 0, &mut area).unwrap();
        assert!(area.iter().zip(&self.area).all(|(a, b)| a.0 == b.0), "the area differs from the model");
        (self.results, area.iter().map(|page| page.0.to_vec()).collect())
    }
}

/// Runs a script beside the model. The number of a step is the token of its request.
fn run_script(backend: &mut dyn Backend, script: &[Step]) -> Observed {
    let mut model = Model::new(backend);
    for (token, step) in (0..).zip(script) {
        model.step(token, step);
    }
    model.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_back_end_agrees_with_the_model_and_with_the_others(
        script in prop::collection::vec(step(), 0..160),
    ) {
        let mut first: Option<Observed> = None;
        for &kind in KINDS {
            let observed = with(kind, AREA_PAGES as usize, |backend| run_script(backend, &script));
            let Some(observed) = observed else { continue };
            if let Some(first) = &first {
                prop_assert!(*first == observed, "{kind:?} differs from {:?}", KINDS[0]);
            }
            first.get_or_insert(observed);
        }
    }
}

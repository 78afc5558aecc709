//! The suite that every back end passes, bare and inside every decorator, and the comparison of all of them
//! with one naive model. Here are also helpers for the tests of the other modules: pages, scratch files, and
//! a wrapper of the one unsafe line of a test.
//!
//! UNSAFETY: `submit` takes addresses.

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
use std::os::unix::fs::OpenOptionsExt;

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

/// Submits a request for adjacent pages from `first` on. The function wraps the one unsafe line.
fn submit(
    backend: &mut (impl Backend + ?Sized),
    op: Op,
    first: u64,
    pages: &mut [PageBytes],
    token: u64,
) -> Result<(), Busy> {
    let segments: Vec<Segment> =
        pages.iter_mut().map(|page| Segment { base: (&raw mut page.0).cast() }).collect();
    let request = Request { op, offset: first * PAGE_BYTES as u64, segments: &segments, token };
    // SAFETY: callers in this file keep `pages` where it is, and don't look at it, until the requests are
    // over. Before they look, they collect the completion of every request (`collect_all`), or drop the back
    // end.
    unsafe { backend.submit(&request) }
}

/// Collects everything in flight, in the order of completion.
fn collect_all(backend: &mut (impl Backend + ?Sized)) -> Vec<Completion> {
    let mut all = Vec::new();
    let mut out = [Completion::EMPTY; 5];
    while backend.in_flight() > 0 {
        let count = backend.complete(Wait::One, &mut out);
        assert!((1..=out.len()).contains(&count));
        all.extend_from_slice(&out[..count]);
    }
    assert_eq!(backend.complete(Wait::One, &mut out), 0);
    all
}

/// Runs one request from beginning to end, with no other request in flight.
fn run(
    backend: &mut (impl Backend + ?Sized),
    op: Op,
    first: u64,
    pages: &mut [PageBytes],
) -> Result<(), IoError> {
    assert_eq!(backend.in_flight(), 0);
    submit(backend, op, first, pages, 42).unwrap();
    let [Completion { token: 42, result }] = collect_all(backend)[..] else { panic!("not one completion") };
    result
}

pub(crate) fn write(
    backend: &mut (impl Backend + ?Sized),
    first: u64,
    pages: &[PageBytes],
) -> Result<(), IoError> {
    run(backend, Op::Write, first, &mut pages.to_vec())
}

pub(crate) fn read(
    backend: &mut (impl Backend + ?Sized),
    first: u64,
    pages: &mut [PageBytes],
) -> Result<(), IoError> {
    run(backend, Op::Read, first, pages)
}

/// The back ends and decorators that the suite runs for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Uring,
    Psync,
    Mem,
    CountingUring,
    FaultyUring,
    SlowUring,
    SlowMem,
    CrashPsync,
    All,
}

const KINDS: [Kind; 9] = [
    Kind::Uring,
    Kind::Psync,
    Kind::Mem,
    Kind::CountingUring,
    Kind::FaultyUring,
    Kind::SlowUring,
    Kind::SlowMem,
    Kind::CrashPsync,
    Kind::All,
];

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

/// Makes one `#[test]` per kind for each case of the suite.
macro_rules! suite {
    ($($module:ident: $kind:ident),* ; $($case:ident),*) => {
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
        let mut pages = pages_of(DEPTH, 1);
        for round in 0..4 {
            for (index, page) in pages.chunks_mut(1).enumerate() {
                assert_eq!(backend.in_flight(), index);
                let token = u64::MAX - index as u64;
                submit(backend, Op::Write, index as u64 + round, page, token).unwrap();
            }
            assert_eq!(submit(backend, Op::Write, 0, &mut [page_of(0)], 1), Err(Busy));
            assert_eq!(backend.in_flight(), DEPTH);
            backend.flush();
            let all = collect_all(backend);
            assert!(all.iter().all(|completion| completion.result.is_ok()));
            let mut tokens: Vec<u64> = all.iter().map(|completion| u64::MAX - completion.token).collect();
            tokens.sort_unstable();
            assert!(tokens.into_iter().eq(0..DEPTH as u64));
        }
    });
}

fn unflushed_request_begins_with_waiting(kind: Kind) {
    with(kind, 1, |backend| {
        let mut page = [page_of(1)];
        submit(backend, Op::Write, 0, &mut page, 8).unwrap();
        let mut out = [Completion::EMPTY; 2];
        assert_eq!(backend.complete(Wait::One, &mut out), 1);
        assert_eq!(out[0], Completion { token: 8, result: Ok(()) });
    });
}

fn flushed_requests_arrive_without_blocking_in_the_end(kind: Kind) {
    // Simulated time stands still unless the caller waits.
    if matches!(kind, Kind::SlowUring | Kind::SlowMem | Kind::All) {
        return;
    }
    with(kind, 4, |backend| {
        let mut pages = pages_of(4, 1);
        submit(backend, Op::Write, 0, &mut pages, 8).unwrap();
        backend.flush();
        let mut out = [Completion::EMPTY; 2];
        while backend.complete(Wait::No, &mut out) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(out[0], Completion { token: 8, result: Ok(()) });
    });
}

fn equal_tokens_are_allowed(kind: Kind) {
    with(kind, 4, |backend| {
        let mut pages = pages_of(4, 1);
        for (index, page) in pages.chunks_mut(1).enumerate() {
            submit(backend, Op::Write, index as u64, page, 3).unwrap();
        }
        assert_eq!(collect_all(backend), [Completion { token: 3, result: Ok(()) }; 4]);
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
        let mut page = [page_of(1)];
        submit(backend, Op::Write, 0, &mut page, 8).unwrap();
        assert_eq!(backend.complete(Wait::One, &mut []), 0);
        assert_eq!(backend.in_flight(), 1);
        assert_eq!(collect_all(backend).len(), 1);
    });
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

/// One step of a random workload.
#[derive(Clone, Debug)]
enum Step {
    Submit { op: Op, first: u64, count: u64, tag: u64 },
    Flush,
    Complete { wait: Wait, room: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![Just(Op::Read), Just(Op::Write)];
    // Now and then a request crosses the end of the area. Only reads do, because a write would make a file
    // grow.
    let submit = (op, 0..AREA_PAGES + 2, 1..9_u64, any::<u16>()).prop_map(|(op, first, count, tag)| {
        let end = AREA_PAGES + if op == Op::Read { 4 } else { 0 };
        let first = first.min(end - 1);
        Step::Submit { op, first, count: count.min(end - first), tag: tag as u64 }
    });
    let wait = prop_oneof![Just(Wait::No), Just(Wait::One)];
    prop_oneof![
        6 => submit,
        1 => Just(Step::Flush),
        2 => (wait, 1..8_usize).prop_map(|(wait, room)| Step::Complete { wait, room }),
    ]
}

/// A request in flight, with what the model says about it.
struct InFlight {
    op: Op,
    first: u64,
    pages: Vec<PageBytes>,
    expected: Vec<PageBytes>,
    result: Result<(), IoError>,
}

/// The observable outcome: the result of each token, and in the end the contents of the area.
type Observed = (BTreeMap<u64, Result<(), IoError>>, Vec<Vec<u8>>);

/// Runs a script beside the naive model, an array of pages. Writes reach the model when they are submitted,
/// which is right because no overlapping requests are in flight at the same time.
fn run_script(backend: &mut dyn Backend, script: &[Step]) -> Observed {
    let mut model = vec![PageBytes::ZERO; AREA_PAGES as usize];
    let mut in_flight: BTreeMap<u64, InFlight> = BTreeMap::new();
    let mut results = BTreeMap::new();
    let collected = |in_flight: &mut BTreeMap<u64, InFlight>, done: &[Completion]| {
        let mut finished = Vec::new();
        for completion in done {
            let request = in_flight.remove(&completion.token).expect("a token came back twice, or unasked");
            assert_eq!(completion.result, request.result);
            if request.op == Op::Read && completion.result.is_ok() {
                let same = request.pages.iter().zip(&request.expected).all(|(a, b)| a.0 == b.0);
                assert!(same, "wrong bytes at page {}", request.first);
            }
            finished.push((completion.token, completion.result));
        }
        finished
    };
    for (token, step) in (0_u64..).zip(script) {
        match *step {
            Step::Flush => backend.flush(),
            Step::Complete { wait, room } => {
                let mut out = vec![Completion::EMPTY; room];
                let count = backend.complete(wait, &mut out);
                assert!(wait == Wait::No || count > 0 || in_flight.is_empty());
                results.extend(collected(&mut in_flight, &out[..count]));
            }
            Step::Submit { op, first, count, tag } => {
                let range = first..first + count;
                let overlaps = |other: &InFlight| {
                    other.first < range.end && range.start < other.first + other.pages.len() as u64
                };
                // Overlapping requests are drained first, so that every back end gets the same requests.
                while in_flight.values().any(overlaps) {
                    let mut out = [Completion::EMPTY; 1];
                    assert_eq!(backend.complete(Wait::One, &mut out), 1);
                    results.extend(collected(&mut in_flight, &out));
                }
                let end = range.end.min(AREA_PAGES);
                let expected = model[first.min(end) as usize..end as usize].to_vec();
                let result = if range.end > AREA_PAGES { Err(IoError::Short) } else { Ok(()) };
                let mut pages = pages_of(count as usize, tag);
                let written = pages.clone();
                if submit(backend, op, first, &mut pages, token).is_err() {
                    assert_eq!(backend.in_flight(), in_flight.len());
                    assert!(in_flight.len() == DEPTH, "busy without being full");
                    continue;
                }
                if op == Op::Write {
                    model[first as usize..end as usize].clone_from_slice(&written);
                }
                in_flight.insert(token, InFlight { op, first, pages, expected, result });
            }
        }
        assert_eq!(backend.in_flight(), in_flight.len());
    }
    let rest = collect_all(backend);
    results.extend(collected(&mut in_flight, &rest));
    assert!(in_flight.is_empty());

    let mut area = vec![PageBytes::ZERO; AREA_PAGES as usize];
    read(backend, 0, &mut area).unwrap();
    assert!(area.iter().zip(&model).all(|(a, b)| a.0 == b.0), "the area differs from the model");
    (results, area.iter().map(|page| page.0.to_vec()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_back_end_agrees_with_the_model_and_with_the_others(
        script in prop::collection::vec(step(), 0..160),
    ) {
        let mut first: Option<Observed> = None;
        for kind in KINDS {
            let observed = with(kind, AREA_PAGES as usize, |backend| run_script(backend, &script));
            let Some(observed) = observed else { continue };
            if let Some(first) = &first {
                prop_assert!(*first == observed, "{kind:?} differs from {:?}", KINDS[0]);
            }
            first.get_or_insert(observed);
        }
    }
}

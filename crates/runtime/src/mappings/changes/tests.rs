//! Compares the list of mappings with the kernel's own, and with the simplest model, which says what each
//! page is.
//!
//! A real engine, without its handler threads, follows calls of a program in a window of memory that nobody
//! touches. After each call every page of the window is compared:
//!
//! - Does the kernel have it mapped, and registered (`um` in /proc/self/smaps)?
//! - Does the list have it, and call it registered?
//! - Does the table have an entry for it?

use super::*;
use crate::engine::start::{LeftAlone, Start, build};
use crate::session::head::tests::without_areas;
use crate::session::{Session, UffdSource};
use farpage_core::cache::Backing;
use farpage_core::pager::{Access, Step};
use proptest::prelude::*;
use rustix::fd::AsRawFd;
use rustix::fs::MemfdFlags;
use std::io::{BufRead, BufReader};
use std::sync::{Mutex, OnceLock};

/// Address of the window, below all other mappings of the process: the kernel gives out addresses from above.
const WINDOW: usize = 1 << 44;
/// Pages of the window in which calls begin, and pages that are compared.
const PAGES: usize = 192;
const SEEN: usize = 2 * PAGES;
const STEP: usize = 16;

#[derive(Clone, Copy, Debug)]
enum Call {
    Map {
        at: usize,
        count: usize,
        is_managed: bool,
        protection: usize,
        replaces: bool,
    },
    Unmap {
        at: usize,
        count: usize,
    },
    Remap {
        at: usize,
        old: usize,
        new: usize,
        to: Option<usize>,
        old_stays: bool,
    },
    Protect {
        at: usize,
        count: usize,
        protection: usize,
    },
    Discard {
        at: usize,
        count: usize,
    },
    /// The program touches these pages. Registered pages get entries.
    Touch {
        at: usize,
        count: usize,
    },
}

/// What the model says of a page of the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    is_mapped: bool,
    /// Mapped as memory that the engine manages.
    is_ours: bool,
    /// The table has an entry for the page.
    is_known: bool,
}

/// What the kernel says of a page of the window.
#[derive(Clone, Copy, Default)]
struct Mapped {
    is_mapped: bool,
    is_registered: bool,
    is_plain: bool,
}

fn call() -> impl Strategy<Value = Call> {
    let place = || (0..PAGES / STEP).prop_map(|at| at * STEP);
    // Mostly whole steps, so that the borders of calls meet.
    let count = || prop_oneof![4 => (1..7_usize).prop_map(|steps| steps * STEP), 1 => 1..100_usize];
    let protection = || {
        let read = raw::PROT_READ as usize;
        prop_oneof![5 => Just(READ_WRITE), 1 => Just(read), 1 => Just(0), 1 => Just(READ_WRITE | raw::PROT_EXEC as usize)]
    };
    let to = prop_oneof![Just(None), place().prop_map(Some)];
    prop_oneof![
        4 => (place(), count(), prop::bool::weighted(0.7), protection(), prop::bool::weighted(0.8)).prop_map(
            |(at, count, is_managed, protection, replaces)| Call::Map { at, count, is_managed, protection, replaces }
        ),
        1 => (place(), count()).prop_map(|(at, count)| Call::Unmap { at, count }),
        4 => (place(), count(), count(), to, prop::bool::weighted(0.2))
            .prop_map(|(at, old, new, to, old_stays)| Call::Remap { at, old, new, to, old_stays }),
        1 => (place(), count(), protection())
            .prop_map(|(at, count, protection)| Call::Protect { at, count, protection }),
        1 => (place(), count()).prop_map(|(at, count)| Call::Discard { at, count }),
        2 => (place(), count()).prop_map(|(at, count)| Call::Touch { at, count }),
    ]
}

/// An active engine whose registrar answers. None if this process gets no userfaultfd.
fn engine() -> Option<&'static Engine> {
    static ENGINE: OnceLock<Option<&'static Engine>> = OnceLock::new();
    *ENGINE.get_or_init(|| {
        if farpage_os::uffd::Uffd::for_signals().is_err() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no userfaultfd");
            println!("skipped: this process gets no userfaultfd");
            return None;
        }
        sync::set_parker(&farpage_os::futex::PARKER);
        let session = rustix::fs::memfd_create("test-session", MemfdFlags::CLOEXEC).unwrap();
        let bytes = size_of::<Session>();
        rustix::fs::ftruncate(&session, bytes as u64).unwrap();
        let head = without_areas(bytes, UffdSource::UserMode);
        let head: Vec<u8> = head.words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        rustix::io::write(&session, &head).unwrap();
        let path = format!("/proc/self/fd/{}", session.as_raw_fd());
        let mut place = [0; crate::session::PATH_BYTES];
        place[..path.len()].copy_from_slice(path.as_bytes());
        let start = &*Box::leak(Box::new(Start::new(
            place,
            0,
            0,
            None,
            false,
            false,
            LeftAlone { block: None, stack: None },
        )));
        let engine = build(start).expect("an engine");
        engine.active.store(1, Ordering::Release);
        std::thread::spawn(|| engine.registrar.serve(engine));
        Some(engine)
    })
}

fn range(at: usize, count: usize) -> PageRange {
    PageRange::covering(address(at), count * PAGE_BYTES)
}

fn address(at: usize) -> usize {
    WINDOW + at * PAGE_BYTES
}

/// Makes the call as a hook would.
fn make(engine: &'static Engine, call: Call) -> isize {
    let flags = |list: &[u32]| list.iter().fold(0, |all, flag| all | *flag as usize);
    match call {
        Call::Map { at, count, is_managed, protection, replaces } => {
            let fixed = if replaces { raw::MAP_FIXED } else { raw::MAP_FIXED_NOREPLACE };
            let kind = if is_managed { 0 } else { raw::MAP_STACK };
            let flags = flags(&[raw::MAP_PRIVATE, raw::MAP_ANONYMOUS, raw::MAP_NORESERVE, fixed, kind]);
            mmap(engine, [address(at), count * PAGE_BYTES, protection, flags, usize::MAX, 0])
        }
        Call::Unmap { at, count } => munmap(engine, [address(at), count * PAGE_BYTES, 0, 0, 0, 0]),
        Call::Remap { at, old, new, to, old_stays } => {
            let fixed = to.map_or(0, |_| flags(&[raw::MREMAP_FIXED, raw::MREMAP_MAYMOVE]));
            let stays = if old_stays && to.is_some() { flags(&[raw::MREMAP_DONTUNMAP]) } else { 0 };
            let to = to.map_or(0, address);
            mremap(engine, [address(at), old * PAGE_BYTES, new * PAGE_BYTES, fixed | stays, to, 0])
        }
        Call::Protect { at, count, protection } => {
            mprotect(engine, number::MPROTECT, [address(at), count * PAGE_BYTES, protection, 0, 0, 0])
        }
        Call::Discard { at, count } => {
            madvise(engine, [address(at), count * PAGE_BYTES, raw::MADV_DONTNEED as usize, 0, 0, 0])
        }
        Call::Touch { at, count } => {
            for page in range(at, count).iter() {
                let known = engine.pager.ranges.lock().find(page);
                if known.is_some_and(|known| known.flags.has(Flags::REGISTERED))
                    && let Step::Zero(ticket) = engine.pager.fault(page, Access::Write)
                {
                    engine.pager.settle_fault(ticket, Backing::Hole);
                }
            }
            0
        }
    }
}

/// The window as the kernel describes it.
fn kernel() -> Vec<Mapped> {
    let mut window = vec![Mapped::default(); SEEN];
    let mut pages = 0..0;
    let mut is_plain = false;
    for line in BufReader::new(std::fs::File::open("/proc/self/smaps").unwrap()).lines() {
        let line = line.unwrap();
        if let Some(list) = line.strip_prefix("VmFlags:") {
            let is_registered = list.split(' ').any(|flag| flag == "um");
            window[pages.clone()].fill(Mapped { is_mapped: true, is_registered, is_plain });
        } else if let Some((first, end)) = borders(&line) {
            if first >= address(SEEN) {
                break;
            }
            let at = |place: usize| (place.saturating_sub(WINDOW) / PAGE_BYTES).min(SEEN);
            (pages, is_plain) = (at(first)..at(end), line.contains(" rw-p "));
        }
    }
    window
}

/// First byte and end of the mapping whose description this line begins.
fn borders(line: &str) -> Option<(usize, usize)> {
    let (first, end) = line.split_once(' ')?.0.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some((address(first)?, address(end)?))
}

/// Applies a call to the model, given the call's result. Only the kernel knows what a failed call has
/// unmapped.
fn follow(window: &mut [Page], engine: &Engine, call: Call, result: isize, kernel: &[Mapped]) {
    let is_done = result >= 0;
    match call {
        Call::Map { at, count, is_managed, .. } if is_done => {
            window[at..at + count].fill(Page { is_mapped: true, is_ours: is_managed, is_known: false });
        }
        Call::Unmap { at, count } if is_done => window[at..at + count].fill(Page::default()),
        Call::Remap { at, old, new, to, old_stays } if is_done => {
            let before: Vec<Page> = window[at..at + old].to_vec();
            let stays = old_stays && to.is_some();
            window[at..at + old].fill(Page::default());
            if stays {
                let left = before.iter().map(|page| Page { is_known: false, ..*page });
                window[at..at + old].iter_mut().zip(left).for_each(|(page, left)| *page = left);
            }
            let start = to.unwrap_or(at);
            let is_one_kind = before.iter().all(|page| page.is_ours == before[0].is_ours);
            for count in 0..new {
                let grown = || {
                    // Kernels that join mappings of two kinds may let either of them grow.
                    let page = range(start + count, 1).start;
                    let listed = || engine.pager.ranges.lock().find(page).is_some();
                    let is_ours = if is_one_kind { before[0].is_ours } else { listed() };
                    Page { is_mapped: true, is_ours, is_known: false }
                };
                match before.get(count) {
                    // Since Linux 6.17 what was mapped opposite a hole stays.
                    Some(hole) if !hole.is_mapped => {}
                    Some(page) => window[start + count] = *page,
                    None => window[start + count] = grown(),
                }
            }
        }
        Call::Discard { at, count } if is_done || result == HOLE => {
            window[at..at + count].iter_mut().for_each(|page| page.is_known = false);
        }
        Call::Touch { at, count } => {
            for (page, mapped) in window[at..at + count].iter_mut().zip(&kernel[at..]) {
                page.is_known |= mapped.is_registered;
            }
        }
        _ => {
            let gone = window.iter_mut().zip(kernel).filter(|(_, mapped)| !mapped.is_mapped);
            gone.for_each(|(page, _)| *page = Page::default());
        }
    }
}

/// Compares each page of the window.
fn compare(window: &[Page], kernel: &[Mapped], engine: &Engine) -> Result<(), TestCaseError> {
    for (at, (page, mapped)) in window.iter().zip(kernel).enumerate() {
        let known = engine.pager.ranges.lock().find(range(at, 1).start).map(|known| known.flags);
        let has = |flag| known.is_some_and(|flags: Flags| flags.has(flag));
        prop_assert_eq!(page.is_mapped, mapped.is_mapped, "page {} is mapped; kernel on the right", at);
        prop_assert_eq!(page.is_ours, known.is_some(), "page {} is in the list, on the right", at);
        prop_assert_eq!(
            mapped.is_registered,
            has(Flags::REGISTERED),
            "page {} is registered; list on the right",
            at
        );
        let is_plain = known.is_some() && !has(Flags::PROTECTED) && !has(Flags::FOREIGN);
        prop_assert!(
            !is_plain || mapped.is_plain,
            "page {} may not be read and written, and the list doesn't say so",
            at
        );
        let has_entry = engine.pager.state(range(at, 1).start).is_resident();
        prop_assert_eq!(page.is_known, has_entry, "page {} was touched; table on the right", at);
    }
    let registered = kernel.iter().filter(|mapped| mapped.is_registered).count() * PAGE_BYTES;
    let gauge = engine.pager.stats().gauge(Gauge::ManagedBytes);
    prop_assert_eq!(gauge, registered as u64, "managed bytes; kernel on the right");
    engine.pager.ranges.lock().check();
    Ok(())
}

/// Makes the calls one after the other, and compares the window after each call. The window is empty before
/// and afterwards.
fn in_step(engine: &'static Engine, calls: &[Call]) -> Result<(), TestCaseError> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let mut window = vec![Page::default(); SEEN];
    let same = calls.iter().try_for_each(|call| {
        let result = make(engine, *call);
        let kernel = kernel();
        follow(&mut window, engine, *call, result, &kernel);
        let told = |error| TestCaseError::fail(format!("{error}, after {call:?}, which answered {result}"));
        compare(&window, &kernel, engine).map_err(told)
    });
    prop_assert_eq!(munmap(engine, [WINDOW, SEEN * PAGE_BYTES, 0, 0, 0, 0]), 0);
    if same.is_err() {
        engine.forget(range(0, SEEN));
    }
    same
}

/// The engine forgot all of a move's target. Since Linux 6.17 a move may name holes, and what is mapped
/// opposite a hole stays. The pages there were registered, and the engine didn't know of them.
#[test]
fn move_with_a_hole_leaves_what_is_opposite_alone() {
    let Some(engine) = engine() else { return };
    let map =
        |at, count, is_managed| Call::Map { at, count, is_managed, protection: READ_WRITE, replaces: true };
    let with_a_hole = Call::Remap { at: 160, old: 48, new: 48, to: Some(0), old_stays: false };
    let calls = [map(0, 96, true), Call::Touch { at: 0, count: 96 }, map(112, 80, false), with_a_hole];
    in_step(engine, &calls).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, max_shrink_iters: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// A mapping whose first page wasn't managed was shrunk. Its end stayed in the list, registered, with
    /// nothing behind it. Random programs met this bug rarely, because only a fork's child relies on the list
    /// alone.
    #[test]
    fn list_says_of_each_page_what_the_kernel_says(calls in prop::collection::vec(call(), 1..25)) {
        let Some(engine) = engine() else { return Ok(()) };
        in_step(engine, &calls)?;
    }
}

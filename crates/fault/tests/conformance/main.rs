//! The suite for every way of getting pages in and out (moved, copied, mixed), and for the ways in which
//! faults arrive. Faults arrive as messages, as signals, or as forbidden accesses. With forbidden accesses
//! there is only one way in and out.
//!
//! A test is an engine of its own: memory that it registers, frames, and a handler thread that serves faults
//! on taken pages. Messages need a userfaultfd that handles faults of the kernel. Without the privilege these
//! tests say so and are skipped, and fail under CI=true. Signals need no privilege.

mod cases;

use farpage_core::cache::Backing;
use farpage_core::config::Install;
use farpage_core::pager::{Access, Taken};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_fault::segv::ByProtection;
use farpage_fault::signal::{Handover, Inline, Woken, fault_of, forbidden_of};
use farpage_fault::thread::{FAULTS_MAX, Faults};
use farpage_fault::uffd::{ByCopy, ByMove};
use farpage_fault::{Fault, InstallError, Outgoing, Pages};
use farpage_os::memory::{Stretch, reserve};
use farpage_os::proc::Pagemap;
use farpage_os::signal::{Action, Context, Info, SIGBUS, SIGSEGV, set_action};
use farpage_os::uffd::{Features, Uffd};
use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

const PAGES: usize = 192;

/// Program memory, frames, and a way between them.
struct Bench {
    /// None where faults are forbidden accesses.
    uffd: Option<&'static Uffd>,
    pages: &'static dyn Pages,
    memory: *mut u8,
    frames: *mut PageBytes,
    moves: bool,
    variant: Variant,
    /// The queue of faults, if they arrive as signals.
    handover: Option<&'static Handover>,
    protections: Option<&'static ByProtection>,
    /// The number of a poisoned page. The next field counts its touches.
    poisoned: AtomicU64,
    refused: AtomicU32,
}

/// How faults arrive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Messages,
    Signals,
    Forbidden,
}

/// A variation of a way of getting pages in and out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    Usual,
    /// Pages are taken in the way that threads of the program use.
    TakenInline,
    /// Pages are copied as on a kernel where a write protection does harm.
    Unprotected,
    /// Pages are filled as on a kernel that doesn't let /proc/self/mem ignore protections.
    Unforced,
}

// SAFETY: the pointers lead to mappings that live for good. Each test says itself which thread touches which
// memory.
unsafe impl Send for Bench {}
// SAFETY: as above.
unsafe impl Sync for Bench {}

fn skipped(why: &str) -> Option<Bench> {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "this machine must have it: {why}");
    println!("skipped: {why}");
    None
}

/// Every bench whose faults arrive as signals.
static SIGNALLED: [AtomicPtr<Bench>; 256] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 256];

/// Does the work of the preload library in a program: finds the owner of the memory, and has the fault
/// served.
unsafe extern "C" fn on_fault(_: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel's own structures, valid during this call.
    let (info, context) = unsafe { (&*info, &*context) };
    // SAFETY: the pointer is null, or leads to a bench that was leaked for good.
    let benches = || SIGNALLED.iter().filter_map(|bench| unsafe { bench.load(Ordering::Acquire).as_ref() });
    let page = PageIndex::of_address(info.address());
    match benches().find(|bench| bench.range(0, PAGES).contains(page)) {
        // This case comes first, because kernels that don't handle memory failures report a poisoned page
        // like a missing page.
        Some(bench) if bench.poisoned.load(Ordering::Acquire) == page.0 => bench.replace_poisoned(page),
        Some(bench) => {
            let fault = fault_of(info, context).or(forbidden_of(info, context)).expect("a fault of ours");
            let is_opened = bench.protections.is_some_and(|pages| pages.is_open(page));
            // The page may have been opened since the access, as if this thread had tried before.
            let here = |_| if is_opened { Inline::Served } else { Inline::Elsewhere };
            bench.handover.unwrap().serve(fault, here);
        }
        // SAFETY: the call ends the process, which is right for an unexpected signal.
        None => unsafe { libc::_exit(99) },
    }
}

fn bench(install: Install, by: By) -> Option<&'static Bench> {
    bench_with(install, by, Variant::Usual)
}

fn bench_with(install: Install, by: By, variant: Variant) -> Option<&'static Bench> {
    let (opened, what) = match by {
        By::Messages => (Uffd::by_syscall().map(Some), "for faults of the kernel"),
        By::Signals => (Uffd::for_signals().map(Some), "at all"),
        By::Forbidden => (Ok(None), "needed"),
    };
    let uffd: Option<&'static Uffd> = match opened {
        Ok(uffd) => uffd.map(|uffd| &*Box::leak(Box::new(uffd))),
        Err(errno) => {
            return skipped(&format!("no userfaultfd {what} ({errno:?})")).map(|_| unreachable!());
        }
    };
    if install.takes_by_move() && uffd.is_some_and(|uffd| !uffd.features().has(Features::MOVE)) {
        return skipped("this kernel has no UFFDIO_MOVE (6.8)").map(|_| unreachable!());
    }
    let memory = reserve(PAGES * PAGE_BYTES).unwrap();
    let frames = reserve(PAGES * PAGE_BYTES).unwrap();
    let frame_range = PageRange::covering(frames as usize, PAGES * PAGE_BYTES);
    let handover = (by != By::Messages).then(|| &*Box::leak(Box::new(Handover::new())));
    let mut protections = None;
    let pages: &'static dyn Pages = match uffd {
        Some(uffd) if install.takes_by_move() => {
            // SAFETY: the range is the mapping just made, used as frames only.
            woken(unsafe { ByMove::new(uffd, frame_range, install) }.unwrap(), handover)
        }
        Some(uffd) if variant == Variant::Unprotected => match ByCopy::without_protection(uffd).unwrap() {
            Some(by_copy) => woken(by_copy, handover),
            None => return skipped("this kernel drops pinned pages (before 5.18)").map(|_| unreachable!()),
        },
        Some(uffd) => woken(ByCopy::new(uffd).unwrap(), handover),
        None if variant == Variant::Unforced => match ByProtection::without_force().unwrap() {
            Some(by) => woken(*protections.insert(&*Box::leak(Box::new(by))), handover),
            None => {
                return skipped("this kernel drops or replaces pinned pages (before 5.19)")
                    .map(|_| unreachable!());
            }
        },
        None => woken(*protections.insert(&*Box::leak(Box::new(ByProtection::new().unwrap()))), handover),
    };
    // Another test forks. Memory that is shared with its child could not be moved here.
    for (start, bytes) in [(memory, PAGES * PAGE_BYTES), (frames, PAGES * PAGE_BYTES)] {
        // SAFETY: the advice keeps memory of the test from children that don't need it.
        unsafe {
            farpage_os::memory::advise(PageRange::covering(start as usize, bytes), libc::MADV_DONTFORK as u32)
        }
        .unwrap();
    }
    let moves = install.takes_by_move();
    let bench = Box::leak(Box::new(Bench {
        uffd,
        pages,
        memory,
        frames: frames.cast(),
        moves,
        variant,
        handover,
        protections,
        poisoned: AtomicU64::new(0),
        refused: AtomicU32::new(0),
    }));
    // SAFETY: missing pages read as zeros until a page is taken. From then on the test serves the faults.
    unsafe { pages.register(bench.range(0, PAGES)) }.unwrap();
    if by != By::Messages {
        bench.expect_signals();
    }
    Some(bench)
}

fn woken(pages: impl Pages + 'static, handover: Option<&'static Handover>) -> &'static dyn Pages {
    match handover {
        Some(handover) => Box::leak(Box::new(Woken { pages, handover })),
        None => Box::leak(Box::new(pages)),
    }
}

impl Bench {
    fn page(&self, at: usize) -> PageIndex {
        PageIndex::of_address(self.memory as usize).plus(at as u64)
    }
    fn range(&self, at: usize, count: usize) -> PageRange {
        PageRange::of(self.page(at), count as u64)
    }
    fn frame(&self, at: usize) -> *mut PageBytes {
        self.frames.wrapping_add(at)
    }
    fn write(&self, at: usize, byte: u8) {
        // SAFETY: the page is inside the test's memory, and the test serves faults there.
        unsafe { self.memory.add(at * PAGE_BYTES).write_bytes(byte, PAGE_BYTES) };
    }
    fn read(&self, at: usize) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { core::slice::from_raw_parts(self.memory.add(at * PAGE_BYTES), PAGE_BYTES) }.to_vec()
    }
    fn frame_bytes(&self, at: usize) -> Vec<u8> {
        // SAFETY: the caller has had this frame filled.
        unsafe { core::slice::from_raw_parts(self.frame(at).cast::<u8>(), PAGE_BYTES) }.to_vec()
    }
    fn fill(&self, count: usize) {
        assert_eq!(self.pages.zero(self.range(0, count), Access::Read), Ok(count as u64));
        (0..count).for_each(|at| self.write(at, at as u8 + 1));
    }
    /// Returns the anonymous memory in the mapping, in KiB.
    fn anonymous_kib(&self) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", self.memory.addr());
        let mapping = text.lines().skip_while(|line| !line.starts_with(&start));
        let mut fields = mapping.filter_map(|line| line.strip_prefix("Anonymous:"));
        fields.next().unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    }
    fn take(&self, list: &[(usize, usize)]) -> Vec<Outgoing> {
        self.take_where(list, |_| !self.moves)
    }
    /// Takes pages into frames, of which some have memory.
    fn take_where(&self, list: &[(usize, usize)], has_memory: impl Fn(usize) -> bool) -> Vec<Outgoing> {
        let mut pages = self.outgoing(list, has_memory);
        self.take_once(&mut pages);
        if !self.moves {
            self.take_again(&mut pages);
        }
        pages
    }
    /// Takes pages by one try, into frames that have memory.
    fn take_without_waiting(&self, list: &[(usize, usize)]) -> Vec<Outgoing> {
        let mut pages = self.outgoing(list, |_| true);
        self.take_once(&mut pages);
        pages
    }
    fn outgoing(&self, list: &[(usize, usize)], has_memory: impl Fn(usize) -> bool) -> Vec<Outgoing> {
        let outgoing = |&(page, frame): &(usize, usize)| Outgoing {
            page: self.page(page),
            frame: self.frame(frame),
            backing: if has_memory(frame) { Backing::Memory } else { Backing::Hole },
            taken: Taken::Busy,
            is_shared: false,
        };
        list.iter().map(outgoing).collect()
    }
    fn take_once(&self, pages: &mut [Outgoing]) {
        // SAFETY: the frames belong to the test, which serves threads that touch the pages.
        unsafe {
            if self.variant == Variant::TakenInline {
                assert!(self.pages.take_inline(pages), "moving can be done there");
            } else {
                self.pages.take(pages);
            }
        }
    }
    /// Tries again to take busy pages. A copied page stays while the kernel itself refers to it, because each
    /// CPU collects new pages before it lists them. Therefore every CPU gets a turn. A fork of another test
    /// shares pages, too.
    fn take_again(&self, pages: &mut [Outgoing]) {
        let everywhere = rustix::thread::sched_getaffinity(None).unwrap();
        for _ in 0..4 {
            farpage_os::thread::for_each_cpu(|cpu| {
                farpage_os::thread::bind_to_cpu(cpu);
                let busy = pages.iter_mut().filter(|page| page.taken == Taken::Busy);
                busy.for_each(|page| self.take_once(core::slice::from_mut(page)));
                rustix::thread::sched_setaffinity(None, &everywhere).unwrap();
            });
        }
    }
    fn expect_signals(&'static self) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            for signal in [SIGBUS, SIGSEGV] {
                // SAFETY: the handler only looks at statics, and sleeps on a futex.
                unsafe { set_action(signal, &Action::of(on_fault, 0)) }.unwrap();
            }
        });
        let bench = core::ptr::from_ref(self).cast_mut();
        let free = |place: &&AtomicPtr<Bench>| {
            let null = core::ptr::null_mut();
            place.compare_exchange(null, bench, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        assert!(SIGNALLED.iter().any(|place| free(&place)), "too many benches");
    }
    /// Maps zeros in place of a lost page, so that the page's thread goes on.
    fn replace_poisoned(&self, page: PageIndex) {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        self.refused.fetch_add(1, Ordering::Release);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the page belongs to the bench's memory, and its content is lost for good.
        unsafe { mmap_anonymous(page.address() as *mut _, PAGE_BYTES, protection, flags) }.unwrap();
    }
    fn next_faults(&self) -> Vec<Fault> {
        let mut list = [Fault { page: PageIndex(0), access: Access::Read }; FAULTS_MAX];
        loop {
            let count = match self.handover {
                Some(handover) => handover.wait(&mut list, None, || false),
                None => Faults::of(self.uffd.unwrap()).wait(&mut list, None),
            };
            match count {
                0 => {}
                count => return list[..count].to_vec(),
            }
        }
    }
}

/// Makes the tests of a case, one for each way.
macro_rules! suite {
    ($($by:ident: $($name:ident)+;)+) => { $( $(
        mod $name {
            use super::*;
            suite!(@ways $by $name);
        }
    )+ )+ };
    (@ways both $name:ident) => {
        suite!(@ways messages $name);
        mod signals {
            use super::*;
            suite!(@ways signals $name);
        }
    };
    (@ways all $name:ident) => {
        suite!(@ways both $name);
        suite!(@ways forbidden $name);
    };
    (@ways all_signals $name:ident) => {
        suite!(@ways signals $name);
        suite!(@ways forbidden $name);
    };
    (@ways forbidden $name:ident) => {
        #[test]
        fn forbidden() { bench(Install::Copy, By::Forbidden).into_iter().for_each(cases::$name); }
        #[test]
        fn forbidden_unforced() {
            bench_with(Install::Copy, By::Forbidden, Variant::Unforced).into_iter().for_each(cases::$name);
        }
    };
    (@ways messages $name:ident) => { suite!(@tests Messages $name); };
    (@ways signals $name:ident) => { suite!(@tests Signals $name); };
    (@tests $by:ident $name:ident) => {
        #[test]
        fn moved() { bench(Install::Move, By::$by).into_iter().for_each(cases::$name); }
        #[test]
        fn copied() { bench(Install::Copy, By::$by).into_iter().for_each(cases::$name); }
        #[test]
        fn mixed() { bench(Install::Mixed, By::$by).into_iter().for_each(cases::$name); }
        #[test]
        fn mixed_and_taken_here() {
            bench_with(Install::Mixed, By::$by, Variant::TakenInline).into_iter().for_each(cases::$name);
        }
        #[test]
        fn copied_unprotected() {
            bench_with(Install::Copy, By::$by, Variant::Unprotected).into_iter().for_each(cases::$name);
        }
    };
}

suite! {
    all:
    taken_pages_are_in_their_frames_and_come_back_whole
    run_with_holes_takes_what_is_there
    long_run_with_holes_takes_what_is_there
    what_is_locked_behind_our_back_stays_as_it_is
    frames_that_have_memory_are_emptied_first
    touch_of_a_taken_page_waits_for_its_install
    install_over_a_page_is_refused_and_changes_nothing
    run_is_installed_up_to_the_first_page_that_is_there
    run_goes_over_borders_of_the_kernels_mappings
    threads_hammering_see_every_byte_while_pages_go_in_and_out
    page_shared_with_a_child_is_never_taken_wrongly
    page_that_a_child_maps_too_is_not_lost_to_the_child;
    both:
    write_to_a_protected_page_is_reported_and_goes_on_when_unprotected
    first_write_to_zeros_is_reported_when_asked_for
    zeros_that_are_about_to_be_written_have_memory_at_once
    install_into_read_only_memory_works
    moves_that_we_make_are_told_from_those_that_we_do_not_see;
    messages:
    kernel_access_to_a_taken_page_waits_too
    poisoned_page_is_refused_to_the_kernel;
    all_signals:
    kernel_access_to_a_taken_page_is_refused_and_nothing_is_lost
    more_threads_than_the_queue_has_room_are_all_served;
    signals:
    touch_of_a_poisoned_page_is_signalled_until_it_is_replaced;
    forbidden:
    what_the_program_allows_itself_comes_back_with_the_page
    discarded_pages_are_heard_of_again
    what_was_only_read_before_is_heard_of_when_it_is_written
    pieces_become_one_mapping_that_can_be_moved
    pages_that_a_call_uses_stay_open
    page_that_was_unmapped_meanwhile_is_refused;
}

/// Moving is left out: the kernel checks pins itself, and moves a page that only a pipe refers to.
#[test]
fn page_that_somebody_refers_to_is_not_copied_out() {
    for by in [By::Messages, By::Signals] {
        for variant in [Variant::Usual, Variant::Unprotected] {
            let bench = bench_with(Install::Copy, by, variant);
            bench.into_iter().for_each(cases::page_that_somebody_refers_to_stays);
        }
    }
    if lazily_copied() {
        let bench = bench(Install::Copy, By::Forbidden);
        bench.into_iter().for_each(cases::page_that_somebody_refers_to_stays);
    }
}

#[test]
fn forbidden_page_that_somebody_refers_to_is_not_copied_out() {
    for variant in [Variant::Usual, Variant::Unforced].into_iter().filter(|_| lazily_copied()) {
        let bench = bench_with(Install::Copy, By::Forbidden, variant);
        bench.into_iter().for_each(cases::what_the_program_may_not_write_stays_while_it_is_pinned);
    }
}

/// Returns whether this kernel keeps pinned pages.
fn lazily_copied() -> bool {
    let does = farpage_fault::segv::keeps_pinned_pages().unwrap();
    if !does {
        // This line fails under CI=true.
        skipped("this kernel drops or replaces pinned pages (before 5.19)");
    }
    does
}

/// Moving is left out, because it makes no copy that could be older than the page.
#[test]
fn zeros_written_while_they_are_copied_out_keep_the_write() {
    for variant in [Variant::Usual, Variant::Unprotected] {
        let bench = bench_with(Install::Copy, By::Messages, variant);
        bench.into_iter().for_each(cases::zeros_written_while_they_are_taken_keep_the_write);
    }
}

/// A bug: the kernel may move a page and report a failure. The check whether the page is in its frame must
/// not ask a file that the program has put at the userfaultfd's number meanwhile. A moved page counted as one
/// that hadn't been moved, and was lost.
#[test]
fn moved_page_is_known_though_the_number_is_another_files() {
    use std::os::fd::AsRawFd as _;
    let Some(bench) = bench_with(Install::Mixed, By::Signals, Variant::TakenInline) else { return };
    bench.fill(4);
    assert_eq!(bench.take(&[(0, 5)])[0].taken, Taken::Yes);
    let fd = bench.uffd.unwrap().fd();
    // Closing the last descriptor would end the registration.
    let _same = fd.try_clone().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: the number is that of this test's own userfaultfd, which no other code uses.
    assert!(unsafe { libc::dup2(null.as_raw_fd(), fd.as_raw_fd()) } >= 0);
    // The situation is as if the first call had moved the page and failed. The frame has the page, and this
    // call can't say so.
    let again = bench.take(&[(0, 5), (1, 6)]);
    assert_eq!([again[0].taken, again[1].taken], [Taken::Yes, Taken::Busy]);
    assert_eq!(bench.frame_bytes(5), vec![1; PAGE_BYTES]);
    assert_eq!(bench.read(1), vec![2; PAGE_BYTES]);
}

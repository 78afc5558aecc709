//! Start and life of the engine's threads.
//!
//! The program's first thread asks for an engine and waits. The *keeper*, the first engine thread, opens
//! everything in a descriptor table of its own, builds the engine, and reports to the waiting thread. Then
//! the keeper looks after the budget: first it only measures, later it evicts in the background. When the
//! budget is first reached, the keeper takes over the program's mappings. It starts the registrar, a handler
//! thread for each CPU, and two threads that read ahead.

use crate::engine::fork::{self, Heirs};
use crate::engine::known;
use crate::engine::retire::{self, Retirement};
use crate::engine::rounds::Rounds;
use crate::engine::{Engine, FaultMode, MANAGED_PAGES_MIN};
use crate::guard;
use crate::guard::direct::Direct;
use crate::mappings::changes;
use crate::mappings::map_lock::{ENGINE_THREADS_MAX, MapLock, ReaderIndex};
use crate::mappings::registrar::Registrar;
use crate::pressure::budget::{Budget, Growth};
use crate::pressure::evictor::Evictor;
use crate::pressure::lull::Lull;
use crate::pressure::pool_share::PoolShare;
use crate::pressure::share::Share;
use crate::privileges::{credentials, filters};
use crate::session::devices::{self, Devices};
use crate::session::record::{Membership, name_record};
use crate::session::{Notice, PATH_BYTES, Retired, Settings, StartFailure, StopReason, UffdSource};
use crate::worker::ahead::{AheadQueue, Reclaim};
use crate::worker::polling::Polling;
use crate::worker::{Progress, Worker};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use farpage_core::cache::{Backing, Cache, CacheMemory};
use farpage_core::config::{Codec, Config, Install, Readahead};
use farpage_core::memory::Region;
use farpage_core::pager::{Pager, Parts, Wake};
use farpage_core::reclaim::rivals::{WAYS, Watched};
use farpage_core::stats::Gauge;
use farpage_core::table::{DIRECTORY_LEAVES, Leaf, Table};
use farpage_core::units::{PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_core::zswap::pool::{BlockMeta, ObjectMeta, Pool, PoolLayout, PoolMemory};
use farpage_fault::Pages;
use farpage_fault::segv::ByProtection;
use farpage_fault::signal::{Handover, Woken};
use farpage_fault::thread::{FAULTS_MAX, Faults};
use farpage_fault::uffd::{ByCopy, ByMove};
use farpage_os::clock::now_ns;
use farpage_os::proc::{Pagemap, Rollup, Statm};
use farpage_os::signal::SIGSEGV;
use farpage_os::sys::{self, Errno, number};
use farpage_os::thread::{self, Descriptors};
use farpage_os::uffd::{Features, Uffd};
use farpage_os::{futex, memory, proc};
use rustix::fd::AsRawFd;
use rustix::fs::{Mode, OFlags};

/// Bytes that the engine itself takes at least, beyond what the program has: frames, scratch memory, tables.
const OWN_BYTES_MIN: u64 = 5 << 20;
/// Reader index of the keeper. The handler threads have the indices after it.
pub const KEEPER: ReaderIndex = ReaderIndex(0);
/// Threads that read ahead. While one waits for a device, the other goes on.
const AHEAD_THREADS: usize = 2;
/// Reader index of the first thread that reads ahead. These threads have the last indices.
const AHEAD: ReaderIndex = ReaderIndex(ENGINE_THREADS_MAX - AHEAD_THREADS);

/// Names of the engine's threads.
pub(super) const KEEPER_NAME: &core::ffi::CStr = c"farpage-keeper";
pub(super) const HANDLER_NAME: &core::ffi::CStr = c"farpage-fault";
pub(super) const AHEAD_NAME: &core::ffi::CStr = c"farpage-ahead";
pub(super) const MAPS_NAME: &core::ffi::CStr = c"farpage-maps";

/// Nanoseconds between two looks at its writes by a thread that has nothing to do.
const WRITES_NS: u64 = 1_000_000;
/// Bytes per microsecond of growth above which a process fills memory in earnest. The keeper then takes the
/// lowest nice value. Most keepers don't: on Linux 6.18, the keepers of 60 processes at nice -20 kept the
/// kernel's own threads off the CPU for a minute.
const FAST_BYTES_PER_US: u64 = 100;

/// Nice value of the keeper while memory is shared since a fork. Nothing then holds back threads that write
/// shared memory, so the keeper goes before them, if it may. The keeper doesn't go before all threads. A
/// kernel thread that looks at shared memory (DAMON, khugepaged) locks this memory meanwhile. Keepers at nice
/// -20 would keep that thread off the CPU while they wait for it.
const NICE_BESIDE_SHARERS: i32 = -5;

/// Why there is no engine.
#[derive(Clone, Copy, Debug)]
pub enum StartError {
    /// The session is gone, and so is the supervisor. Or there can't be an engine, and the program goes on
    /// without one.
    Alone,
    /// Something that the engine needs was refused.
    Failed(StartFailure, Errno),
    /// The budget is below what the program needs, in bytes.
    BudgetTooSmall(u64),
}

/// The request of the starting thread to the keeper, and the keeper's answer.
pub struct Start {
    /// Path of the session, NUL-terminated.
    pub session_path: [u8; PATH_BYTES],
    /// The calling thread's control block, which must never be paged; 0 if it doesn't matter.
    pub thread_block: usize,
    /// Address of the executable's program headers. Unlike libraries, the executable is never unmapped.
    pub executable: usize,
    /// In a fork's child: the parent's engine, whose list of mappings is still right.
    pub parent: Option<&'static Engine>,
    /// Whether the program's own code has run already, because the process was dormant.
    pub is_late: bool,
    /// Whether another record of the process tells of a failure.
    pub is_told_elsewhere: bool,
    /// If `is_late`: mappings of which /proc doesn't tell what they are.
    pub left_alone: LeftAlone,
    /// A userfaultfd for `signal` mode, opened also in the descriptor table of the program's threads.
    uffd: core::cell::Cell<Option<Uffd>>,
    engine: AtomicPtr<Engine>,
    failure: core::cell::Cell<Option<StartError>>,
    done: AtomicU32,
}

// SAFETY: the keeper writes `failure` before `done`, and the starting thread reads it after `done`. `uffd` is
// written before there is a keeper, and only the keeper reads it. The other fields are atomics, or never
// change.
unsafe impl Sync for Start {}

/// Mappings of a process that was dormant. None of their memory is managed.
#[derive(Clone, Copy)]
pub struct LeftAlone {
    /// The mapping that held the control block when the library was loaded.
    pub block: Option<PageRange>,
    /// The mapping that was made last for a stack. Perhaps a thread begins there just now.
    pub stack: Option<PageRange>,
}

impl Start {
    /// Returns a request that no keeper has answered.
    pub const fn new(
        session_path: [u8; PATH_BYTES],
        thread_block: usize,
        executable: usize,
        parent: Option<&'static Engine>,
        is_late: bool,
        is_told_elsewhere: bool,
        left_alone: LeftAlone,
    ) -> Start {
        Start {
            session_path,
            thread_block,
            executable,
            parent,
            is_late,
            is_told_elsewhere,
            left_alone,
            uffd: core::cell::Cell::new(None),
            engine: AtomicPtr::new(core::ptr::null_mut()),
            failure: core::cell::Cell::new(None),
            done: AtomicU32::new(0),
        }
    }
}

/// Returns whether the program can go on without an engine. A fork's child can if it has all of its memory. A
/// program whose code has run already can, too. The third case is a program that may not look at itself,
/// because its files in /proc are root's (PR_SET_DUMPABLE, or a program file that can't be read). The fourth
/// case is a program in another pid namespace than its /proc.
pub fn can_do_without(parent: Option<&Engine>, is_late: bool, error: StartError) -> bool {
    match (error, parent) {
        _ if is_late => true,
        (StartError::Alone, _) => true,
        (_, Some(parent)) => !parent.heirs.are_left_pages(),
        (StartError::Failed(StartFailure::Namespace, _), None) => true,
        (_, None) => matches!(error, StartError::Failed(StartFailure::Proc, Errno::EACCES)),
    }
}

/// Starts an engine for this process and waits until it watches.
pub fn start(request: Start) -> Result<&'static Engine, StartError> {
    farpage_core::sync::set_parker(&futex::PARKER);
    let failed = |failure| move |errno| StartError::Failed(failure, errno);
    let request = &*memory::place(request).map_err(failed(StartFailure::Memory))?;
    credentials::begin();
    if let Some(parent) = request.parent {
        // The parent's descriptors, of which this process has copies.
        parent.direct.descriptors.still_there().for_each(close);
    }
    // Only the keeper finds out the mode. Where the kernel refuses this userfaultfd, `signal` mode isn't
    // possible either.
    let uffd = Uffd::for_signals().ok().map(Uffd::out_of_the_way);
    let fd = uffd.as_ref().map(|uffd| uffd.fd().as_raw_fd());
    request.uffd.set(uffd);
    let descriptors = fd.map_or(Descriptors::OwnEmpty, Descriptors::Only);
    let spawned = thread::spawn(keeper_main, core::ptr::from_ref(request) as usize, descriptors);
    spawned.map_err(failed(StartFailure::Thread)).inspect_err(|_| fd.into_iter().for_each(close))?;
    // Ordering: Acquire pairs with the Release in `keeper_main`.
    while request.done.load(Ordering::Acquire) == 0 {
        futex::wait(&request.done, 0);
    }
    // SAFETY: the pointer is null, or points to the engine that the keeper placed for good before it set
    // `done`.
    let engine = unsafe { request.engine.load(Ordering::Relaxed).as_ref() };
    match (engine.filter(|engine| Direct::is_possible(engine)), fd) {
        (Some(engine), Some(fd)) => {
            engine.direct.descriptors.keep_userfaultfd(fd);
            engine.devices.open_again(|area, file| engine.direct.descriptors.keep_area(area, file));
        }
        (_, Some(fd)) => close(fd),
        (_, None) => {}
    }
    match engine {
        Some(engine) => Ok(engine),
        None => Err(request.failure.get().unwrap_or(StartError::Alone)),
    }
}

/// Closes a descriptor in the calling thread's table. Other tables may have another file at that number.
fn close(fd: i32) {
    // SAFETY: the descriptor is the engine's, and no object in a thread of this table uses it any more.
    unsafe { rustix::io::close(fd) };
}

fn keeper_main(argument: usize) -> ! {
    thread::set_name(KEEPER_NAME);
    // The keeper must get a CPU in time beside threads that fill memory on every CPU. The threads that the
    // keeper starts inherit this setting, and need it as well.
    thread::ask_for_short_turns();
    // Code that writes to standard error here must not hit one of the engine's files.
    for _ in 0..3 {
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty());
        core::mem::forget(null);
    }
    // SAFETY: `start` placed the request for good and passed its address.
    let request = unsafe { &*(argument as *const Start) };
    // Measured before the engine takes memory of its own.
    let inherited =
        request.parent.map(|_| Statm::open().and_then(|statm| statm.anonymous_bytes()).unwrap_or(0));
    let built = build(request);
    // The program may leave the directory where it was started, and unmount that. Threads that the keeper
    // starts inherit this one.
    let _ = rustix::process::chdir(c"/");
    if let Ok(engine) = built {
        if let Some(bytes) = inherited {
            engine.begin_as_child(bytes);
        } else if request.is_late {
            engine.begin_after_dormancy();
        }
        engine.take_share();
    }
    if let Ok(engine) = built
        && engine.inherits()
    {
        // Pages that were out at the fork must be there before the program runs.
        activate(engine, thread::go_first());
    }
    match built {
        Ok(engine) => request.engine.store(core::ptr::from_ref(engine).cast_mut(), Ordering::Relaxed),
        Err(error) => request.failure.set(Some(error)),
    }
    // Ordering: Release publishes the engine or the failure.
    request.done.store(1, Ordering::Release);
    futex::wake(&request.done, 1);
    match built {
        Ok(engine) => keep(engine),
        Err(_) => thread::exit(),
    }
}

/// Watches the budget. Evicts in the background once the budget was reached.
fn keep(engine: &'static Engine) -> ! {
    if !engine.is_active() {
        let nice = wait_for_budget(engine);
        if engine.is_to_retire() {
            retire::end(engine, None);
        }
        activate(engine, nice);
    }
    let worker =
        Worker::placed(engine, KEEPER, None).unwrap_or_else(|_| engine.stop_program(StopReason::Tables));
    engine.thread_has_started();
    // The keeper's nice value before memory was shared.
    let mut nice = None;
    let mut rounds = Rounds::begin();
    loop {
        let seen = engine.budget.bell();
        if engine.is_to_retire() {
            retire::end(engine, Some(worker));
        }
        rounds.make(engine);
        engine.take_share();
        match (engine.budget.is_shared(), nice) {
            (true, None) => nice = Some(thread::be_at_most_as_nice_as(NICE_BESIDE_SHARERS)),
            (false, Some(before)) => {
                thread::be_as_nice_as(before);
                nice = None;
            }
            _ => {}
        }
        let progress = worker.reclaim_background();
        fork::forget_elders(engine);
        engine.prepare_to_poll();
        let quiet_ns = if progress == Progress::Some || worker.has_writes() { WRITES_NS } else { 5_000_000 };
        engine.evictor.keeper_sleeps(true);
        engine.budget.wait(seen, quiet_ns);
        engine.evictor.keeper_sleeps(false);
    }
}

/// Waits until the budget is about to be reached. Returns this thread's nice value before. By then the thread
/// has the lowest nice value.
fn wait_for_budget(engine: &'static Engine) -> i32 {
    // Until everything is registered, nothing else holds back threads that fill memory on every CPU. How fast
    // the program grows isn't known yet.
    let nice = thread::go_first();
    let mut is_first = true;
    let mut growth = Growth::default();
    let mut rounds = Rounds::begin();
    loop {
        let started_ns = now_ns();
        let charged = engine.take_share();
        let now = now_ns();
        // The process's part of the budget also changes when other processes write shared memory, which isn't
        // growth. When this process writes shared memory, that is growth.
        let anonymous = engine.pager.stats().gauge(Gauge::Anonymous) + engine.share.ledger.all_written();
        let growth_bytes_per_us = growth.bytes_per_us(anonymous, started_ns..now);
        let is_wanted = engine.activation_wanted.load(Ordering::Relaxed) != 0 || engine.is_to_retire();
        if is_wanted || engine.budget.must_activate(charged, growth_bytes_per_us) {
            thread::go_first();
            return nice;
        }
        if is_first != (growth_bytes_per_us > FAST_BYTES_PER_US) {
            is_first = !is_first;
            thread::be_as_nice_as(if is_first { nice.min(thread::LEAST_NICE) } else { nice });
        }
        if rounds.make(engine) {
            // Perhaps no other process is left that would do so.
            engine.reap_dead_processes();
        }
        engine.budget.wait(engine.budget.bell(), engine.budget.look_again_ns(charged, growth_bytes_per_us));
    }
}

/// Takes over every mapping that is big enough, because the budget is reached. Then this thread gets back its
/// value of `nice`, which the threads that it starts inherit.
fn activate(engine: &'static Engine, nice: i32) {
    // The keeper counts, too, because it makes its worker afterwards.
    engine.starting.fetch_add(1, Ordering::Relaxed);
    if !engine.mode().calls_can_wait() && !guard::arm::arm_all_threads(engine, &mut Rounds::begin()) {
        retire::end(engine, None);
    }
    // No thread can open the file any more. A child that inherits pages has a parent that hadn't it open.
    if engine.mode() == FaultMode::Segv && !engine.inherits() && has_memory_open(engine) {
        engine.ask_to_retire(Retired::MemoryOpen);
        retire::end(engine, None);
    }
    engine.note_rings();
    let exclusive = engine.map.exclusive();
    if !engine.inherits() {
        engine.note_unseen_changes(&exclusive);
    }
    if engine.mode() == FaultMode::Segv {
        touch_each_mapping(engine);
    }
    engine.take_inheritance();
    // Register first. From now on the program grows only through faults, which wait for the threads below.
    engine.take_over_all(changes::EVERYTHING, |range| engine.register_range(range, None));
    // The memory just registered was counted as unmanaged. If it were counted twice, pages would be evicted
    // for nothing.
    engine.measure_anew();
    thread::be_as_nice_as(nice);
    let argument = core::ptr::from_ref(engine) as usize;
    let mut started = thread::spawn(registrar_main, argument, Descriptors::Shared).is_ok();
    let mut threads = 0;
    thread::for_each_cpu(|cpu| {
        if threads + 1 < AHEAD.0 && spawn(engine, handler_main, cpu, ReaderIndex(threads + 1)) {
            threads += 1;
        }
    });
    started &= threads > 0;
    engine.lull.runs_on(threads as u32);
    if engine.pager.config.readahead != Readahead::Off {
        // Without these threads nothing is read ahead. Nothing else depends on them.
        for number in 0..AHEAD_THREADS {
            spawn(engine, ahead_main, 0, ReaderIndex(AHEAD.0 + number));
        }
    }
    // Without handler threads, no thread would serve a fault.
    match started {
        true => {}
        false if engine.inherits() => engine.stop_program(StopReason::Thread),
        false => retire::end_before_it_begins(engine, exclusive),
    }
    // Ordering: Release. A hook that sees the value may ask the registrar.
    engine.active.store(1, Ordering::Release);
    farpage_core::sync::wake_all(&engine.active);
    engine.pager.stats().set(Gauge::Active, 1);
    drop(exclusive);
}

/// Returns whether the program has its memory open as a file, in the first thread's descriptor table or in
/// that of another thread. Other tables are looked for only if no filter could forbid the question.
fn has_memory_open(engine: &Engine) -> bool {
    const KCMP_FILES: usize = 2;
    let Some(first) = engine.first_thread() else { return false };
    let mut has = proc::has_memory_open(first);
    if has || !filters::are_none() {
        return has;
    }
    let has_own_table = |thread: u32| {
        let arguments = [first as usize, thread as usize, KCMP_FILES, 0, 0, 0];
        // SAFETY: the call only compares.
        unsafe { sys::call(linux_raw_sys::general::__NR_kcmp as usize, arguments) > 0 }
    };
    // SAFETY: the call takes no argument.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    let _ = proc::for_each_thread(|thread| {
        has |= !has && thread != own && has_own_table(thread) && proc::has_memory_open(thread);
    });
    has
}

/// Writes to every mapping that may be registered, without changing a byte: see [`Pages::register`] of
/// [`ByProtection`]. One range of the engine's table may be several mappings to the kernel.
fn touch_each_mapping(engine: &Engine) {
    // The stretch of ranges that the last mapping belonged to. The mappings come in the order of their
    // addresses.
    let mut stretch = PageRange::of(PageIndex(0), 0);
    let _ = proc::for_each_mapping(|mapping| {
        if stretch.end <= mapping.pages.start {
            let ranges = engine.pager.ranges.lock();
            let next = ranges.at_or_after(mapping.pages.start);
            stretch = next.and_then(|next| ranges.stretch(next.pages.start)).unwrap_or(stretch);
        }
        let is_managed =
            stretch.count() >= MANAGED_PAGES_MIN && !stretch.intersection(mapping.pages).is_empty();
        if mapping.is_private_data && mapping.is_anonymous && is_managed {
            let first = PageRange::of(mapping.pages.start, 1);
            // SAFETY: populating changes no byte and discards no page.
            let _ = unsafe { memory::advise(first, linux_raw_sys::general::MADV_POPULATE_WRITE) };
        }
    });
}

struct Handler {
    engine: &'static Engine,
    cpu: usize,
    index: ReaderIndex,
}

fn spawn(engine: &'static Engine, main: fn(usize) -> !, cpu: usize, index: ReaderIndex) -> bool {
    let Ok(handler) = memory::place(Handler { engine, cpu, index }) else { return false };
    engine.starting.fetch_add(1, Ordering::Relaxed);
    let is_there = thread::spawn(main, core::ptr::from_mut(handler) as usize, Descriptors::Shared).is_ok();
    if !is_there {
        engine.thread_has_started();
    }
    is_there
}

fn handler_main(argument: usize) -> ! {
    thread::set_name(HANDLER_NAME);
    // SAFETY: `spawn` placed the `Handler` for good and passed its address.
    let handler = unsafe { &*(argument as *const Handler) };
    thread::bind_to_cpu(handler.cpu);
    let node = Some(farpage_os::numa::current_node());
    let worker = Worker::placed(handler.engine, handler.index, node)
        .unwrap_or_else(|_| handler.engine.stop_program(StopReason::Tables));
    let engine = handler.engine;
    engine.thread_has_started();
    let nothing = farpage_fault::Fault { page: PageIndex(0), access: farpage_core::pager::Access::Read };
    let mut list = [nothing; FAULTS_MAX];
    loop {
        let most_ns = worker.has_writes().then_some(WRITES_NS);
        let count = match (engine.handover, engine.uffd) {
            (Some(handover), _) => handover.wait(&mut list, most_ns, guard::errands::is_any_asked),
            (None, Some(uffd)) => Faults::of(uffd).wait(&mut list, most_ns),
            (None, None) => engine.stop_program(StopReason::Tables),
        };
        if engine.has_ended() {
            thread::exit();
        }
        if engine.uffd.is_some_and(|uffd| uffd.unseen_moves() > 0) {
            engine.stop_program(StopReason::UnseenMove);
        }
        for fault in &list[..count] {
            worker.serve(*fault);
        }
        guard::errands::run_all(engine, worker);
        worker.finish_writes(count == 0);
    }
}

fn ahead_main(argument: usize) -> ! {
    thread::set_name(AHEAD_NAME);
    // SAFETY: `spawn` placed the `Handler` for good and passed its address.
    let Handler { engine, index, .. } = unsafe { &*(argument as *const Handler) };
    let worker = Worker::placed(engine, *index, None);
    engine.thread_has_started();
    let Ok(worker) = worker else { thread::exit() };
    loop {
        let seen = engine.ahead.bell();
        let mut is_idle = true;
        while let Some(plan) = engine.ahead.pop() {
            worker.bring(plan, Reclaim::Allowed);
            is_idle = false;
        }
        worker.finish_writes(is_idle);
        if engine.has_ended() {
            thread::exit();
        }
        engine.ahead.wait(seen, if worker.has_writes() { WRITES_NS } else { 1_000_000_000 });
    }
}

fn registrar_main(argument: usize) -> ! {
    thread::set_name(MAPS_NAME);
    // SAFETY: `activate` passed the address of the engine, which lives as long as the process.
    let engine = unsafe { &*(argument as *const Engine) };
    engine.registrar.serve(engine)
}

/// Wakes threads of the program through userfaultfd.
struct Waker {
    pages: &'static dyn Pages,
}

impl Wake for Waker {
    fn wake(&self, page: PageIndex) {
        self.pages.wake(page);
    }
}

pub(crate) fn build(request: &'static Start) -> Result<&'static Engine, StartError> {
    let failed = |failure| move |errno| StartError::Failed(failure, errno);
    let path = core::ffi::CStr::from_bytes_until_nul(&request.session_path).map_err(|_| StartError::Alone)?;
    let membership = Membership::join(path).map_err(|_| StartError::Alone)?;
    let record = membership.record();
    // The process keeps its record until the record tells why there is no engine.
    let mut membership = Some(membership);
    let built = build_in(request, &mut membership)
        .and_then(|engine| memory::place(engine).map_err(failed(StartFailure::Memory)));
    built.map(|engine| &*engine).map_err(|error| {
        let (notice, value) = match error {
            StartError::Alone => return error,
            StartError::Failed(failure, errno) => {
                let notice = if can_do_without(request.parent, request.is_late, error) {
                    Notice::Alone
                } else {
                    Notice::NotStarted
                };
                (notice, failure as u64 | (errno.0 as u64) << 16)
            }
            StartError::BudgetTooSmall(needed) => (Notice::BudgetTooSmall, needed),
        };
        // The other record tells the user, whatever the reason is.
        if request.is_told_elsewhere {
            return error;
        }
        record.notice(notice, value);
        if notice == Notice::Alone { StartError::Alone } else { error }
    })
}

/// Builds the engine. On success the engine owns the membership; on failure it stays in `joined`.
fn build_in(request: &'static Start, joined: &mut Option<Membership>) -> Result<Engine, StartError> {
    let membership = joined.as_ref().ok_or(StartError::Alone)?;
    let (settings, record) = (&membership.settings, membership.record());
    name_record(record);
    let failed = |failure| move |errno| StartError::Failed(failure, errno);
    let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
    if proc::number_shown().is_some_and(|number| number != process) {
        // Threads, too, have other numbers in /proc than in the calls that the engine makes.
        return Err(StartError::Failed(StartFailure::Namespace, Errno(0)));
    }
    let no_memory = failed(StartFailure::Memory);
    let ranges = known::ranges(request).map_err(no_memory)?;
    let statm = Statm::open().map_err(failed(StartFailure::Proc))?;
    let rollup = Rollup::open().map_err(failed(StartFailure::Proc))?;
    let pagemap = Pagemap::open().map_err(failed(StartFailure::Proc))?;
    let uffd = open_uffd(request, settings.uffd_source)?;
    let handover = handover_for(settings.uffd_source).map_err(no_memory)?;
    let needed = statm.anonymous_bytes().map_err(failed(StartFailure::Proc))? + OWN_BYTES_MIN;
    // A fork's child has what its parent had. The child goes on, over its budget until pages are evicted.
    if request.parent.is_none() && !request.is_late && settings.ram_bytes < needed {
        return Err(StartError::BudgetTooSmall(needed));
    }

    let config = config_of(settings, uffd.map(Uffd::features));
    let pool_layout = PoolLayout::for_limit(config.pool_bytes_max as usize);
    let (mut region, tables) = handed_region(membership, &config, &pool_layout).map_err(no_memory)?;
    let elder = request.parent.filter(|parent| parent.heirs.are_left_pages());
    let (devices, areas) = Devices::open(membership, &mut region)
        .map_err(|error| StartError::Failed(StartFailure::Area, error.errno))?;

    let frames_bytes = config.frames as usize * PAGE_BYTES;
    // SAFETY: only engine code uses frames, and a child makes an engine of its own.
    let frames = unsafe { memory::reserve_for_threads(frames_bytes) }.map_err(no_memory)?;
    let frames_move = config.install.takes_by_move();
    // SAFETY: `frames` is the mapping just made, of the size that `config` says, and only the cache below
    // hands it out.
    let (pages, protections) = unsafe { way_to_pages(uffd, handover, &config, frames) }?;
    let cache_memory = CacheMemory::carve(&mut region, frames.cast::<PageBytes>(), config.frames as usize);
    let backing = if frames_move { Backing::Hole } else { Backing::Memory };
    // SAFETY: there are as many page-aligned frames as `meta` has elements, and they belong to this cache
    // alone.
    let cache = unsafe { Cache::new(cache_memory, backing) };
    let (pool, pool_base) = pool_in(&mut region, &pool_layout, &config);
    if areas.count() == 0 && config.codec.densifies() {
        pool.keep_reserve();
    }
    let table = Table::new(region.carve::<AtomicPtr<Leaf>>(DIRECTORY_LEAVES), PageIndex(0));
    let wake: &'static dyn Wake = memory::place(Waker { pages }).map_err(no_memory)?;
    let pager = place_pager(Parts {
        config,
        table,
        ranges,
        cache,
        pool,
        areas,
        stats: &record.stats,
        wake,
        slot_words: &membership.session.slot_words,
        watched: region.carve::<Watched>(WAYS),
        elder: elder.map(|elder| elder.pager),
    })
    .map_err(no_memory)?;
    Ok(Engine {
        record,
        pager,
        map: MapLock::new(),
        budget: Budget::new(settings.ram_bytes),
        share: Share::default(),
        pool_share: PoolShare::default(),
        pages,
        uffd,
        protections,
        handover,
        direct: Direct::new(),
        process,
        devices,
        pagemap,
        statm,
        rollup,
        pool_base,
        frames_move,
        ahead: AheadQueue::new(),
        registrar: Registrar::default(),
        active: AtomicU32::new(0),
        activation_wanted: AtomicU32::new(0),
        starting: AtomicU32::new(0),
        all_locked: AtomicU32::new(0),
        writes_under_way: AtomicU32::new(0),
        faults_reading: AtomicU32::new(0),
        polling: Polling::default(),
        reaping: AtomicBool::new(false),
        evictor: Evictor::new(),
        lull: Lull::default(),
        evicting: AtomicU32::new(0),
        unmovable_until_ns: AtomicU64::new(0),
        densify_is_vain: AtomicBool::new(false),
        activation_is_doubtful: AtomicBool::new(false),
        lock_future: AtomicU32::new(0),
        heirs: Heirs::default(),
        elder: AtomicPtr::new(
            elder.map_or(core::ptr::null_mut(), |elder| core::ptr::from_ref(elder).cast_mut()),
        ),
        tables: [tables, (frames, frames_bytes)],
        retirement: Retirement::default(),
        membership: joined.take().ok_or(StartError::Alone)?,
    })
}

/// Opens the userfaultfd, if this mode has one.
fn open_uffd(request: &'static Start, source: UffdSource) -> Result<Option<&'static Uffd>, StartError> {
    // In other modes, dropping this userfaultfd closes it again.
    let at_hand = request.uffd.take();
    let uffd = match source {
        UffdSource::UserMode => at_hand.map_or_else(Uffd::for_signals, Ok),
        UffdSource::Syscall => Uffd::by_syscall(),
        UffdSource::Device => open_device(),
        UffdSource::Nothing => return Ok(None),
    };
    let uffd = uffd.map_err(|errno| StartError::Failed(StartFailure::Userfaultfd, errno))?;
    let placed = memory::place(uffd).map_err(|errno| StartError::Failed(StartFailure::Memory, errno));
    Ok(Some(&*placed?))
}

/// Makes the place where threads hand over the faults that they have run into, in modes where these arrive as
/// signals.
fn handover_for(source: UffdSource) -> Result<Option<&'static Handover>, Errno> {
    match source {
        UffdSource::Syscall | UffdSource::Device => return Ok(None),
        UffdSource::Nothing => guard::faults_arrive_as(SIGSEGV),
        UffdSource::UserMode => {}
    }
    farpage_os::sys::keep_open(guard::UNTIL_ARMED);
    Ok(Some(memory::place(Handover::new())?))
}

/// Returns the way in which pages get into the program and out of it. Without a userfaultfd this is by
/// protections, which other parts of the engine need to know, too.
///
/// # Safety
/// `frames` is a mapping of as many frames as `config` says, which only the cache of this engine hands out.
unsafe fn way_to_pages(
    uffd: Option<&'static Uffd>,
    handover: Option<&'static Handover>,
    config: &Config,
    frames: *mut u8,
) -> Result<(&'static dyn Pages, Option<&'static ByProtection>), StartError> {
    let failed = |failure| move |errno| StartError::Failed(failure, errno);
    let no_memory = failed(StartFailure::Memory);
    let Some(uffd) = uffd else {
        let by_protection = ByProtection::new().map_err(failed(StartFailure::Proc))?;
        let by_protection = &*memory::place(by_protection).map_err(no_memory)?;
        return Ok((place_pages(by_protection, handover).map_err(no_memory)?, Some(by_protection)));
    };
    let pages = if config.install.takes_by_move() {
        let range = PageRange::covering(frames as usize, config.frames as usize * PAGE_BYTES);
        // SAFETY: the caller promises this mapping of frames.
        let by_move = unsafe { ByMove::new(uffd, range, config.install) };
        place_pages(by_move.map_err(failed(StartFailure::Userfaultfd))?, handover)
    } else {
        place_pages(ByCopy::new(uffd).map_err(failed(StartFailure::Proc))?, handover)
    };
    Ok((pages.map_err(no_memory)?, None))
}

/// Returns the pool, in memory from `region`, and its first byte.
fn pool_in(region: &mut Region<'static>, layout: &PoolLayout, config: &Config) -> (Pool<'static>, *mut u8) {
    let data = &mut region.carve::<PageBytes>(layout.data_bytes.div_ceil(PAGE_BYTES))[..];
    let base = data.as_mut_ptr().cast::<u8>();
    let memory = PoolMemory {
        // SAFETY: pages are bytes, the length is within the slice above, and that slice is given up for this
        // one.
        data: unsafe { core::slice::from_raw_parts_mut(base, layout.data_bytes) },
        objects: region.carve::<ObjectMeta>(layout.objects),
        blocks: region.carve::<BlockMeta>(layout.blocks),
    };
    (Pool::new(layout, memory, config.accept_percent), base)
}

/// Places the pager. A function of its own, because a pager is large and the keeper's stack is not.
#[inline(never)]
fn place_pager(parts: Parts<'static>) -> Result<&'static Pager<'static>, Errno> {
    Ok(memory::place(Pager::new(parts))?)
}

/// Places a way of moving pages, which also wakes threads that have handed over their faults.
fn place_pages<P: Pages + 'static>(
    pages: P,
    handover: Option<&'static Handover>,
) -> Result<&'static dyn Pages, Errno> {
    Ok(match handover {
        Some(handover) => memory::place(Woken { pages, handover })?,
        None => memory::place(pages)?,
    })
}

fn config_of(settings: &Settings, features: Option<Features>) -> Config {
    let can_move = features.is_some_and(|features| features.has(Features::MOVE));
    let install = if can_move { settings.install } else { Install::Copy };
    let mut config = Config::for_budget(settings.ram_bytes, settings.pool_bytes_max, install);
    config.codec = settings.codec;
    config.packs = settings.packs != 0 && settings.codec != Codec::None;
    config.readahead = settings.readahead;
    config.page_cluster = settings.page_cluster;
    config
}

/// Makes one mapping for all of core's tables. A child gets it only to look up what it inherits. Returns the
/// region, and the mapping's address and size.
fn handed_region(
    membership: &Membership,
    config: &Config,
    pool: &PoolLayout,
) -> Result<(Region<'static>, (*mut u8, usize)), Errno> {
    let frames = config.frames as usize;
    let bytes = devices::table_bytes(membership)
        + CacheMemory::table_bytes(frames)
        + Region::bytes_for::<PageBytes>(pool.data_bytes.div_ceil(PAGE_BYTES))
        + Region::bytes_for::<ObjectMeta>(pool.objects)
        + Region::bytes_for::<BlockMeta>(pool.blocks)
        + Region::bytes_for::<Watched>(WAYS)
        + Region::bytes_for::<AtomicPtr<Leaf>>(DIRECTORY_LEAVES);
    let base = memory::reserve(bytes)?;
    // Most of the region is the pool.
    memory::keep_from_core_files(base, bytes);
    // SAFETY: only engine code uses these tables, and a child makes an engine of its own.
    unsafe { memory::keep_from_children(base, bytes) }?;
    // SAFETY: the mapping was just made. It is readable, writable, all zero, and this region's alone for
    // good.
    Ok((unsafe { Region::new(base, bytes) }, (base, bytes)))
}

fn open_device() -> Result<Uffd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(c"/dev/userfaultfd", flags, Mode::empty());
    Uffd::by_device(&device.map_err(|error| Errno(error.raw_os_error()))?)
}

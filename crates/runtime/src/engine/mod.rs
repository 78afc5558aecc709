//! The engine of one process: what its threads and its hooks share.
//!
//! The engine is made once, at start, in memory that lives as long as the process. Until memory first reaches
//! the budget the engine is *idle*. One thread looks at how much memory there is, hooks keep the list of
//! mappings, and nothing is registered. Then the engine becomes *active*. Every mapping of 128 KiB and more
//! is registered, handler threads serve faults, and the first thread evicts in the background.

pub mod dormant;
pub mod fork;
mod known;
pub mod retire;
pub mod rounds;
pub mod stacks;
pub mod start;

use crate::engine::fork::Heirs;
use crate::engine::retire::Retirement;
use crate::guard;
use crate::guard::direct::Direct;
use crate::mappings::map_lock::MapLock;
use crate::mappings::registrar::Registrar;
use crate::pressure::budget::Budget;
use crate::pressure::evictor::Evictor;
use crate::pressure::lull::Lull;
use crate::pressure::pool_share::PoolShare;
use crate::pressure::share::Share;
use crate::session::devices::{BackEnd, Devices};
use crate::session::first::{First, STATUS_FAILED};
use crate::session::record::Membership;
use crate::session::{Notice, ProcessRecord, StopReason, pack_full};
use crate::worker::ahead::AheadQueue;
use crate::worker::polling::Polling;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use farpage_core::areas::AreaSet;
use farpage_core::pager::{BATCH_MAX, Pager};
use farpage_core::stats::{Counter, Gauge};
use farpage_core::table::Leaf;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{AreaId, PAGE_BYTES, PageIndex, PageRange};
use farpage_fault::Pages;
use farpage_fault::segv::ByProtection;
use farpage_fault::signal::Handover;
use farpage_os::clock::now_ns;
use farpage_os::proc::{self, Pagemap, Rollup, Statm};
use farpage_os::sys::Errno;
use farpage_os::uffd::Uffd;
use farpage_os::{futex, memory, peek, thread};
use linux_raw_sys::general::{MADV_DOFORK, MADV_DONTFORK};

/// Pages of the smallest mapping that is managed: 128 KiB, from which on malloc maps each request by itself.
/// A larger minimum would leave out JavaScript heaps, which are mappings of 256 KiB.
pub const MANAGED_PAGES_MIN: u64 = 32;
/// Runs of zeros in one range that are write-protected or dropped at most when the range is registered. At
/// this number the work takes some tens of milliseconds.
const ZERO_RUNS_MAX: u32 = 1 << 14;

/// Eighths of all mappings that the kernel allows: where a thread that needs a mapping evicts first, and
/// where background eviction starts and stops.
const CROWD_LIMIT: u64 = 7;
const CROWD_START: u64 = 6;
const CROWD_STOP: u64 = 5;

/// How the program's faults reach the engine. What differs between the modes is asked here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMode {
    /// A fault is a message of a userfaultfd (`--faults thread`).
    Thread,
    /// A fault is SIGBUS, by a userfaultfd (`--faults signal`).
    Signal,
    /// A fault is SIGSEGV, because a page that is out may not be touched (`--faults segv`).
    Segv,
}

impl FaultMode {
    /// Whether a system call that meets an evicted page waits for the page. Otherwise the call ends with
    /// EFAULT.
    pub const fn calls_can_wait(self) -> bool {
        matches!(self, FaultMode::Thread)
    }

    /// Whether bytes get into the program through a file that only engine threads have, unless pages are
    /// filled aside.
    pub const fn installs_by_file(self) -> bool {
        matches!(self, FaultMode::Segv)
    }
}

/// Everything one process's engine has.
pub struct Engine {
    /// The session and this process's place in it.
    pub membership: Membership,
    /// This process's record in the session.
    pub record: &'static ProcessRecord,
    /// The structures and policy of `farpage_core`.
    pub pager: &'static Pager<'static>,
    /// The lock under which the program's mappings and our table say the same.
    pub map: MapLock,
    /// The limit, and the marks below it.
    pub budget: Budget,
    /// Works out this process's part of the budget.
    pub share: Share,
    /// Works out the pool's part of this process's part.
    pub pool_share: PoolShare,
    /// How pages get in and out: `ByMove`, `ByCopy` or `ByProtection`, in `Woken` if faults are handed over.
    /// `way_to_pages` in `start.rs` makes the object.
    pub pages: &'static dyn Pages,
    /// The userfaultfd from which faults come. None where faults are forbidden accesses.
    pub uffd: Option<&'static Uffd>,
    /// The same object as `pages`, where a page that is out may not be touched.
    pub protections: Option<&'static ByProtection>,
    /// The place where faulting threads hand their faults over. None if the kernel does that.
    pub handover: Option<&'static Handover>,
    /// Serves faults in the faulting threads themselves.
    pub direct: Direct,
    /// This process's id.
    pub process: u32,
    /// The areas.
    pub devices: &'static Devices,
    /// Says which pages are in memory.
    pub pagemap: Pagemap,
    /// Says how much memory the process has.
    pub statm: Statm,
    /// Says how much of that memory is shared.
    pub rollup: Rollup,
    /// First byte of the pool.
    pub pool_base: *mut u8,
    /// Whether frames may be holes. Then pages are moved, not copied.
    pub frames_move: bool,
    /// Windows that wait for the readahead threads.
    pub ahead: AheadQueue,
    /// Registers mappings for hooks, which run in threads without our descriptors.
    pub registrar: Registrar,
    /// 1 once memory has reached the budget.
    pub active: AtomicU32,
    /// 1 if a call of the program's waits for activation.
    pub activation_wanted: AtomicU32,
    /// Engine threads that don't yet have all the memory that they need.
    pub starting: AtomicU32,
    /// Not 0 while nothing may be evicted because the program has locked all its memory.
    pub all_locked: AtomicU32,
    /// Writes to areas that are under way in all threads. While there are any, frames will be free soon.
    pub writes_under_way: AtomicU32,
    /// Threads that read a page from an area because a fault waits for that page.
    pub faults_reading: AtomicU32,
    /// Lets one of these threads poll for the read instead of sleeping.
    pub polling: Polling,
    /// Whether a thread is looking for dead processes.
    pub reaping: AtomicBool,
    /// Decides whether the faulting threads or the keeper evict.
    pub evictor: Evictor,
    /// Lets faulting threads wait while other threads evict.
    pub lull: Lull,
    /// Threads that are evicting just now. They have frames, and will soon have memory.
    pub evicting: AtomicU32,
    /// The time until which devices are assumed to pin all that could be evicted, in ns.
    pub unmovable_until_ns: AtomicU64,
    /// Whether the last try to make the pool denser found nothing to do, or no free space in the pool.
    pub densify_is_vain: AtomicBool,
    /// Whether a thread of the program can't be armed for now, or the engine ends. Then no thread waits for
    /// activation.
    pub activation_is_doubtful: AtomicBool,
    /// Not 0 once the program has called mlockall(MCL_FUTURE).
    pub lock_future: AtomicU32,
    /// The children's generations, and what a parent left to this process.
    pub heirs: Heirs,
    /// In a fork's child, the parent's engine as of the fork. Kept as long as the bytes of some pages are
    /// only there.
    pub elder: AtomicPtr<Engine>,
    /// Mappings of our own tables and frames: first byte and length in bytes. A child gets them only to look
    /// pages up.
    pub tables: [(*mut u8, usize); 2],
    /// How far the engine's end is, if it ends before the program.
    pub retirement: Retirement,
}

// SAFETY: `pool_base` and `tables` are only addresses to compute from. All other fields are Sync by
// themselves.
unsafe impl Sync for Engine {}
// SAFETY: as above.
unsafe impl Send for Engine {}

impl Engine {
    /// Returns how faults reach this engine.
    pub const fn mode(&self) -> FaultMode {
        match (self.handover, self.protections) {
            (None, _) => FaultMode::Thread,
            (Some(_), None) => FaultMode::Signal,
            (Some(_), Some(_)) => FaultMode::Segv,
        }
    }

    /// Whether memory has ever reached the budget.
    pub fn is_active(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `activate`: a thread that sees 1 also sees the setup of
        // the registrations.
        self.active.load(Ordering::Acquire) != 0
    }

    /// Returns the parents' engines as of the forks. Pages may still be in their books. Under the map lock.
    pub fn elders(&self) -> impl Iterator<Item = &Engine> {
        // SAFETY: the pointer is null, or points to an engine that was placed for good. The engine's tables
        // stay while the map lock is held.
        let next = |engine: &Engine| unsafe { engine.elder.load(Ordering::Relaxed).as_ref() };
        core::iter::successors(next(self), move |elder| next(elder))
    }

    /// Returns how many pages may be parked, given this process's part of the budget.
    pub fn parked_max(&self) -> u32 {
        let most = u64::from(self.pager.config.parked_max);
        (most * self.budget.limit_bytes() / self.budget.total_bytes()).max(1) as u32
    }

    /// Whether the keeper can free space in a pool that is full, though there is no area.
    pub fn may_densify(&self) -> bool {
        let pager = self.pager;
        pager.config.codec.densifies()
            && !self.densify_is_vain.load(Ordering::Relaxed)
            && !pager.areas().any_writable()
            && pager.pool().over_accept_threshold()
            && pager.pool().first_to_densify(false).is_some()
    }

    /// Whether a thread that needs memory must evict first.
    pub fn is_over_limit(&self) -> bool {
        self.charged() >= self.budget.limit_bytes() || self.is_crowded(CROWD_LIMIT)
    }

    /// Whether a few pages for each thread might be too many, by the marks of the threads that are the
    /// evictors now.
    pub fn is_near_limit(&self) -> bool {
        let charged = self.charged();
        let is_near = charged > self.budget.near_limit()
            && (charged > self.budget.inline_near_limit() || !self.evicts_inline(now_ns()));
        is_near || self.is_crowded(CROWD_START)
    }

    /// Whether a readahead thread should evict first. Where walks are known to go on soon, the thread waits
    /// for the pages that they leave behind, as long as there is headroom. The clock hand would take the
    /// pages that the walks come to next.
    pub fn wants_headroom(&self) -> bool {
        self.is_due(self.evicts_inline(now_ns()))
            && (self.is_near_limit() || !self.pager.is_waiting_for_walks())
    }

    /// Returns whether the keeper should be at work.
    pub fn is_over_start(&self) -> bool {
        self.charged() > self.budget.start_at() || self.is_crowded(CROWD_START)
    }

    /// Whether memory is above the mark where eviction starts. `is_inline` says that threads of the program
    /// are the evictors now, whose mark is another one.
    pub fn is_due(&self, is_inline: bool) -> bool {
        let at = if is_inline { self.budget.inline_start_at() } else { self.budget.start_at() };
        self.charged() > at || self.is_crowded(CROWD_START)
    }

    /// Whether background eviction should go on.
    pub fn is_over_stop(&self) -> bool {
        self.charged() > self.budget.stop_at() || self.is_crowded(CROWD_STOP)
    }

    /// Whether threads of the program that were just served evict, rather than the keeper. Not while walks
    /// bring in much, because those threads hardly fault then.
    pub fn evicts_inline(&self, now_ns: u64) -> bool {
        let can_be = Direct::is_possible(self) && self.frames_move && self.evictions_allowed();
        can_be && !self.pager.is_scan_on() && self.evictor.is_inline(now_ns)
    }

    /// Whether victims are taken in lulls. Not while walks bring in much: threads hardly fault then, and each
    /// batch must be looked for behind the walks first.
    pub fn evicts_in_lulls(&self, now_ns: u64) -> bool {
        self.frames_move && self.lull.is_worthwhile(now_ns) && !self.pager.is_scan_on()
    }

    /// Waits for the keeper to make headroom, if pages are taken in lulls. Called by a thread of the program
    /// that needs memory, at the limit. Afterwards there may be headroom.
    #[cold]
    pub fn wait_for_headroom(&self) {
        let now = now_ns();
        if self.evicts_in_lulls(now) && self.evictions_allowed() && self.lull.expects_headroom(now) {
            self.budget.ring();
            self.lull.wait_for_headroom(|| self.is_over_limit());
        }
    }

    /// Lets threads that wait for headroom go on, if there is headroom.
    pub fn let_waiters_go_on(&self) {
        if self.lull.is_waited_for() {
            self.budget.refresh(self.pager);
            if !self.is_over_limit() {
                self.lull.made_headroom();
            }
        }
    }

    /// Makes the marks of the budget follow the rate at which pages come in. Pages that went out count as
    /// well, because they have come in before. For the keeper.
    pub fn follow_rate(&self, now_ns: u64) {
        let went = self.pager.stats().get(Counter::EvictTaken);
        self.budget.have_come_in(went + self.pager.resident(), now_ns);
    }

    /// Returns the number of victims of one batch, where no fault waits for the end of the batch.
    pub fn background_batch(&self) -> usize {
        (self.budget.together() as usize).min(BATCH_MAX)
    }

    /// Whether victims should be neighbours above all, because single pages make more mappings.
    pub fn wants_neighbours(&self) -> bool {
        self.is_crowded(CROWD_STOP)
    }

    /// Whether the mappings have reached this many eighths of those that the kernel allows. Evicting the
    /// pages between closed pages makes fewer mappings.
    fn is_crowded(&self, eighths: u64) -> bool {
        self.protections.is_some_and(|protections| protections.crowd() >= eighths)
    }

    /// Whether pages may be taken out now. Under the map lock.
    pub fn evictions_allowed(&self) -> bool {
        self.all_locked.load(Ordering::Relaxed) == 0 && !self.keeps_all_in()
    }

    /// Asks the kernel how much anonymous memory the process has. Returns the bytes.
    pub fn measure(&self) -> u64 {
        self.measure_after(self.budget.other())
    }

    /// Measures anew after memory that was unmanaged until now has been taken over.
    pub fn measure_anew(&self) -> u64 {
        self.measure_after(u64::MAX)
    }

    fn measure_after(&self, before: u64) -> u64 {
        let known = self.budget.known(self.pager);
        let anonymous = self.statm.anonymous_bytes().unwrap_or(0);
        self.budget.measured(self.pager, known, anonymous, before);
        anonymous
    }

    /// Returns the bytes by which the program can still grow before activation, as last measured.
    pub fn headroom(&self) -> u64 {
        self.budget.activate_at().saturating_sub(self.charged())
    }

    /// Prepares for a system call in which the program fills `bytes`. The call may hold the kernel's lock of
    /// the mappings until it ends. So everything is registered before a call that could pass the budget
    /// begins. Without any lock. If a thread can't be armed, the engine never activates, and the program goes
    /// over its budget.
    pub fn prepare_to_fill(&self, bytes: u64) {
        while bytes > self.headroom() && self.is_to_activate() {}
    }

    /// Has the keeper register all mappings that are there, if that is possible, and waits for it. Without
    /// any lock. Engine threads need no more memory afterwards.
    pub fn activate_now(&self) {
        while self.is_to_activate() {}
        loop {
            let starting = self.starting.load(Ordering::Relaxed);
            // An engine that ends has no engine threads any more.
            if starting == 0 || !self.is_active() {
                return;
            }
            futex::wait_for(&self.starting, starting, 1_000_000);
        }
    }

    /// Notes that the calling engine thread has all that it needs.
    pub(crate) fn thread_has_started(&self) {
        self.starting.fetch_sub(1, Ordering::Relaxed);
        futex::wake(&self.starting, u32::MAX >> 1);
    }

    /// Asks the keeper to activate, and waits a while. False if the engine is active, or perhaps never can
    /// be.
    fn is_to_activate(&self) -> bool {
        if self.is_active() || self.activation_is_doubtful.load(Ordering::Relaxed) {
            return false;
        }
        self.activation_wanted.store(1, Ordering::Relaxed);
        self.budget.ring();
        futex::wait_for(&self.active, 0, 1_000_000);
        true
    }

    /// Copies what the pager knows about itself to the record, where the supervisor and other processes see
    /// it.
    pub fn publish_gauges(&self) {
        self.pager.refresh_gauges();
        let areas = self.pager.areas();
        for (id, used) in self.record.slots_used.iter().enumerate().take(areas.count()) {
            used.store(areas.in_use_of(AreaId(id as u8)), Ordering::Relaxed);
        }
    }

    /// Tells the user why nothing could be evicted although memory is over the budget.
    pub fn explain_over_budget(&self) {
        if self.all_locked.load(Ordering::Relaxed) != 0 {
            return self.record.notice(Notice::Locked, self.budget.total_bytes());
        }
        let stats = self.pager.stats();
        let resident = self.pager.resident() * PAGE_BYTES as u64;
        let unmanaged = stats.gauge(Gauge::Anonymous).saturating_sub(resident + self.pager.own_bytes());
        if unmanaged > self.budget.total_bytes() / 2 {
            self.record.notice(Notice::Unmanaged, unmanaged);
        }
    }

    /// Tells the user of a call about the memory of `process` that failed with EFAULT, if that process
    /// belongs to the run. Signal-safe: atomics only.
    pub fn note_unreached_peer(&self, process: u32) {
        let records = &self.membership.session.processes;
        let is_of_run = || records.iter().any(|record| record.pid.load(Ordering::Relaxed) == process);
        if !self.mode().calls_can_wait() && process != self.process && is_of_run() {
            self.record.notice(Notice::PeerOut, u64::from(process));
        }
    }

    /// Returns the program's first thread that lives, if /proc tells. The process can do what that thread
    /// can.
    pub fn first_thread(&self) -> Option<u32> {
        let is_ours = |thread| thread::all().any(|ours| ours.number() == Some(thread));
        proc::first_thread(self.process, is_ours)
    }

    /// Tells the user of rings that the program has begun, where faults aren't messages: rings name memory
    /// that may be out soon.
    pub fn note_rings(&self) {
        let rings = || self.first_thread().map_or(0, proc::rings);
        let rings = if self.mode().calls_can_wait() { 0 } else { rings() };
        if rings > 0 {
            self.record.notice(Notice::Ring, rings);
        }
    }

    /// Tells the user that neither the pool nor an area takes another page. If the pool may take pages soon,
    /// there is nothing to tell.
    pub fn explain_full(&self) {
        let areas = self.pager.areas();
        let file_bytes = farpage_os::memory::file_bytes_max();
        let is_beyond = |at| u64::from(areas.slots(AreaId(at as u8))) * PAGE_BYTES as u64 > file_bytes;
        if (0..areas.count()).any(is_beyond) {
            // No area is larger than the limit that the run began with.
            return self.record.notice(Notice::FileLimit, file_bytes);
        }
        if self.may_densify() || self.pager.pool().accepts() {
            return;
        }
        if areas.count() == 0 {
            return self.record.notice(Notice::PoolFull, self.pager.pool().usage().bytes as u64);
        }
        // Where every area has failed, the user has heard of that.
        let ids = || (0..areas.count()).map(|at| AreaId(at as u8));
        let full = areas.full();
        if full != AreaSet::default() {
            let used: u64 =
                ids().filter(|id| full.contains(*id)).map(|id| u64::from(areas.in_use_of(id))).sum();
            let mut not_full = AreaSet::default();
            ids().filter(|id| !full.contains(*id)).for_each(|id| not_full.insert(id));
            self.record.notice(Notice::AreaFull, pack_full(used * PAGE_BYTES as u64, not_full.bits()));
        }
    }

    /// Ends the program, because what the engine knows of its memory can't be kept true. A program that has
    /// ended is better than one with wrong bytes.
    pub fn stop_program(&self, why: StopReason) -> ! {
        self.record.notice(Notice::Stopped, why as u64);
        First::tell_at_once(self.membership.session, STATUS_FAILED);
        farpage_os::sys::exit_group(STATUS_FAILED)
    }

    /// Frees the clusters of dead processes. Returns whether there were any.
    pub fn reap_dead_processes(&self) -> bool {
        // One thread does this at a time. A record's lock belongs to the process, so a second thread would
        // get it too. The first thread's unlock would then let a new process take the record while the second
        // thread still frees clusters.
        // Ordering: AcqRel, as for a lock. The store releases it.
        if self.reaping.swap(true, Ordering::AcqRel) {
            return false;
        }
        let freed =
            self.pager.areas().reap(|holder, free| self.membership.if_dead(holder as usize - 1, free));
        self.reaping.store(false, Ordering::Release);
        freed > 0
    }

    /// Runs `look`, which looks at other processes' records, while no other thread does so. See
    /// [`Engine::reap_dead_processes`].
    pub fn while_nobody_reaps<T>(&self, look: impl FnOnce() -> T) -> T {
        // Ordering: as in `reap_dead_processes`.
        while self.reaping.swap(true, Ordering::AcqRel) {
            farpage_os::clock::sleep_ns(50_000);
        }
        let result = look();
        self.reaping.store(false, Ordering::Release);
        result
    }

    /// Makes a back end for one engine thread.
    pub fn back_end(&self, area: AreaId) -> BackEnd {
        self.devices.back_end(area, self.membership.lock())
    }

    /// Gives the table memory for every page in `range`. Under the exclusive map lock.
    pub fn attach_leaves(&self, range: PageRange) -> Result<(), Errno> {
        let table = self.pager.table();
        let mut page = range.start;
        while page < range.end {
            if !table.has_leaf(page) {
                let base = memory::reserve(size_of::<Leaf>())?;
                // SAFETY: only engine code uses leaves, and a child makes an engine of its own.
                unsafe { memory::keep_from_children(base, size_of::<Leaf>()) }?;
                // SAFETY: the memory is zeroed, has the right size and page alignment, and is ours for good.
                // `Leaf` is `Zeroed`.
                table.attach(page, unsafe { &*base.cast::<Leaf>() });
            }
            let leaf_pages = farpage_core::table::LEAF_PAGES as u64;
            page = PageIndex((page.0 / leaf_pages + 1) * leaf_pages);
        }
        Ok(())
    }

    /// Registers every unregistered part of the mapping around `page`, if the mapping is big enough.
    /// `register` must register one range. Under the exclusive map lock.
    pub fn take_over(&self, page: PageIndex, register: impl Fn(PageRange) -> Result<(), Errno>) {
        if self.keeps_all_in() {
            return;
        }
        let stretch = self.pager.ranges.lock().stretch(page);
        let Some(stretch) = stretch.filter(|stretch| stretch.count() >= MANAGED_PAGES_MIN) else { return };
        let mut from = stretch.start;
        while from < stretch.end {
            let next = self.pager.ranges.lock().at_or_after(from);
            let Some(range) = next.filter(|range| range.pages.start < stretch.end) else { return };
            from = range.pages.end;
            // Where `protections` notes what the program allows itself, memory that may not be both read and
            // written isn't registered.
            let is_forbidden = self.mode() == FaultMode::Segv && range.flags.has(Flags::PROTECTED);
            if range.flags.has(Flags::REGISTERED) || is_forbidden || !range.flags.may_register() {
                continue;
            }
            // The range is marked before it is registered. From now on a thread that faults there waits for
            // us. A thread that makes a call brings in the memory that the call uses.
            let mark = |set: fn(Flags) -> Flags| {
                let marked = self.pager.ranges.lock().update(range.pages, set);
                debug_assert!(marked.is_ok());
            };
            mark(|flags| flags.with(Flags::REGISTERED));
            self.fill_what_calls_use(range.pages);
            if register(range.pages).is_ok() {
                self.pager.stats().count(Counter::Registered);
                self.pager.stats().gauge_add(Gauge::ManagedBytes, range.pages.bytes() as u64);
            } else {
                mark(|flags| flags.without(Flags::REGISTERED));
            }
        }
    }

    /// Does the same for every mapping that has a part in `pages`.
    pub fn take_over_all(&self, pages: PageRange, register: impl Fn(PageRange) -> Result<(), Errno>) {
        let mut from = pages.start;
        let known = |from| self.pager.ranges.lock().at_or_after(from);
        while let Some(range) = known(from).filter(|range| range.pages.start < pages.end) {
            let stretch = self.pager.ranges.lock().stretch(range.pages.start).unwrap_or(range.pages);
            self.take_over(range.pages.start, &register);
            from = stretch.end;
        }
    }

    /// Brings in what is missing of the memory that calls under way use, where the kernel doesn't wait for
    /// us. The memory must be there before it is registered. Calls that begin now find that the range is
    /// marked.
    fn fill_what_calls_use(&self, range: PageRange) {
        if self.mode().calls_can_wait() {
            return;
        }
        guard::rooms::for_each_held(|held| {
            let pages = held.intersection(range);
            // SAFETY: populating changes no byte.
            let fill = || unsafe { memory::advise(pages, linux_raw_sys::general::MADV_POPULATE_WRITE) };
            if !pages.is_empty() && fill().is_err() {
                // A part may not be written, or Linux is older than 5.14. Reading brings in a page of zeros,
                // which is enough.
                (pages.start.0..pages.end.0)
                    .for_each(|page| _ = peek::is_readable(PageIndex(page).address()));
            }
        });
    }

    /// Registers one range in this thread, which must be an engine thread. Gives the table leaves, registers
    /// with the userfaultfd, keeps the range from children, and notes which pages are there. Under the
    /// exclusive map lock, which another thread may hold. In a fork's child, what `parent` had registered is
    /// registered as it was there.
    pub fn register_range(&self, range: PageRange, parent: Option<&ByProtection>) -> Result<(), Errno> {
        self.attach_leaves(range)?;
        self.register_parts(range, parent).inspect_err(|_| {
            // Whatever was done is undone, and the program goes on without us there.
            let _ = self.protections.map(|protections| protections.unregister(range));
            let known = self.pager.ranges.lock().find(range.start);
            if !known.is_some_and(|known| known.flags.has(Flags::DONT_FORK)) {
                // SAFETY: this is the program's own setting.
                let _ = unsafe { memory::advise(range, MADV_DOFORK) };
            }
        })?;
        // Pages of zeros that were only read take memory when they are written, and the engine wouldn't hear
        // of it. So a program that reads all of a mapping, and writes it during activation, could take twice
        // its budget. Runs of zeros are needed for nothing else, so an error of the kernel's is ignored.
        // `ZERO_RUNS_MAX` bounds the work, because all threads wait for us here.
        let mut runs = 0;
        let _ = self.pagemap.for_each_zero_run(range, |run| {
            runs += 1;
            let is_heard_of = runs <= ZERO_RUNS_MAX
                && if self.mode().calls_can_wait() {
                    self.pages.protect(run)
                } else {
                    self.drop_unused_zeros(run)
                };
            if !is_heard_of || self.mode().calls_can_wait() {
                self.budget.mapped_zeros(run.count());
            }
        });
        match self.protections {
            Some(protections) => protections.for_each_open(range, |page| self.pager.adopt_present(page)),
            None => {
                if self.pagemap.for_each_present(range, |page| self.pager.adopt_present(page)).is_err() {
                    // Faults are already handled here, and pages that are there would be taken for pages
                    // never touched.
                    self.stop_program(StopReason::Tables);
                }
            }
        }
        Ok(())
    }

    /// Makes faults in `range` come to the engine, and keeps the range from children.
    fn register_parts(&self, range: PageRange, parent: Option<&ByProtection>) -> Result<(), Errno> {
        // A child that the engine doesn't hear of must not see evicted pages as zeros. The child gets SIGSEGV
        // instead.
        // SAFETY: the advice only keeps the range from children.
        unsafe { memory::advise(range, MADV_DONTFORK) }?;
        let register = |range, is_held| match (self.protections, parent) {
            (Some(protections), _) if is_held => protections.register_open(range),
            (Some(protections), Some(parent)) => protections.register_like(parent, range),
            // SAFETY: a page of the range that is missing and has no entry reads as zeros, and zeros are
            // installed for it. Nobody touches the range's entries meanwhile, under the exclusive lock.
            _ => unsafe { self.pages.register(range) },
        };
        match self.protections {
            Some(_) => self.for_each_part(range, register),
            None => register(range, false),
        }
    }

    /// Calls `visit` for each part of `pages`, in order, until it fails. Says of each part whether a system
    /// call holds it or it has to stay in memory.
    pub fn for_each_part(
        &self,
        pages: PageRange,
        mut visit: impl FnMut(PageRange, bool) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut from = pages.start;
        while from < pages.end {
            let rest = PageRange::new(from, pages.end);
            let mut next = PageRange::of(pages.end, 0);
            let mut look = |range: PageRange| {
                let part = range.intersection(rest);
                if !part.is_empty() && part.start <= next.start {
                    next = part;
                }
            };
            guard::rooms::for_each_held(&mut look);
            self.next_with(rest, Flags::HELD).into_iter().for_each(look);
            let before = PageRange::new(from, next.start);
            if !before.is_empty() {
                visit(before, false)?;
            }
            if !next.is_empty() {
                visit(next, true)?;
            }
            from = next.end;
        }
        Ok(())
    }

    /// Closes all of `pages` in the kernel, so that they are one mapping there, except for pages that calls
    /// use just now.
    pub fn join(&self, protections: &ByProtection, pages: PageRange) {
        let _ = self.for_each_part(pages, |part, is_held| {
            if !is_held {
                protections.join(part);
            }
            Ok(())
        });
    }

    /// Whether all of `pages` is registered.
    pub fn is_wholly_registered(&self, pages: PageRange) -> bool {
        self.is_wholly(pages, Flags::REGISTERED)
    }

    /// Whether all of `pages` is known and has `flag`.
    pub fn is_wholly(&self, pages: PageRange, flag: Flags) -> bool {
        let mut from = pages.start;
        while from < pages.end {
            let rest = PageRange::new(from, pages.end);
            match self.next_with(rest, flag).filter(|part| part.start == from) {
                Some(part) => from = part.end,
                None => return false,
            }
        }
        true
    }

    /// Whether none of `pages` is known, or all of it with the same flags. Parts that are known with
    /// different flags are different mappings.
    pub fn is_of_one_kind(&self, pages: PageRange) -> bool {
        let kind = |flags: Flags| flags.without(Flags::REGISTERED).without(Flags::HELD);
        let ranges = self.pager.ranges.lock();
        let Some(first) = ranges.at_or_after(pages.start).filter(|range| range.pages.start < pages.end)
        else {
            return true;
        };
        let mut from = pages.start;
        while from < pages.end {
            match ranges.find(from).filter(|range| kind(range.flags) == kind(first.flags)) {
                Some(range) => from = range.pages.end,
                None => return false,
            }
        }
        true
    }

    /// Whether a part of `pages` is registered, and another part isn't.
    pub fn is_partly_registered(&self, pages: PageRange) -> bool {
        self.next_with(pages, Flags::REGISTERED).is_some() && !self.is_wholly_registered(pages)
    }

    /// Returns the first part of `pages` whose range has `flag`.
    pub fn next_with(&self, pages: PageRange, flag: Flags) -> Option<PageRange> {
        let ranges = self.pager.ranges.lock();
        let mut from = pages.start;
        loop {
            let range = ranges.at_or_after(from).filter(|range| range.pages.start < pages.end)?;
            if range.flags.has(flag) {
                return Some(range.pages.intersection(pages));
            }
            from = range.pages.end;
        }
    }

    /// Drops the pages of zeros in `run` that no call is using: a call would find them missing. False if some
    /// can't be dropped.
    fn drop_unused_zeros(&self, run: PageRange) -> bool {
        let mut are_all = true;
        let _ = self.for_each_part(run, |part, is_held| {
            are_all &= !is_held && self.drop_zeros(part);
            Ok(())
        });
        are_all
    }

    /// Drops pages of zeros. A thread that touches one gets another page of zeros. Where calls of the
    /// program's can't wait for us, a page must not be protected unless its entry says so. False if the pages
    /// can't be dropped.
    fn drop_zeros(&self, run: PageRange) -> bool {
        // The pages are protected first, so that a page that is still zero stays so. A thread that wants to
        // write waits for the map lock.
        if !self.pages.protect(run) {
            return false;
        }
        let dropped = self.pagemap.for_each_zero_run(run, |zeros| {
            // SAFETY: a page that is missing here reads as zeros, which is what the dropped pages are.
            let _ = unsafe { memory::advise(zeros, linux_raw_sys::general::MADV_DONTNEED) };
        });
        self.pages.unprotect(run);
        dropped.is_ok()
    }

    /// Whether the bytes of some pages are still where a fork's parent had put them.
    pub fn inherits(&self) -> bool {
        !self.elder.load(Ordering::Relaxed).is_null()
    }

    /// Registers what a fork's parent had registered, and takes over the pages that were out. Under the
    /// exclusive map lock. The program doesn't run yet.
    pub fn take_inheritance(&self) {
        // SAFETY: the pointer is null, or points to an engine that was placed for good.
        let Some(elder) = (unsafe { self.elder.load(Ordering::Relaxed).as_ref() }) else { return };
        let mut from = PageIndex(0);
        while let Some(range) = { elder.pager.ranges.lock().at_or_after(from) } {
            from = range.pages.end;
            if !range.flags.has(Flags::REGISTERED) || range.flags.has(Flags::DONT_FORK) {
                continue;
            }
            let marked = self.pager.ranges.lock().update(range.pages, |flags| flags.with(Flags::REGISTERED));
            if marked.is_err() || self.register_range(range.pages, elder.protections).is_err() {
                self.stop_program(StopReason::Tables);
            }
            self.pager.stats().count(Counter::Registered);
            self.pager.stats().gauge_add(Gauge::ManagedBytes, range.pages.bytes() as u64);
            if let (Some(own), Some(parents)) = (self.protections, elder.protections)
                && own.allow_like(parents, range.pages).is_err()
            {
                self.stop_program(StopReason::Tables);
            }
            if !range.flags.has(Flags::WIPE_ON_FORK) {
                self.pager.inherit(range.pages, |page| {
                    // SAFETY: the program hasn't run in this process yet, so this page isn't one that the
                    // program made.
                    let dropped = unsafe {
                        memory::advise(PageRange::of(page, 1), linux_raw_sys::general::MADV_DONTNEED)
                    };
                    let closed = self.protections.map_or(Ok(()), |own| own.withdraw(PageRange::of(page, 1)));
                    if dropped.and(closed).is_err() {
                        self.stop_program(StopReason::Tables);
                    }
                });
            }
        }
    }

    /// Lets a fork's child have the managed memory, or keeps the memory from children again. Under the
    /// exclusive map lock.
    pub fn show_to_children(&self, show: bool) -> Result<(), Errno> {
        let advice = if show { MADV_DOFORK } else { MADV_DONTFORK };
        let mut from = PageIndex(0);
        while let Some(range) = { self.pager.ranges.lock().at_or_after(from) } {
            if range.flags.has(Flags::REGISTERED) && !range.flags.has(Flags::DONT_FORK) {
                // SAFETY: the child registers the range before it runs. It finds what is out in its copy of
                // our tables.
                match unsafe { memory::advise(range.pages, advice) } {
                    // The range has a hole that the engine hasn't heard of. The kernel has advised all the
                    // rest.
                    Ok(()) | Err(Errno::ENOMEM) => {}
                    Err(error) => return Err(error),
                }
            }
            from = range.pages.end;
        }
        Ok(())
    }

    /// Does the same for the tables, and for the frames and pool objects that hold what is out.
    pub fn show_tables(&self, show: bool) -> Result<(), Errno> {
        // SAFETY: a child of a fork that the engine makes only looks pages up there.
        self.for_each_table(|base, bytes| unsafe { fork::show_mapping(base, bytes, show) })
    }

    /// Calls `visit` for each mapping of our own tables, until it fails.
    pub fn for_each_table(
        &self,
        mut visit: impl FnMut(*mut u8, usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        // Leaves are found through the tables.
        self.pager.table().for_each_leaf(|leaf| visit(leaf.cast(), size_of::<Leaf>()))?;
        self.tables.iter().try_for_each(|(base, bytes)| visit(*base, *bytes))
    }
}

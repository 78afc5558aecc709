//! The engine of one process: what its threads and its hooks share.
//!
//! Made once, at start, in memory that lives as long as the process. Until the budget is first reached it is
//! *idle*: one thread looks at how much memory there is, hooks keep the list of mappings, nothing is
//! registered. Then it becomes *active*: every mapping of 128 KiB and more is registered, handler threads serve
//! faults, and the first thread evicts in the background.

use crate::ahead::AheadQueue;
use crate::budget::Budget;
use crate::devices::{BackEnd, Devices};
use crate::first::{First, STATUS_FAILED};
use crate::fork::{self, Heirs};
use crate::guard;
use crate::guard::direct::Direct;
use crate::lull::Lull;
use crate::map_lock::MapLock;
use crate::polling::Polling;
use crate::pool_share::PoolShare;
use crate::record::Membership;
use crate::registrar::Registrar;
use crate::retire::Retirement;
use crate::session::{Notice, ProcessRecord, StopReason};
use crate::share::Share;
use crate::takes::Takes;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
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
use farpage_os::{futex, memory, peek};
use linux_raw_sys::general::{MADV_DOFORK, MADV_DONTFORK};

/// Mappings smaller than this are not worth managing: 128 KiB, from where on malloc maps what it is asked for by itself.
/// JavaScript heaps are mappings of 256 KiB: when this was 1 MiB, node had nothing but its tables to evict.
pub const MANAGED_PAGES_MIN: u64 = 32;
/// Runs of zeros in one range that are write-protected, or dropped, when it is registered: some tens of milliseconds.
const ZERO_RUNS_MAX: u32 = 1 << 14;

/// Eighths of all mappings at which a thread that needs one evicts first, and the background thread starts and stops.
const CROWD_LIMIT: u64 = 7;
const CROWD_START: u64 = 6;
const CROWD_STOP: u64 = 5;

/// Everything one process's engine has.
pub struct Engine {
    /// The session and our place in it.
    pub membership: Membership,
    /// Our record in the session.
    pub record: &'static ProcessRecord,
    /// Books and decisions.
    pub pager: &'static Pager<'static>,
    /// Mappings and table say the same.
    pub map: MapLock,
    /// How much is too much.
    pub budget: Budget,
    /// How much of it is this process's.
    pub share: Share,
    /// How much of that is the pool's.
    pub pool_share: PoolShare,
    /// The program's memory.
    pub pages: &'static dyn Pages,
    /// Where faults come from; none where they are forbidden accesses.
    pub uffd: Option<&'static Uffd>,
    /// The same way to the program's memory as `pages`, where what is out may not be touched.
    pub protections: Option<&'static ByProtection>,
    /// Where threads that have run into a fault hand it over; none if the kernel does that.
    pub handover: Option<&'static Handover>,
    /// Faults that those threads serve by themselves.
    pub direct: Direct,
    /// This process.
    pub process: u32,
    /// The areas.
    pub devices: &'static Devices,
    /// Which pages are there.
    pub pagemap: Pagemap,
    /// How much memory there is.
    pub statm: Statm,
    /// How much of it is shared.
    pub rollup: Rollup,
    /// First byte of the pool.
    pub pool_base: *mut u8,
    /// Frames may be holes: pages are moved, not copied.
    pub frames_move: bool,
    /// Readahead that waits for its thread.
    pub ahead: AheadQueue,
    /// Registers mappings for hooks, which have no descriptor.
    pub registrar: Registrar,
    /// 1 once the budget was reached.
    pub active: AtomicU32,
    /// 1 if a call of the program's is waiting for that.
    pub activation_wanted: AtomicU32,
    /// Engine threads that don't have all the memory yet that they need.
    pub starting: AtomicU32,
    /// Not 0 while nothing may be evicted because the program has locked all its memory.
    pub all_locked: AtomicU32,
    /// Writes to areas that are under way, of all threads: while there are any, frames will be free soon.
    pub writes_under_way: AtomicU32,
    /// Threads that read a page from an area because somebody waits for just that page.
    pub faults_reading: AtomicU32,
    /// How one of them doesn't sleep.
    pub polling: Polling,
    /// Whether a thread is looking for dead processes.
    pub reaping: AtomicBool,
    /// Who takes pages out.
    pub takes: Takes,
    /// Threads that fault wait while others take pages out.
    pub lull: Lull,
    /// Threads that are evicting just now: they have frames, and will soon have memory.
    pub evicting: AtomicU32,
    /// Until then all that could be evicted is held by devices.
    pub unmovable_until_ns: AtomicU64,
    /// There was nothing in the pool to make denser, or no room for it, when that was tried last.
    pub densify_is_vain: AtomicBool,
    /// A thread of the program can't be armed: nothing will be evicted.
    pub cant_be_armed: AtomicBool,
    /// Not 0 once the program has called mlockall(MCL_FUTURE).
    pub lock_future: AtomicU32,
    /// Children, and what was left to us as one.
    pub heirs: Heirs,
    /// In a fork's child: its parent's engine as of the fork, as long as there are pages whose bytes are only there.
    pub elder: AtomicPtr<Engine>,
    /// Mappings of our own tables and frames: first byte and bytes. A child gets them only to look pages up.
    pub tables: [(*mut u8, usize); 2],
    /// Whether the program goes on without us, and from when.
    pub retirement: Retirement,
}

// SAFETY: `pool_base` and `tables` are only addresses to compute from; everything else is Sync by itself.
unsafe impl Sync for Engine {}
// SAFETY: as above.
unsafe impl Send for Engine {}

impl Engine {
    /// Whether the budget was ever reached.
    pub fn is_active(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `activate`: who sees it sees the registrations' setup.
        self.active.load(Ordering::Acquire) != 0
    }

    /// Parents' engines as of the forks, in whose books pages may still be. Under the map lock.
    pub fn elders(&self) -> impl Iterator<Item = &Engine> {
        // SAFETY: null, or an engine that was placed for good; its tables stay while the map lock is held.
        let next = |engine: &Engine| unsafe { engine.elder.load(Ordering::Relaxed).as_ref() };
        core::iter::successors(next(self), move |elder| next(elder))
    }

    /// How many pages may be parked, with this process's part of the budget.
    pub fn parked_max(&self) -> u32 {
        let most = u64::from(self.pager.config.parked_max);
        (most * self.budget.limit_bytes() / self.budget.total_bytes()).max(1) as u32
    }

    /// Whether the keeper can make room in a pool that is full, though there is no area.
    pub fn may_densify(&self) -> bool {
        let pager = self.pager;
        pager.config.codec.densifies()
            && !self.densify_is_vain.load(Ordering::Relaxed)
            && !pager.areas().any_writable()
            && pager.pool().over_accept_threshold()
            && pager.pool().first_to_densify(false).is_some()
    }

    /// Whether a thread that needs memory must make some first.
    pub fn is_over_limit(&self) -> bool {
        self.charged() >= self.budget.limit_bytes() || self.is_crowded(CROWD_LIMIT)
    }

    /// Whether a few pages for each thread might be too many, by the marks of whoever takes pages out just now.
    pub fn is_near_limit(&self) -> bool {
        let charged = self.charged();
        let is_near = charged > self.budget.near_limit()
            && (charged > self.budget.near_limit_here() || !self.takes_are_here(now_ns()));
        is_near || self.is_crowded(CROWD_START)
    }

    /// Whether who reads ahead should evict first. Where walks are known to go on soon, what they leave behind is waited for as
    /// long as there is room: the hand would take what they come to next.
    pub fn wants_room(&self) -> bool {
        self.is_due(self.takes_are_here(now_ns()))
            && (self.is_near_limit() || !self.pager.is_waiting_for_walks())
    }

    /// Whether the background thread should be at work.
    pub fn is_over_start(&self) -> bool {
        self.charged() > self.budget.start_at() || self.is_crowded(CROWD_START)
    }

    /// Whether pages are to be taken out, by whoever does it just now: `are_here` says that threads of the program do.
    pub fn is_due(&self, are_here: bool) -> bool {
        let at = if are_here { self.budget.start_here_at() } else { self.budget.start_at() };
        self.charged() > at || self.is_crowded(CROWD_START)
    }

    /// Whether it should go on.
    pub fn is_over_stop(&self) -> bool {
        self.charged() > self.budget.stop_at() || self.is_crowded(CROWD_STOP)
    }

    /// Whether threads of the program that were served take pages out, rather than the keeper. Not while walks bring in much:
    /// those threads hardly fault then.
    pub fn takes_are_here(&self, now_ns: u64) -> bool {
        let can_be = Direct::is_possible(self) && self.frames_move && self.evictions_allowed();
        can_be && !self.pager.is_scan_on() && self.takes.are_here(now_ns)
    }

    /// Whether victims are taken in lulls. Not while walks bring in much: those threads hardly fault then, and each batch must be
    /// looked for behind the walks first.
    pub fn takes_in_lulls(&self, now_ns: u64) -> bool {
        self.frames_move && self.lull.is_worthwhile(now_ns) && !self.pager.is_scan_on()
    }

    /// In a thread of the program that needs memory, at the limit: waits for the keeper to make room, if pages are taken in lulls.
    /// Afterwards there may be some.
    #[cold]
    pub fn wait_for_room(&self) {
        let now = now_ns();
        if self.takes_in_lulls(now) && self.evictions_allowed() && self.lull.expects_room(now) {
            self.budget.ring();
            self.lull.wait_for_room(|| self.is_over_limit());
        }
    }

    /// Threads that wait for room go on, if there is some.
    pub fn let_waiters_go_on(&self) {
        if self.lull.is_waited_for() {
            self.budget.refresh(self.pager);
            if !self.is_over_limit() {
                self.lull.made_room();
            }
        }
    }

    /// Has the marks of the budget follow the rate at which pages come in: those that went have come, too. For the keeper.
    pub fn follow_rate(&self, now_ns: u64) {
        let went = self.pager.stats().get(Counter::EvictTaken);
        self.budget.have_come_in(went + self.pager.resident(), now_ns);
    }

    /// Victims of one batch, where no fault waits for its end.
    pub fn background_batch(&self) -> usize {
        (self.budget.together() as usize).min(BATCH_MAX)
    }

    /// Whether victims should be neighbours above all: single pages make more mappings.
    pub fn wants_neighbours(&self) -> bool {
        self.is_crowded(CROWD_STOP)
    }

    /// Whether there are so many eighths of the mappings that the kernel allows: evicting what lies between makes fewer.
    fn is_crowded(&self, eighths: u64) -> bool {
        self.protections.is_some_and(|protections| protections.crowd() >= eighths)
    }

    /// Whether pages may be taken out now. Under the map lock.
    pub fn evictions_allowed(&self) -> bool {
        self.all_locked.load(Ordering::Relaxed) == 0 && !self.keeps_all_in()
    }

    /// Asks the kernel how much memory there is. Returns it.
    pub fn measure(&self) -> u64 {
        self.measure_after(self.budget.other())
    }

    /// The same when what was other memory until now has been taken over.
    pub fn measure_anew(&self) -> u64 {
        self.measure_after(u64::MAX)
    }

    fn measure_after(&self, before: u64) -> u64 {
        let known = self.budget.known(self.pager);
        let anonymous = self.statm.anonymous_bytes().unwrap_or(0);
        self.budget.measured(self.pager, known, anonymous, before);
        anonymous
    }

    /// Bytes that the program can still grow by before it is taken over, when last measured.
    pub fn headroom(&self) -> u64 {
        self.budget.activate_at().saturating_sub(self.charged())
    }

    /// The program is about to fill so much memory in one system call. That can hold the kernel's lock of the
    /// mappings to its end, so if it could pass the budget everything is registered before it begins. Without any
    /// lock. A thread that can't be armed keeps the engine from that for good, and the program goes over its budget.
    pub fn prepare_to_fill(&self, bytes: u64) {
        while bytes > self.headroom() && self.is_to_activate() {}
    }

    /// Has everything registered that is there, if it can be. Without any lock. Engine threads need no more memory afterwards.
    pub fn activate_now(&self) {
        while self.is_to_activate() {}
        loop {
            let starting = self.starting.load(Ordering::Relaxed);
            // An engine that ends has no such threads any more.
            if starting == 0 || !self.is_active() {
                return;
            }
            futex::wait_for(&self.starting, starting, 1_000_000);
        }
    }

    /// The calling engine thread has all that it needs.
    pub(crate) fn thread_has_started(&self) {
        self.starting.fetch_sub(1, Ordering::Relaxed);
        futex::wake(&self.starting, u32::MAX >> 1);
    }

    /// Has the keeper activate, and waits a while. False if it has, or never can.
    fn is_to_activate(&self) -> bool {
        if self.is_active() || self.cant_be_armed.load(Ordering::Relaxed) {
            return false;
        }
        self.activation_wanted.store(1, Ordering::Relaxed);
        self.budget.ring();
        futex::wait_for(&self.active, 0, 1_000_000);
        true
    }

    /// Copies what the pager knows about itself to where the supervisor and others see it.
    pub fn publish_gauges(&self) {
        self.pager.refresh_gauges();
        let areas = self.pager.areas();
        for (id, used) in self.record.slots_used.iter().enumerate().take(areas.count()) {
            used.store(areas.in_use_of(AreaId(id as u8)), Ordering::Relaxed);
        }
    }

    /// Nothing could be evicted although memory is over the budget: tells the user why.
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

    /// A call about the memory of `process` has failed with EFAULT. Signal-safe: atomics only.
    pub fn note_unreached_peer(&self, process: u32) {
        let records = &self.membership.session.processes;
        let is_of_run = || records.iter().any(|record| record.pid.load(Ordering::Relaxed) == process);
        if self.handover.is_some() && process != self.process && is_of_run() {
            self.record.notice(Notice::PeerOut, u64::from(process));
        }
    }

    /// Rings that the program has begun name memory that may be out soon. Where their faults are no messages, the user is told.
    pub fn note_rings(&self) {
        let rings = if self.handover.is_some() { proc::rings() } else { 0 };
        if rings > 0 {
            self.record.notice(Notice::Ring, rings);
        }
    }

    /// Neither the pool nor an area takes another page. If the pool may soon, there is nothing to explain.
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
        let pool = self.pager.pool().usage().bytes as u64;
        if self.pager.areas().count() == 0 {
            self.record.notice(Notice::PoolFull, pool);
        } else {
            self.record.notice(Notice::AreaFull, self.pager.areas().in_use() * PAGE_BYTES as u64);
        }
    }

    /// What we know of the program's memory can't be kept true: better no program than one with wrong bytes.
    pub fn stop_program(&self, why: StopReason) -> ! {
        self.record.notice(Notice::Stopped, why as u64);
        First::tell_at_once(self.membership.session, STATUS_FAILED);
        farpage_os::sys::exit_group(STATUS_FAILED)
    }

    /// Takes the clusters of dead processes back. Whether there were any.
    pub fn reap_dead_processes(&self) -> bool {
        // One thread at a time: a record's lock is the process's, so a second thread would get it too, and the
        // first one's unlock would let a new process take the record while the second still frees what it had.
        // Ordering: AcqRel: a lock; the store releases it.
        if self.reaping.swap(true, Ordering::AcqRel) {
            return false;
        }
        let freed =
            self.pager.areas().reap(|holder, free| self.membership.if_dead(holder as usize - 1, free));
        self.reaping.store(false, Ordering::Release);
        freed > 0
    }

    /// Does what looks at other processes' records, as nobody else may meanwhile: see [`Engine::reap_dead_processes`].
    pub fn while_nobody_reaps<T>(&self, look: impl FnOnce() -> T) -> T {
        // Ordering: as there.
        while self.reaping.swap(true, Ordering::AcqRel) {
            farpage_os::clock::sleep_ns(50_000);
        }
        let result = look();
        self.reaping.store(false, Ordering::Release);
        result
    }

    /// A back end of its own for one engine thread.
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
                // SAFETY: zeroed memory of the right size, page-aligned, ours for good; `Leaf` is `Zeroed`.
                table.attach(page, unsafe { &*base.cast::<Leaf>() });
            }
            let leaf_pages = farpage_core::table::LEAF_PAGES as u64;
            page = PageIndex((page.0 / leaf_pages + 1) * leaf_pages);
        }
        Ok(())
    }

    /// Registers every unregistered part of the mapping around `page`, if it is big enough, with `register`,
    /// which must take over one range. Under the exclusive map lock.
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
            // Where the book says what the program allows itself: what isn't plain memory stays as it is.
            let is_forbidden = self.protections.is_some() && range.flags.has(Flags::PROTECTED);
            if range.flags.has(Flags::REGISTERED) || is_forbidden || !range.flags.may_register() {
                continue;
            }
            // Marked before it is true: a thread that runs into a fault from now on waits for us, and one that makes a call
            // sees to its memory.
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

    /// The same for every mapping that has a part in `pages`.
    pub fn take_over_all(&self, pages: PageRange, register: impl Fn(PageRange) -> Result<(), Errno>) {
        let mut from = pages.start;
        let known = |from| self.pager.ranges.lock().at_or_after(from);
        while let Some(range) = known(from).filter(|range| range.pages.start < pages.end) {
            let stretch = self.pager.ranges.lock().stretch(range.pages.start).unwrap_or(range.pages);
            self.take_over(range.pages.start, &register);
            from = stretch.end;
        }
    }

    /// Where the kernel doesn't wait for us, what is missing of the memory of calls that are under way must be there before
    /// it is registered. Calls that begin now find that it is.
    fn fill_what_calls_use(&self, range: PageRange) {
        if self.handover.is_none() {
            return;
        }
        guard::rooms::for_each_held(|held| {
            let pages = held.intersection(range);
            // SAFETY: it changes no byte.
            let fill = || unsafe { memory::advise(pages, linux_raw_sys::general::MADV_POPULATE_WRITE) };
            if !pages.is_empty() && fill().is_err() {
                // A part may not be written, or Linux is older than 5.14. A page of zeros is there, too.
                (pages.start.0..pages.end.0)
                    .for_each(|page| _ = peek::is_readable(PageIndex(page).address()));
            }
        });
    }

    /// Registers one range in this thread, which must be an engine thread: leaves, userfaultfd, no copy for
    /// children, and which pages are there. Under the exclusive map lock (perhaps another thread's). In a fork's child what
    /// `parent` had registered is registered as it was there.
    pub fn register_here(&self, range: PageRange, parent: Option<&ByProtection>) -> Result<(), Errno> {
        self.attach_leaves(range)?;
        self.register_parts(range, parent).inspect_err(|_| {
            // Whatever was done, the program goes on without us there.
            let _ = self.protections.map(|protections| protections.unregister(range));
            let known = self.pager.ranges.lock().find(range.start);
            if !known.is_some_and(|known| known.flags.has(Flags::DONT_FORK)) {
                // SAFETY: as the program has it.
                let _ = unsafe { memory::advise(range, MADV_DOFORK) };
            }
        })?;
        // Pages that were only read take memory when they are written, which otherwise nobody would tell us: a
        // program that reads all of a mapping, and then writes it while it is taken over, was seen at twice its budget.
        // What the kernel doesn't say isn't needed for anything else, and everybody waits for us here.
        let mut runs = 0;
        let _ = self.pagemap.for_each_zero_run(range, |run| {
            runs += 1;
            let is_heard_of = runs <= ZERO_RUNS_MAX
                && if self.handover.is_none() {
                    self.pages.protect(run)
                } else {
                    self.drop_unused_zeros(run)
                };
            if !is_heard_of || self.handover.is_none() {
                self.budget.mapped_zeros(run.count());
            }
        });
        match self.protections {
            Some(protections) => protections.for_each_open(range, |page| self.pager.adopt_present(page)),
            None => {
                if self.pagemap.for_each_present(range, |page| self.pager.adopt_present(page)).is_err() {
                    // Faults come to us already, and what is there would be taken for never touched.
                    self.stop_program(StopReason::Tables);
                }
            }
        }
        Ok(())
    }

    /// Has faults in `range` come to us, and keeps it from children.
    fn register_parts(&self, range: PageRange, parent: Option<&ByProtection>) -> Result<(), Errno> {
        // A child that we don't hear of must not see evicted pages as zeros: it gets SIGSEGV instead.
        // SAFETY: keeps the range from children only.
        unsafe { memory::advise(range, MADV_DONTFORK) }?;
        let register = |range, is_held| match (self.protections, parent) {
            (Some(protections), _) if is_held => protections.register_open(range),
            (Some(protections), Some(parent)) => protections.register_like(parent, range),
            // SAFETY: what is missing in the range and has no entry reads as zeros, and that is what we install
            // for it; nobody touches the range's entries meanwhile, under the exclusive lock.
            _ => unsafe { self.pages.register(range) },
        };
        match self.protections {
            Some(_) => self.for_each_part(range, register),
            None => register(range, false),
        }
    }

    /// Calls `visit` for each part of `pages`, and says whether a system call holds it or it has to stay. Until it fails.
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

    /// Closes all of `pages` for the kernel, so that it is one mapping there, but for what calls are using just now.
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

    /// Whether all of `pages` is known, and has that flag.
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

    /// Whether none of `pages` is known, or all of it and as the same: what is known as different things is different mappings.
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

    /// Whether some of `pages` is registered, and some isn't.
    pub fn is_partly_registered(&self, pages: PageRange) -> bool {
        self.next_with(pages, Flags::REGISTERED).is_some() && !self.is_wholly_registered(pages)
    }

    /// The first part of `pages` whose range has that flag.
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

    /// Takes those pages of zeros away that no call is using: it would find them missing. False if it can't be done for all.
    fn drop_unused_zeros(&self, run: PageRange) -> bool {
        let mut are_all = true;
        let _ = self.for_each_part(run, |part, is_held| {
            are_all &= !is_held && self.drop_zeros(part);
            Ok(())
        });
        are_all
    }

    /// Takes pages of zeros away: whoever touches one gets another. Where calls of the program's can't wait for us, a page
    /// must not be protected unless its entry says so. False if it can't be done.
    fn drop_zeros(&self, run: PageRange) -> bool {
        // Protected first: what is still zero then stays so. Whoever wants to write waits for the map lock.
        if !self.pages.protect(run) {
            return false;
        }
        let dropped = self.pagemap.for_each_zero_run(run, |zeros| {
            // SAFETY: zeros are what a page that is missing here reads as.
            let _ = unsafe { memory::advise(zeros, linux_raw_sys::general::MADV_DONTNEED) };
        });
        self.pages.unprotect(run);
        dropped.is_ok()
    }

    /// Whether pages are still where a fork's parent had put them.
    pub fn inherits(&self) -> bool {
        !self.elder.load(Ordering::Relaxed).is_null()
    }

    /// Registers what a fork's parent had registered, and takes over what was out. Under the exclusive map lock; the program
    /// doesn't run yet.
    pub fn take_inheritance(&self) {
        // SAFETY: null, or an engine that was placed for good.
        let Some(elder) = (unsafe { self.elder.load(Ordering::Relaxed).as_ref() }) else { return };
        let mut from = PageIndex(0);
        while let Some(range) = { elder.pager.ranges.lock().at_or_after(from) } {
            from = range.pages.end;
            if !range.flags.has(Flags::REGISTERED) || range.flags.has(Flags::DONT_FORK) {
                continue;
            }
            let marked = self.pager.ranges.lock().update(range.pages, |flags| flags.with(Flags::REGISTERED));
            if marked.is_err() || self.register_here(range.pages, elder.protections).is_err() {
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
                    // SAFETY: the program hasn't run in this process yet, so this isn't a page of its making.
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

    /// Lets a fork's child have the managed memory, or keeps it from children again. Under the exclusive map lock.
    pub fn show_to_children(&self, show: bool) -> Result<(), Errno> {
        let advice = if show { MADV_DOFORK } else { MADV_DONTFORK };
        let mut from = PageIndex(0);
        while let Some(range) = { self.pager.ranges.lock().at_or_after(from) } {
            if range.flags.has(Flags::REGISTERED) && !range.flags.has(Flags::DONT_FORK) {
                // SAFETY: the child registers it before it runs, and finds what is out in its copy of our tables.
                match unsafe { memory::advise(range.pages, advice) } {
                    // Where there is a hole that we have not heard of, all the rest was done.
                    Err(Errno(errno)) if errno != linux_raw_sys::errno::ENOMEM as i32 => {
                        return Err(Errno(errno));
                    }
                    _ => {}
                }
            }
            from = range.pages.end;
        }
        Ok(())
    }

    /// The same for what we know of it, and the frames and pool objects that hold what is out.
    pub fn show_tables(&self, show: bool) -> Result<(), Errno> {
        // SAFETY: a child of a fork that we make only looks pages up there.
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

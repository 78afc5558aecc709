//! A simulated process: its program, its pager, and the operations under way between the two.
//!
//! The rules of the map lock apply here. A call into the core that needs the lock shared is made between
//! [`Space::enter`] and [`Space::leave`]. A change of mappings runs only when no operation is inside. A fault
//! that waits for its area isn't inside.

// UNSAFETY: the pager borrows memory that this space owns (see `home`).

use crate::device::Device;
use crate::fault::Message;
use crate::home::{Frames, Home};
use crate::ops::Op;
use crate::profile::Profile;
use crate::program::{Program, Touch};
use crate::random::Random;
use crate::world::World;
use crate::write::Writer;
use farpage_core::areas::extents::Builder;
use farpage_core::areas::{AreaMemory, Areas, Extents, Leases, SlotMemory, heirs, pages};
use farpage_core::cache::{Backing, Cache, CacheMemory};
use farpage_core::check::{self, InFlight};
use farpage_core::config::{AreaOrder, Install};
use farpage_core::pager::{Pager, Parts, Wake};
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::reclaim::rivals::WAYS;
use farpage_core::stats::{Counter, Stats};
use farpage_core::table::entry::{State, Stored};
use farpage_core::table::ranges::{Flags, Ranges};
use farpage_core::table::{LEAF_PAGES, Table};
use farpage_core::units::{
    FrameIndex, NodeId, PAGE_BYTES, PageBytes, PageIndex, PageRange, Part, SlotIndex, SlotPart,
};
use farpage_core::zswap::codec::{Scratch, decompress};
use farpage_core::zswap::pool::{Pool, PoolLayout, PoolMemory};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Settled pages whose waiting threads are to be woken.
#[derive(Default)]
struct WakeList(Mutex<Vec<PageIndex>>);

impl Wake for WakeList {
    fn wake(&self, page: PageIndex) {
        self.0.lock().expect("the simulator has one thread").push(page);
    }
}

/// The pattern in which a thread chooses its next page.
#[derive(Clone, Copy)]
pub(crate) enum Pattern {
    Sequential,
    Strided(u64),
    Random,
    HotSet,
}

/// A thread of the program.
pub(crate) struct Thread {
    pub pattern: Pattern,
    cursor: u64,
    /// The page that the thread is about to touch, and whether it writes. The thread tries again until the
    /// touch succeeds.
    want: Option<(PageIndex, bool)>,
    /// The page on which the thread faulted. The thread sleeps until it is woken.
    pub blocked: Option<PageIndex>,
}

/// A process.
pub(crate) struct Space {
    pub number: u32,
    pub pager: Pager<'static>,
    pub program: RefCell<Program>,
    pub frames: RefCell<Frames>,
    pub threads: RefCell<Vec<Thread>>,
    pub messages: RefCell<VecDeque<Message>>,
    pub ops: RefCell<Vec<Op>>,
    /// An entry is `None` while its writer is in use.
    pub writers: RefCell<Vec<Option<Box<Writer>>>>,
    /// Scratch memory of engine threads that aren't compressing.
    scratches: RefCell<Vec<Box<Scratch>>>,
    inside: Cell<u32>,
    /// A change has the map lock.
    pub exclusive: Cell<bool>,
    /// A change waits for the map lock, and new operations wait for the change.
    pub change_waits: Cell<bool>,
    /// Memory may be over the limit for now. Either nothing could be evicted, or pages were registered or put
    /// back.
    pub over_for_a_reason: Cell<bool>,
    /// The largest number of pages in flight into the program at once since memory was last within the limit.
    in_flight_peak: Cell<u64>,
    /// The part of the pages in flight that belongs to operations having their turn. Other operations can run
    /// in between.
    pub in_hand: Cell<u64>,
    /// The moment until which the keeper has no CPU.
    pub keeper_until: Cell<u64>,
    /// The process is killed, but some of its requests are still in flight.
    pub dying: Cell<bool>,
    pub pool_data: *mut u8,
    wake: Box<WakeList>,
    // The home is the last field, because the pager borrows from it.
    _home: Home,
}

/// Extends a reference beyond the lifetime that the compiler can see.
///
/// # Safety
/// The caller keeps the value alive and in place for as long as the reference is used.
unsafe fn lasting<T: ?Sized>(value: &T) -> &'static T {
    // SAFETY: the value is valid now. By the caller's promise it stays valid for as long as the reference is
    // used.
    unsafe { &*core::ptr::from_ref(value) }
}

impl Space {
    /// Makes a process with most of its memory mapped and registered. The devices must outlive the process.
    pub(crate) fn new(number: u32, profile: &Profile, devices: &[Device], random: &Random) -> Space {
        let mut home = Home::default();
        let config = profile.config;
        let first = Self::first_page(profile, random);
        let leaves_at = PageIndex(first.0 / LEAF_PAGES as u64 * LEAF_PAGES as u64);
        let table = Table::new(home.table(2), leaves_at);
        table.attach(leaves_at, home.leaf());
        let last = first.plus(profile.pages as u64 - 1);
        if !table.has_leaf(last) {
            table.attach(last, home.leaf());
        }
        let count = config.frames as usize;
        let backing = if config.install == Install::Copy || random.percent(20) {
            Backing::Memory
        } else {
            Backing::Hole
        };
        let frames = home.piece(count * PAGE_BYTES).cast::<PageBytes>();
        let cache = CacheMemory::carve(&mut home.region(CacheMemory::table_bytes(count)), frames, count);
        // SAFETY: `frames` points to `count` page-aligned frames, as many as there are metas. No other code
        // uses the frames while the cache lives.
        let cache = unsafe { Cache::new(cache, backing) };
        let layout = PoolLayout::for_limit(config.pool_bytes_max as usize);
        let pool_data = home.piece(layout.data_bytes);
        let memory = PoolMemory {
            // SAFETY: the piece has this size, is zeroed, and lives as long as the pager. The only other user
            // is `release_pool`, which writes only bytes that the pool has handed out.
            data: unsafe { core::slice::from_raw_parts_mut(pool_data, layout.data_bytes) },
            objects: home.table(layout.objects),
            blocks: home.table(layout.blocks),
        };
        // The process's number chooses the order, so each order is used. The processes run on two nodes.
        let mut areas = Areas::new(AreaOrder::ALL[number as usize % AreaOrder::ALL.len()], 2);
        for device in devices {
            let id = areas.add(AreaMemory {
                slots: device.slots,
                place: device.place(),
                // SAFETY: devices outlive spaces, and the table of holders never moves.
                leases: Leases::new(unsafe { lasting(&device.holders[..]) }, number),
                memory: {
                    let bytes = SlotMemory::bytes(profile.slots, device.slots, profile.slot_cpus);
                    SlotMemory::carve(&mut home.region(bytes), profile.slots, device.slots, profile.slot_cpus)
                },
                discards: device.discards,
                owners: home.table(pages::words(device.slots)),
                checksums: home.table(pages::words(device.slots)),
                // SAFETY: devices outlive spaces, and the list of bad slots never moves.
                bad: unsafe { lasting(&device.bad[..]) },
                heirs: home.table(heirs::words(device.slots)),
            });
            let extents = device.extents();
            if !extents.is_empty() {
                let count = extents.len() as u32;
                let mut builder = Builder::new(&mut home.region(Extents::bytes(count)), count);
                extents.iter().for_each(|extent| _ = builder.add(*extent));
                areas.set_extents(id, builder.finish(1));
            }
        }
        let wake = Box::<WakeList>::default();
        let stats = home.piece(size_of::<Stats>()).cast::<Stats>();
        let slot_words = home.piece(size_of::<SlotWords>()).cast::<SlotWords>();
        let pool = Pool::new(&layout, memory, config.accept_percent);
        // Live engines with areas keep no reserve. Here the reserve is one more way for the pool to be full.
        if config.accept_percent <= 90 && number % 2 == 1 {
            pool.keep_reserve();
        }
        let pager = Pager::new(Parts {
            config,
            table,
            ranges: Ranges::new(home.table(2048)),
            cache,
            pool,
            areas,
            // SAFETY: the memory is zeroed and has the size of `Stats`. All-zero bytes are a valid, fresh
            // `Stats`. The home outlives the pager.
            stats: unsafe { &*stats },
            // SAFETY: the box lives as long as the pager, and its contents don't move.
            wake: unsafe { lasting(&*wake) },
            // SAFETY: the home's memory is zeroed, has the size of `SlotWords`, and outlives the pager.
            // All-zero bytes are fresh `SlotWords`.
            slot_words: unsafe { &*slot_words },
            watched: home.table(WAYS),
            elder: None,
        });
        let space = Space {
            number,
            pager,
            program: RefCell::new(Program::new(first, profile.pages)),
            frames: RefCell::new(Frames::new(frames, count, backing)),
            threads: RefCell::new((0..profile.threads).map(|_| Thread::new(random)).collect()),
            messages: RefCell::default(),
            ops: RefCell::default(),
            writers: RefCell::new((0..profile.writers).map(|_| Some(Box::default())).collect()),
            scratches: RefCell::default(),
            inside: Cell::new(0),
            exclusive: Cell::new(false),
            change_waits: Cell::new(false),
            over_for_a_reason: Cell::new(false),
            in_flight_peak: Cell::new(0),
            in_hand: Cell::new(0),
            keeper_until: Cell::new(0),
            dying: Cell::new(false),
            pool_data,
            wake,
            _home: home,
        };
        space.begin(random);
        space
    }

    /// Returns the node that the process's threads run on.
    pub(crate) fn node(&self) -> NodeId {
        NodeId((self.number % 2) as u8)
    }

    /// Draws the first page. Page 0 and a range across the seam between two leaves are drawn more often than
    /// by chance.
    fn first_page(profile: &Profile, random: &Random) -> PageIndex {
        let leaf = LEAF_PAGES as u64;
        let pages = profile.pages as u64;
        match random.below(3) {
            0 => PageIndex(0),
            1 => PageIndex(leaf * random.within(1, 3) - random.within(1, pages - 1)),
            _ => PageIndex(leaf * random.below(1000) + random.below(leaf - pages)),
        }
    }

    /// Maps and registers most of the memory.
    fn begin(&self, random: &Random) {
        let mut program = self.program.borrow_mut();
        let all = program.all();
        let mapped = PageRange::new(all.start, PageIndex(all.end.0 - random.below(all.count() / 2)));
        mapped.iter().for_each(|page| {
            program.map(page);
            program.page_mut(page).registered = true;
        });
        self.pager.ranges.lock().insert(mapped, Flags::REGISTERED).expect("one range fits");
    }

    /// Takes the map lock shared. False if a change has the lock or waits for it.
    pub(crate) fn enter(&self) -> bool {
        let free = !self.exclusive.get() && !self.change_waits.get();
        self.inside.set(self.inside.get() + u32::from(free));
        free
    }

    /// Takes the map lock shared once more, for an operation that is already inside.
    pub(crate) fn enter_again(&self) -> bool {
        self.inside.set(self.inside.get() + 1);
        self.inside.get() > 1
    }

    pub(crate) fn leave(&self) {
        self.inside.set(self.inside.get() - 1);
    }

    /// Takes the map lock for a change. False if an operation is inside or another change has the lock.
    pub(crate) fn enter_alone(&self) -> bool {
        let free = !self.exclusive.get() && self.inside.get() == 0;
        if free {
            self.exclusive.set(true);
        }
        free
    }

    pub(crate) fn with_scratch<T>(&self, act: impl FnOnce(&mut Scratch) -> T) -> T {
        let spare = self.scratches.borrow_mut().pop();
        let mut scratch = spare.unwrap_or_else(|| Box::new(Scratch::new()));
        let result = act(&mut scratch);
        self.scratches.borrow_mut().push(scratch);
        result
    }

    /// Wakes the threads that sleep on a page. For half of these threads the pending message is dropped, as
    /// the kernel may do.
    pub(crate) fn wake(&self, page: PageIndex, random: &Random) {
        for (number, thread) in self.threads.borrow_mut().iter_mut().enumerate() {
            if thread.blocked == Some(page) {
                thread.blocked = None;
                if random.percent(50) {
                    self.messages.borrow_mut().retain(|message| message.thread != number);
                }
            }
        }
    }

    /// Wakes the threads that sleep on the pages that the pager has settled.
    pub(crate) fn deliver_wakes(&self, random: &Random) {
        let pages = core::mem::take(&mut *self.wake.0.lock().expect("one thread"));
        pages.into_iter().for_each(|page| self.wake(page, random));
    }

    /// Delivers SIGBUS to the program. The threads that sleep on this page give up on the page.
    pub(crate) fn sigbus(&self, page: PageIndex) {
        assert!(self.program.borrow().page(page).lost, "{page:?} is said to be lost, but no device lost it");
        for thread in self.threads.borrow_mut().iter_mut().filter(|thread| thread.blocked == Some(page)) {
            (thread.blocked, thread.want) = (None, None);
        }
    }

    /// Lets a thread touch up to 12 pages, until it faults. False if the thread sleeps or has nothing to do.
    pub(crate) fn run_thread(&self, world: &World, number: usize) -> bool {
        (0..world.random.within(1, 12)).take_while(|_| self.touch_once(world, number)).count() > 0
    }

    fn touch_once(&self, world: &World, number: usize) -> bool {
        let mut threads = self.threads.borrow_mut();
        let mut program = self.program.borrow_mut();
        let thread = &mut threads[number];
        if thread.blocked.is_some() {
            return false;
        }
        let (page, write) = match thread.want {
            Some(want) => want,
            None if world.is_ending() => return false,
            None => thread.choose(program.all(), &world.random, world.profile.write_percent),
        };
        thread.want = Some((page, write));
        match program.touch(page, write, &world.random, &world.profile.contents) {
            Touch::Done => {
                thread.want = None;
                if write && world.pins_now(program.pins()) {
                    program.pin(page);
                    world.note(|| format!("{} thread {number} has {page:?} pinned", self.number));
                }
                world.note(|| {
                    format!(
                        "{} thread {number} {} {page:?}",
                        self.number,
                        if write { "wrote" } else { "read" }
                    )
                });
            }
            Touch::No => thread.want = None,
            Touch::Fault(access) => {
                thread.blocked = Some(page);
                self.messages.borrow_mut().push_back(Message { thread: number, page, access });
                world.note(|| format!("{} thread {number} faulted at {page:?}: {access:?}", self.number));
            }
        }
        true
    }

    /// Makes an idle thread read this page next.
    pub(crate) fn ask_to_read(&self, number: usize, page: PageIndex) {
        let thread = &mut self.threads.borrow_mut()[number];
        assert!(thread.blocked.is_none());
        thread.want = Some((page, false));
    }

    /// Whether a thread sleeps or is about to touch a page.
    pub(crate) fn threads_are_busy(&self) -> bool {
        self.threads.borrow().iter().any(|thread| thread.blocked.is_some() || thread.want.is_some())
    }

    /// Asserts everything that must hold between two steps.
    pub(crate) fn check(&self, world: &World) {
        let (mut frames, mut writing, mut slots, mut backed) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for op in self.ops.borrow_mut().iter_mut() {
            backed += op.holds(&mut frames, &mut writing, &mut slots);
        }
        for writer in self.writers.borrow().iter() {
            let batch = &writer.as_ref().expect("writers rest between steps").batch;
            writing.extend(batch.frames());
            slots.extend(batch.slots());
        }
        check::all(&self.pager, &InFlight { frames: &frames, writing: &writing, slots: &slots });
        let usage = self.pager.cache().usage();
        let known = i64::from(usage.free_backed + usage.parked) + writing.len() as i64 + backed;
        assert_eq!(self.frames.borrow().backed_count() as i64, known, "frames with memory behind them");
        self.check_pages(world);
        self.check_budget(world);
        // Between the kernel's part of a change and the pager's, the two disagree.
        if !self.exclusive.get() {
            self.check_bytes(world);
        }
    }

    /// Updates the peak of pages in flight after each act. Starts anew when memory is within the limit.
    pub(crate) fn follow_budget(&self, world: &World) {
        let in_flight = self.in_hand.get() + self.ops.borrow().iter().map(Op::pages_in_flight).sum::<u64>();
        if self.pager.resident() <= world.profile.limit_pages {
            self.over_for_a_reason.set(false);
            self.in_flight_peak.set(0);
        }
        self.in_flight_peak.set(self.in_flight_peak.get().max(in_flight));
    }

    /// Asserts that memory is over the limit by no more than the pages in flight, even if threads had no CPU.
    /// A handler thread brings a page in only if memory was within the limit or nothing could be evicted.
    fn check_budget(&self, world: &World) {
        let (resident, limit, peak) =
            (self.pager.resident(), world.profile.limit_pages, self.in_flight_peak.get());
        assert!(
            resident <= limit + peak || self.over_for_a_reason.get() || world.is_ending(),
            "{resident} pages are there, the limit is {limit}, and {peak} were on their way"
        );
    }

    /// Asserts that the table and the kernel agree on every page.
    fn check_pages(&self, world: &World) {
        let program = self.program.borrow();
        let mut seen = [0; STATES.len()];
        for page in program.all().iter() {
            let kernel = program.page(page);
            let word = self.pager.table().get(page).expect("leaves are attached").entry().load();
            let state = word.state();
            seen[kind_of(state)] += 1;
            if word.is_locked() || self.exclusive.get() {
                continue;
            }
            assert!(!kernel.clean, "{page:?} was freed to be copied out, and stayed so");
            if kernel.registered {
                assert_eq!(
                    state.is_resident(),
                    kernel.present,
                    "{page:?} is {state:?}; there: {}",
                    kernel.present
                );
            }
            assert!(kernel.registered || state == State::Absent, "{page:?} isn't managed, but {state:?}");
            if let State::Lost(_) = state {
                assert!(kernel.lost, "{page:?} was lost for no reason");
            }
        }
        let mut coverage = world.coverage.borrow_mut();
        STATES
            .iter()
            .zip(seen)
            .filter(|(_, seen)| *seen > 0)
            .for_each(|(name, seen)| coverage.add(name, seen));
    }

    /// Asserts that a page drawn at random has its right bytes, if the page is out.
    fn check_bytes(&self, world: &World) {
        let program = self.program.borrow();
        let all = program.all();
        let page = all.start.plus(world.audit.below(all.count()));
        let word = self.pager.table().get(page).expect("leaves are attached").entry().load();
        let truth = program.truth(page);
        let is_filled = |with: u64| truth.chunks_exact(8).all(|word| word == with.to_ne_bytes());
        let sound = match word.state() {
            State::Parked { frame, .. } | State::Writing { frame } => {
                // While a page is being installed, its bytes may have left the frame already.
                word.is_locked() || self.frames.borrow().read(frame) == truth
            }
            State::Pooled(handle) => {
                let mut bytes = [0; PAGE_BYTES];
                let codec = self.pager.config.codec;
                let decoded = self.with_scratch(|scratch| {
                    let decode = |stored: &[u8]| decompress(codec, stored, &mut bytes, &mut scratch.decoder);
                    self.pager.pool().read(handle, decode)
                });
                decoded.is_ok() && bytes == *truth
            }
            State::Zero => is_filled(0),
            State::Same(word) => is_filled(word.word()),
            _ => true,
        };
        assert!(sound || program.page(page).present, "{page:?}, which is {word:?}, has wrong bytes");
    }

    /// Adds the pager's counters to the coverage.
    pub(crate) fn cover_counters(&self, world: &World) {
        let mut coverage = world.coverage.borrow_mut();
        for &counter in Counter::ALL {
            coverage.add(counter.name(), self.pager.stats().get(counter));
        }
    }

    /// Returns the address of a request's frame.
    pub(crate) fn pointer(&self, frame: FrameIndex) -> *mut u8 {
        self.pager.cache().pointer(frame).cast()
    }
}

impl Thread {
    fn new(random: &Random) -> Thread {
        let pattern = match random.below(4) {
            0 => Pattern::Sequential,
            1 => Pattern::Strided(random.within(2, 9)),
            2 => Pattern::Random,
            _ => Pattern::HotSet,
        };
        Thread { pattern, cursor: random.next() >> 8, want: None, blocked: None }
    }

    fn choose(&mut self, all: PageRange, random: &Random, write_percent: u64) -> (PageIndex, bool) {
        self.cursor = match self.pattern {
            Pattern::Sequential => self.cursor + 1,
            Pattern::Strided(stride) => self.cursor + stride,
            Pattern::Random => random.next() >> 8,
            Pattern::HotSet if random.percent(80) => random.below(all.count() / 8 + 1),
            Pattern::HotSet => random.next() >> 8,
        };
        (all.start.plus(self.cursor % all.count()), random.percent(write_percent))
    }
}

/// The names of the states in the coverage.
const STATES: [&str; 14] = [
    "state Absent",
    "state Zero",
    "state Same",
    "state Resident",
    "state Resident with a slot",
    "state Resident with an object",
    "state Parked",
    "state Parked with a slot",
    "state Parked with an object",
    "state Writing",
    "state Pooled",
    "state OnArea",
    "state OnArea packed",
    "state Lost",
];

/// Returns the index of a state in `STATES`.
const fn kind_of(state: State) -> usize {
    match state {
        State::Absent => 0,
        State::Zero => 1,
        State::Same(_) => 2,
        State::Resident { copy: None, .. } => 3,
        State::Resident { copy: Some(Stored::Slot(_)), .. } => 4,
        State::Resident { copy: Some(Stored::Object(_)), .. } => 5,
        State::Parked { copy: None, .. } => 6,
        State::Parked { copy: Some(Stored::Slot(_)), .. } => 7,
        State::Parked { copy: Some(Stored::Object(_)), .. } => 8,
        State::Writing { .. } => 9,
        State::Pooled(_) => 10,
        State::OnArea(SlotPart { part: Part::WHOLE, .. }) => 11,
        State::OnArea(_) => 12,
        State::Lost(_) => 13,
        State::Inherited(_) => panic!("no process here is a fork's child"),
    }
}

/// The slots that operations hold, gathered for the check.
pub(crate) type Slots = Vec<SlotIndex>;

//! The world of one seed: processes, devices, a clock, and a scheduler that decides which operation goes one
//! call further.
//!
//! Between two steps everything is checked. At the end all operations are completed, and every page of every
//! program is read once more. Then everything is discarded, and nothing may be left in use.

use crate::coverage::Coverage;
use crate::device::Device;
use crate::locks;
use crate::profile::{Act, Profile};
use crate::random::Random;
use crate::space::Space;
use farpage_core::pager::{Access, Placed, Step};
use farpage_core::stats::Counter;
use farpage_core::table::entry::State;
use farpage_core::units::{FrameIndex, PageIndex, SlotIndex};
use farpage_io::{IoError, Op as Direction};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// Events kept for the report of a failure.
const EVENTS_KEPT: usize = 40;

/// Idle turns after which the end of a run counts as stuck. By then every operation that can go on has had
/// many turns, and every device has completed its requests.
const IDLE_MAX: u64 = 60_000;

/// Pages of one process that are pinned at once.
const PINS_MAX: usize = 6;

/// Interruptions that can be nested.
#[cfg(feature = "planted")]
const DEPTH_MAX: u32 = 2;

/// The last events.
pub(crate) struct Log {
    events: RefCell<VecDeque<String>>,
    /// Prints each event as it happens.
    verbose: bool,
}

impl Log {
    pub(crate) fn new(verbose: bool) -> Log {
        Log { events: RefCell::default(), verbose }
    }

    pub(crate) fn events(&self) -> Vec<String> {
        self.events.borrow().iter().cloned().collect()
    }

    fn add(&self, event: String) {
        if self.verbose {
            eprintln!("{event}");
        }
        let mut events = self.events.borrow_mut();
        if events.len() == EVENTS_KEPT {
            events.pop_front();
        }
        events.push_back(event);
    }
}

/// The state of one seed's run.
pub(crate) struct World {
    pub profile: Profile,
    pub random: Random,
    /// Draws the page that a check looks at. A sequence apart from `random` keeps checks from changing what
    /// happens.
    pub audit: Random,
    pub coverage: RefCell<Coverage>,
    log: Rc<Log>,
    // The spaces are dropped before the devices, because spaces borrow from devices.
    spaces: RefCell<Vec<Rc<Space>>>,
    devices: Vec<Device>,
    /// Requests in flight by token, each with its process's number.
    in_flight: RefCell<BTreeMap<u64, u32>>,
    finished: RefCell<BTreeMap<u64, Result<(), IoError>>>,
    next_token: Cell<u64>,
    next_number: Cell<u32>,
    dead: RefCell<BTreeSet<u32>>,
    lies_noticed: Cell<u64>,
    now: Cell<u64>,
    depth: Cell<u32>,
    /// The end has begun, and nothing new is started.
    ending: Cell<bool>,
    /// Turns in which something happened.
    steps: Cell<u64>,
}

impl World {
    pub(crate) fn new(seed: u64, log: Rc<Log>) -> World {
        let random = Random::new(seed);
        let profile = Profile::draw(&random);
        let world = World {
            devices: profile.areas.iter().map(Device::new).collect(),
            audit: Random::new(random.next()),
            profile,
            random,
            coverage: RefCell::default(),
            log,
            spaces: RefCell::default(),
            in_flight: RefCell::default(),
            finished: RefCell::default(),
            next_token: Cell::new(0),
            next_number: Cell::new(1),
            dead: RefCell::default(),
            lies_noticed: Cell::new(0),
            now: Cell::new(0),
            depth: Cell::new(0),
            ending: Cell::new(false),
            steps: Cell::new(0),
        };
        (0..world.profile.spaces).for_each(|_| world.add_space());
        world
    }

    /// Runs the seed, from the first step to the last check.
    pub(crate) fn run(&self) {
        // In most turns nothing can be done. The bound on turns ends a run that is almost idle.
        for _ in 0..self.profile.steps * 6 {
            if self.steps.get() >= self.profile.steps {
                break;
            }
            self.turn();
        }
        self.end();
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }

    fn add_space(&self) {
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        let space = Space::new(number, &self.profile, &self.devices, &self.random);
        self.spaces.borrow_mut().push(Rc::new(space));
    }

    /// Adds an event to the log.
    pub(crate) fn note(&self, event: impl FnOnce() -> String) {
        let indent = 2 * self.depth.get() as usize;
        self.log.add(format!("{:6} {:indent$}{}", self.now.get(), "", event()));
    }

    pub(crate) fn saw(&self, name: &'static str) {
        self.coverage.borrow_mut().saw(name);
    }

    /// Whether the end has begun: threads only finish what they have started.
    pub(crate) const fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// Whether the kernel refuses an install for now.
    pub(crate) fn refuses(&self) -> bool {
        !self.ending.get() && self.random.percent(self.profile.refuse_percent)
    }

    pub(crate) const fn now(&self) -> u64 {
        self.now.get()
    }

    /// Whether `moment` is still to come. False at the end, when every thread has a CPU.
    pub(crate) const fn is_before(&self, moment: u64) -> bool {
        !self.ending.get() && self.now.get() < moment
    }

    /// Decides whether a thread of the engine loses its CPU now, and until when. Other programs use the CPUs:
    /// mostly for a moment, at most for as long as the profile allows.
    pub(crate) fn starves(&self) -> Option<u64> {
        if self.ending.get() || self.random.below(1000) >= self.profile.starve_permille {
            return None;
        }
        self.saw("starved");
        let most = self.profile.starve_ticks_max >> self.random.below(8);
        Some(self.now.get() + self.random.within(1, most.max(1)))
    }

    /// Whether a page that was just written is pinned. `pins` counts the pages that are pinned already.
    pub(crate) fn pins_now(&self, pins: usize) -> bool {
        !self.ending.get() && pins < PINS_MAX && self.random.percent(self.profile.pin_percent)
    }

    /// Lets a tick pass, gives a space one turn, and checks the space. False if nothing happened.
    fn turn(&self) -> bool {
        self.pass_time();
        self.bury();
        let Some(space) = self.draw_space() else { return false };
        let went = self.act(&space);
        if went {
            self.steps.set(self.steps.get() + 1);
            space.check(self);
        }
        went
    }

    fn draw_space(&self) -> Option<Rc<Space>> {
        let spaces = self.spaces.borrow();
        let space = Rc::clone(&spaces[self.random.index(spaces.len())]);
        (!space.dying.get()).then_some(space)
    }

    fn pass_time(&self) {
        self.now.set(self.now.get() + 1);
        for device in &self.devices {
            device.pass(1, |completion| {
                let number = self.in_flight.borrow_mut().remove(&completion.token);
                let number = number.expect("a token comes back once");
                self.note(|| format!("{number} request {}: {:?}", completion.token, completion.result));
                self.finished.borrow_mut().insert(completion.token, completion.result);
            });
        }
    }

    /// Lets another thread run between two instructions of the core.
    #[cfg(feature = "planted")]
    pub(crate) fn interrupt(&self) {
        if self.depth.get() >= DEPTH_MAX || !self.random.percent(self.profile.pause_percent) {
            return;
        }
        self.depth.set(self.depth.get() + 1);
        for _ in 0..self.random.within(1, 4) {
            if let Some(space) = self.draw_space() {
                self.act(&space);
            }
        }
        self.depth.set(self.depth.get() - 1);
    }

    /// Does one thing in this space. False if there was nothing to do.
    fn act(&self, space: &Rc<Space>) -> bool {
        locks::assert_none_held("a change of threads");
        let went = if self.ending.get() {
            self.act_to_end(space)
        } else {
            self.act_as(space, Act::ALL[self.random.weighted(&self.profile.weights)])
        };
        space.deliver_wakes(&self.random);
        space.follow_budget(self);
        went
    }

    fn act_as(&self, space: &Rc<Space>, act: Act) -> bool {
        if act.is_keepers() {
            if self.is_before(space.keeper_until.get()) {
                return false;
            }
            self.starves().into_iter().for_each(|until| space.keeper_until.set(until));
        }
        match act {
            Act::Thread => space.run_thread(self, self.random.index(self.profile.threads)),
            Act::Handle => space.handle_message(self),
            Act::Continue => space.step_one(self),
            Act::Evict => {
                let over = space.pager.resident() > self.profile.budget_pages;
                if over && space.begin_evict(self) {
                    space.pager.stats().count(Counter::ReclaimBackground);
                    return true;
                }
                if over {
                    space.pager.stats().count(Counter::OverBudget);
                }
                false
            }
            Act::EvictAnyway => space.begin_evict(self),
            Act::Place => space.place(self).is_some_and(|placed| placed != Placed::Nothing),
            Act::Shrink => space.shrink(self),
            Act::Densify => space.densify(self),
            Act::Assign => {
                let wanted = self.random.within(1, self.profile.merge_pages) as usize;
                space.waiting_for_slots() >= wanted && space.assign(self)
            }
            Act::ReleaseKept => {
                space.enter() && {
                    let freed = space.release_kept(self.random.within(1, 20) as u32);
                    space.leave();
                    freed > 0
                }
            }
            Act::Compact => space.compact(self),
            Act::PutBack => space.put_back(self),
            Act::Surplus => space.surplus(self),
            Act::ParkAgain => space.park_again(self),
            Act::Change => space.begin_change(self),
            Act::PoolLimit => {
                let limit = self.random.below(self.profile.config.pool_bytes_max * 5 / 4 + 1);
                space.pager.pool().set_limit(limit as usize);
                true
            }
            Act::Stray => self.stray(space),
            Act::Reap => self.reap(space),
            Act::Discard => space.begin_discard(self),
            Act::Device => space.use_pin(self),
            Act::Die => self.kill(space),
        }
    }

    /// Does only what completes operations, because the run is ending.
    fn act_to_end(&self, space: &Rc<Space>) -> bool {
        match self.random.below(4) {
            3 => space.use_pin(self),
            0 => (0..self.profile.threads).any(|number| space.run_thread(self, number)),
            1 => space.handle_message(self),
            _ => space.step_one(self) | space.assign(self),
        }
    }

    /// A thread faults on a page that was never managed.
    fn stray(&self, space: &Space) -> bool {
        let beyond = PageIndex(space.pager.table().all().end.0 + self.random.below(1000));
        let step = space.pager.fault(beyond, Access::Read);
        assert!(matches!(step, Step::Unknown), "{beyond:?} is {step:?}");
        self.saw("step Unknown");
        true
    }

    fn reap(&self, space: &Space) -> bool {
        let dead = self.dead.borrow();
        let reaped = space.pager.areas().reap(|number, free| dead.contains(&number) && free());
        if reaped > 0 {
            self.saw("reaped");
            self.note(|| format!("{} reaps {reaped} clusters", space.number));
        }
        reaped > 0
    }

    /// Kills a process. A process is never killed inside an interruption, because its memory goes at once.
    /// Always returns false.
    fn kill(&self, space: &Space) -> bool {
        if self.depth.get() == 0 && self.next_number.get() < 12 {
            self.note(|| format!("{} dies", space.number));
            self.saw("death");
            space.dying.set(true);
            space.cover_counters(self);
        }
        false
    }

    /// Removes a dead process whose requests are complete, as the kernel completes them when a process exits.
    /// A new process takes its place.
    fn bury(&self) {
        let over = |space: &Rc<Space>| {
            space.dying.get() && !self.in_flight.borrow().values().any(|&number| number == space.number)
        };
        let Some(at) = self.spaces.borrow().iter().position(over) else { return };
        let space = self.spaces.borrow_mut().remove(at);
        self.dead.borrow_mut().insert(space.number);
        // Drops completions that no operation will ask for.
        space.ops.borrow().iter().for_each(|op| {
            op.for_each_token(|token| {
                self.finished.borrow_mut().remove(&token);
            });
        });
        drop(space);
        self.add_space();
    }

    /// Sends a request to a slot's device. Returns `None` if the device accepts no more requests now.
    pub(crate) fn submit(
        &self,
        space: &Space,
        op: Direction,
        slot: SlotIndex,
        frames: impl Iterator<Item = FrameIndex>,
    ) -> Option<u64> {
        self.submit_at(space, op, slot, frames, |frame| space.pointer(frame))
    }

    /// Sends a request like `submit`, for memory whose addresses `pointer` gives.
    pub(crate) fn submit_at(
        &self,
        space: &Space,
        op: Direction,
        slot: SlotIndex,
        frames: impl Iterator<Item = FrameIndex>,
        pointer: impl Fn(FrameIndex) -> *mut u8,
    ) -> Option<u64> {
        let token = self.next_token.get();
        let device = &self.devices[slot.area().0 as usize];
        device.submit(op, slot, frames, pointer, token).ok()?;
        self.next_token.set(token + 1);
        self.in_flight.borrow_mut().insert(token, space.number);
        self.note(|| format!("{} request {token}: {op:?} from {slot:?}", space.number));
        Some(token)
    }

    pub(crate) fn is_finished(&self, token: u64) -> bool {
        self.finished.borrow().contains_key(&token)
    }

    pub(crate) fn finish(&self, token: u64) -> Result<(), IoError> {
        self.finished.borrow_mut().remove(&token).expect("a finished request")
    }

    /// Asserts, after a failed checksum, that the devices have lied often enough.
    pub(crate) fn lied(&self, slot: SlotIndex) {
        self.saw("lie noticed");
        self.lies_noticed.set(self.lies_noticed.get() + 1);
        let lies: u64 = self.devices.iter().map(Device::pages_lied_about_max).sum();
        assert!(self.lies_noticed.get() <= lies, "{slot:?} has wrong bytes, and no device has lied so often");
    }

    /// Whether anything is under way in this space.
    fn is_busy(space: &Space) -> bool {
        !space.ops.borrow().is_empty()
            || !space.messages.borrow().is_empty()
            || space.threads_are_busy()
            || space.writers.borrow().iter().flatten().any(|writer| !writer.batch.is_empty())
            || space.dying.get()
    }

    /// Takes turns until nothing is under way.
    fn settle_down(&self) {
        let mut idle = 0;
        while self.spaces.borrow().iter().any(|space| Self::is_busy(space)) {
            idle = if self.turn() { 0 } else { idle + 1 };
            if idle > IDLE_MAX {
                self.panic_stuck();
            }
        }
    }

    fn panic_stuck(&self) -> ! {
        for space in self.spaces.borrow().iter() {
            let threads: Vec<_> = space.threads.borrow().iter().filter_map(|thread| thread.blocked).collect();
            let messages = space.messages.borrow().len();
            let ops = space.ops.borrow().len();
            self.note(|| {
                format!("{}: {ops} operations, {messages} messages, asleep at {threads:?}", space.number)
            });
        }
        panic!("everything waits for something that doesn't happen")
    }

    fn end(&self) {
        self.note(|| "the end begins".to_owned());
        self.ending.set(true);
        self.settle_down();
        let spaces = self.spaces.borrow().clone();
        for space in &spaces {
            self.read_everything(space);
        }
        for space in &spaces {
            self.discard_everything(space);
            space.cover_counters(self);
        }
        for device in &self.devices {
            let faults = device.faults();
            let mut coverage = self.coverage.borrow_mut();
            for (name, count) in [
                ("device read errors", faults.read_errors),
                ("device write errors", faults.write_errors),
                ("device torn writes", faults.torn_writes),
                ("device lost writes", faults.lost_writes),
                ("device flips", faults.flips),
                ("device misdirections", faults.misdirections),
            ] {
                coverage.add(name, count);
            }
        }
    }

    /// Makes threads read each page that isn't absent. The threads compare the bytes.
    fn read_everything(&self, space: &Rc<Space>) {
        let all = space.program.borrow().all();
        let threads = self.profile.threads;
        let pages = all.iter().filter(|&page| space.pager.state(page) != State::Absent);
        for (count, page) in pages.enumerate() {
            if count % threads == 0 {
                self.settle_down();
            }
            space.ask_to_read(count % threads, page);
        }
        self.settle_down();
    }

    fn discard_everything(&self, space: &Rc<Space>) {
        let all = space.program.borrow().all();
        assert!(space.enter_alone(), "somebody is still inside the map lock");
        assert!(space.pager.quiet(all).is_ok(), "a page is still on its way");
        space.pager.discard(all);
        all.iter().for_each(|page| space.program.borrow_mut().unmap(page));
        space.check(self);
        space.frames.borrow().check();
        let pager = &space.pager;
        assert_eq!(pager.cache().usage().free, pager.cache().count(), "a frame is left in use");
        assert_eq!(pager.pool().usage().objects, 0, "an object is left in the pool");
        let mut references = 0;
        pager.areas().check(|slot| references += u64::from(pager.areas().references(slot)));
        assert_eq!(references, pager.slots_given_up(), "a slot is left in use");
        assert_eq!((pager.resident(), pager.evicted()), (0, 0), "pages are left");
    }
}

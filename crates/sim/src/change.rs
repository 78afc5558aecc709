//! The program changes a mapping. The change has the map lock alone, and nothing in its range is in flight.
//! The change happens first in the kernel, then in the pager's tables. Between the two the program's threads
//! go on.

use crate::ops::{Next, Op};
use crate::space::Space;
use crate::world::World;
use farpage_core::pager::Unsettled;
use farpage_core::stats::Counter;
use farpage_core::table::ranges::{Flags, Range};
use farpage_core::units::{PageIndex, PageRange};
use std::sync::atomic::Ordering;

/// A change of mappings.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// madvise(MADV_DONTNEED).
    Discard(PageRange),
    /// munmap.
    Unmap(PageRange),
    /// mmap with MAP_FIXED.
    Map(PageRange),
    /// Registers a mapping, with the pages that it already has.
    Register(PageRange),
    /// mremap with MREMAP_FIXED.
    Remap(PageRange, PageIndex),
    /// mprotect and mlock, and back.
    Flag(PageRange, Flags, bool),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChangePhase {
    /// The change waits for the map lock.
    Want,
    /// The change waits until an operation that was in flight settles.
    Unsettled(u32),
    /// The kernel has changed the mapping, and the change still holds the map lock.
    Tell,
}

pub(crate) struct ChangeOp {
    change: Change,
    phase: ChangePhase,
}

impl Change {
    /// Returns all pages that the change affects. The second range is empty except for `Remap`.
    fn ranges(&self) -> [PageRange; 2] {
        let none = PageRange::of(PageIndex(0), 0);
        match *self {
            Change::Discard(range)
            | Change::Unmap(range)
            | Change::Map(range)
            | Change::Register(range)
            | Change::Flag(range, ..) => [range, none],
            Change::Remap(range, to) => [range, PageRange::of(to, range.count())],
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Change::Discard(_) => "change Discard",
            Change::Unmap(_) => "change Unmap",
            Change::Map(_) => "change Map",
            Change::Register(_) => "change Register",
            Change::Remap(..) => "change Remap",
            Change::Flag(..) => "change Flag",
        }
    }
}

impl Space {
    /// Starts a change drawn at random. False if the drawn change isn't possible now.
    pub(crate) fn begin_change(&self, world: &World) -> bool {
        let Some(change) = self.draw_change(world) else { return false };
        self.ops.borrow_mut().push(Op::Change(ChangeOp { change, phase: ChangePhase::Want }));
        true
    }

    fn draw_change(&self, world: &World) -> Option<Change> {
        let random = &world.random;
        let program = self.program.borrow();
        let all = program.all();
        let length = random.within(1, (all.count() / random.pick(&[2, 8, 16, 32])).max(1));
        let start = all.start.plus(random.below(all.count() - length + 1));
        let range = PageRange::of(start, length);
        // Returns the longest run of pages at the start of `range` that satisfy `wanted`.
        let part = |wanted: &dyn Fn(PageIndex) -> bool| {
            let length = range.iter().take_while(|&page| wanted(page)).count();
            PageRange::of(start, length as u64)
        };
        let mapped = part(&|page| program.page(page).mapped);
        let unregistered = part(&|page| program.page(page).mapped && !program.page(page).registered);
        let change = match random.below(8) {
            0 | 1 => Change::Discard(range),
            2 => Change::Unmap(range),
            3 => Change::Map(range),
            4 | 5 if !unregistered.is_empty() => Change::Register(unregistered),
            6 => {
                let to = all.start.plus(random.below(all.count() - length + 1));
                let is_apart = range.intersection(PageRange::of(to, length)).is_empty();
                if mapped.is_empty() || !is_apart {
                    return None;
                }
                Change::Remap(mapped, to)
            }
            7 => Change::Flag(range, random.pick(&[Flags::PROTECTED, Flags::LOCKED]), random.percent(40)),
            _ => return None,
        };
        Some(change)
    }

    pub(crate) fn step_change(&self, world: &World, op: ChangeOp) -> Next {
        let ChangeOp { change, phase } = op;
        let with = |phase| Op::Change(ChangeOp { change, phase });
        match phase {
            // Ordering: Relaxed; the simulator has one thread.
            ChangePhase::Unsettled(seen) if self.pager.settled_word().load(Ordering::Relaxed) == seen => {
                Next::Wait(with(phase))
            }
            ChangePhase::Want | ChangePhase::Unsettled(_) => {
                if !self.enter_alone() {
                    self.change_waits.set(world.profile.changes_first && !self.exclusive.get());
                    return Next::Wait(with(ChangePhase::Want));
                }
                self.change_waits.set(false);
                let quiet = change.ranges().into_iter().try_for_each(|range| self.pager.quiet(range));
                if let Err(Unsettled { seen }) = quiet {
                    world.saw("Unsettled");
                    self.exclusive.set(false);
                    return Next::Go(with(ChangePhase::Unsettled(seen)));
                }
                world.note(|| format!("{} changes: {change:?}", self.number));
                self.change_in_kernel(change);
                Next::Go(with(ChangePhase::Tell))
            }
            ChangePhase::Tell => {
                self.tell(change);
                world.saw(change.name());
                self.pager.stats().count(Counter::MapChanges);
                self.exclusive.set(false);
                Next::Done
            }
        }
    }

    fn change_in_kernel(&self, change: Change) {
        let mut program = self.program.borrow_mut();
        for page in change.ranges()[0].iter() {
            let state = program.page_mut(page);
            match change {
                Change::Discard(_) if state.mapped => program.drop_page(page),
                Change::Unmap(_) => program.unmap(page),
                Change::Map(_) => program.map(page),
                Change::Register(_) => state.registered = true,
                Change::Remap(range, to) => program.remap(page, to.plus(page.0 - range.start.0)),
                Change::Flag(_, Flags::PROTECTED, on) => state.forbidden = on && state.mapped,
                Change::Discard(_) | Change::Flag(..) => {}
            }
        }
    }

    fn tell(&self, change: Change) {
        let ranges = &self.pager.ranges;
        match change {
            Change::Discard(range) => self.pager.discard(range),
            Change::Unmap(range) => {
                self.pager.discard(range);
                ranges.lock().remove(range).expect("the ranges fit");
            }
            Change::Map(range) => {
                self.pager.discard(range);
                ranges.lock().insert(range, Flags::NONE).expect("the ranges fit");
            }
            Change::Register(range) => {
                ranges.lock().update(range, |flags| flags.with(Flags::REGISTERED)).expect("the ranges fit");
                self.pager.stats().count(Counter::Registered);
                self.over_for_a_reason.set(true);
                let program = self.program.borrow();
                range
                    .iter()
                    .filter(|&page| program.page(page).present)
                    .for_each(|page| self.pager.adopt_present(page));
            }
            Change::Remap(range, to) => self.tell_remap(range, to),
            Change::Flag(range, flag, on) => {
                let change = |flags: Flags| if on { flags.with(flag) } else { flags.without(flag) };
                ranges.lock().update(range, change).expect("the ranges fit");
            }
        }
    }

    fn tell_remap(&self, range: PageRange, to: PageIndex) {
        self.pager.discard(PageRange::of(to, range.count()));
        self.pager.remap(range, to);
        let mut ranges = self.pager.ranges.lock();
        let moved: Vec<Range> = ranges
            .as_slice()
            .iter()
            .map(|known| Range { pages: known.pages.intersection(range), ..*known })
            .filter(|part| !part.pages.is_empty())
            .collect();
        ranges.remove(range).expect("the ranges fit");
        for part in moved {
            let start = to.plus(part.pages.start.0 - range.start.0);
            ranges.insert(PageRange::of(start, part.pages.count()), part.flags).expect("the ranges fit");
        }
    }
}

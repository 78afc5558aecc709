//! The page table and the list of ranges, each against an array.

use crate::{Input, Memory};
use farpage_core::reclaim::recency::{Epoch, Heat};
use farpage_core::table::entry::{Entry, FRAMES_MAX, Past, SameWord, State, Stored, Word};
use farpage_core::table::ranges::{Flags, Range, Ranges, TooMany};
use farpage_core::table::{CHUNK_PAGES, LEAF_PAGES, Leaf, Table, Walk};
use farpage_core::units::{FrameIndex, PARTS_MAX, PageIndex, PageRange, Part, SlotIndex, SlotPart};
use farpage_core::zswap::pool::ObjectHandle;

const LEAF: u64 = LEAF_PAGES as u64;
const CHUNK: u64 = CHUNK_PAGES as u64;
/// Pages at both sides of every seam.
const PAGES: [u64; 12] = [
    0,
    1,
    CHUNK - 1,
    CHUNK,
    9 * CHUNK,
    LEAF - 1,
    LEAF,
    LEAF + 1,
    LEAF + CHUNK,
    2 * LEAF - CHUNK,
    2 * LEAF - 2,
    2 * LEAF - 1,
];

fn any_state(input: &mut Input) -> State {
    let kind = input.below(9);
    let slot = SlotIndex::from_raw(input.word() | 1);
    let object = ObjectHandle::from_raw(slot.raw()).expect("not 0");
    let at = SlotPart { slot, part: Part::from_raw(input.below(PARTS_MAX + 1) as u8) };
    let copy = match input.byte() {
        0..64 => None,
        64..160 => Some(Stored::Slot(at)),
        _ => Some(Stored::Object(object)),
    };
    let frame = FrameIndex(input.word() % FRAMES_MAX);
    match kind {
        0 => State::Absent,
        1 => State::Zero,
        2 => State::Same(SameWord::pack(u64::from(slot.raw())).expect("small")),
        3 => State::Resident { copy, age: (frame.0 & 7) as u8 },
        4 => State::Parked { frame, copy },
        5 => State::Writing { frame },
        6 => State::Pooled(object),
        7 => State::OnArea(at),
        _ => State::Lost(slot),
    }
}

/// The model's state of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Plain {
    state: State,
    past: Past,
    locked: bool,
    waited: bool,
}

impl Plain {
    const ABSENT: Plain = Plain {
        state: State::Absent,
        past: Past { went: Epoch(0), heat: Heat(0) },
        locked: false,
        waited: false,
    };
}

/// Returns the part of `past` that an entry in this state has space for.
fn remembered(state: State, past: Past) -> Past {
    Past {
        went: if state.is_evicted() { past.went } else { Epoch(0) },
        heat: if matches!(state, State::Absent | State::Lost(_)) { Heat(0) } else { past.heat },
    }
}

/// Locks, settles, waits and walks.
pub fn run(input: &mut Input) {
    let off = input.byte();
    let mut memory = Memory::new(2 * size_of::<Leaf>() + 5 * 8 + 64);
    let mut region = memory.region();
    // The third leaf is never attached.
    let table = Table::new(region.carve(3), PageIndex(0));
    let leaves: &[Leaf] = region.carve(2);
    table.attach(PageIndex(0), &leaves[0]);
    table.attach(PageIndex(LEAF), &leaves[1]);
    assert!(table.get(PageIndex(2 * LEAF)).is_none());
    let mut model = [Plain::ABSENT; PAGES.len()];
    // The last word seen of each page, perhaps long ago. A page gets its place when it is first looked up
    // below. At that moment other pages of its chunk may or may not be in use.
    let blank = region.carve::<Entry>(1)[0].load();
    let mut seen: [(Word, Plain); PAGES.len()] = [(blank, Plain::ABSENT); PAGES.len()];
    while !input.is_over() {
        let kind = input.kind(6, off);
        let at = input.below(PAGES.len());
        let place = table.get(PageIndex(PAGES[at])).expect("it has a leaf");
        let plain = &mut model[at];
        match kind {
            Some(0) => seen[at] = (place.entry().load(), *plain),
            Some(1) if !seen[at].1.locked => {
                let locked = place.entry().try_lock(seen[at].0);
                assert_eq!(locked.is_ok(), seen[at].1 == *plain);
                plain.locked |= locked.is_ok();
            }
            Some(2) => {
                assert_eq!(place.entry().ask_to_be_woken(), plain.locked);
                plain.waited |= plain.locked;
            }
            Some(3) if plain.locked => {
                let after = any_state(input);
                let said = input.byte();
                let past = Past { went: Epoch(said & 127), heat: Heat(said & Heat::MAX.0) };
                let past = (said > 127).then_some(past);
                assert_eq!(place.settle(plain.state, after, past), plain.waited);
                let past = remembered(after, past.unwrap_or(plain.past));
                *plain = Plain { state: after, past, locked: false, waited: false };
            }
            Some(4) if !plain.locked => {
                let after = any_state(input);
                place.set(plain.state, after);
                *plain = Plain { state: after, ..Plain::ABSENT };
            }
            Some(5) => {
                if let State::Resident { copy, age: 1.. } = seen[at].1.state
                    && !seen[at].1.locked
                {
                    place.entry().grow_younger(seen[at].0);
                    if seen[at].1 == *plain
                        && let State::Resident { age, .. } = plain.state
                    {
                        plain.state = State::Resident { copy, age: age - 1 };
                    }
                }
            }
            _ => {}
        }
        for (page, plain) in PAGES.iter().zip(&model) {
            let word = table.known(PageIndex(*page)).map_or(blank, |place| place.entry().load());
            assert_eq!(
                (word.state(), word.is_locked(), word.past()),
                (plain.state, plain.locked, plain.past)
            );
        }
        walks_like(&table, &model, [input.below(PAGES.len()), input.below(PAGES.len() + 1)]);
    }
    table.check();
}

/// Walks from one of the pages to another, or to the end.
fn walks_like(table: &Table, model: &[Plain; PAGES.len()], [one, other]: [usize; 2]) {
    let (from, to) = (one.min(other), one.max(other));
    let end = PAGES.get(to).map_or(table.all().end, |page| PageIndex(*page));
    let range = PageRange::new(PageIndex(PAGES[from]), end);
    let of = |wanted: fn(State) -> bool| {
        let pages = PAGES.iter().zip(model).take(to).skip(from);
        pages.filter(move |(_, plain)| wanted(plain.state)).map(|(page, _)| PageIndex(*page))
    };
    let first = |walk| table.next(range, walk).map(|(page, _)| page);
    assert_eq!(first(Walk::Resident), of(State::is_resident).next());
    assert_eq!(first(Walk::Used), of(|state| state != State::Absent).next());
    let mut visited = Vec::new();
    table.for_each_used(range, |page, _| visited.push(page));
    assert!(of(|state| state != State::Absent).eq(visited));
}

/// Pages that ranges consist of.
const RANGE_PAGES: usize = 64;
const FLAGS: [Flags; 4] = [Flags::NONE, Flags::REGISTERED, Flags::LOCKED, Flags::HELD];

/// Inserts, removes and updates ranges, with capacity for few ranges.
pub fn run_ranges(input: &mut Input) {
    let off = input.byte();
    let capacity = 1 + input.below(24);
    let mut memory = Memory::new((capacity + 1) * size_of::<Range>());
    let mut region = memory.region();
    let mut ranges = Ranges::new(region.carve(capacity));
    let mut model = [None; RANGE_PAGES + 16];
    while !input.is_over() {
        let kind = input.kind(3, off);
        let (start, count) = (input.below(RANGE_PAGES), input.below(16));
        let flags = FLAGS[input.below(FLAGS.len())];
        let pages = PageRange::of(PageIndex(start as u64), count as u64);
        let mut after = model;
        let span = &mut after[start..start + count];
        let changed = match kind {
            Some(0) => {
                span.fill(Some(flags));
                ranges.insert(pages, flags)
            }
            Some(1) => {
                span.fill(None);
                ranges.remove(pages)
            }
            Some(2) => {
                span.iter_mut().flatten().for_each(|old| *old = old.with(flags));
                ranges.update(pages, |old| old.with(flags))
            }
            _ => Ok(()),
        };
        ranges.check();
        match (changed, kind) {
            (Ok(()), _) => model = after,
            // Several ranges change one after another, so some of them may have changed.
            (Err(TooMany), Some(2)) => return,
            (Err(TooMany), _) => {}
        }
        for (page, flags) in model.iter().enumerate() {
            let found = ranges.find(PageIndex(page as u64)).map(|range| range.flags);
            assert_eq!(found, *flags, "page {page}");
        }
        let covered = model[start..start + count].iter().any(Option::is_some);
        assert_eq!(ranges.touches(pages), covered);
    }
}

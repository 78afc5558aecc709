//! Whole-state invariants: every page, frame, object and slot is accounted for. The simulator and the tests
//! call [`all`] after each step. Nothing may be under way meanwhile but what the caller names.

use crate::pager::Pager;
use crate::stats::{Counter, Gauge};
use crate::table::entry::{State, Stored};
use crate::units::{FrameIndex, SlotIndex};

/// The resources that the driver holds at the moment and that no page's entry names.
#[derive(Default)]
pub struct InFlight<'a> {
    /// Frames of tickets and batches.
    pub frames: &'a [FrameIndex],
    /// Frames in write batches and write requests.
    pub writing: &'a [FrameIndex],
    /// Slots of write requests, one for each page that goes there, and slots that were taken for waiting
    /// parcels.
    pub slots: &'a [SlotIndex],
}

/// Asserts every invariant that must hold between two steps.
pub fn all(pager: &Pager<'_>, in_flight: &InFlight<'_>) {
    pager.table().check();
    pager.ranges.lock().check();
    let (mut resident, mut evicted, mut pooled, mut parked, mut named_parts) = (0, 0, 0, 0, 0);
    pager.table().for_each_used(pager.table().all(), |page, place| {
        let state = place.entry().load().state();
        resident += u64::from(state.is_resident());
        evicted += u64::from(state.is_evicted());
        if let Some(at) = state.slot() {
            named_parts += 1;
            assert_eq!(pager.areas().owner(at), Some(page), "{at:?} is {page:?}'s, but doesn't say so");
        }
        if let Some(Stored::Object(handle)) = state.stored() {
            pooled += 1;
            assert_eq!(
                pager.pool().owner(handle),
                Some(page),
                "{handle:?} is {page:?}'s, but doesn't say so"
            );
        }
        match state {
            State::Parked { .. } => parked += 1,
            State::Writing { frame } => {
                assert!(
                    in_flight.writing.contains(&frame),
                    "{page:?} is being written, but no write has its frame"
                );
                assert_eq!(pager.cache().owner(frame), Some(page));
            }
            // The slot of a lost page stays out of use.
            State::Lost(slot) if slot.raw() != 0 => named_parts += 1,
            _ => {}
        }
    });
    let (hits, issued) = (pager.stats().get(Counter::SwapRaHit), pager.stats().get(Counter::SwapRa));
    assert!(hits <= issued, "{hits} pages of {issued} read ahead were used");
    assert_eq!(resident, pager.stats().gauge(Gauge::Resident), "resident pages");
    assert_eq!(evicted, pager.stats().gauge(Gauge::Evicted), "evicted pages");
    let mut parked_frames = 0;
    pager.cache().check(|frame, page| {
        parked_frames += 1;
        let state = pager.state(page);
        assert!(
            matches!(state, State::Parked { frame: found, .. } if found == frame),
            "{frame:?} is parked for {page:?}, which is {state:?}"
        );
    });
    assert_eq!(parked_frames, parked, "parked pages");
    let taken = pager.cache().count() - pager.cache().usage().free;
    let known = parked_frames + in_flight.frames.len() + in_flight.writing.len();
    assert_eq!(taken as usize, known, "frames in use: a frame was lost or is used twice");
    let mut objects = 0;
    pager.pool().check(&mut |handle, page, _| {
        objects += 1;
        assert_eq!(
            pager.state(page).stored(),
            Some(Stored::Object(handle)),
            "{handle:?} belongs to a page that doesn't know it"
        );
    });
    assert_eq!(objects, pooled, "pool objects: one has no page, or a page has none");
    let (mut references, mut of_heirs) = (0, 0);
    let areas = pager.areas();
    areas.check(|slot| {
        references += areas.references(slot) as usize;
        of_heirs += areas.heirs(slot);
    });
    let in_writes = in_flight.slots.len();
    let given_up = pager.slots_given_up() as usize;
    assert_eq!(
        references,
        named_parts + in_writes + given_up + of_heirs,
        "references to slots: one is nobody's"
    );
}

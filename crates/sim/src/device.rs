//! A swap area's device: memory behind the decorators of `farpage-io`. All processes of a run share it.
//!
//! The layers, from the outside in: `Counting` counts requests. `Slow` delays completions in simulated time.
//! `Faulty` makes requests fail or lie as planned. `Crash` carries requests out in some order, until the
//! device is lost.

// UNSAFETY: requests carry addresses, and the device borrows memory that the device itself owns.

use crate::locks;
use crate::profile::AreaProfile;
use farpage_core::areas::Placement;
use farpage_core::areas::extents::Extent;
use farpage_core::units::{CLUSTER_SLOTS, FrameIndex, NodeId, PAGE_BYTES, SlotIndex};
use farpage_io::{Backend, Busy, Completion, Counting, Crash, FaultCounts, Faulty, Mem, Op};
use farpage_io::{Request, Segment, Slow, Wait};
use std::cell::RefCell;
use std::sync::atomic::AtomicU32;

type Stack = Counting<Slow<Faulty<Crash<Mem<'static>>>>>;

/// The device of one area, and the data about the area that processes share.
pub(crate) struct Device {
    stack: RefCell<Option<Box<Stack>>>,
    memory: *mut [u8],
    /// The owner of each cluster.
    pub holders: Vec<AtomicU32>,
    pub bad: Vec<u32>,
    pub slots: u32,
    pub priority: i32,
    /// Whether the device is told of clusters that became empty.
    pub discards: bool,
}

impl Device {
    pub(crate) fn new(profile: &AreaProfile) -> Device {
        let memory = vec![0; profile.device_pages as usize * PAGE_BYTES].into_boxed_slice();
        let memory = Box::into_raw(memory);
        // SAFETY: the memory was just allocated and is reached only through this reference. `drop` frees the
        // memory after the stack.
        let mem = Mem::new(unsafe { &mut *memory });
        let faulty = Faulty::new(Crash::new(mem, profile.crash), profile.faults);
        let stack = Counting::new(Slow::new(faulty, profile.slow));
        Device {
            stack: RefCell::new(Some(Box::new(stack))),
            memory,
            holders: (0..profile.slots.div_ceil(CLUSTER_SLOTS)).map(|_| AtomicU32::new(0)).collect(),
            bad: profile.bad.clone(),
            slots: profile.slots,
            priority: profile.priority,
            discards: profile.discards,
        }
    }

    /// Returns the device's place in the area order. A priority below 0 means that the device has no priority
    /// of its own.
    pub(crate) fn place(&self) -> Placement {
        let place = Placement::default().at(NodeId((self.slots % 2) as u8), |_| None);
        if self.priority < 0 { place } else { place.with_priority(self.priority) }
    }

    /// Returns the extents of the device's slots. Two of three devices are fragmented; each extent lies
    /// before the previous one on the device.
    pub(crate) fn extents(&self) -> Vec<Extent> {
        if self.slots.is_multiple_of(3) {
            return Vec::new();
        }
        let (mut list, mut slot) = (Vec::new(), 0);
        while slot < self.slots {
            let count = (1 + (slot * 7 + self.slots) % 13).min(self.slots - slot);
            list.push(Extent { slot, count, block: u64::from(2 * (self.slots - slot)) });
            slot += count;
        }
        list
    }

    fn with<T>(&self, act: impl FnOnce(&mut Stack) -> T) -> T {
        act(self.stack.borrow_mut().as_mut().expect("a device that isn't dropped"))
    }

    /// Starts to read or write neighbouring slots. The caller must not touch the frames until the completion
    /// arrives.
    pub(crate) fn submit(
        &self,
        op: Op,
        slot: SlotIndex,
        frames: impl Iterator<Item = FrameIndex>,
        pointer: impl Fn(FrameIndex) -> *mut u8,
        token: u64,
    ) -> Result<(), Busy> {
        locks::assert_none_held("a request to a device");
        let segments: Vec<Segment> = frames.map(|frame| Segment { base: pointer(frame) }).collect();
        let (first, end) = (slot.offset(), slot.offset() + segments.len() as u32);
        let is_within = |extent: &Extent| extent.slot <= first && end <= extent.slot + extent.count;
        let extents = self.extents();
        assert!(
            extents.is_empty() || extents.iter().any(is_within),
            "{op:?} of {first}..{end} crosses extents"
        );
        let request = Request { op, offset: slot.byte_offset(), segments: &segments, token };
        // SAFETY: the frames belong to an operation that keeps them until the completion arrives. A process
        // that dies keeps its memory until all its requests are complete.
        self.with(|stack| unsafe { stack.submit(&request) })
    }

    /// Advances the device's time by `ticks`, and passes each completion to `finished`.
    pub(crate) fn pass(&self, ticks: u64, mut finished: impl FnMut(Completion)) {
        let mut out = [Completion::EMPTY; 16];
        let count = self.with(|stack| {
            stack.inner().advance(ticks);
            stack.complete(Wait::No, &mut out)
        });
        out[..count].iter().for_each(|completion| finished(*completion));
    }

    /// Returns the counts of faults that the device has injected.
    pub(crate) fn faults(&self) -> FaultCounts {
        self.with(|stack| *stack.inner().inner().counts())
    }

    /// Returns the largest number of pages that lies can have damaged. A lost write leaves up to 64 old
    /// pages. A misdirected write also overwrites up to 64 pages elsewhere.
    pub(crate) fn pages_lied_about_max(&self) -> u64 {
        let faults = self.faults();
        faults.flips + faults.lost_writes * 64 + faults.misdirections * 128
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stack.borrow_mut().take();
        // SAFETY: the pointer comes from `Box::into_raw` in `new`. The stack that borrowed the memory is
        // gone.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}

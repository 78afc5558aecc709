//! Whole-state invariants of the pool, for tests, the simulator and checked runs.
//!
//! Together they say: each live object has bytes of its own, in a block that knows the object. Each live
//! object is in the order of going exactly once. No slot, block or handle is lost. All counts match what is
//! there.
#![forbid(unsafe_code)]

use super::blocks::BlockState;
use super::classes::CLASSES_MAX;
use super::{ObjectHandle, Pool, State};
use crate::units::PageIndex;

impl Pool<'_> {
    /// Asserts that the pool's state is consistent. Reports each live object in the order in which they would
    /// go, and then those that are kept: its handle, its owner, its length. Takes time in proportion to the
    /// pool, all of it under the lock: `visit` must not call the pool.
    pub fn check(&self, visit: &mut dyn FnMut(ObjectHandle, PageIndex, usize)) {
        let state = self.state.lock();
        state.blocks.check();
        let attached = state.check_classes();
        state.objects.check(|number| {
            let meta = &state.objects.metas[number as usize];
            let handle = ObjectHandle::from_raw(number).expect("no list has an object 0");
            visit(handle, meta.owner(), meta.length());
        });
        assert!(
            attached == state.objects.count(),
            "{attached} objects in blocks, {} live",
            state.objects.count()
        );
    }
}

impl State<'_> {
    /// Asserts what holds between classes, blocks and objects; returns how many objects lie in blocks.
    fn check_classes(&self) -> usize {
        // Of each class: its blocks, free slots and partly filled blocks.
        let mut counted = [(0_u32, 0_u32, 0_u32); CLASSES_MAX];
        let mut attached = 0;
        for block in 1..=self.blocks.touched {
            let meta = &self.blocks.metas[block as usize];
            if meta.state == BlockState::InUse {
                let class = self.classes.get(usize::from(meta.class));
                let slots_free = class.capacity - meta.objects.count;
                let (blocks, free, partial) = &mut counted[usize::from(meta.class)];
                (*blocks, *free, *partial) =
                    (*blocks + 1, *free + slots_free, *partial + u32::from(slots_free != 0));
                attached += meta.objects.count as usize;
                self.check_block(block, class.slot_bytes);
            }
        }
        for (number, class) in self.classes.all().iter().enumerate() {
            let mut partial = 0;
            class.check_groups(self.blocks.metas, |block| {
                let meta = &self.blocks.metas[block as usize];
                assert!(
                    meta.state == BlockState::InUse && usize::from(meta.class) == number,
                    "block {block}"
                );
                partial += 1;
            });
            assert!((class.blocks, class.slots_free, partial) == counted[number], "class {number} miscounts");
        }
        attached
    }

    /// Asserts that the block's objects are live, know that they are in the block, fit their slots and share
    /// none.
    fn check_block(&self, block: u32, slot_bytes: usize) {
        let objects = &self.blocks.metas[block as usize].objects;
        objects.check(self.objects.metas, |number| {
            let meta = &self.objects.metas[number as usize];
            assert!(meta.length() != 0 && meta.block == block, "object {number} isn't in block {block}");
            assert!(meta.length() <= slot_bytes, "object {number} is larger than its slot");
        });
        let slots = objects.iter(self.objects.metas).map(|number| self.objects.metas[number as usize].slot);
        self.blocks.check_slots(block, slot_bytes, slots);
    }
}

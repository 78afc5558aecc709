//! Compaction moves objects from the sparsest blocks of a class to its fullest until blocks become empty.
//!
//! Pages come back in another order than they went out, so blocks get holes. A class is worth the work as
//! soon as its holes add up to a whole block. Handles don't change, so nobody outside notices.
#![forbid(unsafe_code)]

use super::pins::Pins;
use super::{Pool, State};

/// Moves for which the lock is held at once. Copying bytes that are in no cache takes half a microsecond.
const MOVES_PER_LOCK: usize = 2;

impl Pool<'_> {
    /// Moves up to `moves_max` objects so that blocks become empty, and returns how many it moved. Fewer mean
    /// that nothing more is to be gained just now. [`Pool::take_released`] returns the emptied blocks.
    pub fn compact(&self, moves_max: usize) -> usize {
        let mut moved = 0;
        while moved < moves_max {
            let wanted = MOVES_PER_LOCK.min(moves_max - moved);
            let now = self.state.lock().compact(wanted, &self.pins);
            moved += now;
            if now < wanted {
                break;
            }
        }
        moved
    }
}

impl State<'_> {
    fn compact(&mut self, moves_max: usize, pins: &Pins) -> usize {
        let classes = self.classes.all().len();
        let (mut moved, mut idle) = (0, 0);
        while moved < moves_max && idle < classes {
            let class = self.classes.compacting;
            let movable = |&(from, _): &(u32, u32)| !pins.has(self.blocks.metas[from as usize].objects.first);
            // An object that has a pin can be moved the next time.
            match self.classes.get(class).compaction(self.blocks.metas).filter(movable) {
                Some((from, to)) => {
                    self.move_one(class, from, to);
                    (moved, idle) = (moved + 1, 0);
                }
                None => {
                    self.classes.compacting = (class + 1) % classes;
                    idle += 1;
                }
            }
        }
        moved
    }

    /// Moves one object of block `from` to a free slot of block `to`.
    fn move_one(&mut self, class: usize, from: u32, to: u32) {
        let slot_bytes = self.classes.get(class).slot_bytes;
        let number = self.blocks.metas[from as usize].objects.first;
        let (slot_before, length) = {
            let meta = &self.objects.metas[number as usize];
            assert!(meta.block == from && meta.length() != 0);
            (meta.slot, meta.length())
        };
        // The copy comes first, because a freed slot loses its first bytes.
        let slot = self.blocks.take_slot(to, slot_bytes);
        self.blocks.copy((from, slot_before), (to, slot), slot_bytes, length);
        self.detach(number);
        self.attach(number, to, slot);
    }
}

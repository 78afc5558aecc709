//! The scan of the baselines. While there are free clusters, a scan takes slots from this CPU's cluster,
//! under the area's lock. After that a long search without the lock looks for a free slot, from where this
//! CPU last found one. The scan checks the slot again under the lock, and takes it.
//!
//! `classic` ends as soon as it would have to search for a second slot. `scan-more` goes on looking under the
//! lock until its ration of 256 is used up. Slots taken and slots looked at both count against the ration.
//! `scan-more` doesn't go on if the first slot took more than one ration to find.

use super::classic::{Area, Classic, FREE, LISTED};
use super::probe::{Held, Probe};
use crate::areas::leases::Leases;
use crate::sync::rank;
use crate::units::CLUSTER_SLOTS;

/// What a scan does once no cluster is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragmented {
    /// The scan ends with the one slot that it has.
    OneByOne,
    /// The scan looks for more slots within its ration.
    ScanOn,
}

/// The position where a CPU's scan goes on. All zeros: the CPU has no position yet.
#[repr(C)]
pub(super) struct Position {
    /// The CPU's cluster plus one.
    cluster: u32,
    /// The slot where the scan goes on in the cluster.
    in_cluster: u32,
    /// The slot where the scan goes on without a cluster.
    next: u32,
    random: u32,
}

/// Slots in a stride, 64 MiB. At the end of a stride a position jumps to another place, so that CPUs stay
/// apart.
const STRIDE: u32 = 16_384;

/// The next step of a scan.
enum Turn {
    /// Look at the slot under the lock.
    Check,
    /// Search for a free slot without the lock.
    Search,
    Done,
}

/// A scan in progress.
struct Scan<'a> {
    base: u32,
    offset: u32,
    ration: i32,
    /// Whether the first slot took more than one ration.
    scanned_many: bool,
    found: usize,
    out: &'a mut [u32],
}

impl<'m, P: Probe> Classic<'m, P> {
    /// Takes up to as many free slots as `out` has places. Returns how many.
    pub(super) fn scan(&self, cpu: usize, position: &mut Position, out: &mut [u32]) -> usize {
        let mut area = self.area();
        loop {
            let found = self.scan_once(cpu, position, &mut area, out);
            if found > 0 || self.lease(&mut area, Leases::take).is_none() {
                self.publish(&area);
                return found;
            }
        }
    }

    fn scan_once<'s>(
        &'s self,
        cpu: usize,
        position: &mut Position,
        area: &mut Held<'s, Area<'m>, P, { rank::AREA }>,
        out: &mut [u32],
    ) -> usize {
        position.start(cpu, area.highest);
        let mut scan = Scan {
            base: position.next,
            offset: position.next,
            ration: self.limits.ration,
            scanned_many: false,
            found: 0,
            out,
        };
        let mut turn = match self.in_cluster(position, area) {
            Some(slot) => {
                (scan.base, scan.offset) = (slot, slot);
                Turn::Check
            }
            None => Turn::Search,
        };
        loop {
            turn = match turn {
                Turn::Check => self.check_slot(&mut scan, position, area),
                Turn::Search => self.search(&mut scan, area),
                Turn::Done => break,
            };
        }
        if scan.found > 0 {
            position.go_on_at(scan.offset + 1, area.lowest, area.highest);
        }
        scan.found
    }

    /// Looks at one slot, takes it if it is free, and returns the next step.
    fn check_slot(&self, scan: &mut Scan<'_>, position: &mut Position, area: &mut Area<'m>) -> Turn {
        if self.is_anothers_cluster(area, scan.offset) {
            position.cluster = 0;
            if scan.found > 0 {
                return Turn::Done;
            }
            match self.in_cluster(position, area) {
                Some(slot) => (scan.base, scan.offset) = (slot, slot),
                None => return Turn::Search,
            }
        }
        if area.highest == 0 {
            return Turn::Done;
        }
        if scan.offset > area.highest {
            (scan.base, scan.offset) = (area.lowest, area.lowest);
        }
        self.probe.scanned(1);
        if self.byte(scan.offset) != FREE {
            return if scan.found > 0 { Turn::Done } else { Turn::Search };
        }
        if self.is_anothers_cluster(area, scan.offset) {
            return Turn::Check;
        }
        self.claim(area, scan.offset);
        scan.out[scan.found] = scan.offset;
        scan.found += 1;
        scan.ration -= 1;
        if scan.found == scan.out.len() || scan.offset >= area.highest || scan.ration < 0 {
            return Turn::Done;
        }
        if let Some(slot) = self.in_cluster(position, area) {
            scan.offset = slot;
            return Turn::Check;
        }
        if self.fragmented == Fragmented::ScanOn && !scan.scanned_many {
            return self.scan_on(scan, area);
        }
        Turn::Done
    }

    /// Whether a slot lies in a free cluster that isn't the first of the list. A scan may not take that slot,
    /// because the list can only remove its first cluster.
    fn is_anothers_cluster(&self, area: &Area<'m>, slot: u32) -> bool {
        let cluster = slot / CLUSTER_SLOTS;
        let info = area.infos.get(cluster as usize);
        info.is_some_and(|info| info.state == LISTED) && area.first_free() != Some(cluster)
    }

    /// Looks at a few more slots with the lock held. Only `scan-more` does so.
    fn scan_on(&self, scan: &mut Scan<'_>, area: &Area<'m>) -> Turn {
        let limit = if scan.offset < scan.base { scan.base } else { area.highest };
        let from = scan.offset;
        let mut turn = Turn::Done;
        while scan.offset <= limit {
            scan.ration -= 1;
            if scan.ration <= 0 {
                break;
            }
            if self.byte(scan.offset) == FREE {
                turn = Turn::Check;
                break;
            }
            scan.offset += 1;
        }
        self.probe.scanned(scan.offset - from);
        turn
    }

    /// Searches for a free slot without the lock: up to the upper bound, then from the lower bound to where
    /// the scan began.
    fn search<'s>(&'s self, scan: &mut Scan<'_>, area: &mut Held<'s, Area<'m>, P, { rank::AREA }>) -> Turn {
        let (lowest, highest) = (area.lowest, area.highest);
        let mut looked = 0;
        let found = area.unlocked(|| {
            let behind = (lowest..=scan.base.min(highest)).take_while(|_| highest > 0);
            let found = (scan.offset + 1..=highest).chain(behind).find(|&slot| {
                looked += 1;
                scan.ration -= 1;
                if scan.ration < 0 {
                    // Linux lets other threads run here. Farpage's threads can be preempted at any time.
                    (scan.ration, scan.scanned_many) = (self.limits.ration, true);
                }
                self.byte(slot) == FREE
            });
            self.probe.scanned(looked);
            found
        });
        match found {
            Some(slot) => {
                scan.offset = slot;
                Turn::Check
            }
            None => Turn::Done,
        }
    }

    /// Returns the next free slot of this CPU's cluster, or of the next free cluster if that cluster has
    /// none.
    fn in_cluster(&self, position: &mut Position, area: &mut Area<'m>) -> Option<u32> {
        loop {
            if position.cluster == 0 {
                let cluster = match area.first_free() {
                    Some(cluster) => cluster,
                    None => {
                        // An unleased cluster counts as free. If it has bad slots, it isn't in the list even
                        // when leased.
                        self.lease(area, Leases::take_unless_futile)?;
                        continue;
                    }
                };
                (position.cluster, position.in_cluster) = (cluster + 1, cluster * CLUSTER_SLOTS);
            }
            let end = self.ground.slots(position.cluster - 1).end;
            let from = position.in_cluster;
            let slot = (from..end).find(|slot| self.byte(*slot) == FREE);
            self.probe.scanned(slot.map_or(end, |slot| slot + 1) - from);
            if let Some(slot) = slot {
                position.in_cluster = slot + 1;
                return Some(slot);
            }
            position.cluster = 0;
        }
    }
}

impl Position {
    fn start(&mut self, cpu: usize, highest: u32) {
        if self.random == 0 {
            self.random = (cpu as u32 + 1).wrapping_mul(0x9e37_79b9) | 1;
            self.next = 1 + self.random() % highest.max(1);
        }
    }

    /// Xorshift. Any number that differs from CPU to CPU will do.
    fn random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }

    fn go_on_at(&mut self, next: u32, lowest: u32, highest: u32) {
        let jumps = self.next / STRIDE != next / STRIDE && lowest < highest;
        self.next = if jumps {
            let at = lowest + self.random() % (highest - lowest + 1);
            (at / STRIDE * STRIDE).max(lowest)
        } else {
            next
        };
    }
}

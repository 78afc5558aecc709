//! The slots of one area: which are free, and which thread gets which. Stands between a page that is evicted
//! to an area ([`crate::pager`]'s write batches) and the area's file.
//!
//! - [`clusters`] is the policy of Farpage, with its parts `lists` and `bits`. [`classic`] with its `scan` is
//!   the baseline.
//! - [`counts`] counts the references to slots that several pages share, or that a fork's children read.
//! - [`probe`] watches locks and scans.
//!
//! Every policy serves the clusters that this process has leased ([`crate::areas::Leases`]). A run that a
//! policy hands out never crosses a cluster's end. Slot 0, bad slots and slots in use are never handed out.

mod bits;
mod classic;
mod clusters;
pub mod counts;
mod lists;
pub mod probe;
mod scan;

use super::leases::Leases;
use crate::config::SlotPolicy;
use crate::memory::{Region, Zeroed};
use crate::sync::{Lock, rank};
use crate::units::CLUSTER_SLOTS;
use classic::{Cache, Classic, Info, Returned, Tables};
use clusters::{Cluster, Clusters, Hand};
use core::ops::Range;
use core::sync::atomic::AtomicU8;
use counts::{Continuation, Counts};
use lists::Link;
use probe::{Probe, Unwatched};
use scan::Fragmented;

/// The first slot of a run, and the number of slots.
pub type Run = (u32, u32);

/// The area as it is given to a policy.
pub struct Ground<'m> {
    /// Slots of the area. The last cluster may be short: its slots from `total` on don't exist.
    pub total: u32,
    /// Slots that can't be used, sorted.
    pub bad: &'m [u32],
    /// Which process holds which cluster.
    pub leases: Leases<'m>,
    /// Whether the driver discards clusters that became empty: see [`Slots::take_discard`].
    pub discards: bool,
}

impl Ground<'_> {
    const fn clusters(&self) -> u32 {
        self.total.div_ceil(CLUSTER_SLOTS)
    }

    /// The slots of a cluster that exist.
    fn slots(&self, cluster: u32) -> Range<u32> {
        cluster * CLUSTER_SLOTS..self.total.min((cluster + 1) * CLUSTER_SLOTS)
    }

    /// Calls `each` with the offsets in a cluster that can't be used: bad slots, slots beyond the end, the
    /// header's slot.
    fn each_unusable(&self, cluster: u32, mut each: impl FnMut(u32)) {
        let slots = self.slots(cluster);
        let from = self.bad.partition_point(|bad| *bad < slots.start);
        if cluster == 0 {
            each(0);
        }
        let inside = self.bad[from..].iter().take_while(|bad| **bad < slots.end);
        inside.filter(|bad| **bad != 0).for_each(|bad| each(bad % CLUSTER_SLOTS));
        (slots.end..(cluster + 1) * CLUSTER_SLOTS).for_each(|slot| each(slot % CLUSTER_SLOTS));
    }

    /// How many slots of a cluster can be used.
    fn usable(&self, cluster: u32) -> u32 {
        let mut usable = CLUSTER_SLOTS;
        self.each_unusable(cluster, |_| usable -= 1);
        usable
    }
}

/// How many of `cpus` CPUs get a cluster of their own in an area of `slots` slots. In a small area CPUs share
/// clusters. Otherwise each of many CPUs would hold a cluster, and other processes would find none.
pub fn cpus_served(slots: u32, cpus: usize) -> usize {
    cpus.clamp(1, (slots.div_ceil(CLUSTER_SLOTS) as usize / 16).max(1))
}

/// Places for continued counts. A count is rarely continued, so about one place for each cluster is enough.
fn continuations(clusters: usize) -> usize {
    clusters.next_power_of_two().max(8)
}

/// Tables of an area's slots, for one policy.
pub struct SlotMemory<'m> {
    kind: Kind<'m>,
    counts: Counts<'m>,
}

enum Kind<'m> {
    Clusters {
        clusters: &'m [Lock<Cluster, { rank::CLUSTER }>],
        links: &'m mut [Link],
        hands: &'m [Lock<Hand, { rank::CPU_SLOTS }>],
    },
    Classic(Tables<'m>, Fragmented),
}

impl<'m> SlotMemory<'m> {
    /// Bytes for an area of `slots` slots with a cache or hand for each of `cpus` CPUs or threads. `cpus` is
    /// at least one. If more CPUs take slots, they share: see [`cpus_served`].
    pub fn bytes(policy: SlotPolicy, slots: u32, cpus: usize) -> usize {
        let clusters = slots.div_ceil(CLUSTER_SLOTS) as usize;
        let counts = Region::bytes_for::<u8>(slots as usize)
            + Region::bytes_for::<Continuation>(continuations(clusters));
        counts
            + match policy {
                SlotPolicy::Clusters => {
                    Region::bytes_for::<Lock<Cluster, { rank::CLUSTER }>>(clusters)
                        + Region::bytes_for::<Link>(clusters)
                        + Region::bytes_for::<Lock<Hand, { rank::CPU_SLOTS }>>(cpus)
                }
                SlotPolicy::Classic | SlotPolicy::ScanMore => {
                    Region::bytes_for::<AtomicU8>(slots as usize)
                        + Region::bytes_for::<Info>(clusters)
                        + Region::bytes_for::<Lock<Cache, { rank::CPU_SLOTS }>>(cpus)
                        + Region::bytes_for::<Lock<Returned, { rank::RETURNED_SLOTS }>>(cpus)
                }
            }
    }

    /// Carves the tables out of `region`, which must have [`SlotMemory::bytes`] left.
    pub fn carve(region: &mut Region<'m>, policy: SlotPolicy, slots: u32, cpus: usize) -> SlotMemory<'m> {
        let clusters = slots.div_ceil(CLUSTER_SLOTS) as usize;
        fn shared<'m, T: Zeroed>(region: &mut Region<'m>, count: usize) -> &'m [T] {
            region.carve(count)
        }
        let fragmented =
            if policy == SlotPolicy::ScanMore { Fragmented::ScanOn } else { Fragmented::OneByOne };
        let kind = match policy {
            SlotPolicy::Clusters => Kind::Clusters {
                clusters: shared(region, clusters),
                links: region.carve(clusters),
                hands: shared(region, cpus),
            },
            SlotPolicy::Classic | SlotPolicy::ScanMore => {
                let tables = Tables {
                    map: shared(region, slots as usize),
                    infos: region.carve(clusters),
                    caches: shared(region, cpus),
                    returned: shared(region, cpus),
                };
                Kind::Classic(tables, fragmented)
            }
        };
        let bytes = region.carve(slots as usize);
        SlotMemory { kind, counts: Counts::new(bytes, region.carve(continuations(clusters))) }
    }
}

/// Free and used slots of an area, managed by one of the policies.
pub struct Slots<'m, P: Probe = Unwatched> {
    policy: Policy<'m, P>,
    /// Counts of the slots that several pages share, or that a fork's children read.
    pub counts: Counts<'m>,
}

#[expect(clippy::large_enum_variant, reason = "one for each area, in place")]
enum Policy<'m, P: Probe> {
    Clusters(Clusters<'m, P>),
    Classic(Classic<'m, P>),
}

impl<'m, P: Probe> Slots<'m, P> {
    /// Creates the slots of an area of which nothing is leased yet.
    pub fn new(ground: Ground<'m>, memory: SlotMemory<'m>, probe: P) -> Self {
        let policy = match memory.kind {
            Kind::Clusters { clusters, links, hands } => {
                Policy::Clusters(Clusters::new(ground, clusters, links, hands, probe))
            }
            Kind::Classic(tables, fragmented) => {
                Policy::Classic(Classic::new(ground, tables, fragmented, probe))
            }
        };
        Slots { policy, counts: memory.counts }
    }

    /// Takes up to `max` slots and calls `each` with every run of neighbouring slots. No run crosses a
    /// cluster's end. Returns how many slots were taken. Zero means that no slot is free. `cpu` is the
    /// caller's CPU, or its number among the threads that take slots. A caller with a number of its own
    /// contends with nobody. `each` is called with locks held.
    pub fn take(&self, cpu: usize, max: u32, each: impl FnMut(Run)) -> u32 {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.take(cpu, max, each),
            Policy::Classic(classic) => classic.take(cpu, max, each),
        }
    }

    /// Frees a slot without references, as [`Counts::remove`] reported. `cpu` is as for `take`. A caller that
    /// doesn't know its CPU may pass any number that differs from slot to slot.
    pub fn free(&self, cpu: usize, slot: u32) {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.free(cpu, slot),
            Policy::Classic(classic) => classic.free(cpu, slot),
        }
    }

    /// Makes slots of clusters in use come first until none is left, because a write found no free space on
    /// the disk.
    pub fn tighten(&self) {
        if let Policy::Clusters(clusters) = &self.policy {
            clusters.tighten();
        }
    }

    /// Whether at least half of a slot's cluster is free.
    pub fn is_thin(&self, slot: u32) -> bool {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.is_thin(slot),
            Policy::Classic(_) => false,
        }
    }

    /// Slots in use by this process. Exact while no thread takes or frees slots.
    pub fn in_use(&self) -> u32 {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.in_use(),
            Policy::Classic(classic) => classic.in_use(),
        }
    }

    /// Returns an empty cluster that the driver may discard on its device. No thread takes any of its slots
    /// until the driver calls [`Slots::discarded`] with the same run. None unless discards were asked for and
    /// the policy is `Clusters`.
    pub fn take_discard(&self) -> Option<Run> {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.take_discard(),
            Policy::Classic(_) => None,
        }
    }

    /// Frees the slots that `take_discard` gave, whether or not the driver could discard them.
    pub fn discarded(&self, run: Run) {
        match &self.policy {
            Policy::Clusters(clusters) => clusters.discarded(run.0),
            Policy::Classic(_) => unreachable!("nothing was given out to be discarded"),
        }
    }

    /// Empties the hands of all CPUs and gives up the leases of empty clusters. The baselines keep their
    /// leases.
    pub fn let_go(&self) {
        if let Policy::Clusters(clusters) = &self.policy {
            clusters.let_go();
        }
    }

    /// Which process holds which cluster.
    pub fn leases(&self) -> &Leases<'m> {
        &self.ground().leases
    }

    fn ground(&self) -> &Ground<'m> {
        match &self.policy {
            Policy::Clusters(clusters) => &clusters.ground,
            Policy::Classic(classic) => &classic.ground,
        }
    }

    /// The probe that watches locks and scans.
    pub fn probe(&self) -> &P {
        match &self.policy {
            Policy::Clusters(clusters) => &clusters.probe,
            Policy::Classic(classic) => &classic.probe,
        }
    }

    /// Asserts all invariants and calls `used` for each slot in use. Must be called while no thread takes or
    /// frees slots.
    pub fn check(&self, used: impl FnMut(u32)) {
        self.counts.check();
        match &self.policy {
            Policy::Clusters(clusters) => clusters.check(used),
            Policy::Classic(classic) => classic.check(used),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

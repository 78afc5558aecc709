//! zswap's index: which pool object holds the bytes of a slot, for keys that have no page-table entry.
//!
//! All pages of a space have an entry in its page table, and that entry holds the object's handle. So the
//! live engine needs no index there and has none. The index serves keys without an entry: slots that several
//! processes share after a fork, and policies that are tried without a space.
//!
//! The index is a table in two steps. A directory has a word for each cluster of each area. The word names a
//! *leaf*, which has a word for each of the cluster's slots. Slots are dense, so there is nothing to search,
//! balance or split. The number of leaves is fixed, and all are handed over at start. A cluster gets a leaf
//! with its first entry. When no leaf is left, a leaf without entries may be taken from its cluster.
//!
//! Loading takes no lock and writes nothing. Storing or erasing is one exchange of the slot's word, and one
//! change of the leaf's tally if the number of entries changes. Only assigning leaves takes a lock.
//!
//! 1. An entry is erased by identity: the exchange expects the very word that was loaded. Words don't repeat
//!    ([`Word`]).
//! 2. The tally of a leaf is at least the number of its entries. The tally is raised before an entry is made
//!    and lowered after the entry was erased. Only a leaf whose tally is 0 loses its cluster, by an exchange
//!    of the tally.
//! 3. So an entry stays in its leaf, and the leaf with its cluster. A thread that found a word, and finds the
//!    same lease afterwards, knows that the word was its key's.
//! 4. Storing needs memory only where the cluster has no leaf, and so no entry. A store that fails has
//!    changed nothing, and there is no older entry that could survive.
#![forbid(unsafe_code)]

#[cfg(all(test, loom))]
mod loomed;
#[cfg(all(test, not(loom)))]
mod tests;
mod word;

use crate::memory::Region;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Lock, rank};
use crate::units::{AREAS_MAX, AreaId, CLUSTER_SLOTS, SlotIndex};
use crate::zswap::pool::ObjectHandle;
use word::{Lease, Tally, Word};

/// Slots under a leaf. Loom makes its tables anew for each order that it tries, so its leaves are tiny.
const LEAF_SLOTS: u32 = if cfg!(all(test, loom)) { 2 } else { CLUSTER_SLOTS };
// 512 words of 8 bytes are one page, so memory is touched as clusters are used.
const _: () = assert!(CLUSTER_SLOTS as usize * size_of::<u64>() == crate::units::PAGE_BYTES);

/// Every leaf has entries of other clusters. The store changed nothing, and the key had no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// An entry as it was loaded: the object's handle, and which store it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    handle: ObjectHandle,
    leaf: u32,
    word: Word,
}

impl Entry {
    /// Returns the object's handle.
    pub const fn handle(self) -> ObjectHandle {
        self.handle
    }
}

/// How much memory an index needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLayout {
    /// Where each area's clusters begin in the directory. The last element is the number of clusters.
    first_cluster: [u32; AREAS_MAX + 1],
    /// Clusters that can have entries at the same time.
    leaves: usize,
}

impl IndexLayout {
    /// Makes the layout for areas of these many slots, slot 0 included, and for entries in `leaves` of their
    /// clusters at once. More leaves than clusters are no use, and are cut.
    pub fn new(slots: &[u32], leaves: usize) -> IndexLayout {
        assert!(slots.len() <= AREAS_MAX);
        let mut first_cluster = [0; AREAS_MAX + 1];
        for at in 0..AREAS_MAX {
            let clusters = slots.get(at).map_or(0, |slots| slots.div_ceil(LEAF_SLOTS));
            first_cluster[at + 1] = first_cluster[at] + clusters;
        }
        IndexLayout { first_cluster, leaves: leaves.min(first_cluster[AREAS_MAX] as usize) }
    }

    /// Returns the number of clusters of all areas.
    pub const fn clusters(&self) -> usize {
        self.first_cluster[AREAS_MAX] as usize
    }

    const fn leaf_words(&self) -> usize {
        self.leaves * LEAF_SLOTS as usize
    }

    /// Returns the bytes to hand over. Memory that is never touched needn't be there.
    pub const fn bytes(&self) -> usize {
        Region::bytes_for::<u64>(self.clusters())
            + Region::bytes_for::<u64>(self.leaves)
            + Region::bytes_for::<u32>(self.leaves)
            + Region::bytes_for::<u64>(self.leaf_words())
    }
}

/// The memory in which an index lies, all zero at first.
pub struct IndexMemory<'m> {
    /// The lease of each cluster.
    directory: &'m [AtomicU64],
    /// The tally of each leaf.
    tallies: &'m [AtomicU64],
    /// The cluster of each leaf.
    clusters: &'m mut [u32],
    /// The entries, leaf after leaf.
    words: &'m [AtomicU64],
}

#[cfg(not(all(test, loom)))]
impl<'m> IndexMemory<'m> {
    /// Carves the tables out of a region of at least [`IndexLayout::bytes`].
    pub fn carve(region: &mut Region<'m>, layout: &IndexLayout) -> IndexMemory<'m> {
        IndexMemory {
            directory: region.carve(layout.clusters()),
            tallies: region.carve(layout.leaves),
            clusters: region.carve(layout.leaves),
            words: region.carve(layout.leaf_words()),
        }
    }
}

/// The assignment of leaves to clusters.
struct Supply<'m> {
    /// Leaves from this number on were never used.
    fresh: usize,
    /// Where the search for an empty leaf goes on.
    hand: usize,
    generation: u32,
    clusters: &'m mut [u32],
}

/// The index. Shared by all threads.
pub struct Index<'m> {
    layout: IndexLayout,
    /// [`Lease`]s. A lease publishes that the leaf is the cluster's and has no old entries.
    directory: &'m [AtomicU64],
    /// [`Tally`]s. A tally that is lowered to 0 publishes that the leaf's words are erased.
    tallies: &'m [AtomicU64],
    /// [`Word`]s. A word publishes the object that was stored.
    words: &'m [AtomicU64],
    // Rank 6, like the pool's lock: neither is taken while the other is held. Protects the assignment of
    // leaves: only the holder may change leases. Held for one search among the tallies at most.
    supply: Lock<Supply<'m>, { rank::INDEX }>,
    /// 1 if a leaf became empty since the last search that found none. Publishes the leaf's tally.
    emptied: AtomicU32,
}

/// Where a key's entry is, or would be.
#[derive(Clone, Copy)]
struct Spot {
    leaf: usize,
    generation: u32,
    word: Word,
}

impl<'m> Index<'m> {
    /// Makes an empty index in `memory`, which was carved for the same layout.
    pub fn new(layout: &IndexLayout, memory: IndexMemory<'m>) -> Index<'m> {
        assert!(memory.directory.len() >= layout.clusters() && memory.tallies.len() >= layout.leaves);
        assert!(memory.words.len() >= layout.leaf_words() && memory.clusters.len() >= layout.leaves);
        Index {
            layout: *layout,
            directory: memory.directory,
            tallies: memory.tallies,
            words: memory.words,
            supply: Lock::new(Supply { fresh: 0, hand: 0, generation: 0, clusters: memory.clusters }),
            emptied: AtomicU32::new(0),
        }
    }

    /// Enters the object that now holds the bytes of `key`, in one descent, whether or not there was another.
    /// Returns the older object, which is no longer in the index and is the caller's to free. On `Full` the
    /// key had no entry and has none.
    pub fn store(&self, key: SlotIndex, handle: ObjectHandle) -> Result<Option<ObjectHandle>, Full> {
        let cluster = self.cluster(key);
        loop {
            let leaf = match self.find(cluster, key) {
                Some(spot) if spot.word.handle().is_some() => {
                    if self.exchange(spot.leaf, key, spot.word, spot.word.with(handle)) {
                        return Ok(spot.word.handle());
                    }
                    continue;
                }
                Some(spot) if self.keep_leaf(spot) => spot.leaf,
                // The leaf was just taken from the cluster. The lock is free when that is done.
                Some(_) => {
                    drop(self.supply.lock());
                    continue;
                }
                None => match self.assign(cluster)? {
                    Some(leaf) => leaf,
                    None => continue,
                },
            };
            return Ok(self.fill(leaf, key, handle));
        }
    }

    /// Returns the entry of `key`. Other threads may free the object from now on, unless the caller keeps
    /// them from it: see [`Index::erase`].
    pub fn load(&self, key: SlotIndex) -> Option<Entry> {
        let spot = self.find(self.cluster(key), key)?;
        let handle = spot.word.handle()?;
        Some(Entry { handle, leaf: spot.leaf as u32, word: spot.word })
    }

    /// Removes the entry of `key` if it is still the one that was loaded, and returns whether it was. If so,
    /// the object is the caller's to free. If not, the object belongs to the thread that replaced or removed
    /// the entry.
    #[must_use]
    pub fn erase(&self, key: SlotIndex, entry: Entry) -> bool {
        let leaf = entry.leaf as usize;
        let was_there = self.exchange(leaf, key, entry.word, entry.word.erased());
        if was_there {
            self.release_leaf(leaf);
        }
        was_there
    }

    /// Removes whatever entry `key` has, and returns its object, which is the caller's to free. Callers do
    /// this, too, when the pool refuses the key's new bytes: the old bytes must not survive.
    pub fn remove(&self, key: SlotIndex) -> Option<ObjectHandle> {
        loop {
            let entry = self.load(key)?;
            if self.erase(key, entry) {
                return Some(entry.handle);
            }
        }
    }

    /// Removes every entry of an area that nobody stores to any more. The objects are the caller's to free.
    pub fn remove_area(&self, area: AreaId, mut removed: impl FnMut(SlotIndex, ObjectHandle)) {
        let (first, end) = self.clusters_of(area);
        for cluster in first..end {
            // Ordering: Acquire as in `find`.
            if self.directory[cluster].load(Ordering::Acquire) == Lease::NONE.0 {
                continue;
            }
            let first_slot = (cluster - first) as u32 * LEAF_SLOTS;
            for offset in first_slot..first_slot + LEAF_SLOTS {
                let key = SlotIndex::new(area, offset);
                if let Some(handle) = self.remove(key) {
                    removed(key, handle);
                }
            }
        }
    }

    /// Returns the number of entries, which is exact while nobody changes any.
    pub fn len(&self) -> usize {
        self.tallies.iter().map(|tally| Tally(tally.load(Ordering::Relaxed)).count() as usize).sum()
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn clusters_of(&self, area: AreaId) -> (usize, usize) {
        let at = area.0 as usize;
        (self.layout.first_cluster[at] as usize, self.layout.first_cluster[at + 1] as usize)
    }

    fn cluster(&self, key: SlotIndex) -> usize {
        let (first, end) = self.clusters_of(key.area());
        let cluster = first + (key.offset() / LEAF_SLOTS) as usize;
        assert!(cluster < end, "a key beyond the end of its area");
        cluster
    }

    fn word(&self, leaf: usize, key: SlotIndex) -> &AtomicU64 {
        &self.words[leaf * LEAF_SLOTS as usize + (key.offset() % LEAF_SLOTS) as usize]
    }

    /// Returns the key's word, which was this key's when it was read; `None` if the cluster has no leaf.
    fn find(&self, cluster: usize, key: SlotIndex) -> Option<Spot> {
        // Ordering: Acquire pairs with the Release in `assign`: the leaf's words are those of this
        // assignment.
        let mut lease = Lease(self.directory[cluster].load(Ordering::Acquire));
        loop {
            let leaf = lease.leaf()?;
            // Ordering: Acquire pairs with the Release in `exchange`. A word stored for another cluster was
            // stored after this cluster had lost its lease, so the next load sees the loss.
            let word = Word(self.word(leaf, key).load(Ordering::Acquire));
            // Ordering: Acquire, for the next round, as above.
            let again = Lease(self.directory[cluster].load(Ordering::Acquire));
            if again == lease {
                return Some(Spot { leaf, generation: lease.generation(), word });
            }
            lease = again;
        }
    }

    /// Puts `after` in the place of `before`. Returns `false` if something different is there.
    fn exchange(&self, leaf: usize, key: SlotIndex, before: Word, after: Word) -> bool {
        // Ordering: Release publishes the object and, through `before`, everything that came earlier at this
        // place. Acquire because the object of `before` is ours now.
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        self.word(leaf, key).compare_exchange(before.0, after.0, order.0, order.1).is_ok()
    }

    /// Makes an entry in a leaf that is kept for this entry. If there was an entry already, releases the leaf
    /// and returns that entry's object.
    fn fill(&self, leaf: usize, key: SlotIndex, handle: ObjectHandle) -> Option<ObjectHandle> {
        loop {
            // Ordering: Relaxed: everything done with the word depends on `exchange`.
            let word = Word(self.word(leaf, key).load(Ordering::Relaxed));
            if self.exchange(leaf, key, word, word.with(handle)) {
                if word.handle().is_some() {
                    self.release_leaf(leaf);
                }
                return word.handle();
            }
        }
    }

    /// Keeps the leaf with its cluster for one more entry. Returns `false` if the cluster has lost the leaf.
    fn keep_leaf(&self, spot: Spot) -> bool {
        let tally = &self.tallies[spot.leaf];
        // Ordering: Relaxed: nothing is needed but an order among the exchanges of this one tally, which
        // Relaxed gives. The lease has published the leaf's words.
        let raised = tally.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |tally| {
            (Tally(tally).generation() == spot.generation).then_some(tally + 1)
        });
        raised.is_ok()
    }

    /// Counts one entry less in the leaf's tally.
    fn release_leaf(&self, leaf: usize) {
        // Ordering: Release pairs with the Acquire in `retire`: the word is erased before the leaf goes.
        let before = Tally(self.tallies[leaf].fetch_sub(1, Ordering::Release));
        debug_assert!(before.count() > 0, "a leaf's tally fell below zero");
        if before.count() == 1 {
            // Ordering: Release pairs with the Acquire in `retire_any`, which then sees the tally.
            self.emptied.store(1, Ordering::Release);
        }
    }

    /// Gives the cluster a leaf, kept for one entry. Returns `None` if another thread has just done so.
    #[cold]
    fn assign(&self, cluster: usize) -> Result<Option<usize>, Full> {
        let mut supply = self.supply.lock();
        // Ordering: Relaxed: leases change under the lock that we hold.
        if self.directory[cluster].load(Ordering::Relaxed) != Lease::NONE.0 {
            return Ok(None);
        }
        let leaf = if supply.fresh < self.layout.leaves {
            supply.fresh += 1;
            supply.fresh - 1
        } else {
            self.retire_any(&mut supply)?
        };
        // 0 is the generation of a leaf without a cluster.
        supply.generation = supply.generation.checked_add(1).unwrap_or(1);
        supply.clusters[leaf] = cluster as u32;
        let generation = supply.generation;
        // Ordering: Relaxed: nobody knows the leaf's new generation before the lease is published.
        self.tallies[leaf].store(Tally::new(generation, 1).0, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `find`.
        self.directory[cluster].store(Lease::new(leaf, generation).0, Ordering::Release);
        Ok(Some(leaf))
    }

    /// Takes an empty leaf from its cluster, and returns the leaf's number.
    fn retire_any(&self, supply: &mut Supply<'_>) -> Result<usize, Full> {
        // Ordering: Acquire pairs with the Release in `release_leaf`.
        if self.emptied.swap(0, Ordering::Acquire) == 0 {
            return Err(Full);
        }
        let leaves = self.layout.leaves;
        let hand = supply.hand;
        let mut candidates = (hand..leaves).chain(0..hand);
        let leaf = candidates.find(|&leaf| self.retire(leaf, supply)).ok_or(Full)?;
        supply.hand = (leaf + 1) % leaves;
        // There may be another empty leaf.
        self.emptied.store(1, Ordering::Relaxed);
        Ok(leaf)
    }

    fn retire(&self, leaf: usize, supply: &Supply<'_>) -> bool {
        let tally = &self.tallies[leaf];
        let seen = Tally(tally.load(Ordering::Relaxed));
        // Ordering: Acquire pairs with the Release in `release_leaf`: the thread that is given the leaf finds
        // it erased.
        let order = (Ordering::Acquire, Ordering::Relaxed);
        if seen.count() > 0 || tally.compare_exchange(seen.0, Tally::FREE.0, order.0, order.1).is_err() {
            return false;
        }
        // Ordering: Relaxed: the Release of the next cluster's lease makes this visible to threads that see
        // the next cluster's words.
        self.directory[supply.clusters[leaf] as usize].store(Lease::NONE.0, Ordering::Relaxed);
        true
    }

    /// Asserts that tallies, leases and entries agree. Nobody may change anything meanwhile.
    pub fn check(&self) {
        let supply = self.supply.lock();
        let mut leased = 0;
        for (cluster, lease) in self.directory.iter().enumerate() {
            let lease = Lease(lease.load(Ordering::Relaxed));
            let Some(leaf) = lease.leaf() else { continue };
            leased += 1;
            let tally = Tally(self.tallies[leaf].load(Ordering::Relaxed));
            let words = &self.words[leaf * LEAF_SLOTS as usize..][..LEAF_SLOTS as usize];
            let has_entry = |word: &&AtomicU64| Word(word.load(Ordering::Relaxed)).handle().is_some();
            let entries = words.iter().filter(has_entry).count();
            assert_eq!(tally.count() as usize, entries, "leaf {leaf}'s tally");
            assert_eq!(tally.generation(), lease.generation(), "leaf {leaf} is leased to cluster {cluster}");
            assert_eq!(supply.clusters[leaf] as usize, cluster, "leaf {leaf}'s cluster");
        }
        assert_eq!(leased, supply.fresh, "leaves: one was lost, or two clusters have the same");
    }
}

//! The swap cache: frames, and the pages in them on their way in or out.
//!
//! A frame is a page-sized buffer of Farpage's. Under UFFDIO_MOVE a frame is a place that a page can be moved
//! to and from. So a frame either has memory behind it ([`Backing::Memory`]) or is a hole. Evicted pages are
//! moved into holes.
//!
//! The kernel may still read or write memory that came with a page of the program's. The memory may be part
//! of a pipe (vmsplice), or of a message on its way (MSG_ZEROCOPY). No other page is ever put into this
//! memory: a frame that has it is emptied before the frame is used again. Pages are loaded into memory of
//! our own, which a few frames keep.
//!
//! Parked pages sit in frames in the order in which they came, uncompressed, for a short second chance.
// UNSAFETY: frames are raw memory shared with the kernel and the program's faults. The thread that took a
// frame may touch it, which the borrow checker can't see.

use crate::memory::{Region, Zeroed};
use crate::sync::{Lock, rank};
use crate::units::{FrameIndex, PAGE_BYTES, PageBytes, PageIndex};

/// Whether a frame has memory behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The frame can be read and written.
    Memory,
    /// Touching the frame would fault. A page can be moved into it.
    Hole,
}

/// Metadata of one frame.
#[derive(Clone, Copy)]
pub struct FrameMeta {
    /// 1 + the page whose bytes the frame holds; 0 for none.
    owner: u64,
    previous: u32,
    next: u32,
}

// SAFETY: integers, for which zeros are valid and which have no drop.
unsafe impl Zeroed for FrameMeta {}

/// End of the list of parked pages. A stored link of 0 means "in no list" (`encode`).
const NONE: u32 = u32::MAX;

/// Memory for the cache's own tables.
pub struct CacheMemory<'m> {
    /// The first frame.
    pub frames: *mut PageBytes,
    /// Metadata of each frame.
    pub meta: &'m mut [FrameMeta],
    /// A bit for each frame: nobody uses it.
    pub free: &'m mut [u64],
    /// A bit for each frame: it has memory.
    pub backed: &'m mut [u64],
    /// A bit for each frame: its memory came with a page of the program's.
    pub moved: &'m mut [u64],
    /// A bit for each frame: its page was read ahead and not touched since.
    pub marked: &'m mut [u64],
}

impl<'m> CacheMemory<'m> {
    /// Returns the bytes of a region that the tables of `count` frames take.
    pub const fn table_bytes(count: usize) -> usize {
        Region::bytes_for::<FrameMeta>(count) + 4 * Region::bytes_for::<u64>(count.div_ceil(64))
    }

    /// Takes the tables out of `region`, for `count` frames from `frames` on.
    pub fn carve(region: &mut Region<'m>, frames: *mut PageBytes, count: usize) -> CacheMemory<'m> {
        let words = count.div_ceil(64);
        CacheMemory {
            frames,
            meta: region.carve(count),
            free: region.carve(words),
            backed: region.carve(words),
            moved: region.carve(words),
            marked: region.carve(words),
        }
    }
}

/// The use of a free frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A page can be moved into the frame.
    Hole,
    /// A page can be loaded into the frame.
    Own,
    /// The frame must be emptied first: its memory came with a page.
    Moved,
}

struct Frames<'m> {
    meta: &'m mut [FrameMeta],
    free: &'m mut [u64],
    backed: &'m mut [u64],
    /// Of the frames with memory, those whose memory came with a page of the program's.
    moved: &'m mut [u64],
    /// Parked frames whose page was read ahead and not touched since.
    marked: &'m mut [u64],
    free_count: u32,
    free_backed: u32,
    free_moved: u32,
    parked_count: u32,
    oldest: u32,
    youngest: u32,
}

/// Frames and parked pages of one engine.
pub struct Cache<'m> {
    base: *mut PageBytes,
    count: u32,
    lock: Lock<Frames<'m>, { rank::CACHE }>,
}

// SAFETY: `base` points to memory that lives as long as the engine. A thread touches a frame's bytes only
// in one of two cases. Either the thread took the frame from the free set under the lock, or it holds the
// lock bit of the page that owns the frame.
unsafe impl Sync for Cache<'_> {}
// SAFETY: as for Sync.
unsafe impl Send for Cache<'_> {}

/// How full the cache is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Frames that nobody uses.
    pub free: u32,
    /// Free frames that still have memory.
    pub free_backed: u32,
    /// Free frames whose memory came with a page that was moved there.
    pub free_moved: u32,
    /// Parked pages.
    pub parked: u32,
}

impl<'m> Cache<'m> {
    /// Makes a cache whose frames are all free. `backing` says what the frames are now.
    ///
    /// # Safety
    /// `memory.frames` must point to as many page-aligned frames as `meta` has elements. The frames must be
    /// exclusively ours for `'m`. Frames needn't be readable while they are holes ([`Backing::Hole`]).
    pub unsafe fn new(memory: CacheMemory<'m>, backing: Backing) -> Cache<'m> {
        let count = memory.meta.len() as u32;
        assert!(memory.free.len() * 64 >= count as usize);
        assert!(memory.backed.len() == memory.free.len() && memory.moved.len() == memory.free.len());
        assert!(memory.marked.len() == memory.free.len());
        for frame in 0..count as usize {
            memory.free[frame / 64] |= 1 << (frame % 64);
            if backing == Backing::Memory {
                memory.backed[frame / 64] |= 1 << (frame % 64);
            }
        }
        Cache {
            base: memory.frames,
            count,
            lock: Lock::new(Frames {
                meta: memory.meta,
                free: memory.free,
                backed: memory.backed,
                moved: memory.moved,
                marked: memory.marked,
                free_count: count,
                free_backed: if backing == Backing::Memory { count } else { 0 },
                free_moved: 0,
                parked_count: 0,
                oldest: NONE,
                youngest: NONE,
            }),
        }
    }

    /// Returns the number of frames.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns a frame's memory.
    pub fn pointer(&self, frame: FrameIndex) -> *mut PageBytes {
        assert!(frame.0 < self.count);
        self.base.wrapping_add(frame.at())
    }

    /// Returns a frame's bytes, to read.
    ///
    /// # Safety
    /// The caller took the frame, or holds the lock bit of the page that the frame belongs to. The frame has
    /// memory, and nobody writes it during `'a`.
    pub unsafe fn bytes<'a>(&self, frame: FrameIndex) -> &'a [u8; PAGE_BYTES] {
        // SAFETY: in bounds by `pointer`'s assertion; readable and unchanging by the caller's promise.
        unsafe { &(*self.pointer(frame)).0 }
    }

    /// Returns a frame's bytes, to fill.
    ///
    /// # Safety
    /// As for [`Cache::bytes`]. No other code reads the frame during `'a`.
    pub unsafe fn bytes_mut<'a>(&self, frame: FrameIndex) -> &'a mut [u8; PAGE_BYTES] {
        // SAFETY: as in `bytes`, exclusive by the caller's promise.
        unsafe { &mut (*self.pointer(frame)).0 }
    }

    /// Takes one free frame to fill, with memory if any has some. Returns `None` although frames are free if
    /// all of those must be emptied first ([`Cache::take_surplus`]).
    pub fn take(&self) -> Option<(FrameIndex, Backing)> {
        let mut frames = self.lock.lock();
        let (wanted, backing) = if frames.free_backed > frames.free_moved {
            (Kind::Own, Backing::Memory)
        } else {
            (Kind::Hole, Backing::Hole)
        };
        let (frame, _) = frames.find_run(1, wanted)?;
        frames.claim(frame, 1);
        Some((FrameIndex(frame), backing))
    }

    /// Takes one free frame that has memory of our own.
    pub fn take_backed(&self) -> Option<FrameIndex> {
        let mut frames = self.lock.lock();
        let (frame, _) = frames.find_run(1, Kind::Own)?;
        frames.claim(frame, 1);
        Some(FrameIndex(frame))
    }

    /// Takes up to `max` neighbouring free frames for pages to be taken into, and leaves `keep` frames free
    /// for faults. Prefers holes. The driver first empties frames that are returned as having memory.
    pub fn take_run(&self, max: u32, keep: u32) -> Option<(FrameIndex, u32, Backing)> {
        let mut frames = self.lock.lock();
        let spare = frames.free_count.checked_sub(keep).filter(|&n| n > 0)?.min(max);
        for kind in [Kind::Hole, Kind::Moved, Kind::Own] {
            if let Some((first, length)) = frames.find_run(spare, kind) {
                frames.claim(first, length);
                let backing = if kind == Kind::Hole { Backing::Hole } else { Backing::Memory };
                return Some((FrameIndex(first), length, backing));
            }
        }
        None
    }

    /// Takes a run of free frames, so that the driver can give their memory back and [`Cache::put`] them as
    /// holes. Prefers frames whose memory came with pages. If there are none, takes frames with memory of our
    /// own, if more than `keep` of them are free.
    pub fn take_surplus(&self, keep: u32) -> Option<(FrameIndex, u32)> {
        let mut frames = self.lock.lock();
        let own = frames.free_backed - frames.free_moved;
        let (kind, surplus) = if frames.free_moved > 0 {
            (Kind::Moved, frames.free_moved)
        } else {
            (Kind::Own, own.checked_sub(keep).filter(|&n| n > 0)?)
        };
        let (first, length) = frames.find_run(surplus.min(64), kind)?;
        frames.claim(first, length);
        Some((FrameIndex(first), length))
    }

    /// Gives a taken frame back.
    pub fn put(&self, frame: FrameIndex, backing: Backing) {
        let mut frames = self.lock.lock();
        let (word, bit) = (frame.at() / 64, 1 << (frame.at() % 64));
        assert!(frames.free[word] & bit == 0, "frame {frame:?} was freed twice");
        frames.meta[frame.at()].owner = 0;
        frames.free[word] |= bit;
        frames.free_count += 1;
        if backing == Backing::Memory {
            frames.backed[word] |= bit;
            frames.free_backed += 1;
            frames.free_moved += u32::from(frames.moved[word] & bit != 0);
        } else {
            frames.backed[word] &= !bit;
            frames.moved[word] &= !bit;
        }
    }

    /// Parks `page`, which was moved into the taken frame `frame`, as the youngest.
    pub fn park_moved(&self, frame: FrameIndex, page: PageIndex) {
        let mut frames = self.lock.lock();
        frames.moved[frame.at() / 64] |= 1 << (frame.at() % 64);
        frames.meta[frame.at()].owner = page.0 + 1;
        frames.push(frame.0);
    }

    /// Parks `page`, whose bytes are in the taken frame `frame`, as the youngest.
    pub fn park(&self, frame: FrameIndex, page: PageIndex) {
        let mut frames = self.lock.lock();
        frames.meta[frame.at()].owner = page.0 + 1;
        frames.push(frame.0);
    }

    /// Marks a parked frame whose page was read ahead.
    pub fn mark(&self, frame: FrameIndex) {
        let mut frames = self.lock.lock();
        frames.marked[frame.at() / 64] |= 1 << (frame.at() % 64);
    }

    /// Returns whether a frame is marked.
    pub fn is_marked(&self, frame: FrameIndex) -> bool {
        self.lock.lock().marked[frame.at() / 64] & 1 << (frame.at() % 64) != 0
    }

    /// Takes a frame's mark away. Returns whether the frame had one.
    pub fn unmark(&self, frame: FrameIndex) -> bool {
        let mut frames = self.lock.lock();
        let (word, bit) = (frame.at() / 64, 1 << (frame.at() % 64));
        let was_marked = frames.marked[word] & bit != 0;
        frames.marked[word] &= !bit;
        was_marked
    }

    /// Takes the parked frame out of the queue. The frame stays taken.
    pub fn unpark(&self, frame: FrameIndex) {
        let mut frames = self.lock.lock();
        frames.unlink(frame.0);
        frames.marked[frame.at() / 64] &= !(1 << (frame.at() % 64));
    }

    /// Returns the page that has been parked longest, and its frame.
    pub fn oldest(&self) -> Option<(FrameIndex, PageIndex)> {
        let frames = self.lock.lock();
        let meta = frames.meta.get(frames.oldest as usize)?;
        Some((FrameIndex(frames.oldest), PageIndex(meta.owner - 1)))
    }

    /// Makes a parked frame the youngest, if it is still parked.
    pub fn rotate(&self, frame: FrameIndex) {
        let mut frames = self.lock.lock();
        let is_only = frames.oldest == frames.youngest;
        let parked = frames.oldest == frame.0 || frames.meta[frame.at()].previous != 0;
        if parked && !is_only {
            frames.unlink(frame.0);
            frames.push(frame.0);
        }
    }

    /// Returns the page whose bytes the frame holds.
    pub fn owner(&self, frame: FrameIndex) -> Option<PageIndex> {
        self.lock.lock().meta[frame.at()].owner.checked_sub(1).map(PageIndex)
    }

    /// Says whose bytes a taken frame holds; `None` when its page no longer needs the frame.
    pub fn set_owner(&self, frame: FrameIndex, page: Option<PageIndex>) {
        self.lock.lock().meta[frame.at()].owner = page.map_or(0, |page| page.0 + 1);
    }

    /// Returns how full the cache is.
    pub fn usage(&self) -> CacheUsage {
        let frames = self.lock.lock();
        CacheUsage {
            free: frames.free_count,
            free_backed: frames.free_backed,
            free_moved: frames.free_moved,
            parked: frames.parked_count,
        }
    }

    /// Asserts that counts, bits and the queue agree; calls `parked` for each parked page, oldest first.
    pub fn check(&self, mut parked: impl FnMut(FrameIndex, PageIndex)) {
        let frames = self.lock.lock();
        let ones = |bits: &[u64]| bits.iter().map(|word| word.count_ones()).sum::<u32>();
        assert_eq!(ones(frames.free), frames.free_count, "free frames");
        let words = || frames.free.iter().zip(frames.backed.iter()).zip(frames.moved.iter());
        let backed: u32 = words().map(|((free, backed), _)| (free & backed).count_ones()).sum();
        assert_eq!(backed, frames.free_backed, "free frames with memory");
        let moved: u32 = words().map(|((free, backed), moved)| (free & backed & moved).count_ones()).sum();
        assert_eq!(moved, frames.free_moved, "free frames whose memory came with a page");
        let marked = ones(frames.marked);
        let mut marked_parked = 0;
        let (mut at, mut before, mut count) = (frames.oldest, NONE, 0);
        while at != NONE {
            let meta = frames.meta[at as usize];
            assert!(frames.free[at as usize / 64] & 1 << (at % 64) == 0, "a parked frame is free");
            assert_eq!(meta.previous, encode(before), "parked queue is broken");
            marked_parked += frames.marked[at as usize / 64] >> (at % 64) & 1;
            parked(FrameIndex(at), PageIndex(meta.owner - 1));
            (before, at, count) = (at, decode(meta.next), count + 1);
        }
        assert_eq!((count, before), (frames.parked_count, frames.youngest), "parked pages");
        assert_eq!(u64::from(marked), marked_parked, "a frame is marked that isn't parked");
    }
}

/// Encodes a link: plus two, so that zeroed metadata means "in no list" and 1 means "end of the list".
const fn encode(link: u32) -> u32 {
    link.wrapping_add(2)
}
const fn decode(stored: u32) -> u32 {
    stored.wrapping_sub(2)
}

impl Frames<'_> {
    /// Returns the first run of `max` free frames of this kind, or the longest run if all are shorter. Runs
    /// don't cross words of 64 frames: where one run ends, the next word's may go on.
    fn find_run(&self, max: u32, kind: Kind) -> Option<(u32, u32)> {
        let mut best = None;
        let mut best_length = 0;
        for word in 0..self.free.len() {
            let (free, backed, moved) = (self.free[word], self.backed[word], self.moved[word]);
            let mut bits = match kind {
                Kind::Hole => free & !backed,
                Kind::Own => free & backed & !moved,
                Kind::Moved => free & backed & moved,
            };
            let mut at = 0;
            while bits != 0 {
                let skip = bits.trailing_zeros();
                bits >>= skip;
                at += skip;
                let length = bits.trailing_ones();
                if length > best_length {
                    best = Some(word as u32 * 64 + at);
                    best_length = length;
                    if length >= max {
                        return best.map(|first| (first, max));
                    }
                }
                if length == 64 {
                    break;
                }
                bits >>= length;
                at += length;
            }
        }
        best.map(|first| (first, best_length))
    }

    fn claim(&mut self, first: u32, length: u32) {
        for frame in first..first + length {
            let (word, bit) = (frame as usize / 64, 1 << (frame % 64));
            debug_assert!(self.free[word] & bit != 0);
            self.free[word] &= !bit;
            let is_backed = self.backed[word] & bit != 0;
            self.free_backed -= u32::from(is_backed);
            self.free_moved -= u32::from(is_backed && self.moved[word] & bit != 0);
        }
        self.free_count -= length;
    }

    fn push(&mut self, frame: u32) {
        self.meta[frame as usize].previous = encode(self.youngest);
        self.meta[frame as usize].next = encode(NONE);
        match self.youngest {
            NONE => self.oldest = frame,
            youngest => self.meta[youngest as usize].next = encode(frame),
        }
        self.youngest = frame;
        self.parked_count += 1;
    }

    fn unlink(&mut self, frame: u32) {
        let FrameMeta { previous, next, .. } = self.meta[frame as usize];
        assert!(next != 0, "frame {frame} isn't parked");
        match decode(previous) {
            NONE => self.oldest = decode(next),
            previous => self.meta[previous as usize].next = next,
        }
        match decode(next) {
            NONE => self.youngest = decode(previous),
            next => self.meta[next as usize].previous = previous,
        }
        self.meta[frame as usize].previous = 0;
        self.meta[frame as usize].next = 0;
        self.parked_count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    fn cache(count: usize) -> Cache<'static> {
        // The region has not a byte more than `table_bytes` says, at the worst address.
        let bytes = CacheMemory::table_bytes(count);
        let place = vec![0_u64; bytes / 8 + 2].leak().as_mut_ptr().cast::<u8>();
        // SAFETY: from the second byte on, the vector has `bytes` bytes, which are zeroed and writable. The
        // memory is leaked, and no other code uses it.
        let mut region = unsafe { Region::new(place.add(1), bytes) };
        let frames = core::ptr::NonNull::<PageBytes>::dangling().as_ptr();
        let memory = CacheMemory::carve(&mut region, frames, count);
        // SAFETY: these tests never touch a frame's bytes.
        unsafe { Cache::new(memory, Backing::Hole) }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Take,
        TakeRun(u32, u32),
        Surplus(u32),
        Put(usize, bool),
        Park(usize),
        ParkMoved(usize),
        Unpark(usize),
        Rotate(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            Just(Op::Take),
            (1_u32..9, 0_u32..4).prop_map(|(n, keep)| Op::TakeRun(n, keep)),
            (0_u32..4).prop_map(Op::Surplus),
            (any::<usize>(), any::<bool>()).prop_map(|(i, b)| Op::Put(i, b)),
            any::<usize>().prop_map(Op::Park),
            any::<usize>().prop_map(Op::ParkMoved),
            any::<usize>().prop_map(Op::Unpark),
            any::<usize>().prop_map(Op::Rotate),
        ]
    }

    proptest! {
        /// The model: which frames are taken, which have memory that came with a page, and a queue of the
        /// parked frames.
        #[test]
        fn cache_says_what_the_model_says(ops in prop::collection::vec(op(), 1..120)) {
            let cache = cache(70);
            let mut taken: BTreeMap<u32, ()> = BTreeMap::new();
            let mut moved: BTreeSet<u32> = BTreeSet::new();
            let mut parked: VecDeque<u32> = VecDeque::new();
            for op in ops {
                let nth = |taken: &BTreeMap<u32, ()>, i: usize| taken.keys().nth(i % taken.len().max(1)).copied();
                match op {
                    Op::Take => if let Some((frame, _)) = cache.take() {
                        prop_assert!(taken.insert(frame.0, ()).is_none() && !parked.contains(&frame.0));
                        prop_assert!(!moved.contains(&frame.0), "to be loaded into a page of the program's");
                    } else {
                        let free: Vec<u32> = (0..70).filter(|f| !taken.contains_key(f) && !parked.contains(f)).collect();
                        prop_assert!(free.iter().all(|frame| moved.contains(frame)));
                    },
                    Op::TakeRun(n, keep) => if let Some((first, length, _)) = cache.take_run(n, keep) {
                        prop_assert!(length >= 1 && length <= n);
                        for frame in first.0..first.0 + length { prop_assert!(taken.insert(frame, ()).is_none()); }
                        prop_assert!(70 - taken.len() - parked.len() >= keep as usize);
                    },
                    Op::Surplus(keep) => if let Some((first, length)) = cache.take_surplus(keep) {
                        for frame in first.0..first.0 + length {
                            cache.put(FrameIndex(frame), Backing::Hole);
                            moved.remove(&frame);
                        }
                    } else { prop_assert!(cache.usage().free_backed <= keep); },
                    Op::Put(i, backed) => if let Some(frame) = nth(&taken, i) {
                        taken.remove(&frame);
                        if !backed { moved.remove(&frame); }
                        cache.put(FrameIndex(frame), if backed { Backing::Memory } else { Backing::Hole });
                    },
                    Op::Park(i) => if let Some(frame) = nth(&taken, i) {
                        taken.remove(&frame);
                        cache.park(FrameIndex(frame), PageIndex(u64::from(frame) + 1000));
                        parked.push_back(frame);
                    },
                    Op::ParkMoved(i) => if let Some(frame) = nth(&taken, i) {
                        taken.remove(&frame);
                        cache.park_moved(FrameIndex(frame), PageIndex(u64::from(frame) + 1000));
                        parked.push_back(frame);
                        moved.insert(frame);
                    },
                    Op::Unpark(i) => if !parked.is_empty() {
                        let frame = parked.remove(i % parked.len()).unwrap();
                        cache.unpark(FrameIndex(frame));
                        taken.insert(frame, ());
                    },
                    Op::Rotate(i) => if !parked.is_empty() {
                        let frame = parked.remove(i % parked.len()).unwrap();
                        cache.rotate(FrameIndex(frame));
                        parked.push_back(frame);
                    },
                }
                let mut queue = VecDeque::new();
                cache.check(|frame, page| { assert_eq!(page.0, u64::from(frame.0) + 1000); queue.push_back(frame.0); });
                prop_assert_eq!(&queue, &parked);
                prop_assert_eq!(cache.oldest().map(|(frame, _)| frame.0), parked.front().copied());
                prop_assert_eq!(cache.usage().free as usize, 70 - taken.len() - parked.len());
            }
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn frame_freed_twice_is_a_bug() {
        let cache = cache(2);
        let (frame, backing) = cache.take().unwrap();
        cache.put(frame, backing);
        cache.put(frame, backing);
    }
}

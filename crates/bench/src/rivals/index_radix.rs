//! zswap's index in Linux 6.10: a radix tree for each 64 MiB of an area. Reads take no lock, and writes take
//! a lock of the tree.
//!
//! A tree has nodes of 64 words and three levels for 16,384 slots, like an xarray. Nodes are never freed,
//! which spares the rival the kernel's work of delaying a free until no reader is left.

use crate::index::Contestant;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

const SLOTS_PER_TREE: u32 = 16_384;
const FAN_OUT: usize = 64;

/// The lowest level. A handle of 0 means none. Each entry has 8 bytes, because the kernel's entries are
/// pointers.
struct Leaf([(AtomicU32, u32); FAN_OUT]);
type Middle = [OnceLock<Box<Leaf>>; FAN_OUT];

struct Tree {
    /// Held during each change of the tree.
    writers: Mutex<()>,
    root: [OnceLock<Box<Middle>>; 4],
}

/// The index: a radix tree for each 64 MiB.
pub struct Radix(Vec<Tree>);

impl Radix {
    /// Makes an index for keys below `keys`.
    pub fn new(keys: u32) -> Radix {
        let tree = || Tree { writers: Mutex::new(()), root: [const { OnceLock::new() }; 4] };
        Radix((0..keys.div_ceil(SLOTS_PER_TREE)).map(|_| tree()).collect())
    }

    fn tree(&self, key: u32) -> &Tree {
        &self.0[(key / SLOTS_PER_TREE) as usize]
    }
}

const fn steps(key: u32) -> (usize, usize, usize) {
    let at = (key % SLOTS_PER_TREE) as usize;
    (at >> 12, at >> 6 & 63, at & 63)
}

impl Tree {
    fn find(&self, key: u32) -> Option<&AtomicU32> {
        let (root, middle, leaf) = steps(key);
        Some(&self.root[root].get()?[middle].get()?.0[leaf].0)
    }

    fn find_or_make(&self, key: u32) -> &AtomicU32 {
        let (root, middle, leaf) = steps(key);
        let middles = self.root[root].get_or_init(|| Box::new([const { OnceLock::new() }; FAN_OUT]));
        let new_leaf = || Box::new(Leaf(core::array::from_fn(|_| (AtomicU32::new(0), 0))));
        &middles[middle].get_or_init(new_leaf).0[leaf].0
    }
}

/// Changes a word. The writer has the tree's lock, so reading and writing the word needn't be one
/// instruction.
fn change(word: &AtomicU32, to: u32) -> Option<u32> {
    let old = word.load(Ordering::Relaxed);
    // Ordering: Release pairs with the Acquire in `load`.
    word.store(to, Ordering::Release);
    (old != 0).then_some(old)
}

impl Contestant for Radix {
    fn store(&self, key: u32, handle: u32) -> Option<u32> {
        let tree = self.tree(key);
        let _held = tree.writers.lock().expect("no thread panics");
        change(tree.find_or_make(key), handle)
    }

    fn load(&self, key: u32) -> Option<u32> {
        // Ordering: Acquire pairs with the Release in `change`.
        let handle = self.tree(key).find(key)?.load(Ordering::Acquire);
        (handle != 0).then_some(handle)
    }

    fn remove(&self, key: u32) -> Option<u32> {
        let tree = self.tree(key);
        let _held = tree.writers.lock().expect("no thread panics");
        change(tree.find(key)?, 0)
    }
}

//! zswap's first index and the one proposed for it: a red-black tree and a B-tree, each under one lock.
//!
//! The lock is the standard library's, which spins a little and then sleeps. The kernel's lock only spins. In
//! user space a lock that only spins stands still for a whole time slice when its holder is preempted. User
//! space can't forbid preemption.

use crate::index::Contestant;
use intrusive_collections::rbtree::Entry;
use intrusive_collections::{KeyAdapter, RBTree, RBTreeLink, intrusive_adapter};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// A node like zswap's entry, with the links in the node, a key and a handle. A node is allocated before the
/// lock is taken and freed after the lock is released, as in the kernel.
struct Node {
    link: RBTreeLink,
    key: u32,
    handle: u32,
}

intrusive_adapter!(ByKey = Box<Node>: Node { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for ByKey {
    type Key = u32;
    fn get_key(&self, node: &'a Node) -> u32 {
        node.key
    }
}

/// A red-black tree under one lock.
pub struct RedBlack(Mutex<RBTree<ByKey>>);

impl Default for RedBlack {
    fn default() -> Self {
        RedBlack(Mutex::new(RBTree::new(ByKey::new())))
    }
}

impl Contestant for RedBlack {
    fn store(&self, key: u32, handle: u32) -> Option<u32> {
        let node = Box::new(Node { link: RBTreeLink::new(), key, handle });
        let mut tree = self.0.lock().expect("no thread panics");
        let old = match tree.entry(&key) {
            Entry::Vacant(place) => {
                place.insert(node);
                None
            }
            // The new node replaces the old one in its place, without a second descent or a rotation.
            Entry::Occupied(mut place) => place.replace_with(node).ok(),
        };
        drop(tree);
        old.map(|old| old.handle)
    }

    fn load(&self, key: u32) -> Option<u32> {
        self.0.lock().expect("no thread panics").find(&key).get().map(|node| node.handle)
    }

    fn remove(&self, key: u32) -> Option<u32> {
        let mut tree = self.0.lock().expect("no thread panics");
        let old = tree.find_mut(&key).remove();
        drop(tree);
        old.map(|old| old.handle)
    }
}

/// A B-tree under one lock. The tree is the standard library's, with up to 11 pairs in a node (the kernel's
/// has 8).
#[derive(Default)]
pub struct BTree(Mutex<BTreeMap<u32, u32>>);

impl Contestant for BTree {
    fn store(&self, key: u32, handle: u32) -> Option<u32> {
        self.0.lock().expect("no thread panics").insert(key, handle)
    }

    fn load(&self, key: u32) -> Option<u32> {
        self.0.lock().expect("no thread panics").get(&key).copied()
    }

    fn remove(&self, key: u32) -> Option<u32> {
        self.0.lock().expect("no thread panics").remove(&key)
    }
}

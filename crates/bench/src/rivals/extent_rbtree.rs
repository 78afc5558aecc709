//! Extents in a red-black tree, as Linux has had them since 5.3. The tree is the one of
//! `intrusive-collections`. The tree's nodes lie in one piece in the order of their slots. No thread locks
//! the tree, because it doesn't change.

use farpage_core::areas::extents::Extent;
use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeAtomicLink, intrusive_adapter};

/// A node with the fields of the kernel's: a link of three words, the first slot, the number of slots, and
/// the first block.
pub struct Node {
    link: RBTreeAtomicLink,
    slot: u32,
    count: u32,
    block: u64,
}

intrusive_adapter!(BySlot<'a> = &'a Node: Node { link => RBTreeAtomicLink });

impl<'n> KeyAdapter<'n> for BySlot<'_> {
    type Key = u32;
    fn get_key(&self, node: &'n Node) -> u32 {
        node.slot
    }
}

/// Makes the nodes for [`Tree::new`].
pub fn nodes(extents: &[Extent]) -> Box<[Node]> {
    let node = |extent: &Extent| Node {
        link: RBTreeAtomicLink::new(),
        slot: extent.slot,
        count: extent.count,
        block: extent.block,
    };
    extents.iter().map(node).collect()
}

/// The tree.
pub struct Tree<'a> {
    tree: RBTree<BySlot<'a>>,
}

impl<'a> Tree<'a> {
    /// Makes a tree of nodes that are in no other tree.
    pub fn new(nodes: &'a [Node]) -> Tree<'a> {
        let mut tree = RBTree::new(BySlot::new());
        for node in nodes {
            // Each node is added behind the last one, as swapon does.
            tree.back_mut().insert_after(node);
        }
        Tree { tree }
    }

    /// Returns the block of a slot.
    pub fn block(&self, slot: u32) -> u64 {
        let node = self.tree.upper_bound(Bound::Included(&slot)).get().expect("the first extent has slot 0");
        debug_assert!(slot - node.slot < node.count);
        node.block + u64::from(slot - node.slot)
    }
}

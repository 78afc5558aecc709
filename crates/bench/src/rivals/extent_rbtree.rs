//! Extents in a red-black tree: what Linux has had since 5.3. The tree is `intrusive-collections`'; its nodes lie in
//! one piece in the order of their slots, and nobody locks it, since it doesn't change.

use farpage_core::areas::extents::Extent;
use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeAtomicLink, intrusive_adapter};

/// A node: as the kernel's, a link of three words, the first slot, their number and the first block.
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

/// Nodes for [`Tree::new`].
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
    /// Of nodes that are in no other tree.
    pub fn new(nodes: &'a [Node]) -> Tree<'a> {
        let mut tree = RBTree::new(BySlot::new());
        for node in nodes {
            // Each comes behind the last, as swapon adds them.
            tree.back_mut().insert_after(node);
        }
        Tree { tree }
    }

    /// The block of a slot.
    pub fn block(&self, slot: u32) -> u64 {
        let node = self.tree.upper_bound(Bound::Included(&slot)).get().expect("the first extent has slot 0");
        debug_assert!(slot - node.slot < node.count);
        node.block + u64::from(slot - node.slot)
    }
}

//! The lists of an area's clusters, one for each degree of fullness. Each list is first in, first out. So a
//! cluster whose free slots were just taken has time to get some back before it is looked at again.

use crate::memory::Zeroed;

/// The list that a cluster is in, or its place between lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum List {
    /// Another process holds the cluster, or no process does.
    Unleased = 0,
    /// In no list: a CPU has taken all of the cluster's free slots.
    InHand = 1,
    /// In no list: the cluster's empty slots are being discarded.
    Discarding = 2,
    /// No slot is in use.
    Free = 3,
    /// At least half of the slots are free, so runs are long.
    Nonfull = 4,
    /// Less than half of the slots are free: the cluster has holes.
    Fragmented = 5,
    /// No slot is free.
    Full = 6,
    /// No slot is in use, and the device has not been told yet.
    Discard = 7,
}

/// Values of [`List`] that are lists.
const LISTS: usize = 5;

impl List {
    /// Whether this value is a list, and not a place between lists.
    pub const fn is_list(self) -> bool {
        self.at().is_some()
    }
    const fn at(self) -> Option<usize> {
        (self as usize).checked_sub(List::Free as usize)
    }
}

/// A cluster's neighbours in its list, each as its number plus one. 0 stands at the ends.
#[repr(C)]
pub struct Link {
    previous: u32,
    next: u32,
}

// SAFETY: integers, for which zero is valid and which have no drop.
unsafe impl Zeroed for Link {}

/// All lists of an area. A cluster is in one list at most, and remembers which.
pub struct Lists<'m> {
    links: &'m mut [Link],
    heads: [u32; LISTS],
    tails: [u32; LISTS],
    lengths: [u32; LISTS],
    /// Clusters that this process has leased, listed or not.
    pub leased: u32,
}

impl<'m> Lists<'m> {
    /// Creates empty lists.
    pub const fn new(links: &'m mut [Link]) -> Lists<'m> {
        Lists { links, heads: [0; LISTS], tails: [0; LISTS], lengths: [0; LISTS], leased: 0 }
    }

    /// Clusters in a list.
    pub fn length(&self, list: List) -> u32 {
        list.at().map_or(0, |at| self.lengths[at])
    }

    /// The cluster that has been in a list longest.
    pub fn first(&self, list: List) -> Option<u32> {
        self.heads[list.at()?].checked_sub(1)
    }

    /// Moves a cluster from one list, or a place between lists, to another.
    pub fn move_to(&mut self, cluster: u32, from: List, to: List) {
        if let Some(list) = from.at() {
            self.unlink(cluster, list);
        }
        if let Some(list) = to.at() {
            self.append(cluster, list);
        }
    }

    fn append(&mut self, cluster: u32, list: usize) {
        let last = self.tails[list];
        self.links[cluster as usize] = Link { previous: last, next: 0 };
        match last {
            0 => self.heads[list] = cluster + 1,
            last => self.links[last as usize - 1].next = cluster + 1,
        }
        self.tails[list] = cluster + 1;
        self.lengths[list] += 1;
    }

    fn unlink(&mut self, cluster: u32, list: usize) {
        let Link { previous, next } = self.links[cluster as usize];
        match previous {
            0 => self.heads[list] = next,
            previous => self.links[previous as usize - 1].next = next,
        }
        match next {
            0 => self.tails[list] = previous,
            next => self.links[next as usize - 1].previous = previous,
        }
        self.lengths[list] -= 1;
    }

    /// Calls `visit` for each cluster of a list, and asserts that both directions and the length agree.
    pub fn check(&self, list: List, mut visit: impl FnMut(u32)) {
        let Some(at) = list.at() else { return };
        let (mut previous, mut next, mut count) = (0, self.heads[at], 0);
        while next != 0 {
            let link = &self.links[next as usize - 1];
            assert_eq!(link.previous, previous, "links of cluster {}", next - 1);
            visit(next - 1);
            (previous, next, count) = (next, link.next, count + 1);
        }
        assert_eq!((self.tails[at], self.lengths[at]), (previous, count), "end and length of {list:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const ALL: [List; 8] = [
        List::Unleased,
        List::InHand,
        List::Discarding,
        List::Free,
        List::Nonfull,
        List::Fragmented,
        List::Full,
        List::Discard,
    ];

    proptest! {
        /// The model is a queue for each list.
        #[test]
        fn lists_are_queues(moves in prop::collection::vec((0_u32..6, 0_usize..8), 1..80)) {
            let links: Vec<Link> = (0..6).map(|_| Link { previous: 0, next: 0 }).collect();
            let mut lists = Lists::new(links.leak());
            let mut queues: [VecDeque<u32>; 8] = Default::default();
            let mut places = [0_usize; 6];
            for (cluster, to) in moves {
                let from = core::mem::replace(&mut places[cluster as usize], to);
                lists.move_to(cluster, ALL[from], ALL[to]);
                queues[from].retain(|other| *other != cluster);
                queues[to].push_back(cluster);
                for (list, queue) in ALL.iter().zip(&queues).skip(3) {
                    let mut found = VecDeque::new();
                    lists.check(*list, |cluster| found.push_back(cluster));
                    prop_assert_eq!(&found, queue);
                    prop_assert_eq!(lists.first(*list), queue.front().copied());
                    prop_assert_eq!(lists.length(*list) as usize, queue.len());
                }
            }
        }
    }
}

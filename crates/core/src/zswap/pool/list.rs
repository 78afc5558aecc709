//! Doubly linked lists through the elements of a slice.
//!
//! Objects and blocks live in slices handed over by the driver. A list of them is made of element numbers
//! inside the elements. So lists allocate nothing, and inserting and removing touch only the neighbours.
//! Number 0 means "none", because element 0 is never used. So all-zero memory is an empty list.
#![forbid(unsafe_code)]

use core::marker::PhantomData;

/// An element's place in one list.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Links {
    pub prev: u32,
    pub next: u32,
}

impl Links {
    pub const NONE: Links = Links { prev: 0, next: 0 };
}

/// An element that can be in lists of one `Kind`, one at a time.
pub(super) trait Linked<Kind> {
    fn links(&self) -> Links;
    fn links_mut(&mut self) -> &mut Links;
}

/// The ends and the length of a list. `Kind` says which links of the elements the list runs through.
#[repr(C)]
pub(super) struct List<Kind> {
    pub first: u32,
    pub last: u32,
    pub count: u32,
    kind: PhantomData<Kind>,
}

impl<Kind> List<Kind> {
    pub const EMPTY: Self = List { first: 0, last: 0, count: 0, kind: PhantomData };

    pub fn push_first<T: Linked<Kind>>(&mut self, elements: &mut [T], new: u32) {
        let old = self.first;
        *elements[new as usize].links_mut() = Links { prev: 0, next: old };
        match old {
            0 => self.last = new,
            _ => elements[old as usize].links_mut().prev = new,
        }
        self.first = new;
        self.count += 1;
    }

    pub fn push_last<T: Linked<Kind>>(&mut self, elements: &mut [T], new: u32) {
        let old = self.last;
        *elements[new as usize].links_mut() = Links { prev: old, next: 0 };
        match old {
            0 => self.first = new,
            _ => elements[old as usize].links_mut().next = new,
        }
        self.last = new;
        self.count += 1;
    }

    pub fn remove<T: Linked<Kind>>(&mut self, elements: &mut [T], gone: u32) {
        let Links { prev, next } = core::mem::take(elements[gone as usize].links_mut());
        match prev {
            0 => self.first = next,
            _ => elements[prev as usize].links_mut().next = next,
        }
        match next {
            0 => self.last = prev,
            _ => elements[next as usize].links_mut().prev = prev,
        }
        self.count -= 1;
    }

    pub fn pop_first<T: Linked<Kind>>(&mut self, elements: &mut [T]) -> Option<u32> {
        let first = self.first;
        (first != 0).then(|| self.remove(elements, first)).map(|()| first)
    }

    pub fn pop_last<T: Linked<Kind>>(&mut self, elements: &mut [T]) -> Option<u32> {
        let last = self.last;
        (last != 0).then(|| self.remove(elements, last)).map(|()| last)
    }

    /// Returns the elements from first to last.
    pub fn iter<T: Linked<Kind>>(&self, elements: &[T]) -> impl Iterator<Item = u32> {
        let some = |number: u32| (number != 0).then_some(number);
        core::iter::successors(some(self.first), move |&at| some(elements[at as usize].links().next))
    }

    /// Visits the elements from first to last and asserts that the links agree in both directions. A walk of
    /// `count` steps that ends at `last` shows that no element comes twice.
    pub fn check<T: Linked<Kind>>(&self, elements: &[T], mut visit: impl FnMut(u32)) {
        let (mut before, mut at) = (0, self.first);
        for _ in 0..self.count {
            assert!(at != 0, "list ends early");
            assert!(elements[at as usize].links().prev == before, "list is torn at {at}");
            visit(at);
            (before, at) = (at, elements[at as usize].links().next);
        }
        assert!(at == 0 && self.last == before, "list goes on beyond its count");
    }
}

//! Tables of fixed size for requests in flight: a first-in-first-out queue of finished requests, and a table
//! with numbered places.

use crate::{Busy, Completion, DEPTH};

/// Finished requests that wait to be collected, oldest first.
pub(crate) struct Finished {
    ring: [Completion; DEPTH],
    first: usize,
    count: usize,
}

impl Finished {
    pub(crate) const fn new() -> Finished {
        Finished { ring: [Completion::EMPTY; DEPTH], first: 0, count: 0 }
    }

    pub(crate) const fn is_full(&self) -> bool {
        self.count == DEPTH
    }

    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Adds a completion. The caller must have checked that the queue isn't full.
    pub(crate) fn push(&mut self, completion: Completion) {
        assert!(!self.is_full());
        self.ring[(self.first + self.count) % DEPTH] = completion;
        self.count += 1;
    }

    /// Moves the oldest completions into `out`, as many as fit, and returns their number.
    pub(crate) fn pop_into(&mut self, out: &mut [Completion]) -> usize {
        let moved = out.len().min(self.count);
        for place in &mut out[..moved] {
            *place = self.ring[self.first];
            self.first = (self.first + 1) % DEPTH;
        }
        self.count -= moved;
        moved
    }
}

/// The set of taken places among the `DEPTH` places of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceSet(u64);

// One bit per place.
const _: () = assert!(DEPTH == u64::BITS as usize);

impl PlaceSet {
    pub(crate) const NONE: PlaceSet = PlaceSet(0);

    pub(crate) const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) const fn contains(self, place: usize) -> bool {
        self.0 & (1 << place) != 0
    }

    pub(crate) fn insert(&mut self, place: usize) {
        assert!(!self.contains(place));
        self.0 |= 1 << place;
    }

    pub(crate) fn remove(&mut self, place: usize) {
        assert!(self.contains(place), "place {place} isn't taken");
        self.0 &= !(1 << place);
    }

    /// Returns the lowest place below `end` that isn't in the set.
    pub(crate) fn vacant_below(self, end: usize) -> Result<usize, Busy> {
        let place = (!self.0).trailing_zeros() as usize;
        if place < end { Ok(place) } else { Err(Busy) }
    }

    pub(crate) const fn first(self) -> Option<usize> {
        if self.0 == 0 { None } else { Some(self.0.trailing_zeros() as usize) }
    }

    /// Yields the places in the set, in order.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        (0..DEPTH).filter(move |&place| self.contains(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_come_out_in_the_order_they_went_in_across_the_wrap() {
        let mut finished = Finished::new();
        let mut out = [Completion::EMPTY; 7];
        let (mut pushed, mut popped) = (0, 0);
        for _ in 0..100 {
            while !finished.is_full() {
                finished.push(Completion { token: pushed, result: Ok(()) });
                pushed += 1;
            }
            let count = finished.pop_into(&mut out);
            for completion in &out[..count] {
                assert_eq!(completion.token, popped);
                popped += 1;
            }
        }
        assert_eq!(finished.len() as u64, pushed - popped);
    }

    #[test]
    fn full_places_are_busy() {
        let mut places = PlaceSet::NONE;
        for place in 0..DEPTH {
            assert_eq!(places.vacant_below(DEPTH), Ok(place));
            places.insert(place);
        }
        assert_eq!(places.vacant_below(DEPTH), Err(Busy));
        places.remove(DEPTH - 1);
        assert_eq!(places.vacant_below(DEPTH - 1), Err(Busy));
        assert_eq!(places.vacant_below(DEPTH), Ok(DEPTH - 1));
    }
}

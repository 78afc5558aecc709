//! The formula for a window's size, shared by Linux's two policies. Pages that were read ahead and then used
//! make the next window larger. A window halves at most.

/// Returns the pages of the next window, the fault's own page included. 1 means no readahead.
///
/// `hits` is the number of pages read ahead since the last window that were used. `distance` is how far the
/// fault is from the one before, in pages or slots. `window_before` is the last result of this function.
pub const fn pages(hits: u32, distance: u64, pages_max: u32, window_before: u32) -> u32 {
    let wanted = if hits > 0 {
        let wanted = hits + 2;
        if wanted < 4 { 4 } else { wanted.next_power_of_two() }
    } else if distance == 1 {
        2
    } else {
        1
    };
    let capped = if wanted < pages_max { wanted } else { pages_max };
    // The floor comes after the cap, as in Linux.
    if capped < window_before / 2 { window_before / 2 } else { capped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_open_the_window_in_powers_of_two() {
        for (hits, expected) in [(1, 4), (2, 4), (3, 8), (6, 8), (7, 16), (14, 16), (15, 32), (30, 32)] {
            assert_eq!(pages(hits, 99, 32, 0), expected, "{hits} hits");
        }
    }

    #[test]
    fn without_hits_only_a_neighbour_comes_along() {
        assert_eq!(pages(0, 1, 8, 0), 2);
        assert_eq!(pages(0, 2, 8, 0), 1);
        assert_eq!(pages(0, 0, 8, 0), 1);
    }

    #[test]
    fn window_shrinks_by_half_at_most_and_is_capped_before_that() {
        assert_eq!(pages(0, 5, 8, 8), 4);
        assert_eq!(pages(0, 5, 8, 4), 2);
        assert_eq!(pages(0, 5, 8, 2), 1);
        assert_eq!(pages(30, 5, 8, 0), 8);
        assert_eq!(pages(30, 5, 8, 32), 16, "the cap was lowered: it takes effect by and by");
    }
}

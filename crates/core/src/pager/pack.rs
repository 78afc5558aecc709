//! Several compressed pages in one slot: a *pack*. Areas are read and written in whole slots. So a page that
//! compresses to a third of a slot costs a third of a transfer if it shares the slot.
//!
//! ```text
//! bytes 0..8   how long the pages' objects are, two bytes each, least significant first; 0: there is none
//! bytes 8..    the objects, one behind the other
//! ```
//!
//! An object is what [`compress`](crate::zswap::codec::compress) made of the page. A pack says neither which
//! page an object is, nor its checksum. The page's entry names slot and part, and the area has the checksum.
//! So the functions here must be total. Any bytes that a device returns are an object or none, and the page
//! that comes out is compared.

use crate::units::{PAGE_BYTES, PARTS_MAX, Part};

const LENGTH_BYTES: usize = 2;
const HEAD_BYTES: usize = PARTS_MAX * LENGTH_BYTES;
/// Bytes that the objects of one pack may take together.
pub const CAPACITY: usize = PAGE_BYTES - HEAD_BYTES;

/// Makes an empty pack of any bytes.
pub fn clear(pack: &mut [u8; PAGE_BYTES]) {
    pack[..HEAD_BYTES].fill(0);
}

/// Appends an object as part `at`, behind the `filled` bytes of the objects that are there.
pub fn append(pack: &mut [u8; PAGE_BYTES], at: usize, filled: usize, object: &[u8]) {
    pack[HEAD_BYTES + filled..][..object.len()].copy_from_slice(object);
    let length = u16::try_from(object.len()).expect("an object is shorter than a page");
    pack[at * LENGTH_BYTES..][..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
}

/// Returns the object of one part, if these bytes have one there.
pub fn object(pack: &[u8; PAGE_BYTES], part: Part) -> Option<&[u8]> {
    let at = part.at()?;
    let length =
        |at: usize| usize::from(u16::from_le_bytes([pack[at * LENGTH_BYTES], pack[at * LENGTH_BYTES + 1]]));
    let start = HEAD_BYTES + (0..at).map(length).sum::<usize>();
    pack.get(start..start + length(at)).filter(|object| !object.is_empty())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_put_in_comes_out(
            lengths in prop::collection::vec(1_usize..=CAPACITY / PARTS_MAX, 1..=PARTS_MAX),
            before in any::<u8>(),
        ) {
            let mut pack = [before; PAGE_BYTES];
            clear(&mut pack);
            let objects: Vec<Vec<u8>> =
                lengths.iter().enumerate().map(|(at, length)| vec![at as u8 + 1; *length]).collect();
            let mut filled = 0;
            for (at, object) in objects.iter().enumerate() {
                append(&mut pack, at, filled, object);
                filled += object.len();
            }
            for at in 0..PARTS_MAX {
                prop_assert_eq!(object(&pack, Part::nth(at)), objects.get(at).map(Vec::as_slice));
            }
            prop_assert_eq!(object(&pack, Part::WHOLE), None);
        }

        #[test]
        fn any_bytes_are_objects_or_none(pack in prop::collection::vec(any::<u8>(), PAGE_BYTES), small in any::<bool>()) {
            let mut pack: [u8; PAGE_BYTES] = pack.try_into().unwrap();
            if small {
                (0..PARTS_MAX).for_each(|at| pack[at * 2 + 1] &= 7);
            }
            for at in 0..PARTS_MAX {
                let object = object(&pack, Part::nth(at));
                prop_assert!(object.is_none_or(|object| !object.is_empty() && object.len() <= CAPACITY));
            }
        }
    }

    #[test]
    fn one_object_can_have_all_of_the_bytes() {
        let mut pack = [0; PAGE_BYTES];
        append(&mut pack, 0, 0, &[7; CAPACITY]);
        assert_eq!(object(&pack, Part::nth(0)), Some(&[7; CAPACITY][..]));
    }
}

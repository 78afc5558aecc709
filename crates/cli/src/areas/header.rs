//! The header of a swap area as `mkswap` writes it: one page, version 1, "SWAPSPACE2" at its end.
//!
//! The parser is pure: bytes in, an answer out. The checks and their order are those of the kernel's swapon.
//! In addition, an area from a machine of the other byte order is refused by name.

use farpage_core::units::PAGE_BYTES;
use std::fmt;

/// Least slots of an area. `mkswap` makes no smaller area, and neither do we.
pub const SLOTS_MIN: u32 = 10;
/// Offsets of the version, the last page, the count of bad pages and their list.
const VERSION_AT: usize = 1024;
const LAST_PAGE_AT: usize = 1028;
const BAD_COUNT_AT: usize = 1032;
const BAD_LIST_AT: usize = 1536;
/// The signature fills the last ten bytes of the page.
const SIGNATURE_BYTES: usize = 10;
pub const SIGNATURE_AT: usize = PAGE_BYTES - SIGNATURE_BYTES;
/// Signature of a file that a run of Farpage's has as an area (`areas/mark.rs`).
pub const SIGNATURE_OF_A_RUN: &[u8; SIGNATURE_BYTES] = b"FARPAGE-01";
/// Bad pages whose numbers fit between the list's place and the signature.
const BAD_PAGES_MAX: u32 = ((SIGNATURE_AT - BAD_LIST_AT) / 4) as u32;
const _: () = assert!(BAD_PAGES_MAX == 637);

/// A valid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the last page of the area that may be used.
    pub last_page: u32,
    /// Pages that must not be used: sorted, without duplicates, never page 0.
    pub bad_pages: Vec<u32>,
}

/// Why a page isn't a header that we accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// No signature: whatever the page is, it isn't part of a swap area.
    Missing,
    /// The signature of version 0, which Linux has refused since 2.5.22.
    Version0,
    /// A hibernation image.
    Hibernation,
    /// Pages of a run of Farpage's that didn't empty its file at its end.
    OfARun,
    /// Made on a machine with the other byte order.
    OtherByteOrder,
    /// A version that doesn't exist.
    Version(u32),
    /// The last page is 0.
    Empty,
    /// Fewer than [`SLOTS_MIN`] pages.
    TooSmall(u32),
    /// More bad pages than fit into a header.
    BadCount(u32),
    /// A bad page that isn't a page of the area.
    BadPage(u32),
    /// Every page is listed as bad.
    AllBad,
}

impl HeaderError {
    /// Whether the page was meant to be a header. Data of another program isn't damage.
    pub fn is_damage(self) -> bool {
        !matches!(
            self,
            HeaderError::Missing | HeaderError::Hibernation | HeaderError::OfARun | HeaderError::Version0
        )
    }
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            HeaderError::Missing => write!(f, "it has no swap header"),
            HeaderError::Version0 => write!(f, "its swap header has the old version 0 (SWAP-SPACE)"),
            HeaderError::Hibernation => write!(f, "it holds a hibernation image"),
            HeaderError::OfARun => {
                write!(f, "a run of Farpage has it: elsewhere, or before this machine was started")
            }
            HeaderError::OtherByteOrder => {
                write!(f, "its swap header was written on a machine with the other byte order")
            }
            HeaderError::Version(version) => write!(f, "its swap header says version {version}, not 1"),
            HeaderError::Empty => write!(f, "empty swap-file: its header says that the last page is 0"),
            HeaderError::TooSmall(pages) => {
                write!(f, "its header says {pages} pages; a swap area has at least {SLOTS_MIN}")
            }
            HeaderError::BadCount(count) => {
                write!(f, "its header lists {count} bad pages; at most {BAD_PAGES_MAX} fit")
            }
            HeaderError::BadPage(page) => {
                write!(f, "its header lists page {page} as bad, which isn't a page of the area")
            }
            HeaderError::AllBad => write!(f, "its header lists every page as bad"),
        }
    }
}

/// Reads a header from the first page of an area.
pub fn parse(page: &[u8; PAGE_BYTES]) -> Result<Header, HeaderError> {
    check_signature(&page[SIGNATURE_AT..])?;
    let version = word(page, VERSION_AT);
    if version == 1u32.swap_bytes() {
        return Err(HeaderError::OtherByteOrder);
    }
    if version != 1 {
        return Err(HeaderError::Version(version));
    }
    let last_page = word(page, LAST_PAGE_AT);
    if last_page == 0 {
        return Err(HeaderError::Empty);
    }
    if last_page < SLOTS_MIN - 1 {
        return Err(HeaderError::TooSmall(last_page + 1));
    }
    let bad_pages = bad_pages(page, last_page)?;
    if bad_pages.len() as u64 >= u64::from(last_page) {
        return Err(HeaderError::AllBad);
    }
    Ok(Header { last_page, bad_pages })
}

fn check_signature(signature: &[u8]) -> Result<(), HeaderError> {
    match signature {
        b"SWAPSPACE2" => Ok(()),
        b"SWAP-SPACE" => Err(HeaderError::Version0),
        b"S1SUSPEND\0" | b"S2SUSPEND\0" | b"ULSUSPEND\0" | b"LINHIB0001" => Err(HeaderError::Hibernation),
        signature if signature == SIGNATURE_OF_A_RUN => Err(HeaderError::OfARun),
        _ => Err(HeaderError::Missing),
    }
}

fn bad_pages(page: &[u8; PAGE_BYTES], last_page: u32) -> Result<Vec<u32>, HeaderError> {
    let count = word(page, BAD_COUNT_AT);
    if count > BAD_PAGES_MAX {
        return Err(HeaderError::BadCount(count));
    }
    let mut list: Vec<u32> = (0..count as usize).map(|n| word(page, BAD_LIST_AT + 4 * n)).collect();
    if let Some(&wrong) = list.iter().find(|&&bad| bad == 0 || bad > last_page) {
        return Err(HeaderError::BadPage(wrong));
    }
    list.sort_unstable();
    list.dedup();
    Ok(list)
}

fn word(page: &[u8; PAGE_BYTES], at: usize) -> u32 {
    u32::from_ne_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(last_page: u32, bad: &[u32]) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, VERSION_AT, 1);
        put(&mut page, LAST_PAGE_AT, last_page);
        put(&mut page, BAD_COUNT_AT, bad.len() as u32);
        for (n, bad) in bad.iter().enumerate() {
            put(&mut page, BAD_LIST_AT + 4 * n, *bad);
        }
        page[SIGNATURE_AT..].copy_from_slice(b"SWAPSPACE2");
        page
    }

    fn put(page: &mut [u8; PAGE_BYTES], at: usize, value: u32) {
        page[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    #[test]
    fn valid_headers_are_read_at_both_ends() {
        assert_eq!(parse(&header(9, &[])), Ok(Header { last_page: 9, bad_pages: vec![] }));
        assert_eq!(parse(&header(u32::MAX, &[7, 3, 7])).unwrap().bad_pages, [3, 7]);
        let many: Vec<u32> = (1..=BAD_PAGES_MAX).collect();
        assert_eq!(parse(&header(u32::MAX, &many)).unwrap().bad_pages, many);
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let mut other_order = header(15, &[]);
        put(&mut other_order, VERSION_AT, 1u32.swap_bytes());
        let mut version = header(15, &[]);
        put(&mut version, VERSION_AT, 2);
        let mut count = header(15, &[]);
        put(&mut count, BAD_COUNT_AT, 638);
        let all: Vec<u32> = (1..=9).collect();
        for (page, error) in [
            ([0; PAGE_BYTES], HeaderError::Missing),
            (other_order, HeaderError::OtherByteOrder),
            (version, HeaderError::Version(2)),
            (header(0, &[]), HeaderError::Empty),
            (header(8, &[]), HeaderError::TooSmall(9)),
            (count, HeaderError::BadCount(638)),
            (header(15, &[0]), HeaderError::BadPage(0)),
            (header(15, &[16]), HeaderError::BadPage(16)),
            (header(9, &all), HeaderError::AllBad),
        ] {
            assert_eq!(parse(&page), Err(error));
        }
    }

    #[test]
    fn other_signatures_are_told_apart() {
        for (signature, error) in [
            (b"SWAP-SPACE", HeaderError::Version0),
            (b"S1SUSPEND\0", HeaderError::Hibernation),
            (SIGNATURE_OF_A_RUN, HeaderError::OfARun),
            (b"SWAPSPACE3", HeaderError::Missing),
        ] {
            let mut page = header(15, &[]);
            page[SIGNATURE_AT..].copy_from_slice(signature);
            assert_eq!(parse(&page), Err(error));
            assert!(!error.is_damage());
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_keeps_the_rules(
            version in prop_oneof![Just(1u32), any::<u32>()], last in any::<u32>(), count in 0u32..700,
            list in proptest::collection::vec(any::<u32>(), 0..20),
        ) {
            let mut page = header(last, &list);
            put(&mut page, VERSION_AT, version);
            put(&mut page, BAD_COUNT_AT, count);
            if let Ok(header) = parse(&page) {
                prop_assert!(version == 1 && header.last_page >= SLOTS_MIN - 1);
                prop_assert!(header.bad_pages.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(header.bad_pages.iter().all(|&bad| bad != 0 && bad <= header.last_page));
            }
        }
    }
}

//! The parser of swap headers. An accepted header must obey the rules of `mkswap`, and no bytes may make the
//! parser panic. The parser itself is the module `header`.

use crate::{Input, header};
use farpage_core::units::PAGE_BYTES;

/// Offsets in the page that `mkswap` writes. The target doesn't borrow the parser's offsets: a wrong offset
/// would then be the same on both sides.
const VERSION_AT: usize = 1024;
const LAST_PAGE_AT: usize = 1028;
const BAD_COUNT_AT: usize = 1032;
const BAD_LIST_AT: usize = 1536;
const SIGNATURE_AT: usize = PAGE_BYTES - SIGNATURE.len();
const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
/// Bad pages whose numbers fit between the list's offset and the signature.
const BAD_PAGES_MAX: usize = 637;

/// Parses a page that the input describes.
pub fn run(input: &mut Input) {
    // Few bytes of the page matter, so most inputs are a valid header with some bytes changed.
    let is_plausible = input.byte() & 7 != 0;
    let page = if is_plausible { plausible_header(input) } else { any_bytes(input) };
    match header::parse(&page) {
        Ok(header) => {
            assert!(header.last_page >= header::SLOTS_MIN - 1);
            assert!(header.bad_pages.is_sorted() && header.bad_pages.len() <= BAD_PAGES_MAX);
            assert!(header.bad_pages.iter().all(|&bad| bad != 0 && bad <= header.last_page));
            assert!((header.bad_pages.len() as u64) < u64::from(header.last_page));
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(error.is_damage(), page.ends_with(SIGNATURE), "{error}");
        }
    }
}

/// Draws the header's fields, and then single bytes anywhere in the page.
fn plausible_header(input: &mut Input) -> [u8; PAGE_BYTES] {
    let mut page = [0_u8; PAGE_BYTES];
    page[VERSION_AT] = 1;
    page[LAST_PAGE_AT..LAST_PAGE_AT + 4].copy_from_slice(&input.word().to_le_bytes());
    page[SIGNATURE_AT..].copy_from_slice(SIGNATURE);
    // The count is below 1024. The list need not have this many pages.
    page[BAD_COUNT_AT..BAD_COUNT_AT + 2].copy_from_slice(&[input.byte(), input.byte() & 3]);
    let listed = input.below(24);
    let list = &mut page[BAD_LIST_AT..BAD_LIST_AT + 4 * listed];
    // The pages in the list are below 65,536.
    list.as_chunks_mut::<4>().0.iter_mut().for_each(|bad| *bad = [input.byte(), input.byte(), 0, 0]);
    while !input.is_over() {
        // The input has a byte's value before its offset.
        let value = input.byte();
        page[input.below(PAGE_BYTES)] = value;
    }
    page
}

/// Returns a page that begins with the rest of the input.
fn any_bytes(input: &mut Input) -> [u8; PAGE_BYTES] {
    let mut page = [0_u8; PAGE_BYTES];
    let bytes = input.rest();
    let length = bytes.len().min(PAGE_BYTES);
    page[..length].copy_from_slice(&bytes[..length]);
    page
}

//! Finds where the files whose code the engine runs lie in memory. These files are the one that this code is
//! linked into, and libc, which has memcpy. The variables of both must never be paged out. From a certain
//! size on, libc's memcpy reads variables of libc to choose how to copy. Also finds where other libraries
//! lie: the loader unmaps a library by calls that no hook sees.
// UNSAFETY: reads the ELF headers that the dynamic linker has mapped.

use crate::peek;
use core::ffi::{c_char, c_int, c_void};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};

/// The part of an ELF-64 header that says where the program headers are.
#[repr(C)]
struct Header {
    identity: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    segments_offset: u64,
    sections_offset: u64,
    flags: u32,
    bytes: u16,
    segment_bytes: u16,
    segments: u16,
}

/// A program header.
#[repr(C)]
struct Segment {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical_address: u64,
    file_bytes: u64,
    memory_bytes: u64,
    align: u64,
}

const LOAD: u32 = 1;
/// The type of a program that must be loaded at fixed addresses, so that its headers hold absolute addresses.
const FIXED: u16 = 2;

unsafe extern "C" {
    /// The ELF header. The linker defines this name for each file separately.
    static __ehdr_start: Header;

    // Functions that the compiler makes calls to, whichever file exports them.
    fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memmove(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memset(to: *mut c_void, byte: c_int, bytes: usize) -> *mut c_void;
    fn bcmp(one: *const c_void, other: *const c_void, bytes: usize) -> c_int;
    fn strlen(text: *const c_char) -> usize;
}

/// Calls `visit` for each loaded segment of the library or program that this function is linked into. Visits
/// also the segments of the files whose functions the compiler calls. A segment may be visited more than
/// once.
pub fn for_each_segment(mut visit: impl FnMut(PageRange)) {
    // The address range of the last file. Mostly all functions are in the same file.
    let mut last = [0; 2];
    let functions = [
        memcpy as *const () as usize,
        memmove as *const () as usize,
        memset as *const () as usize,
        bcmp as *const () as usize,
        strlen as *const () as usize,
    ];
    let own = Some(&raw const __ehdr_start);
    for (header, function) in [(own, 0)].into_iter().chain(functions.map(|function| (None, function))) {
        if (last[0]..last[1]).contains(&function) {
            continue;
        }
        // SAFETY: the linker puts the header at the start of the first segment, and the dynamic linker maps
        // it there.
        let Some(header) = header.or_else(|| header_before(function)) else { continue };
        last = [usize::MAX, 0];
        let mut note = |pages: PageRange| {
            last = [last[0].min(pages.start.address()), last[1].max(pages.end.address())];
            visit(pages);
        };
        // SAFETY: the header is mapped with its file's first segment, as above.
        unsafe { for_each_segment_of(header, &mut note) };
    }
}

/// Returns the header of the file that has code at `address`. The segments of a file follow each other,
/// perhaps with holes.
fn header_before(address: usize) -> Option<*const Header> {
    const FAR_PAGES: usize = 1 << 18;
    let mut pages = (0..FAR_PAGES).map_while(|back| (address / PAGE_BYTES).checked_sub(back));
    // SAFETY: the kernel has just read from the page, and no thread unmaps code that runs.
    let is_header =
        |page: usize| peek::is_readable(page) && unsafe { (page as *const [u8; 4]).read() } == *b"\x7fELF";
    pages.find_map(|page| is_header(page * PAGE_BYTES).then_some((page * PAGE_BYTES) as *const Header))
}

/// # Safety
/// The header must be mapped together with its file's first segment.
unsafe fn for_each_segment_of(header: *const Header, visit: &mut impl FnMut(PageRange)) {
    // SAFETY: the header is mapped, by the caller's promise.
    let (kind, offset, count) = unsafe { ((*header).kind, (*header).segments_offset, (*header).segments) };
    let base = if kind == FIXED { 0 } else { header as usize };
    let segments = header.cast::<u8>().wrapping_add(offset as usize).cast::<Segment>();
    for at in 0..usize::from(count) {
        // SAFETY: the program headers follow the header in the same segment. The header gives their number,
        // and they have this layout.
        let segment = unsafe { &*segments.add(at) };
        if segment.kind == LOAD {
            visit(PageRange::covering(base + segment.address as usize, segment.memory_bytes as usize));
        }
    }
}

/// Returns the pages from the first to the last segment of the ELF file whose first page is mapped at
/// `start`. Returns none if another kind of file is there. The file may be unmapped meanwhile.
pub fn span_of_file(start: usize) -> Option<PageRange> {
    const ELF_64: [u8; 5] = *b"\x7fELF\x02";
    const SEGMENTS_MAX: u16 = 128;
    let text: [u8; size_of::<Header>()] = peek::read(start)?;
    // SAFETY: the bytes have the size of a header, and any bytes are a valid header.
    let header = unsafe { text.as_ptr().cast::<Header>().read_unaligned() };
    if !text.starts_with(&ELF_64) || header.segments > SEGMENTS_MAX {
        return None;
    }
    let (mut first, mut end) = (None, 0);
    for at in 0..usize::from(header.segments) {
        let offset = (header.segments_offset as usize).wrapping_add(at * size_of::<Segment>());
        let text: [u8; size_of::<Segment>()] = peek::read(start.wrapping_add(offset))?;
        // SAFETY: as for the header.
        let segment = unsafe { text.as_ptr().cast::<Segment>().read_unaligned() };
        if segment.kind == LOAD {
            // Segments are in the order of their addresses. The first one begins with the file's first page.
            first.get_or_insert(segment.address);
            end = segment.address.saturating_add(segment.memory_bytes);
        }
    }
    let page = PageIndex::of_address(start);
    let before = PageIndex::of_address(first? as usize);
    let pages = end.div_ceil(PAGE_BYTES as u64).checked_sub(before.0)?;
    Some(PageRange::of(page, pages))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A bug: engine threads and hooks copied memory with the help of two words that could be evicted.
    #[test]
    fn variables_of_who_copies_memory_are_found() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let parse = |line: &str| {
            let (start, rest) = line.split_once('-').unwrap();
            let [start, end] =
                [start, rest.split_once(' ').unwrap().0].map(|x| usize::from_str_radix(x, 16).unwrap());
            (start..end, line.split_whitespace().nth(5).unwrap_or("").to_owned(), line.contains(" rw-p "))
        };
        let maps: Vec<_> = maps.lines().map(parse).collect();
        let copies = memcpy as *const () as usize;
        let file = &maps.iter().find(|(range, ..)| range.contains(&copies)).unwrap().1;
        let last = maps.iter().rposition(|(_, name, _)| name == file).unwrap();
        let mut variables =
            maps.iter().filter(|(_, name, is_written)| name == file && *is_written).collect::<Vec<_>>();
        // Variables that are zero at first are in a mapping without a name.
        let behind =
            maps.get(last + 1).filter(|(range, name, _)| name.is_empty() && range.start == maps[last].0.end);
        variables.extend(behind);
        assert!(!variables.is_empty());
        for (range, ..) in variables {
            let mut found = false;
            for_each_segment(|pages| found |= pages.contains(PageIndex::of_address(range.start)));
            assert!(found, "{range:x?} of {file}");
        }
    }

    /// The span of libc, as its headers give it, is what the loader has mapped for libc.
    #[test]
    fn span_of_a_library_is_what_the_loader_has_mapped() {
        let header = header_before(memcpy as *const () as usize).unwrap() as usize;
        let span = span_of_file(header).unwrap();
        let (mut is_first, mut end) = (true, PageIndex(0));
        for_each_segment(|pages| {
            if span.contains(pages.start) {
                assert!(!is_first || pages.start == span.start);
                (is_first, end) = (false, pages.end);
            }
        });
        assert_eq!(end, span.end);
    }

    #[test]
    fn other_files_have_no_span() {
        let is_elf = |bytes: &[u8]| span_of_file(bytes.as_ptr() as usize).is_some();
        let mut text = vec![0_u8; 2 * PAGE_BYTES];
        assert!(!is_elf(&text) && span_of_file(0).is_none());
        text[..5].copy_from_slice(b"\x7fELF\x02");
        assert!(!is_elf(&text), "no segment");
        // Sixteen program headers, at an offset where nothing is.
        text[32..40].fill(0xff);
        text[56] = 16;
        assert!(!is_elf(&text));
    }

    #[test]
    fn code_and_variables_of_this_program_are_found() {
        static ZEROS: [AtomicUsize; 1024] = [const { AtomicUsize::new(0) }; 1024];
        ZEROS[1000].store(1, Ordering::Relaxed);
        let local = 0;
        let is_inside = |address: usize| {
            let mut found = false;
            for_each_segment(|pages| found |= pages.contains(PageIndex::of_address(address)));
            found
        };
        assert!(is_inside(&raw const ZEROS[1000] as usize));
        assert!(is_inside(code_and_variables_of_this_program_are_found as *const () as usize));
        assert!(!is_inside(&raw const local as usize) && !is_inside(&raw const *Box::new(1) as usize));
    }
}

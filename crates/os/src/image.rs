//! Where the file that this code is in lies in memory: its code, and its variables, which must never be paged.
// UNSAFETY: reads the ELF header that the dynamic linker has mapped.

use farpage_core::units::PageRange;

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
/// A program that isn't loaded wherever there is room: addresses are what they are.
const FIXED: u16 = 2;

unsafe extern "C" {
    /// Where the header is: a name that the linker makes, for this file alone.
    static __ehdr_start: Header;
}

/// Calls `visit` for each loaded part of the library, or the program, that this function is linked into.
pub fn for_each_segment(mut visit: impl FnMut(PageRange)) {
    let header = &raw const __ehdr_start;
    // SAFETY: the linker puts the header, and the dynamic linker maps it, at the start of the first part.
    let (kind, offset, count) = unsafe { ((*header).kind, (*header).segments_offset, (*header).segments) };
    let base = if kind == FIXED { 0 } else { header as usize };
    let segments = header.cast::<u8>().wrapping_add(offset as usize).cast::<Segment>();
    for at in 0..usize::from(count) {
        // SAFETY: program headers follow the header in the same part, as many as it says, of this layout.
        let segment = unsafe { &*segments.add(at) };
        if segment.kind == LOAD {
            visit(PageRange::covering(base + segment.address as usize, segment.memory_bytes as usize));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::units::PageIndex;
    use std::sync::atomic::{AtomicUsize, Ordering};

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

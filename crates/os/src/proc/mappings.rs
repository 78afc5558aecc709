//! Reads the mappings of this process, and what the program has asked for each of them.

use super::{open, parse_decimal, parse_hex};
use crate::sys::Errno;
use farpage_core::units::{PageIndex, PageRange};

/// A line of /proc/self/maps, as far as Farpage uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The mapping's pages.
    pub pages: PageRange,
    /// Readable, writable, private, not executable.
    pub is_private_data: bool,
    /// Private.
    pub is_private: bool,
    /// May be executed.
    pub is_executable: bool,
    /// May not be accessed at all.
    pub is_closed: bool,
    /// Backed by no file.
    pub is_anonymous: bool,
    /// The first page of a file.
    pub begins_file: bool,
    /// The name that the kernel gives, if any.
    pub name: MappingName,
}

/// Names that the kernel gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingName {
    /// No name: anonymous memory.
    None,
    /// `[heap]`.
    Heap,
    /// `[stack]`.
    Stack,
    /// `[anon:...]`: anonymous memory that the program has named.
    Given,
    /// Any other name: a file, `[vdso]`.
    Other,
}

/// Calls `visit` for each mapping of this process.
pub fn for_each_mapping(mut visit: impl FnMut(Mapping)) -> Result<(), Errno> {
    // The process's own file is empty once the first thread has ended.
    for_each_line(c"/proc/thread-self/maps", |line| {
        if let Some(mapping) = parse_mapping(line) {
            visit(mapping);
        }
    })
}

/// What a program has asked the kernel to do with a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// A fork's child finds zeros in place of the content.
    pub is_wiped: bool,
    /// A fork's child doesn't get the mapping.
    pub is_hidden: bool,
    /// Locked in memory.
    pub is_locked: bool,
    /// Protected by a key of the processor.
    pub is_keyed: bool,
    /// Some pages are clean. In memory that no file has, the kernel may take these away if the program has
    /// allowed it (MADV_FREE).
    pub has_clean_pages: bool,
    /// Something else: a growing stack, memory that may be dropped, a device, huge pages, memory that is
    /// sealed or registered with a userfaultfd.
    pub is_other: bool,
}

impl Requests {
    /// Returns what the words after `VmFlags:` say.
    pub(super) fn of_flags(words: &[u8]) -> Requests {
        const OTHERS: [&[u8]; 8] = [b"gd", b"io", b"pf", b"ht", b"um", b"uw", b"dp", b"sl"];
        let mut requests = Requests::default();
        for word in words.split(|byte| *byte == b' ') {
            match word {
                b"wf" => requests.is_wiped = true,
                b"dc" => requests.is_hidden = true,
                b"lo" => requests.is_locked = true,
                _ => requests.is_other |= OTHERS.contains(&word),
            }
        }
        requests
    }
}

/// Calls `visit` for each mapping of this process, with what the program has asked for it. The kernel goes
/// through all pages to answer: 5 ms for each GiB that is in memory, less with huge pages.
pub fn for_each_mapping_and_requests(mut visit: impl FnMut(Mapping, Requests)) -> Result<(), Errno> {
    const PAGES: [&[u8]; 2] = [b"Private_Clean:", b"Shared_Clean:"];
    let (mut last, mut is_keyed, mut has_clean_pages) = (None, false, false);
    for_each_line(c"/proc/thread-self/smaps", |line| {
        if let Some(mapping) = parse_mapping(line) {
            (last, is_keyed, has_clean_pages) = (Some(mapping), false, false);
        } else if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
            is_keyed = parse_decimal(key) != Some(0);
        } else if let Some(size) = PAGES.iter().find_map(|name| line.strip_prefix(*name)) {
            // The kernel counts pages as LazyFree some time after the call.
            has_clean_pages |= size.trim_ascii() != b"0 kB";
        } else if let Some(words) = line.strip_prefix(b"VmFlags:")
            && let Some(mapping) = last.take()
        {
            visit(mapping, Requests { is_keyed, has_clean_pages, ..Requests::of_flags(words) });
        }
    })
}

/// Does the same as [`for_each_mapping`], but leaves out mappings for which the program has asked anything
/// but MADV_FREE. The kernel goes through all pages to answer.
pub fn for_each_plain_mapping(mut visit: impl FnMut(Mapping)) -> Result<(), Errno> {
    for_each_mapping_and_requests(|mapping, requests| {
        if (Requests { has_clean_pages: false, ..requests }) == Requests::default() {
            visit(mapping);
        }
    })
}

fn for_each_line(path: &core::ffi::CStr, mut visit: impl FnMut(&[u8])) -> Result<(), Errno> {
    let file = open(path)?;
    let mut text = [0_u8; 8192];
    let mut kept = 0;
    loop {
        let read = match rustix::io::read(&file, &mut text[kept..]) {
            Ok(read) => read,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(Errno(error.raw_os_error())),
        };
        let filled = kept + read;
        let mut line_start = 0;
        while let Some(length) = text[line_start..filled].iter().position(|byte| *byte == b'\n') {
            visit(&text[line_start..line_start + length]);
            line_start += length + 1;
        }
        if read == 0 {
            return Ok(());
        }
        text.copy_within(line_start..filled, 0);
        kept = filled - line_start;
        if kept == text.len() {
            // No line is as long as the buffer, because paths have at most 4096 bytes. Dropping the line
            // avoids an endless loop.
            kept = 0;
        }
    }
}

pub(super) fn parse_mapping(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let mut range = fields.next()?.split(|byte| *byte == b'-');
    let (start, end) = (parse_hex(range.next()?)?, parse_hex(range.next()?)?);
    let permissions = fields.next()?;
    let offset = fields.next()?;
    let device = fields.next()?;
    let inode = fields.next()?;
    let name = fields.next();
    let name = match name {
        None => MappingName::None,
        Some(b"[heap]") => MappingName::Heap,
        Some(b"[stack]") => MappingName::Stack,
        Some(name) if name.starts_with(b"[anon:") => MappingName::Given,
        Some(_) => MappingName::Other,
    };
    let is_anonymous = device == b"00:00" && inode == b"0";
    Some(Mapping {
        pages: PageRange::new(PageIndex::of_address(start as usize), PageIndex::of_address(end as usize)),
        is_private_data: permissions == b"rw-p",
        is_private: permissions.ends_with(b"p"),
        is_executable: permissions.contains(&b'x'),
        is_closed: permissions.starts_with(b"---"),
        is_anonymous,
        begins_file: !is_anonymous && parse_hex(offset)? == 0,
        name,
    })
}

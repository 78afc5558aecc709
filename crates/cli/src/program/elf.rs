//! Reads from an executable file how it wants to be run. The module knows just enough of ELF to tell whether
//! a preload library would be loaded into a program.

use std::io;

/// Kinds of programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Elf {
    /// Not ELF at all.
    Other,
    /// For 32-bit machines.
    Bits32,
    /// For another machine, with its number in the ELF standard.
    OtherMachine(u16),
    /// Cut off or contradictory.
    Damaged,
    /// Loads no libraries.
    Static,
    /// Loaded by this dynamic loader.
    Dynamic(Vec<u8>),
    /// Loaded by a dynamic loader, with the sanitizer of this name in it.
    Sanitized(&'static str),
}

/// Sanitizers that keep books about all memory, or must be the first library. Each has two names that only
/// programs with it have: its library, and a function if it is linked in.
const SANITIZERS: [(&str, [&str; 2]); 5] = [
    ("AddressSanitizer", ["libasan.so", "__asan_init"]),
    ("ThreadSanitizer", ["libtsan.so", "__tsan_init"]),
    ("LeakSanitizer", ["liblsan.so", "__lsan_init"]),
    ("MemorySanitizer", ["libmsan.so", "__msan_init"]),
    ("HWAddressSanitizer", ["libhwasan.so", "__hwasan_init"]),
];

/// x86-64, the only machine that Farpage is built for.
const MACHINE: u16 = 62;
/// Bytes of a 64-bit ELF header and of one program header.
const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
/// Type of the program header that names the dynamic loader.
const PT_INTERP: u32 = 3;
/// Bytes of a section header, and the type of sections that hold names.
const SECTION_HEADER_BYTES: usize = 64;
const SHT_STRTAB: u32 = 3;
/// Most bytes of names that are looked at.
const NAMES_BYTES_MAX: u64 = 64 << 20;
/// Most bytes of a loader's path.
const INTERP_BYTES_MAX: u64 = 4096;

/// Reads a file through `read_at(offset, buffer)`, which returns how many bytes it got.
pub fn inspect(read_at: impl Fn(u64, &mut [u8]) -> io::Result<usize>) -> io::Result<Elf> {
    let mut header = [0; HEADER_BYTES];
    let got = read_fully(&read_at, 0, &mut header)?;
    if got < 4 || header[..4] != *b"\x7fELF" {
        return Ok(Elf::Other);
    }
    match (header[4], header[5]) {
        (1, _) => return Ok(Elf::Bits32),
        (2, 1) => {}
        (2, 2) => return Ok(Elf::OtherMachine(u16::from_be_bytes([header[18], header[19]]))),
        _ => return Ok(Elf::Damaged),
    }
    if got < HEADER_BYTES {
        return Ok(Elf::Damaged);
    }
    let machine = half(&header, 18);
    if machine != MACHINE {
        return Ok(Elf::OtherMachine(machine));
    }
    let (table, each, count) = (long(&header, 32), half(&header, 54), half(&header, 56));
    if usize::from(each) < PROGRAM_HEADER_BYTES || count == 0 {
        return Ok(Elf::Damaged);
    }
    match interpreter(&read_at, table, u64::from(each), u64::from(count))? {
        Elf::Dynamic(path) => {
            let of = |name: &[u8]| {
                let is = |marks: &[&str; 2]| marks.iter().any(|mark| name.starts_with(mark.as_bytes()));
                SANITIZERS.iter().find(|(_, marks)| is(marks)).map(|(name, _)| *name)
            };
            Ok(find_name(&read_at, &header, of)?.map_or(Elf::Dynamic(path), Elf::Sanitized))
        }
        other => Ok(other),
    }
}

fn interpreter(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<usize>,
    table: u64,
    each: u64,
    count: u64,
) -> io::Result<Elf> {
    for n in 0..count {
        let mut entry = [0; PROGRAM_HEADER_BYTES];
        let Some(at) = table.checked_add(n * each) else { return Ok(Elf::Damaged) };
        if read_fully(read_at, at, &mut entry)? < PROGRAM_HEADER_BYTES {
            return Ok(Elf::Damaged);
        }
        if word(&entry, 0) != PT_INTERP {
            continue;
        }
        let (offset, bytes) = (long(&entry, 8), long(&entry, 32));
        if bytes == 0 || bytes > INTERP_BYTES_MAX {
            return Ok(Elf::Damaged);
        }
        let mut path = vec![0; bytes as usize];
        if read_fully(read_at, offset, &mut path)? < path.len() {
            return Ok(Elf::Damaged);
        }
        path.truncate(path.iter().position(|byte| *byte == 0).unwrap_or(path.len()));
        return Ok(Elf::Dynamic(path));
    }
    Ok(Elf::Static)
}

/// Whether a 64-bit ELF file has this name among the names that it exports, needs, or is made of.
pub fn has_name(read_at: impl Fn(u64, &mut [u8]) -> io::Result<usize>, wanted: &str) -> io::Result<bool> {
    let mut header = [0; HEADER_BYTES];
    if read_fully(&read_at, 0, &mut header)? < HEADER_BYTES || header[..6] != *b"\x7fELF\x02\x01" {
        return Ok(false);
    }
    let is_it = |name: &[u8]| (name == wanted.as_bytes()).then_some(());
    Ok(find_name(&read_at, &header, is_it)?.is_some())
}

/// Returns the first answer that `of` gives for the names in the file's sections. None in a file without
/// sections, which the loader doesn't need.
fn find_name<T>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<usize>,
    header: &[u8; HEADER_BYTES],
    of: impl Fn(&[u8]) -> Option<T>,
) -> io::Result<Option<T>> {
    let (table, each, count) = (long(header, 40), u64::from(half(header, 58)), u64::from(half(header, 60)));
    for n in 0..count {
        let mut entry = [0; SECTION_HEADER_BYTES];
        let Some(at) = table.checked_add(n * each) else { return Ok(None) };
        if read_fully(read_at, at, &mut entry)? < SECTION_HEADER_BYTES {
            return Ok(None);
        }
        if word(&entry, 4) != SHT_STRTAB {
            continue;
        }
        let mut names = vec![0; long(&entry, 32).min(NAMES_BYTES_MAX) as usize];
        let got = read_fully(read_at, long(&entry, 24), &mut names)?;
        if let Some(found) = names[..got].split(|byte| *byte == 0).find_map(&of) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn read_fully(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<usize>,
    offset: u64,
    buffer: &mut [u8],
) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        let Some(at) = offset.checked_add(got as u64).filter(|at| *at <= i64::MAX as u64) else { break };
        match read_at(at, &mut buffer[got..])? {
            0 => break,
            more => got += more,
        }
    }
    Ok(got)
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(bytes: &[u8]) -> Elf {
        inspect(|offset, buffer| {
            let rest = bytes.get(usize::try_from(offset).unwrap_or(usize::MAX)..).unwrap_or(&[]);
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        })
        .unwrap()
    }

    /// A file with one program header of the given type, whose content is `content`.
    fn file(kind: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES + PROGRAM_HEADER_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        bytes[32] = HEADER_BYTES as u8;
        bytes[54] = PROGRAM_HEADER_BYTES as u8;
        bytes[56] = 1;
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes[72] = (HEADER_BYTES + PROGRAM_HEADER_BYTES) as u8;
        bytes[96] = content.len() as u8;
        bytes.extend_from_slice(content);
        bytes
    }

    #[test]
    fn dynamic_and_static_programs_are_told_apart() {
        assert_eq!(of(&file(PT_INTERP, b"/lib64/ld.so\0")), Elf::Dynamic(b"/lib64/ld.so".to_vec()));
        assert_eq!(of(&file(1, b"")), Elf::Static);
    }

    #[test]
    fn other_files_and_machines_are_named() {
        let mut bits32 = file(1, b"");
        bits32[4] = 1;
        let mut other = file(1, b"");
        other[18..20].copy_from_slice(&243u16.to_le_bytes());
        let mut big_endian = file(1, b"");
        big_endian[5] = 2;
        big_endian[18..20].copy_from_slice(&21u16.to_be_bytes());
        assert_eq!(of(&bits32), Elf::Bits32);
        assert_eq!(of(&other), Elf::OtherMachine(243));
        assert_eq!(of(&big_endian), Elf::OtherMachine(21));
        assert_eq!(of(b"#!/bin/sh\n"), Elf::Other);
        assert_eq!(of(b""), Elf::Other);
    }

    #[test]
    fn truncated_file_is_damaged() {
        let whole = file(PT_INTERP, b"/lib64/ld.so\0");
        for bytes in [20, HEADER_BYTES, HEADER_BYTES + 10, whole.len() - 1] {
            assert_eq!(of(&whole[..bytes]), Elf::Damaged, "{bytes}");
        }
    }

    #[test]
    fn names_are_found_in_this_very_program() {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let has = |name: &str| {
            has_name(|offset, buffer| std::os::unix::fs::FileExt::read_at(&file, buffer, offset), name)
        };
        assert!(has("main").unwrap());
        assert!(!has("mai").unwrap() && !has("no_program_has_this").unwrap());
        assert!(!has_name(|_, _| Ok(0), "main").unwrap(), "an empty file has none");
    }

    proptest! {
        #[test]
        fn no_file_makes_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let good = file(PT_INTERP, b"");
            let head = bytes.len().min(20);
            bytes[..head].copy_from_slice(&good[..head]);
            of(&bytes);
        }
    }
}

//! Where a file lies on its disk: the FIEMAP request, and what its flags mean for swap.
//!
//! Linux's swapon looks the same thing up inside the kernel and refuses what has no fixed place. FIEMAP needs no
//! privilege, unlike FIBMAP, and a file system without it (NFS, some FUSE) says so.
// UNSAFETY: an ioctl that fills a buffer.

use crate::sys::{self, Errno};

/// FS_IOC_FIEMAP: _IOWR('f', 11, struct fiemap), of which only the 32 bytes of its head count.
const FS_IOC_FIEMAP: u32 = 0xc020_660b;
/// FS_IOC_GETFLAGS: _IOR('f', 1, long).
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
/// Write out first what has no place on the disk yet.
const FLAG_SYNC: u32 = 1;
/// The attribute that `chattr +C` sets.
const FS_NOCOW_FL: u32 = 0x0080_0000;
/// Extents that are asked for at once: 7 KiB of stack.
const AT_ONCE: usize = 128;

/// struct fiemap_extent.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}
const _: () = assert!(size_of::<RawExtent>() == 56);

/// struct fiemap with its array.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; AT_ONCE],
}
const _: () = assert!(core::mem::offset_of!(Request, extents) == 32);

/// A piece of a file that lies in one piece on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins in the file.
    pub offset: u64,
    /// Where it begins on the disk.
    pub place: u64,
    /// Bytes.
    pub bytes: u64,
    /// FIEMAP_EXTENT_*.
    pub flags: u32,
}

/// Why a piece has no place of its own that stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Other files have the same blocks: writing gives it new ones.
    Shared,
    /// Compressed or encrypted by the file system: what is on the disk isn't what is in the file.
    Encoded,
    /// Inside the file's inode or together with other files' ends.
    Inline,
    /// Not at a boundary of blocks.
    NotAligned,
    /// No place yet, although it was asked to be written out.
    NotYet,
    /// The file system doesn't say where.
    Unknown,
}

impl Piece {
    /// Why slots can't lie in it. Blocks that were reserved and never written (`fallocate`) are fine.
    pub const fn unfit(&self) -> Option<Unfit> {
        const LAST: u32 = 0x1;
        const UNKNOWN: u32 = 0x2;
        const DELALLOC: u32 = 0x4;
        const ENCODED: u32 = 0x8;
        const DATA_ENCRYPTED: u32 = 0x80;
        const NOT_ALIGNED: u32 = 0x100;
        const DATA_INLINE: u32 = 0x200;
        const DATA_TAIL: u32 = 0x400;
        const UNWRITTEN: u32 = 0x800;
        const MERGED: u32 = 0x1000;
        const SHARED: u32 = 0x2000;
        // The more telling first: an inline piece is also not aligned, a delayed one also unknown.
        match self.flags {
            flags if flags & SHARED != 0 => Some(Unfit::Shared),
            flags if flags & (ENCODED | DATA_ENCRYPTED) != 0 => Some(Unfit::Encoded),
            flags if flags & (DATA_INLINE | DATA_TAIL) != 0 => Some(Unfit::Inline),
            flags if flags & DELALLOC != 0 => Some(Unfit::NotYet),
            flags if flags & NOT_ALIGNED != 0 => Some(Unfit::NotAligned),
            flags if flags & UNKNOWN != 0 => Some(Unfit::Unknown),
            // A flag of a later kernel: who knows what it means.
            flags if flags & !(LAST | UNWRITTEN | MERGED) != 0 => Some(Unfit::Unknown),
            _ => None,
        }
    }
}

/// Calls `visit` for each piece of the file's first `bytes` bytes, in their order, until it returns false; what has
/// no blocks is left out. What wasn't written to the disk yet is written first.
pub fn pieces(fd: i32, bytes: u64, mut visit: impl FnMut(Piece) -> bool) -> Result<(), Errno> {
    let extents = [RawExtent::default(); AT_ONCE];
    let mut request = Request {
        start: 0,
        length: 0,
        flags: FLAG_SYNC,
        mapped: 0,
        count: AT_ONCE as u32,
        reserved: 0,
        extents,
    };
    while request.start < bytes {
        request.length = bytes - request.start;
        // SAFETY: the request reads and writes one `Request`, which is `struct fiemap` followed by as many extents as
        // `count` says, and lives here.
        unsafe { sys::ioctl(fd, FS_IOC_FIEMAP, &raw mut request as usize)? };
        request.flags = 0;
        let found = &request.extents[..(request.mapped as usize).min(AT_ONCE)];
        let Some(last) = found.last() else { break };
        let piece = |raw: &RawExtent| Piece {
            offset: raw.logical,
            place: raw.physical,
            bytes: raw.length,
            flags: raw.flags,
        };
        if !found.iter().all(|raw| visit(piece(raw))) {
            break;
        }
        let next = last.logical.saturating_add(last.length);
        assert!(next > request.start, "the kernel's pieces go forward");
        request.start = next;
    }
    Ok(())
}

/// Whether writing gives the file new blocks each time, if its file system does so at all (btrfs). `None`: the file
/// system doesn't say.
pub fn is_copy_on_write(fd: i32) -> Option<bool> {
    let mut flags = 0_u64;
    // SAFETY: the request writes one int (its number says long) to a variable that lives here.
    unsafe { sys::ioctl(fd, FS_IOC_GETFLAGS, &raw mut flags as usize) }.ok()?;
    Some(flags as u32 & FS_NOCOW_FL == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn flags_that_have_no_fixed_place_are_named() {
        let unfit = |flags| Piece { offset: 0, place: 0, bytes: 4096, flags }.unfit();
        for fine in [0, 0x1, 0x800, 0x1801] {
            assert_eq!(unfit(fine), None);
        }
        for (flags, reason) in [
            (0x2000, Unfit::Shared),
            (0x2801, Unfit::Shared),
            (0x8, Unfit::Encoded),
            (0x88, Unfit::Encoded),
            (0x301, Unfit::Inline),
            (0x500, Unfit::Inline),
            (0x100, Unfit::NotAligned),
            (0x6, Unfit::NotYet),
            (0x2, Unfit::Unknown),
            (0x10_0000, Unfit::Unknown),
        ] {
            assert_eq!(unfit(flags), Some(reason), "{flags:#x}");
        }
    }

    /// Every second page is written, so no two pieces can be one. More than fit one request.
    #[test]
    fn written_pages_are_found_and_holes_are_left_out() {
        let path = format!("/var/tmp/.farpage-fiemap-{}", std::process::id());
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let pages = 2 * AT_ONCE as u64 + 10;
        for page in 0..pages {
            file.write_all_at(&[1; 4096], page * 8192).unwrap();
        }
        let (mut found, mut places) = (0, std::collections::HashSet::new());
        let result = pieces(file.as_raw_fd(), pages * 8192, |piece| {
            assert_eq!((piece.offset, piece.bytes, piece.unfit()), (found * 8192, 4096, None));
            found += 1;
            places.insert(piece.place)
        });
        match result {
            Ok(()) => assert_eq!((found, places.len() as u64), (pages, pages)),
            Err(errno) => eprintln!("skipped: FIEMAP doesn't work in /var/tmp ({errno:?})"),
        }
    }

    #[test]
    fn file_system_without_it_says_so() {
        let file = File::open("/proc/self/status").unwrap();
        assert!(pieces(file.as_raw_fd(), 4096, |_| true).is_err());
        assert_eq!(is_copy_on_write(file.as_raw_fd()), None);
    }
}

//! Finds where a file lies on its disk: the FIEMAP request, and what its flags mean for swap.
//!
//! Linux's swapon looks up the same inside the kernel, and refuses files without a fixed place. FIEMAP needs
//! no privilege, unlike FIBMAP. A file system without FIEMAP (NFS, some FUSE) answers with an error.
// UNSAFETY: an ioctl that fills a buffer.

use crate::sys::{self, Errno};

/// FS_IOC_FIEMAP: _IOWR('f', 11, struct fiemap). The size in its number is that of the structure's 32-byte
/// head.
const FS_IOC_FIEMAP: u32 = 0xc020_660b;
/// FS_IOC_GETFLAGS: _IOR('f', 1, long).
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
/// First write out data that has no place on the disk yet.
const FLAG_SYNC: u32 = 1;
/// The attribute that `chattr +C` sets.
const FS_NOCOW_FL: u32 = 0x0080_0000;
/// Extents per request, which take 7 KiB of stack.
const AT_ONCE: usize = 128;

/// The kernel's `struct fiemap_extent`.
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

/// The kernel's `struct fiemap` with its array.
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

/// A contiguous piece of a file that is also contiguous on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the piece in the file, in bytes.
    pub offset: u64,
    /// Offset of the piece on the disk, in bytes.
    pub place: u64,
    /// Length of the piece in bytes.
    pub bytes: u64,
    /// FIEMAP_EXTENT_*.
    pub flags: u32,
}

/// Why a piece has no fixed place of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Other files share the blocks. A write gives the piece new blocks.
    Shared,
    /// The file system compresses or encrypts the piece. The disk's content differs from the file's.
    Encoded,
    /// The piece lies inside the file's inode, or together with the ends of other files.
    Inline,
    /// The piece isn't aligned to blocks.
    NotAligned,
    /// The piece has no place yet, although the request asked to write it out.
    NotYet,
    /// The file system doesn't say where the piece lies.
    Unknown,
}

impl Piece {
    /// Returns why slots can't lie in the piece. Blocks that were reserved and never written (`fallocate`)
    /// are fine.
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
        // The more telling reason comes first: an inline piece is also not aligned, and a delayed piece is
        // also unknown.
        match self.flags {
            flags if flags & SHARED != 0 => Some(Unfit::Shared),
            flags if flags & (ENCODED | DATA_ENCRYPTED) != 0 => Some(Unfit::Encoded),
            flags if flags & (DATA_INLINE | DATA_TAIL) != 0 => Some(Unfit::Inline),
            flags if flags & DELALLOC != 0 => Some(Unfit::NotYet),
            flags if flags & NOT_ALIGNED != 0 => Some(Unfit::NotAligned),
            flags if flags & UNKNOWN != 0 => Some(Unfit::Unknown),
            // A flag of a later kernel may mean anything.
            flags if flags & !(LAST | UNWRITTEN | MERGED) != 0 => Some(Unfit::Unknown),
            _ => None,
        }
    }
}

/// Calls `visit` for each piece of the file's first `bytes` bytes, in their order, until it returns false.
/// Ranges without blocks are left out. Data that wasn't written to the disk yet is written first.
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
        // SAFETY: the request reads and writes one `Request` on our stack. The `Request` is a `struct fiemap`
        // followed by as many extents as `count` says.
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

/// Returns whether each write gives the file new blocks, provided that its file system does so at all
/// (btrfs). `None` if the file system doesn't say.
pub fn is_copy_on_write(fd: i32) -> Option<bool> {
    let mut flags = 0_u64;
    // SAFETY: the request writes one int (its number says long) to a variable on our stack.
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

    /// Every second page is written, so no two pieces can be one. The pieces don't fit into one request.
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

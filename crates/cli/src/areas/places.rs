//! Where the slots of a prepared area lie on the disk: the extents, and how far apart they are. The file
//! system is asked once, when the area is opened. A file without fixed places is refused with the
//! reason, as swapon does.
//!
//! Temporary files and empty ones get their blocks while the program runs, so there is nothing to ask yet.

use crate::host::sys::FileSystem;
use crate::text::failure::{Failure, quoted};
use farpage_core::areas::extents::{Extent, Hole, Mapped, Tally, whole_pages};
use farpage_core::units::PAGE_BYTES;
use farpage_os::fiemap::{self, Unfit};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

const PAGE: u64 = PAGE_BYTES as u64;

/// Places, or why they aren't known.
pub type Found = Result<Places, String>;

/// Knowledge about an area's places.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Extents: runs of slots that lie side by side, in the order of their slots.
    pub extents: Vec<Extent>,
    /// Bytes from the first byte of the lowest slot to the last byte of the highest, the header's
    /// slot not counted.
    pub span_bytes: u64,
}

impl Places {
    fn add(&mut self, tally: &mut Tally, extent: Extent) {
        if tally.add(extent) {
            self.extents.push(extent);
        } else if let Some(last) = self.extents.last_mut() {
            last.count += extent.count;
        }
        self.span_bytes = tally.span() * PAGE;
    }

    /// Returns the places of a device, which is one extent.
    pub fn of_device(slots: u32) -> Places {
        let mut places = Places::default();
        places.add(&mut Tally::default(), Extent { slot: 0, count: slots, block: 0 });
        places
    }

    /// Returns the places of a swap file with this many slots. If the places aren't known, the file can be
    /// used nevertheless. An error says why the file can't be used.
    pub fn of_file(file: &File, path: &Path, disk: FileSystem, slots: u32) -> Result<Found, Failure> {
        if disk.name() == "btrfs" && fiemap::is_copy_on_write(file.as_raw_fd()) == Some(true) {
            return Err(copied_on_write(path, slots));
        }
        let (mut mapped, mut unfit) = (Vec::new(), None);
        let looked = fiemap::pieces(file.as_raw_fd(), u64::from(slots) * PAGE, |piece| {
            unfit = piece.unfit();
            mapped.push(Mapped { offset: piece.offset, place: piece.place, bytes: piece.bytes });
            unfit.is_none()
        });
        match (looked, unfit) {
            (Ok(()), None) => in_whole_pages(&mapped, path, slots),
            (Ok(()), Some(unfit)) => Err(without_a_place(path, slots, unfit)),
            (Err(errno), _) => Ok(Err(format!(
                "the file system of {} ({}) doesn't say where it lies (FIEMAP: {}); it is used without extents",
                path.display(),
                disk.name(),
                std::io::Error::from_raw_os_error(errno.0)
            ))),
        }
    }
}

fn in_whole_pages(mapped: &[Mapped], path: &Path, slots: u32) -> Result<Found, Failure> {
    let (mut places, mut tally) = (Places::default(), Tally::default());
    let add = |extent| places.add(&mut tally, extent);
    let found = whole_pages(mapped, u64::from(slots) * PAGE, slots, add)
        .map_err(|hole| with_a_hole(path, slots, hole))?;
    // The kernel can't use a page that is scattered in smaller blocks as a slot. We reach slots through the
    // file system, which puts the blocks together.
    Ok(if found == slots {
        Ok(places)
    } else {
        Err(format!(
            "{} of {slots} pages of swap file {} lie in smaller blocks; it is used without extents",
            slots - found,
            path.display()
        ))
    })
}

fn with_a_hole(path: &Path, slots: u32, hole: Hole) -> Failure {
    let (name, bytes) = (quoted(path), u64::from(slots) * PAGE);
    Failure::new(format!(
        "swap file {} has holes: nothing is allocated at byte {}",
        path.display(),
        hole.offset
    ))
    .because("it was made with truncate or copied as a sparse file; swapon refuses it too")
    .fix(format!("allocate them, the rest stays as it is: `fallocate -l {bytes} {name}`"))
    .fix(format!("write it: `dd if=/dev/zero of={name} bs=4096 count={slots} && mkswap {name}`"))
    .fix(format!("let Farpage use it as an empty file, which grows: `truncate -s 0 {name}`"))
}

fn copied_on_write(path: &Path, slots: u32) -> Failure {
    Failure::new(format!("swap file {} is copied on write", path.display()))
        .because("btrfs gives such a file new blocks at each write; swapon refuses it too")
        .fix(anew(path, slots))
}

fn without_a_place(path: &Path, slots: u32, unfit: Unfit) -> Failure {
    let name = quoted(path);
    let of_the_kind = |what: &str| Failure::new(format!("swap file {} {what}", path.display()));
    match unfit {
        Unfit::Shared => of_the_kind("shares blocks with another file")
            .because("it is a reflink copy, or in a snapshot: a write would give it new blocks")
            .fix(format!("copy it really: `cp --reflink=never {name} {name}.new && mv {name}.new {name}`"))
            .fix(anew(path, slots)),
        Unfit::Encoded => of_the_kind("is compressed or encrypted by its file system")
            .because("what is on the disk is not what is in the file; swapon refuses it too")
            .fix(anew(path, slots))
            .fix("name a directory instead: --swap DIRECTORY"),
        Unfit::Inline => of_the_kind("lies inside its inode, or in one block with other files")
            .because("its file system packs small files; swapon refuses such a file too")
            .fix(anew(path, slots)),
        Unfit::NotAligned | Unfit::NotYet | Unfit::Unknown => {
            of_the_kind("has parts that are at no fixed place on the disk")
                .because("its file system allocates them late, or doesn't say where; swapon refuses it too")
                .fix(anew(path, slots))
                .fix("name a directory instead: --swap DIRECTORY")
        }
    }
}

/// Returns how to make a file that stays where it is, on file systems that copy on write, too.
fn anew(path: &Path, slots: u32) -> String {
    let (name, bytes) = (quoted(path), u64::from(slots) * PAGE);
    format!(
        "make it anew (`chattr +C` is for btrfs): `rm {name} && touch {name} && chattr -f +C {name}; \
         fallocate -l {bytes} {name} && chmod 600 {name} && mkswap {name}`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_fix_that_names_the_file() {
        let path = Path::new("/swap");
        for unfit in
            [Unfit::Shared, Unfit::Encoded, Unfit::Inline, Unfit::NotAligned, Unfit::NotYet, Unfit::Unknown]
        {
            let text = without_a_place(path, 100, unfit).to_string();
            assert!(
                text.contains("swap file /swap ") && text.contains("fallocate -l 409600 /swap"),
                "{text}"
            );
        }
        let shared = without_a_place(path, 100, Unfit::Shared).to_string();
        assert!(shared.contains("cp --reflink=never"), "{shared}");
        assert!(copied_on_write(path, 100).to_string().contains("chattr -f +C /swap"));
    }

    #[test]
    fn pages_in_smaller_blocks_leave_the_extents_unknown() {
        let page = |offset: u64, place: u64| Mapped { offset, place, bytes: PAGE };
        let places = |mapped: &[Mapped]| in_whole_pages(mapped, Path::new("/swap"), 3).unwrap();
        let whole = [page(0, 5 * PAGE), page(PAGE, 6 * PAGE), page(2 * PAGE, 2 * PAGE)];
        let extents = vec![Extent { slot: 0, count: 2, block: 5 }, Extent { slot: 2, count: 1, block: 2 }];
        assert_eq!(places(&whole), Ok(Places { extents, span_bytes: 5 * PAGE }));
        let scattered = [whole[0], page(PAGE, 9 * PAGE + 1024), whole[2]];
        assert!(places(&scattered).unwrap_err().contains("1 of 3 pages"));
    }

    #[test]
    fn device_is_one_extent_as_long_as_its_slots() {
        let extents = vec![Extent { slot: 0, count: 100, block: 0 }];
        assert_eq!(Places::of_device(100), Places { extents, span_bytes: 99 * PAGE });
    }
}

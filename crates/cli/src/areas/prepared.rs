//! Areas that the user has made: files and devices that mkswap has prepared, and empty files. A header is
//! believed only as far as what it says fits. No other file or device is ever taken for swap.

use super::{
    Area, DISK_RESERVE_PERCENT, FIX_ANOTHER_PLACE, Kind, cut, disk_of, growing, mark, not_seen, together,
    too_small,
};
use crate::areas::header::{self, Header, HeaderError, SLOTS_MIN};
use crate::areas::places::Places;
use crate::areas::swap_argument::SwapArgument;
use crate::host::sys;
use crate::text::failure::{Failure, quoted};
use crate::text::numbers::iec;
use farpage_core::areas::Placement;
use farpage_core::units::{PAGE_BYTES, SLOTS_PER_AREA_MAX};
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

/// Opens a file as an area: a prepared file, or an empty one, which grows.
pub fn open_file(argument: &SwapArgument, file: File) -> Result<Area, Failure> {
    let path = &argument.path;
    let mut disk = disk_of(&file, path)?;
    let metadata = file.metadata().map_err(|error| not_seen(path, &error))?;
    let warning = open_to_others(path, &metadata);
    // Content that a run has left is removed only when the next run begins: this process may not begin one.
    if metadata.len() == 0 || mark::was_left(&file) {
        disk.available = disk.available.saturating_add(metadata.blocks() * 512);
        let area = growing(argument, file, disk, Kind::EmptyFile)?;
        return Ok(Area { warning: together([warning, area.warning]), ..area });
    }
    let header = read_header(&file, path, metadata.len(), Kind::SwapFile)?;
    if !header.bad_pages.is_empty() {
        return Err(damaged(path, "its header lists bad pages, which only devices can have"));
    }
    let area = prepared(argument, file, header, metadata.len(), Kind::SwapFile)?;
    let (places, unknown) = match Places::of_file(&area.file, path, disk, area.slots)? {
        Ok(places) => (Some(places), None),
        Err(why) => (None, Some(why)),
    };
    // If the file system doesn't say where the file lies, the file may have holes, which take space when they
    // are written to.
    let grows = places.is_none() && metadata.blocks() * 512 < metadata.len();
    let disk_reserve_bytes = if grows { disk.bytes / 100 * DISK_RESERVE_PERCENT } else { 0 };
    let warning = together([warning, unknown, area.warning]);
    Ok(Area { grows, disk_reserve_bytes, places, warning, ..area })
}

/// Opens a block device as an area. The device must be prepared.
pub fn open_device(argument: &SwapArgument, file: File) -> Result<Area, Failure> {
    let path = &argument.path;
    let bytes = sys::length(&file).map_err(|error| {
        Failure::new(format!("the size of {} is unknown: {error}", path.display())).fix(FIX_ANOTHER_PLACE)
    })?;
    let header = read_header(&file, path, bytes, Kind::Device)?;
    let open = file.metadata().ok().and_then(|metadata| open_to_others(path, &metadata));
    let area = prepared(argument, file, header, bytes, Kind::Device)?;
    let warning = together([open, area.warning]);
    Ok(Area { places: Some(Places::of_device(area.slots)), warning, ..area })
}

/// Returns a warning if other users may read or write what is evicted: swapon warns of the same modes and
/// owners. A device usually has a group of administrators, and root can read everything anyway.
fn open_to_others(path: &Path, metadata: &Metadata) -> Option<String> {
    let is_device = metadata.file_type().is_block_device();
    let (what, others) = if is_device { ("device", 0o007) } else { ("file", 0o077) };
    let (mode, owner) = (metadata.mode(), metadata.uid());
    let may = |bits: u32| mode & others & bits != 0;
    let read_or_written = match (may(0o444), may(0o222)) {
        (true, true) => "read and written",
        (true, false) => "read",
        (false, true) => "written",
        (false, false) if is_device || [0, sys::effective_user()].contains(&owner) => return None,
        (false, false) => {
            return Some(format!(
                "swap {what} {} belongs to another user (uid {owner}), who can read it: it will hold the program's memory; `chown {} {}`",
                path.display(),
                sys::effective_user(),
                quoted(path)
            ));
        }
    };
    let closed = if is_device { "o=" } else { "600" };
    Some(format!(
        "swap {what} {} can be {read_or_written} by others (mode {:04o}): it will hold the program's memory; `chmod {closed} {}`",
        path.display(),
        mode & 0o7777,
        quoted(path)
    ))
}

fn read_header(file: &File, path: &Path, bytes: u64, kind: Kind) -> Result<Header, Failure> {
    let mut page = [0; PAGE_BYTES];
    if bytes < PAGE_BYTES as u64 {
        return Err(foreign(path, HeaderError::Missing, kind));
    }
    file.read_exact_at(&mut page, 0).map_err(|error| {
        Failure::new(format!("swap path {} can't be read: {error}", path.display())).fix(FIX_ANOTHER_PLACE)
    })?;
    header::parse(&page).map_err(|error| match error {
        HeaderError::TooSmall(pages) => too_small(path, u64::from(pages)),
        error if error.is_damage() => damaged(path, &error.to_string()),
        error => foreign(path, error, kind),
    })
}

fn foreign(path: &Path, error: HeaderError, kind: Kind) -> Failure {
    let name = quoted(path);
    let failure = Failure::new(format!("swap path {} holds something else: {error}", path.display()));
    if error == HeaderError::OfARun && kind != Kind::Device {
        return failure
            .because("whether that run goes on isn't known: its lock isn't seen here")
            .fix(format!("if that run has ended: `truncate -s 0 {name}`"));
    }
    let failure = failure.because("Farpage never overwrites data that isn't swap");
    let elsewhere = "name another place: --swap DIRECTORY";
    match kind {
        _ if error == HeaderError::Hibernation => failure.fix(elsewhere),
        Kind::Device => failure.fix(format!("if its content can be given up: `mkswap {name}`")),
        // Most likely the user typed the wrong name, so this fix comes first. An emptied file holds nothing
        // that mkswap could leave behind, and needs no size.
        Kind::Temporary | Kind::EmptyFile | Kind::SwapFile => failure.fix(elsewhere).fix(format!(
            "if its content can be given up: `truncate -s 0 {name}` (Farpage then uses it as an empty file)"
        )),
    }
}

fn damaged(path: &Path, why: &str) -> Failure {
    let name = quoted(path);
    Failure::new(format!("swap path {} has a damaged header: {why}", path.display()))
        .fix(format!("write a new one (what is in it is lost): `mkswap {name}`"))
}

fn prepared(
    argument: &SwapArgument,
    file: File,
    header: Header,
    bytes: u64,
    kind: Kind,
) -> Result<Area, Failure> {
    let path = argument.path.clone();
    let slots = slots_of_header(&header, bytes, argument.bytes).map_err(|error| match error {
        SizeError::Shorter { pages, needed } => damaged(
            &path,
            &format!("it says {needed} pages, but there are only {pages}: the file was cut off"),
        ),
        SizeError::TooSmall(pages) => too_small(&path, pages),
        SizeError::Asked { there } => Failure::new(format!(
            "swap path {} has no room for {}: it holds {}",
            path.display(),
            iec(argument.bytes.unwrap_or(0)),
            iec(there)
        ))
        .fix("leave the size out, or make the file larger and run mkswap again"),
    })?;
    let expected_bytes = argument.bytes.unwrap_or((u64::from(header.last_page) + 1) * PAGE_BYTES as u64);
    let warning = cut(&path, slots, expected_bytes, "an area has at most 1 TiB");
    let bad_slots = header.bad_pages.into_iter().filter(|bad| *bad < slots).collect();
    Ok(Area {
        file,
        path,
        kind,
        slots,
        place: Placement::default(),
        priority: 0,
        grows: false,
        discards: false,
        discards_first: false,
        bad_slots,
        disk_reserve_bytes: 0,
        places: None,
        warning,
        mark: None,
    })
}

#[derive(Debug, PartialEq, Eq)]
enum SizeError {
    Shorter { pages: u64, needed: u64 },
    TooSmall(u64),
    Asked { there: u64 },
}

/// Returns the slots to use of an area with a header, in a file or device of `bytes`. `asked` is the size
/// that the user asked for.
fn slots_of_header(header: &Header, bytes: u64, asked: Option<u64>) -> Result<u32, SizeError> {
    let (pages, needed) = (bytes / PAGE_BYTES as u64, u64::from(header.last_page) + 1);
    if pages < needed {
        return Err(SizeError::Shorter { pages, needed });
    }
    let asked_pages = asked.map_or(needed, |asked| asked / PAGE_BYTES as u64);
    if asked_pages > needed {
        return Err(SizeError::Asked { there: needed * PAGE_BYTES as u64 });
    }
    if asked_pages < u64::from(SLOTS_MIN) {
        return Err(SizeError::TooSmall(asked_pages));
    }
    Ok(asked_pages.min(u64::from(SLOTS_PER_AREA_MAX)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The advice depends on the kind: one advice for both would allocate 8 GiB in a device, or spoil
    /// what is in a file.
    #[test]
    fn what_is_not_swap_is_fixed_by_its_kind() {
        let text = |error, kind| foreign(Path::new("/x"), error, kind).to_string();
        let device = text(HeaderError::Missing, Kind::Device);
        assert!(device.contains("fix: if its content can be given up: `mkswap /x`"), "{device}");
        let file = text(HeaderError::Missing, Kind::SwapFile);
        assert!(file.contains("--swap DIRECTORY") && file.contains("`truncate -s 0 /x`"), "{file}");
        for kind in [Kind::Device, Kind::SwapFile] {
            let asleep = text(HeaderError::Hibernation, kind);
            assert!(asleep.contains("--swap DIRECTORY") && !asleep.contains("given up"), "{asleep}");
        }
    }
}

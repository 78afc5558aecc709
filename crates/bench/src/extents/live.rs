//! The live part: a swap file in 20,000 pieces against a file in a few. The same program runs on both under
//! the same budget.
//!
//! The files never have a name and are passed on below /proc, so no file is left behind, however the
//! benchmark ends.
// UNSAFETY: fallocate and fadvise are C functions. O_DIRECT needs aligned memory, given as bytes.

use crate::Effort;
use crate::live::{self, Outcome};
use crate::measure::{self, Random};
use farpage_core::areas::extents::{Mapped, Tally, whole_pages};
use farpage_core::units::{PAGE_BYTES, PageBytes, SLOTS_PER_AREA_MAX};
use farpage_os::fiemap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

const PAGE: u64 = PAGE_BYTES as u64;
const MIB: u64 = 1 << 20;
/// Memory of the program, as a word of the command line.
const RAM: &str = "64M";
const RAM_BYTES: u64 = 64 << 20;
/// Bytes of a request to the disk alone: about the mean size of Farpage's writes.
pub const REQUEST_BYTES: usize = 128 << 10;
/// Bytes of the file that suffice to show what the disk does.
const DISK_BYTES_MAX: u64 = 512 << 20;
/// Threads of the program. A disk with a single requester waits most of the time.
pub const THREADS: &str = "4";

/// One of the two files.
pub struct Area {
    file: File,
    /// Number of pieces, as `filefrag` counts them.
    pub extents: u32,
    /// Distance from the first piece to the last.
    pub span_bytes: u64,
}

/// The disk's rates without Farpage. The file is accessed from front to back in requests of
/// [`REQUEST_BYTES`], one at a time, past the page cache.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// MB written per second.
    pub out_mb_s: f64,
    /// MB read per second.
    pub in_mb_s: f64,
}

/// The results of one run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// MB per second of writing, of the bytes that the program wrote beyond its budget.
    pub out_mb_s: f64,
    /// MB per second of reading the same bytes back.
    pub in_mb_s: f64,
    /// Pages that went out and in.
    pub pages: f64,
    /// Mean KiB of a write request.
    pub write_kib: f64,
    /// Seconds of the run.
    pub seconds: f64,
}

/// The measurements.
pub struct Found {
    /// The file in many pieces, and the file in a few.
    pub areas: [Area; 2],
    /// Bytes of each file.
    pub bytes: u64,
    /// Bytes of the program, which fills the files from the front.
    pub program: u64,
    /// The disk alone on each file, round by round.
    pub disks: [Vec<Disk>; 2],
    /// Runs of the program on each file.
    pub runs: [Vec<Run>; 2],
}

/// Makes both files, and runs the program on each in turns. `Err` says why the experiment isn't possible
/// here.
pub fn run(effort: Effort) -> Result<Found, String> {
    // Some more pieces than 20,000, because a few neighbours in the file are also neighbours on the disk.
    let (pieces, program, rounds) = effort.pick((20_500, 1024 * MIB, 5), (600, 96 * MIB, 2));
    let directory = live::swap_directory()?;
    let failed = |error: io::Error| format!("a swap file can't be made in {}: {error}", directory.display());
    let (fragmented, bytes) = in_pieces(&directory, pieces).map_err(failed)?;
    let whole = in_one_piece(&directory, bytes).map_err(failed)?;
    let used = bytes.min(program + program / 4);
    let areas = [prepared(fragmented, bytes, used)?, prepared(whole, bytes, used)?];
    if areas[0].extents < pieces / 41 * 40 || areas[1].extents * 20 > areas[0].extents {
        return Err(format!(
            "the file system in {} puts files together in {} and {} pieces instead of {pieces} and a few",
            directory.display(),
            areas[0].extents,
            areas[1].extents
        ));
    }
    let disks = both(rounds, |who| disk_alone(&areas[who].file, program.min(DISK_BYTES_MAX)))?;
    let runs = both(rounds, |who| run_on(&areas[who], program))?;
    Ok(Found { areas, bytes, program, disks, runs })
}

/// Measures both files in turns.
fn both<T>(rounds: usize, run: impl FnMut(usize) -> Result<T, String>) -> Result<[Vec<T>; 2], String> {
    let (results, failed) = measure::interleaved_until_failure(rounds, 2, run)?;
    let both = results.try_into().map_err(|_| "two files have two results".to_owned());
    failed.map_or(both, Err)
}

fn without_a_name(directory: &Path) -> io::Result<File> {
    // O_EXCL isn't set, because it would forbid opening the file again below /proc.
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(directory)
}

fn allocate(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as libc::off_t, bytes as libc::off_t) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a file of pieces of 256 to 768 KiB. The published file's pieces had 945 kB on average. Every second
/// piece is allocated first, then the pieces between, so each piece lies far from its neighbours. Two files
/// that grow in turns don't do, because ext4 usually puts each of them together.
fn in_pieces(directory: &Path, pieces: u32) -> io::Result<(File, u64)> {
    let file = without_a_name(directory)?;
    let (mut random, mut bytes) = (Random::new(20), 0);
    let mut places = Vec::new();
    for _ in 0..pieces {
        let length = (64 + random.below(129)) * PAGE;
        places.push((bytes, length));
        bytes += length;
    }
    let (first, between) = (places.iter().step_by(2), places.iter().skip(1).step_by(2));
    first.chain(between).try_for_each(|(offset, length)| allocate(&file, *offset, *length))?;
    Ok((file, bytes))
}

fn in_one_piece(directory: &Path, bytes: u64) -> io::Result<File> {
    let file = without_a_name(directory)?;
    allocate(&file, 0, bytes)?;
    Ok(file)
}

/// Writes every block that will be `used` once, so that no run pays for the file system's work at a first
/// write. Then writes the header that mkswap writes, and counts the pieces.
fn prepared(file: File, bytes: u64, used: u64) -> Result<Area, String> {
    let written = || -> io::Result<()> {
        let zeros = vec![0; MIB as usize];
        for at in (0..used).step_by(MIB as usize) {
            file.write_all_at(&zeros[..MIB.min(used - at) as usize], at)?;
        }
        let slots = (bytes / PAGE) as u32;
        file.write_all_at(&1_u32.to_ne_bytes(), 1024)?;
        file.write_all_at(&(slots - 1).to_ne_bytes(), 1028)?;
        file.write_all_at(b"SWAPSPACE2", PAGE - 10)?;
        file.sync_all()
    };
    written().map_err(|error| format!("a file of {bytes} bytes can't be written: {error}"))?;
    // SAFETY: the call takes no pointers. The call is only a hint that the page cache needn't keep the file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let tally = tally(&file, bytes)?;
    Ok(Area { file, extents: tally.extents(), span_bytes: tally.span() * PAGE })
}

/// Counts the pieces of a file.
fn tally(file: &File, bytes: u64) -> Result<Tally, String> {
    let mut mapped = Vec::new();
    let looked = fiemap::pieces(file.as_raw_fd(), bytes, |piece| {
        mapped.push(Mapped { offset: piece.offset, place: piece.place, bytes: piece.bytes });
        true
    });
    looked.map_err(|errno| format!("the file system doesn't say where files lie (FIEMAP: {errno:?})"))?;
    let mut tally = Tally::default();
    whole_pages(&mapped, bytes, SLOTS_PER_AREA_MAX, |extent| _ = tally.add(extent))
        .map_err(|hole| format!("the file has a {hole:?}"))?;
    Ok(tally)
}

fn disk_alone(file: &File, bytes: u64) -> Result<Disk, String> {
    let failed = |error: io::Error| format!("a swap file can't be used past the page cache: {error}");
    let direct = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path_of(file))
        .map_err(failed)?;
    let mut pages = vec![PageBytes::ZERO; REQUEST_BYTES / PAGE_BYTES];
    let buffer = as_bytes(&mut pages);
    // The first request would overwrite the header.
    let places = || (1..bytes / REQUEST_BYTES as u64).map(|request| request * REQUEST_BYTES as u64);
    let mb_s =
        |began: Instant| places().count() as f64 * REQUEST_BYTES as f64 / 1e6 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    places().try_for_each(|at| direct.write_all_at(buffer, at)).map_err(failed)?;
    let out_mb_s = mb_s(began);
    let began = Instant::now();
    places().try_for_each(|at| direct.read_exact_at(buffer, at)).map_err(failed)?;
    Ok(Disk { out_mb_s, in_mb_s: mb_s(began) })
}

fn as_bytes(pages: &mut [PageBytes]) -> &mut [u8] {
    let bytes = size_of_val(pages);
    // SAFETY: a page is an array of bytes without padding, and the slice is borrowed exclusively.
    unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), bytes) }
}

/// Returns a path that opens the file again. The path is valid for as long as this process has the file open.
fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Runs a program of `bytes` without compression, so that every page that doesn't fit goes to the area.
fn run_on(area: &Area, bytes: u64) -> Result<Run, String> {
    let path = path_of(&area.file);
    let options = ["--ram", RAM, "--codec", "none", "--pool", "1M", "--swap", &path];
    let size = bytes.to_string();
    let outcome = live::under(&options, &["fill", "--bytes", &size, "--threads", THREADS])?;
    if outcome.counter("pswpin") * (PAGE as f64) < (bytes - RAM_BYTES) as f64 * 0.9 {
        return Err("pages did not go to the area".into());
    }
    Ok(of_outcome(&outcome, bytes))
}

fn of_outcome(outcome: &Outcome, bytes: u64) -> Run {
    Run {
        out_mb_s: (bytes - RAM_BYTES) as f64 / 1e6 / outcome.number("fill_seconds"),
        in_mb_s: (bytes - RAM_BYTES) as f64 / 1e6 / outcome.number("read_seconds"),
        pages: outcome.counter("pswpout") + outcome.counter("pswpin"),
        write_kib: outcome.counter("area_slots") * PAGE as f64 / 1024.0 / outcome.counter("area_writes"),
        seconds: outcome.wall.as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_allocated_in_random_order_is_in_pieces() {
        let (file, bytes) = match in_pieces(Path::new("/var/tmp"), 50) {
            Ok(made) => made,
            Err(error) => {
                return eprintln!("skipped: no fallocate in /var/tmp, or no unnamed files: {error}");
            }
        };
        match prepared(file, bytes, MIB) {
            Ok(area) => {
                assert!((45..=55).contains(&area.extents), "{} extents", area.extents);
                assert!(area.span_bytes >= bytes - PAGE, "{} bytes", area.span_bytes);
            }
            Err(why) => eprintln!("skipped: {why}"),
        }
    }
}

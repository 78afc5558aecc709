//! The mark in the first page of a file that was empty, while a run has the file as an area. No page of a
//! program is ever there.
//!
//! The supervisor empties the file at the end of its run, unless it is killed. The mark tells the next run
//! that the content is a run's, and the next run empties the file. The mark names the file: seen below
//! another mount, the same content may belong to another file, with a lock of its own.

use crate::areas::header;
use farpage_core::units::PAGE_BYTES;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::SystemTime;

/// File with an id that changes at each start of the machine. The locks of other machines aren't seen on
/// every file system.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The mark of one run.
#[derive(Debug)]
pub struct Mark(Box<[u8; PAGE_BYTES]>);

impl Mark {
    /// Empties the file, and writes a mark that no other run has.
    pub fn renew(file: &File) -> io::Result<Mark> {
        file.set_len(0)?;
        let mark = Mark::new(file)?;
        file.write_all_at(&mark.0[..], 0)?;
        Ok(mark)
    }

    fn new(file: &File) -> io::Result<Mark> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let text = format!(
            "{}Pages of programs under `farpage run`, of which process {} is the supervisor ({now}). It empties this file, \
             and so does the next run.\n",
            place_of(file)?,
            std::process::id()
        );
        let mut page = Box::new([0; PAGE_BYTES]);
        page[..text.len()].copy_from_slice(text.as_bytes());
        page[header::SIGNATURE_AT..].copy_from_slice(header::SIGNATURE_OF_A_RUN);
        Ok(Mark(page))
    }

    /// Whether the file has this mark.
    pub fn is_in(&self, file: &File) -> bool {
        first_page(file).is_some_and(|page| page == self.0)
    }
}

/// Whether a run has left its mark in the file since this machine was started. The run may still go on unless
/// the caller has the file's lock.
pub fn was_left(file: &File) -> bool {
    let is_of_this_file = |page: &[u8]| place_of(file).is_ok_and(|place| page.starts_with(place.as_bytes()));
    first_page(file)
        .is_some_and(|page| page.ends_with(header::SIGNATURE_OF_A_RUN) && is_of_this_file(&page[..]))
}

fn first_page(file: &File) -> Option<Box<[u8; PAGE_BYTES]>> {
    let mut page = Box::new([0; PAGE_BYTES]);
    file.read_exact_at(&mut page[..], 0).is_ok().then_some(page)
}

/// Returns the start of the machine, the file system and the file, as a line.
fn place_of(file: &File) -> io::Result<String> {
    let (id, metadata) = (fs::read_to_string(BOOT_ID)?, file.metadata()?);
    match id.trim() {
        "" => Err(io::ErrorKind::InvalidData.into()),
        id => Ok(format!("{id} {} {}\n", metadata.dev(), metadata.ino())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_run_has_left_since_the_machine_started_is_taken() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"of the run before", 9 * PAGE_BYTES as u64).unwrap();
        let mark = Mark::renew(&file).unwrap();
        assert!(mark.is_in(&file) && was_left(&file));
        assert_eq!(file.metadata().unwrap().len(), PAGE_BYTES as u64);
        for at in [0, PAGE_BYTES - 1] {
            file.write_all_at(b"-", at as u64).unwrap();
            assert!(!was_left(&file) && !mark.is_in(&file), "byte {at} is another");
            file.write_all_at(&mark.0[..], 0).unwrap();
            assert!(was_left(&file));
        }
        file.set_len(PAGE_BYTES as u64 - 1).unwrap();
        assert!(!was_left(&file), "no whole page");
        file.set_len(0).unwrap();
        assert!(!was_left(&file), "nothing");
    }

    /// Below an overlay a file has another lock than below the overlay's upper directory. The file of a run
    /// that goes on must not be emptied.
    #[test]
    fn mark_counts_in_its_own_file_alone() {
        let [one, copy] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let mark = Mark::renew(&one).unwrap();
        copy.write_all_at(&mark.0[..], 0).unwrap();
        assert!(was_left(&one) && !was_left(&copy));
    }

    #[test]
    fn marks_of_two_runs_are_told_apart() {
        let file = tempfile::tempfile().unwrap();
        let one = Mark::renew(&file).unwrap();
        let other = Mark::renew(&file).unwrap();
        assert!(!one.is_in(&file) && other.is_in(&file));
    }
}

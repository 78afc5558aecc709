//! Notes about programs that processes of the run exec, until these programs have joined the run. A program
//! that never joins runs outside of the budget.
//!
//! A process that is about to exec a program leaves a note here, and takes the note back if the call fails.
//! The new program removes the note when it joins. The supervisor finds the notes that are left, and reports
//! them.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Notes: programs that can be about to join at the same time.
const NOTES: usize = 128;
/// Words of eight bytes that a note keeps of a path.
const WORDS: usize = 15;
/// Bytes that a note keeps of a path.
pub const PATH_BYTES_KEPT: usize = WORDS * 8;
/// Process number of a note that is being written. No process has this number.
const WRITING: u32 = u32::MAX;

/// The note about one program.
#[repr(C)]
struct Note {
    /// Number of the process that execs the program; 0 if the note is free.
    process: AtomicU32,
    /// Length of the kept path in bytes.
    length: AtomicU32,
    path: [AtomicU64; WORDS],
}

impl Note {
    fn is_taken_from(&self, process: u32) -> bool {
        self.process.compare_exchange(process, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// All notes of a run. Any bytes are valid.
#[repr(C)]
pub struct Started {
    notes: [Note; NOTES],
    /// Programs that found no free note.
    missed: AtomicU64,
}

/// A program that has not joined.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Number of its process.
    pub process: u32,
    path: [u8; PATH_BYTES_KEPT],
    length: usize,
}

impl Program {
    /// Returns the program's path, or the beginning of a path longer than [`PATH_BYTES_KEPT`].
    pub fn path(&self) -> &[u8] {
        &self.path[..self.length]
    }
}

impl Started {
    /// Leaves a note that a process is about to exec this path. Returns the note's number, if there was a
    /// free note.
    pub fn executes(&self, process: u32, path: &[u8]) -> Option<usize> {
        let is_mine = |note: &Note| {
            note.process.compare_exchange(0, WRITING, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let Some(at) = self.notes.iter().position(is_mine) else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let note = &self.notes[at];
        let path = &path[..path.len().min(PATH_BYTES_KEPT)];
        for (to, bytes) in note.path.iter().zip(path.chunks(8)) {
            let word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            to.store(word, Ordering::Relaxed);
        }
        note.length.store(path.len() as u32, Ordering::Relaxed);
        // Ordering: Release publishes the path to `waiting`.
        note.process.store(process, Ordering::Release);
        Some(at)
    }

    /// Takes a note back, because the exec failed or the supervisor has seen the note. Returns false if the
    /// process has joined. Another process may have the note by now, and keeps it.
    pub fn take_back(&self, at: usize, process: u32) -> bool {
        self.notes.get(at).is_some_and(|note| note.is_taken_from(process))
    }

    /// Removes the notes of a process that has joined the run.
    pub fn joins(&self, process: u32) {
        let is_its = |note: &&Note| note.process.load(Ordering::Relaxed) == process;
        self.notes.iter().filter(is_its).for_each(|note| _ = note.is_taken_from(process));
    }

    /// Returns the programs that have not joined, each with its note's number.
    pub fn waiting(&self) -> impl Iterator<Item = (usize, Program)> {
        self.notes.iter().enumerate().filter_map(|(at, note)| {
            // Ordering: Acquire pairs with the Release in `executes`.
            let process = note.process.load(Ordering::Acquire);
            let mut program = Program { process, path: [0; PATH_BYTES_KEPT], length: 0 };
            program.length = (note.length.load(Ordering::Relaxed) as usize).min(PATH_BYTES_KEPT);
            for (to, from) in program.path.chunks_exact_mut(8).zip(&note.path) {
                to.copy_from_slice(&from.load(Ordering::Relaxed).to_le_bytes());
            }
            (process != 0 && process != WRITING).then_some((at, program))
        })
    }

    /// Returns how many programs found no free note.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> Box<Started> {
        // SAFETY: the fields are integers, for which zeros are valid.
        unsafe { Box::new(core::mem::zeroed()) }
    }

    #[test]
    fn what_neither_fails_nor_joins_is_left() {
        let started = nothing();
        let failed = started.executes(1, b"/bin/none").unwrap();
        started.executes(2, b"/bin/joins").unwrap();
        started.executes(3, b"./static").unwrap();
        started.executes(4, &[b'x'; 500]).unwrap();
        assert!(started.take_back(failed, 1) && !started.take_back(failed, 1));
        started.joins(2);
        started.joins(7);
        let left: Vec<_> = started.waiting().map(|(_, program)| program).collect();
        assert_eq!(left.iter().map(|program| program.process).collect::<Vec<_>>(), [3, 4]);
        assert_eq!((left[0].path(), left[1].path()), (&b"./static"[..], &[b'x'; PATH_BYTES_KEPT][..]));
    }

    #[test]
    fn notes_that_find_no_room_are_counted() {
        let started = nothing();
        (0..NOTES as u32 + 3).for_each(|process| _ = started.executes(process + 1, b"x"));
        assert_eq!((started.waiting().count(), started.missed()), (NOTES, 3));
        let (at, program) = started.waiting().next().unwrap();
        assert!(!started.take_back(at, program.process + 1));
        assert_eq!(started.waiting().count(), NOTES, "it is another process's");
        started.waiting().for_each(|(at, program)| _ = started.take_back(at, program.process));
        assert_eq!(started.waiting().count(), 0);
        // A program of the run can write anything to the notes.
        assert!(!started.take_back(usize::MAX, 0));
        started.notes[0].length.store(u32::MAX, Ordering::Relaxed);
        started.notes[0].process.store(9, Ordering::Relaxed);
        assert_eq!(started.waiting().next().unwrap().1.path().len(), PATH_BYTES_KEPT);
    }
}

//! Programs that processes of the run execute, until they have joined it. What never joins runs outside of the budget.
//!
//! A process that executes a program leaves a note here, and takes it back if the call fails. The new program takes the note
//! away when it joins. The supervisor finds the notes that are left, and tells of them.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Programs that can be about to join at once.
const NOTES: usize = 128;
/// Words of eight bytes that are kept of a path.
const WORDS: usize = 15;
/// Bytes of a path that are kept.
pub const PATH_BYTES_KEPT: usize = WORDS * 8;
/// No process, as the one of a note that is being written.
const WRITING: u32 = u32::MAX;

/// One program.
#[repr(C)]
struct Note {
    /// The process; 0 if the note is free.
    process: AtomicU32,
    /// Length of the path in bytes.
    length: AtomicU32,
    path: [AtomicU64; WORDS],
}

impl Note {
    fn is_taken_from(&self, process: u32) -> bool {
        self.process.compare_exchange(process, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// All of them. Any bytes are valid.
#[repr(C)]
pub struct Started {
    notes: [Note; NOTES],
    /// Programs that found no free note.
    missed: AtomicU64,
}

/// A program that has not joined.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Its process.
    pub process: u32,
    path: [u8; PATH_BYTES_KEPT],
    length: usize,
}

impl Program {
    /// Its path, if that is not longer than what is kept; else its beginning.
    pub fn path(&self) -> &[u8] {
        &self.path[..self.length]
    }
}

impl Started {
    /// A process is about to execute this path: the note's number, if there is room for one.
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

    /// Nothing was executed, or the supervisor has seen it. False if the process has joined; another one may have the note by
    /// now, and keeps it.
    pub fn take_back(&self, at: usize, process: u32) -> bool {
        self.notes.get(at).is_some_and(|note| note.is_taken_from(process))
    }

    /// A process has joined the run.
    pub fn joins(&self, process: u32) {
        let is_its = |note: &&Note| note.process.load(Ordering::Relaxed) == process;
        self.notes.iter().filter(is_its).for_each(|note| _ = note.is_taken_from(process));
    }

    /// Those that have not joined, by their note's number.
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

    /// Programs that found no room for a note.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing() -> Box<Started> {
        // SAFETY: integers, for which zeros are valid.
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
        // A program of the run can write anything there.
        assert!(!started.take_back(usize::MAX, 0));
        started.notes[0].length.store(u32::MAX, Ordering::Relaxed);
        started.notes[0].process.store(9, Ordering::Relaxed);
        assert_eq!(started.waiting().next().unwrap().1.path().len(), PATH_BYTES_KEPT);
    }
}

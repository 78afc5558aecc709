//! Keeps the programs that a program starts in the run: where the program has dropped our
//! variables, exec puts them back.
//!
//! A program drops them by `env -i`, `unset LD_PRELOAD`, an LD_PRELOAD of a script's own or an emptied
//! environment. Without the repair the new program would have no budget, and nobody would be told. Three
//! kinds of environments are left alone. In the first, LD_PRELOAD or FARPAGE_SESSION is empty. The second has
//! another run's session. The third can't be read, and the kernel answers for that.
// UNSAFETY: the environment is the program's memory. Each page of it is probed before it is read.

use crate::dormant;
use crate::init::parents_engine;
use crate::patch::file_of;
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use farpage_core::units::PAGE_BYTES;
use farpage_os::{peek, sys};
use farpage_runtime::engine::Engine;
use farpage_runtime::session::last;
use farpage_runtime::session::started::PATH_BYTES_KEPT;
use farpage_runtime::session::{PATH_BYTES, SESSION_ENV, Session, is_reachable};

/// Most entries of an environment that is mended. The mended list lies on the thread's
/// stack, which may be small.
const ENTRIES_MAX: usize = 256;
/// Bytes of the entry LD_PRELOAD, our library included.
const VALUE_BYTES: usize = 1024;
const PRELOAD: &[u8] = b"LD_PRELOAD=";
const SESSION: &[u8] = SESSION_ENV.as_bytes();
/// Separators of libraries in the list that the loader reads.
const SEPARATORS: [u8; 2] = [b':', b' '];

/// Our variables, as the new program must have them.
struct Own {
    /// `FARPAGE_SESSION=PATH`, NUL-terminated.
    session: UnsafeCell<[u8; PATH_BYTES + SESSION.len() + 1]>,
    /// Path of this library.
    library: UnsafeCell<&'static CStr>,
    is_known: AtomicBool,
}

// SAFETY: written once, before the program has a second thread and before `is_known` is set.
unsafe impl Sync for Own {}

static OWN: Own = Own {
    session: UnsafeCell::new([0; PATH_BYTES + SESSION.len() + 1]),
    library: UnsafeCell::new(c""),
    is_known: AtomicBool::new(false),
};

/// Remembers where the session and this library are. Must run before the program has a second thread.
pub fn prepare(session_path: &CStr) {
    let Some(library) = file_of(prepare as *const c_void) else { return };
    let path = session_path.to_bytes();
    // SAFETY: nobody reads `session` yet. The path fits: the caller has checked its length.
    let session = unsafe { &mut *OWN.session.get() };
    session[..SESSION.len()].copy_from_slice(SESSION);
    session[SESSION.len()] = b'=';
    session[SESSION.len() + 1..][..path.len()].copy_from_slice(path);
    // SAFETY: as above.
    unsafe { *OWN.library.get() = library };
    // The path's NUL is there: the buffer was zeroed.
    if let Ok(path) = CStr::from_bytes_until_nul(&session[SESSION.len() + 1..]) {
        last::prepare(library, path);
    }
    // Ordering: Release publishes both.
    OWN.is_known.store(true, Ordering::Release);
}

/// Calls `make` with the address of the environment that the new program gets. A note of the program's `path`
/// stands in the session meanwhile.
pub fn executing(path: usize, environment: usize, make: impl FnOnce(usize) -> isize) -> isize {
    let engine = parents_engine();
    // A filter of seccomp may be why the engine has ended. The filter may also forbid the
    // calls that are made here.
    if engine.is_some_and(Engine::has_ended) {
        return make(environment);
    }
    dormant::before_exec();
    let Some(session) = engine.map(|engine| engine.membership.session).or_else(dormant::session) else {
        // A child that was made without our knowledge, of a process without an engine.
        return with_environment(environment, make);
    };
    // The kernel's answer, not the engine's: this may be a child without an engine.
    let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let note = leave_note(session, process, path);
    let word = with_environment(environment, make);
    if let Some(at) = note {
        session.started.take_back(at, process);
    }
    word
}

/// Leaves a note of the program, so that the supervisor can tell of a program that never joins the
/// run. Returns the note's place.
fn leave_note(session: &Session, process: u32, path: usize) -> Option<usize> {
    let mut reader = Reader { page: None };
    let (mut bytes, mut length) = ([0; PATH_BYTES_KEPT], 0);
    while let Some(byte) =
        reader.byte(path.wrapping_add(length)).filter(|byte| *byte != 0 && length < PATH_BYTES_KEPT)
    {
        bytes[length] = byte;
        length += 1;
    }
    session.started.executes(process, &bytes[..length])
}

fn with_environment(environment: usize, make: impl FnOnce(usize) -> isize) -> isize {
    // Ordering: Acquire pairs with the Release in `prepare`.
    if !OWN.is_known.load(Ordering::Acquire) {
        return make(environment);
    }
    // SAFETY: written before `is_known` was set, and never again.
    let (session, library) = unsafe { (&*OWN.session.get(), *OWN.library.get()) };
    match lacks(environment, session, library) {
        Some(Lacks { preload: None, session: false, .. }) | None => make(environment),
        Some(lacks) => with_mended(environment, &lacks, session, library, make),
    }
}

/// Lists what is wrong with an environment.
#[derive(Debug, PartialEq, Eq)]
struct Lacks {
    /// Entries of the environment.
    count: usize,
    /// Index of the entry to be written: `count` if LD_PRELOAD is missing, or the entry of
    /// LD_PRELOAD that lacks our library.
    preload: Option<usize>,
    /// The session's variable is missing.
    session: bool,
}

/// Returns what the environment lacks. None if the environment is to be left alone.
fn lacks(environment: usize, own_session: &[u8], library: &CStr) -> Option<Lacks> {
    let mut reader = Reader { page: None };
    let (mut preload, mut has_session) = (None, false);
    let (mut has_library, mut is_empty) = (false, false);
    let mut count = 0;
    loop {
        // The kernel takes null for an empty list.
        let is_list = environment != 0;
        let entry = if is_list { reader.word(environment + count * size_of::<usize>())? } else { 0 };
        if entry == 0 {
            break;
        }
        if count == ENTRIES_MAX {
            return None;
        }
        if reader.begins_with(entry, PRELOAD)? {
            // The loader uses the last LD_PRELOAD.
            has_library = reader.names_library(entry + PRELOAD.len(), library.to_bytes())?;
            is_empty = reader.byte(entry + PRELOAD.len())? == 0;
            preload = Some(count);
        } else if reader.begins_with(entry, SESSION)? && reader.byte(entry + SESSION.len())? == b'=' {
            // Another run's session, or none on purpose.
            if !reader.is(entry, own_session)? {
                return None;
            }
            has_session = true;
        }
        count += 1;
    }
    // LD_PRELOAD is empty on purpose, as for a program with a sanitizer in it.
    if is_empty {
        return None;
    }
    let preload = (!has_library).then_some(preload.unwrap_or(count));
    Some(Lacks { count, preload, session: !has_session })
}

/// Makes the call with a mended list on this stack. Not inlined: an exec that needs no
/// list must not have this frame.
#[inline(never)]
fn with_mended(
    environment: usize,
    lacks: &Lacks,
    session: &[u8],
    library: &CStr,
    make: impl FnOnce(usize) -> isize,
) -> isize {
    // In another root directory the loader would complain of a library that isn't there.
    let session_path = CStr::from_bytes_until_nul(&session[SESSION.len() + 1..]);
    if !is_readable(library) || !session_path.is_ok_and(is_reachable) {
        return make(environment);
    }
    let mut list = [0_usize; ENTRIES_MAX + 3];
    let mut value = [0_u8; VALUE_BYTES];
    let mut reader = Reader { page: None };
    for (at, to) in list.iter_mut().enumerate().take(lacks.count) {
        match reader.word(environment + at * size_of::<usize>()) {
            Some(entry) => *to = entry,
            None => return make(environment),
        }
    }
    let mut count = lacks.count;
    if let Some(at) = lacks.preload {
        // Another thread may have changed the entry since.
        let is_there = at < count && reader.begins_with(list[at], PRELOAD) == Some(true);
        let existing = if is_there { list[at] + PRELOAD.len() } else { 0 };
        if reader.write_preload(&mut value, library.to_bytes(), existing).is_none() {
            return make(environment);
        }
        list[at] = value.as_ptr() as usize;
        count = count.max(at + 1);
    }
    if lacks.session {
        list[count] = session.as_ptr() as usize;
    }
    make(list.as_ptr() as usize)
}

/// Whether this process may read the file.
fn is_readable(path: &CStr) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

/// Whether the page lies in a mapping whose pages may be evicted, and the kernel doesn't wait for them, so
/// that only a touch brings the page in. If the mapping may not be read, the touch ends the program, where
/// the kernel would have answered EFAULT. No environment lies in unreadable memory.
fn may_be_out(page: usize) -> bool {
    let mut byte = 0_u8;
    let arguments = [page * PAGE_BYTES, PAGE_BYTES, &raw mut byte as usize, 0, 0, 0];
    let only_by_touch =
        |engine: &Engine| engine.is_active() && !engine.has_ended() && !engine.mode().calls_can_wait();
    // SAFETY: mincore(2) writes one byte for each page: one byte, into `byte`.
    let is_mapped = || unsafe { sys::call(linux_raw_sys::general::__NR_mincore as usize, arguments) };
    parents_engine().is_some_and(only_by_touch) && sys::check(is_mapped()).is_ok()
}

/// Reads memory that may not be there.
struct Reader {
    /// Number of the page that was last found readable.
    page: Option<usize>,
}

impl Reader {
    fn can_read(&mut self, address: usize) -> bool {
        let page = address / PAGE_BYTES;
        let is_there = self.page == Some(page) || peek::is_readable(address & !7) || may_be_out(page);
        if is_there {
            self.page = Some(page);
        }
        is_there
    }

    fn byte(&mut self, address: usize) -> Option<u8> {
        // SAFETY: the kernel could read the byte, or there is a mapping whose pages may be out. A thread that
        // unmaps the arguments of an exec meanwhile ends the program.
        self.can_read(address).then(|| unsafe { (address as *const u8).read() })
    }

    fn word(&mut self, address: usize) -> Option<usize> {
        let mut bytes = [0; size_of::<usize>()];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = self.byte(address.wrapping_add(at))?;
        }
        Some(usize::from_ne_bytes(bytes))
    }

    fn begins_with(&mut self, text: usize, start: &[u8]) -> Option<bool> {
        for (at, byte) in start.iter().enumerate() {
            if self.byte(text.wrapping_add(at))? != *byte {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Whether the text equals `wanted` up to the first zero in `wanted`.
    fn is(&mut self, text: usize, wanted: &[u8]) -> Option<bool> {
        let length = wanted.iter().position(|byte| *byte == 0).unwrap_or(wanted.len());
        Some(self.begins_with(text, &wanted[..length])? && self.byte(text + length)? == 0)
    }

    /// Whether the list of libraries has `library` in it.
    fn names_library(&mut self, list: usize, library: &[u8]) -> Option<bool> {
        let mut at = list;
        loop {
            if self.begins_with(at, library)? {
                let end = self.byte(at + library.len())?;
                if end == 0 || SEPARATORS.contains(&end) {
                    return Some(true);
                }
            }
            loop {
                let byte = self.byte(at)?;
                at += 1;
                if byte == 0 {
                    return Some(false);
                }
                if SEPARATORS.contains(&byte) {
                    break;
                }
            }
        }
    }

    /// Writes the entry: our library, and the list at `existing` unless that is 0. None if the list can't be
    /// read, or the entry is too long.
    fn write_preload(
        &mut self,
        value: &mut [u8; VALUE_BYTES],
        library: &[u8],
        existing: usize,
    ) -> Option<()> {
        let mut length = 0;
        let mut push = |byte: u8| {
            *value.get_mut(length)? = byte;
            length += 1;
            Some(())
        };
        PRELOAD.iter().chain(library).try_for_each(|byte| push(*byte))?;
        let mut at = existing;
        let mut separator = Some(b':');
        while at != 0 {
            let byte = self.byte(at)?;
            if byte == 0 {
                break;
            }
            separator.take().map_or(Some(()), &mut push)?;
            push(byte)?;
            at += 1;
        }
        // The buffer is zeroed behind the entry; its last byte must stay zero.
        (length < VALUE_BYTES).then_some(())
    }
}

//! What a program starts stays in the run: where the program has dropped our variables, exec puts them back.
//!
//! `env -i`, `unset LD_PRELOAD`, an LD_PRELOAD of a script's own and an emptied environment left the new program without a
//! budget, and nobody was told. An environment with an empty LD_PRELOAD or FARPAGE_SESSION, or with another run's session, is
//! left alone. So is one that can't be read: the kernel answers for that.
// UNSAFETY: the environment is the program's. Each page of it is looked at before it is read.

use crate::dormant;
use crate::init::parents_engine;
use crate::patch::file_of;
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use farpage::engine::Engine;
use farpage::last;
use farpage::session::{PATH_BYTES, SESSION_ENV, Session, is_reachable};
use farpage::started::PATH_BYTES_KEPT;
use farpage_core::units::PAGE_BYTES;
use farpage_os::{peek, sys};

/// Entries of an environment that is mended: its list is copied to the stack of the thread, which may be small.
const ENTRIES_MAX: usize = 256;
/// Bytes of a value of LD_PRELOAD, ours included.
const VALUE_BYTES: usize = 1024;
const PRELOAD: &[u8] = b"LD_PRELOAD=";
const SESSION: &[u8] = SESSION_ENV.as_bytes();
/// How the loader separates libraries.
const SEPARATORS: [u8; 2] = [b':', b' '];

/// Our variables, as they must be.
struct Own {
    /// `FARPAGE_SESSION=PATH`, NUL-terminated.
    session: UnsafeCell<[u8; PATH_BYTES + SESSION.len() + 1]>,
    /// Where this library is.
    library: UnsafeCell<&'static CStr>,
    is_known: AtomicBool,
}

// SAFETY: written once, before the program has a second thread and before `is_known` is.
unsafe impl Sync for Own {}

static OWN: Own = Own {
    session: UnsafeCell::new([0; PATH_BYTES + SESSION.len() + 1]),
    library: UnsafeCell::new(c""),
    is_known: AtomicBool::new(false),
};

/// Remembers where the session and this library are. Before the program has a second thread.
pub fn prepare(session_path: &CStr) {
    let Some(library) = file_of(prepare as *const c_void) else { return };
    let path = session_path.to_bytes();
    // SAFETY: nobody reads it yet; the path fits, which the caller has looked at.
    let session = unsafe { &mut *OWN.session.get() };
    session[..SESSION.len()].copy_from_slice(SESSION);
    session[SESSION.len()] = b'=';
    session[SESSION.len() + 1..][..path.len()].copy_from_slice(path);
    // SAFETY: as above.
    unsafe { *OWN.library.get() = library };
    // The path's NUL is there: the place was zeroed.
    if let Ok(path) = CStr::from_bytes_until_nul(&session[SESSION.len() + 1..]) {
        last::prepare(library, path);
    }
    // Ordering: Release publishes both.
    OWN.is_known.store(true, Ordering::Release);
}

/// Calls `make` with the address of the environment that the new program gets, and leaves a note of the program's `path` meanwhile.
pub fn executing(path: usize, environment: usize, make: impl FnOnce(usize) -> isize) -> isize {
    let engine = parents_engine();
    // A filter of seccomp may be why it has ended, and forbid the calls that are made here.
    if engine.is_some_and(Engine::has_ended) {
        return make(environment);
    }
    dormant::before_exec();
    let Some(session) = engine.map(|engine| engine.membership.session).or_else(dormant::session) else {
        // A child that nobody has seen, of a process without an engine.
        return with_environment(environment, make);
    };
    // Not the engine's: this may be a child that has none.
    let process = rustix::process::getpid().as_raw_nonzero().get() as u32;
    let note = leave_note(session, process, path);
    let word = with_environment(environment, make);
    if let Some(at) = note {
        session.started.take_back(at, process);
    }
    word
}

/// What never joins the run is told of by its supervisor.
fn leave_note(session: &Session, process: u32, path: usize) -> Option<usize> {
    let mut reader = Reader { page: 0 };
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
    // SAFETY: written before, as `is_known` says, and not any more.
    let (session, library) = unsafe { (&*OWN.session.get(), *OWN.library.get()) };
    match lacks(environment, session, library) {
        Some(Lacks { preload: None, session: false, .. }) | None => make(environment),
        Some(lacks) => with_mended(environment, &lacks, session, library, make),
    }
}

/// What is wrong with an environment.
#[derive(Debug, PartialEq, Eq)]
struct Lacks {
    /// Its entries.
    count: usize,
    /// LD_PRELOAD is missing (the index is `count`), or at this index and without our library.
    preload: Option<usize>,
    /// The session's variable is missing.
    session: bool,
}

/// None if it is to be left alone.
fn lacks(environment: usize, own_session: &[u8], library: &CStr) -> Option<Lacks> {
    let mut reader = Reader { page: 0 };
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
            // The loader takes the last one.
            has_library = reader.names_library(entry + PRELOAD.len(), library.to_bytes())?;
            is_empty = reader.byte(entry + PRELOAD.len())? == 0;
            preload = Some(count);
        } else if reader.begins_with(entry, SESSION)? && reader.byte(entry + SESSION.len())? == b'=' {
            // Another run's, or none on purpose.
            if !reader.is(entry, own_session)? {
                return None;
            }
            has_session = true;
        }
        count += 1;
    }
    // Empty on purpose, as for a program with a sanitizer in it.
    if is_empty {
        return None;
    }
    let preload = (!has_library).then_some(preload.unwrap_or(count));
    Some(Lacks { count, preload, session: !has_session })
}

/// With a list on this stack. Not inlined: an exec that needs none must not have its frame.
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
    let mut reader = Reader { page: 0 };
    for (at, to) in list.iter_mut().enumerate().take(lacks.count) {
        match reader.word(environment + at * size_of::<usize>()) {
            Some(entry) => *to = entry,
            None => return make(environment),
        }
    }
    let mut count = lacks.count;
    if let Some(at) = lacks.preload {
        // Another thread may have changed it since.
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

/// Whether there is a mapping of which pages may be out: then a touch brings them in. Where the mapping may not be read, which no
/// environment is, the touch ends the program; the kernel would have answered EFAULT.
fn may_be_out(page: usize) -> bool {
    let mut byte = 0_u8;
    let arguments = [page * PAGE_BYTES, PAGE_BYTES, &raw mut byte as usize, 0, 0, 0];
    let is_active = parents_engine().is_some_and(|engine| engine.is_active() && !engine.has_ended());
    // SAFETY: writes one byte for one page.
    let is_mapped = || unsafe { sys::call(linux_raw_sys::general::__NR_mincore as usize, arguments) };
    is_active && sys::check(is_mapped()).is_ok()
}

/// Reads what may not be there.
struct Reader {
    /// A page that can be read, by its number; 0 if none is known.
    page: usize,
}

impl Reader {
    fn can_read(&mut self, address: usize) -> bool {
        let page = address / PAGE_BYTES;
        let is_there =
            page == self.page || page != 0 && (peek::is_readable(address & !7) || may_be_out(page));
        if is_there {
            self.page = page;
        }
        is_there
    }

    fn byte(&mut self, address: usize) -> Option<u8> {
        // SAFETY: the kernel could read it, or there is a mapping whose pages may be out. A thread that unmaps the arguments of an
        // exec meanwhile ends the program.
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

    /// Whether a text is this one, which has zeros behind it.
    fn is(&mut self, text: usize, wanted: &[u8]) -> Option<bool> {
        let length = wanted.iter().position(|byte| *byte == 0).unwrap_or(wanted.len());
        Some(self.begins_with(text, &wanted[..length])? && self.byte(text + length)? == 0)
    }

    /// Whether a list of libraries has ours in it.
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

    /// Our library, and what is at `existing`; 0 is nothing. None if that can't be read, or is too long.
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
        // It is zeroed behind this; the last byte must stay so.
        (length < VALUE_BYTES).then_some(())
    }
}

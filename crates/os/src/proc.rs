//! Reads what /proc says about this process, without allocating.
//!
//! Files that are needed often are opened once, at start, and read with `pread`, because the program may
//! change its root or its limits later.
// UNSAFETY: an ioctl that fills a buffer.

pub use mappings::{
    Mapping, MappingName, Requests, for_each_mapping, for_each_mapping_and_requests, for_each_plain_mapping,
};

use crate::peek;
use crate::sys::{self, Errno, number};
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

fn open(path: &core::ffi::CStr) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| Errno(error.raw_os_error()))
}

fn read_at(fd: &OwnedFd, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    rustix::io::pread(fd, bytes, offset).map_err(|error| Errno(error.raw_os_error()))
}

/// How much memory the process has. The file is `statm` of the thread that opens it: the process's own
/// `statm` says 0 once the first thread has ended.
pub struct Statm(OwnedFd);

/// See [`Statm::sizes`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Resident anonymous memory.
    pub anonymous_bytes: u64,
    /// Size of writable private mappings, touched or not, plus the present size of the stack.
    pub writable_bytes: u64,
}

impl Statm {
    /// Opens the file.
    pub fn open() -> Result<Statm, Errno> {
        open(c"/proc/thread-self/statm").map(Statm)
    }

    /// Returns the anonymous resident bytes: all resident memory but file-backed and shared memory. Takes 2
    /// µs.
    pub fn anonymous_bytes(&self) -> Result<u64, Errno> {
        self.sizes().map(|sizes| sizes.anonymous_bytes)
    }

    /// Returns the sizes that decide how much memory the process has, and could have.
    pub fn sizes(&self) -> Result<Sizes, Errno> {
        let mut text = [0_u8; 128];
        let length = read_at(&self.0, &mut text, 0)?;
        let mut pages = text[..length].split(|byte| *byte == b' ').map(parse_decimal);
        let mut bytes = |skipped| Some(pages.nth(skipped)?? * PAGE_BYTES as u64);
        let mut sizes = || {
            let (resident, shared) = (bytes(1)?, bytes(0)?);
            Some(Sizes { anonymous_bytes: resident.saturating_sub(shared), writable_bytes: bytes(2)? })
        };
        sizes().ok_or(Errno::EIO)
    }
}

/// The sums over all mappings. The file is `smaps_rollup` of the thread that opens it.
pub struct Rollup(OwnedFd);

impl Rollup {
    /// Opens the file.
    pub fn open() -> Result<Rollup, Errno> {
        open(c"/proc/thread-self/smaps_rollup").map(Rollup)
    }

    /// Returns the present sums. The kernel looks at every page, which takes milliseconds for each GiB.
    pub fn anonymous(&self) -> Result<AnonymousParts, Errno> {
        let mut text = [0_u8; 2048];
        let length = read_at(&self.0, &mut text, 0)?;
        let bytes = |name: &[u8]| {
            let line = text[..length].split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.strip_suffix(b" kB")).and_then(parse_decimal);
            number.map(|kib| kib * 1024).ok_or(Errno::EIO)
        };
        Ok(AnonymousParts {
            anonymous: bytes(b"Anonymous:")?,
            own_part: bytes(b"Pss_Anon:")?,
            shared: bytes(b"Shared_Dirty:")?,
        })
    }
}

/// The sums of [`Rollup`] about memory that processes share since a fork, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct AnonymousParts {
    /// All anonymous memory of the process, shared or not.
    pub anonymous: u64,
    /// The process's proportional share (`Pss_Anon`): all of its unshared memory, half of what it shares with
    /// one process, a third with two ...
    pub own_part: u64,
    /// All memory that the process shares with other processes, including dirty file pages that other
    /// processes map, too.
    pub shared: u64,
}

/// Returns the faults of this process for which no device was read, over all threads that it ever had. The
/// count includes one fault for each page that the process wrote and had shared since a fork. The function
/// returns 0 if the kernel doesn't say.
pub fn minor_faults() -> u64 {
    const RUSAGE_SELF: usize = 0;
    // `struct rusage` has two times of two words each. `ru_minflt` is the fifth of the 14 words after the
    // times.
    let mut words = [0_u64; 18];
    // SAFETY: the kernel writes one `struct rusage` of 18 words to `words`.
    let result =
        unsafe { sys::call(number::GETRUSAGE, [RUSAGE_SELF, words.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    sys::check(result).map_or(0, |_| words[8])
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    let digits = digits.trim_ascii();
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, byte| {
        byte.is_ascii_digit().then(|| number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0')))
    })
}

const PAGEMAP_SCAN: u32 = 0xc060_6610;
/// Categories of PAGEMAP_SCAN: PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_PFNZERO.
const SCAN_IS_PRESENT: u64 = 1 << 3;
const SCAN_IS_SWAPPED: u64 = 1 << 4;
const SCAN_IS_ZERO: u64 = 1 << 5;
/// Bits of a pagemap's word: the page is in memory; the page is swapped out; the page is mapped only by this
/// process.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const ALONE: u64 = 1 << 56;
/// Pages for which one `pread` of the pagemap suffices. Larger ranges are scanned.
const READ_PAGES: usize = 512;

/// `struct pm_scan_arg`: the pages to look for, and how far the kernel came.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    runs: u64,
    runs_max: u64,
    pages_max: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ScannedRun {
    start: u64,
    end: u64,
    categories: u64,
}

/// How a page of private memory that isn't missing is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// By this process alone.
    Alone,
    /// By another process, too: a fork's child or parent. The kernel's page of zeros also counts as shared.
    Shared,
    /// The host has swapped the page out by itself, or is moving it to other memory.
    Swapped,
}

/// The state of this process's pages, from /proc/self/pagemap.
pub struct Pagemap(OwnedFd);

impl Pagemap {
    /// Opens the file.
    pub fn open() -> Result<Pagemap, Errno> {
        open(c"/proc/self/pagemap").map(Pagemap)
    }

    /// Calls `visit` for each page in `range` that is in memory, or that the host has swapped out by itself.
    pub fn for_each_present(&self, range: PageRange, mut visit: impl FnMut(PageIndex)) -> Result<(), Errno> {
        if range.count() <= READ_PAGES as u64 {
            return self.read_present(range, visit);
        }
        let mut from = range.start;
        let scanned = self.scan(range, SCAN_IS_PRESENT | SCAN_IS_SWAPPED, |run| {
            run.iter().for_each(&mut visit);
            from = run.end;
        });
        // An older kernel refuses the scan before it reports any page. After any other failure the rest can
        // still be read.
        scanned.or_else(|_| self.read_present(PageRange::new(from, range.end), visit))
    }

    /// Calls `visit` for each page in `range` that is in memory and that other processes have, too. Visits no
    /// page if the kernel doesn't say.
    pub fn for_each_shared(&self, range: PageRange, mut visit: impl FnMut(PageIndex)) {
        let _ = self.for_each_mapped(range, |page, mapped| {
            if mapped == Mapped::Shared {
                visit(page);
            }
        });
    }

    /// Does the work of [`Pagemap::for_each_present`] by reading, which takes 8 bytes for each page, present
    /// or not. The pagemap of a terabyte has 2 GiB even if little of the memory was ever touched. All of it
    /// would be read under the exclusive map lock.
    fn read_present(&self, range: PageRange, mut visit: impl FnMut(PageIndex)) -> Result<(), Errno> {
        self.for_each_word(range, |page, word| {
            if word & (PRESENT | SWAPPED) != 0 {
                visit(page);
            }
        })
    }

    /// Calls `visit` with the kernel's word for each page in `range`.
    fn for_each_word(&self, range: PageRange, mut visit: impl FnMut(PageIndex, u64)) -> Result<(), Errno> {
        let mut words = [0_u64; READ_PAGES];
        let mut page = range.start;
        while page < range.end {
            let count = (range.end.0 - page.0).min(words.len() as u64) as usize;
            // SAFETY: the slice covers the first `count` words, `count` is at most their number, and integers
            // may be written as bytes.
            let bytes =
                unsafe { core::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), count * 8) };
            let read = read_at(&self.0, bytes, page.0 * 8)? / 8;
            if read == 0 {
                return Err(Errno::EIO);
            }
            words[..read].iter().enumerate().for_each(|(at, word)| visit(page.plus(at as u64), *word));
            page = page.plus(read as u64);
        }
        Ok(())
    }

    /// Calls `visit` for each page in `range` that is in memory or swapped out, with how the page is mapped.
    pub fn for_each_mapped(
        &self,
        range: PageRange,
        mut visit: impl FnMut(PageIndex, Mapped),
    ) -> Result<(), Errno> {
        self.for_each_word(range, |page, word| match word {
            _ if word & PRESENT == 0 && word & SWAPPED == 0 => {}
            _ if word & PRESENT == 0 => visit(page, Mapped::Swapped),
            _ if word & ALONE == 0 => visit(page, Mapped::Shared),
            _ => visit(page, Mapped::Alone),
        })
    }

    /// Calls `visit` for each run of pages in `range` that were read and never written. All these pages are
    /// the kernel's one page of zeros, and take memory only when they are written. Needs Linux 6.7; older
    /// kernels refuse.
    pub fn for_each_zero_run(&self, range: PageRange, visit: impl FnMut(PageRange)) -> Result<(), Errno> {
        self.scan(range, SCAN_IS_ZERO, visit)
    }

    /// Calls `visit` for each run of pages in `range` that are of one of the `categories`. Neighbouring pages
    /// may come as several runs.
    fn scan(&self, range: PageRange, categories: u64, mut visit: impl FnMut(PageRange)) -> Result<(), Errno> {
        let mut runs = [ScannedRun::default(); 64];
        let mut from = range.start;
        while from < range.end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start: from.address() as u64,
                end: range.end.address() as u64,
                runs: runs.as_mut_ptr() as u64,
                runs_max: runs.len() as u64,
                category_any_mask: categories,
                return_mask: categories,
                ..Scan::default()
            };
            // SAFETY: the pm_scan_arg names `runs` and their number. The kernel only looks at the pages.
            let found = unsafe { sys::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan as usize) }?;
            for run in &runs[..found.min(runs.len())] {
                visit(PageRange::covering(run.start as usize, (run.end - run.start) as usize));
            }
            let looked = PageIndex::of_address(scan.walk_end as usize);
            if looked <= from {
                return Err(Errno::EIO);
            }
            from = looked;
        }
        Ok(())
    }

    /// Returns the number of the page frame behind a page that is in memory; none if this process may not
    /// know (CAP_SYS_ADMIN).
    pub fn frame_number(&self, page: PageIndex) -> Option<u64> {
        const NUMBER: u64 = (1 << 55) - 1;
        let mut word = [0; 8];
        let read = read_at(&self.0, &mut word, page.0 * 8).ok()?;
        let word = u64::from_ne_bytes(word);
        Some(word & NUMBER).filter(|number| read == 8 && word & PRESENT != 0 && *number != 0)
    }

    /// Returns whether the program has the page: in memory, or swapped out by the host.
    pub fn is_present(&self, page: PageIndex) -> Result<bool, Errno> {
        let mut present = false;
        self.for_each_present(PageRange::of(page, 1), |_| present = true)?;
        Ok(present)
    }
}

/// The program's memory as a file. Private memory can be read and written through the file even where no
/// instruction may access it.
pub struct OwnMemory(OwnedFd);

impl OwnMemory {
    /// Opens the file.
    pub fn open() -> Result<OwnMemory, Errno> {
        let opened = rustix::fs::open(c"/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        opened.map(OwnMemory).map_err(|error| Errno(error.raw_os_error()))
    }

    /// Reads whole pages into memory of the caller.
    ///
    /// # Safety
    /// `to` must point to as many bytes as `pages` has, and only the caller may use them.
    pub unsafe fn read(&self, pages: PageRange, to: *mut u8) -> Result<(), Errno> {
        // SAFETY: `to` is valid by the caller's promise.
        unsafe { self.transfer(number::PREAD64, pages.start.address(), to as usize, pages.bytes()) }
    }

    /// Writes whole pages, wherever they are mapped as private.
    ///
    /// # Safety
    /// `from` must point to as many readable bytes as `pages` has. The program must expect them in its
    /// memory.
    pub unsafe fn write(&self, pages: PageRange, from: *const u8) -> Result<(), Errno> {
        // SAFETY: `from` is valid and the program expects the bytes, by the caller's promise.
        unsafe { self.transfer(number::PWRITE64, pages.start.address(), from as usize, pages.bytes()) }
    }

    /// Writes code where an instruction may not write.
    ///
    /// # Safety
    /// No thread may be executing the old code at `at`. `code` must not be longer than the old code.
    pub unsafe fn write_code(&self, at: usize, code: &[u8]) -> Result<(), Errno> {
        // SAFETY: the place may be overwritten, by the caller's promise, and `code` is readable.
        unsafe { self.transfer(number::PWRITE64, at, code.as_ptr() as usize, code.len()) }
    }

    unsafe fn transfer(&self, call: usize, at: usize, own: usize, bytes: usize) -> Result<(), Errno> {
        let mut done = 0;
        while done < bytes {
            let arguments = [self.0.as_raw_fd() as usize, own + done, bytes - done, at + done, 0, 0];
            // SAFETY: the kernel checks the address in the file. The bytes at `own` are the caller's promise.
            match sys::check(unsafe { sys::call(call, arguments) })? {
                0 => return Err(Errno::EIO),
                more => done += more,
            }
        }
        Ok(())
    }
}

/// Returns the number of this process's pid namespace.
pub fn pid_namespace() -> Result<u64, Errno> {
    let stat = rustix::fs::stat(c"/proc/self/ns/pid").map_err(|error| Errno(error.raw_os_error()))?;
    Ok(stat.st_ino)
}

/// Returns the number under which /proc shows this process. A process that has entered another pid namespace
/// may still have the /proc of the namespace before. None if /proc can't be reached.
pub fn number_shown() -> Option<u32> {
    let mut target = [core::mem::MaybeUninit::uninit(); 16];
    let link = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut target);
    link.ok().and_then(|(target, _)| parse_decimal(target)).map(|number| number as u32)
}

/// Whether a child of the calling thread would be in this process's pid namespace, as far as /proc tells.
pub fn has_children_here() -> bool {
    let number = |path| rustix::fs::stat(path).map(|stat| stat.st_ino);
    match (number(c"/proc/thread-self/ns/pid"), number(c"/proc/thread-self/ns/pid_for_children")) {
        (Ok(own), Ok(theirs)) => own == theirs,
        // The other namespace has no process yet.
        (Ok(_), Err(rustix::io::Errno::NOENT)) => false,
        _ => true,
    }
}

/// Returns how many threads this process has.
pub fn count_threads() -> Result<u64, Errno> {
    let stat = rustix::fs::stat(c"/proc/self/task").map_err(|error| Errno(error.raw_os_error()))?;
    // The link count is one for each thread's directory, one for the directory itself and one for its parent.
    Ok(stat.st_nlink.saturating_sub(2))
}

/// Returns how many mappings this process has.
pub fn count_mappings() -> Result<u64, Errno> {
    let mut count = 0;
    for_each_mapping(|_| count += 1)?;
    Ok(count)
}

/// Returns how many mappings a process may have: vm.max_map_count, or the kernel's default where that can't
/// be read.
pub fn mappings_max() -> u64 {
    const DEFAULT: u64 = 65_530;
    let mut text = [0_u8; 32];
    let read = open(c"/proc/sys/vm/max_map_count").and_then(|file| read_at(&file, &mut text, 0));
    read.ok().and_then(|length| parse_decimal(&text[..length])).unwrap_or(DEFAULT)
}

fn parse_hex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0_u64, |number, byte| {
        let digit = (*byte as char).to_digit(16)?;
        Some(number << 4 | u64::from(digit))
    })
}

/// Calls `visit` for each thread of this process, engine threads included. After a failure some threads may
/// not have been visited.
pub fn for_each_thread(mut visit: impl FnMut(u32)) -> Result<(), Errno> {
    let errno = |error: rustix::io::Errno| Errno(error.raw_os_error());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(c"/proc/self/task", flags, Mode::empty()).map_err(errno)?;
    let mut buffer = [core::mem::MaybeUninit::uninit(); 4096];
    let mut entries = rustix::fs::RawDir::new(&directory, &mut buffer);
    while let Some(entry) = entries.next() {
        if let Some(thread) = parse_decimal(entry.map_err(errno)?.file_name().to_bytes()) {
            visit(thread as u32);
        }
    }
    Ok(())
}

/// Returns how many io_urings a thread of this process has among its descriptors; 0 if the descriptors can't
/// be seen.
pub fn rings(thread: u32) -> u64 {
    descriptors(thread, |link| link == b"anon_inode:[io_uring]")
}

/// Returns whether a thread of this process has the process's memory open: /proc/PID/mem, or a thread's.
pub fn has_memory_open(thread: u32) -> bool {
    let mut own = [core::mem::MaybeUninit::uninit(); 16];
    let Ok((own, _)) = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut own) else {
        return false;
    };
    let is_memory = |link: &[u8]| {
        let name = link.strip_prefix(b"/proc/").and_then(|rest| rest.strip_suffix(b"/mem"));
        name.and_then(|name| name.strip_prefix(&*own)).is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
    };
    descriptors(thread, is_memory) > 0
}

/// Returns how many descriptors of a thread are links to a file that `is_meant`. Links of more than 63 bytes
/// are cut.
fn descriptors(thread: u32, is_meant: impl Fn(&[u8]) -> bool) -> u64 {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut path = [0; 64];
    let Some(path) = path_of_thread(&mut path, thread, b"fd") else { return 0 };
    let Ok(directory) = rustix::fs::open(path, flags, Mode::empty()) else { return 0 };
    let mut buffer = [core::mem::MaybeUninit::uninit(); 4096];
    let mut entries = rustix::fs::RawDir::new(&directory, &mut buffer);
    let mut count = 0;
    while let Some(Ok(entry)) = entries.next() {
        let mut target = [core::mem::MaybeUninit::uninit(); 63];
        let link = rustix::fs::readlinkat_raw(&directory, entry.file_name(), &mut target);
        count += u64::from(link.is_ok_and(|(target, _)| is_meant(target)));
    }
    count
}

/// Returns the program's first thread: the first thread of `process`, which is this process. An ended thread
/// keeps the credentials that it had at its end. In its place, returns the oldest thread that lives and isn't
/// `ours`. None if the first thread has ended and /proc doesn't tell which threads live.
pub fn first_thread(process: u32, ours: impl Fn(u32) -> bool) -> Option<u32> {
    if !peek::has_ended(process) {
        return Some(process);
    }
    let mut first = None;
    // The kernel lists threads in the order in which they were made.
    for_each_thread(|thread| {
        if first.is_none() && !ours(thread) && !runs_no_program(thread) {
            first = Some(thread);
        }
    })
    .ok()?;
    first
}

/// Returns the exit status of this process's first thread, if that thread has ended and every remaining
/// thread's name is one of `ours`. The kernel's own threads don't count. None if another thread is left, or
/// perhaps is.
pub fn status_but_for(process: u32, ours: &[&[u8]]) -> Option<i32> {
    const EXIT_CODE_FIELD: usize = 52;
    let is_ours = |stat: &[u8]| ours.contains(&name_in_stat(stat));
    let mut text = [0; 1024];
    let first = read_of_thread(process, b"stat", &mut text)?;
    if !has_ended(first) || is_ours(first) {
        return None;
    }
    let code = field_of_stat(first, EXIT_CODE_FIELD)?;
    let mut are_others = false;
    for_each_thread(|thread| {
        let mut text = [0; 1024];
        let stat = read_of_thread(thread, b"stat", &mut text);
        // A thread that is just ending may have made another thread, which isn't in this list.
        are_others |= thread != process && stat.is_none_or(|stat| !is_ours(stat) && !is_workers(stat));
    })
    .ok()?;
    (!are_others).then_some((code >> 8) as i32 & 0xff)
}

/// Returns the name in a thread's `stat`.
fn name_in_stat(stat: &[u8]) -> &[u8] {
    let start = stat.iter().position(|byte| *byte == b'(').map_or(0, |at| at + 1);
    let end = stat.iter().rposition(|byte| *byte == b')').unwrap_or(start);
    stat.get(start..end).unwrap_or_default()
}

/// Returns a field of `/proc/PID/stat` behind the name, counted from 1 as in proc(5). The name may contain
/// any byte, but the last bracket ends it.
fn field_of_stat(text: &[u8], field: usize) -> Option<u64> {
    let end_of_name = text.iter().rposition(|byte| *byte == b')')?;
    let mut fields = text[end_of_name..].trim_ascii().split(|byte| *byte == b' ');
    parse_decimal(fields.nth(field.checked_sub(2)?)?)
}

/// A system call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallUnderWay {
    /// The call's number.
    pub number: usize,
    /// The call's arguments.
    pub arguments: [usize; 6],
    /// The thread's stack pointer.
    pub stack_pointer: usize,
    /// Where the thread goes on.
    pub instruction: usize,
}

/// Returns the system call that a thread of this process is in; none if the thread runs, or the kernel
/// doesn't tell.
pub fn call_under_way(thread: u32) -> Option<CallUnderWay> {
    let mut text = [0; 256];
    parse_call(read_of_thread(thread, b"syscall", &mut text)?)
}

/// Returns the stack pointer of a thread of this process; none if the thread runs, or the kernel doesn't
/// tell.
pub fn stack_pointer(thread: u32) -> Option<usize> {
    let mut text = [0; 256];
    parse_stack_pointer(read_of_thread(thread, b"syscall", &mut text)?)
}

/// Parses a line as below, or `-1 0x7ffd12 0x7f0034` of a thread that waits, but in no call.
fn parse_stack_pointer(text: &[u8]) -> Option<usize> {
    let pointer = text.trim_ascii().rsplit(|byte| *byte == b' ').nth(1)?;
    Some(parse_hex(pointer.strip_prefix(b"0x")?)? as usize)
}

/// Parses a line like `0 0x3 0x7f0012 0x400 0x0 0x0 0x0 0x7ffd12 0x7f0034`.
fn parse_call(text: &[u8]) -> Option<CallUnderWay> {
    let mut fields = text.trim_ascii().split(|byte| *byte == b' ');
    let number = parse_decimal(fields.next()?)? as usize;
    let mut words = [0; 8];
    for word in &mut words {
        *word = parse_hex(fields.next()?.strip_prefix(b"0x")?)? as usize;
    }
    let [a, b, c, d, e, f, stack_pointer, instruction] = words;
    Some(CallUnderWay { number, arguments: [a, b, c, d, e, f], stack_pointer, instruction })
}

/// The state of a thread of this process that another thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingThread {
    /// The signals that the thread blocks.
    pub blocked: u64,
    /// Whether the thread sleeps so that a signal would wake it, or is stopped.
    pub sleeps: bool,
    /// The thread's CPU time so far.
    pub ran_ns: u64,
}

/// Returns the state of a thread of this process. None if the thread doesn't exist, or the kernel doesn't
/// tell.
pub fn waiting_thread(thread: u32) -> Option<WaitingThread> {
    let mut text = [0; 4096];
    let (blocked, sleeps) = parse_status(read_of_thread(thread, b"status", &mut text)?)?;
    let ran = read_of_thread(thread, b"schedstat", &mut text)?.split(|byte| *byte == b' ').next();
    Some(WaitingThread { blocked, sleeps, ran_ns: parse_decimal(ran?)? })
}

/// Returns the signals that a thread blocks, and whether it sleeps, from its `status`.
fn parse_status(text: &[u8]) -> Option<(u64, bool)> {
    let sleeps = matches!(field_of_status(text, b"State:")?.first()?, b'S' | b'T' | b't');
    Some((parse_hex(field_of_status(text, b"SigBlk:")?)?, sleeps))
}

fn field_of_status<'t>(text: &'t [u8], name: &[u8]) -> Option<&'t [u8]> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
    line.map(<[u8]>::trim_ascii)
}

/// Returns whether all memory is executable that can be read, by this process's personality.
pub fn reading_implies_executing() -> bool {
    const READ_IMPLIES_EXEC: u64 = 0x40_0000;
    let mut text = [0; 32];
    let read = open(c"/proc/thread-self/personality").and_then(|file| read_at(&file, &mut text, 0));
    let personality = read.ok().and_then(|length| parse_hex(text[..length].trim_ascii()));
    personality.is_some_and(|personality| personality & READ_IMPLIES_EXEC != 0)
}

/// Returns how many descriptors the kernel's table for the calling thread has room for. None if /proc can't
/// be read.
pub fn descriptor_table_size() -> Option<usize> {
    let mut text = [0; 4096];
    let length = read_at(&open(c"/proc/thread-self/status").ok()?, &mut text, 0).ok()?;
    parse_decimal(field_of_status(&text[..length], b"FDSize:")?).map(|size| size as usize)
}

/// Returns the most memory in RAM that this process has had since it executed its program, in bytes.
pub fn resident_peak() -> Option<u64> {
    let mut text = [0; 4096];
    let length = read_at(&open(c"/proc/self/status").ok()?, &mut text, 0).ok()?;
    let kib = field_of_status(&text[..length], b"VmHWM:")?.strip_suffix(b" kB")?;
    Some(parse_decimal(kib)?.saturating_mul(1024))
}

/// Returns whether a thread of this process never runs code of the program again. Either the thread has ended
/// (perhaps it waits for the other threads to end), or it is the kernel's own, as io_uring makes them.
pub fn runs_no_program(thread: u32) -> bool {
    let mut text = [0; 1024];
    let stat = path_of_thread(&mut [0; 64], thread, b"stat").ok_or(Errno::EINVAL).and_then(open);
    match stat.and_then(|file| read_at(&file, &mut text, 0)) {
        Ok(length) => is_of_no_program(&text[..length]),
        // After any other failure, the thread may live.
        Err(errno) => matches!(errno, Errno::ENOENT | Errno::ESRCH),
    }
}

/// Returns the same as [`runs_no_program`] for the text of a thread's `stat`.
fn is_of_no_program(stat: &[u8]) -> bool {
    has_ended(stat) || is_workers(stat)
}

/// Returns whether a process has ended and its parent has not waited for it yet.
pub fn is_zombie(process: u32) -> bool {
    let mut text = [0; 1024];
    let read = |text: &mut [u8]| {
        let file = open(numbered(&mut [0; 64], b"/proc/", process, &[b"/stat"])?).ok()?;
        read_at(&file, text, 0).ok()
    };
    read(&mut text).is_some_and(|length| is_ended_process(&text[..length]))
}

/// Returns whether this is the `stat` of a process that has ended. The first thread may end before the
/// others.
fn is_ended_process(stat: &[u8]) -> bool {
    const THREADS_FIELD: usize = 20;
    has_ended(stat) && field_of_stat(stat, THREADS_FIELD).is_some_and(|threads| threads <= 1)
}

fn has_ended(stat: &[u8]) -> bool {
    let end_of_name = stat.iter().rposition(|byte| *byte == b')').unwrap_or(0);
    matches!(stat.get(end_of_name + 2), Some(b'Z' | b'X'))
}

/// Returns whether the thread is one of the kernel in this process.
fn is_workers(stat: &[u8]) -> bool {
    const PF_IO_WORKER: u64 = 0x10;
    const PF_USER_WORKER: u64 = 0x4000;
    const FLAGS_FIELD: usize = 9;
    field_of_stat(stat, FLAGS_FIELD).is_some_and(|flags| flags & (PF_IO_WORKER | PF_USER_WORKER) != 0)
}

/// Returns the `status` of a thread of this process, as far as it fits into `text`. None if the thread
/// doesn't exist.
pub fn status_of(thread: u32, text: &mut [u8]) -> Option<&[u8]> {
    read_of_thread(thread, b"status", text)
}

/// Returns whether the calling thread can reach /proc.
pub fn is_reachable() -> bool {
    open(c"/proc/self/stat").is_ok()
}

/// Returns the content of a thread's short file. None if the thread doesn't exist.
fn read_of_thread<'t>(thread: u32, name: &[u8], text: &'t mut [u8]) -> Option<&'t [u8]> {
    let file = open(path_of_thread(&mut [0; 64], thread, name)?).ok()?;
    let length = read_at(&file, text, 0).ok()?;
    Some(&text[..length])
}

/// Builds the path of a file of a thread of this process.
pub(crate) fn path_of_thread<'p>(
    path: &'p mut [u8; 64],
    thread: u32,
    name: &[u8],
) -> Option<&'p core::ffi::CStr> {
    numbered(path, b"/proc/self/task/", thread, &[b"/", name])
}

/// Opens the file behind a descriptor of the calling thread once more, to read and write.
pub fn reopen(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut path = [0; 64];
    let path = numbered(&mut path, b"/proc/thread-self/fd/", fd.as_raw_fd() as u32, &[]);
    let path = path.ok_or(Errno::EINVAL)?;
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(|error| Errno(error.raw_os_error()))
}

/// Builds a path with a number in it.
fn numbered<'p>(
    path: &'p mut [u8; 64],
    before: &[u8],
    number: u32,
    after: &[&[u8]],
) -> Option<&'p core::ffi::CStr> {
    let mut digits = [0_u8; 10];
    let (mut first, mut rest) = (digits.len(), number);
    while first == digits.len() || rest > 0 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let mut end = 0;
    for part in [before, &digits[first..]].into_iter().chain(after.iter().copied()).chain([&b"\0"[..]]) {
        path.get_mut(end..end + part.len())?.copy_from_slice(part);
        end += part.len();
    }
    core::ffi::CStr::from_bytes_with_nul(&path[..end]).ok()
}

mod mappings;
#[cfg(test)]
mod tests;

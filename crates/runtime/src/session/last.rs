//! How a run's first process ends if it has several threads: the process executes a program that waits for
//! the summary.
//!
//! The other threads would go on while one thread waits, though destructors have run. exec ends these
//! threads, and not the process. The program is this library, whose entry point needs no loader. A debugger
//! or a filter of the program's would see the exec, and limits can make exec fail after the point of no
//! return. In these cases the process ends at once, and the summary comes later.
// UNSAFETY: a program's entry point is called in the kernel's way of starting a program.

use crate::session::Session;
use crate::session::first::{First, PATIENCE_NS, STATUS_FAILED};
use core::arch::naked_asm;
use core::ffi::{CStr, c_char};
use core::mem::offset_of;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use farpage_os::proc;
use farpage_os::seccomp;
use farpage_os::sys::{self, number};
use linux_raw_sys::errno::{EAGAIN, EINTR};
use linux_raw_sys::general as raw;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::process::{Resource, getrlimit};

/// Paths of this library and of the session.
static PATHS: [AtomicPtr<c_char>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];
/// Identity of the library's file when the library was loaded: device, inode, and time of its last change. 0
/// if unknown.
static FILE: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Remembers the paths of this library and of the session.
pub fn prepare(library: &'static CStr, session: &'static CStr) {
    let found = rustix::fs::stat(library).map(|stat| identity(&stat)).unwrap_or_default();
    FILE.iter().zip(found).for_each(|(word, found)| word.store(found, Ordering::Relaxed));
    // Ordering: Release publishes the path, and the identity of the file.
    PATHS[0].store(library.as_ptr().cast_mut(), Ordering::Release);
    PATHS[1].store(session.as_ptr().cast_mut(), Ordering::Release);
}

fn identity(stat: &Stat) -> [u64; 4] {
    [stat.st_dev, stat.st_ino, stat.st_ctime as u64, stat.st_ctime_nsec]
}

/// Turns the calling process into the program that waits and ends with `status`. Returns only if that isn't
/// possible.
pub fn execute(first: &First, status: i32) {
    // Ordering: Acquire pairs with the Release in `prepare`.
    let [library, session] = [0, 1].map(|path: usize| PATHS[path].load(Ordering::Acquire));
    if library.is_null() || session.is_null() || holds_robust_locks() || !is_unseen(first) || !has_memory() {
        return;
    }
    // SAFETY: `prepare` has stored both. Both are strings, and live for good.
    let (library, session) = unsafe { (CStr::from_ptr(library), CStr::from_ptr(session)) };
    // The exec is made only if the new program can open the files that it needs.
    let Some(file) = open_library(library).filter(|_| is_open_to_us(session)) else { return };
    // An argument may have any bytes but zero. The argument for status 0 is empty.
    let status = [status as u8, 0];
    let words = [library.as_ptr().addr(), session.as_ptr().addr(), status.as_ptr().addr(), 0];
    let environment = [0_usize];
    let lists = [words.as_ptr().addr(), environment.as_ptr().addr()];
    let arguments =
        [file.as_raw_fd() as usize, c"".as_ptr().addr(), lists[0], lists[1], raw::AT_EMPTY_PATH as usize, 0];
    // A signal that arms a thread would end the new program, which has no handler.
    let before = sys::block_all_signals();
    // SAFETY: the words end with NUL, and the lists with a null pointer. All live until the call returns.
    // After the first call the kernel no longer clears a word at this thread's end. Nobody waits for that
    // end, and the word's page could be out.
    unsafe {
        sys::call(raw::__NR_set_tid_address as usize, [0; 6]);
        sys::call(raw::__NR_execveat as usize, arguments);
    }
    sys::restore_signals(before);
}

/// Opens the library's file, if it is the one that was loaded. After a change of the root directory, or once
/// the library was replaced, anything may lie at that path, and root would execute it.
fn open_library(path: &CStr) -> Option<OwnedFd> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let known = FILE.each_ref().map(|word| word.load(Ordering::Relaxed));
    let is_same = identity(&rustix::fs::fstat(&file).ok()?) == known && known[1] != 0;
    is_same.then_some(file)
}

fn is_open_to_us(session: &CStr) -> bool {
    rustix::fs::open(session, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).is_ok()
}

/// Whether the calling thread holds robust locks. exec walks their list when the threads that serve faults
/// are gone. The walk must not wait for a page that is out then. The userfaultfd is closed with these
/// threads, so the walk wouldn't wait. Even so, the walk is left to an end without exec.
fn holds_robust_locks() -> bool {
    let (mut head, mut bytes) = (0_usize, 0_usize);
    let arguments = [0, (&raw mut head).addr(), (&raw mut bytes).addr(), 0, 0, 0];
    // SAFETY: the kernel writes two words, to variables that live until the call returns.
    if sys::check(unsafe { sys::call(raw::__NR_get_robust_list as usize, arguments) }).is_err() {
        return true;
    }
    if head == 0 {
        return false;
    }
    // The first word of a `robust_list_head` is the list's first entry, or the head itself if the list is
    // empty. The third word is a lock that is just being taken.
    // SAFETY: libc has registered the head, which lies in the thread's control block.
    let [first, _, pending] = unsafe { (head as *const [usize; 3]).read_volatile() };
    first != head || pending != 0
}

/// Whether neither a debugger nor a filter of seccomp that the program has installed sees what the process
/// does.
fn is_unseen(first: &First) -> bool {
    let mut text = [0; 4096];
    // SAFETY: the call takes no argument.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    let Some(status) = proc::status_of(own, &mut text) else { return false };
    let is_traced = !status.split(|byte| *byte == b'\n').any(|line| line == b"TracerPid:\t0");
    !is_traced && seccomp::filters_of(status) == Some(first.filters.load(Ordering::Relaxed))
}

/// Whether the limits leave enough memory for the new program. Without enough memory, exec ends the process
/// by SIGKILL.
fn has_memory() -> bool {
    const ENOUGH: u64 = 16 << 20;
    const ENOUGH_STACK: u64 = 256 << 10;
    let limits = [(Resource::As, ENOUGH), (Resource::Data, ENOUGH), (Resource::Stack, ENOUGH_STACK)];
    limits.into_iter().all(|(limit, enough)| getrlimit(limit).current.is_none_or(|bytes| bytes >= enough))
}

/// Returns the offset of a word of [`First`] in the session.
const fn at(word: usize) -> usize {
    offset_of!(Session, first) + word
}

/// The entry point of this library as a program. The arguments are the library, the session and the status, a
/// byte.
///
/// The entry point maps the session, says that the process ends and waits, and waits for [`First::is_seen`].
/// It touches no memory but its stack and the session, because nobody has relocated the library.
///
/// # Safety
/// Only the kernel may call this.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpage_last() -> ! {
    naked_asm!(
        // A library that is executed by hand has other arguments.
        "mov r12d, {failed}",
        "cmp qword ptr [rsp], 3",
        "jne 5f",
        "mov rsi, [rsp + 16]",
        "mov rax, [rsp + 24]",
        "movzx r12d, byte ptr [rax]",
        // openat(AT_FDCWD, session, O_RDWR)
        "mov edi, {at_cwd}",
        "mov edx, {read_write}",
        "xor r10d, r10d",
        "mov eax, {openat}",
        "syscall",
        "test eax, eax",
        "js 5f",
        // mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
        "mov r8d, eax",
        "xor edi, edi",
        "mov esi, {bytes}",
        "mov edx, 3",
        "mov r10d, 1",
        "xor r9d, r9d",
        "mov eax, {mmap}",
        "syscall",
        "cmp rax, -4096",
        "ja 5f",
        "mov rbx, rax",
        // The process waits, and has told. The supervisor sees the stores in this order.
        "mov dword ptr [rbx + {waits}], 1",
        "mov dword ptr [rbx + {has_told}], 1",
        "lea rdi, [rbx + {has_told}]",
        "mov esi, {wake}",
        "mov edx, 1",
        "mov eax, {futex}",
        "syscall",
        // A wait that ends early is made again.
        "push {nanoseconds}",
        "push {seconds}",
        "2:",
        "cmp dword ptr [rbx + {is_seen}], 0",
        "jne 3f",
        "lea rdi, [rbx + {is_seen}]",
        "mov esi, {wait}",
        "xor edx, edx",
        "mov r10, rsp",
        "mov eax, {futex}",
        "syscall",
        "test eax, eax",
        "jz 2b",
        "cmp eax, -{interrupted}",
        "je 2b",
        "cmp eax, -{changed}",
        "je 2b",
        "3:",
        "cmp dword ptr [rbx + {is_to_end}], 0",
        "je 5f",
        "mov r12d, {failed}",
        "5:",
        "mov edi, r12d",
        "mov eax, {exit_group}",
        "syscall",
        "ud2",
        at_cwd = const raw::AT_FDCWD,
        read_write = const raw::O_RDWR,
        openat = const raw::__NR_openat,
        mmap = const raw::__NR_mmap,
        bytes = const size_of::<Session>(),
        waits = const at(offset_of!(First, waits)),
        has_told = const at(offset_of!(First, has_told)),
        is_seen = const at(offset_of!(First, is_seen)),
        is_to_end = const at(offset_of!(First, is_to_end)),
        wake = const raw::FUTEX_WAKE,
        wait = const raw::FUTEX_WAIT,
        futex = const raw::__NR_futex,
        interrupted = const EINTR,
        changed = const EAGAIN,
        nanoseconds = const PATIENCE_NS % 1_000_000_000,
        seconds = const PATIENCE_NS / 1_000_000_000,
        failed = const STATUS_FAILED,
        exit_group = const raw::__NR_exit_group,
    )
}

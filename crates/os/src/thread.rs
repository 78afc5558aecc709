//! Engine threads: made by a bare `clone`, unknown to glibc, with a descriptor table of their own.
//!
//! * glibc doesn't count them, so a program whose last own thread ends still ends, and set-user-id calls and
//!   cancellation don't reach them.
//! * They block every signal but the one that libc keeps for its set-user-id calls, by which they are asked to take on what
//!   the program's credentials have become. Any other signal to the process goes to a thread of the program.
//! * The first one unshares the table of open files and closes all it inherited. The program can't close our
//!   descriptors (closing the userfaultfd would turn evicted pages into zeros), it doesn't see them, and we
//!   don't keep its pipes open.
//! * They have no thread-local storage: code that runs here is `no_std` down to the last crate. The segment
//!   register points to a block of zeros that holds only its own address, so that anything that tried would
//!   find null pointers instead of another thread's errno.
// UNSAFETY: making a thread without a library is assembly.

use crate::memory;
use crate::signal::{SIGSETXID, bit};
use crate::sys::{self, Errno, number};
use core::arch::naked_asm;
use core::sync::atomic::Ordering;
use farpage_core::roll_call::{Member, RollCall};
use farpage_core::units::PAGE_BYTES;

/// What an engine thread runs; never returns to its caller.
pub type Main = fn(argument: usize) -> !;

/// Whether a new thread shares the descriptor table of the one that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptors {
    /// Same table.
    Shared,
    /// A table of its own, empty.
    OwnEmpty,
    /// A table of its own, with this one only.
    Only(i32),
}

const CLONE_VM: usize = 0x100;
/// Of a thread that shares its maker's descriptors.
pub const CLONE_FILES: usize = 0x400;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SYSVSEM: usize = 0x4_0000;
const CLONE_SETTLS: usize = 0x8_0000;
const CLONE_PARENT_SETTID: usize = 0x10_0000;
const CLONE_CHILD_CLEARTID: usize = 0x20_0000;

/// What an engine thread is made with, if it shares descriptors.
pub const CLONE_FLAGS: usize = CLONE_VM
    | CLONE_FILES
    | CLONE_SIGHAND
    | CLONE_THREAD
    | CLONE_SYSVSEM
    | CLONE_SETTLS
    | CLONE_PARENT_SETTID
    | CLONE_CHILD_CLEARTID;

static THREADS: RollCall = RollCall::new();

/// The list of all engine threads, to call them.
pub fn roll_call() -> &'static RollCall {
    &THREADS
}

/// Every engine thread that there is, or is about to be.
pub fn all() -> impl Iterator<Item = &'static Member> {
    THREADS.all()
}

/// The calling thread, if it is an engine thread.
pub fn current() -> Option<&'static Member> {
    // SAFETY: takes nothing.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    THREADS.find(own)
}

/// Waits until a thread has ended, or `ns` have passed: the kernel wakes who waits when it writes 0.
pub fn wait_for_end(thread: &Member, ns: u64) {
    // Ordering: Acquire as in `Member::number`.
    let seen = thread.word().load(Ordering::Acquire);
    if seen != 0 {
        crate::futex::wait_for_shared(thread.word(), seen, ns);
    }
}

/// In a fork's child, which has none of its parent's engine threads.
pub fn forget_all() {
    THREADS.forget_all();
}

/// Bytes for a thread: its stack, with room below for a guard, and its block of zeros.
const STACK_BYTES: usize = 256 * 1024;

/// Starts a thread. It begins with every signal blocked but that by which engine threads are asked.
pub fn spawn(main: Main, argument: usize, descriptors: Descriptors) -> Result<(), Errno> {
    let bytes = PAGE_BYTES + STACK_BYTES + PAGE_BYTES;
    let base = memory::reserve(bytes)?;
    // SAFETY: a child has none of our threads.
    unsafe { memory::keep_from_children(base, bytes) }?;
    // SAFETY: the lowest page of the mapping just made becomes the guard: nothing refers to it yet.
    let guard = unsafe { rustix::mm::mprotect(base.cast(), PAGE_BYTES, rustix::mm::MprotectFlags::empty()) };
    guard.map_err(|error| Errno(error.raw_os_error()))?;
    // SAFETY: inside the mapping: the page above the stack.
    let block = unsafe { base.add(PAGE_BYTES + STACK_BYTES) };
    // Half the page lies below the address in the segment register, for offsets to either side.
    // SAFETY: inside that page, aligned.
    let segment = unsafe { block.add(PAGE_BYTES / 2) };
    // SAFETY: as above; the thread doesn't exist yet.
    unsafe { segment.cast::<*mut u8>().write(segment) };
    let start = Start { main, argument, descriptors };
    // SAFETY: the top of the stack holds the thread's start parameters, 16-byte aligned, inside the mapping.
    let top = unsafe { block.sub(64) };
    // SAFETY: as above.
    unsafe { top.cast::<Start>().write(start) };
    let flags = if descriptors == Descriptors::Shared { CLONE_FLAGS } else { CLONE_FLAGS & !CLONE_FILES };
    let place = THREADS.expect().ok_or(Errno(linux_raw_sys::errno::EAGAIN as i32))?;
    let mask = sys::block_all_signals();
    // SAFETY: the new stack is ours alone and big enough; the child never returns from `clone_thread`. The kernel writes to the
    // place, which lives as long as the process.
    let result = unsafe { clone_thread(flags, top, segment, place.word().as_ptr()) };
    sys::restore_signals(mask);
    sys::check(result).map(|_| ()).inspect_err(|_| place.give_up())
}

/// Below the size of the 64 bytes reserved at the top of the stack.
struct Start {
    main: Main,
    argument: usize,
    descriptors: Descriptors,
}

const _: () = assert!(size_of::<Start>() <= 64);

/// `clone(flags, stack, number, number, segment)`. In the parent it returns the thread's id or a negative error; the
/// child calls `begin` with the stack pointer it was given, which is where its [`Start`] lies.
#[unsafe(naked)]
unsafe extern "C" fn clone_thread(flags: usize, stack: *mut u8, segment: *mut u8, number: *mut u32) -> isize {
    naked_asm!(
        "mov r8, rdx", // segment
        "mov rdx, rcx", // where the parent's side writes the number
        "mov r10, rcx", // and what is cleared at the end
        "mov eax, {clone}",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "xor ebp, ebp",
        "mov rdi, rsp",
        "call {begin}",
        "ud2",
        clone = const number::CLONE,
        begin = sym begin,
    )
}

extern "C" fn begin(start: *const u8) -> ! {
    // SAFETY: `spawn` wrote a `Start` there, in memory that is this thread's own.
    let start = unsafe { start.cast::<Start>().read() };
    sys::open_signals(bit(SIGSETXID));
    match start.descriptors {
        Descriptors::Shared => {}
        Descriptors::OwnEmpty => close_descriptors(0, u32::MAX),
        Descriptors::Only(kept) => {
            let kept = kept as u32;
            if kept > 0 {
                close_descriptors(0, kept - 1);
            }
            close_descriptors(kept + 1, u32::MAX);
        }
    }
    (start.main)(start.argument)
}

/// Closes descriptors of the calling thread's own table. A kernel before 5.9 doesn't have the call, and what was
/// inherited would stay open; `farpage doctor` says that such a kernel is too old.
fn close_descriptors(first: u32, last: u32) {
    // SAFETY: takes no pointer; the table is this thread's alone, so nobody else loses a descriptor.
    unsafe { sys::call(number::CLOSE_RANGE, [first as usize, last as usize, 0, 0, 0, 0]) };
}

/// Ends the calling engine thread. Its stack stays: engine threads end only with the engine.
pub fn exit() -> ! {
    loop {
        // SAFETY: takes no pointer; ends this thread only.
        unsafe { sys::call(number::EXIT, [0, 0, 0, 0, 0, 0]) };
    }
}

/// Pins the calling thread to one CPU. Failure is harmless: it runs where it may.
pub fn pin_to_cpu(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Calls `visit` for each CPU that this process may run on.
pub fn for_each_cpu(mut visit: impl FnMut(usize)) {
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).for_each(&mut visit);
    }
}

/// Names the calling thread, as `ps -L` shows it.
pub fn set_name(name: &core::ffi::CStr) {
    let _ = rustix::thread::set_name(name);
}

/// What the kernel takes and gives as `struct sched_attr`, in its first version.
#[repr(C)]
#[derive(Default)]
struct SchedulingAttributes {
    bytes: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Asks for short turns on the CPU, and so for early ones: a thread that others wait for, and which is done soon, goes
/// before those that compute. Since Linux 6.12 anybody may; older kernels take no notice.
pub fn ask_for_short_turns() {
    const SHORTEST_NS: u64 = 100_000;
    change_scheduling(|attributes| attributes.runtime_ns = SHORTEST_NS);
}

/// The nice value of a thread that goes before all others.
pub const LEAST_NICE: i32 = -20;

/// Goes before all others, if it may: root's threads may, mostly. How nice it was, for [`be_as_nice_as`].
pub fn go_first() -> i32 {
    be_at_most_as_nice_as(LEAST_NICE)
}

/// Goes before those that are nicer than that, if it may. How nice it was, for [`be_as_nice_as`].
pub fn be_at_most_as_nice_as(most: i32) -> i32 {
    let mut before = 0;
    change_scheduling(|attributes| {
        before = attributes.nice;
        attributes.nice = before.min(most);
    });
    before
}

/// As nice as before [`go_first`].
pub fn be_as_nice_as(before: i32) {
    change_scheduling(|attributes| attributes.nice = before);
}

/// Changes this thread's attributes, if it is scheduled as usual, and allowed.
fn change_scheduling(change: impl FnOnce(&mut SchedulingAttributes)) {
    let bytes = size_of::<SchedulingAttributes>();
    let mut attributes = SchedulingAttributes::default();
    // SAFETY: the kernel writes as many bytes as we say, on our own stack.
    let got = unsafe { sys::call(number::SCHED_GETATTR, [0, &raw mut attributes as usize, bytes, 0, 0, 0]) };
    const OTHER: u32 = 0;
    if got != 0 || attributes.policy != OTHER {
        return;
    }
    attributes.bytes = bytes as u32;
    change(&mut attributes);
    // SAFETY: the kernel reads them; the rest is as it was.
    unsafe { sys::call(number::SCHED_SETATTR, [0, &raw const attributes as usize, 0, 0, 0, 0]) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    static RAN: AtomicUsize = AtomicUsize::new(0);
    static DONE: AtomicU32 = AtomicU32::new(0);

    fn main(argument: usize) -> ! {
        let descriptors =
            rustix::fs::open("/proc/thread-self/fd", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
        use rustix::fd::AsRawFd;
        // With an empty table the first descriptor is 0.
        // Never closed: built beside crates that switch on rustix's `std`, closing goes through libc, which looks
        // for its own thread in the segment register.
        let first = descriptors.map_or(-1, |fd| core::mem::ManuallyDrop::new(fd).as_raw_fd());
        RAN.store(argument + usize::from(first == 0), Ordering::Relaxed);
        DONE.store(1, Ordering::Release);
        crate::futex::wake(&DONE, 1);
        exit()
    }

    static KEPT: AtomicUsize = AtomicUsize::new(0);

    fn look(argument: usize) -> ! {
        let is_open = |fd: i32| {
            // SAFETY: only asked about.
            rustix::io::fcntl_getfd(unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) }).is_ok()
        };
        let open = (0..1024).filter(|fd| is_open(*fd)).count();
        KEPT.store(1 + usize::from(open == 1 && is_open(argument as i32)), Ordering::Release);
        crate::futex::wake(&DONE, 1);
        exit()
    }

    #[test]
    fn one_descriptor_may_be_kept() {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open("/proc/self/comm").unwrap();
        spawn(look, file.as_raw_fd() as usize, Descriptors::Only(file.as_raw_fd())).unwrap();
        while KEPT.load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(KEPT.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn thread_runs_with_its_argument_and_without_descriptors() {
        spawn(main, 41, Descriptors::OwnEmpty).unwrap();
        while DONE.load(Ordering::Acquire) == 0 {
            crate::futex::wait(&DONE, 0);
        }
        assert_eq!(RAN.load(Ordering::Relaxed), 42);
        // The test process still has its own.
        assert!(std::fs::metadata("/proc/self/fd/1").is_ok());
    }

    #[test]
    fn thread_that_went_first_is_as_nice_again_as_it_was() {
        let nices = std::thread::spawn(|| {
            let before = go_first();
            let first = go_first();
            be_as_nice_as(before);
            let after = be_at_most_as_nice_as(before + 3);
            let same = be_at_most_as_nice_as(before - 3);
            (before, first, after, same, go_first())
        });
        let (before, first, after, same, less) = nices.join().unwrap();
        assert_eq!((after, same), (before, before), "nobody became nicer");
        // Who may not stays as it is.
        assert!(first == -20 || first == before, "{first}");
        assert!(less == (before - 3).max(-20) || less == before, "{less}");
    }
}

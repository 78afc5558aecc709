//! Engine threads: made by a bare `clone`, unknown to glibc, with a descriptor table of their own.
//!
//! * glibc doesn't count engine threads. A program whose last own thread ends still ends. glibc's set-user-id
//!   calls and cancellation don't reach engine threads.
//! * Engine threads block every signal but the one that libc keeps for its set-user-id calls. That signal
//!   asks them to take on the program's new credentials. Any other signal to the process goes to a
//!   thread of the program.
//! * The first engine thread unshares the table of open files and closes all inherited descriptors. The
//!   program can't close the engine's descriptors (a closed userfaultfd would turn evicted pages into zeros)
//!   and doesn't see them. The engine doesn't keep the program's pipes open.
//! * Engine threads have no thread-local storage, because their code is `no_std` down to the last crate. The
//!   segment register points to a block of zeros that holds only its own address. Code that tried to use
//!   thread-local storage would find null pointers instead of another thread's errno.
// UNSAFETY: making a thread without a library is assembly.

use crate::memory;
use crate::signal::{SIGSETXID, bit};
use crate::sys::{self, Errno, number};
use core::arch::naked_asm;
use core::sync::atomic::Ordering;
use farpage_core::roll_call::{Member, RollCall};
use farpage_core::units::PAGE_BYTES;

/// The main function of an engine thread. Never returns to its caller.
pub type Main = fn(argument: usize) -> !;

/// Whether a new thread shares the descriptor table of the thread that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptors {
    /// The same table.
    Shared,
    /// A table of its own, empty.
    OwnEmpty,
    /// A table of its own, with this descriptor only.
    Only(i32),
}

const CLONE_VM: usize = 0x100;
/// The new thread shares its maker's descriptors.
pub const CLONE_FILES: usize = 0x400;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SYSVSEM: usize = 0x4_0000;
const CLONE_SETTLS: usize = 0x8_0000;
const CLONE_PARENT_SETTID: usize = 0x10_0000;
const CLONE_CHILD_CLEARTID: usize = 0x20_0000;

/// The flags of `clone` for an engine thread that shares descriptors.
pub const CLONE_FLAGS: usize = CLONE_VM
    | CLONE_FILES
    | CLONE_SIGHAND
    | CLONE_THREAD
    | CLONE_SYSVSEM
    | CLONE_SETTLS
    | CLONE_PARENT_SETTID
    | CLONE_CHILD_CLEARTID;

static THREADS: RollCall = RollCall::new();

/// Returns the list of all engine threads, by which they are called.
pub fn roll_call() -> &'static RollCall {
    &THREADS
}

/// Yields every engine thread that exists or is about to.
pub fn all() -> impl Iterator<Item = &'static Member> {
    THREADS.all()
}

/// Returns the calling thread's entry, if it is an engine thread.
pub fn current() -> Option<&'static Member> {
    // SAFETY: the call takes no argument.
    let own = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
    THREADS.find(own)
}

/// Waits until a thread has ended, or `ns` nanoseconds have passed. The kernel writes 0 to the thread's word
/// at its end and wakes the waiters.
pub fn wait_for_end(thread: &Member, ns: u64) {
    // Ordering: Acquire as in `Member::number`.
    let seen = thread.word().load(Ordering::Acquire);
    if seen != 0 {
        crate::futex::wait_for_shared(thread.word(), seen, ns);
    }
}

/// Empties the list in a fork's child, which has none of its parent's engine threads.
pub fn forget_all() {
    THREADS.forget_all();
}

/// Size of a thread's stack in bytes. The mapping has one page more below the stack for a guard, and one
/// above for the block of zeros.
const STACK_BYTES: usize = 256 * 1024;

/// Starts a thread. The thread begins with every signal blocked but the one by which engine threads are
/// asked.
pub fn spawn(main: Main, argument: usize, descriptors: Descriptors) -> Result<(), Errno> {
    let bytes = PAGE_BYTES + STACK_BYTES + PAGE_BYTES;
    let base = memory::reserve(bytes)?;
    // SAFETY: the mapping was just made, and a fork's child has none of the engine threads.
    unsafe { memory::keep_from_children(base, bytes) }?;
    // SAFETY: the lowest page of the mapping just made becomes the guard, and nothing refers to it yet.
    let guard = unsafe { rustix::mm::mprotect(base.cast(), PAGE_BYTES, rustix::mm::MprotectFlags::empty()) };
    guard.map_err(|error| Errno(error.raw_os_error()))?;
    // SAFETY: the page above the stack is inside the mapping.
    let block = unsafe { base.add(PAGE_BYTES + STACK_BYTES) };
    // Half of the page lies below the address in the segment register, for offsets to either side.
    // SAFETY: the address is inside that page, and aligned.
    let segment = unsafe { block.add(PAGE_BYTES / 2) };
    // SAFETY: the address is as above, and the thread that will use it doesn't exist yet.
    unsafe { segment.cast::<*mut u8>().write(segment) };
    let start = Start { main, argument, descriptors };
    // SAFETY: the top of the stack is inside the mapping and 16-byte aligned. The thread's start parameters
    // go there.
    let top = unsafe { block.sub(64) };
    // SAFETY: the address is as above, and the 64 bytes hold a `Start`.
    unsafe { top.cast::<Start>().write(start) };
    let flags = if descriptors == Descriptors::Shared { CLONE_FLAGS } else { CLONE_FLAGS & !CLONE_FILES };
    let place = THREADS.expect().ok_or(Errno::EAGAIN)?;
    let mask = sys::block_all_signals();
    // SAFETY: only the new thread uses the stack, which is big enough. The child never returns from
    // `clone_thread`. The kernel writes to the place, which lives as long as the process.
    let result = unsafe { clone_thread(flags, top, segment, place.word().as_ptr()) };
    sys::restore_signals(mask);
    sys::check(result).map(|_| ()).inspect_err(|_| place.give_up())
}

/// A thread's start parameters, no larger than the 64 bytes reserved at the top of the stack.
struct Start {
    main: Main,
    argument: usize,
    descriptors: Descriptors,
}

const _: () = assert!(size_of::<Start>() <= 64);

/// Makes the call `clone(flags, stack, number, number, segment)`. In the parent it returns the thread's id or
/// a negative error. The child calls `begin` with its initial stack pointer, where its [`Start`] lies.
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
    // SAFETY: `spawn` wrote a `Start` there, in memory that belongs to this thread alone.
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

/// Closes descriptors of the calling thread's own table. A kernel before 5.9 doesn't have the call, and
/// inherited descriptors would stay open. `farpage doctor` reports a kernel that old.
fn close_descriptors(first: u32, last: u32) {
    // SAFETY: the call takes no pointer. The table belongs to this thread alone, so no other thread loses a
    // descriptor.
    unsafe { sys::call(number::CLOSE_RANGE, [first as usize, last as usize, 0, 0, 0, 0]) };
}

/// Ends the calling engine thread. The thread's stack stays mapped, because engine threads end only with the
/// engine.
pub fn exit() -> ! {
    loop {
        // SAFETY: the call takes no pointer and ends this thread only.
        unsafe { sys::call(number::EXIT, [0, 0, 0, 0, 0, 0]) };
    }
}

/// Binds the calling thread to one CPU. A failure is harmless: the thread runs where it may.
pub fn bind_to_cpu(cpu: usize) {
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

/// Sets the calling thread's name, as `ps -L` shows it.
pub fn set_name(name: &core::ffi::CStr) {
    let _ = rustix::thread::set_name(name);
}

/// The kernel's `struct sched_attr`, in its first version.
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

/// Asks for short time slices, and thereby for an early turn on the CPU. A thread that other threads wait
/// for, and whose work is short, then goes before threads that compute. Any thread may ask since Linux 6.12.
/// Older kernels ignore the request.
pub fn ask_for_short_turns() {
    const SHORTEST_NS: u64 = 100_000;
    change_scheduling(|attributes| attributes.runtime_ns = SHORTEST_NS);
}

/// The lowest nice value. A thread with it goes before all threads with higher values.
pub const LEAST_NICE: i32 = -20;

/// Gives the calling thread the lowest nice value, if that is allowed. Root's threads mostly may. Returns the
/// nice value before, for [`be_as_nice_as`].
pub fn go_first() -> i32 {
    be_at_most_as_nice_as(LEAST_NICE)
}

/// Lowers the calling thread's nice value to `most`, if that is allowed. A lower value stays. Returns the
/// nice value before, for [`be_as_nice_as`].
pub fn be_at_most_as_nice_as(most: i32) -> i32 {
    let mut before = 0;
    change_scheduling(|attributes| {
        before = attributes.nice;
        attributes.nice = before.min(most);
    });
    before
}

/// Restores the nice value that [`go_first`] returned.
pub fn be_as_nice_as(before: i32) {
    change_scheduling(|attributes| attributes.nice = before);
}

/// Changes this thread's attributes, if it has the usual scheduling policy and may change them.
fn change_scheduling(change: impl FnOnce(&mut SchedulingAttributes)) {
    let bytes = size_of::<SchedulingAttributes>();
    let mut attributes = SchedulingAttributes::default();
    // SAFETY: the kernel writes at most `bytes` bytes to `attributes`, on our own stack.
    let got = unsafe { sys::call(number::SCHED_GETATTR, [0, &raw mut attributes as usize, bytes, 0, 0, 0]) };
    const OTHER: u32 = 0;
    if got != 0 || attributes.policy != OTHER {
        return;
    }
    attributes.bytes = bytes as u32;
    change(&mut attributes);
    // SAFETY: the kernel reads `attributes`. Fields that `change` leaves alone have the values that the
    // kernel gave.
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
        // The file is never closed. Built beside crates that switch on rustix's `std`, closing goes through
        // libc, which looks for its own thread in the segment register.
        let first = descriptors.map_or(-1, |fd| core::mem::ManuallyDrop::new(fd).as_raw_fd());
        RAN.store(argument + usize::from(first == 0), Ordering::Relaxed);
        DONE.store(1, Ordering::Release);
        crate::futex::wake(&DONE, 1);
        exit()
    }

    static KEPT: AtomicUsize = AtomicUsize::new(0);

    fn look(argument: usize) -> ! {
        let is_open = |fd: i32| {
            // SAFETY: the test only asks whether the descriptor is open.
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
        // A thread that may not lower its value keeps it.
        assert!(first == -20 || first == before, "{first}");
        assert!(less == (before - 3).max(-20) || less == before, "{less}");
    }
}

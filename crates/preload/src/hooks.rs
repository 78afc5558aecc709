//! The functions that replace libc's: they make the same calls and keep the engine's knowledge up to date.

use crate::init::engine;
use crate::patch::JUMP_BYTES;
use crate::stack::on_own_stack;
use crate::{credentials, dormant, exec, fork, peers};
use crate::{errno, libc_symbol, set_errno};
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use farpage_os::errno::returned;
use farpage_os::sys::{self, Errno, number};
use farpage_runtime::guard;
use farpage_runtime::mappings::changes::Arguments;
use farpage_runtime::privileges::credentials::Whose;
use farpage_runtime::session::first::First;

/// Bits of clone(2)'s flags that hold the signal at the child's end.
const SIGNAL: usize = 0xff;
const SIGCHLD: usize = 17;

/// Makes the call through the engine, or directly where there is no engine. Returns the kernel's word.
fn kernel(call: usize, arguments: Arguments) -> isize {
    if let Some(word) = dormant::call(call, arguments) {
        return word;
    }
    match engine() {
        Some(engine) => on_own_stack(engine, call, arguments),
        // SAFETY: the program's own call, unchanged.
        None => unsafe { sys::call(call, arguments) },
    }
}

/// Converts the kernel's word to C's convention: -1 and errno for an error.
pub fn result(word: isize) -> isize {
    match sys::check(word) {
        Ok(_) => word,
        Err(errno) => {
            set_errno(errno.0);
            -1
        }
    }
}

/// mmap(2)
pub extern "C" fn mmap(
    address: usize,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: usize,
) -> isize {
    let arguments = [address, bytes, protection as usize, flags as usize, fd as isize as usize, offset];
    result(kernel(number::MMAP, arguments))
}

/// munmap(2)
pub extern "C" fn munmap(address: usize, bytes: usize) -> c_int {
    result(kernel(number::MUNMAP, [address, bytes, 0, 0, 0, 0])) as c_int
}

/// mremap(2); the last argument is meaningful with MREMAP_FIXED and MREMAP_DONTUNMAP only.
pub extern "C" fn mremap(
    address: usize,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: usize,
) -> isize {
    const USES_ADDRESS: c_int = 2 | 4;
    let new_address = if flags & USES_ADDRESS != 0 { new_address } else { 0 };
    result(kernel(number::MREMAP, [address, bytes, new_bytes, flags as usize, new_address, 0]))
}

/// madvise(2)
pub extern "C" fn madvise(address: usize, bytes: usize, advice: c_int) -> c_int {
    result(kernel(number::MADVISE, [address, bytes, advice as usize, 0, 0, 0])) as c_int
}

/// mprotect(2)
pub extern "C" fn mprotect(address: usize, bytes: usize, protection: c_int) -> c_int {
    result(kernel(number::MPROTECT, [address, bytes, protection as usize, 0, 0, 0])) as c_int
}

/// pkey_mprotect(2)
pub extern "C" fn pkey_mprotect(address: usize, bytes: usize, protection: c_int, key: c_int) -> c_int {
    let call = if key == -1 { number::MPROTECT } else { number::PKEY_MPROTECT };
    result(kernel(call, [address, bytes, protection as usize, key as usize, 0, 0])) as c_int
}

/// mlock(2)
pub extern "C" fn mlock(address: usize, bytes: usize) -> c_int {
    result(kernel(number::MLOCK, [address, bytes, 0, 0, 0, 0])) as c_int
}

/// mlock2(2)
pub extern "C" fn mlock2(address: usize, bytes: usize, flags: c_int) -> c_int {
    result(kernel(number::MLOCK2, [address, bytes, flags as usize, 0, 0, 0])) as c_int
}

/// munlock(2)
pub extern "C" fn munlock(address: usize, bytes: usize) -> c_int {
    result(kernel(number::MUNLOCK, [address, bytes, 0, 0, 0, 0])) as c_int
}

/// mlockall(2)
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    result(kernel(number::MLOCKALL, [flags as usize, 0, 0, 0, 0, 0])) as c_int
}

/// munlockall(2)
pub extern "C" fn munlockall() -> c_int {
    result(kernel(number::MUNLOCKALL, [0; 6])) as c_int
}

/// mseal(2), which glibc has since 2.41
pub extern "C" fn mseal(address: usize, bytes: usize, flags: usize) -> c_int {
    result(kernel(number::MSEAL, [address, bytes, flags, 0, 0, 0])) as c_int
}

/// shmat(2)
pub extern "C" fn shmat(segment: c_int, address: usize, flags: c_int) -> isize {
    result(kernel(number::SHMAT, [segment as isize as usize, address, flags as usize, 0, 0, 0]))
}

/// process_madvise(2)
pub extern "C" fn process_madvise(fd: c_int, list: usize, count: usize, advice: c_int, flags: u32) -> isize {
    let arguments = [fd as isize as usize, list, count, advice as usize, flags as usize, 0];
    result(kernel(number::PROCESS_MADVISE, arguments))
}

/// glibc's variable for the break, which its `sbrk` reads.
static CURRENT_BREAK: AtomicPtr<*mut c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Finds glibc's variable for the break.
pub fn find_break() {
    CURRENT_BREAK.store(libc_symbol(c"__curbrk").cast(), Ordering::Relaxed);
}

/// Returns the break as glibc knows it; `otherwise` if glibc's variable isn't known.
pub fn current_break(otherwise: usize) -> usize {
    // SAFETY: null, or glibc's variable.
    unsafe { CURRENT_BREAK.load(Ordering::Relaxed).as_ref() }.map_or(otherwise, |place| *place as usize)
}

/// brk(2), and with it sbrk(3).
pub extern "C" fn brk(address: usize) -> c_int {
    let reached = kernel(number::BRK, [address, 0, 0, 0, 0, 0]);
    let variable = CURRENT_BREAK.load(Ordering::Relaxed);
    if !variable.is_null() {
        // SAFETY: glibc's `__curbrk`, which its own brk sets in just this way.
        unsafe { variable.write(reached as *mut c_void) };
    }
    if (reached as usize) < address {
        set_errno(Errno::ENOMEM.0);
        return -1;
    }
    0
}

/// Address of the system call instruction in libc's `syscall`, behind which libc sets errno and
/// returns; 0 if unknown.
static INSTRUCTION: AtomicUsize = AtomicUsize::new(0);

/// Finds that instruction in a function of `bytes` bytes.
pub fn find_system_call(function: *const u8, bytes: usize) {
    // SAFETY: libc's code, which can be read.
    let code = unsafe { core::slice::from_raw_parts(function, bytes) };
    if let Some(at) = code.windows(2).position(|pair| pair == [0x0f, 0x05]).filter(|at| *at >= JUMP_BYTES) {
        INSTRUCTION.store(function as usize + at, Ordering::Relaxed);
    }
}

/// Makes a system call at the instruction in libc's `syscall`. libc's code behind the instruction sets
/// errno and returns.
///
/// # Safety
/// As the call itself demands.
unsafe fn from_libc(instruction: usize, call: usize, arguments: Arguments) -> isize {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: libc's code behind the instruction changes errno, rcx and r11, and returns.
    unsafe {
        core::arch::asm!("call {at}", at = in(reg) instruction, inlateout("rax") call => result, in("rdi") a,
            in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _,
            clobber_abi("C"));
    }
    result
}

/// Makes a system call of the program's from libc's code, where an armed thread's calls are intercepted.
/// Changes errno if the call fails.
///
/// # Safety
/// As the call itself demands.
pub unsafe fn by_libc(call: usize, arguments: Arguments) -> Result<usize, Errno> {
    match INSTRUCTION.load(Ordering::Relaxed) {
        // SAFETY: the caller's promise.
        0 => sys::check(unsafe { sys::call(call, arguments) }),
        // SAFETY: likewise.
        instruction => match unsafe { from_libc(instruction, call, arguments) } {
            -1 => Err(Errno(errno())),
            word => Ok(word as usize),
        },
    }
}

/// Makes a call that runs another program, which stays in the run. Returns only if the call fails.
fn leave(call: usize, arguments: Arguments) -> isize {
    let (path, place) = if call == number::EXECVE { (0, 2) } else { (1, 3) };
    exec::executing(arguments[path], arguments[place], |environment| {
        let mut arguments = arguments;
        arguments[place] = environment;
        leave_as_it_is(call, arguments)
    })
}

fn leave_as_it_is(call: usize, arguments: Arguments) -> isize {
    // SAFETY: the program's own call, but for an environment that is as readable as its own.
    let make = || unsafe { by_libc(call, arguments) };
    let done = match engine() {
        Some(engine) => guard::leave_by(engine, make),
        None => make(),
    };
    result(done.map_or_else(|errno| -(errno.0 as isize), |word| word as isize))
}

/// _exit(2), which exit(3) ends with.
pub extern "C" fn exit_now(status: c_int) -> ! {
    let session = engine().map(|engine| engine.membership.session).or_else(dormant::session);
    sys::exit_group(session.map_or(status, |session| First::tell(session, status)))
}

/// execve(2), and with it libc's other functions of that kind.
pub extern "C" fn execve(path: usize, words: usize, environment: usize) -> c_int {
    leave(number::EXECVE, [path, words, environment, 0, 0, 0]) as c_int
}

/// execveat(2), which glibc has since 2.34
pub extern "C" fn execveat(
    directory: c_int,
    path: usize,
    words: usize,
    environment: usize,
    flags: c_int,
) -> c_int {
    let arguments = [directory as isize as usize, path, words, environment, flags as usize, 0];
    leave(number::EXECVEAT, arguments) as c_int
}

/// fexecve(3), which makes the call itself.
pub extern "C" fn fexecve(file: c_int, words: usize, environment: usize) -> c_int {
    const AT_EMPTY_PATH: usize = 0x1000;
    if file < 0 || words == 0 || environment == 0 {
        return result(returned::EINVAL) as c_int;
    }
    let path = c"".as_ptr() as usize;
    leave(number::EXECVEAT, [file as usize, path, words, environment, AT_EMPTY_PATH, 0]) as c_int
}

/// syscall(2): routes the same calls by number.
pub extern "C" fn syscall(call: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let arguments = [a, b, c, d, e, f];
    match call {
        number::MMAP
        | number::MUNMAP
        | number::MREMAP
        | number::MADVISE
        | number::MPROTECT
        | number::PKEY_MPROTECT
        | number::MLOCK
        | number::MLOCK2
        | number::MUNLOCK
        | number::MLOCKALL
        | number::MUNLOCKALL
        | number::MSEAL
        | number::PROCESS_MADVISE
        | number::SHMAT
        | number::BRK => result(kernel(call, arguments)),
        number::FORK => result(fork::forked([SIGCHLD, 0, 0, 0, 0, 0])),
        number::EXECVE | number::EXECVEAT => leave(call, arguments),
        number::EXIT_GROUP => exit_now(a as c_int),
        // A clone as fork makes it: no flag but the signal at the child's end.
        number::CLONE if a & !SIGNAL == 0 && b == 0 => result(fork::forked([a, 0, 0, 0, 0, 0])),
        // The call must not come from code of Farpage's, whose calls nobody intercepts. A child made in this
        // way doesn't get managed memory once anything is registered, so the child can't read a wrong byte.
        _ => {
            if let Some(word) = credentials::before_call(call, arguments) {
                return result(word);
            }
            let word = match INSTRUCTION.load(Ordering::Relaxed) {
                // SAFETY: the program's own call, unchanged.
                0 => result(unsafe { sys::call(call, arguments) }),
                // SAFETY: likewise.
                instruction => unsafe { from_libc(instruction, call, arguments) },
            };
            if word != -1 {
                credentials::follow_call(call, arguments, Whose::Own);
            } else {
                peers::note_failure(call, arguments, errno());
            }
            word
        }
    }
}

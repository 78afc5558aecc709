//! Filters of seccomp: what a program asks for, and what a thread has.
// UNSAFETY: a system call reads a structure through a pointer.

use crate::sys::{self, Errno, number};
use farpage_core::filter::Instruction;
use linux_raw_sys::general as raw;
use linux_raw_sys::prctl;

/// Operations of seccomp(2), and their numbers for prctl(2).
const SET_MODE_STRICT: usize = 0;
const SET_MODE_FILTER: usize = 1;
const MODE_STRICT: usize = 1;
const MODE_FILTER: usize = 2;
/// Flag: all threads of the process get the filter.
const TSYNC: usize = 1;
/// Flag: the call returns a descriptor by which a supervisor answers calls.
const NEW_LISTENER: usize = 8;
/// Flag: the call fails with ESRCH if a thread can't get the filter. Without it the call returns that thread.
const TSYNC_ESRCH: usize = 16;
/// Flag: only a fatal signal ends a wait for the supervisor.
const WAIT_KILLABLE_RECV: usize = 32;
/// The known flags. The others are LOG and SPEC_ALLOW.
const FLAGS: usize = 0x3f;

/// A program's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Strict mode: the calling thread may only read, write and end.
    Strict,
    /// An additional filter.
    Filter {
        /// Address of the filter's `struct sock_fprog`.
        program: usize,
        /// Index of the call's argument that holds the address.
        argument: usize,
        /// Whether every thread of the process gets the filter.
        for_all: bool,
    },
}

/// Returns what a call asks for. None if the call isn't about seccomp, or if the kernel refuses it regardless
/// of the memory's content.
pub fn asked(call: usize, arguments: &[usize; 6]) -> Option<Asked> {
    let [first, second, third, ..] = *arguments;
    match call as u32 {
        raw::__NR_prctl if first as u32 == prctl::PR_SET_SECCOMP => match second {
            MODE_STRICT => Some(Asked::Strict),
            MODE_FILTER => Some(Asked::Filter { program: third, argument: 2, for_all: false }),
            _ => None,
        },
        raw::__NR_seccomp => match first as u32 as usize {
            SET_MODE_STRICT => (second as u32 == 0 && third == 0).then_some(Asked::Strict),
            SET_MODE_FILTER if are_allowed(second as u32 as usize) => {
                Some(Asked::Filter { program: third, argument: 2, for_all: second & TSYNC != 0 })
            }
            _ => None,
        },
        _ => None,
    }
}

/// Returns whether a kernel takes these flags of seccomp(2) together.
const fn are_allowed(flags: usize) -> bool {
    // A call can't return both a descriptor and the thread that could not follow.
    let answers_twice = flags & (TSYNC | NEW_LISTENER | TSYNC_ESRCH) == TSYNC | NEW_LISTENER;
    let waits_for_nobody = flags & (WAIT_KILLABLE_RECV | NEW_LISTENER) == WAIT_KILLABLE_RECV;
    flags & !FLAGS == 0 && !answers_twice && !waits_for_nobody
}

/// A filter in the form that the kernel reads (`struct sock_fprog`).
#[repr(C)]
#[derive(Debug)]
pub struct Program {
    length: u16,
    first: *const Instruction,
}

impl Program {
    /// Returns a filter of these instructions, at most 65,535.
    pub const fn of(instructions: &[Instruction]) -> Program {
        Program { length: instructions.len() as u16, first: instructions.as_ptr() }
    }
}

/// Installs one more filter in the calling thread alone. Uses prctl(2), because a filter that the thread
/// already has may deny seccomp(2), which the engine calls nowhere.
pub fn install(instructions: &[Instruction]) -> Result<(), Errno> {
    let program = Program::of(instructions);
    let arguments = [prctl::PR_SET_SECCOMP as usize, MODE_FILTER, &raw const program as usize, 0, 0, 0];
    // SAFETY: the kernel reads the structure, and the number of instructions that the structure names.
    sys::check(unsafe { sys::call(number::PRCTL, arguments) }).map(|_| ())
}

/// Returns whether the calling thread may install filters at all.
pub fn may_install() -> bool {
    const CAP_SYS_ADMIN: u64 = 1 << 21;
    let arguments = [prctl::PR_GET_NO_NEW_PRIVS as usize, 0, 0, 0, 0, 0];
    // SAFETY: the call takes no pointer.
    let has_no_new_privileges = unsafe { sys::call(number::PRCTL, arguments) } == 1;
    has_no_new_privileges
        || crate::credentials::Capabilities::of(0).is_ok_and(|own| own.effective & CAP_SYS_ADMIN != 0)
}

/// Returns how many filters a thread has, by its `status` file; [`u32::MAX`] in strict mode. Kernels before
/// 5.9 say only whether a thread has any. For a thread that has some the answer is then 1.
pub fn filters_of(status: &[u8]) -> Option<u32> {
    let field = |name: &[u8]| {
        let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
        core::str::from_utf8(line.trim_ascii()).ok()?.parse::<u32>().ok()
    };
    let mode = field(b"Seccomp:")?;
    let count = field(b"Seccomp_filters:").unwrap_or(u32::from(mode == MODE_FILTER as u32));
    Some(if mode == MODE_STRICT as u32 { u32::MAX } else { count })
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpage_core::filter::is_valid;

    const SECCOMP: usize = raw::__NR_seccomp as usize;
    const PRCTL: usize = raw::__NR_prctl as usize;

    #[test]
    fn what_only_asks_about_filters_asks_for_none() {
        let filter = |for_all| Some(Asked::Filter { program: 7, argument: 2, for_all });
        assert_eq!(asked(SECCOMP, &[1, 0, 7, 0, 0, 0]), filter(false));
        assert_eq!(asked(SECCOMP, &[1, 1, 7, 0, 0, 0]), filter(true));
        assert_eq!(asked(SECCOMP, &[1, 1 | 8 | 16, 7, 0, 0, 0]), filter(true));
        assert_eq!(asked(SECCOMP, &[1, 8 | 32, 7, 0, 0, 0]), filter(false));
        assert_eq!(asked(SECCOMP, &[1, 1 | 8, 7, 0, 0, 0]), None, "two answers in one");
        assert_eq!(asked(SECCOMP, &[1, 32, 7, 0, 0, 0]), None, "nobody to wait for");
        assert_eq!(asked(PRCTL, &[22, 2, 7, 0, 0, 0]), filter(false));
        assert_eq!(asked(PRCTL, &[22, 1, 7, 0, 0, 0]), Some(Asked::Strict));
        assert_eq!(asked(SECCOMP, &[0, 0, 0, 0, 0, 0]), Some(Asked::Strict));
        assert_eq!(
            asked(SECCOMP, &[0, 1, 0, 0, 0, 0]),
            None,
            "how libseccomp asks whether there is the call"
        );
        assert_eq!(asked(SECCOMP, &[2, 0, 7, 0, 0, 0]), None, "which answers there are");
        assert_eq!(asked(SECCOMP, &[1, 1 << 6, 7, 0, 0, 0]), None, "a flag of another kernel");
        assert_eq!(asked(PRCTL, &[21, 0, 0, 0, 0, 0]), None, "whether there are any");
    }

    #[test]
    fn status_says_how_many_filters_there_are() {
        assert_eq!(filters_of(b"NoNewPrivs:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\n"), Some(0));
        assert_eq!(filters_of(b"Seccomp:\t2\nSeccomp_filters:\t3\n"), Some(3));
        assert_eq!(filters_of(b"Seccomp:\t2\n"), Some(1));
        assert_eq!(filters_of(b"Seccomp:\t1\nSeccomp_filters:\t0\n"), Some(u32::MAX));
        assert_eq!(filters_of(b"Name:\tx\n"), None);
        assert!(filters_of(&std::fs::read("/proc/thread-self/status").unwrap()).is_some());
    }

    /// Returns whether the kernel accepts a filter. A child asks, and ends with it.
    fn does_kernel_take(program: &[Instruction]) -> bool {
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { sys::call(number::FORK, [0; 6]) };
        assert!(child >= 0, "no child");
        if child == 0 {
            const NO_NEW_PRIVS: usize = prctl::PR_SET_NO_NEW_PRIVS as usize;
            // SAFETY: the call takes no pointer.
            unsafe { sys::call(number::PRCTL, [NO_NEW_PRIVS, 1, 0, 0, 0, 0]) };
            let is_refused = install(program).is_err();
            // An accepted filter may kill the child, or deny it this way to end.
            // SAFETY: the call takes no pointer. The write to address 0 is meant to end the child.
            unsafe {
                sys::call(number::EXIT_GROUP, [usize::from(is_refused), 0, 0, 0, 0, 0]);
                core::ptr::null_mut::<u8>().write_volatile(0);
            }
        }
        let mut status = 0_i32;
        let wait = raw::__NR_wait4 as usize;
        // SAFETY: the kernel writes the status to a word on our stack.
        unsafe { sys::call(wait, [child as usize, &raw mut status as usize, 0, 0, 0, 0]) };
        status != 1 << 8
    }

    /// Random programs, mostly of codes that filters may have: `is_valid` accepts exactly the programs that
    /// the kernel accepts.
    #[test]
    fn programs_are_taken_that_linux_takes() {
        const CODES: [u16; 24] = [
            0x20, 0x80, 0x81, 0x00, 0x01, 0x60, 0x61, 0x02, 0x03, 0x07, 0x87, 0x84, 0x05, 0x15, 0x1d, 0x45,
            0x04, 0x34, 0x3c, 0x64, 0x74, 0x94, 0x28, 0x16,
        ];
        let mut state = 7_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) % below
        };
        let mut taken = 0;
        for turn in 0..400 {
            let length = 1 + next(4) as usize;
            let mut program: Vec<_> = (0..length)
                .map(|_| Instruction {
                    code: CODES[next(CODES.len() as u64) as usize],
                    if_true: next(3) as u8,
                    if_false: next(3) as u8,
                    k: [0, 1, 4, 15, 16, 31, 32, 60, 64][next(9) as usize],
                })
                .collect();
            program.push(Instruction {
                code: if turn % 16 == 0 { 0x02 } else { 0x06 },
                ..Instruction::default()
            });
            let is_taken = is_valid(&program, &mut vec![0; program.len()]);
            assert_eq!(does_kernel_take(&program), is_taken, "{program:?}");
            taken += usize::from(is_taken);
        }
        assert!(taken > 40 && taken < 360, "{taken}");
    }
}

//! Replaces libc's functions that change what the program may do. Our threads, which libc doesn't know,
//! follow before the functions return.
//!
//! libc has all of its threads make the same call, so its functions can't be replaced. Functions of Farpage's
//! are exported under the same names and call libc's. libc's calls of its own functions don't come here
//! (`initgroups` sets groups). So functions that make these inner calls are exported, too.

use crate::dormant;
use crate::hooks;
use crate::init::engine;
use crate::next_symbol;
use crate::stack::{TO_BE_MADE, Task, perform};
use core::ffi::{CStr, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use farpage_runtime::engine::retire;
use farpage_runtime::guard::is_caller_armed;
use farpage_runtime::mappings::changes::Arguments;
use farpage_runtime::privileges::credentials::{Whose, is_about};
use farpage_runtime::privileges::filters;
use farpage_runtime::privileges::limits;
use linux_raw_sys::general as raw;

/// Has our threads follow a call that succeeded.
pub fn follow_call(call: usize, arguments: Arguments, whose: Whose) {
    if let Some(engine) = engine().filter(|_| is_about(call, &arguments)) {
        perform(engine, Task::Follow(call, arguments, whose));
    }
}

/// Prepares for a call. Returns the kernel's answer to a call that asks for a seccomp filter, or none if the
/// caller is to make the call. An armed thread's call is handled when it is made. A dormant process gets an
/// engine as long as it can have one.
pub fn before_call(call: usize, arguments: Arguments) -> Option<isize> {
    dormant::before_change(call, &arguments);
    let engine = engine().filter(|_| !is_caller_armed())?;
    if limits::is_about(call, &arguments) {
        perform(engine, Task::Limit(call, arguments));
    }
    if !filters::is_about(call, &arguments) {
        return None;
    }
    let answer = Some(perform(engine, Task::Filter(call, arguments))).filter(|answer| *answer != TO_BE_MADE);
    if answer.is_none() && engine.has_ended() {
        retire::let_others_leave(engine);
    }
    answer
}

/// A function of libc's that ours hides.
struct Hidden {
    name: &'static CStr,
    function: AtomicPtr<c_void>,
    call: u32,
    whose: Whose,
}

/// Up to five whole numbers or addresses. A function with fewer parameters doesn't look at the rest.
type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize) -> c_int;

impl Hidden {
    const fn new(name: &'static CStr, call: u32, whose: Whose) -> Hidden {
        Hidden { name, function: AtomicPtr::new(core::ptr::null_mut()), call, whose }
    }

    fn find(&self) -> *mut c_void {
        let found = next_symbol(self.name);
        self.function.store(found, Ordering::Relaxed);
        found
    }

    fn call(&self, [a, b, c, d, e]: [usize; 5]) -> c_int {
        let mut function = self.function.load(Ordering::Relaxed);
        if function.is_null() {
            // The caller is a library that was initialised before ours.
            function = self.find();
        }
        // SAFETY: libc's function of this name, whose arguments are these.
        let function = unsafe { core::mem::transmute::<*mut c_void, Function>(function) };
        if let Some(word) = before_call(self.call as usize, [a, b, c, d, e, 0]) {
            return hooks::result(word) as c_int;
        }
        // SAFETY: the program's own call, unchanged.
        let answer = unsafe { function(a, b, c, d, e) };
        if answer != -1 {
            follow_call(self.call as usize, [a, b, c, d, e, 0], self.whose);
        }
        answer
    }
}

/// Exports functions, each with the system call that it comes down to, and whose credentials the
/// call changes.
macro_rules! hidden {
    ($($name:ident: $call:ident, $whose:ident;)*) => {
        #[expect(non_upper_case_globals, reason = "each is named as its function")]
        mod all {
            use super::*;
            $(pub static $name: Hidden = Hidden::new(
                match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name with a zero in it"),
                },
                raw::$call,
                Whose::$whose,
            );)*
        }

        $(
            /// Calls libc's function of this name. Our threads follow.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize) -> c_int {
                all::$name.call([a, b, c, d, e])
            }
        )*

        /// Finds the functions that ours hide.
        pub fn prepare() {
            $(all::$name.find();)*
        }
    };
}

hidden! {
    setuid: __NR_setuid, All;
    setgid: __NR_setgid, All;
    seteuid: __NR_setresuid, All;
    setegid: __NR_setresgid, All;
    setreuid: __NR_setreuid, All;
    setregid: __NR_setregid, All;
    setresuid: __NR_setresuid, All;
    setresgid: __NR_setresgid, All;
    setgroups: __NR_setgroups, All;
    initgroups: __NR_setgroups, All;
    setfsuid: __NR_setfsuid, Own;
    setfsgid: __NR_setfsgid, Own;
    capset: __NR_capset, Own;
    prctl: __NR_prctl, Own;
    chroot: __NR_chroot, Own;
    unshare: __NR_unshare, Own;
    setns: __NR_setns, Own;
    setrlimit: __NR_setrlimit, Own;
    setrlimit64: __NR_setrlimit, Own;
    prlimit: __NR_prlimit64, Own;
    prlimit64: __NR_prlimit64, Own;
}

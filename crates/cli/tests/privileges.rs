//! Programs that give up privileges, in each mode: no thread that Farpage has put into them keeps a privilege
//! (`tests/programs/privileges.c`).

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Under, able, alone_with, compiled};
use farpage::{is_root, skip};

const RAM: u64 = 32 * MIB;
/// Status by which the program says that a container forbids even root to do this.
const NOT_ALLOWED: i32 = 77;

fn check(faults: &str, case: &str) {
    if !able("cc") {
        return;
    }
    if !is_root() {
        return skip("only root has something to give up");
    }
    let executable = compiled("privileges");
    let words = [executable.to_str().unwrap(), case];
    let outcome = Job::new(&Under::budget(RAM, &["--faults", faults]), &words).within(120).run();
    if outcome.status == Some(NOT_ALLOWED) {
        return skip("root may not change its root directory or namespaces here");
    }
    outcome.succeeded();
    assert!(outcome.counter("evict_taken") > 0, "nothing was evicted: {}", outcome.stderr);
}

macro_rules! cases {
    ($($mode:ident)+: $cases:tt) => {
        $(mod $mode {
            cases!(@each $mode $cases);
        })+
    };
    (@each $mode:ident { $($case:ident)+ }) => {
        $(#[test] fn $case() { crate::check(stringify!($mode), stringify!($case)); })+
    };
}

cases! {
    thread signal segv: {
        drops_root drops_root_before drops_root_by_number drops_root_by_own_code drops_root_by_own_code_before
        changes_its_user_and_back keeps_one_capability locks_itself can_be_looked_at another_thread_drops_root
        one_thread_drops_root_alone child_of_vfork_drops_root child_drops_root
        leaves_root leaves_root_before leaves_namespaces another_thread_leaves_root one_thread_leaves_root_alone
        drops_root_without_first_thread drops_root_by_own_code_without_first_thread leaves_root_without_first_thread
        may_open_nothing may_open_nothing_before may_start_nothing_before may_queue_no_signal_before
        may_have_no_more_memory may_have_no_more_memory_before may_have_no_more_data
    }
}

/// `su`, as operators use it: a program that is started as another user is managed, or says that it isn't.
#[test]
fn program_that_changes_its_user_starts_another() {
    let Some(_alone) = alone_with("setpriv") else { return };
    if !is_root() {
        return skip("only root can become another user");
    }
    let words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "id", "-u"];
    let outcome = Job::new(&Under::budget(RAM, &[]), &words).within(60).run();
    assert_eq!((outcome.status, outcome.text().trim()), (Some(0), "65534"), "{}", outcome.stderr);
}

//! Everything that a program can do to its memory while pages of it are evicted. The programs are in C
//! and know every byte.
//!
//! The programs are in `tests/programs`. Each takes the name of a case, works on three times its budget and
//! ends with 0 if every byte was right. Pages get in and out in one of three ways. Each case runs with one of
//! these, and with all under FARPAGE_TEST_SIZE=full (`make test-full`).

#[expect(dead_code, reason = "each test file uses its own part of it")]
mod farpage;

use farpage::budgeted::{Job, MIB, Under, able, compiled, compiled_in_units, is_full_size};
use std::process::Command;
use std::sync::{PoisonError, RwLock};

/// Returns the bytes that the programs take for a MiB: usually half of one. The engine's work, and so the
/// time, goes with the size.
fn unit_bytes() -> u64 {
    if is_full_size() { MIB } else { MIB / 2 }
}

const WAYS: [&str; 3] = ["mixed", "move", "copy"];

/// Programs for which the way matters in which pages go out.
const IN_EVERY_WAY: [&str; 1] = ["peer_writes"];

/// Cases that `thread` fails: nobody keeps the words that the kernel writes when a thread ends.
const NOT_IN_THREAD: [&str; 2] = ["thread_past_libc_before", "robust_mutexes"];

fn check(name: &str, case: &str) {
    let mode = std::env::var("FARPAGE_TEST_FAULTS");
    if !able("cc") || mode.as_deref() == Ok("thread") && NOT_IN_THREAD.contains(&case) {
        return;
    }
    let ways = match mode.as_deref() {
        // In `segv` mode there is only one way.
        Ok("segv") => &["copy"],
        Ok("signal") => &WAYS[..],
        _ => &WAYS,
    };
    if is_full_size() || IN_EVERY_WAY.contains(&name) {
        return ways.iter().for_each(|way| check_way(name, case, way));
    }
    // The way depends on the case's name alone, so that a failure comes back.
    let number: usize = case.bytes().map(usize::from).sum();
    check_way(name, case, ways[number % ways.len()]);
}

/// Cases that measure memory, and run alone. Other cases run two at a time (`make test-e2e`).
const MEASURED: [&str; 1] = ["zeros_read_and_then_written"];

fn check_way(name: &str, case: &str, way: &str) {
    static RUNNING: RwLock<()> = RwLock::new(());
    let is_measured = MEASURED.contains(&case);
    let _alone = is_measured.then(|| RUNNING.write().unwrap_or_else(PoisonError::into_inner));
    let _beside = (!is_measured).then(|| RUNNING.read().unwrap_or_else(PoisonError::into_inner));
    let options = &["--install", way];
    let executable = compiled_in_units(name, unit_bytes());
    let words = [executable.to_str().unwrap(), case];
    let outcome = Job::new(&Under::budget(32 * unit_bytes(), options), &words).within(120).run();
    eprintln!("{name} {case} {options:?}: {:.1} s", outcome.seconds);
    outcome.succeeded();
    assert!(outcome.counter("evict_taken") > 0, "nothing was evicted: {}", outcome.stderr);
}

macro_rules! cases {
    ($($program:ident: $($case:ident)+;)+) => {
        $(mod $program {
            $(#[test] fn $case() { crate::check(stringify!($program), stringify!($case)); })+
        })+
    };
}

cases! {
    remap: realloc_growth moved_growth grown_in_place shrunk moved_to_fixed_place moved_and_not_unmapped pieces
        halves_unmapped mapped_over page_by_page refused_calls several_at_once resized_beside_a_writer neighbour_in_the_way resized_within_a_page grown_and_still_read_only
        shrunk_from_what_is_not_managed grown_again_from_what_is_not_managed attached_over attached_by_nobody_else;
    advise: dont_need dont_need_of_a_process advice_of_a_process free_later other_advice advice_by_a_list_that_is_out dont_need_over_a_hole protected_and_back reserved_and_opened
        made_executable locked_and_unlocked unlocked_after_the_take_over all_locked locking_refused only_written_or_executed forbidden_before
        freed_before freed_up_to_a_file locked_up_to_a_hole sparse_lock_refused;
    heap: break_up_and_down small_blocks arenas small_mappings zeros_of_calloc zeros_read_and_then_written static_array
        static_array_with_content populated populated_from_a_file hint_that_can_not_be;
    io: files streams long_lines direct direct_while_pushed_out pipes pages_lent_to_a_pipe pinned_over_the_budget registered_before_the_budget moved_after_it_was_registered through_proc forbidden_while_out discarded_while_a_call_waits calls_wait_with_memory_that_is_only_read futexes
        all_in_one_call large_writes_that_wait two_writers_of_a_pipe large_messages reads_that_do_not_wait peer_that_leaves;
    sockets: queue_of_errors time_limit_of_all_waits reads_of_enough sets_of_descriptors
        peer_that_stops_reading;
    peer_writes: from_a_parent;
    threads: only_threads protection_changes thrown_away mapped_anew moved_and_back locked advised
        others_come_and_go many_change all_on_the_same_page threads_end robust_mutexes filled_by_many;
    signals: handlers_that_block_everything workers_that_block_everything workers_that_block_nothing ids_of_all_threads main_thread_ends
        stacks_never_touched child_without_handlers clones_that_fail copy_on_another_stack thread_that_is_cancelled
        what_the_program_believes threads_made_meanwhile forks_meanwhile child_whose_stack_is_out forks_that_wait_meanwhile write_barriers sent_while_at_work
        nothing_interrupts nothing_interrupts_after_a_stop handler_that_ends_a_wait handlers_change_during_forks handlers_that_block_from_now_on handler_that_waits;
    arming: handlers_that_were_there handlers_on_their_stack handlers_set_meanwhile all_reset_meanwhile threads_on_little_stacks
        handlers_that_map programs_run_meanwhile files_run_meanwhile stack_of_the_arming_stays frame_that_is_out libcs_handler_keeps_its_stack;
    handlers: on_its_own_stack on_the_interrupted_stack stacks_put_away handlers_come_and_go goes_on_elsewhere
        stack_that_is_out call_goes_on_after_handler while_a_write_waits masks_of_waiting_calls sent_while_returning
        sent_to_the_newborn heard_after_a_child little_stack_is_used never_come_back nowhere_to_run in_children;
    stacks: handler_on_managed_stack signals_all_the_time coroutines placed_thread_stacks threads_of_a_library stack_of_an_ended_thread;
    strange: closes_all_descriptors takes_our_numbers takes_our_numbers_while_out many_regions exhausts_its_stack limits_of_everything another_user another_root
        cleared_environment clones_of_nothing refused_programs changed_past_libc_before advised_past_libc_before
        thread_past_libc_before;
    processes: fork_within_budget fork_of_a_fork fork_after_giving_back fork_while_out fork_while_sparse
        line_of_forks_while_out many_children_while_out wiped_in_children wiped_up_to_a_file wiped_where_it_was_moved sealed_and_forked holes_of_its_own kept_from_children_and_given_again
        snapshots_beside_writers bare_clone
        programs_started_while_out borrowers_killed other_program_in_our_place forks_beside_threads moved_in_a_child last_thread_ends_by_the_call;
}

/// The table above and the programs must not drift apart.
#[test]
fn every_case_of_the_programs_is_tested() {
    if !able("cc") {
        return;
    }
    let tested = concat!(
        include_str!("memory_calls.rs"),
        include_str!("limits/budgets.rs"),
        include_str!("limits/ends.rs"),
        include_str!("limits/storage.rs")
    );
    let programs =
        "remap advise heap io sockets peer_writes threads stacks signals arming handlers processes strange";
    for name in programs.split(' ') {
        let usage = Command::new(compiled(name)).output().unwrap();
        let usage = String::from_utf8(usage.stderr).unwrap();
        for case in usage.lines().skip(1) {
            let case = case.trim();
            let mut words = tested.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            assert!(words.any(|word| word == case), "{name} {case} isn't tested");
        }
    }
}

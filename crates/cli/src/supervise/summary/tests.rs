//! Tests of each sentence of the summary, and of when it is printed.

use super::*;
use crate::supervise::session::Shared;
use crate::supervise::session::tests::{area, settings};
use crate::supervise::totals::tests::two_programs;
use farpage_core::stats::Latency;

fn with<T>(shared: &Shared, exit: ChildState, test: impl Fn(&Run) -> T) -> T {
    let budget = Budget {
        ram_bytes: 256 << 20,
        origin: "--ram 256M".into(),
        pool_bytes_max: 128 << 20,
        asked_bytes: None,
        limit: None,
    };
    test(&Run {
        program: &["/usr/bin/python3".into(), "x.py".into()],
        exit,
        resident_peak: 150 << 20,
        resident_most: Some(150 << 20),
        wall: Duration::from_millis(1500),
        budget: &budget,
        least_bytes: budget.ram_bytes,
        settings: &settings(),
        kills_over_budget: false,
        areas: &[area("/var/tmp", 1 << 20, &[])],
        totals: &Totals::of(shared.session()),
        names: &["/var/tmp".into()],
        oom: &oom::Report::default(),
        outside: &outside::Report::default(),
    })
}

/// Calls `test` with a run in which nothing is missing: notices, victims, processes without a budget.
pub(super) fn with_everything(exit: ChildState, test: impl FnMut(&Run)) {
    let shared = two_programs();
    shared.session().processes[0].notice(Notice::AreaFull, 5 << 20);
    shared.session().earlier_programs.store(1, std::sync::atomic::Ordering::Relaxed);
    let kills = oom::Kills { group: 1, machine: Some(2) };
    let oom = oom::Report { kills, last_kill: None, victims: vec![(9, "java".into())] };
    let seen = outside::Process::seen(7, "/bin/static", Some("a static program"), 1 << 20);
    let outside = outside::Report { processes: vec![seen], ..outside::Report::default() };
    let test = std::cell::RefCell::new(test);
    with(&shared, exit, |run| {
        let test = &mut *test.borrow_mut();
        test(&Run { oom: &oom, outside: &outside, ..*run });
    });
}

#[test]
fn summary_of_a_busy_run_has_a_dozen_lines() {
    let shared = two_programs();
    let lines = with(&shared, ChildState::Exited(0), text);
    assert_eq!(lines.len(), 11, "{lines:#?}");
    for words in [
        "python3 ended with status 0 after 1.5 s (2 processes",
        "256 MiB (--ram 256M); peak 250 MiB anonymous as sampled, 97.7 %",
        "1000 MiB seen at most, in memory and evicted: 3.9 times its budget",
        "2 MiB seen of 128 MiB at most, for 1,536 pages (auto, 3.0 : 1)",
        "960 pages in 480 slots, 1.9 MiB in 30 writes of 64 KiB, to /var/tmp",
        "3: 3 pool",
        "mean 15.0 µs",
        "problems   none",
    ] {
        assert!(lines.iter().any(|line| line.contains(words)), "{words} in {lines:#?}");
    }
}

#[test]
fn run_within_its_budget_gets_two_lines() {
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    let lines = with(&shared, ChildState::Exited(0), text);
    let several = "python3 and its processes, 2 in all, were not seen above their budget of 256 MiB (peak 250 MiB together, \
                   as sampled; the largest had at least 150 MiB in RAM, files included)";
    assert_eq!(lines, [several, "nothing was registered: no fault went through Farpage"]);
    let alone = |resident_peak| {
        shared.session().processes[1].pid.store(101, std::sync::atomic::Ordering::Relaxed);
        with(&shared, ChildState::Exited(0), |run| {
            text(&Run { resident_peak, resident_most: Some(resident_peak), ..*run })[0].clone()
        })
    };
    assert_eq!(
        alone(201 << 20),
        "python3 stayed within its budget of 256 MiB (peak 201 MiB in RAM, files included)"
    );
    let larger = "python3 was not seen above its budget of 256 MiB (peak 200 MiB anonymous, as sampled; 300 MiB in RAM, files included)";
    assert_eq!(alone(300 << 20), larger);
}

/// getrusage includes the peak of the launcher: `true`, started by a program of 300 MiB, has a
/// peak of 300 MiB.
#[test]
fn peak_of_a_launcher_is_not_the_programs() {
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    shared.session().processes[1].pid.store(101, std::sync::atomic::Ordering::Relaxed);
    let told = |most: Option<u64>| {
        with(&shared, ChildState::Exited(0), |run| {
            let run = Run { resident_peak: 9 << 20, resident_most: most, ..*run };
            (text(&run)[0].clone(), run.is_peak_known())
        })
    };
    // A process ran a program, and then another one by exec: the first program's peak may be hidden.
    let (line, is_known) = told(Some(300 << 20));
    assert!(
        line.contains("was not seen above") && line.contains("at least 9 MiB in RAM") && !is_known,
        "{line}"
    );
    let (line, is_known) = told(Some(20 << 20));
    assert!(line.contains("stayed within its budget of 256 MiB (peak at least 9 MiB") && !is_known, "{line}");
    let (line, is_known) = told(None);
    assert!(line.contains("was not seen above") && !is_known, "{line}");
    let (line, is_known) = told(Some(9 << 20));
    assert!(line.contains("stayed within its budget of 256 MiB (peak 9 MiB in RAM") && is_known, "{line}");
}

/// Each evicted page must be in a part, and "time lost" must not be told as more than 100 % of the run.
#[test]
fn parts_add_up_and_nothing_is_more_than_all() {
    let shared = two_programs();
    let stats = &shared.session().processes[0].stats;
    for (counter, count) in [
        (Counter::EvictTaken, 1000),
        (Counter::Zswpout, 500),
        (Counter::StoredIncompressible, 20),
        (Counter::SwpoutZero, 7),
        (Counter::EvictClean, 30),
        // Pages that were in the pool before they were written: 960 - 950 pages were not.
        (Counter::Zswpwb, 950),
    ] {
        stats.add(counter, count);
    }
    let row =
        |lines: &[String], label: &str| lines.iter().find(|line| line.starts_with(label)).unwrap().clone();
    let evicted = "  evicted    1,000 pages: 500 to the pool (20 as they are), 10 past the pool, 7 zero, 30 unchanged, \
                   453 kept, touched again or freed before that";
    assert_eq!(row(&with(&shared, ChildState::Exited(0), text), "  evicted"), evicted);
    for (ns, share) in
        [(750_000_000, "as much as 50.0 % of the run's time"), (4_000_000_000, "several waited at once")]
    {
        stats.latency(Latency::Pool).record(ns);
        let time = row(&with(&shared, ChildState::Exited(0), text), "  time lost");
        assert!(time.ends_with(&format!("summed over threads: {share}")), "{time}");
    }
}

/// A run over its budget must not have "problems none": many processes may each have less than an
/// engine needs.
#[test]
fn run_that_was_over_its_budget_has_a_problem() {
    let told = |peak_mib: u64, over: u64| {
        let shared = two_programs();
        shared.session().claims_peak.store(peak_mib << 20, std::sync::atomic::Ordering::Relaxed);
        shared.session().processes[0].stats.add(Counter::OverBudget, over);
        let lines = with(&shared, ChildState::Exited(0), text);
        lines.into_iter().filter(|line| line.starts_with("  problem")).collect::<Vec<_>>()
    };
    assert_eq!(told(268, 0), ["  problems   none"]);
    assert_eq!(
        told(300, 0),
        ["  problem    memory of 2 processes together was 44 MiB over the budget at its peak"]
    );
    assert_eq!(
        told(300, 3),
        [
            "  problem    3 times nothing more could be evicted near the budget or above it",
            "  problem    memory of 2 processes together was 44 MiB over the budget at its peak"
        ]
    );
}

#[test]
fn run_that_failed_within_its_budget_keeps_its_headline() {
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    for (exit, headline) in [
        (ChildState::Killed(9), "python3 was killed by SIGKILL after 1.5 s"),
        (ChildState::Exited(3), "python3 ended with status 3 after 1.5 s"),
    ] {
        let lines = with(&shared, exit, text);
        assert!(lines[0].starts_with(headline), "{lines:#?}");
        assert!(lines[1].contains("were not seen above their budget of 256 MiB"), "{lines:#?}");
        assert_eq!(lines.len(), 3, "{lines:#?}");
    }
}

/// Returns the summary after these kills, the last of them `seconds` before the end.
fn after_kills(
    seconds: u64,
    exit: ChildState,
    (group, machine): (u64, Option<u64>),
    victims: &[(u32, &str)],
) -> Vec<String> {
    use crate::host::budget::Limit;
    use crate::host::oom::{Kills, Report};
    let limit = Limit {
        source: "cgroup v2 memory.max",
        file: "/sys/fs/cgroup/a/memory.max".into(),
        bytes: 64 << 20,
        held_bytes: 4 << 20,
        runs_bytes: 0,
        runs_bytes_max: 0,
    };
    let victims = victims.iter().map(|(pid, command)| (*pid, (*command).to_owned())).collect();
    let last_kill = (group > 0 || machine > Some(0)).then(|| Duration::from_secs(seconds));
    let oom = Report { kills: Kills { group, machine }, last_kill, victims };
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    with(&shared, exit, |run| {
        let budget = Budget { limit: Some((limit.clone(), 54 << 20)), ..run.budget.clone() };
        let run = Run { oom: &oom, budget: &budget, ..*run };
        assert_eq!(json(&run)["oom_kills"]["cgroup"], group);
        text(&run)
    })
}

/// An hour before its end the kernel had ended another process. Then Slurm ended the program, and the kernel
/// was blamed.
#[test]
fn kill_long_before_the_end_is_not_blamed_for_it() {
    let killed = ChildState::Killed(9);
    let sent = "it was sent SIGKILL; the kernel counted no kill for memory then";
    let told = after_kills(3600, killed, (1, Some(1)), &[(7, "grow")]);
    let before = "; before, the kernel's out-of-memory killer ended a process in its cgroup; of the run ended at that time grow";
    assert!(told.iter().any(|line| line.contains(&format!("{sent}{before}"))), "{told:#?}");
    let told = after_kills(3600, killed, (0, Some(1)), &[]);
    assert!(told.iter().any(|line| line.ends_with(sent)), "{told:#?}");
    assert!(told.iter().any(|line| line.contains("none that is known to be of the run")), "{told:#?}");
}

/// A kill by SIGKILL must not stand beside "stayed within its budget".
#[test]
fn kill_for_memory_is_told_with_the_limit_and_a_budget_that_fits() {
    let lines = |exit, group, machine, victims: &[_]| after_kills(0, exit, (group, machine), victims);
    let (killed, ended) = (ChildState::Killed(9), ChildState::Exited(0));
    let fit = "; the tightest limit is 64 MiB in /sys/fs/cgroup/a/memory.max (cgroup v2 memory.max), of which 4 MiB were in use \
               before: use --ram 54M or less";
    for (exit, group, machine, victims, words) in [
        (
            killed,
            1,
            Some(1),
            &[(7, "python3")][..],
            "killer most likely ended it: a process in its cgroup meanwhile",
        ),
        (killed, 3, Some(3), &[], "killer most likely ended it: 3 processes in its cgroup meanwhile"),
        (
            ended,
            1,
            Some(1),
            &[(7, "gr\now")],
            "ended a process in its cgroup; of the run ended at that time gr\\now (pid 7); the",
        ),
        (ended, 2, None, &[], "killer ended 2 processes in its cgroup; the tightest"),
        (killed, 0, Some(2), &[], "most likely ended it: 2 processes on this machine meanwhile"),
    ] {
        let lines = lines(exit, group, machine, victims);
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[1].starts_with("  budget "), "{lines:#?}");
        assert!(
            lines[2].starts_with("  problem ") && lines[2].contains(words) && lines[2].contains(fit),
            "{lines:#?}"
        );
    }
    // Other kills on the machine need not be ours, and not every SIGKILL is the kernel's.
    for (victims, label, words) in [
        (&[][..], "note", "on this machine meanwhile, none that is known to be of the run"),
        (&[(7, "grow")], "problem", "on this machine meanwhile; of the run ended at that time grow (pid 7)"),
    ] {
        let told = lines(ended, 0, Some(1), victims);
        let start = format!("  {label:<10} the kernel's out-of-memory killer ended a process {words}");
        assert!(told[0].contains("not seen above") && told[2] == start, "{told:#?}");
    }
    assert!(lines(killed, 0, Some(0), &[])[3].contains("it was sent SIGKILL; the kernel counted no kill"));
    assert!(!lines(killed, 0, None, &[]).iter().any(|line| line.contains("problem")));
    assert!(!lines(ended, 0, Some(0), &[]).iter().any(|line| line.contains("problem")));
}

/// Lost data stood behind 20 rows of harmless notices, where nobody saw it.
#[test]
fn serious_problems_come_first_and_equal_ones_are_told_once() {
    let shared = Shared::new(settings(), &[]).unwrap();
    for (at, record) in shared.session().processes.iter().enumerate().take(30) {
        record.pid.store(1000 + at as u32, std::sync::atomic::Ordering::Release);
        record.notice(Notice::Locked, 0);
    }
    shared.session().processes[29].notice(Notice::Stopped, 1);
    let lines = with(&shared, ChildState::Exited(0), text);
    let problems: Vec<_> = lines.iter().filter(|line| line.starts_with("  problem ")).collect();
    assert_eq!(problems.len(), 2, "{lines:#?}");
    assert!(
        problems[0].starts_with("  problem    pid 1029: ") && problems[0].contains("STOPPED"),
        "{lines:#?}"
    );
    assert!(problems[1].starts_with("  problem    pid 1000 and 29 more: "), "{lines:#?}");
}

/// A run has not stayed within its budget if its processes could not be managed, or had too little
/// each to be managed.
#[test]
fn run_that_went_over_its_budget_unmanaged_says_so() {
    for (notice, peak, words) in [
        (Some(Notice::NotArmed), 250 << 20, "pid 101: "),
        (Some(Notice::Alone), 250 << 20, "pid 101: it runs without Farpage"),
        (Some(Notice::Retired), 250 << 20, "pid 101: Farpage has left it"),
        (None, 300 << 20, "memory was over the budget while no process was managed"),
    ] {
        let shared = two_programs();
        let processes = &shared.session().processes;
        processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
        shared.session().claims_peak.store(peak, std::sync::atomic::Ordering::Relaxed);
        notice.into_iter().for_each(|notice| processes[0].notice(notice, 101));
        let lines = with(&shared, ChildState::Exited(0), text);
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].starts_with("python3 ended with status 0"), "{lines:#?}");
        assert!(lines[1].starts_with("  budget     256 MiB (--ram 256M); peak"), "{lines:#?}");
        assert!(lines[2].starts_with(&format!("  problem    {words}")), "{lines:#?}");
    }
}

/// A process grew to many times the budget after its engine had ended. The budget's row had the last sample.
#[test]
fn peak_of_a_process_that_is_not_limited_any_more_is_the_kernels() {
    let row = |notice: Option<Notice>| {
        let shared = two_programs();
        for record in &shared.session().processes {
            record.stats.set(Gauge::AnonymousPeak, 0);
        }
        shared.session().claims_peak.store(100 << 20, std::sync::atomic::Ordering::Relaxed);
        notice.into_iter().for_each(|notice| shared.session().processes[0].notice(notice, 101));
        let lines = with(&shared, ChildState::Exited(0), text);
        lines.into_iter().find(|line| line.starts_with("  budget ")).unwrap()
    };
    let more = "; not all processes were limited all the time: the largest had at least 150 MiB in RAM, files included";
    assert!(row(Some(Notice::Retired)).ends_with(more), "{}", row(Some(Notice::Retired)));
    assert!(row(Some(Notice::Alone)).ends_with(more) && !row(None).contains(more));
}

/// "The tightest limit is 9.8 GiB (MemAvailable), of which 0 B were in use before": that was what was left.
#[test]
fn available_memory_is_no_limit() {
    let limit = |source, held_bytes| crate::host::budget::Limit {
        source,
        file: "/proc/meminfo".into(),
        bytes: 64 << 20,
        held_bytes,
        runs_bytes: 0,
        runs_bytes_max: 0,
    };
    let told = |limit: crate::host::budget::Limit| {
        with(&two_programs(), ChildState::Exited(0), |run| {
            let budget = Budget { limit: Some((limit.clone(), 54 << 20)), ..run.budget.clone() };
            fitting(&Run { budget: &budget, ..*run })
        })
    };
    let fits = ": use --ram 54M or less, or have more memory";
    let left = "; 64 MiB were available before, says /proc/meminfo (MemAvailable)";
    assert_eq!(told(limit("MemAvailable", 0)), format!("{left}{fits}"));
    assert_eq!(told(limit("x", 0)), format!("; the tightest limit is 64 MiB in /proc/meminfo (x){fits}"));
}

/// A program that `--ram 2M` has ended with 125 has not stayed within its budget.
#[test]
fn run_that_farpage_ended_did_not_stay_within_its_budget() {
    for (notice, words) in [
        (Notice::BudgetTooSmall, "below the 16 MiB it needs"),
        (Notice::NotStarted, "could not start in it"),
        (Notice::Stopped, "STOPPED rather than given wrong bytes"),
    ] {
        let shared = two_programs();
        shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
        shared.session().processes[0].notice(notice, 16 << 20);
        let lines = with(&shared, ChildState::Exited(125), text);
        assert_eq!(lines.len(), 2, "{lines:#?}");
        assert!(lines[0].starts_with("python3 ended with status 125"), "{lines:#?}");
        assert!(lines[1].starts_with("  problem    pid 101: "), "{lines:#?}");
        assert!(lines[1].contains(words), "{lines:#?}");
    }
}

#[test]
fn stop_of_a_busy_run_is_a_problem() {
    let shared = two_programs();
    shared.session().processes[1].notice(Notice::Stopped, 1);
    let lines = with(&shared, ChildState::Exited(125), text);
    assert!(lines.iter().any(|line| line.starts_with("  problem    pid 102: STOPPED")), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("none")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("  evicted")), "{lines:#?}");
}

/// If no thread could be made for Farpage, the summary must not say that the program ran.
#[test]
fn status_125_of_nobody_is_a_start_that_failed() {
    let nobody =
        |status| with(&Shared::new(settings(), &[]).unwrap(), ChildState::Exited(status), text)[1].clone();
    assert!(nobody(125).contains("could not start") && !nobody(125).contains("ran"), "{}", nobody(125));
    assert!(nobody(0).contains("what ran had no budget"), "{}", nobody(0));
}

/// Status 134 needs an explanation: the last words of the engine.
#[test]
fn last_words_of_an_engine_are_a_problem_in_one_harmless_line() {
    for active in [0, 1] {
        let shared = two_programs();
        shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, active));
        let _ = shared.session().last_words.write(102, format_args!("panicked at a.rs:1:2:\nno room\x1b[2J"));
        let lines = with(&shared, ChildState::Exited(134), text);
        let problem = "  problem    INTERNAL ERROR of Farpage in pid 102, which was ended with status 134: \
                       panicked at a.rs:1:2:; no room\\u{1b}[2J; please report it";
        assert!(lines.iter().any(|line| line == problem), "{lines:#?}");
        assert!(
            !lines.iter().any(|line| line.contains("stayed within") || line.contains("may be a bug")),
            "{lines:#?}"
        );
    }
}

/// A run with a static child, which has no budget, must not be called "within its budget".
#[test]
fn processes_without_a_budget_are_named_and_nothing_is_claimed_of_the_run() {
    for active in [0, 1] {
        let shared = two_programs();
        shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, active));
        let process = |pid, path: &str, why: Option<&str>, peak| outside::Process::seen(pid, path, why, peak);
        let mut processes =
            vec![process(7, "./grow\x07", Some("a static program"), 60 << 20), process(8, "x", None, 0)];
        processes.extend((10..20).map(|pid| process(pid, "y", None, 1 << 20)));
        let outside = outside::Report { processes, more: 3, missed: 2, was_full: true };
        let (lines, json) = with(&shared, ChildState::Exited(0), |run| {
            let run = Run { outside: &outside, ..*run };
            (text(&run), json(&run))
        });
        let start = "  outside    15 processes ran outside of this budget: ./grow\\u{7} (pid 7, seen with 60 MiB: a static program), x (pid 8: Farpage did not find it while it ran), ";
        let end = " and 7 more; the largest of the run had at least 150 MiB in RAM; 2 starts of programs were not followed, too many at once; 256 processes ran at once, as many as Farpage manages: whatever else was forked had no budget";
        assert!(lines.iter().any(|line| line.starts_with(start) && line.ends_with(end)), "{lines:#?}");
        assert!(
            !lines.iter().any(|line| line.contains("not seen above") || line.contains("none")),
            "{lines:#?}"
        );
        assert_eq!(
            (&json["outside"]["more"], &json["outside"]["processes"][0]["pid"]),
            (&3.into(), &7.into())
        );
    }
}

/// A script may start more programs than there are records. The summary must not give the number of records
/// as the number of processes.
#[test]
fn processes_beyond_the_records_may_have_been_there() {
    let shared = two_programs();
    for (at, record) in shared.session().processes.iter().enumerate() {
        record.pid.store(1000 + at as u32 % 250, std::sync::atomic::Ordering::Relaxed);
        record.stats.set(Gauge::Active, 0);
    }
    shared.session().earlier_programs.store(7, std::sync::atomic::Ordering::Relaxed);
    let lines = with(&shared, ChildState::Exited(1), text);
    assert!(lines[0].contains("(250 processes or more; "), "{lines:#?}");
    assert!(
        lines[1].contains("python3 and its processes, 250 or more in all, were not seen above"),
        "{lines:#?}"
    );
    // A process that executes itself again and again.
    let records = &shared.session().processes;
    records.iter().for_each(|record| record.pid.store(1000, std::sync::atomic::Ordering::Relaxed));
    let lines = with(&shared, ChildState::Exited(1), text);
    assert!(lines[0].contains("(1 process or more; "), "{lines:#?}");
}

/// If a limit left less meanwhile, "stayed within its budget of 256 MiB" is not the whole truth.
#[test]
fn budget_that_became_smaller_is_told_of_a_run_within_it() {
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    let lines = with(&shared, ChildState::Exited(0), |run| {
        text(&Run { least_bytes: run.budget.ram_bytes / 8, ..*run })
    });
    assert!(
        lines[0].contains("budget of 256 MiB, down to 32 MiB as a limit left no more (peak "),
        "{lines:#?}"
    );
}

/// A notice that something keeps a run from its budget, or a program from what it asked for, is a problem in
/// the end. "problems none" would be wrong.
#[test]
fn notices_of_what_went_wrong_are_problems() {
    for notice in Notice::ALL {
        let shared = two_programs();
        shared.session().processes[1].notice(notice, 1);
        let lines = with(&shared, ChildState::Exited(0), text);
        let is_told = lines.iter().any(|line| line.starts_with("  problem    pid 102: "));
        let is_none = lines.iter().any(|line| line == "  problems   none");
        assert_eq!(
            (is_told, is_none),
            (notice != Notice::Grew, notice == Notice::Grew),
            "{notice:?}: {lines:#?}"
        );
    }
}

/// Pages that lie in one of two areas must not be said to be written "to" both.
#[test]
fn areas_that_may_have_got_nothing_are_told_as_that() {
    let lines = with(&two_programs(), ChildState::Exited(0), |run| {
        let areas = [area("/first", 100, &[]), area("/second", 100, &[])];
        text(&Run { areas: &areas, ..*run })
    });
    assert!(lines.iter().any(|line| line.ends_with(", to some or all of /first, /second")), "{lines:#?}");
}

/// A program that ended during activation has registered memory.
#[test]
fn nothing_was_registered_only_if_nobody_has_registered_anything() {
    let shared = two_programs();
    shared.session().processes.iter().for_each(|record| record.stats.set(Gauge::Active, 0));
    let told = || with(&shared, ChildState::Exited(0), |run| text(run).join("\n"));
    assert!(told().contains("nothing was registered"), "{}", told());
    shared.session().processes[0].stats.add(Counter::Registered, 1);
    assert!(!told().contains("nothing was registered"), "{}", told());
}

/// A program's name can be anything, and a terminal must not obey it.
#[test]
fn name_of_the_program_is_printed_harmless() {
    let lines = with(&two_programs(), ChildState::Exited(1), |run| {
        text(&Run { program: &["/tmp/\x1b[2Jx".into()], ..*run })
    });
    assert!(lines[0].starts_with("\\u{1b}[2Jx ended with status 1"), "{lines:#?}");
}

/// The row had the area's path as it stands.
#[test]
fn name_of_an_area_is_printed_harmless() {
    let lines = with(&two_programs(), ChildState::Exited(0), |run| {
        let areas = [area("/\x1b[31m\nred", 1 << 20, &[])];
        text(&Run { areas: &areas, ..*run })
    });
    let name = r"/\u{1b}[31m\nred";
    assert!(lines.iter().any(|line| line.ends_with(&format!(", to {name}"))), "{lines:#?}");
    assert!(!lines.concat().contains(char::is_control), "{lines:#?}");
}

#[test]
fn status_134_may_be_our_bug() {
    let is_told = |status| {
        let lines = with(&two_programs(), ChildState::Exited(status), text);
        lines.iter().any(|line| line.contains("may be a bug in Farpage"))
    };
    assert!(is_told(134) && !is_told(0) && !is_told(133));
}

#[test]
fn written_row_says_how_much_came_from_the_pool() {
    let shared = two_programs();
    shared.session().processes[0].stats.add(Counter::Zswpwb, 950);
    shared.session().processes[0].stats.add(Counter::AreaSlots, 480);
    let lines = with(&shared, ChildState::Exited(0), text);
    let written =
        "  written    960 pages, 3.8 MiB in 30 writes of 128 KiB; 950 of them from the pool, to /var/tmp";
    assert!(lines.iter().any(|line| line == written), "{lines:#?}");
    assert!(lines.iter().any(|line| line == "  read       0 pages"), "{lines:#?}");
}

#[test]
fn run_that_nobody_reported_from_says_so() {
    let shared = Shared::new(settings(), &[]).unwrap();
    let lines = with(&shared, ChildState::Killed(9), text);
    assert_eq!(lines[0], "python3 was killed by SIGKILL after 1.5 s");
    assert!(lines[1].contains("no process reported"));
}

#[test]
fn lost_page_is_named_with_area_and_offset() {
    let shared = two_programs();
    let record = &shared.session().processes[0];
    record.stats.count(Counter::FaultLost);
    record.notice(Notice::ReadError, farpage_runtime::session::pack_io_error(0, 2, 5));
    let lines = with(&shared, ChildState::Killed(7), text);
    assert!(lines.iter().any(|line| line.contains("/var/tmp at offset 8,192")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("1 faults on lost pages")), "{lines:#?}");
}

#[test]
fn json_has_every_row_of_every_table() {
    let json = with(&two_programs(), ChildState::Killed(15), json);
    assert_eq!(json["schema"], 1);
    let explained = |name: &str, unit: &str| {
        let help = json["legend"][name]["help"].as_str().unwrap_or_default();
        json["legend"][name]["unit"] == unit && help.ends_with('.') && help == help.trim()
    };
    for counter in Counter::ALL {
        assert!(json["counters"][counter.name()].is_u64(), "{}", counter.name());
        assert!(explained(counter.name(), counter.unit()), "{}", counter.name());
    }
    for gauge in Gauge::ALL {
        assert!(json["gauges"][gauge.name()].is_u64(), "{}", gauge.name());
        assert!(explained(gauge.name(), gauge.unit()), "{}", gauge.name());
    }
    assert_eq!(
        json["legend"]["pswpin"],
        serde_json::json!({ "unit": "pages", "help": "Pages read from areas." })
    );
    for kind in Latency::ALL.iter().map(|kind| kind.name()).chain(["total"]) {
        assert!(json["latency_ns"][kind]["p99"].is_u64(), "{kind}");
    }
    assert_eq!(json["latency_ns"]["total"]["max"], 20_000);
    assert_eq!(json["processes"][1]["counters"]["pswpout"], 640);
    assert_eq!(json["exit"]["name"], "SIGTERM");
    assert_eq!(json["settings"]["areas"][0]["name"], "/var/tmp");
}

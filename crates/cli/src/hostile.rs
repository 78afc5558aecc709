//! Runs every reader of a session on every kind of damage. Each reader must end soon, with output that is
//! bounded and printable.

use crate::host::budget::{Budget, Roots};
use crate::host::neighbours::Neighbours;
use crate::host::oom::{self, Kills};
use crate::host::sys::ChildState;
use crate::options::ShowOptions;
use crate::show;
use crate::supervise::headroom::Headroom;
use crate::supervise::notices::{self, About, Watcher, Weight};
use crate::supervise::outside::Outside;
use crate::supervise::session::Shared;
use crate::supervise::session::tests::{area, settings};
use crate::supervise::summary::{self, Run};
use crate::supervise::totals::tests::two_programs;
use crate::supervise::totals::{self, Totals};
use crate::text::say;
use farpage_runtime::session::head::SessionHead;
use farpage_runtime::session::{Notice, Session};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Most bytes of one line: two long names and a sentence, each character escaped.
const LINE_BYTES_MAX: usize = 8 << 10;
/// Most lines of a summary.
const LINES_MAX: usize = 60;
/// Most bytes of the JSON about 256 processes.
const JSON_BYTES_MAX: usize = 8 << 20;
/// Longest time that one look at a session may take, in a build without optimisation beside other tests.
const LOOK_MAX: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    /// The session is filled with one byte.
    Filled(u8),
    /// The session is filled with noise.
    Noise,
    /// The head is as it was, the rest is noise.
    NoiseBehindTheHead,
    /// The head is as it was, the rest is all ones.
    OnesBehindTheHead,
    /// Some words are noise.
    Words,
    /// Processes and notices that could be, with counters and names that are noise.
    Plausible,
}

/// xorshift64. The numbers need only be the same in each run.
struct Noise(u64);

impl Noise {
    fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn damage(shared: &Shared, kind: Damage, seed: u64) {
    let mut noise = Noise(seed | 1);
    let file = File::options().read(true).write(true).open(shared.path()).unwrap();
    let mut image = std::fs::read(shared.path()).unwrap();
    let (all, head) = (0..image.len(), size_of::<SessionHead>());
    let mut fill = |bytes: &mut [u8]| {
        bytes.chunks_mut(8).for_each(|to| to.copy_from_slice(&noise.word().to_le_bytes()[..to.len()]));
    };
    match kind {
        Damage::Filled(byte) => image.fill(byte),
        Damage::Noise => fill(&mut image),
        Damage::NoiseBehindTheHead | Damage::Plausible => fill(&mut image[head..]),
        Damage::OnesBehindTheHead => image[head..].fill(0xff),
        Damage::Words => {
            for _ in 0..100 {
                let at = noise.word() as usize % (all.end - 8);
                image[at..at + 8].copy_from_slice(&noise.word().to_le_bytes());
            }
        }
    }
    file.write_all_at(&image, 0).unwrap();
    if kind == Damage::Plausible {
        for record in &shared.session().processes {
            record.pid.store(noise.word() as u32 % 4000, Ordering::Relaxed);
            let told = noise.word() as u32 % (1 << Notice::ALL.len());
            record.notices.store(told, Ordering::Relaxed);
        }
    }
}

#[track_caller]
fn is_printable(text: &str, bytes_max: usize) {
    assert!(text.len() <= bytes_max, "{} bytes", text.len());
    let bad = text.chars().find(|c| *c != '\n' && c.is_control() || ('\u{202a}'..='\u{202e}').contains(c));
    assert_eq!(bad, None);
}

#[track_caller]
fn are_lines(lines: &[String], count_max: usize) {
    assert!(lines.len() <= count_max, "{} lines", lines.len());
    for line in lines {
        assert!(!line.contains('\n'), "{line}");
        is_printable(line, LINE_BYTES_MAX);
    }
}

/// Does all that the supervisor and `farpage show` do with a session.
fn read_everything(shared: &Shared) {
    let session = shared.session();
    let budget = Budget {
        ram_bytes: 1 << 20,
        origin: "--ram 1M".into(),
        pool_bytes_max: 1 << 19,
        asked_bytes: None,
        limit: None,
    };
    let (areas, names) = ([area("/var/tmp", 1 << 20, &[])], ["/var/tmp".to_owned()]);
    let about = About { areas: &names, files: &areas, budget: &budget };
    let _ = shared.damage();
    let mut watcher = Watcher::new(session, Weight::Information);
    for tenth in 0..5 {
        let now = Instant::now() + Duration::from_millis(100 * tenth);
        // Ten lines of each weight, and one on those that are held back.
        are_lines(&watcher.news(session, &about, now), 21);
    }
    are_lines(&Vec::from_iter(watcher.rest()), 1);
    let victims = session.processes.iter().take(3).map(|record| (1, totals::command(record))).collect();
    let oom = oom::Report { kills: Kills { group: 1, machine: Some(1) }, last_kill: None, victims };
    are_lines(&notices::over_budget(shared, &about), 3);
    let mut headroom = Headroom::new(Roots::of_this_machine(), budget.ram_bytes, Neighbours::default());
    headroom.look(shared);
    are_lines(&Vec::from_iter(headroom.news()), 1);
    let mut found = Outside::default();
    found.look(shared, &totals::members(shared));
    let outside = found.report(shared);
    let run = Run {
        program: &["program".into()],
        exit: ChildState::Exited(0),
        resident_peak: 1 << 20,
        resident_most: Some(1 << 20),
        wall: Duration::from_secs(1),
        budget: &budget,
        least_bytes: budget.ram_bytes,
        settings: &settings(),
        kills_over_budget: false,
        areas: &areas,
        totals: &Totals::of(session),
        names: &names,
        oom: &oom,
        outside: &outside,
    };
    are_lines(&summary::text(&run), LINES_MAX);
    is_printable(&say::json(&summary::json(&run)), JSON_BYTES_MAX);
    for json in [false, true] {
        let options = ShowOptions { pid: 1, columns: Vec::new(), noheadings: false, bytes: false, json };
        let shown = show::look(shared.memory(), &options);
        is_printable(&shown.unwrap_or_default(), JSON_BYTES_MAX);
    }
}

/// A program that overwrites the session must not have the supervisor print control characters, or
/// nonsense without end.
#[test]
fn whatever_a_session_holds_its_readers_end_soon_and_print_little() {
    let kinds = [
        Damage::Filled(0),
        Damage::Filled(0xff),
        Damage::Filled(0x1b),
        Damage::Noise,
        Damage::NoiseBehindTheHead,
        Damage::OnesBehindTheHead,
        Damage::Words,
        Damage::Plausible,
    ];
    for seed in 1..=5_u64 {
        for kind in kinds {
            let shared = two_programs();
            assert_eq!(shared.damage(), None);
            damage(&shared, kind, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let start = Instant::now();
            read_everything(&shared);
            assert!(start.elapsed() < LOOK_MAX, "{kind:?} with {seed} took {:?}", start.elapsed());
            let is_noticed = shared.damage().is_some();
            assert!(is_noticed || matches!(kind, Damage::Words | Damage::Plausible), "{kind:?} with {seed}");
        }
    }
}

/// Writes noise, plausible values and the first content in turn, in pieces of any size, until `is_over`.
fn write_until(path: &str, session: &Session, seed: u64, is_over: &AtomicBool) -> u64 {
    let (first, mut noise) = (std::fs::read(path).unwrap(), Noise(seed | 1));
    let file = File::options().read(true).write(true).open(path).unwrap();
    let records = &session.processes;
    let mut writes = 0;
    while !is_over.load(Ordering::Relaxed) {
        let record = &records[noise.word() as usize % 4];
        match noise.word() % 256 {
            0 => {
                let at = noise.word() as usize % first.len();
                let end = (at + noise.word() as usize % 50_000).min(first.len());
                let piece: Vec<u8> = (at..end).map(|_| noise.word() as u8).collect();
                file.write_all_at(&piece, at as u64).unwrap();
            }
            1 => file.write_all_at(&first, 0).unwrap(),
            2..100 => record.pid.store(0, Ordering::Relaxed),
            100..200 => record.pid.store(noise.word() as u32 % 4000, Ordering::Relaxed),
            200..220 => record.command.iter().for_each(|word| word.store(noise.word(), Ordering::Relaxed)),
            _ => {
                let told = noise.word() as u32 % (1 << Notice::ALL.len());
                record.notices.store(told, Ordering::Relaxed);
            }
        }
        writes += 1;
    }
    writes
}

/// A value that was looked at may be another one by the time it is used: a record had a process,
/// and has none.
#[test]
fn session_that_is_written_while_it_is_read_is_told_of_in_bounds() {
    const LOOKS: usize = 20;
    for seed in 1..=3_u64 {
        let (shared, is_over) = (two_programs(), AtomicBool::new(false));
        let (path, session) = (shared.path(), shared.session());
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_until(&path, session, seed, &is_over));
            let _ended = Ending(&is_over);
            for _ in 0..LOOKS {
                read_everything(&shared);
                // The shorter call runs much more often, because a moment between two reads is short.
                (0..1_000).for_each(|_| _ = Totals::of(session));
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(writer.join().unwrap() > 0);
        });
    }
}

/// Ends the writer also when a reader panics.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each word of the head decides what some process does.
#[test]
fn each_word_of_the_head_is_missed_when_it_changes() {
    let shared = two_programs();
    let file = File::options().read(true).write(true).open(shared.path()).unwrap();
    for at in (0..size_of::<SessionHead>() as u64).step_by(8) {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        file.write_all_at(&word.map(|byte| !byte), at).unwrap();
        assert!(shared.damage().is_some(), "at {at}");
        file.write_all_at(&word, at).unwrap();
        assert_eq!(shared.damage(), None, "at {at}");
    }
}

#[test]
fn record_that_no_process_can_have_is_damage() {
    let breaks: [fn(&Session); 3] = [
        |session| session.processes[0].pid.store(u32::MAX, Ordering::Relaxed),
        |session| session.processes[0].notices.store(1 << 31, Ordering::Relaxed),
        // Nobody has this record.
        |session| session.processes[9].notices.store(1, Ordering::Relaxed),
    ];
    for (at, damage) in breaks.into_iter().enumerate() {
        let shared = two_programs();
        shared.session().processes[0].notice(Notice::Locked, 0);
        assert_eq!(shared.damage(), None);
        damage(shared.session());
        assert!(shared.damage().is_some(), "{at}");
    }
}

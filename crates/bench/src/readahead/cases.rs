//! The cases: loads with their sizes and budgets.

use crate::Effort;
use crate::live::Outcome;

/// The kind of comparison that a case is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sequential and random walkers in one process: the published experiment.
    Mixed,
    /// The published experiment in two processes, so that each part has counters of its own.
    Apart,
    /// The published experiment in other shapes.
    MixedOther,
    /// 16 streams.
    Interleaved,
    /// Strides and backward.
    Walk,
    /// A factorization.
    Lu,
}

/// One load under all policies.
pub struct Case {
    /// The kind of comparison.
    pub kind: Kind,
    /// Name in the chart.
    pub name: &'static str,
    /// Title of its tables.
    pub title: String,
    /// Runs of each policy.
    pub rounds: usize,
    budget_mib: u64,
    options: &'static [&'static str],
    load: Vec<String>,
}

impl Case {
    /// Returns the options of `farpage run`. Only the policy differs between runs.
    pub fn options(&self, policy: &str) -> Vec<String> {
        let budget = format!("{}M", self.budget_mib);
        let words = ["--ram", &budget, "--readahead", policy];
        words.iter().chain(self.options).map(|word| (*word).to_owned()).collect()
    }

    /// Returns the words after `farpage load`.
    pub fn load(&self) -> Vec<String> {
        self.load.clone()
    }

    /// Returns the parts that the load counts separately.
    pub fn parts(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Mixed | Kind::Apart | Kind::MixedOther => &["sequential", "random"],
            Kind::Interleaved | Kind::Walk => &["sequential"],
            Kind::Lu => &[],
        }
    }

    /// Checks that a factorization gives the same bits under every policy.
    pub fn compare(&self, outcomes: &[Vec<Outcome>]) -> Result<(), String> {
        let mut digests = outcomes.iter().flatten().map(|outcome| &outcome.load["digest"]);
        let first = digests.next();
        match digests.all(|digest| Some(digest) == first) {
            true => Ok(()),
            false => Err("the factors aren't the same under every policy".to_owned()),
        }
    }
}

/// Sizes in MiB, times in seconds, and rounds.
struct Sizes {
    budget: u64,
    /// 5/3 of the budget.
    sequential: u64,
    /// Four times the budget, so that most touches of random walkers find their page evicted.
    random: u64,
    seconds: f64,
    /// For cases about hit rates. Pages that a walk brought in but didn't reach before its end are never
    /// used, and should weigh little. The target for a single walk is strictest, two pages of 10,000, so its
    /// time `seconds_apart` is longest.
    seconds_long: f64,
    seconds_apart: f64,
    lu_budget: u64,
    lu: u64,
    rounds: usize,
    rounds_other: usize,
}

fn sizes(effort: Effort) -> Sizes {
    effort.pick(
        Sizes {
            budget: 60,
            sequential: 100,
            random: 240,
            seconds: 1.2,
            seconds_long: 6.0,
            seconds_apart: 12.0,
            lu_budget: 28,
            lu: 36,
            rounds: 5,
            rounds_other: 3,
        },
        Sizes {
            budget: 24,
            sequential: 40,
            random: 60,
            seconds: 0.3,
            seconds_long: 0.3,
            seconds_apart: 0.3,
            lu_budget: 12,
            lu: 14,
            rounds: 1,
            rounds_other: 1,
        },
    )
}

/// Returns the numbers of sequential and of random walkers. 4 and 8 were published, on a machine of 36 cores.
/// Here each processor has a sequential walker, up to 4, and there are twice as many random walkers.
pub fn walkers() -> (usize, usize) {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let sequential = processors.clamp(1, 4);
    (sequential, 2 * sequential)
}

/// The name of the case whose pages stay in the pool.
const POOL: &str = "from the pool";

/// Returns all cases.
pub fn cases(effort: Effort) -> Vec<Case> {
    let sizes = sizes(effort);
    let (sequential, random) = walkers();
    let make = |kind, name, what: &str, load: String| {
        let (budget_mib, rounds) = match kind {
            Kind::Lu => (sizes.lu_budget, sizes.rounds),
            Kind::Mixed | Kind::Apart | Kind::Interleaved => (sizes.budget, sizes.rounds),
            Kind::MixedOther | Kind::Walk => (sizes.budget, sizes.rounds_other),
        };
        let options: &[&str] = if name == POOL { &["--pool", "70%"] } else { &[] };
        let seconds = match kind {
            Kind::Apart => sizes.seconds_apart,
            Kind::Interleaved => sizes.seconds_long,
            _ => sizes.seconds,
        };
        let load = format!("{load} --write-percent 0 --seconds {seconds}");
        let load = load.split(' ').map(str::to_owned).collect();
        let title = format!("{what}, budget {budget_mib} MiB");
        Case { kind, name, title, rounds, budget_mib, options, load }
    };
    let mixed = |kind, name, how: &str, (sequential, mib, random_mib), flags: &str| {
        let what =
            format!("{sequential} sequential over {mib} MiB, {random} random over {random_mib} MiB, {how}");
        let load = format!(
            "mixed --threads {sequential} --bytes {mib}M --random-threads {random} --random-bytes {random_mib}M{flags}"
        );
        make(kind, name, &what, load)
    };
    let published = (sequential, sizes.sequential, sizes.random);
    // A single walker, because of two walkers that together just don't fit, one may keep all of its pages in
    // memory.
    let apart = (1, sizes.sequential, sizes.random);
    // All pages fit into memory and the pool.
    let pool = (sequential, sizes.budget * 4 / 3, sizes.budget * 3 / 4);
    let mib = sizes.sequential;
    let walk = |kind, name, what: &str, load: &str| {
        make(
            kind,
            name,
            &what.replace("MIB", &format!("{mib} MiB")),
            format!("{load} --bytes {mib}M --noise"),
        )
    };
    let (m, o) = (Kind::Mixed, Kind::MixedOther);
    vec![
        mixed(m, "mixed", "a mapping each, from an area", published, " --noise"),
        mixed(
            Kind::Apart,
            "in two processes",
            "in two processes, from an area",
            apart,
            " --noise --processes",
        ),
        mixed(o, "one mapping", "one mapping for each kind, from an area", published, " --noise --shared"),
        mixed(o, POOL, "a mapping each, from the pool", pool, ""),
        walk(
            Kind::Interleaved,
            "16 streams",
            "16 streams in one region of MIB, a page at a time in turns",
            "interleaved",
        ),
        walk(Kind::Walk, "every 3rd page", "every 3rd page of MIB", "strided --stride 3"),
        walk(Kind::Walk, "every 7th page", "every 7th page of MIB", "strided --stride 7"),
        walk(Kind::Walk, "backward", "MIB from the last page to the first", "backward"),
        make(
            Kind::Lu,
            "LU",
            &format!("LU factorization of a matrix of {} MiB", sizes.lu),
            format!("lu --bytes {}M", sizes.lu),
        ),
    ]
}

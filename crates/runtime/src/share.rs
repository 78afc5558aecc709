//! The tree's one budget: how much of it this process may have.
//!
//! Nobody hands it out. Each process says in the session what it *has* and what it *needs*, and works out from everybody's
//! numbers what it may have itself; since all do the same sum, that adds up. Nothing has to be given back by a process that
//! is killed: what it said is forgotten by whoever finds it dead.
//!
//! ```text
//! all that is needed fits:  has + its part of what nobody has, which is for all that grow
//! it doesn't:               at most the *level*: those that need less get what they need, all others the same, so that it
//!                           adds up (max-min fairness). Who has more evicts down to it; who has less grows as memory
//!                           becomes free, and evicts as it grows until then.
//! ```
//!
//! For the only process of a tree that is the whole budget, always. Pages that processes share since a fork count for each
//! by its part of them (`Pss_Anon` in smaps_rollup), so that the sum is what the tree takes; asking for that takes the kernel
//! milliseconds for each GiB, so it is done only by those that have forked or were forked, and seldom unless memory is short. In
//! between, their minor faults say how much of it they have written.

use crate::engine::Engine;
use crate::session::PROCESSES_MAX;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use farpage_core::stats::Gauge;
use farpage_core::units::PAGE_BYTES;
use farpage_os::clock::{now_ns, thread_cpu_ns};
use farpage_os::proc::{AnonymousParts, minor_faults};

/// A process with less isn't asked for any of it: most of that can't be evicted.
pub const SMALL_BYTES: u64 = 8 << 20;
/// What a process may have beside what can't be evicted, however short memory is.
const MANAGED_BYTES_MIN: u64 = 2 << 20;
/// Who is close to what it may have says that it needs a 32nd of the budget more; who grows, as much as it has grown.
const MORE_SHARE: u64 = 32;
/// Growth is what was added in so much time, unless it is very little.
const GROWTH_NS: u64 = 100_000_000;
const GROWTH_BYTES_MIN: u64 = 256 << 10;
/// How often dead processes are looked for, by one process for all: while memory is short, and while it isn't.
const REAP_NS: u64 = 10_000_000;
const REAP_NS_UNHURRIED: u64 = 500_000_000;
/// How often the kernel is asked for what is shared: after so many times as long as asking takes, while memory is short and
/// while it isn't, but within these bounds.
const ASK_COST: u64 = 20;
const ASK_COST_UNHURRIED: u64 = 400;
const ASK_NS_MIN: u64 = 10_000_000;
const ASK_NS_MAX: u64 = 2_000_000_000;
/// Less counts as nothing, and the kernel isn't asked any more, until the next fork.
const SHARED_BYTES_MIN: u64 = 256 << 10;
/// A child waits so long before it asks first: a parent that has nothing to do looks every 20 ms.
const FIRST_ASK_NS: u64 = 25_000_000;

/// What one process says of itself. All zero: it is new, or dead.
#[repr(C)]
pub struct Claim {
    /// Anonymous memory in bytes, and its part of what it shares.
    has: AtomicU64,
    /// The same and what it would like to have soon.
    needs: AtomicU64,
    /// What it has anyhow, if it needs that: it can't be evicted.
    floor: AtomicU64,
    /// What it would have more if it wrote all that it shares.
    shared: AtomicU64,
}

/// The same at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// See [`Claim`].
    pub has: u64,
    /// See [`Claim`].
    pub needs: u64,
    /// See [`Claim`].
    pub floor: u64,
    /// See [`Claim`].
    pub shared: u64,
}

impl Claim {
    /// What it says now.
    pub fn load(&self) -> Claimed {
        let words = [&self.has, &self.needs, &self.floor, &self.shared];
        let [has, needs, floor, shared] = words.map(|word| word.load(Ordering::Relaxed));
        Claimed { has, needs, floor, shared }
    }

    /// Says it.
    pub fn store(&self, claimed: Claimed) {
        self.has.store(claimed.has, Ordering::Relaxed);
        self.needs.store(claimed.needs, Ordering::Relaxed);
        self.floor.store(claimed.floor, Ordering::Relaxed);
        self.shared.store(claimed.shared, Ordering::Relaxed);
    }
}

impl Claimed {
    /// What it gets where nobody gets more than `level`, but for what can't be evicted.
    fn up_to(&self, level: u64) -> u64 {
        self.needs.min(self.floor.max(level))
    }
}

/// What one process may have, and how many there are to keep room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// In bytes.
    pub bytes: u64,
    /// Processes among which what is free is divided: this one, and those that grow.
    pub sharers: u64,
    /// What all of them have.
    pub all_have: u64,
    /// What all of them would have if each wrote what it shares.
    pub all_may_have: u64,
    /// Less than a quarter of the budget is left.
    pub is_short: bool,
}

/// What a process may have of `total` bytes beside `others`. It may always have its floor.
pub fn allowance(total: u64, own: Claimed, others: &[Claimed]) -> Allowance {
    let all = || others.iter().chain([&own]);
    let all_have = all().map(|claimed| claimed.has).sum();
    let all_may_have = all().map(|claimed| claimed.has + claimed.shared).sum();
    let free = total.saturating_sub(all_have);
    let grows = |other: &&Claimed| other.has >= SMALL_BYTES && other.needs > other.has;
    let sharers = 1 + others.iter().filter(grows).count() as u64;
    let within = own.has + free / sharers;
    let bytes = within.min(level(total, all)).max(own.floor).min(total);
    Allowance { bytes, sharers, all_have, all_may_have, is_short: free < total / 4 }
}

/// What nobody may have more of so that all together have `total`, if each gets what it needs up to that.
fn level<'c, I: Iterator<Item = &'c Claimed>>(total: u64, all: impl Fn() -> I) -> u64 {
    let fits = |level: u64| all().map(|claimed| claimed.up_to(level)).sum::<u64>() <= total;
    if fits(u64::MAX) {
        return u64::MAX;
    }
    // The highest that fits: 0 if only what can't be evicted is too much.
    let (mut fitting, mut above) = (0, total + 1);
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) { fitting = middle } else { above = middle }
    }
    fitting
}

/// What the keeper remembers from one look at the others to the next.
#[derive(Default)]
pub struct Share {
    /// There may be memory that is shared since a fork.
    has_kin: AtomicBool,
    /// There was a fork since the kernel was asked last what is shared.
    has_forked: AtomicBool,
    /// When that was.
    asked_ns: AtomicU64,
    /// How long that took.
    ask_took_ns: AtomicU64,
    /// What it said last, in bytes: what others have, too, and how much of that counts for them.
    found_with_others: AtomicU64,
    found_shared: AtomicU64,
    /// Minor faults until then: each of those that followed may be a page that was shared and has been written.
    faults_when_asked: AtomicU64,
    /// So many bytes; and those before, as the kernel found them.
    written: AtomicU64,
    written_before: AtomicU64,
    /// When this process's memory was last noted; how much that was, and how much more than the time before.
    noted_ns: AtomicU64,
    noted_bytes: AtomicU64,
    grown_bytes: AtomicU64,
}

impl Share {
    /// There was a fork, and now there is a child.
    pub fn forked(&self) {
        self.has_kin.store(true, Ordering::Relaxed);
        self.has_forked.store(true, Ordering::Relaxed);
    }

    /// By how much this process has grown lately, which it is expected to do once more. It now has `bytes`, whoever they
    /// count for, and what it wrote of them is more of its own; that others have ended isn't growth.
    fn grown(&self, bytes: u64) -> u64 {
        let bytes = bytes + self.all_written();
        let now = now_ns();
        if now >= self.noted_ns.load(Ordering::Relaxed) + GROWTH_NS {
            self.noted_ns.store(now, Ordering::Relaxed);
            let had = self.noted_bytes.swap(bytes, Ordering::Relaxed);
            self.grown_bytes.store(bytes.saturating_sub(had), Ordering::Relaxed);
        }
        let since = bytes.saturating_sub(self.noted_bytes.load(Ordering::Relaxed));
        let grown = since.max(self.grown_bytes.load(Ordering::Relaxed));
        if grown < GROWTH_BYTES_MIN { 0 } else { grown }
    }

    /// All that this process shared once and has written since, in bytes.
    pub fn all_written(&self) -> u64 {
        self.written_before.load(Ordering::Relaxed) + self.written.load(Ordering::Relaxed)
    }

    /// So much was found to count for others when there had been so many faults.
    fn found(&self, shared: u64, faults: u64) {
        self.found_shared.store(shared, Ordering::Relaxed);
        self.faults_when_asked.store(faults, Ordering::Relaxed);
        self.written.store(0, Ordering::Relaxed);
    }

    /// What still counts for others if each fault since then was for a page that was shared. Some were not; the kernel says
    /// so when it is asked again, and until then that much is evicted too early.
    fn note_written(&self) -> u64 {
        let found = self.found_shared.load(Ordering::Relaxed);
        if found > 0 {
            let faults = minor_faults().saturating_sub(self.faults_when_asked.load(Ordering::Relaxed));
            self.written.store(found.min(faults * PAGE_BYTES as u64), Ordering::Relaxed);
        }
        found - self.written.load(Ordering::Relaxed).min(found)
    }

    /// Whether the kernel may be asked again, by what asking took last time.
    fn may_ask(&self, is_short: bool) -> bool {
        let took = self.ask_took_ns.load(Ordering::Relaxed);
        let cost = if is_short { ASK_COST } else { ASK_COST_UNHURRIED };
        let wait_ns = (took * cost).clamp(ASK_NS_MIN, ASK_NS_MAX);
        now_ns() >= self.asked_ns.load(Ordering::Relaxed) + wait_ns
    }
}

impl Engine {
    /// This process is a fork's child: until its parent has asked what it has no more, that counts for the parent.
    pub fn begin_as_child(&self) {
        let inherited = self.measure();
        self.share.found_with_others.store(inherited, Ordering::Relaxed);
        self.share.found(inherited, minor_faults());
        self.budget.shares(inherited);
        self.share.noted_ns.store(now_ns(), Ordering::Relaxed);
        self.share.noted_bytes.store(inherited, Ordering::Relaxed);
        self.share.has_kin.store(true, Ordering::Relaxed);
        self.share.asked_ns.store(now_ns() + FIRST_ASK_NS - ASK_NS_MIN, Ordering::Relaxed);
    }

    /// Measures this process, says what it has, and works out what it may have. Returns what it has. In the keeper.
    pub fn take_share(&self) -> u64 {
        self.measure();
        self.budget.shares(self.share.note_written());
        let mut allowance = self.say_and_hear();
        let peak = &self.membership.session.claims_peak;
        let is_peak = allowance.all_have > peak.load(Ordering::Relaxed);
        let matters = allowance.is_short || is_peak;
        let is_exact = self.is_to_reap(matters);
        if is_exact {
            self.forget_the_dead();
            allowance = self.say_and_hear();
        }
        let has_kin = self.share.has_kin.load(Ordering::Relaxed);
        let shared = self.budget.shared();
        // A child asks soon, and would count for what its parent still counts for, too.
        let has_forked = self.share.has_forked.load(Ordering::Relaxed);
        let may_be_short = matters || has_forked || allowance.all_may_have >= self.budget.total_bytes();
        if has_kin && (matters || has_forked || shared > 0) && self.share.may_ask(may_be_short) {
            self.ask_what_is_shared();
            if self.budget.shared() < shared {
                // Perhaps because somebody has ended.
                self.forget_the_dead();
            }
            allowance = self.say_and_hear();
        }
        if is_exact && is_peak {
            peak.fetch_max(allowance.all_have, Ordering::Relaxed);
        }
        self.budget.allow(allowance.bytes, allowance.sharers);
        self.fit_pool(allowance.bytes);
        self.charged()
    }

    /// What this process has of the budget, as far as is known. Signal-safe: atomics only.
    pub fn charged(&self) -> u64 {
        self.budget.estimate(self.pager)
    }

    fn say_and_hear(&self) -> Allowance {
        let (session, index) = (self.membership.session, self.membership.index);
        let has = self.charged();
        let is_close = has >= self.budget.activate_at();
        let more = if is_close { self.budget.total_bytes() / MORE_SHARE } else { 0 };
        let shared = self.budget.shared();
        let floor = match self.is_active() {
            // What it shares counts for it only in part.
            true => {
                let own = self.budget.other().saturating_sub(shared);
                SMALL_BYTES.max(own + MANAGED_BYTES_MIN)
            }
            false => SMALL_BYTES,
        };
        let needs = has + more.max(self.share.grown(has + shared));
        let own = Claimed { has, needs, floor, shared };
        session.claims[index].store(own);
        let mut others = [Claimed::default(); PROCESSES_MAX];
        let mut count = 0;
        for (at, claim) in session.claims.iter().enumerate() {
            let claimed = claim.load();
            if at != index && claimed != Claimed::default() {
                others[count] = claimed;
                count += 1;
            }
        }
        allowance(self.budget.total_bytes(), own, &others[..count])
    }

    /// Whether this process is the one to look for the dead now.
    fn is_to_reap(&self, matters: bool) -> bool {
        let last = &self.membership.session.claims_reaped_ns;
        let (now, before) = (now_ns(), last.load(Ordering::Relaxed));
        let wait_ns = if matters { REAP_NS } else { REAP_NS_UNHURRIED };
        // In a time namespace a process may have looked at another clock.
        (now >= before + wait_ns || before > now + REAP_NS_UNHURRIED)
            && last.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// What the dead have said counts no more.
    fn forget_the_dead(&self) {
        self.while_nobody_reaps(|| {
            for (index, claim) in self.membership.session.claims.iter().enumerate() {
                if claim.load() != Claimed::default() {
                    self.membership.if_ended(index, || claim.store(Claimed::default()));
                }
            }
        });
    }

    /// Finds out how much of this process's memory is also others', and their part of it.
    fn ask_what_is_shared(&self) {
        let share = &self.share;
        let started = thread_cpu_ns();
        // Before the kernel is asked: a fork meanwhile says so again.
        share.has_kin.store(false, Ordering::Relaxed);
        share.has_forked.store(false, Ordering::Relaxed);
        let faults = minor_faults();
        let anonymous = self.pager.stats().gauge(Gauge::Anonymous);
        // If it doesn't say, nothing counts for others.
        let parts = self.rollup.anonymous().unwrap_or(AnonymousParts { own_part: anonymous, shared: 0 });
        let shared = anonymous.saturating_sub(parts.own_part);
        let shared = if shared < SHARED_BYTES_MIN { 0 } else { shared };
        let before = share.found_shared.load(Ordering::Relaxed);
        let with_others_before = share.found_with_others.swap(parts.shared, Ordering::Relaxed);
        // What this process has written since it asked last is its own now. That others have ended or written makes its part
        // larger, too.
        let written = with_others_before.saturating_sub(parts.shared).min(before.saturating_sub(shared));
        share.written_before.fetch_add(written, Ordering::Relaxed);
        share.found(shared, faults);
        self.budget.shares(shared);
        if shared > 0 {
            self.share.has_kin.store(true, Ordering::Relaxed);
        }
        self.share.ask_took_ns.store(thread_cpu_ns() - started, Ordering::Relaxed);
        self.share.asked_ns.store(now_ns(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn claimed(has: u64, needs: u64) -> Claimed {
        Claimed { has: has * MIB, needs: needs * MIB, ..Claimed::default() }
    }

    /// What each of them may have.
    fn allowances(total: u64, all: &[Claimed]) -> Vec<u64> {
        let others = |own: usize| [&all[..own], &all[own + 1..]].concat();
        (0..all.len()).map(|own| allowance(total, all[own], &others(own)).bytes).collect()
    }

    #[test]
    fn only_process_has_everything() {
        for has in [0, 1, 100, 127, 128, 300] {
            assert_eq!(allowances(128 * MIB, &[claimed(has, has + 4)]), [128 * MIB]);
        }
        // But for what small ones have.
        assert_eq!(allowances(128 * MIB, &[claimed(100, 104), claimed(2, 2), claimed(1, 1)])[0], 125 * MIB);
    }

    #[test]
    fn who_has_more_than_the_others_gives_way_to_who_needs_more() {
        let [large, small] = allowances(128 * MIB, &[claimed(100, 100), claimed(28, 32)])[..] else {
            panic!()
        };
        assert_eq!(large, 96 * MIB, "what the other one needs is free soon");
        assert_eq!(small, 28 * MIB, "and then it grows");
        // Two that both need more have the same.
        assert_eq!(allowances(128 * MIB, &[claimed(64, 68), claimed(64, 68)]), [64 * MIB; 2]);
    }

    /// What one can't evict is gone for all others in the same measure.
    #[test]
    fn who_cannot_evict_leaves_the_rest_to_all_others() {
        let all = [Claimed { floor: 70 * MIB, ..claimed(80, 84) }, claimed(29, 33), claimed(28, 32)];
        assert_eq!(allowances(120 * MIB, &all), [70 * MIB, 25 * MIB, 25 * MIB]);
        // More than there is.
        let all = [
            Claimed { floor: 200 * MIB, ..claimed(200, 204) },
            Claimed { floor: 8 * MIB, ..claimed(30, 34) },
        ];
        assert_eq!(allowances(128 * MIB, &all), [128 * MIB, 8 * MIB]);
    }

    /// As often as all of them look, evict what is too much and grow as they may, they have no more than the budget and
    /// nobody waits who has less than others.
    #[test]
    fn all_who_grow_end_with_the_same() {
        let total = 256 * MIB;
        let mut has = [200 * MIB, 40 * MIB, 8 * MIB, 8 * MIB];
        for _ in 0..2000 {
            let claim = |has: &u64| Claimed { has: *has, needs: has + total / 32, ..Claimed::default() };
            let all: Vec<_> = has.iter().map(claim).collect();
            for (has, may) in has.iter_mut().zip(allowances(total, &all)) {
                *has = if *has > may { (*has - MIB / 4).max(may) } else { (*has + MIB / 4).min(may) };
            }
            assert!(has.iter().sum::<u64>() <= total + 3 * MIB / 4, "{has:?}");
        }
        assert!(has.iter().all(|has| has.abs_diff(total / 4) <= 3 * MIB), "{has:?}");
    }

    proptest! {
        #[test]
        fn level_is_where_what_is_needed_up_to_it_fits(
            total in 1_u64..10_000,
            needs in prop::collection::vec((0_u64..5_000, prop_oneof![Just(0), 0_u64..2_000]), 1..12),
        ) {
            let all: Vec<_> = needs.iter().map(|&(needs, floor)| Claimed { needs, floor, ..Claimed::default() }).collect();
            let level = level(total, || all.iter());
            let up_to = |level: u64| needs.iter().map(|(need, floor)| *need.min(floor.max(&level))).sum::<u64>();
            prop_assert!(up_to(level) <= total || level == 0);
            // A little more doesn't fit.
            if level != u64::MAX {
                prop_assert!(up_to(level + 1) > total);
            }
        }
    }
}

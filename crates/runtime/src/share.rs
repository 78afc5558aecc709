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
//! For the only process of a tree that is the whole budget, always. Of pages that processes share since a fork each pays for a part
//! ([`kin`](crate::kin)), so that the sum is what the tree takes. The kernel is asked for that only by those that share, and seldom
//! unless memory is short: it needs milliseconds for each GiB. In between, their minor faults say how much they have written.

use crate::child_room::{ChildRoom, Waits};
use crate::dormant::said_beyond_seen;
use crate::engine::Engine;
use crate::kin::{ALONE, Claimed, Ledger, Stated, have_all_asked, left, resolve};
use crate::session::{PROCESSES_MAX, Session, ram_now_within};
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use farpage_core::units::{PAGE_BYTES, PageRange};
use farpage_os::clock::{now_ns, sleep_ns, thread_cpu_ns};
use farpage_os::proc::{AnonymousParts, minor_faults};

/// A process with less isn't asked for any of it: most of that can't be evicted. Where there are many in a small budget less is
/// small, but never as little as libc and an engine take.
pub const SMALL_BYTES: u64 = 8 << 20;
const SMALL_BYTES_MIN: u64 = 2 << 20;
/// What a process may have beside what can't be evicted, however short memory is.
const MANAGED_BYTES_MIN: u64 = 512 << 10;
const MANAGED_BYTES_MAX: u64 = 2 << 20;
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
/// Time that a process waits after a fork before it asks, in ns. Most children end soon, or become other programs.
const FIRST_ASK_NS: u64 = 25_000_000;

/// Bytes that no process has. Any process of the run can write any claim, and sums of claims must not overflow.
const CLAIM_MAX: i64 = 1 << 50;

/// What one process says of itself, for the others: see [`Stated`]. All zero: it is new, or dead.
#[repr(C)]
pub struct Claim {
    anonymous: AtomicU64,
    more: AtomicU64,
    floor: AtomicU64,
    unpaid: AtomicI64,
    asked: AtomicI64,
    with_others: AtomicU64,
    round: AtomicU64,
}

impl Claim {
    /// What it says now.
    pub fn load(&self) -> Stated {
        let words = [&self.anonymous, &self.more, &self.floor, &self.with_others];
        let [anonymous, more, floor, with_others] =
            words.map(|word| word.load(Ordering::Relaxed).min(CLAIM_MAX as u64));
        let [unpaid, asked] =
            [&self.unpaid, &self.asked].map(|word| word.load(Ordering::Relaxed).clamp(-CLAIM_MAX, CLAIM_MAX));
        let round = self.round.load(Ordering::Relaxed);
        Stated { anonymous, more, floor, unpaid, asked, with_others, round }
    }

    /// Says it.
    pub fn store(&self, stated: Stated) {
        self.anonymous.store(stated.anonymous, Ordering::Relaxed);
        self.more.store(stated.more, Ordering::Relaxed);
        self.floor.store(stated.floor, Ordering::Relaxed);
        self.unpaid.store(stated.unpaid, Ordering::Relaxed);
        self.asked.store(stated.asked, Ordering::Relaxed);
        self.with_others.store(stated.with_others, Ordering::Relaxed);
        self.round.store(stated.round, Ordering::Relaxed);
    }

    /// Says anew what others pay for.
    fn restate(&self, stated: Stated) {
        self.unpaid.store(stated.unpaid, Ordering::Relaxed);
        self.asked.store(stated.asked, Ordering::Relaxed);
        self.with_others.store(stated.with_others, Ordering::Relaxed);
    }

    /// Says that it shares memory, after a fork.
    fn say_shared(&self, stated: Stated) {
        self.restate(stated);
        self.round.store(stated.round, Ordering::Relaxed);
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
    /// Never less than that.
    pub least: u64,
    /// Processes among which what is free is divided: this one, and those that grow.
    pub sharers: u64,
    /// What all of them have.
    pub all_have: u64,
    /// What all of them would have if each wrote what it shares.
    pub all_may_have: u64,
    /// Less than a quarter of the budget is left.
    pub is_short: bool,
    /// The number of the round.
    pub round: u64,
    /// Whether all have asked in it.
    pub have_all_asked: bool,
    /// What all have left to others.
    pub left: u64,
}

/// What the first of all these processes may have of `total` bytes, if that was `limit` until now, of which it keeps `kept` free.
/// It may always have its floor.
pub fn allowance(total: u64, limit: u64, kept: u64, all: &[Claimed]) -> Allowance {
    let (own, others) = (all[0], &all[1..]);
    let small = small_bytes(total, all.len());
    let all = || all.iter().map(|claimed| Claimed { floor: claimed.floor.max(small), ..*claimed });
    let all_have = all().map(|claimed| claimed.has).sum();
    let all_may_have = all().map(|claimed| claimed.has + claimed.shared).sum();
    let free = total.saturating_sub(all_have);
    let grows = |other: &&Claimed| other.needs > other.has;
    let sharers = 1 + others.iter().filter(grows).count() as u64;
    // What is kept free is this process's already. Else each look would lower the limit by `kept`.
    let has = own.has + kept;
    // While they have too much nobody gets more, also if what it has grows by itself.
    let within = if all_have > total { has.min(limit) } else { has + free.saturating_sub(kept) / sharers };
    // An active process evicts, so its floor is enough.
    let least = if own.floor > 0 { own.floor } else { small };
    let bytes = within.min(level(total, all)).max(least).min(total);
    Allowance {
        bytes,
        least: least.min(bytes),
        sharers,
        all_have,
        all_may_have,
        is_short: free < total / 4,
        round: 0,
        have_all_asked: true,
        left: 0,
    }
}

/// Whether the pool may not grow while all together have `all_have` bytes. What a process evicts and others have, too, frees no memory.
/// Without an area the pool is the only place.
const fn is_pool_held(has_kin: bool, has_area: bool, total: u64, all_have: u64) -> bool {
    has_kin && has_area && all_have > total
}

/// A process with less isn't asked for any of it. The more processes there are, the less that is.
fn small_bytes(total: u64, processes: usize) -> u64 {
    (total / (2 * processes as u64)).clamp(SMALL_BYTES_MIN, SMALL_BYTES)
}

/// What nobody may have more of so that all together have `total`, if each gets what it needs up to that.
fn level<I: Iterator<Item = Claimed>>(total: u64, all: impl Fn() -> I) -> u64 {
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
    /// What is shared since a fork.
    pub ledger: Ledger,
    /// When this process may ask in the round that is open, in ns; 0 if no round waits for it.
    is_due_ns: AtomicU64,
    /// When the kernel was asked last what is shared, and how long that took.
    asked_ns: AtomicU64,
    ask_took_ns: AtomicU64,
    /// Room that is kept for a fork's child.
    child_room: ChildRoom,
    /// When this process's memory was last noted; how much that was, and how much more than the time before.
    noted_ns: AtomicU64,
    noted_bytes: AtomicU64,
    grown_bytes: AtomicU64,
}

impl Share {
    /// By how much this process has grown lately, which it is expected to do once more. It now has `bytes`, whoever they
    /// count for, and what it wrote of them is more of its own; that others have ended isn't growth.
    fn grown(&self, bytes: u64) -> u64 {
        let bytes = bytes + self.ledger.all_written();
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

    /// Whether to ask the kernel now what is shared. `is_open`: in a round that another process has begun. `is_mistaken`: what was
    /// reckoned as written is so much that most of it may not be.
    fn is_to_ask(&self, is_open: bool, is_mistaken: bool, is_short: bool, now_ns: u64) -> bool {
        if !self.ledger.has_kin() {
            return false;
        }
        if is_open && self.is_due_ns.load(Ordering::Relaxed) == 0 {
            self.is_due_ns.store(now_ns + FIRST_ASK_NS, Ordering::Relaxed);
        }
        if is_mistaken {
            self.is_due_ns.store(1, Ordering::Relaxed);
        }
        self.may_ask(is_short || is_open, now_ns)
    }

    /// Whether the kernel may be asked again, by what asking took last time and how long a round has been open.
    fn may_ask(&self, is_short: bool, now_ns: u64) -> bool {
        let took = self.ask_took_ns.load(Ordering::Relaxed);
        let cost = if is_short { ASK_COST } else { ASK_COST_UNHURRIED };
        let wait_ns = (took * cost).clamp(ASK_NS_MIN, ASK_NS_MAX);
        let is_due_ns = self.is_due_ns.load(Ordering::Relaxed);
        now_ns >= (self.asked_ns.load(Ordering::Relaxed) + wait_ns).max(is_due_ns)
    }

    /// The kernel was asked, for `took_ns` of CPU time.
    fn have_asked(&self, took_ns: u64, now_ns: u64) {
        self.is_due_ns.store(0, Ordering::Relaxed);
        self.ask_took_ns.store(took_ns, Ordering::Relaxed);
        self.asked_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Nothing is shared any more, if that is less than `bytes`. No round waits for this process then.
    fn is_alone_with_less(&self, bytes: u64) {
        if self.ledger.is_alone_with_less(bytes) {
            self.is_due_ns.store(0, Ordering::Relaxed);
        }
    }
}

/// What each living process of a session has. `is_alive` gets a record's number. For supervisors, which may see claims of two rounds.
pub fn claimed_in(session: &Session, is_alive: impl Fn(usize) -> bool, mut visit: impl FnMut(Claimed)) {
    let mut all = [Stated::default(); PROCESSES_MAX];
    let mut count = 0;
    for (at, claim) in session.claims.iter().enumerate() {
        let stated = claim.load();
        if stated != Stated::default() && is_alive(at) {
            all[count] = stated;
            count += 1;
        }
    }
    resolve(&all[..count], session.rounds.now().1, session.rounds.left_by_dead(), |_, claimed| {
        visit(claimed)
    });
}

/// How often the others are heard again, because a round was settled meanwhile.
const HEAR_AGAIN_MAX: usize = 8;

/// All that say something, this process first.
struct Heard {
    all: [Stated; PROCESSES_MAX],
    count: usize,
    round: u64,
    /// The last round in which all have asked.
    settled: u64,
    /// What the dead have left since.
    left_by_dead: u64,
}

impl Heard {
    fn new(session: &Session, index: usize, own: Stated) -> Heard {
        let mut heard = Heard { all: [own; PROCESSES_MAX], count: 1, round: 0, settled: 0, left_by_dead: 0 };
        // What one says belongs to what others say in the same round.
        for _ in 0..HEAR_AGAIN_MAX {
            (heard.round, heard.settled) = session.rounds.now();
            heard.left_by_dead = session.rounds.left_by_dead();
            heard.listen(session, index);
            if session.rounds.now().1 == heard.settled {
                break;
            }
        }
        let (round, is_new) = (heard.round, heard.settled != heard.round);
        // Who shares nothing needs no round, but what the dead have left is then nobody's.
        let wants = own.round != ALONE || heard.left_by_dead > 0;
        if wants
            && is_new
            && have_all_asked(heard.all(), round)
            && session.rounds.settle(round, heard.left_by_dead)
        {
            (heard.settled, heard.left_by_dead) = (round, 0);
        }
        heard
    }

    /// What the others say.
    fn listen(&mut self, session: &Session, index: usize) {
        self.count = 1;
        for (at, claim) in session.claims.iter().enumerate() {
            let stated = claim.load();
            if at != index && stated != Stated::default() {
                self.all[self.count] = stated;
                self.count += 1;
            }
        }
    }

    fn all(&self) -> &[Stated] {
        &self.all[..self.count]
    }

    /// What each of them has.
    fn resolve(&self, visit: impl FnMut(usize, Claimed)) {
        resolve(self.all(), self.settled, self.left_by_dead, visit);
    }

    /// What all of them, and the dead, have left to others.
    fn left(&self) -> u64 {
        left(self.all(), self.settled) + self.left_by_dead
    }
}

impl Waits for Engine {
    fn charged(&self) -> u64 {
        self.charged()
    }
    fn ring(&self) {
        self.budget.ring();
    }
    fn now_ns(&self) -> u64 {
        now_ns()
    }
    fn sleep_ns(&self, ns: u64) {
        sleep_ns(ns);
    }
}

impl Engine {
    /// This process is a fork's child, which began with `inherited` bytes: its parent pays for them.
    pub fn begin_as_child(&self, inherited: u64) {
        self.measure();
        self.share.ledger.begin_as_child(inherited, minor_faults());
        self.budget.shares(inherited);
        self.share.noted_ns.store(now_ns(), Ordering::Relaxed);
        self.share.noted_bytes.store(inherited, Ordering::Relaxed);
    }

    /// A fork is to be made: waits until the keeper has evicted what a child takes before other processes count it, 20 ms at most.
    /// In a thread of the program, without any lock; its signals wait, too.
    pub fn make_room_for_child(&self) {
        if self.is_active() {
            self.share.child_room.wait(self.budget.now_bytes(), FIRST_ASK_NS, self);
        }
    }

    /// There was a fork, and now there is a child. In a thread of the program.
    pub fn have_forked(&self) {
        self.share.ledger.has_forked(self.charged() + self.budget.shared(), minor_faults());
        // A parent that ends before its keeper's next look has said that it shares, too.
        self.claim().say_shared(self.share.ledger.state(Stated::default()));
        self.begin_round();
        self.budget.ring();
    }

    /// What was known of what is shared is no longer true: all ask again.
    fn begin_round(&self) {
        self.membership.session.rounds.open_next();
    }

    /// This process has evicted `pages` that others have, too. It took `faults` minor faults to make them its own before. The pages
    /// still take memory, for which the others pay from now on.
    pub fn have_evicted_shared(&self, pages: u64, faults: u64) {
        let bytes = pages * PAGE_BYTES as u64;
        self.share.ledger.have_evicted(bytes, faults);
        self.budget.shares_less(bytes);
        self.claim().restate(self.share.ledger.state(Stated::default()));
    }

    /// What this process says of itself.
    fn claim(&self) -> &Claim {
        &self.membership.session.claims[self.membership.index]
    }

    /// This process won't say again what it shares: all that it has counts for itself.
    pub fn leave_kin(&self) {
        self.share.ledger.leave();
        self.begin_round();
    }

    /// How many of these pages other processes have, too.
    pub fn count_shared(&self, pages: PageRange) -> u64 {
        let (mut count, mut zeros) = (0_u64, 0);
        self.pagemap.for_each_shared(pages, |_| count += 1);
        if count > 0 {
            // The kernel's page of zeros takes no memory. Before Linux 6.7 it counts.
            let _ = self.pagemap.for_each_zero_run(pages, |run| zeros += run.count());
        }
        count.saturating_sub(zeros)
    }

    /// Memory of the engine's own is dropped next: what a fork's child has of it stays there.
    pub fn about_to_drop(&self, base: *const u8, bytes: usize) {
        if self.share.ledger.has_kin() {
            let pages = self.count_shared(PageRange::covering(base as usize, bytes));
            if pages > 0 {
                self.have_evicted_shared(pages, 0);
            }
        }
    }

    /// Measures this process, says what it has, and works out what it may have. Returns what it has. In the keeper.
    pub fn take_share(&self) -> u64 {
        let (session, budget) = (self.membership.session, &self.budget);
        budget.set_now_bytes(ram_now_within(session.ram_now.load(Ordering::Relaxed), budget.total_bytes()));
        self.measure();
        self.share.ledger.note_faults(minor_faults(), PAGE_BYTES as u64);
        let mut allowance = self.say_and_hear();
        let peak = &self.membership.session.claims_peak;
        let is_peak = allowance.all_have > peak.load(Ordering::Relaxed);
        let matters = allowance.is_short || is_peak;
        let is_exact = self.is_to_reap(matters);
        if is_exact {
            self.forget_the_dead();
            allowance = self.say_and_hear();
        }
        if self.is_to_ask(&allowance, matters) {
            self.ask_what_is_shared(&allowance);
            allowance = self.say_and_hear();
        }
        if is_exact && is_peak {
            // What dormant processes say isn't there.
            let seen = allowance.all_have.saturating_sub(said_beyond_seen(session));
            peak.fetch_max(seen, Ordering::Relaxed);
        }
        let total = self.budget.now_bytes();
        self.budget.allow(self.share.child_room.limit(total, &allowance, now_ns()), allowance.sharers);
        self.fit_pool(allowance.bytes);
        let has_area = self.pager.areas().any_writable();
        self.hold_pool(is_pool_held(self.share.ledger.has_kin(), has_area, total, allowance.all_have));
        self.charged()
    }

    /// Whether to ask the kernel now what is shared: in a round that another process has begun, or in one of its own.
    fn is_to_ask(&self, allowance: &Allowance, matters: bool) -> bool {
        let (share, total) = (&self.share, self.budget.now_bytes());
        let is_open = share.ledger.round() != allowance.round;
        let is_mistaken = share.ledger.written_since_asked() > total / MORE_SHARE;
        let is_short = matters || allowance.all_may_have >= total;
        share.is_to_ask(is_open, is_mistaken, is_short, now_ns())
    }

    /// What this process has of the budget, as far as is known. Signal-safe: atomics only.
    pub fn charged(&self) -> u64 {
        self.budget.estimate(self.pager)
    }

    fn say_and_hear(&self) -> Allowance {
        let (session, index) = (self.membership.session, self.membership.index);
        let ledger = &self.share.ledger;
        let has = self.charged();
        let shared = self.budget.shared();
        let is_close = has >= self.budget.activate_at();
        let more = if is_close { self.budget.now_bytes() / MORE_SHARE } else { 0 };
        let floor = match self.is_active() {
            // What it shares counts for it only in part.
            true => {
                self.budget.other().saturating_sub(shared)
                    + (self.budget.now_bytes() / 32).clamp(MANAGED_BYTES_MIN, MANAGED_BYTES_MAX)
            }
            false => 0,
        };
        let anonymous = has + shared;
        let more = more.max(self.share.grown(anonymous));
        let own = ledger.state(Stated { anonymous, more, floor, ..Stated::default() });
        session.claims[index].store(own);
        let heard = Heard::new(session, index, own);
        let mut claimed = [Claimed::default(); PROCESSES_MAX];
        heard.resolve(|at, one| claimed[at] = one);
        ledger.settle(heard.settled);
        if ledger.has_kin() && own.round == heard.settled && own.asked < SHARED_BYTES_MIN as i64 {
            self.share.is_alone_with_less(SHARED_BYTES_MIN);
        }
        self.budget.shares(claimed[0].shared);
        self.budget.has_kin(ledger.has_kin());
        let have_all_asked = heard.settled == heard.round;
        let (total, claimed) = (self.budget.now_bytes(), &claimed[..heard.count]);
        let allowance = self.share.child_room.allowance(total, claimed, now_ns());
        Allowance { round: heard.round, have_all_asked, left: heard.left(), ..allowance }
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
                if claim.load() != Stated::default() {
                    self.membership.if_ended(index, || {
                        // Another process may have taken the record and ended since.
                        let stated = claim.load();
                        if stated.round != ALONE {
                            self.membership.session.rounds.has_died(&stated);
                        }
                        claim.store(Stated::default());
                        self.membership.session.processes[index].dormant_bytes.store(0, Ordering::Relaxed);
                    });
                }
            }
        });
    }

    /// Finds out how much of this process's memory is also others', and their part of it.
    fn ask_what_is_shared(&self, allowance: &Allowance) {
        let (share, session) = (&self.share, self.membership.session);
        let started = thread_cpu_ns();
        if share.ledger.round() == allowance.round && allowance.have_all_asked {
            self.begin_round();
        }
        // Before the kernel is asked: a fork meanwhile begins another.
        let (round, settled) = session.rounds.now();
        let asks_again = share.ledger.round() == round;
        if asks_again {
            self.forget_the_dead();
        }
        share.ledger.settle(settled);
        let given_up = share.ledger.before_asking();
        // If it doesn't say, nothing counts for others.
        let nothing = AnonymousParts { anonymous: 0, own_part: 0, shared: 0 };
        let parts = self.rollup.anonymous().unwrap_or(nothing);
        let for_others = parts.anonymous.saturating_sub(parts.own_part);
        // Who ends gives its memory back before anybody can find it dead, and is counted until then. So what it paid for counts for
        // this process only if that is still so the next time.
        let left = if asks_again { allowance.left } else { u64::MAX };
        share.ledger.have_asked(parts.shared, for_others, given_up, left, round);
        share.have_asked(thread_cpu_ns() - started, now_ns());
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
        let first = |own: usize| [&all[own..=own], &all[..own], &all[own + 1..]].concat();
        (0..all.len()).map(|own| allowance(total, total, 0, &first(own)).bytes).collect()
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

    /// A process that had found itself alone asked right after its next fork: a child that ended at once cost a round.
    #[test]
    fn after_each_fork_a_process_waits_before_it_asks() {
        let (share, ms) = (Share::default(), 1_000_000);
        let asks_at = |ms_now: u64| share.is_to_ask(true, false, true, ms_now * ms);
        assert!(!asks_at(900), "it shares nothing");
        for fork in [1000, 3000, 5000] {
            share.ledger.has_forked(4 * MIB, 0);
            assert!(!asks_at(fork) && !asks_at(fork + 24), "it waits");
            assert!(asks_at(fork + 25));
            // The last one doesn't come to asking before it finds itself alone.
            if fork < 3000 {
                share.have_asked(ms, (fork + 25) * ms);
            }
            share.ledger.have_evicted(4 * MIB, 0);
            share.is_alone_with_less(SHARED_BYTES_MIN);
            assert!(!share.ledger.has_kin() && !asks_at(fork + 100));
        }
        // What was reckoned wrong doesn't wait.
        share.ledger.has_forked(4 * MIB, 0);
        assert!(!asks_at(7000) && share.is_to_ask(true, true, true, 7000 * ms));
    }

    #[test]
    fn pool_is_held_only_while_sharers_have_too_much_and_an_area_takes_pages() {
        assert!(is_pool_held(true, true, 24 * MIB, 25 * MIB));
        assert!(!is_pool_held(true, true, 24 * MIB, 24 * MIB), "what all have fits");
        assert!(!is_pool_held(true, false, 24 * MIB, 25 * MIB), "there is no other place");
        assert!(!is_pool_held(false, true, 24 * MIB, 25 * MIB), "what is evicted frees memory");
    }

    proptest! {
        #[test]
        fn level_is_where_what_is_needed_up_to_it_fits(
            total in 1_u64..10_000,
            needs in prop::collection::vec((0_u64..5_000, prop_oneof![Just(0), 0_u64..2_000]), 1..12),
        ) {
            let all: Vec<_> = needs.iter().map(|&(needs, floor)| Claimed { needs, floor, ..Claimed::default() }).collect();
            let level = level(total, || all.iter().copied());
            let up_to = |level: u64| needs.iter().map(|(need, floor)| *need.min(floor.max(&level))).sum::<u64>();
            prop_assert!(up_to(level) <= total || level == 0);
            // A little more doesn't fit.
            if level != u64::MAX {
                prop_assert!(up_to(level + 1) > total);
            }
        }
    }
}

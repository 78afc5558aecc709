//! The one budget of a tree of processes: how much of it this process may have.
//!
//! No process hands out the budget. Each process states in the session what it *has* and what it *needs*.
//! From the numbers of all processes, each works out what it may have itself. All do the same sum, so the
//! results add up. A process that is killed need not give anything back: the process that finds it dead
//! forgets what it stated.
//!
//! - If all needs fit, a process may have what it has, and its part of what no process has. That rest is
//!   divided among the processes that grow.
//! - If they don't fit, a process may have at most the *level* (max-min fairness). A process that needs less
//!   than the level gets what it needs. All other processes get the level. A process that has more evicts
//!   down to it. A process that has less grows as memory becomes free, and evicts as it grows until then.
//!
//! The only process of a tree always gets the whole budget. Of pages shared since a fork, each process pays
//! for a part ([`kin`](crate::pressure::kin)), so that the sum is what the tree takes. Only processes that
//! share memory ask the kernel for these parts, and seldom unless memory is short: the kernel needs
//! milliseconds for each GiB. In between, minor faults tell how much a process has written.

use crate::engine::Engine;
use crate::engine::dormant::said_beyond_seen;
use crate::pressure::child_headroom::{ChildHeadroom, Waits};
use crate::pressure::kin::{ALONE, Claimed, Ledger, Stated, have_all_asked, left, resolve};
use crate::session::{PROCESSES_MAX, Session, ram_now_within};
use core::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use farpage_core::units::{PAGE_BYTES, PageRange};
use farpage_os::clock::{now_ns, sleep_ns, thread_cpu_ns};
use farpage_os::proc::{AnonymousParts, minor_faults};

/// Bytes up to which a process isn't asked for memory: most of these can't be evicted.
pub const SMALL_BYTES: u64 = 8 << 20;
/// Lower bound of this threshold, where many processes share a small budget. More than libc and an engine
/// take.
const SMALL_BYTES_MIN: u64 = 2 << 20;
/// Bounds of what a process may have beside what can't be evicted, however short memory is. Between the
/// bounds, that is a 32nd of the budget.
const MANAGED_BYTES_MIN: u64 = 512 << 10;
const MANAGED_BYTES_MAX: u64 = 2 << 20;
/// Divisor of the budget: a process that is close to its allowance states that it needs a 32nd of the budget
/// more. A process that grows states as much more as it has grown.
const MORE_SHARE: u64 = 32;
/// Nanoseconds over which growth is measured.
const GROWTH_NS: u64 = 100_000_000;
/// Bytes of growth below which growth counts as none.
const GROWTH_BYTES_MIN: u64 = 256 << 10;
/// Nanoseconds between two searches for dead processes, by one process for all: while memory is short, and
/// while it isn't.
const REAP_NS: u64 = 10_000_000;
const REAP_NS_UNHURRIED: u64 = 500_000_000;
/// Waits before the kernel is asked again what is shared, in multiples of the time that asking took. One is
/// for the time while memory is short, the other for the time while it isn't.
const ASK_COST: u64 = 20;
const ASK_COST_UNHURRIED: u64 = 400;
/// Bounds of this wait, in nanoseconds.
const ASK_NS_MIN: u64 = 10_000_000;
const ASK_NS_MAX: u64 = 2_000_000_000;
/// Shared bytes below which sharing counts as nothing. The kernel isn't asked any more until the next fork.
const SHARED_BYTES_MIN: u64 = 256 << 10;
/// Nanoseconds that a process waits after a fork before it asks. Most children end soon or exec another
/// program.
const FIRST_ASK_NS: u64 = 25_000_000;

/// Upper bound of a claim: more bytes than any process has. Any process of the run can write any claim, and
/// sums of claims must not overflow.
const CLAIM_MAX: i64 = 1 << 50;

/// The claim that one process states for the others: see [`Stated`]. All zero: the process is new or dead.
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
    /// Returns what the process states now.
    pub fn load(&self) -> Stated {
        let words = [&self.anonymous, &self.more, &self.floor, &self.with_others];
        let [anonymous, more, floor, with_others] =
            words.map(|word| word.load(Ordering::Relaxed).min(CLAIM_MAX as u64));
        let [unpaid, asked] =
            [&self.unpaid, &self.asked].map(|word| word.load(Ordering::Relaxed).clamp(-CLAIM_MAX, CLAIM_MAX));
        let round = self.round.load(Ordering::Relaxed);
        Stated { anonymous, more, floor, unpaid, asked, with_others, round }
    }

    /// States `stated`.
    pub fn store(&self, stated: Stated) {
        self.anonymous.store(stated.anonymous, Ordering::Relaxed);
        self.more.store(stated.more, Ordering::Relaxed);
        self.floor.store(stated.floor, Ordering::Relaxed);
        self.unpaid.store(stated.unpaid, Ordering::Relaxed);
        self.asked.store(stated.asked, Ordering::Relaxed);
        self.with_others.store(stated.with_others, Ordering::Relaxed);
        self.round.store(stated.round, Ordering::Relaxed);
    }

    /// States anew what other processes pay for.
    fn restate(&self, stated: Stated) {
        self.unpaid.store(stated.unpaid, Ordering::Relaxed);
        self.asked.store(stated.asked, Ordering::Relaxed);
        self.with_others.store(stated.with_others, Ordering::Relaxed);
    }

    /// States that the process shares memory, after a fork.
    fn say_shared(&self, stated: Stated) {
        self.restate(stated);
        self.round.store(stated.round, Ordering::Relaxed);
    }
}

impl Claimed {
    /// Returns the bytes that the process gets where no process gets more than `level`. Memory that can't be
    /// evicted is granted in any case.
    fn up_to(&self, level: u64) -> u64 {
        self.needs.min(self.floor.max(level))
    }
}

/// The bytes that one process may have, and the numbers behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes that the process may have.
    pub bytes: u64,
    /// Lower bound of `bytes` that always holds.
    pub least: u64,
    /// Processes that divide the free memory: this one, and all that grow.
    pub sharers: u64,
    /// Bytes that all processes have.
    pub all_have: u64,
    /// Bytes that all processes would have if each wrote all pages that it shares.
    pub all_may_have: u64,
    /// Whether less than a quarter of the budget is left.
    pub is_short: bool,
    /// The number of the open round.
    pub round: u64,
    /// Whether all processes have asked in the open round.
    pub have_all_asked: bool,
    /// Bytes that all processes have left to others to pay for.
    pub left: u64,
}

/// Returns what the first process of `all` may have of `total` bytes. `limit` is what the process might have
/// until now, and `kept` bytes of that it keeps free. The process may always have its floor.
pub fn allowance(total: u64, limit: u64, kept: u64, all: &[Claimed]) -> Allowance {
    let (own, others) = (all[0], &all[1..]);
    let small = small_bytes(total, all.len());
    let all = || all.iter().map(|claimed| Claimed { floor: claimed.floor.max(small), ..*claimed });
    let all_have = all().map(|claimed| claimed.has).sum();
    let all_may_have = all().map(|claimed| claimed.has + claimed.shared).sum();
    let free = total.saturating_sub(all_have);
    let grows = |other: &&Claimed| other.needs > other.has;
    let sharers = 1 + others.iter().filter(grows).count() as u64;
    // The bytes kept free are this process's already. Otherwise each look would lower the limit by `kept`.
    let has = own.has + kept;
    // While the processes have too much together, no process may have more, even if its memory grows by
    // itself.
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

/// Returns whether the pool may not grow while all processes have `all_have` bytes. Evicting a page that
/// other processes have too frees no memory. Without an area, the pool is the only place for evicted pages.
const fn is_pool_held(has_kin: bool, has_area: bool, total: u64, all_have: u64) -> bool {
    has_kin && has_area && all_have > total
}

/// Returns the bytes up to which a process isn't asked for memory. The more processes there are, the fewer
/// bytes.
fn small_bytes(total: u64, processes: usize) -> u64 {
    (total / (2 * processes as u64)).clamp(SMALL_BYTES_MIN, SMALL_BYTES)
}

/// Returns the level: the most that each process may have so that all together have `total` bytes, if each
/// gets what it needs up to the level.
fn level<I: Iterator<Item = Claimed>>(total: u64, all: impl Fn() -> I) -> u64 {
    let fits = |level: u64| all().map(|claimed| claimed.up_to(level)).sum::<u64>() <= total;
    if fits(u64::MAX) {
        return u64::MAX;
    }
    // Find the highest level that fits. The level is 0 if the memory that can't be evicted is too much
    // already.
    let (mut fitting, mut above) = (0, total + 1);
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) { fitting = middle } else { above = middle }
    }
    fitting
}

/// What the keeper remembers between two looks at the other processes.
#[derive(Default)]
pub struct Share {
    /// Memory that is shared since a fork.
    pub ledger: Ledger,
    /// Time from which this process may ask in the open round, in ns; 0 if no round waits for this process.
    is_due_ns: AtomicU64,
    /// Time at which the kernel was last asked what is shared.
    asked_ns: AtomicU64,
    /// CPU time that asking took, in ns.
    ask_took_ns: AtomicU64,
    /// Budget that is kept free for a fork's child.
    child_headroom: ChildHeadroom,
    /// Time at which this process's memory was last noted.
    noted_ns: AtomicU64,
    /// Bytes that were noted, what the process had written included.
    noted_bytes: AtomicU64,
    /// Bytes of growth since the time before.
    grown_bytes: AtomicU64,
}

impl Share {
    /// Returns how many bytes this process has grown by lately. It is expected to grow by as much once more.
    /// `bytes` is what the process has now, whichever process pays. Shared memory that the process has
    /// written is more memory of its own. Memory that passes to this process because others have ended is no
    /// growth.
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

    /// Returns whether to ask the kernel now what is shared. `is_open`: another process has begun a round.
    /// `is_mistaken`: many bytes are reckoned as written, and most of them may not be.
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

    /// Returns whether the kernel may be asked again, by the time that asking took last and the time since a
    /// round was opened.
    fn may_ask(&self, is_short: bool, now_ns: u64) -> bool {
        let took = self.ask_took_ns.load(Ordering::Relaxed);
        let cost = if is_short { ASK_COST } else { ASK_COST_UNHURRIED };
        let wait_ns = (took * cost).clamp(ASK_NS_MIN, ASK_NS_MAX);
        let is_due_ns = self.is_due_ns.load(Ordering::Relaxed);
        now_ns >= (self.asked_ns.load(Ordering::Relaxed) + wait_ns).max(is_due_ns)
    }

    /// Notes that the kernel was asked, for `took_ns` of CPU time.
    fn have_asked(&self, took_ns: u64, now_ns: u64) {
        self.is_due_ns.store(0, Ordering::Relaxed);
        self.ask_took_ns.store(took_ns, Ordering::Relaxed);
        self.asked_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Ends sharing if less than `bytes` are shared. Then no round waits for this process.
    fn is_alone_with_less(&self, bytes: u64) {
        if self.ledger.is_alone_with_less(bytes) {
            self.is_due_ns.store(0, Ordering::Relaxed);
        }
    }
}

/// Visits what each living process of a session has. `is_alive` gets a record's number. For supervisors,
/// which may see claims of two rounds.
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

/// Times that the other processes' claims are read again because a round was settled meanwhile.
const HEAR_AGAIN_MAX: usize = 8;

/// The claims of all processes that state something, this process first.
struct Heard {
    all: [Stated; PROCESSES_MAX],
    count: usize,
    round: u64,
    /// The last round in which all processes have asked.
    settled: u64,
    /// Bytes that dead processes have left since that round.
    left_by_dead: u64,
}

impl Heard {
    fn new(session: &Session, index: usize, own: Stated) -> Heard {
        let mut heard = Heard { all: [own; PROCESSES_MAX], count: 1, round: 0, settled: 0, left_by_dead: 0 };
        // A claim belongs to the claims that other processes state in the same round.
        for _ in 0..HEAR_AGAIN_MAX {
            (heard.round, heard.settled) = session.rounds.now();
            heard.left_by_dead = session.rounds.left_by_dead();
            heard.listen(session, index);
            if session.rounds.now().1 == heard.settled {
                break;
            }
        }
        let (round, is_new) = (heard.round, heard.settled != heard.round);
        // A process that shares nothing needs no round for itself. But if no process shares memory, the bytes
        // that the dead have left belong to nobody. Settling the round removes them.
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

    /// Reads the claims of the other processes.
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

    /// Visits what each process has.
    fn resolve(&self, visit: impl FnMut(usize, Claimed)) {
        resolve(self.all(), self.settled, self.left_by_dead, visit);
    }

    /// Returns the bytes that all processes, the dead included, have left to others.
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
    /// Begins as a fork's child with `inherited` bytes, which the parent pays for.
    pub fn begin_as_child(&self, inherited: u64) {
        self.measure();
        self.share.ledger.begin_as_child(inherited, minor_faults());
        self.budget.shares(inherited);
        self.share.noted_ns.store(now_ns(), Ordering::Relaxed);
        self.share.noted_bytes.store(inherited, Ordering::Relaxed);
    }

    /// Begins in a process that was dormant. The process may share memory since a fork with processes that
    /// have no engine. Nobody has reckoned that memory, so the kernel says which part counts for others.
    pub fn begin_after_dormancy(&self) {
        let faults = minor_faults();
        let Ok(parts) = self.rollup.anonymous() else { return };
        let for_others = parts.anonymous.saturating_sub(parts.own_part);
        if for_others < SHARED_BYTES_MIN {
            return;
        }
        self.measure();
        self.share.ledger.begin_beside(parts.shared.min(parts.anonymous), for_others, faults);
        self.budget.shares(for_others);
        self.begin_round();
    }

    /// Waits before a fork until the keeper has evicted as much as a child takes before other processes count
    /// it. The wait takes 20 ms at most. Called in a thread of the program that holds no lock. Its signals
    /// wait, too.
    pub fn make_headroom_for_child(&self) {
        if self.is_active() {
            self.share.child_headroom.wait(self.budget.now_bytes(), FIRST_ASK_NS, self);
        }
    }

    /// Notes that a fork has made a child. Called in a thread of the program.
    pub fn have_forked(&self) {
        self.share.ledger.has_forked(self.charged() + self.budget.shared(), minor_faults());
        // The claim is stated here, so it says that the parent shares even if the parent ends before its
        // keeper's next look.
        self.claim().say_shared(self.share.ledger.state(Stated::default()));
        self.begin_round();
        self.budget.ring();
    }

    /// Opens a round in which all processes ask again. The last answers of the kernel are no longer true.
    fn begin_round(&self) {
        self.membership.session.rounds.open_next();
    }

    /// Notes that this process has evicted `pages` that other processes have too, and took `faults` minor
    /// faults to make them its own before. The pages still take memory, for which the other processes pay
    /// from now on.
    pub fn have_evicted_shared(&self, pages: u64, faults: u64) {
        let bytes = pages * PAGE_BYTES as u64;
        self.share.ledger.have_evicted(bytes, faults);
        self.budget.shares_less(bytes);
        self.claim().restate(self.share.ledger.state(Stated::default()));
    }

    /// Returns the claim of this process.
    fn claim(&self) -> &Claim {
        &self.membership.session.claims[self.membership.index]
    }

    /// Stops stating what this process shares. All of its memory counts for itself from now on.
    pub fn leave_kin(&self) {
        self.share.ledger.leave();
        self.begin_round();
    }

    /// Returns how many of these pages other processes have too.
    pub fn count_shared(&self, pages: PageRange) -> u64 {
        let (mut count, mut zeros) = (0_u64, 0);
        self.pagemap.for_each_shared(pages, |_| count += 1);
        if count > 0 {
            // The kernel's page of zeros takes no memory. Before Linux 6.7, the kernel counts it as shared.
            let _ = self.pagemap.for_each_zero_run(pages, |run| zeros += run.count());
        }
        count.saturating_sub(zeros)
    }

    /// Must be called before memory of the engine's own is dropped. What a fork's child has of this memory
    /// stays there.
    pub fn about_to_drop(&self, base: *const u8, bytes: usize) {
        if self.share.ledger.has_kin() {
            let pages = self.count_shared(PageRange::covering(base as usize, bytes));
            if pages > 0 {
                self.have_evicted_shared(pages, 0);
            }
        }
    }

    /// Measures this process, states what it has, and works out what it may have. Returns the bytes that it
    /// has. Called in the keeper.
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
            // The peak leaves out bytes that dormant processes state but don't have.
            let seen = allowance.all_have.saturating_sub(said_beyond_seen(session, |_| true));
            peak.fetch_max(seen, Ordering::Relaxed);
        }
        let total = self.budget.now_bytes();
        self.budget.allow(self.share.child_headroom.limit(total, &allowance, now_ns()), allowance.sharers);
        self.fit_pool(allowance.bytes);
        let has_area = self.pager.areas().any_writable();
        self.follow_areas(has_area);
        self.hold_pool(is_pool_held(self.share.ledger.has_kin(), has_area, total, allowance.all_have));
        self.charged()
    }

    /// Returns whether to ask the kernel now what is shared, in a round that another process or this process
    /// begins.
    fn is_to_ask(&self, allowance: &Allowance, matters: bool) -> bool {
        let (share, total) = (&self.share, self.budget.now_bytes());
        let is_open = share.ledger.round() != allowance.round;
        let is_mistaken = share.ledger.written_since_asked() > total / MORE_SHARE;
        let is_short = matters || allowance.all_may_have >= total;
        share.is_to_ask(is_open, is_mistaken, is_short, now_ns())
    }

    /// Returns the bytes of the budget that this process has, as far as is known. Signal-safe: atomics only.
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
            // Memory that the process shares counts for it only in part.
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
        let allowance = self.share.child_headroom.allowance(total, claimed, now_ns());
        Allowance { round: heard.round, have_all_asked, left: heard.left(), ..allowance }
    }

    /// Returns whether this process is the one to look for dead processes now.
    fn is_to_reap(&self, matters: bool) -> bool {
        let last = &self.membership.session.claims_reaped_ns;
        let (now, before) = (now_ns(), last.load(Ordering::Relaxed));
        let wait_ns = if matters { REAP_NS } else { REAP_NS_UNHURRIED };
        // A process in a time namespace may have written the time of another clock.
        (now >= before + wait_ns || before > now + REAP_NS_UNHURRIED)
            && last.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Forgets the claims of dead processes.
    fn forget_the_dead(&self) {
        self.while_nobody_reaps(|| {
            for (index, claim) in self.membership.session.claims.iter().enumerate() {
                if claim.load() != Stated::default() {
                    self.membership.if_ended(index, || {
                        self.membership.session.forget_claim(index);
                    });
                }
            }
        });
    }

    /// Asks the kernel how much memory this process shares, and which part of that counts for other
    /// processes.
    fn ask_what_is_shared(&self, allowance: &Allowance) {
        let (share, session) = (&self.share, self.membership.session);
        let started = thread_cpu_ns();
        if share.ledger.round() == allowance.round && allowance.have_all_asked {
            self.begin_round();
        }
        // The round is read before the kernel is asked: a fork meanwhile begins another round.
        let (round, settled) = session.rounds.now();
        let asks_again = share.ledger.round() == round;
        if asks_again {
            self.forget_the_dead();
        }
        share.ledger.settle(settled);
        let given_up = share.ledger.before_asking();
        // If the kernel doesn't answer, nothing counts for other processes.
        let nothing = AnonymousParts { anonymous: 0, own_part: 0, shared: 0 };
        let parts = self.rollup.anonymous().unwrap_or(nothing);
        let for_others = parts.anonymous.saturating_sub(parts.own_part);
        // A process that ends gives its memory back before another process can find it dead, and its claim
        // counts until then. This process therefore takes over what the ended process paid for only if that
        // is still so at the next asking.
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

    /// Returns what each process may have.
    fn allowances(total: u64, all: &[Claimed]) -> Vec<u64> {
        let first = |own: usize| [&all[own..=own], &all[..own], &all[own + 1..]].concat();
        (0..all.len()).map(|own| allowance(total, total, 0, &first(own)).bytes).collect()
    }

    #[test]
    fn only_process_has_everything() {
        for has in [0, 1, 100, 127, 128, 300] {
            assert_eq!(allowances(128 * MIB, &[claimed(has, has + 4)]), [128 * MIB]);
        }
        // Small processes keep what they have.
        assert_eq!(allowances(128 * MIB, &[claimed(100, 104), claimed(2, 2), claimed(1, 1)])[0], 125 * MIB);
    }

    #[test]
    fn who_has_more_than_the_others_gives_way_to_who_needs_more() {
        let [large, small] = allowances(128 * MIB, &[claimed(100, 100), claimed(28, 32)])[..] else {
            panic!()
        };
        assert_eq!(large, 96 * MIB, "what the other one needs is free soon");
        assert_eq!(small, 28 * MIB, "and then it grows");
        // Two processes that both need more get the same.
        assert_eq!(allowances(128 * MIB, &[claimed(64, 68), claimed(64, 68)]), [64 * MIB; 2]);
    }

    /// Memory that one process can't evict is missing for all other processes in the same measure.
    #[test]
    fn who_cannot_evict_leaves_the_rest_to_all_others() {
        let all = [Claimed { floor: 70 * MIB, ..claimed(80, 84) }, claimed(29, 33), claimed(28, 32)];
        assert_eq!(allowances(120 * MIB, &all), [70 * MIB, 25 * MIB, 25 * MIB]);
        // The floor of one process is more than the budget.
        let all = [
            Claimed { floor: 200 * MIB, ..claimed(200, 204) },
            Claimed { floor: 8 * MIB, ..claimed(30, 34) },
        ];
        assert_eq!(allowances(128 * MIB, &all), [128 * MIB, 8 * MIB]);
    }

    /// The processes look, evict what is too much and grow as they may, again and again. Together they never
    /// have more than the budget. No process waits that has less than others.
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

    /// A process waits after a fork even if it has found itself alone before. Without the wait, a child that
    /// ends at once would cost a round.
    #[test]
    fn after_each_fork_a_process_waits_before_it_asks() {
        let (share, ms) = (Share::default(), 1_000_000);
        let asks_at = |ms_now: u64| share.is_to_ask(true, false, true, ms_now * ms);
        assert!(!asks_at(900), "it shares nothing");
        for fork in [1000, 3000, 5000] {
            share.ledger.has_forked(4 * MIB, 0);
            assert!(!asks_at(fork) && !asks_at(fork + 24), "it waits");
            assert!(asks_at(fork + 25));
            // After the last fork, the process finds itself alone before it asks.
            if fork < 3000 {
                share.have_asked(ms, (fork + 25) * ms);
            }
            share.ledger.have_evicted(4 * MIB, 0);
            share.is_alone_with_less(SHARED_BYTES_MIN);
            assert!(!share.ledger.has_kin() && !asks_at(fork + 100));
        }
        // A mistaken reckoning doesn't wait.
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

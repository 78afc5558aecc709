//! A roll call: every thread of the engine is told of something new, and the caller waits until all of them
//! have answered.
//!
//! Threads are made and end meanwhile. A new thread has what its maker had when the kernel made it. A place
//! that is claimed for a new thread counts as one that hasn't answered. One look at the list isn't enough. A
//! maker can claim a place that was looked at already, and answer before the look comes to the maker.

use crate::sync::atomic::{AtomicU32, Ordering};

/// Threads that one process can have at once.
#[cfg(not(all(test, loom)))]
pub const MEMBERS_MAX: usize = 128;
#[cfg(all(test, loom))]
const MEMBERS_MAX: usize = 2;

/// The place is free.
const NONE: u32 = 0;
/// A thread is being made for the place.
const EXPECTED: u32 = u32::MAX;

/// A place on the list, and the thread that has it.
#[derive(Debug)]
pub struct Member {
    /// The thread's number. The kernel writes it when it makes the thread, and 0 when the thread ends.
    number: AtomicU32,
    /// The last call that the thread has answered.
    answer: AtomicU32,
}

impl Member {
    #[cfg(not(all(test, loom)))]
    const fn new() -> Member {
        Member { number: AtomicU32::new(NONE), answer: AtomicU32::new(0) }
    }

    /// Returns a free place. loom's atomics can't be made at compile time.
    #[cfg(all(test, loom))]
    fn new() -> Member {
        Member { number: AtomicU32::new(NONE), answer: AtomicU32::new(0) }
    }

    /// Returns the thread's number, or `None` while the kernel hasn't written it.
    pub fn number(&self) -> Option<u32> {
        // Ordering: Acquire. A caller that sees the thread also sees what the thread was made with.
        Some(self.number.load(Ordering::Acquire)).filter(|number| *number != EXPECTED)
    }

    /// The word that the kernel writes.
    pub const fn word(&self) -> &AtomicU32 {
        &self.number
    }

    /// Frees the place of a thread that could not be made.
    pub fn give_up(&self) {
        // Ordering: Release pairs with the Acquire in `expect`.
        self.number.store(NONE, Ordering::Release);
    }

    /// Whether the thread has answered `call`. A caller that sees the answer also sees what the thread did
    /// before.
    pub fn has_answered(&self, call: u32) -> bool {
        // Ordering: Acquire pairs with the Release in `answers`.
        self.answer.load(Ordering::Acquire) == call
    }

    /// Records that the thread has done what `call` asks for.
    pub fn answers(&self, call: u32) {
        // Ordering: Release. A caller that sees the answer also sees what was done, and which places this
        // thread has claimed until now.
        self.answer.store(call, Ordering::Release);
    }
}

/// The list of all places.
pub struct RollCall {
    members: [Member; MEMBERS_MAX],
}

impl RollCall {
    /// Returns a list without threads.
    #[cfg(not(all(test, loom)))]
    pub const fn new() -> RollCall {
        RollCall { members: [const { Member::new() }; MEMBERS_MAX] }
    }

    #[cfg(all(test, loom))]
    fn new() -> RollCall {
        RollCall { members: core::array::from_fn(|_| Member::new()) }
    }

    /// Returns every thread that exists or is about to be made.
    pub fn all(&self) -> impl Iterator<Item = &Member> {
        // Ordering: Acquire as in `Member::number`.
        self.members.iter().filter(|member| member.number.load(Ordering::Acquire) != NONE)
    }

    /// Returns the thread with this number.
    pub fn find(&self, number: u32) -> Option<&Member> {
        self.members.iter().find(|member| member.number.load(Ordering::Relaxed) == number)
    }

    /// Claims a free place for a thread that is about to be made.
    pub fn expect(&self) -> Option<&Member> {
        let claim = |member: &&Member| {
            // Ordering: Acquire, so that the place is used after its last thread. Relaxed where the place
            // isn't free.
            member.number.compare_exchange(NONE, EXPECTED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let member = self.members.iter().find(claim)?;
        member.answer.store(0, Ordering::Relaxed);
        Some(member)
    }

    /// Forgets all threads, in a fork's child.
    pub fn forget_all(&self) {
        self.members.iter().for_each(|member| member.number.store(NONE, Ordering::Relaxed));
    }

    /// Calls `ask` with every thread that hasn't answered `call`. Returns true if all threads have answered,
    /// and no thread can come that doesn't know of the call. Two looks in a row have then found no thread
    /// without an answer.
    pub fn have_all_answered(&self, call: u32, mut ask: impl FnMut(&Member)) -> bool {
        for _ in 0..2 {
            let mut have_all = true;
            for member in self.all().filter(|member| !member.has_answered(call)) {
                have_all = false;
                ask(member);
            }
            if !have_all {
                return false;
            }
        }
        true
    }
}

#[cfg(not(all(test, loom)))]
impl Default for RollCall {
    fn default() -> RollCall {
        RollCall::new()
    }
}

#[cfg(all(test, loom))]
mod loomed {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// The value that the caller wants all threads to have. Before, all have 0.
    const WANTED: u32 = 1;

    /// Looks that the caller makes. A thread that hasn't answered by then isn't waited for here.
    const LOOKS: usize = 2;

    /// Threads, each with its value and whether a signal has asked it.
    struct Process {
        roll: RollCall,
        has: [AtomicU32; MEMBERS_MAX],
        is_asked: [AtomicU32; MEMBERS_MAX],
    }

    impl Process {
        /// The thread at this place is where a signal can reach it, and does what it was asked for.
        fn hears_signals(&self, at: usize) {
            // Ordering: Acquire, as a signal's handler sees what was done before the signal was sent.
            if self.is_asked[at].load(Ordering::Acquire) != 0 && !self.roll.members[at].has_answered(WANTED) {
                self.has[at].store(WANTED, Ordering::Relaxed);
                self.roll.members[at].answers(WANTED);
            }
        }

        /// Makes a thread in another one. The maker hears signals before it has claimed a place and
        /// afterwards, and both threads do in the end.
        fn make_one(&self, maker: usize) {
            self.hears_signals(maker);
            let member = self.roll.expect().unwrap();
            let made = self.place_of(member);
            self.has[made].store(self.has[maker].load(Ordering::Relaxed), Ordering::Relaxed);
            // The kernel writes the number.
            member.number.store(101, Ordering::Release);
            self.hears_signals(maker);
            self.hears_signals(made);
        }

        fn place_of(&self, member: &Member) -> usize {
            self.roll.members.iter().position(|one| core::ptr::eq(one, member)).unwrap()
        }
    }

    /// A thread at place `maker` makes another one at the free place while all are told of something new. If
    /// the call is over, both have the new value.
    fn one_is_made_by(maker: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let zeros = || core::array::from_fn(|_| AtomicU32::new(0));
            let process = Process { roll: RollCall::new(), has: zeros(), is_asked: zeros() };
            process.roll.members[maker].number.store(100, Ordering::Relaxed);
            let process = Arc::new(process);
            let making = {
                let process = Arc::clone(&process);
                thread::spawn(move || process.make_one(maker))
            };
            // A member that can't be asked yet is looked at again.
            let ask = |member: &Member| {
                if member.number().is_some() {
                    process.is_asked[process.place_of(member)].store(1, Ordering::Release);
                }
            };
            let is_over = (0..LOOKS).any(|_| process.roll.have_all_answered(WANTED, ask));
            making.join().unwrap();
            let has = process.has.each_ref().map(|has| has.load(Ordering::Relaxed));
            assert!(!is_over || has == [WANTED; MEMBERS_MAX], "a thread has less than all: {has:?}");
        });
    }

    #[test]
    fn loom_thread_that_is_made_meanwhile_has_what_all_have() {
        one_is_made_by(0);
    }

    /// The new thread's place comes before its maker's, and was looked at before it was claimed.
    #[test]
    fn loom_thread_that_is_made_at_a_place_that_was_looked_at_has_what_all_have() {
        one_is_made_by(1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A thread of the model. It is `Expected` until the kernel has made it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Thread {
        Expected { maker: usize },
        There { number: u32, has: u32, is_asked: bool },
    }

    impl Thread {
        fn has(&self, wanted: u32) -> bool {
            matches!(self, Thread::There { number, .. } if *number == wanted)
        }
    }

    proptest! {
        /// Threads make threads, sleep, end and take values on, one step of one thread at a time, while calls
        /// are made.
        #[test]
        fn whenever_a_call_is_over_every_thread_has_what_was_wanted(
            steps in prop::collection::vec((0_usize..6, 0_usize..8), 1..200),
        ) {
            let roll = RollCall::new();
            let mut threads: Vec<(&Member, Thread)> = Vec::new();
            let first = roll.expect().unwrap();
            first.word().store(1, Ordering::Relaxed);
            threads.push((first, Thread::There { number: 1, has: 0, is_asked: false }));
            let (mut next_number, mut wanted, mut is_calling) = (2, 0, false);
            for (what, which) in steps {
                let at = which % threads.len();
                match (what, threads[at].1) {
                    // The thread begins to make another one.
                    (0, Thread::There { .. }) if threads.len() < 8 => {
                        let member = roll.expect().unwrap();
                        threads.push((member, Thread::Expected { maker: at }));
                    }
                    // The kernel makes the thread.
                    (1, Thread::Expected { maker }) => {
                        let Thread::There { has, .. } = threads[maker].1 else { unreachable!("a maker is there") };
                        threads[at].0.word().store(next_number, Ordering::Release);
                        threads[at].1 = Thread::There { number: next_number, has, is_asked: false };
                        next_number += 1;
                    }
                    // The thread hears the signal; until then it slept.
                    (2, Thread::There { number, is_asked: true, .. }) => {
                        threads[at].1 = Thread::There { number, has: wanted, is_asked: false };
                        roll.find(number).unwrap().answers(wanted);
                    }
                    // The thread ends, unless it is making another one.
                    (3, Thread::There { .. }) if at + 1 == threads.len() && at > 0 => {
                        threads[at].0.give_up();
                        threads.pop();
                    }
                    (4, _) if !is_calling => (wanted, is_calling) = (wanted + 1, true),
                    (5, _) if is_calling => {
                        let mut asked = Vec::new();
                        let is_over = roll.have_all_answered(wanted, |member| asked.extend(member.number()));
                        for number in asked {
                            let is_it = |one: &&mut (&Member, Thread)| one.1.has(number);
                            let found = threads.iter_mut().find(is_it).expect("only threads are asked");
                            let Thread::There { has, .. } = found.1 else { unreachable!("found as such") };
                            found.1 = Thread::There { number, has, is_asked: true };
                        }
                        if is_over {
                            is_calling = false;
                            for (_, thread) in &threads {
                                let Thread::There { has, .. } = thread else { panic!("one is still being made") };
                                prop_assert_eq!(*has, wanted);
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

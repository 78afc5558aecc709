//! Fork: the program makes a copy of itself.
//!
//! A child must see every byte as of the fork, and goes on with an engine of its own. The kernel copies on
//! write what is in memory. For what is out, the child keeps its parent's books as they were
//! (`core/src/pager/inherit.rs`). Tables, pool and frames are copied on write, too. Slots that were in use
//! stay as they are while the child may read them.
//!
//! The child has no other part of the parent's engine: it doesn't get the threads, and a userfaultfd doesn't
//! follow a fork. So before the child runs any code of the program or of libc, its new engine has registered
//! everything anew. For that reason libc's functions are entered where they make the system call
//! (`preload/src/fork.rs`): after the call they touch the heap.
//!
//! The parent hears that a child is gone, or runs another program, as follows. Both map one page of a file.
//! The parent unmaps the page at once, so that the child has the last mapping. The file is locked, and the
//! lock goes with the file's last user ([`Membership::token`](crate::session::record::Membership::token)).
//! The same lock keeps other processes from taking the slots of a parent that has died.
//!
//! Children of vfork and posix_spawn use the parent's memory, and the parent's engine threads serve them. In
//! `signal` and `segv` mode that goes by way of `guard/errands.rs`. Registered ranges are kept from children
//! except during a fork that the engine makes. So a child that was made without our hooks (a bare clone)
//! finds managed memory missing, not zeroed. A child that another thread makes by a bare clone during the
//! engine's fork finds zeros.

use crate::engine::Engine;
use crate::guard;
use crate::mappings::changes::EVERYTHING;
use crate::session::Notice;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use farpage_core::areas::heirs::GENERATIONS;
use farpage_core::stats::Counter;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PAGE_BYTES, PageRange};
use farpage_os::memory;
use farpage_os::sys::{self, Errno, number};

/// One process's knowledge of its children, and of itself as a child.
#[derive(Default)]
pub struct Heirs {
    /// Bit n: there may be children of generation n.
    generations: AtomicU32,
    /// The generation of the last fork.
    last: AtomicU32,
    /// During a fork, the address of the page that says that the child lives. 0 if nothing is out. A child
    /// finds the page here.
    token: AtomicUsize,
}

impl Heirs {
    /// Whether pages were out at the fork that made this copy.
    pub fn are_left_pages(&self) -> bool {
        self.token.load(Ordering::Relaxed) != 0
    }

    /// Whether there may be children that still need what was out at their fork.
    pub fn are_any(&self) -> bool {
        self.generations.load(Ordering::Relaxed) != 0
    }

    /// Returns the generation of the next child: a free one if there is one, otherwise the last one.
    fn next(&self) -> usize {
        let live = self.generations.load(Ordering::Relaxed);
        match live.trailing_ones() as usize {
            GENERATIONS => self.last.load(Ordering::Relaxed) as usize,
            free => free,
        }
    }
}

/// Makes a fork. `clone` is the system call. Returns the kernel's result, in the parent and in the child. The
/// child may use nothing of the engine but [`child`]. If the child needs its parent's books, the fork is
/// refused unless `may_join` says that a process may join the session.
pub fn fork(
    engine: &'static Engine,
    may_join: impl FnOnce() -> bool,
    clone: impl FnOnce() -> isize,
) -> isize {
    let clone = || guard::alone(clone);
    engine.make_headroom_for_child();
    let exclusive = engine.map.exclusive();
    if !engine.is_active() {
        let result = clone();
        if result == 0 {
            core::mem::forget(exclusive);
        } else if result > 0 {
            engine.have_forked();
        }
        return result;
    }
    // Otherwise the child would get books of the parent's elders that nobody needs any more, and would keep
    // them for good.
    forget_elders_now(engine);
    // The ranges are joined before the fork. A child could never join their pieces again.
    join(engine);
    let shown = show(engine, may_join);
    let result = match shown {
        Ok(()) => clone(),
        Err(errno) => {
            refused(engine);
            -(errno.0 as isize)
        }
    };
    if result == 0 {
        core::mem::forget(exclusive);
        return 0;
    }
    if result > 0 {
        engine.have_forked();
    }
    part(engine);
    hide(engine);
    drop(exclusive);
    result
}

/// Counts a fork that is refused, and tells the user of it.
fn refused(engine: &Engine) {
    engine.pager.stats().count(Counter::ForkRefused);
    engine.record.notice(Notice::ForkRefused, engine.pager.evicted());
}

/// Makes one mapping of each registered range, where a page that is out may not be touched.
fn join(engine: &Engine) {
    let Some(protections) = engine.protections else { return };
    for_each_registered(engine, |range| {
        engine.join(protections, range);
        Ok(())
    });
}

/// Undoes [`join`].
fn part(engine: &Engine) {
    let Some(protections) = engine.protections else { return };
    for_each_registered(engine, |range| protections.part(range));
}

fn for_each_registered(engine: &Engine, mut visit: impl FnMut(PageRange) -> Result<(), Errno>) {
    let mut from = EVERYTHING.start;
    while let Some(range) = engine.next_with(PageRange::new(from, EVERYTHING.end), Flags::REGISTERED) {
        if visit(range).is_err() {
            engine.stop_program(crate::session::StopReason::Tables);
        }
        from = range.end;
    }
}

/// Lets the child have the memory and the tables that it needs.
fn show(engine: &Engine, may_join: impl FnOnce() -> bool) -> Result<(), Errno> {
    if engine.pager.evicted() > 0 || engine.pager.has_lost() {
        if !may_join() {
            return Err(Errno::ENOMEM);
        }
        let generation = engine.heirs.next();
        let token = engine.registrar.ask_for_token(generation)?;
        engine.heirs.token.store(token, Ordering::Relaxed);
        engine.heirs.last.store(generation as u32, Ordering::Relaxed);
        engine.heirs.generations.fetch_or(1 << generation, Ordering::Relaxed);
        engine.pager.bequeath(generation);
        engine.show_tables(true)?;
    }
    engine.show_to_children(true)
}

/// Undoes [`show`] after a fork, whether the fork was made or not.
fn hide(engine: &Engine) {
    // Memory that can't be hidden again would be seen by a child that the engine doesn't make. That child
    // would find zeros.
    if engine.show_to_children(false).is_err() {
        engine.stop_program(crate::session::StopReason::Tables);
    }
    let token = engine.heirs.token.swap(0, Ordering::Relaxed);
    if token != 0 {
        let _ = engine.show_tables(false);
        unmap(token, PAGE_BYTES);
    }
}

/// Prepares a fork's child, before it has an engine of its own. `engine` is its parent's. `maker` is the
/// thread that made the child, with the program's stack pointer at `stack_pointer`.
pub fn child(engine: &Engine, maker: u32, stack_pointer: usize) {
    if !engine.mode().calls_can_wait() {
        guard::leave_in_child(maker, stack_pointer);
        // The new engine arms this thread while the thread waits.
        sys::keep_open(guard::UNTIL_ARMED);
        sys::open_what_is_kept_open();
    }
    engine.pager.forget_holders();
    if let Some(protections) = engine.protections.filter(|_| engine.is_active()) {
        for_each_registered(engine, |range| match protections.part_in_child(range) {
            // The range was to be kept from children.
            Err(Errno::ENOMEM) => Ok(()),
            result => result,
        });
    }
}

/// Frees what was kept for children that are all gone by now. Returns whether there was a generation without
/// children. Under the map lock, in an engine thread.
pub fn forget_heirless(engine: &Engine) -> bool {
    let mut any = false;
    let live = engine.heirs.generations.load(Ordering::Relaxed);
    for generation in (0..GENERATIONS).filter(|generation| live & 1 << generation != 0) {
        if engine.membership.is_heirless(generation) {
            engine.heirs.generations.fetch_and(!(1 << generation), Ordering::Relaxed);
            engine.pager.areas().disinherit(generation);
            any = true;
        }
    }
    any
}

/// Releases the copy of the parent's books once no page has its bytes only there. In the keeper, without the
/// map lock.
pub fn forget_elders(engine: &Engine) {
    if engine.elder.load(Ordering::Relaxed).is_null() || engine.pager.inherited() > 0 {
        return;
    }
    // A thread that has seen an inherited page has looked it up by the time that the lock is exclusive.
    let _exclusive = engine.map.exclusive();
    forget_elders_now(engine);
}

/// Does the same under the exclusive map lock.
pub fn forget_elders_now(engine: &Engine) {
    if engine.pager.inherited() > 0 {
        return;
    }
    let mut at = engine;
    // SAFETY: the pointer is null, or points to an engine that was placed for good.
    while let Some(elder) = unsafe { at.elder.swap(core::ptr::null_mut(), Ordering::Relaxed).as_ref() } {
        elder
            .for_each_table(|base, bytes| {
                unmap(base as usize, bytes);
                Ok(())
            })
            .ok();
        unmap(elder.heirs.token.load(Ordering::Relaxed), PAGE_BYTES);
        at = elder;
    }
}

fn unmap(base: usize, bytes: usize) {
    // SAFETY: the mapping is ours, and nobody refers to it any more.
    unsafe { sys::call(number::MUNMAP, [base, bytes.next_multiple_of(PAGE_BYTES), 0, 0, 0, 0]) };
}

/// Lets children have a mapping of Farpage's, or keeps it from them.
///
/// # Safety
/// A child's own engine may use the mapping only as a copy of its parent's.
pub unsafe fn show_mapping(base: *mut u8, bytes: usize, show: bool) -> Result<(), Errno> {
    // SAFETY: the caller promises what this function's `# Safety` asks for.
    unsafe {
        if show { memory::give_to_children(base, bytes) } else { memory::keep_from_children(base, bytes) }
    }
}

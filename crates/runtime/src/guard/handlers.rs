//! The two handlers of `signal` and `segv` mode. SIGBUS or SIGSEGV arrives for a page that is out, SIGSYS for
//! a system call that was stopped.
//!
//! Both handlers run on a room's stack, with all signals blocked except Farpage's two: that of faults, and
//! SIGSYS. The thread may be anywhere in its code, so the handlers don't allocate, call libc or use
//! thread-local storage. The handlers hold no lock when they touch the program's memory. The page that they
//! touch may be out, too, and then a handler runs on top of this one.
// UNSAFETY: arguments of the program's calls are read and written.

use super::buffers::{self, Buffer, Memory};
use super::calls::How;
use super::errands::Wanted;
use super::large;
use super::memory_file;
use super::resident::Guarding;
use super::rooms::{self, Level, Room};
use super::sent::hook_at;
use super::signals::{self, open};
use crate::engine::retire;
use crate::engine::{Engine, FaultMode};
use crate::mappings::changes;
use crate::privileges::credentials::{self, Whose};
use crate::privileges::filters;
use crate::privileges::limits;
use crate::session::first::First;
use core::sync::atomic::{AtomicPtr, Ordering};
use farpage_core::pager::Access;
use farpage_core::table::entry::State;
use farpage_core::units::PAGE_BYTES;
use farpage_fault::Fault;
use farpage_fault::segv::ByProtection;
use farpage_fault::signal::{fault_of, forbidden_of, unmapped_of};
use farpage_os::dispatch::{Birth, Call, Making, is_about_arming};
use farpage_os::errno::returned::{EAGAIN, EBADF, EFAULT, EINVAL, ENOSYS, EPERM};
use farpage_os::signal::{
    Action, AlternateStack, Context, Info, Register, SIGBUS, SIGSEGV, bit, change_blocked, send_to_thread,
    set_alternate_stack,
};
use farpage_os::sys::{self, number};
use farpage_os::{peek, proc};
use linux_raw_sys::general as raw;

/// Engine whose memory this process has. Null in a child that has a copy of that memory.
pub static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(core::ptr::null_mut());

/// Returns the engine, if this process has one whose faults arrive as signals.
pub fn engine() -> Option<&'static Engine> {
    // Ordering: Acquire pairs with the Release in `arm::arm_all_threads`.
    // SAFETY: the pointer is null, or refers to an engine, which is placed for good.
    unsafe { ENGINE.load(Ordering::Acquire).as_ref() }
}

/// Handles the signal for a page that is out.
pub unsafe extern "C" fn on_fault(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: both structures are the kernel's own, for this call.
    let (about, at) = unsafe { (&*info, &*context) };
    let fault = fault_of(about, at).or(forbidden_of(about, at)).or(aside_of(about, at));
    let is_unmapped = about.unmapped_at().is_some();
    let room = Room::current();
    if let (Some(fault), Some(engine)) = (fault, engine()) {
        // SAFETY: as above.
        let serve = || is_served(engine, fault, is_unmapped, unsafe { &mut *context });
        if room.map_or_else(serve, |room| room.at_work.during(context, serve)) {
            return;
        }
    }
    // SAFETY: the arguments are passed on as the kernel gave them.
    unsafe { tell(room, signal, info, context) }
}

/// Returns the fault of an access to a managed page that has no mapping. In `segv` mode a page may be moved
/// aside for a moment on its way out (`move_memory`).
fn aside_of(info: &Info, context: &Context) -> Option<Fault> {
    let is_managed = |fault: &Fault| {
        engine().is_some_and(|engine| engine.mode() == FaultMode::Segv && engine.is_registered(fault.page))
    };
    unmapped_of(info, context).filter(is_managed)
}

/// Serves a fault. Returns whether the fault was about a page that is out, so that the access is to be
/// retried.
fn is_served(engine: &'static Engine, fault: Fault, is_unmapped: bool, context: &mut Context) -> bool {
    match (rooms::borrowed(engine), engine.protections) {
        (Some(room), _) => is_served_for_child(engine, room, fault),
        (None, Some(protections)) if engine.is_registered(fault.page) => {
            is_closed_page_served(engine, protections, fault, is_unmapped, context)
        }
        (None, _) => is_missing_page_served(engine, fault),
    }
}

/// Passes a signal that isn't about Farpage on to the program. The program hears of the signal at once,
/// unless a hook or a handler of Farpage's is at work in the thread.
unsafe fn tell(room: Option<&'static Room>, signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: both structures are the kernel's own, for this call.
    let (about, stack_pointer) = unsafe { (&*info, (*context).register(Register::Rsp)) };
    if room.is_some_and(|room| room.at_work.is_entering()) && !about.was_sent() {
        // The program's stack isn't there after all. The kernel would have ended the process.
        // SAFETY: as above.
        return signals::end_with(SIGSEGV, unsafe { &mut *context });
    }
    let claims = |room: &Room| {
        // SAFETY: the fields are the thread's own.
        unsafe { (*room.own.get()).claimed & bit(signal as u32) != 0 }
    };
    if room.is_some_and(claims) && !about.was_sent() {
        // The program believes that it blocks this signal, perhaps because its own handler of the signal
        // runs. The kernel ends a process whose access raises a blocked signal.
        // SAFETY: as above.
        return signals::end_with(signal as u32, unsafe { &mut *context });
    }
    let interrupted = hook_at(stack_pointer).or(room.map(|room| &room.at_work));
    if interrupted.is_some_and(|at_work| at_work.keeps(about, context)) {
        return;
    }
    let spent = engine().and_then(rooms::spent_by_child);
    // SAFETY: the arguments are passed on as the kernel gave them.
    let hand_on = || unsafe { signals::hand_on(signal, info, context, spent) };
    match room {
        Some(room) => room.at_work.aside(hand_on),
        None => hand_on(),
    }
}

/// Serves a fault of a child of vfork, without taking a lock. Returns whether the child is to retry the
/// access.
fn is_served_for_child(engine: &Engine, room: &Room, fault: Fault) -> bool {
    let is_forbidden = |by: &ByProtection| !by.allows(fault.page, fault.access == Access::Write);
    if engine.protections.is_some_and(is_forbidden) {
        return false;
    }
    let seen = (fault.page, engine.map.wait_for_changes());
    // SAFETY: the fields are those of the thread that waits for this child, so the child alone uses them.
    let own = unsafe { &mut *room.own.get() };
    let ask = |fault| room.errand.ask(engine, Wanted::Fault(fault));
    if engine.protections.is_some_and(|by| by.is_open(fault.page)) {
        return match own.try_again(seen) {
            TRIES_ALONE => ask(Fault { access: Access::WriteProtected, ..fault }),
            tries => tries < TRIES_MAX,
        };
    }
    ask(fault) || core::mem::replace(&mut own.strange, seen) != seen
}

/// Serves a fault in `segv` mode, where a page that is out may not be touched. Returns whether the access is
/// to be retried. The answer is false if the program itself has forbidden the access.
fn is_closed_page_served(
    engine: &'static Engine,
    protections: &ByProtection,
    fault: Fault,
    is_unmapped: bool,
    context: &mut Context,
) -> bool {
    if matches!(engine.pager.state(fault.page), State::Lost(_)) {
        // The program gets SIGBUS, as for a mapped file whose disk has failed.
        context.blocked &= !bit(SIGBUS);
        // SAFETY: the call takes no arguments.
        let thread = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
        return send_to_thread(engine.process, thread, SIGBUS, fault.page.address()).is_ok();
    }
    if !protections.allows(fault.page, fault.access == Access::Write) {
        return false;
    }
    let serve = |fault| {
        engine.handover.inspect(|handover| engine.serve_fault(handover, fault));
        true
    };
    if !protections.is_open(fault.page) && !is_unmapped {
        return serve(fault);
    }
    // The page is open, or has no mapping. Either another thread has opened the page meanwhile, or the
    // mapping is being changed. Otherwise the page was closed behind Farpage's back, or its protection
    // doesn't allow this access.
    let seen = (fault.page, engine.map.wait_for_changes());
    let Some(room) = Room::current() else { return false };
    // SAFETY: the fields are the thread's own.
    let own = unsafe { &mut *room.own.get() };
    match own.try_again(seen) {
        TRIES_ALONE => serve(Fault { access: Access::WriteProtected, ..fault }),
        // The page is on its way out, or was unmapped behind Farpage's back.
        tries if is_unmapped => tries < TRIES_MAX && serve(fault),
        tries => tries < TRIES_MAX,
    }
}

/// Retries of an access that should be possible, each soon after the last, before the page is opened anew.
const TRIES_ALONE: u32 = 50;
/// Retries of the same access before the program is told.
const TRIES_MAX: u32 = 100;

/// Serves a fault in `signal` mode, or on a page that isn't registered. Returns whether the access is to be
/// retried: the page was brought in, or Farpage can't know yet whether it manages the page.
fn is_missing_page_served(engine: &'static Engine, fault: Fault) -> bool {
    if let Some(handover) = engine.handover.filter(|_| engine.is_registered(fault.page)) {
        // Lost pages are poisoned. The program is to hear of the fault.
        let is_lost = matches!(engine.pager.state(fault.page), State::Lost(_));
        if !is_lost {
            engine.serve_fault(handover, fault);
        }
        return !is_lost;
    }
    // A mapping that is being moved is at its new place before Farpage knows that place.
    let seen = (fault.page, engine.map.wait_for_changes());
    let Some(room) = Room::current() else { return false };
    // SAFETY: the fields are the thread's own.
    let strange = unsafe { &mut (*room.own.get()).strange };
    core::mem::replace(strange, seen) != seen
}

/// Replaces a very large count of descriptors by one for which the kernel gives the same answer, and looks at
/// less memory. Otherwise all memory behind the sets would be brought in.
fn bound_descriptors(call: &mut Call) {
    /// Counts up to this one are left as they are, because their sets are a few pages.
    const FEW: usize = 1 << 16;
    let [first, second, ..] = call.arguments;
    match call.number as u32 {
        // The kernel takes a count beyond its table for the size of the table.
        raw::__NR_select | raw::__NR_pselect6 if first as i32 > FEW as i32 => {
            let size = proc::descriptor_table_size().unwrap_or(usize::MAX);
            call.arguments[0] = (first as i32 as usize).min(size);
        }
        // The kernel refuses a count beyond the limit.
        raw::__NR_poll | raw::__NR_ppoll if second as u32 > FEW as u32 => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            if limit.is_some_and(|limit| u64::from(second as u32) > limit) {
                call.arguments[1] = u32::MAX as usize;
            }
        }
        _ => {}
    }
}

/// Handles a system call that was stopped before it is made.
pub unsafe extern "C" fn on_sigsys(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the structure is the kernel's own, for this call.
    let stopped = unsafe { (*info).stopped_call() };
    let Some(number) = stopped else {
        // SAFETY: the arguments are passed on as the kernel gave them.
        return unsafe { tell(Room::current(), signal, info, context) };
    };
    // SAFETY: threads are armed only once they have a room's stack, and this handler runs on that stack.
    let room = unsafe { Room::here() };
    // SAFETY: the context is the kernel's own, for this call.
    let context = unsafe { &mut *context };
    let answer = match number {
        // A call of 32-bit code, whose memory Farpage doesn't know how to guard.
        None => Some(ENOSYS),
        Some(number) => room.at_work.during(&raw const *context, || answer_to(room, number, context)),
    };
    match answer {
        Some(large::RESTART) => context.call_again(number.unwrap_or_default()),
        Some(answer) => context.set_register(Register::Rax, answer as usize),
        None => {}
    }
}

/// Returns the answer, or `None` if the thread is going to make the call.
fn answer_to(room: &'static Room, number: usize, context: &mut Context) -> Option<isize> {
    let call = Call::stopped(number, context);
    let level = room.level(context.register(Register::Rsp));
    let answer = Stopped { engine: engine(), room, level, call, context }.deal_with();
    if answer.is_some() {
        level.holder.release();
    }
    answer
}

struct Stopped<'a> {
    engine: Option<&'static Engine>,
    room: &'static Room,
    level: &'static Level,
    call: Call,
    context: &'a mut Context,
}

impl Stopped<'_> {
    /// Returns the answer, or `None` if the thread is going to make the call when the handler returns.
    fn deal_with(mut self) -> Option<isize> {
        let Some(engine) = self.engine else { return self.make() };
        if let Some(answer) = changes::by_number(engine, self.call.number, self.call.arguments) {
            return Some(answer);
        }
        if is_about_arming(&self.call) {
            return Some(EINVAL);
        }
        if let Some(answer) = self.keep_descriptors(engine) {
            return Some(answer);
        }
        // io_uring names buffers in a queue that Farpage doesn't see. Programs do without io_uring, as they
        // must in containers.
        if self.call.number == raw::__NR_io_uring_setup as usize {
            return Some(ENOSYS);
        }
        let is_borrowed = rooms::borrowed(engine).is_some();
        if !is_borrowed
            && let Some(answer) = large::transfer(engine, self.room, self.level, &mut self.call, self.context)
        {
            return Some(answer);
        }
        bound_descriptors(&mut self.call);
        let stack_pointer = self.context.register(Register::Rsp);
        let mut guarding = Guarding::new(engine, self.level, stack_pointer);
        buffers::each(self.call.number, &self.call.arguments, &mut guarding);
        if let Some(answer) = memory_file::refuse(engine, &self.call, &mut guarding) {
            return Some(answer);
        }
        match self.call.number {
            number::RT_SIGPROCMASK => return Some(self.change_mask(&mut guarding)),
            number::RT_SIGACTION => return Some(self.change_action(&mut guarding)),
            number::SIGALTSTACK => return Some(self.change_stack(&mut guarding)),
            number::RT_SIGRETURN => self.before_return(&mut guarding),
            number::EXIT => self.before_exit(&mut guarding),
            number::EXIT_GROUP => {
                let status = self.call.arguments[0] as i32;
                self.call.arguments[0] = First::tell(engine.membership.session, status) as usize;
            }
            call if filters::is_about(call, &self.call.arguments) => {
                // `install` reads what the call's arguments point to. The memory is held.
                if let Some(answer) = filters::install(engine, call, &self.call.arguments) {
                    return Some(answer);
                }
                if engine.has_ended() {
                    retire::let_others_leave(engine);
                }
            }
            call if limits::is_about(call, &self.call.arguments) => {
                limits::prepare(engine, call, &self.call.arguments);
            }
            call if credentials::is_about(call, &self.call.arguments) => {
                return Some(self.change_credentials(engine));
            }
            _ => self.open_mask(&mut guarding),
        }
        self.make()
    }

    /// Makes the call here, in the handler. The program gets the answer only when the engine's threads have
    /// taken on the new credentials.
    fn change_credentials(&self, engine: &'static Engine) -> isize {
        // SAFETY: this is the program's own call, and the memory that it reads is held.
        let answer = unsafe { sys::call(self.call.number, self.call.arguments) };
        if sys::check(answer).is_ok() {
            credentials::follow(engine, self.call.number, &self.call.arguments, Whose::Own);
        }
        answer
    }

    /// Keeps Farpage's descriptors out of a call that closes or replaces descriptors. Returns the answer, or
    /// `None` if the thread is to make the call.
    fn keep_descriptors(&self, engine: &'static Engine) -> Option<isize> {
        let [first, second, flags] = [0, 1, 2].map(|at| self.call.arguments[at] as u32);
        let number = self.call.number as u32;
        let (from, to) = match number {
            raw::__NR_close => (first, first),
            raw::__NR_dup2 | raw::__NR_dup3 if first != second => (second, second),
            raw::__NR_close_range if flags & CLOSE_RANGE_CLOEXEC == 0 => (first, second),
            _ => return None,
        };
        let ours = &engine.direct.descriptors;
        // A child that borrows the program's memory has a table of its own.
        if ours.first_in(from, to).is_none() || is_borrower(self.engine) {
            return None;
        }
        ours.settle(engine.is_active());
        let mut own = ours.first_in(from, to)?;
        match number {
            raw::__NR_close => Some(EBADF),
            raw::__NR_close_range => {
                let close = |first: u32, last: u32| {
                    let arguments = [first as usize, last as usize, flags as usize, 0, 0, 0];
                    // SAFETY: this is the program's own call, without Farpage's descriptors.
                    if first > last { 0 } else { unsafe { sys::call(self.call.number, arguments) } }
                };
                let mut from = from;
                loop {
                    let answer = if own == 0 { 0 } else { close(from, own - 1) };
                    if answer != 0 {
                        return Some(answer);
                    }
                    from = own + 1;
                    match ours.first_in(from, to) {
                        Some(next) => own = next,
                        None => return Some(close(from, to)),
                    }
                }
            }
            _ => {
                // SAFETY: the call takes no pointer.
                let is_open =
                    unsafe { sys::call(raw::__NR_fcntl as usize, [first as usize, F_GETFD, 0, 0, 0, 0]) };
                if is_open >= 0 {
                    // The number is the program's from now on, and faults that need the descriptor are handed
                    // over. The program may put a pipe there, and a read of Farpage's would take bytes out of
                    // the pipe.
                    ours.lose(own as i32);
                    engine.direct.wait_for_users();
                }
                None
            }
        }
    }

    /// Returns whether the call is a `clone3` whose arguments can't be read.
    fn is_clone_of_nothing(&self) -> bool {
        let [address, bytes, ..] = self.call.arguments;
        let is_readable = || {
            let last = address.saturating_add(bytes.min(PAGE_BYTES) - size_of::<u64>());
            peek::is_readable(address) && peek::is_readable(last)
        };
        self.call.number == number::CLONE3 && bytes >= size_of::<u64>() && !is_readable()
    }

    /// Has the thread make the call when the handler returns. Otherwise returns an answer. EFAULT: the
    /// arguments of a `clone3` can't be read. EAGAIN: there is no [`Room`] or no trampoline for the new
    /// thread or child.
    fn make(self) -> Option<isize> {
        if self.is_clone_of_nothing() {
            return Some(EFAULT);
        }
        // The level's words are in use until the call is done, whether or not the call holds memory.
        self.level.holder.occupy();
        // SAFETY: `buffers::each` has brought in the arguments of a `clone3`, and `is_clone_of_nothing` has
        // just seen that they can be read.
        let birth = unsafe { self.call.birth() };
        let is_lent = matches!(birth, Some(Birth::Borrowed | Birth::Elsewhere { waits: true, .. }));
        let newborn = match birth {
            Some(Birth::Elsewhere { end, waits: false }) => {
                let (Some(room), Some(engine)) = (Room::give(0), self.engine) else { return Some(EAGAIN) };
                // Until the new thread has an alternate stack, a fault on its own stack would end the
                // process.
                let mut guarding =
                    Guarding::new(engine, &room.levels[0], self.context.register(Register::Rsp));
                let address = end.saturating_sub(BIRTH_BYTES);
                guarding.buffer(Buffer { address, bytes: BIRTH_BYTES, how: How::Both });
                room.word()
            }
            Some(Birth::Borrowed | Birth::Elsewhere { .. }) => {
                if !self.room.lend(self.level, self.context.blocked) {
                    return Some(EAGAIN);
                }
                // While the child uses the room, signals that the program handles are blocked. A signal that
                // ends the program may arrive. If the maker is itself a borrowing child, Farpage doesn't know
                // its handlers. In that case all signals but Farpage's are blocked.
                self.context.blocked |= if is_borrower(self.engine) { !open() } else { signals::handled() };
                0
            }
            Some(Birth::Copy | Birth::CopyElsewhere { .. }) | None => 0,
        };
        // SAFETY: the level is this thread's own, and its last call is over.
        let scratch = unsafe { &mut *self.level.scratch.get() };
        let making =
            Making { done: self.level.holder.busy_word(), maker: self.room.word(), newborn, scratch };
        // SAFETY: the call was stopped in this context, which is this handler's own. The arguments of a
        // `clone3` are readable, as above. Faults on the program's stacks run a handler on top of this one.
        if unsafe { self.call.make(self.context, making) } {
            return None;
        }
        if is_lent {
            self.context.blocked = self.room.take_back();
        }
        Some(EAGAIN)
    }

    /// Answers `rt_sigprocmask`. The context has the mask that the thread continues with.
    fn change_mask(&mut self, memory: &mut Guarding<'_>) -> isize {
        let [how, set, before, bytes, ..] = self.call.arguments;
        if bytes != size_of::<u64>() {
            return EINVAL;
        }
        // The set is read first. The set's page may be out, and then a handler on top of this one uses the
        // room.
        let set = match set {
            0 => None,
            place => match memory.word(place) {
                Some(set) => Some(set),
                None => return EFAULT,
            },
        };
        // SAFETY: the fields are this thread's own.
        let own = unsafe { &mut *self.room.own.get() };
        let blocked = self.context.blocked | own.claimed;
        if let Some(set) = set {
            let Some(after) = change_blocked(blocked, how, set) else { return EINVAL };
            own.claimed = after & open();
            self.context.blocked = after & !open();
        }
        // SAFETY: the program expects the old mask at this address.
        if before != 0 && !unsafe { memory.write(before, blocked.to_ne_bytes()) } {
            return EFAULT;
        }
        0
    }

    /// Answers `rt_sigaction`.
    fn change_action(&self, memory: &mut Guarding<'_>) -> isize {
        let [signal, action, before, bytes, ..] = self.call.arguments;
        if bytes != size_of::<u64>() {
            return EINVAL;
        }
        let mut new = None;
        if action != 0 {
            let mut words = [0_u64; 4];
            for (at, word) in words.iter_mut().enumerate() {
                let Some(found) = memory.word(action + at * 8) else { return EFAULT };
                *word = found;
            }
            new = Some(Action::from_words(words));
        }
        let old = match signals::change(signal as u32, new, is_borrower(self.engine)) {
            Ok(old) => old,
            Err(errno) => return -(errno.0 as isize),
        };
        // SAFETY: the program expects the old disposition at this address.
        let is_written = before == 0 || unsafe { memory.write(before, old.to_bytes()) };
        if is_written { 0 } else { EFAULT }
    }

    /// Answers `sigaltstack`. The kernel has the room's stack. The program has its own stack, as far as its
    /// handlers see (`deliver.rs`).
    fn change_stack(&mut self, memory: &mut Guarding<'_>) -> isize {
        let [new, before, ..] = self.call.arguments;
        // Read before the room's fields are used, as in `change_mask`.
        let words = if new == 0 { [Some(0); 3] } else { [0, 8, 16].map(|at| memory.word(new + at)) };
        let [Some(start), Some(flags), Some(bytes)] = words else { return EFAULT };
        // SAFETY: the fields are this thread's own.
        let own = unsafe { &mut *self.room.own.get() };
        let mut old = own.alternate;
        let is_in_use = old.is_in_use(self.context.register(Register::Rsp));
        if is_in_use {
            old.flags |= AlternateStack::IN_USE;
        }
        if new != 0 {
            if is_in_use {
                return EPERM;
            }
            match AlternateStack::from_words([start, flags, bytes]).accepted() {
                Ok(stack) => own.alternate = stack,
                Err(errno) => return -(errno.0 as isize),
            }
        }
        // SAFETY: the program expects the old stack at this address.
        if before != 0 && !unsafe { memory.write(before, old.to_bytes()) } {
            return EFAULT;
        }
        0
    }

    /// Prepares the return from a handler of the program's. The kernel reads from the stack where the thread
    /// continues, its mask of signals and its alternate stack. The program believes to have that mask and
    /// that stack from then on. In the frame both are replaced by what the kernel is to have.
    fn before_return(&mut self, memory: &mut Guarding<'_>) {
        self.level.returns.store(true, Ordering::Relaxed);
        let stack_pointer = self.context.register(Register::Rsp);
        memory.buffer(Buffer {
            address: stack_pointer.wrapping_sub(8),
            bytes: FRAME_BYTES_MAX,
            how: How::Both,
        });
        let at = |offset: usize| stack_pointer.wrapping_add(offset);
        let places = [at(core::mem::offset_of!(Context, blocked)), at(core::mem::offset_of!(Context, stack))];
        let words = [
            places[0],
            places[1],
            places[1].wrapping_add(8),
            places[1].wrapping_add(16),
            at(Context::offset_of(Register::Rsp)),
        ];
        let [Some(mask), Some(start), Some(flags), Some(bytes), Some(back)] =
            words.map(|place| memory.word(place))
        else {
            return;
        };
        let ours = self.room.stack();
        // The frame of a handler that ran on top of Farpage's handler says nothing about the program.
        if start as usize != ours.start {
            // SAFETY: the fields are this thread's own.
            let own = unsafe { &mut *self.room.own.get() };
            own.go_back(mask, AlternateStack::from_words([start, flags, bytes]), back as usize);
            // SAFETY: the place is in the frame, which only the kernel reads from now on.
            unsafe { memory.write(places[1], ours.to_bytes()) };
        }
        if mask & open() != 0 {
            // SAFETY: as above.
            unsafe { memory.write(places[0], (mask & !open()).to_ne_bytes()) };
        }
    }

    fn before_exit(&mut self, guarding: &mut Guarding<'_>) {
        keep_what_the_end_writes(guarding);
        // SAFETY: the call takes no arguments.
        let thread = unsafe { sys::call(number::GETTID, [0; 6]) } as u32;
        // A child that borrows this stack doesn't leave the room.
        if self.room.thread.load(Ordering::Relaxed) == thread {
            self.room.leave();
        }
    }

    /// Opens Farpage's signals in the mask that a call sets while it waits. A handler that runs meanwhile
    /// makes calls and touches memory, too.
    fn open_mask(&mut self, memory: &mut Guarding<'_>) {
        let (argument, is_sized) = match self.call.number as u32 {
            raw::__NR_rt_sigsuspend => (0, false),
            raw::__NR_ppoll => (3, false),
            raw::__NR_epoll_pwait | raw::__NR_epoll_pwait2 => (4, false),
            raw::__NR_pselect6 | raw::__NR_io_pgetevents => (5, true),
            _ => return,
        };
        let mut place = self.call.arguments[argument];
        let mut bytes = size_of::<u64>();
        if is_sized {
            let (Some(found), Some(length)) = (memory.word(place), memory.word(place.wrapping_add(8))) else {
                return;
            };
            (place, bytes) = (found as usize, length as usize);
        }
        let mask = if place == 0 || bytes != size_of::<u64>() { None } else { memory.word(place) };
        // SAFETY: the level is this thread's own.
        unsafe { *self.level.waits_with.get() = mask };
        let Some(mask) = mask.filter(|mask| mask & open() != 0) else { return };
        // SAFETY: the level is this thread's own.
        let (own, sized) = unsafe { (&mut *self.level.mask.get(), &mut *self.level.sized_mask.get()) };
        *own = mask & !open();
        *sized = [core::ptr::from_ref(own) as usize, bytes];
        self.call.arguments[argument] = if is_sized { sized.as_ptr() as usize } else { sized[0] };
    }
}

/// Keeps the words that the kernel reads and writes when the calling thread ends: the word that is cleared
/// for those who wait for the thread, and the thread's robust locks. A call before arming may have named
/// memory that is out now.
fn keep_what_the_end_writes(memory: &mut Guarding<'_>) {
    const PR_GET_TID_ADDRESS: usize = 40;
    /// Locks that the kernel looks at, at most (ROBUST_LIST_LIMIT).
    const LOCKS_MAX: usize = 2048;
    let (mut cleared, mut head, mut bytes) = (0_usize, 0_usize, 0_usize);
    let ask = [PR_GET_TID_ADDRESS, &raw mut cleared as usize, 0, 0, 0, 0];
    let ask_for_locks = [0, &raw mut head as usize, &raw mut bytes as usize, 0, 0, 0];
    // SAFETY: the kernel writes a word of this function's stack.
    unsafe { sys::call(raw::__NR_prctl as usize, ask) };
    if filters::are_none() {
        // SAFETY: as above.
        unsafe { sys::call(raw::__NR_get_robust_list as usize, ask_for_locks) };
    }
    let mut keep = |address: usize, bytes: usize| memory.buffer(Buffer { address, bytes, how: How::Stays });
    if cleared != 0 {
        keep(cleared, size_of::<u32>());
    }
    if head == 0 {
        return;
    }
    keep(head, 3 * size_of::<usize>());
    let words = [0, 8, 16].map(|at| memory.word(head.wrapping_add(at)));
    let [Some(first), Some(offset), Some(pending)] = words else { return };
    let mut keep_lock = |entry: u64| {
        // The lowest bit tells a kind of lock.
        let entry = entry as usize & !1;
        if entry == 0 {
            return None;
        }
        memory.buffer(Buffer { address: entry, bytes: size_of::<usize>(), how: How::Stays });
        let lock = entry.wrapping_add(offset as usize);
        memory.buffer(Buffer { address: lock, bytes: size_of::<u32>(), how: How::Stays });
        memory.word(entry)
    };
    keep_lock(pending);
    let mut next = Some(first);
    for _ in 0..LOCKS_MAX {
        let Some(entry) = next.filter(|entry| *entry as usize & !1 != head) else { break };
        next = keep_lock(entry);
    }
}

const F_GETFD: usize = 1;
const CLOSE_RANGE_CLOEXEC: u32 = 4;

/// Bytes of its stack that a new thread may use before it has an alternate stack.
const BIRTH_BYTES: usize = 8 * 1024;

/// Bytes of the largest signal frame. The state of AMX's tiles takes 8 KiB of them.
const FRAME_BYTES_MAX: usize = 16 * 1024;

/// Returns whether the calling process isn't the engine's, but a child that borrows its memory until the
/// child runs another program.
pub fn is_borrower(engine: Option<&Engine>) -> bool {
    // SAFETY: the call takes no arguments.
    let process = unsafe { sys::call(number::GETPID, [0; 6]) } as u32;
    engine.is_some_and(|engine| engine.process != process)
}

/// Runs in each new thread and child of an armed thread before the program's code. Also runs in a thread that
/// has waited for a child of vfork.
pub extern "C" fn born(newborn: usize) {
    use farpage_os::dispatch::{BACK_AGAIN, BORROWER, COPY};
    match newborn {
        BORROWER => arm_borrower(),
        BACK_AGAIN => be_back(),
        // SAFETY: the word names the maker's room.
        copy if copy & COPY != 0 => leave_in_child(unsafe { Room::of_word(newborn & !COPY) }),
        // SAFETY: the word names the new thread's own room.
        _ => begin_in(unsafe { Room::of_word(newborn) }),
    }
}

// Separate functions, so that each takes no more of the program's stack than it needs itself.

#[inline(never)]
fn arm_borrower() {
    // The child's dispositions may have been cleared (CLONE_CLEAR_SIGHAND).
    super::arm::install_handlers_in_borrower();
    super::arm::arm_this_thread();
    rooms::of_caller().into_iter().for_each(|room| signals::set_blocked(room.inherited()));
}

#[inline(never)]
fn be_back() {
    rooms::of_caller().into_iter().for_each(|room| signals::set_blocked(room.take_back()));
}

#[inline(never)]
fn begin_in(room: &Room) {
    // SAFETY: the call takes no arguments.
    room.thread.store(unsafe { sys::call(number::GETTID, [0; 6]) } as u32, Ordering::Relaxed);
    // Signals are blocked meanwhile. A handler of the program's would find the thread half moved in. The
    // keeper may also tell the thread to arm itself, in another room.
    signals::with_blocked(!open(), || super::arm::move_in(room));
}

/// Undoes the arming in a child that has a copy of its parent's memory and that an armed thread has made.
#[inline(never)]
fn leave_in_child(room: &Room) {
    // SAFETY: this is the child's only thread. The stack is the program's own, or none.
    let own = unsafe { &*room.own.get() };
    // SAFETY: as above. If this runs on the room's stack, on top of a handler of Farpage's, the room's stack
    // stays the alternate one.
    let _ = unsafe { set_alternate_stack(&own.alternate) };
    signals::add_blocked(own.claimed);
    leave_unarmed();
}

/// Does the same in a child that thread `maker` has made in Farpage's code, with the program's stack pointer
/// at `stack_pointer`. Handlers of Farpage's may be in place, whether or not `maker` was armed.
pub fn leave_copy(maker: u32, stack_pointer: usize) {
    // A maker that was given a room but isn't armed yet has nothing in the room. The maker's alternate stack
    // is still the program's.
    let room = rooms::of_thread(maker).filter(|room| super::arm::is_armed(room));
    match room {
        Some(room) => {
            super::arm::inherit(room);
            leave_in_child(room);
        }
        None => leave_unarmed(),
    }
    // A handler of the program's continues on the room's stack.
    room.filter(|room| room.is_on_stack(stack_pointer)).inspect(|room| room.keep_for_good());
}

fn leave_unarmed() {
    signals::reset_in_child();
    super::arm::reset_in_child();
    if !ENGINE.swap(core::ptr::null_mut(), Ordering::Relaxed).is_null() {
        signals::uninstall();
        rooms::reset_in_child();
    }
}

//! The program's handlers run where they would without us: on its own alternate stack, or on the stack that was interrupted.
//!
//! Either may be out, and the kernel ends a process to which it can't deliver. So all signals that the program handles
//! arrive on a room's stack, at [`on_signal`]. From there the frame is moved to where the kernel would have laid it, and the
//! thread goes on there. Its handler may look at where it is (Go does), go on on yet another stack while it still needs this
//! one (.NET does), or never come back: nothing of the program's is on a room's stack, where faults and calls go on arriving.
//! When it returns, that is a call like others (`Stopped::before_return`). Only what a child of vfork installs for itself is
//! left to the kernel: its dispositions are its own.
// UNSAFETY: the program's handlers are run as the kernel would.

use super::arm::{self, is_armed};
use super::handlers::engine;
use super::rooms::{self, Room};
use super::signals::{self, open};
use crate::engine::Engine;
use farpage_core::units::PageIndex;
use farpage_os::dispatch;
use farpage_os::frame::Frame;
use farpage_os::peek;
use farpage_os::signal::{Action, AlternateStack, Context, Handler, Info, Register};

/// What lies below a stack pointer is in use so far.
const RED_ZONE: usize = 128;

/// A signal that isn't one of ours and that the program handles.
pub unsafe extern "C" fn on_signal(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel's own structure.
    if Room::if_here().is_some_and(|room| room.at_work.puts_off(unsafe { &*info })) {
        return;
    }
    // SAFETY: the kernel's own structures, for this call.
    unsafe { run(signals::disposition(signal as u32), signal, info, context) }
}

/// Has the program's handler run: when ours returns, or before that on top of it, if that is what was interrupted.
///
/// # Safety
/// In a handler of ours, with what that was given. It may never return.
pub unsafe fn run(action: Action, signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel's own structure.
    let interrupted = unsafe { (*context).register(Register::Rsp) };
    match Room::if_here().filter(|room| !room.is_on_stack(interrupted)) {
        // SAFETY: passed on; nothing of ours lies further up this stack.
        Some(room) => room.at_work.during(context, || unsafe { enter(room, &action, signal, context) }),
        // SAFETY: passed on.
        None => unsafe { call(&action, signal, info, context) },
    }
}

/// On top of a handler of ours; or in a thread that isn't armed yet, or in a child any more; or in an armed one as long as others
/// aren't, and where the program's handler would run.
unsafe fn call(action: &Action, signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the kernel's own structure.
    let blocked = unsafe { (*context).blocked };
    let room = Room::if_here().or_else(|| rooms::of_caller().filter(|room| is_armed(room)));
    // SAFETY: the thread's own.
    let claimed = room.map_or(0, |room| unsafe { (*room.own.get()).claimed });
    signals::set_blocked(action.blocks(signal as u32, blocked) & !open());
    // SAFETY: the program's handler, called with what the kernel would call it with: it takes one argument or three.
    let handler = unsafe { core::mem::transmute::<usize, Handler>(action.handler) };
    // SAFETY: as above. It may never return.
    unsafe { handler(signal, info, context) };
    // SAFETY: the kernel's own structure.
    let context = unsafe { &mut *context };
    // Until this one returns: then the context says it.
    signals::set_blocked(!open());
    if let Some(room) = room {
        // What it wants to be blocked from now on: as with any handler's return, not ours.
        context.blocked &= !open();
        // SAFETY: as above.
        unsafe { (*room.own.get()).claimed = claimed };
        if !room.is_on_stack(core::ptr::from_ref(context).addr()) {
            arm::hold_frame(room, context);
        }
    } else if let Some(room) = rooms::of_caller().filter(|room| is_armed(room)) {
        // It was armed meanwhile. Nobody looks at this return.
        let back = context.register(Register::Rsp);
        // SAFETY: the thread's own.
        unsafe { (*room.own.get()).go_back(context.blocked, context.alternate(), back) };
        context.blocked &= !open();
        context.stack = room.stack();
        arm::hold_frame(room, context);
    }
}

/// Moves the frame to the program's stack, and has the thread begin the handler there.
///
/// # Safety
/// In a handler on the room's stack that was given this context, and has interrupted the program.
unsafe fn enter(room: &Room, action: &Action, signal: i32, context: *mut Context) {
    // SAFETY: the caller's promise.
    let (frame, context) = unsafe { (Frame::of(context), &mut *context) };
    // SAFETY: the thread's own. Copies: a handler on top of this one uses the room, too.
    let (alternate, claimed) = unsafe { ((*room.own.get()).alternate, (*room.own.get()).claimed) };
    let interrupted = context.register(Register::Rsp);
    let waited_with = dispatch::ended_call(context).and_then(|stack_pointer| room.waited_with(stack_pointer));
    // A handler that returns needs its frame until it has, though its stack is put back already.
    let is_needed = dispatch::is_about_to_leave(context) && alternate.contains(interrupted);
    let place = place_for(&frame, action, alternate, interrupted, is_needed);
    let Some(place) = place.filter(|place| frame.pages_at(*place).all(can_be_written)) else {
        return signals::has_no_place(signal as u32, context);
    };
    // SAFETY: it lies below whatever the program has in use there.
    let moved = room.at_work.entering(|| unsafe { frame.copy_to(place, action.restorer) });
    // SAFETY: as above.
    let own = unsafe { &mut *room.own.get() };
    // What the program believes, as it finds it in the frame and has it again when the handler returns.
    moved.stack = alternate;
    moved.blocked |= claimed;
    if alternate.is_put_away() {
        (own.alternate, own.put_away) = (AlternateStack::NONE, alternate);
    }
    // In a call that waits with another mask that is the one.
    let blocked = action.blocks(signal as u32, waited_with.unwrap_or(moved.blocked));
    own.claimed = blocked & open();
    context.blocked = blocked & !open();
    context.begin(action.handler, signal, place);
}

/// Whether there is memory, as far as can be said: what we manage may be out, and is brought in.
fn can_be_written(place: usize) -> bool {
    // A child of vfork takes no lock, and so isn't told what is managed.
    let may_be_out = |engine: &Engine| {
        rooms::borrowed(engine).is_some() || engine.is_registered(PageIndex::of_address(place))
    };
    // SAFETY: the frame is about to be written there.
    is_one_of(|| engine().is_some_and(may_be_out), || unsafe { peek::can_overwrite(place) })
}

/// Whether a page is managed, or else writable. Both are asked twice. Memory that is registered between the two questions is closed for a
/// moment. It is managed from before that until it is open again.
fn is_one_of(mut is_managed: impl FnMut() -> bool, mut is_writable: impl FnMut() -> bool) -> bool {
    (0..2).any(|_| is_managed() || is_writable())
}

/// Where the frame goes; none if the alternate stack is too small for it. `is_needed`: so is what that has in use.
fn place_for(
    frame: &Frame,
    action: &Action,
    alternate: AlternateStack,
    interrupted: usize,
    is_needed: bool,
) -> Option<usize> {
    let is_there = is_needed || alternate.is_in_use(interrupted);
    if is_there || !action.wants_alternate_stack() || alternate.bytes == 0 {
        let place = frame.place_below(interrupted.wrapping_sub(RED_ZONE));
        return (!is_there || place > alternate.start).then_some(place);
    }
    let place = frame.place_below(alternate.start + alternate.bytes);
    (place > alternate.start).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALTERNATE: AlternateStack = AlternateStack { start: 0x10000, flags: 0, bytes: 0x4000 };
    const ELSEWHERE: usize = 0x7_0000;

    /// A thread got SIGSEGV in place of its signal: the mapping of its alternate stack was registered just then.
    #[test]
    fn memory_that_is_being_registered_is_there() {
        let asked = |managed: [bool; 2], writable: [bool; 2]| {
            let (mut managed, mut writable) = (managed.into_iter(), writable.into_iter());
            is_one_of(|| managed.next().unwrap(), || writable.next().unwrap())
        };
        assert!(asked([false, true], [false, false]), "it was registered after the first question");
        assert!(asked([false, false], [false, true]), "it could not be, and was opened again");
        assert!(!asked([false, false], [false, false]), "there is none");
    }

    fn frame() -> Frame {
        let bytes = Box::leak(Box::new([0_u128; 64]));
        // SAFETY: zeros: a context without vectors, which begins 8 bytes after its frame.
        unsafe { Frame::of(core::ptr::from_mut(bytes).cast::<u8>().wrapping_add(8).cast()) }
    }

    fn place(flags: u64, alternate: AlternateStack, interrupted: usize) -> Option<usize> {
        const ON_STACK: u64 = 0x0800_0000;
        let action = Action::from_words([7, flags * ON_STACK, 0, 0]);
        let place = place_for(&frame(), &action, alternate, interrupted, false)?;
        Some(if alternate.contains(place) {
            alternate.start + alternate.bytes - place
        } else {
            interrupted - place
        })
    }

    #[test]
    fn frames_go_where_the_kernel_lays_them() {
        let is_at = |found: Option<usize>, least: usize| {
            found.is_some_and(|below| (least..least + 64).contains(&below))
        };
        assert!(is_at(place(1, ALTERNATE, ELSEWHERE), 440), "at the top of the alternate stack");
        assert!(
            is_at(place(0, ALTERNATE, ELSEWHERE), 440 + 128),
            "below what was interrupted: not asked for"
        );
        assert!(is_at(place(1, AlternateStack::NONE, ELSEWHERE), 440 + 128), "likewise: there is none");
        assert!(
            is_at(place(1, ALTERNATE, 0x12000), 0x2000 + 440 + 128),
            "below a handler that is there already"
        );
        let put_away = AlternateStack { flags: 1 << 31, ..ALTERNATE };
        assert!(is_at(place(1, put_away, 0x12000), 440), "unless the thread has it only when it isn't there");
        assert_eq!(place(1, ALTERNATE, 0x10100), None, "it would not fit");
        assert_eq!(place(1, AlternateStack { bytes: 300, ..ALTERNATE }, ELSEWHERE), None, "likewise");
    }
}

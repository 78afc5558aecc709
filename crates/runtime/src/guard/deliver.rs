//! Runs the program's signal handlers where the kernel would: on the program's alternate stack, or on the
//! interrupted stack.
//!
//! Either stack may be evicted, and the kernel ends a process to which it can't deliver a signal. Therefore
//! every signal that the program handles arrives on a room's stack, at [`on_signal`]. From there the frame is
//! moved to where the kernel would have put it, and the thread continues in the program's handler.
//!
//! Nothing of the program's stays on a room's stack, so faults and stopped calls can always arrive there. The
//! program's handler may inspect its stack (Go), continue on another stack while it still needs this one
//! (.NET), or never return. A return of the handler is a system call like any other
//! (`Stopped::before_return`). Only handlers that a child of vfork installs for itself are left to the
//! kernel, because the child has its own dispositions.
// UNSAFETY: the program's handlers are run as the kernel would run them.

use super::arm::{self, is_armed};
use super::buffers::{Buffer, Memory};
use super::calls::How;
use super::handlers::engine;
use super::resident::Guarding;
use super::rooms::{self, Room};
use super::signals::{self, open};
use crate::engine::Engine;
use farpage_core::units::PageIndex;
use farpage_os::dispatch;
use farpage_os::frame::Frame;
use farpage_os::peek;
use farpage_os::signal::{Action, AlternateStack, Context, Handler, Info, Register};

/// Bytes below a stack pointer that a function may use without moving the pointer (x86-64 ABI).
const RED_ZONE: usize = 128;

/// Handles a signal that the program handles and that isn't one of Farpage's own.
pub unsafe extern "C" fn on_signal(signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: `info` is the kernel's own structure, valid for this call.
    if Room::current().is_some_and(|room| room.at_work.puts_off(unsafe { &*info })) {
        return;
    }
    // SAFETY: both structures are the kernel's own, for this call.
    unsafe { run(signals::disposition(signal as u32), signal, info, context) }
}

/// Has the program's handler run. The program's handler starts when Farpage's handler returns. On the
/// occasions that `call` lists, the program's handler runs at once, on top of Farpage's.
///
/// # Safety
/// The caller must be a handler of Farpage's, and pass what that handler was given. The call may never
/// return.
pub unsafe fn run(action: Action, signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the context is the kernel's own structure, for this call.
    let interrupted = unsafe { (*context).register(Register::Rsp) };
    match Room::current().filter(|room| !room.is_on_stack(interrupted)) {
        // SAFETY: the caller's promise is passed on. Nothing of Farpage's lies further up this stack.
        Some(room) => room.at_work.during(context, || unsafe { enter(room, &action, signal, context) }),
        // SAFETY: the caller's promise is passed on.
        None => unsafe { call(&action, signal, info, context) },
    }
}

/// Calls the program's handler directly, on the current stack. There are four occasions:
///
/// - the signal interrupted a handler of Farpage's
/// - the thread isn't armed yet
/// - the caller is a child that is no longer armed
/// - the thread is armed while other threads aren't, and the signal arrived where the program's handler would
///   run
unsafe fn call(action: &Action, signal: i32, info: *mut Info, context: *mut Context) {
    // SAFETY: the context is the kernel's own structure, for this call.
    let blocked = unsafe { (*context).blocked };
    // SAFETY: the fields are the thread's own.
    let claimed = own_room().map(|room| unsafe { (*room.own.get()).claimed });
    signals::set_blocked(action.blocks(signal as u32, blocked) & !open());
    // SAFETY: this is the program's handler, called with what the kernel would pass. Handlers take one
    // argument or three.
    let handler = unsafe { core::mem::transmute::<usize, Handler>(action.handler) };
    // SAFETY: as above. The handler may never return.
    unsafe { handler(signal, info, context) };
    // SAFETY: the context is the kernel's own structure, for this call.
    let context = unsafe { &mut *context };
    // All signals but Farpage's are blocked until this handler returns. Then the context's mask takes effect.
    signals::set_blocked(!open());
    // The handler may have forked, and a child has rooms of its own.
    let Some(room) = own_room() else { return };
    // SAFETY: the fields are the thread's own.
    let own = unsafe { &mut *room.own.get() };
    match claimed {
        Some(claimed) => own.claimed = claimed,
        // The thread was armed while the handler ran. Farpage doesn't look at the return from this handler.
        None => own.go_back(context.blocked, context.alternate(), context.register(Register::Rsp)),
    }
    // The program's handler may have changed the mask in the context. Farpage's signals stay open, as after
    // any handler's return.
    context.blocked &= !open();
    if !room.is_on_stack(core::ptr::from_ref(context).addr()) {
        context.stack = room.stack();
        bring_frame(room, context);
    }
}

/// Returns the room of the calling thread, if the thread is armed.
fn own_room() -> Option<&'static Room> {
    Room::current().or_else(|| rooms::of_caller().filter(|room| is_armed(room)))
}

/// Brings in the frame from which the kernel continues, and holds it until the thread's next call. The return
/// isn't stopped. While the handler ran, the program's stack may have been evicted or just be registered.
fn bring_frame(room: &Room, context: &Context) {
    let (level, frame) = arm::hold_frame(room, context);
    let Some(engine) = engine() else { return };
    Guarding::new(engine, level, frame.start).buffer(Buffer {
        address: frame.start,
        bytes: frame.len(),
        how: How::Both,
    });
}

/// Moves the frame to the program's stack, and has the thread begin the program's handler there.
///
/// # Safety
/// The caller must be a handler on the room's stack that was given this context and has interrupted the
/// program.
unsafe fn enter(room: &Room, action: &Action, signal: i32, context: *mut Context) {
    // SAFETY: the caller's promise.
    let (frame, context) = unsafe { (Frame::of(context), &mut *context) };
    // SAFETY: the fields are the thread's own. The values are copied, because a handler on top of this one
    // uses the room, too.
    let (alternate, claimed) = unsafe { ((*room.own.get()).alternate, (*room.own.get()).claimed) };
    let interrupted = context.register(Register::Rsp);
    let waited_with = dispatch::ended_call(context).and_then(|stack_pointer| room.waited_with(stack_pointer));
    // A handler that is about to return needs its frame until the return is done, though its alternate stack
    // already counts as restored.
    let is_needed = dispatch::is_about_to_leave(context) && alternate.contains(interrupted);
    let place = place_for(&frame, action, alternate, interrupted, is_needed);
    let Some(place) = place.filter(|place| frame.pages_at(*place).all(can_be_written)) else {
        return signals::has_no_place(signal as u32, context);
    };
    // SAFETY: the place lies below everything that the program uses on that stack. Faults there run a handler
    // on top of this one.
    let moved = room.at_work.entering(|| unsafe { frame.copy_to(place, action.restorer) });
    // SAFETY: as above, the fields are the thread's own.
    let own = unsafe { &mut *room.own.get() };
    // The frame shows the alternate stack and the mask that the program believes to have. The handler's
    // return restores both.
    moved.stack = alternate;
    moved.blocked |= claimed;
    if alternate.is_put_away() {
        (own.alternate, own.put_away) = (AlternateStack::NONE, alternate);
    }
    // A call may wait with a mask of its own. Then the handler's mask is based on that mask.
    let blocked = action.blocks(signal as u32, waited_with.unwrap_or(moved.blocked));
    own.claimed = blocked & open();
    context.blocked = blocked & !open();
    context.begin(action.handler, signal, place);
}

/// Returns whether the page at `place` can be written, as far as Farpage can tell. A managed page may be
/// evicted and counts as writable, because a touch brings it in.
fn can_be_written(place: usize) -> bool {
    // A child of vfork takes no lock, so it can't look up which pages are managed. For it every page counts
    // as managed.
    let may_be_out = |engine: &Engine| {
        rooms::borrowed(engine).is_some() || engine.is_registered(PageIndex::of_address(place))
    };
    // SAFETY: the frame is about to be written there.
    is_one_of(|| engine().is_some_and(may_be_out), || unsafe { peek::can_overwrite(place) })
}

/// Returns whether a page is managed or writable. Both questions are asked twice. Memory that is registered
/// between the two questions is closed for a moment. From before that moment until it is open again, the
/// memory counts as managed.
fn is_one_of(mut is_managed: impl FnMut() -> bool, mut is_writable: impl FnMut() -> bool) -> bool {
    (0..2).any(|_| is_managed() || is_writable())
}

/// Returns where the frame goes, or `None` if the alternate stack is too small for it. `is_needed` says that
/// the interrupted code still uses the alternate stack, even if that stack counts as free.
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

    /// The bug: a thread got SIGSEGV instead of its signal, because the mapping of its alternate stack was
    /// just being registered.
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
        // SAFETY: the bytes are zeros: a context without vector state, which begins 8 bytes after its frame.
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

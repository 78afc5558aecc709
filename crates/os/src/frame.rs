//! Moves the frame that the kernel lays on a stack for a signal's handler to another stack.
//!
//! The kernel delivers a signal only to a stack that is in memory. Otherwise it ends the process. Therefore
//! the program's signals arrive on a stack of the engine. Each frame is then moved to where the kernel would
//! have laid it. The memory there may be evicted, and is brought in like any other memory. The thread goes on
//! there, and nothing of the signal stays on the engine's stack.
//!
//! A frame is, upwards: the handler's return address, the [`Context`], the [`Info`], and the vector
//! registers' state. The state must lie at a multiple of 64 bytes, and handlers begin with a stack pointer of
//! 8 modulo 16. Frames are therefore moved by multiples of 64 bytes.
// UNSAFETY: frames are raw memory, laid by the kernel.

use crate::signal::{Context, Info, Register};

/// The frame of one signal.
pub struct Frame {
    start: usize,
    bytes: usize,
}

const CONTEXT_OFFSET: usize = size_of::<usize>();
const INFO_OFFSET: usize = CONTEXT_OFFSET + size_of::<Context>();
const HEAD_BYTES: usize = INFO_OFFSET + size_of::<Info>();
const ALIGNMENT: usize = 64;

/// Size in bytes of the part of the vector registers' state that every x86-64 processor has.
const LEGACY_BYTES: usize = 512;
/// Offset in that part of `FP_XSTATE_MAGIC1`, by which the kernel says that there is more state. The state's
/// total size follows.
const MAGIC_OFFSET: usize = 464;
const MAGIC: u32 = 0x4650_5853;

/// Bits of the flags register: the direction of string instructions, and two that a debugger sets.
const DIRECTION: usize = 1 << 10;
const RESUME: usize = 1 << 16;
const TRAP: usize = 1 << 8;
/// The code and stack segments of 64-bit programs, in the first and last quarter of their word.
const SEGMENTS: usize = 0x33 | 0x2b << 48;
const OTHER_SEGMENTS: usize = 0x0000_ffff_ffff_0000;

impl Frame {
    /// Returns the frame that a handler's context is part of.
    ///
    /// # Safety
    /// The kernel must have given the context to a handler that has not returned, on the stack that the
    /// handler began on.
    pub unsafe fn of(context: *const Context) -> Frame {
        let start = context as usize - CONTEXT_OFFSET;
        // SAFETY: the context is the kernel's, by the caller's promise.
        let vectors = unsafe { (*context).float_state };
        let end = match vectors {
            0 => start + HEAD_BYTES,
            // SAFETY: the kernel has laid the state at `place`.
            place => place + unsafe { vectors_bytes(place) },
        };
        Frame { start, bytes: end - start }
    }

    /// Returns the addresses that the frame occupies.
    pub const fn place(&self) -> core::ops::Range<usize> {
        self.start..self.start + self.bytes
    }

    /// Returns where the frame begins on a stack that is in use from `top` upwards.
    pub const fn place_below(&self, top: usize) -> usize {
        let highest = top.wrapping_sub(self.bytes);
        highest.wrapping_sub(highest.wrapping_sub(self.start) % ALIGNMENT)
    }

    /// Yields one address in each page that the frame occupies at `place`. Each address is in the frame, with
    /// 8 bytes of the frame from there on.
    pub fn pages_at(&self, place: usize) -> impl Iterator<Item = usize> + use<> {
        const PAGE_BYTES: usize = 4096;
        let last = place.wrapping_add(self.bytes).saturating_sub(8) / PAGE_BYTES;
        // The order is downwards, as a stack grows.
        (place / PAGE_BYTES + 1..=last).rev().map(|page| page * PAGE_BYTES).chain(core::iter::once(place))
    }

    /// Copies the frame to a place that [`Frame::place_below`] gave, with `back` as the handler's return
    /// address. Returns the copy's context.
    ///
    /// # Safety
    /// No other code may use that part of the stack. Faults there must be served.
    pub unsafe fn copy_to<'a>(&self, place: usize, back: usize) -> &'a mut Context {
        // SAFETY: the destination is free and faults there are served, by the caller's promise. A stack in
        // use doesn't overlap what lies below it.
        unsafe {
            core::ptr::copy_nonoverlapping(self.start as *const u8, place as *mut u8, self.bytes);
            *(place as *mut usize) = back;
        }
        // SAFETY: the context was just written, with the kernel's alignment.
        let context = unsafe { &mut *((place + CONTEXT_OFFSET) as *mut Context) };
        if context.float_state != 0 {
            context.float_state = context.float_state - self.start + place;
        }
        context
    }
}

/// # Safety
/// The kernel must have laid the state of the vector registers at `place`.
unsafe fn vectors_bytes(place: usize) -> usize {
    // SAFETY: the state is at `place` by the caller's promise. Both words are in the part that is always
    // there.
    let [magic, bytes] = unsafe { *((place + MAGIC_OFFSET) as *const [u32; 2]) };
    if magic == MAGIC { bytes as usize } else { LEGACY_BYTES }
}

impl Context {
    /// Makes the thread go on at the beginning of a handler whose frame is at `place`. The result is as if
    /// the kernel had just delivered the signal there.
    pub const fn begin(&mut self, handler: usize, signal: i32, place: usize) {
        self.set_register(Register::Rdi, signal as usize);
        self.set_register(Register::Rsi, place + INFO_OFFSET);
        self.set_register(Register::Rdx, place + CONTEXT_OFFSET);
        self.set_register(Register::Rax, 0);
        self.set_register(Register::Rsp, place);
        self.set_register(Register::Rip, handler);
        let flags = self.register(Register::Flags);
        self.set_register(Register::Flags, flags & !(DIRECTION | RESUME | TRAP));
        // The signal may have interrupted 32-bit code.
        let segments = self.register(Register::Segments);
        self.set_register(Register::Segments, segments & OTHER_SEGMENTS | SEGMENTS);
        // With 0 the kernel clears the vector registers.
        self.float_state = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal::{Action, set_action};
    use crate::sys::{self, number};
    use core::sync::atomic::{AtomicUsize, Ordering};

    const SIGURG: u32 = 23;
    static SEEN: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];
    static STACK: AtomicUsize = AtomicUsize::new(0);
    const STACK_BYTES: usize = 64 * 1024;

    unsafe extern "C" fn on_signal(signal: i32, _: *mut Info, context: *mut Context) {
        // SAFETY: the context is the kernel's own, and the handler hasn't returned.
        let (frame, context) = unsafe { (Frame::of(context), &mut *context) };
        let place = frame.place_below(STACK.load(Ordering::SeqCst) + STACK_BYTES);
        // SAFETY: no code runs on the test's own stack.
        unsafe { frame.copy_to(place, restorer()) };
        context.begin(inner as *const () as usize, signal, place);
    }

    unsafe extern "C" fn inner(signal: i32, info: *mut Info, context: *mut Context) {
        let here = 0_u8;
        // SAFETY: both point to the copies in the moved frame.
        let (told, context) = unsafe { ((*info).signal(), &mut *context) };
        let vectors = context.float_state;
        let seen = [signal as usize, told as usize, &raw const here as usize, vectors];
        seen.iter().zip(&SEEN).for_each(|(seen, place)| place.store(*seen, Ordering::SeqCst));
        SEEN[4].store(context.register(Register::R10), Ordering::SeqCst);
        // SAFETY: the instruction changes only the register that it names.
        unsafe { core::arch::asm!("xorps xmm7, xmm7", out("xmm7") _) };
        context.set_register(Register::R10, 6);
    }

    fn restorer() -> usize {
        Action::of(on_signal, 0).to_words()[2] as usize
    }

    #[test]
    fn handler_runs_on_the_other_stack_and_the_thread_goes_on_as_it_was() {
        let stack = Box::leak(Box::new([0_u128; STACK_BYTES / 16]));
        let start = core::ptr::from_mut(stack) as usize;
        STACK.store(start, Ordering::SeqCst);
        // SAFETY: the handler touches only statics and the stack above.
        unsafe { set_action(SIGURG, &Action::of(on_signal, 0)) }.unwrap();
        // SAFETY: both calls take no argument.
        let [process, thread] =
            [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
        let (mut vector, mut r10) = (1.5_f64, 5_usize);
        // SAFETY: `tgkill(2)` to this very thread takes no pointer. The operands name every register that
        // changes.
        unsafe {
            core::arch::asm!("syscall", inout("rax") number::TGKILL => _, in("rdi") process, in("rsi") thread,
                in("rdx") SIGURG as usize, inout("r10") r10, inout("xmm7") vector, out("rcx") _, out("r11") _);
        }
        let [signal, told, here, vectors, before] = SEEN.each_ref().map(|seen| seen.load(Ordering::SeqCst));
        assert_eq!((signal, told), (SIGURG as usize, SIGURG as usize));
        assert!((start..start + STACK_BYTES).contains(&here), "on the other stack");
        assert!((start..start + STACK_BYTES).contains(&vectors) && vectors.is_multiple_of(64));
        assert_eq!(
            (before, r10),
            (5, 6),
            "what the handler makes of the context is what the thread goes on with"
        );
        assert_eq!(vector, 1.5);
    }

    #[test]
    fn places_keep_the_alignment_and_lie_below_the_top() {
        for start in [0x1000, 0x1008, 0x1038] {
            for top in 0x20000..0x20080 {
                let frame = Frame { start, bytes: 1000 };
                let place = frame.place_below(top);
                assert!(place + 1000 <= top && top - place < 1000 + ALIGNMENT);
                assert_eq!(place % ALIGNMENT, start % ALIGNMENT);
            }
        }
    }

    #[test]
    fn each_page_is_asked_for_once_and_nothing_behind_the_frame() {
        for bytes in [440, 3000, 5000, 9000] {
            for place in 0x20000..0x21008 {
                let frame = Frame { start: 0, bytes };
                let asked: Vec<_> = frame.pages_at(place).collect();
                assert!(asked.iter().all(|at| (place..=place + bytes - 8).contains(at)));
                assert!(asked.windows(2).all(|two| two[0] / 4096 == two[1] / 4096 + 1));
                // A page that holds only a part of the frame's last word isn't asked for.
                assert_eq!(asked[0] / 4096, (place + bytes - 8) / 4096);
            }
        }
        let beyond = Frame { start: 0, bytes: 440 }.pages_at(usize::MAX - 100);
        assert_eq!(beyond.collect::<Vec<_>>(), [usize::MAX - 100], "where nothing can be");
    }
}

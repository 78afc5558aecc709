//! What the kernel lays on a stack for a signal's handler, moved to another stack.
//!
//! The kernel delivers a signal only to a stack that is there: otherwise it ends the process. So the program's signals
//! arrive on a stack of ours, and their frames are moved to where the kernel would have laid them, which may be out and is
//! brought in like any other memory. The thread goes on there, and from then on nothing of the signal is on our stack.
//!
//! A frame is, upwards: where the handler returns to, the [`Context`], the [`Info`], and what the vector registers held.
//! That has to lie at a multiple of 64, and handlers begin with a stack pointer of 8 modulo 16; so frames are moved by
//! multiples of 64.
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

/// The part of the vector registers that each x86-64 has.
const LEGACY_BYTES: usize = 512;
/// Where the kernel says in it whether there is more, by `FP_XSTATE_MAGIC1`, and after that how long it all is.
const MAGIC_OFFSET: usize = 464;
const MAGIC: u32 = 0x4650_5853;

/// In the flags register: directions of string instructions, and what a debugger has set.
const DIRECTION: usize = 1 << 10;
const RESUME: usize = 1 << 16;
const TRAP: usize = 1 << 8;
/// Code and stack segment of 64-bit programs, in the first and last quarter of their word.
const SEGMENTS: usize = 0x33 | 0x2b << 48;
const OTHER_SEGMENTS: usize = 0x0000_ffff_ffff_0000;

impl Frame {
    /// The frame that a handler's context is part of.
    ///
    /// # Safety
    /// The kernel must have given it to a handler that has not returned, on the stack that this had then.
    pub unsafe fn of(context: *const Context) -> Frame {
        let start = context as usize - CONTEXT_OFFSET;
        // SAFETY: the caller's promise.
        let vectors = unsafe { (*context).float_state };
        let end = match vectors {
            0 => start + HEAD_BYTES,
            // SAFETY: the kernel has laid it.
            place => place + unsafe { vectors_bytes(place) },
        };
        Frame { start, bytes: end - start }
    }

    /// The addresses that it takes.
    pub const fn place(&self) -> core::ops::Range<usize> {
        self.start..self.start + self.bytes
    }

    /// Where it begins on a stack that is in use from `top` upwards.
    pub const fn place_below(&self, top: usize) -> usize {
        let highest = top.wrapping_sub(self.bytes);
        highest.wrapping_sub(highest.wrapping_sub(self.start) % ALIGNMENT)
    }

    /// One address in each page that it takes at a place: in the frame, and with 8 bytes behind it there.
    pub fn pages_at(&self, place: usize) -> impl Iterator<Item = usize> + use<> {
        const PAGE_BYTES: usize = 4096;
        let last = place.wrapping_add(self.bytes).saturating_sub(8) / PAGE_BYTES;
        // Downwards, as a stack grows.
        (place / PAGE_BYTES + 1..=last).rev().map(|page| page * PAGE_BYTES).chain(core::iter::once(place))
    }

    /// Copies it to a place that [`Frame::place_below`] gave, with where its handler returns to, and gives the copy's context.
    ///
    /// # Safety
    /// That part of the stack must be nobody else's; faults there must be served.
    pub unsafe fn copy_to<'a>(&self, place: usize, back: usize) -> &'a mut Context {
        // SAFETY: the caller's promise; stacks in use don't overlap what lies below them.
        unsafe {
            core::ptr::copy_nonoverlapping(self.start as *const u8, place as *mut u8, self.bytes);
            *(place as *mut usize) = back;
        }
        // SAFETY: just written, as the kernel aligns it.
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
    // SAFETY: the caller's promise: both words are in the part that there always is.
    let [magic, bytes] = unsafe { *((place + MAGIC_OFFSET) as *const [u32; 2]) };
    if magic == MAGIC { bytes as usize } else { LEGACY_BYTES }
}

impl Context {
    /// The thread goes on at the beginning of a handler, whose frame is at `place`, as if the kernel had just delivered the
    /// signal there.
    pub const fn begin(&mut self, handler: usize, signal: i32, place: usize) {
        self.set_register(Register::Rdi, signal as usize);
        self.set_register(Register::Rsi, place + INFO_OFFSET);
        self.set_register(Register::Rdx, place + CONTEXT_OFFSET);
        self.set_register(Register::Rax, 0);
        self.set_register(Register::Rsp, place);
        self.set_register(Register::Rip, handler);
        let flags = self.register(Register::Flags);
        self.set_register(Register::Flags, flags & !(DIRECTION | RESUME | TRAP));
        // 32-bit code may have been interrupted.
        let segments = self.register(Register::Segments);
        self.set_register(Register::Segments, segments & OTHER_SEGMENTS | SEGMENTS);
        // The kernel clears them.
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
        // SAFETY: the kernel's own.
        let (frame, context) = unsafe { (Frame::of(context), &mut *context) };
        let place = frame.place_below(STACK.load(Ordering::SeqCst) + STACK_BYTES);
        // SAFETY: the test's own stack, which nobody is on.
        unsafe { frame.copy_to(place, restorer()) };
        context.begin(inner as *const () as usize, signal, place);
    }

    unsafe extern "C" fn inner(signal: i32, info: *mut Info, context: *mut Context) {
        let here = 0_u8;
        // SAFETY: the copies.
        let (told, context) = unsafe { ((*info).signal(), &mut *context) };
        let vectors = context.float_state;
        let seen = [signal as usize, told as usize, &raw const here as usize, vectors];
        seen.iter().zip(&SEEN).for_each(|(seen, place)| place.store(*seen, Ordering::SeqCst));
        SEEN[4].store(context.register(Register::R10), Ordering::SeqCst);
        // SAFETY: changes what it says.
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
        // SAFETY: the handler touches statics and the stack above.
        unsafe { set_action(SIGURG, &Action::of(on_signal, 0)) }.unwrap();
        // SAFETY: take nothing.
        let [process, thread] =
            [number::GETPID, number::GETTID].map(|call| unsafe { sys::call(call, [0; 6]) });
        let (mut vector, mut r10) = (1.5_f64, 5_usize);
        // SAFETY: tgkill(2) to this very thread.
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
                // Of a page that only the last word or a part of it is on nothing is asked.
                assert_eq!(asked[0] / 4096, (place + bytes - 8) / 4096);
            }
        }
        let beyond = Frame { start: 0, bytes: 440 }.pages_at(usize::MAX - 100);
        assert_eq!(beyond.collect::<Vec<_>>(), [usize::MAX - 100], "where nothing can be");
    }
}

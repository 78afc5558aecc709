//! Compresses with zstd what has been in the pool for long without being asked for, and decodes it for
//! faults. The result is about a quarter shorter than what [`words`](super::words) and `text` make of heaps
//! and text. Both directions take several times as long (`farpage bench codec`).
//!
//! A frame has two bytes of header and one block, without a magic number, a length or a checksum. The library
//! never allocates: its contexts lie in memory that each thread has for them. A context is made once, because
//! making it asks the CPU what it can do. In a virtual machine that takes longer than compressing a page.
//! Each page resets the context.
// UNSAFETY: the library is C. Each call gets pointers to memory of Farpage's, and a length with each pointer.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;
use zstd_sys::{
    ZSTD_CCtx, ZSTD_CCtx_setParameter, ZSTD_DCtx, ZSTD_DCtx_setParameter, ZSTD_cParameter, ZSTD_compress2,
    ZSTD_dParameter, ZSTD_decompressDCtx, ZSTD_format_e, ZSTD_initStaticCCtx, ZSTD_initStaticDCtx,
    ZSTD_isError,
};

use crate::memory::Zeroed;
use crate::units::PAGE_BYTES;

/// Bytes of a context of each kind: what zstd 1.5.7 asks for, and some more (a test compares them).
const ENCODER_BYTES: usize = 128 << 10;
const DECODER_BYTES: usize = 112 << 10;

/// Compression level. What higher levels gain on a page isn't worth their time.
const LEVEL: c_int = 1;

/// Frames without a magic number. zstd calls the parameters for this format experimental, because the format
/// isn't promised to stay. Our frames don't outlive the process.
const FORMAT: c_int = ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int;

/// Memory in which a context is made when it is first needed. The context can't be moved, because it points
/// into itself.
#[repr(C, align(64))]
struct ContextMemory<const BYTES: usize> {
    bytes: [u8; BYTES],
    /// Address of `bytes` when the context was made; 0 before.
    made_at: usize,
}

impl<const BYTES: usize> ContextMemory<BYTES> {
    const EMPTY: Self = ContextMemory { bytes: [0; BYTES], made_at: 0 };

    /// Calls `make` with the memory, unless a context was made at this address. Returns where the memory
    /// begins; `None` if `make` failed.
    fn made(&mut self, make: impl FnOnce(*mut c_void) -> bool) -> Option<*mut c_void> {
        let at = self.bytes.as_mut_ptr();
        if self.made_at != at.addr() {
            if !make(at.cast()) {
                return None;
            }
            self.made_at = at.addr();
        }
        Some(at.cast())
    }
}

/// The library's memory for compressing pages.
#[repr(transparent)]
pub(super) struct Encoder(ContextMemory<ENCODER_BYTES>);

/// The library's memory for decoding pages.
#[repr(transparent)]
pub struct Decoder(ContextMemory<DECODER_BYTES>);

// SAFETY: bytes and a number, for which zeros are valid and which have no drop.
unsafe impl Zeroed for Encoder {}
// SAFETY: bytes and a number, for which zeros are valid and which have no drop.
unsafe impl Zeroed for Decoder {}

impl Encoder {
    pub(super) const fn new() -> Encoder {
        Encoder(ContextMemory::EMPTY)
    }

    /// Returns the context; null if it doesn't fit.
    fn context(&mut self) -> *mut ZSTD_CCtx {
        let settings = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, LEVEL),
            (ZSTD_cParameter::ZSTD_c_experimentalParam2, FORMAT),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
        ];
        let made = self.0.made(|place| {
            // SAFETY: `place` points to `ENCODER_BYTES` bytes, which are ours and aligned. Parameters are set
            // only if the context was made.
            unsafe {
                let context = ZSTD_initStaticCCtx(place, ENCODER_BYTES);
                let is_set =
                    |(setting, value)| ZSTD_isError(ZSTD_CCtx_setParameter(context, setting, value)) == 0;
                !context.is_null() && settings.into_iter().all(is_set)
            }
        });
        // The context lies where its memory begins.
        made.map_or(null_mut(), <*mut c_void>::cast)
    }

    /// Compresses a page to the beginning of `to`. Returns the length; `None` if the result doesn't fit.
    pub(super) fn encode(&mut self, page: &[u8; PAGE_BYTES], to: &mut [u8]) -> Option<usize> {
        let context = self.context();
        if context.is_null() {
            return None;
        }
        let (to, bytes_max) = (to.as_mut_ptr().cast(), to.len());
        // SAFETY: the context was made, and is ours alone while `self` is borrowed. The library reads the
        // page and writes at most `bytes_max` bytes to `to`.
        let length = unsafe { ZSTD_compress2(context, to, bytes_max, page.as_ptr().cast(), PAGE_BYTES) };
        // Errors are the highest numbers.
        (length <= bytes_max).then_some(length)
    }
}

impl Decoder {
    /// Makes a decoder by value, for tests and tools. The driver carves it out of zeroed memory.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "112 KiB should not appear on a stack unasked")]
    pub const fn new() -> Decoder {
        Decoder(ContextMemory::EMPTY)
    }

    /// Returns the context; null if it doesn't fit.
    fn context(&mut self) -> *mut ZSTD_DCtx {
        let made = self.0.made(|place| {
            // SAFETY: as in `Encoder::context`.
            unsafe {
                let context = ZSTD_initStaticDCtx(place, DECODER_BYTES);
                let setting = ZSTD_dParameter::ZSTD_d_experimentalParam1;
                !context.is_null() && ZSTD_isError(ZSTD_DCtx_setParameter(context, setting, FORMAT)) == 0
            }
        });
        made.map_or(null_mut(), <*mut c_void>::cast)
    }

    /// Decodes `bytes` into `page`. Returns `None` if no page became `bytes`; `page` then has no particular
    /// content.
    pub(super) fn decode(&mut self, bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> Option<()> {
        let context = self.context();
        if context.is_null() {
            return None;
        }
        let (from, to) = (bytes.as_ptr().cast(), page.as_mut_ptr().cast());
        // SAFETY: the context is ours alone, as in `Encoder::encode`. The library reads `bytes` and writes at
        // most a page.
        let length = unsafe { ZSTD_decompressDCtx(context, to, PAGE_BYTES, from, bytes.len()) };
        (length == PAGE_BYTES).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of records, each with some bytes of its own.
    fn page(seed: u64) -> [u8; PAGE_BYTES] {
        core::array::from_fn(|at| {
            let mixed = (seed + at as u64 / 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            if at % 40 < 4 {
                (mixed >> (32 + at % 4 * 8)) as u8
            } else {
                b"somebody's record of what is known "[at % 35]
            }
        })
    }

    #[test]
    fn contexts_have_the_room_that_the_library_asks_for() {
        // SAFETY: the functions only compute.
        let (encoder, decoder) = unsafe {
            let settings = zstd_sys::ZSTD_getCParams(LEVEL, PAGE_BYTES as u64, 0);
            (zstd_sys::ZSTD_estimateCCtxSize_usingCParams(settings), zstd_sys::ZSTD_estimateDCtxSize())
        };
        assert!(encoder <= ENCODER_BYTES, "{encoder}");
        assert!(decoder <= DECODER_BYTES, "{decoder}");
    }

    #[test]
    fn pages_come_back_whatever_came_before_and_wherever_the_contexts_are() {
        let (mut encoder, mut decoder) = (Box::new(Encoder::new()), Box::new(Decoder::new()));
        for seed in 0..50 {
            let (page, mut to) = (page(seed), [0; PAGE_BYTES]);
            let length = encoder.encode(&page, &mut to).unwrap();
            assert!(length < PAGE_BYTES / 4, "{length}");
            assert!(encoder.encode(&page, &mut to[..length - 1]).is_none());
            assert_eq!(encoder.encode(&page, &mut to), Some(length));
            let mut back = [0xee; PAGE_BYTES];
            decoder.decode(&to[..length], &mut back).unwrap();
            assert!(back == page);
            assert!(decoder.decode(&to[..length - 1], &mut back).is_none());
            if seed % 8 == 0 {
                (encoder, decoder) = (Box::new(*encoder), Box::new(*decoder));
            }
        }
    }
}

//! Asks once what this CPU can do.
// UNSAFETY: an instruction asks the CPU which registers the kernel saves.

use core::sync::atomic::{AtomicU8, Ordering};

/// Vectors that may be used: the CPU has them, and the kernel saves them. Each level includes all levels
/// before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Vectors {
    /// The least, which every CPU has.
    Any,
    /// 32 bytes: AVX2, and BMI.
    Avx2,
    /// 64 bytes: AVX-512 F, BW, CD, DQ, VL.
    Avx512,
    /// AVX-512 VBMI and VBMI2, which move single bytes.
    Vbmi2,
}

/// All levels, in ascending order.
const ALL: [Vectors; 4] = [Vectors::Any, Vectors::Avx2, Vectors::Avx512, Vectors::Vbmi2];

/// Returns the best vectors that this CPU has.
pub fn vectors() -> Vectors {
    const UNKNOWN: u8 = u8::MAX;
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    if let Some(known) = ALL.get(usize::from(KNOWN.load(Ordering::Relaxed))) {
        return *known;
    }
    let best = ask();
    KNOWN.store(best as u8, Ordering::Relaxed);
    best
}

/// Returns all levels that this CPU has, for tests that compare them.
#[cfg(test)]
pub fn each() -> impl Iterator<Item = Vectors> {
    ALL.into_iter().filter(|those| *those <= vectors())
}

#[cfg(not(target_arch = "x86_64"))]
fn ask() -> Vectors {
    Vectors::Any
}

#[cfg(target_arch = "x86_64")]
fn ask() -> Vectors {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    /// FMA, POPCNT, OSXSAVE, AVX, F16C: the compiler takes what AVX-512 F implies for granted.
    const FIRST: u32 = 1 << 12 | 1 << 23 | 1 << 27 | 1 << 28 | 1 << 29;
    /// BMI1, AVX2, BMI2.
    const AVX2: u32 = 1 << 3 | 1 << 5 | 1 << 8;
    /// AVX-512 F, DQ, CD, BW, VL.
    const AVX512: u32 = 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31;
    /// VBMI and VBMI2, in another register.
    const VBMI2: u32 = 1 << 1 | 1 << 6;
    /// SSE and AVX.
    const AVX_SAVED: u64 = 0b110;
    /// The three parts of AVX-512's state.
    const AVX512_SAVED: u64 = 0b1110_0000;
    let has = |word: u32, bits: u32| word & bits == bits;
    if __cpuid(0).eax < 7 || !has(__cpuid(1).ecx, FIRST) {
        return Vectors::Any;
    }
    let (low, high): (u32, u32);
    // SAFETY: the CPU has the instruction (OSXSAVE is in `FIRST`). The instruction reads a register and no
    // memory.
    unsafe {
        core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
    }
    let saves = |bits: u64| (u64::from(high) << 32 | u64::from(low)) & bits == bits;
    let seventh = __cpuid_count(7, 0);
    let steps = [
        has(seventh.ebx, AVX2) && saves(AVX_SAVED),
        has(seventh.ebx, AVX512) && saves(AVX512_SAVED),
        has(seventh.ecx, VBMI2),
    ];
    ALL[steps.into_iter().take_while(|has| *has).count()]
}

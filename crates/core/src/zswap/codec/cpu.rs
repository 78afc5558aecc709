//! What this CPU can do, asked once.
// UNSAFETY: asking the CPU which registers the kernel keeps.

#[cfg(target_arch = "x86_64")]
use core::sync::atomic::{AtomicU8, Ordering};

/// Whether vectors of 64 bytes may be used: the CPU has them (AVX-512 F, BW, CD, DQ, VL, and BMI), and the kernel saves them.
#[cfg(target_arch = "x86_64")]
pub fn has_avx512() -> bool {
    const UNKNOWN: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    match KNOWN.load(Ordering::Relaxed) {
        UNKNOWN => {
            let has = ask();
            KNOWN.store(u8::from(has), Ordering::Relaxed);
            has
        }
        known => known != 0,
    }
}

#[cfg(target_arch = "x86_64")]
fn ask() -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    /// FMA, POPCNT, OSXSAVE, AVX, F16C: the compiler takes what AVX-512 F implies for granted.
    const FIRST: u32 = 1 << 12 | 1 << 23 | 1 << 27 | 1 << 28 | 1 << 29;
    /// BMI1, AVX2, BMI2, AVX-512 F, DQ, CD, BW, VL.
    const SEVENTH: u32 = 1 << 3 | 1 << 5 | 1 << 8 | 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31;
    /// SSE, AVX, and the three parts of AVX-512's state.
    const SAVED: u64 = 0b1110_0110;
    let has = |word: u32, bits: u32| word & bits == bits;
    if __cpuid(0).eax < 7 || !has(__cpuid(1).ecx, FIRST) || !has(__cpuid_count(7, 0).ebx, SEVENTH) {
        return false;
    }
    let (low, high): (u32, u32);
    // SAFETY: the CPU has the instruction (OSXSAVE), which reads a register.
    unsafe {
        core::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack));
    }
    (u64::from(high) << 32 | u64::from(low)) & SAVED == SAVED
}

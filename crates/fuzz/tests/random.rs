//! Runs each target for a moment on bytes from fixed seeds. `make fuzz` searches further.

use farpage_fuzz::{Input, TARGETS};
use std::time::{Duration, Instant};

/// Inputs for each target before the time may end the run, at least. `INPUTS` is the most.
const INPUTS_MIN: u64 = 50;
const INPUTS: u64 = 3_000;
const TIME: Duration = Duration::from_millis(700);

/// Returns the bytes of this seed, by xorshift64*. Most lengths are short. The generator's low bits are as
/// good as any.
fn bytes(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let length = 1_usize << (next() >> 60);
    let length = length.min(4096) + (next() >> 32) as usize % 64;
    // Half of the inputs have every operation switched on.
    let first = if seed.is_multiple_of(2) { 0 } else { (next() >> 40) as u8 };
    std::iter::once(first).chain((0..length).map(|_| (next() >> 40) as u8)).collect()
}

/// Prints the input during which a target panicked.
struct Running(&'static str, u64);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("target {} fails on the bytes of seed {}", self.0, self.1);
        }
    }
}

#[test]
fn no_target_finds_anything_in_random_bytes() {
    for target in TARGETS {
        let began = Instant::now();
        let mut seed = 0;
        while seed < INPUTS && (seed < INPUTS_MIN || began.elapsed() < TIME) {
            let _running = Running(target.name, seed);
            (target.run)(&mut Input::new(&bytes(seed)));
            seed += 1;
        }
        println!("{}: {seed} inputs in {:?}", target.name, began.elapsed());
    }
}

#[test]
fn targets_bear_having_no_bytes_at_all() {
    TARGETS.iter().for_each(|target| (target.run)(&mut Input::new(&[])));
}

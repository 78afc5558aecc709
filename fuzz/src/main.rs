//! Runs the target that FARPAGE_FUZZ_TARGET names on libFuzzer's bytes.
#![no_main]

use farpage_fuzz::{Input, Target, target};
use std::sync::OnceLock;

fn chosen() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("FARPAGE_FUZZ_TARGET").unwrap_or_default();
        target(&name).unwrap_or_else(|| panic!("FARPAGE_FUZZ_TARGET names no target: `{name}`"))
    })
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (chosen().run)(&mut Input::new(bytes)));

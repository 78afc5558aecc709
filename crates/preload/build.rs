//! The library is a program, too: one that waits for the end of a run (`farpage_runtime::session::last`).
//! Here its entry point is named.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--entry=farpage_last");
}

#!/bin/sh
# Runs each fuzz target for some seconds under libFuzzer, on stable Rust: fuzz/run.sh SECONDS [TARGET...]
# A run goes on with the inputs that earlier runs found. An input that fails stays in the corpus directory,
# and its name is printed.
set -eu
seconds=${1:?seconds for each target}
shift
here=$(cd "$(dirname "$0")" && pwd)
build=${CARGO_TARGET_DIR:-$here/../target}
host=$(rustc -vV | sed -n 's/^host: //p')

# The flags of cargo-fuzz without the sanitizer, which needs a nightly compiler.
flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags="$flags -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags="$flags -Cllvm-args=-sanitizer-coverage-trace-compares"
# With --target, build scripts and macros are built without these flags.
(cd "$here" && RUSTFLAGS="$flags" ${CARGO:-cargo} build --release --target "$host" --target-dir "$build/fuzz")
fuzzer="$build/fuzz/$host/release/farpage-libfuzzer"

[ $# -gt 0 ] || set -- $(cd "$here/.." && ${CARGO:-cargo} run -q -p farpage-fuzz --target-dir "$build" -- list)
for target; do
    corpus="$build/fuzz/corpus/$target"
    mkdir -p "$corpus"
    if ! FARPAGE_FUZZ_TARGET=$target "$fuzzer" -max_total_time="$seconds" -max_len=4096 -timeout=10 \
        -artifact_prefix="$corpus/failed-" -print_final_stats=1 "$corpus" >"$corpus.log" 2>&1; then
        cat "$corpus.log"
        echo "$target fails; again with: cargo run -p farpage-fuzz -- $target FILE" >&2
        exit 1
    fi
    echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$corpus.log") inputs," \
        "$(grep -o 'cov: [0-9]*' "$corpus.log" | tail -1 | sed 's/cov: //') edges, nothing wrong"
done

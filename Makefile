# make build | docs | man | demo | test | loom | fuzz | fuzz-programs | test-full | compat | vm | starts | programs |
#      lint | bench-within | bench-programs BEFORE=DIR | clean
#
# CI runs `make test`. The tests need Rust, a C compiler, make and python3. As root, `make programs` installs
# the programs that the end-to-end tests run; otherwise it prints the names of the missing ones.

CARGO ?= cargo
PYTHON ?= python3

.PHONY: build docs man demo test test-unit loom fuzz fuzz-programs test-sim test-e2e test-full compat vm starts programs lint bench-within bench-programs clean

# The preload library is built by itself: it is no_std. Beside crates that need std it would lose that.
build:
	$(CARGO) build --release -p farpage-preload
	$(CARGO) build --release

demo: build
	$(PYTHON) demo/objects.py

test: programs lint build test-unit loom test-sim test-e2e

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --release -p farpage-preload -- -D warnings
	$(CARGO) clippy -p farpage-xtask --all-targets -- -D warnings
	$(CARGO) test --quiet -p farpage-xtask
	$(CARGO) xtask tidy

# Builds the book of docs/ into target/book.
docs:
	@command -v mdbook mdbook-mermaid >/dev/null || \
		{ echo "make docs needs two programs: cargo install mdbook mdbook-mermaid"; exit 1; }
	rm -rf target/book-source && mkdir -p target && cp -r docs target/book-source
	mdbook-mermaid install target/book-source
	mdbook build --dest-dir $(CURDIR)/target/book target/book-source

# Writes the manual pages anew, from the definition of the options. A test fails while they differ.
man:
	WRITE_MANUAL=1 $(CARGO) test --bins manual_pages_are_those

# Tests are chosen by their names, never by `-p`. For another set of packages cargo builds the dependencies
# again, with that set's features.
# Core needs no privileges and no kernel feature: as root, `make` runs core's tests as nobody.
test-unit:
	$(CARGO) test --config 'target."cfg(unix)".runner = "$(CURDIR)/tests/runner.sh"' \
		--lib --bins --examples --test invariants --test conformance --test guard --test random

# Runs the lock-free parts in every order in which their threads can meet. Takes seconds once loom is built.
# The build has a directory of its own, because the flag would have everything else built again.
loom:
	RUSTFLAGS="--cfg loom" $(CARGO) test -p farpage-core --lib --target-dir $${CARGO_TARGET_DIR:-target}/loom loom_

# Seconds for which every fuzz target runs. `make test` runs each for less than one second, on random bytes.
FUZZ_SECONDS ?= 60
fuzz:
	fuzz/run.sh $(FUZZ_SECONDS)

# Runs programs that do anything to their memory, with new seeds, in each mode. Each failure says how to
# repeat it.
DURATION ?= 2h
fuzz-programs: build
	FARPAGE_TEST_DURATION=$(DURATION) $(CARGO) test --test random_programs -- --test-threads=7 --nocapture

# Runs a thousand seeds, and then the same with planted bugs, each of which must be found.
test-sim:
	$(CARGO) test --test seeds
	$(CARGO) test -p farpage-sim --features planted --test planted

# Experiments whose tests measure no time. Two of them run at once.
UNTIMED = readahead_ slots_ extents_ index_ order_

# Real programs share memory and processors, so few run at a time. Only one runs where tests look at figures
# of the bench or of limits.
test-e2e: build programs
	$(CARGO) test --test bad_input --test supervisor --test beside --test hostile
	$(CARGO) test --test memory_calls -- --test-threads=3
	$(CARGO) test --test limits --test show --test hardened -- --test-threads=1
	$(CARGO) test --test privileges --test filters -- --test-threads=2
	$(CARGO) test --test bench -- --test-threads=1 $(UNTIMED:%=--skip %)
	$(CARGO) test --test bench -- --test-threads=2 $(UNTIMED)
	$(CARGO) test --test programs -- --test-threads=2
	$(CARGO) test --test random_programs -- --test-threads=2
	FARPAGE_TEST_FAULTS=thread $(CARGO) test --test memory_calls -- --test-threads=3 \
		io:: peer_writes:: stacks:: processes:: signals:: strange:: threads:: remap:: list_that_is_out unlocked_after
	FARPAGE_TEST_FAULTS=thread $(CARGO) test --test programs -- --test-threads=2 without_disk
	FARPAGE_TEST_FAULTS=segv $(CARGO) test --test memory_calls -- --test-threads=3 \
		remap:: heap:: io:: stacks:: arming:: handlers:: dont_need only_written forbidden_before fork_while_out sparse snapshots moved_in_a_child \
		borrowers_killed workers_that_block list_that_is_out unlocked_after kept_from_children wiped_where \
		past_libc_before sockets:: robust_mutexes
	$(PYTHON) tests/compat.py --fast
	$(PYTHON) tests/starts.py --starts 2

# Runs the sizes that the promise is made for: about 1 GiB for each program.
test-full: build programs
	FARPAGE_TEST_SIZE=full $(CARGO) test --test programs --test memory_calls --test limits -- --test-threads=1 --nocapture
	for faults in signal segv; do FARPAGE_TEST_SIZE=full FARPAGE_TEST_FAULTS=$$faults \
		$(CARGO) test --test programs --test memory_calls -- --test-threads=1 --nocapture || exit; done

# Runs many more programs, in each mode, as root and as an ordinary user. docs/compatibility.md is made of the
# results. Takes an hour or more, and installs what it needs.
compat: build
	tests/programs.sh compat
	$(PYTHON) tests/compat.py --out docs/compatibility.md

# Tests other kernels, in QEMU without KVM: KERNELS="5.10 6.1 6.12 newest". Downloads the kernels. Takes about
# half an hour on two CPUs.
KERNELS ?=
vm: build
	tests/programs.sh vm
	$(PYTHON) tests/vm.py --kernels "$(KERNELS)"

# Starts runtimes a thousand times each beside two busy loops, which takes hours. `make starts STARTS=100` is
# a part of that. tests/starts.py has more options.
starts: build
	STARTS=$(or $(STARTS),1000) $(PYTHON) tests/starts.py

programs:
	@tests/programs.sh

# Not a test, because times depend on the machine.
bench-within: build
	$(PYTHON) tests/within_budget.py

# Shows whether Farpage got slower. BEFORE is a directory with farpage and its library of an earlier build.
bench-programs: build programs
	$(PYTHON) tests/before_after.py $(BEFORE)

clean:
	$(CARGO) clean

"""Starts runtimes with many threads again and again beside busy loops, with budgets that they pass while they
start. So their threads are armed while others are being made, handle signals, or wait for a CPU. Each start
must print what it prints without Farpage.

Usage: starts.py [--starts N] [--only "NAME; ..."] [--modes "signal segv"] [--loops N]. Prints the counts, and
what each start said that failed. Ends with 1 if one did. A program that isn't installed is left out.
`make test` does a few starts. `make starts` does a thousand of each program in each mode, which takes some
hours.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
FARPAGE = os.path.join(TARGET, "release", "farpage")
TIMEOUT_S = 300
# Words of a notice that must never be said of these programs: they block no signal for longer than a moment.
NOTICE = "lets no signal through"

JAVA = """import java.util.*;
public class Starts {
  public static void main(String[] words) throws Exception {
    long[] sums = new long[4];
    Thread[] threads = new Thread[sums.length];
    for (int t = 0; t < threads.length; t++) {
      final int own = t;
      threads[t] = new Thread(() -> {
        ArrayDeque<int[]> kept = new ArrayDeque<>();
        for (int i = 0; i < 300; i++) {
          int[] some = new int[16384];
          for (int j = 0; j < some.length; j += 64) some[j] = i * 31 + j + own;
          kept.add(some);
          if (kept.size() > 120) sums[own] += kept.remove()[512];
        }
        for (int[] some : kept) for (int j = 0; j < some.length; j += 64) sums[own] += some[j];
      });
      threads[t].start();
    }
    for (Thread thread : threads) thread.join();
    System.out.println(Arrays.toString(sums));
  }
}
"""

GO = """package main

// int add(int a, int b) { return a + b; }
import "C"
import ("fmt"; "sync")

type node struct{ left, right *node }

func tree(depth int) *node {
	if depth == 0 { return &node{} }
	return &node{tree(depth - 1), tree(depth - 1)}
}

func (n *node) count() int {
	if n.left == nil { return 1 }
	return 1 + n.left.count() + n.right.count()
}

func main() {
	kept := tree(17)
	var all sync.WaitGroup
	counts := make([]int, 16)
	for i := range counts {
		all.Add(1)
		go func() {
			defer all.Done()
			for j := 0; j < 4; j++ { counts[i] += tree(14).count() + int(C.add(1, C.int(i))) }
		}()
	}
	all.Wait()
	sum := 0
	for _, count := range counts { sum += count }
	fmt.Println(kept.count(), sum)
}
"""

NODE = """const list = []
for (let i = 0; i < 80000; i++) list.push({ id: i, name: 'item ' + i, of: [i, i * 2] })
const known = new Map(list.map((one) => [one.name, one]))
let sum = 0
for (let i = 0; i < 10000; i++) sum = (sum + known.get('item ' + (i * 7919 % 80000)).of[1] * (i % 17)) % 1000003
require('zlib').deflate(Buffer.alloc(1 << 20, 'text '), (error, packed) => console.log(known.size, sum, packed.length))
"""

PYTHON = """import threading
sums = [0] * 8
def work(own):
    kept = [str(i * 31 + own) * 3 for i in range(25000)]
    for i in range(0, 25000, 7):
        sums[own] += len(kept[i * 7919 % 25000]) * (i % 13)
threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sums)
"""

GROW = """#include <stdio.h>
#include <stdlib.h>
int main(void)
{
    size_t words = 10 << 17;
    unsigned long *memory = malloc(words * 8), sum = 0;
    for (size_t i = 0; i < words; i++) memory[i] = i * (i % 4 ? 1 : 0x9e3779b97f4a7c15);
    for (size_t i = 0; i < words; i += 64) sum += memory[i];
    return printf("%lx\\n", sum) < 0;
}
"""

# Rows of TABLE: name, executables that it needs, budget in MiB, and what is run.
COLLECTORS = (("G1", "G1"), ("ZGC", "Z"), ("Shenandoah", "Shenandoah"), ("Parallel", "Parallel"))
TABLE = [
    *(("java, " + name, ["java", "javac"], 31, f"java -XX:+Use{option}GC -Xmx200m -cp . Starts") for name, option in COLLECTORS),
    ("node", ["node"], 31, "node starts.js"),
    ("go, with C in it", ["go", "cc"], 12, "./starts-go"),
    ("python3, 8 threads", ["python3"], 12, "python3 starts.py"),
    ("bash, six children", ["bash", "cc"], 24, "bash -c 'for i in 1 2 3 4 5 6; do ./grow & done; wait'"),
]


def build():
    """Writes what is run to the current directory, and compiles it as far as there is a compiler for it."""
    for name, text in (("Starts.java", JAVA), ("starts.go", GO), ("starts.js", NODE), ("starts.py", PYTHON), ("grow.c", GROW),
                       ("go.mod", "module starts\ngo 1.22\n")):
        with open(name, "w") as file:
            file.write(text)
    commands = [["javac", "Starts.java"], ["go", "build", "-o", "starts-go", "starts.go"], ["cc", "-O2", "-o", "grow", "grow.c"]]
    for command in commands:
        if shutil.which(command[0]):
            subprocess.run(command, check=True)


def start(command):
    """Returns status, output and messages of one start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        return "no end in %d s" % TIMEOUT_S, "", (late.stderr or b"").decode(errors="replace")
    return done.returncode, done.stdout, done.stderr


def starts(name, program, ram, mode, count):
    """Starts a program `count` times. Returns how many of the starts failed."""
    expected = start(["sh", "-c", program])
    if expected[0] != 0:
        print("%s: left out, fails without Farpage: %s" % (name, expected[2].strip()[-300:]))
        return 0
    failed, began = 0, time.monotonic()
    for number in range(1, count + 1):
        words = ["run", "--ram", "%dM" % ram, "--faults", mode, "--", "sh", "-c", "exec " + program]
        status, output, messages = start([FARPAGE] + words)
        if (status, output) != (0, expected[1]) or NOTICE in messages:
            failed += 1
            print("%s, %s, start %d: status %s\n%s%s" % (name, mode, number, status, output[-500:], messages[-1500:]), flush=True)
    seconds = time.monotonic() - began
    print("%s, %s: %d starts, %d failed, %.2f s each" % (name, mode, count, failed, seconds / count), flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=int(os.environ.get("STARTS", "1000")))
    parser.add_argument("--only", default="")
    parser.add_argument("--modes", default="signal segv")
    parser.add_argument("--loops", type=int, default=2)
    options = parser.parse_args()
    only = [name.strip() for name in options.only.split(";") if name.strip()]
    unknown = [name for name in only if name not in [row[0] for row in TABLE]]
    if unknown:
        sys.exit("starts.py: no such program: %s; there are: %s" % ("; ".join(unknown), "; ".join(row[0] for row in TABLE)))
    if options.starts < 1 or not os.path.exists(FARPAGE):
        sys.exit("starts.py: --starts must be 1 or more" if options.starts < 1 else "starts.py: %s is missing: run `make build`" % FARPAGE)
    # The loops and the directory go also if a signal ends this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed = 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chdir(place)
        build()
        loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(options.loops)]
        try:
            for name, needs, ram, program in TABLE:
                missing = [need for need in needs if not shutil.which(need)]
                if only and name not in only:
                    continue
                if missing:
                    print("%s: left out, there is no %s" % (name, " and no ".join(missing)))
                    continue
                for mode in options.modes.split():
                    failed += starts(name, program, ram, mode, options.starts)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
            os.chdir("/")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

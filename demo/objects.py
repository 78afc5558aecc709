"""Farpage's main job in one minute: a Python program that needs three times the memory it may have.

The program runs as it is, and then under `farpage run --ram` with a third of the memory that it needed.
Nothing else is set up: there is a compressed pool and a temporary swap file. The result must be the same.
Exit status 1 if it isn't."""

import os
import re
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
FARPAGE = os.path.join(TARGET, "release", "farpage")
PROGRAM = [os.path.realpath(sys.executable), os.path.join(ROOT, "tests", "programs", "objects.py"), "160", "mixed"]
MIB = 1 << 20


def anonymous(pid):
    """Returns the bytes that a process has, as the kernel says; 0 if the process is gone."""
    try:
        with open("/proc/%d/smaps_rollup" % pid) as file:
            found = re.search(r"^Anonymous: +(\d+) kB", file.read(), re.MULTILINE)
            return int(found.group(1)) * 1024 if found else 0
    except OSError:
        return 0


def children(pid):
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid)) as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def run(command):
    """Runs a command and watches its program's memory from outside. The program is this command's process or,
    where Farpage stands above its program, a child. Returns the result, the peak in bytes, and the seconds."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    peak = 0
    over = threading.Event()

    def watch():
        nonlocal peak
        while not over.wait(0.05):
            for pid in [process.pid] + children(process.pid):
                peak = max(peak, anonymous(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = process.stdout.read()
    status = process.wait()
    over.set()
    watcher.join()
    if status != 0:
        sys.exit("demo: %s ended with status %d" % (" ".join(command), status))
    if peak == 0:
        sys.exit("demo: the memory of %s was not seen" % " ".join(command))
    return output, peak, time.monotonic() - start


def main():
    print("Without Farpage: python3 builds some 160 MiB of objects and reads all of them again.", flush=True)
    expected, need, seconds = run(PROGRAM)
    print("  needed %d MiB, took %.1f s\n" % (need // MIB, seconds), flush=True)

    ram = need // 3 // MIB
    command = [FARPAGE, "run", "--ram", "%dM" % ram, "--"] + PROGRAM
    print("With a third of that: farpage run --ram %dM -- python3 ..." % ram, flush=True)
    result, peak, seconds = run(command)
    print("\n  had %d MiB at most (seen from outside), took %.1f s" % (peak // MIB, seconds))
    print("  " + result.decode().splitlines()[-1])
    if result != expected:
        sys.exit("demo: the results differ")
    print("same result")


if __name__ == "__main__":
    main()

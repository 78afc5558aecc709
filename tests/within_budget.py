"""Measures what Farpage costs a program that stays within its budget. Runs with and without Farpage come in
interleaved pairs. Prints wall and CPU times, and the ratio of the medians. On a shared machine CPU time is
the steadier one. Nothing may be registered.

Usage: within_budget.py [PAIRS]"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
FARPAGE = os.path.join(TARGET, "release", "farpage")
PROGRAM = [os.path.realpath(sys.executable), os.path.join(ROOT, "tests", "programs", "objects.py"), "600"]
# Several times what the program needs.
RAM = "4G"


def seconds(command):
    """Returns the wall time, and the CPU time of all that ran, Farpage's too."""
    before, start = os.times(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.monotonic() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "CPU": cpu}


def compare(clock, plain_times, under_times):
    plain, with_it = ([times[clock] for times in each] for each in (plain_times, under_times))
    ratios = sorted(b / a for a, b in zip(plain, with_it))
    plain, with_it = statistics.median(plain), statistics.median(with_it)
    print("%s, medians: without %.3f s, with %.3f s: %+.2f %%" % (clock, plain, with_it, (with_it / plain - 1) * 100))
    print("%s, ratios of the pairs: %.4f to %.4f, median %.4f" % (clock, ratios[0], ratios[-1], statistics.median(ratios)))


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.NamedTemporaryFile(suffix=".json", dir="/var/tmp") as stats:
        under = [FARPAGE, "run", "--ram", RAM, "--stats", stats.name, "--"] + PROGRAM
        plain_times, under_times = [], []
        seconds(PROGRAM)
        for pair in range(pairs):
            # The run that goes first changes, so that neither gains from a warm or a throttled machine.
            for is_under in ((False, True), (True, False))[pair % 2]:
                (under_times if is_under else plain_times).append(seconds(under if is_under else PROGRAM))
            counters = json.load(open(stats.name))["counters"]
            if counters["registered"] != 0:
                sys.exit("registered %d times: it was not within its budget" % counters["registered"])
            walls = (plain_times[-1]["wall"], under_times[-1]["wall"])
            print("pair %2d: without %.3f s, with %.3f s" % ((pair + 1,) + walls), flush=True)
    for clock in ("wall", "CPU"):
        compare(clock, plain_times, under_times)


if __name__ == "__main__":
    main()

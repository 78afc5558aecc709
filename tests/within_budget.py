"""What Farpage costs a program that stays within its budget: wall times of interleaved pairs, with and without
it, and the ratio of the medians. Nothing may be registered. Usage: within_budget.py [PAIRS]"""

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
# Several times what it needs.
RAM = "4G"


def seconds(command):
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - start


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.NamedTemporaryFile(suffix=".json", dir="/var/tmp") as stats:
        under = [FARPAGE, "run", "--ram", RAM, "--stats", stats.name, "--"] + PROGRAM
        plain_times, under_times = [], []
        seconds(PROGRAM)
        for pair in range(pairs):
            # Who goes first changes, so that neither gains from a warm or a throttled machine.
            for is_under in ((False, True), (True, False))[pair % 2]:
                (under_times if is_under else plain_times).append(seconds(under if is_under else PROGRAM))
            counters = json.load(open(stats.name))["counters"]
            if counters["registered"] != 0:
                sys.exit("registered %d times: it was not within its budget" % counters["registered"])
            print("pair %2d: without %.3f s, with %.3f s" % (pair + 1, plain_times[-1], under_times[-1]), flush=True)
    plain, with_it = statistics.median(plain_times), statistics.median(under_times)
    ratios = sorted(b / a for a, b in zip(plain_times, under_times))
    print("medians: without %.3f s, with %.3f s: %+.2f %%" % (plain, with_it, (with_it / plain - 1) * 100))
    print("ratios of the pairs: %.4f to %.4f, median %.4f" % (ratios[0], ratios[-1], statistics.median(ratios)))


if __name__ == "__main__":
    main()

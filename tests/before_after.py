"""Compares two builds of Farpage. Both run the five programs of the main job in turns. Prints wall times, and
their ratio.

Usage: before_after.py BEFORE [AFTER] [--rounds N]. BEFORE and AFTER are directories with farpage and its
library. AFTER is target/release if not given. Each program has about 40 % of what it needs, and its results
are compared.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
MIB = 1 << 20


def under(farpage, ram_mib, place):
    stats = os.path.join(place, "stats.json")
    return [os.path.join(farpage, "farpage"), "run", "--quiet", "--stats", stats, "--ram", "%dM" % ram_mib, "--"]


def output_of(command, place):
    return subprocess.run(command, check=True, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def python(farpage, place):
    script = os.path.join(ROOT, "tests", "programs", "objects.py")
    return output_of(under(farpage, 64, place) + [os.path.realpath(sys.executable), script, "125", "mixed"], place)


def sort(farpage, place):
    lines = os.path.join(place, "lines")
    if not os.path.exists(lines):
        numbers = random.Random(7)
        with open(lines, "w") as file:
            file.writelines("%0*x\n" % (999, numbers.getrandbits(3996)) for _ in range(100_000))
    output_of(under(farpage, 48, place) + ["sort", "--parallel=2", "-S", "200M", "-T", ".", "-o", "sorted", "lines"], place)
    with open(os.path.join(place, "sorted"), "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def redis(farpage, place):
    server = subprocess.Popen(
        under(farpage, 36, place)
        + ["redis-server", "--port", "0", "--unixsocket", os.path.join(place, "socket"), "--save", "", "--daemonize", "no"],
        cwd=place, stdout=subprocess.DEVNULL)
    try:
        return ask_redis(os.path.join(place, "socket"), 75_000)
    finally:
        server.terminate()
        server.wait()


def ask_redis(path, keys):
    """Sets every key, then reads every key in another order. Returns a digest of the answers."""
    connection = socket.socket(socket.AF_UNIX)
    for _ in range(200):
        try:
            connection.connect(path)
            break
        except OSError:
            time.sleep(0.05)
    answers, digest, numbers = connection.makefile("rb"), hashlib.sha256(), random.Random(3)
    for first in range(0, keys, 500):
        connection.sendall(b"".join(
            b"SET k%d %s\r\n" % (key, b"%0*x" % (1000, numbers.getrandbits(4000))) for key in range(first, first + 500)))
        assert all(answers.readline() == b"+OK\r\n" for _ in range(500))
    for first in range(0, keys, 500):
        connection.sendall(b"".join(b"GET k%d\r\n" % (key * 7919 % keys) for key in range(first, first + 500)))
        for _ in range(500):
            length = int(answers.readline()[1:])
            digest.update(answers.read(length + 2))
    connection.close()
    return digest.digest()


def sqlite(farpage, place):
    script = """PRAGMA cache_size = -1000000;
        CREATE TABLE data(id INTEGER PRIMARY KEY, class INTEGER, content TEXT);
        INSERT INTO data WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 150000)
          SELECT i, i * 7919 % 1009, hex(zeroblob(80)) || printf('%016x', i * 6364136223846793005) || hex(i * 40503) FROM n;
        CREATE INDEX by_class ON data(class);
        UPDATE data SET content = lower(content) WHERE class % 10 = 3;
        SELECT class % 50, count(*), sum(length(content)), min(content) < max(content) FROM data GROUP BY 1 ORDER BY 1;
        PRAGMA integrity_check;"""
    return output_of(under(farpage, 20, place) + ["sqlite3", "-batch", ":memory:", script], place)


def stress(farpage, place):
    said = output_of(
        under(farpage, 36, place)
        + ["stress-ng", "--vm", "2", "--vm-bytes", "160M", "--vm-method", "all", "--verify", "--vm-ops", "8000", "--seed", "1"],
        place)
    assert b"successful run completed" in said, said
    return b"verified"


PROGRAMS = [python, sort, redis, sqlite, stress]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default=os.path.join(TARGET, "release"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", choices=[program.__name__ for program in PROGRAMS])
    options = parser.parse_args()
    builds = [os.path.abspath(options.before), os.path.abspath(options.after)]
    for program in PROGRAMS:
        if options.program in (None, program.__name__):
            compare(program, builds, options.rounds)


def compare(program, builds, rounds):
    times, evicted, results = ([], []), [], set()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        for turn in range(rounds):
            # The build that goes first changes, so that neither gains from a warm or a throttled machine.
            for which in ((0, 1), (1, 0))[turn % 2]:
                start = time.monotonic()
                results.add(program(builds[which], place))
                times[which].append(time.monotonic() - start)
                counters = json.load(open(os.path.join(place, "stats.json")))["counters"]
                evicted.append(counters["zswpout"] + counters["pswpout"])
    if len(results) != 1:
        sys.exit("%s: the results differ" % program.__name__)
    if min(evicted) == 0:
        sys.exit("%s: it was within its budget" % program.__name__)
    ratios = sorted(after / before for before, after in zip(*times))
    print("%-8s before %.2f s, after %.2f s; ratio %.3f [%.3f..%.3f] in %d rounds" % (
        program.__name__, statistics.median(times[0]), statistics.median(times[1]),
        statistics.median(ratios), ratios[0], ratios[-1], rounds), flush=True)


if __name__ == "__main__":
    main()

"""Writes COUNT pages of what programs have in memory to standard output: KIND COUNT.

heap: an interpreter's objects, read back from this very process · integers, floats: columns of tables · text
· packed: what is compressed already · sparse: tables that are mostly empty · digits: a log, most of which is
digits. The bytes are the same each time, but for addresses in the heap.
"""

import array
import os
import random
import sys
import zlib

PAGE = 4096
random.seed(5)


def heap(count):
    """Parsed records, as a program has them that has read a file of JSON: dictionaries, strings, numbers,
    lists."""
    people = [{"id": n, "name": "%s %s" % (random.choice(NAMES), random.choice(NAMES)), "score": random.random(),
               "tags": random.sample(NAMES, 3), "visits": [random.randrange(1000) for _ in range(8)]}
              for n in range(count * 6)]
    pages = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            fields = line.split()
            start, end = (int(place, 16) for place in fields[0].split("-"))
            if fields[1] != "rw-p" or fields[4] != "0" or "[stack" in line or end - start < 1 << 17:
                continue
            memory.seek(start)
            found = memory.read(end - start)
            pages += [found[at:at + PAGE] for at in range(0, len(found), PAGE) if any(found[at:at + PAGE])]
    assert len(people) == count * 6 and len(pages) >= count
    # Pages come from everywhere, because what was made first is the interpreter itself.
    return b"".join(pages[n * len(pages) // count] for n in range(count))


NAMES = ["%s%s" % (a, b) for a in ("an", "bel", "cor", "dar", "el", "fin", "gil") for b in ("a", "dor", "ine", "mund", "wen")]


def columns(code, kinds, count):
    """Returns `count` pages or a few more, equally many of each kind of column. A kind is a function of the
    row's number."""
    words = PAGE // array.array(code).itemsize
    each = -(-count // len(kinds))
    return b"".join(array.array(code, (kind(row) for row in range(each * words))).tobytes() for kind in kinds)


def integers(count):
    clock = 1_700_000_000_000
    def time(_):
        nonlocal clock
        clock += random.randrange(2000)
        return clock
    return columns("q", [time, lambda row: row, lambda _: random.randrange(100), lambda _: int(random.expovariate(1 / 5000)),
                         lambda _: random.randrange(1 << 40)], count)


def floats(count):
    value = 100.0
    def walk(_):
        nonlocal value
        value += random.gauss(0, 0.1)
        return value
    price = lambda _: round(random.uniform(1, 500), 2)
    each = count // 4
    singles = columns("f", [walk, lambda row: row / 1000], 2 * each)
    return singles + columns("d", [walk, price], count - 2 * each)


def text(count):
    """Source code."""
    found = bytearray()
    for place, below, names in os.walk(os.path.dirname(os.__file__)):
        below[:] = sorted(name for name in below if name.isidentifier() and name != "test")
        for name in sorted(names):
            if name.endswith(".py") and len(found) < count * PAGE:
                with open(os.path.join(place, name), "rb") as file:
                    found += file.read()
    return bytes(found)


def packed(count):
    return zlib.compress(text(8 * count), 9)


def sparse(count):
    """Counts in a table of hashes, with one of ten places taken."""
    words = count * PAGE // 8
    return array.array("q", (random.randrange(1 << 20) if random.random() < 0.1 else 0 for _ in range(words))).tobytes()


def digits(count):
    """Lines of 128 bytes: a time, an address in memory, and a digest."""
    line = "2026-11-%02d %02d:%02d:%09.6f allocated at 0x%012x, sha256 %064x\n"
    time = lambda: (random.randrange(1, 31), random.randrange(24), random.randrange(60), random.uniform(0, 60))
    lines = (line % (*time(), random.getrandbits(47), random.getrandbits(256)) for _ in range(count * PAGE // 100))
    return "".join(lines).encode()


if __name__ == "__main__":
    kind, count = sys.argv[1], int(sys.argv[2])
    kinds = {"heap": heap, "integers": integers, "floats": floats, "text": text, "packed": packed, "sparse": sparse,
             "digits": digits}
    pages = kinds[kind](count)
    assert len(pages) >= count * PAGE, "%d bytes are too few" % len(pages)
    sys.stdout.buffer.write(pages[:count * PAGE])

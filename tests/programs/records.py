"""Makes COUNT small records, as an interpreter keeps them, reads all of them again, and prints a digest. In a
pool the records can be made a third shorter, if more time is spent on them.

Usage: records.py COUNT [BUSY SECONDS]. With BUSY, BUSY further records are made first. For SECONDS they are
read and changed at random, while the other records wait. Records per second, in the second half of that time,
go to standard error."""

import gc
import hashlib
import random
import sys
import time


def record(number):
    return {
        "id": number,
        "name": "user-%d" % (number * 7919 % 1000003),
        "tags": ["a%d" % (number % 97), "b%d" % (number % 89)],
        "score": number * 0.37,
        "place": (number, number * 2 + 1),
    }


def keep_busy(records, seconds):
    chance = random.Random(1)
    began = time.monotonic()
    half, done = None, 0
    while (now := time.monotonic() - began) < seconds:
        if half is None and now >= seconds / 2:
            half, done = now, 0
        for _ in range(1000):
            one = records[chance.randrange(len(records))]
            one["score"] += len(one["name"])
        done += 1000
    print("%.0f records a second" % (done / (now - half)), file=sys.stderr)


def main():
    # A garbage collection would go through all records.
    gc.disable()
    count, busy, seconds = (int(word) for word in (sys.argv[1:] + ["0", "0"])[:3])
    often = [record(number) for number in range(busy)]
    records = [record(number) for number in range(count)]
    if busy:
        keep_busy(often, seconds)
    digest = hashlib.sha256()
    for one in records:
        digest.update(repr(one).encode())
    print(len(records), digest.hexdigest())


main()

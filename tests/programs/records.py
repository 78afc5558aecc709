"""Makes COUNT small records, as an interpreter keeps them, reads all of them again, and prints a digest: usage records.py
COUNT [BUSY SECONDS]. What they become in a pool can be made a third shorter, if more time is spent on it.

With BUSY so many further records are made before them, and read and changed at random for so many SECONDS, while the others
wait; how many a second, in the second half of that, goes to standard error."""

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
    # A collection goes through all that there is.
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

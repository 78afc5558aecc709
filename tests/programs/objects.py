"""Builds about MEGABYTES of small objects, changes some, reads all of them again in another order, and prints
a digest of what it read.

Usage: objects.py MEGABYTES [plain|mixed]. `plain` objects are as in most programs: text that repeats, small
numbers. `mixed` ones carry some noise too."""

import hashlib
import random
import sys

TEXT = "A page that nobody has asked for in a while can wait somewhere else. " * 8


def record(number, noise):
    return {
        "number": number,
        "name": "record number %d" % number,
        "text": "%d: %s" % (number, TEXT),
        "more": [TEXT + str(number % 7), TEXT + str(number % 11)],
        "noise": noise.randbytes(500) if noise else None,
    }


def digest_of(records, order):
    digest = hashlib.sha256()
    for index in order:
        one = records[index]
        digest.update(("%d %s %s %s %s" % (one["number"], one["name"], one["text"], one["more"], one["noise"])).encode())
    return digest.hexdigest()


def main():
    megabytes = int(sys.argv[1])
    mixed = sys.argv[2:] == ["mixed"]
    noise = random.Random(1) if mixed else None
    bytes_each = 2750 if mixed else 2250
    count = megabytes * 1024 * 1024 // bytes_each
    records = [record(number, noise) for number in range(count)]
    order = list(range(count))
    chance = random.Random(2)
    for index in chance.sample(order, count // 20):
        records[index] = record(index + count, noise)
    print(count, digest_of(records, order))
    chance.shuffle(order)
    print(count, digest_of(records, order))


main()

"""Builds about MEGABYTES of objects. Forked workers read and change them, while the parent changes its own.
Prints a digest of what each worker found, which is what there was when the worker was made.

Usage: workers.py MEGABYTES"""

import hashlib
import multiprocessing
import sys

TEXT = "A page that nobody has asked for in a while can wait somewhere else. " * 8
WORKERS = 4

records = []


def fill(count, generation):
    for number in range(count):
        text = "%d in generation %d: %s" % (number, generation, TEXT)
        if number == len(records):
            records.append([text, number])
        else:
            records[number] = [text, number]


def digest_of(first, step):
    digest = hashlib.sha256()
    for text, number in records[first::step]:
        digest.update(("%s %d" % (text, number)).encode())
    return digest.hexdigest()


def work(number, answer):
    found = digest_of(number, WORKERS)
    fill(len(records) // 4, 1000 + number)
    answer.send((found, digest_of(0, 1)))


def main():
    count = int(sys.argv[1]) * 1024 * 1024 // 720
    fork = multiprocessing.get_context("fork")
    for generation in range(2):
        fill(count, generation)
        pipes = [fork.Pipe(duplex=False) for _ in range(WORKERS)]
        workers = [fork.Process(target=work, args=(number, pipes[number][1])) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        fill(count // 2, 500 + generation)
        for worker, (answer, _) in zip(workers, pipes):
            print(generation, *answer.recv())
            worker.join()
        print(generation, digest_of(0, 1))


main()

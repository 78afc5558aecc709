/* Shared by the test programs: memory with a known content, a way to have it evicted, and a loud failure.
 *
 * Every program takes the name of one case, works on more memory than its budget, compares every byte, and
 * ends with 0. The programs run without Farpage, too. Then only the check that pages are out is skipped. */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define WORDS (PAGE / sizeof(uint64_t))

/* The unit of every size. `make vm` makes the unit and the budgets smaller, because emulated processors are
 * slow. */
#ifndef MIB
#define MIB ((size_t)1 << 20)
#endif

/* The usual size of a case: three times the budget of 32 MiB that the tests give. */
#define LARGE (96 * MIB)

static void fail(const char *file, int line, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    fflush(stderr);
    _exit(1);
}

#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition)                                                                                      \
    do {                                                                                                      \
        if (!(condition))                                                                                     \
            FAIL("%s is false (errno %d: %s)", #condition, errno, strerror(errno));                           \
    } while (0)

/* Makes a system call past libc. */
static inline long call(long number, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

/* Returns one word of page `page` of the content `seed`. Of eight pages three are noise, three compress, one
 * is a repeated word, and one is zeros. */
static inline uint64_t word_of(uint64_t seed, uint64_t page, size_t word)
{
    switch (page % 8) {
    case 0: case 1: case 2:
        return mix(seed ^ mix(page * WORDS + word + 1));
    case 3: case 4: case 5:
        return word % 16 == 0 ? mix(seed ^ (page * WORDS + word + 1)) : page;
    case 6:
        return mix(seed + page);
    default:
        return 0;
    }
}

/* Writes content `seed` to memory. The memory's first page is page `from` of the content. */
static __attribute__((unused)) void fill_from(void *memory, size_t bytes, uint64_t seed, size_t from)
{
    for (size_t page = 0; page < bytes / PAGE; page++) {
        uint64_t *words = (uint64_t *)((char *)memory + page * PAGE);
        for (size_t word = 0; word < WORDS; word++)
            words[word] = word_of(seed, from + page, word);
    }
}

static __attribute__((unused)) void fill(void *memory, size_t bytes, uint64_t seed)
{
    fill_from(memory, bytes, seed, 0);
}

static __attribute__((unused)) void verify_at(const char *file, int line, const void *memory, size_t bytes,
                                                uint64_t seed, size_t from)
{
    for (size_t page = 0; page < bytes / PAGE; page++) {
        const uint64_t *words = (const uint64_t *)((const char *)memory + page * PAGE);
        for (size_t word = 0; word < WORDS; word++) {
            uint64_t expected = word_of(seed, from + page, word);
            uint64_t found = words[word];
            if (found != expected)
                fail(file, line, "page %zu word %zu at %p is %016lx, not %016lx; read again it is %016lx",
                     page, word, (const void *)(words + word), found, expected,
                     *(const volatile uint64_t *)(words + word));
        }
    }
}

#define VERIFY(memory, bytes, seed) verify_at(__FILE__, __LINE__, memory, bytes, seed, 0)
#define VERIFY_FROM(memory, bytes, seed, from) verify_at(__FILE__, __LINE__, memory, bytes, seed, from)

static __attribute__((unused)) void verify_zero_at(const char *file, int line, const void *memory, size_t bytes)
{
    const uint64_t *words = memory;
    for (size_t word = 0; word < bytes / sizeof *words; word++)
        if (words[word] != 0)
            fail(file, line, "byte %zu at %p is not zero: %016lx", word * 8, (const void *)(words + word), words[word]);
}

#define VERIFY_ZERO(memory, bytes) verify_zero_at(__FILE__, __LINE__, memory, bytes)

static __attribute__((unused)) char *map_at(void *address, size_t bytes, int flags)
{
    char *memory = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static __attribute__((unused)) char *map(size_t bytes)
{
    return map_at(NULL, bytes, 0);
}

/* Maps memory between neighbours that aren't managed. */
static __attribute__((unused)) char *map_alone(size_t bytes)
{
    char *place = mmap(NULL, bytes + 2 * PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(place != MAP_FAILED);
    return map_at(place + PAGE, bytes, MAP_FIXED);
}

/* Returns a mapping with content `seed`. */
static __attribute__((unused)) char *filled(size_t bytes, uint64_t seed)
{
    char *memory = map(bytes);
    fill(memory, bytes, seed);
    return memory;
}

/* Returns the number of pages that the kernel doesn't have in place. */
static __attribute__((unused)) size_t pages_out(const void *memory, size_t bytes)
{
    int file = open("/proc/thread-self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    size_t out = 0;
    for (size_t at = 0; at < bytes; at += PAGE) {
        uint64_t entry;
        CHECK(pread(file, &entry, 8, (off_t)(((uintptr_t)memory + at) / PAGE * 8)) == 8);
        out += entry >> 63 == 0;
    }
    close(file);
    return out;
}

/* Waits until a page of the memory is out; fails if none goes out. Without this check a case could pass with
 * everything in memory. On a busy machine a case can fill all of its memory before the keeper has a CPU for
 * the first time. */
static __attribute__((unused)) void require_out_at(const char *file, int line, const void *memory, size_t bytes)
{
    if (getenv("FARPAGE_SESSION") == NULL)
        return;
    for (int turn = 0; pages_out(memory, bytes) == 0; turn++) {
        if (turn == 500)
            fail(file, line, "no page of %zu at %p is evicted: this tests nothing", bytes / PAGE, memory);
        usleep(20000);
    }
}

#define REQUIRE_OUT(memory, bytes) require_out_at(__FILE__, __LINE__, memory, bytes)

/* Pushes out what isn't in use: touches three times the budget, and gives it back. The touches come in order
 * first, then here and there. A walk alone leaves pages that it doesn't go through where they are. */
static __attribute__((unused)) void push_out(void)
{
    char *ballast = map(LARGE);
    for (size_t at = 0; at < LARGE; at += PAGE)
        *(uint64_t *)(ballast + at) = at + 1;
    for (size_t turn = 0; turn < LARGE / PAGE / 2; turn++) {
        size_t at = turn * 7919 % (LARGE / PAGE) * PAGE;
        uint64_t found = *(volatile uint64_t *)(ballast + at);
        if (found != at + 1)
            FAIL("ballast page %zu at %p is %016lx, not %016zx; read again it is %016lx", at / PAGE,
                 (void *)(ballast + at), found, at + 1, *(volatile uint64_t *)(ballast + at));
    }
    CHECK(munmap(ballast, LARGE) == 0);
}

/* The test and the program communicate by files in the directory in which the program was started. */
static __attribute__((unused)) void say(const char *name)
{
    int file = open(name, O_CREAT | O_WRONLY, 0600);
    CHECK(file >= 0);
    close(file);
}

static __attribute__((unused)) void wait_for(const char *name)
{
    for (int i = 0; access(name, F_OK) != 0; i++) {
        CHECK(i < 12000);
        usleep(5000);
    }
}

struct test {
    const char *name;
    void (*run)(void);
};

/* The main() of every program. */
static __attribute__((unused)) int run_test(int argc, char **argv, const struct test *tests, size_t count)
{
    for (size_t i = 0; argc == 2 && i < count; i++) {
        if (strcmp(argv[1], tests[i].name) == 0) {
            tests[i].run();
            return 0;
        }
    }
    fprintf(stderr, "usage: %s CASE, one of:\n", argv[0]);
    for (size_t i = 0; i < count; i++)
        fprintf(stderr, "  %s\n", tests[i].name);
    return 2;
}

#define MAIN(...)                                                                                             \
    int main(int argc, char **argv)                                                                           \
    {                                                                                                         \
        static const struct test tests[] = { __VA_ARGS__ };                                                   \
        return run_test(argc, argv, tests, sizeof tests / sizeof *tests);                                     \
    }

#endif

/* Memory that the program gets from libc or has from the start: the break, arenas, calloc, static arrays. */
#include "check.h"
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <malloc.h>

/* The break goes up and down, as old allocators move it. The break needs no alignment; this test keeps it at
 * page boundaries. */
static void break_up_and_down(void)
{
    char *start = sbrk(0);
    start = sbrk((intptr_t)((uintptr_t)-(uintptr_t)start % PAGE)) == (void *)-1 ? NULL : sbrk(0);
    CHECK(start != NULL && (uintptr_t)start % PAGE == 0);
    for (size_t bytes = 0; bytes < LARGE; bytes += 3 * MIB) {
        CHECK(sbrk(3 * MIB) == start + bytes);
        fill_from(start + bytes, 3 * MIB, 1, bytes / PAGE);
    }
    size_t bytes = (LARGE + 3 * MIB - 1) / (3 * MIB) * (3 * MIB);
    REQUIRE_OUT(start, bytes);
    VERIFY(start, bytes, 1);
    CHECK(brk(start + bytes / 2) == 0);
    VERIFY(start, bytes / 2, 1);
    CHECK(brk(start + bytes) == 0);
    VERIFY_ZERO(start + bytes / 2, bytes / 2);
    push_out();
    VERIFY(start, bytes / 2, 1);
    /* The break ends in the middle of a page: the rest of that page stays. */
    CHECK(brk(start + 5 * MIB + 100) == 0);
    CHECK(brk(start + 6 * MIB) == 0);
    VERIFY(start, 5 * MIB, 1);
    VERIFY_ZERO(start + 5 * MIB + PAGE, MIB - PAGE);
    CHECK(*(uint64_t *)(start + 5 * MIB + 8) == word_of(1, 5 * MIB / PAGE, 1));
}

/* A heap of small blocks on the break. */
static void small_blocks(void)
{
    enum { BYTES = 496 };
    size_t count = LARGE / (BYTES + 16);
    uint64_t **block = malloc(count * sizeof *block);
    for (size_t i = 0; i < count; i++) {
        block[i] = malloc(BYTES);
        CHECK(block[i] != NULL);
        for (size_t word = 0; word < BYTES / 8; word++)
            block[i][word] = mix(i * 64 + word);
    }
    for (size_t i = 0; i < count; i += 2)
        free(block[i]);
    for (size_t i = 0; i < count; i += 2) {
        block[i] = malloc(BYTES);
        for (size_t word = 0; word < BYTES / 8; word++)
            block[i][word] = mix(i * 64 + word);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t word = 0; word < BYTES / 8; word++)
            CHECK(block[i][word] == mix(i * 64 + word));
        free(block[i]);
    }
    free(block);
    malloc_trim(0);
}

/* Each thread has an arena of its own, which grows by mprotect. Threads come and go. */
static void *arena(void *argument)
{
    enum { COUNT = 3000, BYTES = 2000 };
    uint64_t seed = (uintptr_t)argument;
    uint64_t *block[COUNT];
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < COUNT; i++) {
            block[i] = malloc(BYTES);
            CHECK(block[i] != NULL);
            for (size_t word = 0; word < BYTES / 8; word++)
                block[i][word] = mix(seed ^ (i * 256 + word));
        }
        for (size_t i = 0; i < COUNT; i++) {
            for (size_t word = 0; word < BYTES / 8; word++)
                CHECK(block[i][word] == mix(seed ^ (i * 256 + word)));
            if (i % 3 != 0)
                free(block[i]);
        }
        for (size_t i = 0; i < COUNT; i += 3) {
            for (size_t word = 0; word < BYTES / 8; word++)
                CHECK(block[i][word] == mix(seed ^ (i * 256 + word)));
            free(block[i]);
        }
    }
    return NULL;
}

static void arenas(void)
{
    enum { THREADS = 16 };
    for (int round = 0; round < 3; round++) {
        pthread_t thread[THREADS];
        for (uintptr_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&thread[i], NULL, arena, (void *)(i * 77777 + 1)) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_join(thread[i], NULL) == 0);
    }
}

/* A JavaScript heap consists of mappings of 256 KiB with nothing beside them; some come and go all the time.
 * Formerly such mappings were too small to be managed. A program that had nothing else was at 1.2 times its
 * budget, and stood still. */
static void small_mappings(void)
{
    enum { CHUNKS = LARGE / (256 << 10) };
    const size_t bytes = 256 << 10;
    static char *chunk[CHUNKS];
    for (int i = 0; i < CHUNKS; i++) {
        chunk[i] = map(2 * bytes);
        CHECK(munmap(chunk[i] + bytes, bytes) == 0);
        fill(chunk[i], bytes, i);
    }
    size_t out = 0;
    for (int i = 0; i < CHUNKS; i++)
        out += pages_out(chunk[i], bytes);
    if (getenv("FARPAGE_SESSION") != NULL && out < LARGE / PAGE / 2)
        FAIL("only %zu pages of %zu are out", out, LARGE / PAGE);
    for (int round = 0; round < 4 * CHUNKS; round++) {
        int i = mix(round) % CHUNKS;
        VERIFY(chunk[i], bytes, i);
        if (round % 2 == 0) {
            CHECK(munmap(chunk[i], bytes) == 0);
            chunk[i] = filled(bytes, i);
        }
    }
    for (int i = 0; i < CHUNKS; i++)
        VERIFY(chunk[i], bytes, i);
}

/* Zeros that were never written are then written here and there, and read everywhere. */
static void zeros_of_calloc(void)
{
    char *memory = calloc(LARGE, 2);
    CHECK(memory != NULL);
    VERIFY_ZERO(memory, 2 * LARGE);
    for (size_t at = 0; at < 2 * LARGE; at += 3 * PAGE)
        *(uint64_t *)(memory + at) = mix(at + 1);
    for (size_t at = 0; at + PAGE <= 2 * LARGE; at += PAGE) {
        CHECK(*(uint64_t *)(memory + at) == (at % (3 * PAGE) == 0 ? mix(at + 1) : 0));
        VERIFY_ZERO(memory + at + 8, PAGE - 8);
    }
    free(memory);
}

static char of_the_program[LARGE] __attribute__((aligned(4096)));

static void static_array(void)
{
    VERIFY_ZERO(of_the_program, LARGE);
    fill(of_the_program, LARGE, 5);
    VERIFY(of_the_program, LARGE, 5);
    REQUIRE_OUT(of_the_program, LARGE);
    CHECK(madvise(of_the_program + 4 * MIB, 4 * MIB, MADV_DONTNEED) == 0);
    VERIFY_ZERO(of_the_program + 4 * MIB, 4 * MIB);
    VERIFY(of_the_program, 4 * MIB, 5);
    VERIFY_FROM(of_the_program + 8 * MIB, LARGE - 8 * MIB, 5, 8 * MIB / PAGE);
}

/* A static array lies in the mapping of the program's file where it has content or is small. A library's
 * array lies in its library's mapping. */
static char beside_others[3 * MIB + 123] = { 1 };

static void static_array_with_content(void)
{
    CHECK(beside_others[0] == 1);
    VERIFY_ZERO(beside_others + 8, sizeof beside_others / 8 * 8 - 8);
    memset(beside_others, 7, sizeof beside_others);
    push_out();
    for (size_t i = 0; i < sizeof beside_others; i++)
        CHECK(beside_others[i] == 7);
}

/* MAP_POPULATE goes past the budget at once if nobody looks. */
static void populated(void)
{
    for (int round = 0; round < 3; round++) {
        char *memory = map_at(NULL, LARGE, MAP_POPULATE);
        VERIFY_ZERO(memory, LARGE);
        fill(memory, LARGE, 6);
        VERIFY(memory, LARGE, 6);
        REQUIRE_OUT(memory, LARGE);
        CHECK(munmap(memory, LARGE) == 0);
    }
}

/* MAP_POPULATE fills a mapping of a file, too: private memory that may be written, or the file's own. */
static void populated_from_a_file(void)
{
    char *memory = filled(LARGE, 7), path[] = "/tmp/populated-XXXXXX";
    int file = mkstemp(path), pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && pagemap >= 0 && unlink(path) == 0);
    CHECK(write(file, memory, 4 * MIB) == (ssize_t)(4 * MIB));
    int kinds[] = { MAP_PRIVATE, MAP_SHARED };
    for (size_t kind = 0; kind < 2; kind++) {
        char *mapped = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, kinds[kind] | MAP_POPULATE, file, 0);
        CHECK(mapped != MAP_FAILED);
        for (size_t at = 0; at < 4 * MIB; at += PAGE) {
            uint64_t entry, from = (uintptr_t)(mapped + at) / PAGE * sizeof entry;
            CHECK(pread(pagemap, &entry, sizeof entry, (off_t)from) == sizeof entry && entry >> 63 == 1);
        }
        VERIFY(mapped, 4 * MIB, 7);
        CHECK(munmap(mapped, 4 * MIB) == 0);
    }
    REQUIRE_OUT(memory, LARGE);
    VERIFY(memory, LARGE, 7);
}

/* An address that can't be is a hint like any other: programs ask so for addresses of 57 bits. Formerly such
 * memory was never evicted. */
static void hint_that_can_not_be(void)
{
    char *memory = map_at((void *)-1, LARGE, 0);
    fill(memory, LARGE, 8);
    REQUIRE_OUT(memory, LARGE);
    VERIFY(memory, LARGE, 8);
}

/* Pages of zeros that were only read are all there and take no memory. Once written they take memory, without
 * a fault for a missing page. A kernel before Linux 6.7 doesn't say which pages those are. The program writes
 * backwards, because eviction goes forwards. */
static void zeros_read_and_then_written(void)
{
    char *memory = map(LARGE);
    /* Not all kernels report the huge page of zeros. */
    CHECK(madvise(memory, LARGE, MADV_NOHUGEPAGE) == 0);
    VERIFY_ZERO(memory, LARGE);
    for (size_t at = LARGE; at > 0; at -= PAGE)
        *(uint64_t *)(memory + at - PAGE) = mix(at);
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    for (size_t at = 0; at < LARGE; at += PAGE)
        CHECK(*(uint64_t *)(memory + at) == mix(at + PAGE));
    REQUIRE_OUT(memory, LARGE);
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    int is_told = ioctl(pagemap, _IOC(_IOC_READ | _IOC_WRITE, 'f', 16, 96), NULL) != 0 && errno == EFAULT;
    /* The limit is the budget and what is mapped of files. */
    if (getenv("FARPAGE_SESSION") != NULL && is_told && usage.ru_maxrss > 48 << 10)
        FAIL("%ld KiB were in memory at once", usage.ru_maxrss);
}

MAIN({ "break_up_and_down", break_up_and_down }, { "small_blocks", small_blocks }, { "arenas", arenas },
     { "small_mappings", small_mappings },
     { "zeros_of_calloc", zeros_of_calloc }, { "zeros_read_and_then_written", zeros_read_and_then_written },
     { "static_array", static_array }, { "static_array_with_content", static_array_with_content },
     { "populated", populated }, { "populated_from_a_file", populated_from_a_file },
     { "hint_that_can_not_be", hint_that_can_not_be })

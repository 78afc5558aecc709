/* Fills memory, says so by a file `ready`, waits for a file `go`, and reads all of it: what happens in between is
 * the test's. The noise is too much for any pool. */
#include "check.h"

static void noise(uint64_t *memory, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes / 8; i++)
        memory[i] = mix(seed ^ mix(i + 1));
}

static void compare(const uint64_t *memory, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes / 8; i++)
        if (memory[i] != mix(seed ^ mix(i + 1)))
            FAIL("word %zu at %p is %016lx, not %016lx", i, (void *)(memory + i), memory[i], mix(seed ^ mix(i + 1)));
}

/* 96 MiB, read after the wait. */
static void read_after(void)
{
    uint64_t *memory = (uint64_t *)map(LARGE);
    noise(memory, LARGE, 1);
    say("ready");
    wait_for("go");
    compare(memory, LARGE, 1);
    puts("all right");
}

/* Half before the wait and half after it, so that there is something to write then. */
static void write_after(void)
{
    uint64_t *memory = (uint64_t *)map(LARGE), *more = (uint64_t *)map(LARGE);
    noise(memory, LARGE / 2, 2);
    say("ready");
    wait_for("go");
    noise(more, LARGE / 2, 3);
    compare(memory, LARGE / 2, 2);
    compare(more, LARGE / 2, 3);
    puts("all right");
}

/* 96 MiB, given up after the wait. */
static void give_up_after(void)
{
    uint64_t *memory = (uint64_t *)map(LARGE);
    noise(memory, LARGE, 4);
    say("ready");
    wait_for("go");
    CHECK(munmap(memory, LARGE) == 0);
    say("gone");
    wait_for("end");
    puts("all right");
}

/* Memory that is out moves, and libc doesn't know. */
static void moved_past_libc(void)
{
    uint64_t *memory = (uint64_t *)map(LARGE);
    noise(memory, LARGE, 5);
    char *place = map(LARGE);
    long moved = call(SYS_mremap, (long)memory, LARGE, LARGE, MREMAP_MAYMOVE | MREMAP_FIXED, (long)place, 0);
    CHECK(moved == (long)place);
    /* Whoever reads of it may be a moment late. */
    usleep(200000);
    compare((uint64_t *)place, LARGE, 5);
    puts("all right");
}

MAIN({ "read_after", read_after }, { "write_after", write_after }, { "give_up_after", give_up_after },
     { "moved_past_libc", moved_past_libc })

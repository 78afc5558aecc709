/* Fills memory, says so by a file `ready`, waits for a file `go`, and reads all of the memory. The test
 * decides what happens in between. The noise is too much for any pool. */
#include "check.h"
#include <linux/aio_abi.h>

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

/* Half is written before the wait and half after it, so that there is something to write then. */
static void write_after(void)
{
    uint64_t *memory = (uint64_t *)map(LARGE), *more = (uint64_t *)map(LARGE);
    noise(memory, LARGE / 2, 2);
    say("ready");
    wait_for("go");
    noise(more, LARGE / 2, 3);
    compare(memory, LARGE / 2, 2);
    compare(more, LARGE / 2, 3);
    say("compared");
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
    /* The engine thread that reads of the move may be a moment late. */
    usleep(200000);
    compare((uint64_t *)place, LARGE, 5);
    puts("all right");
}

/* Memory that the kernel may use behind Farpage's back stays for good, also if it was locked then and no
 * longer is. */
static void aio_in_locked_memory(void)
{
    char *memory = map_alone(4 * MIB);
    fill(memory, 4 * MIB, 6);
    CHECK(mlock(memory, 4 * MIB) == 0);
    filled(LARGE, 7);
    push_out();
    int file = open("/dev/zero", O_RDONLY);
    CHECK(file >= 0);
    aio_context_t context = 0;
    CHECK(syscall(SYS_io_setup, 1, &context) == 0);
    struct iocb request = { .aio_fildes = (uint32_t)file, .aio_lio_opcode = IOCB_CMD_PREAD,
        .aio_buf = (uint64_t)memory, .aio_nbytes = MIB }, *requests = &request;
    CHECK(syscall(SYS_io_submit, context, 1, &requests) == 1);
    CHECK(munlock(memory, 4 * MIB) == 0);
    push_out();
    push_out();
    CHECK(pages_out(memory, MIB) == 0);
    REQUIRE_OUT(memory + MIB, 3 * MIB);
    struct io_event event;
    CHECK(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1 && event.res == (int64_t)MIB);
    VERIFY_ZERO(memory, MIB);
    VERIFY_FROM(memory + MIB, 3 * MIB, 6, MIB / PAGE);
    puts("all right");
}

static void *page_of_the_thread;

static void *reads_on(void *argument)
{
    for (;;) {
        (void)*(volatile char *)page_of_the_thread;
        usleep(2000);
    }
    return argument;
}

static void take_away(void)
{
    CHECK(munmap(page_of_the_thread, PAGE) == 0);
}

/* Memory that a thread uses is gone once exit handlers have run. The thread must be gone a moment later,
 * too. */
static void ends_beside_a_thread(void)
{
    pthread_t thread;
    page_of_the_thread = filled(PAGE, 1);
    CHECK(atexit(take_away) == 0);
    CHECK(pthread_create(&thread, NULL, reads_on, NULL) == 0);
    usleep(5000);
}

static void *sleeps(void *argument)
{
    for (;;)
        pause();
    return argument;
}

/* The kernel looks at robust locks when their thread ends. The lock's page is out by then. */
static void ends_with_a_robust_lock(void)
{
    pthread_mutexattr_t robust;
    pthread_t thread;
    CHECK(pthread_mutexattr_init(&robust) == 0);
    CHECK(pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST) == 0);
    char *memory = map(LARGE);
    pthread_mutex_t *lock = (pthread_mutex_t *)memory;
    CHECK(pthread_mutex_init(lock, &robust) == 0 && pthread_mutex_lock(lock) == 0);
    CHECK(pthread_create(&thread, NULL, sleeps, NULL) == 0);
    noise((uint64_t *)(memory + PAGE), LARGE - PAGE, 6);
    _exit(7);
}

MAIN({ "ends_with_a_robust_lock", ends_with_a_robust_lock }, { "ends_beside_a_thread", ends_beside_a_thread }, { "read_after", read_after }, { "write_after", write_after }, { "give_up_after", give_up_after },
     { "moved_past_libc", moved_past_libc }, { "aio_in_locked_memory", aio_in_locked_memory })

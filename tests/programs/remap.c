/* Mappings that grow, shrink, move, and are taken apart while pages of them are out. */
#include "check.h"
#include <setjmp.h>
#include <sys/shm.h>

/* malloc's huge blocks grow by mremap, in place or moved as the kernel finds room. */
static void realloc_growth(void)
{
    size_t bytes = 4 * MIB;
    char *block = malloc(bytes);
    CHECK(block != NULL);
    /* The block's pages aren't aligned to pages of memory. A content of words fits all the same. */
    fill(block, bytes, 1);
    while (bytes < LARGE) {
        size_t larger = bytes + 7 * MIB;
        block = realloc(block, larger);
        CHECK(block != NULL);
        fill_from(block + bytes, larger - bytes, 1, bytes / PAGE);
        bytes = larger;
    }
    VERIFY(block, bytes, 1);
    block = realloc(block, bytes / 2);
    VERIFY(block, bytes / 2, 1);
    block = realloc(block, bytes);
    VERIFY(block, bytes / 2, 1);
    free(block);
}

/* A wall behind the mapping makes the kernel move it. */
static void moved_growth(void)
{
    size_t bytes = 48 * MIB;
    char *memory = filled(bytes, 2);
    for (int round = 0; round < 4; round++) {
        push_out();
        REQUIRE_OUT(memory, bytes);
        mmap(memory + bytes, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        char *moved = mremap(memory, bytes, bytes + 8 * MIB, MREMAP_MAYMOVE);
        CHECK(moved != MAP_FAILED);
        CHECK(moved != memory);
        VERIFY(moved, bytes, 2);
        VERIFY_ZERO(moved + bytes, 8 * MIB);
        fill_from(moved + bytes, 8 * MIB, 2, bytes / PAGE);
        memory = moved;
        bytes += 8 * MIB;
    }
    push_out();
    VERIFY(memory, bytes, 2);
}

/* Room that was kept free behind the mapping lets it grow where it is. */
static void grown_in_place(void)
{
    char *room = mmap(NULL, LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED);
    size_t bytes = 32 * MIB;
    char *memory = map_at(room, bytes, MAP_FIXED);
    fill(memory, bytes, 3);
    while (bytes < LARGE) {
        push_out();
        CHECK(munmap(memory + bytes, 16 * MIB) == 0);
        CHECK(mremap(memory, bytes, bytes + 16 * MIB, 0) == memory);
        fill_from(memory + bytes, 16 * MIB, 3, bytes / PAGE);
        bytes += 16 * MIB;
    }
    VERIFY(memory, bytes, 3);
}

static void shrunk(void)
{
    char *memory = filled(LARGE, 4);
    REQUIRE_OUT(memory, LARGE);
    for (size_t bytes = LARGE; bytes > 16 * MIB; bytes -= 16 * MIB) {
        CHECK(mremap(memory, bytes, bytes - 16 * MIB, 0) == memory);
        VERIFY(memory, bytes - 16 * MIB, 4);
    }
    /* Memory that is mapped there now is new. */
    char *behind = map_at(memory + 16 * MIB, LARGE - 16 * MIB, MAP_FIXED_NOREPLACE);
    VERIFY_ZERO(behind, LARGE - 16 * MIB);
    VERIFY(memory, 16 * MIB, 4);
}

/* The target is memory that is managed itself, and partly out. */
static void moved_to_fixed_place(void)
{
    char *from = filled(48 * MIB, 5);
    char *onto = filled(48 * MIB, 6);
    REQUIRE_OUT(from, 48 * MIB);
    CHECK(mremap(from, 32 * MIB, 32 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, onto + 8 * MIB) == onto + 8 * MIB);
    VERIFY(onto, 8 * MIB, 6);
    VERIFY(onto + 8 * MIB, 32 * MIB, 5);
    VERIFY_FROM(onto + 40 * MIB, 8 * MIB, 6, 40 * MIB / PAGE);
    VERIFY_FROM(from + 32 * MIB, 16 * MIB, 5, 32 * MIB / PAGE);
    char *again = map_at(from, 32 * MIB, MAP_FIXED_NOREPLACE);
    VERIFY_ZERO(again, 32 * MIB);
    push_out();
    VERIFY(onto + 8 * MIB, 32 * MIB, 5);
}

/* The old mapping stays, empty. Both mappings are used afterwards. */
static void moved_and_not_unmapped(void)
{
    char *from = filled(64 * MIB, 7);
    REQUIRE_OUT(from, 64 * MIB);
    char *to = mremap(from, 64 * MIB, 64 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    CHECK(to != MAP_FAILED && to != from);
    VERIFY_ZERO(from, 64 * MIB);
    VERIFY(to, 64 * MIB, 7);
    fill(from, 64 * MIB, 8);
    push_out();
    VERIFY(to, 64 * MIB, 7);
    VERIFY(from, 64 * MIB, 8);
}

/* A mapping cut to pieces, each of which moves on its own. */
static void pieces(void)
{
    enum { COUNT = 24 };
    size_t bytes = LARGE / COUNT;
    char *memory = filled(LARGE, 9), *piece[COUNT];
    for (int i = 0; i < COUNT; i++) {
        piece[i] = mremap(memory + i * bytes, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, map(bytes));
        CHECK(piece[i] != MAP_FAILED);
    }
    push_out();
    for (int i = 0; i < COUNT; i++)
        VERIFY_FROM(piece[i], bytes, 9, i * bytes / PAGE);
    /* The pieces go back together, in reverse order. */
    char *room = mmap(NULL, LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(mremap(piece[i], bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, room + (COUNT - 1 - i) * bytes)
              != MAP_FAILED);
    for (int i = 0; i < COUNT; i++)
        VERIFY_FROM(room + (COUNT - 1 - i) * bytes, bytes, 9, i * bytes / PAGE);
}

static void halves_unmapped(void)
{
    char *memory = filled(LARGE, 10);
    REQUIRE_OUT(memory, LARGE);
    size_t keep = LARGE / 4;
    CHECK(munmap(memory, keep) == 0);
    CHECK(munmap(memory + 3 * keep, keep) == 0);
    VERIFY_FROM(memory + keep, 2 * keep, 10, keep / PAGE);
    /* A hole in the middle, with new memory in it. */
    CHECK(munmap(memory + keep + keep / 2, keep / 2) == 0);
    char *inner = map_at(memory + keep + keep / 2, keep / 2, MAP_FIXED_NOREPLACE);
    VERIFY_ZERO(inner, keep / 2);
    fill(inner, keep / 2, 11);
    push_out();
    VERIFY(inner, keep / 2, 11);
    VERIFY_FROM(memory + keep, keep / 2, 10, keep / PAGE);
    VERIFY_FROM(memory + 2 * keep, keep, 10, 2 * keep / PAGE);
    CHECK(munmap(memory, LARGE) == 0);
}

/* mmap in the place of managed memory: anonymous, of a file, and shared. */
static void mapped_over(void)
{
    char *memory = filled(LARGE, 12);
    REQUIRE_OUT(memory, LARGE);
    size_t part = LARGE / 6;
    CHECK(map_at(memory, part, MAP_FIXED) == memory);
    VERIFY_ZERO(memory, part);
    char name[] = "mapped-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0 && ftruncate(file, (off_t)part) == 0);
    CHECK(pwrite(file, "of the file", 11, 0) == 11);
    CHECK(mmap(memory + 2 * part, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == memory + 2 * part);
    CHECK(memcmp(memory + 2 * part, "of the file", 11) == 0);
    VERIFY_ZERO(memory + 2 * part + PAGE, part - PAGE);
    CHECK(mmap(memory + 4 * part, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0)
          == memory + 4 * part);
    VERIFY_ZERO(memory + 4 * part, part);
    fill(memory + 4 * part, part, 13);
    push_out();
    for (size_t i = 1; i < 6; i += 2)
        VERIFY_FROM(memory + i * part, part, 12, i * part / PAGE);
    VERIFY(memory + 4 * part, part, 13);
    /* Anonymous memory again, in the place of all that. */
    CHECK(map_at(memory, LARGE, MAP_FIXED) == memory);
    VERIFY_ZERO(memory, LARGE);
    fill(memory, LARGE, 14);
    VERIFY(memory, LARGE, 14);
}

/* Many small changes at the edges, down to one page. */
static void page_by_page(void)
{
    size_t bytes = 48 * MIB;
    char *memory = filled(bytes, 15);
    REQUIRE_OUT(memory, bytes);
    for (size_t page = 0; page < bytes / PAGE; page += 7)
        CHECK(munmap(memory + page * PAGE, PAGE) == 0);
    for (size_t page = 0; page < bytes / PAGE; page++) {
        if (page % 7 == 0)
            CHECK(map_at(memory + page * PAGE, PAGE, MAP_FIXED_NOREPLACE) == memory + page * PAGE);
        if (page % 7 == 0)
            VERIFY_ZERO(memory + page * PAGE, PAGE);
        else
            VERIFY_FROM(memory + page * PAGE, PAGE, 15, page);
    }
}

/* A call that the kernel refuses must change nothing. */
static void refused_calls(void)
{
    char *memory = filled(LARGE, 16);
    REQUIRE_OUT(memory, LARGE);
    CHECK(munmap(memory + 1, PAGE) == -1 && errno == EINVAL);
    CHECK(munmap(memory, 0) == -1 && errno == EINVAL);
    CHECK(mremap(memory + 1, PAGE, PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(memory, LARGE, 0, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(memory, 8 * MIB, 8 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, memory + 4 * MIB) == MAP_FAILED
          && errno == EINVAL);
    CHECK(mremap(memory, LARGE, (size_t)1 << 46, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
    CHECK(madvise(memory, LARGE, 12345) == -1 && errno == EINVAL);
    CHECK(madvise(memory + 1, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
    CHECK(mprotect(memory + 1, PAGE, PROT_READ) == -1 && errno == EINVAL);
    CHECK(mmap(memory, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED
          && errno == EEXIST);
    CHECK(mmap(memory, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 12345, 0) == MAP_FAILED && errno == EBADF);
    CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
    VERIFY(memory, LARGE, 16);
    /* The hole at the target was there before: the failed call didn't make it. */
    push_out();
    CHECK(munmap(memory, PAGE) == 0);
    REQUIRE_OUT(memory + PAGE, LARGE - PAGE);
    CHECK(mmap(memory, LARGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 12345, 0) == MAP_FAILED && errno == EBADF);
    CHECK(mremap(memory + 8 * MIB + 1, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, memory) == MAP_FAILED);
    VERIFY_FROM(memory + PAGE, LARGE - PAGE, 16, 1);
}

/* Since Linux 6.17 one call moves several mappings. The next mapping need not allow what the first allows.
 * Formerly all became like the first, and a fork's child found zeros in the second. */
static void several_at_once(void)
{
    enum { HALF = 4 * 1024 * 1024 };
    for (int turn = 0; turn < 2; turn++) {
        char *memory = map_alone(2 * HALF), *place = map_alone(2 * HALF);
        CHECK(madvise(memory, HALF, MADV_WIPEONFORK) == 0);
        fill(memory, 2 * HALF, 17);
        if (turn == 1)
            push_out();
        char *moved = mremap(memory, 2 * HALF, 2 * HALF, MREMAP_MAYMOVE | MREMAP_FIXED, place);
        CHECK(moved == place || (moved == MAP_FAILED && errno == EFAULT));
        if (moved == MAP_FAILED)
            moved = memory;
        push_out();
        REQUIRE_OUT(moved + HALF, HALF);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            VERIFY_ZERO(moved, HALF);
            VERIFY_FROM(moved + HALF, HALF, 17, HALF / PAGE);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        VERIFY(moved, 2 * HALF, 17);
        CHECK(munmap(moved, 2 * HALF) == 0);
    }
}

/* A thread writes to a mapping all the time while another thread changes it. The writer waits each time; that
 * is no reason to end it. */
static volatile int stop;

static void *counts(void *argument)
{
    volatile uint64_t *count = argument;
    while (!stop)
        ++*count;
    return NULL;
}

static void resized_beside_a_writer(void)
{
    char *memory = filled(64 * MIB, 12);
    volatile uint64_t *count = (volatile uint64_t *)(memory + 60 * MIB);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, counts, (void *)count) == 0);
    for (int round = 0; round < 3000; round++) {
        uint64_t before = *count;
        CHECK(mremap(memory, 64 * MIB, 64 * MIB, 0) == memory);
        if (mremap(memory, 64 * MIB, 65 * MIB, 0) == memory)
            CHECK(munmap(memory + 64 * MIB, MIB) == 0);
        while (*count == before)
            sched_yield();
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    VERIFY(memory, 60 * MIB, 12);
}

/* The mapping grows by some bytes of the same page. Nothing moves, and calls can use the memory as before.
 * Formerly all of it stayed closed to calls. */
static void resized_within_a_page(void)
{
    char *memory = filled(64 * MIB, 15);
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    CHECK(zeros >= 0);
    VERIFY(memory, 8 * MIB, 15);
    CHECK(mremap(memory, 64 * MIB - 1000, 64 * MIB - 900, MREMAP_MAYMOVE) == memory);
    for (size_t at = 0; at < 64 * MIB; at += 16 * PAGE)
        CHECK(read(zeros, memory + at, PAGE) == (ssize_t)PAGE);
    for (size_t at = 0; at < 64 * MIB; at += 16 * PAGE) {
        VERIFY_ZERO(memory + at, PAGE);
        VERIFY_FROM(memory + at + PAGE, 15 * PAGE, 15, at / PAGE + 1);
    }
}

/* Memory that isn't one mapping can't be moved, and stays as it was. */
static void neighbour_in_the_way(void)
{
    char *place = map_at(NULL, 80 * MIB, MAP_NORESERVE);
    char *memory = map_at(place, 64 * MIB, MAP_FIXED);
    char *shared = mmap(place + 64 * MIB, MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(shared == place + 64 * MIB);
    memset(shared, 7, MIB);
    fill(memory, 64 * MIB, 13);
    push_out();
    CHECK(mremap(memory, 65 * MIB, 66 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
    /* Linux 6.17 and later could move it. */
    char *target = map(2 * MIB);
    if (getenv("FARPAGE_SESSION") != NULL)
        CHECK(mremap(memory + 63 * MIB, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED
              && errno == EFAULT);
    VERIFY(memory, 64 * MIB, 13);
    for (size_t at = 0; at < MIB; at++)
        CHECK(shared[at] == 7);
}

/* A mapping grows with the protection that it has. */
static sigjmp_buf refused;

static void refuse(int signal)
{
    siglongjmp(refused, signal);
}

static void grown_and_still_read_only(void)
{
    char *memory = filled(16 * MIB, 14), *other = filled(64 * MIB, 15);
    push_out();
    CHECK(mprotect(memory, 16 * MIB, PROT_READ) == 0);
    memory = mremap(memory, 16 * MIB, 24 * MIB, MREMAP_MAYMOVE);
    CHECK(memory != MAP_FAILED);
    CHECK(signal(SIGSEGV, refuse) != SIG_ERR);
    for (size_t at = 0; at < 24 * MIB; at += 4 * MIB) {
        if (sigsetjmp(refused, 1) == 0) {
            ((volatile char *)memory)[at] = 1;
            FAIL("page %zu was written", at / PAGE);
        }
    }
    CHECK(signal(SIGSEGV, SIG_DFL) == refuse);
    VERIFY(memory, 16 * MIB, 14);
    VERIFY_ZERO(memory + 16 * MIB, 8 * MIB);
    VERIFY(other, 64 * MIB, 15);
}

/* A mapping that shrinks loses its end, whatever its first page is. Here the first page is a stack's, which
 * isn't managed. Formerly the end was still in the list of ranges, and the next fork's child was stopped. */
static void shrunk_from_what_is_not_managed(void)
{
    char *memory = filled(LARGE, 16);
    for (int moves = 0; moves < 2; moves++) {
        char *place = map_at(NULL, 4 * MIB, MAP_STACK), *target = map_at(NULL, MIB, MAP_STACK);
        map_at(place + MIB, 3 * MIB, MAP_FIXED);
        fill(place + MIB, 3 * MIB, 17);
        push_out();
        REQUIRE_OUT(memory, LARGE);
        char *left = mremap(place, 4 * MIB, MIB, MREMAP_MAYMOVE | (moves ? MREMAP_FIXED : 0), target);
        CHECK(left == (moves ? target : place));
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            VERIFY(memory, LARGE, 16);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        char *again = map_at(place + MIB, 3 * MIB, MAP_FIXED_NOREPLACE);
        VERIFY_ZERO(again, 3 * MIB);
    }
}

/* The mapping grows again, and is filled. Formerly a fork's child believed the old list, by which those pages
 * were out. */
static void grown_again_from_what_is_not_managed(void)
{
    char *memory = filled(LARGE, 18);
    char *place = map_at(NULL, 4 * MIB, MAP_STACK);
    map_at(place + MIB, 3 * MIB, MAP_FIXED);
    fill(place + MIB, 3 * MIB, 19);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(mremap(place, 4 * MIB, MIB, 0) == place);
    CHECK(mremap(place, MIB, 4 * MIB, 0) == place);
    char *again = place + MIB;
    fill(again, 3 * MIB, 20);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        VERIFY(again, 3 * MIB, 20);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    push_out();
    VERIFY(again, 3 * MIB, 20);
}

/* A segment of shared memory takes the place of memory that is out. In `segv` mode the old bytes were written
 * over the segment, where every process that had attached it saw them. */
static void attached_over(void)
{
    int segment = shmget(IPC_PRIVATE, MIB, 0600);
    CHECK(segment >= 0);
    char *shared = shmat(segment, NULL, 0);
    CHECK(shared != (void *)-1 && shmctl(segment, IPC_RMID, NULL) == 0);
    fill(shared, MIB, 9);
    char *memory = filled(LARGE, 1), *place = memory + 16 * MIB;
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(shmat(segment, place + 1, SHM_REMAP) == (void *)-1 && errno == EINVAL);
    CHECK(shmat(segment, place + 1, SHM_REMAP | SHM_RND) == place);
    int pipes[2];
    CHECK(pipe(pipes) == 0 && write(pipes[1], place, PAGE) == (ssize_t)PAGE);
    VERIFY(place, MIB, 9);
    VERIFY(shared, MIB, 9);
    push_out();
    VERIFY(place, MIB, 9);
    VERIFY(memory, 16 * MIB, 1);
    VERIFY_FROM(place + MIB, LARGE - 17 * MIB, 1, 17 * MIB / PAGE);
    CHECK(shmdt(place) == 0 && shmdt(shared) == 0);
}

/* With this setting the kernel destroys a segment when the last process detaches it. */
static void attached_by_nobody_else(void)
{
    if (geteuid() != 0)
        return;
    CHECK(unshare(CLONE_NEWIPC) == 0);
    int setting = open("/proc/sys/kernel/shm_rmid_forced", O_WRONLY);
    CHECK(setting >= 0 && write(setting, "1", 1) == 1);
    int segment = shmget(IPC_PRIVATE, MIB, 0600);
    CHECK(segment >= 0);
    char *memory = filled(LARGE, 1), *place = memory + 16 * MIB;
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(shmat(segment, place, SHM_REMAP) == place);
    VERIFY_ZERO(place, MIB);
    VERIFY(memory, 16 * MIB, 1);
    CHECK(shmdt(place) == 0);
    CHECK(shmat(segment, place, 0) == (void *)-1 && errno == EINVAL);
}

MAIN({ "realloc_growth", realloc_growth }, { "moved_growth", moved_growth }, { "grown_in_place", grown_in_place },
     { "shrunk", shrunk }, { "moved_to_fixed_place", moved_to_fixed_place },
     { "moved_and_not_unmapped", moved_and_not_unmapped }, { "pieces", pieces },
     { "halves_unmapped", halves_unmapped }, { "mapped_over", mapped_over }, { "page_by_page", page_by_page },
     { "refused_calls", refused_calls }, { "several_at_once", several_at_once },
     { "resized_beside_a_writer", resized_beside_a_writer }, { "neighbour_in_the_way", neighbour_in_the_way },
     { "resized_within_a_page", resized_within_a_page },
     { "grown_and_still_read_only", grown_and_still_read_only },
     { "shrunk_from_what_is_not_managed", shrunk_from_what_is_not_managed },
     { "grown_again_from_what_is_not_managed", grown_again_from_what_is_not_managed }, { "attached_over", attached_over },
     { "attached_by_nobody_else", attached_by_nobody_else })

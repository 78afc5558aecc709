/* Several processes have one budget, usually of 64 MiB. The budget is 512 MiB in `among_idle_ones`, and 32
 * MiB in `payer_ends_beside_a_stopped_child`. Where children take their turns, in `written_while_read` and in
 * `many_small`, the budget is 24 MiB. */
#include "check.h"
#include <sys/prctl.h>
#include <sys/resource.h>

#define MEMBERS 4
#define OWN (40 * MIB)
#define ROUNDS 3

static void all_ended_well(pid_t *children, int count)
{
    for (int i = 0; i < count; i++) {
        int status;
        CHECK(waitpid(children[i], &status, 0) == children[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            FAIL("child %d ended with status %x", i, status);
    }
}

/* The first process fills most of the budget and goes to sleep. The others come later, each alone well within
 * the budget. Each process works for some rounds and ends. */
static void growers(void)
{
    pid_t children[MEMBERS];
    for (int i = 0; i < MEMBERS; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            char *own = map(OWN);
            for (int round = 0; round < ROUNDS; round++) {
                fill(own, OWN, 10 * i + round);
                if (i == 0 && round == 0)
                    sleep(2);
                VERIFY(own, OWN, 10 * i + round);
            }
            _exit(0);
        }
        usleep(500000);
    }
    all_ended_well(children, MEMBERS);
}

/* Memory that children share with their parent counts once. Nothing has to be evicted for children that only
 * read it. */
static void readers(void)
{
    char *memory = map(OWN);
    fill(memory, OWN, 7);
    pid_t children[MEMBERS];
    for (int i = 0; i < MEMBERS; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            for (int round = 0; round < 20; round++) {
                VERIFY(memory, OWN, 7);
                usleep(20000);
            }
            _exit(0);
        }
    }
    all_ended_well(children, MEMBERS);
}

/* Processes come one after the other, each with most of the budget. The dead take none of it. */
static void one_by_one(void)
{
    for (int i = 0; i < 3 * MEMBERS; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            char *own = map(OWN);
            fill(own, OWN, i);
            VERIFY(own, OWN, i);
            usleep(20000);
            _exit(0);
        }
        all_ended_well(&child, 1);
    }
}

/* Twelve processes have some memory and wait. One process grows to four fifths of what they leave. Memory
 * isn't short. */
static void among_idle_ones(void)
{
    pid_t children[12];
    int end[2];
    CHECK(pipe(end) == 0);
    for (int i = 0; i < 12; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            close(end[1]);
            char *own = map(10 * MIB), nothing;
            fill(own, 10 * MIB, i);
            CHECK(read(end[0], &nothing, 1) == 0);
            VERIFY(own, 10 * MIB, i);
            _exit(0);
        }
    }
    size_t bytes = 300 * MIB;
    char *large = map(bytes);
    for (size_t at = 0; at < bytes; at += MIB) {
        fill(large + at, MIB, at);
        usleep(2000);
    }
    for (size_t at = 0; at < bytes; at += MIB)
        VERIFY(large + at, MIB, at);
    close(end[1]);
    all_ended_well(children, 12);
}

#define TURNS 4
#define FORKED (60 * MIB)

/* Words that no codec makes shorter, so that the pool is of no use. */
static void fill_noise(char *memory, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t))
        *(uint64_t *)(memory + at) = mix(at + 1);
}

static void verify_noise(const char *memory, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t))
        if (*(const uint64_t *)(memory + at) != mix(at + 1))
            FAIL("the word at %zu is wrong", at);
}

/* Children of a parent that has more than its budget, one after the other. */
static void in_turns(void (*child)(char *memory))
{
    char *memory = map(FORKED);
    fill_noise(memory, FORKED);
    for (int i = 0; i < TURNS; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            child(memory);
            _exit(0);
        }
        all_ended_well(&pid, 1);
    }
    verify_noise(memory, FORKED);
}

static void reads_all(char *memory)
{
    verify_noise(memory, FORKED);
}

/* The children only read: memory that parent and child share is there once. */
static void readers_in_turns(void)
{
    in_turns(reads_all);
}

static void closes_all_and_reads(char *memory)
{
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    for (int file = 3; file < 4096 && file < (int)files.rlim_cur; file++)
        syscall(SYS_close, file);
    verify_noise(memory, FORKED);
}

/* The children close all descriptors before they read. */
static void closers_in_turns(void)
{
    in_turns(closes_all_and_reads);
}

static void reads_advised(char *memory)
{
    static const int advice[] = { MADV_DONTDUMP, MADV_MERGEABLE, MADV_NOHUGEPAGE, MADV_HUGEPAGE };
    for (int i = 0; i < 4; i++) {
        /* Not every kernel knows each advice. */
        (void)madvise(memory + i * (FORKED / 4), FORKED / 4, advice[i]);
    }
    verify_noise(memory, FORKED);
}

/* The children give advice that splits the mapping. */
static void advisers_in_turns(void)
{
    in_turns(reads_advised);
}

/* The parent writes while a child reads, as when a database saves itself. */
static void written_while_read(void)
{
    char *memory = map(FORKED);
    fill(memory, FORKED, 7);
    for (int i = 0; i < TURNS; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            VERIFY(memory, FORKED, 7 + i);
            _exit(0);
        }
        fill(memory, FORKED, 8 + i);
        all_ended_well(&child, 1);
    }
    VERIFY(memory, FORKED, 7 + TURNS);
}

#define PAID (20 * MIB)

/* Verifies one MiB after the other, so slowly that keepers without much CPU can follow. */
static void verify_slowly(const char *memory, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        if (at % MIB == 0)
            usleep(20000);
        if (*(const uint64_t *)(memory + at) != mix(at + 1))
            FAIL("the word at %zu is wrong", at);
    }
}

/* A parent ends that has paid for its children's memory, too. One child is stopped, and the others fill
 * memory of their own. */
static void payer_ends_beside_a_stopped_child(void)
{
    int stopped[2], ended[2];
    CHECK(pipe(stopped) == 0 && pipe(ended) == 0);
    /* Processes that have lost their parent become children of this one. */
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    pid_t payer = fork();
    CHECK(payer >= 0);
    if (payer == 0) {
        char *memory = map(PAID), nothing;
        fill_noise(memory, PAID);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            /* Otherwise nobody would see the payer's end. */
            close(ended[1]);
            raise(SIGSTOP);
            _exit(0);
        }
        CHECK(waitpid(child, NULL, WUNTRACED) == child);
        CHECK(write(stopped[1], &child, sizeof(child)) == sizeof(child));
        for (int i = 0; i < 2; i++) {
            pid_t other = fork();
            CHECK(other >= 0);
            if (other == 0) {
                close(ended[1]);
                CHECK(read(ended[0], &nothing, 1) == 0);
                /* The other processes have heard of the payer's end by now. */
                usleep(1000000);
                char *own = map(PAID);
                for (size_t at = 0; at < PAID; at += MIB) {
                    for (size_t word = at; word < at + MIB; word += sizeof(uint64_t))
                        *(uint64_t *)(own + word) = mix(word + 1);
                    usleep(20000);
                }
                verify_slowly(own, PAID);
                verify_slowly(memory, PAID);
                _exit(0);
            }
        }
        usleep(300000);
        _exit(0);
    }
    pid_t child;
    CHECK(read(stopped[0], &child, sizeof(child)) == sizeof(child));
    close(ended[1]);
    all_ended_well(&payer, 1);
    for (int i = 0; i < 2; i++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    CHECK(kill(child, SIGCONT) == 0);
    all_ended_well(&child, 1);
}

/* Six processes at once, none of which is large. */
static void many_small(void)
{
    pid_t children[6];
    for (int i = 0; i < 6; i++) {
        children[i] = fork();
        CHECK(children[i] >= 0);
        if (children[i] == 0) {
            char *own = map(10 * MIB);
            for (int round = 0; round < 5; round++) {
                fill(own, 10 * MIB, 10 * i + round);
                VERIFY(own, 10 * MIB, 10 * i + round);
            }
            _exit(0);
        }
    }
    all_ended_well(children, 6);
}

MAIN({ "readers_in_turns", readers_in_turns }, { "closers_in_turns", closers_in_turns },
     { "advisers_in_turns", advisers_in_turns }, { "written_while_read", written_while_read },
     { "many_small", many_small }, { "payer_ends_beside_a_stopped_child", payer_ends_beside_a_stopped_child }, { "growers", growers }, { "readers", readers }, { "one_by_one", one_by_one },
     { "among_idle_ones", among_idle_ones })

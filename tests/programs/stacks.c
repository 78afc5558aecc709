/* Stacks in managed memory: of signal handlers, of coroutines, of threads that the program placed itself. */
#include "check.h"
#include <ucontext.h>

#define STACK ((size_t)256 * 1024)

static volatile int handled;
static char *area;

/* Recurses deep enough to touch pages of the stack that are out. */
static uint64_t dig(int depth)
{
    volatile char room[3000];
    memset((char *)room, depth, sizeof room);
    uint64_t sum = depth > 0 ? dig(depth - 1) : 0;
    for (size_t i = 0; i < sizeof room; i += 500)
        sum += (uint64_t)room[i];
    return sum;
}

static void on_signal(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info, (void)context;
    dig(40);
    char *memory = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memory[MIB] = 1;
    CHECK(munmap(memory, 2 * MIB) == 0);
    handled++;
}

static void handler_on_managed_stack(void)
{
    area = filled(LARGE, 1);
    stack_t stack = { .ss_sp = area + 2 * MIB, .ss_size = STACK };
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    for (int round = 0; round < 6; round++) {
        push_out();
        REQUIRE_OUT(area + 2 * MIB, STACK);
        CHECK(raise(SIGUSR1) == 0);
        CHECK(handled == round + 1);
    }
    VERIFY(area, 2 * MIB, 1);
    VERIFY_FROM(area + 2 * MIB + STACK, LARGE - 2 * MIB - STACK, 1, (2 * MIB + STACK) / PAGE);
}

/* Signals come all the time, while the interrupted code faults and changes mappings. */
static volatile int stop;

static void *sender(void *argument)
{
    pthread_t target = *(pthread_t *)argument;
    while (!stop) {
        pthread_kill(target, SIGUSR1);
        usleep(500);
    }
    return NULL;
}

static void on_small_signal(int signal)
{
    (void)signal;
    handled += area[mix((uint64_t)handled) % LARGE] + 1000;
}

static void signals_all_the_time(void)
{
    area = filled(LARGE, 2);
    struct sigaction action = { .sa_handler = on_small_signal, .sa_flags = SA_RESTART };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pthread_t self = pthread_self(), thread;
    CHECK(pthread_create(&thread, NULL, sender, &self) == 0);
    for (int round = 0; round < 5; round++) {
        VERIFY(area, LARGE, 2);
        char *other = filled(4 * MIB, 3);
        other = mremap(other, 4 * MIB, 8 * MIB, MREMAP_MAYMOVE);
        CHECK(other != MAP_FAILED);
        VERIFY(other, 4 * MIB, 3);
        CHECK(munmap(other, 8 * MIB) == 0);
    }
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(handled != 0);
}

/* ---- coroutines ---- */

enum { COROUTINES = 64 };
static ucontext_t home, coroutine[COROUTINES];
static int alive;

static void work(int number)
{
    for (int step = 0; step < 4; step++) {
        char *block = malloc(300 * 1024);
        CHECK(block != NULL);
        memset(block, number, 300 * 1024);
        char *mapped = map(2 * MIB);
        fill(mapped, 64 * 1024, (uint64_t)number);
        uint64_t sum = dig(20);
        swapcontext(&coroutine[number], &home);
        CHECK(sum == dig(20));
        for (size_t i = 0; i < 300 * 1024; i++)
            CHECK(block[i] == (char)number);
        VERIFY(mapped, 64 * 1024, (uint64_t)number);
        CHECK(mprotect(mapped, MIB, PROT_READ) == 0);
        CHECK(madvise(mapped + MIB, MIB, MADV_DONTNEED) == 0);
        CHECK(munmap(mapped, 2 * MIB) == 0);
        free(block);
    }
    alive--;
}

static void coroutines(void)
{
    char *stacks = map(COROUTINES * STACK);
    fill(stacks, COROUTINES * STACK, 4);
    for (int i = 0; i < COROUTINES; i++) {
        CHECK(getcontext(&coroutine[i]) == 0);
        coroutine[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
        coroutine[i].uc_stack.ss_size = STACK;
        coroutine[i].uc_link = &home;
        makecontext(&coroutine[i], (void (*)(void))work, 1, i);
    }
    alive = COROUTINES;
    for (int step = 0; alive > 0; step++) {
        push_out();
        REQUIRE_OUT(stacks, COROUTINES * STACK);
        for (int i = 0; i < COROUTINES; i++)
            if (step < 5)
                CHECK(swapcontext(&home, &coroutine[i]) == 0);
    }
}

/* A thread whose stack is ordinary memory of the program. */
static void *deep_thread(void *argument)
{
    uint64_t sum = 0;
    for (int round = 0; round < 20; round++) {
        sum += dig(60);
        usleep(1000);
        char *other = map(2 * MIB);
        other[round] = 1;
        CHECK(munmap(other, 2 * MIB) == 0);
    }
    *(uint64_t *)argument = sum;
    return NULL;
}

static void placed_thread_stacks(void)
{
    enum { THREADS = 8 };
    char *stacks = map(THREADS * 4 * MIB);
    fill(stacks, THREADS * 4 * MIB, 5);
    push_out();
    pthread_t thread[THREADS];
    uint64_t sum[THREADS], expected = 20 * dig(60);
    for (int i = 0; i < THREADS; i++) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        CHECK(pthread_attr_setstack(&attributes, stacks + (size_t)i * 4 * MIB, 4 * MIB) == 0);
        CHECK(pthread_create(&thread[i], &attributes, deep_thread, &sum[i]) == 0);
    }
    /* A place in the middle of such places is given once more. That call once didn't end. */
    pthread_attr_t again;
    pthread_attr_init(&again);
    CHECK(pthread_attr_setstack(&again, stacks + 4 * MIB, 4 * MIB) == 0);
    push_out();
    for (int i = 0; i < THREADS; i++) {
        /* The kernel writes there when the thread ends, and can't wait for a page then. */
        const size_t block = 16 * 1024;
        CHECK(pages_out(stacks + (size_t)(i + 1) * 4 * MIB - block, block) == 0);
        CHECK(pthread_join(thread[i], NULL) == 0);
        CHECK(sum[i] == expected);
    }
}

/* Threads that exist before Farpage comes in, as a library's constructor makes them. Nothing of their stacks
 * may be out, because the kernel writes there (rseq), and waits for nobody. */
enum { EARLY = 4 };
static pthread_t early[EARLY];
static char *volatile early_stack[EARLY];
static volatile int are_early_wanted;
static pthread_mutex_t early_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t early_wake = PTHREAD_COND_INITIALIZER;

static void *comes_early(void *argument)
{
    char here[64 * 1024];
    memset(here, 7, sizeof here);
    early_stack[(uintptr_t)argument] = here;
    pthread_mutex_lock(&early_lock);
    while (!are_early_wanted)
        pthread_cond_wait(&early_wake, &early_lock);
    pthread_mutex_unlock(&early_lock);
    for (size_t at = 0; at < sizeof here; at++)
        CHECK(((volatile char *)here)[at] == 7);
    return NULL;
}

static void *ends_early(void *argument)
{
    return argument;
}

static void before_all_constructors(int argc, char **argv, char **environment)
{
    (void)environment;
    if (argc == 2 && strcmp(argv[1], "stack_of_an_ended_thread") == 0) {
        CHECK(pthread_create(&early[0], NULL, ends_early, NULL) == 0 && pthread_join(early[0], NULL) == 0);
        return;
    }
    if (argc != 2 || strcmp(argv[1], "threads_of_a_library") != 0)
        return;
    for (uintptr_t i = 0; i < EARLY; i++)
        CHECK(pthread_create(&early[i], NULL, comes_early, (void *)i) == 0);
}

__attribute__((section(".preinit_array"), used)) static void (*const preinit)(int, char **, char **) =
    before_all_constructors;

static void threads_of_a_library(void)
{
    char *memory = filled(LARGE, 6);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    for (int i = 0; i < EARLY; i++)
        CHECK(early_stack[i] != NULL && pages_out(early_stack[i], 64 * 1024) == 0);
    pthread_mutex_lock(&early_lock);
    are_early_wanted = 1;
    pthread_cond_broadcast(&early_wake);
    pthread_mutex_unlock(&early_lock);
    for (int i = 0; i < EARLY; i++)
        CHECK(pthread_join(early[i], NULL) == 0);
    VERIFY(memory, LARGE, 6);
}

/* A library's thread has ended before Farpage is there. libc gives its stack to a thread of the program's. */
static void stack_of_an_ended_thread(void)
{
    pthread_t ended = early[0];
    CHECK(pthread_create(&early[0], NULL, comes_early, (void *)0) == 0);
    if (early[0] != ended)
        fprintf(stderr, "libc hasn't kept the stack: this tests little\n");
    char *memory = filled(LARGE, 6);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(early_stack[0] != NULL && pages_out(early_stack[0], 64 * 1024) == 0);
    CHECK(pages_out((char *)early[0] - (uintptr_t)early[0] % PAGE, PAGE) == 0);
    pthread_mutex_lock(&early_lock);
    are_early_wanted = 1;
    pthread_cond_broadcast(&early_wake);
    pthread_mutex_unlock(&early_lock);
    CHECK(pthread_join(early[0], NULL) == 0);
    VERIFY(memory, LARGE, 6);
}

MAIN({ "handler_on_managed_stack", handler_on_managed_stack }, { "signals_all_the_time", signals_all_the_time },
     { "coroutines", coroutines }, { "placed_thread_stacks", placed_thread_stacks },
     { "threads_of_a_library", threads_of_a_library }, { "stack_of_an_ended_thread", stack_of_an_ended_thread })

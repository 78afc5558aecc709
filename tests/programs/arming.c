/* Signals in a program whose threads are being armed: some threads are armed, others aren't yet.
 *
 * The main thread holds this moment open. Until the case is over, the main thread blocks the signal that arms
 * threads, which only a call past libc can do. Meanwhile the other thread is armed. Without Farpage, and in
 * `thread` mode, there is no such moment. */
#include "check.h"
#include <stdatomic.h>
#include <sys/prctl.h>
#include <ucontext.h>

static atomic_int is_armed, handled, done;
static pthread_t other;

/* Whether this thread is armed. Farpage refuses to let an armed thread change how its calls are stopped. In
 * any other thread the call switches off what is off already. */
static int calls_are_stopped(void)
{
    return call(SYS_prctl, 59, 0, 0, 0, 0, 0) == -EINVAL;
}

static void mask(int how, uint64_t set)
{
    CHECK(call(SYS_rt_sigprocmask, how, (long)&set, 0, 8, 0, 0) == 0);
}

/* Makes calls until the case is over, and says when this thread is armed. */
static void *makes_calls(void *argument)
{
    while (!done) {
        if (!is_armed && calls_are_stopped())
            is_armed = 1;
        getppid();
        sched_yield();
    }
    return argument;
}

static void on_signal(int signal)
{
    (void)signal;
    getppid();
    handled++;
}

static struct sigaction blocking_everything(void (*handler)(int), int flags)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    sigfillset(&action.sa_mask);
    return action;
}

/* Sends the other thread ten signals, and waits after each until its handler has run. */
static void tell_the_other(void)
{
    for (int i = 0; i < 10; i++) {
        int before = handled;
        CHECK(pthread_kill(other, SIGUSR1) == 0);
        while (handled == before)
            sched_yield();
    }
}

/* Has the other thread armed and this one not. Returns memory that was filled for that. */
static char *begin_half_armed(void)
{
    mask(SIG_BLOCK, ~0ul);
    char *first = filled(40 * MIB, 1);
    for (int i = 0; i < 1500 && !is_armed && getenv("FARPAGE_SESSION") != NULL; i++)
        usleep(1000);
    CHECK(!calls_are_stopped());
    return first;
}

/* Runs `meanwhile` while the other thread is armed and this one isn't. */
static void half_armed(void *(*work)(void *), void (*meanwhile)(void))
{
    CHECK(pthread_create(&other, NULL, work, NULL) == 0);
    char *first = begin_half_armed();
    meanwhile();
    mask(SIG_UNBLOCK, ~0ul);
    char *second = filled(LARGE, 2);
    REQUIRE_OUT(second, LARGE);
    done = 1;
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(first, 40 * MIB, 1);
    VERIFY(second, LARGE, 2);
}

/* A handler that was installed before, and that blocks every signal while it makes calls. Java's and Go's
 * handlers do so. */
static void handlers_that_were_there(void)
{
    struct sigaction action = blocking_everything(on_signal, SA_RESTART), found;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    half_armed(makes_calls, tell_the_other);
    CHECK(sigaction(SIGUSR1, NULL, &found) == 0);
    CHECK(found.sa_handler == on_signal && (found.sa_flags & SA_RESTART));
    CHECK(sigismember(&found.sa_mask, SIGSYS) && sigismember(&found.sa_mask, SIGBUS));
    CHECK(raise(SIGUSR1) == 0 && handled == 11);
}

#define STACK_BYTES (64 * 1024)

static char *stack;
static atomic_int elsewhere;

static void looks_where_it_is(int signal)
{
    char here;
    elsewhere += &here < stack || &here >= stack + STACK_BYTES;
    on_signal(signal);
}

static void has_a_stack_for_handlers(void)
{
    stack_t own = { .ss_sp = stack, .ss_size = STACK_BYTES };
    CHECK(sigaltstack(&own, NULL) == 0);
}

static void *makes_calls_with_a_stack(void *argument)
{
    has_a_stack_for_handlers();
    return makes_calls(argument);
}

/* The same on an alternate signal stack. Go's handlers check that they run on it. */
static void handlers_on_their_stack(void)
{
    struct sigaction action = blocking_everything(looks_where_it_is, SA_ONSTACK);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    stack = map(STACK_BYTES);
    half_armed(makes_calls_with_a_stack, tell_the_other);
    CHECK(elsewhere == 0);
}

static void sets_a_handler(void)
{
    for (int i = 0; i < 200; i++) {
        struct sigaction action = blocking_everything(i % 2 ? on_signal : looks_where_it_is, SA_ONSTACK), found;
        CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
        tell_the_other();
        CHECK(sigaction(SIGUSR1, NULL, &found) == 0);
        CHECK(found.sa_handler == action.sa_handler && sigismember(&found.sa_mask, SIGSYS));
    }
}

/* A thread that isn't armed yet installs a handler. */
static void handlers_set_meanwhile(void)
{
    stack = map(STACK_BYTES);
    half_armed(makes_calls_with_a_stack, sets_a_handler);
    CHECK(elsewhere == 0);
}

static void resets_all(void)
{
    for (int i = 0; i < 200; i++) {
        for (int number = 1; number < 32; number++) {
            struct sigaction action = { .sa_handler = SIG_DFL }, found;
            if (number != SIGKILL && number != SIGSTOP) {
                CHECK(sigaction(number, &action, NULL) == 0);
                CHECK(sigaction(number, NULL, &found) == 0 && found.sa_handler == SIG_DFL);
            }
        }
        CHECK(signal(SIGSYS, SIG_IGN) == SIG_DFL && signal(SIGSYS, SIG_DFL) == SIG_IGN);
        usleep(100);
    }
}

/* A thread that isn't armed yet resets every signal's handler. node does so when it starts. */
static void all_reset_meanwhile(void)
{
    half_armed(makes_calls, resets_all);
}

#define LITTLE 1024

static char *below;

/* Asks whether the thread is armed, on a stack that has no room for a signal's frame. */
static void *asks_on_a_little_stack(void *argument)
{
    has_a_stack_for_handlers();
    while (!is_armed && !done) {
        long answer;
        __asm__ volatile("mov %%rsp, %%rbx\n\tmov %[top], %%rsp\n\tmov $1000, %%r12d\n"
                         "1:\tmov %[number], %%eax\n\tmov $59, %%edi\n\txor %%esi, %%esi\n\txor %%edx, %%edx\n\t"
                         "xor %%r10d, %%r10d\n\txor %%r8d, %%r8d\n\tsyscall\n\ttest %%rax, %%rax\n\tjnz 2f\n\t"
                         "dec %%r12d\n\tjnz 1b\n2:\tmov %%rbx, %%rsp"
                         : "=&a"(answer)
                         : [top] "r"(below + MIB), [number] "i"(SYS_prctl)
                         : "rbx", "r12", "rdi", "rsi", "rdx", "r10", "r8", "rcx", "r11", "memory");
        is_armed = answer == -EINVAL;
    }
    return makes_calls(argument);
}

/* Makes calls that lead to Farpage, in a handler on an alternate stack, until the thread is armed. What the
 * handler has on that stack stays as it is. */
static void maps_and_looks(int signal)
{
    volatile uint64_t words[1024];
    for (int i = 0; i < 1024; i++)
        words[i] = mix(i);
    while (!is_armed && !done) {
        munmap(map(MIB), MIB);
        is_armed = calls_are_stopped();
    }
    for (int i = 0; i < 1024; i++)
        CHECK(words[i] == mix(i));
    looks_where_it_is(signal);
}

static void *is_in_a_handler(void *argument)
{
    has_a_stack_for_handlers();
    CHECK(raise(SIGUSR2) == 0);
    stack_t found;
    CHECK(sigaltstack(NULL, &found) == 0 && found.ss_sp == stack && found.ss_size == STACK_BYTES);
    return makes_calls(argument);
}

static void nothing(void)
{
}

/* A thread that is on its alternate signal stack all the time. */
static void handlers_that_map(void)
{
    struct sigaction action = blocking_everything(maps_and_looks, SA_ONSTACK);
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    stack = map(STACK_BYTES);
    half_armed(is_in_a_handler, nothing);
    CHECK(elsewhere == 0);
}

/* A thread whose stack has room only for the thread's own work, as Go's stacks have. The code that arms the
 * thread runs on its alternate signal stack. */
static void threads_on_little_stacks(void)
{
    stack = map(STACK_BYTES);
    below = filled(MIB, 3);
    half_armed(asks_on_a_little_stack, nothing);
    VERIFY(below, MIB - PAGE, 3);
    for (size_t word = 0; word < (PAGE - LITTLE) / 8; word++)
        CHECK(((uint64_t *)(below + MIB - PAGE))[word] == word_of(3, MIB / PAGE - 1, word));
}

static void *fills(void *argument)
{
    fill(map(LARGE), LARGE, 1);
    return argument;
}

static void by_path(void)
{
    execlp("true", "true", NULL);
}

/* Each of libc's functions makes its own system call. */
static void by_descriptor(void)
{
    extern char **environ;
    char *words[] = { "true", NULL };
    int file = open("/bin/true", O_RDONLY | O_CLOEXEC);
    fexecve(file, words, environ);
}

/* A child's memory passes the budget while the child runs another program. The signal that was to arm the
 * child must not end that program. */
static void run_meanwhile(void (*run)(void))
{
    for (uint64_t turn = 0; turn < 200; turn++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            pthread_t thread;
            CHECK(pthread_create(&thread, NULL, fills, NULL) == 0);
            usleep(mix(turn) % 30000);
            run();
            _exit(1);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("turn %lu: the program ended with %x", turn, status);
    }
    push_out();
}

static void programs_run_meanwhile(void)
{
    run_meanwhile(by_path);
}

static void files_run_meanwhile(void)
{
    run_meanwhile(by_descriptor);
}

enum { FOR_HANDLERS = 64 * PAGE };
static char *volatile for_handlers;

/* Sets an alternate stack in managed memory, and makes no call until the case is over. */
static void *only_computes(void *argument)
{
    for_handlers = filled(FOR_HANDLERS, 3);
    const stack_t stack = { .ss_sp = for_handlers, .ss_size = FOR_HANDLERS };
    CHECK(sigaltstack(&stack, NULL) == 0);
    is_armed = 1;
    for (volatile uint64_t turns = 0; !done; turns++)
        ;
    return argument;
}

/* After arming, the kernel reads from the alternate stack where the thread goes on. The page that is read
 * must be in memory until the thread has gone on, and nobody hears when that is. The rest of the stack may go
 * out. Formerly, in `segv` mode on a busy machine, one of thousands of such threads ended with SIGSEGV. */
static void stack_of_the_arming_stays(void)
{
    CHECK(pthread_create(&other, NULL, only_computes, NULL) == 0);
    while (!is_armed)
        sched_yield();
    char *area = filled(LARGE, 1);
    for (int turn = 0; turn < 50 && pages_out(for_handlers, FOR_HANDLERS / 2) == 0; turn++)
        push_out();
    REQUIRE_OUT(for_handlers, FOR_HANDLERS / 2);
    if (calls_are_stopped()) {
        push_out();
        const char *top = for_handlers + FOR_HANDLERS - PAGE;
        if (pages_out(top, PAGE) != 0)
            FAIL("the page at %p, which the kernel reads, is out", (const void *)top);
    }
    done = 1;
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(area, LARGE, 1);
}

enum { GAP = 64 * PAGE, MANAGED_STACK = 256 * PAGE, RED_ZONE = 128 };
static char *volatile frame_end;
static atomic_int is_below, may_begin;

/* Computes until the case is over, far below what the caller has on the stack. */
static __attribute__((noinline)) void compute_below(void)
{
    volatile char gap[GAP];
    gap[0] = 1;
    is_below = gap[0];
    while (!done)
        ;
}

/* Touches nothing near the frame from which the kernel continues. */
static void stays(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    uintptr_t begin = (uintptr_t)context, end = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RSP] - RED_ZONE;
    CHECK(begin / PAGE < (end - 1) / PAGE);
    frame_end = (char *)((end - 1) / PAGE * PAGE);
    compute_below();
}

/* Makes calls until this thread is armed. Then it computes on a stack in memory that can be evicted. The frame of a
 * signal ends a little above the beginning of a page there. */
static void *computes_when_armed(void *argument)
{
    ucontext_t elsewhere, here;
    CHECK(getcontext(&elsewhere) == 0);
    elsewhere.uc_stack.ss_sp = argument;
    elsewhere.uc_stack.ss_size = MANAGED_STACK - PAGE + 640;
    elsewhere.uc_link = &here;
    makecontext(&elsewhere, compute_below, 0);
    while (!is_armed && !may_begin) {
        is_armed = calls_are_stopped();
        sched_yield();
    }
    CHECK(swapcontext(&here, &elsewhere) == 0);
    return argument;
}

/* A handler began on the interrupted stack, because only some threads were armed. While it ran, that stack was
 * evicted. The kernel couldn't read the frame when the handler returned, and ended the process. */
static void frame_that_is_out(void)
{
    struct sigaction action = { .sa_sigaction = stays, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_create(&other, NULL, computes_when_armed, filled(MANAGED_STACK, 3)) == 0);
    begin_half_armed();
    may_begin = 1;
    while (!is_below)
        sched_yield();
    CHECK(pthread_kill(other, SIGUSR1) == 0);
    while (frame_end == NULL)
        sched_yield();
    mask(SIG_UNBLOCK, ~0ul);
    char *area = filled(LARGE, 2);
    for (int turn = 0; turn < 50 && pages_out(frame_end, PAGE) == 0; turn++)
        push_out();
    REQUIRE_OUT(frame_end, PAGE);
    done = 1;
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(area, LARGE, 2);
}

static void *only_lives(void *argument)
{
    while (!done)
        usleep(1000);
    return argument;
}

/* Returns the flags of libc's handler for changes of credentials. The handler is there once there is a thread. */
static uint64_t flags_of_libcs_handler(void)
{
    enum { SIGSETXID = 33 };
    uint64_t words[4] = { 0 };
    CHECK(call(SYS_rt_sigaction, SIGSETXID, 0, (long)words, 8, 0, 0) == 0);
    CHECK(words[0] != 0);
    return words[1];
}

/* Farpage's threads were asked to follow a change of credentials. From then on libc's handler ran on whatever stack
 * its thread was on. Go's are too small. */
static void libcs_handler_keeps_its_stack(void)
{
    CHECK(pthread_create(&other, NULL, only_lives, NULL) == 0);
    uint64_t before = flags_of_libcs_handler();
    char *first = filled(16 * MIB, 1);
    usleep(200000);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK((flags_of_libcs_handler() & SA_ONSTACK) == (before & SA_ONSTACK));
    char *second = filled(LARGE, 2);
    CHECK((flags_of_libcs_handler() & SA_ONSTACK) == (before & SA_ONSTACK));
    done = 1;
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(first, 16 * MIB, 1);
    VERIFY(second, LARGE, 2);
}

MAIN({ "handlers_that_were_there", handlers_that_were_there }, { "handlers_on_their_stack", handlers_on_their_stack },
     { "handlers_set_meanwhile", handlers_set_meanwhile }, { "all_reset_meanwhile", all_reset_meanwhile },
     { "threads_on_little_stacks", threads_on_little_stacks }, { "handlers_that_map", handlers_that_map },
     { "programs_run_meanwhile", programs_run_meanwhile },
     { "files_run_meanwhile", files_run_meanwhile },
     { "stack_of_the_arming_stays", stack_of_the_arming_stays }, { "frame_that_is_out", frame_that_is_out },
     { "libcs_handler_keeps_its_stack", libcs_handler_keeps_its_stack })

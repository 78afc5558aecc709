/* Threads, handlers and children that exist when Farpage comes in, and ones that are made afterwards. Most of
 * these cases once ended the program in `--faults signal`. There a blocked signal, a missing stack or
 * somebody else's handler is enough for that. */
#include "check.h"
#include <execinfo.h>
#include <linux/sched.h>
#include <poll.h>
#include <setjmp.h>

static char *area;
static volatile uint64_t sum;

static void grow(void)
{
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
}

static volatile int handled;

static void makes_calls(int signal)
{
    (void)signal;
    getppid();
    if (area != NULL)
        *(volatile char *)(area + MIB);
    handled++;
}

/* A handler blocks everything while it makes calls and touches memory that is out. Such a handler is
 * installed before memory is out, and another afterwards. */
static void handlers_that_block_everything(void)
{
    struct sigaction action = { .sa_handler = makes_calls };
    sigfillset(&action.sa_mask);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    grow();
    CHECK(raise(SIGUSR1) == 0 && handled == 1);
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    push_out();
    CHECK(raise(SIGUSR2) == 0 && handled == 2);
}

static volatile int stop;

static void *maps(void *argument)
{
    while (!stop) {
        char *memory = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        memory[0] = 1;
        CHECK(munmap(memory, MIB) == 0);
    }
    return argument;
}

static void *blocks_and_maps(void *argument)
{
    sigset_t all;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
    maps(argument);
    sigset_t now;
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &now) == 0 && sigismember(&now, SIGBUS) && sigismember(&now, SIGTERM));
    return argument;
}

static void *argument_of_workers;

static void workers(void *(*work)(void *), size_t count, void (*meanwhile)(void))
{
    pthread_t thread[8];
    for (size_t i = 0; i < count; i++)
        CHECK(pthread_create(&thread[i], NULL, work, argument_of_workers) == 0);
    meanwhile();
    stop = 1;
    for (size_t i = 0; i < count; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

/* Workers block every signal, and are inside calls that change memory when the budget is reached. */
static void workers_that_block_everything(void)
{
    workers(blocks_and_maps, 3, grow);
}

static void mends(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    map_at((void *)((uintptr_t)info->si_addr / PAGE * PAGE), PAGE, MAP_FIXED);
    handled++;
}

static void *maps_and_faults(void *argument)
{
    maps(argument);
    sigset_t now;
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &now) == 0);
    for (int signal = 1; signal < SIGRTMIN; signal++)
        CHECK(!sigismember(&now, signal));
    char *forbidden = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *empty = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, *(int *)argument, 0);
    CHECK(forbidden != MAP_FAILED && empty != MAP_FAILED);
    CHECK(*(volatile char *)forbidden == 0 && *(volatile char *)empty == 0);
    return argument;
}

/* Workers block nothing, and are inside calls that change memory when the budget is reached. Such calls block
 * all signals for a moment. Formerly that mask was taken for the one that the program had asked for, and the
 * program's next fault of its own ended it. */
static void workers_that_block_nothing(void)
{
    struct sigaction action = { .sa_sigaction = mends, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    char name[] = "empty-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    argument_of_workers = &file;
    workers(maps_and_faults, 8, grow);
}

static void change_ids(void)
{
    for (int i = 0; i < 3000; i++)
        CHECK(setresuid(getuid(), getuid(), getuid()) == 0);
}

/* libc makes every thread change its ids, by a signal of its own. */
static void ids_of_all_threads(void)
{
    grow();
    workers(maps, 4, change_ids);
}

static void *grow_alone(void *argument)
{
    usleep(20000);
    grow();
    VERIFY(area, LARGE, 1);
    exit(argument == NULL ? 0 : 1);
}

static void main_thread_ends(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, grow_alone, NULL) == 0);
    pthread_exit(NULL);
}

static void *nothing(void *argument)
{
    return argument;
}

/* Threads run on stacks that nobody has touched, and that end at any place in a page. */
static void stacks_never_touched(void)
{
    grow();
    char *stacks = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stacks != MAP_FAILED);
    for (size_t i = 0; i < 64; i++) {
        pthread_attr_t attributes;
        pthread_t thread;
        CHECK(pthread_attr_init(&attributes) == 0);
        CHECK(pthread_attr_setstack(&attributes, stacks + i * MIB + i * 64 % PAGE, 64 * 1024 + i * 64) == 0);
        CHECK(pthread_create(&thread, &attributes, nothing, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
}

static char stack[64 * 1024] __attribute__((aligned(16)));
static sigjmp_buf jump;

static void jumps(int signal)
{
    (void)signal;
    handled++;
    siglongjmp(jump, 1);
}

static void runs_true(void)
{
    char *words[] = { "true", NULL };
    execve("/bin/true", words, environ);
    _exit(3);
}

/* A child as posix_spawn of newer libcs makes it: on its parent's memory, with all handlers taken away. */
static void child_without_handlers(void)
{
    struct sigaction action = { .sa_handler = jumps };
    CHECK(sigaction(SIGBUS, &action, NULL) == 0);
    grow();
    struct clone_args arguments = { .flags = CLONE_VM | CLONE_VFORK | CLONE_CLEAR_SIGHAND,
                                    .exit_signal = SIGCHLD,
                                    .stack = (uint64_t)stack,
                                    .stack_size = sizeof stack };
    register void (*run)(void) __asm__("r12") = runs_true;
    long child;
    __asm__ volatile("syscall; test %%rax, %%rax; jnz 1f; call *%%r12; hlt; 1:"
                     : "=a"(child)
                     : "0"(435L), "D"(&arguments), "S"(sizeof arguments), "r"(run)
                     : "rcx", "r11", "memory");
    int status;
    CHECK(child > 0 && waitpid((pid_t)child, &status, 0) == child && status == 0);
    struct sigaction now;
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == jumps);
    /* A SIGBUS that isn't about Farpage: beyond the end of a file. */
    int file = memfd_create("short", 0);
    CHECK(file >= 0 && ftruncate(file, PAGE) == 0);
    volatile char *memory = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (sigsetjmp(jump, 1) == 0)
        memory[PAGE] = 1;
    CHECK(handled == 1);
    VERIFY(area, LARGE, 1);
}

/* A clone that fails uses nothing up. */
static void clones_that_fail(void)
{
    grow();
    for (int i = 0; i < 40000; i++)
        CHECK(call(SYS_clone, CLONE_VM | CLONE_THREAD, (long)stack + 60000, 0, 0, 0, 0) == -EINVAL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

static int maps_by_itself(void *argument)
{
    (void)argument;
    if (call(SYS_mmap, 0, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) < 0)
        return 1;
    runs_true();
    return 2;
}

/* A copy of the process, on a stack of its own. */
static void copy_on_another_stack(void)
{
    grow();
    pid_t child = clone(maps_by_itself, stack + sizeof stack, SIGCHLD, NULL);
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void *has_no_stack_of_ours(void *argument)
{
    stack_t found;
    CHECK(sigaltstack(NULL, &found) == 0 && found.ss_flags == SS_DISABLE);
    return argument;
}

static void *makes_threads(void *argument)
{
    pthread_t thread;
    while (!stop)
        CHECK(pthread_create(&thread, NULL, has_no_stack_of_ours, NULL) == 0 && pthread_join(thread, NULL) == 0);
    return argument;
}

/* Threads are being made by other threads while all are told of the budget. */
static void threads_made_meanwhile(void)
{
    workers(makes_threads, 4, grow);
    VERIFY(area, LARGE, 1);
}

static void fill_area(void)
{
    fill(area, LARGE, 1);
}

static void on_nothing(int number)
{
    (void)number;
}

/* The first thread that comes here has an alternate stack of its own. */
static void *forks(void *argument)
{
    static volatile int is_second;
    char *own = __sync_fetch_and_add(&is_second, 1) ? NULL : malloc(16 * 1024);
    stack_t set = { .ss_sp = own, .ss_size = 16 * 1024, .ss_flags = own == NULL ? SS_DISABLE : 0 };
    CHECK(sigaltstack(&set, NULL) == 0);
    while (!stop) {
        pid_t child = fork();
        if (child == 0) {
            stack_t found;
            struct sigaction action;
            CHECK(sigaltstack(NULL, &found) == 0 && found.ss_flags == set.ss_flags);
            CHECK(own == NULL || (found.ss_sp == own && found.ss_size == set.ss_size));
            for (int i = 0; i < 2; i++) {
                CHECK(sigaction(i == 0 ? SIGBUS : SIGSYS, NULL, &action) == 0);
                CHECK(action.sa_handler == on_nothing && (action.sa_flags & SA_NODEFER) != 0);
            }
            _exit(0);
        }
        int status = 0;
        CHECK(child > 0 ? waitpid(child, &status, 0) == child && status == 0 : errno == ENOMEM);
    }
    return argument;
}

/* A copy of the process that is made just while its threads are told has nothing of Farpage's in its way. */
static void forks_meanwhile(void)
{
    struct sigaction action = { .sa_handler = on_nothing, .sa_flags = SA_NODEFER };
    CHECK(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSYS, &action, NULL) == 0);
    area = map(LARGE);
    workers(forks, 2, fill_area);
    VERIFY(area, LARGE, 1);
}

/* A fork's child is told before it has its memory. What the kernel wrote to the child's stack for handlers then
 * could be lost, and the child went on where its parent had been long ago, or nowhere. So the kernel must
 * write nothing there. */
static void child_whose_stack_is_out(void)
{
    enum { BYTES = 64 * 1024 };
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
    void *own = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED);
    stack_t set = { .ss_sp = own, .ss_size = BYTES };
    CHECK(sigaltstack(&set, NULL) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        stack_t found;
        CHECK(sigaltstack(NULL, &found) == 0 && found.ss_sp == own && found.ss_flags == 0);
        VERIFY(area, LARGE, 1);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    VERIFY(area, LARGE, 1);
}

static volatile int forked;

/* A call that takes long keeps threads that fork waiting. */
static void *maps_for_long(void *argument)
{
    const int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
    while (!stop) {
        char *memory = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, flags, -1, 0);
        CHECK(memory != MAP_FAILED && munmap(memory, LARGE) == 0);
    }
    return argument;
}

static void *forks_and_asks(void *argument)
{
    static volatile int is_second;
    if (!__sync_fetch_and_add(&is_second, 1))
        return maps_for_long(argument);
    while (!stop) {
        pid_t child = fork();
        if (child == 0) {
            sigset_t blocked;
            CHECK(sigprocmask(SIG_BLOCK, NULL, &blocked) == 0);
            CHECK(!sigismember(&blocked, SIGSEGV) && !sigismember(&blocked, SIGBUS) && !sigismember(&blocked, SIGSYS));
            _exit(0);
        }
        int status = 0;
        CHECK(child > 0 ? waitpid(child, &status, 0) == child && status == 0 : errno == ENOMEM);
        __sync_fetch_and_add(&forked, 1);
    }
    return argument;
}

static void fill_area_beside_forks(void)
{
    while (forked < 32)
        sched_yield();
    /* Past the budget: all threads have been told. */
    fill(area, LARGE / 2, 1);
    stop = 1;
    fill_area();
}

/* Threads are told while they wait to fork, with some signals blocked. Formerly a child of such a thread had
 * those signals blocked, too. The first access that the program forbids then ended the child. */
static void forks_that_wait_meanwhile(void)
{
    area = map(LARGE);
    workers(forks_and_asks, 8, fill_area_beside_forks);
    VERIFY(area, LARGE, 1);
}

static int ends[2];
static volatile int cleaned;

static void cleans(void *argument)
{
    (void)argument;
    cleaned = 1;
}

static void *waits(void *argument)
{
    pthread_cleanup_push(cleans, NULL);
    char byte;
    CHECK(read(ends[0], &byte, 1) < 0);
    pthread_cleanup_pop(0);
    return argument;
}

static void thread_that_is_cancelled(void)
{
    grow();
    CHECK(pipe(ends) == 0);
    pthread_t thread;
    void *result;
    CHECK(pthread_create(&thread, NULL, waits, NULL) == 0);
    usleep(50000);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
    CHECK(result == PTHREAD_CANCELED && cleaned);
}

static volatile int answer = -1;

/* A handler may set an alternate stack in a thread that has none. */
static void on_no_stack(int number)
{
    static char another[16 * 1024];
    stack_t set = { .ss_sp = another, .ss_size = sizeof another };
    (void)number;
    answer = sigaltstack(&set, NULL);
}

/* The program's own alternate stack and mask are what the program has set. */
static void what_the_program_believes(void)
{
    static char own[16 * 1024];
    stack_t set = { .ss_sp = own, .ss_size = sizeof own }, found;
    CHECK(sigaltstack(&set, NULL) == 0);
    sigset_t bus, before;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    CHECK(pthread_sigmask(SIG_BLOCK, &bus, NULL) == 0);
    grow();
    CHECK(sigaltstack(NULL, &found) == 0);
    CHECK(found.ss_sp == own && found.ss_size == sizeof own && found.ss_flags == 0);
    /* A child of vfork sets and gets its own mask and stack. */
    pid_t child = vfork();
    if (child == 0) {
        sigset_t all;
        sigfillset(&all);
        stack_t none = { .ss_flags = SS_DISABLE };
        _exit(sigprocmask(SIG_SETMASK, &all, NULL) != 0 || sigaltstack(&none, NULL) != 0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(sigaltstack(NULL, &found) == 0 && found.ss_sp == own && found.ss_flags == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &before) == 0 && !sigismember(&before, SIGSYS));
    CHECK(pthread_sigmask(SIG_UNBLOCK, &bus, &before) == 0 && sigismember(&before, SIGBUS));
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &before) == 0 && !sigismember(&before, SIGBUS));
    set.ss_size = 100;
    CHECK(sigaltstack(&set, NULL) == -1 && errno == ENOMEM);
    set.ss_flags = SS_DISABLE;
    CHECK(sigaltstack(&set, NULL) == 0 && sigaltstack(NULL, &found) == 0 && found.ss_flags == SS_DISABLE);
    struct sigaction action = { .sa_handler = on_no_stack, .sa_flags = SA_ONSTACK };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0 && raise(SIGUSR1) == 0 && answer == 0);
    VERIFY(area, LARGE, 1);
}

/* A handler may say what is to be blocked from now on, also a handler of the very signals that Farpage
 * needs. */
static void mends_and_blocks_all(int number, siginfo_t *info, void *context)
{
    (void)number;
    map_at((void *)((uintptr_t)info->si_addr / PAGE * PAGE), PAGE, MAP_FIXED);
    sigfillset(&((ucontext_t *)context)->uc_sigmask);
}

static void handlers_that_block_from_now_on(void)
{
    struct sigaction action = { .sa_sigaction = mends_and_blocks_all, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    char name[] = "empty-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    grow();
    for (int kind = 0; kind < 2; kind++) {
        char *place = kind == 0 ? mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, file, 0)
                                : mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(place != MAP_FAILED && *(volatile char *)place == 0);
        push_out();
        VERIFY(area, LARGE, 1);
        sigset_t none;
        sigemptyset(&none);
        CHECK(sigprocmask(SIG_SETMASK, &none, NULL) == 0);
    }
}

/* A collector's write barrier makes memory read-only, and a signal tells it of the first write to each page.
 * Memory that is out must cause no such signal. An access where the program has no mapping causes one, as
 * without Farpage. */
static volatile size_t barriers, wrong_address, null_accesses, unwound;
static char *old_objects;

static void write_barriers(void);

/* Whether an unwinder finds its way from a handler to where the signal came. Crash handlers and exceptions
 * use an unwinder. */
static int is_unwound(void)
{
    void *frames[64];
    int count = backtrace(frames, 64);
    for (int at = 0; at < count; at++)
        if ((uintptr_t)frames[at] - (uintptr_t)write_barriers < PAGE)
            return 1;
    return 0;
}

static void on_barrier(int number, siginfo_t *info, void *context)
{
    char *address = info->si_addr;
    (void)context;
    if (address < (char *)PAGE) {
        null_accesses += info->si_code == SEGV_MAPERR;
        unwound += is_unwound();
        siglongjmp(jump, number);
    }
    if (address < old_objects || address >= old_objects + LARGE / 2 || info->si_code != SEGV_ACCERR)
        wrong_address++;
    barriers++;
    mprotect((char *)((uintptr_t)address / PAGE * PAGE), PAGE, PROT_READ | PROT_WRITE);
}

static void write_barriers(void)
{
    struct sigaction action = { .sa_sigaction = on_barrier, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    /* The first call loads a library. */
    CHECK(is_unwound());
    grow();
    old_objects = area;
    CHECK(mprotect(old_objects, LARGE / 2, PROT_READ) == 0);
    VERIFY(old_objects, LARGE / 2, 1);
    CHECK(barriers == 0);
    volatile char *nowhere = NULL;
    for (size_t page = 0; page < LARGE / 2 / PAGE; page += 7) {
        ((volatile uint64_t *)(old_objects + page * PAGE))[3] = word_of(1, page, 3);
        if (page % 100 == 0 && sigsetjmp(jump, 1) == 0)
            *nowhere = 1;
    }
    CHECK(wrong_address == 0 && barriers == (LARGE / 2 / PAGE + 6) / 7 && null_accesses == (LARGE / 2 / PAGE + 699) / 700);
    CHECK(unwound == null_accesses);
    CHECK(sigaction(SIGSEGV, NULL, &action) == 0 && action.sa_sigaction == on_barrier && (action.sa_flags & SA_SIGINFO));
    CHECK(mprotect(old_objects, LARGE / 2, PROT_READ | PROT_WRITE) == 0);
    VERIFY(area, LARGE, 1);
}

/* One thread sends another the signals that Farpage uses itself. The other thread runs into memory that is
 * out all the time. Its handler touches the very page that was just being brought in, or that a call was just
 * given, or any page while mappings change. A signal that meets one of the kernel's own that isn't delivered
 * yet is lost in the kernel. So a signal that isn't heard is sent again. */
static char *volatile current;
static volatile int heard, repeated;

static void on_sent(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    int word = info->si_value.sival_int;
    /* A signal that was sent again may be heard after the next one. */
    CHECK(info->si_code == SI_QUEUE && info->si_pid == getpid() && (word == heard + 1 || (word <= heard && repeated > 0)));
    sum += (unsigned char)*current;
    if (word > heard)
        __atomic_store_n(&heard, word, __ATOMIC_SEQ_CST);
}

static void *sends(void *to)
{
    static const int ours[] = { SIGBUS, SIGSEGV };
    for (int word = 1; word <= 6000; word++) {
        union sigval value = { .sival_int = word };
        for (int tries = 0; __atomic_load_n(&heard, __ATOMIC_SEQ_CST) != word; tries++) {
            if (tries == 1000)
                FAIL("signal %d was sent a thousand times and not heard: the %d.", ours[word % 2], word);
            repeated += tries > 0;
            CHECK(pthread_sigqueue(*(pthread_t *)to, ours[word % 2], value) == 0);
            for (int turns = 0; turns < 200 && __atomic_load_n(&heard, __ATOMIC_SEQ_CST) != word; turns++)
                if (turns > 10)
                    usleep(50);
        }
    }
    stop = 1;
    return NULL;
}

static void sent_while_at_work(void)
{
    struct sigaction action = { .sa_sigaction = on_sent, .sa_flags = SA_SIGINFO | SA_RESTART };
    CHECK(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    grow();
    current = area;
    int null = open("/dev/null", O_WRONLY);
    pthread_t self = pthread_self(), sender;
    CHECK(null >= 0 && pthread_create(&sender, NULL, sends, &self) == 0);
    for (uint64_t turn = 1; !stop; turn++) {
        current = area + mix(turn) % (LARGE / PAGE) * PAGE;
        if (turn % 8 == 0) {
            char *memory = map(MIB);
            memory[0] = 1;
            CHECK(munmap(memory, MIB) == 0);
        } else if (turn % 4 == 0)
            CHECK(write(null, current, PAGE) == PAGE);
        else
            sum += (unsigned char)*current;
    }
    CHECK(pthread_join(sender, NULL) == 0 && heard == 6000 && repeated < 600);
    VERIFY(area, LARGE, 1);
}

static volatile int is_filled;
static size_t interrupted;

static void *polls(void *argument)
{
    while (!is_filled)
        if (poll(NULL, 0, 0) == -1) {
            CHECK(errno == EINTR);
            __atomic_fetch_add(&interrupted, 1, __ATOMIC_RELAXED);
        }
    return argument;
}

/* Nobody sends this program a signal, so none of its calls is interrupted. Eight threads do nothing but ask
 * whether there is something to do. Each thread is armed in such a call, but was in no call when the keeper
 * asked it. */
static void nothing_interrupts(void)
{
    pthread_t threads[8];
    for (size_t i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], NULL, polls, NULL) == 0);
    grow();
    is_filled = 1;
    for (size_t i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    if (interrupted != 0)
        FAIL("%zu calls were interrupted", interrupted);
}

static volatile int are_waiting;

static void *sleeps(void *argument)
{
    struct timespec time = { .tv_sec = 3 };
    __atomic_fetch_add(&are_waiting, 1, __ATOMIC_SEQ_CST);
    CHECK(nanosleep(&time, NULL) == 0);
    return argument;
}

static void *sleeps_by_the_clock(void *argument)
{
    struct timespec time = { .tv_sec = 3 };
    __atomic_fetch_add(&are_waiting, 1, __ATOMIC_SEQ_CST);
    CHECK(clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL) == 0);
    return argument;
}

static void *waits_for_nothing(void *argument)
{
    __atomic_fetch_add(&are_waiting, 1, __ATOMIC_SEQ_CST);
    CHECK(poll(NULL, 0, 3000) == 0);
    return argument;
}

/* Stops this process and has it go on, as a shell does. Waiting calls go on as another call (restart_syscall). */
static void be_stopped(void)
{
    pid_t self = getpid(), child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        usleep(200000);
        kill(self, SIGSTOP);
        usleep(200000);
        kill(self, SIGCONT);
        _exit(0);
    }
    CHECK(waitpid(child, NULL, 0) == child);
}

/* The program was stopped while its threads waited, and went on. When the threads were armed later, their calls
 * failed with EINTR, though nobody had sent a signal that they handle. */
static void nothing_interrupts_after_a_stop(void)
{
    void *(*const all[])(void *) = { sleeps, sleeps_by_the_clock, waits_for_nothing };
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, all[i], NULL) == 0);
    while (are_waiting < 3)
        usleep(1000);
    be_stopped();
    grow();
    for (size_t i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static volatile int is_in_handler, may_leave;

static void computes_for_long(int signal)
{
    (void)signal;
    is_in_handler = 1;
    while (!may_leave)
        ;
}

static void *waits_for_a_signal(void *argument)
{
    CHECK(pause() == -1 && errno == EINTR);
    return argument;
}

/* A handler blocks all signals by a call past libc, that of libc's and Farpage's, too. The thread is armed when the
 * handler returns, after it has ended a call. The thread waited for the next signal for ever: the call was taken
 * for one that the arming had ended. */
static void handler_that_ends_a_wait(void)
{
    struct sigaction action = { .sa_handler = computes_for_long };
    uint64_t words[4];
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(call(SYS_rt_sigaction, SIGUSR1, 0, (long)words, 8, 0, 0) == 0);
    words[3] = ~0ul;
    CHECK(call(SYS_rt_sigaction, SIGUSR1, (long)words, 0, 8, 0, 0) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waits_for_a_signal, NULL) == 0);
    usleep(100000);
    while (!is_in_handler) {
        CHECK(pthread_kill(thread, SIGUSR1) == 0);
        usleep(10000);
    }
    char *first = filled(40 * MIB, 2);
    usleep(300000);
    may_leave = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    grow();
    VERIFY(first, 40 * MIB, 2);
}

static volatile int has_enough;

static void first_handler(int signal)
{
    (void)signal;
}

static void second_handler(int signal)
{
    (void)signal;
}

static struct sigaction first_or_second(int second)
{
    struct sigaction action = { .sa_handler = second ? second_handler : first_handler };
    action.sa_flags = second ? SA_RESTART : SA_NODEFER;
    CHECK(sigaddset(&action.sa_mask, second ? SIGTERM : SIGHUP) == 0);
    return action;
}

static void *changes_a_handler(void *argument)
{
    for (int i = 0; !has_enough; i++) {
        struct sigaction action = first_or_second(i % 2);
        CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    }
    return argument;
}

/* A child had one handler's address with another's mask, because another thread was changing the handler when the
 * child was made. */
static void handlers_change_during_forks(void)
{
    struct sigaction action = first_or_second(0);
    pthread_t thread;
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
    grow();
    CHECK(pthread_create(&thread, NULL, changes_a_handler, NULL) == 0);
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            struct sigaction found;
            CHECK(sigaction(SIGUSR2, NULL, &found) == 0);
            struct sigaction wanted = first_or_second(found.sa_handler == second_handler);
            CHECK(found.sa_handler == wanted.sa_handler);
            CHECK((found.sa_flags & (SA_RESTART | SA_NODEFER)) == wanted.sa_flags);
            CHECK(sigismember(&found.sa_mask, SIGTERM) == sigismember(&wanted.sa_mask, SIGTERM));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    has_enough = 1;
    CHECK(pthread_join(thread, NULL) == 0);
}

static volatile int has_waited;

static void waits_once(int signal)
{
    (void)signal;
    has_waited = poll(NULL, 0, 2000) == 0;
}

static void *waits_in_a_handler(void *argument)
{
    stack_t other = { .ss_sp = map(64 * 1024), .ss_size = 64 * 1024 };
    CHECK(sigaltstack(&other, NULL) == 0 && raise(SIGUSR1) == 0);
    return argument;
}

/* A handler on a stack of its own waits in one call. Formerly the handler was asked again and again to come
 * to Farpage. Each time the call began anew, for ever. */
static void handler_that_waits(void)
{
    struct sigaction action = { .sa_handler = waits_once, .sa_flags = SA_ONSTACK };
    pthread_t thread;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, waits_in_a_handler, NULL) == 0);
    area = filled(LARGE, 1);
    CHECK(pthread_join(thread, NULL) == 0 && has_waited);
    push_out();
    REQUIRE_OUT(area, LARGE);
    VERIFY(area, LARGE, 1);
}

MAIN({ "handlers_that_block_everything", handlers_that_block_everything },
     { "workers_that_block_everything", workers_that_block_everything },
     { "workers_that_block_nothing", workers_that_block_nothing }, { "ids_of_all_threads", ids_of_all_threads },
     { "main_thread_ends", main_thread_ends }, { "stacks_never_touched", stacks_never_touched },
     { "child_without_handlers", child_without_handlers }, { "clones_that_fail", clones_that_fail },
     { "copy_on_another_stack", copy_on_another_stack }, { "thread_that_is_cancelled", thread_that_is_cancelled },
     { "what_the_program_believes", what_the_program_believes }, { "threads_made_meanwhile", threads_made_meanwhile },
     { "forks_meanwhile", forks_meanwhile }, { "child_whose_stack_is_out", child_whose_stack_is_out }, { "forks_that_wait_meanwhile", forks_that_wait_meanwhile }, { "write_barriers", write_barriers },
     { "sent_while_at_work", sent_while_at_work }, { "nothing_interrupts", nothing_interrupts },
     { "nothing_interrupts_after_a_stop", nothing_interrupts_after_a_stop },
     { "handler_that_ends_a_wait", handler_that_ends_a_wait },
     { "handlers_change_during_forks", handlers_change_during_forks },
     { "handler_that_waits", handler_that_waits },
     { "handlers_that_block_from_now_on", handlers_that_block_from_now_on })

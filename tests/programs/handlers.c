/* Handlers run where the kernel alone would have run them, and find what they would have found. Formerly all
 * handlers of the program ran on a stack of Farpage's. If a handler went on elsewhere, its next fault or call
 * overwrote what it had left on that stack. */
#include "check.h"
#include <poll.h>
#include <setjmp.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <ucontext.h>

#define AUTODISARM (1u << 31)

static char own[64 * 1024], another[64 * 1024];
static char *area;
static volatile int handled;

static void grow(void)
{
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
}

static int is_on(const char *stack, size_t bytes, const void *place)
{
    return (const char *)place >= stack && (const char *)place < stack + bytes;
}

static void use_stack(void *place, size_t bytes, unsigned flags)
{
    stack_t set = { .ss_sp = place, .ss_size = bytes, .ss_flags = (int)flags };
    CHECK(sigaltstack(&set, NULL) == 0);
}

static void handle(int number, void (*handler)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags };
    sigaddset(&action.sa_mask, SIGSYS);
    CHECK(sigaction(number, &action, NULL) == 0);
}

static stack_t stack_now(void)
{
    stack_t found;
    CHECK(sigaltstack(NULL, &found) == 0);
    return found;
}

static int is_blocked(int number)
{
    sigset_t now;
    CHECK(sigprocmask(SIG_BLOCK, NULL, &now) == 0);
    return sigismember(&now, number);
}

static char *outer_frame;

static void finds_its_own_stack(int number, siginfo_t *info, void *context)
{
    char here;
    const ucontext_t *interrupted = context;
    CHECK(is_on(own, sizeof own, &here) && is_on(own, sizeof own, info) && is_on(own, sizeof own, context));
    CHECK(is_on(own, sizeof own, interrupted->uc_mcontext.fpregs));
    CHECK((uintptr_t)interrupted->uc_mcontext.fpregs % 64 == 0 && (uintptr_t)context % 16 == 0);
    CHECK(interrupted->uc_stack.ss_sp == own && interrupted->uc_stack.ss_size == sizeof own);
    CHECK(info->si_signo == number && info->si_pid == getpid() && info->si_uid == getuid());
    stack_t now = stack_now();
    CHECK(now.ss_sp == own && now.ss_flags == SS_ONSTACK);
    stack_t set = { .ss_sp = another, .ss_size = sizeof another };
    CHECK(sigaltstack(&set, NULL) == -1 && errno == EPERM);
    CHECK(is_blocked(number) && is_blocked(SIGSYS) && is_blocked(SIGBUS) && !is_blocked(SIGTERM));
    CHECK(sigismember(&interrupted->uc_sigmask, SIGBUS));
    CHECK(sigismember(&interrupted->uc_sigmask, SIGSYS) == (number == SIGUSR2));
    if (number == SIGUSR1) {
        /* The next handler's frame goes below this one. */
        outer_frame = &here;
        CHECK(raise(SIGUSR2) == 0);
    } else {
        CHECK(&here < outer_frame);
    }
    handled++;
}

static void on_its_own_stack(void)
{
    use_stack(own, sizeof own, 0);
    sigset_t bus;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    CHECK(sigprocmask(SIG_BLOCK, &bus, NULL) == 0);
    handle(SIGUSR1, finds_its_own_stack, SA_ONSTACK);
    for (int round = 0; round < 3; round++) {
        handle(SIGUSR2, finds_its_own_stack, SA_ONSTACK);
        handled = 0;
        CHECK(raise(SIGUSR1) == 0 && handled == 2);
        CHECK(stack_now().ss_flags == 0 && is_blocked(SIGBUS) && !is_blocked(SIGSYS) && !is_blocked(SIGUSR1));
        if (round == 0)
            grow();
        push_out();
    }
    struct sigaction found;
    CHECK(sigaction(SIGUSR1, NULL, &found) == 0 && found.sa_sigaction == finds_its_own_stack);
    CHECK((found.sa_flags & (SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER)) == (SA_SIGINFO | SA_ONSTACK));
    CHECK(sigismember(&found.sa_mask, SIGSYS) && !sigismember(&found.sa_mask, SIGTERM));
    VERIFY(area, LARGE, 1);
}

static char *interrupted_frame;

static void finds_the_interrupted_stack(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)info, (void)context;
    CHECK(&here < interrupted_frame && interrupted_frame - &here < 64 * 1024);
    handled++;
}

static void on_the_interrupted_stack(void)
{
    char here;
    interrupted_frame = &here;
    use_stack(own, sizeof own, 0);
    handle(SIGUSR1, finds_the_interrupted_stack, 0);
    CHECK(raise(SIGUSR1) == 0);
    grow();
    handle(SIGUSR2, finds_the_interrupted_stack, 0);
    CHECK(raise(SIGUSR1) == 0 && raise(SIGUSR2) == 0 && handled == 3);
    /* There is no alternate stack, though the handler asks for one: it runs on the interrupted stack. */
    use_stack(NULL, 0, SS_DISABLE);
    handle(SIGUSR1, finds_the_interrupted_stack, SA_ONSTACK);
    CHECK(raise(SIGUSR1) == 0 && handled == 4);
}

static void has_put_it_away(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)info;
    stack_t told = ((ucontext_t *)context)->uc_stack;
    CHECK(is_on(own, sizeof own, &here) && told.ss_sp == own && told.ss_flags == (int)AUTODISARM);
    CHECK(stack_now().ss_flags == SS_DISABLE);
    /* The handler's own setting is forgotten when the handler returns. */
    use_stack(another, sizeof another, 0);
    CHECK(stack_now().ss_sp == another && stack_now().ss_flags == 0);
    handled++;
}

static void stacks_put_away(void)
{
    use_stack(own, sizeof own, AUTODISARM);
    handle(SIGUSR1, has_put_it_away, SA_ONSTACK);
    CHECK(raise(SIGUSR1) == 0 && stack_now().ss_sp == own);
    grow();
    for (int round = 0; round < 3; round++) {
        CHECK(raise(SIGUSR1) == 0 && handled == round + 2);
        CHECK(stack_now().ss_sp == own && stack_now().ss_flags == (int)AUTODISARM);
    }
}

static void once(int number, siginfo_t *info, void *context)
{
    struct sigaction found;
    (void)info, (void)context;
    CHECK(sigaction(number, NULL, &found) == 0 && found.sa_handler == SIG_DFL);
    handled++;
}

/* A handler that is reset before it runs (SA_RESETHAND), and errors, which are the kernel's own. */
static void handlers_come_and_go(void)
{
    struct sigaction found, ignore = { .sa_handler = SIG_IGN };
    grow();
    for (int round = 0; round < 2; round++) {
        handle(SIGUSR1, once, (int)SA_RESETHAND);
        CHECK(raise(SIGUSR1) == 0 && handled == round + 1);
        CHECK(sigaction(SIGUSR1, &ignore, &found) == 0 && found.sa_handler == SIG_DFL);
        CHECK(raise(SIGUSR1) == 0);
    }
    handle(SIGUSR1, once, 0);
    CHECK(sigaction(SIGUSR1, &ignore, &found) == 0 && found.sa_sigaction == once);
    CHECK(sigaction(SIGUSR1, NULL, &found) == 0 && found.sa_handler == SIG_IGN);
    CHECK(sigaction(SIGKILL, &ignore, NULL) == -1 && errno == EINVAL);
    handle(SIGUSR1, once, 0);
    CHECK(call(SYS_rt_sigaction, 65, 0, 0, 8, 0, 0) == -EINVAL);
    CHECK(call(SYS_rt_sigaction, 0, 0, 0, 8, 0, 0) == -EINVAL);
    CHECK(call(SYS_rt_sigaction, SIGUSR1, 0, 0, 16, 0, 0) == -EINVAL);
    CHECK(call(SYS_rt_sigaction, SIGSTOP, (long)&found, 0, 8, 0, 0) == -EINVAL);
    CHECK(call(SYS_rt_sigaction, SIGUSR1, 8, 0, 8, 0, 0) == -EFAULT);
}

/* ---- a handler that goes on on another stack while it still needs its own ---- */

static ucontext_t on_handlers_stack, elsewhere;
static char *elsewhere_stack;
static uint64_t word_seen;

static void goes_on(void)
{
    for (int round = 0; round < 3; round++) {
        volatile char deep[20000];
        memset((char *)deep, round, sizeof deep);
        for (size_t at = 0; at < LARGE; at += 64 * PAGE)
            word_seen += *(volatile uint64_t *)(area + at);
        char *memory = map(2 * MIB);
        memory[MIB] = deep[100];
        CHECK(munmap(memory, 2 * MIB) == 0 && getppid() != 0);
    }
    pid_t child;
    char *const arguments[] = { "true", NULL };
    int status;
    CHECK(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void leaves_its_stack(int number, siginfo_t *info, void *context)
{
    char kept[8000];
    for (size_t at = 0; at < sizeof kept; at++)
        kept[at] = (char)(at + (size_t)number);
    siginfo_t info_before = *info;
    ucontext_t context_before = *(ucontext_t *)context;
    CHECK(getcontext(&elsewhere) == 0);
    elsewhere.uc_stack.ss_sp = elsewhere_stack;
    elsewhere.uc_stack.ss_size = MIB;
    elsewhere.uc_link = &on_handlers_stack;
    makecontext(&elsewhere, goes_on, 0);
    CHECK(swapcontext(&on_handlers_stack, &elsewhere) == 0);
    for (size_t at = 0; at < sizeof kept; at++)
        CHECK(((volatile char *)kept)[at] == (char)(at + (size_t)number));
    CHECK(memcmp(info, &info_before, sizeof info_before) == 0);
    CHECK(memcmp(context, &context_before, sizeof context_before) == 0);
    if (number == SIGSEGV)
        ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += 3;
    handled++;
}

static void goes_on_elsewhere(void)
{
    use_stack(own, sizeof own, 0);
    elsewhere_stack = map(MIB);
    handle(SIGUSR1, leaves_its_stack, SA_ONSTACK);
    handle(SIGSEGV, leaves_its_stack, SA_ONSTACK);
    grow();
    for (int round = 0; round < 3; round++) {
        CHECK(raise(SIGUSR1) == 0 && handled == 2 * round + 1);
        push_out();
        /* An access through a null pointer, as in a managed language. */
        uint64_t before = 5, after;
        __asm__ volatile("mov %1, %0\n\txor %%ecx, %%ecx\n\tmov (%%rcx), %%rax" /* three bytes */
                         : "=&r"(after)
                         : "r"(before)
                         : "rax", "rcx", "memory");
        CHECK(after == 5 && handled == 2 * round + 2);
    }
    VERIFY(area, LARGE, 1);
}

/* ---- a stack that is out when a signal comes ---- */

static char *far_stack;
static ucontext_t home, far;
static pthread_t target;

static volatile int is_spinning;

/* Touches nothing of its stack. */
static __attribute__((noinline)) void spin(void)
{
    while (!handled)
        ;
}

static void spins(void)
{
    volatile uint64_t mark = 77;
    is_spinning = 1;
    spin();
    CHECK(mark == 77);
}

static void is_far(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)info, (void)context;
    CHECK(is_on(far_stack, MIB, &here));
    handled = 1;
}

static void *pushes_and_signals(void *argument)
{
    while (!is_spinning)
        usleep(1000);
    for (int round = 0; round < 5 && pages_out(far_stack, MIB) < MIB / PAGE; round++)
        push_out();
    REQUIRE_OUT(far_stack + MIB - PAGE, PAGE);
    CHECK(pthread_kill(target, SIGUSR1) == 0);
    return argument;
}

static void stack_that_is_out(void)
{
    grow();
    far_stack = area + 8 * MIB;
    target = pthread_self();
    handle(SIGUSR1, is_far, 0);
    CHECK(getcontext(&far) == 0);
    far.uc_stack.ss_sp = far_stack;
    far.uc_stack.ss_size = MIB;
    far.uc_link = &home;
    makecontext(&far, spins, 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, pushes_and_signals, NULL) == 0);
    CHECK(swapcontext(&home, &far) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && handled);
    VERIFY(area, 8 * MIB, 1);
}

/* ---- calls that a handler interrupts ---- */

static int ends[2];
static char *buffer;

static void makes_calls(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    for (int i = 0; i < 3; i++)
        CHECK(stack_now().ss_flags == SS_ONSTACK);
    push_out();
    stack_now();
    push_out();
    handled = 1;
}

static void *interrupts(void *argument)
{
    usleep(50000);
    CHECK(pthread_kill(target, SIGUSR1) == 0);
    while (!handled)
        usleep(1000);
    usleep(20000);
    CHECK(write(ends[1], "twelve bytes", 12) == 12);
    return argument;
}

static char *stacks;

static void *reads(void *argument)
{
    target = pthread_self();
    use_stack(stacks + 2 * MIB, MIB, 0);
    for (int round = 0; round < 3; round++) {
        handled = 0;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupts, NULL) == 0);
        CHECK(read(ends[0], buffer, PAGE) == 12 && memcmp(buffer, "twelve bytes", 12) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    return argument;
}

/* Memory that the interrupted call holds stays held, though the handler makes calls on a stack at higher
 * addresses. */
static void call_goes_on_after_handler(void)
{
    stacks = map(3 * MIB);
    handle(SIGUSR1, makes_calls, SA_ONSTACK | SA_RESTART);
    grow();
    buffer = area + 5 * MIB;
    CHECK(pipe(ends) == 0);
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stacks, MIB) == 0);
    CHECK(pthread_create(&thread, &attributes, reads, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

/* ---- a large write that waits for room ---- */

static char *drained;
static size_t first, afterwards;

static void drain(size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = read(ends[0], drained + done, bytes - done);
        CHECK(got > 0);
        done += (size_t)got;
    }
}

static void is_at_home(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)info, (void)context;
    CHECK(is_on(own, sizeof own, &here) && stack_now().ss_flags == SS_ONSTACK);
    handled++;
}

static void *drains_and_interrupts(void *argument)
{
    drain(first);
    usleep(50000);
    CHECK(pthread_kill(target, SIGUSR1) == 0);
    while (!handled)
        usleep(1000);
    drain(afterwards);
    return argument;
}

static ssize_t write_interrupted(int flags, size_t drained_first, size_t drained_afterwards)
{
    handled = 0;
    first = drained_first;
    afterwards = drained_afterwards;
    handle(SIGUSR1, is_at_home, SA_ONSTACK | flags);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, drains_and_interrupts, NULL) == 0);
    ssize_t written = write(ends[1], area, 20 * MIB);
    int error = errno;
    CHECK(pthread_join(thread, NULL) == 0 && handled == 1);
    errno = error;
    return written;
}

/* A signal with a handler ends the write. The handler runs before it is known how the write ends: with a part
 * written, with nothing written, or made again. */
static void while_a_write_waits(void)
{
    use_stack(own, sizeof own, 0);
    target = pthread_self();
    grow();
    drained = map(24 * MIB);
    CHECK(pipe(ends) == 0);
    for (int restarts = 0; restarts < 2; restarts++) {
        ssize_t written = write_interrupted(restarts ? SA_RESTART : 0, 4 * MIB, 0);
        CHECK(written >= (ssize_t)(4 * MIB) && written < (ssize_t)(8 * MIB));
        VERIFY(drained, 4 * MIB, 1);
        size_t full = (size_t)written - 4 * MIB;
        if (!restarts)
            CHECK(write_interrupted(0, 0, full) == -1 && errno == EINTR);
        else
            CHECK(write_interrupted(SA_RESTART, 0, full + 20 * MIB) == (ssize_t)(20 * MIB));
        if (restarts)
            VERIFY(drained + full, 20 * MIB, 1);
    }
    CHECK(write_interrupted((int)SA_RESETHAND, MIB, 0) >= (ssize_t)MIB);
    struct sigaction found;
    CHECK(sigaction(SIGUSR1, NULL, &found) == 0 && found.sa_handler == SIG_DFL);
}

/* ---- what is blocked in calls that wait with another mask ---- */

static void is_interruptible(int number, siginfo_t *info, void *context)
{
    (void)info, (void)context;
    CHECK(is_blocked(number) && is_blocked(SIGSYS) && !is_blocked(SIGALRM) && !is_blocked(SIGTERM));
    handled++;
}

/* The mask of the call holds in its handlers, and the thread's own mask after the call. */
static void masks_of_waiting_calls(void)
{
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    CHECK(sigprocmask(SIG_SETMASK, &all, NULL) == 0);
    grow();
    handle(SIGUSR1, is_interruptible, 0);
    handle(SIGUSR2, is_interruptible, 0);
    struct timespec long_time = { .tv_sec = 60 };
    for (int round = 0; round < 20; round++) {
        handled = 0;
        CHECK(raise(SIGUSR1) == 0 && raise(SIGUSR2) == 0 && handled == 0);
        int answer = round % 3 == 0   ? sigsuspend(&none)
                     : round % 3 == 1 ? ppoll(NULL, 0, &long_time, &none)
                                      : pselect(0, NULL, NULL, NULL, &long_time, &none);
        CHECK(answer == -1 && errno == EINTR && handled == 2);
        CHECK(is_blocked(SIGALRM) && is_blocked(SIGBUS) && is_blocked(SIGUSR1));
    }
}

/* ---- signals all the time ---- */

static volatile int stop;

static void counts(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    handled++;
}

static void *sends(void *argument)
{
    sigset_t all;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
    while (!stop)
        CHECK(kill(argument == NULL ? getpid() : 0, handled % 2 ? SIGUSR1 : SIGUSR2) == 0);
    return NULL;
}

static void send_all_the_time(void *to_group, int flags, unsigned stack_flags, void (*meanwhile)(void))
{
    use_stack(own, sizeof own, stack_flags);
    grow();
    handle(SIGUSR1, counts, flags);
    handle(SIGUSR2, counts, flags);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sends, to_group) == 0);
    do
        meanwhile();
    while (handled < 1000);
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(stack_now().ss_sp == own && stack_now().ss_flags == (int)stack_flags);
    VERIFY(area, LARGE, 1);
}

static void makes_many_calls(void)
{
    for (int i = 0; i < 20000; i++)
        CHECK(getppid() != 0);
}

/* A handler returns from a stack that is already put back, and another signal comes. */
static void sent_while_returning(void)
{
    send_all_the_time(NULL, SA_ONSTACK, AUTODISARM, makes_many_calls);
}

/* A child hears no signal before its calls are looked at. */
static int is_born(void *argument)
{
    (void)argument;
    for (int i = 0; i < 10; i++)
        if (call(SYS_getppid, 0, 0, 0, 0, 0, 0) == 0)
            return 1;
    return 7;
}

static __attribute__((noinline)) pid_t child_on_this_stack(void)
{
    pid_t other = vfork();
    if (other == 0)
        _exit(is_born(NULL));
    return other;
}

static pid_t child_on_another_stack(void)
{
    static char stack[64 * 1024] __attribute__((aligned(16)));
    return clone(is_born, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
}

static void gives_birth(void)
{
    for (int i = 0; i < 60; i++) {
        pid_t other = i % 2 == 0 ? child_on_this_stack() : child_on_another_stack();
        int status;
        pid_t ended;
        do
            ended = waitpid(other, &status, 0);
        while (ended < 0 && errno == EINTR);
        CHECK(other > 0 && ended == other && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
}

static void sent_to_the_newborn(void)
{
    CHECK(setsid() > 0 || getpgrp() == getpid());
    send_all_the_time(own, SA_ONSTACK | SA_RESTART, 0, gives_birth);
}

static stack_t seen_stack;

static void looks(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)info;
    CHECK(is_on(own, sizeof own, &here));
    seen_stack = ((ucontext_t *)context)->uc_stack;
    CHECK(!sigismember(&((ucontext_t *)context)->uc_sigmask, SIGBUS));
    handled++;
}

/* A child of vfork changes its mask and its alternate stack, and ends. Its maker's own are unchanged. */
static void heard_after_a_child(void)
{
    use_stack(own, sizeof own, 0);
    grow();
    handle(SIGCHLD, looks, SA_ONSTACK);
    for (int round = 0; round < 20; round++) {
        pid_t other = vfork();
        if (other == 0) {
            sigset_t all;
            sigfillset(&all);
            stack_t none = { .ss_flags = SS_DISABLE };
            _exit(sigprocmask(SIG_SETMASK, &all, NULL) != 0 || sigaltstack(&none, NULL) != 0);
        }
        int status;
        CHECK(other > 0 && waitpid(other, &status, 0) == other && status == 0);
        CHECK(handled == round + 1 && seen_stack.ss_sp == own && seen_stack.ss_flags == 0);
        CHECK(stack_now().ss_sp == own && !is_blocked(SIGBUS) && !is_blocked(SIGTERM));
    }
}

/* A child of vfork waits for a byte, on memory and in a room that are its maker's. The maker is ended
 * meanwhile, as without Farpage. */
static void is_ended_while_it_waits(void)
{
    CHECK(signal(SIGALRM, SIG_DFL) != SIG_ERR);
    alarm(1);
    pid_t other = vfork();
    if (other == 0) {
        char byte;
        _exit(call(SYS_read, ends[0], (long)&byte, 1, 0, 0, 0) != 1);
    }
    _exit(9);
}

/* Returns the bytes of stack that a call uses. Where Go's runtime makes a child, its stack has less than 800
 * bytes left, with memory of something else below. */
static size_t stack_used_by(long number)
{
    enum { BYTES = 64 * 1024 };
    static unsigned char painted[BYTES] __attribute__((aligned(64)));
    memset(painted, 0xa5, BYTES);
    long answer;
    __asm__ volatile("mov %%rsp, %%rbx\n\tmov %2, %%rsp\n\tsyscall\n\ttest %%eax, %%eax\n\tjnz 1f\n\t"
                     "mov $60, %%eax\n\txor %%edi, %%edi\n\tsyscall\n1:\tmov %%rbx, %%rsp"
                     : "=a"(answer)
                     : "0"(number), "r"(painted + BYTES)
                     : "rbx", "rcx", "r11", "rdi", "memory");
    CHECK(answer > 0);
    if (number == SYS_vfork) {
        int status;
        CHECK(waitpid((pid_t)answer, &status, 0) == answer && status == 0);
    }
    size_t at = 0;
    while (at < BYTES && painted[at] == 0xa5)
        at++;
    return BYTES - at;
}

static void little_stack_is_used(void)
{
    grow();
    CHECK(stack_used_by(SYS_vfork) < 700);
    CHECK(stack_used_by(SYS_getppid) < 300);
}

/* ---- ends ---- */

static sigjmp_buf back;

static void jumps(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    handled++;
    siglongjmp(back, 1);
}

static void never_come_back(void)
{
    use_stack(own, sizeof own, 0);
    handle(SIGUSR1, jumps, SA_ONSTACK);
    grow();
    for (int round = 0; round < 200; round++) {
        if (sigsetjmp(back, 1) == 0)
            CHECK(raise(SIGUSR1) == 0);
        CHECK(stack_now().ss_flags == 0 && !is_blocked(SIGUSR1));
    }
    CHECK(handled == 200);
    VERIFY(area, LARGE, 1);
}

static __attribute__((noinline)) uint64_t recurse(uint64_t depth)
{
    volatile char frame[4096];
    frame[depth % 4096] = (char)depth;
    return depth > (1ul << 40) ? 0 : recurse(depth + 1) + (uint64_t)frame[depth % 4096];
}

static int status_of(void (*work)(void))
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit none = { 0, 0 }, some = { 8 * MIB, 8 * MIB };
        CHECK(setrlimit(RLIMIT_CORE, &none) == 0 && setrlimit(RLIMIT_STACK, &some) == 0);
        grow();
        work();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void never_runs(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    _exit(3);
}

static void overflows(void)
{
    handle(SIGSEGV, never_runs, 0);
    recurse(0);
}

/* Sends SIGUSR1 to this thread, with the stack pointer at `stack`. */
static void signal_on(char *stack)
{
    __asm__ volatile("mov %%rsp, %%rbx\n\tmov %0, %%rsp\n\tsyscall\n\tmov %%rbx, %%rsp"
                     :
                     : "r"(stack), "a"(SYS_tgkill), "D"(getpid()), "S"(call(SYS_gettid, 0, 0, 0, 0, 0, 0)), "d"(SIGUSR1)
                     : "rbx", "rcx", "r11", "memory");
}

/* The thread is already on its alternate stack, with less room left than a frame needs. */
static void has_too_small_a_stack(void)
{
    static char small[2048];
    use_stack(small, sizeof small, 0);
    handle(SIGUSR1, never_runs, SA_ONSTACK);
    signal_on(small + 600);
}

static void is_told(int number, siginfo_t *info, void *context)
{
    char here;
    (void)number, (void)context;
    CHECK(is_on(own, sizeof own, &here) && info->si_code == SI_KERNEL);
    _exit(4);
}

/* The stack has no room, but SIGSEGV has a handler on a stack with room. */
static void has_a_handler_elsewhere(void)
{
    char *stack = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED && mprotect(stack + PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    use_stack(own, sizeof own, 0);
    handle(SIGSEGV, is_told, SA_ONSTACK);
    handle(SIGUSR1, never_runs, 0);
    signal_on(stack + PAGE + 600);
}

static volatile int *volatile nothing_there;

static void crashes(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    *nothing_there = 1;
    handled++;
}

static void crashes_in_its_handler(void)
{
    handle(SIGSEGV, crashes, 0);
    *nothing_there = 1;
}

/* The kernel ends a process to which it can't deliver a signal, or raises SIGSEGV if SIGSEGV can be
 * delivered. */
static void nowhere_to_run(void)
{
    void (*const ways[])(void) = { overflows, has_too_small_a_stack, crashes_in_its_handler };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int status = status_of(ways[i]);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    int status = status_of(has_a_handler_elsewhere);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 4);
    CHECK(pipe(ends) == 0);
    status = status_of(is_ended_while_it_waits);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
    CHECK(write(ends[1], "x", 1) == 1);
}

static void finds_itself(int number, siginfo_t *info, void *context)
{
    char here;
    (void)info, (void)context;
    struct sigaction found;
    CHECK(is_on(own, sizeof own, &here) && stack_now().ss_flags == SS_ONSTACK);
    CHECK(sigaction(number, NULL, &found) == 0 && found.sa_sigaction == finds_itself);
    CHECK((found.sa_flags & (SA_ONSTACK | SA_NODEFER)) == SA_ONSTACK && sigismember(&found.sa_mask, SIGSYS));
    handled++;
}

static pid_t child;

/* Parent and child both return from this handler. */
static void forks_in_handler(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    child = fork();
    CHECK(raise(SIGUSR2) == 0 && handled == 1);
}

/* A child has the program's handlers, and no more of Farpage. */
static void in_children(void)
{
    use_stack(own, sizeof own, 0);
    grow();
    handle(SIGUSR2, finds_itself, SA_ONSTACK);
    handle(SIGUSR1, forks_in_handler, SA_ONSTACK);
    for (int round = 0; round < 2; round++) {
        handled = 0;
        if (round == 0)
            CHECK(raise(SIGUSR1) == 0);
        else
            child = fork();
        if (child == 0) {
            CHECK(stack_now().ss_flags == 0 && !is_blocked(SIGUSR1));
            handled = 0;
            CHECK(raise(SIGUSR2) == 0 && handled == 1);
            VERIFY(area, LARGE, 1);
            _exit(0);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
    VERIFY(area, LARGE, 1);
}

MAIN({ "on_its_own_stack", on_its_own_stack }, { "on_the_interrupted_stack", on_the_interrupted_stack },
     { "stacks_put_away", stacks_put_away }, { "handlers_come_and_go", handlers_come_and_go },
     { "goes_on_elsewhere", goes_on_elsewhere }, { "stack_that_is_out", stack_that_is_out },
     { "call_goes_on_after_handler", call_goes_on_after_handler }, { "while_a_write_waits", while_a_write_waits },
     { "masks_of_waiting_calls", masks_of_waiting_calls }, { "sent_while_returning", sent_while_returning },
     { "sent_to_the_newborn", sent_to_the_newborn }, { "heard_after_a_child", heard_after_a_child },
     { "little_stack_is_used", little_stack_is_used },
     { "never_come_back", never_come_back },
     { "nowhere_to_run", nowhere_to_run }, { "in_children", in_children })

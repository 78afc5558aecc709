/* A small process has no thread of Farpage's. The process gets one before it is large, however it grows, and
 * whatever it has done before.
 *
 * The budget is 256 MiB, and twice that where several processes are dormant at once. Dormant processes may
 * have a quarter of it together while nobody else needs memory, and one of them a 16th: enough for the usual
 * limit of the stack, 8 MiB, and the program. */
#include "check.h"
#include <dirent.h>
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/stat.h>

#define GROWS (300 * MIB)
#define SMALL MIB
#define SHARED (8 * MIB)

static int threads(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;)
        count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

#define IS_DORMANT() CHECK(threads() == 1)
#define IS_MANAGED() CHECK(threads() > 1)

/* Every case begins dormant, however it goes on. */
static __attribute__((constructor)) void begins(void)
{
    IS_DORMANT();
}

static char *reserve(size_t bytes)
{
    char *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

/* Grows over the budget, and checks every byte. */
static void grow(void)
{
    char *memory = filled(GROWS, 1);
    REQUIRE_OUT(memory, GROWS);
    VERIFY(memory, GROWS, 1);
    CHECK(munmap(memory, GROWS) == 0);
}

static void stays(void)
{
    char *memory = filled(SMALL, 1);
    /* Together more than a dormant process may have, but never at once. */
    for (int turn = 0; turn < 100; turn++) {
        char *more = filled(SMALL, 1);
        CHECK(munmap(more, SMALL) == 0);
    }
    VERIFY(memory, SMALL, 1);
    IS_DORMANT();
    /* The program sees nothing of the signal by which the supervisor asks for an engine. */
    struct sigaction action;
    CHECK(sigaction(SIGURG, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
    CHECK(signal(SIGUSR1, SIG_IGN) == SIG_DFL);
}

static void maps(void)
{
    grow();
    IS_MANAGED();
}

static void heap(void)
{
    char *start = sbrk(0);
    CHECK(brk(start + GROWS) == 0);
    IS_MANAGED();
    char *memory = (char *)(((uintptr_t)start + PAGE - 1) & ~(PAGE - 1));
    fill(memory, GROWS - PAGE, 1);
    VERIFY(memory, GROWS - PAGE, 1);
}

static void remaps(void)
{
    char *memory = map(SMALL);
    fill(memory, SMALL, 1);
    IS_DORMANT();
    memory = mremap(memory, SMALL, GROWS, MREMAP_MAYMOVE);
    CHECK(memory != MAP_FAILED);
    IS_MANAGED();
    fill(memory, GROWS, 1);
    VERIFY(memory, GROWS, 1);
}

/* Runtimes reserve memory like this. An engine that starts later knows memory that was reserved while nobody
 * looked. */
static void reserves(void)
{
    char *memory = reserve(2 * GROWS), *named = reserve(GROWS);
    prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, named, GROWS, "mine");
    IS_DORMANT();
    CHECK(mprotect(memory, SMALL, PROT_READ | PROT_WRITE) == 0);
    fill(memory, SMALL, 1);
    IS_DORMANT();
    CHECK(mprotect(memory + SMALL, GROWS, PROT_READ | PROT_WRITE) == 0);
    IS_MANAGED();
    fill(memory + SMALL, GROWS, 1);
    VERIFY(memory + SMALL, GROWS, 1);
    VERIFY(memory, SMALL, 1);
    CHECK(mprotect(named, GROWS, PROT_READ | PROT_WRITE) == 0);
    fill(named, GROWS, 1);
    VERIFY(named, GROWS, 1);
}

/* Memory that was written and may no longer be written takes as much as before, but the kernel no longer
 * counts it. */
static void seals(void)
{
    char *memory[40];
    for (int at = 0; at < 40; at++) {
        memory[at] = map(SMALL);
        fill(memory[at], SMALL, 1);
        CHECK(mprotect(memory[at], SMALL, PROT_READ) == 0);
    }
    IS_MANAGED();
    for (int at = 0; at < 40; at++)
        VERIFY(memory[at], SMALL, 1);
}

/* Each process is the child of the one before. A process that has forked ends, so that few are dormant at
 * once. */
static void forks(void)
{
    char *memory = filled(SMALL, 1);
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (int depth = 0; depth < 12; depth++) {
        pid_t before = getpid(), child = fork();
        CHECK(child >= 0);
        if (child > 0 && depth > 0)
            _exit(0);
        if (child > 0) {
            char answer = 0;
            close(ends[1]);
            CHECK(read(ends[0], &answer, 1) == 1 && answer == 'r');
            VERIFY(memory, SMALL, 1);
            return;
        }
        IS_DORMANT();
        VERIFY(memory, SMALL, 1);
        while (depth > 0 && getppid() == before)
            usleep(1000);
    }
    char *more = filled(2 * GROWS, 2);
    IS_MANAGED();
    REQUIRE_OUT(more, 2 * GROWS);
    VERIFY(more, 2 * GROWS, 2);
    VERIFY(memory, SMALL, 1);
    CHECK(write(ends[1], "r", 1) == 1);
    _exit(0);
}

/* glibc 2.41 and later block every signal during a fork, by a call of their own. An older libc's child has the
 * same mask if its maker has it. */
static void forks_with_all_signals_blocked(void)
{
    const uint64_t all = ~(uint64_t)0;
    uint64_t before;
    CHECK(call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&before, sizeof all, 0, 0) == 0);
    pid_t child = fork();
    CHECK(call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, sizeof all, 0, 0) == 0);
    CHECK(child >= 0);
    IS_DORMANT();
    if (child == 0) {
        map(GROWS);
        IS_MANAGED();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    IS_DORMANT();
}

/* The children have the parent's memory and nothing else. Together that is far less than the budget, though
 * each of them says that all of it is its own as long as it is dormant. */
static void shares(void)
{
    enum { CHILDREN = 48 };
    char *memory = filled(SHARED, 1);
    int ready[2], go[2];
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    for (int child = 0; child < CHILDREN; child++) {
        pid_t process = fork();
        CHECK(process >= 0);
        if (process > 0)
            continue;
        char byte = 0;
        close(go[1]);
        VERIFY(memory, SHARED, 1);
        CHECK(write(ready[1], &byte, 1) == 1);
        CHECK(read(go[0], &byte, 1) == 0);
        CHECK(pages_out(memory, SHARED) == 0);
        VERIFY(memory, SHARED, 1);
        _exit(0);
    }
    IS_DORMANT();
    for (int child = 0; child < CHILDREN; child++) {
        char byte;
        CHECK(read(ready[0], &byte, 1) == 1);
    }
    /* Long enough for an eviction. */
    sleep(1);
    close(go[1]);
    for (int child = 0; child < CHILDREN; child++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    CHECK(pages_out(memory, SHARED) == 0);
}

static void forks_when_grown(void)
{
    char *memory = filled(GROWS, 1);
    pid_t child = fork();
    CHECK(child >= 0);
    VERIFY(memory, GROWS, 1);
    if (child == 0)
        _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* A child of vfork has its parent's memory, but is another process. */
static void vforks(void)
{
    pid_t child = vfork();
    CHECK(child >= 0);
    if (child == 0) {
        munmap(mmap(NULL, GROWS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), GROWS);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    IS_DORMANT();
    grow();
    IS_MANAGED();
}

static void *look(void *argument)
{
    IS_MANAGED();
    return argument;
}

static void has_threads(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, look, NULL) == 0 && pthread_join(thread, NULL) == 0);
    IS_MANAGED();
}

static void other_user(void)
{
    CHECK(setresuid(65534, 65534, 65534) == 0);
    IS_MANAGED();
    char *memory = filled(GROWS, 1);
    VERIFY(memory, GROWS, 1);
}

/* After this call the kernel makes no more threads in the process. */
static void other_pid_namespace(void)
{
    CHECK(unshare(CLONE_NEWPID) == 0);
    IS_MANAGED();
    grow();
}

static void keeps_others_out(void)
{
    CHECK(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    IS_MANAGED();
}

static void limits(void)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_CORE, &limit) == 0 && setrlimit(RLIMIT_CORE, &limit) == 0);
    IS_DORMANT();
    CHECK(getrlimit(RLIMIT_NPROC, &limit) == 0 && setrlimit(RLIMIT_NPROC, &limit) == 0);
    IS_MANAGED();
}

/* Only a process without a second thread can enter a user namespace. */
static void user_namespace(void)
{
    CHECK(unshare(CLONE_NEWUSER) == 0);
    IS_DORMANT();
}

static void grows_in_a_user_namespace(void)
{
    user_namespace();
    char *memory = filled(GROWS, 1);
    sleep(1);
    VERIFY(memory, GROWS, 1);
}

/* The call is made past libc. Nobody sees it but the supervisor, which looks now and then. */
static void maps_past_libc(void)
{
    long result = call(SYS_mmap, 0, GROWS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(result > 0);
    fill((void *)result, 100 * MIB, 1);
    for (int turn = 0; threads() == 1; turn++) {
        CHECK(turn < 6000);
        usleep(10000);
    }
    fill((void *)result, GROWS, 1);
    VERIFY((void *)result, GROWS, 1);
}

/* The supervisor asks by a signal that a kernel drops if nobody handles it. The program's stack for handlers
 * may be as small as it likes, and nothing below that stack may be overwritten. */
static void is_asked(void)
{
    char *memory = filled(2 * SMALL, 1);
    stack_t stack = { .ss_sp = memory + SMALL, .ss_size = 4096 };
    CHECK(sigaltstack(&stack, NULL) == 0);
    CHECK(raise(SIGURG) == 0);
    IS_MANAGED();
    VERIFY(memory, 2 * SMALL, 1);
}

/* How a process waits that is asked: for a byte in a pipe. Returns what the call returned. */
static int waits_by_poll(int pipe) { struct pollfd on = { pipe, POLLIN, 0 }; return poll(&on, 1, -1); }
static int waits_by_read(int pipe) { char byte; return read(pipe, &byte, 1); }
static int waits_by_select(int pipe)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pipe, &set);
    return select(pipe + 1, &set, NULL, NULL, NULL);
}
static int waits_by_epoll(int pipe)
{
    struct epoll_event event = { .events = EPOLLIN };
    int epoll = epoll_create1(0);
    CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, pipe, &event) == 0);
    return epoll_wait(epoll, &event, 1, -1);
}

static int waits_by_semaphore(int pipe)
{
    (void)pipe;
    sem_t semaphore;
    CHECK(sem_init(&semaphore, 0, 0) == 0);
    return sem_wait(&semaphore);
}

static int number_of_threads(pid_t process)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", process);
    struct stat tasks;
    CHECK(stat(path, &tasks) == 0);
    return tasks.st_nlink - 2;
}

static char state_of(pid_t process)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int file = open(path, O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0 && close(file) == 0);
    return strrchr(text, ')')[2];
}

/* A program without handlers never sees a call end with EINTR. It must not because of Farpage's signal. */
static void is_asked_while_it_waits(void)
{
    int (*const ways[])(int) = { waits_by_read, waits_by_poll, waits_by_select, waits_by_epoll };
    /* From glibc 2.41 on nothing in the code says which call was interrupted. */
    int major = 0, minor = 0;
    CHECK(sscanf(gnu_get_libc_version(), "%d.%d", &major, &minor) == 2);
    size_t known = major > 2 || minor > 40 ? 1 : sizeof ways / sizeof *ways;
    for (size_t way = 0; way < known; way++) {
        int pipes[2];
        CHECK(pipe(pipes) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            IS_DORMANT();
            CHECK(ways[way](pipes[0]) == 1);
            IS_MANAGED();
            _exit(0);
        }
        while (state_of(child) != 'S')
            sched_yield();
        CHECK(kill(child, SIGURG) == 0);
        while (number_of_threads(child) == 1 || state_of(child) != 'S')
            sched_yield();
        CHECK(write(pipes[1], "", 1) == 1);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        CHECK(close(pipes[0]) == 0 && close(pipes[1]) == 0);
    }
    IS_DORMANT();
}

static volatile sig_atomic_t is_handled;
static void handles(int signal) { (void)signal; is_handled = 1; }

/* Stops a child in a call, and sends it the supervisor's signal and one of its own, so that both are pending
 * when the child goes on. The call must end with EINTR, as without Farpage. */
static void ends_with(int (*wait)(int), int signal, int flags, int blocks_all)
{
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct sigaction action = { .sa_handler = handles, .sa_flags = flags };
        if (blocks_all)
            sigfillset(&action.sa_mask);
        CHECK(sigaction(signal, &action, NULL) == 0);
        CHECK(wait(pipes[0]) == -1 && errno == EINTR && is_handled);
        IS_MANAGED();
        _exit(0);
    }
    while (state_of(child) != 'S')
        sched_yield();
    CHECK(kill(child, SIGSTOP) == 0);
    while (state_of(child) != 'T')
        sched_yield();
    CHECK(kill(child, SIGURG) == 0 && kill(child, signal) == 0 && kill(child, SIGCONT) == 0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(close(pipes[0]) == 0 && close(pipes[1]) == 0);
}

/* A program that ends its calls by signals of its own still can, whichever of the two signals comes first: the
 * kernel delivers the lower number first. */
static void ends_its_own_calls(void)
{
    CHECK(SIGTERM < SIGURG && SIGURG < SIGIO);
    ends_with(waits_by_poll, SIGTERM, 0, 1);
    ends_with(waits_by_read, SIGTERM, 0, 1);
    ends_with(waits_by_poll, SIGIO, 0, 0);
    ends_with(waits_by_read, SIGIO, 0, 0);
    /* The kernel has forgotten this handler by the time that the other signal is delivered. */
    ends_with(waits_by_poll, SIGTERM, SA_RESETHAND, 1);
    ends_with(waits_by_semaphore, SIGIO, 0, 0);
    IS_DORMANT();
}

/* libc maps the stack of such a thread as it maps a stack for posix_spawn. */
static void has_threads_without_guards(void)
{
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 64 << 10) == 0);
    IS_DORMANT();
    CHECK(pthread_attr_setguardsize(&attributes, 0) == 0);
    IS_MANAGED();
}

/* libc maps a stack for the child, of the kind that threads have. */
/* From glibc 2.42 on a small stack of a thread is mapped like the one of posix_spawn. The advice that makes its
 * guard starts an engine, before the thread is there. An evicted stack would end the program. */
static void guards_a_small_stack(void)
{
    enum { GUARD_INSTALL = 102, BYTES = 192 << 10 };
    char *memory = filled(SMALL, 1);
    char *stack = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    CHECK(stack != MAP_FAILED);
    fill(stack, BYTES, 3);
    IS_DORMANT();
    CHECK(madvise(stack, PAGE, GUARD_INSTALL) == 0 || errno == EINVAL);
    IS_MANAGED();
    char *more = filled(2 * GROWS, 2);
    /* Touches here and there push out what a walk leaves. */
    const size_t pages = 2 * GROWS / PAGE;
    for (size_t turn = 0; turn < pages / 2; turn++)
        *(volatile char *)(more + turn * 7919 % pages * PAGE);
    REQUIRE_OUT(memory, SMALL);
    CHECK(pages_out(stack + PAGE, BYTES - PAGE) == 0);
    VERIFY(more, 2 * GROWS, 2);
    VERIFY_FROM(stack + PAGE, BYTES - PAGE, 3, 1);
    VERIFY(memory, SMALL, 1);
}

static void spawns(void)
{
    CHECK(system("exit 0") == 0);
    IS_DORMANT();
}

static void keeps_what_it_moves(void)
{
    char *memory = filled(SMALL, 1);
    IS_DORMANT();
    for (int turn = 0; turn < 20; turn++)
        CHECK(mremap(memory, SMALL, SMALL, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL) != MAP_FAILED);
    IS_MANAGED();
}

/* The kernel may drop pages that the program has freed lazily. An engine that starts later would take them
 * for pages that stay, and a call that uses them would fail. */
static void frees_later(void)
{
    char *memory = filled(2 * SMALL, 1), *file_after = memory + SMALL;
    int file = open("/proc/self/exe", O_RDONLY);
    CHECK(file >= 0);
    CHECK(mmap(file_after, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == file_after);
    CHECK(madvise(memory, SMALL / 2, MADV_FREE) == 0);
    VERIFY_ZERO(memory, SMALL / 2);
    CHECK(madvise(memory + SMALL / 2, SMALL, MADV_FREE) == -1 && errno == EINVAL);
    VERIFY_ZERO(memory, SMALL);
    CHECK(munmap(file_after + PAGE, PAGE) == 0);
    CHECK(madvise(file_after + PAGE, SMALL - PAGE, MADV_FREE) == -1 && errno == ENOMEM);
    VERIFY_ZERO(file_after + 2 * PAGE, SMALL - 2 * PAGE);
    IS_DORMANT();
    fill(memory, SMALL, 2);
    grow();
    IS_MANAGED();
    VERIFY(memory, SMALL, 2);
}

/* Memory with random numbers, for instance, which no two processes may share. The advice is given past libc,
 * so nobody has seen it. */
static void wiped_in_children(void)
{
    char *memory = filled(SMALL, 1);
    CHECK(call(SYS_madvise, (long)memory, SMALL, MADV_WIPEONFORK, 0, 0, 0) == 0);
    IS_DORMANT();
    /* With this much more memory all of the first would be out, if it were managed. */
    char *more = filled(2 * GROWS, 2);
    REQUIRE_OUT(more, 2 * GROWS);
    VERIFY(more, 2 * GROWS, 2);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        VERIFY_ZERO(memory, SMALL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    VERIFY(memory, SMALL, 1);
}

/* A library that keeps random numbers from children asks for this: first whether the kernel refuses nonsense,
 * then for the advice. */
static void advises(void)
{
    char *page = filled(PAGE, 1);
    CHECK(madvise(page, PAGE, -1) == -1 && errno == EINVAL);
    const int all[] = { MADV_WIPEONFORK, MADV_KEEPONFORK, MADV_DONTFORK, MADV_DOFORK, MADV_WIPEONFORK };
    for (size_t at = 0; at < sizeof all / sizeof *all; at++)
        CHECK(madvise(page, PAGE, all[at]) == 0);
    IS_DORMANT();
    wiped_in_children();
}

static void has_session(void)
{
    CHECK(getenv("FARPAGE_SESSION") != NULL && getenv("LD_PRELOAD") != NULL);
}

/* A child that is made by a bare clone, as containers do it, runs a program with an empty environment. */
static void clones_and_executes(void)
{
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD | CLONE_NEWUTS, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        char *words[] = { "dormant", "has_session", NULL }, *environment[] = { NULL };
        execve("/proc/self/exe", words, environment);
        _exit(1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void forks_in_a_user_namespace(void)
{
    user_namespace();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char *memory = filled(GROWS, 1);
        VERIFY(memory, GROWS, 1);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static volatile int handled;
static void on_signal(int number)
{
    handled = number;
}

/* The program uses SIGURG itself. */
static void handles_it(void)
{
    CHECK(signal(SIGURG, on_signal) == SIG_DFL);
    IS_MANAGED();
    CHECK(raise(SIGURG) == 0 && handled == SIGURG);
}

/* Loads the library that lies beside this program. Returns its variables. */
static char *load(void **library, size_t *bytes)
{
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    CHECK(length > 0);
    strcpy(path + length, "-library.so");
    *library = dlopen(path, RTLD_NOW);
    CHECK(*library != NULL);
    char *(*variables)(size_t *) = (char *(*)(size_t *))dlsym(*library, "variables_of_library");
    CHECK(variables != NULL);
    return variables(bytes);
}

/* The loader maps and unmaps a library by calls of its own, past libc. The variables of a library that was
 * loaded before the engine began must not be taken for those of the next one. */
static void loads_again(void)
{
    void *library;
    size_t bytes;
    char *before = load(&library, &bytes);
    fill(before, bytes, 1);
    IS_DORMANT();
    char *memory = filled(GROWS, 2);
    IS_MANAGED();
    CHECK(dlclose(library) == 0);
    char *variables = load(&library, &bytes);
    CHECK(variables == before);
    VERIFY_ZERO(variables, bytes);
    fill(variables, bytes, 3);
    for (int lap = 0; lap < 4; lap++)
        VERIFY(memory, GROWS, 2);
    REQUIRE_OUT(memory, GROWS);
    VERIFY(variables, bytes, 3);
    for (int is_loaded = 1; is_loaded >= 0; is_loaded--) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            if (is_loaded)
                VERIFY(variables, bytes, 3);
            VERIFY(memory, MIB, 2);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        CHECK(!is_loaded || dlclose(library) == 0);
    }
}

static void read_memory_by(int file)
{
    char *memory = filled(GROWS, 1), page[PAGE];
    for (size_t at = 0; at < GROWS; at += PAGE) {
        ssize_t got = pread(file, page, PAGE, (off_t)(uintptr_t)(memory + at));
        CHECK(got == PAGE || (got == -1 && errno == EIO));
        if (got == PAGE)
            VERIFY_FROM(page, PAGE, 1, at / PAGE);
    }
    fill(page, PAGE, 4);
    for (size_t at = 0; at < GROWS; at += 64 * PAGE) {
        ssize_t put = pwrite(file, page, PAGE, (off_t)(uintptr_t)(memory + at));
        CHECK(put == PAGE || (put == -1 && errno == EIO));
        if (put == PAGE)
            VERIFY(memory + at, PAGE, 4);
        VERIFY_FROM(memory + at + PAGE, PAGE, 1, at / PAGE + 1);
    }
}

/* A file that is the process's memory was opened before any memory was out. */
static void reads_its_memory(void)
{
    int file = open("/proc/self/mem", O_RDWR);
    CHECK(file >= 0);
    IS_DORMANT();
    read_memory_by(file);
}

static void *reads_from_its_own_table(void *nothing)
{
    CHECK(unshare(CLONE_FILES) == 0);
    int file = open("/proc/self/mem", O_RDWR);
    CHECK(file >= 0);
    read_memory_by(file);
    return nothing;
}

/* The same by a thread whose descriptors no other thread has. */
static void reads_its_memory_in_a_thread(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, reads_from_its_own_table, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

static void waits(void)
{
    IS_DORMANT();
    printf("ready\n");
    fflush(stdout);
    for (;;)
        pause();
}

MAIN({ "stays", stays },
     { "maps", maps },
     { "heap", heap },
     { "remaps", remaps },
     { "reserves", reserves },
     { "seals", seals },
     { "forks", forks },
     { "forks_with_all_signals_blocked", forks_with_all_signals_blocked },
     { "shares", shares },
     { "forks_when_grown", forks_when_grown },
     { "vforks", vforks },
     { "has_threads", has_threads },
     { "other_user", other_user },
     { "other_pid_namespace", other_pid_namespace },
     { "keeps_others_out", keeps_others_out },
     { "limits", limits },
     { "user_namespace", user_namespace },
     { "grows_in_a_user_namespace", grows_in_a_user_namespace },
     { "maps_past_libc", maps_past_libc },
     { "handles_it", handles_it },
     { "is_asked", is_asked }, { "is_asked_while_it_waits", is_asked_while_it_waits },
     { "ends_its_own_calls", ends_its_own_calls },
     { "has_threads_without_guards", has_threads_without_guards },
     { "frees_later", frees_later },
     { "guards_a_small_stack", guards_a_small_stack },
     { "spawns", spawns },
     { "keeps_what_it_moves", keeps_what_it_moves },
     { "wiped_in_children", wiped_in_children }, { "advises", advises },
     { "has_session", has_session }, { "loads_again", loads_again },
     { "reads_its_memory", reads_its_memory },
     { "reads_its_memory_in_a_thread", reads_its_memory_in_a_thread },
     { "clones_and_executes", clones_and_executes },
     { "forks_in_a_user_namespace", forks_in_a_user_namespace },
     { "waits", waits })

/* Programs that install seccomp filters. No thread of their process may be without the filter, whoever made
 * the thread, and no byte may change. A child that was made before looks at the threads, because the program
 * may no longer be allowed to open a file. */
#include "check.h"
#include <dirent.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/time.h>

enum { ALLOW = SECCOMP_RET_ALLOW, KILL = SECCOMP_RET_KILL_PROCESS, DENY = SECCOMP_RET_ERRNO | EPERM };

static char *area;
static int ask[2], answer[2];

/* Whether a thread is the kernel's own, of an io_uring. Such a thread makes no system calls. */
static int is_kernels(DIR *tasks, const char *thread)
{
    char path[64], text[512] = "";
    unsigned flags = 0;
    snprintf(path, sizeof path, "%.20s/stat", thread);
    int fd = openat(dirfd(tasks), path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        text[0] = 0;
    close(fd);
    sscanf(text, "%*d (%*63[^)]) %*c %*d %*d %*d %*d %*d %u", &flags);
    return (flags & 0x10) != 0;
}

static void filters_of(DIR *tasks, const char *thread, char *found, size_t bytes)
{
    char path[64], line[4096];
    snprintf(path, sizeof path, "%.20s/status", thread);
    int fd = openat(dirfd(tasks), path, O_RDONLY | O_CLOEXEC);
    FILE *status = fd < 0 ? NULL : fdopen(fd, "r");
    found[0] = 0;
    while (status != NULL && fgets(line, sizeof line, status))
        if (strncmp(line, "Seccomp", 7) == 0)
            strncat(found, line, bytes - strlen(found) - 1);
    if (status != NULL)
        fclose(status);
}

/* Returns the number of threads of a process whose filters differ from those of its first thread. */
static int different(pid_t process, int tell)
{
    char path[64], own[32], first[256], other[256];
    snprintf(path, sizeof path, "/proc/%d/task", process);
    snprintf(own, sizeof own, "%d", process);
    DIR *tasks = opendir(path);
    CHECK(tasks != NULL);
    filters_of(tasks, own, first, sizeof first);
    int count = 0;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        if (entry->d_name[0] == '.' || is_kernels(tasks, entry->d_name))
            continue;
        filters_of(tasks, entry->d_name, other, sizeof other);
        if (other[0] == 0 || strcmp(first, other) == 0)
            continue;
        count++;
        if (tell)
            fprintf(stderr, "thread %s has\n%sand the first thread\n%s", entry->d_name, other, first);
    }
    closedir(tasks);
    return count;
}

/* Counts whenever it is asked, again and again for a moment: a thread that has just ended is still there. */
static void observe(pid_t process)
{
    for (char others; read(ask[0], &others, 1) == 1;) {
        int count = 0;
        for (int i = 0; i < 100 && (count = different(process, 0)) != others; i++)
            usleep(2000);
        if (count != others)
            different(process, 1);
        char same = count == others;
        CHECK(write(answer[1], &same, 1) == 1);
    }
    _exit(0);
}

static void begin(void)
{
    CHECK(pipe(ask) == 0 && pipe(answer) == 0);
    pid_t process = getpid(), child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(ask[1]);
        observe(process);
    }
    close(ask[0]);
}

static void begin_out(void)
{
    begin();
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
}

/* The call that ends a case. The call is made past libc, because libc makes other calls, too. In strict mode
 * a process can't end all of its threads. */
static long end_call = SYS_exit_group;

static void end(int status)
{
    call(end_call, status, 0, 0, 0, 0, 0);
}

static void but_for(char others)
{
    char same = 0;
    if (write(ask[1], &others, 1) != 1 || read(answer[0], &same, 1) != 1 || !same)
        end(3);
}

static void verify_bare(const char *memory, size_t bytes, uint64_t seed)
{
    for (size_t page = 0; page < bytes / PAGE; page++)
        for (size_t word = 0; word < WORDS; word++)
            if (((const volatile uint64_t *)memory)[page * WORDS + word] != word_of(seed, page, word))
                end(4);
}

/* Checks that memory is as it was, and pushes it out again where the engine is still there. In cases that
 * filled no memory before the filter, memory goes out only now, if at all. */
static void still_works(void)
{
    but_for(0);
    if (area == NULL)
        area = filled(LARGE, 1);
    verify_bare(area, LARGE, 1);
    fill(area, 8 * MIB, 2);
    push_out();
    verify_bare(area, 8 * MIB, 2);
    fill(area, 8 * MIB, 1);
    but_for(0);
}

static struct sock_filter program[512];
static struct sock_fprog filter = { 0, program };

static void add(unsigned short code, unsigned k, int if_true, int if_false)
{
    program[filter.len++] = (struct sock_filter){ code, (unsigned char)if_true, (unsigned char)if_false, k };
}

/* Makes a filter: the listed calls get one answer, all other calls another. */
static void make(const int *calls, size_t count, unsigned listed, unsigned others)
{
    filter.len = 0;
    add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch), 0, 0);
    add(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0);
    add(BPF_RET | BPF_K, KILL, 0, 0);
    add(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr), 0, 0);
    for (size_t at = 0; at < count; at++) {
        add(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[at], 0, 1);
        add(BPF_RET | BPF_K, listed, 0, 0);
    }
    add(BPF_RET | BPF_K, others, 0, 0);
}

#define MAKE(calls, listed, others) make(calls, sizeof calls / sizeof *calls, listed, others)

static void no_new_privileges(void)
{
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
}

static void by_prctl(void)
{
    no_new_privileges();
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static void by_number(unsigned flags)
{
    no_new_privileges();
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &filter) == 0);
}

static long by_own_code(unsigned flags)
{
    no_new_privileges();
    return call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, (long)flags, (long)&filter, 0, 0, 0);
}

/* Nobody needs these calls. */
static const int dangerous[] = { SYS_ptrace, SYS_mount, SYS_kexec_load, SYS_bpf, SYS_keyctl, SYS_reboot };
/* Calls that the test makes after the filter. */
static const int needed[] = { SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_mmap, SYS_munmap };

static void check_denied(void)
{
    if (call(SYS_keyctl, 0, 0, 0, 0, 0, 0) != -EPERM)
        end(5);
}

/* The engine can live under this filter. */
static void denies_what_nobody_needs(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    by_prctl();
    check_denied();
    still_works();
    by_number(0);
    still_works();
}

static void denies_what_nobody_needs_before(void)
{
    begin();
    MAKE(dangerous, DENY, ALLOW);
    by_number(0);
    check_denied();
    still_works();
}

static void denies_by_own_code(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    CHECK(by_own_code(0) == 0);
    check_denied();
    for (int i = 0; i < 400 && different(getpid(), 0) != 0; i++)
        usleep(5000);
    still_works();
}

static void denies_by_own_code_before(void)
{
    begin();
    MAKE(dangerous, DENY, ALLOW);
    CHECK(by_own_code(0) == 0);
    for (int i = 0; i < 400 && different(getpid(), 0) != 0; i++)
        usleep(5000);
    still_works();
}

/* One filter for all threads at once, then a second one above the first. */
static void denies_in_all_threads(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    by_number(SECCOMP_FILTER_FLAG_TSYNC);
    still_works();
    by_number(SECCOMP_FILTER_FLAG_TSYNC);
    still_works();
}

/* A filter for the calling thread alone, then one for all threads. Engine threads would be in the way. */
static void denies_in_all_threads_after_one(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    by_number(0);
    still_works();
    by_number(SECCOMP_FILTER_FLAG_TSYNC);
    still_works();
}

static void *install_and_wait(void *nothing)
{
    by_number(0);
    char byte = 0;
    CHECK(write(*(int *)nothing, &byte, 1) == 1);
    pause();
    return NULL;
}

/* Another thread binds itself alone. The engine's threads are bound, too; the first thread isn't. */
static void another_thread_denies(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    int stage[2];
    pthread_t thread;
    char byte;
    CHECK(pipe(stage) == 0 && pthread_create(&thread, NULL, install_and_wait, &stage[1]) == 0);
    CHECK(read(stage[0], &byte, 1) == 1);
    DIR *tasks = opendir("/proc/self/task");
    char own[32], found[256];
    snprintf(own, sizeof own, "%d", getpid());
    int without = 0;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        if (entry->d_name[0] == '.' || is_kernels(tasks, entry->d_name))
            continue;
        filters_of(tasks, entry->d_name, found, sizeof found);
        without += strstr(found, "Seccomp:\t0") != NULL;
    }
    if (without != 1)
        FAIL("%d threads have no filter, and not the first one alone", without);
    VERIFY(area, LARGE, 1);
}

static void *deny_last(void *nothing)
{
    (void)nothing;
    char path[64], stat[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
    do {
        memset(stat, 0, sizeof stat);
        int file = open(path, O_RDONLY);
        CHECK(file >= 0 && read(file, stat, sizeof stat - 1) > 0 && close(file) == 0);
    } while (strrchr(stat, ')')[2] != 'Z');
    by_number(0);
    check_denied();
    /* Farpage looks at the program's filters now and then. */
    usleep(300000);
    VERIFY(area, LARGE, 1);
    push_out();
    VERIFY(area, LARGE, 1);
    exit(0);
}

/* The first thread has ended. The kernel no longer finds the process's memory by the process's number. */
static void denies_without_first_thread(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, deny_last, NULL) == 0);
    pthread_exit(NULL);
}

/* Children are under the filter, and their engines must live under it. */
static void child_lives_under_it(void)
{
    begin_out();
    MAKE(dangerous, DENY, ALLOW);
    by_prctl();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        begin();
        check_denied();
        still_works();
        by_prctl();
        still_works();
        close(ask[1]);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    still_works();
}

/* The engine can't live under the filters of these cases, up to `allows_little_among_threads`. */
static void allows_little(void)
{
    begin_out();
    MAKE(needed, ALLOW, KILL);
    by_prctl();
    still_works();
}

static void allows_little_before(void)
{
    begin();
    MAKE(needed, ALLOW, KILL);
    by_number(0);
    still_works();
}

static void allows_little_in_all_threads(void)
{
    begin_out();
    MAKE(needed, ALLOW, KILL);
    by_number(SECCOMP_FILTER_FLAG_TSYNC);
    still_works();
}

static void answers(unsigned others)
{
    begin_out();
    static const int calls[] = { SYS_ioctl, SYS_pread64, SYS_io_uring_enter, SYS_process_vm_readv, SYS_userfaultfd };
    MAKE(calls, others, ALLOW);
    by_prctl();
    still_works();
}

static void answers_errors(void)
{
    answers(DENY);
}

static void answers_by_signals(void)
{
    answers(SECCOMP_RET_TRAP);
}

static void has_a_tracer_answer(void)
{
    answers(SECCOMP_RET_TRACE);
}

static void has_a_program_answer(void)
{
    begin_out();
    static const int calls[] = { SYS_ioctl, SYS_futex };
    MAKE(calls, SECCOMP_RET_USER_NOTIF, ALLOW);
    no_new_privileges();
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter) >= 0);
    still_works();
}

static int ask_size[2], size[2];

/* Makes a child that tells the KiB of anonymous memory that this process has in RAM when it is asked. */
static void begin_to_measure(void)
{
    CHECK(pipe(ask_size) == 0 && pipe(size) == 0);
    char path[64], line[256], byte;
    snprintf(path, sizeof path, "/proc/%d/status", getpid());
    pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0)
        return;
    close(ask_size[1]);
    CHECK(read(ask_size[0], &byte, 1) == 1);
    long kib = 0;
    FILE *status = fopen(path, "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        sscanf(line, "RssAnon: %ld", &kib);
    CHECK(kib > 0 && write(size[1], &kib, sizeof kib) == sizeof kib);
    _exit(0);
}

/* Strict mode: read, write, exit. The engine ends, and keeps no memory but for its tables. */
static void is_strict(void)
{
    long kib = 0;
    begin_out();
    begin_to_measure();
    end_call = SYS_exit;
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0) == 0);
    but_for(0);
    verify_bare(area, LARGE, 1);
    if (write(ask_size[1], "", 1) != 1 || read(size[0], &kib, sizeof kib) != sizeof kib)
        end(6);
    if (kib > (long)((LARGE + 4 * MIB) >> 10))
        end(7);
    end(0);
}

static void is_strict_before(void)
{
    begin();
    area = filled(8 * MIB, 1);
    end_call = SYS_exit;
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_STRICT, 0, NULL) == 0);
    but_for(0);
    verify_bare(area, 8 * MIB, 1);
    end(0);
}

static volatile sig_atomic_t ticks;

static void on_tick(int signal)
{
    (void)signal;
    ticks++;
}

static int started;

static void *touch_forever(void *nothing)
{
    (void)nothing;
    for (;; __atomic_add_fetch(&started, 1, __ATOMIC_RELAXED)) {
        char *memory = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t at = 0; at < 2 * MIB; at += PAGE) {
            if (memory[at] != 0)
                abort();
            memory[at] = 1;
        }
        munmap(memory, 2 * MIB);
    }
}

/* Other threads go on meanwhile, fault and make calls. A handler of the program's runs before and after the
 * filter. */
static void allows_little_among_threads(void)
{
    begin_out();
    pthread_t threads[4];
    for (int at = 0; at < 4; at++)
        CHECK(pthread_create(&threads[at], NULL, touch_forever, NULL) == 0);
    struct sigaction action = { .sa_handler = on_tick, .sa_flags = SA_RESTART };
    struct itimerval timer = { { 0, 3000 }, { 0, 3000 } };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
    while (__atomic_load_n(&started, __ATOMIC_RELAXED) < 100)
        usleep(1000);
    static const int calls[] = { SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_mmap, SYS_munmap, SYS_rt_sigreturn,
                                 SYS_restart_syscall };
    MAKE(calls, ALLOW, KILL);
    by_number(SECCOMP_FILTER_FLAG_TSYNC);
    int before = ticks;
    while (ticks < before + 20)
        ;
    verify_bare(area, LARGE, 1);
    but_for(0);
    end(0);
}

/* Libraries ask what there is without wanting a filter, and some ask in vain. */
static void only_asks(void)
{
    begin_out();
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL, 0, 0) == -1 && (errno == EFAULT || errno == EACCES));
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_STRICT, 1, NULL) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, NULL) == -1);
    unsigned action = KILL;
    CHECK(syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0);
    MAKE(needed, ALLOW, KILL);
    program[filter.len - 1].code = 0x99;
    no_new_privileges();
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == -1 && errno == EINVAL);
    still_works();
    REQUIRE_OUT(area, LARGE);
}

static volatile int has_gone_on;

static void goes_on(int signal)
{
    has_gone_on = signal;
}

/* The first filter ends every process that calls seccomp(2). Engine threads once called it to take the second
 * filter. */
static void second_after_seccomp_is_denied(void)
{
    static const int denied[] = { SYS_seccomp };
    begin_out();
    MAKE(denied, KILL, ALLOW);
    by_prctl();
    but_for(0);
    MAKE(dangerous, DENY, ALLOW);
    by_prctl();
    check_denied();
    still_works();
}

/* Only engine threads make these calls, each call in one way of serving faults. */
static void ends_who_makes_calls_of_the_engine(void)
{
    static const int denied[] = { SYS_process_madvise, SYS_vmsplice };
    begin_out();
    MAKE(denied, KILL, ALLOW);
    by_prctl();
    still_works();
}

/* A hook makes this call in the program's place, with signals blocked. SIGSYS would end the process there. */
static void locking_is_answered_by_signals(void)
{
    static const int denied[] = { SYS_mlockall };
    signal(SIGSYS, goes_on);
    begin_out();
    MAKE(denied, SECCOMP_RET_TRAP, ALLOW);
    by_prctl();
    mlockall(MCL_CURRENT);
    if (!has_gone_on)
        end(6);
    still_works();
}

MAIN({ "denies_what_nobody_needs", denies_what_nobody_needs },
     { "denies_what_nobody_needs_before", denies_what_nobody_needs_before },
     { "denies_by_own_code", denies_by_own_code }, { "denies_by_own_code_before", denies_by_own_code_before },
     { "denies_in_all_threads", denies_in_all_threads },
     { "denies_in_all_threads_after_one", denies_in_all_threads_after_one },
     { "another_thread_denies", another_thread_denies }, { "child_lives_under_it", child_lives_under_it },
     { "denies_without_first_thread", denies_without_first_thread },
     { "allows_little", allows_little }, { "allows_little_before", allows_little_before },
     { "allows_little_in_all_threads", allows_little_in_all_threads },
     { "allows_little_among_threads", allows_little_among_threads }, { "answers_errors", answers_errors },
     { "answers_by_signals", answers_by_signals }, { "has_a_tracer_answer", has_a_tracer_answer },
     { "has_a_program_answer", has_a_program_answer }, { "is_strict", is_strict },
     { "is_strict_before", is_strict_before }, { "only_asks", only_asks },
     { "second_after_seccomp_is_denied", second_after_seccomp_is_denied },
     { "ends_who_makes_calls_of_the_engine", ends_who_makes_calls_of_the_engine },
     { "locking_is_answered_by_signals", locking_is_answered_by_signals })

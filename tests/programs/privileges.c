/* Programs that give up privileges, as daemons and sandboxes do. No thread of their process may keep any.
 * Threads that somebody else has put into the process are found as an attacker would find them, in
 * /proc/self/task. */
#include "check.h"
#include <dirent.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { NOBODY = 65534, CAP_KILL_ = 5, CAP_BIND_ = 10, NOT_ALLOWED = 77 };

/* Opened before anything is given up: /proc may not be there afterwards. */
static DIR *tasks;
static char *area;

/* Reads the lines of a thread's status that say what the thread may do. */
static void privileges_of(const char *thread, char *found, size_t bytes)
{
    static const char *const names[] = { "Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:",
                                         "CapBnd:", "CapAmb:", "NoNewPrivs:" };
    char path[64], line[4096];
    snprintf(path, sizeof path, "%.20s/status", thread);
    int fd = openat(dirfd(tasks), path, O_RDONLY | O_CLOEXEC);
    found[0] = 0;
    FILE *status = fd < 0 ? NULL : fdopen(fd, "r");
    while (status != NULL && fgets(line, sizeof line, status))
        for (size_t at = 0; at < sizeof names / sizeof *names; at++)
            if (strncmp(line, names[at], strlen(names[at])) == 0)
                strncat(found, line, bytes - strlen(found) - 1);
    if (status != NULL)
        fclose(status);
}

/* Reads the thread's root directory and namespaces. */
static void places_of(const char *thread, char *found, size_t bytes)
{
    static const char *const names[] = { "mnt", "uts", "ipc", "net", "cgroup" };
    char path[64];
    struct stat root = { 0 };
    snprintf(path, sizeof path, "%.20s/root/.", thread);
    fstatat(dirfd(tasks), path, &root, 0);
    int length = snprintf(found, bytes, "root %lx:%lx\n", (long)root.st_dev, (long)root.st_ino);
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        char link[128] = "";
        snprintf(path, sizeof path, "%.20s/ns/%s", thread, names[at]);
        if (readlinkat(dirfd(tasks), path, link, sizeof link - 1) > 0)
            length += snprintf(found + length, bytes - length, "%s\n", link);
    }
}

/* The kernel's PF_EXITING: the thread has begun to end, and soon has neither a root directory nor
 * namespaces. */
enum { ENDS = 0x4 };
/* The kernel's PF_IO_WORKER: a thread of the kernel's, for an io_uring. Such a thread runs no code of this
 * process, and makes each request with the credentials of the thread that asked for it. */
enum { KERNELS = 0x10 };

/* Returns a thread's flags, and its name. A thread that has ended has the flags `ENDS`. */
static unsigned flags_of(const char *thread, char name[64])
{
    char path[64], text[512] = "";
    unsigned flags = ENDS;
    snprintf(path, sizeof path, "%.20s/stat", thread);
    int fd = openat(dirfd(tasks), path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        text[0] = 0;
    close(fd);
    name[0] = 0;
    sscanf(text, "%*d (%63[^)]) %*c %*d %*d %*d %*d %*d %u", name, &flags);
    return flags;
}

/* The thread that all others are compared with: the first thread if 0. */
static pid_t compared;

/* Counts the differences between the first thread and the other threads. Prints them if `tell`. */
static int different(int tell)
{
    char first[8192], other[8192], own[32];
    snprintf(own, sizeof own, "%d", compared == 0 ? getpid() : compared);
    int count = 0;
    rewinddir(tasks);
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char name[64];
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, own) == 0 || flags_of(entry->d_name, name) & KERNELS)
            continue;
        for (int what = 0; what < 2; what++) {
            void (*look)(const char *, char *, size_t) = what == 0 ? privileges_of : places_of;
            look(own, first, sizeof first);
            look(entry->d_name, other, sizeof other);
            if (strcmp(first, other) == 0 || flags_of(entry->d_name, name) & ENDS)
                continue;
            count++;
            if (tell)
                fprintf(stderr, "thread %s (%s) has\n%sand the first thread\n%s", entry->d_name,
                        name, other, first);
        }
    }
    return count;
}

#define NONE_DIFFERS()                                                                                        \
    do {                                                                                                      \
        if (different(0) != 0)                                                                                \
            FAIL("%d differences", different(1));                                                             \
    } while (0)

static void begin(void)
{
    tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    CHECK(getuid() == 0);
}

static void begin_out(void)
{
    begin();
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
}

/* Checks that memory is as it was, and pushes it out again. In a `_before` case memory goes out only now. */
static void still_works(void)
{
    if (area == NULL)
        area = filled(LARGE, 1);
    VERIFY(area, LARGE, 1);
    fill(area, 8 * MIB, 2);
    push_out();
    VERIFY(area, 8 * MIB, 2);
    NONE_DIFFERS();
}

static void drop_by_libc(void)
{
    const gid_t groups[] = { 7, 8, 9 };
    CHECK(setgroups(3, groups) == 0);
    NONE_DIFFERS();
    CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0);
    NONE_DIFFERS();
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    NONE_DIFFERS();
    CHECK(setuid(0) != 0 && errno == EPERM);
}

static void drops_root(void)
{
    begin_out();
    drop_by_libc();
    still_works();
}

static void drops_root_before(void)
{
    begin();
    drop_by_libc();
    still_works();
}

/* The program changes its user for a while, as a file server does, and back. */
static void changes_its_user_and_back(void)
{
    begin_out();
    for (int turn = 0; turn < 20; turn++) {
        CHECK(setegid(NOBODY) == 0 && seteuid(NOBODY) == 0);
        NONE_DIFFERS();
        CHECK(seteuid(0) == 0 && setegid(0) == 0);
        NONE_DIFFERS();
        setfsuid(NOBODY);
        NONE_DIFFERS();
        setfsuid(0);
    }
    CHECK(initgroups("root", 0) == 0);
    NONE_DIFFERS();
    CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
    NONE_DIFFERS();
    still_works();
}

/* Calls are made by number, through libc. */
static void drops_root_by_number(void)
{
    begin_out();
    CHECK(syscall(SYS_setgroups, 0, NULL) == 0);
    CHECK(syscall(SYS_setresgid, NOBODY, NOBODY, NOBODY) == 0);
    CHECK(syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0);
    NONE_DIFFERS();
    still_works();
}

/* Calls are made by an instruction of the program's own, as other languages make them. Where Farpage doesn't
 * see such a call, it notices the change. */
static void drop_by_own_code(void)
{
    CHECK(call(SYS_setgroups, 0, 0, 0, 0, 0, 0) == 0);
    CHECK(call(SYS_setresgid, NOBODY, NOBODY, NOBODY, 0, 0, 0) == 0);
    CHECK(call(SYS_setresuid, NOBODY, NOBODY, NOBODY, 0, 0, 0) == 0);
    for (int i = 0; i < 400 && different(0) != 0; i++)
        usleep(5000);
    NONE_DIFFERS();
}

static void drops_root_by_own_code(void)
{
    begin_out();
    drop_by_own_code();
    still_works();
}

static void drops_root_by_own_code_before(void)
{
    begin();
    drop_by_own_code();
    still_works();
}

static void capabilities(uint32_t effective, uint32_t permitted, uint32_t inheritable)
{
    struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct data[2] = { { effective, permitted, inheritable } };
    extern int capset(struct __user_cap_header_struct *, struct __user_cap_data_struct *);
    CHECK(capset(&header, data) == 0);
}

/* The program keeps one capability, and the next program has it, too. */
static void keeps_one_capability(void)
{
    begin_out();
    CHECK(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0);
    CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
    NONE_DIFFERS();
    capabilities(1 << CAP_BIND_, 1 << CAP_BIND_, 1 << CAP_BIND_);
    NONE_DIFFERS();
    CHECK(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_BIND_, 0, 0) == 0);
    NONE_DIFFERS();
    still_works();
}

/* Root keeps nothing of root, and can't get it back. */
static void locks_itself(void)
{
    begin_out();
    CHECK(prctl(PR_CAPBSET_DROP, CAP_KILL_, 0, 0, 0) == 0);
    NONE_DIFFERS();
    CHECK(prctl(PR_SET_SECUREBITS,
                SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP | SECBIT_NO_SETUID_FIXUP_LOCKED,
                0, 0, 0) == 0);
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    NONE_DIFFERS();
    capabilities(0, 0, 0);
    NONE_DIFFERS();
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    NONE_DIFFERS();
    still_works();
}

/* The program lets other processes of its user look into it again. After it has given up more, they still
 * may. */
static void can_be_looked_at(void)
{
    begin_out();
    CHECK(setuid(NOBODY) == 0 && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1);
    still_works();
}

static void *drop_all(void *nothing)
{
    drop_by_libc();
    return nothing;
}

/* libc makes all of the program's threads change, whichever thread calls. */
static void another_thread_drops_root(void)
{
    begin_out();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, drop_all, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(getuid() == NOBODY && geteuid() == NOBODY);
    NONE_DIFFERS();
    still_works();
}

static int stage[2];

/* Changes this thread alone: the process can still do what it could. */
static void *drop_alone(void *nothing)
{
    CHECK(syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0);
    char byte = 0;
    CHECK(write(stage[1], &byte, 1) == 1);
    pause();
    return nothing;
}

static void one_thread_drops_root_alone(void)
{
    begin_out();
    CHECK(pipe(stage) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, drop_alone, NULL) == 0);
    char byte;
    CHECK(read(stage[0], &byte, 1) == 1);
    usleep(300000);
    if (different(0) != 1)
        FAIL("%d threads differ from the first, not one", different(1));
    VERIFY(area, LARGE, 1);
}

/* A child of vfork has its parent's memory until it runs another program. The child changes only what it may
 * do itself. */
static void child_of_vfork_drops_root(void)
{
    begin_out();
    pid_t child = vfork();
    if (child == 0) {
        if (syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0)
            execlp("true", "true", NULL);
        _exit(1);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(getuid() == 0);
    NONE_DIFFERS();
    still_works();
}

static void child_drops_root(void)
{
    begin_out();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        closedir(tasks);
        tasks = opendir("/proc/self/task");
        drop_by_libc();
        still_works();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    NONE_DIFFERS();
    still_works();
}

static void leave_root(void)
{
    char place[] = "/tmp/farpage-root-XXXXXX";
    CHECK(mkdtemp(place) != NULL);
    int outside = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (chroot(place) != 0 && errno == EPERM)
        exit(NOT_ALLOWED);
    NONE_DIFFERS();
    CHECK(access("/proc", F_OK) != 0);
    CHECK(unlinkat(outside, place + 1, AT_REMOVEDIR) == 0);
    close(outside);
}

/* The root becomes an empty directory, without a /proc. */
static void leaves_root(void)
{
    begin_out();
    leave_root();
    VERIFY(area, LARGE, 1);
    drop_by_libc();
    VERIFY(area, LARGE, 1);
}

static void leaves_root_before(void)
{
    begin();
    leave_root();
    drop_by_libc();
    area = filled(LARGE, 1);
    VERIFY(area, LARGE, 1);
    NONE_DIFFERS();
}

/* Threads of a program share their root directory, so each of them has the new one. */
static void *leave_root_in_a_thread(void *nothing)
{
    leave_root();
    return nothing;
}

static void another_thread_leaves_root(void)
{
    begin_out();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, leave_root_in_a_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(access("/proc", F_OK) != 0);
    NONE_DIFFERS();
    VERIFY(area, LARGE, 1);
    drop_by_libc();
    VERIFY(area, LARGE, 1);
}

/* This thread stops sharing its root directory first. The process is where it was. */
static void *leave_root_alone(void *place)
{
    CHECK(unshare(CLONE_FS) == 0);
    if (chroot(place) != 0 && errno == EPERM)
        exit(NOT_ALLOWED);
    char byte = 0;
    CHECK(write(stage[1], &byte, 1) == 1);
    pause();
    return NULL;
}

static void one_thread_leaves_root_alone(void)
{
    begin_out();
    CHECK(pipe(stage) == 0);
    pthread_t thread;
    char place[] = "/tmp/farpage-root-XXXXXX";
    CHECK(mkdtemp(place) != NULL);
    CHECK(pthread_create(&thread, NULL, leave_root_alone, place) == 0);
    char byte;
    CHECK(read(stage[0], &byte, 1) == 1);
    CHECK(access("/proc", F_OK) == 0);
    if (different(0) != 1)
        FAIL("%d threads differ from the first, not one", different(1));
    VERIFY(area, LARGE, 1);
    CHECK(rmdir(place) == 0);
}

/* Waits until the first thread has ended. The kernel goes on to list it, with all that it could do. */
static void outlive_the_first_thread(void)
{
    char name[64], first[32];
    snprintf(first, sizeof first, "%d", getpid());
    while ((flags_of(first, name) & ENDS) == 0)
        usleep(1000);
    compared = gettid();
}

static void *drop_root_last(void *nothing)
{
    (void)nothing;
    outlive_the_first_thread();
    drop_by_libc();
    /* Farpage looks at the program now and then, and must not go back to what the first thread could do. */
    for (int turn = 0; turn < 60; turn++) {
        usleep(5000);
        NONE_DIFFERS();
    }
    still_works();
    exit(0);
}

static void drops_root_without_first_thread(void)
{
    begin_out();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, drop_root_last, NULL) == 0);
    pthread_exit(NULL);
}

static void *drop_root_by_own_code_last(void *nothing)
{
    (void)nothing;
    outlive_the_first_thread();
    drop_by_own_code();
    still_works();
    exit(0);
}

static void drops_root_by_own_code_without_first_thread(void)
{
    begin_out();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, drop_root_by_own_code_last, NULL) == 0);
    pthread_exit(NULL);
}

static void *leave_root_last(void *nothing)
{
    (void)nothing;
    outlive_the_first_thread();
    leave_root();
    VERIFY(area, LARGE, 1);
    drop_by_libc();
    VERIFY(area, LARGE, 1);
    exit(0);
}

static void leaves_root_without_first_thread(void)
{
    begin_out();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, leave_root_last, NULL) == 0);
    pthread_exit(NULL);
}

/* Network, names, mounts: the program leaves its namespaces, and goes back. */
static void leaves_namespaces(void)
{
    begin_out();
    static const struct { const char *path; int kind; } namespaces[] = {
        { "/proc/self/ns/uts", CLONE_NEWUTS }, { "/proc/self/ns/net", CLONE_NEWNET },
        { "/proc/self/ns/ipc", CLONE_NEWIPC }, { "/proc/self/ns/mnt", CLONE_NEWNS },
    };
    enum { COUNT = sizeof namespaces / sizeof *namespaces };
    int before[COUNT];
    for (int at = 0; at < COUNT; at++) {
        before[at] = open(namespaces[at].path, O_RDONLY | O_CLOEXEC);
        CHECK(before[at] >= 0);
        if (unshare(namespaces[at].kind) != 0 && errno == EPERM)
            exit(NOT_ALLOWED);
        NONE_DIFFERS();
    }
    VERIFY(area, LARGE, 1);
    for (int at = 0; at < COUNT; at++) {
        CHECK(setns(before[at], at % 2 == 0 ? namespaces[at].kind : 0) == 0);
        NONE_DIFFERS();
    }
    still_works();
}

/* Sandboxes forbid themselves to open, start or allocate anything more. Memory that is managed must go on
 * working, and so must memory that is managed only afterwards. */
static void limit(int resource, rlim_t most)
{
    const struct rlimit both = { most, most };
    CHECK(setrlimit(resource, &both) == 0);
}

/* Memory that is there already goes out for the first time under the limit. */
static void limit_before(int resource, rlim_t most)
{
    area = map(LARGE);
    limit(resource, most);
    for (int seed = 1; seed <= 2; seed++) {
        fill(area, LARGE, seed);
        VERIFY(area, LARGE, seed);
    }
}

static void limit_after(int resource, rlim_t most)
{
    begin_out();
    limit(resource, most);
    VERIFY(area, LARGE, 1);
    fill(area, LARGE, 2);
    VERIFY(area, LARGE, 2);
}

static void may_open_nothing(void) { limit_after(RLIMIT_NOFILE, 0); }
static void may_open_nothing_before(void) { limit_before(RLIMIT_NOFILE, 0); }
static void may_queue_no_signal_before(void) { limit_before(RLIMIT_SIGPENDING, 0); }
static void may_have_no_more_memory(void) { limit_after(RLIMIT_AS, 0); }
static void may_have_no_more_memory_before(void) { limit_before(RLIMIT_AS, 0); }
static void may_have_no_more_data(void) { limit_after(RLIMIT_DATA, 0); }

/* The kernel limits only the threads of ordinary users. */
static void may_start_nothing_before(void)
{
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    limit_before(RLIMIT_NPROC, 0);
}

MAIN({ "drops_root", drops_root }, { "drops_root_before", drops_root_before },
     { "changes_its_user_and_back", changes_its_user_and_back },
     { "drops_root_by_number", drops_root_by_number },
     { "drops_root_by_own_code", drops_root_by_own_code },
     { "drops_root_by_own_code_before", drops_root_by_own_code_before },
     { "keeps_one_capability", keeps_one_capability }, { "locks_itself", locks_itself },
     { "can_be_looked_at", can_be_looked_at },
     { "another_thread_drops_root", another_thread_drops_root },
     { "one_thread_drops_root_alone", one_thread_drops_root_alone },
     { "child_of_vfork_drops_root", child_of_vfork_drops_root }, { "child_drops_root", child_drops_root },
     { "leaves_root", leaves_root }, { "leaves_root_before", leaves_root_before },
     { "another_thread_leaves_root", another_thread_leaves_root },
     { "one_thread_leaves_root_alone", one_thread_leaves_root_alone },
     { "drops_root_without_first_thread", drops_root_without_first_thread },
     { "drops_root_by_own_code_without_first_thread", drops_root_by_own_code_without_first_thread },
     { "leaves_root_without_first_thread", leaves_root_without_first_thread },
     { "leaves_namespaces", leaves_namespaces },
     { "may_open_nothing", may_open_nothing }, { "may_open_nothing_before", may_open_nothing_before },
     { "may_start_nothing_before", may_start_nothing_before },
     { "may_queue_no_signal_before", may_queue_no_signal_before },
     { "may_have_no_more_memory", may_have_no_more_memory },
     { "may_have_no_more_memory_before", may_have_no_more_memory_before },
     { "may_have_no_more_data", may_have_no_more_data })

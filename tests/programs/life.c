/* Programs whose engine can't get what it needs when memory comes near the budget, or when they fork. */
#include "check.h"
#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { NOBODY = 65534, NOT_ALLOWED = 77, THREADS_MAX = 1000 };

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

static void limit(int resource, rlim_t most)
{
    const struct rlimit both = { most, most };
    CHECK(setrlimit(resource, &both) == 0);
}

static void enter_namespace(void)
{
    if (unshare(CLONE_NEWPID) != 0 && errno == EPERM)
        exit(NOT_ALLOWED);
}

static void *sleeps(void *argument)
{
    for (;;)
        pause();
    return argument;
}

/* The program has the /proc of another pid namespace. Threads have other numbers there. A call that waits for
 * activation comes back. */
static void fills_in_another_namespace(void)
{
    CHECK(getpid() == 1);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeps, NULL) == 0);
    char *area = filled(LARGE, 1);
    limit(RLIMIT_NOFILE, 32);
    CHECK(threads() == 2);
    VERIFY(area, LARGE, 1);
}

/* A child in another pid namespace can have no engine. Without pages that are out the child needs none. */
static void forks_into_another_namespace(void)
{
    char *small = filled(MIB, 1);
    enter_namespace();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(getpid() == 1);
        VERIFY(small, MIB, 1);
        /* The namespace ends with its first process. */
        sleep(20);
        _exit(0);
    }
    char *area = filled(LARGE, 2);
    REQUIRE_OUT(area, LARGE);
    CHECK(fork() == -1 && errno == ENOMEM);
    VERIFY(area, LARGE, 2);
    VERIFY(small, MIB, 1);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
}

/* The program executes itself, so that it has a limit from the beginning. */
static void again_with(int resource, rlim_t most, const char *name)
{
    limit(resource, most);
    execl("/proc/self/exe", "life", name, NULL);
}

static void can_queue_no_signal(void) { again_with(RLIMIT_SIGPENDING, 0, "has_a_full_queue"); }
static void can_queue_no_signal_and_waits(void) { again_with(RLIMIT_SIGPENDING, 0, "waits_with_a_full_queue"); }
static void can_start_few_threads(void) { again_with(RLIMIT_NPROC, 60, "uses_up_its_threads"); }

/* Calls that wait for activation come back. */
static void has_a_full_queue(void)
{
    char *area = filled(LARGE, 1);
    limit(RLIMIT_NOFILE, 32);
    char *more = map(LARGE);
    CHECK(madvise(more, LARGE, 23 /* MADV_POPULATE_WRITE */) == 0 || errno == EINVAL);
    VERIFY(area, LARGE, 1);
    VERIFY_ZERO(more, LARGE);
}

static void waits_with_a_full_queue(void)
{
    char *area = filled(LARGE, 1);
    say("ready");
    sleeps(area);
}

/* The kernel limits only the threads of ordinary users. */
static void uses_up_its_threads(void)
{
    CHECK(setresuid(NOBODY, NOBODY, NOBODY) == 0);
    pthread_attr_t small;
    pthread_t thread;
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 64 << 10) == 0);
    int made = 0;
    while (made < THREADS_MAX && pthread_create(&thread, &small, sleeps, NULL) == 0)
        made++;
    CHECK(made < THREADS_MAX);
    char *area = filled(LARGE, 1);
    VERIFY(area, LARGE, 1);
    fill(area, LARGE, 2);
    VERIFY(area, LARGE, 2);
}

MAIN({ "fills_in_another_namespace", fills_in_another_namespace },
     { "forks_into_another_namespace", forks_into_another_namespace },
     { "can_queue_no_signal", can_queue_no_signal },
     { "can_queue_no_signal_and_waits", can_queue_no_signal_and_waits },
     { "has_a_full_queue", has_a_full_queue },
     { "waits_with_a_full_queue", waits_with_a_full_queue },
     { "can_start_few_threads", can_start_few_threads },
     { "uses_up_its_threads", uses_up_its_threads })

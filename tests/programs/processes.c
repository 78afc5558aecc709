/* Copies of the process, and other programs started from it. */
#include "check.h"
#include <spawn.h>

extern char **environ;

static void ended_well(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("the child ended with %s %d", WIFEXITED(status) ? "status" : "signal",
             WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

/* Within the budget a fork is as always: both go over their budgets afterwards, each with its own bytes. */
static void fork_within_budget(void)
{
    char *memory = filled(12 * MIB, 1);
    char *large = map(LARGE);
    fill(large, MIB, 2);
    CHECK(pages_out(memory, 12 * MIB) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    uint64_t own = child == 0 ? 3 : 4;
    VERIFY(memory, 12 * MIB, 1);
    fill(large, LARGE, own);
    fill(memory, 4 * MIB, own);
    push_out();
    REQUIRE_OUT(large, LARGE);
    VERIFY(large, LARGE, own);
    VERIFY(memory, 4 * MIB, own);
    VERIFY_FROM(memory + 4 * MIB, 8 * MIB, 1, 4 * MIB / PAGE);
    if (child == 0)
        _exit(0);
    ended_well(child);
    VERIFY(large, LARGE, own);
}

/* A child of a child. */
static void fork_of_a_fork(void)
{
    char *memory = filled(8 * MIB, 5);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pid_t grandchild = fork();
        CHECK(grandchild >= 0);
        char *large = filled(LARGE, grandchild == 0 ? 6 : 7);
        REQUIRE_OUT(large, LARGE);
        VERIFY(large, LARGE, grandchild == 0 ? 6 : 7);
        VERIFY(memory, 8 * MIB, 5);
        if (grandchild != 0)
            ended_well(grandchild);
        _exit(0);
    }
    ended_well(child);
    VERIFY(memory, 8 * MIB, 5);
}

/* Was over the budget, gave it back, and forks with nothing evicted but with memory that is registered. */
static void fork_after_giving_back(void)
{
    char *memory = filled(8 * MIB, 8);
    push_out();
    VERIFY(memory, 8 * MIB, 8);
    if (getenv("FARPAGE_SESSION") != NULL && pages_out(memory, 8 * MIB) > 0)
        FAIL("pages of 8 MiB are out right after they were read");
    pid_t child = -1;
    for (int attempt = 0; child < 0 && attempt < 100; attempt++) {
        VERIFY(memory, 8 * MIB, 8);
        child = fork();
        CHECK(child >= 0 || errno == ENOMEM);
        if (child < 0)
            usleep(10 * 1000);
    }
    /* Pages of libc's own may be out, which we can't bring back: then it stays refused, and that is right. */
    if (child < 0)
        return;
    fill(memory, 2 * MIB, child == 0 ? 9 : 10);
    push_out();
    VERIFY(memory, 2 * MIB, child == 0 ? 9 : 10);
    VERIFY_FROM(memory + 2 * MIB, 6 * MIB, 8, 2 * MIB / PAGE);
    if (child == 0)
        _exit(0);
    ended_well(child);
}

/* While pages are out a child could not get at them: refused, and nothing is harmed. */
static void fork_refused(void)
{
    char *memory = filled(LARGE, 11);
    REQUIRE_OUT(memory, LARGE);
    pid_t child = fork();
    if (getenv("FARPAGE_SESSION") != NULL)
        CHECK(child == -1 && errno == ENOMEM);
    if (child == 0) {
        VERIFY(memory, LARGE, 11);
        _exit(0);
    }
    VERIFY(memory, LARGE, 11);
    CHECK(_Fork() == -1 || getenv("FARPAGE_SESSION") == NULL);
    VERIFY(memory, LARGE, 11);
}

/* A child that was made behind libc's back never reads a wrong byte: it has the right one, or dies. */
static void bare_clone(void)
{
    char *memory = filled(LARGE, 12);
    REQUIRE_OUT(memory, LARGE);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    CHECK(child >= 0 || errno == ENOMEM);
    if (child == 0) {
        for (size_t page = 0; page < LARGE / PAGE; page++)
            for (size_t word = 0; word < WORDS; word++)
                if (((volatile uint64_t *)(memory + page * PAGE))[word] != word_of(12, page, word))
                    syscall(SYS_exit_group, 77);
        syscall(SYS_exit_group, 0);
    }
    if (child > 0) {
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV));
    }
    VERIFY(memory, LARGE, 12);
}

static void run_true(void)
{
    pid_t child;
    char *const arguments[] = { "sh", "-c", "exit 0", NULL };
    CHECK(posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ) == 0);
    ended_well(child);
    CHECK(posix_spawnp(&child, "no-such-program", NULL, NULL, arguments, environ) == ENOENT);
}

/* vfork's child uses the parent's memory, evicted pages too. */
static void programs_started_while_out(void)
{
    char *memory = filled(LARGE, 13);
    for (int round = 0; round < 3; round++) {
        push_out();
        REQUIRE_OUT(memory, LARGE);
        run_true();
        CHECK(system("exit 7") == 7 << 8);
        FILE *pipe = popen("echo from the shell; cat /dev/null", "r");
        CHECK(pipe != NULL);
        char line[64] = "";
        CHECK(fgets(line, sizeof line, pipe) != NULL && strcmp(line, "from the shell\n") == 0);
        CHECK(pclose(pipe) == 0);
        pid_t child = vfork();
        CHECK(child >= 0);
        if (child == 0) {
            if (*(volatile uint64_t *)(memory + 40 * MIB) != word_of(13, 40 * MIB / PAGE, 0))
                _exit(78);
            execl("/bin/sh", "sh", "-c", "exit 0", (char *)NULL);
            _exit(79);
        }
        ended_well(child);
        VERIFY(memory, LARGE, 13);
    }
}

/* The program that takes our place starts afresh, under the same budget. */
static void other_program_in_our_place(void)
{
    char *memory = filled(LARGE, 14);
    REQUIRE_OUT(memory, LARGE);
    (void)memory;
    execl("/proc/self/exe", "processes", "fork_refused", (char *)NULL);
    FAIL("execl: %s", strerror(errno));
}

/* Threads use memory while another forks. */
static volatile int stop;
static char *shared;

static void *user(void *argument)
{
    (void)argument;
    while (!stop) {
        VERIFY(shared, 8 * MIB, 15);
        char *other = filled(MIB, 16);
        VERIFY(other, MIB, 16);
        CHECK(munmap(other, MIB) == 0);
    }
    return NULL;
}

static void forks_beside_threads(void)
{
    shared = filled(8 * MIB, 15);
    pthread_t thread[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&thread[i], NULL, user, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        CHECK(child >= 0 || errno == ENOMEM);
        if (child == 0) {
            VERIFY(shared, 8 * MIB, 15);
            char *own = filled(40 * MIB, 17);
            VERIFY(own, 40 * MIB, 17);
            VERIFY(shared, 8 * MIB, 15);
            _exit(0);
        }
        if (child > 0)
            ended_well(child);
    }
    stop = 1;
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

MAIN({ "fork_within_budget", fork_within_budget }, { "fork_of_a_fork", fork_of_a_fork },
     { "fork_after_giving_back", fork_after_giving_back }, { "fork_refused", fork_refused },
     { "bare_clone", bare_clone }, { "programs_started_while_out", programs_started_while_out },
     { "other_program_in_our_place", other_program_in_our_place }, { "forks_beside_threads", forks_beside_threads })

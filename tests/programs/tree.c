/* A tree of processes, some of which the test kills at any moment. The root keeps MEMBERS of them going until
 * there is a file `stop`: children, children of children, and processes that execute the program anew. All
 * work on memory of their own, and on what they inherited, if anything. The root waits for all of them, also
 * for those whose maker was killed. */
#include "check.h"
#include <sys/prctl.h>

#define MEMBERS 20
#define OWN (16 * MIB)
#define SECONDS_MAX 300

static int is_over(void)
{
    return access("stop", F_OK) == 0;
}

/* Works until the end. Ends with 0 if every byte was right all the time. */
static void work(const char *inherited, uint64_t seed)
{
    /* If the test dies nobody makes `stop`. */
    alarm(SECONDS_MAX);
    char *own = map(OWN);
    for (uint64_t round = mix(getpid()); !is_over(); round++) {
        fill(own, OWN, round);
        if (inherited != NULL)
            VERIFY(inherited, OWN, seed);
        VERIFY(own, OWN, round);
    }
    exit(0);
}

/* Starts a member, or one that makes another. Returns the number of members that were made: a member that is
 * killed early may not have made another. */
static int start(int kind, const char *inherited, uint64_t seed)
{
    int born[2];
    CHECK(pipe2(born, O_CLOEXEC) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0 && kind == 0) {
        execl("/proc/self/exe", "tree", "member", NULL);
        FAIL("exec: %s", strerror(errno));
    }
    if (child == 0) {
        pid_t another = kind == 1 ? fork() : -1;
        CHECK(kind != 1 || another >= 0);
        if (another == 0)
            CHECK(write(born[1], "x", 1) == 1);
        close(born[1]);
        work(inherited, seed);
    }
    close(born[1]);
    char word;
    int more = read(born[0], &word, 1) == 1;
    close(born[0]);
    return 1 + more;
}

static void member(void)
{
    work(NULL, 0);
}

static void members(void)
{
    alarm(SECONDS_MAX);
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    char *memory = map(OWN);
    int alive = 0, made = 0, killed = 0, right = 0;
    for (uint64_t seed = 1; alive > 0 || !is_over();) {
        if (!is_over()) {
            fill(memory, OWN, ++seed);
            for (; alive < MEMBERS; made++)
                alive += start(made % 3, memory, seed);
        }
        VERIFY(memory, OWN, seed);
        int status;
        for (pid_t child; (child = waitpid(-1, &status, WNOHANG)) > 0; alive--) {
            if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
                killed++;
            else if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
                right++;
            else
                FAIL("member %d ended with status %x", child, status);
        }
        usleep(1000);
    }
    printf("%d made, %d killed, %d right\n", made, killed, right);
    fflush(stdout);
    CHECK(munmap(memory, OWN) == 0);
    say("freed");
    for (int i = 0; access("go", F_OK) != 0; i++) {
        CHECK(i < 12000);
        usleep(5000);
    }
}

MAIN({ "members", members }, { "member", member })

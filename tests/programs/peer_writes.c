/* Another process writes to memory of which pages are out. Its write pins a page, and no protection of the
 * page stops it. */
#include "check.h"

enum { ROUNDS = 400, PIECE = 64, CHURNS = 2 };

static char *memory; /* Mapped before the fork, so that both processes know its address. */
static volatile int stop;

struct message {
    size_t page;
    size_t pages;
    uint64_t seed;
};

/* Writes to pages of the upper half, here and there, so that pages of the lower half are evicted. */
static void *churn(void *argument)
{
    uint64_t random = (uintptr_t)argument + 1;
    while (!stop) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        memory[LARGE / 2 + random % (LARGE / 2 / PAGE) * PAGE + 64]++;
    }
    return NULL;
}

/* The process that owns the memory. Verifies what the peer says that it wrote, or reads the pages that the
 * peer could not write. */
static void owner(int told, int answers)
{
    fill(memory, LARGE, ROUNDS + 1);
    REQUIRE_OUT(memory, LARGE);
    pthread_t thread[CHURNS];
    for (uintptr_t i = 0; i < CHURNS; i++)
        CHECK(pthread_create(&thread[i], NULL, churn, (void *)i) == 0);
    struct message message = { 0 };
    CHECK(write(answers, &message, sizeof message) == sizeof message);
    while (read(told, &message, sizeof message) == sizeof message) {
        VERIFY_FROM(memory + message.page * PAGE, message.pages * PAGE, message.seed, message.page);
        for (size_t page = 0; message.pages == 0 && page < PIECE; page++)
            (void)*(volatile char *)(memory + (message.page + page) * PAGE);
        CHECK(write(answers, &message, sizeof message) == sizeof message);
    }
    stop = 1;
    for (int i = 0; i < CHURNS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

/* Returns the number of pages that were written. Without a privileged userfaultfd the kernel doesn't wait for
 * a page that is out: it writes fewer bytes, or says EFAULT. */
static size_t pages_written(pid_t child, char *piece, size_t page)
{
    struct iovec mine = { piece, PIECE * PAGE }, others = { memory + page * PAGE, PIECE * PAGE };
    ssize_t written = process_vm_writev(child, &mine, 1, &others, 1, 0);
    CHECK(written >= 0 || errno == EFAULT);
    return written < 0 ? 0 : (size_t)written / PAGE;
}

static void from_a_parent(void)
{
    int told[2], answers[2], status;
    memory = map(LARGE);
    CHECK(pipe(told) == 0 && pipe(answers) == 0 && signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(close(told[1]) == 0 && close(answers[0]) == 0);
        owner(told[0], answers[1]);
        _exit(0);
    }
    CHECK(close(told[0]) == 0 && close(answers[1]) == 0);
    static char piece[PIECE * PAGE];
    struct message message = { 0 }, answer;
    size_t pages = 0;
    /* A child that has found a wrong byte answers no more. */
    while (read(answers[0], &answer, sizeof answer) == sizeof answer && message.seed < ROUNDS) {
        message.seed++;
        if (message.seed == 1 || message.pages > 0)
            message.page = mix(message.seed) % (LARGE / 2 / PAGE - PIECE);
        fill_from(piece, sizeof piece, message.seed, message.page);
        message.pages = pages_written(child, piece, message.page);
        pages += message.pages;
        if (write(told[1], &message, sizeof message) != sizeof message)
            break;
    }
    CHECK(close(told[1]) == 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(message.seed == ROUNDS && pages > 0);
}

MAIN({ "from_a_parent", from_a_parent })

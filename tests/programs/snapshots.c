/* Forks again and again under a full pool that has no area behind it. The pool compresses pages once more and
 * compacts itself all the time, and each child must find the pool whole. Formerly an object was moved without
 * the lock that a fork waits for. A fork could copy it half moved, and the child read a page of other
 * bytes. */
#include "check.h"

#define PAGES (40 * MIB / PAGE)
#define LINE ((size_t)32)
/* Pages written between two forks. */
#define WRITES 600

static char *memory;
static uint64_t *versions;

/* Makes a line that zstd compresses much better than faster codecs do. */
static void line_of(size_t page, size_t line, char *text)
{
    uint64_t digits = mix(mix(page * PAGE + line) ^ versions[page]);
    snprintf(text, LINE + 1, "words that repeat%015lx", digits >> 4);
}

static void write_page(size_t page, uint64_t version)
{
    char text[LINE + 1];
    versions[page] = version;
    for (size_t line = 0; line < PAGE / LINE; line++) {
        line_of(page, line, text);
        memcpy(memory + page * PAGE + line * LINE, text, LINE);
    }
}

static void verify_page(size_t page)
{
    char text[LINE + 1];
    for (size_t line = 0; line < PAGE / LINE; line++) {
        const char *found = memory + page * PAGE + line * LINE;
        line_of(page, line, text);
        if (memcmp(found, text, LINE) != 0)
            FAIL("line %zu of page %zu is `%.32s`, not `%s`", line, page, found, text);
    }
}

/* Forks as often as FORKS says. */
static void of_a_full_pool(void)
{
    const char *forks = getenv("FORKS");
    CHECK(forks != NULL);
    memory = map(PAGES * PAGE);
    versions = (uint64_t *)map((PAGES * sizeof *versions + PAGE - 1) / PAGE * PAGE);
    for (size_t page = 0; page < PAGES; page++)
        write_page(page, 1);
    uint64_t random = 1;
    for (int round = 0; round < atoi(forks); round++) {
        for (size_t i = 0; i < WRITES; i++) {
            random = mix(random + 1);
            verify_page(random % PAGES);
            write_page(random % PAGES, random);
        }
        pid_t child = fork();
        CHECK(child >= 0);
        for (size_t page = 0; child == 0 && page < PAGES; page++)
            verify_page(page);
        if (child == 0)
            _exit(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("child %d ended with %#x", round, status);
    }
}

MAIN({ "of_a_full_pool", of_a_full_pool })

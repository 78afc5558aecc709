/* Writes over the memory that the run's processes share, as a stray pointer could, or on purpose. The tests
 * look at what happens to Farpage, which reads that memory, and to the processes beside this one. */
#include "check.h"
#include <linux/falloc.h>
#include <linux/futex.h>
#include <sys/stat.h>

/* Layout of a session, as far as a case needs it. The tests pass the offsets, because they know the library's
 * types. */
static size_t head_bytes, records_offset, record_bytes, records;

struct shared {
    unsigned char *bytes;
    size_t length;
    int fd;
};

static size_t number(const char *name)
{
    const char *text = getenv(name);
    CHECK(text);
    return strtoull(text, NULL, 10);
}

static struct shared open_session(void)
{
    const char *path = getenv("FARPAGE_SESSION");
    CHECK(path);
    struct shared shared = {.fd = open(path, O_RDWR)};
    CHECK(shared.fd >= 0);
    struct stat stat;
    CHECK(fstat(shared.fd, &stat) == 0);
    shared.length = stat.st_size;
    shared.bytes = mmap(NULL, shared.length, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fd, 0);
    CHECK(shared.bytes != MAP_FAILED);
    return shared;
}

static void noise(unsigned char *to, size_t length)
{
    for (size_t i = 0; i < length; i++)
        to[i] = mix(i + 1) >> 8;
}

/* Goes on for longer than Farpage needs to look at the session. */
static void outlive_a_look(void)
{
    puts("written");
    fflush(stdout);
    sleep(100);
    puts("it goes on");
}

static void zeros(struct shared shared)
{
    memset(shared.bytes, 0, shared.length);
}

static void ones(struct shared shared)
{
    memset(shared.bytes, 0xff, shared.length);
}

static void random_bytes(struct shared shared)
{
    noise(shared.bytes, shared.length);
}

static void behind_the_head(struct shared shared)
{
    noise(shared.bytes + head_bytes, shared.length - head_bytes);
}

/* Changes the memory while Farpage reads it: noise in one piece, then the first content again, by turns. */
static void storm(struct shared shared)
{
    unsigned char *first = malloc(shared.length);
    CHECK(first);
    memcpy(first, shared.bytes, shared.length);
    for (size_t turn = 0; turn < 100000; turn++) {
        size_t at = mix(turn + 1) % shared.length, length = mix(turn + 7) % 65536;
        if (length > shared.length - at)
            length = shared.length - at;
        if (turn % 2)
            memcpy(shared.bytes, first, shared.length);
        else
            noise(shared.bytes + at, length);
    }
    outlive_a_look();
}

/* Writes only values that could be true: processes that report everything there is to report, and are other
 * processes all the time. Their names are meant for a terminal. */
static void flood(struct shared shared)
{
    static const char name[16] = "\033[2J\033]0;x\007\nab\xff";
    for (int turn = 1; turn <= 40; turn++) {
        for (size_t at = 8; at < records; at++) {
            unsigned char *record = shared.bytes + records_offset + at * record_bytes;
            uint32_t pid = 1000 * turn + at, told = 7 | 1 << 11;
            /* struct ProcessRecord: pid, notices, 24 values, name. */
            memcpy(record, &pid, 4);
            memcpy(record + 4, &told, 4);
            memcpy(record + 8 + 24 * 8, name, sizeof name);
        }
        usleep(100000);
    }
    puts("told");
}

/* Says what the first process says when it ends, but goes on. Claims, too, that the supervisor has told the
 * reason already. */
static void told(struct shared shared)
{
    /* struct First: pid, has_told, is_said, status, waits, is_seen, is_to_end. */
    uint32_t *first = (uint32_t *)(shared.bytes + number("FIRST_OFFSET"));
    noise(shared.bytes + records_offset, records * record_bytes);
    for (int word = 2; word <= 6; word++)
        first[word] = 1;
    __atomic_store_n(&first[1], 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &first[1], FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* The memory can't be taken away while Farpage reads it, and holes in it are zeros. */
static void shrink(struct shared shared)
{
    CHECK(ftruncate(shared.fd, 0) == -1 && errno == EPERM);
    CHECK(ftruncate(shared.fd, shared.length / 2) == -1 && errno == EPERM);
    CHECK(ftruncate(shared.fd, shared.length * 2) == -1 && errno == EPERM);
    CHECK(fcntl(shared.fd, F_ADD_SEALS, F_SEAL_WRITE) == -1 && errno == EPERM);
    struct stat stat;
    CHECK(fstat(shared.fd, &stat) == 0 && (size_t)stat.st_size == shared.length);
    printf("mode %o\n", stat.st_mode & 07777);
    fflush(stdout);
    CHECK(fallocate(shared.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, shared.length) == 0);
    for (size_t at = 0; at < shared.length; at += PAGE)
        CHECK(shared.bytes[at] == 0);
    outlive_a_look();
}

int main(int count, char **words)
{
    static const struct {
        const char *name;
        void (*write)(struct shared);
    } damages[] = {{"zeros", zeros},
                   {"ones", ones},
                   {"noise", random_bytes},
                   {"behind", behind_the_head},
                   {"storm", storm},
                   {"told", told}};
    CHECK(count == 2);
    head_bytes = number("HEAD_BYTES"), records_offset = number("RECORDS_OFFSET");
    record_bytes = number("RECORD_BYTES"), records = number("RECORDS");
    struct shared shared = open_session();
    CHECK(records_offset + records * record_bytes <= shared.length);
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++)
        if (!strcmp(words[1], damages[i].name)) {
            if (getenv("WAITS") != NULL)
                wait_for("go");
            damages[i].write(shared);
            outlive_a_look();
            return 0;
        }
    if (!strcmp(words[1], "flood"))
        flood(shared);
    else if (!strcmp(words[1], "shrink"))
        shrink(shared);
    else
        FAIL("there is no case %s", words[1]);
    return 0;
}

/* A program that does anything to its memory, in an order that a seed decides, and knows every byte of it.
 *
 * usage: random SEED SECONDS THREADS PAGES [OPERATION...]; the operations named at the end are left out.
 *
 * Each thread has regions of its own. Beside every page stands what must be in it (`struct page`). All pages
 * together are more than the budget, so most are out when an operation comes to them. At the end the program
 * prints "OK seed N pages-verified M". A failure prints one line and gives status 1: a wrong byte, an error
 * that the kernel has no reason for, a child that ends badly or never. */
#include "check.h"
#include <setjmp.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <ucontext.h>

#define REGIONS 64
#define THREADS_MAX 16
/* Pages that one call moves at most. Files, pipes and vectors are made for this number. */
#define CALL_PAGES 256
/* Pages that a handler looks at. */
#define HANDLER_PAGES 40
#define STACK (256 * 1024)
/* Bytes of an argument that another program gets. */
#define ARGUMENT 60000
/* Seconds that a process may take to end once its time is over. On a busy machine a process has taken more
 * than a minute. */
#define PATIENCE 300

enum kind { PRIVATE, SHARED, OF_FILE };
#define KINDS 3

/* What must be in one page. */
struct page {
    uint64_t seed;      /* its content (0: zeros) ... */
    uint64_t patch;     /* ... but for this word */
    uint64_t in_file;   /* the content of the file there, which it has again when it is thrown away */
    uint16_t patch_at;  /* at this place, if it isn't 0 */
    uint8_t protection; /* PROT_* */
};

struct region {
    char *start;
    size_t count;
    enum kind kind;
    struct page *pages;
};

struct thread {
    int number, depth;
    uint64_t random;
    struct region regions[REGIONS];
    size_t count, pages, operations, verified, signals;
    const char *doing;
    pid_t children[4];
    size_t born;
    int file, direct, pipe[2], sockets[2], ask[2], answer[2];
    char *for_handler, *alternate;
    pthread_t id;
};

static uint64_t seed;
static size_t pages_max;
static double end;
static const char *own_path;
static __thread struct thread *self;
static __thread sigjmp_buf out_of_verify, out_of_fault;
static __thread volatile sig_atomic_t may_jump;
static __thread char *volatile forbidden;

static void broken(const char *what, const void *where)
{
    fprintf(stderr, "BROKEN seed %lu thread %d depth %d operation %zu (%s) pid %d: %s at %p, errno %d (%s)\n", seed,
            self == NULL ? -1 : self->number, self == NULL ? 0 : self->depth, self == NULL ? 0 : self->operations,
            self == NULL ? "none" : self->doing, getpid(), what, where, errno, strerror(errno));
    _exit(1);
}

#define MUST(condition)                                                                                       \
    do {                                                                                                      \
        if (!(condition))                                                                                     \
            broken(#condition, NULL);                                                                         \
    } while (0)

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static size_t below(struct thread *t, size_t limit)
{
    t->random += 0x9e3779b97f4a7c15u;
    return limit == 0 ? 0 : mix(t->random) % limit;
}

/* ---- content ---- */

static void expected(uint64_t *words, const struct page *page)
{
    for (size_t word = 0; word < WORDS; word++)
        words[word] = page->seed == 0 ? 0 : word_of(page->seed, page->seed, word);
    if (page->patch_at != 0)
        words[page->patch_at] = page->patch;
}

static char *place(const struct region *region, size_t page)
{
    return region->start + page * PAGE;
}

static void verify_page(struct thread *t, const struct region *region, size_t number)
{
    const struct page *page = &region->pages[number];
    if (!(page->protection & PROT_READ))
        return;
    uint64_t wanted[WORDS];
    expected(wanted, page);
    t->verified++;
    const uint64_t *found = (const uint64_t *)place(region, number);
    for (size_t word = 0; word < WORDS; word++)
        if (found[word] != wanted[word]) {
            fprintf(stderr, "WRONG BYTES: word %zu is %016lx, not %016lx (kind %d, protection %d)\n", word,
                    found[word], wanted[word], region->kind, page->protection);
            broken("wrong bytes", found + word);
        }
}

static void write_page(struct thread *t, struct region *region, size_t number)
{
    struct page *page = &region->pages[number];
    if (page->protection != (PROT_READ | PROT_WRITE))
        return;
    if (below(t, 4) == 0) {
        verify_page(t, region, number);
        page->patch_at = page->patch_at != 0 ? page->patch_at : (uint16_t)(1 + below(t, WORDS - 1));
        page->patch = below(t, SIZE_MAX);
        ((uint64_t *)place(region, number))[page->patch_at] = page->patch;
        return;
    }
    page->seed = 1 + below(t, SIZE_MAX - 1);
    page->patch_at = 0;
    expected((uint64_t *)place(region, number), page);
}

/* ---- regions ---- */

static struct region *add(struct thread *t, char *start, size_t count, enum kind kind)
{
    MUST(t->count < REGIONS);
    struct region *region = &t->regions[t->count++];
    *region = (struct region){ start, count, kind, calloc(count, sizeof(struct page)) };
    MUST(region->pages != NULL);
    for (size_t i = 0; i < count; i++) {
        region->pages[i].protection = PROT_READ | PROT_WRITE;
        region->pages[i].seed = region->pages[i].in_file = kind == OF_FILE ? i + 1 : 0;
    }
    t->pages += count;
    return region;
}

/* Removes pages from a region. */
static void cut(struct thread *t, struct region *region, size_t first, size_t count)
{
    size_t behind = region->count - first - count;
    if (behind > 0) {
        struct region *rest = add(t, place(region, first + count), behind, region->kind);
        memcpy(rest->pages, region->pages + first + count, behind * sizeof(struct page));
    }
    t->pages -= region->count - first;
    region->count = first;
    if (first == 0) {
        free(region->pages);
        *region = t->regions[--t->count];
    }
}

static struct region *region_at(struct thread *t, const char *start)
{
    for (size_t i = 0; i < t->count; i++)
        if (t->regions[i].start == start)
            return &t->regions[i];
    return NULL;
}

/* Chooses some pages of some region. Returns 0 if there is no region, or no room for the pieces. */
static int choose(struct thread *t, struct region **region, size_t *first, size_t *count)
{
    if (t->count == 0 || t->count > REGIONS - 4)
        return 0;
    *region = &t->regions[below(t, t->count)];
    *first = below(t, 3) == 0 ? 0 : below(t, (*region)->count);
    size_t most = (*region)->count - *first;
    *count = *first == 0 && below(t, 2) ? most : 1 + below(t, below(t, 2) || most < 16 ? most : 16);
    return 1;
}

static int is_of_one_kind(const struct region *region, size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++)
        if (region->pages[i].protection != region->pages[first].protection)
            return 0;
    return 1;
}

/* Notes that the content of pages was thrown away: they have zeros again, or what the file has. */
static void reset(struct region *region, size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++) {
        region->pages[i].seed = region->pages[i].in_file;
        region->pages[i].patch_at = 0;
    }
}

/* ---- operations on mappings ---- */

static void maps(struct thread *t)
{
    if (t->count > REGIONS - 4 || t->pages >= pages_max)
        return;
    static const int flags_of[KINDS] = { MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS, MAP_PRIVATE };
    enum kind kind = below(t, 3) > 0 ? PRIVATE : (enum kind)below(t, KINDS);
    size_t count = 1 + below(t, kind == PRIVATE && below(t, 3) > 0 ? 900 : 32);
    int flags = flags_of[kind] | (below(t, 6) == 0 ? MAP_POPULATE : 0) | (below(t, 4) == 0 ? MAP_NORESERVE : 0);
    /* Half of the time the new region lies beside another one. */
    char *hint = t->count > 0 && below(t, 2) ? t->regions[below(t, t->count)].start - count * PAGE : NULL;
    char *start = mmap(hint, count * PAGE, PROT_READ | PROT_WRITE, flags, kind == OF_FILE ? t->file : -1, 0);
    MUST(start != MAP_FAILED);
    struct region *region = add(t, start, count, kind);
    for (size_t i = 0, written = below(t, count + 1); i < written; i++)
        write_page(t, region, i);
}

static void unmaps(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count))
        return;
    MUST(munmap(place(region, first), count * PAGE) == 0);
    cut(t, region, first, count);
}

static void maps_anew(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count) || region->kind != PRIVATE)
        return;
    char *start = place(region, first);
    MUST(mmap(start, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start);
    memset(region->pages + first, 0, count * sizeof(struct page));
    for (size_t i = first; i < first + count; i++)
        region->pages[i].protection = PROT_READ | PROT_WRITE;
}

static void resizes(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count) || region->kind != PRIVATE)
        return;
    size_t before = region->count, after = below(t, 2) ? 1 + below(t, before) : before + 1 + below(t, 200);
    if (after > before && t->pages >= pages_max)
        return;
    char *start = mremap(region->start, before * PAGE, after * PAGE, below(t, 4) ? MREMAP_MAYMOVE : 0);
    /* The kernel doesn't grow several mappings at once, and doesn't move one that may not move. */
    if (start == MAP_FAILED)
        return;
    region->start = start;
    region->pages = realloc(region->pages, after * sizeof(struct page));
    for (size_t i = before; i < after; i++)
        region->pages[i] = (struct page){ .protection = region->pages[before - 1].protection };
    region->count = after;
    t->pages += after - before;
}

/* Moves pages to a new place, or over another region. */
static void moves(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count) || !is_of_one_kind(region, first, count))
        return;
    char *from = place(region, first), *to = NULL;
    for (size_t i = 0; i < t->count && to == NULL && below(t, 2); i++)
        if (&t->regions[i] != region && t->regions[i].count >= count)
            to = t->regions[i].start;
    int is_over = to != NULL;
    if (!is_over) {
        to = mmap(NULL, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        MUST(to != MAP_FAILED);
    }
    struct page *pages = malloc(count * sizeof(struct page));
    memcpy(pages, region->pages + first, count * sizeof(struct page));
    enum kind kind = region->kind;
    int is_moved = mremap(from, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
    if (!is_moved) /* The kernel doesn't move several pieces at once. What was at the target may be gone. */
        MUST(munmap(to, count * PAGE) == 0);
    else
        cut(t, region, first, count);
    if (is_over)
        cut(t, region_at(t, to), 0, count);
    if (is_moved)
        memcpy(add(t, to, count, kind)->pages, pages, count * sizeof(struct page));
    free(pages);
}

static void advises(struct thread *t)
{
    static const int harmless[] = { MADV_WILLNEED, MADV_COLD, MADV_PAGEOUT, MADV_HUGEPAGE, MADV_NOHUGEPAGE,
                                    MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_RANDOM, MADV_SEQUENTIAL,
                                    MADV_NORMAL, MADV_DONTDUMP, MADV_DODUMP };
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count))
        return;
    if (below(t, 3) > 0) { /* A hint. The kernel may refuse to populate. */
        madvise(place(region, first), count * PAGE, harmless[below(t, sizeof harmless / sizeof *harmless)]);
        return;
    }
    MUST(madvise(place(region, first), count * PAGE, MADV_DONTNEED) == 0);
    if (region->kind != SHARED)
        reset(region, first, count);
}

static void protects(struct thread *t)
{
    static const int protections[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE };
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count))
        return;
    for (int turn = 0; turn < 2; turn++) {
        int protection = turn == 0 ? protections[below(t, 4)] : PROT_READ | PROT_WRITE;
        MUST(mprotect(place(region, first), count * PAGE, protection) == 0);
        for (size_t i = first; i < first + count; i++)
            region->pages[i].protection = (uint8_t)protection;
        if (below(t, 2))
            return;
    }
}

/* ---- touches ---- */

static void verifies(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count))
        return;
    /* A handler may jump here. */
    if (sigsetjmp(out_of_verify, 1) == 0) {
        may_jump = 1;
        for (size_t i = 0, order = below(t, 3); i < count; i++)
            verify_page(t, region, first + (order == 0 ? i : order == 1 ? count - 1 - i : (i * 37 + 11) % count));
    }
    may_jump = 0;
}

static void verify_all(struct thread *t)
{
    for (size_t i = 0; i < t->count; i++)
        for (size_t page = 0; page < t->regions[i].count; page++)
            verify_page(t, &t->regions[i], page);
}

static void writes(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count))
        return;
    for (size_t i = 0, in_order = below(t, 3); i < count && (in_order || i < 40); i += 1 + below(t, 3))
        write_page(t, region, first + (in_order ? i : below(t, count)));
}

/* Touches memory that the program has forbidden itself: there must be a signal. */
static void faults(struct thread *t)
{
    struct region *region;
    size_t first, count;
    if (!choose(t, &region, &first, &count) || region->pages[first].protection == (PROT_READ | PROT_WRITE))
        return;
    volatile char *touched = place(region, first) + below(t, PAGE);
    if (sigsetjmp(out_of_fault, 1) == 0) {
        forbidden = place(region, first);
        if (region->pages[first].protection == PROT_NONE)
            (void)*touched;
        else
            *touched = 1;
        broken("no signal for a forbidden access", (const void *)touched);
    }
}

/* Prints the line of /proc/self/maps that has an address, by calls that need no heap. */
static void print_mapping(const char *name, uintptr_t address)
{
    static char text[1 << 16];
    int maps = open("/proc/self/maps", O_RDONLY);
    size_t kept = 0;
    for (ssize_t got; maps >= 0 && (got = read(maps, text + kept, sizeof text - 1 - kept)) > 0;) {
        text[kept + (size_t)got] = 0;
        char *line = text;
        for (char *end_of_line; (end_of_line = strchr(line, '\n')) != NULL; line = end_of_line + 1) {
            char *after;
            uintptr_t start = strtoul(line, &after, 16), past = strtoul(after + 1, NULL, 16);
            if (start <= address && address < past)
                dprintf(2, "%s %lx is in %.*s\n", name, address, (int)(end_of_line - line), line);
        }
        kept = strlen(line);
        memmove(text, line, kept);
    }
    close(maps);
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
    char *expected_at = forbidden;
    if (expected_at != NULL && (size_t)((char *)info->si_addr - expected_at) < PAGE) {
        forbidden = NULL;
        siglongjmp(out_of_fault, 1);
    }
    const greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    dprintf(2, "pid %d: code %d, trap %lld, error %llx\n", getpid(), info->si_code, registers[REG_TRAPNO],
            registers[REG_ERR]);
    print_mapping("access to", (uintptr_t)registers[REG_CR2]);
    print_mapping("instruction at", (uintptr_t)registers[REG_RIP]);
    print_mapping("stack at", (uintptr_t)registers[REG_RSP]);
    print_mapping("handler's frame at", (uintptr_t)context);
    if (self != NULL)
        print_mapping("alternate stack at", (uintptr_t)self->alternate);
    broken(signal == SIGBUS ? "SIGBUS" : "SIGSEGV", info->si_addr);
}

static void on_signal(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info, (void)context;
    int kept = errno;
    struct thread *t = self;
    if (t == NULL || t->for_handler == NULL)
        return;
    size_t page = t->signals++ * 7 % HANDLER_PAGES;
    VERIFY_FROM(t->for_handler + page * PAGE, PAGE, seed, page);
    errno = kept;
    if (may_jump && t->signals % 4 == 0) {
        may_jump = 0;
        siglongjmp(out_of_verify, 1);
    }
}

/* ---- system calls on memory that is out ---- */

/* Moves all bytes, though a call may be interrupted. */
static void all_of(ssize_t (*part)(int, void *, size_t, off_t), int file, char *memory, size_t bytes, off_t at)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t moved = part(file, memory + done, bytes - done, at + (off_t)done);
        if (moved < 0 && errno == EINTR)
            continue;
        MUST(moved > 0);
        done += (size_t)moved;
    }
}

static ssize_t writes_part(int file, void *memory, size_t bytes, off_t at)
{
    return pwrite(file, memory, bytes, at);
}

static ssize_t reads_part(int file, void *memory, size_t bytes, off_t at)
{
    return pread(file, memory, bytes, at);
}

static ssize_t writes_vector(int file, void *memory, size_t bytes, off_t at)
{
    struct iovec parts[2] = { { memory, bytes / 2 }, { (char *)memory + bytes / 2, bytes - bytes / 2 } };
    return pwritev(file, parts, 2, at);
}

static ssize_t reads_vector(int file, void *memory, size_t bytes, off_t at)
{
    struct iovec parts[2] = { { memory, bytes / 2 }, { (char *)memory + bytes / 2, bytes - bytes / 2 } };
    return preadv2(file, parts, 2, at, 0);
}

static ssize_t receives(int file, void *memory, size_t bytes, off_t at)
{
    (void)at;
    struct iovec part = { memory, bytes };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
    struct stat status;
    return fstat(file, &status) == 0 && S_ISSOCK(status.st_mode) ? recvmsg(file, &message, 0) : read(file, memory, bytes);
}

/* Moves bytes through a pipe or a pair of sockets, in pieces that fit into both. */
static void through(struct thread *t, int in, int out, char *from, char *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < 16384 ? bytes - done : 1 + below(t, 16384);
        struct iovec part = { from + done, piece };
        struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
        int is_pipe = in == t->pipe[1];
        ssize_t sent = !is_pipe ? sendmsg(in, &message, 0) : below(t, 2) ? vmsplice(in, &part, 1, 0) : write(in, from + done, piece);
        if (sent < 0 && errno == EINTR)
            continue;
        MUST(sent > 0);
        all_of(receives, out, to + done, (size_t)sent, 0);
        done += (size_t)sent;
    }
}

static void within_itself(struct thread *t, char *from, char *to, size_t bytes)
{
    int writes = (int)below(t, 2);
    for (size_t done = 0; done < bytes;) {
        struct iovec source = { from + done, bytes - done }, target = { to + done, bytes - done };
        ssize_t moved = writes ? process_vm_writev(getpid(), &source, 1, &target, 1, 0)
                               : process_vm_readv(getpid(), &target, 1, &source, 1, 0);
        if (moved < 0 && errno == EINTR)
            continue;
        MUST(moved > 0);
        done += (size_t)moved;
    }
}

/* Copies some pages over others by a system call. */
static void calls(struct thread *t)
{
    if (t->count < 2)
        return;
    struct region *source = &t->regions[below(t, t->count)], *target = &t->regions[below(t, t->count)];
    if (source == target || source->kind == SHARED || target->kind == SHARED)
        return;
    size_t most = source->count < target->count ? source->count : target->count;
    size_t wanted = 1 + below(t, most < CALL_PAGES ? most : CALL_PAGES), count = 0;
    size_t first = below(t, source->count - wanted + 1), first_to = below(t, target->count - wanted + 1);
    while (count < wanted && source->pages[first + count].protection & PROT_READ
           && target->pages[first_to + count].protection == (PROT_READ | PROT_WRITE))
        count++;
    if (count == 0)
        return;
    char *from = place(source, first), *to = place(target, first_to);
    size_t bytes = count * PAGE;
    switch (below(t, 6)) {
    case 0:
        all_of(writes_part, t->file, from, bytes, (off_t)MIB);
        all_of(reads_part, t->file, to, bytes, (off_t)MIB);
        break;
    case 1:
        all_of(writes_vector, t->file, from, bytes, (off_t)MIB);
        all_of(reads_vector, t->file, to, bytes, (off_t)MIB);
        break;
    case 2: {
        /* Not every file system has O_DIRECT. */
        int file = t->direct >= 0 ? t->direct : t->file;
        all_of(writes_part, file, from, bytes, (off_t)(4 * MIB));
        all_of(reads_part, file, to, bytes, (off_t)(4 * MIB));
        break;
    }
    case 3:
        through(t, t->pipe[1], t->pipe[0], from, to, bytes);
        break;
    case 4:
        through(t, t->sockets[0], t->sockets[1], from, to, bytes);
        break;
    default:
        within_itself(t, from, to, bytes);
    }
    for (size_t i = 0; i < count; i++) {
        struct page *copy = &target->pages[first_to + i], before = *copy;
        *copy = source->pages[first + i];
        copy->in_file = before.in_file;
        copy->protection = before.protection;
        verify_page(t, target, first_to + i);
    }
}

/* ---- another process writes into this one ---- */

#define POKED_PAGES 8

struct order {
    char *start;
    size_t count;
    uint64_t first_seed;
    pid_t poked; /* The thread that waits for the order, if ptrace is to write one word of each page. */
    uint16_t at[POKED_PAGES];
};

/* Writes a page, and returns whether it was written. Where a peer can't reach what is out, nothing of the
 * page is written. */
static int is_written(pid_t process, const struct order *order, size_t number)
{
    uint64_t words[WORDS];
    expected(words, &(struct page){ .seed = order->first_seed + number });
    char *start = order->start + number * PAGE;
    struct iovec mine = { words, PAGE }, theirs = { start, PAGE };
    if (order->poked == 0)
        return process_vm_writev(process, &mine, 1, &theirs, 1, 0) == (ssize_t)PAGE;
    return ptrace(PTRACE_POKEDATA, order->poked, (uint64_t *)start + order->at[number], order->first_seed + number) == 0;
}

/* Runs in the other process: does what it is told until nobody is there. */
static void be_peer(struct thread *t, pid_t process)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    t->doing = "peer";
    self = t;
    for (struct order order; read(t->ask[0], &order, sizeof order) == (ssize_t)sizeof order;) {
        char written[CALL_PAGES] = { 0 };
        int is_stopped = order.poked != 0 && ptrace(PTRACE_SEIZE, order.poked, NULL, NULL) == 0;
        uintptr_t due = 0;
        if (is_stopped) {
            int status;
            MUST(ptrace(PTRACE_INTERRUPT, order.poked, NULL, NULL) == 0);
            MUST(waitpid(order.poked, &status, __WALL) == order.poked && WIFSTOPPED(status));
            /* The thread may be stopped because a signal is due, which it gets afterwards. If that were a
             * SIGSYS of Farpage's and were dropped, the thread's call would never be made. The call would
             * look as if it had returned its own number, and the number of read is 0. */
            due = status >> 16 == 0 ? (uintptr_t)WSTOPSIG(status) : 0;
        }
        if (order.poked == 0 || is_stopped)
            for (size_t i = 0; i < order.count; i++)
                written[i] = (char)is_written(process, &order, i);
        if (is_stopped)
            MUST(ptrace(PTRACE_DETACH, order.poked, NULL, (void *)due) == 0);
        MUST(write(t->answer[1], written, sizeof written) == (ssize_t)sizeof written);
    }
    _exit(0);
}

/* The peer writes pages, which it pins. If `poked` isn't 0, it writes one word in each page while the thread
 * `poked` is stopped, past every protection. */
static void is_written_to_by_peer(struct thread *t, pid_t poked)
{
    struct region *region;
    size_t first, count;
    if (t->depth > 0 || !choose(t, &region, &first, &count) || region->kind != PRIVATE)
        return;
    struct order order = { .start = place(region, first), .first_seed = 1 + below(t, 1u << 30) };
    order.poked = poked;
    while (order.count < count && order.count < (order.poked ? POKED_PAGES : CALL_PAGES)
           && region->pages[first + order.count].protection == (PROT_READ | PROT_WRITE)) {
        uint16_t patched = region->pages[first + order.count].patch_at;
        if (order.poked)
            order.at[order.count] = patched != 0 ? patched : (uint16_t)(1 + below(t, WORDS - 1));
        order.count++;
    }
    char written[CALL_PAGES];
    MUST(write(t->ask[1], &order, sizeof order) == (ssize_t)sizeof order);
    all_of(receives, t->answer[0], written, sizeof written, 0);
    for (size_t i = 0; i < order.count; i++) {
        struct page *page = &region->pages[first + i];
        if (written[i] && order.poked) {
            page->patch_at = order.at[i];
            page->patch = order.first_seed + i;
        } else if (written[i]) {
            page->patch_at = 0;
            page->seed = order.first_seed + i;
        }
        verify_page(t, region, first + i);
    }
}

static void is_written_to(struct thread *t) { is_written_to_by_peer(t, 0); }

static void is_poked(struct thread *t) { is_written_to_by_peer(t, (pid_t)syscall(SYS_gettid)); }

/* ---- threads, coroutines, children ---- */

static void *verifies_elsewhere(void *argument)
{
    struct thread *t = argument;
    for (size_t page = 0; page < HANDLER_PAGES; page++)
        VERIFY_FROM(t->for_handler + page * PAGE, PAGE, seed, page);
    return argument;
}

static void makes_threads(struct thread *t)
{
    pthread_attr_t attributes;
    pthread_t thread;
    void *result;
    char *stack = map(STACK);
    sigset_t all, before;
    MUST(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    MUST(pthread_create(&thread, &attributes, verifies_elsewhere, t) == 0);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    MUST(pthread_join(thread, &result) == 0 && result == t);
    MUST(munmap(stack, STACK) == 0);
}

struct coroutine {
    ucontext_t outside, inside;
    volatile size_t turns;
};

static void swings(unsigned high, unsigned low)
{
    struct coroutine *coroutine = (struct coroutine *)((uintptr_t)high << 32 | low);
    volatile unsigned char room[8192];
    for (; coroutine->turns > 0; coroutine->turns--) {
        for (size_t i = 0; i < sizeof room; i++)
            room[i] = (unsigned char)(i * 7 + coroutine->turns);
        swapcontext(&coroutine->inside, &coroutine->outside);
        for (size_t i = 0; i < sizeof room; i++)
            MUST(room[i] == (unsigned char)(i * 7 + coroutine->turns));
    }
}

static void runs_coroutines(struct thread *t)
{
    struct coroutine coroutine = { .turns = 1 + below(t, 6) };
    uintptr_t address = (uintptr_t)&coroutine;
    char *stack = map(STACK);
    MUST(getcontext(&coroutine.inside) == 0);
    coroutine.inside.uc_stack.ss_sp = stack;
    coroutine.inside.uc_stack.ss_size = STACK;
    coroutine.inside.uc_link = &coroutine.outside;
    makecontext(&coroutine.inside, (void (*)(void))swings, 2, (unsigned)(address >> 32), (unsigned)address);
    while (coroutine.turns > 0) {
        MUST(swapcontext(&coroutine.outside, &coroutine.inside) == 0);
        writes(t);
        verifies(t);
    }
    MUST(munmap(stack, STACK) == 0);
}

static void fill_argument(char *argument, uint64_t content, size_t length)
{
    for (size_t i = 0; i < length; i++)
        argument[i] = (char)('a' + mix(content + i) % 26);
    argument[length] = 0;
}

/* Runs another program, with its name and arguments in memory that may be out. */
static void run_program(struct thread *t, size_t way)
{
    char *memory = map(STACK), *path = memory, *number = memory + 8192, *length = memory + 12288, *text = memory + 16384;
    char **words = (char **)(memory + 128 * 1024);
    uint64_t content = below(t, 1u << 30);
    size_t letters = below(t, ARGUMENT);
    snprintf(path, 8192, "%s", own_path);
    snprintf(number, 64, "%lu", content);
    snprintf(length, 64, "%zu", letters);
    fill_argument(text, content, letters);
    memcpy(words, ((char *[]){ path, "--compare", number, length, text, NULL }), 6 * sizeof *words);
    writes(t);
    verifies(t);
    pid_t child = -1;
    if (way == 0)
        errno = posix_spawn(&child, path, NULL, NULL, words, environ);
    else if ((child = way == 1 ? vfork() : fork()) == 0) {
        execve(path, words, environ);
        _exit(3);
    }
    MUST(child > 0);
    int status;
    while (waitpid(child, &status, 0) < 0)
        MUST(errno == EINTR);
    if (status != 0) {
        fprintf(stderr, "way %zu: wait status %#x\n", way, status);
        broken("a program", NULL);
    }
    MUST(munmap(memory, STACK) == 0);
}

static void runs_programs(struct thread *t)
{
    run_program(t, below(t, 2));
}

static void forks_programs(struct thread *t)
{
    run_program(t, 2);
}

/* Waits for children until `left` are left. */
static void reap(struct thread *t, size_t left)
{
    while (t->born > left) {
        int status;
        pid_t child = waitpid(t->children[0], &status, 0);
        if (child < 0 && errno == EINTR)
            continue;
        MUST(child == t->children[0]);
        if (status != 0) {
            fprintf(stderr, "child %d ended with wait status %#x\n", child, status);
            broken("a child", NULL);
        }
        memmove(t->children, t->children + 1, --t->born * sizeof *t->children);
    }
}

static void open_all(struct thread *t)
{
    char name[] = "random-XXXXXX";
    int file = mkstemp(name);
    MUST(file >= 0);
    t->file = file;
    t->direct = open(name, O_RDWR | O_DIRECT | O_CLOEXEC);
    MUST(unlink(name) == 0);
    uint64_t words[WORDS];
    for (size_t i = 0; i < CALL_PAGES; i++) {
        expected(words, &(struct page){ .seed = i + 1 });
        MUST(pwrite(file, words, PAGE, (off_t)(i * PAGE)) == (ssize_t)PAGE);
    }
    MUST(pipe(t->pipe) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, t->sockets) == 0);
}

static void run(struct thread *t, size_t most);

static void be_child(struct thread *t)
{
    alarm((unsigned)(end - now() > 0 ? end - now() : 0) + PATIENCE);
    t->depth++;
    t->born = 0;
    t->random += (uint64_t)getpid();
    close(t->file), close(t->direct), close(t->pipe[0]), close(t->pipe[1]), close(t->sockets[0]), close(t->sockets[1]);
    open_all(t);
    /* The parent goes on changing memory that both share. */
    for (size_t i = t->count; i-- > 0;)
        if (t->regions[i].kind == SHARED) {
            MUST(munmap(t->regions[i].start, t->regions[i].count * PAGE) == 0);
            cut(t, &t->regions[i], 0, t->regions[i].count);
        }
    size_t looks = below(t, 3);
    if (looks > 0)
        verify_all(t);
    run(t, below(t, 300));
    if (looks > 1)
        verify_all(t);
    reap(t, 0);
    _exit(0);
}

static void forks(struct thread *t)
{
    if (t->depth >= 2)
        return;
    reap(t, 2);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0)
        be_child(t);
    t->children[t->born++] = child;
    if (below(t, 3) == 0)
        reap(t, 0);
}

/* ---- all of it ---- */

static struct operation {
    const char *name;
    void (*run)(struct thread *t);
    /* How often the operation is chosen, in hundredths or so. */
    size_t share;
} operations[] = {
    { "map", maps, 10 },         { "unmap", unmaps, 4 },         { "map_anew", maps_anew, 2 },
    { "resize", resizes, 4 },    { "move", moves, 4 },           { "advise", advises, 14 },
    { "protect", protects, 7 },  { "verify", verifies, 16 },     { "write", writes, 14 },
    { "fault", faults, 4 },      { "call", calls, 12 },          { "peer", is_written_to, 3 },
    { "poke", is_poked, 1 },
    { "thread", makes_threads, 2 }, { "coroutine", runs_coroutines, 2 }, { "program", runs_programs, 1 },
    { "fork", forks, 1 },        { "verify_all", verify_all, 1 }, { "fork_program", forks_programs, 1 },
};
#define OPERATIONS (sizeof operations / sizeof *operations)

/* Runs at most `most` operations, and stops when time is up. */
static void run(struct thread *t, size_t most)
{
    size_t shares = 0;
    for (size_t i = 0; i < OPERATIONS; i++)
        shares += operations[i].share;
    for (size_t done = 0; done < most && now() < end; done++) {
        size_t at = below(t, shares), which = 0;
        while (at >= operations[which].share)
            at -= operations[which++].share;
        t->operations++;
        t->doing = operations[which].name;
        operations[which].run(t);
    }
}

static void *be_thread(void *argument)
{
    struct thread *t = self = argument;
    t->for_handler = filled(HANDLER_PAGES * PAGE, seed);
    stack_t stack = { .ss_sp = map(STACK), .ss_size = t->number % 2 ? 32768 : STACK / 2 };
    t->alternate = stack.ss_sp;
    MUST(t->number % 3 == 2 || sigaltstack(&stack, NULL) == 0);
    run(t, SIZE_MAX);
    t->doing = "end";
    verify_all(t);
    reap(t, 0);
    return argument;
}

static void handles(int signal, void (*handler)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_ONSTACK | SA_SIGINFO | flags };
    MUST(sigaction(signal, &action, NULL) == 0);
}

/* Makes the thread's peer, a process that writes into this one. Must be called before there are threads. */
static void make_peer(struct thread *t)
{
    MUST(pipe(t->ask) == 0 && pipe(t->answer) == 0);
    pid_t process = getpid(), child = fork();
    MUST(child >= 0);
    if (child == 0) {
        close(t->ask[1]);
        be_peer(t, process);
    }
    /* The pipes' other ends are closed here, so that the end of a peer is noticed. */
    close(t->ask[0]), close(t->answer[1]);
}

static int compare(char **words)
{
    static char wanted[ARGUMENT + 1];
    fill_argument(wanted, strtoul(words[2], NULL, 10), strtoul(words[3], NULL, 10));
    return strcmp(wanted, words[4]) != 0;
}

int main(int argc, char **argv)
{
    static struct thread threads[THREADS_MAX];
    if (argc == 5 && strcmp(argv[1], "--compare") == 0)
        return compare(argv);
    size_t count = argc >= 5 ? strtoul(argv[3], NULL, 10) : 0;
    if (count == 0 || count > THREADS_MAX) {
        fprintf(stderr, "usage: %s SEED SECONDS THREADS PAGES [OPERATION TO LEAVE OUT...]\n", argv[0]);
        return 2;
    }
    own_path = argv[0];
    seed = strtoul(argv[1], NULL, 10);
    end = now() + strtod(argv[2], NULL);
    pages_max = strtoul(argv[4], NULL, 10);
    for (int word = 5; word < argc; word++)
        for (size_t i = 0; i < OPERATIONS; i++)
            if (strcmp(argv[word], operations[i].name) == 0)
                operations[i].share = 0;
    alarm((unsigned)strtod(argv[2], NULL) + PATIENCE);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    handles(SIGUSR1, on_signal, SA_RESTART);
    handles(SIGSEGV, on_fault, SA_NODEFER);
    handles(SIGBUS, on_fault, SA_NODEFER);
    for (size_t i = 0; i < count; i++) {
        threads[i] = (struct thread){ .number = (int)i, .random = mix(seed * 1000 + i + 1), .doing = "start" };
        open_all(&threads[i]);
        make_peer(&threads[i]);
    }
    for (size_t i = 0; i < count; i++)
        MUST(pthread_create(&threads[i].id, NULL, be_thread, &threads[i]) == 0);
    for (size_t i = 0; now() < end - 0.2; i++) {
        usleep(1500);
        pthread_kill(threads[mix(i) % count].id, SIGUSR1);
    }
    size_t verified = 0;
    for (size_t i = 0; i < count; i++) {
        MUST(pthread_join(threads[i].id, NULL) == 0);
        verified += threads[i].verified;
    }
    printf("OK seed %lu pages-verified %zu\n", seed, verified);
    return 0;
}

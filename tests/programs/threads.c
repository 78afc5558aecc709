/* Changes of memory while other threads use the same memory, and pages are on their way in or out. */
#include "check.h"
#include <sched.h>

enum { THREADS = 4, ROUNDS = 60 };
#define OWN (12 * MIB)

/* Each thread owns a part of the memory. The thread rewrites random pages of its part, and knows the version
 * of each. */
static char *memory;
static unsigned char *versions; /* Small, and touched all the time: it stays in memory. */
static volatile int stop;
static volatile int zeros_allowed;
static volatile unsigned long touched[THREADS];

static void write_page(char *page, size_t number, unsigned version)
{
    fill_from(page, PAGE, version, number);
}

/* A page has its version's content. If pages may be thrown away, the page may also be zeros, or zeros from
 * the word at which it was thrown away during the read. So every word is zero or right. */
static void check_page(const char *page, size_t number, unsigned version)
{
    const volatile uint64_t *words = (const volatile uint64_t *)page;
    for (size_t word = 0; word < WORDS; word++) {
        uint64_t found = words[word], expected = word_of(version, number, word);
        if (found != expected && !(zeros_allowed && found == 0))
            FAIL("page %zu word %zu at %p is %016lx, not %016lx (version %u)", number, word, (void *)(page + word * 8),
                 found, expected, version);
    }
}

static void *hammer(void *argument)
{
    size_t mine = (uintptr_t)argument, pages = OWN / PAGE;
    uint64_t random = mine + 1;
    while (!stop) {
        random = mix(random + 0x9e3779b97f4a7c15u);
        size_t number = mine * pages + random % pages;
        char *page = memory + number * PAGE;
        check_page(page, number, versions[number]);
        if (random >> 40 & 1) {
            unsigned char next = (unsigned char)(versions[number] % 250 + 1);
            versions[number] = next;
            write_page(page, number, next);
        }
        touched[mine]++;
    }
    return NULL;
}

/* While a change is half done a thread may get SIGSEGV. The thread tries again, as a collector's barrier
 * does. */
static void try_again(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    char *address = info->si_addr;
    if (address < memory || address >= memory + THREADS * OWN) {
        static const char text[] = "a fault outside the memory of the test\n";
        (void)!write(2, text, sizeof text - 1);
        _exit(1);
    }
    sched_yield();
}

static void under_hammers(void (*change)(int round))
{
    struct sigaction action = { .sa_sigaction = try_again, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    memory = map(THREADS * OWN);
    versions = malloc(THREADS * OWN / PAGE);
    memset(versions, 1, THREADS * OWN / PAGE);
    fill(memory, THREADS * OWN, 1);
    pthread_t thread[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&thread[i], NULL, hammer, (void *)i) == 0);
    for (int round = 0; round < ROUNDS; round++)
        change(round);
    /* The first touch of each thread may have waited for the disk all the while. */
    for (int i = 0; i < THREADS; i++)
        while (touched[i] == 0)
            usleep(1000);
    stop = 1;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    for (size_t number = 0; number < THREADS * OWN / PAGE; number++)
        check_page(memory + number * PAGE, number, versions[number]);
}

static void nothing(int round)
{
    (void)round;
    usleep(30 * 1000);
}

static void only_threads(void)
{
    under_hammers(nothing);
}

static char *part_of(int round, size_t bytes)
{
    return memory + mix((uint64_t)round + 99) % ((THREADS * OWN - bytes) / PAGE) * PAGE;
}

static void protect_and_back(int round)
{
    char *part = part_of(round, 4 * MIB);
    CHECK(mprotect(part, 4 * MIB, round % 2 ? PROT_READ : PROT_NONE) == 0);
    usleep(5000);
    CHECK(mprotect(part, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
    usleep(5000);
}

static void protection_changes(void)
{
    under_hammers(protect_and_back);
}

static void throw_away(int round)
{
    CHECK(madvise(part_of(round, 2 * MIB), 2 * MIB, round % 3 ? MADV_DONTNEED : MADV_FREE) == 0);
    usleep(5000);
}

static void thrown_away(void)
{
    zeros_allowed = 1;
    under_hammers(throw_away);
}

static void put_new(int round)
{
    char *part = part_of(round, 2 * MIB);
    if (round % 2) {
        CHECK(map_at(part, 2 * MIB, MAP_FIXED) == part);
    } else {
        CHECK(munmap(part, 2 * MIB) == 0);
        /* A mapping of another thread could land here, but all mappings of this test are made before the
         * threads start. */
        CHECK(map_at(part, 2 * MIB, MAP_FIXED) == part);
    }
    usleep(5000);
}

static void mapped_anew(void)
{
    zeros_allowed = 1;
    under_hammers(put_new);
}

/* Pages move away and back: the content must come along both times. */
static char *aside;

static void move_and_back(int round)
{
    if (aside == NULL) {
        aside = mmap(NULL, 4 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(aside != MAP_FAILED);
    }
    char *part = part_of(round, 4 * MIB);
    CHECK(mremap(part, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, aside) == aside);
    usleep(2000);
    CHECK(mremap(aside, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, part) == part);
    usleep(5000);
}

static void moved_and_back(void)
{
    under_hammers(move_and_back);
}

static void lock_and_unlock(int round)
{
    char *part = part_of(round, MIB);
    CHECK(mlock(part, MIB) == 0);
    usleep(3000);
    CHECK(pages_out(part, MIB) == 0);
    CHECK(munlock(part, MIB) == 0);
    usleep(3000);
}

static void locked(void)
{
    under_hammers(lock_and_unlock);
}

static void advise(int round)
{
    static const int advice[] = { MADV_WILLNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE, 20 /* COLD */, 21 /* PAGEOUT */,
        22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */, 25 /* COLLAPSE */ };
    if (madvise(part_of(round, 4 * MIB), 4 * MIB, advice[round % 8]) != 0)
        CHECK(errno == EINVAL || errno == EAGAIN || errno == ENOMEM || errno == EBUSY);
    usleep(5000);
}

static void advised(void)
{
    under_hammers(advise);
}

/* Other memory comes and goes, as in every program. */
static void come_and_go(int round)
{
    char *other = filled(8 * MIB, (uint64_t)round);
    other = mremap(other, 8 * MIB, 16 * MIB, MREMAP_MAYMOVE);
    CHECK(other != MAP_FAILED);
    VERIFY(other, 8 * MIB, (uint64_t)round);
    VERIFY_ZERO(other + 8 * MIB, 8 * MIB);
    CHECK(munmap(other, 16 * MIB) == 0);
}

static void others_come_and_go(void)
{
    under_hammers(come_and_go);
}

/* Every thread of the program changes its own mappings at once. There are more threads than places for
 * them. */
static void *changer(void *argument)
{
    uint64_t seed = (uintptr_t)argument;
    for (int round = 0; round < 4; round++) {
        char *own = filled(MIB, seed);
        CHECK(mprotect(own, MIB, PROT_READ) == 0);
        CHECK(mprotect(own, MIB, PROT_READ | PROT_WRITE) == 0);
        own = mremap(own, MIB, 2 * MIB, MREMAP_MAYMOVE);
        CHECK(own != MAP_FAILED);
        VERIFY(own, MIB, seed);
        VERIFY_ZERO(own + MIB, MIB);
        CHECK(madvise(own, MIB, MADV_DONTNEED) == 0);
        VERIFY_ZERO(own, MIB);
        CHECK(munmap(own, 2 * MIB) == 0);
    }
    return NULL;
}

static void many_change(void)
{
    char *other = filled(LARGE, 3);
    enum { MANY = 100 };
    pthread_t thread[MANY];
    for (uintptr_t i = 0; i < MANY; i++)
        CHECK(pthread_create(&thread[i], NULL, changer, (void *)(i + 1)) == 0);
    for (int i = 0; i < MANY; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    VERIFY(other, LARGE, 3);
}

/* Many threads fault on one page at once. One thread brings it in, and all go on with the same bytes. */
static void *same_pages(void *argument)
{
    (void)argument;
    for (int round = 0; round < 3; round++)
        VERIFY(memory, 48 * MIB, 4);
    return NULL;
}

static void all_on_the_same_page(void)
{
    memory = filled(48 * MIB, 4);
    push_out();
    pthread_t thread[8];
    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&thread[i], NULL, same_pages, NULL) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
}

/* Threads end while their memory is out. Each leaves a block for the next. */
static void *leaves_a_block(void *argument)
{
    char *before = argument;
    if (before != NULL) {
        VERIFY(before, 2 * MIB, 5);
        CHECK(munmap(before, 2 * MIB) == 0);
    }
    return filled(2 * MIB, 5);
}

static void threads_end(void)
{
    char *other = filled(64 * MIB, 6);
    void *block = NULL;
    for (int round = 0; round < 100; round++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, leaves_a_block, block) == 0);
        if (round % 25 == 0)
            push_out();
        CHECK(pthread_join(thread, &block) == 0);
    }
    VERIFY(block, 2 * MIB, 5);
    VERIFY(other, 64 * MIB, 6);
}

/* More threads than CPUs fill memory as fast as they can: the budget is passed within milliseconds. */
#define FILLERS 8
#define FILLED (384 * MIB)

static void *fills_a_part(void *argument)
{
    fill_from((char *)argument, FILLED / FILLERS, 7, (size_t)((char *)argument - memory) / PAGE);
    return NULL;
}

static void filled_by_many(void)
{
    memory = map(FILLED);
    pthread_t thread[FILLERS];
    for (size_t i = 0; i < FILLERS; i++)
        CHECK(pthread_create(&thread[i], NULL, fills_a_part, memory + i * (FILLED / FILLERS)) == 0);
    for (size_t i = 0; i < FILLERS; i++)
        CHECK(pthread_join(thread[i], NULL) == 0);
    VERIFY(memory, FILLED, 7);
}

enum { MUTEXES = 100 };

static char *mutexes;
static volatile int has_locked, is_to_end;

static void *ends_with_locks(void *nothing)
{
    for (size_t i = 0; i < MUTEXES; i++)
        CHECK(pthread_mutex_lock((pthread_mutex_t *)(mutexes + i * PAGE)) == 0);
    has_locked = 1;
    while (!is_to_end)
        usleep(10000);
    return nothing;
}

/* A thread ends with robust mutexes locked, each on a page that is out. The kernel marks each for the next
 * owner. */
static void robust_mutexes(void)
{
    pthread_t thread;
    pthread_mutexattr_t robust;
    mutexes = map(MUTEXES * PAGE);
    CHECK(pthread_mutexattr_init(&robust) == 0);
    CHECK(pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST) == 0);
    for (size_t i = 0; i < MUTEXES; i++)
        CHECK(pthread_mutex_init((pthread_mutex_t *)(mutexes + i * PAGE), &robust) == 0);
    CHECK(pthread_create(&thread, NULL, ends_with_locks, NULL) == 0);
    while (!has_locked)
        usleep(10000);
    char *memory = filled(LARGE, 9);
    push_out();
    REQUIRE_OUT(mutexes, MUTEXES * PAGE);
    is_to_end = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    for (size_t i = 0; i < MUTEXES; i++)
        CHECK(pthread_mutex_trylock((pthread_mutex_t *)(mutexes + i * PAGE)) == EOWNERDEAD);
    VERIFY(memory, LARGE, 9);
}

MAIN({ "only_threads", only_threads }, { "protection_changes", protection_changes }, { "thrown_away", thrown_away },
     { "mapped_anew", mapped_anew }, { "moved_and_back", moved_and_back }, { "locked", locked },
     { "advised", advised }, { "others_come_and_go", others_come_and_go }, { "many_change", many_change },
     { "all_on_the_same_page", all_on_the_same_page }, { "threads_end", threads_end },
     { "robust_mutexes", robust_mutexes }, { "filled_by_many", filled_by_many })

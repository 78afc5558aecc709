/* madvise, mprotect and mlock on memory of which pages are out. */
#include "check.h"
#include <linux/capability.h>
#include <setjmp.h>
#include <sys/resource.h>

static void dont_need(void)
{
    char *memory = filled(LARGE, 1);
    REQUIRE_OUT(memory, LARGE);
    size_t part = LARGE / 4;
    CHECK(madvise(memory + part, part, MADV_DONTNEED) == 0);
    VERIFY_ZERO(memory + part, part);
    fill(memory + part, part, 2);
    push_out();
    VERIFY(memory, part, 1);
    VERIFY(memory + part, part, 2);
    VERIFY_FROM(memory + 2 * part, 2 * part, 1, 2 * part / PAGE);
    /* Single pages. */
    for (size_t page = 0; page < LARGE / PAGE; page += 5)
        CHECK(madvise(memory + page * PAGE, PAGE, MADV_DONTNEED) == 0);
    for (size_t page = 0; page < LARGE / PAGE; page += 5)
        VERIFY_ZERO(memory + page * PAGE, PAGE);
}

/* After MADV_FREE a page has its old content or zeros. Once written, the page has what was written. */
static void free_later(void)
{
    char *memory = filled(LARGE, 3);
    REQUIRE_OUT(memory, LARGE);
    CHECK(madvise(memory, LARGE / 2, MADV_FREE) == 0);
    for (size_t page = 0; page < LARGE / 2 / PAGE; page++) {
        const uint64_t *words = (const uint64_t *)(memory + page * PAGE);
        uint64_t first = word_of(3, page, 0);
        if (words[0] == first && first != 0)
            VERIFY_FROM(words, PAGE, 3, page);
        else
            VERIFY_ZERO(words, PAGE);
    }
    fill(memory, LARGE / 2, 4);
    push_out();
    VERIFY(memory, LARGE / 2, 4);
    VERIFY_FROM(memory + LARGE / 2, LARGE / 2, 3, LARGE / 2 / PAGE);
}

/* Memory is freed while everything is within the budget. The kernel takes it later without telling anyone, as
 * when the machine is short of memory. A call must find the memory all the same. Formerly the call failed
 * with EFAULT. */
static void freed_before(void)
{
    char *freed = map_alone(8 * MIB), *memory = map(LARGE);
    fill(freed, 8 * MIB, 20);
    CHECK(madvise(freed, 8 * MIB, MADV_FREE) == 0);
    size_t bytes = 0;
    while (bytes < LARGE && pages_out(memory, bytes) == 0) {
        fill_from(memory + bytes, MIB / 4, 19, bytes / PAGE);
        bytes += MIB / 4;
    }
    REQUIRE_OUT(memory, bytes);
    CHECK(madvise(freed, 8 * MIB, 21 /* PAGEOUT */) == 0);
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    CHECK(zeros >= 0);
    for (size_t at = 0; at < 8 * MIB; at += PAGE)
        CHECK(read(zeros, freed + at, PAGE) == (ssize_t)PAGE);
    VERIFY_ZERO(freed, 8 * MIB);
    VERIFY(memory, bytes, 19);
}

/* MADV_FREE over a range with a file's page in the middle. The kernel frees up to the file's page and refuses
 * the rest, so what was written there stays. Formerly Farpage dropped it, and the file's bytes were there
 * again. */
static void freed_up_to_a_file(void)
{
    int file = (int)syscall(SYS_memfd_create, "content", 0);
    CHECK(file >= 0 && ftruncate(file, (off_t)PAGE) == 0);
    char *before = map_alone(8 * MIB);
    for (int turn = 0; turn < 2; turn++) {
        char *written = before + 4 * MIB, *behind = written + PAGE;
        size_t rest = 4 * MIB - PAGE;
        fill(before, 4 * MIB, 21);
        CHECK(mmap(written, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == written);
        memset(written, 'B', PAGE);
        fill(behind, rest, 22);
        if (turn == 1) {
            push_out();
            REQUIRE_OUT(behind, rest);
        }
        CHECK(madvise(before, 8 * MIB, MADV_FREE) == -1 && errno == EINVAL);
        for (size_t at = 0; at < PAGE; at++)
            CHECK(written[at] == 'B');
        VERIFY(behind, rest, 22);
        fill(before, 4 * MIB, 23);
        push_out();
        VERIFY(before, 4 * MIB, 23);
    }
}

/* MADV_DONTNEED through a descriptor for the process. The advice is taken or refused, but the kernel and
 * Farpage never disagree about it. */
static void dont_need_of_a_process(void)
{
    char *memory = filled(48 * MIB, 6);
    push_out();
    REQUIRE_OUT(memory, 48 * MIB);
    int self = (int)syscall(434 /* pidfd_open */, getpid(), 0);
    CHECK(self >= 0);
    struct iovec part = { memory, 16 * MIB };
    ssize_t done = syscall(440 /* process_madvise */, self, &part, 1, MADV_DONTNEED, 0);
    CHECK(done == (ssize_t)part.iov_len || (done == -1 && errno == EINVAL));
    if (done > 0)
        VERIFY_ZERO(memory, 16 * MIB);
    else
        VERIFY(memory, 16 * MIB, 6);
    VERIFY_FROM(memory + 16 * MIB, 32 * MIB, 6, 16 * MIB / PAGE);
}

/* The same for advice that an engine must know of, or that brings memory in. Where the kernel took it behind
 * Farpage's back, a child read its parent's memory instead of zeros, from pages that were out. */
static void advice_of_a_process(void)
{
    char *memory = filled(48 * MIB, 6);
    push_out();
    REQUIRE_OUT(memory, 48 * MIB);
    int self = (int)syscall(434 /* pidfd_open */, getpid(), 0);
    CHECK(self >= 0);
    struct iovec part = { memory, 16 * MIB };
    const int others[] = { MADV_DONTFORK, MADV_DOFORK, 22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */,
                           MADV_WIPEONFORK };
    ssize_t done = 0;
    for (size_t at = 0; at < sizeof others / sizeof *others; at++) {
        done = syscall(440 /* process_madvise */, self, &part, 1, others[at], 0);
        CHECK(done == (ssize_t)part.iov_len || (done == -1 && errno == EINVAL));
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (done > 0)
            VERIFY_ZERO(memory, 16 * MIB);
        else
            VERIFY(memory, 16 * MIB, 6);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    VERIFY(memory, 48 * MIB, 6);
}

/* The kernel reads the list of process_madvise by itself, and can't wait for a page that is out. Formerly the
 * call failed with EFAULT where calls are guarded. */
static void advice_by_a_list_that_is_out(void)
{
    char *memory = filled(LARGE, 16);
    struct iovec *list = (struct iovec *)(memory + LARGE - PAGE);
    int self = (int)syscall(434 /* pidfd_open */, getpid(), 0);
    CHECK(self >= 0);
    for (int way = 0; way < 2; way++) {
        list[0] = (struct iovec) { memory, MIB };
        for (int turn = 0; turn < 8 && pages_out(list, PAGE) == 0; turn++)
            push_out();
        REQUIRE_OUT(list, PAGE);
        long done = way == 0 ? syscall(440 /* process_madvise */, self, list, 1, 20 /* COLD */, 0)
                             : call(440, self, (long)list, 1, 20, 0, 0);
        CHECK(done == (long)MIB || done == -EINVAL || (done == -1 && errno == EINVAL));
        VERIFY(memory, LARGE - PAGE, 16);
    }
}

/* Advice that must not change a byte. The kernel may refuse some of it. */
static void other_advice(void)
{
    static const int advice[] = { MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED, MADV_HUGEPAGE,
        MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DODUMP, MADV_MERGEABLE, MADV_UNMERGEABLE, 20 /* COLD */,
        21 /* PAGEOUT */, 22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */, 25 /* COLLAPSE */, MADV_DONTFORK,
        MADV_DOFORK };
    char *memory = filled(48 * MIB, 5);
    for (size_t i = 0; i < sizeof advice / sizeof *advice; i++) {
        push_out();
        REQUIRE_OUT(memory, 48 * MIB);
        if (madvise(memory, 48 * MIB, advice[i]) != 0)
            CHECK(errno == EINVAL || errno == ENOMEM || errno == EBUSY || errno == EAGAIN);
        VERIFY(memory, 48 * MIB, 5);
    }
    /* Farpage refuses MADV_GUARD_INSTALL, like a kernel that doesn't know it. */
    if (getenv("FARPAGE_SESSION") != NULL)
        CHECK(madvise(memory, MIB, 102) == -1 && errno == EINVAL);
    VERIFY(memory, 48 * MIB, 5);
}

/* The range has a hole in the middle: the kernel does what it can and answers ENOMEM. */
static void dont_need_over_a_hole(void)
{
    char *memory = filled(LARGE, 6);
    CHECK(munmap(memory + LARGE / 2, PAGE) == 0);
    CHECK(madvise(memory + LARGE / 4, LARGE / 2, MADV_DONTNEED) == -1 && errno == ENOMEM);
    VERIFY(memory, LARGE / 4, 6);
    VERIFY_ZERO(memory + LARGE / 4, LARGE / 4);
    VERIFY_ZERO(memory + LARGE / 2 + PAGE, LARGE / 4 - PAGE);
    VERIFY_FROM(memory + LARGE / 4 * 3, LARGE / 4, 6, LARGE / 4 * 3 / PAGE);
}

/* ---- mprotect ---- */

static sigjmp_buf back;
static volatile sig_atomic_t faults;
static void *volatile fault_address;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    faults++;
    fault_address = info->si_addr;
    siglongjmp(back, 1);
}

static void catch_faults(void)
{
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
}

static int reads(const volatile char *address)
{
    if (sigsetjmp(back, 1) != 0)
        return 0;
    (void)*address;
    return 1;
}

static int writes(volatile char *address)
{
    if (sigsetjmp(back, 1) != 0)
        return 0;
    *address = *address;
    return 1;
}

static void protected_and_back(void)
{
    catch_faults();
    char *memory = filled(LARGE, 7);
    size_t part = LARGE / 3 / PAGE * PAGE;
    /* A call that the kernel refuses changes nothing. */
    CHECK(mprotect(memory, LARGE, 0x4000) == -1 && errno == EINVAL);
    VERIFY(memory, LARGE, 7);
    REQUIRE_OUT(memory, LARGE);
    for (int round = 0; round < 3; round++) {
        push_out();
        REQUIRE_OUT(memory, LARGE);
        CHECK(mprotect(memory, part, PROT_NONE) == 0);
        CHECK(mprotect(memory + part, part, PROT_READ) == 0);
        for (size_t at = 0; at < part; at += 61 * PAGE) {
            int before = faults;
            CHECK(!reads(memory + at) && faults == before + 1 && fault_address == memory + at);
            CHECK(!writes(memory + at) && faults == before + 2);
            CHECK(reads(memory + part + at) && !writes(memory + part + at));
            CHECK(fault_address == memory + part + at && faults == before + 3);
            CHECK(reads(memory + 2 * part + at) && writes(memory + 2 * part + at));
        }
        VERIFY_FROM(memory + part, part, 7, part / PAGE);
        push_out();
        CHECK(mprotect(memory, 2 * part, PROT_READ | PROT_WRITE) == 0);
        VERIFY(memory, LARGE, 7);
        fill(memory, LARGE, 7);
        VERIFY(memory, LARGE, 7);
    }
}

/* Garbage collectors and databases do this: they reserve memory without access, and open it piece by
 * piece. */
static void reserved_and_opened(void)
{
    size_t room = 8 * LARGE;
    char *memory = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t at = 0; at < LARGE; at += 64 * 1024) {
        CHECK(mprotect(memory + at, 64 * 1024, PROT_READ | PROT_WRITE) == 0);
        fill_from(memory + at, 64 * 1024, 8, at / PAGE);
    }
    VERIFY(memory, LARGE, 8);
    REQUIRE_OUT(memory, LARGE);
    CHECK(mprotect(memory, LARGE / 2, PROT_NONE) == 0);
    CHECK(madvise(memory, LARGE / 2, MADV_DONTNEED) == 0);
    CHECK(mprotect(memory, LARGE / 2, PROT_READ | PROT_WRITE) == 0);
    VERIFY_ZERO(memory, LARGE / 2);
    VERIFY_FROM(memory + LARGE / 2, LARGE / 2, 8, LARGE / 2 / PAGE);
}

/* Code is written to managed memory, which is then made executable, as just-in-time compilers do. */
static void made_executable(void)
{
    static const unsigned char answer[] = { 0xb8, 42, 0, 0, 0, 0xc3 }; /* mov eax, 42; ret */
    char *memory = filled(LARGE, 9);
    for (size_t at = 0; at < LARGE; at += 16 * PAGE)
        memcpy(memory + at, answer, sizeof answer);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(mprotect(memory, LARGE, PROT_READ | PROT_EXEC) == 0);
    for (size_t at = 0; at < LARGE; at += 16 * PAGE)
        CHECK(((int (*)(void))(memory + at))() == 42);
}

/* ---- mlock ---- */

static void locked_and_unlocked(void)
{
    char *memory = filled(LARGE, 10);
    push_out();
    REQUIRE_OUT(memory, 4 * MIB);
    CHECK(mlock(memory, 4 * MIB) == 0);
    CHECK(pages_out(memory, 4 * MIB) == 0);
    push_out();
    CHECK(pages_out(memory, 4 * MIB) == 0);
    VERIFY(memory, LARGE, 10);
    CHECK(munlock(memory, 4 * MIB) == 0);
    push_out();
    push_out();
    REQUIRE_OUT(memory, 4 * MIB);
    VERIFY(memory, LARGE, 10);
    /* MLOCK_ONFAULT locks pages only as they are touched. */
    CHECK(mlock2(memory + 4 * MIB, 4 * MIB, MLOCK_ONFAULT) == 0);
    VERIFY(memory, LARGE, 10);
    push_out();
    CHECK(pages_out(memory + 4 * MIB, 4 * MIB) == 0);
    CHECK(munlock(memory, LARGE) == 0);
    VERIFY(memory, LARGE, 10);
}

/* Memory that is locked when the budget is reached can't be registered; once unlocked, it can. Formerly such
 * memory stayed resident for good. */
static void unlocked_after_the_take_over(void)
{
    char *memory = map_alone(4 * MIB);
    fill(memory, 4 * MIB, 18);
    CHECK(mlock(memory, 4 * MIB) == 0);
    char *more = filled(LARGE, 19);
    push_out();
    CHECK(pages_out(memory, 4 * MIB) == 0);
    CHECK(munlock(memory, 4 * MIB) == 0);
    push_out();
    push_out();
    REQUIRE_OUT(memory, 4 * MIB);
    VERIFY(memory, 4 * MIB, 18);
    VERIFY(more, LARGE, 19);
}

static void all_locked(void)
{
    char *memory = filled(LARGE, 11);
    char *reserved = mmap(NULL, 4 * LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE_OUT(memory, LARGE);
    CHECK(reserved != MAP_FAILED && mlockall(MCL_CURRENT) == 0);
    CHECK(pages_out(memory, LARGE) == 0);
    CHECK(pages_out(reserved, 4 * LARGE) == 4 * LARGE / PAGE);
    VERIFY(memory, LARGE, 11);
    /* The kernel fills the new part of a locked mapping before it tells Farpage that the mapping has
     * moved. */
    memory = mremap(memory, LARGE, LARGE + 8 * MIB, MREMAP_MAYMOVE);
    CHECK(memory != MAP_FAILED);
    CHECK(pages_out(memory, LARGE + 8 * MIB) == 0);
    VERIFY(memory, LARGE, 11);
    VERIFY_ZERO(memory + LARGE, 8 * MIB);
    CHECK(munlockall() == 0);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(mlockall(MCL_FUTURE) == 0);
    char *later = map(8 * MIB);
    CHECK(pages_out(later, 8 * MIB) == 0);
    fill(later, 8 * MIB, 12);
    /* The new part of the heap is locked and filled, too. Formerly it was left unfilled, and Farpage tried
     * again and again to evict it. */
    char *heap = sbrk(2 * MIB);
    CHECK(heap != (char *)-1);
    heap = (char *)(((uintptr_t)heap + PAGE - 1) / PAGE * PAGE);
    CHECK(pages_out(heap, MIB) == 0);
    /* An mlockall that fails changes nothing. */
    CHECK(mlockall(0) == -1 && errno == EINVAL);
    char *last = map(8 * MIB);
    CHECK(pages_out(last, 8 * MIB) == 0);
    CHECK(munlockall() == 0);
    VERIFY(memory, LARGE, 11);
    VERIFY(later, 8 * MIB, 12);
    /* A failed mlock doesn't unlock what was locked before. */
    CHECK(mlock(memory, MIB) == 0);
    CHECK(munmap(last, 8 * MIB) == 0);
    CHECK(mlock(memory, (size_t)1 << 46) == -1);
    push_out();
    CHECK(pages_out(memory, MIB) == 0);
    CHECK(munlock(memory, MIB) == 0);
}

/* A failed mlock is done in part: up to a hole. Memory behind the hole can still go out. Formerly all of the
 * range stayed in memory if any part of it was locked. */
static void locked_up_to_a_hole(void)
{
    char *memory = filled(LARGE, 21);
    CHECK(munmap(memory + 4 * MIB, PAGE) == 0);
    CHECK(mlock(memory, MIB) == 0);
    CHECK(mlock(memory, LARGE) == -1 && errno == ENOMEM);
    VERIFY(memory, 4 * MIB, 21);
    push_out();
    push_out();
    CHECK(pages_out(memory, 4 * MIB) == 0);
    REQUIRE_OUT(memory + 5 * MIB, 8 * MIB);
    VERIFY(memory, 4 * MIB, 21);
    VERIFY_FROM(memory + 4 * MIB + PAGE, LARGE - 4 * MIB - PAGE, 21, 4 * MIB / PAGE + 1);
    /* A failed munlock is done up to the hole, too. */
    CHECK(munlock(memory, LARGE) == -1 && errno == ENOMEM);
    push_out();
    REQUIRE_OUT(memory, 4 * MIB);
    VERIFY(memory, 4 * MIB, 21);
}

/* A process that may not lock so much memory gets an error, and nothing else happens. Formerly all of the
 * memory was filled first. */
static void sparse_lock_refused(void)
{
    char *memory = filled(LARGE, 22), *sparse = map(4 * LARGE);
    REQUIRE_OUT(memory, LARGE);
    struct __user_cap_header_struct who = { _LINUX_CAPABILITY_VERSION_3, 0 };
    struct __user_cap_data_struct may[2];
    CHECK(syscall(SYS_capget, &who, may) == 0);
    may[0].effective &= ~(1u << CAP_IPC_LOCK);
    CHECK(syscall(SYS_capset, &who, may) == 0);
    struct rlimit limit = { MIB, MIB };
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    CHECK(mlock(sparse, 4 * LARGE) == -1 && errno == ENOMEM);
    CHECK(mlock2(sparse, 4 * LARGE, 12) == -1 && errno == EINVAL);
    CHECK(pages_out(sparse, 4 * LARGE) == 4 * LARGE / PAGE);
    VERIFY(memory, LARGE, 22);
}

/* With `--mlockall refuse`, mlockall fails with EPERM. */
static void locking_refused(void)
{
    int refused = getenv("FARPAGE_MLOCKALL") != NULL;
    char *memory = filled(LARGE, 17);
    for (int flags = MCL_CURRENT; flags <= (MCL_CURRENT | MCL_FUTURE); flags++)
        CHECK(refused ? mlockall(flags) == -1 && errno == EPERM : mlockall(flags) == 0);
    CHECK(munlockall() == 0);
    VERIFY(memory, LARGE, 17);
}

/* Protection that the program set before anything was evicted stays in force, and so does that of memory that
 * is only reserved later. Otherwise a garbage collector's write barrier would be gone. */
static void forbidden_before(void)
{
    catch_faults();
    char *memory = map(4 * MIB), *guarded = map(4 * MIB);
    fill(memory, 4 * MIB, 18);
    CHECK(mprotect(memory, 4 * MIB, PROT_READ) == 0);
    CHECK(mprotect(guarded + MIB, MIB, PROT_NONE) == 0);
    push_out();
    char *reserved = mmap(NULL, 4 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(reserved != MAP_FAILED);
    push_out();
    for (size_t at = 0; at < 4 * MIB; at += 64 * PAGE) {
        CHECK(!writes(memory + at) && reads(memory + at));
        CHECK(!reads(reserved + at) && !writes(reserved + at));
        CHECK(writes(guarded + at) == (at < MIB || at >= 2 * MIB));
    }
    VERIFY(memory, 4 * MIB, 18);
    CHECK(mprotect(memory, 4 * MIB, PROT_READ | PROT_WRITE) == 0);
    CHECK(mprotect(reserved + MIB, 2 * MIB, PROT_READ | PROT_WRITE) == 0);
    fill(reserved + MIB, 2 * MIB, 19);
    push_out();
    VERIFY(memory, 4 * MIB, 18);
    REQUIRE_OUT(reserved + MIB, 2 * MIB);
    VERIFY(reserved + MIB, 2 * MIB, 19);
    CHECK(!reads(reserved) && !reads(reserved + 3 * MIB));
}

/* The processor reads memory that may only be written, and executes memory that may only be executed. */
static void only_written_or_executed(void)
{
    char *memory = filled(LARGE, 16);
    CHECK(mprotect(memory, LARGE / 2, PROT_WRITE) == 0);
    VERIFY(memory, LARGE / 2, 16);
    CHECK(mprotect(memory, LARGE / 2, PROT_READ | PROT_WRITE) == 0);
    for (size_t at = 0; at < LARGE / 2; at += PAGE)
        memory[at] = (char)0xc3; /* ret */
    push_out();
    CHECK(mprotect(memory, LARGE / 2, PROT_EXEC) == 0);
    for (size_t at = 0; at < LARGE / 2; at += PAGE)
        ((void (*)(void))(uintptr_t)(memory + at))();
    VERIFY_FROM(memory + LARGE / 2, LARGE / 2, 16, LARGE / 2 / PAGE);
}

MAIN({ "dont_need", dont_need }, { "dont_need_of_a_process", dont_need_of_a_process },
     { "advice_of_a_process", advice_of_a_process }, { "free_later", free_later },
     { "other_advice", other_advice }, { "advice_by_a_list_that_is_out", advice_by_a_list_that_is_out },
     { "unlocked_after_the_take_over", unlocked_after_the_take_over },
     { "dont_need_over_a_hole", dont_need_over_a_hole }, { "protected_and_back", protected_and_back },
     { "reserved_and_opened", reserved_and_opened }, { "made_executable", made_executable },
     { "locked_and_unlocked", locked_and_unlocked }, { "all_locked", all_locked },
     { "only_written_or_executed", only_written_or_executed }, { "locking_refused", locking_refused },
     { "forbidden_before", forbidden_before }, { "freed_before", freed_before }, { "freed_up_to_a_file", freed_up_to_a_file },
     { "locked_up_to_a_hole", locked_up_to_a_hole }, { "sparse_lock_refused", sparse_lock_refused })

/* Programs that make it hard for Farpage: everything closed, another user, another root, no more room for
 * anything. Their memory is out all the while, and stays right. */
#include "check.h"
#include <dirent.h>
#include <grp.h>
#include <linux/futex.h>
#include <setjmp.h>
#include <sys/resource.h>

static char *area;

static void grow(void)
{
    area = filled(LARGE, 1);
    REQUIRE_OUT(area, LARGE);
}

/* Reads all of the memory, changes a part, and pushes it out again. */
static void still_works(uint64_t seed)
{
    VERIFY_FROM(area + 8 * MIB, LARGE - 8 * MIB, 1, 8 * MIB / PAGE);
    fill(area, 8 * MIB, seed);
    push_out();
    VERIFY(area, 8 * MIB, seed);
    VERIFY_FROM(area + 8 * MIB, LARGE - 8 * MIB, 1, 8 * MIB / PAGE);
}

/* Closes all descriptors, as a daemon does. Then the case opens so many that every number of a descriptor of
 * Farpage's is taken. */
static void closes_all_descriptors(void)
{
    grow();
    syscall(SYS_close_range, 3u, ~0u, 0u);
    still_works(2);
    for (int fd = 3; fd < 1024; fd++) {
        int opened = open("/dev/null", O_RDWR);
        CHECK(opened >= 0 || errno == EMFILE);
        if (opened < 0)
            break;
    }
    still_works(3);
    for (int fd = 3; fd < 1024; fd++)
        dup2(0, fd);
    still_works(4);
}

enum { OURS_FROM = 985, OURS_TO = 1024 };

/* Puts one end of a pipe wherever Farpage may have put something. Returns the other end. */
static int take_numbers(void)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (int fd = OURS_FROM; fd < OURS_TO; fd++)
        CHECK(dup2(ends[1], fd) == fd);
    close(ends[1]);
    return ends[0];
}

/* The numbers are the program's: what it closes is closed, and its child has them. */
static void numbers_are_its_own(int reader)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        for (int fd = OURS_FROM; fd < OURS_TO; fd++)
            CHECK(write(fd, "x", 1) == 1);
        VERIFY_FROM(area + 8 * MIB, LARGE - 8 * MIB, 1, 8 * MIB / PAGE);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    char bytes[OURS_TO];
    CHECK(read(reader, bytes, sizeof bytes) == OURS_TO - OURS_FROM);
    for (int fd = OURS_FROM; fd < OURS_TO - 2; fd++)
        CHECK(close(fd) == 0);
    CHECK(close_range(OURS_TO - 2, OURS_TO - 1, 0) == 0);
    CHECK(read(reader, bytes, sizeof bytes) == 0);
    close(reader);
}

/* Farpage's descriptors are near 1000. A program that wants these numbers gets them, whether anything is out
 * or not yet. */
static void takes_our_numbers(void)
{
    int reader = take_numbers();
    grow();
    still_works(2);
    numbers_are_its_own(reader);
    still_works(3);
}

static void takes_our_numbers_while_out(void)
{
    grow();
    /* A call that fails takes no number. */
    CHECK(dup2(-1, OURS_FROM + 8) == -1 && errno == EBADF);
    int reader = take_numbers();
    still_works(2);
    numbers_are_its_own(reader);
    still_works(3);
}

static void many_regions(void)
{
    grow();
    const size_t count = 60000;
    char *memory = map(count * PAGE);
    size_t made = 0;
    for (size_t page = 0; page < count; page += 2, made++) {
        /* Read-only memory stays in memory, so there is only a little of it. */
        if (page % 64 == 0)
            memory[page * PAGE] = (char)(page / 64);
        if (mprotect(memory + page * PAGE, PAGE, PROT_READ) != 0) {
            CHECK(errno == ENOMEM);
            break;
        }
    }
    CHECK(made > count / 4);
    still_works(5);
    for (size_t page = 0; page < 2 * made; page += 64)
        CHECK(memory[page * PAGE] == (char)(page / 64));
    char *more = filled(LARGE / 2, 6);
    VERIFY(more, LARGE / 2, 6);
}

static sigjmp_buf back;
static char handlers_stack[64 * 1024];

static void stack_is_full(int signal)
{
    (void)signal;
    siglongjmp(back, 1);
}

static __attribute__((noinline)) uint64_t recurse(uint64_t depth)
{
    volatile char frame[4096];
    frame[depth % 4096] = (char)depth;
    return depth > (1ul << 40) ? 0 : recurse(depth + 1) + (uint64_t)frame[depth % 4096];
}

static void exhausts_its_stack(void)
{
    stack_t stack = { .ss_sp = handlers_stack, .ss_size = sizeof handlers_stack };
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = { .sa_handler = stack_is_full, .sa_flags = SA_ONSTACK };
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    grow();
    for (uint64_t round = 0; round < 2; round++) {
        if (sigsetjmp(back, 1) == 0) {
            recurse(0);
            FAIL("the stack has no end");
        }
        still_works(7 + round);
    }
}

static void limit(int which, rlim_t value)
{
    struct rlimit limit = { value, value };
    CHECK(setrlimit(which, &limit) == 0);
}

/* From now on Farpage may not need more of anything that the program may have no more of. */
static void limits_of_everything(void)
{
    grow();
    void *ballast = map(LARGE);
    CHECK(munmap(ballast, LARGE) == 0);
    limit(RLIMIT_NOFILE, 3);
    limit(RLIMIT_NPROC, 1);
    limit(RLIMIT_MEMLOCK, 0);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_SIGPENDING, 0);
    limit(RLIMIT_STACK, 64 * 1024);
    still_works(9);
    /* Address space for nothing more. */
    limit(RLIMIT_AS, MIB);
    CHECK(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
    VERIFY_FROM(area + 8 * MIB, LARGE - 8 * MIB, 1, 8 * MIB / PAGE);
    fill(area, LARGE, 10);
    VERIFY(area, LARGE, 10);
}

/* Files may not grow any more, and the swap file is one. */
static void limits_its_files(void)
{
    grow();
    limit(RLIMIT_FSIZE, 0);
    still_works(9);
}

static void another_user(void)
{
    grow();
    if (getuid() == 0) {
        CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0);
        CHECK(setresuid(65534, 65534, 65534) == 0);
    }
    still_works(11);
    /* The fork may be refused: a child with another user could not reach what is out. */
    pid_t child = fork();
    if (child == 0) {
        still_works(12);
        _exit(0);
    }
    if (child > 0) {
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    } else {
        CHECK(errno == ENOMEM);
    }
    still_works(13);
}

static void another_root(void)
{
    grow();
    if (getuid() == 0)
        CHECK(chroot("/var/tmp") == 0 && chdir("/") == 0);
    still_works(14);
}

/* The program that takes this one's place has nothing of Farpage's in its environment. The program runs
 * without a budget, but it runs. */
static void cleared_environment(void)
{
    grow();
    char *const arguments[] = { "sh", "-c", "exit 0", NULL }, *const nothing[] = { NULL };
    execve("/bin/sh", arguments, nothing);
    FAIL("execve: %s", strerror(errno));
}

/* Arguments that can't be read are the kernel's to refuse. */
static void clones_of_nothing(void)
{
    grow();
    char *end = map(2 * PAGE) + PAGE;
    CHECK(munmap(end, PAGE) == 0);
    for (long bytes = 64; bytes <= 88; bytes += 8) {
        CHECK(call(SYS_clone3, 0, bytes, 0, 0, 0, 0) == -EFAULT);
        CHECK(call(SYS_clone3, (long)end, bytes, 0, 0, 0, 0) == -EFAULT);
        CHECK(call(SYS_clone3, (long)end - 16, bytes, 0, 0, 0, 0) == -EFAULT);
    }
    still_works(15);
}

/* execve's arguments that can't be read are the kernel's to refuse, too: by libc and by number, before memory
 * is managed and afterwards. A null path ended the program once. */
static void refused_programs(void)
{
    char *const words[] = { "true", NULL };
    char *end = map(2 * PAGE) + PAGE;
    CHECK(munmap(end, PAGE) == 0);
    char **list = (char **)(end - 2 * sizeof *list);
    list[0] = list[1] = "A=1";
    char *const of_nothing[] = { (char *)8, NULL };
    char **const lists[] = { (char **)8, (char **)end, (char **)of_nothing, list };
    const char *const paths[] = { NULL, (char *)8, end };
    for (int is_full = 0; is_full < 2; is_full++) {
        if (is_full)
            grow();
        for (size_t at = 0; at < sizeof paths / sizeof *paths; at++) {
            CHECK(execve(paths[at], words, environ) == -1 && errno == EFAULT);
            CHECK(call(SYS_execve, (long)paths[at], (long)words, (long)environ, 0, 0, 0) == -EFAULT);
        }
        for (size_t at = 0; at < sizeof lists / sizeof *lists; at++) {
            CHECK(execve("/bin/true", words, lists[at]) == -1 && errno == EFAULT);
            CHECK(call(SYS_execve, (long)"/bin/true", (long)words, (long)lists[at], 0, 0, 0) == -EFAULT);
        }
    }
    still_works(15);
}

static char *map_past_libc(char *place, size_t bytes, int flags, int file)
{
    char *memory = (char *)call(SYS_mmap, (long)place, (long)bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0);
    CHECK(memory == place);
    return memory;
}

static void drop_past_libc(char *place, size_t bytes)
{
    CHECK(call(SYS_munmap, (long)place, (long)bytes, 0, 0, 0, 0) == 0);
}

/* A file that has the content `seed`, and no name. */
static int file_with(size_t bytes, uint64_t seed)
{
    int file = open(".", O_TMPFILE | O_RDWR, 0600);
    CHECK(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    char *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(mapped != MAP_FAILED);
    fill(mapped, bytes, seed);
    CHECK(munmap(mapped, bytes) == 0);
    return file;
}

static int threads_here(void)
{
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    int entries = 0;
    while (readdir(tasks) != NULL)
        entries++;
    closedir(tasks);
    return entries - 2;
}

/* While it is within its budget, the program changes mappings past libc, where Farpage can't see it: memory is
 * replaced by a file, unmapped, protected. Later memory reaches the budget. */
static void changed_past_libc_before(void)
{
    enum { PRIVATE_FILE, SHARED_FILE, UNMAPPED, READ_ONLY, DISCARDED, EXECUTABLE, COUNT };
    const size_t bytes = MIB / 2;
    char *parts[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        parts[i] = filled(bytes, i);
        /* Farpage takes over earlier from a program that grows fast. */
        usleep(50000);
    }
    for (size_t i = PRIVATE_FILE; i <= UNMAPPED; i++)
        drop_past_libc(parts[i], bytes);
    int shared = file_with(bytes, 101);
    map_past_libc(parts[PRIVATE_FILE], bytes, MAP_PRIVATE, file_with(bytes, 100));
    map_past_libc(parts[SHARED_FILE], bytes, MAP_SHARED, shared);
    fill(parts[PRIVATE_FILE], bytes / 2, 102);
    CHECK(call(SYS_mprotect, (long)parts[READ_ONLY], (long)bytes, PROT_READ, 0, 0, 0) == 0);
    CHECK(call(SYS_madvise, (long)parts[DISCARDED], (long)bytes, MADV_DONTNEED, 0, 0, 0) == 0);
    /* mov eax, 42; ret */
    memcpy(parts[EXECUTABLE] + bytes - PAGE, "\xb8\x2a\0\0\0\xc3", 6);
    CHECK(call(SYS_mprotect, (long)parts[EXECUTABLE], (long)bytes, PROT_READ | PROT_EXEC, 0, 0, 0) == 0);
    if (getenv("FARPAGE_SESSION") != NULL)
        CHECK(threads_here() <= 2);
    grow();
    still_works(2);
    for (int turn = 0; turn < 2; turn++) {
        VERIFY(parts[PRIVATE_FILE], bytes / 2, 102);
        VERIFY_FROM(parts[PRIVATE_FILE] + bytes / 2, bytes / 2, 100, bytes / 2 / PAGE);
        VERIFY(parts[SHARED_FILE], bytes, 101);
        VERIFY(parts[READ_ONLY], bytes, READ_ONLY);
        VERIFY_ZERO(parts[DISCARDED], bytes);
        VERIFY(parts[EXECUTABLE], bytes - PAGE, EXECUTABLE);
        CHECK(((int (*)(void))(uintptr_t)(parts[EXECUTABLE] + bytes - PAGE))() == 42);
        push_out();
    }
    char *changes = filled(bytes, 103);
    CHECK(pwrite(shared, changes, bytes, 0) == (ssize_t)bytes);
    VERIFY(parts[SHARED_FILE], bytes, 103);
    CHECK(madvise(parts[PRIVATE_FILE], bytes, MADV_DONTNEED) == 0);
    VERIFY(parts[PRIVATE_FILE], bytes, 100);
    CHECK(read(file_with(PAGE, 1), parts[READ_ONLY], 1) == -1 && errno == EFAULT);
    CHECK(read(file_with(PAGE, 1), parts[EXECUTABLE], 1) == -1 && errno == EFAULT);
    still_works(3);
}

/* While it is within its budget, the program advises the kernel past libc, where Farpage can't see it: memory is
 * zero in children, hidden from them, theirs again, locked, protected by a key of the processor. */
static void advised_past_libc_before(void)
{
    enum { PLAIN, WIPED, HIDDEN, KEPT, LOCKED, KEYED, COUNT };
    const size_t bytes = MIB / 2, few = 8 * PAGE;
    char *parts[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        parts[i] = map_alone(bytes);
        fill(parts[i], bytes, i);
        /* Farpage becomes active earlier in a program that grows fast. */
        usleep(50000);
    }
    const long length = (long)bytes;
    CHECK(madvise(parts[KEPT], bytes, MADV_WIPEONFORK) == 0);
    CHECK(call(SYS_madvise, (long)parts[KEPT], length, MADV_KEEPONFORK, 0, 0, 0) == 0);
    CHECK(call(SYS_madvise, (long)parts[WIPED], length, MADV_WIPEONFORK, 0, 0, 0) == 0);
    CHECK(call(SYS_madvise, (long)parts[HIDDEN], length, MADV_DONTFORK, 0, 0, 0) == 0);
    CHECK(call(SYS_mlock, (long)parts[LOCKED], (long)few, 0, 0, 0, 0) == 0);
    /* Processors without keys, and old kernels, refuse. */
    long key = call(SYS_pkey_alloc, 0, 0, 0, 0, 0, 0);
    if (key > 0)
        CHECK(call(SYS_pkey_mprotect, (long)parts[KEYED], length, PROT_READ | PROT_WRITE, key, 0, 0) == 0);
    if (getenv("FARPAGE_SESSION") != NULL)
        CHECK(threads_here() <= 2);
    grow();
    for (int turn = 0; turn < 2; turn++) {
        push_out();
        REQUIRE_OUT(parts[PLAIN], bytes);
        CHECK(pages_out(parts[LOCKED], few) == 0);
        CHECK(key <= 0 || pages_out(parts[KEYED], bytes) == 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            unsigned char residency;
            CHECK(mincore(parts[HIDDEN], PAGE, &residency) == -1 && errno == ENOMEM);
            VERIFY_ZERO(parts[WIPED], bytes);
            for (size_t i = KEPT; i < COUNT; i++)
                VERIFY(parts[i], bytes, i);
            char *anew = map_at(parts[HIDDEN], bytes, MAP_FIXED);
            push_out();
            VERIFY_ZERO(anew, bytes);
            VERIFY_ZERO(parts[WIPED], bytes);
            VERIFY(parts[PLAIN], bytes, PLAIN);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        for (size_t i = 0; i < COUNT; i++)
            VERIFY(parts[i], bytes, i);
    }
    still_works(4);
}

static volatile int may_end;
static char stack_past_libc[64 * 1024] __attribute__((aligned(16)));

static int waits_for_the_word(void *argument)
{
    (void)argument;
    while (!may_end)
        call(SYS_futex, (long)&may_end, FUTEX_WAIT, 0, 0, 0, 0);
    return 0;
}

/* While it is within its budget, the program makes a thread without pthread_create. The kernel clears a word of
 * ordinary memory when the thread ends. */
static void thread_past_libc_before(void)
{
    char *memory = filled(MIB / 2, 7);
    pid_t *word = (pid_t *)(memory + MIB / 4);
    const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
                      CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
    int thread = clone(waits_for_the_word, stack_past_libc + sizeof stack_past_libc, flags, NULL, word, NULL, word);
    CHECK(thread > 0 && *word == thread);
    grow();
    push_out();
    REQUIRE_OUT(word, PAGE);
    may_end = 1;
    CHECK(call(SYS_futex, (long)&may_end, FUTEX_WAKE, 1, 0, 0, 0) >= 0);
    for (int turn = 0; *(volatile pid_t *)word != 0; turn++) {
        CHECK(turn < 1000);
        usleep(10000);
    }
    still_works(5);
}

MAIN({ "closes_all_descriptors", closes_all_descriptors }, { "takes_our_numbers", takes_our_numbers },
     { "takes_our_numbers_while_out", takes_our_numbers_while_out }, { "many_regions", many_regions },
     { "exhausts_its_stack", exhausts_its_stack }, { "limits_of_everything", limits_of_everything },
     { "limits_its_files", limits_its_files },
     { "another_user", another_user }, { "another_root", another_root },
     { "cleared_environment", cleared_environment }, { "clones_of_nothing", clones_of_nothing },
     { "refused_programs", refused_programs }, { "changed_past_libc_before", changed_past_libc_before },
     { "advised_past_libc_before", advised_past_libc_before }, { "thread_past_libc_before", thread_past_libc_before })

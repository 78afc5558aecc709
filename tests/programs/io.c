/* The kernel reads and writes memory of which pages are out: files, O_DIRECT, pipes, other processes. */
#include "check.h"
#include <linux/io_uring.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

static int scratch(int flags)
{
    char name[] = "io-XXXXXX";
    int file = mkostemp(name, flags);
    CHECK(file >= 0 && unlink(name) == 0);
    return file;
}

static void files(void)
{
    char *memory = filled(LARGE, 1);
    int file = scratch(0);
    REQUIRE_OUT(memory, LARGE);
    for (size_t done = 0; done < LARGE;) {
        ssize_t wrote = write(file, memory + done, LARGE - done);
        CHECK(wrote > 0);
        done += (size_t)wrote;
    }
    fill(memory, LARGE, 2);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    CHECK(lseek(file, 0, SEEK_SET) == 0);
    for (size_t done = 0; done < LARGE;) {
        ssize_t got = read(file, memory + done, LARGE - done);
        CHECK(got > 0);
        done += (size_t)got;
    }
    VERIFY(memory, LARGE, 1);
}

/* libc's own calls, made inside libc, where nobody interposes them. Buffers are out, out in part, or never
 * touched; a stream's own buffer is out, too. */
static void streams(void)
{
    const size_t bytes = 24 * MIB;
    char *memory = filled(bytes, 21), *own = map(8 * MIB), *other = map(bytes);
    FILE *file = fdopen(scratch(0), "w+");
    CHECK(file != NULL && setvbuf(file, own, _IOFBF, 8 * MIB) == 0);
    for (int round = 0; round < 3; round++) {
        push_out();
        REQUIRE_OUT(memory, bytes);
        rewind(file);
        CHECK(fwrite(memory, 1, bytes, file) == bytes);
        for (size_t at = 0; at < bytes; at += MIB - 5)
            CHECK(fwrite(memory + at, 1, 5, file) == 5);
        push_out();
        CHECK(fflush(file) == 0);
        /* `other` is never touched in the first round, out in the second, and half out in the third. */
        push_out();
        for (size_t at = 0; round == 2 && at < bytes; at += 2 * PAGE)
            *(volatile char *)(other + at) = 1;
        rewind(file);
        CHECK(fread(other, 1, bytes, file) == bytes && !ferror(file));
        VERIFY(other, bytes, 21);
        for (size_t at = 0; at < bytes; at += MIB - 5) {
            char five[5];
            CHECK(fread(five, 1, 5, file) == 5 && memcmp(five, memory + at, 5) == 0);
        }
        CHECK(fgetc(file) == EOF && feof(file));
    }
    CHECK(fclose(file) == 0);
}

/* Lines of megabytes: getline's buffer grows by realloc, and scanf allocates one. */
static void long_lines(void)
{
    enum { LINES = 3 };
    const size_t bytes = 9 * MIB;
    FILE *file = fdopen(scratch(0), "w+");
    CHECK(file != NULL);
    for (int line = 0; line < LINES; line++) {
        for (size_t i = 0; i < bytes; i++)
            fputc('a' + mix(line * bytes + i) % 26, file);
        fputc('\n', file);
    }
    CHECK(fflush(file) == 0);
    char *text = NULL, *word = NULL;
    size_t room = 0;
    rewind(file);
    for (int line = 0; line < LINES; line++) {
        push_out();
        CHECK(getline(&text, &room, file) == (ssize_t)bytes + 1 && text[bytes] == '\n');
        for (size_t i = 0; i < bytes; i++)
            CHECK(text[i] == (char)('a' + mix(line * bytes + i) % 26));
    }
    CHECK(getline(&text, &room, file) == -1);
    rewind(file);
    for (int line = 0; line < LINES; line++) {
        push_out();
        CHECK(fscanf(file, "%ms", &word) == 1 && strlen(word) == bytes);
        for (size_t i = 0; i < bytes; i++)
            CHECK(word[i] == (char)('a' + mix(line * bytes + i) % 26));
        free(word);
    }
    /* Numbers are read from text that is out, and text is made of them in memory that is out. */
    memset(text, ' ', bytes);
    strcpy(text + bytes - 100, "12345 0x1f 2.5");
    push_out();
    int ten;
    unsigned hex;
    double real;
    CHECK(sscanf(text, "%d %x %lf", &ten, &hex, &real) == 3 && ten == 12345 && hex == 31 && real == 2.5);
    push_out();
    const int width = 8 * MIB;
    CHECK(snprintf(text, bytes, "%*d %s", width, 7, "end") == width + 4 && strcmp(text + width - 1, "7 end") == 0);
    free(text);
    CHECK(fclose(file) == 0);
}

/* The kernel pins the buffer's pages while the disk works on them. */
static void direct(void)
{
    char *memory = filled(LARGE, 3);
    int file = open(".", O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (file < 0)
        file = scratch(O_DIRECT);
    size_t piece = MIB;
    for (int round = 0; round < 2; round++) {
        push_out();
        REQUIRE_OUT(memory, LARGE);
        for (size_t at = 0; at < LARGE; at += piece)
            CHECK(pwrite(file, memory + at, piece, (off_t)at) == (ssize_t)piece);
        fill(memory, LARGE, 4);
        push_out();
        for (size_t at = 0; at < LARGE; at += piece)
            CHECK(pread(file, memory + at, piece, (off_t)at) == (ssize_t)piece);
        VERIFY(memory, LARGE, 3);
    }
}

/* O_DIRECT by several threads while another thread pushes pages out: pages are pinned just when they should
 * leave. */
static char *shared;
static int direct_file;
static volatile int pushing;

static void *direct_reader(void *argument)
{
    size_t first = (uintptr_t)argument;
    for (int round = 0; round < 6; round++) {
        for (size_t at = first * MIB; at < 64 * MIB; at += 4 * MIB) {
            CHECK(pread(direct_file, shared + at, MIB, (off_t)at) == (ssize_t)MIB);
            VERIFY_FROM(shared + at, MIB, 5, at / PAGE);
            CHECK(pwrite(direct_file, shared + at, MIB, (off_t)at) == (ssize_t)MIB);
        }
    }
    return NULL;
}

static void *pusher(void *argument)
{
    (void)argument;
    while (pushing)
        push_out();
    return NULL;
}

static void direct_while_pushed_out(void)
{
    shared = filled(64 * MIB, 5);
    direct_file = open(".", O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (direct_file < 0)
        direct_file = scratch(O_DIRECT);
    for (size_t at = 0; at < 64 * MIB; at += MIB)
        CHECK(pwrite(direct_file, shared + at, MIB, (off_t)at) == (ssize_t)MIB);
    pthread_t reader[4], other;
    pushing = 1;
    CHECK(pthread_create(&other, NULL, pusher, NULL) == 0);
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&reader[i], NULL, direct_reader, (void *)i) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(reader[i], NULL) == 0);
    pushing = 0;
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(shared, 64 * MIB, 5);
}

static int pipe_ends[2];

static void *pipe_writer(void *argument)
{
    char *memory = argument;
    for (size_t done = 0; done < 48 * MIB;) {
        struct iovec pieces[2] = { { memory + done, 64 * 1024 }, { memory + done + 64 * 1024, 64 * 1024 } };
        ssize_t wrote = writev(pipe_ends[1], pieces, 2);
        CHECK(wrote == 128 * 1024);
        done += (size_t)wrote;
    }
    return NULL;
}

static void pipes(void)
{
    char *from = filled(48 * MIB, 6), *to = filled(48 * MIB, 7);
    push_out();
    REQUIRE_OUT(from, 48 * MIB);
    REQUIRE_OUT(to, 48 * MIB);
    CHECK(pipe(pipe_ends) == 0);
    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, pipe_writer, from) == 0);
    for (size_t done = 0; done < 48 * MIB;) {
        ssize_t got = read(pipe_ends[0], to + done, 48 * MIB - done);
        CHECK(got > 0);
        done += (size_t)got;
    }
    CHECK(pthread_join(writer, NULL) == 0);
    VERIFY(to, 48 * MIB, 6);
    VERIFY(from, 48 * MIB, 6);
}

static void *whole_writer(void *argument)
{
    CHECK(write(pipe_ends[1], argument, 40 * MIB) == 40 * MIB);
    struct iovec pieces[3] = { { argument, 20 * MIB }, { NULL, 0 }, { (char *)argument + 20 * MIB, 20 * MIB } };
    CHECK(writev(pipe_ends[1], pieces, 3) == 40 * MIB);
    return NULL;
}

/* One call moves more memory than there is room for. A write takes all of it, and a read from a file gets all
 * of it. */
static void all_in_one_call(void)
{
    char *from = filled(40 * MIB, 11), *to = filled(40 * MIB, 12);
    int file = scratch(0);
    CHECK(write(file, from, 40 * MIB) == 40 * MIB);
    struct iovec pieces[3] = { { from + 9, 20 * MIB }, { NULL, 0 }, { from + 9 + 20 * MIB, 20 * MIB - 9 } };
    CHECK(pwritev(file, pieces, 3, 40 * MIB) == 40 * MIB - 9);
    /* The read ends at the end of the file. */
    CHECK(pread(file, to, 40 * MIB, 41 * MIB) == 39 * MIB - 9);
    CHECK(memcmp(to, from + 9 + MIB, 39 * MIB - 9) == 0);
    pieces[0].iov_base = to, pieces[2].iov_base = to + 20 * MIB;
    CHECK(preadv(file, pieces, 3, 40 * MIB) == 40 * MIB - 9);
    CHECK(memcmp(to, from + 9, 40 * MIB - 9) == 0);
    CHECK(lseek(file, 30 * MIB, SEEK_SET) == 30 * MIB);
    CHECK(read(file, to, 10 * MIB) == 10 * MIB && lseek(file, 0, SEEK_CUR) == 40 * MIB);
    VERIFY_FROM(to, 10 * MIB, 11, 30 * MIB / PAGE);
    /* Calls that the kernel refuses. */
    volatile size_t error = (size_t)-1;
    CHECK(read(file, to, error) == -1 && errno == EFAULT);
    CHECK(write(-1, from, 40 * MIB) == -1 && errno == EBADF);
    CHECK(getrandom(to, 20 * MIB, 0) == 20 * MIB);
    CHECK(pipe(pipe_ends) == 0);
    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, whole_writer, from) == 0);
    for (int turn = 0; turn < 2; turn++) {
        for (size_t done = 0; done < 40 * MIB;) {
            ssize_t got = read(pipe_ends[0], to + done, 40 * MIB - done);
            CHECK(got > 0);
            done += (size_t)got;
        }
        VERIFY(to, 40 * MIB, 11);
    }
    CHECK(pthread_join(writer, NULL) == 0);
    VERIFY(from, 40 * MIB, 11);
}

static void rings(int signal)
{
    (void)signal;
}

/* A large write to a full pipe ends as it should when a handler has run. A socket's own time limit counts,
 * too. */
static void large_writes_that_wait(void)
{
    char *from = filled(40 * MIB, 13);
    CHECK(pipe2(pipe_ends, O_NONBLOCK) == 0);
    while (write(pipe_ends[1], from, PAGE) > 0)
        ;
    CHECK(write(pipe_ends[1], from, 40 * MIB) == -1 && errno == EAGAIN);
    CHECK(write(pipe_ends[0], from, 40 * MIB) == -1 && errno == EBADF);
    CHECK(pwrite(pipe_ends[1], from, 40 * MIB, 0) == -1 && errno == ESPIPE);
    CHECK(fcntl(pipe_ends[1], F_SETFL, 0) == 0);
    struct sigaction action = { .sa_handler = rings };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    alarm(1);
    CHECK(write(pipe_ends[1], from, 40 * MIB) == -1 && errno == EINTR);
    int sockets[2];
    struct timeval limit = { .tv_usec = 300000 };
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    CHECK(setsockopt(sockets[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    ssize_t sent = send(sockets[0], from, 40 * MIB, 0);
    CHECK(sent > 0 && sent < (ssize_t)(8 * MIB));
    VERIFY(from, 40 * MIB, 13);
}

static void *writes_much(void *from)
{
    return (void *)write(pipe_ends[1], from, 40 * MIB);
}

/* Two writers find room in a pipe, and one of them gets it. The other can still be interrupted. */
static void two_writers_of_a_pipe(void)
{
    char *from = filled(40 * MIB, 18);
    static char drained[1 * MIB];
    struct sigaction action = { .sa_handler = rings };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pipe2(pipe_ends, 0) == 0 && fcntl(pipe_ends[0], F_SETFL, O_NONBLOCK) == 0);
    /* Before Linux 6.5 the other can't be interrupted. */
    struct iovec one = { from, 1 };
    if (pwritev2(pipe_ends[1], &one, 1, -1, RWF_NOWAIT) < 0)
        return;
    for (int round = 0; round < 40; round++) {
        pthread_t writers[2];
        for (int i = 0; i < 2; i++)
            CHECK(pthread_create(&writers[i], NULL, writes_much, from) == 0);
        usleep(20000);
        for (int i = 0; i < 2; i++) {
            void *written;
            /* A writer that isn't in its write yet hears the signal too early. */
            while (pthread_tryjoin_np(writers[i], &written) != 0) {
                CHECK(pthread_kill(writers[i], SIGUSR1) == 0);
                usleep(1000);
            }
            CHECK((ssize_t)written == -1 || ((ssize_t)written > 0 && (ssize_t)written < (ssize_t)MIB));
        }
        while (read(pipe_ends[0], drained, sizeof drained) > 0)
            ;
    }
    VERIFY(from, 40 * MIB, 18);
}

static char *message;

static void *receives_messages(void *argument)
{
    char *to = map(LARGE);
    for (size_t done = 0; done < LARGE;) {
        ssize_t got = recv(*(int *)argument, to + done, MIB, 0);
        CHECK(got > 0);
        done += (size_t)got;
        if (done / (8 * MIB) != (done - (size_t)got) / (8 * MIB))
            REQUIRE_OUT(message, LARGE);
    }
    VERIFY(to, LARGE, 20);
    CHECK(munmap(to, LARGE) == 0);
    return NULL;
}

/* A message of three times the budget, and a file by preadv2 and pwritev2, which could do more than plain
 * reads and writes. Never all of the memory is held at once. */
static void large_messages(void)
{
    message = filled(LARGE, 20);
    struct iovec parts[3] = { { message, 5 * MIB }, { message + 5 * MIB, 0 }, { message + 5 * MIB, LARGE - 5 * MIB } };
    struct msghdr header = { .msg_iov = parts, .msg_iovlen = 3 };
    int sockets[2], is_no_socket[2];
    pthread_t receiver;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && pipe(is_no_socket) == 0);
    CHECK(sendmsg(is_no_socket[1], &header, 0) == -1 && errno == ENOTSOCK);
    CHECK(pthread_create(&receiver, NULL, receives_messages, &sockets[1]) == 0);
    CHECK(sendmsg(sockets[0], &header, MSG_NOSIGNAL) == (ssize_t)LARGE);
    CHECK(pthread_join(receiver, NULL) == 0);
    CHECK(sendmsg(sockets[0], &header, MSG_DONTWAIT) > 0);
    CHECK(close(sockets[1]) == 0 && sendmsg(sockets[0], &header, MSG_NOSIGNAL) == -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);

    char name[] = "message-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0);
    CHECK(pwritev2(file, parts, 3, -1, 0) == (ssize_t)LARGE && lseek(file, 0, SEEK_CUR) == (off_t)LARGE);
    CHECK(pwritev2(file, parts, 1, (off_t)LARGE, 0) == (ssize_t)(5 * MIB));
    REQUIRE_OUT(message, LARGE);
    fill(message, LARGE, 21);
    CHECK(preadv2(file, parts, 3, 0, 0) == (ssize_t)LARGE);
    VERIFY(message, LARGE, 20);
    CHECK(lseek(file, (off_t)LARGE, SEEK_SET) == (off_t)LARGE && preadv2(file, parts, 3, -1, 0) == (ssize_t)(5 * MIB));
    CHECK(preadv2(file, parts, 3, 0, 1 << 30) == -1 && errno == EOPNOTSUPP);
    VERIFY(message, LARGE, 20);
}

/* A peer leaves in the middle of a large write. The answer is what the peer took. Only the next write fails,
 * with a signal. */
static volatile int broken_pipes;

static void counts_broken_pipes(int number)
{
    (void)number;
    broken_pipes++;
}

static void *reads_some_and_leaves(void *argument)
{
    int socket = *(int *)argument;
    for (size_t got = 0; got < 2 * MIB;) {
        static char some[64 * 1024];
        ssize_t bytes = read(socket, some, sizeof some);
        CHECK(bytes > 0);
        got += (size_t)bytes;
    }
    CHECK(close(socket) == 0);
    return NULL;
}

static void peer_that_leaves(void)
{
    char *from = filled(LARGE, 19);
    CHECK(signal(SIGPIPE, counts_broken_pipes) != SIG_ERR);
    for (int round = 0; round < 10; round++) {
        int ends[2];
        pthread_t reader;
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        CHECK(pthread_create(&reader, NULL, reads_some_and_leaves, &ends[1]) == 0);
        ssize_t written = write(ends[0], from, LARGE);
        CHECK(written >= (ssize_t)(2 * MIB) && written < (ssize_t)LARGE);
        CHECK(broken_pipes == round);
        CHECK(write(ends[0], from, 1) == -1);
        /* If the peer leaves bytes unread, the error is that of a reset connection. */
        if (errno == ECONNRESET)
            CHECK(write(ends[0], from, 1) == -1);
        CHECK(errno == EPIPE && broken_pipes == round + 1);
        CHECK(pthread_join(reader, NULL) == 0 && close(ends[0]) == 0);
    }
    VERIFY(from, LARGE, 19);
}

/* A program that gets less than it asked for, from something that doesn't wait, knows that there is no more,
 * and waits for epoll's next edge. So a read that doesn't wait must get everything. A read that only peeks
 * must, too. */
static void reads_that_do_not_wait(void)
{
    char *from = filled(1 * MIB, 16), *to = filled(40 * MIB, 17);
    CHECK(pipe2(pipe_ends, O_NONBLOCK) == 0);
    CHECK(fcntl(pipe_ends[1], F_SETPIPE_SZ, 512 * 1024) == 512 * 1024);
    CHECK(write(pipe_ends[1], from, 512 * 1024) == 512 * 1024);
    CHECK(read(pipe_ends[0], to, 40 * MIB) == 512 * 1024);
    VERIFY(to, 512 * 1024, 16);
    CHECK(read(pipe_ends[0], to, 40 * MIB) == -1 && errno == EAGAIN);
    CHECK(write(pipe_ends[1], from, 3 * PAGE) == 3 * PAGE && close(pipe_ends[1]) == 0);
    struct iovec parts[2] = { { to, PAGE }, { to + PAGE, 30 * MIB } };
    CHECK(readv(pipe_ends[0], parts, 2) == 3 * PAGE && readv(pipe_ends[0], parts, 2) == 0);
    VERIFY(to, 3 * PAGE, 16);

    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    ssize_t sent = send(sockets[0], from, 1 * MIB, MSG_DONTWAIT);
    CHECK(sent > (ssize_t)(96 * 1024));
    CHECK(recv(sockets[1], to, 40 * MIB, MSG_PEEK) == sent);
    fill(to, 1 * MIB, 17);
    CHECK(recv(sockets[1], to, 40 * MIB, MSG_DONTWAIT) == sent);
    VERIFY(to, (size_t)sent / PAGE * PAGE, 16);
    CHECK(recv(sockets[1], to, 40 * MIB, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    VERIFY_FROM(to + 1 * MIB, 39 * MIB, 17, 1 * MIB / PAGE);
}

/* Pages are lent to a pipe, and evicted meanwhile. */
static void pages_lent_to_a_pipe(void)
{
    char *from = filled(48 * MIB, 8), *other = filled(48 * MIB, 9), *got = malloc(64 * 1024);
    CHECK(pipe(pipe_ends) == 0);
    for (size_t at = 0; at < 48 * MIB; at += 64 * 1024) {
        struct iovec piece = { from + at, 64 * 1024 };
        CHECK(vmsplice(pipe_ends[1], &piece, 1, 0) == 64 * 1024);
        /* Other memory comes back while the pipe still has these pages, wherever they are by now. */
        if (at % (4 * MIB) == 0)
            VERIFY(other, 48 * MIB, 9);
        for (size_t done = 0; done < 64 * 1024;) {
            ssize_t part = read(pipe_ends[0], got + done, 64 * 1024 - done);
            CHECK(part > 0);
            done += (size_t)part;
        }
        VERIFY_FROM(got, 64 * 1024, 8, at / PAGE);
    }
    VERIFY(from, 48 * MIB, 8);
}

/* More memory than the budget is pinned, and can't be moved. The program goes on over its budget, at a decent
 * speed, with its other memory. Where the kernel allows no ring, or not so much locked memory, only the other
 * memory is tested. */
static void pinned_over_the_budget(void)
{
    char *pinned = filled(48 * MIB, 14);
    struct io_uring_params parameters = { 0 };
    int ring = (int)syscall(SYS_io_uring_setup, 4, &parameters);
    struct iovec all = { pinned, 48 * MIB };
    if (ring < 0 || syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &all, 1) != 0)
        fprintf(stderr, "nothing is pinned: %s\n", strerror(errno));
    char *other = filled(40 * MIB, 15);
    for (int round = 0; round < 3; round++)
        VERIFY(other, 40 * MIB, 15);
    VERIFY(pinned, 48 * MIB, 14);
}

/* An io_uring for one request at a time. */
struct ring {
    int file;
    char *shared;
    struct io_uring_sqe *requests;
    struct io_uring_params parameters;
};

/* Returns 0 where no ring may be had, or its buffer can't be registered. */
static int begin_ring(struct ring *ring, struct iovec *registered)
{
    *ring = (struct ring){ 0 };
    struct io_uring_params *p = &ring->parameters;
    ring->file = (int)syscall(SYS_io_uring_setup, 1, p);
    if (ring->file < 0 || syscall(SYS_io_uring_register, ring->file, IORING_REGISTER_BUFFERS, registered, 1) != 0) {
        fprintf(stderr, "skipped: no ring with a registered buffer: %s\n", strerror(errno));
        return 0;
    }
    CHECK(p->features & IORING_FEAT_SINGLE_MMAP);
    size_t queues = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->shared = mmap(NULL, queues, PROT_READ | PROT_WRITE, MAP_SHARED, ring->file, IORING_OFF_SQ_RING);
    ring->requests = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, ring->file, IORING_OFF_SQES);
    CHECK(ring->shared != MAP_FAILED && ring->requests != MAP_FAILED);
    return 1;
}

/* Reads into the registered buffer. Returns the request's result. */
static int read_by_ring(struct ring *ring, int file, char *to, size_t bytes, size_t from)
{
    struct io_uring_params *p = &ring->parameters;
    unsigned *tail = (unsigned *)(ring->shared + p->sq_off.tail), *head = (unsigned *)(ring->shared + p->cq_off.head);
    ring->requests[0] = (struct io_uring_sqe){ .opcode = IORING_OP_READ_FIXED, .fd = file, .off = from,
                                               .addr = (uintptr_t)to, .len = (unsigned)bytes };
    ((unsigned *)(ring->shared + p->sq_off.array))[0] = 0;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->file, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    struct io_uring_cqe *answers = (struct io_uring_cqe *)(ring->shared + p->cq_off.cqes);
    int result = answers[*head & (p->cq_entries - 1)].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

/* A buffer is registered before the budget is reached. The kernel writes it past every mapping, through the
 * page that was pinned then. Formerly, in `segv` mode, that page had been evicted, and what was read was
 * lost. */
static void registered_before_the_budget(void)
{
    enum { PIECE = 64 * 1024 };
    size_t bytes = 1 * MIB;
    /* When a mapping is taken over, Farpage looks whether its first page is zeros. The page may be pinned. */
    char *fresh = map(bytes), *buffer = filled(bytes, 18), *content = malloc(bytes);
    struct iovec zeros = { fresh, bytes }, registered = { buffer, bytes };
    struct ring ring, other_ring;
    int has_ring = begin_ring(&ring, &registered) && begin_ring(&other_ring, &zeros);
    fill(content, bytes, 19);
    int file = scratch(0);
    CHECK(write(file, content, bytes) == (ssize_t)bytes);
    char *other = filled(LARGE, 15);
    VERIFY(other, LARGE, 15);
    VERIFY(buffer, bytes, 18);
    push_out();
    for (size_t at = 0; has_ring && at < bytes; at += PIECE) {
        CHECK(read_by_ring(&ring, file, buffer + at, PIECE, at) == PIECE);
        CHECK(read_by_ring(&other_ring, file, fresh + at, PIECE, at) == PIECE);
    }
    VERIFY(buffer, bytes, has_ring ? 19 : 18);
    if (has_ring)
        VERIFY(fresh, bytes, 19);
    VERIFY(content, bytes, 19);
}

static int filled_later[2];

static void *reads_later(void *place)
{
    ssize_t got = read(filled_later[0], place, 100);
    return (void *)got;
}

/* Memory is discarded while a call waits to write there. Formerly the call ended with EFAULT, and what it would
 * have brought was lost. */
static void discarded_while_a_call_waits(void)
{
    int advice[] = { MADV_DONTNEED, MADV_FREE };
    CHECK(pipe(filled_later) == 0);
    char *memory = filled(LARGE, 12), bytes[100];
    memset(bytes, 77, sizeof bytes);
    for (size_t i = 0; i < 2; i++) {
        push_out();
        char *place = memory + (i + 1) * 4 * MIB;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, reads_later, place) == 0);
        usleep(100000);
        CHECK(madvise(place - MIB, 2 * MIB, advice[i]) == 0);
        CHECK(write(filled_later[1], bytes, sizeof bytes) == sizeof bytes);
        void *got;
        CHECK(pthread_join(thread, &got) == 0 && (ssize_t)got == sizeof bytes);
        CHECK(memcmp(place, bytes, sizeof bytes) == 0);
        if (advice[i] == MADV_DONTNEED) {
            VERIFY_ZERO(place - MIB, MIB);
            VERIFY_ZERO(place + PAGE, MIB - PAGE);
            CHECK(place[100] == 0 && place[PAGE - 1] == 0);
        }
    }
    VERIFY(memory, 3 * MIB, 12);
    VERIFY_FROM(memory + 9 * MIB, LARGE - 9 * MIB, 12, 9 * MIB / PAGE);
    /* A file's memory reads as the file afterwards, and locked memory isn't discarded. */
    char *file = memory + 16 * MIB, *locked = memory + 20 * MIB, content[PAGE];
    int fd = scratch(0);
    memset(content, 55, sizeof content);
    CHECK(write(fd, content, PAGE) == PAGE);
    CHECK(mmap(file, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == file);
    CHECK(mlock(locked, PAGE) == 0);
    char *places[] = { file - 50, locked };
    for (size_t i = 0; i < 2; i++) {
        push_out();
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, reads_later, places[i]) == 0);
        usleep(100000);
        if (i == 0) {
            CHECK(madvise(file - PAGE, 2 * PAGE, MADV_DONTNEED) == 0);
            CHECK(memcmp(file, content, PAGE) == 0 && file[-PAGE] == 0);
        } else {
            CHECK(madvise(locked, PAGE, MADV_DONTNEED) == -1 && errno == EINVAL);
            VERIFY_FROM(locked, PAGE, 12, 20 * MIB / PAGE);
        }
        CHECK(write(filled_later[1], bytes, sizeof bytes) == sizeof bytes);
        void *got;
        CHECK(pthread_join(thread, &got) == 0);
        /* A call whose memory is a file's in part may end with less. */
        CHECK((ssize_t)got == sizeof bytes || i == 0);
    }
}

/* Reads and writes as a debugger does. The kernel doesn't wait for a userfaultfd when /proc/PID/mem is used.
 * For a page that is out it answers EIO, never a wrong byte. Without a userfaultfd the kernel would find
 * zeros; there the file can't be opened, by no name. process_vm_readv waits. */
static void through_proc(void)
{
    char *memory = filled(LARGE, 9), *copy = malloc(MIB);
    push_out();
    REQUIRE_OUT(memory, LARGE);
    int file = open("/proc/self/mem", O_RDWR);
    CHECK(file >= 0 || errno == EACCES);
    if (file < 0) {
        int directory = open("/proc/self", O_RDONLY | O_DIRECTORY);
        CHECK(directory >= 0 && openat(directory, "mem", O_RDONLY) == -1 && errno == EACCES);
        CHECK(open("/proc/self/nomem", O_RDONLY) == -1 && errno == ENOENT);
    }
    for (size_t at = 0; file >= 0 && at < LARGE / 2; at += MIB) {
        ssize_t got = pread(file, copy, MIB, (off_t)(uintptr_t)(memory + at));
        CHECK(got > 0 || errno == EIO);
        if (got > 0)
            VERIFY_FROM(copy, (size_t)got / PAGE * PAGE, 9, at / PAGE);
    }
    for (size_t at = LARGE / 2; at < LARGE; at += MIB) {
        struct iovec mine = { copy, MIB }, others = { memory + at, MIB };
        CHECK(process_vm_readv(getpid(), &mine, 1, &others, 1, 0) == (ssize_t)MIB);
        VERIFY_FROM(copy, MIB, 9, at / PAGE);
    }
    push_out();
    REQUIRE_OUT(memory, MIB);
    fill(copy, MIB, 10);
    struct iovec mine = { copy, MIB }, others = { memory, MIB };
    CHECK(process_vm_writev(getpid(), &mine, 1, &others, 1, 0) == (ssize_t)MIB);
    VERIFY(memory, MIB, 10);
    VERIFY_FROM(memory + MIB, LARGE - MIB, 9, MIB / PAGE);
}

static int never[2];

/* A page that a call uses stays open in `segv` mode. To the kernel the mapping around it is then several
 * mappings. */
static void *waits_in_a_call(void *page)
{
    CHECK(read(never[0], page, 1) == -1 && errno == EFAULT);
    return NULL;
}

/* mremap of memory that is several mappings to the kernel moves each of them. Formerly the content was
 * copied, and what a device wrote to pages that it had pinned before was lost. */
static void moved_after_it_was_registered(void)
{
    enum { PIECE = 64 * 1024, WAYS = 3 };
    size_t bytes = 1 * MIB, whole = 3 * MIB, at_call = 2 * MIB + 8 * PAGE;
    struct { size_t bytes; int flags; } ways[WAYS] = { { 5 * MIB, 0 }, { 2 * MIB + 16 * PAGE, 0 }, { whole, MREMAP_DONTUNMAP } };
    char *memory[WAYS], *content = malloc(bytes);
    struct ring ring[WAYS];
    int has_ring = 1;
    for (int way = 0; way < WAYS; way++) {
        memory[way] = map(whole);
        struct iovec registered = { memory[way], bytes };
        has_ring = has_ring && begin_ring(&ring[way], &registered);
        fill(memory[way], whole, 20);
    }
    fill(content, bytes, 21);
    int file = scratch(0);
    CHECK(write(file, content, bytes) == (ssize_t)bytes && pipe(never) == 0);
    char *other = filled(LARGE, 15);
    VERIFY(other, LARGE, 15);
    for (int way = 0; way < WAYS; way++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, waits_in_a_call, memory[way] + at_call) == 0);
        usleep(200000);
        /* The page lies in the part that a shrinking call cuts off: it is in memory, too. */
        VERIFY_FROM(memory[way] + whole - PAGE, PAGE, 20, whole / PAGE - 1);
        size_t now = ways[way].bytes, kept = now < whole ? now : whole;
        char *moved = mremap(memory[way], whole, now, MREMAP_MAYMOVE | MREMAP_FIXED | ways[way].flags, map(5 * MIB));
        CHECK(moved != MAP_FAILED);
        /* The ring knows the pages, and their old addresses. */
        for (size_t at = 0; has_ring && at < bytes; at += PIECE)
            CHECK(read_by_ring(&ring[way], file, memory[way] + at, PIECE, at) == PIECE);
        VERIFY(moved, bytes, has_ring ? 21 : 20);
        VERIFY_FROM(moved + bytes, kept - bytes, 20, bytes / PAGE);
        VERIFY_ZERO(moved + kept, now - kept);
        if (ways[way].flags & MREMAP_DONTUNMAP) {
            VERIFY_ZERO(memory[way], whole);
            CHECK(munmap(memory[way], whole) == 0);
        }
        char byte = 'x';
        CHECK(write(never[1], &byte, 1) == 1 && pthread_join(thread, NULL) == 0);
        CHECK(read(never[0], &byte, 1) == 1);
    }
    VERIFY(other, LARGE, 15);
}

/* The program has forbidden itself memory that is out. A call that names this memory fails at once, as
 * without Farpage. Formerly, in `segv` mode, each of its pages was waited for, for 40 seconds, and a fork's
 * child seemed to hang for good. */
static void forbidden_while_out(void)
{
    char *memory = filled(LARGE, 13);
    push_out();
    REQUIRE_OUT(memory, MIB);
    CHECK(mprotect(memory, MIB, PROT_NONE) == 0);
    time_t start = time(NULL);
    int file = open("forbidden", O_CREAT | O_WRONLY, 0600), zeros = open("/dev/zero", O_RDONLY);
    CHECK(file >= 0 && zeros >= 0);
    CHECK(write(file, memory, MIB) == -1 && errno == EFAULT);
    CHECK(read(zeros, memory, MIB) == -1 && errno == EFAULT);
    CHECK(madvise(memory, MIB, MADV_POPULATE_READ) == -1 && errno == EINVAL);
    CHECK(madvise(memory, MIB, MADV_POPULATE_WRITE) == -1 && errno == EINVAL);
    CHECK(time(NULL) - start < 20);
    CHECK(mprotect(memory, MIB, PROT_READ) == 0);
    VERIFY(memory, MIB, 13);
    CHECK(read(zeros, memory, MIB) == -1 && errno == EFAULT);
    CHECK(mprotect(memory, MIB, PROT_READ | PROT_WRITE) == 0);
    VERIFY(memory, LARGE, 13);
}

static int full[2];

static void *writes_a_page(void *page)
{
    CHECK(write(full[1], page, PAGE) == PAGE);
    return NULL;
}

static void *waits_for_children(void *nothing)
{
    for (int turn = 0; turn < 5; turn++) {
        pid_t child = vfork();
        if (child == 0) {
            usleep(300000);
            _exit(0);
        }
        CHECK(child > 0 && waitpid(child, NULL, 0) == child);
    }
    return nothing;
}

/* Calls are waiting when the budget is reached. The calls use memory that nobody has touched and nobody may
 * write, or memory that was only read. Formerly such memory was neither brought in nor held, and the calls
 * ended with EFAULT. */
static void calls_wait_with_memory_that_is_only_read(void)
{
    enum { WRITERS = 3, CAPACITY = 16 * PAGE };
    static char ballast[CAPACITY];
    char *memory = map(4 * MIB), found[PAGE];
    char *buffers[WRITERS] = { memory, memory + 2 * MIB, memory + MIB };
    CHECK(mprotect(memory, 2 * MIB, PROT_READ) == 0);
    /* One buffer was read. */
    CHECK(*(volatile char *)buffers[2] == 0);
    CHECK(pipe(full) == 0 && write(full[1], ballast, CAPACITY) == CAPACITY);
    pthread_t writers[WRITERS];
    for (int at = 0; at < WRITERS; at++)
        CHECK(pthread_create(&writers[at], NULL, writes_a_page, buffers[at]) == 0);
    /* A parent of vfork hears no signal. So the other threads are armed, and make their calls, long before
     * everything is ready. */
    pthread_t parent;
    CHECK(pthread_create(&parent, NULL, waits_for_children, NULL) == 0);
    usleep(200000);
    char *other = filled(LARGE, 20);
    REQUIRE_OUT(other, LARGE);
    for (size_t got = 0; got < CAPACITY + WRITERS * PAGE;) {
        ssize_t bytes = read(full[0], found, PAGE);
        CHECK(bytes > 0);
        for (ssize_t at = 0; at < bytes; at++)
            CHECK(found[at] == 0);
        got += (size_t)bytes;
    }
    for (int at = 0; at < WRITERS; at++)
        CHECK(pthread_join(writers[at], NULL) == 0);
    CHECK(pthread_join(parent, NULL) == 0);
    VERIFY(other, LARGE, 20);
}

/* A lock and a condition in memory that is out. */
struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int turn;
};

static void *other_side(void *argument)
{
    struct meeting *meeting = argument;
    pthread_mutex_lock(&meeting->lock);
    for (int i = 0; i < 8; i++) {
        while (meeting->turn != 2 * i + 1)
            pthread_cond_wait(&meeting->turned, &meeting->lock);
        meeting->turn++;
        pthread_cond_signal(&meeting->turned);
    }
    pthread_mutex_unlock(&meeting->lock);
    return NULL;
}

static void futexes(void)
{
    char *memory = filled(48 * MIB, 11);
    struct meeting *meeting = (struct meeting *)(memory + 24 * MIB);
    pthread_mutex_init(&meeting->lock, NULL);
    pthread_cond_init(&meeting->turned, NULL);
    meeting->turn = 0;
    pthread_t other;
    CHECK(pthread_create(&other, NULL, other_side, meeting) == 0);
    for (int i = 0; i < 8; i++) {
        push_out();
        pthread_mutex_lock(&meeting->lock);
        meeting->turn++;
        pthread_cond_signal(&meeting->turned);
        while (meeting->turn != 2 * i + 2)
            pthread_cond_wait(&meeting->turned, &meeting->lock);
        pthread_mutex_unlock(&meeting->lock);
    }
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(memory, 24 * MIB, 11);
}

MAIN({ "files", files }, { "streams", streams }, { "long_lines", long_lines }, { "direct", direct },
     { "direct_while_pushed_out", direct_while_pushed_out },
     { "pipes", pipes }, { "pages_lent_to_a_pipe", pages_lent_to_a_pipe },
     { "pinned_over_the_budget", pinned_over_the_budget },
     { "registered_before_the_budget", registered_before_the_budget },
    { "moved_after_it_was_registered", moved_after_it_was_registered }, { "through_proc", through_proc },
     { "forbidden_while_out", forbidden_while_out },
     { "discarded_while_a_call_waits", discarded_while_a_call_waits },
     { "calls_wait_with_memory_that_is_only_read", calls_wait_with_memory_that_is_only_read }, { "futexes", futexes }, { "all_in_one_call", all_in_one_call },
     { "large_writes_that_wait", large_writes_that_wait }, { "two_writers_of_a_pipe", two_writers_of_a_pipe },
     { "large_messages", large_messages }, { "reads_that_do_not_wait", reads_that_do_not_wait }, { "peer_that_leaves", peer_that_leaves })

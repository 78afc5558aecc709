/* Large transfers by sockets with options of their own, and sets of descriptors. */
#include "check.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>

/* A TCP connection over the loopback device, with small buffers if `bytes` isn't 0. */
static void connect_pair(int sockets[2], int bytes)
{
    struct sockaddr_in place = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof place;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0);
    if (bytes != 0)
        CHECK(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes) == 0);
    CHECK(bind(listener, (struct sockaddr *)&place, sizeof place) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&place, &length) == 0);
    sockets[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(sockets[0] >= 0);
    if (bytes != 0)
        CHECK(setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
    CHECK(connect(sockets[0], (struct sockaddr *)&place, sizeof place) == 0);
    sockets[1] = accept(listener, NULL, NULL);
    CHECK(sockets[1] >= 0 && close(listener) == 0);
}

/* Puts the news that bytes were sent from where they lie into the queue of errors, which poll(2) shows as
 * POLLERR. */
static void fill_queue_of_errors(int socket)
{
    int one = 1;
    CHECK(setsockopt(socket, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0);
    CHECK(send(socket, "x", 1, MSG_ZEROCOPY) == 1);
    struct pollfd shown = { .fd = socket };
    CHECK(poll(&shown, 1, 10000) == 1 && shown.revents == POLLERR);
}

static volatile int stops_reading;

static void *reads_all(void *argument)
{
    static char some[256 * 1024];
    while (!stops_reading && read(*(int *)argument, some, sizeof some) > 0)
        ;
    return NULL;
}

static void rings(int signal)
{
    (void)signal;
}

/* Sends until nothing is taken. The kernels of both sides still move bytes on for a while. */
static void fill_up(int socket, const char *from)
{
    for (int idle = 0; idle < 5; idle++) {
        while (send(socket, from, MIB, MSG_DONTWAIT) > 0)
            idle = 0;
        usleep(100000);
    }
}

/* A queue of errors breaks nothing: large transfers go on, handlers run while a send waits, and its time limit
 * counts. */
static void queue_of_errors(void)
{
    char *from = filled(LARGE, 30), *to = filled(8 * MIB, 31);
    int sockets[2];
    pthread_t reader;
    connect_pair(sockets, 0);
    fill_queue_of_errors(sockets[0]);
    REQUIRE_OUT(from, LARGE);
    CHECK(pthread_create(&reader, NULL, reads_all, &sockets[1]) == 0);
    CHECK(send(sockets[0], from, LARGE, 0) == (ssize_t)LARGE);
    stops_reading = 1;
    CHECK(send(sockets[0], "x", 1, 0) == 1);
    CHECK(pthread_join(reader, NULL) == 0);

    ssize_t sent = send(sockets[1], from, 2 * MIB, MSG_DONTWAIT);
    CHECK(sent > 256 * 1024);
    usleep(300000);
    int there;
    CHECK(ioctl(sockets[0], FIONREAD, &there) == 0);
    CHECK(recv(sockets[0], to, 8 * MIB, MSG_DONTWAIT) >= there);
    VERIFY(to, (size_t)there / PAGE * PAGE, 30);

    struct sigaction action = { .sa_handler = rings };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    fill_up(sockets[0], from);
    alarm(1);
    CHECK(send(sockets[0], from, LARGE, 0) == -1 && errno == EINTR);
    struct timeval limit = { .tv_usec = 300000 };
    CHECK(setsockopt(sockets[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    CHECK(send(sockets[0], from, LARGE, 0) == -1 && errno == EAGAIN);
    VERIFY(from, LARGE, 30);
}

static void *shuts_down(void *argument)
{
    sleep(1);
    CHECK(shutdown(*(int *)argument, SHUT_RD) == 0);
    return NULL;
}

/* A send waits, and its peer reads no more from now on. poll(2) doesn't show that of a local socket. */
static void peer_that_stops_reading(void)
{
    char *from = filled(LARGE, 36);
    int sockets[2];
    pthread_t other;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    CHECK(pthread_create(&other, NULL, shuts_down, &sockets[1]) == 0);
    ssize_t sent = send(sockets[0], from, LARGE, MSG_NOSIGNAL);
    CHECK(sent > 0 && sent < (ssize_t)(16 * MIB));
    CHECK(send(sockets[0], from, LARGE, MSG_NOSIGNAL) == -1 && errno == EPIPE);
    CHECK(pthread_join(other, NULL) == 0);
    VERIFY(from, LARGE, 36);
}

static void *reads_slowly(void *argument)
{
    static char some[16 * 1024];
    while (read(*(int *)argument, some, sizeof some) > 0)
        usleep(20000);
    return NULL;
}

/* The time limit of a TCP socket counts all waits of a call together. */
static void time_limit_of_all_waits(void)
{
    char *from = filled(LARGE, 32);
    int sockets[2];
    pthread_t reader;
    connect_pair(sockets, 16 * 1024);
    struct timeval limit = { .tv_sec = 1 };
    CHECK(setsockopt(sockets[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    CHECK(pthread_create(&reader, NULL, reads_slowly, &sockets[1]) == 0);
    ssize_t sent = send(sockets[0], from, LARGE, 0);
    CHECK(sent > 0 && sent < (ssize_t)(16 * MIB));
    CHECK(shutdown(sockets[0], SHUT_WR) == 0 && pthread_join(reader, NULL) == 0);
    VERIFY(from, LARGE, 32);
}

static char *content;

static void *sends_in_pieces(void *argument)
{
    for (size_t at = 0; at < 16 * MIB; at += 16 * 1024) {
        CHECK(send(*(int *)argument, content + at, 16 * 1024, 0) == 16 * 1024);
        usleep(500);
    }
    CHECK(shutdown(*(int *)argument, SHUT_WR) == 0);
    return NULL;
}

/* A reader asks not to be woken before there are 256 KiB. */
static void reads_of_enough(void)
{
    const int enough = 256 * 1024;
    content = filled(16 * MIB, 33);
    char *to = filled(40 * MIB, 34);
    int sockets[2];
    pthread_t writer;
    connect_pair(sockets, 0);
    CHECK(setsockopt(sockets[1], SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof enough) == 0);
    CHECK(pthread_create(&writer, NULL, sends_in_pieces, &sockets[0]) == 0);
    for (size_t done = 0; done < 16 * MIB;) {
        /* One buffer, and a list of which the first buffer alone is too small. */
        struct iovec two[2] = { { to + done, PAGE }, { to + done + PAGE, 40 * MIB - done - PAGE } };
        size_t rest = 16 * MIB - done;
        ssize_t got = done < 8 * MIB ? recv(sockets[1], to + done, 40 * MIB - done, 0) : readv(sockets[1], two, 2);
        CHECK(got >= enough || got == (ssize_t)rest);
        done += (size_t)got;
    }
    CHECK(pthread_join(writer, NULL) == 0 && read(sockets[1], to, 40 * MIB) == 0);
    VERIFY(to, 16 * MIB, 33);
}

/* The kernel takes a number of descriptors that is too large for the size of its table, or refuses the number.
 * What lies behind the sets stays out. */
static void sets_of_descriptors(void)
{
    char *memory = filled(LARGE, 35);
    push_out();
    /* Beyond what readahead reads. */
    char *behind = memory + 16 * MIB;
    size_t before = pages_out(behind, 8 * MIB);
    REQUIRE_OUT(behind, 8 * MIB);
    const int numbers[] = { 2000000000, 0x7fffffff };
    for (size_t i = 0; i < 2; i++) {
        struct timeval at_once = { 0 };
        memset(memory, 0, MIB);
        int ends[2];
        CHECK(pipe(ends) == 0 && ends[1] < 64);
        *(uint64_t *)memory = (uint64_t)1 << ends[1];
        CHECK(call(SYS_select, numbers[i], 0, (long)memory, 0, (long)&at_once, 0) == 1);
        CHECK(*(uint64_t *)memory == (uint64_t)1 << ends[1]);
        CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
    }
    CHECK(call(SYS_poll, (long)memory, 0x7fffffff, 0, 0, 0, 0) == -EINVAL);
    CHECK(call(SYS_ppoll, (long)memory, 0x7fffffff, 0, 0, 0, 0) == -EINVAL);
    CHECK(call(SYS_set_mempolicy, 0, (long)memory, 0x7fffffff, 0, 0, 0) < 0);
    CHECK(pages_out(behind, 8 * MIB) >= before);
    VERIFY_FROM(memory + MIB, LARGE - MIB, 35, MIB / PAGE);
}

MAIN({ "queue_of_errors", queue_of_errors }, { "time_limit_of_all_waits", time_limit_of_all_waits },
     { "reads_of_enough", reads_of_enough }, { "sets_of_descriptors", sets_of_descriptors },
     { "peer_that_stops_reading", peer_that_stops_reading })

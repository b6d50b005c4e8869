/* SPDX-License-Identifier: Apache-2.0
 * A link of set delay and rate between two network namespaces, for kernels without netem: a TUN device v0 in
 * each, and this process between them. As netem does: a packet leaves when the one before has left and its
 * own bits are out, and arrives the delay later. Rate 0: none.
 *
 *     slow_link NAMESPACE NAMESPACE DELAY_MS MBIT      prints "ready", ends with SIGTERM */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { PACKETS = 16384, MTU = 9000 };

struct packet {
    int64_t due_ns;
    int size;
    char data[MTU];
};
/* One direction: a ring of packets under way. */
struct way {
    int from, to, timer;
    struct packet *ring; /* [PACKETS] */
    unsigned first, count;
    int64_t free_ns; /* when the wire is */
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int open_device(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) < 0) {
        perror(path);
        exit(1);
    }
    close(space);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(request.ifr_name, sizeof request.ifr_name, "v0");
    int fd = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK),
        plain = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) < 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    request.ifr_mtu = MTU;
    if (ioctl(plain, SIOCSIFMTU, &request) < 0)
        perror("mtu");
    close(plain);
    return fd;
}

static void set_timer(const struct way *w)
{
    struct itimerspec at = {0};
    if (w->count) {
        int64_t due = w->ring[w->first].due_ns;
        at.it_value.tv_sec = due / 1000000000;
        at.it_value.tv_nsec = due % 1000000000 ? due % 1000000000 : 1;
    }
    timerfd_settime(w->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void deliver(struct way *w)
{
    uint64_t ticks;
    (void)!read(w->timer, &ticks, sizeof ticks);
    while (w->count && w->ring[w->first].due_ns <= now_ns()) {
        struct packet *p = &w->ring[w->first];
        (void)!write(w->to, p->data, (size_t)p->size);
        w->first = (w->first + 1) % PACKETS;
        w->count--;
    }
    set_timer(w);
}

static void take(struct way *w, int64_t delay_ns, double ns_per_byte)
{
    while (w->count < PACKETS) {
        struct packet *p = &w->ring[(w->first + w->count) % PACKETS];
        ssize_t n = read(w->from, p->data, sizeof p->data);
        if (n <= 0)
            break;
        int64_t now = now_ns();
        w->free_ns = (w->free_ns > now ? w->free_ns : now) + (int64_t)((double)n * ns_per_byte);
        p->size = (int)n;
        p->due_ns = w->free_ns + delay_ns;
        w->count++;
    }
    deliver(w);
}

int main(int argc, char **argv)
{
    static struct packet rings[2][PACKETS]; /* touched as far as it is used */
    if (argc != 5) {
        fputs("slow_link NAMESPACE NAMESPACE DELAY_MS MBIT\n", stderr);
        return 2;
    }
    int64_t delay_ns = (int64_t)(strtod(argv[3], NULL) * 1e6);
    double mbit = strtod(argv[4], NULL), ns_per_byte = mbit > 0 ? 8e3 / mbit : 0;
    int a = open_device(argv[1]), b = open_device(argv[2]);
    struct way ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int i = 0; i < 2; i++) {
        ways[i].timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
        ways[i].ring = rings[i];
        if (ways[i].timer < 0)
            return 1;
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[4];
        for (int i = 0; i < 2; i++) {
            fds[2 * i] = (struct pollfd){.fd = ways[i].count < PACKETS ? ways[i].from : -1, .events = POLLIN};
            fds[2 * i + 1] = (struct pollfd){.fd = ways[i].timer, .events = POLLIN};
        }
        if (poll(fds, 4, -1) < 0 && errno != EINTR)
            return 1;
        for (int i = 0; i < 2; i++) {
            if (fds[2 * i].revents)
                take(&ways[i], delay_ns, ns_per_byte);
            if (fds[2 * i + 1].revents)
                deliver(&ways[i]);
        }
    }
}

/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into paramsyncd by sidecar_durable.py: while the file that PS_HOLD_SYNC names exists, fsync and
 * fdatasync wait, as on a disk that takes its time. Each is noted in the file that PS_SYNC_LOG names. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int held(const char *name, int fd)
{
    const char *hold = getenv("PS_HOLD_SYNC"), *log = getenv("PS_SYNC_LOG");
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const struct timespec pause = {.tv_nsec = 2000000};
    while (hold && access(hold, F_OK) == 0)
        nanosleep(&pause, NULL);
    int result = real(fd);
    int out = log ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (out >= 0) {
        if (write(out, "s", 1) != 1)
            result = -1;
        close(out);
    }
    return result;
}

int fsync(int fd)
{
    return held("fsync", fd);
}

int fdatasync(int fd)
{
    return held("fdatasync", fd);
}

/* SPDX-License-Identifier: Apache-2.0
 * paramsync doctor: looks at what a training and a sidecar need on this machine, and says what to do. */
#include "services/cli/cli.h"
#include "services/cli/topology.h"

#include "services/base/clock.h"
#include "services/base/fs.h"
#include "services/base/module.h"
#include "services/base/text.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/vfs.h>
#include <unistd.h>

struct doctor_settings {
    struct cli_common common;
    const char *data_dir, *output_dir, *ports;
};

static const struct ps_option rows[] = {
    {.name = "data-dir",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct doctor_settings, data_dir),
     .value = "DIR",
     .help = "also look at the folder where a sidecar keeps, or is to keep, its store",
     .group = "Options"},
    {.name = "output-dir",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct doctor_settings, output_dir),
     .value = "DIR",
     .fallback = ".",
     .help = "where checkpoints are to go"},
    {.name = "ports",
     .type = PS_TYPE_STRING,
     .offset = offsetof(struct doctor_settings, ports),
     .value = "PORT,...",
     .fallback = "50051,8080,29400",
     .help = "ports to be used here: gRPC, dashboard, launchers"},
    CLI_JSON_ROW(struct doctor_settings, "print a JSON object"),
    CLI_CONNECTION_ROWS(struct doctor_settings),
};
static const struct ps_options table_of_options = {
    .program = "paramsync doctor",
    .usage = "[--data-dir DIR] [--output-dir DIR] [--sidecar HOST:PORT]",
    .example = "paramsync doctor --data-dir /var/lib/paramsync --output-dir /scratch/out",
    .about = "Looks at libraries, devices, ports, file systems, the clock and the sidecar. Exit status 0 if "
             "nothing has failed (warnings may stand), else 1.",
    .rows = rows,
    .count = PS_OPTIONS_COUNT(rows),
};

enum verdict { OK, WARN, FAIL };
enum { FINDINGS_MAX = 64 };

struct finding {
    const char *topic; /* static */
    enum verdict verdict;
    char what[320], remedy[320];
};
struct report {
    struct finding findings[FINDINGS_MAX];
    size_t count;
};

/* remedy: what to do; "" where nothing is. The format is of what. */
static void find(struct report *r, const char *topic, enum verdict verdict, const char *remedy,
                 const char *format, ...) __attribute__((format(printf, 5, 6)));
static void find(struct report *r, const char *topic, enum verdict verdict, const char *remedy,
                 const char *format, ...)
{
    va_list arguments;
    if (r->count == FINDINGS_MAX)
        return;
    struct finding *f = &r->findings[r->count++];
    *f = (struct finding){.topic = topic, .verdict = verdict};
    va_start(arguments, format);
    vsnprintf(f->what, sizeof f->what, format, arguments);
    va_end(arguments);
    snprintf(f->remedy, sizeof f->remedy, "%s", remedy);
}

/* ---- programs and libraries ---- */

static bool on_path(const char *name)
{
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
    if (n > 0) {
        path[n] = '\0';
        char *slash = strrchr(path, '/');
        snprintf(slash, 32, "/%s", name);
        if (access(path, X_OK) == 0)
            return true;
    }
    for (const char *at = getenv("PATH"); at && *at;) {
        size_t length = strcspn(at, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)(length < PATH_MAX / 2 ? length : 0), at, name);
        if (access(path, X_OK) == 0)
            return true;
        at += length;
        at += *at == ':';
    }
    return false;
}

static void look_at_programs(struct report *r)
{
    static const char *const names[] = {"paramsyncd", "paramsync-train"};
    for (size_t i = 0; i < 2; i++)
        if (on_path(names[i]))
            find(r, "program", OK, "", "%s is there", names[i]);
        else
            find(r, "program", WARN, "install it beside paramsync, or put its folder on PATH",
                 "%s is neither beside this program nor on PATH", names[i]);
}

static void look_at_module(struct report *r, const char *name, const char *symbol, const char *what,
                           enum verdict missing, const char *remedy)
{
    struct ps_error err = {0};
    void *found;
    if (ps_module_open(name, symbol, &found, &err) == 0)
        find(r, "library", OK, "", "%s", what);
    else
        find(r, "library", missing, remedy, "%s: %s", what, err.message);
}

static void look_at_libraries(struct report *r, const struct cli_topology *t)
{
    look_at_module(r, "cpu", "ps_backend_module", "oneDNN, the CPU backend", WARN,
                   "apt install libdnnl2; without it the CPU trains with the slow reference backend");
    look_at_module(r, "gloo", "ps_gloo_module", "Gloo, between CPU processes", WARN,
                   "apt install libgloo0; without it a training on CPUs is limited to one process");
    if (t->card_count)
        look_at_module(r, "cuda", "ps_backend_module", "the CUDA backend", FAIL,
                       "build with -DPARAMSYNC_CUDA=ON, and install the libraries that it names");
}

/* ---- the machine ---- */

static char *read_text(const char *path)
{
    char *text = NULL;
    size_t size;
    return ps_read_file(path, 1 << 20, &text, &size, NULL) ? NULL : text;
}

static void look_at_processor(struct report *r, const struct cli_topology *t)
{
    char *info = read_text("/proc/cpuinfo");
    const char *flags = info ? strstr(info, "\nflags") : NULL;
    char line[8192] = "";
    if (flags)
        snprintf(line, sizeof line, "%.*s ", (int)strcspn(flags + 1, "\n"), flags + 1);
    int cores = CPU_COUNT(&t->allowed);
    bool wide = strstr(line, " avx2 "), widest = strstr(line, " avx512f ");
    const char *vectors = widest ? strstr(line, " avx512_bf16 ") ? "AVX-512 with bf16" : "AVX-512"
                          : wide ? "AVX2"
                                 : "no AVX2";
    enum verdict verdict = flags && !wide ? WARN : OK;
    find(r, "processor", verdict, verdict ? "expect a slow training on this CPU" : "",
         "%d core%s for this process, %d NUMA node%s, %s", cores, cores == 1 ? "" : "s", t->node_count,
         t->node_count == 1 ? "" : "s", flags ? vectors : "vector width not known");
    if (t->quota > 0 && t->quota < cores)
        find(r, "processor", WARN,
             "raise the container's CPU limit, or expect the threads of that many cores",
             "the control group allows the time of %.1f cores", t->quota);
    free(info);
}

static void look_at_memory(struct report *r)
{
    char *info = read_text("/proc/meminfo");
    const char *line = info ? strstr(info, "MemAvailable:") : NULL;
    double available = line ? strtod(line + 13, NULL) * 1024 : 0;
    struct statvfs shared;
    struct rlimit files;
    char text[32];
    cli_format_bytes((uint64_t)available, text, sizeof text);
    if (line)
        find(r, "memory", available < 2e9 ? WARN : OK,
             available < 2e9
                 ? "ResNet-18 at batch 128 wants about 2 GB a rank: a smaller --batch, or fewer ranks"
                 : "",
             "%s available", text);
    if (statvfs("/dev/shm", &shared) == 0) {
        uint64_t bytes = (uint64_t)shared.f_bsize * shared.f_blocks;
        cli_format_bytes(bytes, text, sizeof text);
        bool small = bytes < 500000000;
        find(r, "memory", small ? WARN : OK,
             small ? "docker run --shm-size=8g (or --ipc=host): NCCL and data loaders share memory there"
                   : "",
             "/dev/shm holds %s", text);
    }
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        bool small = files.rlim_cur < 1024;
        find(r, "limits", small ? WARN : OK, small ? "ulimit -n 4096 (systemd: LimitNOFILE=)" : "",
             "%llu open files a process", (unsigned long long)files.rlim_cur);
    }
    free(info);
}

static void look_at_cards(struct report *r, const struct cli_topology *t)
{
    char *version = read_text("/proc/driver/nvidia/version");
    if (!t->card_count) {
        bool device = access("/dev/nvidiactl", F_OK) == 0;
        find(r, "device", device ? WARN : OK, device ? "check nvidia-smi, and CUDA_VISIBLE_DEVICES" : "",
             device ? "an NVIDIA driver, but no card is visible"
                    : "no NVIDIA card: trainings run on the CPU");
        free(version);
        return;
    }
    if (version)
        version[strcspn(version, "\n")] = '\0';
    find(r, "device", OK, "", "%d NVIDIA card%s visible; %.200s", t->card_count,
         t->card_count == 1 ? "" : "s", version ? version : "driver version not known");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver)
        find(r, "device", FAIL, "install the driver's libcuda1, or run the container with --gpus all",
             "libcuda.so.1 cannot be loaded");
    else
        dlclose(driver);
    for (int i = 0; i < t->card_count; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/nvidia%d", i);
        if (access(path, F_OK) == 0 && access(path, R_OK | W_OK) < 0)
            find(r, "device", FAIL, "add this user to the group that owns it (ls -l /dev/nvidia*)",
                 "%s may not be opened", path);
    }
    free(version);
}

/* ---- network ---- */

static bool can_listen(int port, int *ret_errno)
{
    const int on = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    bool good =
        fd >= 0 && bind(fd, (const struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0;
    *ret_errno = errno;
    if (fd >= 0)
        close(fd);
    return good;
}

static int look_at_ports(struct report *r, const char *list, bool sidecar_here, int sidecar_port,
                         struct ps_error *err)
{
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ",");
        char word[16];
        int64_t port;
        int reason;
        snprintf(word, sizeof word, "%.*s", (int)(length < 15 ? length : 15), at);
        if (ps_parse_int64(word, 1, 65535, &port))
            return ps_fail(err, PS_INVALID_ARGUMENT, "--ports %.60s: give numbers from 1 to 65535", list);
        if (can_listen((int)port, &reason))
            find(r, "port", OK, "", "%d is free", (int)port);
        else if (sidecar_here && port == sidecar_port)
            find(r, "port", OK, "", "%d is the sidecar's", (int)port);
        else if (reason == EACCES)
            find(r, "port", FAIL, "take one from 1024 on", "%d may not be listened on by this user",
                 (int)port);
        else
            find(r, "port", WARN,
                 "ss -ltnp shows who has it; paramsyncd --grpc-listen, --http-listen and launch --rdzv take "
                 "others",
                 "%d is taken (%s)", (int)port, strerror(reason));
        at += length;
        at += *at == ',';
    }
    return 0;
}

static void look_at_name(struct report *r)
{
    char name[256] = "";
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    gethostname(name, sizeof name - 1);
    if (getaddrinfo(name, NULL, &hints, &found) != 0) {
        find(r, "network", WARN,
             "add it to /etc/hosts with this machine's address; some libraries look it up",
             "this machine's name %.64s has no address", name);
        return;
    }
    char text[64];
    getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST);
    bool loopback = strncmp(text, "127.", 4) == 0 || strcmp(text, "::1") == 0;
    find(r, "network", OK,
         loopback ? "with several nodes give --rdzv by an address that the others reach, not by this name"
                  : "",
         "%.64s is %s%s", name, text, loopback ? ": only this machine calls it so" : "");
    freeaddrinfo(found);
}

/* ---- file systems ---- */

struct kind {
    unsigned long magic;
    const char *name;
    enum { LOCAL, VOLATILE, REMOTE, LAYER } sort;
};
/* linux/magic.h, and the manual page of statfs for those that are not in it. */
static const struct kind kinds[] = {
    {0xef53, "ext4", LOCAL},         {0x58465342, "xfs", LOCAL},     {0x9123683e, "btrfs", LOCAL},
    {0x2fc12fc1, "zfs", LOCAL},      {0xf2f52010, "f2fs", LOCAL},    {0x01021994, "tmpfs", VOLATILE},
    {0x858458f6, "ramfs", VOLATILE}, {0x6969, "nfs", REMOTE},        {0xff534d42, "cifs", REMOTE},
    {0xfe534d42, "smb2", REMOTE},    {0x65735546, "fuse", REMOTE},   {0x00c36400, "ceph", REMOTE},
    {0x0bd00bd0, "lustre", REMOTE},  {0x47504653, "gpfs", REMOTE},   {0x01021997, "9p", REMOTE},
    {0x19830326, "beegfs", REMOTE},  {0x794c7630, "overlay", LAYER}, {0x6a656a63, "virtiofs", REMOTE},
};

static void look_at_write(struct report *r, const char *topic, const char *dir)
{
    struct ps_error err = {0};
    char path[PATH_MAX + 40];
    snprintf(path, sizeof path, "%s/.paramsync-doctor-%d", dir, (int)getpid());
    double begin = ps_monotonic_s();
    if (ps_write_file_atomic(path, "x", 1, &err)) {
        find(r, topic, FAIL, "give this user the right to write there, or another folder", "%s", err.message);
        return;
    }
    double took = ps_monotonic_s() - begin;
    unlink(path);
    find(r, topic, took > 0.5 ? WARN : OK,
         took > 0.5 ? "a slow disk: each epoch and each commit waits for it" : "",
         "%.120s: a file was written, synced and renamed in %.1f ms", dir, took * 1e3);
}

/* The folder, or where it is to be made. */
static void look_at_folder(struct report *r, const char *topic, const char *wanted, bool store)
{
    char dir[PATH_MAX];
    struct statfs fs;
    struct stat st;
    snprintf(dir, sizeof dir, "%s", wanted);
    while (stat(dir, &st) < 0) {
        char *slash = strrchr(dir, '/');
        if (errno != ENOENT) {
            find(r, topic, FAIL, "give another folder", "%.120s: %s", dir, strerror(errno));
            return;
        }
        if (!slash || slash == dir)
            snprintf(dir, sizeof dir, "%s", slash ? "/" : ".");
        else
            *slash = '\0';
    }
    if (!S_ISDIR(st.st_mode) || statfs(dir, &fs) < 0) {
        find(r, topic, FAIL, "give a folder", "%.120s is not a folder", dir);
        return;
    }
    const struct kind *kind = NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && !kind; i++)
        kind = kinds[i].magic == (unsigned long)(uint32_t)fs.f_type ? &kinds[i] : NULL;
    enum verdict verdict = OK;
    const char *remedy = "";
    if (kind && kind->sort == REMOTE && store) {
        verdict = FAIL;
        remedy =
            "keep the store on a local disk: SQLite's write-ahead log needs shared memory and honest locks";
    } else if (kind && kind->sort == VOLATILE) {
        verdict = WARN;
        remedy = "it is memory: what is there is gone with the next start";
    } else if (kind && kind->sort == LAYER) {
        verdict = WARN;
        remedy = "a container's own layer: gone with the container; mount a volume";
    }
    find(r, topic, verdict, remedy, "%.120s lies on %s", dir,
         kind ? kind->name : "a file system of unknown kind");
    uint64_t room = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize;
    char text[32];
    cli_format_bytes(room, text, sizeof text);
    verdict = room < 500000000 ? FAIL : room < UINT64_C(10000000000) ? WARN : OK;
    find(r, topic, verdict,
         verdict ? "a checkpoint of ResNet-18 and its state take 180 MB an epoch: make room" : "", "%s free",
         text);
    look_at_write(r, topic, dir);
}

/* ---- clock and sidecar ---- */

static void look_at_clock(struct report *r)
{
    struct timex t = {0};
    char now[40];
    int64_t wall = ps_wall_ns();
    ps_format_utc(wall, now, sizeof now);
    int state = adjtimex(&t);
    if (wall < INT64_C(1735689600) * PS_NS_PER_S) /* 2025-01-01: before this program was written */
        find(r, "clock", FAIL, "set it: certificates are judged by it", "the clock says %s", now);
    else if (state < 0)
        find(r, "clock", OK, "", "%s; whether it is synchronised is not told here", now);
    else if (state == TIME_ERROR || (t.status & STA_UNSYNC))
        find(
            r, "clock", WARN,
            "run chrony or systemd-timesyncd (timedatectl): times of several machines are shown side by side",
            "%s, not synchronised", now);
    else
        find(r, "clock", OK, "", "%s, synchronised", now);
}

/* Returns whether a sidecar answers. */
static bool look_at_sidecar(struct report *r, const struct cli_common *common, bool asked)
{
    struct paramsync_options options = {.address = common->sidecar,
                                        .token_file = common->token_file,
                                        .tls_ca = common->tls_ca,
                                        .tls_cert = common->tls_cert,
                                        .tls_key = common->tls_key,
                                        .timeout_s = 5};
    struct paramsync_client *client = NULL;
    struct paramsync_runs *runs = NULL;
    struct paramsync_error err = {0};
    double begin = ps_monotonic_s();
    int code = paramsync_connect(&options, &client, &err);
    if (!code)
        code = paramsync_list_runs(client, "", 1, &runs, &err);
    if (!code)
        find(r, "sidecar", OK, "", "%.100s answers in %.1f ms%s", common->sidecar,
             (ps_monotonic_s() - begin) * 1e3, runs->count ? "" : "; it has no runs yet");
    else if (code == PARAMSYNC_UNAUTHENTICATED || code == PARAMSYNC_PERMISSION_DENIED)
        find(r, "sidecar", FAIL,
             "--token-file FILE or PARAMSYNC_TOKEN: the token that paramsyncd was started with",
             "%.100s refuses: %.160s", common->sidecar, err.message);
    else
        find(
            r, "sidecar", asked ? FAIL : WARN,
            asked
                ? "is it running, is the address right, does a firewall stand between, does it want --tls-ca?"
                : "paramsyncd --data-dir DIR starts one; trainings run without it",
            "%.240s", err.message);
    paramsync_runs_free(runs);
    paramsync_disconnect(client);
    return !code;
}

/* ---- the report ---- */

static const char *const verdict_names[] = {"ok", "warn", "fail"};

static int print(const struct report *r, struct ps_error *err)
{
    static const struct cli_column columns[] = {{"CHECK", CLI_LEFT, CLI_KEEP},
                                                {"", CLI_LEFT, CLI_KEEP},
                                                {"FOUND", CLI_LEFT, CLI_WRAP},
                                                {"WHAT TO DO", CLI_LEFT, CLI_WRAP}};
    static const enum cli_colour colours[] = {CLI_GREEN, CLI_YELLOW, CLI_RED};
    struct cli_table table;
    struct ps_buf out = PS_BUF_INIT(1 << 20);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < r->count; i++) {
        const struct finding *f = &r->findings[i];
        cli_table_add(&table, CLI_PLAIN, f->topic);
        cli_table_add(&table, colours[f->verdict], verdict_names[f->verdict]);
        cli_table_add(&table, CLI_PLAIN, f->what);
        cli_table_add(&table, CLI_PLAIN, f->remedy);
    }
    int code = cli_table_render(&table, cli_columns(), cli_colours(STDOUT_FILENO), &out);
    cli_table_done(&table);
    code = code ? ps_fail(err, code, "out of memory") : cli_write(&out, err);
    ps_buf_done(&out);
    return code;
}

static int print_json(const struct report *r, enum verdict worst, struct ps_error *err)
{
    json_t *all = json_array();
    for (size_t i = 0; i < r->count; i++) {
        const struct finding *f = &r->findings[i];
        json_array_append_new(all, json_pack("{s:s, s:s, s:s, s:s}", "check", f->topic, "verdict",
                                             verdict_names[f->verdict], "found", f->what, "what_to_do",
                                             f->remedy));
    }
    return cli_write_json(json_pack("{s:s, s:o}", "verdict", verdict_names[worst], "checks", all), err);
}

static int doctor_main(const struct doctor_settings *s, bool asked, struct ps_error *err,
                       enum verdict *ret_worst)
{
    struct report *r = calloc(1, sizeof *r);
    struct cli_topology *t = calloc(1, sizeof *t);
    if (!r || !t) {
        free(r);
        free(t);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        CPU_SET(0, &allowed);
    cli_topology_read("", &allowed, getenv("CUDA_VISIBLE_DEVICES"), t);
    look_at_programs(r);
    look_at_libraries(r, t);
    look_at_processor(r, t);
    look_at_memory(r);
    look_at_cards(r, t);
    look_at_clock(r);
    look_at_name(r);
    char host[256] = "";
    int port = 0;
    bool answers = look_at_sidecar(r, &s->common, asked);
    bool here = answers && ps_parse_host_port(s->common.sidecar, host, sizeof host, &port, NULL) == 0 &&
                (strncmp(host, "127.", 4) == 0 || strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0);
    int code = look_at_ports(r, s->ports, here, port, err);
    if (!code) {
        look_at_folder(r, "output", s->output_dir, false);
        if (s->data_dir)
            look_at_folder(r, "store", s->data_dir, true);
        enum verdict worst = OK;
        for (size_t i = 0; i < r->count; i++)
            worst = r->findings[i].verdict > worst ? r->findings[i].verdict : worst;
        code = s->common.json ? print_json(r, worst, err) : print(r, err);
        *ret_worst = worst;
    }
    free(r);
    free(t);
    return code;
}

int cli_doctor(int argc, char **argv)
{
    struct doctor_settings settings = {0};
    struct ps_error err = {0};
    enum verdict worst = OK;
    int words;
    int code = cli_parse(&table_of_options, &settings.common, argc, argv, 0, 0, &words, &err);
    if (code > 0)
        return 0;
    /* Somebody has named it if it is not the default's very text. */
    bool asked = !code && strcmp(settings.common.sidecar, "127.0.0.1:50051") != 0;
    if (!code)
        code = doctor_main(&settings, asked, &err, &worst);
    return code ? cli_complain("doctor", &err) : worst == FAIL ? 1 : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/topology.h"

#include "services/base/fs.h"
#include "services/base/text.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cli_cpu_list(const char *text, cpu_set_t *ret)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    while (*text && *text != '\n') {
        char *end;
        long first = strtol(text, &end, 10), last = first;
        if (end == text || first < 0)
            return -1;
        if (*end == '-') {
            text = end + 1;
            last = strtol(text, &end, 10);
            if (end == text)
                return -1;
        }
        if (last < first || last >= CPU_SETSIZE)
            return -1;
        for (long i = first; i <= last; i++)
            CPU_SET((size_t)i, &set);
        if (*end != ',' && *end && *end != '\n')
            return -1;
        text = *end == ',' ? end + 1 : end;
    }
    *ret = set;
    return 0;
}

static char *read_text(const char *root, const char *path)
{
    char full[PATH_MAX], *text = NULL;
    size_t size;
    if (snprintf(full, sizeof full, "%s%s", root, path) >= (int)sizeof full ||
        ps_read_file(full, 1 << 16, &text, &size, NULL))
        return NULL;
    return text;
}

static void read_nodes(const char *root, struct cli_topology *t)
{
    for (int id = 0; id < 1024 && t->node_count < CLI_NODES_MAX; id++) {
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", id);
        char *text = read_text(root, path);
        cpu_set_t cpus;
        if (text && cli_cpu_list(text, &cpus) == 0) {
            CPU_AND(&cpus, &cpus, &t->allowed);
            if (CPU_COUNT(&cpus)) {
                t->node_id[t->node_count] = id;
                t->node_cpus[t->node_count++] = cpus;
            }
        }
        free(text);
    }
    cpu_set_t known;
    CPU_ZERO(&known);
    for (int i = 0; i < t->node_count; i++)
        CPU_OR(&known, &known, &t->node_cpus[i]);
    if (!CPU_EQUAL(&known, &t->allowed)) { /* a kernel without NUMA, or a container that hides it */
        t->node_count = 1;
        t->node_id[0] = 0;
        t->node_cpus[0] = t->allowed;
    }
}

static int by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

static void read_cards(const char *root, struct cli_topology *t)
{
    char path[PATH_MAX], names[CLI_CARDS_MAX][32];
    int count = 0;
    snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus", root);
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir)) && count < CLI_CARDS_MAX;)
        if (e->d_name[0] != '.' && strlen(e->d_name) < sizeof names[0])
            snprintf(names[count++], sizeof names[0], "%.31s", e->d_name);
    if (dir)
        closedir(dir);
    qsort(names, (size_t)count, sizeof names[0], by_text);
    for (int i = 0; i < count; i++) {
        int64_t node = -1;
        snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", names[i]);
        char *text = read_text(root, path);
        if (text) {
            text[strcspn(text, "\n")] = '\0';
            if (ps_parse_int64(text, -1, 1023, &node))
                node = -1;
        }
        free(text);
        t->card_node[i] = (int)node;
    }
    t->card_count = count;
}

/* CUDA_VISIBLE_DEVICES picks cards by number; where it names them otherwise only their count is known. */
static void pick_visible(const char *visible, struct cli_topology *t)
{
    int picked[CLI_CARDS_MAX], count = 0;
    for (const char *at = visible; *at && count < CLI_CARDS_MAX;) {
        size_t length = strcspn(at, ",");
        char word[24];
        int64_t number = -1;
        snprintf(word, sizeof word, "%.*s", (int)(length < 23 ? length : 23), at);
        if (!length || strcmp(word, "-1") == 0)
            break; /* CUDA too sees nothing from there on */
        if (ps_parse_int64(word, 0, t->card_count - 1, &number))
            number = -1;
        picked[count++] = number < 0 ? -1 : t->card_node[number];
        at += length;
        at += *at == ',';
    }
    t->card_count = count < t->card_count ? count : t->card_count;
    memcpy(t->card_node, picked, (size_t)t->card_count * sizeof *picked);
}

static double read_quota(const char *root)
{
    double quota = 0;
    char *text = read_text(root, "/sys/fs/cgroup/cpu.max"), *end;
    if (text && strncmp(text, "max", 3) != 0) {
        double most = strtod(text, &end), period = strtod(end, NULL);
        if (most > 0 && period > 0)
            quota = most / period;
    }
    free(text);
    return quota;
}

void cli_topology_read(const char *root, const cpu_set_t *allowed, const char *visible,
                       struct cli_topology *ret)
{
    *ret = (struct cli_topology){.allowed = *allowed, .quota = read_quota(root)};
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        ret->sibling[cpu] = cpu;
        if (!CPU_ISSET((size_t)cpu, allowed))
            continue;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        char *text = read_text(root, path);
        cpu_set_t same;
        if (text && cli_cpu_list(text, &same) == 0)
            for (int i = 0; i < cpu; i++)
                if (CPU_ISSET((size_t)i, &same)) {
                    ret->sibling[cpu] = i;
                    break;
                }
        free(text);
    }
    read_nodes(root, ret);
    read_cards(root, ret);
    if (visible && ret->card_count)
        pick_visible(visible, ret);
}

/* The index of the node that rank belongs to. */
static int node_of(const struct cli_topology *t, int rank, int count)
{
    if (t->card_count >= count)
        for (int i = 0; i < t->node_count; i++)
            if (t->node_id[i] == t->card_node[rank])
                return i;
    return (int)((long)rank * t->node_count / count);
}

static int cores_in(const struct cli_topology *t, const cpu_set_t *cpus)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET((size_t)i, cpus))
            CPU_SET((size_t)t->sibling[i], &cores);
    return CPU_COUNT(&cores);
}

void cli_topology_share(const struct cli_topology *t, int rank, int count, struct cli_share *ret)
{
    int node = node_of(t, rank, count), peers = 0, mine = 0;
    for (int i = 0; i < count; i++)
        if (node_of(t, i, count) == node) {
            mine += i < rank;
            peers++;
        }
    const cpu_set_t *all = &t->node_cpus[node];
    int cores = cores_in(t, all), seen = -1;
    *ret = (struct cli_share){.cpus = *all, .threads = 1, .node = t->node_id[node]};
    if (peers && cores >= peers) {
        int first = (int)((long)mine * cores / peers), end = (int)((long)(mine + 1) * cores / peers);
        CPU_ZERO(&ret->cpus);
        /* Cores in the order of their first threads; all threads of a core go to the same rank. */
        for (int lead = 0; lead < CPU_SETSIZE; lead++) {
            bool counted = false;
            for (int i = lead; i < CPU_SETSIZE; i++)
                if (CPU_ISSET((size_t)i, all) && t->sibling[i] == lead) {
                    seen += !counted;
                    counted = true;
                    if (seen >= first && seen < end)
                        CPU_SET((size_t)i, &ret->cpus);
                }
        }
        ret->threads = end - first;
    }
    /* A quota is of the whole container: threads beyond it only wait for each other. */
    if (t->quota > 0 && ret->threads * count > t->quota)
        ret->threads = t->quota / count < 1 ? 1 : (int)(t->quota / count);
}

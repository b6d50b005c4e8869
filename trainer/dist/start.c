/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/dist/start.h"

#include "services/base/digest.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_PAIRS = 64,
    NAME_MAX_BYTES = 64,
    VALUE_MAX_BYTES = 128,
    PIECE = 4 << 20, /* elements of a state vector at a time */
};

/* What each rank shows: a fixed size, so that ranks with anything in it can exchange it. */
struct facts {
    uint64_t model;
    uint32_t pair_count, unused;
    char summary[160];
    struct {
        char name[NAME_MAX_BYTES], value[VALUE_MAX_BYTES];
    } pairs[MAX_PAIRS];
};

/* One parameter as text, so that a difference can be named. */
struct param_line {
    char text[PS_NAME_MAX + 64];
};

static void describe_param(const struct ps_model *model, int i, char *out, size_t size)
{
    if (i >= model->param_count) {
        snprintf(out, size, "no parameter");
        return;
    }
    const struct ps_param *p = &model->params[i];
    size_t used = (size_t)snprintf(out, size, "%s [", p->name);
    for (int d = 0; d < p->ndim && used < size; d++)
        used += (size_t)snprintf(out + used, size - used, "%s%d", d ? ", " : "", p->shape[d]);
    if (used < size)
        snprintf(out + used, size - used, "]");
}

/* "1", "1 and 3", "1, 2 and 5": the ranks for which differs holds. */
static void name_ranks(const unsigned char *differs, int world_size, char *out, size_t size)
{
    int count = 0, shown = 0;
    size_t used = 0;
    for (int i = 0; i < world_size; i++)
        count += differs[i];
    out[0] = '\0';
    for (int i = 0; i < world_size && shown < 8; i++) {
        if (!differs[i])
            continue;
        shown++;
        int n = snprintf(out + used, size - used, "%s%d",
                         shown == 1       ? ""
                         : shown == count ? " and "
                                          : ", ",
                         i);
        if (n < 0 || (size_t)n >= size - used)
            return;
        used += (size_t)n;
    }
    if (shown < count)
        snprintf(out + used, size - used, " and %d more", count - shown);
}

/* Models differ: every rank compares its parameters with rank 0's, one by one, and shows the first
 * difference. */
static int explain_models(struct ps_comm *comm, const struct ps_model *model, const struct facts *all,
                          const unsigned char *differs, struct ps_error *err)
{
    int counts[2] = {model->param_count, 0};
    int code = comm->ops->broadcast(comm, counts, sizeof counts, 0, err);
    if (code < 0)
        return code;
    if (counts[0] < 0 || counts[0] > 1 << 16)
        return ps_fail(err, PS_INTERNAL, "rank 0's model has an impossible number of parameters");
    struct param_line *lines = calloc((size_t)counts[0] + 1, sizeof *lines), mine = {0};
    struct param_line *found = calloc((size_t)comm->world_size, 2 * sizeof *found), pair[2] = {0};
    if (!lines || !found) {
        free(lines);
        free(found);
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (comm->rank == 0)
        for (int i = 0; i < counts[0]; i++)
            describe_param(model, i, lines[i].text, sizeof lines[i].text);
    code = comm->ops->broadcast(comm, lines, (size_t)counts[0] * sizeof *lines, 0, err);
    int most = counts[0] > model->param_count ? counts[0] : model->param_count;
    snprintf(lines[counts[0]].text, sizeof lines[0].text, "no parameter");
    for (int i = 0; i < most && code == 0 && !pair[0].text[0]; i++) {
        const struct param_line *theirs = &lines[i < counts[0] ? i : counts[0]];
        describe_param(model, i, mine.text, sizeof mine.text);
        if (strncmp(mine.text, theirs->text, sizeof mine.text - 1) != 0) {
            pair[0] = mine;
            pair[1] = *theirs;
        }
    }
    if (code == 0)
        code = comm->ops->all_gather(comm, pair, sizeof pair, found, err);
    if (code == 0) {
        char ranks[80];
        int first = 0;
        while (!differs[first])
            first++;
        name_ranks(differs, comm->world_size, ranks, sizeof ranks);
        struct param_line *f = &found[2 * first];
        f[0].text[sizeof f[0].text - 1] = f[1].text[sizeof f[1].text - 1] = '\0';
        if (f[0].text[0])
            code = ps_fail(err, PS_FAILED_PRECONDITION,
                           "the ranks have different models: rank %s differ%s from rank 0 (%s on rank %d, %s "
                           "on rank 0); "
                           "the first difference is %s against %s",
                           ranks, strchr(ranks, ' ') ? "" : "s", all[first].summary, first, all[0].summary,
                           f[0].text, f[1].text);
        else
            code = ps_fail(
                err, PS_FAILED_PRECONDITION,
                "the ranks have different models: rank %s differ%s from rank 0 in ops or attributes, though "
                "names and shapes of the parameters are the same",
                ranks, strchr(ranks, ' ') ? "" : "s");
    }
    free(lines);
    free(found);
    return code;
}

static int compare_settings(const struct ps_comm *comm, const struct facts *all, unsigned char *differs,
                            struct ps_error *err)
{
    char ranks[80];
    uint32_t most = 0;
    for (int rank = 0; rank < comm->world_size; rank++)
        most = all[rank].pair_count > most ? all[rank].pair_count : most;
    for (uint32_t i = 0; i < most && i < MAX_PAIRS; i++) {
        int first = 0;
        memset(differs, 0, (size_t)comm->world_size);
        for (int rank = 1; rank < comm->world_size; rank++) {
            differs[rank] = memcmp(&all[rank].pairs[i], &all[0].pairs[i], sizeof all[0].pairs[i]) != 0;
            if (differs[rank] && !first)
                first = rank;
        }
        if (!first)
            continue;
        name_ranks(differs, comm->world_size, ranks, sizeof ranks);
        bool same_name = strcmp(all[first].pairs[i].name, all[0].pairs[i].name) == 0;
        return ps_fail(
            err, PS_FAILED_PRECONDITION,
            "the ranks were started with different settings: %s%s%s on rank %d, %s%s%s on rank 0 (rank %s "
            "differ%s from rank 0)",
            all[first].pairs[i].name, same_name ? " is " : "=", all[first].pairs[i].value, first,
            same_name ? "" : all[0].pairs[i].name, same_name ? "" : "=", all[0].pairs[i].value, ranks,
            strchr(ranks, ' ') ? "" : "s");
    }
    return 0;
}

int ps_start_check(struct ps_comm *comm, const struct ps_model *model, const struct ps_start_pair *pairs,
                   size_t pair_count, struct ps_error *err)
{
    if (pair_count > MAX_PAIRS)
        return ps_fail(err, PS_INVALID_ARGUMENT, "more than %d settings to compare", MAX_PAIRS);
    struct facts *mine = calloc(1, sizeof *mine), *all = calloc((size_t)comm->world_size, sizeof *all);
    unsigned char *differs = calloc((size_t)comm->world_size, 1);
    int code = 0;
    if (!mine || !all || !differs) {
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
        goto out;
    }
    mine->model = ps_model_fingerprint(model);
    mine->pair_count = (uint32_t)pair_count;
    snprintf(mine->summary, sizeof mine->summary,
             "%s, width %d, %d classes, %d parameter tensors, %zu parameters", model->name, model->width,
             model->classes, model->param_count, model->param_elements);
    for (size_t i = 0; i < pair_count; i++) {
        snprintf(mine->pairs[i].name, NAME_MAX_BYTES, "%s", pairs[i].name);
        snprintf(mine->pairs[i].value, VALUE_MAX_BYTES, "%s", pairs[i].value ? pairs[i].value : "unset");
    }
    code = comm->ops->all_gather(comm, mine, sizeof *mine, all, err);
    if (code < 0)
        goto out;
    bool different = false;
    for (int rank = 0; rank < comm->world_size; rank++) {
        all[rank].summary[sizeof all[rank].summary - 1] = '\0';
        differs[rank] = all[rank].model != all[0].model;
        different = different || differs[rank];
        for (size_t i = 0; i < MAX_PAIRS; i++) {
            all[rank].pairs[i].name[NAME_MAX_BYTES - 1] = '\0';
            all[rank].pairs[i].value[VALUE_MAX_BYTES - 1] = '\0';
        }
    }
    code = different ? explain_models(comm, model, all, differs, err)
                     : compare_settings(comm, all, differs, err);
out:
    free(mine);
    free(all);
    free(differs);
    return code;
}

static size_t state_elements(const struct ps_model *model, enum ps_state_kind what)
{
    return what == PS_STATE_BUFFERS ? model->buffer_elements : model->param_elements;
}

int ps_broadcast_state(struct ps_comm *comm, const struct ps_backend_ops *ops, struct ps_backend *backend,
                       const struct ps_model *model, enum ps_state_kind what, int root, struct ps_error *err)
{
    size_t total = state_elements(model, what), piece = total < PIECE ? total : PIECE;
    if (comm->world_size == 1 || total == 0)
        return 0;
    float *host = malloc(piece * sizeof *host);
    if (!host)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    for (size_t offset = 0; offset < total && code == 0; offset += piece) {
        size_t count = total - offset < piece ? total - offset : piece;
        if (comm->rank == root)
            code = ops->read(backend, what, offset, count, host, err);
        if (code == 0)
            code = comm->ops->broadcast(comm, host, count * sizeof *host, root, err);
        if (code == 0 && comm->rank != root)
            code = ops->write(backend, what, offset, count, host, err);
    }
    free(host);
    return code;
}

int ps_start_broadcast(struct ps_comm *comm, const struct ps_backend_ops *ops, struct ps_backend *backend,
                       const struct ps_model *model, struct ps_error *err)
{
    int code = ps_broadcast_state(comm, ops, backend, model, PS_STATE_PARAMS, 0, err);
    return code < 0 ? code : ps_broadcast_state(comm, ops, backend, model, PS_STATE_BUFFERS, 0, err);
}

int ps_state_hash(const struct ps_backend_ops *ops, struct ps_backend *backend, const struct ps_model *model,
                  enum ps_state_kind what, uint64_t seed, uint64_t *ret_hash, struct ps_error *err)
{
    size_t total = state_elements(model, what), piece = total < PIECE ? total : PIECE;
    uint64_t hash = seed;
    float *host = malloc((piece + 1) * sizeof *host);
    if (!host)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    int code = 0;
    for (size_t offset = 0; offset < total && code == 0; offset += piece) {
        size_t count = total - offset < piece ? total - offset : piece;
        code = ops->read(backend, what, offset, count, host, err);
        if (code == 0)
            hash = ps_hash64(host, count * sizeof *host, hash);
    }
    free(host);
    if (code == 0)
        *ret_hash = hash;
    return code;
}

int ps_compare_hash(struct ps_comm *comm, const char *what, uint64_t hash, struct ps_error *err)
{
    uint64_t *all = calloc((size_t)comm->world_size, sizeof *all);
    unsigned char *differs = calloc((size_t)comm->world_size, 1);
    int code = all && differs ? comm->ops->all_gather(comm, &hash, sizeof hash, all, err)
                              : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    if (code == 0) {
        char ranks[80];
        bool different = false;
        for (int rank = 0; rank < comm->world_size; rank++) {
            differs[rank] = all[rank] != all[0];
            different = different || differs[rank];
        }
        if (different) {
            name_ranks(differs, comm->world_size, ranks, sizeof ranks);
            code = ps_fail(err, PS_DATA_LOSS,
                           "the replicas have drifted apart: the %s of rank %s are not those of rank 0", what,
                           ranks);
        }
    }
    free(all);
    free(differs);
    return code;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/checkpoint/checkpoint.h"

#include "services/base/fs.h"
#include "services/base/text.h"
#include "trainer/checkpoint/pth.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OWN_PAIRS = 9, EPOCH_MAX = 100000000 };

static const char state_suffix[] = ".state", weights_suffix[] = ".safetensors", pth_suffix[] = ".pth";

/* ---- the state dictionary as tensors ---- */

/* The tensors of the weights file, in PyTorch's order; counters all point at *batches. */
static struct ps_tensor *state_dict(const struct ps_model *model, const float *params, const float *buffers,
                                    const int64_t *batches)
{
    struct ps_tensor *tensors = calloc((size_t)model->entry_count, sizeof *tensors);
    for (int i = 0; tensors && i < model->entry_count; i++) {
        const struct ps_entry *entry = &model->entries[i];
        struct ps_tensor *t = &tensors[i];
        memcpy(t->name, entry->name, sizeof entry->name);
        switch (entry->kind) {
        case PS_ENTRY_PARAM: {
            const struct ps_param *p = &model->params[entry->index];
            t->ndim = p->ndim;
            for (int d = 0; d < p->ndim; d++)
                t->shape[d] = (size_t)p->shape[d];
            t->bytes = p->count * sizeof(float);
            t->data = params ? params + p->offset : NULL;
            break;
        }
        case PS_ENTRY_BUFFER: {
            const struct ps_buffer *b = &model->buffers[entry->index];
            t->ndim = 1;
            t->shape[0] = b->count;
            t->bytes = b->count * sizeof(float);
            t->data = buffers ? buffers + b->offset : NULL;
            break;
        }
        case PS_ENTRY_COUNTER:
            t->type = PS_TENSOR_I64;
            t->bytes = sizeof(int64_t);
            t->data = batches;
            break;
        }
    }
    return tensors;
}

static struct ps_tensor flat(const char *name, const float *data, size_t count)
{
    struct ps_tensor t = {
        .type = PS_TENSOR_F32, .ndim = 1, .shape = {count}, .bytes = count * sizeof(float), .data = data};
    snprintf(t.name, sizeof t.name, "%s", name);
    return t;
}

/* "DIR/epoch_N.suffix", or "PATH.suffix" with N 0. */
static char *file_name(const char *dir, int epoch, const char *suffix)
{
    char *path;
    int n =
        epoch ? asprintf(&path, "%s/epoch_%d%s", dir, epoch, suffix) : asprintf(&path, "%s%s", dir, suffix);
    return n < 0 ? NULL : path;
}

static int no_memory(struct ps_error *err)
{
    return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory for a checkpoint");
}

/* ---- saving ---- */

static int save_state(const char *path, const struct ps_model *model, const struct ps_checkpoint *c,
                      const char *digest, struct ps_error *err)
{
    char numbers[6][32];
    snprintf(numbers[0], sizeof *numbers, "%d", c->epoch);
    snprintf(numbers[1], sizeof *numbers, "%lld", (long long)c->step);
    snprintf(numbers[2], sizeof *numbers, "%lld", (long long)c->batches);
    snprintf(numbers[3], sizeof *numbers, "%d", model->width);
    snprintf(numbers[4], sizeof *numbers, "%d", model->classes);
    snprintf(numbers[5], sizeof *numbers, "%016llx", (unsigned long long)ps_model_fingerprint(model));
    const struct ps_tensor_pair own[OWN_PAIRS] = {
        {"format", "paramsync-state-1"},
        {"model", model->name},
        {"width", numbers[3]},
        {"classes", numbers[4]},
        {"fingerprint", numbers[5]},
        {"epoch", numbers[0]},
        {"step", numbers[1]},
        {"batches", numbers[2]},
        {"optimizer", c->optimizer == PS_ADAM ? "adam" : "sgd"},
    };
    struct ps_tensor tensors[4];
    size_t count = 0, pairs_count = 0;
    struct ps_tensor_pair *pairs = calloc(OWN_PAIRS + 1 + c->pair_count, sizeof *pairs);
    if (!pairs)
        return no_memory(err);
    for (; pairs_count < OWN_PAIRS; pairs_count++)
        pairs[pairs_count] = own[pairs_count];
    if (digest)
        pairs[pairs_count++] = (struct ps_tensor_pair){"weights_sha256", digest};
    for (size_t i = 0; i < c->pair_count; i++)
        pairs[pairs_count++] = c->pairs[i];
    if (c->moment_1)
        tensors[count++] = flat("moment_1", c->moment_1, model->param_elements);
    if (c->moment_2)
        tensors[count++] = flat("moment_2", c->moment_2, model->param_elements);
    if (!digest) {
        tensors[count++] = flat("params", c->params, model->param_elements);
        tensors[count++] = flat("buffers", c->buffers, model->buffer_elements);
    }
    int code = ps_safetensors_write(path, tensors, count, pairs, pairs_count, NULL, err);
    free(pairs);
    return code;
}

int ps_checkpoint_save(const char *dir, const struct ps_model *model, const struct ps_checkpoint *c,
                       unsigned formats, char **ret_path, struct ps_error *err)
{
    char digest[PS_SHA256_HEX], epoch[16];
    if (c->epoch < 1 || !(formats & (PS_CHECKPOINT_SAFETENSORS | PS_CHECKPOINT_PTH)))
        return ps_fail(err, PS_INVALID_ARGUMENT, "checkpoint of epoch %d in no known format", c->epoch);
    snprintf(epoch, sizeof epoch, "%d", c->epoch);
    const struct ps_tensor_pair about[] = {{"format", "pt"}, {"epoch", epoch}};
    const bool safetensors = formats & PS_CHECKPOINT_SAFETENSORS, pth = formats & PS_CHECKPOINT_PTH;
    struct ps_tensor *tensors = state_dict(model, c->params, c->buffers, &c->batches);
    char *state = file_name(dir, c->epoch, state_suffix);
    char *weights = file_name(dir, c->epoch, weights_suffix);
    char *torch = file_name(dir, c->epoch, pth_suffix);
    const size_t count = (size_t)model->entry_count;
    int code = tensors && state && weights && torch ? 0 : no_memory(err);
    if (!code && pth) /* first: what is whole for resuming is then whole for readers too */
        code = ps_pth_write(torch, tensors, count, err);
    if (!code && safetensors)
        code = ps_safetensors_write(NULL, tensors, count, about, 2, digest, err);
    if (!code)
        code = save_state(state, model, c, safetensors ? digest : NULL, err);
    if (!code && safetensors)
        code = ps_safetensors_write(weights, tensors, count, about, 2, NULL, err);
    if (!code) {
        char **kept = safetensors ? &weights : &torch;
        *ret_path = *kept;
        *kept = NULL;
    }
    free(tensors);
    free(state);
    free(weights);
    free(torch);
    return code;
}

/* ---- loading ---- */

/* Copies the state dictionary's tensors; extra tensors are an error too: it is another model then. */
static int take_weights(const struct ps_safetensors *file, const char *path, const struct ps_model *model,
                        struct ps_checkpoint *c, struct ps_error *err)
{
    struct ps_tensor *expected = state_dict(model, NULL, NULL, NULL);
    int code = expected ? 0 : no_memory(err);
    for (int i = 0; i < model->entry_count && !code; i++) {
        const struct ps_entry *entry = &model->entries[i];
        const struct ps_tensor *want = &expected[i], *have = ps_safetensors_find(file, entry->name);
        char a[160], b[160];
        if (!have) {
            code = ps_fail(err, PS_FAILED_PRECONDITION,
                           "%s has no tensor %s: it is of another model than %s, width %d", path, entry->name,
                           model->name, model->width);
            break;
        }
        ps_tensor_shape_text(want, a, sizeof a);
        ps_tensor_shape_text(have, b, sizeof b);
        if (have->type != want->type || strcmp(a, b) != 0) {
            code = ps_fail(err, PS_FAILED_PRECONDITION,
                           "%s: tensor %s is %s %s, but %s of width %d with %d classes has %s %s", path,
                           entry->name, ps_tensor_type_name(have->type), b, model->name, model->width,
                           model->classes, ps_tensor_type_name(want->type), a);
            break;
        }
        if (entry->kind == PS_ENTRY_PARAM)
            memcpy(c->params + model->params[entry->index].offset, have->data, have->bytes);
        else if (entry->kind == PS_ENTRY_BUFFER)
            memcpy(c->buffers + model->buffers[entry->index].offset, have->data, have->bytes);
        else
            memcpy(&c->batches, have->data, sizeof c->batches);
    }
    if (!code && file->count != (size_t)model->entry_count) {
        for (size_t i = 0; i < file->count && !code; i++) {
            const char *name = file->tensors[i].name;
            bool known = false;
            for (int k = 0; k < model->entry_count && !known; k++)
                known = &file->tensors[i] == ps_safetensors_find(file, model->entries[k].name);
            if (!known)
                code = ps_fail(err, PS_FAILED_PRECONDITION, "%s: tensor %s is not one of %s, width %d", path,
                               name, model->name, model->width);
        }
    }
    free(expected);
    return code;
}

static int take_flat(const struct ps_safetensors *file, const char *path, const char *name, size_t count,
                     float **ret, struct ps_error *err)
{
    const struct ps_tensor *t = ps_safetensors_find(file, name);
    if (!t)
        return 0;
    if (t->type != PS_TENSOR_F32 || t->ndim != 1 || t->shape[0] != count) {
        char shape[160];
        ps_tensor_shape_text(t, shape, sizeof shape);
        return ps_fail(err, PS_FAILED_PRECONDITION, "%s: tensor %s is %s %s, but the model needs F32 [%zu]",
                       path, name, ps_tensor_type_name(t->type), shape, count);
    }
    if (!*ret)
        *ret = malloc(t->bytes + 1);
    if (!*ret)
        return no_memory(err);
    memcpy(*ret, t->data, t->bytes);
    return 0;
}

static int take_number(const struct ps_safetensors *file, const char *path, const char *key, int64_t max,
                       int64_t *ret, struct ps_error *err)
{
    const char *text = ps_safetensors_metadata(file, key);
    if (!text || ps_parse_int64(text, 0, max, ret))
        return ps_fail(err, PS_DATA_LOSS, "%s: its %s is missing or no number", path, key);
    return 0;
}

static int take_pairs(const struct ps_safetensors *file, struct ps_checkpoint *c, struct ps_error *err)
{
    c->pairs = calloc(file->metadata_count + 1, sizeof *c->pairs);
    if (!c->pairs)
        return no_memory(err);
    for (size_t i = 0; i < file->metadata_count; i++) {
        char *key = strdup(file->metadata[i].key), *value = strdup(file->metadata[i].value);
        c->pairs[c->pair_count++] = (struct ps_tensor_pair){key, value};
        if (!key || !value)
            return no_memory(err);
    }
    return 0;
}

static int file_digest(const char *path, char ret[PS_SHA256_HEX], char **ret_data, size_t *ret_size,
                       struct ps_error *err)
{
    struct ps_sha256 *sha = ps_sha256_new();
    int code = sha ? ps_read_file(path, (size_t)16 << 30, ret_data, ret_size, err) : no_memory(err);
    if (!code) {
        ps_sha256_update(sha, *ret_data, *ret_size);
        ps_sha256_hex(sha, ret);
    }
    ps_sha256_free(sha);
    return code;
}

/* The weights file that a state file belongs to, read and compared with the digest. */
static int read_weights(const char *path, const char *digest, struct ps_safetensors **ret,
                        struct ps_error *err)
{
    char have[PS_SHA256_HEX], *data;
    size_t size;
    int code = file_digest(path, have, &data, &size, err);
    if (code)
        return code;
    if (digest && strcmp(have, digest) != 0) {
        free(data);
        return ps_fail(err, PS_DATA_LOSS,
                       "%s is not the file that its .state names (SHA-256 %.12s..., expected %.12s...)", path,
                       have, digest);
    }
    return ps_safetensors_parse(data, size, path, ret, err);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* The path with another suffix. */
static char *sibling(const char *path, const char *suffix, const char *other)
{
    char *stem = strdup(path), *name = NULL;
    if (stem) {
        stem[strlen(stem) - strlen(suffix)] = '\0';
        name = file_name(stem, 0, other);
    }
    free(stem);
    return name;
}

static int load_state(const char *path, const struct ps_model *model, struct ps_checkpoint *c,
                      struct ps_error *err)
{
    struct ps_safetensors *state = NULL, *weights = NULL;
    char *weights_path = sibling(path, state_suffix, weights_suffix);
    int64_t epoch = 0;
    int code = weights_path ? ps_safetensors_read(path, &state, err) : no_memory(err);
    if (code)
        goto out;
    const char *format = ps_safetensors_metadata(state, "format");
    const char *digest = ps_safetensors_metadata(state, "weights_sha256");
    const char *optimizer = ps_safetensors_metadata(state, "optimizer");
    if (!format || strcmp(format, "paramsync-state-1") != 0 || !optimizer ||
        (strcmp(optimizer, "adam") != 0 && strcmp(optimizer, "sgd") != 0)) {
        code = ps_fail(err, PS_INVALID_ARGUMENT, "%s is not a state file of this program's", path);
        goto out;
    }
    c->optimizer = strcmp(optimizer, "adam") == 0 ? PS_ADAM : PS_SGD;
    code = take_number(state, path, "epoch", EPOCH_MAX, &epoch, err);
    if (!code)
        code = take_number(state, path, "step", INT64_MAX, &c->step, err);
    if (!code)
        code = take_number(state, path, "batches", INT64_MAX, &c->batches, err);
    if (code)
        goto out;
    c->epoch = (int)epoch;
    if (digest) {
        code = read_weights(weights_path, digest, &weights, err);
        if (!code)
            code = take_weights(weights, weights_path, model, c, err);
    } else if (!ps_safetensors_find(state, "params") || !ps_safetensors_find(state, "buffers")) {
        code = ps_fail(err, PS_DATA_LOSS, "%s neither holds the weights nor names their file", path);
    } else {
        code = take_flat(state, path, "params", model->param_elements, &c->params, err);
        if (!code)
            code = take_flat(state, path, "buffers", model->buffer_elements, &c->buffers, err);
    }
    if (!code)
        code = take_flat(state, path, "moment_1", model->param_elements, &c->moment_1, err);
    if (!code)
        code = take_flat(state, path, "moment_2", model->param_elements, &c->moment_2, err);
    if (!code)
        code = take_pairs(state, c, err);
    if (!code) { /* names and shapes agree, but not the net: other ops or attributes */
        char fingerprint[32];
        const char *have = ps_safetensors_metadata(state, "fingerprint");
        snprintf(fingerprint, sizeof fingerprint, "%016llx", (unsigned long long)ps_model_fingerprint(model));
        if (!have || strcmp(have, fingerprint) != 0)
            code = ps_fail(err, PS_FAILED_PRECONDITION, "%s is of a model that differs from %s, width %d",
                           path, model->name, model->width);
    }
out:
    free(weights_path);
    ps_safetensors_free(weights);
    ps_safetensors_free(state);
    return code;
}

int ps_checkpoint_load(const char *path, const struct ps_model *model, struct ps_checkpoint **ret,
                       struct ps_error *err)
{
    struct ps_checkpoint *c = calloc(1, sizeof *c);
    char *state = NULL;
    int code = 0;
    if (c) {
        c->params = malloc(model->param_elements * sizeof(float) + 1);
        c->buffers = malloc(model->buffer_elements * sizeof(float) + 1);
    }
    if (!c || !c->params || !c->buffers) {
        code = no_memory(err);
        goto out;
    }
    if (ends_with(path, pth_suffix))
        state = sibling(path, pth_suffix, state_suffix);
    else if (ends_with(path, weights_suffix))
        state = sibling(path, weights_suffix, state_suffix);
    if (ends_with(path, state_suffix)) {
        code = load_state(path, model, c, err);
    } else if (state && access(state, F_OK) == 0) {
        code = load_state(state, model, c, err);
    } else if (ends_with(path, pth_suffix)) {
        code = ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s has no .state beside it, and a .pth alone cannot be resumed from: "
                       "convert it to safetensors",
                       path);
    } else {
        struct ps_safetensors *weights = NULL;
        code = read_weights(path, NULL, &weights, err);
        if (!code)
            code = take_weights(weights, path, model, c, err);
        ps_safetensors_free(weights);
        c->weights_only = true;
    }
out:
    free(state);
    if (code)
        ps_checkpoint_free(c);
    else
        *ret = c;
    return code;
}

struct ps_checkpoint *ps_checkpoint_free(struct ps_checkpoint *c)
{
    if (!c)
        return NULL;
    free(c->params);
    free(c->buffers);
    free(c->moment_1);
    free(c->moment_2);
    for (size_t i = 0; i < c->pair_count; i++) {
        free((char *)c->pairs[i].key);
        free((char *)c->pairs[i].value);
    }
    free(c->pairs);
    free(c);
    return NULL;
}

const char *ps_checkpoint_pair(const struct ps_checkpoint *c, const char *key)
{
    for (size_t i = 0; i < c->pair_count; i++)
        if (strcmp(c->pairs[i].key, key) == 0)
            return c->pairs[i].value;
    return NULL;
}

/* ---- the folder ---- */

/* The number n of "epoch_{n}SUFFIX", or 0. */
static int epoch_of(const char *name, const char *suffix)
{
    static const char stem[] = "epoch_";
    if (strncmp(name, stem, sizeof stem - 1) != 0 || !ends_with(name, suffix))
        return 0;
    const char *digits = name + sizeof stem - 1;
    size_t n = strspn(digits, "0123456789");
    char number[16];
    int64_t epoch;
    if (n == 0 || n >= sizeof number || strcmp(digits + n, suffix) != 0)
        return 0;
    memcpy(number, digits, n);
    number[n] = '\0';
    return ps_parse_int64(number, 1, EPOCH_MAX, &epoch) ? 0 : (int)epoch;
}

static char *id_file(const char *dir)
{
    char *path = NULL;
    return asprintf(&path, "%s/training.id", dir) < 0 ? NULL : path;
}

int ps_training_new(char ret_id[PS_TRAINING_ID], struct ps_error *err)
{
    unsigned char bytes[(PS_TRAINING_ID - 1) / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        return ps_fail_errno(err, errno, "no random numbers");
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(ret_id + 2 * i, 3, "%02x", bytes[i]);
    return 0;
}

static bool is_used(const char *dir)
{
    DIR *d = opendir(dir);
    bool used = false;
    for (struct dirent *e; d && (e = readdir(d));)
        used = used || epoch_of(e->d_name, state_suffix) || strcmp(e->d_name, "training.id") == 0;
    if (d)
        closedir(d);
    return used;
}

int ps_training_mark(const char *dir, const char *id, struct ps_error *err)
{
    if (!is_used(dir))
        return 0;
    char *path = id_file(dir), line[PS_TRAINING_ID + 1];
    int code = path ? 0 : no_memory(err);
    snprintf(line, sizeof line, "%s\n", id);
    if (!code)
        code = ps_write_file_atomic(path, line, strlen(line), err);
    free(path);
    return code;
}

/* Empty if the folder has none. */
static void read_mark(const char *dir, char ret_id[PS_TRAINING_ID])
{
    char *path = id_file(dir), *text = NULL;
    size_t size;
    ret_id[0] = '\0';
    if (path && ps_read_file(path, 256, &text, &size, NULL) == 0)
        snprintf(ret_id, PS_TRAINING_ID, "%.*s", (int)strcspn(text, "\n"), text);
    free(text);
    free(path);
}

/* Whether the pair of this state file is whole and of this training (empty: any); only headers and the
 * weights' bytes are read. */
static int check_pair(const char *path, const char *training, struct ps_error *err)
{
    struct ps_safetensors *state, *weights = NULL;
    char *weights_path = sibling(path, state_suffix, weights_suffix);
    int code = weights_path ? ps_safetensors_read(path, &state, err) : no_memory(err);
    if (!code) {
        const char *digest = ps_safetensors_metadata(state, "weights_sha256"),
                   *own = ps_safetensors_metadata(state, "training");
        if (*training && own && strcmp(own, training) != 0)
            code = ps_fail(err, PS_FAILED_PRECONDITION, "%s is of an earlier training in this folder", path);
        else if (digest)
            code = read_weights(weights_path, digest, &weights, err);
        ps_safetensors_free(weights);
        ps_safetensors_free(state);
    }
    free(weights_path);
    return code;
}

int ps_checkpoint_newest(const char *dir, char **ret_path, void (*skipped)(void *context, const char *why),
                         void *context, struct ps_error *err)
{
    int below = EPOCH_MAX + 1;
    char training[PS_TRAINING_ID];
    read_mark(dir, training);
    for (;;) {
        DIR *d = opendir(dir);
        if (!d && errno == ENOENT) {
            *ret_path = NULL;
            return 0;
        }
        if (!d)
            return ps_fail_errno(err, errno, "cannot open %s", dir);
        int newest = 0;
        for (struct dirent *e; (e = readdir(d));) {
            int epoch = epoch_of(e->d_name, state_suffix);
            if (epoch > newest && epoch < below)
                newest = epoch;
        }
        closedir(d);
        if (!newest) {
            *ret_path = NULL;
            return 0;
        }
        char *path = file_name(dir, newest, state_suffix);
        if (!path)
            return no_memory(err);
        struct ps_error why = {0};
        if (check_pair(path, training, &why) == 0) {
            *ret_path = path;
            return 0;
        }
        if (skipped)
            skipped(context, why.message);
        free(path);
        below = newest;
    }
}

int ps_checkpoint_clean(const char *dir)
{
    DIR *d = opendir(dir);
    int removed = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *const suffixes[] = {state_suffix, weights_suffix, pth_suffix};
        char name[256];
        size_t n = strlen(e->d_name), tail = strlen(".XXXXXX.tmp");
        if (!ends_with(e->d_name, ".tmp") || n <= tail || n >= sizeof name)
            continue;
        memcpy(name, e->d_name, n - tail);
        name[n - tail] = '\0';
        for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++)
            if (epoch_of(name, suffixes[i]) && unlinkat(dirfd(d), e->d_name, 0) == 0)
                removed++;
    }
    if (d)
        closedir(d);
    return removed;
}

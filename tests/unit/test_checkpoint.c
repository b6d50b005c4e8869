/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/checkpoint/checkpoint.h"

#include "services/base/fs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[64];
static struct ps_model *model;
static float *params, *buffers, *moment_1, *moment_2;

static int set_up(void **state)
{
    (void)state;
    struct ps_error err = {0};
    snprintf(root, sizeof root, "/tmp/ps_test_checkpoint.XXXXXX");
    if (!mkdtemp(root) || ps_model_create("resnet18", 2, 10, &model, &err))
        return -1;
    params = calloc(model->param_elements, sizeof *params);
    buffers = calloc(model->buffer_elements, sizeof *buffers);
    moment_1 = calloc(model->param_elements, sizeof *moment_1);
    moment_2 = calloc(model->param_elements, sizeof *moment_2);
    if (!params || !buffers || !moment_1 || !moment_2)
        return -1;
    ps_model_init(model, 3, params, buffers);
    for (size_t i = 0; i < model->param_elements; i++) {
        moment_1[i] = (float)i * 0.5f;
        moment_2[i] = 1.0f / (float)(i + 1);
    }
    for (size_t i = 0; i < model->buffer_elements; i++)
        buffers[i] += (float)i * 0.001f;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    char command[128];
    free(params);
    free(buffers);
    free(moment_1);
    free(moment_2);
    ps_model_free(model);
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static char *folder(const char *name)
{
    struct ps_error err = {0};
    char *dir = ps_path_join(root, name);
    assert_int_equal(ps_make_dirs(dir, 0777, &err), 0);
    return dir;
}

static void save(const char *dir, int epoch, unsigned formats, char **ret_path)
{
    struct ps_tensor_pair pairs[] = {{"data_hash", "abc"}, {"elapsed_s", "1.5"}};
    const struct ps_checkpoint c = {.epoch = epoch,
                                    .step = epoch * 10,
                                    .batches = epoch * 20,
                                    .optimizer = PS_ADAM,
                                    .params = params,
                                    .buffers = buffers,
                                    .moment_1 = moment_1,
                                    .moment_2 = moment_2,
                                    .pairs = pairs,
                                    .pair_count = 2};
    struct ps_error err = {0};
    char *path;
    if (ps_checkpoint_save(dir, model, &c, formats, &path, &err))
        fail_msg("%s", err.message);
    if (ret_path)
        *ret_path = path;
    else
        free(path);
}

static void check(const struct ps_checkpoint *c, int epoch)
{
    assert_false(c->weights_only);
    assert_int_equal(c->epoch, epoch);
    assert_int_equal(c->step, epoch * 10);
    assert_int_equal(c->batches, epoch * 20);
    assert_int_equal(c->optimizer, PS_ADAM);
    assert_memory_equal(c->params, params, model->param_elements * sizeof *params);
    assert_memory_equal(c->buffers, buffers, model->buffer_elements * sizeof *buffers);
    assert_memory_equal(c->moment_1, moment_1, model->param_elements * sizeof *params);
    assert_memory_equal(c->moment_2, moment_2, model->param_elements * sizeof *params);
    assert_string_equal(ps_checkpoint_pair(c, "data_hash"), "abc");
    assert_string_equal(ps_checkpoint_pair(c, "elapsed_s"), "1.5");
    assert_null(ps_checkpoint_pair(c, "none"));
}

static void test_save_and_load(void **state)
{
    (void)state;
    char *dir = folder("plain"), *path, *newest;
    struct ps_error err = {0};
    save(dir, 2, PS_CHECKPOINT_SAFETENSORS, NULL);
    save(dir, 10, PS_CHECKPOINT_SAFETENSORS, &path);
    assert_non_null(strstr(path, "/epoch_10.safetensors"));
    assert_int_equal(ps_checkpoint_newest(dir, &newest, NULL, NULL, &err), 0);
    assert_non_null(strstr(newest, "/epoch_10.state")); /* by number, not by name */
    struct ps_checkpoint *c;
    assert_int_equal(ps_checkpoint_load(newest, model, &c, &err), 0);
    check(c, 10);
    ps_checkpoint_free(c);
    assert_int_equal(ps_checkpoint_load(path, model, &c, &err), 0); /* named by its weights file */
    check(c, 10);
    ps_checkpoint_free(c);
    ps_checkpoint_free(NULL);

    struct ps_safetensors *st; /* what readers find */
    assert_int_equal(ps_safetensors_read(path, &st, &err), 0);
    assert_int_equal(st->count, 122);
    assert_string_equal(st->tensors[0].name, "conv1.0.weight");
    assert_int_equal(st->tensors[0].shape[0], 2);
    const struct ps_tensor *counter = ps_safetensors_find(st, "conv1.1.num_batches_tracked");
    assert_non_null(counter);
    assert_int_equal(counter->type, PS_TENSOR_I64);
    assert_int_equal(counter->ndim, 0);
    int64_t batches;
    memcpy(&batches, counter->data, 8);
    assert_int_equal(batches, 200);
    ps_safetensors_free(st);
    free(newest);
    free(path);
    free(dir);
}

static void test_formats(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        unsigned formats;
        int safetensors, pth;
    } cases[] = {{"both", PS_CHECKPOINT_SAFETENSORS | PS_CHECKPOINT_PTH, 1, 1},
                 {"pth", PS_CHECKPOINT_PTH, 0, 1}};
    for (size_t i = 0; i < 2; i++) {
        char *dir = folder(cases[i].name), *path, *newest;
        struct ps_error err = {0};
        save(dir, 1, cases[i].formats, &path);
        char *a = ps_path_join(dir, "epoch_1.safetensors"), *b = ps_path_join(dir, "epoch_1.pth");
        assert_int_equal(access(a, F_OK) == 0, cases[i].safetensors);
        assert_int_equal(access(b, F_OK) == 0, cases[i].pth);
        assert_string_equal(path, cases[i].safetensors ? a : b);
        struct ps_checkpoint *c;
        assert_int_equal(ps_checkpoint_newest(dir, &newest, NULL, NULL, &err), 0);
        assert_int_equal(ps_checkpoint_load(newest, model, &c, &err), 0);
        check(c, 1);
        ps_checkpoint_free(c);
        assert_int_equal(ps_checkpoint_load(b, model, &c, &err), 0); /* through its .state */
        check(c, 1);
        ps_checkpoint_free(c);
        if (!cases[i].safetensors) {
            unlink(newest);
            assert_int_equal(ps_checkpoint_load(b, model, &c, &err), PS_INVALID_ARGUMENT);
        }
        free(a);
        free(b);
        free(path);
        free(newest);
        free(dir);
    }
}

static void count_skipped(void *context, const char *why)
{
    assert_true(why[0]);
    ++*(int *)context;
}

static void expect_newest(const char *dir, const char *name, int skipped)
{
    struct ps_error err = {0};
    char *newest = NULL;
    int count = 0;
    assert_int_equal(ps_checkpoint_newest(dir, &newest, count_skipped, &count, &err), 0);
    assert_int_equal(count, skipped);
    if (name)
        assert_non_null(strstr(newest, name));
    else
        assert_null(newest);
    free(newest);
}

/* What a writer that was killed leaves at each of its steps. */
static void test_half_written(void **state)
{
    (void)state;
    char *dir = folder("half"), command[512];
    expect_newest("/nowhere/at/all", NULL, 0);
    expect_newest(dir, NULL, 0);
    for (int epoch = 1; epoch <= 4; epoch++)
        save(dir, epoch, PS_CHECKPOINT_SAFETENSORS, NULL);
    expect_newest(dir, "epoch_4.state", 0);
    snprintf(command, sizeof command, "cd %s && rm epoch_4.safetensors",
             dir); /* state first, then the weights */
    assert_int_equal(system(command), 0);
    expect_newest(dir, "epoch_3.state", 1);
    snprintf(command, sizeof command, "cd %s && cp epoch_2.safetensors epoch_3.safetensors",
             dir); /* of another epoch */
    assert_int_equal(system(command), 0);
    expect_newest(dir, "epoch_2.state", 2);
    snprintf(command, sizeof command,
             "cd %s && printf X | dd of=epoch_2.safetensors bs=1 seek=9000 conv=notrunc 2>/dev/null", dir);
    assert_int_equal(system(command), 0);
    expect_newest(dir, "epoch_1.state", 3);
    snprintf(command, sizeof command, "cd %s && truncate -s 100 epoch_4.state", dir);
    assert_int_equal(system(command), 0);
    expect_newest(dir, "epoch_1.state", 3);
    snprintf(command, sizeof command,
             "cd %s && touch epoch_5.state.aB3dE_.tmp epoch_12.safetensors.abcdef.tmp epoch_1.pth.zzzzzz.tmp "
             "other.tmp "
             "epoch_x.state.abcdef.tmp notes.txt",
             dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(ps_checkpoint_clean(dir), 3);
    assert_int_equal(ps_checkpoint_clean(dir), 0);
    snprintf(command, sizeof command,
             "cd %s && test -f other.tmp && test -f epoch_x.state.abcdef.tmp && test -f epoch_1.state", dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(ps_checkpoint_clean("/nowhere/at/all"), 0);
    free(dir);
}

static void test_other_model(void **state)
{
    (void)state;
    char *dir = folder("other"), *path;
    struct ps_error err = {0};
    struct ps_model *wider, *classes;
    struct ps_checkpoint *c = NULL;
    save(dir, 1, PS_CHECKPOINT_SAFETENSORS, &path);
    assert_int_equal(ps_model_create("resnet18", 4, 10, &wider, &err), 0);
    assert_int_equal(ps_model_create("resnet18", 2, 7, &classes, &err), 0);
    assert_int_equal(ps_checkpoint_load(path, wider, &c, &err), PS_FAILED_PRECONDITION);
    assert_non_null(strstr(err.message, "conv1.0.weight"));
    assert_non_null(strstr(err.message, "[2, 3, 3, 3]"));
    assert_non_null(strstr(err.message, "[4, 3, 3, 3]"));
    assert_int_equal(ps_checkpoint_load(path, classes, &c, &err), PS_FAILED_PRECONDITION);
    assert_non_null(strstr(err.message, "dense_layer.weight"));
    assert_null(c);
    ps_model_free(wider);
    ps_model_free(classes);
    free(path);
    free(dir);
}

/* A file that another program wrote: with the prefix, without a state; and ones with a tensor too few or too
 * many. */
static void test_weights_only(void **state)
{
    (void)state;
    char *dir = folder("foreign"), *path, *foreign = ps_path_join(dir, "foreign.safetensors");
    struct ps_error err = {0};
    struct ps_safetensors *st;
    struct ps_checkpoint *c = NULL;
    save(dir, 1, PS_CHECKPOINT_SAFETENSORS, &path);
    assert_int_equal(ps_safetensors_read(path, &st, &err), 0);
    struct ps_tensor *tensors = calloc(st->count + 1, sizeof *tensors);
    assert_non_null(tensors);
    for (size_t i = 0; i < st->count; i++) {
        tensors[i] = st->tensors[i];
        snprintf(tensors[i].name, sizeof tensors[i].name, "module.%.200s", st->tensors[i].name);
    }
    assert_int_equal(ps_safetensors_write(foreign, tensors, st->count, NULL, 0, NULL, &err), 0);
    assert_int_equal(ps_checkpoint_load(foreign, model, &c, &err), 0);
    assert_true(c->weights_only);
    assert_int_equal(c->epoch, 0);
    assert_memory_equal(c->params, params, model->param_elements * sizeof *params);
    assert_memory_equal(c->buffers, buffers, model->buffer_elements * sizeof *buffers);
    ps_checkpoint_free(c);

    assert_int_equal(ps_safetensors_write(foreign, tensors, st->count - 1, NULL, 0, NULL, &err), 0);
    assert_int_equal(ps_checkpoint_load(foreign, model, &c, &err), PS_FAILED_PRECONDITION);
    assert_non_null(strstr(err.message, "dense_layer.bias"));
    tensors[st->count] = tensors[0];
    snprintf(tensors[st->count].name, sizeof tensors[0].name, "one.more");
    assert_int_equal(ps_safetensors_write(foreign, tensors, st->count + 1, NULL, 0, NULL, &err), 0);
    assert_int_equal(ps_checkpoint_load(foreign, model, &c, &err), PS_FAILED_PRECONDITION);
    assert_non_null(strstr(err.message, "one.more"));
    assert_true(ps_checkpoint_load("/nowhere/x.safetensors", model, &c, &err) < 0);
    ps_safetensors_free(st);
    free(tensors);
    free(foreign);
    free(path);
    free(dir);
}

static void test_cannot_write(void **state)
{
    (void)state;
    struct ps_error err = {0};
    char *path = NULL;
    struct ps_checkpoint c = {.epoch = 1, .params = params, .buffers = buffers};
    assert_true(ps_checkpoint_save("/nowhere/at/all", model, &c, PS_CHECKPOINT_SAFETENSORS, &path, &err) < 0);
    assert_null(path);
    c.epoch = 0;
    assert_int_equal(ps_checkpoint_save(root, model, &c, PS_CHECKPOINT_SAFETENSORS, &path, &err),
                     PS_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_save_and_load), cmocka_unit_test(test_formats),
        cmocka_unit_test(test_half_written),  cmocka_unit_test(test_other_model),
        cmocka_unit_test(test_weights_only),  cmocka_unit_test(test_cannot_write),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/model/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct ps_model *make(int width, int classes)
{
    struct ps_model *m = NULL;
    struct ps_error err = {0};
    assert_int_equal(ps_model_create("resnet18", width, classes, &m, &err), 0);
    assert_non_null(m);
    return m;
}

static void sample_sizes(void **state)
{
    (void)state;
    struct ps_model *m = make(64, 10);
    assert_int_equal(m->param_count, 62);
    assert_int_equal(m->param_elements, 11173962);
    assert_int_equal(m->entry_count, 122);
    assert_int_equal(m->buffer_count, 40);
    assert_int_equal(m->buffer_elements, 9600);
    int counters = 0;
    size_t offset = 0;
    for (int i = 0; i < m->entry_count; i++)
        counters += m->entries[i].kind == PS_ENTRY_COUNTER;
    assert_int_equal(counters, 20);
    for (int i = 0; i < m->param_count; i++) {
        assert_int_equal(m->params[i].offset, offset);
        offset += m->params[i].count;
    }
    assert_int_equal(offset, m->param_elements);
    ps_model_free(m);
}

static void sample_names_in_order(void **state)
{
    (void)state;
    struct ps_model *m = make(64, 10);
    static const char *const first[] = {
        "conv1.0.weight",
        "conv1.1.weight",
        "conv1.1.bias",
        "conv1.1.running_mean",
        "conv1.1.running_var",
        "conv1.1.num_batches_tracked",
        "conv2.0.residual_function.0.weight",
        "conv2.0.residual_function.1.weight",
    };
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        assert_string_equal(m->entries[i].name, first[i]);
    assert_string_equal(m->entries[m->entry_count - 2].name, "dense_layer.weight");
    assert_string_equal(m->entries[m->entry_count - 1].name, "dense_layer.bias");
    int shortcuts = 0;
    for (int i = 0; i < m->param_count; i++)
        if (strstr(m->params[i].name, "shortcut.0.weight")) {
            shortcuts++;
            assert_int_equal(m->params[i].shape[2], 1);
        }
    assert_int_equal(shortcuts, 3);
    for (int i = 0; i < m->entry_count; i++)
        if (m->entries[i].kind == PS_ENTRY_PARAM)
            assert_string_equal(m->entries[i].name, m->params[m->entries[i].index].name);
        else if (m->entries[i].kind == PS_ENTRY_BUFFER)
            assert_string_equal(m->entries[i].name, m->buffers[m->entries[i].index].name);
    for (int i = 0; i < m->param_count; i++) /* decay: matrices only */
        assert_int_equal(m->params[i].decay, m->params[i].ndim > 1);
    ps_model_free(m);
}

static void extents(void **state)
{
    (void)state;
    struct ps_model *m = make(4, 10);
    struct ps_error err = {0};
    int *e = calloc((size_t)m->value_count, sizeof *e);
    static const int sizes[][2] = {
        {32, 4}, {24, 3}, {16, 2}, {1, 1}}; /* resolution, pixels before the pooling */
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(ps_model_extents(m, sizes[i][0], e, &err), 0);
        assert_int_equal(e[m->input], sizes[i][0]);
        assert_int_equal(e[m->output], 1);
        for (int k = 0; k < m->op_count; k++)
            if (m->ops[k].kind == PS_OP_AVG_POOL)
                assert_int_equal(e[m->ops[k].in[0]], sizes[i][1]);
    }
    assert_int_equal(ps_model_extents(m, 0, e, &err), PS_INVALID_ARGUMENT);
    ps_model_free(m);

    m = ps_model_new("t", 1, 1, 3);
    assert_true(ps_model_max_pool(m, m->input, 3, 2, 0) > 0);
    assert_int_equal(ps_model_extents(m, 2, e, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "too small"));
    ps_model_free(m);
    free(e);
}

static void bad_arguments(void **state)
{
    (void)state;
    struct ps_error err = {0};
    struct ps_model *m = NULL;
    assert_int_equal(ps_model_create("vgg", 64, 10, &m, &err), PS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "vgg"));
    assert_int_equal(ps_model_create("resnet18", 0, 10, &m, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_model_create("resnet18", 1025, 10, &m, &err), PS_INVALID_ARGUMENT);
    assert_int_equal(ps_model_create("resnet18", 64, 1001, &m, &err), PS_INVALID_ARGUMENT);
    assert_null(m);
    assert_null(ps_model_free(NULL));
    m = ps_model_new("t", 1, 1, 3);
    assert_true(ps_model_conv(m, "c", 7, 8, 3, 1, 1) < 0);                          /* no such value */
    assert_true(ps_model_conv(m, "c", m->input, 8, 3, 0, 1) < 0);                   /* stride */
    assert_true(ps_model_relu(m, ps_model_conv(m, "c", m->input, 0, 3, 1, 1)) < 0); /* passes errors on */
    assert_true(ps_model_add(m, m->input, ps_model_conv(m, "c", m->input, 4, 3, 1, 1)) < 0); /* channels */
    char name[PS_NAME_MAX + 1];
    memset(name, 'n', sizeof name);
    name[PS_NAME_MAX] = 0;
    assert_true(ps_model_conv(m, name, m->input, 4, 3, 1, 1) < 0);
    ps_model_free(m);
}

static void initial_values(void **state)
{
    (void)state;
    struct ps_model *m = make(16, 10);
    float *a = calloc(m->param_elements, sizeof *a), *b = calloc(m->param_elements, sizeof *b);
    float *buf = calloc(m->buffer_elements, sizeof *buf);
    ps_model_init(m, 1, a, buf);
    ps_model_init(m, 1, b, buf);
    assert_memory_equal(a, b, m->param_elements * sizeof *a);
    for (int i = 0; i < m->param_count; i++) {
        const struct ps_param *p = &m->params[i];
        double sum = 0, sum2 = 0, bound = p->fan_in ? 1 / sqrt(p->fan_in) : 0;
        for (size_t k = 0; k < p->count; k++) {
            double x = a[p->offset + k];
            sum += x;
            sum2 += x * x;
            if (p->fan_in)
                assert_true(fabs(x) <= bound * (1 + 1e-6));
            else
                assert_true(x == (strstr(p->name, "weight") ? 1 : 0));
        }
        if (p->fan_in && p->count > 1000) { /* a uniform distribution's mean and variance */
            assert_true(fabs(sum / (double)p->count) < 5 * bound / sqrt(3 * (double)p->count));
            assert_true(fabs(sum2 / (double)p->count / (bound * bound / 3) - 1) < 0.15);
        }
    }
    for (int i = 0; i < m->buffer_count; i++)
        assert_true(buf[m->buffers[i].offset] == (strstr(m->buffers[i].name, "var") ? 1 : 0));
    ps_model_init(m, 2, b, buf);
    assert_memory_not_equal(a, b, m->param_elements * sizeof *a);
    free(a);
    free(b);
    free(buf);
    ps_model_free(m);
}

static void fingerprint(void **state)
{
    (void)state;
    struct ps_model *a = make(8, 10), *b = make(8, 10);
    uint64_t h = ps_model_fingerprint(a);
    assert_true(h == ps_model_fingerprint(b));
    b->ops[3].stride++;
    assert_true(h != ps_model_fingerprint(b));
    b->ops[3].stride--;
    b->params[5].name[0]++;
    assert_true(h != ps_model_fingerprint(b));
    b->params[5].name[0]--;
    b->ops[1].eps *= 2;
    assert_true(h != ps_model_fingerprint(b));
    ps_model_free(b);
    b = make(8, 11);
    assert_true(h != ps_model_fingerprint(b));
    ps_model_free(a);
    ps_model_free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sample_sizes),   cmocka_unit_test(sample_names_in_order),
        cmocka_unit_test(extents),        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(initial_values), cmocka_unit_test(fingerprint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

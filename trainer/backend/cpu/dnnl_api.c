/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cpu/dnnl_api.h"

#include <stdio.h>
#include <string.h>

static int check(dnnl_status_t status, const char *what, struct ps_error *err)
{
    if (status == dnnl_success)
        return 0;
    int code = status == dnnl_out_of_memory   ? PS_RESOURCE_EXHAUSTED
               : status == dnnl_unimplemented ? PS_UNIMPLEMENTED
                                              : PS_INTERNAL;
    return ps_fail(err, code, "oneDNN: %s failed (status %d)", what, (int)status);
}

int ps_dnnl_open(struct ps_dnnl *ret, struct ps_error *err)
{
    struct ps_dnnl d = {0};
    int r = check(dnnl_engine_create(&d.engine, dnnl_cpu, 0), "creating the engine", err);
    if (r == 0)
        r = check(dnnl_stream_create(&d.stream, d.engine, dnnl_stream_default_flags), "creating the stream",
                  err);
    if (r < 0) {
        ps_dnnl_close(&d);
        return r;
    }
    *ret = d;
    return 0;
}

void ps_dnnl_close(struct ps_dnnl *dnnl)
{
    if (dnnl->stream)
        dnnl_stream_destroy(dnnl->stream);
    if (dnnl->engine)
        dnnl_engine_destroy(dnnl->engine);
    *dnnl = (struct ps_dnnl){0};
}

const char *ps_dnnl_version(char out[16])
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(out, 16, "%d.%d.%d", v->major, v->minor, v->patch);
    return out;
}

/* oneDNN's arrays of dimensions are as long as the most that it can take, whatever the tensor. */
static struct ps_dnnl_layout layout(const dnnl_dims_t dims, dnnl_format_tag_t tag)
{
    struct ps_dnnl_layout l;
    memset(&l, 0, sizeof l);
    dnnl_memory_desc_init_by_tag(&l.desc, 4, dims, dnnl_f32, tag);
    return l;
}

struct ps_dnnl_layout ps_dnnl_activations(int n, int c, int extent, int block)
{
    return layout((const dnnl_dims_t){n, c, extent, extent}, block == 16  ? dnnl_nChw16c
                                                             : block == 8 ? dnnl_nChw8c
                                                                          : dnnl_nchw);
}

struct ps_dnnl_layout ps_dnnl_oihw(int out, int in, int kernel)
{
    return layout((const dnnl_dims_t){out, in, kernel, kernel}, dnnl_oihw);
}

struct ps_dnnl_layout ps_dnnl_any_weights(int out, int in, int kernel)
{
    return layout((const dnnl_dims_t){out, in, kernel, kernel}, dnnl_format_tag_any);
}

size_t ps_dnnl_bytes(const struct ps_dnnl_layout *l)
{
    return dnnl_memory_desc_get_size(&l->desc);
}

bool ps_dnnl_same(const struct ps_dnnl_layout *a, const struct ps_dnnl_layout *b)
{
    return dnnl_memory_desc_equal(&a->desc, &b->desc);
}

/* A primitive descriptor of the convolution; the caller destroys it. */
static int conv_describe(struct ps_dnnl *dnnl, enum ps_dnnl_direction direction, const struct ps_dnnl_conv *s,
                         const struct ps_dnnl_layout *source, const struct ps_dnnl_layout *weights,
                         const struct ps_dnnl_layout *destination, dnnl_primitive_desc_t *ret,
                         struct ps_error *err)
{
    const dnnl_dims_t strides = {s->stride, s->stride}, pad = {s->pad, s->pad};
    /* Direct, never Winograd: its rounding is too coarse for the parity that is promised. */
    const dnnl_alg_kind_t direct = dnnl_convolution_direct;
    dnnl_convolution_desc_t desc;
    dnnl_primitive_desc_t forward = NULL;
    dnnl_primitive_attr_t attr = NULL;
    int r = check(dnnl_primitive_attr_create(&attr), "creating attributes", err);
    if (r == 0)
        r = check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad mode",
                  err);
    if (r == 0)
        r = check(dnnl_convolution_forward_desc_init(&desc, dnnl_forward_training, direct, &source->desc,
                                                     &weights->desc, NULL, &destination->desc, strides, pad,
                                                     pad),
                  "describing a convolution", err);
    if (r == 0)
        r = check(dnnl_primitive_desc_create(&forward, &desc, attr, dnnl->engine, NULL),
                  "choosing a convolution", err);
    if (r == 0 && direction == PS_DNNL_FORWARD) {
        *ret = forward;
        forward = NULL;
    } else if (r == 0) {
        if (direction == PS_DNNL_BACKWARD_DATA)
            r = check(dnnl_convolution_backward_data_desc_init(&desc, direct, &source->desc, &weights->desc,
                                                               &destination->desc, strides, pad, pad),
                      "describing a convolution's backward data", err);
        else
            r = check(dnnl_convolution_backward_weights_desc_init(&desc, direct, &source->desc,
                                                                  &weights->desc, NULL, &destination->desc,
                                                                  strides, pad, pad),
                      "describing a convolution's backward weights", err);
        if (r == 0)
            r = check(dnnl_primitive_desc_create(ret, &desc, attr, dnnl->engine, forward),
                      "choosing a convolution's backward pass", err);
    }
    if (forward)
        dnnl_primitive_desc_destroy(forward);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    return r;
}

static struct ps_dnnl_layout query(const_dnnl_primitive_desc_t pd, dnnl_query_t what)
{
    struct ps_dnnl_layout l;
    l.desc = *dnnl_primitive_desc_query_md(pd, what, 0);
    return l;
}

int ps_dnnl_preferred_block(struct ps_dnnl *dnnl)
{
    const struct ps_dnnl_conv s = {16, 64, 32, 64, 32, 3, 1, 1};
    struct ps_dnnl_layout any = layout((const dnnl_dims_t){16, 64, 32, 32}, dnnl_format_tag_any);
    struct ps_dnnl_layout weights = ps_dnnl_any_weights(64, 64, 3);
    struct ps_dnnl_layout block16 = ps_dnnl_activations(16, 64, 32, 16),
                          block8 = ps_dnnl_activations(16, 64, 32, 8);
    dnnl_primitive_desc_t pd;
    if (conv_describe(dnnl, PS_DNNL_FORWARD, &s, &any, &weights, &any, &pd, NULL) == 0) {
        struct ps_dnnl_layout chosen = query(pd, dnnl_query_dst_md);
        dnnl_primitive_desc_destroy(pd);
        if (ps_dnnl_same(&chosen, &block16))
            return 16;
        if (ps_dnnl_same(&chosen, &block8))
            return 8;
    }
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core ? 16 : 8;
}

static int make_primitive(dnnl_primitive_desc_t pd, struct ps_dnnl_call *call, struct ps_error *err)
{
    call->scratchpad =
        dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0));
    int r = check(dnnl_primitive_create(&call->primitive, pd), "creating a primitive", err);
    dnnl_primitive_desc_destroy(pd);
    return r;
}

int ps_dnnl_conv_create(struct ps_dnnl *dnnl, enum ps_dnnl_direction direction,
                        const struct ps_dnnl_conv *shape, const struct ps_dnnl_layout *source,
                        const struct ps_dnnl_layout *weights, const struct ps_dnnl_layout *destination,
                        struct ps_dnnl_call *ret, struct ps_error *err)
{
    dnnl_primitive_desc_t pd;
    int r = conv_describe(dnnl, direction, shape, source, weights, destination, &pd, err);
    if (r < 0)
        return ps_error_prefix(err, "convolution %d -> %d channels, %d x %d pixels, kernel %d, stride %d",
                               shape->in, shape->out, shape->in_extent, shape->in_extent, shape->kernel,
                               shape->stride);
    struct ps_dnnl_call call = {0};
    call.layout[0] = *source;
    call.layout[1] =
        query(pd, direction == PS_DNNL_BACKWARD_WEIGHTS ? dnnl_query_diff_weights_md : dnnl_query_weights_md);
    call.layout[2] = *destination;
    static const int ids[3][3] = {
        [PS_DNNL_FORWARD] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
        [PS_DNNL_BACKWARD_DATA] = {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
        [PS_DNNL_BACKWARD_WEIGHTS] = {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST},
    };
    memcpy(call.id, ids[direction], sizeof ids[direction]);
    r = make_primitive(pd, &call, err);
    if (r == 0)
        *ret = call;
    return r;
}

int ps_dnnl_reorder_create(struct ps_dnnl *dnnl, const struct ps_dnnl_layout *from,
                           const struct ps_dnnl_layout *to, bool add, struct ps_dnnl_call *ret,
                           struct ps_error *err)
{
    dnnl_primitive_attr_t attr = NULL;
    dnnl_post_ops_t post = NULL;
    dnnl_primitive_desc_t pd = NULL;
    struct ps_dnnl_call call = {0};
    int r = check(dnnl_primitive_attr_create(&attr), "creating attributes", err);
    if (r == 0)
        r = check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad mode",
                  err);
    if (r == 0 && add) {
        r = check(dnnl_post_ops_create(&post), "creating post-ops", err);
        if (r == 0)
            r = check(dnnl_post_ops_append_sum(post, 1), "appending a sum", err);
        if (r == 0)
            r = check(dnnl_primitive_attr_set_post_ops(attr, post), "setting post-ops", err);
    }
    if (r == 0)
        r = check(
            dnnl_reorder_primitive_desc_create(&pd, &from->desc, dnnl->engine, &to->desc, dnnl->engine, attr),
            "choosing a reorder", err);
    if (r == 0) {
        call.layout[0] = *from;
        call.layout[2] = *to;
        call.id[0] = DNNL_ARG_FROM;
        call.id[2] = DNNL_ARG_TO;
        r = make_primitive(pd, &call, err);
    }
    if (post)
        dnnl_post_ops_destroy(post);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    if (r == 0)
        *ret = call;
    return r;
}

int ps_dnnl_bind(struct ps_dnnl *dnnl, struct ps_dnnl_call *call, void *source, void *weights,
                 void *destination, void *scratchpad, struct ps_error *err)
{
    void *const pointers[3] = {source, weights, destination};
    for (int i = 0; i < 3; i++) {
        if (!pointers[i])
            continue;
        int r = check(
            dnnl_memory_create(&call->memory[call->count], &call->layout[i].desc, dnnl->engine, pointers[i]),
            "creating a memory object", err);
        if (r < 0)
            return r;
        call->id[call->count++] = call->id[i];
    }
    if (call->scratchpad) {
        const dnnl_dims_t bytes = {(dnnl_dim_t)call->scratchpad};
        dnnl_memory_desc_t desc;
        dnnl_memory_desc_init_by_tag(&desc, 1, bytes, dnnl_u8, dnnl_a);
        int r = check(dnnl_memory_create(&call->memory[call->count], &desc, dnnl->engine, scratchpad),
                      "creating a scratchpad", err);
        if (r < 0)
            return r;
        call->id[call->count++] = DNNL_ARG_SCRATCHPAD;
    }
    return 0;
}

int ps_dnnl_run(struct ps_dnnl *dnnl, const struct ps_dnnl_call *call, struct ps_error *err)
{
    dnnl_exec_arg_t args[4];
    for (int i = 0; i < call->count; i++)
        args[i] = (dnnl_exec_arg_t){.arg = call->id[i], .memory = call->memory[i]};
    return check(dnnl_primitive_execute(call->primitive, dnnl->stream, call->count, args), "a primitive",
                 err);
}

void ps_dnnl_call_done(struct ps_dnnl_call *call)
{
    for (int i = 0; i < call->count; i++)
        dnnl_memory_destroy(call->memory[i]);
    if (call->primitive)
        dnnl_primitive_destroy(call->primitive);
    *call = (struct ps_dnnl_call){0};
}

const char *ps_dnnl_call_name(const struct ps_dnnl_call *call)
{
    const_dnnl_primitive_desc_t pd;
    const char *name = NULL;
    if (!call->primitive || dnnl_primitive_get_primitive_desc(call->primitive, &pd) != dnnl_success ||
        dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name) != dnnl_success)
        return "none";
    return name;
}

int ps_dnnl_sgemm(bool ta, bool tb, int m, int n, int k, const float *a, int lda, const float *b, int ldb,
                  float beta, float *c, int ldc, struct ps_error *err)
{
    return check(dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1, a, lda, b, ldb, beta, c, ldc),
                 "sgemm", err);
}

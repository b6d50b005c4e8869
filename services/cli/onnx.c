/* SPDX-License-Identifier: Apache-2.0
 * Field numbers: onnx/onnx.proto of ONNX 1.6 (IR version 6, opset 11). */
#include "services/cli/onnx.h"

#include "services/cli/wire.h"
#include "trainer/model/model.h"

#include "paramsync_version.h"

#include <stdio.h>
#include <string.h>

enum { onnx_max = 1 << 30, node_max = 1 << 16 };
enum { model_ir = 1, model_producer = 2, model_version = 3, model_graph = 7, model_doc = 6, model_opset = 8 };
enum { graph_node = 1, graph_name = 2, graph_initializer = 5, graph_input = 11, graph_output = 12 };
enum { node_input = 1, node_output = 2, node_name = 3, node_type = 4, node_attribute = 5 };
enum { attribute_name = 1, attribute_f = 2, attribute_i = 3, attribute_ints = 8, attribute_type = 20 };
enum { kind_float = 1, kind_int = 2, kind_ints = 7, tensor_float32 = 1 };
enum { tensor_dims = 1, tensor_type = 2, tensor_name = 8, tensor_raw = 9 };

struct onnx {
    const struct ps_model *model;
    struct ps_buf graph, node;
};

/* ---- which model ---- */

static const struct ps_tensor *fits(const struct ps_safetensors *weights, const char *name, const int *shape,
                                    int ndim)
{
    const struct ps_tensor *t = ps_safetensors_find(weights, name);
    if (!t || t->type != PS_TENSOR_F32 || t->ndim != ndim)
        return NULL;
    for (int d = 0; d < ndim; d++)
        if (t->shape[d] != (size_t)shape[d])
            return NULL;
    return t;
}

static bool has_all(const struct ps_model *model, const struct ps_safetensors *weights)
{
    for (int i = 0; i < model->param_count; i++)
        if (!fits(weights, model->params[i].name, model->params[i].shape, model->params[i].ndim))
            return false;
    for (int i = 0; i < model->buffer_count; i++) {
        const int count = (int)model->buffers[i].count;
        if (!fits(weights, model->buffers[i].name, &count, 1))
            return false;
    }
    return true;
}

static int find_model(const struct ps_safetensors *weights, const char *name, struct ps_model **ret,
                      struct ps_error *err)
{
    static const char *const names[] = {"resnet18", "resnet34", "resnet50"};
    const struct ps_tensor *stem = ps_safetensors_find(weights, "conv1.0.weight");
    const struct ps_tensor *head = ps_safetensors_find(weights, "dense_layer.weight");
    size_t width = stem && stem->ndim == 4 ? stem->shape[0] : 0,
           classes = head && head->ndim == 2 ? head->shape[0] : 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && width && classes && width < 2048 && classes < 2048;
         i++) {
        struct ps_model *model = NULL;
        if (!ps_model_create(names[i], (int)width, (int)classes, &model, NULL) && has_all(model, weights)) {
            *ret = model;
            return 0;
        }
        ps_model_free(model);
    }
    return ps_fail(err, PS_INVALID_ARGUMENT,
                   "%s: not the float32 weights of a resnet18, resnet34 or resnet50 of ours", name);
}

/* ---- the graph ---- */

static void value_name(int id, char *out, size_t size, const struct ps_model *model)
{
    if (id == model->input)
        snprintf(out, size, "images");
    else if (id == model->output)
        snprintf(out, size, "logits");
    else
        snprintf(out, size, "v%d", id);
}

static void put_value(struct onnx *x, unsigned field, int id)
{
    char name[24];
    value_name(id, name, sizeof name, x->model);
    cli_wire_text(&x->node, field, name);
}

static void put_attribute(struct onnx *x, const char *name, int kind, const int *ints, int count, float f)
{
    struct ps_buf a = PS_BUF_INIT(1 << 10);
    cli_wire_text(&a, attribute_name, name);
    if (kind == kind_float)
        cli_wire_float(&a, attribute_f, f);
    else if (kind == kind_int)
        cli_wire_int(&a, attribute_i, (uint64_t)ints[0]);
    for (int i = 0; i < count && kind == kind_ints; i++)
        cli_wire_int(&a, attribute_ints, (uint64_t)ints[i]);
    cli_wire_int(&a, attribute_type, (uint64_t)kind);
    cli_wire_message(&x->node, node_attribute, &a);
    ps_buf_done(&a);
}

static void put_window(struct onnx *x, const struct ps_op *op)
{
    const int kernel[] = {op->kernel, op->kernel}, stride[] = {op->stride, op->stride};
    const int pads[] = {op->pad, op->pad, op->pad, op->pad};
    put_attribute(x, "kernel_shape", kind_ints, kernel, 2, 0);
    put_attribute(x, "strides", kind_ints, stride, 2, 0);
    put_attribute(x, "pads", kind_ints, pads, 4, 0);
}

static void end_node(struct onnx *x, const char *type)
{
    cli_wire_text(&x->node, node_type, type);
    cli_wire_message(&x->graph, graph_node, &x->node);
}

static void put_dense(struct onnx *x, const struct ps_op *op)
{
    const int one = 1;
    char flat[32];
    snprintf(flat, sizeof flat, "flat%d", op->out);
    put_value(x, node_input, op->in[0]);
    cli_wire_text(&x->node, node_output, flat);
    put_attribute(x, "axis", kind_int, &one, 1, 0);
    end_node(x, "Flatten");
    cli_wire_text(&x->node, node_input, flat);
    cli_wire_text(&x->node, node_input, x->model->params[op->param[0]].name);
    cli_wire_text(&x->node, node_input, x->model->params[op->param[1]].name);
    put_value(x, node_output, op->out);
    put_attribute(x, "transB", kind_int, &one, 1, 0);
    end_node(x, "Gemm");
}

static void put_op(struct onnx *x, const struct ps_op *op)
{
    static const char *const types[] = {
        [PS_OP_CONV] = "Conv", [PS_OP_BN] = "BatchNormalization", [PS_OP_RELU] = "Relu",
        [PS_OP_ADD] = "Add",   [PS_OP_MAX_POOL] = "MaxPool",      [PS_OP_AVG_POOL] = "GlobalAveragePool"};
    if (op->kind == PS_OP_DENSE) {
        put_dense(x, op);
        return;
    }
    put_value(x, node_input, op->in[0]);
    if (op->kind == PS_OP_ADD)
        put_value(x, node_input, op->in[1]);
    for (int i = 0; i < 2; i++)
        if ((op->kind == PS_OP_CONV || op->kind == PS_OP_BN) && op->param[i] != PS_NONE)
            cli_wire_text(&x->node, node_input, x->model->params[op->param[i]].name);
    for (int i = 0; i < 2; i++)
        if (op->kind == PS_OP_BN)
            cli_wire_text(&x->node, node_input, x->model->buffers[op->buffer[i]].name);
    put_value(x, node_output, op->out);
    if (op->kind == PS_OP_CONV || op->kind == PS_OP_MAX_POOL)
        put_window(x, op);
    if (op->kind == PS_OP_BN)
        put_attribute(x, "epsilon", kind_float, NULL, 0, op->eps);
    end_node(x, types[op->kind]);
}

static void put_weights(struct onnx *x, const struct ps_safetensors *weights, const char *name)
{
    const struct ps_tensor *t = ps_safetensors_find(weights, name);
    struct ps_buf out = PS_BUF_INIT(onnx_max);
    for (int d = 0; d < t->ndim; d++)
        cli_wire_int(&out, tensor_dims, t->shape[d]);
    cli_wire_int(&out, tensor_type, tensor_float32);
    cli_wire_text(&out, tensor_name, name);
    cli_wire_bytes(&out, tensor_raw, t->data, t->bytes); /* little-endian in both */
    cli_wire_message(&x->graph, graph_initializer, &out);
    ps_buf_done(&out);
}

/* size 0: any, called label. */
static void put_dim(struct ps_buf *shape, int size, const char *label)
{
    struct ps_buf dim = PS_BUF_INIT(64);
    if (size)
        cli_wire_int(&dim, 1, (uint64_t)size);
    else
        cli_wire_text(&dim, 2, label);
    cli_wire_message(shape, 1, &dim);
    ps_buf_done(&dim);
}

static void put_face(struct onnx *x, unsigned field, const char *name, int channels, bool image)
{
    struct ps_buf info = PS_BUF_INIT(1 << 10), type = PS_BUF_INIT(1 << 10), tensor = PS_BUF_INIT(1 << 10),
                  shape = PS_BUF_INIT(1 << 10);
    put_dim(&shape, 0, "batch");
    put_dim(&shape, channels, NULL);
    if (image) {
        put_dim(&shape, 0, "height");
        put_dim(&shape, 0, "width");
    }
    cli_wire_int(&tensor, 1, tensor_float32);
    cli_wire_message(&tensor, 2, &shape);
    cli_wire_message(&type, 1, &tensor);
    cli_wire_text(&info, 1, name);
    cli_wire_message(&info, 2, &type);
    cli_wire_message(&x->graph, field, &info);
    ps_buf_done(&info);
    ps_buf_done(&type);
    ps_buf_done(&tensor);
    ps_buf_done(&shape);
}

int cli_onnx_write(const struct ps_safetensors *weights, const char *name, const char *about,
                   struct ps_buf *out, struct ps_error *err)
{
    struct onnx x = {.graph = PS_BUF_INIT(onnx_max), .node = PS_BUF_INIT(node_max)};
    struct ps_buf opset = PS_BUF_INIT(64);
    struct ps_model *model = NULL;
    int code = find_model(weights, name, &model, err);
    if (code)
        return code;
    x.model = model;
    for (int i = 0; i < model->op_count; i++)
        put_op(&x, &model->ops[i]);
    cli_wire_text(&x.graph, graph_name, model->name);
    for (int i = 0; i < model->param_count; i++)
        put_weights(&x, weights, model->params[i].name);
    for (int i = 0; i < model->buffer_count; i++)
        put_weights(&x, weights, model->buffers[i].name);
    put_face(&x, graph_input, "images", model->values[model->input].channels, true);
    put_face(&x, graph_output, "logits", model->classes, false);
    cli_wire_int(out, model_ir, 6);
    cli_wire_text(out, model_producer, "paramsync");
    cli_wire_text(out, model_version, PARAMSYNC_VERSION);
    cli_wire_text(out, model_doc, about);
    cli_wire_message(out, model_graph, &x.graph);
    cli_wire_text(&opset, 1, "");
    cli_wire_int(&opset, 2, 11);
    cli_wire_message(out, model_opset, &opset);
    if (out->failed || x.node.failed)
        code = ps_fail(err, PS_RESOURCE_EXHAUSTED, "%s: too large for ONNX, or out of memory", name);
    ps_buf_done(&opset);
    ps_buf_done(&x.node);
    ps_buf_done(&x.graph);
    ps_model_free(model);
    return code;
}

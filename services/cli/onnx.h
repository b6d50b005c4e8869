/* SPDX-License-Identifier: Apache-2.0
 * Weights of one of our models as an ONNX file (opset 11, https://github.com/onnx/onnx/blob/main/docs/IR.md):
 * input "images" [batch, 3, height, width], output "logits" [batch, classes], evaluation mode. */
#ifndef PARAMSYNC_CLI_ONNX_H
#define PARAMSYNC_CLI_ONNX_H

#include "services/base/buf.h"
#include "trainer/checkpoint/safetensors.h"

/* Finds the model whose parameters these are (resnet18, resnet34, resnet50) and writes it. about goes into
 * the file's description. PS_INVALID_ARGUMENT: weights of no model we know, or not float32. */
int cli_onnx_write(const struct ps_safetensors *weights, const char *name, const char *about,
                   struct ps_buf *out, struct ps_error *err);

#endif

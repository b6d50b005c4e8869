/* SPDX-License-Identifier: Apache-2.0
 * What `paramsync export` writes for other programs. Files are whole or absent. */
#ifndef PARAMSYNC_CLI_EXPORT_FILES_H
#define PARAMSYNC_CLI_EXPORT_FILES_H

#include "services/cli/cli.h"

/* One event file in the folder dir, which is made: epochs as epoch/accuracy and so on (step: the epoch), each
 * step series under its name, other ranks' as NAME/rankN. */
int cli_export_events(struct paramsync_client *client, const struct paramsync_run *run,
                      const struct paramsync_metrics *metrics, uint32_t max_points, const char *dir,
                      struct ps_error *err);

/* A checkpoint of the sidecar, or a .safetensors file, as format "pth" or "onnx". */
int cli_export_checkpoint(struct paramsync_client *client, const char *run,
                          const struct paramsync_selector *selector, const char *format, const char *output,
                          struct ps_error *err);
bool cli_is_weights_file(const char *word);
int cli_export_weights_file(const char *file, const char *format, const char *output, struct ps_error *err);

#endif

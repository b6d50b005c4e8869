/* SPDX-License-Identifier: Apache-2.0
 * Checkpoints at the end of an epoch, in a folder:
 *     epoch_{n}.state         what resuming needs: optimizer moments, counters and settings, and the digest
 * of epoch_{n}.safetensors   the weights under the names of the sample's state_dict (and epoch_{n}.pth, or
 * only it) The state is written first and names the weights file's SHA-256, each file appears whole or not at
 * all: so a pair is whole if and only if the digest agrees, wherever the writer died. With pth only, the
 * state holds the weights too, because a .pth is never read here. */
#ifndef PARAMSYNC_CHECKPOINT_CHECKPOINT_H
#define PARAMSYNC_CHECKPOINT_CHECKPOINT_H

#include "services/base/error.h"
#include "trainer/backend/backend.h"
#include "trainer/checkpoint/safetensors.h"
#include "trainer/model/model.h"

#include <stdbool.h>
#include <stdint.h>

enum { PS_CHECKPOINT_SAFETENSORS = 1, PS_CHECKPOINT_PTH = 2 }; /* a set */

struct ps_checkpoint {
    int epoch;       /* the last one that is finished */
    int64_t step;    /* optimizer steps so far */
    int64_t batches; /* training forwards so far: BN's num_batches_tracked */
    enum ps_optimizer_kind optimizer;
    /* Flat vectors in the model's order. moment_1 and moment_2 may be NULL when saving (an optimizer without
     * them); after loading they are NULL if the checkpoint has none. */
    float *params, *buffers, *moment_1, *moment_2;
    /* Settings and counters beside these, as text: data hash, threads, elapsed_s, ... */
    struct ps_tensor_pair *pairs;
    size_t pair_count;
    bool weights_only; /* after loading: a weights file without its state; epoch and step are 0 */
};

/* Writes the checkpoint into dir (which exists). ret_path (free() it) is the weights file for readers: the
 * .safetensors, or with pth only the .pth. On failure no file with a final name is incomplete. */
int ps_checkpoint_save(const char *dir, const struct ps_model *model, const struct ps_checkpoint *checkpoint,
                       unsigned formats, char **ret_path, struct ps_error *err);

/* path: a .state or .safetensors file of a pair, or a lone weights file (then weights_only). Names may carry
 * the prefix "module.". One clear line names the tensor that does not fit the model. Free with
 * ps_checkpoint_free, which frees the vectors and pairs. */
int ps_checkpoint_load(const char *path, const struct ps_model *model, struct ps_checkpoint **ret,
                       struct ps_error *err);
struct ps_checkpoint *ps_checkpoint_free(struct ps_checkpoint *checkpoint); /* takes NULL, returns NULL */
const char *ps_checkpoint_pair(const struct ps_checkpoint *checkpoint,
                               const char *key); /* NULL if not there */

/* A training's name, kept in its states as the pair "training". A folder that is used again holds the states
 * of two trainings until the new one has replaced them: the file training.id then names the new one, whose
 * states alone are gone on with. */
enum { PS_TRAINING_ID = 33 };
int ps_training_new(char ret_id[PS_TRAINING_ID], struct ps_error *err); /* 32 random hexadecimal digits */
/* Makes this the folder's training, durably; a folder without states or a name has no need of one. */
int ps_training_mark(const char *dir, const char *id, struct ps_error *err);

/* The newest whole pair of a folder: its .state file (free() it), or NULL if there is none (also if there is
 * no such folder). Pairs that are not whole, or of another training than the folder's, are passed over and
 * told to skipped (may be NULL). */
int ps_checkpoint_newest(const char *dir, char **ret_path, void (*skipped)(void *context, const char *why),
                         void *context, struct ps_error *err);

/* Removes temporaries (epoch_{n}.*.tmp) that a killed writer left. Returns how many. */
int ps_checkpoint_clean(const char *dir);

#endif

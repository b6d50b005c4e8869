/* SPDX-License-Identifier: Apache-2.0
 * The domain layer under both faces, gRPC and HTTP: checks what comes from outside, keeps the rules that need
 * more than the store (liveness, blobs), and hands the rest through. Readers call the store itself.
 * Thread-safe. */
#ifndef PARAMSYNC_SIDECAR_SERVICE_H
#define PARAMSYNC_SIDECAR_SERVICE_H

#include "db/store.h"
#include "services/base/clock.h"
#include "services/sidecar/access.h"
#include "services/sidecar/blobs.h"
#include "services/sidecar/hub.h"
#include "services/sidecar/limits.h"
#include "services/sidecar/rendezvous.h"

#include <pthread.h>
#include <stdatomic.h>

struct pulled;
struct ps_live; /* liveness: when each live run was last heard of */

struct ps_service_config {
    const char *data_dir;
    const char *token;            /* the tokens, as ps_access_load takes them; NULL: open. Copied */
    const char *token_source;     /* names them in messages; NULL: "PARAMSYNC_TOKEN" */
    const struct ps_clock *clock; /* NULL: the monotonic one */
    double lost_after_s;          /* a running run is lost after this long without a sign of life; 0: 20 */
    /* Checkpoints of each run and format that stay when a new one comes: the last so many and the best so
     * many; the last and the best always do. Both 0: all. */
    uint32_t keep_last, keep_best;
    double roll_up_after_s; /* step points of runs that ended so long ago are thinned out; 0: never */
    double peer_calls_per_s, peer_bytes_per_s; /* of one address; 0: no bound */
    const char *register_root;    /* folder beneath which checkpoints may be registered; NULL: none may */
    double abandoned_after_s;     /* a created run that never reported is lost after this long; 0: 600 */
    struct ps_store_config store; /* dir, the callbacks and their context are filled in here */
};

struct ps_service {
    struct ps_store *store;
    struct ps_blobs *blobs;
    struct ps_hub *hub;
    struct ps_limits *limits;
    struct ps_meetings *meetings; /* the Rendezvous service's */
    const struct ps_clock *clock;
    struct ps_live *live;
    pthread_mutex_t blobs_lock; /* a blob's file and its row in the catalogue appear and go together */
    struct ps_access *access;   /* tokens and their roles */
    double lost_after_s, abandoned_after_s;
    uint32_t keep_last, keep_best;
    double roll_up_after_s;
    pthread_mutex_t pulls_lock; /* guards pulls */
    struct pulled *pulls;
    char *register_root;  /* without symbolic links; NULL: none */
    int register_fd;      /* it, opened */
    int64_t started_ns;   /* wall clock */
    atomic_bool draining; /* set before the servers stop; readiness then fails */
};

int ps_service_open(const struct ps_service_config *config, struct ps_service **ret_service,
                    struct ps_error *err);
struct ps_service *ps_service_free(struct ps_service *service); /* takes NULL, returns NULL */

/* 0 when requests can be served: not draining, the store's last write was good. For /readyz and gRPC health.
 */
int ps_service_ready(struct ps_service *service, struct ps_error *err);

/* Writing, with every field checked; messages name the field. Parameters and results as in db/store.h. */
int ps_service_create_run(struct ps_service *service, const struct ps_new_run *request,
                          struct ps_run *ret_run, bool *ret_resumed, struct ps_error *err);
int ps_service_update_run(struct ps_service *service, const char *run, const char *notes, bool set_tags,
                          const char *const *tags, size_t tag_count, struct ps_run *ret_run,
                          struct ps_error *err);
int ps_service_finish_run(struct ps_service *service, const char *run, uint32_t attempt, int state,
                          const char *reason, double elapsed_s, struct ps_run *ret_run, struct ps_error *err);
/* Also removes the files that nobody else refers to; *ret_bytes is what they held. */
int ps_service_delete_run(struct ps_service *service, const char *run, uint64_t *ret_bytes,
                          struct ps_error *err);
int ps_service_heartbeat(struct ps_service *service, const char *run, const struct ps_heartbeat *beat,
                         int *ret_state, struct ps_error *err);
int ps_service_report_epoch(struct ps_service *service, const char *run, const struct ps_epoch *epoch,
                            bool *ret_replaced, struct ps_error *err);
int ps_service_append_steps(struct ps_service *service, const char *run, uint32_t rank, uint32_t attempt,
                            uint64_t seq, const struct ps_point *points, size_t count, uint32_t *ret_attempt,
                            struct ps_error *err);
int ps_service_delete_checkpoint(struct ps_service *service, const char *run, const char *sha256,
                                 uint64_t *ret_bytes, struct ps_error *err);

/* A checkpoint being received: begin checks the header and the run, data takes chunks in order from offset 0,
 * commit makes it visible. */
struct ps_upload;
int ps_upload_begin(struct ps_service *service, const char *run, const struct ps_new_checkpoint *header,
                    struct ps_upload **ret_upload, struct ps_error *err);
/* Whether the content is there already, whole: commit then needs none of the data. Reads it to be sure. */
bool ps_upload_is_known(struct ps_upload *upload);
/* INVALID_ARGUMENT for a wrong offset or too much; DATA_LOSS for a wrong crc32c. */
int ps_upload_data(struct ps_upload *upload, uint64_t offset, const void *data, size_t size, uint32_t crc32c,
                   struct ps_error *err);
/* Then lets go of checkpoints by keep_last and keep_best; of .state files the newest two stay. */
int ps_upload_commit(struct ps_upload *upload, struct ps_checkpoint *ret_checkpoint, struct ps_error *err);
struct ps_upload *ps_upload_free(struct ps_upload *upload); /* takes NULL, returns NULL */

/* Notes that a pull of this content begins (1) or ends (-1): retention leaves it alone meanwhile. */
void ps_service_pulling(struct ps_service *service, const char *sha256, int change);

/* A file that lies beneath the register root, by reference; it is read once, for its digest. header->filename
 * and format NULL or empty: from the path; sha256 NULL or empty: whatever it holds, size is ignored. */
int ps_service_register(struct ps_service *service, const char *run, const char *path,
                        const struct ps_new_checkpoint *header, struct ps_checkpoint *ret_checkpoint,
                        struct ps_error *err);

/* A checkpoint's content, to be read with pread (close() it). verify: a registered file, which others can
 * change, is read and its digest compared before; callers that compare what they send can do without. */
int ps_service_read_blob(struct ps_service *service, const char *sha256, uint64_t size, bool verify,
                         int *ret_fd, struct ps_error *err);

/* One round of the janitor: marks silent runs lost. Called every few seconds; tests call it with their own
 * clock. */
int ps_service_sweep(struct ps_service *service, struct ps_error *err);
/* Rolls up one run that is due; *ret_more: there was one. The janitor's, in its idle time. */
int ps_service_roll_up(struct ps_service *service, bool *ret_more, struct ps_error *err);

#endif

/* SPDX-License-Identifier: Apache-2.0
 * A closed reader of Python pickles: it builds plain values (numbers, strings, lists, tuples, dictionaries,
 * uint8 arrays) and executes nothing. The only names it follows are those with which numpy writes an array
 * (_reconstruct, ndarray, dtype, _frombuffer) and Python 3 a byte string under protocol 2 (_codecs.encode);
 * any other is refused, and the message names it. Opcodes of protocols 2 to 5 as pickletools documents them.
 */
#ifndef PARAMSYNC_DATA_PICKLE_H
#define PARAMSYNC_DATA_PICKLE_H

#include "services/base/error.h"

#include <stddef.h>
#include <stdint.h>

enum ps_pickle_type {
    PS_PICKLE_NONE,
    PS_PICKLE_BOOL,
    PS_PICKLE_INT,
    PS_PICKLE_FLOAT,
    PS_PICKLE_TEXT,  /* unicode, as UTF-8 */
    PS_PICKLE_BYTES, /* bytes, or Python 2's str */
    PS_PICKLE_LIST,
    PS_PICKLE_TUPLE,
    PS_PICKLE_DICT,  /* items: key, value, key, value, ... */
    PS_PICKLE_ARRAY, /* uint8, C order */
    PS_PICKLE_NAME,  /* a permitted global; never inside a result that matters */
    PS_PICKLE_DTYPE,
};

struct ps_pickle; /* the parsed file; points into the caller's bytes */

struct ps_pickle_value {
    enum ps_pickle_type type;
    int name;            /* PS_PICKLE_NAME: which */
    int64_t integer;     /* INT, BOOL */
    double number;       /* FLOAT */
    const uint8_t *data; /* TEXT, BYTES, ARRAY: not NUL-terminated */
    size_t size;         /* bytes of data */
    uint32_t *items;     /* LIST, TUPLE, DICT: ids of values */
    size_t count, capacity;
    size_t shape[2]; /* ARRAY; shape[1] is 1 for one dimension */
    int ndim;        /* ARRAY; 0: not filled yet */
    uint8_t *owned;  /* freed with the file */
};

/* Reads one pickle from data (which must stay). name is for messages. */
int ps_pickle_read(const uint8_t *data, size_t size, const char *name, struct ps_pickle **ret,
                   struct ps_error *err);
struct ps_pickle *ps_pickle_free(struct ps_pickle *pickle); /* takes NULL, returns NULL */

uint32_t ps_pickle_root(const struct ps_pickle *pickle);
const struct ps_pickle_value *ps_pickle_at(const struct ps_pickle *pickle, uint32_t id);
/* The value under a key (text or bytes) of a dictionary, or NULL; of several equal keys, the last. */
const struct ps_pickle_value *ps_pickle_find(const struct ps_pickle *pickle,
                                             const struct ps_pickle_value *dict, const char *key);

#endif

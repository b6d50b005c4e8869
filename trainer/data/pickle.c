/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/data/pickle.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_VALUES = 4 << 20, /* a one-byte opcode makes a value of some 120 bytes: this bounds the memory */
    MAX_MEMO = 16 << 20,
    NO_VALUE = -1,
};

enum permitted { RECONSTRUCT, NDARRAY, DTYPE, FROM_BUFFER, ENCODE };
static const struct {
    const char *module, *name;
    enum permitted what;
} permitted_names[] = {
    {"numpy.core.multiarray", "_reconstruct", RECONSTRUCT},
    {"numpy._core.multiarray", "_reconstruct", RECONSTRUCT},
    {"numpy.core.numeric", "_frombuffer", FROM_BUFFER},
    {"numpy._core.numeric", "_frombuffer", FROM_BUFFER},
    {"numpy", "ndarray", NDARRAY},
    {"numpy", "dtype", DTYPE},
    {"_codecs", "encode", ENCODE},
};

/* Values live in blocks that never move, so that pointers to them stay good while more are made. */
enum { BLOCK = 4096, BLOCKS = MAX_VALUES / BLOCK };

struct ids {
    uint32_t *items;
    size_t count, capacity;
};

struct ps_pickle {
    const uint8_t *data, *end, *at;
    const char *name;
    struct ps_error *err;
    struct ps_pickle_value *blocks[BLOCKS];
    size_t values;
    struct ids stack, marks; /* marks: heights of the stack */
    int64_t *memo;           /* value ids, NO_VALUE */
    size_t memo_size, memo_next;
    uint32_t root;
};

const struct ps_pickle_value *ps_pickle_at(const struct ps_pickle *p, uint32_t id)
{
    return &p->blocks[id / BLOCK][id % BLOCK];
}

static struct ps_pickle_value *value(struct ps_pickle *p, uint32_t id)
{
    return &p->blocks[id / BLOCK][id % BLOCK];
}

uint32_t ps_pickle_root(const struct ps_pickle *p)
{
    return p->root;
}

static int no_memory(struct ps_pickle *p)
{
    return ps_fail(p->err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", p->name);
}

static int broken(struct ps_pickle *p, const char *what)
{
    return ps_fail(p->err, PS_INVALID_ARGUMENT, "%s, byte %zu: %s: not a whole pickle of a CIFAR-10 batch",
                   p->name, (size_t)(p->at - p->data), what);
}

static int ids_push(struct ps_pickle *p, struct ids *ids, uint32_t id)
{
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity ? 2 * ids->capacity : 64;
        uint32_t *more = realloc(ids->items, capacity * sizeof *more);
        if (!more)
            return no_memory(p);
        ids->items = more;
        ids->capacity = capacity;
    }
    ids->items[ids->count++] = id;
    return 0;
}

/* Makes a value and puts it on the stack. */
static struct ps_pickle_value *push_new(struct ps_pickle *p, enum ps_pickle_type type)
{
    if (p->values == MAX_VALUES) {
        ps_fail(p->err, PS_RESOURCE_EXHAUSTED, "%s holds more than %d values: not a CIFAR-10 batch", p->name,
                MAX_VALUES);
        return NULL;
    }
    uint32_t id = (uint32_t)p->values;
    if (id % BLOCK == 0) {
        p->blocks[id / BLOCK] = calloc(BLOCK, sizeof **p->blocks);
        if (!p->blocks[id / BLOCK]) {
            no_memory(p);
            return NULL;
        }
    }
    p->values++;
    if (ids_push(p, &p->stack, id))
        return NULL;
    struct ps_pickle_value *v = value(p, id);
    v->type = type;
    return v;
}

/* The stack's floor: what lies below the innermost mark is out of reach but for the opcodes that close it. */
static size_t floor_of(const struct ps_pickle *p)
{
    return p->marks.count ? p->marks.items[p->marks.count - 1] : 0;
}

static int pop(struct ps_pickle *p, uint32_t *ret)
{
    if (p->stack.count <= floor_of(p))
        return broken(p, "a value is missing on the stack");
    *ret = p->stack.items[--p->stack.count];
    return 0;
}

/* Bytes of the input, or NULL past its end. */
static const uint8_t *take(struct ps_pickle *p, uint64_t size)
{
    if ((uint64_t)(p->end - p->at) < size) {
        ps_fail(p->err, PS_INVALID_ARGUMENT,
                "%s is truncated: %llu bytes are announced at byte %zu, %zu are left", p->name,
                (unsigned long long)size, (size_t)(p->at - p->data), (size_t)(p->end - p->at));
        return NULL;
    }
    const uint8_t *at = p->at;
    p->at += size;
    return at;
}

static int take_number(struct ps_pickle *p, int bytes, uint64_t *ret)
{
    const uint8_t *at = take(p, (uint64_t)bytes);
    if (!at)
        return p->err->code;
    uint64_t n = 0;
    for (int i = 0; i < bytes; i++)
        n |= (uint64_t)at[i] << (8 * i);
    *ret = n;
    return 0;
}

static int push_string(struct ps_pickle *p, enum ps_pickle_type type, int length_bytes)
{
    uint64_t size = 0;
    int code = take_number(p, length_bytes, &size);
    if (code)
        return code;
    const uint8_t *at = take(p, size);
    if (!at)
        return p->err->code;
    struct ps_pickle_value *v = push_new(p, type);
    if (!v)
        return p->err->code;
    v->data = at;
    v->size = (size_t)size;
    return 0;
}

static int push_int(struct ps_pickle *p, enum ps_pickle_type type, int64_t n)
{
    struct ps_pickle_value *v = push_new(p, type);
    if (!v)
        return p->err->code;
    v->integer = n;
    return 0;
}

static int memo_put(struct ps_pickle *p, uint64_t index)
{
    if (p->stack.count <= floor_of(p))
        return broken(p, "nothing to remember");
    if (index >= MAX_MEMO)
        return broken(p, "memo index out of range");
    if (index >= p->memo_size) {
        size_t size = p->memo_size ? p->memo_size : 256;
        while (size <= index)
            size *= 2;
        int64_t *more = realloc(p->memo, size * sizeof *more);
        if (!more)
            return no_memory(p);
        for (size_t i = p->memo_size; i < size; i++)
            more[i] = NO_VALUE;
        p->memo = more;
        p->memo_size = size;
    }
    p->memo[index] = p->stack.items[p->stack.count - 1];
    if (p->memo_next <= index)
        p->memo_next = (size_t)index + 1;
    return 0;
}

static int memo_get(struct ps_pickle *p, uint64_t index)
{
    if (index >= p->memo_size || p->memo[index] == NO_VALUE)
        return broken(p, "a value is recalled that was never remembered");
    return ids_push(p, &p->stack, (uint32_t)p->memo[index]);
}

static int add_item(struct ps_pickle *p, struct ps_pickle_value *v, uint32_t id)
{
    struct ids ids = {v->items, v->count, v->capacity};
    int code = ids_push(p, &ids, id);
    v->items = ids.items;
    v->count = ids.count;
    v->capacity = ids.capacity;
    return code;
}

/* Closes the innermost mark: *ret_first is where its values begin on the stack. */
static int pop_mark(struct ps_pickle *p, size_t *ret_first)
{
    if (!p->marks.count)
        return broken(p, "a mark is missing");
    *ret_first = p->marks.items[--p->marks.count];
    return 0;
}

static int push_tuple(struct ps_pickle *p, size_t first)
{
    size_t count = p->stack.count - first;
    struct ps_pickle_value *v = push_new(p, PS_PICKLE_TUPLE);
    if (!v)
        return p->err->code;
    uint32_t self = p->stack.items[p->stack.count - 1];
    for (size_t i = 0; i < count; i++)
        if (add_item(p, v, p->stack.items[first + i]))
            return p->err->code;
    p->stack.count = first;
    return ids_push(p, &p->stack, self);
}

static int append_items(struct ps_pickle *p, size_t first, enum ps_pickle_type type)
{
    if (first <= floor_of(p) || first > p->stack.count)
        return broken(p, "no container below the mark");
    struct ps_pickle_value *v = value(p, p->stack.items[first - 1]);
    size_t count = p->stack.count - first;
    if (v->type != type || (type == PS_PICKLE_DICT && count % 2))
        return broken(p, "items for what is not a list or dictionary");
    for (size_t i = 0; i < count; i++)
        if (add_item(p, v, p->stack.items[first + i]))
            return p->err->code;
    p->stack.count = first;
    return 0;
}

static int push_name(struct ps_pickle *p, const uint8_t *module, size_t module_size, const uint8_t *name,
                     size_t name_size)
{
    for (size_t i = 0; i < sizeof permitted_names / sizeof *permitted_names; i++) {
        if (strlen(permitted_names[i].module) == module_size &&
            strlen(permitted_names[i].name) == name_size &&
            memcmp(permitted_names[i].module, module, module_size) == 0 &&
            memcmp(permitted_names[i].name, name, name_size) == 0) {
            struct ps_pickle_value *v = push_new(p, PS_PICKLE_NAME);
            if (!v)
                return p->err->code;
            v->name = permitted_names[i].what;
            return 0;
        }
    }
    char shown[161];
    size_t n = 0;
    for (size_t i = 0; i < module_size && n < 80; i++)
        shown[n++] = module[i] > 0x20 && module[i] < 0x7f ? (char)module[i] : '?';
    shown[n++] = '.';
    for (size_t i = 0; i < name_size && n < 160; i++)
        shown[n++] = name[i] > 0x20 && name[i] < 0x7f ? (char)name[i] : '?';
    shown[n] = '\0';
    return ps_fail(
        p->err, PS_PERMISSION_DENIED,
        "%s names %s: refused, a CIFAR-10 batch needs only numpy arrays and nothing here is ever executed",
        p->name, shown);
}

static int global(struct ps_pickle *p)
{
    const uint8_t *part[2];
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        const uint8_t *newline = memchr(p->at, '\n', (size_t)(p->end - p->at));
        if (!newline)
            return broken(p, "a name without its end");
        part[i] = p->at;
        size[i] = (size_t)(newline - p->at);
        p->at = newline + 1;
    }
    return push_name(p, part[0], size[0], part[1], size[1]);
}

static int stack_global(struct ps_pickle *p)
{
    uint32_t name = 0, module = 0;
    int code = pop(p, &name);
    if (!code)
        code = pop(p, &module);
    if (code)
        return code;
    const struct ps_pickle_value *n = value(p, name), *m = value(p, module);
    if (n->type != PS_PICKLE_TEXT || m->type != PS_PICKLE_TEXT)
        return broken(p, "a name that is not text");
    return push_name(p, m->data, m->size, n->data, n->size);
}

static bool is_string(const struct ps_pickle_value *v, const char *text)
{
    return (v->type == PS_PICKLE_TEXT || v->type == PS_PICKLE_BYTES) && v->size == strlen(text) &&
           memcmp(v->data, text, v->size) == 0;
}

/* UTF-8 of code points below 256 back to bytes: how Python 3 stores bytes under protocol 2. */
static int encode_latin1(struct ps_pickle *p, const struct ps_pickle_value *args)
{
    const struct ps_pickle_value *text = args->count == 2 ? value(p, args->items[0]) : NULL;
    if (!text || text->type != PS_PICKLE_TEXT || !is_string(value(p, args->items[1]), "latin1"))
        return broken(p, "_codecs.encode of something else than text to latin1");
    uint8_t *bytes = malloc(text->size + 1);
    if (!bytes)
        return no_memory(p);
    size_t n = 0;
    for (size_t i = 0; i < text->size; n++) {
        uint8_t c = text->data[i];
        if (c < 0x80) {
            bytes[n] = c;
            i += 1;
        } else if ((c == 0xc2 || c == 0xc3) && i + 1 < text->size && (text->data[i + 1] & 0xc0) == 0x80) {
            bytes[n] = (uint8_t)(c << 6 | (text->data[i + 1] & 0x3f));
            i += 2;
        } else {
            free(bytes);
            return broken(p, "text that is not latin1");
        }
    }
    struct ps_pickle_value *v = push_new(p, PS_PICKLE_BYTES);
    if (!v) {
        free(bytes);
        return p->err->code;
    }
    v->data = v->owned = bytes;
    v->size = n;
    return 0;
}

static int fill_array(struct ps_pickle *p, struct ps_pickle_value *array, const struct ps_pickle_value *shape,
                      const struct ps_pickle_value *dtype, const struct ps_pickle_value *bytes)
{
    if (shape->type != PS_PICKLE_TUPLE || shape->count < 1 || shape->count > 2 ||
        dtype->type != PS_PICKLE_DTYPE || bytes->type != PS_PICKLE_BYTES)
        return broken(p, "an array that is not uint8 in one or two dimensions");
    size_t extent[2] = {1, 1}, total = 1;
    for (size_t i = 0; i < shape->count; i++) {
        const struct ps_pickle_value *n = value(p, shape->items[i]);
        if (n->type != PS_PICKLE_INT || n->integer < 0 || (uint64_t)n->integer > UINT32_MAX)
            return broken(p, "an array's shape out of range");
        extent[i] = (size_t)n->integer;
        if (__builtin_mul_overflow(total, extent[i], &total))
            return broken(p, "an array's shape out of range");
    }
    if (total != bytes->size)
        return ps_fail(p->err, PS_INVALID_ARGUMENT, "%s: an array of %zu x %zu bytes comes with %zu bytes",
                       p->name, extent[0], extent[1], bytes->size);
    array->ndim = (int)shape->count;
    array->shape[0] = extent[0];
    array->shape[1] = extent[1];
    array->data = bytes->data;
    array->size = bytes->size;
    return 0;
}

static int reduce(struct ps_pickle *p)
{
    uint32_t args_id = 0, callable_id = 0;
    int code = pop(p, &args_id);
    if (!code)
        code = pop(p, &callable_id);
    if (code)
        return code;
    const struct ps_pickle_value *args = value(p, args_id), *callable = value(p, callable_id);
    if (args->type != PS_PICKLE_TUPLE || callable->type != PS_PICKLE_NAME)
        return broken(p, "a call of what is no permitted name");
    switch ((enum permitted)callable->name) {
    case RECONSTRUCT: {
        const struct ps_pickle_value *type = args->count == 3 ? value(p, args->items[0]) : NULL;
        if (!type || type->type != PS_PICKLE_NAME || type->name != NDARRAY)
            return broken(p, "an array of an unknown class");
        return push_new(p, PS_PICKLE_ARRAY) ? 0 : p->err->code;
    }
    case DTYPE:
        if (!args->count || !is_string(value(p, args->items[0]), "u1"))
            return broken(p, "an array that is not uint8");
        return push_new(p, PS_PICKLE_DTYPE) ? 0 : p->err->code;
    case FROM_BUFFER: {
        if (args->count != 4 || !is_string(value(p, args->items[3]), "C"))
            return broken(p, "an array that is not in C order");
        struct ps_pickle_value *v = push_new(p, PS_PICKLE_ARRAY);
        return v ? fill_array(p, v, value(p, args->items[2]), value(p, args->items[1]),
                              value(p, args->items[0]))
                 : p->err->code;
    }
    case ENCODE:
        return encode_latin1(p, args);
    case NDARRAY:
        break;
    }
    return broken(p, "a call of numpy.ndarray");
}

static int build(struct ps_pickle *p)
{
    uint32_t state_id = 0;
    int code = pop(p, &state_id);
    if (code)
        return code;
    if (p->stack.count <= floor_of(p))
        return broken(p, "a state without its object");
    struct ps_pickle_value *object = value(p, p->stack.items[p->stack.count - 1]);
    const struct ps_pickle_value *state = value(p, state_id);
    if (object->type == PS_PICKLE_DTYPE && state->type == PS_PICKLE_TUPLE)
        return 0; /* byte order and alignment: one byte has neither */
    if (object->type != PS_PICKLE_ARRAY || object->ndim || state->type != PS_PICKLE_TUPLE ||
        state->count != 5)
        return broken(p, "a state for what is no array");
    const struct ps_pickle_value *fortran = value(p, state->items[3]);
    if ((fortran->type != PS_PICKLE_BOOL && fortran->type != PS_PICKLE_INT) || fortran->integer)
        return broken(p, "an array that is not in C order");
    return fill_array(p, object, value(p, state->items[1]), value(p, state->items[2]),
                      value(p, state->items[4]));
}

static int step(struct ps_pickle *p, bool *ret_stop)
{
    uint64_t n = 0;
    size_t first = 0;
    uint32_t id = 0;
    int code;
    uint8_t opcode = *p->at++;
    switch (opcode) {
    case 0x80: /* PROTO */
        code = take_number(p, 1, &n);
        if (!code && (n < 2 || n > 5))
            code = ps_fail(p->err, PS_INVALID_ARGUMENT, "%s: pickle protocol %d: this reader knows 2 to 5",
                           p->name, (int)n);
        return code;
    case 0x95: /* FRAME: how the writer grouped its writes */
        return take_number(p, 8, &n);
    case '.': /* STOP */
        code = pop(p, &p->root);
        *ret_stop = true;
        return !code && (p->stack.count || p->marks.count) ? broken(p, "values left over at the end") : code;
    case '(':
        return ids_push(p, &p->marks, (uint32_t)p->stack.count);
    case '0': /* POP */
        return pop(p, &id);
    case '1': /* POP_MARK */
        code = pop_mark(p, &first);
        if (!code)
            p->stack.count = first;
        return code;
    case 'N':
        return push_new(p, PS_PICKLE_NONE) ? 0 : p->err->code;
    case 0x88: /* NEWTRUE, NEWFALSE */
    case 0x89:
        return push_int(p, PS_PICKLE_BOOL, opcode == 0x88);
    case 'K': /* BININT1 */
        code = take_number(p, 1, &n);
        return code ? code : push_int(p, PS_PICKLE_INT, (int64_t)n);
    case 'M': /* BININT2 */
        code = take_number(p, 2, &n);
        return code ? code : push_int(p, PS_PICKLE_INT, (int64_t)n);
    case 'J': /* BININT */
        code = take_number(p, 4, &n);
        return code ? code : push_int(p, PS_PICKLE_INT, (int32_t)n);
    case 0x8a: { /* LONG1 */
        uint64_t bytes = 0;
        code = take_number(p, 1, &bytes);
        if (code)
            return code;
        if (bytes > 8)
            return broken(p, "a number of more than 64 bits");
        code = take_number(p, (int)bytes, &n);
        if (code)
            return code;
        if (bytes && bytes < 8 && n >> (8 * bytes - 1) & 1) /* two's complement, shortest form */
            n |= UINT64_MAX << (8 * bytes);
        return push_int(p, PS_PICKLE_INT, (int64_t)n);
    }
    case 'G': { /* BINFLOAT, big-endian */
        const uint8_t *at = take(p, 8);
        if (!at)
            return p->err->code;
        n = 0;
        for (int i = 0; i < 8; i++)
            n = n << 8 | at[i];
        struct ps_pickle_value *v = push_new(p, PS_PICKLE_FLOAT);
        if (!v)
            return p->err->code;
        memcpy(&v->number, &n, 8);
        return 0;
    }
    case 'U': /* SHORT_BINSTRING: Python 2's str */
    case 'C': /* SHORT_BINBYTES */
        return push_string(p, PS_PICKLE_BYTES, 1);
    case 'T': /* BINSTRING; its length is signed, so 2 GiB and more are negative: take() refuses them as too
                 long */
    case 'B': /* BINBYTES */
        return push_string(p, PS_PICKLE_BYTES, 4);
    case 0x8e: /* BINBYTES8, BYTEARRAY8 */
    case 0x96:
        return push_string(p, PS_PICKLE_BYTES, 8);
    case 0x8c: /* SHORT_BINUNICODE */
        return push_string(p, PS_PICKLE_TEXT, 1);
    case 'X': /* BINUNICODE */
        return push_string(p, PS_PICKLE_TEXT, 4);
    case 0x8d: /* BINUNICODE8 */
        return push_string(p, PS_PICKLE_TEXT, 8);
    case ']':
        return push_new(p, PS_PICKLE_LIST) ? 0 : p->err->code;
    case '}':
        return push_new(p, PS_PICKLE_DICT) ? 0 : p->err->code;
    case ')':
        return push_new(p, PS_PICKLE_TUPLE) ? 0 : p->err->code;
    case 'a': /* APPEND */
        return p->stack.count < floor_of(p) + 2 ? broken(p, "an item without its list")
                                                : append_items(p, p->stack.count - 1, PS_PICKLE_LIST);
    case 's': /* SETITEM */
        return p->stack.count < floor_of(p) + 3 ? broken(p, "an item without its dictionary")
                                                : append_items(p, p->stack.count - 2, PS_PICKLE_DICT);
    case 'e': /* APPENDS */
    case 'u': /* SETITEMS */
        code = pop_mark(p, &first);
        return code ? code : append_items(p, first, opcode == 'e' ? PS_PICKLE_LIST : PS_PICKLE_DICT);
    case 't': /* TUPLE */
        code = pop_mark(p, &first);
        return code ? code : push_tuple(p, first);
    case 0x85: /* TUPLE1, TUPLE2, TUPLE3 */
    case 0x86:
    case 0x87:
        first = (size_t)(opcode - 0x84);
        return p->stack.count < floor_of(p) + first ? broken(p, "a tuple without its items")
                                                    : push_tuple(p, p->stack.count - first);
    case 'q': /* BINPUT, LONG_BINPUT, MEMOIZE */
        code = take_number(p, 1, &n);
        return code ? code : memo_put(p, n);
    case 'r':
        code = take_number(p, 4, &n);
        return code ? code : memo_put(p, n);
    case 0x94:
        return memo_put(p, p->memo_next);
    case 'h': /* BINGET, LONG_BINGET */
        code = take_number(p, 1, &n);
        return code ? code : memo_get(p, n);
    case 'j':
        code = take_number(p, 4, &n);
        return code ? code : memo_get(p, n);
    case 'c':
        return global(p);
    case 0x93:
        return stack_global(p);
    case 'R':
        return reduce(p);
    case 'b':
        return build(p);
    default:
        p->at--;
        return ps_fail(p->err, PS_INVALID_ARGUMENT,
                       "%s, byte %zu: pickle opcode 0x%02x, which no CIFAR-10 batch needs: refused", p->name,
                       (size_t)(p->at - p->data), opcode);
    }
}

int ps_pickle_read(const uint8_t *data, size_t size, const char *name, struct ps_pickle **ret,
                   struct ps_error *err)
{
    struct ps_error local = {0};
    struct ps_pickle *p = calloc(1, sizeof *p);
    if (!p)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory while reading %s", name);
    p->data = p->at = data;
    p->end = data + size;
    p->name = name;
    p->err = err ? err : &local;
    bool stop = false;
    int code = 0;
    while (!code && !stop)
        code = p->at < p->end
                   ? step(p, &stop)
                   : ps_fail(p->err, PS_INVALID_ARGUMENT, "%s is truncated: its pickle has no end", name);
    if (code) {
        ps_pickle_free(p);
        return code;
    }
    p->err = NULL;
    *ret = p;
    return 0;
}

struct ps_pickle *ps_pickle_free(struct ps_pickle *p)
{
    if (!p)
        return NULL;
    for (size_t i = 0; i < p->values; i++) {
        free(value(p, (uint32_t)i)->items);
        free(value(p, (uint32_t)i)->owned);
    }
    for (size_t i = 0; i < BLOCKS && p->blocks[i]; i++)
        free(p->blocks[i]);
    free(p->stack.items);
    free(p->marks.items);
    free(p->memo);
    free(p);
    return NULL;
}

const struct ps_pickle_value *ps_pickle_find(const struct ps_pickle *p, const struct ps_pickle_value *dict,
                                             const char *key)
{
    const struct ps_pickle_value *found = NULL;
    for (size_t i = 0; i + 1 < dict->count; i += 2)
        if (is_string(ps_pickle_at(p, dict->items[i]), key))
            found = ps_pickle_at(p, dict->items[i + 1]);
    return found;
}

/* SPDX-License-Identifier: Apache-2.0
 * baselines.json. */
#include "services/cli/cli.h"

#include "services/base/clock.h"
#include "services/base/fs.h"

#include <stdlib.h>
#include <string.h>

enum { baselines_format = 1, baselines_max = 64 << 20 };

int cli_baselines_read(const char *path, bool may_miss, json_t **ret_file, struct ps_error *err)
{
    char *text;
    size_t size;
    json_error_t where;
    int code = ps_read_file(path, baselines_max, &text, &size, err);
    if (code == PS_NOT_FOUND && may_miss) {
        *ret_file = json_pack("{s:i, s:{}}", "paramsync_baselines", (int)baselines_format, "baselines");
        return *ret_file ? 0 : ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (code)
        return code;
    json_t *file = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
    free(text);
    if (!file)
        return ps_fail(err, PS_INVALID_ARGUMENT, "%s, line %d: %s", path, where.line, where.text);
    if (json_integer_value(json_object_get(file, "paramsync_baselines")) != baselines_format ||
        !json_is_object(json_object_get(file, "baselines"))) {
        json_decref(file);
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s holds no baselines: `paramsync baseline set` writes such a file", path);
    }
    *ret_file = file;
    return 0;
}

int cli_baselines_write(const char *path, const json_t *file, struct ps_error *err)
{
    char *text = json_dumps(file, JSON_INDENT(1) | JSON_SORT_KEYS); /* the same for the same: quiet diffs */
    struct ps_buf out = PS_BUF_INIT(baselines_max);
    if (!text)
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    ps_buf_puts(&out, text);
    ps_buf_puts(&out, "\n");
    free(text);
    int code = out.failed
                   ? ps_fail(err, PS_RESOURCE_EXHAUSTED, "%s: too many baselines, or out of memory", path)
                   : ps_write_file_atomic(path, out.data, out.size, err);
    ps_buf_done(&out);
    return code;
}

static int read_free(const json_t *list, unsigned *ret_fields, struct ps_error *err)
{
    struct ps_buf text = PS_BUF_INIT(1 << 12);
    size_t i;
    const json_t *item;
    json_array_foreach(list, i, item)
        ps_buf_printf(&text, "%s,", json_is_string(item) ? json_string_value(item) : "?");
    int code = ps_gate_parse_fields(text.data ? text.data : "", ret_fields, err);
    ps_buf_done(&text);
    return code;
}

int cli_baselines_get(const json_t *file, const char *path, const char *name, struct cli_run *ret_run,
                      struct ps_error *err)
{
    json_t *all = json_object_get(file, "baselines");
    if (!name && json_object_size(all) != 1)
        return ps_fail(err, PS_INVALID_ARGUMENT,
                       "%s holds %zu baselines: say which, --baselines %s --baseline NAME", path,
                       json_object_size(all), path);
    if (!name)
        name = json_object_iter_key(json_object_iter(all));
    json_t *pin = json_object_get(all, name);
    if (!pin)
        return ps_fail(err, PS_NOT_FOUND, "%s has no baseline %.100s; `paramsync baseline list` shows them",
                       path, name);
    unsigned free_fields = 0;
    int code = read_free(json_object_get(pin, "free"), &free_fields, err);
    if (code)
        return ps_error_prefix(err, "%s, baseline %.100s, free", path, name);
    json_t *object = json_is_object(pin) ? json_copy(pin) : json_null();
    if (json_is_object(object))
        json_object_set_new(object, "paramsync_export", json_integer(1));
    code = cli_run_from_json(object, path, ret_run, err);
    json_decref(object);
    if (code)
        return code;
    ret_run->run.pinned = true;
    ret_run->run.pin_free = free_fields;
    return 0;
}

int cli_baselines_set(json_t *file, const char *name, const struct ps_compare_run *run, unsigned free_fields,
                      struct ps_error *err)
{
    static const struct {
        const char *name;
        unsigned field;
    } words[] = {{"commit", PS_GATE_COMMIT}, {"world-size", PS_GATE_WORLD_SIZE}, {"device", PS_GATE_DEVICE}};
    char now[32];
    json_t *pin = cli_run_to_json(run), *list = json_array();
    ps_format_utc(ps_wall_ns(), now, sizeof now);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (free_fields & words[i].field)
            json_array_append_new(list, json_string(words[i].name));
    json_object_del(pin, "paramsync_export");
    json_object_set_new(pin, "free", list);
    json_object_set_new(pin, "pinned_at", json_string(now));
    if (!pin || json_object_set_new(json_object_get(file, "baselines"), name, pin))
        return ps_fail(err, PS_RESOURCE_EXHAUSTED, "out of memory");
    return 0;
}

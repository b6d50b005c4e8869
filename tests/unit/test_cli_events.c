/* SPDX-License-Identifier: Apache-2.0
 * Event files: what is written is read back, tensors of other writers too, and nothing broken passes. */
#include "services/cli/events.h"
#include "services/cli/wire.h"

#include "services/base/digest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct seen {
    int count;
    struct cli_scalar last;
    char tag[64];
};

static int on_scalar(void *context, const struct cli_scalar *scalar)
{
    struct seen *seen = context;
    seen->count++;
    seen->last = *scalar;
    strncpy(seen->tag, scalar->tag, sizeof seen->tag - 1);
    return 0;
}

static int refuse(void *context, const struct cli_scalar *scalar)
{
    (void)context;
    (void)scalar;
    return PS_ABORTED;
}

static void make(struct ps_buf *out)
{
    cli_events_begin(out, 1000.5);
    cli_events_scalar(out, 1001.5, 7, "loss", 0.25);
    cli_events_scalar(out, 1002.5, UINT64_C(1) << 40, "epoch/accuracy", NAN);
}

static void round_trip(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    struct seen seen = {0};
    struct ps_error err = {0};
    make(&out);
    assert_int_equal(out.failed, 0);
    assert_int_equal(cli_events_read(out.data, out.size, "f", on_scalar, &seen, &err), 0);
    assert_int_equal(seen.count, 2);
    assert_string_equal(seen.tag, "epoch/accuracy");
    assert_true(isnan(seen.last.value) && seen.last.step == UINT64_C(1) << 40 && seen.last.wall_s == 1002.5);
    assert_int_equal(cli_events_read(out.data, out.size, "f", refuse, &seen, &err), PS_ABORTED);
    ps_buf_done(&out);
}

static void broken(void **state)
{
    (void)state;
    struct ps_buf out = PS_BUF_INIT(1 << 16);
    struct ps_error err = {0};
    make(&out);
    /* Cut anywhere: whole records, or an error. */
    for (size_t size = 1; size < out.size; size++) {
        struct seen seen = {0};
        char *copy = malloc(size); /* so that a sanitizer sees a step too far */
        assert_non_null(copy);
        memcpy(copy, out.data, size);
        int code = cli_events_read(copy, size, "f", on_scalar, &seen, &err);
        assert_true(code == PS_DATA_LOSS || (code == 0 && seen.count < 2));
        free(copy);
    }
    /* One bit anywhere. */
    for (size_t bit = 0; bit < out.size * 8; bit++) {
        struct seen seen = {0};
        out.data[bit / 8] ^= (char)(1 << bit % 8);
        assert_true(cli_events_read(out.data, out.size, "f", on_scalar, &seen, &err) < 0);
        out.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    ps_buf_done(&out);
}

static void frame(struct ps_buf *out, const struct ps_buf *event)
{
    unsigned char head[12] = {(unsigned char)event->size, (unsigned char)(event->size >> 8)}, tail[4];
    uint32_t sums[2] = {ps_crc32c(0, head, 8), ps_crc32c(0, event->data, event->size)};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++)
            (k ? tail : head + 8)[i] =
                (unsigned char)(((sums[k] >> 15 | sums[k] << 17) + 0xa282ead8u) >> 8 * i);
    ps_buf_append(out, head, 12);
    ps_buf_append(out, event->data, event->size);
    ps_buf_append(out, tail, 4);
}

/* What TensorFlow 2 writes: a tensor of one float, packed or as raw content; tensors of more are passed over.
 */
static void tensors(void **state)
{
    (void)state;
    static const float numbers[2] = {0.5f, 0.75f};
    for (int kind = 0; kind < 4; kind++) {
        struct ps_buf out = PS_BUF_INIT(1 << 12), event = PS_BUF_INIT(1 << 12),
                      summary = PS_BUF_INIT(1 << 12), value = PS_BUF_INIT(1 << 12),
                      tensor = PS_BUF_INIT(1 << 12);
        struct seen seen = {0};
        struct ps_error err = {0};
        cli_wire_int(&tensor, 1, 1);
        if (kind == 0)
            cli_wire_float(&tensor, 5, 0.5f);
        else
            cli_wire_bytes(&tensor, kind == 1 ? 4 : 5, numbers, kind == 3 ? 8 : 4);
        cli_wire_message(&value, 8, &tensor);
        cli_wire_text(&value, 1, "t");
        cli_wire_message(&summary, 1, &value);
        cli_wire_message(&event, 5, &summary);
        frame(&out, &event);
        assert_int_equal(cli_events_read(out.data, out.size, "f", on_scalar, &seen, &err), 0);
        assert_int_equal(seen.count, kind == 3 ? 0 : 1);
        assert_true(kind == 3 || seen.last.value == 0.5);
        ps_buf_done(&out);
        ps_buf_done(&event);
        ps_buf_done(&summary);
        ps_buf_done(&value);
        ps_buf_done(&tensor);
    }
    /* A record with right sums around what is no message. */
    static const char *const junk[] = {"\x07", "\x0a", "\x2a\x7f",
                                       "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", "\x0b\x0c"};
    for (size_t i = 0; i < sizeof junk / sizeof *junk; i++) {
        struct ps_buf out = PS_BUF_INIT(1 << 12), event = PS_BUF_INIT(1 << 12);
        struct seen seen = {0};
        struct ps_error err = {0};
        ps_buf_puts(&event, junk[i]);
        frame(&out, &event);
        assert_int_equal(cli_events_read(out.data, out.size, "f", on_scalar, &seen, &err), PS_DATA_LOSS);
        ps_buf_done(&out);
        ps_buf_done(&event);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(broken),
        cmocka_unit_test(tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

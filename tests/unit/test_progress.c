/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trainer/progress.h"

#include "services/base/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void test_line(void **state)
{
    (void)state;
    char line[200];
    const struct ps_progress_state s = {
        .epoch = 2, .epochs = 4, .step = 50, .steps = 200, .samples_per_s = 123.4, .left_s = 83};
    ps_progress_format(&s, line, sizeof line);
    assert_string_equal(line, "epoch 2/4 [#####...............] step 50/200 123 img/s ETA 1 min 23 s");
    const struct ps_progress_state unknown = {.epoch = 1, .epochs = 1, .left_s = -1};
    ps_progress_format(&unknown, line, sizeof line);
    assert_non_null(strstr(line, "ETA --"));
    const struct ps_progress_state wide = {.epoch = 1000000,
                                           .epochs = 1000000,
                                           .step = 123456789012,
                                           .steps = 123456789012,
                                           .samples_per_s = 1e12,
                                           .left_s = 1e9};
    ps_progress_format(&wide, line, sizeof line);
    assert_true(strlen(line) <= 79);
    ps_progress_format(&wide, line, 10);
    assert_int_equal(strlen(line), 9);
}

/* What reaches standard error: nothing when off, at most five lines a second, cleared before other text. */
static void test_drawing(void **state)
{
    (void)state;
    int pipe_fd[2], saved = dup(STDERR_FILENO);
    char text[4096];
    assert_int_equal(pipe(pipe_fd), 0);
    fflush(stderr);
    dup2(pipe_fd[1], STDERR_FILENO);
    struct ps_progress p;
    const struct ps_progress_state s = {.epoch = 1, .epochs = 1, .step = 1, .steps = 2, .left_s = 1};
    ps_progress_start(&p, false);
    ps_progress_draw(&p, &s, 0);
    ps_progress_clear(&p);
    ps_progress_start(&p, true);
    ps_progress_clear(&p);
    for (int64_t ns = 0; ns <= PS_NS_PER_S; ns += PS_NS_PER_S / 100)
        ps_progress_draw(&p, &s, ns);
    ps_progress_clear(&p);
    ps_progress_clear(&p);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(pipe_fd[1]);
    ssize_t n = read(pipe_fd[0], text, sizeof text - 1);
    close(pipe_fd[0]);
    assert_true(n > 0);
    text[n] = '\0';
    int lines = 0;
    for (const char *at = text; (at = strstr(at, "epoch 1/1")); at++)
        lines++;
    assert_int_equal(lines, 6);
    assert_null(strchr(text, '\n'));
    assert_string_equal(text + n - 4, "\r\033[K");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_line), cmocka_unit_test(test_drawing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

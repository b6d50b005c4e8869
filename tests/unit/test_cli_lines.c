/* SPDX-License-Identifier: Apache-2.0 */
#include "services/cli/lines.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

static void sample_lines(void **state)
{
    (void)state;
    struct cli_line l;
    assert_int_equal(cli_line_parse("train | epoch: 3 | loss: 0.8123", &l), 1);
    assert_false(l.val);
    assert_int_equal(l.epoch, 3);
    assert_true(l.loss == 0.8123);
    assert_int_equal(cli_line_parse("val | epoch: 12 | loss: 0.7500 | accuracy: 0.7421 ", &l), 1);
    assert_true(l.val);
    assert_int_equal(l.epoch, 12);
    assert_true(l.loss == 0.75 && l.accuracy == 0.7421);
    assert_int_equal(cli_line_parse("val | epoch: 1 | loss: nan | accuracy: 0.1000 \r", &l), 1);
    assert_true(isnan(l.loss));
    assert_int_equal(cli_line_parse("[13] train | epoch: 4 | loss: 0.5", &l), 1); /* under paramsync launch */
    assert_int_equal(l.epoch, 4);
    const char *others[] = {"",
                            "[] train | epoch: 4 | loss: 0.5",
                            "[x] train | epoch: 4 | loss: 0.5",
                            "[1]train | epoch: 4 | loss: 0.5",
                            "train",
                            "train | epoch: | loss: 1",
                            "train | epoch: -1 | loss: 1",
                            "train | epoch: 3 | loss: ",
                            "train | epoch: 3 | loss: 1 | accuracy: 1",
                            "val | epoch: 3 | loss: 1",
                            "val | epoch: 3 | loss: 1 | accuracy: 0.5 x",
                            "INFO train | epoch: 3 | loss: 1",
                            "training | epoch: 3 | loss: 1",
                            "train | epoch: 99999999999999999999 | loss: 1"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_int_equal(cli_line_parse(others[i], &l), 0);
}

static void several_processes_fold(void **state)
{
    (void)state;
    struct cli_folds folds = {0};
    const struct cli_fold *f;
    assert_non_null(cli_folds_add(&folds, &(struct cli_line){.epoch = 1, .loss = 1.0}, 10));
    f = cli_folds_add(&folds, &(struct cli_line){.epoch = 1, .loss = 2.0}, 11);
    assert_int_equal(f->train_count, 2);
    assert_true(f->train_sum == 3.0);
    f = cli_folds_add(&folds, &(struct cli_line){.val = true, .epoch = 1, .loss = 0.5, .accuracy = 0.6}, 12);
    assert_true(f->elapsed_s == 12); /* the first evaluation's end */
    f = cli_folds_add(&folds, &(struct cli_line){.val = true, .epoch = 1, .loss = 0.5, .accuracy = 0.8}, 13);
    assert_true(f->elapsed_s == 12);
    assert_int_equal(f->val_count, 2);
    assert_true(fabs(f->accuracy_sum / f->val_count - 0.7) < 1e-12);
    assert_int_equal(folds.count, 1);
    f = cli_folds_add(&folds, &(struct cli_line){.epoch = 2}, 20);
    assert_int_equal(f->epoch, 2);
    assert_int_equal(folds.count, 2);
    cli_folds_done(&folds);

    f = cli_folds_add(&folds, &(struct cli_line){.epoch = 0}, 1);
    assert_int_equal(f->epoch, 1); /* scripts that count from 0 */
    f = cli_folds_add(&folds, &(struct cli_line){.epoch = 1}, 2);
    assert_int_equal(f->epoch, 2);
    cli_folds_done(&folds);
}

static void patterns(void **state)
{
    (void)state;
    struct cli_pattern p;
    struct cli_line l;
    struct ps_error err = {0};
    assert_int_equal(cli_pattern_compile("^Epoch (\\d+)/[0-9]+: .*loss=([^ ,]+), acc=([0-9.]+)",
                                         "--val-regex", true, true, &p, &err),
                     0);
    assert_int_equal(cli_pattern_match(&p, "Epoch 7/90: val loss=0.25, acc=81.5", &l), 1);
    assert_true(l.val && l.epoch == 7 && l.loss == 0.25 && fabs(l.accuracy - 0.815) < 1e-12);
    assert_int_equal(cli_pattern_match(&p, "Epoch 7/90: val loss=nan, acc=81.5", &l), 1);
    assert_true(isnan(l.loss));
    assert_int_equal(cli_pattern_match(&p, "Epoch 7/90: val loss=x, acc=81.5", &l), 0);
    assert_int_equal(cli_pattern_match(&p, "Epoch 99999999/90: loss=1, acc=81.5", &l), 0);
    assert_int_equal(cli_pattern_match(&p, "epoch 7", &l), 0);
    cli_pattern_done(&p);
    /* Named groups in any order, others between them, a bracket that holds a bracket, a % sign. */
    assert_int_equal(
        cli_pattern_compile("(acc|top1) (?P<accuracy>[0-9.]+%?).*[[(]ep(?<epoch>[[:digit:]]+)[])] "
                            "(?<loss>.+)$",
                            "--val-regex", true, false, &p, &err),
        0);
    assert_int_equal(cli_pattern_match(&p, "top1 50% [ep3] 1e-3", &l), 1);
    assert_true(l.epoch == 3 && l.loss == 1e-3 && l.accuracy == 0.5);
    assert_int_equal(cli_pattern_match(&p, "acc 0.5 (ep3) 1e-3", &l), 1);
    assert_true(l.accuracy == 0.5);
    cli_pattern_done(&p);
    assert_int_equal(cli_pattern_compile("e([0-9]+) l(.*)", "--train-regex", false, false, &p, &err), 0);
    assert_int_equal(cli_pattern_match(&p, "e1 l2", &l), 1);
    assert_false(l.val);
    cli_pattern_done(&p);
    static const char *const bad[] = {"",
                                      "(",
                                      "(a)",
                                      "(a)(b)",
                                      "(?:a)(b)(c)",
                                      "(?<name>a)(b)(c)",
                                      "[",
                                      "(?<epoch",
                                      "(?<epoch>a)(b)(c)",
                                      "(a)(b)(c)(d)(e)(f)(g)(h)(i)(j)(k)(l)(m)(n)(o)(p)",
                                      "a{9999999}(a)(b)(c)",
                                      "(a)(b)(c)["};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(cli_pattern_compile(bad[i], "--val-regex", true, false, &p, &err),
                         PS_INVALID_ARGUMENT);
        assert_non_null(strstr(err.message, "--val-regex"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sample_lines),
        cmocka_unit_test(several_processes_fold),
        cmocka_unit_test(patterns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

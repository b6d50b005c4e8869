/* SPDX-License-Identifier: Apache-2.0
 * The gate's verdict as a table, Markdown, JUnit XML and JSON. */
#include "services/cli/cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static enum cli_colour verdict_colour(int verdict)
{
    return verdict == PS_GATE_PASS ? CLI_GREEN : verdict == PS_GATE_FAIL ? CLI_RED : CLI_YELLOW;
}

static const char *against(const struct cli_gate_report *report)
{
    return report->baseline ? report->baseline : "limits of the command line";
}

/* What changed since the baseline run, where both sides are known: "best accuracy +0.52 points, ...". */
static void deltas_text(const struct cli_gate_report *report, char *out, size_t size)
{
    const struct ps_gate_result *r = report->result;
    struct ps_compare_row base;
    char time[48];
    size_t n = 0;
    *out = '\0';
    if (!report->base || ps_compare(report->base, 1, 0, r->min_accuracy, &base, NULL))
        return;
    if (r->accuracy.known && base.has_accuracy)
        n += (size_t)snprintf(out, size, "best accuracy %+.2f points",
                              (r->accuracy.median - base.best_accuracy) * 100);
    if (r->time.known && isfinite(r->time.median) && base.has_time_to_target && n < size) {
        double more = r->time.median - base.time_to_target_s;
        ps_compare_format_time(fabs(more), NAN, time, sizeof time);
        n += (size_t)snprintf(out + n, size - n, "%stime to %.2f %% %s%s", n ? ", " : "",
                              r->min_accuracy * 100, more < 0 ? "-" : "+", time);
    }
    if (r->total.known && base.has_total && n < size) {
        double more = r->total.median - base.total_s;
        ps_compare_format_time(fabs(more), NAN, time, sizeof time);
        snprintf(out + n, size - n, "%stotal time %s%s", n ? ", " : "", more < 0 ? "-" : "+", time);
    }
}

static json_t *deltas_json(const struct cli_gate_report *report)
{
    const struct ps_gate_result *r = report->result;
    struct ps_compare_row base;
    if (!report->base || ps_compare(report->base, 1, 0, r->min_accuracy, &base, NULL))
        return json_null();
    return json_pack(
        "{s:o, s:o, s:o}", "best_accuracy",
        r->accuracy.known && base.has_accuracy ? cli_json_number(r->accuracy.median - base.best_accuracy)
                                               : json_null(),
        "time_to_target_s",
        r->time.known && base.has_time_to_target ? cli_json_number(r->time.median - base.time_to_target_s)
                                                 : json_null(),
        "total_s",
        r->total.known && base.has_total ? cli_json_number(r->total.median - base.total_s) : json_null());
}

/* A run's figures and where they come from. */
static json_t *run_json(const struct ps_compare_run *run, double target)
{
    struct ps_compare_row row;
    if (ps_compare(run, 1, 0, target, &row, NULL))
        return json_null();
    json_t *o =
        json_pack("{s:s, s:s, s:s, s:i, s:s, s:s, s:s, s:s, s:i}", "id", run->id ? run->id : "", "name",
                  run->name ? run->name : "", "state", ps_compare_state_name(run->state), "world_size",
                  (int)run->world_size, "commit", run->commit ? run->commit : "", "dataset_hash",
                  run->dataset_hash ? run->dataset_hash : "", "device", run->device ? run->device : "",
                  "model", run->model ? run->model : "", "epochs", (int)row.epochs);
    json_object_set_new(o, "best_accuracy",
                        row.has_accuracy ? cli_json_number(row.best_accuracy) : json_null());
    json_object_set_new(o, "time_to_target_s",
                        row.has_time_to_target ? cli_json_number(row.time_to_target_s) : json_null());
    json_object_set_new(o, "before",
                        row.has_before ? json_pack("{s:i, s:o, s:o}", "epoch", (int)row.before_epoch,
                                                   "elapsed_s", cli_json_number(row.before_s), "accuracy",
                                                   cli_json_number(row.before_accuracy))
                                       : json_null());
    json_object_set_new(o, "total_s", row.has_total ? cli_json_number(row.total_s) : json_null());
    return o;
}

int cli_gate_text(const struct cli_gate_report *report, size_t width, bool colours, struct ps_buf *out)
{
    static const struct cli_column columns[] = {
        {"CHECK", CLI_LEFT, CLI_WRAP},
        {"ACTUAL", CLI_LEFT, CLI_WRAP},
        {"WANTED", CLI_LEFT, CLI_WRAP},
        {"VERDICT", CLI_LEFT, CLI_KEEP},
    };
    const struct ps_gate_result *r = report->result;
    static const char *const codes[] = {"\033[33m", "\033[32m", "\033[31m"};
    struct ps_buf names = PS_BUF_INIT(1 << 16);
    struct cli_table table;
    cli_escape(&names, report->subject);
    ps_buf_printf(out, "gate: %s, n=%zu, against ", names.data ? names.data : "?", r->n);
    ps_buf_clear(&names);
    cli_escape(&names, against(report));
    ps_buf_printf(out, "%s\n\n", names.data ? names.data : "?");
    ps_buf_done(&names);
    cli_table_init(&table, columns, sizeof columns / sizeof *columns);
    for (size_t i = 0; i < r->check_count; i++) {
        const struct ps_gate_check *c = &r->checks[i];
        if (r->n > 1)
            cli_table_printf(&table, CLI_PLAIN, "%s [%s]", c->what, c->run);
        else
            cli_table_add(&table, CLI_PLAIN, c->what);
        cli_table_add(&table, CLI_PLAIN, c->actual);
        cli_table_add(&table, CLI_PLAIN, c->wanted);
        cli_table_add(&table, verdict_colour(c->verdict), ps_gate_verdict_name(c->verdict));
    }
    int code = cli_table_render(&table, width, colours, out);
    cli_table_done(&table);
    if (out->failed || code)
        return code ? code : out->failed;
    char verdict[1024], deltas[256];
    deltas_text(report, deltas, sizeof deltas);
    if (*deltas) {
        snprintf(verdict, sizeof verdict, "since the baseline: %s", deltas);
        ps_buf_puts(out, "\n");
        code = cli_wrap(out, width, verdict);
        if (code)
            return code;
    }
    snprintf(verdict, sizeof verdict, "verdict: %s (exit %d): %s", ps_gate_verdict_name(r->verdict),
             ps_gate_verdict_exit(r->verdict), r->reason);
    ps_buf_printf(out, "\n%s", colours ? codes[r->verdict] : "");
    code = cli_wrap(out, width, verdict);
    if (colours)
        ps_buf_puts(out, "\033[0m");
    return code ? code : out->failed;
}

/* For a cell of a Markdown table: one line, nothing that Markdown or HTML would take as its own. */
static void markdown_text(struct ps_buf *out, const char *text)
{
    struct ps_buf escaped = PS_BUF_INIT(1 << 16);
    cli_escape(&escaped, text);
    for (const char *p = escaped.data ? escaped.data : ""; *p; p++) {
        if (strchr("\\`*_{}[]<>()#|!&~", *p))
            ps_buf_printf(out, "&#%d;", *p);
        else
            ps_buf_append(out, p, 1);
    }
    ps_buf_done(&escaped);
}

int cli_gate_markdown(const struct cli_gate_report *report, struct ps_buf *out)
{
    const struct ps_gate_result *r = report->result;
    ps_buf_printf(out, "## paramsync gate: %s\n\n", ps_gate_verdict_name(r->verdict));
    markdown_text(out, report->subject);
    ps_buf_printf(out, " (n=%zu) against ", r->n);
    markdown_text(out, against(report));
    ps_buf_puts(out, ".\n\n| check | run | actual | wanted | verdict |\n|---|---|---|---|---|\n");
    for (size_t i = 0; i < r->check_count; i++) {
        const struct ps_gate_check *c = &r->checks[i];
        const char *cells[] = {c->what, c->run, c->actual, c->wanted, ps_gate_verdict_name(c->verdict)};
        for (size_t k = 0; k < sizeof cells / sizeof *cells; k++) {
            ps_buf_puts(out, "| ");
            markdown_text(out, cells[k]);
            ps_buf_puts(out, " ");
        }
        ps_buf_puts(out, "|\n");
    }
    char deltas[256];
    deltas_text(report, deltas, sizeof deltas);
    if (*deltas) {
        ps_buf_puts(out, "\nSince the baseline: ");
        markdown_text(out, deltas);
        ps_buf_puts(out, ".\n");
    }
    ps_buf_puts(out, "\n");
    markdown_text(out, r->reason);
    ps_buf_puts(out, "\n");
    return out->failed;
}

static void xml_text(struct ps_buf *out, const char *text)
{
    struct ps_buf escaped = PS_BUF_INIT(1 << 16);
    cli_escape(&escaped, text); /* XML 1.0 has no way to write most control characters */
    for (const char *p = escaped.data ? escaped.data : ""; *p; p++) {
        if (strncmp(p, "\xEF\xBF\xBE", 3) == 0 || strncmp(p, "\xEF\xBF\xBF", 3) == 0) {
            ps_buf_puts(out, "?"); /* U+FFFE and U+FFFF are no characters of XML */
            p += 2;
            continue;
        }
        switch (*p) {
        case '<':
            ps_buf_puts(out, "&lt;");
            break;
        case '>':
            ps_buf_puts(out, "&gt;");
            break;
        case '&':
            ps_buf_puts(out, "&amp;");
            break;
        case '"':
            ps_buf_puts(out, "&quot;");
            break;
        default:
            ps_buf_append(out, p, 1);
        }
    }
    ps_buf_done(&escaped);
}

int cli_gate_junit(const struct cli_gate_report *report, struct ps_buf *out)
{
    const struct ps_gate_result *r = report->result;
    size_t failures = 0, errors = 0;
    for (size_t i = 0; i < r->check_count; i++) {
        failures += r->checks[i].verdict == PS_GATE_FAIL;
        errors += r->checks[i].verdict == PS_GATE_UNDECIDED;
    }
    ps_buf_printf(
        out,
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
        "<testsuites>\n<testsuite name=\"paramsync gate\" tests=\"%zu\" failures=\"%zu\" errors=\"%zu\">\n",
        r->check_count, failures, errors);
    for (size_t i = 0; i < r->check_count; i++) {
        const struct ps_gate_check *c = &r->checks[i];
        ps_buf_puts(out, "<testcase classname=\"");
        xml_text(out, c->run);
        ps_buf_puts(out, "\" name=\"");
        xml_text(out, c->what);
        ps_buf_puts(out, "\">");
        if (c->verdict != PS_GATE_PASS) {
            /* An error is JUnit's word for a test that could not tell. */
            const char *element = c->verdict == PS_GATE_FAIL ? "failure" : "error";
            ps_buf_printf(out, "<%s message=\"", element);
            xml_text(out, c->actual);
            ps_buf_puts(out, "; wanted: ");
            xml_text(out, c->wanted);
            ps_buf_puts(out, "\"/>");
        } else {
            ps_buf_puts(out, "<system-out>");
            xml_text(out, c->actual);
            ps_buf_puts(out, "; wanted: ");
            xml_text(out, c->wanted);
            ps_buf_puts(out, "</system-out>");
        }
        ps_buf_puts(out, "</testcase>\n");
    }
    ps_buf_puts(out, "</testsuite>\n</testsuites>\n");
    return out->failed;
}

static json_t *spread_json(const struct ps_gate_spread *spread)
{
    if (!spread->known)
        return json_null();
    return json_pack("{s:o, s:o, s:o}", "median", cli_json_number(spread->median), "low",
                     cli_json_number(spread->low), "high", cli_json_number(spread->high));
}

json_t *cli_gate_json(const struct cli_gate_report *report)
{
    const struct ps_gate_result *r = report->result;
    json_t *checks = json_array();
    for (size_t i = 0; i < r->check_count; i++) {
        const struct ps_gate_check *c = &r->checks[i];
        json_array_append_new(checks, json_pack("{s:s, s:s, s:s, s:s, s:s}", "what", c->what, "run", c->run,
                                                "actual", c->actual, "wanted", c->wanted, "verdict",
                                                ps_gate_verdict_name(c->verdict)));
    }
    json_t *runs = json_array();
    for (size_t i = 0; i < r->n && report->runs; i++)
        json_array_append_new(runs, run_json(&report->runs[i], r->min_accuracy));
    return json_pack("{s:s, s:i, s:s, s:s, s:s?, s:I, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "verdict",
                     ps_gate_verdict_name(r->verdict), "exit", ps_gate_verdict_exit(r->verdict), "reason",
                     r->reason, "subject", report->subject, "baseline", report->baseline, "n",
                     (json_int_t)r->n, "min_accuracy", r->min_accuracy, "best_accuracy",
                     spread_json(&r->accuracy), "time_to_target_s", spread_json(&r->time), "total_s",
                     spread_json(&r->total), "checks", checks, "runs", runs, "baseline_run",
                     report->base ? run_json(report->base, r->min_accuracy) : json_null(), "since_baseline",
                     deltas_json(report));
}

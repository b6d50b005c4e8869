/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/progress.h"

#include "services/base/clock.h"

#include <stdio.h>
#include <string.h>

enum { COLUMNS = 79, BAR = 20 };
static const int64_t redraw_ns = PS_NS_PER_S / 5;

void ps_progress_format(const struct ps_progress_state *s, char *out, size_t size)
{
    char bar[BAR + 1], left[32] = "--", line[160];
    int done = s->steps > 0 ? (int)(s->step * BAR / s->steps) : 0;
    done = done < 0 ? 0 : done > BAR ? BAR : done;
    memset(bar, '#', (size_t)done);
    memset(bar + done, '.', (size_t)(BAR - done));
    bar[BAR] = '\0';
    if (s->left_s >= 0)
        ps_format_duration(s->left_s, left, sizeof left);
    snprintf(line, sizeof line, "epoch %d/%d [%s] step %lld/%lld %.0f img/s ETA %s", s->epoch, s->epochs, bar,
             (long long)s->step, (long long)s->steps, s->samples_per_s, left);
    size_t n = strlen(line), most = size - 1 < COLUMNS ? size - 1 : COLUMNS;
    n = n < most ? n : most;
    memcpy(out, line, n);
    out[n] = '\0';
}

void ps_progress_start(struct ps_progress *p, bool on)
{
    *p = (struct ps_progress){.on = on};
}

void ps_progress_draw(struct ps_progress *p, const struct ps_progress_state *state, int64_t now_ns)
{
    char line[COLUMNS + 1];
    if (!p->on || (p->drawn && now_ns - p->last_ns < redraw_ns))
        return;
    ps_progress_format(state, line, sizeof line);
    fprintf(stderr, "\r%s\033[K", line);
    fflush(stderr);
    p->drawn = true;
    p->last_ns = now_ns;
}

void ps_progress_clear(struct ps_progress *p)
{
    if (!p->on || !p->drawn)
        return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    p->drawn = false;
}

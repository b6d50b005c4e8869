/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/backend/cpu/layers.h"

#include "trainer/backend/cpu/parallel.h"

#include <math.h>
#include <string.h>

enum { MAX_BLOCK = 16 };

int ps_shape_blocks(const struct ps_shape *s)
{
    return (s->channels + s->block - 1) / s->block;
}

size_t ps_shape_image(const struct ps_shape *s)
{
    return (size_t)ps_shape_blocks(s) * (size_t)s->block * (size_t)s->extent * (size_t)s->extent;
}

size_t ps_shape_floats(const struct ps_shape *s)
{
    return (size_t)s->count * ps_shape_image(s);
}

/* --- BatchNorm --- */

enum { MEAN, INVERSE, FACTOR, SHIFT, K0, K1 };

struct norm_job {
    const struct ps_norm *n;
    bool batch, relu, accumulate;
    int slices;           /* parts that a channel block's images are cut into */
    const double *shared; /* the message of all ranks; NULL: the batch is this rank's alone */
    const float *x, *z, *y, *g0, *g1;
    float *out, *masked, *dx, *dscale, *dshift;
};

/* A channel block is one unit of work, so that its second pass finds the data of its first still in the
 * cache. With fewer blocks than threads each is cut into slices of images, with a meeting point between the
 * passes. */
static int slices(const struct ps_norm *n)
{
    int blocks = ps_shape_blocks(&n->shape);
    if (blocks >= n->threads)
        return 1;
    int s = (n->threads + blocks - 1) / blocks;
    return s < n->shape.count ? s : n->shape.count;
}

size_t ps_norm_partial(int threads, int blocks)
{
    return (size_t)(blocks + threads) * 2 * MAX_BLOCK;
}

static struct ps_rows rows_of(const struct norm_job *j, int slice, int *ret_first)
{
    const struct ps_shape *s = &j->n->shape;
    int first = (int)((int64_t)s->count * slice / j->slices),
        end = (int)((int64_t)s->count * (slice + 1) / j->slices);
    *ret_first = first;
    return (struct ps_rows){
        .rows = end - first, .hw = s->extent * s->extent, .block = s->block, .stride = ps_shape_image(s)};
}

static size_t offset_of(const struct norm_job *j, int block, int first)
{
    const struct ps_shape *s = &j->n->shape;
    return (size_t)first * ps_shape_image(s) +
           (size_t)block * (size_t)(s->extent * s->extent) * (size_t)s->block;
}

static float *stat(const struct norm_job *j, int which, int block)
{
    return j->n->stats + (size_t)which * j->n->stats_length + (size_t)block * (size_t)j->n->shape.block;
}

static void forward_sums(const struct norm_job *j, int unit)
{
    int first, block = unit / j->slices;
    struct ps_rows rows = rows_of(j, unit % j->slices, &first);
    double *p = j->n->partial + (size_t)unit * 2 * MAX_BLOCK;
    j->n->kernels->moments(&rows, j->x + offset_of(j, block, first), p, p + MAX_BLOCK);
}

/* One channel's moments over the slices: count, mean, sum of squared deviations. */
static void merge_moments(const struct norm_job *j, int block, int l, double *ret_count, double *ret_mean,
                          double *ret_m2)
{
    double count = 0, mean = 0, m2 = 0;
    for (int k = 0; k < j->slices; k++) {
        int first;
        struct ps_rows rows = rows_of(j, k, &first);
        const double *p = j->n->partial + ((size_t)block * (size_t)j->slices + (size_t)k) * 2 * MAX_BLOCK;
        double part = (double)rows.rows * rows.hw, total = count + part, delta = p[l] - mean;
        mean += delta * part / total;
        m2 += p[MAX_BLOCK + l] + delta * delta * count * part / total;
        count = total;
    }
    *ret_count = count;
    *ret_mean = mean;
    *ret_m2 = m2;
}

/* Turns the moments of a channel block, or the running statistics, into y = x * factor + shift. */
static void forward_finish(const struct norm_job *j, int block)
{
    const struct ps_norm *n = j->n;
    const struct ps_shape *s = &n->shape;
    float *mean = stat(j, MEAN, block), *inverse = stat(j, INVERSE, block);
    float *factor = stat(j, FACTOR, block), *shift = stat(j, SHIFT, block);
    for (int l = 0; l < s->block && block * s->block + l < s->channels; l++) {
        int c = block * s->block + l;
        double m = (double)n->running_mean[c], var = (double)n->running_var[c];
        if (j->batch) {
            double count, m2;
            if (j->shared) {
                count = j->shared[0];
                m = j->shared[1 + c];
                m2 = j->shared[1 + s->channels + c];
            } else {
                merge_moments(j, block, l, &count, &m, &m2);
            }
            var = m2 / count;
            double momentum = (double)n->momentum, unbiased = count > 1 ? m2 / (count - 1) : 0;
            n->running_mean[c] = (float)((1 - momentum) * (double)n->running_mean[c] + momentum * m);
            n->running_var[c] = (float)((1 - momentum) * (double)n->running_var[c] + momentum * unbiased);
        }
        double inv = 1 / sqrt(var + (double)n->eps), f = inv * (double)n->scale[c];
        mean[l] = (float)m;
        inverse[l] = (float)inv;
        factor[l] = (float)f;
        shift[l] = (float)((double)n->shift[c] - m * f);
    }
}

static void forward_apply(const struct norm_job *j, int unit)
{
    int first, block = unit / j->slices;
    struct ps_rows rows = rows_of(j, unit % j->slices, &first);
    size_t at = offset_of(j, block, first);
    j->n->kernels->affine(&rows, j->x + at, stat(j, FACTOR, block), stat(j, SHIFT, block),
                          j->z ? j->z + at : NULL, j->relu, j->out + at);
}

static void forward_whole(void *context, int block)
{
    const struct norm_job *j = context;
    if (j->batch)
        forward_sums(j, block);
    forward_finish(j, block);
    forward_apply(j, block);
}

static void forward_sums_unit(void *context, int unit)
{
    forward_sums(context, unit);
}

static void forward_apply_unit(void *context, int unit)
{
    forward_apply(context, unit);
}

/* What this rank tells the others of its part of the batch. */
static void put_moments(const struct norm_job *j)
{
    const struct ps_shape *s = &j->n->shape;
    double *own = j->n->own;
    for (int c = 0; c < s->channels; c++)
        merge_moments(j, c / s->block, c % s->block, &own[0], &own[1 + c], &own[1 + s->channels + c]);
}

int ps_norm_forward(const struct ps_norm *n, bool batch, const float *x, const float *z, bool relu, float *y,
                    struct ps_error *err)
{
    struct norm_job j = {.n = n, .batch = batch, .relu = relu, .slices = slices(n), .x = x, .z = z, .out = y};
    int blocks = ps_shape_blocks(&n->shape);
    const bool together = batch && n->exchange->sync;
    if (j.slices == 1 && !together) {
        ps_parallel_for(n->threads, blocks, forward_whole, &j);
        return 0;
    }
    if (batch)
        ps_parallel_for(n->threads, blocks * j.slices, forward_sums_unit, &j);
    if (together) {
        put_moments(&j);
        int code = ps_bn_share(n->exchange, n->own, n->shape.channels, PS_BN_MOMENTS, &j.shared, err);
        if (code < 0)
            return code;
    }
    for (int i = 0; i < blocks; i++)
        forward_finish(&j, i);
    ps_parallel_for(n->threads, blocks * j.slices, forward_apply_unit, &j);
    return 0;
}

static void backward_sums(const struct norm_job *j, int unit)
{
    int first, block = unit / j->slices;
    struct ps_rows rows = rows_of(j, unit % j->slices, &first);
    size_t at = offset_of(j, block, first);
    double *p = j->n->partial + (size_t)unit * 2 * MAX_BLOCK;
    memset(p, 0, 2 * MAX_BLOCK * sizeof *p);
    j->n->kernels->norm_sums(&rows, j->g0 + at, j->g1 ? j->g1 + at : NULL, j->y ? j->y + at : NULL, j->x + at,
                             stat(j, MEAN, block), j->masked ? j->masked + at : NULL, p, p + MAX_BLOCK);
}

/* One channel's sums over the slices: of the gradient, and of its product with the normalised input. */
static void merge_sums(const struct norm_job *j, int block, int l, double *ret_sum, double *ret_dot)
{
    double sum = 0, dot = 0;
    for (int k = 0; k < j->slices; k++) {
        const double *p = j->n->partial + ((size_t)block * (size_t)j->slices + (size_t)k) * 2 * MAX_BLOCK;
        sum += p[l];
        dot += p[MAX_BLOCK + l];
    }
    *ret_sum = sum;
    *ret_dot = dot * (double)stat(j, INVERSE, block)[l];
}

static void backward_finish(const struct norm_job *j, int block)
{
    const struct ps_shape *s = &j->n->shape;
    const float *inverse = stat(j, INVERSE, block);
    float *k0 = stat(j, K0, block), *k1 = stat(j, K1, block);
    for (int l = 0; l < s->block && block * s->block + l < s->channels; l++) {
        int c = block * s->block + l;
        double count = (double)s->count * s->extent * s->extent, sum, dot;
        merge_sums(j, block, l, &sum, &dot);
        j->dscale[c] = (j->accumulate ? j->dscale[c] : 0) + (float)dot;
        j->dshift[c] = (j->accumulate ? j->dshift[c] : 0) + (float)sum;
        if (j->shared) {
            count = j->shared[0];
            sum = j->shared[1 + c];
            dot = j->shared[1 + s->channels + c];
        }
        k0[l] = j->batch ? (float)(sum / count) : 0;
        k1[l] = j->batch ? (float)(dot * (double)inverse[l] / count) : 0;
    }
}

static void put_sums(const struct norm_job *j)
{
    const struct ps_shape *s = &j->n->shape;
    double *own = j->n->own;
    own[0] = (double)s->count * s->extent * s->extent;
    for (int c = 0; c < s->channels; c++)
        merge_sums(j, c / s->block, c % s->block, &own[1 + c], &own[1 + s->channels + c]);
}

static void backward_apply(const struct norm_job *j, int unit)
{
    int first, block = unit / j->slices;
    struct ps_rows rows = rows_of(j, unit % j->slices, &first);
    size_t at = offset_of(j, block, first);
    const float *d = j->masked ? j->masked : j->g0;
    j->n->kernels->norm_input(&rows, d + at, j->x + at, stat(j, MEAN, block), stat(j, FACTOR, block),
                              stat(j, K0, block), stat(j, K1, block), j->dx + at);
}

static void backward_whole(void *context, int block)
{
    const struct norm_job *j = context;
    backward_sums(j, block);
    backward_finish(j, block);
    if (j->dx)
        backward_apply(j, block);
}

static void backward_sums_unit(void *context, int unit)
{
    backward_sums(context, unit);
}

static void backward_apply_unit(void *context, int unit)
{
    backward_apply(context, unit);
}

int ps_norm_backward(const struct ps_norm *n, bool batch, const float *g0, const float *g1, const float *y,
                     const float *x, float *masked, float *dx, float *dscale, float *dshift, bool accumulate,
                     struct ps_error *err)
{
    struct norm_job j = {.n = n,
                         .batch = batch,
                         .accumulate = accumulate,
                         .slices = slices(n),
                         .x = x,
                         .y = y,
                         .g0 = g0,
                         .g1 = g1,
                         .masked = masked,
                         .dx = dx,
                         .dscale = dscale,
                         .dshift = dshift};
    int blocks = ps_shape_blocks(&n->shape);
    const bool together = batch && n->exchange->sync;
    if (j.slices == 1 && !together) {
        ps_parallel_for(n->threads, blocks, backward_whole, &j);
        return 0;
    }
    ps_parallel_for(n->threads, blocks * j.slices, backward_sums_unit, &j);
    if (together) {
        put_sums(&j);
        int code = ps_bn_share(n->exchange, n->own, n->shape.channels, PS_BN_SUMS, &j.shared, err);
        if (code < 0)
            return code;
    }
    for (int i = 0; i < blocks; i++)
        backward_finish(&j, i);
    if (dx)
        ps_parallel_for(n->threads, blocks * j.slices, backward_apply_unit, &j);
    return 0;
}

/* --- pooling: units are images --- */

struct pool_job {
    const struct ps_op *op;
    const struct ps_shape *in, *out;
    const float *x, *y, *dy;
    float *to;
};

static void max_pool_image(void *context, int image)
{
    const struct pool_job *j = context;
    const struct ps_op *op = j->op;
    int h = j->in->extent, oh = j->out->extent, b = j->in->block;
    const float *x = j->x + (size_t)image * ps_shape_image(j->in);
    float *y = j->to + (size_t)image * ps_shape_image(j->out);
    for (int block = 0; block < ps_shape_blocks(j->in); block++, x += (size_t)h * h * b)
        for (int oy = 0; oy < oh; oy++)
            for (int ox = 0; ox < oh; ox++, y += b) {
                bool first = true;
                for (int ky = 0; ky < op->kernel; ky++)
                    for (int kx = 0; kx < op->kernel; kx++) {
                        int sy = oy * op->stride + ky - op->pad, sx = ox * op->stride + kx - op->pad;
                        if (sy < 0 || sy >= h || sx < 0 || sx >= h)
                            continue;
                        const float *p = x + ((size_t)sy * h + sx) * b;
                        for (int l = 0; l < b; l++)
                            y[l] = first || p[l] > y[l] || isnan(p[l]) ? p[l] : y[l];
                        first = false;
                    }
            }
}

static void max_pool_image_back(void *context, int image)
{
    const struct pool_job *j = context;
    const struct ps_op *op = j->op;
    int h = j->in->extent, oh = j->out->extent, b = j->in->block;
    const float *x = j->x + (size_t)image * ps_shape_image(j->in);
    const float *y = j->y + (size_t)image * ps_shape_image(j->out);
    const float *dy = j->dy + (size_t)image * ps_shape_image(j->out);
    float *dx = j->to + (size_t)image * ps_shape_image(j->in);
    memset(dx, 0, ps_shape_image(j->in) * sizeof *dx);
    for (int block = 0; block < ps_shape_blocks(j->in);
         block++, x += (size_t)h * h * b, dx += (size_t)h * h * b)
        for (int oy = 0; oy < oh; oy++)
            for (int ox = 0; ox < oh; ox++, y += b, dy += b) {
                bool open[MAX_BLOCK];
                memset(open, 1, sizeof open);
                for (int ky = 0; ky < op->kernel; ky++)
                    for (int kx = 0; kx < op->kernel; kx++) {
                        int sy = oy * op->stride + ky - op->pad, sx = ox * op->stride + kx - op->pad;
                        if (sy < 0 || sy >= h || sx < 0 || sx >= h)
                            continue;
                        size_t at = ((size_t)sy * h + sx) * b;
                        for (int l = 0; l < b; l++)
                            if (open[l] && x[at + (size_t)l] == y[l]) {
                                dx[at + (size_t)l] += dy[l];
                                open[l] = false;
                            }
                    }
            }
}

void ps_max_pool_forward(int threads, const struct ps_op *op, const struct ps_shape *in,
                         const struct ps_shape *out, const float *x, float *y)
{
    struct pool_job j = {.op = op, .in = in, .out = out, .x = x, .to = y};
    ps_parallel_for(threads, in->count, max_pool_image, &j);
}

void ps_max_pool_backward(int threads, const struct ps_op *op, const struct ps_shape *in,
                          const struct ps_shape *out, const float *x, const float *y, const float *dy,
                          float *dx)
{
    struct pool_job j = {.op = op, .in = in, .out = out, .x = x, .y = y, .dy = dy, .to = dx};
    ps_parallel_for(threads, in->count, max_pool_image_back, &j);
}

static void avg_pool_image(void *context, int image)
{
    const struct pool_job *j = context;
    int hw = j->in->extent * j->in->extent, b = j->in->block, c = j->in->channels;
    const float *x = j->x + (size_t)image * ps_shape_image(j->in);
    float *y = j->to + (size_t)image * (size_t)c;
    for (int block = 0; block < ps_shape_blocks(j->in); block++) {
        double sum[MAX_BLOCK] = {0};
        for (int k = 0; k < hw; k++, x += b)
            for (int l = 0; l < b; l++)
                sum[l] += (double)x[l];
        for (int l = 0; l < b && block * b + l < c; l++)
            y[block * b + l] = (float)(sum[l] / hw);
    }
}

static void avg_pool_image_back(void *context, int image)
{
    const struct pool_job *j = context;
    int hw = j->in->extent * j->in->extent, b = j->in->block, c = j->in->channels;
    const float *dy = j->dy + (size_t)image * (size_t)c;
    float *dx = j->to + (size_t)image * ps_shape_image(j->in);
    for (int block = 0; block < ps_shape_blocks(j->in); block++) {
        float share[MAX_BLOCK] = {0};
        for (int l = 0; l < b && block * b + l < c; l++)
            share[l] = dy[block * b + l] / (float)hw;
        for (int k = 0; k < hw; k++, dx += b)
            for (int l = 0; l < b; l++)
                dx[l] = share[l];
    }
}

void ps_avg_pool_forward(int threads, const struct ps_shape *in, const float *x, float *y)
{
    struct pool_job j = {.in = in, .x = x, .to = y};
    ps_parallel_for(threads, in->count, avg_pool_image, &j);
}

void ps_avg_pool_backward(int threads, const struct ps_shape *in, const float *dy, float *dx)
{
    struct pool_job j = {.in = in, .dy = dy, .to = dx};
    ps_parallel_for(threads, in->count, avg_pool_image_back, &j);
}

/* --- images and layouts --- */

struct load_job {
    const struct ps_batch *batch;
    int channels;
    float *out;
};

static void load_image(void *context, int image)
{
    const struct load_job *j = context;
    size_t hw = (size_t)j->batch->resolution * (size_t)j->batch->resolution,
           at = (size_t)image * (size_t)j->channels * hw;
    for (int c = 0; c < j->channels; c++, at += hw) {
        float scale = j->batch->scale[c % 3], shift = j->batch->shift[c % 3], *out = j->out + at;
        if (j->batch->pixel == PS_PIXEL_U8) {
            const uint8_t *from = (const uint8_t *)j->batch->images + at;
            for (size_t k = 0; k < hw; k++)
                out[k] = (float)from[k] * scale + shift;
        } else {
            const float *from = (const float *)j->batch->images + at;
            for (size_t k = 0; k < hw; k++)
                out[k] = from[k] * scale + shift;
        }
    }
}

void ps_load_images(int threads, const struct ps_batch *batch, int channels, float *out)
{
    struct load_job j = {batch, channels, out};
    ps_parallel_for(threads, batch->count, load_image, &j);
}

static size_t place(const struct ps_shape *s, int i, int c, int pixel)
{
    int hw = s->extent * s->extent;
    return (size_t)i * ps_shape_image(s) +
           ((size_t)(c / s->block) * (size_t)hw + (size_t)pixel) * (size_t)s->block + (size_t)(c % s->block);
}

void ps_to_nchw(const struct ps_shape *s, const float *from, float *to)
{
    for (int i = 0; i < s->count; i++)
        for (int c = 0; c < s->channels; c++)
            for (int k = 0; k < s->extent * s->extent; k++)
                *to++ = from[place(s, i, c, k)];
}

void ps_from_nchw(const struct ps_shape *s, const float *from, float *to)
{
    memset(to, 0, ps_shape_floats(s) * sizeof *to);
    for (int i = 0; i < s->count; i++)
        for (int c = 0; c < s->channels; c++)
            for (int k = 0; k < s->extent * s->extent; k++)
                to[place(s, i, c, k)] = *from++;
}

/* --- loss --- */

double ps_softmax_loss(int count, int classes, const float *logits, const int32_t *labels,
                       const struct ps_loss_config *config, float *gradient, int64_t *correct)
{
    double total = 0, s = (double)config->label_smoothing, even = s / classes;
    for (int i = 0; i < count; i++) {
        const float *l = logits + (size_t)i * (size_t)classes;
        int best = 0;
        for (int k = 1; k < classes; k++)
            if (l[k] > l[best])
                best = k;
        *correct += best == labels[i];
        double sum = 0, all = 0, top = (double)l[best];
        for (int k = 0; k < classes; k++) {
            sum += exp((double)l[k] - top);
            all += (double)l[k] - top;
        }
        double log_sum = log(sum);
        /* -sum(target * log p), with log p = l - top - log_sum */
        total += (1 - s) * (log_sum - ((double)l[labels[i]] - top)) + (s > 0 ? s * log_sum - even * all : 0);
        for (int k = 0; gradient && k < classes; k++) {
            double p = exp((double)l[k] - top - log_sum), target = even + (k == labels[i] ? 1 - s : 0);
            gradient[(size_t)i * (size_t)classes + (size_t)k] =
                (float)((double)config->grad_scale * (p - target));
        }
    }
    return total;
}

/* --- element by element: units are pieces that fit the cache --- */

enum { PIECE = 1 << 16 };

struct piece_job {
    const struct ps_kernels *kernels;
    size_t count;
    const float *a, *b;
    float *y;
    enum { RELU, RELU_BACK, ADD, COPY } what;
};

static void piece(void *context, int index)
{
    const struct piece_job *j = context;
    size_t at = (size_t)index * PIECE, n = j->count - at < PIECE ? j->count - at : PIECE;
    switch (j->what) {
    case RELU:
        j->kernels->relu(n, j->a + at, j->y + at);
        break;
    case RELU_BACK:
        j->kernels->relu_back(n, j->a + at, j->b + at, j->y + at);
        break;
    case ADD:
        j->kernels->add(n, j->a + at, j->b + at, j->y + at);
        break;
    case COPY:
        memcpy(j->y + at, j->a + at, n * sizeof *j->y);
        break;
    }
}

static void pieces(int threads, struct piece_job j)
{
    j.kernels = ps_cpu_kernels();
    ps_parallel_for(threads, (int)((j.count + PIECE - 1) / PIECE), piece, &j);
}

void ps_parallel_relu(int threads, size_t count, const float *x, float *y)
{
    pieces(threads, (struct piece_job){.count = count, .a = x, .y = y, .what = RELU});
}

void ps_parallel_relu_back(int threads, size_t count, const float *y, const float *dy, float *dx)
{
    pieces(threads, (struct piece_job){.count = count, .a = y, .b = dy, .y = dx, .what = RELU_BACK});
}

void ps_parallel_add(int threads, size_t count, const float *a, const float *b, float *y)
{
    pieces(threads, (struct piece_job){.count = count, .a = a, .b = b, .y = y, .what = ADD});
}

void ps_parallel_copy(int threads, size_t count, const float *x, float *y)
{
    pieces(threads, (struct piece_job){.count = count, .a = x, .y = y, .what = COPY});
}

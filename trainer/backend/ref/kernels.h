/* SPDX-License-Identifier: Apache-2.0
 * The ops' forward and backward formulas, for one element type. Included once with REAL float and once with
 * REAL double; K(name) names the instance. Tensors are NCHW and dense; hw is height * width of a square
 * image. Backward functions ADD to the gradients that they are given; a NULL gradient is not wanted.
 *
 * MUTATE(n, x) is x. A test compiles this with PS_MUTATION naming an int of its own; where that is n, the
 * sign turns over, and the test checks that the gradient tests notice. */
#ifndef MUTATE
#ifdef PS_MUTATION
extern int PS_MUTATION;
#define MUTATE(n, x) (PS_MUTATION == (n) ? -(x) : (x))
#else
#define MUTATE(n, x) (x)
#endif
#endif

/* One image [c, h, h] to columns [c * k * k, oh * oh]: the pixels that meet each weight. */
static void K(im2col)(const REAL *image, int c, int h, int k, int stride, int pad, int oh, REAL *col)
{
    for (int row = 0; row < c * k * k; row++) {
        int channel = row / (k * k), ky = row / k % k, kx = row % k;
        const REAL *plane = image + (size_t)channel * h * h;
        for (int y = 0; y < oh; y++)
            for (int x = 0; x < oh; x++) {
                int sy = y * stride + ky - pad, sx = x * stride + kx - pad;
                bool inside = sy >= 0 && sy < h && sx >= 0 && sx < h;
                *col++ = inside ? plane[sy * h + sx] : 0;
            }
    }
}

/* The transpose of im2col: adds columns back to the image. */
static void K(col2im)(const REAL *col, int c, int h, int k, int stride, int pad, int oh, REAL *image)
{
    for (int row = 0; row < c * k * k; row++) {
        int channel = row / (k * k), ky = row / k % k, kx = row % k;
        REAL *plane = image + (size_t)channel * h * h;
        for (int y = 0; y < oh; y++)
            for (int x = 0; x < oh; x++, col++) {
                int sy = y * stride + ky - pad, sx = x * stride + kx - pad;
                if (sy >= 0 && sy < h && sx >= 0 && sx < h)
                    plane[sy * h + sx] += MUTATE(9, *col);
            }
    }
}

/* out [m, n] += a [m, k] * b [k, n] */
static void K(matmul)(int m, int n, int k, const REAL *a, const REAL *b, REAL *out)
{
    for (int i = 0; i < m; i++)
        for (int p = 0; p < k; p++) {
            REAL f = a[(size_t)i * k + p];
            const REAL *restrict row = b + (size_t)p * n;
            REAL *restrict o = out + (size_t)i * n;
            for (int j = 0; j < n; j++)
                o[j] += f * row[j];
        }
}

/* out [m, n] += a [m, k] * b [n, k]^T. Sums of eight partial sums: faster, and rounding errors stay small. */
static void K(matmul_bt)(int m, int n, int k, const REAL *a, const REAL *b, REAL *out)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            const REAL *x = a + (size_t)i * k, *y = b + (size_t)j * k;
            REAL part[8] = {0}, sum = 0;
            int p = 0;
            for (; p + 8 <= k; p += 8)
                for (int l = 0; l < 8; l++)
                    part[l] += x[p + l] * y[p + l];
            for (; p < k; p++)
                sum += x[p] * y[p];
            for (int l = 0; l < 8; l++)
                sum += part[l];
            out[(size_t)i * n + j] += MUTATE(10, sum);
        }
}

/* out [m, n] += a [k, m]^T * b [k, n] */
static void K(matmul_at)(int m, int n, int k, const REAL *a, const REAL *b, REAL *out)
{
    for (int i = 0; i < m; i++)
        for (int p = 0; p < k; p++) {
            REAL f = MUTATE(11, a[(size_t)p * m + i]);
            const REAL *restrict row = b + (size_t)p * n;
            REAL *restrict o = out + (size_t)i * n;
            for (int j = 0; j < n; j++)
                o[j] += f * row[j];
        }
}

static void K(conv_forward)(int n, int c, int h, int oc, int oh, const struct ps_op *op, const REAL *x,
                            const REAL *w, REAL *y, REAL *col)
{
    int ckk = c * op->kernel * op->kernel, ohw = oh * oh;
    memset(y, 0, (size_t)n * oc * ohw * sizeof *y);
    for (int i = 0; i < n; i++) {
        K(im2col)(x + (size_t)i * c * h * h, c, h, op->kernel, op->stride, op->pad, oh, col);
        K(matmul)(oc, ohw, ckk, w, col, y + (size_t)i * oc * ohw);
    }
}

static void K(conv_backward)(int n, int c, int h, int oc, int oh, const struct ps_op *op, const REAL *x,
                             const REAL *w, const REAL *dy, REAL *dx, REAL *dw, REAL *col)
{
    int ckk = c * op->kernel * op->kernel, ohw = oh * oh;
    for (int i = 0; i < n; i++) {
        const REAL *dyi = dy + (size_t)i * oc * ohw;
        K(im2col)(x + (size_t)i * c * h * h, c, h, op->kernel, op->stride, op->pad, oh, col);
        K(matmul_bt)(oc, ckk, ohw, dyi, col, dw);
        if (dx) {
            memset(col, 0, (size_t)ckk * ohw * sizeof *col);
            K(matmul_at)(ckk, ohw, oc, w, dyi, col);
            K(col2im)(col, c, h, op->kernel, op->stride, op->pad, oh, dx + (size_t)i * c * h * h);
        }
    }
}

/* stats [2, c]: mean and 1 / sqrt(variance + eps) that were used. batch: of this batch, and the running ones
 * move (the variance unbiased; one element a channel has variance 0). Else the running ones are used. */
/* The batch's moments by channel: [count, mean[c], sum of squared deviations[c]]. */
static void K(bn_moments)(int n, int c, int hw, const REAL *x, double *moments)
{
    moments[0] = (double)n * hw;
    for (int k = 0; k < c; k++) {
        double mean = 0, squares = 0;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < hw; j++)
                mean += (double)x[((size_t)i * c + k) * hw + j];
        mean /= moments[0];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < hw; j++) {
                double d = (double)x[((size_t)i * c + k) * hw + j] - mean;
                squares += d * d;
            }
        moments[1 + k] = mean;
        moments[1 + c + k] = squares;
    }
}

/* moments: as above, of all images that share the statistics; NULL: by the running ones. */
static void K(bn_forward)(int n, int c, int hw, const struct ps_op *op, const double *moments, const REAL *x,
                          const REAL *scale, const REAL *shift, REAL *running_mean, REAL *running_var,
                          REAL *stats, REAL *y)
{
    for (int k = 0; k < c; k++) {
        double mean = (double)running_mean[k], var = (double)running_var[k];
        if (moments) {
            double count = moments[0], m = (double)op->momentum;
            double unbiased = count > 1 ? moments[1 + c + k] / (count - 1) : 0;
            mean = moments[1 + k];
            var = moments[1 + c + k] / count;
            running_mean[k] = (REAL)((1 - m) * (double)running_mean[k] + m * mean);
            running_var[k] = (REAL)((1 - m) * (double)running_var[k] + m * unbiased);
        }
        REAL used = (REAL)mean, inverse = (REAL)(1 / sqrt(var + (double)op->eps));
        stats[k] = used;
        stats[c + k] = inverse;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < hw; j++) {
                size_t at = ((size_t)i * c + k) * hw + j;
                y[at] = (x[at] - used) * inverse * scale[k] + shift[k];
            }
    }
}

/* By channel: [count, sum of dy [c], sum of dy * normalised x [c]]. */
static void K(bn_sums)(int n, int c, int hw, const REAL *x, const REAL *stats, const REAL *dy, double *sums)
{
    sums[0] = (double)n * hw;
    for (int k = 0; k < c; k++) {
        double mean = (double)stats[k], inverse = (double)stats[c + k], sum = 0, dot = 0;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < hw; j++) {
                size_t at = ((size_t)i * c + k) * hw + j;
                sum += (double)dy[at];
                dot += (double)dy[at] * ((double)x[at] - mean) * inverse;
            }
        sums[1 + k] = sum;
        sums[1 + c + k] = dot;
    }
}

/* own: sums of this batch, for the parameters' gradients; shared: of all images whose statistics were used
 * (own again, or all ranks'), NULL: the statistics were the running ones, which do not depend on x. */
static void K(bn_backward)(int n, int c, int hw, const double *own, const double *shared, const REAL *x,
                           const REAL *scale, const REAL *stats, const REAL *dy, REAL *dx, REAL *dscale,
                           REAL *dshift)
{
    for (int k = 0; k < c; k++) {
        double mean = (double)stats[k], inverse = (double)stats[c + k];
        dscale[k] += (REAL)MUTATE(1, own[1 + c + k]);
        dshift[k] += (REAL)MUTATE(2, own[1 + k]);
        if (!dx)
            continue;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < hw; j++) {
                size_t at = ((size_t)i * c + k) * hw + j;
                double d = (double)dy[at];
                if (shared) /* the batch's mean and variance depend on x too */
                    d -= (shared[1 + k] + ((double)x[at] - mean) * inverse * MUTATE(3, shared[1 + c + k])) /
                         shared[0];
                dx[at] += (REAL)(d * inverse * (double)scale[k]);
            }
    }
}

/* NaN passes, forward and backward, as in PyTorch: a broken weight must show in the loss. */
static void K(relu_forward)(size_t count, const REAL *x, REAL *y)
{
    for (size_t i = 0; i < count; i++)
        y[i] = x[i] < 0 ? 0 : x[i];
}

static void K(relu_backward)(size_t count, const REAL *y, const REAL *dy, REAL *dx)
{
    for (size_t i = 0; i < count; i++)
        dx[i] += y[i] <= 0 ? 0 : MUTATE(4, dy[i]);
}

/* chosen: where each maximum came from, for backward; the first of equals. */
static void K(max_pool_forward)(int planes, int h, int oh, const struct ps_op *op, const REAL *x, REAL *y,
                                int32_t *chosen)
{
    for (int p = 0; p < planes; p++, x += (size_t)h * h)
        for (int oy = 0; oy < oh; oy++)
            for (int ox = 0; ox < oh; ox++) {
                int best = -1;
                for (int ky = 0; ky < op->kernel; ky++)
                    for (int kx = 0; kx < op->kernel; kx++) {
                        int sy = oy * op->stride + ky - op->pad, sx = ox * op->stride + kx - op->pad;
                        if (sy < 0 || sy >= h || sx < 0 || sx >= h)
                            continue;
                        if (best < 0 || x[sy * h + sx] > x[best] || isnan(x[sy * h + sx]))
                            best = sy * h + sx;
                    }
                *y++ = x[best];
                *chosen++ = best;
            }
}

static void K(max_pool_backward)(int planes, int h, int oh, const int32_t *chosen, const REAL *dy, REAL *dx)
{
    for (int p = 0; p < planes; p++)
        for (int j = 0; j < oh * oh; j++)
            dx[(size_t)p * h * h + *chosen++] += MUTATE(5, *dy++);
}

static void K(avg_pool_forward)(int planes, int hw, const REAL *x, REAL *y)
{
    for (int p = 0; p < planes; p++) {
        double sum = 0;
        for (int j = 0; j < hw; j++)
            sum += (double)*x++;
        y[p] = (REAL)(sum / hw);
    }
}

static void K(avg_pool_backward)(int planes, int hw, const REAL *dy, REAL *dx)
{
    for (int p = 0; p < planes; p++)
        for (int j = 0; j < hw; j++)
            *dx++ += MUTATE(6, dy[p]) / (REAL)hw;
}

/* y [n, o] = x [n, c] * w [o, c]^T + b [o] */
static void K(dense_forward)(int n, int c, int o, const REAL *x, const REAL *w, const REAL *b, REAL *y)
{
    for (int i = 0; i < n; i++)
        memcpy(y + (size_t)i * o, b, (size_t)o * sizeof *y);
    K(matmul_bt)(n, o, c, x, w, y);
}

static void K(dense_backward)(int n, int c, int o, const REAL *x, const REAL *w, const REAL *dy, REAL *dx,
                              REAL *dw, REAL *db)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < o; k++)
            db[k] += MUTATE(7, dy[(size_t)i * o + k]);
    K(matmul_at)(o, c, n, dy, x, dw);
    if (dx)
        K(matmul)(n, c, o, dy, w, dx);
}

/* Softmax cross-entropy with smoothing s: the target is (1 - s) at the label, plus s / classes everywhere.
 * Returns the sum of the losses; dlogits [n, classes] may be NULL. */
static double K(loss)(int n, int classes, const REAL *logits, const int32_t *labels, double smoothing,
                      double grad_scale, REAL *dlogits, int64_t *correct)
{
    double total = 0;
    for (int i = 0; i < n; i++) {
        const REAL *l = logits + (size_t)i * classes;
        int best = 0;
        for (int k = 1; k < classes; k++)
            if (l[k] > l[best])
                best = k;
        *correct += best == labels[i];
        double sum = 0, loss = 0;
        for (int k = 0; k < classes; k++)
            sum += exp((double)(l[k] - l[best]));
        for (int k = 0; k < classes; k++) {
            double log_p = (double)(l[k] - l[best]) - log(sum);
            double target = (k == labels[i] ? 1 - smoothing : 0) + smoothing / classes;
            loss -= target > 0 ? target * log_p : 0;
            if (dlogits)
                dlogits[(size_t)i * classes + k] = (REAL)(grad_scale * MUTATE(8, exp(log_p) - target));
        }
        total += loss;
    }
    return total;
}

static void K(sgd)(const struct ps_param *p, const struct ps_optimizer_step *s, REAL *w, const REAL *g,
                   REAL *b)
{
    for (size_t i = 0; i < p->count; i++) {
        REAL d = g[i] + (REAL)(p->decay ? s->weight_decay : 0) * w[i];
        if (s->momentum != 0) {
            b[i] = s->step == 1 ? d : (REAL)s->momentum * b[i] + d;
            d = s->nesterov ? d + (REAL)s->momentum * b[i] : b[i];
        }
        w[i] -= (REAL)s->lr * d;
    }
}

static void K(adam)(const struct ps_param *p, const struct ps_optimizer_step *s, REAL *w, const REAL *g,
                    REAL *m, REAL *v)
{
    double correction1 = 1 - pow(s->beta1, (double)s->step), correction2 = 1 - pow(s->beta2, (double)s->step);
    for (size_t i = 0; i < p->count; i++) {
        REAL d = g[i] + (REAL)(p->decay ? s->weight_decay : 0) * w[i];
        m[i] = (REAL)s->beta1 * m[i] + (REAL)(1 - s->beta1) * d;
        v[i] = (REAL)s->beta2 * v[i] + (REAL)(1 - s->beta2) * d * d;
        double root = sqrt((double)v[i]) / sqrt(correction2) + s->eps;
        w[i] -= (REAL)(s->lr / correction1 * (double)m[i] / root);
    }
}

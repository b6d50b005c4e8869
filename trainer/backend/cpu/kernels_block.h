/* SPDX-License-Identifier: Apache-2.0
 * The loops for one channel block; included by kernels.c for each. */

static void F(moments)(const struct ps_rows *s, const float *x, double *ret_mean, double *ret_m2)
{
    double mean[BLOCK] = {0}, m2[BLOCK] = {0}, count = 0;
    for (int i = 0; i < s->rows; i++) {
        const VEC *p = (const VEC *)(x + (size_t)i * s->stride);
        /* Four sums, so that an addition does not wait for the one before it. */
        VEC s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        int j = 0;
        for (; j + 4 <= s->hw; j += 4) {
            s0 += p[j];
            s1 += p[j + 1];
            s2 += p[j + 2];
            s3 += p[j + 3];
        }
        for (; j < s->hw; j++)
            s0 += p[j];
        const VEC sum = (s0 + s1) + (s2 + s3), centre = sum / (float)s->hw;
        s0 = s1 = s2 = s3 = (VEC){0};
        for (j = 0; j + 4 <= s->hw; j += 4) {
            VEC d0 = p[j] - centre, d1 = p[j + 1] - centre, d2 = p[j + 2] - centre, d3 = p[j + 3] - centre;
            s0 += d0 * d0;
            s1 += d1 * d1;
            s2 += d2 * d2;
            s3 += d3 * d3;
        }
        for (; j < s->hw; j++) {
            VEC d = p[j] - centre;
            s0 += d * d;
        }
        const VEC squares = (s0 + s1) + (s2 + s3);
        double n = (double)s->hw, total = count + n;
        for (int l = 0; l < BLOCK; l++) {
            double delta = (double)sum[l] / n - mean[l];
            mean[l] += delta * n / total;
            m2[l] += (double)squares[l] + delta * delta * count * n / total;
        }
        count = total;
    }
    memcpy(ret_mean, mean, sizeof mean);
    memcpy(ret_m2, m2, sizeof m2);
}

static void F(affine)(const struct ps_rows *s, const float *x, const float *a, const float *c, const float *z,
                      bool relu, float *y)
{
    const VEC factor = *(const VEC *)a, shift = *(const VEC *)c;
    for (int i = 0; i < s->rows; i++) {
        size_t at = (size_t)i * s->stride;
        const VEC *p = (const VEC *)(x + at), *q = z ? (const VEC *)(z + at) : NULL;
        VEC *out = (VEC *)(y + at);
        if (q && relu)
            for (int j = 0; j < s->hw; j++) {
                VEC v = p[j] * factor + shift + q[j];
                out[j] = (VEC)((MASK)v & ~(MASK)(v < 0));
            }
        else if (q)
            for (int j = 0; j < s->hw; j++)
                out[j] = p[j] * factor + shift + q[j];
        else if (relu)
            for (int j = 0; j < s->hw; j++) {
                VEC v = p[j] * factor + shift;
                out[j] = (VEC)((MASK)v & ~(MASK)(v < 0));
            }
        else
            for (int j = 0; j < s->hw; j++)
                out[j] = p[j] * factor + shift;
    }
}

static void F(norm_sums)(const struct ps_rows *s, const float *g0, const float *g1, const float *y,
                         const float *x, const float *mean, float *masked, double *ret_sum, double *ret_dot)
{
    const VEC centre = *(const VEC *)mean;
    double sums[BLOCK] = {0}, dots[BLOCK] = {0};
    for (int i = 0; i < s->rows; i++) {
        size_t at = (size_t)i * s->stride;
        const VEC *a = (const VEC *)(g0 + at), *b = g1 ? (const VEC *)(g1 + at) : NULL,
                  *p = (const VEC *)(x + at);
        const VEC *q = y ? (const VEC *)(y + at) : NULL;
        VEC *out = masked ? (VEC *)(masked + at) : NULL;
        VEC sum = {0}, dot = {0}, sum1 = {0}, dot1 = {0};
        int j = 0;
        for (; j + 2 <= s->hw; j += 2) {
            VEC d0 = a[j], d1 = a[j + 1];
            if (b) {
                d0 += b[j];
                d1 += b[j + 1];
            }
            if (q) {
                d0 = (VEC)((MASK)d0 & ~(MASK)(q[j] <= 0));
                d1 = (VEC)((MASK)d1 & ~(MASK)(q[j + 1] <= 0));
            }
            if (out) {
                out[j] = d0;
                out[j + 1] = d1;
            }
            sum += d0;
            sum1 += d1;
            dot += d0 * (p[j] - centre);
            dot1 += d1 * (p[j + 1] - centre);
        }
        for (; j < s->hw; j++) {
            VEC d0 = a[j];
            if (b)
                d0 += b[j];
            if (q)
                d0 = (VEC)((MASK)d0 & ~(MASK)(q[j] <= 0));
            if (out)
                out[j] = d0;
            sum += d0;
            dot += d0 * (p[j] - centre);
        }
        sum += sum1;
        dot += dot1;
        for (int l = 0; l < BLOCK; l++) {
            sums[l] += (double)sum[l];
            dots[l] += (double)dot[l];
        }
    }
    for (int l = 0; l < BLOCK; l++) {
        ret_sum[l] += sums[l];
        ret_dot[l] += dots[l];
    }
}

static void F(norm_input)(const struct ps_rows *s, const float *d, const float *x, const float *mean,
                          const float *a, const float *k0, const float *k1, float *dx)
{
    const VEC centre = *(const VEC *)mean, factor = *(const VEC *)a, c0 = *(const VEC *)k0,
              c1 = *(const VEC *)k1;
    for (int i = 0; i < s->rows; i++) {
        size_t at = (size_t)i * s->stride;
        const VEC *g = (const VEC *)(d + at), *p = (const VEC *)(x + at);
        VEC *out = (VEC *)(dx + at);
        for (int j = 0; j < s->hw; j++)
            out[j] = factor * (g[j] - c0 - (p[j] - centre) * c1);
    }
}

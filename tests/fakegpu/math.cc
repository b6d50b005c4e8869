/* SPDX-License-Identifier: Apache-2.0
 * Stand-ins for the parts of cuBLAS (GemmEx) and cuDNN (convolutions by descriptors, NHWC) that a trainer
 * calls. Sums are taken in float32 and rounded once at the end. */
#include "fake.h"

#include <cmath>
#include <cstring>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cudnn.h>
#include <mutex>
#include <set>
#include <vector>

using fake::device_range;
using fake::report;
using fake::touch;

struct cublasContext {
    int device;
    cudaStream_t stream = nullptr;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;
};
struct cudnnContext {
    int device;
    cudaStream_t stream = nullptr;
};
struct cudnnTensorStruct {
    bool set = false;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    int n = 0, c = 0, h = 0, w = 0;
};
struct cudnnFilterStruct : cudnnTensorStruct {
};
struct cudnnConvolutionStruct {
    bool set = false;
    int pad_h = 0, pad_w = 0, stride_h = 1, stride_w = 1, dilation_h = 1, dilation_w = 1;
    cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};

namespace
{

std::mutex guard; /* live */
std::set<const void *> live;

template <typename T> T *born(T *p)
{
    std::lock_guard<std::mutex> hold(guard);
    live.insert(p);
    return p;
}
bool lives(const void *p, const char *call)
{
    std::lock_guard<std::mutex> hold(guard);
    if (!live.count(p)) {
        report("%s: a handle or descriptor was destroyed or never made", call);
        return false;
    }
    return true;
}
template <typename T> bool die(T *p, const char *call)
{
    if (!lives(p, call)) {
        return false;
    }
    std::lock_guard<std::mutex> hold(guard);
    live.erase(p);
    delete p;
    return true;
}

float get(const void *p, size_t i, bool half)
{
    return half ? __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i])
                : static_cast<const float *>(p)[i];
}
void put(void *p, size_t i, bool half, float v)
{
    if (half) {
        static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(v);
    } else {
        static_cast<float *>(p)[i] = v;
    }
}

using Floats = std::vector<float>;
Floats load(const void *p, size_t n, bool half)
{
    touch(p, n * (half ? 2 : 4), false);
    Floats v(n);
    for (size_t i = 0; i < n; i++) {
        v[i] = get(p, i, half);
    }
    return v;
}
/* beta 0 does not read what was there, so NaN in it does not spread. */
void store(void *p, const Floats &v, bool half, float alpha, float beta)
{
    touch(p, v.size() * (half ? 2 : 4), true);
    for (size_t i = 0; i < v.size(); i++) {
        put(p, i, half, alpha * v[i] + (beta != 0 ? beta * get(p, i, half) : 0));
    }
}

bool on_device(int device, const char *call)
{
    if (device != fake::current_device()) {
        report("%s: the handle belongs to device %d, the current one is %d", call, device,
               fake::current_device());
        return false;
    }
    return true;
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *ret)
{
    *ret = born(new cublasContext{fake::current_device()});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    return die(h, "cublasDestroy") ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s)
{
    if (!lives(h, "cublasSetStream")) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *p, size_t n)
{
    if (!lives(h, "cublasSetWorkspace")) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    bool good = (uintptr_t)p % 256 == 0 && (!n || device_range(p, n, "cublasSetWorkspace"));
    return good ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m)
{
    if (!lives(h, "cublasSetMathMode")) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    h->math = m;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m)
{
    return lives(h, "cublasSetPointerMode") && m == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS
                                                                             : CUBLAS_STATUS_NOT_SUPPORTED;
}
const char *cublasGetStatusString(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_SUCCESS ? "success" : "cuBLAS error of the stand-in";
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType at, int lda, const void *b,
                            cudaDataType bt, int ldb, const void *beta, void *c, cudaDataType ct, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t)
{
    if (!lives(h, "cublasGemmEx") || !on_device(h->device, "cublasGemmEx")) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    auto known = [](cudaDataType t) { return t == CUDA_R_32F || t == CUDA_R_16BF; };
    bool computed = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_FAST_TF32 ||
                    compute == CUBLAS_COMPUTE_32F_PEDANTIC;
    if (!known(at) || at != bt || !known(ct) || !computed || (at == CUDA_R_32F && ct != CUDA_R_32F)) {
        report("cublasGemmEx: these types do not go together");
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    int rows_a = ta == CUBLAS_OP_N ? m : k, rows_b = tb == CUBLAS_OP_N ? k : n;
    if (m < 1 || n < 1 || k < 1 || lda < rows_a || ldb < rows_b || ldc < m) {
        report("cublasGemmEx: m %d, n %d, k %d with lda %d, ldb %d, ldc %d is not possible", m, n, k, lda,
               ldb, ldc);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    bool ha = at == CUDA_R_16BF, hc = ct == CUDA_R_16BF;
    auto span = [](int rows, int columns, int ld) {
        return (size_t)ld * (size_t)(columns - 1) + (size_t)rows;
    };
    size_t na = span(rows_a, ta == CUBLAS_OP_N ? k : m, lda),
           nb = span(rows_b, tb == CUBLAS_OP_N ? n : k, ldb);
    if (!device_range(a, na * (ha ? 2 : 4), "cublasGemmEx A") ||
        !device_range(b, nb * (ha ? 2 : 4), "cublasGemmEx B") ||
        !device_range(c, span(m, n, ldc) * (hc ? 2 : 4), "cublasGemmEx C")) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    float al = *static_cast<const float *>(alpha), be = *static_cast<const float *>(beta);
    cudaError_t e = fake::submit(h->stream, "cublasGemmEx", [=]() {
        Floats fa = load(a, na, ha), fb = load(b, nb, ha);
        size_t one = hc ? 2 : 4;
        for (int j = 0; j < n; j++) {
            char *column = static_cast<char *>(c) + (size_t)j * (size_t)ldc * one;
            Floats sums((size_t)m);
            for (int i = 0; i < m; i++) {
                float sum = 0;
                for (int p = 0; p < k; p++) {
                    sum += fa[ta == CUBLAS_OP_N ? (size_t)p * lda + i : (size_t)i * lda + p] *
                           fb[tb == CUBLAS_OP_N ? (size_t)j * ldb + p : (size_t)p * ldb + j];
                }
                sums[(size_t)i] = sum;
            }
            store(column, sums, hc, al, be);
        }
    });
    return e ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void)
{
    return CUDNN_VERSION;
}
const char *cudnnGetErrorString(cudnnStatus_t s)
{
    return s == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "cuDNN error of the stand-in";
}
cudnnStatus_t cudnnCreate(cudnnHandle_t *ret)
{
    *ret = born(new cudnnContext{fake::current_device()});
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t h)
{
    return die(h, "cudnnDestroy") ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s)
{
    if (!lives(h, "cudnnSetStream")) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    h->stream = s;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *ret)
{
    *ret = born(new cudnnTensorStruct);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t d)
{
    return !d || die(d, "cudnnDestroyTensorDescriptor") ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t *ret)
{
    *ret = born(new cudnnFilterStruct);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t d)
{
    return !d || die(d, "cudnnDestroyFilterDescriptor") ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t *ret)
{
    *ret = born(new cudnnConvolutionStruct);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t d)
{
    return !d || die(d, "cudnnDestroyConvolutionDescriptor") ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
static cudnnStatus_t describe(cudnnTensorStruct *d, cudnnTensorFormat_t format, cudnnDataType_t type, int n,
                              int c, int h, int w, const char *call)
{
    if (!lives(d, call)) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (n < 1 || c < 1 || h < 1 || w < 1) {
        report("%s: a size is below 1: %d x %d x %d x %d", call, n, c, h, w);
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (format != CUDNN_TENSOR_NHWC || (type != CUDNN_DATA_FLOAT && type != CUDNN_DATA_BFLOAT16)) {
        report("%s: the stand-in knows NHWC in float32 and bfloat16", call);
        return CUDNN_STATUS_NOT_SUPPORTED;
    }
    d->set = true, d->type = type, d->n = n, d->c = c, d->h = h, d->w = w;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t d, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w)
{
    return describe(d, format, type, n, c, h, w, "cudnnSetTensor4dDescriptor");
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int h, int w)
{
    return describe(d, format, type, k, c, h, w, "cudnnSetFilter4dDescriptor");
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t d, int ph, int pw, int sh, int sw,
                                              int dh, int dw, cudnnConvolutionMode_t mode,
                                              cudnnDataType_t compute)
{
    if (!lives(d, "cudnnSetConvolution2dDescriptor")) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (ph < 0 || pw < 0 || sh < 1 || sw < 1 || dh < 1 || dw < 1 || compute != CUDNN_DATA_FLOAT) {
        report("cudnnSetConvolution2dDescriptor: bad pad, stride or dilation, or not computing in float32");
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (mode != CUDNN_CROSS_CORRELATION) {
        report("cudnnSetConvolution2dDescriptor: flips the filter, which no trainer means");
        return CUDNN_STATUS_NOT_SUPPORTED;
    }
    d->set = true;
    d->pad_h = ph, d->pad_w = pw, d->stride_h = sh, d->stride_w = sw, d->dilation_h = dh, d->dilation_w = dw;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t d, cudnnMathType_t m)
{
    if (!lives(d, "cudnnSetConvolutionMathType")) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    d->math = m;
    return CUDNN_STATUS_SUCCESS;
}

} // extern "C"

namespace
{

struct Shape {
    cudnnTensorStruct x, w, y;
    cudnnConvolutionStruct c;
};

size_t elements(const cudnnTensorStruct &t)
{
    return (size_t)t.n * t.c * t.h * t.w;
}
size_t bytes(const cudnnTensorStruct &t)
{
    return elements(t) * (t.type == CUDNN_DATA_BFLOAT16 ? 2 : 4);
}

/* What every algorithm of the stand-in needs; not zero, so that a forgotten workspace shows. */
size_t needed(const Shape &s)
{
    return 1024 + 4 * (size_t)s.w.n;
}

cudnnStatus_t fits(cudnnHandle_t h, const cudnnTensorStruct *x, const cudnnFilterStruct *w,
                   const cudnnConvolutionStruct *c, const cudnnTensorStruct *y, const char *call, Shape *ret)
{
    if (!lives(h, call) || !lives(x, call) || !lives(w, call) || !lives(c, call) || !lives(y, call)) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (!on_device(h->device, call)) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (!x->set || !w->set || !c->set || !y->set || x->type != w->type || x->type != y->type) {
        report("%s: a descriptor is not set, or the types differ", call);
        return CUDNN_STATUS_BAD_PARAM;
    }
    int oh = (x->h + 2 * c->pad_h - c->dilation_h * (w->h - 1) - 1) / c->stride_h + 1;
    int ow = (x->w + 2 * c->pad_w - c->dilation_w * (w->w - 1) - 1) / c->stride_w + 1;
    if (x->c != w->c || y->c != w->n || y->n != x->n || y->h != oh || y->w != ow) {
        report("%s: output %d x %d x %d x %d of a convolution that gives %d x %d x %d x %d", call, y->n, y->c,
               y->h, y->w, x->n, w->n, oh, ow);
        return CUDNN_STATUS_BAD_PARAM;
    }
    *ret = {*x, *w, *y, *c};
    return CUDNN_STATUS_SUCCESS;
}

enum Pass { FORWARD, DATA, FILTER };

/* Calls f(y's pixel, x's pixel, tap) for every product of the convolution. */
template <typename F> void taps(const Shape &s, F f)
{
    for (int n = 0; n < s.y.n; n++) {
        for (int oy = 0; oy < s.y.h; oy++) {
            for (int ox = 0; ox < s.y.w; ox++) {
                for (int r = 0; r < s.w.h; r++) {
                    for (int q = 0; q < s.w.w; q++) {
                        int iy = oy * s.c.stride_h - s.c.pad_h + r * s.c.dilation_h;
                        int ix = ox * s.c.stride_w - s.c.pad_w + q * s.c.dilation_w;
                        if (iy >= 0 && ix >= 0 && iy < s.x.h && ix < s.x.w) {
                            f(((size_t)n * s.y.h + oy) * s.y.w + ox, ((size_t)n * s.x.h + iy) * s.x.w + ix,
                              (size_t)r * s.w.w + q);
                        }
                    }
                }
            }
        }
    }
}

cudnnStatus_t convolve(cudnnHandle_t h, Pass pass, const Shape &s, const void *alpha, const void *a,
                       const void *b, void *workspace, size_t size, const void *beta, void *out,
                       const char *call)
{
    const cudnnTensorStruct &ta = pass == FORWARD ? s.x : pass == DATA ? s.w : s.x;
    const cudnnTensorStruct &tb = pass == FORWARD ? s.w : s.y;
    const cudnnTensorStruct &to = pass == FORWARD ? s.y : pass == DATA ? s.x : s.w;
    if (size < needed(s) || !device_range(workspace, needed(s), call)) {
        report("%s: workspace of %zu bytes, %zu are needed", call, size, needed(s));
        return CUDNN_STATUS_BAD_PARAM;
    }
    if ((uintptr_t)a % 16 || (uintptr_t)b % 16 || (uintptr_t)out % 16 || (uintptr_t)workspace % 16) {
        report("%s: a pointer is not aligned to 16 bytes", call);
        return CUDNN_STATUS_BAD_PARAM;
    }
    if (!device_range(a, bytes(ta), call) || !device_range(b, bytes(tb), call) ||
        !device_range(out, bytes(to), call)) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    float al = *static_cast<const float *>(alpha), be = *static_cast<const float *>(beta);
    cudaError_t e = fake::submit(h->stream, call, [=]() {
        bool half = s.x.type == CUDNN_DATA_BFLOAT16;
        touch(workspace, needed(s), true); /* two calls at once with one workspace are a race */
        memset(workspace, 0xff, needed(s));
        const cudnnTensorStruct &first = pass == DATA ? s.w : s.x, &second = pass == FORWARD ? s.w : s.y;
        Floats fa = load(a, elements(first), half), fb = load(b, elements(second), half);
        Floats sum(elements(pass == FORWARD ? s.y : pass == DATA ? s.x : s.w));
        size_t C = (size_t)s.x.c, K = (size_t)s.y.c, T = (size_t)s.w.h * s.w.w;
        taps(s, [&](size_t y, size_t x, size_t t) {
            for (size_t k = 0; k < K; k++) {
                size_t w = (k * T + t) * C; /* KRSC */
                if (pass == FORWARD) {
                    float v = 0;
                    for (size_t c = 0; c < C; c++) {
                        v += fa[x * C + c] * fb[w + c];
                    }
                    sum[y * K + k] += v;
                } else if (pass == DATA) {
                    for (size_t c = 0; c < C; c++) {
                        sum[x * C + c] += fa[w + c] * fb[y * K + k];
                    }
                } else {
                    for (size_t c = 0; c < C; c++) {
                        sum[w + c] += fa[x * C + c] * fb[y * K + k];
                    }
                }
            }
        });
        store(out, sum, half, al, be);
    });
    return e ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

/* One algorithm that is determinate and a faster one that is not: filters must choose. */
template <typename Perf, typename Algo>
cudnnStatus_t answer(const Shape &s, Algo fast, Algo sure, int asked, int *returned, Perf *perf)
{
    if (asked < 1) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    *returned = asked < 2 ? 1 : 2;
    for (int i = 0; i < *returned; i++) {
        perf[i] = {};
        perf[i].algo = i ? sure : fast;
        perf[i].status = CUDNN_STATUS_SUCCESS;
        perf[i].time = (float)(i + 1);
        perf[i].memory = needed(s);
        perf[i].determinism = i || fast == sure ? CUDNN_DETERMINISTIC : CUDNN_NON_DETERMINISTIC;
        perf[i].mathType = s.c.math;
    }
    return CUDNN_STATUS_SUCCESS;
}

} // namespace

extern "C" {

#define SHAPE(x, w, c, y, call)                                                                              \
    Shape s;                                                                                                 \
    cudnnStatus_t status = fits(h, x, w, c, y, call, &s);                                                    \
    if (status) {                                                                                            \
        return status;                                                                                       \
    }

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t x,
                                                      const cudnnFilterDescriptor_t w,
                                                      const cudnnConvolutionDescriptor_t c,
                                                      const cudnnTensorDescriptor_t y,
                                                      cudnnConvolutionFwdAlgo_t, size_t *ret)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionForwardWorkspaceSize")
    *ret = needed(s);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t h, const cudnnFilterDescriptor_t w,
                                                           const cudnnTensorDescriptor_t y,
                                                           const cudnnConvolutionDescriptor_t c,
                                                           const cudnnTensorDescriptor_t x,
                                                           cudnnConvolutionBwdDataAlgo_t, size_t *ret)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionBackwardDataWorkspaceSize")
    *ret = needed(s);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t x,
                                                             const cudnnTensorDescriptor_t y,
                                                             const cudnnConvolutionDescriptor_t c,
                                                             const cudnnFilterDescriptor_t w,
                                                             cudnnConvolutionBwdFilterAlgo_t, size_t *ret)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionBackwardFilterWorkspaceSize")
    *ret = needed(s);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionForwardAlgorithm_v7(cudnnHandle_t h, const cudnnTensorDescriptor_t x,
                                                     const cudnnFilterDescriptor_t w,
                                                     const cudnnConvolutionDescriptor_t c,
                                                     const cudnnTensorDescriptor_t y, const int asked,
                                                     int *returned, cudnnConvolutionFwdAlgoPerf_t *perf)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionForwardAlgorithm_v7")
    return answer(s, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM,
                  CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, asked < 1 ? asked : 1, returned, perf);
}
cudnnStatus_t cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnnHandle_t h, const cudnnFilterDescriptor_t w,
                                                          const cudnnTensorDescriptor_t y,
                                                          const cudnnConvolutionDescriptor_t c,
                                                          const cudnnTensorDescriptor_t x, const int asked,
                                                          int *returned,
                                                          cudnnConvolutionBwdDataAlgoPerf_t *perf)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionBackwardDataAlgorithm_v7")
    return answer(s, CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, asked, returned,
                  perf);
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnnHandle_t h, const cudnnTensorDescriptor_t x,
                                                            const cudnnTensorDescriptor_t y,
                                                            const cudnnConvolutionDescriptor_t c,
                                                            const cudnnFilterDescriptor_t w, const int asked,
                                                            int *returned,
                                                            cudnnConvolutionBwdFilterAlgoPerf_t *perf)
{
    SHAPE(x, w, c, y, "cudnnGetConvolutionBackwardFilterAlgorithm_v7")
    return answer(s, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, asked,
                  returned, perf);
}
cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(cudnnHandle_t h, const cudnnTensorDescriptor_t x,
                                                     const void *, const cudnnFilterDescriptor_t w,
                                                     const void *, const cudnnConvolutionDescriptor_t c,
                                                     const cudnnTensorDescriptor_t y, void *out,
                                                     const int asked, int *returned,
                                                     cudnnConvolutionFwdAlgoPerf_t *perf, void *, size_t)
{
    SHAPE(x, w, c, y, "cudnnFindConvolutionForwardAlgorithmEx")
    cudaMemsetAsync(out, 0x7f, bytes(s.y), h->stream); /* searching overwrites the output */
    return cudnnGetConvolutionForwardAlgorithm_v7(h, x, w, c, y, asked, returned, perf);
}
cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(
    cudnnHandle_t h, const cudnnFilterDescriptor_t w, const void *, const cudnnTensorDescriptor_t y,
    const void *, const cudnnConvolutionDescriptor_t c, const cudnnTensorDescriptor_t x, void *out,
    const int asked, int *returned, cudnnConvolutionBwdDataAlgoPerf_t *perf, void *, size_t)
{
    SHAPE(x, w, c, y, "cudnnFindConvolutionBackwardDataAlgorithmEx")
    cudaMemsetAsync(out, 0x7f, bytes(s.x), h->stream);
    return cudnnGetConvolutionBackwardDataAlgorithm_v7(h, w, y, c, x, asked, returned, perf);
}
cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(
    cudnnHandle_t h, const cudnnTensorDescriptor_t x, const void *, const cudnnTensorDescriptor_t y,
    const void *, const cudnnConvolutionDescriptor_t c, const cudnnFilterDescriptor_t w, void *out,
    const int asked, int *returned, cudnnConvolutionBwdFilterAlgoPerf_t *perf, void *, size_t)
{
    SHAPE(x, w, c, y, "cudnnFindConvolutionBackwardFilterAlgorithmEx")
    cudaMemsetAsync(out, 0x7f, bytes(s.w), h->stream);
    return cudnnGetConvolutionBackwardFilterAlgorithm_v7(h, x, y, c, w, asked, returned, perf);
}
cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t h, const void *alpha, const cudnnTensorDescriptor_t x,
                                      const void *px, const cudnnFilterDescriptor_t w, const void *pw,
                                      const cudnnConvolutionDescriptor_t c, cudnnConvolutionFwdAlgo_t,
                                      void *work, size_t size, const void *beta,
                                      const cudnnTensorDescriptor_t y, void *py)
{
    SHAPE(x, w, c, y, "cudnnConvolutionForward")
    return convolve(h, FORWARD, s, alpha, px, pw, work, size, beta, py, "cudnnConvolutionForward");
}
cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t h, const void *alpha,
                                           const cudnnFilterDescriptor_t w, const void *pw,
                                           const cudnnTensorDescriptor_t y, const void *py,
                                           const cudnnConvolutionDescriptor_t c,
                                           cudnnConvolutionBwdDataAlgo_t, void *work, size_t size,
                                           const void *beta, const cudnnTensorDescriptor_t x, void *px)
{
    SHAPE(x, w, c, y, "cudnnConvolutionBackwardData")
    return convolve(h, DATA, s, alpha, pw, py, work, size, beta, px, "cudnnConvolutionBackwardData");
}
cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t h, const void *alpha,
                                             const cudnnTensorDescriptor_t x, const void *px,
                                             const cudnnTensorDescriptor_t y, const void *py,
                                             const cudnnConvolutionDescriptor_t c,
                                             cudnnConvolutionBwdFilterAlgo_t, void *work, size_t size,
                                             const void *beta, const cudnnFilterDescriptor_t w, void *pw)
{
    SHAPE(x, w, c, y, "cudnnConvolutionBackwardFilter")
    return convolve(h, FILTER, s, alpha, px, py, work, size, beta, pw, "cudnnConvolutionBackwardFilter");
}

} // extern "C"

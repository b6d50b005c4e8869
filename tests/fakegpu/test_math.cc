/* SPDX-License-Identifier: Apache-2.0
 * The stand-ins for cuBLAS and cuDNN compute what they should, and each of their checks fires. */
#include "check.h"

#include <cmath>
#include <cublas_v2.h>
#include <cudnn.h>
#include <vector>

using Floats = std::vector<float>;

static Floats series(size_t n, int seed)
{
    Floats v(n);
    for (size_t i = 0; i < n; i++) {
        v[i] = (float)((i * 37 + (size_t)seed * 11) % 17) / 8 - 1;
    }
    return v;
}
static float *upload(const Floats &v)
{
    float *p = nullptr;
    CHECK(!cudaMalloc((void **)&p, v.size() * 4));
    CHECK(!cudaMemcpy(p, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
    return p;
}
static Floats download(const float *p, size_t n)
{
    Floats v(n);
    CHECK(!cudaMemcpy(v.data(), p, n * 4, cudaMemcpyDeviceToHost));
    return v;
}
static double dot(const Floats &a, const Floats &b)
{
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

static void gemm()
{
    cublasHandle_t h;
    const float one = 1, zero = 0;
    Floats a = series(6, 1), b = series(12, 2);
    float *da = upload(a), *db = upload(b), *dc = upload(Floats(8, NAN));
    CHECK(!cublasCreate(&h));
    for (int form = 0; form < 4;
         form++) { /* C (2 x 4) = A (2 x 3) B (3 x 4), column major, each way stored */
        bool ta = form & 1, tb = form & 2;
        CHECK(!cublasGemmEx(h, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, 2, 4, 3, &one,
                            da, CUDA_R_32F, ta ? 3 : 2, db, CUDA_R_32F, tb ? 4 : 3, &zero, dc, CUDA_R_32F, 2,
                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        Floats c = download(dc, 8);
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++) {
                float want = 0;
                for (int k = 0; k < 3; k++) {
                    want += a[(size_t)(ta ? i * 3 + k : k * 2 + i)] * b[(size_t)(tb ? k * 4 + j : j * 3 + k)];
                }
                CHECK(fabsf(c[(size_t)(j * 2 + i)] - want) < 1e-6f);
            }
        }
    }
    CHECK(cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 4, 3, &one, da, CUDA_R_32F, 1, db, CUDA_R_32F, 3,
                       &zero, dc, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_INVALID_VALUE);
    FIRES("lda 1");
    CHECK(cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 4, 4, &one, da, CUDA_R_32F, 2, db, CUDA_R_32F, 4,
                       &zero, dc, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_INVALID_VALUE);
    FIRES("cublasGemmEx A");
    CHECK(cublasGemmEx(h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 4, 3, &one, da, CUDA_R_16BF, 2, db, CUDA_R_32F, 3,
                       &zero, dc, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_NOT_SUPPORTED);
    FIRES("types");
    CHECK(!cublasDestroy(h) && cublasSetStream(h, nullptr) == CUBLAS_STATUS_NOT_INITIALIZED);
    FIRES("destroyed");
    CHECK(!cudaFree(da) && !cudaFree(db) && !cudaFree(dc));
}

/* The three passes are each other's transposes, and the first is the formula. */
static void convolution()
{
    const int N = 2, C = 4, H = 5, K = 8, R = 3, stride = 2, O = 3;
    const float one = 1, zero = 0;
    cudnnHandle_t h;
    cudnnTensorDescriptor_t x, y;
    cudnnFilterDescriptor_t w;
    cudnnConvolutionDescriptor_t c;
    size_t size;
    CHECK(!cudnnCreate(&h) && !cudnnCreateTensorDescriptor(&x) && !cudnnCreateTensorDescriptor(&y) &&
          !cudnnCreateFilterDescriptor(&w) && !cudnnCreateConvolutionDescriptor(&c));
    CHECK(!cudnnSetTensor4dDescriptor(x, CUDNN_TENSOR_NHWC, CUDNN_DATA_FLOAT, N, C, H, H));
    CHECK(!cudnnSetTensor4dDescriptor(y, CUDNN_TENSOR_NHWC, CUDNN_DATA_FLOAT, N, K, O, O));
    CHECK(!cudnnSetFilter4dDescriptor(w, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NHWC, K, C, R, R));
    CHECK(!cudnnSetConvolution2dDescriptor(c, 1, 1, stride, stride, 1, 1, CUDNN_CROSS_CORRELATION,
                                           CUDNN_DATA_FLOAT));
    auto algo = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
    CHECK(!cudnnGetConvolutionForwardWorkspaceSize(h, x, w, c, y, algo, &size) && size > 0);
    Floats vx = series(N * H * H * C, 1), vw = series(K * R * R * C, 2), vy = series(N * O * O * K, 3);
    float *px = upload(vx), *pw = upload(vw), *pdy = upload(vy), *work = upload(Floats(size / 4 + 1));
    float *py = upload(Floats(vy.size(), NAN)), *pdx = upload(Floats(vx.size(), NAN)),
          *pdw = upload(Floats(vw.size(), NAN));
    CHECK(!cudnnConvolutionForward(h, &one, x, px, w, pw, c, algo, work, size, &zero, y, py));
    CHECK(!cudnnConvolutionBackwardData(h, &one, w, pw, y, pdy, c, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, work,
                                        size, &zero, x, pdx));
    CHECK(!cudnnConvolutionBackwardFilter(h, &one, x, px, y, pdy, c, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1,
                                          work, size, &zero, w, pdw));
    Floats got = download(py, vy.size());
    for (int n = 0; n < N; n++) {
        for (int oy = 0; oy < O; oy++) {
            for (int ox = 0; ox < O; ox++) {
                for (int k = 0; k < K; k++) {
                    float want = 0;
                    for (int r = 0; r < R; r++) {
                        for (int q = 0; q < R; q++) {
                            int iy = oy * stride + r - 1, ix = ox * stride + q - 1;
                            for (int ch = 0; iy >= 0 && ix >= 0 && iy < H && ix < H && ch < C; ch++) {
                                want += vx[(size_t)(((n * H + iy) * H + ix) * C + ch)] *
                                        vw[(size_t)(((k * R + r) * R + q) * C + ch)];
                            }
                        }
                    }
                    CHECK(fabsf(got[(size_t)(((n * O + oy) * O + ox) * K + k)] - want) < 1e-4f);
                }
            }
        }
    }
    double forward = dot(got, vy);
    CHECK(fabs(forward - dot(download(pdx, vx.size()), vx)) < 1e-3);
    CHECK(fabs(forward - dot(download(pdw, vw.size()), vw)) < 1e-3);
    CHECK(!cudnnConvolutionBackwardFilter(h, &one, x, px, y, pdy, c, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1,
                                          work, size, &one, w, pdw)); /* beta 1 adds */
    CHECK(fabs(2 * forward - dot(download(pdw, vw.size()), vw)) < 1e-3 && !ps_fake_reports());

    cudnnConvolutionBwdFilterAlgoPerf_t perf[4];
    int found;
    CHECK(!cudnnGetConvolutionBackwardFilterAlgorithm_v7(h, x, y, c, w, 4, &found, perf) && found == 2);
    CHECK(perf[0].determinism == CUDNN_NON_DETERMINISTIC && perf[1].determinism == CUDNN_DETERMINISTIC);

    CHECK(cudnnConvolutionForward(h, &one, x, px, w, pw, c, algo, work, size - 1, &zero, y, py) ==
          CUDNN_STATUS_BAD_PARAM);
    FIRES("workspace");
    CHECK(cudnnConvolutionForward(h, &one, x, px + 1, w, pw, c, algo, work, size, &zero, y, py) ==
          CUDNN_STATUS_BAD_PARAM);
    FIRES("aligned");
    CHECK(cudnnConvolutionForward(h, &one, x, px, w, pw, c, algo, work, size, &zero, x, py) ==
          CUDNN_STATUS_BAD_PARAM);
    FIRES("that gives");
    CHECK(cudnnSetTensor4dDescriptor(x, CUDNN_TENSOR_NHWC, CUDNN_DATA_FLOAT, 0, C, H, H) ==
          CUDNN_STATUS_BAD_PARAM);
    FIRES("below 1");
    CHECK(!cudnnSetTensor4dDescriptor(x, CUDNN_TENSOR_NHWC, CUDNN_DATA_BFLOAT16, N, C, H, H));
    CHECK(cudnnGetConvolutionForwardWorkspaceSize(h, x, w, c, y, algo, &size) == CUDNN_STATUS_BAD_PARAM);
    FIRES("types differ");
    CHECK(!cudnnDestroyTensorDescriptor(x));
    CHECK(cudnnGetConvolutionForwardWorkspaceSize(h, x, w, c, y, algo, &size) == CUDNN_STATUS_BAD_PARAM);
    FIRES("destroyed");
    CHECK(!cudnnDestroyTensorDescriptor(y) && !cudnnDestroyFilterDescriptor(w) &&
          !cudnnDestroyConvolutionDescriptor(c) && !cudnnDestroy(h));
    for (float *p : {px, pw, pdy, work, py, pdx, pdw}) {
        CHECK(!cudaFree(p));
    }
}

int main()
{
    gemm();
    convolution();
    printf("the stand-ins for cuBLAS and cuDNN hold, and their checks fire\n");
    return 0;
}

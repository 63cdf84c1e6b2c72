// h = x + residual (kept), y = RMSNorm(h): one block of threads a row. It lets the next kernel start at once, so that the
// weights of the following product stream while the norm is computed: cheaper than a norm inside the product, which
// every thread block would repeat.
#include <cuda_runtime.h>

#include "ptx.cuh"

namespace w12 {

constexpr int kThreads = 512;
constexpr int kVectors = 3;  // of 8 columns, that a thread may hold: up to 12288 columns

// Eight neighbouring columns.
struct alignas(16) Vector {
  __nv_bfloat162 pair[4];
};

__global__ void __launch_bounds__(kThreads) add_norm(const Vector* x, const Vector* residual, const Vector* weight,
                                                     Vector* sum, Vector* y, int columns, float eps, float offset) {
  __shared__ float partial[kThreads / 32];
  allow_next_kernel();
  const int vectors = columns / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * vectors;
  Vector held[kVectors], gain[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (const int i = threadIdx.x + v * kThreads; i < vectors) gain[v] = weight[i];  // no kernel before writes weights
  wait_for_previous_kernel();
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (const int i = threadIdx.x + v * kThreads; i < vectors) {
      held[v] = x[at + i];
      if (residual) {  // in float32, then rounded to BF16, as two operations would
        const Vector other = residual[at + i];
        for (int j = 0; j < 4; ++j) {
          const float2 one = __bfloat1622float2(held[v].pair[j]), two = __bfloat1622float2(other.pair[j]);
          held[v].pair[j] = __floats2bfloat162_rn(one.x + two.x, one.y + two.y);
        }
        sum[at + i] = held[v];
      }
    }
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (threadIdx.x + v * kThreads < vectors)
      for (int j = 0; j < 4; ++j) {
        const float2 pair = __bfloat1622float2(held[v].pair[j]);
        squares += pair.x * pair.x + pair.y * pair.y;
      }
  for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = squares;
  __syncthreads();
  float total = partial[threadIdx.x & (kThreads / 32 - 1)];  // a warp holds all of them, twice
  for (int step = kThreads / 64; step; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  const float scale = rsqrtf(total / columns + eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (const int i = threadIdx.x + v * kThreads; i < vectors) {
      for (int j = 0; j < 4; ++j) {
        const float2 value = __bfloat1622float2(held[v].pair[j]), g = __bfloat1622float2(gain[v].pair[j]);
        held[v].pair[j] = __floats2bfloat162_rn(value.x * scale * (g.x + offset), value.y * scale * (g.y + offset));
      }
      y[at + i] = held[v];
    }
}

}  // namespace w12

extern "C" const char* w12_add_norm(const void* x, const void* residual, const void* weight, void* sum, void* y, int rows,
                                    int columns, float eps, float offset, int dependent, void* stream) {
  using w12::Vector;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows);
  config.blockDim = dim3(w12::kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(
      &config, w12::add_norm, static_cast<const Vector*>(x), static_cast<const Vector*>(residual),
      static_cast<const Vector*>(weight), static_cast<Vector*>(sum), static_cast<Vector*>(y), columns, eps, offset);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

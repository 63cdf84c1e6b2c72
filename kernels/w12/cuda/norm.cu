// h = x + residual (kept), y = RMSNorm(h): one block of threads a row. It lets the next kernel start at once, so that the
// weights of the following product stream while the norm is computed: cheaper than a norm inside the product, which
// every thread block would repeat.
#include <cuda_runtime.h>

#include "ptx.cuh"

namespace w12 {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) add_norm(const __nv_bfloat16* x, const __nv_bfloat16* residual,
                                                     const __nv_bfloat16* weight, __nv_bfloat16* sum, __nv_bfloat16* y,
                                                     int columns, float eps, float offset) {
  extern __shared__ float row[];
  __shared__ float partial[kThreads / 32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * columns;
  float squares = 0.f;
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    float v = __bfloat162float(x[at + i]);
    if (residual) {  // rounded to BF16, as two operations would
      const __nv_bfloat16 added = __float2bfloat16(v + __bfloat162float(residual[at + i]));
      sum[at + i] = added;
      v = __bfloat162float(added);
    }
    row[i] = v;
    squares += v * v;
  }
  for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = squares;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < kThreads / 32; ++i) total += partial[i];
  const float scale = rsqrtf(total / columns + eps);
  for (int i = threadIdx.x; i < columns; i += kThreads)
    y[at + i] = __float2bfloat16(row[i] * scale * (__bfloat162float(weight[i]) + offset));
}

}  // namespace w12

extern "C" const char* w12_add_norm(const void* x, const void* residual, const void* weight, void* sum, void* y, int rows,
                                    int columns, float eps, float offset, int dependent, void* stream) {
  using b16 = __nv_bfloat16;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows);
  config.blockDim = dim3(w12::kThreads);
  config.dynamicSmemBytes = columns * sizeof(float);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(
      &config, w12::add_norm, static_cast<const b16*>(x), static_cast<const b16*>(residual),
      static_cast<const b16*>(weight), static_cast<b16*>(sum), static_cast<b16*>(y), columns, eps, offset);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

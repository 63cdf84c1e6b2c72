// Tiles back to a row-major BF16 matrix: for more rows of activations than the fused kernel takes, the library multiplies.
#include <cuda_runtime.h>

#include "decode.cuh"

namespace w12 {

constexpr int kWarps = 8;
constexpr int kPitch = kColumns + 8;  // halves; 16-byte aligned and free of bank conflicts

template <int FORMAT>
__global__ void __launch_bounds__(kWarps * 32) expand(const uint8_t* weight, const uint32_t* overflow, __nv_bfloat16* out,
                                                      int n, int row_tiles, int subtiles, int subtile_bytes, int paired) {
  __shared__ __align__(16) uint8_t scratch_storage[kWarps * kPatchBytes];
  __shared__ __align__(16) uint16_t rows_storage[kWarps][kRows * kPitch];
  __shared__ __align__(16) uint8_t packed_storage[kWarps][2048];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (at >= static_cast<int64_t>(row_tiles) * subtiles) return;
  const int tile = static_cast<int>(at / subtiles), subtile = static_cast<int>(at % subtiles);
  const uint4* source = reinterpret_cast<const uint4*>(weight + at * subtile_bytes);
  uint4* packed_at = reinterpret_cast<uint4*>(packed_storage[warp]);
  for (int i = lane; i < subtile_bytes / 16; i += 32) packed_at[i] = source[i];
  __syncwarp();
  Packed<FORMAT> packed;
  const uint32_t base = shared_address(packed_storage[warp]);
  packed.load(base, lane);
  uint32_t a[kRegisters];
  decode_subtile<FORMAT>(a, packed);
  if (FORMAT == kW12 && packed.header >> 8)
    patch(a, shared_address(scratch_storage) + warp * kPatchBytes, lane, base + kPlaneBytes, packed.header >> 8,
          (subtile_bytes - kPlaneBytes) / 4 - 1, overflow);
  const int g = lane >> 2, q = lane & 3;
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {  // register 4 s + 2 p + r: row g + 8 r, columns 16 s + 8 p + 2 q
    const int row = g + 8 * (i & 1), column = 16 * (i >> 2) + 8 * ((i >> 1) & 1) + 2 * q;
    *reinterpret_cast<uint32_t*>(&rows_storage[warp][row * kPitch + column]) = a[i];
  }
  __syncwarp();
  const int64_t k = static_cast<int64_t>(subtiles) * kColumns;
  for (int i = lane; i < kRows * 8; i += 32) {
    const int row = i >> 3, column = (i & 7) * 8;
    const int to = paired ? tile * 8 + (row & 7) + (row >> 3) * (n / 2) : tile * kRows + row;
    if (to < n)
      *reinterpret_cast<uint4*>(out + to * k + subtile * kColumns + column) =
          *reinterpret_cast<const uint4*>(&rows_storage[warp][row * kPitch + column]);
  }
}

}  // namespace w12

extern "C" const char* w12_expand(const uint8_t* weight, const uint32_t* overflow, void* out, int format, int n,
                                  int row_tiles, int subtiles, int subtile_bytes, int paired, void* stream) {
  using namespace w12;
  const int64_t warps = static_cast<int64_t>(row_tiles) * subtiles;
  const dim3 grid(static_cast<unsigned>((warps + kWarps - 1) / kWarps));
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  __nv_bfloat16* y = static_cast<__nv_bfloat16*>(out);
  if (format == kW12)
    expand<kW12><<<grid, kWarps * 32, 0, s>>>(weight, overflow, y, n, row_tiles, subtiles, subtile_bytes, paired);
  else
    expand<kBf16><<<grid, kWarps * 32, 0, s>>>(weight, overflow, y, n, row_tiles, subtiles, subtile_bytes, paired);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

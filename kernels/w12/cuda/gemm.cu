// y[m, n] = sum_k x[m, k] W[n, k] for 1..64 rows m: W in tiles (../layout.py), 12 bits or BF16 a weight, x and y BF16.
//
// A block of threads owns `width` row tiles (16 rows each) and, if a cluster of `split` blocks shares them, its part of
// the columns. One warp produces: bulk copies of weights and activations into a ring of stages in shared memory. The
// others consume: each decodes its R row tiles to tensor-core operands in registers, in order of the columns. So a
// result depends on the weights, on its own row of x, on `split` and on `depth` (warps that share the columns inside a
// block), never on how many rows ride along, on R, or on the ring. Parts are added in a fixed order, through (distributed)
// shared memory: no atomics, no workspace.
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdio>

#include "decode.cuh"

namespace w12 {

enum Epilogue { kStore = 0, kSilu = 1, kArgmax = 2 };

struct Arguments {
  const uint8_t* weight;        // [row_tiles, subtiles, subtile_bytes]
  const uint32_t* overflow;
  const __nv_bfloat16* x;       // [m, ldx]
  const __nv_bfloat16* residual;  // [m, ldy] or null; added after rounding the product, as two operations would
  __nv_bfloat16* y;             // [m, ldy]
  float* best_value;            // argmax: [blocks of the grid, m]
  int* best_index;
  int m, n, ldx, ldy;
  int row_tiles, subtiles, subtile_bytes;
  int width, split, depth, stages, stage_subtiles;
};

struct Maps {
  CUtensorMap weight;  // 3 dimensions: 8-byte words of a subtile, subtiles, row tiles; a stage is one box
  CUtensorMap x;       // 2 dimensions: columns, rows; a box is 64 columns of all rows, 128-byte swizzle
};

constexpr int kMaxStages = 16;

constexpr int kAlign = 1024;  // of the swizzle pattern

// Of one stage in shared memory: the box, up to the next place where the copy engine may write.
__host__ __device__ inline int weight_stage_bytes(const Arguments& p) {
  return (p.width * p.stage_subtiles * p.subtile_bytes + 127) / 128 * 128;
}
__host__ __device__ inline int x_stage_bytes(int stage_subtiles, int tokens) {
  return tokens * stage_subtiles * kColumns * 2;
}

// Fewer threads where a thread needs more registers.
__host__ __device__ constexpr int max_threads(int nt, int r) { return r == 2 ? 352 : nt == 8 ? 512 : 640; }

// A place in the ring of stages, and how often it came round (its lowest bit).
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
};

__device__ __forceinline__ bool better(float v, int i, float w, int j) { return v > w || (v == w && i < j); }

template <int FORMAT, int NT, int R, int EPILOGUE>
__global__ void __launch_bounds__(max_threads(NT, R), 1) gemm(const __grid_constant__ Arguments p, const __grid_constant__ Maps maps) {
  extern __shared__ uint8_t shared_memory[];
  uint8_t* const shared = shared_memory + (-shared_address(shared_memory) & (kAlign - 1));
  __shared__ __align__(8) uint64_t full_storage[kMaxStages], empty_storage[kMaxStages];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row_warps = (p.width + R - 1) / R, consumers = row_warps * p.depth;
  const uint32_t full = shared_address(full_storage), empty = shared_address(empty_storage);
  constexpr int kTokens = NT * 8;
  const uint32_t x_bytes = x_stage_bytes(p.stage_subtiles, kTokens);
  const uint32_t subtile = p.subtile_bytes, weight_bytes = weight_stage_bytes(p);
  const uint32_t x_ring = shared_address(shared);             // the activations of all stages, then the weights
  const uint32_t weight_ring = x_ring + p.stages * x_bytes;
  const uint32_t scratch_offset = p.stages * (x_bytes + weight_bytes);
  const uint32_t scratch = x_ring + scratch_offset + warp * kPatchBytes;

  const int rank = blockIdx.x % p.split, group = blockIdx.x / p.split, groups = gridDim.x / p.split;
  const int tiles = (p.row_tiles + p.width - 1) / p.width;
  const int blocks = (p.subtiles + kSplitSubtiles - 1) / kSplitSubtiles;
  const int first = (rank * blocks / p.split) * kSplitSubtiles;
  const int last = min(((rank + 1) * blocks / p.split) * kSplitSubtiles, p.subtiles);
  const int steps = (last - first + p.stage_subtiles - 1) / p.stage_subtiles;

  const int parts = p.split * p.depth;  // sums of parts of the columns, to be added in order

  allow_next_kernel();
  if (threadIdx.x == 0) {
    prefetch_map(maps.weight);
    prefetch_map(maps.x);
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, consumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  if (warp == consumers) {  // the producer
    if (lane == 0) {
      const uint64_t stream = policy_stream(), keep = policy_keep();
      const int mine = group < tiles ? (tiles - group + groups - 1) / groups : 0;
      int tile = group, at = first;  // of the weights
      auto weights = [&](int slot) {
        barrier_expect(full + 8 * slot, p.width * p.stage_subtiles * subtile + x_bytes);
        load_box(weight_ring + slot * weight_bytes, maps.weight, 0, at, tile * p.width, full + 8 * slot, stream);
        at += p.stage_subtiles;
        if (at >= last) at = first, tile += groups;
      };
      int x_at = first;
      auto activations = [&](int slot) {
        for (int sub = 0; sub < p.stage_subtiles; ++sub)
          load_box(x_ring + slot * x_bytes + sub * kTokens * 128, maps.x, (x_at + sub) * kColumns, 0, full + 8 * slot,
                   keep);
        x_at += p.stage_subtiles;
        if (x_at >= last) x_at = first;
      };
      const int total = mine * steps, ahead = min(p.stages, total);
      for (int it = 0; it < ahead; ++it) weights(it);
      wait_for_previous_kernel();
      for (int it = 0; it < ahead; ++it) activations(it);
      Ring to;
      for (int it = ahead; it < total; ++it, to.advance(p.stages)) {
        barrier_wait(empty + 8 * to.slot, to.phase);
        weights(to.slot);
        activations(to.slot);
      }
    }
    __syncwarp();
  } else {
    const int g = lane >> 2, q = lane & 3;
    float best_value[NT * 2];
    int best_index[NT * 2];
    if constexpr (EPILOGUE == kArgmax) {
#pragma unroll
      for (int i = 0; i < NT * 2; ++i) best_value[i] = -INFINITY, best_index[i] = 0x7fffffff;
    }
    wait_for_previous_kernel();
    Ring ring_at;
    const uint32_t room = (subtile - kPlaneBytes) / 4 - 1;  // patches in a record
    const int row_warp = warp % row_warps, own = warp / row_warps;  // its row tiles; its share of the subtiles
    const uint32_t w_offset = row_warp * R * p.stage_subtiles * subtile;
    // Token lane % 8, 16-byte chunk lane / 8 of 32 columns, at its place under the swizzle; then the other 32 columns.
    const uint32_t token = lane & 7, chunk = lane >> 3;
    const uint32_t x_offset[2] = {token * 128 + (chunk ^ token) * 16, token * 128 + ((chunk + 4) ^ token) * 16};
    for (int tile = group; tile < tiles; tile += groups) {
      const int row_tile = tile * p.width + row_warp * R;
      const int present = min(min(R, p.width - row_warp * R), p.row_tiles - row_tile);  // may be 0 or less
      float acc[R][NT][4];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[r][t][i] = 0.f;
      for (int at = first; at < last; at += p.stage_subtiles) {
        const int count = min(p.stage_subtiles, last - at);
        const uint32_t stage = weight_ring + ring_at.slot * weight_bytes;
        barrier_wait(full + 8 * ring_at.slot, ring_at.phase);
        if (present > 0 && own < count) {
          // A second row tile that is absent is computed from the first one's bytes and never stored.
          const uint32_t w_at[2] = {stage + w_offset, stage + w_offset + (R == 2 && present == 2) * p.stage_subtiles * subtile};
          const uint32_t x_at = x_ring + ring_at.slot * x_bytes;
          Packed<FORMAT> packed[R];
#pragma unroll
          for (int r = 0; r < R; ++r) packed[r].load(w_at[r] + own * subtile, lane);
#pragma unroll 1
          for (int sub = own; sub < count; sub += p.depth) {
            // All loads before the branch of the patches, and the next subtile's before the products: latencies overlap.
            constexpr int kEarly = NT <= 4 ? 2 * NT : NT;
            uint4 b[2 * NT];
#pragma unroll
            for (int i = 0; i < kEarly; ++i)
              b[i] = load_matrices(x_at + sub * kTokens * 128 + x_offset[i / NT] + (i % NT) * 1024);
            uint32_t a[R][kRegisters];
#pragma unroll
            for (int r = 0; r < R; ++r) decode_subtile<FORMAT>(a[r], packed[r]);
            if constexpr (FORMAT == kW12)
#pragma unroll
              for (int r = 0; r < R; ++r) {
                const uint32_t patches = packed[r].header >> 8;
                if (patches) patch(a[r], scratch, lane, w_at[r] + sub * subtile + kPlaneBytes, patches, room, p.overflow);
              }
            if (sub + p.depth < count)
#pragma unroll
              for (int r = 0; r < R; ++r) packed[r].load(w_at[r] + (sub + p.depth) * subtile, lane);
#pragma unroll
            for (int i = kEarly; i < 2 * NT; ++i)
              b[i] = load_matrices(x_at + sub * kTokens * 128 + x_offset[i / NT] + (i % NT) * 1024);
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
              for (int t = 0; t < NT; ++t) {
                const uint4& v = b[(s / 2) * NT + t];
#pragma unroll
                for (int r = 0; r < R; ++r)
                  mma(acc[r][t], a[r] + 4 * s, s % 2 ? v.z : v.x, s % 2 ? v.w : v.y);
              }
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * ring_at.slot);
        ring_at.advance(p.stages);
      }

      if (parts > 1) {  // to shared memory, over the ring: the host makes sure that this is the only tile
        asm volatile("bar.sync 1, %0;" ::"r"(consumers * 32) : "memory");
        const int stride = p.width * kRows;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (r < present) {
                const int token = t * 8 + 2 * q + (i & 1), row = (row_warp * R + r) * kRows + g + 8 * (i >> 1);
                reinterpret_cast<float*>(shared)[(own * kTokens + token) * stride + row] = acc[r][t][i];
              }
      } else if (present > 0) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int token = t * 8 + 2 * q + (i & 1);
              if (r >= present || token >= p.m) continue;
              if constexpr (EPILOGUE == kSilu) {  // rows g are gates, rows g + 8 their partners
                if (i >= 2) continue;
                const float gate = __bfloat162float(__float2bfloat16(acc[r][t][i]));
                const float up = __bfloat162float(__float2bfloat16(acc[r][t][i + 2]));
                const float silu = __bfloat162float(__float2bfloat16(gate / (1.f + expf(-gate))));
                p.y[static_cast<int64_t>(token) * p.ldy + (row_tile + r) * 8 + g] = __float2bfloat16(silu * up);
              } else {
                const int row = (row_tile + r) * kRows + g + 8 * (i >> 1);
                if (row >= p.n) continue;
                const __nv_bfloat16 rounded = __float2bfloat16(acc[r][t][i]);
                if constexpr (EPILOGUE == kArgmax) {
                  const float value = __bfloat162float(rounded);
                  const int k = t * 2 + (i & 1);
                  if (better(value, row, best_value[k], best_index[k])) best_value[k] = value, best_index[k] = row;
                } else {
                  const int64_t to = static_cast<int64_t>(token) * p.ldy + row;
                  p.y[to] = p.residual ? __float2bfloat16(__bfloat162float(rounded) + __bfloat162float(p.residual[to]))
                                       : rounded;
                }
              }
            }
      }
    }
    if constexpr (EPILOGUE == kArgmax) {
      // Lanes of one token differ in g only; then over warps, in the patch scratch (no longer needed).
#pragma unroll
      for (int k = 0; k < NT * 2; ++k)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          const float v = __shfl_xor_sync(0xffffffffu, best_value[k], step);
          const int j = __shfl_xor_sync(0xffffffffu, best_index[k], step);
          if (better(v, j, best_value[k], best_index[k])) best_value[k] = v, best_index[k] = j;
        }
      float* values = reinterpret_cast<float*>(shared + scratch_offset + warp * kPatchBytes);
      int* indices = reinterpret_cast<int*>(values + kTokens);
      if (g == 0)
#pragma unroll
        for (int k = 0; k < NT * 2; ++k) {
          const int token = (k >> 1) * 8 + 2 * q + (k & 1);
          values[token] = best_value[k], indices[token] = best_index[k];
        }
      asm volatile("bar.sync 1, %0;" ::"r"(consumers * 32) : "memory");
      for (int token = threadIdx.x; token < p.m; token += consumers * 32) {
        float v = -INFINITY;
        int j = 0x7fffffff;
        for (int w = 0; w < consumers; ++w) {
          const float* other =
              reinterpret_cast<float*>(shared + scratch_offset + w * kPatchBytes);
          const int index = reinterpret_cast<const int*>(other + kTokens)[token];
          if (better(other[token], index, v, j)) v = other[token], j = index;
        }
        p.best_value[blockIdx.x * p.m + token] = v;
        p.best_index[blockIdx.x * p.m + token] = j;
      }
    }
  }

  if (parts > 1) {  // every thread of the cluster
    if (p.split > 1) cluster_barrier();
    else __syncthreads();
    wait_for_previous_kernel();
    const int rows = min(p.width, p.row_tiles - group * p.width) * kRows, stride = p.width * kRows;
    const int outputs = EPILOGUE == kSilu ? rows / 2 : rows;
    for (int at = rank * blockDim.x + threadIdx.x; at < outputs * p.m; at += p.split * blockDim.x) {
      const int token = at / outputs, out = at % outputs;
      const int row = EPILOGUE == kSilu ? (out / 8) * kRows + out % 8 : out;
      float sum = 0.f, up = 0.f;
      for (int other = 0; other < p.split; ++other)
        for (int share = 0; share < p.depth; ++share) {
          const uint32_t from = x_ring + ((share * kTokens + token) * stride + row) * 4;
          sum += cluster_load(from, other);
          if constexpr (EPILOGUE == kSilu) up += cluster_load(from + 32, other);
        }
      const __nv_bfloat16 rounded = __float2bfloat16(sum);
      if constexpr (EPILOGUE == kSilu) {
        const float gate = __bfloat162float(rounded);
        const float silu = __bfloat162float(__float2bfloat16(gate / (1.f + expf(-gate))));
        p.y[static_cast<int64_t>(token) * p.ldy + group * p.width * 8 + out] =
            __float2bfloat16(silu * __bfloat162float(__float2bfloat16(up)));
      } else {
        const int n = group * stride + out;
        if (n < p.n) {
          const int64_t to = static_cast<int64_t>(token) * p.ldy + n;
          p.y[to] = p.residual ? __float2bfloat16(__bfloat162float(rounded) + __bfloat162float(p.residual[to])) : rounded;
        }
      }
    }
    if (p.split > 1) cluster_barrier();  // nobody leaves while others read its memory
  }
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {  // from the driver that is loaded, so that the library links to none
  static Encode found = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(pointer) : nullptr;
  }();
  return found;
}

bool make_maps(const Arguments& p, int tokens, Maps* maps) {
  const Encode encode = encoder();
  if (!encode) return false;
  const cuuint32_t ones[3] = {1, 1, 1};
  const cuuint32_t words = p.subtile_bytes / 8;  // at most 256, the limit of a box
  const cuuint64_t sizes[3] = {words, cuuint64_t(p.subtiles), cuuint64_t(p.row_tiles)};
  const cuuint64_t strides[2] = {words * 8, cuuint64_t(p.subtiles) * words * 8};
  const cuuint32_t box[3] = {words, cuuint32_t(p.stage_subtiles), cuuint32_t(p.width)};
  CUresult first = encode(&maps->weight, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, const_cast<uint8_t*>(p.weight), sizes,
                          strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  const cuuint64_t x_sizes[2] = {cuuint64_t(p.subtiles) * kColumns, cuuint64_t(p.m)};
  const cuuint64_t x_strides[1] = {cuuint64_t(p.ldx) * 2};
  const cuuint32_t x_box[2] = {kColumns, cuuint32_t(tokens)};
  CUresult second = encode(&maps->x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(p.x), x_sizes,
                           x_strides, x_box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return first == CUDA_SUCCESS && second == CUDA_SUCCESS;
}

template <int FORMAT, int NT, int R, int EPILOGUE>
cudaError_t launch(const Arguments& p, int groups, bool dependent, cudaStream_t stream) {
  auto kernel = gemm<FORMAT, NT, R, EPILOGUE>;
  const int consumers = (p.width + R - 1) / R * p.depth;
  if ((consumers + 1) * 32 > max_threads(NT, R) || p.stages > kMaxStages) return cudaErrorInvalidConfiguration;
  Maps maps;
  if (!make_maps(p, NT * 8, &maps)) return cudaErrorNotSupported;
  size_t bytes = kAlign + static_cast<size_t>(p.stages) * (weight_stage_bytes(p) +
                                                  x_stage_bytes(p.stage_subtiles, NT * 8)) +
                 (FORMAT == kW12 || EPILOGUE == kArgmax ? consumers * kPatchBytes : 0);
  const size_t reduction =
      p.split * p.depth > 1 ? kAlign + static_cast<size_t>(p.depth) * p.width * kRows * NT * 8 * 4 : 0;
  if (reduction > bytes) bytes = reduction;
  static size_t allowed = 0;  // per instantiation; raising it twice is harmless
  if (bytes > allowed) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    allowed = bytes;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(groups * p.split);
  config.blockDim = dim3((consumers + 1) * 32);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (p.split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = p.split;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, p, maps);
}

template <int FORMAT, int EPILOGUE>
cudaError_t choose(const Arguments& p, int r, int groups, bool dependent, cudaStream_t stream) {
  const int nt = (p.m + 7) / 8;
#define W12_CASE(limit, NT)                                                                \
  if (nt <= limit)                                                                         \
    return r == 2 ? launch<FORMAT, NT, 2, EPILOGUE>(p, groups, dependent, stream)          \
                  : launch<FORMAT, NT, 1, EPILOGUE>(p, groups, dependent, stream);
  W12_CASE(1, 1) W12_CASE(2, 2) W12_CASE(4, 4) W12_CASE(8, 8)
#undef W12_CASE
  return cudaErrorInvalidValue;
}

// The best of the blocks' candidates, lowest index first among equals.
__global__ void finish_argmax(const float* value, const int* index, int64_t* out, int blocks, int m) {
  wait_for_previous_kernel();
  const int token = blockIdx.x, lane = threadIdx.x;
  float v = -INFINITY;
  int j = 0x7fffffff;
  for (int b = lane; b < blocks; b += 32)
    if (better(value[b * m + token], index[b * m + token], v, j)) v = value[b * m + token], j = index[b * m + token];
  for (int step = 1; step < 32; step *= 2) {
    const float w = __shfl_xor_sync(0xffffffffu, v, step);
    const int k = __shfl_xor_sync(0xffffffffu, j, step);
    if (better(w, k, v, j)) v = w, j = k;
  }
  if (lane == 0) out[token] = j;
}

}  // namespace w12

extern "C" const char* w12_gemm(const w12::Arguments* p, int format, int epilogue, int r, int groups, int dependent,
                                void* stream) {
  using namespace w12;
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaErrorInvalidValue;
  if (format == kW12 && epilogue == kStore) error = choose<kW12, kStore>(*p, r, groups, dependent, s);
  if (format == kW12 && epilogue == kSilu) error = choose<kW12, kSilu>(*p, r, groups, dependent, s);
  if (format == kW12 && epilogue == kArgmax) error = choose<kW12, kArgmax>(*p, r, groups, dependent, s);
  if (format == kBf16 && epilogue == kStore) error = choose<kBf16, kStore>(*p, r, groups, dependent, s);
  if (format == kBf16 && epilogue == kSilu) error = choose<kBf16, kSilu>(*p, r, groups, dependent, s);
  if (format == kBf16 && epilogue == kArgmax) error = choose<kBf16, kArgmax>(*p, r, groups, dependent, s);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" const char* w12_finish_argmax(const float* value, const int* index, int64_t* out, int blocks, int m,
                                         void* stream) {
  w12::finish_argmax<<<m, 32, 0, static_cast<cudaStream_t>(stream)>>>(value, index, out, blocks, m);
  cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

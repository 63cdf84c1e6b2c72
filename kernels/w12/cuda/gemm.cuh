// y[m, n] = sum_k x[m, k] W[n, k] for 1..64 rows m: W in tiles (../layout.py), 12 bits or BF16 a weight, x and y BF16.
//
// A block of threads owns `width` row tiles (16 rows each). One warp produces: bulk copies of weights and activations into
// a ring of stages in shared memory. The others consume: each decodes its R row tiles to tensor-core operands in
// registers, in order of the columns. The subtiles of a row tile may be dealt out in turn to `split` blocks of a cluster
// and, inside a block, to `depth` warps: part i of split * depth gets subtiles i, i + split * depth, ... Parts are added in
// that order, through (distributed) shared memory: no atomics, no workspace. So a result depends on the weights, on its own
// row of x and on split * depth, never on how the parts are placed, on how many rows ride along, on R, or on the ring.
#pragma once
#include <cuda_runtime.h>

#include "decode.cuh"
#include "grouped.cuh"
#include "top.cuh"

namespace w12 {

enum Epilogue { kStore = 0, kSilu = 1, kBest = 2 };

struct Arguments {
  const uint8_t* weight;        // [row_tiles, subtiles, subtile_bytes]
  const uint32_t* overflow;
  const __nv_bfloat16* x;       // [m, ldx]
  const __nv_bfloat16* residual;  // [m, ldy] or null; added after rounding the product, as two operations would
  __nv_bfloat16* y;             // [m, ldy]
  float* best_value;            // kBest: [blocks of the grid, m, 16], equal values by index
  int* best_index;
  int m, n, ldx, ldy;
  int row_tiles, subtiles, subtile_bytes;
  int width, split, depth, stages, stage_subtiles;
  int boxed;                    // a stage of weights is one copy of a box, or one run of bytes for each row tile
  int top;                      // kBest: how many of the 16 matter
  int dependent;                // launched so that the previous kernel may still run
};

struct Maps {
  // A stage is one box. Subtile i lies at (i % split, i / split), so that those of a block are neighbours.
  CUtensorMap weight;  // 4 dimensions: 8-byte words of a subtile, the two of subtiles, row tiles
  CUtensorMap x;       // 4 dimensions: 64 columns, rows, the two of groups of 64 columns; 128-byte swizzle
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

// How warps multiply: each one row tile, each two, or four warps together one each (`grouped.cuh`).
enum Manner { kOne = 1, kTwo = 2, kGrouped = 4 };

// Fewer threads where a thread needs more registers.
__host__ __device__ constexpr int max_threads(int nt, int manner) {
  return manner == kGrouped ? 672 : manner == kTwo ? 352 : nt == 8 ? 512 : 640;
}
__host__ __device__ inline int row_warps_of(int width, int manner) {
  return manner == kGrouped ? (width + kGroup - 1) / kGroup * kGroup : (width + manner - 1) / manner;
}

// A place in the ring of stages, and how often it came round (its lowest bit).
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
};

template <int FORMAT, int NT, int MANNER, int EPILOGUE>
__global__ void __launch_bounds__(max_threads(NT, MANNER), 1) gemm(const __grid_constant__ Arguments p, const __grid_constant__ Maps maps) {
  constexpr int R = MANNER == kTwo ? 2 : 1;
  extern __shared__ uint8_t shared_memory[];
  uint8_t* const shared = shared_memory + (-shared_address(shared_memory) & (kAlign - 1));
  __shared__ __align__(8) uint64_t full_storage[kMaxStages], empty_storage[kMaxStages];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row_warps = row_warps_of(p.width, MANNER), consumers = row_warps * p.depth;
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
  auto start_of = [&](int tile) { return min(tile * p.width, p.row_tiles); };
  const int last = p.subtiles / p.split;  // subtiles of this block, numbered from 0
  const int steps = (last + p.stage_subtiles - 1) / p.stage_subtiles;

  const int parts = p.split * p.depth;  // sums of parts of the columns, to be added in order

  allow_next_kernel();
  const bool producer = warp == consumers;
  const int total = group < tiles ? (tiles - group + groups - 1) / groups * steps : 0, ahead = min(p.stages, total);
  uint64_t stream = 0, keep = 0;
  int tile_to_load = group, at_to_load = 0, x_to_load = 0;
  auto load_weights = [&](int slot) {  // by the whole warp
    const int begin = start_of(tile_to_load);
    const uint32_t target = weight_ring + slot * weight_bytes;
    if (p.boxed) {
      if (lane == 0) {
        barrier_expect(full + 8 * slot, p.width * p.stage_subtiles * subtile + x_bytes);
        load_box(target, maps.weight, 0, rank, at_to_load, begin, full + 8 * slot, stream);
      }
    } else {
      const int rows = start_of(tile_to_load + 1) - begin, count = min(p.stage_subtiles, last - at_to_load);
      if (lane == 0) barrier_expect(full + 8 * slot, rows * count * subtile + x_bytes);
      __syncwarp();
      const int run = p.split == 1 ? count : 1;  // subtiles of one copy
      for (int i = lane; i < rows * count / run; i += 32) {
        const int row = i * run / count, sub = i * run % count;
        load_run(target + (row * p.stage_subtiles + sub) * subtile,
                 p.weight + (static_cast<int64_t>(begin + row) * p.subtiles + (at_to_load + sub) * p.split + rank) * subtile,
                 run * subtile, full + 8 * slot, stream);
      }
    }
    at_to_load += p.stage_subtiles;
    if (at_to_load >= last) at_to_load = 0, tile_to_load += groups;
  };
  auto load_x = [&](int slot) {
    if (lane == 0) load_box(x_ring + slot * x_bytes, maps.x, 0, 0, rank, x_to_load, full + 8 * slot, keep);
    x_to_load += p.stage_subtiles;
    if (x_to_load >= last) x_to_load = 0;
  };
  if (producer) {  // its first loads leave before anybody else has begun
    if (lane == 0) {
      prefetch_map(maps.weight);
      prefetch_map(maps.x);
      for (int i = 0; i < p.stages; ++i) {
        barrier_init(full + 8 * i, 1);
        barrier_init(empty + 8 * i, consumers * 32);
      }
      asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
    }
    __syncwarp();
    stream = policy_stream(), keep = policy_keep();
    for (int it = 0; it < ahead; ++it) {
      load_weights(it);
      if (!p.dependent) load_x(it);
    }
  }
  __syncthreads();

  if (producer) {
    if (p.dependent) {  // all weights that fit are under way; now what the previous kernel computes
      wait_for_previous_kernel();
      for (int it = 0; it < ahead; ++it) load_x(it);
    }
    Ring to;
    for (int it = ahead; it < total; ++it, to.advance(p.stages)) {
      barrier_wait(empty + 8 * to.slot, to.phase);
      load_weights(to.slot);
      load_x(to.slot);
    }
    return;  // barriers from here on are among the consumers
  } else {
    const int g = lane >> 2, q = lane & 3;
    // kBest: the rounded logits of a tile, [token][row], and the lists of the tokens.
    const int pitch = p.width * kRows + 8;
    __nv_bfloat16* logits = reinterpret_cast<__nv_bfloat16*>(shared + scratch_offset + consumers * kPatchBytes);
    float* list_value = reinterpret_cast<float*>(logits + kTokens * pitch);
    int* list_index = reinterpret_cast<int*>(list_value + kTokens * kTop);
    if constexpr (EPILOGUE == kBest)
      for (int i = threadIdx.x; i < kTokens * kTop; i += consumers * 32)
        list_value[i] = -INFINITY, list_index[i] = kNoIndex;
    wait_for_previous_kernel();
    Ring ring_at;
    const uint32_t room = (subtile - kPlaneBytes) / 4 - 1;  // patches in a record
    const int own = warp / row_warps;  // its share of the subtiles
    int row_warp = warp % row_warps;   // its row tiles
    // The warps of a group that have none: not always on the same quarter of the multiprocessor.
    if constexpr (MANNER == kGrouped) row_warp = (row_warp & ~(kGroup - 1)) | ((row_warp + own) & (kGroup - 1));
    const uint32_t w_offset = row_warp * R * p.stage_subtiles * subtile;
    // Token lane % 8, 16-byte chunk lane / 8 of 32 columns, at its place under the swizzle; then the other 32 columns.
    const uint32_t token = lane & 7, chunk = lane >> 3;
    const uint32_t x_offset[2] = {token * 128 + (chunk ^ token) * 16, token * 128 + ((chunk + 4) ^ token) * 16};
    for (int tile = group; tile < tiles; tile += groups) {
      const int row_tile = start_of(tile) + row_warp * R;
      const int present = min(R, start_of(tile + 1) - row_tile);  // may be 0 or less
      float acc[R][NT][4];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[r][t][i] = 0.f;
      for (int at = 0; at < last; at += p.stage_subtiles) {
        const int count = min(p.stage_subtiles, last - at);
        const uint32_t stage = weight_ring + ring_at.slot * weight_bytes;
        barrier_wait(full + 8 * ring_at.slot, ring_at.phase);
        if constexpr (MANNER == kGrouped) {
          // A warp without a row tile multiplies by zeros: the instruction needs all four.
          const bool has_rows = present > 0;
          const uint32_t w_at = stage + w_offset, x_at = x_ring + ring_at.slot * x_bytes;
          Packed<FORMAT> packed;
          if (has_rows && own < count) packed.load(w_at + own * subtile, lane);
#pragma unroll 1
          for (int sub = own; sub < count; sub += p.depth) {
            uint32_t a[kRegisters] = {};
            if (has_rows) {
              decode_subtile<FORMAT>(a, packed);
              if constexpr (FORMAT == kW12) {
                const uint32_t patches = packed.header >> 8;
                if (patches) patch(a, scratch, lane, w_at + sub * subtile + kPlaneBytes, patches, room, p.overflow);
              }
              if (sub + p.depth < count) packed.load(w_at + (sub + p.depth) * subtile, lane);
            }
            __syncwarp();
            const uint64_t x_of = describe(x_at + sub * kTokens * 128);
            group_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) group_mma(acc[0], a + 4 * s, x_of + 2 * s);
            group_commit();
            group_wait();
          }
        } else if (present > 0 && own < count) {
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
        barrier_arrive(empty + 8 * ring_at.slot);
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
                if constexpr (EPILOGUE == kBest) {
                  logits[token * pitch + row - start_of(tile) * kRows] = rounded;
                } else {
                  const int64_t to = static_cast<int64_t>(token) * p.ldy + row;
                  p.y[to] = p.residual ? __float2bfloat16(__bfloat162float(rounded) + __bfloat162float(p.residual[to]))
                                       : rounded;
                }
              }
            }
      }
      if constexpr (EPILOGUE == kBest) {
        asm volatile("bar.sync 1, %0;" ::"r"(consumers * 32) : "memory");
        const int begin = start_of(tile) * kRows, rows = min(start_of(tile + 1) * kRows, p.n) - begin;
        for (int token = warp; token < p.m; token += consumers) {
          TopList list;
          if (lane < kTop) list.value = list_value[token * kTop + lane], list.index = list_index[token * kTop + lane];
          for (int row = lane; row - lane < rows; row += 32)
            list.offer(row < rows ? __bfloat162float(logits[token * pitch + row]) : -INFINITY,
                       row < rows ? begin + row : kNoIndex, p.top, lane);
          if (lane < kTop) list_value[token * kTop + lane] = list.value, list_index[token * kTop + lane] = list.index;
        }
        asm volatile("bar.sync 1, %0;" ::"r"(consumers * 32) : "memory");
      }
    }
    if constexpr (EPILOGUE == kBest)
      for (int i = threadIdx.x; i < p.m * kTop; i += consumers * 32) {
        p.best_value[blockIdx.x * p.m * kTop + i] = list_value[i];
        p.best_index[blockIdx.x * p.m * kTop + i] = list_index[i];
      }
  }

  if (parts > 1) {  // every consumer of the cluster
    if (p.split > 1) cluster_barrier();
    else asm volatile("bar.sync 1, %0;" ::"r"(consumers * 32) : "memory");
    const int begin = start_of(group), rows = (start_of(group + 1) - begin) * kRows, stride = p.width * kRows;
    const int outputs = EPILOGUE == kSilu ? rows / 2 : rows;
    auto part_of = [&](uint32_t address, int other) {
      return other == rank ? __uint_as_float(load_shared_word(address)) : cluster_load(address, other);
    };
    for (int at = rank * consumers * 32 + threadIdx.x; at < outputs * p.m; at += p.split * consumers * 32) {
      const int token = at / outputs, out = at % outputs;
      const int row = EPILOGUE == kSilu ? (out / 8) * kRows + out % 8 : out;
      float sum = 0.f, up = 0.f;
      for (int share = 0; share < p.depth; ++share)
        for (int other = 0; other < p.split; ++other) {
          const uint32_t from = x_ring + ((share * kTokens + token) * stride + row) * 4;
          sum += part_of(from, other);
          if constexpr (EPILOGUE == kSilu) up += part_of(from + 32, other);
        }
      const __nv_bfloat16 rounded = __float2bfloat16(sum);
      if constexpr (EPILOGUE == kSilu) {
        const float gate = __bfloat162float(rounded);
        const float silu = __bfloat162float(__float2bfloat16(gate / (1.f + expf(-gate))));
        p.y[static_cast<int64_t>(token) * p.ldy + begin * 8 + out] =
            __float2bfloat16(silu * __bfloat162float(__float2bfloat16(up)));
      } else {
        const int n = begin * kRows + out;
        if (n < p.n) {
          const int64_t to = static_cast<int64_t>(token) * p.ldy + n;
          p.y[to] = p.residual ? __float2bfloat16(__bfloat162float(rounded) + __bfloat162float(p.residual[to])) : rounded;
        }
      }
    }
    if (p.split > 1) cluster_barrier();  // nobody leaves while others read its memory
  }
}

}  // namespace w12

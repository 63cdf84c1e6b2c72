// The best 16 of a stream of (value, index), kept by a warp: lane i < 16 holds the i-th best, equal values by index.
#pragma once
#include "order.cuh"
#include "ptx.cuh"

namespace w12 {

constexpr int kTop = 16;
constexpr int kNoIndex = 0x7fffffff;

struct TopList {
  float value = -INFINITY;
  int index = kNoIndex;

  // Offer each lane's (v, i); only the first `wanted` places matter to the caller.
  __device__ __forceinline__ void offer(float v, int i, int wanted, int lane) {
    constexpr uint32_t kAll = 0xffffffffu;
    const float last_value = __shfl_sync(kAll, value, wanted - 1);
    const int last_index = __shfl_sync(kAll, index, wanted - 1);
    uint32_t candidates = __ballot_sync(kAll, better(v, i, last_value, last_index));
    while (candidates) {
      const int source = __ffs(candidates) - 1;
      candidates &= candidates - 1;
      const float cv = __shfl_sync(kAll, v, source);
      const int ci = __shfl_sync(kAll, i, source);
      const int place = __popc(__ballot_sync(kAll, lane < kTop && better(value, index, cv, ci)));
      const float before_value = __shfl_up_sync(kAll, value, 1);
      const int before_index = __shfl_up_sync(kAll, index, 1);
      if (lane == place) value = cv, index = ci;
      if (lane > place) value = before_value, index = before_index;
    }
  }
};

}  // namespace w12

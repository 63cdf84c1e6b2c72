// Four warps together: `wgmma` with decoded weights in registers and activations straight from shared memory.
//
// A warp of a group of four owns one row tile, as it does alone, and its operand and sum registers lie as those of
// `mma.m16n8k16` do. What changes is the other operand: the hardware reads it once for 64 rows of the weight, where each
// warp alone loads it for 16. At 64 tokens those loads are most of the shared memory's traffic. Compute capability 9.0 only.
#pragma once
#include "decode.cuh"

namespace w12 {

constexpr int kGroup = 4;  // warps

// Tokens x 64 columns as the copy engine leaves them: 128 bytes a token, swizzled over 8 tokens (1024 bytes, aligned).
// In units of 16 bytes; a step of 16 columns is two units further. PTX ISA, "matrix descriptor" of wgmma.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kNextTokens = 1024 / 16;
  return kSwizzle128 << 62 | kNextTokens << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}

// Before the first product and after registers that it uses were written.
__device__ __forceinline__ void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define W12_SUMS(t) "+f"(acc[t][0]), "+f"(acc[t][1]), "+f"(acc[t][2]), "+f"(acc[t][3])
#define W12_WEIGHTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)

__device__ __forceinline__ void group_mma(float (&acc)[1][4], const uint32_t* a, uint64_t x) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : W12_SUMS(0)
               : W12_WEIGHTS);
}

__device__ __forceinline__ void group_mma(float (&acc)[2][4], const uint32_t* a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
      "1, 1, 1, 0;"
      : W12_SUMS(0), W12_SUMS(1)
      : W12_WEIGHTS);
}

__device__ __forceinline__ void group_mma(float (&acc)[4][4], const uint32_t* a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : W12_SUMS(0), W12_SUMS(1), W12_SUMS(2), W12_SUMS(3)
      : W12_WEIGHTS);
}

__device__ __forceinline__ void group_mma(float (&acc)[8][4], const uint32_t* a, uint64_t x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, "
      "%36, 1, 1, 1, 0;"
      : W12_SUMS(0), W12_SUMS(1), W12_SUMS(2), W12_SUMS(3), W12_SUMS(4), W12_SUMS(5), W12_SUMS(6), W12_SUMS(7)
      : W12_WEIGHTS);
}

#undef W12_SUMS
#undef W12_WEIGHTS

}  // namespace w12

// From packed words to the A operands of four mma.m16n8k16, in registers. The bit layout is that of ../layout.py.
#pragma once
#include "ptx.cuh"

namespace w12 {

constexpr int kRows = 16;            // rows of a subtile
constexpr int kColumns = 64;         // columns of a subtile
constexpr int kRegisters = 16;       // A registers of a lane per subtile: 4 steps x 4
constexpr int kPatchBytes = kRegisters * 32 * 4;

enum Format { kW12 = 0, kBf16 = 1 };

constexpr int kPlaneBytes = 1536;    // of a W12 subtile; its record follows

__device__ __forceinline__ uint32_t rotate_right_8(uint32_t word) { return __byte_perm(word, word, 0x0321); }

// A step: four registers from two byte words and one code word. 15 integer operations for 8 weights.
__device__ __forceinline__ void decode_step(uint32_t* a, uint32_t bytes0, uint32_t bytes1, uint32_t codes,
                                            uint32_t base) {
  constexpr uint32_t kField = 0x807f807fu, kHigh = 0x07800780u, kLow = 0x00780078u;
  const uint32_t turned = rotate_right_8(codes);
  a[0] = (bytes0 & kField) | ((codes & kHigh) + base);
  a[1] = (rotate_right_8(bytes0) & kField) | ((codes & kLow) * 16u + base);
  a[2] = (bytes1 & kField) | ((turned & kHigh) + base);
  a[3] = (rotate_right_8(bytes1) & kField) | ((turned & kLow) * 16u + base);
}

// A lane's part of one packed subtile, as loaded.
template <int FORMAT>
struct Packed {
  uint4 part[FORMAT == kW12 ? 3 : 4];
  uint32_t header;  // of the record: base, and from bit 8 on the number of patches

  __device__ __forceinline__ void load(uint32_t source, int lane) {
#pragma unroll
    for (int i = 0; i < (FORMAT == kW12 ? 3 : 4); ++i) part[i] = load_shared(source + 16 * lane + 512 * i);
    header = FORMAT == kW12 ? load_shared_word(source + kPlaneBytes) : 0;
  }
};

// Put the true words of a subtile's escapes in: through shared memory, because registers cannot be indexed. Rare.
// record: the subtile's record in shared memory, `room` patches long at most.
__device__ __forceinline__ void patch(uint32_t* a, uint32_t scratch, int lane, uint32_t record, uint32_t count,
                                      uint32_t room, const uint32_t* overflow) {
#pragma unroll
  for (int s = 0; s < 4; ++s)
    store_shared(scratch + s * 512 + lane * 16, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3]);
  __syncwarp();
  if (count <= room) {
    if (lane < count) {
      const uint32_t entry = load_shared_word(record + 4 + 4 * lane);
      store_shared_half(scratch + (entry >> 16) * 2, entry & 0xffffu);
    }
  } else {
    const uint32_t* entries = overflow + load_shared_word(record + 4);
#pragma unroll 1
    for (uint32_t i = lane; i < count; i += 32) store_shared_half(scratch + (entries[i] >> 16) * 2, entries[i] & 0xffffu);
  }
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const uint4 v = load_shared(scratch + s * 512 + lane * 16);
    a[4 * s] = v.x, a[4 * s + 1] = v.y, a[4 * s + 2] = v.z, a[4 * s + 3] = v.w;
  }
  __syncwarp();
}

template <int FORMAT>
__device__ __forceinline__ void decode_subtile(uint32_t* a, const Packed<FORMAT>& packed) {
  if constexpr (FORMAT == kBf16) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint4 v = packed.part[s];
      a[4 * s] = v.x, a[4 * s + 1] = v.y, a[4 * s + 2] = v.z, a[4 * s + 3] = v.w;
    }
  } else {
    const uint4 b0 = packed.part[0], b1 = packed.part[1], c = packed.part[2];
    const uint32_t base = ((packed.header & 0xffu) - 1u) * 0x00800080u;
    decode_step(a, b0.x, b0.y, c.x, base);
    decode_step(a + 4, b0.z, b0.w, c.y, base);
    decode_step(a + 8, b1.x, b1.y, c.z, base);
    decode_step(a + 12, b1.z, b1.w, c.w, base);
  }
}

}  // namespace w12

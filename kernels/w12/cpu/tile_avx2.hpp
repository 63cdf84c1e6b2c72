// One panel for one to six rows, in AVX2 assembly: the sums (two vectors a row), a weight's two vectors, the words of the next k and a
// broadcast activation fill the sixteen registers, which a compiler does not manage without spilling sums.
//
// Every sum runs over k in order, one fused multiply-add per step.
#pragma once

#include <immintrin.h>

#include "panels.hpp"

namespace w12 {

constexpr int kVectorBits = 256;
constexpr int kMaxGroup = 6;  // rows of the tallest tile

alignas(32) inline const std::uint32_t kHighHalves[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                         0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
alignas(32) inline const std::uint32_t kLowNibbles[8] = {0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu,
                                                         0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu, 0x0f0f0f0fu};

// Where sums() leaves channel c of a row.
inline int place_of(int c) { return c; }

// Row r: sums in ymm(a), ymm(b); weights in ymm13 (channels 0-7) and `w` (8-15); its activation of k at 4 * (k * ROWS + r).
#define W12_ROW(k, rows, r, a, b, w)                                                                       \
    "vbroadcastss 4*(" #k "*" #rows "+" #r ")(%[x]), %%ymm15\n\tvfmadd231ps %%ymm13, %%ymm15, %%ymm" #a "\n\t" \
    "vfmadd231ps %%ymm" #w ", %%ymm15, %%ymm" #b "\n\t"
#define W12_ROWS_1(k, n, w) W12_ROW(k, n, 0, 0, 1, w)
#define W12_ROWS_2(k, n, w) W12_ROWS_1(k, n, w) W12_ROW(k, n, 1, 2, 3, w)
#define W12_ROWS_3(k, n, w) W12_ROWS_2(k, n, w) W12_ROW(k, n, 2, 4, 5, w)
#define W12_ROWS_4(k, n, w) W12_ROWS_3(k, n, w) W12_ROW(k, n, 3, 6, 7, w)
#define W12_ROWS_5(k, n, w) W12_ROWS_4(k, n, w) W12_ROW(k, n, 4, 8, 9, w)
#define W12_ROWS_6(k, n, w) W12_ROWS_5(k, n, w) W12_ROW(k, n, 5, 10, 11, w)

// The words in ymm(w) -> float32 in ymm13 and ymm(w), times the rows.
#define W12_STEP(k, n, w) \
    "vpslld $16, %%ymm" #w ", %%ymm13\n\tvpand %[high], %%ymm" #w ", %%ymm" #w "\n\t" W12_ROWS_##n(k, n, w)

// A plain unit.
#define W12_PLAIN(n)                                                                                                     \
    "vmovdqa (%[w]), %%ymm12\n\t" W12_STEP(0, n, 12) "vmovdqa 32(%[w]), %%ymm12\n\t" W12_STEP(1, n, 12)                   \
    "vmovdqa 64(%[w]), %%ymm12\n\t" W12_STEP(2, n, 12) "vmovdqa 96(%[w]), %%ymm12\n\t" W12_STEP(3, n, 12) "add $128, %[w]\n\t"

// Two k of a tight unit: nibbles in ymm12, low bytes at `low`.
#define W12_PAIR(even, odd, n, low)                                                                          \
    "vpand %[nibbles], %%ymm12, %%ymm12\n\tvmovdqa (%[table]), %%ymm13\n\tvpshufb %%ymm12, %%ymm13, %%ymm13\n\t" \
    "vmovdqa " low "(%[w]), %%ymm12\n\tvpunpckhbw %%ymm13, %%ymm12, %%ymm14\n\tvpunpcklbw %%ymm13, %%ymm12, %%ymm12\n\t" \
    W12_STEP(even, n, 12) W12_STEP(odd, n, 14)
#define W12_TIGHT(n)                                                                            \
    "vmovdqa 64(%[w]), %%ymm12\n\t" W12_PAIR(0, 1, n, "0")                                       \
    "vmovdqa 64(%[w]), %%ymm12\n\tvpsrlw $4, %%ymm12, %%ymm12\n\t" W12_PAIR(2, 3, n, "32") "add $96, %[w]\n\t"

#define W12_NEXT(n)                                                                                               \
    "prefetcht0 (%[ahead])\n\tprefetcht0 (%[ahead],%[half])\n\tadd %[step], %[ahead]\n\tadd $16*" #n ", %[x]\n\t"

#define W12_MOVE_1(m) m(0) m(1)
#define W12_MOVE_2(m) W12_MOVE_1(m) m(2) m(3)
#define W12_MOVE_3(m) W12_MOVE_2(m) m(4) m(5)
#define W12_MOVE_4(m) W12_MOVE_3(m) m(6) m(7)
#define W12_MOVE_5(m) W12_MOVE_4(m) m(8) m(9)
#define W12_MOVE_6(m) W12_MOVE_5(m) m(10) m(11)
#define W12_ZERO(a) "vxorps %%ymm" #a ", %%ymm" #a ", %%ymm" #a "\n\t"
#define W12_STORE(a) "vmovups %%ymm" #a ", " #a "*32(%[sums])\n\t"

#define W12_TILE(n)                                                                                                             \
    asm volatile(W12_MOVE_##n(W12_ZERO)                                                                                         \
                 "1:\n\tmov (%[run]), %k[left]\n\ttest %k[left], %k[left]\n\tjz 3f\n\t"                                         \
                 ".p2align 5\n2:\n\t" W12_NEXT_TIGHT(n) "dec %k[left]\n\tjnz 2b\n"                                              \
                 "3:\n\tmov 4(%[run]), %k[left]\n\ttest %k[left], %k[left]\n\tjz 5f\n\t"                                        \
                 ".p2align 5\n4:\n\t" W12_NEXT_PLAIN(n) "dec %k[left]\n\tjnz 4b\n"                                              \
                 "5:\n\tadd $8, %[run]\n\tcmp %[end], %[run]\n\tjb 1b\n\t" W12_MOVE_##n(W12_STORE)                              \
                 : [w] "+r"(w), [x] "+r"(x), [ahead] "+r"(ahead.at), [run] "+r"(run), [left] "=&r"(left)                        \
                 : [end] "r"(end), [table] "r"(table), [sums] "r"(sums), [step] "r"(ahead.step), [half] "r"(ahead.half),        \
                   [high] "m"(*reinterpret_cast<const __m256i*>(kHighHalves)),                                                  \
                   [nibbles] "m"(*reinterpret_cast<const __m256i*>(kLowNibbles))                                                \
                 : "memory", "cc", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10",     \
                   "ymm11", "ymm12", "ymm13", "ymm14", "ymm15")
#define W12_NEXT_TIGHT(n) W12_TIGHT(n) W12_NEXT(n)
#define W12_NEXT_PLAIN(n) W12_PLAIN(n) W12_NEXT(n)

// sums [ROWS][16] = x [units * 4][ROWS] times the panel at w, whose units are runs [run, end).
template <int ROWS>
inline void tile(const float* x, const std::uint8_t* w, const std::uint8_t* table, const Run* run, const Run* end, float* sums, Ahead ahead) {
    std::uint64_t left;
    if constexpr (ROWS == 1) W12_TILE(1);
    if constexpr (ROWS == 2) W12_TILE(2);
    if constexpr (ROWS == 3) W12_TILE(3);
    if constexpr (ROWS == 4) W12_TILE(4);
    if constexpr (ROWS == 5) W12_TILE(5);
    if constexpr (ROWS == 6) W12_TILE(6);
    static_assert(ROWS >= 1 && ROWS <= kMaxGroup);
}

}  // namespace w12

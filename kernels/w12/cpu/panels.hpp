// How weights lie in memory for the CPU.
//
// A panel is 16 output channels; panels follow one another, so a thread reads one stream. A panel is a sequence of units of four k
// (K is padded; see pack in w12.cpp), and a unit is one of two kinds:
//
//   plain  128 bytes: per k 16 BF16 words; 32-bit lane i carries channel i in its low half and channel i + 8 in its high half, so one
//          load, one shift and one mask give two vectors of eight float32, channels in order
//   tight   96 bytes: 32 low bytes of k 0 and 1, 32 of k 2 and 3, and 32 bytes of which the low half belongs to k 0 and 1
//
// A tight weight is cut differently from the logical planes, so that decoding needs no addition. With the even base E = base & ~1 the
// exponent is E + d, d = 0..15; then word = (high << 8) | low with
//
//   low  = (d & 1) << 7 | mantissa          stored as it is
//   high = sign << 7 | (E >> 1) + (d >> 1)  one of sixteen: the nibble sign << 3 | d >> 1 selects it from a table (one byte shuffle)
//
// and interleaving low and high bytes gives the words of a plain unit. A unit with an escaped weight is stored plain: no list of patches, no
// other code path than the one BF16 has, and a matrix of nothing but escapes is a BF16 matrix. BF16 itself is all plain.
//
// Runs say how the kinds alternate: per panel a list of (tight units, plain units).
#pragma once

#include <cstddef>
#include <cstdint>

#define W12_UNROLL _Pragma("GCC unroll 16")
#define W12_INLINE inline __attribute__((always_inline))

namespace w12 {

constexpr int kPanel = 16;  // channels of a panel
constexpr int kUnit = 4;    // k of a unit
constexpr int kPlain = 128, kTight = 96;

struct Run {
    std::uint32_t tight, plain;
};

// One matrix [N, K].
struct Matrix {
    const std::uint8_t* data;          // panels
    const std::int64_t* panel_at;      // [panels + 1]: byte where each begins
    const std::uint8_t* tables;        // [panels][32]: the table of high bytes, twice; 32-byte aligned
    const Run* runs;                   // of all panels
    const std::int64_t* first_run;     // [panels + 1]
    std::int64_t N, K;
};

inline std::int64_t panels_of(std::int64_t N) { return (N + kPanel - 1) / kPanel; }
inline std::int64_t units_of(std::int64_t K) { return (K + kUnit - 1) / kUnit; }

// Which of the 16 words of one k is channel c's.
inline int word_of(int c) { return c % 8 * 2 + c / 8; }

// Where that word's low byte lies among the 32 of a pair of k; the interleaving works within 128-bit lanes.
inline int byte_of(int c, int k) { return word_of(c) / 8 * 16 + word_of(c) % 8 + k % 2 * 8; }

// What a pass fetches into the caches for the passes to come: two addresses per unit, `half` apart, then `step` on.
struct Ahead {
    const std::uint8_t* at;
    std::int64_t step, half;
};

}  // namespace w12

// One panel for one to six rows, in AVX-512: a row's sum is one vector, channels in the order of the words. The same sums in the same order
// as tile_avx2.hpp, and so the same bits.
#pragma once

#include <immintrin.h>

#include "panels.hpp"

namespace w12 {

constexpr int kVectorBits = 512;
constexpr int kMaxGroup = 6;

// Where sums() leaves channel c of a row.
inline int place_of(int c) { return word_of(c); }

template <int ROWS>
static W12_INLINE void step_512(__m256i words, const float* x, __m512* sum) {
    const __m512 weight = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    W12_UNROLL for (int r = 0; r < ROWS; r++) sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r]), weight, sum[r]);
}

// sums [ROWS][16] = x [units * 4][ROWS] times the panel at w, whose units are runs [run, end).
template <int ROWS>
inline void tile(const float* x, const std::uint8_t* w, const std::uint8_t* table, const Run* run, const Run* end, float* sums, Ahead ahead) {
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(table)), low_nibbles = _mm256_set1_epi8(15);
    const auto load = [](const std::uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); };
    __m512 sum[ROWS];
    W12_UNROLL for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
    const auto fetch = [&]() {
        _mm_prefetch(reinterpret_cast<const char*>(ahead.at), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(ahead.at + ahead.half), _MM_HINT_T0);
        ahead.at += ahead.step;
    };
    for (; run < end; run++) {
        for (std::uint32_t i = 0; i < run->tight; i++, w += kTight, x += kUnit * ROWS) {
            const __m256i nibbles = load(w + 64);
            W12_UNROLL for (int pair = 0; pair < 2; pair++) {
                const __m256i index = _mm256_and_si256(pair == 0 ? nibbles : _mm256_srli_epi16(nibbles, 4), low_nibbles);
                const __m256i top = _mm256_shuffle_epi8(high, index), low = load(w + 32 * pair);
                step_512<ROWS>(_mm256_unpacklo_epi8(low, top), x + 2 * pair * ROWS, sum);
                step_512<ROWS>(_mm256_unpackhi_epi8(low, top), x + (2 * pair + 1) * ROWS, sum);
            }
            fetch();
        }
        for (std::uint32_t i = 0; i < run->plain; i++, w += kPlain, x += kUnit * ROWS) {
            W12_UNROLL for (int k = 0; k < kUnit; k++) step_512<ROWS>(load(w + 32 * k), x + k * ROWS, sum);
            fetch();
        }
    }
    W12_UNROLL for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(sums + r * kPanel, sum[r]);
}

}  // namespace w12

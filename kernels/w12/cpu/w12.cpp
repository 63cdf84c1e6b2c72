// y[M, N] = x[M, K] W^T on the CPU from tight (W12) or plain (BF16) panels, float32 activations and sums. C interface for ctypes; the
// caller checks shapes. Both formats run the same code, so they give the same bits, for any number of rows and threads.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "panels.hpp"
#if defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(W12_AVX2)
#include "tile_avx512.hpp"
#else
#include "tile_avx2.hpp"
#endif

namespace {

using namespace w12;

constexpr int kMaxRows = 48;   // rows whose activations are interleaved at once
// From so many rows on, more than one group uses a panel, and multiply-adds are the limit: it is widened once for all of them.
constexpr int kWidenRows = kMaxGroup + 1;

// The threads that torch computes with (GOMP_parallel and friends of the OpenMP runtime it loaded): a second pool would compete with it.
struct Team {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*number)() = nullptr;
    int (*size)() = nullptr;
} team;

template <class Body>
void run_team(unsigned threads, const Body& body) {
    if (threads <= 1 || team.parallel == nullptr) return body(0, 1);
    team.parallel([](void* data) { (*static_cast<const Body*>(data))(team.number(), team.size()); },
                  const_cast<void*>(static_cast<const void*>(&body)), threads, 0);
}

// Floats of one thread, kept between calls.
class Scratch {
  public:
    float* need(std::size_t floats) {
        if (floats > size_) {
            size_ = (floats + 63) / 64 * 64;
            data_.reset(static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float))));
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> data_;
    std::size_t size_ = 0;
};

thread_local Scratch interleaved, widened;

// How rows fall into groups of at most kMaxGroup, as evenly as can be.
struct Groups {
    int count, rows[(kMaxRows + kMaxGroup - 1) / kMaxGroup];
    explicit Groups(int M) : count((M + kMaxGroup - 1) / kMaxGroup) {
        for (int i = 0; i < count; i++) rows[i] = M / count + (i < M % count);
    }
};

// Rows of x -> per group [units * 4][rows of the group], one group after another; k beyond K are 0.
void interleave(const float* x, std::ptrdiff_t ldx, const Groups& groups, std::int64_t K, float* out) {
    const std::int64_t padded = units_of(K) * kUnit;
    for (int g = 0; g < groups.count; g++) {
        const int R = groups.rows[g];
        for (int r = 0; r < R; r++) {
            const float* row = x + r * ldx;
            for (std::int64_t k = 0; k < K; k++) out[k * R + r] = row[k];
            for (std::int64_t k = K; k < padded; k++) out[k * R + r] = 0;
        }
        x += R * ldx;
        out += R * padded;
    }
}

// A panel as the tiles read it.
struct Panel {
    const std::uint8_t *w, *table;
    const Run *run, *end;
};

Panel panel_of(const Matrix& m, std::int64_t p) {
    return {m.data + m.panel_at[p], m.tables + 32 * p, m.runs + m.first_run[p], m.runs + m.first_run[p + 1]};
}

// The same panel with tight units made plain in `out` (units * kPlain bytes); `all` becomes its only run.
Panel widen(const Panel& from, std::int64_t units, std::uint8_t* out, Run& all) {
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(from.table)), low_nibbles = _mm256_set1_epi8(15);
    const std::uint8_t* w = from.w;
    const Panel wide = {out, from.table, &all, &all + 1};
    for (const Run* run = from.run; run < from.end; run++) {
        for (std::uint32_t i = 0; i < run->tight; i++, w += kTight, out += kPlain) {
            const auto *in = reinterpret_cast<const __m256i*>(w);
            auto* to = reinterpret_cast<__m256i*>(out);
            const __m256i nibbles = _mm256_load_si256(in + 2);
            const __m256i a = _mm256_shuffle_epi8(high, _mm256_and_si256(nibbles, low_nibbles));
            const __m256i b = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low_nibbles));
            const __m256i c = _mm256_load_si256(in), d = _mm256_load_si256(in + 1);
            _mm256_store_si256(to, _mm256_unpacklo_epi8(c, a));
            _mm256_store_si256(to + 1, _mm256_unpackhi_epi8(c, a));
            _mm256_store_si256(to + 2, _mm256_unpacklo_epi8(d, b));
            _mm256_store_si256(to + 3, _mm256_unpackhi_epi8(d, b));
        }
        std::memcpy(out, w, static_cast<std::size_t>(run->plain) * kPlain);
        w += static_cast<std::size_t>(run->plain) * kPlain, out += static_cast<std::size_t>(run->plain) * kPlain;
    }
    all = {0, static_cast<std::uint32_t>(units)};
    return wide;
}

void some_rows(int rows, const float* x, const Panel& p, float* sums, Ahead ahead) {
    switch (rows) {
        case 1: return tile<1>(x, p.w, p.table, p.run, p.end, sums, ahead);
        case 2: return tile<2>(x, p.w, p.table, p.run, p.end, sums, ahead);
        case 3: return tile<3>(x, p.w, p.table, p.run, p.end, sums, ahead);
        case 4: return tile<4>(x, p.w, p.table, p.run, p.end, sums, ahead);
        case 5: return tile<5>(x, p.w, p.table, p.run, p.end, sums, ahead);
        default: return tile<6>(x, p.w, p.table, p.run, p.end, sums, ahead);
    }
}

// Panels of one thread. While a panel is used by one group of rows after another, the next panel is fetched, a part by each group.
void some_panels(const Matrix& m, const float* x, std::ptrdiff_t ldx, int M, float* y, std::ptrdiff_t ldy, int thread, int threads) {
    const std::int64_t panels = panels_of(m.N), from = panels * thread / threads, to = panels * (thread + 1) / threads;
    const std::int64_t padded = units_of(m.K) * kUnit;
    if (from == to) return;
    const Groups groups(M);
    const float* rows = x;
    if (M > 1 || padded > m.K) {
        float* scratch = interleaved.need(static_cast<std::size_t>(M) * padded);
        interleave(x, ldx, groups, m.K, scratch);
        rows = scratch;
    }
    alignas(64) float sums[kMaxGroup * kPanel];
    for (std::int64_t p = from; p < to; p++) {
        const std::int64_t width = m.N - p * kPanel < kPanel ? m.N - p * kPanel : kPanel;
        const std::int64_t step = (m.panel_at[p + 1] - m.panel_at[p]) / units_of(m.K) / groups.count;
        const std::uint8_t* next = m.data + m.panel_at[p + 1];
        Panel panel = panel_of(m, p);
        Run all;
        if (M >= kWidenRows && m.panel_at[p + 1] - m.panel_at[p] < units_of(m.K) * kPlain)
            panel = widen(panel, units_of(m.K), reinterpret_cast<std::uint8_t*>(widened.need(units_of(m.K) * kPlain / sizeof(float))), all);
        const float* group = rows;
        float* out = y + p * kPanel;
        for (int g = 0; g < groups.count; g++) {
            some_rows(groups.rows[g], group, panel, sums, {next, step, step / 2});
            for (int r = 0; r < groups.rows[g]; r++, out += ldy)
                for (int c = 0; c < width; c++) out[c] = sums[r * kPanel + place_of(c)];
            group += groups.rows[g] * padded;
            next += step * units_of(m.K);
        }
    }
}

}  // namespace

extern "C" {

void w12_team(void* parallel, void* number, void* size) {
    team.parallel = reinterpret_cast<decltype(team.parallel)>(parallel);
    team.number = reinterpret_cast<decltype(team.number)>(number);
    team.size = reinterpret_cast<decltype(team.size)>(size);
}

// Width of the vectors that the kernels were built for.
int w12_vector_bits() { return kVectorBits; }

// Zeroed memory in huge pages where there are any (small pages miss the TLB at every panel), 64-byte aligned; null on failure.
void* w12_allocate(std::size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

void w12_release(void* p, std::size_t bytes) { munmap(p, bytes); }

// Which units of [panels][units] must be plain: codes [N, K], 0 where a weight escaped. A last unit that is not whole is plain.
void w12_find_plain(const std::uint8_t* codes, std::int64_t N, std::int64_t K, std::uint8_t* plain) {
    const std::int64_t units = units_of(K);
    for (std::int64_t n = 0; n < N; n++)
        for (std::int64_t k = 0; k < K; k++)
            if (codes[n * K + k] == 0) plain[n / kPanel * units + k / kUnit] = 1;
    if (K % kUnit)
        for (std::int64_t p = 0; p < panels_of(N); p++) plain[(p + 1) * units - 1] = 1;
}

// words: BF16 bits [N, K]; row_base: the base of each row, the same for rows of a panel; plain, panel_at: as above -> panels and tables.
// Weights beyond N are 0. Weights beyond K are -0 and meet activations +0: adding their product -0 changes no sum, not even one of -0.
void w12_pack(const std::uint16_t* words, const std::int32_t* row_base, std::int64_t N, std::int64_t K, const std::uint8_t* plain,
              const std::int64_t* panel_at, std::uint8_t* data, std::uint8_t* tables) {
    const std::int64_t units = units_of(K);
    for (std::int64_t p = 0; p < panels_of(N); p++) {
        const int base = row_base[p * kPanel] & ~1;
        for (int i = 0; i < 32; i++) tables[p * 32 + i] = static_cast<std::uint8_t>((i >> 3 & 1) << 7 | (((base >> 1) + (i & 7)) & 127));
        std::uint8_t* unit = data + panel_at[p];
        for (std::int64_t u = 0; u < units; u++) {
            const bool is_plain = plain[p * units + u];
            for (int c = 0; c < kPanel; c++)
                for (int i = 0; i < kUnit; i++) {
                    const std::int64_t n = p * kPanel + c, k = u * kUnit + i;
                    const std::uint16_t word = n >= N ? 0 : k >= K ? 0x8000 : words[n * K + k];
                    if (is_plain) {
                        std::memcpy(unit + 32 * i + 2 * word_of(c), &word, 2);
                        continue;
                    }
                    const int d = n >= N ? 0 : (word >> 7 & 255) - base;
                    unit[i / 2 * 32 + byte_of(c, i)] = static_cast<std::uint8_t>(word & 127) | static_cast<std::uint8_t>((d & 1) << 7);
                    unit[64 + byte_of(c, i)] |= static_cast<std::uint8_t>((word >> 15 << 3 | d >> 1) << (i / 2 * 4));
                }
            unit += is_plain ? kPlain : kTight;
        }
    }
}

void w12_gemm(const Matrix* m, const float* x, std::int64_t M, std::int64_t ldx, float* y, std::int64_t ldy,
              int threads) {
    run_team(static_cast<unsigned>(threads), [&](int thread, int size) {
        for (std::int64_t r = 0; r < M; r += kMaxRows) {
            const int rows = static_cast<int>(M - r < kMaxRows ? M - r : kMaxRows);
            some_panels(*m, x + r * ldx, ldx, rows, y + r * ldy, ldy, thread, size);
        }
    });
}

}  // extern "C"

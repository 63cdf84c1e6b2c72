// Measures what a CPU can stream and compute, as a native decode kernel would use it. Prints one JSON object.
// Usage: probe_machine THREADS BUFFER_BYTES REPEATS. Build: g++ -O3 -march=native -fopenmp.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int kChains = 12;  // independent accumulators: latency 4-5 cycles times 2 units per cycle, and they fit 16 registers

constexpr double kSecondsAtMost = 4.0;  // on a busy machine fewer repeats fit

static volatile uint64_t sink;

static double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// One timed pass: how fast, and which share of the time the threads really ran. A share below one means that
// something else used the cores meanwhile.
struct Pass {
  double gbs, share;
};

template <typename Body>
static Pass timed(double bytes, int threads, Body body) {
  double first = 1e300, last = 0, busy = 0;
#pragma omp parallel num_threads(threads) reduction(min : first) reduction(max : last) reduction(+ : busy)
  {
#pragma omp barrier
    const double cpu = thread_seconds(), wall = omp_get_wtime();
    body(omp_get_thread_num());
    first = wall;
    last = omp_get_wtime();
    busy = thread_seconds() - cpu;
  }
  return {bytes / (last - first) * 1e-9, busy / (threads * (last - first))};
}

// Every thread reads its own contiguous part, once, in `streams` interleaved sequences, and only adds what it reads.
template <int streams>
static Pass read_pass(const char* buffer, size_t bytes, int threads) {
  const size_t part = bytes / threads / (streams * 4096) * (streams * 4096), stream = part / streams;
  return timed(double(part) * threads, threads, [=](int thread) {
    const char* base = buffer + part * thread;
    Words sums[streams][2] = {};
    for (size_t at = 0; at < stream; at += 2 * kVectorBytes)
      for (int s = 0; s < streams; ++s) {
        const Words* from = reinterpret_cast<const Words*>(base + s * stream + at);
        sums[s][0] += from[0];
        sums[s][1] += from[1];
      }
    uint64_t total = 0;
    for (int s = 0; s < streams; ++s)
      for (size_t lane = 0; lane < kVectorBytes / 8; ++lane) total += sums[s][0][lane] + sums[s][1][lane];
    sink = total;
  });
}

static Pass copy_pass(char* buffer, size_t bytes, int threads) {
  const size_t half = bytes / 2, part = half / threads / 4096 * 4096;
  return timed(2.0 * part * threads, threads, [=](int thread) {
    std::memcpy(buffer + half + part * thread, buffer + part * thread, part);
  });
}

// Sum over the threads of what each computes per second of its own CPU time, so that being descheduled does not count.
static double fma_gflops(int threads) {
  const long rounds = 400000;
  double total = 0, rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total, rate)
  {
    Floats sums[kChains], factor = {}, term = {};
    for (int c = 0; c < kChains; ++c) sums[c] = factor + float(c);
    factor += 0.999f;
    term += 1e-3f;
    asm volatile("" : "+m"(factor), "+m"(term));  // neither is a compile-time constant
    const double start = thread_seconds();
    for (long i = 0; i < rounds; ++i)
      for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
    for (int c = 0; c < kChains; ++c) total += sums[c][0];
    rate += 2.0 * kChains * (kVectorBytes / 4) * double(rounds) / (thread_seconds() - start) * 1e-9;
  }
  sink = uint64_t(total);
  return rate;
}

static double fork_join_us(int threads) {
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  { asm volatile("" ::: "memory"); }
  return (omp_get_wtime() - start) * 1e6;
}

static void print(const char* name, std::vector<double> values, bool larger_is_better, bool last) {
  std::sort(values.begin(), values.end());
  const double best = larger_is_better ? values.back() : values.front();
  std::printf("\"%s\": {\"best\": %.6g, \"median\": %.6g}%s\n", name, best, values[values.size() / 2], last ? "}" : ",");
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int threads = std::atoi(argv[1]), repeats = std::atoi(argv[3]);
  const size_t bytes = std::strtoull(argv[2], nullptr, 10), huge = size_t(2) << 20;
  char* buffer = static_cast<char*>(std::aligned_alloc(huge, (bytes + huge - 1) / huge * huge));
  if (!buffer || threads < 1 || repeats < 1) return 3;
  madvise(buffer, bytes, MADV_HUGEPAGE);  // as an engine would for its weights
  const size_t part = (bytes + threads - 1) / threads;
#pragma omp parallel num_threads(threads)
  {
    const size_t from = part * omp_get_thread_num();
    if (from < bytes) std::memset(buffer + from, 1, std::min(part, bytes - from));  // first touch by the reader
  }
  // Passes go over one quarter after the other, so that none finds its data in the cache, and each is short enough
  // to fall between two interruptions.
  const size_t quarter = bytes / 4 / 4096 * 4096;
  std::vector<double> reads[3], copies, peaks, joins;  // reads: with one, two and four streams
  Pass best = {0, 0};
  const double start = omp_get_wtime();
  for (int r = 0; r < repeats && (r < 2 || omp_get_wtime() - start < kSecondsAtMost); ++r) {
    for (int q = 0; q < 4; ++q) {
      char* from = buffer + q * quarter;
      const Pass passes[3] = {read_pass<1>(from, quarter, threads),
                              read_pass<2>(buffer + (q + 1) % 4 * quarter, quarter, threads),
                              read_pass<4>(buffer + (q + 2) % 4 * quarter, quarter, threads)};
      for (int kind = 0; kind < 3; ++kind) {
        if (passes[kind].gbs > best.gbs) best = passes[kind];
        reads[kind].push_back(passes[kind].gbs);
      }
      copies.push_back(copy_pass(buffer + (q + 3) % 4 * quarter, quarter, threads).gbs);
    }
    peaks.push_back(fma_gflops(threads));
    for (int i = 0; i < 200; ++i) joins.push_back(fork_join_us(threads));
  }
  std::printf("{");
  print("read1_gbs", reads[0], true, false);
  print("read2_gbs", reads[1], true, false);
  print("read4_gbs", reads[2], true, false);
  print("copy_gbs", copies, true, false);
  print("fma_gflops", peaks, true, false);
  print("read_cpu_share", {best.share}, true, false);
  print("fork_join_us", joins, false, true);
  return 0;
}

// Thin names for the PTX that the kernels use: mbarriers, bulk copies, tensor cores, clusters, dependent launches.
#pragma once
#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>

namespace w12 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra finished;\n\t"
      "bra again;\n\t"
      "finished:\n\t}" ::"r"(barrier), "r"(parity) : "memory");
}

// One contiguous run of bytes (a multiple of 16) to shared memory, completing on `barrier`.
__device__ __forceinline__ void load_run(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of a tensor to shared memory, completing on `barrier`; what lies outside the tensor arrives as zero.
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ uint64_t policy_stream() {  // weights: read once, leave the cache to activations
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t policy_keep() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  return *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  return *reinterpret_cast<const uint32_t*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  *reinterpret_cast<uint4*>(__cvta_shared_to_generic(address)) = make_uint4(a, b, c, d);
}

__device__ __forceinline__ void store_shared_half(uint32_t address, uint32_t value) {
  *reinterpret_cast<uint16_t*>(__cvta_shared_to_generic(address)) = static_cast<uint16_t>(value);
}

// B operands of two steps (32 columns) for eight tokens. Lane 8 i + j gives the address of token j, columns 8 i .. + 7.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Rows of the weight are the M side, tokens the N side: 16 rows x 16 columns times 16 columns x 8 tokens.
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ float cluster_load(uint32_t address, uint32_t rank) {
  uint32_t remote;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
}

// Programmatic dependent launch: weights may be read before the previous kernel ends, activations may not.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace w12

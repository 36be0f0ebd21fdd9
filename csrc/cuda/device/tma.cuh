// sm_90: tiles copied by the tensor memory accelerator (TMA), and the barriers around them.
// PTX ISA sections: 9.7.13.15 (mbarrier), 9.7.9.25.5 (cp.async.bulk.tensor), 9.7.13.1 (bar),
// 9.7.13.4 (fence.proxy).
#pragma once

#include <cuda.h>

#include "ptx.cuh"

namespace hfb {

// Shared-memory barriers, by address. A phase completes when `arrivals` threads arrived and the
// expected bytes landed; mbarrier_wait(parity) returns once the phase of that parity is complete,
// so on a fresh barrier waiting for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_init(uint32_t s_barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s_barrier), "r"(arrivals));
}
// After the inits and before the barrier that publishes them to the other threads and the TMA.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s_barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t s_barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s_barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t s_barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra wait;\n"
      "ready:\n"
      "}" ::"r"(s_barrier),
      "r"(parity)
      : "memory");
}

// L2 policies: K and V are read again by the other query tiles of the head, Q is not.
constexpr uint64_t kL2EvictFirst = 0x12F0000000000000ull, kL2EvictLast = 0x14F0000000000000ull;

// One box of a 4-D map [B, H, L, D] to shared memory; its full bytes count towards s_barrier, also
// where it reaches outside the tensor and zeros are written.
__device__ __forceinline__ void tma_load(uint32_t s_dst, const CUtensorMap* map, uint32_t s_barrier,
                                         int col, int row, int head, int batch,
                                         uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(s_dst),
      "l"(map), "r"(s_barrier), "r"(col), "r"(row), "r"(head), "r"(batch), "l"(l2_policy)
      : "memory");
}
// bytes (a multiple of 16) from global to shared memory, counted towards s_barrier.
__device__ __forceinline__ void bulk_load(uint32_t s_dst, const void* g_src, int bytes,
                                          uint32_t s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(s_dst),
      "l"(g_src), "r"(bytes), "r"(s_barrier)
      : "memory");
}
// Starts adding bytes of fp32 in shared memory to global memory, in L2.
__device__ __forceinline__ void bulk_add(float* g_dst, uint32_t s_src, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(g_dst),
      "r"(s_src), "r"(bytes)
      : "memory");
}
// Waits until this thread's additions have read shared memory, or are done.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's ordinary shared-memory writes visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barriers 1 to 15 of the block (0 is __syncthreads); sync waits, arrive does not, threads counts
// both.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between the warpgroups of a block; every warp of the warpgroup executes it.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace hfb

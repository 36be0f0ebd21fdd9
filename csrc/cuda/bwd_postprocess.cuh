// Finishes the backward pass: dq = scale * dq_accumulator, one block per (batch, query head, query
// tile). The accumulator is in the thread order of the main kernel, whose Config says: kDq, the grid
// of warps over dQ, and kDqRun, how many neighbouring threads share a contiguous run (float4 i of
// thread t of a run at i * kDqRun + t). So each thread reads back the fragment it would have produced,
// and the tile leaves through shared memory in rows.
#pragma once

#include "bwd_preprocess.cuh"
#include "device/tile.cuh"

namespace hfb {

template <typename T, int kHeadDim, typename Config>
__global__ void __launch_bounds__(Config::kDqThreads)
    bwd_postprocess_kernel(const __grid_constant__ BackwardParams p,
                           const BackwardBuffers buffers) {
  constexpr WarpGrid kDq = Config::kDq;
  constexpr int kBlockM = Config::kBlockM, kThreads = Config::kDqThreads, kRun = Config::kDqRun;
  constexpr int kVectors = kDq.row_blocks * kDq.cols / 8;  // float4 of a thread
  extern __shared__ __align__(128) char s_dq_tile[];       // dQ [kBlockM, kHeadDim]
  const int num_m = buffers.len_q_padded / kBlockM;
  const int m = blockIdx.x % num_m, head = blockIdx.x / num_m % static_cast<int>(p.heads_q);
  const int64_t batch = blockIdx.x / num_m / static_cast<int>(p.heads_q);
  const float4* accumulator = reinterpret_cast<const float4*>(
      buffers.dq_accumulator + ((batch * p.heads_q + head) * num_m + m) * (kBlockM * kHeadDim));
  accumulator += threadIdx.x / kRun * (kRun * kVectors) + threadIdx.x % kRun;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float scale = static_cast<float>(p.scale);
  const int len_q = static_cast<int>(p.len_q), head_dim = static_cast<int>(p.head_dim);
  T* g_dq = static_cast<T*>(p.dq.data) + batch * p.dq.stride_batch + head * p.dq.stride_head;
#pragma unroll
  for (int mb = 0; mb < kDq.row_blocks; ++mb) {
    float dq[kDq.cols / 2];
#pragma unroll
    for (int j = 0; j < kDq.cols / 8; ++j) {
      const float4 x = accumulator[(mb * (kDq.cols / 8) + j) * kRun];
      dq[4 * j] = x.x, dq[4 * j + 1] = x.y, dq[4 * j + 2] = x.z, dq[4 * j + 3] = x.w;
    }
    const int row = warp % kDq.warps_m * (16 * kDq.row_blocks) + 16 * mb;
    const int col = warp / kDq.warps_m * kDq.cols;
    if constexpr (Operand<T>::kTerms == 1) {
      store_accumulator<T, kBlockM>(s_dq_tile, dq, row, col, lane, scale, scale);
    } else {
      store_accumulator_rows(g_dq, p.dq.stride_row, dq, m * kBlockM + row, len_q, col, head_dim,
                             lane, scale, scale);
    }
  }
  if constexpr (Operand<T>::kTerms == 1) {
    __syncthreads();
    store_tile<T, kBlockM, kHeadDim, kThreads>(s_dq_tile, g_dq, p.dq.stride_row, m * kBlockM, len_q,
                                               head_dim);
  }
}

}  // namespace hfb

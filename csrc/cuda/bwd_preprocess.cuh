// Prepares the backward pass, one block per (batch, query head, query tile).
//                                                       FA2, arXiv:2307.08691, Alg. 2, line 4
//   delta = rowsum(dout * out) - dlse     [B, Hq, Lq_padded] fp32 (dlse: gradient through lse)
//   lse   times lse_factor                [B, Hq, Lq_padded] fp32, in base 2 or natural as scores
//         of bwd_sm80 are; +inf for padding rows and rows that see no key, so that P = 0 there
//   row_blocks [B, Lq_padded / block_m]   what the tile's rows see: tiles are skipped and masked by it
//   dq_accumulator tile and dq_turns = 0, where there are any
//
// Thread mapping: eight lanes a row, 16 bytes a lane and step. No shared-memory tiles.
#pragma once

#include "../plan.h"
#include "device/mask.cuh"
#include "device/softmax.cuh"

namespace hfb {

struct BackwardBuffers {
  float* delta;
  float* lse;
  RowBlock* row_blocks;
  float* dq_accumulator;  // null if dq is computed by rows
  int* dq_turns;          // null if the order of additions to dq_accumulator is free
  int len_q_padded;
};

// Where bwd_sm90 expects row row of lse and delta: lane q of a quad needs rows 2q, 2q + 1, 2q + 8 and
// 2q + 9 of sixteen, and so finds them in 16 bytes.
__device__ __forceinline__ int statistic_index(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

// The parts of the workspace that plan laid out.
inline BackwardBuffers backward_buffers(const BackwardParams& params, const Plan& plan) {
  const BackwardWorkspace layout = backward_workspace(params, plan);
  char* base = static_cast<char*>(params.workspace);
  auto part = [base](int64_t offset) { return reinterpret_cast<float*>(base + offset); };
  return {part(layout.delta),
          part(layout.lse),
          reinterpret_cast<RowBlock*>(base + layout.row_blocks),
          layout.total_bytes == layout.dq_accumulator ? nullptr : part(layout.dq_accumulator),
          layout.dq_turns == layout.dq_accumulator ? nullptr
                                                   : reinterpret_cast<int*>(base + layout.dq_turns),
          static_cast<int>(layout.len_q_padded)};
}

// kPermuted: lse and delta in the order of statistic_index.
template <typename T, int kHeadDim, int kBlockM, int kThreads, bool kPermuted>
__global__ void __launch_bounds__(kThreads)
    bwd_preprocess_kernel(const __grid_constant__ BackwardParams p, const BackwardBuffers buffers,
                          float lse_factor) {
  constexpr int kLanesPerRow = 8, kRowsPerPass = kThreads / kLanesPerRow;
  __shared__ __align__(16) int s_scratch[4 * (kThreads / 32)];
  const int num_m = buffers.len_q_padded / kBlockM;
  const int m = blockIdx.x % num_m, head = blockIdx.x / num_m % static_cast<int>(p.heads_q);
  const int64_t batch = blockIdx.x / num_m / static_cast<int>(p.heads_q);
  const int64_t batch_head = batch * p.heads_q + head;
  const int row_begin = m * kBlockM, len_q = static_cast<int>(p.len_q),
            head_dim_v = static_cast<int>(p.head_dim_v);

  if (head == 0) {
    const RowBlock rows = join_rows<kBlockM, kThreads>(p, batch, row_begin, s_scratch);
    if (threadIdx.x == 0) buffers.row_blocks[batch * num_m + m] = rows;
  }

  if (buffers.dq_accumulator != nullptr) {
    float4* accumulator = reinterpret_cast<float4*>(
        buffers.dq_accumulator + (batch_head * num_m + m) * (kBlockM * kHeadDim));
    for (int i = threadIdx.x; i < kBlockM * kHeadDim / 4; i += kThreads)
      accumulator[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (buffers.dq_turns != nullptr && threadIdx.x == 0) buffers.dq_turns[batch_head * num_m + m] = 0;

  const T* g_out =
      static_cast<const T*>(p.out.data) + batch * p.out.stride_batch + head * p.out.stride_head;
  const T* g_dout =
      static_cast<const T*>(p.dout.data) + batch * p.dout.stride_batch + head * p.dout.stride_head;
  const int lane = threadIdx.x % kLanesPerRow;
  for (int r = threadIdx.x / kLanesPerRow; r < kBlockM; r += kRowsPerPass) {
    const int row = row_begin + r;
    float lse = INFINITY, delta = 0.f;
    if (row < len_q) {
      const float natural = static_cast<const float*>(p.lse)[batch_head * p.len_q + row];
      if (natural != -INFINITY) {
        lse = natural * lse_factor;
        constexpr int kPerLane = 16 / sizeof(T);
        for (int col = lane * kPerLane; col < head_dim_v; col += kLanesPerRow * kPerLane) {
          const uint4 out = *reinterpret_cast<const uint4*>(g_out + row * p.out.stride_row + col);
          const uint4 dout =
              *reinterpret_cast<const uint4*>(g_dout + row * p.dout.stride_row + col);
          const T* o = reinterpret_cast<const T*>(&out);
          const T* d = reinterpret_cast<const T*>(&dout);
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) delta += to_float(o[e]) * to_float(d[e]);
        }
      }
    }
#pragma unroll
    for (int offset = kLanesPerRow / 2; offset; offset /= 2)
      delta += __shfl_xor_sync(0xffffffffu, delta, offset);
    if (lane == 0) {
      if (p.dlse && lse != INFINITY)
        delta -= static_cast<const float*>(p.dlse)[batch_head * p.len_q + row];
      const int64_t index =
          batch_head * buffers.len_q_padded + (kPermuted ? statistic_index(row) : row);
      buffers.delta[index] = delta;
      buffers.lse[index] = lse;
    }
  }
}

}  // namespace hfb

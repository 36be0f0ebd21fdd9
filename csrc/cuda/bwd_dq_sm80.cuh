// dQ by rows, for sm_80 and newer: the same bits in every run.          FA2, arXiv:2307.08691, Alg. 2
//
//   dQ = scale * dS K,  P and dS as in bwd_sm80 (gradient.cuh)
//   d slope of a row = -sum over keys of dA * |position of the row - key|            (ALiBi, optional)
//
// bwd_sm80 adds parts of dQ atomically, in any order. Where gradients must be reproducible, or where
// a row's sum over all keys is wanted, it leaves dQ out and this kernel computes S and dP again:
// 7 products instead of 5. Ordering the atomic additions instead would keep 5 but make each block of
// keys wait for the one before.
//
//   one block = kBlockM query rows of one (batch, query head); one warp = 16 rows, all keys of a tile
//   registers = S and dP [16, kBlockN], dQ [16, D] fp32; dS is packed into the A operand of dS K
//   shared    = Q + dO [kBlockM, D] + K + V [kBlockN, D]; tiles.h: 48 KiB at D = 64, 96 KiB at 96,
//               128 and 256, 72 KiB at 192
//   rounding  = S, dP, dA, dQ fp32; dS rounded to the input dtype before dS K
//
//   barrier (all threads)   after                     publishes       frees
//   1, top of a tile        cp.async.wait K, V        K, V (Q, dO)
//   2, after S and dP                                                 V
//   3, after dS K                                                     K
//   Copies in flight: V of the next tile under dS K; K of the next tile only at its top.
//
// In sync with: tiles.h, bwd_preprocess.cuh (lse, delta), bwd_sm80.cuh (the same P and dS).
#pragma once

#include "bwd_preprocess.cuh"
#include "device/gemm.cuh"
#include "device/gradient.cuh"

namespace hfb {

template <typename T, int kHeadDim>
struct BwdDqSm80 {
  static constexpr int kTerms = Operand<T>::kTerms;
  static constexpr Tile kTile = bwd_dq_sm80_tile(kHeadDim, kTerms);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.num_warps, kThreads = kWarps * 32;
  static constexpr int kQBytes = kTerms * tile_bytes(kBlockM, kHeadDim),
                       kKvBytes = kTerms * tile_bytes(kBlockN, kHeadDim);
};

template <typename T, int kHeadDim, bool kGeneral>
__global__ void __launch_bounds__(BwdDqSm80<T, kHeadDim>::kThreads, 1)
    bwd_dq_sm80_kernel(const __grid_constant__ BackwardParams p, const BackwardBuffers buffers) {
  using Config = BwdDqSm80<T, kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;
  constexpr uint32_t kQTerm = kTermBytes<kBlockM, kHeadDim>,
                     kKvTerm = kTermBytes<kBlockN, kHeadDim>;
  extern __shared__ __align__(128) char smem[];
  char* const s_do_bytes = smem + Config::kQBytes;
  char* const s_k_bytes = s_do_bytes + Config::kQBytes;
  char* const s_v_bytes = s_k_bytes + Config::kKvBytes;
  const uint32_t s_q = smem_address(smem), s_do = smem_address(s_do_bytes),
                 s_k = smem_address(s_k_bytes), s_v = smem_address(s_v_bytes);
  __shared__ __align__(16) int s_scratch[4 * Config::kWarps];

  const int len_q = static_cast<int>(p.len_q), len_kv = static_cast<int>(p.len_kv);
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
  const int num_m = ceil_div(len_q, kBlockM);
  const int head = blockIdx.x / num_m % static_cast<int>(p.heads_q);
  const int64_t batch = blockIdx.x / num_m / static_cast<int>(p.heads_q);
  const int row_begin = (num_m - 1 - static_cast<int>(blockIdx.x % num_m)) * kBlockM;
  const int64_t head_kv = head / static_cast<int>(p.heads_q / p.heads_kv);
  const int64_t batch_head = batch * p.heads_q + head;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const float* g_lse = buffers.lse + batch_head * buffers.len_q_padded + row_begin;
  const float* g_delta = buffers.delta + batch_head * buffers.len_q_padded + row_begin;
  auto at = [&](const Strided<const void>& t, int64_t h) {
    return static_cast<const T*>(t.data) + batch * t.stride_batch + h * t.stride_head;
  };
  auto load_keys = [&](uint32_t s_tile, const Strided<const void>& t, int n, int dim) {
    load_tile_async<T, kBlockN, kHeadDim, kThreads>(s_tile, at(t, head_kv), t.stride_row,
                                                    n * kBlockN, len_kv, dim);
  };

  load_tile_async<T, kBlockM, kHeadDim, kThreads>(s_q, at(p.q, head), p.q.stride_row, row_begin,
                                                  len_q, head_dim);
  load_tile_async<T, kBlockM, kHeadDim, kThreads>(s_do, at(p.dout, head), p.dout.stride_row,
                                                  row_begin, len_q, head_dim_v);
  const RowBlock rows = join_rows<kBlockM, kThreads>(p, batch, row_begin, s_scratch);
  const TileSpan span = visited_key_tiles(rows, kBlockN);
  if (span.first < span.last) load_keys(s_v, p.v, span.last - 1, head_dim_v);
  cp_async_commit();
  cp_async_wait<0>();
  // A row that sees no key has lse = +inf here; what it holds must not make its dQ NaN.
  auto sees_nothing = [&](int row) { return row_begin + row >= len_q || g_lse[row] == INFINITY; };
  zero_rows<T, kBlockM, kHeadDim, kThreads>(smem, sees_nothing);
  zero_rows<T, kBlockM, kHeadDim, kThreads>(s_do_bytes, sees_nothing);

  float dq[1][kHeadDim / 2] = {};
  float alibi_grad[2] = {};
#pragma unroll 1
  for (int n = span.last - 1; n >= span.first; --n) {
    const int key_begin = n * kBlockN;
    const bool is_masked =
        kGeneral || classify_tile(rows, key_begin, key_begin + kBlockN) == TileKind::kMasked;
    load_keys(s_k, p.k, n, head_dim);
    cp_async_commit();
    cp_async_wait<0>();
    if (is_masked) {  // rows that see a NaN key are NaN through lse and delta
      clear_nonfinite<T, kBlockN, kHeadDim, kThreads>(s_k_bytes);
      clear_nonfinite<T, kBlockN, kHeadDim, kThreads>(s_v_bytes);
    }
    __syncthreads();  // barrier 1

    float scores[1][kBlockN / 2] = {}, dp[1][kBlockN / 2] = {};
    multiply<T, kHeadDim>(  // S = Q K^T
        scores, [&](int kk, int) { return a_address<kBlockM>(s_q, warp_row, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_k, col, kk, lane); }, kQTerm, kKvTerm);
    multiply<T, kHeadDim>(  // dP = dO V^T
        dp, [&](int kk, int) { return a_address<kBlockM>(s_do, warp_row, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_v, col, kk, lane); }, kQTerm, kKvTerm);
    __syncthreads();  // barrier 2
    if (n > span.first) {
      load_keys(s_v, p.v, n - 1, head_dim_v);
      cp_async_commit();
    }

    uint32_t kept[kBlockN / 16];
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
      kept[kk] = ~0u;
      if (kGeneral && p.dropout.seed) {
        kept[kk] = dropout_keep_bits(p.dropout, static_cast<uint32_t>(batch_head),
                                     row_begin + warp_row + lane / 4,
                                     key_begin + 16 * kk + 2 * (lane & 3));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int tile_row = warp_row + 8 * r + lane / 4;
      const GradientRow<T, kGeneral> row(p, static_cast<int>(batch), head, row_begin + tile_row,
                                         g_lse[tile_row], g_delta[tile_row], is_masked);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * r + e, key = key_begin + 8 * j + (lane & 3) * 2 + e;
          const float da = row.apply(scores[0][i], dp[0][i], key, kept[i / 8] >> (i % 8) & 1);
          if (kGeneral) alibi_grad[r] -= da * row.score_row.distance(key);
        }
      }
    }

#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {  // dQ += dS K
      uint32_t a[Config::kTerms][4];
      pack_operand<T>(&dp[0][8 * kk], a);
      multiply_block<T>(
          dq[0], a, [&](int col) { return b_trans_address<kBlockN>(s_k, 16 * kk, col, lane); },
          kKvTerm);
    }
    __syncthreads();  // barrier 3
  }

  if (kGeneral && p.dalibi_rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(alibi_grad[r]);
      const int row = row_begin + warp_row + 8 * r + lane / 4;
      if (lane % 4 == 0 && row < len_q)
        static_cast<float*>(p.dalibi_rows)[batch_head * p.len_q + row] = sum;
    }
  }
  __syncthreads();
  const float scale = static_cast<float>(p.scale);
  T* g_dq = static_cast<T*>(p.dq.data) + batch * p.dq.stride_batch + head * p.dq.stride_head;
  if constexpr (Config::kTerms == 1) {
    store_accumulator<T, kBlockM>(smem, dq[0], warp_row, 0, lane, scale, scale);
    __syncthreads();
    store_tile<T, kBlockM, kHeadDim, kThreads>(smem, g_dq, p.dq.stride_row, row_begin, len_q,
                                               head_dim);
  } else {
    store_accumulator_rows(g_dq, p.dq.stride_row, dq[0], row_begin + warp_row, len_q, 0, head_dim,
                           lane, scale, scale);
  }
}

}  // namespace hfb

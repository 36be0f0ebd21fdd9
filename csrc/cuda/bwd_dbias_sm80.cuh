// Gradient of an additive bias, for sm_80 and newer: dA of gradient.cuh, summed over the dimensions
// that the bias broadcasts, in fp32 and in a fixed order.
//
//   one block = kBlockM rows (all rows in turn, where the bias has one) and kBlockN keys of one
//               (batch, head) of the bias; it walks every batch and head that read this part
//   one warp  = 16 rows, all keys of the tile
//   registers = S, dP and the sum of dA [16, kBlockN] fp32
//   shared    = Q + dO [kBlockM, D] + K + V [kBlockN, D]; tiles.h: at most 96 KiB
//
//   barrier (all threads)   after                         publishes       frees
//   1                       cp.async.wait Q, dO, K, V     all four
//   2                       S and dP                                      all four
//
// It computes S and dP once more (2 products on top of 5) so that the sum over a broadcast batch or
// head needs neither atomic additions nor a gradient of the full size.
// In sync with: tiles.h, bwd_preprocess.cuh (lse, delta), bwd_sm80.cuh (the same P and dP).
#pragma once

#include "bwd_preprocess.cuh"
#include "device/gemm.cuh"
#include "device/gradient.cuh"

namespace hfb {

template <typename T, int kHeadDim>
struct BwdDbiasSm80 {
  static constexpr int kTerms = Operand<T>::kTerms;
  static constexpr Tile kTile = bwd_dbias_sm80_tile(kHeadDim, kTerms);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.num_warps, kThreads = kWarps * 32;
  static constexpr int kQBytes = kTerms * tile_bytes(kBlockM, kHeadDim),
                       kKvBytes = kTerms * tile_bytes(kBlockN, kHeadDim);
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(BwdDbiasSm80<T, kHeadDim>::kThreads, 1)
    bwd_dbias_sm80_kernel(const __grid_constant__ BackwardParams p, const BackwardBuffers buffers) {
  using Config = BwdDbiasSm80<T, kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarps = Config::kWarps;
  constexpr int kThreads = Config::kThreads;
  constexpr uint32_t kQTerm = kTermBytes<kBlockM, kHeadDim>,
                     kKvTerm = kTermBytes<kBlockN, kHeadDim>;
  extern __shared__ __align__(128) char smem[];
  char* const s_do_bytes = smem + Config::kQBytes;
  char* const s_k_bytes = s_do_bytes + Config::kQBytes;
  char* const s_v_bytes = s_k_bytes + Config::kKvBytes;
  const uint32_t s_q = smem_address(smem), s_do = smem_address(s_do_bytes),
                 s_k = smem_address(s_k_bytes), s_v = smem_address(s_v_bytes);
  __shared__ float s_columns[kWarps][kBlockN];

  const int len_q = static_cast<int>(p.len_q), len_kv = static_cast<int>(p.len_kv);
  const bool has_rows = p.bias_rows > 1 || len_q == 1;
  const int num_n = ceil_div(len_kv, kBlockN), num_m = ceil_div(len_q, kBlockM);
  const int grid_m = has_rows ? num_m : 1;
  const int key_begin = static_cast<int>(blockIdx.x % num_n) * kBlockN;
  const int own_m = blockIdx.x / num_n % grid_m;
  const int64_t bias_head = blockIdx.x / num_n / grid_m % p.bias_heads;
  const int64_t bias_batch = blockIdx.x / num_n / grid_m / p.bias_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * 16;
  const TileSpan span = visited_row_tiles(p.shared_band(), key_begin,
                                          min(key_begin + kBlockN, len_kv), len_q, kBlockM);
  const int first_m = has_rows ? max(own_m, span.first) : span.first;
  const int last_m = has_rows ? min(own_m + 1, span.last) : span.last;

  float sum[kBlockN / 2] = {};  // of dA
  auto visit = [&](int64_t batch, int head, int row_begin) {
    const int64_t batch_head = batch * p.heads_q + head;
    const int64_t head_kv = head / static_cast<int>(p.heads_q / p.heads_kv);
    const float* g_lse = buffers.lse + batch_head * buffers.len_q_padded;
    const float* g_delta = buffers.delta + batch_head * buffers.len_q_padded;
    auto load = [&](auto rows, uint32_t s_tile, const Strided<const void>& t, int64_t h, int begin,
                    int len, int64_t dim) {
      const T* g = static_cast<const T*>(t.data) + batch * t.stride_batch + h * t.stride_head;
      load_tile_async<T, decltype(rows)::value, kHeadDim, kThreads>(s_tile, g, t.stride_row, begin,
                                                                    len, static_cast<int>(dim));
    };
    const std::integral_constant<int, kBlockM> query_rows;
    const std::integral_constant<int, kBlockN> key_rows;
    load(query_rows, s_q, p.q, head, row_begin, len_q, p.head_dim);
    load(query_rows, s_do, p.dout, head, row_begin, len_q, p.head_dim_v);
    load(key_rows, s_k, p.k, head_kv, key_begin, len_kv, p.head_dim);
    load(key_rows, s_v, p.v, head_kv, key_begin, len_kv, p.head_dim_v);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // barrier 1

    float scores[1][kBlockN / 2] = {}, dp[1][kBlockN / 2] = {};
    multiply<T, kHeadDim>(  // S = Q K^T
        scores, [&](int kk, int) { return a_address<kBlockM>(s_q, warp_row, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_k, col, kk, lane); }, kQTerm, kKvTerm);
    multiply<T, kHeadDim>(  // dP = dO V^T
        dp, [&](int kk, int) { return a_address<kBlockM>(s_do, warp_row, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_v, col, kk, lane); }, kQTerm, kKvTerm);
    __syncthreads();  // barrier 2

    uint32_t kept[kBlockN / 16];
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
      kept[kk] = ~0u;
      if (p.dropout.seed) {
        kept[kk] = dropout_keep_bits(p.dropout, static_cast<uint32_t>(batch_head),
                                     row_begin + warp_row + lane / 4,
                                     key_begin + 16 * kk + 2 * (lane & 3));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_begin + warp_row + 8 * r + lane / 4;
      const bool exists = row < len_q;
      const float lse = exists ? g_lse[row] : INFINITY, delta = exists ? g_delta[row] : 0.f;
      const GradientRow<T, true> gradient(p, static_cast<int>(batch), head, row, lse, delta, true);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * r + e;
          const float da =
              gradient.apply(scores[0][i], dp[0][i], key_begin + 8 * j + (lane & 3) * 2 + e,
                             kept[i / 8] >> (i % 8) & 1);
          sum[i] += lse == INFINITY ? 0.f : da;  // a row that sees no key may hold NaN
        }
      }
    }
  };

  const int64_t first_batch = p.bias_batch > 1 ? bias_batch : 0;
  const int64_t last_batch = p.bias_batch > 1 ? bias_batch + 1 : p.batch;
  const int first_head = p.bias_heads > 1 ? static_cast<int>(bias_head) : 0;
  const int last_head = p.bias_heads > 1 ? first_head + 1 : static_cast<int>(p.heads_q);
#pragma unroll 1
  for (int64_t batch = first_batch; batch < last_batch; ++batch) {
#pragma unroll 1
    for (int head = first_head; head < last_head; ++head) {
#pragma unroll 1
      for (int m = first_m; m < last_m; ++m) visit(batch, head, m * kBlockM);
    }
  }

  float* g_dbias = static_cast<float*>(p.dbias) +
                   (bias_batch * p.bias_heads + bias_head) * p.bias_rows * p.len_kv;
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int row = own_m * kBlockM + warp_row + lane / 4 + (i & 2) * 4;
      const int key = key_begin + i / 4 * 8 + (lane & 3) * 2 + (i & 1);
      if (row < len_q && key < len_kv) g_dbias[row * p.len_kv + key] = sum[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    if (i & 2) continue;
    float column = sum[i] + sum[i + 2];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
      column += __shfl_xor_sync(0xffffffffu, column, offset);
    if (lane < 4) s_columns[warp][i / 4 * 8 + lane * 2 + (i & 1)] = column;
  }
  __syncthreads();
  for (int col = threadIdx.x; col < kBlockN && key_begin + col < len_kv; col += kThreads) {
    float total = 0.f;
    for (int w = 0; w < kWarps; ++w) total += s_columns[w][col];
    g_dbias[key_begin + col] = total;
  }
}

}  // namespace hfb

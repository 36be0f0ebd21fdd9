// Forward attention for sm_80 and newer, fp16, bf16 and fp32.     FA2, arXiv:2307.08691, Alg. 1.
//
//   one block = kBlockM query rows of one (batch, query head); one warp = kRowBlocks x 16 rows, all
//               keys of a tile; every K and V fragment it reads serves kRowBlocks products
//   keys      = tiles of kBlockN, last to first: the masked tiles of a causal row come first
//   registers = S [16, kBlockN] and O [16, kHeadDim] fp32 accumulators a warp; P is S packed to the
//               input dtype, whose accumulator layout already is the A operand of P V
//   shared    = Q [kBlockM, D] + K [kBlockN, D] + V [kBlockN, D]; tiles.h: 48 KiB at D = 64,
//               64 KiB at 96 and 128, 96 KiB at 192 and 256. O leaves through Q's rows. fp32 tiles
//               have three terms (operand.cuh): 72 KiB at 64, 96 KiB at 128 and 256
//   rounding  = S, m, l, O fp32; P rounded to the input dtype before P V, as eager does; O once
//
//   barrier (all threads)   after                        publishes    frees
//   1, top of a tile        cp.async.wait K(n), Q        K(n), Q      V: all warps did P V(n + 1)
//   2, before the softmax   cp.async.wait V(n)           V(n)         K: all warps did Q K(n)^T
//   Copies in flight: V(n) under Q K(n)^T, K(n - 1) under the softmax and P V(n).
//
// Template: kGeneral adds softcap, bias, ALiBi, mask, dropout and any sign of scale; without it only
// the key range of a row matters and full tiles run unmasked. A sink joins once, at the end.
// In sync with: tiles.h (sizes), tiling.h (which tiles), reference.py (semantics).
#pragma once

#include "device/gemm.cuh"
#include "device/mask.cuh"
#include "device/nonfinite.cuh"
#include "device/softmax.cuh"

namespace hfb {

template <typename T, int kHeadDim, bool kGeneral>
struct FwdSm80 {
  static constexpr int kTerms = Operand<T>::kTerms;
  static constexpr Tile kTile = fwd_sm80_tile(kHeadDim, kTerms);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kWarps = kTile.num_warps;
  static constexpr int kThreads = kWarps * 32, kRowBlocks = kBlockM / (16 * kWarps);
  static constexpr int kQBytes = kTerms * tile_bytes(kBlockM, kHeadDim),
                       kKvBytes = kTerms * tile_bytes(kBlockN, kHeadDim);
  static_assert(kTerms == 1 || kGeneral, "fp32 has the general kernel only");
};

template <typename T, int kHeadDim, bool kGeneral>
__global__ void __launch_bounds__(FwdSm80<T, kHeadDim, kGeneral>::kThreads, 1)
    fwd_sm80_kernel(const __grid_constant__ ForwardParams p) {
  using Config = FwdSm80<T, kHeadDim, kGeneral>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;
  constexpr int kRowBlocks = Config::kRowBlocks;
  extern __shared__ __align__(128) char smem[];
  char* const s_v_bytes = smem + Config::kQBytes + Config::kKvBytes;
  const uint32_t s_q = smem_address(smem), s_k = s_q + Config::kQBytes,
                 s_v = s_k + Config::kKvBytes;
  __shared__ __align__(16) int s_scratch[4 * Config::kWarps];

  // Tile order: heads of one group side by side (they share K and V in L2); the longest causal rows
  // first.
  const int num_m = ceil_div(static_cast<int>(p.len_q), kBlockM);
  const int head = (blockIdx.x / num_m) % static_cast<int>(p.heads_q);
  const int64_t batch = blockIdx.x / num_m / static_cast<int>(p.heads_q);
  const int row_begin = (num_m - 1 - static_cast<int>(blockIdx.x % num_m)) * kBlockM;
  const int64_t head_kv = head / static_cast<int>(p.heads_q / p.heads_kv);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * (16 * kRowBlocks);
  const int len_q = static_cast<int>(p.len_q), len_kv = static_cast<int>(p.len_kv);
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);

  const T* g_q =
      static_cast<const T*>(p.q.data) + batch * p.q.stride_batch + head * p.q.stride_head;
  const T* g_k =
      static_cast<const T*>(p.k.data) + batch * p.k.stride_batch + head_kv * p.k.stride_head;
  const T* g_v =
      static_cast<const T*>(p.v.data) + batch * p.v.stride_batch + head_kv * p.v.stride_head;
  T* g_out = static_cast<T*>(p.out.data) + batch * p.out.stride_batch + head * p.out.stride_head;
  float* g_lse = static_cast<float*>(p.lse) + (batch * p.heads_q + head) * p.len_q;

  load_tile_async<T, kBlockM, kHeadDim, kThreads>(s_q, g_q, p.q.stride_row, row_begin, len_q,
                                                  head_dim);
  const RowBlock rows = join_rows<kBlockM, kThreads>(p, batch, row_begin, s_scratch);
  const TileSpan span = visited_key_tiles(rows, kBlockN);
  auto load_k = [&](int n) {
    load_tile_async<T, kBlockN, kHeadDim, kThreads>(s_k, g_k, p.k.stride_row, n * kBlockN, len_kv,
                                                    head_dim);
  };
  if (span.first < span.last) load_k(span.last - 1);
  cp_async_commit();

  // Row r (0, 1) of this lane in row block mb.
  auto lane_row = [&](int mb, int r) { return row_begin + warp_row + 16 * mb + 8 * r + lane / 4; };
  const float scale = static_cast<float>(p.scale);

  OnlineSoftmax<kGeneral> softmax[kRowBlocks];
#pragma unroll
  for (int mb = 0; mb < kRowBlocks; ++mb) softmax[mb].to_log2 = kGeneral ? kLog2e : scale * kLog2e;
  float out[kRowBlocks][kHeadDim / 2] = {};  // O [16, kHeadDim] a row block
  bool cleared_values = false;

  // Sets the scores of key tile n that row block mb does not see to -inf; kGeneral: brings the rest
  // to natural units and applies softcap, bias and mask.
  auto hide_keys = [&](float (&tile_scores)[kBlockN / 2], int n, int mb) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row(mb, r);
      const KeyRange visible = row < len_q ? p.row_keys(batch, row) : KeyRange{0, 0};
      const ScoreRow score_row(p, static_cast<int>(batch), head, row);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n * kBlockN + 8 * j + (lane & 3) * 2 + e;
          float& score = tile_scores[4 * j + 2 * r + e];
          if (key < visible.begin || key >= visible.end) {
            score = -INFINITY;
          } else if constexpr (kGeneral) {
            score = score_row.template apply<T>(score * scale, key);
          }
        }
      }
    }
  };

  auto visit_tile = [&](int n, auto masked_tag) {
    constexpr bool kMasked = decltype(masked_tag)::value;
    cp_async_wait<0>();
    __syncthreads();  // barrier 1
    load_tile_async<T, kBlockN, kHeadDim, kThreads>(s_v, g_v, p.v.stride_row, n * kBlockN, len_kv,
                                                    head_dim_v);
    cp_async_commit();

    float scores[kRowBlocks][kBlockN / 2] = {};  // S [16, kBlockN] a row block
    multiply<T, kHeadDim>(
        scores,
        [&](int kk, int mb) { return a_address<kBlockM>(s_q, warp_row + 16 * mb, kk, lane); },
        [&](int kk, int key) { return b_address<kBlockN>(s_k, key, kk, lane); },
        kTermBytes<kBlockM, kHeadDim>, kTermBytes<kBlockN, kHeadDim>);

    cp_async_wait<0>();
    if constexpr (kMasked) {
      cleared_values |= clear_nonfinite<T, kBlockN, kHeadDim, kThreads>(s_v_bytes);
    }
    __syncthreads();  // barrier 2
    if (n > span.first) {
      load_k(n - 1);
      cp_async_commit();
    }

#pragma unroll
    for (int mb = 0; mb < kRowBlocks; ++mb) {
      if constexpr (kMasked) hide_keys(scores[mb], n, mb);
      softmax[mb].update(scores[mb], out[mb]);
    }

#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {
#pragma unroll
      for (int mb = 0; mb < kRowBlocks; ++mb) {
        if (kGeneral && p.dropout.seed) {
          const uint32_t kept =
              dropout_keep_bits(p.dropout, static_cast<uint32_t>(batch * p.heads_q + head),
                                lane_row(mb, 0), n * kBlockN + 16 * kk + 2 * (lane & 3));
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (!(kept >> i & 1)) scores[mb][8 * kk + i] = 0.f;
          }
        }
        uint32_t a[Config::kTerms][4];  // P [16, 16]: the accumulator layout is the A operand's
        pack_operand<T>(&scores[mb][8 * kk], a);
        multiply_block<T>(
            out[mb], a, [&](int col) { return b_trans_address<kBlockN>(s_v, 16 * kk, col, lane); },
            kTermBytes<kBlockN, kHeadDim>);
      }
    }
  };

  // Full tiles lie between the masked ones: [first, full_first) masked, [full_first, full_last)
  // full, rest masked.
  int n = span.last - 1;
  if constexpr (kGeneral) {
#pragma unroll 1
    for (; n >= span.first; --n) visit_tile(n, std::true_type{});
  } else {
    auto is_full = [&](int tile) {
      return classify_tile(rows, tile * kBlockN, (tile + 1) * kBlockN) == TileKind::kFull;
    };
#pragma unroll 1
    while (n >= span.first) {
#pragma unroll 1
      for (; n >= span.first && !is_full(n); --n) visit_tile(n, std::true_type{});
#pragma unroll 1
      for (; n >= span.first && is_full(n); --n) visit_tile(n, std::false_type{});
    }
  }

  // Epilogue: O / l through this warp's own Q rows (no other warp reads them), 16-byte stores.
  cp_async_wait<0>();
  __syncthreads();  // no tile visited: Q's copy may still be in flight
#pragma unroll
  for (int mb = 0; mb < kRowBlocks; ++mb) {
    float inverse_sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row(mb, r);
      float lse;
      inverse_sum[r] = softmax[mb].finish(r, row_sink(p, batch, head, row), lse);
      if (kGeneral) inverse_sum[r] *= p.dropout.rescale;  // 1 without dropout
      if (lane % 4 == 0 && row < len_q) g_lse[row] = lse;
    }
    if constexpr (Config::kTerms == 1) {
      store_accumulator<T, kBlockM>(smem, out[mb], warp_row + 16 * mb, 0, lane, inverse_sum[0],
                                    inverse_sum[1]);
    } else {
      store_accumulator_rows(g_out, p.out.stride_row, out[mb], row_begin + warp_row + 16 * mb,
                             len_q, 0, head_dim_v, lane, inverse_sum[0], inverse_sum[1]);
    }
  }
  const bool restore = __syncthreads_or(cleared_values);
  if constexpr (Config::kTerms == 1) {
    store_tile<T, kBlockM, kHeadDim, kThreads>(smem, g_out, p.out.stride_row, row_begin, len_q,
                                               head_dim_v);
  }
  if (restore) {
    __syncthreads();
    restore_nonfinite_values<T, kGeneral, kBlockM, kBlockN, Config::kWarps>(
        p, g_q, g_k, g_v, g_out, g_lse, rows, batch, head, row_begin, threadIdx.x / 32);
  }
}

}  // namespace hfb

// Backward attention for sm_80 and newer, fp16, bf16 and fp32.     FA2, arXiv:2307.08691, Alg. 2.
//
//   P = exp(S - lse)    dP = dO V^T    dS = P * (dP - delta)
//   dV += P^T dO        dK += scale * dS^T Q        dQ += scale * dS K
//
//   one block = kBlockN keys of one (batch, kv head); it walks every query head of the group and
//               every query tile that sees the keys, so dK and dV of the group are summed in fp32
//               registers, in a fixed order
//   warps     = a grid (tiles.h, warp_grid) over S and dP [kBlockM, kBlockN], one over dK and dV
//               [kBlockN, D], one over dQ [kBlockM, D]. P and dS go through shared memory, where
//               they are read transposed
//   dQ        = fp32 reductions into a workspace in thread order (float4 i of thread t lies at
//               i * kThreads + t), so every warp writes whole 512-byte runs; bwd_postprocess
//               un-permutes. The order of these additions is not fixed; without an accumulator
//               bwd_dq_sm80 computes dQ, by rows
//   shared    = K + V [kBlockN, D] + kQStages Q + dO [kBlockM, D] + P + dS [kBlockM, kBlockN];
//               tiles.h: 88 KiB at D = 64, 144 KiB at 96, 128 and 256, 112 KiB at 192; a smaller
//               tile on GPUs that offer only 99 KiB. fp32 tiles have three terms (operand.cuh):
//               144 KiB at 64, 168 KiB at 128, 216 KiB at 256
//   rounding  = S, dP, dS and all sums fp32; P and dS rounded to the input dtype before a product
//
//   barrier (all threads)   after                   publishes         frees
//   1, top of a tile        cp.async.wait Q, dO     Q, dO (K, V)      P, dS, the other Q stage
//   2, before dV            P, dS stores            P, dS
//   3, after dV and dQ                                                dO
//   Copies in flight: Q of the next tile under this one (two stages), its dO under dK.
//
// In sync with: tiles.h, tiling.h, bwd_preprocess.cuh, bwd_postprocess.cuh, reference.py.
#pragma once

#include "bwd_preprocess.cuh"
#include "device/gemm.cuh"
#include "device/gradient.cuh"

namespace hfb {

template <typename T, int kHeadDim, bool kSmallSmem>
struct BwdSm80 {
  static constexpr int kTerms = Operand<T>::kTerms;
  static constexpr Tile kTile = bwd_sm80_tile(kHeadDim, kSmallSmem, kTerms);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kWarps = kTile.num_warps;
  static constexpr int kThreads = kWarps * 32, kQStages = bwd_sm80_q_stages(kHeadDim, kTerms);
  static constexpr WarpGrid kS = warp_grid(kBlockM, kBlockN, kWarps);
  static constexpr WarpGrid kDkv = warp_grid(kBlockN, kHeadDim, kWarps);
  static constexpr WarpGrid kDq = warp_grid(kBlockM, kHeadDim, kWarps);
  static constexpr int kDqThreads = kThreads, kDqRun = kThreads;  // for bwd_postprocess
  static constexpr int kKvBytes = kTerms * tile_bytes(kBlockN, kHeadDim),
                       kQBytes = kTerms * tile_bytes(kBlockM, kHeadDim);
  static constexpr int kPBytes = kTerms * tile_bytes(kBlockM, kBlockN);
  static_assert(kS.cols % 16 == 0 && kDkv.cols % 16 == 0 && kDq.cols % 16 == 0);
};

template <typename T, int kHeadDim, bool kGeneral, bool kSmallSmem>
__global__ void __launch_bounds__(BwdSm80<T, kHeadDim, kSmallSmem>::kThreads, 1)
    bwd_sm80_kernel(const __grid_constant__ BackwardParams p, const BackwardBuffers buffers) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kSmallSmem) {  // these GPUs offer more; compiling the rest costs 20 s of the build
    __trap();
    return;
  }
#endif
  using Config = BwdSm80<T, kHeadDim, kSmallSmem>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;
  constexpr int kQStages = Config::kQStages;
  constexpr uint32_t kQTerm = kTermBytes<kBlockM, kHeadDim>,
                     kKvTerm = kTermBytes<kBlockN, kHeadDim>, kPTerm = kTermBytes<kBlockM, kBlockN>;
  constexpr WarpGrid kS = Config::kS, kDkv = Config::kDkv, kDq = Config::kDq;
  extern __shared__ __align__(128) char smem[];
  char* const s_v_bytes = smem + Config::kKvBytes;
  char* const s_q_bytes = s_v_bytes + Config::kKvBytes;
  char* const s_do_bytes = s_q_bytes + kQStages * Config::kQBytes;
  char* const s_p_bytes = s_do_bytes + Config::kQBytes;
  char* const s_ds_bytes = s_p_bytes + Config::kPBytes;
  const uint32_t s_k = smem_address(smem), s_v = smem_address(s_v_bytes),
                 s_do = smem_address(s_do_bytes);
  const uint32_t s_p = smem_address(s_p_bytes), s_ds = smem_address(s_ds_bytes);

  const int len_q = static_cast<int>(p.len_q), len_kv = static_cast<int>(p.len_kv);
  const int head_dim = static_cast<int>(p.head_dim), head_dim_v = static_cast<int>(p.head_dim_v);
  const int num_n = ceil_div(len_kv, kBlockN), num_m = buffers.len_q_padded / kBlockM;
  const int key_begin = static_cast<int>(blockIdx.x % num_n) * kBlockN;
  const int key_end = min(key_begin + kBlockN, len_kv);
  const int64_t head_kv = blockIdx.x / num_n % static_cast<int>(p.heads_kv);
  const int64_t batch = blockIdx.x / num_n / static_cast<int>(p.heads_kv);
  const int group = static_cast<int>(p.heads_q / p.heads_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // This warp's part of S and dP, of dK and dV, of dQ.
  const int s_row = warp % kS.warps_m * (16 * kS.row_blocks), s_col = warp / kS.warps_m * kS.cols;
  const int kv_row = warp % kDkv.warps_m * (16 * kDkv.row_blocks);
  const int kv_col = warp / kDkv.warps_m * kDkv.cols;
  const int dq_row = warp % kDq.warps_m * (16 * kDq.row_blocks);
  const int dq_col = warp / kDq.warps_m * kDq.cols;

  const T* g_k =
      static_cast<const T*>(p.k.data) + batch * p.k.stride_batch + head_kv * p.k.stride_head;
  const T* g_v =
      static_cast<const T*>(p.v.data) + batch * p.v.stride_batch + head_kv * p.v.stride_head;
  const float scale = static_cast<float>(p.scale);

  // The walk over (head of the group, query tile): tiles of which no row sees a key of this block
  // are left out.
  const TileSpan span = visited_row_tiles(p.shared_band(), key_begin, key_end, len_q, kBlockM);
  struct Position {
    int g, m;
  };
  auto kind_of = [&](int m) {
    return classify_tile(buffers.row_blocks[batch * num_m + m], key_begin, key_begin + kBlockN);
  };
  auto next_visited = [&](Position at) {
    for (; at.g < group; ++at.g, at.m = span.first) {
      for (; at.m < span.last; ++at.m) {
        if (kind_of(at.m) != TileKind::kSkip) return at;
      }
    }
    return at;
  };
  auto load_q = [&](Position at, int stage) {
    const int64_t head = head_kv * group + at.g;
    const T* g_q =
        static_cast<const T*>(p.q.data) + batch * p.q.stride_batch + head * p.q.stride_head;
    load_tile_async<T, kBlockM, kHeadDim, kThreads>(
        smem_address(s_q_bytes + stage * Config::kQBytes), g_q, p.q.stride_row, at.m * kBlockM,
        len_q, head_dim);
  };
  auto load_dout = [&](Position at) {
    const int64_t head = head_kv * group + at.g;
    const T* g_dout = static_cast<const T*>(p.dout.data) + batch * p.dout.stride_batch +
                      head * p.dout.stride_head;
    load_tile_async<T, kBlockM, kHeadDim, kThreads>(s_do, g_dout, p.dout.stride_row, at.m * kBlockM,
                                                    len_q, head_dim_v);
  };

  float dk[kDkv.row_blocks][kDkv.cols / 2] = {}, dv[kDkv.row_blocks][kDkv.cols / 2] = {};

  Position at = next_visited({0, span.first});
  int stage = 0;
  load_tile_async<T, kBlockN, kHeadDim, kThreads>(s_k, g_k, p.k.stride_row, key_begin, len_kv,
                                                  head_dim);
  load_tile_async<T, kBlockN, kHeadDim, kThreads>(s_v, g_v, p.v.stride_row, key_begin, len_kv,
                                                  head_dim_v);
  if (at.g < group) {
    load_q(at, 0);
    load_dout(at);
  }
  cp_async_commit();
  cp_async_wait<0>();
  // A key hidden from some row must not reach it as 0 * NaN. Rows that see a NaN key are NaN
  // through lse and delta.
  clear_nonfinite<T, kBlockN, kHeadDim, kThreads>(smem);
  clear_nonfinite<T, kBlockN, kHeadDim, kThreads>(s_v_bytes);

#pragma unroll 1
  while (at.g < group) {
    const int head = static_cast<int>(head_kv) * group + at.g, row_begin = at.m * kBlockM;
    const int64_t batch_head = batch * p.heads_q + head;
    const bool is_masked = kGeneral || kind_of(at.m) == TileKind::kMasked;
    const float* g_lse = buffers.lse + batch_head * buffers.len_q_padded + row_begin;
    const float* g_delta = buffers.delta + batch_head * buffers.len_q_padded + row_begin;
    char* const s_q_now = s_q_bytes + stage * Config::kQBytes;
    const uint32_t s_q = smem_address(s_q_now);

    cp_async_wait<0>();
    if (is_masked) {
      // A row that sees no key has lse = +inf here; whatever it holds stays out of dK and dV.
      auto sees_nothing = [&](int row) { return g_lse[row] == INFINITY; };
      zero_rows<T, kBlockM, kHeadDim, kThreads>(s_q_now, sees_nothing);
      zero_rows<T, kBlockM, kHeadDim, kThreads>(s_do_bytes, sees_nothing);
      clear_nonfinite<T, kBlockM, kHeadDim, kThreads>(s_q_now);  // such a row has lse = NaN
    }
    __syncthreads();  // barrier 1
    const Position next = next_visited({at.g, at.m + 1});
    if (kQStages == 2 && next.g < group) {
      load_q(next, stage ^ 1);
      cp_async_commit();
    }

    float scores[kS.row_blocks][kS.cols / 2] = {}, dp[kS.row_blocks][kS.cols / 2] = {};
    multiply<T, kHeadDim>(  // S = Q K^T
        scores, [&](int kk, int mb) { return a_address<kBlockM>(s_q, s_row + 16 * mb, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_k, s_col + col, kk, lane); }, kQTerm,
        kKvTerm);
    multiply<T, kHeadDim>(  // dP = dO V^T
        dp, [&](int kk, int mb) { return a_address<kBlockM>(s_do, s_row + 16 * mb, kk, lane); },
        [&](int kk, int col) { return b_address<kBlockN>(s_v, s_col + col, kk, lane); }, kQTerm,
        kKvTerm);

#pragma unroll
    for (int mb = 0; mb < kS.row_blocks; ++mb) {
      uint32_t kept[kS.cols / 16];  // see dropout_keep_bits
#pragma unroll
      for (int kk = 0; kk < kS.cols / 16; ++kk) {
        kept[kk] = ~0u;
        if (kGeneral && p.dropout.seed) {
          kept[kk] = dropout_keep_bits(p.dropout, static_cast<uint32_t>(batch_head),
                                       row_begin + s_row + 16 * mb + lane / 4,
                                       key_begin + s_col + 16 * kk + 2 * (lane & 3));
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int tile_row = s_row + 16 * mb + 8 * r + lane / 4;
        const GradientRow<T, kGeneral> row(p, static_cast<int>(batch), head, row_begin + tile_row,
                                           g_lse[tile_row], g_delta[tile_row], is_masked);
#pragma unroll
        for (int j = 0; j < kS.cols / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 4 * j + 2 * r + e;
            row.apply(scores[mb][i], dp[mb][i], key_begin + s_col + 8 * j + (lane & 3) * 2 + e,
                      kept[i / 8] >> (i % 8) & 1);
          }
        }
      }
      store_accumulator<T, kBlockM>(s_p_bytes, scores[mb], s_row + 16 * mb, s_col, lane, 1.f, 1.f,
                                    kPTerm);
      store_accumulator<T, kBlockM>(s_ds_bytes, dp[mb], s_row + 16 * mb, s_col, lane, 1.f, 1.f,
                                    kPTerm);
    }
    __syncthreads();  // barrier 2

    multiply<T, kBlockM, kTransA | kTransB>(  // dV += P^T dO
        dv,
        [&](int kk, int mb) { return a_trans_address<kBlockM>(s_p, kk, kv_row + 16 * mb, lane); },
        [&](int kk, int col) { return b_trans_address<kBlockM>(s_do, kk, kv_col + col, lane); },
        kPTerm, kQTerm);
    if (buffers.dq_accumulator != nullptr) {
      float dq[kDq.row_blocks][kDq.cols / 2] = {};
      multiply<T, kBlockN, kTransB>(  // dQ = dS K
          dq, [&](int kk, int mb) { return a_address<kBlockM>(s_ds, dq_row + 16 * mb, kk, lane); },
          [&](int kk, int col) { return b_trans_address<kBlockN>(s_k, kk, dq_col + col, lane); },
          kPTerm, kKvTerm);
      float* accumulator = buffers.dq_accumulator +
                           (batch_head * num_m + at.m) * (kBlockM * kHeadDim) + threadIdx.x * 4;
#pragma unroll
      for (int mb = 0; mb < kDq.row_blocks; ++mb) {
#pragma unroll
        for (int j = 0; j < kDq.cols / 8; ++j) {
          red_add_4(accumulator, &dq[mb][4 * j]);
          accumulator += kThreads * 4;
        }
      }
    }
    __syncthreads();  // barrier 3
    if (next.g < group) {
      load_dout(next);
      cp_async_commit();
    }

    multiply<T, kBlockM, kTransA | kTransB>(  // dK += dS^T Q
        dk,
        [&](int kk, int mb) { return a_trans_address<kBlockM>(s_ds, kk, kv_row + 16 * mb, lane); },
        [&](int kk, int col) { return b_trans_address<kBlockM>(s_q, kk, kv_col + col, lane); },
        kPTerm, kQTerm);
    if (kQStages == 2) {
      stage ^= 1;
    } else if (next.g < group) {
      __syncthreads();  // Q is free
      load_q(next, 0);
      cp_async_commit();
    }
    at = next;
  }

  // dK and dV leave through the K and V tiles, fp32 from the registers.
  cp_async_wait<0>();
  __syncthreads();
  T* g_dk = static_cast<T*>(p.dk.data) + batch * p.dk.stride_batch + head_kv * p.dk.stride_head;
  T* g_dv = static_cast<T*>(p.dv.data) + batch * p.dv.stride_batch + head_kv * p.dv.stride_head;
  const float rescale = p.dropout.rescale;
#pragma unroll
  for (int mb = 0; mb < kDkv.row_blocks; ++mb) {
    const int row = kv_row + 16 * mb;
    if constexpr (Config::kTerms == 1) {
      store_accumulator<T, kBlockN>(smem, dk[mb], row, kv_col, lane, scale, scale);
      store_accumulator<T, kBlockN>(s_v_bytes, dv[mb], row, kv_col, lane, rescale, rescale);
    } else {
      store_accumulator_rows(g_dk, p.dk.stride_row, dk[mb], key_begin + row, len_kv, kv_col,
                             head_dim, lane, scale, scale);
      store_accumulator_rows(g_dv, p.dv.stride_row, dv[mb], key_begin + row, len_kv, kv_col,
                             head_dim_v, lane, rescale, rescale);
    }
  }
  if constexpr (Config::kTerms == 1) {
    __syncthreads();
    store_tile<T, kBlockN, kHeadDim, kThreads>(smem, g_dk, p.dk.stride_row, key_begin, len_kv,
                                               head_dim);
    store_tile<T, kBlockN, kHeadDim, kThreads>(s_v_bytes, g_dv, p.dv.stride_row, key_begin, len_kv,
                                               head_dim_v);
  }
}

}  // namespace hfb

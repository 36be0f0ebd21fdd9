// Forward attention for sm_90 (Hopper), fp16 and bf16, without mask, bias, softcap, ALiBi, dropout.
//                     FA2, arXiv:2307.08691, Alg. 1; overlap of FA3, arXiv:2407.08608, Alg. 2.
//
//   one block = one SM, persistent; it takes query tiles of kBlockM rows in the order of TileOrder
//   warpgroup 0 = producer: warp 0 copies Q, K and V tiles by TMA; warps 1 to 3 clear inf and NaN
//               out of V tiles that are masked (kBanded)
//   warpgroups 1.. = consumers of 64 rows each, all keys of a tile, last key tile to first
//   registers = S [64, kBlockN] and O [64, kHeadDim] fp32, P [64, kBlockN] of the input dtype per
//               consumer; P is S packed in place, which already is the A operand of P V
//   shared    = Q [kBlockM, D] + kStages x (K, V [kBlockN, D]) + tile slots + barriers; tiles.h:
//               121 (banded 153) KiB at D = 64, 209 (225) KiB at 128, 225 KiB at 256
//   overlap   = S(n) = Q K(n)^T and O += P(n + 1) V(n + 1) are in flight together; the softmax of
//               S(n) runs under the latter and under the products of the other consumers, which
//               take turns
//   rounding  = as fwd_sm80: S, m, l, O fp32; P rounded to the input dtype before P V; O once
//
//   mbarrier      completed by                            waited for by
//   q_full        TMA of Q                                consumers
//   q_empty       consumers, after their last Q K^T       producer
//   k/v_full[s]   TMA of a K or V tile                    consumers; v also by the cleaning warps
//   v_clean[s]    the three cleaning warps                consumers, where the tile is masked
//   k/v_empty[s]  consumers (v: and cleaning warps)       producer
//   slot_full[2]  producer: a query tile is published     all other warps
//   slot_empty[2] all other warps                         producer
//   named barrier 1 + c: turn of consumer c (its 128 threads and the 128 of the one before it);
//   8 + c: the 128 threads of consumer c
//
// Template: kBanded = band or row limits, so that tiles are skipped and masked; without it every
// row sees every key and only the tile past the end of K is masked (TMA writes zeros there, so V
// needs no cleaning).
// Here: consumers and kernel; fwd_sm90_producer.cuh: constants, producer and cleaning warps.
// In sync with: tiles.h (sizes), tiling.h (which tiles, their order), reference.py (semantics).
#pragma once

#include "device/nonfinite.cuh"
#include "device/softmax.cuh"
#include "device/wgmma.cuh"
#include "fwd_sm90_producer.cuh"

namespace hfb {

// A consumer warpgroup: rows [64 * consumer, + 64) of every query tile.
template <typename T, int kHeadDim, bool kBanded>
__device__ __forceinline__ void consume_tiles(const ForwardParams& p, char* smem, int consumer) {
  using Config = FwdSm90<T, kHeadDim, kBanded>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int len_q = static_cast<int>(p.len_q);
  const uint32_t s_base = smem_address(smem);
  // The shuffle tells the compiler that the descriptor is the same in all lanes.
  const uint64_t q_tile =
      tile_descriptor(s_base + __shfl_sync(~0u, consumer, 0) * 64 * 128, kBlockM * 128);
  const uint64_t k_tiles = tile_descriptor(s_base + Config::kK, kBlockN * 128);
  const uint64_t v_tiles = tile_descriptor(s_base + Config::kV, kBlockN * 128);

  RingPosition<Config::kStages> stage;  // of the K tile in work; V follows one tile behind
  TileCount count;
  if (consumer == 0) named_barrier_arrive(Config::kTurnBarrier, 256);  // the first turn

  for (;;) {
    mbarrier_wait(s_base + Config::kSlotFull + 8 * count.slot(), count.slot_parity());
    TileSlot* const tile = reinterpret_cast<TileSlot*>(smem + Config::kSlots) + count.slot();
    if (tile->row_begin < 0) return;
    const TileSpan span = visited_key_tiles(tile->rows, kBlockN);
    const TileSpan full = full_key_tiles(tile->rows, span, kBlockN);

    OnlineSoftmax<false> softmax;
    softmax.to_log2 = static_cast<float>(p.scale) * kLog2e;
    float out[kHeadDim / 2];          // O [64, kHeadDim]
    uint32_t probs[kBlockN / 16][4];  // P [64, kBlockN], A operands
    float rescale[2] = {1.f, 1.f};
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.f;

    // Row r (0, 1) of this lane.
    auto lane_row = [&](int r) {
      return tile->row_begin + consumer * 64 + warp * 16 + 8 * r + lane / 4;
    };
    auto start_scores = [&](float (&scores)[kBlockN / 2]) {
      leave_undefined(scores);
      wgmma_fence();
      const uint64_t k_tile = k_tiles + (stage.index * Config::kKvBytes >> 4);
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        Wgmma<kBlockN>::template multiply_shared<T>(scores, q_tile + k_step(kk, kBlockM),
                                                    k_tile + k_step(kk, kBlockN), kk != 0);
      }
      wgmma_commit();
    };
    auto start_output = [&](int v_index) {
      wgmma_fence();
      const uint64_t v_tile = v_tiles + (v_index * Config::kKvBytes >> 4);
#pragma unroll
      for (int kk = 0; kk < kBlockN / 16; ++kk) {
        Wgmma<kHeadDim>::template multiply_registers<T>(out, probs[kk], v_tile + k_step_trans(kk));
      }
      wgmma_commit();
    };
    // wait: the K tile of this stage was read by this warpgroup; after the last one Q is free too.
    auto release_k = [&](int n) {
      if (thread != 0) return;
      mbarrier_arrive(s_base + Config::kKEmpty + 8 * stage.index);
      if (n == span.first) mbarrier_arrive(s_base + Config::kQEmpty);
    };
    auto wait_v = [&](const RingPosition<Config::kStages>& v_stage, bool is_masked) {
      mbarrier_wait(s_base + Config::kVFull + 8 * v_stage.index, v_stage.parity);
      if (kBanded && is_masked)
        mbarrier_wait(s_base + Config::kVClean + 8 * v_stage.index, v_stage.parity);
    };
    auto is_masked = [&](int n) { return n < full.first || n >= full.last; };
    auto hide_keys = [&](float (&scores)[kBlockN / 2], int n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        KeyRange visible = {0, static_cast<int32_t>(p.len_kv)};
        if constexpr (kBanded) {
          const int row = lane_row(r);
          visible = row < len_q ? p.row_keys(tile->batch, row) : KeyRange{0, 0};
        }
        const int column0 = n * kBlockN + (lane & 3) * 2;
        const int begin = visible.begin - column0, end = visible.end - column0;
#pragma unroll
        for (int j = 0; j < kBlockN / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * j + e;
            if ((kBanded && column < begin) || column >= end) scores[4 * j + 2 * r + e] = -INFINITY;
          }
        }
      }
    };
    auto pack_probabilities = [&](const float (&scores)[kBlockN / 2]) {
#pragma unroll
      for (int kk = 0; kk < kBlockN / 16; ++kk)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          probs[kk][i] = pack2<T>(scores[8 * kk + 2 * i], scores[8 * kk + 2 * i + 1]);
    };
    auto rescale_output = [&] {
      if (Config::kLazyRescale && !__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) scale_row(r, out, rescale[r]);
    };

    // Key tile n, while P and V of tile n + 1 are still to be multiplied.
    auto visit_tile = [&](int n, auto masked_tag) {
      constexpr bool kMasked = decltype(masked_tag)::value;
      const RingPosition<Config::kStages> v_stage = stage;
      stage.advance();
      float scores[kBlockN / 2];  // S [64, kBlockN]
      mbarrier_wait(s_base + Config::kKFull + 8 * stage.index, stage.parity);
      named_barrier_sync(Config::kTurnBarrier + consumer, 256);
      start_scores(scores);
      if constexpr (kHeadDim > 128) rescale_output();  // under Q K^T: O has no product in flight
      wait_v(v_stage, is_masked(n + 1));
      start_output(v_stage.index);
      named_barrier_arrive(Config::kTurnBarrier + (consumer + 1) % Config::kConsumers, 256);
      wgmma_wait<1>();
      keep(scores);
      release_k(n);
      if constexpr (kMasked) hide_keys(scores, n);
      rescale[0] = softmax.template update_row<Config::kLazyRescale>(0, scores);
      if constexpr (Config::kWaitInSoftmax) {
        keep(scores);
        const RingPosition<Config::kStages> next = stage.next();
        if (n > span.first) mbarrier_wait(s_base + Config::kKFull + 8 * next.index, next.parity);
      }
      rescale[1] = softmax.template update_row<Config::kLazyRescale>(1, scores);
      wgmma_wait<0>();
      keep(out);
      if (thread == 0) mbarrier_arrive(s_base + Config::kVEmpty + 8 * v_stage.index);
      pack_probabilities(scores);  // only now: the product has read the old P
      if constexpr (kHeadDim <= 128) rescale_output();
    };

    mbarrier_wait(s_base + Config::kQFull, count.q_parity());
    if (span.first >= span.last) {
      if (thread == 0) mbarrier_arrive(s_base + Config::kQEmpty);
    } else {
      int n = span.last - 1;
      mbarrier_wait(s_base + Config::kKFull + 8 * stage.index, stage.parity);
      float scores[kBlockN / 2];
      start_scores(scores);
      wgmma_wait<0>();
      keep(scores);
      release_k(n);
      if (is_masked(n)) hide_keys(scores, n);
#pragma unroll
      for (int r = 0; r < 2; ++r)  // the factor is not needed: O is still 0
        softmax.template update_row<Config::kLazyRescale>(r, scores);
      pack_probabilities(scores);

      --n;
      if constexpr (kBanded) {
#pragma unroll 1
        for (; n >= span.first && n >= full.last; --n) visit_tile(n, std::true_type{});
      }
#pragma unroll 1
      for (; n >= full.first && n >= span.first; --n) visit_tile(n, std::false_type{});
      if constexpr (kBanded) {
#pragma unroll 1
        for (; n >= span.first; --n) visit_tile(n, std::true_type{});
      }

      if constexpr (kHeadDim > 128) rescale_output();
      wait_v(stage, is_masked(span.first));
      start_output(stage.index);
      wgmma_wait<0>();
      keep(out);
      if (thread == 0) mbarrier_arrive(s_base + Config::kVEmpty + 8 * stage.index);
      stage.advance();
    }

    // Epilogue: O / l, 16 bytes a lane after a transpose inside each quad.
    const int head = tile->head, batch = tile->batch, row_begin = tile->row_begin + consumer * 64;
    float* const g_lse =
        static_cast<float*>(p.lse) + (static_cast<int64_t>(batch) * p.heads_q + head) * p.len_q;
    T* const g_out =
        static_cast<T*>(p.out.data) + batch * p.out.stride_batch + head * p.out.stride_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row(r);
      float lse;
      scale_row(r, out, softmax.finish(r, row_sink(p, batch, head, row), lse));
      if (lane % 4 == 0 && row < len_q) g_lse[row] = lse;
    }
#pragma unroll
    for (int u = 0; u < kHeadDim / 32; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack2<T>(out[16 * u + 4 * i + 2 * r], out[16 * u + 4 * i + 2 * r + 1]);
        quad_transpose(words, lane & 3);
        const int row = lane_row(r), col = 32 * u + 8 * (lane & 3);
        if (row < len_q && col < static_cast<int>(p.head_dim_v)) {
          *reinterpret_cast<uint4*>(g_out + row * p.out.stride_row + col) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
    if constexpr (kBanded) {
      if (tile->cleared) {
        named_barrier_sync(Config::kConsumerBarrier + consumer, 128);
        const int64_t head_kv = head / static_cast<int>(p.heads_q / p.heads_kv);
        restore_nonfinite_values<T, false, 64, kBlockN, 4>(
            p, static_cast<const T*>(p.q.data) + batch * p.q.stride_batch + head * p.q.stride_head,
            static_cast<const T*>(p.k.data) + batch * p.k.stride_batch + head_kv * p.k.stride_head,
            static_cast<const T*>(p.v.data) + batch * p.v.stride_batch + head_kv * p.v.stride_head,
            g_out, g_lse, tile->rows, batch, head, row_begin, warp);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(s_base + Config::kSlotEmpty + 8 * count.slot());
    count.advance();
  }
}

template <typename T, int kHeadDim, bool kBanded>
__global__ void __launch_bounds__(FwdSm90<T, kHeadDim, kBanded>::kThreads, 1)
    fwd_sm90_kernel(const __grid_constant__ ForwardParams p,
                    const __grid_constant__ FwdSm90Maps maps,
                    const __grid_constant__ TileOrder order) {
  using Config = FwdSm90<T, kHeadDim, kBanded>;
  extern __shared__ __align__(1024) char smem[];
  const uint32_t s_base = smem_address(smem);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;

  if (threadIdx.x == 0) {
    mbarrier_init(s_base + Config::kQFull, 1);
    mbarrier_init(s_base + Config::kQEmpty, Config::kConsumers);
    for (int i = 0; i < kTileSlots; ++i) {
      mbarrier_init(s_base + Config::kSlotFull + 8 * i, 1);
      mbarrier_init(s_base + Config::kSlotEmpty + 8 * i,
                    4 * Config::kConsumers + Config::kCleaningWarps);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(s_base + Config::kKFull + 8 * i, 1);
      mbarrier_init(s_base + Config::kKEmpty + 8 * i, Config::kConsumers);
      mbarrier_init(s_base + Config::kVFull + 8 * i, 1);
      mbarrier_init(s_base + Config::kVEmpty + 8 * i, Config::kConsumers + Config::kCleaningWarps);
      mbarrier_init(s_base + Config::kVClean + 8 * i, 3);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    release_registers<Config::kProducerRegisters>();
    if (warp == 0) {
      produce_tiles<T, kHeadDim, kBanded>(p, maps, order, smem, threadIdx.x % 32);
    } else if constexpr (kBanded) {
      clean_values<T, kHeadDim>(smem, warp - 1, threadIdx.x % 32);
    }
  } else {
    claim_registers<Config::kConsumerRegisters>();
    consume_tiles<T, kHeadDim, kBanded>(p, smem, warpgroup - 1);
  }
}

}  // namespace hfb

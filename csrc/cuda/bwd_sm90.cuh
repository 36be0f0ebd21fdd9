// Backward attention for sm_90 (Hopper), fp16 and bf16, without mask, bias, softcap, ALiBi, dropout.
//                                        FA2, arXiv:2307.08691, Alg. 2; FA3, arXiv:2407.08608, Alg. 3.
//
//   P = exp(S - lse)    dP = dO V^T    dS = P * (dP - delta)
//   dV += P^T dO        dK += scale * dS^T Q        dQ += scale * dS K
//
//   one block = kBlockN keys of one (batch, kv head); it walks every query head of the group and
//               every query tile that sees the keys, so dK and dV of the group are summed in fp32
//               registers, in a fixed order
//   warpgroup 0 = warp 0 copies Q, dO and row statistics by TMA; warp 1 + c adds the dQ of consumer
//               c to the workspace, in thread order (float4 i of thread t lies at i * 128 + t), which
//               bwd_postprocess un-permutes
//   warpgroups 1, 2 = consumers of 64 keys each. Scores are transposed, S^T = K Q^T [64, kBlockM], so
//               that P^T and dS^T packed in place already are the A operands of dV and dK. dQ needs
//               the dS of both consumers: it goes through shared memory, and each consumer computes
//               64 x 64 of dQ
//   shared    = K + V [kBlockN, D] + 2 x (Q + dO [kBlockM, D] + dS [kBlockM, kBlockN] + statistics)
//               + dQ [kBlockM, D] fp32; tiles.h: 196 KiB at D = 64, 194 KiB at 128
//   rounding  = as bwd_sm80: S, dP, dS and all sums fp32; P and dS rounded before a product
//   order     = S and dP in flight together; exponentials under dP; dV under the store of dS; then
//               dQ, dK. Products of the next tile never queue behind these: that was slower in every
//               variant tried (docs/experiments.md)
//
//   mbarrier      completed by                            waited for by
//   kv_full       TMA of K and V                          consumers, once
//   q_full[s]     TMA of Q and lse; slot and key ranges   consumers
//   do_full[s]    TMA of dO and delta                     consumers
//   q/do_empty[s] consumers                               warp 0
//   named barrier (threads)
//   1     (256)      both consumers: dS is written (and K is clean)
//   2 + c (128 + 32) adding warp c -> consumer c: the dQ chunk is free
//   4 + c (128 + 32) consumer c -> adding warp c: the dQ chunk is written
//
// In sync with: tiles.h, tiling.h, bwd_preprocess.cuh, bwd_postprocess.cuh, reference.py.
#pragma once

#include "bwd_sm90_producer.cuh"
#include "device/softmax.cuh"
#include "device/wgmma.cuh"

namespace hfb {

// Zeroes the rows of the Q and dO tiles whose lse or delta is inf or NaN. Such a row sees no key, or
// makes NaN of P and dS for every key that it sees; a key that it does not see gets 0 * NaN otherwise.
// Called by all consumer threads, which find the same rows.
template <typename T, int kHeadDim>
__device__ __forceinline__ void clear_nonfinite_rows(char* smem, int stage, int thread) {
  using Config = BwdSm90<T, kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kChunksPerRow = kHeadDim / 8;
  const auto* lse =
      reinterpret_cast<const float*>(smem + Config::kLse + stage * Config::kStatisticBytes);
  const auto* delta =
      reinterpret_cast<const float*>(smem + Config::kDelta + stage * Config::kStatisticBytes);
  auto is_nonfinite = [&](int index) { return !isfinite(lse[index]) || !isfinite(delta[index]); };
  bool found = false;
#pragma unroll
  for (int i = 0; i < kBlockM; i += 32) found |= is_nonfinite(i + threadIdx.x % 32);
  if (!__any_sync(~0u, found)) return;
  char* const s_q = smem + Config::kQ + stage * Config::kQBytes;
  char* const s_do = smem + Config::kDo + stage * Config::kQBytes;
#pragma unroll 1
  for (int chunk = thread; chunk < kBlockM * kChunksPerRow; chunk += 128 * Config::kConsumers) {
    const int row = chunk / kChunksPerRow;
    if (!is_nonfinite(statistic_index(row))) continue;
    const uint32_t offset = tile_offset<kBlockM>(row, chunk % kChunksPerRow * 8);
    *reinterpret_cast<uint4*>(s_q + offset) = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(s_do + offset) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  named_barrier_sync(Config::kDsBarrier, 128 * Config::kConsumers);
}

// A consumer warpgroup: keys [64 * consumer, + 64) of the block.
template <typename T, int kHeadDim>
__device__ __forceinline__ void consume_query_tiles(const BackwardParams& p,
                                                    const BackwardBuffers& buffers,
                                                    const KeyBlock& keys, char* smem,
                                                    int consumer) {
  using Config = BwdSm90<T, kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const uint32_t s_base = smem_address(smem);
  const float scale = static_cast<float>(p.scale), scale_log2 = scale * kLog2e;

  // The shuffle tells the compiler that the descriptors are the same in all lanes.
  const int part = __shfl_sync(~0u, consumer, 0);
  const uint64_t k_rows = tile_descriptor(s_base + part * 64 * 128, kBlockN * 128);
  const uint64_t v_rows = tile_descriptor(s_base + Config::kV + part * 64 * 128, kBlockN * 128);
  const uint64_t k_cols =
      tile_descriptor(s_base + (Config::kDqByColumns ? part * kBlockN * 128 : 0), kBlockN * 128);
  const uint64_t ds_rows = tile_descriptor(
      s_base + Config::kDs + (Config::kDqByColumns ? 0 : part * 64 * 128), kBlockM * 128);
  const uint64_t q_tiles = tile_descriptor(s_base + Config::kQ, kBlockM * 128);
  const uint64_t do_tiles = tile_descriptor(s_base + Config::kDo, kBlockM * 128);
  // dS^T fragments go to dS [query][key] by stmatrix.trans; this lane's row and 16-byte chunk.
  const int ds_row = (lane & 7) + (lane >> 4) * 8, ds_chunk = warp * 2 + (lane >> 3 & 1);
  const uint32_t s_ds =
      s_base + Config::kDs + part * kBlockM * 128 + ds_row * 128 + (ds_chunk ^ (ds_row & 7)) * 16;
  const uint32_t s_dq = s_base + Config::kDqChunks + part * Config::kDqBytes + thread * 16;
  const int key0 = keys.begin + consumer * 64 + warp * 16 + lane / 4;  // and key0 + 8

  float dk[kHeadDim / 2] = {}, dv[kHeadDim / 2] = {};  // [64, kHeadDim]

  mbarrier_wait(s_base + Config::kKvFull, 0);
  // A key hidden from some row must not reach its dQ as 0 * NaN. Rows that see a NaN key are NaN
  // through lse and delta.
  if (clear_nonfinite_chunks<T, Config::kKvBytes / 16, 256>(reinterpret_cast<uint4*>(smem),
                                                            128 * consumer + thread)) {
    fence_async_proxy();
  }
  named_barrier_sync(Config::kDsBarrier, 256);

  RingPosition<Config::kStages> stage;
  auto* const slots = reinterpret_cast<const QueryTileSlot*>(smem + Config::kSlots);
  auto* const dq_target = reinterpret_cast<QueryTileSlot*>(smem + Config::kDqTargets) + consumer;
  auto next_kind = [&] {
    mbarrier_wait(s_base + Config::kQFull + 8 * stage.index, stage.parity);
    return slots[stage.index].kind;
  };
  auto visit_tile = [&](auto masked_tag) {
    constexpr bool kMasked = decltype(masked_tag)::value;
    const uint32_t q_offset = stage.index * Config::kQBytes >> 4;
    const float4* lse = reinterpret_cast<const float4*>(smem + Config::kLse +
                                                        stage.index * Config::kStatisticBytes);
    const float4* delta = reinterpret_cast<const float4*>(smem + Config::kDelta +
                                                          stage.index * Config::kStatisticBytes);

    float s[kBlockM / 2], dp[kBlockM / 2];  // S^T, dP^T [64, kBlockM]
    leave_undefined(s);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      Wgmma<kBlockM>::template multiply_shared<T>(
          s, k_rows + k_step(kk, kBlockN), q_tiles + q_offset + k_step(kk, kBlockM), kk != 0);
    }
    wgmma_commit();
    mbarrier_wait(s_base + Config::kDoFull + 8 * stage.index, stage.parity);
    leave_undefined(dp);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      Wgmma<kBlockM>::template multiply_shared<T>(
          dp, v_rows + k_step(kk, kBlockN), do_tiles + q_offset + k_step(kk, kBlockM), kk != 0);
    }
    wgmma_commit();

    wgmma_wait<1>();
    keep(s);
    if constexpr (kMasked) {
      const int4* ranges = reinterpret_cast<const int4*>(smem + Config::kRanges +
                                                         stage.index * 2 * Config::kStatisticBytes);
#pragma unroll
      for (int k = 0; k < kBlockM / 16; ++k) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // queries 16 k + 8 j + 2 (lane % 4), + 1
          const int4 seen = ranges[(4 * k + (lane & 3)) * 2 + j];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int i = 8 * k + 4 * j + 2 * r, key = key0 + 8 * r;
            if (static_cast<uint32_t>(key - seen.x) >= static_cast<uint32_t>(seen.y))
              s[i] = -INFINITY;
            if (static_cast<uint32_t>(key - seen.z) >= static_cast<uint32_t>(seen.w))
              s[i + 1] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      const float4 row = lse[4 * k + (lane & 3)];
#pragma unroll
      for (int i = 8 * k; i < 8 * k + 8; i += 2) {
        s[i] = exp2_approx(fmaf(s[i], scale_log2, -(i & 4 ? row.z : row.x)));
        s[i + 1] = exp2_approx(fmaf(s[i + 1], scale_log2, -(i & 4 ? row.w : row.y)));
      }
    }
    wgmma_wait<0>();
    keep(dp);

    // dS over dP; 16 queries at a time to 16 bits, so that S and dP die as P and dS come to be.
    uint32_t p_operand[kBlockM / 16][4], ds_operand[kBlockM / 16][4];
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      const float4 row = delta[4 * k + (lane & 3)];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int x = 8 * k + 2 * i;
        float ds[2] = {s[x] * (dp[x] - (i & 2 ? row.z : row.x)),
                       s[x + 1] * (dp[x + 1] - (i & 2 ? row.w : row.y))};
        if constexpr (kMasked) {  // dP of a hidden key may be NaN
          if (s[x] == 0.f) ds[0] = 0.f;
          if (s[x + 1] == 0.f) ds[1] = 0.f;
        }
        p_operand[k][i] = pack2<T>(s[x], s[x + 1]);
        ds_operand[k][i] = pack2<T>(ds[0], ds[1]);
      }
    }
    if constexpr (kMasked)
      clear_nonfinite_rows<T, kHeadDim>(smem, stage.index, 128 * consumer + thread);
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      stmatrix_x4_trans(s_ds + stage.index * Config::kDsBytes + 16 * k * 128, ds_operand[k]);
    }

    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockM / 16; ++kk) {  // dV += P^T dO
      Wgmma<kHeadDim>::template multiply_registers<T>(dv, p_operand[kk],
                                                      do_tiles + q_offset + k_step_trans(kk));
    }
    wgmma_commit();
    fence_async_proxy();
    // dS is double-buffered: this barrier in the next tile protects its reuse in the one after.
    named_barrier_sync(Config::kDsBarrier, 256);
    float dq[32];  // [64, 64]
    leave_undefined(dq);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockN / 16; ++kk) {  // dQ = dS K
      Wgmma<64>::template multiply_shared<T, true>(
          dq, ds_rows + (stage.index * Config::kDsBytes >> 4) + k_step(kk, kBlockM),
          k_cols + k_step_trans(kk), kk != 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    keep(dv);
    if (thread == 0) mbarrier_arrive(s_base + Config::kDoEmpty + 8 * stage.index);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockM / 16; ++kk) {  // dK += dS^T Q
      Wgmma<kHeadDim>::template multiply_registers<T>(dk, ds_operand[kk],
                                                      q_tiles + q_offset + k_step_trans(kk));
    }
    wgmma_commit();
    wgmma_wait<1>();
    keep(dq);
    named_barrier_sync(Config::kDqEmptyBarrier + consumer, 128 + 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      st_shared_16(s_dq + i * 128 * 16, reinterpret_cast<const uint4*>(dq)[i]);
    }
    if (thread == 0) *dq_target = slots[stage.index];
    fence_async_proxy();
    named_barrier_arrive(Config::kDqFullBarrier + consumer, 128 + 32);
    wgmma_wait<0>();
    keep(dk);
    if (thread == 0) mbarrier_arrive(s_base + Config::kQEmpty + 8 * stage.index);
    stage.advance();
  };
  TileKind kind = next_kind();
  while (kind != TileKind::kSkip) {  // two loops, so that masks cost the other tiles no register
#pragma unroll 1
    for (; kind == TileKind::kMasked; kind = next_kind()) visit_tile(std::true_type{});
#pragma unroll 1
    for (; kind == TileKind::kFull; kind = next_kind()) visit_tile(std::false_type{});
  }
  named_barrier_sync(Config::kDqEmptyBarrier + consumer, 128 + 32);
  if (thread == 0) dq_target->kind = TileKind::kSkip;
  named_barrier_arrive(Config::kDqFullBarrier + consumer, 128 + 32);

  T* const g_dk =
      static_cast<T*>(p.dk.data) + keys.batch * p.dk.stride_batch + keys.head_kv * p.dk.stride_head;
  T* const g_dv =
      static_cast<T*>(p.dv.data) + keys.batch * p.dv.stride_batch + keys.head_kv * p.dv.stride_head;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = key0 + 8 * r;
    scale_row(r, dk, scale);
    store_quad_row<T>(g_dk + key * p.dk.stride_row, dk, r, key < keys.end,
                      static_cast<int>(p.head_dim), lane);
    store_quad_row<T>(g_dv + key * p.dv.stride_row, dv, r, key < keys.end,
                      static_cast<int>(p.head_dim_v), lane);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(BwdSm90<T, kHeadDim>::kThreads, 1)
    bwd_sm90_kernel(const __grid_constant__ BackwardParams p, const BackwardBuffers buffers,
                    const __grid_constant__ BwdSm90Maps maps, const TileOrder order) {
  using Config = BwdSm90<T, kHeadDim>;
  extern __shared__ __align__(1024) char smem[];
  const uint32_t s_base = smem_address(smem);
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    mbarrier_init(s_base + Config::kKvFull, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(s_base + Config::kQFull + 8 * i, 1);
      mbarrier_init(s_base + Config::kQEmpty + 8 * i, Config::kConsumers);
      mbarrier_init(s_base + Config::kDoFull + 8 * i, 1);
      mbarrier_init(s_base + Config::kDoEmpty + 8 * i, Config::kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const QueryTile place = order.at(blockIdx.x, 0);  // last keys first, as turns need it
  const int heads_kv = static_cast<int>(p.heads_kv);
  const int n = buffers.dq_turns == nullptr ? order.num_m - 1 - place.tile : place.tile;
  const int begin = n * Config::kBlockN;
  const KeyBlock keys = {place.head / heads_kv, place.head % heads_kv, n, begin,
                         min(begin + Config::kBlockN, static_cast<int>(p.len_kv))};
  if (warpgroup == 0) {
    release_registers<Config::kProducerRegisters>();
    if (warp == 0) {
      produce_query_tiles<T, kHeadDim>(p, buffers, maps, keys, smem, lane);
    } else if (warp <= Config::kConsumers) {
      add_dq_chunks<T, kHeadDim>(buffers, smem, warp - 1, lane);
    }
  } else {
    claim_registers<Config::kConsumerRegisters>();
    consume_query_tiles<T, kHeadDim>(p, buffers, keys, smem, warpgroup - 1);
  }
}

}  // namespace hfb

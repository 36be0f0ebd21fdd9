// The first warpgroup of fwd_sm90 (fwd_sm90.cuh has the whole picture) and the constants that all
// warpgroups share. Warp 0 walks the query tiles of its block and keeps the K and V stages full;
// warps 1 to 3 stand between the copy of a masked V tile and its use.
#pragma once

#include "device/schedule.cuh"
#include "device/tile.cuh"

namespace hfb {

template <typename T, int kHeadDim, bool kBanded>
struct FwdSm90 {
  static constexpr Tile kTile = fwd_sm90_tile(kHeadDim, kBanded);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kStages = fwd_sm90_stages(kHeadDim, kBanded);
  static constexpr int kConsumers = kBlockM / 64, kThreads = kTile.num_warps * 32;
  static constexpr int kCleaningWarps = kBanded ? 3 : 0;
  static constexpr int kQBytes = tile_bytes(kBlockM, kHeadDim);
  static constexpr int kKvBytes = tile_bytes(kBlockN, kHeadDim);
  // A lane of each warpgroup, multiples of 8. Together no more than the block got at launch, or
  // claim_registers waits for ever.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    kLaunchRegisters * (kConsumers + 1),
                "registers");

  // Skipping the rescale of O while the maximum moves little is worth 2 to 6 %, except where the
  // vote costs more than it saves.
  static constexpr bool kLazyRescale = kHeadDim <= 128 || kBanded;
  // Waiting for the next K tile between the two rows of the softmax keeps half of the exponentials
  // above the wait for P V: ptxas moves all of them below it otherwise. Slower at head dim 64.
  static constexpr bool kWaitInSoftmax = kHeadDim > 64;

  // Byte offsets into shared memory, which starts at a multiple of 1024.
  static constexpr int kK = kQBytes, kV = kK + kStages * kKvBytes;
  static constexpr int kSlots = kV + kStages * kKvBytes;
  static constexpr int kQFull = kSlots + kTileSlots * static_cast<int>(sizeof(TileSlot));
  static constexpr int kQEmpty = kQFull + 8, kSlotFull = kQEmpty + 8;
  static constexpr int kSlotEmpty = kSlotFull + 8 * kTileSlots;
  static constexpr int kKFull = kSlotEmpty + 8 * kTileSlots, kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr int kVClean = kVEmpty + 8 * kStages, kEnd = kVClean + 8 * kStages;
  static_assert(kEnd <= kTile.smem_bytes && kTile.smem_bytes <= 232448, "shared memory");

  static constexpr int kTurnBarrier = 1, kConsumerBarrier = 8;
};

// Tensor maps of q, k and v; boxes of 64 columns and one tile of rows.
struct FwdSm90Maps {
  CUtensorMap q, k, v;
};

// Keys that the rows of a query tile see: without a band every key.
template <bool kBanded, int kBlockM>
__device__ __forceinline__ RowBlock rows_of_tile(const ForwardParams& p, int batch, int row_begin,
                                                 int lane) {
  if constexpr (kBanded) return join_rows_of_warp<kBlockM, 32>(p, batch, row_begin, lane);
  const int32_t len_kv = static_cast<int32_t>(p.len_kv);
  return {0, len_kv, 0, len_kv};
}

// Warp 0: publishes query tiles and starts all copies.
template <typename T, int kHeadDim, bool kBanded>
__device__ __forceinline__ void produce_tiles(const ForwardParams& p, const FwdSm90Maps& maps,
                                              const TileOrder& order, char* smem, int lane) {
  using Config = FwdSm90<T, kHeadDim, kBanded>;
  constexpr int kSlabs = kHeadDim / kSlabCols;
  const uint32_t s_base = smem_address(smem);
  RingPosition<Config::kStages> k_stage, v_stage;
  TileCount count;

  auto load = [&](const CUtensorMap& map, uint32_t s_tile, uint32_t s_full, int bytes, int slab,
                  int row, int head, int batch, uint64_t policy) {
    mbarrier_arrive_expect(s_full, bytes);
#pragma unroll
    for (int i = 0; i < kSlabs; ++i)
      tma_load(s_tile + i * slab, &map, s_full, i * kSlabCols, row, head, batch, policy);
  };

  // Items blockIdx.x, + gridDim.x, ...; unsigned, because the last step may pass 2^31.
  const uint32_t parts = order.tiles_per_item(), num_steps = order.num_items() * parts;
  for (uint32_t step = blockIdx.x * parts; step < num_steps;) {
    const uint32_t part = step % parts;
    const QueryTile tile = order.at(step / parts, part);
    step += part == parts - 1 ? (gridDim.x - 1) * parts + 1 : 1;
    if (tile.tile < 0) continue;
    const int heads = static_cast<int>(p.heads_q);
    const int batch = tile.head / heads, head = tile.head % heads;
    const int row_begin = tile.tile * Config::kBlockM;
    const RowBlock rows = rows_of_tile<kBanded, Config::kBlockM>(p, batch, row_begin, lane);
    if (lane == 0) {
      mbarrier_wait(s_base + Config::kSlotEmpty + 8 * count.slot(), count.slot_parity() ^ 1);
      reinterpret_cast<TileSlot*>(smem + Config::kSlots)[count.slot()] = {row_begin, head, batch, 0,
                                                                          rows};
      mbarrier_arrive(s_base + Config::kSlotFull + 8 * count.slot());

      const TileSpan span = visited_key_tiles(rows, Config::kBlockN);
      const int head_kv = head / static_cast<int>(p.heads_q / p.heads_kv);
      auto load_k = [&](int n) {
        mbarrier_wait(s_base + Config::kKEmpty + 8 * k_stage.index, k_stage.parity ^ 1);
        load(maps.k, s_base + Config::kK + k_stage.index * Config::kKvBytes,
             s_base + Config::kKFull + 8 * k_stage.index, Config::kKvBytes, Config::kBlockN * 128,
             n * Config::kBlockN, head_kv, batch, kL2EvictLast);
        k_stage.advance();
      };
      auto load_v = [&](int n) {
        mbarrier_wait(s_base + Config::kVEmpty + 8 * v_stage.index, v_stage.parity ^ 1);
        load(maps.v, s_base + Config::kV + v_stage.index * Config::kKvBytes,
             s_base + Config::kVFull + 8 * v_stage.index, Config::kKvBytes, Config::kBlockN * 128,
             n * Config::kBlockN, head_kv, batch, kL2EvictLast);
        v_stage.advance();
      };
      if (span.first < span.last) load_k(span.last - 1);
      mbarrier_wait(s_base + Config::kQEmpty, count.q_parity() ^ 1);
      load(maps.q, s_base, s_base + Config::kQFull, Config::kQBytes, Config::kBlockM * 128,
           row_begin, head, batch, kL2EvictFirst);
#pragma unroll 1
      for (int n = span.last - 1; n >= span.first; --n) {  // K leads V by one tile, as it is used
        if (n > span.first) load_k(n - 1);
        load_v(n);
      }
    }
    count.advance();
    __syncwarp();
  }
  if (lane == 0) {
    mbarrier_wait(s_base + Config::kSlotEmpty + 8 * count.slot(), count.slot_parity() ^ 1);
    reinterpret_cast<TileSlot*>(smem + Config::kSlots)[count.slot()].row_begin = -1;
    mbarrier_arrive(s_base + Config::kSlotFull + 8 * count.slot());
  }
}

// Warps 1 to 3: a hidden key has probability 0, and 0 * NaN would be NaN.
template <typename T, int kHeadDim>
__device__ __forceinline__ void clean_values(char* smem, int warp, int lane) {
  using Config = FwdSm90<T, kHeadDim, true>;
  const uint32_t s_base = smem_address(smem);
  RingPosition<Config::kStages> stage;
  TileCount count;
  for (;;) {
    mbarrier_wait(s_base + Config::kSlotFull + 8 * count.slot(), count.slot_parity());
    TileSlot* const tile = reinterpret_cast<TileSlot*>(smem + Config::kSlots) + count.slot();
    if (tile->row_begin < 0) return;
    const TileSpan span = visited_key_tiles(tile->rows, Config::kBlockN);
    const TileSpan full = full_key_tiles(tile->rows, span, Config::kBlockN);
#pragma unroll 1
    for (int n = span.last - 1; n >= span.first; --n) {
      mbarrier_wait(s_base + Config::kVFull + 8 * stage.index, stage.parity);
      if (n < full.first || n >= full.last) {
        uint4* const values =
            reinterpret_cast<uint4*>(smem + Config::kV + stage.index * Config::kKvBytes);
        if (clear_nonfinite_chunks<T, Config::kKvBytes / 16, 32 * Config::kCleaningWarps>(
                values, 32 * warp + lane)) {
          tile->cleared = 1;
          fence_async_proxy();
        }
      }
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(s_base + Config::kVClean + 8 * stage.index);
        mbarrier_arrive(s_base + Config::kVEmpty + 8 * stage.index);
      }
      stage.advance();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(s_base + Config::kSlotEmpty + 8 * count.slot());
    count.advance();
  }
}

}  // namespace hfb

// The first warpgroup of bwd_sm90 (bwd_sm90.cuh has the whole picture) and the constants that all
// warpgroups share. Warp 0 walks the query tiles that see the block's keys and keeps the Q and dO
// stages full; warps 1 and 2 add the dQ chunks of one consumer each to global memory.
#pragma once

#include "bwd_preprocess.cuh"
#include "device/schedule.cuh"
#include "device/tile.cuh"

namespace hfb {

template <typename T, int kHeadDim>
struct BwdSm90 {
  static constexpr Tile kTile = bwd_sm90_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.num_warps * 32, kConsumers = 2;
  static constexpr int kStages = kBwdSm90Stages;
  static constexpr int kKvBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kQBytes = tile_bytes(kBlockM, kHeadDim);
  static constexpr int kDsBytes = tile_bytes(kBlockM, kBlockN);
  static constexpr int kStatisticBytes = kBlockM * 4;  // lse or delta of a query tile
  // A consumer's part of dQ is 64 x 64: rows at head dim 64, columns at 128.
  static constexpr bool kDqByColumns = kHeadDim > 64;
  static constexpr int kDqBytes = 64 * 64 * 4;
  static_assert(kConsumers * kDqBytes == kBlockM * kHeadDim * 4 && kBlockN == 64 * kConsumers);

  // For bwd_postprocess: warp w of consumer c is warp 4 c + w of this grid over dQ.
  static constexpr WarpGrid kDq = {kDqByColumns ? 4 : 8, kDqByColumns ? 2 : 1, 1, 64};
  static constexpr int kDqThreads = 128 * kConsumers, kDqRun = 128;

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // a lane of a warpgroup

  // Byte offsets into shared memory, which starts at a multiple of 1024.
  static constexpr int kV = kKvBytes, kQ = kV + kKvBytes, kDo = kQ + kStages * kQBytes;
  static constexpr int kDs = kDo + kStages * kQBytes, kDqChunks = kDs + kStages * kDsBytes;
  static constexpr int kLse = kDqChunks + kConsumers * kDqBytes;
  static constexpr int kDelta = kLse + kStages * kStatisticBytes;
  static constexpr int kRanges = kDelta + kStages * kStatisticBytes;  // VisibleKeys of each row
  static constexpr int kSlots = kRanges + kStages * 2 * kStatisticBytes;
  static constexpr int kDqTargets = kSlots + kStages * 16;
  static constexpr int kKvFull = kDqTargets + kConsumers * 16;
  static constexpr int kQFull = kKvFull + 8, kQEmpty = kQFull + 8 * kStages;
  static constexpr int kDoFull = kQEmpty + 8 * kStages, kDoEmpty = kDoFull + 8 * kStages;
  static constexpr int kEnd = kDoEmpty + 8 * kStages;
  static_assert(kEnd <= kTile.smem_bytes && kTile.smem_bytes <= 232448, "shared memory");

  static constexpr int kDsBarrier = 1, kDqEmptyBarrier = 2, kDqFullBarrier = 4;
};

// Tensor maps of q, k, v and dout; boxes of 64 columns and one tile of rows.
struct BwdSm90Maps {
  CUtensorMap q, k, v, dout;
};

// The query tile in a stage, in shared memory.
struct alignas(16) QueryTileSlot {
  TileKind kind;  // kSkip: no more tiles
  int32_t tile;   // of dq_accumulator: (batch * heads_q + head) * num_m + m
  int32_t turn;   // how many blocks add to this tile before this one, where dq_turns exist
};

// The keys [begin, begin + count) that one row of a masked query tile sees, in shared memory.
struct alignas(8) VisibleKeys {
  int32_t begin;
  uint32_t count;
};

// The keys of this block.
struct KeyBlock {
  int64_t batch, head_kv;
  int n, begin, end;  // keys [begin, end)
};

// Warp 0: starts all copies and publishes what the consumers need to know of each query tile.
template <typename T, int kHeadDim>
__device__ __forceinline__ void produce_query_tiles(const BackwardParams& p,
                                                    const BackwardBuffers& buffers,
                                                    const BwdSm90Maps& maps, const KeyBlock& keys,
                                                    char* smem, int lane) {
  using Config = BwdSm90<T, kHeadDim>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t s_base = smem_address(smem);
  const int len_q = static_cast<int>(p.len_q), num_m = buffers.len_q_padded / kBlockM;
  const int batch = static_cast<int>(keys.batch), head_kv = static_cast<int>(keys.head_kv);
  const int group = static_cast<int>(p.heads_q / p.heads_kv);

  auto load = [&](const CUtensorMap& map, uint32_t s_tile, uint32_t s_full, int rows, int row,
                  int head, uint64_t policy) {
#pragma unroll
    for (int i = 0; i < kHeadDim / kSlabCols; ++i) {
      tma_load(s_tile + i * rows * 128, &map, s_full, i * kSlabCols, row, head, batch, policy);
    }
  };
  if (lane == 0) {
    mbarrier_arrive_expect(s_base + Config::kKvFull, 2 * Config::kKvBytes);
    load(maps.k, s_base, s_base + Config::kKvFull, kBlockN, keys.begin, head_kv, kL2EvictFirst);
    load(maps.v, s_base + Config::kV, s_base + Config::kKvFull, kBlockN, keys.begin, head_kv,
         kL2EvictFirst);
  }

  const TileSpan span = visited_row_tiles(p.shared_band(), keys.begin, keys.end, len_q, kBlockM);
  RingPosition<Config::kStages> stage;
  auto publish = [&](int head, int m, TileKind kind, int turn) {
    const uint32_t s_q_full = s_base + Config::kQFull + 8 * stage.index;
    const uint32_t s_do_full = s_base + Config::kDoFull + 8 * stage.index;
    mbarrier_wait(s_base + Config::kQEmpty + 8 * stage.index, stage.parity ^ 1);
    if (kind == TileKind::kMasked) {
      auto* ranges = reinterpret_cast<VisibleKeys*>(smem + Config::kRanges) + stage.index * kBlockM;
      for (int r = lane; r < kBlockM; r += 32) {
        const int row = m * kBlockM + r;
        const KeyRange seen = row < len_q ? p.row_keys(batch, row) : KeyRange{0, 0};
        ranges[statistic_index(r)] = {seen.begin,
                                      static_cast<uint32_t>(max(seen.end - seen.begin, 0))};
      }
      __syncwarp();
    }
    if (lane != 0) return;
    const int64_t batch_head = keys.batch * p.heads_q + head;
    const int64_t row = batch_head * buffers.len_q_padded + m * kBlockM;
    const int tile = static_cast<int>(batch_head * num_m + m);
    reinterpret_cast<QueryTileSlot*>(smem + Config::kSlots)[stage.index] =
        QueryTileSlot{kind, tile, turn};
    mbarrier_arrive_expect(s_q_full, Config::kQBytes + Config::kStatisticBytes);
    load(maps.q, s_base + Config::kQ + stage.index * Config::kQBytes, s_q_full, kBlockM,
         m * kBlockM, head, kL2EvictLast);
    bulk_load(s_base + Config::kLse + stage.index * Config::kStatisticBytes, buffers.lse + row,
              Config::kStatisticBytes, s_q_full);
    mbarrier_wait(s_base + Config::kDoEmpty + 8 * stage.index, stage.parity ^ 1);
    mbarrier_arrive_expect(s_do_full, Config::kQBytes + Config::kStatisticBytes);
    load(maps.dout, s_base + Config::kDo + stage.index * Config::kQBytes, s_do_full, kBlockM,
         m * kBlockM, head, kL2EvictLast);
    bulk_load(s_base + Config::kDelta + stage.index * Config::kStatisticBytes, buffers.delta + row,
              Config::kStatisticBytes, s_do_full);
  };

#pragma unroll 1
  for (int g = 0; g < group; ++g) {
#pragma unroll 1
    for (int first = span.first; first < span.last; first += 32) {  // a lane looks at one tile
      TileKind kind = TileKind::kSkip;
      int turn = 0;
      if (first + lane < span.last) {
        const RowBlock rows = buffers.row_blocks[keys.batch * num_m + first + lane];
        kind = classify_tile(rows, keys.begin, keys.begin + kBlockN);
        turn = visited_key_tiles(rows, kBlockN).last - 1 - keys.n;  // last keys first
      }
      unsigned visited = __ballot_sync(kAll, kind != TileKind::kSkip);
      const unsigned masked = __ballot_sync(kAll, kind == TileKind::kMasked);
      for (; visited != 0; visited &= visited - 1) {
        const int bit = __ffs(visited) - 1;
        publish(head_kv * group + g, first + bit,
                masked >> bit & 1 ? TileKind::kMasked : TileKind::kFull,
                __shfl_sync(kAll, turn, bit));
        stage.advance();
      }
    }
  }
  if (lane == 0) {
    mbarrier_wait(s_base + Config::kQEmpty + 8 * stage.index, stage.parity ^ 1);
    reinterpret_cast<QueryTileSlot*>(smem + Config::kSlots)[stage.index].kind = TileKind::kSkip;
    mbarrier_arrive(s_base + Config::kQFull + 8 * stage.index);
  }
}

// Warp 1 + consumer: adds the consumer's chunk of dQ to global memory, 16 KiB at a time; where
// dq_turns exist, after all blocks with later keys.
template <typename T, int kHeadDim>
__device__ __forceinline__ void add_dq_chunks(const BackwardBuffers& buffers, char* smem,
                                              int consumer, int lane) {
  using Config = BwdSm90<T, kHeadDim>;
  constexpr int kTileValues = Config::kBlockM * kHeadDim, kChunkValues = Config::kDqBytes / 4;
  const uint32_t s_chunk = smem_address(smem) + Config::kDqChunks + consumer * Config::kDqBytes;
  const auto* target = reinterpret_cast<const QueryTileSlot*>(smem + Config::kDqTargets) + consumer;
  for (;;) {
    named_barrier_arrive(Config::kDqEmptyBarrier + consumer, 128 + 32);
    named_barrier_sync(Config::kDqFullBarrier + consumer, 128 + 32);
    const QueryTileSlot to = *target;
    if (to.kind == TileKind::kSkip) return;
    if (lane == 0) {
      // Each tile counts the additions of both consumers.
      int* const turn = buffers.dq_turns == nullptr ? nullptr : buffers.dq_turns + to.tile;
      if (turn != nullptr) wait_for_turn(turn, to.turn * Config::kConsumers);
      bulk_add(buffers.dq_accumulator + static_cast<int64_t>(to.tile) * kTileValues +
                   consumer * kChunkValues,
               s_chunk, Config::kDqBytes);
      if (turn == nullptr) {
        bulk_wait_read();
      } else {
        bulk_wait();
        end_turn(turn);
      }
    }
    __syncwarp();
  }
}

}  // namespace hfb

// Tile sizes of the CUDA kernels, the single table that kernels (as template constants), plan.cpp
// and tests read. Adding a head dim is one entry in HFB_HEAD_DIMS and one line in each function.
#pragma once

#include <cstdint>

#include "tiling.h"

// Compiled head dims; any other multiple of 8 runs in the next larger one, its missing columns
// zero-filled on load.
#define HFB_HEAD_DIMS(X) X(64) X(96) X(128) X(192) X(256)
// Of the sm_90 kernels, which are faster on zero columns than the sm_80 kernels on exact head dims.
#define HFB_SM90_HEAD_DIMS(X) X(64) X(128) X(256)
#define HFB_BWD_SM90_HEAD_DIMS(X) X(64) X(128)

namespace hfb {

constexpr int kMaxHeadDimCuda = 256;
constexpr int kSlabCols =
    64;  // shared-memory tiles are slabs of 64 16-bit columns = 128 bytes = all 32 banks
constexpr int kBytesPerElement = 2;

constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Bytes of a [rows, cols] 16-bit tile in shared memory; columns are padded to whole slabs (96 ->
// 128).
constexpr int tile_bytes(int rows, int cols) {
  return rows * round_up(cols, kSlabCols) * kBytesPerElement;
}

struct Tile {
  int block_m;  // query rows
  int block_n;  // keys
  int num_warps;
  int smem_bytes;  // dynamic shared memory
};

// What runs rarely is compiled at three head dims only, which keeps the build short: fp32 (operands of
// three 16-bit terms, device/operand.cuh), dQ by rows and the gradient of a bias.
#define HFB_COARSE_HEAD_DIMS(X) X(64) X(128) X(256)
constexpr int coarse_head_dim(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}
constexpr bool has_fp32(int head_dim) {
#define HFB_IS(D) head_dim == D ||
  return HFB_COARSE_HEAD_DIMS(HFB_IS) false;
#undef HFB_IS
}

// fwd_sm80: Q + K + V, one stage each; 16 rows a warp. Four warps of 32 rows halve the reads of K
// and V from shared memory but spill 80 to 260 bytes a thread at head dims 64 to 128 (nvcc 13.0).
// Every tile stays below 99 KiB, the limit of sm_86, sm_89 and sm_120.
constexpr Tile fwd_sm80_tile(int head_dim, int terms) {
  int block_m = head_dim <= 192 ? 128 : 64, block_n = head_dim <= 64 ? 128 : 64;
  if (terms > 1) {
    block_m = head_dim <= 128 ? 64 : 32;
    block_n = head_dim <= 64 ? 64 : head_dim <= 128 ? 32 : 16;
  }
  return {block_m, block_n, block_m / 16,
          terms * (tile_bytes(block_m, head_dim) + 2 * tile_bytes(block_n, head_dim))};
}

// fwd_sm90: one producer warpgroup and block_m / 64 consumers of 64 rows; Q once, K and V in stages.
// Three consumers at head dim 64, where S [64, 128] leaves registers for it; two above. 176 keys at
// head dim 128 are the most that S, P and O in registers allow (196 of 240); banded calls take 128,
// which waste less on the diagonal. At head dim 256 80 keys fill shared memory.
constexpr Tile fwd_sm90_tile_of(int block_m, int block_n, int head_dim, int stages) {
  constexpr int kSlotsAndBarriers = 1024;
  return {block_m, block_n, 4 * (block_m / 64 + 1),
          tile_bytes(block_m, head_dim) + 2 * stages * tile_bytes(block_n, head_dim) +
              kSlotsAndBarriers};
}
// Two K and V stages overlap copies and products; where shared memory has room, a third is worth 5 %
// (head dim 128, banded), and head dim 64, whose steps are short, takes one more when banded.
constexpr int fwd_sm90_stages(int head_dim, bool is_banded) {
  if (head_dim <= 64) return is_banded ? 4 : 3;
  return head_dim <= 128 && is_banded ? 3 : 2;
}
constexpr Tile fwd_sm90_tile(int head_dim, bool is_banded) {
  const int stages = fwd_sm90_stages(head_dim, is_banded);
  if (head_dim <= 64) return fwd_sm90_tile_of(192, 128, head_dim, stages);
  if (head_dim <= 128) return fwd_sm90_tile_of(128, is_banded ? 128 : 176, head_dim, stages);
  return fwd_sm90_tile_of(128, 80, head_dim, stages);
}

// How the warps of a block share a product [rows, cols]: a grid of warps, each 16 * row_blocks rows
// and cols / warps_n columns. Two row blocks halve the reads of the B operand; they need a column
// share that is a multiple of 16.
struct WarpGrid {
  int warps_m, warps_n, row_blocks, cols;
};
HFB_HOST_DEVICE constexpr WarpGrid warp_grid(int rows, int cols, int num_warps) {
  const int wide = rows / 32;
  if (wide > 0 && rows % 32 == 0 && num_warps % wide == 0 && cols * wide / num_warps % 16 == 0 &&
      cols * wide >= 16 * num_warps) {
    return {wide, num_warps / wide, 2, cols * wide / num_warps};
  }
  const int narrow = rows / 16;
  return {narrow, num_warps / narrow, 1, cols * narrow / num_warps};
}

// bwd_sm80: K + V + 2 Q (1 above head dim 128 and in fp32) + dO + P + dS.
constexpr int bwd_sm80_q_stages(int head_dim, int terms) {
  return head_dim <= 128 && terms == 1 ? 2 : 1;
}

// small_smem: the variant for GPUs that offer 99 KiB a block; fp32 at 256 has none (it would need
// 108 KiB even at 16 x 16).
constexpr Tile bwd_sm80_tile(int head_dim, bool small_smem, int terms) {
  int block_m = 64, block_n = head_dim <= 128 ? 128 : 64, num_warps = 8;
  if (small_smem && head_dim > 64) {
    block_m = head_dim <= 128 ? 64 : 32;
    block_n = head_dim <= 192 ? 64 : 32;
    num_warps = head_dim <= 192 ? 8 : 4;
  }
  if (terms > 1) {
    block_m = head_dim <= 64 && !small_smem ? 64 : 32;
    block_n = head_dim <= 128 ? 64 : 32;
    num_warps = head_dim <= 128 && !small_smem ? 8 : 4;
    if (small_smem && head_dim == 128) block_m = 16, block_n = 32, num_warps = 2;
  }
  const int smem_bytes = 2 * tile_bytes(block_n, head_dim) +
                         (bwd_sm80_q_stages(head_dim, terms) + 1) * tile_bytes(block_m, head_dim) +
                         2 * tile_bytes(block_m, block_n);
  return {block_m, block_n, num_warps, terms * smem_bytes};
}

// bwd_sm90: K + V [block_n, D] + two stages of Q, dO [block_m, D], dS [block_m, block_n] and row
// statistics + dQ [block_m, D] fp32. One producer warpgroup and two consumers of 64 keys each. S^T and
// dP^T [64, block_m], dK and dV [64, D] have to fit into 232 registers, hence 128 rows at head dim 64
// and 64 rows at 128.
constexpr int kBwdSm90Stages = 2;
constexpr Tile bwd_sm90_tile(int head_dim) {
  constexpr int kStatisticsBytes = 16, kBarriersAndSlots = 256;  // a row; lse, delta, key range
  const int block_m = head_dim <= 64 ? 128 : 64, block_n = 128;
  return {block_m, block_n, 12,
          2 * tile_bytes(block_n, head_dim) + 2 * tile_bytes(block_m, head_dim) +
              kBwdSm90Stages * (2 * tile_bytes(block_m, head_dim) + tile_bytes(block_m, block_n) +
                                block_m * kStatisticsBytes) +
              kBarriersAndSlots};
}

// bwd_dq_sm80: Q + dO + K + V, one stage each; 16 rows a warp. 64 keys above head dim 128 spill 150
// to 240 bytes a thread. Below 99 KiB at every head dim, so it needs no second variant.
constexpr Tile bwd_dq_sm80_tile(int head_dim, int terms) {
  int block_m = head_dim <= 128 ? 128 : 64, block_n = head_dim <= 128 ? 64 : 32;
  if (terms > 1) {
    block_m = head_dim <= 64 ? 64 : head_dim <= 128 ? 32 : 16;
    block_n = head_dim <= 128 ? 32 : 16;
  }
  return {block_m, block_n, block_m / 16,
          terms * (2 * tile_bytes(block_m, head_dim) + 2 * tile_bytes(block_n, head_dim))};
}

// bwd_dbias_sm80: Q + dO + K + V; likewise below 99 KiB.
constexpr Tile bwd_dbias_sm80_tile(int head_dim, int terms) {
  if (terms > 1) return bwd_dq_sm80_tile(head_dim, terms);
  const int block_m = 64, block_n = head_dim <= 192 ? 64 : 32;
  return {block_m, block_n, block_m / 16,
          2 * tile_bytes(block_m, head_dim) + 2 * tile_bytes(block_n, head_dim)};
}

}  // namespace hfb

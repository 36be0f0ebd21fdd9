// A warp's share of a matrix product, both operands in shared memory.
#pragma once

#include "tile.cuh"

namespace hfb {

// Operands stored transposed: A as [k][m], B as [k][n]; read with ldmatrix.trans.
constexpr int kTransA = 1, kTransB = 2;

template <bool kTrans>
__device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], uint32_t s_address) {
  if constexpr (kTrans) {
    ldmatrix_x4_trans(fragment, s_address);
  } else {
    ldmatrix_x4(fragment, s_address);
  }
}

// acc[row block] [16, kValues / 2] += A B over kDepth. a_at(k, row_block) and b_at(k, col) give the
// ldmatrix addresses (tile.cuh) of a [16, 16] block of A and of [16 columns, 16 deep] of B. Every
// fragment of B serves all row blocks.
template <typename T, int kDepth, int kTrans = 0, int kRowBlocks, int kValues, typename AAt,
          typename BAt>
__device__ __forceinline__ void multiply(float (&acc)[kRowBlocks][kValues], AAt a_at, BAt b_at) {
#pragma unroll
  for (int kk = 0; kk < kDepth; kk += 16) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int mb = 0; mb < kRowBlocks; ++mb) {
      load_fragment<(kTrans & kTransA) != 0>(a[mb], a_at(kk, mb));
    }
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) {
      uint32_t b[4];
      load_fragment<(kTrans & kTransB) != 0>(b, b_at(kk, 16 * j));
#pragma unroll
      for (int mb = 0; mb < kRowBlocks; ++mb) {
        mma_16x8x16<T>(&acc[mb][8 * j], a[mb], b[0], b[1]);
        mma_16x8x16<T>(&acc[mb][8 * j + 4], a[mb], b[2], b[3]);
      }
    }
  }
}

}  // namespace hfb

// A warp's share of a matrix product, both operands in shared memory.
#pragma once

#include "operand.cuh"
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
// ldmatrix addresses (tile.cuh) of a [16, 16] block of A and of [16 columns, 16 deep] of B, in the
// first term; the others lie a_term and b_term bytes apart. Every fragment of B serves all row
// blocks.
template <typename T, int kDepth, int kTrans = 0, int kRowBlocks, int kValues, typename AAt,
          typename BAt>
__device__ __forceinline__ void multiply(float (&acc)[kRowBlocks][kValues], AAt a_at, BAt b_at,
                                         uint32_t a_term = 0, uint32_t b_term = 0) {
  constexpr int kTerms = Operand<T>::kTerms;
  constexpr int kUnroll =
      kTerms == 1 ? kDepth / 16 : 1;  // six products fill the pipe by themselves
#pragma unroll kUnroll
  for (int kk = 0; kk < kDepth; kk += 16) {
    uint32_t a[kRowBlocks][kTerms][4];
#pragma unroll
    for (int mb = 0; mb < kRowBlocks; ++mb) {
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
        load_fragment<(kTrans & kTransA) != 0>(a[mb][t], a_at(kk, mb) + t * a_term);
    }
#pragma unroll
    for (int j = 0; j < kValues / 8; ++j) {
      uint32_t b[kTerms][4];
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
        load_fragment<(kTrans & kTransB) != 0>(b[t], b_at(kk, 16 * j) + t * b_term);
#pragma unroll
      for (int mb = 0; mb < kRowBlocks; ++mb) {
        mma_terms<T>(&acc[mb][8 * j], a[mb], b, 0);
        mma_terms<T>(&acc[mb][8 * j + 4], a[mb], b, 1);
      }
    }
  }
}

// acc [16, kValues / 2] += A B of one [16, 16] block of A in registers (pack_operand). b_at(col): as
// above, transposed, at the block's depth.
template <typename T, int kValues, typename BAt>
__device__ __forceinline__ void multiply_block(float (&acc)[kValues],
                                               const uint32_t (&a)[Operand<T>::kTerms][4], BAt b_at,
                                               uint32_t b_term = 0) {
#pragma unroll
  for (int j = 0; j < kValues / 8; ++j) {
    uint32_t b[Operand<T>::kTerms][4];
#pragma unroll
    for (int t = 0; t < Operand<T>::kTerms; ++t) ldmatrix_x4_trans(b[t], b_at(16 * j) + t * b_term);
    mma_terms<T>(&acc[8 * j], a, b, 0);
    mma_terms<T>(&acc[8 * j + 4], a, b, 1);
  }
}

}  // namespace hfb

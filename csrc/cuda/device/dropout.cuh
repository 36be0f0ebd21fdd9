// Dropout on the fragment of an mma accumulator: one draw of dropout.h serves the eight elements a
// lane holds of a [16 rows, 16 keys] block.
#pragma once

#include "../../dropout.h"

namespace hfb {

// Bit 4 * h + 2 * r + e: whether (row + 8 r, key + 8 h + e) is kept. row and key are those of the
// lane's first element, so row % 16 < 8, key % 16 < 8 and key is even.
__device__ __forceinline__ uint32_t dropout_keep_bits(const Dropout& dropout, uint32_t batch_head,
                                                      int row, int key) {
  const DropoutDraws draws =
      dropout_draws(static_cast<uint64_t>(*dropout.seed), batch_head, row, key);
  uint32_t bits = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t draw = draws.words[2 * r + h] >> (16 * e) & 0xffffu;
        bits |= static_cast<uint32_t>(draw < dropout.keep_below) << (4 * h + 2 * r + e);
      }
    }
  }
  return bits;
}

}  // namespace hfb

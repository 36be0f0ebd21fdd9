// Which probabilities dropout keeps: a pure function of seed and position, so that forward,
// backward and every device draw the same mask, in any order, and a recomputed forward repeats it.
//
//   one Philox4x32-7 call (Salmon et al., SC 2011) = eight 16-bit draws
//   key     = seed
//   counter = (batch * Hq + head, row / 16 * 8 + row % 8, key / 16 * 4 + key % 8 / 2, 0)
//   draw    = (row / 8 % 2) * 4 + (key / 8 % 2) * 2 + key % 2
//
// The eight elements of a call are those that one lane holds of a 16 x 16 block of an mma
// accumulator with rows of queries, so such a kernel wastes no draw. 16 bits and not 8: the rate is
// exact to 1/65,536, and the rescale is the inverse of the rate that is really drawn.
// In sync with: reference.dropout_keep.
#pragma once

#include <cstdint>

#include "params.h"

namespace hfb {

struct DropoutDraws {
  uint32_t words[4];

  // row and key select one of the elements that the call covers.
  HFB_HOST_DEVICE uint32_t at(int64_t row, int64_t key) const {
    const int draw = static_cast<int>((row / 8 % 2) * 4 + (key / 8 % 2) * 2 + key % 2);
    return words[draw / 2] >> (draw % 2 * 16) & 0xffffu;
  }
};

HFB_HOST_DEVICE DropoutDraws dropout_draws(uint64_t seed, uint32_t batch_head, int64_t row,
                                           int64_t key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t c0 = batch_head, c1 = static_cast<uint32_t>(row / 16 * 8 + row % 8),
           c2 = static_cast<uint32_t>(key / 16 * 4 + key % 8 / 2), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultiplier0) * c0;
    const uint64_t b = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += kWeyl0, k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Whether the probability of (row, key) is kept.
HFB_HOST_DEVICE bool dropout_keeps(const Dropout& dropout, uint32_t batch_head, int64_t row,
                                   int64_t key) {
  const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
  return dropout_draws(seed, batch_head, row, key).at(row, key) < dropout.keep_below;
}

}  // namespace hfb

// What the tensor cores multiply: 16-bit numbers as they are, fp32 as the sum of three bf16 terms.
//
//   x = t0 + t1 + t2,  t0 = bf16(x), t1 = bf16(x - t0), t2 = bf16(x - t0 - t1): all 24 bits of fp32
//   x y = t0 u0 + (t0 u1 + t1 u0) + (t0 u2 + t1 u1 + t2 u0),  the rest is below 2^-24
//
// Six bf16 products cost what three TF32 products do (an m16n8k16 of bf16 takes the time of an
// m16n8k8 of TF32) and keep 24 bits instead of 22, with fp32's range of exponents; and tiles stay
// 16-bit, so that ldmatrix, its transpose and the swizzle serve both.
#pragma once

#include "ptx.cuh"

namespace hfb {

template <typename T>
struct Operand {
  using Element = T;  // in shared memory and in fragments
  static constexpr int kTerms = 1;
};
template <>
struct Operand<float> {
  using Element = __nv_bfloat16;
  static constexpr int kTerms = 3;
};

// Two values as kTerms packed pairs.
template <typename T>
__device__ __forceinline__ void split_pair(float lo, float hi,
                                           uint32_t (&terms)[Operand<T>::kTerms]) {
  using Element = typename Operand<T>::Element;
#pragma unroll
  for (int t = 0; t < Operand<T>::kTerms; ++t) {
    terms[t] = pack2<Element>(lo, hi);
    if (t + 1 == Operand<T>::kTerms) break;
    const float rounded_lo = __uint_as_float(terms[t] << 16),
                rounded_hi = __uint_as_float(terms[t] & 0xffff0000u);
    lo = isfinite(rounded_lo) ? lo - rounded_lo : 0.f;  // inf and NaN: in the first term alone
    hi = isfinite(rounded_hi) ? hi - rounded_hi : 0.f;
  }
}

// d[16, 8] += a b over all products of terms that count, the smallest first. The tensor cores cut off
// what they add below the accumulator's last bit; with every product added to the running sum that
// bias grew to 2e-6 of the result over 1,000 keys (H200). So the six products of one block add up on
// their own and join the sum by a rounded addition.
template <typename T>
__device__ __forceinline__ void mma_terms(float* d, const uint32_t (&a)[Operand<T>::kTerms][4],
                                          const uint32_t (&b)[Operand<T>::kTerms][4], int half) {
  using Element = typename Operand<T>::Element;
  if constexpr (Operand<T>::kTerms == 1) {
    mma_16x8x16<Element>(d, a[0], b[0][2 * half], b[0][2 * half + 1]);
  } else {
    float block[4] = {};
#pragma unroll
    for (int order = Operand<T>::kTerms - 1; order >= 0; --order) {
#pragma unroll
      for (int t = 0; t <= order; ++t) {
        mma_16x8x16<Element>(block, a[t], b[order - t][2 * half], b[order - t][2 * half + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += block[i];
  }
}

// Eight accumulator values of a [16, 16] block, whose layout is that of an A operand.
template <typename T>
__device__ __forceinline__ void pack_operand(const float* values,
                                             uint32_t (&a)[Operand<T>::kTerms][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t terms[Operand<T>::kTerms];
    split_pair<T>(values[2 * i], values[2 * i + 1], terms);
#pragma unroll
    for (int t = 0; t < Operand<T>::kTerms; ++t) a[t][i] = terms[t];
  }
}

}  // namespace hfb

// Stage 2, online softmax over an mma accumulator.
//                                      arXiv:1805.02867, Alg. 3; arXiv:2307.08691, Alg. 1.
//
// State per row: m, the largest score so far, and l = sum(exp(score - m)). A tile with a larger
// maximum first scales l and the output by exp(m_old - m_new); the division by l happens once, at
// the end. Exponentials run in base 2. All of m, l, scores are fp32. m = -inf means "no key seen":
// exp(-inf - 0) = 0, so -inf minus -inf never occurs. ex2.approx returns NaN for NaN, which reaches
// l and thereby out and lse.
#pragma once

#include "ptx.cuh"

namespace hfb {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLazyThreshold = 8.f;  // in powers of 2

// Multiplies row r (0, 1) of an accumulator.
template <int kOut>
__device__ __forceinline__ void scale_row(int r, float (&out)[kOut], float factor) {
#pragma unroll
  for (int j = 2 * r; j < kOut; j += 4) {
    out[j] *= factor;
    out[j + 1] *= factor;
  }
}

// The two rows (l / 4 and l / 4 + 8) a lane holds of a warp's 16-row accumulator.
// kScaled = false: scores are raw q k^T, to_log2 = scale * log2(e) > 0, and the exponential is
//                  exp2(fma(score, to_log2, -m * to_log2)).
// kScaled = true:  scores are in natural units: exp2((score - m) * log2(e)), which survives a bias
//                  of finfo.min, where m * log2(e) would overflow. One more instruction a score.
template <bool kScaled>
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // this lane's columns only, until finish()
  float to_log2;                  // log2(e), times scale unless the scores already carry it

  __device__ __forceinline__ float exponential(float score, float m, float m_log2) const {
    return kScaled ? exp2_approx((score - m) * to_log2)
                   : exp2_approx(fmaf(score, to_log2, -m_log2));
  }

  // Turns the scores of row r (0, 1) of one tile into probabilities in place; returns the factor
  // that the output of earlier tiles needs.
  // kLazy: m stays until the new maximum exceeds it by kLazyThreshold, so that the factor is mostly
  // exactly 1 and the caller can skip the rescale. The result is as exact: l and out carry the same
  // m, and probabilities stay below 2^kLazyThreshold, far inside fp16.
  template <bool kLazy, int kScores>
  __device__ __forceinline__ float update_row(int r, float (&scores)[kScores]) {
    float m_new = row_max[r];
#pragma unroll
    for (int j = 2 * r; j < kScores; j += 4) m_new = fmaxf(m_new, fmaxf(scores[j], scores[j + 1]));
    m_new = quad_max(m_new);
    if (kLazy && !((m_new - row_max[r]) * to_log2 > kLazyThreshold)) m_new = row_max[r];
    const float m = m_new == -INFINITY ? 0.f : m_new, m_log2 = m * to_log2;
    const float rescale =
        kLazy ? exp2_approx((row_max[r] - m) * to_log2) : exponential(row_max[r], m, m_log2);
    row_max[r] = m_new;
    float sum = row_sum[r] * rescale;
#pragma unroll
    for (int j = 2 * r; j < kScores; j += 4) {
      scores[j] = exponential(scores[j], m, m_log2);
      scores[j + 1] = exponential(scores[j + 1], m, m_log2);
      sum += scores[j] + scores[j + 1];
    }
    row_sum[r] = sum;
    return rescale;
  }

  // Turns scores of one tile into probabilities in place and rescales the output accumulator.
  template <int kScores, int kOut>
  __device__ __forceinline__ void update(float (&scores)[kScores], float (&out)[kOut]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) scale_row(r, out, update_row<false>(r, scores));
  }

  // Completes the row sum; returns 1 / l (0 for a row that saw no key) and the natural-log LSE.
  // sink: the score of one more key of value 0; -inf without one.
  __device__ __forceinline__ float finish(int r, float sink, float& lse) {
    float sum = quad_sum(row_sum[r]), rescale = 1.f;
    float m = kScaled ? row_max[r] : row_max[r] * to_log2 * kLn2;
    if (sink != -INFINITY) {
      const float m_keys = m;
      m = fmaxf(m, sink);
      rescale = expf(m_keys - m);
      sum = sum * rescale + expf(sink - m);
    }
    lse = sum == 0.f ? -INFINITY : m + logf(sum);
    return sum == 0.f ? 0.f : rescale / sum;
  }
};

}  // namespace hfb

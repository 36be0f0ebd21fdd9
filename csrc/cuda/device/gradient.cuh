// One query row of a backward tile: from q k^T and dO V^T to P and dS.
//
//   P = exp(S - lse)    dP = dropout(dO V^T)    dA = P * (dP - delta)    dS = dA * softcap'
//
// dA is the derivative by what is added to the score (bias, ALiBi), dS the one by scale * q k^T.
// All fp32. lse comes from bwd_preprocess: in base 2, or natural where kGeneral; +inf for a row that
// sees no key, so that P = 0.
#pragma once

#include "dropout.cuh"
#include "mask.cuh"
#include "softmax.cuh"

namespace hfb {

template <typename T, bool kGeneral>
struct GradientRow {
  const ForwardParams& p;
  ScoreRow score_row;
  KeyRange keys;  // that the row sees; used where is_masked
  float lse, delta, scale, scale_log2;
  bool is_masked;

  __device__ __forceinline__ GradientRow(const ForwardParams& params, int batch, int head, int row,
                                         float row_lse, float row_delta, bool masked)
      : p(params),
        score_row(params, batch, head, row),
        keys{0, static_cast<int32_t>(params.len_kv)},
        lse(row_lse),
        delta(row_delta),
        scale(static_cast<float>(params.scale)),
        scale_log2(static_cast<float>(params.scale) * kLog2e),
        is_masked(masked) {
    if (masked) keys = row < params.len_q ? params.row_keys(batch, row) : KeyRange{0, 0};
  }

  // score: q k^T in, P out (0 where dropped, not yet rescaled). dp: dO V^T in, dS out. Returns dA.
  __device__ __forceinline__ float apply(float& score, float& dp, int key, bool is_kept) const {
    const bool visible = key >= keys.begin && key < keys.end;
    float cap_slope = 1.f;
    if constexpr (kGeneral) {
      const float raw = score * scale;
      score = visible ? score_row.template apply<T>(raw, key) : -INFINITY;
      if (visible) cap_slope = score_row.softcap_slope(raw);
      score = score == -INFINITY ? 0.f : exp2_approx((score - lse) * kLog2e);
      if (p.dropout.seed) dp = is_kept ? dp * p.dropout.rescale : 0.f;
    } else {
      score = is_masked && !visible ? 0.f : exp2_approx(fmaf(score, scale_log2, -lse));
    }
    // dP of a hidden key may be NaN; its dS is 0 all the same.
    const float da = is_masked && score == 0.f ? 0.f : score * (dp - delta);
    dp = da * cap_slope;
    if (kGeneral && !is_kept) score = 0.f;
    return da;
  }
};

}  // namespace hfb

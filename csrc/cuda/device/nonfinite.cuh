// Puts back what clear_nonfinite took out of V, for the keys a row does see.
#pragma once

#include "dropout.cuh"
#include "mask.cuh"

namespace hfb {

// Adds p * v to out [kRows rows from row_begin] for every visible key of a masked tile whose v is
// inf or NaN. out and lse of these rows are already written. Rare and slow: one warp a row, one key
// at a time; this is warp `warp` of kWarps. rows: of the whole query tile, as the kernel classified
// key tiles by it. q, k, v, out, lse point at row 0 of this batch and head.
template <typename T, bool kGeneral, int kRows, int kBlockN, int kWarps>
__device__ __noinline__ void restore_nonfinite_values(const ForwardParams& p, const T* q,
                                                      const T* k, const T* v, T* out,
                                                      const float* lse, const RowBlock rows,
                                                      int batch, int head, int row_begin,
                                                      int warp) {
  const int lane = threadIdx.x % 32;
  const int row_end = min(row_begin + kRows, static_cast<int>(p.len_q));
  for (int row = row_begin + warp; row < row_end; row += kWarps) {
    const KeyRange keys = p.row_keys(batch, row);
    const ScoreRow score_row(p, batch, head, row);
    for (int key = keys.begin; key < keys.end; ++key) {
      const int tile = key / kBlockN * kBlockN;
      if (!kGeneral && classify_tile(rows, tile, tile + kBlockN) == TileKind::kFull) continue;
      bool nonfinite = false;
      for (int d = lane; d < p.head_dim_v; d += 32)
        nonfinite |= !isfinite(to_float(v[key * p.v.stride_row + d]));
      if (!__any_sync(0xffffffffu, nonfinite)) continue;
      float score = 0.f;
      for (int d = lane; d < p.head_dim; d += 32) {
        score += to_float(q[row * p.q.stride_row + d]) * to_float(k[key * p.k.stride_row + d]);
      }
#pragma unroll
      for (int offset = 16; offset; offset /= 2)
        score += __shfl_xor_sync(0xffffffffu, score, offset);
      score *= static_cast<float>(p.scale);
      if (kGeneral) score = score_row.template apply<T>(score, key);
      if (score == -INFINITY) continue;
      float probability = expf(score - lse[row]);
      if (kGeneral && p.dropout.seed) {
        const auto batch_head = static_cast<uint32_t>(batch * p.heads_q + head);
        const bool is_kept = dropout_keeps(p.dropout, batch_head, row, key);
        probability = is_kept ? probability * p.dropout.rescale : 0.f;
      }
      for (int d = lane; d < p.head_dim_v; d += 32) {
        const float value = to_float(v[key * p.v.stride_row + d]);
        T* dst = out + row * p.out.stride_row + d;
        if (!isfinite(value)) *dst = static_cast<T>(to_float(*dst) + probability * value);
      }
    }
  }
}

}  // namespace hfb

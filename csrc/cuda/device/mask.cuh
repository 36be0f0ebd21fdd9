// What changes a score between q k^T and the softmax: the key ranges of rows, and (general kernels)
// softcap, bias, ALiBi, mask.
#pragma once

#include "../../params.h"
#include "ptx.cuh"

namespace hfb {

// Joins the key ranges of rows row_begin + first, + first + kStep, ... below row_begin + kRows over
// the lanes of this warp.
template <int kRows, int kStep>
__device__ __forceinline__ RowBlock join_rows_of_warp(const ForwardParams& p, int batch,
                                                      int row_begin, int first) {
  RowBlock block = RowBlock::none(static_cast<int32_t>(p.len_kv));
  for (int r = first; r < kRows; r += kStep) {
    if (row_begin + r < p.len_q) block.add(p.row_keys(batch, row_begin + r));
  }
  constexpr unsigned kAll = 0xffffffffu;
  return {__reduce_min_sync(kAll, block.begin), __reduce_max_sync(kAll, block.end),
          __reduce_max_sync(kAll, block.full_begin), __reduce_min_sync(kAll, block.full_end)};
}

// Joins the key ranges of rows [row_begin, row_begin + kRows) in every thread of the block.
// s_scratch: 4 * warps ints; begins with its writes and ends with a barrier, so the caller needs
// one before reusing s_scratch.
template <int kRows, int kThreads>
__device__ __forceinline__ RowBlock join_rows(const ForwardParams& p, int batch, int row_begin,
                                              int* s_scratch) {
  RowBlock block = join_rows_of_warp<kRows, kThreads>(p, batch, row_begin, threadIdx.x);
  int4* s_blocks = reinterpret_cast<int4*>(s_scratch);
  if (threadIdx.x % 32 == 0) {
    s_blocks[threadIdx.x / 32] =
        make_int4(block.begin, block.end, block.full_begin, block.full_end);
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int4 other = s_blocks[w];
    block.begin = min(block.begin, other.x);
    block.end = max(block.end, other.y);
    block.full_begin = max(block.full_begin, other.z);
    block.full_end = min(block.full_end, other.w);
  }
  return block;
}

// The score of the row's extra key of value 0, -inf without one.
__device__ __forceinline__ float row_sink(const ForwardParams& p, int64_t batch, int64_t head,
                                          int row) {
  if (p.sinks.data == nullptr || row >= p.len_q) return -INFINITY;
  return static_cast<const float*>(
      p.sinks.data)[batch * p.sinks.stride_batch + head * p.sinks.stride_head +
                    row * p.sinks.stride_row];
}

// Softcap, bias, ALiBi and mask of one query row. Scores are in natural units (already times scale).
struct ScoreRow {
  const bool* mask;  // this row's mask, or null
  const char* bias;  // this row's bias, or null
  bool bias_is_fp32;
  float softcap;
  float slope;   // of ALiBi, 0 without
  int position;  // of the row among the keys

  __device__ __forceinline__ ScoreRow(const ForwardParams& p, int batch, int head, int row)
      : mask(nullptr),
        bias(nullptr),
        bias_is_fp32(p.bias_dtype == DType::kFloat32),
        softcap(static_cast<float>(p.softcap)),
        slope(0.f),
        position(0) {
    if (row >= p.len_q) return;
    if (p.alibi_slopes) {
      slope = static_cast<const float*>(
          p.alibi_slopes)[batch * p.alibi_stride_batch + head * p.alibi_stride_head];
      position = static_cast<int>(p.position(batch, row));
    }
    if (p.mask.data) {
      mask = p.mask.data + batch * p.mask.stride_batch + head * p.mask.stride_head +
             row * p.mask.stride_row;
    }
    if (p.bias.data) {
      const int64_t element =
          batch * p.bias.stride_batch + head * p.bias.stride_head + row * p.bias.stride_row;
      bias = static_cast<const char*>(p.bias.data) + element * (bias_is_fp32 ? 4 : 2);
    }
  }

  // d softcap(score) / d score.
  __device__ __forceinline__ float softcap_slope(float score) const {
    if (softcap == 0.f) return 1.f;
    const float t = tanhf(score / softcap);
    return 1.f - t * t;
  }

  // The factor of -slope in the score.
  __device__ __forceinline__ float distance(int key) const {
    return static_cast<float>(abs(position - key));
  }

  // Key key is inside the row's range. Returns the score, -inf where the mask or a -inf bias hides
  // the key.
  template <typename T>
  __device__ __forceinline__ float apply(float score, int key) const {
    if (softcap != 0.f) score = softcap * tanhf(score / softcap);
    if (slope != 0.f) score -= slope * distance(key);
    if (bias) {
      const float b = bias_is_fp32 ? reinterpret_cast<const float*>(bias)[key]
                                   : to_float(reinterpret_cast<const T*>(bias)[key]);
      score = b == -INFINITY ? -INFINITY : score + b;
    }
    return mask == nullptr || mask[key] ? score : -INFINITY;
  }
};

}  // namespace hfb

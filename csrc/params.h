// What one attention call is, as plain data: every kernel (CPU and CUDA) receives one of these
// structs.
//
//   S = scale * q k^T -> softcap -> + bias - slope * distance -> mask to -inf
//   P = exp(S - lse);  lse = ln(exp(sink) + sum(exp(S)));  out = dropout(P) v
//
// Filled in by bindings.cpp after all checks; kernels trust it. No torch, no CUDA in this file.
// Strides are in elements, int64; the last dimension always has stride 1; a broadcast dimension has
// stride 0.
#pragma once

#include <cstdint>

#include "tiling.h"

namespace hfb {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// A [B, H, L, D] tensor without its sizes.
template <typename T>
struct Strided {
  T* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_row = 0;
};

// One number for each query row, int32 [1|B, 1|Lq], or null.
struct RowInts {
  const int32_t* data = nullptr;
  int64_t stride_batch = 0, stride_row = 0;

  HFB_HOST_DEVICE int32_t at(int64_t batch, int64_t row) const {
    return data[batch * stride_batch + row * stride_row];
  }
};

// Dropout of probabilities, drawn by position (dropout.h): the same in forward, backward and on
// every device.
struct Dropout {
  const int64_t* seed = nullptr;  // [1] on the device; null = off
  uint32_t keep_below = 65536;    // kept where a 16-bit draw is below; keep_below / 65536 = 1 - p
  float rescale = 1.f;            // 65536 / keep_below
};

struct ForwardParams {
  DType dtype = DType::kFloat32;         // of q, k, v, out
  int64_t batch = 0;                     // B
  int64_t heads_q = 0, heads_kv = 0;     // Hq = G * Hkv; query head h reads kv head h / G
  int64_t len_q = 0, len_kv = 0;         // Lq, Lk
  int64_t head_dim = 0, head_dim_v = 0;  // D, Dv; multiples of 8

  Strided<const void> q;  // [B, Hq, Lq, D]
  Strided<const void> k;  // [B, Hkv, Lk, D]
  Strided<const void> v;  // [B, Hkv, Lk, Dv]
  Strided<void> out;      // [B, Hq, Lq, Dv]; a row that sees no key is written as 0
  void* lse = nullptr;    // [B, Hq, Lq] contiguous, natural log; fp32, or fp64 when dtype is fp64;
                          // -inf where a row sees no key

  double scale = 1.0;          // multiplies q k^T; any sign, may be 0
  double softcap = 0.0;        // softcap * tanh(S / softcap) before bias and mask; 0 = off
  Band band;                   // causal, sliding window, query offset
  RowInts query_offsets;       // replaces band.offset: row i stands at key i + query_offsets[b, i]
  RowInts row_start, row_end;  // row i sees keys start[b, i] <= j < end[b, i], on top of the band
  Strided<const bool> mask;    // [1|B, 1|Hq, 1|Lq, Lk] or null; true = visible
  Strided<const void> bias;    // [1|B, 1|Hq, 1|Lq, Lk] or null; -inf = not visible
  DType bias_dtype = DType::kFloat32;  // dtype of q, or fp32
  // [1|B, Hq] fp32 (fp64 when dtype is fp64) or null; adds -slope * |position of row - key|
  const void* alibi_slopes = nullptr;
  int64_t alibi_stride_batch = 0, alibi_stride_head = 0;
  // [1|B, 1|Hq, 1|Lq] likewise, or null: the score of one more key whose value is 0
  Strided<const void> sinks;
  Dropout dropout;
  bool dq_by_rows =
      false;  // CUDA backward: dq in a fixed order of additions, or dalibi_rows wanted

  // The row's position among the keys.
  HFB_HOST_DEVICE int64_t position(int64_t batch_index, int64_t row) const {
    return row + (query_offsets.data ? query_offsets.at(batch_index, row) : band.offset);
  }
  // Keys that query row sees by band and row limits.
  HFB_HOST_DEVICE KeyRange row_keys(int64_t batch_index, int64_t row) const {
    const int32_t len = static_cast<int32_t>(len_kv);
    Band own_band = band;
    if (query_offsets.data) own_band.offset = query_offsets.at(batch_index, row);
    const KeyRange keys = band_keys(own_band, static_cast<int32_t>(row), len);
    if (row_start.data == nullptr && row_end.data == nullptr) return keys;
    const KeyRange own = {row_start.data ? row_start.at(batch_index, row) : 0,
                          row_end.data ? row_end.at(batch_index, row) : len};
    return intersect(keys, own, len);
  }
  // The band that all rows share, for skipping query tiles; everything if rows differ.
  HFB_HOST_DEVICE Band shared_band() const { return query_offsets.data ? Band{} : band; }
};

struct BackwardParams : ForwardParams {  // out and lse are inputs here, as forward wrote them
  Strided<const void> dout;              // [B, Hq, Lq, Dv]
  const void* dlse = nullptr;            // [B, Hq, Lq] contiguous, dtype of lse, or null
  Strided<void> dq;                      // [B, Hq, Lq, D]
  Strided<void> dk;                      // [B, Hkv, Lk, D]; summed over the group in fp32 (fp64)
  Strided<void> dv;                      // [B, Hkv, Lk, Dv]; likewise
  // Both contiguous, fp32 (fp64 when dtype is fp64), or null.
  void* dbias = nullptr;  // [bias_batch, bias_heads, bias_rows, Lk], summed over what is 1
  int64_t bias_batch = 1, bias_heads = 1, bias_rows = 1;  // 1|B, 1|Hq, 1|Lq
  void* dalibi_rows = nullptr;  // [B, Hq, Lq]: gradient of the slope, one term for each row
  void* workspace = nullptr;  // CUDA only: plan's workspace_bytes, uninitialised, 256-byte aligned
};

}  // namespace hfb

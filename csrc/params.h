// What one attention call is, as plain data: every kernel (CPU and CUDA) receives one of these
// structs.
//
//   S = scale * q k^T -> softcap -> + bias -> mask to -inf;  P = softmax(S);  out = P v
//   lse = ln(sum(exp(S)))
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

// Per-row limits on visible keys, int32 [1|B, 1|Lq], either may be null.
// Row i sees keys start[b, i] <= j < end[b, i], on top of the band.
struct RowLimits {
  const int32_t* start = nullptr;
  int64_t start_stride_batch = 0, start_stride_row = 0;
  const int32_t* end = nullptr;
  int64_t end_stride_batch = 0, end_stride_row = 0;
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

  double scale = 1.0;    // multiplies q k^T; any sign, may be 0
  double softcap = 0.0;  // softcap * tanh(S / softcap) before bias and mask; 0 = off
  Band band;             // causal, sliding window, query offset
  RowLimits row_limits;
  Strided<const bool> mask;            // [1|B, 1|Hq, 1|Lq, Lk] or null; true = visible
  Strided<const void> bias;            // [1|B, 1|Hq, 1|Lq, Lk] or null; -inf = not visible
  DType bias_dtype = DType::kFloat32;  // dtype of q, or fp32
};

struct BackwardParams : ForwardParams {  // out and lse are inputs here, as forward wrote them
  Strided<const void> dout;              // [B, Hq, Lq, Dv]
  const void* dlse = nullptr;            // [B, Hq, Lq] contiguous, dtype of lse, or null
  Strided<void> dq;                      // [B, Hq, Lq, D]
  Strided<void> dk;                      // [B, Hkv, Lk, D]; summed over the group in fp32 (fp64)
  Strided<void> dv;                      // [B, Hkv, Lk, Dv]; likewise
  void* workspace = nullptr;  // CUDA only: plan's workspace_bytes, uninitialised, 256-byte aligned
};

}  // namespace hfb

// Stage 3, memory hierarchy: 16-bit tiles in shared memory, how they are filled and read. An fp32
// tile is three of them, one for each term (operand.cuh), tile_bytes apart.
//
// A [kRows, kCols] tile is a row of slabs of 64 columns; inside a slab a row is 128 bytes (all 32
// banks) of eight 16-byte chunks, and chunk c of row r lies at position c ^ (r % 8). Eight rows of
// one column chunk then fall into eight different bank groups, so cp.async stores, ldmatrix and
// ldmatrix.trans are free of bank conflicts (tests/test_layout.py counts them). Columns up to the
// slab boundary exist (96 -> 128) but are never read.
#pragma once

#include "../../params.h"
#include "../../tiles.h"
#include "operand.cuh"

namespace hfb {

// Byte offset of element (row, col) in a [kRows, *] tile.
template <int kRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int col) {
  return (col / kSlabCols) * (kRows * 128) + row * 128 +
         ((((col % kSlabCols) / 8) ^ (row & 7)) * 16) + (col % 8) * kBytesPerElement;
}

// One thread's share of a [kRows, kCols] tile: chunks (row, col), row = first_row + i * kRowStep.
template <int kRows, int kCols, int kThreads>
struct ChunkMap {
  static constexpr int kChunksPerRow = kCols / 8;
  static constexpr int kChunks = kRows * kChunksPerRow;
  static constexpr int kPerThread = kChunks / kThreads;
  static_assert(kChunks % kThreads == 0, "every thread moves the same number of chunks");

  __device__ __forceinline__ static int row(int i) {
    return (threadIdx.x + i * kThreads) / kChunksPerRow;
  }
  __device__ __forceinline__ static int col(int i) {
    return (threadIdx.x + i * kThreads) % kChunksPerRow * 8;
  }
};

// Bytes from term to term of a [kRows, kCols] tile.
template <int kRows, int kCols>
constexpr uint32_t kTermBytes = kRows * ((kCols + kSlabCols - 1) / kSlabCols) * 128;

// Starts the copy of rows [row_begin, row_begin + kRows) of g [len, cols]; rows >= len and columns
// >= cols become 0. fp32 is split on its way, through registers: that copy is complete on return.
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile_async(uint32_t s_tile, const T* g, int64_t stride_row,
                                                int row_begin, int len, int cols) {
  using Map = ChunkMap<kRows, kCols, kThreads>;
  constexpr int kUnroll = Operand<T>::kTerms == 1 ? Map::kPerThread : 2;
#pragma unroll kUnroll
  for (int i = 0; i < Map::kPerThread; ++i) {
    const int row = Map::row(i), col = Map::col(i);
    const bool valid = row_begin + row < len && col < cols;
    const T* src = valid ? g + (row_begin + row) * stride_row + col : g;
    const uint32_t s_chunk = s_tile + tile_offset<kRows>(row, col);
    if constexpr (Operand<T>::kTerms == 1) {
      cp_async_16(s_chunk, src, valid);
    } else {
      float4 x[2] = {};
      if (valid) {
        x[0] = *reinterpret_cast<const float4*>(src);
        x[1] = *reinterpret_cast<const float4*>(src + 4);
      }
      uint32_t words[4][Operand<T>::kTerms];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2* pairs = reinterpret_cast<const float2*>(x);
        split_pair<T>(pairs[w].x, pairs[w].y, words[w]);
      }
#pragma unroll
      for (int t = 0; t < Operand<T>::kTerms; ++t) {
        st_shared_16(s_chunk + t * kTermBytes<kRows, kCols>,
                     make_uint4(words[0][t], words[1][t], words[2][t], words[3][t]));
      }
    }
  }
}

// Sets the rows of a tile for which zero_row(row) holds to 0, in this thread's own chunks.
template <typename T, int kRows, int kCols, int kThreads, typename ZeroRow>
__device__ __forceinline__ void zero_rows(char* s_tile, ZeroRow zero_row) {
  using Map = ChunkMap<kRows, kCols, kThreads>;
#pragma unroll
  for (int i = 0; i < Map::kPerThread; ++i) {
    if (!zero_row(Map::row(i))) continue;
#pragma unroll
    for (int t = 0; t < Operand<T>::kTerms; ++t) {
      *reinterpret_cast<uint4*>(s_tile + t * kTermBytes<kRows, kCols> +
                                tile_offset<kRows>(Map::row(i), Map::col(i))) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// True where one of the two 16-bit values in word is inf or NaN.
template <typename T>
__device__ __forceinline__ bool has_nonfinite(uint32_t word) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  return (word & kExponent) == kExponent || ((word >> 16) & kExponent) == kExponent;
}

// Replaces inf and NaN among eight values by 0 and returns whether there were any.
template <typename T>
__device__ __forceinline__ bool clear_nonfinite_chunk(uint4& chunk) {
  constexpr uint32_t kExponent = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  uint32_t* words = reinterpret_cast<uint32_t*>(&chunk);
  bool found = false;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (!has_nonfinite<T>(words[w])) continue;
    found = true;
    if ((words[w] & kExponent) == kExponent) words[w] &= 0xffff0000u;
    if (((words[w] >> 16) & kExponent) == kExponent) words[w] &= 0x0000ffffu;
  }
  return found;
}

// Replaces inf and NaN in this thread's own chunks by 0 and returns whether there were any. Call
// between cp_async_wait (which makes a thread's own copies visible to it) and the barrier that
// publishes the tile. Needed where a tile is masked: an invisible key has probability 0, and 0 *
// NaN would be NaN. inf and NaN of fp32 are in the first term.
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ bool clear_nonfinite(char* s_tile) {
  using Map = ChunkMap<kRows, kCols, kThreads>;
  bool found = false;
#pragma unroll
  for (int i = 0; i < Map::kPerThread; ++i) {
    uint4* chunk = reinterpret_cast<uint4*>(s_tile + tile_offset<kRows>(Map::row(i), Map::col(i)));
    uint4 data = *chunk;
    const bool dirty = clear_nonfinite_chunk<typename Operand<T>::Element>(data);
    if (dirty) *chunk = data;
    found |= dirty;
  }
  return found;
}

// The same for chunks thread, thread + kThreads, ... of kChunks contiguous ones. x * 0 is NaN exactly
// for inf and NaN, so four chunks are tested by 16 fused multiply-adds.
template <typename T, int kChunks, int kThreads>
__device__ __forceinline__ bool clear_nonfinite_chunks(uint4* s_chunks, int thread) {
  using T2 = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, __half2>;
  constexpr int kGroup = 4;
  bool found = false;
#pragma unroll 1
  for (int first = thread; first < kChunks; first += kGroup * kThreads) {
    uint4 data[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int chunk = first + i * kThreads;
      data[i] = chunk < kChunks ? s_chunks[chunk] : make_uint4(0, 0, 0, 0);
    }
    uint32_t zero = 0;
    T2 sum = reinterpret_cast<T2&>(zero);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const T2* values = reinterpret_cast<const T2*>(&data[i]);
#pragma unroll
      for (int w = 0; w < 4; ++w) sum = __hfma2(values[w], reinterpret_cast<T2&>(zero), sum);
    }
    if (!has_nonfinite<T>(reinterpret_cast<uint32_t&>(sum))) continue;
    found = true;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (clear_nonfinite_chunk<T>(data[i])) s_chunks[first + i * kThreads] = data[i];
    }
  }
  return found;
}

// Fragment addresses. lane = 0..31; each returns what lane passes to ldmatrix_x4(_trans).
// A operand [16, 16] at (row, col) of a tile stored [m][k].
template <int kRows>
__device__ __forceinline__ uint32_t a_address(uint32_t s_tile, int row, int col, int lane) {
  return s_tile + tile_offset<kRows>(row + (lane & 15), col + (lane >> 4) * 8);
}
// A operand [16, 16] of the transpose: tile stored [k][m], block at (k, m); use ldmatrix_x4_trans.
template <int kRows>
__device__ __forceinline__ uint32_t a_trans_address(uint32_t s_tile, int k, int m, int lane) {
  return s_tile + tile_offset<kRows>(k + (lane & 7) + (lane >> 4) * 8, m + ((lane >> 3) & 1) * 8);
}
// B operands of two n8 blocks, tile stored [n][k], block at (n, k): registers 0, 1 = first, 2, 3 =
// second.
template <int kRows>
__device__ __forceinline__ uint32_t b_address(uint32_t s_tile, int n, int k, int lane) {
  return s_tile + tile_offset<kRows>(n + (lane & 7) + (lane >> 4) * 8, k + ((lane >> 3) & 1) * 8);
}
// The same for a tile stored [k][n]; use ldmatrix_x4_trans.
template <int kRows>
__device__ __forceinline__ uint32_t b_trans_address(uint32_t s_tile, int k, int n, int lane) {
  return s_tile + tile_offset<kRows>(k + (lane & 15), n + (lane >> 4) * 8);
}

// Writes a warp's accumulator [16, kValues / 2] fp32, times the scale of each row half, as an operand
// of T (its terms term_bytes apart) to (row, col) of a tile.
template <typename T, int kRows, int kValues>
__device__ __forceinline__ void store_accumulator(char* s_tile, const float (&acc)[kValues],
                                                  int row, int col, int lane, float scale_lo,
                                                  float scale_hi, uint32_t term_bytes = 0) {
#pragma unroll
  for (int j = 0; j < kValues / 4; ++j) {
    const int c = col + 8 * j + 2 * (lane & 3), r = row + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = half ? scale_hi : scale_lo;
      uint32_t terms[Operand<T>::kTerms];
      split_pair<T>(acc[4 * j + 2 * half] * scale, acc[4 * j + 2 * half + 1] * scale, terms);
#pragma unroll
      for (int t = 0; t < Operand<T>::kTerms; ++t) {
        *reinterpret_cast<uint32_t*>(s_tile + t * term_bytes +
                                     tile_offset<kRows>(r + 8 * half, c)) = terms[t];
      }
    }
  }
}

// Writes the accumulator to rows [row, row + 16) below len and columns [col, ..) below cols of a
// global fp32 tensor whose row 0 is g. 16-bit results go through shared memory to 16-byte stores.
template <int kValues>
__device__ __forceinline__ void store_accumulator_rows(float* g, int64_t stride_row,
                                                       const float (&acc)[kValues], int row,
                                                       int len, int col, int cols, int lane,
                                                       float scale_lo, float scale_hi) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane / 4 + 8 * half;
    const float scale = half ? scale_hi : scale_lo;
    if (r >= len) continue;
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      const int c = col + 8 * j + 2 * (lane & 3);
      if (c >= cols) continue;
      *reinterpret_cast<float2*>(g + r * stride_row + c) =
          make_float2(acc[4 * j + 2 * half] * scale, acc[4 * j + 2 * half + 1] * scale);
    }
  }
}

// Writes row half r (0, 1) of an accumulator of 16 rows to columns [0, cols) of the global row g: a
// transpose inside each quad gives every lane 16 bytes. All lanes call; exists = false stores nothing.
template <typename T, int kValues>
__device__ __forceinline__ void store_quad_row(T* g, const float (&acc)[kValues], int r,
                                               bool exists, int cols, int lane) {
#pragma unroll
  for (int u = 0; u < kValues / 16; ++u) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack2<T>(acc[16 * u + 4 * i + 2 * r], acc[16 * u + 4 * i + 2 * r + 1]);
    quad_transpose(words, lane & 3);
    const int col = 32 * u + 8 * (lane & 3);
    if (exists && col < cols) {
      *reinterpret_cast<uint4*>(g + col) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Copies rows [row_begin, len) and columns [0, cols) of a shared tile to global memory, 16 bytes a
// lane, by threads [0, kThreads) numbered thread. g points at row 0.
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void store_tile(const char* s_tile, T* g, int64_t stride_row,
                                           int row_begin, int len, int cols) {
  using Map = ChunkMap<kRows, kCols, kThreads>;
#pragma unroll
  for (int i = 0; i < Map::kPerThread; ++i) {
    const int row = Map::row(i), col = Map::col(i);
    if (row_begin + row < len && col < cols) {
      *reinterpret_cast<uint4*>(g + (row_begin + row) * stride_row + col) =
          *reinterpret_cast<const uint4*>(s_tile + tile_offset<kRows>(row, col));
    }
  }
}

}  // namespace hfb

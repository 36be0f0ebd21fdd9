// Stage 1, tiling: which keys a query row sees, and which key tiles a block of rows has to visit.
//
// Everything structured (causal, window, query offset, row limits) is one half-open key range per
// row, so a tile is skipped, visited unmasked, or visited with a mask by four numbers. Host and
// device run the same code; tests/test_tiling.py checks it against brute force.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HFB_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HFB_HOST_DEVICE inline
#endif

namespace hfb {

constexpr int32_t kNoLimit = INT32_MAX;

// Row i stands at key position i + offset and sees keys [i + offset - left, i + offset + right].
// Causal is right = 0. Bottom-right alignment is offset = Lk - Lq.
struct Band {
  int32_t left = kNoLimit;
  int32_t right = kNoLimit;
  int32_t offset = 0;
};

// Half-open range of key indices; empty when begin >= end.
struct KeyRange {
  int32_t begin;
  int32_t end;
};

HFB_HOST_DEVICE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
HFB_HOST_DEVICE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

// Keys of the band that row sees, clipped to [0, len_kv). An empty range is returned as {len_kv,
// 0}, the neutral element of RowBlock::add.
HFB_HOST_DEVICE KeyRange band_keys(const Band& band, int32_t row, int32_t len_kv) {
  const int64_t position = static_cast<int64_t>(row) + band.offset;
  const int64_t begin = band.left == kNoLimit ? 0 : position - band.left;
  const int64_t end = band.right == kNoLimit ? len_kv : position + band.right + 1;
  if (begin >= len_kv || end <= 0 || begin >= end) return {len_kv, 0};
  return {begin < 0 ? 0 : static_cast<int32_t>(begin),
          end > len_kv ? len_kv : static_cast<int32_t>(end)};
}

HFB_HOST_DEVICE KeyRange intersect(KeyRange a, KeyRange b, int32_t len_kv) {
  const KeyRange both = {max_i32(a.begin, b.begin), min_i32(a.end, b.end)};
  return both.begin < both.end ? both : KeyRange{len_kv, 0};
}

// What a block of query rows sees together: keys any row sees lie in [begin, end), and every row
// sees all of [full_begin, full_end).
struct RowBlock {
  int32_t begin, end, full_begin, full_end;

  HFB_HOST_DEVICE static RowBlock none(int32_t len_kv) { return {len_kv, 0, 0, len_kv}; }

  HFB_HOST_DEVICE void add(KeyRange row) {
    begin = min_i32(begin, row.begin);
    end = max_i32(end, row.end);
    full_begin = max_i32(full_begin, row.begin);
    full_end = min_i32(full_end, row.end);
  }
};

enum class TileKind : int32_t { kSkip = 0, kFull = 1, kMasked = 2 };

// How the block treats the keys [key_begin, key_end). A tile that reaches past len_kv is never
// full.
HFB_HOST_DEVICE TileKind classify_tile(const RowBlock& rows, int32_t key_begin, int32_t key_end) {
  if (key_end <= rows.begin || key_begin >= rows.end) return TileKind::kSkip;
  return key_begin >= rows.full_begin && key_end <= rows.full_end ? TileKind::kFull
                                                                  : TileKind::kMasked;
}

HFB_HOST_DEVICE int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Key tiles [first, last) that the block visits.
struct TileSpan {
  int32_t first, last;
};

HFB_HOST_DEVICE TileSpan visited_key_tiles(const RowBlock& rows, int32_t block_n) {
  if (rows.begin >= rows.end) return {0, 0};
  return {rows.begin / block_n, ceil_div(rows.end, block_n)};
}

// Key tiles [first, last) inside the visited span that are full, by the rule of classify_tile; they
// are contiguous, so a kernel walks masked, full, masked without asking again.
HFB_HOST_DEVICE TileSpan full_key_tiles(const RowBlock& rows, const TileSpan& visited,
                                        int32_t block_n) {
  const int32_t first = max_i32(ceil_div(rows.full_begin, block_n), visited.first);
  const int32_t last = min_i32(rows.full_end / block_n, visited.last);
  return first < last ? TileSpan{first, last} : TileSpan{visited.first, visited.first};
}

// One query tile of one (batch, query head) pair; head counts over all batches.
struct QueryTile {
  int32_t tile, head;  // tile -1: none
};

// The order in which forward takes its query tiles, as a list of items that blocks take one by one.
// Not folded, an item is one tile: sections of neighbouring heads, so that the K and V of a section
// stay in L2; inside a section the last rows of every head first, because they see the most keys
// of a causal call. section_heads = 1 walks head by head. Folded, an item is a tile of a head and
// its mirror image: the items of a band are equally long, and dealing them out in turn is fair.
struct TileOrder {
  int32_t num_m = 0;      // query tiles of a head
  int32_t num_heads = 0;  // batch * heads_q
  int32_t section_heads = 1;
  bool is_folded = false;

  HFB_HOST_DEVICE int32_t items_per_head() const { return is_folded ? ceil_div(num_m, 2) : num_m; }
  HFB_HOST_DEVICE int32_t num_items() const { return items_per_head() * num_heads; }
  HFB_HOST_DEVICE int32_t tiles_per_item() const { return is_folded ? 2 : 1; }

  HFB_HOST_DEVICE QueryTile at(int32_t item, int32_t part) const {
    const int32_t per_head = items_per_head();
    if (is_folded) {
      const int32_t head = item / per_head, low = item % per_head, high = num_m - 1 - low;
      if (part == 0) return {high, head};
      return {low == high ? -1 : low, head};
    }
    const int32_t section = item / (section_heads * per_head), first = section * section_heads;
    const int32_t heads = min_i32(section_heads, num_heads - first);
    const int32_t rest = item - first * per_head;
    return {num_m - 1 - rest / heads, first + rest % heads};
  }
};

// Backward walks the other way round: query tiles [first, last) of which some row's band reaches
// [key_begin, key_end).
HFB_HOST_DEVICE TileSpan visited_row_tiles(const Band& band, int32_t key_begin, int32_t key_end,
                                           int32_t len_q, int32_t block_m) {
  int64_t first = 0, last = len_q;
  if (band.right != kNoLimit) first = static_cast<int64_t>(key_begin) - band.offset - band.right;
  if (band.left != kNoLimit) last = static_cast<int64_t>(key_end) - band.offset + band.left;
  if (first < 0) first = 0;
  if (last > len_q) last = len_q;
  if (first >= last || key_begin >= key_end) return {0, 0};
  return {static_cast<int32_t>(first) / block_m, ceil_div(static_cast<int32_t>(last), block_m)};
}

}  // namespace hfb

// Moving one block between memory and padded compute-type buffers, and what happens to a score
// between q k^T and the exponential. Included once for each instruction set.

// Rows [begin, begin + count) of a [length, cols] tensor of dtype, as compute type, to dst[row * ld
// + col].
template <typename T, typename Storage>
inline void read_rows_as(const void* data, int64_t stride_row, int64_t begin, int64_t count,
                         int64_t cols, T* dst, int64_t ld) {
  const Storage* src = static_cast<const Storage*>(data) + begin * stride_row;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < cols; ++c)
      dst[r * ld + c] = static_cast<T>(to_compute(src[r * stride_row + c]));
  }
}

template <typename T>
inline void read_rows(DType dtype, const void* data, int64_t stride_row, int64_t begin,
                      int64_t count, int64_t cols, T* dst, int64_t ld) {
  switch (dtype) {
    case DType::kFloat16:
      return read_rows_as<T, Half>(data, stride_row, begin, count, cols, dst, ld);
    case DType::kBFloat16:
      return read_rows_as<T, BFloat16>(data, stride_row, begin, count, cols, dst, ld);
    case DType::kFloat32:
      return read_rows_as<T, float>(data, stride_row, begin, count, cols, dst, ld);
    case DType::kFloat64:
      return read_rows_as<T, double>(data, stride_row, begin, count, cols, dst, ld);
  }
}

template <typename T>
inline void write_row(DType dtype, void* data, int64_t offset, const T* src, T factor,
                      int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) {
    const T x = src[c] * factor;
    switch (dtype) {
      case DType::kFloat16:
        static_cast<Half*>(data)[offset + c] = to_half(x);
        break;
      case DType::kBFloat16:
        static_cast<BFloat16*>(data)[offset + c] = to_bfloat16(x);
        break;
      case DType::kFloat32:
        static_cast<float*>(data)[offset + c] = static_cast<float>(x);
        break;
      case DType::kFloat64:
        static_cast<double*>(data)[offset + c] = static_cast<double>(x);
        break;
    }
  }
}

// dst[c * ld_dst + r] = src[r * ld_src + c]
template <typename T>
inline void transpose(const T* src, int64_t ld_src, int64_t rows, int64_t cols, T* dst,
                      int64_t ld_dst) {
  constexpr int64_t kTile = 8;  // keeps both sides in a few cache lines
  for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
      for (int64_t c = c0; c < std::min(c0 + kTile, cols); ++c) {
        for (int64_t r = r0; r < std::min(r0 + kTile, rows); ++r)
          dst[c * ld_dst + r] = src[r * ld_src + c];
      }
    }
  }
}

// Sets inf and NaN of rows to 0 (0 * NaN would reach rows that do not see the key) and returns
// which rows had any.
template <typename T>
inline std::vector<int64_t> clear_nonfinite(T* x, int64_t rows, int64_t cols, int64_t ld) {
  std::vector<int64_t> touched;
  for (int64_t r = 0; r < rows; ++r) {
    T check = 0;  // stays 0 exactly when every element is finite
    for (int64_t c = 0; c < cols; ++c) check += x[r * ld + c] * T(0);
    if (check == T(0)) continue;
    touched.push_back(r);
    for (int64_t c = 0; c < cols; ++c) {
      if (!std::isfinite(x[r * ld + c])) x[r * ld + c] = 0;
    }
  }
  return touched;
}

// A buffer that one piece of work reuses from block to block, zero when first handed out. Padding
// columns stay zero; rows past the end of a short block keep older values, which only ever meet
// hidden keys or rows that are not written.
template <typename T>
class Buffer {
 public:
  T* get(int64_t count) {
    if (storage_.size() < static_cast<size_t>(count))
      storage_.resize(static_cast<size_t>(count), T(0));
    return storage_.data();
  }
  T* get_zeroed(int64_t count) {
    storage_.assign(static_cast<size_t>(count), T(0));
    return storage_.data();
  }

 private:
  std::vector<T> storage_;
};

// One block of query rows of one head, and what its rows see.
template <typename T>
struct RowsOfBlock {
  const ForwardParams& p;
  int64_t batch, head, begin, count;
  KeyRange keys[kCpuBlock];
  RowBlock joined;

  RowsOfBlock(const ForwardParams& params, int64_t b, int64_t h, int64_t block)
      : p(params),
        batch(b),
        head(h),
        begin(block * kCpuBlock),
        count(std::min<int64_t>(kCpuBlock, params.len_q - block * kCpuBlock)),
        joined(RowBlock::none(static_cast<int32_t>(params.len_kv))) {
    for (int64_t r = 0; r < count; ++r) joined.add(keys[r] = p.row_keys(batch, begin + r));
  }

  bool has_score_terms() const {
    return p.mask.data || p.bias.data || p.alibi_slopes || p.softcap != 0.0;
  }

  // The score of the row's sink, -inf without one. T is the dtype that sinks come in.
  T sink_of(int64_t row) const {
    if (!p.sinks.data) return -std::numeric_limits<T>::infinity();
    return static_cast<const T*>(
        p.sinks.data)[batch * p.sinks.stride_batch + head * p.sinks.stride_head +
                      (begin + row) * p.sinks.stride_row];
  }

  // |position of row - key|, the factor of -slope in the score.
  T distance(int64_t row, int64_t key) const {
    return static_cast<T>(std::abs(p.position(batch, begin + row) - key));
  }

  // bias and ALiBi (T(0) without them) and mask of (row, key); -inf where the key is hidden.
  T offset_of(int64_t row, int64_t key) const {
    constexpr T kHidden = -std::numeric_limits<T>::infinity();
    if (key < keys[row].begin || key >= keys[row].end) return kHidden;
    const int64_t r = begin + row;
    if (p.mask.data && !p.mask.data[batch * p.mask.stride_batch + head * p.mask.stride_head +
                                    r * p.mask.stride_row + key]) {
      return kHidden;
    }
    T offset = 0;
    if (p.alibi_slopes) {
      const T slope = static_cast<const T*>(
          p.alibi_slopes)[batch * p.alibi_stride_batch + head * p.alibi_stride_head];
      offset = -slope * distance(row, key);
    }
    if (!p.bias.data) return offset;
    T bias = 0;
    const int64_t element =
        batch * p.bias.stride_batch + head * p.bias.stride_head + r * p.bias.stride_row + key;
    const auto* data = static_cast<const char*>(p.bias.data);
    const int64_t bytes = p.bias_dtype == DType::kFloat64   ? 8
                          : p.bias_dtype == DType::kFloat32 ? 4
                                                            : 2;
    read_rows(p.bias_dtype, data + element * bytes, 0, 0, 1, 1, &bias, 1);
    return offset + bias;
  }

  // Multiplies the probabilities [count, kCpuBlock] of the keys from key_begin by 0 or the rescale.
  void drop(T* weights, int64_t key_begin) const {
    static_assert(kCpuBlock % 16 == 0, "a call of dropout_draws stays inside the block");
    const auto batch_head = static_cast<uint32_t>(batch * p.heads_q + head);
    const auto seed = static_cast<uint64_t>(*p.dropout.seed);
    const T rescale = p.dropout.keep_below ? T(65536) / p.dropout.keep_below : T(0);
    for (int64_t r = 0; r < count; r += r % 16 == 7 ? 9 : 1) {
      for (int64_t j = 0; j < kCpuBlock; j += j % 16 == 6 ? 10 : 2) {
        const DropoutDraws draws = dropout_draws(seed, batch_head, begin + r, key_begin + j);
        for (int64_t i = 0; i < 8; ++i) {
          const int64_t row = r + i / 4 * 8, key = j + i / 2 % 2 * 8 + i % 2;
          T& weight = weights[row * kCpuBlock + key];
          weight = draws.at(row, key) < p.dropout.keep_below ? weight * rescale : T(0);
        }
      }
    }
  }

  // Scores [count, kCpuBlock] of the keys from key_begin: raw q k^T in, natural units with softcap,
  // bias and mask out, -inf where hidden. slope, if given, receives d score / d (scale q k^T).
  void finish_scores(T* scores, int64_t key_begin, TileKind kind, T* slope) const {
    const T scale = static_cast<T>(p.scale), cap = static_cast<T>(p.softcap);
    constexpr T kHidden = -std::numeric_limits<T>::infinity();
    const bool is_plain = !has_score_terms();
    for (int64_t r = 0; r < count; ++r) {
      T* row = scores + r * kCpuBlock;
      scale_row(row, scale, kCpuBlock);
      if (is_plain) {
        if (kind == TileKind::kFull) continue;
        const int64_t first = std::clamp<int64_t>(keys[r].begin - key_begin, 0, kCpuBlock);
        const int64_t last = std::clamp<int64_t>(keys[r].end - key_begin, first, kCpuBlock);
        std::fill(row, row + first, kHidden);
        std::fill(row + last, row + kCpuBlock, kHidden);
        continue;
      }
      for (int64_t j = 0; j < kCpuBlock; ++j) {
        T derivative = 1;
        if (cap != 0) {
          const T t = std::tanh(row[j] / cap);
          row[j] = cap * t;
          derivative = 1 - t * t;
        }
        const T offset = offset_of(r, key_begin + j);
        row[j] = offset == kHidden ? kHidden : row[j] + offset;
        if (slope) slope[r * kCpuBlock + j] = derivative;
      }
    }
  }
};

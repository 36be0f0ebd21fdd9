// The block kernels: forward, delta, dq, dk and dv. Included once for each instruction set.
//
//   forward  one block of rows: online softmax over the key blocks.  FA2, arXiv:2307.08691, Alg. 1
//   dq       one block of rows:  dq = scale * sum over keys dS K.         FA2, Alg. 2, rows outside
//   dkv      one block of keys:  dv = sum P^T dO, dk = scale * sum dS^T Q over the rows and
//            heads of the group. Scores are computed in dq and again in dkv (7 products instead of
//            5): no sums across threads, so every number of threads gives the same bits.
// P, dS and all sums are in the compute type (fp32 for fp16 and bf16); outputs are rounded once.

template <typename T>
inline int64_t padded(int64_t cols) {
  constexpr int64_t kCols = 2 * VectorOf<T>::kLanes;
  return (cols + kCols - 1) / kCols * kCols;
}

template <typename T>
inline const void* at(const Strided<const void>& t, int64_t batch, int64_t head,
                      int64_t element_bytes) {
  return static_cast<const char*>(t.data) +
         (batch * t.stride_batch + head * t.stride_head) * element_bytes;
}

inline int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Unit of work -> row block: blocks of one head alternate from both ends, so that consecutive
// pieces of a causal problem cost about the same.
inline int64_t balanced(int64_t index, int64_t count) {
  return index % 2 == 0 ? index / 2 : count - 1 - index / 2;
}

template <typename T>
void forward_blocks(const ForwardParams& p, int64_t work_begin, int64_t work_end) {
  const int64_t num_m = num_cpu_blocks(p.len_q), bytes = bytes_of(p.dtype);
  const int64_t dk = padded<T>(p.head_dim), dv = padded<T>(p.head_dim_v);
  Buffer<T> q_buffer, k_buffer, kt_buffer, v_buffer, s_buffer, o_buffer;
  for (int64_t work = work_begin; work < work_end; ++work) {
    const int64_t batch = work / num_m / p.heads_q, head = work / num_m % p.heads_q;
    const int64_t head_kv = head / (p.heads_q / p.heads_kv);
    const RowsOfBlock<T> rows(p, batch, head, balanced(work % num_m, num_m));
    T* q = q_buffer.get(kCpuBlock * dk);
    T* k = k_buffer.get(kCpuBlock * dk);
    T* kt = kt_buffer.get(dk * kCpuBlock);
    T* v = v_buffer.get(kCpuBlock * dv);
    T* s = s_buffer.get(kCpuBlock * kCpuBlock);
    T* o = o_buffer.get_zeroed(kCpuBlock * dv);
    T row_max[kCpuBlock], row_sum[kCpuBlock];
    std::fill(row_max, row_max + kCpuBlock, -std::numeric_limits<T>::infinity());
    std::fill(row_sum, row_sum + kCpuBlock, T(0));
    read_rows(p.dtype, at<T>(p.q, batch, head, bytes), p.q.stride_row, rows.begin, rows.count,
              p.head_dim, q, dk);

    const TileSpan span = visited_key_tiles(rows.joined, kCpuBlock);
    for (int64_t n = span.first; n < span.last; ++n) {
      const int64_t key = n * kCpuBlock, num_keys = std::min<int64_t>(kCpuBlock, p.len_kv - key);
      const TileKind kind = classify_tile(rows.joined, static_cast<int32_t>(key),
                                          static_cast<int32_t>(key + kCpuBlock));
      read_rows(p.dtype, at<T>(p.k, batch, head_kv, bytes), p.k.stride_row, key, num_keys,
                p.head_dim, k, dk);
      read_rows(p.dtype, at<T>(p.v, batch, head_kv, bytes), p.v.stride_row, key, num_keys,
                p.head_dim_v, v, dv);
      transpose(k, dk, kCpuBlock, p.head_dim, kt, kCpuBlock);
      const std::vector<int64_t> nonfinite = clear_nonfinite(v, num_keys, p.head_dim_v, dv);

      multiply(rows.count, kCpuBlock, p.head_dim, q, dk, 1, kt, kCpuBlock, s, kCpuBlock, false);
      rows.finish_scores(s, key, kind, nullptr);
      for (int64_t r = 0; r < rows.count; ++r) {
        T* row = s + r * kCpuBlock;
        const T m = std::max(row_max[r], max_row(row, kCpuBlock));
        const T shift = m == -std::numeric_limits<T>::infinity() ? T(0) : m;
        const T rescale = row_max[r] == m ? T(1) : std::exp(row_max[r] - shift);
        row_sum[r] = row_sum[r] * rescale + exp_row(row, shift, kCpuBlock);
        row_max[r] = m;
        if (rescale != T(1)) scale_row(o + r * dv, rescale, dv);
      }
      if (p.dropout.seed) rows.drop(s, key);
      multiply(rows.count, p.head_dim_v, kCpuBlock, s, kCpuBlock, 1, v, dv, o, dv, true);
      // What clear_nonfinite took out goes to the rows that do see it.
      for (int64_t j : nonfinite) {
        read_rows(p.dtype, at<T>(p.v, batch, head_kv, bytes), p.v.stride_row, key + j, 1,
                  p.head_dim_v, v, dv);
        for (int64_t r = 0; r < rows.count; ++r) {
          if (rows.offset_of(r, key + j) == -std::numeric_limits<T>::infinity()) continue;
          for (int64_t c = 0; c < p.head_dim_v; ++c) {
            if (!std::isfinite(v[c])) o[r * dv + c] += s[r * kCpuBlock + j] * v[c];
          }
        }
      }
    }

    for (int64_t r = 0; r < rows.count; ++r) {
      if (const T sink = rows.sink_of(r); sink != -std::numeric_limits<T>::infinity()) {
        const T m = std::max(row_max[r], sink);  // one more key, whose value is 0
        const T rescale = std::exp(row_max[r] - m);
        row_sum[r] = row_sum[r] * rescale + std::exp(sink - m);
        scale_row(o + r * dv, rescale, dv);
        row_max[r] = m;
      }
      const bool saw_nothing = row_sum[r] == T(0);
      const int64_t row = rows.begin + r;
      write_row(p.dtype, p.out.data,
                batch * p.out.stride_batch + head * p.out.stride_head + row * p.out.stride_row,
                o + r * dv, saw_nothing ? T(0) : 1 / row_sum[r], p.head_dim_v);
      static_cast<T*>(p.lse)[(batch * p.heads_q + head) * p.len_q + row] =
          saw_nothing ? -std::numeric_limits<T>::infinity() : row_max[r] + std::log(row_sum[r]);
    }
  }
}

// delta = rowsum(dout * out) - dlse, 0 for rows that see nothing.
template <typename T>
void delta_blocks(const BackwardParams& p, void* delta, int64_t work_begin, int64_t work_end) {
  const int64_t num_m = num_cpu_blocks(p.len_q), bytes = bytes_of(p.dtype);
  Buffer<T> out_buffer, dout_buffer;
  for (int64_t work = work_begin; work < work_end; ++work) {
    const int64_t batch = work / num_m / p.heads_q, head = work / num_m % p.heads_q;
    const int64_t begin = work % num_m * kCpuBlock,
                  count = std::min<int64_t>(kCpuBlock, p.len_q - begin);
    T* out = out_buffer.get(count * p.head_dim_v);
    T* dout = dout_buffer.get(count * p.head_dim_v);
    const Strided<const void> out_in = {p.out.data, p.out.stride_batch, p.out.stride_head,
                                        p.out.stride_row};
    read_rows(p.dtype, at<T>(out_in, batch, head, bytes), p.out.stride_row, begin, count,
              p.head_dim_v, out, p.head_dim_v);
    read_rows(p.dtype, at<T>(p.dout, batch, head, bytes), p.dout.stride_row, begin, count,
              p.head_dim_v, dout, p.head_dim_v);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t element = (batch * p.heads_q + head) * p.len_q + begin + r;
      T sum = 0;
      for (int64_t c = 0; c < p.head_dim_v; ++c)
        sum += out[r * p.head_dim_v + c] * dout[r * p.head_dim_v + c];
      if (p.dlse) sum -= static_cast<const T*>(p.dlse)[element];
      const bool saw_nothing =
          static_cast<const T*>(p.lse)[element] == -std::numeric_limits<T>::infinity();
      static_cast<T*>(delta)[element] = saw_nothing ? T(0) : sum;
    }
  }
}

// P and dS [rows, kCpuBlock] of one block of rows and one of keys, in place of s and ds.
//
//   s  in: raw q k^T     out: P, with dropout if any, the weights of dO in dV
//   ds in: dO V^T        out: derivative of the loss by scale q k^T
//   slope: scratch, derivative of softcap; offset_grad, if given: derivative by bias and ALiBi
template <typename T>
void probabilities(const BackwardParams& p, const RowsOfBlock<T>& rows, const T* delta, int64_t key,
                   TileKind kind, T* s, T* ds, T* slope, T* offset_grad = nullptr) {
  rows.finish_scores(s, key, kind, p.softcap != 0.0 ? slope : nullptr);
  if (p.dropout.seed) rows.drop(ds, key);
  const int64_t first = (rows.batch * p.heads_q + rows.head) * p.len_q + rows.begin;
  for (int64_t r = 0; r < rows.count; ++r) {
    T* s_row = s + r * kCpuBlock;
    T* ds_row = ds + r * kCpuBlock;
    const T lse = static_cast<const T*>(p.lse)[first + r], row_delta = delta[first + r];
    if (lse == -std::numeric_limits<T>::infinity()) {
      std::fill(s_row, s_row + kCpuBlock, T(0));
      std::fill(ds_row, ds_row + kCpuBlock, T(0));
      if (offset_grad) std::fill_n(offset_grad + r * kCpuBlock, kCpuBlock, T(0));
      continue;
    }
    const bool is_masked = kind == TileKind::kMasked || rows.has_score_terms();
    exp_row(s_row, lse, kCpuBlock);
    for (int64_t j = 0; j < kCpuBlock; ++j) {
      T derivative = s_row[j] * (ds_row[j] - row_delta);
      if (is_masked && s_row[j] == T(0)) derivative = 0;  // dP of a hidden key may be NaN
      if (offset_grad) offset_grad[r * kCpuBlock + j] = derivative;
      ds_row[j] = p.softcap != 0.0 ? derivative * slope[r * kCpuBlock + j] : derivative;
    }
    if (lse != lse && is_masked) {  // NaN - (-inf): hidden keys stay out of a NaN row too
      for (int64_t j = 0; j < kCpuBlock; ++j) {
        if (rows.offset_of(r, key + j) == -std::numeric_limits<T>::infinity())
          s_row[j] = ds_row[j] = 0;
      }
    }
  }
  if (p.dropout.seed) rows.drop(s, key);
}

// Q and dO of a block of rows, with rows that see nothing cleared; what they hold must not reach
// dk, dv.
template <typename T>
void read_row_block(const BackwardParams& p, const RowsOfBlock<T>& rows, T* q, int64_t ldq, T* dout,
                    int64_t ldo) {
  const int64_t bytes = bytes_of(p.dtype);
  read_rows(p.dtype, at<T>(p.q, rows.batch, rows.head, bytes), p.q.stride_row, rows.begin,
            rows.count, p.head_dim, q, ldq);
  read_rows(p.dtype, at<T>(p.dout, rows.batch, rows.head, bytes), p.dout.stride_row, rows.begin,
            rows.count, p.head_dim_v, dout, ldo);
  clear_nonfinite(q, rows.count, p.head_dim, ldq);  // such a row has lse = NaN
  const T* lse =
      static_cast<const T*>(p.lse) + (rows.batch * p.heads_q + rows.head) * p.len_q + rows.begin;
  for (int64_t r = 0; r < rows.count; ++r) {
    if (lse[r] != -std::numeric_limits<T>::infinity()) continue;
    std::fill(q + r * ldq, q + r * ldq + p.head_dim, T(0));
    std::fill(dout + r * ldo, dout + r * ldo + p.head_dim_v, T(0));
  }
}

// K, K^T and V^T of one block of keys; K without inf and NaN (rows that see them are NaN through
// lse).
template <typename T>
struct KeyBlock {
  Buffer<T> k_buffer, kt_buffer, v_buffer, vt_buffer;
  T *k = nullptr, *kt = nullptr, *vt = nullptr;

  void read(const BackwardParams& p, int64_t batch, int64_t head_kv, int64_t key, int64_t ldk,
            int64_t ldv) {
    const int64_t bytes = bytes_of(p.dtype),
                  num_keys = std::min<int64_t>(kCpuBlock, p.len_kv - key);
    k = k_buffer.get(kCpuBlock * ldk);
    T* v = v_buffer.get(kCpuBlock * ldv);
    read_rows(p.dtype, at<T>(p.k, batch, head_kv, bytes), p.k.stride_row, key, num_keys, p.head_dim,
              k, ldk);
    read_rows(p.dtype, at<T>(p.v, batch, head_kv, bytes), p.v.stride_row, key, num_keys,
              p.head_dim_v, v, ldv);
    kt = kt_buffer.get(ldk * kCpuBlock);
    vt = vt_buffer.get(ldv * kCpuBlock);
    transpose(k, ldk, kCpuBlock, p.head_dim, kt, kCpuBlock);
    transpose(v, ldv, kCpuBlock, p.head_dim_v, vt, kCpuBlock);
    clear_nonfinite(k, num_keys, p.head_dim, ldk);
  }
};

template <typename T>
void dq_blocks(const BackwardParams& p, const void* delta, int64_t work_begin, int64_t work_end) {
  const int64_t num_m = num_cpu_blocks(p.len_q);
  const int64_t ldk = padded<T>(p.head_dim), ldv = padded<T>(p.head_dim_v);
  Buffer<T> q_buffer, dout_buffer, dq_buffer, s_buffer, ds_buffer, slope_buffer, offset_buffer;
  KeyBlock<T> keys;
  for (int64_t work = work_begin; work < work_end; ++work) {
    const int64_t batch = work / num_m / p.heads_q, head = work / num_m % p.heads_q;
    const int64_t head_kv = head / (p.heads_q / p.heads_kv);
    const RowsOfBlock<T> rows(p, batch, head, balanced(work % num_m, num_m));
    T* q = q_buffer.get(kCpuBlock * ldk);
    T* dout = dout_buffer.get(kCpuBlock * ldv);
    T* dq = dq_buffer.get_zeroed(kCpuBlock * ldk);
    T* s = s_buffer.get(kCpuBlock * kCpuBlock);
    T* ds = ds_buffer.get(kCpuBlock * kCpuBlock);
    T* slope = slope_buffer.get(p.softcap != 0.0 ? kCpuBlock * kCpuBlock : 0);
    T* offset_grad = p.dalibi_rows ? offset_buffer.get(kCpuBlock * kCpuBlock) : nullptr;
    T alibi_grad[kCpuBlock] = {};
    read_row_block(p, rows, q, ldk, dout, ldv);
    const TileSpan span = visited_key_tiles(rows.joined, kCpuBlock);
    for (int64_t n = span.first; n < span.last; ++n) {
      const int64_t key = n * kCpuBlock;
      const TileKind kind = classify_tile(rows.joined, static_cast<int32_t>(key),
                                          static_cast<int32_t>(key + kCpuBlock));
      keys.read(p, batch, head_kv, key, ldk, ldv);
      multiply(rows.count, kCpuBlock, p.head_dim, q, ldk, 1, keys.kt, kCpuBlock, s, kCpuBlock,
               false);
      multiply(rows.count, kCpuBlock, p.head_dim_v, dout, ldv, 1, keys.vt, kCpuBlock, ds, kCpuBlock,
               false);
      probabilities(p, rows, static_cast<const T*>(delta), key, kind, s, ds, slope, offset_grad);
      multiply(rows.count, p.head_dim, kCpuBlock, ds, kCpuBlock, 1, keys.k, ldk, dq, ldk, true);
      if (!offset_grad) continue;
      for (int64_t r = 0; r < rows.count; ++r) {
        for (int64_t j = 0; j < std::min<int64_t>(kCpuBlock, p.len_kv - key); ++j)
          alibi_grad[r] -= offset_grad[r * kCpuBlock + j] * rows.distance(r, key + j);
      }
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      if (p.dalibi_rows) {
        static_cast<T*>(p.dalibi_rows)[(batch * p.heads_q + head) * p.len_q + rows.begin + r] =
            alibi_grad[r];
      }
      const int64_t offset =
          batch * p.dq.stride_batch + head * p.dq.stride_head + (rows.begin + r) * p.dq.stride_row;
      write_row(p.dtype, p.dq.data, offset, dq + r * ldk, static_cast<T>(p.scale), p.head_dim);
    }
  }
}

template <typename T>
void dkv_blocks(const BackwardParams& p, const void* delta, int64_t work_begin, int64_t work_end) {
  const int64_t num_n = num_cpu_blocks(p.len_kv), group = p.heads_q / p.heads_kv;
  const int64_t ldk = padded<T>(p.head_dim), ldv = padded<T>(p.head_dim_v);
  Buffer<T> q_buffer, dout_buffer, dk_buffer, dv_buffer, s_buffer, ds_buffer, slope_buffer;
  KeyBlock<T> keys;
  for (int64_t work = work_begin; work < work_end; ++work) {
    const int64_t batch = work / num_n / p.heads_kv, head_kv = work / num_n % p.heads_kv;
    const int64_t key = balanced(work % num_n, num_n) * kCpuBlock,
                  key_end = std::min(key + kCpuBlock, p.len_kv);
    keys.read(p, batch, head_kv, key, ldk, ldv);
    T* dk = dk_buffer.get_zeroed(kCpuBlock * ldk);
    T* dv = dv_buffer.get_zeroed(kCpuBlock * ldv);
    const TileSpan span =
        visited_row_tiles(p.shared_band(), static_cast<int32_t>(key), static_cast<int32_t>(key_end),
                          static_cast<int32_t>(p.len_q), kCpuBlock);
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      for (int64_t m = span.first; m < span.last; ++m) {
        const RowsOfBlock<T> rows(p, batch, head, m);
        const TileKind kind = classify_tile(rows.joined, static_cast<int32_t>(key),
                                            static_cast<int32_t>(key + kCpuBlock));
        if (kind == TileKind::kSkip) continue;
        T* q = q_buffer.get(kCpuBlock * ldk);
        T* dout = dout_buffer.get(kCpuBlock * ldv);
        T* s = s_buffer.get(kCpuBlock * kCpuBlock);
        T* ds = ds_buffer.get(kCpuBlock * kCpuBlock);
        T* slope = slope_buffer.get(p.softcap != 0.0 ? kCpuBlock * kCpuBlock : 0);
        read_row_block(p, rows, q, ldk, dout, ldv);
        multiply(rows.count, kCpuBlock, p.head_dim, q, ldk, 1, keys.kt, kCpuBlock, s, kCpuBlock,
                 false);
        multiply(rows.count, kCpuBlock, p.head_dim_v, dout, ldv, 1, keys.vt, kCpuBlock, ds,
                 kCpuBlock, false);
        probabilities(p, rows, static_cast<const T*>(delta), key, kind, s, ds, slope);
        multiply(kCpuBlock, p.head_dim_v, rows.count, s, 1, kCpuBlock, dout, ldv, dv, ldv, true);
        multiply(kCpuBlock, p.head_dim, rows.count, ds, 1, kCpuBlock, q, ldk, dk, ldk, true);
      }
    }
    for (int64_t r = 0; r < key_end - key; ++r) {
      const int64_t row = key + r;
      write_row(p.dtype, p.dk.data,
                batch * p.dk.stride_batch + head_kv * p.dk.stride_head + row * p.dk.stride_row,
                dk + r * ldk, static_cast<T>(p.scale), p.head_dim);
      write_row(p.dtype, p.dv.data,
                batch * p.dv.stride_batch + head_kv * p.dv.stride_head + row * p.dv.stride_row,
                dv + r * ldv, T(1), p.head_dim_v);
    }
  }
}

// dbias, in the shape of bias: a piece of work owns the keys of one block in one (batch, head) of
// the bias and adds every batch, head and row that read them, in a fixed order.
template <typename T>
void dbias_blocks(const BackwardParams& p, const void* delta, int64_t work_begin,
                  int64_t work_end) {
  const int64_t num_n = num_cpu_blocks(p.len_kv), num_m = num_cpu_blocks(p.len_q);
  const int64_t ldk = padded<T>(p.head_dim), ldv = padded<T>(p.head_dim_v);
  Buffer<T> q_buffer, dout_buffer, s_buffer, ds_buffer, slope_buffer, grad_buffer;
  KeyBlock<T> keys;
  for (int64_t work = work_begin; work < work_end; ++work) {
    const int64_t bias_batch = work / num_n / p.bias_heads, bias_head = work / num_n % p.bias_heads;
    const int64_t key = work % num_n * kCpuBlock,
                  num_keys = std::min<int64_t>(kCpuBlock, p.len_kv - key);
    T* dbias = static_cast<T*>(p.dbias) +
               (bias_batch * p.bias_heads + bias_head) * p.bias_rows * p.len_kv + key;
    for (int64_t r = 0; r < p.bias_rows; ++r) std::fill_n(dbias + r * p.len_kv, num_keys, T(0));
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      if (p.bias_batch > 1 && batch != bias_batch) continue;
      for (int64_t head = 0; head < p.heads_q; ++head) {
        if (p.bias_heads > 1 && head != bias_head) continue;
        keys.read(p, batch, head / (p.heads_q / p.heads_kv), key, ldk, ldv);
        for (int64_t m = 0; m < num_m; ++m) {
          const RowsOfBlock<T> rows(p, batch, head, m);
          const TileKind kind = classify_tile(rows.joined, static_cast<int32_t>(key),
                                              static_cast<int32_t>(key + kCpuBlock));
          if (kind == TileKind::kSkip) continue;
          T* q = q_buffer.get(kCpuBlock * ldk);
          T* dout = dout_buffer.get(kCpuBlock * ldv);
          T* s = s_buffer.get(kCpuBlock * kCpuBlock);
          T* ds = ds_buffer.get(kCpuBlock * kCpuBlock);
          T* slope = slope_buffer.get(p.softcap != 0.0 ? kCpuBlock * kCpuBlock : 0);
          T* grad = grad_buffer.get(kCpuBlock * kCpuBlock);
          read_row_block(p, rows, q, ldk, dout, ldv);
          multiply(rows.count, kCpuBlock, p.head_dim, q, ldk, 1, keys.kt, kCpuBlock, s, kCpuBlock,
                   false);
          multiply(rows.count, kCpuBlock, p.head_dim_v, dout, ldv, 1, keys.vt, kCpuBlock, ds,
                   kCpuBlock, false);
          probabilities(p, rows, static_cast<const T*>(delta), key, kind, s, ds, slope, grad);
          for (int64_t r = 0; r < rows.count; ++r) {
            T* row = dbias + (p.bias_rows > 1 ? (rows.begin + r) * p.len_kv : 0);
            for (int64_t j = 0; j < num_keys; ++j) row[j] += grad[r * kCpuBlock + j];
          }
        }
      }
    }
  }
}

template <typename T>
constexpr CpuKernels kKernels = {forward_blocks<T>, delta_blocks<T>, dq_blocks<T>, dkv_blocks<T>,
                                 dbias_blocks<T>};

// The half of bindings.cpp that turns the arguments of an op into params.h: every check, with the
// text of its error, and the copies of tensors whose layout no kernel takes. Included by bindings.cpp
// alone, so that torch stays in one translation unit.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace hfb {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kCpAsyncBytes = 16;  // CUDA kernels read rows in 16-byte pieces

[[noreturn]] void fail_argument(const std::string& text) {
  throw std::invalid_argument("hf_flash_backend: " + text);
}

void check(bool ok, const char* argument, const std::string& got, const std::string& expected) {
  if (!ok) fail_argument(std::string(argument) + ": got " + got + ", expected " + expected + ".");
}

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

std::string scalar_type_text(ScalarType type) { return torch::headeronly::toString(type); }

std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return "another device type";
}

DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      fail_argument(std::string(name) + " dtype: got " + scalar_type_text(t.scalar_type()) +
                    ", expected Half, BFloat16, Float or Double. Cast q, k and v to one of them.");
  }
}

ScalarType lse_type(DType dtype) {
  return dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
}

// Uninitialised [B, H, L, D] whose memory order is (B, L, H, D): what models reshape to [B, L, H *
// D] without a copy.
Tensor empty_blhd(int64_t batch, int64_t heads, int64_t len, int64_t dim, const Tensor& like) {
  const std::array<int64_t, 4> sizes = {batch, heads, len, dim};
  const std::array<int64_t, 4> strides = {len * heads * dim, dim, heads * dim, 1};
  int32_t dtype = 0, device_type = 0, device_index = 0;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_get_dtype(like.get(), &dtype) ||
      aoti_torch_get_device_type(like.get(), &device_type) ||
      aoti_torch_get_device_index(like.get(), &device_index) ||
      aoti_torch_empty_strided(4, sizes.data(), strides.data(), dtype, device_type, device_index,
                               &handle)) {
    throw std::runtime_error("hf_flash_backend: could not allocate a tensor of shape [" +
                             std::to_string(batch) + ", " + std::to_string(heads) + ", " +
                             std::to_string(len) + ", " + std::to_string(dim) + "].");
  }
  return Tensor(handle);
}

// Strides are free except that a row must be dense, and 16-byte aligned on CUDA. Other tensors are
// copied once.
bool has_kernel_layout(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) return false;
  if (!t.is_cuda()) return true;
  const auto element_bytes = static_cast<int64_t>(t.element_size());
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kCpAsyncBytes != 0) return false;
  for (int64_t d = 0; d < last; ++d) {
    if (t.size(d) > 1 && t.stride(d) * element_bytes % kCpAsyncBytes != 0) return false;
  }
  return true;
}

Tensor with_kernel_layout(const Tensor& t) {
  if (has_kernel_layout(t)) return t;
  Tensor copy = empty_blhd(t.size(0), t.size(1), t.size(2), t.size(3), t);
  torch::stable::copy_(copy, t);
  return copy;
}

// Strides of a 4-D tensor; a dimension of size 1 broadcasts, its stride is 0.
template <typename T>
Strided<T> strided(const Tensor& t, T* data) {
  auto stride = [&t](int64_t d) { return t.size(d) == 1 ? int64_t{0} : t.stride(d); };
  return {data, stride(0), stride(1), stride(2)};
}
Strided<const void> strided_in(const Tensor& t) {
  return strided<const void>(t, t.const_data_ptr());
}
Strided<void> strided_out(const Tensor& t) { return strided<void>(t, t.mutable_data_ptr()); }

// A mask or bias [1|B, 1|Hq, 1|Lq, Lk] with a dense last dimension.
void check_score_tensor(const Tensor& t, const char* name, const ForwardParams& p,
                        const Tensor& q) {
  const std::string expected = "[1 or " + std::to_string(p.batch) + ", 1 or " +
                               std::to_string(p.heads_q) + ", 1 or " + std::to_string(p.len_q) +
                               ", " + std::to_string(p.len_kv) + "]";
  check(t.dim() == 4 && (t.size(0) == 1 || t.size(0) == p.batch) &&
            (t.size(1) == 1 || t.size(1) == p.heads_q) &&
            (t.size(2) == 1 || t.size(2) == p.len_q) && t.size(3) == p.len_kv,
        name, "shape " + shape_text(t), expected);
  check(t.size(3) <= 1 || t.stride(3) == 1, name, "last stride " + std::to_string(t.stride(3)),
        "1; call .contiguous()");
  check(device_text(t) == device_text(q), name, "device " + device_text(t),
        "the device of q, " + device_text(q));
}

RowInts row_ints(const OptionalTensor& t, const char* name, const ForwardParams& p,
                 const Tensor& q) {
  if (!t) return {};
  check(t->scalar_type() == ScalarType::Int, name, "dtype " + scalar_type_text(t->scalar_type()),
        "Int");
  check(t->dim() == 2 && (t->size(0) == 1 || t->size(0) == p.batch) &&
            (t->size(1) == 1 || t->size(1) == p.len_q),
        name, "shape " + shape_text(*t),
        "[1 or " + std::to_string(p.batch) + ", 1 or " + std::to_string(p.len_q) + "]");
  check(device_text(*t) == device_text(q), name, "device " + device_text(*t),
        "the device of q, " + device_text(q));
  return {static_cast<const int32_t*>(t->const_data_ptr()), t->size(0) == 1 ? 0 : t->stride(0),
          t->size(1) == 1 ? 0 : t->stride(1)};
}

// fp32 (fp64 for fp64 inputs) numbers of a head: slopes [1|B, Hq] or sinks [1|B, 1|Hq, 1|Lq].
void check_head_numbers(const Tensor& t, const char* name, const ForwardParams& p, const Tensor& q,
                        int64_t dims) {
  const int64_t sizes[] = {p.batch, p.heads_q, p.len_q};
  bool fits = t.dim() == dims;
  for (int64_t d = 0; fits && d < dims; ++d) fits = t.size(d) == 1 || t.size(d) == sizes[d];
  check(fits, name, "shape " + shape_text(t),
        "[1 or " + std::to_string(p.batch) + ", 1 or " + std::to_string(p.heads_q) +
            (dims == 3 ? ", 1 or " + std::to_string(p.len_q) + "]" : "]"));
  check(t.scalar_type() == lse_type(p.dtype), name, "dtype " + scalar_type_text(t.scalar_type()),
        scalar_type_text(lse_type(p.dtype)));
  check(device_text(t) == device_text(q), name, "device " + device_text(t),
        "the device of q, " + device_text(q));
}

// Rate and seed. The rate is rounded to 1/65,536 and the rescale is the inverse of what is drawn.
Dropout dropout_of(const OptionalTensor& seed, double rate, const Tensor& q) {
  check(rate >= 0.0 && rate <= 1.0, "dropout_p", std::to_string(rate), "0 to 1");
  if (rate == 0.0) return {};
  check(seed.has_value(), "dropout_seed", "none", "an int64 tensor of one number");
  check(seed->scalar_type() == ScalarType::Long && seed->numel() == 1, "dropout_seed",
        "shape " + shape_text(*seed) + " " + scalar_type_text(seed->scalar_type()),
        "one number of dtype Long");
  check(device_text(*seed) == device_text(q), "dropout_seed", "device " + device_text(*seed),
        "the device of q, " + device_text(q));
  Dropout dropout;
  dropout.seed = static_cast<const int64_t*>(seed->const_data_ptr());
  dropout.keep_below = static_cast<uint32_t>(std::lround((1.0 - rate) * 65536.0));
  dropout.rescale =
      dropout.keep_below == 0 ? 0.f : 65536.f / static_cast<float>(dropout.keep_below);
  return dropout;
}

int32_t window_limit(std::optional<int64_t> window, const char* name) {
  if (!window) return kNoLimit;
  check(*window >= 0, name, std::to_string(*window), "None (unlimited) or at least 0");
  return *window >= kNoLimit ? kNoLimit : static_cast<int32_t>(*window);
}

// Arguments of the ops after q, k, v, in schema order.
struct Arguments {
  OptionalTensor mask, bias, row_start, row_end, query_offsets, sinks, alibi_slopes, cu_seqlens_q,
      cu_seqlens_k, block_table, tile_map, dropout_seed;
  double scale, softcap;
  std::optional<int64_t> window_left, window_right, query_offset;
  double dropout_p;
  int64_t num_splits;
};

void refuse_unimplemented(const Arguments& a) {
  auto refuse = [](bool present, const char* name) {
    if (present)
      throw std::runtime_error(std::string("hf_flash_backend: ") + name + " is not implemented.");
  };
  refuse(a.cu_seqlens_q.has_value() || a.cu_seqlens_k.has_value(), "cu_seqlens");
  refuse(a.block_table.has_value(), "block_table");
  refuse(a.tile_map.has_value(), "tile_map");
  refuse(a.num_splits > 1, "num_splits > 1");
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::pair<const Tensor*, const char*> tensors[] = {{&q, "q"}, {&k, "k"}, {&v, "v"}};
  for (const auto& [t, name] : tensors) {
    check(t->dim() == 4, name, std::to_string(t->dim()) + "-D shape " + shape_text(*t),
          "4-D [batch, heads, length, head_dim]");
    check(device_text(*t) == device_text(q), name, "device " + device_text(*t),
          "the device of q, " + device_text(q));
    check(t->scalar_type() == q.scalar_type(), name, "dtype " + scalar_type_text(t->scalar_type()),
          "the dtype of q, " + scalar_type_text(q.scalar_type()));
  }
  check(k.size(0) == q.size(0) && v.size(0) == q.size(0), "k, v batch",
        std::to_string(k.size(0)) + " and " + std::to_string(v.size(0)),
        "the batch of q, " + std::to_string(q.size(0)));
  check(k.size(1) == v.size(1) && k.size(2) == v.size(2), "v", "shape " + shape_text(v),
        "the heads and length of k, " + shape_text(k));
  check(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "k heads", std::to_string(k.size(1)),
        "a divisor of the " + std::to_string(q.size(1)) + " heads of q");
  check(k.size(3) == q.size(3), "k head_dim", std::to_string(k.size(3)),
        "the head_dim of q, " + std::to_string(q.size(3)));
  const std::pair<int64_t, const char*> dims[] = {{q.size(3), "head_dim"},
                                                  {v.size(3), "head_dim_v"}};
  for (const auto& [dim, name] : dims) {
    check(dim > 0 && dim % 8 == 0, name, std::to_string(dim),
          "a positive multiple of 8; pad q, k and v with zeros");
  }
}

// Everything but outputs. q, k and v must have the kernel layout and outlive the params.
void fill_params(ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Arguments& a) {
  p.dtype = dtype_of(q, "q");
  p.batch = q.size(0);
  p.heads_q = q.size(1), p.heads_kv = k.size(1);
  p.len_q = q.size(2), p.len_kv = k.size(2);
  p.head_dim = q.size(3), p.head_dim_v = v.size(3);
  check(p.len_q < kNoLimit && p.len_kv < kNoLimit, "length",
        std::to_string(std::max(p.len_q, p.len_kv)), "less than 2^31 - 1");
  p.q = strided_in(q), p.k = strided_in(k), p.v = strided_in(v);
  p.scale = a.scale, p.softcap = a.softcap;
  check(a.softcap >= 0.0, "softcap", std::to_string(a.softcap), "0 (off) or a positive number");
  p.band.left = window_limit(a.window_left, "window_left");
  p.band.right = window_limit(a.window_right, "window_right");
  const int64_t offset = a.query_offset.value_or(p.len_kv - p.len_q);
  check(offset > -int64_t{kNoLimit} && offset < kNoLimit, "query_offset", std::to_string(offset),
        "a 32-bit integer");
  p.band.offset = static_cast<int32_t>(offset);
  check(!(a.query_offset && a.query_offsets), "query_offset, query_offsets", "both", "one of them");
  p.query_offsets = row_ints(a.query_offsets, "query_offsets", p, q);
  p.row_start = row_ints(a.row_start, "row_start", p, q);
  p.row_end = row_ints(a.row_end, "row_end", p, q);
  p.dropout = dropout_of(a.dropout_seed, a.dropout_p, q);
  if (a.alibi_slopes) {
    check_head_numbers(*a.alibi_slopes, "alibi_slopes", p, q, 2);
    p.alibi_slopes = a.alibi_slopes->const_data_ptr();
    p.alibi_stride_batch = a.alibi_slopes->size(0) == 1 ? 0 : a.alibi_slopes->stride(0);
    p.alibi_stride_head = a.alibi_slopes->size(1) == 1 ? 0 : a.alibi_slopes->stride(1);
  }
  if (a.sinks) {
    check_head_numbers(*a.sinks, "sinks", p, q, 3);
    auto stride = [&a](int64_t d) {
      return a.sinks->size(d) == 1 ? int64_t{0} : a.sinks->stride(d);
    };
    p.sinks = {a.sinks->const_data_ptr(), stride(0), stride(1), stride(2)};
  }
  if (a.mask) {
    check_score_tensor(*a.mask, "mask", p, q);
    check(a.mask->scalar_type() == ScalarType::Bool, "mask",
          "dtype " + scalar_type_text(a.mask->scalar_type()),
          "Bool, true = attend; pass an additive mask as bias");
    p.mask = strided<const bool>(*a.mask, static_cast<const bool*>(a.mask->const_data_ptr()));
  }
  if (a.bias) {
    check_score_tensor(*a.bias, "bias", p, q);
    const ScalarType type = a.bias->scalar_type();
    check(type == q.scalar_type() || type == ScalarType::Float, "bias",
          "dtype " + scalar_type_text(type),
          "the dtype of q, " + scalar_type_text(q.scalar_type()) + ", or Float");
    p.bias = strided_in(*a.bias);
    p.bias_dtype = dtype_of(*a.bias, "bias");
  }
}

}  // namespace
}  // namespace hfb

// The ops, and the only file that includes torch: schema, checks, allocation, params, stream,
// status -> exception. libtorch stable ABI, target 2.10: one binary for every torch from 2.10 on.
// Loaded by torch.ops.load_library.
//
// Wrong arguments throw std::invalid_argument (ValueError in Python), everything else
// std::runtime_error. What is valid but not implemented is refused in ops.py by
// NotImplementedError; the checks here are the second line.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cpu/attention.h"
#include "plan.h"
#include "trace.h"
#ifdef HFB_WITH_CUDA
#include "cuda/launch.h"
#endif

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

#ifdef HFB_WITH_CUDA
void throw_if(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

// The current stream, from the libtorch_cuda that is already in the process (never linked: the same
// file loads beside a CPU-only torch).
void* current_stream(int device_index) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                   : nullptr;
  }();
  void* stream = nullptr;
  if (getter == nullptr || getter(device_index, &stream) != 0) {
    throw std::runtime_error(
        "hf_flash_backend: cannot read the current CUDA stream from libtorch_cuda.so.");
  }
  return stream;
}
#endif

// torch's thread pool, for the CPU kernels.
void parallel_for(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  if (torch_parallel_for(0, count, 1, body, context) != 0) {
    throw std::runtime_error("hf_flash_backend: a CPU kernel failed (out of memory?).");
  }
}

Device device_of(const Tensor& q) {
  if (!q.is_cuda()) return {};
#ifdef HFB_WITH_CUDA
  const CudaDevice& cuda = cuda_device(q.get_device_index());
  if (!cuda.error.empty()) throw std::runtime_error(cuda.error);
  return cuda.device;
#else
  Device device;
  device.is_cuda = true;
  return device;
#endif
}

Plan plan_or_throw(Direction direction, const ForwardParams& p, const Tensor& q) {
  Plan plan = make_plan(direction, p, device_of(q));
  if (plan.kernel == Kernel::kNone) throw std::runtime_error("hf_flash_backend: " + plan.reason);
  return plan;
}

std::tuple<Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor mask, OptionalTensor bias,
    OptionalTensor row_start, OptionalTensor row_end, OptionalTensor query_offsets,
    OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, OptionalTensor block_table, OptionalTensor tile_map,
    OptionalTensor dropout_seed, double scale, double softcap, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, std::optional<int64_t> query_offset,
    int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/, double dropout_p, int64_t num_splits,
    bool /*deterministic*/) {
  const Arguments arguments = {
      mask,         bias,         row_start,    row_end,   query_offsets, sinks, alibi_slopes,
      cu_seqlens_q, cu_seqlens_k, block_table,  tile_map,  dropout_seed,  scale, softcap,
      window_left,  window_right, query_offset, dropout_p, num_splits};
  check_qkv(q, k, v);
  refuse_unimplemented(arguments);
  const Tensor q_in = with_kernel_layout(q), k_in = with_kernel_layout(k),
               v_in = with_kernel_layout(v);
  ForwardParams p;
  fill_params(p, q_in, k_in, v_in, arguments);
  const Plan plan = plan_or_throw(Direction::kForward, p, q);

  Tensor out = empty_blhd(p.batch, p.heads_q, p.len_q, p.head_dim_v, q);
  Tensor lse = torch::stable::new_empty(q, {p.batch, p.heads_q, p.len_q}, lse_type(p.dtype));
  p.out = strided_out(out);
  p.lse = lse.mutable_data_ptr();
  if (p.batch * p.heads_q * p.len_q == 0) return {out, lse};

  trace_call(Direction::kForward, p, plan, q.is_cuda() ? q.get_device_index() : -1);
  if (plan.kernel == Kernel::kCpu) {
    attention_forward_cpu(p, parallel_for);
    return {out, lse};
  }
#ifdef HFB_WITH_CUDA
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  throw_if(launch_forward_cuda(p, plan, current_stream(q.get_device_index())));
#endif
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dout, OptionalTensor dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, OptionalTensor mask, OptionalTensor bias,
    OptionalTensor row_start, OptionalTensor row_end, OptionalTensor query_offsets,
    OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor cu_seqlens_q,
    OptionalTensor cu_seqlens_k, OptionalTensor block_table, OptionalTensor tile_map,
    OptionalTensor dropout_seed, double scale, double softcap, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, std::optional<int64_t> query_offset,
    int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/, double dropout_p, int64_t num_splits,
    bool deterministic, bool bias_grad, bool alibi_grad) {
  const Arguments arguments = {
      mask,         bias,         row_start,    row_end,   query_offsets, sinks, alibi_slopes,
      cu_seqlens_q, cu_seqlens_k, block_table,  tile_map,  dropout_seed,  scale, softcap,
      window_left,  window_right, query_offset, dropout_p, num_splits};
  check_qkv(q, k, v);
  refuse_unimplemented(arguments);
  const std::pair<const Tensor*, const char*> outputs[] = {{&dout, "dout"}, {&out, "out"}};
  for (const auto& [t, name] : outputs) {
    check(t->dim() == 4 && t->size(0) == q.size(0) && t->size(1) == q.size(1) &&
              t->size(2) == q.size(2) && t->size(3) == v.size(3),
          name, "shape " + shape_text(*t),
          "the shape of the output, [batch, heads of q, length of q, head_dim of v]");
    check(t->scalar_type() == q.scalar_type() && device_text(*t) == device_text(q), name,
          scalar_type_text(t->scalar_type()) + " on " + device_text(*t),
          scalar_type_text(q.scalar_type()) + " on " + device_text(q) + ", as q");
  }
  const Tensor q_in = with_kernel_layout(q), k_in = with_kernel_layout(k),
               v_in = with_kernel_layout(v);
  const Tensor out_in = with_kernel_layout(out), dout_in = with_kernel_layout(dout);
  BackwardParams p;
  fill_params(p, q_in, k_in, v_in, arguments);
  const int64_t num_rows = p.batch * p.heads_q * p.len_q;
  const ScalarType expected_lse = lse_type(p.dtype);
  check(lse.numel() == num_rows && lse.is_contiguous() && lse.scalar_type() == expected_lse &&
            device_text(lse) == device_text(q),
        "lse", "shape " + shape_text(lse) + " " + scalar_type_text(lse.scalar_type()),
        "the lse that forward returned");
  p.dq_by_rows = deterministic || alibi_grad;
  Tensor dq = empty_blhd(p.batch, p.heads_q, p.len_q, p.head_dim, q);
  Tensor dk = empty_blhd(p.batch, p.heads_kv, p.len_kv, p.head_dim, q);
  Tensor dv = empty_blhd(p.batch, p.heads_kv, p.len_kv, p.head_dim_v, q);
  check(!bias_grad || bias.has_value(), "bias_grad", "true without bias", "a bias");
  check(!alibi_grad || alibi_slopes.has_value(), "alibi_grad", "true without alibi_slopes",
        "alibi_slopes");
  std::vector<int64_t> bias_sizes = {0}, alibi_sizes = {0};
  if (bias_grad) bias_sizes = {bias->size(0), bias->size(1), bias->size(2), bias->size(3)};
  if (alibi_grad) alibi_sizes = {p.batch, p.heads_q, p.len_q};
  Tensor dbias = torch::stable::new_empty(q, bias_sizes, expected_lse);
  Tensor dalibi_rows = torch::stable::new_empty(q, alibi_sizes, expected_lse);
  if (num_rows == 0 || p.len_kv == 0) {  // nothing attends: every gradient that has elements is 0
    for (Tensor* t : {&dq, &dk, &dv, &dbias, &dalibi_rows}) torch::stable::zero_(*t);
    return {dq, dk, dv, dbias, dalibi_rows};
  }
  if (bias_grad) {
    p.dbias = dbias.mutable_data_ptr();
    p.bias_batch = bias_sizes[0], p.bias_heads = bias_sizes[1], p.bias_rows = bias_sizes[2];
  }
  if (alibi_grad) p.dalibi_rows = dalibi_rows.mutable_data_ptr();
  const Plan plan = plan_or_throw(Direction::kBackward, p, q);
  p.out = strided<void>(out_in, const_cast<void*>(out_in.const_data_ptr()));
  p.lse = const_cast<void*>(lse.const_data_ptr());
  p.dout = strided_in(dout_in);
  Tensor dlse_in = lse;  // keeps a converted dlse alive; unused without one
  if (dlse) {
    check(dlse->numel() == num_rows && dlse->scalar_type() == expected_lse, "dlse",
          "shape " + shape_text(*dlse), "the shape and dtype of lse");
    dlse_in = torch::stable::contiguous(*dlse);
    p.dlse = dlse_in.const_data_ptr();
  }
  p.dq = strided_out(dq), p.dk = strided_out(dk), p.dv = strided_out(dv);

  trace_call(Direction::kBackward, p, plan, q.is_cuda() ? q.get_device_index() : -1);
  if (plan.kernel == Kernel::kCpu) {
    attention_backward_cpu(p, parallel_for);
    return {dq, dk, dv, dbias, dalibi_rows};
  }
#ifdef HFB_WITH_CUDA
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  Tensor workspace = torch::stable::new_empty(q, {plan.workspace_bytes}, ScalarType::Byte);
  p.workspace = workspace.mutable_data_ptr();
  throw_if(launch_backward_cuda(p, plan, current_stream(q.get_device_index())));
#endif
  return {dq, dk, dv, dbias, dalibi_rows};
}

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  fail_argument("dtype: got '" + name + "', expected fp16, bf16, fp32 or fp64.");
}

// Facts of a device as [is_cuda, sm, num_sms, smem_optin_bytes, driver_version, runtime_version];
// index -1 is the CPU.
std::vector<int64_t> device_facts(int64_t index) {
  if (index < 0) return {0, 0, 0, 0, 0, 0};
#ifdef HFB_WITH_CUDA
  const CudaDevice& cuda = cuda_device(static_cast<int>(index));
  const Device& d = cuda.device;
  if (!cuda.error.empty() && driver_problem(d.driver_version, d.runtime_version).empty()) {
    throw std::runtime_error(cuda.error);  // no such GPU; a plan names what is wrong with a driver
  }
  return {1, d.sm, d.num_sms, d.smem_optin_bytes, d.driver_version, d.runtime_version};
#else
  return {1, 0, 0, 0, 0, 0};
#endif
}

// The plan of a call described by numbers, as JSON; "is_supported": false with a reason where
// nothing runs. features: names of support.FEATURES that are no number or window.
std::string explain(std::string direction, std::vector<int64_t> facts, std::string dtype,
                    std::vector<int64_t> shape, std::string features, double scale, double softcap,
                    std::optional<int64_t> window_left, std::optional<int64_t> window_right) {
  check(facts.size() == 6, "device", std::to_string(facts.size()) + " facts", "6");
  check(shape.size() == 7, "shape", std::to_string(shape.size()) + " sizes",
        "B, Hq, Hkv, Lq, Lk, D, Dv");
  static const int32_t present = 0;
  static const int64_t seed = 0;
  auto has = [&features](const char* name) { return features.find(name) != std::string::npos; };
  ForwardParams p;
  p.dtype = parse_dtype(dtype);
  p.batch = shape[0], p.heads_q = shape[1], p.heads_kv = shape[2], p.len_q = shape[3],
  p.len_kv = shape[4];
  p.head_dim = shape[5], p.head_dim_v = shape[6];
  p.scale = scale, p.softcap = softcap;
  p.band = {window_limit(window_left, "window_left"), window_limit(window_right, "window_right"),
            static_cast<int32_t>(p.len_kv - p.len_q)};
  if (has("mask")) p.mask.data = reinterpret_cast<const bool*>(&present);
  if (has("bias")) p.bias.data = &present;
  if (has("row_limits")) p.row_start.data = &present;
  if (has("query_offsets")) p.query_offsets.data = &present;
  if (has("alibi")) p.alibi_slopes = &present;
  if (has("sinks")) p.sinks.data = &present;
  if (has("dropout")) p.dropout.seed = &seed;
  p.dq_by_rows = has("deterministic");
  Device device;
  device.is_cuda = facts[0] != 0;
  device.sm = static_cast<int>(facts[1]);
  device.num_sms = static_cast<int>(facts[2]);
  device.smem_optin_bytes = static_cast<int>(facts[3]);
  device.driver_version = static_cast<int>(facts[4]);
  device.runtime_version = static_cast<int>(facts[5]);
  const Direction way = direction == "backward" ? Direction::kBackward : Direction::kForward;
  return describe_call(way, p, make_plan(way, p, device), device.is_cuda ? "cuda" : "cpu");
}

}  // namespace

#define HFB_SHARED_ARGUMENTS                                                                     \
  "Tensor? mask=None, Tensor? bias=None, Tensor? row_start=None, Tensor? row_end=None, Tensor? " \
  "query_offsets=None, "                                                                         \
  "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None, Tensor? "           \
  "cu_seqlens_k=None, "                                                                          \
  "Tensor? block_table=None, Tensor? tile_map=None, Tensor? dropout_seed=None, *, float scale, " \
  "float softcap=0., "                                                                           \
  "int? window_left=None, int? window_right=None, int? query_offset=None, int max_seqlen_q=0, "  \
  "int max_seqlen_k=0, "                                                                         \
  "float dropout_p=0., int num_splits=0, bool deterministic=False"

STABLE_TORCH_LIBRARY(hf_flash_backend, m) {
  m.def("forward(Tensor q, Tensor k, Tensor v, " HFB_SHARED_ARGUMENTS
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, " HFB_SHARED_ARGUMENTS
      ", bool bias_grad=False, bool alibi_grad=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor "
      "dbias, Tensor dalibi_rows)");
  m.def("trace_start() -> int");
  m.def("trace_read(int begin) -> str");
  m.def("trace_stop() -> ()");
  m.def("device_facts(int index) -> int[]");
  m.def(
      "explain(str direction, int[] facts, str dtype, int[] shape, str features, float scale, "
      "float softcap, "
      "int? window_left, int? window_right) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(hf_flash_backend, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
STABLE_TORCH_LIBRARY_IMPL(hf_flash_backend, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
STABLE_TORCH_LIBRARY_IMPL(hf_flash_backend, CompositeExplicitAutograd, m) {
  m.impl("trace_start", TORCH_BOX(&trace_start));
  m.impl("trace_read", TORCH_BOX(&trace_read));
  m.impl("trace_stop", TORCH_BOX(&trace_stop));
  m.impl("device_facts", TORCH_BOX(&device_facts));
  m.impl("explain", TORCH_BOX(&explain));
}

}  // namespace hfb

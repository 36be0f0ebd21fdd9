// The ops, and (with arguments.h) the only file that includes torch: schema, checks, allocation,
// params, stream, status -> exception. libtorch stable ABI, target 2.10: one binary for every torch
// from 2.10 on. Loaded by torch.ops.load_library.
//
// Wrong arguments throw std::invalid_argument (ValueError in Python), everything else
// std::runtime_error. What is valid but not implemented is refused in ops.py by
// NotImplementedError; the checks here are the second line.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "cpu/attention.h"
#include "trace.h"
#ifdef HFB_WITH_CUDA
#include "cuda/launch.h"
#endif

namespace hfb {
namespace {

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

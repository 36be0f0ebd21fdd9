#include "plan.h"

#include <algorithm>
#include <cstdlib>

namespace hfb {
namespace {

constexpr int kMinimumSm = 80, kHopperSm = 90;
constexpr int64_t kL2Bytes = int64_t{32} << 20;  // what one section of heads may take of 50 MiB
constexpr int64_t kL2BytesBackward = int64_t{40} << 20;  // likewise; Q, dO and the fp32 dQ
constexpr double kEvenShares = 0.9;  // persistent blocks that idle less than a tenth
constexpr int64_t kMaxGrid = INT32_MAX;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string sm_text(int sm) { return std::to_string(sm / 10) + "." + std::to_string(sm % 10); }

#define HFB_PICK(D) \
  if (head_dim <= D) return D;
int compiled_head_dim(int64_t head_dim) {
  HFB_HEAD_DIMS(HFB_PICK)
  return 0;
}
int compiled_head_dim_fp32(int64_t head_dim) {
  HFB_COARSE_HEAD_DIMS(HFB_PICK)
  return 0;
}
int compiled_head_dim_sm90(int64_t head_dim) {
  HFB_SM90_HEAD_DIMS(HFB_PICK)
  return 0;
}
int compiled_head_dim_bwd_sm90(int64_t head_dim) {
  HFB_BWD_SM90_HEAD_DIMS(HFB_PICK)
  return 0;
}
#undef HFB_PICK

bool forces_generic_kernels(const char* setting) {
  return setting != nullptr && std::string(setting) == "sm80";
}

// Why a call on a Hopper GPU does not run a kernel of that GPU, "" when it does.
std::string why_not_sm90(bool is_forward, const ForwardParams& p, bool is_general,
                         const char* forced) {
  if (forces_generic_kernels(forced)) return "HFB_KERNEL=sm80 asks for the generic sm_80 kernels";
#ifndef HFB_WITH_SM90
  return "this build has no sm_90 kernels (90 was not in HFB_CUDA_ARCHS); the generic sm_80 kernel "
         "runs";
#endif
  if (p.dtype == DType::kFloat32) {
    return "fp32 has no sm_90 kernel (wgmma multiplies no more than 19 bits); the generic sm_80 "
           "kernel runs";
  }
  if (is_general) {
    return "mask, bias, softcap, ALiBi, dropout and scale <= 0 have no sm_90 kernel yet; the "
           "generic "
           "sm_80 kernel runs";
  }
  if (!is_forward && compiled_head_dim_bwd_sm90(std::max(p.head_dim, p.head_dim_v)) == 0) {
    return "head dims above 128 have no sm_90 backward kernel yet; the generic sm_80 kernel runs";
  }
  if (p.len_kv == 0) return "there are no keys; the generic sm_80 kernel writes the zeros";
  return "";
}

// How fwd_sm90 takes its query tiles, and by how many blocks. Persistent blocks (one a
// multiprocessor) overlap the end of a tile with the begin of the next, worth about two key tiles a
// query tile; they need shares that are equal in advance. Without a band tiles are equally long;
// with one, folded pairs are, if the pairs come out even. Otherwise, and with limits or offsets of single rows, which
// only the GPU knows, every tile is a block and the hardware deals them out, longest first.
void schedule_fwd_sm90(const ForwardParams& p, const Device& device, Plan& plan) {
  const int64_t num_m = (p.len_q + plan.tile.block_m - 1) / plan.tile.block_m;
  const int64_t num_heads = p.batch * p.heads_q, num_sms = std::max(1, device.num_sms);
  plan.order.num_m = static_cast<int32_t>(num_m);
  plan.order.num_heads = static_cast<int32_t>(num_heads);
  if (!plan.is_banded) {
    plan.num_blocks = std::min(num_m * num_heads, num_sms);
    return;
  }
  const int64_t pairs = (num_m + 1) / 2 * num_heads;
  const int64_t rounds = (pairs + num_sms - 1) / num_sms;
  const bool rows_differ =
      p.row_start.data != nullptr || p.row_end.data != nullptr || p.query_offsets.data != nullptr;
  if (!rows_differ && num_m > 1 && static_cast<double>(pairs) >= kEvenShares * rounds * num_sms) {
    plan.order.is_folded = true;
    plan.num_blocks = num_sms;
    return;
  }
  const int64_t head_bytes = p.len_kv * (p.head_dim + p.head_dim_v) * kBytesPerElement;
  const int64_t section = std::max<int64_t>(1, kL2Bytes / head_bytes) * (p.heads_q / p.heads_kv);
  plan.order.section_heads = static_cast<int32_t>(std::min(section, num_heads));
  plan.num_blocks = num_m * num_heads;
}

// bwd_sm90 has one block for each key tile of a head. Banded: sections of heads whose Q, dO and dQ stay
// in L2, and inside a section the first keys of all heads first, which the most rows of a causal call
// see. In a fixed order of additions blocks wait for those before them; last keys first, the order in
// which causal rows need them, keeps that short, and so does spreading the blocks over all heads.
void schedule_bwd_sm90(const ForwardParams& p, Plan& plan) {
  const int64_t num_n = (p.len_kv + plan.tile.block_n - 1) / plan.tile.block_n;
  const int64_t num_heads = p.batch * p.heads_kv, group = p.heads_q / p.heads_kv;
  constexpr int64_t kElementBytes = 2 * kBytesPerElement + 4;  // Q, dO, dQ
  const int64_t head_bytes = std::max<int64_t>(1, p.len_q * p.head_dim * kElementBytes * group);
  int64_t section = plan.is_banded ? std::max<int64_t>(1, kL2BytesBackward / head_bytes) : 1;
  if (p.dq_by_rows) section = num_heads;
  plan.order.num_m = static_cast<int32_t>(num_n);
  plan.order.num_heads = static_cast<int32_t>(num_heads);
  plan.order.section_heads = static_cast<int32_t>(std::min(section, num_heads));
  plan.num_blocks = num_n * num_heads;
}

Plan unsupported(std::string reason) {
  Plan plan;
  plan.reason = std::move(reason);
  plan.is_unsupported = true;
  return plan;
}

}  // namespace

const char* kernel_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kNone:
      return "none";
    case Kernel::kCpu:
      return "cpu";
    case Kernel::kFwdSm80:
      return "fwd_sm80";
    case Kernel::kFwdSm90:
      return "fwd_sm90";
    case Kernel::kBwdSm80:
      return "bwd_sm80";
    case Kernel::kBwdSm90:
      return "bwd_sm90";
  }
  return "none";
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat64:
      return "fp64";
  }
  return "unknown";
}

std::string feature_list(const ForwardParams& p) {
  std::string list;
  auto add = [&list](bool present, const char* name) {
    if (present) list += list.empty() ? name : std::string(",") + name;
  };
  const bool is_window = p.band.left != kNoLimit || (p.band.right != kNoLimit && p.band.right != 0);
  add(p.band.right == 0, "causal");
  add(is_window, "window");
  add(p.heads_q != p.heads_kv, "gqa");
  add(p.row_start.data != nullptr || p.row_end.data != nullptr, "row_limits");
  add(p.query_offsets.data != nullptr, "query_offsets");
  add(p.mask.data != nullptr, "mask");
  add(p.bias.data != nullptr, "bias");
  add(p.softcap != 0.0, "softcap");
  add(p.alibi_slopes != nullptr, "alibi");
  add(p.sinks.data != nullptr, "sinks");
  add(p.dropout.seed != nullptr, "dropout");
  add(p.dq_by_rows, "dq_by_rows");
  return list;
}

std::string driver_problem(int driver_version, int runtime_version) {
  // CUDA minor versions are compatible inside a major one, so the driver needs the runtime's major
  // version.
  if (driver_version / 1000 >= runtime_version / 1000) return "";
  const std::string needed =
      runtime_version / 1000 == 13 ? "r580 or newer" : "CUDA " + version_text(runtime_version);
  if (driver_version == 0) {
    return "hf_flash_backend: no usable NVIDIA driver: the library was built with CUDA runtime " +
           version_text(runtime_version) + ", which needs a driver " + needed +
           ". Install it, or use CPU tensors.";
  }
  return "hf_flash_backend: the NVIDIA driver is older than the CUDA runtime: got a driver for "
         "CUDA " +
         version_text(driver_version) + ", built with runtime " + version_text(runtime_version) +
         ", which needs a driver " + needed + ". Update the driver, or rebuild with an older nvcc.";
}

BackwardWorkspace backward_workspace(const ForwardParams& p, const Plan& plan) {
  const int block_m = plan.tile.block_m;
  const bool has_turns = p.dq_by_rows && plan.kernel == Kernel::kBwdSm90;
  const bool has_accumulator = !p.dq_by_rows || has_turns;
  auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  BackwardWorkspace w;
  const int64_t num_m = (p.len_q + block_m - 1) / block_m;
  w.len_q_padded = num_m * block_m;
  const int64_t rows = p.batch * p.heads_q * w.len_q_padded;
  w.lse = w.delta + align(rows * 4);
  w.row_blocks = w.lse + align(rows * 4);
  w.dq_turns = w.row_blocks + align(p.batch * num_m * static_cast<int64_t>(sizeof(RowBlock)));
  w.dq_accumulator = w.dq_turns + (has_turns ? align(p.batch * p.heads_q * num_m * 4) : 0);
  w.total_bytes =
      w.dq_accumulator + (has_accumulator ? align(rows * plan.compiled_head_dim * 4) : 0);
  return w;
}

Plan make_plan(Direction direction, const ForwardParams& p, const Device& device) {
  Plan plan;
  if (!device.is_cuda) {
    plan.kernel = Kernel::kCpu;
    return plan;
  }
  const bool is_forward = direction == Direction::kForward;
  if (device.runtime_version == 0) {
    return unsupported(
        "this build has no CUDA kernels (nvcc was not found when it was built). Install the CUDA "
        "toolkit "
        "and rebuild: HFB_BUILD=cuda pip install .");
  }
  if (std::string problem = driver_problem(device.driver_version, device.runtime_version);
      !problem.empty()) {
    return unsupported(problem.substr(std::string("hf_flash_backend: ").size()));
  }
  if (device.sm < kMinimumSm) {
    return unsupported("the GPU has compute capability " + sm_text(device.sm) + ", expected " +
                       sm_text(kMinimumSm) + " or newer. Use attn_implementation=\"sdpa\".");
  }
  if (p.dtype == DType::kFloat64) {
    return unsupported(
        "dtype fp64 is not supported on CUDA: expected fp16, bf16 or fp32. Cast q, k and v.");
  }
  const bool is_fp32 = p.dtype == DType::kFloat32;
  const int terms = is_fp32 ? 3 : 1;
  const int64_t head_dim = std::max(p.head_dim, p.head_dim_v);
  plan.compiled_head_dim = is_fp32 ? compiled_head_dim_fp32(head_dim) : compiled_head_dim(head_dim);
  if (plan.compiled_head_dim == 0) {
    return unsupported("head_dim " + std::to_string(head_dim) +
                       " is not supported on CUDA: expected at most " +
                       std::to_string(kMaxHeadDimCuda) + ". Use attn_implementation=\"sdpa\".");
  }
  plan.is_general = p.mask.data != nullptr || p.bias.data != nullptr || p.softcap != 0.0 ||
                    !(p.scale > 0.0) || p.alibi_slopes != nullptr || p.dropout.seed != nullptr ||
                    is_fp32;
  plan.is_banded = p.band.left != kNoLimit || p.band.right != kNoLimit ||
                   p.row_start.data != nullptr || p.row_end.data != nullptr;
  static const char* const forced = std::getenv("HFB_KERNEL");
  if (forced != nullptr && !forces_generic_kernels(forced)) {
    return unsupported(std::string("HFB_KERNEL: got '") + forced + "', expected sm80 or unset.");
  }
  if (device.sm == kHopperSm) plan.reason = why_not_sm90(is_forward, p, plan.is_general, forced);
  const auto count_tiles = [&p, &plan] {
    return (p.len_q + plan.tile.block_m - 1) / plan.tile.block_m;
  };
  if (is_forward && device.sm == kHopperSm && plan.reason.empty()) {
    plan.kernel = Kernel::kFwdSm90;
    plan.compiled_head_dim = compiled_head_dim_sm90(head_dim);
    plan.tile = fwd_sm90_tile(plan.compiled_head_dim, plan.is_banded);
    schedule_fwd_sm90(p, device, plan);
  } else if (!is_forward && device.sm == kHopperSm && plan.reason.empty()) {
    plan.kernel = Kernel::kBwdSm90;
    plan.compiled_head_dim = compiled_head_dim_bwd_sm90(head_dim);
    plan.tile = bwd_sm90_tile(plan.compiled_head_dim);
    schedule_bwd_sm90(p, plan);
    plan.workspace_bytes = backward_workspace(p, plan).total_bytes;
  } else if (is_forward) {
    plan.kernel = Kernel::kFwdSm80;
    plan.tile = fwd_sm80_tile(plan.compiled_head_dim, terms);
    plan.num_blocks = count_tiles() * p.heads_q * p.batch;
  } else {
    plan.kernel = Kernel::kBwdSm80;
    plan.tile = bwd_sm80_tile(plan.compiled_head_dim, false, terms);
    if (plan.tile.smem_bytes > device.smem_optin_bytes) {
      plan.is_small_smem = true;
      plan.is_general = true;  // the only variant that is compiled of the small tile
      plan.tile = bwd_sm80_tile(plan.compiled_head_dim, true, terms);
    }
    if (plan.tile.smem_bytes > device.smem_optin_bytes) {
      return unsupported("the backward pass in fp32 at head_dim " + std::to_string(head_dim) +
                         " needs " + std::to_string(plan.tile.smem_bytes) +
                         " bytes of shared memory a block: this GPU offers " +
                         std::to_string(device.smem_optin_bytes) + ". Use bf16.");
    }
    plan.num_blocks = (p.len_kv + plan.tile.block_n - 1) / plan.tile.block_n * p.heads_kv * p.batch;
    plan.workspace_bytes = backward_workspace(p, plan).total_bytes;
  }
  const int64_t num_m = count_tiles();
  if (std::max({plan.num_blocks, num_m * p.heads_q * p.batch, p.len_q, p.len_kv}) > kMaxGrid) {
    return unsupported(
        "the problem needs more than 2^31 - 1 thread blocks, rows or keys in one call. Split the "
        "batch.");
  }
  return plan;
}

}  // namespace hfb

// Which kernel runs a call, with which tiles: the only place where that is decided. No CUDA, no
// torch.
#pragma once

#include <cstdint>
#include <string>

#include "params.h"
#include "tiles.h"

namespace hfb {

enum class Direction { kForward, kBackward };
enum class Kernel { kNone, kCpu, kFwdSm80, kFwdSm90, kBwdSm80, kBwdSm90 };

const char* kernel_name(Kernel kernel);
const char* dtype_name(DType dtype);

struct Device {
  bool is_cuda = false;
  int sm = 0;                // 10 * major + minor, 90 for an H200
  int num_sms = 0;           // multiprocessors
  int smem_optin_bytes = 0;  // shared memory one block may ask for
  int driver_version = 0;    // newest CUDA the driver supports, 13000 for 13.0; 0 = no driver
  int runtime_version = 0;   // CUDA runtime the library was built with; 0 = built without CUDA
};

struct Plan {
  Kernel kernel = Kernel::kNone;
  std::string
      reason;  // why nothing runs (kernel == kNone), or why a slower kernel than this GPU could use
  bool is_unsupported =
      false;  // kNone because of something valid that is not implemented (not a wrong argument)
  int compiled_head_dim = 0;  // CUDA: 64, 96, 128, 192 or 256
  bool is_general = false;    // CUDA: softcap, bias, mask or a scale <= 0 is applied to every score
  bool is_banded = false;     // CUDA: a band or row limits, so that tiles are skipped and masked
  bool is_small_smem = false;  // CUDA: the tile for GPUs with 99 KiB of shared memory a block
  Tile tile = {};
  TileOrder order;         // fwd_sm90: of query tiles, bwd_sm90: of key tiles, over the blocks
  int64_t num_blocks = 0;  // grid size
  int64_t workspace_bytes = 0;
};

// Never throws. dims, dtype and features are read from params; pointers are only tested for null.
Plan make_plan(Direction direction, const ForwardParams& params, const Device& device);

// "causal,mask,..." as shown by trace() and explain(); "" for plain full attention.
std::string feature_list(const ForwardParams& params);

// Text of the error for a driver that cannot run the library's CUDA runtime, "" when it can.
std::string driver_problem(int driver_version, int runtime_version);

// Workspace of the backward pass, in bytes from its start; every part 256-byte aligned.
struct BackwardWorkspace {
  int64_t len_q_padded = 0;  // Lq rounded up to the tile
  int64_t delta = 0;         // [B, Hq, Lq_padded] fp32
  int64_t lse = 0;           // [B, Hq, Lq_padded] fp32, +inf for rows that see no key
  int64_t row_blocks = 0;    // [B, Lq_padded / block_m] RowBlock
  // bwd_sm90 with dq_by_rows: [B, Hq, Lq_padded / block_m] int32, how many key tiles were added
  int64_t dq_turns = 0;
  // Not bwd_sm80 with dq_by_rows: [B, Hq, Lq_padded / block_m] tiles of block_m * head_dim fp32, in
  // thread order
  int64_t dq_accumulator = 0;
  int64_t total_bytes = 0;
};
BackwardWorkspace backward_workspace(const ForwardParams& params, const Plan& plan);

}  // namespace hfb

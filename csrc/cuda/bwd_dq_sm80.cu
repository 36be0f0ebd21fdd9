// Launches bwd_dq_sm80_kernel at one head dim; bwd_preprocess has run on the same stream.
#include "bwd_dq_sm80.cuh"
#include "launch.h"

namespace hfb {
namespace {

template <typename T, bool kGeneral>
cudaError_t launch(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr Tile kTile = BwdDqSm80<T, HFB_HEAD_DIM>::kTile;
  auto* kernel = bwd_dq_sm80_kernel<T, HFB_HEAD_DIM, kGeneral>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTile.smem_bytes);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>((params.len_q + kTile.block_m - 1) / kTile.block_m *
                                            params.heads_q * params.batch);
  kernel<<<blocks, kTile.num_warps * 32, kTile.smem_bytes, stream>>>(
      params, backward_buffers(params, plan));
  return cudaGetLastError();
}

}  // namespace

template <>
int launch_bwd_dq_sm80<HFB_HEAD_DIM>(const BackwardParams& params, const Plan& plan, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if constexpr (has_fp32(HFB_HEAD_DIM)) {
    if (params.dtype == DType::kFloat32) return launch<float, true>(params, plan, s);
  }
  if (params.dtype == DType::kBFloat16) {
    return plan.is_general ? launch<__nv_bfloat16, true>(params, plan, s)
                           : launch<__nv_bfloat16, false>(params, plan, s);
  }
  return plan.is_general ? launch<__half, true>(params, plan, s)
                         : launch<__half, false>(params, plan, s);
}

}  // namespace hfb

// Launches fwd_sm80_kernel at one head dim: setup.py compiles this file once for each HFB_HEAD_DIM
// of tiles.h.
#include "fwd_sm80.cuh"
#include "launch.h"

namespace hfb {
namespace {

template <typename T, bool kGeneral>
cudaError_t launch(const ForwardParams& params, const Plan& plan, cudaStream_t stream) {
  auto* kernel = fwd_sm80_kernel<T, HFB_HEAD_DIM, kGeneral>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.tile.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.num_blocks), plan.tile.num_warps * 32, plan.tile.smem_bytes,
           stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

template <>
int launch_fwd_sm80<HFB_HEAD_DIM>(const ForwardParams& params, const Plan& plan, void* stream) {
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

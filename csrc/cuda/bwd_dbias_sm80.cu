// Launches bwd_dbias_sm80_kernel at one head dim; bwd_preprocess has run on the same stream.
#include "bwd_dbias_sm80.cuh"
#include "launch.h"

namespace hfb {
namespace {

template <typename T>
cudaError_t launch(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr Tile kTile = BwdDbiasSm80<T, HFB_HEAD_DIM>::kTile;
  auto* kernel = bwd_dbias_sm80_kernel<T, HFB_HEAD_DIM>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTile.smem_bytes);
  if (error != cudaSuccess) return error;
  const int64_t num_m = (params.bias_rows + kTile.block_m - 1) / kTile.block_m;
  const int64_t num_n = (params.len_kv + kTile.block_n - 1) / kTile.block_n;
  const auto blocks = static_cast<unsigned>(num_m * num_n * params.bias_heads * params.bias_batch);
  kernel<<<blocks, kTile.num_warps * 32, kTile.smem_bytes, stream>>>(
      params, backward_buffers(params, plan));
  return cudaGetLastError();
}

}  // namespace

template <>
int launch_bwd_dbias_sm80<HFB_HEAD_DIM>(const BackwardParams& params, const Plan& plan,
                                        void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if constexpr (has_fp32(HFB_HEAD_DIM)) {
    if (params.dtype == DType::kFloat32) return launch<float>(params, plan, s);
  }
  return params.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(params, plan, s)
                                          : launch<__half>(params, plan, s);
}

}  // namespace hfb

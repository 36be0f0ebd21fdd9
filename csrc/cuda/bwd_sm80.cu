// Launches the backward pass at one head dim: preprocess, main kernel, then postprocess or
// bwd_dq_sm80, and bwd_dbias_sm80 where the bias wants a gradient. Compiled once for each
// HFB_HEAD_DIM.
#include "bwd_postprocess.cuh"
#include "bwd_sm80.cuh"
#include "launch.h"

namespace hfb {
namespace {

template <typename Kernel>
cudaError_t allow_smem(Kernel* kernel, int smem_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
}

template <typename T, bool kGeneral, bool kSmallSmem>
cudaError_t launch(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  using Config = BwdSm80<T, HFB_HEAD_DIM, kSmallSmem>;
  constexpr int kThreads = Config::kThreads, kBlockM = Config::kBlockM;
  const BackwardBuffers buffers = backward_buffers(params, plan);
  const auto row_tiles =
      static_cast<unsigned>(buffers.len_q_padded / kBlockM * params.heads_q * params.batch);

  bwd_preprocess_kernel<T, HFB_HEAD_DIM, kBlockM, kThreads, false>
      <<<row_tiles, kThreads, 0, stream>>>(params, buffers, kGeneral ? 1.f : kLog2e);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  auto* main_kernel = bwd_sm80_kernel<T, HFB_HEAD_DIM, kGeneral, kSmallSmem>;
  if (const cudaError_t error = allow_smem(main_kernel, plan.tile.smem_bytes); error != cudaSuccess)
    return error;
  main_kernel<<<static_cast<unsigned>(plan.num_blocks), kThreads, plan.tile.smem_bytes, stream>>>(
      params, buffers);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  constexpr int kCoarse = coarse_head_dim(HFB_HEAD_DIM);
  if (params.dbias) {
    const int error = launch_bwd_dbias_sm80<kCoarse>(params, plan, stream);
    if (error != cudaSuccess) return static_cast<cudaError_t>(error);
  }
  if (params.dq_by_rows) {
    return static_cast<cudaError_t>(launch_bwd_dq_sm80<kCoarse>(params, plan, stream));
  }
  auto* postprocess = bwd_postprocess_kernel<T, HFB_HEAD_DIM, Config>;
  if (const cudaError_t error = allow_smem(postprocess, Config::kQBytes); error != cudaSuccess)
    return error;
  postprocess<<<row_tiles, kThreads, Config::kQBytes, stream>>>(params, buffers);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_dtype(const BackwardParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr bool kHasSmallVariant = BwdSm80<T, HFB_HEAD_DIM, true>::kTile.smem_bytes !=
                                    BwdSm80<T, HFB_HEAD_DIM, false>::kTile.smem_bytes;
  constexpr bool kHasPlainVariant = Operand<T>::kTerms == 1;  // fp32 is general always
  if constexpr (kHasPlainVariant) {
    if (!plan.is_general) return launch<T, false, false>(params, plan, stream);
  }
  if constexpr (kHasSmallVariant) {
    if (plan.is_small_smem) return launch<T, true, true>(params, plan, stream);
  }
  return launch<T, true, false>(params, plan, stream);
}

}  // namespace

template <>
int launch_bwd_sm80<HFB_HEAD_DIM>(const BackwardParams& params, const Plan& plan, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if constexpr (has_fp32(HFB_HEAD_DIM)) {
    if (params.dtype == DType::kFloat32) return launch_dtype<float>(params, plan, s);
  }
  return params.dtype == DType::kBFloat16 ? launch_dtype<__nv_bfloat16>(params, plan, s)
                                          : launch_dtype<__half>(params, plan, s);
}

}  // namespace hfb

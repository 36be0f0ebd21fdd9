// Launches the backward pass at one head dim on sm_90: preprocess, bwd_sm90_kernel, postprocess.
// setup.py compiles this file once for each HFB_HEAD_DIM of HFB_BWD_SM90_HEAD_DIMS (tiles.h), for
// sm_90a only.
#include "bwd_postprocess.cuh"
#include "bwd_sm90.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace hfb {
namespace {

template <typename T>
cudaError_t launch(const BackwardParams& p, const Plan& plan, cudaStream_t stream) {
  using Config = BwdSm90<T, HFB_HEAD_DIM>;
  const BackwardBuffers buffers = backward_buffers(p, plan);
  BwdSm90Maps maps;
  const TensorSizes queries = {p.batch, p.heads_q, p.len_q, p.head_dim};
  const TensorSizes outputs = {p.batch, p.heads_q, p.len_q, p.head_dim_v};
  if (!encode_tile_map(&maps.q, p.dtype, p.q, queries, Config::kBlockM) ||
      !encode_tile_map(&maps.dout, p.dtype, p.dout, outputs, Config::kBlockM) ||
      !encode_tile_map(&maps.k, p.dtype, p.k, {p.batch, p.heads_kv, p.len_kv, p.head_dim},
                       Config::kBlockN) ||
      !encode_tile_map(&maps.v, p.dtype, p.v, {p.batch, p.heads_kv, p.len_kv, p.head_dim_v},
                       Config::kBlockN)) {
    return cudaErrorInvalidValue;
  }
  const auto row_tiles =
      static_cast<unsigned>(buffers.len_q_padded / Config::kBlockM * p.heads_q * p.batch);
  constexpr int kRowThreads = Config::kDqThreads;

  bwd_preprocess_kernel<T, HFB_HEAD_DIM, Config::kBlockM, kRowThreads, true>
      <<<row_tiles, kRowThreads, 0, stream>>>(p, buffers, kLog2e);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  auto* main_kernel = bwd_sm90_kernel<T, HFB_HEAD_DIM>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          main_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.tile.smem_bytes);
      error != cudaSuccess) {
    return error;
  }
  main_kernel<<<static_cast<unsigned>(plan.num_blocks), Config::kThreads, plan.tile.smem_bytes,
                stream>>>(p, buffers, maps, plan.order);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  bwd_postprocess_kernel<T, HFB_HEAD_DIM, Config>
      <<<row_tiles, kRowThreads, Config::kQBytes, stream>>>(p, buffers);
  return cudaGetLastError();
}

}  // namespace

template <>
int launch_bwd_sm90<HFB_HEAD_DIM>(const BackwardParams& params, const Plan& plan, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  return params.dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(params, plan, s)
                                          : launch<__half>(params, plan, s);
}

}  // namespace hfb

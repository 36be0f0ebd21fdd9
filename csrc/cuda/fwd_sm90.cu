// Launches fwd_sm90_kernel at one head dim: setup.py compiles this file once for each HFB_HEAD_DIM
// of HFB_SM90_HEAD_DIMS (tiles.h), for sm_90a only.
#include "fwd_sm90.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace hfb {
namespace {

template <typename T, bool kBanded>
cudaError_t launch(const ForwardParams& p, const Plan& plan, cudaStream_t stream) {
  const int block_m = plan.tile.block_m, block_n = plan.tile.block_n;
  FwdSm90Maps maps;
  if (!encode_tile_map(&maps.q, p.dtype, p.q, {p.batch, p.heads_q, p.len_q, p.head_dim}, block_m) ||
      !encode_tile_map(&maps.k, p.dtype, p.k, {p.batch, p.heads_kv, p.len_kv, p.head_dim},
                       block_n) ||
      !encode_tile_map(&maps.v, p.dtype, p.v, {p.batch, p.heads_kv, p.len_kv, p.head_dim_v},
                       block_n)) {
    return cudaErrorInvalidValue;
  }
  auto* kernel = fwd_sm90_kernel<T, HFB_HEAD_DIM, kBanded>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.tile.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.num_blocks), plan.tile.num_warps * 32, plan.tile.smem_bytes,
           stream>>>(p, maps, plan.order);
  return cudaGetLastError();
}

}  // namespace

template <>
int launch_fwd_sm90<HFB_HEAD_DIM>(const ForwardParams& params, const Plan& plan, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) {
    return plan.is_banded ? launch<__nv_bfloat16, true>(params, plan, s)
                          : launch<__nv_bfloat16, false>(params, plan, s);
  }
  return plan.is_banded ? launch<__half, true>(params, plan, s)
                        : launch<__half, false>(params, plan, s);
}

}  // namespace hfb

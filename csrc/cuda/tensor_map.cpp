#include "tensor_map.h"

#include <cuda_runtime_api.h>

#include "../tiles.h"

namespace hfb {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is already in the process; the library links no libcuda, so that it loads
// without a driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &found) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

bool encode_tile_map(CUtensorMap* map, DType dtype, const Strided<const void>& tensor,
                     const TensorSizes& sizes, int rows) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return false;
  const cuuint64_t dims[4] = {
      static_cast<cuuint64_t>(sizes.cols), static_cast<cuuint64_t>(sizes.len),
      static_cast<cuuint64_t>(sizes.heads), static_cast<cuuint64_t>(sizes.batch)};
  // A dimension of size 1 has stride 0 in params.h; its stride is never used, but has to be valid.
  const auto stride_bytes = [&sizes](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>((size == 1 ? sizes.cols : stride) * kBytesPerElement);
  };
  const cuuint64_t strides[3] = {stride_bytes(sizes.len, tensor.stride_row),
                                 stride_bytes(sizes.heads, tensor.stride_head),
                                 stride_bytes(sizes.batch, tensor.stride_batch)};
  const cuuint32_t box[4] = {kSlabCols, static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto try_encode = [&] {
    return encode(map, type, 4, const_cast<void*>(tensor.data), dims, strides, box, element_strides,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {  // a thread that has not used the GPU, as of autograd
    cudaFree(nullptr);                         // makes the device's context current
    result = try_encode();
  }
  return result == CUDA_SUCCESS;
}

}  // namespace hfb

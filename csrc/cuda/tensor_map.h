// Tensor maps: what the tensor memory accelerator of sm_90 knows about a tensor in global memory.
#pragma once

#include <cuda.h>

#include "../params.h"

namespace hfb {

struct TensorSizes {
  int64_t batch, heads, len, cols;
};

// 4-D map of a 16-bit [B, H, L, D] tensor; a box is 64 columns (one slab of tile.cuh, swizzled) of
// rows rows of one head. Columns and rows outside the tensor arrive as zeros. false when the driver
// refuses.
bool encode_tile_map(CUtensorMap* map, DType dtype, const Strided<const void>& tensor,
                     const TensorSizes& sizes, int rows);

}  // namespace hfb

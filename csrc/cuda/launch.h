// Entry points of the CUDA half of the library, free of CUDA types. Each returns "" or the text of
// the error.
#pragma once

#include <cstdint>
#include <string>

#include "../params.h"
#include "../plan.h"

namespace hfb {

// Static facts of a CUDA device, read once a device. ok = false with an error text when the driver
// cannot be used.
struct CudaDevice {
  Device device;
  std::string error;
};
const CudaDevice& cuda_device(int index);

// Launches on stream (a cudaStream_t) of the current device; asynchronous, capturable, allocates
// nothing.
std::string launch_forward_cuda(const ForwardParams& params, const Plan& plan, void* stream);
std::string launch_backward_cuda(const BackwardParams& params, const Plan& plan, void* stream);

// One kernel at one compiled head dim, defined in <kernel>.cu; return a cudaError_t.
template <int kHeadDim>
int launch_fwd_sm80(const ForwardParams& params, const Plan& plan, void* stream);
template <int kHeadDim>
int launch_fwd_sm90(const ForwardParams& params, const Plan& plan, void* stream);
template <int kHeadDim>
int launch_bwd_sm80(const BackwardParams& params, const Plan& plan, void* stream);
template <int kHeadDim>
int launch_bwd_sm90(const BackwardParams& params, const Plan& plan, void* stream);
template <int kHeadDim>
int launch_bwd_dq_sm80(const BackwardParams& params, const Plan& plan, void* stream);
template <int kHeadDim>
int launch_bwd_dbias_sm80(const BackwardParams& params, const Plan& plan, void* stream);

}  // namespace hfb

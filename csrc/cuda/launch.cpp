// Head-dim dispatch and device facts. Host code only; the kernels are in the .cu files.
#include "launch.h"

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

namespace hfb {
namespace {

constexpr int kMaxDevices = 64;

CudaDevice read_device(int index) {
  CudaDevice result;
  Device& device = result.device;
  device.is_cuda = true;
  cudaRuntimeGetVersion(&device.runtime_version);
  if (cudaDriverGetVersion(&device.driver_version) != cudaSuccess) device.driver_version = 0;
  result.error = driver_problem(device.driver_version, device.runtime_version);
  if (!result.error.empty()) return result;
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.num_sms, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device.smem_optin_bytes,
                                   cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    result.error = std::string("hf_flash_backend: cannot read GPU ") + std::to_string(index) +
                   ": " + cudaGetErrorString(error) + ".";
  }
  device.sm = 10 * major + minor;
  return result;
}

std::string error_text(const Plan& plan, int error) {
  if (error == cudaSuccess) return "";
  return std::string("hf_flash_backend: ") + kernel_name(plan.kernel) +
         " launch failed: " + cudaGetErrorString(static_cast<cudaError_t>(error)) + " (" +
         std::to_string(plan.num_blocks) + " blocks of " +
         std::to_string(plan.tile.num_warps * 32) + " threads, " +
         std::to_string(plan.tile.smem_bytes) +
         " bytes of shared memory). An error of an earlier kernel may be reported here: run with "
         "CUDA_LAUNCH_BLOCKING=1.";
}

std::string missing_kernel(const Plan& plan) {
  return std::string("hf_flash_backend: ") + kernel_name(plan.kernel) +
         " is not built for head dim " + std::to_string(plan.compiled_head_dim) + ".";
}

}  // namespace

const CudaDevice& cuda_device(int index) {
  static std::array<std::once_flag, kMaxDevices> flags;
  static std::array<CudaDevice, kMaxDevices> devices;
  const int slot = index < 0 || index >= kMaxDevices ? 0 : index;
  std::call_once(flags[slot], [&] { devices[slot] = read_device(slot); });
  return devices[slot];
}

#define HFB_LAUNCH(KERNEL, D) \
  if (plan.compiled_head_dim == D) return error_text(plan, KERNEL<D>(params, plan, stream));
#define HFB_LAUNCH_FWD_SM80(D) HFB_LAUNCH(launch_fwd_sm80, D)
#define HFB_LAUNCH_FWD_SM90(D) HFB_LAUNCH(launch_fwd_sm90, D)
#define HFB_LAUNCH_BWD_SM80(D) HFB_LAUNCH(launch_bwd_sm80, D)
#define HFB_LAUNCH_BWD_SM90(D) HFB_LAUNCH(launch_bwd_sm90, D)

std::string launch_forward_cuda(const ForwardParams& params, const Plan& plan, void* stream) {
  if (plan.kernel == Kernel::kFwdSm90) {
#ifdef HFB_WITH_SM90
    HFB_SM90_HEAD_DIMS(HFB_LAUNCH_FWD_SM90)
#endif
  } else {
    HFB_HEAD_DIMS(HFB_LAUNCH_FWD_SM80)
  }
  return missing_kernel(plan);
}

std::string launch_backward_cuda(const BackwardParams& params, const Plan& plan, void* stream) {
  if (plan.kernel == Kernel::kBwdSm90) {
#ifdef HFB_WITH_SM90
    HFB_BWD_SM90_HEAD_DIMS(HFB_LAUNCH_BWD_SM90)
#endif
  } else {
    HFB_HEAD_DIMS(HFB_LAUNCH_BWD_SM80)
  }
  return missing_kernel(plan);
}

}  // namespace hfb

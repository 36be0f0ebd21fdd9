// The CPU block kernels for the instruction set avx512. Headers come first: only the kernels
// themselves may hold its instructions, or the linker could pick such a copy of a shared inline.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "isa.h"

#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
namespace hfb {
namespace avx512 {
namespace {
constexpr int kVectorBytes = 64;
constexpr int kMicroRows = 12;
#include "vector.inl"
// clang-format off: order matters
#include "block.inl"
#include "attention.inl"
// clang-format on
}  // namespace
}  // namespace avx512

template <>
CpuKernels KernelSets<float>::avx512() {
  return avx512::kKernels<float>;
}
template <>
CpuKernels KernelSets<double>::avx512() {
  return avx512::kKernels<double>;
}
}  // namespace hfb
#endif

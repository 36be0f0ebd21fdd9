// The CPU block kernels for the instruction set avx2. Headers come first: only the kernels
// themselves may hold its instructions, or the linker could pick such a copy of a shared inline.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "isa.h"

#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c")
namespace hfb {
namespace avx2 {
namespace {
constexpr int kVectorBytes = 32;
constexpr int kMicroRows = 6;
#include "vector.inl"
// clang-format off: order matters
#include "block.inl"
#include "attention.inl"
// clang-format on
}  // namespace
}  // namespace avx2

template <>
CpuKernels KernelSets<float>::avx2() {
  return avx2::kKernels<float>;
}
template <>
CpuKernels KernelSets<double>::avx2() {
  return avx2::kKernels<double>;
}
}  // namespace hfb
#endif

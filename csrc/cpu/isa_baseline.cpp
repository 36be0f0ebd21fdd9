// The CPU block kernels for the instruction set baseline. Headers come first: only the kernels
// themselves may hold its instructions, or the linker could pick such a copy of a shared inline.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "isa.h"

namespace hfb {
namespace baseline {
namespace {
constexpr int kVectorBytes = 16;
constexpr int kMicroRows = 6;
#include "vector.inl"
// clang-format off: order matters
#include "block.inl"
#include "attention.inl"
// clang-format on
}  // namespace
}  // namespace baseline

template <>
CpuKernels KernelSets<float>::baseline() {
  return baseline::kKernels<float>;
}
template <>
CpuKernels KernelSets<double>::baseline() {
  return baseline::kKernels<double>;
}
}  // namespace hfb

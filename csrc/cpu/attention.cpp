// Chooses the instruction set and splits the work.
#include "attention.h"

#include <cstddef>
#include <vector>

#include "isa.h"

namespace hfb {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa detect_isa() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (has_avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

Isa isa() {
  static const Isa detected = detect_isa();
  return detected;
}

template <typename Compute>
CpuKernels kernels() {
#ifdef __x86_64__
  if (isa() == Isa::kAvx512) return KernelSets<Compute>::avx512();
  if (isa() == Isa::kAvx2) return KernelSets<Compute>::avx2();
#endif
  return KernelSets<Compute>::baseline();
}

CpuKernels kernels_for(DType dtype) {
  return dtype == DType::kFloat64 ? kernels<double>() : kernels<float>();
}

template <typename Body>
void run(ParallelFor parallel_for, int64_t count, Body body) {
  parallel_for(
      count,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<Body*>(context))(begin, end); },
      &body);
}

}  // namespace

const char* cpu_instruction_set() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

void attention_forward_cpu(const ForwardParams& p, ParallelFor parallel_for) {
  const CpuKernels k = kernels_for(p.dtype);
  run(parallel_for, p.batch * p.heads_q * num_cpu_blocks(p.len_q),
      [&](int64_t begin, int64_t end) { k.forward(p, begin, end); });
}

void attention_backward_cpu(const BackwardParams& p, ParallelFor parallel_for) {
  const CpuKernels k = kernels_for(p.dtype);
  const int64_t rows = p.batch * p.heads_q * p.len_q;
  std::vector<double> storage(
      static_cast<std::size_t>(p.dtype == DType::kFloat64 ? rows : (rows + 1) / 2));
  void* const delta = storage.data();  // [B, Hq, Lq] in the compute type
  const int64_t row_blocks = p.batch * p.heads_q * num_cpu_blocks(p.len_q);
  run(parallel_for, row_blocks, [&](int64_t begin, int64_t end) { k.delta(p, delta, begin, end); });
  run(parallel_for, row_blocks, [&](int64_t begin, int64_t end) { k.dq(p, delta, begin, end); });
  run(parallel_for, p.batch * p.heads_kv * num_cpu_blocks(p.len_kv),
      [&](int64_t begin, int64_t end) { k.dkv(p, delta, begin, end); });
  if (p.dbias) {
    run(parallel_for, p.bias_batch * p.bias_heads * num_cpu_blocks(p.len_kv),
        [&](int64_t begin, int64_t end) { k.dbias(p, delta, begin, end); });
  }
}

}  // namespace hfb

// Attention on the CPU, forward and backward: the same semantics as the CUDA kernels, in memory
// linear in the sequence length.
//
// dtypes fp16, bf16, fp32 (computed in fp32) and fp64. Results do not depend on the number of
// threads. Invisible keys never reach a result, whatever K and V hold there.
#pragma once

#include <cstdint>

#include "../params.h"

namespace hfb {

// Runs body(begin, end, context) over pieces that cover [0, count), possibly in parallel. The
// caller provides it (torch's own pool), so that the library starts no threads: it is safe to load
// before a fork and it follows torch.set_num_threads.
using ParallelFor = void (*)(int64_t count, void (*body)(int64_t, int64_t, void*), void* context);

void attention_forward_cpu(const ForwardParams& params, ParallelFor parallel_for);
void attention_backward_cpu(const BackwardParams& params, ParallelFor parallel_for);

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* cpu_instruction_set();

}  // namespace hfb

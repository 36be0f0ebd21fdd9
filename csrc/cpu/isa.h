// The block kernels are compiled once for each instruction set from the same .inl files.
#pragma once

#include "../dropout.h"

namespace hfb {

// One piece of work each; safe to run in parallel. The unit of work is one block of rows or keys of
// one head; delta is [B, Hq, Lq] in the compute type.
struct CpuKernels {
  void (*forward)(const ForwardParams&, int64_t begin, int64_t end);  // of num_row_blocks
  void (*delta)(const BackwardParams&, void* delta, int64_t begin,
                int64_t end);  // of num_row_blocks
  void (*dq)(const BackwardParams&, const void* delta, int64_t begin, int64_t end);
  void (*dkv)(const BackwardParams&, const void* delta, int64_t begin,
              int64_t end);  // num_key_blocks
  void (*dbias)(const BackwardParams&, const void* delta, int64_t begin,
                int64_t end);  // of key blocks of every (batch, head) that the bias has
};

// Rows and keys of a block: a multiple of every micro-kernel's rows (6, 12) and vector pair (16,
// 32). 96 x 96 fp32 scores are 36 KiB; with Q, K, V and O of head dim 64 a thread holds 150 KiB,
// inside L2.
constexpr int kCpuBlock = 96;

inline int64_t num_cpu_blocks(int64_t length) { return (length + kCpuBlock - 1) / kCpuBlock; }

template <typename Compute>
struct KernelSets {
  static CpuKernels baseline();
  static CpuKernels avx2();
  static CpuKernels avx512();
};

}  // namespace hfb

// sm_90: products of a warpgroup (128 threads, 64 rows) that read shared memory asynchronously.
// PTX ISA section 9.7.15 (wgmma).
//
// Order of use: wgmma_fence, products, wgmma_commit, ..., wgmma_wait<pending>, then keep() on the
// accumulators before reading them. Registers of a product in flight must not be written; ptxas
// then serialises every wgmma of the kernel (C75xx), which the build refuses.
//
// Accumulator [64, N] fp32, element i of a thread: row 16 * warp + lane / 4 + 8 * (i / 2 % 2),
// column 8 * (i / 4) + 2 * (lane % 4) + i % 2: per warp the layout of mma.sync, so softmax.cuh
// serves both.
#pragma once

#include "ptx.cuh"

namespace hfb {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins an accumulator: what reads it stays behind the wait before this line.
template <int kValues>
__device__ __forceinline__ void keep(float (&acc)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
// Gives an accumulator that the next product overwrites a value without an instruction.
template <int kValues>
__device__ __forceinline__ void leave_undefined(float (&acc)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) asm volatile("" : "=f"(acc[i]));
}

// Descriptor of a tile in shared memory in the layout of tile.cuh (128-byte swizzle, 1024-byte
// aligned): start, distance between slabs (read for operands stored [k][n] only), and 1024 bytes
// between groups of eight rows. Offsets are added in units of 16 bytes.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t s_tile, int slab_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kRowGroup = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kRowGroup | static_cast<uint64_t>(slab_bytes >> 4) << 16 |
         ((s_tile & 0x3FFFF) >> 4);
}
// Offset of 16 columns number kk of a [rows, *] tile stored [m or n][k].
__device__ constexpr int k_step(int kk, int rows) {
  return kk / 4 * (rows * 128 >> 4) + kk % 4 * (32 >> 4);
}
// Offset of 16 rows number kk of a tile stored [k][n].
__device__ constexpr int k_step_trans(int kk) { return kk * (16 * 128 >> 4); }

// Wgmma<N>::multiply_shared: d = a b or d += a b, a [64, 16] stored [m][k], b [N, 16] stored [n][k];
// kTransB: b [16, N] stored [k][n].
// Wgmma<N>::multiply_registers: d += a b, a in the accumulator layout, b [16, N] stored [k][n].
template <int kN>
struct Wgmma;

#define HFB_UNPACK(...) __VA_ARGS__
#define HFB_ACC_8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define HFB_ACC_32(i) HFB_ACC_8(i), HFB_ACC_8(i + 8), HFB_ACC_8(i + 16), HFB_ACC_8(i + 24)
#define HFB_D_0_31                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HFB_D_32_39 "%32, %33, %34, %35, %36, %37, %38, %39"
#define HFB_D_32_63                                                                            \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HFB_D_64_87                                                                            \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87"
#define HFB_D_64_127                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// kN, type, accumulator names, accumulator operands, names of the operands after them.
#define HFB_WGMMA_SHARED(kN, TYPE, NAMES, ACC, A, B, ADD, TRANS_B)                                 \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD                                           \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." TYPE "." TYPE " {" NAMES "}, " A \
               ", " B ", add, 1, 1, 0, " TRANS_B "; }"                                             \
               : ACC                                                                               \
               : "l"(a), "l"(b), "r"(add), "n"(kTransB ? 1 : 0))
#define HFB_WGMMA_REGISTERS(kN, TYPE, NAMES, ACC, A0, A1, A2, A3, B)                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." TYPE "." TYPE " {" NAMES \
               "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", 1, 1, 1, 1;"                   \
               : ACC                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define HFB_WGMMA(kN, NAMES, ACC, X0, X1, X2, X3, X4)                                      \
  template <>                                                                              \
  struct Wgmma<kN> {                                                                       \
    template <typename T, bool kTransB = false>                                            \
    __device__ __forceinline__ static void multiply_shared(float (&d)[kN / 2], uint64_t a, \
                                                           uint64_t b, int add) {          \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                    \
        HFB_WGMMA_SHARED(kN, "bf16", NAMES, HFB_UNPACK ACC, X0, X1, X2, X3);               \
      } else {                                                                             \
        HFB_WGMMA_SHARED(kN, "f16", NAMES, HFB_UNPACK ACC, X0, X1, X2, X3);                \
      }                                                                                    \
    }                                                                                      \
    template <typename T>                                                                  \
    __device__ __forceinline__ static void multiply_registers(float (&d)[kN / 2],          \
                                                              const uint32_t (&a)[4],      \
                                                              uint64_t b) {                \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                    \
        HFB_WGMMA_REGISTERS(kN, "bf16", NAMES, HFB_UNPACK ACC, X0, X1, X2, X3, X4);        \
      } else {                                                                             \
        HFB_WGMMA_REGISTERS(kN, "f16", NAMES, HFB_UNPACK ACC, X0, X1, X2, X3, X4);         \
      }                                                                                    \
    }                                                                                      \
  };
HFB_WGMMA(64, HFB_D_0_31, (HFB_ACC_32(0)), "%32", "%33", "%34", "%35", "%36")
HFB_WGMMA(80, HFB_D_0_31 ", " HFB_D_32_39, (HFB_ACC_32(0), HFB_ACC_8(32)), "%40", "%41", "%42",
          "%43", "%44")
HFB_WGMMA(128, HFB_D_0_31 ", " HFB_D_32_63, (HFB_ACC_32(0), HFB_ACC_32(32)), "%64", "%65", "%66",
          "%67", "%68")
HFB_WGMMA(176, HFB_D_0_31 ", " HFB_D_32_63 ", " HFB_D_64_87,
          (HFB_ACC_32(0), HFB_ACC_32(32), HFB_ACC_8(64), HFB_ACC_8(72), HFB_ACC_8(80)), "%88",
          "%89", "%90", "%91", "%92")
HFB_WGMMA(256, HFB_D_0_31 ", " HFB_D_32_63 ", " HFB_D_64_127,
          (HFB_ACC_32(0), HFB_ACC_32(32), HFB_ACC_32(64), HFB_ACC_32(96)), "%128", "%129", "%130",
          "%131", "%132")
#undef HFB_WGMMA
#undef HFB_WGMMA_REGISTERS
#undef HFB_WGMMA_SHARED
#undef HFB_D_64_127
#undef HFB_D_64_87
#undef HFB_D_32_63
#undef HFB_D_32_39
#undef HFB_D_0_31
#undef HFB_ACC_32
#undef HFB_ACC_8
#undef HFB_UNPACK

}  // namespace hfb

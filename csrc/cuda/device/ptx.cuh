// PTX wrappers of the sm_80 instruction set: cp.async, ldmatrix, mma.sync, ex2, packing.
// PTX ISA sections: 9.7.9.25 (cp.async), 9.7.14 (mma, ldmatrix), 9.7.3 (ex2), 9.7.13 (red).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hfb {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes global -> shared, asynchronous; valid = false writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t s_dst, const void* g_src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s_dst), "l"(g_src),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void st_shared_16(uint32_t s_dst, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(s_dst), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 16-bit matrices; lane l gives the row address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t s_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t s_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_address)
               : "memory");
}

// Stores four 8x8 16-bit matrices transposed (sm_90); addresses as for ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t s_address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8]; fp32 accumulation. Lane l holds of d: rows l / 4 and l / 4 + 8,
// columns 2 (l % 4), + 1.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float* d, const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x; ex2.approx has 2 ulp and returns +0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp32 rounded to T in one register, lo in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Adds four fp32 to 16-byte aligned global memory, one transaction from sm_90 on.
__device__ __forceinline__ void red_add_4(float* g_dst, const float* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(g_dst), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(g_dst + i, x[i]);
#endif
}

// Sum and maximum over the four lanes that share a row of an mma accumulator.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// 4 x 4 transpose of words inside the four lanes of a quad: word i of lane q becomes word q of lane
// i.
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[4], int quad_lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool odd = quad_lane & 1, high = quad_lane & 2;
  uint32_t a = __shfl_xor_sync(kAll, odd ? words[0] : words[1], 1);
  uint32_t b = __shfl_xor_sync(kAll, odd ? words[2] : words[3], 1);
  (odd ? words[0] : words[1]) = a;
  (odd ? words[2] : words[3]) = b;
  a = __shfl_xor_sync(kAll, high ? words[0] : words[2], 2);
  b = __shfl_xor_sync(kAll, high ? words[1] : words[3], 2);
  (high ? words[0] : words[2]) = a;
  (high ? words[1] : words[3]) = b;
}

}  // namespace hfb

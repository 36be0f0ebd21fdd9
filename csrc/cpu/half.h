// fp16 and bf16 as the CPU kernels store them; arithmetic is always in fp32.
#pragma once

#include <cstdint>
#include <cstring>

namespace hfb {

using Half = _Float16;
struct BFloat16 {
  uint16_t bits;
};

inline float to_compute(Half x) { return static_cast<float>(x); }
inline float to_compute(float x) { return x; }
inline double to_compute(double x) { return x; }
inline float to_compute(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

inline Half to_half(double x) { return static_cast<Half>(static_cast<float>(x)); }

// Round to nearest even; NaN becomes the quiet NaN of torch, 0x7fc0.
inline BFloat16 to_bfloat16(double x) {
  const float y = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &y, sizeof(bits));
  if (y != y) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace hfb

// The number formats of operands, outputs and scale factors: decode to FP32, encode from FP32.
// Written without branches, so that the host compiler vectorises loops over them.
//
//   e4m3, e5m2, e2m1   OCP MX v1.0; encode rounds to nearest even and saturates to the largest finite value
//   e8m0               2^(byte-127), 0xFF is NaN; encode rounds toward +inf (decisions: block quantiser)
//   bf16, fp16         encode rounds to nearest even
#pragma once

#include "portable.h"

namespace cudnn_grouped {

inline constexpr float kMaxE4M3 = 448.f, kMaxE5M2 = 57344.f, kMaxE2M1 = 6.f;

CG_HD bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

// Small floats with one sign bit, kMantissa mantissa bits and exponent bias kBias, below a byte or two.
// A subnormal code is decoded as (1 + m/2^k) * 2^(1-bias) minus 2^(1-bias), which needs no FP32 subnormals.
template <int kMantissa, int kBias>
CG_HD float decode_magnitude(uint32_t magnitude) {
  constexpr uint32_t kOne = 1u << kMantissa;
  constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  bool const subnormal = magnitude < kOne;
  uint32_t const bits = ((magnitude + (subnormal ? kOne : 0u)) << (23 - kMantissa)) + kRebias;
  float const lift = bits_float(subnormal ? (uint32_t(128 - kBias) << 23) : 0u);
  return bits_float(bits) - lift;
}

// Nearest-even code of a finite magnitude, unsaturated: the caller clamps.
template <int kMantissa, int kBias>
CG_HD uint32_t encode_magnitude(uint32_t bits) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = uint32_t(128 - kBias) << 23;
  uint32_t const normal =
      ((bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1)) >> kShift) - (uint32_t(127 - kBias) << kMantissa);
  // value / 2^(1-bias-mantissa) is the code of a subnormal; adding 2^23 makes the FPU round it to an integer.
  float const unit = bits_float(uint32_t(127 + kBias + kMantissa - 1) << 23);
  uint32_t const subnormal = float_bits(bits_float(bits) * unit + 8388608.f) & 0x7fffffu;
  return bits < kSmallestNormal ? subnormal : normal;
}

CG_HD float with_sign(float magnitude, uint32_t sign_bit) { return bits_float(float_bits(magnitude) | sign_bit); }

CG_HD float decode_e4m3(uint32_t byte) {
  uint32_t const magnitude = byte & 0x7f;
  float const value = magnitude == 0x7f ? bits_float(0x7fc00000u) : decode_magnitude<3, 7>(magnitude);
  return with_sign(value, (byte & 0x80) << 24);
}

CG_HD float decode_e5m2(uint32_t byte) {
  uint32_t const magnitude = byte & 0x7f;
  float const finite = decode_magnitude<2, 15>(magnitude);
  float const value = magnitude >= 0x7c ? bits_float(0x7f800000u | ((magnitude & 3u) << 21)) : finite;
  return with_sign(value, (byte & 0x80) << 24);
}

CG_HD float decode_e2m1(uint32_t nibble) { return with_sign(decode_magnitude<1, 1>(nibble & 7), (nibble & 8) << 28); }

CG_HD float decode_e8m0(uint32_t byte) {
  uint32_t const bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23;
  return bits_float(bits);
}

CG_HD float decode_bf16(uint32_t half) { return bits_float(half << 16); }

CG_HD float decode_fp16(uint32_t half) {
  uint32_t const magnitude = half & 0x7fff;
  float const finite = decode_magnitude<10, 15>(magnitude);
  float const value = magnitude >= 0x7c00 ? bits_float(0x7f800000u | ((magnitude & 0x3ffu) << 13)) : finite;
  return with_sign(value, (half & 0x8000) << 16);
}

template <int kMantissa, int kBias, uint32_t kLargest, uint32_t kNaN, int kSignShift>
CG_HD uint32_t encode_saturating(float x) {
  uint32_t const u = float_bits(x), bits = u & 0x7fffffffu;
  uint32_t const code = encode_magnitude<kMantissa, kBias>(bits);
  // Infinity is above every finite magnitude, so it saturates with them.
  uint32_t const clamped = code > kLargest ? kLargest : code;
  return is_nan_bits(u) ? kNaN : clamped | ((u >> 31) << kSignShift);
}

CG_HD uint32_t encode_e4m3(float x) { return encode_saturating<3, 7, 0x7e, 0x7f, 7>(x); }
CG_HD uint32_t encode_e5m2(float x) { return encode_saturating<2, 15, 0x7b, 0x7f, 7>(x); }
CG_HD uint32_t encode_e2m1(float x) { return encode_saturating<1, 1, 0x7, 0x7, 3>(x); }

// The smallest power of two at or above v. v <= 2^-127 (zero and negatives too) gives 0x00, v > 2^127 gives 0xFE.
CG_HD uint32_t encode_e8m0_up(float v) {
  uint32_t const u = float_bits(v);
  uint32_t const up = (u + 0x7fffffu) >> 23;
  uint32_t const finite = u <= 0x00400000u || u >= 0x80000000u ? 0u : up > 254u ? 254u : up;
  return is_nan_bits(u) ? 255u : finite;
}

CG_HD uint32_t encode_bf16(float x) {
  uint32_t const u = float_bits(x);
  return is_nan_bits(u) ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
}

CG_HD uint32_t encode_fp16(float x) {
  uint32_t const u = float_bits(x), bits = u & 0x7fffffffu;
  uint32_t const code = encode_magnitude<10, 15>(bits);
  uint32_t const clamped = code > 0x7c00u ? 0x7c00u : code;
  return is_nan_bits(u) ? 0x7e00u : clamped | ((u >> 31) << 15);
}

}  // namespace cudnn_grouped

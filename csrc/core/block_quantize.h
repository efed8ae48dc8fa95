// The block quantiser's arithmetic (decisions: "Block quantiser"), the same for rows, columns and every engine.
//   scale:   v = (amax * r) * norm, r = FP32(1/largest); two FP32 multiplies, then the scale format's rounding
//   data:    encode(x * factor), factor = norm / scale
//   reader:  x ~ data * scale / norm
#pragma once

#include "elementary.h"
#include "number_formats.h"

namespace cudnn_grouped {

// Magnitudes are compared as bit patterns: NaN is above infinity there, so a maximum propagates it.
CG_HD uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

CG_HD float scale_value(float amax, float reciprocal_largest, float norm) { return (amax * reciprocal_largest) * norm; }

// norm / 2^(byte-127) by exponent arithmetic; a magnitude over FLT_MAX becomes FLT_MAX.
CG_HD float e8m0_factor(uint32_t byte, float norm) {
  int32_t const exponent = (254 - int32_t(byte)) * (1 << 23), least = 0x00400000;
  float const power = bits_float(byte > 254 ? 0x7fc00000u : uint32_t(exponent > least ? exponent : least));
  constexpr float kMax = 3.4028234664e38f;
  return at_most(at_least(norm * power, -kMax), kMax);
}

// norm / scale for an e4m3 scale (NVFP4). A scale of zero reads back as zero, so its data is zero.
CG_HD float e4m3_factor(uint32_t byte, float norm) {
  float const scale = decode_e4m3(byte);
  return scale == 0.f ? 0.f : norm / scale;
}

// The data formats of the quantiser as types.
struct E4M3 {
  static constexpr float kLargest = kMaxE4M3, kReciprocal = 1.f / 448.f;
  CG_HD static uint32_t encode(float x) { return encode_e4m3(x); }
  CG_HD static float decode(uint32_t code) { return decode_e4m3(code); }
};
struct E5M2 {
  static constexpr float kLargest = kMaxE5M2, kReciprocal = 1.f / 57344.f;
  CG_HD static uint32_t encode(float x) { return encode_e5m2(x); }
  CG_HD static float decode(uint32_t code) { return decode_e5m2(code); }
};
struct E2M1 {
  static constexpr float kLargest = kMaxE2M1, kReciprocal = 1.f / 6.f;
  CG_HD static uint32_t encode(float x) { return encode_e2m1(x); }
  CG_HD static float decode(uint32_t code) { return decode_e2m1(code); }
};

}  // namespace cudnn_grouped

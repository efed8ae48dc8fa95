// Decoding and encoding of the narrow floating-point formats. The simulator has its own, so that it shares nothing with
// the code that it judges. PTX ISA, "Alternate floating-point data formats".
#pragma once
#include <cmath>

#include "base.h"

namespace simulator {

// A format of 1 sign bit, `exponent` bits and `mantissa` bits, without infinities where `finite`.
struct Format {
  int exponent, mantissa, bias;
  float max;
  bool has_nan, has_infinity;
};
constexpr Format kE4M3{4, 3, 7, 448.f, true, false}, kE5M2{5, 2, 15, 57344.f, true, true};
constexpr Format kE2M3{2, 3, 1, 7.5f, false, false}, kE3M2{3, 2, 3, 28.f, false, false}, kE2M1{2, 1, 1, 6.f, false, false};

inline float decode(Format f, u32 bits) {
  u32 const mantissa = bits & ((1u << f.mantissa) - 1), exponent = bits >> f.mantissa & ((1u << f.exponent) - 1);
  bool const negative = bits >> (f.mantissa + f.exponent) & 1;
  u32 const top = (1u << f.exponent) - 1;
  float value;
  if (f.has_infinity && exponent == top)
    value = mantissa ? NAN : INFINITY;
  else if (f.has_nan && !f.has_infinity && exponent == top && mantissa == (1u << f.mantissa) - 1)
    value = NAN;
  else if (exponent)
    value = std::ldexp(1.f + float(mantissa) / float(1u << f.mantissa), int(exponent) - f.bias);
  else
    value = std::ldexp(float(mantissa) / float(1u << f.mantissa), 1 - f.bias);
  return negative ? -value : value;
}

// Round to nearest even, saturating to the largest finite value. NaN becomes the canonical NaN; of formats without one,
// the largest positive value (PTX ISA, cvt .satfinite).
inline u32 encode(Format f, float value) {
  u32 const bits = bit_cast<u32>(value), magnitude = bits & 0x7fffffff;
  u32 const top = (1u << (f.exponent + f.mantissa)) - 1;  // all ones but the sign
  u32 const largest = f.has_infinity ? (((1u << f.exponent) - 1) << f.mantissa) - 1 : f.has_nan ? top - 1 : top;
  int const shift = 23 - f.mantissa;
  u32 const rounded = magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
  u32 const normal = (rounded >> shift) - (u32(127 - f.bias) << f.mantissa);
  // Below the normal range, adding this number leaves the units of the smallest step in the lowest bits, rounded.
  float const anchor = bit_cast<float>(u32(127 + 23 + 1 - f.bias - f.mantissa) << 23);
  u32 const subnormal = bit_cast<u32>(bit_cast<float>(magnitude) + anchor) - bit_cast<u32>(anchor);
  u32 const smallest_normal = u32(128 - f.bias) << 23;
  u32 code = magnitude < smallest_normal ? subnormal : normal < largest && magnitude < 0x7f800000 ? normal : largest;
  code |= (bits >> 31) << (f.exponent + f.mantissa);
  return magnitude > 0x7f800000 ? top : code;
}

inline float decode_e8m0(u8 code) { return code == 255 ? NAN : std::ldexp(1.f, int(code) - 127); }

// cvt.rp / cvt.rz to ue8m0: a power of two, up or down; NaN gives 255, what is not above zero gives 0.
inline u8 encode_e8m0(float value, bool up) {
  if (std::isnan(value)) return 255;
  u32 const bits = bit_cast<u32>(std::fabs(value));
  u32 exponent = bits >> 23, mantissa = bits & 0x7fffff;
  if (exponent == 255) return 254;
  if (exponent == 0) return up && mantissa > 0x400000 ? 1 : 0;
  if (up && mantissa) ++exponent;
  return u8(exponent > 254 ? 254 : exponent);
}

inline float bf16_to_float(u16 bits) { return bit_cast<float>(u32(bits) << 16); }
inline float f16_to_float(u16 bits) { return float(bit_cast<_Float16>(bits)); }

enum class Rounding : u8 { kNearest, kZero, kDown, kUp };

inline u16 float_to_bf16(float value, Rounding rounding = Rounding::kNearest) {
  u32 const bits = bit_cast<u32>(value);
  if (std::isnan(value)) return 0x7fff;
  if (rounding == Rounding::kZero) return u16(bits >> 16);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u16 float_to_f16(float value, Rounding rounding = Rounding::kNearest) {
  if (std::isnan(value)) return 0x7fff;
  _Float16 h = _Float16(value);
  if (rounding == Rounding::kZero && std::fabs(float(h)) > std::fabs(value)) h = bit_cast<_Float16>(u16(bit_cast<u16>(h) - 1));
  return bit_cast<u16>(h);
}

}  // namespace simulator

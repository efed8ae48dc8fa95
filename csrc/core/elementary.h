// exp, tanh and the logistic function in FP32. Host code is branch-free (it vectorises) and good to about 2 ulp.
// Device code uses the approximate instructions (PTX ISA, "ex2", "rcp"): the rounding of x log2(e) alone gives exp a
// relative error of |x| 2^-24, to which the instructions add at most 4 * 2^-24.
#pragma once

#include "portable.h"

namespace cudnn_grouped {

#if defined(__CUDA_ARCH__)
CG_HD float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
CG_HD float reciprocal(float x) { return 1.f / x; }

// exp(x) = power * (1 + fraction), |x| <= 127.49 ln2; Cody-Waite reduction, then the Taylor series to r^7 (|r| <=
// ln2/2).
struct ExpParts {
  float power, fraction;
};
CG_HD ExpParts exp_parts(float x) {
  float const shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the low bits now hold the nearest integer
  float const n = shifted - 12582912.f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float s = 1.f / 5040;
  s = s * r + 1.f / 720;
  s = s * r + 1.f / 120;
  s = s * r + 1.f / 24;
  s = s * r + 1.f / 6;
  s = s * r + 0.5f;
  float const power = bits_float((float_bits(shifted) << 23) + 0x3f800000u);
  return {power, r + r * r * s};
}
#endif

inline constexpr float kLog2e = 1.44269504f;
#if defined(__CUDACC__)
__device__ __forceinline__ float exponential_base_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
#if defined(__CUDA_ARCH__)
CG_HD float exponential(float x) { return exponential_base_2(x * kLog2e); }
#else
CG_HD float exponential(float x) {
  // Below -87 the result is used only as 1 + e: zero is right.
  float const inside = x > 88.37f ? 88.37f : x < -87.f ? -87.f : x;
  ExpParts const e = exp_parts(inside);
  float const value = e.power + e.power * e.fraction;
  return x > 88.37f ? bits_float(0x7f800000u) : x < -87.f ? 0.f : value;
}
#endif
CG_HD float exponential_of_negative(float x) { return exponential(-x); }

// The smaller, the larger of two; a NaN of x stays one.
CG_HD float at_most(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  return y;
#else
  return x > bound ? bound : x;
#endif
}
CG_HD float at_least(float x, float bound) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(bound));
  return y;
#else
  return x < bound ? bound : x;
#endif
}

// max(x, 0); a NaN stays one.
CG_HD float positive_part(float x) { return x <= 0.f ? 0.f : x; }

// value, or zero where x is beyond a bound, or where a clamp has changed it.
CG_HD float zero_above(float value, float x, float high) { return x > high ? 0.f : value; }
CG_HD float zero_where_clamped(float value, float x, float clamped) {
  bool const changed = (clamped < x) | (clamped > x);
  return changed ? 0.f : value;
}

CG_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
CG_HD float signed_as(float x, float sign) { return bits_float(float_bits(x) | (float_bits(sign) & 0x80000000u)); }

// From here on V is float, or a type with float's operators and functions that holds several values
// (csrc/sm100/pair.h).

template <class V>
CG_HD auto logistic(V x) {
  return reciprocal(1.f + exponential_of_negative(x));
}

template <class V>
struct Tanh {
  V value, derivative;
};

// Of a tanh's values.
struct Bound {
  float value = 1.f, exponent = 2 * kLog2e;  // exponent: 2 log2(e) / value

  Bound() = default;
  CG_HD Bound(float value) : value(value), exponent(2 * kLog2e / value) {}
};

// bound * tanh(x / bound), which stays within the bound, and its derivative d.
#if defined(__CUDACC__)
// Of two magnitudes the smaller with a's sign; b is positive. NaN stays.
__device__ __forceinline__ float smaller_signed_as_first(float a, float b) {
  float r;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// 2^-|x|
__device__ __forceinline__ float power_of_magnitude(float x) { return exponential_base_2(-fabsf(x)); }

// With z = x / bound, e = exp(-2|z|) and r = 2 / (1 + e):
//   |tanh z| = r - 1, to a few 2^-24 of one     d = e r^2     tanh z = z Q(d), Q a polynomial
// Q is good to 2^-22 where |tanh z| is below 0.4, and too large elsewhere: the smaller of the two is taken. e is made a
// little smaller, so that r - 1 is not the smaller one where it has lost its digits.
// exponent: 2 log2(e) z; x is the product of value and factor.
template <class V>
__device__ __forceinline__ Tanh<V> bounded_tanh_of(V exponent, V value, float factor, float bound) {
  constexpr float kLess = 1 - 12 / 16777216.f;
  constexpr float kQ[] = {0.5208096f, 0.68317455f, -0.26215205f, 0.05816813f};
  V const e = power_of_magnitude(exponent) * V(kLess), r = reciprocal(V(0.5f) * e + V(0.5f)), d = e * r * r;
  V const large = r * V(bound) + V(-bound);
  V q = kQ[3] * factor;
#pragma unroll
  for (int i = 2; i >= 0; --i) q = q * d + V(kQ[i] * factor);
  return {smaller_signed_as_first(value * q, large), d};
}
#endif
CG_HD Tanh<float> bounded_tanh(float x, Bound const& bound) {
#if defined(__CUDA_ARCH__)
  return bounded_tanh_of(x * bound.exponent, x, 1.f, bound.value);
#else
  // With e = exp(-2|z|), tanh = (1 - e) / (1 + e) and d = 4 e / (1 + e)^2; 1 - e is formed without cancellation.
  float const z = x / bound.value, twice = 2.f * magnitude(z);
  bool const saturated = twice > 87.f;
  ExpParts const parts = exp_parts(saturated ? -87.f : -twice);
  float const e = saturated ? 0.f : parts.power + parts.power * parts.fraction;
  float const one_minus_e = saturated ? 1.f : (1.f - parts.power) - parts.power * parts.fraction;
  float const r = reciprocal(1.f + e);
  return {bound.value * signed_as(one_minus_e * r, z), 4.f * e * r * r};
#endif
}

}  // namespace cudnn_grouped

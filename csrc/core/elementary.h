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

// a / b; for a b that many share, the device takes its reciprocal once.
CG_HD float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return a * reciprocal(b);
#else
  return a / b;
#endif
}

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
// tanh and its derivative 1 - tanh^2, both to relative accuracy: with e = exp(-2|x|),
// tanh = (1 - e) / (1 + e) and the derivative is 4 e / (1 + e)^2. 1 - e is formed without cancellation.
CG_HD Tanh<float> tanh_with_derivative(float x) {
  float const twice = 2.f * magnitude(x);
#if defined(__CUDA_ARCH__)
  float const e = exponential(-twice);
  // Below 1/2 the Taylor series of 1 - exp(-t), to t^8.
  float s = -1.f / 40320;
  s = s * twice + 1.f / 5040;
  s = s * twice - 1.f / 720;
  s = s * twice + 1.f / 120;
  s = s * twice - 1.f / 24;
  s = s * twice + 1.f / 6;
  s = s * twice - 0.5f;
  float const one_minus_e = twice < 0.5f ? twice + twice * twice * s : 1.f - e;
#else
  bool const saturated = twice > 87.f;
  ExpParts const parts = exp_parts(saturated ? -87.f : -twice);
  float const e = saturated ? 0.f : parts.power + parts.power * parts.fraction;
  float const one_minus_e = saturated ? 1.f : (1.f - parts.power) - parts.power * parts.fraction;
#endif
  float const r = reciprocal(1.f + e);
  return {signed_as(one_minus_e * r, x), 4.f * e * r * r};
}

// bound * tanh(x / bound), which stays within the bound, and its derivative.
CG_HD Tanh<float> bounded_tanh(float x, float bound) {
  Tanh<float> const t = tanh_with_derivative(quotient(x, bound));
  return {bound * t.value, t.derivative};
}

}  // namespace cudnn_grouped

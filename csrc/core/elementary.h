// exp, tanh and the logistic function in FP32. Host code is branch-free (it vectorises) and good to about 2 ulp;
// device code uses the CUDA math library.
#pragma once

#include "portable.h"

#if defined(__CUDA_ARCH__)
#include <cuda_runtime.h>
#endif

namespace cudnn_grouped {

#if !defined(__CUDA_ARCH__)
// exp(x) = power * (1 + fraction), |x| <= 127.49 ln2; Cody-Waite reduction, then the Taylor series to r^7 (|r| <= ln2/2).
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

CG_HD float exponential(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  // Below -87 the result is used only as 1 + e: zero is right.
  float const inside = x > 88.37f ? 88.37f : x < -87.f ? -87.f : x;
  ExpParts const e = exp_parts(inside);
  float const value = e.power + e.power * e.fraction;
  return x > 88.37f ? bits_float(0x7f800000u) : x < -87.f ? 0.f : value;
#endif
}

CG_HD float logistic(float x) { return 1.f / (1.f + exponential(-x)); }

// tanh and its derivative 1 - tanh^2, both to relative accuracy: with m = exp(2|x|) - 1,
// tanh = m / (m + 2) and the derivative is 4 (m + 1) / (m + 2)^2.
struct Tanh {
  float value, derivative;
};
CG_HD Tanh tanh_with_derivative(float x) {
  uint32_t const sign = float_bits(x) & 0x80000000u;
  float const twice = 2.f * bits_float(float_bits(x) & 0x7fffffffu);
  float const inside = twice > 88.f ? 88.f : twice;
#if defined(__CUDA_ARCH__)
  float const m = expm1f(inside);
#else
  ExpParts const e = exp_parts(inside);
  float const m = (e.power - 1.f) + e.power * e.fraction;
#endif
  float const inverse = 1.f / (m + 2.f);
  float const derivative = 4.f * (m + 1.f) * inverse * inverse;
  return {bits_float(float_bits(m * inverse) | sign), twice > 88.f ? 0.f : derivative};
}

}  // namespace cudnn_grouped

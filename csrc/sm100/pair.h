// Two FP32 values in one packed operation (PTX ISA, "add.f32x2" and its kin): what the activations compute with here.
// The compiler contracts a packed product and sum, as it does for single values.
#pragma once

#include "../core/elementary.h"
#include "../cuda/inline.h"

namespace cudnn_grouped::sm100 {

struct Pair {
  float lo, hi;

  Pair() = default;
  __device__ __forceinline__ Pair(float both) : lo(both), hi(both) {}
  __device__ __forceinline__ Pair(float lo, float hi) : lo(lo), hi(hi) {}

#define CG_PACKED(OPERATOR, INSTRUCTION)                                              \
  friend __device__ __forceinline__ Pair operator OPERATOR(Pair a, Pair b) {          \
    Pair r;                                                                           \
    asm("{ .reg .b64 a, b, r; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; " INSTRUCTION \
        ".f32x2 r, a, b; mov.b64 {%0, %1}, r; }"                                      \
        : "=f"(r.lo), "=f"(r.hi)                                                      \
        : "f"(a.lo), "f"(a.hi), "f"(b.lo), "f"(b.hi));                                \
    return r;                                                                         \
  }
  CG_PACKED(*, "mul")
  CG_PACKED(+, "add")
#undef CG_PACKED
  // There is no packed subtraction: a product with -1 is exact.
  friend __device__ __forceinline__ Pair operator-(Pair a, Pair b) { return b * Pair(-1.f) + a; }
};
CG_DEVICE Pair& operator+=(Pair& a, Pair b) { return a = a + b; }
CG_DEVICE Pair& operator*=(Pair& a, Pair b) { return a = a * b; }

// The functions of core/elementary.h that single values need instructions for.
CG_DEVICE Pair reciprocal(Pair x) { return {cudnn_grouped::reciprocal(x.lo), cudnn_grouped::reciprocal(x.hi)}; }
CG_DEVICE Pair at_most(Pair x, float bound) {
  return {cudnn_grouped::at_most(x.lo, bound), cudnn_grouped::at_most(x.hi, bound)};
}
CG_DEVICE Pair at_least(Pair x, float bound) {
  return {cudnn_grouped::at_least(x.lo, bound), cudnn_grouped::at_least(x.hi, bound)};
}
CG_DEVICE Pair positive_part(Pair x) {
  return {cudnn_grouped::positive_part(x.lo), cudnn_grouped::positive_part(x.hi)};
}
CG_DEVICE Pair zero_above(Pair value, Pair x, float high) {
  return {cudnn_grouped::zero_above(value.lo, x.lo, high), cudnn_grouped::zero_above(value.hi, x.hi, high)};
}
CG_DEVICE Pair zero_where_clamped(Pair value, Pair x, Pair clamped) {
  return {cudnn_grouped::zero_where_clamped(value.lo, x.lo, clamped.lo),
          cudnn_grouped::zero_where_clamped(value.hi, x.hi, clamped.hi)};
}

// A product that is yet to be formed. What only an exponent is made of needs none of its own.
struct Scaled {
  Pair value;
  float factor;

  __device__ __forceinline__ operator Pair() const { return value * Pair(factor); }
};
// The smaller of two magnitudes with a's sign; b is positive. NaN stays.
CG_DEVICE float smaller_signed_as_first(float a, float b) {
  float r;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
CG_DEVICE Pair times(Pair x, float k) { return x * Pair(k); }
// The factor stays finite: zero times it is zero.
CG_DEVICE Pair times(Scaled x, float k) {
  return x.value * Pair(smaller_signed_as_first(x.factor * k, 3.4028234664e38f));
}

template <class X>
CG_DEVICE Pair exponential_of_negative(X x) {
  Pair const y = times(x, -kLog2e);
  return {exponential_base_2(y.lo), exponential_base_2(y.hi)};
}

// bound * tanh(x / bound) and its derivative d. With z = x / bound, e = exp(-2|z|) and r = 2 / (1 + e):
//   |tanh z| = r - 1, to a few 2^-24 of one     d = e r^2     tanh z = z Q(d), Q a polynomial
// Q is good to 2^-22 where |tanh z| is below 0.4, and too large elsewhere: the smaller of the two is taken. e is made a
// little smaller, so that r - 1 is not the smaller one where it has lost its digits.
template <class X>
CG_DEVICE Tanh<Pair> bounded_tanh(X x, float bound) {
  constexpr float kExponent = 2 * kLog2e, kLess = 1 - 12 / 16777216.f;
  constexpr float kQ[] = {0.5208096f, 0.68317455f, -0.26215205f, 0.05816813f};
  Pair const y = times(x, kExponent * cudnn_grouped::reciprocal(bound));
  Pair const e = Pair(exponential_base_2(-fabsf(y.lo)), exponential_base_2(-fabsf(y.hi))) * Pair(kLess);
  Pair const r = reciprocal(0.5f * e + 0.5f), derivative = e * r * r;
  Pair const large = r * Pair(bound) + Pair(-bound);
  float const unit = bound * (1 / kExponent);
  Pair q = kQ[3] * unit;
#pragma unroll
  for (int i = 2; i >= 0; --i) q = q * derivative + Pair(kQ[i] * unit);
  Pair const small = y * q;
  return {{smaller_signed_as_first(small.lo, large.lo), smaller_signed_as_first(small.hi, large.hi)}, derivative};
}

}  // namespace cudnn_grouped::sm100

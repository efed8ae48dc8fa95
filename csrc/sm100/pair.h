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
// The factor stays finite: zero times it is zero. Where factor * k is beyond FP32, the exponent of an x.value below
// 2^-122 is too small for its tanh to be saturated; an infinite factor makes every tanh a NaN.
CG_DEVICE Pair times(Scaled x, float k) {
  return x.value * Pair(cudnn_grouped::smaller_signed_as_first(x.factor * k, 3.4028234664e38f));
}

CG_DEVICE Pair exponential_of_negative(Scaled x) {
  Pair const y = times(x, -kLog2e);
  return {exponential_base_2(y.lo), exponential_base_2(y.hi)};
}
CG_DEVICE Pair exponential_of_negative(Pair x) { return exponential_of_negative(Scaled{x, 1.f}); }
CG_DEVICE Pair power_of_magnitude(Pair x) {
  return {cudnn_grouped::power_of_magnitude(x.lo), cudnn_grouped::power_of_magnitude(x.hi)};
}
CG_DEVICE Pair smaller_signed_as_first(Pair a, Pair b) {
  return {cudnn_grouped::smaller_signed_as_first(a.lo, b.lo), cudnn_grouped::smaller_signed_as_first(a.hi, b.hi)};
}
CG_DEVICE Tanh<Pair> bounded_tanh(Scaled x, Bound const& bound) {
  return bounded_tanh_of(times(x, bound.exponent), x.value, x.factor, bound.value);
}
CG_DEVICE Tanh<Pair> bounded_tanh(Pair x, Bound const& bound) { return bounded_tanh(Scaled{x, 1.f}, bound); }

}  // namespace cudnn_grouped::sm100

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
CG_DEVICE Pair exponential_of_negative(Pair x) {
  Pair const y = x * Pair(-kLog2e);
  return {exponential_base_2(y.lo), exponential_base_2(y.hi)};
}
CG_DEVICE Pair quotient(Pair a, float b) { return a * Pair(cudnn_grouped::reciprocal(b)); }
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
CG_DEVICE Pair magnitude(Pair x) { return {cudnn_grouped::magnitude(x.lo), cudnn_grouped::magnitude(x.hi)}; }
CG_DEVICE Pair signed_as(Pair x, Pair sign) {
  return {cudnn_grouped::signed_as(x.lo, sign.lo), cudnn_grouped::signed_as(x.hi, sign.hi)};
}

// As for single values, in fewer instructions: below 1/4, where 1 - e loses digits, a polynomial gives tanh(x) / x - 1
// in x^2, to 4e-9. exp(-1/2) is where |x| is 1/4.
CG_DEVICE Tanh<Pair> tanh_with_derivative(Pair x) {
  Pair const y = magnitude(x) * Pair(-2.f * kLog2e), e(exponential_base_2(y.lo), exponential_base_2(y.hi));
  Pair const r = reciprocal(1.f + e), twice_r = r + r, square = x * x;
  Pair const small = x + x * (square * (-0.3333323896f + square * (0.1332412809f + square * -0.0514182597f)));
  Pair const large = signed_as((1.f - e) * r, x);
  constexpr float kBound = 0.60653066f;
  return {{e.lo < kBound ? large.lo : small.lo, e.hi < kBound ? large.hi : small.hi}, e * twice_r * twice_r};
}

}  // namespace cudnn_grouped::sm100

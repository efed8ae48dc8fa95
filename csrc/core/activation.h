// The activations: forward value, derivative, dprob term. All engines use these structs; adding one is one struct here.
//
// kWidth is the number of saved columns a GEMM column meets: 1 for squared ReLU, 2 (gate, up) for the gated ones.
// backward(r, x, prob): r is the GEMM's value (alpha applied), x the saved pre-activation columns (beta applied).
// It returns the gradients of x, times prob, and the column's term of dprob (which has no prob in it).
// A NaN in any operand reaches the gradients it feeds.
#pragma once

#include "elementary.h"

namespace cudnn_grouped {

template <int kWidth>
struct Gradient {
  float x[kWidth];
  float prob_term;
};

// The plain GEMM. Backward, it gives row sums of r * c and column sums of prob * r.
struct Identity {
  static constexpr int kWidth = 1;
  CG_HD float forward(float const (&x)[1]) const { return x[0]; }
  CG_HD Gradient<1> backward(float r, float const (&x)[1], float prob) const { return {{r * prob}, r * x[0]}; }
};

// dsrelu.txt, "Equations"; decisions F1. With a soft clamp s, relu(x) becomes b = s tanh(relu(x)/s).
template <bool kClamped>
struct SquaredReLU {
  static constexpr int kWidth = 1;
  float clamp;              // s
  bool c_is_preactivation;  // c_role

  struct Relu {
    float value, derivative_factor;
  };
  CG_HD Relu relu(float x) const {
    float const positive = x <= 0.f ? 0.f : x;
    if constexpr (!kClamped) return {positive, 1.f};
    Tanh const t = tanh_with_derivative(quotient(positive, clamp));
    return {clamp * t.value, t.derivative};
  }
  CG_HD float forward(float const (&x)[1]) const {
    float const b = relu(x[0]).value;
    return b * b;
  }
  CG_HD Gradient<1> backward(float r, float const (&c)[1], float prob) const {
    Relu const b = relu(c_is_preactivation ? c[0] : r);
    float const upstream = c_is_preactivation ? r : c[0];
    return {{prob * 2.f * b.value * b.derivative_factor * upstream}, b.value * b.value * upstream};
  }
};

// dglu.txt, "For dSwiGLU".
struct SwiGLU {
  static constexpr int kWidth = 2;
  CG_HD float forward(float const (&x)[2]) const { return x[0] * logistic(x[0]) * x[1]; }
  CG_HD Gradient<2> backward(float r, float const (&x)[2], float prob) const {
    float const gate = x[0], up = x[1], s = logistic(gate), swish = gate * s, rp = r * prob;
    return {{rp * up * s * (1.f + gate * (1.f - s)), rp * swish}, r * up * swish};
  }
};

// dglu.txt, "For dGeGLU". Gradients are kept at equality with a bound. kFilterByValue is the BF16 page's filter, which
// carries the raw value instead of 1 (decisions F5): not a derivative, offered for code written to that page.
template <bool kFilterByValue>
struct GeGLU {
  static constexpr int kWidth = 2;
  float alpha, clamp_max, clamp_min, linear_offset;

  struct Parts {
    float gate, up, s;  // clamped gate, clamped up + offset, sigmoid
  };
  CG_HD Parts parts(float const (&x)[2]) const {
    float const gate = at_most(x[0], clamp_max), up = at_least(at_most(x[1], clamp_max), clamp_min) + linear_offset;
    return {gate, up, logistic(alpha * gate)};
  }
  CG_HD float forward(float const (&x)[2]) const {
    Parts const p = parts(x);
    return p.gate * p.s * p.up;
  }
  CG_HD Gradient<2> backward(float r, float const (&x)[2], float prob) const {
    Parts const p = parts(x);
    float const rp = r * prob;
    float gate = rp * p.up * p.s * (1.f + alpha * p.gate * (1.f - p.s)), up = rp * p.gate * p.s;
    if constexpr (kFilterByValue) gate *= x[0], up *= x[1];
    bool const up_is_clamped = (x[1] > clamp_max) | (x[1] < clamp_min);
    return {{x[0] > clamp_max ? 0.f : gate, up_is_clamped ? 0.f : up}, r * p.gate * p.s * p.up};
  }
};

// dglu.txt, "For dSiTU-GLU": T_g = b1 tanh(g/b1) sigmoid(g), T_u = b2 tanh(u/b2).
struct SiTUGLU {
  static constexpr int kWidth = 2;
  float beta1, beta2;

  CG_HD float forward(float const (&x)[2]) const {
    return beta1 * tanh_with_derivative(quotient(x[0], beta1)).value * logistic(x[0]) * beta2 *
           tanh_with_derivative(quotient(x[1], beta2)).value;
  }
  CG_HD Gradient<2> backward(float r, float const (&x)[2], float prob) const {
    Tanh const tg = tanh_with_derivative(quotient(x[0], beta1)), tu = tanh_with_derivative(quotient(x[1], beta2));
    float const s = logistic(x[0]), gate = beta1 * tg.value, up = beta2 * tu.value, rp = r * prob;
    float const gate_slope = tg.derivative * s + gate * s * (1.f - s);
    return {{rp * up * gate_slope, rp * gate * s * tu.derivative}, r * gate * s * up};
  }
};

// epilogue_op (decisions F6): applied to the FP32 values of D before dbias, amax and quantisation.
enum class EpilogueOp : int { identity, relu, srelu };
CG_HD float apply_epilogue_op(EpilogueOp op, float d) {
  if (op == EpilogueOp::identity) return d;
  float const positive = d <= 0.f ? 0.f : d;
  return op == EpilogueOp::relu ? positive : positive * positive;
}

}  // namespace cudnn_grouped

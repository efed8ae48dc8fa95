// The activations: forward value, derivative, dprob term. All engines use these structs; adding one is one struct here.
//
// kWidth is the number of saved columns a GEMM column meets: 1 for squared ReLU, 2 (gate, up) for the gated ones.
// backward(r, x, prob): r is the GEMM's value (alpha applied), x the saved pre-activation columns (beta applied).
// x may be of another type that becomes V (csrc/sm100/pair.h, Scaled).
// It returns the gradients of x, times prob, and the column's term of dprob (which has no prob in it).
// A NaN in any operand reaches the gradients it feeds.
#pragma once

#include "elementary.h"

namespace cudnn_grouped {

template <class V, int kWidth>
struct Gradient {
  V x[kWidth];
  V prob_term;
};

// The plain GEMM. Backward, it gives row sums of r * c and column sums of prob * r.
struct Identity {
  static constexpr int kWidth = 1;
  template <class V>
  CG_HD V forward(V const (&x)[1]) const {
    return x[0];
  }
  template <class V>
  CG_HD Gradient<V, 1> backward(V r, V const (&x)[1], V prob) const {
    return {{r * prob}, r * x[0]};
  }
};

// dsrelu.txt, "Equations"; decisions F1. With a soft clamp s, relu(x) becomes b = s tanh(relu(x)/s).
template <bool kClamped>
struct SquaredReLU {
  static constexpr int kWidth = 1;
  Bound clamp;              // s
  bool c_is_preactivation;  // c_role

  template <class V>
  struct Relu {
    V value, derivative_factor;
  };
  template <class V>
  CG_HD Relu<V> relu(V x) const {
    V const positive = positive_part(x);
    if constexpr (!kClamped) return {positive, 1.f};
    Tanh<V> const t = bounded_tanh(positive, clamp);
    return {t.value, t.derivative};
  }
  template <class V>
  CG_HD V forward(V const (&x)[1]) const {
    V const b = relu(x[0]).value;
    return b * b;
  }
  template <class V>
  CG_HD Gradient<V, 1> gradient(V preactivation, V upstream, V prob) const {
    Relu<V> const b = relu(preactivation);
    V const product = b.value * upstream, slope = kClamped ? product * b.derivative_factor : product;
    return {{prob * 2.f * slope}, b.value * product};
  }
  template <class V>
  CG_HD Gradient<V, 1> backward(V r, V const (&c)[1], V prob) const {
    return gradient(c_is_preactivation ? c[0] : r, c_is_preactivation ? r : c[0], prob);
  }
};

// dglu.txt, "For dSwiGLU".
struct SwiGLU {
  static constexpr int kWidth = 2;
  template <class V>
  CG_HD V forward(V const (&x)[2]) const {
    return x[0] * logistic(x[0]) * x[1];
  }
  template <class V, class X>
  CG_HD Gradient<V, 2> backward(V r, X const (&x)[2], V prob) const {
    V const gate = x[0], up = x[1], s = logistic(gate), swish = gate * s, rp = r * prob;
    return {{rp * up * (s + swish * (1.f - s)), rp * swish}, r * up * swish};
  }
};

// dglu.txt, "For dGeGLU". Gradients are kept at equality with a bound. kFilterByValue is the BF16 page's filter, which
// carries the raw value instead of 1 (decisions F5): not a derivative, offered for code written to that page.
template <bool kFilterByValue>
struct GeGLU {
  static constexpr int kWidth = 2;
  float alpha, clamp_max, clamp_min, linear_offset;

  template <class V>
  struct Parts {
    V gate, clamped_up, up, s;  // clamped gate, clamped up, the same + offset, sigmoid
  };
  template <class V>
  CG_HD Parts<V> parts(V const (&x)[2]) const {
    V const gate = at_most(x[0], clamp_max), up = at_least(at_most(x[1], clamp_max), clamp_min);
    return {gate, up, up + linear_offset, logistic(alpha * gate)};
  }
  template <class V>
  CG_HD V forward(V const (&x)[2]) const {
    Parts<V> const p = parts(x);
    return p.gate * p.s * p.up;
  }
  template <class V, class X>
  CG_HD Gradient<V, 2> backward(V r, X const (&columns)[2], V prob) const {
    V const x[2] = {columns[0], columns[1]};
    Parts<V> const p = parts(x);
    V const rp = r * prob, gated = p.gate * p.s;
    V gate = rp * p.up * p.s * (1.f + alpha * p.gate * (1.f - p.s)), up = rp * gated;
    if constexpr (kFilterByValue) gate *= x[0], up *= x[1];
    return {{zero_above(gate, x[0], clamp_max), zero_where_clamped(up, x[1], p.clamped_up)}, r * gated * p.up};
  }
};

// dglu.txt, "For dSiTU-GLU": T_g = b1 tanh(g/b1) sigmoid(g), T_u = b2 tanh(u/b2).
struct SiTUGLU {
  static constexpr int kWidth = 2;
  Bound beta1, beta2;

  template <class V>
  CG_HD V forward(V const (&x)[2]) const {
    return bounded_tanh(x[0], beta1).value * logistic(x[0]) * bounded_tanh(x[1], beta2).value;
  }
  template <class V, class X>
  CG_HD Gradient<V, 2> backward(V r, X const (&x)[2], V prob) const {
    Tanh<V> const g = bounded_tanh(x[0], beta1), u = bounded_tanh(x[1], beta2);
    V const s = logistic(x[0]), rs = r * s, r_gate = rs * g.value;
    V const gate_slope = g.derivative + g.value * (1.f - s);  // without its factor s
    return {{rs * prob * u.value * gate_slope, r_gate * prob * u.derivative}, r_gate * u.value};
  }
};

// epilogue_op (decisions F6): applied to the FP32 values of D before dbias, amax and quantisation.
enum class EpilogueOp : int { identity, relu, srelu };
CG_HD float apply_epilogue_op(EpilogueOp op, float d) {
  if (op == EpilogueOp::identity) return d;
  float const positive = positive_part(d);
  return op == EpilogueOp::relu ? positive : positive * positive;
}

}  // namespace cudnn_grouped

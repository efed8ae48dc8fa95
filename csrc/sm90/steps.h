// What an operation does to the accumulators, one element at a time.
#pragma once

#include "../cuda/scatter.h"
#include "../cuda/steps.h"
#include "../cuda/values.h"
#include "params.h"

namespace cudnn_grouped::sm90 {

using cuda::alpha_of, cuda::Backward, cuda::Forward, cuda::kUnit;
using cuda::load_pair, cuda::scatter, cuda::store_pair, cuda::Sum;

// The gated activations are linear in the accumulator: in their backward, alpha is part of prob, and dprob is
// multiplied by it at the end: alpha * prob, and a row's sum without alpha, have to be within FP32's range. Beta is the
// gated backward's alone.
template <class Step>
inline constexpr bool kIsGatedBackward = !Step::kForward && Step::kWidth == 2;

// An expert's scalars.
template <class Step>
struct Scalars {
  float alpha, beta;

  __device__ __forceinline__ Scalars only_if(bool condition) const {
    Scalars out = *this;
    if (!condition) out.alpha = 0.f;
    return out;
  }
  __device__ __forceinline__ Scalars(Params const& p, int expert) {
    alpha = kIsGatedBackward<Step> ? 1.f : alpha_of(p, expert);
    beta = kIsGatedBackward<Step> && p.beta ? __ldg(p.beta + expert) : 1.f;
  }
};

// One element. acc: kInputs accumulators; c: kWidth values, read by the backward and written by the forward.
template <class Step, bool kWithBias>
__device__ __forceinline__ void apply(KernelArguments<typename Step::Activation> const& args, Scalars<Step> const& s,
                                      float const (&acc)[Step::kInputs], float const (&bias)[Step::kInputs], float prob,
                                      float (&c)[Step::kWidth], float (&d)[Step::kOutputs], float& dprob) {
  if constexpr (Step::kForward) {
    bool const on_bias = kWithBias && args.p.prob_on_bias;
#pragma unroll
    for (int w = 0; w < Step::kWidth; ++w) c[w] = s.alpha * acc[w] + (on_bias ? prob : 1.f) * bias[w];
    d[0] = (on_bias ? 1.f : prob) * args.activation.forward(c);
  } else {
    float x[Step::kWidth];
#pragma unroll
    for (int w = 0; w < Step::kWidth; ++w) x[w] = kIsGatedBackward<Step> ? s.beta * c[w] : c[w];
    float const r = kIsGatedBackward<Step> ? acc[0] : s.alpha * acc[0] + bias[0];
    auto const gradient = args.activation.backward(r, x, prob);
#pragma unroll
    for (int w = 0; w < Step::kOutputs; ++w) d[w] = gradient.x[w];
    dprob += gradient.prob_term;
  }
}

// The bias of two neighbouring columns, for the units that one element meets.
template <class Step>
__device__ __forceinline__ void load_bias(Params const& p, int expert, int column, float (&bias)[2][Step::kInputs]) {
#pragma unroll
  for (int w = 0; w < Step::kInputs; ++w) {
    float2 const pair = __ldg(reinterpret_cast<float2 const*>(
        p.bias + (uint64_t(uint32_t(expert)) * uint32_t(p.n) + uint32_t(column + w * kUnit))));
    bias[0][w] = pair.x, bias[1][w] = pair.y;
  }
}

}  // namespace cudnn_grouped::sm90

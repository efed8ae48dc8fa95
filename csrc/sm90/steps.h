// What an operation does to the accumulators. Work goes by chunks of 64 columns of C: two units of 32. A unit of the
// backward's GEMM meets kWidth units of C and gives as many of D; kWidth units of the forward's GEMM give one of D.
#pragma once

#include "../core/number_formats.h"
#include "params.h"

namespace cudnn_grouped::sm90 {

inline constexpr int kUnit = 32;

template <class ActivationT>
struct Backward {
  using Activation = ActivationT;
  static constexpr bool kForward = false;
  static constexpr int kWidth = Activation::kWidth, kGroups = 2 / kWidth;
  static constexpr int kAccUnits = kGroups, kDUnits = 2;  // of a chunk
  static constexpr bool kHasBias = kWidth == 1;           // dglu has none
  static constexpr int kInputs = 1, kOutputs = kWidth;    // accumulators and values of D of one element
};

template <class ActivationT>
struct Forward {
  using Activation = ActivationT;
  static constexpr bool kForward = true;
  static constexpr int kWidth = Activation::kWidth, kGroups = 2 / kWidth;
  static constexpr int kAccUnits = 2, kDUnits = kGroups;
  static constexpr bool kHasBias = true;
  static constexpr int kInputs = kWidth, kOutputs = 1;
};

// An expert's scalars.
struct Scalars {
  float alpha, beta;

  __device__ __forceinline__ Scalars(Params const& p, int expert) {
    alpha = p.alpha ? __ldg(p.alpha + expert) : 1.f;
    if (p.alpha_squared) alpha *= alpha;
    beta = p.beta ? __ldg(p.beta + expert) : 1.f;
  }
};

// One element. acc: kInputs accumulators; c: kWidth values, read by the backward and written by the forward.
template <class Step, bool kWithBias>
__device__ __forceinline__ void apply(KernelArguments<typename Step::Activation> const& args, Scalars const& s,
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
    for (int w = 0; w < Step::kWidth; ++w) x[w] = s.beta * c[w];
    auto const gradient = args.activation.backward(s.alpha * acc[0] + bias[0], x, prob);
#pragma unroll
    for (int w = 0; w < Step::kOutputs; ++w) d[w] = gradient.x[w];
    dprob += gradient.prob_term;
  }
}

// Two neighbouring values of a C, D or GEMM value of any dtype; the kernel does not write to what is loaded so.
CG_DEVICE float2 load_pair(DType dtype, void const* base, int64_t at) {
  switch (dtype) {
    case DType::float32:
      return __ldg(reinterpret_cast<float2 const*>(static_cast<float const*>(base) + at));
    case DType::float8_e4m3fn:
    case DType::float8_e5m2: {
      uint16_t const pair = __ldg(reinterpret_cast<uint16_t const*>(static_cast<uint8_t const*>(base) + at));
      return dtype == DType::float8_e4m3fn ? ptx::unpack_e4m3(pair) : ptx::unpack_e5m2(pair);
    }
    default: {
      uint32_t const pair = __ldg(reinterpret_cast<uint32_t const*>(static_cast<uint16_t const*>(base) + at));
      if (dtype == DType::bfloat16) return {ptx::low_bf16(pair), ptx::high_bf16(pair)};
      return ptx::unpack_fp16(pair);
    }
  }
}

CG_DEVICE void store_pair(DType dtype, void* base, int64_t at, float low, float high) {
  switch (dtype) {
    case DType::float32:
      *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = {low, high};
      return;
    case DType::float8_e4m3fn:
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(base) + at) = uint16_t(ptx::pack_e4m3(low, high));
      return;
    case DType::float8_e5m2:
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(base) + at) = uint16_t(ptx::pack_e5m2(low, high));
      return;
    case DType::bfloat16:
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + at) = ptx::pack_bf16(low, high);
      return;
    default:
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + at) = ptx::pack_fp16(low, high);
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

// Sums over the eight lanes that hold a column, for kCount columns.
template <int kCount>
__device__ __forceinline__ void sum_rows(float (&v)[kCount]) {
#pragma unroll
  for (int lanes = 16; lanes >= 4; lanes /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(~0u, v[i], lanes);
  }
}

}  // namespace cudnn_grouped::sm90

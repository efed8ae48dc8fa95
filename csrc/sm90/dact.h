// dact: the activation's backward at a given value of the GEMM. Memory bound: a warp has 32 rows of 64 columns, a
// thread two neighbouring ones of each.
#pragma once

#include "../cuda/launch.h"
#include "steps.h"

namespace cudnn_grouped::sm90 {

inline constexpr int kDactColumns = 64, kDactWarps = 4;

template <class Activation>
__global__ void __launch_bounds__(32 * kDactWarps)
    dact_kernel(__grid_constant__ KernelArguments<Activation> const args) {
  using Step = Backward<Activation>;
  constexpr int kWidth = Step::kWidth;
  Params const& p = args.p;
  int const chunks = ceil_div(p.n, kDactColumns), chunk = blockIdx.x % chunks, lane = threadIdx.x % 32;
  int const first = (blockIdx.x / chunks * kDactWarps + threadIdx.x / 32) * kSlotRows;
  if (first >= p.experts.rows()) return;
  int const n = chunk * kDactColumns + lane * 2, column = n / kUnit * kUnit * kWidth + n % kUnit;
  int64_t const columns = int64_t(p.n) * kWidth;
  bool const inside = n < p.n;
  int const expert = p.experts.of(first);
  Scalars const scalars(p, expert);
  float const bias[1] = {0.f};
  float sum[kWidth][2] = {};
#pragma unroll 8
  for (int r = 0; r < kSlotRows; ++r) {
    int64_t const row = first + r, c_row = p.c_per_expert ? expert : row;
    float term = 0.f;
    if (inside) {
      float2 const value = load_pair(p.value_dtype, p.value, row * p.n + n);
      float2 c[kWidth], d[kWidth];
#pragma unroll
      for (int w = 0; w < kWidth; ++w) c[w] = load_pair(p.c_dtype, p.c_data, c_row * columns + column + w * kUnit);
      float const prob = p.prob ? __ldg(p.prob + row) : 1.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const in[1] = {e ? value.y : value.x};
        float x[kWidth], out[kWidth];
#pragma unroll
        for (int w = 0; w < kWidth; ++w) x[w] = e ? c[w].y : c[w].x;
        apply<Step, false>(args, scalars, in, bias, prob, x, out, term);
#pragma unroll
        for (int w = 0; w < kWidth; ++w) (e ? d[w].y : d[w].x) = out[w], sum[w][e] += out[w];
      }
#pragma unroll
      for (int w = 0; w < kWidth && p.d_data; ++w) {
        store_pair(p.d_dtype, p.d_data, row * columns + column + w * kUnit, d[w].x, d[w].y);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) term += __shfl_xor_sync(~0u, term, lanes);
    if (lane == 0) p.dprob[int64_t(chunk) * p.experts.m + row] = term;
  }
  if (!p.dbias || !inside) return;
  float* const slot = p.dbias + first / kSlotRows * columns + column;
#pragma unroll
  for (int w = 0; w < kWidth; ++w) *reinterpret_cast<float2*>(slot + w * kUnit) = {sum[w][0], sum[w][1]};
}

}  // namespace cudnn_grouped::sm90

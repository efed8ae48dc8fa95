// Memory bound: a warp has 32 rows of 64 columns, a thread two neighbouring ones of each.
#include "dact.h"

#include "activations.h"
#include "launch.h"
#include "outputs.h"
#include "steps.h"
#include "values.h"

namespace cudnn_grouped::cuda {
namespace {

inline constexpr int kWarps = 4;

struct Dact {
  Experts experts;
  int n;
  void const *value, *c;
  DType value_dtype, c_dtype, d_dtype;
  bool c_per_expert;  // c has a row for each expert
  float const* prob;  // null: 1
  void* d;            // or null
  float *dprob, *dbias;
};

template <class Activation>
__global__ void __launch_bounds__(32 * kWarps)
    dact_kernel(__grid_constant__ Dact const p, __grid_constant__ Activation const activation) {
  constexpr int kWidth = Activation::kWidth;
  int const chunks = ceil_div(p.n, kDactColumns), chunk = blockIdx.x % chunks, lane = threadIdx.x % 32;
  int const first = (blockIdx.x / chunks * kWarps + threadIdx.x / 32) * kSlotRows;
  if (first >= p.experts.rows()) return;
  int const n = chunk * kDactColumns + lane * 2, column = n / kUnit * kUnit * kWidth + n % kUnit;
  int64_t const columns = int64_t(p.n) * kWidth;
  bool const inside = n < p.n;
  int const expert = p.experts.of(first);
  float sum[kWidth][2] = {};
#pragma unroll 8
  for (int r = 0; r < kSlotRows; ++r) {
    int64_t const row = first + r, c_row = p.c_per_expert ? expert : row;
    float term = 0.f;
    if (inside) {
      float2 const value = load_pair(p.value_dtype, p.value, row * p.n + n);
      float2 c[kWidth], d[kWidth];
#pragma unroll
      for (int w = 0; w < kWidth; ++w) c[w] = load_pair(p.c_dtype, p.c, c_row * columns + column + w * kUnit);
      float const prob = p.prob ? __ldg(p.prob + row) : 1.f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x[kWidth];
#pragma unroll
        for (int w = 0; w < kWidth; ++w) x[w] = e ? c[w].y : c[w].x;
        // A -0 becomes 0, as where a GEMM without a bias adds 0.
        auto const gradient = activation.backward((e ? value.y : value.x) + 0.f, x, prob);
#pragma unroll
        for (int w = 0; w < kWidth; ++w) (e ? d[w].y : d[w].x) = gradient.x[w], sum[w][e] += gradient.x[w];
        term += gradient.prob_term;
      }
#pragma unroll
      for (int w = 0; w < kWidth && p.d; ++w) {
        store_pair(p.d_dtype, p.d, row * columns + column + w * kUnit, d[w].x, d[w].y);
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

}  // namespace

void dact(GroupedGemm const& problem, float* dprob_slots, float* dbias_slots, cudaStream_t stream) {
  Dact p{};
  p.experts = experts_of(problem), p.n = int(problem.n);
  p.value = problem.a, p.value_dtype = problem.a_dtype;
  p.c = problem.c, p.c_dtype = problem.c_dtype, p.c_per_expert = problem.c_per_expert;
  p.prob = problem.prob;
  p.d = problem.d_row, p.d_dtype = problem.d_dtype;
  p.dprob = dprob_slots, p.dbias = dbias_slots;
  int64_t const blocks = problem.m / (kSlotRows * kWarps) * ceil_div<int64_t>(problem.n, kDactColumns);
  visit_activation(problem, [&](auto activation) {
    launch(dact_kernel<decltype(activation)>, unsigned(blocks), 32 * kWarps, 0, stream, p, activation);
  });
}

}  // namespace cudnn_grouped::cuda

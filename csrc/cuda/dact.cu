// Memory bound: a warp has 32 rows of 64 columns, and loads kLoads x kRows rows at once: a thread, four columns.
#include "dact.h"

#include <type_traits>

#include "activations.h"
#include "launch.h"
#include "outputs.h"
#include "scatter.h"
#include "steps.h"
#include "values.h"

namespace cudnn_grouped::cuda {
namespace {

inline constexpr int kWarps = 4, kLoads = 4;
inline constexpr int kLanes = kDactColumns / 4, kRows = 32 / kLanes;  // of a row; in a warp

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

// kBF16: of the value and of C. With one column of C, the compiler would spill on compute capability 10 to fit in more
// blocks than seven.
template <class Activation, bool kBF16>
__global__ void __launch_bounds__(32 * kWarps, Activation::kWidth == 1 && kBF16 ? 7 : 0)
    dact_kernel(__grid_constant__ Dact const p, __grid_constant__ Activation const activation) {
  constexpr int kWidth = Activation::kWidth;
  using Quad = std::conditional_t<kBF16, uint2, uint4>;
  int const chunks = ceil_div(p.n, kDactColumns), chunk = blockIdx.x % chunks, lane = threadIdx.x % 32;
  int const first = (blockIdx.x / chunks * kWarps + threadIdx.x / 32) * kSlotRows;
  if (first >= p.experts.rows()) return;
  int const n = chunk * kDactColumns + lane % kLanes * 4, column = n / kUnit * kUnit * kWidth + n % kUnit;
  int64_t const columns = int64_t(p.n) * kWidth;
  bool const inside = n < p.n;
  int const expert = p.c_per_expert ? p.experts.of(first) : 0;
  float sum[kWidth][4] = {};
#pragma unroll 1
  for (int r = lane / kLanes; r < kSlotRows; r += kLoads * kRows) {
    int64_t const first_row = first + r;
    float value[kLoads][4], c[kWidth][kLoads][4], prob[kLoads];
    if (inside) {
      Quad values[kLoads], cs[kWidth][kLoads];
      load_quads(p.value_dtype, p.value, first_row * p.n + n, kRows * p.n, values);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        int64_t const at = (p.c_per_expert ? expert : first_row) * columns + column + w * kUnit;
        load_quads(p.c_dtype, p.c, at, p.c_per_expert ? 0 : kRows * columns, cs[w]);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) prob[i] = p.prob ? __ldg(p.prob + first_row + i * kRows) : 1.f;
      decode_quads(p.value_dtype, values, value);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) decode_quads(p.c_dtype, cs[w], c[w]);
    }
    float term[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int64_t const row = first_row + i * kRows;
      if (inside) {
        float d[kWidth][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float x[kWidth];
#pragma unroll
          for (int w = 0; w < kWidth; ++w) x[w] = c[w][i][e];
          // A -0 becomes 0, as where a GEMM without a bias adds 0.
          auto const gradient = activation.backward(value[i][e] + 0.f, x, prob[i]);
#pragma unroll
          for (int w = 0; w < kWidth; ++w) d[w][e] = gradient.x[w], sum[w][e] += gradient.x[w];
          term[i] += gradient.prob_term;
        }
#pragma unroll
        for (int w = 0; w < kWidth && p.d; ++w) store_quad(p.d_dtype, p.d, row * columns + column + w * kUnit, d[w]);
      }
    }
    scatter<kLanes / 2, 1>(term, lane, Sum{});
    constexpr int kShared = kLanes / kLoads;  // lanes with the same row's sum
    if (lane % kShared == 0)
      p.dprob[int64_t(chunk) * p.experts.m + first_row + lane % kLanes / kShared * kRows] = term[0];
  }
  if (!p.dbias) return;
  float* const slot = p.dbias + first / kSlotRows * columns + column;
#pragma unroll
  for (int w = 0; w < kWidth; ++w) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[w][e] += __shfl_xor_sync(~0u, sum[w][e], kLanes);
    if (inside && lane < kLanes) {
      *reinterpret_cast<float4*>(slot + w * kUnit) = {sum[w][0], sum[w][1], sum[w][2], sum[w][3]};
    }
  }
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
    using Activation = decltype(activation);
    bool const bf16 = p.value_dtype == DType::bfloat16 && p.c_dtype == DType::bfloat16;
    auto const kernel = bf16 ? dact_kernel<Activation, true> : dact_kernel<Activation, false>;
    launch(kernel, unsigned(blocks), 32 * kWarps, 0, stream, p, activation);
  });
}

}  // namespace cudnn_grouped::cuda

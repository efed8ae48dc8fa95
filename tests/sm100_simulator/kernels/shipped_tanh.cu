// The product's tanh and its slope: of single values, and of pairs with a factor.
#include <cuda_runtime.h>

#include "sm100/pair.h"

using namespace cudnn_grouped;

__global__ void tanhs(Bound bound, float const* factors, float const* xs, float* values, float* slopes, int pairs) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  float const factor = factors[0], lo = xs[2 * i], hi = xs[2 * i + 1];
  Tanh<sm100::Pair> t;
  if (pairs) {
    t = sm100::bounded_tanh(sm100::Scaled{{lo, hi}, factor}, bound);
  } else {
    Tanh<float> const a = bounded_tanh(lo * factor, bound), b = bounded_tanh(hi * factor, bound);
    t = {{a.value, b.value}, {a.derivative, b.derivative}};
  }
  values[2 * i] = t.value.lo, values[2 * i + 1] = t.value.hi;
  slopes[2 * i] = t.derivative.lo, slopes[2 * i + 1] = t.derivative.hi;
}

extern "C" int run_tanh(float const* bound, float const* factor, float const* x, float* value, float* slope, int count,
                        int pairs) {
  tanhs<<<count / 64, 32>>>(Bound(*bound), factor, x, value, slope, pairs);
  return cudaGetLastError();
}

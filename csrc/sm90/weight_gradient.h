// out[g] = scale[g] * A[:, tokens of g] * B[tokens of g, :]: the same main loop over an expert's tokens.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "../cuda/experts.h"

namespace cudnn_grouped::sm90 {

inline constexpr int kWeightTileN = 192;

struct WeightTiles {
  CUtensorMap a, b;
  cuda::Experts experts;
  int rows, columns;
  bool a_tokens_contiguous, b_tokens_contiguous;
  float const *scale_a, *scale_b;  // per expert; null: 1
  int64_t const* out;              // addresses, one per expert
  DType out_dtype;
  bool accumulate, pairs;  // pairs: rows of out begin at addresses that take two values at once
};
void multiply_tokens(WeightTiles const&, int blocks, cudaStream_t);

}  // namespace cudnn_grouped::sm90

// What the epilogue of every engine's GEMM kernel receives.
#pragma once

#include "experts.h"

namespace cudnn_grouped::cuda {

struct EpilogueParams {
  Experts experts;
  int n, k;
  float const *alpha, *beta, *prob, *norm_const;  // null: 1
  bool alpha_squared, prob_on_bias;               // prob_on_bias: prob multiplies the bias and not the GEMM
  float const* bias;                              // (experts, n), or null
  DType c_dtype, d_dtype;
  EpilogueOp epilogue_op;
  void *c_data, *d_data, *d_col_data;  // d_col_data: where D by columns has a place of its own
  float* dprob;                        // slots, see the engine's tiles
  float* dbias;                        // slots [m / kSlotRows][columns of D], or null
  int* amax;                           // FP32 bits: magnitudes order as integers do
  uint8_t *sfd_row, *sfd_col;
  bool discrete_col_sfd;
};

__device__ __forceinline__ float alpha_of(EpilogueParams const& p, int expert) {
  float const alpha = p.alpha ? __ldg(p.alpha + expert) : 1.f;
  return p.alpha_squared ? alpha * alpha : alpha;
}

}  // namespace cudnn_grouped::cuda

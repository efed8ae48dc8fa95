// The weight gradient: for each expert, the product over its tokens.
#pragma once

#include "problem.h"

namespace cudnn_grouped {

// out[g] (rows, columns) = scale[g] * A[:, tokens of g] * B[tokens of g, :], FP32 sums rounded once.
struct WeightGradient {
  struct Operand {
    void const* data;
    int64_t rows;            // of A; columns of B
    bool tokens_contiguous;  // else the rows are
    uint8_t const* scales;   // rows x blocks of tokens; null for BF16
  };
  int64_t tokens, experts;
  Device device;
  OperandFormat operands;
  DType scale_dtype;
  int64_t sf_vec_size;
  bool discrete_scales;  // each expert's scales are a tensor of their own (discrete_col_sfd)
  Operand a, b;
  int32_t const* padded_offsets;
  std::vector<int32_t> checked_offsets;          // see GroupedGemm
  float const *global_scale_a, *global_scale_b;  // per expert; null: 1
  std::vector<void*> out;                        // per expert
  DType out_dtype;
  bool accumulate;

  int32_t const* offsets() const { return checked_offsets.empty() ? padded_offsets : checked_offsets.data(); }
  bool block_scaled() const { return operands != OperandFormat::bf16; }
};

struct WeightGradientArguments {
  bool has_outputs = false;
  bool values_readable = true;  // see Arguments
  Tensor a, b, sfa, sfb, padded_offsets, global_scale_a, global_scale_b;
  int64_t sf_vec_size = 16;
  bool discrete_col_sfd = true;
  DType d_dtype = DType::none;
  std::vector<Tensor> out;
  bool accumulate = false;
};
CG_API std::optional<Error> validate(WeightGradientArguments const& arguments, WeightGradient& problem);

}  // namespace cudnn_grouped

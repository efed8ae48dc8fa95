// Block-scaled operands to BF16 in a workspace: Hopper multiplies no block-scaled formats. A value times its scale has
// at most 8 significant bits, so this is exact but at the ends of BF16's range. NaN codes and NaN scales give NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../core/weight_gradient.h"

namespace cudnn_grouped::sm90 {

// A (by_token): one (rows, columns) matrix; rows at or past the last expert's end are left unwritten.
// B: a matrix of (rows_per_expert, columns) for each expert; an expert without rows is left unwritten, and its pointers
// are not followed. transposed: stored as (columns, rows_per_expert), FP8 only. out is dense and K-major always.
struct Dequantise {
  OperandFormat format;
  DType scale_dtype;
  int sf_vec_size;
  void const* data;       // 16-byte aligned, as its rows and each expert's matrix are
  uint8_t const* scales;  // by (row, block of columns)
  int64_t rows;           // of A
  int64_t columns;        // K, a multiple of 8
  int64_t rows_per_expert, experts;
  int64_t out_rows_per_expert;  // at least rows_per_expert; the rows between are left unwritten
  int64_t expert_bytes, scale_expert_bytes;
  int64_t const *pointers, *scale_pointers;  // device tables in place of data and scales, or null
  int32_t const* padded_offsets;             // on the device; null: every row and every expert
  bool by_token;
  int64_t offset_limit;  // M: offsets are taken as at most this
  bool transposed;
  __nv_bfloat16* out;
};
void dequantise(Dequantise const& a, Dequantise const* b, cudaStream_t stream);  // b: of A's format, or null

// An operand of the weight gradient; out keeps its storage's orientation. Tokens at or past the last expert's end are
// left unwritten.
struct DequantiseTokens {
  OperandFormat format;
  DType scale_dtype;
  int sf_vec_size;
  WeightGradient::Operand operand;
  int64_t tokens, experts;
  bool discrete_scales;
  int32_t const* padded_offsets;  // on the device
  __nv_bfloat16* out;
};
void dequantise_tokens(DequantiseTokens const& problem, cudaStream_t stream);

}  // namespace cudnn_grouped::sm90

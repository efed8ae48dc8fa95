// The block quantiser as an operator of its own, and the reduction of the documented dbias slots.
#pragma once

#include "problem.h"

namespace cudnn_grouped {

// x (rows, columns, batch) <-> data + scales. Blocks of `block` values run along columns (by_column false) or rows.
struct QuantizeProblem {
  int64_t rows, columns, batch, block;
  bool by_column;
  Device device;
  DType x_dtype, data_dtype, scale_dtype;
  void* x;     // batch of row-major (rows, columns)
  void* data;  // FP8: as x. FP4: (rows, columns/2), or (columns, rows/2) when by_column
  uint8_t* scales;
  float const* norm_const;        // null: 1
  int32_t const* padded_offsets;  // by_column: each expert's scales are a tensor of their own
  int64_t experts;

  int64_t data_bytes() const { return batch * rows * columns / (data_dtype == DType::float4_e2m1fn_x2 ? 2 : 1); }
  int64_t scale_rows() const { return by_column ? columns : rows; }
  int64_t scale_blocks() const { return ceil_div(by_column ? rows : columns, block); }
};

struct QuantizeArguments {
  bool dequantize = false;
  bool values_readable = true;  // see Arguments
  std::string axis = "row";
  Tensor x, data, scales, norm_const, padded_offsets;
  DType dtype = DType::none, sf_dtype = DType::none;
  int64_t sf_vec_size = 32;
};
CG_API std::optional<Error> validate(QuantizeArguments const& arguments, QuantizeProblem& problem);

// dbias[g, n] += sum over the expert's slots, in FP32, in order, rounded once.
struct DbiasReduction {
  Device device;
  int64_t slots, columns, experts;
  uint16_t const* slot_values;
  int32_t const* padded_offsets;
  uint16_t* dbias;
};
CG_API std::optional<Error> validate(Tensor const& slots, Tensor const& padded_offsets, Tensor const& dbias,
                                     DbiasReduction& reduction);

}  // namespace cudnn_grouped

// The support table: what validate() accepts, and what the documentation's table is generated from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "problem.h"

namespace cudnn_grouped {

struct SupportRow {
  Operation operation;
  char const* name;                           // the field's name of the operand format
  std::vector<DType> operands;                // A and B
  std::vector<std::pair<DType, int>> scales;  // scale dtype, sf_vec_size; empty: no scale factors
  std::vector<DType> c, d;
  std::vector<std::string> activations;  // empty where the operator has one
  std::vector<std::string> b_majors;
  std::vector<DType> dequantised_b;  // what B may be instead: K-major, without scale factors
};

CG_API std::vector<SupportRow> const& support_rows();
CG_API std::vector<int64_t> const& tile_ns(Operation operation);
CG_API char const* name_of(Operation operation);
// act_func of the operation; empty where it has one activation.
CG_API std::vector<std::string> const& activation_names(Operation operation);

}  // namespace cudnn_grouped

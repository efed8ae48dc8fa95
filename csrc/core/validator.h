// The validator of the GEMM operations: checks in the order in which a caller would want to hear of them: what is
// missing, which formats, which sizes, the options, each tensor, and last the values.
#pragma once

#include <algorithm>

#include "device_values.h"
#include "support.h"

namespace cudnn_grouped {

inline bool contains(View<DType> list, DType dtype) { return std::find(list.begin(), list.end(), dtype) != list.end(); }
inline bool contains(std::vector<std::string> const& list, std::string const& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

class Validator {
 public:
  Validator(Arguments const& arguments, GroupedGemm& problem) : in(arguments), out(problem) {}
  void run();

 private:
  Arguments const& in;
  GroupedGemm& out;
  SupportRow const* row = nullptr;
  DType b_dtype = DType::none;
  bool dequantised = false;  // B is BF16 beside a block-scaled A
  enum class Weights { none, dense, list, pointers } mode = Weights::none;

  TensorCheck check(std::string name, Tensor const& tensor) const { return {std::move(name), tensor, in.a.device}; }
  int list_index(size_t i) const { return mode == Weights::list ? int(i) : -1; }
  std::string list_name(char const* name, size_t i) const { return item_name(name, list_index(i)); }
  bool scales_of_b() const { return mode == Weights::pointers ? in.sfb_ptrs.present() : !in.sfb.empty(); }
  char const* sfb_name() const { return mode == Weights::pointers ? "sfb_ptrs" : "sfb"; }
  bool k_major_only() const { return is_fp4(b_dtype) || dequantised; }
  bool has_weights() const { return in.operation != Operation::dact; }
  bool is_by_expert(Tensor const& b) const;
  char const* a_name() const { return has_weights() ? "a" : "r"; }
  // "N", "2N" or "N/2": how messages call these columns.
  char const* c_symbol() const { return !out.forward() && out.width == 2 ? "2N" : "N"; }
  char const* d_symbol() const { return out.width == 1 ? "N" : out.forward() ? "N/2" : "2N"; }

  // validate.cc
  void required_tensors();
  void formats();
  std::vector<DType> supported_operands() const;
  void output_formats();
  void sizes();
  void scale_sizes() const;
  void whole_rows(char const* name, int64_t columns, char const* symbol, int64_t pair_bytes) const;
  void input_tensors();
  void per_expert(char const* name, Tensor const& t) const;
  void values();

  // validate_options.cc
  void activation();
  void clamp_and_betas();
  void epilogue_op();
  void scheduling();
  float finite(char const* name, double value) const;
  float positive(char const* name, double value) const;
  float divisor(char const* name, double value) const;

  // validate_weights.cc
  void weight_mode();
  void forbid_scales();
  void scale_formats();
  void weights();
  bool n_major(TensorCheck const& b, Shape k_major, Shape n_major) const;
  void pointer_table(char const* name, Tensor const& t) const;
  void scale_factors();
  void pointer_values();

  // validate_outputs.cc
  void output_tensors();
  void quantised_outputs();
  void reductions();
  void workspaces();
  void overlaps() const;
};

}  // namespace cudnn_grouped

// The arguments of every operation by name, for bindings that have no schema of positions: the validator's Python entry
// and XLA. The names are those of the torch operators' schemas.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "../core/quantize_problem.h"
#include "../core/support.h"
#include "../core/weight_gradient.h"

namespace cudnn_grouped::bindings {

using AnyArguments = std::variant<Arguments, WeightGradientArguments, QuantizeArguments>;

// "dglu", "dglu_out" (its outputs are given), ..., "wgrad", "quantize", "dequantize"; none for another name.
inline std::optional<AnyArguments> arguments_of(std::string name) {
  Arguments a;
  if (name.size() > 4 && name.substr(name.size() - 4) == "_out") {
    a.has_outputs = true;
    name.resize(name.size() - 4);
  }
  for (Operation o :
       {Operation::dsrelu, Operation::dglu, Operation::dact, Operation::srelu, Operation::glu, Operation::mm}) {
    if (name != name_of(o)) continue;
    a.operation = o;
    if (o == Operation::glu) a.act_func = "swiglu";  // the operator's default
    return a;
  }
  if (a.has_outputs) return std::nullopt;
  if (name == "wgrad") return WeightGradientArguments{};
  QuantizeArguments q;
  q.dequantize = name == "dequantize";
  if (q.dequantize || name == "quantize") return q;
  return std::nullopt;
}
inline constexpr char const* kOperationNames =
    "dsrelu, dglu, dact, srelu, glu or mm, or one with _out, or wgrad, quantize or dequantize";

// visit(name, Tensor&), or visit(name, std::vector<Tensor>&) for a list.
template <class Visit>
void each_tensor(Arguments& a, Visit&& visit) {
  visit("a", a.a);
  visit("r", a.a);
  visit("b", a.b);
  visit("c", a.c);
  visit("padded_offsets", a.padded_offsets);
  visit("alpha", a.alpha);
  visit("beta", a.beta);
  visit("prob", a.prob);
  visit("bias", a.bias);
  visit("sfa", a.sfa);
  visit("sfb", a.sfb);
  visit("norm_const", a.norm_const);
  visit("b_ptrs", a.b_ptrs);
  visit("sfb_ptrs", a.sfb_ptrs);
  visit("d", a.d_row);
  visit("d_row", a.d_row);
  visit("d_col", a.d_col);
  visit("dprob", a.dprob);
  visit("dbias", a.dbias);
  visit("amax", a.amax);
  visit("sfd_row", a.sfd_row);
  visit("sfd_col", a.sfd_col);
  visit("dprob_workspace", a.dprob_workspace);
  visit("dbias_workspace", a.dbias_workspace);
}

template <class Visit>
void each_tensor(WeightGradientArguments& a, Visit&& visit) {
  visit("a", a.a);
  visit("b", a.b);
  visit("padded_offsets", a.padded_offsets);
  visit("sfa", a.sfa);
  visit("sfb", a.sfb);
  visit("global_scale_a", a.global_scale_a);
  visit("global_scale_b", a.global_scale_b);
}

template <class Visit>
void each_tensor(QuantizeArguments& a, Visit&& visit) {
  visit("x", a.x);
  visit("data", a.data);
  visit("scales", a.scales);
  visit("norm_const", a.norm_const);
  visit("padded_offsets", a.padded_offsets);
}

template <class Visit>
void each_option(Arguments& a, Visit&& visit) {
  visit("n", a.n);
  visit("b_dtype", a.b_dtype);
  visit("b_major", a.b_major);
  visit("d_dtype", a.d_dtype);
  visit("c_dtype", a.c_dtype);
  visit("generate_dbias", a.generate_dbias);
  visit("generate_c", a.generate_c);
  visit("generate_d", a.generate_d);
  visit("c_per_expert", a.c_per_expert);
  visit("sf_vec_size", a.sf_vec_size);
  visit("discrete_col_sfd", a.discrete_col_sfd);
  visit("deterministic", a.deterministic);
  visit("mma_tiler_mn", a.mma_tiler_mn);
  visit("cluster_shape_mn", a.cluster_shape_mn);
  visit("vector_f32", a.vector_f32);
  visit("use_dynamic_sched", a.use_dynamic_sched);
  visit("c_role", a.c_role);
  visit("tanh_clamp_scale", a.tanh_clamp_scale);
  visit("act_func", a.act_func);
  visit("linear_offset", a.linear_offset);
  visit("geglu_alpha", a.geglu_alpha);
  visit("glu_clamp_max", a.glu_clamp_max);
  visit("glu_clamp_min", a.glu_clamp_min);
  visit("clamp_grad", a.clamp_grad);
  visit("situ_beta1", a.situ_beta1);
  visit("situ_beta2", a.situ_beta2);
  visit("epilogue_op", a.epilogue_op);
  visit("use_single_group_runtime_offsets", a.use_single_group_runtime_offsets);
}

template <class Visit>
void each_option(WeightGradientArguments& a, Visit&& visit) {
  visit("sf_vec_size", a.sf_vec_size);
  visit("discrete_col_sfd", a.discrete_col_sfd);
  visit("d_dtype", a.d_dtype);
}

template <class Visit>
void each_option(QuantizeArguments& a, Visit&& visit) {
  visit("dtype", a.dtype);
  visit("sf_dtype", a.sf_dtype);
  visit("sf_vec_size", a.sf_vec_size);
  visit("axis", a.axis);
}

}  // namespace cudnn_grouped::bindings

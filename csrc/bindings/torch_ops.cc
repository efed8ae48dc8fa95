// The torch operators: their schemas, and one kernel for each that serves every device.
// The schemas are put together from the pieces that torch_gemm.cc reads, in the same order.
#include "torch_gemm.h"

// Tensors come before the `*`: torch's autograd takes no keyword-only tensors.
#define WEIGHTS                                                                          \
  "Tensor? sfa=None, Tensor[]? sfb=None, Tensor? norm_const=None, Tensor? b_ptrs=None, " \
  "Tensor? sfb_ptrs=None, *, int? n=None, ScalarType? b_dtype=None, str b_major=\"k\", "
#define OPTIONS                                                                                                \
  "int sf_vec_size=16, bool discrete_col_sfd=False, bool? deterministic=None, int[] mma_tiler_mn=[256, 256], " \
  "int[]? cluster_shape_mn=None, bool vector_f32=False, bool use_dynamic_sched=False"
#define GLU_PARAMETERS                                                                                      \
  "float? linear_offset=None, float geglu_alpha=1.702, float glu_clamp_max=7.0, float glu_clamp_min=-7.0, " \
  "float situ_beta1=4.0, float situ_beta2=25.0"

#define DSRELU_INPUTS "Tensor a, Tensor[] b, Tensor c, Tensor padded_offsets, Tensor alpha, Tensor prob, " WEIGHTS
#define DGLU_INPUTS \
  "Tensor a, Tensor[] b, Tensor c, Tensor padded_offsets, Tensor alpha, Tensor beta, Tensor prob, " WEIGHTS
#define BACKWARD_RESULTS "ScalarType? d_dtype=None, bool generate_dbias=False, "
#define DSRELU_OPTIONS OPTIONS ", str c_role=\"grad_output\", float? tanh_clamp_scale=None, Tensor? bias=None"
#define DGLU_OPTIONS                                    \
  OPTIONS ", str act_func=\"dswiglu\", " GLU_PARAMETERS \
          ", str clamp_grad=\"mask\", str? epilogue_op=None, bool use_single_group_runtime_offsets=False"
#define BACKWARD_OUTPUTS                                                                         \
  ", Tensor(a!) d_row, Tensor(b!)? d_col=None, Tensor(c!)? dprob=None, Tensor(d!)? dbias=None, " \
  "Tensor(e!)? amax=None, Tensor(f!)? sfd_row=None, Tensor(g!)? sfd_col=None"
#define WORKSPACES ", Tensor(h!)? dprob_workspace=None, Tensor(i!)? dbias_workspace=None"
#define BACKWARD_RETURNS \
  ") -> (Tensor d_row, Tensor d_col, Tensor dprob, Tensor dbias, Tensor amax, Tensor sfd_row, Tensor sfd_col)"

#define FORWARD_INPUTS \
  "Tensor a, Tensor[] b, Tensor padded_offsets, Tensor? alpha=None, Tensor? prob=None, Tensor? bias=None, " WEIGHTS
#define FORWARD_RESULTS "ScalarType? c_dtype=None, ScalarType? d_dtype=None, bool generate_c="
#define SRELU_OPTIONS OPTIONS ", float? tanh_clamp_scale=None"
#define GLU_OPTIONS OPTIONS ", str act_func=\"swiglu\", " GLU_PARAMETERS ", bool use_single_group_runtime_offsets=False"
#define FORWARD_OUTPUTS                                                                 \
  ", Tensor(a!) d, Tensor(b!)? c=None, Tensor(c!)? d_col=None, Tensor(d!)? amax=None, " \
  "Tensor(e!)? sfd_row=None, Tensor(f!)? sfd_col=None"
#define FORWARD_RETURNS ") -> (Tensor c, Tensor d, Tensor d_col, Tensor amax, Tensor sfd_row, Tensor sfd_col)"

#define WGRAD_INPUTS                                                                                       \
  "Tensor a, Tensor b, Tensor padded_offsets, *, Tensor? sfa=None, Tensor? sfb=None, int sf_vec_size=16, " \
  "bool discrete_col_sfd=True, Tensor? global_scale_a=None, Tensor? global_scale_b=None, "

namespace cudnn_grouped::bindings {
namespace {

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("dsrelu", gemm<Operation::dsrelu>);
  m.impl("dsrelu_out", gemm_out<Operation::dsrelu>);
  m.impl("dglu", gemm<Operation::dglu>);
  m.impl("dglu_out", gemm_out<Operation::dglu>);
  m.impl("dact", gemm<Operation::dact>);
  m.impl("srelu", gemm<Operation::srelu>);
  m.impl("srelu_out", gemm_out<Operation::srelu>);
  m.impl("glu", gemm<Operation::glu>);
  m.impl("glu_out", gemm_out<Operation::glu>);
  m.impl("mm", gemm<Operation::mm>);
  m.impl("mm_out", gemm_out<Operation::mm>);
  m.impl("wgrad", weight_gradient);
  m.impl("wgrad_out", weight_gradient_out);
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("reduce_dbias", reduce_dbias);
}

}  // namespace

STABLE_TORCH_LIBRARY(cudnn_grouped, m) {
  m.def("dsrelu(" DSRELU_INPUTS BACKWARD_RESULTS DSRELU_OPTIONS BACKWARD_RETURNS);
  m.def("dsrelu_out(" DSRELU_INPUTS DSRELU_OPTIONS BACKWARD_OUTPUTS WORKSPACES ") -> ()");
  m.def("dglu(" DGLU_INPUTS BACKWARD_RESULTS DGLU_OPTIONS BACKWARD_RETURNS);
  m.def("dglu_out(" DGLU_INPUTS DGLU_OPTIONS BACKWARD_OUTPUTS ") -> ()");
  m.def("dact(Tensor r, Tensor c, Tensor padded_offsets, Tensor? prob=None, *, " BACKWARD_RESULTS
        "bool generate_d=True, bool c_per_expert=False, str act_func=\"dswiglu\", float? "
        "tanh_clamp_scale=None, " GLU_PARAMETERS ") -> (Tensor d, Tensor dprob, Tensor dbias)");
  m.def("srelu(" FORWARD_INPUTS FORWARD_RESULTS "True, " SRELU_OPTIONS FORWARD_RETURNS);
  m.def("srelu_out(" FORWARD_INPUTS SRELU_OPTIONS FORWARD_OUTPUTS ") -> ()");
  m.def("glu(" FORWARD_INPUTS FORWARD_RESULTS "True, " GLU_OPTIONS FORWARD_RETURNS);
  m.def("glu_out(" FORWARD_INPUTS GLU_OPTIONS FORWARD_OUTPUTS ") -> ()");
  m.def("mm(" FORWARD_INPUTS FORWARD_RESULTS "False, " OPTIONS FORWARD_RETURNS);
  m.def("mm_out(" FORWARD_INPUTS OPTIONS FORWARD_OUTPUTS ") -> ()");
  m.def("wgrad(" WGRAD_INPUTS "ScalarType? d_dtype=None) -> Tensor");
  m.def("wgrad_out(" WGRAD_INPUTS "Tensor(a!)[] out, bool accumulate=False) -> ()");
  m.def(
      "quantize(Tensor x, ScalarType dtype, ScalarType sf_dtype, int sf_vec_size, *, str axis=\"row\", "
      "Tensor? norm_const=None, Tensor? padded_offsets=None) -> (Tensor data, Tensor scales)");
  m.def(
      "dequantize(Tensor data, Tensor scales, int sf_vec_size, *, str axis=\"row\", Tensor? norm_const=None, "
      "Tensor? padded_offsets=None, ScalarType? dtype=None) -> Tensor");
  m.def("reduce_dbias(Tensor slots, Tensor padded_offsets, Tensor(a!) dbias) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(cudnn_grouped, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(cudnn_grouped, CUDA, m) { implement(m); }

}  // namespace cudnn_grouped::bindings

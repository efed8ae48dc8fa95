// The torch operators: schemas, and one kernel for each that serves every device. Arguments become the core's problem,
// the core checks it, the device's engine runs it.
#include <limits>

#include "torch_values.h"

namespace cudnn_grouped::bindings {
namespace {

// The schemas are put together from the same pieces that the readers below read, in the same order.
#define OPERANDS_A "Tensor a, Tensor[] b, Tensor c, Tensor padded_offsets, Tensor alpha, "
#define OPERANDS_B                                                                                       \
  "Tensor prob, *, Tensor? sfa=None, Tensor[]? sfb=None, Tensor? norm_const=None, Tensor? b_ptrs=None, " \
  "Tensor? sfb_ptrs=None, int? n=None, ScalarType? b_dtype=None, str b_major=\"k\", "
#define FUNCTIONAL "ScalarType? d_dtype=None, bool generate_dbias=False, "
#define OPTIONS                                                                                                \
  "int sf_vec_size=16, bool discrete_col_sfd=False, bool? deterministic=None, int[] mma_tiler_mn=[256, 256], " \
  "int[]? cluster_shape_mn=None, bool vector_f32=False, bool use_dynamic_sched=False, "
#define DSRELU_OPTIONS "str c_role=\"grad_output\", float? tanh_clamp_scale=None"
#define DGLU_OPTIONS                                                                                        \
  "str act_func=\"dswiglu\", float? linear_offset=None, float geglu_alpha=1.702, float glu_clamp_max=7.0, " \
  "float glu_clamp_min=-7.0, str clamp_grad=\"mask\", float situ_beta1=4.0, float situ_beta2=25.0, "        \
  "str? epilogue_op=None, bool use_single_group_runtime_offsets=False"
#define OUTPUTS                                                                                  \
  ", Tensor(a!) d_row, Tensor(b!)? d_col=None, Tensor(c!)? dprob=None, Tensor(d!)? dbias=None, " \
  "Tensor(e!)? amax=None, Tensor(f!)? sfd_row=None, Tensor(g!)? sfd_col=None"
#define WORKSPACES ", Tensor(h!)? dprob_workspace=None, Tensor(i!)? dbias_workspace=None"
#define RESULTS \
  ") -> (Tensor d_row, Tensor d_col, Tensor dprob, Tensor dbias, Tensor amax, Tensor sfd_row, Tensor sfd_col)"

// The torch tensors behind the core's descriptions stay alive as long as the call.
struct Call {
  Arguments arguments;
  std::vector<MaybeTensor> held;
  std::vector<TorchTensor> held_lists;
  int64_t c_rank = 3, prob_rank = 3;

  Tensor hold(MaybeTensor tensor) {
    held.push_back(std::move(tensor));
    return describe(held.back());
  }
  std::vector<Tensor> hold(std::vector<TorchTensor> const& tensors) {
    held_lists.insert(held_lists.end(), tensors.begin(), tensors.end());
    return describe(tensors);
  }
};

void read_operands(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  a.a = call.hold(in.next<TorchTensor>());
  a.b = call.hold(in.next<std::vector<TorchTensor>>());
  a.c = call.hold(in.next<TorchTensor>());
  a.padded_offsets = call.hold(in.next<TorchTensor>());
  a.alpha = call.hold(in.next<TorchTensor>());
  if (a.operation == Operation::dglu) a.beta = call.hold(in.next<TorchTensor>());
  a.prob = call.hold(in.next<TorchTensor>());
  a.sfa = call.hold(in.next<MaybeTensor>());
  a.sfb = call.hold(in.next<std::optional<std::vector<TorchTensor>>>().value_or(std::vector<TorchTensor>{}));
  a.norm_const = call.hold(in.next<MaybeTensor>());
  a.b_ptrs = call.hold(in.next<MaybeTensor>());
  a.sfb_ptrs = call.hold(in.next<MaybeTensor>());
  a.n = in.next<std::optional<int64_t>>();
  a.b_dtype = in.next_optional_dtype();
  a.b_major = in.next<std::string>();
  call.c_rank = a.c.rank, call.prob_rank = a.prob.rank;
}

void read_options(Stack& in, Arguments& a) {
  a.sf_vec_size = in.next<int64_t>();
  a.discrete_col_sfd = in.next<bool>();
  a.deterministic = in.next<std::optional<bool>>();
  a.mma_tiler_mn = in.next<std::vector<int64_t>>();
  a.cluster_shape_mn = in.next<std::optional<std::vector<int64_t>>>();
  a.vector_f32 = in.next<bool>();
  a.use_dynamic_sched = in.next<bool>();
  if (a.operation == Operation::dsrelu) {
    a.c_role = in.next<std::string>();
    a.tanh_clamp_scale = in.next<std::optional<double>>();
    return;
  }
  a.act_func = in.next<std::string>();
  a.linear_offset = in.next<std::optional<double>>();
  a.geglu_alpha = in.next<double>();
  a.glu_clamp_max = in.next<double>();
  a.glu_clamp_min = in.next<double>();
  a.clamp_grad = in.next<std::string>();
  a.situ_beta1 = in.next<double>();
  a.situ_beta2 = in.next<double>();
  a.epilogue_op = in.next<std::optional<std::string>>();
  a.use_single_group_runtime_offsets = in.next<bool>();
}

void read_outputs(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  a.has_outputs = true;
  a.d_row = call.hold(in.next<TorchTensor>());
  a.d_col = call.hold(in.next<MaybeTensor>());
  a.dprob = call.hold(in.next<MaybeTensor>());
  a.dbias = call.hold(in.next<MaybeTensor>());
  a.amax = call.hold(in.next<MaybeTensor>());
  a.sfd_row = call.hold(in.next<MaybeTensor>());
  a.sfd_col = call.hold(in.next<MaybeTensor>());
  if (a.operation == Operation::dglu) return;
  a.dprob_workspace = call.hold(in.next<MaybeTensor>());
  a.dbias_workspace = call.hold(in.next<MaybeTensor>());
}

void checked(Arguments const& arguments, GroupedGemm& problem) {
  if (auto error = validate(arguments, problem)) raise(*error);
}

void run(Session& session, GroupedGemm const& problem) {
  Engine const& engine = session.engine();
  engine.run(problem, session.launch(engine.workspace_bytes(problem, session.workers())));
}

// Allocates what the functional operators return; absent outputs are empty tensors.
std::vector<TorchTensor> allocate_outputs(Call const& call, GroupedGemm& p) {
  int64_t const width = p.d_columns();
  Device const device = p.device;
  auto rows_by = [&](int64_t columns, int64_t rank, DType dtype) {
    std::vector<int64_t> sizes = {p.m, columns};
    if (rank == 3) sizes.push_back(1);
    return empty(sizes, dtype, device);
  };
  auto none = [&](DType dtype) { return empty({0}, dtype, device); };
  bool const quantised = p.quantised();
  TorchTensor d_row = rows_by(width, call.c_rank, p.d_dtype);
  TorchTensor d_col = quantised ? rows_by(width, call.c_rank, p.d_dtype) : none(p.d_dtype);
  TorchTensor dprob = call.prob_rank == 1 ? empty({p.m}, DType::float32, device) : rows_by(1, 3, DType::float32);
  TorchTensor dbias =
      call.arguments.generate_dbias ? empty({p.experts, width, 1}, DType::bfloat16, device) : none(DType::bfloat16);
  std::vector<int64_t> amax_shape = {p.experts, 1};
  if (p.width == 2) amax_shape = {p.experts, 2, 1};
  TorchTensor amax = p.has_amax() ? empty(amax_shape, DType::float32, device) : none(DType::float32);
  // Without scale factors in there are none out; the empty tensor still needs a dtype.
  DType const scale_dtype = p.block_scaled() ? p.scale_dtype : DType::float8_e8m0fnu;
  TorchTensor sfd_row = none(scale_dtype), sfd_col = none(scale_dtype);
  if (quantised) {
    sfd_row = empty_scales(p.m, ceil_div(width, kQuantBlock), 1, scale_dtype, device);
    sfd_col = empty_scales(width, ceil_div(p.m, kQuantBlock), 1, scale_dtype, device);
    p.d_col = d_col.data_ptr();
    p.sfd_row = static_cast<uint8_t*>(sfd_row.data_ptr());
    p.sfd_col = static_cast<uint8_t*>(sfd_col.data_ptr());
  }
  torch::stable::zero_(dprob);
  torch::stable::zero_(dbias);
  torch::stable::fill_(amax, -std::numeric_limits<double>::infinity());
  p.d_row = d_row.data_ptr();
  p.dprob = static_cast<float*>(dprob.data_ptr());
  if (call.arguments.generate_dbias) p.dbias = static_cast<uint16_t*>(dbias.data_ptr());
  if (p.has_amax()) p.amax = static_cast<float*>(amax.data_ptr());
  return {d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col};
}

template <Operation kOperation>
void backward(StableIValue* stack, uint64_t arguments, uint64_t) {
  Call call;
  Stack in(stack, arguments);
  call.arguments.operation = kOperation;
  read_operands(in, call);
  call.arguments.d_dtype = in.next_optional_dtype();
  call.arguments.generate_dbias = in.next<bool>();
  read_options(in, call.arguments);
  in.finish();
  GroupedGemm problem;
  checked(call.arguments, problem);
  Session session(problem.device);
  std::vector<TorchTensor> const results = allocate_outputs(call, problem);
  run(session, problem);
  in.give(results);
}

template <Operation kOperation>
void backward_out(StableIValue* stack, uint64_t arguments, uint64_t) {
  Call call;
  Stack in(stack, arguments);
  call.arguments.operation = kOperation;
  read_operands(in, call);
  read_options(in, call.arguments);
  read_outputs(in, call);
  in.finish();
  GroupedGemm problem;
  checked(call.arguments, problem);
  Session session(problem.device);
  run(session, problem);
}

TorchTensor empty_matrix(int64_t rows, int64_t columns, int64_t batch, int64_t rank, DType dtype, Device device) {
  if (rank == 2) return empty({rows, columns}, dtype, device);
  return empty_strided({rows, columns, batch}, {columns, 1, rows * columns}, dtype, device);
}

void quantize(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  QuantizeArguments a;
  TorchTensor const x = in.next<TorchTensor>();
  a.x = describe(x);
  a.dtype = in.next_dtype();
  a.sf_dtype = in.next_dtype();
  a.sf_vec_size = in.next<int64_t>();
  a.axis = in.next<std::string>();
  MaybeTensor const norm_const = in.next<MaybeTensor>(), offsets = in.next<MaybeTensor>();
  a.norm_const = describe(norm_const);
  a.padded_offsets = describe(offsets);
  in.finish();
  QuantizeProblem p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  bool const fp4 = p.data_dtype == DType::float4_e2m1fn_x2;
  TorchTensor const data =
      fp4 && p.by_column
          ? empty_matrix(p.columns, p.rows / 2, p.batch, a.x.rank, p.data_dtype, p.device)
          : empty_matrix(p.rows, fp4 ? p.columns / 2 : p.columns, p.batch, a.x.rank, p.data_dtype, p.device);
  TorchTensor const scales = empty_scales(p.scale_rows(), p.scale_blocks(), p.batch, p.scale_dtype, p.device);
  p.data = data.data_ptr();
  p.scales = static_cast<uint8_t*>(scales.data_ptr());
  session.engine().quantize(p, session.launch(0));
  in.give({data, scales});
}

void dequantize(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  QuantizeArguments a;
  a.dequantize = true;
  TorchTensor const data = in.next<TorchTensor>(), scales = in.next<TorchTensor>();
  a.data = describe(data);
  a.scales = describe(scales);
  a.sf_vec_size = in.next<int64_t>();
  a.axis = in.next<std::string>();
  MaybeTensor const norm_const = in.next<MaybeTensor>(), offsets = in.next<MaybeTensor>();
  a.norm_const = describe(norm_const);
  a.padded_offsets = describe(offsets);
  a.dtype = in.next_optional_dtype();
  in.finish();
  QuantizeProblem p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  TorchTensor const x = empty_matrix(p.rows, p.columns, p.batch, a.data.rank, p.x_dtype, p.device);
  p.x = x.data_ptr();
  session.engine().dequantize(p, session.launch(0));
  in.give({x});
}

void reduce_dbias(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  TorchTensor const slots = in.next<TorchTensor>(), offsets = in.next<TorchTensor>(), dbias = in.next<TorchTensor>();
  in.finish();
  DbiasReduction reduction;
  if (auto error = validate(describe(slots), describe(offsets), describe(dbias), reduction)) raise(*error);
  Session session(reduction.device);
  session.engine().reduce_dbias(reduction, session.launch(0));
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("dsrelu", backward<Operation::dsrelu>);
  m.impl("dglu", backward<Operation::dglu>);
  m.impl("dsrelu_out", backward_out<Operation::dsrelu>);
  m.impl("dglu_out", backward_out<Operation::dglu>);
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("reduce_dbias", reduce_dbias);
}

}  // namespace

STABLE_TORCH_LIBRARY(cudnn_grouped, m) {
  m.def("dsrelu(" OPERANDS_A OPERANDS_B FUNCTIONAL OPTIONS DSRELU_OPTIONS RESULTS);
  m.def("dglu(" OPERANDS_A "Tensor beta, " OPERANDS_B FUNCTIONAL OPTIONS DGLU_OPTIONS RESULTS);
  m.def("dsrelu_out(" OPERANDS_A OPERANDS_B OPTIONS DSRELU_OPTIONS OUTPUTS WORKSPACES ") -> ()");
  m.def("dglu_out(" OPERANDS_A "Tensor beta, " OPERANDS_B OPTIONS DGLU_OPTIONS OUTPUTS ") -> ()");
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

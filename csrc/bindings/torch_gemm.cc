// The GEMM operators' arguments become the core's problem, the core checks it, the device's engine runs it.
#include "torch_gemm.h"

#include <limits>

namespace cudnn_grouped::bindings {
namespace {

// The torch tensors behind the core's descriptions stay alive as long as the call.
struct Call {
  Arguments arguments;
  std::vector<MaybeTensor> held;
  std::vector<TorchTensor> held_lists;

  Tensor hold(MaybeTensor tensor) {
    held.push_back(std::move(tensor));
    return describe(held.back());
  }
  Tensor next(Stack& in) { return hold(in.next<TorchTensor>()); }
  Tensor next_optional(Stack& in) { return hold(in.next<MaybeTensor>()); }
  std::vector<Tensor> hold_list(std::vector<TorchTensor> const& tensors) {
    held_lists.insert(held_lists.end(), tensors.begin(), tensors.end());
    return describe(tensors);
  }
};

void read_inputs(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  a.a = call.next(in);
  if (a.operation != Operation::dact) a.b = call.hold_list(in.next<std::vector<TorchTensor>>());
  if (!is_forward(a.operation)) a.c = call.next(in);
  a.padded_offsets = call.next(in);
  switch (a.operation) {
    case Operation::dact:
      a.prob = call.next_optional(in);
      return;
    case Operation::dsrelu:
    case Operation::dglu:
      a.alpha = call.next(in);
      if (a.operation == Operation::dglu) a.beta = call.next(in);
      a.prob = call.next(in);
      break;
    default:
      a.alpha = call.next_optional(in);
      a.prob = call.next_optional(in);
      a.bias = call.next_optional(in);
  }
  a.sfa = call.next_optional(in);
  auto const sfb = in.next<std::optional<std::vector<TorchTensor>>>();
  if (sfb) a.sfb = call.hold_list(*sfb);
  a.norm_const = call.next_optional(in);
  a.b_ptrs = call.next_optional(in);
  a.sfb_ptrs = call.next_optional(in);
  a.n = in.next<std::optional<int64_t>>();
  a.b_dtype = in.next_optional_dtype();
  a.b_major = in.next<std::string>();
}

void read_results(Stack& in, Arguments& a) {
  if (is_forward(a.operation)) a.c_dtype = in.next_optional_dtype();
  a.d_dtype = in.next_optional_dtype();
  (is_forward(a.operation) ? a.generate_c : a.generate_dbias) = in.next<bool>();
}

void read_glu_parameters(Stack& in, Arguments& a) {
  a.linear_offset = in.next<std::optional<double>>();
  a.geglu_alpha = in.next<double>();
  a.glu_clamp_max = in.next<double>();
  a.glu_clamp_min = in.next<double>();
  a.situ_beta1 = in.next<double>();
  a.situ_beta2 = in.next<double>();
}

void read_options(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  if (a.operation == Operation::dact) {
    a.generate_d = in.next<bool>();
    a.c_per_expert = in.next<bool>();
    a.act_func = in.next<std::string>();
    a.tanh_clamp_scale = in.next<std::optional<double>>();
    return read_glu_parameters(in, a);
  }
  a.sf_vec_size = in.next<int64_t>();
  a.discrete_col_sfd = in.next<bool>();
  a.deterministic = in.next<std::optional<bool>>();
  a.mma_tiler_mn = in.next<std::vector<int64_t>>();
  a.cluster_shape_mn = in.next<std::optional<std::vector<int64_t>>>();
  a.vector_f32 = in.next<bool>();
  a.use_dynamic_sched = in.next<bool>();
  switch (a.operation) {
    case Operation::dsrelu:
      a.c_role = in.next<std::string>();
      a.tanh_clamp_scale = in.next<std::optional<double>>();
      a.bias = call.next_optional(in);
      return;
    case Operation::srelu:
      a.tanh_clamp_scale = in.next<std::optional<double>>();
      return;
    case Operation::mm:
      return;
    default:
      a.act_func = in.next<std::string>();
      read_glu_parameters(in, a);
      if (a.operation == Operation::dglu) {
        a.clamp_grad = in.next<std::string>();
        a.epilogue_op = in.next<std::optional<std::string>>();
      }
      a.use_single_group_runtime_offsets = in.next<bool>();
  }
}

void read_outputs(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  a.has_outputs = true;
  a.d_row = call.next(in);
  if (is_forward(a.operation)) a.c = call.next_optional(in);
  a.d_col = call.next_optional(in);
  if (!is_forward(a.operation)) {
    a.dprob = call.next_optional(in);
    a.dbias = call.next_optional(in);
  }
  a.amax = call.next_optional(in);
  a.sfd_row = call.next_optional(in);
  a.sfd_col = call.next_optional(in);
  if (a.operation == Operation::dsrelu) {
    a.dprob_workspace = call.next_optional(in);
    a.dbias_workspace = call.next_optional(in);
  }
}

void run(Session& session, GroupedGemm const& problem) {
  Engine const& engine = session.engine();
  engine.run(problem, session.launch(engine.workspace_bytes(problem, session.workers())));
}

// What the functional operators return; absent outputs are empty tensors.
struct Results {
  TorchTensor c, d, d_col, dprob, dbias, amax, sfd_row, sfd_col;

  Results(Arguments const& a, GroupedGemm& p)
      : c(none(p, p.c_dtype)),
        d(a.generate_d ? rows(p, p.d_columns(), row_rank(a), p.d_dtype) : none(p, p.d_dtype)),
        d_col(none(p, p.d_dtype)),
        dprob(none(p, DType::float32)),
        dbias(none(p, DType::bfloat16)),
        amax(none(p, DType::float32)),
        sfd_row(none(p, scale_dtype(p))),
        sfd_col(none(p, scale_dtype(p))) {
    if (a.generate_d) p.d_row = d.data_ptr();
    if (p.forward() && a.generate_c) {
      c = rows(p, p.c_columns(), row_rank(a), p.c_dtype);
      p.c = c.data_ptr();
    }
    if (p.quantised()) quantised(a, p);
    if (!p.forward()) gradients(a, p);
    if (p.has_amax()) {
      std::vector<int64_t> shape = {p.experts, 1};
      if (p.amax_width() == 2) shape = {p.experts, 2, 1};
      amax = empty(shape, DType::float32, p.device);
      torch::stable::fill_(amax, -std::numeric_limits<double>::infinity());
      p.amax = static_cast<float*>(amax.data_ptr());
    }
  }

 private:
  // The rows of results follow the saved C of the backward operators, and A of the forward ones.
  static int row_rank(Arguments const& a) { return is_forward(a.operation) ? a.a.rank : a.c.rank; }
  static TorchTensor none(GroupedGemm const& p, DType dtype) { return empty({0}, dtype, p.device); }
  // Without scale factors in there are none out; the empty tensor still needs a dtype.
  static DType scale_dtype(GroupedGemm const& p) { return p.block_scaled() ? p.scale_dtype : DType::float8_e8m0fnu; }
  static TorchTensor rows(GroupedGemm const& p, int64_t columns, int rank, DType dtype) {
    std::vector<int64_t> sizes = {p.m, columns};
    if (rank == 3) sizes.push_back(1);
    return empty(sizes, dtype, p.device);
  }

  void quantised(Arguments const& a, GroupedGemm& p) {
    int64_t const columns = p.d_columns();
    d_col = rows(p, columns, row_rank(a), p.d_dtype);
    sfd_row = empty_scales(p.m, ceil_div(columns, kQuantBlock), 1, p.scale_dtype, p.device);
    sfd_col = empty_scales(columns, ceil_div(p.m, kQuantBlock), 1, p.scale_dtype, p.device);
    p.d_col = d_col.data_ptr();
    p.sfd_row = static_cast<uint8_t*>(sfd_row.data_ptr());
    p.sfd_col = static_cast<uint8_t*>(sfd_col.data_ptr());
  }

  void gradients(Arguments const& a, GroupedGemm& p) {
    dprob = a.prob.rank == 1 ? empty({p.m}, DType::float32, p.device) : rows(p, 1, 3, DType::float32);
    p.dprob_is_new = true;
    p.dprob = static_cast<float*>(dprob.data_ptr());
    if (!a.generate_dbias) return;
    dbias = empty({p.experts, p.d_columns(), 1}, DType::bfloat16, p.device);
    torch::stable::zero_(dbias);
    p.dbias = static_cast<uint16_t*>(dbias.data_ptr());
  }
};

}  // namespace

template <Operation kOperation>
void gemm(StableIValue* stack, uint64_t arguments, uint64_t) {
  Call call;
  Stack in(stack, arguments);
  call.arguments.operation = kOperation;
  read_inputs(in, call);
  read_results(in, call.arguments);
  read_options(in, call);
  in.finish();
  GroupedGemm problem;
  if (auto error = validate(call.arguments, problem)) raise(*error);
  Session session(problem.device);
  session.check(problem);
  Results const r(call.arguments, problem);
  run(session, problem);
  if (is_forward(kOperation)) {
    in.give({r.c, r.d, r.d_col, r.amax, r.sfd_row, r.sfd_col});
  } else if (kOperation == Operation::dact) {
    in.give({r.d, r.dprob, r.dbias});
  } else {
    in.give({r.d, r.d_col, r.dprob, r.dbias, r.amax, r.sfd_row, r.sfd_col});
  }
}

template <Operation kOperation>
void gemm_out(StableIValue* stack, uint64_t arguments, uint64_t) {
  Call call;
  Stack in(stack, arguments);
  call.arguments.operation = kOperation;
  read_inputs(in, call);
  read_options(in, call);
  read_outputs(in, call);
  in.finish();
  GroupedGemm problem;
  if (auto error = validate(call.arguments, problem)) raise(*error);
  Session session(problem.device);
  session.check(problem);
  run(session, problem);
}

template void gemm<Operation::dsrelu>(StableIValue*, uint64_t, uint64_t);
template void gemm<Operation::dglu>(StableIValue*, uint64_t, uint64_t);
template void gemm<Operation::dact>(StableIValue*, uint64_t, uint64_t);
template void gemm<Operation::srelu>(StableIValue*, uint64_t, uint64_t);
template void gemm<Operation::glu>(StableIValue*, uint64_t, uint64_t);
template void gemm<Operation::mm>(StableIValue*, uint64_t, uint64_t);
template void gemm_out<Operation::dsrelu>(StableIValue*, uint64_t, uint64_t);
template void gemm_out<Operation::dglu>(StableIValue*, uint64_t, uint64_t);
template void gemm_out<Operation::srelu>(StableIValue*, uint64_t, uint64_t);
template void gemm_out<Operation::glu>(StableIValue*, uint64_t, uint64_t);
template void gemm_out<Operation::mm>(StableIValue*, uint64_t, uint64_t);

}  // namespace cudnn_grouped::bindings

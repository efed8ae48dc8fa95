// The GEMM operators' arguments become the core's problem, the core checks it, the device's engine runs it.
#include "torch_gemm.h"

#include <limits>

namespace cudnn_grouped::bindings {
namespace {

// The torch tensors behind the core's descriptions stay alive as long as the call.
struct Call {
  Arguments arguments;
  std::vector<TorchTensor> held;

  Call() { held.reserve(32); }
  Tensor hold(TorchTensor tensor) {
    held.push_back(std::move(tensor));
    return describe(held.back());
  }
  Tensor next(Stack& in) { return hold(in.next_tensor()); }
  Tensor next_optional(Stack& in) { return hold(in.next_optional_tensor()); }
  std::vector<Tensor> hold_list(std::vector<TorchTensor> tensors) {
    std::vector<Tensor> result = describe(tensors);
    held.insert(held.end(), std::make_move_iterator(tensors.begin()), std::make_move_iterator(tensors.end()));
    return result;
  }
};

void read_inputs(Stack& in, Call& call) {
  Arguments& a = call.arguments;
  a.a = call.next(in);
  if (a.operation != Operation::dact) a.b = call.hold_list(in.next_list());
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
  a.sfb = call.hold_list(in.next_optional_list());
  a.norm_const = call.next_optional(in);
  a.b_ptrs = call.next_optional(in);
  a.sfb_ptrs = call.next_optional(in);
  a.n = in.next<std::optional<int64_t>>();
  a.b_dtype = in.next_optional_dtype();
  a.b_major = in.next_string();
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
    a.act_func = in.next_string();
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
      a.c_role = in.next_string();
      a.tanh_clamp_scale = in.next<std::optional<double>>();
      a.bias = call.next_optional(in);
      return;
    case Operation::srelu:
      a.tanh_clamp_scale = in.next<std::optional<double>>();
      return;
    case Operation::mm:
      return;
    default:
      a.act_func = in.next_string();
      read_glu_parameters(in, a);
      if (a.operation == Operation::dglu) {
        a.clamp_grad = in.next_string();
        a.epilogue_op = in.next_optional_string();
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

// What the functional operators return; absent outputs are empty tensors. What an operator does not return stays null.
struct Results {
  TorchTensor c, d, d_col, dprob, dbias, amax, sfd_row, sfd_col;

  // The rows of results follow the saved C of the backward operators, and A of the forward ones.
  Results(Arguments const& a, GroupedGemm& p) : p_(p), rank_(p.forward() ? a.a.rank : a.c.rank) {
    d = a.generate_d ? rows(p.d_columns(), p.d_dtype) : none(p.d_dtype);
    if (a.generate_d) p.d_row = address_of(d);
    if (p.forward()) {
      saved(a.generate_c);
    } else {
      gradients(a.prob.rank, a.generate_dbias);
    }
    if (p.operation == Operation::dact) return;
    quantised();
    maxima();
  }

 private:
  GroupedGemm& p_;
  int const rank_;

  TorchTensor none(DType dtype) const { return empty({0}, dtype, p_.device); }
  TorchTensor rows(int64_t columns, DType dtype) const {
    int64_t const sizes[] = {p_.m, columns, 1};
    return empty({sizes, rank_ == 3 ? 3u : 2u}, dtype, p_.device);
  }
  TorchTensor scales(int64_t rows, int64_t length) const {
    return empty_scales(rows, ceil_div(length, kQuantBlock), 1, p_.scale_dtype, p_.device);
  }

  void saved(bool generate_c) {
    c = generate_c ? rows(p_.c_columns(), p_.c_dtype) : none(p_.c_dtype);
    if (generate_c) p_.c = address_of(c);
  }

  void gradients(int prob_rank, bool generate_dbias) {
    dprob = prob_rank == 1 ? empty({p_.m}, DType::float32, p_.device) : empty({p_.m, 1, 1}, DType::float32, p_.device);
    p_.sums_are_new = true;
    p_.dprob = static_cast<float*>(address_of(dprob));
    dbias = generate_dbias ? empty({p_.experts, p_.d_columns(), 1}, DType::bfloat16, p_.device) : none(DType::bfloat16);
    if (!generate_dbias) return;
    if (p_.m == 0) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(dbias.get()));  // the engines do nothing
    p_.dbias = static_cast<uint16_t*>(address_of(dbias));
  }

  void quantised() {
    if (!p_.quantised()) {
      // Without scale factors in there are none out; the empty tensor still needs a dtype.
      DType const scale_dtype = p_.block_scaled() ? p_.scale_dtype : DType::float8_e8m0fnu;
      d_col = none(p_.d_dtype), sfd_row = none(scale_dtype), sfd_col = none(scale_dtype);
      return;
    }
    int64_t const columns = p_.d_columns();
    d_col = rows(columns, p_.d_dtype), sfd_row = scales(p_.m, columns), sfd_col = scales(columns, p_.m);
    p_.d_col = address_of(d_col);
    p_.sfd_row = static_cast<uint8_t*>(address_of(sfd_row));
    p_.sfd_col = static_cast<uint8_t*>(address_of(sfd_col));
  }

  void maxima() {
    if (!p_.has_amax()) {
      amax = none(DType::float32);
      return;
    }
    int64_t const one[] = {p_.experts, 1}, two[] = {p_.experts, 2, 1};
    amax = empty(p_.amax_width() == 1 ? View<int64_t>(one) : View<int64_t>(two), DType::float32, p_.device);
    TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(amax.get(), -std::numeric_limits<double>::infinity()));
    p_.amax = static_cast<float*>(address_of(amax));
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
  Results r(call.arguments, problem);
  run(session, problem);
  if (is_forward(kOperation)) {
    in.give(r.c, r.d, r.d_col, r.amax, r.sfd_row, r.sfd_col);
  } else if (kOperation == Operation::dact) {
    in.give(r.d, r.dprob, r.dbias);
  } else {
    in.give(r.d, r.d_col, r.dprob, r.dbias, r.amax, r.sfd_row, r.sfd_col);
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

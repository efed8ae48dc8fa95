// quantize, dequantize, wgrad and the reduction of dbias slots.
#include "torch_gemm.h"

namespace cudnn_grouped::bindings {
namespace {

TorchTensor empty_matrix(int64_t rows, int64_t columns, int64_t batch, int64_t rank, DType dtype, Device device) {
  if (rank == 2) return empty({rows, columns}, dtype, device);
  return empty_strided({rows, columns, batch}, {columns, 1, rows * columns}, dtype, device);
}

}  // namespace

void quantize(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  QuantizeArguments a;
  TorchTensor const x = in.next_tensor();
  a.x = describe(x);
  a.dtype = in.next_dtype();
  a.sf_dtype = in.next_dtype();
  a.sf_vec_size = in.next<int64_t>();
  a.axis = in.next_string();
  TorchTensor const norm_const = in.next_optional_tensor(), offsets = in.next_optional_tensor();
  a.norm_const = describe(norm_const);
  a.padded_offsets = describe(offsets);
  in.finish();
  QuantizeProblem p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  bool const fp4 = p.data_dtype == DType::float4_e2m1fn_x2;
  TorchTensor data = fp4 && p.by_column ? empty_matrix(p.columns, p.rows / 2, p.batch, a.x.rank, p.data_dtype, p.device)
                                        : empty_matrix(p.rows, fp4 ? p.columns / 2 : p.columns, p.batch, a.x.rank,
                                                       p.data_dtype, p.device);
  TorchTensor scales = empty_scales(p.scale_rows(), p.scale_blocks(), p.batch, p.scale_dtype, p.device);
  p.data = address_of(data);
  p.scales = static_cast<uint8_t*>(address_of(scales));
  session.engine().quantize(p, session.launch(0));
  in.give(data, scales);
}

void dequantize(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  QuantizeArguments a;
  a.dequantize = true;
  TorchTensor const data = in.next_tensor(), scales = in.next_tensor();
  a.data = describe(data);
  a.scales = describe(scales);
  a.sf_vec_size = in.next<int64_t>();
  a.axis = in.next_string();
  TorchTensor const norm_const = in.next_optional_tensor(), offsets = in.next_optional_tensor();
  a.norm_const = describe(norm_const);
  a.padded_offsets = describe(offsets);
  a.dtype = in.next_optional_dtype();
  in.finish();
  QuantizeProblem p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  TorchTensor x = empty_matrix(p.rows, p.columns, p.batch, a.data.rank, p.x_dtype, p.device);
  p.x = address_of(x);
  session.engine().dequantize(p, session.launch(0));
  in.give(x);
}

void reduce_dbias(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  TorchTensor const slots = in.next_tensor(), offsets = in.next_tensor(), dbias = in.next_tensor();
  in.finish();
  DbiasReduction reduction;
  if (auto error = validate(describe(slots), describe(offsets), describe(dbias), reduction)) raise(*error);
  Session session(reduction.device);
  session.engine().reduce_dbias(reduction, session.launch(0));
}

static void read_weight_gradient(Stack& in, WeightGradientArguments& a, std::vector<TorchTensor>& held) {
  auto hold = [&](TorchTensor tensor) {
    held.push_back(std::move(tensor));
    return describe(held.back());
  };
  a.a = hold(in.next_tensor());
  a.b = hold(in.next_tensor());
  a.padded_offsets = hold(in.next_tensor());
  a.sfa = hold(in.next_optional_tensor());
  a.sfb = hold(in.next_optional_tensor());
  a.sf_vec_size = in.next<int64_t>();
  a.discrete_col_sfd = in.next<bool>();
  a.global_scale_a = hold(in.next_optional_tensor());
  a.global_scale_b = hold(in.next_optional_tensor());
}

static void run(Session& session, WeightGradient const& problem) {
  Engine const& engine = session.engine();
  int64_t const bytes = engine.weight_gradient_workspace_bytes(problem, session.workers());
  engine.weight_gradient(problem, session.launch(bytes));
}

void weight_gradient(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  WeightGradientArguments a;
  std::vector<TorchTensor> held;
  read_weight_gradient(in, a, held);
  a.d_dtype = in.next_optional_dtype();
  in.finish();
  WeightGradient p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  session.check(p);
  TorchTensor out = empty({p.experts, p.a.rows, p.b.rows}, p.out_dtype, p.device);
  int64_t const expert_bytes = p.a.rows * p.b.rows * bytes_of(p.out_dtype);
  char* const begin = static_cast<char*>(address_of(out));
  for (int64_t g = 0; g < p.experts; ++g) p.out.push_back(begin + g * expert_bytes);
  run(session, p);
  in.give(out);
}

void weight_gradient_out(StableIValue* stack, uint64_t arguments, uint64_t) {
  Stack in(stack, arguments);
  WeightGradientArguments a;
  std::vector<TorchTensor> held;
  read_weight_gradient(in, a, held);
  auto const out = in.next_list();
  a.out = describe(out);
  a.accumulate = in.next<bool>();
  a.has_outputs = true;
  in.finish();
  WeightGradient p;
  if (auto error = validate(a, p)) raise(*error);
  Session session(p.device);
  session.check(p);
  run(session, p);
}

}  // namespace cudnn_grouped::bindings

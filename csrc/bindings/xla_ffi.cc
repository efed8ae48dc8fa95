// The XLA handlers, one for each platform, that serve every operator: the attributes `operation`, `operands` and
// `results` say what a call is, all other attributes are the operator's options by name. The problem, its checks and
// the engines are the torch operators'.
#include <algorithm>

#include "../core/device_values.h"
#include "../core/scale_layout.h"
#include "named_arguments.h"
#include "xla_runtime.h"

namespace cudnn_grouped::bindings {
namespace {

constexpr uint32_t kMinusInfinity = 0xFF800000;

// A call's buffers by name.
struct Buffers {
  std::vector<Entry> names;
  std::vector<Tensor> tensors;

  Tensor const& named(char const* name) const {
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i].name == name) return tensors[i];
    }
    misfit(name, "expected a buffer, got none");
  }
};

template <class List>
Buffers described(List const& list, std::string_view text, Device device) {
  Buffers result{entries(text), {}};
  if (result.names.size() != list.size()) {
    misfit("buffers", "expected " + std::string(text) + ", got " + std::to_string(list.size()));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if constexpr (std::is_same_v<List, ffi::RemainingArgs>) {
      result.tensors.push_back(describe(result.names[i], *list.template get<ffi::AnyBuffer>(i), device));
    } else {
      result.tensors.push_back(describe(result.names[i], **list.template get<ffi::AnyBuffer>(i), device));
    }
  }
  return result;
}

void take(Tensor& into, Tensor const& tensor) { into = tensor; }
void take(std::vector<Tensor>& into, Tensor const& tensor) { into.push_back(tensor); }

// What the destination-passing form of an operator writes.
bool is_written(Arguments const& a, std::string_view name) {
  constexpr std::string_view outputs[] = {"d",    "d_row",   "d_col",   "dprob",           "dbias",
                                          "amax", "sfd_row", "sfd_col", "dprob_workspace", "dbias_workspace"};
  return std::find(std::begin(outputs), std::end(outputs), name) != std::end(outputs) ||
         (name == "c" && is_forward(a.operation));
}
bool is_written(WeightGradientArguments const&, std::string_view) { return false; }
bool is_written(QuantizeArguments const&, std::string_view) { return false; }

// An operand is never where a result belongs, nor the reverse: XLA's operands must stay as they are.
template <class A>
void assign(A& arguments, Buffers const& buffers, bool written) {
  for (size_t i = 0; i < buffers.names.size(); ++i) {
    bool known = false;
    each_tensor(arguments, [&](char const* name, auto& into) {
      if (buffers.names[i].name != name || is_written(arguments, name) != written) return;
      take(into, buffers.tensors[i]);
      known = true;
    });
    if (!known)
      misfit(buffers.names[i].name,
             written ? "expected a result of the operator" : "expected an argument of the operator");
  }
}

template <class A>
void read_options(A& arguments, ffi::Dictionary const& attributes) {
  size_t known = 3;  // operation, operands, results
  each_option(arguments, [&](char const* name, auto& into) {
    known += attributes.contains(name);
    read_option(attributes, name, into);
  });
  if (known != attributes.size()) misfit("options", "expected options of the operator alone");
}

template <class A, class Problem>
void check(A const& arguments, Problem& problem) {
  if (auto error = validate(arguments, problem)) throw CallFailure{*error};
}

// The room of a result that the validator does not see.
void check_bytes(char const* name, Tensor const& result, int64_t bytes) {
  int64_t const got = result.numel() * bytes_of(result.dtype);
  if (got != bytes) misfit(name, "expected " + std::to_string(bytes) + " bytes, got " + std::to_string(got));
}

// The results are the outputs of the destination-passing form, new on every call.
void run(Arguments& a, Buffers const& results, Runtime& runtime) {
  a.has_outputs = true;
  assign(a, results, /*written=*/true);
  GroupedGemm p;
  check(a, p);
  p.sums_are_new = true;
  Engine const& engine = runtime.engine();
  if (auto error = engine.check(p)) throw CallFailure{*error};
  Launch const& launch = runtime.launch(engine.workspace_bytes(p, runtime.workers()));
  // The engines do nothing without rows. Those of D are a multiple of 16 bytes: dbias has an even number of 16-bit
  // values.
  if (p.dbias && p.m == 0) fill(p.device, p.dbias, 0, p.experts * p.d_columns() / 2, launch);
  if (p.amax) fill(p.device, p.amax, kMinusInfinity, p.experts * p.amax_width(), launch);
  engine.run(p, launch);
}

void run(WeightGradientArguments& a, Buffers const& results, Runtime& runtime) {
  WeightGradient p;
  check(a, p);
  Tensor const& out = results.named("out");
  int64_t const expert_bytes = p.a.rows * p.b.rows * bytes_of(p.out_dtype);
  check_bytes("out", out, p.experts * expert_bytes);
  for (int64_t g = 0; g < p.experts; ++g) p.out.push_back(out.as<char>() + g * expert_bytes);
  Engine const& engine = runtime.engine();
  if (auto error = engine.check(p)) throw CallFailure{*error};
  engine.weight_gradient(p, runtime.launch(engine.weight_gradient_workspace_bytes(p, runtime.workers())));
}

void run(QuantizeArguments& a, Buffers const& results, Runtime& runtime) {
  QuantizeProblem p;
  check(a, p);
  if (a.dequantize) {
    Tensor const& x = results.named("x");
    check_bytes("x", x, p.batch * p.rows * p.columns * bytes_of(p.x_dtype));
    p.x = x.data;
    return runtime.engine().dequantize(p, runtime.launch(0));
  }
  Tensor const &data = results.named("data"), &scales = results.named("scales");
  check_bytes("data", data, p.data_bytes());
  check_bytes("scales", scales, p.batch * ScaleLayout::of(p.scale_rows(), p.scale_blocks()).bytes());
  p.data = data.data;
  p.scales = scales.as<uint8_t>();
  runtime.engine().quantize(p, runtime.launch(0));
}

ffi::Error failure_of(Error const& error) {
  ffi::ErrorCode const code = error.kind == Error::Kind::value             ? ffi::ErrorCode::kInvalidArgument
                              : error.kind == Error::Kind::not_implemented ? ffi::ErrorCode::kUnimplemented
                                                                           : ffi::ErrorCode::kFailedPrecondition;
  return ffi::Error(code, error.message());
}

// No exception may leave a handler.
ffi::Error call(Runtime runtime, ffi::RemainingArgs const& args, ffi::RemainingRets const& rets,
                ffi::Dictionary const& attributes) {
  try {
    ReadingStream const reading(runtime.stream());
    std::string const operation(attribute(attributes, "operation"));
    std::optional<AnyArguments> arguments = arguments_of(operation);
    if (!arguments) misfit("operation", std::string("expected ") + kOperationNames + ", got " + operation);
    Buffers const operands = described(args, attribute(attributes, "operands"), runtime.device());
    Buffers const results = described(rets, attribute(attributes, "results"), runtime.device());
    std::visit(
        [&](auto& a) {
          assign(a, operands, /*written=*/false);
          read_options(a, attributes);
          run(a, results, runtime);
        },
        *arguments);
  } catch (CallFailure const& failure) {
    return failure_of(failure.error);
  } catch (std::exception const& failure) {
    return ffi::Error::Internal(failure.what());
  }
  return ffi::Error::Success();
}

ffi::Error call_cpu(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  return call(Runtime::cpu(threads), args, rets, attributes);
}

ffi::Error call_cuda(int32_t device_ordinal, void* stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, ffi::Dictionary attributes) {
  return call(Runtime::cuda(device_ordinal, stream, scratch), args, rets, attributes);
}

}  // namespace
}  // namespace cudnn_grouped::bindings

extern "C" {
CG_API XLA_FFI_Error* cudnn_grouped_xla_cpu(XLA_FFI_CallFrame* frame);
CG_API XLA_FFI_Error* cudnn_grouped_xla_cuda(XLA_FFI_CallFrame* frame);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    cudnn_grouped_xla_cpu, cudnn_grouped::bindings::call_cpu,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(cudnn_grouped_xla_cuda, cudnn_grouped::bindings::call_cuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::PlatformStream<void*>>()
                                  .Ctx<xla::ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

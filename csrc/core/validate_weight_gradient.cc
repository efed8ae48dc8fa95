#include "device_values.h"
#include "scale_layout.h"
#include "weight_gradient.h"

namespace cudnn_grouped {
namespace {

// (rows, T) with either dimension contiguous; FP4 pairs lie along T. transposed: the tensor is given as (T, rows).
WeightGradient::Operand operand(char const* name, TensorCheck const& check, Tensor const& t, bool transposed,
                                int64_t tokens) {
  int const row_axis = transposed ? 1 : 0, token_axis = 1 - row_axis;
  int64_t const rows = t.size[row_axis], visible = t.size[token_axis];
  int64_t by_tokens[2], by_rows[2];
  by_tokens[row_axis] = visible, by_tokens[token_axis] = 1;
  by_rows[row_axis] = 1, by_rows[token_axis] = rows;
  bool const contiguous = check.has_strides(by_tokens);
  if (!contiguous && (is_fp4(t.dtype) || !check.has_strides(by_rows))) {
    check.strides(by_tokens, is_fp4(t.dtype) ? "FP4 pairs lie along the tokens" : "or " + text_of(by_rows));
  }
  if (tokens != (is_fp4(t.dtype) ? 2 * visible : visible)) {
    fail(name, "the tokens of a, " + std::to_string(tokens), shape_text(t));
  }
  int64_t const step = 16 / bytes_of(t.dtype);
  if (!contiguous && rows % step) {
    fail(name, "a multiple of " + std::to_string(step) + " (rows of 16 bytes)", std::to_string(rows));
  }
  check.aligned(16);
  return {t.data, rows, contiguous, nullptr};
}

void check_formats(WeightGradientArguments const& in, WeightGradient& out) {
  using D = DType;
  auto check = [&](char const* n, Tensor const& t) { return TensorCheck(n, t, in.a.device); };
  check("a", in.a).dtype({D::bfloat16, D::float8_e4m3fn, D::float8_e5m2, D::float4_e2m1fn_x2, D::uint8});
  bool const same = in.b.dtype == in.a.dtype || (is_fp4(in.a.dtype) && is_fp4(in.b.dtype));
  if (!same) check("b", in.b).dtype({in.a.dtype});
  out.operands = operand_format(in.a.dtype);
  if (!out.block_scaled()) {
    if (in.sfa.present()) fail("sfa", "None with BF16 operands", "a tensor");
    if (in.sfb.present()) fail("sfb", "None with BF16 operands", "a tensor");
    if (in.sf_vec_size != 16) fail("sf_vec_size", "16 with BF16 operands", std::to_string(in.sf_vec_size));
    return;
  }
  if (!in.sfa.present()) fail("sfa", "the scale factors of a", "None");
  if (!in.sfb.present()) fail("sfb", "the scale factors of b", "None");
  bool const fp4 = out.operands == OperandFormat::e2m1;
  D const scales[] = {D::float8_e8m0fnu, D::float8_e4m3fn};  // the second with FP4 alone
  check("sfa", in.sfa).dtype({scales, fp4 ? 2u : 1u});
  check("sfb", in.sfb).dtype({in.sfa.dtype});
  bool const fits = in.sf_vec_size == 32 ? in.sfa.dtype == D::float8_e8m0fnu : fp4 && in.sf_vec_size == 16;
  if (!fits) {
    fail("sf_vec_size", fp4 ? "16, or 32 with float8_e8m0fnu" : "32 with FP8 operands", std::to_string(in.sf_vec_size),
         fp4 ? "" : "the default is 16");
  }
  out.scale_dtype = in.sfa.dtype;
}

void check_memory(WeightGradientArguments const& in) {
  std::vector<NamedTensor> tensors;
  for (size_t g = 0; g < in.out.size(); ++g) tensors.push_back({"out", in.out[g], int(g)});
  for (NamedTensor const& input :
       {NamedTensor{"a", in.a}, NamedTensor{"b", in.b}, NamedTensor{"sfa", in.sfa}, NamedTensor{"sfb", in.sfb},
        NamedTensor{"padded_offsets", in.padded_offsets}, NamedTensor{"global_scale_a", in.global_scale_a},
        NamedTensor{"global_scale_b", in.global_scale_b}}) {
    tensors.push_back(input);
  }
  check_overlaps(tensors, in.out.size());
}

void run(WeightGradientArguments const& in, WeightGradient& out) {
  auto check = [&](std::string n, Tensor const& t) { return TensorCheck(std::move(n), t, in.a.device); };
  struct Named {
    char const* name;
    Tensor const& tensor;
  };
  for (Named const& t : {Named{"a", in.a}, Named{"b", in.b}, Named{"padded_offsets", in.padded_offsets}}) {
    if (!t.tensor.present()) fail(t.name, "a tensor", "None");
  }
  check_formats(in, out);
  if (in.a.rank != 2) fail("a", "shape (m, T)", shape_text(in.a));
  if (in.b.rank != 2) fail("b", "shape (T, n)", shape_text(in.b));
  out.device = in.a.device;
  out.tokens = in.a.size[1] * (is_fp4(in.a.dtype) ? 2 : 1);
  if (out.tokens > kMaxRows) {
    fail("a", "at most " + std::to_string(kMaxRows) + " tokens", std::to_string(out.tokens));
  }
  if (out.tokens % kRowAlignment) fail("a", "T, its tokens, a multiple of 256", std::to_string(out.tokens));
  out.a = operand("a", check("a", in.a), in.a, false, out.tokens);
  out.b = operand("b", check("b", in.b), in.b, true, out.tokens);
  if (out.a.rows <= 0) fail("a", "m above 0", std::to_string(out.a.rows));
  if (out.b.rows <= 0) fail("b", "n above 0", std::to_string(out.b.rows));
  check("padded_offsets", in.padded_offsets).experts();
  out.experts = in.padded_offsets.size[0];
  out.padded_offsets = in.padded_offsets.as<int32_t>();
  out.sf_vec_size = in.sf_vec_size;
  out.discrete_scales = in.discrete_col_sfd;
  if (out.block_scaled()) {
    int64_t const blocks = out.tokens / out.sf_vec_size;
    check_scales(check("sfa", in.sfa), "sfa", in.sfa, out.a.rows, blocks, 1);
    check_scales(check("sfb", in.sfb), "sfb", in.sfb, out.b.rows, blocks, 1);
    out.a.scales = in.sfa.as<uint8_t>();
    out.b.scales = in.sfb.as<uint8_t>();
  }
  for (Named const& t : {Named{"global_scale_a", in.global_scale_a}, Named{"global_scale_b", in.global_scale_b}}) {
    if (t.tensor.present()) {
      check(t.name, t.tensor).dtype({DType::float32}).shape({out.experts}, "(L,)").contiguous().aligned(4);
    }
  }
  out.global_scale_a = in.global_scale_a.as<float>();
  out.global_scale_b = in.global_scale_b.as<float>();
  DType const plain[] = {DType::bfloat16, DType::float16, DType::float32};
  out.accumulate = in.accumulate;
  if (!in.has_outputs) {
    out.out_dtype = in.d_dtype == DType::none ? DType::bfloat16 : in.d_dtype;
    bool known = false;
    for (DType dtype : plain) known |= dtype == out.out_dtype;
    if (!known) fail("d_dtype", "dtype " + text_of(plain), text_of(out.out_dtype));
  } else {
    if (int64_t(in.out.size()) != out.experts) {
      fail("out", "one tensor per expert, " + std::to_string(out.experts), std::to_string(in.out.size()));
    }
    for (size_t g = 0; g < in.out.size(); ++g) {
      Tensor const& t = in.out[g];
      check(item_name("out", int(g)), t)
          .dtype(g ? View<DType>(&in.out[0].dtype, 1) : plain)
          .shape({out.a.rows, out.b.rows}, "(m, n)")
          .contiguous()
          .aligned(bytes_of(t.dtype));
      out.out.push_back(t.data);
    }
    out.out_dtype = in.out[0].dtype;
    check_memory(in);
  }
  if (!in.values_readable) return;
  if (values_are_checked(in.a.device)) out.checked_offsets = checked_offset_values(in.padded_offsets, out.tokens);
}

}  // namespace

std::optional<Error> validate(WeightGradientArguments const& arguments, WeightGradient& problem) {
  problem = WeightGradient{};
  try {
    run(arguments, problem);
  } catch (CheckFailure const& failure) {
    return failure.error;
  }
  return std::nullopt;
}

}  // namespace cudnn_grouped

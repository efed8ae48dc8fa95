#include "scale_layout.h"
#include "validator.h"

namespace cudnn_grouped {

void Validator::run() {
  required_tensors();
  if (has_weights()) weight_mode();
  formats();
  sizes();
  activation();
  scheduling();
  input_tensors();
  if (has_weights()) {
    weights();
    scale_factors();
  }
  if (in.has_outputs) output_tensors();
  if (in.values_readable && values_are_checked(in.a.device)) values();
}

void Validator::required_tensors() {
  auto need = [&](char const* name, Tensor const& t) {
    if (!t.present()) fail(name, "a tensor", "None");
  };
  need(a_name(), in.a);
  if (!is_forward(in.operation)) need("c", in.c);
  need("padded_offsets", in.padded_offsets);
  if (in.operation == Operation::dsrelu || in.operation == Operation::dglu) {
    need("alpha", in.alpha);
    need("prob", in.prob);
  }
  if (in.operation == Operation::dglu) need("beta", in.beta);
  if (in.operation != Operation::dact && (in.c_per_expert || !in.generate_d)) {
    fail(in.c_per_expert ? "c_per_expert" : "generate_d", "the default with another operator than dact",
         in.c_per_expert ? "True" : "False");
  }
  check("padded_offsets", in.padded_offsets).experts();
  out.experts = in.padded_offsets.size[0];
}

void Validator::formats() {
  for (SupportRow const& candidate : support_rows()) {
    if (candidate.operation == in.operation && contains(candidate.operands, in.a.dtype)) row = &candidate;
  }
  TensorCheck const a = check(a_name(), in.a);
  if (!row) a.dtype(supported_operands());
  out.operands = operand_format(in.a.dtype);
  if (has_weights()) {
    bool const same = b_dtype == in.a.dtype || (is_fp4(b_dtype) && is_fp4(in.a.dtype));
    dequantised = contains(row->dequantised_b, b_dtype);
    if (!same && (!dequantised || scales_of_b())) {
      std::string expected = "the dtype of a, " + text_of(in.a.dtype);
      if (!row->dequantised_b.empty()) expected += ", or " + text_of(row->dequantised_b) + " without " + sfb_name();
      std::string const got =
          mode == Weights::pointers || b_dtype != DType::other ? text_of(b_dtype) : in.b[0].dtype_name;
      fail(mode == Weights::pointers ? "b_dtype" : list_name("b", 0), expected, dequantised ? got + " with it" : got);
    }
    for (size_t i = 1; i < in.b.size(); ++i) check(list_name("b", i), in.b[i]).dtype({in.b[0].dtype});
    out.weights = operand_format(b_dtype);
    row->scales.empty() ? forbid_scales() : scale_formats();
  }
  output_formats();
}

std::vector<DType> Validator::supported_operands() const {
  std::vector<DType> operands;
  for (SupportRow const& candidate : support_rows()) {
    if (candidate.operation != in.operation) continue;
    operands.insert(operands.end(), candidate.operands.begin(), candidate.operands.end());
  }
  return operands;
}

void Validator::output_formats() {
  // C is an input of the backward operations, and what the forward ones save for them.
  bool const c_is_given = !out.forward() || in.has_outputs;
  out.c_dtype = c_is_given ? in.c.dtype : in.c_dtype == DType::none ? DType::bfloat16 : in.c_dtype;
  if (c_is_given && in.c.present()) check("c", in.c).dtype(row->c);
  if (!c_is_given && !contains(row->c, out.c_dtype)) fail("c_dtype", "dtype " + text_of(row->c), text_of(out.c_dtype));
  if (in.vector_f32 && is_fp8(out.c_dtype)) {
    fail("vector_f32", "False with an FP8 c", "True", "a c of 16 or 32 bits allows it");
  }
  bool const d_is_given = in.has_outputs && in.generate_d;
  char const* d_name = d_is_given ? (out.forward() ? "d" : "d_row") : "d_dtype";
  if (d_is_given && !in.d_row.present()) fail(d_name, "a tensor", "None");
  out.d_dtype = d_is_given ? in.d_row.dtype : in.d_dtype == DType::none ? DType::bfloat16 : in.d_dtype;
  if (!contains(row->d, out.d_dtype)) {
    bool const other = d_is_given && out.d_dtype == DType::other;
    fail(d_name, "dtype " + text_of(row->d), other ? in.d_row.dtype_name : text_of(out.d_dtype),
         std::string("what ") + row->name + " operands can give");
  }
  out.scale_dtype = in.sfa.dtype;
  out.sf_vec_size = in.sf_vec_size;
  out.discrete_col_sfd = in.discrete_col_sfd;
  if (out.quantised() && !in.norm_const.present()) {
    fail("norm_const", "a (1,) float32 tensor", "None", "an FP8 D is quantised with it");
  }
  if (in.norm_const.present()) check("norm_const", in.norm_const).scalar();
}

// Whether b is (L, N, K), as other libraries have weights, and cannot be (N, K, L).
bool Validator::is_by_expert(Tensor const& b) const {
  auto const is_k = [&](int64_t size) { return size == in.a.size[1] || size == out.k; };
  bool const as_asked = is_k(b.size[1]) && b.size[2] == out.experts;
  return b.rank == 3 && b.size[0] == out.experts && is_k(b.size[2]) && !as_asked;
}

void Validator::sizes() {
  if (in.a.rank != 2 && in.a.rank != 3) {
    fail(a_name(), has_weights() ? "shape (M, K, 1) or (M, K)" : "shape (M, N, 1) or (M, N)", shape_text(in.a));
  }
  out.m = in.a.size[0];
  if (out.m > kMaxRows) fail(a_name(), "at most " + std::to_string(kMaxRows) + " rows", std::to_string(out.m));
  if (out.m % kRowAlignment) {
    fail(a_name(), "M, its number of rows, a multiple of 256", std::to_string(out.m),
         "pad each expert's rows to a multiple of 256");
  }
  bool const gated_dact = in.operation == Operation::dact && in.act_func != "dsrelu" && in.act_func != "identity";
  out.width = in.operation == Operation::dglu || in.operation == Operation::glu || gated_dact ? 2 : 1;
  char const* n_name = mode == Weights::pointers ? "n" : has_weights() ? "b" : "r";
  if (!has_weights()) {
    out.n = in.a.size[1];
    whole_rows("r", out.n, "N", 2 * bytes_of(in.a.dtype));
  } else {
    out.k = is_fp4(in.a.dtype) ? 2 * in.a.size[1] : in.a.size[1];
    if (out.k <= 0) fail("a", "K, its number of columns, above 0", std::to_string(out.k));
    if (mode != Weights::pointers) {
      if (in.b[0].rank != 2 && in.b[0].rank != 3) {
        fail(list_name("b", 0), "shape (N, K, L), or a list of (N, K) tensors", shape_text(in.b[0]));
      }
      if (is_by_expert(in.b[0])) {
        fail(list_name("b", 0), "shape (N, K, L)", shape_text(in.b[0]), "weights of (L, N, K): b.permute(1, 2, 0)");
      }
    }
    out.n = mode == Weights::pointers ? *in.n : in.b[0].size[0];
    whole_rows("a", out.k, "K", is_fp4(in.a.dtype) ? 1 : 2 * bytes_of(in.a.dtype));
  }
  if (out.n <= 0) fail(n_name, "N above 0", std::to_string(out.n));
  int64_t const step = out.width == 1 ? 1 : out.forward() ? 2 * kInterleave : kInterleave;
  if (out.n % step) {
    fail(n_name, "N a multiple of " + std::to_string(step), std::to_string(out.n),
         "gate and up alternate in blocks of 32 columns");
  }
  bool const writes_c = out.forward() && !in.has_outputs;
  if (!out.forward() || in.c.present() || in.generate_c) {
    whole_rows(writes_c ? "c_dtype" : "c", out.c_columns(), c_symbol(), 2 * bytes_of(out.c_dtype));
  }
  char const* d_name = in.has_outputs ? (out.forward() ? "d" : "d_row") : "d_dtype";
  whole_rows(d_name, out.d_columns(), d_symbol(), 2 * bytes_of(out.d_dtype));
  if (out.quantised()) scale_sizes();
}

// The GPU engines' offsets of D's scale factors are of 32 bits (csrc/cuda/scale_places.h).
void Validator::scale_sizes() const {
  ScaleLayout const row = ScaleLayout::of(out.m, ceil_div(out.d_columns(), kQuantBlock));
  ScaleLayout const column = ScaleLayout::of(out.d_columns(), ceil_div(out.m, kQuantBlock));
  int64_t const bytes = std::max(row.bytes(), column.bytes());
  if (bytes > int64_t(1) << 32) {
    fail(a_name(), "rows for which the scale factors of D take at most 4 GiB", std::to_string(bytes) + " bytes",
         "fewer rows a call, or a D of 16 bits");
  }
}

// Rows are a multiple of 16 bytes (TMA). pair_bytes: of two elements, which is one byte for FP4.
void Validator::whole_rows(char const* name, int64_t columns, char const* symbol, int64_t pair_bytes) const {
  int64_t const step = 32 / pair_bytes;
  if (columns % step) {
    fail(name, std::string(symbol) + " a multiple of " + std::to_string(step) + " (rows of 16 bytes)",
         std::to_string(columns));
  }
}

void Validator::input_tensors() {
  char const* const columns = !has_weights() ? "M, N" : is_fp4(in.a.dtype) ? "M, K/2" : "M, K";
  check(a_name(), in.a).matrix(out.m, in.a.size[1], columns);
  if (!out.forward()) {
    std::string const symbols = std::string(in.c_per_expert ? "L, " : "M, ") + c_symbol();
    check("c", in.c).matrix(in.c_per_expert ? out.experts : out.m, out.c_columns(), symbols);
  }
  per_expert("alpha", in.alpha);
  per_expert("beta", in.beta);
  if (in.prob.present()) check("prob", in.prob).dtype({DType::float32}).column(out.m, "M");
  if (in.bias.present() && in.operation == Operation::dsrelu && in.c_role == "preactivation") {
    fail("bias", "None with c_role=\"preactivation\"", "a tensor", "the saved C has its bias already");
  }
  if (in.bias.present()) {
    check("bias", in.bias)
        .dtype({DType::float32, DType::bfloat16, DType::float16})
        .shape({out.experts, out.n}, "(L, N)")
        .contiguous()
        .aligned(bytes_of(in.bias.dtype));
  }
  out.device = in.a.device;
  out.a = in.a.data;
  out.a_dtype = in.a.dtype;
  out.c = in.c.data;
  out.c_per_expert = in.c_per_expert;
  out.padded_offsets = in.padded_offsets.as<int32_t>();
  out.alpha = in.alpha.as<float>();
  // Block-scaled dGeGLU reads C as it was saved (decisions F4).
  bool const ignores_beta = out.block_scaled() && out.activation == Activation::geglu;
  out.beta = ignores_beta ? nullptr : in.beta.as<float>();
  out.prob = in.prob.as<float>();
  out.bias = in.bias.data;
  out.bias_dtype = in.bias.dtype;
  out.norm_const = in.norm_const.as<float>();
}

void Validator::per_expert(char const* name, Tensor const& t) const {
  if (t.present()) check(name, t).dtype({DType::float32}).shape({out.experts}, "(L,)").contiguous().aligned(4);
}

void Validator::values() {
  if (!out.single_group) out.checked_offsets = checked_offset_values(in.padded_offsets, out.m);
  if (mode == Weights::pointers) pointer_values();
  if (out.quantised()) check_norm_value(out.norm_const, out.device);
}

std::optional<Error> validate(Arguments const& arguments, GroupedGemm& problem) {
  problem = GroupedGemm{};
  problem.operation = arguments.operation;
  try {
    Validator(arguments, problem).run();
  } catch (CheckFailure const& failure) {
    return failure.error;
  }
  return std::nullopt;
}

}  // namespace cudnn_grouped

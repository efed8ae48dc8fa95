// The checks of the two backward operators, in the order in which a caller would want to hear of them:
// what is missing, which formats, which sizes, each tensor, the options, and last the values.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "check.h"
#include "scale_layout.h"
#include "support.h"

namespace cudnn_grouped {
namespace {

bool contains(std::vector<DType> const& list, DType dtype) {
  return std::find(list.begin(), list.end(), dtype) != list.end();
}
bool is_fp4(DType d) { return d == DType::float4_e2m1fn_x2 || d == DType::uint8; }
bool is_fp8(DType d) { return d == DType::float8_e4m3fn || d == DType::float8_e5m2; }

class Validator {
 public:
  Validator(Arguments const& arguments, GroupedGemm& problem) : in(arguments), out(problem) {}

  void run() {
    required_tensors();
    weight_mode();
    formats();
    sizes();
    activation();
    scheduling();
    input_tensors();
    weights();
    scale_factors();
    if (in.has_outputs) output_tensors();
    if (in.values_readable && in.a.device.type == Device::Type::cpu) values();
  }

 private:
  Arguments const& in;
  GroupedGemm& out;
  SupportRow const* row = nullptr;
  DType b_dtype = DType::none;

  enum class Weights { dense, list, pointers } mode = Weights::dense;

  TensorCheck check(std::string name, Tensor const& tensor) const { return {std::move(name), tensor, in.a.device}; }
  std::string list_name(char const* name, size_t i) const {
    return mode == Weights::list ? std::string(name) + "[" + std::to_string(i) + "]" : name;
  }

  void required_tensors() {
    auto need = [&](char const* name, Tensor const& t) {
      if (!t.present()) fail(name, "a tensor", "None");
    };
    need("a", in.a);
    need("c", in.c);
    need("padded_offsets", in.padded_offsets);
    need("alpha", in.alpha);
    if (in.operation == Operation::dglu) need("beta", in.beta);
    need("prob", in.prob);
    check("padded_offsets", in.padded_offsets).dtype({DType::int32});
    if (in.padded_offsets.rank != 1) fail("padded_offsets", "shape (L,)", shape_text(in.padded_offsets));
    out.experts = in.padded_offsets.size[0];
    if (out.experts < 1 || out.experts > kMaxExperts) {
      fail("padded_offsets", "1 to 1024 experts", std::to_string(out.experts));
    }
    check("padded_offsets", in.padded_offsets).contiguous().aligned(4);
  }

  void weight_mode() {
    bool const dense = !in.b.empty(), discrete = in.b_ptrs.present();
    if (dense && discrete) {
      fail("b_ptrs", "either b (dense weights) or b_ptrs (discrete weights)", "both");
    }
    if (!dense && !discrete) fail("b", "either b (dense weights) or b_ptrs (discrete weights)", "neither");
    if (dense) {
      for (size_t i = 0; i < in.b.size(); ++i) {
        if (!in.b[i].present()) fail("b[" + std::to_string(i) + "]", "a tensor", "None");
      }
      if (in.n) fail("n", "None with b", std::to_string(*in.n), "n belongs to b_ptrs");
      if (in.b_dtype != DType::none) fail("b_dtype", "None with b", text_of(in.b_dtype), "b_dtype belongs to b_ptrs");
      if (in.sfb_ptrs.present()) fail("sfb_ptrs", "None with b", "a tensor", "pass sfb");
      mode = in.b.size() == 1 && in.b[0].rank == 3 ? Weights::dense : Weights::list;
      b_dtype = in.b[0].dtype;
    } else {
      if (!in.n) fail("n", "the number of rows of each expert's B", "None", "required with b_ptrs");
      if (in.b_dtype == DType::none) fail("b_dtype", "the dtype of each expert's B", "None", "required with b_ptrs");
      if (!in.sfb.empty()) fail("sfb", "None with b_ptrs", "a tensor", "pass sfb_ptrs");
      mode = Weights::pointers;
      b_dtype = in.b_dtype;
    }
    if (in.b_major != "k" && in.b_major != "n") fail("b_major", "\"k\" or \"n\"", '"' + in.b_major + '"');
  }

  void formats() {
    std::vector<DType> operands;
    for (SupportRow const& candidate : support_rows()) {
      if (candidate.operation != in.operation) continue;
      operands.insert(operands.end(), candidate.operands.begin(), candidate.operands.end());
      if (contains(candidate.operands, in.a.dtype)) row = &candidate;
    }
    check("a", in.a).dtype(operands);
    bool const same = b_dtype == in.a.dtype || (is_fp4(b_dtype) && is_fp4(in.a.dtype));
    if (!same) {
      fail(mode == Weights::pointers ? "b_dtype" : list_name("b", 0), "the dtype of a, " + text_of(in.a.dtype),
           mode == Weights::pointers || b_dtype != DType::other ? text_of(b_dtype) : in.b[0].dtype_name);
    }
    for (size_t i = 1; i < in.b.size(); ++i) check(list_name("b", i), in.b[i]).dtype({in.b[0].dtype});
    out.operands = in.a.dtype == DType::bfloat16        ? OperandFormat::bf16
                   : in.a.dtype == DType::float8_e4m3fn ? OperandFormat::e4m3
                   : in.a.dtype == DType::float8_e5m2   ? OperandFormat::e5m2
                                                        : OperandFormat::e2m1;
    if (row->scales.empty()) {
      forbid_scales();
    } else {
      scale_formats();
    }
    check("c", in.c).dtype(row->c);
    out.c_dtype = in.c.dtype;
    if (in.vector_f32 && is_fp8(out.c_dtype)) {
      fail("vector_f32", "False with an FP8 c", "True", "a c of 16 or 32 bits allows it");
    }
    if (in.has_outputs && !in.d_row.present()) fail("d_row", "a tensor", "None");
    out.d_dtype = in.has_outputs ? in.d_row.dtype : in.d_dtype == DType::none ? DType::bfloat16 : in.d_dtype;
    if (!contains(row->d, out.d_dtype)) {
      bool const other = in.has_outputs && out.d_dtype == DType::other;
      fail(in.has_outputs ? "d_row" : "d_dtype", "dtype " + text_of(row->d),
           other ? in.d_row.dtype_name : text_of(out.d_dtype), std::string("what ") + row->name + " operands can give");
    }
    out.scale_dtype = in.sfa.dtype;
    out.sf_vec_size = in.sf_vec_size;
    out.discrete_col_sfd = in.discrete_col_sfd;
    if (out.quantised()) {
      if (!in.norm_const.present()) {
        fail("norm_const", "a (1,) float32 tensor", "None", "an FP8 D is quantised with it");
      }
    }
    if (in.norm_const.present()) {
      check("norm_const", in.norm_const).dtype({DType::float32}).aligned(4);
      if (in.norm_const.numel() != 1) fail("norm_const", "shape (1,)", shape_text(in.norm_const));
    }
  }

  void forbid_scales() {
    auto none = [&](char const* name, bool present) {
      if (present) fail(name, "None with BF16 operands", "a tensor", "BF16 operands have no scale factors");
    };
    none("sfa", in.sfa.present());
    none("sfb", !in.sfb.empty());
    none("sfb_ptrs", in.sfb_ptrs.present());
    none("norm_const", in.norm_const.present());
    none("d_col", in.d_col.present());
    none("sfd_row", in.sfd_row.present());
    none("sfd_col", in.sfd_col.present());
    none("amax", in.amax.present());
    if (in.sf_vec_size != 16) {
      fail("sf_vec_size", "16 with BF16 operands", std::to_string(in.sf_vec_size), "the default");
    }
    if (in.discrete_col_sfd) fail("discrete_col_sfd", "False with BF16 operands", "True");
  }

  void scale_formats() {
    char const* b_name = mode == Weights::pointers ? "sfb_ptrs" : "sfb";
    if (!in.sfa.present()) fail("sfa", "the scale factors of a", "None");
    if (mode == Weights::pointers ? !in.sfb_ptrs.present() : in.sfb.empty()) {
      fail(b_name, "the scale factors of b", "None");
    }
    for (size_t i = 0; i < in.sfb.size(); ++i) {
      if (!in.sfb[i].present()) fail("sfb[" + std::to_string(i) + "]", "a tensor", "None");
    }
    check("sfa", in.sfa).dtype({DType::float8_e8m0fnu, DType::float8_e4m3fn});
    for (size_t i = 0; i < in.sfb.size(); ++i) check(list_name("sfb", i), in.sfb[i]).dtype({in.sfa.dtype});
    if (in.sf_vec_size != 16 && in.sf_vec_size != 32) {
      fail("sf_vec_size", "16 or 32", std::to_string(in.sf_vec_size));
    }
    std::vector<std::string> allowed;
    for (auto const& [dtype, size] : row->scales) {
      if (dtype == in.sfa.dtype && size == in.sf_vec_size) return;
      allowed.push_back(std::to_string(size) + " with " + text_of(dtype));
    }
    std::string text;
    for (std::string const& entry : allowed) text += (text.empty() ? "" : " or ") + entry;
    fail("sf_vec_size", text + " scale factors", std::to_string(in.sf_vec_size) + " with " + text_of(in.sfa.dtype),
         is_fp8(in.a.dtype) ? "FP8 operands need sf_vec_size=32; the default is 16" : "");
  }

  int64_t logical_k(int64_t visible) const { return is_fp4(in.a.dtype) ? 2 * visible : visible; }

  void sizes() {
    if (in.a.rank != 2 && in.a.rank != 3) fail("a", "shape (M, K, 1) or (M, K)", shape_text(in.a));
    out.m = in.a.size[0];
    out.k = logical_k(in.a.size[1]);
    if (out.m % kRowAlignment) {
      fail("a", "M, its number of rows, a multiple of 256", std::to_string(out.m),
           "pad each expert's rows to a multiple of 256");
    }
    if (out.k <= 0) fail("a", "K, its number of columns, above 0", std::to_string(out.k));
    out.width = in.operation == Operation::dglu ? 2 : 1;
    if (mode == Weights::pointers) {
      out.n = *in.n;
    } else if (in.b[0].rank == 2 || in.b[0].rank == 3) {
      out.n = in.b[0].size[0];
    } else {
      fail(list_name("b", 0), "shape (N, K, L), or a list of (N, K) tensors", shape_text(in.b[0]));
    }
    char const* n_name = mode == Weights::pointers ? "n" : "b";
    if (out.n <= 0) fail(n_name, "N above 0", std::to_string(out.n));
    if (in.operation == Operation::dglu && out.n % kInterleave) {
      fail(n_name, "N a multiple of 32", std::to_string(out.n), "gate and up alternate in blocks of 32 columns");
    }
    whole_rows("a", out.k, "K", is_fp4(in.a.dtype) ? 1 : 2 * bytes_of(in.a.dtype));
    whole_rows("c", out.d_columns(), out.width == 2 ? "2N" : "N", 2 * bytes_of(out.c_dtype));
    whole_rows(in.has_outputs ? "d_row" : "d_dtype", out.d_columns(), out.width == 2 ? "2N" : "N",
               2 * bytes_of(out.d_dtype));
  }

  // Rows are a multiple of 16 bytes (TMA). pair_bytes: of two elements, which is one byte for FP4.
  void whole_rows(char const* name, int64_t columns, char const* symbol, int64_t pair_bytes) const {
    int64_t const step = 32 / pair_bytes;
    if (columns % step) {
      fail(name, std::string(symbol) + " a multiple of " + std::to_string(step) + " (rows of 16 bytes)",
           std::to_string(columns));
    }
  }

  double finite(char const* name, double value) const {
    if (!std::isfinite(value)) fail(name, "a finite number", text_of(value));
    return value;
  }
  double positive(char const* name, double value) const {
    if (!(std::isfinite(value) && value > 0)) fail(name, "a finite number above 0", text_of(value));
    return value;
  }

  void activation() {
    out.alpha_squared = in.operation == Operation::dglu;
    out.epilogue_op = EpilogueOp::identity;
    if (in.operation == Operation::dsrelu) {
      if (in.c_role != "grad_output" && in.c_role != "preactivation") {
        fail("c_role", "\"grad_output\" or \"preactivation\"", '"' + in.c_role + '"');
      }
      bool const preactivation = in.c_role == "preactivation";
      float const clamp = in.tanh_clamp_scale ? float(positive("tanh_clamp_scale", *in.tanh_clamp_scale)) : 0.f;
      out.activation = in.tanh_clamp_scale ? Activation::clamped_srelu : Activation::srelu;
      out.srelu = {clamp, preactivation};
      out.clamped_srelu = {clamp, preactivation};
      return;
    }
    glu_activation();
  }

  void glu_activation() {
    std::vector<std::string> const known = {"dswiglu", "dgeglu", "dsituglu"};
    if (std::find(known.begin(), known.end(), in.act_func) == known.end()) {
      fail("act_func", text_of(known), '"' + in.act_func + '"');
    }
    if (std::find(row->activations.begin(), row->activations.end(), in.act_func) == row->activations.end()) {
      fail("act_func", text_of(row->activations) + " with " + row->name + " operands", '"' + in.act_func + '"');
    }
    bool const geglu = in.act_func == "dgeglu";
    out.activation = geglu ? Activation::geglu : in.act_func == "dsituglu" ? Activation::situglu : Activation::swiglu;
    float const offset = float(finite("linear_offset", in.linear_offset.value_or(geglu ? 1.0 : 0.0)));
    if (!geglu && offset != 0.f) {
      fail("linear_offset", "None or 0 with " + in.act_func, text_of(offset), "only dgeglu has a linear offset");
    }
    if (in.clamp_grad != "mask" && in.clamp_grad != "value") {
      fail("clamp_grad", "\"mask\" or \"value\"", '"' + in.clamp_grad + '"');
    }
    bool const by_value = in.clamp_grad == "value";
    if (by_value && !(geglu && !out.block_scaled())) {
      fail("clamp_grad", "\"mask\"", "\"value\"", "the value filter exists for dgeglu with BF16 operands alone");
    }
    if (geglu) {
      positive("geglu_alpha", in.geglu_alpha);
      if (std::isnan(in.glu_clamp_max)) fail("glu_clamp_max", "a number", "nan");
      if (!(in.glu_clamp_min < in.glu_clamp_max)) {
        fail("glu_clamp_min", "a number below glu_clamp_max = " + text_of(in.glu_clamp_max), text_of(in.glu_clamp_min));
      }
      out.geglu = {float(in.geglu_alpha), float(in.glu_clamp_max), float(in.glu_clamp_min), offset, by_value};
    } else if (out.activation == Activation::situglu) {
      out.situglu = {float(positive("situ_beta1", in.situ_beta1)), float(positive("situ_beta2", in.situ_beta2))};
    }
    epilogue_op();
    out.single_group = in.use_single_group_runtime_offsets;
    if (out.single_group && out.experts != 1) {
      fail("use_single_group_runtime_offsets", "exactly one expert", std::to_string(out.experts));
    }
    if (out.single_group && !out.block_scaled()) {
      fail("use_single_group_runtime_offsets", "block-scaled operands", "BF16 operands");
    }
  }

  void epilogue_op() {
    std::string const op = in.epilogue_op.value_or("identity");
    if (op == "relu") {
      out.epilogue_op = EpilogueOp::relu;
    } else if (op == "srelu") {
      out.epilogue_op = EpilogueOp::srelu;
    } else if (op != "identity" && op != "none") {
      fail("epilogue_op", "None, \"identity\", \"relu\" or \"srelu\"", '"' + op + '"');
    }
    if (out.epilogue_op != EpilogueOp::identity && !out.block_scaled()) {
      fail("epilogue_op", "None or \"identity\" with BF16 operands", '"' + op + '"');
    }
  }

  void scheduling() {
    auto const& tile = in.mma_tiler_mn;
    std::vector<int64_t> const& tile_n = tile_ns(in.operation);
    bool const known = tile.size() == 2 && (tile[0] == 128 || tile[0] == 256) &&
                       std::find(tile_n.begin(), tile_n.end(), tile[1]) != tile_n.end();
    if (!known) {
      fail("mma_tiler_mn", tile_n.size() == 2 ? "(128 or 256, 128 or 256)" : "(128 or 256, 256)", text_of(tile));
    }
    Shape const cluster = in.cluster_shape_mn.value_or(Shape{tile[0] == 256 ? 2 : 1, 1});
    auto power = [](int64_t v) { return v == 1 || v == 2 || v == 4; };
    if (cluster.size() != 2 || !power(cluster[0]) || !power(cluster[1])) {
      fail("cluster_shape_mn", "two powers of two from 1 to 4", text_of(cluster));
    }
    // A 256-row tile is two CTAs, and no cluster may cover more rows than an expert's padding.
    int64_t const ctas = tile[0] == 256 ? 2 : 1;
    if (cluster[0] % ctas || (cluster[0] / ctas) * tile[0] > kRowAlignment) {
      fail("cluster_shape_mn", tile[0] == 256 ? "a first number of 2 with TILE_M = 256" : "a first number of 1 or 2",
           text_of(cluster));
    }
    out.tile_m = tile[0], out.tile_n = tile[1], out.cluster_m = cluster[0], out.cluster_n = cluster[1];
    out.deterministic = in.deterministic.value_or(true);
    out.vector_f32 = in.vector_f32;
    out.use_dynamic_sched = in.use_dynamic_sched;
  }

  void input_tensors() {
    check("a", in.a).matrix(out.m, in.a.size[1], is_fp4(in.a.dtype) ? "M, K/2" : "M, K");
    check("c", in.c).matrix(out.m, out.d_columns(), out.width == 2 ? "M, 2N" : "M, N");
    per_expert("alpha", in.alpha);
    if (in.operation == Operation::dglu) per_expert("beta", in.beta);
    check("prob", in.prob).dtype({DType::float32}).column(out.m, "M");
    out.device = in.a.device;
    out.a = in.a.data;
    out.c = in.c.data;
    out.padded_offsets = in.padded_offsets.as<int32_t>();
    out.alpha = in.alpha.as<float>();
    // Block-scaled dGeGLU reads C as it was saved (decisions F4).
    bool const reads_beta = in.operation == Operation::dglu && !(out.block_scaled() && in.act_func == "dgeglu");
    out.beta = reads_beta ? in.beta.as<float>() : nullptr;
    out.prob = in.prob.as<float>();
    out.norm_const = in.norm_const.as<float>();
  }

  void per_expert(char const* name, Tensor const& t) const {
    check(name, t).dtype({DType::float32}).shape({out.experts}, "(L,)").contiguous().aligned(4);
  }

  void weights() {
    int64_t const visible_k = in.a.size[1], element = bytes_of(b_dtype);
    if (mode == Weights::pointers) {
      pointer_table("b_ptrs", in.b_ptrs);
      out.b_is_n_major = in.b_major == "n";
      out.b_pointers = in.b_ptrs.as<int64_t>();
    } else if (mode == Weights::dense) {
      TensorCheck const b = check("b", in.b[0]);
      b.shape({out.n, visible_k, out.experts}, is_fp4(b_dtype) ? "(N, K/2, L)" : "(N, K, L)");
      out.b_is_n_major = n_major(b, {visible_k, 1, out.n * visible_k}, {1, out.n, out.n * visible_k});
      b.aligned(16);
      out.b = in.b[0].data;
      out.b_expert_bytes = out.n * visible_k * element;
    } else {
      if (int64_t(in.b.size()) != out.experts) {
        fail("b", "one tensor per expert, " + std::to_string(out.experts), std::to_string(in.b.size()));
      }
      for (size_t i = 0; i < in.b.size(); ++i) {
        TensorCheck const b = check(list_name("b", i), in.b[i]);
        if (!b.has_shape({out.n, visible_k, 1})) b.shape({out.n, visible_k}, is_fp4(b_dtype) ? "(N, K/2)" : "(N, K)");
        bool const major = n_major(b, {visible_k, 1, 1}, {1, out.n, 1});
        if (i && major != out.b_is_n_major) {
          fail(list_name("b", i), "the layout of b[0]", major ? "N-major" : "K-major");
        }
        out.b_is_n_major = major;
        b.aligned(16);
        out.b_list.push_back(reinterpret_cast<int64_t>(in.b[i].data));
      }
    }
    if (out.b_is_n_major) {
      char const* name = mode == Weights::pointers ? "b_major" : "b";
      if (is_fp4(b_dtype)) fail(name, "K-major FP4 weights", "N-major", "FP4 pairs lie along K");
      whole_rows(mode == Weights::pointers ? "n" : "b", out.n, "N", 2 * element);
    }
  }

  // Which of the two layouts a weight has; K-major where both fit.
  bool n_major(TensorCheck const& b, Shape const& k_major, Shape const& n_major) const {
    bool const k_fits = b.has_strides(k_major), n_fits = !is_fp4(b_dtype) && b.has_strides(n_major);
    if (in.b_major == "n" && !n_fits && k_fits) {
      fail("b_major", "\"k\", the layout of b's strides", "\"n\"", "b_major belongs to b_ptrs");
    }
    if (!k_fits && !n_fits) {
      b.strides(k_major, is_fp4(b_dtype) ? "K-major" : "K-major; or N-major " + text_of(n_major));
    }
    return !k_fits || (n_fits && in.b_major == "n");
  }

  void pointer_table(char const* name, Tensor const& t) const {
    check(name, t).dtype({DType::int64}).shape({out.experts}, "(L,)").contiguous().aligned(8);
  }

  void scale_factors() {
    if (row->scales.empty()) return;
    int64_t const blocks = ceil_div(out.k, out.sf_vec_size), m = out.m;
    check_scales(check("sfa", in.sfa), "sfa", in.sfa, m, blocks, 1);
    out.sfa = in.sfa.as<uint8_t>();
    int64_t const expert_bytes = ScaleLayout::of(out.n, blocks).bytes();
    if (mode == Weights::pointers) {
      pointer_table("sfb_ptrs", in.sfb_ptrs);
      out.sfb_pointers = in.sfb_ptrs.as<int64_t>();
    } else if (in.sfb.size() == 1 && mode == Weights::dense) {
      check_scales(check("sfb", in.sfb[0]), "sfb", in.sfb[0], out.n, blocks, out.experts);
      out.sfb = in.sfb[0].as<uint8_t>();
      out.sfb_expert_bytes = expert_bytes;
    } else {
      if (int64_t(in.sfb.size()) != out.experts || mode == Weights::dense) {
        std::string const want = mode == Weights::dense ? "one tensor, like b" : "one tensor per expert, like b";
        fail("sfb", want, std::to_string(in.sfb.size()) + " tensors");
      }
      for (size_t i = 0; i < in.sfb.size(); ++i) {
        std::string const name = list_name("sfb", i);
        check_scales(check(name, in.sfb[i]), name, in.sfb[i], out.n, blocks, 1);
        out.sfb_list.push_back(reinterpret_cast<int64_t>(in.sfb[i].data));
      }
    }
  }

  void output_tensors() {
    int64_t const width = out.d_columns();
    std::string const symbols = out.width == 2 ? "M, 2N" : "M, N";
    check("d_row", in.d_row).matrix(out.m, width, symbols);
    out.d_row = in.d_row.data;
    if (in.d_col.present()) {
      check("d_col", in.d_col).dtype({out.d_dtype}).matrix(out.m, width, symbols);
      out.d_col = in.d_col.data;
    }
    quantised_outputs(width);
    if (in.dprob.present()) {
      check("dprob", in.dprob).dtype({DType::float32}).column(out.m, "M");
      out.dprob = in.dprob.as<float>();
    } else if (!in.dprob_workspace.present()) {
      fail("dprob", "a tensor", "None");
    }
    if (in.dbias.present()) {
      check("dbias", in.dbias)
          .dtype({DType::bfloat16})
          .shape({out.experts, width, 1}, out.width == 2 ? "(L, 2N, 1)" : "(L, N, 1)")
          .contiguous()
          .aligned(2);
      out.dbias = in.dbias.as<uint16_t>();
    }
    if (in.amax.present()) {
      TensorCheck const amax = check("amax", in.amax);
      amax.dtype({DType::float32});
      if (out.width == 2) amax.shape({out.experts, 2, 1}, "(L, 2, 1)");
      if (out.width == 1) amax.shape({out.experts, 1}, "(L, 1)");
      amax.contiguous().aligned(4);
      out.amax = in.amax.as<float>();
    }
    workspaces(width);
    overlaps();
  }

  void quantised_outputs(int64_t width) {
    struct Named {
      char const* name;
      Tensor const& tensor;
    };
    for (Named const& s : {Named{"sfd_row", in.sfd_row}, Named{"sfd_col", in.sfd_col}}) {
      if (out.quantised() && !s.tensor.present()) {
        fail(s.name, "a tensor", "None", "an FP8 D comes with sfd_row, sfd_col and norm_const");
      }
      if (!out.quantised() && s.tensor.present()) {
        fail(s.name, "None", "a tensor", "a D of " + text_of(out.d_dtype) + " has no scale factors");
      }
      if (s.tensor.present()) check(s.name, s.tensor).dtype({out.scale_dtype});
    }
    if (!out.quantised()) return;
    if (!in.d_col.present()) fail("d_col", "a tensor", "None", "an FP8 D is written by rows and by columns");
    check_scales(check("sfd_row", in.sfd_row), "sfd_row", in.sfd_row, out.m, ceil_div(width, kQuantBlock), 1);
    check_scales(check("sfd_col", in.sfd_col), "sfd_col", in.sfd_col, width, ceil_div(out.m, kQuantBlock), 1);
    out.sfd_row = in.sfd_row.as<uint8_t>();
    out.sfd_col = in.sfd_col.as<uint8_t>();
  }

  void workspaces(int64_t width) {
    if (!in.dprob_workspace.present() && !in.dbias_workspace.present()) return;
    if (!out.deterministic) {
      fail(in.dprob_workspace.present() ? "dprob_workspace" : "dbias_workspace", "None without deterministic=True",
           "a tensor");
    }
    if (!in.dprob_workspace.present()) fail("dprob_workspace", "a tensor beside dbias_workspace", "None");
    check("dprob_workspace", in.dprob_workspace)
        .dtype({DType::float32})
        .shape({out.m, grid_n(out.n, out.tile_n, out.cluster_n), 1}, "(M, grid_n, 1)", "see dprob_workspace_shape")
        .contiguous()
        .aligned(4);
    out.dprob_slots = in.dprob_workspace.as<float>();
    if (in.dbias.present() != in.dbias_workspace.present()) {
      fail("dbias_workspace", in.dbias.present() ? "a tensor beside dbias" : "None without dbias",
           in.dbias.present() ? "None" : "a tensor");
    }
    if (!in.dbias.present()) return;
    check("dbias_workspace", in.dbias_workspace)
        .dtype({DType::bfloat16})
        .shape({ceil_div(out.m, kDbiasSlotRows), width, 1}, "(ceil(M/128), N, 1)", "see dbias_workspace_shape")
        .contiguous()
        .aligned(2);
    out.dbias_slots = in.dbias_workspace.as<uint16_t>();
  }

  // No output may overlap another tensor. d_col may be d_row itself where it is only a copy of it.
  void overlaps() const {
    if (!in.values_readable) return;
    struct Range {
      std::string name;
      Tensor const* tensor;
      char const *begin, *end;
    };
    std::vector<Range> ranges;
    auto add = [&](std::string name, Tensor const& t) {
      if (!t.present() || t.numel() == 0) return;
      char const* begin = static_cast<char const*>(t.data);
      int64_t extent = 1;
      for (int i = 0; i < t.rank; ++i) extent += (t.size[i] - 1) * t.stride[i];
      ranges.push_back({std::move(name), &t, begin, begin + extent * bytes_of(t.dtype)});
    };
    add("d_row", in.d_row);
    if (out.quantised() || in.d_col.data != in.d_row.data) add("d_col", in.d_col);
    add("dprob", in.dprob);
    add("dbias", in.dbias);
    add("amax", in.amax);
    add("sfd_row", in.sfd_row);
    add("sfd_col", in.sfd_col);
    add("dprob_workspace", in.dprob_workspace);
    add("dbias_workspace", in.dbias_workspace);
    size_t const outputs = ranges.size();
    add("a", in.a);
    add("c", in.c);
    add("sfa", in.sfa);
    add("prob", in.prob);
    add("alpha", in.alpha);
    add("beta", in.beta);
    add("padded_offsets", in.padded_offsets);
    add("norm_const", in.norm_const);
    add("b_ptrs", in.b_ptrs);
    add("sfb_ptrs", in.sfb_ptrs);
    for (size_t i = 0; i < in.b.size(); ++i) add(list_name("b", i), in.b[i]);
    for (size_t i = 0; i < in.sfb.size(); ++i) add(list_name("sfb", i), in.sfb[i]);
    for (size_t i = 0; i < outputs; ++i) {
      for (size_t j = i + 1; j < ranges.size(); ++j) {
        if (ranges[i].begin < ranges[j].end && ranges[j].begin < ranges[i].end) {
          fail(ranges[i].name, "memory of its own", "memory that overlaps " + ranges[j].name);
        }
      }
    }
  }

  void values() const {
    if (!out.single_group) check_offset_values(in.padded_offsets, out.m);
    if (mode != Weights::pointers) return;
    for (int64_t g = 0; g < out.experts; ++g) {
      bool const empty = !out.single_group && out.padded_offsets[g] == (g ? out.padded_offsets[g - 1] : 0);
      if (empty || out.m == 0) continue;
      check_pointer("b_ptrs", out.b_pointers, g);
      if (out.sfb_pointers) check_pointer("sfb_ptrs", out.sfb_pointers, g);
    }
  }

  static void check_pointer(char const* name, int64_t const* pointers, int64_t g) {
    if (pointers[g] != 0 && pointers[g] % 16 == 0) return;
    std::ostringstream got;
    got << "0x" << std::hex << pointers[g];
    fail(std::string(name) + "[" + std::to_string(g) + "]", "a 16-byte aligned address, not null", got.str(),
         "only an expert without rows may have a null pointer");
  }
};

}  // namespace

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

#include <cmath>

#include "validator.h"

namespace cudnn_grouped {

// The engines compute in FP32, so a number must be one there.
float Validator::finite(char const* name, double value) const {
  if (!std::isfinite(float(value))) fail(name, "a finite number in float32", text_of(value));
  return float(value);
}

float Validator::positive(char const* name, double value) const {
  if (!(float(value) > 0.f)) fail(name, "a finite number above 0 in float32", text_of(value));
  return finite(name, value);
}

// Engines may divide by its reciprocal, which between the bounds is no FP32 subnormal.
float Validator::divisor(char const* name, double value) const {
  float const number = positive(name, value);
  if (number < 0x1p-126f || number > 0x1p126f) fail(name, "a number from 2^-126 to 2^126", text_of(value));
  return number;
}

void Validator::activation() {
  out.alpha_squared = in.operation == Operation::dglu;
  out.epilogue_op = EpilogueOp::identity;
  std::string act = in.act_func;
  switch (in.operation) {
    case Operation::mm:
      out.activation = Activation::none;
      return;
    case Operation::srelu:
    case Operation::dsrelu:
      act = "dsrelu";
      break;
    default: {
      std::vector<std::string> const& known = activation_names(in.operation);
      if (!contains(known, act)) fail("act_func", text_of(known), '"' + act + '"');
      if (out.forward()) act = "d" + act;
      if (!contains(row->activations, in.act_func)) {
        fail("act_func", text_of(row->activations) + " with " + row->name + " operands", '"' + in.act_func + '"');
      }
    }
  }
  if (in.tanh_clamp_scale && act != "dsrelu") {
    fail("tanh_clamp_scale", "None with act_func=\"" + in.act_func + '"', text_of(*in.tanh_clamp_scale));
  }
  if (act == "identity") return;
  out.activation = act == "dsrelu"    ? (in.tanh_clamp_scale ? Activation::clamped_srelu : Activation::srelu)
                   : act == "dswiglu" ? Activation::swiglu
                   : act == "dgeglu"  ? Activation::geglu
                                      : Activation::situglu;
  clamp_and_betas();
  epilogue_op();
  out.single_group = in.use_single_group_runtime_offsets;
  if (out.single_group && out.experts != 1) {
    fail("use_single_group_runtime_offsets", "exactly one expert", std::to_string(out.experts));
  }
  if (out.single_group && !out.block_scaled()) {
    fail("use_single_group_runtime_offsets", "block-scaled operands", "BF16 operands");
  }
}

void Validator::clamp_and_betas() {
  bool const srelu = out.activation == Activation::srelu || out.activation == Activation::clamped_srelu;
  bool const geglu = out.activation == Activation::geglu;
  if (srelu) {
    if (in.c_role != "grad_output" && in.c_role != "preactivation") {
      fail("c_role", "\"grad_output\" or \"preactivation\"", '"' + in.c_role + '"');
    }
    float const clamp = in.tanh_clamp_scale ? divisor("tanh_clamp_scale", *in.tanh_clamp_scale) : 0.f;
    bool const preactivation = in.c_role == "preactivation" || in.operation == Operation::dact;
    out.srelu = {clamp, preactivation};
    out.clamped_srelu = {clamp, preactivation};
    return;
  }
  float const offset = finite("linear_offset", in.linear_offset.value_or(geglu ? 1.0 : 0.0));
  if (!geglu && offset != 0.f) {
    fail("linear_offset", "None or 0 with " + in.act_func, text_of(offset), "only GeGLU has a linear offset");
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
    out.geglu = {float(in.geglu_alpha), float(in.glu_clamp_max), float(in.glu_clamp_min), offset};
    out.geglu_by_value = {out.geglu.alpha, out.geglu.clamp_max, out.geglu.clamp_min, offset};
    if (by_value) out.activation = Activation::geglu_by_value;
  } else if (out.activation == Activation::situglu) {
    out.situglu = {divisor("situ_beta1", in.situ_beta1), divisor("situ_beta2", in.situ_beta2)};
  }
}

void Validator::epilogue_op() {
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

void Validator::scheduling() {
  auto const& tile = in.mma_tiler_mn;
  std::vector<int64_t> const& tile_n = tile_ns(in.operation);
  bool const known = tile.size() == 2 && (tile[0] == 128 || tile[0] == 256) &&
                     std::find(tile_n.begin(), tile_n.end(), tile[1]) != tile_n.end();
  if (!known) {
    fail("mma_tiler_mn", tile_n.size() == 2 ? "(128 or 256, 128 or 256)" : "(128 or 256, 256)", text_of(tile));
  }
  int64_t const ctas = tile[0] == 256 ? 2 : 1, usual[] = {ctas, 1};
  Shape const cluster = in.cluster_shape_mn ? Shape(*in.cluster_shape_mn) : usual;
  auto power = [](int64_t v) { return v == 1 || v == 2 || v == 4; };
  if (cluster.size() != 2 || !power(cluster[0]) || !power(cluster[1])) {
    fail("cluster_shape_mn", "two powers of two from 1 to 4", text_of(cluster));
  }
  // A 256-row tile is two CTAs, and no cluster may cover more rows than an expert's padding.
  if (cluster[0] % ctas || (cluster[0] / ctas) * tile[0] > kRowAlignment) {
    fail("cluster_shape_mn", tile[0] == 256 ? "a first number of 2 with TILE_M = 256" : "a first number of 1 or 2",
         text_of(cluster));
  }
  out.tile_m = tile[0], out.tile_n = tile[1], out.cluster_m = cluster[0], out.cluster_n = cluster[1];
  out.deterministic = in.deterministic.value_or(true);
  out.vector_f32 = in.vector_f32;
  out.use_dynamic_sched = in.use_dynamic_sched;
}

}  // namespace cudnn_grouped

#include <sstream>

#include "scale_layout.h"
#include "validator.h"

namespace cudnn_grouped {

void Validator::weight_mode() {
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

void Validator::forbid_scales() {
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

void Validator::scale_formats() {
  if (!in.sfa.present()) fail("sfa", "the scale factors of a", "None");
  if (!scales_of_b() && !dequantised) fail(sfb_name(), "the scale factors of b", "None");
  for (size_t i = 0; i < in.sfb.size(); ++i) {
    if (!in.sfb[i].present()) fail("sfb[" + std::to_string(i) + "]", "a tensor", "None");
  }
  check("sfa", in.sfa).dtype({DType::float8_e8m0fnu, DType::float8_e4m3fn});
  for (size_t i = 0; i < in.sfb.size(); ++i) check(list_name("sfb", i), in.sfb[i]).dtype({in.sfa.dtype});
  if (in.sf_vec_size != 16 && in.sf_vec_size != 32) {
    fail("sf_vec_size", "16 or 32", std::to_string(in.sf_vec_size));
  }
  std::string text;
  for (auto const& [dtype, size] : row->scales) {
    if (dtype == in.sfa.dtype && size == in.sf_vec_size) return;
    text += (text.empty() ? "" : " or ") + std::to_string(size) + " with " + text_of(dtype);
  }
  fail("sf_vec_size", text + " scale factors", std::to_string(in.sf_vec_size) + " with " + text_of(in.sfa.dtype),
       is_fp8(in.a.dtype) ? "FP8 operands need sf_vec_size=32; the default is 16" : "");
}

void Validator::weights() {
  int64_t const visible_k = is_fp4(b_dtype) ? out.k / 2 : out.k, element = bytes_of(b_dtype);
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
    if (dequantised) fail(name, "K-major dequantised weights", "N-major");
    whole_rows(mode == Weights::pointers ? "n" : "b", out.n, "N", 2 * element);
  }
  // An engine may take B in the groups of 32 rows that D is quantised in.
  if (dequantised && out.quantised() && out.n % kQuantBlock) {
    fail(mode == Weights::pointers ? "n" : list_name("b", 0),
         "N a multiple of 32 with dequantised weights and an FP8 D", std::to_string(out.n));
  }
}

// Which of the two layouts a weight has; K-major where both fit.
bool Validator::n_major(TensorCheck const& b, Shape k_major, Shape n_major) const {
  bool const k_fits = b.has_strides(k_major), n_fits = !k_major_only() && b.has_strides(n_major);
  if (in.b_major == "n" && !n_fits && k_fits) {
    fail("b_major", "\"k\", the layout of b's strides", "\"n\"", "b_major belongs to b_ptrs");
  }
  if (!k_fits && !n_fits) {
    b.strides(k_major, k_major_only() ? "K-major" : "K-major; or N-major " + text_of(n_major));
  }
  return !k_fits || (n_fits && in.b_major == "n");
}

void Validator::pointer_table(char const* name, Tensor const& t) const {
  check(name, t).dtype({DType::int64}).shape({out.experts}, "(L,)").contiguous().aligned(8);
}

void Validator::scale_factors() {
  if (row->scales.empty()) return;
  int64_t const blocks = ceil_div(out.k, out.sf_vec_size), m = out.m;
  check_scales(check("sfa", in.sfa), "sfa", in.sfa, m, blocks, 1);
  out.sfa = in.sfa.as<uint8_t>();
  if (dequantised) return;
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

static void check_pointer(char const* name, int64_t const* pointers, int64_t g) {
  if (pointers[g] != 0 && pointers[g] % 16 == 0) return;
  std::ostringstream got;
  got << "0x" << std::hex << pointers[g];
  fail(std::string(name) + "[" + std::to_string(g) + "]", "a 16-byte aligned address, not null", got.str(),
       "only an expert without rows may have a null pointer");
}

void Validator::pointer_values() {
  // Copied like the offsets: what is checked is what is used.
  auto copy = [&](int64_t const* table) { return values_of<int64_t>(table, out.experts, out.device); };
  out.b_list = copy(out.b_pointers);
  if (out.sfb_pointers) out.sfb_list = copy(out.sfb_pointers);
  for (int64_t g = 0; g < out.experts; ++g) {
    bool const empty = !out.single_group && out.offsets()[g] == (g ? out.offsets()[g - 1] : 0);
    if (empty || out.m == 0) continue;
    check_pointer("b_ptrs", out.b_list.data(), g);
    if (out.sfb_pointers) check_pointer("sfb_ptrs", out.sfb_list.data(), g);
  }
}

}  // namespace cudnn_grouped

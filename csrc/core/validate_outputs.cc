#include "validator.h"

namespace cudnn_grouped {

void Validator::output_tensors() {
  std::string const symbols = std::string("M, ") + d_symbol();
  char const* d_name = out.forward() ? "d" : "d_row";
  if (!in.generate_d && in.d_row.present()) fail(d_name, "None with generate_d=False", "a tensor");
  if (in.generate_d) check(d_name, in.d_row).matrix(out.m, out.d_columns(), symbols);
  out.d_row = in.d_row.data;
  if (out.forward() && in.c.present()) {
    check("c", in.c).matrix(out.m, out.c_columns(), std::string("M, ") + c_symbol());
  }
  if (in.d_col.present()) {
    check("d_col", in.d_col).dtype({out.d_dtype}).matrix(out.m, out.d_columns(), symbols);
    out.d_col = in.d_col.data;
  }
  quantised_outputs();
  reductions();
  workspaces();
  overlaps();
}

void Validator::quantised_outputs() {
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
  int64_t const columns = out.d_columns();
  check_scales(check("sfd_row", in.sfd_row), "sfd_row", in.sfd_row, out.m, ceil_div(columns, kQuantBlock), 1);
  check_scales(check("sfd_col", in.sfd_col), "sfd_col", in.sfd_col, columns, ceil_div(out.m, kQuantBlock), 1);
  out.sfd_row = in.sfd_row.as<uint8_t>();
  out.sfd_col = in.sfd_col.as<uint8_t>();
}

void Validator::reductions() {
  if (in.dprob.present()) {
    check("dprob", in.dprob).dtype({DType::float32}).column(out.m, "M");
    out.dprob = in.dprob.as<float>();
  } else if (!out.forward() && !in.dprob_workspace.present()) {
    fail("dprob", "a tensor", "None");
  }
  if (in.dbias.present()) {
    check("dbias", in.dbias)
        .dtype({DType::bfloat16})
        .shape({out.experts, out.d_columns(), 1}, std::string("(L, ") + d_symbol() + ", 1)")
        .contiguous()
        .aligned(2);
    out.dbias = in.dbias.as<uint16_t>();
  }
  if (in.amax.present()) {
    TensorCheck const amax = check("amax", in.amax);
    amax.dtype({DType::float32});
    if (out.amax_width() == 2) amax.shape({out.experts, 2, 1}, "(L, 2, 1)");
    if (out.amax_width() == 1) amax.shape({out.experts, 1}, "(L, 1)");
    amax.contiguous().aligned(4);
    out.amax = in.amax.as<float>();
  }
}

void Validator::workspaces() {
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
      .shape({ceil_div(out.m, kDbiasSlotRows), out.d_columns(), 1}, "(ceil(M/128), N, 1)", "see dbias_workspace_shape")
      .contiguous()
      .aligned(2);
  out.dbias_slots = in.dbias_workspace.as<uint16_t>();
}

// No output may overlap another tensor. d_col may be d_row itself where it is only a copy of it.
void Validator::overlaps() const {
  if (!in.values_readable) return;
  std::vector<NamedTensor> tensors = {{out.forward() ? "d" : "d_row", in.d_row}};
  if (out.forward()) tensors.push_back({"c", in.c});
  if (out.quantised() || in.d_col.data != in.d_row.data) tensors.push_back({"d_col", in.d_col});
  for (NamedTensor const& output :
       {NamedTensor{"dprob", in.dprob}, NamedTensor{"dbias", in.dbias}, NamedTensor{"amax", in.amax},
        NamedTensor{"sfd_row", in.sfd_row}, NamedTensor{"sfd_col", in.sfd_col},
        NamedTensor{"dprob_workspace", in.dprob_workspace}, NamedTensor{"dbias_workspace", in.dbias_workspace}}) {
    tensors.push_back(output);
  }
  size_t const outputs = tensors.size();
  if (!out.forward()) tensors.push_back({"c", in.c});
  for (NamedTensor const& input :
       {NamedTensor{"a", in.a}, NamedTensor{"bias", in.bias}, NamedTensor{"sfa", in.sfa}, NamedTensor{"prob", in.prob},
        NamedTensor{"alpha", in.alpha}, NamedTensor{"beta", in.beta}, NamedTensor{"padded_offsets", in.padded_offsets},
        NamedTensor{"norm_const", in.norm_const}, NamedTensor{"b_ptrs", in.b_ptrs},
        NamedTensor{"sfb_ptrs", in.sfb_ptrs}}) {
    tensors.push_back(input);
  }
  for (size_t i = 0; i < in.b.size(); ++i) tensors.push_back({"b", in.b[i], list_index(i)});
  for (size_t i = 0; i < in.sfb.size(); ++i) tensors.push_back({"sfb", in.sfb[i], list_index(i)});
  check_overlaps(tensors, outputs);
}

}  // namespace cudnn_grouped

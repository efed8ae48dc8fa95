#include "outputs.h"

#include "../core/scale_layout.h"
#include "check.h"

namespace cudnn_grouped::cuda {

Experts experts_of(GroupedGemm const& p) {
  return {p.single_group ? nullptr : p.padded_offsets, int(p.experts), int(p.m)};
}

int bind_device() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

bool copies_bias(GroupedGemm const& p) {
  bool const as_is = p.bias_dtype == DType::float32 && reinterpret_cast<uintptr_t>(p.bias) % 8 == 0;
  return p.bias && !as_is;
}

void zero_padding(GroupedGemm const& p, cudaStream_t stream) {
  if (!p.quantised()) return;
  int64_t const blocks = ceil_div(p.d_columns(), kQuantBlock);
  if (blocks % kAtomBlocks) {
    check(cudaMemsetAsync(p.sfd_row, 0, ScaleLayout::of(p.m, blocks).bytes(), stream), "cudaMemsetAsync");
  }
  if (p.d_columns() % kAtomRows) {
    int64_t const bytes = ScaleLayout::of(p.d_columns(), p.m / kQuantBlock).bytes();
    check(cudaMemsetAsync(p.sfd_col, 0, bytes, stream), "cudaMemsetAsync");
  }
}

EpilogueParams epilogue_params_of(GroupedGemm const& p, float const* bias, float* dprob, float* dbias) {
  EpilogueParams out{};
  out.experts = experts_of(p);
  out.n = int(p.n), out.k = int(p.k);
  out.alpha = p.alpha, out.beta = p.beta, out.prob = p.prob, out.norm_const = p.norm_const;
  out.alpha_squared = p.alpha_squared;
  out.prob_on_bias = p.operation == Operation::mm && p.bias;
  out.bias = bias ? bias : static_cast<float const*>(p.bias);
  out.c_dtype = p.c_dtype, out.d_dtype = p.d_dtype;
  out.epilogue_op = p.epilogue_op;
  out.c_data = p.c, out.d_data = p.d_row, out.d_col_data = p.d_col == p.d_row ? nullptr : p.d_col;
  out.dprob = dprob, out.dbias = dbias, out.amax = reinterpret_cast<int*>(p.amax);
  out.sfd_row = p.sfd_row, out.sfd_col = p.sfd_col, out.discrete_col_sfd = p.discrete_col_sfd;
  return out;
}

void finish_outputs(GroupedGemm const& p, float const* dprob, int slots, int parts, float const* dbias, int blocks,
                    cudaStream_t stream) {
  Finish end{};
  end.experts = experts_of(p);
  end.n_tiles = slots;
  end.dprob_slots = dprob, end.dprob = p.dprob, end.is_new = p.sums_are_new;
  end.documented_dprob = p.dprob_slots, end.documented_slots = int(grid_n(p.n, p.tile_n, p.cluster_n));
  end.parts = parts;
  end.dbias_slots = dbias, end.dbias = p.dbias, end.documented_dbias = p.dbias_slots;
  end.rows[0] = {p.d_row, p.d_columns() * bytes_of(p.d_dtype)};
  if (p.d_col && p.d_col != p.d_row) end.rows[1] = {p.d_col, end.rows[0].row_bytes};
  if (p.forward() && p.c) end.rows[2] = {p.c, p.c_columns() * bytes_of(p.c_dtype)};
  end.d_columns = p.d_columns();
  if (p.quantised()) end.sfd_row = p.sfd_row, end.sfd_col = p.sfd_col, end.discrete_col_sfd = p.discrete_col_sfd;
  finish(end, blocks, stream);
}

}  // namespace cudnn_grouped::cuda

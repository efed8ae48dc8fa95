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

Finish finish_of(GroupedGemm const& p, float const* dprob_slots, int slots, int parts) {
  Finish end{};
  end.experts = experts_of(p);
  end.n_tiles = slots;
  end.dprob_slots = dprob_slots, end.dprob = p.dprob, end.is_new = p.sums_are_new;
  end.documented_dprob = p.dprob_slots, end.documented_slots = int(grid_n(p.n, p.tile_n, p.cluster_n));
  end.parts = parts;
  end.rows[0] = {p.d_row, p.d_columns() * bytes_of(p.d_dtype)};
  if (p.d_col && p.d_col != p.d_row) end.rows[1] = {p.d_col, end.rows[0].row_bytes};
  if (p.forward() && p.c) end.rows[2] = {p.c, p.c_columns() * bytes_of(p.c_dtype)};
  end.d_columns = p.d_columns();
  if (p.quantised()) end.sfd_row = p.sfd_row, end.sfd_col = p.sfd_col, end.discrete_col_sfd = p.discrete_col_sfd;
  return end;
}

}  // namespace cudnn_grouped::cuda

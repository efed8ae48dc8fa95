// The table of compiled kernels: rows of an activation, filled by one file each.
#pragma once

#include "params.h"

namespace cudnn_grouped::sm90 {

struct Kernel {
  int tile_n;
  bool interleaved;  // rows of A and B are permuted within a tile
  TileOrder order;   // with the largest group
  void (*launch)(GroupedGemm const&, Params const&, int blocks, cudaStream_t);
};

struct ActivationKernels {
  struct Direction {
    // D in BF16, C in BF16 or absent: nothing else; dbias too; bias, dbias, amax. D or C in another plain dtype.
    Kernel staged, staged_with_dbias, staged_with_extras, direct;
    // D in E4M3, C in BF16 or, forward, any: nothing else; dbias too; the same in wide tiles, launch may be null; all.
    // D in E4M3 or E5M2, any C.
    Kernel e4m3, e4m3_with_dbias, e4m3_wide, e4m3_wide_with_dbias, e4m3_with_extras, e4m3_any_c, e5m2_any_c;
  } backward, forward;
};

ActivationKernels const& identity_kernels();
ActivationKernels const& srelu_kernels(bool c_is_preactivation);
ActivationKernels const& clamped_srelu_kernels();
ActivationKernels const& swiglu_kernels();
ActivationKernels const& geglu_kernels();
ActivationKernels const& geglu_by_value_kernels();
ActivationKernels const& situglu_kernels();

}  // namespace cudnn_grouped::sm90

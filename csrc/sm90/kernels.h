// The table of compiled kernels: one row per activation, filled by one file each.
#pragma once

#include "../cuda/check.h"
#include "params.h"

namespace cudnn_grouped::sm90 {

using cuda::check;

struct Kernel {
  int tile_n;
  bool interleaved;  // rows of A and B are permuted within a tile
  void (*launch)(GroupedGemm const&, Params const&, int blocks, cudaStream_t);
};

struct ActivationKernels {
  struct Direction {
    Kernel staged, staged_with_extras, direct;  // D is not FP8
    Kernel e4m3_staged_c, e4m3, e5m2_staged_c, e5m2;
  } backward, forward;
};

ActivationKernels const& identity_kernels();
ActivationKernels const& srelu_kernels();
ActivationKernels const& clamped_srelu_kernels();
ActivationKernels const& swiglu_kernels();
ActivationKernels const& geglu_kernels();
ActivationKernels const& situglu_kernels();

}  // namespace cudnn_grouped::sm90

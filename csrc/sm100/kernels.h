// The table of compiled kernels: one row per activation, filled by one file each.
#pragma once

#include "params.h"

namespace cudnn_grouped::sm100 {

// clusters: how many there are tiles for, an upper bound. The grid has as many, or with static scheduling those that
// fit on the device.
using Launcher = void (*)(GroupedGemm const&, Params const&, int64_t clusters, cudaStream_t);

struct ActivationKernels {
  struct Direction {
    Launcher plain[2], quantised[2];  // for tiles of one SM, and of two
  } backward, forward;
};

// Each is defined by its file, kernels_*.cu.
template <class Activation>
ActivationKernels const& kernels_of();
template <>
ActivationKernels const& kernels_of<Identity>();
template <>
ActivationKernels const& kernels_of<SquaredReLU<false>>();
template <>
ActivationKernels const& kernels_of<SquaredReLU<true>>();
template <>
ActivationKernels const& kernels_of<SwiGLU>();
template <>
ActivationKernels const& kernels_of<GeGLU<false>>();
template <>
ActivationKernels const& kernels_of<GeGLU<true>>();
template <>
ActivationKernels const& kernels_of<SiTUGLU>();

}  // namespace cudnn_grouped::sm100

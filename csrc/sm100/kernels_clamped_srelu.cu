#include "instantiate.h"

namespace cudnn_grouped::sm100 {
template <>
ActivationKernels const& kernels_of<SquaredReLU<true>>() {
  return both_directions<SquaredReLU<true>>();
}
}  // namespace cudnn_grouped::sm100

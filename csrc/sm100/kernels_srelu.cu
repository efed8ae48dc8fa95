#include "instantiate.h"

namespace cudnn_grouped::sm100 {
template <>
ActivationKernels const& kernels_of<SquaredReLU<false>>() {
  return both_directions<SquaredReLU<false>>();
}
}  // namespace cudnn_grouped::sm100

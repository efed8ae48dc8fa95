#include "instantiate.h"

namespace cudnn_grouped::sm100 {
template <>
ActivationKernels const& kernels_of<SwiGLU>() {
  return both_directions<SwiGLU>();
}
}  // namespace cudnn_grouped::sm100

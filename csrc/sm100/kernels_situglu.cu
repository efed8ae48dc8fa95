#include "instantiate.h"

namespace cudnn_grouped::sm100 {
template <>
ActivationKernels const& kernels_of<SiTUGLU>() {
  return both_directions<SiTUGLU>();
}
}  // namespace cudnn_grouped::sm100

#include "instantiate.h"

namespace cudnn_grouped::sm90 {
ActivationKernels const& geglu_kernels() { return kernels_of<GeGLU>(); }
}  // namespace cudnn_grouped::sm90

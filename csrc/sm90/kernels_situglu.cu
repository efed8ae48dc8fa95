#include "instantiate.h"

namespace cudnn_grouped::sm90 {
ActivationKernels const& situglu_kernels() { return kernels_of<SiTUGLU>(); }
}  // namespace cudnn_grouped::sm90

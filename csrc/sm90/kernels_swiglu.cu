#include "instantiate.h"

namespace cudnn_grouped::sm90 {
ActivationKernels const& swiglu_kernels() { return kernels_of<SwiGLU>(); }
}  // namespace cudnn_grouped::sm90

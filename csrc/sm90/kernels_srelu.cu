#include "instantiate.h"

namespace cudnn_grouped::sm90 {
ActivationKernels const& srelu_kernels() { return kernels_of<SquaredReLU<false>>(); }
}  // namespace cudnn_grouped::sm90

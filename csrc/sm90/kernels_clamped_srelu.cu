#include "instantiate.h"

namespace cudnn_grouped::sm90 {
ActivationKernels const& clamped_srelu_kernels() { return kernels_of<SquaredReLU<true>>(); }
}  // namespace cudnn_grouped::sm90

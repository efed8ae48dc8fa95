#include "instantiate.h"

namespace cudnn_grouped::sm100 {

// mm has no backward of its own.
template <>
ActivationKernels const& kernels_of<Identity>() {
  static constexpr ActivationKernels table = {{}, direction<cuda::Forward<Identity>>()};
  return table;
}

}  // namespace cudnn_grouped::sm100

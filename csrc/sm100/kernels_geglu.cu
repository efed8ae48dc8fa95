#include "instantiate.h"

namespace cudnn_grouped::sm100 {

template <>
ActivationKernels const& kernels_of<GeGLU<false>>() {
  return both_directions<GeGLU<false>>();
}

// Only the BF16 page's backward has it.
template <>
ActivationKernels const& kernels_of<GeGLU<true>>() {
  using Step = cuda::Backward<GeGLU<true>>;
  static constexpr ActivationKernels table = {
      {{launch<Epilogue<Step, false, 1>>, launch<Epilogue<Step, false, 2>>}, {}}, {}};
  return table;
}

}  // namespace cudnn_grouped::sm100

#include "instantiate.h"

namespace cudnn_grouped::sm90 {

ActivationKernels const& geglu_kernels() { return kernels_of<GeGLU<false>>(); }

// Only the BF16 page's backward has it.
ActivationKernels const& geglu_by_value_kernels() {
  using Step = Backward<GeGLU<true>>;
  static constexpr Kernel staged = kernel<Staged<Step, Extras::all>>();
  static constexpr ActivationKernels table = {{staged, staged, staged, kernel<Direct<Step>>()}, {}};
  return table;
}

}  // namespace cudnn_grouped::sm90

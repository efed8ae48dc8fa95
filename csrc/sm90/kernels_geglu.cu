#include "instantiate.h"

namespace cudnn_grouped::sm90 {

// The forward without extras would spill: it runs as the one with them.
ActivationKernels const& geglu_kernels() {
  static constexpr ActivationKernels table = [] {
    auto forward = direction_of<Forward<GeGLU<false>>>();
    forward.staged = forward.staged_with_extras;
    return ActivationKernels{direction_of<Backward<GeGLU<false>>>(), forward, dact<GeGLU<false>>()};
  }();
  return table;
}

// Only the BF16 page's backward has it.
ActivationKernels const& geglu_by_value_kernels() {
  using Step = Backward<GeGLU<true>>;
  static constexpr Kernel staged = kernel<Staged<Step, true>>();
  static constexpr ActivationKernels table = {
      {staged, staged, kernel<Direct<Step>>(), {}, {}, {}, {}}, {}, dact<GeGLU<true>>()};
  return table;
}

}  // namespace cudnn_grouped::sm90

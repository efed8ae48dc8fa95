#include "instantiate.h"

namespace cudnn_grouped::sm90 {

// The plain GEMM: backward only in dact, which has no FP8 D.
ActivationKernels const& identity_kernels() {
  using F = Forward<Identity>;
  static constexpr Kernel direct = kernel<Direct<Backward<Identity>>>(), quantised = kernel<Quantised<F, false>>();
  static constexpr ActivationKernels table = {{direct, direct, {}, {}},
                                              {kernel<Staged<F>>(), kernel<Direct<F>>(), quantised, quantised}};
  return table;
}

}  // namespace cudnn_grouped::sm90

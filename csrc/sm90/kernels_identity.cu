#include "instantiate.h"

namespace cudnn_grouped::sm90 {

// The plain GEMM: backward only in dact, which has no FP8 D.
ActivationKernels const& identity_kernels() {
  static constexpr ActivationKernels table = {{{}, {}, kernel<Direct<Backward<Identity>>>(), {}, {}, {}, {}},
                                              direction_of<Forward<Identity>>()};
  return table;
}

}  // namespace cudnn_grouped::sm90

#include "instantiate.h"

namespace cudnn_grouped::sm90 {

// The plain GEMM: its backward is dact's alone.
ActivationKernels const& identity_kernels() {
  static constexpr ActivationKernels table = {{}, direction_of<Forward<Identity>>()};
  return table;
}

}  // namespace cudnn_grouped::sm90

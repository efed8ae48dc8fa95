#include "instantiate.h"

namespace cudnn_grouped::sm90 {
namespace {

// The role of C known: no element chooses between C and the accumulator.
template <bool kCIsPreactivation>
struct SquaredReLUOf : SquaredReLU<false> {
  template <class V>
  __device__ __forceinline__ Gradient<V, 1> backward(V r, V const (&c)[1], V prob) const {
    return kCIsPreactivation ? gradient(c[0], r, prob) : gradient(r, c[0], prob);
  }
};

template <bool kCIsPreactivation>
constexpr ActivationKernels kKernels = {direction_of<Backward<SquaredReLUOf<kCIsPreactivation>>>(),
                                        direction_of<Forward<SquaredReLU<false>>>()};

}  // namespace

ActivationKernels const& srelu_kernels(bool c_is_preactivation) {
  return c_is_preactivation ? kKernels<true> : kKernels<false>;
}
}  // namespace cudnn_grouped::sm90

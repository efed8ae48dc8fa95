// The CPU engine's inner work. Compiled once per instruction set: CUDNN_GROUPED_ISA names the namespace of this pass.
// All code here is internal to its pass, so that no function of one instruction set is linked into another.
#include <type_traits>

#include "epilogue.h"
#include "multiply.h"
#include "quantise.h"
#include "weight_gradient.h"

namespace cudnn_grouped::cpu {
namespace {

template <template <class> class Step>
void run_epilogue(GroupedGemm const& p, Tile const& tile, Partials const& partials, Scratch& scratch) {
  auto with = [&](auto const& activation) {
    epilogue<Step<std::decay_t<decltype(activation)>>>(p, activation, tile, partials, scratch);
  };
  switch (p.activation) {
    case Activation::none:
      return with(Identity{});
    case Activation::srelu:
      return with(p.srelu);
    case Activation::clamped_srelu:
      return with(p.clamped_srelu);
    case Activation::swiglu:
      return with(SwiGLU{});
    case Activation::geglu:
      return with(p.geglu);
    case Activation::geglu_by_value:
      return with(p.geglu_by_value);
    case Activation::situglu:
      return with(p.situglu);
  }
}

void run_tile(GroupedGemm const& p, Tile const& tile, Partials const& partials, Scratch& scratch) {
  if (p.operation == Operation::dact) {
    load_product(p, tile, scratch);
  } else {
    multiply_tile(p, tile, scratch);
  }
  p.forward() ? run_epilogue<Forward>(p, tile, partials, scratch) : run_epilogue<Backward>(p, tile, partials, scratch);
}

}  // namespace

namespace CUDNN_GROUPED_ISA {
Kernels const& kernels() {
  static constexpr Kernels table = {run_tile, run_weight_gradient_tile, quantise, dequantise};
  return table;
}
}  // namespace CUDNN_GROUPED_ISA

}  // namespace cudnn_grouped::cpu

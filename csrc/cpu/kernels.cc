// The CPU engine's inner work. Compiled once per instruction set: CUDNN_GROUPED_ISA names the namespace of this pass.
// All code here is internal to its pass, so that no function of one instruction set is linked into another.
#include "epilogue.h"
#include "multiply.h"
#include "quantise.h"

namespace cudnn_grouped::cpu {
namespace {

void run_tile(GroupedGemm const& p, Tile const& tile, Partials const& partials, Scratch& scratch) {
  multiply_tile(p, tile, scratch);
  switch (p.activation) {
    case Activation::srelu:
      return epilogue(p, p.srelu, tile, partials, scratch);
    case Activation::clamped_srelu:
      return epilogue(p, p.clamped_srelu, tile, partials, scratch);
    case Activation::swiglu:
      return epilogue(p, SwiGLU{}, tile, partials, scratch);
    case Activation::geglu:
      return epilogue(p, p.geglu, tile, partials, scratch);
    case Activation::situglu:
      return epilogue(p, p.situglu, tile, partials, scratch);
  }
}

}  // namespace

namespace CUDNN_GROUPED_ISA {
Kernels const& kernels() {
  static constexpr Kernels table = {run_tile, quantise, dequantise};
  return table;
}
}  // namespace CUDNN_GROUPED_ISA

}  // namespace cudnn_grouped::cpu

// From the activation that a problem names to the struct that computes it.
#pragma once

#include "../core/problem.h"

namespace cudnn_grouped::cuda {

inline Identity activation_of(GroupedGemm const&, Identity*) { return {}; }
inline SquaredReLU<false> activation_of(GroupedGemm const& p, SquaredReLU<false>*) { return p.srelu; }
inline SquaredReLU<true> activation_of(GroupedGemm const& p, SquaredReLU<true>*) { return p.clamped_srelu; }
inline SwiGLU activation_of(GroupedGemm const&, SwiGLU*) { return {}; }
inline GeGLU<false> activation_of(GroupedGemm const& p, GeGLU<false>*) { return p.geglu; }
inline GeGLU<true> activation_of(GroupedGemm const& p, GeGLU<true>*) { return p.geglu_by_value; }
inline SiTUGLU activation_of(GroupedGemm const& p, SiTUGLU*) { return p.situglu; }

// visit(struct), whose result has one type for all of them.
template <class Visit>
auto visit_activation(GroupedGemm const& p, Visit&& visit) {
  switch (p.activation) {
    case Activation::none:
      return visit(Identity{});
    case Activation::srelu:
      return visit(p.srelu);
    case Activation::clamped_srelu:
      return visit(p.clamped_srelu);
    case Activation::swiglu:
      return visit(SwiGLU{});
    case Activation::geglu:
      return visit(p.geglu);
    case Activation::geglu_by_value:
      return visit(p.geglu_by_value);
    default:
      return visit(p.situglu);
  }
}

}  // namespace cudnn_grouped::cuda

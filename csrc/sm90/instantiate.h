// Included by the files that instantiate the kernels of one activation.
#pragma once

#include "../cuda/activations.h"
#include "direct.h"
#include "grouped_gemm.h"
#include "kernels.h"
#include "quantised_wide.h"
#include "staged.h"

namespace cudnn_grouped::sm90 {
namespace {

template <class Epilogue>
void launch(GroupedGemm const& problem, Params const& p, int blocks, cudaStream_t stream) {
  using Activation = typename Epilogue::Step::Activation;
  cuda::allow_shared_memory<&grouped_gemm<Epilogue>>(SharedLayout<Epilogue>::kBytes);
  KernelArguments<Activation> const arguments{p, {cuda::activation_of(problem, static_cast<Activation*>(nullptr))}};
  cuda::launch(grouped_gemm<Epilogue>, blocks, kThreads, SharedLayout<Epilogue>::kBytes, stream, arguments);
}

template <class Epilogue>
constexpr Kernel kernel() {
  return {Epilogue::kN, Epilogue::kInterleaved, Epilogue::kOrder, launch<Epilogue>};
}

// FP8 D in tiles of 192 columns: where the compiler finds registers enough, and the epilogue is short enough to gain.
template <class Step, Extras kExtras>
constexpr Kernel wide_kernel() {
  using Activation = typename Step::Activation;
  constexpr bool kGated = std::is_same_v<Activation, SwiGLU> || std::is_same_v<Activation, GeGLU<false>>;
  constexpr bool kSquaredReLU = std::is_base_of_v<SquaredReLU<false>, Activation>;
  if constexpr (!Step::kForward && (kGated || kSquaredReLU)) {
    return kernel<QuantisedWide<Step, kExtras>>();
  } else {
    return {};
  }
}

// The forward's saved C never passes through a box beside FP8 D.
template <class Step, bool kStagedC = !Step::kForward>
constexpr ActivationKernels::Direction direction_of() {
  // Without the extras' branches the compiler spills this one.
  constexpr Extras kFew = std::is_same_v<Step, Forward<SiTUGLU>> ? Extras::all : Extras::none;
  // The forward has no dbias.
  constexpr Extras kDbias = Step::kForward ? Extras::all : Extras::dbias;
  return {kernel<Staged<Step, kFew>>(),
          kernel<Staged<Step, kDbias>>(),
          kernel<Staged<Step, Extras::all>>(),
          kernel<Direct<Step>>(),
          kernel<Quantised<Step, kStagedC, true, Extras::none>>(),
          kernel<Quantised<Step, kStagedC, true, kDbias>>(),
          wide_kernel<Step, Extras::none>(),
          wide_kernel<Step, kDbias>(),
          kernel<Quantised<Step, kStagedC, true, Extras::all>>(),
          kernel<Quantised<Step, false, true, Extras::all>>(),
          kernel<Quantised<Step, false, false, Extras::all>>()};
}

template <class Activation>
ActivationKernels const& kernels_of() {
  static constexpr ActivationKernels table = {direction_of<Backward<Activation>>(),
                                              direction_of<Forward<Activation>>()};
  return table;
}

}  // namespace
}  // namespace cudnn_grouped::sm90

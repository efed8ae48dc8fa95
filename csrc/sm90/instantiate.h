// Included by the files that instantiate the kernels of one activation.
#pragma once

#include <atomic>

#include "dact.h"
#include "direct.h"
#include "grouped_gemm.h"
#include "kernels.h"
#include "quantised.h"
#include "staged.h"

namespace cudnn_grouped::sm90 {
namespace {

// A kernel may use more than 48 KiB of shared memory only after it was said, once a device.
template <auto* kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> devices{0};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  uint64_t const bit = uint64_t(1) << (device & 63);
  if (device < 64 && devices.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  devices.fetch_or(bit, std::memory_order_relaxed);
}

inline Identity activation_of(GroupedGemm const&, Identity*) { return {}; }
inline SquaredReLU<false> activation_of(GroupedGemm const& p, SquaredReLU<false>*) { return p.srelu; }
inline SquaredReLU<true> activation_of(GroupedGemm const& p, SquaredReLU<true>*) { return p.clamped_srelu; }
inline SwiGLU activation_of(GroupedGemm const&, SwiGLU*) { return {}; }
inline GeGLU<false> activation_of(GroupedGemm const& p, GeGLU<false>*) { return p.geglu; }
inline GeGLU<true> activation_of(GroupedGemm const& p, GeGLU<true>*) { return p.geglu_by_value; }
inline SiTUGLU activation_of(GroupedGemm const& p, SiTUGLU*) { return p.situglu; }

template <class Epilogue>
void launch(GroupedGemm const& problem, Params const& p, int blocks, cudaStream_t stream) {
  using Activation = typename Epilogue::Step::Activation;
  allow_shared_memory<&grouped_gemm<Epilogue>>(SharedLayout<Epilogue>::kBytes);
  KernelArguments<Activation> const arguments{p, activation_of(problem, static_cast<Activation*>(nullptr))};
  cuda::launch(grouped_gemm<Epilogue>, blocks, kThreads, SharedLayout<Epilogue>::kBytes, stream, arguments);
}

// `blocks` of the table is for persistent kernels.
template <class Activation>
void launch_dact(GroupedGemm const& problem, Params const& p, int, cudaStream_t stream) {
  KernelArguments<Activation> const arguments{p, activation_of(problem, static_cast<Activation*>(nullptr))};
  int64_t const blocks = p.experts.m / (kSlotRows * kDactWarps) * int64_t(ceil_div(p.n, kDactColumns));
  cuda::launch(dact_kernel<Activation>, unsigned(blocks), 32 * kDactWarps, 0, stream, arguments);
}
template <class Activation>
constexpr Kernel dact() {
  return {kDactColumns, false, launch_dact<Activation>};
}

template <class Epilogue>
constexpr Kernel kernel() {
  return {Epilogue::kN, Epilogue::kInterleaved, launch<Epilogue>};
}

// The forward's saved C never passes through a box beside FP8 D.
template <class Step, bool kStagedC = !Step::kForward>
constexpr ActivationKernels::Direction direction_of() {
  return {kernel<Staged<Step, false>>(),
          kernel<Staged<Step, true>>(),
          kernel<Direct<Step>>(),
          kernel<Quantised<Step, kStagedC, true, false>>(),
          kernel<Quantised<Step, kStagedC, true, true>>(),
          kernel<Quantised<Step, false, true, true>>(),
          kernel<Quantised<Step, false, false, true>>()};
}

template <class Activation>
ActivationKernels const& kernels_of() {
  static constexpr ActivationKernels table = {direction_of<Backward<Activation>>(), direction_of<Forward<Activation>>(),
                                              dact<Activation>()};
  return table;
}

}  // namespace
}  // namespace cudnn_grouped::sm90

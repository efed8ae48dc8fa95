// Included by the files that instantiate the kernels of one activation.
#pragma once

#include "../cuda/activations.h"
#include "../cuda/launch.h"
#include "grouped_gemm.h"
#include "kernels.h"

namespace cudnn_grouped::sm100 {
namespace {

template <class EpilogueT>
void launch(GroupedGemm const& problem, Params const& p, int64_t clusters, cudaStream_t stream) {
  using Activation = typename EpilogueT::Activation;
  constexpr auto kKernel = &grouped_gemm<EpilogueT>;
  cuda::allow_shared_memory<kKernel>(kSharedBytes);
  KernelArguments<Activation> const arguments{p, cuda::activation_of(problem, static_cast<Activation*>(nullptr))};
  unsigned const cluster = unsigned(p.cluster_m * p.cluster_n);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cluster, 1, 1};
  // This kernel's set-up overlaps the kernel before it.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = unsigned(clusters) * cluster, config.blockDim = kThreads, config.stream = stream;
  config.dynamicSmemBytes = size_t(kStagesAt + p.operands.stages * stage_bytes(p.operands));
  config.attrs = attributes, config.numAttrs = 2;
  if (!p.dynamic) {
    int resident = 0;
    cuda::check(cudaOccupancyMaxActiveClusters(&resident, kKernel, &config), "cudaOccupancyMaxActiveClusters");
    config.gridDim = unsigned(std::min<int64_t>(clusters, std::max(resident, 1))) * cluster;
  }
  cuda::check(cudaLaunchKernelEx(&config, kKernel, arguments), "a kernel launch");
}

template <class Step>
constexpr ActivationKernels::Direction direction() {
  return {{launch<Epilogue<Step, false, 1>>, launch<Epilogue<Step, false, 2>>},
          {launch<Epilogue<Step, true, 1>>, launch<Epilogue<Step, true, 2>>}};
}

template <class Activation>
ActivationKernels const& both_directions() {
  static constexpr ActivationKernels table = {direction<cuda::Backward<Activation>>(),
                                              direction<cuda::Forward<Activation>>()};
  return table;
}

}  // namespace
}  // namespace cudnn_grouped::sm100

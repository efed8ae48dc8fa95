// A kernel launch, checked.
#pragma once

#include "check.h"

namespace cudnn_grouped::cuda {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes, cudaStream_t stream,
            Arguments const&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "a kernel launch");
}

}  // namespace cudnn_grouped::cuda

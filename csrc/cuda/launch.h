// Launches whose next kernel is set up while this one ends (CUDA programming guide, "Programmatic Dependent Launch").
// Every kernel launched so begins with wait_for_previous(), before it touches global memory.
#pragma once

#include "check.h"

namespace cudnn_grouped::cuda {

#if defined(__CUDACC__)
static __device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}
#endif

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes, cudaStream_t stream,
            Arguments const&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "a kernel launch");
}

}  // namespace cudnn_grouped::cuda

// A kernel launch, checked, and what it needs beforehand.
#pragma once

#include <atomic>
#include <cstdint>

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

}  // namespace cudnn_grouped::cuda

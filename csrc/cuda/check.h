// A CUDA call that fails becomes a RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace cudnn_grouped::cuda {

inline void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next launch would report it again
  throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(error));
}

}  // namespace cudnn_grouped::cuda

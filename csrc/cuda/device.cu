// Tells the core which compute capability a CUDA device has, so that dispatch can name it. The GPU engines register
// themselves beside this.
#include <cuda_runtime.h>

#include "../core/engine.h"

namespace cudnn_grouped::cuda {
namespace {

int capability_of(int device_index) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index);
  return major * 10 + minor;
}

bool const registered = [] {
  register_capability_query(capability_of);
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::cuda

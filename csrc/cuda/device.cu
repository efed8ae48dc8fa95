// Tells the core which compute capability a CUDA device has, so that dispatch can name it. The GPU engines register
// themselves beside this.
#include <cuda_runtime.h>

#include "../core/device_values.h"
#include "../core/engine.h"
#include "check.h"

namespace cudnn_grouped::cuda {
namespace {

int capability_of(int device_index) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index), "cudaDeviceGetAttribute");
  return major * 10 + minor;
}

bool read(void* to, void const* from, int64_t bytes, int device_index, void* handle) {
  cudaStream_t const stream = static_cast<cudaStream_t>(handle);
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  check(cudaSetDevice(device_index), "cudaSetDevice");
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &status);
  bool const readable = status == cudaStreamCaptureStatusNone;
  if (error == cudaSuccess && readable) error = cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, stream);
  if (error == cudaSuccess && readable) error = cudaStreamSynchronize(stream);
  check(cudaSetDevice(before), "cudaSetDevice");
  check(error, "reading values for their checks");
  return readable;
}

bool const registered = [] {
  register_capability_query(capability_of);
  device_reader().read = read;
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::cuda

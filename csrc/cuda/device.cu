// What the core asks of a CUDA device: its compute capability, so that dispatch can name it; values for checks; memory
// filled on a stream. The GPU engines register themselves beside this.
#include <cuda_runtime.h>

#include "../core/device_values.h"
#include "../core/engine.h"
#include "check.h"
#include "launch.h"

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

constexpr int kThreads = 256, kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads) fill_kernel(uint32_t* to, uint32_t pattern, int64_t count) {
  int64_t const step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) to[i] = pattern;
}

void fill(void* to, uint32_t pattern, int64_t count, void* stream) {
  int64_t const blocks = ceil_div<int64_t>(count, kThreads);
  launch(fill_kernel, dim3(unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads), 0,
         static_cast<cudaStream_t>(stream), static_cast<uint32_t*>(to), pattern, count);
}

bool const registered = [] {
  register_capability_query(capability_of);
  register_fill(fill);
  device_reader().read = read;
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::cuda

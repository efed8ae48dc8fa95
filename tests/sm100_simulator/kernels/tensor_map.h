// Tensor maps of the test kernels: one call of the driver's encoder, found the way the runtime finds it.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

struct TensorShape {
  CUtensorMapDataType type;
  int rank;
  cuuint64_t extents[3];
  cuuint64_t strides[2];  // bytes, of the second and third dimension
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

inline int encode(CUtensorMap& map, void* data, TensorShape const& shape) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  cuuint32_t const steps[3] = {1, 1, 1};
  CUresult const result = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(address)(
      &map, shape.type, shape.rank, data, shape.extents, shape.strides, shape.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#include "tensor_map.h"

#include "check.h"

namespace cudnn_grouped::cuda {
namespace {

// The driver's library is not linked: a machine without a GPU has none.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static auto const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (!found) throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: expected CUDA 12 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap make_map(void const* address, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     std::initializer_list<MapDimension> dimensions) {
  cuuint64_t sizes[5], strides[5];
  cuuint32_t boxes[5], steps[5];
  uint32_t rank = 0;
  for (MapDimension const& d : dimensions) {
    sizes[rank] = cuuint64_t(d.size), boxes[rank] = cuuint32_t(d.box), steps[rank] = 1;
    if (rank) strides[rank - 1] = cuuint64_t(d.stride_bytes);
    ++rank;
  }
  CUtensorMap map;
  CUresult const result = encode_function()(&map, type, rank, const_cast<void*>(address), sizes, strides, boxes, steps,
                                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled failed with " + std::to_string(int(result)));
  }
  return map;
}

}  // namespace cudnn_grouped::cuda

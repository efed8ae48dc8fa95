// Tensor maps, made on the host.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

namespace cudnn_grouped::cuda {

struct MapDimension {
  int64_t size, stride_bytes;  // of the innermost dimension the stride is one element
  int box;
};
// Throws std::runtime_error where the driver refuses: validated problems never do.
CUtensorMap make_map(void const* address, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                     std::initializer_list<MapDimension> dimensions);

}  // namespace cudnn_grouped::cuda

// The rows of the experts, read on the device. Offsets were not checked: whatever they hold, every answer lies within
// the caller's tensors and every role of a kernel gets the same one.
#pragma once

#include "../core/problem.h"

namespace cudnn_grouped::cuda {

inline constexpr int kSlotRows = 32;  // rows behind one slot of dbias: a warp's

struct Experts {
  int32_t const* offsets;  // null: one expert owns all rows
  int count, m;

  __device__ __forceinline__ int end(int expert) const {
    constexpr int kAligned = int(kRowAlignment);
    return offsets ? min(max(__ldg(offsets + expert), 0), m) / kAligned * kAligned : m;
  }
  __device__ __forceinline__ int start(int expert) const { return expert ? end(expert - 1) : 0; }
  // Rows that belong to an expert.
  __device__ __forceinline__ int rows() const { return end(count - 1); }
  __device__ __forceinline__ int of(int row) const {
    if (!offsets) return 0;
    int low = 0, high = count - 1;
    while (low < high) {
      int const middle = (low + high) / 2;
      if (__ldg(offsets + middle) > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

// Whether an address of a table, which nobody has checked either, is followed.
__device__ __forceinline__ bool is_usable(int64_t address) { return address && address % 16 == 0; }

}  // namespace cudnn_grouped::cuda

// The order in which tiles are taken, so that blocks that run together share panels of A and of B in L2.
#pragma once

#include "../core/portable.h"

namespace cudnn_grouped::sm90 {

// Groups of rows of tiles; inside a group rows run fastest. An even group: neighbouring blocks, the two of a TPC, then read
// the same panel of B. Serpentine: every second group takes its columns backwards, beginning where the last one ended.
template <int kGroup, bool kSerpentine>
struct TileOrder {
  static_assert(kGroup % 2 == 0);
  struct Place {
    int row, column;
  };
  static __device__ __forceinline__ Place place_of(int index, int rows, int columns) {
    int const g = index / (kGroup * columns), rows_here = min(kGroup, rows - g * kGroup);
    int rest = index - g * kGroup * columns;
    if (kSerpentine && g % 2) rest = rows_here * columns - 1 - rest;
    return {g * kGroup + rest % rows_here, rest / rows_here};
  }
};

}  // namespace cudnn_grouped::sm90

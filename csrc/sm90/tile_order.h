// The order in which tiles are taken, so that blocks that run together share panels of A and of B in L2.
#pragma once

namespace cudnn_grouped::sm90 {

// Groups of rows of tiles; inside a group rows run fastest. An even group: neighbouring blocks, the two of a TPC, then
// read the same panel of B. Serpentine: every second group is taken backwards, beginning at the columns where the last
// ended.
struct TileOrder {
  int group;
  bool serpentine;

  struct Place {
    int row, column;
  };
  __device__ __forceinline__ Place place_of(int index, int rows, int columns) const {
    int const g = index / (group * columns), rows_here = min(group, rows - g * group);
    int rest = index - g * group * columns;
    if (serpentine && g % 2) rest = rows_here * columns - 1 - rest;
    return {g * group + rest % rows_here, rest / rows_here};
  }
};

}  // namespace cudnn_grouped::sm90

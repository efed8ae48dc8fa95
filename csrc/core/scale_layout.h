// Where the scale of (row r, block b) lies. One atom is 128 rows x 4 blocks = 512 bytes:
//   byte(r, b) = ((r/128)*ceil(B/4) + b/4)*512 + (r%32)*16 + ((r/32)%4)*4 + b%4
// The documented 6-D view (32, 4, ceil(R/128), 4, ceil(B/4), L) is the permuted view of that buffer.
// Column scales: rows are n, blocks run along m. The discrete form gives each expert a complete tensor of its own.
#pragma once

#include "portable.h"

namespace cudnn_grouped {

inline constexpr int64_t kAtomRows = 128, kAtomBlocks = 4, kAtomBytes = 512;

struct ScaleLayout {
  int64_t row_atoms, block_atoms;

  CG_HD static ScaleLayout of(int64_t rows, int64_t blocks) {
    return {ceil_div(rows, kAtomRows), ceil_div(blocks, kAtomBlocks)};
  }
  CG_HD int64_t bytes() const { return row_atoms * block_atoms * kAtomBytes; }
  CG_HD int64_t at(int64_t r, int64_t b) const {
    return ((r / kAtomRows) * block_atoms + b / kAtomBlocks) * kAtomBytes + (r % 32) * 16 + ((r / 32) % 4) * 4 +
           b % kAtomBlocks;
  }
};

// First byte of the expert that starts at row `start`, in the discrete form of column scales of `columns` columns:
// experts are whole atoms, since their rows are a multiple of 256 and a scale covers at most 32 of them.
CG_HD int64_t discrete_column_base(int64_t start, int64_t columns, int64_t rows_per_scale) {
  return start / (kAtomBlocks * rows_per_scale) * ceil_div(columns, kAtomRows) * kAtomBytes;
}

}  // namespace cudnn_grouped

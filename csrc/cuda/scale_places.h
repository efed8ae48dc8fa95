// Where the scale factors of a quantised D lie: a row's along the row, those of a warp's 32 rows along the columns.
#pragma once

#include "../core/scale_layout.h"
#include "experts.h"
#include "inline.h"

namespace cudnn_grouped::cuda {

struct ScalePlaces {
  uint8_t *row, *column;  // column: null where unchecked offsets would lead out of the tensor
  int column_atoms;       // from 128 columns to the next 128

  // first_row: of the warp's 32; row_of_thread: whose scale factors this thread writes.
  __device__ __forceinline__ ScalePlaces(Experts const& experts, uint8_t* sfd_row, uint8_t* sfd_col, bool discrete,
                                         int expert, int columns, int first_row, int row_of_thread) {
    ScaleLayout const along = ScaleLayout::of(experts.m, ceil_div(columns, int(kQuantBlock)));
    row = sfd_row + along.at(row_of_thread, 0);
    int first = 0, rows = experts.m;
    column = sfd_col;
    if (discrete) {
      first = experts.start(expert), rows = experts.end(expert) - first;
      column += discrete_column_base(first, columns, kQuantBlock);
    }
    int const block = (first_row - first) / int(kQuantBlock);
    ScaleLayout const across = ScaleLayout::of(columns, rows / int(kQuantBlock));
    bool const inside = first_row >= first && block < rows / int(kQuantBlock);
    column = inside ? column + across.at(0, block) : nullptr;
    column_atoms = int(across.block_atoms);
  }
  // Blocks of a row come four to an atom; columns of an atom as ScaleLayout says. Offsets fit 32 bits: a tensor's scale
  // factors are a thirty-second of its bytes.
  __device__ __forceinline__ uint8_t* of_row(int block) const {
    return row + (uint32_t(block) / 4 * uint32_t(kAtomBytes) + uint32_t(block) % 4);
  }
  __device__ __forceinline__ uint8_t* of_column(int c) const {
    uint32_t const at = c;
    return column + (at / 128 * uint32_t(column_atoms) * uint32_t(kAtomBytes) + at % 32 * 16 + at / 32 % 4 * 4);
  }
};

}  // namespace cudnn_grouped::cuda

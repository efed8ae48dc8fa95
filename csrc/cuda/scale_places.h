// Where the scale factors of a quantised D lie: a row's along the row, those of a warp's 32 rows along the columns.
#pragma once

#include "../core/scale_layout.h"
#include "experts.h"
#include "inline.h"

namespace cudnn_grouped::cuda {

// Offsets fit 32 bits: the validator refuses a D whose scale factors, padding included, take more than 4 GiB.
struct ScalePlaces {
  static constexpr uint32_t kOutside = ~0u;
  uint32_t row, column;   // column: kOutside where unchecked offsets would lead out of the tensor
  uint32_t column_atoms;  // bytes from 128 columns to the next 128

  __device__ __forceinline__ ScalePlaces(uint32_t row, uint32_t column, uint32_t column_atoms)
      : row(row), column(column), column_atoms(column_atoms) {}
  // first_row: of the warp's 32; row_of_thread: whose scale factors this thread writes.
  __device__ __forceinline__ ScalePlaces(Experts const& experts, bool discrete, int expert, int columns, int first_row,
                                         int row_of_thread) {
    ScaleLayout const along = ScaleLayout::of(experts.m, ceil_div(columns, int(kQuantBlock)));
    row = uint32_t(along.at(row_of_thread, 0));
    int const first = discrete ? experts.start(expert) : 0, rows = discrete ? experts.end(expert) - first : experts.m;
    int64_t const base = discrete ? discrete_column_base(first, columns, kQuantBlock) : 0;
    int const block = (first_row - first) / int(kQuantBlock);
    ScaleLayout const across = ScaleLayout::of(columns, rows / int(kQuantBlock));
    bool const inside = first_row >= first && block < rows / int(kQuantBlock);
    column = inside ? uint32_t(base + across.at(0, block)) : kOutside;
    column_atoms = uint32_t(across.block_atoms * kAtomBytes);
  }
  __device__ __forceinline__ bool inside() const { return column != kOutside; }
  // Blocks of a row come four to an atom; columns of an atom as ScaleLayout says.
  __device__ __forceinline__ uint32_t of_row(int block) const {
    return row + uint32_t(block) / 4 * uint32_t(kAtomBytes) + uint32_t(block) % 4;
  }
  __device__ __forceinline__ uint32_t of_column(int c) const {
    uint32_t const at = c;
    return column + at / 128 * column_atoms + at % 32 * 16 + at / 32 % 4 * 4;
  }
};

}  // namespace cudnn_grouped::cuda

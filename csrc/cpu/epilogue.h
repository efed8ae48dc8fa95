// The epilogue of a tile, in blocks of 32 rows x 32 columns of the GEMM: activation, reductions, quantiser, stores.
// A block is also a block of both quantisers: 32 columns of a row, 32 rows of a column.
#pragma once

#include "../core/scale_layout.h"
#include "convert.h"
#include "kernels.h"

namespace cudnn_grouped::cpu {
namespace {

inline constexpr int kBlock = int(kQuantBlock);
static_assert(kQuantBlock == kInterleave, "a block of D is one gate block or one up block");

// Running reductions over the blocks of one 32-row band or one tile.
template <int kWidth>
struct Lanes {
  alignas(64) float dprob[kBlock][kBlock];    // [row][lane]
  alignas(64) uint32_t amax[kWidth][kBlock];  // magnitude bits
};

// Quantises one 32 x 32 block of D by rows and by columns. column: its first column in D; count: columns that exist.
template <class Format>
inline void store_quantised(GroupedGemm const& p, Tile const& tile, int64_t row, int64_t column, int count, float norm,
                            float const (&d)[kBlock][kBlock]) {
  alignas(64) uint32_t column_amax[kBlock] = {};
  alignas(64) float row_factor[kBlock], column_factor[kBlock];
  int64_t const width = p.d_columns();
  ScaleLayout const by_row = ScaleLayout::of(p.m, ceil_div(width, kQuantBlock));
  for (int r = 0; r < kBlock; ++r) {
    uint32_t amax = 0;
    for (int i = 0; i < kBlock; ++i) {
      uint32_t const magnitude = magnitude_bits(d[r][i]);
      amax = amax > magnitude ? amax : magnitude;
      column_amax[i] = column_amax[i] > magnitude ? column_amax[i] : magnitude;
    }
    uint32_t const byte = encode_e8m0_up(scale_value(bits_float(amax), Format::kReciprocal, norm));
    row_factor[r] = e8m0_factor(byte, norm);
    p.sfd_row[by_row.at(row + r, column / kBlock)] = uint8_t(byte);
  }
  // Column scales: one tensor over all rows, or a complete one for each expert.
  int64_t const first_row = p.discrete_col_sfd ? tile.expert_start : 0;
  int64_t const rows = p.discrete_col_sfd ? tile.expert_rows : p.m;
  ScaleLayout const by_column = ScaleLayout::of(width, rows / kBlock);
  uint8_t* column_scales = p.sfd_col + (p.discrete_col_sfd ? discrete_column_base(first_row, width, kQuantBlock) : 0);
  for (int i = 0; i < count; ++i) {
    uint32_t const byte = encode_e8m0_up(scale_value(bits_float(column_amax[i]), Format::kReciprocal, norm));
    column_factor[i] = e8m0_factor(byte, norm);
    column_scales[by_column.at(column + i, (row - first_row) / kBlock)] = uint8_t(byte);
  }
  for (int r = 0; r < kBlock; ++r) {
    int64_t const at = (row + r) * width + column;
    uint8_t* by_row_data = static_cast<uint8_t*>(p.d_row) + at;
    uint8_t* by_column_data = static_cast<uint8_t*>(p.d_col) + at;
    for (int i = 0; i < count; ++i) by_row_data[i] = uint8_t(Format::encode(d[r][i] * row_factor[r]));
    for (int i = 0; i < count; ++i) by_column_data[i] = uint8_t(Format::encode(d[r][i] * column_factor[i]));
  }
}

inline void store_plain(GroupedGemm const& p, int64_t row, int64_t column, int count,
                        float const (&d)[kBlock][kBlock]) {
  for (int r = 0; r < kBlock; ++r) {
    int64_t const at = (row + r) * p.d_columns() + column;
    store_run(p.d_dtype, p.d_row, at, d[r], count);
    if (p.d_col && p.d_col != p.d_row) store_run(p.d_dtype, p.d_col, at, d[r], count);
  }
}

template <class ActivationT>
inline void block_gradient(GroupedGemm const& p, ActivationT const activation, float scale, float beta, int64_t row,
                           int64_t column, int count, float const* product, Lanes<ActivationT::kWidth>& lanes,
                           float (&d)[ActivationT::kWidth][kBlock][kBlock]) {
  constexpr int kWidth = ActivationT::kWidth;
  for (int r = 0; r < kBlock; ++r) {
    alignas(64) float c[kWidth][kBlock], term[kBlock];
    for (int w = 0; w < kWidth; ++w) {
      load_run(p.c_dtype, p.c, (row + r) * p.d_columns() + column * kWidth + w * kBlock, c[w], count);
      for (int i = count; i < kBlock; ++i) c[w][i] = 0.f;
    }
    float const prob = p.prob[row + r];
    float const* acc = product + r * kTileColumns;
    for (int i = 0; i < kBlock; ++i) {
      float x[kWidth];
      for (int w = 0; w < kWidth; ++w) x[w] = beta * c[w][i];
      auto const g = activation.backward(scale * acc[i], x, prob);
      for (int w = 0; w < kWidth; ++w) d[w][r][i] = g.x[w];
      term[i] = g.prob_term;
    }
    for (int i = count; i < kBlock; ++i) {  // columns past N: a NaN alpha or prob must not reach them
      for (int w = 0; w < kWidth; ++w) d[w][r][i] = 0.f;
      term[i] = 0.f;
    }
    for (int i = 0; i < kBlock; ++i) lanes.dprob[r][i] += term[i];
  }
  if (p.epilogue_op == EpilogueOp::identity) return;
  for (int w = 0; w < kWidth; ++w) {
    for (int r = 0; r < kBlock; ++r) {
      for (int i = 0; i < kBlock; ++i) d[w][r][i] = apply_epilogue_op(p.epilogue_op, d[w][r][i]);
    }
  }
}

inline float sum_lanes(float const (&lanes)[kBlock]) {
  float sum[kBlock];
  for (int i = 0; i < kBlock; ++i) sum[i] = lanes[i];
  for (int half = kBlock / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  }
  return sum[0];
}

template <class ActivationT>
inline void epilogue(GroupedGemm const& p, ActivationT const& activation, Tile const& tile, Partials const& partials,
                     Scratch const& scratch) {
  constexpr int kWidth = ActivationT::kWidth;
  float const alpha = p.alpha[tile.expert], scale = p.alpha_squared ? alpha * alpha : alpha;
  float const beta = p.beta ? p.beta[tile.expert] : 1.f;
  float const norm = p.quantised() ? *p.norm_const : 1.f;
  Lanes<kWidth> lanes{};
  for (int64_t band = 0; band < kTileRows; band += kBlock) {
    int64_t const row = tile.row + band;
    for (int r = 0; r < kBlock; ++r) {
      for (int i = 0; i < kBlock; ++i) lanes.dprob[r][i] = 0.f;
    }
    for (int64_t first = 0; first < tile.columns; first += kBlock) {
      int const count = int(tile.columns - first < kBlock ? tile.columns - first : kBlock);
      alignas(64) float d[kWidth][kBlock][kBlock];
      block_gradient(p, activation, scale, beta, row, tile.column + first, count,
                     scratch.product + band * kTileColumns + first, lanes, d);
      for (int w = 0; w < kWidth; ++w) {
        int64_t const column = (tile.column + first) * kWidth + w * kBlock;
        if (partials.dbias) {
          float* slot = partials.dbias + (row / kDbiasSlotRows) * p.d_columns() + column;
          for (int r = 0; r < kBlock; ++r) {
            for (int i = 0; i < count; ++i) slot[i] += d[w][r][i];
          }
        }
        if (partials.amax) {
          for (int r = 0; r < kBlock; ++r) {
            for (int i = 0; i < kBlock; ++i) {
              uint32_t const magnitude = magnitude_bits(d[w][r][i]);
              lanes.amax[w][i] = lanes.amax[w][i] > magnitude ? lanes.amax[w][i] : magnitude;
            }
          }
        }
        if (p.d_dtype == DType::float8_e4m3fn) {
          store_quantised<E4M3>(p, tile, row, column, count, norm, d[w]);
        } else if (p.d_dtype == DType::float8_e5m2) {
          store_quantised<E5M2>(p, tile, row, column, count, norm, d[w]);
        } else {
          store_plain(p, row, column, count, d[w]);
        }
      }
    }
    for (int r = 0; r < kBlock; ++r) {
      partials.dprob[(row + r) * partials.dprob_slots + tile.column_tile] = sum_lanes(lanes.dprob[r]);
    }
  }
  if (!partials.amax) return;
  for (int w = 0; w < kWidth; ++w) {
    uint32_t amax = 0;
    for (uint32_t bits : lanes.amax[w]) amax = amax > bits ? amax : bits;
    partials.amax[(tile.row_tile * partials.column_tiles + tile.column_tile) * kWidth + w] = bits_float(amax);
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

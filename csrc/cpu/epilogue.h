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

// A block of D as FP32: 32 rows, `count` columns that exist, the rest zero.
typedef float Block[kBlock][kBlock];

// Running reductions over the blocks of a tile.
struct Lanes {
  alignas(64) Block dprob;               // of one band of 32 rows: [row][lane]
  alignas(64) uint32_t amax[2][kBlock];  // magnitude bits: [gate, up][lane]
};

// Quantises one 32 x 32 block of D by rows and by columns. column: its first column in D; count: columns that exist.
template <class Format>
inline void store_quantised(GroupedGemm const& p, Tile const& tile, int64_t row, int64_t column, int count, float norm,
                            Block const& d) {
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

inline void store_plain(GroupedGemm const& p, int64_t row, int64_t column, int count, Block const& d) {
  for (int r = 0; r < kBlock; ++r) {
    int64_t const at = (row + r) * p.d_columns() + column;
    store_run(p.d_dtype, p.d_row, at, d[r], count);
    if (p.d_col && p.d_col != p.d_row) store_run(p.d_dtype, p.d_col, at, d[r], count);
  }
}

// What the steps below share: the tile's scalars.
struct Scalars {
  float alpha, beta, norm;

  Scalars(GroupedGemm const& p, int64_t expert) {
    alpha = p.alpha ? p.alpha[expert] : 1.f;
    if (p.alpha_squared) alpha *= alpha;
    beta = p.beta ? p.beta[expert] : 1.f;
    norm = p.quantised() && p.norm_const ? *p.norm_const : 1.f;
  }
};

// count values of expert's bias from column n, or zeros.
inline void load_bias(GroupedGemm const& p, int64_t expert, int64_t column, int count, float (&bias)[kBlock]) {
  for (int i = 0; i < kBlock; ++i) bias[i] = 0.f;
  if (p.bias) load_run(p.bias_dtype, p.bias, expert * p.n + column, bias, count);
}

// One block of the GEMM gives kWidth blocks of D: the gradients of gate and up lie where C's gate and up do.
template <class ActivationT>
struct Backward {
  static constexpr int kWidth = ActivationT::kWidth, kColumns = kBlock, kBlocksOut = kWidth;

  static inline void run(GroupedGemm const& p, ActivationT const activation, Scalars const& scalars, Tile const& tile,
                         int64_t row, int64_t column, int count, float const* product, Lanes& lanes,
                         Block (&d)[kBlocksOut]) {
    float bias[kBlock];
    load_bias(p, tile.expert, column, count, bias);
    for (int r = 0; r < kBlock; ++r) {
      alignas(64) float c[kWidth][kBlock], term[kBlock];
      int64_t const c_row = p.c_per_expert ? tile.expert : row + r;
      for (int w = 0; w < kWidth; ++w) {
        load_run(p.c_dtype, p.c, c_row * p.c_columns() + column * kWidth + w * kBlock, c[w], count);
        for (int i = count; i < kBlock; ++i) c[w][i] = 0.f;
      }
      float const prob = p.prob ? p.prob[row + r] : 1.f, alpha = scalars.alpha, beta = scalars.beta;
      float const* acc = product + r * kTileColumns;
      for (int i = 0; i < kBlock; ++i) {
        float x[kWidth];
        for (int w = 0; w < kWidth; ++w) x[w] = beta * c[w][i];
        auto const g = activation.backward(alpha * acc[i] + bias[i], x, prob);
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
};

// kWidth blocks of the GEMM give one block of D. C is the activation's operand, saved before anything rounds it.
template <class ActivationT>
struct Forward {
  static constexpr int kWidth = ActivationT::kWidth, kColumns = kBlock * kWidth, kBlocksOut = 1;

  static inline void run(GroupedGemm const& p, ActivationT const activation, Scalars const& scalars, Tile const& tile,
                         int64_t row, int64_t column, int count, float const* product, Lanes&, Block (&d)[kBlocksOut]) {
    // The plain GEMM's bias is multiplied by prob, and its GEMM then is not: prob is in A already (contract: unfused).
    bool const prob_on_bias = p.operation == Operation::mm && p.bias;
    float bias[kWidth][kBlock];
    for (int w = 0; w < kWidth; ++w) load_bias(p, tile.expert, column + w * kBlock, count, bias[w]);
    for (int r = 0; r < kBlock; ++r) {
      alignas(64) float x[kWidth][kBlock];
      float const prob = p.prob ? p.prob[row + r] : 1.f, alpha = scalars.alpha;
      float const bias_factor = prob_on_bias ? prob : 1.f, factor = prob_on_bias ? 1.f : prob;
      float const* acc = product + r * kTileColumns;
      for (int w = 0; w < kWidth; ++w) {
        for (int i = 0; i < kBlock; ++i) x[w][i] = alpha * acc[w * kBlock + i] + bias_factor * bias[w][i];
        if (p.c) store_run(p.c_dtype, p.c, (row + r) * p.c_columns() + column + w * kBlock, x[w], count);
      }
      for (int i = 0; i < kBlock; ++i) {
        float operand[kWidth];
        for (int w = 0; w < kWidth; ++w) operand[w] = x[w][i];
        d[0][r][i] = factor * activation.forward(operand);
      }
      for (int i = count; i < kBlock; ++i) d[0][r][i] = 0.f;
    }
  }
};

inline void add_bias_gradient(GroupedGemm const& p, Partials const& partials, int64_t row, int64_t column, int count,
                              Block const& d) {
  float* slot = partials.dbias + (row / kDbiasSlotRows) * p.d_columns() + column;
  for (int r = 0; r < kBlock; ++r) {
    for (int i = 0; i < count; ++i) slot[i] += d[r][i];
  }
}

inline void update_amax(Block const& d, uint32_t (&amax)[kBlock]) {
  for (int r = 0; r < kBlock; ++r) {
    for (int i = 0; i < kBlock; ++i) {
      uint32_t const magnitude = magnitude_bits(d[r][i]);
      amax[i] = amax[i] > magnitude ? amax[i] : magnitude;
    }
  }
}

inline void store_block(GroupedGemm const& p, Tile const& tile, int64_t row, int64_t column, int count, float norm,
                        Block const& d) {
  if (p.d_dtype == DType::float8_e4m3fn) {
    store_quantised<E4M3>(p, tile, row, column, count, norm, d);
  } else if (p.d_dtype == DType::float8_e5m2) {
    store_quantised<E5M2>(p, tile, row, column, count, norm, d);
  } else {
    store_plain(p, row, column, count, d);
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

template <class Step, class ActivationT>
inline void epilogue(GroupedGemm const& p, ActivationT const& activation, Tile const& tile, Partials const& partials,
                     Scratch const& scratch) {
  Scalars const scalars(p, tile.expert);
  Lanes lanes{};
  for (int64_t band = 0; band < kTileRows; band += kBlock) {
    int64_t const row = tile.row + band;
    for (int r = 0; r < kBlock; ++r) {
      for (int i = 0; i < kBlock; ++i) lanes.dprob[r][i] = 0.f;
    }
    for (int64_t first = 0; first < tile.columns; first += Step::kColumns) {
      int const count = int(tile.columns - first < kBlock ? tile.columns - first : kBlock);
      int64_t const column = tile.column + first;
      alignas(64) Block d[Step::kBlocksOut];
      Step::run(p, activation, scalars, tile, row, column, count, scratch.product + band * kTileColumns + first, lanes,
                d);
      int64_t const d_column = column / Step::kColumns * kBlock * Step::kBlocksOut;
      for (int w = 0; w < Step::kBlocksOut; ++w) {
        if (partials.dbias) add_bias_gradient(p, partials, row, d_column + w * kBlock, count, d[w]);
        if (partials.amax) update_amax(d[w], lanes.amax[w]);
        if (p.d_row) store_block(p, tile, row, d_column + w * kBlock, count, scalars.norm, d[w]);
      }
    }
    if (!partials.dprob) continue;
    for (int r = 0; r < kBlock; ++r) {
      partials.dprob[(row + r) * partials.dprob_slots + tile.column_tile] = sum_lanes(lanes.dprob[r]);
    }
  }
  if (!partials.amax) return;
  for (int w = 0; w < Step::kBlocksOut; ++w) {
    uint32_t amax = 0;
    for (uint32_t bits : lanes.amax[w]) amax = amax > bits ? amax : bits;
    partials.amax[(tile.row_tile * partials.column_tiles + tile.column_tile) * Step::kBlocksOut + w] = bits_float(amax);
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

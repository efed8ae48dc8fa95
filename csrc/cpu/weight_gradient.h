// One tile of an expert's weight gradient: the same multiply, over the expert's tokens.
#pragma once

#include "multiply.h"

namespace cudnn_grouped::cpu {
namespace {

inline constexpr int kChunk = 64;  // rows of A transposed together

// The scales of the tokens from `start` on: of the expert, or of all tokens.
struct TokenScales {
  uint8_t const* base;
  ScaleLayout layout;
  int64_t first;

  static TokenScales of(WeightGradient const& p, WeightGradient::Operand const& o, int64_t start, int64_t tokens) {
    if (!o.scales) return {nullptr, {}, 0};
    if (!p.discrete_scales) return {o.scales, ScaleLayout::of(o.rows, p.tokens / p.sf_vec_size), 0};
    return {o.scales + discrete_column_base(start, o.rows, p.sf_vec_size),
            ScaleLayout::of(o.rows, tokens / p.sf_vec_size), start};
  }
};

// out[t][r], `width` apart: rows [row, row + rows) of tokens [token, token + count); zero from rows to width.
inline void load_tokens(WeightGradient const& p, WeightGradient::Operand const& o, TokenScales const& scales,
                        int64_t row, int rows, int64_t token, int count, int width, float* out) {
  for (int i = 0; i < count; ++i) {
    if (!o.tokens_contiguous) load_operand_run(p.operands, o.data, (token + i) * o.rows + row, out + i * width, rows);
    for (int r = rows; r < width; ++r) out[i * width + r] = 0.f;
  }
  for (int r = 0; r < rows && o.tokens_contiguous; ++r) {
    float line[kDepth];
    load_operand_run(p.operands, o.data, (row + r) * p.tokens + token, line, count);
    for (int i = 0; i < count; ++i) out[i * width + r] = line[i];
  }
  if (!scales.base) return;
  int const block = int(p.sf_vec_size);
  float scale[kChunk];
  for (int begin = 0; begin < count; begin += block) {
    for (int r = 0; r < rows; ++r) {
      int64_t const position = scales.layout.at(row + r, (token - scales.first + begin) / block);
      scale[r] = decode_scale(p.scale_dtype, scales.base[position]);
    }
    for (int i = begin; i < begin + block; ++i) {
      for (int r = 0; r < rows; ++r) out[i * width + r] *= scale[r];
    }
  }
}

inline void run_weight_gradient_tile(WeightGradient const& p, WeightTile const& tile, Scratch& scratch) {
  if (p.accumulate && tile.tokens == 0) return;  // nothing to add: not even 0 to a -0
  TokenScales const a_scales = TokenScales::of(p, p.a, tile.start, tile.tokens);
  TokenScales const b_scales = TokenScales::of(p, p.b, tile.start, tile.tokens);
  int64_t const padded_rows = ceil_div<int64_t>(tile.rows, kRegisterRows) * kRegisterRows;
  for (int64_t t = 0; t < tile.tokens; t += kDepth) {
    int const count = int(tile.tokens - t < kDepth ? tile.tokens - t : kDepth);
    for (int64_t first = 0; first < padded_rows; first += kChunk) {
      int const rows = int(tile.rows - first < kChunk ? tile.rows - first : kChunk);
      load_tokens(p, p.a, a_scales, tile.row + first, rows, tile.start + t, count, kChunk, scratch.b_rows);
      for (int r = 0; r < kChunk && first + r < kTileRows; ++r) {
        for (int i = 0; i < count; ++i) scratch.a[(first + r) * kDepth + i] = scratch.b_rows[i * kChunk + r];
      }
    }
    for (int64_t first = 0; first < tile.columns; first += kPanel) {
      int const columns = int(tile.columns - first < kPanel ? tile.columns - first : kPanel);
      load_tokens(p, p.b, b_scales, tile.column + first, columns, tile.start + t, count, kPanel,
                  scratch.b + first * kDepth);
    }
    multiply_panels(scratch, padded_rows, tile.columns, count, t == 0);
  }
  float const scale = (p.global_scale_a ? p.global_scale_a[tile.expert] : 1.f) *
                      (p.global_scale_b ? p.global_scale_b[tile.expert] : 1.f);
  void* out = p.out[tile.expert];
  for (int64_t r = 0; r < tile.rows; ++r) {
    float line[kTileColumns], old[kTileColumns];
    float const* sum = scratch.product + r * kTileColumns;
    int const columns = int(tile.columns);
    for (int i = 0; i < columns; ++i) line[i] = tile.tokens ? scale * sum[i] : 0.f;
    int64_t const at = (tile.row + r) * p.b.rows + tile.column;
    if (p.accumulate) {
      load_run(p.out_dtype, out, at, old, columns);
      for (int i = 0; i < columns; ++i) line[i] += old[i];
    }
    store_run(p.out_dtype, out, at, line, columns);
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

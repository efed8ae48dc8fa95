// quantize and dequantize: the block quantiser as an operator, by rows or by columns.
#pragma once

#include "../core/scale_layout.h"
#include "convert.h"
#include "kernels.h"

namespace cudnn_grouped::cpu {
namespace {

inline constexpr int kStrip = 64;  // columns worked on together

inline bool is_fp4(QuantizeProblem const& p) { return p.data_dtype == DType::float4_e2m1fn_x2; }

// Where the scales of one batch entry, or of one expert's rows, lie.
struct ScaleBand {
  uint8_t* base;
  ScaleLayout layout;
  int64_t first_row;  // by_column: the row that block 0 begins at

  static ScaleBand of(QuantizeProblem const& p, int64_t batch, int64_t row) {
    if (!p.padded_offsets) {
      ScaleLayout const layout = ScaleLayout::of(p.scale_rows(), p.scale_blocks());
      return {p.scales + batch * layout.bytes(), layout, 0};
    }
    int64_t start = 0;
    for (int64_t g = 0; g < p.experts; ++g) {
      int64_t const end = p.padded_offsets[g];
      if (row < end) {
        return {p.scales + discrete_column_base(start, p.columns, p.block),
                ScaleLayout::of(p.columns, (end - start) / p.block), start};
      }
      start = end;
    }
    return {nullptr, {}, 0};  // past the last expert
  }
};

template <class Format>
inline uint32_t scale_byte(QuantizeProblem const& p, uint32_t amax_bits, float norm) {
  float const v = scale_value(bits_float(amax_bits), Format::kReciprocal, norm);
  return p.scale_dtype == DType::float8_e8m0fnu ? encode_e8m0_up(v) : encode_e4m3(v);
}
inline float scale_factor(QuantizeProblem const& p, uint32_t byte, float norm) {
  return p.scale_dtype == DType::float8_e8m0fnu ? e8m0_factor(byte, norm) : e4m3_factor(byte, norm);
}

template <class Format>
inline void quantise_rows(QuantizeProblem const& p, int64_t begin, int64_t end) {
  float const norm = p.norm_const ? *p.norm_const : 1.f;
  int const block = int(p.block);
  for (int64_t line = begin; line < end; ++line) {
    int64_t const batch = line / p.rows, row = line % p.rows;
    ScaleBand const scales = ScaleBand::of(p, batch, row);
    for (int64_t column = 0; column < p.columns; column += block) {
      int const count = int(p.columns - column < block ? p.columns - column : block);
      float x[32];
      load_run(p.x_dtype, p.x, line * p.columns + column, x, count);
      uint32_t amax = 0;
      for (int i = 0; i < count; ++i) amax = amax > magnitude_bits(x[i]) ? amax : magnitude_bits(x[i]);
      uint32_t const byte = scale_byte<Format>(p, amax, norm);
      float const factor = scale_factor(p, byte, norm);
      scales.base[scales.layout.at(row, column / block)] = uint8_t(byte);
      int64_t const at = line * p.columns + column;
      uint8_t* data = static_cast<uint8_t*>(p.data);
      if (is_fp4(p)) {
        for (int i = 0; i < count; i += 2) {
          data[(at + i) / 2] = uint8_t(Format::encode(x[i] * factor) | Format::encode(x[i + 1] * factor) << 4);
        }
      } else {
        for (int i = 0; i < count; ++i) data[at + i] = uint8_t(Format::encode(x[i] * factor));
      }
    }
  }
}

// Lines are blocks of rows here.
template <class Format>
inline void quantise_columns(QuantizeProblem const& p, int64_t begin, int64_t end) {
  float const norm = p.norm_const ? *p.norm_const : 1.f;
  int64_t const bands = ceil_div(p.rows, p.block);
  for (int64_t line = begin; line < end; ++line) {
    int64_t const batch = line / bands, row = line % bands * p.block;
    ScaleBand const scales = ScaleBand::of(p, batch, row);
    if (!scales.base) continue;
    int const rows = int(p.rows - row < p.block ? p.rows - row : p.block);
    for (int64_t column = 0; column < p.columns; column += kStrip) {
      int const count = int(p.columns - column < kStrip ? p.columns - column : kStrip);
      alignas(64) float x[32][kStrip], factor[kStrip];
      alignas(64) uint32_t amax[kStrip] = {};
      for (int r = 0; r < rows; ++r) {
        load_run(p.x_dtype, p.x, (batch * p.rows + row + r) * p.columns + column, x[r], count);
        for (int i = 0; i < count; ++i) amax[i] = amax[i] > magnitude_bits(x[r][i]) ? amax[i] : magnitude_bits(x[r][i]);
      }
      for (int i = 0; i < count; ++i) {
        uint32_t const byte = scale_byte<Format>(p, amax[i], norm);
        factor[i] = scale_factor(p, byte, norm);
        scales.base[scales.layout.at(column + i, (row - scales.first_row) / p.block)] = uint8_t(byte);
      }
      uint8_t* data = static_cast<uint8_t*>(p.data);
      for (int r = 0; r < rows; ++r) {
        if (is_fp4(p)) {  // transposed: pairs lie along the rows of x
          if (r % 2) continue;
          for (int i = 0; i < count; ++i) {
            int64_t const at = (batch * p.columns + column + i) * p.rows + row + r;
            data[at / 2] = uint8_t(Format::encode(x[r][i] * factor[i]) | Format::encode(x[r + 1][i] * factor[i]) << 4);
          }
        } else {
          uint8_t* out = data + (batch * p.rows + row + r) * p.columns + column;
          for (int i = 0; i < count; ++i) out[i] = uint8_t(Format::encode(x[r][i] * factor[i]));
        }
      }
    }
  }
}

inline void quantise(QuantizeProblem const& p, int64_t begin, int64_t end) {
  auto run = [&](auto format) {
    using Format = decltype(format);
    p.by_column ? quantise_columns<Format>(p, begin, end) : quantise_rows<Format>(p, begin, end);
  };
  if (p.data_dtype == DType::float8_e4m3fn) return run(E4M3{});
  if (p.data_dtype == DType::float8_e5m2) return run(E5M2{});
  run(E2M1{});
}

// x = data * scale / norm, value by value; lines are rows of x.
inline void dequantise(QuantizeProblem const& p, int64_t begin, int64_t end) {
  float const norm = p.norm_const ? *p.norm_const : 1.f;
  for (int64_t line = begin; line < end; ++line) {
    int64_t const batch = line / p.rows, row = line % p.rows;
    ScaleBand const scales = ScaleBand::of(p, batch, p.by_column ? row : 0);
    uint8_t const* data = static_cast<uint8_t const*>(p.data);
    for (int64_t column = 0; column < p.columns; column += kStrip) {
      int const count = int(p.columns - column < kStrip ? p.columns - column : kStrip);
      float x[kStrip];
      for (int i = 0; i < count; ++i) {
        int64_t const c = column + i;
        int64_t const at = is_fp4(p) && p.by_column ? (batch * p.columns + c) * p.rows + row : line * p.columns + c;
        float const value = p.data_dtype == DType::float8_e4m3fn ? decode_e4m3(data[at])
                            : p.data_dtype == DType::float8_e5m2 ? decode_e5m2(data[at])
                                                                 : decode_e2m1(data[at / 2] >> (at % 2 * 4) & 15);
        float scale = 0.f;
        if (scales.base) {
          int64_t const position = p.by_column ? scales.layout.at(c, (row - scales.first_row) / p.block)
                                               : scales.layout.at(row, c / p.block);
          scale = decode_scale(p.scale_dtype, scales.base[position]);
        }
        x[i] = value * scale / norm;
      }
      if (!scales.base) {
        for (int i = 0; i < count; ++i) x[i] = 0.f;
      }
      store_run(p.x_dtype, p.x, line * p.columns + column, x, count);
    }
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

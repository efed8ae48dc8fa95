// product = A_tile * B_tile^T in FP32: operands are dequantised block by block (exactly: every product of a value and
// its scale fits FP32), never as a whole; the multiply is a register-blocked kernel in the compiler's vector types.
#pragma once

#include "../core/scale_layout.h"
#include "convert.h"
#include "kernels.h"

namespace cudnn_grouped::cpu {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16, kRegisterRows = 8;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8, kRegisterRows = 4;
#else
inline constexpr int kLanes = 4, kRegisterRows = 4;
#endif
inline constexpr int kPanel = 2 * kLanes;  // columns of B held in registers
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

inline DType storage_of(OperandFormat format) {
  switch (format) {
    case OperandFormat::bf16:
      return DType::bfloat16;
    case OperandFormat::e4m3:
      return DType::float8_e4m3fn;
    case OperandFormat::e5m2:
      return DType::float8_e5m2;
    default:
      return DType::float4_e2m1fn_x2;
  }
}

// count values of an operand, before their scales.
inline void load_operand_run(OperandFormat format, void const* base, int64_t at, float* out, int count) {
  if (format == OperandFormat::e2m1) return decode_fp4_run(base, at, out, count);
  load_run(storage_of(format), base, at, out, count);
}

// count values of one operand row from column k, times their scales. scales: the row's bytes by block.
inline void dequantise_row(GroupedGemm const& p, OperandFormat format, void const* base, uint8_t const* scales,
                           int64_t row, int64_t rows, int64_t k, int count, float* out) {
  int64_t const at = row * p.k + k;
  load_operand_run(format, base, at, out, count);
  if (format == OperandFormat::bf16) return;
  ScaleLayout const layout = ScaleLayout::of(rows, ceil_div(p.k, p.sf_vec_size));
  int const block = int(p.sf_vec_size);
  for (int begin = 0; begin < count; begin += block) {
    float const scale = decode_scale(p.scale_dtype, scales[layout.at(row, (k + begin) / block)]);
    int const end = begin + block < count ? begin + block : count;
    for (int i = begin; i < end; ++i) out[i] *= scale;
  }
}

inline void load_a(GroupedGemm const& p, Tile const& tile, int64_t k, int count, float* out) {
  for (int64_t r = 0; r < kTileRows; ++r) {
    dequantise_row(p, p.operands, p.a, p.sfa, tile.row + r, p.m, k, count, out + r * kDepth);
  }
}

struct ExpertWeights {
  void const* b;
  uint8_t const* sfb;
};
inline ExpertWeights weights_of(GroupedGemm const& p, int64_t expert) {
  int64_t const* pointers = p.b_list.empty() ? p.b_pointers : p.b_list.data();
  int64_t const* scale_pointers = p.sfb_list.empty() ? p.sfb_pointers : p.sfb_list.data();
  void const* b = pointers ? reinterpret_cast<void const*>(pointers[expert])
                           : static_cast<char const*>(p.b) + expert * p.b_expert_bytes;
  uint8_t const* sfb =
      scale_pointers ? reinterpret_cast<uint8_t const*>(scale_pointers[expert]) : p.sfb + expert * p.sfb_expert_bytes;
  return {b, sfb};
}

// The tile's rows of an N-major B, one k at a time: out[k][n] for n in [column, column + columns).
inline void load_n_major_panel(GroupedGemm const& p, ExpertWeights const& w, int64_t column, int columns, int64_t k,
                               int count, float* out) {
  ScaleLayout const layout = ScaleLayout::of(p.n, p.scaled_weights() ? ceil_div(p.k, p.sf_vec_size) : 1);
  DType const dtype = storage_of(p.weights);
  float scale[kPanel];
  for (int i = 0; i < kPanel; ++i) scale[i] = 1.f;
  for (int i = 0; i < count; ++i) {
    if (p.scaled_weights() && (i == 0 || (k + i) % p.sf_vec_size == 0)) {
      for (int j = 0; j < columns; ++j) {
        scale[j] = decode_scale(p.scale_dtype, w.sfb[layout.at(column + j, (k + i) / p.sf_vec_size)]);
      }
    }
    float* row = out + i * kPanel;
    load_run(dtype, w.b, (k + i) * p.n + column, row, columns);
    for (int j = 0; j < columns; ++j) row[j] *= scale[j];
    for (int j = columns; j < kPanel; ++j) row[j] = 0.f;
  }
}

// Panels of kPanel columns: out[panel][k][column in panel], zero past the last column.
inline void load_b(GroupedGemm const& p, Tile const& tile, int64_t k, int count, Scratch& scratch) {
  ExpertWeights const w = weights_of(p, tile.expert);
  for (int64_t first = 0; first < tile.columns; first += kPanel) {
    int const columns = int(tile.columns - first < kPanel ? tile.columns - first : kPanel);
    float* panel = scratch.b + first * kDepth;
    if (p.b_is_n_major) {
      load_n_major_panel(p, w, tile.column + first, columns, k, count, panel);
      continue;
    }
    for (int j = 0; j < kPanel; ++j) {
      float* row = scratch.b_rows + j * kDepth;
      if (j < columns) {
        dequantise_row(p, p.weights, w.b, w.sfb, tile.column + first + j, p.n, k, count, row);
      } else {
        for (int i = 0; i < count; ++i) row[i] = 0.f;
      }
    }
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < kPanel; ++j) panel[i * kPanel + j] = scratch.b_rows[j * kDepth + i];
    }
  }
}

inline Vector load_vector(float const* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// kRegisterRows rows of A times one panel of B, added to the product (or written, for the first block of K).
inline void multiply_registers(float const* a, float const* panel, int count, bool first, float* product) {
  Vector sum[kRegisterRows][2];
  for (int r = 0; r < kRegisterRows; ++r) {
    for (int v = 0; v < 2; ++v) {
      sum[r][v] = first ? Vector{} : load_vector(product + r * kTileColumns + v * kLanes);
    }
  }
  for (int i = 0; i < count; ++i) {
    Vector const b0 = load_vector(panel + i * kPanel), b1 = load_vector(panel + i * kPanel + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRegisterRows; ++r) {
      float const value = a[r * kDepth + i];
      sum[r][0] += value * b0;
      sum[r][1] += value * b1;
    }
  }
  for (int r = 0; r < kRegisterRows; ++r) {
    for (int v = 0; v < 2; ++v) __builtin_memcpy(product + r * kTileColumns + v * kLanes, &sum[r][v], sizeof(Vector));
  }
}

// dact: the GEMM's value is given.
inline void load_product(GroupedGemm const& p, Tile const& tile, Scratch& scratch) {
  for (int64_t r = 0; r < kTileRows; ++r) {
    load_run(p.a_dtype, p.a, (tile.row + r) * p.n + tile.column, scratch.product + r * kTileColumns, int(tile.columns));
  }
}

// The panels of B in scratch.b times `rows` rows of A in scratch.a, added to the product.
inline void multiply_panels(Scratch& scratch, int64_t rows, int64_t columns, int count, bool first) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    for (int64_t row = 0; row < rows; row += kRegisterRows) {
      multiply_registers(scratch.a + row * kDepth, scratch.b + column * kDepth, count, first,
                         scratch.product + row * kTileColumns + column);
    }
  }
}

inline void multiply_tile(GroupedGemm const& p, Tile const& tile, Scratch& scratch) {
  for (int64_t k = 0; k < p.k; k += kDepth) {
    int const count = int(p.k - k < kDepth ? p.k - k : kDepth);
    load_a(p, tile, k, count, scratch.a);
    load_b(p, tile, k, count, scratch);
    multiply_panels(scratch, kTileRows, tile.columns, count, k == 0);
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

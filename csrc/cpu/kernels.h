// The CPU engine's inner work, compiled once per instruction set, and the table through which the engine reaches it.
#pragma once

#include "../core/quantize_problem.h"
#include "../core/weight_gradient.h"

namespace cudnn_grouped::cpu {

// One tile of the grouped GEMM: 256 rows of one expert, up to 256 columns. An expert's rows are a multiple of 256.
inline constexpr int64_t kTileRows = kRowAlignment, kTileColumns = 256, kDepth = 256;

struct Tile {
  int64_t expert, expert_start, expert_rows;
  int64_t row, column, columns;
  int64_t row_tile, column_tile;
};

// One tile of an expert's weight gradient.
struct WeightTile {
  int64_t expert, start, tokens;
  int64_t row, rows, column, columns;
};

// Partial results that several tiles add to: one slot each, summed in a fixed order afterwards.
struct Partials {
  float* dprob;  // [m][dprob_slots], or null
  int64_t dprob_slots;
  float* dbias;  // [m / 128][d_columns], or null
  float* amax;   // [row tile][column tile][amax_width()], or null
  int64_t column_tiles;
};

// One thread's buffers.
struct Scratch {
  alignas(64) float product[kTileRows * kTileColumns];
  alignas(64) float a[kTileRows * kDepth];
  alignas(64) float b[kTileColumns * kDepth];
  alignas(64) float b_rows[64 * kDepth];
};

struct Kernels {
  void (*tile)(GroupedGemm const&, Tile const&, Partials const&, Scratch&);
  void (*weight_gradient_tile)(WeightGradient const&, WeightTile const&, Scratch&);
  // A strip of the quantiser: blocks [begin, end) of its outer loop (rows, or blocks of rows when by_column).
  void (*quantize)(QuantizeProblem const&, int64_t begin, int64_t end);
  void (*dequantize)(QuantizeProblem const&, int64_t begin, int64_t end);
};

// One per instruction set; see kernels.cc.
Kernels const& kernels();

}  // namespace cudnn_grouped::cpu

// The epilogue for every other pair of dtypes of C and D: values move between registers and global memory.
#pragma once

#include "epilogue.h"

namespace cudnn_grouped::sm90 {

template <class StepT>
struct Direct {
  using Step = StepT;
  static constexpr int kN = 128, kStages = 6, kBoxes = 0;
  static constexpr TileOrder kOrder{8, false};
  static constexpr bool kInterleaved = false;
  static constexpr int kWidth = Step::kWidth, kChunk = Step::kAccUnits * kUnit;

  CG_DEVICE void run(KernelArguments<typename Step::Activation> const& args, Tile const& tile, Accumulators<kN>& acc,
                     Boxes<kBoxes>&, int warp, int lane) {
    Params const& p = args.p;
    Scalars<Step> const scalars(p, tile.expert);
    TileSums<Step, kInterleaved> sums(p, tile, warp, lane);
    float* const slot = ColumnSums<Step>::slot(p, sums.rows.tile() + warp * kSlotRows, lane);
    int64_t const c_columns = Step::kForward ? p.n : int64_t(p.n) * kWidth;
    int64_t const d_columns = Step::kForward ? p.n / kWidth : int64_t(p.n) * kWidth;
#pragma unroll 1
    for (int first = tile.n; first < min(tile.n + kN, p.n); first += 64, acc.next_columns()) {
#pragma unroll
      for (int chunk = 0; chunk < 64 / kChunk; ++chunk) {
#pragma unroll
        for (int g = 0; g < Step::kGroups; ++g) {
          ColumnSums<Step> column_sums;
#pragma unroll
          for (int j = 0; j < kUnit / 8; ++j) {
            int const n = first + (chunk * Step::kAccUnits + g * Step::kInputs) * kUnit + j * 8 + lane % 4 * 2;
            int const c_column = Step::kForward ? n : n / kUnit * kUnit * kWidth + n % kUnit;
            int const d_column = Step::kForward ? n / (kUnit * kWidth) * kUnit + n % kUnit : c_column;
            bool const inside = n < p.n;
            float bias[2][Step::kInputs] = {}, d[4][Step::kOutputs][2] = {};
            float2 c[4][kWidth] = {};
            if (inside && p.bias) load_bias<Step>(p, tile.expert, n, bias);
            if (!Step::kForward && inside) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int w = 0; w < kWidth; ++w) {
                  c[i][w] = load_pair(p.c_dtype, p.c_data, sums.rows.at(i) * c_columns + c_column + w * kUnit);
                }
              }
            }
#pragma unroll
            for (int i = 0; i < 4 && inside; ++i) {
              float x[2][kWidth], in[2][Step::kInputs];
#pragma unroll
              for (int w = 0; w < Step::kInputs; ++w) {
                int const group = (chunk * Step::kAccUnits + g * Step::kInputs + w) * 4 + j;
                in[0][w] = acc.at(i / 2, i % 2, group, 0), in[1][w] = acc.at(i / 2, i % 2, group, 1);
              }
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float out[Step::kOutputs];
#pragma unroll
                for (int w = 0; w < kWidth; ++w) x[e][w] = e ? c[i][w].y : c[i][w].x;
                apply<Step, true>(args, scalars, in[e], bias[e], sums.prob[i], x[e], out, sums.dprob[i]);
#pragma unroll
                for (int w = 0; w < Step::kOutputs; ++w) d[i][w][e] = out[w];
              }
#pragma unroll
              for (int w = 0; w < kWidth; ++w) c[i][w] = {x[0][w], x[1][w]};
            }
            after_activation(p, sums, d);
            if (!Step::kForward && p.dbias) {
              column_sums.add(j, lane, d);
              if (column_sums.complete(j)) {
                int const at = d_column - lane % 4 * 2 - j % ColumnSums<Step>::kGroups * 8;
                column_sums.store(slot + at, lane, at + ColumnSums<Step>::column(lane) < d_columns);
              }
            }
            if (!inside) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              int64_t const row = sums.rows.at(i);
#pragma unroll
              for (int w = 0; w < Step::kOutputs; ++w) {
                int64_t const at = row * d_columns + d_column + w * kUnit;
                store_pair(p.d_dtype, p.d_data, at, d[i][w][0], d[i][w][1]);
                if (p.d_col_data) store_pair(p.d_dtype, p.d_col_data, at, d[i][w][0], d[i][w][1]);
              }
#pragma unroll
              for (int w = 0; w < kWidth; ++w) {
                if (Step::kForward && p.c_data) {
                  store_pair(p.c_dtype, p.c_data, row * c_columns + c_column + w * kUnit, c[i][w].x, c[i][w].y);
                }
              }
            }
          }
        }
      }
    }
    sums.write(p, tile, warp, lane);
  }
};

}  // namespace cudnn_grouped::sm90

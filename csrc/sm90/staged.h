// The epilogue with BF16 C and D: both move by TMA, through boxes of shared memory.
#pragma once

#include "epilogue.h"

namespace cudnn_grouped::sm90 {

template <class StepT, Extras kExtras>
struct Staged {
  using Step = StepT;
  static constexpr int kN = 192, kStages = 4, kBoxes = 2;
  static constexpr TileOrder kOrder{12, true};
  static constexpr bool kInterleaved = false, kLoadsC = !Step::kForward;
  static constexpr int kWidth = Step::kWidth, kChunk = Step::kAccUnits * kUnit;
  static constexpr int kDRow = Step::kDUnits * kUnit * 2;  // bytes of a box's row of D

  // The forward fills a box with the C to be saved, where it is wanted, and a box with D.
  CG_DEVICE bool two_boxes(Params const& p) { return Step::kForward && p.c_data; }
  CG_DEVICE void store(Params const& p, bool is_c, int column, int row, uint32_t box) {
    if (Step::kForward && is_c) return ptx::store_once(&p.c, box, column, row);
    ptx::store_once(&p.d, box, Step::kForward ? column / kWidth : column * kWidth, row);
  }

  CG_DEVICE void run(KernelArguments<typename Step::Activation> const& args, Tile const& tile, Accumulators<kN>& acc,
                     Boxes<kBoxes>& boxes, int warp, int lane) {
    Params const& p = args.p;
    Scalars<Step> const scalars(p, tile.expert);
    TileSums<Step, kInterleaved> sums(p, tile, warp, lane);
    constexpr bool kMayHaveDbias = !Step::kForward && kExtras != Extras::none;
    bool const has_dbias = kMayHaveDbias && (kExtras == Extras::dbias || p.dbias);
    float* const slot = kMayHaveDbias ? ColumnSums<Step>::slot(p, sums.rows.tile() + warp * kSlotRows, lane) : nullptr;
    // Lane l gives the address of row l % 8 of the 8x8 matrix l / 8: this warp's row group of that number.
    int const matrix = lane / 8, row = (matrix / 2) * 64 + warp * 16 + matrix % 2 * 8 + lane % 8;
    uint32_t const at_c = row * kSwizzledRow + (row % 8 << 4);
    uint32_t const at_d = kDRow == kSwizzledRow ? at_c : row * kDRow + (row / 2 % 4 << 4);
#pragma unroll 1
    for (int first = tile.n; first < min(tile.n + kN, p.n); first += 64, acc.next_columns()) {
#pragma unroll
      for (int chunk = 0; chunk < 64 / kChunk; ++chunk) {
        int const n = first + chunk * kChunk;
        if (n >= p.n) continue;
        uint32_t const c_box = boxes.box();
        boxes.wait();
        if (two_boxes(p)) {
          boxes.advance();
          boxes.wait();
        }
        uint32_t const d_box = boxes.box();
        float* slot_of_chunk = slot + n * kWidth;
        if (kMayHaveDbias) ptx::keep(slot_of_chunk);
#pragma unroll
        for (int g = 0; g < Step::kGroups; ++g) {
#pragma unroll
          for (int first_j = 0; first_j < kUnit / 8; first_j += ColumnSums<Step>::kGroups) {
            ColumnSums<Step> column_sums;
#pragma unroll
            for (int j = first_j; j < first_j + ColumnSums<Step>::kGroups; ++j) {
              int const column = n + g * (Step::kAccUnits / Step::kGroups) * kUnit + j * 8;
              // Never true, which the compiler does not know: see quantised.h.
              if (Step::kForward && ptx::hidden(n) >= p.n) return;
              if (kWidth == 1 && column >= p.n) continue;
              float bias[2][Step::kInputs] = {}, d[4][Step::kOutputs][2];
              if (kExtras == Extras::all && Step::kHasBias && p.bias)
                load_bias<Step>(p, tile.expert, column + lane % 4 * 2, bias);
              uint32_t c[kWidth][4];
              if (!Step::kForward) {
#pragma unroll
                for (int w = 0; w < kWidth; ++w) {
                  ptx::load_matrices((c_box + at_c) ^ ((g * kWidth + w) * 4 + j) << 4, c[w]);
                }
              }
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                float x[2][kWidth];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  float in[Step::kInputs], out[Step::kOutputs];
#pragma unroll
                  for (int w = 0; w < Step::kInputs; ++w) {
                    int const unit = chunk * Step::kAccUnits + g * Step::kInputs + w;
                    in[w] = acc.at(i / 2, i % 2, unit * 4 + j, e);
                  }
#pragma unroll
                  for (int w = 0; w < kWidth; ++w) x[e][w] = e ? ptx::high_bf16(c[w][i]) : ptx::low_bf16(c[w][i]);
                  apply<Step, kExtras == Extras::all>(args, scalars, in, bias[e], sums.prob[i], x[e], out,
                                                      sums.dprob[i]);
#pragma unroll
                  for (int w = 0; w < Step::kOutputs; ++w) d[i][w][e] = out[w];
                }
#pragma unroll
                for (int w = 0; w < kWidth && Step::kForward; ++w) c[w][i] = ptx::pack_bf16(x[0][w], x[1][w]);
              }
              if constexpr (kExtras == Extras::all) after_activation(p, sums, d);
              if (has_dbias) column_sums.add(j - first_j, lane, d);
#pragma unroll
              for (int w = 0; w < Step::kOutputs; ++w) {
                uint32_t packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) packed[i] = ptx::pack_bf16(d[i][w][0], d[i][w][1]);
                ptx::store_matrices((d_box + at_d) ^ ((g * Step::kOutputs + w) * 4 + j) << 4, packed);
              }
              if (two_boxes(p)) {
#pragma unroll
                for (int w = 0; w < kWidth; ++w) {
                  ptx::store_matrices((c_box + at_c) ^ ((g * kWidth + w) * 4 + j) << 4, c[w]);
                }
              }
            }
            if (has_dbias) {
              int const at = g * Step::kOutputs * kUnit + first_j * 8;
              bool const inside = kWidth == 2 || n + at + ColumnSums<Step>::column(lane) < p.n;
              column_sums.store(slot_of_chunk + at, lane, inside);
            }
          }
        }
        if (two_boxes(p)) boxes.other().hand_over(lane);
        boxes.hand_over(lane);
        boxes.advance();
      }
    }
    sums.template write<kExtras == Extras::all>(p, tile, warp, lane);
  }
};

}  // namespace cudnn_grouped::sm90

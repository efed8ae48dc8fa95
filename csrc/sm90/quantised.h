// The epilogue with FP8 D: every 32 values along rows and along columns share a scale factor (decisions.md, "Block
// quantiser"). The rows of a tile of A and of B lie permuted in shared memory, so that a warp holds 32 adjacent rows
// and a thread 8 adjacent columns of each unit: element (j, e) of its accumulators is column 8 (lane % 4) + 2 j + e.
#pragma once

#include "../core/block_quantize.h"
#include "../cuda/scale_places.h"
#include "epilogue.h"

namespace cudnn_grouped::sm90 {

// One 32 x 32 block of D a unit, in registers: value[row][unit][column].
template <int kUnits>
struct Block {
  float value[4][kUnits][8];
};

// A warp's rows of D overwrite its own rows of C: the row form, then the column form.
inline constexpr int kWarpBoxBytes = kBoxBytes / 4, kFormBytes = kWarpBoxBytes / 2;

// Four floats, or eight values of BF16, in shared memory.
CG_DEVICE void load_floats(uint32_t from, float (&v)[8], int first) {
  uint4 const word = ptx::load_shared_16(from);
  v[first] = __uint_as_float(word.x), v[first + 1] = __uint_as_float(word.y);
  v[first + 2] = __uint_as_float(word.z), v[first + 3] = __uint_as_float(word.w);
}
CG_DEVICE void load_bf16(uint32_t from, float (&v)[8]) {
  uint4 const pairs = ptx::load_shared_16(from);
  v[0] = ptx::low_bf16(pairs.x), v[1] = ptx::high_bf16(pairs.x), v[2] = ptx::low_bf16(pairs.y);
  v[3] = ptx::high_bf16(pairs.y), v[4] = ptx::low_bf16(pairs.z), v[5] = ptx::high_bf16(pairs.z);
  v[6] = ptx::low_bf16(pairs.w), v[7] = ptx::high_bf16(pairs.w);
}

// Quantises the warp's 32 rows, columns of D from `column` on, and writes both forms to shared memory:
// rows of kUnits * 32 bytes, the row form at `out`, the column form kFormBytes behind.
template <int kUnits, bool kE4M3>
CG_DEVICE void quantise_block(Params const& p, cuda::ScalePlaces const& places, Block<kUnits> const& d, int columns,
                              int column, float norm, uint32_t out, int lane) {
  int const q = lane % 4, r = lane / 4;
  float by_row[4 * kUnits], by_column[kUnits * 8];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float m = ptx::max_magnitude(d.value[i][u][0], d.value[i][u][1]);
#pragma unroll
      for (int c = 2; c < 8; ++c) m = ptx::max_magnitude(m, d.value[i][u][c]);
      by_row[i * kUnits + u] = m;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      by_column[u * 8 + c] = ptx::max_magnitude(ptx::max_magnitude(d.value[0][u][c], d.value[1][u][c]),
                                                ptx::max_magnitude(d.value[2][u][c], d.value[3][u][c]));
    }
  }
  // This thread's share: row 8 q + r in all units, and kUnits adjacent columns.
  auto const larger = [](float x, float y) { return ptx::max_magnitude(x, y); };
  scatter<2, 1>(by_row, lane, larger);
  scatter<16, 4>(by_column, lane, larger);
  constexpr float kReciprocal = kE4M3 ? E4M3::kReciprocal : E5M2::kReciprocal;
  int const share_unit = kUnits == 2 ? r / 4 : 0;
  int const share_column = share_unit * kUnit + q * 8 + (kUnits == 2 ? r % 4 * 2 : r);
  int const share_row = q * 8 + r;
  uint8_t* const row_scales = p.sfd_row + places.of_row(column / kUnit);
  uint8_t* const column_scales = p.sfd_col + places.of_column(column + share_column);
  float row_factor[kUnits], column_factor[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t const row_byte = encode_e8m0_up(scale_value(by_row[u], kReciprocal, norm));
    uint32_t const column_byte = encode_e8m0_up(scale_value(by_column[u], kReciprocal, norm));
    row_factor[u] = e8m0_factor(row_byte, norm);
    column_factor[u] = e8m0_factor(column_byte, norm);
    if (column + u * kUnit < columns) row_scales[u] = uint8_t(row_byte);
    // Adjacent columns of a 32-row group are 16 bytes apart.
    if (column + share_column + u < columns && places.inside()) column_scales[u * 16] = uint8_t(column_byte);
  }
  // Every thread needs the factors of its four rows and of its columns: they pass through the box.
  __syncwarp();
  uint32_t const row_factors = out + kUnits * kUnit * 4;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    ptx::store_shared_4(out + (share_column + u) * 4, __float_as_uint(column_factor[u]));
    ptx::store_shared_4(row_factors + (share_row * kUnits + u) * 4, __float_as_uint(row_factor[u]));
  }
  __syncwarp();
  float of_column[kUnits][8], of_row[4][kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_floats(out + (u * kUnit + q * 8 + half * 4) * 4, of_column[u], half * 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of_row[i][u] = __uint_as_float(ptx::load_shared_4(row_factors + ((i * 8 + r) * kUnits + u) * 4));
  }
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const line = i * 8 + r;
      // 64-byte rows are in the 64-byte swizzle, 32-byte rows in none.
      uint32_t const at = kUnits == 2 ? out + line * 64 + (((u * 2 + q / 2) ^ (line / 2 % 4)) << 4) + q % 2 * 8
                                      : out + line * 32 + q * 8;
      float const(&v)[8] = d.value[i][u], f = of_row[i][u];
      float const(&g)[8] = of_column[u];
      ptx::store_shared_8(at, ptx::pack_fp8<kE4M3>(v[0] * f, v[1] * f, v[2] * f, v[3] * f),
                          ptx::pack_fp8<kE4M3>(v[4] * f, v[5] * f, v[6] * f, v[7] * f));
      ptx::store_shared_8(at + kFormBytes, ptx::pack_fp8<kE4M3>(v[0] * g[0], v[1] * g[1], v[2] * g[2], v[3] * g[3]),
                          ptx::pack_fp8<kE4M3>(v[4] * g[4], v[5] * g[5], v[6] * g[6], v[7] * g[7]));
    }
  }
}

// Zeroes a thread's accumulators of a chunk's columns from `columns` on.
template <int kN>
CG_DEVICE void clear_past(int columns, Accumulators<kN>& acc, int q) {
#pragma unroll
  for (int v = 0; v < 64; ++v) {
    if (v / 32 * kUnit + q * 8 >= columns) acc.at(v / 16 % 2, v / 8 % 2, v / 32 * 4 + v / 2 % 4, v % 2) = 0.f;
  }
}

// kStagedC: C is BF16 and comes by TMA through the box that D leaves in; else it moves between registers and memory.
template <class StepT, bool kStagedC, bool kE4M3, Extras kExtras>
struct Quantised {
  using Step = StepT;
  static constexpr int kN = 128, kStages = 5, kBoxes = 2;
  static constexpr TileOrder kOrder{8, false};
  static constexpr bool kInterleaved = true, kLoadsC = kStagedC;
  static constexpr int kWidth = Step::kWidth, kChunk = Step::kAccUnits * kUnit, kUnits = Step::kDUnits;
  static constexpr bool kAll = kExtras == Extras::all;
  static_assert(!(Step::kForward && kStagedC));

  CG_DEVICE bool two_boxes(Params const&) { return false; }
  CG_DEVICE void store(Params const& p, bool, int column, int row, uint32_t box) {
    int const x = Step::kForward ? column / kWidth : column * kWidth;
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {
      ptx::store_once(&p.d, box + warp * kWarpBoxBytes, x, row + warp * 32);
      ptx::store_once(&p.d_col, box + warp * kWarpBoxBytes + kFormBytes, x, row + warp * 32);
    }
  }

  CG_DEVICE void run(KernelArguments<typename Step::Activation> const& args, Tile const& tile, Accumulators<kN>& acc,
                     Boxes<kBoxes>& boxes, int warp, int lane) {
    Params const& p = args.p;
    Scalars<Step> const scalars(p, tile.expert);
    TileSums<Step, kInterleaved> sums(p, tile, warp, lane);
    int64_t const c_columns = Step::kForward ? p.n : int64_t(p.n) * kWidth;
    int const d_columns = Step::kForward ? p.n / kWidth : p.n * kWidth;
    int const first_row = tile.m + warp * 32;
    cuda::ScalePlaces const places(p.experts, p.discrete_col_sfd, tile.expert, d_columns, first_row,
                                   first_row + lane % 4 * 8 + lane / 4);
    float const norm = p.norm_const ? __ldg(p.norm_const) : 1.f;
    int const q = lane % 4, r = lane / 4;
#pragma unroll 1
    for (int first_n = tile.n; first_n < min(tile.n + kN, p.n); first_n += 64, acc.next_columns()) {
#pragma unroll
      for (int chunk = 0; chunk < 64 / kChunk; ++chunk) {
        int const n = first_n + chunk * kChunk;
        if (n >= p.n) continue;
        boxes.wait();
        uint32_t const out = boxes.box() + warp * kWarpBoxBytes;
        // Columns past N are whole groups of 16; their values are made zero.
        if (kWidth == 1 && n + kChunk > p.n) clear_past(p.n - n, acc, q);
        Block<kUnits> d;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Never true, which the compiler does not know: it would load C of all rows at once, and run out of
          // registers.
          if (ptx::hidden(n) >= p.n) return;
#pragma unroll
          for (int g = 0; g < Step::kGroups; ++g) {
            int const first = n + g * Step::kInputs * kUnit + q * 8;
            bool const inside = kWidth == 2 || first < p.n;
            Scalars<Step> const of_columns = scalars.only_if(inside);
            float const prob = inside ? sums.prob[i] : 0.f;
            float c[kWidth][8];
            int64_t const c_at =
                sums.rows.at(i) * c_columns + (Step::kForward ? first : (n + g * kUnit) * kWidth + q * 8);
            if constexpr (!Step::kForward) {
#pragma unroll
              for (int w = 0; w < kWidth; ++w) {
                if constexpr (kStagedC) {
                  uint32_t const unit = ((g * kWidth + w) * 4 + q) ^ (r % 8);
                  load_bf16(out + (i * 8 + r) * kSwizzledRow + (unit << 4), c[w]);
                } else {
#pragma unroll
                  for (int e = 0; e < 8; e += 2) {
                    float2 const v = inside ? load_pair(p.c_dtype, p.c_data, c_at + w * kUnit + e) : float2{0.f, 0.f};
                    c[w][e] = v.x, c[w][e + 1] = v.y;
                  }
                }
              }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              float bias[2][Step::kInputs] = {};
              if (kAll && Step::kHasBias && p.bias && inside) load_bias<Step>(p, tile.expert, first + 2 * j, bias);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float in[Step::kInputs], x[kWidth], values[Step::kOutputs];
#pragma unroll
                for (int w = 0; w < Step::kInputs; ++w) {
                  in[w] = acc.at(i / 2, i % 2, (chunk * Step::kAccUnits + g * Step::kInputs + w) * 4 + j, e);
                }
#pragma unroll
                for (int w = 0; w < kWidth && !Step::kForward; ++w) x[w] = c[w][2 * j + e];
                apply<Step, kAll>(args, of_columns, in, bias[e], prob, x, values, sums.dprob[i]);
#pragma unroll
                for (int w = 0; w < Step::kOutputs; ++w) {
                  d.value[i][g * Step::kOutputs + w][2 * j + e] = values[w];
                }
#pragma unroll
                for (int w = 0; w < kWidth && Step::kForward; ++w) c[w][2 * j + e] = x[w];
              }
            }
            if (Step::kForward && p.c_data && inside) {
#pragma unroll
              for (int w = 0; w < kWidth; ++w) {
#pragma unroll
                for (int e = 0; e < 8; e += 2)
                  store_pair(p.c_dtype, p.c_data, c_at + w * kUnit + e, c[w][e], c[w][e + 1]);
              }
            }
          }
        }
        int const d_column = Step::kForward ? n / kWidth : n * kWidth;
        if (kAll && !Step::kForward && p.epilogue_op != EpilogueOp::identity) {
#pragma unroll
          for (int v = 0; v < 4 * kUnits * 8; ++v) {
            float& value = d.value[v / (kUnits * 8)][v / 8 % kUnits][v % 8];
            value = apply_epilogue_op(p.epilogue_op, value);
          }
        }
        if (kAll && p.amax) {
#pragma unroll
          for (int v = 0; v < 4 * kUnits * 8; ++v) {
            int const unit = v / 8 % kUnits;
            float& amax = sums.amax[Step::kForward ? 0 : unit % kWidth];
            amax = ptx::max_magnitude(amax, d.value[v / (kUnits * 8)][unit][v % 8]);
          }
        }
        if (!Step::kForward && (kExtras == Extras::dbias || kAll && p.dbias)) {
          uint32_t const slot =
              uint32_t(tile.m / kSlotRows + warp) * uint32_t(d_columns) + uint32_t(d_column + q * 8 + r);
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            float sum[8];
#pragma unroll
            for (int c = 0; c < 8; ++c)
              sum[c] = (d.value[0][u][c] + d.value[1][u][c]) + (d.value[2][u][c] + d.value[3][u][c]);
            scatter<16, 4>(sum, lane, Sum{});  // this lane's: column r of the eight
            ptx::store_if(d_column + u * kUnit + q * 8 < d_columns, p.dbias + (slot + u * kUnit), sum[0]);
          }
        }
        quantise_block<kUnits, kE4M3>(p, places, d, d_columns, d_column, norm, out, lane);
        boxes.hand_over(lane);
        boxes.advance();
      }
    }
    sums.template write<kAll>(p, tile, warp, lane);
  }
};

}  // namespace cudnn_grouped::sm90

// The epilogue with FP8 D in tiles of 192 columns, the backward's alone: D in E4M3, C in BF16. Accumulators leave 48
// registers, so a unit of 32 columns is quantised at a time; of a gated pair, the second unit's values wait where the
// pair's C was. Layouts are those of quantised.h, whose epilogue takes less time for a column: a tile of 192 has to
// gain more than that.
#pragma once

#include "quantised.h"

namespace cudnn_grouped::sm90 {

// What a warp needs of its tile now and then, in kNoteBytes of shared memory: accumulators take its registers.
// Bytes: 0, prob of 32 rows; 128, the tile; 144, a free word, where its column scale factors lie, another free word.
struct Notes {
  uint32_t at;

  __device__ __forceinline__ void write(Tile const& tile, float const (&prob)[4], cuda::ScalePlaces const& places,
                                        int lane) const {
    __syncwarp();  // all lanes have read the last tile's
    if (lane == 0) ptx::store_shared_16(at + 144, 0, places.column, places.column_atoms, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (lane % 4 == i) ptx::store_shared_4(at + (i * 8 + lane / 4) * 4, __float_as_uint(prob[i]));
    }
    if (lane == 0) ptx::store_shared_16(at + 128, tile.m, tile.n, tile.n_tile, tile.expert);
    __syncwarp();
  }
  // Of the thread's row i.
  __device__ __forceinline__ float prob(int i, int lane) const {
    return __uint_as_float(ptx::load_shared_4(at + (i * 8 + lane / 4) * 4));
  }
  __device__ __forceinline__ int m() const { return int(ptx::load_shared_4(at + 128)); }
  // But for n, which nobody asks for.
  __device__ __forceinline__ Tile tile() const {
    return {m(), 0, int(ptx::load_shared_4(at + 136)), int(ptx::load_shared_4(at + 140))};
  }
  __device__ __forceinline__ cuda::ScalePlaces places(uint32_t row) const {
    return {row, ptx::load_shared_4(at + 148), ptx::load_shared_4(at + 152)};
  }
};

// A thread's part of a unit of D, 32 x 32: value[i][c] is row 8 i + lane / 4, column 8 (lane % 4) + c.
struct Unit {
  float value[4][8];
};
struct UnitCodes {
  uint2 by_row[4], by_column[4];
};

// Quantises the unit whose columns begin at `column`, of a D of `columns`, and writes its scale factors.
CG_DEVICE UnitCodes quantise_unit(Params const& p, cuda::ScalePlaces const& places, Unit const& d, int columns,
                                  int column, float norm, int lane) {
  int const q = lane % 4, r = lane / 4;
  float by_row[4], by_column[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    by_row[i] = ptx::max_magnitude(d.value[i][0], d.value[i][1]);
#pragma unroll
    for (int c = 2; c < 8; ++c) by_row[i] = ptx::max_magnitude(by_row[i], d.value[i][c]);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    by_column[c] = ptx::max_magnitude(ptx::max_magnitude(d.value[0][c], d.value[1][c]),
                                      ptx::max_magnitude(d.value[2][c], d.value[3][c]));
  }
  // This thread's share: row 8 q + r and column 8 q + r.
  auto const larger = [](float x, float y) { return ptx::max_magnitude(x, y); };
  scatter<2, 1>(by_row, lane, larger);
  scatter<16, 4>(by_column, lane, larger);
  constexpr float kReciprocal = E4M3::kReciprocal;
  uint32_t const row_byte = encode_e8m0_up(scale_value(by_row[0], kReciprocal, norm));
  uint32_t const column_byte = encode_e8m0_up(scale_value(by_column[0], kReciprocal, norm));
  int const share = column + q * 8 + r;
  if (column < columns) p.sfd_row[places.of_row(column / kUnit)] = uint8_t(row_byte);
  if (share < columns && places.inside()) p.sfd_col[places.of_column(share)] = uint8_t(column_byte);
  float const row_factor = e8m0_factor(row_byte, norm), column_factor = e8m0_factor(column_byte, norm);
  UnitCodes codes;
  float g[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) g[c] = __shfl_sync(~0u, column_factor, c * 4 + q);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const(&v)[8] = d.value[i], f = __shfl_sync(~0u, row_factor, i, 4);
    codes.by_row[i] = {ptx::pack_fp8<true>(v[0] * f, v[1] * f, v[2] * f, v[3] * f),
                       ptx::pack_fp8<true>(v[4] * f, v[5] * f, v[6] * f, v[7] * f)};
    codes.by_column[i] = {ptx::pack_fp8<true>(v[0] * g[0], v[1] * g[1], v[2] * g[2], v[3] * g[3]),
                          ptx::pack_fp8<true>(v[4] * g[4], v[5] * g[5], v[6] * g[6], v[7] * g[7])};
  }
  return codes;
}

// Both forms of unit u of two.
CG_DEVICE void store_codes(UnitCodes const& codes, int u, uint32_t out, int lane) {
  int const q = lane % 4, r = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int const line = i * 8 + r;
    // 64-byte rows, in the 64-byte swizzle.
    uint32_t const at = out + line * 64 + (((u * 2 + q / 2) ^ (line / 2 % 4)) << 4) + q % 2 * 8;
    ptx::store_shared_8(at, codes.by_row[i].x, codes.by_row[i].y);
    ptx::store_shared_8(at + kFormBytes, codes.by_column[i].x, codes.by_column[i].y);
  }
}

template <class StepT, Extras kExtras>
struct QuantisedWide : Quantised<StepT, true, true, kExtras> {
  using Step = StepT;
  static_assert(!Step::kForward && kExtras != Extras::all);
  static constexpr int kN = 192, kStages = 4, kBoxes = 2, kWidth = Step::kWidth, kChunk = Step::kAccUnits * kUnit;
  static constexpr TileOrder kOrder{12, true};

  // A thread's eight values of C in its row i of a unit: 16 bytes.
  CG_DEVICE uint32_t place_of_c(uint32_t out, int i, int unit, int lane) {
    int const q = lane % 4, r = lane / 4;
    return out + (i * 8 + r) * kSwizzledRow + (((unit * 4 + q) ^ r) << 4);
  }

  CG_DEVICE void run(KernelArguments<typename Step::Activation> const& args, Tile const& tile, Accumulators<kN>& acc,
                     Boxes<kBoxes>& boxes, int warp, int lane) {
    Params const& p = args.p;
    Scalars<Step> const scalars(p, tile.expert);
    TileSums<Step, true> sums(p, tile, warp, lane);
    int const d_columns = p.n * kWidth, first_row = tile.m + warp * 32;
    cuda::ScalePlaces const places(p.experts, p.discrete_col_sfd, tile.expert, d_columns, first_row,
                                   first_row + lane % 4 * 8 + lane / 4);
    float const norm = p.norm_const ? __ldg(p.norm_const) : 1.f;
    int const q = lane % 4, r = lane / 4;
    Notes const notes{boxes.notes(warp)};
    notes.write(tile, sums.prob, places, lane);
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
        UnitCodes codes;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          Unit d;
          if (u < Step::kGroups) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              // Never true: see quantised.h.
              if (ptx::hidden(n) >= p.n) return;
              bool const inside = kWidth == 2 || n + u * kUnit + q * 8 < p.n;
              Scalars<Step> const of_columns = scalars.only_if(inside);
              float const prob = inside ? notes.prob(i, lane) : 0.f;
              float c[kWidth][8], second[8];
#pragma unroll
              for (int w = 0; w < kWidth; ++w) load_bf16(place_of_c(out, i, u * kWidth + w, lane), c[w]);
#pragma unroll
              for (int v = 0; v < 8; ++v) {
                float const in[1] = {acc.at(i / 2, i % 2, (chunk * Step::kAccUnits + u) * 4 + v / 2, v % 2)};
                float const bias[1] = {};
                float x[kWidth], values[Step::kOutputs];
#pragma unroll
                for (int w = 0; w < kWidth; ++w) x[w] = c[w][v];
                apply<Step, false>(args, of_columns, in, bias, prob, x, values, sums.dprob[i]);
                d.value[i][v] = values[0];
                if constexpr (kWidth == 2) second[v] = values[1];
              }
#pragma unroll
              for (int w = 0; w < 2 && kWidth == 2; ++w) {
                ptx::store_shared_16(place_of_c(out, i, w, lane), __float_as_uint(second[4 * w]),
                                     __float_as_uint(second[4 * w + 1]), __float_as_uint(second[4 * w + 2]),
                                     __float_as_uint(second[4 * w + 3]));
              }
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
              for (int w = 0; w < 2; ++w) load_floats(place_of_c(out, i, w, lane), d.value[i], 4 * w);
            }
          }
          if (u == 1) {
            __syncwarp();  // all lanes have read what the box held
            store_codes(codes, 0, out, lane);
          }
          int const d_column = n * kWidth + u * kUnit;
          if (kExtras == Extras::dbias && p.dbias) {  // for certain, but without a branch the kernel spills
            float sum[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              sum[c] = (d.value[0][c] + d.value[1][c]) + (d.value[2][c] + d.value[3][c]);
            }
            scatter<16, 4>(sum, lane, Sum{});  // this lane's: column r of the eight
            uint32_t const row_of_slots = uint32_t(notes.m()) / kSlotRows + warp;
            ptx::store_if(d_column + q * 8 < d_columns,
                          p.dbias + (row_of_slots * uint32_t(d_columns) + uint32_t(d_column + q * 8 + r)), sum[0]);
          }
          codes = quantise_unit(p, notes.places(places.row), d, d_columns, d_column, norm, lane);
        }
        store_codes(codes, 1, out, lane);
        boxes.hand_over(lane);
        boxes.advance();
      }
    }
    sums.template write<false>(p, notes.tile(), warp, lane);
  }
};

}  // namespace cudnn_grouped::sm90

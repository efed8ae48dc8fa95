// The epilogue with FP8 D: every 32 values along rows and along columns share a scale factor (decisions.md, "Block
// quantiser"). The rows of a tile of A and of B lie permuted in shared memory, so that a warp holds 32 adjacent rows
// and a thread 8 adjacent columns of each unit: element (j, e) of its accumulators is column 8 (lane % 4) + 2 j + e.
#pragma once

#include "../core/block_quantize.h"
#include "../cuda/scale_places.h"
#include "epilogue.h"

namespace cudnn_grouped::sm90 {

// What a warp needs of its tile now and then, in kNoteBytes of shared memory: accumulators take its registers.
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

// A warp's rows of D overwrite its own rows of C: the row form, then the column form.
inline constexpr int kWarpBoxBytes = kBoxBytes / 4, kFormBytes = kWarpBoxBytes / 2;

// A thread's part of a unit of D, 32 x 32: value[i][c] is row 8 i + lane / 4, column 8 (lane % 4) + c.
struct Unit {
  float value[4][8];
};
struct UnitCodes {
  uint2 by_row[4], by_column[4];
};

// Quantises the unit whose columns begin at `column`, of a D of `columns`, and writes its scale factors.
template <bool kE4M3>
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
  constexpr float kReciprocal = kE4M3 ? E4M3::kReciprocal : E5M2::kReciprocal;
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
    codes.by_row[i] = {ptx::pack_fp8<kE4M3>(v[0] * f, v[1] * f, v[2] * f, v[3] * f),
                       ptx::pack_fp8<kE4M3>(v[4] * f, v[5] * f, v[6] * f, v[7] * f)};
    codes.by_column[i] = {ptx::pack_fp8<kE4M3>(v[0] * g[0], v[1] * g[1], v[2] * g[2], v[3] * g[3]),
                          ptx::pack_fp8<kE4M3>(v[4] * g[4], v[5] * g[5], v[6] * g[6], v[7] * g[7])};
  }
  return codes;
}

// Both forms of unit u of kUnits.
template <int kUnits>
CG_DEVICE void store_codes(UnitCodes const& codes, int u, uint32_t out, int lane) {
  int const q = lane % 4, r = lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int const line = i * 8 + r;
    // 64-byte rows are in the 64-byte swizzle, 32-byte rows in none.
    uint32_t const at =
        kUnits == 2 ? out + line * 64 + (((u * 2 + q / 2) ^ (line / 2 % 4)) << 4) + q % 2 * 8 : out + line * 32 + q * 8;
    ptx::store_shared_8(at, codes.by_row[i].x, codes.by_row[i].y);
    ptx::store_shared_8(at + kFormBytes, codes.by_column[i].x, codes.by_column[i].y);
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
// D is quantised a unit at a time. Of a gated pair, the second unit's values wait where the pair's C was.
template <class StepT, bool kStagedC, bool kE4M3, Extras kExtras, bool kWide = false>
struct Quantised {
  using Step = StepT;
  static constexpr bool kAll = kExtras == Extras::all;
  static constexpr int kN = kWide ? 192 : 128, kStages = kWide ? 4 : 5, kBoxes = 2;
  static constexpr TileOrder kOrder{kWide ? 12 : 8, kWide};
  static constexpr bool kInterleaved = true, kLoadsC = kStagedC;
  static constexpr int kWidth = Step::kWidth, kChunk = Step::kAccUnits * kUnit, kUnits = Step::kDUnits;
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

  // A thread's eight values of C in its row i of a unit: 16 bytes.
  CG_DEVICE uint32_t place_of_c(uint32_t out, int i, int unit, int lane) {
    int const q = lane % 4, r = lane / 4;
    return out + (i * 8 + r) * kSwizzledRow + (((unit * 4 + q) ^ r) << 4);
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
        for (int u = 0; u < kUnits; ++u) {
          Unit d;
          if (u < Step::kGroups) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              // Never true, which the compiler does not know: it would load C of all rows at once, and run out of
              // registers.
              if (ptx::hidden(n) >= p.n) return;
              int const first = n + u * Step::kInputs * kUnit + q * 8;
              bool const inside = kWidth == 2 || first < p.n;
              Scalars<Step> const of_columns = scalars.only_if(inside);
              float const prob = inside ? notes.prob(i, lane) : 0.f;
              float c[kWidth][8], second[8];
              int64_t const c_at =
                  sums.rows.at(i) * c_columns + (Step::kForward ? first : (n + u * kUnit) * kWidth + q * 8);
              if constexpr (!Step::kForward) {
#pragma unroll
                for (int w = 0; w < kWidth; ++w) {
                  if constexpr (kStagedC) {
                    uint4 const v = ptx::load_shared_16(place_of_c(out, i, u * kWidth + w, lane));
                    c[w][0] = ptx::low_bf16(v.x), c[w][1] = ptx::high_bf16(v.x), c[w][2] = ptx::low_bf16(v.y);
                    c[w][3] = ptx::high_bf16(v.y), c[w][4] = ptx::low_bf16(v.z), c[w][5] = ptx::high_bf16(v.z);
                    c[w][6] = ptx::low_bf16(v.w), c[w][7] = ptx::high_bf16(v.w);
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
                    in[w] = acc.at(i / 2, i % 2, (chunk * Step::kAccUnits + u * Step::kInputs + w) * 4 + j, e);
                  }
#pragma unroll
                  for (int w = 0; w < kWidth && !Step::kForward; ++w) x[w] = c[w][2 * j + e];
                  apply<Step, kAll>(args, of_columns, in, bias[e], prob, x, values, sums.dprob[i]);
                  d.value[i][2 * j + e] = values[0];
                  if constexpr (Step::kOutputs == 2) second[2 * j + e] = values[1];
#pragma unroll
                  for (int w = 0; w < kWidth && Step::kForward; ++w) c[w][2 * j + e] = x[w];
                }
              }
#pragma unroll
              for (int w = 0; w < 2 && Step::kOutputs == 2; ++w) {
                ptx::store_shared_16(place_of_c(out, i, w, lane), __float_as_uint(second[4 * w]),
                                     __float_as_uint(second[4 * w + 1]), __float_as_uint(second[4 * w + 2]),
                                     __float_as_uint(second[4 * w + 3]));
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
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
              for (int w = 0; w < 2; ++w) {
                uint4 const v = ptx::load_shared_16(place_of_c(out, i, w, lane));
                d.value[i][4 * w] = __uint_as_float(v.x), d.value[i][4 * w + 1] = __uint_as_float(v.y);
                d.value[i][4 * w + 2] = __uint_as_float(v.z), d.value[i][4 * w + 3] = __uint_as_float(v.w);
              }
            }
          }
          int const d_column = (Step::kForward ? n / kWidth : n * kWidth) + u * kUnit;
          if (kAll && !Step::kForward && p.epilogue_op != EpilogueOp::identity) {
#pragma unroll
            for (int v = 0; v < 32; ++v) {
              d.value[v / 8][v % 8] = apply_epilogue_op(p.epilogue_op, d.value[v / 8][v % 8]);
            }
          }
          if (kAll && p.amax) {
            float& amax = sums.amax[Step::kForward ? 0 : u % kWidth];
#pragma unroll
            for (int v = 0; v < 32; ++v) amax = ptx::max_magnitude(amax, d.value[v / 8][v % 8]);
          }
          // A branch in the kernels with dbias alone too: they spill without.
          if (!Step::kForward && kExtras != Extras::none && p.dbias) {
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
          if (u == kUnits - 1) {
            __syncwarp();  // all lanes have read what the box held
            if (u == 1) store_codes<kUnits>(codes, 0, out, lane);
          }
          codes =
              quantise_unit<kE4M3>(p, kWide ? notes.places(places.row) : places, d, d_columns, d_column, norm, lane);
        }
        store_codes<kUnits>(codes, kUnits - 1, out, lane);
        boxes.hand_over(lane);
        boxes.advance();
      }
    }
    sums.template write<kAll>(p, notes.tile(), warp, lane);
  }
};

}  // namespace cudnn_grouped::sm90

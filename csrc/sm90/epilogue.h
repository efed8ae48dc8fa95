// What all epilogues share: a thread's rows, and the sums and maxima that go over a tile.
#pragma once

#include "boxes.h"

namespace cudnn_grouped::sm90 {

// A thread holds four rows of its warp's 32, eight rows apart.
//   plain:       rows 16 w ... of each 64-row half, as wgmma has them
//   interleaved: 32 adjacent rows, by a tensor map of A that permutes the rows of a tile (for scales along columns)
template <bool kInterleaved>
struct ThreadRows {
  uint32_t first;  // unsigned: an address from it takes no registers for its upper half

  __device__ __forceinline__ ThreadRows(int m, int warp, int lane)
      : first(m + warp * (kInterleaved ? 32 : 16) + lane / 4) {}
  __device__ __forceinline__ uint32_t tile() const { return first & ~uint32_t(kTileM - 1); }
  __device__ __forceinline__ uint32_t at(int i) const { return first + (i / 2) * (kInterleaved ? 16 : 64) + i % 2 * 8; }
};

template <class Step, bool kInterleaved>
struct TileSums {
  static constexpr int kAmax = Step::kForward ? 1 : Step::kWidth;

  ThreadRows<kInterleaved> rows;
  float prob[4], dprob[4] = {}, amax[kAmax] = {};

  __device__ __forceinline__ TileSums(Params const& p, Tile const& tile, int warp, int lane)
      : rows(tile.m, warp, lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      prob[i] = p.prob ? __ldg(p.prob + rows.at(i)) : 1.f;
      if (kIsGatedBackward<Step>) prob[i] *= alpha_of(p, tile.expert);
    }
  }

  // Slots and maxima of the tile: results do not depend on the order of tiles.
  template <bool kWithAmax = true>
  __device__ __forceinline__ void write(Params const& p, Tile const& tile, int warp, int lane) {
    ThreadRows<kInterleaved> const rows(tile.m, warp, lane);  // anew: none is held
    if (!Step::kForward) {
      float const factor = kIsGatedBackward<Step> ? alpha_of(p, tile.expert) : 1.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dprob[i] *= factor;
        dprob[i] += __shfl_xor_sync(~0u, dprob[i], 1);
        dprob[i] += __shfl_xor_sync(~0u, dprob[i], 2);
        if (lane % 4 == 0) (p.dprob + int64_t(tile.n_tile) * p.experts.m)[rows.at(i)] = dprob[i];
      }
    }
    if (kWithAmax && p.amax) {
#pragma unroll
      for (int w = 0; w < kAmax; ++w) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          amax[w] = ptx::max_magnitude(amax[w], __shfl_xor_sync(~0u, amax[w], lanes));
        }
        if (lane == 0) atomicMax(p.amax + tile.expert * kAmax + w, __float_as_int(amax[w]));
      }
    }
  }
};

// What else may be wanted of a tile. Without a branch between the elements their arithmetic overlaps.
enum class Extras {
  none,
  dbias,  // for certain
  all,    // perhaps: bias, dbias, amax, an epilogue_op
};

// Sums of D over a warp's 32 rows, for dbias. A group is 8 columns of each unit of D that an element has values in; of
// kGroups neighbouring groups every lane ends with one sum.
template <class Step>
struct ColumnSums {
  static constexpr int kOutputs = Step::kOutputs, kGroups = 4 / kOutputs;
  float part[4] = {};

  // The lane's column of D, less the groups' first.
  static __device__ __forceinline__ int column(int lane) {
    int const r = lane / 4;
    int const unit = kOutputs == 2 ? r / 4 : 0, group = kOutputs == 2 ? r / 2 % 2 : r % 4;
    return unit * kUnit + group * 8 + lane % 4 * 2 + (kOutputs == 2 ? r % 2 : r / 4);
  }
  static __device__ __forceinline__ float* slot(Params const& p, int first_row, int lane) {
    return p.dbias + (uint32_t(first_row / kSlotRows) * uint32_t(p.n * Step::kWidth) + uint32_t(column(lane)));
  }
  // The first exchange between lanes comes at once, so that few sums are held; nothing waits for it yet.
  __device__ __forceinline__ void add(int group, int lane, float const (&d)[4][kOutputs][2]) {
    float sum[kOutputs * 2];
#pragma unroll
    for (int v = 0; v < kOutputs * 2; ++v) {
      sum[v] = (d[0][v / 2][v % 2] + d[1][v / 2][v % 2]) + (d[2][v / 2][v % 2] + d[3][v / 2][v % 2]);
    }
    scatter<16, 16>(sum, lane, Sum{});
#pragma unroll
    for (int v = 0; v < kOutputs; ++v) part[group % kGroups * kOutputs + v] = sum[v];
  }
  __device__ __forceinline__ bool complete(int group) const { return group % kGroups == kGroups - 1; }
  __device__ __forceinline__ void store(float* slot, int lane, bool inside) {
    scatter<8, 4>(part, lane, Sum{});
    ptx::store_if(inside, slot, part[0]);
  }
};

// d[row][output][e]: one group of 8 columns of a unit.
template <class Step, bool kInterleaved>
__device__ __forceinline__ void after_activation(Params const& p, TileSums<Step, kInterleaved>& sums,
                                                 float (&d)[4][Step::kOutputs][2]) {
  constexpr int kValues = Step::kOutputs * 2;
  if (!Step::kForward && p.epilogue_op != EpilogueOp::identity) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) d[i][v / 2][v % 2] = apply_epilogue_op(p.epilogue_op, d[i][v / 2][v % 2]);
    }
  }
  if (p.amax) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        sums.amax[v / 2] = ptx::max_magnitude(sums.amax[v / 2], d[i][v / 2][v % 2]);
      }
    }
  }
}

}  // namespace cudnn_grouped::sm90

#include "weight_gradient.h"

#include "../core/number_formats.h"
#include "../cuda/launch.h"
#include "../cuda/values.h"
#include "mainloop.h"
#include "tile_order.h"

namespace cudnn_grouped::sm90 {
namespace {

inline constexpr int kN = kWeightTileN, kStages = 5;
using WeightRing = Ring<kN, kStages>;
inline constexpr int kBytes = WeightRing::kBytes + 8 * 2 * kStages;
static_assert(kBytes <= kSharedBytes);

struct WeightTile {
  int expert, row, column, first_token, k_tiles;
};

// Expert by expert.
struct WeightSchedule {
  WeightTiles const& p;
  int row_tiles, column_tiles, per_expert, count;

  __device__ __forceinline__ explicit WeightSchedule(WeightTiles const& p) : p(p) {
    row_tiles = ceil_div(p.rows, kTileM), column_tiles = ceil_div(p.columns, kN);
    per_expert = row_tiles * column_tiles, count = per_expert * p.experts.count;
  }
  __device__ __forceinline__ int k_tiles(int index) const {
    int const expert = index / per_expert;
    return max(p.experts.end(expert) - p.experts.start(expert), 0) / kTileK;
  }
  __device__ __forceinline__ WeightTile at(int index) const {
    int const expert = index / per_expert;
    auto const place = TileOrder{12, true}.place_of(index % per_expert, row_tiles, column_tiles);
    return {expert, place.row * kTileM, place.column * kN, p.experts.start(expert), k_tiles(index)};
  }
};

// `panels` panels of 64 rows from `row` on and kTileK tokens from `token` on.
__device__ __forceinline__ void load_operand(CUtensorMap const& map, bool tokens_contiguous, uint32_t to, uint32_t full,
                                             int panels, int row, int token) {
  if (tokens_contiguous) return ptx::load(to, &map, full, token, row);
  for (int panel = 0; panel < panels; ++panel) ptx::load(to + panel * kPanel, &map, full, row + panel * 64, token);
}

__device__ __forceinline__ void load_tiles(WeightSchedule const& schedule, WeightRing ring) {
  WeightTiles const& p = schedule.p;
  for (int index = blockIdx.x; index < schedule.count; index += gridDim.x) {
    WeightTile const tile = schedule.at(index);
    for (int k = 0; k < tile.k_tiles; ++k) {
      uint32_t const full = ring.acquire();
      load_operand(p.a, p.a_tokens_contiguous, ring.a(), full, kTileM / 64, tile.row, tile.first_token + k * kTileK);
      load_operand(p.b, p.b_tokens_contiguous, ring.b(), full, kN / 64, tile.column, tile.first_token + k * kTileK);
      ring.advance();
    }
  }
}

__device__ __forceinline__ float value_at(DType dtype, void const* out, int64_t at) {
  if (dtype == DType::float32) return static_cast<float const*>(out)[at];
  uint32_t const half = static_cast<uint16_t const*>(out)[at];
  return dtype == DType::bfloat16 ? decode_bf16(half) : decode_fp16(half);
}

// One or two neighbouring values of `out`, the sum of what it held and v, or v.
template <bool kPairs>
__device__ __forceinline__ void write_values(WeightTiles const& p, void* out, int64_t at, float (&v)[2], bool second) {
  if constexpr (kPairs) {
    if (p.accumulate) {
#pragma unroll
      for (int e = 0; e < 2; ++e) v[e] += value_at(p.out_dtype, out, at + e);
    }
    cuda::store_pair(p.out_dtype, out, at, v[0], v[1]);
  } else {
#pragma unroll 1
    for (int e = 0; e < (second ? 2 : 1); ++e) {
      float const value = (e ? v[1] : v[0]) + (p.accumulate ? value_at(p.out_dtype, out, at + e) : 0.f);
      if (p.out_dtype == DType::float32) {
        static_cast<float*>(out)[at + e] = value;
      } else {
        uint32_t const half = p.out_dtype == DType::bfloat16 ? encode_bf16(value) : encode_fp16(value);
        static_cast<uint16_t*>(out)[at + e] = uint16_t(half);
      }
    }
  }
}

template <bool kPairs>
__device__ __forceinline__ void write_tile(WeightTiles const& p, WeightTile const& tile, Accumulators<kN>& acc,
                                           int warp, int lane) {
  if (p.accumulate && tile.k_tiles == 0) return;  // nothing to add: not even 0 to a -0
  float const scale =
      (p.scale_a ? __ldg(p.scale_a + tile.expert) : 1.f) * (p.scale_b ? __ldg(p.scale_b + tile.expert) : 1.f);
  void* const out = reinterpret_cast<void*>(__ldg(p.out + tile.expert));
  int const first_row = tile.row + warp * 16 + lane / 4;
#pragma unroll 1
  for (int first = tile.column; first < min(tile.column + kN, p.columns); first += 64, acc.next_columns()) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const row = first_row + i / 2 * 64 + i % 2 * 8;
      int64_t const row_at = int64_t(row) * p.columns;
#pragma unroll
      for (int group = 0; group < 8; ++group) {
        int const column = first + group * 8 + lane % 4 * 2;
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) v[e] = tile.k_tiles ? scale * acc.at(i / 2, i % 2, group, e) : 0.f;
        if (row < p.rows && column < p.columns) {
          write_values<kPairs>(p, out, row_at + column, v, column + 1 < p.columns);
        }
      }
    }
  }
}

template <bool kPairs>
__device__ __forceinline__ void consume_tokens(WeightSchedule const& schedule, WeightRing ring, int consumer) {
  WeightTiles const& p = schedule.p;
  int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (consumer == 1) give_turn(1);
  uint32_t position = 0;
  int turn = 0;
  for (int index = blockIdx.x; index < schedule.count; index += gridDim.x, turn ^= 1) {
    if (turn != consumer) {  // the other's tile: its stages pass by
      position += schedule.k_tiles(index);
      continue;
    }
    WeightTile const tile = schedule.at(index);
    Accumulators<kN> acc;
    wait_turn(consumer);
    ring.move_to(position);
    position += tile.k_tiles;
    if (p.a_tokens_contiguous) {
      if (p.b_tokens_contiguous) {
        ring.multiply_tile<Major::K, Major::K>(acc, tile.k_tiles, lane);
      } else {
        ring.multiply_tile<Major::K, Major::MN>(acc, tile.k_tiles, lane);
      }
    } else if (p.b_tokens_contiguous) {
      ring.multiply_tile<Major::MN, Major::K>(acc, tile.k_tiles, lane);
    } else {
      ring.multiply_tile<Major::MN, Major::MN>(acc, tile.k_tiles, lane);
    }
    give_turn(consumer);
    ring.finish(acc, tile.k_tiles, lane);
    write_tile<kPairs>(p, tile, acc, warp, lane);
  }
}

// kPairs: two neighbouring columns of out begin at addresses that take both at once.
template <bool kPairs>
__global__ void __launch_bounds__(kThreads, 1) weight_gradient_kernel(__grid_constant__ WeightTiles const p) {
  alignas(1024) extern __shared__ uint8_t shared[];
  uint32_t const base = ptx::shared_address(shared);
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  WeightRing const ring{base, base + WeightRing::kBytes};
  if (threadIdx.x == 0) {
    ring.init();
    ptx::barrier_init_fence();
  }
  __syncthreads();
  WeightSchedule const schedule(p);
  if (warp < 4) {
    ptx::fewer_registers<40>();
    if (warp == 0 && ptx::elect()) load_tiles(schedule, ring);
    __syncwarp();
  } else {
    ptx::more_registers<232>();
    consume_tokens<kPairs>(schedule, ring, warp / 4 - 1);
  }
}

template <bool kPairs>
void start(WeightTiles const& p, int blocks, cudaStream_t stream) {
  cuda::allow_shared_memory<&weight_gradient_kernel<kPairs>>(kBytes);
  cuda::launch(weight_gradient_kernel<kPairs>, blocks, kThreads, kBytes, stream, p);
}

}  // namespace

void multiply_tokens(WeightTiles const& p, int blocks, cudaStream_t stream) {
  p.pairs ? start<true>(p, blocks, stream) : start<false>(p, blocks, stream);
}

}  // namespace cudnn_grouped::sm90

// dequantize, and the reduction of dbias slots.
#include "launch.h"
#include "quantize.h"
#include "quantize_tile.h"

namespace cudnn_grouped::cuda {
namespace {

inline constexpr int kThreads = 256, kTileRows = 64, kTileColumns = 128;

// Whole blocks in a length, without a 64-bit division.
CG_DEVICE int64_t blocks(Tiles const& t, int64_t length) { return t.block == 32 ? length / 32 : length / 16; }

// Where the scales of a tile's rows lie; by_column with offsets, of their expert.
struct TileScales {
  uint8_t const* base;  // null: no expert's rows, which are zero
  ScaleLayout layout;
  int64_t first;

  CG_DEVICE TileScales of(Tiles const& t, int64_t batch, int64_t row, bool by_column) {
    int64_t const lines = by_column ? t.columns : t.rows, length = by_column ? t.rows : t.columns;
    if (!t.offsets) {
      ScaleLayout const layout = ScaleLayout::of(lines, blocks(t, length + t.block - 1));
      return {t.scales + batch * layout.bytes(), layout, 0};
    }
    ExpertRows const e = ExpertRows::of(t, row);
    if (!e.found) return {nullptr, {}, 0};
    return {t.scales + discrete_column_base(e.start, t.columns, t.block),
            ScaleLayout::of(t.columns, blocks(t, e.end - e.start)), e.start};
  }
};

// A thread has chunks of eight neighbouring columns, 16 rows apart.
template <class Format, class X, bool kAligned>
__global__ void __launch_bounds__(kThreads) dequantise(Tiles const t, bool by_column) {
  using C = Codes<Format>;
  constexpr int kLanes = kTileColumns / 8, kStep = kThreads / kLanes;
  auto const place = t.place();
  int64_t const tile_row = int64_t(place.down) * kTileRows;
  TileScales const scales = TileScales::of(t, place.batch, tile_row, by_column);
  int64_t const column = int64_t(place.across) * kTileColumns + threadIdx.x % kLanes * 8;
  int const count = int(min(t.columns - column, int64_t(8)));
  float const norm = t.norm();
  for (int i = 0; i < kTileRows / kStep; ++i) {
    int64_t const row = tile_row + threadIdx.x / kLanes + i * kStep;
    if (row >= t.rows || count <= 0) return;
    int64_t const at = (place.batch * t.rows + row) * t.columns + column;
    Chunk<X> chunk{};
    if (scales.base) {
      C codes{};
      if (C::kFp4 && by_column) {  // transposed
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          int64_t const from = (place.batch * t.columns + column + j) * t.rows + row;
          if (j < count) codes.word[0] |= (__ldg(t.data + from / 2) >> (from % 2 * 4) & 15u) << (4 * j);
        }
      } else {
        codes = C::template load<kAligned>(t.data + at / (8 / C::kBits), count);
      }
      int64_t const block = blocks(t, by_column ? row - scales.first : column);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t byte = 0;
        if (kAligned || j < count) {
          byte = __ldg(scales.base + scales.layout.at(by_column ? column + j : row, block));
        }
        float const scale = t.e4m3_scales ? decode_e4m3(byte) : decode_e8m0(byte);
        float const product = codes.decode(j) * scale, value = t.norm_const ? product / norm : product;
        uint32_t const bits = X::encode(value);
        chunk.word[j * Chunk<X>::kWords / 8] |= bits << (kIsPacked<X> ? j % 2 * 16 : 0);
      }
    }
    chunk.template store<kAligned>(static_cast<typename X::Storage*>(t.x) + at, count);
  }
}

template <class Format, class X>
void launch_kernel(QuantizeProblem const& p, cudaStream_t stream) {
  Tiles const t = Tiles::of(p, kTileRows, kTileColumns);
  if (t.count(p.batch) == 0) return;
  auto const kernel = t.aligned ? dequantise<Format, X, true> : dequantise<Format, X, false>;
  launch(kernel, t.count(p.batch), kThreads, 0, stream, t, p.by_column);
}

template <class Format>
void launch_format(QuantizeProblem const& p, cudaStream_t stream) {
  if (p.x_dtype == DType::float32) return launch_kernel<Format, Float32>(p, stream);
  if (p.x_dtype == DType::bfloat16) return launch_kernel<Format, BFloat16>(p, stream);
  launch_kernel<Format, Float16>(p, stream);
}

// A thread adds one column of one expert: the order of the slots is the sum's.
__global__ void __launch_bounds__(kThreads) sum_slots(DbiasReduction const r) {
  int64_t const column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= r.columns) return;
  int const expert = int(blockIdx.y);
  auto slot_of = [&](int64_t offset) { return max(int64_t(0), min(r.slots, offset / kDbiasSlotRows)); };
  int64_t const begin = expert ? slot_of(__ldg(r.padded_offsets + expert - 1)) : 0;
  int64_t const end = slot_of(__ldg(r.padded_offsets + expert));
  float sum = 0.f;
#pragma unroll 8
  for (int64_t slot = begin; slot < end; ++slot) sum += decode_bf16(__ldg(r.slot_values + slot * r.columns + column));
  uint16_t& out = r.dbias[expert * r.columns + column];
  out = uint16_t(encode_bf16(decode_bf16(out) + sum));
}

}  // namespace

void dequantize(QuantizeProblem const& p, Launch const& launch) {
  auto const stream = static_cast<cudaStream_t>(launch.stream);
  if (p.data_dtype == DType::float8_e4m3fn) return launch_format<E4M3>(p, stream);
  if (p.data_dtype == DType::float8_e5m2) return launch_format<E5M2>(p, stream);
  launch_format<E2M1>(p, stream);
}

void reduce_dbias(DbiasReduction const& r, Launch const& launch) {
  if (r.columns == 0 || r.experts == 0) return;
  dim3 const grid(unsigned(ceil_div<int64_t>(r.columns, kThreads)), unsigned(r.experts));
  cuda::launch(sum_slots, grid, kThreads, 0, static_cast<cudaStream_t>(launch.stream), r);
}

}  // namespace cudnn_grouped::cuda

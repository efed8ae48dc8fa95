// quantize: a block of threads quantises the values behind one atom of scale factors, 128 lines of 4 blocks, so it
// writes the atom whole, padding included. Memory bound: 16-byte loads, all of a thread's in flight at once.
#include "launch.h"
#include "quantize.h"

#include "quantize_tile.h"

namespace cudnn_grouped::cuda {
namespace {

template <class Format_, bool kE4M3Scale, int kBlock_>
struct Kind {
  using Format = Format_;
  static constexpr int kBlock = kBlock_;
  static constexpr int kThreads = 8 * kBlock;  // a thread has 64 values: 8 chunks
  static constexpr int kGroup = kBlock / 8;    // chunks in a block

  CG_DEVICE uint32_t scale_byte(float amax, float norm) {
    float const v = scale_value(amax, Format::kReciprocal, norm);
    return kE4M3Scale ? encode_e4m3(v) : encode_e8m0_up(v);
  }
  CG_DEVICE float factor(uint32_t byte, float norm) {
    return kE4M3Scale ? e4m3_factor(byte, norm) : e8m0_factor(byte, norm);
  }
};

// 768 threads with 128 bytes each in flight hide the latency, at 80 registers. FP32 chunks alone take 64 registers, and
// FP4 has the most arithmetic.
template <class X, class Kind, bool kAligned>
inline constexpr int kResident =
    !kAligned ? 1 : (kIsPacked<X> && !Codes<typename Kind::Format>::kFp4 ? 768 : 512) / Kind::kThreads;

CG_DEVICE int clamp(int64_t left, int most) { return left < 0 ? 0 : left > most ? most : int(left); }

// Where the scale of (line, block) of an atom lies in it. It is a sum of parts where the lines add without a carry
// between their lowest five bits and the rest: the constant parts cost nothing.
CG_DEVICE int in_atom(unsigned line, unsigned block) { return int(ScaleLayout{1, 1}.at(line, block)); }

CG_DEVICE void store_atom(uint8_t const* atom, uint8_t* out) {
  __syncthreads();
  if (threadIdx.x < kAtomBytes / 4) {
    reinterpret_cast<uint32_t*>(out)[threadIdx.x] = reinterpret_cast<uint32_t const*>(atom)[threadIdx.x];
  }
}

// The tile is 128 rows of 4 blocks; neighbouring lanes have neighbouring chunks of a row.
template <class X, class Kind, bool kAligned>
__global__ void __launch_bounds__(Kind::kThreads, kResident<X, Kind, kAligned>) quantise_rows(Tiles const t) {
  constexpr int kLanes = 4 * Kind::kGroup, kStep = Kind::kThreads / kLanes, kChunks = 8;
  __shared__ alignas(16) uint8_t atom[kAtomBytes];
  auto const place = t.place();
  unsigned const lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  int64_t const row = place.down * kAtomRows + first, column = int64_t(place.across) * kLanes * 8 + lane * 8;
  int const count = clamp(t.columns - column, 8), rows = clamp(t.rows - row, kAtomRows);
  int64_t const at = (place.batch * t.rows + row) * t.columns + column, step = kStep * t.columns;
  auto const* x = static_cast<typename X::Storage const*>(t.x) + at;

  Chunk<X> chunk[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunk[i] = Chunk<X>::template load<kAligned>(x + i * step, i * kStep < rows ? count : 0);
  }
  float const norm = t.norm();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    int const inside = i * kStep < rows ? count : 0;
    Peaks<X> peaks;
    peaks.take(chunk[i]);
    uint32_t const byte = Kind::scale_byte(peaks.over_lanes(Kind::kGroup), norm);
    float const factor = Kind::factor(byte, norm);
    // A block is there when its first value is.
    if (lane % Kind::kGroup == 0) {
      atom[in_atom(first, lane / Kind::kGroup) + in_atom(i * kStep, 0)] = uint8_t(inside ? byte : 0);
    }
    using C = Codes<typename Kind::Format>;
    C codes;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 const v = chunk[i].pair(j);
      codes.set_pair(j, {v.x * factor, v.y * factor});
    }
    codes.template store<kAligned>(t.data + (at + i * step) / (8 / C::kBits), inside);
  }
  store_atom(atom, t.scales + blockIdx.x * kAtomBytes);  // atoms are in the order of the tiles
}

// The atom that a tile of the column direction fills, and whether its rows are some expert's.
struct ColumnAtom {
  uint8_t* at;
  bool owned;

  CG_DEVICE ColumnAtom of(Tiles const& t, Tiles::Place place, int64_t row, int block) {
    int64_t const column = place.across * kAtomRows;
    if (!t.offsets) {
      ScaleLayout const layout = ScaleLayout::of(t.columns, ceil_div<int64_t>(t.rows, block));
      return {t.scales + place.batch * layout.bytes() + layout.at(column, row / block), true};
    }
    ExpertRows const e = ExpertRows::of(t, row);
    if (e.found) {
      ScaleLayout const layout = ScaleLayout::of(t.columns, (e.end - e.start) / block);
      uint8_t* const base = t.scales + discrete_column_base(e.start, t.columns, block);
      return {base + layout.at(column, (row - e.start) / block), true};
    }
    // Past the last expert there are as many atoms left as tiles.
    return {t.scales + discrete_column_base(row, t.columns, block) + place.across * kAtomBytes, false};
  }
};

// FP4 comes out transposed: pairs lie along the rows of x. words: eight rows of a column each.
template <bool kAligned, int kWords, int kThreads>
CG_DEVICE void store_transposed(Tiles const& t, uint32_t const (&tile)[kAtomRows][kWords + 1], int64_t batch,
                                int64_t row, int64_t column) {
  for (int i = int(threadIdx.x); i < kAtomRows * kWords; i += kThreads) {
    int const c = i / kWords, w = i % kWords;
    if (column + c >= t.columns) continue;
    Codes<E2M1> const codes{{tile[c][w]}};
    int64_t const at = (batch * t.columns + column + c) * t.rows + row + w * 8;
    codes.template store<kAligned>(t.data + at / 2, clamp(t.rows - row - w * 8, 8));
  }
}

// The tile is 4 blocks of rows by 128 columns; a thread has eight rows of eight columns, a warp 32 rows of 64 columns:
// a block's threads are in one warp, and a warp's loads are whole 128-byte lines (of 16-bit values).
template <class X, class Kind, bool kAligned>
__global__ void __launch_bounds__(Kind::kThreads, kResident<X, Kind, kAligned>) quantise_columns(Tiles const t) {
  using C = Codes<typename Kind::Format>;
  constexpr int kRows = 8, kTileRows = 4 * Kind::kBlock;
  __shared__ alignas(16) uint8_t atom[kAtomBytes];
  auto const place = t.place();
  unsigned const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned const first = warp / 2 * 32 + lane / 8 * kRows, c = warp % 2 * 64 + lane % 8 * 8;
  int64_t const tile_row = int64_t(place.down) * kTileRows, row = tile_row + first;
  int64_t const tile_column = place.across * kAtomRows, column = tile_column + c;
  ColumnAtom const out = ColumnAtom::of(t, place, tile_row, Kind::kBlock);
  int const count = clamp(t.columns - column, 8), rows = clamp(t.rows - row, kRows);
  int64_t const at = (place.batch * t.rows + row) * t.columns + column;
  auto const* x = static_cast<typename X::Storage const*>(t.x) + at;

  Chunk<X> chunk[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    chunk[i] = Chunk<X>::template load<kAligned>(x + i * t.columns, out.owned && i < rows ? count : 0);
  }
  Peaks<X> peaks;
#pragma unroll
  for (int i = 0; i < kRows; ++i) peaks.take(chunk[i]);
  peaks.take_lanes(8);
  if constexpr (Kind::kGroup == 4) peaks.take_lanes(16);

  float const norm = t.norm();
  unsigned const block = first / Kind::kBlock;
  bool const inside = out.owned && tile_row + block * Kind::kBlock < t.rows;
  float factor[8];
  uint8_t byte[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t const code = Kind::scale_byte(peaks.at(j), norm);
    factor[j] = inside ? Kind::factor(code, norm) : 0.f;  // no expert's rows are zero
    byte[j] = uint8_t(inside && j < count ? code : 0);
  }
  if (lane / 8 % Kind::kGroup == 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) atom[in_atom(c, block) + in_atom(j, 0)] = byte[j];
  }
  if constexpr (C::kFp4) {
    __shared__ uint32_t tile[kAtomRows][kTileRows / 8 + 1];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      C codes;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        float2 const above = chunk[2 * i].pair(j / 2), below = chunk[2 * i + 1].pair(j / 2);
        codes.set_pair(i, {(j % 2 ? above.y : above.x) * factor[j], (j % 2 ? below.y : below.x) * factor[j]});
      }
      tile[c + j][first / 8] = codes.word[0];
    }
    store_atom(atom, out.at);
    store_transposed<kAligned, kTileRows / 8, Kind::kThreads>(t, tile, place.batch, tile_row, tile_column);
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      C codes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const v = chunk[i].pair(j);
        codes.set_pair(j, {v.x * factor[2 * j], v.y * factor[2 * j + 1]});
      }
      codes.template store<kAligned>(t.data + at + i * t.columns, i < rows ? count : 0);
    }
    store_atom(atom, out.at);
  }
}

template <class X, class Kind>
void launch_kernel(QuantizeProblem const& p, cudaStream_t stream) {
  int64_t const along = 4 * Kind::kBlock;
  Tiles const t = p.by_column ? Tiles::of(p, along, kAtomRows) : Tiles::of(p, kAtomRows, along);
  if (t.count(p.batch) == 0) return;
  auto const kernel = p.by_column ? (t.aligned ? quantise_columns<X, Kind, true> : quantise_columns<X, Kind, false>)
                                  : (t.aligned ? quantise_rows<X, Kind, true> : quantise_rows<X, Kind, false>);
  launch(kernel, t.count(p.batch), Kind::kThreads, 0, stream, t);
}

template <class X>
void launch_format(QuantizeProblem const& p, cudaStream_t stream) {
  if (p.data_dtype == DType::float8_e4m3fn) return launch_kernel<X, Kind<E4M3, false, 32>>(p, stream);
  if (p.data_dtype == DType::float8_e5m2) return launch_kernel<X, Kind<E5M2, false, 32>>(p, stream);
  if (p.scale_dtype == DType::float8_e4m3fn) return launch_kernel<X, Kind<E2M1, true, 16>>(p, stream);
  if (p.block == 16) return launch_kernel<X, Kind<E2M1, false, 16>>(p, stream);
  launch_kernel<X, Kind<E2M1, false, 32>>(p, stream);
}

}  // namespace

void quantize(QuantizeProblem const& p, Launch const& launch) {
  auto const stream = static_cast<cudaStream_t>(launch.stream);
  if (p.x_dtype == DType::float32) return launch_format<Float32>(p, stream);
  if (p.x_dtype == DType::bfloat16) return launch_format<BFloat16>(p, stream);
  launch_format<Float16>(p, stream);
}

}  // namespace cudnn_grouped::cuda

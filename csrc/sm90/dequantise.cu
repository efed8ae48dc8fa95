// Memory bound: a warp reads 256 neighbouring codes and writes 512 neighbouring bytes, each thread having four or eight
// such loads in flight. A block of threads has one tile, whose place in the scales is found once.
#include "../cuda/experts.h"
#include "../cuda/launch.h"
#include "dequantise.h"

#include <algorithm>

#include "dequantise_units.h"

namespace cudnn_grouped::sm90 {
namespace {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kTileColumns = 256;     // of a warp: eight a lane
inline constexpr int kRunRows = 4 * kWarps;  // rows of a tile whose blocks run along it
inline constexpr int kTileTokens = 64;       // of a tile whose blocks run across it
inline constexpr int kTileK = 64, kTileN = 128;

// A matrix whose blocks run along its rows.
struct Matrix {
  uint8_t const *data, *scales;
  ScaleLayout layout;
  int64_t rows, columns;
  int64_t first_column;  // where block 0 begins
  __nv_bfloat16* out;
};

template <class Kind>
CG_DEVICE void dequantise_tile(Matrix const& m, int64_t tile_row, int64_t tile_column) {
  using Format = typename Kind::Format;
  constexpr int kUnits = kRunRows / kWarps;
  int64_t const column = tile_column + threadIdx.x % 32 * 8, row = tile_row + threadIdx.x / 32;
  if (column >= m.columns) return;
  int64_t const at = row * m.columns + column, step = kWarps * m.columns;
  uint8_t const* const data = m.data + at / Format::kPerByte;
  // The tile's rows are in one quarter of an atom, where rows lie evenly.
  uint8_t const* const scales = m.scales + m.layout.at(row, (column - m.first_column) / Kind::kBlock);
  int const scale_step = int(ScaleLayout{1, 1}.at(kWarps, 0));
  typename Format::Codes codes[kUnits];
  uint8_t scale[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (row + i * kWarps >= m.rows) break;
    codes[i] = __ldcs(reinterpret_cast<typename Format::Codes const*>(data + i * step / Format::kPerByte));
    scale[i] = __ldg(scales + i * scale_step);
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (row + i * kWarps >= m.rows) break;
    store_unit<Format>(m.out + at + i * step, codes[i], Kind::scale(scale[i]));
  }
}

// A block of threads' tile: tiles run across, then down, then over the experts.
struct Grid {
  uint32_t across, down;

  struct Place {
    uint32_t across, down, expert;
  };
  __device__ __forceinline__ Place place(uint32_t block) const {
    uint32_t const rest = block / across;
    return {block % across, rest % down, rest / down};
  }
};

CG_DEVICE cuda::Experts experts_of(Dequantise const& d) {
  return {d.padded_offsets, int(d.experts), int(min(d.offset_limit, int64_t(INT32_MAX)))};
}

// The expert's matrix, or one without rows.
CG_DEVICE Matrix matrix_of(Dequantise const& d, uint32_t expert, int block) {
  Matrix m{static_cast<uint8_t const*>(d.data), d.scales, {}, 0, d.columns, 0, d.out};
  cuda::Experts const experts = experts_of(d);
  int64_t const rows = d.by_token ? d.rows : d.rows_per_expert;
  m.layout = ScaleLayout::of(rows, ceil_div(d.columns, int64_t(block)));
  if (d.by_token) {
    m.rows = d.padded_offsets ? min(rows, int64_t(experts.rows())) : rows;
    return m;
  }
  if (d.padded_offsets && experts.end(expert) <= experts.start(expert)) return m;
  auto const is_unusable = [&](int64_t const* table) { return table && !cuda::is_usable(__ldg(table + expert)); };
  if (is_unusable(d.pointers) || is_unusable(d.scale_pointers)) return m;
  m.rows = rows;
  m.data = d.pointers ? reinterpret_cast<uint8_t const*>(__ldg(d.pointers + expert)) : m.data + expert * d.expert_bytes;
  m.scales = d.scale_pointers ? reinterpret_cast<uint8_t const*>(__ldg(d.scale_pointers + expert))
                              : m.scales + expert * d.scale_expert_bytes;
  m.out += expert * d.out_rows_per_expert * d.columns;
  return m;
}

// A, and B behind it.
struct Both {
  Dequantise a, b;
  Grid grid_a, grid_b;
  uint32_t blocks_of_a;
};

// Backwards: what the GEMM reads first is written last, and is still in L2.
template <class Kind>
__global__ void __launch_bounds__(kThreads) dequantise_rows(__grid_constant__ Both const p) {
  uint32_t const block = gridDim.x - 1 - blockIdx.x;
  bool const is_a = block < p.blocks_of_a;
  Grid::Place const place = is_a ? p.grid_a.place(block) : p.grid_b.place(block - p.blocks_of_a);
  int64_t const row = int64_t(place.down) * kRunRows;
  Matrix const m = matrix_of(is_a ? p.a : p.b, place.expert, Kind::kBlock);
  if (row < m.rows) dequantise_tile<Kind>(m, row, int64_t(place.across) * kTileColumns);
}

// Stored as (columns, rows): a tile of 64 x 128 codes goes through shared memory, out of which a thread takes a square
// of 8 columns by 4 rows, one word of 4 codes for each column.
template <class Kind>
__global__ void __launch_bounds__(kThreads) dequantise_transposed(Dequantise const d, Grid const grid) {
  using Format = typename Kind::Format;
  constexpr int kWords = kTileN / 4, kStride = kWords + 1, kPasses = kTileK * kTileN / 16 / kThreads;
  // The odd stride and the half's shift keep a warp's 8 x 4 words in different banks.
  auto word_at = [](int k, int word) { return k * kStride + k / 32 * 4 + word; };
  __shared__ uint32_t tile[kTileK * kStride + 4];
  Grid::Place const place = grid.place(blockIdx.x);
  int64_t const tile_row = int64_t(place.down) * kTileN, tile_column = int64_t(place.across) * kTileK;
  Matrix const m = matrix_of(d, place.expert, Kind::kBlock);
  if (m.rows == 0) return;

  uint4 loaded[kPasses];
  int const from = threadIdx.x % (kTileN / 16) * 16, first = threadIdx.x / (kTileN / 16);
  constexpr int kStep = kTileK / kPasses;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    int64_t const column = tile_column + first + i * kStep;
    loaded[i] = make_uint4(0, 0, 0, 0);
    if (tile_row + from < m.rows && column < m.columns) {
      loaded[i] = __ldg(reinterpret_cast<uint4 const*>(m.data + column * m.rows + tile_row + from));
    }
  }
  int const k = threadIdx.x % 8 * 8, n = threadIdx.x / 8 * 4;
  int64_t const column = tile_column + k, row = tile_row + n;
  uint8_t scale[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    bool const inside = row + r < m.rows && column < m.columns;
    scale[r] = inside ? __ldg(m.scales + m.layout.at(row + r, column / Kind::kBlock)) : 0;
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    uint32_t* const to = tile + word_at(first + i * kStep, from / 4);
    to[0] = loaded[i].x, to[1] = loaded[i].y, to[2] = loaded[i].z, to[3] = loaded[i].w;
  }
  __syncthreads();
  if (column >= m.columns) return;
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) word[i] = tile[word_at(k + i, n / 4)];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (row + r >= m.rows) return;
    // Byte r of each word.
    auto gather = [&](int i) {
      uint32_t const low = __byte_perm(word[i], word[i + 1], r | (4 + r) << 4);
      uint32_t const high = __byte_perm(word[i + 2], word[i + 3], r | (4 + r) << 4);
      return __byte_perm(low, high, 0x5410);
    };
    store_unit<Format>(m.out + (row + r) * m.columns + column, make_uint2(gather(0), gather(4)), Kind::scale(scale[r]));
  }
}

// The scales of the tokens around `token`: of their expert, or of all tokens.
struct TokenScales {
  uint8_t const* base;  // null: no expert's tokens
  ScaleLayout layout;
  int64_t first;

  CG_DEVICE TokenScales of(DequantiseTokens const& d, int64_t token, int block) {
    cuda::Experts const experts{d.padded_offsets, int(d.experts), int(d.tokens)};
    if (token >= experts.rows()) return {nullptr, {}, 0};
    int64_t const rows = d.operand.rows;
    if (!d.discrete_scales) return {d.operand.scales, ScaleLayout::of(rows, d.tokens / block), 0};
    int const expert = experts.of(int(token));
    int64_t const start = experts.start(expert), end = experts.end(expert);
    if (token < start || token >= end) return {nullptr, {}, 0};
    return {d.operand.scales + discrete_column_base(start, rows, block), ScaleLayout::of(rows, (end - start) / block),
            start};
  }
};

// (rows, tokens)
template <class Kind>
__global__ void __launch_bounds__(kThreads) dequantise_token_runs(DequantiseTokens const d, Grid const grid) {
  static_assert(kTileColumns == kRowAlignment, "a tile's tokens are one expert's");
  Grid::Place const place = grid.place(blockIdx.x);
  int64_t const token = int64_t(place.across) * kTileColumns;
  TokenScales const s = TokenScales::of(d, token, Kind::kBlock);
  if (!s.base) return;
  Matrix const m{
      static_cast<uint8_t const*>(d.operand.data), s.base, s.layout, d.operand.rows, d.tokens, s.first, d.out};
  dequantise_tile<Kind>(m, int64_t(place.down) * kRunRows, token);
}

// (tokens, rows): a thread has eight rows' scales for eight tokens of one block.
template <class Kind>
__global__ void __launch_bounds__(kThreads) dequantise_token_columns(DequantiseTokens const d, Grid const grid) {
  using Format = typename Kind::Format;
  constexpr int kBlockWarps = kWarps * Kind::kBlock / kTileTokens, kUnits = Kind::kBlock / kBlockWarps;
  Grid::Place const place = grid.place(blockIdx.x);
  int const warp = threadIdx.x / 32;
  int64_t const block_token = int64_t(place.down) * kTileTokens + warp / kBlockWarps * Kind::kBlock;
  int64_t const row = int64_t(place.across) * kTileColumns + threadIdx.x % 32 * 8;
  TokenScales const s = TokenScales::of(d, block_token, Kind::kBlock);
  if (!s.base || row >= d.operand.rows) return;
  int64_t const at = (block_token + warp % kBlockWarps) * d.operand.rows + row, step = kBlockWarps * d.operand.rows;
  auto const* const data = static_cast<uint8_t const*>(d.operand.data) + at;
  typename Format::Codes codes[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    codes[i] = __ldg(reinterpret_cast<typename Format::Codes const*>(data + i * step));
  }
  float scale[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    scale[j] = Kind::scale(__ldg(s.base + s.layout.at(row + j, (block_token - s.first) / Kind::kBlock)));
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = scaled(Format::pair(codes[i], j), scale[2 * j], scale[2 * j + 1]);
    store_words(d.out + at + i * step, w);
  }
}

template <class Problem>
void launch(void (*kernel)(Problem, Grid), Problem const& problem, int64_t across, int64_t down, int64_t experts,
            cudaStream_t stream) {
  int64_t const blocks = across * down * experts;
  if (blocks == 0) return;
  cuda::launch(kernel, uint32_t(blocks), kThreads, 0, stream, problem, Grid{uint32_t(across), uint32_t(down)});
}

// visit(Kind) with the kind of a block-scaled operand.
template <class Visit>
void with_kind(OperandFormat format, DType scale_dtype, int sf_vec_size, Visit const& visit) {
  if (format == OperandFormat::e4m3) return visit(Kind<E4M3, false, 32>{});
  if (format == OperandFormat::e5m2) return visit(Kind<E5M2, false, 32>{});
  if (scale_dtype == DType::float8_e4m3fn) return visit(Kind<E2M1, true, 16>{});
  if (sf_vec_size == 16) return visit(Kind<E2M1, false, 16>{});
  visit(Kind<E2M1, false, 32>{});
}
template <class Kind>
inline constexpr bool kIsFP8 = Kind::Format::kPerByte == 1;

}  // namespace

void dequantise(Dequantise const& a, Dequantise const* b, cudaStream_t stream) {
  with_kind(a.format, a.scale_dtype, a.sf_vec_size, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (kIsFP8<Kind>) {
      if (b && b->transposed) {
        launch<Dequantise>(dequantise_transposed<Kind>, *b, ceil_div<int64_t>(b->columns, kTileK),
                           ceil_div<int64_t>(b->rows_per_expert, kTileN), b->experts, stream);
        b = nullptr;
      }
    }
    auto const grid_of = [](int64_t rows, int64_t columns) {
      return Grid{uint32_t(ceil_div<int64_t>(columns, kTileColumns)), uint32_t(ceil_div<int64_t>(rows, kRunRows))};
    };
    Both both{a, {}, grid_of(a.rows, a.columns), {}, 0};
    both.blocks_of_a = both.grid_a.across * both.grid_a.down;
    uint32_t blocks = both.blocks_of_a;
    if (b) {
      both.b = *b, both.grid_b = grid_of(b->rows_per_expert, b->columns);
      blocks += both.grid_b.across * both.grid_b.down * uint32_t(b->experts);
    }
    cuda::launch(dequantise_rows<Kind>, blocks, kThreads, 0, stream, both);
  });
}

void dequantise_tokens(DequantiseTokens const& d, cudaStream_t stream) {
  with_kind(d.format, d.scale_dtype, d.sf_vec_size, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (kIsFP8<Kind>) {
      if (!d.operand.tokens_contiguous) {
        return launch<DequantiseTokens>(dequantise_token_columns<Kind>, d,
                                        ceil_div<int64_t>(d.operand.rows, kTileColumns), d.tokens / kTileTokens, 1,
                                        stream);
      }
    }
    launch<DequantiseTokens>(dequantise_token_runs<Kind>, d, d.tokens / kTileColumns,
                             ceil_div<int64_t>(d.operand.rows, kRunRows), 1, stream);
  });
}

}  // namespace cudnn_grouped::sm90

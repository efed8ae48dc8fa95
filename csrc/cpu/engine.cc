// The CPU engine: tiles over threads, partial results in slots, and their sums in a fixed order. What it returns does
// not depend on the number of threads.
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../core/arena.h"
#include "../core/block_quantize.h"
#include "../core/engine.h"
#include "../core/scale_layout.h"
#include "kernels.h"

namespace cudnn_grouped::cpu {

#if defined(__x86_64__)
namespace v2 {
Kernels const& kernels();
}
namespace v3 {
Kernels const& kernels();
}
namespace v4 {
Kernels const& kernels();
}
Kernels const& kernels() {
  static Kernels const& best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                       __builtin_cpu_supports("avx512cd")
                                   ? v4::kernels()
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                       __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")
                                   ? v3::kernels()
                                   : v2::kernels();
  return best;
}
#else
namespace base {
Kernels const& kernels();
}
Kernels const& kernels() { return base::kernels(); }
#endif

namespace {

// The quantiser needs FP32 subnormals (a scale of 2^-127). A thread may have been told to flush them, and then results
// would depend on which thread computes a tile.
class WithSubnormals {
#if defined(__x86_64__)
 public:
  WithSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }  // flush-to-zero, denormals-are-zero
  ~WithSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned const before_;
#elif defined(__aarch64__)
 public:
  WithSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ & ~(uint64_t(1) << 24)));
  }
  ~WithSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

template <class Body>
void on_workers(Launch const& launch, Body const& body) {
  launch.parallel_for(launch.workers, [&](int64_t worker) {
    WithSubnormals const guard;
    body(worker);
  });
}

struct Buffers {
  Partials partials;
  Scratch* scratch;

  Buffers(GroupedGemm const& p, int workers, Arena& arena) {
    int64_t const row_tiles = p.m / kTileRows, column_tiles = ceil_div(p.n, p.tile_n);
    partials.column_tiles = column_tiles;
    partials.dprob_slots = grid_n(p.n, p.tile_n, p.cluster_n);
    partials.dprob = p.forward()     ? nullptr
                     : p.dprob_slots ? p.dprob_slots
                                     : arena.take<float>(p.m * partials.dprob_slots);
    partials.dbias = p.dbias ? arena.take<float>(p.m / kDbiasSlotRows * p.d_columns()) : nullptr;
    partials.amax = p.amax ? arena.take<float>(row_tiles * column_tiles * p.amax_width()) : nullptr;
    scratch = arena.take<Scratch>(workers);
  }
};

int64_t workspace_bytes(GroupedGemm const& p, int workers) {
  Arena arena(nullptr);
  Buffers(p, workers, arena);
  return arena.used();
}

int64_t end_of(GroupedGemm const& p, int64_t expert) { return p.single_group ? p.m : p.offsets()[expert]; }
int64_t start_of(GroupedGemm const& p, int64_t expert) { return expert ? end_of(p, expert - 1) : 0; }

Tile tile_at(GroupedGemm const& p, int64_t index, int64_t column_tiles) {
  Tile tile;
  tile.row_tile = index / column_tiles, tile.column_tile = index % column_tiles;
  tile.row = tile.row_tile * kTileRows, tile.column = tile.column_tile * p.tile_n;
  tile.columns = std::min(p.tile_n, p.n - tile.column);
  tile.expert = 0;
  if (!p.single_group) {
    tile.expert = std::upper_bound(p.offsets(), p.offsets() + p.experts, tile.row) - p.offsets();
  }
  tile.expert_start = start_of(p, tile.expert);
  tile.expert_rows = end_of(p, tile.expert) - tile.expert_start;
  return tile;
}

// Rows that belong to no expert are zero in every output, and so are their scales (decisions O1).
void zero_tails(GroupedGemm const& p, int64_t rows) {
  int64_t const row_bytes = p.d_columns() * bytes_of(p.d_dtype), tail = p.m - rows;
  if (p.d_row) std::memset(static_cast<char*>(p.d_row) + rows * row_bytes, 0, tail * row_bytes);
  if (p.d_col && p.d_col != p.d_row) std::memset(static_cast<char*>(p.d_col) + rows * row_bytes, 0, tail * row_bytes);
  if (p.forward() && p.c) {
    int64_t const c_bytes = p.c_columns() * bytes_of(p.c_dtype);
    std::memset(static_cast<char*>(p.c) + rows * c_bytes, 0, tail * c_bytes);
  }
  if (p.dprob && !p.dprob_slots) std::memset(p.dprob + rows, 0, tail * sizeof(float));
}

void zero_scales(GroupedGemm const& p) {
  if (!p.quantised()) return;
  std::memset(p.sfd_row, 0, ScaleLayout::of(p.m, ceil_div(p.d_columns(), kQuantBlock)).bytes());
  std::memset(p.sfd_col, 0, ScaleLayout::of(p.d_columns(), ceil_div(p.m, kQuantBlock)).bytes());
}

void add_dprob(GroupedGemm const& p, Partials const& partials, int64_t rows) {
  if (p.dprob_slots) return;
  for (int64_t row = 0; row < rows; ++row) {
    float sum = 0.f;
    for (int64_t slot = 0; slot < partials.column_tiles; ++slot) {
      sum += partials.dprob[row * partials.dprob_slots + slot];
    }
    p.dprob[row] = p.sums_are_new ? sum : p.dprob[row] + sum;
  }
}

void add_dbias(GroupedGemm const& p, Partials const& partials, Scratch& scratch) {
  int64_t const columns = p.d_columns();
  if (p.dbias_slots) {
    for (int64_t i = 0; i < p.m / kDbiasSlotRows * columns; ++i) p.dbias_slots[i] = encode_bf16(partials.dbias[i]);
    return;
  }
  int64_t const strip = kTileRows * kTileColumns;
  float* sum = scratch.product;
  for (int64_t g = 0; g < p.experts; ++g) {
    for (int64_t first = 0; first < columns; first += strip) {
      int64_t const count = std::min(strip, columns - first);
      std::fill(sum, sum + count, 0.f);
      for (int64_t slot = start_of(p, g) / kDbiasSlotRows; slot < end_of(p, g) / kDbiasSlotRows; ++slot) {
        for (int64_t i = 0; i < count; ++i) sum[i] += partials.dbias[slot * columns + first + i];
      }
      uint16_t* out = p.dbias + g * columns + first;
      for (int64_t i = 0; i < count; ++i) out[i] = encode_bf16((p.sums_are_new ? 0.f : decode_bf16(out[i])) + sum[i]);
    }
  }
}

// max that keeps a NaN of either side
float propagating_max(float a, float b) { return a != a || a > b ? a : b; }

void fold_amax(GroupedGemm const& p, Partials const& partials) {
  for (int64_t g = 0; g < p.experts; ++g) {
    int64_t const first = start_of(p, g) / kTileRows * partials.column_tiles;
    int64_t const last = end_of(p, g) / kTileRows * partials.column_tiles;
    for (int64_t tile = first; tile < last; ++tile) {
      for (int64_t w = 0; w < p.amax_width(); ++w) {
        float& amax = p.amax[g * p.amax_width() + w];
        amax = propagating_max(amax, partials.amax[tile * p.amax_width() + w]);
      }
    }
  }
}

void run(GroupedGemm const& p, Launch const& launch) {
  WithSubnormals const guard;
  Arena arena(launch.workspace);
  Buffers const buffers(p, launch.workers, arena);
  Partials const& partials = buffers.partials;
  int64_t const rows = p.m ? end_of(p, p.experts - 1) : 0;
  zero_tails(p, rows);
  zero_scales(p);
  if (p.m == 0) return;
  if (partials.dprob) std::memset(partials.dprob, 0, p.m * partials.dprob_slots * sizeof(float));
  if (partials.dbias) std::memset(partials.dbias, 0, p.m / kDbiasSlotRows * p.d_columns() * sizeof(float));
  // Each worker claims tiles until none is left; a tile's results do not depend on who computes it.
  int64_t const tiles = rows / kTileRows * partials.column_tiles;
  std::atomic<int64_t> next{0};
  on_workers(launch, [&](int64_t worker) {
    for (int64_t i = next++; i < tiles; i = next++) {
      kernels().tile(p, tile_at(p, i, partials.column_tiles), partials, buffers.scratch[worker]);
    }
  });
  if (partials.dprob) add_dprob(p, partials, rows);
  if (partials.dbias) add_dbias(p, partials, buffers.scratch[0]);
  if (partials.amax) fold_amax(p, partials);
}

int64_t weight_gradient_workspace_bytes(WeightGradient const&, int workers) {
  return workers * int64_t(sizeof(Scratch));
}

void weight_gradient(WeightGradient const& p, Launch const& launch) {
  Scratch* scratch = static_cast<Scratch*>(launch.workspace);
  int64_t const row_tiles = ceil_div(p.a.rows, kTileRows), column_tiles = ceil_div(p.b.rows, kTileColumns);
  int64_t const tiles = p.experts * row_tiles * column_tiles;
  std::atomic<int64_t> next{0};
  on_workers(launch, [&](int64_t worker) {
    for (int64_t i = next++; i < tiles; i = next++) {
      WeightTile tile;
      tile.expert = i / (row_tiles * column_tiles);
      tile.start = tile.expert ? p.offsets()[tile.expert - 1] : 0;
      tile.tokens = p.offsets()[tile.expert] - tile.start;
      tile.row = i / column_tiles % row_tiles * kTileRows, tile.column = i % column_tiles * kTileColumns;
      tile.rows = std::min(kTileRows, p.a.rows - tile.row);
      tile.columns = std::min(kTileColumns, p.b.rows - tile.column);
      kernels().weight_gradient_tile(p, tile, scratch[worker]);
    }
  });
}

template <class Strip>
void over_lines(Launch const& launch, int64_t lines, Strip const& strip) {
  int64_t const step = std::max<int64_t>(1, ceil_div<int64_t>(lines, launch.workers * 8));
  std::atomic<int64_t> next{0};
  on_workers(launch, [&](int64_t) {
    for (int64_t begin = next.fetch_add(step); begin < lines; begin = next.fetch_add(step)) {
      strip(begin, std::min(lines, begin + step));
    }
  });
}

void quantize(QuantizeProblem const& p, Launch const& launch) {
  // Padding bytes of the scales, and whatever belongs to no expert, are zero.
  std::memset(p.scales, 0, p.batch * ScaleLayout::of(p.scale_rows(), p.scale_blocks()).bytes());
  if (p.padded_offsets) std::memset(p.data, 0, p.data_bytes());
  if (p.data_bytes() == 0) return;
  int64_t const bands = p.by_column ? ceil_div(p.rows, p.block) : p.rows;
  over_lines(launch, p.batch * bands, [&](int64_t begin, int64_t end) { kernels().quantize(p, begin, end); });
}

void dequantize(QuantizeProblem const& p, Launch const& launch) {
  if (p.data_bytes() == 0) return;
  over_lines(launch, p.batch * p.rows, [&](int64_t begin, int64_t end) { kernels().dequantize(p, begin, end); });
}

void reduce_dbias(DbiasReduction const& p, Launch const&) {
  WithSubnormals const guard;
  for (int64_t g = 0; g < p.experts; ++g) {
    int64_t const begin = (g ? p.padded_offsets[g - 1] : 0) / kDbiasSlotRows;
    int64_t const end = p.padded_offsets[g] / kDbiasSlotRows;
    for (int64_t n = 0; n < p.columns; ++n) {
      float sum = 0.f;
      for (int64_t slot = begin; slot < end; ++slot) sum += decode_bf16(p.slot_values[slot * p.columns + n]);
      uint16_t& out = p.dbias[g * p.columns + n];
      out = uint16_t(encode_bf16(decode_bf16(out) + sum));
    }
  }
}

bool const registered = [] {
  register_engine({"cpu",
                   Device::Type::cpu,
                   {},
                   workspace_bytes,
                   run,
                   weight_gradient_workspace_bytes,
                   weight_gradient,
                   quantize,
                   dequantize,
                   reduce_dbias});
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::cpu

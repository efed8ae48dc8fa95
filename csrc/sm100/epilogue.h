// The epilogue: eight warps, each with 32 rows and every second chunk of a tile's columns; a thread has a row. A chunk
// is 32 columns of each of gate and up, or of the one saved column. C arrives in a warp's own boxes of shared memory,
// and D leaves from them: nothing here waits for another warp's arithmetic.
#pragma once

#include "../cuda/steps.h"
#include "../cuda/values.h"
#include "mainloop.h"
#include "pair.h"
#include "quantise.h"

namespace cudnn_grouped::sm100 {

inline constexpr int kEpilogueWarps = 8, kWarpRows = 32;
// Of a warp: boxes, and what else it may use behind them; scratch for factors of 64 columns.
inline constexpr int kWarpBoxesBytes = 8192, kScratchBytes = 2 * 64 * 4;

// Of the tile's expert and this thread's row. kHasBeta: the gated operations' backward has one.
template <bool kHasBeta>
struct Scalars {
  float alpha, beta, prob;

  __device__ __forceinline__ Scalars(Params const& p, int expert, int row) {
    alpha = cuda::alpha_of(p, expert);
    beta = kHasBeta && p.beta ? __ldg(p.beta + expert) : 1.f;
    prob = p.prob ? __ldg(p.prob + row) : 1.f;
  }
};

// acc = alpha * acc, and the bias. Columns past N get none.
template <bool kMayHaveBias, int kCount, class ScalarsT>
CG_DEVICE void scale(Params const& p, ScalarsT const& s, int expert, int n, float (&acc)[kCount]) {
  if (!kMayHaveBias || !p.bias) {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      Pair const r = Pair(acc[e], acc[e + 1]) * s.alpha;
      acc[e] = r.lo, acc[e + 1] = r.hi;
    }
    return;
  }
  float const* const bias = p.bias + (int64_t(expert) * p.n + n);
  float const factor = p.prob_on_bias ? s.prob : 1.f;
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    float2 const b = n + e < p.n ? __ldg(reinterpret_cast<float2 const*>(bias + e)) : float2{0.f, 0.f};
    Pair const r = Pair(acc[e], acc[e + 1]) * s.alpha + Pair(b.x, b.y) * factor;
    acc[e] = r.lo, acc[e + 1] = r.hi;
  }
}

// Of a chunk that N ends in: nothing past N takes part in sums and maxima.
template <int kCount>
CG_DEVICE void clear_past(int columns, float (&v)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) v[e] = e < columns ? v[e] : 0.f;
}

// Squared ReLU's two readings (decisions F1) as two loops: a choice for each element would cost two instructions.
enum class Role { none, grad_output, preactivation };

// x: C becomes D. The gated activations are linear in the accumulator: their alpha is part of prob, and what they add
// to dprob lacks it.
template <class Step, Role kRole, class ScalarsT>
CG_DEVICE void apply_backward(typename Step::Activation const& activation, ScalarsT const& s, float const (&acc)[32],
                              float (&x)[32 * Step::kWidth], Pair& dprob) {
  constexpr int kWidth = Step::kWidth;
#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    Scaled c[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) c[w] = {Pair(x[e + w * 32], x[e + w * 32 + 1]), s.beta};
    Pair const r(acc[e], acc[e + 1]), prob = kWidth == 2 ? s.alpha * s.prob : s.prob;
    Gradient<Pair, kWidth> gradient;
    if constexpr (kRole == Role::none) {
      gradient = activation.backward(r, c, prob);
    } else {
      bool const pre = kRole == Role::preactivation;
      gradient = activation.gradient(pre ? c[0].value : r, pre ? r : c[0].value, prob);
    }
    dprob += gradient.prob_term;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) x[e + w * 32] = gradient.x[w].lo, x[e + w * 32 + 1] = gradient.x[w].hi;
  }
}

template <class Step>
CG_DEVICE void apply_forward(typename Step::Activation const& activation, float factor,
                             float const (&x)[32 * Step::kWidth], float (&d)[32]) {
  constexpr int kWidth = Step::kWidth;
#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    Pair c[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) c[w] = Pair(x[e + w * 32], x[e + w * 32 + 1]);
    Pair const y = activation.forward(c) * Pair(factor);
    d[e] = y.lo, d[e + 1] = y.hi;
  }
}

// Boxes and memory ------------------------------------------------------------------------------------------------

// A row of C of 16-bit values from a box, which is swizzled by its width.
template <int kCount>
CG_DEVICE void read_box(bool bf16, uint32_t box, int lane, float (&c)[kCount]) {
  uint32_t const row = swizzled_row<kCount * 2>(box, lane);
  uint4 v[kCount / 8];
#pragma unroll
  for (int unit = 0; unit < kCount / 8; ++unit) {
    v[unit] = ptx::load_shared_16(row ^ unit * 16);
  }
  if (bf16) {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      uint32_t const pair = (&v[e / 8].x)[e % 8 / 2];
      c[e] = ptx::low_bf16(pair), c[e + 1] = ptx::high_bf16(pair);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      float2 const pair = ptx::unpack_fp16((&v[e / 8].x)[e % 8 / 2]);
      c[e] = pair.x, c[e + 1] = pair.y;
    }
  }
}
// And back.
template <int kCount>
CG_DEVICE void write_box(bool bf16, uint32_t box, int lane, float const (&d)[kCount]) {
  uint32_t const row = swizzled_row<kCount * 2>(box, lane);
  uint32_t packed[kCount / 2];
  if (bf16) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) packed[i] = ptx::pack_bf16(d[2 * i], d[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) packed[i] = ptx::pack_fp16(d[2 * i], d[2 * i + 1]);
  }
#pragma unroll
  for (int unit = 0; unit < kCount / 8; ++unit) {
    uint32_t const* const w = packed + unit * 4;
    ptx::store_shared_16(row ^ unit * 16, w[0], w[1], w[2], w[3]);
  }
}

// Dtypes that do not move by TMA: a thread reads and writes its row.
template <int kCount>
CG_DEVICE void read_row(DType dtype, void const* base, int64_t row, int column, int columns, float (&c)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    float2 const v = column + e < columns ? cuda::load_pair(dtype, base, row * columns + column + e) : float2{0.f, 0.f};
    c[e] = v.x, c[e + 1] = v.y;
  }
}
template <int kCount>
CG_DEVICE void write_row(DType dtype, void* base, int64_t row, int column, int columns, float const (&d)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    if (column + e < columns) cuda::store_pair(dtype, base, row * columns + column + e, d[e], d[e + 1]);
  }
}

// Sums of the warp's 32 rows for 32 columns at a time, through 4 KiB of shared memory: a lane sums eight rows of four
// columns, then the four lanes of the same columns add up. Always in the same order.
CG_DEVICE void sum_columns(float const* v, uint32_t box, int lane, float* slot, int columns) {
  uint32_t const row = swizzled_row<128>(box, lane);
#pragma unroll
  for (int unit = 0; unit < 8; ++unit) {
    ptx::store_shared_16(row ^ unit * 16, __float_as_uint(v[unit * 4]), __float_as_uint(v[unit * 4 + 1]),
                         __float_as_uint(v[unit * 4 + 2]), __float_as_uint(v[unit * 4 + 3]));
  }
  __syncwarp();
  Pair low = 0.f, high = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint4 const x = ptx::load_shared_16(swizzled_row<128>(box, lane / 8 * 8 + i) ^ lane % 8 * 16);
    low += Pair(__uint_as_float(x.x), __uint_as_float(x.y)), high += Pair(__uint_as_float(x.z), __uint_as_float(x.w));
  }
#pragma unroll
  for (int lanes = 8; lanes <= 16; lanes *= 2) {
    low += Pair(__shfl_xor_sync(~0u, low.lo, lanes), __shfl_xor_sync(~0u, low.hi, lanes));
    high += Pair(__shfl_xor_sync(~0u, high.lo, lanes), __shfl_xor_sync(~0u, high.hi, lanes));
  }
  if (lane * 4 < columns && lane < 8) {
    *reinterpret_cast<float4*>(slot + lane * 4) = {low.lo, low.hi, high.lo, high.hi};
  }
  __syncwarp();
}

// The chunks of a tile that a half of the warps has: every second one.
struct Chunks {
  int count;
  bool falling;

  __device__ __forceinline__ Chunks(Params const& p, TensorMemory const& memory, Tile const& tile, int t, int columns,
                                    int half) {
    int const all = tile.inside ? ceil_div(min(p.operands.tile_n, p.n - tile.n), columns) : 0;
    count = (all + 1 - half) / 2, falling = memory.overlap && t % 2 == 0;
  }
  __device__ __forceinline__ int at(int i) const { return falling ? count - 1 - i : i; }
};

// The visitor -----------------------------------------------------------------------------------------------------

template <class StepT, bool kQuantised, int kSMsOfTile>
struct Epilogue {
  static constexpr int kSMs = kSMsOfTile;
  using Step = StepT;
  using Activation = typename Step::Activation;
  static constexpr bool kForward = Step::kForward;
  static constexpr int kWidth = Step::kWidth;
  // Columns of a chunk: of C, of the accumulators, of D.
  static constexpr int kC = 32 * kWidth, kAcc = kForward ? kC : 32, kD = kForward ? 32 : kC;
  static constexpr int kBoxBytes = kWarpRows * kC * 2;
  static_assert(Control::kBoxes * kBoxBytes + (kWidth == 1 ? 4096 : 0) <= kWarpBoxesBytes);
  static constexpr int kParts = 256 / kAcc / 2;  // the most chunks that a warp has of a tile
  static constexpr int kAmax = kForward ? 1 : kWidth;
  static constexpr bool kMayBePartial = kWidth == 1;  // N of a gated operation is a multiple of a chunk's columns

  KernelArguments<Activation> const& args;
  Params const& p;
  Control& control;
  uint32_t boxes, scratch;  // this warp's
  int warp, lane, half;
  uint32_t taken = 0;  // chunks so far: C is in the boxes in turn

  __device__ __forceinline__ Epilogue(KernelArguments<Activation> const& args, Control& control, uint32_t boxes,
                                      uint32_t scratch)
      : args(args), p(args.p), control(control) {
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4;
    this->boxes = boxes + warp * kWarpBoxesBytes, this->scratch = scratch + warp * kScratchBytes;
  }

  struct TileState {
    Tile const& tile;
    int row;
    Scalars<kWidth == 2 && !kForward> scalars;
    float norm;
    cuda::ScalePlaces places;
    float dprob[kParts] = {};  // a sum for each chunk, the newest first
    float amax[kAmax] = {};

    __device__ __forceinline__ TileState(Params const& p, Tile const& tile, int warp, int lane)
        : tile(tile),
          row(tile.m + warp % 4 * kWarpRows + lane),
          scalars(p, tile.expert, row),
          norm(kQuantised && p.norm_const ? __ldg(p.norm_const) : 1.f),
          places(p.experts, p.discrete_col_sfd, tile.expert, d_columns(p), row - lane, row) {}
  };

  static __device__ __forceinline__ int c_columns(Params const& p) { return kForward ? p.n : p.n * kWidth; }
  static __device__ __forceinline__ int d_columns(Params const& p) { return kForward ? p.n / kWidth : p.n * kWidth; }

  __device__ __forceinline__ void run(int rank) {
    TensorMemory const memory(p.operands);
    uint32_t const lanes = control.tensor_memory + (warp % 4 * kWarpRows << 16);
    int const multiplier = rank / kSMs * kSMs;  // the block whose thread waits for the accumulators
    Schedule schedule(p, control, rank, true);
    Tile tile;
    for (int t = 0; schedule.next(tile); ++t) {
      TileState state(p, tile, warp, lane);
      Chunks const chunks(p, memory, tile, t, kAcc, half);
      auto release = [&] {
        ptx::tensor_fence_before();
        __syncwarp();
        if (lane == 0) {
          ptx::barrier_arrive_in(ptx::shared_address(&control.accumulators_free[t & 1]), multiplier);
        }
      };
      ptx::barrier_wait(ptx::shared_address(&control.accumulators_full[t & 1]), t >> 1 & 1);
      ptx::tensor_fence_after();
      if (chunks.count == 0) release();
#pragma unroll 1
      for (int i = 0; i < chunks.count; ++i) {
        int const first = (chunks.at(i) * 2 + half) * kAcc;
        float acc[kAcc];
#pragma unroll
        for (int e = 0; e < kAcc; e += 32) ptx::tensor_load(lanes + memory.accumulators(t) + first + e, acc + e);
        ptx::tensor_load_wait();
        // The next tile overwrites what every warp reads first, or the whole of this one.
        if (i == (memory.overlap ? 0 : chunks.count - 1)) release();
        // The same chunk twice: options that are asked about at run time part the code, and what is parted does not
        // overlap.
        if (p.usual) {
          chunk<true>(state, tile.n + first, acc);
        } else {
          chunk<false>(state, tile.n + first, acc);
        }
      }
      finish(state, chunks.falling);
    }
    if (ptx::elect()) ptx::store_wait();
  }

  // kUsual: what is_usual() of engine.cu says.
  template <bool kUsual>
  __device__ __forceinline__ void chunk(TileState& state, int n, float (&acc)[kAcc]) {
    float x[kC];
    bool const partial = kMayBePartial && n + kAcc > p.n;
    if constexpr (kForward) {
      scale<!kUsual>(p, state.scalars, state.tile.expert, n, acc);
      float const factor = !kUsual && p.prob_on_bias ? 1.f : state.scalars.prob;
      float d[kD];
      apply_forward<Step>(args.activation, factor, acc, d);
      if constexpr (kMayBePartial) {
        if (partial) clear_past(p.n - n, d);
      }
      wait_for_stores<kUsual>();
      if (kUsual || p.c_data) {
        if (kUsual || p.stages_c) {
          write_box(kUsual || p.c_dtype == DType::bfloat16, boxes, lane, acc);
        } else {
          write_row(p.c_dtype, p.c_data, state.row, n, p.n, acc);
        }
      }
      write<kUsual>(state, n / kWidth, d, boxes + kBoxBytes, n);
    } else {
      uint32_t const slot = taken % Control::kBoxes, at = boxes + slot * kBoxBytes;
      if (kUsual || p.stages_c) {
        ptx::barrier_wait(ptx::shared_address(&control.box_full[warp][slot]), taken / Control::kBoxes & 1);
        read_box(kUsual || p.c_dtype == DType::bfloat16, at, lane, x);
      } else {
        read_row(p.c_dtype, p.c_data, state.row, n * kWidth, c_columns(p), x);
      }
      Pair dprob = 0.f;
      if constexpr (kWidth == 2) {
        apply_backward<Step, Role::none>(args.activation, state.scalars, acc, x, dprob);
      } else {
        scale<!kUsual>(p, state.scalars, state.tile.expert, n, acc);
        if (partial) clear_past(p.n - n, acc);  // 0 * alpha may be NaN
        if (args.activation.c_is_preactivation) {
          apply_backward<Step, Role::preactivation>(args.activation, state.scalars, acc, x, dprob);
        } else {
          apply_backward<Step, Role::grad_output>(args.activation, state.scalars, acc, x, dprob);
        }
        if (partial) clear_past(p.n - n, x);
      }
#pragma unroll
      for (int i = kParts - 1; i > 0; --i) state.dprob[i] = state.dprob[i - 1];
      state.dprob[0] = dprob.lo + dprob.hi;
      wait_for_stores<kUsual>();
      write<kUsual>(state, n * kWidth, x, at, n);
      ++taken;
    }
  }

  // The last chunk's boxes are free again: for C of the next, or for this one's D.
  template <bool kUsual>
  __device__ __forceinline__ void wait_for_stores() {
    if (ptx::elect()) {
      ptx::store_wait_read();
      if (!kForward && (kUsual || p.stages_c) && taken) {
        ptx::barrier_arrive(ptx::shared_address(&control.box_free[warp][(taken - 1) % Control::kBoxes]));
      }
    }
    __syncwarp();
  }

  template <bool kUsual>
  __device__ __forceinline__ void write(TileState& state, int column, float (&d)[kD], uint32_t at, int n) {
    int const columns = d_columns(p), row0 = state.row - lane;
    if (!kUsual && !kForward && p.epilogue_op != EpilogueOp::identity) {
#pragma unroll
      for (int e = 0; e < kD; ++e) d[e] = apply_epilogue_op(p.epilogue_op, d[e]);
    }
    if ((!kUsual || kQuantised) && !kForward && p.dbias) {
      // A box of gate and up is large enough, and its C has been read.
      uint32_t const sums = kWidth == 1 ? boxes + Control::kBoxes * kBoxBytes : at;
      float* const slot = p.dbias + int64_t(row0 / kWarpRows) * columns + column;
#pragma unroll
      for (int u = 0; u < kD / 32; ++u) sum_columns(d + u * 32, sums, lane, slot + u * 32, columns - column - u * 32);
    }
    float unit_max[kD / 32];
    if (kQuantised || p.amax) {
#pragma unroll
      for (int u = 0; u < kD / 32; ++u) {
        unit_max[u] = max_magnitude_of(d + u * 32);
        float& amax = state.amax[kForward ? 0 : u % kWidth];
        amax = ptx::max_magnitude(amax, unit_max[u]);
      }
    }
    if constexpr (kQuantised) {
      quantise<kUsual>(p, state.places, d, unit_max, state.norm, column, at, scratch, lane);
    } else if (kUsual || p.stages_d) {
      write_box(kUsual || p.d_dtype == DType::bfloat16, at, lane, d);
    } else {
      write_row(p.d_dtype, p.d_data, state.row, column, columns, d);
      if (p.d_col_data) write_row(p.d_dtype, p.d_col_data, state.row, column, columns, d);
    }
    ptx::fence_async();
    __syncwarp();
    if (ptx::elect()) {
      if (kForward && (kUsual || p.stages_c)) ptx::store_2d(&p.c, boxes, n, row0);
      if (kUsual || p.stages_d) {
        ptx::store_2d(&p.d, at, column, row0);
        if (kUsual ? kQuantised : p.d_col_data != nullptr) {
          ptx::store_2d(&p.d_col, kQuantised ? at + kWarpRows * kD : at, column, row0);
        }
      }
      ptx::store_commit();
    }
  }

  // Slots and maxima of the tile: results do not depend on the order of tiles, nor on that of chunks.
  __device__ __forceinline__ void finish(TileState const& state, bool falling) {
    if (!state.tile.inside) return;
    if (!kForward) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum += falling ? state.dprob[i] : state.dprob[kParts - 1 - i];
      if (kWidth == 2) sum *= state.scalars.alpha;
      p.dprob[int64_t(state.tile.n_tile * 2 + half) * p.experts.m + state.row] = sum;
    }
    if (p.amax) {
#pragma unroll
      for (int w = 0; w < kAmax; ++w) {
        float const amax = ptx::warp_max_magnitude(state.amax[w]);
        if (lane == 0) atomicMax(p.amax + state.tile.expert * kAmax + w, __float_as_int(amax));
      }
    }
  }
};

// One thread: brings C into the boxes of the epilogue's warps, in the order in which they take it. The boxes cover less
// time than a load from memory takes, so a tile's C is fetched into L2 at once.
template <class EpilogueT>
__device__ __forceinline__ void load_c(Params const& p, Control& control, uint32_t boxes, int rank) {
  constexpr int kAcc = EpilogueT::kAcc, kWidth = EpilogueT::kWidth, kBoxBytes = EpilogueT::kBoxBytes;
  TensorMemory const memory(p.operands);
  Schedule schedule(p, control, rank);
  // visit(first column of C, half) for each chunk of a tile.
  auto each_chunk = [&](Tile const& tile, int t, auto visit) {
    for (int i = 0, half = 0;; i += half, half ^= 1) {
      Chunks const chunks(p, memory, tile, t, kAcc, half);
      if (i < chunks.count) {
        visit((tile.n + (chunks.at(i) * 2 + half) * kAcc) * kWidth, half);
      } else if (half == 0) {
        return;  // the second half never has more
      }
    }
  };
  auto fetch = [&](Tile const& tile, int t) {
    each_chunk(tile, t, [&](int column, int) {
      for (int quarter = 0; quarter < 4; ++quarter) ptx::prefetch_2d(&p.c, column, tile.m + quarter * kWarpRows);
    });
  };
  Ring box[2] = {Ring(Control::kBoxes), Ring(Control::kBoxes)};  // of each half's warps
  Tile tile;
  for (int t = 0; schedule.next(tile); ++t) {
    fetch(tile, t);
    each_chunk(tile, t, [&](int column, int half) {
      Ring& ring = half ? box[1] : box[0];
      for (int quarter = 0; quarter < 4; ++quarter) {
        int const warp = half * 4 + quarter;
        uint32_t const full = ptx::shared_address(&control.box_full[warp][ring.slot]);
        ptx::barrier_wait(ptx::shared_address(&control.box_free[warp][ring.slot]), ring.phase ^ 1);
        ptx::barrier_expect(full, kBoxBytes);
        ptx::load_once(boxes + warp * kWarpBoxesBytes + ring.slot * kBoxBytes, &p.c, full, column,
                       tile.m + quarter * kWarpRows);
      }
      ring.advance();
    });
  }
}

}  // namespace cudnn_grouped::sm100

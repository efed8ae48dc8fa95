// The main loop: one warp fills a ring of stages with tiles of A and B by TMA, two consumer warpgroups multiply them in
// turn (ping-pong): while one multiplies its 128 x kN tile, the other is in its epilogue.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "ptx.h"

namespace cudnn_grouped::sm90 {

using Major = cute::SM90::GMMA::Major;

inline constexpr int kTileM = 128, kTileK = 64, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
inline constexpr int kSwizzledRow = 128;              // bytes: kTileK values of BF16
inline constexpr int kPanel = kTileK * kSwizzledRow;  // bytes of 64 rows of a K-major tile, or 64 columns of another
inline constexpr int kABytes = kTileM / 64 * kPanel;
inline constexpr int kSharedBytes = 232448;  // a block's limit on compute capability 9.0

// 504 registers for a thread of each of the three warpgroups. Accumulators of 128 x 192 take 192.
inline constexpr int kConsumerRegisters = 240, kProducerRegisters = 504 - 2 * kConsumerRegisters;

enum NamedBarrier { kTurn = 2 };  // and kTurn + 1: which consumer multiplies

template <int kN>
struct Accumulators {
  float value[2][kN / 2];  // [64-row half][...]: wgmma's layout

  // Half h, row h8 * 8 + lane / 4 of the warp's 16, column 8 * group + 2 * (lane % 4) + e.
  __device__ __forceinline__ float& at(int h, int h8, int group, int e) { return value[h][group * 4 + h8 * 2 + e]; }
  // Columns 64 and on become columns 0 and on: a loop over them can be one, where registers have no index. Unrolled,
  // the epilogue outgrows the instruction cache (an H200, K = 2048: 1.4x the time, with the extras' code in it).
  __device__ __forceinline__ void next_columns() {
#pragma unroll
    for (int i = 0; i < kN / 2 - 32; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("mov.b32 %0, %1;"
                     : "=f"(value[h][i])
                     : "f"(value[h][i + 32]));  // here, and not before the arithmetic
      }
    }
  }
};

template <int kN, Major kA, Major kB>
struct Instruction;
template <Major kA, Major kB>
struct Instruction<128, kA, kB> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB> {};
template <Major kA, Major kB>
struct Instruction<192, kA, kB> : cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<kA, kB> {};

template <int kN, Major kA, Major kB, size_t... kIndex>
CG_DEVICE void multiply(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate, std::index_sequence<kIndex...>) {
  using cute::SM90::GMMA::ScaleOut;
  Instruction<kN, kA, kB>::fma(a, b, d[kIndex]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}

// PTX ISA, "Matrix descriptor": 128-byte swizzle. K-major: groups of 8 rows are 1024 bytes apart. MN-major: the same
// for groups of 8 along K; panels of 64 along M or N are kPanel apart.
CG_DEVICE uint64_t descriptor(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(kPanel >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}

// The ring of stages, walked by the producer and by each consumer with its own position.
template <int kN, int kStages>
struct Ring {
  static constexpr int kBBytes = kN * kSwizzledRow, kStageBytes = kABytes + kBBytes;
  static constexpr int kBytes = kStages * kStageBytes;

  uint32_t base, barriers;  // shared addresses; barriers: kStages full, then kStages empty
  int stage = 0;
  uint32_t phase = 0;
  int last_stage = 0;

  __device__ __forceinline__ uint32_t a() const { return base + stage * kABytes; }
  __device__ __forceinline__ uint32_t b() const { return base + kStages * kABytes + stage * kBBytes; }
  __device__ __forceinline__ uint32_t full(int s) const { return barriers + 8 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return barriers + 8 * (kStages + s); }

  __device__ __forceinline__ void init() const {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), 4);  // one arrival of each warp of the consumer
    }
  }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void move_to(uint32_t position) {
    stage = int(position % kStages), phase = (position / kStages) & 1;
  }

  // The producer's part of a step: waits for the stage and tells its barrier how much will come. Returns the barrier.
  __device__ __forceinline__ uint32_t acquire() const {
    ptx::barrier_wait(empty(stage), phase ^ 1);
    ptx::barrier_expect(full(stage), kStageBytes);
    return full(stage);
  }

  // One wgmma group stays in flight; a stage is released when the group after it has been issued.
  template <Major kA, Major kB>
  __device__ __forceinline__ void multiply_tile(Accumulators<kN>& acc, int k_tiles, int lane) {
    constexpr uint64_t kStepA = kA == Major::K ? 2 : 16 * kSwizzledRow / 16,
                       kStepB = kB == Major::K ? 2 : 16 * kSwizzledRow / 16;
    int previous = 0;
    for (int k = 0; k < k_tiles; ++k) {
      ptx::barrier_wait(full(stage), phase);
      uint64_t const da = descriptor(a()), db = descriptor(b());
      ptx::multiply_fence();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply<kN, kA, kB>(acc.value[half], da + half * (kPanel >> 4) + step * kStepA, db + step * kStepB,
                               (k | step) != 0, std::make_index_sequence<kN / 2>{});
        }
      }
      ptx::multiply_commit();
      ptx::multiply_wait<1>();
      if (k > 0 && lane == 0) ptx::barrier_arrive(empty(previous));
      previous = stage;
      advance();
    }
    last_stage = previous;
  }
  __device__ __forceinline__ void finish(Accumulators<kN>& acc, int k_tiles, int lane) {
    ptx::multiply_wait<0>();
    if (k_tiles > 0 && lane == 0) ptx::barrier_arrive(empty(last_stage));
#pragma unroll
    for (int half = 0; half < 2; ++half) ptx::hold(acc.value[half]);
  }
};

// The consumers take turns. Besides keeping one multiplying while the other is in its epilogue, this keeps the phases
// of the ring unambiguous: a consumer more than one ring behind would take a barrier of two phases ago for done.
CG_DEVICE void wait_turn(int consumer) { ptx::named_sync(kTurn + consumer, 256); }
CG_DEVICE void give_turn(int consumer) { ptx::named_arrive(kTurn + (consumer ^ 1), 256); }

}  // namespace cudnn_grouped::sm90

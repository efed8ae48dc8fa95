// Boxes of shared memory between a consumer warpgroup and its mover warp. A box is 128 rows x 128 bytes: 64 columns of
// BF16 in the 128-byte swizzle. The mover brings C into a box, or just hands it over; the consumer fills it, in the
// backward over the C that it has read; the mover stores it and hands it over again.
#pragma once

#include "steps.h"

namespace cudnn_grouped::sm90 {

inline constexpr int kBoxBytes = kTileM * kSwizzledRow;

// Behind the boxes a consumer's warp has room for what it needs of its tile now and then: accumulators take its
// registers.
inline constexpr int kNoteBytes = 32 * 4 + 32;  // prob of its rows; the tile; places of scale factors

template <int kCount>
struct Boxes {
  static constexpr int kNotes = kConsumers * kCount * kBoxBytes, kBytes = kNotes + kConsumers * 4 * kNoteBytes;
  static constexpr int kBarriers = 2 * kConsumers * kCount;

  uint32_t base, barriers;
  int consumer, slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ uint32_t box() const { return base + (consumer * kCount + slot) * kBoxBytes; }
  __device__ __forceinline__ uint32_t notes(int warp) const {
    return base + kNotes + (consumer * 4 + warp) * kNoteBytes;
  }
  __device__ __forceinline__ uint32_t ready() const { return barriers + 8 * (consumer * kCount + slot); }
  __device__ __forceinline__ uint32_t filled() const {
    return barriers + 8 * ((kConsumers + consumer) * kCount + slot);
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kConsumers * kCount; ++i) {
      ptx::barrier_init(barriers + 8 * i, 1);
      ptx::barrier_init(barriers + 8 * (kConsumers * kCount + i), 4);
    }
  }
  __device__ __forceinline__ void advance() {
    if (++slot == kCount) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ Boxes other() const { return {base, barriers, consumer, slot ^ 1, phase}; }
  // The consumer's side.
  __device__ __forceinline__ void wait() const { ptx::barrier_wait(ready(), phase); }
  __device__ __forceinline__ void hand_over(int lane) const {
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(filled());
  }
};

// A consumer's chunks in order, tile by tile.
template <class Epilogue>
struct BoxWalk {
  using Step = typename Epilogue::Step;
  Schedule<Epilogue> const& schedule;
  int index, column, chunks = 0, row = 0;

  __device__ __forceinline__ BoxWalk(Schedule<Epilogue> const& schedule, int consumer)
      : schedule(schedule), index(blockIdx.x + consumer * gridDim.x) {
    enter();
  }
  __device__ __forceinline__ bool valid() const { return index < schedule.count; }
  __device__ __forceinline__ void enter() {
    if (!valid()) return;
    Tile const tile = schedule.at(index);
    column = tile.n, row = tile.m;
    chunks = ceil_div(min(Epilogue::kN, schedule.p.n - tile.n), Epilogue::kChunk);
  }
  __device__ __forceinline__ void next() {
    column += Epilogue::kChunk;
    if (--chunks == 0) index += kConsumers * gridDim.x, enter();
  }
};

// The mover's loop. A chunk takes one box; or, where Epilogue::two_boxes(), all of them: the first for C, the second
// for D.
template <class Epilogue>
__device__ __forceinline__ void move_boxes(Params const& p, uint32_t m_tiles_at, Boxes<Epilogue::kBoxes> boxes) {
  static_assert(Epilogue::kBoxes == 2);
  Schedule<Epilogue> const schedule(p, m_tiles_at);
  BoxWalk<Epilogue> walk(schedule, boxes.consumer);
  bool const two = Epilogue::two_boxes(p);
  int2 held[2] = {};  // column and row of what a box holds
  auto store = [&](int step) {
    boxes.slot = step & 1;
    ptx::barrier_wait(boxes.filled(), step >> 1 & 1);
    int2 const at = step & 1 ? held[1] : held[0];
    Epilogue::store(p, two && !(step & 1), at.x, at.y, boxes.box());
    ptx::store_commit();
  };
  int step = 0;
  for (; walk.valid(); ++step) {
    if (step >= 2) {
      store(step - 2);
      ptx::store_wait_read();
    }
    boxes.slot = step & 1;
    if constexpr (Epilogue::kLoadsC) {
      ptx::barrier_expect(boxes.ready(), kBoxBytes);
      ptx::load_once(boxes.box(), &p.c, boxes.ready(), walk.column * Epilogue::Step::kWidth, walk.row);
    } else {
      ptx::barrier_arrive(boxes.ready());
    }
    (step & 1 ? held[1] : held[0]) = {walk.column, walk.row};
    if (!two || step & 1) walk.next();
  }
  for (int last = max(step - 2, 0); last < step; ++last) store(last);
  ptx::store_wait();
}

}  // namespace cudnn_grouped::sm90

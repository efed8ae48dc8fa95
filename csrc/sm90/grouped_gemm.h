// The kernel: a producer warpgroup (warp 0 loads A and B, warps 1 and 2 move C and D, one for each consumer) and two
// consumer warpgroups that take alternate tiles. One block per SM; tiles go round robin over the blocks.
#pragma once

#include "../cuda/launch.h"
#include "epilogue.h"

namespace cudnn_grouped::sm90 {

template <class Epilogue>
struct SharedLayout {
  using RingT = Ring<Epilogue::kN, Epilogue::kStages>;
  using BoxesT = Boxes<Epilogue::kBoxes>;
  static constexpr int kBarriers = RingT::kBytes + BoxesT::kBytes;
  static constexpr int kMTiles = kBarriers + 8 * (2 * Epilogue::kStages + BoxesT::kBarriers);
  static constexpr int kBytes = kMTiles + 4;
  static_assert(kBytes <= kSharedBytes);
};

template <class Epilogue>
__device__ __forceinline__ void load_operands(Params const& p, uint32_t m_tiles_at,
                                              Ring<Epilogue::kN, Epilogue::kStages> ring) {
  constexpr int kN = Epilogue::kN;
  int acquired = -1;
  for (int index = blockIdx.x;; index += gridDim.x) {
    Schedule<Epilogue> const schedule(p, m_tiles_at);  // anew: few registers
    if (index >= schedule.count) return;
    Tile const tile = schedule.at(index);
    CUtensorMap const* b = &p.b;
    if (p.expert_maps) {
      b = p.expert_maps + tile.expert;
      if (acquired != tile.expert) ptx::acquire_map(b);
      acquired = tile.expert;
    }
    int const expert = p.expert_maps ? 0 : tile.expert;
    for (int k = 0; k < p.k; k += kTileK) {
      uint32_t const full = ring.acquire();
      if constexpr (Epilogue::kInterleaved) {
        ptx::load(ring.a(), &p.a, full, k, 0, tile.m / 32, 0);
        ptx::load(ring.b(), b, full, k, 0, 0, 0, (expert * ceil_div(p.n, kUnit)) + tile.n / kUnit);
      } else {
        ptx::load(ring.a(), &p.a, full, k, tile.m);
        if (p.b_is_n_major) {
          for (int panel = 0; panel < kN / 64; ++panel) {
            ptx::load(ring.b() + panel * kPanel, b, full, tile.n + panel * 64, k, expert);
          }
        } else {
          ptx::load(ring.b(), b, full, k, tile.n, expert);
        }
      }
      ring.advance();
    }
  }
}

template <class Epilogue>
__device__ __forceinline__ void consume(KernelArguments<typename Epilogue::Step::Activation> const& args,
                                        uint32_t m_tiles_at, Ring<Epilogue::kN, Epilogue::kStages> ring,
                                        Boxes<Epilogue::kBoxes> boxes) {
  Params const& p = args.p;
  int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, consumer = boxes.consumer;
  int const k_tiles = ceil_div(p.k, kTileK);
  if (consumer == 1) give_turn(1);
  for (int turn = consumer;; turn += kConsumers) {
    Schedule<Epilogue> const schedule(p, m_tiles_at);
    int const index = blockIdx.x + turn * gridDim.x;
    if (index >= schedule.count) return;
    Tile const tile = schedule.at(index);
    Accumulators<Epilogue::kN> acc;
    wait_turn(consumer);
    ring.move_to(uint32_t(turn) * k_tiles);
    if (!Epilogue::kInterleaved && p.b_is_n_major) {
      ring.template multiply_tile<Major::K, Major::MN>(acc, k_tiles, lane);
    } else {
      ring.template multiply_tile<Major::K, Major::K>(acc, k_tiles, lane);
    }
    give_turn(consumer);
    ring.finish(acc, k_tiles, lane);
    Epilogue::run(args, tile, acc, boxes, warp, lane);
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(__grid_constant__ KernelArguments<typename Epilogue::Step::Activation> const args) {
  alignas(1024) extern __shared__ uint8_t shared[];  // the 128-byte swizzle repeats every 1024 bytes
  using Layout = SharedLayout<Epilogue>;
  uint32_t const base = ptx::shared_address(shared), barriers = base + Layout::kBarriers;
  uint32_t const m_tiles_at = base + Layout::kMTiles;
  typename Layout::RingT const ring{base, barriers};
  typename Layout::BoxesT boxes{base + Layout::RingT::kBytes, barriers + 8 * 2 * Epilogue::kStages, 0};
  if (threadIdx.x == 0) {
    ring.init();
    boxes.init();
    ptx::barrier_init_fence();
    ptx::store_shared_4(m_tiles_at, args.p.experts.rows() / kTileM);
  }
  __syncthreads();
  auto const uniform_warp = [] { return __shfl_sync(~0u, threadIdx.x / 32, 0); };
  if (uniform_warp() < 4) {
    ptx::fewer_registers<kProducerRegisters>();
    int const warp = uniform_warp();
    if (warp == 0) {
      if (ptx::elect()) load_operands<Epilogue>(args.p, m_tiles_at, ring);
    } else if constexpr (Epilogue::kBoxes > 0) {
      boxes.consumer = warp - 1;
      if (warp <= kConsumers && ptx::elect()) move_boxes<Epilogue>(args.p, m_tiles_at, boxes);
    }
    __syncwarp();
  } else {
    ptx::more_registers<kConsumerRegisters>();
    boxes.consumer = uniform_warp() / 4 - 1;
    consume<Epilogue>(args, m_tiles_at, ring, boxes);
  }
}

}  // namespace cudnn_grouped::sm90

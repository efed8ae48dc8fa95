// The kernel: eight epilogue warps, a warp that multiplies, one that loads A and B, one that loads C, and one that asks
// for tiles. A block per SM; a pair of blocks (kSMs = 2) multiplies tiles of 256 rows together.
#pragma once

#include "epilogue.h"

namespace cudnn_grouped::sm100 {

inline constexpr int kThreads = 32 * (kEpilogueWarps + 4);
// 65,536 registers of an SM: 168 for each thread at the launch, then shared out by warpgroups.
inline constexpr int kLaunchRegisters = 168, kEpilogueRegisters = 200, kOtherRegisters = 96;
static_assert(kThreads * kLaunchRegisters >= 256 * kEpilogueRegisters + 128 * kOtherRegisters);

// Dynamic shared memory: boxes, scratch, control, then the stages.
inline constexpr int kSharedBytes = 232448;  // a block's limit on compute capability 10.0
inline constexpr int kScratchAt = kEpilogueWarps * kWarpBoxesBytes;
inline constexpr int kControlAt = kScratchAt + kEpilogueWarps * kScratchBytes;
inline constexpr int kStagesAt = (kControlAt + int(sizeof(Control)) + 1023) / 1024 * 1024;

__device__ __forceinline__ void init_barriers(Params const& p, Control& control, int sms, int empty_arrivals,
                                              bool loads_c) {
  auto init = [](uint64_t& barrier, int arrivals) { ptx::barrier_init(ptx::shared_address(&barrier), arrivals); };
  for (int i = 0; i < p.operands.stages; ++i) init(control.full[i], 1), init(control.empty[i], empty_arrivals);
  for (int i = 0; i < 2; ++i) {
    init(control.accumulators_full[i], 1), init(control.accumulators_free[i], kEpilogueWarps * sms);
  }
  for (int i = 0; i < kEpilogueWarps * Control::kBoxes; ++i) {
    init(control.box_full[0][i], 1), init(control.box_free[0][i], 1);
  }
  int const blocks = p.cluster_m * p.cluster_n;
  for (int i = 0; i < Control::kAnswers; ++i) {
    init(control.answer_full[i], 1);
    init(control.answer_free[i], blocks * (kEpilogueWarps + 1 + loads_c) + blocks / sms);
  }
  ptx::barrier_init_fence();
}

template <class EpilogueT>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(__grid_constant__ KernelArguments<typename EpilogueT::Activation> const args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  constexpr int kSMs = EpilogueT::kSMs;
  Params const& p = args.p;
  Control& control = *reinterpret_cast<Control*>(memory + kControlAt);
  uint32_t const base = ptx::shared_address(memory);
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = int(ptx::cluster_rank());
  bool const loads_c = !EpilogueT::kForward && p.stages_c;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&p.a);
    if (!p.b_maps) ptx::prefetch_map(&p.b);
    if (p.stages_c) ptx::prefetch_map(&p.c);
    if (p.stages_d) ptx::prefetch_map(&p.d);
  }
  if (warp == kEpilogueWarps) {
    ptx::allocate_tensor_memory<kSMs>(ptx::shared_address(&control.tensor_memory), TensorMemory::kColumns);
    if (ptx::elect()) init_barriers(p, control, kSMs, Sharing::of<kSMs>(p, rank).empty_arrivals, loads_c);
    __syncwarp();
  }
  ptx::tensor_fence_before();
  ptx::cluster_sync();
  ptx::tensor_fence_after();
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x == 0) control.m_clusters = p.experts.rows() / (kBlockM * p.cluster_m);
  __syncthreads();

  if (warp < kEpilogueWarps) {
    ptx::more_registers<kEpilogueRegisters>();
    EpilogueT(args, control, base, base + kScratchAt).run(rank);
  } else {
    ptx::fewer_registers<kOtherRegisters>();
    Stages const stages(p.operands, base + kStagesAt);
    if (ptx::elect()) {
      switch (warp - kEpilogueWarps) {
        case 0:
          if (kSMs == 1 || rank % 2 == 0) multiply_tiles<kSMs>(p, control, stages, rank);
          break;
        case 1:
          load_operands<kSMs>(p, control, stages, rank);
          break;
        case 2:
          if (loads_c) load_c<EpilogueT>(p, control, base, rank);
          break;
        default:
          if (p.dynamic && rank == 0) ask_for_tiles(p, control);
      }
    }
    __syncwarp();
  }
  ptx::let_later_kernels_start();
  ptx::tensor_fence_before();
  ptx::cluster_sync();  // a block of the cluster may still write to, or read from, this one
  if (warp == kEpilogueWarps) ptx::free_tensor_memory<kSMs>(control.tensor_memory, TensorMemory::kColumns);
}

}  // namespace cudnn_grouped::sm100

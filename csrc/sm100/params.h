// What a grouped GEMM kernel receives, and its order of tiles.
#pragma once

#include <cuda.h>

#include "../cuda/epilogue_params.h"
#include "ptx.h"

namespace cudnn_grouped::sm100 {

using cuda::Experts;

inline constexpr int kBlockM = 128;    // rows of a block's accumulators; a pair of blocks multiplies 256
inline constexpr int kRowBytes = 128;  // of K in a stage: one row of the 128-byte swizzle

// tcgen05.mma's kind, with the length of the blocks that share a scale factor.
enum class Multiply : int { f16, mxf8f6f4, mxf4_block32, mxf4_block16 };

// How a stage is filled and multiplied. A stage has kRowBytes of K, which four instructions multiply.
struct Operands {
  Multiply multiply;
  uint32_t instruction;  // its descriptor, without the ids of scale factors
  int stages, stage_k;   // stage_k: elements of K in a stage
  int stage_columns;     // the same as the tensor maps count them: FP4 in bytes
  int tile_n, b_rows;    // b_rows: of B in a block, half of the tile's with a pair of blocks
  int scale_atoms;       // of a stage along K
  bool b_is_n_major;
  uint64_t b_descriptor;                         // of shared memory, without the address
  int b_step;                                    // from one instruction's B to the next, in units of 16 bytes
  int b_panels, b_panel_bytes, b_panel_columns;  // N-major: boxes of up to 128 bytes of N
};

struct Params : cuda::EpilogueParams {  // dprob: slots [N tile][half][m]
  CUtensorMap a, b, sfa, sfb, c, d, d_col;
  CUtensorMap const *b_maps, *sfb_maps;  // a map per expert, in global memory; null: b and sfb cover all experts
  Operands operands;
  int cluster_m, cluster_n, n_clusters;
  int group_m;   // clusters along M that share a panel of B in L2
  bool dynamic;  // tiles are handed out as blocks become free

  float reciprocal_largest;  // of an FP8 D's format
  bool stages_c, stages_d;   // they move by TMA
  bool usual;                // the epilogue has less to ask
};

template <class Activation>
struct KernelArguments {
  Params p;
  Activation activation;
};

// A block's part of its cluster's tile.
struct Tile {
  int m, n, n_tile, expert;
  bool inside;  // false for a block whose columns are past N: it only keeps the cluster's step
};

// Places of what is not a tile in shared memory. Every barrier is at the same place in all blocks of a cluster.
struct Control {
  static constexpr int kMostStages = 8, kBoxes = 2, kAnswers = 2;
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t accumulators_full[2], accumulators_free[2];
  uint64_t box_full[8][kBoxes], box_free[8][kBoxes];  // of each epilogue warp
  uint64_t answer_full[kAnswers], answer_free[kAnswers];
  uint4 answer[kAnswers];
  uint32_t tensor_memory;
  int m_clusters;  // known from the offsets alone
};

// The tiles of a block, in order. Each role walks them by itself.
//   static: round robin over the clusters
//   dynamic: the first is the cluster's own place in the grid, the others are places of clusters that have not begun,
//   which one warp asks for (ask_for_tiles)
class Schedule {
 public:
  // whole_warp: all lanes of a warp walk together; else one thread does.
  __device__ __forceinline__ Schedule(Params const& p, Control& control, int rank, bool whole_warp = false)
      : p_(p), control_(control), rank_(rank), whole_warp_(whole_warp) {}

  // Whether there is another tile.
  __device__ __forceinline__ bool next(Tile& tile) {
    if (index_ == kBefore) {
      index_ = ptx::cluster_index();
    } else if (!p_.dynamic) {
      index_ += ptx::cluster_count();
    } else {
      index_ = next_answer();
    }
    // Places past the last expert's rows: their clusters have nothing to do.
    while (p_.dynamic && index_ >= count()) index_ = next_answer();
    if (index_ == kNone || index_ >= count()) return false;
    place(tile);
    return true;
  }

 private:
  static constexpr int kBefore = -2, kNone = -1;

  __device__ __forceinline__ int count() const { return control_.m_clusters * p_.n_clusters; }
  __device__ __forceinline__ int next_answer() {
    uint32_t const slot = answers_ % Control::kAnswers, phase = answers_ / Control::kAnswers & 1;
    ptx::barrier_wait(ptx::shared_address(&control_.answer_full[slot]), phase);
    int const block = ptx::answered_block(ptx::shared_address(&control_.answer[slot]));
    ptx::fence_async();
    if (whole_warp_) __syncwarp();
    if (!whole_warp_ || threadIdx.x % 32 == 0) {
      ptx::barrier_arrive_in(ptx::shared_address(&control_.answer_free[slot]), 0);
    }
    ++answers_;
    return block < 0 ? kNone : block / (p_.cluster_m * p_.cluster_n);
  }
  // Groups of group_m clusters along M; inside a group M runs fastest, so that the clusters that run together share a
  // few panels of A and of B in L2.
  __device__ __forceinline__ void place(Tile& tile) const {
    int const per_group = p_.group_m * p_.n_clusters, g = index_ / per_group, rest = index_ - g * per_group;
    int const rows = min(p_.group_m, control_.m_clusters - g * p_.group_m), n = rest / rows;
    int const m = g * p_.group_m + rest - n * rows;
    int const block_n = rank_ >> (p_.cluster_m - 1), block_m = rank_ & (p_.cluster_m - 1);  // cluster_m is 1 or 2
    tile.m = (m * p_.cluster_m + block_m) * kBlockM;
    tile.n_tile = n * p_.cluster_n + block_n;
    tile.n = tile.n_tile * p_.operands.tile_n;
    tile.inside = tile.n < p_.n;
    tile.expert = p_.experts.of(tile.m);
  }

  Params const& p_;
  Control& control_;
  int rank_, index_ = kBefore;
  uint32_t answers_ = 0;
  bool whole_warp_;
};

// A position in a ring of barriers.
struct Ring {
  int count, slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ explicit Ring(int count) : count(count) {}
  __device__ __forceinline__ void advance() {
    if (++slot == count) slot = 0, phase ^= 1;
  }
};

}  // namespace cudnn_grouped::sm100

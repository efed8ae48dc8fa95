// What a grouped GEMM kernel receives, and its order of tiles.
#pragma once

#include <cuda.h>

#include "../cuda/epilogue_params.h"
#include "mainloop.h"

namespace cudnn_grouped::sm90 {

using cuda::Experts, cuda::kSlotRows;

struct Params : cuda::EpilogueParams {  // dprob: slots [N tile][m]
  CUtensorMap a, b, c, d, d_col;
  CUtensorMap const* expert_maps;  // a map of B per expert, in global memory; null: b covers all experts
  int group_m;
  bool b_is_n_major;
};

template <class Activation>
struct KernelArguments {
  Params p;
  Activation activation;
};

struct Tile {
  int m, n, n_tile, expert;
};

// Static round robin over the blocks. Groups of group_m M tiles; inside a group M runs fastest, so that the blocks that
// run together share a few panels of A and of B in L2. The number of M tiles is known from the offsets alone; it waits
// in shared memory, because a consumer has no register for it while it multiplies.
template <int kN>
struct Schedule {
  Experts experts;
  int m_tiles, n_tiles, group, count;

  __device__ __forceinline__ Schedule(Params const& p, uint32_t m_tiles_at) : experts(p.experts), group(p.group_m) {
    m_tiles = int(ptx::load_shared_4(m_tiles_at));
    n_tiles = ceil_div(p.n, kN);
    count = m_tiles * n_tiles;
  }
  __device__ __forceinline__ Tile at(int index) const {
    int const per_group = group * n_tiles, g = index / per_group, rest = index - g * per_group;
    int const rows = min(group, m_tiles - g * group);
    Tile tile;
    tile.n_tile = rest / rows;
    tile.n = tile.n_tile * kN;
    tile.m = (g * group + rest % rows) * kTileM;
    tile.expert = experts.of(tile.m);
    return tile;
  }
};

}  // namespace cudnn_grouped::sm90

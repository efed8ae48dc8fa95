// What a grouped GEMM kernel receives, and the tiles of a block.
#pragma once

#include <cuda.h>

#include "../cuda/epilogue_params.h"
#include "mainloop.h"
#include "tile_order.h"

namespace cudnn_grouped::sm90 {

using cuda::Experts, cuda::kSlotRows;

struct Params : cuda::EpilogueParams {  // dprob: slots [N tile][m]
  CUtensorMap a, b, c, d, d_col;
  CUtensorMap const* expert_maps;  // a map of B per expert, in global memory; null: b covers all experts
  TileOrder order;
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

// Static round robin over the blocks. The number of M tiles is known from the offsets alone; it waits in shared memory,
// because a consumer has no register for it while it multiplies.
template <class Epilogue>
struct Schedule {
  Params const& p;
  int m_tiles, n_tiles, count;

  __device__ __forceinline__ Schedule(Params const& p, uint32_t m_tiles_at) : p(p) {
    m_tiles = int(ptx::load_shared_4(m_tiles_at));
    n_tiles = ceil_div(p.n, Epilogue::kN);
    count = m_tiles * n_tiles;
  }
  __device__ __forceinline__ Tile at(int index) const {
    auto const place = p.order.place_of(index, m_tiles, n_tiles);
    int const m = place.row * kTileM;
    return {m, place.column * Epilogue::kN, place.column, p.experts.of(m)};
  }
};

}  // namespace cudnn_grouped::sm90

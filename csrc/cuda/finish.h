// What comes before and after a GEMM kernel: tables of addresses and of tensor maps, sums of slots in a fixed order,
// and zeros for the rows that belong to no expert (decisions O1).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <vector>

#include "experts.h"

namespace cudnn_grouped::cuda {

// One kernel does all of it: a second one would wait for the first.
struct Finish {
  Experts experts;
  int n_tiles;  // slots of dprob, [N tile][m]
  float const* dprob_slots;
  float* dprob;
  bool is_new;                  // dprob and dbias: else they are accumulated onto
  float* documented_dprob;      // in its place: the documented workspace, (m, documented_slots)
  int documented_slots, parts;  // parts: as many N tiles make one of its slots
  float const* dbias_slots;     // of kSlotRows rows, [m / kSlotRows][d_columns], or null
  uint16_t* dbias;
  uint16_t* documented_dbias;  // in its place: the documented workspace, sums of four slots
  struct Rows {
    void* data;
    int64_t row_bytes;
  } rows[3];  // D, D_col, C: zero past the last expert
  int64_t d_columns;
  uint8_t *sfd_row, *sfd_col;
  bool discrete_col_sfd;
};
void finish(Finish const&, int blocks, cudaStream_t);

// FP32, FP16 or BF16 values to FP32.
void widen(void const* from, DType dtype, float* to, int64_t count, cudaStream_t);

// Host addresses to device memory, by kernel arguments: nothing that a stream capture could not hold.
void write_addresses(std::vector<int64_t> const& addresses, int64_t* to, cudaStream_t);

// maps[g] = the map with expert g's address; `none` for an expert without rows or without a usable address.
void make_expert_maps(CUtensorMap const& map, CUtensorMap const& none, int64_t const* addresses, Experts const&,
                      CUtensorMap* maps, cudaStream_t);

}  // namespace cudnn_grouped::cuda

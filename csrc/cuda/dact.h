// dact: the activation's backward at a given value of the GEMM. No engine multiplies anything for it.
#pragma once

#include <cuda_runtime.h>

#include "../core/problem.h"

namespace cudnn_grouped::cuda {

inline constexpr int kDactColumns = 64;  // of the value, behind one slot of dprob

// D, and slots: of dprob, [column / kDactColumns][m]; of dbias, [m / kSlotRows][columns of D], or null.
void dact(GroupedGemm const& problem, float* dprob_slots, float* dbias_slots, cudaStream_t stream);

}  // namespace cudnn_grouped::cuda

// What every engine does around its GEMM, for the outputs that a problem has.
#pragma once

#include "epilogue_params.h"
#include "finish.h"

namespace cudnn_grouped::cuda {

Experts experts_of(GroupedGemm const&);

// The current device's number of SMs. Binds its context to this thread: a new one has none, and tensor maps are the
// driver's.
int bind_device();

// Whether the bias needs a copy: it is read as aligned pairs of FP32.
bool copies_bias(GroupedGemm const&);

// bias: in FP32, where it was copied; dprob, dbias: slots.
EpilogueParams epilogue_params_of(GroupedGemm const&, float const* bias, float* dprob, float* dbias);

// Before the GEMM: padding of the scale tensors is zero. Tails are finish_outputs's.
void zero_padding(GroupedGemm const&, cudaStream_t);

// After it: sums of slots, and zeros. slots: of dprob, or 0; parts: as many make one slot of the documented workspace.
void finish_outputs(GroupedGemm const&, float const* dprob, int slots, int parts, float const* dbias, int blocks,
                    cudaStream_t);

}  // namespace cudnn_grouped::cuda

// What every engine does around its GEMM, for the outputs that a problem has.
#pragma once

#include "finish.h"

namespace cudnn_grouped::cuda {

Experts experts_of(GroupedGemm const&);

// The current device's number of SMs. Binds its context to this thread: a new one has none, and tensor maps are the
// driver's.
int bind_device();

// Whether the bias needs a copy: it is read as aligned pairs of FP32.
bool copies_bias(GroupedGemm const&);

// Before the GEMM: padding of the scale tensors is zero. Tails are finish()'s.
void zero_padding(GroupedGemm const&, cudaStream_t);

// What finish() does after it. slots: of dprob, or 0; parts: as many make one slot of the documented workspace.
Finish finish_of(GroupedGemm const&, float const* dprob_slots, int slots, int parts);

}  // namespace cudnn_grouped::cuda

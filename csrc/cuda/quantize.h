// The block quantiser and the reduction of dbias slots on a CUDA device: the operators quantize, dequantize and
// reduce_dbias of every GPU engine. Same results as the CPU engine, bit for bit.
//
// Every pointer of the problem is a device address, padded_offsets and norm_const too: nothing is read on the host.
// launch.stream is a cudaStream_t; launch.workspace is not used.
#pragma once

#include "../core/engine.h"

namespace cudnn_grouped::cuda {

void quantize(QuantizeProblem const& problem, Launch const& launch);
void dequantize(QuantizeProblem const& problem, Launch const& launch);
void reduce_dbias(DbiasReduction const& reduction, Launch const& launch);

}  // namespace cudnn_grouped::cuda

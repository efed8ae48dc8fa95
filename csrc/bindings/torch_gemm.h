// The torch kernels behind the operators, in the dispatcher's boxed form.
#pragma once

#include "torch_values.h"

namespace cudnn_grouped::bindings {

// dsrelu, dglu, dact, srelu, glu, mm; and the forms that write into given outputs.
template <Operation kOperation>
void gemm(StableIValue* stack, uint64_t arguments, uint64_t results);
template <Operation kOperation>
void gemm_out(StableIValue* stack, uint64_t arguments, uint64_t results);

void weight_gradient(StableIValue* stack, uint64_t arguments, uint64_t results);
void weight_gradient_out(StableIValue* stack, uint64_t arguments, uint64_t results);
void quantize(StableIValue* stack, uint64_t arguments, uint64_t results);
void dequantize(StableIValue* stack, uint64_t arguments, uint64_t results);
void reduce_dbias(StableIValue* stack, uint64_t arguments, uint64_t results);

}  // namespace cudnn_grouped::bindings

// C entry points to the product's own launchers, csrc/cuda/quantize.cu and dequantize.cu.
#include "cuda/quantize.h"

namespace {

using namespace cudnn_grouped;

QuantizeProblem problem(int rows, int columns, int by_column, int x_dtype, int data_dtype, int scale_dtype, int block,
                        void* x, void* data, void* scales, void* norm_const, void* padded_offsets, int experts) {
  QuantizeProblem p{};
  p.rows = rows, p.columns = columns, p.batch = 1, p.block = block, p.by_column = by_column != 0;
  p.x_dtype = DType(x_dtype), p.data_dtype = DType(data_dtype), p.scale_dtype = DType(scale_dtype);
  p.x = x, p.data = data, p.scales = static_cast<uint8_t*>(scales);
  p.norm_const = static_cast<float const*>(norm_const);
  p.padded_offsets = static_cast<int32_t const*>(padded_offsets), p.experts = experts;
  return p;
}

template <class Operator, class... Arguments>
int run(Operator op, Arguments... arguments) {
  try {
    op(problem(arguments...), Launch());
    return 0;
  } catch (std::exception const&) {
    return 1;
  }
}

}  // namespace

extern "C" int run_quantize(int rows, int columns, int by_column, int x_dtype, int data_dtype, int scale_dtype,
                            int block, void* x, void* data, void* scales, void* norm_const, void* padded_offsets,
                            int experts) {
  return run(cuda::quantize, rows, columns, by_column, x_dtype, data_dtype, scale_dtype, block, x, data, scales,
             norm_const, padded_offsets, experts);
}

extern "C" int run_dequantize(int rows, int columns, int by_column, int x_dtype, int data_dtype, int scale_dtype,
                              int block, void* x, void* data, void* scales, void* norm_const, void* padded_offsets,
                              int experts) {
  return run(cuda::dequantize, rows, columns, by_column, x_dtype, data_dtype, scale_dtype, block, x, data, scales,
             norm_const, padded_offsets, experts);
}

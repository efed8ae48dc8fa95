// Uses every function of csrc/core that is marked for the device in a kernel: test_cuda_build.py compiles this.
#include "core/activation.h"
#include "core/block_quantize.h"
#include "core/number_formats.h"
#include "core/scale_layout.h"

namespace cudnn_grouped {

template <class Format>
__device__ void quantise(float const* x, float norm, float* y) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits = max(bits, magnitude_bits(x[i]));
  float const value = scale_value(bits_float(bits), Format::kReciprocal, norm);
  uint32_t const e8m0 = encode_e8m0_up(value), e4m3 = encode_e4m3(value);
  for (int i = 0; i < 32; ++i) {
    y[i] = Format::decode(Format::encode(x[i] * e8m0_factor(e8m0, norm))) * decode_e8m0(e8m0);
    y[i] += Format::decode(Format::encode(x[i] * e4m3_factor(e4m3, norm))) * decode_e4m3(e4m3);
  }
}

__global__ void number_formats(float const* x, float* y) {
  x += threadIdx.x * 32, y += threadIdx.x * 128;
  quantise<E4M3>(x, x[0], y);
  quantise<E5M2>(x, x[0], y + 32);
  quantise<E2M1>(x, x[0], y + 64);
  for (int i = 0; i < 32; ++i) y[96 + i] = decode_bf16(encode_bf16(x[i])) + decode_fp16(encode_fp16(x[i]));
}

template <class Struct>
__global__ void activation(Struct f, float const* x, float const* r, float* y, EpilogueOp op) {
  constexpr int kWidth = Struct::kWidth;
  int const i = threadIdx.x;
  float c[kWidth];
  for (int j = 0; j < kWidth; ++j) c[j] = x[i * kWidth + j];
  auto const gradient = f.backward(r[2 * i], c, r[2 * i + 1]);
  y += i * (kWidth + 2);
  for (int j = 0; j < kWidth; ++j) y[j] = apply_epilogue_op(op, gradient.x[j]);
  y[kWidth] = gradient.prob_term;
  y[kWidth + 1] = f.forward(c);
}
template __global__ void activation(SquaredReLU<false>, float const*, float const*, float*, EpilogueOp);
template __global__ void activation(SquaredReLU<true>, float const*, float const*, float*, EpilogueOp);
template __global__ void activation(SwiGLU, float const*, float const*, float*, EpilogueOp);
template __global__ void activation(GeGLU<false>, float const*, float const*, float*, EpilogueOp);
template __global__ void activation(GeGLU<true>, float const*, float const*, float*, EpilogueOp);
template __global__ void activation(SiTUGLU, float const*, float const*, float*, EpilogueOp);

__global__ void scale_layout(int64_t rows, int64_t blocks, int64_t* y) {
  ScaleLayout const layout = ScaleLayout::of(rows, blocks);
  y[0] = layout.bytes();
  y[1] = layout.at(threadIdx.x, threadIdx.y);
  y[2] = discrete_column_base(rows, blocks, 32);
}

}  // namespace cudnn_grouped

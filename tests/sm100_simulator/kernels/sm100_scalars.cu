// Scalar instructions that SM100 adds: packed pairs of floats, conversions of the narrow formats, redux of floats.
#include <cuda_runtime.h>

#include "operation_list.h"

// Three words make three pairs of floats: (x, y), (y, z) and (z, x). A pair's result is written half by half.
#define PAIR_OPERATION(text)                                                                                   \
  OPERATION("mov.b64 d0, {%1, %2}; mov.b64 d1, {%2, %3}; mov.b64 d2, {%3, %1};" text "; mov.b64 {%0, t0}, d3") \
  OPERATION("mov.b64 d0, {%1, %2}; mov.b64 d1, {%2, %3}; mov.b64 d2, {%3, %1};" text "; mov.b64 {t0, %0}, d3")

__global__ void pairs(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  PAIR_OPERATION("add.rn.f32x2 d3, d0, d1")
  PAIR_OPERATION("sub.rn.f32x2 d3, d0, d1")
  PAIR_OPERATION("mul.rn.f32x2 d3, d0, d1")
  PAIR_OPERATION("fma.rn.f32x2 d3, d0, d1, d2")
  PAIR_OPERATION("add.rn.ftz.f32x2 d3, d0, d1")
}

__global__ void conversions(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  OPERATION("cvt.rn.satfinite.e4m3x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e5m2x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e2m3x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e3m2x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION(".reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u32.u8 %0, b")
  OPERATION("abs.f32 t0, %1; abs.f32 t1, %2; cvt.rz.satfinite.ue8m0x2.f32 h0, t0, t1; mov.b32 %0, {h0, 0}")
  OPERATION("abs.f32 t0, %1; abs.f32 t1, %2; cvt.rp.satfinite.ue8m0x2.f32 h0, t0, t1; mov.b32 %0, {h0, 0}")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.rn.bf16x2.ue8m0x2 %0, h0")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.rn.f16x2.e4m3x2 %0, h0")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.rn.f16x2.e5m2x2 %0, h0")
  OPERATION("and.b32 t0, %3, 0x3f3f; mov.b32 {h0, h1}, t0; cvt.rn.f16x2.e2m3x2 %0, h0")
  OPERATION("and.b32 t0, %3, 0x3f3f; mov.b32 {h0, h1}, t0; cvt.rn.f16x2.e3m2x2 %0, h0")
  OPERATION(".reg .b8 b; cvt.u8.u32 b, %3; cvt.rn.f16x2.e2m1x2 %0, b")
  OPERATION("max.f32 %0, %1, %2, %3")
  OPERATION("min.NaN.f32 %0, %1, %2, %3")
  OPERATION("redux.sync.max.f32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.min.abs.f32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.max.abs.NaN.f32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.min.NaN.f32 %0, %1, 0xffffffff")
}

extern "C" int run_pairs(uint32_t const* x, uint32_t const* y, uint32_t const* z, uint32_t* out, int count) {
  pairs<<<count / 64, 64>>>(x, y, z, out, count);
  return cudaGetLastError();
}

extern "C" int run_conversions(uint32_t const* x, uint32_t const* y, uint32_t const* z, uint32_t* out, int count) {
  conversions<<<count / 64, 64>>>(x, y, z, out, count);
  return cudaGetLastError();
}

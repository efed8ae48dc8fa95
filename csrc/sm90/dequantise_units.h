// Eight neighbouring codes to eight BF16 values: a load of 8 bytes (FP4: 4) and a store of 16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../core/number_formats.h"
#include "../core/scale_layout.h"
#include "../cuda/inline.h"

namespace cudnn_grouped::sm90 {
namespace {

template <__nv_fp8_interpretation_t kFormat>
struct FP8 {
  using Codes = uint2;
  static constexpr int kPerByte = 1;

  // Every FP8 value is an FP16 one.
  CG_DEVICE float2 pair(uint32_t codes) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes), kFormat)));
  }
  CG_DEVICE float2 pair(Codes codes, int i) { return pair((i < 2 ? codes.x : codes.y) >> (i % 2 * 16) & 0xffffu); }
};
using E4M3 = FP8<__NV_E4M3>;
using E5M2 = FP8<__NV_E5M2>;

// PTX ISA, "prmt": a selector's top bit spreads the byte's sign over it. (__byte_perm ignores that bit.)
CG_DEVICE uint32_t signs_of(uint32_t selectors) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(0x80808080u), "r"(selectors));
  return r;
}

struct E2M1 {
  using Codes = uint32_t;
  static constexpr int kPerByte = 2;

  // A code as FP16 is its high byte alone. __byte_perm looks four magnitudes up at once, with codes as selectors; with
  // a code's sign the same selector spreads the sign of 0x80 over its byte: 0xff, else 0x80.
  CG_DEVICE float2 pair(Codes codes, int i) {
    uint32_t const four = codes >> (i / 2 * 16);
    uint32_t const magnitudes = __byte_perm(0x3e3c3800u, 0x46444240u, four & 0x7777u);
    uint32_t const signs = signs_of(four) << 1 & 0x80808080u;
    uint32_t const halves = __byte_perm(magnitudes | signs, 0, i % 2 ? 0x3424 : 0x1404);
    return __half22float2(__half2(__half2_raw{uint16_t(halves), uint16_t(halves >> 16)}));
  }
};

template <class Format_, bool kE4M3Scale, int kBlock_>
struct Kind {
  using Format = Format_;
  static constexpr int kBlock = kBlock_;
  CG_DEVICE float scale(uint32_t byte) { return kE4M3Scale ? decode_e4m3(byte) : decode_e8m0(byte); }
};

CG_DEVICE uint32_t scaled(float2 v, float x, float y) {
  __nv_bfloat162_raw const pair = __floats2bfloat162_rn(v.x * x, v.y * y);
  return pair.x | uint32_t(pair.y) << 16;
}

// As PTX, because the compiler splits a store of words that were packed from halves.
CG_DEVICE void store_words(__nv_bfloat16* out, uint32_t const (&w)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(out), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

template <class Format>
CG_DEVICE void store_unit(__nv_bfloat16* out, typename Format::Codes codes, float scale) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = scaled(Format::pair(codes, i), scale, scale);
  store_words(out, w);
}

}  // namespace
}  // namespace cudnn_grouped::sm90

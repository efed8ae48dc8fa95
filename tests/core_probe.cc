// C functions over arrays, around csrc/core/number_formats.h and scale_layout.h, for ctypes. Test code only.
#include "number_formats.h"
#include "scale_layout.h"

using namespace cudnn_grouped;

#define DECODE(name)                                                    \
  extern "C" void name(uint32_t const* in, float* out, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) out[i] = name##_(in[i]);        \
  }
#define ENCODE(name)                                                    \
  extern "C" void name(float const* in, uint32_t* out, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) out[i] = name##_(in[i]);        \
  }

static float probe_decode_e4m3_(uint32_t c) { return decode_e4m3(c); }
static float probe_decode_e5m2_(uint32_t c) { return decode_e5m2(c); }
static float probe_decode_e2m1_(uint32_t c) { return decode_e2m1(c); }
static float probe_decode_e8m0_(uint32_t c) { return decode_e8m0(c); }
static float probe_decode_bf16_(uint32_t c) { return decode_bf16(c); }
static float probe_decode_fp16_(uint32_t c) { return decode_fp16(c); }
static uint32_t probe_encode_e4m3_(float x) { return encode_e4m3(x); }
static uint32_t probe_encode_e5m2_(float x) { return encode_e5m2(x); }
static uint32_t probe_encode_e2m1_(float x) { return encode_e2m1(x); }
static uint32_t probe_encode_e8m0_(float x) { return encode_e8m0_up(x); }
static uint32_t probe_encode_bf16_(float x) { return encode_bf16(x); }
static uint32_t probe_encode_fp16_(float x) { return encode_fp16(x); }

DECODE(probe_decode_e4m3)
DECODE(probe_decode_e5m2)
DECODE(probe_decode_e2m1)
DECODE(probe_decode_e8m0)
DECODE(probe_decode_bf16)
DECODE(probe_decode_fp16)
ENCODE(probe_encode_e4m3)
ENCODE(probe_encode_e5m2)
ENCODE(probe_encode_e2m1)
ENCODE(probe_encode_e8m0)
ENCODE(probe_encode_bf16)
ENCODE(probe_encode_fp16)

extern "C" int64_t probe_scale_offset(int64_t rows, int64_t blocks, int64_t r, int64_t b) {
  return ScaleLayout::of(rows, blocks).at(r, b);
}
extern "C" int64_t probe_scale_bytes(int64_t rows, int64_t blocks) { return ScaleLayout::of(rows, blocks).bytes(); }
extern "C" int64_t probe_column_base(int64_t start, int64_t columns, int64_t rows_per_scale) {
  return discrete_column_base(start, columns, rows_per_scale);
}

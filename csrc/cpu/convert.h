// Runs of values between memory and FP32. Loops without branches, for the vectoriser.
#pragma once

#include "../core/block_quantize.h"
#include "../core/tensor.h"

namespace cudnn_grouped::cpu {
namespace {

template <class Storage, class Decode>
inline void decode_run(void const* base, int64_t at, float* out, int count, Decode decode) {
  Storage const* in = static_cast<Storage const*>(base) + at;
  for (int i = 0; i < count; ++i) out[i] = decode(in[i]);
}

template <class Storage, class Encode>
inline void encode_run(void* base, int64_t at, float const* in, int count, Encode encode) {
  Storage* out = static_cast<Storage*>(base) + at;
  for (int i = 0; i < count; ++i) out[i] = Storage(encode(in[i]));
}

// count values of a C, x or D row, from element `at` of a buffer.
inline void load_run(DType dtype, void const* base, int64_t at, float* out, int count) {
  switch (dtype) {
    case DType::float32:
      return decode_run<float>(base, at, out, count, [](float v) { return v; });
    case DType::bfloat16:
      return decode_run<uint16_t>(base, at, out, count, [](uint32_t v) { return decode_bf16(v); });
    case DType::float16:
      return decode_run<uint16_t>(base, at, out, count, [](uint32_t v) { return decode_fp16(v); });
    case DType::float8_e4m3fn:
      return decode_run<uint8_t>(base, at, out, count, [](uint32_t v) { return decode_e4m3(v); });
    default:
      return decode_run<uint8_t>(base, at, out, count, [](uint32_t v) { return decode_e5m2(v); });
  }
}

inline void store_run(DType dtype, void* base, int64_t at, float const* in, int count) {
  switch (dtype) {
    case DType::float32:
      return encode_run<float>(base, at, in, count, [](float v) { return v; });
    case DType::bfloat16:
      return encode_run<uint16_t>(base, at, in, count, [](float v) { return encode_bf16(v); });
    case DType::float16:
      return encode_run<uint16_t>(base, at, in, count, [](float v) { return encode_fp16(v); });
    case DType::float8_e4m3fn:
      return encode_run<uint8_t>(base, at, in, count, [](float v) { return encode_e4m3(v); });
    default:
      return encode_run<uint8_t>(base, at, in, count, [](float v) { return encode_e5m2(v); });
  }
}

inline float decode_scale(DType dtype, uint32_t byte) {
  return dtype == DType::float8_e8m0fnu ? decode_e8m0(byte) : decode_e4m3(byte);
}

// count FP4 values, two to a byte, the low nibble first; `at` and count are even.
inline void decode_fp4_run(void const* base, int64_t at, float* out, int count) {
  uint8_t const* in = static_cast<uint8_t const*>(base) + at / 2;
  for (int i = 0; i < count / 2; ++i) {
    out[2 * i] = decode_e2m1(in[i] & 15);
    out[2 * i + 1] = decode_e2m1(in[i] >> 4);
  }
}

}  // namespace
}  // namespace cudnn_grouped::cpu

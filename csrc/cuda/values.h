// Values of the dtypes of C and D, as FP32.
#pragma once

#include "../core/tensor.h"
#include "ptx.h"

namespace cudnn_grouped::cuda {

// Two neighbouring values: FP8; of 16 bits.
CG_DEVICE float2 decode_fp8(DType dtype, uint32_t pair) {
  return dtype == DType::float8_e4m3fn ? ptx::unpack_e4m3(uint16_t(pair)) : ptx::unpack_e5m2(uint16_t(pair));
}
CG_DEVICE float2 decode_half(DType dtype, uint32_t pair) {
  if (dtype == DType::bfloat16) return {ptx::low_bf16(pair), ptx::high_bf16(pair)};
  return ptx::unpack_fp16(pair);
}

// Of a C, D or GEMM value of any dtype; the kernel does not write to what is loaded so.
CG_DEVICE float2 load_pair(DType dtype, void const* base, int64_t at) {
  switch (dtype) {
    case DType::float32:
      return __ldg(reinterpret_cast<float2 const*>(static_cast<float const*>(base) + at));
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
      return decode_fp8(dtype, __ldg(reinterpret_cast<uint16_t const*>(static_cast<uint8_t const*>(base) + at)));
    default:
      return decode_half(dtype, __ldg(reinterpret_cast<uint32_t const*>(static_cast<uint16_t const*>(base) + at)));
  }
}

CG_DEVICE void store_pair(DType dtype, void* base, int64_t at, float low, float high) {
  switch (dtype) {
    case DType::float32:
      *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = {low, high};
      return;
    case DType::float8_e4m3fn:
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(base) + at) = uint16_t(ptx::pack_e4m3(low, high));
      return;
    case DType::float8_e5m2:
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(base) + at) = uint16_t(ptx::pack_e5m2(low, high));
      return;
    case DType::bfloat16:
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + at) = ptx::pack_bf16(low, high);
      return;
    default:
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(base) + at) = ptx::pack_fp16(low, high);
  }
}

// Four neighbouring values of each of kCount rows, as they lie in memory: nothing waits for them before decode_quads.
template <int kCount>
CG_DEVICE void load_quads(DType dtype, void const* base, int64_t at, int64_t step, uint4 (&quads)[kCount]) {
  switch (dtype) {
    case DType::float32:
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        quads[i] = __ldg(reinterpret_cast<uint4 const*>(static_cast<float const*>(base) + at + i * step));
      }
      return;
    case DType::float8_e4m3fn:
    case DType::float8_e5m2:
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        quads[i].x = __ldg(reinterpret_cast<uint32_t const*>(static_cast<uint8_t const*>(base) + at + i * step));
      }
      return;
    default:
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint2 const v = __ldg(reinterpret_cast<uint2 const*>(static_cast<uint16_t const*>(base) + at + i * step));
        quads[i].x = v.x, quads[i].y = v.y;
      }
  }
}

template <int kCount>
CG_DEVICE void decode_quads(DType dtype, uint4 const (&quads)[kCount], float (&v)[kCount][4]) {
  auto const decode = [&](auto const& low, auto const& high) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float2 const first = low(quads[i]), second = high(quads[i]);
      v[i][0] = first.x, v[i][1] = first.y, v[i][2] = second.x, v[i][3] = second.y;
    }
  };
  auto const fp8 = [&](DType one) {
    decode([&](uint4 q) { return decode_fp8(one, q.x); }, [&](uint4 q) { return decode_fp8(one, q.x >> 16); });
  };
  auto const half = [&](DType one) {
    decode([&](uint4 q) { return decode_half(one, q.x); }, [&](uint4 q) { return decode_half(one, q.y); });
  };
  switch (dtype) {  // once, not for each pair
    case DType::float32:
      return decode([](uint4 q) { return float2{__uint_as_float(q.x), __uint_as_float(q.y)}; },
                    [](uint4 q) { return float2{__uint_as_float(q.z), __uint_as_float(q.w)}; });
    case DType::float8_e4m3fn:
      return fp8(DType::float8_e4m3fn);
    case DType::float8_e5m2:
      return fp8(DType::float8_e5m2);
    case DType::bfloat16:
      return half(DType::bfloat16);
    default:
      return half(DType::float16);
  }
}

// The same of BF16, in half the registers.
template <int kCount>
CG_DEVICE void load_quads(DType, void const* base, int64_t at, int64_t step, uint2 (&quads)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    quads[i] = __ldg(reinterpret_cast<uint2 const*>(static_cast<uint16_t const*>(base) + at + i * step));
  }
}
template <int kCount>
CG_DEVICE void decode_quads(DType, uint2 const (&quads)[kCount], float (&v)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float2 const first = decode_half(DType::bfloat16, quads[i].x), second = decode_half(DType::bfloat16, quads[i].y);
    v[i][0] = first.x, v[i][1] = first.y, v[i][2] = second.x, v[i][3] = second.y;
  }
}

// Of a plain dtype.
CG_DEVICE void store_quad(DType dtype, void* base, int64_t at, float const (&v)[4]) {
  if (dtype == DType::float32) {
    *reinterpret_cast<float4*>(static_cast<float*>(base) + at) = {v[0], v[1], v[2], v[3]};
  } else if (dtype == DType::bfloat16) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + at) = {ptx::pack_bf16(v[0], v[1]),
                                                                    ptx::pack_bf16(v[2], v[3])};
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + at) = {ptx::pack_fp16(v[0], v[1]),
                                                                    ptx::pack_fp16(v[2], v[3])};
  }
}

}  // namespace cudnn_grouped::cuda

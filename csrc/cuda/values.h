// Values of the dtypes of C and D, as FP32.
#pragma once

#include "../core/tensor.h"
#include "ptx.h"

namespace cudnn_grouped::cuda {

// Two neighbouring values of a C, D or GEMM value of any dtype; the kernel does not write to what is loaded so.
CG_DEVICE float2 load_pair(DType dtype, void const* base, int64_t at) {
  switch (dtype) {
    case DType::float32:
      return __ldg(reinterpret_cast<float2 const*>(static_cast<float const*>(base) + at));
    case DType::float8_e4m3fn:
    case DType::float8_e5m2: {
      uint16_t const pair = __ldg(reinterpret_cast<uint16_t const*>(static_cast<uint8_t const*>(base) + at));
      return dtype == DType::float8_e4m3fn ? ptx::unpack_e4m3(pair) : ptx::unpack_e5m2(pair);
    }
    default: {
      uint32_t const pair = __ldg(reinterpret_cast<uint32_t const*>(static_cast<uint16_t const*>(base) + at));
      if (dtype == DType::bfloat16) return {ptx::low_bf16(pair), ptx::high_bf16(pair)};
      return ptx::unpack_fp16(pair);
    }
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

}  // namespace cudnn_grouped::cuda

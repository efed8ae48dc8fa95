// What lets one header serve the host compiler and nvcc.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CG_HD __host__ __device__ __forceinline__
#else
#define CG_HD inline __attribute__((always_inline))
#endif

// Visible outside its library.
#define CG_API __attribute__((visibility("default")))

namespace cudnn_grouped {

CG_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
#endif
}

CG_HD float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, 4);
  return x;
#endif
}

template <class T>
CG_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace cudnn_grouped

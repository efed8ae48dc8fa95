// One wgmma of 64 x 64 x 16, and the ways to get it wrong. A warpgroup, and a warp beside it.
#include "checks.h"

enum Fault { kNone, kNoProxyFence, kNoWait, kOverwritten, kRace, kLeft, kNotInitialised, kPartOfAWarp };

// Element (row, k) of 64 x 64 BF16 values in the swizzle of 128 bytes.
__device__ uint32_t place(bool rows_contiguous, int row, int k) {
  uint32_t const at = rows_contiguous ? k * 128 + row * 2 : row * 128 + k * 2;
  return at ^ (at >> 7 & 7) << 4;
}
__device__ uint64_t descriptor(uint8_t const* matrix) {
  return uint64_t((address(matrix) & 0x3ffff) >> 4) | uint64_t(8192 >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}
#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
template <bool kRowsA, bool kRowsB>
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, uint32_t accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, "
      "%4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
      "%27, "
      "%28, %29, %30, %31}, %32, %33, p, 1, 1, %35, %36; }"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kRowsA), "n"(kRowsB)
      : "memory");
}

// a, b: BF16 (64, 16). out: the accumulators of each thread, for twice the product.
template <bool kRowsA, bool kRowsB, Fault kFault>
__global__ void product(uint16_t const* a, uint16_t const* b, float* out) {
  alignas(1024) __shared__ uint8_t left[8192], right[8192];
  for (int i = threadIdx.x; i < 64 * 16; i += blockDim.x) {
    *reinterpret_cast<uint16_t*>(left + place(kRowsA, i / 16, i % 16)) = a[i];
    *reinterpret_cast<uint16_t*>(right + place(kRowsB, i / 16, i % 16)) = b[i];
  }
  if (kFault != kNoProxyFence) fence_proxy();
  __syncthreads();
  if (threadIdx.x < 128) {
    float d[32];
    if (kFault == kPartOfAWarp && threadIdx.x % 32 > 7) return;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply<kRowsA, kRowsB>(d, descriptor(left), descriptor(right), kFault == kNotInitialised);
    multiply<kRowsA, kRowsB>(d, descriptor(left), descriptor(right), 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (kFault == kOverwritten) left[threadIdx.x / 32 * 2048] = 0;
    if (kFault != kNoWait && kFault != kLeft) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 32 && kFault != kLeft; ++i) out[threadIdx.x * 32 + i] = d[i];
  } else if (kFault == kRace) {
    for (int i = 0; i < 200; ++i) __nanosleep(100);
    right[0] = 0;
  }
}

#define PRODUCT(name, rows_a, rows_b, fault)                              \
  extern "C" int name(uint16_t const* a, uint16_t const* b, float* out) { \
    product<rows_a, rows_b, fault><<<1, 160>>>(a, b, out);                \
    return cudaGetLastError();                                            \
  }
PRODUCT(k_k, false, false, kNone)
PRODUCT(k_rows, false, true, kNone)
PRODUCT(rows_k, true, false, kNone)
PRODUCT(rows_rows, true, true, kNone)
PRODUCT(no_proxy_fence, false, false, kNoProxyFence)
PRODUCT(no_wait, false, false, kNoWait)
PRODUCT(overwritten, false, false, kOverwritten)
PRODUCT(raced, false, false, kRace)
PRODUCT(left_behind, false, false, kLeft)
PRODUCT(not_initialised, false, false, kNotInitialised)
PRODUCT(part_of_a_warp, false, false, kPartOfAWarp)

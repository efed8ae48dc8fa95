// One-line wrappers of the instructions that Hopper's kernels use beside those of every engine.
#pragma once

#include "../cuda/ptx.h"

namespace cudnn_grouped::sm90::ptx {

using namespace cuda::ptx;

// ldmatrix, stmatrix: an 8x8 matrix of 16-bit values has the register layout of eight columns of a wgmma accumulator.
CG_DEVICE void load_matrices(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
CG_DEVICE void store_matrices(uint32_t to, uint32_t const (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0,%1,%2,%3};" ::"r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3]), "r"(to)
               : "memory");
}

// The address is computed here, and not again for each use.
CG_DEVICE void keep(float*& address) { asm volatile("" : "+l"(address)); }
// Without a branch.
CG_DEVICE void store_if(bool condition, float* to, float v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.f32 [%1], %2; }" ::"r"(int(condition)), "l"(to),
               "f"(v)
               : "memory");
}

// wgmma
CG_DEVICE void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CG_DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CG_DEVICE void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Ties the accumulators to the wait before it: nothing may read them earlier.
template <int kCount>
CG_DEVICE void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace cudnn_grouped::sm90::ptx

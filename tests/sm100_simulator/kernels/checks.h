// Launchers and wrapped instructions of checks.cu.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#define KERNEL(name, grid, block, shared)                  \
  __global__ void name##_kernel(uint32_t* out);            \
  extern "C" int name(uint32_t* out) {                     \
    name##_kernel<<<dim3 grid, dim3 block, shared>>>(out); \
    return cudaGetLastError();                             \
  }                                                        \
  __global__ void name##_kernel(uint32_t* out)
#define CHECK(name) KERNEL(name, (1), (128), 0)

__device__ uint32_t address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ void init(uint64_t* b, uint32_t n) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(b)), "r"(n) : "memory");
}
__device__ void inval(uint64_t* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(address(b)) : "memory"); }
__device__ void arrive(uint64_t* b, uint32_t n = 1) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(address(b)), "r"(n) : "memory");
}
__device__ void expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}
__device__ bool try_wait(uint64_t* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(address(b)), "r"(parity)
               : "memory");
  return done;
}
__device__ bool test_wait(uint64_t* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(address(b)), "r"(parity)
               : "memory");
  return done;
}
__device__ void wait(uint64_t* b, uint32_t parity) {
  while (!try_wait(b, parity)) {
  }
}
__device__ void bulk_load(void* to, void const* from, uint32_t bytes, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(b))
      : "memory");
}
__device__ void bulk_store(void* to, void const* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(address(from)), "r"(bytes)
               : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kRemain>
__device__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kRemain) : "memory");
}
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ uint32_t tensor_allocate(uint32_t columns) {
  __shared__ uint32_t base;
  if (threadIdx.x < 32)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address(&base)), "r"(columns)
                 : "memory");
  __syncthreads();
  return base;
}
__device__ void tensor_free(uint32_t base, uint32_t columns) {
  if (threadIdx.x < 32)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(columns) : "memory");
}
__device__ void tensor_store(uint32_t at, uint32_t v) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1}; tcgen05.wait::st.sync.aligned;" ::"r"(at), "r"(v)
               : "memory");
}
__device__ uint32_t tensor_load(uint32_t at) {
  uint32_t v;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned;"
               : "=r"(v)
               : "r"(at)
               : "memory");
  return v;
}
__device__ uint32_t tensor_lanes() { return threadIdx.x / 32 << 21; }

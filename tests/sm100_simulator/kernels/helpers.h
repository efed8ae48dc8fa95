// Names and one-line wrappers that several of the test kernels share.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/util.hpp>

using Bar = cutlass::arch::ClusterBarrier;
using TxBar = cutlass::arch::ClusterTransactionBarrier;
constexpr uint64_t kEvictNormal = 0x1000000000000000;  // cache policy of tensor loads

__device__ inline uint32_t shared_address(void const* p) { return cute::cast_smem_ptr_to_uint(p); }

// Accesses to tensor memory are ordered by a barrier only between these two.
__device__ inline void tensor_memory_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ inline void tensor_memory_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Of a matrix in shared memory whose rows along K are whole: stride is that of 8 rows, in bytes.
__device__ inline uint64_t matrix_descriptor(void const* data, uint32_t stride, cute::UMMA::LayoutType layout) {
  cute::UMMA::SmemDescriptor d;
  d.version_ = 1;
  d.start_address_ = shared_address(data) >> 4;
  d.leading_byte_offset_ = 1;
  d.stride_byte_offset_ = stride >> 4;
  d.layout_type_ = uint8_t(layout);
  return d;
}

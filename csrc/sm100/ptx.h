// One-line wrappers of the Blackwell instructions that the kernels use. Chapter names are the PTX ISA's.
#pragma once

#include "../cuda/ptx.h"

namespace cudnn_grouped::sm100::ptx {

using namespace cuda::ptx;

// Clusters
CG_DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
CG_DEVICE int cluster_index() {
  int r;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(r));
  return r;
}
CG_DEVICE int cluster_count() {
  int r;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(r));
  return r;
}
CG_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// The address of the same variable in another block of the cluster.
CG_DEVICE uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
CG_DEVICE void barrier_arrive_in(uint32_t barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}
CG_DEVICE void barrier_expect_in(uint32_t barrier, uint32_t rank, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(address_in(barrier, rank)), "r"(bytes)
               : "memory");
}
// Dependent launches (griddepcontrol)
CG_DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
CG_DEVICE void let_later_kernels_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// clusterlaunchcontrol: asks for the place of a cluster that has not begun. The answer goes to all blocks of this one.
CG_DEVICE void ask_for_cluster(uint32_t answer, uint32_t barrier) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
      "[%0], [%1];" ::"r"(answer),
      "r"(barrier)
      : "memory");
}
// The first block of that cluster, or -1.
CG_DEVICE int answered_block(uint32_t answer) {
  int block;
  asm volatile(
      "{ .reg .pred p; .reg .b128 r; ld.shared.b128 r, [%1]; mov.b32 %0, -1; "
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r; "
      "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, r; }"
      : "=r"(block)
      : "r"(answer)
      : "memory");
  return block;
}

// cp.async.bulk.tensor. With pairs of blocks, the barrier is the first block's of the pair. mask: the blocks of the
// cluster that receive the box, 0: this one.
inline constexpr uint32_t kFirstOfPair = 0xfeffffff;
#define CG_LOAD(PAIR, DIMS, COORDINATES, ...)                                                                         \
  if (mask) {                                                                                                         \
    asm volatile("cp.async.bulk.tensor." DIMS PAIR                                                                    \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, " COORDINATES    \
                 "], [%2], %3;" ::"r"(to),                                                                            \
                 "l"(map), "r"(barrier), "h"(mask), __VA_ARGS__                                                       \
                 : "memory");                                                                                         \
  } else {                                                                                                            \
    asm volatile("cp.async.bulk.tensor." DIMS PAIR                                                                    \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " COORDINATES "], [%2];" ::"r"(to), \
                 "l"(map), "r"(barrier), "h"(mask), __VA_ARGS__                                                       \
                 : "memory");                                                                                         \
  }
template <int kSMs>
CG_DEVICE void load_2d(uint32_t to, CUtensorMap const* map, uint32_t barrier, uint16_t mask, int x, int y) {
  if constexpr (kSMs == 2) {
    barrier &= kFirstOfPair;
    CG_LOAD(".cta_group::2", "2d", "{%4, %5}", "r"(x), "r"(y))
  } else {
    CG_LOAD("", "2d", "{%4, %5}", "r"(x), "r"(y))
  }
}
template <int kSMs>
CG_DEVICE void load_3d(uint32_t to, CUtensorMap const* map, uint32_t barrier, uint16_t mask, int x, int y, int z) {
  if constexpr (kSMs == 2) {
    barrier &= kFirstOfPair;
    CG_LOAD(".cta_group::2", "3d", "{%4, %5, %6}", "r"(x), "r"(y), "r"(z))
  } else {
    CG_LOAD("", "3d", "{%4, %5, %6}", "r"(x), "r"(y), "r"(z))
  }
}
template <int kSMs>
CG_DEVICE void load_4d(uint32_t to, CUtensorMap const* map, uint32_t barrier, uint16_t mask, int x, int y, int z,
                       int w) {
  if constexpr (kSMs == 2) {
    barrier &= kFirstOfPair;
    CG_LOAD(".cta_group::2", "4d", "{%4, %5, %6, %7}", "r"(x), "r"(y), "r"(z), "r"(w))
  } else {
    CG_LOAD("", "4d", "{%4, %5, %6, %7}", "r"(x), "r"(y), "r"(z), "r"(w))
  }
}
#undef CG_LOAD

CG_DEVICE void prefetch_map(CUtensorMap const* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Into L2.
CG_DEVICE void prefetch_2d(CUtensorMap const* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
CG_DEVICE void store_2d(CUtensorMap const* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}

// Tensor memory (tcgen05.alloc, ld, fences). Every instruction of a kernel names the same number of SMs.
template <int kSMs>
CG_DEVICE void allocate_tensor_memory(uint32_t to, uint32_t columns) {
  if constexpr (kSMs == 2) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
  } else {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
}
template <int kSMs>
CG_DEVICE void free_tensor_memory(uint32_t base, uint32_t columns) {
  if constexpr (kSMs == 2) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(columns));
  } else {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(columns));
  }
}
CG_DEVICE void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
CG_DEVICE void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
CG_DEVICE void tensor_load_wait() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
// 32 columns of the warp's 32 lanes of tensor memory; a thread gets a row.
CG_DEVICE void tensor_load(uint32_t from, float* v) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7]), "=f"(v[8]),
        "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]), "=f"(v[14]), "=f"(v[15]), "=f"(v[16]),
        "=f"(v[17]), "=f"(v[18]), "=f"(v[19]), "=f"(v[20]), "=f"(v[21]), "=f"(v[22]), "=f"(v[23]), "=f"(v[24]),
        "=f"(v[25]), "=f"(v[26]), "=f"(v[27]), "=f"(v[28]), "=f"(v[29]), "=f"(v[30]), "=f"(v[31])
      : "r"(from)
      : "memory");
}

// tcgen05.cp: an atom of scale factors, 128 rows x 4, to four columns of tensor memory.
template <int kSMs>
CG_DEVICE void copy_scale_atom(uint32_t to, uint64_t descriptor) {
  if constexpr (kSMs == 2) {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(descriptor) : "memory");
  } else {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(descriptor) : "memory");
  }
}

// tcgen05.commit: the barrier hears of the work so far. mask: in which blocks of the cluster, 0: this one.
template <int kSMs>
CG_DEVICE void commit(uint32_t barrier, uint16_t mask) {
#define CG_COMMIT(GROUP)                                                                                   \
  if (mask) {                                                                                              \
    asm volatile("tcgen05.commit." GROUP                                                                   \
                 ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(barrier), \
                 "h"(mask)                                                                                 \
                 : "memory");                                                                              \
  } else {                                                                                                 \
    asm volatile("tcgen05.commit." GROUP ".mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) \
                 : "memory");                                                                              \
  }
  if constexpr (kSMs == 2) {
    CG_COMMIT("cta_group::2")
  } else {
    CG_COMMIT("cta_group::1")
  }
#undef CG_COMMIT
}

// tcgen05.mma
struct Product {
  uint32_t accumulators;
  uint64_t a, b;
  uint32_t instruction;  // descriptor
  uint32_t accumulate;
};
#define CG_MULTIPLY(GROUP, KIND)                                                   \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma." GROUP "." KIND \
               " [%0], %1, %2, %3, p; }" ::"r"(x.accumulators),                    \
               "l"(x.a), "l"(x.b), "r"(x.instruction), "r"(x.accumulate)           \
               : "memory")
#define CG_MULTIPLY_SCALED(GROUP, KIND)                                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma." GROUP "." KIND                     \
               " [%0], %1, %2, %3, [%5], [%6], p; }" ::"r"(x.accumulators),                            \
               "l"(x.a), "l"(x.b), "r"(x.instruction), "r"(x.accumulate), "r"(scales_a), "r"(scales_b) \
               : "memory")
template <int kSMs>
CG_DEVICE void multiply_f16(Product const& x) {
  if constexpr (kSMs == 2) {
    CG_MULTIPLY("cta_group::2", "kind::f16");
  } else {
    CG_MULTIPLY("cta_group::1", "kind::f16");
  }
}
template <int kSMs>
CG_DEVICE void multiply_mxf8f6f4(Product const& x, uint32_t scales_a, uint32_t scales_b) {
  if constexpr (kSMs == 2) {
    CG_MULTIPLY_SCALED("cta_group::2", "kind::mxf8f6f4.block_scale");
  } else {
    CG_MULTIPLY_SCALED("cta_group::1", "kind::mxf8f6f4.block_scale");
  }
}
template <int kSMs, int kBlock>
CG_DEVICE void multiply_mxf4nvf4(Product const& x, uint32_t scales_a, uint32_t scales_b) {
  if constexpr (kSMs == 2 && kBlock == 16) {
    CG_MULTIPLY_SCALED("cta_group::2", "kind::mxf4nvf4.block_scale.block16");
  } else if constexpr (kSMs == 2) {
    CG_MULTIPLY_SCALED("cta_group::2", "kind::mxf4nvf4.block_scale.block32");
  } else if constexpr (kBlock == 16) {
    CG_MULTIPLY_SCALED("cta_group::1", "kind::mxf4nvf4.block_scale.block16");
  } else {
    CG_MULTIPLY_SCALED("cta_group::1", "kind::mxf4nvf4.block_scale.block32");
  }
}
#undef CG_MULTIPLY
#undef CG_MULTIPLY_SCALED

// Numbers
// The largest magnitude of all lanes; a NaN of any stays.
CG_DEVICE float warp_max_magnitude(float x) {
  float r;
  asm volatile("redux.sync.max.abs.NaN.f32 %0, %1, 0xffffffff;" : "=f"(r) : "f"(x));
  return r;
}
using cuda::ptx::max_magnitude;
CG_DEVICE float max_magnitude(float a, float b, float c) {
  float r;
  asm("max.NaN.abs.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}
// Two scale factors, rounded up (decisions, "Block quantiser"): the first in the low byte.
CG_DEVICE uint32_t encode_two_e8m0_up(float low, float high) {
  uint16_t r;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
CG_DEVICE void store_shared_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

}  // namespace cudnn_grouped::sm100::ptx

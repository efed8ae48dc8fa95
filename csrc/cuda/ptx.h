// One-line wrappers of the instructions that the kernels of every engine use. Chapter names are the PTX ISA's.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "inline.h"

namespace cudnn_grouped::cuda::ptx {

CG_DEVICE uint32_t shared_address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }
CG_DEVICE bool elect() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected;
}

// The same value, about which the compiler knows nothing.
CG_DEVICE int hidden(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// setmaxnreg
template <int kRegisters>
CG_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
CG_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// mbarrier
CG_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
CG_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
CG_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
CG_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
CG_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra WAIT; DONE: }" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

// barrier.cta with a name
CG_DEVICE void named_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
CG_DEVICE void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// cp.async.bulk.tensor. Coordinates run from the innermost dimension.
CG_DEVICE void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// What is used once leaves L2 first.
CG_DEVICE void load_once(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0; "
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4}], "
      "[%2], once; }" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
CG_DEVICE void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
CG_DEVICE void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
CG_DEVICE void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}
CG_DEVICE void store_once(CUtensorMap const* map, uint32_t from, int x, int y) {
  asm volatile(
      "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0; "
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], once; }" ::"l"(map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
// Tensor maps in memory (tensormap): a copy in shared memory gets an address, is published by a warp, and is acquired
// before its first use.
CG_DEVICE void set_map_address(uint32_t map, void const* address) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map), "l"(address)
               : "memory");
}
CG_DEVICE void publish_map(CUtensorMap* to, uint32_t from) {
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
          to),
      "r"(from)
      : "memory");
}
CG_DEVICE void acquire_map(CUtensorMap const* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
CG_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
CG_DEVICE void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
CG_DEVICE void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread wrote to shared memory becomes visible to bulk copies.
CG_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ld.shared, st.shared
CG_DEVICE uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
CG_DEVICE uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
CG_DEVICE void store_shared_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
CG_DEVICE void store_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
CG_DEVICE void store_shared_8(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

// Numbers
CG_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
CG_DEVICE float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
CG_DEVICE float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
CG_DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
CG_DEVICE float2 unpack_fp16(uint32_t pair) {
  float2 v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}
CG_DEVICE float2 unpack_e4m3(uint16_t pair) {
  uint32_t half;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(pair));
  return unpack_fp16(half);
}
CG_DEVICE float2 unpack_e5m2(uint16_t pair) {
  uint32_t half;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(half) : "h"(pair));
  return unpack_fp16(half);
}
CG_DEVICE uint32_t pack_e4m3(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
CG_DEVICE uint32_t pack_e5m2(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
// Four values, the first in the low byte. The second conversion merges: shifting and combining two pairs would be an
// instruction more.
template <bool kE4M3>
CG_DEVICE uint32_t pack_fp8(float a, float b, float c, float d) {
  uint32_t r;
  if constexpr (kE4M3) {
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; "
        "mov.b32 %0, {l, h}; }"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, %2, %1; cvt.rn.satfinite.e5m2x2.f32 h, %4, %3; "
        "mov.b32 %0, {l, h}; }"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return r;
}
// Keeps a NaN of either side.
CG_DEVICE float max_magnitude(float a, float b) {
  float r;
  asm("{ .reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y; }" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace cudnn_grouped::cuda::ptx

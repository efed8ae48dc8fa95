// One small kernel a check: those that break its rule, and correct ones that come close (test_sm100_checks.py has the
// verdicts). Each runs as one CTA of 128 threads unless its launcher says otherwise.
#include "checks.h"

// ---- shared memory between warps

CHECK(race_write_read) {
  __shared__ uint32_t s[128];
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[127 - threadIdx.x];
}
CHECK(race_read_write) {
  __shared__ uint32_t s[128];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x < 32) out[threadIdx.x] = s[127 - threadIdx.x];
  for (int i = 0; i < 20; ++i) __nanosleep(100);
  if (threadIdx.x >= 96) s[threadIdx.x] = 0;
}
CHECK(race_read_write_half) {
  __shared__ uint16_t s[128];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x < 32) out[threadIdx.x] = s[127 - threadIdx.x];
  for (int i = 0; i < 20; ++i) __nanosleep(100);
  if (threadIdx.x >= 96) s[threadIdx.x] = 0;
}
CHECK(reuse_after_barrier) {
  __shared__ uint32_t s[128];
  for (int i = 0; i < 4; ++i) {
    s[threadIdx.x] = threadIdx.x + i;
    __syncthreads();
    out[threadIdx.x] = s[127 - threadIdx.x];
    __syncthreads();
  }
}
// Warps share words byte by byte: no race, whatever the order.
CHECK(bytes_of_a_word) {
  __shared__ volatile uint8_t s[128];
  int const i = threadIdx.x % 32 * 4 + threadIdx.x / 32;
  s[i] = i;
  s[i] = s[i] + 1;
  out[threadIdx.x] = s[i];
}
// One byte is read by another warp after a barrier, while its writer goes on to the next byte.
CHECK(bytes_in_turn) {
  __shared__ uint8_t s[64];
  if (threadIdx.x < 32) s[threadIdx.x * 2] = 1;
  __syncthreads();
  if (threadIdx.x < 32)
    s[threadIdx.x * 2 + 1] = 2;
  else if (threadIdx.x < 64)
    out[threadIdx.x] = s[(threadIdx.x - 32) * 2];
}
CHECK(uninitialised_shared) {
  __shared__ uint32_t s[128];
  if (threadIdx.x < 64) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
CHECK(uninitialised_register) {
  asm volatile("{ .reg .b32 a; add.u32 a, a, 1; st.global.u32 [%0], a; }" ::"l"(out) : "memory");
}
// A flag handed over with a fence and an atomic.
CHECK(flag_atomic) {
  __shared__ uint32_t flag, s[32];
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] = threadIdx.x;
    __threadfence_block();
    __syncwarp();
    if (threadIdx.x == 0) atomicExch(&flag, 1);
  } else if (threadIdx.x < 64) {
    while (atomicAdd(&flag, 0) == 0) {
    }
    __threadfence_block();
    out[threadIdx.x] = s[threadIdx.x - 32];
  }
}
CHECK(flag_release_acquire) {
  __shared__ uint32_t flag, s[32];
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  uint32_t seen;
  if (threadIdx.x < 32) {
    s[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x == 0) asm volatile("st.release.cta.shared.u32 [%0], 1;" ::"r"(address(&flag)) : "memory");
  } else if (threadIdx.x < 64) {
    do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(address(&flag)) : "memory");
    while (!seen);
    out[threadIdx.x] = s[threadIdx.x - 32];
  }
}
CHECK(flag_without_fence) {
  __shared__ uint32_t flag, s[32];
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x == 0) atomicExch(&flag, 1);
  } else if (threadIdx.x < 64) {
    while (atomicAdd(&flag, 0) == 0) {
    }
    out[threadIdx.x] = s[threadIdx.x - 32];
  }
}
CHECK(shared_atomics) {
  __shared__ uint32_t sum;
  __shared__ unsigned long long wide;
  if (threadIdx.x == 0) sum = 0, wide = 0;
  __syncthreads();
  atomicAdd(&sum, 1);
  atomicAdd(&wide, 1ull << 32);
  __syncthreads();
  out[threadIdx.x] = sum + uint32_t(wide >> 32);
}

// ---- lanes and loops

// Lanes of a warp take turns with a lock: each must get on although others spin.
KERNEL(lock_between_lanes, (1), (32), 0) {
  uint32_t* const lock = out + 128;
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      out[0] += 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
KERNEL(lock_naive, (1), (32), 0) {
  uint32_t* const lock = out + 128;
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  out[0] += 1;
  __threadfence();
  atomicExch(lock, 0);
}
CHECK(divergent_loop) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < threadIdx.x; ++i) n += i ^ out[i];
  out[128 + threadIdx.x] = n;
  __syncthreads();
  out[threadIdx.x] = out[128 + (threadIdx.x ^ 1)];
}
// Nothing is stored for long: slow, and no deadlock.
KERNEL(long_loop, (1), (32), 0) {
  uint32_t x = threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < 300000; ++i) x = x * 1664525 + out[i % 128];
  out[threadIdx.x] = x;
}
CHECK(halves_of_a_warp) {
  uint32_t const mask = threadIdx.x % 32 < 16 ? 0xffff : 0xffff0000;
  out[threadIdx.x] = __shfl_xor_sync(mask, threadIdx.x, 5) + __reduce_add_sync(mask, 1);
}
KERNEL(early_exit, (1), (128), 0) {
  if (threadIdx.x >= 96) return;
  if (threadIdx.x % 32 >= 20) return;
  __shared__ uint32_t s[96];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x < 64 ? threadIdx.x + 32 : threadIdx.x - 64];
}
KERNEL(partial_warp, (1), (100), 0) {
  __shared__ uint32_t s[100];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[99 - threadIdx.x];
}
KERNEL(votes, (1), (100), 0) {
  out[threadIdx.x] = __syncthreads_count(threadIdx.x < 70);
  out[threadIdx.x] += 1000 * __syncthreads_or(threadIdx.x == 99);
  out[threadIdx.x] += 10000 * __syncthreads_and(threadIdx.x < 99);
  out[threadIdx.x] += 100000 * __syncthreads_and(threadIdx.x < 100);
}

// ---- named barriers

CHECK(named_barriers) {  // two warps fill, two drain, four times
  __shared__ uint32_t s[64];
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x < 64) {
      if (i) bar_sync(2, 128);
      s[threadIdx.x] = threadIdx.x + i;
      bar_arrive(1, 128);
    } else {
      bar_sync(1, 128);
      out[threadIdx.x - 64] = s[127 - threadIdx.x];
      if (i < 3) bar_arrive(2, 128);
    }
  }
}
CHECK(leave_before_a_barrier) {  // the last warp writes and goes; for those that remain, its going is an arrival
  __shared__ uint32_t s[32];
  if (threadIdx.x >= 96) {
    s[threadIdx.x - 96] = threadIdx.x;
    return;
  }
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x % 32];
}
CHECK(all_threads_in_other_words) {
  __shared__ uint32_t s[128];
  s[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    bar_sync(0, 128);
  }
  out[threadIdx.x] = s[127 - threadIdx.x];
}
CHECK(named_barrier_of_others) {  // two warps meet, later the other two: nothing orders the pairs
  __shared__ uint32_t s;
  asm volatile("" ::"r"(address(&s)));  // the compiler must not see all of its uses
  if (threadIdx.x < 64) {
    if (threadIdx.x == 0) s = 1;
  } else {
    for (int i = 0; i < 20; ++i) __nanosleep(100);
  }
  bar_sync(1, 64);
  if (threadIdx.x >= 64) out[threadIdx.x] = s;
}
CHECK(named_barrier_counts) { bar_sync(1, threadIdx.x < 32 ? 64 : 128); }
CHECK(named_barrier_odd_count) { bar_sync(1, 72 + out[0]); }
CHECK(named_barrier_alone) {
  if (threadIdx.x < 32) bar_sync(3, 64);
}

// ---- mbarriers

KERNEL(init_by_lanes, (1), (64), 0) {
  __shared__ uint64_t b[4];
  if (threadIdx.x < 4) init(&b[threadIdx.x], 1);
  __syncthreads();
  if (threadIdx.x < 4) arrive(&b[threadIdx.x]);
  for (int i = 0; i < 4; ++i) wait(&b[i], 0);
  out[threadIdx.x] = 1;
}
CHECK(init_again) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 1), init(&b, 1);
}
CHECK(init_after_inval) {
  __shared__ uint64_t b;
  for (int i = 0; i < 100; ++i) {
    if (threadIdx.x == 0) init(&b, 128);
    __syncthreads();
    arrive(&b);
    wait(&b, 0);
    __syncthreads();
    if (threadIdx.x == 0) inval(&b);
  }
}
CHECK(init_unordered) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 128);
  arrive(&b);
}
CHECK(over_arrival) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 2), arrive(&b, 3);
}
CHECK(mbarrier_as_data) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) {
    init(&b, 2);
    out[0] = uint32_t(*reinterpret_cast<volatile uint64_t*>(&b));
  }
}
CHECK(alternating_consumers) {  // warps 1 and 2 take turns with one barrier; each polls and comes back
  __shared__ uint64_t full, empty;
  __shared__ uint32_t s;
  if (threadIdx.x == 0) init(&full, 1), init(&empty, 2);
  __syncthreads();
  int const warp = threadIdx.x / 32;
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 12; ++i) {
    if (warp == 0) {
      if (i) wait(&empty, (i - 1) & 1);
      s = i;
      arrive(&full);
    } else if (warp == 1 || warp == 2) {
      wait(&full, i & 1);
      if (i % 2 == warp - 1) out[i] = s;
      arrive(&empty);
    }
  }
}
CHECK(abandoned_poll) {  // a poll that fails, and no wait for that phase
  __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 1);
  __syncthreads();
  if (threadIdx.x == 32) out[0] = test_wait(&b, 0);
  __syncthreads();
  if (threadIdx.x == 0) arrive(&b), arrive(&b);
  __syncthreads();
  if (threadIdx.x == 64) arrive(&b);
  if (threadIdx.x == 32) wait(&b, 0);
}
CHECK(deadlock) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 2);
  __syncthreads();
  if (threadIdx.x == 0) arrive(&b);
  wait(&b, 0);
}
CHECK(deadlock_spin) {
  while (*reinterpret_cast<volatile uint32_t*>(out + 5) == 0) {
  }
}

// ---- asynchronous copies

template <uint32_t kBytes, bool kWaits>
__device__ void copy_in(uint32_t* out, void const* from) {
  __shared__ alignas(128) uint32_t s[64];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) {
    init(&b, 1);
    expect(&b, kBytes % 4096);
    bulk_load(s, from, kBytes, &b);
  }
  __syncthreads();
  if (kWaits) wait(&b, 0);
  out[threadIdx.x] = s[threadIdx.x % 64];
}
CHECK(load_in_flight) { copy_in<256, false>(out, out); }
CHECK(load_complete) { copy_in<256, true>(out, out + 128); }
CHECK(load_misaligned) { copy_in<256, true>(out, out + 1); }
CHECK(load_beyond_shared) { copy_in<0xfffffff0, true>(out, out); }
CHECK(load_beyond_global) { copy_in<256, true>(out, out + 4096); }
CHECK(load_at_exit) {
  __shared__ alignas(128) uint32_t s[64];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) {
    init(&b, 1);
    expect(&b, 256);
    bulk_load(s, out, 256, &b);
  }
}
// From shared to shared memory; then the source is written again.
template <bool kWaits>
__device__ void copy_within(uint32_t* out) {
  __shared__ alignas(128) uint32_t s[2][64];
  __shared__ uint64_t b;
  if (threadIdx.x < 64) s[0][threadIdx.x] = threadIdx.x;
  fence_proxy();
  if (threadIdx.x == 0) init(&b, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&b, 256);
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(
                     address(s[1])),
                 "r"(address(s[0])), "r"(address(&b))
                 : "memory");
  }
  if (kWaits) wait(&b, 0);
  if (threadIdx.x < 64) s[0][threadIdx.x] = 0;
  wait(&b, 0);
  out[threadIdx.x] = s[1][threadIdx.x % 64];
}
CHECK(copy_within_shared) { copy_within<true>(out); }
CHECK(copy_overtaken) { copy_within<false>(out); }
template <bool kFence, bool kWaits>
__device__ void copy_out(uint32_t* out) {
  __shared__ alignas(128) uint32_t s[128];
  s[threadIdx.x] = threadIdx.x;
  if (kFence) fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, s, 512);
    commit();
    if (kWaits) wait_read<0>();
  }
}
CHECK(store_without_proxy_fence) { copy_out<false, true>(out); }
CHECK(store_without_wait) { copy_out<true, false>(out); }
CHECK(store_complete) { copy_out<true, true>(out); }
CHECK(store_fence_by_reader) {
  __shared__ alignas(128) uint32_t s[128];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_proxy();
    bulk_store(out, s, 512);
    commit();
    wait_read<0>();
  }
}
CHECK(stores_by_lanes) {  // a part of a row each; a round overwrites what the one before it has read
  __shared__ alignas(128) uint32_t s[4][32];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 3; ++i) {
    s[warp][lane] = threadIdx.x + i;
    fence_proxy();
    __syncwarp();
    if (lane < 8) {
      bulk_store(out + i * 128 + warp * 32 + lane * 4, &s[warp][lane * 4], 16);
      commit();
      wait_read<0>();
    }
    __syncwarp();
  }
}
CHECK(stores_counted) {  // two buffers, one group may remain
  __shared__ alignas(128) uint32_t s[2][128];
  for (int i = 0; i < 6; ++i) {
    if (threadIdx.x == 0) wait_read<1>();
    __syncthreads();
    s[i & 1][threadIdx.x] = i * 128 + threadIdx.x;
    fence_proxy();
    __syncthreads();
    if (threadIdx.x == 0) bulk_store(out + i * 128, s[i & 1], 512), commit();
  }
  if (threadIdx.x == 0) wait_read<0>();
}
CHECK(stores_miscounted) {
  __shared__ alignas(128) uint32_t s[2][128];
  for (int i = 0; i < 6; ++i) {
    if (threadIdx.x == 0) wait_read<2>();
    __syncthreads();
    s[i & 1][threadIdx.x] = i * 128 + threadIdx.x;
    fence_proxy();
    __syncthreads();
    if (threadIdx.x == 0) bulk_store(out + i * 128, s[i & 1], 512), commit();
  }
  if (threadIdx.x == 0) wait_read<0>();
}
CHECK(store_uncommitted) {
  __shared__ alignas(128) uint32_t s[128];
  s[threadIdx.x] = threadIdx.x;
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(out, s, 512);
}

// ---- tensor memory

CHECK(tensor_memory) {
  uint32_t const base = tensor_allocate(64);
  tensor_store(base + tensor_lanes() + 63, threadIdx.x);
  out[threadIdx.x] = tensor_load(base + tensor_lanes() + 63);
  __syncthreads();
  tensor_free(base, 64);
}
CHECK(tensor_unallocated) { tensor_store(tensor_lanes(), 0); }
CHECK(tensor_columns) {
  uint32_t const base = tensor_allocate(64);
  tensor_store(base + tensor_lanes() + 64, threadIdx.x);
}
CHECK(tensor_odd_allocation) { tensor_allocate(48); }
CHECK(tensor_leak) { tensor_allocate(32); }
CHECK(tensor_uninitialised) {
  uint32_t const base = tensor_allocate(32);
  out[threadIdx.x] = tensor_load(base + tensor_lanes());
}
CHECK(tensor_other_lanes) {
  uint32_t const base = tensor_allocate(32);
  tensor_store(base + (tensor_lanes() ^ 1u << 21), 0);
}
CHECK(tensor_no_wait) {
  uint32_t const base = tensor_allocate(32);
  tensor_store(base + tensor_lanes(), 0);
  uint32_t v;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(v) : "r"(base + tensor_lanes()) : "memory");
  out[threadIdx.x] = v + 1;
}

// ---- bounds and alignment

CHECK(beyond_global) { out[threadIdx.x + 4096 - 127] = 1; }
CHECK(beyond_shared) {
  extern __shared__ uint32_t dynamic[];
  dynamic[threadIdx.x] = 0;
}
CHECK(misaligned_vector) { reinterpret_cast<uint4*>(out + 1)[threadIdx.x] = uint4{}; }
CHECK(trap) { __trap(); }
CHECK(unknown_opcode) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(1024), "l"(out)); }

// ---- clusters and launches

__global__ void __cluster_dims__(2, 1, 1) arrive_and_leave_kernel(uint32_t* out) {
  __shared__ uint32_t s;
  if (threadIdx.x == 0) s = 7;
  cluster_arrive();
  if (threadIdx.x >= 32) return;  // arrived, and does not wait
  uint32_t rank, remote, value = 0;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (rank == 1)
    for (int i = 0; i < 50; ++i) __nanosleep(100);
  cluster_wait();
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(&s)), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
  out[rank * 32 + threadIdx.x] = value;
  cluster_arrive();
  cluster_wait();
}
extern "C" int arrive_and_leave(uint32_t* out) {
  arrive_and_leave_kernel<<<2, 128>>>(out);
  return cudaGetLastError();
}
__global__ void __cluster_dims__(2, 1, 1) late_arrival_kernel(uint32_t* out) {
  __shared__ uint32_t s;
  int const warp = threadIdx.x / 32;
  uint32_t rank, remote, value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (warp == 3)
    for (int i = 0; i < 50; ++i) __nanosleep(100);
  if (threadIdx.x == 96) s = 7;
  cluster_arrive();
  if (warp == 1 || warp == 2) return;
  cluster_wait();
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(&s)), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
  out[rank * 128 + threadIdx.x] = value;
  cluster_arrive();
  cluster_wait();
}
extern "C" int late_arrival(uint32_t* out) {
  late_arrival_kernel<<<2, 128>>>(out);
  return cudaGetLastError();
}
__global__ void __cluster_dims__(2, 1, 1) remote_after_exit_kernel(uint32_t* out) {
  __shared__ uint32_t s;
  uint32_t rank, remote, value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) s = 7;
  cluster_arrive();
  cluster_wait();
  if (rank == 0) return;
  for (int i = 0; i < 3000; ++i) __nanosleep(100);
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(&s)), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
  out[threadIdx.x] = value;
}
extern "C" int remote_after_exit(uint32_t* out) {
  remote_after_exit_kernel<<<2, 32>>>(out);
  return cudaGetLastError();
}
__global__ void __cluster_dims__(2, 2, 2) three_dimensions_kernel(uint32_t* out) {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  uint32_t const cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  uint32_t const thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[cta * 60 + thread] = rank == (blockIdx.z % 2 * 2 + blockIdx.y % 2) * 2 + blockIdx.x % 2;
}
extern "C" int three_dimensions(uint32_t* out) {
  three_dimensions_kernel<<<dim3(4, 2, 4), dim3(5, 4, 3)>>>(out);
  return cudaGetLastError();
}
extern "C" int memset_beyond(uint32_t* out) { return cudaMemset(out, 0, 4 * 4096 + 1); }
KERNEL(too_many_threads, (1), (1, 1, 65), 0) { out[0] = 1; }
KERNEL(too_large_a_grid, (1, 65536), (32), 0) { out[0] = 1; }
KERNEL(too_much_shared, (1), (32), 49153) { out[0] = 1; }
extern "C" int allow_shared(uint32_t*) {
  return cudaFuncSetAttribute(too_much_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
}
KERNEL(threads_that_wrap, (1), (65536, 65536), 0) { out[0] = 1; }
__global__ void __maxnreg__(128) too_many_registers_kernel(uint32_t* out) { out[0] = 1; }
extern "C" int too_many_registers(uint32_t* out) {
  too_many_registers_kernel<<<1, 1024>>>(out);
  return cudaGetLastError();
}
KERNEL(many_clusters, (300), (32), 0) { atomicAdd(&out[0], 1); }

// ---- module memory, local arrays, printf

__device__ uint32_t scalar = 5;
__device__ float real = 1.5f;
__device__ float reals[3] = {1.f, 2.f, -3.f};
__constant__ uint32_t table[4] = {1, 2, 3, 0xfffffff0};
CHECK(module_memory) { out[threadIdx.x] = scalar + uint32_t(real * 2) + uint32_t(-reals[2]) + table[threadIdx.x % 4]; }
CHECK(local_array) {
  uint32_t a[32];
  for (int i = 0; i < 32; ++i) a[i ^ out[200] % 32] = i + threadIdx.x;
  out[threadIdx.x] = a[out[threadIdx.x] % 32];
}
extern "C" __device__ int printf(char const*, ...);
CHECK(prints) {
  out[threadIdx.x] = 3;
  if (threadIdx.x == 0) printf("%d %f\n", 1, 2.0);
}
CHECK(prints_never) {
  if (out[200] == 12345) printf("never %d\n", 1);
  out[threadIdx.x] = 3;
}
__device__ __noinline__ uint32_t called(uint32_t x) { return x * 3 + __popc(x); }
CHECK(calls) { out[threadIdx.x] = called(threadIdx.x); }
CHECK(calls_never) {
  if (out[200] == 12345) out[0] = called(threadIdx.x);
  out[threadIdx.x] = 3;
}

// Single features of SM100 (some of them SM90's), a kernel each: tensor memory loads and stores, register
// reallocation, cluster-launch control, dependent launches, tensor maps edited on the device.
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "helpers.h"
#include "tensor_map.h"

// Stores 128 x 16 words to tensor memory, one column or four at a time, and reads them back in every shape: 16 words a
// thread with all rows of a warp, then 8 with half of them. Last, four columns stored by halves of the rows.
__global__ void tensor_memory(uint32_t const* in, uint32_t* out) {
  using namespace cute::SM100::TMEM::LOAD;
  using namespace cute::SM100::TMEM::STORE;
  __shared__ uint32_t base;
  int const i = threadIdx.x, warp = __shfl_sync(~0u, i / 32, 0);
  if (warp == 0) cute::TMEM::Allocator1Sm().allocate(32, &base);
  tensor_memory_fence_before();
  __syncthreads();
  tensor_memory_fence_after();
  uint32_t const mine = base + (warp << 21), lower = mine + (16 << 16);
  in += i * 16, out += i * 28;
  for (int j = 0; j < 8; ++j) SM100_TMEM_STORE_32dp32b1x::copy(in[j], mine + j);
  for (int j = 8; j < 16; j += 4) SM100_TMEM_STORE_32dp32b4x::copy(in[j], in[j + 1], in[j + 2], in[j + 3], mine + j);
  SM100_TMEM_STORE_16dp128b1x::copy(in[0], in[1], mine + 16);
  SM100_TMEM_STORE_16dp128b1x::copy(in[2], in[3], lower + 16);
  cutlass::arch::fence_view_async_tmem_store();
  uint32_t x[28];
  SM100_TMEM_LOAD_32dp32b2x::copy(mine, x[0], x[1]);
  SM100_TMEM_LOAD_32dp32b4x::copy(mine + 2, x[2], x[3], x[4], x[5]);
  SM100_TMEM_LOAD_32dp32b2x::copy(mine + 6, x[6], x[7]);
  SM100_TMEM_LOAD_32dp32b8x::copy(mine + 8, x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]);
  SM100_TMEM_LOAD_16dp64b2x::copy(mine + 3, x[16], x[17]);
  SM100_TMEM_LOAD_16dp128b1x::copy(lower + 4, x[18], x[19]);
  SM100_TMEM_LOAD_16dp256b1x::copy(lower + 8, x[20], x[21], x[22], x[23]);
  SM100_TMEM_LOAD_32dp32b4x::copy(mine + 16, x[24], x[25], x[26], x[27]);
  cutlass::arch::fence_view_async_tmem_load();
  for (int j = 0; j < 28; ++j) out[j] = x[j];
  tensor_memory_fence_before();
  __syncthreads();
  if (warp == 0) {
    cute::TMEM::Allocator1Sm().release_allocation_lock();
    cute::TMEM::Allocator1Sm().free(base, 32);
  }
}

// Two warp groups trade registers.
__global__ void __maxnreg__(128) registers(uint32_t const* in, uint32_t* out) {
  int const i = threadIdx.x;
  if (i < 128) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    out[i] = in[i] + 1;
  } else {
    cutlass::arch::warpgroup_reg_alloc<208>();
    out[i] = in[i] - 1;
  }
}

// Every CTA does its own piece, then those of the CTAs that it cancels. visits[piece] counts.
__global__ void pieces(uint32_t* visits) {
  __shared__ alignas(16) uint4 response;
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    Bar::init(&full, 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  uint32_t piece = blockIdx.x, phase = 0;
  for (bool more = true; more; phase ^= 1) {
    if (threadIdx.x == 0) {
      atomicAdd(&visits[piece], 1);
      TxBar::arrive_and_expect_tx(&full, 16);
      asm volatile(
          "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
              shared_address(&response)),
          "r"(shared_address(&full))
          : "memory");
    }
    Bar::wait(&full, phase);
    uint32_t cancelled;
    asm volatile(
        "{.reg .b128 r; .reg .pred p; ld.shared.b128 r, [%2];"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r; selp.u32 %0, 1, 0, p;"
        "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, _, _, _}, r;}"
        : "=r"(cancelled), "+r"(piece)
        : "r"(shared_address(&response))
        : "memory");
    more = cancelled;
    cute::tma_store_fence();
    __syncthreads();
  }
}

// The second kernel may start early, and waits for what the first has written.
__global__ void first(uint32_t* buffer) {
  asm volatile("griddepcontrol.launch_dependents;");
  buffer[threadIdx.x] = threadIdx.x * 3;
}

__global__ void second(uint32_t* buffer) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  buffer[64 + threadIdx.x] = buffer[threadIdx.x] + 1;
}

// One CTA a table: `map` describes 8 rows of 32 words; its copy is pointed at the CTA's table, of `rows` rows,
// published to `slots`, and used to load a box of 8 rows: those outside are zero.
__global__ void edited(CUtensorMap const __grid_constant__ map, CUtensorMap* slots, uint32_t* const* tables,
                       uint32_t const* rows, uint32_t* out) {
  __shared__ alignas(128) CUtensorMap staged;
  __shared__ alignas(128) uint32_t box[8 * 32];
  __shared__ uint64_t full;
  int const i = threadIdx.x;
  CUtensorMap* const slot = slots + blockIdx.x;
  if (i == 0) {
    staged = map;
    uint32_t const address = shared_address(&staged);
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(address),
                 "l"(tables[blockIdx.x])
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(address),
                 "r"(rows[blockIdx.x])
                 : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(address), "l"(160ull)
                 : "memory");
    Bar::init(&full, 1);
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
          slot),
      "r"(shared_address(&staged))
      : "memory");
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(slot) : "memory");
  if (i == 0) {
    TxBar::arrive_and_expect_tx(&full, sizeof(box));
    cute::SM90_TMA_LOAD_2D::copy(slot, &full, kEvictNormal, box, 0, 0);
  }
  __syncwarp();
  Bar::wait(&full, 0);
  for (int j = 0; j < 8; ++j) out[(blockIdx.x * 8 + j) * 32 + i] = box[j * 32 + i];
}

extern "C" int run_tensor_memory(uint32_t const* in, uint32_t* out) {
  tensor_memory<<<1, 128>>>(in, out);
  return cudaGetLastError();
}

extern "C" int run_registers(uint32_t const* in, uint32_t* out) {
  registers<<<1, 256>>>(in, out);
  return cudaGetLastError();
}

extern "C" int run_pieces(uint32_t* visits, int count) {
  pieces<<<count, 32>>>(visits);
  return cudaGetLastError();
}

extern "C" int run_dependent(uint32_t* buffer) {
  first<<<1, 64>>>(buffer);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(64);
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, second, buffer);
}

// Rows of a table are 40 words apart.
extern "C" int run_edited(void* slots, uint32_t* const* tables, uint32_t const* rows, uint32_t* out, int count) {
  CUtensorMap map;
  int const error = encode(map, out, {CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, {32, 8}, {128}, {32, 8}});
  if (error) return error;
  edited<<<count, 32>>>(map, static_cast<CUtensorMap*>(slots), tables, rows, out);
  return cudaGetLastError();
}

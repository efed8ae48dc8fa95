// MXFP8 GEMM for SM100, as small as a warp-specialised persistent kernel gets: the subject of the planted bugs.
//
// out = A B^T in bf16, A (m, k) and B (n, k) in e4m3 with one e8m0 scale per 32 elements of a row. Two CTAs compute a
// tile of 256 x 128: each holds 128 rows of A and 64 of B, and CTA 0 issues the MMAs of both. The epilogue also forms
// dot = out weight, the sum of dot, and the largest magnitude of each tile.
#include <cuda_bf16.h>

#include <cutlass/numeric_types.h>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/copy_sm100_tma.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "helpers.h"
#include "tensor_map.h"

using E4M3 = cutlass::float_e4m3_t;
constexpr auto kMajor = cute::UMMA::Major::K;
using Mma = cute::SM100_MMA_MXF8F6F4_2x1SM_SS<E4M3, E4M3, float, cutlass::float_ue8m0_t, 256, 128, kMajor, kMajor>;
using ScaleCopy = cute::SM100::TMEM::UTCCP::SM100_UTCCP_4x32dp128bit_2cta;

constexpr int kStages = 2, kK = 128;  // a stage is one swizzle atom deep
constexpr int kScaleColumns = 256;    // tensor memory: accumulators at 0 and 128, then the scales of A and B
constexpr int kAtom = 512;            // bytes of the scales of 128 rows x 4 blocks
constexpr uint16_t kBoth = 3;         // multicast mask

struct Params {
  CUtensorMap a, b, scale_a, scale_b, out;
  float const* weight;
  float *dot, *sum;
  uint32_t* peak;
  int tiles_n, tiles, blocks_k;
};

struct Smem {
  alignas(1024) uint8_t a[kStages][128 * kK], b[kStages][64 * kK], out[2][128 * 128];
  alignas(128) uint8_t scale_a[kStages][kAtom], scale_b[kStages][kAtom];
  uint64_t full[kStages], empty[kStages], accumulator_full[2], accumulator_empty[2];
  uint32_t peak[8], tensor_memory;
};

// Position in a ring of two: stage buffers and accumulators alike.
struct Ring {
  uint32_t index = 0, phase;
  __device__ void next() { index ^= 1, phase ^= index == 0; }
};

// One warp of each CTA: fills the stages. Half of B's scales each, multicast to both.
__device__ void produce(Params const& p, Smem& s, int cta) {
  using Load = cute::SM100_TMA_2SM_LOAD_2D;
  using LoadBoth = cute::SM100_TMA_2SM_LOAD_MULTICAST_2D;
  constexpr uint32_t kBytes = 2 * (sizeof(s.a[0]) + sizeof(s.b[0]) + 2 * kAtom);
  Ring stage{0, 1};
  for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2) {
    int const tile_m = tile / p.tiles_n, tile_n = tile % p.tiles_n;
    for (int k = 0; k < p.blocks_k; ++k, stage.next()) {
      uint32_t const i = stage.index;
      Bar::wait(&s.empty[i], stage.phase);
      if (!cute::elect_one_sync()) continue;
      if (cta == 0) TxBar::arrive_and_expect_tx(&s.full[i], kBytes);
      Load::copy(&p.a, &s.full[i], kEvictNormal, s.a[i], k * kK, tile_m * 256 + cta * 128);
      Load::copy(&p.b, &s.full[i], kEvictNormal, s.b[i], k * kK, tile_n * 128 + cta * 64);
      Load::copy(&p.scale_a, &s.full[i], kEvictNormal, s.scale_a[i], 0, (tile_m * 2 + cta) * p.blocks_k + k);
      LoadBoth::copy(&p.scale_b, &s.full[i], kBoth, kEvictNormal, s.scale_b[i] + cta * kAtom / 2, cta * kAtom / 4,
                     tile_n * p.blocks_k + k);
    }
  }
  for (int i = 0; i < kStages; ++i, stage.next()) Bar::wait(&s.empty[stage.index], stage.phase);
}

// One warp of CTA 0.
__device__ void multiply(Params const& p, Smem& s) {
  using Layout = cute::UMMA::LayoutType;
  uint32_t const base = s.tensor_memory, scale_a = base + kScaleColumns, scale_b = scale_a + 4;
  Ring stage{0, 0}, accumulator{0, 1};
  for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, accumulator.next()) {
    Bar::wait(&s.accumulator_empty[accumulator.index], accumulator.phase);
    tensor_memory_fence_after();
    for (int k = 0; k < p.blocks_k; ++k, stage.next()) {
      uint32_t const i = stage.index;
      Bar::wait(&s.full[i], stage.phase);
      if (cute::elect_one_sync()) {
        ScaleCopy::copy(matrix_descriptor(s.scale_a[i], 128, Layout::SWIZZLE_NONE), scale_a);
        ScaleCopy::copy(matrix_descriptor(s.scale_b[i], 128, Layout::SWIZZLE_NONE), scale_b);
      }
      for (int block = 0; block < kK / 32; ++block) {
        cute::UMMA::InstrDescriptorBlockScaled d{};
        d.a_format_ = d.b_format_ = uint8_t(cute::UMMA::MXF8F6F4Format::E4M3);
        d.scale_format_ = 1;  // e8m0
        d.m_dim_ = 256 / 16, d.n_dim_ = 128 / 8;
        d.a_sf_id_ = d.b_sf_id_ = block;
        uint64_t const a = matrix_descriptor(s.a[i] + block * 32, 1024, Layout::SWIZZLE_128B);
        uint64_t const b = matrix_descriptor(s.b[i] + block * 32, 1024, Layout::SWIZZLE_128B);
        Mma::fma(a, b, base + accumulator.index * 128, k + block > 0, uint64_t(d.desc_) << 32, scale_a, scale_b);
      }
      cutlass::arch::umma_arrive_multicast_2x1SM(&s.empty[i], kBoth);
    }
    cutlass::arch::umma_arrive_multicast_2x1SM(&s.accumulator_full[accumulator.index], kBoth);
  }
}

// Four warps of each CTA, a row per thread, 64 columns at a time.
__device__ void finish(Params const& p, Smem& s, int cta) {
  int const thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  Ring accumulator{0, 0};
  for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, accumulator.next()) {
    int const row = tile / p.tiles_n * 256 + cta * 128, column = tile % p.tiles_n * 128;
    float dot = 0;
    uint32_t peak = 0;  // bits of a magnitude
    Bar::wait(&s.accumulator_full[accumulator.index], accumulator.phase);
    tensor_memory_fence_after();
    for (int half = 0; half < 2; ++half) {
      uint32_t x[64];
      uint32_t const source = s.tensor_memory + (warp << 21) + accumulator.index * 128 + half * 64;
#pragma unroll
      for (int i = 0; i < 64; i += 8)
        cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b8x::copy(source + i, x[i], x[i + 1], x[i + 2], x[i + 3],
                                                                 x[i + 4], x[i + 5], x[i + 6], x[i + 7]);
      cutlass::arch::fence_view_async_tmem_load();
      if (half == 1) {
        tensor_memory_fence_before();
        if (cute::elect_one_sync()) Bar::arrive(&s.accumulator_empty[accumulator.index], 0, 1);
      }
      if (thread == 0) cute::tma_store_wait<1>();
      named_barrier(1, 128);  // this half's staging buffer is free
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        __nv_bfloat162 y[4];
        for (int i = 0; i < 8; i += 2) {
          float const even = __uint_as_float(x[chunk * 8 + i]), odd = __uint_as_float(x[chunk * 8 + i + 1]);
          float const* const weight = p.weight + column + half * 64 + chunk * 8 + i;
          dot += even * weight[0] + odd * weight[1];
          peak = max(peak, max(__float_as_uint(fabsf(even)), __float_as_uint(fabsf(odd))));
          y[i / 2] = __floats2bfloat162_rn(even, odd);
        }
        uint8_t* const staged = &s.out[half][thread * 128 + (chunk ^ thread % 8) * 16];  // swizzled as the map says
        *reinterpret_cast<uint4*>(staged) = *reinterpret_cast<uint4 const*>(y);
      }
      peak = __reduce_max_sync(~0u, peak);
      if (lane == 0) s.peak[warp] = peak;
      cute::tma_store_fence();
      named_barrier(2, 128);  // the staging buffer is full
      if (thread == 0) {
        cute::SM90_TMA_STORE_2D::copy(&p.out, s.out[half], column + half * 64, row);
        cute::tma_store_arrive();
        for (int i = 0; i < 4; ++i) atomicMax(&p.peak[tile], s.peak[i]);
      }
    }
    atomicAdd(&p.dot[row + thread], dot);
    for (int mask = 16; mask > 0; mask /= 2) dot += __shfl_xor_sync(~0u, dot, mask);
    if (lane == 0) atomicAdd(p.sum, dot);
  }
  if (thread == 0) cute::tma_store_wait<0>();
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192) small_gemm(Params const __grid_constant__ p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Smem& s = *reinterpret_cast<Smem*>(memory);
  int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0), cta = cute::block_rank_in_cluster();
  cute::TMEM::Allocator2Sm allocator;
  if (warp == 4) allocator.allocate(512, &s.tensor_memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      Bar::init(&s.full[i], 1), Bar::init(&s.empty[i], 1), Bar::init(&s.accumulator_full[i], 1);
      Bar::init(&s.accumulator_empty[i], 8);  // the epilogue's warps of both CTAs
    }
    cutlass::arch::fence_barrier_init();
  }
  tensor_memory_fence_before();
  cute::cluster_sync();
  tensor_memory_fence_after();

  if (warp == 5) produce(p, s, cta);
  if (warp == 4 && cta == 0) multiply(p, s);
  if (warp < 4) finish(p, s, cta);
  tensor_memory_fence_before();
  cute::cluster_sync();  // nothing of the pair may be in use when one CTA leaves
  if (warp == 4) {
    allocator.release_allocation_lock();
    allocator.free(s.tensor_memory, 512);
  }
}

extern "C" int run_small_gemm(void* a, void* b, void* scale_a, void* scale_b, void* out, float const* weight,
                              float* dot, float* sum, uint32_t* peak, int m, int n, int k, int clusters) {
  cuuint64_t const rows_a = m, rows_b = n, depth = k, atoms_a = m / 128 * (k / kK), atoms_b = n / 128 * (k / kK);
  auto const bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8, words = CU_TENSOR_MAP_DATA_TYPE_UINT16;
  auto const swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  Params p{};
  int error = encode(p.a, a, {bytes, 2, {depth, rows_a}, {depth}, {kK, 128}, swizzle});
  if (!error) error = encode(p.b, b, {bytes, 2, {depth, rows_b}, {depth}, {kK, 64}, swizzle});
  if (!error) error = encode(p.scale_a, scale_a, {words, 2, {kAtom / 2, atoms_a}, {kAtom}, {kAtom / 2, 1}});
  if (!error) error = encode(p.scale_b, scale_b, {words, 2, {kAtom / 2, atoms_b}, {kAtom}, {kAtom / 4, 1}});
  if (!error)
    error =
        encode(p.out, out, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, {rows_b, rows_a}, {rows_b * 2}, {64, 128}, swizzle});
  p.weight = weight, p.dot = dot, p.sum = sum, p.peak = peak;
  p.tiles_n = n / 128, p.tiles = m / 256 * p.tiles_n, p.blocks_k = k / kK;
  if (!error) error = cudaFuncSetAttribute(small_gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (error) return error;
  small_gemm<<<2 * clusters, 192, sizeof(Smem)>>>(p);
  return cudaGetLastError();
}

// One tile of any tcgen05.mma, everything about it given at run time: shared-memory images of the operands and of the
// scales, matrix and instruction descriptors of each step. The test lays the images out from the layouts' definitions.
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "helpers.h"

constexpr int kImage = 32768, kScales = 4096, kSteps = 8;
// Tensor memory: the accumulator first, then 4 columns for each atom of A's scales, for each of B's.
constexpr int kScaleColumns = 256;
constexpr auto kPlain = cute::UMMA::LayoutType::SWIZZLE_NONE;

struct Step {
  uint64_t a, b;         // matrix descriptors, their addresses relative to the image
  uint32_t instruction;  // instruction descriptor
  int scale_a, scale_b;  // columns after kScaleColumns
  int accumulate;
};

struct Tile {
  uint8_t const *a, *b, *scale_a, *scale_b;  // the images of CTA 0, then those of CTA 1
  float* out;                                // 128 rows of `columns` a CTA
  int atoms_a, atoms_b, columns, steps;
  Step step[kSteps];
};

struct Smem {
  alignas(1024) uint8_t a[kImage], b[kImage], scale_a[kScales], scale_b[kScales];
  uint64_t full, done;
  uint32_t tensor_memory;
};

enum class Kind { f16, f8f6f4, mxf8f6f4, mxf4, mxf4nvf4_2, mxf4nvf4_4 };

#define PLAIN(group, kind)                                                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::" group ".kind::" kind \
               " [%0], %1, %2, %3, p;}" ::"r"(d),                                                  \
               "l"(a), "l"(b), "r"(step.instruction), "r"(step.accumulate)                         \
               : "memory");
#define SCALED(group, kind)                                                                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::" group ".kind::" kind     \
               " [%0], %1, %2, %3, [%5], [%6], p;}" ::"r"(d),                                          \
               "l"(a), "l"(b), "r"(step.instruction), "r"(step.accumulate), "r"(scale_a), "r"(scale_b) \
               : "memory");
#define BY_GROUP(macro, kind) \
  if constexpr (kGroup == 1) macro("1", kind) else macro("2", kind)

template <Kind kKind, int kGroup>
__device__ void multiply(Step const& step, uint32_t d, uint64_t a, uint64_t b, uint32_t scale_a, uint32_t scale_b) {
  if constexpr (kKind == Kind::f16) BY_GROUP(PLAIN, "f16")
  if constexpr (kKind == Kind::f8f6f4) BY_GROUP(PLAIN, "f8f6f4")
  if constexpr (kKind == Kind::mxf8f6f4) BY_GROUP(SCALED, "mxf8f6f4.block_scale.scale_vec::1X")
  if constexpr (kKind == Kind::mxf4) BY_GROUP(SCALED, "mxf4.block_scale.scale_vec::2X")
  if constexpr (kKind == Kind::mxf4nvf4_2) BY_GROUP(SCALED, "mxf4nvf4.block_scale.scale_vec::2X")
  if constexpr (kKind == Kind::mxf4nvf4_4) BY_GROUP(SCALED, "mxf4nvf4.block_scale.scale_vec::4X")
}

template <Kind kKind, int kGroup>
__global__ void __launch_bounds__(128) multiply_tile(Tile const __grid_constant__ p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Smem& s = *reinterpret_cast<Smem*>(memory);
  using Allocator = cute::conditional_t<kGroup == 1, cute::TMEM::Allocator1Sm, cute::TMEM::Allocator2Sm>;
  using namespace cute::SM100::TMEM::UTCCP;
  using ScaleCopy = cute::conditional_t<kGroup == 1, SM100_UTCCP_4x32dp128bit_1cta, SM100_UTCCP_4x32dp128bit_2cta>;
  int const thread = threadIdx.x, warp = __shfl_sync(~0u, thread / 32, 0), cta = blockIdx.x;
  if (warp == 0) Allocator().allocate(512, &s.tensor_memory);
  if (thread == 0) {
    Bar::init(&s.full, 1);
    Bar::init(&s.done, 1);
    cutlass::arch::fence_barrier_init();
    TxBar::arrive_and_expect_tx(&s.full, 2 * kImage + 2 * kScales);
    cute::SM90_BULK_COPY_G2S::copy(p.a + cta * kImage, &s.full, s.a, kImage);
    cute::SM90_BULK_COPY_G2S::copy(p.b + cta * kImage, &s.full, s.b, kImage);
    cute::SM90_BULK_COPY_G2S::copy(p.scale_a + cta * kScales, &s.full, s.scale_a, kScales);
    cute::SM90_BULK_COPY_G2S::copy(p.scale_b + cta * kScales, &s.full, s.scale_b, kScales);
  }
  tensor_memory_fence_before();
  __syncthreads();
  tensor_memory_fence_after();
  Bar::wait(&s.full, 0);
  cute::cluster_sync();  // the images of both CTAs have come

  uint32_t const base = s.tensor_memory;
  if (warp == 0 && cta == 0 && cute::elect_one_sync()) {
    uint64_t const a = cute::cast_smem_ptr_to_uint(s.a) >> 4, b = cute::cast_smem_ptr_to_uint(s.b) >> 4;
    uint32_t const scale_a = base + kScaleColumns, scale_b = scale_a + 4 * p.atoms_a;
    for (int i = 0; i < p.atoms_a; ++i)
      ScaleCopy::copy(matrix_descriptor(s.scale_a + i * 512, 128, kPlain), scale_a + 4 * i);
    for (int i = 0; i < p.atoms_b; ++i)
      ScaleCopy::copy(matrix_descriptor(s.scale_b + i * 512, 128, kPlain), scale_b + 4 * i);
    for (int i = 0; i < p.steps; ++i) {
      Step const& step = p.step[i];
      multiply<kKind, kGroup>(step, base, step.a + a, step.b + b, scale_a + step.scale_a, scale_b + step.scale_b);
    }
    uint32_t const done = cute::cast_smem_ptr_to_uint(&s.done);
    if constexpr (kGroup == 1)
      asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(done));
    else
      asm volatile(
          "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
              done),
          "h"(uint16_t(3)));
  }
  __syncwarp();
  Bar::wait(&s.done, 0);
  tensor_memory_fence_after();
  float* const row = p.out + int64_t(cta * 128 + thread) * p.columns;
  for (int column = 0; column < p.columns; ++column) {
    uint32_t x;
    cute::SM100::TMEM::LOAD::SM100_TMEM_LOAD_32dp32b1x::copy(base + (warp << 21) + column, x);
    cutlass::arch::fence_view_async_tmem_load();
    row[column] = __uint_as_float(x);
  }
  tensor_memory_fence_before();
  cute::cluster_sync();
  if (warp == 0) {
    Allocator().release_allocation_lock();
    Allocator().free(base, 512);
  }
}

template <Kind kKind, int kGroup>
static int run_group(Tile const& tile) {
  auto const kernel = multiply_tile<kKind, kGroup>;
  int const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem));
  if (error) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kGroup;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kGroup);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = sizeof(Smem);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, tile);
}

template <Kind kKind>
static int run_kind(Tile const& tile, int group) {
  return group == 1 ? run_group<kKind, 1>(tile) : run_group<kKind, 2>(tile);
}

// steps: on the host.
extern "C" int run_tile(int kind, int group, uint8_t const* a, uint8_t const* b, uint8_t const* scale_a,
                        uint8_t const* scale_b, float* out, int atoms_a, int atoms_b, int columns, Step const* steps,
                        int count) {
  Tile tile{a, b, scale_a, scale_b, out, atoms_a, atoms_b, columns, count, {}};
  for (int i = 0; i < count && i < kSteps; ++i) tile.step[i] = steps[i];
  switch (Kind(kind)) {
    case Kind::f16:
      return run_kind<Kind::f16>(tile, group);
    case Kind::f8f6f4:
      return run_kind<Kind::f8f6f4>(tile, group);
    case Kind::mxf8f6f4:
      return run_kind<Kind::mxf8f6f4>(tile, group);
    case Kind::mxf4:
      return run_kind<Kind::mxf4>(tile, group);
    case Kind::mxf4nvf4_2:
      return run_kind<Kind::mxf4nvf4_2>(tile, group);
    case Kind::mxf4nvf4_4:
      return run_kind<Kind::mxf4nvf4_4>(tile, group);
  }
  return cudaErrorInvalidValue;
}

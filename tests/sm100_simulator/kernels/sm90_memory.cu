// What SM90 and SM100 share, one kernel a subject: recorded on a GPU by record_sm90.py and compared bit by bit.
// Matrices in shared memory, atomics, the tensor memory accelerator, clusters. sm90_overlap.cu has the scalars.
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "helpers.h"
#include "tensor_map.h"

// The same offset in the other CTA of the pair.
__device__ uint32_t peer_address(void const* p) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(peer)
      : "r"(shared_address(p)), "r"(cute::block_rank_in_cluster() ^ 1));
  return peer;
}

#define LOAD_MATRIX(shape)                                                                 \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" shape ".shared.b16 {%0, %1, %2, %3}, [%4];" \
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                            \
               : "r"(shared_address(row))                                                  \
               : "memory");
#define STORE_MATRIX(shape)                                                         \
  asm volatile("stmatrix.sync.aligned.m8n8.x4" shape                                \
               ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(target)), \
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])                           \
               : "memory");

// One warp. in: 4 matrices of 8 rows of 4 words. out: 16 words a thread.
__global__ void matrices(uint32_t const* in, uint32_t* out) {
  __shared__ alignas(128) uint32_t source[128], stored[128];
  int const i = threadIdx.x;
  uint32_t r[4];
  for (int j = 0; j < 4; ++j) source[i * 4 + j] = in[i * 4 + j];
  __syncwarp();
  // Each thread names one row; the rows are permuted so that a wrong owner shows.
  uint32_t* const row = source + (i * 5 % 32) * 4;
  uint32_t* const target = stored + (i * 11 % 32) * 4;
  out += i * 16;
  LOAD_MATRIX("")
  for (int j = 0; j < 4; ++j) out[j] = r[j];
  LOAD_MATRIX(".trans")
  for (int j = 0; j < 4; ++j) out[4 + j] = r[j];
  STORE_MATRIX("")
  __syncwarp();
  for (int j = 0; j < 4; ++j) out[8 + j] = stored[i * 4 + j];
  __syncwarp();
  STORE_MATRIX(".trans")
  __syncwarp();
  for (int j = 0; j < 4; ++j) out[12 + j] = stored[i * 4 + j];
}

// An atomic on the thread's own cell, which keeps its result, and one on a cell that all threads share.
#define ATOMIC(op, constraint, value)                                                                                  \
  {                                                                                                                    \
    auto old = value;                                                                                                  \
    if (shared) {                                                                                                      \
      asm volatile("atom.shared." op " %0, [%1], %2;"                                                                  \
                   : "=" constraint(old)                                                                               \
                   : "r"(shared_address(own)), constraint(value)                                                       \
                   : "memory");                                                                                        \
      asm volatile("red.shared." op " [%0], %1;" ::"r"(shared_address(common)), constraint(value) : "memory");         \
    } else {                                                                                                           \
      asm volatile("atom.global." op " %0, [%1], %2;" : "=" constraint(old) : "l"(own), constraint(value) : "memory"); \
      asm volatile("red.global." op " [%0], %1;" ::"l"(common), constraint(value) : "memory");                         \
    }                                                                                                                  \
    out[0] = uint32_t(old), out[1] = uint32_t(uint64_t(old) >> 32), out += 2 * blockDim.x;                             \
    own += blockDim.x, common += 1;                                                                                    \
  }

constexpr int kAtomics = 12;

// cells: for each of kAtomics a 64-bit word a thread, then a common one each. Shared memory: a copy of the same.
__global__ void atomics(uint64_t* global_cells, uint32_t const* in, uint32_t* out, bool shared) {
  __shared__ uint64_t shared_cells[(kAtomics + 1) * 64];
  int const i = threadIdx.x, cells = kAtomics * 64 + kAtomics;
  for (int j = i; j < cells; j += blockDim.x) shared_cells[j] = global_cells[j];
  __syncthreads();
  uint64_t* const first = shared ? shared_cells : global_cells;
  uint64_t *own = first + i, *common = first + kAtomics * 64;
  uint32_t const x = in[i];
  uint64_t const wide = uint64_t(x) << 20 | i;
  uint32_t const one = __float_as_uint(float(int(x % 1024) - 512));  // sums of these are exact
  uint32_t const halves = 0x3c004000u + (x & 0x01000100u);           // f16x2: small integers and halves
  out += i * 2;
  ATOMIC("add.u32", "r", x)
  ATOMIC("min.s32", "r", x)
  ATOMIC("max.u32", "r", x)
  ATOMIC("and.b32", "r", x)
  ATOMIC("or.b32", "r", x)
  ATOMIC("xor.b32", "r", x)
  ATOMIC("inc.u32", "r", x)
  ATOMIC("dec.u32", "r", x)
  ATOMIC("add.u64", "l", wide)
  ATOMIC("max.u64", "l", wide)
  ATOMIC("add.f32", "r", one)
  ATOMIC("add.noftz.f16x2", "r", halves)
  uint32_t const old = atomicCAS(reinterpret_cast<uint32_t*>(first + i), in[64 + i], x);
  uint32_t const older = atomicExch(reinterpret_cast<uint32_t*>(first + i), ~old);
  out[0] = old, out[1] = older;
  __syncthreads();
  if (shared)
    for (int j = i; j < cells; j += blockDim.x) global_cells[j] = shared_cells[j];
}

// Tensor loads, all at multiples of 16 bytes along the first dimension: on others an H200 gives up with an illegal
// instruction. Each has its own buffer and barrier: even ones are fetched by CTA 0 for both, odd ones by each CTA.
constexpr int kMaps = 6, kPlaces = 3, kLoads = kMaps * kPlaces, kBuffer = 2048;

struct LoadParams {
  CUtensorMap maps[kMaps];
  int bytes[kMaps];
  int place[kMaps][kPlaces][3];
  uint32_t* out;
};

struct LoadSmem {
  alignas(1024) uint8_t buffer[kLoads][kBuffer];
  uint64_t full[kLoads], peers;
  uint32_t inbox[64];
};

__global__ void __cluster_dims__(2) loads(LoadParams const __grid_constant__ p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  LoadSmem& s = *reinterpret_cast<LoadSmem*>(memory);
  int const i = threadIdx.x, cta = cute::block_rank_in_cluster();
  uint32_t* out = p.out + cta * (kLoads * kBuffer / 4 + 256);
  // Boxes differ in size: what none covers stays zero.
  for (int j = i; j < kLoads * kBuffer / 4; j += 64) reinterpret_cast<uint32_t*>(s.buffer)[j] = 0;
  if (i == 0) {
    for (int load = 0; load < kLoads; ++load) Bar::init(&s.full[load], 1);
    Bar::init(&s.peers, 64);
    cutlass::arch::fence_barrier_init();
  }
  cute::tma_store_fence();
  cute::cluster_sync();
  if (i == 0) {
    for (int load = 0; load < kLoads; ++load) {
      int const map = load / kPlaces;
      int const* const at = p.place[map][load % kPlaces];
      TxBar::arrive_and_expect_tx(&s.full[load], p.bytes[map]);
      if (load % 2 == 0 && cta == 1) continue;
      int const x = at[0] + (load % 2) * cta * 8;
      if (map < 4 && load % 2 == 0)
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&p.maps[map], &s.full[load], 3, kEvictNormal, s.buffer[load], x, at[1]);
      else if (map < 4)
        cute::SM90_TMA_LOAD_2D::copy(&p.maps[map], &s.full[load], kEvictNormal, s.buffer[load], x, at[1]);
      else if (load % 2 == 0)
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p.maps[map], &s.full[load], 3, kEvictNormal, s.buffer[load], x, at[1],
                                               at[2]);
      else
        cute::SM90_TMA_LOAD_3D::copy(&p.maps[map], &s.full[load], kEvictNormal, s.buffer[load], x, at[1], at[2]);
    }
  }
  for (int load = 0; load < kLoads; ++load) Bar::wait(&s.full[load], 0);
  __syncthreads();
  for (int j = i; j < kLoads * kBuffer / 4; j += 64) out[j] = reinterpret_cast<uint32_t const*>(s.buffer)[j];
  out += kLoads * kBuffer / 4;

  // The peer's shared memory: read it, write it and say so on its barrier.
  cute::cluster_sync();
  uint32_t word;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(peer_address(s.buffer[1] + i * 4)) : "memory");
  out[i] = word;
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_address(&s.inbox[i])), "r"(word ^ i) : "memory");
  Bar::arrive(&s.peers, cta ^ 1, 1);
  bool done = false;
  while (!done) {
    uint32_t flag;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p;}"
        : "=r"(flag)
        : "r"(shared_address(&s.peers))
        : "memory");
    done = flag;
  }
  out[64 + i] = s.inbox[63 - i];
  out[128 + i] = Bar::test_wait(&s.peers, 1, 1);  // the second phase is not over, the first is
  out[192 + i] = Bar::test_wait(&s.peers, 0, 1);
  cute::cluster_sync();
}

// Tensor stores and reductions of one staged box into tensors of their own, over their far edges: a store at a negative
// coordinate is an illegal instruction to an H200.
constexpr int kStores = 8;
#define REDUCE(op, map, x, y)                                          \
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." op \
               ".tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),    \
               "r"(shared_address(box)), "r"(x), "r"(y)                \
               : "memory");

struct StoreParams {
  CUtensorMap maps[kStores];
};

__global__ void stores(StoreParams const __grid_constant__ p, uint32_t const* in) {
  __shared__ alignas(1024) uint32_t box[8 * 16];  // 8 rows of 64 bytes
  __shared__ alignas(1024) uint32_t floats[8 * 16];
  int const i = threadIdx.x;
  for (int j = i; j < 128; j += 64) box[j] = in[j], floats[j] = __float_as_uint(float(int(in[j] % 2048) - 1024) / 8);
  cute::tma_store_fence();
  __syncthreads();
  if (i == 0) {
    cute::SM90_TMA_STORE_2D::copy(&p.maps[0], box, 4, 2);
    cute::SM90_TMA_STORE_2D::copy(&p.maps[1], box, 12, 5);
    REDUCE("add", &p.maps[2], 8, 7)
    REDUCE("min", &p.maps[3], 4, 1)
    REDUCE("max", &p.maps[4], 4, 1)
    REDUCE("and", &p.maps[5], 8, 6)
    REDUCE("xor", &p.maps[6], 12, 10)
    cute::SM90_TMA_REDUCE_ADD_2D::copy(&p.maps[7], floats, 4, 3);
    cute::tma_store_arrive();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

// Bulk copies without a tensor map: in, between the CTAs, out, and three reductions. Pieces of 64 words.
__global__ void __cluster_dims__(2) bulk(uint32_t const* in, uint32_t* out) {
  __shared__ alignas(128) uint32_t mine[64], both[64], received[64];
  __shared__ uint64_t full, remote;
  int const i = threadIdx.x, cta = cute::block_rank_in_cluster();
  if (i == 0) {
    Bar::init(&full, 1);
    Bar::init(&remote, 1);
    cutlass::arch::fence_barrier_init();
    TxBar::arrive_and_expect_tx(&full, 512);
    TxBar::arrive_and_expect_tx(&remote, 256);
  }
  cute::cluster_sync();
  if (i == 0) {
    cute::SM90_BULK_COPY_G2S::copy(in + cta * 64, &full, mine, 256);
    if (cta == 1)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 256, [%2], "
          "%3;" ::"r"(shared_address(both)),
          "l"(in + 128), "r"(shared_address(&full)), "h"(uint16_t(3))
          : "memory");
  }
  Bar::wait(&full, 0);
  __syncthreads();
  if (i == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(
                     peer_address(received)),
                 "r"(shared_address(mine)), "r"(peer_address(&remote))
                 : "memory");
  Bar::wait(&remote, 0);
  __syncthreads();
  out += cta * 64 * 6;
  out[i] = received[i] ^ both[63 - i];
  if (i == 0) {
    cute::SM90_BULK_COPY_S2G::copy(received, out + 64, 256);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 256;" ::"l"(out + 128),
                 "r"(shared_address(mine))
                 : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32 [%0], [%1], 256;" ::"l"(out + 192),
                 "r"(shared_address(mine))
                 : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.or.b32 [%0], [%1], 128;" ::"l"(out + 256),
                 "r"(shared_address(both))
                 : "memory");
    cute::tma_store_arrive();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  cute::cluster_sync();
}

extern "C" int run_matrices(uint32_t const* in, uint32_t* out) {
  matrices<<<1, 32>>>(in, out);
  return cudaGetLastError();
}

extern "C" int run_atomics(uint64_t* cells, uint32_t const* in, uint32_t* out, int shared) {
  atomics<<<1, 64>>>(cells, in, out, shared != 0);
  return cudaGetLastError();
}

// halves: 52 x 24 16-bit words, rows of 56. words: 24 x 10 x 6 floats, rows of 24.
extern "C" int run_loads(void* halves, void* words, uint32_t* out) {
  LoadParams p{};
  CUtensorMapSwizzle const swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                         CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  cuuint32_t const widths[] = {24, 16, 32, 64};
  int const places[kMaps][kPlaces][3] = {{{0, 0}, {-8, -3}, {40, 16}},         {{8, 5}, {-16, 2}, {48, 20}},
                                         {{8, 3}, {-8, -15}, {32, 22}},        {{0, 0}, {-40, 1}, {16, 12}},
                                         {{0, 0, 0}, {-4, 8, -1}, {12, 7, 5}}, {{4, 1, 3}, {16, -2, 4}, {-8, 3, -2}}};
  int error = 0;
  for (int map = 0; map < kMaps && !error; ++map) {
    for (int place = 0; place < kPlaces; ++place)
      for (int j = 0; j < 3; ++j) p.place[map][place][j] = places[map][place][j];
    if (map < 4) {
      error = encode(p.maps[map], halves,
                     {CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, {52, 24}, {112}, {widths[map], 16}, swizzles[map]});
      p.bytes[map] = widths[map] * 16 * 2;
    } else {
      cuuint32_t const width = map == 4 ? 32 : 12;
      error = encode(p.maps[map], words,
                     {CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                      3,
                      {24, 10, 6},
                      {96, 960},
                      {width, 4, 3},
                      map == 4 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
      p.bytes[map] = width * 12 * 4;
    }
  }
  p.out = out;
  if (!error) error = cudaFuncSetAttribute(loads, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(LoadSmem));
  if (error) return error;
  loads<<<2, 64, sizeof(LoadSmem)>>>(p);
  return cudaGetLastError();
}

// targets: kStores tensors of 12 rows of 20 words.
extern "C" int run_stores(uint32_t* targets, uint32_t const* in) {
  StoreParams p{};
  for (int i = 0; i < kStores; ++i) {
    auto const type = i == 7   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                      : i == 4 ? CU_TENSOR_MAP_DATA_TYPE_INT32
                               : CU_TENSOR_MAP_DATA_TYPE_UINT32;
    auto const swizzle = i % 2 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE;
    int const error = encode(p.maps[i], targets + i * 240, {type, 2, {20, 12}, {80}, {16, 8}, swizzle});
    if (error) return error;
  }
  stores<<<1, 64>>>(p, in);
  return cudaGetLastError();
}

// out: 6 pieces of 64 words a CTA.
extern "C" int run_bulk(uint32_t const* in, uint32_t* out) {
  bulk<<<2, 64>>>(in, out);
  return cudaGetLastError();
}

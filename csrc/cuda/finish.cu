#include "finish.h"

#include <algorithm>

#include "../core/number_formats.h"
#include "../core/scale_layout.h"
#include "launch.h"
#include "ptx.h"

namespace cudnn_grouped::cuda {
namespace {

inline constexpr int kFinishThreads = 256;

// A thread's place among those that do a part together.
struct Worker {
  int index, count;
};

__device__ __forceinline__ void zero(Worker worker, void* data, int64_t begin, int64_t end) {  // multiples of 16 bytes
  uint4* const at = static_cast<uint4*>(data);
  for (int64_t i = begin / 16 + worker.index; i < end / 16; i += worker.count) at[i] = {};
}

__device__ __forceinline__ void zero_tails(Finish const& p, Worker worker) {
  int64_t const rows = p.experts.rows(), m = p.experts.m;
  for (Finish::Rows const& tensor : p.rows) {
    if (tensor.data) zero(worker, tensor.data, rows * tensor.row_bytes, m * tensor.row_bytes);
  }
  if (!p.sfd_row) return;
  ScaleLayout const by_row = ScaleLayout::of(m, ceil_div(p.d_columns, kQuantBlock));
  ScaleLayout const by_column = ScaleLayout::of(p.d_columns, m / kQuantBlock);
  zero(worker, p.sfd_row, rows / kAtomRows * by_row.block_atoms * kAtomBytes, by_row.bytes());
  if (p.discrete_col_sfd) {
    zero(worker, p.sfd_col, discrete_column_base(rows, p.d_columns, kQuantBlock), by_column.bytes());
    return;
  }
  int64_t const used = rows / (kQuantBlock * kAtomBlocks);
  for (int64_t atom = 0; atom < by_column.row_atoms && used < by_column.block_atoms; ++atom) {
    int64_t const base = atom * by_column.block_atoms * kAtomBytes;
    zero(worker, p.sfd_col, base + used * kAtomBytes, base + by_column.block_atoms * kAtomBytes);
  }
}

__device__ __forceinline__ void add(float& sum, float x) { sum += x; }
__device__ __forceinline__ void add(float2& sum, float2 x) { sum.x += x.x, sum.y += x.y; }

// In order, with kLoads loads in flight: more than two floats each, and the compiler has fewer.
template <int kLoads, class T>
__device__ __forceinline__ T sum_slots(T const* slot, int count, int64_t step) {
  T total{};
#pragma unroll 1
  for (; count > 0; count -= kLoads, slot += kLoads * step) {
    T v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = i < count ? slot[i * step] : T{};
#pragma unroll
    for (T const& part : v) add(total, part);
  }
  return total;
}

__device__ __forceinline__ void sum_dprob(Finish const& p, Worker worker) {
  int const rows = p.experts.rows(), m = p.experts.m;
  for (int row = worker.index; row < m; row += worker.count) {
    auto sum = [&](int first, int last) {
      return sum_slots<8>(p.dprob_slots + int64_t(first) * m + row, row < rows ? last - first : 0, m);
    };
    if (p.documented_dprob) {
      for (int slot = 0; slot < p.documented_slots; ++slot) {
        float const part = sum(slot * p.parts, min((slot + 1) * p.parts, p.n_tiles));
        p.documented_dprob[int64_t(row) * p.documented_slots + slot] = part;
      }
    } else {
      float const total = sum(0, p.n_tiles);
      p.dprob[row] = row < rows && !p.is_new ? p.dprob[row] + total : total;
    }
  }
}

__device__ __forceinline__ void sum_documented_dbias(Finish const& p, Worker worker) {
  constexpr int kParts = int(kDbiasSlotRows) / kSlotRows;
  int64_t const columns = p.d_columns, used = p.experts.rows() / kDbiasSlotRows * columns;
  for (int64_t i = worker.index; i < p.experts.m / kDbiasSlotRows * columns; i += worker.count) {
    float const* slot = p.dbias_slots + i / columns * kParts * columns + i % columns;
    p.documented_dbias[i] = uint16_t(encode_bf16(sum_slots<kParts>(slot, i < used ? kParts : 0, columns)));
  }
}

// A block takes kBiasColumns of an expert, two a thread: warp w sums the slots w, w + kWarps, ...; then the warps' sums
// are added in order.
inline constexpr int kWarps = kFinishThreads / 32, kBiasColumns = 2 * 32;
__device__ __forceinline__ void sum_dbias(Finish const& p, int block) {
  __shared__ float2 partial[kWarps][kBiasColumns / 2];
  int const blocks_of_expert = int(ceil_div<int64_t>(p.d_columns, kBiasColumns));
  int const expert = block / blocks_of_expert, first_column = block % blocks_of_expert * kBiasColumns;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const first = p.experts.start(expert) / kSlotRows + warp, last = p.experts.end(expert) / kSlotRows;
  int const count = first_column + lane * 2 < p.d_columns ? ceil_div(last - first, kWarps) : 0;
  float const* slot = p.dbias_slots + first * p.d_columns + first_column;
  partial[warp][lane] = sum_slots<8>(reinterpret_cast<float2 const*>(slot) + lane, count, kWarps * p.d_columns / 2);
  __syncthreads();
  int const column = threadIdx.x;
  if (column >= kBiasColumns || first_column + column >= p.d_columns) return;
  float total = 0.f;
#pragma unroll
  for (auto const& part : partial) total += reinterpret_cast<float const*>(part)[column];
  uint16_t& out = p.dbias[expert * p.d_columns + first_column + column];
  out = uint16_t(encode_bf16((p.is_new ? 0.f : decode_bf16(out)) + total));
}

// The first blocks sum dbias, which takes longest.
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(__grid_constant__ Finish const p, int dbias_blocks) {
  if (int(blockIdx.x) < dbias_blocks) return sum_dbias(p, blockIdx.x);
  Worker const worker{int((blockIdx.x - dbias_blocks) * blockDim.x + threadIdx.x),
                      int((gridDim.x - dbias_blocks) * blockDim.x)};
  if (p.documented_dbias) sum_documented_dbias(p, worker);
  if (p.dprob_slots) sum_dprob(p, worker);
  zero_tails(p, worker);
}

__global__ void __launch_bounds__(256) widen_kernel(void const* from, DType dtype, float* to, int64_t count) {
  int64_t const i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if (dtype == DType::float32) {
    to[i] = static_cast<float const*>(from)[i];
  } else {
    uint32_t const half = static_cast<uint16_t const*>(from)[i];
    to[i] = dtype == DType::bfloat16 ? decode_bf16(half) : decode_fp16(half);
  }
}

struct Addresses {
  static constexpr int kMost = 256;
  int64_t value[kMost];
};
__global__ void address_kernel(__grid_constant__ Addresses const addresses, int count, int64_t* to) {
  if (int(threadIdx.x) < count) to[threadIdx.x] = addresses.value[threadIdx.x];
}

__global__ void map_kernel(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const none,
                           int64_t const* addresses, Experts experts, CUtensorMap* maps) {
  __shared__ alignas(128) CUtensorMap copy;
  int const expert = blockIdx.x;
  int64_t const address = experts.start(expert) < experts.end(expert) ? addresses[expert] : 0;
  bool const usable = is_usable(address);
  CUtensorMap const& from = usable ? map : none;
  reinterpret_cast<uint32_t*>(&copy)[threadIdx.x] = reinterpret_cast<uint32_t const*>(&from)[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0 && usable) {
    ptx::set_map_address(ptx::shared_address(&copy), reinterpret_cast<void const*>(address));
  }
  __syncwarp();
  ptx::publish_map(maps + expert, ptx::shared_address(&copy));
}

}  // namespace

void finish(Finish const& p, int blocks, cudaStream_t stream) {
  int64_t const columns = ceil_div<int64_t>(p.d_columns, kBiasColumns);
  int const dbias_blocks = p.dbias_slots && !p.documented_dbias ? int(columns * p.experts.count) : 0;
  launch(finish_kernel, dbias_blocks + 2 * blocks, kFinishThreads, 0, stream, p, dbias_blocks);
}

void widen(void const* from, DType dtype, float* to, int64_t count, cudaStream_t stream) {
  launch(widen_kernel, unsigned(ceil_div<int64_t>(count, 256)), 256, 0, stream, from, dtype, to, count);
}

void write_addresses(std::vector<int64_t> const& addresses, int64_t* to, cudaStream_t stream) {
  for (size_t first = 0; first < addresses.size(); first += Addresses::kMost) {
    int const count = int(std::min<size_t>(Addresses::kMost, addresses.size() - first));
    Addresses part;
    std::copy_n(addresses.begin() + first, count, part.value);
    launch(address_kernel, 1, Addresses::kMost, 0, stream, part, count, to + first);
  }
}

void make_expert_maps(CUtensorMap const& map, CUtensorMap const& none, int64_t const* addresses, Experts const& experts,
                      CUtensorMap* maps, cudaStream_t stream) {
  launch(map_kernel, experts.count, 32, 0, stream, map, none, addresses, experts, maps);
}

}  // namespace cudnn_grouped::cuda
